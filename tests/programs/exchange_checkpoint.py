"""Saves a checkpoint, or loads one that another version of torch has saved, without an agent.

    python exchange_checkpoint.py save FOLDER
    python exchange_checkpoint.py load FOLDER

The state is a model with an optimizer that has made a step, a schedule, and tensors of several
types. Loading fails unless all values are those that were saved.
"""

import sys
from typing import Any

import torch
from torch import nn

from dlrover_py.trainer import Checkpointer

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested dictionaries and lists, in the order of the keys."""
    if isinstance(value, torch.Tensor):
        return [value]
    inside = [value[key] for key in sorted(value)] if isinstance(value, dict) else value
    return [t for one in inside for t in tensors(one)] if isinstance(value, dict | list) else []


def build() -> dict[str, Any]:
    """A state, whose optimizer has made a step."""
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    typed = {str(kind): torch.zeros(5, dtype=kind) for kind in TYPES}
    return {"model": model, "optim": optimizer, "schedule": schedule, "typed": typed}


def numbered(state: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of a state with the value that it has in the checkpoint."""
    optimizer = state["optim"].state_dict()["state"]
    found = tensors([*state["model"].parameters(), optimizer, state["typed"]])
    return [(t, torch.full(t.shape, n).to(t.dtype)) for n, t in enumerate(found, 1)]


def main(way: str, folder: str) -> None:
    state = build()
    if way == "save":
        with torch.no_grad():
            for tensor, value in numbered(state):
                tensor.copy_(value)
        state["schedule"].step()
        with Checkpointer(folder) as checkpointer:
            checkpointer.save(7, state, force=True)
    else:
        with Checkpointer(folder) as checkpointer:
            assert checkpointer.load(state) == 7, "step 7 is in the folder"
        for tensor, value in numbered(state):
            assert torch.equal(tensor, value), (tensor, value)
        assert state["schedule"].get_last_lr() == [0.25]
        assert len(numbered(state)) == 14


if __name__ == "__main__":
    main(*sys.argv[1:])
