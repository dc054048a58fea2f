"""The documents by which the persisters of several nodes write one checkpoint together.

They are files in the subfolder ``parts`` of the checkpoint's folder, which is removed after the
commit. Each writer announces what its slots hold (:class:`NodeShares`), and the coordinator assigns
the work (:class:`WritePlan`). Each writer then says where its bytes are (:class:`WrittenFiles`), or
why it has failed (:class:`WriteFailure`).

Any process that may write to the folder may write these files, so they are validated when they are
read.
"""

from dataclasses import dataclass, field
from typing import Annotated, Final, NamedTuple

from pydantic import AfterValidator, Field, Strict

from dlrover_py.protocol.documents import (
    FORMAT_NUMBER,
    Digest,
    Document,
    Number,
    Size,
    Text,
    up_to,
)
from dlrover_py.protocol.manifest import FileName
from dlrover_py.protocol.names import MAX_COUNT
from dlrover_py.protocol.slots import PossibleChunk

FORMAT: Final = 1
"""Version of the documents in this module."""
_FORMAT = Annotated[int, FORMAT_NUMBER, up_to(FORMAT)]
RankKey = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A rank that is a key of an object in JSON, and therefore a text there."""


class SharedObject(NamedTuple):
    """An object in a slot."""

    key: Text
    """Key of the object in the state."""
    nbytes: Size
    """Size of the object in bytes."""
    xxh3: Digest
    """XXH3 of the object."""


@dataclass(frozen=True, slots=True)
class WriteShare:
    """The tensor chunks and objects that one slot can contribute to a checkpoint."""

    rank: Number
    """Rank of the worker that has filled the slot."""
    private_only: Annotated[bool, Strict()]
    """Whether the slot holds only data private to its rank."""
    metric: Annotated[float, Strict()] | None
    """Value of the step that ``save()`` was given."""
    chunks: tuple[PossibleChunk, ...]
    """The chunks, in the order of the slot."""
    digests: tuple[Digest, ...]
    """XXH3 of each chunk, in the order of ``chunks``."""
    objects: tuple[SharedObject, ...]
    """The objects."""
    certified: Annotated[bool, Strict()] = False
    """Whether all replicas had equal parameters at this step."""


def _has_a_digest_for_each_chunk(share: WriteShare) -> WriteShare:
    """Return a share with as many digests as chunks; raise ValueError for another one."""
    if len(share.digests) != len(share.chunks):
        raise ValueError(f"{len(share.digests)} digests of {len(share.chunks)} chunks")
    return share


ValidShare = Annotated[WriteShare, AfterValidator(_has_a_digest_for_each_chunk)]
"""A share in a document that may come from any writer."""


@dataclass(frozen=True, slots=True)
class NodeShares(Document):
    """The shares of a node: ``parts/<node>.layout.json``."""

    shares: tuple[ValidShare, ...]
    """One share for each slot that the node contributes."""
    format: _FORMAT = FORMAT
    """Version of the document; 1 if it is absent."""


@dataclass(slots=True)
class WritePlan(Document):
    """The assignment of chunks and objects to the nodes that write them: ``parts/plan.json``."""

    chunks: dict[Text, dict[RankKey, list[Number]]] = field(default_factory=dict)
    """Indices into the chunks of a share, by node and rank."""
    objects: dict[Text, dict[RankKey, list[Text]]] = field(default_factory=dict)
    """Keys of objects, by node and rank."""
    notes: list[Text] = field(default_factory=list)
    """Remarks for people, such as copies with different values."""
    format: _FORMAT = FORMAT
    """Version of the document; 1 if it is absent."""

    def part_of(self, node: str, share: WriteShare) -> tuple[list[int], list[str]]:
        """Return the indices of chunks and the keys of objects that a node writes of one share.

        Both are empty if the plan assigns nothing of this rank to the node.

        Raises:
            ValueError: the share does not have what the plan assigns.
        """
        chunks = self.chunks.get(node, {}).get(share.rank, [])
        objects = self.objects.get(node, {}).get(share.rank, [])
        beyond = [index for index in chunks if index >= len(share.chunks)]
        unknown = {*objects} - {known.key for known in share.objects}
        if beyond or unknown:
            what = f"object {min(unknown)!a}" if unknown else f"tensor {beyond[0]}"
            raise ValueError(
                f"the plan assigns {what} of rank {share.rank} to {node}, whose slot does not "
                "have it"
            )
        return chunks, objects


class StoredChunk(NamedTuple):
    """The location of a tensor chunk in the file of its rank."""

    rank: Number
    """Rank of the share."""
    chunk: Number
    """Index of the chunk in the share."""
    start: Size
    """Offset of its zip in the file."""
    length: Size
    """Size of its zip in bytes."""
    position: Size
    """Offset of its raw bytes in the file."""
    xxh3: Digest
    """XXH3 of its raw bytes."""


class StoredObject(NamedTuple):
    """The location of an object in the file of its rank."""

    rank: Number
    """Rank of the share."""
    key: Text
    """Key of the object in the state."""
    position: Size
    """Offset of the object in the file."""
    nbytes: Size
    """Size of the object in bytes."""
    xxh3: Digest
    """XXH3 of the object."""


class WrittenFile(NamedTuple):
    """A complete file."""

    name: FileName
    """Name of the file in the folder of the checkpoint."""
    nbytes: Size
    """Size of the file in bytes."""
    xxh3: Digest
    """XXH3 of the file."""


@dataclass(frozen=True, slots=True)
class WrittenFiles(Document):
    """The files that a node has written and synced: ``parts/<node>.done.json``."""

    chunks: tuple[StoredChunk, ...] = ()
    """The chunks in the files."""
    objects: tuple[StoredObject, ...] = ()
    """The objects in the files."""
    files: tuple[WrittenFile, ...] = ()
    """The files."""
    format: _FORMAT = FORMAT
    """Version of the document; 1 if it is absent."""


@dataclass(frozen=True, slots=True)
class WriteFailure(Document):
    """The reason why a node has failed: ``parts/<node>.failed.json``."""

    why: Text
    """The reason in words."""
    format: _FORMAT = FORMAT
    """Version of the document; 1 if it is absent."""
