"""Exact data: each sample once per epoch, whatever fails and however the world is resized.

::

    from dlrover_py.trainer import Checkpointer
    from dlrover_py.trainer.data import ElasticLoader

    loader = ElasticLoader(dataset, global_batch=256, micro_batch=16, num_workers=2)
    state = {"model": model, "optimizer": optimizer, "data": loader}
    checkpointer.load(state)
    while loader.epoch < epochs:
        for step in loader:
            for inputs, targets in step:
                with step.sync(ddp):
                    step.weigh(loss_of(ddp(inputs), targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
            checkpointer.save(loader.steps, state)

The order of the samples depends on the seed and the epoch, never on the world. The position in it
is part of the checkpoint, so model and data go back together. The classes need torch, and are
imported when they are first accessed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_py.trainer.data.framework_shards import (
        ChunkSource,
        IterableSource,
        hugging_face_source,
    )
    from dlrover_py.trainer.data.leases import ShardLoader
    from dlrover_py.trainer.data.loader import ElasticLoader, TrainingStep
    from dlrover_py.trainer.data.rank_positions import RankPositions
    from dlrover_py.trainer.data.sampler import ElasticSampler, PerWorker
    from dlrover_py.trainer.data.scaling import BatchScaling
    from dlrover_py.trainer.data.shard_sources import (
        LineSource,
        MapSource,
        ParquetSource,
        ShardSource,
        ShardUnreadableError,
    )
    from dlrover_py.trainer.data.streams import LineStream, StreamSource

__all__ = [
    "BatchScaling",
    "ChunkSource",
    "ElasticLoader",
    "ElasticSampler",
    "IterableSource",
    "LineSource",
    "LineStream",
    "MapSource",
    "ParquetSource",
    "PerWorker",
    "RankPositions",
    "ShardLoader",
    "ShardSource",
    "ShardUnreadableError",
    "StreamSource",
    "TrainingStep",
    "hugging_face_source",
]

_HOMES = {
    "BatchScaling": "scaling",
    "ChunkSource": "framework_shards",
    "ElasticLoader": "loader",
    "ElasticSampler": "sampler",
    "IterableSource": "framework_shards",
    "LineSource": "shard_sources",
    "LineStream": "streams",
    "MapSource": "shard_sources",
    "ParquetSource": "shard_sources",
    "PerWorker": "sampler",
    "RankPositions": "rank_positions",
    "ShardLoader": "leases",
    "ShardSource": "shard_sources",
    "ShardUnreadableError": "shard_sources",
    "StreamSource": "streams",
    "TrainingStep": "loader",
    "hugging_face_source": "framework_shards",
}
"""Module of each name that is imported when it is first accessed."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first accessed.

    Raises:
        AttributeError: this package has no such name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
