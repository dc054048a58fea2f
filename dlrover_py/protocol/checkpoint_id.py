"""The identity of a checkpoint."""

from dataclasses import dataclass

from dlrover_py.protocol.names import Round, Step, Timeline


@dataclass(frozen=True, order=True, slots=True, kw_only=True)
class CheckpointId:
    """The identity of one checkpoint of a job; a greater one was taken later.

    The step alone does not suffice. A script that has gone back takes lower steps later.
    """

    round: Round
    """Round of the rendezvous in which it was taken."""
    timeline: Timeline
    """How often the script had loaded a state or gone back a step, in this round, by then."""
    step: Step
    """Training step after which the state was copied."""

    @property
    def timeline_key(self) -> tuple[Round, Timeline]:
        """Round and timeline: they name one timeline of the job, and a greater one began later."""
        return self.round, self.timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The finding that a job's values were wrong from some step on. Such checkpoints are not used.

    It applies to the rounds up to the one of the finding: later ones continue from right values.
    """

    round: Round
    """Round of the finding."""
    good: Step
    """The last step with right values."""

    def rejects(self, one: CheckpointId) -> bool:
        """Return whether a checkpoint of the job has wrong values."""
        return one.round <= self.round and one.step > self.good
