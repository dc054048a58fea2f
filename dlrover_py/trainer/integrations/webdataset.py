"""WebDataset: a tar file is a shard, and its samples are groups of members with one key.

::

    source = tar_source(paths, lambda samples: samples.decode("pil").to_tuple("jpg", "cls"))
    loader = ShardLoader("train", source)
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from tarfile import ReadError
from typing import Any

import webdataset
from webdataset.tariterators import group_by_keys, tar_file_expander

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data.framework_shards import IterableSource
from dlrover_py.trainer.data.shard_sources import (
    ShardUnreadableError,
    digest_of_files,
    listed,
    opened,
)


class _Samples(webdataset.DataPipeline, webdataset.FluidInterface):
    """The samples of one file, with the methods of a ``WebDataset``."""


def tar_source(
    paths: Sequence[str | os.PathLike[str]],
    pipeline: Callable[[Any], Iterable[Any]] = iter,
) -> IterableSource:
    """Return the shards of tar files.

    Args:
        paths: the files, in an order that never changes.
        pipeline: makes the records from the samples of one file, which have the methods of a
            ``WebDataset``. It must yield the same ones in the same order each time, so it must
            not shuffle without a seed.

    Raises:
        ConfigError: there is no such file, or no file at all.
    """
    files = listed(paths)
    for file in files:
        if not Path(file).is_file():
            raise ConfigError(f"data: {file}: expected a tar file")
    sizes = [os.stat(file).st_size for file in files]

    def begin(shard: int, skip: int) -> Iterator[Any]:
        with opened(files[shard]) as file:
            # A file that is cut at the end of a member is a whole tar file to its reader.
            if (found := os.fstat(file.fileno()).st_size) < sizes[shard]:
                raise ShardUnreadableError(
                    f"{files[shard]}: expected at least {sizes[shard]} bytes, found {found}"
                )
            members = ({"url": files[shard], "stream": file},)
            samples = _Samples(lambda: members, tar_file_expander, group_by_keys)
            try:
                yield from islice(pipeline(samples), skip, None)
            except ReadError as error:
                raise ShardUnreadableError(f"{files[shard]}: {error}") from error

    digest = digest_of_files(list(zip(files, sizes, strict=True))) if files else ""
    return IterableSource(len(files), begin, fingerprint=digest)
