"""Trains a small network with ``ElasticLoader``, as :mod:`tests.exact_runs` demands."""

import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer import Checkpointer, session
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
