"""Tells that a training computes wrong values, and takes it back to a good step if allowed.

Workers find values that are not finite, and replicas that differ, and report them as long as they
last. Spikes are found here.
"""

from collections.abc import Sequence
from typing import assert_never

from dlrover_py.master.core.diagnosis.spikes import SpikeWatch
from dlrover_py.master.core.diagnosis.stacks import ranks_in_words
from dlrover_py.master.core.failures import Failures
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.rendezvous import RoundMembers
from dlrover_py.master.core.state import NON_DISRUPTIVE, Look
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.agents import (
    AgentReport,
    FailureKind,
    WorkerFailure,
    WrongKind,
    WrongValue,
)
from dlrover_py.protocol.checkpoint_id import Rejection
from dlrover_py.protocol.diagnosis import EvidenceKind
from dlrover_py.protocol.names import NodeId, Step
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.sdk import WATCHED
from dlrover_py.protocol.status import JobPhase
from dlrover_py.protocol.words import counted

WAIT_REPORTS = 3.0
"""Times between two reports of a node in which it has to say whether its ranks have a value that is
not finite, too, before the round is ended for it."""
_REASONS = {
    WrongKind.NOT_FINITE: EventReason.NOT_FINITE,
    WrongKind.SPIKE: EventReason.SPIKE,
    WrongKind.REPLICAS: EventReason.REPLICAS_DIFFER,
}


class WrongValues:
    """The detector of wrong values of one job."""

    def __init__(self, context: CoreContext, failures: Failures, transitions: Transitions) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._failures, self._transitions = failures, transitions
        self._round = self.state.round
        self._found: dict[NodeId, Sequence[WrongValue]] = {}
        """What members of the round report that have wrong values."""
        self._reported: dict[NodeId, float] = {}
        """Time of the newest report of each member of the round."""
        self._not_finite_since: float | None = None
        """Since when some value is not finite; None if all are finite."""
        self._spikes: dict[str, SpikeWatch] = {}
        """The values of each watched metric in this round."""
        self._told: dict[WrongKind, str] = {}
        """What is wrong now and was told, in words."""

    def take_report(self, node_id: NodeId, report: AgentReport) -> None:
        """Take in the wrong values of a member of the round, and its metrics."""
        node = self.live.nodes.get(node_id)
        if node is None or node.report is not report or report.follows != self.state.round:
            return
        if not self.state.trains(node_id, node.incarnation):
            return
        self._begin_round()
        self._reported[node_id] = self.live.now
        if report.wrong:
            self._found[node_id] = report.wrong
        else:
            self._found.pop(node_id, None)
        progress = report.progress
        if progress is None or self.live.progress is None or self.live.progress[1] is not progress:
            return
        for name in WATCHED:
            if name in progress.metrics:
                watch = self._spikes.setdefault(name, SpikeWatch())
                watch.saw(progress.step, progress.metrics[name])

    def decide(self) -> None:
        """Tell what is newly wrong, and act on it if the job allows it."""
        self._begin_round()
        state, pending = self.state, self.state.pending_round
        ends = pending is not None and pending.kind not in NON_DISRUPTIVE
        if state.world is None or state.phase is not JobPhase.RUNNING or ends:
            return
        spec = self.live.spec.spec.diagnosis
        found = [one for values in self._found.values() for one in values]
        found += self._leaps()
        if all(one.kind is not WrongKind.NOT_FINITE for one in found):
            self._not_finite_since = None
        elif self._not_finite_since is None:
            self._not_finite_since = self.live.now
        for kind in WrongKind:
            policy = spec.spike if kind is WrongKind.SPIKE else spec.wrong
            ones = [one for one in found if one.kind is kind]
            if not ones or policy == "off":
                self._told.pop(kind, None)
            elif kind not in self._told:
                if kind is WrongKind.NOT_FINITE and policy == "rollback" and self._awaits_others():
                    continue
                if self._tell(kind, ones, policy, state.world):
                    break  # the round is over
        if self._told or self.live.wrong:
            self.live.wrong = "; ".join(self._told.values())

    def _awaits_others(self) -> bool:
        """Return whether a node may still report that a value of its ranks is not finite, too.

        One rank alone is at fault, and all of them together are not.
        """
        since, world = self._not_finite_since, self.state.world
        if since is None or world is None:
            return False
        due = since + WAIT_REPORTS * self.live.pace.exchange_s
        if self.live.now >= due:
            return False
        self.live.wake(due)
        nodes = {member.node for member in world.members} - self._found.keys()
        return any(self._reported.get(node, since) <= since for node in nodes)

    def _begin_round(self) -> None:
        """Forget what was wrong in an earlier round."""
        if self._round != self.state.round:
            self._round = self.state.round
            self._not_finite_since = None
            self._found.clear()
            self._reported.clear()
            self._spikes.clear()
            self._told.clear()
            if self.live.wrong:
                self.live.wrong = ""

    def _leaps(self) -> list[WrongValue]:
        """Return the spikes that last."""
        return [
            WrongValue(
                kind=WrongKind.SPIKE,
                step=leap[0],
                good=watch.good,
                metric=name,
                value=f"{leap[1]:.3g}:{leap[2]:.3g}",
            )
            for name, watch in self._spikes.items()
            if (leap := watch.leap) is not None
        ]

    def _tell(
        self, kind: WrongKind, ones: Sequence[WrongValue], policy: str, world: RoundMembers
    ) -> bool:
        """Record what is wrong, and follow the policy of the job; return whether that is to act.

        Args:
            kind: What is wrong.
            ones: What members have reported, at least one.
            policy: ``tell``, ``rollback`` or ``stop``.
            world: The round.
        """
        first = min(ones, key=lambda one: one.step)
        ranks = sorted({rank for one in ones if one.step == first.step for rank in one.ranks})
        ranks = [rank for rank in ranks if rank < world.world_size]
        good = self._last_good(first.step, [one.good for one in ones])
        message = _in_words(kind, first, ranks, good, world)
        if policy == "rollback":
            message += f"; the round restarts from the newest checkpoint up to step {good}"
        self._told[kind] = message
        node, local_rank = _place(world, ranks[0] if ranks else 0)
        reason = _REASONS[kind]
        event = self.log.record(reason, message, node=node, warning=True)
        if policy == "tell":
            self.live.look = Look(EvidenceKind.WRONG, message, node=node if ranks else "")
            return False
        self.live.checkpoints.reject(Rejection(round=self.state.round, good=good))
        if policy == "stop":
            self._transitions.end_job(JobPhase.FAILED, reason, message, cause=event)
            return True
        guilty = self.live.nodes[node]
        pids = guilty.report.pids if guilty.report is not None else []
        failure = WorkerFailure(
            kind=FailureKind.WRONG,
            local_rank=local_rank,
            rank=ranks[0] if ranks else 0,
            pid=next(iter(pids[local_rank:]), 0),
            exit_code=0,
            message=f"computed wrong values: {message}",
            step=first.step,
        )
        # If most ranks have the wrong value, it comes from the data or the model, and from no node.
        if ranks and 2 * len(ranks) <= world.world_size:
            self._failures.worker_failed(guilty, failure)
        else:
            self._failures.job_failed(guilty, failure)
        return True

    def _last_good(self, step: int, known: Sequence[int | None]) -> Step:
        """Return the newest step that is good on all ranks.

        If a worker knows no good step of this round, then the checkpoint that the round has
        continued from may have the wrong values already, so an older one is good.

        Args:
            step: The first step with wrong values.
            known: The newest good step that each worker knows.
        """
        steps = [one for one in known if one is not None]
        if len(steps) < len(known):
            start = self.state.checkpoints.continued_from(self.state.round)
            steps.append((step if start is None else start) - 1)
        return Step(max(0, min(steps)))


def _place(world: RoundMembers, rank: int) -> tuple[NodeId, int]:
    """Return the node of a rank, and its rank there."""
    member = next(m for m in world.members if m.rank_offset <= rank < m.rank_offset + m.nproc)
    return member.node, rank - member.rank_offset


def _in_words(
    kind: WrongKind, first: WrongValue, ranks: Sequence[int], good: int, world: RoundMembers
) -> str:
    """Return what is wrong in one line.

    Args:
        kind: What is wrong.
        first: The earliest report of it.
        ranks: The ranks with the wrong value; empty if that is not known.
        good: The newest good step.
        world: The round.
    """
    who = ranks_in_words(ranks)
    if len(ranks) == 1:
        who += f" (node {_place(world, ranks[0])[0]})"
    match kind:
        case WrongKind.NOT_FINITE:
            text = f"the {first.metric} of {who} is {first.value} at step {first.step}"
        case WrongKind.SPIKE:
            usual, _, value = first.value.partition(":")
            text = (
                f"the {first.metric} has leapt from about {usual} to {value} at step {first.step}"
            )
        case WrongKind.REPLICAS if ranks:
            others = counted(world.world_size - len(ranks), "other replica")
            text = f"the parameters of {who} differ from those of {others} at step {first.step}"
        case WrongKind.REPLICAS:
            text = (
                f"the parameters of replicas differ at step {first.step}, and no majority shows "
                "which are wrong"
            )
        case _:
            assert_never(kind)
    return f"{text}; step {good} is the last good one"
