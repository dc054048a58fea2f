"""Which checkpoint the peers of all ranks copy, and which one all of them have copied.

Where ranks have different shards, the copies that peers make are worth something only if all of
them are of the same checkpoint. The ranks therefore choose one checkpoint at a time, and keep it in
their slots until the next one is copied.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple, Self

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import SlotHeader
from dlrover_py.trainer.placement import WorkerContext
from dlrover_py.trainer.vote import RankVote


class ReplicaMarks(NamedTuple):
    """The checkpoints that a rank has in its own memory after a load."""

    found: tuple[CheckpointId, ...]
    """All checkpoints."""
    marked: Mapping[CheckpointId, tuple[bool, int]]
    """The checkpoints that all nodes were to copy. Each has a flag (the peer has a copy) and the
    world size of that time."""

    def plain(self) -> list[Any]:
        """Return the marks as values for JSON."""
        marked = [(astuple(one), *mark) for one, mark in self.marked.items()]
        return [[astuple(one) for one in self.found], marked]

    @classmethod
    def read(cls, plain: Sequence[Any]) -> Self:
        """Return the marks of which :meth:`plain` has returned the values."""
        found, marked = plain
        return cls(
            tuple(_id_of(one) for one in found),
            {_id_of(one): (bool(copied), int(world)) for one, copied, world in marked},
        )

    def contradicts(self, one: CheckpointId) -> bool:
        """Return whether this rank shows that not all peers have a copy of the checkpoint.

        A rank shows it in two cases. It has marked the checkpoint for its peer, which has no copy
        yet. Or it does not have the mark, although its other checkpoints reach from before this one
        to its timeline or a later one. A rank that joined later, or was away at that time, knows
        nothing of the checkpoint: the result is False.
        """
        if one in self.marked:
            return not self.marked[one][0]
        if not self.found:
            return False
        return min(self.found) <= one and max(self.found).timeline_key >= one.timeline_key


def _id_of(plain: Sequence[int]) -> CheckpointId:
    """Return the identity of a checkpoint from the values of its fields, in their order."""
    round_, timeline, step = plain
    return CheckpointId(round=Round(round_), timeline=Timeline(timeline), step=Step(step))


def copied_by_all(said: Sequence[ReplicaMarks], loaded: CheckpointId) -> CheckpointId | None:
    """Return the newest checkpoint that survives the loss of a node, as far as the ranks know.

    A checkpoint that every rank of its world reports is better than a newer one for which some
    ranks are gone: their shards exist only at their peers.

    Args:
        said: the marks of each rank.
        loaded: the checkpoint that was loaded. A newer one could not be loaded, because a part of
            it is gone.

    Returns:
        The id of the checkpoint; None if there is none.
    """
    worlds = {one: world for marks in said for one, (_, world) in marks.marked.items()}
    found = list[tuple[bool, CheckpointId]]()
    for one, world in worlds.items():
        having = sum(marks.marked.get(one, (False, 0))[0] for marks in said)
        sure = having == world or (having and not any(marks.contradicts(one) for marks in said))
        if sure and one <= loaded:
            found.append((having == world, one))
    return max(found)[1] if found else None


class ReplicaTracker:
    """The checkpoint that peers copy, as one rank knows it."""

    def __init__(self) -> None:
        self.copied: CheckpointId | None = None
        """What all peers have copied. The loss of a node costs only the work after it."""
        self.copying: CheckpointId | None = None
        """The checkpoint that peers are copying."""
        self._marked = False
        """This rank has marked it in its slot. A rank without enough memory has not."""
        self._voted: CheckpointId | None = None
        """The value of ``copying`` to which the pending vote refers."""
        self._sharded = False
        """Ranks have different shards: peers must copy the same checkpoint from all of them."""

    @property
    def kept(self) -> set[CheckpointId]:
        """The checkpoints that must stay in this rank's slots for the sake of peers."""
        copying = self.copying if self._marked else None
        return {one for one in (copying, self.copied) if one is not None}

    def loaded(self, context: WorkerContext, loaded: CheckpointId | None) -> None:
        """Determine which checkpoint all peers have copied. This is collective.

        In a world of one rank, or if no peers copy this node's memory, there is none, and no rank
        is asked. The copy marks of all other checkpoints are cleared in this rank's slots. Until
        peers have copied a checkpoint of this timeline, the loss of a node costs the work since the
        one that was determined.

        Args:
            context: the context of this worker.
            loaded: the checkpoint that was loaded from memory. None: it was loaded from storage, or
                nothing was loaded.
        """
        self.copying = self.copied = None
        if context.copies and context.world > 1:
            found = [s for s in context.stager.found() if s is not None]
            marked = {s.id: (s.copied, s.world) for s in found if s.copy}
            own = ReplicaMarks(tuple(s.id for s in found), marked)
            all_marks = [ReplicaMarks.read(one) for one in context.gather(own.plain())]
            self.copied = None if loaded is None else copied_by_all(all_marks, loaded)
            self._sharded = any(marks.marked for marks in all_marks)  # else the next votes decide
        self._unmark(context)

    def begin(self, context: WorkerContext, one: CheckpointId) -> bool:
        """Choose this save for peers to copy if they copy none now. Return whether it was chosen.

        The result is the same on all ranks. It is False if peers make no copies, or if all ranks
        have the same shards. The peers copy it later, once its slot has the mark (`staged`).
        """
        copy = self._sharded and self.copying is None and context.copies
        if copy:
            self.copying, self._marked = one, False
        return copy

    def staged(self, one: CheckpointId, *, marked: bool) -> None:
        """Record whether the slot of a save has the mark for peers; other saves are ignored."""
        if self.copying == one:
            self._marked = marked

    def uncopied(self, context: WorkerContext) -> int:
        """Return how far the peer of this node has come with the save that peers copy.

        Returns:
            0: the peer has a copy, or this rank has no save for it to copy. 1: the peer has no copy
            yet, or a slot cannot be read at this moment. 2: this rank's slots no longer have the
            save.
        """
        if self.copying is None or not self._marked:
            return 0
        found = context.stager.found()
        for header in found:
            if header is not None and header.id == self.copying:
                return int(not header.copied)
        return 1 if None in found else 2  # it is being filled, or its first page is being rewritten

    def voted(self) -> None:
        """Record that a vote begins, which refers to the checkpoint that peers copy now."""
        self._voted = self.copying

    def sealed(self, context: WorkerContext, vote: RankVote) -> None:
        """Record that a save is sealed on all ranks, with the shard groups that the vote names.

        If all ranks have the same shards, no checkpoint is chosen any more, and the copy marks are
        cleared.
        """
        self._sharded = vote.part != -vote.negated_shard_group
        if not self._sharded and (self.copied or self.copying):
            self.copied = self.copying = None
            self._unmark(context)

    def missed(self, context: WorkerContext, one: CheckpointId) -> None:
        """Record that a save is missed on some rank: copies of it would be useless.

        If it was chosen for peers, its copy marks are cleared. Other saves are ignored.
        """
        if one == self.copying:
            self.copying = None
            self._unmark(context)

    def heard(
        self, context: WorkerContext, vote: RankVote, undecided: Sequence[CheckpointId]
    ) -> None:
        """Apply the result of a vote on the save that peers copy.

        If all peers have a copy, the save becomes `copied`. If it is gone from a slot, its marks
        are cleared. In both cases, another save can be chosen. The result is ignored if no save is
        chosen, if the vote began before this one was chosen, or if the save is undecided.

        Args:
            context: the context of this worker.
            vote: the result.
            undecided: the saves of which it is not known yet whether all ranks have them.
        """
        if self.copying is None or self._voted != self.copying or self.copying in undecided:
            return
        if vote.uncopied == 0:
            self.copied = self.copying
        if vote.uncopied != 1:
            self.copying = None
        if vote.uncopied == 2:
            self._unmark(context)

    def _unmark(self, context: WorkerContext) -> None:
        """Clear the copy marks of all checkpoints but those that all peers have or are copying.

        If none is left, peers copy the newest checkpoint, because all nodes have the same shards.
        """
        marked = {self.copying, self.copied}

        def change(header: SlotHeader) -> SlotHeader:
            return header if header.id in marked else replace(header, copy=False, copied=False)

        context.update_headers(change)
