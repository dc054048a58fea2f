"""What must stay true of the tree as a whole."""

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
        ("dlrover_py.kube", ("kubernetes", "aiohttp", "pydantic", "yaml")),
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


def test_the_version_is_in_the_changelog() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


TORCHS_METADATA = "dlrover_py/trainer/foreign.py"
"""What torch itself has saved has a pickle in it, which is read there, with limits."""


def test_no_product_code_pickles() -> None:
    for folder in ("dlrover_py", "agent", "operator"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "pickle.load" not in text, path
            if path == ROOT / TORCHS_METADATA:
                continue
            assert "import pickle" not in text, path
            assert "from pickle" not in text, path
