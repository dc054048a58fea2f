"""The cuts of a parameter server's tables that belong to the checkpoints of a training.

The state has an item such as ``ps.tables()``. Each checkpoint then has the name of a cut. A cut
that a kept checkpoint has is kept, too.
"""

import logging
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.trainer.collectives import Ranks
from dlrover_py.trainer.object_codec import decode_object
from dlrover_py.trainer.sources import READ_ERRORS, Catalog

log = logging.getLogger(__name__)


@runtime_checkable
class CutItem(Protocol):
    """A value of the state that saves and restores tables outside of the checkpoint.

    All ranks make each call at the same step. Each raises DLRoverError if it fails, on all ranks.
    """

    def save_cut(self, step: int, needed: Collection[str] | None) -> str:
        """Save the tables. Return the name of the cut, which is ``cut`` in the state's entry."""

    def restore_cut(self, name: str) -> None:
        """Go back to a cut."""

    def restore_origin(self) -> None:
        """Go back to the rows with which the training began."""


def cut_items(state: Mapping[str, Any]) -> dict[str, CutItem]:
    """Return the items of a state with cuts, by the key of the cut's name in a checkpoint."""
    return {f"{key}.cut": item for key, item in state.items() if isinstance(item, CutItem)}


class CheckpointStorage(Protocol):
    """What is known of the storage of checkpoints."""

    dir: str | None
    """The directory; None if checkpoints are in memory only."""

    @property
    def on_the_way(self) -> Collection[CheckpointId]:
        """The checkpoints that are or may be on their way there."""


class TableCuts:
    """The names of the cuts of this rank's checkpoints."""

    def __init__(self, storage: CheckpointStorage) -> None:
        """Create it. Nothing is read yet.

        Args:
            storage: The storage of checkpoints.
        """
        self._storage, self._dir = storage, storage.dir
        self._of: dict[CheckpointId, set[str]] = {}
        """The cuts of checkpoints in memory, or on their way to storage."""
        self._stored: dict[str, set[str]] = {}
        """The cuts of each checkpoint in storage, by its folder."""
        self._restored = set[str]()
        """The cuts of the candidate that was loaded last."""

    def save(
        self,
        state: Mapping[str, Any],
        one: CheckpointId,
        kept: Collection[CheckpointId],
        *,
        lists: bool,
    ) -> str:
        """Make the cuts of a checkpoint. Collective, if the state has such items.

        Args:
            state: The state that is saved.
            one: The checkpoint.
            kept: Other checkpoints in memory that may still be loaded.
            lists: Whether this rank looks up which checkpoints are in storage.

        Returns:
            Why there is no cut; empty on success.
        """
        items = cut_items(state)
        if not items:
            return ""
        kept = {*kept, *self._storage.on_the_way}
        self._of = {old: names for old, names in self._of.items() if old in kept}
        needed: set[str] | None = set().union(*self._of.values())
        if lists:
            stored = self._list_stored(items)
            needed = None if stored is None or needed is None else needed | stored
        names = self._of[one] = set()
        try:
            for item in items.values():
                names.add(item.save_cut(one.step, needed))
        except DLRoverError as error:
            return str(error)
        return ""

    def restore(self, state: Mapping[str, Any], catalog: Catalog, ranks: Ranks) -> str:
        """Go back to the cuts of a candidate, before the state is filled. Collective.

        Args:
            state: The state.
            catalog: What the candidate has.
            ranks: The processes that load together.

        Returns:
            Why that is not possible, at the first rank that has a reason; empty on success.
        """
        items = cut_items(state)
        if not items:
            return ""
        names: dict[str, str] = {}
        words = ""
        try:
            for key in items:
                found = catalog.find(key)
                names[key] = "" if found is None else str(found[0])
        except READ_ERRORS as error:
            words = str(error)
        if words := ranks.first(words):  # the others would wait for this rank
            return words
        try:
            for key, item in items.items():
                item.restore_cut(names[key])
        except DLRoverError as error:
            words = str(error)
        self._restored = set(names.values())
        return ranks.first(words)

    def loaded(self, state: Mapping[str, Any], one: CheckpointId | None) -> None:
        """Take note of a load. Without a checkpoint, all tables go back to the first rows.

        Args:
            state: The state.
            one: The checkpoint; None if there was none.

        Raises:
            DLRoverError: The tables cannot go back.
        """
        self._of = {} if one is None else {one: self._restored}
        if one is None:
            for item in cut_items(state).values():
                item.restore_origin()

    def _list_stored(self, keys: Collection[str]) -> set[str] | None:
        """Return the cuts of all checkpoints in storage; None if they cannot be listed."""
        if self._dir is None:
            return set()
        from dlrover_py.checkpoint.directory import CheckpointDirectory

        directory = CheckpointDirectory(self._dir)
        found: dict[str, set[str]] = {}
        try:
            for manifest in directory.checkpoints():
                known = self._stored.get(manifest.folder)
                if known is None:
                    known = _names_in(directory, manifest, keys)
                found[manifest.folder] = known
        except READ_ERRORS as error:
            log.warning("no cut of the tables is removed: %s: %s", self._dir, error)
            return None
        self._stored = found
        return set[str]().union(*found.values())


def _names_in(directory: Any, manifest: Manifest, keys: Collection[str]) -> set[str]:
    """Return the names of the cuts that a stored checkpoint has."""
    names = set[str]()
    for one in manifest.objects:
        if one.key in keys:
            data = directory.read_all(manifest, one.file, one.position, one.nbytes)
            names.add(str(decode_object(bytes(data))))
    return names
