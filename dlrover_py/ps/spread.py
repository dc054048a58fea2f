"""How buckets are spread over servers, and which one should move to make them more even (pure).

Servers are even by the *weights* of the buckets that they lead. Without weights, each bucket counts
as much. Copies are even by their number, because each needs memory.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from dlrover_py.ps.cluster_map import AckMode, ClusterMap, Placement, Replacing

ENOUGH = 1.05
"""Load of the busiest server, as a multiple of the mean, that is not worth a move.

Weights are measured, so smaller differences may be chance."""
IDLE = 0.8
"""Load of a server, as a multiple of the mean, below which it gets buckets in any case."""
ENOUGH_COPIES = 1.1
"""Copies of a server, as a multiple of the mean, that are not worth a move where weights count."""


def after(one: Placement) -> tuple[str, ...]:
    """Return the members of a bucket when its learner is ready, the primary first."""
    if one.replacing is Replacing.PRIMARY:
        return (one.learner, *backups_after(one))
    if one.replacing is Replacing.BACKUP:
        return (one.primary, one.learner)
    return one.members


def backups_after(one: Placement) -> tuple[str, ...]:
    """Return the backups of a bucket when its learner leads: a backup changes with the primary."""
    return tuple(one.primary if backup == one.learner else backup for backup in one.backups)


def led_loads(known: ClusterMap, weights: Sequence[float]) -> dict[str, float]:
    """Return the load of each server that stays: the sum of the weights of its buckets.

    A bucket counts for the server that leads it when what moves now has moved. A server that has
    no bucket, nor a copy of one, is a standby and is left out.

    Args:
        known: The map.
        weights: One for each bucket.
    """
    having = {server for one in known.placements for server in after(one)}
    staying = known.servers.keys() - set(known.draining)
    loads = dict.fromkeys(sorted(staying & having), 0.0)
    for one, weight in zip(known.placements, weights, strict=True):
        primary = after(one)[0]
        if primary in loads:
            loads[primary] += weight
    return loads


def unevenness_of(known: ClusterMap, weights: Sequence[float]) -> float:
    """Return the load of the busiest server as a multiple of the mean; 1 if there is no load.

    Args:
        known: The map.
        weights: One for each bucket.
    """
    return unevenness(led_loads(known, weights).values())


def unevenness(loads: Collection[float]) -> float:
    """Return the greatest of some loads as a multiple of their mean; 1 if there is no load."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


class Spread:
    """The loads of servers while the planner changes placements one after the other."""

    def __init__(self, known: ClusterMap, targets: list[str]) -> None:
        """Count what each server has, with what is on its way.

        Args:
            known: The map.
            targets: Servers that may get buckets.
        """
        self.copies = Counter(dict.fromkeys(known.servers, 0))
        """Copies of each server."""
        self.led = Counter(dict.fromkeys(known.servers, 0))
        """Sum of the weights of the buckets that each server leads."""
        self._ack, self._targets = known.ack, targets
        self._measured = bool(known.weights)
        self._weights = known.weights or (1,) * len(known.placements)
        for bucket, one in enumerate(known.placements):
            members = after(one)
            self.copies.update(members)
            self.led[members[0]] += self._weights[bucket]
        count = max(1, len(targets))
        self._mean_led = sum(self._weights) / count
        self._mean_copies = self.copies.total() / count
        self._least_led = self._least_copies = 0
        """At most the load, and the copies, of each server that may get buckets."""
        self._look_for_least()

    def order(self, *, coarse: bool) -> list[int]:
        """Return the buckets in the order in which they should move.

        Heavy ones come first. With ``coarse``, all are heavier than half of the gap between two
        servers. The lightest one is then next to the half.
        """
        buckets = range(len(self._weights))
        if not self._measured:
            return list(buckets)
        return sorted(buckets, key=lambda one: self._weights[one] * (1 if coarse else -1))

    def lead(self, server: str, bucket: int) -> None:
        """Note that a server gets a bucket that no running server has."""
        self.led[server] += self._weights[bucket]
        self.copies[server] += 1

    def move(self, bucket: int, old: Placement, new: Placement) -> None:
        """Note that the placement of a bucket changes.

        Args:
            bucket: The bucket.
            old: Its present placement.
            new: The next one.
        """
        before, later = after(old), after(new)
        self.copies.subtract(before)
        self.copies.update(later)
        self.led[before[0]] -= self._weights[bucket]
        self.led[later[0]] += self._weights[bucket]
        self._look_for_least()

    def _look_for_least(self) -> None:
        self._least_led = min((self.led[server] for server in self._targets), default=0)
        self._least_copies = min((self.copies[server] for server in self._targets), default=0)

    def better(self, bucket: int, one: Placement, *, coarse: bool) -> Placement | None:
        """Return a placement that makes servers more even; None if there is none.

        Each one makes the sum of the squares of the loads smaller. So an end is reached.

        Args:
            bucket: The bucket.
            one: Its placement. It does not move.
            coarse: Whether the bucket may be so heavy that its new server has more than its old one
                keeps.
        """
        leaving = one.primary not in self._targets
        may_lead = leaving or self._eases(bucket, one, self._least_led, coarse)
        if not may_lead and not self._should_move(one.backups, self._least_copies):
            return None  # as for nearly all buckets: servers are not compared
        # A backup has the rows: nothing is copied.
        for backup in one.backups:
            if backup in self._targets and (
                leaving or self._eases(bucket, one, self.led[backup], coarse)
            ):
                if self._ack is AckMode.BACKUP:
                    return replace(one, primary=backup, backups=(one.primary,))
                # It may lack the last pushes: it must catch up first, and stays a backup meanwhile.
                return replace(one, learner=backup, replacing=Replacing.PRIMARY)
        members = one.members
        fit = [server for server in self._targets if server not in members]
        if not fit:
            staying = tuple(backup for backup in one.backups if backup in self._targets)
            leave = one.primary in self._targets and staying != one.backups
            return replace(one, backups=staying) if leave else None
        least = min(fit, key=lambda server: (self.led[server], self.copies[server], server))
        if leaving or self._eases(bucket, one, self.led[least], coarse):
            return replace(one, learner=least, replacing=Replacing.PRIMARY)
        least = min(fit, key=lambda server: (self.copies[server], server))
        if self._should_move(one.backups, self.copies[least]):
            return replace(one, learner=least, replacing=Replacing.BACKUP)
        return None

    def _eases(self, bucket: int, one: Placement, led: int, coarse: bool) -> bool:
        """Return whether a bucket should be led by another server, which has some load."""
        weight, gap = self._weights[bucket], self.led[one.primary] - led
        if not (weight < gap if coarse else 2 * weight <= gap):
            return False
        busy = self.led[one.primary] > ENOUGH * self._mean_led
        return not self._measured or busy or led < IDLE * self._mean_led

    def _should_move(self, backups: Collection[str], copies: int) -> bool:
        """Return whether one of some backups should go to a server with a number of copies."""
        for backup in backups:
            gap = self.copies[backup] - copies
            busy = self.copies[backup] > ENOUGH_COPIES * self._mean_copies
            if backup not in self._targets or (
                gap > 1 and (not self._measured or busy or not copies)
            ):
                return True
        return False
