"""The settings of data loaders: what the user or the auto-tuner wants, and whether it is used.

Workers take new settings up between two steps, all at the same one, and report it. So do the
workers of later rounds and under later masters, as the settings are in the journal.
"""

from dlrover_py.master.core.assignments import Assignments
from dlrover_py.master.core.autotune import back_off, tune
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Node
from dlrover_py.protocol.agents import AgentReport, LoaderState
from dlrover_py.protocol.job import TuningSpec
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.sdk import MAX_TUNING
from dlrover_py.protocol.status import JobPhase, LoaderStatus
from dlrover_py.protocol.words import counted

NO_LOADER = "the script reports its steps and has no ElasticLoader, so nothing can be changed"


LOOK_S = 1.0
"""Seconds between two looks at the reports of all members; there may be thousands."""


class Tuning:
    """Decides on the settings of data loaders, and follows what their workers report."""

    def __init__(self, context: CoreContext, assignments: Assignments) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._assignments = assignments
        self._round = self.state.round
        self._loaders: dict[NodeId, LoaderState] = {}
        """The newest state of each member's loader, in the current round."""
        self._last_loaders: dict[NodeId, LoaderState] = {}
        """The newest states from earlier rounds: a platform may say late why a node was lost."""
        self._trains = False
        """Whether a member has reported a step in the current round."""
        self._sent = self.state.tuning.number
        """Number of the settings that members have been sent."""
        self._unseen = False
        """Whether reports have arrived since the last look at them."""
        self._look_at = self.live.now

    def take_report(self, node: Node, report: AgentReport) -> None:
        """Take in what a member of the current round reports about its data loader."""
        self._follow_round()
        if report.auto_tune:
            self._change(flag=True)
        if report.loader is not None:
            self._loaders[node.id] = report.loader
            if report.loader.batch:
                self.live.loader_batch = self.state.round, report.loader.batch
            if report.loader.number > self.state.tuning.number:
                # The journal was lost: the workers would ignore lower numbers.
                self._change(number=min(MAX_TUNING, report.loader.number + 1))
        self._trains = self._trains or report.progress is not None
        self._unseen = True

    def status(self) -> LoaderStatus | None:
        """Return how far the data loaders are; None until a node has said where its own is.

        The nodes report at different times. So it is the place of the node that is furthest back.
        """
        states = (self._loaders or self._last_loaders).values()
        known = [state for state in states if state.samples]
        if not known:
            return None
        behind = min(known, key=lambda state: (state.epoch, state.position))
        return LoaderStatus(**behind.model_dump(include=set(LoaderStatus.model_fields)))

    def back_off(self, node_id: NodeId) -> str:
        """Make the micro-batch smaller after a node ran out of memory; return why.

        The failure then costs no budget. The result is empty if the failure counts like any other:
        without the auto-tuner, if the user has set the micro-batch, if it cannot be smaller, or if
        it was made smaller since this node has used it.
        """
        self._follow_round()
        known = self._loaders.get(node_id) or self._last_loaders.get(node_id)
        if known is None or not self._is_auto or self._spec.micro_batch is not None:
            return ""
        present = self.state.tuning.tuner.micro_batch
        if present.final and present.value is not None and present.value < known.micro_batch:
            return ""
        record = back_off(self.state.tuning.tuner, known.micro_batch)
        if record is None:
            return ""
        size = record.micro_batch.value
        why = f"memory ran out with micro-batch {known.micro_batch}"
        self._change(tuner=record, why=why)
        return f"{why}: the next round begins with {size}, and nothing is charged"

    def decide(self) -> None:
        """Choose the settings, and record what became of them; :meth:`send` sends them later."""
        if self.state.phase.ended:
            return
        self._follow_round()
        state = None
        looks = self._unseen and (self._is_auto or self._is_pending)
        if looks and self.live.now >= self._look_at:
            self._unseen, self._look_at = False, self.live.now + LOOK_S
            state = self._state_of_round()
            self._tune(state)
            self._record_outcome(state)
        elif looks:
            self.live.wake(self._look_at)
        self._request()

    def send(self) -> None:
        """Send new settings to the members of the round, once the step has formed its rounds."""
        number, world = self.state.tuning.number, self.state.world
        if self._sent != number and world is not None and self.state.phase is JobPhase.RUNNING:
            self._sent = number
            self._assignments.update(member.node for member in world.members)

    @property
    def _spec(self) -> TuningSpec:
        """What the user has set."""
        return self.live.spec.spec.tuning or TuningSpec()

    @property
    def _is_auto(self) -> bool:
        """Whether the auto-tuner is on: by the spec, or else by a flag of the nodes."""
        auto = self._spec.auto
        return self.state.tuning.flag if auto is None else auto

    @property
    def _is_pending(self) -> bool:
        """Whether it is not known yet that the members use the newest settings."""
        record = self.state.tuning
        return record.taken_up != record.number or bool(record.refused)

    def _change(self, **fields: object) -> None:
        """Change fields of the journal's record."""
        record = self.state.tuning.model_copy(update=fields)
        if record != self.state.tuning:
            self.state.tuning = record

    def _follow_round(self) -> None:
        """Forget the reports of the last round, whose rates say nothing about this one."""
        if self._round != self.state.round:
            self._round, self._trains = self.state.round, False
            known = (self._last_loaders | self._loaders).items()
            self._last_loaders = {n: s for n, s in known if self.live.nodes.get(n) is not None}
            self._loaders.clear()
            self._change(tuner=self.state.tuning.tuner.new_round())

    def _state_of_round(self) -> LoaderState | None:
        """Return the state of the slowest member's loader; None if a member has reported none."""
        world = self.state.world
        if world is None or self.state.phase is not JobPhase.RUNNING:
            return None
        found = [self._loaders.get(member.node) for member in world.members]
        states = [state for state in found if state is not None]
        return LoaderState.of_slowest(states) if len(states) == len(found) else None

    def _tune(self, state: LoaderState | None) -> None:
        """Let the auto-tuner take its next step, once all members use the present settings."""
        record, changes = self.state.tuning, self.state.pending_round is not None
        if state is None or state.number != record.number or changes or not self._is_auto:
            return
        tuner, why = tune(
            record.tuner,
            state,
            micro_batch=self._spec.micro_batch is None,
            loader_workers=self._spec.loader_workers is None,
        )
        self._change(tuner=tuner, why=why or record.why)

    def _request(self) -> None:
        """Give the wanted settings a number if they are new."""
        record, spec = self.state.tuning, self._spec
        micro_batch, loader_workers = spec.micro_batch, spec.loader_workers
        if self._is_auto:
            tuner = record.tuner
            micro_batch = tuner.micro_batch.value if micro_batch is None else micro_batch
            if loader_workers is None:
                loader_workers = tuner.loader_workers.value
        if (micro_batch, loader_workers) != (record.micro_batch, record.loader_workers):
            why = f"auto-tuner: {record.why}" if record.why else "spec.tuning"
            message = f"{_in_words(micro_batch, loader_workers)} from the next step on ({why})"
            self._change(
                number=min(MAX_TUNING, record.number + 1),
                micro_batch=micro_batch,
                loader_workers=loader_workers,
                event=self.log.record(EventReason.TUNING_REQUESTED, message),
                refused="",
                why="",
            )

    def _record_outcome(self, state: LoaderState | None) -> None:
        """Record that the members use the newest settings, or why they cannot.

        Nothing is recorded while neither is known.

        Args:
            state: that of the slowest member's loader; None if a member has reported none.
        """
        record = self.state.tuning
        if state is None and not self._loaders and self._trains:
            self._refuse(NO_LOADER)
        elif state is None or state.number != record.number:
            return
        elif state.refused:
            self._refuse(
                f"{record.loader_workers} loader workers: expected at most {state.most_workers}, "
                "the number of CPUs that the worker with the fewest CPUs may use"
            )
        else:
            if record.taken_up != record.number:
                self.log.record(
                    EventReason.TUNED,
                    f"from step {state.step + 1} on: micro-batch {state.micro_batch}, "
                    f"{counted(state.loader_workers, 'loader worker')}",
                    cause=record.event or None,
                )
            self._change(taken_up=record.number, refused="")

    def _refuse(self, why: str) -> None:
        """Record once why the settings cannot be used."""
        record = self.state.tuning
        if record.refused != why:
            cause = record.event or None
            self.log.record(EventReason.TUNING_REFUSED, why, cause=cause, warning=True)
        self._change(taken_up=record.number, refused=why)


def _in_words(micro_batch: int | None, loader_workers: int | None) -> str:
    """Return the settings in words."""
    words = []
    if micro_batch is not None:
        words.append(f"micro-batch {micro_batch}")
    if loader_workers is not None:
        words.append(counted(loader_workers, "loader worker"))
    return ", ".join(words) or "the script's own micro-batch and loader workers"
