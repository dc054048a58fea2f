"""Load checkpoints that ``torch.distributed.checkpoint.save`` has written without DLRover-Py.

``.metadata`` is a pickle: only classes of torch are instantiated from it. Tensors and objects are
read as ``torch.load`` does with ``weights_only=True``.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dlrover_py.checkpoint.directory import BLOCK_BYTES, open_backend
from dlrover_py.protocol.documents import LARGEST
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import TensorChunk
from dlrover_py.protocol.words import without_passwords
from dlrover_py.trainer.collectives import Ranks
from dlrover_py.trainer.key_differences import format_keys
from dlrover_py.trainer.object_codec import first_line
from dlrover_py.trainer.restore import agree, fill
from dlrover_py.trainer.restore_targets import RestorePlan, plan_restore, targets
from dlrover_py.trainer.sources import READ_ERRORS, Catalog, RestoreSource, TensorLocation
from dlrover_py.trainer.torch_compat import read_metadata

ObjectPath = tuple[str | int, ...]
"""The names and indexes that lead to an object in a nested state."""


class _DcpFolder:
    """A folder of DCP: each tensor chunk is a file of torch.save inside a larger file."""

    kind = "storage"

    def __init__(self, url: str) -> None:
        """Open the folder at a path, or at an address that fsspec knows."""
        self._place = open_backend(url, what="initial values in")
        self.where = self._place.url
        self.lengths: dict[tuple[str, int], int] = {}

    def place(self, key: str, info: object) -> TensorLocation:
        """Return the location of an entry, from the information in ``.metadata``.

        The length of the entry is recorded for `entry`. The file itself is not read.

        Args:
            key: the key of the entry, for messages.
            info: the entry's value in ``storage_data`` of the metadata; None if there is none.

        Raises:
            CheckpointError: the location is missing or invalid, its file is not directly in the
                folder, or the entry is compressed.
        """
        parts = ("relative_path", "offset", "length")
        file, offset, length = [cast(Any, getattr(info, part, None)) for part in parts]
        if not (isinstance(file, str) and _is_count(offset) and _is_count(length)):
            raise CheckpointError(f"{self.where}: {key} has no valid location in its .metadata")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.where}/{file} is compressed: expected uncompressed data")
        if "/" in file or file.startswith("."):
            raise CheckpointError(f"{self.where}: {file!r} is no file of a checkpoint")
        self.lengths[file, offset] = length
        return TensorLocation(self, file, offset, None)

    def entry(self, file: str, position: int) -> bytes:
        """Return the bytes of an entry, for which `place` was called before.

        An OSError is raised if the file cannot be read or ends too early.
        """
        length = self.lengths[file, position]
        data = bytearray()
        while len(data) < length:  # the length may be wrong: no memory beyond what is there
            block = bytearray(min(BLOCK_BYTES, length - len(data)))
            self._place.read_into(file, position + len(data), memoryview(block))
            data += block
        return bytes(data)

    def metadata(self) -> bytes:
        """Return the bytes of ``.metadata``, a pickle."""
        return self._place.read(".metadata")

    def read(self, file: str, position: int, target: memoryview) -> None:
        """Raise: the folder has no raw bytes to read, only entries of torch.save.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("expected entry()")


def load_dcp(
    state: Mapping[str, object],
    url: str | Path,
    *,
    rank: int,
    world: int,
    strict: bool = True,
    log: logging.Logger,
) -> None:
    """Fill the state from a folder that torch's ``dcp.save`` has written. Collective.

    The state's keys are compared with those of ``dcp.save({...})`` of the ``state_dict()``, or of
    ``get_state_dict()``, of the same modules and optimizers. ``.metadata`` is a pickle: only
    classes of torch are instantiated from it. Objects are read with ``weights_only=True``.

    Args:
        state: as for :func:`dlrover_py.trainer.restore.load`; filled in place.
        url: a path, or an address that fsspec knows.
        rank: the rank of this process.
        world: the number of processes that load.
        strict: keys that only one side has are an error.
        log: receives warnings about differences.

    Raises:
        KeysDifferError: the checkpoint belongs to a different state; nothing was changed.
        CheckpointError: the checkpoint or the state of some rank cannot be read, or an object
            refuses what was saved. The message says whether tensors of the state have been written.
    """
    ranks = Ranks(rank, world)
    shown = without_passwords(str(url))
    found = RestoreSource(Step(0), Round(0), Timeline(0), world, "", False, shown)
    plan: RestorePlan | None = None
    failure: Exception | None = None
    try:
        target = targets(state, rank=rank)  # first: an object's state_dict() may be collective
        catalog = _foreign(str(url))
        plan = plan_restore(target, catalog)
        if plan.gaps:
            raise CheckpointError(f"parts of {format_keys(plan.gaps)} are not there")
    except READ_ERRORS as error:
        failure = error
    if why := agree(ranks, shown, plan, failure, strict=strict):
        raise CheckpointError(f"{shown} cannot be read: {why}")
    assert plan is not None
    _, why = fill(ranks, found, catalog, plan, log)
    if why:
        raise CheckpointError(
            f"{shown} cannot be read: {why}. Tensors of the state have been written: do not train "
            "on with them"
        )


def _foreign(url: str) -> Catalog:
    """Return the catalog of a folder that torch has written.

    Raises:
        CheckpointError: the metadata are not what torch writes.
        ConfigError: the address is not valid, or no package is installed for its protocol.
        OSError: the metadata cannot be read.
    """
    source = _DcpFolder(url)
    metadata = read_metadata(source.metadata())
    try:
        return _cataloged(source, metadata)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise CheckpointError(f"its .metadata is malformed: {first_line(error)}") from error


def _cataloged(source: _DcpFolder, metadata: Metadata) -> Catalog:
    """Return the catalog of a folder with these metadata.

    Malformed metadata may also lead to a TypeError and the like, which `_foreign` converts.

    Args:
        source: the folder.
        metadata: what its ``.metadata`` says.

    Raises:
        CheckpointError: an object has no location; or a key, a location or a tensor chunk is not
            valid.
    """
    catalog = Catalog()
    catalog.foreign = True
    paths: dict[str, ObjectPath] = {}
    for key, saved in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{source.where}: {key!r} in its .metadata is no key")
        if not isinstance(saved, TensorStorageMetadata):
            location = source.place(key, metadata.storage_data.get(MetadataIndex(key)))
            catalog.add_object(key, partial(source.entry, location.file, location.position))
            paths[key] = _path_of(key, metadata.planner_data)
            continue
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        for box in saved.chunks:
            chunk = TensorChunk(key, dtype, tuple(box.sizes), tuple(saved.size), tuple(box.offsets))
            if not _is_possible(chunk):
                raise CheckpointError(f"{source.where}: {key} has no valid chunk in its .metadata")
            info = metadata.storage_data.get(MetadataIndex(key, box.offsets))
            catalog.add(chunk, source.place(key, info) if info is not None else None)
    catalog.rebuild = partial(_rebuild, catalog, paths)
    return catalog


def _path_of(key: str, planner_data: object) -> ObjectPath:
    """Return the names and indexes of which the key of an object is composed.

    torch's own planner notes them. Without such a note, the key is split at its dots.

    Args:
        key: the key.
        planner_data: what the planner that wrote the checkpoint has noted.
    """
    noted = planner_data.get(key) if isinstance(planner_data, Mapping) else None
    path: ObjectPath = tuple(noted) if isinstance(noted, tuple | list) else ()
    known = all(isinstance(name, str | int) for name in path) and ".".join(map(str, path)) == key
    return path if known else tuple(key.split("."))


def _rebuild(
    catalog: Catalog, paths: Mapping[str, ObjectPath], key: str
) -> tuple[object, list[str]] | None:
    """Rebuild an object that DCP has split: ``optim.param_groups.0`` from ``….0.lr`` etc.

    The parts are read from the folder, which raises CheckpointError if one cannot be read.

    Args:
        catalog: the catalog of the folder.
        paths: for each key of an object, the names and indexes of which it is composed.
        key: the key of the object that was split.

    Returns:
        The object and the keys that it was rebuilt from. None if there are no such keys, or if they
        do not say how the object is nested.
    """
    parts: dict[ObjectPath, dict[ObjectPath, str]] = {}
    for other in paths:
        if other.startswith(f"{key}."):
            path = paths[other]
            for depth in range(1, len(path)):  # none fits if a name has a dot: "x" and "a.b"
                if ".".join(map(str, path[:depth])) == key:
                    parts.setdefault(path[:depth], {})[path[depth:]] = other
    if not parts:
        return None
    keys = next(iter(parts.values()))  # {"x.a": …} and {"x": {"a": …}} are two objects
    inner_paths = {path[:depth] for path in keys for depth in range(1, len(path))}
    if not inner_paths.isdisjoint(keys):  # a part would be within another one
        return None
    root: dict[str | int, Any] = {}
    for path, other in keys.items():
        holder = root
        *inner, last = path
        for name in inner:
            holder = holder.setdefault(name, {})
        holder[last] = catalog.value(other)
    return _listed(root), list(keys.values())


def _listed(value: Any) -> Any:
    """Return a value in which mappings with int keys are lists, as DCP's paths mean them."""
    if not isinstance(value, dict):
        return value
    items = {name: _listed(item) for name, item in value.items()}
    if items and all(isinstance(name, int) for name in items):
        return [items[name] for name in sorted(items)]
    return items


def _is_count(value: object) -> bool:
    """Return whether a value is a plausible number of bytes."""
    return type(value) is int and 0 <= value < LARGEST


def _is_possible(chunk: TensorChunk) -> bool:
    """Return whether a chunk has a type of torch, and plausible bounds."""
    return (
        isinstance(getattr(torch, chunk.dtype, None), torch.dtype)
        and len(chunk.shape) == len(chunk.whole) == len(chunk.at)
        and all(map(_is_count, (*chunk.shape, *chunk.whole, *chunk.at)))
    )
