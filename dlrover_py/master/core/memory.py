"""The memory limit of new nodes, which is raised once a node has run out of memory."""

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.protocol.memory_growth import MIB
from dlrover_py.protocol.names import LABEL_QUEUE
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase


class NodeMemory:
    """Decides on the memory limit of new nodes, as ``memoryGrowth`` of the job's spec says."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log

    @property
    def of_new_nodes(self) -> int:
        """The memory limit of new nodes in bytes; 0 for that of the template."""
        raised = self.state.new_nodes.memory
        return raised if raised and raised > self.live.spec.worker.memory else 0

    def grow(self, node: Node) -> str:
        """Raise the limit of new nodes after a node ran out of memory; return why.

        Nodes that run keep their limit. The caller has the node replaced, which costs no budget
        then. If an earlier node has raised the limit already, and this one still had a lower one,
        only the replacement follows. A raise is recorded as an event.

        The result is empty if the failure counts like any other: without ``memoryGrowth``, in a
        queue of Kueue, whose quota is for the template's limit, if the node had the higher limit
        already, in a job that has ended or is suspended, or where the platform does not limit
        memory.
        """
        worker = self.live.spec.worker
        growth = worker.memory_growth
        queued = LABEL_QUEUE in self.live.spec.metadata.labels
        rests = self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED
        if growth is None or queued or rests or not self.live.rules.limits_memory:
            return ""
        had = node.record.memory or worker.memory
        new = self.of_new_nodes or growth.raised(worker.memory)
        if new <= had:
            return ""
        message = f"new nodes have {new // MIB} MiB of memory instead of {worker.memory // MIB} MiB"
        if new != self.state.new_nodes.memory:
            self.state.new_nodes.memory = new
            self.state.changed()
            why = f"node {node.id} ran out of memory: {message}"
            self.log.record(EventReason.MEMORY_RAISED, why, node=node.id)
        return f"{message}, and nothing is charged"
