"""Counts on a parameter server, without torch, and saves the counts with the position in the data.

    count_with_cuts.py PAUSE EVERY

Each step adds ones to rows of its rank, and to one row of all ranks. After each EVERY steps, all
ranks save. The step is the position: its ids depend on it and on the rank alone. A rank begins with
the newest cut. After /tmp/enough exists, it prints its rank, its steps, its rows that are wrong,
and the row of all ranks.
"""

import sys
import time
from pathlib import Path

import numpy as np

from dlrover_py import ps
from dlrover_py.trainer import session

OWN, BATCH = 500, 40
pause, every = float(sys.argv[1]), int(sys.argv[2])
rank = session.world().rank
expected = np.zeros(OWN, np.float32)
client = ps.connect()
for name in ("own", "all"):
    client.create(ps.TableSpec(name, 1, ps.sgd(1.0), ps.uniform(0.0, 0.0)))


def ids_of(step: int) -> np.ndarray:
    return np.random.default_rng((rank, step)).choice(OWN, BATCH, replace=False)


step = client.restore() or 0
print("begins at", rank, step, flush=True)
for before in range(step):
    expected[ids_of(before)] += 1
one, grads = np.full((1, 1), -1.0, np.float32), np.full((BATCH, 1), -1.0, np.float32)
while not Path("/tmp/enough").exists():
    ids = ids_of(step)
    own = ids.astype(np.int64) * 1000 + rank
    client.push({"own": (own, grads), "all": (np.array([7]), one)}).result()
    expected[ids] += 1
    step += 1
    session.report_step(step)
    if step % every == 0:
        client.save(step)
    time.sleep(pause)
mine = np.arange(OWN, dtype=np.int64) * 1000 + rank
rows = client.pull({"own": mine, "all": np.array([7])}).result()
wrong = int((rows["own"][:, 0] != expected).sum())
print("counted", rank, step, wrong, int(rows["all"][0, 0]), flush=True)
client.close()
