"""The rendezvous handler of ``torchrun --rdzv-backend=dlrover``.

torchrun keeps its own agent and workers, and DLRover's master decides the membership. torchrun
finds :func:`dlrover_agent.torch_compat.backend` through the entry-point group
``torchrun.handlers``. Its agent asks for the next round when it has to start workers. Ten times a
second it asks whether "nodes are waiting". The handler uses this to report that the round is over:
the agent then stops its workers and asks for the next round.

Each round has a new store, which rank 0's agent serves at the port that it has offered. All agents
connect to the store before torchrun gets it. The reason is that torchrun's agent waits on a store
without reacting to anything else. A node that is lost before that must not block the others. See
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

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # with type annotations
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
from dlrover_agent.settings import Settings
from dlrover_agent.standalone import JOIN_TIMEOUT_S, Endpoint
from dlrover_agent.torch_compat.membership import JobEndedError, Membership
from dlrover_py.protocol.agents import Assignment
from dlrover_py.protocol.errors import DLRoverError, ExitCode, InvariantError, SupersededError
from dlrover_py.protocol.timing import END_REPORT_S
from dlrover_py.telemetry import setup

NAME = "dlrover"
"""Name of the backend, for ``--rdzv-backend``."""
GATHER_S = 120.0
"""Seconds within which all agents of a round must connect to its store.

torchrun takes 30 s and more to stop workers that ignore SIGTERM."""
PATIENCE_S = 10.0
"""Seconds, in addition to the lease, to learn from the master why the store of a round broke.

A broken store usually means a lost node, which the master reports within its lease."""


class Handler(RendezvousHandler):
    """One node of a job, as torchrun's agent sees it.

    All methods must be called in torchrun's main thread.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        """Read the settings; the exchange with the master starts with the first rendezvous.

        Raises:
            ConfigError: A setting cannot be used.
        """
        given = Settings.from_environment()
        setup("dlrover", level=given.log_level or logging.WARNING, logger="agent")
        endpoint = None if given.in_job else _endpoint(params)
        self._params, self._in_job = params, given.in_job
        connect_s = given.connect_s if endpoint is None else endpoint.connect_s
        self._read_timeout = timedelta(seconds=connect_s)
        rival = f"torchrun --rdzv-backend={NAME} --rdzv-id={params.run_id}"
        self._node = Membership(given, endpoint, rival)
        self._gathering: _AgentGathering | None = None

    def get_backend(self) -> str:
        """Return the name for ``--rdzv-backend``."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Whether the workers use the round's store too; always True, as each round has its own."""
        return True

    def get_run_id(self) -> str:
        """Return ``--rdzv-id``."""
        return str(self._params.run_id)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the round of the running workers is over, else 0; never a number of nodes.

        A round ends when a node is lost or joins, when workers fail on another node, or when the
        job ends. Before the first round the result is 0.
        """
        return int(self._node.interrupted)

    def is_closed(self) -> bool:
        """Return whether there will be no further round for this node."""
        return self._node.ended

    def set_closed(self) -> None:
        """Ask the master to end the job for all nodes, with the next report; do not wait for it."""
        self._node.give_up("its rendezvous was closed")

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round that includes this node, and for all its agents.

        The first call starts the thread that exchanges messages with the master, and the master
        itself if this node is the endpoint. If the last round was still going on, the call reports
        that this node's workers have failed.

        Returns:
            The store, the node rank and the number of nodes of the round.

        Raises:
            RendezvousClosedError: The job has failed.
            RendezvousTimeoutError: The job has failed after this node waited for ``join_timeout``,
                usually because too few nodes have joined.
            RendezvousConnectionError: The master, or rank 0's store, cannot be reached, or a
                setting cannot be used.
            RendezvousStateError: The master has refused this node, or there is a bug in DLRover.
            SystemExit: The job has succeeded without this node.
        """
        if not self._node.started:
            self._node.start()
            # torchrun does not call `shutdown` when it is signalled.
            atexit.register(self._close, "its torchrun has ended")
        self._gathering = None  # torchrun's agent drops its own reference once it has the next one
        self._node.join()
        since = time.monotonic()
        try:
            assignment, store = self._next_round()
        except JobEndedError as error:
            if error.code == ExitCode.OK:
                # RendezvousGracefulExitError is meant for this, but torchrun 2.13 crashes on it.
                raise SystemExit(0) from error
            late = time.monotonic() - since >= float(
                self._params.get("join_timeout", JOIN_TIMEOUT_S)
            )
            kind = RendezvousTimeoutError if late else RendezvousClosedError
            raise kind(str(error)) from error
        except (SupersededError, InvariantError) as error:
            raise RendezvousStateError(str(error)) from error
        except DLRoverError as error:
            raise RendezvousConnectionError(str(error)) from error
        self._node.began()
        finished = functools.partial(self._node.finished, assignment.round)
        info = RendezvousStoreInfo(assignment.master_addr, assignment.master_port)
        return RendezvousInfo(
            _AgentStore(store, finished), assignment.node_rank, assignment.nnodes, info
        )

    def shutdown(self) -> bool:
        """Leave the job, because this node has finished or has finally failed.

        The call blocks until the master has ended the job, or for a few seconds. On the node of
        rank 0 or of the master there is no limit if the workers have succeeded.

        Returns:
            Whether the master has confirmed the end of the job.
        """
        error = sys.exc_info()[1]  # torchrun calls this while it handles the exception
        if isinstance(error, ChildFailedError):
            self._node.give_up("its workers failed, and torchrun's restarts are used up")
        elif error is not None and self._in_job:
            # The node leaves without notice, so that its replacement counts against the budget.
            self._node.give_up(repr(error))
        return self._close(f"torchrun ends: {error!r}" if error is not None else "it was shut down")

    def _close(self, why: str) -> bool:
        """Leave the job, and end the exchange; return whether the end of the job is known.

        The call waits as :meth:`Membership.settle` does. It also runs at the end of the
        interpreter.
        """
        atexit.unregister(self._close)
        self._node.leave(why)
        confirmed = self._node.settle()
        if self._node.has_finished and self._gathering is not None:
            self._gathering.leave()
        self._node.close()
        return confirmed

    def _next_round(self) -> tuple[Assignment, TCPStore]:
        """Wait for a round whose agents have all connected to its store.

        A round that ends before that is dropped, and the next one is awaited. If the agents have
        not all connected, the master gets its lease and ``PATIENCE_S`` to end the round.

        Raises:
            JobEndedError: There will be no further round.
            RendezvousConnectionError: The agents have not all connected, although the round goes
                on.
            DLRoverError: The master cannot be reached, or has refused this node.
        """
        while True:
            assignment, listening = self._node.place()
            gathering = _AgentGathering(assignment, listening, self._node.changed)
            goes_on = self._node.wait(gathering.over.is_set)
            if goes_on and gathering.store is not None:
                self._gathering = gathering
                gathering.store.set_timeout(self._read_timeout)
                return assignment, gathering.store
            if goes_on and self._node.wait(bool, assignment.lease_s + PATIENCE_S):
                gathering.abandon()
                raise RendezvousConnectionError(
                    f"round {assignment.round}: expected the store of node rank 0 at "
                    f"{assignment.master_addr}:{assignment.master_port}, and {assignment.nnodes} "
                    f"agents there: {gathering.error}; see --local-addr, and whether nodes reach "
                    "each other"
                )
            gathering.abandon()


class _AgentStore(PrefixStore):
    """The store of a round for torchrun's agent, which notices the agent's exit barrier.

    The agent calls :meth:`add` only in its exit barrier, after its workers have finished. So this
    end is known before the workers of all nodes have finished.
    """

    def __init__(self, store: Store, finished: Callable[[], None]) -> None:
        super().__init__("dlrover/agent", store)
        self._finished = finished

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, after a report that the workers of this node have finished.

        Every call is taken for the exit barrier, whatever its key is.
        """
        self._finished()
        return super().add(key, amount)


class _AgentGathering:
    """The connection of all agents of a round to its store, in a thread."""

    def __init__(
        self,
        place: Assignment,
        listening: socket.socket | None,
        changed: Callable[[], None],
    ) -> None:
        """Start the thread that connects to the store, and serves it on rank 0.

        Args:
            place: Assignment with the round and this node's rank.
            listening: Listening socket of the store on rank 0's node; None on the others.
            changed: Function that is called when the thread has finished.
        """
        self._place, self._listening = place, listening
        self._changed = changed
        self.over = threading.Event()
        """Set when the thread has finished."""
        self.store: TCPStore | None = None
        """Store of the round after all agents have connected; None before, or after an error."""
        self.error = ""
        """Why the agents have not all connected; empty if there was no error."""
        threading.Thread(target=self._run, name="dlrover-meeting", daemon=True).start()

    def abandon(self) -> None:
        """Have the thread end, because the round is over before all agents have connected.

        Only rank 0's agent does so, which releases the others too. It waits ``END_REPORT_S`` at
        most for its connection, and not for the thread. Errors are ignored.
        """
        if self._listening is not None and not self.over.is_set():
            # The key releases the thread, which then ends together with the store.
            with contextlib.suppress(DistError):
                self._connect(timedelta(seconds=END_REPORT_S)).set("dlrover/came", "")

    def leave(self) -> None:
        """Count this agent as finished; on rank 0 wait at most ``END_REPORT_S`` for the others.

        Errors of the store are ignored.
        """
        with contextlib.suppress(DistError):
            assert self.store is not None
            self._count(self.store, "left")
            if self._listening is not None:
                self.store.wait(["dlrover/left"], timedelta(seconds=END_REPORT_S))

    def _run(self) -> None:
        """Connect to the store, and wait until all agents have done so. This runs in a thread.

        Each step may take ``GATHER_S``. The result is in ``store``, or the reason for a failure in
        ``error``.
        """
        try:
            fd = None if self._listening is None else self._listening.detach()
            store = self._connect(timedelta(seconds=GATHER_S), fd)
            self._count(store, "came")
            store.wait(["dlrover/came"], timedelta(seconds=GATHER_S))
            self.store = store
        except Exception as error:  # noqa: BLE001 - torch's stores raise what they like
            self.error = str(error).partition("\n")[0]
        finally:
            self.over.set()
            self._changed()

    def _connect(self, timeout: timedelta, serve_fd: int | None = None) -> TCPStore:
        """Connect to the store at the assigned address, and serve it if there is a descriptor.

        Raises:
            DistError: The store cannot be reached within the timeout.
        """
        connect = functools.partial(
            TCPStore,
            self._place.master_addr,
            self._place.master_port,
            is_master=serve_fd is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=serve_fd,
        )
        try:
            return connect()
        except NotImplementedError:  # torch 2.6: libuv does not take a listening socket
            return connect(use_libuv=False)

    def _count(self, store: Store, what: str) -> None:
        """Count this agent; the last agent of the round sets the key that all wait for."""
        if store.add(f"dlrover/{what}/number", 1) == self._place.nnodes:
            store.set(f"dlrover/{what}", "")


def _endpoint(params: RendezvousParameters) -> Endpoint:
    """Return the endpoint from torchrun's parameters, by the rules of ``elastic-run``.

    Raises:
        ConfigError: The parameters contradict each other, or a value cannot be used.
    """
    argv = [
        f"--nnodes={params.min_nodes}:{params.max_nodes}",
        f"--rdzv-backend={NAME}",
        f"--rdzv-endpoint={params.endpoint}",
        # The run id has a prefix, so that elastic-run's agents have another token and cannot mix
        # with torchrun's. They count workers in another way.
        f"--rdzv-id=torchrun {params.run_id}",
        "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in params.config.items()),
    ]
    if params.local_addr:
        argv.append(f"--local-addr={params.local_addr}")
    if not params.endpoint and params.max_nodes == 1:
        argv.append("--standalone")
    return Endpoint.of(flags.parse([*argv, "script"], {}))
