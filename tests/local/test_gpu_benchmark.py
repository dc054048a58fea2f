"""benchmarks/gpu.py on a machine without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_without_a_device_it_says_so_and_ends_with_its_own_code() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-P", str(BENCHMARK)]
    done = subprocess.run(words, capture_output=True, text=True, env=hidden)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("error: torch finds no CUDA device")
    assert "hint: " in done.stderr
