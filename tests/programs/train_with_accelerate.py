"""Trains a small network with Accelerate, as :mod:`tests.exact_runs` demands."""

import torch
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss

from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.integrations.accelerate import ElasticAccelerator


def main() -> None:
    record = Record()
    torch.set_num_threads(1)
    accelerator = ElasticAccelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.97)
    loader = ElasticLoader(
        Points(),
        global_batch=GLOBAL_BATCH,
        micro_batch=3,
        seed=3,
        seed_samples=True,
        ledger=record.folder / "ledger",
        num_workers=2,
    )
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    seen: list[int] = []
    for epoch in accelerator.epochs(record.epochs):
        for samples, inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen += samples.tolist()[: loader.micro_batch.samples]
                if accelerator.sync_gradients:
                    record.trained(loader.steps + 1, epoch, seen)
                    seen.clear()
    if loader.epoch == record.epochs:
        record.finished(model)
    accelerator.end_training()


if __name__ == "__main__":
    main()
