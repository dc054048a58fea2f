"""Trains a small network with ``ElasticLoop``, as :mod:`tests.exact_runs` demands."""

import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer import Checkpointer, ElasticLoop, session
from dlrover_py.trainer.data import ElasticLoader


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    model = network()
    if session.world().size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ElasticLoader(
        Points(),
        global_batch=GLOBAL_BATCH,
        micro_batch=3,
        seed=3,
        seed_samples=True,
        ledger=record.folder / "ledger",
        num_workers=2,
    )
    seen: list[int] = []

    def note_step() -> None:
        assert loader.current is not None
        record.trained(loader.steps, loader.current.epoch, seen)
        seen.clear()

    loop = ElasticLoop(model, optimizer, loader, Checkpointer(), after_step=note_step)
    for _ in loop.epochs(record.epochs):
        for samples, inputs, targets in loop:
            assert loader.current is not None
            seen += samples.tolist()[: loader.current.micro_batch.samples]
            loop.step(mse_loss(model(inputs), targets))
    if loader.epoch == record.epochs:
        record.finished(model)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
