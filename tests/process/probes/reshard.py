"""Worlds of 4, 3, 2 and 4 ranks, one after the other: each loads what the last one has saved.

usage: reshard.py MODE FOLDER. What is staged each world loads from the memory of its own node, from
two peers that have half of the slots each, and from storage, into a model each; what the last one
has written with torch's own dcp.save it loads into another by torch, and into one more by us. They
are the same bit for bit, and worlds take turns in which of them they train on with. Prints "ok" if
all is well.
"""

import asyncio
import logging
import multiprocessing
import os
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it, in each rank anew
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

from dlrover_agent.checkpoint.server import TransferServer
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.checkpoint.transfer import TransferConnection
from dlrover_py.protocol.agents import (
    PersistPhase,
    ReplicaLocation,
    ReplicaLocations,
    RestoreCandidate,
    RestoreCandidates,
)
from dlrover_py.protocol.persister import WriteReply, read_line
from dlrover_py.trainer import restore
from dlrover_py.trainer.candidates import CheckpointSources
from dlrover_py.trainer.dcp_import import load_dcp
from dlrover_py.trainer.state_dict import PerRank
from tests.slots import JOB, Lookup, order
from tests.staged import stage

LOG = logging.getLogger("probe")

WORLDS = [4, 3, 2, 4]
SOURCES = ["memory", "peer", "storage"]
PEERS = ["n1", "n2"]
HERE = "127.0.0.1"


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
            # Where torch would leave them depends on its version and on the size of the world.
            rows = p.placements if p.dim() > 1 else [Replicate()]
            now["row"] = now["row"].redistribute(placements=rows)
            now["all"] = now["all"].redistribute(placements=[Replicate()])
            for name, value in now.items():
                self.state[p].setdefault(name, torch.zeros_like(value)).lerp_(value, 0.1)
            change = p.grad / (self.state[p]["row"] + self.state[p]["all"] + 1)
            p.add_(change.redistribute(placements=p.placements), alpha=-0.01)


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


def restored(mode, folder, source, number, rank):
    """A model and its optimizer, as one source has them."""
    world = WORLDS[number]
    net, optimizer = build(mode, world, seed=100 + number)
    state = {"model": net, "optim": optimizer}
    if mode == "object":
        state = {"all": Whole(net, optimizer)}
    state |= {"step": 0, "mine": PerRank({"rank": -1})}
    agent = TransferConnection.local(folder / "n0.sock") if source == "peer" else None
    found = restore.load(
        state,
        CheckpointSources(
            pool=None if source == "storage" else folder / ("pool" if source == "memory" else "n0"),
            agent=agent,
            store=CheckpointDirectory(folder / "store") if source == "storage" else None,
            job=JOB,
        ),
        rank=rank,
        world=world,
        log=LOG,
    )
    if agent is not None:
        agent.close()
    if number == 0:
        assert found is None
        return state, net, optimizer
    assert found is not None
    assert found.step == number == state["step"], found
    before = WORLDS[number - 1]
    assert found.world == before
    assert found.nbytes.keys() == {source}, found.nbytes
    assert state["mine"].value["rank"] == (rank if rank < before else -1)
    return state, net, optimizer


def run(mode, folder, number, rank):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    world = WORLDS[number]
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet{number}", rank=rank, world_size=world
    )
    ours = [restored(mode, folder, source, number, rank) for source in SOURCES]
    if number:
        other, theirs = build(mode, world, seed=200 + number)
        step(other, theirs, rank, mode)  # so that it has state to load into
        target = plain(other, theirs)
        dcp.load(target, checkpoint_id=folder / f"dcp{number}")
        for key, value in target["model"].items():  # not all of it was loaded in place
            with torch.no_grad():
                local(
                    other.state_dict()[("module." if mode in ("ddp", "zero") else "") + key]
                ).copy_(local(value))
        for _, net, optimizer in ours:
            compare(plain(net, optimizer), target)
        third, its = build(mode, world, seed=300 + number)
        only = {"model": third}  # the optimizers' keys are another form of torch's
        load_dcp(only, folder / f"dcp{number}", rank=rank, world=world, strict=False, log=LOG)
        compare(plain(third, its)["model"], target["model"])
    state, net, optimizer = ours[number % len(ours)]
    step(net, optimizer, rank, mode)
    dcp.save(plain(net, optimizer), checkpoint_id=folder / f"dcp{number + 1}")
    state["step"], state["mine"] = number + 1, PerRank({"rank": rank})
    dist.barrier()  # all have read what is replaced now
    for node in ("pool", *PEERS) if rank == 0 else ():
        for old in (folder / node).iterdir():
            old.unlink()
    dist.barrier()
    slot = folder / "pool" / f"{rank}.0"
    stage(slot, state, rank=rank, world=world, step=number + 1, round=1, job=JOB)
    os.link(slot, folder / PEERS[rank % len(PEERS)] / slot.name)
    dist.barrier()
    dist.destroy_process_group()


def serve(folder, ready):
    """Depots of three nodes, the first of which holds nothing; until it is killed."""

    def held():
        return [(node, s) for node in PEERS for _, s in shm.scan(folder / node)]

    async def candidates(_):
        found = {s.id: s.world for _, s in held()}
        newest = sorted(found, reverse=True)
        return RestoreCandidates(
            candidates=[RestoreCandidate(**asdict(id_), world=found[id_]) for id_ in newest]
        )

    async def locations(which):
        return ReplicaLocations(
            locations=[
                ReplicaLocation(
                    rank=s.rank,
                    node=node,
                    addr=HERE,
                    port=depots[node].port,
                    part=s.part,
                    private_only=s.private_only,
                )
                for node, s in held()
                if s.id == which
            ]
        )

    async def run():
        await asyncio.gather(*(depot.run() for depot in depots.values()))

    depots = {
        node: TransferServer(
            folder / node,
            JOB,
            "token",
            folder / f"{node}.sock",
            lookup=Lookup(candidates, locations),
            addr=HERE,
        )
        for node in ("n0", *PEERS)
    }
    ready.set()
    asyncio.run(run())


def persist(persister, folder, step, world):
    """Have it in storage too."""
    ranks = tuple(range(world))
    wish = order(
        folder / "pool", folder / "store", f"a{step}", step=step, world=world, ranks=list(ranks)
    )
    persister.stdin.write(wish.encode())
    persister.stdin.flush()
    for line in persister.stdout:
        said = read_line(line)
        assert isinstance(said, WriteReply)
        if said.phase in (PersistPhase.DONE, PersistPhase.FAILED):
            assert said.phase is PersistPhase.DONE, said.why
            return
    raise AssertionError("the persister has ended")


def main(mode, folder):
    for node in ("pool", "n0", *PEERS):
        (folder / node).mkdir()
    processes = multiprocessing.get_context("fork")
    ready = processes.Event()
    nodes = processes.Process(target=serve, args=(folder, ready), daemon=True)
    nodes.start()
    argv = [sys.executable, "-m", "dlrover_py.checkpoint.writer"]
    persister = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert ready.wait(60), "the depots do not serve"
        for number, world in enumerate(WORLDS):
            ranks = [
                processes.Process(target=run, args=(mode, folder, number, rank))
                for rank in range(world)
            ]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
            if any(one.exitcode for one in ranks):
                sys.exit(f"{mode}: world {number} of {world} ranks failed")
            if number + 1 < len(WORLDS):
                persist(persister, folder, number + 1, world)
    finally:
        persister.kill()
        persister.wait()
        nodes.kill()
        nodes.join()
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
