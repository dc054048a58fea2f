"""The membership of one node in a job, for the agent of torchrun.

A thread keeps the exchange with the master going. It also runs the master if this node is the
endpoint. torchrun's agent, in its own thread, asks for a place in the next round, and whether the
present round goes on. A new round is acknowledged immediately, even if the agent is still stopping
its old workers. So the next round never waits for that.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from dlrover_agent.channels.master_client import MasterClient, http_client
from dlrover_agent.channels.reserved_port import ReservedPort
from dlrover_agent.loop import LAST_REPORT_S
from dlrover_agent.settings import Settings
from dlrover_agent.standalone import Endpoint, OwnMaster, hosted
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    Directive,
    FailureKind,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    InvariantError,
    SupersededError,
    UnauthorizedError,
    UnreachableError,
)
from dlrover_py.protocol.timing import END_REPORT_S, MASTER_LOST_S

log = logging.getLogger("agent.membership")

ANY_RESTARTS = 2**31
"""Restart limit in the reports; it is never reached, as torchrun's agent counts restarts itself."""


class JobEndedError(Exception):
    """The job has ended, and there will be no further round."""

    def __init__(self, last: Assignment) -> None:
        super().__init__(f"the job has ended: {last.reason}")
        self.code = int(last.exit_code)
        """Exit code of the job."""


class Membership:
    """The membership of one node in a job, which two threads use.

    One condition guards the state that both threads share.
    """

    def __init__(
        self, settings: Settings, endpoint: Endpoint | None, expected_command: str
    ) -> None:
        """Prepare the membership; nothing is started yet.

        Args:
            settings: Settings from the environment.
            endpoint: Endpoint where the master runs; None if a platform names the master.
            expected_command: The command that should run at the endpoint, for error messages.
        """
        self._settings, self._endpoint, self._expected_command = (
            settings,
            endpoint,
            expected_command,
        )
        self._boot_id = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._run, name="dlrover", daemon=True)
        self._hosts = self._heard_of_end = False
        self._advertise = ""
        self._own_master = False
        """Whether no platform restarts the master."""
        self._condition = threading.Condition()
        self._report_now: Callable[[], object] = lambda: None
        self._stop: Callable[[], object] = lambda: None
        self._closing = threading.Event()
        self._seq = 0
        self._assignment_version = (0, 0)
        self._incarnation = 0
        self._newest: Assignment | None = None
        """Newest assignment; None before the first one."""
        self._follows = self._round_in_use = 0
        """Newest round that was acknowledged, and newest round that the agent has got."""
        self._phase = WorkerPhase.IDLE
        self._joining = False
        """Whether the agent waits for a round."""
        self._failure: WorkerFailure | None = None
        self._leave_reason = self._give_up_reason = ""
        self._error: DLRoverError | None = None
        self._next_port: ReservedPort | None = None
        self._current_port: ReservedPort | None = None

    # --- Methods for the thread of torchrun's agent ---

    @property
    def goes_on(self) -> bool:
        """Whether the newest assignment is to run the round that the agent has.

        It is False after an error of the exchange, and while a newer round is assigned. The caller
        holds the condition.
        """
        newest = self._newest
        return (
            self._error is None
            and newest is not None
            and newest.directive is Directive.RUN
            and newest.round == self._round_in_use
        )

    @property
    def interrupted(self) -> bool:
        """Whether the agent has had a round that is now over."""
        with self._condition:
            return self._round_in_use > 0 and not self.goes_on

    @property
    def ended(self) -> bool:
        """Whether there will be no further round for this node.

        Either the job has ended, or the exchange with the master has failed for good.
        """
        with self._condition:
            newest = self._newest
            return self._error is not None or (
                newest is not None and newest.directive is Directive.STOP
            )

    @property
    def started(self) -> bool:
        """Whether the exchange with the master has been started."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread that keeps the exchange with the master going."""
        self._thread.start()

    def join(self) -> None:
        """Ask for the next round, because the agent has no workers any more; do not wait for it.

        :meth:`place` waits. If the round was still going on, the workers of this node have failed.
        This is reported.
        """
        with self._condition:
            if self._round_in_use and self.goes_on:
                assert self._newest is not None
                self._phase = WorkerPhase.FAILED
                self._failure = WorkerFailure(
                    kind=FailureKind.EXIT,
                    local_rank=0,
                    rank=self._newest.node_rank,
                    pid=0,
                    exit_code=1,
                    message="failed; the log of its agent says why, and the agent restarts it",
                )
            else:
                self._phase = WorkerPhase.RUNNING if self._is_due() else WorkerPhase.IDLE
            self._joining = True
            self._report_now()

    def place(self) -> tuple[Assignment, socket.socket | None]:
        """Wait without a limit for a round that includes this node.

        Returns:
            The assignment, and on rank 0 the listening socket for the store, else None.

        Raises:
            JobEndedError: There will be no further round.
            DLRoverError: The master cannot be reached, or has refused this node.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._is_due() or self.ended)
            if self._error is not None:
                raise self._error
            newest, current = self._newest, self._current_port
            assert newest is not None
            if newest.directive is Directive.STOP:
                raise JobEndedError(newest)
            assert current is not None
            self._round_in_use = newest.round
            return newest, current.hand_over() if newest.node_rank == 0 else None

    def wait(self, done: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``done`` returns true, the round is over, or the time is up (None: no limit).

        ``done`` is called with the lock held: at first, and again after each assignment and each
        :meth:`changed`, which must be called by the code that makes it true.

        Returns:
            Whether the round goes on; also True if the time is up.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self.goes_on or done(), timeout_s)
            return self.goes_on

    def changed(self) -> None:
        """Let threads that wait check their conditions again."""
        with self._condition:
            self._condition.notify_all()

    def began(self) -> None:
        """Take note that the agent starts the workers of its round."""
        with self._condition:
            self._joining = False

    def finished(self, round_number: int) -> None:
        """Report that all workers of this node have exited with 0, and the agent will not rejoin.

        If their round is already over, the node leaves the job instead. The report is only
        requested here; the thread of the exchange sends it.
        """
        with self._condition:
            if self.goes_on and self._round_in_use == round_number:
                self._phase = WorkerPhase.SUCCEEDED
            else:
                self._leave_reason = "its workers have finished the previous round"
            self._report_now()

    def give_up(self, why: str) -> None:
        """Request a report that this node ends the job for all nodes, without waiting for it.

        A platform that can replace the node replaces it instead, after the end of its process.
        """
        with self._condition:
            self._give_up_reason = why
            self._report_now()

    def leave(self, why: str) -> None:
        """Request a report that this node leaves the job, unless it has finished or ended the job.

        The other nodes may go on without it. Of several reasons, the first one stays.
        """
        with self._condition:
            if not (self.has_finished or self._give_up_reason):
                self._leave_reason = self._leave_reason or why
                self._report_now()

    @property
    def has_finished(self) -> bool:
        """Whether all workers of this node have exited with 0."""
        return self._phase is WorkerPhase.SUCCEEDED

    def settle(self) -> bool:
        """Wait until the master has ended the job, if this node has finished or ended it.

        The wait takes ``END_REPORT_S`` at most. It has no limit on a finished node that runs the
        master or has rank 0. A node that leaves does not wait, and neither does one that gives up
        in a job of a platform.

        Returns:
            Whether the job has ended without an error of the exchange.
        """
        with self._condition:
            done = self.has_finished
            reported = done or (self._give_up_reason and self._endpoint is not None)
            if self.started and not self._leave_reason and reported:
                # The node that runs the master or serves the store stays until all have finished.
                rank = -1 if self._newest is None else self._newest.node_rank
                needed = done and (self._hosts or rank == 0)
                self._condition.wait_for(lambda: self.ended, None if needed else END_REPORT_S)
            return self.ended and self._error is None

    def close(self) -> None:
        """End the exchange, and the master if it runs here; wait for the end of the thread."""
        self._closing.set()
        if self.started:
            self._stop()
            self._thread.join()

    def _is_due(self) -> bool:
        """Return whether the newest assignment is a round that the agent has not got yet."""
        newest = self._newest
        return (
            newest is not None
            and newest.directive is Directive.RUN
            and newest.round > self._round_in_use
        )

    # --- Methods for the thread of the exchange ---

    def _run(self) -> None:
        """Run the exchange until :meth:`close`, and keep its error for the agent's thread."""
        try:
            asyncio.run(self._exchange())
        except DLRoverError as error:
            self._fail(error)
        except Exception as error:  # the agent must not wait for a dead thread
            log.exception("exchange_ended")
            self._fail(InvariantError(f"a bug of dlrover-py: {error!r}"))

    async def _exchange(self) -> None:
        """Exchange messages with the master until :meth:`close`, and run the master if it is here.

        A node that leaves sends one last report. The master goes on after a refusal of this node.

        Raises:
            DLRoverError: A setting cannot be used, the master could not be reached or refused the
                token at the start, or another program answers at its address.
            OSError: No port can be reserved, or the master's process cannot be started.
        """
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(ended.set)
        if self._closing.is_set():  # close() was called before it could call _stop
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._release)
            master = None
            if self._endpoint is not None:
                master = stack.enter_context(hosted(self._endpoint, self._secret()))
            self._hosts = master is not None
            settings, token = self._exchange_settings(master)
            client = MasterClient(
                http_client(settings, token),
                settings.node_id,
                self,
                connect_s=settings.connect_s,
            )
            self._advertise, self._own_master = settings.advertised_addr, settings.own_master
            with self._condition:
                self._next_port = ReservedPort(settings.advertised_addr, listen=True)
                self._report_now = lambda: loop.call_soon_threadsafe(client.urge)
            tasks = {asyncio.create_task(client.run()), asyncio.create_task(ended.wait())}
            if master is not None:
                tasks.add(asyncio.create_task(master.keep(set())))
            try:
                await _until(ended, tasks)
                if self._leave_reason:
                    await client.last_report(LAST_REPORT_S)
            except UnauthorizedError as error:
                if self._endpoint is None:
                    raise
                raise ConfigError(
                    f"{settings.master_addr} runs another job, or is no agent of this kind: "
                    f"expected {self._expected_command} there, and the same token on all nodes if "
                    "DLROVER_TOKEN_FILE is set"
                ) from error
            except UnreachableError as error:
                if self._endpoint is None:
                    raise
                raise UnreachableError(
                    f"{error}; expected {self._expected_command} there"
                ) from error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _wait_before_start(self, seconds: float) -> None:
        """Wait for a number of seconds in the thread of the exchange.

        Raises:
            UnreachableError: The membership was closed meanwhile.
        """
        if self._closing.wait(seconds):
            raise UnreachableError("it was closed before the endpoint's name could be resolved")

    def _secret(self) -> str:
        return self._settings.token() if self._settings.token_file is not None else ""

    def _exchange_settings(self, master: OwnMaster | None) -> tuple[Settings, str]:
        """Return the settings for the exchange, and the token of the job.

        Args:
            master: The master on this node; None if it runs elsewhere.

        Raises:
            ConfigError: A setting is missing or cannot be used.
            UnreachableError: The endpoint's name cannot be resolved in time, or the membership was
                closed meanwhile.
        """
        endpoint = self._endpoint
        if endpoint is None:
            self._settings.check()
            return self._settings, self._secret()
        endpoint.check(self._settings.ca_file)
        advertise = endpoint.advertised_addr(self._wait_before_start)
        settings = Settings(
            master_addr=endpoint.numeric() if master is None else master.address,
            own_master=endpoint.most > 1,
            node_id=endpoint.node_id(),
            advertised_addr=advertise,
            connect_s=endpoint.connect_s,
            asks_proof=bool(endpoint.host),
        )
        return settings, self._secret() or endpoint.token if master is None else master.token

    def report(self) -> AgentReport:
        """Return the present report, with the next number. See :class:`ReportingNode`."""
        with self._condition:
            self._seq += 1
            assert self._next_port is not None
            return AgentReport(
                boot_id=self._boot_id,
                incarnation=self._incarnation,
                seq=self._seq,
                have_term=self._assignment_version[0],
                have_version=self._assignment_version[1],
                follows=self._follows,
                phase=self._phase,
                nproc=1,  # unknown here; torchrun's agents agree on the workers' ranks themselves
                agent_pid=os.getpid(),
                offer=self._next_port.offer.model_copy(
                    update={"topology": self._settings.topology}
                ),
                max_restarts=ANY_RESTARTS,
                failure=self._failure,
                leaving=self._leave_reason,
                gives_up=self._give_up_reason,
            )

    def assigned(self, assignment: Assignment) -> None:
        """Follow an assignment of the master; ignore an older one. See :class:`ReportingNode`."""
        new = assignment
        with self._condition:
            if (new.term, new.version) <= self._assignment_version:
                return
            self._assignment_version, self._newest = (new.term, new.version), new
            self._incarnation = new.incarnation
            if new.directive is Directive.RUN and new.round > self._follows:
                self._take_up(new)
            self._condition.notify_all()

    def _take_up(self, new: Assignment) -> None:
        """Acknowledge a new round by a report, and reserve the port of the next one.

        If the workers of this node have finished, the report says that the node leaves the job.

        Raises:
            OSError: No port can be reserved.
        """
        self._follows, self._failure = new.round, None
        if self.has_finished:
            self._leave_reason = "its workers have finished the previous round"
        else:
            self._phase = WorkerPhase.RUNNING if self._joining else WorkerPhase.STOPPING
        # The reserved port now belongs to this round. Other nodes may connect to it before the
        # agent takes the socket.
        if self._current_port is not None:
            self._current_port.close()
        self._current_port, self._next_port = (
            self._next_port,
            ReservedPort(self._advertise, listen=True),
        )
        self._report_now()  # the master counts on this node only after this report

    def refused(self, message: str) -> None:
        """End the membership, because the master refuses this node. See :class:`ReportingNode`."""
        self._fail(SupersededError(f"refused by the master: {message}"))

    def master_unreachable(self, away_s: float, error: Exception) -> None:
        """End the membership if the master is lost. See :class:`ReportingNode`.

        A master counts as lost after ``MASTER_LOST_S``, if no platform restarts it. While workers
        run, nothing happens, because they need no master.
        """
        if not self._own_master or away_s < MASTER_LOST_S:
            return
        with self._condition:
            if self._joining or not self.goes_on or self.has_finished:
                message = f"the master has been unreachable for {away_s:.0f} s: {error}"
                self._fail(UnreachableError(message))

    def _fail(self, error: DLRoverError) -> None:
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def _release(self) -> None:
        """Release the ports, and disable the calls into the event loop that ends."""
        with self._condition:
            self._report_now = self._stop = lambda: None
            for reserved in (self._next_port, self._current_port):
                if reserved is not None:
                    reserved.close()


async def _until(ended: asyncio.Event, tasks: set[asyncio.Task[Any]]) -> None:
    """Wait until ``ended`` is set, or until a task fails.

    A task that returns does not end the wait. So a node that was refused still runs the master. The
    exception of a task that fails is raised.

    Args:
        ended: ends the wait.
        tasks: the tasks, one of which must wait for ``ended``. Those that return are removed.
    """
    while not ended.is_set():
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        tasks -= done
