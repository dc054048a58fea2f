"""The files of torch that are written without torch: torch reads them."""

import io
import pickle
import tempfile
import warnings
import zipfile
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dlrover_py.checkpoint.torch_format import dcp_metadata, zip_around
from dlrover_py.protocol.manifest import Manifest, WrittenChunk, WrittenObject
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import ALIGN, ITEM_BYTES, TensorChunk

lengths = st.lists(st.integers(0, 5), max_size=4).map(tuple)
DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]  # torch 2.6 lacks one


def whole(key: str, dtype: str, shape: tuple[int, ...]) -> TensorChunk:
    return TensorChunk(key, dtype, shape, shape, (0,) * len(shape))


@given(st.sampled_from(DTYPES), lengths)
def test_torch_loads_a_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    chunk = whole("w", dtype, shape)
    data = bytes(i % 2 for i in range(chunk.nbytes))
    before, after = zip_around(chunk)
    assert len(before) % ALIGN == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        found = torch.load(io.BytesIO(before + data + after), weights_only=True)
        model = torch.empty(shape, dtype=getattr(torch, dtype))
    assert (found.dtype, found.shape, found.stride()) == (model.dtype, shape, model.stride())
    assert not found.requires_grad
    assert bytes(found.untyped_storage()) == data


@pytest.mark.parametrize("nbytes", [(1 << 32) - 1, 5 << 30])
def test_torch_maps_a_tensor_that_is_larger_than_a_plain_zip_can_say(
    tmp_path: Path, nbytes: int
) -> None:
    before, after = zip_around(whole("w", "uint8", (nbytes,)))
    path = tmp_path / "large"
    with path.open("wb") as file:  # it takes no room: what is not written is a hole
        file.write(before)
        file.seek(nbytes - 1, 1)
        file.write(b"\7" + after)
    found = torch.load(path, mmap=True, weights_only=True)
    assert found.shape == (nbytes,)
    assert found[-1] == 7
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == nbytes


def manifest(chunks: list[WrittenChunk], objects: list[WrittenObject]) -> Manifest:
    ids = (Step(5), "a" * 12, "job", Round(1), Timeline(0), 1, "folder", 1.0)
    return Manifest(*ids, chunks=tuple(chunks), objects=tuple(objects))


keys = st.text(min_size=1, max_size=9)
positions = st.integers(0, 1 << 40)


@given(
    st.dictionaries(keys, st.tuples(st.sampled_from(DTYPES), lengths, positions), max_size=4),
    st.dictionaries(keys, positions, max_size=3),
)
def test_the_index_is_what_torch_would_write(
    tensors: dict[str, tuple[str, tuple[int, ...], int]], objects: dict[str, int]
) -> None:
    """Each tensor is in two chunks along each of its dimensions, in files of two ranks."""
    chunks, extents, wanted, places = [], {}, {}, {}
    objects = {key: at for key, at in objects.items() if key not in tensors}
    for key, (dtype, shape, position) in tensors.items():
        parts: list[ChunkStorageMetadata] = []
        size = torch.Size([2 * n for n in shape])
        for number, corner in enumerate(product((0, 1), repeat=len(shape))):
            at = tuple(i * n for i, n in zip(corner, shape, strict=True))
            chunk = TensorChunk(key, dtype, shape, tuple(size), at)
            if chunk.box in extents:
                continue  # it is empty, and so are all its neighbours
            file, extents[chunk.box] = f"__{number % 2}_0.distcp", (position, 100 + number)
            chunks.append(WrittenChunk(chunk, file, position + 64, 1))
            info = _StorageInfo(file, position, 100 + number)
            places[MetadataIndex(key, at, len(parts))] = info
            parts.append(ChunkStorageMetadata(torch.Size(at), torch.Size(shape)))
        properties = TensorProperties(dtype=getattr(torch, dtype))
        wanted[key] = TensorStorageMetadata(properties, size, parts)
    for key, position in objects.items():
        wanted[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", position, 9)
    written = [WrittenObject(key, "__0_0.distcp", at, 9, 0) for key, at in objects.items()]
    found = pickle.loads(dcp_metadata(manifest(chunks, written), extents))
    assert isinstance(found, Metadata)
    assert found.state_dict_metadata == wanted
    assert found.storage_data == places
    assert [key.index for key in found.storage_data] == [key.index for key in places]
    assert found.planner_data.keys() == wanted.keys()


def test_the_index_needs_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full /tmp no checkpoint was stored; a killed persister left a folder there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    chunk = whole("model.w", "float32", (4,))
    written = WrittenChunk(chunk, "__0_0.distcp", 0, 16)
    found = pickle.loads(dcp_metadata(manifest([written], []), {chunk.box: (64, 16)}))
    assert isinstance(found, Metadata)
    (tensor,) = found.state_dict_metadata.values()
    assert isinstance(tensor, TensorStorageMetadata)
    assert tensor.size == torch.Size([4])
    assert [info.offset for info in found.storage_data.values()] == [64]


@pytest.mark.parametrize("count", [23, 24, 25, 26, 49, 50, 51, 52, 99, 100, 1000])
def test_an_index_may_have_any_number_of_keys(count: int) -> None:
    """From 25 on, nothing could read it: the keys took the places of other values in the memo."""
    chunks = [
        WrittenChunk(whole(f"model.{i}.w", "float32", (i,)), "__0_0.distcp", 64, 1)
        for i in range(count)
    ]
    objects = [WrittenObject(f"extra.{i}", "__0_0.distcp", i, 9, 0) for i in range(count)]
    extents = {written.chunk.box: (i, 9) for i, written in enumerate(chunks)}
    found = pickle.loads(dcp_metadata(manifest(chunks, objects), extents))
    names = [item.key for item in objects]
    assert list(found.planner_data) == [written.chunk.key for written in chunks] + names
    assert found.planner_data["model.7.w"] == ("model", "7.w")
    assert [place.offset for place in found.storage_data.values()] == 2 * list(range(count))
    assert {index.fqn for index in found.storage_data} == set(found.state_dict_metadata)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable or uninitialized)")
def test_torch_loads_a_checkpoint(tmp_path: Path) -> None:
    """A tensor in two chunks, a scalar, and an object; torch makes one file of them, too."""
    first = TensorChunk("model.w", "float32", (2, 4), (4, 4), (0, 0))
    values = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    parts = [
        (first, values[:2]),
        (first._replace(at=(2, 0)), values[2:]),
        (whole("step", "int64", ()), torch.tensor(7)),
    ]
    content, extents, chunks = b"", {}, []
    for chunk, tensor in parts:
        before, after = zip_around(chunk)
        extents[chunk.box] = (len(content), len(before) + chunk.nbytes + len(after))
        chunks.append(WrittenChunk(chunk, "__0_0.distcp", len(content) + len(before), 1))
        content += before + tensor.numpy().tobytes() + after
        assert tensor.nbytes == prod(chunk.shape) * ITEM_BYTES[chunk.dtype]
    stream = io.BytesIO()
    torch.save({"lr": [0.5]}, stream)
    item = WrittenObject("extra", "__0_0.distcp", len(content), len(stream.getvalue()), 0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".metadata").write_bytes(dcp_metadata(manifest(chunks, [item]), extents))
    (folder / "__0_0.distcp").write_bytes(content + stream.getvalue())

    state = {"model.w": torch.zeros(4, 4), "step": torch.tensor(0), "extra": None}
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["model.w"], values)
    assert (int(state["step"]), state["extra"]) == (7, {"lr": [0.5]})

    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert torch.equal(one["model"]["w"], values), "nested by one level, as a module's state is"
    assert one["extra"] == {"lr": [0.5]}
