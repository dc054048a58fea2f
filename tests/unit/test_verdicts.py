"""Verdicts on a job that stands still: which rank the others wait for, and what it does."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.diagnosis.stacks import doing, folded, loader_call, ranks_in_words
from dlrover_py.master.core.diagnosis.verdicts import Standstill, judge
from dlrover_py.protocol.diagnosis import (
    LEAST_SNAPSHOT_BYTES,
    Cause,
    Collective,
    Frame,
    HangKind,
    HangVerdict,
    NodeSnapshot,
    ThreadStack,
    WorkerSnapshot,
    max_snapshot_bytes,
)
from dlrover_py.protocol.rank_ranges import ranges_of, ranks_of

TORCH = "/venv/lib/python3.11/site-packages/torch/"
ALL_REDUCE = [
    Frame(function="all_reduce", file=TORCH + "distributed/distributed_c10d.py", line=3),
    Frame(function="train", file="/job/train.py", line=97),
]
LOADER = [
    Frame(function="wait", file="/usr/lib/python3.11/threading.py", line=320),
    Frame(function="get", file="/usr/lib/python3.11/queue.py", line=10),
    Frame(function="_BaseDataLoaderIter.__next__", file=TORCH + "utils/data/dataloader.py", line=7),
    Frame(function="train", file="/job/train.py", line=88),
]
LOCK = [Frame(function="update", file="/job/model.py", line=12)]
SAVE = [
    Frame(function="save", file=TORCH + "serialization.py", line=1),
    Frame(function="store", file="/job/train.py", line=5),
]


def worker(
    rank: int, seqs: str = "", *, age_s: float = 41.0, shape: str = "", op: str = "", **fields: Any
) -> WorkerSnapshot:
    """A worker whose collectives are like ``4 5*`` (5 is open) or ``5*@tp`` (of the group tp).

    ``5*/nccl`` is of the backend NCCL.
    """
    found = []
    for word in seqs.split():
        word, _, backend = word.partition("/")
        seq, _, group = word.partition("@")
        ranks = ranges_of({"a": [0, 1], "b": [1, 2], "tp": [0, 1]}.get(group, []))
        found.append(
            Collective(
                group=group or "0",
                backend=backend,
                seq=int(seq.rstrip("*!")),
                op=op or ("broadcast" if "!" in seq else "all_reduce"),
                shape=shape,
                open="*" in seq,
                age_s=age_s,
                ranks=ranks,
            )
        )
    given = {"pid": 100 + rank, "state": "S", "recorded": True, "stack": ALL_REDUCE, **fields}
    return WorkerSnapshot(rank=rank, local_rank=0, collectives=found, **given)


def known(size: int, **fields: Any) -> Standstill:
    nodes = {rank: f"n{rank}" for rank in range(size)}
    return Standstill(size, nodes, **{"step": 1203, "still_s": 41.2, **fields})


def verdict(*workers: WorkerSnapshot, **fields: Any) -> HangVerdict:
    found = judge(workers, known(max(w.rank for w in workers) + 1, **fields))
    assert found is not None
    return found


def test_the_line_of_a_rank_that_waits_for_its_loader() -> None:
    others = [worker(rank, "3 4*") for rank in range(8) if rank != 5]
    found = verdict(*others, worker(5, "3", stack=LOADER))
    assert found.message == (
        "rank 5 (node n5) has not entered the all_reduce after step 1203 for 41 s; 7 others wait "
        "in it; it is in DataLoader.__next__ (train.py:88): data"
    )
    assert (found.kind, found.cause) == (HangKind.NOT_ENTERED, Cause.DATA)
    assert found.ranks == [5]
    assert found.sure


@pytest.mark.parametrize(
    ("fields", "cause", "words"),
    [
        ({"stack": LOCK}, Cause.CODE, "it is in update (model.py:12): code"),
        ({"stack": SAVE}, Cause.STORAGE, "it is in save (train.py:5): storage"),
        (
            {"stack": LOCK, "state": "D", "wchan": "fuse_wait"},
            Cause.STORAGE,
            "it waits for a device or a file system in fuse_wait (model.py:12): storage",
        ),
        ({"stack": []}, Cause.UNKNOWN, "it shows no Python stack"),
    ],
)
def test_what_the_guilty_rank_does(fields: dict[str, Any], cause: Cause, words: str) -> None:
    found = verdict(worker(0, "4*"), worker(1, "3", **fields))
    assert found.cause is cause
    assert found.message.endswith(words)


def test_a_frozen_rank_is_named_though_it_says_nothing() -> None:
    frozen = worker(1, state="T", recorded=False, stack=[])
    found = verdict(worker(0, "4*"), frozen, worker(2, "4*"))
    assert (found.kind, found.ranks, found.sure) == (HangKind.FROZEN, [1], True)
    assert "2 others wait in the all_reduce after step 1203 for 41 s" in found.message


def test_a_worker_that_has_ended_keeps_the_others_waiting() -> None:
    found = verdict(worker(0, "4*"), WorkerSnapshot(rank=1, local_rank=0, recorded=True))
    assert (found.kind, found.ranks) == (HangKind.ENDED, [1])
    assert found.message.endswith("it has ended")


def test_a_worker_without_a_process_yet_has_not_ended() -> None:
    starting = WorkerSnapshot(rank=1, local_rank=0, starting=True, recorded=True)
    found = verdict(worker(0, "4*"), starting)
    assert found.kind is HangKind.NOT_ENTERED
    assert folded([starting]) == ["rank 1: has not started yet"]


def test_different_collectives_of_one_number_are_a_mismatch_of_the_few() -> None:
    found = verdict(worker(0, "4*"), worker(1, "4*!"), worker(2, "4*"))
    assert (found.kind, found.ranks, found.sure) == (HangKind.MISMATCH, [1], True)
    assert "rank 1 (node n1) calls broadcast as collective 4" in found.message


@pytest.mark.parametrize("op", ["all_to_all", "scatter", "gather", "all_gather"])
def test_shapes_that_may_differ_by_rank_are_no_mismatch(op: str) -> None:
    """The experts of a mixture get different numbers of tokens; a source alone has an input."""
    shapes = ["Float 100x8", "Float 90x8", "Float 80x8"]
    waiting = [worker(rank, "4*", op=op, shape=shape) for rank, shape in enumerate(shapes)]
    found = verdict(*waiting, worker(3, "3", stack=LOADER))
    assert (found.kind, found.ranks, found.cause) == (HangKind.NOT_ENTERED, [3], Cause.DATA)
    summed = [worker(rank, "4*", shape=shape) for rank, shape in enumerate(shapes)]
    assert verdict(*summed).kind is HangKind.MISMATCH


def test_an_evaluation_with_collectives_of_its_own_does_not_hang_yet() -> None:
    found = verdict(worker(0, "50*", age_s=0.3), worker(1, "49", stack=LOADER))
    assert (found.busy, found.sure) == (True, False)
    assert found.message.endswith("no rank has waited there for longer than 0.3 s")
    old = verdict(worker(0, "50*", age_s=25.0), worker(1, "49", stack=LOADER))
    assert (old.busy, old.sure) == (False, True)


def test_collectives_of_two_backends_of_one_group_are_two_sequences() -> None:
    """Scripts train with NCCL while a checkpoint's votes use gloo, in the same group."""
    waiting = [worker(rank, "9/gloo 1204*/nccl") for rank in range(3)]
    found = verdict(*waiting, worker(3, "9/gloo 1203/nccl", stack=LOCK))
    assert (found.kind, found.ranks) == (HangKind.NOT_ENTERED, [3])
    spinning = [worker(rank, "1204/gloo 9*/nccl", cpu=1.0) for rank in range(3)]
    assert verdict(*spinning, worker(3, "1204/gloo 8/nccl")).ranks == [3]


def test_a_rank_that_reads_or_writes_may_only_be_slow() -> None:
    found = verdict(worker(0, "4*"), worker(1, "3", stack=SAVE, io_bytes_per_s=4e6))
    assert (found.busy, found.sure, found.cause) == (True, False, Cause.STORAGE)
    assert found.message.endswith("storage, and it reads or writes")


def test_two_ranks_in_different_collectives_name_neither() -> None:
    found = verdict(worker(0, "4*"), worker(1, "4*!"))
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, [])


def test_the_rank_at_the_end_of_a_chain_of_groups_is_guilty() -> None:
    """Rank 0 waits for rank 1 in a, which waits for rank 2 in b: only rank 2 waits for nobody."""
    found = verdict(worker(0, "9*@a"), worker(1, "3*@b"), worker(2, "2@b", stack=LOCK))
    assert (found.kind, found.ranks) == (HangKind.NOT_ENTERED, [2])


def test_a_rank_that_waits_in_an_older_collective_is_not_guilty() -> None:
    """The others leave a reduce early, and go on; rank 0 waits there for rank 2, too."""
    reduce, ahead = worker(0, "8 9*", op="reduce"), [worker(1, "9 10*"), worker(3, "9 10*")]
    found = verdict(reduce, *ahead, worker(2, "8", stack=LOADER))
    assert (found.kind, found.ranks, found.sure) == (HangKind.NOT_ENTERED, [2], True)
    assert "2 others wait in it" in found.message


def test_ranks_with_other_numbers_of_collectives_in_flight_are_not_guilty() -> None:
    found = verdict(worker(0, "9*"), worker(1, "9* 10*"), worker(2, "8", stack=LOADER))
    assert (found.ranks, found.sure) == ([2], True)
    assert "2 others wait in it" in found.message


def test_a_reduce_that_all_have_entered_does_not_end() -> None:
    found = verdict(worker(0, "9*", op="reduce"), worker(1, "9 10*"), worker(2, "9 10*"))
    assert (found.kind, found.sure) == (HangKind.NO_PROGRESS, False)
    assert "have entered the reduce" in found.message


def test_a_rank_that_has_passed_the_oldest_collective_is_not_behind() -> None:
    found = verdict(worker(0, "4*", op="reduce"), worker(1, "6"), worker(2, "6"))
    assert (found.kind, found.sure) == (HangKind.NO_PROGRESS, False)


def test_a_chain_of_groups_that_ends_in_a_collective_is_no_deadlock() -> None:
    """Rank 0 waits for rank 1, in a collective of b that all have entered, on a broken network."""
    found = verdict(worker(0, "9*@a"), worker(1, "8@a 5*@b"), worker(2, "5*@b"))
    assert (found.kind, found.ranks, found.sure) == (HangKind.NO_PROGRESS, [], False)
    assert "the all_reduce of group b" in found.message


def test_a_chain_of_groups_that_ends_at_a_rank_without_records_names_it() -> None:
    unread = worker(2, recorded=False, stack=LOCK)
    found = verdict(worker(0, "9*@a"), worker(1, "8@a 5*@b"), unread)
    assert (found.kind, found.ranks, found.sure) == (HangKind.NOT_ENTERED, [2], False)


def test_a_rank_that_sends_to_another_one_may_wait_for_it() -> None:
    """Point-to-point operations have no record: rank 1 may wait for rank 0."""
    found = verdict(worker(0, "4*"), worker(1, "3"), worker(2, "4*"))
    assert (found.ranks, found.sure) == ([1], False)


def test_groups_that_wait_for_each_other_are_a_deadlock_of_groups() -> None:
    first = worker(0, "5*@tp 7").model_copy()
    second = worker(1, "4@tp 8*")
    found = verdict(first, second)
    assert (found.kind, found.ranks) == (HangKind.GROUPS, [0, 1])
    assert found.message.endswith("the order of the collectives differs between ranks: code")


def test_a_collective_that_all_have_entered_is_the_network_and_never_sure() -> None:
    found = verdict(worker(0, "4*"), worker(1, "4*"))
    assert (found.kind, found.ranks, found.sure) == (HangKind.NO_PROGRESS, [], False)


def test_a_rank_that_uses_its_cpu_may_only_be_slow() -> None:
    found = verdict(worker(0, "4*"), worker(1, "3", stack=LOCK, cpu=0.9))
    assert found.busy
    assert not found.sure


@pytest.mark.parametrize("busy", [1, 2])
def test_no_verdict_is_sure_while_one_of_the_guilty_ranks_works(busy: int) -> None:
    """The idle one may wait for what the other one writes."""
    facts: dict[int, dict[str, Any]] = {busy: {"cpu": 0.9, "io_bytes_per_s": 5e8}}
    found = verdict(worker(0, "4*"), *(worker(r, "3", **facts.get(r, {})) for r in (1, 2)))
    assert (found.ranks, found.busy, found.sure) == ([1, 2], True, False)
    assert found.message.endswith(f"and rank {busy} uses its CPU")


def test_the_oldest_open_collective_of_a_group_says_how_long_ranks_wait() -> None:
    """Several may be open at once: gradients are summed while others are computed."""
    waits = worker(0, "5*").collectives + worker(0, "6*", age_s=1.0).collectives
    first = worker(0).model_copy(update={"collectives": waits})
    found = verdict(first, worker(1, "4", stack=LOADER))
    assert (found.busy, found.sure) == (False, True)


def test_a_missing_node_leaves_doubt() -> None:
    found = verdict(worker(0, "4*"), worker(1, "3", stack=LOCK), missing=["n2"])
    assert not found.sure
    assert "node n2 sent no snapshot" in found.message


def test_ranks_without_records_are_named_by_their_stacks() -> None:
    found = verdict(worker(0, "4*"), worker(1, recorded=False, stack=LOADER))
    assert (found.cause, found.ranks, found.sure) == (Cause.DATA, [1], False)


def test_without_collectives_the_odd_rank_is_named() -> None:
    found = verdict(
        worker(0, stack=ALL_REDUCE, recorded=False),
        worker(1, stack=LOCK, recorded=False),
        worker(2, stack=ALL_REDUCE, recorded=False),
    )
    assert (found.kind, found.ranks) == (HangKind.CODE, [1])


@given(st.integers(1, 12), st.floats(0.2, 8.0))
def test_ranks_that_all_compute_do_not_stand_still(size: int, cpu: float) -> None:
    workers = [worker(rank, "3 4", stack=LOCK, cpu=cpu) for rank in range(size)]
    assert judge(workers, known(size)) is None


@given(st.data())
def test_the_ranks_that_have_not_entered_are_found_in_any_order(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 16))
    guilty = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    front = data.draw(st.integers(2, 1000))
    workers = []
    for rank in range(size):
        behind = data.draw(st.integers(1, front - 1)) if rank in guilty else front
        workers.append(worker(rank, f"{behind}" + ("" if rank in guilty else "*")))
    workers = data.draw(st.permutations(workers))
    found = judge(workers, known(size))
    assert found is not None
    assert found.ranks == sorted(guilty)
    assert found.kind is HangKind.NOT_ENTERED


@given(st.data())
def test_a_verdict_never_fails(data: st.DataObject) -> None:
    """Snapshots may have anything: workers run on while they are taken."""
    size = data.draw(st.integers(1, 5))
    words = st.builds(
        lambda seq, mark, group: f"{seq}{mark}{group}",
        st.integers(0, 4),
        st.sampled_from(["", "*", "*!"]),
        st.sampled_from(["", "@a", "@b"]),
    )
    workers = [
        worker(
            rank,
            " ".join(data.draw(st.lists(words, max_size=5))),
            age_s=data.draw(st.sampled_from([0.1, 41.0])),
            state=data.draw(st.sampled_from(["S", "R", "D", "T", ""])),
            pid=data.draw(st.sampled_from([0, 7])),
            cpu=data.draw(st.sampled_from([0.0, 0.9])),
            recorded=data.draw(st.booleans()),
            stack=data.draw(st.sampled_from([ALL_REDUCE, LOADER, LOCK, []])),
        )
        for rank in range(size)
        if data.draw(st.booleans())
    ]
    found = judge(workers, known(size, step=None))
    folded(workers)
    if found is not None:
        assert found.message
        assert set(found.ranks) <= {w.rank for w in workers}
        assert not (found.sure and found.busy)


def test_equal_ranks_have_one_line_and_the_odd_one_comes_first() -> None:
    workers = [worker(rank, "4*") for rank in range(7)]
    lines = folded([*workers, worker(7, "3", stack=LOADER, remarks=["no py-spy"])])
    assert lines[0].startswith("rank 7: is in DataLoader.__next__ (train.py:88); CPU 0 %; ")
    assert lines[0].endswith("[no py-spy]")
    assert lines[1].startswith("ranks 0–6: is in all_reduce (train.py:97); waits in all_reduce 4")
    assert len(folded([worker(r, stack=[Frame(function=f"f{r}")]) for r in range(99)])) == 40


def test_ranks_in_words() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([3, 1, 2, 7]) == "ranks 1–3, 7"
    assert ranks_in_words(range(0, 40, 2)).endswith("and 12 more ranges")


def test_a_stack_without_code_of_the_user_names_its_innermost_call() -> None:
    stack = [Frame(function="recv", file=TORCH + "x.py", line=4)]
    assert doing(worker(0, stack=stack)) == ("is in recv (x.py:4)", Cause.CODE)


def test_a_large_snapshot_is_cut_to_what_a_verdict_needs() -> None:
    frames = [Frame(function="f" * 200, file="/x" * 100, line=n) for n in range(48)]
    one = worker(0, " ".join(f"{n}" for n in range(60)) + " 61*", stack=frames)
    one = one.model_copy(update={"threads": [ThreadStack(frames=frames)] * 16})
    full = NodeSnapshot(boot_id="x" * 8, number=1, round=1, workers=[one] * 8)
    small = full.fitted(60_000)
    assert len(small.model_dump_json()) <= 60_000
    assert all(w.collectives[-1].open and w.stack[0] == frames[0] for w in small.workers)
    assert full.fitted(10**9) == full


def test_what_a_verdict_needs_fits_into_the_snapshot_of_a_node_of_the_largest_job() -> None:
    """A worker that waits needs no stack; that of the guilty one is kept."""
    frames = [Frame(function=f"forward_{n}", file=TORCH + f"nn/{n}.py", line=n) for n in range(48)]
    waiting = [worker(rank, "5*@a 7@b 8@b 61 62*", stack=frames) for rank in range(7)]
    guilty = worker(7, "5*@a 7@b 61", stack=[*LOADER, *frames[4:]])
    guilty = guilty.model_copy(
        update={"collectives": [c for c in guilty.collectives if not c.open]}
    )
    full = NodeSnapshot(boot_id="x" * 8, number=1, round=1, workers=[*waiting, guilty])
    small = full.fitted(max_snapshot_bytes(12_500))
    assert len(small.model_dump_json(exclude_defaults=True)) <= LEAST_SNAPSHOT_BYTES
    assert judge(small.workers, known(8)) == judge(full.workers, known(8))
    assert loader_call(small.workers[7].stack)


def test_a_collective_that_is_open_is_kept_although_others_are_newer() -> None:
    waits = worker(0, "1*@a " + " ".join(f"{n}" for n in range(2, 40)), stack=ALL_REDUCE)
    full = NodeSnapshot(boot_id="x" * 8, number=1, round=1, workers=[waits])
    (small,) = full.fitted(900).workers
    assert {(c.group, c.seq) for c in small.collectives} >= {("a", 1), ("0", 39)}


@given(st.lists(st.integers(0, 300), max_size=60))
def test_ranks_are_the_same_after_they_were_ranges(ranks: list[int]) -> None:
    assert ranks_of(ranges_of(ranks), 301) == sorted(set(ranks))
    assert len(ranges_of(range(0, 20_000, 8))) == 1
