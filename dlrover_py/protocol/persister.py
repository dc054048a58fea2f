"""The messages between a persister and the process that started it: one line of JSON each.

An agent or a worker sends requests to the standard input of its persister
(:mod:`dlrover_py.checkpoint.writer`), which replies on its standard output. Both run from the same
installation, and a persister ends with its parent, so the messages have no version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter

from dlrover_py.protocol.agents import (
    Count,
    Line,
    PersistProgress,
    PersistRequest,
    StoredCheckpoint,
    Wire,
    Words,
)
from dlrover_py.protocol.documents import read

MAX_REQUEST = 1 << 24
"""Bytes of a request: room for the ids of all nodes of a large job. The rest of a longer line is
read as another one."""
MAX_REPLY = 1 << 20
"""Bytes of a reply."""
WRITE_DEADLINE_S = 600.0
"""Seconds without progress after which an attempt fails."""


@dataclass(frozen=True, slots=True)
class KeepRules:
    """The rules of retention: a checkpoint stays if any rule keeps it; the newest always stays."""

    newest: Count = 3
    """Number of newest checkpoints to keep."""
    every: Count = 0
    """Keep each checkpoint whose step is a multiple of this number; 0: no such rule."""
    best: Count = 0
    """Number of checkpoints with the best metric to keep."""
    highest: bool = False
    """Whether the best metric is the highest (an accuracy) and not the lowest (a loss)."""

    @classmethod
    def of(cls, rules: Mapping[str, int | None]) -> Self:
        """Return the rules in a job's ``checkpoint.keep``, with defaults for missing ones."""
        told = {name: value for name, value in rules.items() if value is not None}
        newest, highest = told.get("last", cls().newest), bool(told.get("highest"))
        return cls(newest, told.get("every", 0), told.get("best", 0), highest)

    @property
    def rules(self) -> dict[str, int]:
        """The rules under the names of a job's ``checkpoint.keep``."""
        words = {"last": self.newest, "every": self.every, "best": self.best}
        return words | {"highest": int(self.highest)}


class _PersisterMessage(Wire):
    """A message that is sent as one line of JSON."""

    def encode(self) -> bytes:
        """Return the message as one line of JSON."""
        return self.model_dump_json().encode() + b"\n"


class WriteRequest(PersistRequest, _PersisterMessage):
    """A request to write a checkpoint to storage; a newer request cancels an older one.

    It has what the master requests of a node, and where the node finds and puts the bytes. If
    ``grant`` is None, the coordinator replies ``ready`` and waits for a grant.
    """

    kind: Literal["write"] = "write"
    pool: str
    """Folder of the shared-memory pool that holds the slots."""
    dir: str
    """Path or fsspec address of the directory of the checkpoints."""
    job: str
    """Uid of the job, as in the headers of the slots."""
    node: str
    """Id of this node, as in ``writers``."""
    keep: KeepRules = KeepRules()
    """Rules of retention, applied after the commit."""
    spare: tuple[Line, ...] = ()
    """Folders that retention must not remove: the checkpoint that was loaded."""
    deadline_s: Annotated[float, Field(gt=0)] = WRITE_DEADLINE_S
    """Seconds without progress, not even one written chunk, after which the attempt fails.

    The total time is not limited: a large state on a slow store takes hours.
    """
    name: str = ""
    """Name of the job for people."""
    without_master: bool = False
    """Whether the master of the job is lost, and this node alone stores the whole state.

    Several nodes may do so at the same time, and a part of the job may still live elsewhere. So
    the lease is taken as another job takes it: only when nothing renews it any more.
    """


class CommitGrant(_PersisterMessage):
    """The permission for the coordinator of an attempt to commit."""

    kind: Literal["grant"] = "grant"
    attempt: Line
    """Id of the attempt."""
    term: Count
    """Term in which the master grants it."""


class CancelWrite(_PersisterMessage):
    """A request to cancel an attempt; the reply is ``failed`` unless the attempt has ended."""

    kind: Literal["cancel"] = "cancel"
    attempt: Line
    """Id of the attempt."""


class WatchLease(_PersisterMessage):
    """A request to look at the writer lease of a directory before the first write.

    The lease of a job that was killed expires some seconds after the first look at it. If a short
    run looked at its end only, its time to end might not suffice.
    """

    kind: Literal["watch"] = "watch"
    dir: str
    """Path or fsspec address of the directory of the checkpoints."""
    job: str
    """Uid of the job that is going to write."""


class WriteReply(PersistProgress, _PersisterMessage):
    """A reply about the progress of a write request; ``done`` and ``failed`` end an attempt."""

    kind: Literal["reply"] = "reply"
    stored: StoredCheckpoint | None = None
    """The checkpoint that the coordinator has committed."""
    notes: tuple[Words, ...] = ()
    """Remarks for people that are not failures."""
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds since the request arrived."""
    nbytes: Count = 0
    """Bytes that this node has written."""


PersisterLine = WriteRequest | CommitGrant | CancelWrite | WatchLease | WriteReply
"""Any message to or from a persister."""
_LINE: TypeAdapter[PersisterLine] = TypeAdapter(
    Annotated[PersisterLine, Field(discriminator="kind")]
)


def read_line(line: bytes) -> PersisterLine:
    """Return the message in a line of JSON; unknown fields are ignored.

    Raises:
        ValueError: the line is not a valid message.
    """
    return read(_LINE, line)
