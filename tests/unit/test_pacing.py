"""Delays with jitter, and limits on rates."""

import math
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.pacing import Backoff, TokenBucket, random_delay_s

SECONDS = st.floats(1e-6, 1e6)
BACKOFFS = st.builds(Backoff, SECONDS, SECONDS, jitter=st.floats(0.0, 1.0))
RATES = st.floats(1.0, 1e10)


def least(least_s: float, most_s: float) -> float:
    return least_s


def most(least_s: float, most_s: float) -> float:
    return most_s


@given(BACKOFFS, st.integers(0, 100_000))
def test_the_draw_decides_within_the_jitter(backoff: Backoff, failures: int) -> None:
    longest_s = backoff.longest_s(failures)
    assert backoff.delay_s(failures, most) == longest_s
    assert math.isclose(
        backoff.delay_s(failures, least), longest_s * (1 - backoff.jitter), abs_tol=1e-9
    )


@given(BACKOFFS, st.integers(0, 100_000))
def test_delays_double_from_the_first_to_the_longest(backoff: Backoff, failures: int) -> None:
    now, later = backoff.longest_s(failures), backoff.longest_s(failures + 1)
    assert backoff.longest_s(0) == min(backoff.first_s, backoff.most_s)
    assert later == min(2 * now, backoff.most_s)


@given(BACKOFFS)
def test_after_the_doublings_and_not_before_a_delay_is_the_longest(backoff: Backoff) -> None:
    longest = backoff.longest_s(backoff.doublings)
    assert math.isclose(longest, backoff.most_s)
    if backoff.doublings:
        assert backoff.longest_s(backoff.doublings - 1) < backoff.most_s


@given(st.floats(-1e6, 1e6), st.floats(0.0, 1e6))
def test_a_random_delay_is_within_its_limits(least_s: float, more_s: float) -> None:
    most_s = least_s + more_s
    assert least_s <= random_delay_s(least_s, most_s) <= most_s


def test_programs_that_fail_together_do_not_come_back_together() -> None:
    delays = [Backoff(1.0, 1.0).delay_s(0) for _ in range(1000)]
    assert 0.5 <= min(delays) < 0.55 < 0.95 < max(delays) <= 1.0
    assert 0.7 < fmean(delays) < 0.8


@given(
    rate=RATES,
    burst_s=st.floats(0.0, 100.0),
    takes=st.lists(
        st.tuples(st.integers(0, 1 << 24), st.floats(0.0, 10.0)), min_size=1, max_size=50
    ),
)
def test_no_more_than_the_rate_is_taken(
    rate: float, burst_s: float, takes: list[tuple[int, float]]
) -> None:
    """In any stretch of time: its length times the rate, a burst, and the last ones taken."""
    now, log = 100.0, []
    bucket = TokenBucket(rate, rate * burst_s, now)
    for tokens, later_s in takes:
        now += later_s
        wait_s = bucket.take(tokens, now)
        assert wait_s >= 0.0
        log.append((now, tokens))
        now += wait_s
    for i in range(len(log)):
        for j in range(i, len(log)):
            taken = sum(tokens for _, tokens in log[i:j])  # all but the last
            limit = rate * (burst_s + log[j][0] - log[i][0])
            assert taken <= limit * (1 + 1e-6) + 1e-3 * rate


@given(RATES, st.floats(0.0, 100.0), st.lists(st.integers(1, 1 << 24), min_size=1, max_size=50))
def test_the_rate_is_used(rate: float, burst_s: float, takes: list[int]) -> None:
    """Tokens that are taken without a pause last as long as the rate says, and no longer."""
    start = now = 7.0
    bucket = TokenBucket(rate, rate * burst_s, now)
    for tokens in takes:
        now += bucket.take(tokens, now)
    lasts = sum(takes) / rate
    assert max(0.0, lasts - burst_s) * (1 - 1e-6) - 1e-6 <= now - start <= lasts * (1 + 1e-6) + 1e-6


@given(
    rate=st.floats(1e-3, 1e3),
    burst=st.integers(1, 100),
    gaps=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=50),
)
def test_tokens_that_are_waited_for_are_there(rate: float, burst: int, gaps: list[float]) -> None:
    """A user that waits for each token before it takes it never owes one."""
    now = 100.0
    bucket = TokenBucket(rate, burst, now)
    for gap in gaps:
        now += gap
        now += bucket.wait_s(1, now)
        assert bucket.wait_s(1, now) * rate < 1e-6
        assert bucket.take(1, now) * rate < 1e-6


def test_a_full_bucket_gives_a_burst_and_no_more() -> None:
    bucket = TokenBucket(rate=1.0, burst=3, now=0.0)
    assert [bucket.take(1, 50.0) for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]


def test_a_clock_that_goes_back_gives_no_tokens_twice() -> None:
    bucket = TokenBucket(rate=1.0, burst=1, now=0.0)
    assert bucket.take(1, 10.0) == 0.0
    assert bucket.wait_s(1, 5.0) == 1.0
    assert bucket.wait_s(1, 10.0) == 1.0


def test_without_a_limit_there_is_no_wait() -> None:
    bucket = TokenBucket(0.0, 0.0, 0.0)
    assert bucket.take(1 << 60, 0.0) == 0.0
    assert bucket.wait_s(1 << 60, 0.0) == 0.0
