"""Predict clicks with a DeepFM model, whose large tables are on a parameter server.

By default the clicks are synthetic: a seeded model draws them. Few users and items have most of the
clicks, as in a real log. With ``--impressions`` they are real.
"""

import argparse
import csv
import hashlib
import io
import os
import time
import zipfile
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from dlrover_py import ps
from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader

FIELDS = {"user": 1_000_000, "item": 200_000, "shop": 20_000, "hour": 24, "device": 6}
"""Number of ids of each field of synthetic clicks."""
REAL_FIELDS = {
    "log": 6, "position": 3, "hour": 24, "item": 240, "user": 1 << 40, "user_item": 1 << 40
}  # fmt: skip
"""The same of real impressions. Users have hashes as ids, so their tables have no known size."""
LOGS = [
    f"{policy}/{name}/{name}" for policy in ("random", "bts") for name in ("all", "men", "women")
]
"""The logs in the Open Bandit Dataset: how items were chosen, and for which shop."""
LARGE = 10_000
"""Rows from which a table is on the servers."""
TEST_SAMPLES = 20_000


class DeepFM(nn.Module):  # type: ignore[misc]
    """A factorization machine and a small network on the same embeddings."""

    def __init__(self, fields: Mapping[str, int], dim: int = 16) -> None:
        """Create the model.

        Args:
            fields: number of ids of each field.
            dim: size of an embedding.
        """
        super().__init__()
        # Of each row, the first value is the linear part. A table on "meta" needs no memory.
        self.rows = nn.ModuleDict(
            {
                name: nn.Embedding(size, 1 + dim, device="meta" if size >= LARGE else None)
                for name, size in fields.items()
            }
        )
        for table in self.rows.values():
            nn.init.normal_(table.weight, std=0.01)
        self.deep = nn.Sequential(nn.Linear(len(fields) * dim, 64), nn.ReLU(), nn.Linear(64, 1))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logit of a click, shape ``[n]``, for ids of shape ``[n, fields]``."""
        tables = zip(self.rows.values(), ids.unbind(1), strict=True)
        rows = torch.stack([table(one) for table, one in tables], dim=1)
        linear, factors = rows[..., 0].sum(1), rows[..., 1:]
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return self.bias + linear + pairs + self.deep(factors.flatten(1)).squeeze(1)


def main() -> None:
    """Train the model, and print its log loss on held-out samples."""
    args = parse_args()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if args.impressions:
        fields, (ids, clicked) = REAL_FIELDS, impressions(args.impressions)
    else:
        fields, (ids, clicked) = FIELDS, clicks(args.samples + TEST_SAMPLES)
    train = TensorDataset(ids[TEST_SAMPLES:], clicked[TEST_SAMPLES:])

    torch.manual_seed(1)
    model = DeepFM(fields)
    nn.init.constant_(model.bias, clicked[TEST_SAMPLES:].mean().logit())
    ps.replace_embeddings(
        model,
        min_rows=LARGE,
        optimizer=ps.adagrad(args.rows_lr),
        init=ps.normal(std=0.01),
        formats=ps.formats(pull=args.pull, push=args.push),
    )
    dense = torch.optim.Adam(model.parameters(), lr=1e-3)
    # The servers add the pushes of all workers. DDP takes the mean of the other gradients.
    optimizer = ps.Optimizer(model, dense, scale=1 / dist.get_world_size())
    ddp = DistributedDataParallel(model)
    loader = ElasticLoader(train, global_batch=args.global_batch)
    checkpointer = Checkpointer(every=args.save_every)
    state = {"model": model, "optimizer": dense, "data": loader, "tables": ps.tables()}
    if checkpointer.load(state) and dist.get_rank() == 0:
        print(f"resumed after step {loader.steps}", flush=True)

    while loader.epoch < args.epochs and not checkpointer.should_stop:
        for step in loader:
            for batch, labels in step:
                with step.sync(ddp):
                    loss = binary_cross_entropy_with_logits(ddp(batch), labels)
                    step.weigh(loss).backward()
            optimizer.step()  # returns when the servers and their copies have the gradients
            optimizer.zero_grad()
            step.commit()
            checkpointer.save(loader.steps, state)
            session.report_step(loader.steps, loss=loss)
            if loader.steps % 10 == 0 and dist.get_rank() == 0:
                print(f"step {loader.steps}: log loss {loss.item():.3f}", flush=True)
            time.sleep(args.step_delay)
            if checkpointer.should_stop:
                break
    dist.barrier()  # now the servers have the gradients of all workers
    if dist.get_rank() == 0 and loader.epoch == args.epochs:
        model.eval()
        labels = clicked[:TEST_SAMPLES]
        with torch.no_grad():
            logits = model(ids[:TEST_SAMPLES])
            found = binary_cross_entropy_with_logits(logits, labels)
        guess = labels.mean().logit().expand(TEST_SAMPLES)
        print(
            f"log loss {found.item():.4f} after {loader.steps} steps; a constant guess has "
            f"{binary_cross_entropy_with_logits(guess, labels).item():.4f}; "
            f"AUC {auc(logits, labels):.3f}",
            flush=True,
        )
    checkpointer.close()
    dist.destroy_process_group()


def clicks(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return ids, shape ``[count, fields]``, and whether each impression was clicked.

    Ids of a field follow Zipf's law: the probability of id ``n`` is proportional to
    ``(n + 1) ** -1.1``. A click depends on the ids alone and on the matches between them.
    """
    random = np.random.default_rng(seed)
    ids, logit = [], np.full(count, -1.5)
    hidden = np.zeros((count, 4))
    for size in FIELDS.values():
        shares = np.cumsum(np.arange(1, size + 1) ** -1.1)
        chosen = np.searchsorted(shares, random.random(count) * shares[-1])
        logit += random.normal(0, 0.5, size)[chosen]
        taste = random.normal(0, 0.5, (size, 4))[chosen]
        logit += (hidden * taste).sum(1)
        hidden += taste
        ids.append(chosen)
    clicked = random.random(count) < 1 / (1 + np.exp(-logit))
    return torch.from_numpy(np.stack(ids, axis=1)), torch.from_numpy(clicked.astype(np.float32))


def impressions(path: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return the same of the impressions in the package ``obp``, in a random order.

    Args:
        path: its wheel. It has six logs of 10,000 impressions from the Open Bandit Dataset.
        seed: chooses the order.
    """
    ids, clicked = [], []
    with zipfile.ZipFile(path) as wheel:
        for number, name in enumerate(LOGS):
            with wheel.open(f"obp/dataset/obd/{name}.csv") as file:
                for row in csv.DictReader(io.TextIOWrapper(file)):
                    item = int(row["item_id"]) + 80 * (number % 3)
                    user = "/".join(row[f"user_feature_{i}"] for i in range(4))
                    place, hour = int(row["position"]) - 1, int(row["timestamp"][11:13])
                    hashes = hashed(user), hashed(f"{user}/{item}")
                    ids.append([number, place, hour, item, *hashes])
                    clicked.append(float(row["click"]))
    order = np.random.default_rng(seed).permutation(len(ids))
    return torch.tensor(ids)[order], torch.tensor(clicked)[order]


def hashed(text: str) -> int:
    """Return a number of 40 bits for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=5).digest(), "big")


def auc(logits: Tensor, labels: Tensor) -> float:
    """Return the probability that a random click has a higher logit than another impression.

    Args:
        logits: logits of the model, shape ``[n]``.
        labels: 1 for a click and 0 for none, shape ``[n]``.
    """
    _, places, counts = logits.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places]  # equal logits have their mean rank
    ones = labels.sum()
    zeros = len(labels) - ones
    return float(((ranks * labels).sum() - ones * (ones + 1) / 2) / (ones * zeros))


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=400_000, help="for training, if synthetic")
    parser.add_argument("--impressions", metavar="WHEEL", help="the package obp: real clicks")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global-batch", type=int, default=1000, help="samples, of all workers")
    parser.add_argument("--rows-lr", type=float, default=0.05, help="learning rate of large tables")
    parser.add_argument("--pull", default="fp16", help="format of rows in messages")
    parser.add_argument("--push", default="int8", help="format of gradients in messages")
    parser.add_argument(
        "--save-every", type=int, default=50, help="steps between two checkpoints of all"
    )
    parser.add_argument(
        "--step-delay", type=float, default=0.0, help="seconds, to have time to look"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
