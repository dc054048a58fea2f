"""Finds a job that stands still: when all ranks are looked at, and what follows from the verdict.

The clock of the steps only raises a suspicion. A suspicion costs a snapshot, and nothing else. What
is reported, or acted on, is the verdict on the snapshot.
"""

from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.diagnosis.stacks import folded
from dlrover_py.master.core.diagnosis.steps import StepClock
from dlrover_py.master.core.diagnosis.verdicts import Standstill, judge
from dlrover_py.master.core.events import KeepEvidence, SnapshotArrived
from dlrover_py.master.core.failures import Failures
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.state import NON_DISRUPTIVE, Look
from dlrover_py.protocol.agents import AgentReport, FailureKind, WorkerFailure
from dlrover_py.protocol.bundles import bucket_of
from dlrover_py.protocol.diagnosis import (
    Cause,
    EvidenceKind,
    HangKind,
    HangVerdict,
    NodeSnapshot,
    WorkerSnapshot,
)
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import DiagnosisStatus, EvidenceManifest, JobPhase

SNAPSHOT_S = 15.0
"""Seconds that nodes have to send their snapshot. An agent needs less, whatever its workers do."""
AGAIN = 2.0
"""A job that still stands is looked at again after this many times the time that it has stood."""
LOOK_PAUSE_S = 600.0
"""Least seconds between two snapshots for what other detectors have found. Their bundles must not
take the places of all others."""


class Diagnosis:
    """The detector of hangs of one job."""

    def __init__(self, context: CoreContext, assignments: Assignments, failures: Failures) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._assignments, self._failures = assignments, failures
        self._clock = StepClock(least_s=1.0, first_s=1.0, moved_at=self.live.now)
        self._round = (self.state.round, self.state.world is not None)
        self._idle: dict[NodeId, float] = {}
        """Since when the workers of each member have used no CPU time, by its newest report."""
        self._look_at = 0.0
        """Time before which no suspicion leads to another snapshot."""
        self._reason = ""
        """Why the snapshot that is under way was requested; empty if none is."""
        self._look = Look(EvidenceKind.HANG, "")
        """For what event it was requested."""
        self._may_look_at: dict[EvidenceKind, float] = {}
        """Time before which no snapshot is taken for what another detector has found."""
        self._request = ""
        """The user's text for the snapshot that is under way; empty for another reason."""
        self._requested_at = 0.0
        self._by_rule = False
        """Whether the hang was found by a log rule whose end is the end of the hang."""
        self._act_after_s = 0.0
        """Seconds for which the job must stand still before a sure verdict ends the round."""
        self._only_waits = False
        """Whether the job has never reported a step: only a collective that stays open counts."""
        self._still_s = 0.0
        """Seconds for which the job had stood still when the snapshot was requested."""
        self._asked: set[NodeId] = set()
        """Nodes whose snapshot is awaited."""
        self._taken: dict[NodeId, NodeSnapshot] = {}
        self._hang: tuple[HangVerdict, int, float] | None = None
        """The verdict that holds, its event, and when the hang began; None without a hang."""

    # --- Events ---

    def take_report(self, node_id: NodeId, report: AgentReport) -> None:
        """Take in the progress of a member of the round, and how long its workers are idle."""
        node = self.live.nodes.get(node_id)
        if node is None or node.report is not report or report.follows != self.state.round:
            return
        if not self.state.trains(node_id, node.incarnation):
            return
        self._idle[node_id] = self.live.now - report.idle_s
        if report.progress is not None:
            progress = report.progress
            if self._clock.saw(progress.step, progress.total, self.live.now, hung=bool(self._hang)):
                self._look_at = 0.0
                self._end_hang("training went on")

    def take_snapshot(self, event: SnapshotArrived) -> None:
        """Record a node's snapshot. One that is late, or of another agent process, is dropped."""
        node = self.live.nodes.get(event.node)
        snapshot = event.snapshot
        current = snapshot.number == self.live.snapshot and snapshot.round == self.state.round
        if node is None or node.boot_id != snapshot.boot_id or not current or not self._reason:
            return
        if event.node in self._asked:
            self._asked.discard(event.node)
            self._taken[event.node] = snapshot

    def evidence_kept(self, number: int, folder: str) -> None:
        """Take note of the folder of a bundle, for the status."""
        kept = self.live.diagnosis
        if kept is not None and kept.number == number:
            self.live.diagnosis = kept.model_copy(update={"folder": folder})

    def stalled(self, seconds: float) -> None:
        """Leave out a time in which the master itself stood still."""
        self._clock.shift(seconds)
        self._requested_at += seconds

    # --- Decisions ---

    def decide(self) -> None:
        """Request a snapshot if one is wanted, and make the verdict once it is complete."""
        state, live = self.state, self.live
        spec = live.spec.spec.diagnosis
        self._clock.first_s = float(max(spec.first_step_seconds, spec.hang_seconds))
        # Once a node has ended, there may be no further step: the others may store a model.
        least_s = self._clock.first_s if state.succeeded else spec.hang_seconds
        self._clock.least_s = float(least_s)
        here = (state.round, state.world is not None)
        pending = state.pending_round
        ends = pending is not None and pending.kind not in NON_DISRUPTIVE
        if here != self._round:
            self._round = here
            self._clock.begin(live.now)
            self._idle.clear()
            self._look_at, self._by_rule = 0.0, False
            self._end_hang("the round is over")
        if self._round[1] is False or state.phase is not JobPhase.RUNNING or ends:
            self._drop()
            live.look = None
            self._end_hang("the round is over")
            return
        if self._reason:
            self._finish_if_complete()
        if self._reason:
            return
        if spec.snapshot and spec.snapshot != state.snapshot_request:
            state.snapshot_request = spec.snapshot
            asked = Look(EvidenceKind.REQUEST, "a user asked for it")
            self._begin(asked, request=spec.snapshot)
            return
        look, live.look = live.look, None
        if look is not None and live.now >= self._may_look_at.get(look.kind, 0.0):
            self._may_look_at[look.kind] = live.now + LOOK_PAUSE_S
            self._begin(look)
        elif spec.hang == "off":
            self._end_hang("the job looks for no hangs any more")
        else:
            if self._by_rule and live.log_hang is None:
                self._look_at, self._by_rule = 0.0, False
                self._end_hang("the log rule does not apply any more")
            self._suspect(spec.silent_seconds)

    def _suspect(self, silent_s: int | None) -> None:
        """Request a snapshot if the job has made no step for too long, or a log rule says so."""
        now, clock = self.live.now, self._clock
        self._only_waits, self._act_after_s = False, 0.0
        if self.live.log_hang is not None:
            found, since, self._by_rule = self.live.log_hang
            if now < self._look_at:
                self.live.wake(self._look_at)
                return
            if not self._by_rule:
                # A line was printed, perhaps by a job that trains: its steps say if it stands.
                since = since if clock.step is None else clock.moved_at
                self._act_after_s = clock.least_s
            self._still_s = now - since
            self._begin(Look(EvidenceKind.HANG, found))
            return
        if clock.step is None and silent_s is not None and self.live.progress is None:
            assert self.state.world is not None
            if len(self._idle) < len(self.state.world.members):
                return
            since = max(self._idle.values())
            due = max(since + silent_s, self._look_at)
            if now < due:
                self.live.wake(due)
                return
            self._still_s = now - since
            why = f"no worker has used its CPU for {self._still_s:.0f} s"
            self._begin(Look(EvidenceKind.HANG, why))
            return
        # A script that has never reported a step may not report any.
        self._only_waits = clock.step is None and self.state.max_step is None
        due = max(clock.due, self._look_at)
        if now < due:
            self.live.wake(due)
            return
        self._still_s = now - clock.moved_at
        step = "" if clock.step is None else f" after step {clock.step}"
        why = f"no step{step} for {self._still_s:.0f} s (expected {clock.bound_s:.0f} s)"
        self._begin(Look(EvidenceKind.HANG, why))

    def _begin(self, look: Look, request: str = "") -> None:
        """Request a snapshot of all members of the round."""
        world = self.state.world
        assert world is not None
        self.state.snapshots += 1
        self._look, self._reason, self._request = look, look.reason, request
        self._requested_at = self.live.now
        if look.kind is not EvidenceKind.HANG:
            self._still_s = self.live.now - self._clock.moved_at
        self._taken = {}
        self._asked = {member.node for member in world.members} - self.state.succeeded
        self.live.snapshot = self.state.snapshots
        self._assignments.update(self._asked)
        self.live.wake(self.live.now + SNAPSHOT_S)

    def _drop(self) -> None:
        """Give up the snapshot that is under way, because its round is over."""
        self._reason, self._taken = "", {}
        self.live.snapshot = 0
        self._asked.clear()

    def _finish_if_complete(self) -> None:
        """Once all living nodes have answered, or the time is over, judge and keep the evidence.

        A hang is reported, and may end the round, if the snapshot was taken for it. There is no
        verdict if the job has made a step since the request.
        """
        due = self._requested_at + SNAPSHOT_S
        gone = {
            n for n in self._asked if (node := self.live.nodes.get(n)) is None or not node.alive
        }
        if self._asked - gone and self.live.now < due:
            self.live.wake(due)
            return
        live, round_number = self.live, self.state.round
        workers = [w for node in sorted(self._taken) for w in self._taken[node].workers]
        workers += self._ended_workers()
        missing = sorted(self._asked)
        moved = self._clock.moved_at > self._requested_at
        verdict = None if moved else judge(workers, self._standstill(missing))
        look, asked, reason = self._look, self._request, self._reason
        # Otherwise the verdict is an answer, and not an alarm: the job may be in good health.
        alarm = look.kind is EvidenceKind.HANG
        if not (alarm or asked):
            verdict = None
        lines = folded(workers)
        manifest = EvidenceManifest(
            number=live.snapshot,
            kind=look.kind,
            at=live.wall,
            round=round_number,
            step=self._clock.step,
            reason=reason,
            verdict=verdict,
            node=look.node or (self._node_of(verdict) if verdict is not None else "") or "",
            facts=list(look.facts),
            nodes=sorted(self._taken),
            missing=missing,
            lines=lines,
        )
        taken = tuple(sorted(self._taken.items()))
        live.emit(KeepEvidence(manifest, taken, bucket_of(live.spec)))
        live.diagnosis = DiagnosisStatus(
            number=live.snapshot,
            at=live.wall,
            reason=reason,
            request=asked,
            verdict=verdict if alarm or self._overdue() else None,
            lines=lines,
        )
        still_s, number = self._still_s, live.snapshot
        if alarm or asked:
            self._look_at = live.now + max(5.0, still_s * (AGAIN - 1))
        self._drop()
        if asked:
            message = f"snapshot {number} of all ranks was taken; `dlrover job evidence`"
            self.log.record(EventReason.SNAPSHOT_TAKEN, message)
        if alarm and verdict is not None and self._is_hang(verdict, still_s):
            self._report(verdict, workers, still_s)

    def _ended_workers(self) -> list[WorkerSnapshot]:
        """Return the workers of nodes that have ended with success: their agents may be gone."""
        world = self.state.world
        assert world is not None
        return [
            WorkerSnapshot(rank=member.rank_offset + local, local_rank=local, recorded=True)
            for member in world.members
            if member.node in self.state.succeeded
            for local in range(member.nproc)
        ]

    def _standstill(self, missing: list[NodeId]) -> Standstill:
        """Return what is known of the round beside the snapshots."""
        world = self.state.world
        assert world is not None
        nodes = {
            member.rank_offset + local: member.node
            for member in world.members
            for local in range(member.nproc)
        }
        still_s = self._still_s + self.live.now - self._requested_at
        step = self._clock.step
        return Standstill(world.world_size, nodes, step, still_s, missing)

    def _overdue(self) -> bool:
        """Return whether the job has made no step for longer than expected."""
        return self._clock.step is not None and self.live.now >= self._clock.due

    def _is_hang(self, verdict: HangVerdict, still_s: float) -> bool:
        """Return whether a verdict is reported.

        A rank that uses its CPU may only be slow, as in an evaluation. It is a hang once it has
        taken as long as a first step may, or if a log rule says that it is one. Without any step so
        far, ranks must have waited in a collective all the time.
        """
        if self._only_waits:
            return not verdict.busy and verdict.kind not in (HangKind.CODE, HangKind.UNKNOWN)
        return not verdict.busy or still_s >= self._clock.first_s or self._by_rule

    def _report(self, verdict: HangVerdict, workers: list[WorkerSnapshot], still_s: float) -> None:
        """Record a hang, unless the same verdict holds already. End the round if that is allowed.

        ``spec.diagnosis.hang`` must allow it, and the verdict must be sure. A rank that waits for
        storage gets as long as a first step may take: after a restart it would wait again.

        Args:
            verdict: what hangs.
            workers: snapshots of the ranks.
            still_s: seconds for which the job had stood still when the snapshot was requested.
        """
        old = self._hang
        since = old[2] if old is not None else self.live.now - still_s
        if old is None or (old[0].kind, old[0].ranks) != (verdict.kind, verdict.ranks):
            node = self._node_of(verdict)
            event = self.log.record(
                EventReason.HANG,
                verdict.message,
                node=node,
                since=since,
                warning=True,
                cause=None if old is None else old[1],
            )
            self._hang = (verdict, event, since)
        self.live.hang = verdict.message
        act = self.live.spec.spec.diagnosis.hang == "act" and verdict.sure
        patient = verdict.cause is Cause.STORAGE and still_s < self._clock.first_s
        if act and still_s >= self._act_after_s and not (patient or self._only_waits):
            self._act(verdict, workers)

    def _node_of(self, verdict: HangVerdict) -> NodeId | None:
        """Return the node of the first guilty rank; None without one."""
        world = self.state.world
        if world is None or not verdict.ranks:
            return None
        rank = verdict.ranks[0]
        members = (m for m in world.members if m.rank_offset <= rank < m.rank_offset + m.nproc)
        return next((member.node for member in members), None)

    def _act(self, verdict: HangVerdict, workers: list[WorkerSnapshot]) -> None:
        """End the round by a failure of the guilty rank, which is charged to its node."""
        node_id = self._node_of(verdict)
        node = None if node_id is None else self.live.nodes.get(node_id)
        guilty = next((w for w in workers if w.rank in verdict.ranks[:1]), None)
        if node is None or guilty is None or not node.alive:
            return
        self._failures.worker_failed(
            node,
            WorkerFailure(
                kind=FailureKind.HANG,
                local_rank=guilty.local_rank,
                rank=guilty.rank,
                pid=guilty.pid,
                exit_code=0,
                message=f"hung: {verdict.message}",
                step=self._clock.step,
            ),
        )

    def _end_hang(self, why: str) -> None:
        """Record that a hang is over; do nothing without one."""
        if self._hang is None:
            return
        _, event, since = self._hang
        self._hang, self.live.hang = None, ""
        seconds = self.live.now - since
        message = f"{why} after the job had stood still for {seconds:.0f} s"
        self.log.record(EventReason.HANG_OVER, message, cause=event)
