"""What an attempt to store a checkpoint says while it waits for the writer lease."""

import json
import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover_py.checkpoint.directory import (
    LEASE_FILE,
    LEASE_S,
    RENEW_S,
    CheckpointDirectory,
    DirectoryOwner,
)
from dlrover_py.checkpoint.writer import PersisterProcess, WriteAttempt
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import WatchLease, WriteReply
from tests.slots import JOB, full, order, raw, stage


class FreedAtTheFourthTry(CheckpointDirectory):
    """A directory whose lease another writer gives up at some time."""

    tries = 0

    def acquire_lease(self, *args: Any, **options: Any) -> None:
        self.tries += 1
        if self.tries == 4:
            (Path(self.place.url) / LEASE_FILE).unlink()
        super().acquire_lease(*args, **options)


@pytest.mark.parametrize(
    ("holder", "host"),
    [("another-job", "another"), (f"{JOB}/n7", None)],
    ids=["a writer that may be dead", "another node without a master"],
)
def test_a_wait_for_the_lease_is_a_reason_once_and_until_it_ends(
    tmp_path: Path, holder: str, host: str | None
) -> None:
    place = tmp_path / "ckpt"
    place.mkdir()
    CheckpointDirectory(place).acquire_lease(DirectoryOwner(holder), "a1")
    if host is not None:
        lease = json.loads((place / LEASE_FILE).read_bytes()) | {"host": host}
        (place / LEASE_FILE).write_text(json.dumps(lease))
    stage(tmp_path / "pool/0.0", [(full("w", (4,)), raw(torch.ones(4)))], step=7)
    request = order(tmp_path / "pool", place, "0123456789ab", node="n1", writers=("n1",), grant=3)
    request = request.model_copy(update={"without_master": True})
    said: list[WriteReply] = []
    store = FreedAtTheFourthTry(place)
    store.prepare()
    attempt = WriteAttempt(request, lambda _: store, said.append, None)
    attempt.start()
    attempt.thread.join()
    store.release()
    assert store.tries == 4
    assert said[-1].phase is PersistPhase.DONE
    before, waits, after = (one.why for one in said if one.phase is PersistPhase.WRITING)
    assert "waits for the end of its lease" in waits
    assert before == after == ""


class Clock:
    """A clock that the test sets; it notes that it was read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.was_read = threading.Event()

    def __call__(self) -> float:
        self.was_read.set()
        return self.now


def test_a_lease_that_was_watched_before_the_first_write_has_expired_by_then(
    tmp_path: Path,
) -> None:
    """The wait of 20 s for the lease of a killed run began at the end of a short one."""
    place = tmp_path / "ckpt"
    place.mkdir()
    CheckpointDirectory(place).acquire_lease(DirectoryOwner("another-job"), "a1")
    lease = json.loads((place / LEASE_FILE).read_bytes()) | {"host": "another"}
    (place / LEASE_FILE).write_text(json.dumps(lease))
    stage(tmp_path / "pool/0.0", [(full("w", (4,)), raw(torch.ones(4)))], step=7)
    said: queue.SimpleQueue[WriteReply] = queue.SimpleQueue()
    clock = Clock()
    persister = PersisterProcess(said.put, clock=clock)
    for _ in range(int(LEASE_S // RENEW_S) + 1):
        persister.take(WatchLease(dir=str(place), job=JOB))
        assert clock.was_read.wait(30)
        clock.was_read.clear()
        clock.now += RENEW_S
    persister.take(
        order(tmp_path / "pool", place, "0123456789ab", node="n1", writers=("n1",), grant=3)
    )
    replies = [said.get(timeout=60)]
    while replies[-1].phase is PersistPhase.WRITING:
        replies.append(said.get(timeout=60))
    persister.close()
    assert [(reply.phase, reply.why) for reply in replies] == [
        (PersistPhase.WRITING, ""),
        (PersistPhase.DONE, ""),
    ]
    assert not (place / LEASE_FILE).exists(), "it was given back"
