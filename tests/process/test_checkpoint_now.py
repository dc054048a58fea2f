"""A user has the newest checkpoint stored while the workers go on."""

import re

import pytest

from dlrover_py.checkpoint.directory import CheckpointDirectory
from tests.process.harness import CALM, Place, job, last, members
from tests.programs import PROGRAMS

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_the_newest_checkpoint_is_stored_while_the_workers_go_on(place: Place) -> None:
    script = PROGRAMS / "save_until_stopped.py"
    with job(place, script=script, args=("20",), replicas=2, settings=CALM) as run:
        first = run.running(2)
        run.until(lambda s: last(s) is not None, "a checkpoint in memory")
        said = run.cli("job", "checkpoint", run.name)
        found = re.fullmatch(r"job: the checkpoint of step (\d+) is in (\S+)\n", said)
        assert found is not None, said
        step, folder = int(found[1]), found[2]
        stored = run.until(
            lambda s: s.last_checkpoint is not None and s.last_checkpoint.step > step,
            "a later checkpoint in memory",
        )
        assert stored.last_checkpoint is not None
        assert (stored.last_checkpoint.stored_step, stored.last_checkpoint.where) == (
            step, "memory",
        )  # fmt: skip
        assert stored.round == first.round
        assert [n.pids for n in members(stored)] == [n.pids for n in members(first)]
        store = CheckpointDirectory(place.folder / "store")
        assert [(m.step, store.where(m)) for m in store.checkpoints()] == [(step, folder)]
