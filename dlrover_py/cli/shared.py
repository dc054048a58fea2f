"""``dlrover cluster run``: jobs of one folder that share the simulated hosts of this machine.

Each job is a ``dlrover job run`` of its own. This process only decides how many hosts each of them
has (``dlrover_py/allocator.py``), and prints what they print. If it dies, the jobs go on with the
hosts that they have, and the next one for the same folder takes them over
(``dlrover_py/cli/shared_record.py``).
"""

import asyncio
import contextlib
import signal
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from dlrover_py.allocator import Allocation, Demand, Pool, allocate, demand_of
from dlrover_py.cli import jobfile, local_jobs
from dlrover_py.cli.progress import line
from dlrover_py.cli.settings import Settings
from dlrover_py.cli.shared_record import (
    AdoptedProcess,
    Record,
    StartedJob,
    digest,
    exit_code,
    runs_elsewhere,
)
from dlrover_py.net.http_client import HttpClient
from dlrover_py.process.identity import ProcessId, ignores_signal
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import ConfigError, DLRoverError, ExitCode
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.words import counted

LOOK_S = 0.5
"""Seconds between two looks at the folder and the jobs."""
HOLD_S = 10.0
"""Seconds for which a size is kept that was chosen for the sake of speed."""
CALL_S = 5.0
"""Deadline of a call to the cluster process of a job, in seconds."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop all jobs."""
AFTER_A_LINE = 'read -r _ && exec "$@" </dev/null'
"""Script of the shell that waits for a line and becomes a ``dlrover job run``. Without a line it
ends: a job that no record names must not start."""


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
    process: "asyncio.subprocess.Process | AdoptedProcess | None" = None
    """Its ``dlrover job run``; None while it is held back for the first time."""
    socket: Path | None = None
    """Socket of that; None until it is known."""
    started: StartedJob | None = None
    """What the record says of it; None if it was not started."""
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

    Jobs that an earlier call has started, which was killed, are taken over if they still run.
    Those that have ended are not run again, unless their files were changed.

    Args:
        folder: folder of the job files.
        settings: settings of this command.
        hosts: number of simulated hosts.

    Raises:
        ConfigError: there is no job file, or one of the files cannot be used; another call runs
            the jobs of this folder; a job of an earlier call runs that cannot be taken over; or
            another user could have made the content of a folder.
    """
    cluster = SharedCluster(folder, settings, hosts)
    if not cluster.files():
        raise ConfigError(f"{folder}: found no file *.yaml: expected job files")
    with cluster.record.locked():
        cluster.carry_on()
        for file in cluster.files():
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
    over: dict[str, StartedJob] = field(default_factory=dict)
    """Jobs that have ended, by the names of their files."""
    record: Record = field(init=False)
    _reading: "set[asyncio.Task[None]]" = field(default_factory=set)

    def __post_init__(self) -> None:
        """Name the record; nothing is read."""
        self.record = Record(self.folder, self.settings.state_root)

    # --- Jobs of an earlier call ---

    def carry_on(self) -> None:
        """Take over the jobs that an earlier call has started and that run.

        A job that was killed, too, is started again, as a new one.

        Raises:
            ConfigError: a job runs that cannot be taken over, the record cannot be used, or another
                user could have made the content of a folder.
        """
        local_jobs.running(self.settings)  # it checks the folders
        known, here = self.record.read()
        root, problems = self.settings.state_root, []
        for file, one in known.items():
            path, name = self.folder / file, one.job.metadata.name
            content = digest(path)
            same = bool(content) and content == one.content
            code = exit_code(one, root)
            lives = here and one.id.alive
            if lives and not same:
                problems.append(
                    f"{path}: it was changed or removed since an earlier `dlrover cluster run` has "
                    f"started {name} from it, and {name} still runs: put the old content back to "
                    f"carry on, or stop the job with `dlrover job stop {name}`"
                )
            elif lives:
                job = SharedJob(path, one.job, one.queued_at, one.granted, started=one)
                job.process = AdoptedProcess(one, root)
                self.jobs[name] = job
                line(f"[cluster] {name} runs on; its output is in `dlrover job logs {name}`")
            elif runs_elsewhere(one, root):
                problems.append(
                    f"{path}: an earlier `dlrover cluster run` has started {name} from it, and "
                    f"{name} still runs on another machine or in another container, where its "
                    "process id is known: call `dlrover cluster run` there, or stop the job there"
                )
            elif same and code is not None:
                self.over[file] = one.model_copy(update={"code": code})
                self.failed |= code != ExitCode.OK
                line(f"[cluster] {name} has ended before: it is not run again")
            elif same:
                line(f"[cluster] {name} was killed, too: it is started again")
                continue
            if same:
                with contextlib.suppress(OSError):  # it was removed meanwhile
                    self.seen[path] = path.stat().st_mtime
        if problems:
            problems.append(f"{self.record.path} is the record of what was started")
            raise ConfigError("\n".join(problems))

    def _save(self) -> None:
        """Write the record. Print why that is not possible, unless it was printed last."""
        jobs = dict(self.over)
        for job in self.jobs.values():
            if job.started is not None and job.granted is not None:
                numbers = job.granted.model_copy(update={"reason": ""})
                jobs[job.file.name] = job.started.model_copy(update={"granted": numbers})
        if problem := self.record.save(jobs):
            line(f"[cluster] what was started cannot be recorded, for a later call: {problem}")

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
            self.record.remove()
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
        """Read the state of all jobs. A job that does not answer keeps its last one.

        Another job of the same name may answer, which is none of these. It is ignored.
        """
        for name, job in self.jobs.items():
            if job.process is None or job.process.returncode is not None:
                continue
            with contextlib.suppress(DLRoverError, OSError, ValueError):
                if job.socket is None:
                    found = local_jobs.running(self.settings).get(name)
                    if found is None:
                        continue
                    job.socket = found.socket_path
                snapshot = Snapshot.model_validate_json(await self._call(job, "GET", "job"))
                if snapshot.cluster_pid != job.process.pid:
                    job.socket = None
                    continue
                job.snapshot = snapshot
                if job.started is not None and not job.started.run:
                    run = str(Path(snapshot.log_dir).parent)
                    job.started = job.started.model_copy(update={"run": run})
                    if isinstance(job.process, AdoptedProcess):
                        job.process.started = job.started

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
            self._save()
            with contextlib.suppress(DLRoverError, OSError):  # it is sent again soon
                await self._call(job, "PUT", "allocation", granted.model_dump_json().encode())

    async def _start(self, name: str, job: SharedJob, nodes: int) -> None:
        """Start the cluster process of a job, once the record has its process id."""
        content, started_at = digest(job.file), _wall()
        job.process = process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", AFTER_A_LINE, "job"),
            *jobfile.run_command(job.file, f"--nodes={nodes}", "--plain"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes from this process alone
        )
        with contextlib.suppress(ProcessLookupError):  # it was killed
            assert job.granted is not None
            job.started = StartedJob(
                job=job.job,
                content=content,
                process=str(ProcessId.of(process.pid)),
                queued_at=job.queued_at,
                started_at=started_at,
                granted=job.granted,
            )
        self._save()
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        if self.interrupts:  # the signal came while it was started
            process.send_signal(signal.SIGINT)
        task = asyncio.create_task(_print_output(name, process))
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    def _forget_ended(self) -> None:
        """Forget the jobs whose process has ended, and those that were never started at the end."""
        for name, job in list(self.jobs.items()):
            if job.process is None:
                if self.interrupts:
                    del self.jobs[name]
                    self.failed = True
            elif isinstance(job.process, AdoptedProcess) and job.process.killed:
                line(f"[cluster] {name} was killed: it is started again")
                self.jobs[name] = SharedJob(job.file, job.job, job.queued_at)
            elif (code := job.process.returncode) is not None:
                self.failed |= code != ExitCode.OK
                line(f"[cluster] {name} has ended: {counted(job.hosts, 'host')} free")
                del self.jobs[name]
                if job.started is not None:
                    ended = job.started.model_copy(update={"code": code})
                    self.over[job.file.name] = ended

    async def _call(self, job: SharedJob, method: str, path: str, body: bytes = b"") -> bytes:
        """Make a call to the cluster process of a job; return the answer."""
        client = HttpClient(f"unix:{job.socket}")
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


def _wall() -> float:
    """Return the Unix time."""
    return time.time()  # noqa: TID251 - allocations and files have times that people read
