"""A script that saves on rank 0 only is told so, under torchrun too, and goes on once all do."""

import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.process.harness import Place
from tests.programs import PROGRAMS


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    try:
        yield place
    finally:
        place.close()


@pytest.mark.parametrize("launcher", ["torchrun", "elastic-run"])
def test_who_waits_for_whom_is_said_once(place: Place, launcher: str) -> None:
    argv = [
        launcher,
        "--standalone",
        "--nproc-per-node=2",
        str(place.script(PROGRAMS / "wait_in_save.py")),
    ]
    said = []
    with place.popen(*argv, stderr=subprocess.PIPE) as process:
        limit = threading.Timer(120, process.kill)
        limit.start()
        assert process.stderr is not None
        for line in process.stderr:
            if "has waited" in line:
                said.append(line)
                (place.folder / "go").touch()
        limit.cancel()
    assert process.returncode == 0
    assert len(said) == 1
    assert (
        "rank 0 has waited 5 s in save() of step 1 for rank 1, which is not in this call" in said[0]
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("steps", "save() of step 1 on rank 0, save(force=True) of step 40 on rank 1."),
        ("close", "save() of step 1 on rank 0, save() of step 2 on rank 1."),
        ("init", "load(init=…) on rank 0, load() on rank 1: pass init on every rank, or on none"),
        ("options", "every=SaveInterval(steps=1, seconds=0.0, auto=False), "),
    ],
)
def test_calls_that_differ_between_ranks_are_refused_and_save_nothing(
    place: Place, case: str, words: str
) -> None:
    script = str(place.script(PROGRAMS / "call_differently.py"))
    done = place.call("elastic-run", "--standalone", "--nproc-per-node=2", script, case)
    assert done.returncode == 1
    assert "CallsDifferError: checkpoint: the ranks " in done.stderr
    assert words in done.stderr
    assert "was lost" not in done.stderr
    assert not list((place.folder / "ckpt").glob("*/*"))
