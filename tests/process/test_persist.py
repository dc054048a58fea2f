"""Real persisters write hand-made slots; plain torch reads what they have written."""

import contextlib
import fcntl
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover_py.checkpoint import writer
from dlrover_py.checkpoint.directory import (
    LEASE_FILE,
    CheckpointDirectory,
    DirectoryOwner,
    FileWriter,
    FolderBackend,
    folder_of,
)
from dlrover_py.checkpoint.shm import ShmSlot, digest, scan
from dlrover_py.checkpoint.writer import (
    WriteAttempt,
)
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import (
    CancelWrite,
    CommitGrant,
    KeepRules,
    WriteReply,
)
from dlrover_py.protocol.slots import ITEM_BYTES, TensorChunk
from dlrover_py.trainer import restore
from dlrover_py.trainer.candidates import CheckpointSources
from tests.programs import PROGRAMS
from tests.slots import (
    JOB,
    Persister,
    full,
    load_with_torch,
    order,
    raw,
    rows,
    saved,
    stage,
    verify,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

LOG = logging.getLogger("test")
DRAWN = "0123456789ab"
"""An attempt, as a master draws its name."""
W = torch.arange(12 * 5, dtype=torch.float32).reshape(12, 5)


@pytest.fixture(scope="module")
def persister() -> Iterator[Persister]:
    """One that all tests share that leave it alive."""
    one = Persister()
    yield one
    one.close()


@pytest.fixture(scope="module")
def trio(persister: Persister) -> Iterator[list[Persister]]:
    """Those of three nodes."""
    more = [Persister(), Persister()]
    yield [persister, *more]
    for one in more:
        one.close()


def simple(path: Path, step: int = 7, size: int = 64, **facts: Any) -> None:
    """A slot of one rank that is alone."""
    values = torch.full((size,), float(step))
    stage(path, [(full("model.w", (size,)), raw(values))], step=step, **facts)


# --- what is written ---


def test_plain_torch_reads_what_was_staged(persister: Persister, tmp_path: Path) -> None:
    tensors = {
        "model.w": W,
        "model.half": torch.linspace(0, 1, 7).to(torch.bfloat16),
        "model.step": torch.tensor(3),
        "model.none": torch.empty(0, 3),
        "model.large": torch.arange(3 << 20, dtype=torch.int32),
        "optimizer.state.w.exp_avg": -W,
        "rank/0/rng": torch.arange(5, dtype=torch.uint8),
    }
    staged = [
        (full(key, tuple(t.shape), str(t.dtype).removeprefix("torch.")), raw(t))
        for key, t in tensors.items()
    ]
    stage(tmp_path / "pool/0.0", staged, {"epoch": saved({"at": 4})}, persist=True, metric=0.5)
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "a1"))
    answer = persister.end("a1")
    assert answer.phase is PersistPhase.DONE, answer
    store = CheckpointDirectory(tmp_path / "ckpt")
    (manifest,) = store.checkpoints()
    where = store.where(manifest)
    assert answer.stored is not None
    stored = answer.stored
    assert (stored.id, stored.step, stored.where) == (manifest.id, 7, where)
    assert (stored.at, stored.number) == (manifest.at, manifest.number)
    assert (manifest.metric, manifest.job, manifest.world) == (0.5, JOB, 1)
    verify(store, manifest)
    assert {p.name for p in Path(store.where(manifest)).iterdir()} == {
        ".metadata",
        "__0_0.distcp",
    }
    ((_, header),) = scan(tmp_path / "pool")
    assert not header.persist, "it need not be spared any more"
    shapes = {
        key: (list(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in tensors.items()
    }
    loaded = load_with_torch(store.where(manifest), shapes)
    nested = loaded.pop("__nested__")
    for key, tensor in tensors.items():
        assert torch.equal(loaded[key], tensor), key
        assert loaded[key].dtype == tensor.dtype
    assert torch.equal(nested["model"]["w"], W), "as load_state_dict takes it"
    assert nested["epoch"] == {"at": 4}


def test_a_store_is_told_about_how_large_a_file_becomes(tmp_path: Path) -> None:
    told: dict[str, int] = {}

    class Measuring(FolderBackend):
        def sink(self, name: str, nbytes: int = 0) -> FileWriter:
            told[name] = nbytes
            return super().sink(name, nbytes)

    size = 1 << 18
    tensors = [(full("w", (size,)), bytes(4 * size)), (full("v", (size,)), bytes(4 * size))]
    stage(tmp_path / "pool/0.0", tensors, {"epoch": bytes(1 << 16)})
    store = CheckpointDirectory(tmp_path)
    store.place = Measuring(tmp_path)
    attempt = WriteAttempt(order(tmp_path / "pool", tmp_path, "w1"), lambda _: store, print, None)
    attempt.start()
    attempt.thread.join()
    ((name, nbytes),) = told.items()
    assert nbytes == 8 * size + (1 << 16)
    assert nbytes < (tmp_path / name).stat().st_size < 1.05 * nbytes


def test_three_nodes_write_one_checkpoint(trio: list[Persister], tmp_path: Path) -> None:
    """Shards of one tensor, copies of another, private values, all in one."""
    copied = torch.randn(1 << 18)
    for rank in range(3):
        stage(
            tmp_path / f"pool{rank}/0.1",
            [
                (rows("model.sharded", rank * 4, 4, 12, 5), raw(W[rank * 4 : rank * 4 + 4])),
                *(
                    (full(f"model.copy{i}", (1 << 16,)), raw(c))
                    for i, c in enumerate(copied.chunk(4))
                ),
                (full(f"rank/{rank}/rng", (3,), "uint8"), bytes([rank] * 3)),
            ],
            {"epoch": saved(4), f"rank/{rank}/seed": saved(rank)},
            rank=rank,
            world=3,
        )
    for rank in (2, 1, 0):
        writers = ("n0", "n1", "n2") if rank == 0 else ()
        trio[rank].send(
            order(
                tmp_path / f"pool{rank}",
                tmp_path / "ckpt",
                "t1",
                world=3,
                ranks=(rank,),
                node=f"n{rank}",
                writers=writers,
                grant=None,
            )
        )
    trio[0].next(PersistPhase.READY, attempt="t1")
    store = CheckpointDirectory(tmp_path / "ckpt")
    assert store.checkpoints() == [], "nothing is committed without a grant"
    trio[0].send(CommitGrant(attempt="t1", term=5))
    ends = [one.end("t1") for one in trio]
    assert [e.phase for e in ends] == [PersistPhase.DONE] * 3, ends
    assert [e.stored is not None for e in ends] == [True, False, False]
    (manifest,) = store.checkpoints()
    verify(store, manifest)
    assert manifest.term == 5
    assert len(manifest.chunks) == 3 + 4 + 3, "each box once"
    assert sorted(o.key for o in manifest.objects) == [
        "epoch",
        "rank/0/seed",
        "rank/1/seed",
        "rank/2/seed",
    ]
    by_node = [e.nbytes for e in ends]
    assert max(by_node) < 2.2 * min(by_node), f"the work is shared: {by_node}"
    shapes = {f"model.copy{i}": ([1 << 16], "float32") for i in range(4)}
    loaded = load_with_torch(
        store.where(manifest),
        {"model.sharded": ([12, 5], "float32"), "rank/2/rng": ([3], "uint8"), **shapes},
    )
    assert torch.equal(loaded["model.sharded"], W)
    assert torch.equal(torch.cat([loaded[f"model.copy{i}"] for i in range(4)]), copied)
    assert loaded["rank/2/rng"].tolist() == [2, 2, 2]


def test_the_metric_is_the_lowest_ranks(trio: list[Persister], tmp_path: Path) -> None:
    """Whatever node that is on: after a replacement nodes and ranks are in no order."""
    for rank, node in ((1, 0), (0, 1)):
        pool = tmp_path / f"pool{node}"
        simple(pool / "0.0", rank=rank, world=2, metric=(0.25, 99.0)[rank])
        mine = order(pool, tmp_path / "ckpt", "m3", world=2, ranks=(rank,), node=f"n{node}")
        trio[node].send(mine.model_copy(update={"writers": ["n0", "n1"] if rank == 0 else []}))
    ends = [one.end("m3") for one in trio[:2]]
    assert [e.phase for e in ends] == [PersistPhase.DONE] * 2, ends
    (manifest,) = CheckpointDirectory(tmp_path / "ckpt").checkpoints()
    assert manifest.metric == 0.25


def test_replicas_stand_in_for_a_lost_node(persister: Persister, tmp_path: Path) -> None:
    """Of rank 1 only a peer's copy is left, without the bytes that rank 0 has as well."""
    pool = tmp_path / "pool"
    for rank, name in enumerate(("0.0", "peer-1.0")):
        private = (full(f"rank/{rank}/rng", (3,), "uint8"), bytes([rank] * 3))
        stage(
            pool / name,
            [(full("model.w", (12, 5)), raw(W)), private],
            rank=rank,
            world=2,
            private_only=rank == 1,
        )
    with ShmSlot(pool / "peer-1.0", write=True) as slot:
        header = slot.header()
        assert header is not None
        slot.view()[4096 : header.private_offset] = bytes(header.private_offset - 4096)
    persister.send(order(pool, tmp_path / "ckpt", "r1", world=2, ranks=(0, 1)))
    answer = persister.end("r1")
    assert answer.phase is PersistPhase.DONE, answer
    store = CheckpointDirectory(tmp_path / "ckpt")
    (manifest,) = store.checkpoints()
    verify(store, manifest)
    assert [w.chunk.key for w in manifest.chunks] == ["model.w", "rank/0/rng", "rank/1/rng"]


def test_copies_that_differ_are_told_of(persister: Persister, tmp_path: Path) -> None:
    for rank in range(2):
        stage(
            tmp_path / f"pool/{rank}.0",
            [(full("model.running_mean", (4,)), raw(torch.full((4,), float(rank))))],
            rank=rank,
            world=2,
        )
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "d1", world=2, ranks=(0, 1)))
    answer = persister.end("d1")
    assert answer.phase is PersistPhase.DONE
    words = "ranks hold different values of model.running_mean: the lowest rank's are kept"
    assert answer.notes == (words,)
    (manifest,) = CheckpointDirectory(tmp_path / "ckpt").checkpoints()
    assert manifest.notes == answer.notes
    assert manifest.chunks[0].xxh3 == digest(raw(torch.zeros(4)))


def test_retention_follows_each_commit(persister: Persister, tmp_path: Path) -> None:
    for step, metric in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.7)):
        simple(tmp_path / "pool/0.0", step, metric=metric)
        wish = order(tmp_path / "pool", tmp_path / "ckpt", f"k{step}", step=step)
        persister.send(wish.model_copy(update={"keep": KeepRules(newest=1, every=3, best=1)}))
        assert persister.end(f"k{step}").phase is PersistPhase.DONE
    assert [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [4, 3, 1]


# --- what is refused ---


def test_a_leftover_that_cannot_be_removed_is_a_note(persister: Persister, tmp_path: Path) -> None:
    simple(tmp_path / "pool/0.0")
    store = CheckpointDirectory(tmp_path / "ckpt")
    left = folder_of(3, DRAWN)
    for name in ("parts", "__0_0.distcp"):  # that is no file, to unlink it fails
        (tmp_path / "ckpt" / left / name).mkdir(parents=True)
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "l1"))
    answer = persister.end("l1")
    assert answer.phase is PersistPhase.DONE, answer
    assert answer.notes == (
        f"{store.place.url}/{left} is left over and could not be removed: Is a directory",
    )


def test_a_flipped_bit_does_not_reach_storage(persister: Persister, tmp_path: Path) -> None:
    pool, store = tmp_path / "pool", CheckpointDirectory(tmp_path / "ckpt")
    simple(pool / "0.0", 6, size=1 << 20)
    persister.send(order(pool, tmp_path / "ckpt", "f0", step=6))
    assert persister.end("f0").phase is PersistPhase.DONE
    simple(pool / "0.1", 7, size=1 << 20, persist=True)
    with ShmSlot(pool / "0.1", write=True) as slot:
        slot.view()[4096 + (3 << 20)] ^= 4
    persister.send(order(pool, tmp_path / "ckpt", "f1"))
    answer = persister.end("f1")
    assert answer.phase is PersistPhase.FAILED
    assert "model.w of rank 0: its bytes in" in answer.why
    assert "are not those that were staged" in answer.why
    assert [m.step for m in store.checkpoints()] == [6], "the one before stays"
    assert not (tmp_path / "ckpt/step-7.f1").exists(), "nothing is left half"
    assert not any(s.persist for _, s in scan(pool)), "a slot that is no good is not spared"


def test_a_shard_that_nobody_has_is_named(persister: Persister, tmp_path: Path) -> None:
    stage(tmp_path / "pool/0.0", [(rows("model.w", 0, 4, 12, 5), raw(W[:4]))], world=3)
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "s1", world=3))
    answer = persister.end("s1")
    assert answer.phase is PersistPhase.FAILED
    assert "model.w: the slots hold 20 of its 60 elements" in answer.why
    assert CheckpointDirectory(tmp_path / "ckpt").checkpoints() == []


def test_a_step_that_is_gone_from_memory_is_not_waited_for(
    persister: Persister, tmp_path: Path
) -> None:
    simple(tmp_path / "pool/0.0", 9)
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "g1"))
    answer = persister.end("g1")
    assert answer.phase is PersistPhase.FAILED
    assert "step 7 of rank 0 is not in" in answer.why
    assert "it holds step 9" in answer.why


def test_a_slot_that_is_sealed_later_is_waited_for(persister: Persister, tmp_path: Path) -> None:
    """Without an agent, one worker orders while another one still copies."""
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "l1"))
    persister.next(PersistPhase.WRITING, attempt="l1")
    simple(tmp_path / "pool/0.0")
    assert persister.end("l1").phase is PersistPhase.DONE


def test_a_folder_that_is_not_shared_is_told_in_words(
    trio: list[Persister], tmp_path: Path
) -> None:
    for rank in range(2):
        simple(tmp_path / f"pool{rank}/0.0", rank=rank, world=2)
        trio[rank].send(
            order(
                tmp_path / f"pool{rank}",
                tmp_path / f"ckpt-of-n{rank}",
                "w1",
                world=2,
                ranks=(rank,),
                node=f"n{rank}",
                writers=("n0", "n1") if rank == 0 else (),
                deadline_s=30.0,  # within it the store has answered each, however slowly
            )
        )
    coordinator, other = (one.end("w1") for one in trio[:2])
    assert coordinator.phase is other.phase is PersistPhase.FAILED
    assert "layout of n1 not seen in" in coordinator.why
    assert "s: is it a folder that all nodes share?" in coordinator.why
    assert "the coordinator's plan not seen in" in other.why


def test_who_fails_tells_the_others(trio: list[Persister], tmp_path: Path) -> None:
    for rank in range(2):
        simple(tmp_path / f"pool{rank}/0.0", rank=rank, world=2, size=1 << 18)
    with ShmSlot(tmp_path / "pool1/0.0", write=True) as slot:
        slot.view()[5000] ^= 1
    # Rank 0's copy has the same digest, and rank 1 writes nothing of it: give it something.
    stage(tmp_path / "pool0/0.0", [(full("a", (4,)), bytes(16))], rank=0, world=2)
    for rank in (1, 0):
        trio[rank].send(
            order(
                tmp_path / f"pool{rank}",
                tmp_path / "ckpt",
                "o1",
                world=2,
                ranks=(rank,),
                node=f"n{rank}",
                writers=("n0", "n1") if rank == 0 else (),
            )
        )
    ends = [one.end("o1") for one in trio[:2]]
    assert [e.phase for e in ends] == [PersistPhase.FAILED] * 2
    assert "are not those that were staged" in ends[1].why
    assert ends[0].why.startswith("n1: model.w of rank 1")
    assert not (tmp_path / "ckpt/step-7.o1").exists()


def test_two_jobs_in_one_directory_are_refused(trio: list[Persister], tmp_path: Path) -> None:
    pools = [tmp_path / "pool0", tmp_path / "pool1"]
    simple(pools[0] / "0.0")
    trio[0].send(order(pools[0], tmp_path / "ckpt", "j1", name="gpt"))
    assert trio[0].end("j1").phase is PersistPhase.DONE
    simple(pools[1] / "0.0", job="job-uid-2")
    trio[1].send(order(pools[1], tmp_path / "ckpt", "j2", job="job-uid-2"))
    answer = trio[1].end("j2")
    assert answer.phase is PersistPhase.FAILED
    assert "is written by another job, gpt (job-uid-1): give each job" in answer.why
    assert [m.job for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [JOB]


# --- the master is lost ---


def test_survivors_store_once_when_the_job_renews_its_lease_no_more(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    looks = count(step=20.0)

    def survivor(node: str) -> list[WriteReply]:
        store = CheckpointDirectory(place, clock=lambda: next(looks))
        store.prepare()
        store.join(DirectoryOwner(JOB))
        simple(tmp_path / f"pool-{node}/0.0")
        said: list[WriteReply] = []
        mine = order(
            tmp_path / f"pool-{node}", place, DRAWN, node=node, writers=(node,), grant=3
        ).model_copy(update={"without_master": True})
        attempt = WriteAttempt(mine, lambda _: store, said.append, None)
        attempt.start()
        attempt.thread.join()
        store.release()
        return said

    place.mkdir()
    dead = CheckpointDirectory(place)
    dead.acquire_lease(DirectoryOwner(JOB), "a1", shared=True)
    claim = json.loads((place / LEASE_FILE).read_bytes()) | {"host": "another"}
    (place / LEASE_FILE).write_text(json.dumps(claim))
    first, second = survivor("n1"), survivor("n2")
    assert next(looks) >= 40, "the lost node could have renewed the lease"
    assert [a.phase for a in (first[-1], second[-1])] == [PersistPhase.DONE] * 2
    waits = [a for a in first if "waits for the end of its lease" in a.why]
    assert [a.phase for a in waits] == [PersistPhase.WRITING], "once, in words"
    assert first[-1].stored == second[-1].stored
    (only,) = CheckpointDirectory(place).checkpoints()
    assert (only.job, only.step, only.term) == (JOB, 7, 3)
    assert not (place / LEASE_FILE).exists(), "the next job may write"


# --- called off, fenced ---


def test_a_cancelled_order_frees_its_slots(persister: Persister, tmp_path: Path) -> None:
    simple(tmp_path / "pool/0.0", persist=True)
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "c1", grant=None))
    persister.next(PersistPhase.READY, attempt="c1")
    with ShmSlot(tmp_path / "pool/0.0", write=True) as slot:
        assert not slot.lock(shared=False), "it is being read"
        persister.send(CancelWrite(attempt="c1"))
        assert persister.end("c1").why == "canceled"
        wait_for(lambda: slot.lock(shared=False), "the lock")
    assert CheckpointDirectory(tmp_path / "ckpt").checkpoints() == []
    wait_for(lambda: not (tmp_path / "ckpt/step-7.c1").exists(), "nothing to be left")


def test_a_cancel_while_slots_are_let_go_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        simple(tmp_path / f"pool/{rank}.0", rank=rank, world=2)
    said: list[WriteReply] = []
    close = ShmSlot.close

    def closed(slot: ShmSlot) -> None:
        close(slot)
        attempt.give_up("canceled")

    def gone(_: str) -> CheckpointDirectory:
        monkeypatch.setattr(ShmSlot, "close", closed)
        raise OSError("the store is gone")

    mine = order(tmp_path / "pool", tmp_path / "ckpt", "c3", world=2, ranks=(0, 1))
    attempt = WriteAttempt(mine, gone, said.append, None)
    attempt.start()
    attempt.thread.join()
    assert [a.phase for a in said] == [PersistPhase.WRITING, PersistPhase.FAILED]


def test_a_newer_order_calls_the_older_one_off(persister: Persister, tmp_path: Path) -> None:
    simple(tmp_path / "pool/0.0", 7)
    simple(tmp_path / "pool/0.1", 8)
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "n1", grant=None))
    persister.next(PersistPhase.READY, attempt="n1")
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", "n2", step=8))
    assert "canceled by a newer request: step 8" in persister.end("n1").why
    assert persister.end("n2").phase is PersistPhase.DONE
    assert [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [8]


def test_the_same_order_again_is_a_grant_at_most(persister: Persister, tmp_path: Path) -> None:
    """An agent that lost an answer repeats itself."""
    simple(tmp_path / "pool/0.0")
    wish = order(tmp_path / "pool", tmp_path / "ckpt", "x1", grant=None)
    persister.send(wish)
    persister.next(PersistPhase.READY, attempt="x1")
    persister.send(wish)
    persister.send(wish.model_copy(update={"grant": 3}))
    assert persister.end("x1").phase is PersistPhase.DONE
    assert CheckpointDirectory(tmp_path / "ckpt").checkpoints()[0].term == 3


def test_a_coordinator_that_comes_too_late_is_fenced(trio: list[Persister], tmp_path: Path) -> None:
    """It was cut off with everything written; its grant arrives after others have gone on."""
    simple(tmp_path / "pool0/0.0", 7)
    simple(tmp_path / "pool1/0.0", 8)
    trio[0].send(order(tmp_path / "pool0", tmp_path / "ckpt", "z1", grant=None))
    trio[0].next(PersistPhase.READY, attempt="z1")
    trio[1].send(
        order(tmp_path / "pool1", tmp_path / "ckpt", "z2", step=8, node="n1", writers=("n1",))
    )
    assert trio[1].end("z2").phase is PersistPhase.DONE
    trio[0].send(CommitGrant(attempt="z1", term=1))
    answer = trio[0].end("z1")
    assert answer.phase is PersistPhase.FAILED
    assert "another attempt has begun since" in answer.why
    assert [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [8]


def test_a_late_grant_of_an_older_master_is_refused(trio: list[Persister], tmp_path: Path) -> None:
    """It is cut off, and so is its node: both go on as if nobody else had stored anything."""
    simple(tmp_path / "pool0/0.0", 7)
    simple(tmp_path / "pool1/0.0", 8)
    trio[1].send(
        order(
            tmp_path / "pool1",
            tmp_path / "ckpt",
            "m2",
            step=8,
            node="n1",
            writers=("n1",),
            grant=2,
        )
    )
    assert trio[1].end("m2").phase is PersistPhase.DONE
    trio[0].send(order(tmp_path / "pool0", tmp_path / "ckpt", "m1", grant=None))
    trio[0].next(PersistPhase.READY, attempt="m1")
    trio[0].send(CommitGrant(attempt="m1", term=1))
    answer = trio[0].end("m1")
    assert answer.phase is PersistPhase.FAILED
    assert "the grant is of term 1, and a checkpoint of term 2 is there" in answer.why
    assert [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [8]


def test_a_tombstone_alone_fences(persister: Persister, tmp_path: Path) -> None:
    simple(tmp_path / "pool/0.0")
    persister.send(order(tmp_path / "pool", tmp_path / "ckpt", DRAWN, grant=None))
    persister.next(PersistPhase.READY, attempt=DRAWN)
    store = CheckpointDirectory(tmp_path / "ckpt")
    assert store.sweep(now=time.time()) == [folder_of(7, DRAWN)]
    persister.send(CommitGrant(attempt=DRAWN, term=1))
    assert "given the attempt up, or committed" in persister.end(DRAWN).why
    assert store.checkpoints() == []


# --- bad stores ---


def test_a_full_disk_is_told_and_nothing_is_left_half(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(small)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small file system can be mounted by root only")
    one = Persister()
    try:
        simple(tmp_path / "pool/0.0", 6, size=1 << 20)
        one.send(order(tmp_path / "pool", small / "ckpt", "e1", step=6))
        assert one.end("e1").phase is PersistPhase.DONE
        simple(tmp_path / "pool/0.1", 7, size=1 << 20)
        one.send(order(tmp_path / "pool", small / "ckpt", "e2"))
        answer = one.end("e2")
        assert answer.phase is PersistPhase.FAILED
        assert answer.why == f"{small}/ckpt/step-7.e2/__0_0.distcp: No space left on device"
        store = CheckpointDirectory(small / "ckpt")
        (manifest,) = store.checkpoints()
        verify(store, manifest)
        wait_for(lambda: not (small / "ckpt/step-7.e2").exists(), "nothing to be left")
    finally:
        one.close()
        subprocess.run(["umount", str(small)], check=True)


def test_a_file_that_may_not_grow_is_told(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    one = Persister(preexec=limit)
    try:
        simple(tmp_path / "pool/0.0", 6, size=1 << 10)
        one.send(order(tmp_path / "pool", tmp_path / "ckpt", "e1", step=6))
        assert one.end("e1").phase is PersistPhase.DONE
        simple(tmp_path / "pool/0.1", 7, size=1 << 20)
        one.send(order(tmp_path / "pool", tmp_path / "ckpt", "e2"))
        assert "step-7.e2/__0_0.distcp: File too large" in one.end("e2").why
        assert [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [6]
    finally:
        one.close()


def test_a_directory_that_cannot_be_made_is_told(persister: Persister, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    simple(tmp_path / "pool/0.0")
    persister.send(order(tmp_path / "pool", tmp_path / "file/ckpt", "p1"))
    assert persister.end("p1").why == f"{tmp_path}/file/ckpt: Not a directory"


def test_a_store_that_hangs_is_told_and_the_trainer_goes_on(tmp_path: Path) -> None:
    """An open of a file that is leased to this process waits, as with a dead NFS server."""
    one = Persister()
    (tmp_path / "dead").mkdir()
    leased = os.open(tmp_path / "dead" / LEASE_FILE, os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGURG)  # by default it is ignored
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        simple(tmp_path / "pool/0.0")
        one.send(order(tmp_path / "pool", tmp_path / "dead", "h1", deadline_s=10.0))
        answer = one.end("h1")
        assert answer.phase is PersistPhase.FAILED
        assert answer.why.startswith(f"{tmp_path}/dead has not answered for ")
        with ShmSlot(tmp_path / "pool/0.0", write=True) as slot:
            assert slot.lock(shared=False), "the trainer may fill it anew"
        one.send(order(tmp_path / "pool", tmp_path / "ckpt", "h2", deadline_s=10.0))
        assert "has not answered the previous attempt" in one.end("h2").why
    finally:
        os.close(leased)
        one.close()
    assert one.process.returncode == 0


def test_a_write_may_take_as_long_as_it_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    """A large state on a slow store takes hours; the other node waits for its part."""
    limit_s, pause = 3.0, threading.Event()

    class Slow(FolderBackend):
        def sink(self, name: str, nbytes: int = 0) -> FileWriter:
            made = super().sink(name, nbytes)
            write = made.write

            def slowly(data: bytes | memoryview) -> None:
                pause.wait(0.25)
                write(data)

            if name.endswith("__1_0.distcp"):
                monkeypatch.setattr(made, "write", slowly, raising=False)
            return made

    stage(tmp_path / "pool/0.0", [(full("a", (4,)), bytes(16))], world=2)
    nbytes = 16 * writer.WRITE_BYTES
    piece = full("b", (nbytes // 4,))
    stage(tmp_path / "pool/1.0", [(piece, bytes(nbytes))], rank=1, world=2)
    said = list[WriteReply]()

    def slow(where: str) -> CheckpointDirectory:
        store = CheckpointDirectory(where)
        store.place = Slow(Path(where))
        store.prepare()
        return store

    began = time.monotonic()
    attempts = []
    for node in range(2):
        mine = order(
            tmp_path / "pool",
            tmp_path / "ckpt",
            "s1",
            world=2,
            ranks=(node,),
            node=f"n{node}",
            writers=("n0", "n1") if node == 0 else (),
            deadline_s=limit_s,
        )
        attempts.append(WriteAttempt(mine, slow, said.append, None))
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.thread.join()
    assert time.monotonic() - began > limit_s, "the test has shown nothing"
    assert [a.why for a in said if a.phase is PersistPhase.FAILED] == []
    assert [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [7]


# --- the process ---


def wait_for(look: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while not look():
        assert time.monotonic() < deadline, f"waited for {what}"
        pause.wait(0.01)


def test_it_ends_with_its_input_and_lets_others_write(tmp_path: Path) -> None:
    one = Persister()
    simple(tmp_path / "pool/0.0")
    one.send(order(tmp_path / "pool", tmp_path / "ckpt", "q1"))
    assert one.end("q1").phase is PersistPhase.DONE
    # A terminal's Ctrl-C goes to all processes, and so do signals of batch systems (Slurm's USR1).
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        one.process.send_signal(number)
    one.close()
    assert one.process.returncode == 0
    CheckpointDirectory(tmp_path / "ckpt").acquire_lease(DirectoryOwner("another"))


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "parent_of_a_persister.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    simple(tmp_path / "pool/0.0")
    parent.stdin.write(order(tmp_path / "pool", tmp_path / "ckpt", "b1", grant=None).encode())
    parent.stdin.flush()
    assert parent.stdout.readline() == b"up\n"
    child = os.pidfd_open(pid)
    try:
        parent.kill()
        parent.wait()
        assert select.select([child], [], [], 60)[0], "it outlived its parent, with its input open"
    finally:
        os.close(child)
        parent.stdin.close()
        parent.stdout.close()


# --- kill -9 ---


def load(store: CheckpointDirectory) -> int:
    """What a restarted training gets: the step, of which every byte is; 0 if there is none."""
    tensors = {str(i): torch.zeros(1 << 16) for i in range(12)}
    found = restore.load(
        {"model": tensors}, CheckpointSources(store=store, job=JOB), rank=0, world=1, log=LOG
    )
    step = 0 if found is None else found.step
    for key, tensor in tensors.items():
        assert raw(tensor) == bytes([step % 251]) * (1 << 18), f"{key} is not of step {step}"
    return step


@pytest.mark.timeout(600)
def test_whatever_a_killed_persister_leaves_is_whole_or_not_there(tmp_path: Path) -> None:
    """kill -9 of one of two writers, at 100 random times from the order to past the commit; each
    time the newest that is there is loaded, and none is older than what was told to be committed.
    """
    kills = 100
    nursery = subprocess.Popen(
        [sys.executable, "-m", "tests.programs.kill_persisters", str(tmp_path), str(kills), "7"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    store = CheckpointDirectory(tmp_path / "ckpt")
    committed, left, known, told = 0, 0, 0, 0
    seen: set[int] = set()
    try:
        for _ in range(kills):
            said = json.loads(nursery.stdout.readline())
            found = store.checkpoints()
            assert not store.damaged
            assert not seen or max(seen) in {m.step for m in found}, "the previous one stays"
            for manifest in found:
                if manifest.step not in seen or manifest.step == max(seen):
                    verify(store, manifest)
                    assert len(manifest.chunks) == 12
            if said["told"]:
                known = said["step"]
                told += 1
            there = [json.loads(p.read_bytes()) for p in (tmp_path / "ckpt").glob("step-*.json")]
            newest = max(one["manifest"]["step"] for one in there if not one["manifest"]["void"])
            assert newest >= known, f"step {known} was told to be stored"
            assert load(CheckpointDirectory(tmp_path / "ckpt")) == newest
            committed += newest == said["step"]
            seen = {m.step for m in found}
            folders = {p.name for p in (tmp_path / "ckpt").iterdir() if p.is_dir()}
            left += bool(folders - {m.folder for m in found})
            nursery.stdin.write("\n")
            nursery.stdin.flush()
        last = json.loads(nursery.stdout.readline())
        assert not last["why"], last
        found = store.checkpoints()
        assert found[0].step == last["last"]
        verify(store, found[0])
        folders = {p.name for p in (tmp_path / "ckpt").iterdir() if p.is_dir()}
        assert folders == {m.folder for m in found}, "what the dead have left is swept"
        assert told, "some were killed after they had told of the commit"
        assert committed >= told
        assert left > kills / 20, "and some before"
        shapes = {f"model.{i}": ([1 << 16], "float32") for i in range(12)}
        loaded = load_with_torch(store.where(found[0]), shapes)
        assert raw(loaded["model.3"]) == bytes([last["last"] % 251]) * (1 << 18)
    finally:
        nursery.stdin.close()
        nursery.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            nursery.wait(30)
        nursery.kill()
        nursery.wait()
    print(
        f"{kills} kills: {committed} after their commit, {told} after they told of it, "
        f"{left} left something behind"
    )


# --- the types of torch ---


def test_pieces_are_of_torchs_types() -> None:
    """Every type that slots may hold is one of the installed torch, of that size."""
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size
    assert TensorChunk("x", "bool", (2,), (2,), (0,)).nbytes == 2
