"""Stages steps in children that are killed at random times; says what was found wrong.

A parent that has torch forks them: a new interpreter each time would take a second. Arguments: a
folder, how many children, a seed.
"""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch

from dlrover_py import arena
from dlrover_py.arena import Slot
from dlrover_py.trainer.checkpoint import Checkpointer
from dlrover_py.trainer.settings import Settings

torch.set_num_threads(1)
COUNT, SIZE = 24, 1 << 16


class Stamp(torch.optim.Optimizer):
    """Sets each parameter, and its state, to the number of the step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("moment", torch.zeros_like(p)).fill_(group["number"])
                p.fill_(group["number"])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(SIZE) for _ in range(COUNT))
        self.register_buffer("mean", torch.zeros(100))


def train(folder: Path, round_: int, start: int, told: int) -> None:
    """Until it is killed."""
    model = Model()
    optimizer = Stamp(model.parameters(), {"number": 0})
    checkpointer = Checkpointer(settings=Settings(arena=str(folder), job="j", round=round_))
    state = {"model": model, "optimizer": optimizer}
    step = start
    while True:
        step += 1
        model.mean.fill_(step)
        optimizer.param_groups[0]["number"] = step
        optimizer.step()
        if checkpointer.save(step, state) and step % 3:
            checkpointer.wait()
            os.write(told, step.to_bytes(8, "little"))


def look(folder: Path) -> dict[int, str]:
    """Steps that are whole, and what is wrong with them."""
    found = {}
    for path, summary in arena.scan(folder):
        wrong = ""
        with Slot(path) as slot:
            contents = arena.contents(slot)
            for (piece, at), digest in zip(contents.layout, contents.digests, strict=True):
                data = bytes(slot.view()[at : at + piece.nbytes])
                if arena.digest(data) != digest:
                    wrong = f"{piece.key}: digest"
                values = torch.frombuffer(bytearray(data), dtype=torch.float32).unique().tolist()
                if values != [float(summary.step)]:
                    wrong = f"{piece.key} of step {summary.step} has {values}"
        found[summary.step] = wrong
    return found


def main() -> None:
    Stamp([torch.nn.Parameter(torch.zeros(1))], {"number": 0}).step()  # imports torch._dynamo
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    pause = threading.Event()
    newest, partial = 0, 0
    for number in range(kills):
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                train(folder, number, newest, told)
            finally:
                os._exit(1)
        os.close(told)
        data = os.read(ready, 8)
        pause.wait(chance.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(ready, 1 << 16):
            data += more
        os.close(ready)
        sealed = int.from_bytes(data[-8:], "little")
        found = look(folder)
        partial += len(found) < 3
        for step, wrong in found.items():
            if wrong:
                print(f"kill {number}: step {step}: {wrong}", flush=True)
        if not found or max(found) < sealed:
            print(f"kill {number}: {sealed} was sealed, found {sorted(found)}", flush=True)
        newest = max(found, default=0)
    print("done", kills, "partial", partial, "steps", newest, flush=True)


main()
