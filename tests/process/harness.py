"""A harness that runs a real job on this machine: real master, agents and workers, no sleeps.

Each process of a job has a random mark of its test in its environment. A test fails if it leaves a
process behind.
"""

import asyncio
import ctypes
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol.agents import Directive  # noqa: F401 - re-exported for tests
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobStatus, NodePhase, NodeStatus
from tests.programs import LATE_TORCH, source

MARK = "DLROVER_TEST_MARK"
BIN = Path(sys.executable).parent
T = TypeVar("T")

CALM = {"lease_s": "30"}
"""Settings of a master for tests that do not test the lease.

On a busy machine an agent may be delayed by more than the default lease of five seconds.
"""

SLEEPER = """
    import os, signal, sys
    print("start", os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
    signal.pause()
"""


def eventually(
    look: Callable[[], T | Literal[False] | None], what: str, *, within_s: float = 60.0
) -> T:
    """Call a function until its result is true, and return the result.

    The pauses between calls grow from 20 to 100 ms: many a call asks the job for its status, and
    what takes long is most often Python that imports torch on the same processors.

    Args:
        look: the function.
        what: what the test waits for, for the error message.
        within_s: seconds after which the test fails, with the last result in the message.
    """
    deadline = time.monotonic() + within_s
    pause, pause_s = threading.Event(), 0.02
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {seen!r}")
        pause.wait(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)


def free_port() -> int:
    """Return a port of the loopback device that was free a moment ago.

    The kernel does not give it to a program that asks for any port, because
    ``ip_local_port_range`` begins at 32768.
    """
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(15000, 32000))) as s,
        ):
            return int(s.getsockname()[1])


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def carrying(mark: str) -> dict[int, str]:
    """Return the running processes that have a test's mark: process id and command line."""
    needle = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0") and alive(int(entry.name)):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    return found


class Place:
    """The folders and the environment of one test.

    Args:
        whole_torch: whether workers import torch's compiler with the first optimizer, needed or
            not (scripts/late_torch.py).
        kept: folder for what earlier tests have left. A script that they have run too starts from
            its recipe. None for a test that starts as the first one.
    """

    def __init__(self, *, whole_torch: bool = False, kept: Path | None = None) -> None:
        self.mark = secrets.token_hex(8)
        if kept is None:
            self.folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: unix sockets
        else:
            self.folder = kept / "t"  # a recipe is of a working directory, too
            self.folder.mkdir()
        self.env = os.environ | {
            MARK: self.mark,
            "DLROVER_RUNTIME_DIR": str(self.folder / "run"),
            "DLROVER_STATE_DIR": str(self.folder / "state"),
            "DLROVER_CACHE_DIR": "none" if kept is None else str(kept / "cache"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "KUBECONFIG": str(self.folder / "no-kubeconfig"),
            **({} if whole_torch else LATE_TORCH),
        }

    def script(self, program: Path | str, name: str = "train.py") -> Path:
        """Write a script for the workers, a copy of a program or a text, and return its path."""
        path = self.folder / name
        path.write_text(source(program))
        return path

    def popen(self, *argv: str, **options: Any) -> "subprocess.Popen[str]":
        """Start one of DLRover's programs."""
        env = self.env | options.pop("env", {})
        return subprocess.Popen(
            [str(BIN / argv[0]), *argv[1:]], env=env, text=True, cwd=self.folder, **options
        )

    def call(self, *argv: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run one of DLRover's programs to its end."""
        env = self.env | options.pop("env", {})
        return subprocess.run(
            [str(BIN / argv[0]), *argv[1:]],
            env=env,
            text=True,
            cwd=options.pop("cwd", self.folder),
            capture_output=True,
            timeout=options.pop("timeout", 150),
            check=False,
        )

    def close(self) -> None:
        """Clean up, and fail if a process or a socket was left behind."""
        deadline = time.monotonic() + 30
        pause = threading.Event()
        while (left := carrying(self.mark)) and time.monotonic() < deadline:
            pause.wait(0.02)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        sockets = [str(p) for p in self.folder.rglob("*") if p.is_socket()]
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"processes were left behind: {left}"
        assert not sockets, f"sockets were left behind: {sockets}"


class Halt:
    """Stops threads of a process with ptrace(2).

    SIGCONT does not continue these threads, unlike those that SIGSTOP has stopped. Agents send
    SIGCONT to their persisters from time to time.
    """

    def __init__(self, pid: int, *, first: bool = True) -> None:
        """Stop all threads, or all but the first one, which runs the program's event loop."""
        self._tasks = Path(f"/proc/{pid}/task")
        self._held: set[int] = set()
        spared = set() if first else {pid}
        while fresh := {int(task.name) for task in self._tasks.iterdir()} - self._held - spared:
            for thread in fresh:
                with suppress(ProcessLookupError):  # this thread has just ended
                    self._hold(thread)
                    # A thread that computes may hold Python's interpreter lock.
                    while not first and self._computes(thread):
                        self._let_go(thread)
                        self._hold(thread)

    def resume(self) -> None:
        """Continue the threads and detach from them."""
        for thread in list(self._held):
            self._let_go(thread)

    def _hold(self, thread: int) -> None:
        _ptrace(_SEIZE, thread)
        self._held.add(thread)
        _ptrace(_INTERRUPT, thread)
        os.waitpid(thread, _WALL)

    def _computes(self, thread: int) -> bool:
        """Return whether a thread is stopped outside of system calls."""
        call = (self._tasks / str(thread) / "syscall").read_text()
        return call.startswith(("-1", "running"))

    def _let_go(self, thread: int) -> None:
        self._held.discard(thread)
        with suppress(ProcessLookupError):  # it was killed
            _ptrace(_DETACH, thread)
            return
        with suppress(ChildProcessError):
            os.waitpid(thread, _WALL)


_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Job:
    """A job that runs through ``dlrover job run``."""

    def __init__(self, place: Place, name: str, process: "subprocess.Popen[str]") -> None:
        self.place, self.name, self.process = place, name, process
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)

    @property
    def socket(self) -> Path:
        return self.place.folder / "run" / self.name / "cluster.sock"

    def api(self, method: str, path: str, body: bytes = b"") -> Any:
        """Make a request to the job's cluster process, and return the answer."""
        client = HttpClient(f"unix:{self.socket}")

        async def call() -> bytes:
            try:
                return await client.call(method, path, body, deadline_s=60)
            finally:
                client.close()

        return json.loads(asyncio.run(call()))

    def snapshot(self) -> Snapshot:
        return Snapshot.model_validate(self.api("GET", "/v1/job"))

    def status(self) -> JobStatus:
        status = self.snapshot().status
        assert status is not None
        return status

    def until(
        self, good: Callable[[JobStatus], Any], what: str, *, within_s: float = 120.0
    ) -> JobStatus:
        """Wait for a status for which ``good`` is true, and return it."""

        def look() -> JobStatus | None:
            assert self.process.poll() is None, f"the job has ended: {''.join(self.output)}"
            status = self.snapshot().status
            return status if status is not None and good(status) else None

        try:
            return eventually(look, what, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{''.join(self.output)}") from error

    def running(self, nodes: int, *, round_after: int = 0, within_s: float = 120.0) -> JobStatus:
        """Wait until a round of this many nodes runs, with all its workers started.

        Args:
            nodes: number of nodes of the round.
            round_after: the round must be newer than this one.
            within_s: seconds after which the test fails.
        """

        def good(s: JobStatus) -> bool:
            members = [n for n in s.nodes if n.node_rank is not None and n.phase is NodePhase.LIVE]
            return (
                s.phase == "Running"
                and s.round > round_after
                and s.nodes_in_round == nodes == len(members)
                and all(
                    len(n.pids) == n.nproc and all(n.pids) and n.workers == "running"
                    for n in members
                )
            )

        return self.until(good, f"a round of {nodes} nodes after {round_after}", within_s=within_s)

    def metric(self, name: str) -> float:
        """Return the value of a metric of the master."""
        client = HttpClient(self.snapshot().health_addr)

        async def read() -> bytes:
            try:
                return await client.call("GET", "/metrics", deadline_s=60)
            finally:
                client.close()

        found = re.search(rf"^{name} (\S+)$", asyncio.run(read()).decode(), re.MULTILINE)
        assert found, f"there is no {name}"
        return float(found[1])

    def hurt(self, node: str, verb: str) -> None:
        self.api("POST", f"/v1/nodes/{node}/{verb}")

    def cli(self, *argv: str) -> str:
        """Run ``dlrover`` against this job; it must succeed."""
        done = self.place.call("dlrover", *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def wait(self, *, within_s: float = 120.0) -> int:
        """Wait for the end of the command; return its exit code."""
        code = self.process.wait(timeout=within_s)
        self._reader.join(timeout=10)
        return code

    def stop(self) -> int:
        """End the job as a user does: by SIGINT."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.wait(within_s=170)

    def event_reasons(self) -> list[str]:
        return [e.reason for e in self.status().events]

    @property
    def logs(self) -> Path:
        (folder,) = (self.place.folder / "state").glob(f"{self.name}@*")
        return folder / "logs"


def last(status: JobStatus) -> tuple[int, str] | None:
    """Return the step of the newest checkpoint and where it is."""
    found = status.last_checkpoint
    return None if found is None else (found.step, found.where)


def members(status: JobStatus) -> list[NodeStatus]:
    """Return the nodes of the round, in the order of their ranks."""
    found = [n for n in status.nodes if n.node_rank is not None]
    return sorted(found, key=lambda n: n.node_rank or 0)


def document(
    command: list[str],
    *,
    name: str = "job",
    env: dict[str, str] | None = None,
    spec: dict[str, Any] | None = None,
    ps: dict[str, Any] | None = None,
    **worker: Any,
) -> dict[str, Any]:
    """Return an ElasticJob as plain data.

    Args:
        command: command of the workers' container.
        name: name of the job.
        env: environment of the container.
        spec: more fields of the job's spec.
        ps: fields of the servers' replica spec; None for no servers.
        worker: fields of the worker's replica spec.
    """
    container: dict[str, Any] = {"name": "main", "image": "none", "command": command}
    if env:
        container["env"] = [{"name": k, "value": v} for k, v in env.items()]
    # On a busy machine, no worker is killed in the middle of its last save.
    pod = {"containers": [container], "terminationGracePeriodSeconds": 150}
    roles = {"worker": {**worker, "template": {"spec": pod}}}
    if ps is not None:
        server = {"name": "main", "image": "none", "command": ["dlrover", "ps", "server"]}
        roles["ps"] = {**ps, "template": {"spec": {"containers": [server]}}}
    strategy = "AllreduceStrategy" if ps is None else "ParameterServerStrategy"
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {**(spec or {}), "distributionStrategy": strategy, "replicaSpecs": roles},
    }


@contextmanager
def job(
    place: Place,
    *,
    script: Path | str = SLEEPER,
    hosts: int | None = None,
    shell: str = "",
    flags: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    args: tuple[str, ...] = (),
    name: str = "job",
    settings: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    spec: dict[str, Any] | None = None,
    ps: dict[str, Any] | None = None,
    **worker: Any,
) -> Iterator[Job]:
    """Run a job, and stop it at the end of the block.

    Args:
        place: folders and environment of the test.
        script: program of the workers.
        hosts: value of ``--nodes``; None for the default.
        shell: what a shell of each node runs before elastic-run; empty for no shell.
        flags: flags of elastic-run.
        more: more flags of ``dlrover job run``.
        args: arguments of the script.
        name: name of the job.
        settings: settings of the master, without their prefix.
        env: environment of the container.
        spec: more fields of the job's spec.
        ps: fields of the servers' replica spec; None for no servers.
        worker: fields of the replica spec.
    """
    place.script(script)
    command = ["elastic-run", *flags, "train.py", *args]
    if shell:
        command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
    file = place.folder / "job.yaml"
    file.write_text(
        yaml.safe_dump(document(command, name=name, env=env, spec=spec, ps=ps, **worker))
    )
    argv = ["dlrover", "job", "run", "job.yaml", "--json", *more]
    if hosts is not None:
        argv += ["--nodes", str(hosts)]
    process = place.popen(
        *argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={f"DLROVER_MASTER_{k.upper()}": v for k, v in (settings or {}).items()},
    )
    running = Job(place, name, process)
    try:
        eventually(
            lambda: running.socket.exists() or process.poll() is not None, "the job's socket"
        )
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=170)
            except subprocess.TimeoutExpired:
                process.kill()
        running.wait()
        if process.stdout is not None:
            process.stdout.close()


def lines(job: Job, node: str, pattern: str) -> list[str]:
    """Return the complete lines of a node's workers that match a pattern."""
    found = []
    for path in sorted(job.logs.glob(f"{node}/*/*/*/stdout.log")):
        whole = path.read_text().rpartition("\n")[0]
        found += [line for line in whole.splitlines() if re.search(pattern, line)]
    return found
