"""Checkpoints that ``torch.distributed.checkpoint.save`` has written, without any of ours.

``.metadata`` is a pickle: only torch's own classes are made of it. Tensors and objects are read as
``torch.load`` does with ``weights_only=True``.
"""

import io
import logging
import pickle  # noqa: TID251  torch's own metadata are one
import struct
from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dlrover_py.protocol.checkpoint import LARGEST, Piece
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.storage import BLOCK, open_place
from dlrover_py.trainer.catalog import TROUBLE, Catalog, Found, Place
from dlrover_py.trainer.restore import (
    Fit,
    Ranks,
    agree,
    fill,
    first_of,
    fit_state,
    gaps_of,
    some,
)
from dlrover_py.trainer.state import targets


class _Files:
    """A folder of torch.distributed.checkpoint: each piece is a file of torch.save within one."""

    kind = "storage"

    def __init__(self, url: str) -> None:
        self._place = open_place(url)
        self.where = self._place.url
        self.lengths: dict[tuple[str, int], int] = {}

    def place(self, info: Any) -> Place:
        """Where an entry is.

        Raises:
            CheckpointError: it is not stored as it is.
        """
        file = info.relative_path
        if not (isinstance(file, str) and _count(info.offset) and _count(info.length)):
            raise CheckpointError(f"{self.where}: an entry of its .metadata says not where it is")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{self.where}/{file} is compressed: expected it as it is")
        if "/" in file or file.startswith("."):
            raise CheckpointError(f"{self.where}: {file!r} is no file of a checkpoint")
        self.lengths[file, info.offset] = info.length
        return Place(self, file, info.offset, None)

    def entry(self, file: str, position: int) -> bytes:
        """The bytes of an entry."""
        length = self.lengths[file, position]
        data = bytearray()
        while len(data) < length:  # what it says may be wrong: memory for what is there
            block = bytearray(min(BLOCK, length - len(data)))
            self._place.read_into(file, position + len(data), memoryview(block))
            data += block
        return bytes(data)

    def metadata(self) -> bytes:
        """The pickle."""
        return self._place.read(".metadata")

    def read(self, file: str, position: int, target: memoryview) -> None:
        """Nothing: there are no raw bytes that could be found."""
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
    """Fill the state from a folder that torch's ``dcp.save`` has written; collective.

    The state's keys are compared with those of ``dcp.save({...})`` of the same modules' and
    optimizers' ``state_dict()``, or ``get_state_dict()``. ``.metadata`` is a pickle: only torch's
    own classes are made of it, and objects are read with ``weights_only=True``.

    Args:
        state, rank, world, strict, log: as for :func:`load`.
        url: a path, or an address that fsspec knows.

    Raises:
        KeysDiffer: the checkpoint is of another state; nothing was changed.
        CheckpointError: it cannot be read.
    """
    ranks = Ranks(rank, world)
    found = Found(0, 0, 0, world, "", False, str(url))
    fit: Fit | None = None
    trouble: Exception | None = None
    try:
        target = targets(state, rank=rank)  # first: an object's state_dict() may be collective
        catalog = _foreign(str(url))
        fit = fit_state(target, catalog, rank)
        if gaps := gaps_of(catalog, fit):
            raise CheckpointError(f"parts of {some(gaps)} are not there")
    except TROUBLE as error:
        trouble = error
    if why := agree(ranks, url, fit, trouble, strict=strict):
        raise CheckpointError(f"{url} cannot be read: {why}")
    assert fit is not None
    _, why = fill(ranks, found, catalog, fit, log)
    if why:
        raise CheckpointError(
            f"{url} cannot be read: {why}. Tensors of the state have been written: do not train "
            "on with them"
        )


def _foreign(url: str) -> Catalog:
    """The catalog of a folder of torch's.

    Raises:
        CheckpointError: its metadata are not what torch writes.
    """
    source = _Files(url)
    metadata = _read(source.metadata())
    catalog = Catalog()
    catalog.foreign = True
    paths: dict[str, tuple[str | int, ...]] = {}
    for key, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            place = source.place(metadata.storage_data[MetadataIndex(key)])
            catalog.add_object(key, partial(source.entry, place.file, place.position))
            paths[key] = tuple((metadata.planner_data or {}).get(key, key.split(".")))
            continue
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        for box in saved.chunks:
            piece = Piece(key, dtype, tuple(box.sizes), tuple(saved.size), tuple(box.offsets))
            info = metadata.storage_data.get(MetadataIndex(key, box.offsets))
            catalog.add(piece, source.place(info) if info is not None else None)
    catalog.rebuild = partial(_rebuild, catalog, paths)
    return catalog


def _rebuild(
    catalog: Catalog, paths: Mapping[str, tuple[str | int, ...]], key: str
) -> tuple[object, list[str]] | None:
    """Put together what DCP has taken apart: ``optim.param_groups.0`` from ``….0.lr`` etc."""
    keys = [other for other in paths if other.startswith(f"{key}.")]
    if not keys:
        return None
    root: dict[str | int, Any] = {}
    depth = next(
        n for n in range(len(paths[keys[0]]) + 1) if ".".join(map(str, paths[keys[0]][:n])) == key
    )
    for other in keys:
        holder = root
        *inner, last = paths[other][depth:]
        for name in inner:
            holder = holder.setdefault(name, {})
        holder[last] = first_of(other, catalog.objects[other])
    return _listed(root), keys


def _listed(value: Any) -> Any:
    """Mappings by number are lists, as DCP's paths have it."""
    if not isinstance(value, dict):
        return value
    items = {name: _listed(item) for name, item in value.items()}
    if items and all(isinstance(name, int) for name in items):
        return [items[name] for name in sorted(items)]
    return items


_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


_OF_TORCH = "torch.distributed.checkpoint."
_FORMS = (pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER)
"""What such a pickle has not: the first takes what memory it says, the others come from outside."""


class _Unpickler(pickle._Unpickler):
    """Makes nothing but what ``.metadata`` consists of.

    The one in Python, as ``torch.load`` has it with ``weights_only=True``: the one in C takes as
    much memory as a pickle says, and lets it change the classes that it may name.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in {form[0] for form in _FORMS}
    }

    def find_class(self, module: str, name: str) -> Any:
        """Look a class up.

        Raises:
            CheckpointError: it has no place in metadata.
        """
        found = vars(torch).get(name) if module == "torch" else None  # getattr() would import
        if (module, name) in _ALLOWED or isinstance(found, torch.dtype | torch.layout):
            return super().find_class(module, name)
        raise CheckpointError(f"its .metadata names {module}.{name}: expected torch's metadata")

    def load_build(self) -> None:
        """Give an object its state: no class, function or constant, which are the whole process's.

        Raises:
            CheckpointError: it is one of these.
        """
        made = self.stack[-2]  # type: ignore[attr-defined]
        if not type(made).__module__.startswith(_OF_TORCH) or isinstance(made, Enum):
            raise CheckpointError(f"its .metadata changes a {type(made).__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def _read(document: bytes) -> Metadata:
    """What ``.metadata`` says.

    Raises:
        CheckpointError: it is not what torch writes.
    """
    try:
        metadata = _Unpickler(io.BytesIO(document)).load()
    except (*TROUBLE, pickle.UnpicklingError, ArithmeticError, AttributeError, LookupError,
            TypeError, struct.error) as error:  # fmt: skip
        raise CheckpointError(f"its .metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("its .metadata is not that of a checkpoint of torch's")
    return metadata


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST
