"""What a worker needs if there is no agent: its node's shared memory and a persister.

Under ``python`` and ``torchrun`` the first worker of each node owns the shared-memory pool of the
node. It also runs the node's persister (:mod:`dlrover_py.checkpoint.writer`). The pool is removed
at the end. If the worker is killed, a shell that waits for the worker's end removes the pool.

Neither the shell nor the persister may wait only for the end of its standard input. A process that
the worker has forked (a DataLoader's worker, for example) has the other end of the pipe open, too.
It may live as long as the worker, or longer. Therefore both end when they receive a line. A forked
child closes its copy of the shell's pipe. The end of that pipe then means that the worker itself is
gone.
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

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmPool, ShmSlot
from dlrover_py.process.children import end, wake
from dlrover_py.process.identity import shielded_child
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.persister import MAX_REPLY, WriteReply, WriteRequest, read_line
from dlrover_py.protocol.slots import SlotHeader

log = logging.getLogger(__name__)

REPLACED_BY_NEWER = (
    "a newer one replaced it before its write began: they come faster than storage writes them"
)
CANCEL_AFTER_S = 3600.0
"""Seconds after which a newer write cancels a write to storage that is still under way. If writes
are due by an interval, four intervals must have passed as well. If writes were canceled earlier, a
store that is slower than the interval would never complete one."""

WAKE_S = 5.0
"""Seconds between two signals that wake a stopped persister (SIGSTOP) while it is waited for."""
END_S = 15.0
"""Seconds that a process has to end once it is asked to. By then the persister has released what it
holds in storage, or the store hangs. See
:meth:`dlrover_py.checkpoint.writer.PersisterProcess.close`."""

_CLEANUP_SHELL = "trap '' HUP INT QUIT TERM USR1 USR2; read -r line; rm -rf -- \"$1\""
"""Shell code. It removes the folder when it reads a line, or when its standard input ends."""


def memory_host() -> str:
    """Return a name that is equal for two processes if and only if they share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {socket.gethostname()} {os.stat('/dev/shm').st_dev}"


def update_headers(
    folder: Path, change: Callable[[SlotHeader], SlotHeader], *, only: set[str] | None = None
) -> bool:
    """Change the headers of slots, once each; the caller repeats this if the result is False.

    Empty and damaged slots are left out. A slot that cannot be opened counts as done.

    Args:
        folder: the folder of the shared-memory pool.
        change: returns the new header for a header. If it returns an equal one, the slot is left
            alone.
        only: names of the slots to look at. None: all slots.

    Returns:
        False if another process was writing into a slot that was to be changed, or has changed its
        header since; that slot is unchanged.
    """
    done = True
    for path, header in shm.scan(folder):
        new = header if only is not None and path.name not in only else change(header)
        if new != header:
            with contextlib.suppress(OSError), ShmSlot(path, write=True) as slot:
                done = slot.update_header(header, new) and done
    return done


def clear_persist(folder: Path, one: CheckpointId) -> None:
    """Clear the mark of a checkpoint that is to go to storage, in all slots that hold it.

    This is tried once: the mark stays in a slot that another process writes into at that time.
    """
    update_headers(folder, lambda s: replace(s, persist=False) if s.id == one else s)


class StandaloneMemory:
    """The shared-memory pool of a node, owned by a worker."""

    def __init__(self, root: Path, job: str, node: str) -> None:
        """Create the pool and start the shell that removes it if this process is killed.

        Args:
            root: folder of a tmpfs, in which the pool is created.
            job: name of the run.
            node: name of the node.

        Raises:
            ConfigError: another process owns the pool, or another user can change it.
            OSError: the root cannot be written, or the shell cannot be started.
        """
        now = time.time()  # noqa: TID251 - files have their age by the wall clock
        self._pool = ShmPool(root, job, node, now=now)
        self.path = self._pool.path
        self._cleanup_shell = subprocess.Popen(
            ["/bin/sh", "-c", _CLEANUP_SHELL, "sh", str(self.path)],
            bufsize=0,  # a buffer has a lock, which a thread may hold during a fork
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not reach it
        )
        _memories.add(self)

    def close(self) -> None:
        """Remove the pool with all checkpoints in it, and end the shell."""
        self._pool.remove()
        _end(self._cleanup_shell)

    def close_in_child(self) -> None:
        """Close a forked child's copy of the shell's pipe, for which the shell would wait."""
        assert self._cleanup_shell.stdin is not None
        self._cleanup_shell.stdin.close()


_memories: "weakref.WeakSet[StandaloneMemory]" = weakref.WeakSet()
"""All pools of this process, for :func:`_close_all_in_child`."""


def _close_all_in_child() -> None:
    """Detach all pools in a forked child."""
    for memory in list(_memories):
        memory.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)


class StandalonePersister:
    """The persister of the node. The first request starts it, and a thread reads its replies."""

    def __init__(
        self,
        on_reply: Callable[[WriteReply], None],
        argv: tuple[str, ...] = (sys.executable, "-P", "-m", "dlrover_py.checkpoint.writer"),
        *,
        wake_interval_s: float = WAKE_S,
    ) -> None:
        """Create the object. The first request starts the process.

        Args:
            on_reply: receives each reply, in the reading thread; or in that of `order`, for a
                request that was replaced or could not be sent.
            argv: the command that starts the persister.
            wake_interval_s: seconds between two signals that wake a stopped persister.
        """
        self._on_reply, self._argv, self._wake_interval_s = on_reply, argv, wake_interval_s
        self._process: subprocess.Popen[bytes] | None = None
        self._open_attempts: dict[str, subprocess.Popen[bytes]] = {}
        """Attempt without its last reply → the process to which it was sent."""
        self._sent_at = 0.0
        self._next: WriteRequest | None = None
        self._changed = threading.Condition()

    def order(self, request_: WriteRequest, *, queue: bool = False) -> None:
        """Request the write of a checkpoint; a separate process writes it later.

        The call does not wait for the write. Every failure is reported as a reply, and so is a
        waiting request that this one replaces.

        Args:
            request_: what to write.
            queue: False: this request cancels a write in progress. True: it waits for a write in
                progress, and cancels only one that takes more than `CANCEL_AFTER_S`. A newer
                request replaces one that waits. If requests come fast and cancel each other, none
                of them would ever be completed. It must be False if other nodes have shards,
                because they would not wait for the same write.
        """
        with self._changed:
            overtaken, self._next = self._next, None
            if self._open_attempts and self._process is not None:
                wake(self._process)
            if queue and self._open_attempts and time.monotonic() - self._sent_at < CANCEL_AFTER_S:
                self._next = request_
            else:
                self._begin(request_)
        if overtaken is not None:
            self._handle_reply(
                WriteReply(
                    attempt=overtaken.attempt, phase=PersistPhase.FAILED, why=REPLACED_BY_NEWER
                )
            )

    def _begin(self, request: WriteRequest) -> None:
        """Send a request to the persister; start the persister if necessary.

        The caller holds ``_changed``. If this fails, nothing is raised: the reply ``failed`` is
        passed to ``on_reply``.
        """
        self._sent_at = time.monotonic()
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None
            assert self._process.stdin is not None
            self._open_attempts[request.attempt] = self._process
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except OSError as error:
            self._handle_reply(
                WriteReply(
                    attempt=request.attempt,
                    phase=PersistPhase.FAILED,
                    why=f"the persister cannot be reached: {error}",
                )
            )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all requests have their last reply. Return False after the timeout.

        Meanwhile the persister is woken every few seconds, in case it was stopped (SIGSTOP).

        Args:
            timeout_s: seconds to wait at most. None: no limit. A running persister has its own
                limit for a store that does not respond.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while self._open_attempts or self._next:
                left = self._wake_interval_s
                if until is not None:
                    left = min(left, until - time.monotonic())
                if left <= 0:
                    return False
                if self._process is not None:
                    wake(self._process)
                self._changed.wait(left)
            return True

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for all requested writes, at most for the given seconds, and end the persister.

        A persister that is not done by then is killed. None: the wait has no limit.
        """
        done = self.wait(timeout_s)
        if self._process is not None:
            if not done:
                self._process.kill()
            _end(self._process)

    def _start(self) -> None:
        """Start the process, and the thread that reads its replies; do not wait until it is ready.

        Raises:
            OSError: it cannot be started.
        """
        before = self._process
        with shielded_child():
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        if before is not None and before.stdin is not None:  # its thread closes the other pipe
            with contextlib.suppress(OSError):  # a request that it has not read may be left
                before.stdin.close()
        threading.Thread(
            target=self._read_replies, args=(self._process,), name="dlrover-persister", daemon=True
        ).start()

    def _read_replies(self, process: "subprocess.Popen[bytes]") -> None:
        """Read replies until the process ends. Its requests that are still open have failed then.

        Another process may have been started by then: the requests to that one are left alone.
        Lines that are no valid reply are ignored. This is the body of a thread.
        """
        stdout = process.stdout
        assert stdout is not None
        with stdout:
            for line in iter(lambda: stdout.readline(MAX_REPLY), b""):
                try:
                    message = read_line(line)
                except ValueError:
                    continue
                if isinstance(message, WriteReply):
                    self._handle_reply(message)
        code = process.wait()
        with self._changed:
            left = [one for one, sent_to in self._open_attempts.items() if sent_to is process]
        for attempt in left:
            self._handle_reply(
                WriteReply(
                    attempt=attempt,
                    phase=PersistPhase.FAILED,
                    why=f"the persister has ended with code {code}",
                )
            )

    def _handle_reply(self, answer: WriteReply) -> None:
        """Pass on a reply. If it is the last one of a request, start the request that waits."""
        try:
            self._on_reply(answer)
        finally:
            if answer.phase in (PersistPhase.DONE, PersistPhase.FAILED):
                with self._changed:
                    self._open_attempts.pop(answer.attempt, None)
                    if self._next is not None and not self._open_attempts:
                        request, self._next = self._next, None
                        self._begin(request)
                    self._changed.notify_all()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process that ends when it reads a line. The end of its input may not suffice.

    It is killed if it has not ended after `END_S` seconds.
    """
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:  # it may have ended already
        process.stdin.write(b"\n")
    end(process, END_S)
