"""What of a peer is copied and where to, and how fast."""

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_agent.checkpoint.replication import (
    SLOTS_PER_RANK,
    NamedHeader,
    ReplicaPull,
    ReplicationPlan,
    Replicator,
    newest,
    plan,
)
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot, SlotContents
from dlrover_py.checkpoint.transfer import SlotOverwrittenError, TransferConnection
from dlrover_py.protocol.agents import ReplicationPeer
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import PAGE, Layout, SlotHeader, SlotRegion
from tests.ids import checkpoint_id

NOTHING = SlotRegion(0, 0, 0)


def header(
    rank: int, step: int, *, round: int = 1, timeline: int = 0, part: str = ""
) -> SlotHeader:
    return SlotHeader(
        job="u1",
        step=Step(step),
        round=Round(round),
        timeline=Timeline(timeline),
        world=4,
        rank=rank,
        part=part or f"p{rank}",
        write_id=f"{rank}-{round}-{timeline}-{step}",
        size=1000,
        private_offset=500,
        table=NOTHING,
        digests=NOTHING,
        objects=NOTHING,
    )


def carried_out(todo: ReplicationPlan, mine: list[NamedHeader]) -> list[NamedHeader]:
    """What the pool holds once it was done."""
    held = dict(mine)
    for pull in todo.pulls:
        held[pull.to] = replace(pull.header, private_only=pull.private_only)
    for name in todo.spare:
        held.pop(name, None)
    for name, persist in todo.flags:
        held[name] = replace(held[name], persist=persist)
    return sorted(held.items())


def copies(held: list[NamedHeader]) -> list[NamedHeader]:
    return [(name, s) for name, s in held if name.startswith("peer-")]


ids = st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 4))


@st.composite
def memories(draw: st.DrawFn) -> list[NamedHeader]:
    """Of a node with some workers: three slots each, in any state that saves may leave."""
    first, nproc = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    same = draw(st.booleans())
    found = []
    for place in range(nproc):
        for index, (round, timeline, step) in enumerate(
            draw(st.lists(ids, max_size=3, unique=True))
        ):
            one = header(
                first + place, step, round=round, timeline=timeline, part="all" if same else ""
            )
            found.append((f"{place}.{index}", replace(one, persist=draw(st.booleans()))))
    return found


@given(st.lists(memories(), min_size=1, max_size=8), memories())
def test_the_newest_whole_set_is_kept_until_the_next_one_is_whole(
    peers: list[list[NamedHeader]], own: list[NamedHeader]
) -> None:
    held = list(own)
    for theirs in peers:
        todo = plan(theirs, held)
        before = copies(held)
        kept = newest((s.rank, s) for _, s in before)
        # No place of what is whole here is written to, and none twice, and none of our own.
        touched = [pull.to for pull in todo.pulls]
        assert len(set(touched)) == len(touched)
        assert not {name for name, s in before if s.id == kept} & set(touched)
        assert all(name.startswith("peer-") for name in (*touched, *todo.spare))
        for pull in todo.pulls:
            rank, _, index = pull.to.removeprefix("peer-").partition(".")
            assert int(rank) == pull.header.rank
            assert int(index) < SLOTS_PER_RANK
            assert (pull.name, pull.header) in theirs
        held = carried_out(todo, held)
        wanted = newest((name.split(".")[0], s) for name, s in theirs)
        if wanted is not None:
            here = {s.rank: s for _, s in copies(held) if s.id == wanted}
            assert set(here) >= {s.rank for _, s in theirs if s.id == wanted}
            # A partial replica is complete by what else was in this memory.
            whole = {(s.id, s.part) for _, s in held if not s.private_only}
            for pull in todo.pulls:
                assert not pull.private_only or (wanted, pull.header.part) in whole
            for _, theirs_of in theirs:
                twin = here.get(theirs_of.rank)
                if twin is not None and theirs_of.id == wanted:
                    assert twin.persist == theirs_of.persist
        settled = plan(theirs, held)
        assert settled == ReplicationPlan()  # there is nothing left to do


@given(memories(), memories(), st.data())
def test_a_pull_that_breaks_off_leaves_what_was_whole(
    first: list[NamedHeader], then: list[NamedHeader], data: st.DataObject
) -> None:
    held = carried_out(plan(first, []), [])
    kept = newest((s.rank, s) for _, s in held)
    todo = plan(then, held)
    done = data.draw(st.integers(0, len(todo.pulls)))
    broken = dict(carried_out(ReplicationPlan(todo.pulls[:done]), held))
    if done < len(todo.pulls):
        broken.pop(todo.pulls[done].to, None)  # it was being filled
    assert {n: s for n, s in held if s.id == kept}.items() <= broken.items()


def test_half_a_set_is_not_wanted() -> None:
    """Place 1 has not staged step 3 yet."""
    theirs = [("0.0", header(0, 2)), ("0.1", header(0, 3)), ("1.0", header(1, 2))]
    assert [(pull.name, pull.to) for pull in plan(theirs, []).pulls] == [
        ("0.0", "peer-0.0"),
        ("1.0", "peer-1.0"),
    ]


def test_what_a_script_has_staged_last_is_the_newest() -> None:
    """It went back from step 9 to step 3."""
    theirs = [("0.0", header(0, 9)), ("0.1", header(0, 3, timeline=1))]
    assert [pull.name for pull in plan(theirs, []).pulls] == ["0.1"]


def test_where_the_rest_is_here_only_what_is_private_is_pulled() -> None:
    theirs = [("0.0", header(2, 5, part="all")), ("1.0", header(3, 5, part="all"))]
    own = [("0.0", header(0, 5, part="all"))]
    assert [pull.private_only for pull in plan(theirs, own).pulls] == [True, True]
    assert [pull.private_only for pull in plan(theirs, []).pulls] == [False, True]
    other = [("0.0", header(0, 5, round=2, part="all"))]
    assert [pull.private_only for pull in plan(theirs, other).pulls] == [False, True]
    private_only = [("peer-9.0", replace(own[0][1], rank=9, private_only=True))]
    assert [pull.private_only for pull in plan(theirs, private_only).pulls] == [False, True]


def test_a_peers_replicas_are_not_copied_on() -> None:
    assert plan([("peer-4.0", header(4, 5))], []) == ReplicationPlan()


def test_replicas_of_an_earlier_peer_go_when_the_new_ones_are_whole() -> None:
    held = [("0.0", header(3, 1, round=2)), ("peer-0.0", header(0, 9))]
    held += [("peer-1.0", header(1, 9))]
    todo = plan([("0.0", header(2, 1, round=2))], held)
    assert [pull.to for pull in todo.pulls] == ["peer-2.0"]
    assert todo.spare == ("peer-0.0", "peer-1.0")
    assert plan([], held) == ReplicationPlan()  # a new peer that has nothing yet


def test_a_lost_nodes_part_stays_until_the_next_round_has_something_of_its_own() -> None:
    """The new peer still holds what the last round has staged, or only it has gone on."""
    held = [("0.0", header(3, 9)), ("peer-0.0", header(0, 9))]
    for theirs in (header(2, 9), header(2, 1, round=2)):
        assert plan([("0.0", theirs)], held).spare == ()


def test_all_nodes_copy_the_same_set_where_ranks_have_different_parts() -> None:
    named = replace(header(2, 5), copy=True)
    theirs = [("0.0", header(2, 6)), ("0.1", named), ("0.2", header(2, 7))]
    todo = plan(theirs, [])
    assert [pull.name for pull in todo.pulls] == ["0.1"]
    assert todo.told == checkpoint_id(5)
    held = carried_out(todo, [])
    assert plan(theirs, held) == ReplicationPlan(told=checkpoint_id(5)), (
        "until its workers have heard of it"
    )
    theirs[1] = ("0.1", replace(named, copied=True))
    assert plan(theirs, held) == ReplicationPlan()
    theirs[2] = ("0.2", replace(header(2, 7), copy=True))
    assert [pull.name for pull in plan(theirs, held).pulls] == ["0.2"]


def test_of_a_peer_that_leaves_the_wanted_set_is_copied_marked_or_not() -> None:
    theirs = [("0.0", mark(2, 5, copied=True)), ("0.1", header(2, 7)), ("peer-1.0", header(1, 7))]
    held = [("0.0", mark(3, 5, copied=True)), ("peer-2.0", mark(2, 5)), ("peer-2.1", mark(2, 4))]
    assert plan(theirs, held) == ReplicationPlan(), "the loss of one node costs what follows step 5"
    todo = plan(theirs, held, checkpoint_id(7))
    assert [(pull.name, pull.to) for pull in todo.pulls] == [
        ("peer-1.0", "peer-1.0"),
        ("0.1", "peer-2.1"),
    ]
    held = carried_out(todo, held)
    assert plan(theirs, held, checkpoint_id(7)) == ReplicationPlan()
    assert plan(theirs, held).spare == (), "the next round has not loaded it yet"


def test_of_a_peer_that_leaves_without_the_wanted_set_nothing_is_copied_or_removed() -> None:
    held = [("0.0", header(3, 1, round=2)), ("peer-0.0", header(0, 9))]
    assert plan([("0.0", header(2, 1, round=2))], held, checkpoint_id(7)) == ReplicationPlan()


def mark(rank: int, step: int, *, round: int = 1, copied: bool = False) -> SlotHeader:
    return replace(header(rank, step, round=round), copy=True, copied=copied)


def test_the_first_saves_of_a_round_replace_nothing_that_all_have_copied() -> None:
    """Until all have copied one of that round."""
    held = [("0.0", mark(3, 5, copied=True)), ("peer-2.0", mark(2, 5)), ("peer-2.1", mark(2, 7))]
    theirs = [("0.0", mark(2, 5, copied=True)), ("0.1", header(2, 1, round=2))]
    assert plan(theirs, held) == ReplicationPlan(), "step 7 was given up, for not all had it"
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
    theirs = [("0.0", header(2, 1, round=2)), ("0.1", header(2, 2, round=2))]
    assert plan(theirs, held) == ReplicationPlan()
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
    held = [("0.0", header(3, 1, round=2)), ("peer-2.0", mark(2, 5)), ("peer-0.0", mark(0, 5))]
    theirs = [("0.0", header(2, 1, round=2))]
    assert plan(theirs, held) == ReplicationPlan()
    same = [("0.0", header(2, 1, round=2, part="p3"))]
    assert [pull.to for pull in plan(same, held).pulls] == ["peer-2.1"]


def test_what_is_not_marked_goes_first_where_the_memory_does_not_suffice() -> None:
    held = [("0.0", mark(3, 9)), ("0.1", mark(3, 2, round=2)), ("peer-0.0", mark(0, 9))]
    held += [("peer-0.1", header(0, 11))]
    assert plan([("0.0", mark(2, 2, round=2))], held).last == ("peer-0.1", "peer-0.0")


def test_a_set_is_copied_once_all_places_have_it() -> None:
    theirs = [("0.0", mark(0, 3)), ("0.1", header(0, 2)), ("1.0", header(1, 2))]
    todo = plan(theirs, [])
    assert ([pull.name for pull in todo.pulls], todo.told) == (["0.0"], None)
    theirs[2] = ("1.0", mark(1, 3))
    assert plan(theirs, carried_out(todo, [])).told == checkpoint_id(3)


def test_marks_of_a_place_that_nobody_has_any_more_do_not_count() -> None:
    """There were two workers on a node in round 1; now it has one, and all nodes have the same."""
    theirs = [("0.0", header(0, 1, round=2)), ("1.0", mark(1, 9))]
    held = [("0.0", header(3, 1, round=2)), ("1.0", mark(3, 9))]
    assert [pull.name for pull in plan(theirs, held).pulls] == ["0.0"]


class OpenReplicator(Replicator):
    """A replicator whose thread does nothing: the test takes its steps."""

    def fill(
        self, peer: TransferConnection, pull: ReplicaPull, slot: ShmSlot, found: SlotContents
    ) -> None:
        self._fill(peer, pull, slot, found)

    def pull(self, peer: TransferConnection, pull: ReplicaPull) -> None:
        self._pull(peer, pull)

    def end(self) -> None:
        self._closing.set()


@pytest.mark.parametrize("private_only", [False, True])
def test_memory_is_not_taken_while_a_worker_takes_some(tmp_path: Path, private_only: bool) -> None:
    """Both would count on what is free now."""
    theirs = replace(header(0, 5), size=3 * PAGE, private_offset=2 * PAGE)
    pull = ReplicaPull("0.0", theirs, "peer-0.0", private_only)
    found = SlotContents(theirs, Layout([]), (), {})
    asked = threading.Event()

    class Answering(TransferConnection):
        """A peer, asked for bytes only once there is memory for them."""

        def __init__(self) -> None:
            self.where = "a peer"

        def read_all(self, *_: object, **__: object) -> Iterator[memoryview]:
            asked.set()
            raise SlotOverwrittenError("it is not there any more")

    def copy(replicas: OpenReplicator) -> None:
        with ShmSlot(tmp_path / pull.to, write=True) as slot, suppress(SlotOverwrittenError):
            replicas.fill(Answering(), pull, slot, found)

    def replicas() -> OpenReplicator:
        return OpenReplicator(tmp_path, "u1", "secret", on_change=lambda: None)

    ending = replicas()
    ending.end()
    with shm.reservation_lock(tmp_path):
        with pytest.raises(TransientError, match="the agent is ending"):
            copy(ending)
        assert (tmp_path / pull.to).stat().st_blocks == 0
        waiting = threading.Thread(target=copy, args=(replicas(),))
        waiting.start()
        assert not asked.is_set()
    waiting.join(30)
    assert asked.is_set()
    assert (tmp_path / pull.to).stat().st_size == 3 * PAGE


async def test_a_copy_that_fails_after_its_task_was_cancelled_is_reported_nowhere(
    tmp_path: Path,
) -> None:
    reports: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reports.append(context["message"]))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        replicas = Replicator(tmp_path, "u1", "secret", on_change=lambda: None)
        port = listener.getsockname()[1]
        replicas.follow(ReplicationPeer(node="n1", addr="127.0.0.1", port=port))
        task = asyncio.create_task(replicas.run())
        stream, _ = await asyncio.wait_for(loop.sock_accept(listener), 60)
        task.cancel()
        await asyncio.sleep(0)  # the cancellation ends the wait for the copy
        assert not task.done()
        stream.close()  # the copy fails
        await asyncio.wait({task}, timeout=60)
    assert task.cancelled()
    del task
    gc.collect()
    assert reports == []


def test_a_replica_of_a_smaller_part_takes_less_memory(tmp_path: Path) -> None:
    """Who reads what was there keeps it."""
    theirs = replace(header(0, 5), size=3 * PAGE, private_offset=2 * PAGE)

    class Answering(TransferConnection):
        def __init__(self) -> None:
            self.where = "a peer"

        def contents(self, *_: object) -> SlotContents:
            return SlotContents(theirs, Layout([]), (), {})

        def read_all(self, *_: object, **__: object) -> Iterator[memoryview]:
            raise SlotOverwrittenError("it is not there any more")

    path = tmp_path / "peer-0.0"
    with ShmSlot(path, write=True) as before:
        before.reserve(2 * shm.MAX_SURPLUS)
        one = OpenReplicator(tmp_path, "u1", "secret", on_change=lambda: None)
        with pytest.raises(SlotOverwrittenError):
            one.pull(Answering(), ReplicaPull("0.0", theirs, path.name, False))
        assert path.stat().st_size == 3 * PAGE
        assert before.size == 2 * shm.MAX_SURPLUS


def test_what_goes_is_not_flagged_as_well() -> None:
    """Rank 0 has gone from the peer but for an old part, which is to be persisted."""
    theirs = [("0.0", replace(header(0, 9), persist=True)), ("1.0", header(2, 1, round=2))]
    held = [("0.0", header(3, 1, round=2)), ("peer-0.0", header(0, 9))]
    todo = plan(theirs, held)
    assert todo.spare == ("peer-0.0",)
    assert todo.flags == ()
