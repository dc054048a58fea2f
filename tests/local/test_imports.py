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
