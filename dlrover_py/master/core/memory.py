"""The memory limit of new nodes, which is raised once a node has run out of memory."""

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.protocol.memory_growth import MIB, MemoryGrowthSpec
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase


class NodeMemory:
    """Decides on the memory limit of new nodes, as ``memoryGrowth`` of the job's spec says."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log

    @property
    def of_new_nodes(self) -> int:
        """The memory limit of new nodes in bytes; 0 for that of the template.

        A raise counts until the template has as much, ``memoryGrowth`` is removed, or the job is
        put into a queue of Kueue.
        """
        raised, worker, growth = self.state.new_nodes.memory, self.live.spec.worker, self._growth
        if not raised or growth is None:
            return 0
        raised = min(raised, growth.limit_bytes)
        return raised if raised > worker.memory else 0

    def grow(self, node: Node) -> str:
        """Raise the limit of new nodes after a node ran out of memory; return why.

        Nodes that run keep their limit. The caller has the node replaced, which costs no budget
        then. If new nodes have a higher limit than this one already, only the replacement follows:
        after an earlier raise, or if it was created from another template. A raise is recorded as
        an event.

        The result is empty if the failure counts like any other: without ``memoryGrowth``, in a
        queue of Kueue, whose quota is for the template's limit, if the node had the higher limit
        already, in a job that has ended or is suspended, or where the platform does not limit
        memory.
        """
        if self._growth is None or self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED:
            return ""
        worker = self.live.spec.worker
        if why := self.lacks(node):
            return why
        new = self._growth.raised(worker.memory)
        if self.of_new_nodes or new == worker.memory:
            return ""
        self.state.new_nodes.memory = new
        self.state.changed()
        message = f"new nodes have {new // MIB} MiB of memory instead of {worker.memory // MIB} MiB"
        self.log.record(
            EventReason.MEMORY_RAISED,
            f"node {node.id} ran out of memory: {message}",
            node=node.id,
        )
        return f"{message}, and nothing is charged"

    def lacks(self, node: Node) -> str:
        """Return why a node that ran out of memory is replaced without a charge; else empty.

        That is so if new nodes have a higher limit, or if it was created from another template.
        """
        if self._growth is None:
            return ""
        worker = self.live.spec.worker
        new = self.of_new_nodes or worker.memory
        outdated = node.record.template_hash not in ("", self.live.template_hash)
        had = node.record.memory or (0 if outdated else worker.memory)
        if new <= had:
            return ""
        return f"new nodes have {new // MIB} MiB of memory, and nothing is charged"

    @property
    def _growth(self) -> MemoryGrowthSpec | None:
        """What the spec says about higher limits; None if there can be none."""
        if self.live.spec.in_queue or not self.live.rules.limits_memory:
            return None
        return self.live.spec.worker.memory_growth
