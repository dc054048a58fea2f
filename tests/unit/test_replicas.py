"""What of a peer is copied and where to, and how fast."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_agent.replicas import (
    BURST_S,
    COPIES,
    Bucket,
    Found,
    Plan,
    Pull,
    Replicas,
    newest,
    plan,
)
from dlrover_py import arena
from dlrover_py.arena import Contents, Slot
from dlrover_py.depot import Link, Overtaken
from dlrover_py.protocol.checkpoint import PAGE, Layout, Region, Summary
from dlrover_py.protocol.errors import TransientError

NOTHING = Region(0, 0, 0)


def summary(rank: int, step: int, *, round: int = 1, lap: int = 0, part: str = "") -> Summary:
    return Summary(
        job="u1",
        step=step,
        round=round,
        lap=lap,
        world=4,
        rank=rank,
        part=part or f"p{rank}",
        fill=f"{rank}-{round}-{lap}-{step}",
        size=1000,
        private_at=500,
        table=NOTHING,
        digests=NOTHING,
        objects=NOTHING,
    )


def carried_out(todo: Plan, mine: list[Found]) -> list[Found]:
    """What the arena holds once it was done."""
    held = dict(mine)
    for pull in todo.pulls:
        held[pull.to] = replace(pull.summary, hollow=pull.hollow)
    for name in todo.spare:
        held.pop(name, None)
    for name, persist in todo.flags:
        held[name] = replace(held[name], persist=persist)
    return sorted(held.items())


def copies(held: list[Found]) -> list[Found]:
    return [(name, s) for name, s in held if name.startswith("peer-")]


ids = st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 4))


@st.composite
def memories(draw: st.DrawFn) -> list[Found]:
    """Of a node with some workers: three slots each, in any state that saves may leave."""
    first, nproc = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    same = draw(st.booleans())
    found = []
    for place in range(nproc):
        for index, (round, lap, step) in enumerate(draw(st.lists(ids, max_size=3, unique=True))):
            one = summary(first + place, step, round=round, lap=lap, part="all" if same else "")
            found.append((f"{place}.{index}", replace(one, persist=draw(st.booleans()))))
    return found


@given(st.lists(memories(), min_size=1, max_size=8), memories())
def test_the_newest_whole_set_is_kept_until_the_next_one_is_whole(
    peers: list[list[Found]], own: list[Found]
) -> None:
    held = list(own)
    for theirs in peers:
        todo = plan(theirs, held)
        before = copies(held)
        kept = newest((s.rank, s) for _, s in before)
        # No place of what is whole here is written to, and none twice, and none of our own.
        touched = [pull.to for pull in todo.pulls]
        assert len(set(touched)) == len(touched)
        assert not {name for name, s in before if s.age == kept} & set(touched)
        assert all(name.startswith("peer-") for name in (*touched, *todo.spare))
        for pull in todo.pulls:
            rank, _, index = pull.to.removeprefix("peer-").partition(".")
            assert int(rank) == pull.summary.rank
            assert int(index) < COPIES
            assert (pull.name, pull.summary) in theirs
        held = carried_out(todo, held)
        wanted = newest((name.split(".")[0], s) for name, s in theirs)
        if wanted is not None:
            here = {s.rank: s for _, s in copies(held) if s.age == wanted}
            assert set(here) >= {s.rank for _, s in theirs if s.age == wanted}
            # What is hollow is whole by what else was in this memory.
            whole = {(s.age, s.part) for _, s in held if not s.hollow}
            for pull in todo.pulls:
                assert not pull.hollow or (wanted, pull.summary.part) in whole
            for _, theirs_of in theirs:
                twin = here.get(theirs_of.rank)
                if twin is not None and theirs_of.age == wanted:
                    assert twin.persist == theirs_of.persist
        settled = plan(theirs, held)
        assert settled == Plan()  # there is nothing left to do


@given(memories(), memories(), st.data())
def test_a_pull_that_breaks_off_leaves_what_was_whole(
    first: list[Found], then: list[Found], data: st.DataObject
) -> None:
    held = carried_out(plan(first, []), [])
    kept = newest((s.rank, s) for _, s in held)
    todo = plan(then, held)
    done = data.draw(st.integers(0, len(todo.pulls)))
    broken = dict(carried_out(Plan(todo.pulls[:done]), held))
    if done < len(todo.pulls):
        broken.pop(todo.pulls[done].to, None)  # it was being filled
    assert {n: s for n, s in held if s.age == kept}.items() <= broken.items()


def test_half_a_set_is_not_wanted() -> None:
    """Place 1 has not staged step 3 yet."""
    theirs = [("0.0", summary(0, 2)), ("0.1", summary(0, 3)), ("1.0", summary(1, 2))]
    assert [(pull.name, pull.to) for pull in plan(theirs, []).pulls] == [
        ("0.0", "peer-0.0"),
        ("1.0", "peer-1.0"),
    ]


def test_what_a_script_has_staged_last_is_the_newest() -> None:
    """It went back from step 9 to step 3."""
    theirs = [("0.0", summary(0, 9)), ("0.1", summary(0, 3, lap=1))]
    assert [pull.name for pull in plan(theirs, []).pulls] == ["0.1"]


def test_where_the_rest_is_here_only_what_is_private_is_pulled() -> None:
    theirs = [("0.0", summary(2, 5, part="all")), ("1.0", summary(3, 5, part="all"))]
    own = [("0.0", summary(0, 5, part="all"))]
    assert [pull.hollow for pull in plan(theirs, own).pulls] == [True, True]
    assert [pull.hollow for pull in plan(theirs, []).pulls] == [False, True]
    other = [("0.0", summary(0, 5, round=2, part="all"))]
    assert [pull.hollow for pull in plan(theirs, other).pulls] == [False, True]
    hollow = [("peer-9.0", replace(own[0][1], rank=9, hollow=True))]
    assert [pull.hollow for pull in plan(theirs, hollow).pulls] == [False, True]


def test_a_peers_replicas_are_not_copied_on() -> None:
    assert plan([("peer-4.0", summary(4, 5))], []) == Plan()


def test_replicas_of_an_earlier_peer_go_when_the_new_ones_are_whole() -> None:
    held = [("0.0", summary(3, 1, round=2)), ("peer-0.0", summary(0, 9))]
    held += [("peer-1.0", summary(1, 9))]
    todo = plan([("0.0", summary(2, 1, round=2))], held)
    assert [pull.to for pull in todo.pulls] == ["peer-2.0"]
    assert todo.spare == ("peer-0.0", "peer-1.0")
    assert plan([], held) == Plan()  # a new peer that has nothing yet


def test_a_lost_nodes_part_stays_until_the_next_round_has_something_of_its_own() -> None:
    """The new peer still holds what the last round has staged, or only it has gone on."""
    held = [("0.0", summary(3, 9)), ("peer-0.0", summary(0, 9))]
    for theirs in (summary(2, 9), summary(2, 1, round=2)):
        assert plan([("0.0", theirs)], held).spare == ()


def test_all_nodes_copy_the_same_set_where_ranks_have_different_parts() -> None:
    named = replace(summary(2, 5), copy=True)
    theirs = [("0.0", summary(2, 6)), ("0.1", named), ("0.2", summary(2, 7))]
    todo = plan(theirs, [])
    assert [pull.name for pull in todo.pulls] == ["0.1"]
    assert todo.told == (1, 0, 5)
    held = carried_out(todo, [])
    assert plan(theirs, held) == Plan(told=(1, 0, 5)), "until its workers have heard of it"
    theirs[1] = ("0.1", replace(named, copied=True))
    assert plan(theirs, held) == Plan()
    theirs[2] = ("0.2", replace(summary(2, 7), copy=True))
    assert [pull.name for pull in plan(theirs, held).pulls] == ["0.2"]


def mark(rank: int, step: int, *, round: int = 1, copied: bool = False) -> Summary:
    return replace(summary(rank, step, round=round), copy=True, copied=copied)


def test_the_first_saves_of_a_round_replace_nothing_that_all_have_copied() -> None:
    """Until all have copied one of that round."""
    held = [("0.0", mark(3, 5, copied=True)), ("peer-2.0", mark(2, 5)), ("peer-2.1", mark(2, 7))]
    theirs = [("0.0", mark(2, 5, copied=True)), ("0.1", summary(2, 1, round=2))]
    assert plan(theirs, held) == Plan(), "step 7 was given up, for not all had it"
    theirs.append(("0.2", mark(2, 2, round=2)))
    todo = plan(theirs, held)
    assert [(pull.name, pull.to) for pull in todo.pulls] == [("0.2", "peer-2.1")]
    held = carried_out(todo, held)
    held[0] = ("0.0", mark(3, 3, round=2))
    theirs[0] = ("0.0", mark(2, 3, round=2))
    todo = plan(theirs, held)
    assert [(pull.name, pull.to) for pull in todo.pulls] == [("0.0", "peer-2.0")], "2 is copied"


def test_nothing_is_copied_of_a_new_peer_before_it_has_marked_something() -> None:
    held = [("0.0", mark(3, 5, copied=True)), ("peer-2.0", mark(2, 5)), ("peer-2.1", mark(2, 4))]
    theirs = [("0.0", summary(2, 1, round=2)), ("0.1", summary(2, 2, round=2))]
    assert plan(theirs, held) == Plan()
    held[0] = ("0.0", mark(3, 3, round=2))
    (pull,) = plan(theirs, held).pulls
    assert (pull.name, pull.to) == ("0.1", "peer-2.1"), "it has no memory for marks"


def test_a_lost_nodes_part_stays_until_all_have_copied_something_newer() -> None:
    held = [("0.0", mark(3, 2, round=2)), ("peer-0.0", mark(0, 9))]
    theirs = [("0.0", mark(2, 2, round=2))]
    todo = plan(theirs, held)
    assert (todo.spare, todo.last) == ((), ("peer-0.0",)), "unless the memory does not suffice"
    held.append(("0.1", mark(3, 3, round=2)))
    theirs.append(("0.1", mark(2, 3, round=2)))
    assert plan(theirs, held).spare == ("peer-0.0",)


def test_what_the_peer_has_given_up_is_not_kept_for_a_mark_here() -> None:
    held = [("0.0", mark(3, 5, copied=True)), ("0.1", mark(3, 16))]
    held += [("peer-2.0", mark(2, 5)), ("peer-2.1", mark(2, 16))]
    theirs = [("0.0", mark(2, 5, copied=True)), ("0.1", mark(2, 18))]
    assert [pull.to for pull in plan(theirs, held).pulls] == ["peer-2.1"]


def test_a_node_and_its_peer_that_are_both_new_wait_for_marks() -> None:
    """Unless both have the same part."""
    held = [("0.0", summary(3, 1, round=2)), ("peer-2.0", mark(2, 5)), ("peer-0.0", mark(0, 5))]
    theirs = [("0.0", summary(2, 1, round=2))]
    assert plan(theirs, held) == Plan()
    same = [("0.0", summary(2, 1, round=2, part="p3"))]
    assert [pull.to for pull in plan(same, held).pulls] == ["peer-2.1"]


def test_what_is_not_marked_goes_first_where_the_memory_does_not_suffice() -> None:
    held = [("0.0", mark(3, 9)), ("0.1", mark(3, 2, round=2)), ("peer-0.0", mark(0, 9))]
    held += [("peer-0.1", summary(0, 11))]
    assert plan([("0.0", mark(2, 2, round=2))], held).last == ("peer-0.1", "peer-0.0")


def test_a_set_is_copied_once_all_places_have_it() -> None:
    theirs = [("0.0", mark(0, 3)), ("0.1", summary(0, 2)), ("1.0", summary(1, 2))]
    todo = plan(theirs, [])
    assert ([pull.name for pull in todo.pulls], todo.told) == (["0.0"], None)
    theirs[2] = ("1.0", mark(1, 3))
    assert plan(theirs, carried_out(todo, [])).told == (1, 0, 3)


def test_marks_of_a_place_that_nobody_has_any_more_do_not_count() -> None:
    """There were two workers on a node in round 1; now it has one, and all nodes have the same."""
    theirs = [("0.0", summary(0, 1, round=2)), ("1.0", mark(1, 9))]
    held = [("0.0", summary(3, 1, round=2)), ("1.0", mark(3, 9))]
    assert [pull.name for pull in plan(theirs, held).pulls] == ["0.0"]


@given(
    rate=st.floats(1.0, 1e10),
    takes=st.lists(
        st.tuples(st.integers(0, 1 << 24), st.floats(0.0, 10.0)), min_size=1, max_size=50
    ),
)
def test_no_more_than_the_bandwidth_is_taken(rate: float, takes: list[tuple[int, float]]) -> None:
    """In any stretch of time: its length times the rate, a burst, and the chunk it ends with."""
    now, log = 100.0, []
    bucket = Bucket(rate, now)
    for nbytes, later_s in takes:
        now += later_s
        wait_s = bucket.take(nbytes, now)
        assert wait_s >= 0.0
        log.append((now, nbytes))
        now += wait_s
    for i in range(len(log)):
        for j in range(i, len(log)):
            taken = sum(nbytes for _, nbytes in log[i:j])  # all but the last
            most = rate * (BURST_S + log[j][0] - log[i][0])
            assert taken <= most * (1 + 1e-6) + 1e-3 * rate


@given(st.floats(1.0, 1e10), st.lists(st.integers(1, 1 << 24), min_size=1, max_size=50))
def test_the_bandwidth_is_used(rate: float, takes: list[int]) -> None:
    """Who takes without a pause waits as long as the bytes last, and no longer."""
    start = now = 7.0
    bucket = Bucket(rate, now)
    for nbytes in takes:
        now += bucket.take(nbytes, now)
    lasts = sum(takes) / rate
    assert max(0.0, lasts - BURST_S) * (1 - 1e-6) - 1e-6 <= now - start <= lasts * (1 + 1e-6) + 1e-6


def test_without_a_limit_nobody_waits() -> None:
    assert Bucket(0.0, 0.0).take(1 << 60, 0.0) == 0.0


@pytest.mark.parametrize("hollow", [False, True])
def test_memory_is_not_taken_while_a_worker_takes_some(tmp_path: Path, hollow: bool) -> None:
    """Both would count on what is free now."""
    theirs = replace(summary(0, 5), size=3 * PAGE, private_at=2 * PAGE)
    pull = Pull("0.0", theirs, "peer-0.0", hollow)
    found = Contents(theirs, Layout([]), (), {})
    asked = threading.Event()

    class Answering(Link):
        """A peer, asked for bytes only once there is memory for them."""

        def __init__(self) -> None:
            self.where = "a peer"

        def read_all(self, *_: object, **__: object) -> Iterator[memoryview]:
            asked.set()
            raise Overtaken("it is not there any more")

    def copy(replicas: Replicas) -> None:
        with Slot(tmp_path / pull.to, write=True) as slot, suppress(Overtaken):
            replicas._fill(Answering(), pull, slot, found)

    def replicas() -> Replicas:
        return Replicas(tmp_path, "u1", "secret", changed=lambda: None)

    ending = replicas()
    ending._ended.set()
    with arena.turn(tmp_path):
        with pytest.raises(TransientError, match="this agent ends"):
            copy(ending)
        assert (tmp_path / pull.to).stat().st_blocks == 0
        waiting = threading.Thread(target=copy, args=(replicas(),))
        waiting.start()
        assert not asked.is_set()
    waiting.join(30)
    assert asked.is_set()
    assert (tmp_path / pull.to).stat().st_size == 3 * PAGE


def test_a_replica_of_a_smaller_part_takes_less_memory(tmp_path: Path) -> None:
    """Who reads what was there keeps it."""
    theirs = replace(summary(0, 5), size=3 * PAGE, private_at=2 * PAGE)

    class Answering(Link):
        def __init__(self) -> None:
            self.where = "a peer"

        def contents(self, *_: object) -> Contents:
            return Contents(theirs, Layout([]), (), {})

        def read_all(self, *_: object, **__: object) -> Iterator[memoryview]:
            raise Overtaken("it is not there any more")

    path = tmp_path / "peer-0.0"
    with Slot(path, write=True) as before:
        before.reserve(2 * arena.SURPLUS)
        one = Replicas(tmp_path, "u1", "secret", changed=lambda: None)
        with pytest.raises(Overtaken):
            one._pull(Answering(), Pull("0.0", theirs, path.name, False))
        assert path.stat().st_size == 3 * PAGE
        assert before.size == 2 * arena.SURPLUS


def test_what_goes_is_not_flagged_as_well() -> None:
    """Rank 0 has gone from the peer but for an old part, which is to be persisted."""
    theirs = [("0.0", replace(summary(0, 9), persist=True)), ("1.0", summary(2, 1, round=2))]
    held = [("0.0", summary(3, 1, round=2)), ("peer-0.0", summary(0, 9))]
    todo = plan(theirs, held)
    assert todo.spare == ("peer-0.0",)
    assert todo.flags == ()
