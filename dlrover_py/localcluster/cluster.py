"""This machine as a cluster for one job: API server, scheduler and kubelet in one process.

``dlrover job run`` is this process. It holds the job's object and runs the master, which it starts
again when it dies. For each node that the master requests it starts a process on one of N simulated
hosts. The master calls it through ``master/platform/local.py``, and users call it through the
``dlrover`` command. Both use a unix socket that only the user can open (paths in
``protocol/local.py``).

Every process of a node carries a random mark in its environment. Killing, freezing and cleaning up
find processes by the mark, so no process escapes through a new session or a new parent.
"""

import asyncio
import contextlib
import errno
import fcntl
import functools
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParam
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from dlrover_py.checkpoint.shm import POOL_PREFIX
from dlrover_py.localcluster.runtime_folder import RuntimeFolder, listen_at, lock
from dlrover_py.net.http_server import no_such_path
from dlrover_py.net.liveness import ProbeTiming, RestartPause, supervise
from dlrover_py.process.blocking import (
    BackgroundThread,
    OverdueError,
    inheritable_signals,
    open_regular,
)
from dlrover_py.process.children import end, wake
from dlrover_py.process.identity import ended, marked, signal_all
from dlrover_py.process.ownership import STATE_HINT, is_own
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import ErrorReply
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    ErrorCode,
    ExitCode,
    FileLimitError,
)
from dlrover_py.protocol.job import OWN_ENV, ElasticJob, explain, scaled_to
from dlrover_py.protocol.local import (
    MAX_STATUS,
    CallDone,
    History,
    LocalNode,
    Snapshot,
    Verb,
    WatchEvent,
)
from dlrover_py.protocol.names import NodeId, is_server, role_of
from dlrover_py.protocol.reasons import ENDED_BY_USER, EventReason
from dlrover_py.protocol.status import (
    Condition,
    JobEvent,
    JobPhase,
    JobStatus,
    NodePhase,
    NodeRole,
)
from dlrover_py.protocol.words import counted

log = logging.getLogger("cluster")

MASTER_STOPS_S = 5.0
"""Seconds that the master gets to publish the end of the job before the nodes end. It may be
dead.
"""
THAWED_S = 5.0
"""Least number of seconds that a thawed node gets to end by itself, if it was deleted while
frozen.
"""
OUTPUT_TAIL = 2000
"""Bytes at the end of an agent's log that are reported when its node fails."""
SAMPLES_KEPT = 1000
"""Largest number of samples in the history of the training."""


@dataclass(frozen=True, slots=True)
class ClusterTiming:
    """The time limits of a job on this machine, in seconds."""

    start_timeout_s: float = 60.0
    """Limit of the start of a process. Its program, or its folder, may lie on a disk that hangs."""
    read_timeout_s: float = 10.0
    """Limit of a search through ``/proc``, where a process that hangs may block the reader, and of
    reading a small file."""
    probes: ProbeTiming = field(default_factory=ProbeTiming)
    """The times by which the master is probed and restarted."""


# --- Processes by mark ---


def signal_marked(mark: str, number: int) -> None:
    """Signal all processes that carry a node's mark, until no new one appears.

    It blocks the thread while it reads ``/proc``. Without such a process it does nothing.
    """
    signal_all(lambda: marked(names.ENV_NODE_MARK, mark), number)


# --- Nodes ---

FIXED_ENV = {*OWN_ENV, names.ENV_NODE_MARK, names.ENV_LIFELINE_FD}
"""Variables of a node that its template cannot set, as in a Pod."""


@dataclass(slots=True)
class _NodeProcess:
    """A node: its process on a simulated host, and what is known of its end."""

    id: NodeId
    host: str = ""
    process: "subprocess.Popen[bytes] | None" = None
    mark: str = ""
    """Value of an environment variable that all processes of the node carry."""
    ended: bool = False
    end: WatchEvent | None = None
    """The event of the end, for a master that has missed it; None before the end."""
    frozen: bool = False
    memory: Path | None = None
    """Folder of the node's checkpoints in shared memory. It is deleted with the host."""
    leaving: str = ""
    """Reason why the node has to leave; empty while it may stay."""
    free: bool = False
    """The end does not count against the restart budget: the node was drained, or the master
    deleted it.
    """
    killed: str = ""
    """Reason why the node was killed by a user; empty otherwise."""
    sigterm_sent: bool = False
    """The node has received SIGTERM."""
    deadline: asyncio.TimerHandle | None = None
    """Timer of the SIGKILL that follows a deletion."""
    deferred_grace_s: float | None = None
    """Grace period, in seconds, of a deletion that waits until the node is thawed."""

    @property
    def state(self) -> str:
        """State of the node: ``pending``, ``running``, ``frozen`` or ``ended``."""
        if self.ended:
            return "ended"
        if self.process is None:
            return "pending"
        return "frozen" if self.frozen else "running"

    def shown(self) -> LocalNode:
        """Return the state of the node as users see it."""
        pid = self.process.pid if self.process else 0
        fields = {"id": self.id, "host": self.host, "pid": pid, "state": self.state}
        return LocalNode.model_validate(fields | {"leaving": self.leaving})


def _unassigned(
    hosts: Iterable[str], nodes: Collection[_NodeProcess]
) -> tuple[list[str], list[_NodeProcess]]:
    """Return the hosts without a node, and the nodes without a host."""
    busy = {n.host for n in nodes if n.host and not n.ended}
    waiting = [n for n in nodes if not n.host and not n.ended]
    return [host for host in hosts if host not in busy], waiting


def _room(hosts: Iterable[str], nodes: Collection[_NodeProcess]) -> WatchEvent:
    """Return the watch event with the number of hosts for which no node waits."""
    free, waiting = _unassigned(hosts, nodes)
    return WatchEvent(kind="room", hosts=max(0, len(free) - len(waiting)))


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The folders of a job. The runtime folder is removed with the job; the state folder stays."""

    runtime: Path
    state: Path

    @property
    def socket(self) -> Path:
        """The unix socket for the master and for users."""
        return self.runtime / names.CLUSTER_SOCKET

    @property
    def token(self) -> Path:
        """The file with the job's token."""
        return self.runtime / names.TOKEN_FILE

    @property
    def logs(self) -> Path:
        """The folder for the output of the nodes and the master."""
        return self.state / "logs"


@dataclass(slots=True)
class LocalCluster:
    """The job, its nodes and its master on this machine."""

    job: ElasticJob
    paths: JobPaths
    workdir: Path
    environ: dict[str, str]
    folder: RuntimeFolder
    hosts: list[str]
    timing: ClusterTiming = field(default_factory=ClusterTiming)
    nodes: dict[NodeId, _NodeProcess] = field(default_factory=dict)
    status: JobStatus | None = None
    history: History = field(default_factory=History)
    master: "subprocess.Popen[bytes] | None" = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the state has changed, so that the display shows it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the job has ended or must stop."""
    ending: bool = False
    """The job is being shut down: no node is started any more."""
    stopping: bool = False
    """No process is started any more."""
    uid: str = field(default_factory=lambda: secrets.token_hex(6))
    """Random identifier of this run of the job."""
    _next_host: int = 0
    _room: WatchEvent | None = None
    """The number of free hosts that was published last."""
    _watchers: set["asyncio.Queue[WatchEvent]"] = field(default_factory=set)
    _listener: socket.socket | None = None
    """Listening socket of the API."""
    _sockets: tuple[socket.socket, ...] | None = None
    """Listening sockets of the master: for agents, health checks, and a parameter server if the job
    has one. They outlive a master."""
    _lifeline: tuple[int, int] = (-1, -1)
    """Read end and write end of a pipe. Each process inherits the read end, which reports
    end-of-file when this process ends.
    """
    _run_lock: int = -1
    """File descriptor of the lock on the state folder. ``dlrover job rm`` leaves a locked folder
    alone.
    """
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    # Three threads make the calls that may block, so that no kind of call delays the others.
    _starts: BackgroundThread = field(default_factory=lambda: BackgroundThread("starts"))
    _signals: BackgroundThread = field(default_factory=lambda: BackgroundThread("signals"))
    _disk: BackgroundThread = field(default_factory=lambda: BackgroundThread("disk"))

    # --- Start and end ---

    @classmethod
    def prepare(
        cls,
        job: ElasticJob,
        *,
        hosts: int,
        paths: JobPaths,
        workdir: Path,
        environ: dict[str, str],
        timing: ClusterTiming | None = None,
    ) -> "LocalCluster":
        """Lock the job's name, and make its folders, token and sockets. No process is started yet.

        After an error nothing stays but the lock file beside the runtime folder. Otherwise
        :meth:`close` must be called.

        Args:
            job: the job.
            hosts: number of simulated hosts.
            paths: folders of the job.
            workdir: working directory of the nodes.
            environ: environment that the nodes inherit.
            timing: time limits; None for the defaults.

        Raises:
            ConfigError: a job of this name runs already, other users have access to a folder, or a
                folder, a socket or a pipe cannot be made.
            FileLimitError: the limit of open files leaves none for the sockets and the pipe.
        """
        try:
            folder = RuntimeFolder(paths.runtime, lock(paths.runtime))
        except BlockingIOError as error:
            raise ConfigError(
                f"a job named {job.metadata.name} runs already (its folder is {paths.runtime}); "
                f"stop it with `dlrover job stop {job.metadata.name}`, or choose another name"
            ) from error
        except OSError as error:
            raise ConfigError(f"{error.filename or paths.runtime}: {error.strerror}") from error
        cluster = cls(job, paths, workdir, environ, folder, [], timing or ClusterTiming())
        try:
            shutil.rmtree(paths.runtime, ignore_errors=True)  # left by a run that was killed
            paths.runtime.mkdir(mode=0o700)
            for place in (paths.state.parent, paths.state):  # private: tracebacks can hold secrets
                place.mkdir(parents=True, exist_ok=True, mode=0o700)
                is_own(place, shared=True, hint=STATE_HINT)
            cluster._run_lock = _run_lock(paths.state)
            (paths.state / names.RUNTIME_LINK).symlink_to(paths.runtime.absolute())
            paths.logs.mkdir(exist_ok=True)
            paths.token.touch(mode=0o600)
            paths.token.write_text(secrets.token_urlsafe(24))
            cluster._listener, cluster._sockets, cluster._lifeline = _endpoints(paths.socket, job)
            _keep_job(paths, job)
        except (OSError, DLRoverError) as error:
            if cluster._run_lock >= 0:  # the folder is this user's
                _remove_unused(paths)
            cluster.close()
            if isinstance(error, DLRoverError):
                raise
            hint = "DLROVER_RUNTIME_DIR and DLROVER_STATE_DIR can name other folders"
            raise ConfigError(
                f"{error.filename or paths.state}: {error.strerror}; {hint}"
            ) from error
        cluster.add_hosts(hosts)
        return cluster

    def listener(self) -> socket.socket:
        """Return the listening socket of the API."""
        assert self._listener is not None
        return self._listener

    @property
    def master_addr(self) -> str:
        """Address of the master for agents."""
        assert self._sockets is not None
        return f"127.0.0.1:{self._sockets[0].getsockname()[1]}"

    @property
    def health_addr(self) -> str:
        """Address of the master's health checks and metrics."""
        assert self._sockets is not None
        return f"127.0.0.1:{self._sockets[1].getsockname()[1]}"

    async def run_master(self) -> None:
        """Run the master until shutdown; start it again when it has died or no longer responds.

        Each new start follows a pause of 0 to 5 s. The listening sockets belong to this process, so
        they stay open between two masters. It returns when the master has ended after
        :meth:`shut_down`.

        Raises:
            ConfigError: the master refuses its configuration.
            OSError: the first master cannot be started.
        """
        assert self._sockets is not None
        loop, pause = asyncio.get_running_loop(), RestartPause(self.timing.probes)
        keep = [s.fileno() for s in self._sockets] + [self._lifeline[0]]
        argv = _master_argv(self.paths, self._sockets, self._lifeline[0])
        while not self.stopping:
            log_file = self.paths.logs / "master.log"
            start = functools.partial(_spawn, argv, self.environ, Path("/"), log_file, keep)
            try:
                limit_s = self.timing.start_timeout_s
                self.master = await self._starts.run(start, limit_s, discard=_kill)
            except OSError as error:
                if self.master is None and not isinstance(error, OverdueError):
                    raise
                log.warning("master_not_started", extra={"why": error.strerror or str(error)})
                pause_s = pause.next_s(0.0)
            else:
                if self.stopping:  # it started too late to get the signal
                    _kill(self.master)
                self.changed.set()
                began = loop.time()
                code = await supervise(self.master, self.health_addr, self.timing.probes)
                self.changed.set()
                if self.stopping:
                    return
                if code == ExitCode.USAGE:  # another start would fail in the same way
                    output = await self._tail(log_file)
                    raise ConfigError(output or "the master cannot start")
                pause_s = pause.next_s(loop.time() - began)
                extra = {"code": code, "then": "it is restarted", "again_after_s": pause_s}
                log.warning("master_ended", extra=extra)
            await asyncio.sleep(pause_s)

    def _running_master(self) -> "subprocess.Popen[bytes] | None":
        """Return the master's process; None if it has ended, or was not started yet."""
        return self.master if self.master is not None and self.master.poll() is None else None

    async def shut_down(self, grace_s: float, failure: str = "") -> None:
        """End everything: the nodes with a grace period, then by force; the master last.

        First the master gets ``MASTER_STOPS_S`` seconds at most to publish the end of the job.
        Frozen nodes are killed immediately. Others get SIGTERM, and SIGKILL after ``grace_s``,
        whose effect is not awaited. If the master publishes no end, the last status is made here.

        Args:
            grace_s: seconds that nodes get to end.
            failure: why the job cannot go on; empty if its user ends it, or it has ended.
        """
        self.ending = True
        self._publish(WatchEvent(kind="stopped"))  # a watch that begins later yields it, too
        with contextlib.suppress(TimeoutError):  # the master must not form a new round meanwhile
            async with asyncio.timeout(min(grace_s, MASTER_STOPS_S)):
                # A master that still starts has nothing to end.
                while (self.status is not None or self.nodes) and (
                    self._running_master() and not self._has_ended
                ):
                    self.changed.clear()
                    await self.changed.wait()
        self.stopping = True
        running = [n for n in self.nodes.values() if n.host and not n.ended]
        workers = [node for node in running if not is_server(node.id)]  # they may still push
        for node in workers:
            if node.frozen:
                self._post_signal(node.mark, signal.SIGKILL)
                self._post_signal(node.mark, signal.SIGCONT)
            else:
                self._ask_to_end(node)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while not all(n.ended for n in workers):
                    self.changed.clear()
                    await self.changed.wait()
        for node in running:
            self._post_signal(node.mark, signal.SIGKILL)
        await self._signals_sent()
        if (master := self._running_master()) is not None:
            _signal(master, signal.SIGTERM)
            wake(master)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await ended(master)
            await asyncio.to_thread(end, master, 0)
        if not self._has_ended:  # no master has published the end
            self.take_status(_last_status(self.job, self.status, failure))
        if not await self._disk.wait_posted(self.timing.read_timeout_s):
            log.warning("status_not_written", extra={"why": f"{self.paths.state} does not answer"})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def _has_ended(self) -> bool:
        """Whether the newest status is that of a job that has ended."""
        return self.status is not None and self.status.phase.ended

    def close(self) -> None:
        """Close the sockets and locks, and remove the runtime folder. The state folder stays.

        No process is ended here, and errors are ignored. It must be called only once.
        """
        for sock in (self._listener, *(self._sockets or ())):
            if sock is not None:
                sock.close()
        for fd in (*self._lifeline, self._run_lock):  # first: the removal needs a free descriptor
            with contextlib.suppress(OSError):
                os.close(fd)
        self.folder.remove()

    # --- Requests of the master ---

    def create_node(self, node_id: NodeId) -> None:
        """Start a node on a free host, now or when there is one.

        It returns before the process runs. During a shutdown, and for a node that exists, nothing
        is started. If that node has ended, the watchers get its ``ended`` event again.
        """
        if self.ending:
            return
        old = self.nodes.get(node_id)
        if old is not None:
            if old.end is not None:  # the master does not know yet
                self._publish(old.end)
            return
        self.nodes[node_id] = _NodeProcess(node_id)
        self._schedule()
        node = self.nodes[node_id]
        if not node.host:
            self._publish_node(node)

    def delete_node(self, node_id: NodeId, grace_s: float) -> None:
        """Request the end of a node: SIGTERM, then SIGKILL after ``grace_s`` seconds.

        With 0 the node gets no SIGTERM. The call returns before the node has ended. Nothing happens
        if the node is unknown or has ended, or if it was deleted before and the grace is not 0. A
        frozen node gets no SIGTERM.
        Once it is thawed, it has the longer of this time and ``THAWED_S`` to end by itself.
        """
        node = self.nodes.get(node_id)
        if node is None or node.ended:
            return
        node.free = True
        if node.process is None:
            self._end(node, "it was deleted before it was started", None)
        elif node.frozen:
            node.deferred_grace_s = grace_s
        elif node.deadline is None or not grace_s:
            if grace_s:
                self._ask_to_end(node)
            loop = asyncio.get_running_loop()
            node.deadline = loop.call_later(grace_s, self._post_signal, node.mark, signal.SIGKILL)

    def take_status(self, status: JobStatus) -> None:
        """Keep the status that the master publishes, and a sample of its progress.

        Once the job has ended, a thread writes status and history to disk, and :attr:`ended` is
        set.
        """
        self.status = status
        self.history = self.history.with_sample(status, SAMPLES_KEPT)
        if status.phase.ended:
            self._disk.post(functools.partial(self._keep, self.history, status))
            self.ended.set()
        self.changed.set()

    def _keep(self, history: History, status: JobStatus) -> None:
        """Write the history and the last status to the state folder; ignore errors of the disk.

        Runs in the thread for the disk.
        """
        with contextlib.suppress(OSError):  # the status last: a run that has one counts as ended
            for name, text in (
                (names.HISTORY_FILE, history.model_dump_json()),
                (names.STATUS_FILE, status.model_dump_json(by_alias=True, indent=2)),
            ):
                _write(self.paths.state / name, text)

    # --- Requests of users ---

    def replace_job(self, job: ElasticJob) -> None:
        """Replace the job's spec, and send it to the watchers. The master then acts on it."""
        self.job = job
        self._publish(WatchEvent(kind="job", job=job))
        self._disk.post(functools.partial(_keep_job, self.paths, job))

    def add_hosts(self, count: int) -> list[str]:
        """Add simulated hosts for nodes; return their names.

        Waiting nodes begin to start on them.
        """
        fresh = [f"host-{self._next_host + i}" for i in range(count)]
        self._next_host += count
        self.hosts += fresh
        self._schedule()
        self.changed.set()
        return fresh

    async def inject_fault(self, node_id: NodeId, verb: Verb) -> str:
        """Inject a fault into a node, or thaw or drain it; return what was done.

        It waits until the signals are sent, for ``read_timeout_s`` seconds at most. It does not
        wait for the end of the node. A killed or drained node takes its host with it.

        Raises:
            ConfigError: there is no such node, its process was not started yet, or it has ended.
        """
        node = self.nodes.get(node_id)
        if node is None or node.ended or node.process is None:
            running = [n.id for n in self.nodes.values() if n.process and not n.ended]
            raise ConfigError(
                f"node {node_id} does not run; running nodes: {', '.join(running) or 'none'}"
            )
        if verb == "kill":
            node.killed = f"{node.host} was killed"
            with contextlib.suppress(ValueError):
                self.hosts.remove(node.host)
            self._publish_room()
            # The agent first: on a host that is gone, no agent reports the death of a worker.
            _signal(node.process, signal.SIGKILL)
            self._post_signal(node.mark, signal.SIGKILL)
            await self._signals_sent()
            return f"{node.id} and its host {node.host} are gone; `dlrover node add` adds one"
        if verb == "freeze":
            node.frozen = True
            self._post_signal(node.mark, signal.SIGSTOP)
            await self._signals_sent()
            return (
                f"all processes of {node.id} are frozen; the master notices when its lease expires"
            )
        if verb == "thaw":
            node.frozen = False
            self._post_signal(node.mark, signal.SIGCONT)
            await self._signals_sent()
            if node.deferred_grace_s is not None:
                wait_s = max(node.deferred_grace_s, THAWED_S)
                loop = asyncio.get_running_loop()
                loop.call_later(wait_s, self._post_signal, node.mark, signal.SIGKILL)
            return f"{node.id} continues"
        node.leaving = f"{node.host} is drained"
        node.free = True
        with contextlib.suppress(ValueError):
            self.hosts.remove(node.host)
        self._publish_room()
        self._publish_node(node)  # before the signal, so that the end does not count as a loss
        self._ask_to_end(node)
        return f"{node.id} was asked to leave, and {node.host} takes no other node"

    def snapshot(self) -> Snapshot:
        """Return the present state of the job, its nodes and its master.

        Ended nodes are included.
        """
        return Snapshot(
            job=self.job,
            status=self.status,
            nodes=[node.shown() for node in self.nodes.values()],
            hosts=self.hosts,
            cluster_pid=os.getpid(),
            master_pid=master.pid if (master := self._running_master()) else 0,
            master_addr=self.master_addr,
            health_addr=self.health_addr,
            token_file=str(self.paths.token),
            log_dir=str(self.paths.logs),
        )

    async def watch(self) -> AsyncIterator[WatchEvent]:
        """Yield the whole state, then each change, without end.

        Nodes that have ended before are left out. Events wait in a queue without limit.
        """
        queue: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield WatchEvent(kind="job", job=self.job)
            for node in list(self.nodes.values()):
                if not node.ended:
                    yield self._node_event(node)
            yield _room(self.hosts, self.nodes.values())
            present = [n.id for n in self.nodes.values() if not n.ended]
            yield WatchEvent(kind="listed", nodes=list(present))
            if self.ending:  # a master that starts now must not continue the job
                yield WatchEvent(kind="stopped")
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    # --- Processes and events ---

    def _ask_to_end(self, node: _NodeProcess) -> None:
        """Send SIGTERM to a node's agent, but only once.

        At a second one an agent kills its workers immediately.
        """
        if not node.sigterm_sent:
            node.sigterm_sent = True
            _signal(node.process, signal.SIGTERM)

    def _post_signal(self, mark: str, number: int) -> None:
        """Have a thread signal all processes with a mark. Signals are sent in order."""
        self._signals.post(functools.partial(signal_marked, mark, number))

    async def _signals_sent(self) -> None:
        """Wait until the posted signals are sent, for ``read_timeout_s`` seconds at most.

        After this time a warning is logged, and the signals are still sent later.
        """
        limit_s = self.timing.read_timeout_s
        if not await self._signals.wait_posted(limit_s):
            why = f"/proc has not answered within {limit_s:g} s"
            log.warning("signals_late", extra={"why": why})

    async def _tail(self, path: Path) -> str:
        """Return the last lines of a log as :func:`_tail` does, read in a thread.

        The result is also empty if the disk does not answer within ``read_timeout_s``.
        """
        try:
            call = functools.partial(_tail, path)
            return await self._disk.run(call, self.timing.read_timeout_s)
        except OverdueError:
            return ""

    def _schedule(self) -> None:
        """Assign free hosts to nodes without a host, and start a task for each of these nodes.

        Nothing happens during a shutdown. Nodes for which no host is free stay without one.
        """
        if self.ending:
            return
        free, waiting = _unassigned(self.hosts, self.nodes.values())
        for node, host in zip(waiting, free, strict=False):
            node.host = host
            task = asyncio.create_task(self._run(node))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._publish_room()

    def _publish_room(self) -> None:
        """Send the number of free hosts to the watchers, if it has changed."""
        event = _room(self.hosts, self.nodes.values())
        if event != self._room:
            self._room = event
            self._publish(event)

    async def _run(self, node: _NodeProcess) -> None:
        """Start the process of a node and attend to it until it ends.

        A process that cannot be started is reported as an end of the node. If the node was deleted
        in the meantime, or all is being stopped, the new process is killed.
        """
        try:
            start = self._starter(node)
            limit_s = self.timing.start_timeout_s
            node.process = await self._starts.run(start, limit_s, discard=_kill)
        except NoProgramError as error:  # a new node would do the same
            why = f"could not be started: {error.filename}: {error.strerror}"
            self._end(node, why, ExitCode.USAGE)
            return
        except (OSError, ValueError) as error:
            program = self.job.container_of(node.id).command[0]
            reason = error.strerror if isinstance(error, OSError) else error
            if isinstance(error, OverdueError):
                reason = f"{error} from the disk of the program or of its folder"
            why = f"could not be started: {program}: {reason}"
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._end(node, why, code, await self._tail(self._agent_log(node)))
            return
        if node.ended or self.stopping:  # a signal in between could not reach it
            self._post_signal(node.mark, signal.SIGKILL)
        else:
            self._publish_node(node)
        await self._wait_for_end(node, node.process)

    def _agent_log(self, node: _NodeProcess) -> Path:
        """Return the path of an agent's log."""
        return self.paths.logs / node.id / "agent.log"

    def _starter(self, node: _NodeProcess) -> "Callable[[], subprocess.Popen[bytes]]":
        """Return the call that starts the process of a node. Nothing is started yet.

        The call blocks. The node gets its mark and the folder of its shared memory here.
        """
        job, container = self.job, self.job.container_of(node.id)
        node.mark = secrets.token_hex(12)
        env = self.environ | {
            names.ENV_MASTER_ADDR: self.master_addr,
            names.ENV_TOKEN_FILE: str(self.paths.token),
            names.ENV_JOB_NAME: self.job.metadata.name,
            names.ENV_JOB_UID: self.uid,
            names.ENV_NODE_ID: node.id,
            names.ENV_NODE_MARK: node.mark,
            names.ENV_POD_IP: "127.0.0.1",
            names.ENV_LOG_DIR: str(self.paths.logs),
            names.ENV_LIFELINE_FD: str(self._lifeline[0]),
            "NODE_NUM": str(self.job.worker.replicas),
            "POD_NAME": f"{job.metadata.name}-edljob-{role_of(node.id)}-{node.id.lstrip('nps')}",
        }
        if job.servers is not None:
            env[names.ENV_PS] = str(self.paths.runtime / names.PS_ACCESS_FILE)
        # All nodes share this machine's cores; a Pod has its own.
        cores = len(os.sched_getaffinity(0)) // max(1, self.job.worker.replicas)
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        for variable in container.env:
            if variable.name not in FIXED_ENV:
                env[variable.name] = expand(variable.value, env)
        argv = [expand(part, env) for part in (*container.command, *container.args)]
        memory = env.get(names.ENV_SHM_DIR) or "/dev/shm"
        node.memory = Path(memory, f"{POOL_PREFIX}{self.uid}-{node.id}")
        keep = [self._lifeline[0]]
        return functools.partial(_spawn, argv, env, self.workdir, self._agent_log(node), keep)

    async def _wait_for_end(self, node: _NodeProcess, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of a node's process, clean up behind it, and report the end.

        Processes that it has left behind are killed. A thread deletes its shared memory later.
        """
        code = await ended(process)
        self._post_signal(node.mark, signal.SIGKILL)  # processes that it has left behind
        await self._signals_sent()
        if node.memory is not None:
            self._disk.post(functools.partial(shutil.rmtree, node.memory, ignore_errors=True))
        lost = code != 0 and not node.killed
        output = await self._tail(self._agent_log(node)) if lost else ""
        if node.killed:
            why = node.killed
        elif code < 0:
            why = f"its agent was killed by {signal.Signals(-code).name}"
        else:
            why = f"its agent exited with code {code}"
        self._end(node, why, code, output)

    def _end(self, node: _NodeProcess, why: str, code: int | None, output: str = "") -> None:
        """Mark a node as ended, report it to the watchers, and give its host to a waiting node.

        Nothing happens if it has ended before.
        """
        if node.ended:
            return
        node.ended = True
        if node.deadline is not None:
            node.deadline.cancel()
        node.end = WatchEvent(
            kind="ended",
            node=node.id,
            host=node.host,
            why=why,
            exit_code=code,
            free=node.free,
            output=output,
        )
        self._publish(node.end)
        self._schedule()

    def _node_event(self, node: _NodeProcess) -> WatchEvent:
        """Return the watch event that describes a node."""
        waits = "" if node.host else "no free host; `dlrover node add` adds one"
        return WatchEvent(
            kind="node",
            node=node.id,
            near=node.process is not None,
            host=node.host,
            message=waits,
            leaving=node.leaving,
        )

    def _publish_node(self, node: _NodeProcess) -> None:
        """Send the state of a node to the watchers."""
        self._publish(self._node_event(node))

    def _publish(self, event: WatchEvent) -> None:
        """Queue an event for each watcher. Watchers that connect later do not get it."""
        for queue in self._watchers:
            queue.put_nowait(event)
        self.changed.set()


# --- The HTTP API ---

_Name = Annotated[str, PathParam(pattern=f"^{names.NODE_ID}$")]
"""Id of a node."""
_Grace = Annotated[float, Query(ge=0, le=2**31, allow_inf_nan=False)]
"""A grace period in seconds."""


def api(cluster: LocalCluster) -> FastAPI:
    """Return the web application with the calls that ``protocol/local.py`` lists.

    It serves nothing yet. Its calls run in the event loop of the cluster. A ConfigError in a call
    becomes status 422 with an ErrorReply.
    """
    app = FastAPI(title="dlrover on this machine", docs_url=None, redoc_url=None, openapi_url=None)

    app.add_exception_handler(404, no_such_path)

    @app.exception_handler(ConfigError)
    async def refuse(_: Request, error: Exception) -> Response:
        reply = ErrorReply(code=ErrorCode.INVALID, message=str(error))
        return JSONResponse(reply.model_dump(), status_code=422)

    def done(message: str) -> Response:
        return JSONResponse(CallDone(message=message).model_dump())

    @app.get("/v1/job")
    async def job() -> Response:
        return Response(cluster.snapshot().model_dump_json(), media_type="application/json")

    @app.get("/v1/history")
    async def history() -> Response:
        return Response(cluster.history.model_dump_json(), media_type="application/json")

    @app.get("/v1/watch")
    async def watch() -> Response:
        async def lines() -> AsyncIterator[bytes]:
            async for event in cluster.watch():
                yield event.model_dump_json(exclude_defaults=True).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/jsonl")

    @app.put("/v1/status")
    async def status(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_STATUS:
                raise ConfigError(f"the status is too large: expected at most {MAX_STATUS} bytes")
        try:
            cluster.take_status(JobStatus.model_validate_json(body))
        except ValidationError as error:
            raise ConfigError(explain(error)) from error
        return done("accepted")

    @app.put("/v1/nodes/{node_id}")
    async def create(node_id: _Name) -> Response:
        cluster.create_node(NodeId(node_id))
        return done("accepted")

    @app.delete("/v1/nodes/{node_id}")
    async def delete(node_id: _Name, grace_s: _Grace = 0.0) -> Response:
        cluster.delete_node(NodeId(node_id), grace_s)
        return done("accepted")

    @app.post("/v1/nodes/{node_id}/{verb}")
    async def inject_fault(node_id: _Name, verb: Verb) -> Response:
        return done(await cluster.inject_fault(NodeId(node_id), verb))

    @app.post("/v1/hosts")
    async def hosts(count: Annotated[int, Query(ge=1, le=1000)] = 1) -> Response:
        return done(f"added {', '.join(cluster.add_hosts(count))}")

    @app.put("/v1/allocation")
    async def allocation(wanted: NodeAllocation) -> Response:
        if wanted != cluster.job.allocation:
            cluster.replace_job(cluster.job.allocated(wanted))
        surplus = max(0, len(cluster.hosts) - wanted.nodes)
        free, _ = _unassigned(cluster.hosts, cluster.nodes.values())
        for host in free[::-1][:surplus]:  # the rest, when no node is on them any more
            cluster.hosts.remove(host)
        cluster.add_hosts(max(0, wanted.nodes - len(cluster.hosts)))
        return done(f"{cluster.job.metadata.name} may have {counted(wanted.nodes, 'node')}")

    @app.post("/v1/scale")
    async def scale(replicas: int, role: str = names.ROLE_WORKER) -> Response:
        cluster.replace_job(cluster.job.scaled(replicas, role))
        lack = host_shortage(cluster.job, len(cluster.hosts))
        return done(f"{cluster.job.metadata.name} is scaled to {scaled_to(replicas, role)}{lack}")

    @app.post("/v1/suspend")
    async def suspend(on: bool) -> Response:
        cluster.replace_job(cluster.job.suspended(on))
        done_so = "suspended" if on else f"resumed{host_shortage(cluster.job, len(cluster.hosts))}"
        return done(f"{cluster.job.metadata.name} is {done_so}")

    @app.post("/v1/restart")
    async def restart(at: str, rolling: bool) -> Response:
        cluster.replace_job(cluster.job.restarted(at, rolling=rolling))
        return done(f"all nodes of {cluster.job.metadata.name} are being replaced")

    @app.post("/v1/snapshot")
    async def snapshot(at: str) -> Response:
        cluster.replace_job(cluster.job.with_snapshot(at))
        return done(f"all ranks of {cluster.job.metadata.name} are being looked at")

    @app.post("/v1/checkpoint")
    async def checkpoint(at: str) -> Response:
        cluster.replace_job(cluster.job.with_stored_checkpoint(at))
        return done(f"the newest checkpoint of {cluster.job.metadata.name} is being stored")

    @app.post("/v1/rebalance")
    async def rebalance(at: str) -> Response:
        cluster.replace_job(cluster.job.with_evened_servers(at))
        return done(f"the servers of {cluster.job.metadata.name} are being evened")

    @app.post("/v1/tune")
    async def tune(
        micro_batch: int | None = None, loader_workers: int | None = None, auto: bool | None = None
    ) -> Response:
        cluster.replace_job(
            cluster.job.tuned(micro_batch=micro_batch, loader_workers=loader_workers, auto=auto)
        )
        return done(f"{cluster.job.metadata.name} is {cluster.job.tuning_in_words()}")

    @app.post("/v1/stop")
    async def stop() -> Response:
        cluster.ended.set()
        return done(f"{cluster.job.metadata.name} is being stopped")

    return app


# --- Files, locks and processes ---

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


def expand(text: str, env: dict[str, str]) -> str:
    """Expand ``$(NAME)`` as Kubernetes does: unknown names stay, ``$$`` is a dollar sign.

    A value that contains ``$(NAME)`` is not expanded again.
    """

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def _last_status(job: ElasticJob, before: JobStatus | None, failure: str) -> JobStatus:
    """Return the status of a job that was ended, where its master has not published the end.

    It is that of ``before``, ended now, with one more event and without present nodes.

    Args:
        job: the job.
        before: the newest status that a master published; None if there is none.
        failure: why the job could not go on; empty if its user ended it.
    """
    phase, reason, kind = JobPhase.STOPPED, ENDED_BY_USER, EventReason.JOB_STOPPED
    if failure:
        phase, reason, kind = JobPhase.FAILED, failure, EventReason.MASTER_ENDED
    now = time.time()  # noqa: TID251 - a time that people read
    events = [] if before is None else before.events
    number = 1 + max((event.id for event in events), default=0)
    ending = JobEvent(id=number, at=now, reason=kind, message=reason)
    condition = Condition(
        type=phase.value, status="True", reason=kind, message=reason, last_transition_time=now
    )
    fields: dict[str, object] = {
        "phase": phase,
        "reason": reason,
        "ready": 0,
        "standby": 0,
        "ended_at": now,
        "published_at": now,
        "conditions": [condition],
        "events": [*events, ending],
    }
    if before is not None:
        gone: dict[str, object] = {
            "phase": NodePhase.GONE,
            "role": NodeRole.NONE,
            "node_rank": None,
            "pids": [],
        }
        nodes = [node.model_copy(update=gone) for node in before.nodes]
        return before.model_copy(update=fields | {"nodes": nodes})
    return JobStatus.model_validate(
        fields
        | {
            "name": job.metadata.name,
            "namespace": job.metadata.namespace,
            "generation": job.metadata.generation,
            "term": 0,
            "round": 0,
            "world_size": 0,
            "nodes_in_round": 0,
            "desired": job.worker.replicas,
            "minimum": job.worker.minimum,
            "started_at": now,
        }
    )


def _run_lock(folder: Path) -> int:
    """Lock the state folder of a run for as long as the returned descriptor is open.

    The result is -1 on a file system without locks; the folder then has no ``RUN_LOCK``.

    Raises:
        OSError: the lock file cannot be made.
    """
    fresh = folder / f"{names.RUN_LOCK}.new"
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        fresh.unlink()
        return -1
    try:  # a file with this name is locked as long as its run lasts
        fresh.rename(folder / names.RUN_LOCK)
    except OSError:
        os.close(lock)
        raise
    return lock


def _keep_job(paths: JobPaths, job: ElasticJob) -> None:
    """Write the job to the state folder, where it is found once it has ended; ignore errors."""
    with contextlib.suppress(OSError):
        _write(paths.state / names.JOB_FILE, job.model_dump_json(by_alias=True, indent=2))


def _write(path: Path, text: str) -> None:
    """Write a file of the state folder; a reader finds the old content or the new one.

    Raises:
        OSError: the disk refuses the file.
    """
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def _remove_unused(paths: JobPaths) -> None:
    """Remove the state folder of a run that did not start, as far as nothing else is in it."""
    with contextlib.suppress(OSError):
        (paths.state / names.RUN_LOCK).unlink(missing_ok=True)
        (paths.state / names.RUNTIME_LINK).unlink(missing_ok=True)
        if paths.logs.exists():
            paths.logs.rmdir()
        paths.state.rmdir()


def _endpoints(
    path: Path, job: ElasticJob
) -> tuple[socket.socket, tuple[socket.socket, ...], tuple[int, int]]:
    """Open the listening socket of the API at a path, those of the master, and the lifeline.

    After an error none of them is open.

    Args:
        path: the path.
        job: the job; its master needs a third socket for a parameter server.

    Raises:
        ConfigError: one of them cannot be made.
        FileLimitError: the limit of open files leaves none for them.
    """
    what, hint = "the sockets of the master", ""
    try:
        with contextlib.ExitStack() as opened:
            servers = [
                opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
                for _ in range(2 if job.servers is None else 3)
            ]
            lifeline = os.pipe()
            for fd in lifeline:
                opened.callback(os.close, fd)
            what, hint = str(path), "; DLROVER_RUNTIME_DIR can name another folder"
            listener = listen_at(path)
            opened.pop_all()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise FileLimitError(f"the sockets of the job: {error.strerror}") from error
        raise ConfigError(f"{what}: {error.strerror or error}{hint}") from error
    return listener, tuple(servers), lifeline


def _master_argv(
    paths: JobPaths, sockets: tuple[socket.socket, ...], lifeline_fd: int
) -> list[str]:
    """Return the command line of a job's master, which inherits these file descriptors."""
    listen_fd, health_fd, *ps_fd = (one.fileno() for one in sockets)
    argv = [sys.executable, "-P", "-m", "dlrover_py.master", "--cluster", str(paths.socket)]
    argv += ["--state-dir", str(paths.state), "--token-file", str(paths.token)]
    argv += ["--listen-fd", str(listen_fd), "--health-fd", str(health_fd)]
    if ps_fd:
        argv += ["--ps-fd", str(ps_fd[0])]
        argv += ["--ps-access", str(paths.runtime / names.PS_ACCESS_FILE)]
    return [*argv, "--lifeline-fd", str(lifeline_fd)]


def host_shortage(job: ElasticJob, hosts: int) -> str:
    """Return what to add to a sentence if a job wants more nodes than there are hosts, or ""."""
    wanted = job.worker.replicas + job.worker.standby_replicas
    wanted += job.servers.total if job.servers is not None else 0
    if wanted <= hosts:
        return ""
    missing = wanted - hosts
    return (
        f", but there {'is' if hosts == 1 else 'are'} only {counted(hosts, 'host')}: "
        f"{counted(missing, 'node')} {'waits' if missing == 1 else 'wait'} for one; "
        f"`dlrover node add --count {missing} --job {job.metadata.name}` adds hosts"
    )


class NoProgramError(FileNotFoundError):
    """The program of a command does not exist: no node can start it."""


def _no_program(name: str) -> str:
    """Describe why there is no program of this name."""
    if len(parts := name.split()) > 1:
        return f"no such program; expected each word as an item of a list: [{', '.join(parts)}]"
    if "/" not in name:
        return "no such program on the PATH"
    return "this file cannot be executed" if Path(name).exists() else "there is no such file"


def _spawn(
    argv: list[str], env: dict[str, str], cwd: Path, log_file: Path, keep: list[int]
) -> "subprocess.Popen[bytes]":
    """Start a process, in a session of its own, whose output is appended to a log file.

    If the log cannot be opened, this is logged and the output is lost. The file descriptors in
    ``keep`` stay open in the process. The call blocks, so it must be made in a thread.

    Raises:
        NoProgramError: there is no such program.
        OSError: the process cannot be started.
    """
    path = shutil.which(argv[0], path=env.get("PATH"))
    if path is None:
        raise NoProgramError(2, _no_program(argv[0]), argv[0])
    with contextlib.ExitStack() as stack:
        try:
            log_file.parent.mkdir(parents=True, exist_ok=True)
            out = stack.enter_context(log_file.open("ab"))
        except OSError as error:  # a full disk must not prevent the node's start
            log.warning("log_lines_lost", extra={"path": str(log_file), "why": error.strerror})
            out = stack.enter_context(open(os.devnull, "ab"))
        stack.enter_context(inheritable_signals())
        return subprocess.Popen(
            [path, *argv[1:]],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=keep,
            start_new_session=True,
        )


def _signal(process: "subprocess.Popen[bytes] | None", number: int) -> None:
    """Send a signal to a process if it still runs; None, for a process not started, is ignored."""
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to a process if it still runs."""
    _signal(process, signal.SIGKILL)


def _tail(path: Path) -> str:
    """Return the last lines of a log, without JSON lines, to explain the end of a process.

    These are at most 10 lines of the last ``OUTPUT_TAIL`` bytes. The result is empty if the log
    cannot be read.
    """
    with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - OUTPUT_TAIL))
        text = file.read(OUTPUT_TAIL).decode("utf-8", "replace")
        if size > OUTPUT_TAIL:  # the first line may lack its beginning, and so be no JSON
            text = text.partition("\n")[2] or text
        lines = [line for line in text.splitlines() if line and not line.startswith("{")]
        return "\n".join(lines[-10:])
    return ""
