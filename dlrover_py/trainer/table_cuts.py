"""The cuts of a parameter server's tables that belong to the checkpoints of a training.

The state has an item such as ``ps.tables()``. Each checkpoint then has the name of a cut. A cut
that a kept checkpoint has is kept, too.
"""

import logging
import threading
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import xxhash

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import CheckpointError, DLRoverError, UnreachableError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.trainer.collectives import Ranks
from dlrover_py.trainer.object_codec import decode_object
from dlrover_py.trainer.sources import READ_ERRORS, Catalog

if TYPE_CHECKING:
    from dlrover_py.checkpoint.directory import CheckpointDirectory

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


LOOK_THREAD = "dlrover-cuts"
"""Name of the thread that lists the checkpoints in storage."""


class TableCuts:
    """The names of the cuts of this rank's checkpoints.

    No save waits for storage, which may be slow. A save takes the result of an earlier look, and
    adds the cuts of all checkpoints that may have come to storage since that look began.
    """

    def __init__(self, storage: CheckpointStorage) -> None:
        """Create it. Nothing is read yet.

        Args:
            storage: The storage of checkpoints.
        """
        self._storage = storage
        self._stored = _StoredCuts(storage.dir)
        self._of: dict[CheckpointId, set[str]] = {}
        """The cuts of checkpoints that are, or may be, nowhere but in memory."""
        self._last: _Look | None = None
        """The last look into storage that had a result."""
        self._next = _Look(None)
        """The look that began last. Its result counts at a later save."""
        self._next.over.set()
        self._before = set[CheckpointId]()
        """The checkpoints in memory, or on their way, at the save before. What has left memory
        since may come to storage only after a look."""
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
            kept: Other checkpoints in memory. They may still be loaded, or go to storage.
            lists: Whether this rank looks up which checkpoints are in storage.

        Returns:
            Why there is no cut; empty on success.
        """
        items = cut_items(state)
        if not items:
            return ""
        needed = self._needed({*kept, *self._storage.on_the_way}, items, lists=lists)
        names = self._of[one] = set()
        self._note({one})
        try:
            for item in items.values():
                names.add(item.save_cut(one.step, needed))
        except DLRoverError as error:
            return str(error)
        return ""

    def _needed(
        self, held: set[CheckpointId], keys: Collection[str], *, lists: bool
    ) -> set[str] | None:
        """Return the cuts that must stay; None if they are not known, so that all stay.

        Args:
            held: The checkpoints in memory, or on their way to storage.
            keys: The keys of the cuts' names in a checkpoint.
            lists: Whether this rank looks up which checkpoints are in storage.
        """
        before = self._before
        self._note(held)
        if self._next.over.is_set():
            if self._next.names is not None:
                self._last = self._next
            self._next = self._stored.look(keys) if lists else _Look(set())
            self._next.since |= held | before
        self._before = held
        last = self._last or (self._next if self._next.names is not None else None)
        since = self._next.since if last is None else last.since
        self._of = {old: names for old, names in self._of.items() if old in since}
        if last is None or last.names is None or not since <= self._of.keys():
            return None  # a process before this one may have made a checkpoint of them
        return last.names.union(*self._of.values())

    def _note(self, held: set[CheckpointId]) -> None:
        """Note checkpoints that may come to storage while it is listed, or afterwards."""
        self._before = self._before | held
        for look in (self._last, self._next):
            if look is not None:
                look.since |= held

    def restore(self, state: Mapping[str, Any], catalog: Catalog, ranks: Ranks) -> str:
        """Go back to the cuts of a candidate, before the state is filled. Collective.

        Args:
            state: The state.
            catalog: What the candidate has.
            ranks: The processes that load together.

        Returns:
            Why that is not possible, at the first rank that has a reason; empty on success.

        Raises:
            UnreachableError: The servers did not answer some rank, or not all ranks called in time.
                An older checkpoint would not help. It is raised on all ranks.
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
        silent = ""
        try:
            for key, item in items.items():
                item.restore_cut(names[key])
        except UnreachableError as error:
            silent = str(error)
        except DLRoverError as error:
            words = str(error)
        if silent := ranks.first(silent):
            raise UnreachableError(f"the tables cannot go back to a cut: {silent}")
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
        if one is None:
            for item in cut_items(state).values():
                item.restore_origin()
        else:
            self._of[one] = self._restored
            self._note({one})


class _Look:
    """One look into storage."""

    def __init__(self, names: set[str] | None) -> None:
        """Create it.

        Args:
            names: The cuts of all checkpoints there; None if they are not known yet.
        """
        self.names = names
        self.over = threading.Event()
        """Whether the look has ended. Without names, it has failed."""
        if names is not None:
            self.over.set()
        self.since = set[CheckpointId]()
        """The checkpoints that were in memory, or on their way, since it began."""


class _StoredCuts:
    """The cuts of the checkpoints in storage."""

    def __init__(self, dir: str | None) -> None:
        """Create it. Nothing is read yet.

        Args:
            dir: The directory of checkpoints; None if there is none.
        """
        self._dir = dir
        self._directory: CheckpointDirectory | None = None
        self._cuts: dict[str, set[str]] = {}
        """The cuts of each checkpoint, by its folder."""
        self._said = ""
        """Why the last look has failed."""

    def look(self, keys: Collection[str]) -> _Look:
        """Begin a look in a thread, as a store may hang. The one before must be over.

        Args:
            keys: The keys of the cuts' names in a checkpoint.
        """
        if self._dir is None:
            return _Look(set())
        look = _Look(None)
        threading.Thread(
            target=self._list, args=(look, tuple(keys)), name=LOOK_THREAD, daemon=True
        ).start()
        return look

    def _list(self, look: _Look, keys: Collection[str]) -> None:
        """Give a look its result."""
        try:
            look.names = self._listed(keys)
            self._said = ""
        except Exception as error:  # noqa: BLE001  torch.load raises what a damaged file leads to
            words = str(error) or type(error).__name__
            if words != self._said:
                log.warning("no cut of the tables is removed: %s: %s", self._dir, words)
            self._said = words
        finally:
            look.over.set()

    def _listed(self, keys: Collection[str]) -> set[str]:
        """Return the cuts of all checkpoints.

        Raises:
            CheckpointError: A manifest or the name of a cut cannot be read.
            OSError: The store fails.
        """
        from dlrover_py.checkpoint.directory import CheckpointDirectory

        assert self._dir is not None
        directory = self._directory = self._directory or CheckpointDirectory(self._dir)
        found: dict[str, set[str]] = {}
        for manifest in directory.checkpoints():
            known = self._cuts.get(manifest.folder)
            found[manifest.folder] = (
                _names_in(directory, manifest, keys) if known is None else known
            )
        if directory.damaged:  # it may be readable again
            words = directory.fault(next(iter(directory.damaged)))
            raise CheckpointError(f"{words}: remove it if it is of no use")
        self._cuts = found
        return set[str]().union(*found.values())


def _names_in(
    directory: "CheckpointDirectory", manifest: Manifest, keys: Collection[str]
) -> set[str]:
    """Return the names of the cuts that a stored checkpoint has.

    Raises:
        CheckpointError: The bytes of a name are damaged.
        OSError: The store fails.
    """
    names = set[str]()
    for one in manifest.objects:
        if one.key in keys:
            data = directory.read_all(manifest, one.file, one.position, one.nbytes)
            if xxhash.xxh3_64_intdigest(data) != one.xxh3:
                raise CheckpointError(
                    f"{manifest.folder}/{one.file}: the bytes of {one.key} differ from those that "
                    "were written: remove this checkpoint"
                )
            names.add(str(decode_object(bytes(data))))
    return names
