"""Trains a network of two tensor-parallel ranks, on exact data of the data-parallel dimension.

It does what :mod:`tests.exact_runs` demands. The ranks of one copy of the model must have the same
samples: it fails if they have not. Without a process group the model is whole.
"""

import os

import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss

from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.data import ElasticLoader


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    model, mesh = network(), None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        shape = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ElasticLoader(
        Points(),
        global_batch=GLOBAL_BATCH,
        micro_batch=3,
        seed=3,
        seed_samples=True,
        ledger=record.folder / "ledger",
    )
    loader.weigh_by(lambda batch: len(batch[0]))  # as without: the ranks of a copy count once
    if mesh is not None:
        loader.divide_among(mesh["dp"])
    state = {"model": model, "optimizer": optimizer, "data": loader}
    checkpointer = Checkpointer()
    checkpointer.load(state)
    while loader.epoch < record.epochs and not checkpointer.should_stop:
        for step in loader:
            seen: list[int] = []
            for samples, inputs, targets in step:
                with step.sync(model):
                    step.weigh(mse_loss(model(inputs), targets)).backward()
                seen += samples.tolist()[: step.micro_batch.samples]
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
            is_first = True
            if mesh is not None:
                copies: list[list[int]] = [[], []]
                dist.all_gather_object(copies, seen, group=mesh["tp"].get_group())
                assert copies[0] == copies[1], copies
                is_first = mesh["tp"].get_local_rank() == 0
            record.trained(loader.steps, step.epoch, seen if is_first else [])
            checkpointer.save(loader.steps, state)
            if checkpointer.should_stop:
                break
    checkpointer.close()
    if loader.epoch == record.epochs:
        whole = network()
        for mine, theirs in zip(whole.parameters(), model.parameters(), strict=True):
            with torch.no_grad():
                mine.copy_(theirs.full_tensor() if mesh is not None else theirs)
        record.finished(whole)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
