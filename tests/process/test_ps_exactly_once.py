"""Workers, servers and masters are killed at random: each sample counts once in model and tables.

The tables are on servers, the samples are leased, and a checkpoint has both. So the rows at the end
are those of a training without any death.
"""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.protocol.names import is_server
from dlrover_py.trainer.object_codec import decode_object
from tests.process.harness import CALM, Job, Place, eventually, job
from tests.programs import PROGRAMS
from tests.programs.train_tables_on_shards import TABLES, push, rows_of
from tests.ps_threads import client, servers

PROGRAM = PROGRAMS / "train_tables_on_shards.py"
SAMPLES, EPOCHS, KILLS = 240, 3, 10
KINDS = ("worker", "worker", "server", "all servers", "master", "master and server")


def steps(folder: Path) -> int:
    """Return how many steps rank 0 has made, with those that were forgotten."""
    path = folder / "steps"
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill(run: Job, kind: str, choose: random.Random) -> None:
    """Kill some processes of a job."""
    seen = run.snapshot()
    found = [one for one in seen.nodes if is_server(one.id) and one.state == "running"]
    pids: list[int] = []
    if "master" in kind:
        pids.append(seen.master_pid)
    if kind == "worker":
        workers = [pid for node in run.status().nodes for pid in node.pids]
        pids += choose.sample(workers, min(1, len(workers)))
    elif kind == "all servers":
        pids += [one.pid for one in found]
    elif "server" in kind:
        pids += [one.pid for one in choose.sample(found, min(1, len(found)))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def undisturbed(folder: Path) -> list[list[float]]:
    """Return the counts of the model, and the rows of both tables, of one worker that lives."""
    with servers(folder) as access, client(access) as worker:
        for spec in TABLES:
            worker.create(spec)
        for _ in range(EPOCHS):
            push(worker, list(range(SAMPLES)))
        return [[EPOCHS] * SAMPLES, *rows_of(worker, SAMPLES)]


def further(folder: Path, before: int, count: int) -> Callable[[], bool]:
    """Return a check whether rank 0 has made this many further steps, or the run has ended."""
    return lambda: steps(folder) >= before + count or (folder / "counts").exists()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_sample_counts_once_whoever_is_killed(place: Place, seed: int) -> None:
    choose = random.Random(seed)
    folder, cuts = place.folder, place.folder / "cuts"
    done: list[str] = []
    given = {"settings": CALM, "replicas": 2, "restartCount": 100}
    given["ps"] = {"replicas": 2, "checkpoints": str(cuts), "restartCount": 100}
    args = (str(folder), str(SAMPLES), str(EPOCHS))
    with job(place, script=PROGRAM, args=args, **given) as run:  # type: ignore[arg-type]
        for _ in range(KILLS):
            wanted = further(folder, steps(folder), choose.randint(1, 8))
            eventually(wanted, f"more steps after {done}", within_s=240)
            Event().wait(choose.random() * 0.2)  # anywhere in a step, or in a save
            if (folder / "counts").exists():
                break
            done.append(choose.choice(KINDS))
            kill(run, done[-1], choose)
        assert run.wait() == 0, f"{done}: {''.join(run.output)}"
    assert len(done) == KILLS
    (folder / "calm").mkdir()
    assert json.loads((folder / "counts").read_text()) == undisturbed(folder / "calm"), done
    stored = CheckpointDirectory(folder / "checkpoints")
    kept = {one.folder for one in CheckpointDirectory(cuts).checkpoints()}
    for manifest in stored.checkpoints():
        (written,) = [one for one in manifest.objects if one.key == "tables.cut"]
        data = stored.read_all(manifest, written.file, written.position, written.nbytes)
        assert decode_object(bytes(data)) in kept, "each checkpoint has its cut"
