"""The index of torch DCP, the file ``.metadata`` of a checkpoint.

Only the coordinator of a checkpoint writes it. The module imports the whole of
``torch.distributed.checkpoint``, which takes a third as long again as torch.
The file follows torch/distributed/checkpoint/filesystem.py of torch 2.6 to 2.15.
"""

import contextlib
import io
import os
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.storage import WriteResult

from dlrover_py.protocol.manifest import Manifest


class _FileInMemory(dcp_files.FileSystem):  # type: ignore[misc]
    """A file system for torch DCP that keeps the content of the one file that is written."""

    content = b""

    @contextlib.contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        with io.BytesIO() as stream:
            yield stream
            self.content = stream.getvalue()

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Do nothing: the content has no name."""


def metadata(manifest: Manifest, extents: Mapping[tuple[Any, ...], tuple[int, int]]) -> bytes:
    """Return the contents of torch DCP's ``.metadata`` file of a checkpoint.

    Args:
        manifest: the chunks and objects of the checkpoint, and their files.
        extents: offset and length of the zip of each chunk, by ``TensorChunk.box``.
    """
    tensors: dict[str, dcp.STORAGE_TYPES] = {}
    results: list[WriteResult] = []
    for written in manifest.chunks:
        chunk = written.chunk
        entry = tensors.get(chunk.key)
        if entry is None:
            properties = dcp.TensorProperties(dtype=getattr(torch, chunk.dtype))
            entry = dcp.TensorStorageMetadata(properties, torch.Size(chunk.whole), [])
            tensors[chunk.key] = entry
        stored = dcp.ChunkStorageMetadata(torch.Size(chunk.at), torch.Size(chunk.shape))
        index = dcp.MetadataIndex(chunk.key, chunk.at, len(entry.chunks))
        entry.chunks.append(stored)
        position, length = extents[chunk.box]
        info = dcp_files._StorageInfo(written.file, position, length)
        results.append(WriteResult(index, length, info))
    for item in manifest.objects:
        tensors[item.key] = dcp.BytesStorageMetadata()
        info = dcp_files._StorageInfo(item.file, item.position, item.nbytes)
        results.append(WriteResult(dcp.MetadataIndex(item.key), item.nbytes, info))
    # dcp_to_torch_save nests by these paths: one level, so that load_state_dict accepts ["model"].
    paths = {key: (key,) if "/" in key else tuple(key.split(".", 1)) for key in tensors}
    top = {path[0] for path in paths.values() if len(path) == 1}
    paths = {key: (key,) if path[0] in top else path for key, path in paths.items()}
    # torch writes the file in its own format. It is kept in memory: the store may be a bucket, and
    # /tmp may be full.
    writer, files = FileSystemWriter("", sync_files=False), _FileInMemory()
    writer.fs = files
    writer.storage_meta = dcp.StorageMeta  # without a path
    writer.finish(dcp.Metadata(tensors, planner_data=paths), [results])
    return files.content
