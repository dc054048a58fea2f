"""Which nodes may be on spot hosts, as ``spotPolicy`` of the job's spec says.

Spot hosts are cheap and are taken away at short notice.
"""

import math

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node, Readiness
from dlrover_py.protocol.names import LABEL_QUEUE
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import date_time
from dlrover_py.protocol.words import counted

RECLAIMS, WITHIN_S = 3, 3600.0
"""After so many reclaimed nodes within so many seconds, no new node is put on a spot host."""


class SpotHosts:
    """Decides which new nodes must be on stable hosts, and when none is put on a spot host."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log

    def stable_missing(self) -> int:
        """Return how many of the next new nodes must be on stable hosts."""
        if not self._applies:
            return 0
        there = sum(n.record.stable and n.readiness is not Readiness.OUT for n in self.live.nodes)
        return max(0, self.live.spec.worker.minimum - there)

    def held_until(self) -> float:
        """Return the time until which no new node is put on a spot host; -inf if there is none.

        It is the time at which the first of the last ``RECLAIMS`` reclaims is ``WITHIN_S`` old.
        """
        if not self._applies or len(self.state.new_nodes.reclaims) < RECLAIMS:
            return -math.inf
        left = self.state.new_nodes.reclaims[0] + WITHIN_S - self.live.wall
        return self.live.now + min(left, WITHIN_S) if left > 0 else -math.inf

    def note_reclaim(self, node: Node) -> None:
        """Note that the platform takes a node away, unless it is on a stable host.

        An event says so if no new node is put on a spot host because of it.
        """
        if not self._applies or node.record.stable:
            return
        record = self.state.new_nodes
        record.reclaims = [*record.reclaims, self.live.wall][-RECLAIMS:]
        self.state.changed()
        left = self.held_until() - self.live.now
        if left > 0:
            message = (
                f"{counted(RECLAIMS, 'node')} on spot hosts were taken away within an hour: no new "
                f"node is put on one until {date_time(self.live.wall + left)}"
            )
            self.log.record(EventReason.SPOT_HELD, message, node=node.id, warning=True)

    @property
    def _applies(self) -> bool:
        """Whether the job has the policy, and its platform can follow it.

        In a queue of Kueue, its flavors say which hosts a node may have.
        """
        spec, rules = self.live.spec, self.live.rules
        queued = LABEL_QUEUE in spec.metadata.labels
        return spec.worker.spot_policy != "any" and rules.avoids_hosts and not queued
