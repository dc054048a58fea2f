"""What ``dlrover data verify`` has found in a ledger."""

import os
from dataclasses import dataclass, field
from pathlib import Path

MOST_EPOCHS = 100_000
"""Largest epoch for which those without a record are listed, too."""
NAMED = 10
"""Number of samples, or of ranges of them, that a report names for each fault."""


def ledger_folder(folder: Path) -> Path:
    """Return the folder of a ledger.

    Args:
        folder: the ledger, or a folder with it in its folder ``ledger``.
    """
    inner = folder / "ledger"
    return inner if os.path.isdir(inner) else folder  # not is_dir: it raises PermissionError


@dataclass
class EpochReport:
    """What is known of one epoch, or of one partition of a stream.

    A sample may be in several of the lists.
    """

    epoch: int
    samples: int
    """Number of samples of the dataset; of a partition, the units below its watermark."""
    finished: bool
    """The training has gone on to the next epoch, or has ended with this one."""
    missing: int = 0
    """Number of samples of which the ledger has no surviving step."""
    repeated: int = 0
    """Number of samples of which the ledger has several surviving steps."""
    unproven: int = 0
    """Number of samples of steps whose record is missing or has other samples."""
    named: dict[str, list[int | str]] = field(default_factory=dict)
    """The first samples of each kind: numbers, or places in shards in words."""
    repeats_allowed: bool = False
    """Samples may be trained more than once: the guarantee was no other."""
    partition: str = ""
    """Name of the partition; empty for an epoch."""

    @property
    def exact(self) -> bool:
        """Each sample was trained once, or as it was promised, as far as the epoch has come."""
        repeated = self.repeated and not self.repeats_allowed
        return not (self.missing or repeated or self.unproven)

    def names(self, kind: str) -> str:
        """Return the first samples of a kind as text; it ends with "…" if there may be more.

        Args:
            kind: the name of a field with a number of samples, which is not 0.
        """
        found = self.named[kind]
        of_ranges = any(isinstance(one, str) for one in found)
        is_all = len(found) < NAMED if of_ranges else len(found) == getattr(self, kind)
        return ", ".join(map(str, found)) + ("" if is_all else ", …")


@dataclass
class LedgerReport:
    """The result of the check of a ledger."""

    epochs: list[EpochReport]
    """For a stream, its partitions."""
    steps: int
    """Number of steps in the surviving history. The last step is not counted before the end of its
    epoch, because it may have failed. For leased shards: the number of batches of all workers."""
    problems: list[str]
    """What was found beside the samples, in words."""
    faults: list[str]
    """Why the surviving history itself is not certain, in words. Then nothing is proven."""

    @property
    def exact(self) -> bool:
        """Each sample of each finished epoch was trained once."""
        return not self.faults and all(each.exact for each in self.epochs)
