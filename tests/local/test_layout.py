"""Programs that must start without some packages."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_operator_is_no_package() -> None:
    # With an __init__.py it would shadow the standard library's module of that name.
    assert not (ROOT / "operator" / "__init__.py").exists()
    done = subprocess.run(
        [sys.executable, "-c", "import operator, collections; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(ROOT) not in done.stdout


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("dlrover_agent.cli", ("torch", "fastapi", "uvicorn", "rich", "click", "yaml")),
        ("dlrover_py.trainer.session", ("torch", "pydantic", "asyncio", "fastapi")),
        ("dlrover_py.kubernetes.client", ("kubernetes", "aiohttp", "pydantic", "yaml")),
        ("dlrover_py.cli", ("kubernetes", "torch", "fastapi", "uvicorn")),
        ("dlrover_py.master.__main__", ("kubernetes", "torch", "rich")),
    ],
)
def test_programs_start_without(module: str, without: tuple[str, ...]) -> None:
    code = f"import {module}, sys; print(*[m for m in {without!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
