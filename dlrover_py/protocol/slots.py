"""The contents of a slot in shared memory: tensor chunks, objects, and the header.

A *slot* holds the snapshot that one worker has staged of one step. Its :class:`SlotHeader` is on
the first page of the slot, and its :class:`Layout` follows the tensors
(:mod:`dlrover_py.checkpoint.shm`). Each document is checked by the XXH3 beside it, and a reader
treats a damaged document as absent. A hash is not a signature: a document with the right hash may
come from any writer. Its contents are therefore validated, and an invalid document raises
ValueError.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Annotated, Final, NamedTuple, Self

from pydantic import AfterValidator, Field, TypeAdapter

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.documents import (
    FORMAT_NUMBER,
    LARGEST,
    NUMBER,
    Digest,
    Number,
    Size,
    Text,
    encoded,
    read,
    read_with_text,
    up_to,
)
from dlrover_py.protocol.names import Round, Step, Timeline

FORMAT: Final = 1
"""Version of the documents in this module."""
ALIGN = 64
"""Alignment of each tensor in a slot in bytes, as in torch's allocator, for vector units."""
PAGE = 4096
"""Size in bytes of the first page of a slot, which holds its header."""
DIGEST = 32
"""Largest number of characters of the digest of a shard group."""
PRIVATE = "rank"
"""First part of the keys that are private to one rank, such as ``rank/3/rng``."""

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
    "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes per element of torch's data types, by name.

Types without a fixed size (quantized, 4 bits) are not staged.
"""


def private_key(rank: int, key: str) -> str:
    """Return the key of a value that is private to one rank."""
    return f"{PRIVATE}/{rank}/{key}"


def is_private(key: str) -> bool:
    """Return whether a key belongs to a value that is private to one rank."""
    return key.startswith(f"{PRIVATE}/")


class TensorChunk(NamedTuple):
    """A chunk of a tensor: the complete tensor, or the shard that one rank has."""

    key: Text
    """Name in the flat state, as in torch.distributed.checkpoint, such as ``model.fc.weight``."""
    dtype: str
    """Data type as torch prints it, without ``torch.``."""
    shape: tuple[Size, ...]
    """Shape of the chunk."""
    whole: tuple[Size, ...]
    """Global shape of the tensor."""
    at: tuple[Size, ...]
    """Offsets of the chunk in the tensor, one for each dimension."""

    @property
    def nbytes(self) -> int:
        """Size of the contiguous chunk in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def private(self) -> bool:
        """Whether the chunk is private to one rank."""
        return is_private(self.key)

    @property
    def box(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Key, offsets and shape; chunks with equal values are copies of each other."""
        return self.key, self.at, self.shape


def _is_possible(chunk: TensorChunk) -> TensorChunk:
    """Return a chunk that torch can have.

    Raises:
        ValueError: the data type is unknown, the chunk is not inside of its tensor, or one of the
            two has `LARGEST` bytes or more.
    """
    _, dtype, shape, whole, at = chunk  # documents have 10,000s of chunks: attributes are slower
    item = ITEM_BYTES.get(dtype)
    if item is None:
        raise ValueError("expected a data type of torch")
    if not len(shape) == len(whole) == len(at):
        raise ValueError("expected as many dimensions of the chunk as of its tensor")
    if prod(whole) * item >= LARGEST or prod(shape) * item >= LARGEST:
        raise ValueError(f"expected less than {LARGEST} bytes")
    for length, offset, size in zip(whole, at, shape, strict=True):
        if offset + size > length:
            raise ValueError("expected a chunk inside of its tensor")
    return chunk


PossibleChunk = Annotated[TensorChunk, AfterValidator(_is_possible)]
"""A tensor chunk in a document that may come from any writer."""


class Layout:
    """The tensor chunks of a slot with their offsets; private chunks come last."""

    def __init__(self, chunks: Iterable[TensorChunk]) -> None:
        """Place the chunks one after the other, behind the first page."""
        self.chunks = sorted(chunks, key=lambda chunk: chunk.private)  # stable
        self.slot_offsets: list[int] = []
        """Offset of each chunk in the slot."""
        self.private_offset = end = PAGE
        for chunk in self.chunks:
            if not chunk.private:
                self.private_offset = -(-(end + chunk.nbytes) // ALIGN) * ALIGN
            self.slot_offsets.append(end)
            end = -(-(end + chunk.nbytes) // ALIGN) * ALIGN
        self.end = end
        """Offset at which the tensors end; the tables and objects of the slot follow."""

    def __iter__(self) -> Iterator[tuple[TensorChunk, int]]:
        return zip(self.chunks, self.slot_offsets, strict=True)

    def __len__(self) -> int:
        return len(self.chunks)

    def encode(self) -> bytes:
        """Return the layout as JSON."""
        return encoded(self.chunks)

    @classmethod
    def decode(cls, document: bytes) -> Self:
        """Return the layout in a JSON document whose digest was already compared.

        Raises:
            ValueError: the document is not valid.
        """
        try:
            chunks = read_with_text(_CHUNKS, document)
        except ValueError as error:
            raise ValueError(f"its layout is not valid: {error}") from error
        return cls(chunks)

    def part(self, objects: Iterable[str]) -> bytes:
        """Return a description of the shared contents; ranks of one shard group have equal ones.

        Ranks of a shard group hold copies of the same chunks. Ranks of different shard groups have
        different descriptions. Private chunks and objects, and the values, do not count.

        Args:
            objects: keys of the objects in the slot.
        """
        chunks = sorted(
            (p.key, p.dtype, p.whole, p.at, p.shape) for p in self.chunks if not p.private
        )
        return json.dumps([chunks, sorted(k for k in objects if not is_private(k))]).encode()


@dataclass(frozen=True, slots=True)
class SlotRegion:
    """A part of a slot that is not a tensor."""

    at: Size
    """Offset in the slot."""
    nbytes: Size
    """Size in bytes."""
    xxh3: Digest
    """XXH3 of its bytes."""


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The header on the first page of a complete slot."""

    job: str
    """Uid of the job."""
    step: Annotated[Step, NUMBER]
    """Step of the snapshot."""
    round: Annotated[Round, NUMBER]
    """Round in which the snapshot was staged; slots of two rounds never make one checkpoint."""
    timeline: Annotated[Timeline, NUMBER]
    """Number of the timeline: it grows with each ``load()`` of the round.

    After a load a script may go back and reach the same step again.
    """
    world: Number
    """World size of the round."""
    rank: Number
    """Rank of the worker in the round."""
    part: Annotated[str, Field(max_length=DIGEST)]
    """Shard group: the digest of :meth:`Layout.part`, equal for ranks with copies of the same."""
    write_id: str
    """Random value, new for each filling; by it, a lock-free reader detects an overwritten slot."""
    size: Size
    """Size in bytes of all contents of the slot."""
    private_offset: Size
    """Offset of the private data.

    The bytes between the first page and this offset are also held by other ranks of the shard
    group.
    """
    table: SlotRegion
    """The layout."""
    digests: SlotRegion
    """XXH3 of each chunk, 8 bytes little-endian each, in the order of the layout."""
    objects: SlotRegion
    """The encoded objects."""
    persist: bool = False
    """Whether the snapshot must still be stored.

    A worker does not overwrite the newest of its slots that have this mark.
    """
    private_only: bool = False
    """Whether the slot is a replica without the bytes before ``private_offset``."""
    copy: bool = False
    """Whether peers must copy this snapshot.

    It is the same snapshot on all nodes, because only all slots together make a checkpoint. A
    worker does not overwrite it until a newer one has been copied everywhere.
    """
    copied: bool = False
    """Whether the peer has a copy."""
    metric: float | None = None
    """Value of the step that ``save()`` was given; retention may keep the best checkpoints."""
    certified: bool = False
    """Whether all replicas had equal parameters at this step."""
    format: Annotated[int, FORMAT_NUMBER, up_to(FORMAT)] = FORMAT
    """Version of all documents in the slot; 1 if it is absent."""

    @property
    def id(self) -> CheckpointId:
        """Identity of the checkpoint that the slot belongs to."""
        return CheckpointId(round=self.round, timeline=self.timeline, step=self.step)

    def encode(self) -> bytes:
        """Return the header as JSON."""
        return encoded(self)

    @classmethod
    def decode(cls, document: bytes) -> "SlotHeader":
        """Return the header in a JSON document.

        Raises:
            NewerFormatError: the slot has a newer format.
            ValueError: the document is not valid.
        """
        return read(_HEADER, document)


def _fits(header: SlotHeader) -> SlotHeader:
    """Return a header whose parts fit together.

    Raises:
        ValueError: a table ends beyond the size of the slot, or the rank is not below the world
            size.
    """
    for part in (header.table, header.digests, header.objects):
        if part.at + part.nbytes > header.size:
            raise ValueError(f"{part.nbytes} bytes at {part.at} are beyond its {header.size}")
    if header.rank >= header.world:
        raise ValueError(f"it is of rank {header.rank} in a world of {header.world}")
    return header


ValidHeader = Annotated[SlotHeader, AfterValidator(_fits)]
"""A header in a document that may come from any writer."""
_HEADER: TypeAdapter[SlotHeader] = TypeAdapter(ValidHeader)
_CHUNKS = TypeAdapter(list[PossibleChunk])
_INDEX = TypeAdapter(list[tuple[Text, Size]])


def encode_objects(objects: Sequence[tuple[str, bytes]]) -> bytes:
    """Return one document of several encoded objects, which starts with an index.

    Args:
        objects: key and encoded value of each object.
    """
    index = json.dumps([[key, len(value)] for key, value in objects]).encode()
    return b"".join(chain((len(index).to_bytes(8, "little"), index), (v for _, v in objects)))


def decode_objects(region: bytes) -> dict[str, bytes]:
    """Return the encoded objects by key in a document of :func:`encode_objects`.

    Raises:
        ValueError: the document is not valid.
    """
    start = 8 + int.from_bytes(region[:8], "little")
    found: dict[str, bytes] = {}
    try:
        for key, length in read_with_text(_INDEX, region[8:start]):
            if start + length > len(region):
                raise ValueError(f"it ends at {len(region)}, inside of {key!a}")
            found[key] = region[start : start + length]
            start += length
    except ValueError as error:
        raise ValueError(f"its objects are not valid: {error}") from error
    return found
