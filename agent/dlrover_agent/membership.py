"""One node's membership in a job, for an agent that is not ours: torchrun's.

A thread keeps the exchange with the master going, and runs the master if this node is the
endpoint. The agent, in its own thread, asks for a place in the next round, and whether the round
goes on. A round is acknowledged at once, even if the agent still stops its old workers: the next
round never waits for that.
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

from dlrover_agent.endpoint import Endpoint, OwnMaster, hosted
from dlrover_agent.loop import LAST_REPORT_S, MASTER_LOST_S, Reserved
from dlrover_agent.master import Line
from dlrover_agent.settings import Settings
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    Directive,
    FailureKind,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.errors import (
    Bug,
    ConfigError,
    DLRoverError,
    Superseded,
    Unauthorized,
    Unreachable,
)
from dlrover_py.rpc import Client

log = logging.getLogger("agent.membership")

FAREWELL_S = 5.0
"""The end of this node must have been told by then."""
ANY_RESTARTS = 2**31
"""The agent counts restarts itself."""


class JobEnded(Exception):
    """There will be no further round."""

    def __init__(self, told: Assignment) -> None:
        super().__init__(f"the job has ended: {told.reason}")
        self.code = int(told.exit_code)


class Membership:
    """All that both threads know is guarded by one condition."""

    def __init__(self, given: Settings, endpoint: Endpoint | None, rival: str) -> None:
        """Nothing is started yet.

        Args:
            given: the environment.
            endpoint: where the master runs; None if a platform says it.
            rival: what should run at the endpoint, in words.
        """
        self._given, self._endpoint, self._rival = given, endpoint, rival
        self._boot_id = secrets.token_hex(8)
        self._thread = threading.Thread(target=self._live, name="dlrover", daemon=True)
        self._hosts = self._heard_of_end = False
        self._advertise = ""
        self._news = threading.Condition()
        self._urge: Callable[[], object] = lambda: None
        self._stop: Callable[[], object] = lambda: None
        self._closing = threading.Event()
        self._seq = 0
        self._have = (0, 0)
        self._incarnation = 0
        self._told: Assignment | None = None
        self._follows = self._used = 0
        """Newest round that the master has told of, and the newest that the agent has had."""
        self._phase = WorkerPhase.IDLE
        self._joining = False
        self._failure: WorkerFailure | None = None
        self._leaving = self._gives_up = ""
        self._broken: DLRoverError | None = None
        self._coming: Reserved | None = None
        self._current: Reserved | None = None

    # --- the agent's thread ---

    @property
    def goes_on(self) -> bool:
        """Whether the newest word of the master is to run the round that the agent has."""
        told = self._told
        return (
            self._broken is None
            and told is not None
            and told.directive is Directive.RUN
            and told.round == self._used
        )

    @property
    def interrupted(self) -> bool:
        """Whether the agent has had a round, and it is over."""
        with self._news:
            return self._used > 0 and not self.goes_on

    @property
    def ended(self) -> bool:
        """Whether there will be no further round for this node."""
        with self._news:
            told = self._told
            return self._broken is not None or (
                told is not None and told.directive is Directive.STOP
            )

    @property
    def started(self) -> bool:
        """Whether the exchange has begun."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Begin the exchange."""
        self._thread.start()

    def join(self) -> None:
        """The agent has no workers any more; if nobody else had ended their round, they failed."""
        with self._news:
            if self._used and self.goes_on:
                assert self._told is not None
                self._phase = WorkerPhase.FAILED
                self._failure = WorkerFailure(
                    kind=FailureKind.EXIT,
                    local_rank=0,
                    rank=self._told.node_rank,
                    pid=0,
                    exit_code=1,
                    message="failed; its agent has said how, and starts its workers again",
                )
            else:
                self._phase = WorkerPhase.RUNNING if self._is_due() else WorkerPhase.IDLE
            self._joining = True
            self._urge()

    def place(self) -> tuple[Assignment, socket.socket | None]:
        """Wait for a round that this node is in; with the listening socket of its store, if this
        node is rank 0.

        Raises:
            JobEnded: there is none.
            DLRoverError: the master cannot be reached, or has given this node up.
        """
        with self._news:
            self._news.wait_for(lambda: self._is_due() or self.ended)
            if self._broken is not None:
                raise self._broken
            told, current = self._told, self._current
            assert told is not None
            if told.directive is Directive.STOP:
                raise JobEnded(told)
            assert current is not None
            self._used = told.round
            return told, current.hand_over() if told.node_rank == 0 else None

    def wait(self, done: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until that, or the end of the round; return whether the round goes on."""
        with self._news:
            self._news.wait_for(lambda: not self.goes_on or done(), timeout_s)
            return self.goes_on

    def changed(self) -> None:
        """Whoever waits must look again."""
        with self._news:
            self._news.notify_all()

    def began(self) -> None:
        """The agent starts workers."""
        with self._news:
            self._joining = False

    def finished(self, round_number: int) -> None:
        """All workers of this node have exited 0, and the agent does not come back."""
        with self._news:
            if self.goes_on and self._used == round_number:
                self._phase = WorkerPhase.SUCCEEDED
            else:
                self._leaving = "its workers have finished the round before"
            self._urge()

    def give_up(self, why: str) -> None:
        """End the job, for all nodes. Where a platform can replace this one, its end says all."""
        with self._news:
            self._gives_up = why
            self._urge()

    def leave(self, why: str) -> None:
        """Let the others go on without this node, unless it has finished or given up."""
        with self._news:
            if not (self.has_finished or self._gives_up):
                self._leaving = self._leaving or why
                self._urge()

    @property
    def has_finished(self) -> bool:
        """Whether this node's part of the job is done."""
        return self._phase is WorkerPhase.SUCCEEDED

    def settle(self) -> bool:
        """Wait until the master knows of this node's end, and needs it no more; return whether it
        does."""
        with self._news:
            done = self.has_finished
            told_of = done or (self._gives_up and self._endpoint is not None)
            if self.started and not self._leaving and told_of:
                # Who runs the master, or serves the store, stays until all have finished.
                rank = -1 if self._told is None else self._told.node_rank
                needed = done and (self._hosts or rank == 0)
                self._news.wait_for(lambda: self.ended, None if needed else FAREWELL_S)
            return self.ended and self._broken is None

    def close(self) -> None:
        """End the exchange, and the master if it runs here."""
        self._closing.set()
        if self.started:
            self._stop()
            self._thread.join()

    def _is_due(self) -> bool:
        told = self._told
        return told is not None and told.directive is Directive.RUN and told.round > self._used

    # --- the exchange's thread ---

    def _live(self) -> None:
        try:
            asyncio.run(self._keep_in_touch())
        except DLRoverError as error:
            self._break(error)
        except Exception as error:  # the agent must not wait for a dead thread
            log.exception("exchange_ended")
            self._break(Bug(f"a bug of dlrover-py: {error!r}"))

    async def _keep_in_touch(self) -> None:
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(ended.set)
        if self._closing.is_set():  # before there was anything to stop
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self._hang_up)
            master = None
            if self._endpoint is not None:
                master = stack.enter_context(hosted(self._endpoint, self._secret()))
            self._hosts = master is not None
            site, token = self._site(master)
            line = Line(
                Client(site.master_addr, token=token, ca_file=site.ca_file),
                site.node_id,
                self._report,
                self._assigned,
                lambda words: self._break(Superseded(f"refused by the master: {words}")),
                connect_s=site.connect_s,
                lost=self._lost if site.own_master else None,
                lost_s=MASTER_LOST_S,
            )
            self._advertise = site.advertise
            with self._news:
                self._coming = Reserved(site.advertise, listen=True)
                self._urge = lambda: loop.call_soon_threadsafe(line.urge)
            tasks = {asyncio.create_task(line.run()), asyncio.create_task(ended.wait())}
            if master is not None:
                tasks.add(asyncio.create_task(master.keep(set())))
            try:
                await _until(ended, tasks)
                if self._leaving:
                    await line.last_report(LAST_REPORT_S)
            except Unauthorized as error:
                if self._endpoint is None:
                    raise
                raise ConfigError(
                    f"{site.master_addr} runs another job, or is no agent of its kind: expected "
                    f"{self._rival} there, and the same token on all nodes if DLROVER_TOKEN_FILE "
                    "is set"
                ) from error
            except Unreachable as error:
                if self._endpoint is None:
                    raise
                raise Unreachable(f"{error}; expected {self._rival} there") from error
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise Unreachable("it was closed before the endpoint's name meant anything")

    def _secret(self) -> str:
        return self._given.token() if self._given.token_file is not None else ""

    def _site(self, master: OwnMaster | None) -> tuple[Settings, str]:
        """Where the master is, who we are, and the job's token."""
        e = self._endpoint
        if e is None:
            self._given.check()
            return self._given, self._secret()
        e.check(self._given.ca_file)
        advertise = e.advertised(self._pause)
        site = Settings(
            master_addr=e.numeric() if master is None else master.address,
            own_master=e.most > 1,
            node_id=e.node_id(),
            advertise=advertise,
            connect_s=e.connect_s,
        )
        return site, self._secret() or e.token if master is None else master.token

    def _report(self) -> AgentReport:
        with self._news:
            self._seq += 1
            assert self._coming is not None
            return AgentReport(
                boot_id=self._boot_id,
                incarnation=self._incarnation,
                seq=self._seq,
                have_term=self._have[0],
                have_version=self._have[1],
                follows=self._follows,
                phase=self._phase,
                nproc=1,  # not known here: the agents agree on the workers' ranks among themselves
                agent_pid=os.getpid(),
                offer=self._coming.offer,
                max_restarts=ANY_RESTARTS,
                failure=self._failure,
                leaving=self._leaving,
                gives_up=self._gives_up,
            )

    def _assigned(self, new: Assignment) -> None:
        with self._news:
            if (new.term, new.version) <= self._have:
                return
            self._have, self._told = (new.term, new.version), new
            self._incarnation = new.incarnation
            if new.directive is Directive.RUN and new.round > self._follows:
                self._take_up(new)
            self._news.notify_all()

    def _take_up(self, new: Assignment) -> None:
        self._follows, self._failure = new.round, None
        if self.has_finished:
            self._leaving = "its workers have finished the round before"
        else:
            self._phase = WorkerPhase.RUNNING if self._joining else WorkerPhase.STOPPING
        # The offer belongs to this round now: others may connect before our agent comes for it.
        if self._current is not None:
            self._current.close()
        self._current, self._coming = self._coming, Reserved(self._advertise, listen=True)
        self._urge()  # the master waits for it before it counts on this node again

    def _lost(self, words: str) -> None:
        """Workers that run need no master; what comes after them does."""
        with self._news:
            if self._joining or not self.goes_on or self.has_finished:
                self._break(Unreachable(words))

    def _break(self, error: DLRoverError) -> None:
        with self._news:
            self._broken = self._broken or error
            self._news.notify_all()

    def _hang_up(self) -> None:
        with self._news:
            self._urge = self._stop = lambda: None
            for reserved in (self._coming, self._current):
                if reserved is not None:
                    reserved.close()


async def _until(ended: asyncio.Event, tasks: set[asyncio.Task[Any]]) -> None:
    """Refused or not, who runs the master goes on doing so."""
    while not ended.is_set():
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        tasks -= done
