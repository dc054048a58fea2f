"""Advice about memory and CPUs of nodes: what is measured for it, and what new nodes get."""

import math
from dataclasses import replace

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.memory import NodeMemory
from dlrover_py.master.core.usage import WORTH, Advice, Present, advise, measured
from dlrover_py.protocol.memory_growth import MIB
from dlrover_py.protocol.reasons import ConditionReason, EventReason
from dlrover_py.protocol.resource_advice import ResourceAdviceSpec
from dlrover_py.protocol.status import JobPhase
from dlrover_py.protocol.words import duration

SAMPLE_S = 30.0
"""Seconds between two measurements."""
STORED_S = 600.0
"""Seconds of training after which what was measured is stored, if the peak has not grown before."""


class ResourceAdvice:
    """Measures what nodes use, and says what new nodes should have.

    Nothing happens in a job without ``resourceAdvice``.
    """

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._new_nodes = NodeMemory(context)
        self._usage = self.state.new_nodes.usage
        """What was measured."""
        self._next = -math.inf
        """Monotonic time of the next measurement."""
        self._last: tuple[int, float] | None = None
        """Round and time of the last measurement; None if no round ran then."""
        new = self.state.new_nodes
        self._told = new.advised_for, new.advised_memory, new.advised_cpu
        """Hash of the template, memory and CPUs of the last event about advice."""

    def decide(self) -> None:
        """Measure what nodes use if it is time, and change the advice if another one is better."""
        spec, now = self.live.spec.worker.resource_advice, self.live.now
        if spec is None or spec.mode == "off":
            self.live.resource_advice = None
            return
        if self.state.phase.ended:
            return
        if now >= self._next:
            self._next = now + SAMPLE_S
            self._measure()
            self._judge(spec)
        self.live.wake(self._next)

    def _measure(self) -> None:
        """Add a measurement of each node of the present template, if the round trains."""
        world, now = self.state.world, self.live.now
        if self.state.phase is not JobPhase.RUNNING or world is None:
            self._last = None
            return
        before, self._last = self._last, (world.round, now)
        if before is None or before[0] != world.round:
            return  # the first seconds of a round say nothing
        loads = [
            report.load
            for node in self.live.nodes
            if node.id in world.rank_of
            and node.record.template_hash in ("", self.live.template_hash)
            and (report := node.report) is not None
            and report.load is not None
            and report.load.memory_limit
        ]
        stored = self.state.new_nodes.usage
        self._usage = new = measured(
            self._usage,
            self.live.template_hash,
            [(max(load.memory_peak, load.memory_bytes), load.cores) for load in loads],
            min(now - before[1], 2 * SAMPLE_S),  # the master may have stood still
            len(world.members),
        )
        if new.template != stored.template:
            self._store()
            return
        if new.peak < stored.peak:  # a node ran out of memory
            self._usage = new = new.model_copy(update={"peak": stored.peak})
        more = new.peak > stored.peak or new.least_nodes < stored.least_nodes
        if more or new.seconds - stored.seconds >= STORED_S:
            self._store()

    def _store(self) -> None:
        """Have what was measured written with the journal."""
        self.state.new_nodes.usage = self._usage
        self.state.changed()

    def _judge(self, spec: ResourceAdviceSpec) -> None:
        """Compare what was measured with what new nodes have."""
        usage, new = self._usage, self.state.new_nodes
        if usage.template != self.live.template_hash or usage.seconds < spec.observe_seconds:
            so_far = usage.seconds if usage.template == self.live.template_hash else 0.0
            words = f"measured for {duration(so_far)} of {duration(spec.observe_seconds)}"
            self.live.resource_advice = ConditionReason.MEASURING, words
            return
        worker = self.live.spec.worker
        cpu = 0 if worker.has_own_cpus else worker.cpu  # these stay, so there is nothing to say
        present = template = Present(worker.memory, cpu, worker.least, worker.cpu_limit)
        if new.advised_for == usage.template:
            advised_cpu = new.advised_cpu if cpu else 0
            present = replace(template, memory=new.advised_memory, cpu=advised_cpu)
        advice = advise(usage, present, spec.margin, template.memory)
        if new.lack == usage.template and advice.memory < template.memory:
            advice = replace(advice, memory=template.memory)  # less was not enough
        changes = (advice.memory, advice.cpu) != (present.memory, present.cpu)
        if changes:
            new.advised_for = usage.template
            new.advised_memory, new.advised_cpu = advice.memory, advice.cpu
            self.state.changed()
        words = self._words(spec, advice, template)
        if changes and self._is_news(advice):
            self._told = usage.template, advice.memory, advice.cpu
            self.log.record(EventReason.RESOURCES_ADVISED, words)
        fits = (advice.memory, advice.cpu) == (template.memory, template.cpu)
        why = ConditionReason.AS_EXPECTED if fits else ConditionReason.RESOURCES_ADVISED
        self.live.resource_advice = why, words

    def _is_news(self, advice: Advice) -> bool:
        """Return whether changed advice is worth an event, which would displace an older one."""
        template, memory, cpu = self._told
        if template != self._usage.template or cpu != advice.cpu:
            return True
        return abs(advice.memory - memory) >= WORTH * memory

    def _words(self, spec: ResourceAdviceSpec, advice: Advice, template: Present) -> str:
        """Return the advice in a sentence, with what new nodes get of it.

        Args:
            spec: What the job's spec says of advice.
            advice: The advice.
            template: What the template has.
        """
        parts = []
        if advice.memory != template.memory:
            parts.append(f"memory {_mib(advice.memory)} instead of {_mib(template.memory)}")
        if advice.cpu != template.cpu:
            parts.append(f"CPU request {advice.cpu}m instead of {template.cpu}m")
        if not parts:
            return f"memory and CPUs of the template fit: {advice.why}"
        text = f"{' and '.join(parts)}: {advice.why}"
        if spec.mode != "auto":
            return text
        if self.live.spec.in_queue:
            return (
                f"{text}; new nodes have what the template says, as the queue's quota is for that"
            )
        memory, cpu = self._new_nodes.of_new_nodes, self._new_nodes.cpu_of_new_nodes
        get = [_mib(memory)] * bool(memory) + [f"{cpu}m"] * bool(cpu)
        return f"{text}; new nodes get {' and '.join(get) or 'what the template has'}"


def _mib(nbytes: int) -> str:
    """Return a number of bytes as a quantity of Kubernetes."""
    return f"{math.ceil(nbytes / MIB)}Mi"
