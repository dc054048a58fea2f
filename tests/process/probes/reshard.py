"""Worlds of 4, 3, 2 and 4 ranks, one after the other: each loads what the last one has staged.

usage: reshard.py MODE FOLDER memory|storage. Each world also loads what the last one has written
with torch's own dcp.save, into a second model by torch and into a third by us, and compares them
bit for bit. Prints "ok" if all is well.
"""

import logging
import multiprocessing
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.protocol.checkpoint import Phase
from dlrover_py.storage import Store
from dlrover_py.trainer import restore
from dlrover_py.trainer.foreign import load_dcp
from dlrover_py.trainer.state import PerRank
from tests.slots import JOB, Persister, order
from tests.staged import stage

LOG = logging.getLogger("probe")

WORLDS = [4, 3, 2, 4]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(7, width)
        self.norm = nn.BatchNorm1d(width)
        self.down = nn.Linear(width, 2)

    def forward(self, x):
        return self.down(self.norm(self.up(x).relu()))


class Rows(torch.optim.Optimizer):
    """Has state of another shape than its parameters, as Adafactor has."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            grad = p.grad.square()
            now = {"row": grad.mean(-1, keepdim=True), "all": grad.mean()}
            now["all"] = now["all"].redistribute(placements=[Replicate()])
            for name, value in now.items():
                self.state[p].setdefault(name, torch.zeros_like(value)).lerp_(value, 0.1)
            p.add_(p.grad / (self.state[p]["row"] + self.state[p]["all"] + 1), alpha=-0.01)


def build(mode, world, seed):
    torch.manual_seed(seed)
    net = Net(12 if mode == "tp" else 13)  # 13: uneven shards; down's 2 rows: empty ones
    mesh = init_device_mesh("cpu", (world,))
    if mode == "ddp" or mode == "zero":
        net = DistributedDataParallel(net)
    elif mode in ("fsdp", "object", "rows"):
        fully_shard(net.up, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif mode == "tp":
        net.norm = nn.Identity()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh, plan)
    elif mode == "hsdp":
        shape = (2, 2) if world == 4 else (1, world)
        fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")))
    if mode == "zero":
        return net, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01)
    if mode == "rows":
        return net, Rows(net.parameters())
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def step(net, optimizer, rank, mode):
    torch.manual_seed(50 if mode == "tp" else rank)
    optimizer.zero_grad()
    net(torch.randn(6, 7)).square().mean().backward()
    optimizer.step()
    for buffer in net.buffers():  # else each rank has its own: ours gives that back, torch rank 0's
        dist.broadcast(buffer, 0)


def plain(net, optimizer):
    """The same state as torch alone would write it."""
    inner = getattr(optimizer, "optim", optimizer)
    names = {p: n.removeprefix("module.") for n, p in net.named_parameters()}
    return {
        "model": {k.removeprefix("module."): v for k, v in net.state_dict().items()},
        "optim": {names[p]: dict(entries) for p, entries in inner.state.items()},
    }


class Whole:
    """An object that has them both, and their states in its own."""

    def __init__(self, net, optimizer):
        self.net, self.optimizer = net, optimizer

    def state_dict(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compare(ours, theirs):
    assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
    for key, value in ours.items():
        if isinstance(value, dict):
            compare(value, theirs[key])
        else:
            one, other = local(value), local(theirs[key])
            assert one.dtype == other.dtype
            assert torch.equal(one, other), (key, one, other)


def run(mode, folder, source, number, world, rank):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet{number}", rank=rank, world_size=world
    )
    arena = folder / "arena"
    net, optimizer = build(mode, world, seed=100 + number)
    state = {"model": net, "optim": optimizer}
    if mode == "object":
        state = {"all": Whole(net, optimizer)}
    state |= {"step": 0, "mine": PerRank({"rank": -1})}
    store = Store(folder / "store") if source == "storage" else None
    found = restore.load(
        state, rank=rank, world=world, arena=arena, agent=None, store=store, log=LOG, job=JOB
    )
    if number == 0:
        assert found is None
    else:
        assert found is not None
        assert found.step == number == state["step"], found
        before = WORLDS[number - 1]
        assert found.world == before
        assert bool(found.folder) == (source == "storage")
        assert state["mine"].value["rank"] == (rank if rank < before else -1)
        other, theirs = build(mode, world, seed=200 + number)
        step(other, theirs, rank, mode)  # so that it has state to load into
        target = plain(other, theirs)
        dcp.load(target, checkpoint_id=folder / f"dcp{number}")
        for key, value in target["model"].items():  # not all of it was loaded in place
            with torch.no_grad():
                local(
                    other.state_dict()[("module." if mode in ("ddp", "zero") else "") + key]
                ).copy_(local(value))
        compare(plain(net, optimizer), target)
        third, its = build(mode, world, seed=300 + number)
        only = {"model": third}  # the optimizers' keys are another form of torch's
        load_dcp(only, folder / f"dcp{number}", rank=rank, world=world, strict=False, log=LOG)
        compare(plain(third, its)["model"], target["model"])
    step(net, optimizer, rank, mode)
    dcp.save(plain(net, optimizer), checkpoint_id=folder / f"dcp{number + 1}")
    state["step"], state["mine"] = number + 1, PerRank({"rank": rank})
    dist.barrier()
    for old in arena.iterdir() if rank == 0 else ():
        old.unlink()
    dist.barrier()
    stage(arena / f"{rank}.0", state, rank=rank, world=world, step=number + 1, round=1, job=JOB)
    dist.barrier()
    dist.destroy_process_group()


def persist(folder, step, world):
    """Have it in storage, and nowhere else."""
    one, arena = Persister(), folder / "arena"
    try:
        ranks = tuple(range(world))
        one.send(order(arena, folder / "store", f"a{step}", step=step, world=world, ranks=ranks))
        ended = one.end(f"a{step}")
    finally:
        one.close()
    assert ended.phase is Phase.DONE, ended.why
    for slot in arena.iterdir():
        slot.unlink()


def main(mode, folder, source):
    (folder / "arena").mkdir()
    processes = multiprocessing.get_context("fork")
    for number, world in enumerate(WORLDS):
        ranks = [
            processes.Process(target=run, args=(mode, folder, source, number, world, rank))
            for rank in range(world)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            sys.exit(f"{mode}: world {number} of {world} ranks failed")
        if source == "storage":
            persist(folder, number + 1, world)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
