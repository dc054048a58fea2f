import pytest

from dlrover_py.master.core.rendezvous import (
    CandidateNode,
    Counts,
    Form,
    RoundMembers,
    Size,
    Wait,
    arrange,
    verdict,
)
from dlrover_py.protocol.names import NodeId, Round, id_key


@pytest.mark.parametrize(
    ("desired", "minimum", "unit", "nodes", "fits"),
    [
        (4, 2, 1, 9, 4),
        (4, 2, 1, 3, 3),
        (4, 2, 1, 1, 0),
        (4, 2, 2, 3, 2),
        (4, 4, 2, 3, 0),
        (8, 2, 4, 7, 4),
        (2, 3, 1, 9, 0),
    ],
)
def test_a_round_is_the_largest_multiple_within_bounds(
    desired: int, minimum: int, unit: int, nodes: int, fits: int
) -> None:
    assert Size(desired, minimum, unit).fit(nodes) == fits


SIZE = Size(desired=4, minimum=2, unit=1)


def decide(ready: int, *, busy: int = 0, near: int = 0, now: float = 0.0) -> Form | Wait:
    counts = Counts(ready, busy, near)
    return verdict(SIZE, counts, opened_at=0.0, now=now, wait_s=10.0)


def test_a_full_round_is_formed_at_once() -> None:
    assert decide(4) == decide(5) == decide(4, near=3) == Form(4)


def test_who_was_told_something_is_waited_for() -> None:
    assert isinstance(decide(4, busy=1), Wait)


def test_a_near_node_is_waited_for_but_not_for_ever() -> None:
    waits = decide(3, near=1, now=9.75)
    assert isinstance(waits, Wait)
    assert waits.until == 10.0
    assert decide(3, near=1, now=10.0) == Form(3)


def test_nobody_is_waited_for_who_cannot_make_the_round_larger() -> None:
    counts = Counts(ready=2, busy=0, near=1)
    answer = verdict(Size(4, 2, 2), counts, opened_at=0, now=0, wait_s=10)
    assert answer == Form(2)


def test_below_the_minimum_there_is_no_deadline() -> None:
    for near in (0, 1):
        waits = decide(1, near=near, now=99)
        assert isinstance(waits, Wait)
        assert waits.until is None


def ranks(
    old: str, now: str, size: int, zones: dict[str, str] | None = None, nproc: int = 1
) -> str:
    def topology(node: str) -> tuple[str, ...]:
        return (zones[node],) if zones else ()

    candidates = [CandidateNode(NodeId(n), 1, nproc, topology(n)) for n in now]
    previous = [(NodeId(n), topology(n)) for n in old]
    return "".join(m.node for m in arrange(candidates, size, previous))


@pytest.mark.parametrize(
    ("old", "now", "size", "new"),
    [
        ("", "cab", 3, "abc"),
        ("abc", "cba", 3, "abc"),
        ("abc", "acd", 3, "adc"),  # the newcomer takes the hole
        ("abc", "bc", 2, "bc"),
        ("abc", "bcd", 3, "dbc"),  # rank 0's place too
        ("abc", "abcd", 4, "abcd"),
        ("abcd", "abcd", 2, "ab"),
        ("abc", "bcd", 2, "bc"),  # no survivor makes room for a newcomer
        ("abcd", "bde", 4, "ebd"),
    ],
)
def test_ranks_are_stable(old: str, now: str, size: int, new: str) -> None:
    assert ranks(old, now, min(size, len(now))) == new


def test_a_lost_node_is_replaced_by_its_nearest() -> None:
    zones = {"a": "z1", "b": "z2", "c": "z1", "d": "z1", "x": "z1", "y": "z2"}
    assert ranks("abcd", "acxy", 4, zones) == "aycx"
    assert ranks("dbca", "cxya", 4, zones) == "xyca"


def test_newcomers_stand_beside_their_neighbours() -> None:
    zones = {"a": "z2", "b": "z1", "c": "z2", "d": "z1"}
    assert ranks("", "abcd", 4, zones) == "bdac"


def test_offsets_count_the_workers_before() -> None:
    candidates = [CandidateNode(NodeId(n), 1, p) for n, p in (("n0", 2), ("n1", 3), ("n2", 1))]
    members = arrange(candidates, 3)
    assert [m.rank_offset for m in members] == [0, 2, 5]
    world = RoundMembers(round=Round(1), members=members, master_addr="h", master_port=1)
    assert world.world_size == 6
    assert world.has(NodeId("n1"), 1)
    assert not world.has(NodeId("n1"), 2)
    assert not world.has(NodeId("n9"), 1)


def test_numbers_in_names_are_numbers() -> None:
    names = [NodeId(n) for n in ("n10", "n2", "b", "n1")]
    assert sorted(names, key=id_key) == ["b", "n1", "n2", "n10"]
