"""What a real persister has written is what restore and torch read."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import WriteRequest
from dlrover_py.trainer import restore
from dlrover_py.trainer.candidates import CheckpointSources
from dlrover_py.trainer.dcp_import import load_dcp
from tests.slots import JOB, Persister
from tests.staged import stage

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]
LOG = logging.getLogger("test")


def build(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 10)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer, "epoch": seed}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    mine, its = one["optim"].state_dict(), other["optim"].state_dict()
    return (
        all(map(torch.equal, one["model"].parameters(), other["model"].parameters()))
        and all(
            torch.equal(value, its["state"][number][key])
            for number, entries in mine["state"].items()
            for key, value in entries.items()
        )
        and mine["param_groups"] == its["param_groups"]
        and one["epoch"] == other["epoch"]
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_persisted_state_is_read_in_each_way(tmp_path: Path) -> None:
    saved = build(1)
    folder, directory = tmp_path / "pool", tmp_path / "checkpoints"
    folder.mkdir()
    stage(folder / "0.0", saved, step=7, round=1, job=JOB)
    persister = Persister()
    try:
        order = WriteRequest(
            attempt="a1",
            step=7,
            round=1,
            world=1,
            ranks=[0],
            pool=str(folder),
            dir=str(directory),
            job=JOB,
            node="n0",
            writers=["n0"],
            grant=0,
        )
        persister.send(order)
        ended = persister.end("a1")
        assert ended.phase is PersistPhase.DONE, ended.why
    finally:
        persister.close()
    store = CheckpointDirectory(directory)
    ours = build(2)
    found = restore.load(
        ours, CheckpointSources(store=store, job="another"), rank=0, world=1, log=LOG
    )
    assert found is not None
    assert (found.step, found.folder) == (7, "step-7.a1")
    assert same(ours, saved)
    as_torchs = build(3)
    load_dcp(as_torchs, directory / "step-7.a1", rank=0, world=1, log=LOG)
    assert same(as_torchs, saved)
    plain = {"model": build(4)["model"].state_dict()}
    dcp.load(plain, checkpoint_id=directory / "step-7.a1", no_dist=True)
    assert torch.equal(plain["model"]["weight"], saved["model"].weight)
