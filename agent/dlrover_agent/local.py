"""The agent's end of the trainer SDK: datagrams on a unix socket. See protocol/workers.py."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from dlrover_py.protocol.workers import MAX_DATAGRAM, News, Order, Store

log = logging.getLogger("agent.local")


class Local:
    """Listens to the scripts of this node, and tells them when to stop."""

    def __init__(
        self,
        path: Path,
        nproc: int,
        heard: Callable[[News], None],
        staged: Callable[[int, int], None] = lambda *_: None,
        stores: Callable[[Store], None] = lambda *_: None,
        unsaved: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        """Listen.

        Args:
            path: of the socket; short (107 bytes at most).
            nproc: number of workers; local ranks are below it.
            heard: takes each valid message with a step.
            staged: takes local rank and step of the newest slot that a worker has sealed; the same
                may be said several times.
            stores: takes where the script wants checkpoints to go.
            unsaved: takes local rank, and why what it has is not saved; empty if it is.
        """
        self._nproc = nproc
        self._heard, self._staged, self._stores, self._unsaved = heard, staged, stores, unsaved
        self._asking: dict[int, bytes] = {}
        self._saving: set[int] = set()
        self._steps: dict[int, int] = {}
        self._round = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        os.chmod(path, 0o600)
        asyncio.get_running_loop().add_reader(self._socket, self.drain)

    @property
    def asking(self) -> set[int]:
        """Local ranks whose script asks ``should_stop()``."""
        self.drain()
        return set(self._asking)

    @property
    def agreeing(self) -> set[int]:
        """Those of them that agree on a last step, and save it: with a `Checkpointer`."""
        return self.asking & self._saving

    def last_step(self, local_rank: int) -> int | None:
        """Newest step that this worker of the round has reported."""
        self.drain()  # its last words may have come in the same moment as its end
        return self._steps.get(local_rank)

    def new_round(self, number: int) -> None:
        """From now on only workers of this round are listened to."""
        self._round = number
        self._asking.clear()
        self._saving.clear()
        self._steps.clear()

    def order_stop(self, why: str) -> None:
        """Ask the scripts that listen to end by themselves."""
        body = Order(stop=why).model_dump_json().encode()
        for address in self._asking.values():
            with contextlib.suppress(OSError):  # gone, or its queue is full of the same
                self._socket.sendto(body, address)

    def drain(self) -> None:
        """Take all that is there."""
        while True:
            try:
                data, sender = self._socket.recvfrom(MAX_DATAGRAM)
            except BlockingIOError:
                return
            try:
                news = News.model_validate_json(data)
            except ValidationError as error:
                faults = error.error_count()
                log.warning("bad_datagram", extra={"bytes": len(data), "faults": faults})
                continue
            if news.round != self._round or news.local_rank >= self._nproc:
                continue  # a worker of an older round that has not ended yet, or none of ours
            if news.polls and sender:
                self._asking[news.local_rank] = sender
            if news.step is not None:
                self._steps[news.local_rank] = news.step
                self._heard(news)
            if news.store is not None:
                self._stores(news.store)
            self._unsaved(news.local_rank, news.unsaved)
            if news.staged is not None:
                self._saving.add(news.local_rank)
                self._staged(news.local_rank, news.staged)

    def close(self) -> None:
        """Stop listening."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
