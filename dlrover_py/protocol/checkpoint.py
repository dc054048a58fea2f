"""What stands beside a checkpoint's bytes: dataclasses and JSON, for a script reads it too.

A *slot* holds what one worker has staged of one step; its :class:`Summary` stands on its first page
and its :class:`Layout` behind its bytes (:mod:`dlrover_py.arena`). What a reader cannot believe it
takes for absent: each document is checked by the XXH3 that stands beside it. That is no signature:
what has the right one is still read as if anybody had written it, and is a ValueError or good.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import cache
from itertools import chain
from math import isfinite, prod
from types import UnionType
from typing import Any, Self, get_args, get_origin

import xxhash

FORMAT = 1
ALIGN = 64
"""Of each tensor in a slot, in bytes: what torch's allocator gives, and a vector unit likes."""
PAGE = 4096
MOST = 1 << 53
"""The largest step, round or rank: that of ``protocol.agents.Count``."""
DIGEST = 32
"""A digest has so many characters at most."""
LARGEST = 1 << 62
"""No file has more bytes, and no tensor more of anything."""
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


# --- reading ---

_ODD = (AttributeError, IndexError, KeyError, OverflowError, TypeError)
"""What taking apart a document of another form raises, beside ValueError."""


def _json(document: bytes) -> Any:
    """Read it, or raise ValueError."""
    try:
        return json.loads(document)
    except RecursionError as error:
        raise ValueError("it is nested without end") from error


@cache
def _types(kind: Any) -> dict[str, tuple[type, ...]]:
    """What the values of a dataclass may be, by field; their elements are not looked at."""
    found: dict[str, tuple[type, ...]] = {}
    for field in fields(kind):
        options = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        plain = tuple(get_origin(option) or option for option in options)
        found[field.name] = (*plain, int) if float in plain else plain
    return found


def _made(kind: Any, values: dict[str, Any]) -> Any:
    """Make a dataclass; fields that are not known are left out. ValueError: one does not fit."""
    types = _types(kind)
    known = {name: value for name, value in values.items() if name in types}
    for name, value in known.items():
        if not isinstance(value, types[name]):
            raise ValueError(f"its {name} is a {type(value).__name__}")
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(f"not a whole {kind.__name__.lower()}: {error}") from error


def _counts(*values: Any) -> None:
    """See that all are numbers of bytes, ranks or the like."""
    for value in values:
        if type(value) is not int or not 0 <= value < LARGEST:
            shown = value if isinstance(value, float | str) else type(value).__name__
            raise ValueError(f"found {str(shown)[:60]}: expected a number of at least 0")


def _numbers(*values: Any) -> None:
    """The same for steps, rounds and ranks, which stand in reports too."""
    _counts(*values)
    _counts(*(MOST - value for value in values))


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


def _piece(key: Any, dtype: Any, shape: Any, whole: Any, at: Any) -> Piece:
    """What stands in a table. ValueError: it is no piece."""
    if not isinstance(key, str) or dtype not in ITEM_BYTES:
        raise ValueError("a row of it is no tensor's")
    _counts(*shape, *whole, *at)
    piece = Piece(key, dtype, tuple(shape), tuple(whole), tuple(at))
    _counts(piece.nbytes)
    return piece


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
        try:
            return cls(_piece(*row) for row in _json(document))
        except (*_ODD, ValueError) as error:
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


Id = tuple[int, int, int]
"""Of a set: step, round, lap."""
Age = tuple[int, int, int]
"""Round, lap, step of one: what is greater was staged later."""


def age_of(one: Id) -> Age:
    """The same, sorted as it was staged; a script that went back has staged a lower step later."""
    step, round_, lap = one
    return round_, lap, step


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
    copy: bool = False
    """It is the one that peers are to copy: all nodes the same one, for only together they are a
    checkpoint. A writer spares it until a newer one has been copied everywhere."""
    copied: bool = False
    """Its peer has it."""
    metric: float | None = None
    """What ``save()`` was told of the step's worth: retention may keep the best."""
    format: int = FORMAT

    @property
    def id(self) -> Id:
        """Which set it is a part of."""
        return self.step, self.round, self.lap

    @property
    def age(self) -> Age:
        """Of that set."""
        return age_of(self.id)

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, document: bytes) -> Self:
        """Read it.

        Raises:
            ValueError: a writer of another version.
        """
        values = _json(document)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("this slot was written by another version of dlrover-py")
        for name in ("table", "digests", "objects"):
            region = values.get(name)
            values[name] = _made(Region, region if isinstance(region, dict) else {})
        found: Self = _made(cls, values)
        _numbers(found.step, found.round, found.lap, found.world, found.rank)
        _counts(found.size, found.private_at)
        for part in (found.table, found.digests, found.objects):
            _counts(part.at, part.nbytes, found.size - part.at - part.nbytes)
        if found.rank >= found.world or len(found.part) > DIGEST:
            raise ValueError(f"it is of rank {found.rank} in a world of {found.world}")
        return found


def encode_objects(objects: Sequence[tuple[str, bytes]]) -> bytes:
    """Small values of any kind, each encoded already, with an index before them."""
    index = json.dumps([[key, len(value)] for key, value in objects]).encode()
    return b"".join(chain((len(index).to_bytes(8, "little"), index), (v for _, v in objects)))


def decode_objects(region: bytes) -> dict[str, bytes]:
    """Take them apart again.

    Raises:
        ValueError: a writer of another version.
    """
    start = 8 + int.from_bytes(region[:8], "little")
    found: dict[str, bytes] = {}
    try:
        for key, length in _json(region[8:start]):
            _counts(length, len(region) - start - length)
            found[str(key)] = region[start : start + length]
            start += length
    except (*_ODD, ValueError) as error:
        raise ValueError("these objects were written by another version of dlrover-py") from error
    return found


# --- in storage ---


@dataclass(frozen=True, slots=True)
class Written:
    """Where a piece is, in the files of a checkpoint."""

    piece: Piece
    file: str
    """Its name in the checkpoint's folder."""
    position: int
    """Of the raw bytes in it: contiguous, little-endian, as many as the piece has."""
    xxh3: int
    """Of the raw bytes: the one that the slot had."""

    @property
    def nbytes(self) -> int:
        """Of the piece."""
        return self.piece.nbytes


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """Where an object is; its bytes are those that the slot had (``torch.save``)."""

    key: str
    file: str
    position: int
    nbytes: int
    xxh3: int

    @property
    def private(self) -> bool:
        """Whether it belongs to one rank alone."""
        return is_private(self.key)


_SEALED = re.compile(rb'\{"xxh3": "([0-9a-f]{16})", "manifest": ')


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint exists in storage once this does, beside its folder: ``<folder>.json``."""

    step: int
    attempt: str
    job: str
    round: int
    lap: int
    world: int
    folder: str
    """Its name in the directory of the checkpoints: ``step-<n>.<attempt>``."""
    at: float
    """When it was committed, in seconds of the epoch by the committer's clock: for people."""
    number: int = 0
    """Grows with each commit in the directory: what is newer is told by it, not by clocks."""
    term: int = 0
    """In which the master granted it; 0 where there is no master."""
    pieces: tuple[Written, ...] = ()
    """All of them, private ones too; each box once."""
    objects: tuple[WrittenObject, ...] = ()
    metric: float | None = None
    notes: tuple[str, ...] = ()
    """What was odd: copies that were not equal."""
    void: str = ""
    """A tombstone: nothing is here nor will be, and why."""
    index: int = 0
    """XXH3 of ``.metadata``, by which torch reads it; 0: not known."""
    sums: tuple[tuple[int, int], ...] = ()
    """Bytes and XXH3 of each of `files` as a whole; empty: not known. Torch reads what stands
    around the tensors too."""
    format: int = FORMAT

    @property
    def nbytes(self) -> int:
        """Of tensors and objects."""
        return sum(w.nbytes for w in self.pieces) + sum(o.nbytes for o in self.objects)

    @property
    def files(self) -> list[str]:
        """Names of the files that hold the bytes."""
        return sorted({w.file for w in self.pieces} | {o.file for o in self.objects})

    def encode(self) -> bytes:
        """As JSON, with a digest of itself."""
        files = self.files
        number = {name: index for index, name in enumerate(files)}
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["files"] = files
        values["pieces"] = [
            [p.key, p.dtype, p.shape, p.whole, p.at, number[w.file], w.position, w.xxh3]
            for w in self.pieces
            for p in (w.piece,)
        ]
        values["objects"] = [
            [o.key, number[o.file], o.position, o.nbytes, o.xxh3] for o in self.objects
        ]
        body = json.dumps(values, separators=(",", ":")).encode()
        return b'{"xxh3": "%016x", "manifest": %s}\n' % (xxhash.xxh3_64_intdigest(body), body)

    @classmethod
    def decode(cls, document: bytes) -> Self:
        """Read it.

        Raises:
            ValueError: it is torn or damaged, or of another version; says which.
        """
        head, body = _SEALED.match(document), document.rstrip()[:-1]
        if head is None or document.rstrip()[-1:] != b"}":
            raise ValueError(f"{len(document)} bytes that are no whole manifest")
        body = body[head.end() :]
        if xxhash.xxh3_64_intdigest(body) != int(head[1], 16):
            raise ValueError("its bytes are not those that were written")
        values = _json(body)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            found = values.get("format") if isinstance(values, dict) else None
            shown = found if isinstance(found, int | str) else type(found).__name__
            raise ValueError(f"its format is {str(shown)[:60]}: expected {FORMAT}")
        try:
            files = values.pop("files")
            values["pieces"] = tuple(
                Written(_piece(*piece), files[f], position, xxh3)
                for *piece, f, position, xxh3 in values["pieces"]
            )
            values["objects"] = tuple(
                WrittenObject(key, files[f], position, nbytes, xxh3)
                for key, f, position, nbytes, xxh3 in values["objects"]
            )
            values["sums"] = tuple((nbytes, xxh3) for nbytes, xxh3 in values.get("sums", ()))
            values["notes"] = tuple(map(str, values["notes"]))
        except _ODD as error:
            raise ValueError(f"it is not understood: {type(error).__name__} {error}") from error
        made: Self = _made(cls, values)
        everything: list[Written | WrittenObject] = [*made.pieces, *made.objects]
        for where in everything:
            _counts(where.position, where.nbytes)
            if not isinstance(where.file, str) or type(where.xxh3) is not int:
                raise ValueError(f"it has a {type(where.file).__name__} in the place of a file")
        for nbytes, xxh3 in made.sums:
            _counts(nbytes)
            if type(xxh3) is not int:
                raise ValueError(f"it has a {type(xxh3).__name__} in the place of a file's digest")
        if made.sums and len(made.sums) != len(made.files):
            raise ValueError(
                f"it has digests of {len(made.sums)} files and {len(made.files)} files"
            )
        if not all(isinstance(o.key, str) for o in made.objects):
            raise ValueError("it has an object without a name")
        return made


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay; those that one rule keeps stay, the newest always."""

    newest: int = 3
    every: int = 0
    """Each whose step is a multiple of it; 0: none for that."""
    best: int = 0
    """So many, by the metric."""
    highest: bool = False
    """The best has the highest metric (an accuracy), not the lowest (a loss)."""

    @classmethod
    def of(cls, rules: Mapping[str, int | None]) -> Self:
        """As a job's ``checkpoint.keep`` says it, with defaults for what it does not."""
        told = {name: value for name, value in rules.items() if value is not None}
        newest, highest = told.get("last", cls().newest), bool(told.get("highest"))
        return cls(newest, told.get("every", 0), told.get("best", 0), highest)

    @property
    def rules(self) -> dict[str, int]:
        """The same, in a job's words."""
        words = {"last": self.newest, "every": self.every, "best": self.best}
        return words | {"highest": int(self.highest)}


@dataclass(frozen=True, slots=True)
class Owner:
    """Who writes into a directory: a job, by one process at a time."""

    job: str
    """The job's uid."""
    name: str = ""
    """What people call it."""


# --- a persister's standard input and output: one JSON document a line ---


class Phase(StrEnum):
    """How far an order is; the values are those of ``protocol.agents.PersistPhase``."""

    WRITING = "writing"
    READY = "ready"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Order:
    """Write a checkpoint to storage. A newer order calls the older one off."""

    attempt: str
    step: int
    round: int
    lap: int
    world: int
    ranks: tuple[int, ...]
    """Whose slots this node writes."""
    arena: str
    """Folder of the slots."""
    dir: str
    """Where checkpoints go: a path or an fsspec address."""
    job: str
    """The job's uid, as slots say it."""
    node: str
    """This node's id, as ``writers`` has it."""
    writers: tuple[str, ...] = ()
    """To the coordinator alone: the ids of all nodes that write, itself among them."""
    grant: int | None = None
    """The coordinator may commit, in this term; None: it answers ``ready`` and waits for a grant.
    Where there is no master: 0."""
    keep: Keep = Keep()
    spare: tuple[str, ...] = ()
    """Folders that retention leaves alone: the one that was loaded."""
    deadline_s: float = 600.0
    """Nothing has gone on for so long, not a chunk was written: a failure. How long all of it takes
    is another matter: a large state on a slow store takes hours."""
    name: str = ""
    """What people call the job."""

    def encode(self) -> bytes:
        """A line."""
        return _line("order", asdict(self))


@dataclass(frozen=True, slots=True)
class Grant:
    """The coordinator of an attempt may commit."""

    attempt: str
    term: int

    def encode(self) -> bytes:
        """A line."""
        return _line("grant", asdict(self))


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give an attempt up; it is answered with ``failed``, unless it has been answered."""

    attempt: str

    def encode(self) -> bytes:
        """A line."""
        return _line("cancel", asdict(self))


@dataclass(frozen=True, slots=True)
class Answer:
    """How far an order is. ``done`` and ``failed`` are the last that is said of an attempt."""

    attempt: str
    phase: Phase
    why: str = ""
    """What is wrong, in words, if it failed."""
    stored: tuple[int, int, int, str, float, int] | None = None
    """Of the coordinator that is done: step, round, lap, path or address of the folder, when
    (epoch s), and the number of the commit."""
    notes: tuple[str, ...] = ()
    """What was odd, and no failure."""
    seconds: float = 0.0
    """Since the order arrived."""
    nbytes: int = 0
    """That this node has written."""

    def encode(self) -> bytes:
        """A line."""
        return _line("answer", asdict(self))


def _line(kind: str, values: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"


_LINES: dict[str, type[Order | Grant | Cancel | Answer]] = {
    "order": Order,
    "grant": Grant,
    "cancel": Cancel,
    "answer": Answer,
}


def read_line(line: bytes) -> Order | Grant | Cancel | Answer:
    """What a line says; fields that are not known are left out.

    Raises:
        ValueError: it is none of these documents.
    """
    values = _json(line)
    kind = _LINES.get(str(values.pop("kind", ""))) if isinstance(values, dict) else None
    if kind is None:
        raise ValueError(f"expected one of {', '.join(_LINES)}, found {line[:100]!r}")
    try:
        for name in ("ranks", "writers", "spare", "notes", "stored"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        if "keep" in values:
            values["keep"] = _made(Keep, values["keep"])
        if "phase" in values:
            values["phase"] = Phase(values["phase"])
        made: Order | Grant | Cancel | Answer = _made(kind, values)
        if isinstance(made, Answer) and made.stored is not None:
            step, round_, lap, where, at, number = made.stored
            _numbers(step, round_, lap, number)
            if not isinstance(where, str) or not isfinite(at):
                raise ValueError(f"it has stored step {step} in a {type(where).__name__}, at {at}")
    except _ODD as error:
        raise ValueError(f"not a {kind.__name__.lower()}: {error}") from error
    return made
