"""Real worlds of gloo that change their size: 4, 3, 2, 4 ranks, bit for bit what torch loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBES = Path(__file__).parent / "probes"

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def probe(name: str, *args: str) -> None:
    """Run a probe, which prints "ok" if all is well."""
    ended = subprocess.run(
        [sys.executable, str(PROBES / name), *args],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'agent'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == ["ok"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp", "zero", "tp", "object", "rows"])
def test_each_world_loads_what_another_one_has_saved(mode: str, tmp_path: Path) -> None:
    """From memory, from peers and from storage."""
    # no assert: the program's exit code is not 0 if it finds a fault
    probe("reshard.py", mode, str(tmp_path))


def test_what_one_rank_cannot_load_none_does(tmp_path: Path) -> None:
    # no assert: the program's exit code is not 0 if it finds a fault
    probe("disagree.py", str(tmp_path))
