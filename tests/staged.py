"""Slots that hold a state of torch: a short form of what the staging thread does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dlrover_py.checkpoint import shm
from dlrover_py.protocol.slots import Layout, SlotHeader
from dlrover_py.trainer.object_codec import encode_object
from dlrover_py.trainer.state_dict import flatten
from tests import slots


def stage(
    path: Path, state: Mapping[str, object], *, rank: int = 0, world: int = 1, **facts: object
) -> SlotHeader:
    """Fill a slot with a state, and return the header of the slot.

    Args:
        path: file of the slot.
        state: the state.
        rank: rank of the worker.
        world: number of workers.
        facts: other fields of the header.
    """
    flat = flatten(state, rank=rank)
    part = shm.digest(Layout(leaf.chunk for leaf in flat.leaves).part(flat.objects))
    known: dict[str, Any] = {
        "job": "",
        "step": 1,
        "round": 0,
        "part": part.to_bytes(8, "big").hex(),
    }
    return slots.stage(
        path,
        [(leaf.chunk, slots.raw(leaf.tensor.detach().cpu())) for leaf in flat.leaves],
        {key: encode_object(key, value) for key, value in flat.objects.items()},
        rank=rank,
        world=world,
        **{**known, **facts},
    )
