"""Counts on a parameter server, without torch, until /tmp/enough exists, and checks its own rows.

    count_on_ps.py PAUSE

Each step adds ones to rows of its rank, and to one row of all ranks. At the end it prints its rank,
its steps, its rows that are wrong, and the row of all ranks.
"""

import sys
import time
from pathlib import Path

import numpy as np

from dlrover_py import ps
from dlrover_py.trainer import session

OWN, BATCH = 500, 40
rank = session.world().rank
random = np.random.default_rng(rank)
expected = np.zeros(OWN, np.float32)
client = ps.connect()
for name in ("own", "all"):
    client.create(ps.TableSpec(name, 1, ps.sgd(1.0), ps.uniform(0.0, 0.0)))
one = np.full((1, 1), -1.0, np.float32)
step = 0
while not Path("/tmp/enough").exists():
    ids = random.choice(OWN, BATCH, replace=False)
    grads = np.full((BATCH, 1), -1.0, np.float32)
    own = ids.astype(np.int64) * 1000 + rank
    client.push({"own": (own, grads), "all": (np.array([7]), one)}).result()
    expected[ids] += 1
    step += 1
    session.report_step(step)
    time.sleep(float(sys.argv[1]))
mine = np.arange(OWN, dtype=np.int64) * 1000 + rank
rows = client.pull({"own": mine, "all": np.array([7])}).result()
wrong = int((rows["own"][:, 0] != expected).sum())
print("counted", rank, step, wrong, int(rows["all"][0, 0]), flush=True)
client.close()
