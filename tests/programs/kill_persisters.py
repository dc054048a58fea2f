"""Kills one of two persisters at a random time, again and again; each time it waits for a line.

    python -m tests.programs.kill_persisters FOLDER KILLS SEED

Each line of its output is JSON: the step, and whether a persister told that it is committed. The
last one is a step that nothing disturbs, and why it failed. A parent forks the persisters: a new
interpreter each time would take longer than the write.
"""

import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

from dlrover_py.checkpoint import writer
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import WriteReply, read_line
from tests.slots import full, order, stage

root, kills = Path(sys.argv[1]), int(sys.argv[2])
random.seed(int(sys.argv[3]))
KEYS = [f"model.{i}" for i in range(12)]


def born() -> tuple[int, int, BinaryIO]:
    """Fork a persister; return its process id, its input and its output."""
    down, up = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(down[0], 0)
        os.dup2(up[1], 1)
        os.closerange(3, 1000)  # its siblings' pipes too, or they would never end
        log = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        os._exit(writer.main(nice=0))  # others of this machine are not to make it slow
    os.close(down[0])
    os.close(up[1])
    return pid, down[1], os.fdopen(up[0], "rb")


def staged(step: int) -> None:
    """Fill a slot of each of two ranks."""
    for rank in range(2):
        values = bytes([step % 251]) * (1 << 18)
        tensors = [(full(key, (1 << 16,)), values) for key in KEYS]
        stage(root / f"pool{rank}" / f"0.{step % 3}", tensors, rank=rank, world=2, step=step)


def reply(line: bytes) -> WriteReply:
    """Return what a persister said in a line."""
    said = read_line(line)
    assert isinstance(said, WriteReply)
    return said


def ended(said: WriteReply) -> bool:
    return said.phase in (PersistPhase.DONE, PersistPhase.FAILED)


def attempt(step: int, victim: int | None, after: float | None) -> tuple[float, str, bool]:
    """Have a step written, and kill a persister after a time, or at the end of the first one.

    Returns:
        How long it took, why it has failed, and whether a persister told that it is committed.
    """
    staged(step)
    children = [born(), born()]
    began = time.monotonic()
    for rank in (1, 0):
        request = order(
            root / f"pool{rank}",
            root / "ckpt",
            f"{step:012x}",
            step=step,
            world=2,
            ranks=(rank,),
            node=f"n{rank}",
            writers=("n0", "n1") if rank == 0 else (),
            deadline_s=120.0,
        )
        os.write(children[rank][1], request.encode())
    told: list[WriteReply] = []
    if victim is not None:
        while after is None and not any(ended(said) for said in told):
            told.append(reply(children[0][2].readline()))
        select.select([], [], [], after or 0)
        os.kill(children[victim][0], signal.SIGKILL)
        told += map(reply, children[victim][2])
    why, took = "", 0.0
    for pid, stdin, stdout in children:
        if victim is None:
            said = next(said for said in map(reply, stdout) if ended(said))
            why = why or said.why
            took = time.monotonic() - began
        os.close(stdin)
        told += map(reply, stdout)
        stdout.close()
        os.waitpid(pid, 0)
    return took, why, any(said.phase is PersistPhase.DONE and said.stored for said in told)


took = min(attempt(step, None, 0)[0] for step in range(1, 5))
step = 4
for kill in range(kills):
    step += 1
    longer = 1.5 if kill % 4 else 6.0  # the machine may be slower by now
    after = random.random() * took * longer
    # That some have committed by then is not left to how fast the machine is now.
    told = attempt(step, random.choice((0, 0, 1)), after if kill % 20 else None)[2]
    print(json.dumps({"step": step, "told": told}), flush=True)
    sys.stdin.readline()
step += 1
print(json.dumps({"last": step, "why": attempt(step, None, 0)[1]}), flush=True)
