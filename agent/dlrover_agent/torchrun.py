"""``torchrun --rdzv-backend=dlrover``: torchrun's own agent and workers, with our membership.

torchrun finds :func:`backend` through the entry-point group ``torchrun.handlers``. Its agent asks
for the next round when it has to start workers, and looks 10 times a second whether "nodes are
waiting", which is how it is told that its round is over: it stops its workers and asks again.

Each round has a fresh store, which rank 0's agent serves at the port that it had offered. The
agents meet there first, and only then torchrun gets it: its agent waits on a store without
listening to anything else, and a node that is lost before must not take the others along. See
docs/torchrun-backend.md.
"""

import atexit
import contextlib
import functools
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's, typed
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from dlrover_agent import flags
from dlrover_agent.endpoint import JOIN_TIMEOUT_S, Endpoint
from dlrover_agent.membership import FAREWELL_S, JobEnded, Membership
from dlrover_agent.settings import Settings
from dlrover_py.protocol.agents import Assignment
from dlrover_py.protocol.errors import Bug, DLRoverError, ExitCode, Superseded
from dlrover_py.telemetry import setup

NAME = "dlrover"
MEETING_S = 120.0
"""All agents of a round have come by then: torchrun takes 30 s and more to stop workers that ignore
SIGTERM."""
PATIENCE_S = 10.0
"""A store that breaks is a node that is lost, which the master says within its lease and this."""


def backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """What torchrun calls to make a handler (the entry point)."""
    return Handler


class Handler(RendezvousHandler):
    """One node of a job, as torchrun's agent sees it; all methods are for its main thread."""

    def __init__(self, params: RendezvousParameters) -> None:
        """Take in the settings; the exchange starts with the first rendezvous.

        Raises:
            ConfigError: they make no sense.
        """
        given = Settings.from_environment()
        setup("dlrover", level=given.log_level or logging.WARNING, logger="agent")
        endpoint = None if given.in_job else _endpoint(params)
        self._params, self._in_job = params, given.in_job
        connect_s = given.connect_s if endpoint is None else endpoint.connect_s
        self._read_timeout = timedelta(seconds=connect_s)
        rival = f"torchrun --rdzv-backend={NAME} --rdzv-id={params.run_id}"
        self._node = Membership(given, endpoint, rival)
        self._meeting: _Meeting | None = None

    def get_backend(self) -> str:
        """Return the name for ``--rdzv-backend``."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """The round's store serves the workers too: it is a fresh one each time."""
        return True

    def get_run_id(self) -> str:
        """Return ``--rdzv-id``."""
        return str(self._params.run_id)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round is over whose workers run here: a node was lost or has come,
        workers failed elsewhere, or the job has ended."""
        return int(self._node.interrupted)

    def is_closed(self) -> bool:
        """Whether there will be no further round."""
        return self._node.ended

    def set_closed(self) -> None:
        """End the job, for all nodes."""
        self._node.give_up("its rendezvous was closed")

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round that this node is in, and for all its agents.

        Raises:
            RendezvousClosedError: the job has failed.
            RendezvousTimeoutError: too few nodes have come.
            RendezvousConnectionError: the master, or rank 0's store, cannot be reached.
            RendezvousStateError: the master has given this node up.
            SystemExit: the job has succeeded, and did not need this node.
        """
        if not self._node.started:
            self._node.start()
            # torchrun does not call `shutdown` when it is signalled.
            atexit.register(self._close, "its torchrun has ended")
        self._meeting = None  # torchrun's agent drops its own reference once it has the next one
        self._node.join()
        since = time.monotonic()
        try:
            place, store = self._next_round()
        except JobEnded as error:
            if error.code == ExitCode.OK:
                # RendezvousGracefulExitError is for this; torchrun 2.13 dies of it.
                raise SystemExit(0) from error
            late = time.monotonic() - since >= float(
                self._params.get("join_timeout", JOIN_TIMEOUT_S)
            )
            kind = RendezvousTimeoutError if late else RendezvousClosedError
            raise kind(str(error)) from error
        except (Superseded, Bug) as error:
            raise RendezvousStateError(str(error)) from error
        except DLRoverError as error:
            raise RendezvousConnectionError(str(error)) from error
        self._node.began()
        finished = functools.partial(self._node.finished, place.round)
        info = RendezvousStoreInfo(place.master_addr, place.master_port)
        return RendezvousInfo(_AgentStore(store, finished), place.node_rank, place.nnodes, info)

    def shutdown(self) -> bool:
        """Let go of the job: this node's part of it is done, or has failed for good.

        Returns:
            Whether the others know.
        """
        error = sys.exc_info()[1]  # torchrun calls this while that is on its way out
        if isinstance(error, ChildFailedError):
            self._node.give_up("its workers failed, and torchrun's restarts are used up")
        elif error is not None and self._in_job:
            self._node.give_up(repr(error))  # not with notice: its replacement is charged
        return self._close(f"torchrun ends: {error!r}" if error is not None else "it was shut down")

    def _close(self, why: str) -> bool:
        atexit.unregister(self._close)
        self._node.leave(why)
        heard = self._node.settle()
        if self._node.has_finished and self._meeting is not None:
            self._meeting.leave()
        self._node.close()
        return heard

    def _next_round(self) -> tuple[Assignment, TCPStore]:
        while True:
            place, listening = self._node.place()
            meeting = _Meeting(place, listening, self._node.changed)
            goes_on = self._node.wait(meeting.over.is_set)
            if goes_on and meeting.store is not None:
                self._meeting = meeting
                meeting.store.set_timeout(self._read_timeout)
                return place, meeting.store
            if goes_on and self._node.wait(bool, place.lease_s + PATIENCE_S):
                meeting.abandon()
                raise RendezvousConnectionError(
                    f"round {place.round}: expected the store of node rank 0 at "
                    f"{place.master_addr}:{place.master_port}, and {place.nnodes} agents there: "
                    f"{meeting.error}; see --local-addr, and whether nodes reach each other"
                )
            meeting.abandon()


class _AgentStore(PrefixStore):
    """A round's store as torchrun's agent has it.

    The agent adds to it in one place only: its exit barrier. So it is known at once that its
    workers have finished, and not only when those of all nodes have.
    """

    def __init__(self, store: Store, finished: Callable[[], None]) -> None:
        super().__init__("dlrover/agent", store)
        self._finished = finished

    def add(self, key: str, amount: int) -> int:
        """Count up, and tell."""
        self._finished()
        return super().add(key, amount)


class _Meeting:
    """All agents of one round come to its store."""

    def __init__(
        self,
        place: Assignment,
        listening: socket.socket | None,
        changed: Callable[[], None],
    ) -> None:
        """Go there, in a thread of its own.

        Args:
            place: what the master has said of the round.
            listening: the store's socket, on rank 0's node.
            changed: called when it is over.
        """
        self._place, self._listening = place, listening
        self._changed = changed
        self.over = threading.Event()
        self.store: TCPStore | None = None
        """Of the round, once all have come."""
        self.error = ""
        threading.Thread(target=self._meet, name="dlrover-meeting", daemon=True).start()

    def abandon(self) -> None:
        """The round is over before it has begun."""
        if self._listening is not None and not self.over.is_set():
            with contextlib.suppress(DistError):  # opened, so that thread and store end
                self._connect(timedelta(seconds=FAREWELL_S)).set("dlrover/came", "")

    def leave(self) -> None:
        """This agent is done; the store stays until all are, for a moment at most."""
        with contextlib.suppress(DistError):
            assert self.store is not None
            self._count(self.store, "left")
            if self._listening is not None:
                self.store.wait(["dlrover/left"], timedelta(seconds=FAREWELL_S))

    def _meet(self) -> None:
        try:
            fd = None if self._listening is None else self._listening.detach()
            store = self._connect(timedelta(seconds=MEETING_S), fd)
            self._count(store, "came")
            store.wait(["dlrover/came"], timedelta(seconds=MEETING_S))
            self.store = store
        except Exception as error:  # noqa: BLE001 - torch's stores raise what they like
            self.error = str(error).partition("\n")[0]
        finally:
            self.over.set()
            self._changed()

    def _connect(self, timeout: timedelta, serve_fd: int | None = None) -> TCPStore:
        return TCPStore(
            self._place.master_addr,
            self._place.master_port,
            is_master=serve_fd is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=serve_fd,
        )

    def _count(self, store: Store, what: str) -> None:
        """The last one of all opens the gate."""
        if store.add(f"dlrover/{what}/number", 1) == self._place.nnodes:
            store.set(f"dlrover/{what}", "")


def _endpoint(params: RendezvousParameters) -> Endpoint:
    """What torchrun's parameters say of the rendezvous, as elastic-run reads them.

    Raises:
        ConfigError: they contradict each other, or make no sense.
    """
    argv = [
        f"--nnodes={params.min_nodes}:{params.max_nodes}",
        f"--rdzv-backend={NAME}",
        f"--rdzv-endpoint={params.endpoint}",
        # elastic-run counts workers in another way: its agents get another token.
        f"--rdzv-id=torchrun {params.run_id}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in params.config.items()),
    ]
    if params.local_addr:
        argv.append(f"--local-addr={params.local_addr}")
    if not params.endpoint and params.max_nodes == 1:
        argv.append("--standalone")
    return Endpoint.of(flags.parse([*argv, "script"], {}))
