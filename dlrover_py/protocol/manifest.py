"""The manifest of a checkpoint in storage.

Its contents are validated when it is read, and an invalid document raises ValueError.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import xxhash
from pydantic import AfterValidator, Field, FiniteFloat, Strict, TypeAdapter

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.documents import (
    FORMAT_NUMBER,
    NUMBER,
    Digest,
    Number,
    Size,
    Text,
    encoded,
    read_with_text,
    up_to,
)
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import PossibleChunk, is_private

FORMAT: Final = 1
"""Version of the manifest."""
TABLES_KEY: Final = "ps/cut"
"""Key of the document that a checkpoint of a parameter server has, and no other one."""


def _is_no_folder(name: str) -> str:
    """Return a name; raise ValueError for the two names that each folder has."""
    if name in (".", ".."):
        raise ValueError("expected a plain name")
    return name


FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,255}$"), AfterValidator(_is_no_folder)]
"""Permitted name of a file of a checkpoint."""


class WrittenChunk(NamedTuple):
    """The location of a tensor chunk in the files of a checkpoint."""

    chunk: PossibleChunk
    """The chunk."""
    file: FileName
    """Name of the file in the folder of the checkpoint."""
    position: Size
    """Offset of the raw bytes in the file; they are contiguous and little-endian."""
    xxh3: Digest
    """XXH3 of the raw bytes, equal to that in the slot."""

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes."""
        return self.chunk.nbytes


class WrittenObject(NamedTuple):
    """The location of an object in the files of a checkpoint.

    Its bytes are those in the slot, as ``torch.save`` made them.
    """

    key: Text
    """Key of the object in the state."""
    file: FileName
    """Name of the file in the folder of the checkpoint."""
    position: Size
    """Offset of the object in the file."""
    nbytes: Size
    """Size of the object in bytes."""
    xxh3: Digest
    """XXH3 of the object."""

    @property
    def private(self) -> bool:
        """Whether the object is private to one rank."""
        return is_private(self.key)


_SEALED = re.compile(rb'\{"xxh3": "([0-9a-f]{16})", "manifest": ')


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a checkpoint, in the file ``<folder>.json`` beside its folder.

    A checkpoint exists in storage once its manifest exists.
    """

    step: Annotated[Step, NUMBER]
    """Step of the checkpoint."""
    attempt: Text
    """Id of the attempt that wrote the checkpoint."""
    job: Text
    """Uid of the job."""
    round: Annotated[Round, NUMBER]
    """Round in which the snapshot was staged."""
    timeline: Annotated[Timeline, NUMBER]
    """Number of the timeline in the round."""
    world: Number
    """World size of the round."""
    folder: Text
    """Name of the folder in the directory of the checkpoints: ``step-<n>.<attempt>``."""
    at: Annotated[FiniteFloat, Strict()]
    """Time of the commit in seconds since the epoch by the committer's clock, for people only."""
    number: Number = 0
    """Number of the commit; it grows with each commit in the directory.

    The number, not a clock, decides which of two checkpoints is newer.
    """
    term: Number = 0
    """Term in which the master granted the commit; 0 where there is no master."""
    chunks: tuple[WrittenChunk, ...] = ()
    """All chunks, including private ones; each chunk occurs once."""
    objects: tuple[WrittenObject, ...] = ()
    """All objects, including private ones; each object occurs once."""
    metric: Annotated[float, Strict()] | None = None
    """Value of the step that ``save()`` was given."""
    certified: bool = False
    """Whether all replicas had equal parameters at this step; False also if nobody has looked."""
    notes: tuple[Text, ...] = ()
    """Remarks for people, such as copies with different values."""
    void: Text = ""
    """The reason if this is a tombstone: the checkpoint does not exist and never will."""
    index: Digest = 0
    """XXH3 of ``.metadata``, the index from which torch reads the checkpoint; 0: not known."""
    sums: tuple[tuple[Size, Digest], ...] = ()
    """Size in bytes and XXH3 of each complete file in `files`; empty: not known.

    Torch also reads the bytes around the tensors.
    """
    format: Annotated[int, FORMAT_NUMBER, up_to(FORMAT)] = FORMAT
    """Version of the manifest; 1 if it is absent."""

    @property
    def id(self) -> CheckpointId:
        """Identity of the checkpoint."""
        return CheckpointId(round=self.round, timeline=self.timeline, step=self.step)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and objects."""
        return sum(w.nbytes for w in self.chunks) + sum(o.nbytes for o in self.objects)

    @property
    def has_tables(self) -> bool:
        """Whether it holds the tables of a parameter server, which torch cannot load by itself."""
        return any(written.chunk.key == TABLES_KEY for written in self.chunks)

    @property
    def files(self) -> list[str]:
        """Sorted names of the files that hold the tensors and objects."""
        return sorted({w.file for w in self.chunks} | {o.file for o in self.objects})

    def encode(self) -> bytes:
        """Return the manifest as JSON, with its own XXH3."""
        body = encoded(self)
        return b'{"xxh3": "%016x", "manifest": %s}\n' % (xxhash.xxh3_64_intdigest(body), body)

    @classmethod
    def decode(cls, document: bytes) -> "Manifest":
        """Return the manifest in a JSON document.

        A tombstone (:attr:`void`) is returned like any other.

        Raises:
            NewerFormatError: the manifest has a newer format.
            ValueError: the document is incomplete, damaged or invalid; the message says which.
        """
        head, body = _SEALED.match(document), document.rstrip()[:-1]
        if head is None or document.rstrip()[-1:] != b"}":
            raise ValueError(f"{len(document)} bytes that are not a complete manifest")
        body = body[head.end() :]
        if xxhash.xxh3_64_intdigest(body) != int(head[1], 16):
            raise ValueError("its bytes are not those that were written")
        made = read_with_text(_MANIFEST, body)
        if made.sums and len(made.sums) != len(made.files):
            raise ValueError(
                f"it has digests of {len(made.sums)} files and {len(made.files)} files"
            )
        return made


_MANIFEST = TypeAdapter(Manifest)
