"""Which nodes may be on spot hosts, as ``spotPolicy`` of the job's spec says.

Spot hosts are cheap and are taken away at short notice. The nodes of the minimum are created with
the requirement to be kept off them. All others may be anywhere, and which hosts they got is not
looked at.
"""

import math

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node, Readiness
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import date_time
from dlrover_py.protocol.words import counted

RECLAIMS, SHARE, MOST = 3, 0.05, 64
"""Reclaims after which only nodes of the minimum are requested: three, or this share of the desired
nodes if that is more, but this many at most."""
WITHIN_S = 3600.0
"""Seconds within which so many reclaims count."""


class SpotHosts:
    """Decides which new nodes are kept off spot hosts, and when no others are requested."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log

    def stable_missing(self) -> int:
        """Return how many of the next new nodes must be kept off spot hosts; 0 without the policy.

        Nodes count toward the minimum if they were created with this requirement and are not gone
        or leaving.
        """
        if not self._applies:
            return 0
        there = sum(n.record.stable and n.readiness is not Readiness.OUT for n in self.live.nodes)
        return max(0, self.live.size.least - there)

    def held_until(self) -> float:
        """Return the monotonic time until which only nodes of the minimum are requested.

        It is the time at which the first of the reclaims that count is ``WITHIN_S`` old. The result
        is -inf if that is over, or if there were fewer reclaims.
        """
        reclaims, many = self.state.new_nodes.reclaims, self._many
        if not self._applies or len(reclaims) < many:
            return -math.inf
        left = reclaims[-many] + WITHIN_S - self.live.wall
        # After a jump of the clock, a reclaim may lie in the future: it counts no more.
        return self.live.now + left if 0 < left <= WITHIN_S else -math.inf

    def note_reclaim(self, node: Node) -> None:
        """Note that the platform takes away, with notice, a node that may be on a spot host.

        Nodes that are kept off spot hosts are left out. If there were too many reclaims within an
        hour, an event says until when only nodes of the minimum are requested.
        """
        if not self._applies or node.record.stable:
            return
        record = self.state.new_nodes
        record.reclaims = [*record.reclaims, self.live.wall][-MOST:]
        self.state.changed()
        left = self.held_until() - self.live.now
        if left > 0:
            message = (
                f"{counted(self._many, 'node')} that may be on spot hosts were taken away within "
                "an hour: only nodes of the minimum are requested until "
                f"{date_time(self.live.wall + left)}"
            )
            self.log.record(EventReason.SPOT_HELD, message, node=node.id, warning=True)

    def forget(self) -> None:
        """Forget all reclaims, because the user asks for nodes."""
        if self.state.new_nodes.reclaims:
            self.state.new_nodes.reclaims = []
            self.state.changed()

    @property
    def _many(self) -> int:
        """How many reclaims within ``WITHIN_S`` are too many."""
        return min(MOST, max(RECLAIMS, int(SHARE * self.live.desired)))

    @property
    def _applies(self) -> bool:
        """Whether the job has the policy, and its platform can follow it.

        In a queue of Kueue, its flavors say which hosts a node may have. Otherwise the allocator
        says it, if it knows pools of hosts.
        """
        spec, rules = self.live.spec, self.live.rules
        placed = spec.in_queue or bool(spec.allocation and spec.allocation.placements)
        return spec.worker.spot_policy != "any" and rules.avoids_hosts and not placed
