"""Real worlds of gloo that change their size: 4, 3, 2, 4 ranks, bit for bit what torch loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).parent / "probes" / "reshard.py"

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp", "zero", "tp"])
def test_each_world_loads_what_another_one_has_staged(mode: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(PROBE), mode, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split() == ["ok"]
