"""A user's request to store the newest checkpoint in memory while training goes on."""

from dataclasses import dataclass

from dlrover_py.master.core.checkpoints import Checkpoints
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import Term
from dlrover_py.protocol.status import StoreAnswer

TRIES = 5
"""Number of attempts. Workers that save each step may fill the memory of the chosen checkpoint
before it is locked; the next attempt takes a newer one."""


@dataclass(slots=True)
class StoreRequest:
    """One request, until it is answered."""

    text: str
    """The text by which the answer names the request."""
    until: float
    """Monotonic time at which the request ends without success."""
    _least: CheckpointId | None = None
    """The newest checkpoint that was complete when the request was first looked at: this one or a
    later one has to be stored."""
    _tries: int = 0

    def serve(self, known: Checkpoints, now: float, term: Term) -> StoreAnswer | None:
        """Begin to store a checkpoint if one has to be, and return the answer once there is one.

        It waits for nodes of an earlier term, which may hold what no other node does, and for the
        end of a write that runs.

        Args:
            known: All knowledge about checkpoints; a write is begun there.
            now: Monotonic time.
            term: Term of this master.
        """
        if now >= self.until:
            return self._refused(known.failing or "it was not stored in time")
        if known.not_reported:
            return None
        newest = known.newest_complete()
        self._least = newest if self._least is None else self._least
        if self._least is None:
            return self._refused("no checkpoint is complete in the memory of the nodes")
        stored = known.stored
        if stored is not None and stored.id >= self._least:
            return StoreAnswer(request=self.text, step=stored.step, folder=stored.where)
        if not known.storable:
            return self._refused(
                "neither spec.checkpoint.dir nor the script names a directory for checkpoints"
            )
        if known.writing is not None:
            return None
        if newest is None:
            return self._refused("the nodes that had the checkpoint in memory are gone")
        if self._tries == TRIES:
            return self._refused(known.failing or "each attempt was canceled")
        self._tries += 1
        known.store(newest, now, term, self.until, "a user asked")
        return None

    def _refused(self, why: str) -> StoreAnswer:
        """Return the answer that nothing was stored."""
        return StoreAnswer(request=self.text, problem=why)
