"""Measures the scale of one master with thousands of simulated agents over the real protocol.

The master is the real program in its own process. The agents run in this process, on another core
if there is one. Each agent has its own connection and sends real reports. It verifies every
assignment that it receives (term, version, incarnation, round, world size; no rank twice). The
agents behave like `dlrover_agent` on the network, with two simplifications. An urgent report does
not use a second connection. A round is taken and running immediately. Each agent represents 8
workers.

For each number of agents and each transport, in this order:

* *join*: all are connected. From the first report until the last agent has its place in the round
  of all;
* *steady*: all report progress at the interval that the master has requested. Processor time of the
  master and of the agents, in cores;
* *one lost*: from the close of one agent's connection until the last survivor has its place in the
  next round. This includes 1 s that the master waits for a closed connection to return;
* *back*: from the first report of the lost agent as a new process until all have the larger round;
* *1 % lost*: like *one lost*, but one in a hundred agents at the same time, and then *back*;
* *adversity*: one agent is lost while 1 % of the agents (at least 5) do not read, and as many
  clients have stopped in the middle of a request's head. The time is that of all others;
* *restart*: from `kill -9` of the master until the last agent has its place from the next master,
  which takes over the journal. This includes the start of the process.

The cost per agent is the processor time of the master in a part, divided by the number of agents.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import resource
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.page import write_section
from dlrover_py.protocol import names
from tests.certificates import Certificates, issue

NPROC = 8
SOON_S = 120.0
QUIET_S = 0.5
IDLE = 0.4
"""Fraction of a core. A master that uses less for some time has completed the work of the last
part."""
CONNECTING = 256
"""Greatest number of connections that are opened at the same time, except after a restart of the
master."""
SPARE_FDS = 200
TOKEN = secrets.token_hex(16)


class UnexpectedError(Exception):
    """The run cannot continue."""


def say(text: str) -> None:
    print(f"{datetime.now().astimezone():%H:%M:%S} {text}", file=sys.stderr, flush=True)


# --- The agents ---


class Agent(asyncio.Protocol):
    """A simulated agent. The same object serves for all of its connections and processes."""

    __slots__ = (
        "_addr",
        "_boot",
        "_head",
        "_port",
        "_swarm",
        "alive",
        "buffer",
        "closing",
        "follows",
        "have",
        "incarnation",
        "index",
        "seq",
        "silent",
        "started",
        "transport",
        "tries",
    )

    def __init__(self, swarm: "Swarm", index: int) -> None:
        self._swarm, self.index = swarm, index
        self._addr = f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}"
        self._port = 29500
        path = f"/v1/nodes/n{index}/exchange"
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {swarm.token}\r\nContent-Length: "
        ).encode()
        self.transport: asyncio.Transport | None = None
        self.alive = False
        self.reset()

    def reset(self) -> None:
        """Become a new process, which has no state."""
        self._boot = secrets.token_hex(8)
        self.seq = self.follows = self.incarnation = self.tries = 0
        self.have = (0, 0)
        self.buffer = b""
        self.silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not registered as subclasses of asyncio's
        self.transport, self.buffer = cast(asyncio.Transport, transport), b""

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.alive:
            self._swarm.lost_connection(self)

    def data_received(self, data: bytes) -> None:
        if self.buffer:
            data = self.buffer + data
        head_end = data.find(b"\r\n\r\n")
        if head_end < 0:
            self.buffer = data
            return
        at = data.find(b"content-length: ", 0, head_end)
        stop = data.find(b"\r", at)
        end = head_end + 4 + int(data[at + 16 : stop])
        if len(data) < end:
            self.buffer = data
            return
        self.buffer = b""
        if len(data) > end:
            self._swarm.surprise(f"n{self.index}: more than one reply to one report")
        status, body = data[9:12], data[head_end + 4 : end]
        if status == b"200":
            self.tries = 0
            self._told(json.loads(body))
            self.report()
        elif status == b"503":
            self._swarm.refused += 1
            self._swarm.later(self, self.report)
        else:
            self._swarm.surprise(f"n{self.index}: {status.decode()} {body.decode()}")

    def report(self) -> None:
        """Send the whole report. The master holds it until there is something new."""
        if self.transport is None or self.silent:
            return
        self.seq += 1
        swarm = self._swarm
        running = ""
        if self.follows:
            step = int((time.monotonic() - swarm.began) * 10)
            running = (
                f',"follows":{self.follows},"phase":"running","pids":{PIDS},"progress":{{"step":'
                f'{step},"started_at_step":0,"first_step_after_s":0.2,"steps_per_s":10.0}}'
            )
        body = (
            f'{{"boot_id":"{self._boot}","incarnation":{self.incarnation},"seq":{self.seq},'
            f'"have_term":{self.have[0]},"have_version":{self.have[1]},"nproc":{NPROC},'
            f'"agent_pid":4242,"offer":{{"addr":"{self._addr}","port":{self._port}}},'
            f'"warm":true{running}}}'
        )
        swarm.reports += 1
        self.transport.write(b"%s%d\r\n\r\n%s" % (self._head, len(body), body.encode()))

    def _told(self, told: dict[str, Any]) -> None:
        """Check an assignment and apply it."""
        new = (told["term"], told["version"])
        if new <= self.have:
            if new < self.have:
                self._swarm.surprise(f"n{self.index}: told {new} after {self.have}")
            return
        if told["incarnation"] < max(1, self.incarnation):
            self._swarm.surprise(f"n{self.index}: incarnation {told['incarnation']}")
        self.have, self.incarnation = new, told["incarnation"]
        self._swarm.exchange_s = told["exchange_s"]
        if told["directive"] == "run":
            if told["round"] < self.follows:
                self._swarm.surprise(f"n{self.index}: round {told['round']} after {self.follows}")
            if told["round"] != self.follows:
                self._port += 1  # the offered port was for one round
            self.follows = told["round"]
            self._swarm.placed(self, told)
        elif told["directive"] == "stop":
            self._swarm.surprise(f"n{self.index}: told to stop: {told['reason']}")


PIDS = json.dumps([5000 + i for i in range(NPROC)]).replace(" ", "")


@dataclass(slots=True)
class Formed:
    """A round as the agents received it."""

    ranks: set[int] = field(default_factory=set)
    nnodes: int = 0
    endpoint: tuple[str, int] = ("", 0)


class Swarm:
    """All agents, and the events that they wait for."""

    def __init__(
        self,
        agents: int,
        port: int,
        *,
        token: str,
        tls: ssl.SSLContext | None,
        host: str = "127.0.0.1",
    ) -> None:
        self.token, self._host, self._port, self._tls = token, host, port, tls
        self.began = time.monotonic()
        self.reports = self.refused = self.reconnects = 0
        self.exchange_s = 1.0
        """Seconds between two exchanges, as the master has requested."""
        self.surprises: list[str] = []
        self.formed: dict[tuple[int, int], Formed] = {}
        self.agents = [Agent(self, index) for index in range(agents)]
        self._wanted: Callable[[dict[str, Any]], bool] | None = None
        self._awaited: set[int] = set()
        self._there: asyncio.Future[float] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def surprise(self, text: str) -> None:
        """Record something that must not happen."""
        if len(self.surprises) < 20:
            self.surprises.append(text)
            say(f"! {text}")

    @property
    def living(self) -> list[Agent]:
        return [a for a in self.agents if a.alive]

    async def connect(self, agents: Sequence[Agent]) -> None:
        """Open the connections of agents; nothing is sent yet."""
        at_once = asyncio.Semaphore(CONNECTING)

        async def one(agent: Agent) -> None:
            async with at_once:
                await self._open(agent)

        await asyncio.gather(*(one(agent) for agent in agents))
        for agent in agents:
            agent.alive = True

    async def _open(self, agent: Agent) -> None:
        name = names.MASTER_NAME if self._tls is not None else None
        await asyncio.get_running_loop().create_connection(
            lambda: agent, self._host, self._port, ssl=self._tls, server_hostname=name
        )

    def lost_connection(self, agent: Agent) -> None:
        """Reconnect with jitter, as a real agent does."""
        self.later(agent, lambda: self._again(agent))

    def later(self, agent: Agent, call: Callable[[], None]) -> None:
        """Back off as ``dlrover_agent.channels.master_client`` does."""
        agent.tries += 1
        longest = min(max(2.0, self.exchange_s / 4), 0.05 * 2 ** min(agent.tries, 8))
        asyncio.get_running_loop().call_later(random.uniform(longest / 2, longest), call)

    def _again(self, agent: Agent) -> None:
        if agent.alive and agent.transport is None:
            task = asyncio.ensure_future(self._reconnect(agent))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _reconnect(self, agent: Agent) -> None:
        self.reconnects += 1
        try:
            async with asyncio.timeout(self.exchange_s + 5.0):
                await self._open(agent)
        except (OSError, TimeoutError):
            self.lost_connection(agent)
        else:
            agent.report()

    def lose(self, agents: Sequence[Agent]) -> None:
        """End the processes of agents: the kernel closes the connections."""
        for agent in agents:
            agent.alive = False
            assert agent.transport is not None
            agent.transport.abort()

    def placed(self, agent: Agent, told: dict[str, Any]) -> None:
        """Record that an agent has received its place in a round."""
        key = (told["term"], told["round"])
        formed = self.formed.get(key)
        endpoint = (told["master_addr"], told["master_port"])
        if formed is None:
            formed = self.formed[key] = Formed(nnodes=told["nnodes"], endpoint=endpoint)
        rank = told["node_rank"]
        good = (
            rank not in formed.ranks
            and 0 <= rank < told["nnodes"] == formed.nnodes
            and told["rank_offset"] == rank * NPROC
            and told["world_size"] == formed.nnodes * NPROC
            and formed.endpoint == endpoint
        )
        if not good:
            self.surprise(f"n{agent.index}: round {key}: {told}")
        formed.ranks.add(rank)
        if self._wanted is not None and self._wanted(told):
            self._awaited.discard(agent.index)
            if not self._awaited and self._there is not None and not self._there.done():
                self._there.set_result(time.monotonic())

    def until(
        self, agents: Sequence[Agent], wanted: Callable[[dict[str, Any]], bool]
    ) -> "asyncio.Future[float]":
        """Return a future of the time when the last agent has a matching assignment."""
        self._wanted, self._awaited = wanted, {agent.index for agent in agents}
        self._there = asyncio.get_running_loop().create_future()
        return self._there

    async def wait(self, there: "asyncio.Future[float]", what: str) -> float:
        try:
            async with asyncio.timeout(SOON_S):
                return await there
        except TimeoutError as error:
            few = sorted(self._awaited)[:5]
            raise UnexpectedError(
                f"{what}: not within {SOON_S:g} s for {len(self._awaited)} agents, such as {few}"
            ) from error

    def close(self) -> None:
        for agent in self.agents:
            agent.alive = False
            if agent.transport is not None:
                agent.transport.abort()


# --- The master ---


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Master:
    """The real program, and the resources that it uses."""

    def __init__(self, folder: Path, agents: int, cores: set[int], tls: Certificates | None):
        self.port = free_port()
        self._folder, self._cores, self._tls = folder, cores, tls
        self._token = folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(TOKEN)
        self._job = json.dumps(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {"name": "scale"},
                "spec": {
                    "replicaSpecs": {
                        "worker": {
                            "replicas": agents,
                            "minReplicas": agents - max(1, agents // 100),
                            "template": {
                                "spec": {
                                    "containers": [
                                        {"name": "main", "image": "none", "command": ["true"]}
                                    ]
                                }
                            },
                        }
                    }
                },
            }
        )
        self.peaks_mb: list[float] = []
        """Greatest resident memory of each of its processes, in megabytes."""
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (folder / "master.log").open("ab")

    def start(self) -> None:
        read, write = os.pipe()
        lifeline, self._lifeline = os.pipe()  # it must not outlive this process
        argv = [sys.executable, "-m", "dlrover_py.master", "--static", self._job]
        argv += ["--listen", f"127.0.0.1:{self.port}", "--state-dir", str(self._folder / "state")]
        argv += ["--token-file", str(self._token), "--announce-fd", str(write)]
        argv += ["--lifeline-fd", str(lifeline)]
        if self._tls is not None:
            argv += ["--tls-cert", str(self._tls.cert), "--tls-key", str(self._tls.key)]
        try:
            self._process = subprocess.Popen(
                argv,
                pass_fds=[write, lifeline],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                # All agents are connected before the first report. Over TLS this takes a while.
                env=os.environ | {"DLROVER_MASTER_HEADER_S": f"{SOON_S:g}"},
                preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
            )
        finally:
            os.close(write)
            os.close(lifeline)
        with os.fdopen(read) as pipe:
            if not pipe.readline():
                self._process.wait()
                raise UnexpectedError(f"the master did not start:\n{self.log()[-2000:]}")

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._note_peak()
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._note_peak()
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def log(self) -> str:
        return (self._folder / "master.log").read_text()

    def _note_peak(self) -> None:
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        peak = next(x for x in status.splitlines() if x.startswith("VmHWM:"))
        self.peaks_mb.append(int(peak.split()[1]) / 1024)

    @property
    def cpu_s(self) -> float:
        """Processor time so far. Only one of its threads works, but the journal has another."""
        assert self._process is not None
        return cpu_of(self._process.pid)


def cpu_of(pid: int) -> float:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


# --- A run ---


@dataclass(slots=True)
class Part:
    """The measurements of one part."""

    name: str
    agents: int
    tls: bool
    took_s: float
    master_cpu_s: float
    ours_cpu_s: float
    wall_s: float
    note: str = ""

    @property
    def per_agent_us(self) -> float:
        return self.master_cpu_s / self.agents * 1e6


@dataclass(slots=True)
class Outcome:
    """The results of one number of agents over one transport."""

    agents: int
    tls: bool
    parts: list[Part] = field(default_factory=list)
    peaks_mb: list[float] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)


class Run:
    """A run with one number of agents over one transport."""

    def __init__(self, master: Master, swarm: Swarm, outcome: Outcome, steady_s: float) -> None:
        self._master, self._swarm, self._outcome = master, swarm, outcome
        self._steady_s = steady_s
        self._round = 0

    @contextlib.contextmanager
    def _part(self, name: str) -> Iterator[Part]:
        cpu, ours, began = self._master.cpu_s, time.process_time(), time.monotonic()
        outcome = self._outcome
        part = Part(name, outcome.agents, outcome.tls, 0.0, 0.0, 0.0, 0.0)
        yield part
        part.master_cpu_s = self._master.cpu_s - (cpu if name != "restart" else 0.0)
        part.ours_cpu_s = time.process_time() - ours
        part.wall_s = time.monotonic() - began
        outcome.parts.append(part)
        say(
            f"{outcome.agents} agents{', TLS' * outcome.tls}: {name}: {part.took_s:.3f} s, "
            f"master {part.per_agent_us:.0f} µs an agent {part.note}"
        )

    async def all(self) -> None:
        """Run every part in the order of the table."""
        swarm = self._swarm
        await self.join()
        await self._steady()
        await self._lose_and_return("one lost", swarm.agents[-1:])
        percent = max(1, len(swarm.agents) // 100)
        await self._lose_and_return("1 % lost", swarm.agents[1 : percent + 1])
        await self.adversity()
        await self.restart()

    async def join(self) -> None:
        """Connect all agents, then let all of them join at the same time."""
        swarm = self._swarm
        with self._part("connect") as part:
            began = time.monotonic()
            await swarm.connect(swarm.agents)
            part.took_s = time.monotonic() - began
        await self._quiet()
        await self._change("join", swarm.agents, lambda: self._report(swarm.agents))

    async def _quiet(self) -> None:
        """Wait until the master has completed its work."""
        deadline = time.monotonic() + SOON_S
        before = self._master.cpu_s
        while time.monotonic() < deadline:
            await asyncio.sleep(QUIET_S)
            before, last = self._master.cpu_s, before
            if before - last < IDLE * QUIET_S:
                return
        raise UnexpectedError(f"the master is not idle within {SOON_S:g} s")

    def _report(self, agents: Sequence[Agent]) -> None:
        for agent in agents:
            agent.report()

    async def _change(
        self, name: str, told: Sequence[Agent], cause: Callable[[], None], note: str = ""
    ) -> None:
        """Cause a new round; wait until all of these agents have their place in it."""
        swarm = self._swarm
        with self._part(name) as part:
            part.note = note
            began = time.monotonic()
            cause()
            nodes = len(swarm.living)
            there = swarm.until(told, lambda a: bool(a["nnodes"] == nodes))
            part.took_s = await swarm.wait(there, name) - began
            # The agents' answers are a part of the cost.
            await self._quiet()

    async def _lose_and_return(self, name: str, lost: Sequence[Agent]) -> None:
        swarm = self._swarm
        survivors = [a for a in swarm.agents if a not in set(lost)]
        await self._change(name, survivors, lambda: swarm.lose(lost))
        for agent in lost:
            agent.reset()
        await swarm.connect(lost)
        await self._change(f"{name}: back", swarm.agents, lambda: self._report(lost))

    async def _steady(self) -> None:
        swarm = self._swarm
        with self._part("steady") as part:
            before = swarm.reports
            await asyncio.sleep(self._steady_s)
            part.took_s = self._steady_s
            part.note = f"{(swarm.reports - before) / self._steady_s:.0f} reports a second"

    async def adversity(self) -> None:
        """Lose an agent while some agents do not read and some clients stop within a request."""
        swarm = self._swarm
        few = max(5, len(swarm.agents) // 100)
        lost = swarm.agents[-1:]
        deaf = swarm.agents[-few - 1 : -1]
        others = swarm.agents[: -few - 1]
        for agent in deaf:
            assert agent.transport is not None
            agent.transport.pause_reading()
        stalled = [socket.create_connection(("127.0.0.1", self._master.port)) for _ in range(few)]
        for sock in stalled:
            sock.sendall(b"POST /v1/nodes/n0/exchange HTTP/1.1\r\nAuthor")
        note = f"{few} do not read, {few} stopped in a head"
        await self._change("adversity", others, lambda: swarm.lose(lost), note)
        nodes = len(swarm.living)
        there = swarm.until(deaf, lambda a: bool(a["nnodes"] == nodes))
        for agent in deaf:
            assert agent.transport is not None
            agent.transport.resume_reading()
        await swarm.wait(there, "those that did not read")
        for sock in stalled:
            sock.close()
        for agent in lost:
            agent.reset()
        await swarm.connect(lost)
        await self._change("adversity: back", swarm.agents, lambda: self._report(lost))

    async def restart(self) -> None:
        """Kill the master, and let another one take over. The round stays the same."""
        swarm, master = self._swarm, self._master
        nodes = len(swarm.agents)
        with self._part("restart") as part:
            term = max(agent.have[0] for agent in swarm.agents)
            number = max(agent.follows for agent in swarm.agents)
            began = time.monotonic()
            there = swarm.until(
                swarm.agents,
                lambda a: bool(a["term"] > term and (a["nnodes"], a["round"]) == (nodes, number)),
            )
            before = swarm.reconnects
            master.kill()
            await asyncio.to_thread(master.start)
            started = time.monotonic() - began
            part.took_s = await swarm.wait(there, "restart") - began
            part.note = (
                f"listens after {started:.1f} s; {swarm.reconnects - before} attempts to connect"
            )
            await self._quiet()
        if (found := max(agent.follows for agent in swarm.agents)) != number:
            swarm.surprise(f"the restart made round {found} of {number}")


async def measure(
    agents: int, folder: Path, cores: set[int], tls: Certificates | None, steady_s: float
) -> Outcome:
    outcome = Outcome(agents, tls is not None)
    context = None
    if tls is not None:
        context = ssl.create_default_context(cafile=str(tls.authority))
    master = Master(folder, agents, cores, tls)
    swarm = Swarm(agents, master.port, token=TOKEN, tls=context)
    try:
        master.start()
        await Run(master, swarm, outcome, steady_s).all()
    except UnexpectedError as error:
        swarm.surprise(str(error))
    finally:
        swarm.close()
        await asyncio.sleep(0)
        master.stop()
    outcome.peaks_mb, outcome.surprises = master.peaks_mb, swarm.surprises
    errors = [x for x in master.log().splitlines() if "Traceback" in x or '"ERROR"' in x]
    outcome.surprises += errors[:5]
    return outcome


# --- Output ---


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    model = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
    return (
        f"{model or platform.machine()}, {cores} cores shared with other work (figures are noisy; "
        f"load average {os.getloadavg()[0]:.1f} before), Linux {platform.release()}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}"
    )


def show(outcomes: Sequence[Outcome], about: str) -> None:
    console = Console(width=118)
    for outcome in outcomes:
        title = f"{outcome.agents} agents, {'TLS' if outcome.tls else 'plain'}"
        peaks = " and ".join(f"{peak:.0f}" for peak in outcome.peaks_mb)
        table = Table(title=f"{title}; peak of the master, and of the next one: {peaks} MB")
        for column in ("part", "time", "master: µs an agent", "master: cores", "agents: cores", ""):
            table.add_column(column, justify="left" if column in ("part", "") else "right")
        for part in outcome.parts:
            table.add_row(
                part.name,
                f"{part.took_s:.2f} s",
                f"{part.per_agent_us:.0f}",
                f"{part.master_cpu_s / part.wall_s:.2f}",
                f"{part.ours_cpu_s / part.wall_s:.2f}",
                part.note,
            )
        console.print(table)
    console.print(about)


def in_words(outcomes: Sequence[Outcome], about: str, command: str) -> str:
    """Return the figures as a table for docs/benchmarks.md."""
    heads = [f"{o.agents:,}{', TLS' * o.tls}" for o in outcomes]
    rows = [["part, agents", *heads], ["---"] * (len(heads) + 1)]
    found = [{part.name: part for part in o.parts} for o in outcomes]

    def row(name: str, figure: Callable[[Outcome, dict[str, Part]], str]) -> None:
        figures = []
        for outcome, parts in zip(outcomes, found, strict=True):
            try:
                figures.append(figure(outcome, parts))
            except KeyError:
                figures.append("–")
        rows.append([name, *figures])

    for name in [part.name for part in outcomes[0].parts if part.name != "steady"]:
        row(f"{name}: s", lambda _, parts, name=name: f"{parts[name].took_s:.2f}")  # type: ignore[misc]
    for name in ("join", "one lost", "1 % lost"):
        row(
            f"{name}: master's µs for each agent",
            lambda _, parts, name=name: f"{parts[name].per_agent_us:.0f}",  # type: ignore[misc]
        )
    for whose in ("master", "ours"):
        row(
            f"steady: cores, {'agents' if whose == 'ours' else whose}",
            lambda _, parts, whose=whose: (  # type: ignore[misc]
                f"{getattr(parts['steady'], f'{whose}_cpu_s') / parts['steady'].wall_s:.2f}"
            ),
        )
    row("steady: reports a second", lambda _, parts: parts["steady"].note.split()[0])
    for which, words in enumerate(("", ", after the restart")):
        row(
            f"master's largest memory{words}: MB",
            lambda outcome, _, which=which: (  # type: ignore[misc]
                f"{outcome.peaks_mb[which]:.0f}" if len(outcome.peaks_mb) > which else "–"
            ),
        )
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    surprises = "".join(f"* {text}\n" for o in outcomes for text in o.surprises)
    return f"`{command}`  \n{about}.\n\n{table}\n{surprises and chr(10) + surprises}"


def open_files(agents: int) -> None:
    """Raise the limit on file descriptors as far as needed.

    Raises:
        UnexpectedError: the limit is too low, and this process cannot raise it far enough.
    """
    need = agents + SPARE_FDS + agents // 50
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UnexpectedError(
            f"{agents} agents take {need} open files in this process and in the master's each, and "
            f"the hard limit is {hard}: raise it (ulimit -Hn {need} as root, or LimitNOFILE=), or "
            f"ask for at most {max(1, int((hard - SPARE_FDS) / 1.02))} agents"
        )
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--agents",
        type=int,
        nargs="+",
        action="extend",
        metavar="N",
        help="how many agents, one number or several (default 100 1000)",
    )
    p.add_argument("--tls", action="store_true", help="over TLS as well, after plain")
    p.add_argument("--steady", type=float, default=20.0, metavar="S", help="seconds (default 20)")
    p.add_argument("--json", action="store_true", help="print all figures as JSON instead")
    p.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    p.add_argument("--keep", action="store_true", help="keep the folder with the masters' logs")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    numbers = args.agents or [100, 1000]
    if min(numbers) < 20:
        parser().error(f"--agents: found {min(numbers)}, expected at least 20")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    about = machine()
    folder = Path(tempfile.mkdtemp(prefix="dlrover-scale-"))
    cores = sorted(os.sched_getaffinity(0))
    outcomes: list[Outcome] = []
    try:
        open_files(max(numbers))
        if len(cores) > 1:
            os.sched_setaffinity(0, set(cores[1:]))
        for agents in numbers:
            for tls in (False, True) if args.tls else (False,):
                place = folder / f"{agents}-{'tls' if tls else 'plain'}"
                place.mkdir()
                certificates = issue(place) if tls else None
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    outcomes.append(
                        runner.run(measure(agents, place, {cores[0]}, certificates, args.steady))
                    )
    except UnexpectedError as error:
        sys.stderr.write(f"scale: {error}\n")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        if args.keep:
            say(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if args.write:
        command = f"python benchmarks/scale.py --agents {' '.join(map(str, numbers))}"
        write_section("scale", in_words(outcomes, about, command + " --tls" * args.tls))
    if args.json:
        print(json.dumps({"about": about, "outcomes": [asdict(o) for o in outcomes]}, indent=1))
    else:
        show(outcomes, about)
    return 1 if any(o.surprises for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
