"""Stages steps in children that are killed at random times; says what was found wrong.

Each child loads what the killed one has left, as a worker that is started again does, and goes on
from there.

A parent that has imported torch forks them: a new interpreter each time would take seconds. It has
no thread but this one, and never makes a tensor itself: what torch's threads hold at a fork, no
child gets back. Arguments: a folder, how many children, a seed. There are more of them if few were
killed while a slot was being filled: on a busy machine they do nothing most of the time.
"""

import gc
import os
import random
import signal
import struct
import sys
import threading
from pathlib import Path

import torch
import torch._dynamo  # the first step of an optimizer would import it, in each child anew

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.trainer import restore  # noqa: F401  nor what the first load imports
from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.settings import Settings

torch.set_num_threads(1)
COUNT, SIZE = 12, 1 << 14
WINDOW_S = 0.02
PARTIAL, MOST = 11, 4


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


def values(model: Model, optimizer: Stamp) -> dict[str, list[float]]:
    """All that a step sets: its number, if what was loaded is whole."""
    found = {name: t.unique().tolist() for name, t in model.state_dict().items()}
    for number, p in enumerate(model.parameters()):
        found[f"moment of {number}"] = optimizer.state[p]["moment"].unique().tolist()
    return found | {"number": [optimizer.param_groups[0]["number"]]}


def train(folder: Path, round_: int, go: int, told: int) -> None:
    """Until it is killed; tells the step that it has loaded, whether all of it is of that step, and
    then each step of which it knows that it is sealed."""
    model = Model()
    optimizer = Stamp(model.parameters(), {"number": 0})
    optimizer.step()
    checkpointer = Checkpointer(
        settings=Settings(pool=str(folder), job="j", round=round_), rng=False
    )
    state = {"model": model, "optimizer": optimizer}
    os.read(go, 1)
    step = checkpointer.load(state) or 0
    wrong = {name: of for name, of in values(model, optimizer).items() if of != [step]}
    os.write(told, step.to_bytes(8, "little") + len(wrong).to_bytes(8, "little"))
    if wrong:
        print(f"step {step} is loaded with {wrong}", flush=True)
    while True:
        step += 1
        model.mean.fill_(step)
        optimizer.param_groups[0]["number"] = step
        optimizer.step()
        if checkpointer.save(step, state) and step % 3:
            checkpointer.wait()
            os.write(told, step.to_bytes(8, "little"))


class Child:
    """A process that is ready to train."""

    def __init__(self, folder: Path, number: int) -> None:
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
        go, self.go = os.pipe()
        self.ready, told = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                train(folder, number, go, told)
            finally:
                os._exit(1)
        os.close(go)
        os.close(told)

    def loaded(self) -> tuple[int, int]:
        """Have it load and then train: the step, and how many of the values are not of it."""
        os.write(self.go, b"!")
        data = b""
        while len(data) < 16 and (more := os.read(self.ready, 16 - len(data))):
            data += more
        return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")

    def killed(self, after_s: float) -> tuple[int, int]:
        """Kill it so long after it has staged its first step.

        Returns:
            The last step that it has told, and how it has ended.
        """
        data = os.read(self.ready, 8)
        threading.Event().wait(after_s)
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        while more := os.read(self.ready, 1 << 16):
            data += more
        os.close(self.ready)
        os.close(self.go)
        return int.from_bytes(data[-8:], "little"), status


def look(folder: Path) -> dict[int, str]:
    """Steps that are whole, and what is wrong with them."""
    found = {}
    for path, header in shm.scan(folder):
        wrong = ""
        number = struct.pack("<f", header.step)
        with ShmSlot(path) as slot:
            contents = shm.contents(slot)
            for (chunk, at), digest in zip(contents.layout, contents.digests, strict=True):
                data = bytes(slot.view()[at : at + chunk.nbytes])
                if shm.digest(data) != digest:
                    wrong = f"{chunk.key}: digest"
                if data != number * (len(data) // 4):
                    wrong = f"{chunk.key}: is not of step {header.step}"
            if not slot.lock(shared=True):
                wrong = "locked by the dead"
        found[header.step] = wrong
    return found


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    gc.freeze()  # what a child does not touch, it need not copy
    gc.disable()
    newest = partial = number = 0
    child = Child(folder, 0)

    def load() -> None:
        """What the next child gets is whole, and the newest that there is."""
        step, wrong = child.loaded()
        if wrong or step != newest:
            words = f"step {step} was loaded, {wrong} values of other steps"
            print(f"kill {number}: {words}; {newest} was sealed", flush=True)

    while number < kills or (partial < PARTIAL and number < MOST * kills):
        following = Child(folder, number + 1)  # gets ready meanwhile
        load()
        told, status = child.killed(chance.random() * WINDOW_S)
        child = following
        found = look(folder)
        partial += len(found) < 3
        if status != signal.SIGKILL:
            print(f"kill {number}: it has ended by itself: {status}", flush=True)
        for step, wrong in found.items():
            if wrong:
                print(f"kill {number}: step {step}: {wrong}", flush=True)
        if max(found, default=0) < max(told, newest + 1):
            print(f"kill {number}: {told} was sealed, found {sorted(found)}", flush=True)
        newest = max(found, default=0)
        number += 1
    load()
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    print("done", number, "partial", partial, "steps", newest, flush=True)


main()
