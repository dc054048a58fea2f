"""The agent's server for the trainer SDK: datagrams on a Unix socket (see protocol/workers.py)."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dlrover_agent.worker_socket import WorkerSocket
from dlrover_py.protocol.agents import LoaderSettings, LoaderState, WrongValue
from dlrover_py.protocol.sdk import MAX_DATAGRAM
from dlrover_py.protocol.workers import (
    CheckpointTarget,
    WorkerProgress,
    WorkerRequest,
    read_progress,
)

log = logging.getLogger("agent.sdk")

MAX_DATAGRAMS = 1024
"""Datagrams that are read before other tasks of the event loop run.

The kernel's queue holds ``net.unix.max_dgram_qlen`` datagrams (10 by default, 512 with systemd).
"""


class CheckpointListener(Protocol):
    """Follows what the scripts of this node report about their checkpoints."""

    def staged(self, local_rank: int, step: int) -> None:
        """Take note of the newest slot that a worker has sealed.

        Args:
            local_rank: Rank of the worker on its node.
            step: Step of the checkpoint in the slot. It may be reported several times.
        """

    def stores(self, target: CheckpointTarget) -> None:
        """Take note of the place at which the script wants to store checkpoints."""

    def unsaved(self, local_rank: int, why: str) -> None:
        """Take note that a worker's newest state is not saved.

        Args:
            local_rank: Rank of the worker on its node.
            why: The reason. It is empty if the state is saved.
        """


class SdkServer(WorkerSocket):
    """A server that receives messages from the scripts of this node.

    It asks the scripts to stop, and sends them the settings of their data loaders.
    """

    def __init__(
        self,
        path: Path,
        nproc: int,
        on_step: Callable[[WorkerProgress], None],
        checkpoints: CheckpointListener,
        on_wrong: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind the socket and listen.

        Args:
            path: Path of the socket, of at most 107 bytes.
            nproc: Number of workers. Local ranks are less than this.
            on_step: Called with each valid message that has a step.
            checkpoints: Follows what the scripts report about their checkpoints.
            on_wrong: Called when :meth:`wrong` has changed.

        Raises:
            OSError: If the socket cannot be bound.
        """
        self._nproc = nproc
        self._on_step, self._checkpoints, self._on_wrong = on_step, checkpoints, on_wrong
        self._stop_pollers: dict[int, bytes] = {}
        """Socket addresses of the scripts that call ``should_stop()``, by local rank."""
        self._savers: set[int] = set()
        self._steps: dict[int, int] = {}
        self._loaders: dict[int, LoaderState] = {}
        self._wrong: dict[int, list[WrongValue]] = {}
        self._loader_settings: LoaderSettings | None = None
        self._addresses: dict[int, bytes] = {}
        """Socket addresses of the scripts with a data loader, by local rank."""
        self._informed: dict[int, tuple[bytes, int]] = {}
        """The address, and the number of the settings, that each of them was sent last."""
        self._round = 0
        self._refusal = ""
        """Why the last refused datagram was refused. The log has the same reason once a round."""
        super().__init__(path, socket.SOCK_DGRAM)
        self._read_from(self._socket)

    def _read_from(self, bound: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(bound, self.drain)

    @property
    def stop_pollers(self) -> set[int]:
        """Local ranks whose script calls ``should_stop()``; the queue is processed first."""
        self.drain()
        return set(self._stop_pollers)

    @property
    def last_step_savers(self) -> set[int]:
        """Local ranks in ``stop_pollers`` that agree on a last step and save it."""
        return self.stop_pollers & self._savers

    def last_step(self, local_rank: int) -> int | None:
        """Return the newest step that a worker of the round has reported; None if there is none."""
        self.drain()  # the last message may have arrived together with the worker's end
        return self._steps.get(local_rank)

    def loader(self, number: int) -> LoaderState | None:
        """Return the state of the slowest data loader; None if no worker of the round has one.

        Args:
            number: the round that is asked for; None is returned for another one.
        """
        self.drain()
        if number != self._round:
            return None
        states = list(self._loaders.values())
        return LoaderState.of_slowest(states) if states else None

    def wrong(self, number: int) -> list[WrongValue]:
        """Return the wrong values of a round's workers, at most 64; none for another round."""
        found = [one for rank in sorted(self._wrong) for one in self._wrong[rank]]
        return found[:64] if number == self._round else []

    def tune(self, settings: LoaderSettings | None) -> None:
        """Send these settings to the scripts with a data loader, now or once they report one."""
        self._loader_settings = settings
        self.drain()
        for local_rank in self._loaders:
            self._inform(local_rank)

    def new_round(self, number: int) -> None:
        """Accept messages of this round's workers only, from now on.

        What the workers of the last round have reported is forgotten.
        """
        self._round = number
        self._stop_pollers.clear()
        self._savers.clear()
        self._steps.clear()
        self._loaders.clear()
        self._wrong.clear()
        self._addresses.clear()
        self._informed.clear()
        self._refusal = ""

    def request_stop(self, why: str) -> None:
        """Send a request to end to the scripts that call ``should_stop()``; other scripts get none.

        The request is sent once, and a script that cannot be reached is skipped. A script reads the
        request at its next call of ``should_stop()``. There is no confirmation.
        """
        body = WorkerRequest(stop=why).encode()
        for address in self._stop_pollers.values():
            with contextlib.suppress(OSError):  # the script has ended, or has this in its queue
                self._socket.sendto(body, address)

    def _inform(self, local_rank: int) -> None:
        """Send the newest settings to a script once; its queue keeps them until it reads them."""
        settings, address = self._loader_settings, self._addresses.get(local_rank)
        if settings is None or not address:
            return
        news = (address, settings.number)
        if self._informed.get(local_rank) == news:
            return
        if self._loaders[local_rank].number < settings.number:
            try:
                self._socket.sendto(WorkerRequest(loader=settings).encode(), address)
            except OSError:
                return  # the script has ended, or its queue is full: its next report tries again
        self._informed[local_rank] = news

    def drain(self) -> None:
        """Process the messages in the queue, and at most :data:`MAX_DATAGRAMS` of them.

        Invalid messages are dropped, and a reason is logged if it differs from the last one.
        Messages of other rounds and of unknown local ranks are dropped without a log line.
        """
        for _ in range(MAX_DATAGRAMS):
            try:
                data, sender = self._socket.recvfrom(MAX_DATAGRAM + 1)
            except BlockingIOError:
                return
            try:
                progress = read_progress(data)
            except ValueError as error:
                if str(error) != self._refusal:
                    self._refusal = str(error)
                    log.warning("datagram_invalid", extra={"bytes": len(data), "why": str(error)})
                continue
            if progress.round != self._round or progress.local_rank >= self._nproc:
                continue  # a worker of an older round, or a process that is no worker
            if progress.loader is not None:
                self._loaders[progress.local_rank] = progress.loader
                self._addresses[progress.local_rank] = sender
                self._inform(progress.local_rank)
            if progress.polls and sender:
                self._stop_pollers[progress.local_rank] = sender
            if progress.step is not None:
                self._steps[progress.local_rank] = progress.step
                self._on_step(progress)
            if progress.wrong != self._wrong.get(progress.local_rank, []):
                self._wrong[progress.local_rank] = progress.wrong
                self._on_wrong()
            if progress.store is not None:
                self._checkpoints.stores(progress.store)
            self._checkpoints.unsaved(progress.local_rank, progress.unsaved)
            if progress.agrees or progress.staged is not None:
                self._savers.add(progress.local_rank)
            if progress.staged is not None:
                self._checkpoints.staged(progress.local_rank, progress.staged)

    def close(self) -> None:
        """Stop listening."""
        self._stop_reading()
