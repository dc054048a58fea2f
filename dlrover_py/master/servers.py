"""The coordinator of a job's parameter server, in a thread of the master.

Its map is in a file beside the journal, and its socket outlives the master. So the next master goes
on with the map, and servers and workers keep their connections' address. It begins when the master
holds the journal: then no other coordinator runs.
"""

import asyncio
import hashlib
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_py.protocol.job import ServerSpec

if TYPE_CHECKING:
    from dlrover_py.ps.coordinator import Coordinator

TICK_S = 0.05
"""Longest time, in seconds, after which the coordinator takes note of the time."""


class ServerMap:
    """The owner of the map of a job's servers."""

    def __init__(self, listener: socket.socket, access: Path, state: Path, token: str) -> None:
        """Take what the coordinator needs; nothing is begun yet.

        Args:
            listener: The socket at which servers and workers connect.
            access: The file to write that tells them where it is.
            state: The file of the map.
            token: The job's token. Workers get another one that is made from it.
        """
        self._listener, self._access, self._state = listener, access, state
        self._token = hashlib.blake2b(token.encode(), digest_size=16, person=b"dlrover-ps")
        self._present: frozenset[str] | None = None
        self._over = threading.Event()
        self._coordinator: Coordinator | None = None

    def tell(self, servers: frozenset[str]) -> None:
        """Have the coordinator take note, soon, of all servers that exist."""
        self._present = servers

    async def open(self, job: str, spec: ServerSpec) -> None:
        """Read the map, and write the file that tells where the coordinator is.

        Args:
            job: Name of the job.
            spec: Its role ``ps``.

        Raises:
            ConfigError: The map or the directory of cuts cannot be used.
            OSError: The file cannot be written.
        """
        await asyncio.to_thread(self._open, job, spec)

    async def run(self) -> None:
        """Run the coordinator in a thread until this call is cancelled.

        Raises:
            OSError: The map cannot be stored.
        """
        try:
            await asyncio.to_thread(self._serve)
        finally:
            self._over.set()

    def _open(self, job: str, spec: ServerSpec) -> None:
        # Imported here: only a job with servers needs these libraries.
        from dlrover_py.ps.cluster_map import AckMode
        from dlrover_py.ps.coordinator import Coordinator
        from dlrover_py.ps.cuts import CutDirectory
        from dlrover_py.ps.planner import PlanRules
        from dlrover_py.ps.settings import write_access

        self._coordinator = Coordinator(
            job,
            self._token.hexdigest(),
            self._state,
            PlanRules(spec.buckets, spec.size, spec.copies, AckMode(spec.ack)),
            time.monotonic(),
            cuts=CutDirectory(spec.checkpoints) if spec.checkpoints is not None else None,
            listener=self._listener,
        )
        write_access(self._access, self._coordinator.access)

    def _serve(self) -> None:
        coordinator, told = self._coordinator, None
        assert coordinator is not None
        try:
            while not self._over.is_set():
                coordinator.socket.poll(int(TICK_S * 1000))
                present = self._present
                if present is not None and present is not told:
                    told = present
                    coordinator.present(present)
                now = time.monotonic()
                coordinator.receive(now)
                coordinator.tick(now)
        finally:
            coordinator.close()
