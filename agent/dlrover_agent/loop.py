"""The agent's only writer: events in, the core decides, effects out."""

import asyncio
import collections
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from dlrover_agent import guardian
from dlrover_agent.core import (
    Assigned,
    Core,
    Effect,
    Event,
    Exit,
    Kill,
    Refused,
    Renew,
    Report,
    Signalled,
    Start,
    Stepped,
    Stop,
)
from dlrover_agent.guardian import children
from dlrover_agent.local import Local
from dlrover_agent.master import Line
from dlrover_agent.settings import Settings
from dlrover_agent.workers import Command, Workers, reap_orphans
from dlrover_py.protocol.agents import AgentReport, Assignment, Offer
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.workers import News
from dlrover_py.rpc import Client
from dlrover_py.telemetry import bind

log = logging.getLogger("agent")

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LAST_REPORT_S = 1.0


class Reserved:
    """A port that nobody else gets, for rank 0 to listen on.

    Bound but not listening, with SO_REUSEADDR: the kernel hands it to no one, and the store of
    worker 0, which sets SO_REUSEADDR too, can still bind it. So it is held through its round.
    """

    def __init__(self, addr: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.offer = Offer(addr=addr, port=self._socket.getsockname()[1])

    def close(self) -> None:
        """Let the port go."""
        self._socket.close()


class Guardian:
    """Our side of the process that cleans up if this one is killed."""

    def __init__(self, lifeline_fd: int | None, scratch: Path) -> None:
        read, self._pipe = os.pipe()
        lifeline = -1 if lifeline_fd is None else lifeline_fd
        keep = [read] if lifeline < 0 else [read, lifeline]
        script = [sys.executable, "-I", "-S", guardian.__file__]
        self._process = subprocess.Popen(
            [*script, str(read), str(lifeline), str(os.getpid()), str(scratch)],
            pass_fds=keep,
            env={},  # it does not carry the node's mark: a frozen node must not freeze it
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """It was killed: it does not end by itself as long as we live."""
        return self._process.poll() is not None

    def tell(self, line: str) -> None:
        """``+SESSION`` or ``-SESSION``."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, f"{line}\n".encode())

    def dismiss(self) -> None:
        """Nothing is left for it to do: it ends at once."""
        os.close(self._pipe)
        self._process.wait()


class Agent:
    """One node of a job, from its first report to its exit code."""

    def __init__(
        self,
        settings: Settings,
        command: Command,
        *,
        token: str,
        max_restarts: int | None,
        kin: set[int],
    ) -> None:
        self._settings = settings
        self._kin = kin
        self._max_restarts = max_restarts
        self._core = Core(nproc=command.nproc)
        self._events: collections.deque[Event] = collections.deque()
        self._handling = False
        self._boot_id = secrets.token_hex(8)
        self._seq = 0
        self._taken_up_at = 0.0
        self._coming = Reserved(settings.advertise)
        self._current: Reserved | None = None
        self._result: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._scratch = Path(tempfile.mkdtemp(prefix=f"dlrover-{os.getpid()}-", dir="/tmp"))
        self._guardian = Guardian(settings.lifeline_fd, self._scratch)
        self._kin.add(self._guardian.pid)
        self._local = Local(self._scratch / "sdk.sock", self._heard)
        self._workers = Workers(
            command,
            self.post,
            guard=lambda line: self._guardian.tell(line),
            kin=self._kin,
            last_step=self._local.last_step,
            sdk_socket=self._scratch / "sdk.sock",
            scratch=self._scratch,
            node_id=settings.node_id,
            run_id=settings.job_name or "none",
        )
        self._line = Line(
            Client(settings.master_addr, token=token),
            settings.node_id,
            self._report,
            lambda a: self.post(Assigned(a)),
            lambda message: self.post(Refused(message)),
            connect_s=settings.connect_s,
        )

    async def run(self) -> Exit:
        """Work until the job, the platform or a signal ends it.

        Raises:
            DLRoverError: the master could not be reached, or refused the token, at the start.
        """
        loop = asyncio.get_running_loop()
        for number in HANDLED:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
                loop.add_signal_handler(number, self._signalled, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        loop.add_signal_handler(signal.SIGCHLD, self._child_ended)
        if self._settings.lifeline_fd is not None:
            loop.add_reader(self._settings.lifeline_fd, self._lifeline)
        exchange = asyncio.create_task(self._line.run())
        try:
            both: set[asyncio.Future[Any]] = {exchange, self._result}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not self._result.done():
                exchange.result()  # it was never answered; or refused, and the workers are killed
            outcome = await self._result
            if self._core.leaving and outcome.code != ExitCode.SUPERSEDED:
                await self._line.last_report(LAST_REPORT_S)
            return outcome
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # nothing must stop the cleaning up
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)
            self._close()

    def post(self, event: Event) -> None:
        """Take in an event; they are handled one after the other, in order."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                now = asyncio.get_running_loop().time()
                for effect in self._core.handle(self._events.popleft(), now):
                    self._perform(effect)
        finally:
            self._handling = False

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Start(assignment):
                self._start(assignment)
            case Renew():
                self._taken_up_at = asyncio.get_running_loop().time()
                if self._current is not None:
                    self._current.close()
                self._current, self._coming = self._coming, Reserved(self._settings.advertise)
            case Stop(why, grace_s, polite, number):
                log.info("workers_stop", extra={"why": why, "grace_s": grace_s})
                spare = self._local.asking if polite else set()
                if spare:
                    self._local.order_stop(why)
                self._workers.stop(grace_s, number, spare=spare)
            case Kill():
                self._workers.kill()
            case Report():
                self._line.urge()
            case Exit(_, message):
                log.info("agent_ends", extra={"why": message})
                if not self._result.done():
                    self._result.set_result(effect)

    def _start(self, assignment: Assignment) -> None:
        bind(incarnation=assignment.incarnation, round=assignment.round)
        log.info(
            "workers_start",
            extra={
                "node_rank": assignment.node_rank,
                "world_size": assignment.world_size,
                "master": f"{assignment.master_addr}:{assignment.master_port}",
                "why": assignment.reason,
                "waited_s": round(asyncio.get_running_loop().time() - self._taken_up_at, 4),
            },
        )
        self._local.new_round(assignment.round)
        self._workers.start(assignment)

    def _report(self) -> AgentReport:
        core = self._core
        self._seq += 1
        return AgentReport(
            boot_id=self._boot_id,
            incarnation=core.incarnation,
            seq=self._seq,
            have_term=core.have[0],
            have_version=core.have[1],
            follows=core.follows,
            phase=core.phase,
            nproc=core.nproc,
            pids=self._workers.pids,
            agent_pid=os.getpid(),
            offer=self._coming.offer,
            max_restarts=self._max_restarts,
            failure=core.failure,
            progress=core.progress,
            leaving=core.leaving,
        )

    def _heard(self, news: News) -> None:
        if news.step is not None:
            self.post(Stepped(news.round, news.local_rank, news.step, news.total, news.metrics))

    def _signalled(self, number: int) -> None:
        self.post(Signalled(signal.Signals(number).name, number))

    def _lifeline(self) -> None:
        assert self._settings.lifeline_fd is not None
        if not os.read(self._settings.lifeline_fd, 64):
            asyncio.get_running_loop().remove_reader(self._settings.lifeline_fd)
            self.post(Signalled("the end of its platform", signal.SIGTERM))

    def _child_ended(self) -> None:
        if self._guardian.ended:  # somebody killed it: the next one takes its place
            log.warning("guardian_ended", extra={"then": "another one is started"})
            self._guardian.dismiss()
            self._guardian = Guardian(self._settings.lifeline_fd, self._scratch)
            for pid in filter(None, self._workers.pids):
                self._guardian.tell(f"+{pid}")
        self._kin.add(self._guardian.pid)
        reap_orphans(self._kin | set(self._workers.pids))

    def _close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        self._local.close()
        self._workers.close()
        self._coming.close()
        if self._current is not None:
            self._current.close()
        self._guardian.dismiss()


async def work(
    settings: Settings,
    command: Command,
    *,
    token: str,
    max_restarts: int | None,
    beside: "Callable[[set[int]], Coroutine[Any, Any, None]] | None" = None,
) -> Exit:
    """Run one agent.

    Args:
        settings, command, token, max_restarts: of the agent.
        beside: what has to live as long as it does; it takes the set of our child processes that
            are no workers, and adds its own. Its failure is ours.
    """
    kin = set(children(os.getpid()))  # of a shell that has become us, say
    agent = Agent(settings, command, token=token, max_restarts=max_restarts, kin=kin)
    run = asyncio.create_task(agent.run())
    tasks: list[asyncio.Task[Any]] = [run]
    if beside is not None:
        tasks.append(asyncio.create_task(beside(kin)))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return await run
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
