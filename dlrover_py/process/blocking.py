"""Threads beside an event loop, for calls that may block: a disk that hangs, or a plug-in.

An event loop that has to answer within a lease must not make such a call. It posts the call to a
thread (:meth:`BackgroundThread.post`), or waits for the thread within a limit while other tasks run
(:meth:`BackgroundThread.run`). The threads are daemons, so a call that never returns does not keep
the process from ending.
"""

import asyncio
import collections
import contextlib
import errno
import functools
import os
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")
_PIECE = 1 << 20


_thread = threading.local()
"""``mask``: the signal mask of the thread that has posted the present call of this thread."""


def _child_mask() -> set[signal.Signals | int]:
    """Return the signal mask for child processes of this thread."""
    mask: set[signal.Signals | int] | None = getattr(_thread, "mask", None)
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()) if mask is None else mask


@contextlib.contextmanager
def inheritable_signals() -> Iterator[None]:
    """Give this thread the mask of the thread that has posted its call, for new processes.

    A :class:`BackgroundThread` blocks all signals, and a mask outlives fork and exec: its child
    would ignore even SIGTERM and SIGCHLD. In all other threads nothing changes. The thread has its
    own mask again after the context.
    """
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, _child_mask())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class OverdueError(TimeoutError):
    """A call has not returned within its limit."""


class _Call:
    """A call that waits for the thread or runs, and its state."""

    __slots__ = ("discard", "given_up", "make", "mask", "not_called", "over", "settle", "size")

    def __init__(self, make: Callable[[], Any], size: int = 0) -> None:
        self.make, self.size, self.mask = make, size, _child_mask()
        self.settle: Callable[[Any, BaseException | None], None] | None = None
        self.discard: Callable[[Any], object] | None = None
        self.not_called: Callable[[], object] | None = None
        self.over = self.given_up = False


class BackgroundThread:
    """A thread that makes calls one after the other, in order.

    A call that hangs delays only the calls after it. The thread starts with the first call. All
    signals are blocked in the thread, and in the threads that it starts. A call that starts a
    process does so within :func:`inheritable_signals`.
    """

    def __init__(self, name: str, *, max_waiting: int = 1 << 20) -> None:
        """Create the object. The thread starts with the first call.

        Args:
            name: Name of the thread.
            max_waiting: Largest sum of the sizes of posted calls that wait. Above it, the oldest
                calls with a size are dropped.
        """
        self._name, self._max_waiting = name, max_waiting
        self._calls: collections.deque[_Call] = collections.deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self._busy = False
        self._made = 0
        self.waiting = 0
        """Sum of the sizes of the calls that wait."""
        self.dropped = 0
        """Sum of the sizes of the calls that were dropped."""

    @property
    def stuck_s(self) -> float:
        """Seconds since the present call began; 0 between calls."""
        return time.monotonic() - self._began if self._busy else 0.0

    def post(
        self,
        make: Callable[[], object],
        size: int = 0,
        dropped: Callable[[], object] | None = None,
    ) -> None:
        """Have the thread make a call, without waiting for it; may be called in any thread.

        An exception of the call is passed to ``sys.excepthook``. A call with a size may be dropped.

        Args:
            make: The function to call.
            size: Size that counts against ``max_waiting``. A call of size 0 is never dropped.
            dropped: Called if the call is dropped, in any thread that holds :attr:`lock`.
        """
        call = _Call(make, size)
        call.not_called = dropped
        with self._changed:
            self._calls.append(call)
            self.waiting += size
            if self.waiting > self._max_waiting:
                self._drop(self._max_waiting)
            self._wake()

    async def run(
        self,
        make: Callable[[], T],
        within_s: float,
        discard: Callable[[T], object] | None = None,
        not_called: Callable[[], object] | None = None,
    ) -> T:
        """Have the thread make a call, and return its result; other tasks run meanwhile.

        The call is given up at the limit, or when the waiting task is canceled. If it has begun by
        then, it goes on in the thread, and its exception is lost.

        Args:
            make: The function to call. If it has not begun when it is given up, it is never called.
            within_s: The limit in seconds, with the time that the call waits for earlier ones.
            discard: Called in the thread with the result of a call that was given up.
            not_called: Called in the event loop if the call is never made.

        Raises:
            OverdueError: If the limit has passed. An exception of the call is raised, too.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(outcome: T, error: BaseException | None) -> None:
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(outcome)

        def settle(outcome: T, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, outcome, error)

        def too_late(done: asyncio.Future[T]) -> None:
            if done.exception() is None and discard is not None:
                self.post(functools.partial(discard, done.result()))

        call = _Call(make)
        call.settle, call.discard, call.not_called = settle, discard, not_called
        with self._changed:
            self._calls.append(call)
            self._wake()
        try:
            await asyncio.wait([done], timeout=within_s)
            if not done.done():
                if self._give_up(call):
                    raise OverdueError(f"no answer within {within_s:g} s")
                await asyncio.wait([done])  # the call has ended: its outcome arrives soon
        except asyncio.CancelledError:
            if not self._give_up(call):
                done.add_done_callback(too_late)
            raise
        return done.result()

    async def wait_posted(self, within_s: float) -> bool:
        """Wait until all calls that were posted so far have returned, failed or been dropped.

        Args:
            within_s: The limit in seconds. The calls continue after it.

        Returns:
            Whether they have returned within the limit.
        """
        try:
            await self.run(_nothing, within_s)
        except OverdueError:
            return False
        return True

    def finish(self, within_s: float) -> bool:
        """Block until all calls have returned, or for ``within_s`` seconds none has.

        In the second case the calls that are left still wait in the thread.

        Returns:
            Whether no call is left.
        """
        with self._changed:
            while self._calls or self._busy:
                made, until = self._made, time.monotonic() + within_s
                while self._made == made:
                    if not self._changed.wait(until - time.monotonic()):
                        return False
            return True

    def drop(self) -> None:
        """Drop all calls with a size that wait. The present call and calls of size 0 stay."""
        with self._changed:
            self._drop(0)

    @property
    def lock(self) -> threading.Condition:
        """The lock of the calls, for state that both the thread and others change."""
        return self._changed

    def _give_up(self, call: _Call) -> bool:
        """Give up a call, and call its ``not_called`` if it has not begun.

        Returns:
            False if its outcome is there already; nothing is given up then.
        """
        with self._changed:
            if call.over:
                return False
            call.given_up = True
            never = call in self._calls
            if never:
                self._calls.remove(call)
        if never and call.not_called is not None:
            call.not_called()
        return True

    def _drop(self, max_waiting: int) -> None:
        """Drop the oldest calls that have a size, until the others have at most this size."""
        kept = []
        while self._calls and self.waiting > max_waiting:
            call = self._calls.popleft()
            if call.size:
                self.waiting -= call.size
                self.dropped += call.size
                if call.not_called is not None:
                    call.not_called()
            else:
                kept.append(call)
        self._calls.extendleft(reversed(kept))

    def _wake(self) -> None:
        """Start the thread if it does not run, and notify it of a new call."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            # The main thread must get the signals: only it runs their handlers. A new thread
            # inherits the signal mask of the thread that starts it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._thread.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._changed.notify_all()

    def _work(self) -> None:
        """Make the calls, forever. Runs in the thread."""
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
        """Make one call, and pass its outcome on. Runs in the thread.

        An outcome that was given up goes to ``discard``. An exception of a posted call is shown.
        """
        outcome, error = None, None
        _thread.mask = call.mask
        try:
            outcome = call.make()
        except BaseException as raised:  # noqa: BLE001 - raised in the waiting task, or shown
            if call.settle is None:
                sys.excepthook(type(raised), raised, raised.__traceback__)
                return
            error = raised
        with self._changed:
            call.over = True
            given_up = call.given_up
        if not given_up and call.settle is not None:
            call.settle(outcome, error)
        elif given_up and error is None and call.discard is not None:
            call.discard(outcome)


def _nothing() -> None:
    """Do nothing: a call that returns once the calls before it have returned."""


class BackgroundWriter:
    """A file descriptor that a thread writes to, because its reader or its disk may hang."""

    HIGH_BYTES, MAX_BYTES = 1 << 20, 1 << 24
    """Limits in bytes of unwritten data.

    Above HIGH_BYTES, a source that can wait must wait. Above MAX_BYTES, the oldest data is lost.
    """

    def __init__(self, fd: int, *, hung_after_s: float = 1.0) -> None:
        """Create the writer.

        Args:
            fd: File descriptor, which must stay open until the process ends.
            hung_after_s: Seconds without progress after which a reader counts as absent, unless
                :attr:`waits_for_reader` is set.
        """
        self._fd, self._hung_after_s = fd, hung_after_s
        self._aside = BackgroundThread(f"write-{fd}", max_waiting=self.MAX_BYTES)
        self.waits_for_reader = True
        """Whether sources wait for a reader that takes nothing, however long that is."""
        self._lost = 0
        """Lines that were dropped since :meth:`take_lost` was called last."""

    @property
    def slow(self) -> bool:
        """Whether sources that can wait must wait, because too much data is not written yet."""
        hung = not self.waits_for_reader and self._aside.stuck_s >= self._hung_after_s
        return self._aside.waiting > self.HIGH_BYTES and not hung

    def write(self, data: bytes) -> None:
        """Have the thread write data. If too much data waits, the oldest is dropped.

        The method does not wait. An error of the file descriptor loses data without an error here.
        """
        write = functools.partial(self._write, data)
        self._aside.post(write, len(data), functools.partial(self._lose, data.count(b"\n")))

    def give_up(self) -> int:
        """Drop all data that is not being written; return the number of lines that are lost.

        The number includes the lines that were dropped before.
        """
        self._aside.drop()
        return self.take_lost()

    def take_lost(self) -> int:
        """Return the number of lines that were dropped. Each line counts in one call only."""
        with self._aside.lock:
            lost, self._lost = self._lost, 0
        return lost

    def finish(self, within_s: float) -> bool:
        """Block until all data is written, or no write has ended for ``within_s`` seconds.

        In the second case the thread goes on with the rest.

        Returns:
            Whether all data is written or lost by an error.
        """
        return self._aside.finish(within_s)

    def _lose(self, lines: int) -> None:
        """Count lines that are dropped; the caller holds the lock of the thread."""
        self._lost += lines

    def _write(self, data: bytes) -> None:
        """Write data in the thread; an error of the descriptor loses the rest of it."""
        with contextlib.suppress(OSError):  # the reader has closed it, or the disk is full
            write_all(self._fd, data)


@functools.cache
def shared_writer(fd: int) -> BackgroundWriter:
    """Return this process's only writer for a file descriptor, which keeps all output in order."""
    return BackgroundWriter(fd)


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    The function blocks while the disk hangs, so it must be called in a thread.

    Args:
        path: Path of the file. A pipe or a device is refused immediately.
        max_bytes: Largest size in bytes.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or is larger.
    """
    with open(path, "rb", 0, opener=lambda name, _: open_regular(name)) as file:
        data = read_at_most(file, max_bytes)
    if data is None:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data


def open_regular(path: str | Path) -> int:
    """Open a regular file or a folder for reading, and return its descriptor.

    A pipe or a device is refused before it is opened, because that might block or have effects.
    O_NONBLOCK would not do: with it, open(2) fails for a file on which another process has a lease.

    Raises:
        OSError: It cannot be opened, or it is neither a file nor a folder.
    """
    name = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(name).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.open(f"/proc/self/fd/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(name)


def read_at_most(file: BinaryIO, max_bytes: int) -> bytes | None:
    """Read a file to its end; return None if it has more than ``max_bytes`` bytes."""
    data = bytearray()
    while piece := file.read(min(_PIECE, max_bytes + 1 - len(data))):
        data += piece
    return None if len(data) > max_bytes else bytes(data)


def write_all(fd: int, data: bytes) -> None:
    """Write all data to a file descriptor; wait without a limit for space if it is non-blocking.

    Raises:
        OSError: If the data cannot be written.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            room = select.poll()
            room.register(fd, select.POLLOUT)
            room.poll()
