"""What an attempt to store a checkpoint says while it waits for the writer lease."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrover_py.checkpoint.directory import LEASE_FILE, CheckpointDirectory, DirectoryOwner
from dlrover_py.checkpoint.writer import WriteAttempt
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import WriteReply
from tests.slots import JOB, full, order, raw, stage


class FreedAtTheFourthTry(CheckpointDirectory):
    """A directory whose lease another writer gives up at some time."""

    tries = 0

    def acquire_lease(self, *args: Any, **options: Any) -> None:
        self.tries += 1
        if self.tries == 4:
            (Path(self.place.url) / LEASE_FILE).unlink()
        super().acquire_lease(*args, **options)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
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
    stage(tmp_path / "arena/0.0", [(full("w", (4,)), raw(torch.ones(4)))], step=7)
    request = order(tmp_path / "arena", place, "0123456789ab", node="n1", writers=("n1",), grant=3)
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
