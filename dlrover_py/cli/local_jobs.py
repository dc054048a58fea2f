"""Jobs of this machine: running jobs, through their cluster process's socket, and ended jobs."""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import click
from pydantic import BaseModel, ValidationError

from dlrover_py.cli import runs, view
from dlrover_py.cli.logs import LogQuery, missing_log_message, print_logs, tail
from dlrover_py.cli.settings import Settings
from dlrover_py.net.http_client import HttpClient
from dlrover_py.process.identity import is_stopped
from dlrover_py.process.ownership import RUNTIME_HINT, STATE_HINT, NotOwnedError, is_own
from dlrover_py.protocol import names
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.documents import explain
from dlrover_py.protocol.errors import ConfigError, UnreachableError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.job_view import LogTail
from dlrover_py.protocol.local import CallDone, History, Snapshot
from dlrover_py.protocol.status import EvidenceManifest, JobPhase, JobStatus, date_time

D = TypeVar("D", bound=BaseModel)
T = TypeVar("T")

CALL_S = 10.0
"""Deadline of a call to a job's cluster process, in seconds."""
STOP_S = 60.0
"""Seconds that ``dlrover job stop`` waits for the end of a job."""
KILLED = "Killed"
"""Phase of a run that was killed, as the commands show it. No status has it."""
DAMAGED, UNKNOWN = "Damaged", "Unknown"
"""Phases of a run and of a running job whose status cannot be read. No status has them."""


class JobNotFoundError(ConfigError):
    """There is no such job on this machine, or several jobs match."""

    def __init__(self, text: str, *, several: bool = False) -> None:
        """Keep the message.

        Args:
            text: the message.
            several: several jobs match.
        """
        super().__init__(text)
        self.several = several


class JobUnreachableError(JobNotFoundError):
    """A job seems to run on this machine, but no command reaches it."""


def find_to_read(settings: Settings, name: str | None) -> "RunningJob | EndedJob":
    """Return the running job with this name, or else its last run.

    Without a name it is the only running job, or else the last run of any job. A name such as
    ``demo@20261129-114252.713`` is that of one run, as its folder has it.

    Raises:
        JobNotFoundError: there is no such job, or several jobs match.
        JobUnreachableError: it runs, but its runtime folder was removed.
        ConfigError: another user could have made the content of a folder.
    """
    present = running(settings)
    if name in present or (name is None and present):
        return _select(present, name)
    if name is not None and "@" in name:
        return _find_run(settings, name, present)
    if name is not None:
        _refuse_unreachable(settings, name)
    if folder := runs.newest(settings.state_folder, name):
        return EndedJob(folder)
    if name is None:
        _refuse_unreachable(settings, name)
        raise JobNotFoundError(
            "no job has run on this machine; start one with `dlrover job run job.yaml`"
        )
    raise JobNotFoundError(f"job {name} is not known on this machine; see `dlrover job list`")


def _find_run(
    settings: Settings, name: str, present: "dict[str, RunningJob]"
) -> "RunningJob | EndedJob":
    """Return the run with the name of its folder.

    Args:
        settings: settings of this command.
        name: name of the folder.
        present: the running jobs.

    Raises:
        JobNotFoundError: there is no such run.
        JobUnreachableError: it goes on, but its runtime folder was removed.
        ConfigError: another user could have made the content of a folder.
    """
    job, _, stamp = name.rpartition("@")
    known = runs.stamps(settings.state_folder, job)
    if stamp not in known or settings.state_folder is None:
        raise JobNotFoundError(f"run {name} is not known on this machine; see `dlrover job list`")
    folder = settings.state_folder / name
    if runs.goes_on(folder):
        if job in present:
            return present[job]
        _refuse_unreachable(settings, job)
    return EndedJob(folder, name)


def find_to_change(settings: Settings, name: str | None) -> "RunningJob":
    """Return the running job with this name, or the only running job.

    Jobs that have ended are ignored. The name may be that of the run that goes on.

    Raises:
        JobNotFoundError: there is no such job, or several jobs match.
        JobUnreachableError: it runs, but its runtime folder was removed.
        ConfigError: another user could have made the content of a folder.
    """
    present = running(settings)
    if name is not None and "@" in name:
        run = _find_run(settings, name, present)
        if isinstance(run, RunningJob):
            return run
        raise JobNotFoundError(f"run {name} has ended: only a run that goes on can be changed")
    if name not in present and (name is not None or not present):
        _refuse_unreachable(settings, name)
    return _select(present, name)


def _refuse_unreachable(settings: Settings, name: str | None) -> None:
    """Refuse a job that runs, but whose runtime folder was removed.

    Args:
        settings: settings of this command.
        name: name of the job; None for any job.

    Raises:
        JobUnreachableError: there is such a job.
    """
    root = settings.state_folder
    for run in root.glob(f"{name or '*'}@*") if root is not None else ():
        with contextlib.suppress(OSError):
            folder = (run / names.RUNTIME_LINK).readlink()
            if not (folder / names.CLUSTER_SOCKET).exists() and runs.goes_on(run):
                raise JobUnreachableError(
                    f"{folder.name} runs, but no command reaches it: its folder {folder} is not "
                    "on this machine. If the job runs on another machine with the same home, call "
                    "dlrover there. Otherwise a cleaner of temporary files has removed the folder. "
                    "The job makes it again within seconds, so try again. If that does not help, "
                    f"{run}/logs/cluster.log says why, and Ctrl-C or SIGTERM at `dlrover job run` "
                    "stops the job. DLROVER_RUNTIME_DIR can name a folder that is not cleaned"
                )


def _select(present: "dict[str, RunningJob]", name: str | None) -> "RunningJob":
    """Return the running job with this name, or the only one.

    Raises:
        JobNotFoundError: there is no such job, or several jobs match.
    """
    if name is not None and name not in present:
        others = f"; these run: {', '.join(present)}" if present else "; no job runs"
        raise JobNotFoundError(f"job {name} does not run on this machine{others}")
    if not present:
        raise JobNotFoundError("no job runs on this machine; see `dlrover job list`")
    if name is None and len(present) > 1:
        text = f"{len(present)} jobs run on this machine; name one of {', '.join(present)}"
        raise JobNotFoundError(text, several=True)
    return present[name] if name is not None else next(iter(present.values()))


def running(settings: Settings) -> "dict[str, RunningJob]":
    """Return the jobs whose cluster process runs on this machine, by their names, sorted.

    Sockets on which no process listens are left out. A job may have been started with another
    TMPDIR, such as one that Slurm has set. Then the link in its state folder says where its runtime
    folder is.

    Raises:
        ConfigError: another user could have made the content of a folder.
    """
    folders = []
    root = settings.state_folder
    if root is not None and is_own(root, shared=True, hint=STATE_HINT):
        for link in root.glob(f"*@*/{names.RUNTIME_LINK}"):
            with contextlib.suppress(OSError, NotOwnedError):  # made later, by another user
                folder = link.readlink()
                if is_own(folder.parent, hint=RUNTIME_HINT):
                    folders.append(folder)
    if is_own(settings.runtime_root, hint=RUNTIME_HINT):
        folders += [p.parent for p in settings.runtime_root.glob(f"*/{names.CLUSTER_SOCKET}")]
    sockets = {folder.name: folder / names.CLUSTER_SOCKET for folder in folders}
    return {
        name: RunningJob(name, path, root)
        for name, path in sorted(sockets.items())
        if _listens(path)
    }


@dataclass(frozen=True, slots=True)
class ListedJob:
    """One job of this machine in a list of all."""

    name: str
    state: Literal["running", "ended", "damaged", "killed"]
    status: JobStatus | None
    """The newest status, or the last one; None if there is none, or it cannot be read."""
    problem: str = ""
    """Why the status cannot be read, and what to do; empty if it can, or if there is none."""

    @property
    def phase(self) -> str:
        """The phase, also where no status has one."""
        if self.status is not None:
            return self.status.phase.value
        if self.state == "running":
            return UNKNOWN if self.problem else JobPhase.PENDING.value
        return {"killed": KILLED, "damaged": DAMAGED}.get(self.state, UNKNOWN)

    @property
    def row(self) -> view.JobRow:
        """The row in a table of jobs."""
        return view.JobRow.of_job(self.name, self.status, self.phase, self.problem)


def listed(settings: Settings) -> list[ListedJob]:
    """Return the jobs of this machine: those that run, by name, then past runs, the newest first.

    A job that does not answer, or is of another release, is listed with its problem. So is a run
    whose last status is damaged. A job that ends during the call may be missing.

    Raises:
        ConfigError: another user could have made the content of a folder.
    """
    found = []
    for name, job in running(settings).items():
        status, problem = None, ""
        try:
            status = job.snapshot().status
        except UnreachableError as error:
            if not job.listens:
                continue  # it has ended in the meantime
            problem = str(error)
        except ConfigError as error:  # its cluster process is of another release
            problem = str(error)
        found.append(ListedJob(name, "running", status, problem))
    past = runs.ended(settings.state_folder)
    return found + [ListedJob(run.name, run.state, run.status, run.damage) for run in past]


def _listens(path: Path) -> bool:
    """Return whether a process listens on a socket; True if that is not sure.

    A killed process leaves its socket file behind.
    """
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # it is busy, or a later call shows the error
    return True


class RunningJob:
    """A job that runs on this machine.

    It may end at any moment. Its state is then read from the folder of its run.
    """

    where = "on this machine"

    def __init__(
        self, name: str, socket_path: Path, state_root: Path | None, call_s: float = CALL_S
    ) -> None:
        """Keep where the job is; nothing is read yet.

        Args:
            name: name of the job.
            socket_path: socket of its cluster process.
            state_root: folder of all runs; None if it is not known.
            call_s: deadline of a call, in seconds.
        """
        self.name, self.socket_path, self._state_root = name, socket_path, state_root
        self._call_s = call_s

    @property
    def listens(self) -> bool:
        """Whether its cluster process still listens for calls; True if that is not sure."""
        return _listens(self.socket_path)

    def snapshot(self) -> Snapshot:
        """Return the state of the job from its cluster process.

        Raises:
            ConfigError: the answer is not understood, because it is of another release.
            UnreachableError: the cluster process does not answer within `CALL_S`.
        """
        return self._answer(Snapshot, "GET", "/v1/job")

    def load_view(self, *, with_pods: bool = False) -> view.JobView:
        """Return what the cluster process knows of the job; ``with_pods`` adds nothing.

        Raises:
            ConfigError: the answer is not understood, because it is of another release.
            UnreachableError: the cluster process does not answer within `CALL_S`.
        """
        return self._or_ended(self._live_view, EndedJob.load_view)

    def _live_view(self) -> view.JobView:
        """Return what the cluster process knows of the job. It raises as :meth:`snapshot`."""
        snapshot = self.snapshot()
        status = snapshot.status
        return view.JobView(
            name=self.name,
            header_lines=view.spec_lines(snapshot),
            phase="Pending" if status is None else status.phase.value,
            reason="the job is starting: there is no status yet" if not status else status.reason,
            status=status,
            conditions=[] if status is None else status.conditions,
            events=[] if status is None else status.events,
            document=snapshot.model_dump(mode="json")
            | {"job": snapshot.job.model_dump(mode="json", by_alias=True)},
        )

    def history(self) -> History:  # noqa: D102
        return self._or_ended(lambda: self._answer(History, "GET", "/v1/history"), EndedJob.history)

    def evidence(self) -> list[EvidenceManifest]:  # noqa: D102
        return runs.evidence(self._log_folder().parent)

    def node_snapshot(self, node: str) -> NodeSnapshot | None:  # noqa: D102
        return runs.node_snapshot(self._log_folder().parent, node)

    def show_logs(self, query: LogQuery) -> None:  # noqa: D102
        folder = self._log_folder()
        if not print_logs(folder, self.socket_path if query.follow else None, query):
            click.echo(
                f"dlrover: {missing_log_message(folder, query)}", err=True
            )  # no failure: a log may still appear

    def log_tail(self, query: LogQuery) -> LogTail:  # noqa: D102
        return tail(self._log_folder(), query)

    def _log_folder(self) -> Path:
        """Return the folder of the job's logs, also if it has just ended."""
        return self._or_ended(lambda: Path(self.snapshot().log_dir), lambda ended: ended.log_folder)

    def _or_ended(self, ask: Callable[[], T], read: "Callable[[EndedJob], T]") -> T:
        """Return what the cluster process answers, or what its last run says if it has just ended.

        Args:
            ask: asks the cluster process.
            read: reads the folder of the ended run.

        Raises:
            UnreachableError: the cluster process still listens, but did not answer; or it has ended
                and left no folder of its run.
        """
        try:
            return ask()
        except UnreachableError:
            folder = None if self.listens else runs.newest(self._state_root, self.name)
            if folder is None:
                raise
        return read(EndedJob(folder))

    def request(self, path: str) -> str:
        """Make a request to the cluster process; return its answer.

        Raises:
            JobNotFoundError: the job has ended before it could answer.
            ConfigError: the cluster process refuses the request.
            UnreachableError: the cluster process does not answer within `CALL_S`. It may carry out
                the request later, which the message says.
        """
        try:
            return self._answer(CallDone, "POST", path).message
        except UnreachableError as error:
            if self.listens:
                raise UnreachableError(
                    f"{error}; {self._state_in_words()}. The request may have arrived: it is then "
                    "carried out as soon as that process goes on. Look with `dlrover job "
                    f"describe {self.name}` before you send it again"
                ) from error
            raise JobNotFoundError(
                f"job {self.name} has just ended; see `dlrover job describe {self.name}`"
            ) from error

    def _state_in_words(self) -> str:
        """Say what the job's cluster process does that does not answer."""
        with contextlib.suppress(OSError, struct.error), socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(self.socket_path))
            peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = struct.unpack("3i", peer)[0]
            if is_stopped(pid):
                return f"its `dlrover job run` (process {pid}) is stopped: `kill -CONT {pid}`"
            return f"its `dlrover job run` (process {pid}) is blocked or very busy"
        return "its `dlrover job run` is blocked or very busy"

    def scale(self, replicas: int, role: str = names.ROLE_WORKER) -> str:  # noqa: D102
        return self.request(f"/v1/scale?replicas={replicas}&role={role}")

    def suspend(self, on: bool) -> str:  # noqa: D102
        return self.request(f"/v1/suspend?on={'true' if on else 'false'}")

    def restart(self, *, rolling: bool) -> str:  # noqa: D102
        at = date_time(view.now())
        return self.request(f"/v1/restart?at={at}&rolling={'true' if rolling else 'false'}")

    def take_snapshot(self, at: str) -> str:  # noqa: D102
        return self.request(f"/v1/snapshot?at={at}")

    def store_checkpoint(self, at: str) -> str:  # noqa: D102
        return self.request(f"/v1/checkpoint?at={at}")

    def even_servers(self, at: str) -> str:  # noqa: D102
        return self.request(f"/v1/rebalance?at={at}")

    def drain_server(self, server: str) -> str:  # noqa: D102
        return self.request(f"/v1/nodes/{server}/drain")

    def tune(
        self, *, micro_batch: int | None, loader_workers: int | None, auto: bool | None
    ) -> str:
        """Request other settings of data loaders; return a sentence about the new state.

        Args:
            micro_batch: greatest number of samples that a worker computes at once.
            loader_workers: number of processes that read data for each worker.
            auto: whether the auto-tuner chooses what was never set.

        Raises:
            ConfigError: a number is out of its range.
            UnreachableError: the cluster process does not answer within `CALL_S`.
        """
        given = {"micro_batch": micro_batch, "loader_workers": loader_workers, "auto": auto}
        query = "&".join(
            f"{name}={str(value).lower()}" for name, value in given.items() if value is not None
        )
        return self.request(f"/v1/tune?{query}")

    def stop(self, *, wait: bool) -> str:
        """Have the cluster process end the job; return a sentence about the new state.

        With ``wait`` it returns when the job's runtime folder is gone. Otherwise the job may still
        run.

        Raises:
            UnreachableError: the cluster process does not answer, or ``wait`` is set and the job
                has not ended within `STOP_S`.
        """
        answer = self.request("/v1/stop")
        deadline = time.monotonic() + STOP_S
        pause = threading.Event()
        while wait and self.socket_path.parent.exists():
            if time.monotonic() > deadline:
                raise UnreachableError(
                    f"{self.name} has not ended within a minute; see `dlrover job describe`"
                )
            pause.wait(0.05)
        return answer

    def delete(self, *, cascade: str, wait: bool, confirm: Callable[[str], None]) -> str:
        """Refuse to delete the job: a job on this machine is stopped instead.

        Args:
            cascade: not used.
            wait: not used.
            confirm: not used.

        Raises:
            ConfigError: in every case. The message names the command that stops the job.
        """
        raise ConfigError(
            f"{self.name} runs on this machine: end it with `dlrover job stop {self.name}`, "
            "or select the job in the cluster with --namespace"
        )

    def _answer(self, kind: type[D], method: str, path: str) -> D:
        """Make a call to the cluster process; return the answer.

        Args:
            kind: model of the answer.
            method: method of the call.
            path: path of the call.

        Raises:
            ConfigError: the cluster process refuses the call, or its answer is not understood.
            UnreachableError: the cluster process does not answer within `CALL_S`.
        """

        async def call() -> bytes:
            client = HttpClient(f"unix:{self.socket_path}")
            try:
                return await client.call(method, path, deadline_s=self._call_s)
            finally:
                client.close()
                await asyncio.sleep(0)  # the event loop closes the connection

        body = asyncio.run(call())
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise ConfigError(
                f"{self.name}: the answer of its cluster process is not understood: "
                f"{explain(error)}; use the release of DLRover-Py that has started the job"
            ) from error


class EndedJob:
    """A run of a job that has ended on this machine."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """Name a run; nothing is read.

        Args:
            folder: state folder of the run.
            name: name of the run; empty for that of its job.
        """
        self._folder = folder
        self.log_folder = folder / "logs"
        self.name = name or folder.name.rpartition("@")[0]

    def _status(self) -> JobStatus:
        """Return the last status, read from the file at each call.

        Raises:
            ConfigError: the file is damaged, or does not exist any more.
        """
        try:
            return runs.read_document(self._folder / names.STATUS_FILE, JobStatus)
        except FileNotFoundError as error:
            raise ConfigError(f"{error.filename}: the file does not exist any more") from error

    @property
    def _killed(self) -> bool:
        """Whether the run was killed, so that it has no last status."""
        with contextlib.suppress(OSError):
            return runs.was_killed(self._folder)
        return False

    @property
    def where(self) -> str:  # noqa: D102
        if self._killed:
            return "on this machine, killed"
        ended = None
        with contextlib.suppress(ConfigError):  # a damaged status does not hide the logs
            ended = self._status().ended_at
        return "on this machine, ended" + (f" {view.age(ended)} ago" if ended is not None else "")

    def load_view(self, *, with_pods: bool = False) -> view.JobView:  # noqa: D102
        logs = self.log_folder
        if self._killed:
            reason = "its `dlrover job run` was killed"
            events = runs.journal_events(self._folder)
            known = "its last events may be missing" if events else "no events are known"
            return view.JobView(
                name=self.name,
                header_lines=[f"{self.name} was killed; its logs are in {logs}"],
                phase=KILLED,
                reason=reason,
                status=None,
                conditions=[],
                events=events,
                document=self._document(None),
                notes=[f"the run was killed before it had a last status: {known}"],
            )
        status = self._status()
        return view.JobView(
            name=self.name,
            header_lines=[f"{self.name} has ended; its logs are in {logs}"],
            phase=status.phase.value,
            reason=status.reason,
            status=status,
            conditions=status.conditions,
            events=status.events,
            document=self._document(status),
        )

    def _document(self, status: JobStatus | None) -> dict[str, object]:
        """Return the run with the keys of a running job's :class:`Snapshot`.

        ``job`` is None if the job's file is missing or damaged. What only a running job has is
        empty, or 0.

        Args:
            status: the last status; None if the run was killed before it had one.
        """
        found: dict[str, object] = {"nodes": [], "hosts": [], "cluster_pid": 0, "master_pid": 0}
        found |= dict.fromkeys(("master_addr", "health_addr", "token_file"), "")
        found |= {"job": None, "status": view.dump(status), "log_dir": str(self.log_folder)}
        with contextlib.suppress(FileNotFoundError, ConfigError):
            job = runs.read_document(self._folder / names.JOB_FILE, ElasticJob)
            found["job"] = job.model_dump(mode="json", by_alias=True)
        return found

    def history(self) -> History:  # noqa: D102
        try:
            return runs.read_document(self._folder / names.HISTORY_FILE, History)
        except FileNotFoundError:  # an older version or a full disk left no file
            pass
        except ConfigError as error:
            click.echo(view.plain(f"dlrover: the history is left out: {error}"), err=True)
        return History()

    def evidence(self) -> list[EvidenceManifest]:  # noqa: D102
        return runs.evidence(self._folder)

    def node_snapshot(self, node: str) -> NodeSnapshot | None:  # noqa: D102
        return runs.node_snapshot(self._folder, node)

    def show_logs(self, query: LogQuery) -> None:
        """Print the log lines of the run that the query selects.

        Raises:
            ConfigError: the run has no log that the query selects.
        """
        if not print_logs(self.log_folder, None, query):
            raise ConfigError(missing_log_message(self.log_folder, query))

    def log_tail(self, query: LogQuery) -> LogTail:  # noqa: D102
        return tail(self.log_folder, query)
