"""Counts on a parameter server: buckets 0 and 2 of 8 are asked for twice as many rows as others.

    count_hot_rows.py FOLDER

Each step adds one to all rows, until ``FOLDER/enough`` exists. At the end it writes the number of
steps, and the different values of its rows, into ``FOLDER/rows``.
"""

import sys
from pathlib import Path
from threading import Event

import numpy as np

from dlrover_py import ps
from dlrover_py.ps.hashing import bucket_of, salt_of

BUCKETS, ROWS, HOT = 8, 50, (0, 2)
folder = Path(sys.argv[1])
ids = np.arange(20_000, dtype=np.int64)
found = bucket_of(ids, salt_of("count"), BUCKETS)
chosen = np.concatenate([ids[found == one][: ROWS * (1 + (one in HOT))] for one in range(BUCKETS)])
grads = np.full((len(chosen), 1), -1.0, np.float32)
client = ps.connect()
client.create(ps.TableSpec("count", 1, ps.sgd(1.0), ps.uniform(0.0, 0.0)))
steps = 0
while not (folder / "enough").exists():
    client.push({"count": (chosen, grads)}).result()
    steps += 1
    Event().wait(0.02)
rows = client.pull({"count": chosen}).result()["count"]
(folder / "rows").write_text(f"{steps} {sorted(set(rows[:, 0].tolist()))}")
client.close()
