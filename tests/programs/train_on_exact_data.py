"""Trains a small network, and writes down which samples each step was computed from.

python train_on_exact_data.py FOLDER EPOCHS [FIRST_ROUND]

Each rank adds the lines ``STEP EPOCH SAMPLE …`` to FOLDER/ROUND-RANK.txt before the step is saved.
FIRST_ROUND is added to the number of the round, where several jobs follow each other. Rank 0 writes
the weights to FOLDER/weights.json at the end. Steps beyond the number in FOLDER/gate are slow.
"""

import json
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader

SAMPLES, GLOBAL_BATCH = 407, 10


class Points(torch.utils.data.Dataset):  # type: ignore[misc]
    """Random points with a random transform of their own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        point = self.inputs[index]
        return index, point + 0.1 * torch.rand(6, dtype=torch.float64), point.sum()[None].sin()


def main() -> None:
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    first_round = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    place = session.world()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    if place.size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ElasticLoader(
        Points(),
        global_batch=GLOBAL_BATCH,
        micro_batch=3,
        seed=3,
        seed_samples=True,
        num_workers=2,
    )
    state = {"model": model, "optimizer": optimizer, "data": loader}
    checkpointer = Checkpointer()
    checkpointer.load(state)
    gate = folder / "gate"
    number = first_round + session.round()
    ledger = (folder / f"{number}-{place.rank}.txt").open("a", buffering=1)
    while loader.epoch < epochs and not checkpointer.should_stop:
        for step in loader:
            seen: list[int] = []
            for samples, inputs, targets in step:
                with step.sync(model):
                    step.weigh(mse_loss(model(inputs), targets)).backward()
                seen += samples.tolist()[: step.micro_batch.samples]
            optimizer.step()
            optimizer.zero_grad()
            step.commit()
            print(loader.steps, step.epoch, *seen, file=ledger)
            session.report_step(loader.steps)
            checkpointer.save(loader.steps, state)
            if checkpointer.should_stop:
                break
            if gate.exists() and loader.steps >= int(gate.read_text()):
                threading.Event().wait(1.0)
    checkpointer.close()
    if place.rank == 0 and loader.epoch == epochs:
        weights = [value for p in model.parameters() for value in p.flatten().tolist()]
        (folder / "weights.json").write_text(json.dumps(weights))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
