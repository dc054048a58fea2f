"""What becomes of a zygote that is lost while it is built."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_agent.child_processes import ChildRegistry
from dlrover_agent.warm.pool import BuildTiming, ImportRecipe, WarmPool, WorkerProgram

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

    def __init__(self, folder: Path, module: str, timing: BuildTiming) -> None:
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
                (),
            ),
            disabled_reason="",
            scratch=folder,
            children=self.children,
            on_change=self.news.set,
            timing=timing,
        )
        origin = str(folder / "slow_module.py")
        self.warm.adopt(ImportRecipe((("import", "slow_module", origin),)))

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not look():
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.warm.close()

        def reaped() -> bool:
            self.warm.child_ended()
            return not self.children.non_worker_pids

        await self.until(reaped)


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
