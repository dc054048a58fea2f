"""The event loop of the agent, and the only writer of its state.

Events go in, :class:`dlrover_agent.core.Core` decides, and the loop carries out the effects.
"""

import asyncio
import collections
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dlrover_agent import console
from dlrover_agent.channels.master_client import MasterClient, http_client
from dlrover_agent.channels.reserved_port import RoundPorts
from dlrover_agent.channels.sdk_socket import SdkServer
from dlrover_agent.channels.shard_relay import ShardRelay
from dlrover_agent.checkpoint.grace import GraceAfterSignal
from dlrover_agent.checkpoint.saver import NodeContext, Saver
from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.core import (
    Assigned,
    Core,
    Effect,
    Event,
    Exit,
    Kill,
    MasterLost,
    MasterUnreachable,
    NodeRefused,
    PeerSeen,
    ProbePeer,
    Report,
    ReserveNextPort,
    Signalled,
    Start,
    StepReported,
    Stop,
    Tick,
    WorkerEnded,
    WorkersGone,
)
from dlrover_agent.observation.devices import nvml_meter
from dlrover_agent.observation.node_load import LoadMeter
from dlrover_agent.observation.snapshot import SnapshotTaker
from dlrover_agent.reaper_client import ReaperSupervisor
from dlrover_agent.restart_log import RestartLog
from dlrover_agent.scratch_folder import ScratchFolder
from dlrover_agent.settings import Command, Settings
from dlrover_agent.warm import compiled_code
from dlrover_agent.warm.recipe_exchange import RecipeExchange
from dlrover_agent.workers import nested_launchers
from dlrover_agent.workers.failures import WorkerDeath
from dlrover_agent.workers.logs import Logs
from dlrover_agent.workers.plugins import ElasticEvents
from dlrover_agent.workers.supervisor import WorkerSupervisor, reap_orphans
from dlrover_agent.workers.worker import base_environment
from dlrover_py.pacing import random_delay_s
from dlrover_py.process import identity
from dlrover_py.process.identity import children
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    CheckRequest,
    Directive,
    WorkerPhase,
)
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.timing import MASTER_LOST_S
from dlrover_py.protocol.workers import WorkerProgress
from dlrover_py.telemetry import ENV_LEVEL, NOTICE, bind

log = logging.getLogger("agent")

LAST_REPORT_S = 1.0
"""Seconds that the last report, and the wait for the final assignment, may take."""
UNWRITTEN_S = 5.0
"""Seconds that the wait for the final assignment may take, if a state is not in storage yet."""
SDK_SOCKET, SHARDS_SOCKET, PROBE_SOCKET = "sdk.sock", "shards.sock", "probe.sock"
"""Sockets for workers, in the agent's temporary folder."""
REPORT_DELAY_S = 0.1
"""Seconds that a report waits for a start that is under way. Most take a few milliseconds."""


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """How an agent ended."""

    code: int
    """Exit code of the agent."""
    message: str
    """Why the agent ended, in words."""
    deaths: Sequence[WorkerDeath] = ()
    """Workers of the last round that failed by themselves, in the order of their ends."""


class Agent:
    """One node of a job, from its first report to its exit code.

    The constructor must run in the event loop. It makes the agent's folders and sockets, and starts
    the reaper: the process that cleans up if the agent is killed. Nothing is sent before
    :meth:`run`.

    Args:
        settings: Environment of the agent.
        command: What the workers run.
        token: Token of the job.
        max_restarts: Value of ``--max-restarts``; None if it was not given.
        children: Registry of the agent's child processes. The agent adds its own.

    Raises:
        DLRoverError: A setting cannot be used, or no temporary folder can be made.
        OSError: A socket cannot be bound, or the reaper cannot be started.
    """

    def __init__(
        self,
        settings: Settings,
        command: Command,
        *,
        token: str,
        max_restarts: int | None,
        children: ChildRegistry,
    ) -> None:
        mark = secrets.token_hex(12)
        command = replace(command, environ={**command.environ, names.ENV_AGENT_MARK: mark})
        self._settings, self._command, self._token = settings, command, token
        self._max_restarts, self._children = max_restarts, children
        self._core = Core(nproc=command.nproc, shutdown_s=command.shutdown_s)
        self._events: collections.deque[Event] = collections.deque()
        self._handling = False
        self._boot_id, self._seq, self._logged_check = secrets.token_hex(8), 0, 0
        self._grace = GraceAfterSignal(command.shutdown_s)
        self._taken_up_at = 0.0
        self._ending_since: float | None = None
        self._nested_launcher = ""
        self._new_assignment = asyncio.Event()
        self._delayed_report: asyncio.TimerHandle | None = None
        """Timer of a report that waits for the start of the workers."""
        self._result: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._restarts, self._load = RestartLog(), LoadMeter(nvml_meter(command.environ))
        self._launchers = nested_launchers.LauncherWatch(self._on_nested_launcher)
        # Steps that may fail come before those that need cleaning up.
        self._run_id = settings.job_name or "none"
        self._logs = Logs(command, run_id=self._run_id, node_id=settings.node_id)
        self._elastic_events = ElasticEvents(command, self._run_id)
        client = http_client(settings, token)
        self._master = MasterClient(client, settings.node_id, self, connect_s=settings.connect_s)
        self._scratch = ScratchFolder()
        self._saver = self._new_saver()
        self._reaper = self._new_reaper(mark)
        self._sdk = self._new_sdk_server()
        self._shards, self._snapshots = self._new_relay(), self._new_snapshots()
        self._workers = self._new_workers()
        self._recipes = RecipeExchange(self._workers.warm, self._master, self._core)
        self._ports = RoundPorts(settings.advertised_addr, listen=self._workers.hosts_store)

    def _new_saver(self) -> Saver:
        """Create the node's memory for checkpoints, with its server and client of the persister.

        The persister is the process that writes checkpoints to storage. Without usable memory, the
        agent runs without checkpoints in memory, and reports why.
        """
        settings, command = self._settings, self._command
        node = NodeContext(
            root=settings.shm_dir,
            job=settings.job_uid or self._run_id,
            # It is written beside the checkpoints, and the id of an endpoint's job is its secret.
            name="" if settings.asks_proof else self._run_id,
            node=settings.node_id,
            token=self._token,
            nproc=command.nproc,
            socket=self._scratch.path / "slots.sock",
            returns=settings.returns,
            addr=settings.advertised_addr,
        )
        environ = {**command.environ, ENV_LEVEL: logging.getLevelName(log.getEffectiveLevel())}
        saver = Saver(node, environ, master=self._master, children=self._children)
        if saver.server is not None:
            self._scratch.add(saver.server)
        return saver

    def _new_sdk_server(self) -> SdkServer:
        """Create the server for reports of workers.

        Raises:
            OSError: Its socket cannot be bound.
        """
        path, nproc = self._scratch.path / SDK_SOCKET, self._command.nproc
        return self._scratch.add(
            SdkServer(path, nproc, self._on_step, self._saver, self._master.urge)
        )

    def _new_relay(self) -> ShardRelay:
        """Create the server for workers' requests about shards, which the master answers.

        Raises:
            OSError: Its socket cannot be bound.
        """
        path, nproc = self._scratch.path / SHARDS_SOCKET, self._command.nproc
        return self._scratch.add(
            ShardRelay(path, self._boot_id, nproc, self._master, term=lambda: self._core.have[0])
        )

    def _new_snapshots(self) -> SnapshotTaker:
        """Create what looks at the workers when the master asks.

        Raises:
            OSError: The socket for the probes of workers cannot be bound.
        """
        path = self._scratch.path / PROBE_SOCKET
        taker = SnapshotTaker(path, self._boot_id, self._master, lambda: self._workers.workers)
        self._scratch.add(taker.probes)
        return taker

    def _new_workers(self) -> WorkerSupervisor:
        """Create the supervisor of the workers, which starts none yet."""
        folder = self._scratch.path
        env = base_environment(self._command, self._run_id, folder / SDK_SOCKET)
        env |= self._saver.environment()
        env[names.ENV_SHARDS_SOCKET] = str(folder / SHARDS_SOCKET)
        env[names.ENV_PROBE_SOCKET] = str(folder / PROBE_SOCKET)
        return WorkerSupervisor(
            self._command,
            env,
            scratch=self._scratch,
            logs=self._logs,
            children=self._children,
            observer=self,
        )

    def _new_reaper(self, mark: str) -> ReaperSupervisor:
        """Start the reaper, which removes the agent's folders, however the agent ends.

        The reaper leaves the memory for checkpoints if this node may return
        (``Settings.returns``).

        Args:
            mark: Value in the environment of the agent's processes, by which the reaper finds them.

        Raises:
            OSError: The process cannot be started.
        """
        folders = [self._scratch.path]
        if self._saver.path is not None and not self._settings.returns:
            folders.append(self._saver.path)
        return ReaperSupervisor(self._settings.lifeline_fd, folders, mark, self._children)

    async def run(self) -> AgentOutcome:
        """Work until the job, the platform or a signal ends the agent, and release everything.

        The method installs signal handlers. Before it returns, it may wait until checkpoints are
        stored, and it stops the reaper. The agent's signals are blocked then. A master that is lost
        later does not end running workers.

        Returns:
            Exit code and message of the agent, and the workers that failed in the last round.

        Raises:
            DLRoverError: The master could not be reached, or refused the token, at the start. Or,
                at any time, another program answers at the master's address with an error, or the
                master refuses a report as invalid.
            OSError: No port can be reserved for a new round.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._on_child_end)
        for number in self._command.signals:
            # With nohup the signal is caught instead of ignored. Workers would inherit an ignored
            # signal, and torchrun's workers do not ignore it.
            _handle(number, bool if identity.ignores_signal(number) else self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._command.signals)
        if self._settings.lifeline_fd is not None:
            loop.add_reader(self._settings.lifeline_fd, self._read_lifeline)
        await self._recipes.take_earlier(with_master=self._settings.recipes_with_master)
        take_recipe = None if self._workers.warm.disabled_reason else self._recipes.take_first
        exchange = asyncio.create_task(self._master.run(take_recipe))
        ticks = asyncio.create_task(self._tick())
        try:
            both: set[asyncio.Future[Any]] = {exchange, self._result}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not self._result.done():
                # Either the master never answered, and this raises. Or it refused this node, and
                # the end of the killed workers completes the result.
                exchange.result()
            end = await self._result
            if end.code != ExitCode.SUPERSEDED:
                await self._stay_until_stored(exchange)
            if self._core.leaves_job:
                await self._master.last_report(LAST_REPORT_S)
            await self._elastic_events.closed(failed=end.message if end.code else "")
            if self._settings.asks_proof and not (end.code or self._core.follows):
                why = "it stood by and its script was never started: enough other nodes had joined"
                log.warning("node_not_needed", extra={"why": why, "then": "it ends with code 0"})
            return AgentOutcome(end.code, end.message, tuple(self._workers.deaths))
        finally:
            # No signal must interrupt the cleanup.
            signal.pthread_sigmask(signal.SIG_BLOCK, self._command.signals)
            exchange.cancel()
            ticks.cancel()
            await asyncio.gather(exchange, ticks, return_exceptions=True)
            await self._close()

    async def _stay_until_stored(self, exchange: "asyncio.Task[None]") -> None:
        """Wait until this node's checkpoints are stored or copied, within the grace period.

        The grace period is that of the final assignment, and begins when the agent was asked to
        end. The ``stay_until_stored`` field of this assignment decides whether the agent waits. The
        assignment itself is awaited for ``LAST_REPORT_S``, or for ``UNWRITTEN_S``. Without it, the
        node stores what it has by itself if no platform restarts the master. After a signal this
        takes at most the grace period. The method returns immediately if the memory was never used.
        A warning says which step was not stored.

        Args:
            exchange: The exchange of reports with the master. It is ended before this node stores
                by itself. By a late answer, the job would count on a node that is about to end.
        """
        if not self._saver.in_use:
            return
        newest = self._core.assignment
        deadline_start = self._ending_since or asyncio.get_running_loop().time()
        limit_s = LAST_REPORT_S if self._saver.unwritten_step() is None else UNWRITTEN_S
        self._master.urge()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while newest is None or newest.directive is not Directive.STOP:
                    newest = await self._next_assignment()
        if newest is not None and newest.stay_until_stored:
            why = "the checkpoints in its memory are being stored, or copied to other nodes"
            log.info("agent_waits_for_storage", extra={"why": why})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline_start + newest.stop_grace_s):
                    while newest is not None and newest.stay_until_stored:
                        newest = await self._next_assignment()
        elif self._settings.own_master and newest and newest.directive is not Directive.STOP:
            exchange.cancel()
            number = max(self._core.follows, newest.round)
            await self._grace.limit(self._saver.store_without_master(number, self._core.have[0]))
        self._saver.warn_of_unwritten()

    async def _tick(self) -> None:
        """Post a :class:`Tick` periodically until cancelled, at random times of ``tick_s`` at most.

        The times are random, so that agents do not act in step.
        """
        while True:
            longest = self._core.tick_s
            await asyncio.sleep(random_delay_s(longest / 2, longest))
            self.post(Tick())

    async def _next_assignment(self) -> Assignment | None:
        self._new_assignment.clear()
        await self._new_assignment.wait()
        return self._core.assignment

    def post(self, event: Event) -> None:
        """Handle an event now, or after the events that are being handled.

        The core decides, and its effects are carried out here: the start or stop of workers, a
        report, or the agent's end. An event that is posted while another one is handled waits in a
        queue. The method must be called in the thread of the event loop.

        Raises:
            OSError: No port can be reserved for a new round.
        """
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                now = asyncio.get_running_loop().time()
                event = self._events.popleft()
                effects = self._core.handle(event, now)
                if isinstance(event, WorkersGone):
                    self._record_round_end()
                    self._snapshots.round_over([one.failure for one in self._workers.deaths])
                    if self._saver.in_use:
                        # The memory does not change any more, and other nodes may wait for this.
                        self._master.urge()
                if self._ending_since is None and _is_end(event):
                    self._ending_since = now
                    self._workers.warm.disabled_reason = "the agent ends"
                if isinstance(event, WorkerEnded) and event.failure is not None:
                    self._restarts.broken(now)
                for effect in effects:
                    self._perform(effect)
        finally:
            self._handling = False

    def _record_round_end(self) -> None:
        """Queue torch's elastic events for the end of the round; do nothing without a handler."""
        failures = [death.failure for death in self._workers.deaths]
        succeeded = self._core.phase is WorkerPhase.SUCCEEDED
        self._elastic_events.ended(failures, succeeded=succeeded)

    def _perform(self, effect: Effect) -> None:
        """Carry out an effect of the core; starts and stops of workers are only begun here.

        A graceful stop asks the scripts that call ``should_stop()`` to end. They get the signal
        only shortly before the end of the grace period. A last step is granted only if the scripts
        of all workers can save it. A last look at the workers comes before a stop after a fault.

        A report waits up to ``REPORT_DELAY_S`` for a start that is under way. The first exit
        decides how the agent ends; later ones are only logged.

        Raises:
            OSError: No port can be reserved for a new round.
        """
        match effect:
            case Start(assignment):
                self._start(assignment)
            case ReserveNextPort():
                self._taken_up_at = asyncio.get_running_loop().time()
                self._ports.advance()
            case Stop(why, grace_s, polite, number, last_step_s, fault):
                pollers = self._sdk.stop_pollers if polite else set()
                if last_step_s and not self._workers.alive <= self._sdk.last_step_savers:
                    pollers = set()  # workers that stay would wait for those that are stopped
                if pollers:
                    self._sdk.request_stop(why)
                    grace_s = max(grace_s, last_step_s)
                log.info("workers_stop", extra={"why": why, "grace_s": grace_s})
                if not self._workers.starting:  # else no round has ended
                    self._restarts.broken(asyncio.get_running_loop().time())
                stop = partial(self._workers.stop, grace_s, number, delayed=pollers)
                look = (fault or not polite) and number == signal.SIGTERM
                self._snapshots.stop_workers(stop, look=look and not self._workers.starting)
            case Kill():
                self._snapshots.stop_now()
                self._workers.kill()
            case Report() if self._workers.starting:  # the report includes their process ids
                if self._delayed_report is None:
                    loop = asyncio.get_running_loop()
                    self._delayed_report = loop.call_later(REPORT_DELAY_S, self._report_now)
            case Report():
                self._master.urge()
            case ProbePeer(addr, port):
                self._ports.probe(addr, port)
            case Exit(_, message):
                log.info("agent_ends", extra={"why": message})
                if not self._result.done():
                    self._result.set_result(effect)

    def _start(self, assignment: Assignment) -> None:
        """Begin to start the workers of a round or of a check, and open the round's probe.

        The probe is the UDP socket by which agents find out whether rank 0 is still there. Checks
        and rounds of one node have none. On rank 0's node, the workers also get the listening
        socket of the store, unless worker 0 hosts the store.
        """
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
        self._sdk.new_round(assignment.round)
        self._shards.new_round(assignment.round)
        self._snapshots.new_round(assignment)
        if assignment.directive is Directive.RUN:
            self._ports.open_probe(
                assignment,
                self._token,
                is_in_round=lambda: self._core.stands(assignment.round),
                on_peer_seen=lambda: self.post(PeerSeen(assignment.round)),
            )
        listening = self._ports.hand_over() if assignment.node_rank == 0 else None
        self._workers.start(assignment, listening)

    def _report_now(self) -> None:
        """Ask for the report that waits for the start of the workers; do nothing if none waits."""
        if self._delayed_report is not None:
            self._delayed_report.cancel()
            self._delayed_report = None
            self._master.urge()

    def worker_failed(self) -> None:
        """Begin the last look at the other workers. See :class:`RoundObserver`."""
        self._snapshots.begin_last_look()

    def round_started(self, assignment: Assignment) -> None:
        """Ask for a report if one waits, record torch's events, and watch for another launcher.

        A restart is logged later, with its first step. For a check, only the report is requested.
        See :class:`RoundObserver`.
        """
        self._report_now()
        if assignment.directive is Directive.RUN:
            waited = asyncio.get_running_loop().time() - self._taken_up_at
            self._elastic_events.started(assignment, self._workers.pids, waited)
            self._restarts.started(assignment)
            strangers = (
                frozenset(nested_launchers.LAUNCHER_VARIABLES) & self._command.environ.keys()
            )
            a, socket = assignment, str(self._scratch.path / SDK_SOCKET)
            world = nested_launchers.ExpectedWorld(
                a.round, a.world_size, a.master_port, socket, strangers
            )
            self._launchers.watch(world, [w.process for w in self._workers.workers])

    def last_step(self, local_rank: int) -> int | None:
        """Return the newest step that a worker has reported. See :class:`RoundObserver`."""
        return self._sdk.last_step(local_rank)

    def warm_starts_changed(self) -> None:
        """Share a new recipe, and report a new zygote. See :class:`RoundObserver`.

        A recipe lists modules to import before a warm start. A zygote is the process that has
        imported them, and from which workers are forked. Before the first round, a report is
        requested.
        """
        self._recipes.warm_starts_changed()

    def _on_nested_launcher(self, message: str) -> None:
        log.info("nested_launcher", extra={"why": message})
        self._nested_launcher = message
        self._master.urge()

    def report(self) -> AgentReport:
        """Return the present report, with the next number. See :class:`ReportingNode`.

        Each call reads which checkpoints are in shared memory. The result of a check is logged with
        its first report.
        """
        core = self._core
        if core.check is not None and self._logged_check != core.checks:
            self._logged_check = core.checks
            level = NOTICE if self._command.precheck > 1 else logging.INFO
            fields = core.check.model_dump(exclude_defaults=True)
            log.log(level, "check_ended", extra=fields | {"says": console.checked(core.check)})
        self._seq += 1
        return AgentReport(
            boot_id=self._boot_id,
            run=self._settings.run_name,
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
            offer=self._ports.offer.model_copy(update={"topology": self._settings.topology}),
            max_restarts=self._max_restarts,
            failure=core.failure,
            progress=core.progress,
            reached_step=core.reached_step,
            leaving=core.leaving,
            cut_off=core.cut_off,
            warm=self._workers.warm.ready,
            warming=self._recipes.delays_first_round(),
            precheck=_check_request(self._command),
            checks=core.checks,
            check=core.check,
            memory_round=core.oldest_live_round,
            save_at_breakpoint=self._command.save_at_breakpoint,
            auto_tune=self._command.auto_tune,
            loader=self._sdk.loader(core.follows),
            wrong=self._sdk.wrong(core.follows),
            log_findings=self._logs.watch.findings(core.follows) + self._load.devices.found(),
            nested=self._nested_launcher,
            leases=self._shards.leases(),
            idle_s=self._snapshots.idle.seconds(self._workers.pids),
            load=self._load.load(self._workers.pids),
            **self._saver.facts(),
        )

    def assigned(self, assignment: Assignment) -> None:
        """Follow an assignment of the master. See :class:`ReportingNode`."""
        self._recipes.assigned(assignment.recipe)
        self._saver.assigned(assignment)
        self._sdk.tune(assignment.loader)
        self.post(Assigned(assignment))
        self._snapshots.assigned(assignment)
        self._new_assignment.set()

    def refused(self, message: str) -> None:
        """Kill the workers and end the agent, as the master refuses it. See :class:`ReportingNode`.

        The agent ends once the workers are gone.
        """
        self.post(NodeRefused(message))

    def master_unreachable(self, away_s: float, error: Exception) -> None:
        """Take note that the master does not answer. See :class:`ReportingNode`.

        If no platform restarts the master, the agent ends after ``MASTER_LOST_S`` without an
        answer, unless workers run.
        """
        self.post(MasterUnreachable())
        if self._settings.own_master and away_s >= MASTER_LOST_S:
            self.post(MasterLost(f"the master has been unreachable for {away_s:.0f} s: {error}"))

    def _on_step(self, progress: WorkerProgress) -> None:
        """Handle a step that a script has reported."""
        assert progress.step is not None
        self._restarts.stepped(progress.round)
        seen = progress.step, progress.total, progress.metrics, progress.spent
        self.post(StepReported(progress.round, progress.local_rank, *seen))

    def _on_signal(self, number: signal.Signals) -> None:
        self._workers.stop_waiting_for_console()
        self._grace.begin()
        self.post(Signalled(number.name, number))

    def _read_lifeline(self) -> None:
        """Handle the end of the lifeline like SIGTERM; ignore bytes that arrive on it."""
        assert self._settings.lifeline_fd is not None
        if not os.read(self._settings.lifeline_fd, 64):
            asyncio.get_running_loop().remove_reader(self._settings.lifeline_fd)
            self.post(Signalled("the notice that its platform has ended", signal.SIGTERM))

    def _on_child_end(self) -> None:
        self._reaper.child_ended()
        self._workers.warm.child_ended()
        reap_orphans(self._children.non_worker_pids | self._workers.unreaped)

    async def _close(self) -> None:
        """Release everything that the agent holds; end the reaper last, which cleans up.

        Transfers, the zygote, the stores and the persister are ended. The event loop is blocked
        while the last output is written, and while the reaper works.
        """
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        await self._recipes.close()
        self._restarts.close()
        self._launchers.close()
        self._scratch.close()
        self._sdk.close()
        await self._snapshots.close()
        await self._shards.close()
        await self._workers.close()
        await self._saver.close()
        self._ports.close()
        await self._reaper.close()


def _handle(number: signal.Signals, handler: Callable[[signal.Signals], object]) -> None:
    """Have the running event loop call a function with each signal of this number.

    ``add_signal_handler`` of the loop does the same, but when the loop is closed, it sets the
    default action again, which ends the process. The agent blocks signals at its end, but a
    thread that starts a process does not (:func:`inheritable_signals`): it would get them.
    """
    call = asyncio.get_running_loop().call_soon_threadsafe
    signal.signal(number, lambda *_: call(handler, number))
    signal.siginterrupt(number, False)


def _log_unhandled(number: signal.Signals) -> None:
    """Log that the agent has received a signal and goes on.

    A batch system sends signals to all processes of a job. Workers that handle them, to store a
    checkpoint, must not be killed because their agent has no handler.
    """
    then = "the workers go on; name the signal in --signals-to-handle to pass it on and end them"
    log.warning("signal_ignored", extra={"signal": number.name, "then": then})


async def run_agent(
    settings: Settings,
    command: Command,
    *,
    token: str,
    max_restarts: int | None,
    companion: "Callable[[set[int]], Coroutine[Any, Any, None]] | None" = None,
) -> AgentOutcome:
    """Run one agent until it ends.

    Args:
        settings: Environment of the agent.
        command: What the workers run.
        token: Token of the job.
        max_restarts: Value of ``--max-restarts``; None if it was not given.
        companion: Function that runs beside the agent for as long as it lives, or None. It takes
            the set of process ids of children that are not workers, and adds its own to the set.
            Its failure ends the agent too.

    Returns:
        How the agent ended. The process ignores the agent's signals from then on.

    Raises:
        DLRoverError: A setting cannot be used, or as for :meth:`Agent.run`.
        OSError: A socket cannot be bound, or the reaper cannot be started. An exception of the
            companion is raised, too.
    """
    others = {signal.SIGUSR1, signal.SIGUSR2}.difference(command.signals)
    for number in others:
        _handle(number, _log_unhandled)
    tasks: list[asyncio.Task[Any]] = []
    try:
        # There may be children already, for example of a shell that has replaced itself by this
        # process with exec.
        registry = ChildRegistry(child.pid for child in children(os.getpid()))
        compiled = await compiled_code.environment(command)
        command = replace(command, environ={**command.environ, **compiled})
        agent = Agent(settings, command, token=token, max_restarts=max_restarts, children=registry)
        run = asyncio.create_task(agent.run())
        tasks.append(run)
        if companion is not None:
            tasks.append(asyncio.create_task(companion(registry.non_worker_pids)))
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return await run
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for number in (*command.signals, *others):
            signal.signal(number, signal.SIG_IGN)  # no handler may use a closed event loop


def _is_end(event: Event) -> bool:
    """Return whether an event asks the agent to end."""
    return isinstance(event, Signalled) or (
        isinstance(event, Assigned) and event.assignment.directive is Directive.STOP
    )


def _check_request(command: Command) -> CheckRequest | None:
    """Return the check before the first round that the flags ask for; None if they ask for none."""
    if not command.precheck:
        return None
    return CheckRequest(level=command.precheck, exclude_slow=command.exclude_straggler)
