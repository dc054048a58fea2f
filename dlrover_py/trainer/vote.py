"""What all ranks of a world agree on at each call of ``save``. Pure: it needs no torch.

Each call starts a vote, and the next call takes its result. Saving therefore never waits for other
ranks. A vote has the greatest value of each number over all ranks.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.slots import SlotHeader


class RankVote(NamedTuple):
    """The vote of a rank. An all-reduce takes the greatest value of each field over all ranks."""

    save: int = 0
    """1: a save is due by the clock of rank 0."""
    persist: int = 0
    """1: by the clock of rank 0, a save that goes to storage is due. 2: it is due even if a
    persister is busy."""
    busy: int = 0
    """1: the persister of some node is busy."""
    stop: int = 0
    """1: some rank was asked to stop."""
    outcome: int = 0
    """A :class:`SaveOutcome`: that of the oldest save whose outcome is not known to all ranks
    yet."""
    part: int = 0
    """Digest that identifies the shard group of this rank in that save."""
    negated_shard_group: int = 0
    """``-part``. All ranks are in the same shard group if the greatest ``part`` equals minus the
    greatest ``negated_shard_group``."""
    uncopied: int = 0
    """State of the save that peers copy. 0: all ranks have a copy. 1: some have none yet. 2: the
    save no longer exists."""
    call: int = 0
    """Number of the call in which this vote was started; it contains the step. See
    :func:`call_number`."""
    negated_call: int = 0
    """``-call``. All ranks are in the same call if the greatest ``call`` equals minus the greatest
    ``negated_call``."""

    @property
    def calls_differ(self) -> bool:
        """Whether some ranks started this vote in another call than others."""
        return self.call != -self.negated_call


CALLS = ("save()", "save(force=True)", "load()", "wait()", "close()")
"""The calls in which a vote can be started."""


def call_number(kind: str, step: int | None) -> int:
    """Return the number of a call, which is the same on all ranks that make the same call.

    Args:
        kind: one of ``CALLS``.
        step: the step of a save; None for other calls.
    """
    return (step or 0) * len(CALLS) + CALLS.index(kind)


def describe_call(number: int) -> str:
    """Return the call with a number in words, such as ``save() of step 7``."""
    step, kind = divmod(number, len(CALLS))
    return f"{CALLS[kind]} of step {step}" if CALLS[kind].startswith("save") else CALLS[kind]


class SaveOutcome(IntEnum):
    """The outcome of a save. The greatest value of all ranks counts.

    A missed save is therefore known once no rank is still saving.
    """

    SEALED = 0
    MISSED = 1
    UNDER_WAY = 2


class Event(Protocol):
    """Something that happens once."""

    def is_set(self) -> bool:
        """Return whether it has happened."""


class SaveCopy(Protocol):
    """The copy of a state, as far as a vote needs it."""

    @property
    def done(self) -> Event:
        """Set when the slot is sealed, or the save has failed."""

    header: SlotHeader | None
    """The header of the sealed slot; None before, or if the save has failed."""
    why: str
    """Why the save has failed, in words; empty if it has not."""
    facts: dict[str, object]
    """Fields of the slot's header."""


@dataclass(eq=False, slots=True)
class SaveAttempt:
    """A save that is due, until every rank knows its outcome on all ranks.

    Ranks learn in the same call that a save is due and that one is decided. The oldest undecided
    save is therefore the same on all ranks, and a vote need not name it.
    """

    id: CheckpointId
    persist_requested: bool
    """The save is to go to storage."""
    began: float
    """When it began, by the clock of the checkpointer."""
    forced: bool = False
    """The script has passed ``force=True``."""
    certified: bool = False
    """All replicas have equal parameters."""
    staging: SaveCopy | None = None
    """The copy that is under way on this rank; None if none was started."""
    missed: bool = False
    """This rank did not start the save: no slot, no memory, or a state that cannot be saved."""

    @property
    def outcome(self) -> SaveOutcome:
        """The outcome on this rank."""
        if self.missed:
            return SaveOutcome.MISSED
        if self.staging is None or not self.staging.done.is_set():
            return SaveOutcome.UNDER_WAY
        return SaveOutcome.MISSED if self.staging.header is None else SaveOutcome.SEALED


class VoteChannel(Protocol):
    """Carries votes between ranks."""

    def launch(self, vote: Sequence[int], /) -> Callable[[float | None], list[int]]:
        """Start a vote, and return without waiting for it.

        The returned function waits for the result. It takes the seconds to wait at most.
        """


class SaveVotes:
    """The votes of one rank, and the saves whose outcome is not known to all ranks yet."""

    def __init__(self) -> None:
        self.last = RankVote()
        """The result of the last vote."""
        self.stop = False
        """Some rank was asked to stop, and all ranks know it."""
        self.attempts: deque[SaveAttempt] = deque()
        """Saves whose outcome is not known to all ranks yet, oldest first; at most two."""
        self.heard = 0
        """Number of votes whose result was taken: the same on all ranks after the same vote."""
        self.taken = RankVote()
        """The newest result, which may still be refused."""
        self.own_call = 0
        """Number of the call in which this rank started its last vote."""
        self._pending: Callable[[float | None], list[int]] | None = None
        """Waits for the result of the vote of the previous call; None if there is none."""

    @property
    def persist_requested(self) -> bool:
        """Whether one of the undecided saves is to go to storage."""
        return any(one.persist_requested for one in self.attempts)

    def newest_sealed(self) -> CheckpointId | None:
        """Return the newest undecided save that this rank has sealed; None if there is none."""
        sealed = (one.id for one in reversed(self.attempts) if one.outcome is SaveOutcome.SEALED)
        return next(sealed, None)

    def mine(self, base: RankVote, *, call: int, busy: bool, uncopied: int, stop: bool) -> RankVote:
        """Return the vote of this rank.

        If no save is undecided, the outcome is ``UNDER_WAY``, so that the vote decides none.

        Args:
            base: the parts that only rank 0 decides.
            call: the number of the call that starts the vote.
            busy: whether the persister of this rank's node is busy.
            uncopied: the state of the save that peers copy: a value of ``RankVote.uncopied``.
            stop: whether this rank, or any rank as it knows, was asked to stop.
        """
        oldest = self.attempts[0] if self.attempts else None
        copy = None if oldest is None else oldest.staging
        shard_group = 0 if copy is None else int(str(copy.facts["part"])[:15], 16)
        return base._replace(
            call=call,
            negated_call=-call,
            busy=int(busy),
            uncopied=uncopied,
            part=shard_group,
            negated_shard_group=-shard_group,
            stop=int(stop),
            outcome=SaveOutcome.UNDER_WAY if oldest is None else oldest.outcome,
        )

    def launch(self, ballot: VoteChannel, vote: RankVote) -> None:
        """Start a vote. Its result is taken in the next call."""
        self.own_call = vote.call
        self._pending = ballot.launch(vote)

    @property
    def pending(self) -> bool:
        """Whether a vote has begun whose result was not taken."""
        return self._pending is not None

    def result(self, timeout_s: float | None) -> RankVote:
        """Wait for the result of the pending vote.

        None is pending afterwards, even if this fails. The result is not applied (`decide`).

        Raises:
            RuntimeError: another rank is gone, or has not voted within the timeout.
        """
        assert self._pending is not None
        wait_for_result, self._pending = self._pending, None
        self.heard += 1
        self.taken = RankVote(*wait_for_result(timeout_s))
        return self.taken

    def decide(self, vote: RankVote) -> SaveAttempt | None:
        """Apply the result of a vote. Return the save that it decides; None if none.

        The oldest undecided save is decided once no rank is still saving it. It is removed from
        `attempts`; the caller must act on it.
        """
        self.last = vote
        self.stop = self.stop or bool(vote.stop)
        if self.attempts and vote.outcome != SaveOutcome.UNDER_WAY:
            return self.attempts.popleft()
        return None
