"""Imports of the load path, in an interpreter of their own."""

import subprocess
import sys
from pathlib import Path

from tests.programs import PROGRAMS


def test_what_a_state_cannot_need_is_not_imported(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(PROGRAMS / "save_plain_state.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == "[]\n", ended.stderr
