"""The TCP store of one round: a separate process on the node of rank 0.

Each round has a new store, which ends with the round. A store that is used again would still have
the keys of the round that failed. The store is not part of a worker, so workers may end in any
order. It is forked from the zygote, a process that has already imported torch, or started cold as a
new program. See docs/warm-start.md.
"""

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.forks import FORK_S, ForkedProcess
from dlrover_agent.warm.observer import raise_task_error
from dlrover_agent.warm.pool import WarmPool
from dlrover_agent.warm.script import BOOT
from dlrover_py.process.identity import ProcessId
from dlrover_py.process.starter import Starter, kill_and_reap

READY_S = 120.0
"""Seconds that a store has to start. A cold one loads torch, maybe on a busy machine."""


def available() -> bool:
    """Return whether this interpreter can serve a store. The check does not import torch."""
    return importlib.util.find_spec("torch") is not None


class TCPStoreProcess:
    """The process that serves the TCP store of one round.

    If there is a zygote that has torch, the process is forked immediately. Otherwise it starts with
    the first client, so that a job without a use for the store does not import torch.
    """

    def __init__(
        self,
        listening: socket.socket,
        warm: WarmPool,
        starter: Starter,
        *,
        output: Path,
        children: ChildRegistry,
        on_end: Callable[[str], None],
    ) -> None:
        """Begin to start the store, or have its first client start it.

        It is started now if a zygote can fork it.

        Args:
            listening: Listening socket for the clients. It is closed when the store ends.
            warm: Pool whose zygote forks the store, if there is one.
            starter: Starts the process cold.
            output: File for the process's output.
            children: Registry of the agent's child processes. The store is added.
            on_end: Called with the reason if the process ended and :meth:`end` was not called.
        """
        self._listening, self._warm = listening, warm
        self._output, self._children, self._on_end = output, children, on_end
        self._starter = starter
        self._session: ProcessId | None = None
        self.served = False
        """Whether the process was started."""
        self._starting: asyncio.Task[None] | None = None
        self._pidfd = -1
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = self._ended_by_caller = False
        if warm.ready and warm.has_torch:
            self.start()
        else:
            self._waiting = True
            asyncio.get_running_loop().add_reader(listening, self.start)

    def start(self) -> None:
        """Begin to start the process in a task, if it was not started before.

        After :meth:`end` nothing happens. A failure is passed on to ``on_end``.
        """
        if self._starting is not None or self._ended_by_caller:
            return
        self._stop_waiting()
        self._starting = asyncio.create_task(self._start())
        self._starting.add_done_callback(raise_task_error)

    async def forked(self) -> None:
        """Wait until no fork of the store is under way, or :data:`FORK_S` seconds have passed."""
        if self._starting is not None:
            await asyncio.wait([self._starting], timeout=FORK_S)

    async def _start(self) -> None:
        """Fork the store from a zygote, or start it cold, and watch its process.

        If it cannot be started, its socket is closed and ``on_end`` is called. A process that does
        not serve within ``READY_S`` is killed.
        """
        child = None
        port = self._listening.getsockname()[1]
        try:
            if self._warm.ready and self._warm.has_torch:
                child = await self._warm.fork_store(self._listening.fileno(), port)
            if child is None:
                child = await self._start_cold(port)
            self._pidfd = os.pidfd_open(child.pid)
        except OSError as error:  # OverdueError, too
            if child is not None:
                child.control.close()  # it ends with its control socket
            self._listening.close()
            self._on_end(f"it cannot be started: {error.strerror or error}")
            return
        self._control, self._process = child.control, child.process
        self.served = True
        self._session = ProcessId.of(child.pid)
        self._children.non_worker_pids.add(child.pid)
        self._children.add_session(self._session)
        child.go()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._on_exit, child)
        self._timer = loop.call_later(READY_S, self._kill_if_not_serving, child)

    async def _start_cold(self, port: int) -> ForkedProcess:
        """Start the store as a new process, which waits for :meth:`ForkedProcess.go`.

        Raises:
            OSError: The process cannot be started, or not within ``START_S`` of the starter.
        """
        listening = self._listening.dup()  # for the thread: the round may end before the start

        def make() -> ForkedProcess:
            agent_end, store_end = socket.socketpair()
            fds = [listening.fileno(), store_end.fileno()]
            argv = [sys.executable, "-u", "-c", BOOT.format(module="store_server")]
            argv += [str(os.getpid()), str(port), *map(str, fds)]
            try:
                with listening, store_end, self._output.open("wb") as output_file:
                    process = subprocess.Popen(
                        argv,
                        env=self._warm.program.env,
                        pass_fds=fds,
                        stdin=subprocess.DEVNULL,
                        stdout=output_file,
                        stderr=output_file,
                        start_new_session=True,
                    )
            except BaseException:
                agent_end.close()
                raise
            return ForkedProcess(process.pid, agent_end, process)

        return await self._starter.start(make, undo=_undo_start, not_called=listening.close)

    def _kill_if_not_serving(self, child: ForkedProcess) -> None:
        """Kill a process that does not serve yet."""
        if not child.started():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _on_exit(self, child: ForkedProcess) -> None:
        """Reap the process, close its socket, and report its exit code. It is not started again.

        The report follows in a task, with the last line of the process's output.
        """
        code = child.wait()
        self._stop_watching()
        self._unregister()
        # Otherwise clients would wait for an answer as long as the socket listens.
        self._listening.close()
        self._starting = asyncio.create_task(self._report_exit(code))
        self._starting.add_done_callback(raise_task_error)

    async def _report_exit(self, code: int) -> None:
        last_line = await self._warm.last_line(self._output)
        if not self._ended_by_caller:
            self._on_end(f"exit code {code} {last_line}")

    def _stop_waiting(self) -> None:
        if self._waiting:
            self._waiting = False
            asyncio.get_running_loop().remove_reader(self._listening)

    def _stop_watching(self) -> None:
        """Stop watching the process, and release its descriptors and its timer."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._control is not None:
            self._control.close()
        if self._timer is not None:
            self._timer.cancel()

    def _unregister(self) -> None:
        """Remove the process from the registry."""
        if self._session is not None:
            self._children.non_worker_pids.discard(self._session.pid)
            self._children.remove_session(self._session)
            self._session = None

    def end(self) -> None:
        """Kill the store, because its round is over, and close its socket.

        The method does not wait for the end of the process, and ``on_end`` is not called.
        """
        self._ended_by_caller = True
        self._stop_waiting()
        if self._starting is not None:
            self._starting.cancel()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._stop_watching()
            self._unregister()
            if self._process is not None:
                self._warm.reap_later(self._process)
        self._listening.close()


def _undo_start(child: ForkedProcess) -> None:
    """Kill a store whose start was given up. Runs in the thread."""
    child.control.close()
    assert child.process is not None
    kill_and_reap(child.process)


class TCPStores:
    """The stores of the rounds in which this node has rank 0, one after the other."""

    def __init__(
        self,
        warm: WarmPool,
        scratch: Path,
        children: ChildRegistry,
        on_end: Callable[[str], None],
    ) -> None:
        """Create the object, without a store.

        Args:
            warm: Pool whose zygote forks the stores, if there is one.
            scratch: Folder for the stores' output.
            children: Registry of the agent's child processes. The stores are added.
            on_end: Called with the reason if a store ended by itself.
        """
        self._warm, self._output, self._children = warm, scratch / "store.log", children
        self._on_end = on_end
        self._starter = Starter("store")
        self._store: TCPStoreProcess | None = None
        self._listening: socket.socket | None = None
        """Listening socket for the store of the round; None once the store has it."""
        self._is_check = self._used = False

    def new_round(self, listening: socket.socket | None, *, check: bool) -> None:
        """End the store of the last round, and keep the socket for the next one.

        Args:
            listening: Listening socket for the store; None if another node has the store.
            check: Whether the round is a check of the nodes. Its use of the store says nothing
                about the script.
        """
        self.end()
        self._listening, self._is_check = listening, check

    def serve(self, *, now: bool) -> None:
        """Create the store of the round, if this node has it; its process may start later.

        Args:
            now: Whether to start it now instead of with its first client. It also starts now if
                an earlier round has used its store.
        """
        if self._listening is None:
            return
        self._store = TCPStoreProcess(
            self._listening,
            self._warm,
            self._starter,
            output=self._output,
            children=self._children,
            on_end=self._on_end,
        )
        self._listening = None
        if now or self._used:
            self._store.start()

    def start(self) -> None:
        """Begin to start the round's store, because a worker has imported torch.

        If it was started before, or another node has it, nothing happens.
        """
        if self._store is not None:
            self._store.start()

    async def forked(self) -> None:
        """Wait until no fork of the store is under way, or :data:`FORK_S` seconds have passed."""
        if self._store is not None:
            await self._store.forked()

    @property
    def has_store(self) -> bool:
        """Whether this node has the store of the round."""
        return self._store is not None

    def close_unused(self) -> None:
        """Close the socket of a round whose store was not created."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def end(self) -> None:
        """Kill the store of the round, because the round is over; do nothing without a store."""
        if self._store is not None:
            self._used |= self._store.served and not self._is_check
            self._store.end()
            self._store = None
