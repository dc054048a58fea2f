"""Trains a network with DeepSpeed, as :mod:`tests.exact_runs` demands.

FOLDER/deepspeed.json is the config. Without an agent the program is a world of one.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss

from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.integrations.deepspeed import ElasticEngine


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    # Without this, DeepSpeed compiles operations for CPUs when it starts, which takes a minute.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = network().float()
    model.register_buffer("steps_seen", torch.zeros(()))
    loader = ElasticLoader(
        Points(torch.float32),
        global_batch=GLOBAL_BATCH,
        micro_batch=3,
        seed=3,
        seed_samples=True,
        ledger=record.folder / "ledger",
        num_workers=1,
    )
    elastic = ElasticEngine(
        loader, model=model, config=Path(sys.argv[1]) / "deepspeed.json", dist_init_required=False
    )
    engine = elastic.engine
    state = {"engine": elastic, "data": loader}
    checkpointer = Checkpointer()
    checkpointer.load(state)
    while loader.epoch < record.epochs and not checkpointer.should_stop:
        for step in loader:
            seen: list[int] = []
            for samples, inputs, targets in step:
                elastic.backward(step, mse_loss(engine(inputs), targets))
                seen += samples.tolist()[: step.micro_batch.samples]
            elastic.step(step)
            model.steps_seen += 1
            record.trained(loader.steps, step.epoch, seen)
            checkpointer.save(loader.steps, state)
            if checkpointer.should_stop:
                break
    checkpointer.save(loader.steps, state, force=True)
    checkpointer.close()
    if loader.epoch == record.epochs:
        assert engine.global_steps == model.steps_seen == loader.steps
        assert engine.global_samples == record.epochs * len(Points())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            record.finished(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
