"""Trains a little with gloo, in one of the shapes that healthy jobs have.

    python healthy.py SHAPE SECONDS

It ends after the first step that ends SECONDS or more after the start. `SHAPES` says how long a
step takes in each shape that only sleeps, and `WORK` what it does in those that use the CPU.
"""

import gc
import math
import os
import random
import sys
import tempfile
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


def compute(cpu_s: float) -> None:
    """Multiply matrices for so many CPU seconds."""
    until = time.thread_time() + cpu_s
    matrix = torch.ones(128, 128)
    while time.thread_time() < until:
        matrix @ matrix


def evaluate(step: int, rank: int, draw: Draw) -> None:
    """Rank 0 alone evaluates now and then, and the others wait for it in the next all-reduce."""
    compute(15.0 if rank == 0 and step % 200 == 0 else 0.05)


def evaluate_together(step: int, rank: int, draw: Draw) -> None:
    """All ranks evaluate 100 batches now and then, with a collective for each."""
    for _ in range(100 if step % 200 == 0 else 1):
        compute(0.05)
        dist.all_reduce(torch.ones(1))


def save(step: int, rank: int, draw: Draw) -> None:
    """Rank 0 writes 300 MB to the disk now and then."""
    compute(0.05)
    if rank == 0 and step % 100 == 0:
        with tempfile.NamedTemporaryFile(dir=".") as file:
            for _ in range(30):
                file.write(bytes(10_000_000))
                os.fsync(file.fileno())


def accumulate(step: int, rank: int, draw: Draw) -> None:
    """Each step has several micro-batches; each sixteenth step has four times as many."""
    for _ in range(16 if step % 16 == 0 else 4):
        compute(0.02)


def route(step: int, rank: int, draw: Draw) -> None:
    """Ranks exchange parts of another size in each step, as with experts."""
    sizes = [
        [random.Random(3 * step + a + 2 * b).randrange(1, 500) for b in (0, 1)] for a in (0, 1)
    ]
    mine = [row[rank] for row in sizes]
    received = torch.empty(sum(mine), 64)
    dist.all_to_all_single(received, torch.ones(sum(sizes[rank]), 64), mine, sizes[rank])
    compute(0.02 + 1e-4 * sum(mine))


def collect_garbage(step: int, rank: int, draw: Draw) -> None:
    """Each step makes many objects, and collects garbage now and then."""
    cycles: list[list[object]] = [[] for _ in range(20_000)]
    for one in cycles:
        one.append(one)
    compute(0.05)
    if step % 20 == 0:
        gc.collect()


WORK: dict[str, Callable[[int, int, Draw], object]] = {
    "computes": lambda step, rank, draw: compute(0.1),
    "computes lengths": lambda step, rank, draw: compute(draw.choice((0.03, 0.06, 0.2))),
    "computes unevenly": lambda step, rank, draw: compute(0.1 + 0.04 * rank),
    "evaluates alone": evaluate,
    "evaluates": evaluate_together,
    "saves much": save,
    "accumulates": accumulate,
    "routes": route,
    "collects garbage": collect_garbage,
    "grows": lambda step, rank, draw: compute(0.05 + 0.05 * min(1.0, step / 2000)),
}
"""What each step does, in the shapes that use the CPU."""


def main() -> None:
    name, seconds = sys.argv[1], float(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    draw = random.Random(rank)
    began, step, ends = time.monotonic(), 0, torch.zeros(1)
    while not ends:
        step += 1
        if name in WORK:
            WORK[name](step, rank, draw)
        else:
            time.sleep(SHAPES[name](step, rank, draw))
        ends.fill_(float(rank == 0 and time.monotonic() - began >= seconds))
        dist.all_reduce(ends)
        session.report_step(step, loss=(3 + draw.gauss(0, 0.05)) / math.log(step + 9))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
