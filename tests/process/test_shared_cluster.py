"""Jobs that share a simulated cluster: the files and the script of examples/07-two-jobs."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dlrover_py.protocol.status import JobStatus
from tests.process.harness import Job, Place, eventually

EXAMPLE = Path(__file__).parents[2] / "examples/07-two-jobs"


def put(place: Place, source: str, goal: str, steps: int) -> None:
    """Copy a job file of the example, with another number of steps."""
    text = re.sub(r"--steps=\d+", f"--steps={steps}", (EXAMPLE / source).read_text())
    fresh = place.folder / goal
    fresh.with_suffix(".new").write_text(text)
    fresh.with_suffix(".new").rename(fresh)


@contextmanager
def shared(place: Place, name: str) -> Iterator[Job]:
    """Run ``dlrover cluster run`` on four hosts; yield one of its jobs, with the whole output."""
    process = place.popen(
        *("dlrover", "cluster", "run", "jobs", "--nodes", "4"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"STEPS_FOLDER": str(place.folder)},
    )
    job = Job(place, name, process)
    try:
        eventually(lambda: job.socket.exists() or process.poll() is not None, "the job's socket")
        yield job
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        job.wait(within_s=170)
        assert process.stdout is not None
        process.stdout.close()


def step(status: JobStatus) -> int:
    return status.progress.step if status.progress is not None else -1


def test_a_job_shrinks_for_another_and_grows_when_that_has_ended(place: Place) -> None:
    (place.folder / "jobs").mkdir()
    shutil.copy(EXAMPLE / "train.py", place.folder)
    put(place, "jobs/a.yaml", "jobs/a.yaml", 100_000)
    with shared(place, "a") as job:
        reached = step(job.until(lambda s: step(s) > 3 and s.nodes_in_round == 4, "four nodes"))
        put(place, "urgent.yaml", "jobs/urgent.yaml", 20)
        small = job.until(lambda s: s.nodes_in_round == 2 and step(s) > reached, "two nodes")
        assert small.round == 2
        eventually(lambda: len(job.snapshot().hosts) == 2, "two hosts given back")
        assert job.snapshot().job.worker.replicas == 6, "replicas is the user's"
        large = job.until(
            lambda s: s.nodes_in_round == 4 and step(s) > step(small), "four nodes again"
        )
        assert set(large.restarts) <= {"scale", "join"}, "nothing has died"
        assert large.last_failure is None
        why = job.cli("job", "why", "a")
        assert re.search("size: (2→4|4 nodes): ", why)
        output = "".join(job.output)
        assert "[cluster] a: 4→2: 2 nodes given back, urgent gets them\n" in output
        assert "[cluster] urgent: 2 nodes: the minimum is 2\n" in output
        assert "[cluster] urgent has ended: 2 hosts free\n" in output
        assert re.search(r"\[urgent\].* JobSucceeded", output)
        assert job.stop() == 130
    (state,) = (place.folder / "state").glob("a@*/status.json")
    assert json.loads(state.read_text())["phase"] == "Stopped"


def test_files_that_cannot_be_used_are_refused_before_anything_starts(place: Place) -> None:
    (place.folder / "jobs").mkdir()
    done = place.call("dlrover", "cluster", "run", "jobs")
    assert done.returncode == 2
    assert "jobs: found no file *.yaml: expected job files" in done.stderr
    put(place, "jobs/a.yaml", "jobs/a.yaml", 1)
    put(place, "jobs/a.yaml", "jobs/copy.yaml", 1)
    done = place.call("dlrover", "cluster", "run", "jobs")
    assert done.returncode == 2
    assert "jobs/copy.yaml: metadata.name: found a, which a.yaml has as well" in done.stderr
    text = (EXAMPLE / "jobs/b.yaml").read_text()
    standby = text.replace("replicas: 6", "replicas: 6\n      standbyReplicas: 1")
    (place.folder / "jobs/copy.yaml").write_text(standby)
    done = place.call("dlrover", "cluster", "run", "jobs")
    assert done.returncode == 2
    assert "standbyReplicas is 1: expected none" in done.stderr
    assert not (place.folder / "run").exists()
