"""The task of the programs under test in :mod:`tests.exact_runs`: data, network and bookkeeping.

A job of a test has a copy of this module beside its program.
"""

import json
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from dlrover_py.trainer import session

SAMPLES, GLOBAL_BATCH = 407, 10


class Points(torch.utils.data.Dataset):  # type: ignore[misc]
    """Random points with a random transform of their own; an item has its number in front."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        point = self.inputs[index]
        noise = 0.1 * torch.rand(6, dtype=point.dtype)
        return index, point + noise, point.sum()[None].sin()


def network() -> nn.Module:
    """Return the network with the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()


class Record:
    """Writes down what this rank trains; see :mod:`tests.exact_runs`."""

    def __init__(self, pause_s: float = 60.0) -> None:
        """Open the file of this rank.

        Args:
            pause_s: seconds to wait after each step that the test has not permitted. The epoch must
                not end before other nodes have imported a framework and joined.
        """
        self.pause_s = pause_s
        self.folder, self.epochs = Path(sys.argv[1]), int(sys.argv[2])
        self.rank = session.world().rank
        path = self.folder / f"{session.round()}-{self.rank}.txt"
        self._lines = path.open("a", buffering=1)

    def trained(self, step: int, epoch: int, samples: Iterable[int]) -> None:
        """Write down a step before it is saved. Report it; wait if the test has not permitted it.

        Args:
            step: number of the step, from 1.
            epoch: epoch of the step, from 0.
            samples: those that this rank has computed.
        """
        print(step, epoch, *samples, file=self._lines)
        session.report_step(step)
        gate, pause = self.folder / "gate", threading.Event()
        end = time.monotonic() + self.pause_s
        while gate.exists() and step >= int(gate.read_text()) and time.monotonic() < end:
            if session.should_stop():
                break
            pause.wait(0.1)

    def finished(self, model: nn.Module) -> None:
        """Write the weights at the end of the last epoch."""
        if self.rank == 0:
            weights = [value for p in model.parameters() for value in p.flatten().tolist()]
            (self.folder / "weights.json").write_text(json.dumps(weights))
