"""The job's own choice of its size: what is measured for it, and what follows from a decision."""

import math
from dataclasses import replace

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Readiness
from dlrover_py.master.core.scaling import (
    CONTESTED,
    Decision,
    PendingChange,
    View,
    decide,
    spare_wait_s,
)
from dlrover_py.master.core.speed import WINDOWS, SpeedMeter, SpeedModel
from dlrover_py.master.core.spot import SpotHosts
from dlrover_py.master.core.state import NON_DISRUPTIVE, PendingRound
from dlrover_py.protocol.job import ReplicaSpec
from dlrover_py.protocol.names import Round
from dlrover_py.protocol.reasons import ConditionReason, EventReason
from dlrover_py.protocol.status import JobPhase, MeasuredSpeed
from dlrover_py.protocol.words import counted

GLOBAL_BATCH = "global_batch"
"""Metric of ``report_step`` with the samples of a step; speeds are then samples per second. Without
it, the number that an ``ElasticLoader`` reports is used."""
SAMPLES = (1e-15, 1e15)
"""Least and greatest number of samples of a step. Other numbers are mistakes and are ignored: the
speeds that follow from them could not be computed with."""
UNKNOWN = 3
"""Measurements of a round after which a script that says nothing of samples counts steps, although
it has reported samples in an earlier round."""
CANDIDATES = 64
"""Sizes that are compared at most; beyond it, they grow by a tenth from one to the next."""
SOONEST_S = 0.05
"""Seconds after which the next decision is made at the earliest."""


class Autoscaler:
    """Measures the speed of each round, and changes the target of the job.

    Nothing happens in a job without ``autoscale``, or where nodes come by themselves.
    """

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._meter = SpeedMeter(self.live.rules.measure_s)
        self._round = (-1, False)
        """Number of the round that is measured, and whether a round runs."""
        self._batch = 0.0
        """Samples of a step in the round that is measured; 0 if they are not known."""
        self._spot = SpotHosts(context)
        self._pending = PendingChange()
        self._decided: tuple[object, ...] = ()
        """What the last decision was made from."""
        self._again_at = -math.inf
        """Monotonic time at which the decision may be another one."""
        self._resize_lost_s = self._lost()
        self._publish_speed()

    def stalled(self) -> None:
        """Drop what is being measured: reports were late, because the master stood still."""
        self._meter.skip()

    def decide(self) -> bool:
        """Measure, and change the target if another size is worth it; return whether it changed.

        Only numbers change here, and events are recorded. Nodes are requested and rounds are formed
        by others, in the same step.
        """
        if not self._follow_spec():
            return False
        view, record = self._view(), self.state.scaling
        made_from: tuple[object, ...] = (
            *(
                self._round,
                view.target,
                view.sizes,
                view.size,
                view.steady,
                view.room,
                view.stepped,
                view.coming,
                view.slow,
            ),
        )
        made_from += (self._meter.count, self.live.spec.metadata.generation)
        if made_from == self._decided and self.live.now < self._again_at:
            self.live.wake(self._again_at)
            return False
        self._decided = made_from
        decision = decide(record, view, self._pending)
        if decision.verified and record.trial is not None:
            record.trial = None
            self.state.changed()
        self._again_at = math.inf
        if view.now < decision.again_at < math.inf:
            wait_s = max(SOONEST_S, decision.again_at - view.now)
            self._again_at = self.live.now + wait_s
            self.live.wake(self._again_at)
        changes = decision.target != view.target
        if view.spec.mode == "advise":
            self._advise(decision, view)
            return False
        if changes:
            self._carry_out(decision, view)
        granted = self.live.spec.allocation
        if granted is not None and record.target is not None and granted.nodes < record.target:
            text = f"the cluster allots {granted.nodes} of {counted(record.target, 'node')}"
            decision = replace(decision, reason=f"{text} ({granted.reason}); {decision.reason}")
        self.live.scaling_reason = decision.why, decision.reason
        if record.contested_until(view.now):
            text = (
                f"replicas was changed {CONTESTED} times within an hour, and the job scales by "
                "itself: if another controller (such as an HPA) writes it, use one of them; "
            )
            why = ConditionReason.REPLICAS_CONTESTED
            self.live.scaling_reason = why, text + decision.reason
        return changes

    def spare_wait(self, pending: PendingRound) -> tuple[int, float]:
        """Return how many replacements a round should wait for, and how many seconds.

        Both are 0 if it should not wait: for another reason than a loss, without
        ``waitForSpareSeconds``, or if the platform has no room for a replacement.
        """
        worker, world = self.live.spec.worker, self.state.world
        if worker.scaling is None or world is None or pending.kind not in ("loss", "failure"):
            return 0, 0.0
        size, nodes = len(world.members), self.live.nodes
        ready = nodes.count(Readiness.READY)
        spares = nodes.count(Readiness.NEAR) + nodes.count(Readiness.PENDING)
        if self._spot.held_until() <= self.live.now:
            spares += len(self.state.replacement_slots)
        if self.live.room == 0:  # only nodes that have a place already can come
            spares = nodes.count(Readiness.NEAR)
        if ready >= size or not spares:
            return 0, 0.0
        wait_s = spare_wait_s(
            worker.scaling.wait_for_spare_seconds,
            resize_s=self.state.scaling.resize_s,
            lost=min(spares, size - ready),
            size=size,
        )
        return (spares, wait_s) if wait_s else (0, 0.0)

    # --- What is known ---

    def _follow_spec(self) -> bool:
        """Take over the spec's settings; return whether the job scales by itself or is advised.

        A changed number of ``replicas`` becomes the target.
        """
        worker, record = self.live.spec.worker, self.state.scaling
        rests = self.state.phase.ended or not self.live.rules.can_create
        if worker.scaling is None or rests:
            if worker.scaling is None and (record.target is not None or record.samples):
                record.forget()
                self.live.speed = None
                self.state.changed()
            self.live.target = None if worker.scaling is None else record.target
            granted = self.live.spec.allocation
            self.live.scaling_reason = None
            if granted is not None and not rests:
                self.live.scaling_reason = ConditionReason.ALLOCATED, granted.reason
            return False
        template = self.live.template_hash
        if template != record.template:
            if record.template:
                self.live.speed, self._meter = None, SpeedMeter(self.live.rules.measure_s)
            record.renew(template)
            self.state.changed()
        if worker.scaling.mode == "advise":
            if record.target is not None:
                record.target = record.trial = None
                self.state.changed()
        elif record.target is None or record.replicas != worker.replicas:
            record.follow(worker.replicas, self.live.steady_wall)
            self._pending.size = 0
            self.state.changed()
        self.live.target = None if record.target is None else self._within(record.target)
        return True

    def _view(self) -> View:
        """Measure, and return what is known now."""
        state, live = self.state, self.live
        worker, record = live.spec.worker, state.scaling
        assert worker.scaling is not None
        world = state.world if state.phase is JobPhase.RUNNING else None
        here = (state.round, world is not None)
        if here != self._round:
            self._round, self._meter = here, SpeedMeter(live.rules.measure_s)
            self._batch = 0.0
        size = len(world.members) if world is not None else 0
        pending = state.pending_round
        if pending is not None and pending.kind not in NON_DISRUPTIVE:
            size = 0
        progress = live.progress[1] if live.progress is not None else None
        if size and progress is not None:
            self._note_resize()
            self._note_batch(progress.metrics.get(GLOBAL_BATCH, 0.0))
            if self._meter.take(live.now, progress.step):
                self._note_speed(size, self._batch)
        batch = self._batch
        target = worker.replicas if record.target is None else record.target
        target = self._within(target)
        if record.observe(size, target, live.steady_wall):
            state.changed()
        remaining = None
        if progress is not None and progress.total is not None:
            remaining = max(0, progress.total - progress.step) * (batch or 1.0)
        per_node = world.world_size / len(world.members) if world is not None else 1.0
        age_s = state.time.active_s(live.steady_wall)
        standby = live.spec.standbys
        return View(
            spec=worker.scaling,
            now=live.steady_wall,
            sizes=self._allowed(candidate_sizes(worker, target)),
            target=target,
            size=size,
            steady=self._meter.speed() is not None,
            coming=self._coming(),
            room=None if live.room is None else live.nodes.present - standby + live.room,
            start_s=state.lost_s.get("start"),
            remaining=remaining,
            undisturbed_s=(max(0.0, age_s) + 3600) / (state.restart_count + 1),
            stepped=state.max_step is not None,
            slow=bool(live.slow),
            most=max(1, int(batch / per_node)) if batch else 2**31,
        )

    def _allowed(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes that the allocation permits, and at least the least one."""
        most = self.live.spec.most_nodes
        return sizes if most is None else tuple(n for n in sizes if n <= most) or sizes[:1]

    def _within(self, target: int) -> int:
        """Return the greatest size up to the target that the allocation permits.

        The chosen size itself stays in the record: the job takes it once more nodes are allotted.
        """
        worker, most = self.live.spec.worker, self.live.spec.most_nodes
        if most is None or target <= most:
            return target
        unit = (worker.scaling and worker.scaling.node_unit) or worker.node_unit
        return self._allowed(candidate_sizes(worker, most // unit * unit))[-1]

    def _coming(self) -> bool:
        """Return whether nodes are starting or being prepared, or a round is about to be formed."""
        if self.state.pending_round is not None:
            return True
        count = self.live.nodes.count
        # Whatever starts takes a rank that is missing, and becomes a standby only if none is.
        starting = count(Readiness.NEAR) + count(Readiness.PENDING, alive=True)
        size = len(self.state.world.members) if self.state.world is not None else 0
        beside = count(Readiness.READY) + count(Readiness.BUSY) - size
        return starting > 0 or beside > self.live.spec.standbys

    def _note_resize(self) -> None:
        """Take in the time that the last change of size has cost, once a step follows it."""
        lost = self._lost()
        if lost != self._resize_lost_s:
            self.state.scaling.resized(lost - self._resize_lost_s)
            self._resize_lost_s = lost
            self.state.changed()

    def _note_batch(self, reported: float) -> None:
        """Take in how many samples a step has; a report without a usable number changes nothing.

        Args:
            reported: The number in the newest metrics; 0 if there is none.
        """
        number, samples = self.live.loader_batch
        if SAMPLES[0] <= reported <= SAMPLES[1]:
            self._batch = reported
        elif not self._batch and number == self.state.round:
            self._batch = float(samples)

    def _note_speed(self, size: int, batch: float) -> None:
        """Record the measured speed of this size, if its error is small enough."""
        record, speed = self.state.scaling, self._meter.speed()
        if speed is None or speed <= 0:
            return
        if record.in_samples and not batch and self._meter.count < UNKNOWN * WINDOWS:
            return  # the number of samples may still come
        if record.in_samples != bool(batch):  # the numbers cannot be compared
            record.samples.clear()
            record.in_samples = bool(batch)
        number = speed * (batch or 1.0)
        if record.measured(size, number, self.live.steady_wall, self._meter.error):
            self._publish_speed()
            self.state.changed()

    def _publish_speed(self) -> None:
        """Show the measured speeds in the status, where the allocator of a cluster reads them."""
        record = self.state.scaling
        if record.samples:
            curve = SpeedModel.fit({n: s.speed for n, s in record.samples.items()}).curve
            usable = curve is not None and 0 < sum(curve) < math.inf
            self.live.speed = MeasuredSpeed(
                curve=list(curve) if curve is not None and usable else None,
                most=max(record.samples),
                least=min(record.samples),
                resize_s=record.resize_s,
            )

    def _lost(self) -> float:
        """Return the seconds that all changes of size have cost so far."""
        return self.state.lost_s.get("scale", 0.0) + self.state.lost_s.get("join", 0.0)

    # --- What follows ---

    def _advise(self, decision: Decision, view: View) -> None:
        """Record an event if another size is advised than the last time; change nothing."""
        if decision.target == view.target:
            self.live.scaling_reason = decision.why, decision.reason
            if decision.why is ConditionReason.SIZE_KEPT and self.state.scaling.advised is not None:
                self.state.scaling.advised = None
                self.state.changed()
            return
        text = f"advised: {decision.reason}"
        self.live.scaling_reason = ConditionReason.SIZE_ADVISED, text
        if decision.target != self.state.scaling.advised:
            self.state.scaling.advised = decision.target
            self.log.record(EventReason.SIZE_ADVISED, text)
            self.state.changed()

    def _carry_out(self, decision: Decision, view: View) -> None:
        """Change the target, and record the event that causes the next round."""
        self.state.scaling.move(decision, view)
        self.live.target = self.state.scaling.target
        self._pending.size = 0
        up = decision.target > view.target
        event = self.log.record(
            EventReason.SCALED_UP if up else EventReason.SCALED_DOWN, decision.reason
        )
        pending = self.state.pending_round
        if pending is None or pending.kind in NON_DISRUPTIVE:
            self.live.round_causes[Round(self.state.round + 1)] = (event, self.live.now)
        self.state.changed()


def candidate_sizes(worker: ReplicaSpec, target: int) -> tuple[int, ...]:
    """Return the sizes that are compared, ascending: at most about ``CANDIDATES``.

    The target is one of them if it is an allowed size.

    Args:
        worker: The role, which scales by itself.
        target: The present target.
    """
    scaling = worker.scaling
    assert scaling is not None
    low, high = worker.minimum, worker.ceiling
    if scaling.sizes is not None:
        return tuple(sorted({n for n in scaling.sizes if low <= n <= high})) or (worker.replicas,)
    unit = scaling.node_unit or worker.node_unit
    first, last = -(-low // unit), high // unit
    if first > last:
        return (worker.replicas,)
    if last - first < CANDIDATES:
        return tuple(n * unit for n in range(first, last + 1))
    found, number = {last}, first
    while number < last:
        found.add(number)
        number = max(number + 1, number * 11 // 10)
    if target % unit == 0 and low <= target <= high:
        found.add(target // unit)
    return tuple(n * unit for n in sorted(found))
