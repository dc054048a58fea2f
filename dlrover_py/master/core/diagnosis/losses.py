"""Keeps what is known of nodes that were lost with their agents, which send nothing any more."""

from collections.abc import Callable, Iterator, Mapping

from dlrover_py.master.core.diagnosis.last_looks import keep_looks
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Loss
from dlrover_py.master.core.policy import in_words, with_cause
from dlrover_py.protocol.agents import NodeLoad, Progress
from dlrover_py.protocol.diagnosis import EvidenceKind, NodeSnapshot
from dlrover_py.protocol.names import NodeId, Round
from dlrover_py.protocol.words import byte_size, counted, duration

TOGETHER_S = 5.0
"""Seconds after a loss in which further losses belong to it. Until then the other nodes have sent
their last look, and a platform may have said how the node ended."""
MOST_FACTS = 64
"""Most lines about lost nodes in a bundle."""


class LossEvidence:
    """The bundles of one job about nodes that were lost: what they have reported last."""

    def __init__(
        self, context: CoreContext, looks: Callable[[Round], Mapping[NodeId, NodeSnapshot]]
    ) -> None:
        """Keep nothing yet.

        Args:
            context: The state of the job.
            looks: Returns the last looks of other nodes at a round.
        """
        self.state, self.live, self._looks = context.state, context.live, looks
        self._at_once = False

    def decide(self) -> None:
        """Keep the bundle of the nodes that were lost, once it is complete."""
        losses = list(self.live.nodes.losses.values())
        if not losses:
            return
        due = losses[0].at + TOGETHER_S
        if self.live.now < due and not self._at_once:
            self.live.wake(due)
            return
        self.live.nodes.losses.clear()
        self._keep(losses)

    def end(self) -> bool:
        """Wait no longer; return whether a bundle waits for the next decision."""
        self._at_once = True
        return bool(self.live.nodes.losses)

    def _keep(self, losses: list[Loss]) -> None:
        """Keep the bundle of these nodes, in the order in which they were lost."""
        first = losses[0]
        more = f", and {counted(len(losses) - 1, 'further node')}" if len(losses) > 1 else ""
        steps = [
            one.report.progress.step
            for one in losses
            if one.report is not None and one.report.progress is not None
        ]
        keep_looks(
            self.state,
            self.live,
            self._looks(first.round),
            kind=EvidenceKind.LOST,
            round=first.round,
            step=max(steps, default=None),
            reason=f"node {first.node.id} was lost: {first.why}{more}",
            node=first.node.id,
            facts=[fact for one in losses for fact in _facts(one)][:MOST_FACTS],
            missing=sorted(one.node.id for one in losses),
        )


def _facts(loss: Loss) -> Iterator[str]:
    """Yield what is known of a lost node, in lines that begin with its id."""
    node, report = loss.node, loss.report
    name = f"{node.id}{f' on {node.host}' if node.host else ''}"
    yield f"{name}: was lost: {loss.why}"
    if loss.ended and loss.ended != loss.why:
        yield f"{name}: its platform says: {loss.ended}"
    if node.message:
        yield f"{name}: its platform said before: {node.message}"
    if report is None:
        yield f"{name}: it has not reported to this master"
        return
    ago = duration(max(0.0, loss.at - loss.heard_at))
    yield f"{name}: last report {ago} before, its workers {report.phase} in round {report.follows}"
    if report.progress is not None:
        yield f"{name}: {_steps(report.progress)}"
    if report.load is not None and (line := _load(report.load)):
        yield f"{name}: {line}"
    if report.failure is not None:
        yield f"{name}: {with_cause(in_words(report.failure), report.failure)}"
    for finding in report.log_findings:
        yield f"{name}: {finding.rule or 'log rules'}: {finding.said}"


def _steps(progress: Progress) -> str:
    """Return what a node has reported of its steps."""
    total = f" of {progress.total}" if progress.total is not None else ""
    speed = f", {progress.steps_per_s:.3g} steps/s" if progress.steps_per_s else ""
    spent = ", ".join(
        f"{what} {seconds:.1f} s" for what, seconds in progress.spent.items() if what != "saves"
    )
    return f"step {progress.step}{total}{speed}" + (f"; in this round {spent}" if spent else "")


def _load(load: NodeLoad) -> str:
    """Return what a node used and lacked, in words; empty if nothing is known."""
    parts = []
    if load.memory_limit:
        used, limit = byte_size(load.memory_bytes), byte_size(load.memory_limit)
        parts.append(f"memory {used} of {limit} (at most {byte_size(load.memory_peak)})")
        parts.append(f"{load.cores:.1f} CPUs")
    waits = (("CPU", load.cpu), ("memory", load.memory), ("storage", load.io))
    for what, share in (*waits, ("the network", load.sending)):
        if share >= 0.01:
            parts.append(f"waited for {what} {share:.0%} of the time")
    if load.throttled >= 0.01:
        parts.append(f"its CPU limit stopped it in {load.throttled:.0%} of the periods")
    if load.clocks:
        parts.append(f"{load.clocks:.0%} of its GPUs were slowed")
    return ", ".join(parts)
