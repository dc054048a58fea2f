"""What tests of the program save_and_verify.py share."""

from collections.abc import Iterable
from pathlib import Path

from dlrover_py.protocol.agents import MemoryCheckpoint
from tests.programs import PROGRAMS

OPEN = 1 << 40
"""Step of a gate that never stops the workers."""

WORKER = PROGRAMS / "save_and_verify.py"


def permit(folder: Path, step: int) -> None:
    """Permit the workers to train up to this step."""
    new = folder / "gate.new"
    new.write_text(str(step))
    new.rename(folder / "gate")


def doubled(found: Iterable[MemoryCheckpoint], ranks: Iterable[int]) -> int:
    """Return the newest step that each rank's node and another node have; 0 if there is none."""
    found = list(found)

    def steps(rank: int, *, replica: bool) -> set[int]:
        return {h.step for h in found if h.replica is replica and rank in h.ranks}

    both = [steps(rank, replica=kind) for rank in ranks for kind in (True, False)]
    return max(set.intersection(*both), default=0)
