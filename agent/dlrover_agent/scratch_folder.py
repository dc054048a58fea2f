"""The agent's temporary folder, which holds its sockets and files, and may be removed by others."""

import asyncio
import contextlib
import logging
import os
import socket
from typing import TypeVar

from dlrover_agent import temporary_folder
from dlrover_agent.worker_socket import WorkerSocket
from dlrover_py.process.blocking import BackgroundThread, OverdueError
from dlrover_py.protocol.errors import DLRoverError

log = logging.getLogger("agent")

FILES_S = 2.0
"""Seconds for the repair of the folder. Its disk may hang."""


Server = TypeVar("Server", bound=WorkerSocket)
_Repaired = tuple[list[tuple[WorkerSocket, socket.socket]], str]
"""The servers whose sockets were made again, with the sockets; and an error, or empty text."""


class ScratchFolder:
    """The agent's temporary folder, and the repair of it."""

    def __init__(self) -> None:
        """Create the folder.

        Raises:
            ConfigError: No folder can be created.
        """
        self.path = temporary_folder.create(f"dlrover-{os.getpid()}-")
        self._servers: list[WorkerSocket] = []
        self._file_thread = BackgroundThread("scratch")
        self._closed = False

    def add(self, server: Server) -> Server:
        """Let :meth:`mend` repair the socket of this server too, and return the server."""
        self._servers.append(server)
        return server

    async def mend(self) -> None:
        """Make the folder and its sockets again if they were removed; workers need them.

        A failure is only logged. If the disk does not answer within ``FILES_S``, the work is
        finished once it answers. While an earlier call hangs, this one does not wait.
        """
        loop = asyncio.get_running_loop()

        def late(repaired: _Repaired) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._use, repaired)

        # While another call hangs, this one would hang as well.
        within_s = FILES_S if self._file_thread.stuck_s < FILES_S else 0.0
        try:
            repaired = await self._file_thread.run(self._repair, within_s, late)
        except OverdueError:
            self._warn(f"its disk has not answered within {FILES_S:g} s")
        except (OSError, DLRoverError) as error:
            self._warn(str(error))
        else:
            self._use(repaired)

    def close(self) -> None:
        """Repair no socket any more. The folder stays."""
        self._closed = True

    def _repair(self) -> _Repaired:
        """Make the folder again, and new sockets for the servers whose file is gone.

        The method runs in the thread, and the servers do not use the sockets yet. The result has
        the last error of a socket, which does not keep the others from being made.

        Raises:
            DLRoverError: Another user has created a folder there.
            OSError: The folder cannot be created.
        """
        temporary_folder.recreate(self.path)
        repaired: _Repaired = ([], "")
        for server in self._servers:
            try:
                bound = server.rebind()
            except OSError as error:
                repaired = (repaired[0], str(error))
            else:
                if bound is not None:
                    repaired[0].append((server, bound))
        return repaired

    def _use(self, repaired: _Repaired) -> None:
        """Let the servers use their new sockets, and log an error; drop the sockets if closed."""
        sockets, error = repaired
        for server, bound in sockets:
            if self._closed:
                bound.close()
            else:
                server.use(bound)
        if error:
            self._warn(error)

    def _warn(self, why: str) -> None:
        then = "workers cannot report steps and checkpoints"
        log.warning(
            "scratch_folder_unusable", extra={"path": str(self.path), "why": why, "then": then}
        )
