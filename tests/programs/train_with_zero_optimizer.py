"""Trains a network in DDP with ``ZeroRedundancyOptimizer``, clipped gradients and a ``GradScaler``.

It does what :mod:`tests.exact_runs` demands. Its job has a directory of checkpoints.
"""

import os

import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.data import ElasticLoader


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    model = network()
    optimizer: torch.optim.Optimizer
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
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
    owner = getattr(optimizer, "optim", optimizer)
    owned = [p for group in owner.param_groups for p in group["params"]]
    steps = [int(owner.state[p]["step"]) if p in owner.state else 0 for p in owned]
    assert steps == [loader.steps] * len(owned), (steps, loader.steps)
    while loader.epoch < record.epochs and not checkpointer.should_stop:
        for step in loader:
            seen: list[int] = []
            for samples, inputs, targets in step:
                with step.sync(model):
                    loss = mse_loss(model(inputs), targets)
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
        record.finished(model)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
