"""What workers do for themselves where no agent does: a folder of memory, a persister.

Under ``python`` and ``torchrun`` the first worker of each node holds the node's arena and runs its
persister (:mod:`dlrover_py.persist`). The arena is removed at the end; if the worker is killed, by
a shell that waits for that.

Neither may wait for the end of its standard input alone: a process that the worker has forked (a
DataLoader's, say) has the other end of the pipe open too, and may live as long as the worker or
longer. So both are told by a line when it is time, and a forked child lets go of the shell's pipe,
whose end then says that the worker itself is gone.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dlrover_py import arena
from dlrover_py.arena import Arena, Slot
from dlrover_py.helpers import end, wake
from dlrover_py.protocol.checkpoint import Answer, Id, Order, Phase, Summary, read_line

log = logging.getLogger(__name__)

OVERTAKEN = "a newer one took its place before it was begun: they come faster than they are written"
PATIENCE_S = 3600.0
"""A write that has taken so long, and by policy four of its intervals, is not waited for any more:
a newer one calls it off, or a store that is slower than that would never be written."""

WAKE_S = 5.0
"""A persister that somebody has stopped (SIGSTOP) is woken so often while it is waited for."""
END_S = 15.0
"""For one that was told to end: what it holds in storage is let go by then, or the store hangs
(see :meth:`dlrover_py.persist.Persister.close`)."""

_GUARD = 'read -r line; rm -rf -- "$1"'
"""Removes the folder at a line, or once nobody holds the other end of its standard input."""


def host() -> str:
    """The same for processes that share this one's memory, and no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {socket.gethostname()} {os.stat('/dev/shm').st_dev}"


def amend(
    folder: Path, change: Callable[[Summary], Summary], *, only: set[str] | None = None
) -> bool:
    """Change what is said of sets, in all slots that hold them.

    Args:
        folder: the arena.
        change: gives the summary as it is to be; the same one leaves the slot alone.
        only: names of slots to look at; all if None.

    Returns:
        False: somebody was writing into a slot that was to be changed, and it is as it was.
    """
    done = True
    for path, summary in arena.scan(folder):
        new = summary if only is not None and path.name not in only else change(summary)
        if new != summary:
            with contextlib.suppress(OSError), Slot(path, write=True) as slot:
                done = slot.amend(summary, new) and done
    return done


def unflag(folder: Path, one: Id) -> None:
    """Have a set no longer wait for storage, in all slots that hold it."""
    amend(folder, lambda s: replace(s, persist=False) if s.id == one else s)


class Memory:
    """A node's arena that a worker owns."""

    def __init__(self, root: Path, job: str, node: str) -> None:
        """Take it.

        Raises:
            ConfigError: somebody has it.
            OSError: the root cannot be written.
        """
        now = time.time()  # noqa: TID251 - files have their age by the wall clock
        self._arena = Arena(root, job, node, now=now)
        self.path = self._arena.path
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self.path)],
            bufsize=0,  # a buffer has a lock, which somebody may hold at a fork
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is not for it
        )
        _memories.add(self)

    def close(self) -> None:
        """Give all memory back."""
        self._arena.remove()
        _end(self._guard)

    def disarm(self) -> None:
        """In a forked child: be nobody whose end the guard waits for."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()


_memories: "weakref.WeakSet[Memory]" = weakref.WeakSet()


def _disarm_all() -> None:
    for memory in list(_memories):
        memory.disarm()


os.register_at_fork(after_in_child=_disarm_all)


class Persister:
    """The node's persister, started with the first order; a thread hears its answers."""

    def __init__(
        self,
        told: Callable[[Answer], None],
        argv: tuple[str, ...] = (sys.executable, "-m", "dlrover_py.persist"),
    ) -> None:
        """Start nothing yet.

        Args:
            told: takes each answer, in a thread.
            argv: the program.
        """
        self._told, self._argv = told, argv
        self._process: subprocess.Popen[bytes] | None = None
        self._open: set[str] = set()
        self._since = 0.0
        self._next: Order | None = None
        self._changed = threading.Condition()

    def order(self, order: Order, *, queue: bool = False) -> None:
        """Have a checkpoint written; what goes wrong is an answer as well.

        Args:
            order: what to write.
            queue: as long as another one is written this one waits, and a newer one takes its
                place: else of many that come fast none would ever be finished. Not where other
                nodes have parts, which would not wait for the same.
        """
        with self._changed:
            overtaken, self._next = self._next, None
            if self._open and self._process is not None:
                wake(self._process)
            if queue and self._open and time.monotonic() - self._since < PATIENCE_S:
                self._next = order
            else:
                self._begin(order)
        if overtaken is not None:
            self._answer(Answer(overtaken.attempt, Phase.FAILED, why=OVERTAKEN))

    def _begin(self, order: Order) -> None:
        self._open.add(order.attempt)
        self._since = time.monotonic()
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._process.stdin.write(order.encode())
            self._process.stdin.flush()
        except OSError as error:
            self._answer(Answer(order.attempt, Phase.FAILED, why=f"its persister: {error}"))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all orders have been answered; False if that takes too long.

        It may take as long as it goes on: a persister that runs has a limit of its own for a store
        that does not answer.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._open or self._next:
                left = WAKE_S if until is None else min(WAKE_S, until - time.monotonic())
                if left <= 0:
                    return False
                if self._process is not None:
                    wake(self._process)
                self._changed.wait(left)
            return True

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for what is under way, for so long at most, and end it."""
        done = self.wait(timeout_s)
        if self._process is not None:
            if not done:
                self._process.kill()
            _end(self._process)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        threading.Thread(
            target=self._hear, args=(self._process,), name="dlrover-persister", daemon=True
        ).start()

    def _hear(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                try:
                    said = read_line(line)
                except ValueError:
                    continue
                if isinstance(said, Answer):
                    self._answer(said)
        code = process.wait()
        with self._changed:
            left = list(self._open) if process is self._process else []
        for attempt in left:
            self._answer(
                Answer(attempt, Phase.FAILED, why=f"its persister has ended with code {code}")
            )

    def _answer(self, answer: Answer) -> None:
        try:
            self._told(answer)
        finally:
            if answer.phase in (Phase.DONE, Phase.FAILED):
                with self._changed:
                    self._open.discard(answer.attempt)
                    if self._next is not None and not self._open:
                        order, self._next = self._next, None
                        self._begin(order)
                    self._changed.notify_all()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Have one end that ends with a line: its input may stay open elsewhere."""
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:  # it may have ended by itself
        process.stdin.write(b"\n")
    end(process, END_S)
