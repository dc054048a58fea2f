"""Pushes the same number for all ids in each synchronous step, so that half a step can be seen.

    steps_on_ps.py ACCESS NAME NUMBER WORLD STEPS

``steps.NAME`` beside ACCESS has a line for each step that has ended.
"""

import sys
from pathlib import Path

import numpy as np

from dlrover_py import ps

TABLE = ps.TableSpec("t", 1, ps.sgd(1.0), ps.uniform(0.0, 0.0))
IDS = np.arange(500)


def main() -> None:
    access, name = Path(sys.argv[1]), sys.argv[2]
    number, world, steps = (int(one) for one in sys.argv[3:])
    grads = np.full((len(IDS), 1), -number, np.float32)
    with ps.connect(access, name) as client:
        client.create(TABLE)
        client.use(ps.sync(silence_s=1.0), world)
        with access.with_name(f"steps.{name}").open("w", buffering=1) as log:
            for step in range(steps):
                rows = client.pull({"t": IDS}).result()["t"]
                assert (rows == rows[0]).all(), "half a step"
                client.push({"t": (IDS, grads)}).result()
                log.write(f"{step}\n")


if __name__ == "__main__":
    main()
