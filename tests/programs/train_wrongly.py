"""Trains under DDP; in round 1 a bit flips on one rank, in round 2 a loss becomes NaN on another.

    python train_wrongly.py DIR FLIP_RANK FLIP_STEP NAN_RANK NAN_STEP STEPS

Rank 0 writes the step that each round continues from into DIR.said; at the end each rank writes a
digest of its parameters.
"""

import math
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.replica_check import digest

PERSIST_EVERY = 10
folder = sys.argv[1]
flip_rank, flip_step, nan_rank, nan_step, steps = map(int, sys.argv[2:])


def flip_a_bit(model: torch.nn.Module) -> None:
    """Flip the lowest bit of one parameter."""
    weight = next(model.parameters()).data.view(-1)
    weight[:1].view(torch.int32).bitwise_xor_(1)


def say(line: str) -> None:
    with open(f"{folder}.said", "a") as said:
        said.write(f"{line}\n")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    rank, round_ = dist.get_rank(), session.round()
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(folder, persist_every=PERSIST_EVERY, keep=9) as checkpointer:
        step = checkpointer.load(state) or 0
        if rank == 0:
            say(f"round {round_} continues from {step}")
        while step < steps:
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            if (round_, rank, step) == (1, flip_rank, flip_step):
                flip_a_bit(model)
            bad = (round_, rank) == (2, nan_rank) and step >= nan_step
            if bad and step == nan_step:
                say(f"nan at {time.time()}")
            session.report_step(step, loss=math.nan if bad else loss)
            checkpointer.save(step, state)
            if step % PERSIST_EVERY == 0:
                checkpointer.wait(persisted=True)
            time.sleep(0.03)
        checkpointer.save(step, state, force=True)
    say(f"rank {rank} ends with {digest(model.parameters())}")
    dist.destroy_process_group()


main()
