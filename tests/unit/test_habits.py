"""Habits of the tests: none starts a process here, each can fail, none patches a constant.

Programs that tests run are files.
"""

import ast
import asyncio
import multiprocessing
import os
import pty
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.programs import PROGRAMS

TESTS = Path(__file__).parents[1]
CHECKING = {
    "until", "eventually", "check", "check_running", "compare_with_faults",
    "run_state_machine_as_test",
}  # fmt: skip
"""Functions that raise if what they wait for, or look at, is not true."""
MARK = re.compile(r"# no assert: \w")
CONSTANT = re.compile(r"(?:.*\.)?_?[A-Z][A-Z0-9_]*")
"""The name of a constant of a module or class: a time, a limit, a number of attempts."""
PATCHED = {
    "CACHED_COPY_BYTES": "a property test draws it, so that its small examples have several reads"
}
"""Constants that a test may patch, with the reason."""


async def _asynchronous() -> None:
    await asyncio.create_subprocess_exec("true")


@pytest.mark.parametrize(
    "start",
    [
        lambda: subprocess.run(["true"], check=True),
        lambda: os.popen("true"),
        lambda: os.system("true"),
        lambda: os.posix_spawn("/bin/true", ["true"], {}),
        lambda: os.fork(),
        lambda: pty.fork(),
        lambda: multiprocessing.get_context("fork").Process().start(),
        lambda: multiprocessing.get_context("spawn").Process().start(),
        lambda: asyncio.run(_asynchronous()),
    ],
)
def test_no_process_is_started_here(start: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="move it to tests/local"):
        start()


@cache
def _nodes() -> dict[Path, list[ast.AST]]:
    """All nodes of each file of the tests."""
    return {
        path: list(ast.walk(ast.parse(path.read_text()))) for path in sorted(TESTS.rglob("*.py"))
    }


def _tests() -> Iterator[tuple[Path, str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, nodes in _nodes().items():
        if not path.name.startswith("test_"):
            continue
        lines = path.read_text().splitlines()
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(
                "test_"
            ):
                yield path, "\n".join(lines[node.lineno - 1 : node.end_lineno]), node


def can_fail(node: ast.AST, source: str) -> bool:
    """Return whether a test asserts something, or says in a comment why it does not."""
    if MARK.search(source):
        return True
    for part in ast.walk(node):
        if isinstance(part, ast.Assert):
            return True
        if isinstance(part, ast.Call):
            called = part.func
            name = called.attr if isinstance(called, ast.Attribute) else ast.unparse(called)
            if name in CHECKING | {"raises", "warns", "fail"}:
                return True
    return False


def test_each_test_can_fail() -> None:
    cannot = [
        f"{path.relative_to(TESTS.parent)}:{node.lineno}: {node.name}"
        for path, source, node in _tests()
        if not can_fail(node, source)
    ]
    assert cannot == [], "assert what must be true, or add a comment: # no assert: REASON"


@pytest.mark.parametrize(
    ("body", "good"),
    [
        ("assert work()", True),
        ("with pytest.raises(ValueError): work()", True),
        ("until(lambda: work())", True),
        ("work()", False),
        ("work()  # no assert: it would hang", True),
        ("work()  # no assert:", False),
    ],
)
def test_what_a_test_needs_to_fail(body: str, good: bool) -> None:
    source = f"def test_x():\n    {body}\n"
    assert can_fail(ast.parse(source), source) is good


def patched_constants(node: ast.AST) -> list[str]:
    """Return the names of the constants that a statement of a test replaces."""
    names: list[object] = []
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "setattr":
        names = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant)]
    elif isinstance(node, ast.Assign):
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
        names = [part.attr for part in parts if isinstance(part.ctx, ast.Store)]
    return [name for name in names if isinstance(name, str) and CONSTANT.fullmatch(name)]


def test_no_test_patches_a_constant() -> None:
    patched = [
        f"{path.relative_to(TESTS.parent)}:{node.lineno}: {name}"
        for path, nodes in _nodes().items()
        for node in nodes
        if isinstance(node, ast.Call | ast.Assign)
        for name in patched_constants(node)
        if name not in PATCHED
    ]
    assert patched == [], "make it a parameter of the class or function that uses it"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('monkeypatch.setattr(module, "WAIT_S", 0.1)', "WAIT_S"),
        ('patch.setattr(module, "_WAIT_MS", 1)', "_WAIT_MS"),
        ('monkeypatch.setattr("package.module.WAIT_S", 0.1)', "package.module.WAIT_S"),
        ('setattr(module, "WAIT_S", 0.1)', "WAIT_S"),
        ("module.WAIT_S = 0.1", "WAIT_S"),
        ("first, module.WAIT_S = 1, 2", "WAIT_S"),
        ('monkeypatch.setattr(module, "ITEMS", 3)', "ITEMS"),
        ('monkeypatch.setattr(os, "link", refuse)', ""),
        ("WAIT_S = 0.1", ""),
        ("instance.wait_s = module.WAIT_S", ""),
        ("view[module.SIZE] = 1", ""),
        ('monkeypatch.setattr(module, "Class", Other)', ""),
    ],
)
def test_what_counts_as_a_patched_constant(source: str, name: str) -> None:
    found = [name for node in ast.walk(ast.parse(source)) for name in patched_constants(node)]
    assert found == ([name] if name else [])


SHORT = 4
"""Lines of a program that may be a string in a test."""


def program_lines(text: str) -> int:
    """Return how many lines a Python program with an import has; 0 for any other text."""
    if "import" not in text:
        return 0
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return 0
    if not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree)):
        return 0
    return sum(bool(line.strip()) for line in text.splitlines())


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Each string and its line; the values in a formatted string are the name VALUE."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (v.value if isinstance(v, ast.Constant) else "VALUE" for v in node.values)
            yield node.lineno, "".join(map(str, parts))


def test_programs_are_files() -> None:
    """Linter and type checker do not read strings. What stays is short, or is no whole program."""
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: a program of {lines} lines"
        for path, nodes in _nodes().items()
        for line, text in _strings(nodes)
        if (lines := program_lines(text)) > SHORT
    ]
    assert found == [], f"expected programs of at most {SHORT} lines; move it to tests/programs"


def test_each_program_is_run_by_a_test() -> None:
    tests = [path.read_text() for path in TESTS.rglob("*.py") if path.parent != PROGRAMS]
    names = {path.stem for path in PROGRAMS.glob("*.py")} - {"__init__"}
    unused = sorted(name for name in names if not any(name in text for text in tests))
    assert unused == [], "remove them, or run them"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import os\nprint(os.getpid())\n", 2),
        ("\n    import os\n\n    print(os.getpid())\n    ", 2),
        ("from os import (\n    getpid\n)\nprint(getpid())", 4),
        ("print(1)\nprint(2)", 0),
        ("an import of something else", 0),
    ],
)
def test_what_counts_as_a_program(text: str, lines: int) -> None:
    assert program_lines(text) == lines
