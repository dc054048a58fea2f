"""Measures how long the survivors of a fault wait for their next assignment, beside torchrun.

Everything runs on this machine. DLRover's jobs run through ``dlrover job run``. torchrun runs as
three agents beside each other. Both take turns within one run. A worker here computes nothing. It
records its start. A hub in this process stands for the collective: when one worker of a group ends,
the hub closes the connections of the others. They then raise the exception that gloo would raise.

Measured times (milliseconds, from ``time.monotonic``):

* *next assignment*: from right before the fault until the agent of the last survivor has taken its
  next round. It is ``at - waited_s`` of the ``workers_start`` lines in the agents' logs. ``at`` is
  truncated to milliseconds, so one is added.
* *next worker*: until the first line of the last survivor's next worker. torchrun shows no other
  sign, so the two are compared by this figure.
* joining: from the moment when the agent of the last joining node opened its socket for scripts,
  right before its first report, until the last agent has taken the larger round.

The store of torchrun's rendezvous runs in a separate process that is never killed. By default it
runs in an agent. The loss of that agent then ends the job.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import secrets
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.page import write_section
from dlrover_py.localcluster.cluster import signal_marked
from dlrover_py.protocol import names
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobStatus, NodePhase, NodeStatus

BIN = Path(sys.executable).parent
LEASE_MS = 5000.0
NEVER_S = 150.0
"""Seconds after which torchrun is taken to have failed."""
QUIET_S = 0.5
"""Seconds of rest before each fault. By then the status is published and the last round cleaned
up."""

WORKER = """
import time
at = time.monotonic_ns()
import json, os, socket, sys
env = os.environ
stamps, hub, mode = sys.argv[1:]
me = {"node": env.get("DLROVER_NODE_ID") or env["BENCH_NODE"], "rank": int(env["RANK"]),
      "size": int(env["WORLD_SIZE"]), "round": int(env.get("DLROVER_ROUND", 0)),
      "pid": os.getpid(), "socket": env.get("DLROVER_AGENT_SOCKET", "")}
def note(what, at):
    with open(stamps, "a") as file:
        file.write(json.dumps({"what": what, "at": at} | me) + "\\n")
note("start", at)
if mode == "gloo":
    import datetime
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    note("connected", time.monotonic_ns())
    while True:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
peers = socket.socket(socket.AF_UNIX)
peers.connect(hub)
peers.sendall(json.dumps(me).encode() + b"\\n")
peers.recv(1)
raise RuntimeError("Connection closed by peer")
"""
STORE = """
import signal, sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""

T = TypeVar("T")
Part = Callable[[], None]
_pause = threading.Event()


class UnexpectedError(Exception):
    """The run cannot continue. What it has measured so far is kept."""


def say(text: str) -> None:
    """Print a line with the time of day."""
    print(f"{datetime.now().astimezone():%H:%M:%S} {text}", flush=True)


def until(look: Callable[[], T | None], what: str, *, within_s: float, every_s: float = 0.01) -> T:
    """Poll a function until it returns a true value, and return that value.

    Raises:
        UnexpectedError: the deadline has passed.
    """
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise UnexpectedError(f"not within {within_s:g} s: {what}")
        _pause.wait(every_s)
    return seen


# --- Measurements ---


@dataclass(slots=True)
class Case:
    """One row of the table, with samples in milliseconds."""

    what: str
    target_ms: float | None = None
    assigned: list[float] = field(default_factory=list)
    """DLRover: time until the last survivor has its next assignment."""
    worker: list[float] = field(default_factory=list)
    """DLRover: time until the next worker of the last survivor runs."""
    torchrun: list[float] = field(default_factory=list)
    """torchrun: time until the next worker of the last survivor runs."""
    torchrun_note: str = ""
    request: list[float] = field(default_factory=list)
    """DLRover: time that the request took which caused the fault. It is a part of the others."""


class Results:
    """All rows, and what went wrong."""

    def __init__(self) -> None:
        lease = LEASE_MS + 100
        self.worker_killed = Case("a worker is killed", 50)
        self.node_standby = Case("a node is killed, a standby takes its place", 100)
        self.first_standby = Case("rank 0's node is killed, a standby takes its place", 100)
        self.node_shrink = Case("a node is lost with its host, the others go on", 100)
        self.first_shrink = Case("rank 0's node is lost with its host, the others go on", 100)
        self.frozen = Case("a node is cut off (all its processes stand still)", lease)
        self.joined = Case("two nodes join a round of one", 50)
        self.started = Case("a job starts with three nodes", 50)
        self.cases = [
            self.worker_killed,
            self.node_standby,
            self.first_standby,
            self.node_shrink,
            self.first_shrink,
            self.frozen,
            self.joined,
            self.started,
        ]
        self.surprises: list[str] = []

    def surprise(self, text: str) -> None:
        say(f"! {text}")
        self.surprises.append(text)


# --- Workers and their connections ---


@dataclass(frozen=True, slots=True)
class Stamp:
    """A line that a worker wrote."""

    what: str
    at: int
    node: str
    rank: int
    size: int
    round: int
    pid: int
    socket: str


class Stamps:
    """The file to which all workers of a job append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def read(self, what: str = "start") -> list[Stamp]:
        lines = self.path.read_text().split("\n")[:-1]
        found = [Stamp(**json.loads(line)) for line in lines]
        return [s for s in found if s.what == what]

    def newest(self, what: str = "start") -> dict[str, Stamp]:
        """Return the newest stamp of each node."""
        return {s.node: s for s in self.read(what)}


class Hub:
    """Stands for the connections between workers. When one breaks, it closes all of its group.

    A worker belongs to the newest unbroken group of its world size that does not have its rank yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(path))
        self._door.listen(64)
        self._stop_read, self._stop_write = os.pipe()
        self._groups: dict[socket.socket, dict[int, socket.socket]] = {}
        self._newest: dict[int, dict[int, socket.socket]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stop_write)
        self._thread.join()
        for sock in (*self._groups, self._door):
            sock.close()
        os.close(self._stop_read)

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._door, selectors.EVENT_READ)
        selector.register(self._stop_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == self._stop_read:
                    return
                if key.fileobj is self._door:
                    selector.register(self._door.accept()[0], selectors.EVENT_READ)
                    continue
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock.fileno() < 0:
                    continue  # closed with its group in this same turn
                data = b""
                with contextlib.suppress(ConnectionError):
                    data = sock.recv(4096)
                if data:
                    self._join(sock, json.loads(data))
                    continue
                group = self._groups.get(sock, {})
                for member in {sock, *group.values()}:
                    selector.unregister(member)
                    self._groups.pop(member, None)
                    member.close()
                self._newest = {k: g for k, g in self._newest.items() if g is not group}

    def _join(self, sock: socket.socket, worker: dict[str, Any]) -> None:
        size, rank = worker["size"], worker["rank"]
        group = self._newest.get(size)
        if group is None or rank in group:
            group = self._newest[size] = {}
        group[rank] = sock
        self._groups[sock] = group


class Handle:
    """A process that this process did not start. A reused process id is never hit."""

    def __init__(self, pid: int, what: str) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise UnexpectedError(f"{what} (process {pid}) has ended by itself") from error

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._fd)


def kill_all(pids: Sequence[int]) -> int:
    """Send SIGKILL to these processes in order. Return the time right before the first one."""
    handles = [Handle(pid, "a process to be killed") for pid in pids]
    at = time.monotonic_ns()
    for handle in handles:
        handle.kill()
    for handle in handles:
        handle.close()
    return at


def ms(later: int, earlier: int) -> float:
    """Return the milliseconds between two times in nanoseconds."""
    return round((later - earlier) / 1e6, 2)


# --- DLRover ---


class _Unix(http.client.HTTPConnection):
    """An HTTP connection over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Ours:
    """A job that runs through ``dlrover job run``."""

    def __init__(
        self, folder: Path, name: str, hub: Hub, results: Results, *, hosts: int, **worker: Any
    ) -> None:
        self.name, self._results = name, results
        self._timed = 0
        self.stamps = Stamps(folder / f"{name}.stamps")
        self._state = folder / "state"
        self._socket = folder / "run" / name / names.CLUSTER_SOCKET
        script = folder / "worker.py"
        script.write_text(WORKER)
        command = ["elastic-run", str(script), str(self.stamps.path), str(hub.path), "hub"]
        container = {"name": "main", "image": "none", "command": command}
        template = {"spec": {"containers": [container]}}
        document = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": name},
            "spec": {"replicaSpecs": {"worker": {**worker, "template": template}}},
        }
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document))
        self._output = (folder / f"{name}.out").open("wb")
        self._process = subprocess.Popen(
            [BIN / "dlrover", "job", "run", file, "--nodes", str(hosts), "--json", "--grace", "3"],
            env=os.environ
            | {
                "DLROVER_RUNTIME_DIR": str(folder / "run"),
                "DLROVER_STATE_DIR": str(self._state),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def __enter__(self) -> "Ours":
        return self

    def __exit__(self, *_: object) -> None:
        """End the job as its user would; use force if that takes too long."""
        for number, patience_s in ((signal.SIGINT, 10.0), (signal.SIGINT, 10.0), (9, 5.0)):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience_s)
        self._output.close()

    def call(self, method: str, path: str) -> tuple[bytes, int, float]:
        """Send a request to the cluster.

        Returns:
            The answer, the time right before the request, and the duration of the request.
        """
        connection = _Unix(self._socket)
        try:
            connection.connect()
            at = time.monotonic_ns()
            connection.request(method, path)
            reply = connection.getresponse()
            body = reply.read()
            took = ms(time.monotonic_ns(), at)
        finally:
            connection.close()
        if reply.status != 200:
            raise UnexpectedError(f"{method} {path}: {body.decode()}")
        return body, at, took

    def snapshot(self) -> Snapshot:
        return Snapshot.model_validate_json(self.call("GET", "/v1/job")[0])

    def settled(self, nodes: int, *, standby: int = 0, after: int = 0) -> JobStatus:
        """Wait until a round newer than ``after`` runs with the given number of nodes.

        Returns:
            The status of the job after ``QUIET_S`` seconds of rest.
        """

        def look() -> JobStatus | None:
            if self._process.poll() is not None:
                raise UnexpectedError(f"{self.name} has ended; see {self._output.name}")
            if not self._socket.exists():
                return None
            status = self.snapshot().status
            if status is None or status.phase != "Running" or status.round <= after:
                return None
            there = members(status)
            good = len(there) == status.nodes_in_round == nodes and status.standby == standby
            if not good or not all(n.phase is NodePhase.LIVE and all(n.pids) for n in there):
                return None
            started = self.stamps.newest()
            current = all(n.id in started and started[n.id].round == status.round for n in there)
            return status if current and all(n.workers == "running" for n in there) else None

        status = until(look, f"{self.name}: {nodes} nodes", within_s=60, every_s=0.1)
        _pause.wait(QUIET_S)
        if self._timed and status.round != self._timed:
            words = f"round {self._timed} was timed and round {status.round} runs"
            self._results.surprise(f"{self.name}: {words} ({status.reason})")
        return status

    def started(self, after: int, nodes: int) -> tuple[int, dict[str, Stamp]]:
        """Wait for a later round in which exactly the given number of nodes have started workers.

        Returns:
            The number of the round, and the workers by node.
        """

        def look() -> tuple[int, dict[str, Stamp]] | None:
            rounds: dict[int, dict[str, Stamp]] = {}
            for stamp in self.stamps.read():
                if stamp.round > after and stamp.size == nodes:
                    rounds.setdefault(stamp.round, {})[stamp.node] = stamp
            return next(((r, w) for r, w in sorted(rounds.items()) if len(w) == nodes), None)

        try:
            found = until(look, f"{self.name}: {nodes} nodes after round {after}", within_s=20)
        except UnexpectedError as error:
            status = self.snapshot().status
            last = [f"{e.reason}: {e.message}" for e in status.events[-5:]] if status else []
            raise UnexpectedError(f"{error}; last events: {last}") from error
        self._timed = found[0]
        if self._timed > after + 1:
            words = f"round {self._timed} where round {after + 1} was expected"
            self._results.surprise(f"{self.name}: {words}; timed until then")
        return found

    def assigned(self, number: int, nodes: Iterable[str]) -> dict[str, int]:
        """Return when these agents took a round (monotonic nanoseconds), from their logs."""
        offset = time.time_ns() - time.monotonic_ns()
        found = {}
        for node in nodes:
            (log,) = self._state.glob(f"{self.name}@*/logs/{node}/agent.log")
            for text in log.read_text().splitlines():
                line = json.loads(text) if text.startswith("{") else {}
                if line.get("event") == "workers_start" and line.get("round") == number:
                    at = datetime.fromisoformat(line["at"]).timestamp() * 1e9
                    found[node] = int(at + 1e6 - line["waited_s"] * 1e9 - offset)
            if node not in found:
                raise UnexpectedError(f"{log}: no workers_start of round {number}")
        return found

    def measure(self, case: Case, before: JobStatus, at: int, nodes: int) -> None:
        """Record the figures of the next round, from the fault at ``at``."""
        number, workers = self.started(before.round, nodes)
        assigned = self.assigned(number, workers)
        case.assigned.append(ms(max(assigned.values()), at))
        case.worker.append(ms(max(s.at for s in workers.values()), at))
        say(f"  {case.what}: {case.assigned[-1]:.0f} ms, workers {case.worker[-1]:.0f} ms")

    def joined(self, case: Case, after: int, nodes: int, joiners: Sequence[str]) -> None:
        """Measure from the last joining node's readiness until all nodes have taken the round."""
        number, workers = self.started(after, nodes)
        offset = time.time_ns() - time.monotonic_ns()
        ready = [Path(workers[n].socket).stat().st_mtime_ns - offset for n in joiners]
        assigned = self.assigned(number, workers)
        case.assigned.append(ms(max(assigned.values()), max(ready)))
        case.worker.append(ms(max(s.at for s in workers.values()), max(ready)))
        say(f"  {case.what}: {case.assigned[-1]:.0f} ms, workers {case.worker[-1]:.0f} ms")


def members(status: JobStatus) -> list[NodeStatus]:
    """Return the nodes of the round in the order of their ranks."""
    found = [n for n in status.nodes if n.node_rank is not None]
    return sorted(found, key=lambda n: n.node_rank or 0)


def victim(status: JobStatus, *, first: bool) -> NodeStatus:
    """Return the node of rank 0, or of the others one that was lost least often.

    Such a node is replaced soon.
    """
    ranked = members(status)
    return ranked[0] if first else min(ranked[1:], key=lambda n: (n.relaunches, n.restarts))


def ours_with_standby(
    folder: Path, name: str, hub: Hub, results: Results, *, phase_s: float
) -> None:
    """Kill workers, then nodes, then freeze a node. There is a standby each time.

    Args:
        folder: folder of the run.
        name: name of the job.
        hub: connections of the workers.
        results: receives the measurements.
        phase_s: seconds to wait before the freeze. A freeze counts from the last report of the
            node, which reports about once a second.
    """
    spec = {"replicas": 3, "minReplicas": 2, "standbyReplicas": 1, "restartCount": 1000}
    with Ours(folder, name, hub, results, hosts=4, **spec) as job:
        start(job, results, standby=1)
        status = job.settled(3, standby=1)
        for rank in (0, 1, 2, 0):
            at = kill_all(members(status)[rank].pids)
            job.measure(results.worker_killed, status, at, 3)
            status = job.settled(3, standby=1, after=status.round)
        for case, first in (
            (results.node_standby, False),
            (results.first_standby, True),
            (results.node_standby, False),
            (results.first_standby, True),
        ):
            node = victim(status, first=first)
            at = kill_all([node.agent_pid, *node.pids])
            job.measure(case, status, at, 3)
            status = job.settled(3, standby=1, after=status.round)
        node = victim(status, first=False)
        _pause.wait(phase_s)
        _, at, took = job.call("POST", f"/v1/nodes/{node.id}/freeze")
        results.frozen.request.append(took)
        job.measure(results.frozen, status, at, 3)


def ours_shrinking(folder: Path, name: str, hub: Hub, results: Results) -> None:
    """Remove hosts one by one, then return both at the same time."""
    spec = {"replicas": 3, "minReplicas": 1, "restartCount": 1000}
    with Ours(folder, name, hub, results, hosts=3, **spec) as job:
        start(job, results, standby=0)
        status = job.settled(3)
        for _ in range(2):
            for case, first, left in (
                (results.node_shrink, False, 2),
                (results.first_shrink, True, 1),
            ):
                node = victim(status, first=first)
                _, at, took = job.call("POST", f"/v1/nodes/{node.id}/kill")
                case.request.append(took)
                job.measure(case, status, at, left)
                status = job.settled(left, after=status.round)

            def pending() -> list[str] | None:
                nodes = [n.id for n in job.snapshot().nodes if n.state == "pending"]
                return nodes if len(nodes) == 2 else None

            joiners = until(pending, "two nodes that wait for a host", within_s=20, every_s=0.1)
            _pause.wait(QUIET_S)
            job.call("POST", "/v1/hosts?count=2")
            job.joined(results.joined, status.round, 3, joiners)
            status = job.settled(3, after=status.round)


def start(job: Ours, results: Results, *, standby: int) -> None:
    """Measure the first round, from the last member's readiness until all members have taken it."""
    until(lambda: len(job.stamps.newest()) == 3 or None, f"{job.name} to start", within_s=30)
    job.joined(results.started, 0, 3, list(job.stamps.newest()))


# --- torchrun ---


class Torchrun:
    """Agents of torchrun on this machine, with their rendezvous store in a separate process."""

    def __init__(
        self, folder: Path, name: str, hub: Hub, *, nnodes: str, mode: str = "hub"
    ) -> None:
        self.stamps = Stamps(folder / f"{name}.stamps")
        self._folder, self._name, self._hub = folder, name, hub
        self._nnodes, self._mode = nnodes, mode
        self._mark = secrets.token_hex(12)
        self._env = os.environ | {
            names.ENV_NODE_MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        (folder / "worker.py").write_text(WORKER)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._port = 0
        self._store = subprocess.Popen(
            [sys.executable, "-c", STORE], env=self._env, stdout=subprocess.PIPE
        )

    def __enter__(self) -> "Torchrun":
        assert self._store.stdout is not None
        try:
            self._port = int(self._store.stdout.readline() or 0)
        except BaseException:  # interrupted: nothing else would end it
            self.__exit__()
            raise
        if not self._port:
            self.__exit__()
            raise UnexpectedError("torchrun's store did not start")
        return self

    def __exit__(self, *_: object) -> None:
        signal_marked(self._mark, signal.SIGKILL)
        for process in (*self.agents.values(), self._store):
            process.kill()
            process.wait()
        if self._store.stdout is not None:
            self._store.stdout.close()

    def add(self, node: str, *, conf: str = "") -> None:
        """Start an agent."""
        argv = [str(BIN / "torchrun"), f"--nnodes={self._nnodes}", "--nproc-per-node=1"]
        argv += ["--max-restarts=100", "--rdzv-backend=c10d", f"--rdzv-id={self._name}"]
        argv += [f"--rdzv-endpoint=127.0.0.1:{self._port}", "--local-addr=127.0.0.1"]
        argv += [f"--rdzv-conf=is_host=0{conf}", str(self._folder / "worker.py")]
        argv += [str(self.stamps.path), str(self._hub.path), self._mode]
        with (self._folder / f"{self._name}-{node}.log").open("ab") as out:
            self.agents[node] = subprocess.Popen(
                argv,
                env=self._env | {"BENCH_NODE": node},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait(
        self, nodes: Iterable[str], after: int, what: str = "start", *, within_s: float = 60.0
    ) -> dict[str, Stamp]:
        """Wait until each of these nodes has a stamp after ``after``. Return the first ones."""
        wanted = set(nodes)

        def look() -> dict[str, Stamp] | None:
            found: dict[str, Stamp] = {}
            for stamp in self.stamps.read(what):
                if stamp.at > after and stamp.node in wanted:
                    found.setdefault(stamp.node, stamp)
            return found if set(found) == wanted else None

        return until(look, f"torchrun: {what} on {sorted(wanted)}", within_s=within_s)

    def settled(self, nodes: int, *, mode: str = "start") -> dict[str, Stamp]:
        """Wait until the newest workers of all agents form a stable world. Return them by rank."""

        def look() -> dict[str, Stamp] | None:
            newest = {n: s for n, s in self.stamps.newest(mode).items() if n in self.agents}
            there = len(newest) == nodes and all(s.size == nodes for s in newest.values())
            ranks = {s.rank for s in newest.values()}
            return newest if there and len(ranks) == nodes else None

        while True:
            first = until(look, f"torchrun: a round of {nodes}", within_s=120)
            _pause.wait(max(QUIET_S, 1.5))
            if look() == first:
                return first

    def kill_node(self, node: str, stamp: Stamp) -> int:
        """Kill an agent and its worker."""
        process = self.agents.pop(node)
        at = kill_all([process.pid, stamp.pid])
        process.wait()
        return at


def torchrun_losses(
    folder: Path, name: str, hub: Hub, results: Results, *, kills: int, node: bool
) -> None:
    """Kill workers, then a node that is not the node of rank 0."""
    with Torchrun(folder, name, hub, nnodes="2:3") as job:
        for label in ("a", "b", "c"):
            job.add(label)
        for _ in range(kills):
            current = job.settled(3)
            chosen = max(current.values(), key=lambda s: s.rank)
            at = kill_all([chosen.pid])
            took = job.wait(current, at)
            case = results.worker_killed
            case.torchrun.append(ms(max(s.at for s in took.values()), at))
            say(f"  torchrun: {case.what}: {case.torchrun[-1]:.0f} ms")
        if not node:
            return
        current = job.settled(3)
        chosen = max(current.values(), key=lambda s: s.rank)
        at = job.kill_node(chosen.node, chosen)
        took = job.wait(job.agents, at, within_s=NEVER_S)
        case = results.node_shrink
        case.torchrun.append(ms(max(s.at for s in took.values()), at))
        say(f"  torchrun: {case.what}: {case.torchrun[-1]:.0f} ms")


def torchrun_first(folder: Path, name: str, hub: Hub, results: Results) -> None:
    """Kill the node of rank 0.

    The workers use gloo here: a started worker does not imply a completed round.
    """
    case = results.first_shrink
    with Torchrun(folder, name, hub, nnodes="2:3", mode="gloo") as job:
        for label in ("a", "b", "c"):
            job.add(label)
        current = job.settled(3, mode="connected")
        chosen = min(current.values(), key=lambda s: s.rank)
        at = job.kill_node(chosen.node, chosen)
        deadline = time.monotonic() + NEVER_S
        while time.monotonic() < deadline and case.torchrun == []:
            with contextlib.suppress(UnexpectedError):
                took = job.wait(job.agents, at, "connected", within_s=1.0)
                case.torchrun.append(ms(max(s.at for s in took.values()), at))
            if all(p.poll() is not None for p in job.agents.values()):
                break
        if case.torchrun:
            return
        tries = [s for s in job.stamps.read() if s.at > at]
        first = f", first after {ms(min(s.at for s in tries), at) / 1e3:.0f} s" if tries else ""
        codes = {n: p.poll() for n, p in job.agents.items()}
        ended = {c for c in codes.values() if c is not None}
        passed = time.monotonic() - at / 1e9
        case.torchrun_note = (
            f"never within {passed:.0f} s ({len(tries)} workers started on the survivors{first}; "
            "none reached the others)" + (f"; agents exited {sorted(ended)}" if ended else "")
        )
        say(f"  torchrun: {case.what}: {case.torchrun_note}")


def torchrun_join(folder: Path, name: str, hub: Hub, results: Results) -> None:
    """Add a second node to a running job of 1:4.

    ``last_call_timeout`` is 1 s instead of 30 s.
    """
    case = results.joined
    with Torchrun(folder, name, hub, nnodes="1:4") as job:
        job.add("a", conf=",last_call_timeout=1")
        job.settled(1)
        at = time.monotonic_ns()
        job.add("b", conf=",last_call_timeout=1")
        deadline = time.monotonic() + NEVER_S
        ends: dict[str, float] = {}
        while time.monotonic() < deadline and len(ends) < 2:
            for node, process in job.agents.items():
                if process.poll() is not None:
                    ends.setdefault(node, ms(time.monotonic_ns(), at) / 1e3)
            newest = {s.node: s for s in job.stamps.read() if s.at > at and s.size == 2}
            if len(newest) == 2:
                case.torchrun.append(ms(max(s.at for s in newest.values()), at))
                return
            _pause.wait(0.05)
        words = ", ".join(
            f"{'the running agent' if n == 'a' else 'the joiner'} exits "
            f"{job.agents[n].returncode} after {t:.0f} s"
            for n, t in sorted(ends.items())
        )
        words = f"deadlock; {words} (its start included)" if ends else f"not within {NEVER_S:g} s"
        case.torchrun_note = f"one node joins one: {words}"
        say(f"  torchrun: {case.what}: {case.torchrun_note}")


# --- Tables ---


def spread(samples: Sequence[float]) -> str:
    """Return the minimum, the median and the maximum as text, in seconds if they are long."""
    if not samples:
        return "–"
    three = (min(samples), statistics.median(samples), max(samples))
    if three[1] >= 10_000:
        return " / ".join(f"{s / 1e3:.1f}" for s in three) + " s"
    return " / ".join(f"{s:.0f}" for s in three) + " ms"


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    for case in results.cases:
        theirs = spread(case.torchrun) if case.torchrun else case.torchrun_note or "–"
        if case.torchrun and len(case.torchrun) < len(case.assigned):
            theirs += f" (n={len(case.torchrun)})"
        target = "–" if case.target_ms is None else f"≤ {case.target_ms:.0f} ms"
        over = sum(s > (case.target_ms or s) for s in case.assigned)
        if over:
            target += f" ({over} of {len(case.assigned)} over)"
        yield (
            case.what,
            target,
            spread(case.assigned),
            spread(case.worker),
            theirs,
            str(len(case.assigned)),
        )


HEAD = (
    "fault",
    "target",
    "ours: next assignment",
    "ours: next worker",
    "torchrun: next worker",
    "n",
)


def show(results: Results, about: str) -> None:
    table = Table(title="Until the last survivor goes on (min / median / max)", caption=about)
    for name in HEAD:
        table.add_column(name, overflow="fold")
    for row in rows(results):
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for text in results.surprises:
        console.print(f"! {text}", markup=False)


def write_docs(results: Results, about: str, command: str) -> None:
    """Write the table into docs/benchmarks.md."""
    requests = spread([took for case in results.cases for took in case.request])
    lines = [f"`{command}`  ", f"{about}.  ", f"Requests to the cluster: {requests}.", ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(results)]
    lines += ["", *(f"- {text}" for text in results.surprises)]
    write_section("membership", "\n".join(lines))


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return (
        f"{model or platform.machine()}, {cores} cores shared with other work (figures are noisy; "
        f"load average {os.getloadavg()[0]:.1f} before), Linux {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )


# --- The run ---


def parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--runs", type=int, default=5, help="turns of ours and torchrun's (default 5)")
    p.add_argument(
        "--slow-runs",
        type=int,
        default=3,
        help="turns in which torchrun also loses a node, at 45 s each (default 3)",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    p.add_argument(
        "--quick",
        action="store_true",
        help="one turn, without torchrun's slow parts; docs/benchmarks.md is left as it is",
    )
    p.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    return p


def schedule(args: argparse.Namespace, folder: Path, hub: Hub, out: Results) -> Iterator[Part]:
    """Return the parts of the run, with DLRover and torchrun in turn."""
    runs, slow = (1, 0) if args.quick else (args.runs, args.slow_runs)
    for i in range(runs):
        say(f"turn {i + 1} of {runs}")
        yield partial(ours_with_standby, folder, f"standby-{i}", hub, out, phase_s=i / runs)
        yield partial(torchrun_losses, folder, f"torchrun-{i}", hub, out, kills=3, node=i < slow)
        yield partial(ours_shrinking, folder, f"shrink-{i}", hub, out)
    if not args.quick:
        yield partial(torchrun_first, folder, "torchrun-first", hub, out)
        yield partial(torchrun_join, folder, "torchrun-join", hub, out)


def run(args: argparse.Namespace, folder: Path, results: Results) -> None:
    hub = Hub(folder / "hub")
    try:
        for part in schedule(args, folder, hub, results):
            try:
                part()
            except UnexpectedError as error:
                results.surprise(str(error))
    finally:
        hub.close()


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    about, results = machine(), Results()
    command = f"python benchmarks/membership.py --runs {args.runs} --slow-runs {args.slow_runs}"
    # short, because of the limit on paths of unix sockets
    folder = Path(tempfile.mkdtemp(prefix="dlrover-bench-", dir="/tmp"))
    try:
        run(args, folder, results)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    about += (
        f"; {time.monotonic() - started:.0f} s in all, load average {os.getloadavg()[0]:.1f} after"
    )
    show(results, about)
    if args.json is not None:
        cases = [asdict(case) for case in results.cases]
        document = {"about": about, "command": command, "surprises": results.surprises}
        args.json.write_text(json.dumps(document | {"cases": cases}, indent=1) + "\n")
    if not args.quick:
        write_docs(results, about, command)
    if args.keep:
        say(f"logs: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
