"""What new nodes have of memory and CPUs: more memory once a node has run out of it, and what the
advice gives them."""

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.protocol.memory_growth import MIB, MemoryGrowthSpec
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.resource_advice import CpuRange, MemoryRange, ResourceAdviceSpec
from dlrover_py.protocol.status import JobPhase


class NodeMemory:
    """Decides on the memory limit and the CPU request of new nodes.

    ``memoryGrowth`` and ``resourceAdvice`` of the job's spec say what they may be.
    """

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log

    @property
    def of_new_nodes(self) -> int:
        """The memory limit of new nodes in bytes; 0 for that of the template.

        A raise counts until the template has as much, ``memoryGrowth`` is removed, or the job is
        put into a queue of Kueue. It counts more than advice to have less.
        """
        return max(self._raised, self._advised_memory)

    @property
    def cpu_of_new_nodes(self) -> int:
        """The CPU request of new nodes in thousandths of a CPU; 0 for that of the template."""
        worker, advice = self.live.spec.worker, self._advice
        if advice is None or advice.cpu is None or not worker.cpu or worker.has_own_cpus:
            return 0
        found = _within(self.state.new_nodes.advised_cpu, worker.cpu, advice.cpu)
        return found if found != worker.cpu else 0

    @property
    def _raised(self) -> int:
        """The limit in bytes after a raise; 0 if none counts."""
        raised, worker, growth = self.state.new_nodes.memory, self.live.spec.worker, self._growth
        if not raised or growth is None:
            return 0
        raised = min(raised, growth.limit_bytes)
        return raised if raised > worker.memory else 0

    @property
    def _advised_memory(self) -> int:
        """The limit in bytes that the advice gives to new nodes; 0 for that of the template."""
        worker, new, advice = self.live.spec.worker, self.state.new_nodes, self._advice
        if advice is None or advice.memory is None:
            return 0
        found = _within(new.advised_memory, worker.memory, advice.memory)
        lowered = found < worker.memory
        if found == worker.memory or (lowered and new.lack == self.live.template_hash):
            return 0
        return found

    @property
    def _advice(self) -> ResourceAdviceSpec | None:
        """What the spec says about advice that new nodes get; None if they get none."""
        advice, new = self.live.spec.worker.resource_advice, self.state.new_nodes
        if advice is None or advice.mode != "auto" or new.advised_for != self.live.template_hash:
            return None
        if self.live.spec.in_queue or not self.live.rules.limits_memory:
            return None
        return advice

    def end_lowering(self, node: Node) -> str:
        """Give new nodes the template's limit again if a node ran out of memory; return why.

        That is so if advice had lowered the limit of new nodes, and this node had no less. What it
        had is noted as its peak. New nodes have no less than the template then, until the template
        changes. That is recorded as an event. In a job that has ended or is suspended, nothing
        happens.

        The result is empty if the node itself had no less than the template. Its failure may then
        cost what it would cost anyway.
        """
        if self._rests:
            return ""
        worker, new_nodes, had = self.live.spec.worker, self.state.new_nodes, self._had(node)
        if new_nodes.usage.template == self.live.template_hash and new_nodes.usage.peak < had:
            new_nodes.usage = new_nodes.usage.model_copy(update={"peak": had})
            self.state.changed()
        if 0 < (before := self.of_new_nodes) <= min(had, worker.memory - 1):
            new_nodes.lack = self.live.template_hash
            self.state.changed()
            self._record(node, before, worker.memory)
        return self.lacks(node) if 0 < node.record.memory < worker.memory else ""

    def grow(self, node: Node) -> str:
        """Raise the limit of new nodes after a node ran out of memory; return why.

        The caller has the node replaced, which costs no budget then. If new nodes have a higher
        limit than this one already, only the replacement follows: after an earlier raise, or if it
        was created from another template. A raise is recorded as an event.

        The result is empty if the failure counts like any other: without ``memoryGrowth``, in a
        queue of Kueue, whose quota is for the template's limit, if the node had the higher limit
        already, in a job that has ended or is suspended, or where the platform does not limit
        memory.
        """
        if self._rests:
            return ""
        worker, new_nodes, had = self.live.spec.worker, self.state.new_nodes, self._had(node)
        if why := self.lacks(node):
            return why
        new = self._growth.raised(worker.memory) if self._growth is not None else 0
        if self._raised or new <= had:
            return ""
        new_nodes.memory = new
        self.state.changed()
        self._record(node, worker.memory, new)
        return self.lacks(node)

    @property
    def _rests(self) -> bool:
        """Whether the job has ended or is suspended."""
        return self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED

    def _record(self, node: Node, before: int, new: int) -> None:
        """Record that the limit of new nodes was raised."""
        self.log.record(
            EventReason.MEMORY_RAISED,
            f"node {node.id} ran out of memory: new nodes have {new // MIB} MiB of memory instead "
            f"of {before // MIB} MiB",
            node=node.id,
        )

    def lacks(self, node: Node) -> str:
        """Return why a node that ran out of memory is replaced without a charge; else empty.

        That is so if new nodes have a higher limit, or if it was created from another template.
        """
        if self._growth is None and self.live.spec.worker.resource_advice is None:
            return ""
        if self.live.spec.in_queue or not self.live.rules.limits_memory:
            return ""
        new = self.of_new_nodes or self.live.spec.worker.memory
        if new <= self._had(node):
            return ""
        return f"new nodes have {new // MIB} MiB of memory, and nothing is charged"

    def _had(self, node: Node) -> int:
        """Return the memory limit of a node in bytes; 0 if that is not known."""
        outdated = node.record.template_hash not in ("", self.live.template_hash)
        return node.record.memory or (0 if outdated else self.live.spec.worker.memory)

    @property
    def _growth(self) -> MemoryGrowthSpec | None:
        """What the spec says about higher limits; None if there can be none."""
        if self.live.spec.in_queue or not self.live.rules.limits_memory:
            return None
        return self.live.spec.worker.memory_growth


def _within(advised: int, present: int, span: MemoryRange | CpuRange) -> int:
    """Return what new nodes get of advice: no less and no more than a range, or than the template.

    Args:
        advised: What is advised.
        present: What the template has.
        span: The range.
    """
    if advised < present:
        return max(advised, min(span.least, present))
    return min(advised, max(span.most, present))
