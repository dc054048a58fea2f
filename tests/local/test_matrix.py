"""`scripts/matrix.sh reduced` passes without torch 2.6 only if the network is at fault."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "matrix.sh"


def reduced(folder: Path, says: str, code: int) -> "subprocess.CompletedProcess[str]":
    """Run it with a uv that makes an environment, and then says something and fails."""
    (folder / "constraints.txt").write_text("torch==2.15\n")
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n[ $3 = venv ] || {{ echo '{says}' >&2; exit {code}; }}\n")
    python.chmod(0o700)
    env = {**os.environ, "MATRIX_PYTHON": str(python)}
    return subprocess.run(
        ["bash", SCRIPT, "reduced"], cwd=folder, env=env, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ("cause: error sending request for url (https://example.org/torch/)", 2),
        ("cause: HTTP status server error (503 Service Unavailable)", 2),
        ("", 124),
    ],
)
def test_a_network_that_fails_is_told(tmp_path: Path, says: str, code: int) -> None:
    found = reduced(tmp_path, says, code)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("NOT TESTED: torch 2.6 could not be installed")
    assert says in found.stderr


@pytest.mark.parametrize(
    ("says", "code"),
    [
        ("No solution found when resolving dependencies", 1),
        ("cause: HTTP status client error (404 Not Found)", 2),
        ("No module named uv", 1),
        ("", 137),
    ],
)
def test_any_other_failure_fails(tmp_path: Path, says: str, code: int) -> None:
    found = reduced(tmp_path, says, code)
    assert found.returncode == 1
    assert "NOT TESTED" not in found.stdout
    assert says in found.stderr
