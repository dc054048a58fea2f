"""The writer lease of a directory of checkpoints: the file ``dlrover.json``.

The persisters of a job renew it while they write. Any process that may write to the directory may
write this file, so it is validated when it is read.
"""

from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, Field, Strict

from dlrover_py.protocol.documents import FORMAT_NUMBER, Document, Number, up_to

FORMAT: Final = 1
"""Version of the lease."""
LONGEST_WORD: Final = 1000
"""Largest number of characters of a text in a lease."""


def _is_printable(text: str) -> str:
    """Return text that may be shown on a terminal; raise ValueError for another one."""
    if not text.isprintable():
        raise ValueError("expected printable characters")
    return text


LeaseText = Annotated[str, Field(max_length=LONGEST_WORD), AfterValidator(_is_printable)]
"""A text that is fit for messages and for reports to the master."""


@dataclass(frozen=True, slots=True)
class WriterLease(Document):
    """The writer lease of a directory: the contents of ``dlrover.json``."""

    job: LeaseText
    """Uid of the job that writes here."""
    name: LeaseText = ""
    """Name of the job for people."""
    attempt: LeaseText = ""
    """Newest attempt of the job to write a checkpoint; empty if it is not known."""
    host: LeaseText = ""
    """Boot id and process namespace in which ``pid`` is valid."""
    pid: Number = 0
    """Process id of the writer that renewed the lease last."""
    started: Number = 0
    """Start time of that process in clock ticks since boot, because process ids are reused."""
    writer: LeaseText = ""
    """Random id of the `CheckpointDirectory` object that renewed the lease last.

    It is empty if that writer has left. Other writers of the job may continue then.
    """
    shared: Annotated[bool, Strict()] = False
    """Whether other nodes of the job write here too and renew the lease if this writer dies."""
    beat: Number = 0
    """Counter of renewals."""
    format: Annotated[int, FORMAT_NUMBER, up_to(FORMAT)] = FORMAT
    """Version of the lease; 1 if it is absent."""

    @property
    def display_name(self) -> str:
        """Name of the job in messages."""
        return f"{self.name} ({self.job})" if self.name else self.job
