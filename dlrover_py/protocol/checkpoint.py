"""What stands beside a checkpoint's bytes: dataclasses and JSON, for a script reads it too.

A *slot* holds what one worker has staged of one step; its :class:`Summary` stands on its first page
and its :class:`Layout` behind its bytes (:mod:`dlrover_py.arena`). What a reader cannot believe it
takes for absent: each document is checked by the XXH3 that stands beside it.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from math import prod
from typing import Any, Self

FORMAT = 1
ALIGN = 64
"""Of each tensor in a slot, in bytes: what torch's allocator gives, and a vector unit likes."""
PAGE = 4096
PRIVATE = "rank"
"""First part of the keys that belong to one rank alone: ``rank/3/rng``."""

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
    "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""torch's types, by name; those without a fixed size (quantised, 4 bits) are not staged."""


def private_key(rank: int, key: str) -> str:
    """The key of what belongs to one rank alone."""
    return f"{PRIVATE}/{rank}/{key}"


def is_private(key: str) -> bool:
    """Whether the key belongs to one rank alone."""
    return key.startswith(f"{PRIVATE}/")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: all of it, or the shard that one rank has."""

    key: str
    """Name in the flat state, as torch.distributed.checkpoint has it: ``model.fc.weight``."""
    dtype: str
    """As torch prints it, without ``torch.``."""
    shape: tuple[int, ...]
    """Of the box."""
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    at: tuple[int, ...]
    """Where the box begins in it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box, contiguous."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def private(self) -> bool:
        """Whether it belongs to one rank alone."""
        return is_private(self.key)

    @property
    def box(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """What makes two pieces copies of one another."""
        return self.key, self.at, self.shape


class Layout:
    """The pieces of a slot and where each begins: private ones behind those others may hold."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self.pieces = sorted(pieces, key=lambda piece: piece.private)  # stable
        self.positions: list[int] = []
        self.private_at = end = PAGE
        for piece in self.pieces:
            if not piece.private:
                self.private_at = -(-(end + piece.nbytes) // ALIGN) * ALIGN
            self.positions.append(end)
            end = -(-(end + piece.nbytes) // ALIGN) * ALIGN
        self.end = end
        """Where the bytes end: a slot is larger, by its tables and objects."""

    def __iter__(self) -> Iterator[tuple[Piece, int]]:
        return zip(self.pieces, self.positions, strict=True)

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self) -> bytes:
        """As JSON."""
        rows = [[p.key, p.dtype, p.shape, p.whole, p.at] for p in self.pieces]
        return json.dumps(rows, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, document: bytes) -> Self:
        """Read it; its digest was right, so that it is what a writer meant.

        Raises:
            ValueError: a writer of another version.
        """
        rows = json.loads(document)
        try:
            return cls(Piece(k, d, tuple(s), tuple(w), tuple(a)) for k, d, s, w, a in rows)
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError("this layout was written by another version of dlrover-py") from error

    def part(self, objects: Iterable[str]) -> bytes:
        """What ranks that hold copies of the same have in common, and no other does.

        Args:
            objects: keys of the objects beside the pieces.
        """
        boxes = sorted(
            (p.key, p.dtype, p.whole, p.at, p.shape) for p in self.pieces if not p.private
        )
        return json.dumps([boxes, sorted(k for k in objects if not is_private(k))]).encode()


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a slot that is no tensor."""

    at: int
    nbytes: int
    xxh3: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The first page of a slot that is whole."""

    job: str
    """The job's uid."""
    step: int
    round: int
    """In which it was staged: sets of two rounds are never mixed."""
    lap: int
    """Grows with each ``load()`` of the round: a script may go back, and reach the step again."""
    world: int
    rank: int
    part: str
    """Digest of :meth:`Layout.part`: ranks with the same hold copies of the same."""
    fill: str
    """Random, drawn for each filling: a reader without a lock finds by it that it was overtaken."""
    size: int
    """Of the file, all in all: bytes."""
    private_at: int
    """What is before it, but for this page, other ranks of the same part hold too."""
    table: Region
    """The layout."""
    digests: Region
    """XXH3 of each piece, 8 bytes little-endian each, in the layout's order."""
    objects: Region
    persist: bool = False
    """It is to go to storage, and has not: a writer spares it while no newer one is."""
    hollow: bool = False
    """A replica without the bytes before ``private_at``."""
    format: int = FORMAT

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, document: bytes) -> Self:
        """Read it.

        Raises:
            ValueError: a writer of another version.
        """
        values = json.loads(document)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("this slot was written by another version of dlrover-py")
        known = {field.name for field in fields(cls)}
        for name in ("table", "digests", "objects"):
            values[name] = Region(**values[name])
        return cls(**{key: value for key, value in values.items() if key in known})


def encode_objects(objects: Sequence[tuple[str, bytes]]) -> bytes:
    """Small values of any kind, each encoded already, with an index before them."""
    index = json.dumps([[key, len(value)] for key, value in objects]).encode()
    return b"".join(chain((len(index).to_bytes(8, "little"), index), (v for _, v in objects)))


def decode_objects(region: bytes) -> dict[str, bytes]:
    """Take them apart again; the region's digest was right."""
    start = 8 + int.from_bytes(region[:8], "little")
    found: dict[str, bytes] = {}
    rows: list[tuple[str, Any]] = json.loads(region[8:start])
    for key, length in rows:
        found[key] = region[start : start + length]
        start += length
    return found
