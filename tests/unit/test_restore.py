"""From slots and files into a user's state: bit for bit, or not at all."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlrover_py.arena import Slot
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.trainer import restore
from dlrover_py.trainer.restore import KeysDiffer, Loaded
from dlrover_py.trainer.state import PerRank, Random
from tests.slots import stage

LOG = logging.getLogger("test")


def load(state: Any, arena: Path, **changes: Any) -> Loaded | None:
    given: dict[str, Any] = {
        "rank": 0, "world": 1, "arena": arena, "agent": None, "store": None, "log": LOG,
    }  # fmt: skip
    return restore.load(state, **{**given, **changes})


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def trained(seed: int, steps: int = 3) -> dict[str, Any]:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optim": optimizer, "sched": schedule, "epoch": steps}


def fresh(seed: int) -> dict[str, Any]:
    return {**trained(seed, 0), "epoch": -1}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}


def test_a_state_is_restored_into_new_objects(tmp_path: Path) -> None:
    saved = trained(1)
    stage(tmp_path / "0.0", saved, step=3)
    state = fresh(2)
    found = load(state, tmp_path)
    assert found is not None and found.step == 3 and found.missing == ()
    assert same(dicts(state), dicts(saved))
    assert found.nbytes.keys() == {"memory"}
