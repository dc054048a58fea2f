"""How many pushes of others come between a pull and a push."""

from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.status import STALENESS
from dlrover_py.ps.bucket_state import BucketState
from dlrover_py.ps.staleness import CLASSES, Staleness

BUCKETS = st.sets(st.integers(0, 2), min_size=1)
STEPS = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.booleans(), BUCKETS))


def counts(meter: Staleness) -> list[int]:
    return [round(rate) for rate in meter.per_s(1.0)]


@given(STEPS)
def test_a_push_is_as_stale_as_the_pushes_of_others_since_its_pull(
    steps: list[tuple[bytes, bool, set[int]]],
) -> None:
    meter, states = Staleness(), [BucketState(bucket) for bucket in range(3)]
    history: list[list[bytes]] = [[], [], []]
    pulled: dict[tuple[bytes, int], int] = {}
    expected = [0] * CLASSES
    for worker, pushes, buckets in steps:
        if not pushes:
            meter.pulled(worker, buckets, states)
            pulled |= {(worker, bucket): len(history[bucket]) for bucket in buckets}
            continue
        others = [
            sum(one != worker for one in history[bucket][pulled[worker, bucket] :])
            for bucket in buckets
            if (worker, bucket) in pulled
        ]
        if others:
            expected[min(max(others).bit_length(), CLASSES - 1)] += 1
        meter.pushed(worker, buckets, states)
        for bucket in buckets:
            states[bucket].version += 1
            history[bucket].append(worker)
    assert counts(meter) == expected
    assert counts(meter) == [0] * CLASSES, "they are those since the last call"


def test_the_classes_are_those_that_people_see() -> None:
    assert len(STALENESS) == CLASSES
    least = [int(name.rstrip("+").split("-")[0]) for name in STALENESS]
    for stale in range(200):
        meter, states = Staleness(), [BucketState(0)]
        meter.pulled(b"a", [0], states)
        states[0].version += stale
        meter.pushed(b"a", [0], states)
        found = counts(meter).index(1)
        assert least[found] <= stale
        assert found == CLASSES - 1 or stale < least[found + 1]


def test_connections_that_pulled_long_ago_are_forgotten() -> None:
    meter, states = Staleness(max_seen=6), [BucketState(bucket) for bucket in range(3)]
    for route in (b"old", b"mid", b"mid", b"new"):
        meter.pulled(route, range(3), states)
    meter.pushed(b"old", [0], states)
    assert sum(counts(meter)) == 0
    for route in (b"mid", b"new"):
        meter.pushed(route, [0], states)
        assert sum(counts(meter)) == 1


def test_rows_that_went_back_to_a_cut_make_no_push_stale() -> None:
    meter, states = Staleness(), [BucketState(0, version=9)]
    meter.pulled(b"a", [0], states)
    states[0].version = 1
    meter.pushed(b"a", [0], states)
    assert counts(meter)[0] == 1
