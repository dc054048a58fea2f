"""Trains embeddings on a parameter server; the result does not depend on the workers' order.

    train_on_ps.py FOLDER STEPS [CUT]

Each rank has users of its own in a table with Adagrad. All ranks count into one table, whose
gradients are whole numbers. Each step is a line of ``FOLDER/steps.RANK``. At the end, a rank writes
the rows of its users and of the counters into ``FOLDER/rows.RANK``, when all ranks have ended.
With CUT, the ranks go back to the newest cut first, and save after step CUT and at the end.
After step N, a rank waits while the file ``FOLDER/hold.N`` exists.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import torch

from dlrover_py import ps


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, client: ps.PsClient) -> None:
        super().__init__()
        self.user = ps.EmbeddingBag("user", 8, mode="sum", optimizer=ps.adagrad(0.1), client=client)
        zero = ps.uniform(0.0, 0.0)
        self.count = ps.Embedding("count", 2, optimizer=ps.sgd(1.0), init=zero, client=client)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (self.user(users).sum(1) - 1).square().sum() - self.count(items).sum()


def users_of(rank: int, size: int) -> torch.Tensor:
    return torch.arange(100) * size + rank


def train(client: ps.PsClient, rank: int, size: int, steps: int, done: int = 0) -> Iterator[int]:
    """Train as a rank, after the first steps; yield the number of each step that has ended."""
    model = Model(client)
    optimizer = ps.Optimizer(model)
    random = torch.Generator().manual_seed(rank)
    for step in range(steps):
        users = users_of(rank, size)[torch.randint(0, 100, (20, 4), generator=random)]
        items = torch.randint(0, 50, (30,), generator=random)
        if step < done:
            continue
        optimizer.zero_grad()
        model(users, items).backward()
        optimizer.step()
        yield step


def rows_of(client: ps.PsClient, rank: int, size: int) -> str:
    """Return the rows of a rank's users and of the counters, a line each."""
    mine, items = users_of(rank, size).numpy(), torch.arange(50).numpy()
    rows = client.pull({"user": mine, "count": items}).result()
    return "\n".join(str(row) for name in ("user", "count") for row in rows[name].tolist())


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cut = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    client = ps.connect()
    done = client.restore() or 0 if cut >= 0 else 0
    with (folder / f"steps.{rank}").open("a", encoding="ascii") as file:
        for step in train(client, rank, size, steps, done):
            file.write(f"{step} {time.monotonic()}\n")
            file.flush()
            if step + 1 in (cut, steps) and cut >= 0:
                client.save(step + 1)
            while (folder / f"hold.{step}").exists():
                Event().wait(0.02)
    (folder / f"done.{rank}").touch()
    while not all((folder / f"done.{one}").exists() for one in range(size)):
        Event().wait(0.02)
    (folder / f"rows.{rank}").write_text(rows_of(client, rank, size))
    client.close()


if __name__ == "__main__":
    main()
