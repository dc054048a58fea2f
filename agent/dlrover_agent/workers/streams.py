"""The destinations of the standard output and standard error of one worker."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerStream:
    """The destinations of one stream of one worker."""

    files: tuple[Path, ...] = ()
    """Files to which the stream is copied."""
    shown: bool = True
    """Whether the stream is shown on the console."""
    prefix: str = ""
    """Text before each line on the console and in the filtered file."""
    words: tuple[str, ...] = ()
    """Words that select the lines for the filtered file."""
    filtered: Path | None = None
    """File for the lines of all local ranks that contain one of the words; None for no file."""

    @property
    def plain(self) -> bool:
        """Whether the worker's stream is shown unchanged on the agent's own stream, and only there.

        Such a stream needs no pipe.
        """
        return self.shown and not (self.files or self.prefix or self.filtered)


@dataclass(frozen=True, slots=True)
class OutputDestination:
    """The destinations of one worker's output."""

    out: WorkerStream
    err: WorkerStream
    error_file: str
    """Path of the error file for torch's ``@record``; empty if there is none."""
