"""``dlrover cluster run``: jobs of one folder that share the simulated hosts of this machine.

Each job is a ``dlrover job run`` of its own. This process only decides how many hosts each of them
has (``dlrover_py/allocator.py``), and prints what they print. If it dies, the jobs go on with the
hosts that they have. The next one for the same folder takes them over: a file in the state folder
has their names, and each of them knows what it was granted.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import select
import signal
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dlrover_py.allocator import Allocation, Demand, Pool, allocate, demand_of
from dlrover_py.cli import jobfile, runs
from dlrover_py.cli.local_jobs import RunningJob
from dlrover_py.cli.progress import line
from dlrover_py.cli.settings import Settings
from dlrover_py.net.http_client import HttpClient
from dlrover_py.process.blocking import read_regular
from dlrover_py.process.identity import ignores_signal
from dlrover_py.process.ownership import STATE_HINT, open_own
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import ConfigError, DLRoverError, ExitCode
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobPhase, JobStatus
from dlrover_py.protocol.words import counted

LOOK_S = 0.5
"""Seconds between two looks at the folder and the jobs."""
HOLD_S = 10.0
"""Seconds for which a size is kept that was chosen for the sake of speed."""
CALL_S = 5.0
"""Deadline of a call to the cluster process of a job, in seconds."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop all jobs."""
MAX_RECORD_BYTES = 1 << 24
"""Bytes of the largest record that is read."""


class _KnownJob(BaseModel):
    """A job of a record."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    file: str
    """Name of its file."""
    queued_at: float
    """Unix time at which its file was found."""
    started_at: float | None = None
    """Unix time before its ``dlrover job run`` was started; None if it never was."""


class _Record(BaseModel):
    """What a ``dlrover cluster run`` leaves behind if it is killed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    jobs: dict[str, _KnownJob] = {}
    """Jobs that have not ended, by their names."""
    seen: dict[str, float] = {}
    """Names of the files that were read, and when each of them was changed."""
    failed: bool = False
    """Whether a job has not succeeded."""


class _Adopted:
    """The process of a job that an earlier ``dlrover cluster run`` has started."""

    def __init__(self, pid: int, name: str, state_root: Path | None, started_at: float) -> None:
        """Follow the process.

        Args:
            pid: its process id.
            name: name of the job.
            state_root: folder of all runs; None if it is not known.
            started_at: Unix time after which it was started.

        Raises:
            ProcessLookupError: there is no such process.
        """
        self._pidfd = os.pidfd_open(pid)
        self._run = state_root, name, started_at

    @property
    def returncode(self) -> int | None:
        """Its exit code, as far as the last status of its run shows it; None while it runs."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(0):
            return None
        code = _exit_code(*self._run)
        return ExitCode.FAILED if code is None else code

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Follow it no more."""
        os.close(self._pidfd)


@dataclass(slots=True)
class SharedJob:
    """A job of the folder."""

    file: Path
    job: ElasticJob
    queued_at: float
    """Unix time at which its file was found."""
    granted: NodeAllocation | None = None
    decided: tuple[int, int] | None = None
    """Nodes and goal that were printed last."""
    process: "asyncio.subprocess.Process | _Adopted | None" = None
    """Its ``dlrover job run``; None while it is held back for the first time."""
    started_at: float | None = None
    """Unix time before that was started; None if it never was."""
    snapshot: Snapshot | None = None
    """Its newest state; None before the first one."""

    @property
    def hosts(self) -> int:
        """Hosts that it has."""
        return 0 if self.snapshot is None else len(self.snapshot.hosts)

    def demand(self) -> Demand:
        """Return what it asks the allocator for."""
        job = self.job if self.snapshot is None else self.snapshot.job
        status = self.snapshot.status if self.snapshot is not None else None
        return demand_of(
            job.allocated(self.granted),
            status.speed if status is not None else None,
            queued_at=self.queued_at,
            size=self.hosts,
        )


def run_shared(folder: Path, settings: Settings, *, hosts: int) -> int:
    """Run the jobs of a folder until all have ended or a signal comes; return the exit code.

    Jobs of an earlier call for this folder that was killed are taken over. Those that have ended
    are not run again, unless their files were changed.

    Args:
        folder: folder of the job files.
        settings: settings of this command.
        hosts: number of simulated hosts.

    Raises:
        ConfigError: there is no job file, or one of the files cannot be used; another call runs
            the jobs of this folder; the state folder cannot be used.
    """
    cluster = SharedCluster(folder, settings, hosts)
    with cluster.locked():
        if record := cluster.left_behind():
            return asyncio.run(cluster.carry_on(record))
        files = cluster.files()
        if not files:
            raise ConfigError(f"{folder}: found no file *.yaml: expected job files")
        for file in files:
            cluster.add(file)
        return asyncio.run(cluster.run())


@dataclass(slots=True)
class SharedCluster:
    """The jobs of a folder, and the hosts that they share."""

    folder: Path
    settings: Settings
    hosts: int
    jobs: dict[str, SharedJob] = field(default_factory=dict)
    """Jobs that have not ended, by their names."""
    seen: dict[Path, float] = field(default_factory=dict)
    """Files that were read, and when each of them was changed."""
    interrupts: list[int] = field(default_factory=list)
    """Signals that have come."""
    failed: bool = False
    """Whether a job has not succeeded."""
    _reading: "set[asyncio.Task[None]]" = field(default_factory=set)
    _saved: str = ""
    """The record as last written."""

    # --- The record, for a later call ---

    @property
    def _record(self) -> Path:
        """The file of the record."""
        digest = hashlib.sha256(os.fsencode(self.folder.resolve())).hexdigest()[:16]
        return self.settings.state_root / f".shared-{digest}.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Have the folder for this process alone during the block.

        Raises:
            ConfigError: another process has it, or the state folder cannot be used.
        """
        root = self.settings.state_root
        try:
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            at = open_own(root, os.O_DIRECTORY, links=True, shared=True, hint=STATE_HINT)
            try:
                lock = self._record.with_suffix(".lock").name
                held = open_own(lock, os.O_RDWR | os.O_CREAT, at=at, hint=STATE_HINT)
            finally:
                os.close(at)
        except OSError as error:
            raise ConfigError(f"{root}: cannot be used: {error.strerror}; {STATE_HINT}") from error
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                _lock(held, self.folder)
            yield
        finally:
            os.close(held)

    def left_behind(self) -> _Record | None:
        """Return the record of a call that was killed before its jobs had ended; None if none is.

        A record that is damaged, or of another release, is none.
        """
        with contextlib.suppress(OSError, ValidationError):
            data = read_regular(self._record, MAX_RECORD_BYTES)
            record = _Record.model_validate_json(data)
            if record.jobs:
                return record
        return None

    def _save(self) -> None:
        """Write the record if it has changed, and print why that is not possible."""
        jobs = {
            name: _KnownJob(file=job.file.name, queued_at=job.queued_at, started_at=job.started_at)
            for name, job in self.jobs.items()
        }
        seen = {path.name: changed for path, changed in self.seen.items()}
        text = _Record(jobs=jobs, seen=seen, failed=self.failed).model_dump_json()
        if text == self._saved:
            return
        self._saved = text
        try:
            fresh = self._record.with_suffix(".fresh")
            fresh.write_text(text)
            fresh.rename(self._record)
        except OSError as error:
            line(f"[cluster] {self._record}: cannot be written: {error.strerror}")

    async def carry_on(self, record: _Record) -> int:
        """Take over the jobs of a record, and run all jobs; return the exit code.

        A job whose process was killed, too, is started again.

        Args:
            record: what an earlier call has left behind.
        """
        line(f"[cluster] carries on with {counted(len(record.jobs), 'job')} of an earlier call")
        self.seen = {self.folder / name: changed for name, changed in record.seen.items()}
        self.failed = record.failed
        for name, known in record.jobs.items():
            path = self.folder / known.file
            if known.started_at is not None:
                if (job := await self._adopt(name, known, known.started_at)) is not None:
                    self.jobs[name] = job
                    continue
                code = _exit_code(self.settings.state_folder, name, known.started_at)
                if code is not None:
                    line(f"[cluster] {name} has ended in the meantime")
                    self.failed |= code != ExitCode.OK
                    continue
            try:
                self.jobs[name] = SharedJob(path, jobfile.load(path).job, known.queued_at)
            except ConfigError as error:
                line(f"[cluster] {name} cannot be started again: {error}")
                self.failed = True
        self._look_for_files()
        return await self.run()

    async def _adopt(self, name: str, known: _KnownJob, started_at: float) -> SharedJob | None:
        """Return a job that runs; None if it does not. One that does not answer is waited for.

        Args:
            name: its name.
            known: what is known of it.
            started_at: Unix time after which it was started.
        """
        root, told = self.settings.state_folder, False
        while self._runs(name):
            with contextlib.suppress(DLRoverError, OSError, ValueError):
                first = await self._snapshot(name)
                process: _Adopted | None
                process = _Adopted(first.cluster_pid, name, root, started_at)
                try:
                    # It still answers, so the id was that of its process when that was opened.
                    snapshot = await self._snapshot(name)
                    if snapshot.cluster_pid == first.cluster_pid:
                        hosts = NodeAllocation(nodes=len(snapshot.hosts), since=_wall())
                        line(f"[cluster] {name} runs: its output is in `dlrover job logs {name}`")
                        job = SharedJob(self.folder / known.file, snapshot.job, known.queued_at)
                        job.granted, job.snapshot = snapshot.job.allocation or hosts, snapshot
                        job.process, process = process, None
                        job.started_at = started_at
                        return job
                finally:
                    if process is not None:
                        process.close()
            if not told:
                told = True
                line(f"[cluster] {name} runs, and does not answer yet")
            await asyncio.sleep(LOOK_S)
        return None

    def _runs(self, name: str) -> bool:
        """Return whether a job of this name runs, or is about to."""
        root = self.settings.state_folder
        if RunningJob(name, self._socket(name), root).listens:
            return True
        newest = runs.stamps(root, name)[:1]
        return root is not None and any(runs.goes_on(root / f"{name}@{at}") for at in newest)

    # --- Files ---

    def files(self) -> list[Path]:
        """Return the job files that are new, or were changed after they could not be used.

        What is no regular file is left out: a FIFO would block all jobs.
        """
        found = []
        for path in sorted(self.folder.glob("*.yaml")):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                about = path.stat()
                if stat.S_ISREG(about.st_mode) and self.seen.get(path) != about.st_mtime:
                    found.append(path)
        running = {job.file for job in self.jobs.values()}
        return [path for path in found if path not in running]

    def add(self, path: Path) -> None:
        """Read the job in a file; it waits for hosts from now on.

        Raises:
            ConfigError: the file cannot be used.
        """
        with contextlib.suppress(OSError):
            self.seen[path] = path.stat().st_mtime
        job = jobfile.load(path).job
        name, worker = job.metadata.name, job.worker
        if name in self.jobs:
            other = self.jobs[name].file.name
            raise ConfigError(f"{path}: metadata.name: found {name}, which {other} has as well")
        if worker.standby_replicas:
            raise ConfigError(
                f"{path}: standbyReplicas is {worker.standby_replicas}: expected none, because "
                "jobs that share a cluster are allotted the nodes of their rounds only"
            )
        if job.servers is not None:
            raise ConfigError(
                f"{path}: found the role ps: expected workers only, because jobs that share a "
                "cluster are allotted the nodes of their rounds only; use `dlrover job run`"
            )
        self.jobs[name] = SharedJob(path, job, _wall())

    # --- The loop ---

    async def run(self) -> int:
        """Run all jobs until they have ended; return the exit code."""
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()

        def interrupted(number: int) -> None:
            self.interrupts.append(number)
            wake.set()
            for job in self.jobs.values():
                if job.process is not None and job.process.returncode is None:
                    job.process.send_signal(signal.SIGINT)

        for number in ENDING:
            if not ignores_signal(number):
                loop.add_signal_handler(number, interrupted, number)
        while self.jobs:
            if not self.interrupts:
                self._look_for_files()
                await self._observe()
                await self._decide()
            self._forget_ended()
            self._save()
            wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await wake.wait()
        await asyncio.gather(*self._reading)
        with contextlib.suppress(OSError):
            self._record.unlink(missing_ok=True)
        if self.interrupts:
            return 128 + self.interrupts[0]
        return ExitCode.FAILED if self.failed else ExitCode.OK

    def _look_for_files(self) -> None:
        """Add the jobs that have arrived; print why a file cannot be used."""
        for path in self.files():
            try:
                self.add(path)
            except ConfigError as error:
                line(f"[cluster] {error}")

    async def _observe(self) -> None:
        """Read the state of all jobs. A job that does not answer keeps its last one."""
        for name, job in self.jobs.items():
            if job.process is None or job.process.returncode is not None:
                continue
            with contextlib.suppress(DLRoverError, OSError, ValueError):
                job.snapshot = await self._snapshot(name)

    async def _decide(self) -> None:
        """Change the allocations, and start the jobs that have hosts for the first time."""
        now = _wall()
        demands = {name: job.demand() for name, job in self.jobs.items()}
        pools = [Pool(name="hosts", nodes=self.hosts)]
        found = allocate(list(demands.values()), pools, now, hold_s=HOLD_S)
        for name, demand in demands.items():
            await self._grant(name, self.jobs[name], found[demand.name], now)

    async def _grant(self, name: str, job: SharedJob, one: Allocation, now: float) -> None:
        """Give a job what it may have now.

        Args:
            name: its name.
            job: the job.
            one: what it may have.
            now: Unix time.
        """
        old = job.granted
        if old is None or old.nodes != one.nodes:
            job.granted = NodeAllocation(nodes=one.nodes, reason=one.reason, since=now)
        elif old.reason != one.reason:
            job.granted = NodeAllocation(nodes=old.nodes, reason=one.reason, since=old.since)
        granted = job.granted
        assert granted is not None
        if job.decided != (one.nodes, one.goal):
            job.decided = one.nodes, one.goal
            line(f"[cluster] {name}: {one.reason}")
        if job.process is None:
            if granted.nodes:
                await self._start(name, job, granted.nodes)
            return
        if job.snapshot is None:
            return
        if job.snapshot.job.allocation != granted or job.hosts != granted.nodes:
            with contextlib.suppress(DLRoverError, OSError):  # it is sent again soon
                await self._call(name, "PUT", "allocation", granted.model_dump_json().encode())

    async def _start(self, name: str, job: SharedJob, nodes: int) -> None:
        """Start the cluster process of a job, which a later call can find if this one is killed."""
        job.started_at = _wall()
        self._save()
        job.process = await asyncio.create_subprocess_exec(
            *jobfile.run_command(job.file, f"--nodes={nodes}", "--plain"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes from this process alone
        )
        if self.interrupts:  # the signal came while it was started
            job.process.send_signal(signal.SIGINT)
        task = asyncio.create_task(_print_output(name, job.process))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    def _forget_ended(self) -> None:
        """Forget the jobs whose process has ended, and those that were never started at the end."""
        for name, job in list(self.jobs.items()):
            if job.process is None:
                if self.interrupts:
                    del self.jobs[name]
                    self.failed = True
            elif job.process.returncode is not None:
                self.failed |= job.process.returncode != ExitCode.OK
                line(f"[cluster] {name} has ended: {counted(job.hosts, 'host')} free")
                if isinstance(job.process, _Adopted):
                    job.process.close()
                del self.jobs[name]

    def _socket(self, name: str) -> Path:
        """Return the path of the socket of a job's cluster process."""
        return self.settings.runtime_root / name / names.CLUSTER_SOCKET

    async def _snapshot(self, name: str) -> Snapshot:
        """Return the state of a job.

        Raises:
            DLRoverError: its cluster process does not answer.
            ValueError: the answer is not understood.
        """
        return Snapshot.model_validate_json(await self._call(name, "GET", "job"))

    async def _call(self, name: str, method: str, path: str, body: bytes = b"") -> bytes:
        """Make a call to the cluster process of a job; return the answer."""
        client = HttpClient(f"unix:{self._socket(name)}")
        try:
            return await client.call(method, f"/v1/{path}", body, deadline_s=CALL_S)
        finally:
            client.close()


async def _print_output(name: str, process: "asyncio.subprocess.Process") -> None:
    """Print the lines of a job with its name, until it has closed its output."""
    assert process.stdout is not None
    text = b"-"
    while text:
        try:
            text = await process.stdout.readline()
        except ValueError:  # a part of an endless line was dropped
            continue
        if text:
            line(f"[{name}] {text.decode('utf-8', 'replace').rstrip()}")
    await process.wait()


def _lock(held: int, folder: Path) -> None:
    """Lock a file for as long as its descriptor is open.

    Args:
        held: the descriptor.
        folder: the folder of job files for which it stands.

    Raises:
        ConfigError: another process has locked it.
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"{folder}: another `dlrover cluster run` runs the jobs of this folder: stop it first. "
            "Another job only needs a file in the folder"
        ) from error


def _exit_code(state_root: Path | None, name: str, started_at: float) -> int | None:
    """Return the exit code of the newest run of a job, as its last status shows it.

    None is returned if that run was killed, or began before the given time.

    Args:
        state_root: folder of all runs; None if it is not known.
        name: name of the job.
        started_at: Unix time.
    """
    folder = runs.newest(state_root, name)
    if folder is None:
        return None
    try:
        status = runs.read_document(folder / names.STATUS_FILE, JobStatus)
    except FileNotFoundError:
        return None
    except ConfigError:  # it is damaged
        return ExitCode.FAILED
    if status.ended_at is not None and status.ended_at < started_at:
        return None
    return ExitCode.OK if status.phase is JobPhase.SUCCEEDED else ExitCode.FAILED


def _wall() -> float:
    """Return the Unix time."""
    return time.time()  # noqa: TID251 - allocations and files have times that people read
