"""One of some ranks of a gloo group, which write down gradients and learning rates.

    python weigh_in_gloo_ranks.py RANK FOLDER

Ranks 0 to 2 train on sentences of unequal length; then ranks 0 and 1 do, and use AdaScale. Each
writes FOLDER/RANK.json. The modules of the tasks are imported by the test, too.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import BatchScaling, ElasticLoader, PerWorker

SENTENCES, LONGEST, WORDS = 22, 9, 12
BATCH = 10
"""Sentences of a step. Three ranks cannot divide it, and the last step has fewer than ranks."""
PADDING = -100


def sentences() -> TensorDataset:
    """Return words and the words that follow; ends are padded, and one sentence is all padding."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(WORDS, (SENTENCES, LONGEST), generator=generator)
    labels = torch.randint(WORDS, (SENTENCES, LONGEST), generator=generator)
    lengths = torch.randint(1, LONGEST + 1, (SENTENCES,), generator=generator)
    lengths[5] = 0
    labels[torch.arange(LONGEST) >= lengths[:, None]] = PADDING
    return TensorDataset(words, labels)


def language_model() -> nn.Module:
    """Return a network with the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Tanh(), nn.Linear(6, WORDS)).double()


def flat(gradients: Any) -> list[float]:
    """Return all numbers of some gradients."""
    return [number for each in gradients for number in each.flatten().tolist()]


def weigh_tokens(micro_batch: int | None) -> list[list[float]]:
    """Return the gradient of each step of an epoch, as ``DistributedDataParallel`` has it."""
    model = language_model()
    ddp = DistributedDataParallel(model)
    loader = ElasticLoader(sentences(), global_batch=BATCH, micro_batch=micro_batch, seed=1)
    loader.weigh_by(lambda batch: (batch[1] != PADDING).sum())
    found = []
    for step in loader:
        for words, labels in step:
            with step.sync(ddp):
                loss = cross_entropy(ddp(words).flatten(0, 1), labels.flatten(), reduction="sum")
                step.weigh(loss, reduction="sum").backward()
        found.append(flat(parameter.grad for parameter in model.parameters()))
        model.zero_grad()
        step.commit()
    return found


def refuse_a_weight() -> str:
    """Return the error of a weight that is negative on rank 1 only."""
    sign = -1 if dist.get_rank() == 1 else 1
    loader = ElasticLoader(sentences(), global_batch=BATCH)
    loader.weigh_by(lambda _: sign)
    try:
        next(iter(next(iter(loader))))
    except ConfigError as error:
        return str(error)
    return ""


def use_adascale() -> list[dict[str, Any]]:
    """Return for each step the gradient of this rank's samples, and the factor that was used."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(96, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(96, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model, copy = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = ElasticLoader(TensorDataset(inputs, inputs[:, :1] + noise), global_batch=PerWorker(4))
    scaling = BatchScaling(optimizer, loader, base_batch=4, rule="adascale")
    found = []
    for step in loader:
        for points, targets in step:
            copy.load_state_dict(model.state_dict())  # the scaling sees each gradient of the model
            mine = torch.autograd.grad(mse_loss(copy(points), targets), [*copy.parameters()])
            with step.sync(ddp):
                step.weigh(mse_loss(ddp(points), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
        step.commit()
        found.append({"gradient": flat(mine), "factor": scaling.factor})
    return found


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for world in (3, 2):
        if rank < world:
            store = dist.FileStore(str(folder / f"store-{world}"), world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
            found[f"tokens of {world}"] = weigh_tokens(2), weigh_tokens(None)
            if world == 2:
                found["refused"] = refuse_a_weight()
                found["adascale"] = use_adascale()
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
