"""The coordinator of a job's parameter server, in a thread of the master.

Its map is in a file beside the journal, or in a Secret, and its socket or Service outlives the
master. So the next master goes on with the map, and servers and workers keep their connections'
address. It begins when the master holds the journal: then no other coordinator runs.
"""

import asyncio
import logging
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_py.master.core.events import ServersPresent
from dlrover_py.master.pauses import pause_s
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.job import ElasticJob, Metadata, ServerSpec
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.status import (
    MAX_LISTED_BUCKETS,
    RebalanceAnswer,
    ServerLoad,
    TablesStatus,
)

if TYPE_CHECKING:
    from dlrover_py.ps.cluster_map import ClusterMap
    from dlrover_py.ps.coordinator import Coordinator
    from dlrover_py.ps.map_store import MapStore
    from dlrover_py.ps.messages import Load
    from dlrover_py.ps.planner import PlanRules

log = logging.getLogger("master.servers")

REPORT_S = 2.0
"""Least seconds between two reports on the tables."""
TICK_S = 0.05
"""Longest time, in seconds, after which the coordinator takes note of the time."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """What the coordinator of a job needs."""

    listener: socket.socket
    """The socket at which servers and workers connect."""
    access: Path | None
    """The file to write that tells them where it is; None where they know the address."""
    store: "MapStore"
    """Where the map is kept."""
    token: str
    """The job's token. Workers get another one that is made from it."""


class ServerMap:
    """The owner of the map of a job's servers. In a job without servers, it does nothing."""

    def __init__(self, place: ServerPlace | None = None) -> None:
        """Take the place of the coordinator; None if there can be no servers. Nothing is begun."""
        self._place = place
        self._present: ServersPresent | None = None
        self._over = threading.Event()
        self._coordinator: Coordinator | None = None

    def tell(self, present: ServersPresent) -> None:
        """Have the coordinator take note, soon, of all servers that exist and are desired."""
        self._present = present

    async def open(self, job: ElasticJob) -> None:
        """Read the map, and write the file that tells where the coordinator is.

        Raises:
            ConfigError: The map or the directory of cuts cannot be used.
            TransientError: The map cannot be read now.
            OSError: The file cannot be written.
        """
        if self._place is not None and job.servers is not None:
            await asyncio.to_thread(self._open, self._place, job.metadata, job.servers)

    async def run(self, report: Callable[[TablesStatus], object]) -> None:
        """Run the coordinator in a thread until this call is cancelled.

        While the map cannot be stored, nobody gets it. The coordinator tries again after pauses, as
        for the journal.

        Args:
            report: Called in the event loop with what has changed of the tables, at most every
                ``REPORT_S`` seconds.

        Raises:
            SupersededError: The coordinator of another master owns the map.
        """
        if self._coordinator is None:
            return
        loop = asyncio.get_running_loop()

        def tell(seen: TablesStatus) -> None:
            loop.call_soon_threadsafe(report, seen)

        try:
            await asyncio.to_thread(self._serve, self._coordinator, tell)
        finally:
            self._over.set()

    def _open(self, place: ServerPlace, job: Metadata, spec: ServerSpec) -> None:
        # Imported here: only a job with servers needs these libraries.
        from dlrover_py.checkpoint.directory import DirectoryOwner
        from dlrover_py.ps.cluster_map import AckMode
        from dlrover_py.ps.coordinator import Coordinator
        from dlrover_py.ps.cuts import CutDirectory
        from dlrover_py.ps.planner import PlanRules
        from dlrover_py.ps.settings import token_of, write_access

        cuts = None
        if spec.checkpoints is not None:
            name = f"the servers of {job.name}"
            owner = DirectoryOwner(f"ps-{job.uid}", name) if job.uid else None
            cuts = CutDirectory(spec.checkpoints, owner=owner)
        self._coordinator = Coordinator(
            job.name,
            token_of(place.token),
            place.store,
            PlanRules(
                spec.buckets,
                spec.size,
                spec.copies,
                AckMode(spec.ack),
                least=spec.minimum,
                standbys=spec.standby_replicas,
            ),
            time.monotonic(),
            cuts=cuts,
            listener=place.listener,
        )
        if place.access is not None:
            write_access(place.access, self._coordinator.access)

    def _serve(self, coordinator: "Coordinator", report: Callable[[TablesStatus], None]) -> None:
        told, problem, tries, tick_at = None, "", 0, 0.0
        said: TablesStatus | None = None
        report_at, epoch, lost = 0.0, 0, 0
        try:
            while not self._over.is_set():
                if coordinator.socket.closed:
                    self._over.wait(TICK_S)
                else:
                    coordinator.socket.poll(int(TICK_S * 1000))
                present, now = self._present, time.monotonic()
                if present is not None and present is not told:
                    told = present
                    coordinator.present(
                        frozenset(present.nodes),
                        present.desired,
                        least=present.least,
                        standbys=present.standbys,
                    )
                    coordinator.rebalance(present.rebalance)
                    if present.ended:
                        coordinator.end()
                coordinator.receive(now)
                if now < tick_at:
                    continue
                try:
                    coordinator.tick(now)
                except TransientError as error:  # pushes go on with the map that all have
                    if problem != (problem := f"the map of the servers: {error}"):
                        log.error("map_unwritable", extra={"why": problem})
                    tick_at = time.monotonic() + pause_s(tries, error)
                    tries += 1
                else:
                    problem, tries = "", 0
                    known = coordinator.planner.map
                    if known.epoch != epoch:
                        epoch, before = known.epoch, lost
                        lost = sum(one.lost for one in known.placements)
                        if lost != before:  # else a loss that is soon restored would not be told
                            report_at = now
                    if now >= report_at:
                        report_at = now + REPORT_S
                        new = tables_status(
                            known,
                            coordinator.loads,
                            coordinator.bucket_loads.rates or (),
                            coordinator.rebalanced,
                            coordinator.planner.rules,
                        )
                        if new != said:
                            said = new
                            report(new)
        finally:
            present = self._present
            if present is not None and present.ended:  # it may have come with the end of the loop
                coordinator.end()
            coordinator.close()


def tables_status(
    known: "ClusterMap",
    loads: Mapping[str, "Load"],
    rates: Sequence[float] = (),
    rebalanced: tuple[str, str] | None = None,
    rules: "PlanRules | None" = None,
) -> TablesStatus:
    """Return what people see of the tables and their servers.

    Args:
        known: The map.
        loads: What servers have said of their loads, by id. One that has not said it yet is shown
            without rows.
        rates: Rows per second of each bucket; empty if they are not known yet.
        rebalanced: The last request to even the servers that was answered, and the answer.
        rules: The desired numbers of servers. None: they are not known.
    """
    placed = [one for one in known.placements if not one.lost]
    listed = len(known.placements) <= MAX_LISTED_BUCKETS
    held: dict[str, tuple[list[int], list[int], list[int]]] = defaultdict(lambda: ([], [], []))
    asked: dict[str, float] = defaultdict(float)
    for bucket, one in enumerate(known.placements):
        if one.lost:
            continue
        asked[one.primary] += rates[bucket] if rates else 0.0
        if listed:
            held[one.primary][0].append(bucket)
            for name in one.backups:
                held[name][1].append(bucket)
            if one.learner:
                held[one.learner][2].append(bucket)
    leads = Counter(one.primary for one in placed)
    backs_up = Counter(name for one in placed for name in one.backups)
    receives = Counter(one.primary if one.loading else one.learner for one in placed)
    servers = []
    for name in sorted(map(NodeId, known.servers), key=id_key):
        leading, backing, receiving = held[name]
        made = ServerLoad(
            id=name,
            leads=leads[name],
            backs_up=backs_up[name],
            receives=receives[name],
            asked_per_s=round(asked[name], 1),
            leading=leading,
            backing=backing,
            receiving=receiving,
        )
        if (load := loads.get(name)) is not None:
            said: dict[str, Any] = {
                "rows": load.rows,
                "memory_bytes": load.nbytes,
                "waiting": load.waiting,
            }
            said["pulled_per_s"] = round(load.pulled_per_s, 1)
            said["pushed_per_s"] = round(load.pushed_per_s, 1)
            if any(load.stale_per_s):
                said["stale_pushes_per_s"] = [round(rate, 1) for rate in load.stale_per_s]
            made = made.model_copy(update=said)
        servers.append(made)
    return TablesStatus(
        epoch=known.epoch,
        tables=[table.name for table in known.tables],
        buckets=len(known.placements),
        lost_buckets=len(known.placements) - len(placed),
        desired=rules.servers if rules is not None else 0,
        standbys=rules.standbys if rules is not None else 0,
        single_buckets=sum(not one.backups for one in placed),
        step=known.steps.done,
        servers=servers,
        bucket_rows_per_s=[round(rate, 1) for rate in rates] if listed else [],
        ack=known.ack,
        cut_step=known.source.step if known.source is not None else None,
        restored=known.restored,
        rebalanced=RebalanceAnswer(request=rebalanced[0], words=rebalanced[1])
        if rebalanced is not None
        else None,
    )
