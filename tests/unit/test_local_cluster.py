"""The job on this machine, before a process of it is started."""

import json
import os
import shutil
import socket
from datetime import datetime
from pathlib import Path

import pytest

from dlrover_py.cli import runs
from dlrover_py.cli.local_jobs import (
    EndedJob,
    JobNotFoundError,
    JobUnreachableError,
    RunningJob,
    find_to_change,
    find_to_read,
    running,
)
from dlrover_py.cli.runs import began_at, stamp_of
from dlrover_py.cli.settings import Settings
from dlrover_py.cli.shared import SharedCluster
from dlrover_py.cli.shared_record import AdoptedProcess, Record, StartedJob, digest
from dlrover_py.localcluster.cluster import (
    OUTPUT_TAIL,
    JobPaths,
    LocalCluster,
    _tail,
    host_shortage,
)
from dlrover_py.process.identity import ProcessId
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import ConfigError, DLRoverError, FileLimitError, UnreachableError
from dlrover_py.protocol.names import STATUS_FILE
from dlrover_py.protocol.status import JobPhase
from tests.builders import Bench, elastic_job
from tests.limits import open_files, room_for


def prepared(folder: Path, name: str = "job", *, run: str = "") -> LocalCluster:
    paths = JobPaths(folder / "run" / name, folder / "state" / (name + run))
    return LocalCluster.prepare(elastic_job(1), hosts=1, paths=paths, workdir=folder, environ={})


def test_a_job_that_may_open_too_few_files_leaves_nothing_behind(tmp_path: Path) -> None:
    prepared(tmp_path, "earlier").close()  # it makes what a process makes once only
    errors: list[DLRoverError] = []
    before = open_files()
    for files in range(20):
        state = f"job-{files}"
        try:
            with room_for(files):
                cluster = prepared(tmp_path, state)
        except DLRoverError as error:
            errors.append(error)
        else:
            cluster.close()
            break
        assert not (tmp_path / "run" / state).exists(), files
        assert open_files() == before, files
    assert [type(error) for error in errors[-4:]] == [FileLimitError] * 4
    assert "the sockets of the job: Too many open files" in str(errors[-1])


def test_a_socket_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DLROVER_RUNTIME_DIR can name another folder"):
        prepared(tmp_path, "x" * 120)
    assert not (tmp_path / "run" / ("x" * 120)).exists()
    assert not (tmp_path / "state" / ("x" * 120)).exists(), "it would be listed as a killed run"


def test_a_request_without_an_answer_is_told_as_one_that_may_follow_later(tmp_path: Path) -> None:
    """A process that is stopped does not answer, and finds the request when it goes on."""
    path = tmp_path / "cluster.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        with pytest.raises(UnreachableError) as told:
            RunningJob("job", path, None, call_s=0.2).request("/v1/stop")
    message = str(told.value)
    assert f"its `dlrover job run` (process {os.getpid()}) is blocked or very busy" in message
    assert "carried out as soon as that process goes on" in message


@pytest.mark.parametrize("gone", ["all", "root", "socket", "token", "nothing"])
def test_a_runtime_folder_that_was_removed_is_made_again(tmp_path: Path, gone: str) -> None:
    cluster = prepared(tmp_path)
    paths, settings = cluster.paths, Settings(tmp_path / "run", tmp_path / "state", {})
    try:
        token = paths.token.read_text()
        assert cluster.folder.restore() is None
        if gone == "all":
            shutil.rmtree(paths.runtime)
        elif gone == "root":
            shutil.rmtree(paths.runtime.parent)
        elif gone != "nothing":
            (paths.socket if gone == "socket" else paths.token).unlink()
        listener = cluster.folder.restore()
        assert (listener is not None) is (gone not in ("token", "nothing"))
        assert paths.token.read_text() == token
        assert paths.token.stat().st_mode & 0o77 == paths.runtime.stat().st_mode & 0o77 == 0
        with pytest.raises(ConfigError, match="runs already"):
            prepared(tmp_path)
        assert list(running(settings)) == ["job"]
        if listener is not None:
            listener.close()
        assert cluster.folder.restore() is None
    finally:
        cluster.close()
    assert not paths.runtime.exists()
    assert cluster.folder.restore() is None
    assert not paths.runtime.exists(), "the job has ended"


def test_the_run_that_goes_on_can_be_changed_by_its_own_name(tmp_path: Path) -> None:
    """Its page could be opened by this name, and each action on it failed."""
    cluster = prepared(tmp_path, run="@2")
    settings = Settings(tmp_path / "run", tmp_path / "state", {})
    earlier = tmp_path / "state" / "job@1"
    earlier.mkdir()
    (earlier / STATUS_FILE).write_text("{}")
    try:
        assert find_to_change(settings, "job@2").name == "job"
        with pytest.raises(JobNotFoundError, match="run job@1 has ended"):
            find_to_change(settings, "job@1")
        with pytest.raises(JobNotFoundError, match="run job@3 is not known"):
            find_to_change(settings, "job@3")
    finally:
        cluster.close()


def test_a_job_whose_folder_was_removed_is_told_as_that(tmp_path: Path) -> None:
    cluster = prepared(tmp_path, run="@1")
    paths = cluster.paths
    settings = Settings(tmp_path / "run", tmp_path / "state", {})
    try:
        shutil.rmtree(paths.runtime)
        for find in (find_to_read, find_to_change):
            for name in ("job", "job@1", None):
                with pytest.raises(JobUnreachableError, match="job runs, but no command reaches"):
                    find(settings, name)
        assert issubclass(JobUnreachableError, JobNotFoundError), "a cluster is searched, too"
        ended = tmp_path / "state" / "another@5"
        ended.mkdir()
        (ended / STATUS_FILE).write_text("{}")
        found = find_to_read(settings, None)
        assert isinstance(found, EndedJob), "the job may run on another machine of this home"
    finally:
        cluster.close()
    assert list(running(settings)) == []
    assert runs.was_killed(paths.state)


def test_a_folder_that_another_job_has_taken_is_left_alone(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    shutil.rmtree(first.paths.runtime.parent)
    second = prepared(tmp_path, run="@2")
    try:
        with pytest.raises(ConfigError, match="another job of this name has taken"):
            first.folder.restore()
        first.close()
        assert second.paths.token.exists()
        assert list(running(Settings(tmp_path / "run", tmp_path / "state", {}))) == ["job"]
    finally:
        second.close()


def test_a_size_for_which_there_are_too_few_hosts_is_told() -> None:
    assert host_shortage(elastic_job(3), 3) == ""
    assert host_shortage(elastic_job(50), 1) == (
        ", but there is only 1 host: 49 nodes wait for one; "
        "`dlrover node add --count 49 --job x` adds hosts"
    )


def test_of_a_line_that_the_tail_cuts_nothing_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(json.dumps({"event": "x" * OUTPUT_TAIL}) + "\nTraceback\nKeyError: 'lr'\n")
    assert _tail(log) == "Traceback\nKeyError: 'lr'"


def test_jobs_that_share_hosts_are_regular_files(tmp_path: Path) -> None:
    """A FIFO would block all jobs until somebody writes."""
    (tmp_path / "a.yaml").touch()
    (tmp_path / "b.yaml").symlink_to("a.yaml")
    os.mkfifo(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").mkdir()
    (tmp_path / "e.yaml").symlink_to("/dev/zero")
    shared = SharedCluster(tmp_path, Settings(tmp_path, tmp_path, {}), 1)
    assert [path.name for path in shared.files()] == ["a.yaml", "b.yaml"]


def test_one_call_at_a_time_has_the_jobs_of_a_folder(tmp_path: Path) -> None:
    first, second, other = (Record(tmp_path / n, tmp_path / "state") for n in ("a", "a/../a", "b"))
    match = "another `dlrover cluster run`"
    with first.locked(), other.locked(), pytest.raises(ConfigError, match=match):
        second.locked().__enter__()
    with second.locked():
        assert second.read() == ({}, True)


@pytest.mark.parametrize("text", ["", "[", "{}", '{"boot": "b", "jobs": {"a.yaml": {}}}'])
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    record = Record(tmp_path / "jobs", tmp_path)
    record.path.write_text(text)
    record.path.chmod(0o600)
    with pytest.raises(ConfigError, match="it is damaged, or of another release"):
        record.read()


STARTED = began_at("20261130-010000.500")


def recorded(folder: Path, process: ProcessId, *, run: str = "") -> SharedCluster:
    """Return a cluster whose record has a job with this process, and perhaps its run."""
    settings = Settings(folder / "run", folder / "state", {})
    cluster = SharedCluster(folder / "jobs", settings, 2)
    cluster.folder.mkdir()
    (cluster.folder / "a.yaml").write_text("a")
    one = StartedJob(
        job=elastic_job(2),
        content=digest(cluster.folder / "a.yaml"),
        process=str(process),
        queued_at=1.0,
        started_at=STARTED,
        run=run,
        granted=NodeAllocation(nodes=2),
    )
    with cluster.record.locked():
        cluster.record.write({"a.yaml": one})
    return cluster


def test_a_later_process_with_the_same_number_is_not_taken_over(tmp_path: Path) -> None:
    own = ProcessId.of(os.getpid())
    cluster = recorded(tmp_path, own._replace(started=own.started - 1))
    cluster.carry_on()
    assert not cluster.jobs
    assert [file.name for file in cluster.files()] == ["a.yaml"]


def test_a_job_that_runs_is_taken_over_at_once_with_the_hosts_that_it_may_have(
    tmp_path: Path,
) -> None:
    cluster = recorded(tmp_path, ProcessId.of(os.getpid()))
    cluster.carry_on()
    (job,) = cluster.jobs.values()
    assert job.granted == NodeAllocation(nodes=2)
    assert job.demand().granted == 2
    assert not cluster.files(), "it is not started again"


def ended(folder: Path, *, run: str = "") -> SharedCluster:
    """Return a cluster whose record has a job whose process has ended."""
    own = ProcessId.of(os.getpid())
    return recorded(folder, own._replace(started=own.started - 1), run=run)


def test_a_job_whose_run_was_removed_has_ended(tmp_path: Path) -> None:
    """Each later call refused it, as a job of another machine."""
    cluster = ended(tmp_path, run=str(tmp_path / "state" / "x@20261130-010001.000"))
    cluster.carry_on()
    assert (list(cluster.over), cluster.files(), cluster.failed) == (["a.yaml"], [], False)


def test_a_run_that_another_machine_has_is_refused_with_the_name_of_the_record(
    tmp_path: Path,
) -> None:
    name = "x@20261130-010001.000"
    other = prepared(tmp_path, "x", run=name.removeprefix("x"))
    cluster = ended(tmp_path, run=str(tmp_path / "state" / name))
    try:
        with pytest.raises(ConfigError, match="still runs on another machine") as told:
            cluster.carry_on()
    finally:
        other.close()
    assert str(cluster.record.path) in str(told.value)
    cluster = SharedCluster(cluster.folder, cluster.settings, 2)
    cluster.carry_on()
    assert cluster.files(), "it was killed, and is started again"


@pytest.mark.parametrize(
    ("phase", "failed"), [(JobPhase.SUCCEEDED, False), (JobPhase.FAILED, True)]
)
def test_a_job_that_has_ended_before_its_run_was_recorded_is_not_run_again(
    tmp_path: Path, phase: JobPhase, failed: bool
) -> None:
    cluster = ended(tmp_path)
    status = Bench(elastic_job(1)).job.status(0.0, 1.0)
    before, own, later = (f"x@20261130-0{n}.000" for n in ("10000", "10001", "20000"))
    for run, its in ((before, JobPhase.FAILED), (own, phase), (later, JobPhase.FAILED)):
        folder = tmp_path / "state" / run
        folder.mkdir()
        text = status.model_copy(update={"phase": its}).model_dump_json()
        (folder / STATUS_FILE).write_text(text)
    (tmp_path / "state" / "x@y").mkdir()
    cluster.carry_on()
    assert (list(cluster.over), cluster.files(), cluster.failed) == (["a.yaml"], [], failed)
    (one,) = cluster.over.values()
    process = AdoptedProcess(one.model_copy(update={"code": None}), tmp_path / "state")
    assert (process.killed, process.returncode) == (False, int(failed))
    shutil.rmtree(tmp_path / "state" / own)
    shutil.rmtree(tmp_path / "state" / later)
    assert process.killed, "an earlier run is none of it"


def test_the_name_of_a_run_has_its_time() -> None:
    at = datetime.now().astimezone()
    assert 0 <= at.timestamp() - began_at(stamp_of(at)) < 0.0011


def test_a_record_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    """It is written twice a second."""
    record = recorded(tmp_path, ProcessId.of(os.getpid())).record
    jobs, _ = record.read()
    blocker = record.path.with_suffix(".fresh")
    for other in ({}, jobs):
        blocker.mkdir()
        assert "it is not a regular file" in record.save(other)
        assert record.save(other) == ""
        blocker.rmdir()
        assert record.save(other) == ""
        assert record.read()[0] == other


def test_no_job_is_taken_over_through_a_folder_of_another_user(tmp_path: Path) -> None:
    cluster = recorded(tmp_path, ProcessId.of(os.getpid()))
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to it"):
        cluster.carry_on()
    assert not cluster.jobs
