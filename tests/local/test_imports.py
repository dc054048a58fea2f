"""What the programs import before the first worker starts: a new package costs each start."""

import subprocess
import sys

import pytest

from tests.programs import PROGRAMS

PYDANTIC = {
    "annotated_types",
    "pydantic",
    "pydantic_core",
    "typing_extensions",
    "typing_inspection",
}
HTTP_SERVER = {"anyio", "click", "h11", "httptools", "starlette", "uvicorn", "uvloop"}
ALLOWED = {
    "dlrover_agent.cli": set(),  # before it starts the master beside it
    "dlrover_agent.loop": PYDANTIC | {"h11", "xxhash"},
    "dlrover_py.master.__main__": PYDANTIC | HTTP_SERVER,
    "dlrover_py.master.traces": PYDANTIC,
    # A node that has seconds left may need it: torch would cost seconds and 500 MB.
    "dlrover_py.checkpoint.writer": PYDANTIC | {"xxhash"},
    "pynvml": {"pynvml"},  # what GPUs report is read in the agent, where torch would cost seconds
}


@pytest.mark.parametrize("module", ALLOWED)
def test_a_program_imports_no_more_than_its_start_needs(module: str) -> None:
    argv = [sys.executable, "-P", str(PROGRAMS / "list_imports.py"), module]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert set(done.stdout.split()) <= ALLOWED[module]


@pytest.mark.parametrize("module", ["dlrover_operator.__main__", "dlrover_operator.health"])
def test_an_operator_without_pages_imports_nothing_of_them(module: str) -> None:
    argv = [sys.executable, "-P", str(PROGRAMS / "list_imports.py"), module]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert {"jinja2", "markupsafe"}.isdisjoint(done.stdout.split())


def test_what_torch_loads_of_us_is_only_the_entry_point() -> None:
    """torch loads all backends of torchrun, in each process that imports its checkpoints."""
    what = "import sys, torch.distributed.checkpoint; print(*sys.modules)"
    argv = [sys.executable, "-P", "-c", what]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    ours = {name for name in done.stdout.split() if name.startswith("dlrover_")}
    assert ours - {"dlrover_rare_gc"} == {"dlrover_agent", "dlrover_agent.torch_compat"}


def test_parts_of_torch_are_there_when_they_are_needed() -> None:
    program, scripts = PROGRAMS / "step_with_late_torch.py", PROGRAMS.parents[1] / "scripts"
    argv = [sys.executable, "-P", str(program), str(scripts)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [
        "False False [-0.25, -0.25] True True False",
        "True True [-1.125, -1.125] [2.0, 2.0] True",
        "True",
    ]
