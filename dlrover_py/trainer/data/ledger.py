"""Writing the ledger: which samples this rank has really trained in which step.

The loader's processes put a digest of the samples beside each batch that they have read. A step
adds up the digests of its micro-batches. So the ledger says what was read and trained, and not what
should have been. :mod:`dlrover_py.trainer.data.verify` compares the two.

A rank writes before the gradients of a step are exchanged. If another rank has a checkpoint of the
step, then this rank has its record, even if it was killed in the step.
"""

import logging
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from dlrover_py.protocol import shard_ledger
from dlrover_py.protocol.data_ledger import (
    DIGEST_BYTES,
    END,
    LAST_SEGMENT,
    LONGEST_HEADER,
    LedgerHeader,
    file_name,
    parse_name,
)
from dlrover_py.protocol.documents import NewerFormatError
from dlrover_py.trainer.data.ledger_file import LedgerFile, folder_of
from dlrover_py.trainer.data.order import hash_samples
from dlrover_py.trainer.data.sampler import ElasticSampler
from dlrover_py.trainer.data.wrapped import WrappedDataset

log = logging.getLogger(__name__)


_IDENTITY = ("length", "seed", "shuffle", "block", "fingerprint")
"""Fields of a header that all segments of a ledger have in common."""


class LedgerWriter:
    """This rank's files in a ledger. A segment is a loop over the loader."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Name the folder. It is created when the first segment is.

        Args:
            folder: a folder that all nodes share. It may have been used before.

        Raises:
            ConfigError: the path is an address such as ``s3://…``: only folders can be appended to.
        """
        self._folder = folder_of(folder)
        self._file: LedgerFile | None = None
        """The file of the present segment."""
        self._segment = 0
        self.fault = ""
        """Why no segment could be reserved, in words."""

    def reserve(self, sampler: ElasticSampler) -> int:
        """Create this rank's file of a new segment, and return the number of the segment.

        Only rank 0 does this. It returns 0 if the folder cannot be written, or belongs to another
        loader or to other data; :attr:`fault` and the log say why.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            names = [path.name for path in self._folder.iterdir()]
            if any(map(shard_ledger.parse_name, names)):
                return self._refuse(
                    f"the ledger in {self._folder} is that of a ShardLoader: expected a folder of "
                    "its own for each loader"
                )
            files = sorted(filter(None, map(parse_name, names)), reverse=True)
            if fault := self._foreign(files, sampler):
                return self._refuse(f"the ledger in {self._folder} {fault}")
            segment = files[0][0] + 1 if files else 1
            if segment > LAST_SEGMENT:
                last = file_name(LAST_SEGMENT, 0)
                raise FileExistsError(f"{last} has the last number: expected no such file")
            self.begin(segment, sampler)
        except OSError as error:
            return self._refuse(f"the ledger in {self._folder} cannot be written: {error}")
        return segment

    def _refuse(self, fault: str) -> int:
        """Note why no segment is reserved, and return 0."""
        self.fault = fault
        log.error("data: %s", fault)
        return 0

    def _foreign(self, files: list[tuple[int, int]], sampler: ElasticSampler) -> str:
        """Return why the folder belongs to another loader or other data; "" if it does not.

        Args:
            files: segment and rank of each file in the folder, the newest first.
            sampler: the sampler of this loader.

        Raises:
            OSError: the newest file cannot be read.
        """
        if self._segment and (not files or files[0][0] != self._segment):
            return "is written by another loader, too: give each loader a folder of its own"
        if not files:
            return ""
        try:
            before = self._header(*files[0])
        except NewerFormatError as error:
            return f"has {file_name(*files[0])}: {error}"
        except ValueError:
            return ""  # it is damaged: what it says is not known
        if sampler.fingerprint and not before.fingerprint:
            before = replace(before, fingerprint=self._known_fingerprint(files))
        for name in _IDENTITY:
            found, own = getattr(before, name), getattr(sampler, name)
            is_unknown = name == "fingerprint" and "" in (found, own)
            if found != own and not is_unknown:
                return (
                    f"is that of a training with {name}={found}, and this loader has {name}={own}: "
                    "expected a folder of its own for each training and each loader"
                )
        return ""

    def _header(self, segment: int, rank: int) -> LedgerHeader:
        """Return the first line of a file.

        Args:
            segment: the segment of the file.
            rank: the rank that has written it.

        Raises:
            NewerFormatError: a newer version has written it.
            OSError: the file cannot be read.
            ValueError: it is damaged.
        """
        path = self._folder / file_name(segment, rank)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            return LedgerHeader.decode(file.readline(LONGEST_HEADER))

    def _known_fingerprint(self, files: list[tuple[int, int]]) -> str:
        """Return the newest fingerprint that is known; "" if none is.

        Args:
            files: segment and rank of each file in the folder, the newest first.
        """
        for place in dict(files).items():  # one file of each segment says it
            try:
                header = self._header(*place)
            except (OSError, ValueError):
                continue  # what it says is not known
            if header.fingerprint:
                return header.fingerprint
        return ""

    def begin(self, segment: int, sampler: ElasticSampler) -> None:
        """Create this rank's file of a segment, if that was not done yet.

        Args:
            segment: number of the segment, which rank 0 has reserved.
            sampler: its position is that of the first step.

        Raises:
            OSError: the file cannot be created and begun, or exists.
        """
        if self._file is not None:
            if self._segment == segment:
                return
            self._file.close()
            self._file = None
        self._segment = segment
        header = LedgerHeader(
            segment=segment,
            rank=sampler.rank,
            world=sampler.world,
            epoch=sampler.epoch,
            offset=sampler.offset,
            steps=sampler.steps,
            length=sampler.length,
            global_batch=sampler.global_batch,
            seed=sampler.seed,
            shuffle=sampler.shuffle,
            block=sampler.block,
            fingerprint=sampler.fingerprint,
        )
        path = self._folder / file_name(segment, sampler.rank)
        self._file = LedgerFile(path, header.encode() + b"\n")

    def add(self, digest: int) -> None:
        """Write the digest of a step. It outlives this process then.

        What cannot be written costs a line in the log, and is tried again with the next step.
        """
        self._add((digest % (1 << 64)).to_bytes(DIGEST_BYTES, "little"))

    def end(self) -> None:
        """Note that the loop has reached the end of the epoch, and all steps are committed."""
        self._add(END)

    def _add(self, content: bytes) -> None:
        """Append to the file of the present segment, if there is one."""
        if self._file is not None:
            self._file.add(content)


class DigestedBatch(NamedTuple):
    """What the loader's processes return for a micro-batch."""

    digest: int
    """Sum of the hashes of its samples."""
    batch: Any
    """What ``collate_fn`` has made of its items."""


class DigestedDataset(WrappedDataset):
    """A map-style dataset that yields the numbers of the samples beside the items."""

    def __getitems__(self, keys: Sequence[Any]) -> tuple[list[int], Sequence[Any]]:
        """Return the samples of a micro-batch, and their items.

        Args:
            keys: numbers of samples, or pairs of epoch and number.
        """
        dataset = self._dataset
        at_once = getattr(dataset, "__getitems__", None)
        items = [dataset[key] for key in keys] if at_once is None else at_once(keys)
        return [key[1] if isinstance(key, tuple) else key for key in keys], items


class DigestingCollate:
    """Collates what a :class:`DigestedDataset` yields for a micro-batch."""

    def __init__(self, collate: Callable[[Any], Any] | None) -> None:
        self._collate = default_collate if collate is None else collate

    def __call__(self, found: tuple[list[int], Sequence[Any]]) -> DigestedBatch:
        """Return the batch and the digest of its samples."""
        samples, items = found
        numbers = torch.frombuffer(array("q", samples), dtype=torch.int64)
        return DigestedBatch(digest_of(numbers), self._collate(items))


def digest_of(samples: Tensor) -> int:
    """Return the digest of some samples, an int64 tensor: the sum of their hashes, mod 2**64."""
    return int(hash_samples(samples).sum())
