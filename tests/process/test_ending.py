"""The end of a script: votes on checkpoints, and a process group that goes right after them."""

import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer.collectives import AsyncAllReduce
from dlrover_py.trainer.vote import RankVote

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
TIMES = 20


def script(rank: int, folder: str, number: int) -> None:
    """Its model is the last to have the process group."""
    store = f"file://{folder}/{number}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    ballot = AsyncAllReduce()
    for _ in range(3):
        assert ballot.launch(RankVote(stop=rank))(None)[RankVote._fields.index("stop")] == 1
    dist.destroy_process_group()
    del ballot, model


def scripts(rank: int, folder: str) -> None:
    """One after another."""
    torch.set_num_threads(1)
    for number in range(TIMES):
        script(rank, folder, number)
        (Path(folder) / f"done-{rank}").write_text(str(number + 1))


def test_a_process_group_that_goes_right_after_a_vote_does_not_hang() -> None:
    """Gloo's thread would want the GIL to let go of the vote; who has it waits for that thread."""
    with tempfile.TemporaryDirectory() as folder:
        both = mp.start_processes(
            scripts, args=(folder,), nprocs=2, join=False, start_method="spawn"
        )
        try:
            deadline = time.monotonic() + 90
            while not both.join(timeout=5):  # it returns as one of them ends, too
                assert time.monotonic() < deadline, "hung"
        finally:
            for process in both.processes:
                process.kill()
                process.join()
        assert {p.read_text() for p in Path(folder).glob("done-?")} == {str(TIMES)}
