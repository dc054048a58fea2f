"""The agent's side of its reaper, the process that cleans up if the agent is killed."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dlrover_agent import reaper
from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.observer import raise_task_error
from dlrover_py.process import identity
from dlrover_py.process.children import end
from dlrover_py.process.identity import ProcessId, shielded_child
from dlrover_py.process.starter import Starter
from dlrover_py.protocol.reaper import SessionChange

log = logging.getLogger("agent")

RESTART_PAUSE_S = 10.0
"""Seconds after which a failed start of the reaper is tried again."""
DISMISSED_S = 5.0
"""Seconds for a dismissed reaper to remove its folders and end, on a machine that may be busy."""


class ReaperClient:
    """The agent's side of its reaper, the process that cleans up if the agent is killed.

    See :mod:`dlrover_agent.reaper`.
    """

    def __init__(self, lifeline_fd: int | None, folders: Sequence[Path], mark: str = "") -> None:
        """Start the reaper.

        Args:
            lifeline_fd: Descriptor of the pipe whose end means that the platform is gone.
            folders: Folders that the reaper removes after the end of the agent.
            mark: Value in the environment of all processes that the agent starts, and their
                children. The reaper kills the processes that carry it.

        Raises:
            OSError: The process cannot be started.
        """
        read, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._mark, self._folders = mark, folders
        lifeline = -1 if lifeline_fd is None else lifeline_fd
        keep = [read] if lifeline < 0 else [read, lifeline]
        root = Path(identity.__file__).parents[2]
        script = [sys.executable, "-I", "-S", reaper.__file__, str(root)]
        agent = ProcessId.of(os.getpid())
        with shielded_child():
            self._process = subprocess.Popen(
                [*script, str(read), str(lifeline), str(agent), mark, *map(str, folders)],
                pass_fds=keep,
                env={},  # no mark: a freeze of the node's marked processes must not stop the reaper
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        os.close(read)

    @property
    def pid(self) -> int:
        """Process id of the reaper."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the reaper was killed; it does not end by itself while the agent runs."""
        return self._process.poll() is not None

    def send(self, change: SessionChange) -> None:
        """Write to the reaper's pipe that a session has started or ended; there is no answer.

        A reaper that does not read is killed. The agent then starts another one and sends it all
        sessions. If the reaper has ended, nothing happens.
        """
        try:
            os.write(self._pipe, change.encode())
        except BlockingIOError:
            self._process.kill()
        except BrokenPipeError:
            pass

    def abandon(self) -> None:
        """Kill the reaper if it runs, and leave the agent's processes and folders alone."""
        self._process.kill()
        self._process.wait()
        os.close(self._pipe)

    def dismiss(self, timeout_s: float = DISMISSED_S) -> None:
        """End the reaper, which cleans up first; do its work here if it was killed, now or before.

        The work is to kill all processes with the mark, and to remove the folders. The call blocks
        until the reaper has ended, or until the work is done here.

        Args:
            timeout_s: Seconds that the reaper has to end.
        """
        os.close(self._pipe)
        if not end(self._process, timeout_s) or self._process.returncode:
            reaper.clear(self._mark, self._folders)


class ReaperSupervisor:
    """Keeps a reaper running, which follows all sessions of a :class:`ChildRegistry`."""

    def __init__(
        self, lifeline_fd: int | None, folders: Sequence[Path], mark: str, children: ChildRegistry
    ) -> None:
        """Start the reaper. It follows the registry's sessions from now on.

        Args:
            lifeline_fd: Descriptor of the pipe whose end means that the platform is gone.
            folders: Folders that the reaper removes after the end of the agent.
            mark: Value in the environment of all processes that the agent starts.
            children: Registry of the agent's child processes. The reaper is added.

        Raises:
            OSError: The process cannot be started.
        """
        self._arguments = (lifeline_fd, folders, mark)
        self._children = children
        self._reaper = ReaperClient(*self._arguments)
        children.non_worker_pids.add(self._reaper.pid)
        children.observer = self
        self._starter = Starter("reaper")
        self._restarting: asyncio.Task[None] | None = None

    def session_started(self, session: ProcessId) -> None:
        """Have the reaper kill this session if the agent is killed."""
        self._reaper.send(SessionChange(True, *session))

    def session_ended(self, session: ProcessId) -> None:
        """Have the reaper leave this session alone from now on."""
        self._reaper.send(SessionChange(False, *session))

    def child_ended(self) -> None:
        """Begin to start another reaper if the present one has ended; else do nothing.

        The agent calls this after the end of each of its children.
        """
        if self._reaper.ended and (self._restarting is None or self._restarting.done()):
            self._restarting = asyncio.create_task(self._restart())
            self._restarting.add_done_callback(raise_task_error)

    async def _restart(self) -> None:
        """Start another reaper after the reaper was killed, and send it all sessions.

        A failed start is tried again every ``RESTART_PAUSE_S`` seconds, until the task is
        cancelled.
        """
        log.warning("reaper_ended", extra={"then": "another one is started"})
        while True:
            try:
                fresh = await self._starter.start(
                    lambda: ReaperClient(*self._arguments), undo=ReaperClient.abandon
                )
                break
            except OSError as error:  # includes OverdueError
                then = f"it is tried again after {RESTART_PAUSE_S:g} s"
                why = error.strerror or str(error)
                log.warning("reaper_not_started", extra={"why": why, "then": then})
                await asyncio.sleep(RESTART_PAUSE_S)
        self._reaper.abandon()  # does not wait, because this process has already ended
        self._children.non_worker_pids.discard(self._reaper.pid)
        self._reaper = fresh
        self._children.non_worker_pids.add(fresh.pid)
        for session in self._children.sessions:
            fresh.send(SessionChange(True, *session))

    async def close(self) -> None:
        """End the reaper, which removes the agent's folders and kills what the agent has left.

        The event loop is blocked meanwhile.
        """
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        self._reaper.dismiss()
