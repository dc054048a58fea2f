"""This machine as a cluster for one job: API server, scheduler and kubelet in one process.

``dlrover job run`` is this process. It holds the job's object, runs the master (again, when it
dies) and starts a process for each node that the master asks for, on one of N simulated hosts.
The master sees it through ``master/platform/local.py``, people through ``dlrover``; both by a unix
socket that only the user can open (paths in ``protocol/local.py``).

Every process of a node carries a random mark in its environment: killing, freezing and cleaning
up go by the mark, so that nothing escapes by a new session or a new parent.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParam
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

from dlrover_py.arena import PREFIX
from dlrover_py.attend import attended
from dlrover_py.helpers import end, wake
from dlrover_py.owner import RUNTIME_HINT, STATE_HINT, is_own, open_own
from dlrover_py.processes import ended, marked, signal_all
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import ErrorReply
from dlrover_py.protocol.errors import ConfigError, ErrorCode, ExitCode
from dlrover_py.protocol.job import ElasticJob, explain
from dlrover_py.protocol.local import History, LocalNode, Seen, Snapshot, Verb
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus
from dlrover_py.protocol.words import counted

log = logging.getLogger("cluster")

MASTER_PAUSE_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
MASTER_STOPS_S = 5.0
"""The master is told of the job's end first; it may be dead."""
THAWED_S = 5.0
"""A node that was given up while it was frozen has so long to hear of it and to end by itself."""
OUTPUT_TAIL = 2000
SAMPLES_KEPT = 1000


# --- processes by mark ---


def signal_marked(mark: str, number: int) -> None:
    """Signal all processes that carry a node's mark, until no new one turns up."""
    signal_all(lambda: marked(names.ENV_NODE_MARK, mark), number)


# --- nodes ---


@dataclass(slots=True)
class _Node:
    id: NodeId
    host: str = ""
    process: "subprocess.Popen[bytes] | None" = None
    mark: str = ""
    ended: bool = False
    frozen: bool = False
    memory: Path | None = None
    """What it has saved: it goes with the host."""
    leaving: str = ""
    free: bool = False
    """Its end is not to be charged: it was drained, or the master wished it."""
    killed: str = ""
    asked: bool = False
    """It was asked to end."""
    deadline: asyncio.TimerHandle | None = None
    wished_end: float | None = None
    """Grace of a deletion that waits for the node to be thawed."""

    @property
    def state(self) -> str:
        if self.ended:
            return "ended"
        if self.process is None:
            return "pending"
        return "frozen" if self.frozen else "running"


@dataclass(frozen=True, slots=True)
class Paths:
    """Where the job keeps what: the runtime folder goes with the job, the state folder stays."""

    runtime: Path
    state: Path

    @property
    def socket(self) -> Path:
        """For the master and for people."""
        return self.runtime / names.CLUSTER_SOCKET

    @property
    def token(self) -> Path:
        """The job's token."""
        return self.runtime / names.TOKEN_FILE

    @property
    def logs(self) -> Path:
        """All that the nodes and the master write."""
        return self.state / "logs"


@dataclass(slots=True)
class Cluster:
    """The job, its nodes and its master on this machine."""

    job: ElasticJob
    paths: Paths
    workdir: Path
    environ: dict[str, str]
    hosts: list[str]
    nodes: dict[NodeId, _Node] = field(default_factory=dict)
    status: JobStatus | None = None
    history: History = field(default_factory=History)
    master: "subprocess.Popen[bytes] | None" = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something new to show."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """The job is over, or was told to stop."""
    stopping: bool = False
    uid: str = field(default_factory=lambda: secrets.token_hex(6))
    """Of this run of the job."""
    _next_host: int = 0
    _watchers: set["asyncio.Queue[Seen]"] = field(default_factory=set)
    _door: socket.socket | None = None
    _sockets: tuple[socket.socket, socket.socket] | None = None
    _lifeline: tuple[int, int] = (-1, -1)
    _held: int = -1
    """The lock on the job's name."""
    _run_lock: int = -1
    """The lock on the state folder: who removes old runs leaves it alone."""
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    # --- life ---

    @classmethod
    def prepare(
        cls, job: ElasticJob, *, hosts: int, paths: Paths, workdir: Path, environ: dict[str, str]
    ) -> "Cluster":
        """Make the folders, the token and the sockets; nothing is started yet.

        Raises:
            ConfigError: a job of this name runs already, or a folder cannot be made, or is not
                this user's alone.
        """
        try:
            lock = _lock(paths.runtime)
        except BlockingIOError as error:
            raise ConfigError(
                f"a job named {job.metadata.name} runs already (its folder is {paths.runtime}); "
                f"stop it with `dlrover job stop {job.metadata.name}`, or name this one differently"
            ) from error
        except OSError as error:
            raise ConfigError(f"{error.filename or paths.runtime}: {error.strerror}") from error
        cluster = cls(job=job, paths=paths, workdir=workdir, environ=environ, hosts=[])
        cluster._held = lock
        try:
            shutil.rmtree(paths.runtime, ignore_errors=True)  # of a run that was killed
            paths.runtime.mkdir(mode=0o700)
            for folder in (paths.state.parent, paths.state):  # tracebacks can hold secrets
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                is_own(folder, shared=True, hint=STATE_HINT)
            cluster._run_lock = _run_lock(paths.state)
            paths.logs.mkdir(exist_ok=True)
            paths.token.touch(mode=0o600)
            paths.token.write_text(secrets.token_urlsafe(24))
        except OSError as error:
            cluster.close()
            raise ConfigError(f"{error.filename or paths.runtime}: {error.strerror}") from error
        except ConfigError:
            cluster.close()
            raise
        cluster.add_hosts(hosts)
        cluster._sockets = (
            socket.create_server(("127.0.0.1", 0), backlog=4096),
            socket.create_server(("127.0.0.1", 0), backlog=4096),
        )
        cluster._lifeline = os.pipe()
        cluster._door = socket.socket(socket.AF_UNIX)
        fresh = paths.socket.with_suffix(".fresh")
        try:
            cluster._door.bind(str(fresh))
            cluster._door.listen(128)
            fresh.rename(paths.socket)  # whoever sees it can connect
        except OSError as error:
            cluster.close()
            raise ConfigError(
                f"{paths.socket}: {error.strerror or error}; DLROVER_RUNTIME_DIR sets another place"
            ) from error
        return cluster

    def door(self) -> socket.socket:
        """The listening socket of the API."""
        assert self._door is not None
        return self._door

    @property
    def master_addr(self) -> str:
        """Where agents call."""
        assert self._sockets is not None
        return f"127.0.0.1:{self._sockets[0].getsockname()[1]}"

    @property
    def health_addr(self) -> str:
        """Health and metrics of the master."""
        assert self._sockets is not None
        return f"127.0.0.1:{self._sockets[1].getsockname()[1]}"

    async def keep_master(self) -> None:
        """Run the master, again when it has died or stands still. Its ports are ours, and outlive
        it."""
        assert self._sockets is not None
        pause = 0
        argv = [sys.executable, "-m", "dlrover_py.master", "--cluster", str(self.paths.socket)]
        argv += ["--state-dir", str(self.paths.state), "--token-file", str(self.paths.token)]
        keep = [s.fileno() for s in self._sockets] + [self._lifeline[0]]
        argv += ["--listen-fd", str(keep[0]), "--health-fd", str(keep[1])]
        argv += ["--lifeline-fd", str(keep[2])]
        while not self.stopping:
            self.master = _spawn(
                argv, self.environ, Path("/"), self.paths.logs / "master.log", keep
            )
            self.changed.set()
            code = await attended(self.master, self.health_addr)
            self.changed.set()
            if self.stopping:
                return
            if code == ExitCode.USAGE:  # it would say the same again
                raise ConfigError(
                    _tail(self.paths.logs / "master.log") or "the master cannot start"
                )
            log.warning("master_ended", extra={"code": code, "then": "it is restarted"})
            await asyncio.sleep(MASTER_PAUSE_S[min(pause, len(MASTER_PAUSE_S) - 1)])
            pause += 1

    def _living_master(self) -> "subprocess.Popen[bytes] | None":
        return self.master if self.master is not None and self.master.poll() is None else None

    async def shut_down(self, grace_s: float) -> None:
        """End everything: nodes with notice, then by force; the master last."""
        self._tell(Seen(kind="stopped"))
        with contextlib.suppress(TimeoutError):  # so that no new round is formed on the way down
            async with asyncio.timeout(min(grace_s, MASTER_STOPS_S)):
                while self._living_master() and (
                    self.status is None or not self.status.phase.ended
                ):
                    self.changed.clear()
                    await self.changed.wait()
        self.stopping = True
        living = [n for n in self.nodes.values() if n.process is not None and not n.ended]
        for node in living:
            if node.frozen:
                signal_marked(node.mark, signal.SIGKILL)
                signal_marked(node.mark, signal.SIGCONT)
            else:
                self._ask_to_end(node)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while not all(n.ended for n in living):
                    self.changed.clear()
                    await self.changed.wait()
        for node in living:
            signal_marked(node.mark, signal.SIGKILL)
        if (master := self._living_master()) is not None:
            _signal(master, signal.SIGTERM)
            wake(master)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await ended(master)
            end(master, 0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Let go of sockets and of the runtime folder; the state folder stays."""
        for sock in (self._door, *(self._sockets or ())):
            if sock is not None:
                sock.close()
        shutil.rmtree(self.paths.runtime, ignore_errors=True)
        for fd in (*self._lifeline, self._run_lock, self._held):
            with contextlib.suppress(OSError):
                os.close(fd)

    # --- what the master asks for ---

    def create_node(self, node_id: NodeId) -> None:
        """Start a node if there is a free host, now or later."""
        if self.stopping:
            return
        old = self.nodes.get(node_id)
        if old is not None:
            if old.ended:  # the asker does not know yet
                self._tell(Seen(kind="ended", node=node_id, why="it has ended", free=old.free))
            return
        self.nodes[node_id] = _Node(node_id)
        self._schedule()
        node = self.nodes[node_id]
        if node.process is None:
            self._tell_node(node)

    def delete_node(self, node_id: NodeId, grace_s: float) -> None:
        """End a node: SIGTERM, SIGKILL after the grace. A frozen one cannot be reached."""
        node = self.nodes.get(node_id)
        if node is None or node.ended:
            return
        node.free = True
        if node.process is None:
            self._end(node, "it was deleted before it had a host", None)
        elif node.frozen:
            node.wished_end = grace_s
        elif node.deadline is None:
            if grace_s:
                self._ask_to_end(node)
            loop = asyncio.get_running_loop()
            mark = node.mark
            node.deadline = loop.call_later(
                grace_s, lambda: signal_marked(mark, signal.SIGKILL) if not node.ended else None
            )

    def take_status(self, status: JobStatus) -> None:
        """Keep what the master publishes, on disk too once the job has ended."""
        self.status = status
        self.history = self.history.grown(status, SAMPLES_KEPT)
        if status.phase.ended:
            with contextlib.suppress(OSError):  # the status last: with it a run counts as ended
                for name, text in (
                    (names.HISTORY_FILE, self.history.model_dump_json()),
                    (names.STATUS_FILE, status.model_dump_json(by_alias=True, indent=2)),
                ):
                    whole = self.paths.state / name
                    fresh = whole.with_suffix(".new")
                    fresh.write_text(text)
                    fresh.replace(whole)
            self.ended.set()
        self.changed.set()

    # --- what people ask for ---

    def change(self, job: ElasticJob) -> None:
        """Another spec."""
        self.job = job
        self._tell(Seen(kind="job", job=job))

    def add_hosts(self, count: int) -> list[str]:
        """More places for nodes."""
        fresh = [f"host-{self._next_host + i}" for i in range(count)]
        self._next_host += count
        self.hosts += fresh
        self._schedule()
        self.changed.set()
        return fresh

    def hurt(self, node_id: NodeId, verb: Verb) -> str:
        """Do something bad to a node; return what was done.

        Raises:
            ConfigError: there is no such node, or it has ended.
        """
        node = self.nodes.get(node_id)
        if node is None or node.ended or node.process is None:
            living = [n.id for n in self.nodes.values() if n.process and not n.ended]
            raise ConfigError(
                f"node {node_id} does not run; these do: {', '.join(living) or 'none'}"
            )
        if verb == "kill":
            node.killed = f"{node.host} was killed"
            with contextlib.suppress(ValueError):
                self.hosts.remove(node.host)
            # The agent first: on a host that is gone nobody is left to report the worker's death.
            _signal(node.process, signal.SIGKILL)
            signal_marked(node.mark, signal.SIGKILL)
            return f"{node.id} and its host {node.host} are gone; `dlrover node add` brings another"
        if verb == "freeze":
            node.frozen = True
            signal_marked(node.mark, signal.SIGSTOP)
            return f"all processes of {node.id} are frozen; the master finds out by its lease"
        if verb == "thaw":
            node.frozen = False
            signal_marked(node.mark, signal.SIGCONT)
            if node.wished_end is not None:
                asyncio.get_running_loop().call_later(
                    max(node.wished_end, THAWED_S), lambda: signal_marked(node.mark, signal.SIGKILL)
                )
            return f"{node.id} goes on"
        node.leaving = f"{node.host} is drained"
        node.free = True
        with contextlib.suppress(ValueError):
            self.hosts.remove(node.host)
        self._tell_node(node)  # before the signal, so that its end is not taken for a loss
        self._ask_to_end(node)
        return f"{node.id} was asked to leave, and {node.host} takes no other node"

    def snapshot(self) -> Snapshot:
        """Everything, for a look."""
        return Snapshot(
            job=self.job,
            status=self.status,
            nodes=[
                LocalNode.model_validate(
                    {
                        "id": n.id,
                        "host": n.host,
                        "pid": n.process.pid if n.process else 0,
                        "state": n.state,
                        "leaving": n.leaving,
                    }
                )
                for n in self.nodes.values()
            ],
            hosts=self.hosts,
            cluster_pid=os.getpid(),
            master_pid=master.pid if (master := self._living_master()) else 0,
            master_addr=self.master_addr,
            health_addr=self.health_addr,
            token_file=str(self.paths.token),
            log_dir=str(self.paths.logs),
        )

    async def watch(self) -> AsyncIterator[Seen]:
        """Whole state first, then each change."""
        queue: asyncio.Queue[Seen] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            yield Seen(kind="job", job=self.job)
            for node in list(self.nodes.values()):
                if not node.ended:
                    yield self._seen(node)
            living = [n.id for n in self.nodes.values() if not n.ended]
            yield Seen(kind="listed", nodes=list(living))
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    # --- small steps ---

    def _ask_to_end(self, node: _Node) -> None:
        """SIGTERM, once: an agent takes a second one for impatience, and kills its workers."""
        if not node.asked:
            node.asked = True
            _signal(node.process, signal.SIGTERM)

    def _schedule(self) -> None:
        """Give free hosts to waiting nodes."""
        busy = {n.host for n in self.nodes.values() if n.process is not None and not n.ended}
        free = [h for h in self.hosts if h not in busy]
        waiting = [n for n in self.nodes.values() if n.process is None and not n.ended]
        for node, host in zip(waiting, free, strict=False):
            node.host = host
            try:
                self._start(node)
            except (OSError, ValueError) as error:
                program = self.job.worker.container().command[0]
                reason = error.strerror if isinstance(error, OSError) else error
                why = f"could not be started: {program}: {reason}"
                self._end(node, why, 127 if isinstance(error, FileNotFoundError) else 126)
                continue
            self._tell_node(node)

    def _start(self, node: _Node) -> None:
        container = self.job.worker.container()
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
            "POD_NAME": f"{self.job.metadata.name}-edljob-worker-{node.id.lstrip('n')}",
        }
        # All nodes share this machine's cores; a Pod has its own.
        cores = len(os.sched_getaffinity(0)) // max(1, self.job.worker.replicas)
        env.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
        for variable in container.env:
            env[variable.name] = expand(variable.value, env)
        argv = [expand(part, env) for part in (*container.command, *container.args)]
        memory = env.get(names.ENV_SHM_DIR) or "/dev/shm"
        node.memory = Path(memory, f"{PREFIX}{self.uid}-{node.id}")
        folder = self.paths.logs / node.id
        folder.mkdir(parents=True, exist_ok=True)
        process = _spawn(argv, env, self.workdir, folder / "agent.log", [self._lifeline[0]])
        node.process = process
        task = asyncio.create_task(self._attend(node, process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, node: _Node, process: "subprocess.Popen[bytes]") -> None:
        code = await ended(process)
        signal_marked(node.mark, signal.SIGKILL)  # whatever it has left behind
        if node.memory is not None:
            shutil.rmtree(node.memory, ignore_errors=True)
        if node.killed:
            why = node.killed
        elif code < 0:
            why = f"its agent was killed by {signal.Signals(-code).name}"
        else:
            why = f"its agent exited with code {code}"
        self._end(node, why, code)

    def _end(self, node: _Node, why: str, code: int | None) -> None:
        if node.ended:
            return
        node.ended = True
        if node.deadline is not None:
            node.deadline.cancel()
        output = ""
        if code not in (0, None) and not node.killed:
            output = _tail(self.paths.logs / node.id / "agent.log")
        self._tell(
            Seen(
                kind="ended",
                node=node.id,
                host=node.host,
                why=why,
                exit_code=code,
                free=node.free,
                output=output,
            )
        )
        self._schedule()

    def _seen(self, node: _Node) -> Seen:
        waits = "" if node.process is not None else "no free host (`dlrover node add`)"
        return Seen(
            kind="node",
            node=node.id,
            near=node.process is not None,
            host=node.host,
            message=waits,
            leaving=node.leaving,
        )

    def _tell_node(self, node: _Node) -> None:
        self._tell(self._seen(node))

    def _tell(self, seen: Seen) -> None:
        for queue in self._watchers:
            queue.put_nowait(seen)
        self.changed.set()


# --- its API ---

_Name = Annotated[str, PathParam(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
"""A node's id: a folder of its logs has the same name."""
_Grace = Annotated[float, Query(ge=0, le=2**31, allow_inf_nan=False)]


def api(cluster: Cluster) -> FastAPI:
    """The calls that ``protocol/local.py`` lists."""
    app = FastAPI(title="dlrover on this machine", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ConfigError)
    async def refuse(_: Request, error: Exception) -> Response:
        reply = ErrorReply(code=ErrorCode.INVALID, message=str(error))
        return JSONResponse(reply.model_dump(), status_code=422)

    def done(message: str) -> Response:
        return JSONResponse({"message": message})

    @app.get("/v1/job")
    async def job() -> Response:
        return Response(cluster.snapshot().model_dump_json(), media_type="application/json")

    @app.get("/v1/history")
    async def history() -> Response:
        return Response(cluster.history.model_dump_json(), media_type="application/json")

    @app.get("/v1/watch")
    async def watch() -> Response:
        async def lines() -> AsyncIterator[bytes]:
            async for seen in cluster.watch():
                yield seen.model_dump_json(exclude_defaults=True).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/jsonl")

    @app.put("/v1/status")
    async def status(request: Request) -> Response:
        try:
            cluster.take_status(JobStatus.model_validate_json(await request.body()))
        except ValidationError as error:
            raise ConfigError(explain(error)) from error
        return done("taken")

    @app.put("/v1/nodes/{node_id}")
    async def create(node_id: _Name) -> Response:
        cluster.create_node(NodeId(node_id))
        return done("taken")

    @app.delete("/v1/nodes/{node_id}")
    async def delete(node_id: _Name, grace_s: _Grace = 0.0) -> Response:
        cluster.delete_node(NodeId(node_id), grace_s)
        return done("taken")

    @app.post("/v1/nodes/{node_id}/{verb}")
    async def hurt(node_id: _Name, verb: Verb) -> Response:
        return done(cluster.hurt(NodeId(node_id), verb))

    @app.post("/v1/hosts")
    async def hosts(count: Annotated[int, Query(ge=1, le=1000)] = 1) -> Response:
        return done(f"added {', '.join(cluster.add_hosts(count))}")

    @app.post("/v1/scale")
    async def scale(replicas: int) -> Response:
        cluster.change(cluster.job.scaled(replicas))
        return done(f"{cluster.job.metadata.name} now wishes {counted(replicas, 'node')}")

    @app.post("/v1/suspend")
    async def suspend(on: bool) -> Response:
        cluster.change(cluster.job.suspended(on))
        return done(f"{cluster.job.metadata.name} is {'suspended' if on else 'resumed'}")

    @app.post("/v1/restart")
    async def restart(at: str, rolling: bool) -> Response:
        cluster.change(cluster.job.restarted(at, rolling=rolling))
        return done(f"all nodes of {cluster.job.metadata.name} are being replaced")

    @app.post("/v1/stop")
    async def stop() -> Response:
        cluster.ended.set()
        return done(f"{cluster.job.metadata.name} is being stopped")

    return app


# --- small things ---

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


def expand(text: str, env: dict[str, str]) -> str:
    """``$(NAME)`` as Kubernetes expands it: unknown names stay, ``$$`` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def _lock(folder: Path) -> int:
    """Make this process the only one that uses the folder, which may be left of a killed one.

    Raises:
        BlockingIOError: another process does.
        ConfigError: another user could change what is there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # It may have been there: its name in /tmp is known to all.
    root = open_own(folder.parent, os.O_DIRECTORY, links=True, hint=RUNTIME_HINT)
    try:
        lock = open_own(folder.with_suffix(".lock").name, os.O_RDWR | os.O_CREAT, at=root)
    finally:
        os.close(root)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _run_lock(folder: Path) -> int:
    """Mark the folder of a run as being in use; -1 on a file system without locks.

    Raises:
        OSError: the file cannot be made.
    """
    fresh = folder / f"{names.RUN_LOCK}.new"
    lock = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return -1
    fresh.rename(folder / names.RUN_LOCK)  # under this name it was always locked while it is in use
    return lock


def _spawn(
    argv: list[str], env: dict[str, str], cwd: Path, log_file: Path, keep: list[int]
) -> "subprocess.Popen[bytes]":
    path = shutil.which(argv[0], path=env.get("PATH"))
    if path is None:
        raise FileNotFoundError(2, "no such program on the PATH", argv[0])
    with contextlib.ExitStack() as stack:
        try:
            out = stack.enter_context(log_file.open("ab"))
        except OSError as error:  # a full disk costs log lines, not the node
            log.warning("log_lines_lost", extra={"path": str(log_file), "why": error.strerror})
            out = stack.enter_context(open(os.devnull, "ab"))
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
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _tail(path: Path) -> str:
    """The last words of a node that could not even start."""
    with contextlib.suppress(OSError):
        text = path.read_bytes()[-OUTPUT_TAIL:].decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line and not line.startswith("{")]
        return "\n".join(lines[-10:])
    return ""
