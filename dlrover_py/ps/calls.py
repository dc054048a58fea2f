"""Saving and restoring all tables with the connection of this process."""

from collections.abc import Collection

from dlrover_py.ps.client import default_client


def save(step: int) -> None:
    """Save all tables as one cut, and wait until it exists. Every worker calls this.

    The cut has all pushes that the workers sent before the call, and none that they send after. The
    directory is that of ``dlrover ps serve --checkpoints``.

    Args:
        step: Number of the step, of which cuts have their names.

    Raises:
        CheckpointError: There is no directory, it cannot be written, or rows are lost.
        UnreachableError: Not all workers called in time.
    """
    default_client().save(step)


def restore(step: int | None = None, *, new: Collection[str] = ()) -> int | None:
    """Go back to a cut with all tables. Every worker calls this before its first forward pass.

    Pushes after the cut do not count any more. It also ends the loss of rows, which every other
    call reports as :class:`DataLossError`.

    Args:
        step: Step of the cut. None: the newest one.
        new: Tables that the cut need not have, although it has others that the job does not use.
            Such a table has perhaps been renamed, so it is refused without this.

    Returns:
        The step; None if there is no cut and no loss. Then nothing was changed.

    Raises:
        CheckpointError: There is no such cut, it is damaged, or it has other tables.
        UnreachableError: Not all workers called in time.
    """
    return default_client().restore(step, new=new)
