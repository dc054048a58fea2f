"""Trains a little with gloo, in one of the shapes that healthy jobs have.

    python healthy.py SHAPE SECONDS

It ends after the first step that ends SECONDS or more after the start. `SHAPES` says how long a
step takes in each shape.
"""

import math
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dlrover_py.trainer import session

Draw = random.Random
SHAPES: dict[str, Callable[[int, int, Draw], float]] = {
    "steady": lambda step, rank, draw: 0.2,
    "noisy": lambda step, rank, draw: draw.lognormvariate(math.log(0.2), 0.3),
    "heavy tail": lambda step, rank, draw: 0.1 * min(30.0, draw.paretovariate(1.5)),
    "slow start": lambda step, rank, draw: 15.0 if step == 1 else 0.2,
    "evaluations": lambda step, rank, draw: 5.0 if step % 60 == 0 else 0.2,
    "saves": lambda step, rank, draw: 1.5 if step % 40 == 0 else 0.2,
    "long steps": lambda step, rank, draw: draw.uniform(4.0, 6.0),
    "lengths": lambda step, rank, draw: draw.choice((0.1, 0.2, 0.6)),
    "uneven ranks": lambda step, rank, draw: 0.2 + 0.05 * rank,
    "epochs": lambda step, rank, draw: 8.0 if step % 150 == 0 else 0.2,
}
"""Seconds of a step, by its number, the rank and a source of random numbers of the rank."""


def main() -> None:
    shape, seconds = SHAPES[sys.argv[1]], float(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    draw = random.Random(rank)
    began, step, ends = time.monotonic(), 0, torch.zeros(1)
    while not ends:
        step += 1
        time.sleep(shape(step, rank, draw))
        ends.fill_(float(rank == 0 and time.monotonic() - began >= seconds))
        dist.all_reduce(ends)
        session.report_step(step, loss=(3 + draw.gauss(0, 0.05)) / math.log(step + 9))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
