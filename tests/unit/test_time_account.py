"""Where the time of a job went: whatever happens, all buckets add up to the time that passed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.events import Slept
from dlrover_py.master.core.time_account import TimeAccount
from dlrover_py.protocol.status import JobStatus, TimeBucket
from tests.builders import WALL, Bench, running

BUCKETS = st.sampled_from(list(TimeBucket))
SECONDS = st.floats(0, 1e6)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), SECONDS, BUCKETS),
        st.tuples(st.just("move"), BUCKETS, BUCKETS, st.floats(-1e6, 1e6)),
        st.tuples(st.just("take"), BUCKETS, st.dictionaries(BUCKETS, SECONDS, max_size=3)),
        st.tuples(st.just("round")),
        st.tuples(st.just("sleep"), SECONDS, SECONDS),
        st.tuples(st.just("master")),
    ),
    max_size=60,
)


@given(ACTIONS, SECONDS)
def test_all_buckets_add_up_to_the_time_that_passed(actions: list[tuple], rest: float) -> None:  # type: ignore[type-arg]
    account, now = TimeAccount(at=1e9), 1e9
    for action in actions:
        match action:
            case ("pass", seconds, bucket):
                now += seconds
                account.advance(now, bucket)
            case ("sleep", awake, asleep):
                account.sleep(now + awake, asleep)
                now += awake + asleep
            case ("move", source, target, seconds):
                account.move(source, target, seconds)
            case ("take", source, totals):
                account.take(source, totals)
            case ("round",):
                account.reported.clear()
            case ("master",):
                account = TimeAccount.model_validate_json(account.model_dump_json())
        assert all(seconds >= 0 for seconds in account.seconds.values())
    assert sum(account.until(now + rest).values()) == pytest.approx(
        now + rest - 1e9, rel=1e-9, abs=1e-3
    )


def test_a_clock_that_was_set_back_counts_no_time_and_does_not_stop_the_account() -> None:
    account = TimeAccount(at=100.0)
    account.advance(90.0, TimeBucket.PRODUCTIVE)
    account.advance(95.0)
    assert account.until(96.0) == {TimeBucket.PRODUCTIVE: 6.0}


def test_workers_report_totals_so_a_report_that_comes_twice_counts_once() -> None:
    account = TimeAccount(at=0.0, bucket=TimeBucket.PRODUCTIVE)
    account.advance(10.0)
    for total in (2.0, 2.0, 1.0, 3.0):
        account.take(TimeBucket.PRODUCTIVE, {TimeBucket.DATA_LOADING: total})
    assert account.until(10.0) == {TimeBucket.PRODUCTIVE: 7.0, TimeBucket.DATA_LOADING: 3.0}


def test_no_more_is_moved_than_is_there() -> None:
    account = TimeAccount(at=0.0, bucket=TimeBucket.PRODUCTIVE)
    account.advance(4.0)
    account.move(TimeBucket.PRODUCTIVE, TimeBucket.WASTED_PROGRESS, 9.0)
    assert account.until(4.0) == {TimeBucket.WASTED_PROGRESS: 4.0}


def status(bench: Bench, asleep_s: float) -> JobStatus:
    """Return the status; the wall clock has gone on while the machine slept."""
    return bench.job.status(bench.now, WALL + bench.now + asleep_s)


def test_a_sleep_of_the_machine_is_no_work_and_the_job_ends_when_it_ends() -> None:
    bench = running()
    for step in range(1, 61):
        for agent in bench.living():
            agent.reach(step)
        bench.pass_time(1.0)
    before = status(bench, 0.0).goodput
    bench.step(Slept(8 * 3600.0))
    after = status(bench, 8 * 3600.0).goodput
    assert before is not None
    assert after is not None
    assert after.seconds["suspended"] == pytest.approx(8 * 3600.0)
    assert after.seconds["productive"] == pytest.approx(before.seconds["productive"], abs=1.0)
    assert after.wall_s == pytest.approx(before.wall_s + 8 * 3600.0, abs=1.0)
    assert after.share == pytest.approx(before.share, abs=0.05)
    assert bench.job.live.steady_wall == pytest.approx(WALL + bench.now + 8 * 3600.0)
