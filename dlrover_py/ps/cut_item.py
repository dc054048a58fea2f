"""The tables of a parameter server as an item of a checkpoint's state, without torch.

A checkpoint has the name of a cut. The cut is made while all workers save, before the state is
copied. It is read again before the state is filled. So model, position in the data and tables are
those of one step, whatever died.
"""

from collections.abc import Collection, Mapping

from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.ps.client import PsClient, default_client

CUT = "cut"
"""Key of the cut's name."""
_EXPECTED = (
    "expected ps.tables() as a value of the state itself, such as "
    '{"model": model, "tables": ps.tables()}'
)


class Tables:
    """All tables of a job. ``Checkpointer`` makes each call on all workers at the same step."""

    def __init__(self, client: PsClient) -> None:
        """Use a connection.

        Args:
            client: The connection of this worker, as its tables have it.
        """
        self._client = client
        self._cut = ""

    def save_cut(self, step: int, needed: Collection[str] | None) -> str:
        """Save the tables, and return the name of the cut, which :meth:`state_dict` has then.

        Args:
            step: The step after which they are saved.
            needed: The cuts of checkpoints that are kept; None if that is not known.

        Raises:
            CheckpointError: There is no directory, it cannot be written, or rows are lost.
            UnreachableError: Not all workers called in time.
        """
        self._cut = ""
        names = None if needed is None else tuple(sorted(needed))
        self._cut = self._client.meet(step, needed=names).folder
        return self._cut

    def restore_cut(self, name: str) -> None:
        """Go back to a cut with all tables.

        Raises:
            CheckpointError: There is no such cut, it is damaged, or it has other tables.
            UnreachableError: Not all workers called in time.
        """
        if not name:
            raise CheckpointError(f"it has no cut of the tables: {_EXPECTED}")
        self._client.meet(-1, restore=True, folder=name)
        self._cut = name

    def restore_origin(self) -> None:
        """Go back to the rows with which the training began, as there is no checkpoint.

        The first call of all workers saves these rows as a cut of step 0. If the rows went back to
        a cut by ``ps.restore()`` before, the training began with that one.

        Raises:
            CheckpointError: There is no directory, or it is not known with which rows it began.
            UnreachableError: Not all workers called in time.
        """
        self._cut = self._client.meet(-1, restore=True, origin=True).folder

    def state_dict(self) -> dict[str, str]:
        """Return the name of the cut; empty if none was made for this checkpoint."""
        return {CUT: self._cut}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Check that the tables have gone back to the cut.

        Raises:
            CheckpointError: They have not.
        """
        if not self._cut or state.get(CUT) != self._cut:
            raise CheckpointError(f"the tables have not gone back to its cut: {_EXPECTED}")


def tables(client: PsClient | None = None) -> Tables:
    """Return all tables of the job, as a value of the state of a ``Checkpointer``.

    ::

        state = {"model": model, "optimizer": dense, "data": loader, "tables": ps.tables()}
        step = checkpointer.load(state) or 0

    Each save that is due makes a cut of the tables first, so choose ``every``. Each load goes back
    to the cut of its checkpoint. Without a checkpoint, it goes back to the rows with which the
    training began. The servers need a directory for cuts.

    Args:
        client: The connection that the tables use. None: that of this process.

    Raises:
        ConfigError: No job has started this process, so there are no servers.
    """
    return Tables(client or default_client())
