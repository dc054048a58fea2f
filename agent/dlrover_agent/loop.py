"""The agent's only writer: events in, the core decides, effects out."""

import asyncio
import collections
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dlrover_agent import guardian, nested, said, scratch
from dlrover_agent.contact import Contact, bound
from dlrover_agent.core import (
    Ask,
    Assigned,
    Core,
    Effect,
    Emptied,
    Ended,
    Event,
    Exit,
    Kill,
    MasterLost,
    Met,
    Missed,
    Passed,
    Refused,
    Renew,
    Report,
    Signalled,
    Start,
    Stepped,
    Stop,
)
from dlrover_agent.failures import Death
from dlrover_agent.local import Local
from dlrover_agent.logs import Logs
from dlrover_agent.master import Line
from dlrover_agent.plugins import ElasticEvents
from dlrover_agent.saver import Saver, Site
from dlrover_agent.settings import Command, Settings
from dlrover_agent.warm import Recipe
from dlrover_agent.workers import Workers, reap_orphans
from dlrover_py import processes
from dlrover_py.helpers import end
from dlrover_py.processes import ProcessId, children
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import AgentReport, Assignment, Directive, Offer, WorkerPhase
from dlrover_py.protocol.errors import DLRoverError, ExitCode
from dlrover_py.protocol.workers import News
from dlrover_py.rpc import Client
from dlrover_py.telemetry import ENV_LEVEL, NOTICE, bind

log = logging.getLogger("agent")

LAST_REPORT_S = 1.0
DISMISSED_S = 5.0
"""For a guardian with nothing left to do but its folders, on a machine that may be busy."""
NO_STEP_S = 5.0
"""A restart is told then, though no step was reported."""
MASTER_LOST_S = 30.0
"""Where no platform brings a lost master back, an agent with nothing to do gives it up then."""
WARMING_S = 60.0
"""A node that joins takes so long at most to get warm."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How it ended."""

    code: int
    message: str
    deaths: Sequence[Death] = ()
    """Workers of the last round that ended badly by themselves, the first one first."""


class Reserved:
    """A port that nobody else gets, for the store of a round.

    It listens already, so that clients on other nodes may come before the store does. Where
    worker 0 has to host the store it is only bound: the kernel hands it to no one, and worker 0,
    which sets SO_REUSEADDR too, can still bind it.
    """

    def __init__(self, addr: str, *, listen: bool) -> None:
        self._listens = listen
        # Where worker 0 hosts the store torch listens everywhere: the port must be free there.
        self._socket = bound(addr if listen else "", 0, socket.SOCK_STREAM)
        if listen:
            self._socket.listen(4096)
        self.offer = Offer(addr=addr, port=self._socket.getsockname()[1])

    def hand_over(self) -> socket.socket | None:
        """The listening socket, for who serves the store; it is theirs now."""
        if not self._listens:
            return None
        listening, self._socket = self._socket, socket.socket()
        return listening

    def close(self) -> None:
        """Let the port go."""
        self._socket.close()


class Guardian:
    """Our side of the process that cleans up if this one is killed."""

    def __init__(self, lifeline_fd: int | None, folders: Sequence[Path], mark: str = "") -> None:
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._mark, self._folders = mark, folders
        lifeline = -1 if lifeline_fd is None else lifeline_fd
        keep = [read] if lifeline < 0 else [read, lifeline]
        root = Path(processes.__file__).parents[1]
        script = [sys.executable, "-I", "-S", guardian.__file__, str(root)]
        us = ProcessId.of(os.getpid())
        self._process = subprocess.Popen(
            [*script, str(read), str(lifeline), str(us), mark, *map(str, folders)],
            pass_fds=keep,
            env={},  # it carries no mark: a frozen node must not freeze it
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
        try:
            os.write(self._pipe, f"{line}\n".encode())
        except BlockingIOError:  # it has not read for long: another one is told of all
            self._process.kill()
        except BrokenPipeError:
            pass

    def dismiss(self) -> None:
        """Nothing is left for it to do: it ends at once, or is killed."""
        os.close(self._pipe)
        if not end(self._process, DISMISSED_S):  # what it was there for
            guardian.clear(self._mark, self._folders)


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
        # First what may be refused, then what has to be cleaned up.
        run_id = settings.job_name or "none"
        logs = Logs(command, run_id=run_id, node_id=settings.node_id)
        self._events_of_torch = ElasticEvents(command, run_id)
        self._settings = settings
        self._kin = kin
        self._mark = secrets.token_hex(12)
        command = replace(command, inherit={**command.inherit, names.ENV_AGENT_MARK: self._mark})
        self._command = command
        self._max_restarts = max_restarts
        self._core = Core(nproc=command.nproc, shutdown_s=command.shutdown_s)
        self._events: collections.deque[Event] = collections.deque()
        self._handling = False
        self._boot_id = secrets.token_hex(8)
        self._seq = 0
        self._taken_up_at = 0.0
        self._current: Reserved | None = None
        self._contact: Contact | None = None
        self._token = token
        self._impatient = self._joined = False
        self._ending_since: float | None = None
        self._broke_at: float | None = None
        """When the last round of this node ended; None since the next one has begun."""
        self._back: tuple[Assignment, float, float] | None = None
        """A restart that is not told yet: the round, when the one before ended, and its start."""
        self._told_something = asyncio.Event()
        self._told_of = 0
        self._kept_recipe = ""
        self._told = ""
        """Digest of the recipe that the master has from this agent."""
        self._sharing: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._result: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._scratch = scratch.made(f"dlrover-{os.getpid()}-")
        self._saver = Saver(
            Site(
                settings.shm_dir,
                settings.job_uid or run_id,
                run_id,
                settings.node_id,
                settings.returns,
                settings.advertise,
            ),
            token=token,
            socket=self._scratch / "depot.sock",
            nproc=command.nproc,
            environ={**command.inherit, ENV_LEVEL: logging.getLevelName(log.getEffectiveLevel())},
            ask=lambda path: self._line.ask(path),
            changed=lambda: self._line.urge(),
            guard=lambda line: self._guardian.tell(line),
            kin=self._kin,
        )
        self._folders = [self._scratch]
        """That go with the agent, however it ends."""
        if self._saver.path is not None and not settings.returns:
            self._folders.append(self._saver.path)
        self._guardian = Guardian(settings.lifeline_fd, self._folders, self._mark)
        self._kin.add(self._guardian.pid)
        self._local = Local(
            self._scratch / "sdk.sock",
            command.nproc,
            self._heard,
            self._saver.staged,
            self._saver.stores,
            self._saver.unsaved,
        )
        self._workers = Workers(
            command,
            self.post,
            guard=lambda line: self._guardian.tell(line),
            kin=self._kin,
            last_step=self._local.last_step,
            sdk_socket=self._scratch / "sdk.sock",
            more=self._saver.environment(),
            scratch=self._scratch,
            logs=logs,
            run_id=run_id,
            changed=self._warmth_changed,
        )
        self._nested = ""
        self._below = nested.Watch(self._found_launcher)
        self._coming = self._reserve()
        self._line = Line(
            Client(settings.master_addr, token=token, ca_file=settings.ca_file),
            settings.node_id,
            self._report,
            self._assigned,
            lambda message: self.post(Refused(message)),
            connect_s=settings.connect_s,
            lost=(lambda words: self.post(MasterLost(words))) if settings.own_master else None,
            lost_s=MASTER_LOST_S,
            missed=lambda: self.post(Missed()),
            recipe=None if self._workers.warm.off else self._take_recipe,
        )

    async def run(self) -> Outcome:
        """Work until the job, the platform or a signal ends it.

        Raises:
            DLRoverError: the master could not be reached, or refused the token, at the start.
        """
        loop = asyncio.get_running_loop()
        for number in self._command.signals:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
                loop.add_signal_handler(number, self._signalled, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._command.signals)
        loop.add_signal_handler(signal.SIGCHLD, self._child_ended)
        if self._settings.lifeline_fd is not None:
            loop.add_reader(self._settings.lifeline_fd, self._lifeline)
        exchange = asyncio.create_task(self._line.run())
        look = asyncio.create_task(self._look())
        try:
            both: set[asyncio.Future[Any]] = {exchange, self._result}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not self._result.done():
                exchange.result()  # it was never answered; or refused, and the workers are killed
            end = await self._result
            if end.code != ExitCode.SUPERSEDED:
                await self._linger()
            if self._core.departs:
                await self._line.last_report(LAST_REPORT_S)
            self._events_of_torch.closed(failed=end.message if end.code else "")
            return Outcome(end.code, end.message, tuple(self._workers.deaths))
        finally:
            signal.pthread_sigmask(
                signal.SIG_BLOCK, self._command.signals
            )  # nothing must stop the cleaning up
            exchange.cancel()
            look.cancel()
            await asyncio.gather(exchange, look, return_exceptions=True)
            await self._close()

    async def _linger(self) -> None:
        """Stay as long as the master wants what is in this memory stored, within the grace."""
        if not self._saver.in_use:
            return
        loop = asyncio.get_running_loop()
        told = self._core.assignment
        began = loop.time() if self._ending_since is None else self._ending_since
        self._line.urge()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPORT_S):
                while told is None or told.directive is not Directive.STOP:
                    told = await self._next_assignment()
        if told is None or not told.linger:
            return
        log.info("agent_lingers", extra={"why": "what is in its memory is about to be stored"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(began + told.stop_grace_s):
                while told is not None and told.linger:
                    told = await self._next_assignment()

    async def _look(self) -> None:
        """Let the core look at the clock; not at the moment when thousands of others do."""
        while True:
            longest = self._core.look_s
            await asyncio.sleep(random.uniform(longest / 2, longest))
            self.post(Passed())

    async def _next_assignment(self) -> Assignment | None:
        self._told_something.clear()
        await self._told_something.wait()
        return self._core.assignment

    def post(self, event: Event) -> None:
        """Take in an event; they are handled one after the other, in order."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                now = asyncio.get_running_loop().time()
                event = self._events.popleft()
                effects = self._core.handle(event, now)
                if isinstance(event, Emptied):
                    self._say_ended()
                    if self._saver.in_use:
                        self._line.urge()  # what the memory holds now stays: others may wait for it
                if self._ending_since is None and self._is_end(event):
                    self._ending_since = now
                if isinstance(event, Ended) and event.failure is not None:
                    self._broken(now)
                for effect in effects:
                    self._perform(effect)
        finally:
            self._handling = False

    def _is_end(self, event: Event) -> bool:
        return isinstance(event, Signalled) or (
            isinstance(event, Assigned) and event.assignment.directive is Directive.STOP
        )

    def _say_ended(self) -> None:
        failures = [death.failure for death in self._workers.deaths]
        well = self._core.phase is WorkerPhase.SUCCEEDED
        self._events_of_torch.ended(failures, succeeded=well)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Start(assignment):
                self._start(assignment)
            case Renew():
                self._taken_up_at = asyncio.get_running_loop().time()
                if self._current is not None:
                    self._current.close()
                self._current, self._coming = self._coming, self._reserve()
            case Stop(why, grace_s, polite, number, last_step_s):
                spare = self._local.asking if polite else set()
                if last_step_s and not self._workers.alive <= self._local.agreeing:
                    spare = set()  # who stays would wait for those who do not
                if spare:
                    self._local.order_stop(why)
                    grace_s = max(grace_s, last_step_s)
                log.info("workers_stop", extra={"why": why, "grace_s": grace_s})
                self._broken(asyncio.get_running_loop().time())
                self._workers.stop(grace_s, number, spare=spare)
            case Kill():
                self._workers.kill()
            case Report():
                self._line.urge()
            case Ask(addr, port):
                if self._contact is not None:
                    self._contact.ask(addr, port)
            case Exit(_, message):
                log.info("agent_ends", extra={"why": message})
                if not self._result.done():
                    self._result.set_result(effect)

    def _reserve(self) -> Reserved:
        return Reserved(self._settings.advertise, listen=self._workers.hosts_store)

    def _start(self, assignment: Assignment) -> None:
        bind(incarnation=assignment.incarnation, round=assignment.round)
        log.info(
            "check_start" if assignment.directive is Directive.CHECK else "workers_start",
            extra={
                "node_rank": assignment.node_rank,
                "world_size": assignment.world_size,
                "master": f"{assignment.master_addr}:{assignment.master_port}",
                "why": assignment.reason,
                "waited_s": round(asyncio.get_running_loop().time() - self._taken_up_at, 4),
            },
        )
        self._local.new_round(assignment.round)
        assert self._current is not None
        if assignment.directive is Directive.RUN:
            self._make_contact(assignment, self._current.offer)
        listening = self._current.hand_over() if assignment.node_rank == 0 else None
        self._workers.start(assignment, listening)
        if assignment.directive is Directive.RUN:
            waited = asyncio.get_running_loop().time() - self._taken_up_at
            self._events_of_torch.started(assignment, self._workers.pids, waited)
            self._restarting(assignment)
            strangers = frozenset(nested.OTHERS) & self._command.inherit.keys()
            a = assignment
            world = nested.World(a.round, a.world_size, a.master_port, strangers)
            self._below.below(world, self._workers.processes)

    def _broken(self, now: float) -> None:
        """The round is over; the next one is a restart."""
        self._tell_of_restart(stepped=False)
        if self._broke_at is None:
            self._broke_at = now

    def _restarting(self, assignment: Assignment) -> None:
        """Tell of the restart after its first step, or after a while without one."""
        if self._broke_at is None:
            return
        loop = asyncio.get_running_loop()
        self._back, self._broke_at = (assignment, self._broke_at, loop.time()), None

        def no_step_yet() -> None:
            if self._back is not None and self._back[0] is assignment:
                self._tell_of_restart(stepped=False)

        loop.call_later(NO_STEP_S, no_step_yet)

    def _tell_of_restart(self, *, stepped: bool) -> None:
        if self._back is None:
            return
        (assignment, broke_at, began), self._back = self._back, None
        after_s = (asyncio.get_running_loop().time() if stepped else began) - broke_at
        alone = assignment.nnodes == 1
        says = said.restarted(assignment.reason, alone=alone, stepped=stepped, after_s=after_s)
        log.log(NOTICE, "restarted", extra={"says": says, "after_s": round(after_s, 3)})

    def _found_launcher(self, words: str) -> None:
        log.info("nested_launcher", extra={"why": words})
        self._nested = words
        self._line.urge()

    def _make_contact(self, assignment: Assignment, offer: Offer) -> None:
        if self._contact is not None:
            self._contact.close()
            self._contact = None
        if assignment.nnodes < 2:
            return
        try:
            self._contact = Contact(
                assignment.round,
                offer.addr,
                offer.port,
                self._token,
                stands=lambda: self._core.stands(assignment.round),
                met=lambda: self.post(Met(assignment.round)),
            )
        except OSError as error:  # then silence says nothing, and workers go on
            log.warning("no_contact", extra={"port": offer.port, "why": str(error)})

    def _report(self) -> AgentReport:
        core = self._core
        if core.check is not None and self._told_of != core.checks:
            self._told_of = core.checks
            level = NOTICE if self._command.precheck > 1 else logging.INFO
            fields = core.check.model_dump(exclude_defaults=True)
            log.log(level, "check_ended", extra=fields | {"says": said.checked(core.check)})
        self._seq += 1
        warming = self._warming
        self._joined |= not warming
        return AgentReport(
            boot_id=self._boot_id,
            incarnation=core.incarnation,
            seq=self._seq,
            have_term=core.have[0],
            have_version=core.have[1],
            follows=core.follows,
            phase=core.phase,
            nproc=core.nproc,
            role=self._command.role,
            pids=self._workers.pids,
            agent_pid=os.getpid(),
            offer=self._coming.offer,
            max_restarts=self._max_restarts,
            failure=core.failure,
            progress=core.progress,
            leaving=core.leaving,
            cut_off=core.cut_off,
            warm=self._workers.warm.ready,
            warming=warming,
            precheck=self._command.precheck,
            exclude_straggler=self._command.exclude_straggler,
            checks=core.checks,
            check=core.check,
            memory_round=core.clean,
            save_at_breakpoint=self._command.save_at_breakpoint,
            nested=self._nested,
            **self._saver.facts(),
        )

    @property
    def _warming(self) -> bool:
        """Whether the first round has to wait: those who run would wait longer for a cold start."""
        warm = self._workers.warm
        return warm.building and not (warm.ready or self._joined or self._impatient)

    def _assigned(self, assignment: Assignment) -> None:
        if assignment.recipe != self._kept_recipe:
            self._kept_recipe = assignment.recipe
            self._share_recipe()
        self._saver.assigned(assignment)
        self.post(Assigned(assignment))
        self._told_something.set()

    def _share_recipe(self) -> None:
        """Take what the master keeps, or let it keep ours."""
        warm = self._workers.warm
        if warm.off or (self._sharing is not None and not self._sharing.done()):
            return
        if self._kept_recipe and warm.recipe is None:
            self._sharing = asyncio.create_task(self._fetch_recipe())
        elif warm.recipe is not None and warm.recipe.shared:
            # Whoever was the first to tell also tells what its workers import later.
            grown = self._told and self._told != warm.recipe.digest
            if grown or not self._kept_recipe:
                self._sharing = asyncio.create_task(self._tell_recipe(warm.recipe))

    def _take_recipe(self, body: bytes) -> None:
        warm = self._workers.warm
        if not body or warm.recipe is not None:
            return
        try:
            warm.adopt(Recipe.from_wire(body))
        except ValueError as error:
            log.warning("recipe_not_used", extra={"why": str(error), "then": "cold start"})
            return
        if not self._core.follows:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(WARMING_S, self._lose_patience)

    def _lose_patience(self) -> None:
        self._impatient = True
        self._line.urge()

    async def _fetch_recipe(self) -> None:
        try:
            self._take_recipe(await self._line.fetch_recipe())
        except DLRoverError as error:
            log.info("recipe_not_fetched", extra={"why": str(error)})

    async def _tell_recipe(self, recipe: Recipe) -> None:
        try:
            await self._line.tell_recipe(recipe.to_wire())
            self._kept_recipe = self._told = recipe.digest
            log.info("recipe_told", extra={"id": recipe.digest})
        except DLRoverError as error:
            log.info("recipe_not_told", extra={"why": str(error)})

    def _heard(self, news: News) -> None:
        if news.step is not None:
            if self._back is not None and news.round == self._back[0].round:
                self._tell_of_restart(stepped=True)
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
            self._kin.discard(self._guardian.pid)
            self._guardian = Guardian(self._settings.lifeline_fd, self._folders, self._mark)
            self._kin.add(self._guardian.pid)
            for session in (*self._workers.sessions, *self._saver.sessions):
                self._guardian.tell(f"+{session}")
        self._workers.warm.child_ended()
        reap_orphans(self._kin | self._workers.unreaped)

    def _warmth_changed(self) -> None:
        self._share_recipe()
        if not self._core.follows:
            self._line.urge()

    async def _close(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        if self._patience is not None:
            self._patience.cancel()
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.gather(self._sharing, return_exceptions=True)
        self._tell_of_restart(stepped=False)
        self._below.close()
        self._local.close()
        if self._contact is not None:
            self._contact.close()
        await self._workers.close()
        await self._saver.close()
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
) -> Outcome:
    """Run one agent.

    Args:
        settings, command, token, max_restarts: of the agent.
        beside: what has to live as long as it does; it takes the set of our child processes that
            are no workers, and adds its own. Its failure is ours.
    """
    kin = {child.pid for child in children(os.getpid())}  # of a shell that has become us, say
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
