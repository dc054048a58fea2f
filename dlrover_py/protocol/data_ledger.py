"""The ledger of a training's data: which samples each rank has trained in which step.

A ledger is a folder. It has a file for each rank in each segment. A segment is one loop over the
loader. The file begins with a line that is a :class:`LedgerHeader`. Then it has 8 bytes for each
step: the digest of the samples that this rank has computed, as a little-endian integer. The digest
is written before the gradient leaves the rank. So the last step of a file may have failed. A file
whose loop has reached the end of the epoch ends with one more byte, :data:`END`.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field, Strict

from dlrover_py.protocol.documents import FORMAT_NUMBER, Document, Number, up_to

FORMAT: Final = 1
"""Version of the ledger, which includes the digest of samples and their order."""
DIGEST_BYTES: Final = 8
"""Bytes of the digest of one step."""
END: Final = b"\n"
"""Last byte of a file whose steps are all committed."""
LONGEST_HEADER: Final = 4096
"""Bytes after which a reader gives up looking for the end of the header."""
LARGEST_FILE: Final = 1 << 30
"""Bytes after which a reader gives up: 134 million steps of an epoch."""
LAST_SEGMENT: Final = 10**9 - 1
"""Largest number of a segment."""
Count = Annotated[int, Field(ge=1, le=2**53, strict=True)]
"""A number from 1."""
_FILE_NAME = re.compile(r"([0-9]{6,9})-([0-9]{5,7})\.ledger")


@dataclass(frozen=True, slots=True)
class LedgerHeader(Document):
    """Where a loop over the loader has begun, on one rank."""

    segment: Number
    """Number of the loop in this folder; the same on all ranks, and it only grows."""
    rank: Number
    """Global rank of the worker."""
    world: Annotated[int, Field(ge=1, le=1 << 20, strict=True)]
    """Number of workers."""
    epoch: Number
    """Epoch of the loop, from 0."""
    offset: Number
    """Number of samples of the epoch that were in committed steps at the beginning."""
    steps: Number
    """Number of committed steps since the start of the training, at the beginning."""
    length: Count
    """Number of samples of the dataset."""
    global_batch: Annotated[int, Field(ge=1, le=1 << 24, strict=True)]
    """Number of samples of a step, of all ranks together."""
    seed: Number
    """The seed of the order."""
    shuffle: Annotated[bool, Strict()]
    """Whether the order is shuffled."""
    block: Count
    """Number of neighbouring samples that stay together."""
    fingerprint: Annotated[str, Field(max_length=64)] = ""
    """Says which data it is; empty if it is not known."""
    format: Annotated[int, FORMAT_NUMBER, up_to(FORMAT)] = FORMAT
    """Version of the file."""


def file_name(segment: int, rank: int) -> str:
    """Return the name of the file of a rank in a segment."""
    return f"{segment:06d}-{rank:05d}.ledger"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return segment and rank of the name of a file; None if it is not one of a ledger."""
    found = _FILE_NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]))
