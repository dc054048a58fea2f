"""Threads beside an event loop, for calls that may block: a disk that hangs, a plug-in of others.

A loop that has to answer within a lease makes no such call itself. It gives the call away
(:meth:`Aside.post`), or waits for it within a limit while all else goes on (:meth:`Aside.run`).
The threads are daemons: a call that never returns does not keep the process from its end.
"""

import asyncio
import collections
import contextlib
import functools
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Overdue(TimeoutError):
    """A call has not returned within its limit."""


class _Call:
    """A call, and what has become of it."""

    __slots__ = ("given_up", "late", "make", "over", "settle", "size")

    def __init__(self, make: Callable[[], Any], size: int = 0) -> None:
        self.make, self.size = make, size
        self.settle: Callable[[Any, BaseException | None], None] | None = None
        self.late: Callable[[Any], object] | None = None
        self.over = self.given_up = False


class Aside:
    """One thread that makes calls one after the other, in order.

    A call that hangs holds up those behind it, and nothing else. It begins to run with the first
    call.
    """

    def __init__(self, name: str, *, most: int = 1 << 20) -> None:
        """Start nothing yet.

        Args:
            name: of the thread.
            most: sum of the sizes of posted calls that may wait; the oldest are dropped.
        """
        self._name, self._most = name, most
        self._calls: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._busy = False
        self._made = 0
        self.waiting = 0
        """Sum of the sizes of the calls that wait."""
        self.dropped = 0
        """Sum of the sizes of the calls that were never made."""

    @property
    def stuck_s(self) -> float:
        """Since when the present call runs; 0 between calls."""
        return time.monotonic() - self._began if self._busy else 0.0

    def post(self, make: Callable[[], object], size: int = 0) -> None:
        """Have a call made, some time.

        Args:
            make: the call.
            size: counts against ``most``; a call without one is never dropped.
        """
        with self._changed:
            self._calls.append(_Call(make, size))
            self.waiting += size
            if self.waiting > self._most:
                self._drop()
            self._wake()

    async def run(
        self, make: Callable[[], T], within_s: float, late: Callable[[T], object] | None = None
    ) -> T:
        """Have a call made, and wait for its outcome.

        Args:
            make: the call. One that has not begun within the limit is never made.
            within_s: the limit.
            late: takes, in the thread, what the call returns after the limit.

        Raises:
            Overdue: the limit has passed.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(outcome: T, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(outcome)

        def settle(outcome: T, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, outcome, error)

        call = _Call(make)
        call.settle, call.late = settle, late
        with self._changed:
            self._calls.append(call)
            self._wake()
        try:
            await asyncio.wait([done], timeout=within_s)
        finally:
            if not done.done() and self._give_up(call):
                done.cancel()
        if done.cancelled():
            raise Overdue(f"no answer within {within_s:g} s")
        return await done

    def finish(self, within_s: float) -> bool:
        """Wait, blocking, until no call is left, or none has returned for so long.

        Returns:
            Whether none is left.
        """
        with self._changed:
            while self._calls or self._busy:
                made, until = self._made, time.monotonic() + within_s
                while self._made == made:
                    if not self._changed.wait(until - time.monotonic()):
                        return False
            return True

    def _give_up(self, call: _Call) -> bool:
        """Whether its outcome is not waited for any more; false if it is there already."""
        with self._changed:
            if call.over:
                return False
            call.given_up = True
            with contextlib.suppress(ValueError):  # it runs
                self._calls.remove(call)
            return True

    def _drop(self) -> None:
        kept = []
        while self._calls and self.waiting > self._most:
            call = self._calls.popleft()
            if call.size:
                self.waiting -= call.size
                self.dropped += call.size
            else:
                kept.append(call)
        self._calls.extendleft(reversed(kept))

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._changed.wait()
                call = self._calls.popleft()
                self.waiting -= call.size
                self._busy, self._began = True, time.monotonic()
            self._make(call)
            with self._changed:
                self._busy = False
                self._made += 1
                self._changed.notify_all()

    def _make(self, call: _Call) -> None:
        outcome, error = None, None
        try:
            outcome = call.make()
        except BaseException as raised:  # noqa: BLE001 - it is told to who waits, else shown
            if call.settle is None:
                sys.excepthook(type(raised), raised, raised.__traceback__)
                return
            error = raised
        with self._changed:
            call.over = True
            given_up = call.given_up
        if not given_up and call.settle is not None:
            call.settle(outcome, error)
        elif given_up and error is None and call.late is not None:
            call.late(outcome)


class Outlet:
    """A descriptor that a thread writes to: who reads it, or its disk, may hang."""

    def __init__(self, fd: int) -> None:
        """Write nothing yet; ``fd`` stays open as long as the process."""
        self._fd = fd
        self._aside = Aside(f"write-{fd}")

    def write(self, data: bytes) -> None:
        """Write it as soon as there is room; the oldest is dropped if there is none for long."""
        self._aside.post(functools.partial(self._write, data), len(data))

    def finish(self, within_s: float) -> bool:
        """Wait, blocking, until all is written, or nothing was for so long."""
        return self._aside.finish(within_s)

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # nobody looks any more, or the disk is full
            write_all(self._fd, data)


@functools.cache
def outlet(fd: int) -> Outlet:
    """The one outlet of this process to a descriptor: all that goes there keeps its order."""
    return Outlet(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, also to a descriptor that is set not to block.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()
