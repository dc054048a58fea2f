"""The map of a parameter server for people and scripts: who has which bucket, and what would move.

Pure functions of the status that the job's master publishes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.protocol.job_view import load_shares
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import MAX_LISTED_BUCKETS, JobStatus, TablesStatus
from dlrover_py.protocol.words import counted, plain


@dataclass(frozen=True, slots=True)
class BucketMove:
    """A bucket that gets another primary, or a copy on another server."""

    bucket: int
    primary: str
    """The present primary."""
    to: str
    """The later primary."""
    copied_to: str
    """The server to which the rows are copied; empty if it has them."""

    @property
    def words(self) -> str:
        """The move as a sentence."""
        line = f"bucket {self.bucket}: "
        if self.to != self.primary:
            line += f"{self.primary} → {self.to}"
            return line + (", copied" if self.copied_to == self.to else ", which has a copy")
        return line + f"a copy on {self.copied_to}"


def leaving_servers(status: JobStatus) -> set[str]:
    """Return the servers of a job that are to leave."""
    return {one.id for one in status.servers if one.message}


def numbers(buckets: Sequence[int]) -> str:
    """Return ascending numbers as a short text, such as ``0-3 7``."""
    runs: list[list[int]] = []
    for bucket in buckets:
        if runs and bucket == runs[-1][1] + 1:
            runs[-1][1] = bucket
        else:
            runs.append([bucket, bucket])
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def table(tables: TablesStatus, leaving: Collection[str] = ()) -> Table:
    """Return what each server has, as a table.

    Args:
        tables: The tables.
        leaving: Servers that are to leave.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("SERVER")
    for name in ("ASKED/S", "OF MEAN"):
        made.add_column(name, justify="right", no_wrap=True)
    for name in ("LEADS", "COPIES OF", "RECEIVES"):
        made.add_column(name, overflow="fold")
    shares = load_shares(tables, leaving)
    listed = tables.buckets <= MAX_LISTED_BUCKETS
    for one in tables.servers:
        made.add_row(
            plain(one.id),
            f"{one.asked_per_s:,.0f}",
            f"{shares[one.id]:.2f}" if shares else "–",
            numbers(one.leading) if listed else f"{one.leads} buckets",
            numbers(one.backing) if listed else f"{one.backs_up} buckets",
            numbers(one.receiving) if listed else f"{one.receives} buckets",
        )
    return made


def document(tables: TablesStatus, leaving: Collection[str] = ()) -> dict[str, Any]:
    """Return the map for scripts.

    ``placements`` is empty with more than 512 buckets, and if servers are not listed.

    Args:
        tables: The tables.
        leaving: Servers that are to leave. None of them counts as the busiest one.
    """
    shares, rates = load_shares(tables, leaving), tables.bucket_rows_per_s
    staying = [share for name, share in shares.items() if name not in leaving]
    placements: list[dict[str, Any]] = [
        {"bucket": bucket, "primary": None, "backups": [], "receivers": [], "rows_per_s": rate}
        for bucket, rate in enumerate(rates or [None] * tables.buckets)
    ]
    shown = tables.servers
    if tables.buckets > MAX_LISTED_BUCKETS or tables.unlisted_buckets:
        placements, shown = [], []
    for one in shown:
        for bucket in one.leading:
            placements[bucket]["primary"] = one.id
        for bucket in one.backing:
            placements[bucket]["backups"].append(one.id)
        for bucket in one.receiving:
            placements[bucket]["receivers"].append(one.id)
    return {
        "epoch": tables.epoch,
        "buckets": tables.buckets,
        "lost_buckets": tables.lost_buckets,
        "unlisted_buckets": tables.unlisted_buckets,
        "busiest": max(staying, default=None),
        "servers": [
            {
                "id": one.id,
                "rows_per_s": one.asked_per_s,
                "of_mean": shares.get(one.id),
                "leads": one.leads,
                "copies_of": one.backs_up,
                "receives": one.receives,
            }
            for one in tables.servers
        ],
        "placements": placements,
    }


def has_left(status: JobStatus, server: str) -> bool:
    """Return whether a server that was asked to leave has ended.

    The tables alone do not say so: they do not list a server that was silent for some seconds,
    although it may still have rows.

    Args:
        status: The status of its job.
        server: Id of the server.

    Raises:
        DLRoverError: It ended before it had given all its rows away.
    """
    for event in status.events:
        if event.reason == EventReason.NODE_LOST and event.node == server:
            raise DLRoverError(
                f"{plain(event.message)}; rows without a further copy are lost: see the condition "
                "TablesAtRisk in `dlrover job describe`"
            )
    listed = {one.id for one in status.servers}
    if status.tables is not None:
        listed |= {one.id for one in status.tables.servers}
    return server not in listed


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What `dlrover ps rebalance` would do."""

    busiest: float
    """The load of the busiest server now, as a multiple of the mean."""
    later: float
    """The load of the busiest server when all has moved, as a multiple of the mean."""
    moves: list[BucketMove]

    @property
    def words(self) -> str:
        """The result as a sentence."""
        if not self.moves:
            return f"nothing would move: the busiest server has {self.busiest:.2f} times the mean"
        return (
            f"{counted(len(self.moves), 'bucket')} would move: the busiest server has "
            f"{self.busiest:.2f} times the mean load, and would have {self.later:.2f}"
        )


def foreseen(status: JobStatus) -> Foreseen:
    """Return what would move now. The coordinator decides by newer loads, so it may differ.

    Raises:
        ConfigError: The buckets or their loads are not known.
    """
    from dlrover_py.ps.balance import LEAST_ASKED_GAIN, weights_of
    from dlrover_py.ps.planner import PlanRules, outlook

    tables = status.tables
    weights = weights_of(tables.bucket_rows_per_s) if tables is not None else ()
    if tables is None or not weights:
        raise ConfigError(
            "expected workers that have asked for rows in the last half minute, found loads of no "
            f"bucket; they are listed with at most {MAX_LISTED_BUCKETS} buckets"
        )
    known = _known(tables, leaving_servers(status))
    copies = max(len(one.members) for one in known.placements)
    if tables.standbys and not tables.desired:
        raise ConfigError(
            "expected the desired number of servers in the status of the job, found none: its "
            "master is of an earlier release; leave --dry-run out"
        )
    rules = PlanRules(
        buckets=tables.buckets,
        servers=max(1, tables.desired),  # it counts only if there are standbys
        replicas=copies,
        standbys=tables.standbys,
    )
    found = outlook(known, rules, weights, LEAST_ASKED_GAIN)
    moves = []
    for bucket, (old, new) in enumerate(zip(known.placements, found.map.placements, strict=True)):
        copied = [name for name in new.members if name not in old.members]
        if copied or old.primary != new.primary:
            moves.append(BucketMove(bucket, old.primary, new.primary, "".join(copied[:1])))
    return Foreseen(found.busiest, found.later, moves)


def _known(tables: TablesStatus, leaving: Collection[str]) -> Any:
    """Return the cluster map that a status tells, without what is on its way.

    Raises:
        ConfigError: A bucket has no server, or servers are not listed.
    """
    from dlrover_py.ps.cluster_map import AckMode, ClusterMap, Placement

    if tables.unlisted_buckets:
        raise ConfigError(
            f"expected the servers of all buckets in the status of the job, found "
            f"{counted(len(tables.servers), 'server')}, and "
            f"{counted(tables.unlisted_buckets, 'bucket')} of others: leave --dry-run out"
        )
    placements: list[Placement | None] = [None] * tables.buckets
    backups: list[list[str]] = [[] for _ in placements]
    for one in tables.servers:
        for bucket in one.backing:
            backups[bucket].append(one.id)
    for one in tables.servers:
        for bucket in one.leading:
            placements[bucket] = Placement(1, one.id, tuple(backups[bucket]))
    found = [one for one in placements if one is not None]
    if len(found) < len(placements):
        raise ConfigError(
            f"{counted(len(placements) - len(found), 'bucket')} has no server: expected "
            "`dlrover ps map` without lost buckets"
        )
    return ClusterMap(
        "job",
        ack=AckMode(tables.ack),
        servers={one.id: "" for one in tables.servers},
        draining=tuple(one.id for one in tables.servers if one.id in leaving),
        placements=tuple(found),
    )
