"""Keeps what is known when a fault ends a round: the failure, and the last look at its ranks.

Agents take the last look by themselves, before they stop their workers, and send it afterwards. The
next round does not wait for it.
"""

from dlrover_py.master.core.diagnosis.last_looks import keep_looks
from dlrover_py.master.core.events import SnapshotArrived
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.policy import in_words, with_cause
from dlrover_py.protocol.agents import FailureKind
from dlrover_py.protocol.bundles import has_own_failure
from dlrover_py.protocol.diagnosis import LAST_LOOK_NODES, EvidenceKind, NodeSnapshot
from dlrover_py.protocol.names import NodeId, Round
from dlrover_py.protocol.status import Failure

MOST_LOOKS = 2 * LAST_LOOK_NODES
"""Most last looks that are kept: they must not take all memory of this master."""
LAST_LOOKS_S = 5.0
"""Seconds that nodes have to send their last look. They send it once their workers have ended."""


class CrashEvidence:
    """The bundles of one job about rounds that a failure of a worker has ended."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live = context.state, context.live
        self._seen = self.state.last_failure
        """The newest failure that was looked at."""
        self._failure: Failure | None = None
        """The failure whose bundle is awaited; None if none is."""
        self._due = 0.0
        self._asked: set[NodeId] = set()
        """Nodes whose last look is awaited."""
        self._looks: dict[NodeId, NodeSnapshot] = {}
        """Last looks at the newest round that has ended, which may come before its failure."""

    def take_look(self, event: SnapshotArrived) -> None:
        """Take in a node's last look at a round. One that is late is dropped.

        Beyond ``MOST_LOOKS``, the least interesting one goes: workers on all nodes of a large job
        may fail because of one.
        """
        node, snapshot = self.live.nodes.get(event.node), event.snapshot
        if node is None or node.boot_id != snapshot.boot_id:
            return
        newest = max((one.round for one in self._looks.values()), default=0)
        if snapshot.round < newest:
            return
        if snapshot.round > newest:
            self._looks.clear()
        self._looks[event.node] = snapshot
        if len(self._looks) > MOST_LOOKS:
            # Of equal ones, the newest one goes.
            del self._looks[min(reversed(self._looks), key=self._interest)]

    def _interest(self, node: NodeId) -> tuple[bool, bool, bool]:
        """Return how much the last look of a node is wanted; compare it with that of another."""
        failed = self._failure is not None and self._failure.node == node
        return failed, has_own_failure(self._looks[node]), node in self._asked

    def decide(self) -> None:
        """Await the last looks at a round that has failed, and keep the bundle once they are there.

        A hang has a bundle already. The bundle of an earlier failure is kept at once.
        """
        failure = self.state.last_failure
        if failure is not None and failure is not self._seen:
            self._seen = failure
            if self._failure is not None:
                self._keep()
            if failure.worker.kind is not FailureKind.HANG:
                self._failure = failure
                self._due = self.live.now + LAST_LOOKS_S
                world = self.state.world
                members = [m.node for m in world.members[:LAST_LOOK_NODES]] if world else []
                self._asked = {NodeId(failure.node), *members}
        if self._failure is None:
            return
        number = self._failure.round
        missing = {
            node_id
            for node_id in self._asked
            if (node := self.live.nodes.get(node_id)) is not None and node.alive
            if node_id not in self._looks or self._looks[node_id].round != number
        }
        if missing and self.live.now < self._due:
            self.live.wake(self._due)
        else:
            self._keep()

    def looks_at(self, number: Round) -> dict[NodeId, NodeSnapshot]:
        """Return the last looks at a round that are there."""
        return {node: one for node, one in self._looks.items() if one.round == number}

    def end(self) -> bool:
        """Wait for no further looks; return whether a bundle waits for the next decision."""
        self._due = 0.0
        return self._failure is not None

    def _keep(self) -> None:
        """Keep the bundle of the failure that is awaited."""
        failure, self._failure = self._failure, None
        asked, self._asked = self._asked, set()
        assert failure is not None
        looks = self.looks_at(Round(failure.round))
        keep_looks(
            self.state,
            self.live,
            looks,
            kind=EvidenceKind.FAILURE,
            round=failure.round,
            step=failure.worker.step,
            reason=with_cause(f"{failure.node}: {in_words(failure.worker)}", failure.worker),
            failure=failure,
            node=failure.node,
            missing=sorted(asked - looks.keys()),
        )
