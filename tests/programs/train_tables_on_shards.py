"""Several workers train tables on leased shards; the tables count how often each sample was seen.

    train_tables_on_shards.py FOLDER SAMPLES EPOCHS

The samples are the numbers below ``SAMPLES``. Model, ledger and tables are one state, which is
saved after each fourth step. Each step of rank 0 is a line of ``FOLDER/steps``. At the end, rank 0
writes the counts of the model, and the rows of both tables, into ``FOLDER/counts``.
"""

import json
import sys
from pathlib import Path
from threading import Event

import numpy as np
import torch
import torch.distributed as dist

from dlrover_py import ps
from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import MapSource, ShardLoader

TABLES = (
    ps.TableSpec("seen", 1, ps.sgd(1.0), ps.uniform(0.0, 0.0)),
    ps.TableSpec("slots", 1, ps.adagrad(0.1), ps.uniform(0.0, 0.0)),
)
"""The rows of the second one depend on the number of gradients by the optimizer's values, too."""


def rows_of(client: ps.PsClient, samples: int) -> list[list[float]]:
    """Return the rows of both tables."""
    rows = client.pull({spec.name: np.arange(samples) for spec in TABLES}).result()
    return [rows[spec.name][:, 0].tolist() for spec in TABLES]


def push(client: ps.PsClient, batch: list[int]) -> None:
    """Train rows on some samples."""
    ids = np.array(batch, np.int64)
    grads = np.full((len(ids), 1), -1, np.float32)
    client.push({spec.name: (ids, grads) for spec in TABLES}).result()


def main() -> None:
    folder, samples, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    client = ps.connect()
    for spec in TABLES:
        client.create(spec)
    model = torch.zeros(samples, dtype=torch.int64)
    steps = torch.zeros(1, dtype=torch.int64)
    source = MapSource(range(samples), shard_size=7)
    loader = ShardLoader("train", source, epochs=epochs, seed=1)
    state = {"model": model, "steps": steps, "data": loader, "tables": ps.tables(client)}
    checkpointer = Checkpointer(folder / "checkpoints", every=4, persist_every=12, keep=2)
    checkpointer.load(state)
    pause, rank = Event(), dist.get_rank()
    with (folder / "steps").open("a", encoding="ascii") as file:
        while not loader.over:
            for batch in loader.batches(3):
                update = torch.bincount(torch.tensor(batch, dtype=torch.int64), minlength=samples)
                dist.all_reduce(update)
                model += update
                if batch:
                    push(client, batch)
                steps += 1
                loader.commit()
                if int(steps) % 4 == 0:
                    checkpointer.save(int(steps), state)
                session.report_step(int(steps))
                if rank == 0:
                    file.write(f"{int(steps)}\n")
                    file.flush()
                pause.wait(0.03)
    dist.barrier()
    if rank == 0:
        found = [model.tolist(), *rows_of(client, samples)]
        (folder / "counts").write_text(json.dumps(found), encoding="ascii")
    dist.barrier()
    checkpointer.close()
    client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
