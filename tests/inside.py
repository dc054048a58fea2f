"""Access to private parts of a Checkpointer, so that each is named in one place."""

from collections.abc import Callable

from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.slot_pool import SlotPool
from dlrover_py.trainer.staging import Stager

Copy = Callable[[int, memoryview, int], int]


def stager_of(checkpointer: Checkpointer) -> Stager:
    """Return the stager of a checkpointer."""
    return checkpointer._site().stager


def newest_common(checkpointer: Checkpointer) -> int | None:
    """Return the newest step that all ranks have in memory."""
    found = checkpointer._newest_complete
    return None if found is None else found.step


def pool_of(stager: Stager) -> SlotPool:
    return stager._pool


def copying(stager: Stager) -> Copy:
    """Return the function that copies a part of a tensor."""
    return stager._copy


def copy_with(stager: Stager, copy: Copy) -> None:
    """Make the stager copy with another function."""
    stager._copy = copy
