"""Saves each step, and says what it has loaded: one whole step, or which values are wrong.

    python save_and_verify.py sharded|same GATE FOLDER

GATE is a file with the number of the step that it may train up to. The file FOLDER/at-RANK has the
last step that it saved. At step k, each parameter is k·(k+1)/2, its momentum is -k, and each plain
value is k. All values are exact in float32.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dlrover_py.trainer import Checkpointer, session

kind, gate, folder = sys.argv[1:4]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))


def make(rows: int) -> torch.Tensor:
    whole = torch.zeros(rows, 512)
    return distribute_tensor(whole, mesh, [Shard(0)]) if kind == "sharded" else whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Story:
    """It is longer after each step."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps), "sum": torch.ones(len(self.steps) % 7)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


plain = {"count": 0}


class Count:
    def state_dict(self) -> dict[str, int]:
        return dict(plain)

    def load_state_dict(self, state: dict[str, int]) -> None:
        plain.update(state)


module = torch.nn.Module()
module.large = torch.nn.Parameter(make(240))
module.small = torch.nn.Parameter(make(6))
module.register_buffer("mean", make(12))
optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=1.0)
story = Story()
state = {"module": module, "optimizer": optimizer, "story": story, "count": Count()}
checkpointer = Checkpointer()
step = checkpointer.load(state) or 0


def values() -> dict[str, list[float]]:
    """The step that each part of the state is of; one number each, if the state is whole."""
    found = {"buffer": local(module.mean), "count": torch.tensor([float(plain["count"])])}
    found["story"] = torch.tensor([float(len(story.steps))])
    for name, p in module.named_parameters():
        found[name] = ((8 * local(p.detach()).double() + 1).sqrt() - 1) / 2
        entry = optimizer.state.get(p, {}).get("momentum_buffer")
        if entry is not None or step:
            found[name + ".momentum"] = -local(entry).double()
    return {k: sorted(set(v.flatten().tolist())) for k, v in found.items()}


got = values()
wrong = {k: v for k, v in got.items() if v not in ([float(step)], [])}
head = f"loaded {session.round()} {rank} {world} {step}"
print(head, f"wrong {wrong}" if wrong else "ok", flush=True)
at = os.open(os.path.join(folder, f"at-{rank}"), os.O_RDWR | os.O_CREAT)
pause = threading.Event()
while not checkpointer.should_stop:
    while int(Path(gate).read_text() or 0) <= step and not session.should_stop():
        pause.wait(0.005)
    total = torch.ones(1)
    dist.all_reduce(total)
    for p in module.parameters():
        p.grad = torch.full_like(p, -1.0)
    optimizer.step()
    step += 1
    local(module.mean).fill_(step)
    plain["count"] = step
    story.steps.append(step)
    session.report_step(step)
    checkpointer.save(step, state)
    os.pwrite(at, b"%09d" % step, 0)
    pause.wait(0.03)
print("stopped", session.round(), rank, step, flush=True)
checkpointer.close()
dist.destroy_process_group()
