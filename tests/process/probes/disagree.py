"""Two ranks with a shard each: rank 1's newest is damaged, and both must load the one before. And
with a stage of a pipeline each, of which the other one knows nothing.

usage: disagree.py FOLDER. Prints "ok" if all is well.
"""

import logging
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.trainer import restore
from dlrover_py.trainer.candidates import CheckpointSources
from tests.staged import stage


def shard(value, mesh):
    return DTensor.from_local(torch.full((2, 2), float(value)), mesh, [Shard(0)])


class Whole:
    def __init__(self, **held):
        self.held = held

    def state_dict(self):
        return dict(self.held)

    def load_state_dict(self, state):
        self.held = state


def damage(path):
    with ShmSlot(path, write=True) as slot:
        at = shm.contents(slot).layout.slot_offsets[0]
        slot.view()[at] ^= 1


def run(folder, rank):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    slots = folder / "pool"
    for step in (1, 2):
        state = {"w": shard(10 * step + rank, mesh), "step": step}
        stage(slots / f"{rank}.{step}", state, rank=rank, world=2, step=step)
    if rank == 1:
        damage(slots / "1.2")
    dist.barrier()

    def load():
        state = {"w": shard(-1, mesh), "step": -1}
        found = restore.load(
            state,
            CheckpointSources(pool=slots),
            rank=rank,
            world=2,
            log=logging.getLogger("probe"),
        )
        return found, state

    found, state = load()
    assert found is not None
    assert found.step == state["step"] == 1
    assert torch.equal(state["w"].to_local(), torch.full((2, 2), 10.0 + rank))
    dist.barrier()
    if rank == 1:
        damage(slots / "1.1")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank 1: w: .*do not train on"):
        load()
    dist.barrier()
    stages = folder / "stages"
    within = Whole(net={f"layer{rank}.w": torch.full((2,), float(rank))}, seen={})
    within.held["seen"]["loss"] = torch.ones(1)
    state = {f"stage{rank}": torch.full((3,), float(rank)), "step": 7, "all": within}
    stage(stages / f"{rank}.0", state, rank=rank, world=2, step=7)
    dist.barrier()

    def resume(state):
        return restore.load(
            state,
            CheckpointSources(pool=stages),
            rank=rank,
            world=2,
            log=logging.getLogger("probe"),
        )

    mine = Whole(net={f"layer{rank}.w": torch.zeros(2)}, seen={})
    fresh = {f"stage{rank}": torch.zeros(3), "step": 0, "all": mine}
    assert resume(fresh) is not None
    assert mine.held["net"].keys() == {f"layer{rank}.w"}  # and nothing of the other stage's
    assert mine.held["net"][f"layer{rank}.w"].tolist() == [float(rank)] * 2
    assert mine.held["seen"] == {"loss": torch.ones(1)}
    assert fresh[f"stage{rank}"].tolist() == state[f"stage{rank}"].tolist()
    assert fresh["step"] == 7
    lacking = {"stage0": torch.zeros(3), "step": 0, "all": mine}
    assert resume(lacking) is not None
    assert lacking["stage1"].tolist() == [1.0] * 3, "what all ranks lack is given back to all"
    dist.barrier()
    dist.destroy_process_group()


def main(folder):
    (folder / "pool").mkdir()
    (folder / "stages").mkdir()
    processes = multiprocessing.get_context("fork")
    ranks = [processes.Process(target=run, args=(folder, rank)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    if any(one.exitcode for one in ranks):
        sys.exit("a rank failed")
    print("ok")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
