"""Runs a real job on this machine for a test: real master, agents and workers, no sleeps.

Everything that a job starts carries a mark of the test in its environment, so that a test fails
if it leaves a process behind.
"""

import asyncio
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
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dlrover_py.protocol.agents import Directive  # noqa: F401 - re-exported for tests
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobStatus, NodePhase, NodeStatus
from dlrover_py.rpc import Client

MARK = "DLROVER_TEST_MARK"
BIN = Path(sys.executable).parent
T = TypeVar("T")

CALM = {"lease_s": "30"}
"""For tests that are not about silence: a busy machine may hold an agent for longer than the
product's lease of five seconds."""

SLEEPER = """
    import os, signal, sys
    print("start", os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
    signal.pause()
"""


def eventually(look: Callable[[], T], what: str, *, within_s: float = 60.0) -> T:
    """Look until there is something (truthy); fail with the last thing seen after a deadline."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {seen!r}")
        pause.wait(0.02)


def free_port() -> int:
    """A port of the loopback device that nobody had a moment ago, and which none is given who asks
    the kernel for any (``ip_local_port_range`` begins at 32768)."""
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", random.randrange(15000, 32000))) as s,
        ):
            return int(s.getsockname()[1])


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


def carrying(mark: str) -> dict[int, str]:
    """Living processes with the test's mark: pid and command line."""
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
    """Folders and environment of one test."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: unix sockets
        self.env = os.environ | {
            MARK: self.mark,
            "DLROVER_RUNTIME_DIR": str(self.folder / "run"),
            "DLROVER_STATE_DIR": str(self.folder / "state"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "KUBECONFIG": str(self.folder / "no-kubeconfig"),
        }

    def script(self, text: str, name: str = "train.py") -> Path:
        """Write a script for the workers."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def popen(self, *argv: str, **options: Any) -> "subprocess.Popen[str]":
        """Start one of our programs."""
        env = self.env | options.pop("env", {})
        return subprocess.Popen(
            [str(BIN / argv[0]), *argv[1:]], env=env, text=True, cwd=self.folder, **options
        )

    def call(self, *argv: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run one of our programs to its end."""
        env = self.env | options.pop("env", {})
        return subprocess.run(
            [str(BIN / argv[0]), *argv[1:]],
            env=env,
            text=True,
            cwd=self.folder,
            capture_output=True,
            timeout=options.pop("timeout", 150),
            check=False,
        )

    def close(self) -> None:
        """Fail if a process is left; clean up in any case."""
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
        """Call the cluster."""
        client = Client(f"unix:{self.socket}")

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
        """Wait for a status that fits."""

        def look() -> JobStatus | None:
            assert self.process.poll() is None, f"the job has ended: {''.join(self.output)}"
            status = self.snapshot().status
            return status if status is not None and good(status) else None

        try:
            return eventually(look, what, within_s=within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{''.join(self.output)}") from error

    def running(self, nodes: int, *, round_after: int = 0, within_s: float = 120.0) -> JobStatus:
        """Wait until a round of so many nodes runs, newer than a given one, with all its workers
        started."""

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
        """What the master tells everybody."""
        client = Client(self.snapshot().health_addr)

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
        """End the job as a user would."""
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
    """Step of the newest checkpoint, and where it is."""
    found = status.last_checkpoint
    return None if found is None else (found.step, found.where)


def members(status: JobStatus) -> list[NodeStatus]:
    """The nodes of the round, in the order of their ranks."""
    found = [n for n in status.nodes if n.node_rank is not None]
    return sorted(found, key=lambda n: n.node_rank or 0)


def document(
    command: list[str],
    *,
    name: str = "job",
    env: dict[str, str] | None = None,
    spec: dict[str, Any] | None = None,
    **worker: Any,
) -> dict[str, Any]:
    """An ElasticJob; ``spec`` are further fields of its spec, others of the worker's replicas."""
    container: dict[str, Any] = {"name": "main", "image": "none", "command": command}
    if env:
        container["env"] = [{"name": k, "value": v} for k, v in env.items()]
    # Nothing is killed in the middle of its last save because the machine is busy.
    pod = {"containers": [container], "terminationGracePeriodSeconds": 150}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {
            **(spec or {}),
            "distributionStrategy": "AllreduceStrategy",
            "replicaSpecs": {"worker": {**worker, "template": {"spec": pod}}},
        },
    }


@contextmanager
def job(
    place: Place,
    *,
    script: str = SLEEPER,
    hosts: int | None = None,
    flags: tuple[str, ...] = (),
    args: tuple[str, ...] = (),
    name: str = "job",
    settings: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    spec: dict[str, Any] | None = None,
    **worker: Any,
) -> Iterator[Job]:
    """Run a job; it is stopped in the end.

    Args:
        script: of the workers.
        hosts: ``--nodes``.
        flags: of elastic-run; ``args``: of the script.
        settings: of the master, without their prefix.
        env: of the container.
        spec: further fields of the job's spec.
        worker: fields of the replica spec.
    """
    place.script(script)
    command = ["elastic-run", *flags, "train.py", *args]
    file = place.folder / "job.yaml"
    file.write_text(yaml.safe_dump(document(command, name=name, env=env, spec=spec, **worker)))
    argv = ["dlrover", "job", "run", "job.yaml", "--json"]
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
    """Lines of a node's workers that match; none that is only half written."""
    found = []
    for path in sorted(job.logs.glob(f"{node}/*/*/*/stdout.log")):
        whole = path.read_text().rpartition("\n")[0]
        found += [line for line in whole.splitlines() if re.search(pattern, line)]
    return found
