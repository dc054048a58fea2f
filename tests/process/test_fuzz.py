"""Every parser of what comes from outside, fuzzed for a moment: does the fuzzer still work?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_parsers import TARGETS

pytestmark = pytest.mark.timeout(600)
pytest.importorskip("atheris", reason="atheris has wheels for Linux on x86-64 only")


def test_every_parser_is_fuzzed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seconds", "1"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runs = dict(re.findall(r"(\w+): Done (\d+) runs", done.stdout))
    assert runs.keys() == TARGETS.keys()
    assert all(int(number) > 0 for number in runs.values()), runs
