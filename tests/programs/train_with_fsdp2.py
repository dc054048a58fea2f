"""Trains a network of ``fully_shard`` with clipped gradients and a ``GradScaler``.

It does what :mod:`tests.exact_runs` demands. One sample has an infinite loss, so the scaler skips
a step. FOLDER/scaler.json has the state of the scaler at the end.
"""

import json
import math
import os

import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.data import ElasticLoader

OVERFLOW = 77
"""The sample with an infinite loss, in each epoch."""


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    model = network()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=9)
    loader = ElasticLoader(
        Points(),
        global_batch=GLOBAL_BATCH,
        micro_batch=3,
        seed=3,
        seed_samples=True,
        ledger=record.folder / "ledger",
        num_workers=1,
    )
    state = {"model": model, "optimizer": optimizer, "scaler": scaler, "data": loader}
    checkpointer = Checkpointer()
    checkpointer.load(state)
    while loader.epoch < record.epochs and not checkpointer.should_stop:
        for step in loader:
            seen: list[int] = []
            for samples, inputs, targets in step:
                with step.sync(model):
                    loss = mse_loss(model(inputs), targets)
                    if OVERFLOW in samples:
                        loss = loss * math.inf
                    scaler.scale(step.weigh(loss)).backward()
                seen += samples.tolist()[: step.micro_batch.samples]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step.commit()
            record.trained(loader.steps, step.epoch, seen)
            checkpointer.save(loader.steps, state)
            if checkpointer.should_stop:
                break
    checkpointer.save(loader.steps, state, force=True)
    checkpointer.close()
    if loader.epoch == record.epochs:
        for layer in model.modules():
            if hasattr(layer, "unshard"):
                layer.unshard()
        record.finished(model)
        if record.rank == 0:
            (record.folder / "scaler.json").write_text(json.dumps(scaler.state_dict()))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
