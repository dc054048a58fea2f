"""Measures whether the survivors of a killed worker can stay alive, beside our warm restart.

Each worker of the experiment makes a new communicator when a collective has failed, and goes on.
With ``reconfigure`` it is that of ``init_process_group(enable_reconfigure=True)`` of torch 2.15,
with ``anew`` a new process group. Workers are forks of a process that has imported torch, like
those of a zygote. The newest state of a survivor is sent to the new worker. Jobs of ``elastic-run``
take turns, without any state and with checkpoints in memory. ``--failures`` shows what goes wrong.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # what DDP and the optimizers would import later
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery import BIN, SCRIPT, LostError, spread, started, warm

LIMIT = timedelta(seconds=10)
"""Limit of a collective, and of the meeting of a new communicator. torch's own is 30 minutes."""
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(flush=True)
time.sleep(1e6)
"""
SAVES = SCRIPT
"""The script of the other benchmark, with a checkpoint in memory after each step."""
for line, instead in (
    ("import torch\n", "import torch\nfrom dlrover_py.trainer import Checkpointer\n"),
    ("step = 0\n", "saver = Checkpointer(None)\n    step = saver.load(state) or 0\n"),
    ("step += 1\n", "step += 1\n        saver.save(step, state)\n"),
    ("size, pid", "state = {'model': model, 'optimizer': optimizer}\nsize, pid"),
):
    SAVES = SAVES.replace(line, instead, 1)


def train(pipe: Connection, how: str, rank: int, world: int, port: int, width: int) -> None:
    """Train as a worker, with a new communicator after each collective that has failed."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, timeout=LIMIT)
    join = partial(dist.init_process_group, "gloo", rank=rank, world_size=world, timeout=LIMIT)
    if how == "reconfigure":
        join(store=store, enable_reconfigure=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the optimizer's tensors: they are received below
    step = 0
    while True:
        try:
            turn, handles, second_group = pipe.recv()
            times = [time.monotonic()]
            if how == "reconfigure":
                c10d._reconfigure(turn, handles, timeout=LIMIT).wait()
            else:
                join(store=dist.PrefixStore(str(turn), store))
            steps = [torch.tensor(0) for _ in range(world)]
            dist.all_gather(steps, torch.tensor(step))
            times.append(time.monotonic())
            if second_group:
                dist.barrier(dist.new_group(timeout=LIMIT))
            newest = max(steps)
            source, behind = steps.index(newest), [r for r in range(world) if steps[r] < newest]
            tensors = [p.detach() for p in model.parameters()]
            tensors += [t for s in optimizer.state.values() for t in s.values()]
            for tensor in tensors:
                for other in behind if rank == source else ():
                    dist.send(tensor, other)
                if rank in behind:
                    dist.recv(tensor, source)
            step = int(newest)
            times.append(time.monotonic())
            # A DDP object whose backward pass has failed refuses the next one.
            ddp = DistributedDataParallel(model, init_sync=False)
            while True:
                optimizer.zero_grad()
                ddp(torch.randn(32, 64)).square().mean().backward()
                optimizer.step()
                step += 1
                if len(times) == 3:
                    times.append(time.monotonic())
                    pipe.send(("stepped", times))
        except RuntimeError:
            pipe.send(("failed", time.monotonic()))
            ddp = None
            if how == "anew" and dist.is_initialized():
                dist.destroy_process_group()  # closes the connections, so that more ranks fail


class Job:
    """Workers of one process group, as their launcher sees them."""

    def __init__(self, how: str, world: int, width: int) -> None:
        self.how, self.world, self.width, self.turn = how, world, width, 0
        self.workers: dict[int, tuple[Any, Connection]] = {}
        self.met = [-1] * world  # the last meeting of each process
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-c", STORE, str(self.port)]
        self.store = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.store.stdout is not None
        self.store.stdout.readline()
        self.start(*range(world))

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            mine, its = multiprocessing.Pipe()
            what = (its, self.how, rank, self.world, self.port, self.width)
            process = multiprocessing.get_context("fork").Process(target=train, args=what)
            process.start()
            its.close()
            self.workers[rank] = (process, mine)

    def kill(self, *ranks: int) -> float:
        """Kill workers; return when."""
        at = time.monotonic()
        for rank in ranks:
            self.workers[rank][0].kill()
            self.workers[rank][0].join()
            self.met[rank] = -1
        return at

    def order(self, second_group: bool = False) -> None:
        """Have all ranks meet. What is fixed of a handle lets nobody wait for a survivor's."""
        end = f"127.0.0.1:{self.port}"
        handles = [f"gloo:{rank}:{self.met[rank]}:{rank}:{end}" for rank in range(self.world)]
        self.turn += 1
        for rank in range(self.world):
            with contextlib.suppress(BrokenPipeError):
                self.workers[rank][1].send((self.turn, handles, second_group))

    def hear(self, rank: int, kind: str, within_s: float = 60) -> Any:
        """Return what a rank says next of this kind."""
        deadline = time.monotonic() + within_s
        while self.workers[rank][1].poll(max(0, deadline - time.monotonic())):
            said = self.workers[rank][1].recv()
            if said[0] == kind:
                return said[1]
        raise LostError(f"rank {rank}: not within {within_s:g} s: {kind}")

    def meet(self, second_group: bool = False) -> list[list[float]]:
        """Return the times of each rank: order taken, reconfigured, state sent, first step."""
        self.order(second_group)
        times = [self.hear(rank, "stepped") for rank in range(self.world)]
        self.met = [self.turn] * self.world
        return times

    def next_step(self, since: float, second_group: bool = False) -> str:
        try:
            return f"next step after {max(t[-1] for t in self.meet(second_group)) - since:.2f} s"
        except LostError as error:
            return f"no next step ({error})"

    def noticed(self, since: float, *ranks: int) -> str:
        took = [self.hear(rank, "failed") - since for rank in ranks]
        return f"the others notice after {', '.join(f'{one:.2f}' for one in took)} s"


@contextlib.contextmanager
def job(how: str, world: int = 3, width: int = 256) -> Iterator[Job]:
    """Run a job that has made its first steps."""
    running = Job(how, world, width)
    try:
        running.meet()
        time.sleep(1)
        yield running
    finally:
        running.kill(*running.workers)
        running.store.kill()
        running.store.wait()


def survivors(how: str, kills: int, width: int) -> Iterator[tuple[str, float]]:
    """Kill one of three workers repeatedly; yield phases, in seconds from the kill to their end."""
    with job(how, 3, width) as running:
        for rank in [turn % 3 for turn in range(kills)]:
            at = running.kill(rank)
            running.start(rank)
            times = running.meet()
            yield "survivors have noticed", max(t[0] for r, t in enumerate(times) if r != rank) - at
            yield "new worker is there", times[rank][0] - at
            names = ("all are connected", "state is sent", "**next step**")
            for name, ends in zip(names, list(zip(*times, strict=True))[1:], strict=True):
                yield name, max(ends) - at
            time.sleep(0.5)


def restarts(kills: int, width: int, script: str) -> Iterator[float]:
    """Kill one of three workers of ``elastic-run`` repeatedly; yield seconds to the next step."""
    flags = ["--standalone", "--nproc-per-node=3", "--max-restarts=1000", "train.py", "out"]
    argv, env = [str(BIN / "elastic-run"), *flags], {"DLROVER_LOG_LEVEL": "INFO"}
    with started("elastic-run", argv, {**env, "WIDTH": str(width)}, script=script) as running:
        running.steady(3, 120)
        warm(running)
        for rank in [turn % 3 for turn in range(kills)]:
            time.sleep(0.5)
            before = running.steady(3, 60)
            yield running.recovery(
                before, 3, partial(os.kill, before[rank].pid, signal.SIGKILL), 60
            )


def failures(how: str) -> Iterator[tuple[str, str]]:
    """Yield what was done to a job, and what came of it."""
    with job(how) as running:
        at = running.kill(1, 2)
        running.start(1, 2)
        yield "two of three are killed at once", running.next_step(at)
    with job(how, world=6) as running:
        at = running.kill(3)
        running.start(3)
        yield "one of six is killed", running.next_step(at)
    with job(how) as running:
        os.kill(running.workers[1][0].pid, signal.SIGSTOP)
        yield "one stands still", running.noticed(time.monotonic(), 0, 2)
    with job(how) as running:
        at = running.kill(1)
        running.order()
        running.noticed(at, 0, 2)  # the collective, and then the meeting
        said = running.noticed(at, 0, 2)
        running.start(1)
        yield "its replacement is lost before it has come", f"{said}; {running.next_step(at)}"
    with job(how) as running:
        for _ in range(2):
            at = running.kill(1)
            running.start(1)
            came = running.next_step(at, second_group=True)
        yield "a second group (`new_group`) in each round", came


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=6, help="of each job")
    parser.add_argument("--blocks", type=int, default=2, help="turns of all jobs")
    parser.add_argument("--widths", type=int, nargs="*", default=[256, 50_000], help="of the model")
    parser.add_argument("--failures", action="store_true", help="show these instead")
    args = parser.parse_args()
    if args.failures:
        for how in ("reconfigure", "anew"):
            for what, came in failures(how):
                print(f"| {how} | {what} | {came} |", flush=True)
        return
    for width in args.widths:
        rows: dict[str, list[float]] = {}
        for _ in range(args.blocks):
            for how in ("reconfigure", "anew"):
                for name, took in survivors(how, args.kills, width):
                    rows.setdefault(f"{how}: {name}", []).append(took)
            for name, script in (("no state", SCRIPT), ("checkpoint in memory", SAVES)):
                found = restarts(args.kills, width, script)
                rows.setdefault(f"elastic-run, {name}: **next step**", []).extend(found)
        for name, samples in rows.items():
            print(f"| {width} | {name} | {spread(samples)} |", flush=True)


if __name__ == "__main__":
    main()
