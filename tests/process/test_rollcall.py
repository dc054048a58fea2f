"""A script that saves on rank 0 only is told so, under torchrun too, and goes on once all do."""

import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.process.harness import Place

SCRIPT = """
    import os, sys, threading
    import torch
    import torch.distributed as dist
    from dlrover_py.trainer import Checkpointer

    dist.init_process_group("gloo")
    checkpointer, state = Checkpointer("ckpt"), {"w": torch.ones(3)}
    pause = threading.Event()
    checkpointer.load(state)
    if dist.get_rank() == 1:
        while not os.path.exists("go"):
            pause.wait(0.01)
    checkpointer.save(1, state)
    checkpointer.close()
"""


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    try:
        yield place
    finally:
        place.close()


@pytest.mark.parametrize("launcher", ["torchrun", "elastic-run"])
def test_who_waits_for_whom_is_said_once(place: Place, launcher: str) -> None:
    argv = [launcher, "--standalone", "--nproc-per-node=2", str(place.script(SCRIPT))]
    said = []
    with place.popen(*argv, stderr=subprocess.PIPE) as process:
        limit = threading.Timer(120, process.kill)
        limit.start()
        assert process.stderr is not None
        for line in process.stderr:
            if "has waited" in line:
                said.append(line)
                (place.folder / "go").touch()
        limit.cancel()
    assert process.returncode == 0
    assert len(said) == 1
    assert "rank 0 has waited 5 s in save() of step 1 for rank 1, which is in no such" in said[0]
