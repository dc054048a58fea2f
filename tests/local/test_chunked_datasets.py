"""Datasets of LitData and Mosaic, written here: each sample of their chunks comes once."""

from pathlib import Path
from typing import Any

import pytest

from dlrover_py.trainer.data import ChunkSource
from tests.unit.test_framework_shards import interrupted

pytestmark = pytest.mark.filterwarnings("ignore")  # of these packages, and of torch about their use
REASON = "its packages need older libraries than those of constraints.txt"
N = 23


def number_of(sample: Any) -> int:
    return int(sample["n"])


@pytest.mark.parametrize("steps", [0, 3, 7])
def test_chunks_of_litdata(tmp_path: Path, steps: int) -> None:
    litdata: Any = pytest.importorskip("litdata", reason=REASON)
    cache = litdata.streaming.Cache(str(tmp_path), chunk_size=5)
    for at in range(N):
        cache[at] = {"n": at}
    cache.done()
    cache.merge()
    dataset = litdata.StreamingDataset(str(tmp_path))
    chunks = [end - begin for begin, end in dataset.region_of_interest]
    assert len(chunks) > 1
    assert interrupted(ChunkSource(dataset, chunks), steps, number_of) == list(range(N))


@pytest.mark.parametrize("steps", [0, 3, 7])
@pytest.mark.parametrize("limit", [160, 300], ids=["an empty shard", "whole shards"])
def test_shards_of_mosaic(tmp_path: Path, limit: int, steps: int) -> None:
    streaming: Any = pytest.importorskip("streaming", reason=REASON)
    with streaming.MDSWriter(out=str(tmp_path), columns={"n": "int"}, size_limit=limit) as writer:
        for at in range(N):
            writer.write({"n": at})
    dataset = streaming.StreamingDataset(local=str(tmp_path), shuffle=False, batch_size=1)
    sizes = [*map(int, dataset.samples_per_shard)]
    assert len(sizes) > 1
    assert (0 in sizes) is (limit == 160)
    source = ChunkSource(dataset, dataset.samples_per_shard)
    assert interrupted(source, steps, number_of) == list(range(N))
