"""Slots filled by hand: what the staging thread does, in a few lines."""

from collections.abc import Mapping
from pathlib import Path

from dlrover_py import arena
from dlrover_py.arena import Slot
from dlrover_py.protocol.checkpoint import Layout, Summary, encode_objects
from dlrover_py.trainer.state import encode_object, flatten


def stage(
    path: Path, state: Mapping[str, object], *, rank: int = 0, world: int = 1, **facts: object
) -> Summary:
    """Fill the slot with a state."""
    flat = flatten(state, rank=rank)
    by_key = {leaf.piece.key: leaf.tensor for leaf in flat.leaves}
    layout = Layout(leaf.piece for leaf in flat.leaves)
    objects = [(key, encode_object(key, value)) for key, value in flat.objects.items()]
    sums = []
    with Slot(path, write=True) as slot:
        slot.reserve(layout.end + arena.SPARE)
        slot.begin()
        for piece, at in layout:
            source = by_key[piece.key].detach().cpu().contiguous()
            target = slot.view()[at : at + piece.nbytes]
            sums.append(arena.copy_summed(source.data_ptr(), target))
            del target
        part = arena.digest(layout.part(flat.objects)).to_bytes(8, "big").hex()
        values = {"job": "", "step": 1, "round": 0, "lap": 0, **facts}
        return slot.seal(
            layout.encode(),
            sums,
            encode_objects(objects),
            layout.end,
            private_at=layout.private_at,
            rank=rank,
            world=world,
            part=part,
            **values,
        )
