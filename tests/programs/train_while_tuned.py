"""Trains as :mod:`tests.exact_runs` demands, and writes down how each rank divides its steps.

FOLDER/ROUND-RANK.sizes has a line ``STEP WORKERS SIZE …`` for each step: the number of loader
workers, and the samples of each micro-batch. After EPOCHS the program takes a limit: it
asks for more memory than there is if a micro-batch has more samples.
"""

import sys

import torch
import torch.distributed as dist
from exact_task import GLOBAL_BATCH, Points, Record, network  # type: ignore[import-not-found]
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader


def main() -> None:
    record = Record(pause_s=1.5)
    limit = int(sys.argv[3]) if len(sys.argv) > 3 else GLOBAL_BATCH
    sizes_of = record.folder / f"{session.round()}-{record.rank}.sizes"
    torch.set_num_threads(1)
    model = network()
    if session.world().size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ElasticLoader(
        Points(),
        global_batch=GLOBAL_BATCH,
        micro_batch=1,
        seed=3,
        seed_samples=True,
        ledger=record.folder / "ledger",
        num_workers=1,
        persistent_workers=True,
    )
    state = {"model": model, "optimizer": optimizer, "data": loader}
    checkpointer = Checkpointer()
    checkpointer.load(state)
    with sizes_of.open("a", buffering=1) as lines:
        while loader.epoch < record.epochs and not checkpointer.should_stop:
            for step in loader:
                seen: list[int] = []
                sizes: list[int] = []
                for samples, inputs, targets in step:
                    if len(samples) > limit:
                        torch.empty(1 << 60)
                    with step.sync(model):
                        step.weigh(mse_loss(model(inputs), targets)).backward()
                    seen += samples.tolist()[: step.micro_batch.samples]
                    sizes.append(step.micro_batch.samples)
                optimizer.step()
                optimizer.zero_grad()
                step.commit()
                print(loader.steps, loader.loader.num_workers, *sizes, file=lines)
                record.trained(loader.steps, step.epoch, seen)
                checkpointer.save(loader.steps, state)
                if checkpointer.should_stop:
                    break
    checkpointer.close()
    if loader.epoch == record.epochs:
        record.finished(model)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
