"""Slots that hold a state of torch's: what the staging thread does, in a few lines."""

from collections.abc import Mapping
from pathlib import Path

from dlrover_py import arena
from dlrover_py.protocol.checkpoint import Layout, Summary
from dlrover_py.trainer.state import encode_object, flatten
from tests import slots


def stage(
    path: Path, state: Mapping[str, object], *, rank: int = 0, world: int = 1, **facts: object
) -> Summary:
    """Fill the slot with a state."""
    flat = flatten(state, rank=rank)
    part = arena.digest(Layout(leaf.piece for leaf in flat.leaves).part(flat.objects))
    known = {"job": "", "step": 1, "round": 0, "part": part.to_bytes(8, "big").hex()}
    return slots.stage(
        path,
        [(leaf.piece, slots.raw(leaf.tensor.detach().cpu())) for leaf in flat.leaves],
        {key: encode_object(key, value) for key, value in flat.objects.items()},
        rank=rank,
        world=world,
        **{**known, **facts},
    )
