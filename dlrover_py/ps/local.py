"""Servers of a parameter server on this machine: one coordinator and a process for each server."""

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import zmq

from dlrover_py import telemetry
from dlrover_py.pacing import Backoff
from dlrover_py.process.children import end
from dlrover_py.process.starter import kill_and_reap
from dlrover_py.protocol.errors import ConfigError, TransientError, UnreachableError
from dlrover_py.ps.cluster_map import ClusterMap
from dlrover_py.ps.coordinator import Coordinator
from dlrover_py.ps.cuts import CutDirectory, SavedCut
from dlrover_py.ps.map_store import MapFile
from dlrover_py.ps.planner import PlanRules
from dlrover_py.ps.settings import write_access

TICK_S = 0.05
RESTART_S = 1.0
"""Least seconds from the start of a server that has died to the start of the next one."""
STORE_PAUSES = Backoff(first_s=0.05, most_s=2.0)
"""Pauses after writes of the map that have failed."""
MAX_SERVERS = 64
_LOG = logging.getLogger(__name__)
_LOG.addFilter(telemetry.RepeatFilter())


@dataclass(slots=True)
class _LocalServer:
    id: str
    process: "subprocess.Popen[bytes]"
    pidfd: int
    started: float
    leaving: bool = False


class LocalServers:
    """Runs the servers of one job. A server that dies is replaced by an empty one."""

    def __init__(
        self,
        folder: Path,
        servers: int,
        *,
        job: str = "local",
        rules: PlanRules | None = None,
        cuts: CutDirectory | None = None,
        source: SavedCut | None = None,
    ) -> None:
        """Start the coordinator and the servers.

        Args:
            folder: An existing folder for the map and the access file. An old map is not used:
                the rows that it names were in the memory of other processes.
            servers: Number of servers.
            job: Name of the job.
            rules: How buckets are kept; ``rules.servers`` is not used.
            cuts: Where cuts are saved. None: nowhere.
            source: The cut that the servers read first. It gives the number of buckets.

        Raises:
            ConfigError: A number is outside its bounds.
        """
        if not 1 <= servers <= MAX_SERVERS:
            raise ConfigError(f"expected 1 to {MAX_SERVERS} servers, found {servers}")
        rules = replace(rules or PlanRules(), servers=servers)
        state = folder / "map.json"
        state.unlink(missing_ok=True)
        token = secrets.token_hex(16)
        self._coordinator = Coordinator(
            job, token, MapFile(state), rules, time.monotonic(), cuts=cuts, source=source
        )
        self.access = folder / "access.json"
        """The file with which workers connect."""
        write_access(self.access, self._coordinator.access)
        self.failure = ""
        """Why the servers have ended before :meth:`close`; empty while they have not."""
        self._on_failure: Callable[[], object] | None = None
        self._servers: list[_LocalServer] = []
        self._start_at = 0.0
        """When the next server may start."""
        self._wanted = servers
        self._over = False
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ps-servers", daemon=True)
        self._started = threading.Event()
        self._thread.start()

    @property
    def map(self) -> ClusterMap:
        """The newest map."""
        return self._coordinator.planner.map

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each server, by the id of its life."""
        return {one.id: one.process.pid for one in list(self._servers)}

    def resize(self, servers: int) -> None:
        """Start servers, or let the newest ones give their buckets away and end.

        Raises:
            ConfigError: The number is outside its bounds.
        """
        if not 1 <= servers <= MAX_SERVERS:
            raise ConfigError(f"expected 1 to {MAX_SERVERS} servers, found {servers}")
        self._wanted = servers

    def wait_whole(self, within_s: float = 60.0) -> None:
        """Wait until the wanted servers run, and each bucket has its copies in their place.

        Raises:
            UnreachableError: That is not so in time.
        """
        with self._news:
            if not self._news.wait_for(self._whole, within_s):
                raise UnreachableError(
                    f"expected {self._wanted} servers with all copies within {within_s:g} s, found "
                    f"{len(self.map.servers)} servers"
                )

    def at_failure(self, call: Callable[[], object]) -> None:
        """Have a function called, by another thread, if the servers end because of a fault."""
        with self._news:
            self._on_failure = call
            if self.failure:
                call()

    def close(self) -> None:
        """End all servers at once. Their rows are gone."""
        self._over = True
        self._thread.join()

    def __enter__(self) -> "LocalServers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _whole(self) -> bool:
        known, rules = self.map, self._coordinator.planner.rules
        copies = min(rules.replicas, self._wanted)
        return (
            len(known.servers) == len(self._servers) == self._wanted
            and bool(known.placements)
            and all(
                not one.learner and not one.loading and len(one.members) == copies
                and set(one.members) <= set(known.servers)
                for one in known.placements
            )
        )  # fmt: skip

    # --- The thread: it starts the servers, which end with it ---

    def _run(self) -> None:
        coordinator = self._coordinator
        poller = zmq.Poller()
        poller.register(coordinator.socket, zmq.POLLIN)
        tries, tick_at = 0, 0.0
        try:
            while not self._over:
                self._resize(poller)
                found = dict(poller.poll(int(TICK_S * 1000)))
                for one in [one for one in self._servers if one.pidfd in found]:
                    self._ended(one, poller)
                now = time.monotonic()
                coordinator.receive(now)
                if now < tick_at:
                    continue
                try:
                    coordinator.tick(now)
                except TransientError as error:  # pushes go on with the map that all have
                    _LOG.error("map_unwritable", extra={"fields": {"error": str(error)}})
                    tick_at = time.monotonic() + STORE_PAUSES.delay_s(tries)
                    tries += 1
                    continue
                tries = 0
                with self._news:
                    self._news.notify_all()
        except Exception as error:  # noqa: BLE001 - the owner gets it
            _LOG.exception("the servers end: their coordinator has failed")
            with self._news:
                self.failure = f"the coordinator of the servers has failed: {error!r}"
                if self._on_failure is not None:
                    self._on_failure()
        finally:
            for one in self._servers:
                kill_and_reap(one.process)
                os.close(one.pidfd)
            coordinator.close()

    def _resize(self, poller: zmq.Poller) -> None:
        staying = [one for one in self._servers if not one.leaving]
        for one in staying[self._wanted :]:
            one.leaving = True
            one.process.send_signal(signal.SIGTERM)
        now = time.monotonic()
        if now < self._start_at:
            return
        for _ in range(self._wanted - len(staying)):
            name = f"ps-{secrets.token_hex(4)}"
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dlrover_py.ps.server", str(self.access), name],
                stdin=subprocess.DEVNULL,
            )
            one = _LocalServer(name, process, os.pidfd_open(process.pid), now)
            self._servers.append(one)
            poller.register(one.pidfd, zmq.POLLIN)

    def _ended(self, one: _LocalServer, poller: zmq.Poller) -> None:
        poller.unregister(one.pidfd)
        os.close(one.pidfd)
        end(one.process, 0)
        self._servers.remove(one)
        self._start_at = max(self._start_at, one.started + RESTART_S)
        self._coordinator.lost(one.id)
