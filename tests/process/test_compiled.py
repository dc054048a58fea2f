"""Compiled code on real jobs: a restarted worker reads what the first one has compiled."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.process.harness import Place
from tests.programs import PROGRAMS

pytestmark = pytest.mark.whole_torch

CACHED = {"DLROVER_CACHE_DIR": "cache"}
"""Environment of commands that run in the place's folder."""


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))),
    reason="no C++ compiler (g++ or clang++) is here, and torch.compile needs one on a CPU",
)
def test_a_restarted_worker_reads_what_was_compiled(place: Place) -> None:
    place.script(PROGRAMS / "train_compiled.py")
    command = ("elastic-run", "--standalone", "--cold-start", "--max-restarts=1", "train.py", "1")
    run = place.call(*command, env=CACHED, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    said = r"round (\d) hits (\d+) misses (\d+) took \S+ \S+ in (\S+)"
    first, second = [[*map(int, found[:3]), found[3]] for found in re.findall(said, run.stdout)]
    folder = str(first[3])
    assert Path(folder).parent == (place.folder / "cache" / "compiled").resolve()
    assert first[:2] == [1, 0]
    assert first[2] > 0, "it was compiled"
    assert second[0] == 2
    assert second[1] > 0, "inductor found it"
    assert second[2:] == [0, folder], "nothing was compiled again"
    listed = json.loads(place.call("dlrover", "cache", "ls", "--json", env=CACHED).stdout)
    assert [(one["kind"], one["script"]) for one in listed] == [("compiled", "train.py")]
    key = Path(folder).name
    shown = place.call("dlrover", "cache", "ls", env=CACHED).stdout
    assert re.fullmatch(rf"{key[:12]}  .* \d+\.\d MB compiled  train.py\n", shown)
    removed = place.call("dlrover", "cache", "rm", key[:8], env=CACHED)
    assert removed.stdout.endswith("1 folder of compiled code removed\n"), removed
    assert not Path(folder).exists()
