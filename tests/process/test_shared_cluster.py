"""Jobs that share a simulated cluster: the files and the script of examples/07-two-jobs."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from dlrover_py.protocol.status import JobStatus
from tests.process.harness import SLEEPER, Job, Place, alive, document, eventually
from tests.process.harness import job as running_job

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


def sleeping(place: Place, name: str) -> Path:
    """Write the file of a job that trains without an end."""
    place.script(SLEEPER)
    file = place.folder / "jobs" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    command = ["elastic-run", str(place.folder / "train.py")]
    file.write_text(yaml.safe_dump(document(command, name=name, replicas=2, minReplicas=1)))
    return file


def said(job: Job, text: str) -> bool:
    return any(text in line for line in job.output)


def record(place: Place) -> dict[str, Any]:
    """Return what was recorded of the jobs, by the names of their files."""
    found = list((place.folder / "state").glob(".shared-*.json"))
    jobs = json.loads(found[0].read_text())["jobs"] if found else {}
    assert isinstance(jobs, dict)
    return jobs


def runs_of(place: Place, name: str) -> int:
    return len(list((place.folder / "state").glob(f"{name}@*")))


def test_the_next_call_takes_over_the_jobs_of_one_that_was_killed(place: Place) -> None:
    (place.folder / "jobs").mkdir()
    shutil.copy(EXAMPLE / "train.py", place.folder)
    put(place, "jobs/a.yaml", "jobs/a.yaml", 100_000)
    put(place, "urgent.yaml", "jobs/urgent.yaml", 5)
    with shared(place, "a") as job:
        eventually(lambda: said(job, "[cluster] urgent has ended: "), "its end", within_s=120)
        reached = step(job.until(lambda s: step(s) > 3 and s.nodes_in_round == 4, "four nodes"))
        pid = job.snapshot().cluster_pid
        eventually(lambda: record(place).get("urgent.yaml", {}).get("code") == 0, "its code")
        job.process.kill()
        job.process.wait()
    eventually(lambda: step(job.status()) > reached, "steps while no process allots hosts")
    put(place, "urgent.yaml", "other.yaml", 20)
    text = (place.folder / "other.yaml").read_text()
    (place.folder / "jobs/other.yaml").write_text(text.replace("name: urgent", "name: other"))
    with shared(place, "other") as other:
        assert said(other, "[cluster] a runs on; its output is in `dlrover job logs a`")
        assert said(other, "[cluster] urgent has ended before: it is not run again")
        eventually(lambda: job.status().nodes_in_round == 2, "two nodes", within_s=120)
        second = place.call("dlrover", "cluster", "run", "jobs")
        assert second.returncode == 2
        assert "another `dlrover cluster run` runs the jobs of this folder" in second.stderr
        eventually(lambda: said(other, "[cluster] other has ended: "), "its end", within_s=120)
        eventually(lambda: job.status().nodes_in_round == 4, "four nodes", within_s=120)
        assert set(job.status().restarts) <= {"scale", "join"}, "nothing has died"
        assert job.snapshot().cluster_pid == pid, "it was not started again"
        assert other.stop() == 130
    assert (runs_of(place, "a"), runs_of(place, "urgent")) == (1, 1)
    assert not record(place), "the next call begins anew"
    (state,) = (place.folder / "state").glob("a@*/status.json")
    assert json.loads(state.read_text())["phase"] == "Stopped"


def test_a_job_is_not_started_twice_if_the_call_is_killed_in_its_first_moment(place: Place) -> None:
    sleeping(place, "a")
    argv = ("dlrover", "cluster", "run", "jobs", "--nodes", "4")
    with (place.folder / "out").open("wb") as out:
        first = place.popen(*argv, stdout=out, stderr=out)
        eventually(lambda: "a.yaml" in record(place), "a record")
        first.kill()
        first.wait()
    process = record(place)["a.yaml"]["process"]
    with shared(place, "a") as job:
        job.until(lambda s: s.nodes_in_round == 2, "two nodes")
        # The shell that waits for the record has ended with the call, if it was still there.
        same = job.snapshot().cluster_pid == int(process.partition("@")[0])
        assert same is not said(job, "[cluster] a was killed")
        assert runs_of(place, "a") == 1


def test_a_job_whose_file_was_changed_is_neither_taken_over_nor_started_again(place: Place) -> None:
    file, other = sleeping(place, "a"), sleeping(place, "b")
    with shared(place, "b") as job:
        eventually(lambda: record(place).get("a.yaml", {}).get("run"), "a run of a")
        eventually(lambda: record(place).get("b.yaml", {}).get("run"), "a run of b")
        eventually(job.socket.exists, "the socket of b, which comes after its folder")
        job.process.kill()
        job.process.wait()
    pid = job.snapshot().cluster_pid
    text = file.read_text()
    file.write_text(text + "# changed\n")
    done = place.call("dlrover", "cluster", "run", "jobs", "--nodes", "4")
    assert done.returncode == 2
    assert "jobs/a.yaml: it was changed or removed since" in done.stderr
    assert "`dlrover job stop a`" in done.stderr
    other.unlink()
    file.write_text(text)
    done = place.call("dlrover", "cluster", "run", "jobs", "--nodes", "4")
    assert "jobs/b.yaml: it was changed or removed since" in done.stderr
    sleeping(place, "b")
    os.kill(int(record(place)["a.yaml"]["process"].partition("@")[0]), signal.SIGKILL)
    eventually(lambda: not alive(int(record(place)["a.yaml"]["process"].partition("@")[0])), "end")
    with shared(place, "a") as again:
        eventually(lambda: record(place)["a.yaml"]["run"] and runs_of(place, "a") == 2, "a run")
        assert said(again, "[cluster] a was killed, too: it is started again")
        assert job.snapshot().cluster_pid == pid
    assert (runs_of(place, "a"), runs_of(place, "b")) == (2, 1)


def test_a_job_that_another_command_runs_is_left_alone(place: Place) -> None:
    sleeping(place, "job")
    with running_job(place, replicas=2, minReplicas=1) as job:
        job.running(2)
        done = place.call("dlrover", "cluster", "run", "jobs", "--nodes", "1")
        assert done.returncode == 1
        assert "stop it with `dlrover job stop job`, or choose another name" in done.stdout
        assert job.snapshot().job.allocation is None
        assert len(job.snapshot().hosts) == 2


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
