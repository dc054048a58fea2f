"""Trains a little with gloo, until something makes it slow: python slow_down.py HOW RANK SECONDS.

After so many seconds the rank gets slow in the way HOW: ``loader`` (its data come late), ``gc`` (it
collects garbage), ``slower`` (it computes longer, by half of the time that a step has taken so
far), ``slower-10`` (by a tenth of it), ``quota``
(the control group in the variable SLOW_GROUP gets half of the CPU time that it uses), ``link`` (the
network of this namespace gets a lower rate), or ``none``.
"""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from dlrover_py.trainer import session

HOW, RANK, AFTER_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
CPU_S, STEP_S = 0.03, 0.15
"""CPU seconds that a step computes, and seconds that it takes at least."""
EXTRA = {"slower": 0.5, "slower-10": 0.1}
"""Share of the usual time of a step by which a rank computes longer."""


def compute(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def batches(began: float, guilty: bool) -> Iterator[torch.Tensor]:
    while True:
        if guilty and HOW == "loader" and time.monotonic() - began > AFTER_S:
            time.sleep(STEP_S / 2)
        yield torch.ones(1 << 17)


def inject() -> None:
    """Make this rank slow from now on, if that is done once."""
    Path("slow-began").write_text(str(time.time()))
    if HOW == "quota":
        group = Path(os.environ["SLOW_GROUP"])
        quota_us = int(100_000 * 0.5 * CPU_S / STEP_S)
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    elif HOW == "link":
        rate = ["rate", "40mbit", "burst", "64kb", "latency", "200ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *rate], check=True)


def main() -> None:
    dist.init_process_group("gloo")
    guilty, began, injected, extra_s = dist.get_rank() == RANK, time.monotonic(), False, 0.0
    heap = [[number] for number in range(300_000)] if HOW == "gc" else []
    for step, batch in enumerate(session.timed(batches(began, guilty)), start=1):
        slow = guilty and time.monotonic() - began > AFTER_S
        if slow and not injected:
            injected = True
            extra_s = EXTRA.get(HOW, 0.0) * (time.monotonic() - began) / step
            inject()
        compute(CPU_S + extra_s)
        time.sleep(STEP_S - CPU_S)
        if slow and heap:
            gc.collect()
            gc.collect()
            gc.collect()
        dist.all_reduce(batch)
        session.report_step(step)


if __name__ == "__main__":
    main()
