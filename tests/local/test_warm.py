"""What becomes of a zygote that is lost while it is built, or was started before its recipe."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.pool import (
    BuildTiming,
    ForkRequest,
    ImportRecipe,
    WarmPool,
)
from dlrover_agent.warm.zygote_start import WorkerProgram

SLOW = """
import os
open(os.environ["GO"]).close()
"""
DEADLY = """
import os, signal
os.kill(os.getpid(), signal.SIGKILL)
"""


class Node:
    """What keeps a zygote that imports one module of a test's."""

    def __init__(
        self, folder: Path, module: str, timing: BuildTiming, *, early: bool = False
    ) -> None:
        self.go = folder / "go"
        """A FIFO: who opens it waits for the other side."""
        os.mkfifo(self.go)
        (folder / "slow_module.py").write_text(module)
        self.children = ChildRegistry()
        self.news = asyncio.Event()
        self.warm = WarmPool(
            WorkerProgram(
                [sys.executable, "-u", str(folder / "train.py")],
                {"PYTHONPATH": str(folder), "GO": str(self.go)},
                ["LOCAL_RANK"],
            ),
            disabled_reason="",
            scratch=folder,
            children=self.children,
            on_change=self.news.set,
            timing=timing,
        )
        self.line = ("import", "slow_module", str(folder / "slow_module.py"))
        if early:
            self.warm.starter.begin_early("slow_module")
        else:
            self.warm.adopt(ImportRecipe((self.line,)))

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not look():
                await asyncio.sleep(0.01)

    async def pid(self) -> int:
        """Wait until there is one process, and return its id."""
        await self.until(lambda: self.processes() == 1)
        (pid,) = self.children.non_worker_pids
        return pid

    def processes(self) -> int:
        """Return the number of processes that are not reaped."""
        self.warm.child_ended()
        return len(self.children.non_worker_pids)

    async def built(self, lines: tuple[tuple[str, str, str], ...], writing: int) -> int:
        """Give the recipe, and return the process id of the zygote that is fit; all ends then.

        Args:
            lines: The recipe.
            writing: Descriptor of the FIFO, which lets imports go on; it is closed.
        """
        self.warm.adopt(ImportRecipe(lines))
        await self.until(lambda: self.warm.ready)
        os.close(writing)
        pid = await self.pid()
        await self.close()
        return pid

    async def close(self) -> None:
        await self.warm.close()
        await self.until(lambda: not self.processes())


@pytest.mark.parametrize("module", ["", DEADLY], ids=["later", "while it is built"])
async def test_a_zygote_that_ends_with_its_agent_is_not_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, module: str
) -> None:
    """A batch system ends all processes of a node at the same time."""
    node = Node(tmp_path, module, BuildTiming())
    with caplog.at_level(logging.INFO):
        if module:
            node.warm.disabled_reason = "the agent ends"
            await node.until(lambda: not node.warm.building)
        else:
            await node.until(lambda: node.warm.ready)
            node.warm.disabled_reason = "the agent ends"
            (zygote,) = node.children.sessions
            zygote.signal(signal.SIGKILL)

            def reaped() -> bool:
                node.warm.child_ended()
                return not node.warm.ready

            await node.until(reaped)
    assert not node.warm.building
    assert node.warm.disabled_reason == "the agent ends"
    assert not [r for r in caplog.records if "again" in str(vars(r).get("then"))]
    await node.close()


async def test_a_recipe_says_what_has_made_a_zygote_unfit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lightning reads the rank when it is imported: each node built one zygote in vain."""
    node = Node(tmp_path, "import os\nos.environ.get('LOCAL_RANK')\n", BuildTiming())
    with caplog.at_level(logging.INFO):
        await node.until(lambda: node.warm.ready)
        assert [r.message for r in caplog.records].count("zygote_unfit") == 1
        (folder := tmp_path / "later").mkdir()
        later = Node(folder, "", BuildTiming(), early=True)
        assert node.warm.recipe is not None
        later.warm.adopt(ImportRecipe.from_wire(node.warm.recipe.to_wire()))
        await later.until(lambda: later.warm.ready)
    assert [r.message for r in caplog.records].count("zygote_unfit") == 1
    for one in node, later:
        await one.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_zygote_that_is_lost_while_it_is_built_is_built_again(
    tmp_path: Path, number: int
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(wake_interval_s=0.1, retry_pauses_s=(0.0,)))
    await node.until(lambda: node.children.non_worker_pids)
    (first,) = node.children.non_worker_pids
    os.kill(first, number)
    both = os.open(node.go, os.O_RDWR)
    await node.until(lambda: node.warm.ready)
    os.close(both)
    assert not node.warm.disabled_reason
    await node.close()


async def test_a_zygote_that_is_lost_each_time_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path, DEADLY, BuildTiming(retry_pauses_s=(0.0, 0.0)))
    await node.until(lambda: node.warm.disabled_reason)
    assert node.warm.disabled_reason == "no zygote can fork workers: it has ended"
    await node.until(lambda: not node.warm.building)
    assert len(list(tmp_path.glob("zygote-*.log"))) == 3
    assert [r.message for r in caplog.records].count("warm_start_disabled") == 1
    await node.close()


SECOND = """
import os, slow_module
with open(os.environ["GO"] + ".pid", "w") as file:
    file.write(str(os.getpid()))
"""


@pytest.fixture
def second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, str]:
    """Write a module that imports the slow one, and return its line of a recipe."""
    path = tmp_path / "second_module.py"
    path.write_text(SECOND)
    monkeypatch.syspath_prepend(tmp_path)
    return "import", "second_module", str(path)


async def test_a_zygote_that_was_started_early_goes_on_with_its_recipe(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    both = os.open(node.go, os.O_RDWR)
    node.warm.adopt(ImportRecipe((node.line, second)))
    await node.until(lambda: node.warm.ready)
    os.close(both)
    assert int(Path(f"{node.go}.pid").read_text()) == first
    assert await node.pid() == first
    await node.until(lambda: not list(tmp_path.glob("zygote-*.json")))
    await node.close()


async def test_a_library_that_comes_first_in_the_recipe_is_imported_first(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    both = os.open(node.go, os.O_RDWR)
    assert await node.built((second, node.line), both) != first


@pytest.mark.parametrize("lost", [False, True], ids=["not needed", "killed"])
async def test_without_its_early_zygote_a_node_builds_a_usual_one(
    tmp_path: Path, second: tuple[str, str, str], *, lost: bool
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    both = os.open(node.go, os.O_RDWR)
    if lost:
        os.kill(first, signal.SIGKILL)
        await node.until(lambda: not Path(f"/proc/{first}/maps").read_bytes())
    else:
        node.warm.starter.end_early()
        await node.until(lambda: not node.processes())
    assert await node.built((node.line, second), both) != first


async def test_what_an_early_zygote_imported_must_not_have_changed(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    """Its recipe names the files only later."""
    node = Node(tmp_path, SLOW, BuildTiming(retry_pauses_s=(0.0,)), early=True)
    first = await node.pid()

    def imports() -> int:
        with contextlib.suppress(OSError):  # nobody waits
            return os.open(node.go, os.O_WRONLY | os.O_NONBLOCK)
        return 0

    writing = 0
    async with asyncio.timeout(60):
        while not (writing := imports()):
            await asyncio.sleep(0.01)
    (tmp_path / "slow_module.py").touch()
    assert await node.built((node.line, second), writing) != first


async def test_an_early_zygote_ends_with_the_pool(
    tmp_path: Path, second: tuple[str, str, str]
) -> None:
    node = Node(tmp_path, SLOW, BuildTiming(), early=True)
    first = await node.pid()
    await node.close()
    assert not Path(f"/proc/{first}").exists()
    await node.until(lambda: not list(tmp_path.rglob("zygote-*.json")))


LIKE_TORCH = """
class cuda:
    is_initialized = _is_in_bad_fork = staticmethod(bool)


class Tensor:
    def backward(self):
        pass

    exp = sum = lambda self: self
    __matmul__ = lambda self, other: self


def ones(*shape, requires_grad):
    return Tensor()
"""
DIGEST = """
import os

def torch_key():
    with open(os.environ["GO"] + ".pid", "a") as file:
        file.write(str(os.getpid()))
"""


async def test_a_zygote_computes_the_digests_of_the_compiler_and_of_no_older_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = tmp_path / "torch" / "_inductor"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text(LIKE_TORCH)
    (inner / "codecache.py").write_text(DIGEST)
    for name in ("__init__", "compile_fx", "not_imported"):
        (inner / f"{name}.py").touch()
    (tmp_path / "train.py").touch()
    imports = "import torch._inductor.codecache, torch._inductor.compile_fx"
    node = Node(tmp_path, imports, BuildTiming())
    await node.until(lambda: node.warm.ready)
    assert int(Path(f"{node.go}.pid").read_text()) == await node.pid()
    (inner / "not_imported.py").write_text("changed = True")
    request = ForkRequest(list(node.warm.program.argv), {}, 1, 2)
    with caplog.at_level(logging.WARNING):
        assert await node.warm.fork([request]) is None
    (lost,) = [vars(record)["why"] for record in caplog.records]
    assert lost == f"{inner}/not_imported.py has changed"
    await node.close()
