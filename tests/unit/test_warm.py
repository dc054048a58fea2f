"""What becomes of a zygote that is lost while it is built."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_agent import warm
from dlrover_agent.warm import Recipe, Warm

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

    def __init__(self, folder: Path, module: str) -> None:
        self.go = folder / "go"
        """A FIFO: who opens it waits for the other side."""
        os.mkfifo(self.go)
        (folder / "slow_module.py").write_text(module)
        self.kin: set[int] = set()
        self.news = asyncio.Event()
        self.warm = Warm(
            [sys.executable, "-u", str(folder / "train.py")],
            {"PYTHONPATH": str(folder), "GO": str(self.go)},
            (),
            off="",
            scratch=folder,
            kin=self.kin,
            guard=lambda line: None,
            changed=self.news.set,
        )
        origin = str(folder / "slow_module.py")
        self.warm.adopt(Recipe((("import", "slow_module", origin),)))

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not look():
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.warm.close()

        def reaped() -> bool:
            self.warm.child_ended()
            return not self.kin

        await self.until(reaped)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_zygote_that_is_lost_while_it_is_built_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(warm, "WAKE_S", 0.1)
    monkeypatch.setattr(warm, "AGAIN_S", (0.0,))
    node = Node(tmp_path, SLOW)
    await node.until(lambda: node.kin)
    (first,) = node.kin
    os.kill(first, number)
    both = os.open(node.go, os.O_RDWR)
    await node.until(lambda: node.warm.ready)
    os.close(both)
    assert not node.warm.off
    await node.close()


async def test_a_zygote_that_is_lost_each_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm, "AGAIN_S", (0.0, 0.0))
    node = Node(tmp_path, DEADLY)
    await node.until(lambda: node.warm.off)
    assert node.warm.off == "no zygote is fit: it has ended"
    await node.until(lambda: not node.warm.building)
    assert len(list(tmp_path.glob("zygote-*.log"))) == 3
    assert [r.message for r in caplog.records].count("cold_from_now_on") == 1
    await node.close()
