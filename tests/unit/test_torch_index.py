"""torch's own index of a checkpoint, which a persister writes."""

import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dlrover_py.checkpoint.dcp_index import metadata
from dlrover_py.protocol.manifest import Manifest, WrittenChunk
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import TensorChunk


def test_the_index_needs_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full /tmp no checkpoint was stored; a killed persister left a folder there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    chunk = TensorChunk("model.w", "float32", (4,), (4,), (0,))
    written = WrittenChunk(chunk, "__0_0.distcp", 0, 16)
    manifest = Manifest(
        Step(5), "a" * 12, "job", Round(1), Timeline(0), 1, "folder", 1.0, chunks=(written,)
    )
    found = pickle.loads(metadata(manifest, {chunk.box: (64, 16)}))
    assert isinstance(found, Metadata)
    (tensor,) = found.state_dict_metadata.values()
    assert isinstance(tensor, TensorStorageMetadata)
    assert tensor.size == torch.Size([4])
    assert [info.offset for info in found.storage_data.values()] == [64]
