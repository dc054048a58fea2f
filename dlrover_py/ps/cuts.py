"""Cuts: all tables of a job as one checkpoint, in the directory and the form of flash checkpoints.

Each server writes one file with the rows of the buckets that it leads. The coordinator then writes
``ps.cut``, which says what the arrays mean, and last the manifest. A cut without a manifest does
not exist. Each array has a digest, which is compared when the array is read.
"""

import logging
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from dlrover_py.checkpoint.directory import (
    BLOCK_BYTES,
    PARTS_FOLDER,
    CheckpointDirectory,
    DirectoryOwner,
    folder_of,
    open_backend,
)
from dlrover_py.protocol.errors import CheckpointError, ConfigError
from dlrover_py.protocol.manifest import TABLES_KEY, Manifest, WrittenChunk
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.persister import KeepRules
from dlrover_py.protocol.slots import TensorChunk
from dlrover_py.ps.cluster_map import ClusterMap, CutPlace
from dlrover_py.ps.messages import CutPart, SavedArray, SavedBucket
from dlrover_py.ps.specs import TableSpec, check_table
from dlrover_py.ps.store import Payload

FORMAT: Final = 1
"""Version of ``ps.cut``."""
DOCUMENT = "ps.cut"
"""Name of the file that says what the arrays mean."""
MAX_DOCUMENT_BYTES = 1 << 30
"""Bytes of the largest such file. It has a few bytes for each worker and bucket."""
_LOG = logging.getLogger(__name__)
_ARRAYS = ("ids", "weight", "steps")
"""Names of the first arrays of a record; the optimizer's follow as ``slot0``, ``slot1``."""


class CutDocument(msgspec.Struct, frozen=True):
    """What the arrays of a cut mean."""

    format: int
    epoch: int
    """Epoch of the map when the cut was made."""
    tables: tuple[TableSpec, ...]
    clients: dict[str, int]
    """Newest incarnation of each worker."""
    pushes: tuple[dict[str, tuple[int, int]], ...]
    """For each bucket, the last push of each worker: incarnation and sequence number."""
    rows: dict[str, tuple[int, ...]]
    """Number of rows in each bucket, by table."""

    def check(self) -> None:
        """Check that the parts fit together. The file may be another program's.

        Raises:
            ConfigError: They do not.
        """
        for spec in self.tables:
            check_table(spec)
        buckets, names = len(self.pushes), {spec.name for spec in self.tables}
        if not buckets or len(self.tables) != len(names) or names != self.rows.keys():
            raise ConfigError("expected some buckets, and rows of each table")
        for name, rows in self.rows.items():
            if len(rows) != buckets or min(rows) < 0:
                raise ConfigError(f"table {name}: expected the rows of {buckets} buckets")


def array_name(table: str, array: int) -> str:
    """Return the key of an array in the manifest, such as ``user/weight``."""
    name = _ARRAYS[array] if array < len(_ARRAYS) else f"slot{array - len(_ARRAYS)}"
    return f"{table}/{name}"


def _forms(spec: TableSpec) -> list[tuple[str, str, int]]:
    """Return the name in torch, the type in numpy and the columns (0: a vector) of each array."""
    widths = [spec.dim, 0, *spec.optimizer.slots(spec.dim)]
    return [
        ("int64", "<i8", 0),
        *(("float32", "<f4", width) if width else ("int64", "<i8", 0) for width in widths),
    ]


# --- Writing ---


class CutFile:
    """The file of one server in a cut. It is written by one thread."""

    def __init__(self, place: CutPlace, server: str) -> None:
        """Create the file.

        Args:
            place: The cut.
            server: Id of the server.

        Raises:
            OSError: The file cannot be created.
        """
        self.name = f"ps-{server}-{secrets.token_hex(4)}.rows"
        self._backend, self._folder = open_backend(place.url), place.folder
        self._sink = self._backend.sink(f"{place.folder}/{self.name}")
        self._position = 0
        self.buckets: list[SavedBucket] = []

    def add(self, bucket: int, clients: dict[str, tuple[int, int]], payload: Payload) -> None:
        """Write a bucket.

        Args:
            bucket: The bucket.
            clients: The last push of each worker: incarnation and sequence number.
            payload: The records of all its rows.

        Raises:
            OSError: It cannot be written.
        """
        arrays = []
        for table, record in payload:
            for number, array in enumerate(record if len(record[0]) else []):
                data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data.cast("B")
                digest = xxhash.xxh3_64_intdigest(data)
                arrays.append(SavedArray(table, number, array.shape, self._position, digest))
                self._sink.write(data)
                self._position += len(data)
        self.buckets.append(SavedBucket(bucket, clients, tuple(arrays)))

    def finish(self) -> None:
        """Make sure that the file survives a power failure.

        Raises:
            OSError: It cannot be written.
        """
        self._sink.finish()
        self._backend.settle(self._folder)

    def abandon(self) -> None:
        """Close the file, which is incomplete."""
        self._sink.abandon()


class CutDirectory:
    """The directory of one job's cuts, as its coordinator has it."""

    def __init__(
        self,
        url: str,
        keep: KeepRules = KeepRules(),  # noqa: B008 - frozen
        *,
        owner: DirectoryOwner | None = None,
    ) -> None:
        """Name the directory.

        Args:
            url: Its path or address.
            keep: Which cuts stay.
            owner: The job, so that its next coordinator takes the directory over at once. None: an
                owner of which there is no other coordinator.

        Raises:
            ConfigError: The address is not valid, or a package for it is missing.
        """
        self.url = url
        self._keep = keep
        self._directory = CheckpointDirectory(url)
        self._owner = owner or DirectoryOwner(f"ps-{secrets.token_hex(8)}", "parameter server")

    def begin(self, step: int) -> CutPlace:
        """Make the folder of a new cut, and end the rights of all earlier unfinished ones.

        Raises:
            OSError: The directory cannot be written.
            ConfigError: Another job writes there.
        """
        attempt = secrets.token_hex(8)
        place = CutPlace(self.url, folder_of(step, attempt), step)
        self._directory.prepare()
        self._directory.acquire_lease(self._owner, attempt)
        self._directory.sweep(now=_wall())
        self._directory.place.make(f"{place.folder}/{PARTS_FOLDER}")
        return place

    def commit(
        self,
        place: CutPlace,
        known: ClusterMap,
        parts: Sequence[CutPart],
        world: int,
        needed: Collection[str] | None = (),
    ) -> None:
        """Make a cut exist, and remove older ones by the rules.

        Args:
            place: The cut.
            known: The map with its tables and workers.
            parts: What the servers have written. A bucket counts where it occurs first.
            world: Number of workers.
            needed: Cuts, by name, that stay whatever the rules say; None: all stay.

        Raises:
            OSError: The store fails. Nothing of the cut is used then.
            CheckpointError: What a server has written is not in this directory.
            SupersededError: Another program has taken the directory.
        """
        document, chunks = _assembled(known, parts)
        self._check_files(place, parts, chunks)
        data = msgspec.json.encode(document)
        file = self._directory.place.sink(f"{place.folder}/{DOCUMENT}")
        try:
            file.write(data)
            file.finish()
        finally:
            file.abandon()
        self._directory.place.settle(place.folder)
        whole = TensorChunk(TABLES_KEY, "uint8", (len(data),), (len(data),), (0,))
        chunks.append(WrittenChunk(whole, DOCUMENT, 0, xxhash.xxh3_64_intdigest(data)))
        self._directory.commit(
            Manifest(
                Step(place.step),
                place.folder.split(".")[1],
                self._owner.job,
                Round(0),
                Timeline(0),
                world,
                place.folder,
                _wall(),
                chunks=tuple(chunks),
            )
        )
        if needed is not None:
            places = {one.folder for one in (known.source, known.origin) if one is not None}
            try:
                self._directory.retain(self._keep, {*needed, *places})
            except OSError as error:  # this cut exists; the next one removes the older ones
                fields = {"dir": self.url, "error": str(error)}
                _LOG.warning("older cuts cannot be removed", extra={"fields": fields})

    def _check_files(
        self, place: CutPlace, parts: Sequence[CutPart], chunks: Sequence[WrittenChunk]
    ) -> None:
        """Check that each file is here and has all its bytes.

        Servers on other hosts may have written to folders of their own, of the same name.

        Raises:
            CheckpointError: A file is missing, or too short.
        """
        servers = {part.file: part.server for part in parts}
        ends: dict[str, int] = {}
        for one in chunks:
            ends[one.file] = max(ends.get(one.file, 0), one.position + one.nbytes)
        for file, end in ends.items():
            name = f"{place.folder}/{file}"
            try:
                self._directory.place.read_into(name, end - 1, memoryview(bytearray(1)))
            except OSError as error:
                raise CheckpointError(
                    f"{self.url}/{name}: server {servers[file]} has written {end} bytes, and here "
                    f"it cannot be read: {error.strerror or error}: expected a directory that all "
                    "hosts of the job share"
                ) from error

    def give_up(self) -> None:
        """Remove the files of cuts that cannot be finished.

        Raises:
            OSError: They cannot be removed. The next cut tries it again.
        """
        self._directory.sweep(now=_wall())

    def renew(self) -> None:
        """Say that this job still writes there.

        Raises:
            OSError: The store fails.
        """
        self._directory.renew_lease()

    def close(self) -> None:
        """Let others write there.

        Raises:
            OSError: The store fails.
        """
        self._directory.release()


def _wall() -> float:
    return time.time()  # noqa: TID251 - manifests have it for people


def _assembled(
    known: ClusterMap, parts: Sequence[CutPart]
) -> tuple[CutDocument, list[WrittenChunk]]:
    """Return the document, and the arrays of all buckets in the order of the buckets."""
    count = len(known.placements)
    found: dict[int, tuple[str, SavedBucket]] = {}
    for part in parts:
        for bucket in part.buckets:
            found.setdefault(bucket.bucket, (part.file, bucket))
    rows = {table.name: [0] * count for table in known.tables}
    for _, saved in found.values():
        for array in saved.arrays:
            rows[array.table][saved.bucket] = array.shape[0]
    chunks = []
    done = dict.fromkeys(rows, 0)
    specs = {table.name: table for table in known.tables}
    for number in range(count):
        file, saved = found[number]
        for array in saved.arrays:
            dtype, _, width = _forms(specs[array.table])[array.array]
            rest = (width,) if width else ()
            chunk = TensorChunk(
                array_name(array.table, array.array),
                dtype,
                array.shape,
                (sum(rows[array.table]), *rest),
                (done[array.table], *(0 for _ in rest)),
            )
            chunks.append(WrittenChunk(chunk, file, array.position, array.xxh3))
        for name, of in rows.items():
            done[name] += of[number]
    pushes = tuple(found[number][1].clients for number in range(count))
    sizes = {name: tuple(of) for name, of in rows.items()}
    document = CutDocument(FORMAT, known.epoch, known.tables, known.clients, pushes, sizes)
    return document, chunks


# --- Reading ---


@dataclass(frozen=True, slots=True)
class SavedCut:
    """A cut that exists. Its document was read; its rows are read bucket by bucket."""

    place: CutPlace
    document: CutDocument
    _directory: CheckpointDirectory
    _manifest: Manifest
    _chunks: Mapping[tuple[str, int], WrittenChunk]
    """The arrays, by key and first row."""

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.document.pushes)

    @classmethod
    def open(cls, url: str, which: str | None = None) -> "SavedCut | None":
        """Return a cut of a directory; None if it has none.

        Args:
            url: The directory.
            which: Step, or name of the folder. None: the newest cut.

        Raises:
            ConfigError: There is no such directory, or no such cut.
            CheckpointError: The cut is damaged, or the store does not answer.
        """
        directory = CheckpointDirectory(url)
        try:
            found = [one for one in directory.checkpoints() if one.has_tables]
        except OSError as error:
            raise CheckpointError(f"{url}: {error}") from error
        steps = ", ".join(str(one.step) for one in found) or "none"
        if which is not None:
            found = [one for one in found if which in (str(one.step), one.folder)]
        if directory.damaged and (which is None or not found):
            # The damaged one may be the newest: to go further back is the user's decision.
            raise CheckpointError(
                f"{directory.fault(max(directory.damaged))}; name the step of another cut, or "
                "remove this one"
            )
        if which is not None and not found:
            raise ConfigError(
                f"{url}: there is no cut {which!r} of a parameter server: expected one of the "
                f"steps {steps}"
            )
        if not found:
            return None
        manifest = found[0]
        chunks = {(one.chunk.key, sum(one.chunk.at[:1])): one for one in manifest.chunks}
        place = CutPlace(url, manifest.folder, manifest.step)
        whole, where = chunks.get((TABLES_KEY, 0)), f"{directory.where(manifest)}/{DOCUMENT}"
        if whole is None or whole.nbytes > MAX_DOCUMENT_BYTES:
            raise CheckpointError(f"{where}: expected at most {MAX_DOCUMENT_BYTES} bytes of it")
        data = _read(directory, manifest, whole)
        try:
            document = msgspec.json.decode(data, type=CutDocument)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{where}: {error}") from error
        if document.format > FORMAT:
            raise CheckpointError(
                f"{where} has format {document.format}, and this version of DLRover-Py reads "
                f"{FORMAT}: use a newer version"
            )
        try:
            document.check()
        except ConfigError as error:
            raise CheckpointError(f"{where}: {error}; name another cut") from error
        return cls(place, document, directory, manifest, chunks)

    def read(self, bucket: int) -> Payload:
        """Return the records of a bucket.

        Raises:
            CheckpointError: Bytes are missing, or differ from those that were written.
        """
        return [(spec.name, self.record(spec, bucket)) for spec in self.document.tables]

    def record(self, spec: TableSpec, bucket: int) -> list[Any]:
        """Return the record of one table in a bucket.

        Raises:
            CheckpointError: Bytes are missing, or differ from those that were written.
        """
        record = []
        for (_, dtype, width), written in zip(
            _forms(spec), self._written(spec, bucket), strict=True
        ):
            if written is None:
                record.append(np.zeros((0, width) if width else (0,), dtype))
                continue
            data = _read(self._directory, self._manifest, written)
            record.append(np.frombuffer(data, dtype).reshape(written.chunk.shape))
        return record

    def _written(self, spec: TableSpec, bucket: int) -> list[WrittenChunk | None]:
        """Return where each array of a table's record in a bucket is; None if it has no rows.

        Raises:
            CheckpointError: An array is missing, or has another form.
        """
        sizes = self.document.rows[spec.name]
        first, rows = sum(sizes[:bucket]), sizes[bucket]
        places: list[WrittenChunk | None] = []
        for number, (stored, _, width) in enumerate(_forms(spec)):
            if not rows:
                places.append(None)
                continue
            shape = (rows, width) if width else (rows,)
            key = array_name(spec.name, number)
            written = self._chunks.get((key, first))
            found = None if written is None else (written.chunk.dtype, written.chunk.shape)
            if written is None or found != (stored, shape):
                raise CheckpointError(
                    f"{self.where}: {key}: expected {rows} rows of bucket {bucket} of type "
                    f"{stored}, found {found or 'nothing'}"
                )
            places.append(written)
        return places

    def verify(self) -> None:
        """Read every byte, a part at a time: a bucket may be larger than the memory of a master.

        Raises:
            CheckpointError: Bytes are missing, or differ from those that were written.
        """
        for spec in self.document.tables:
            for bucket in range(self.buckets):
                for written in self._written(spec, bucket):
                    if written is not None:
                        _verify(self._directory, self._manifest, written)

    @property
    def where(self) -> str:
        """The path or address of the cut's folder."""
        return self._directory.where(self._manifest)


def _read(directory: CheckpointDirectory, manifest: Manifest, at: WrittenChunk) -> bytearray:
    data = bytearray()
    for part in _parts(directory, manifest, at):
        data += part
    return data


def _verify(directory: CheckpointDirectory, manifest: Manifest, at: WrittenChunk) -> None:
    for _ in _parts(directory, manifest, at):
        pass


def _parts(
    directory: CheckpointDirectory, manifest: Manifest, at: WrittenChunk
) -> Iterator[bytearray]:
    """Yield the bytes of an array in parts, and compare the digest of all in the end.

    Raises:
        CheckpointError: Bytes are missing, or differ from those that were written.
    """
    where = f"{directory.where(manifest)}{os.sep}{at.file}"
    digest = xxhash.xxh3_64()
    for done in range(0, at.nbytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, at.nbytes - done)
        try:
            part = directory.read_all(manifest, at.file, at.position + done, size)
        except OSError as error:
            raise CheckpointError(f"{where}: {at.chunk.key}: {error.strerror or error}") from error
        digest.update(part)
        yield part
    if digest.intdigest() != at.xxh3:
        raise CheckpointError(
            f"{where}: {at.chunk.key}: its {at.nbytes} bytes at offset {at.position} differ from "
            "those that were written; name another cut"
        )
