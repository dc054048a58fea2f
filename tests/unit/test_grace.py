"""The time that the agent's last work may take."""

import asyncio

from dlrover_agent.checkpoint.grace import GraceAfterSignal


async def test_work_without_a_signal_has_no_limit() -> None:
    loop = asyncio.get_running_loop()
    grace, pause, done = GraceAfterSignal(0.0), loop.create_future(), asyncio.Event()

    async def work() -> None:
        await pause
        done.set()

    task = asyncio.create_task(grace.limit(work()))
    loop.call_later(0.05, pause.set_result, None)
    await asyncio.wait_for(task, 60)
    assert done.is_set()


async def test_a_signal_ends_work_that_is_under_way_or_comes_later() -> None:
    grace, never = GraceAfterSignal(0.0), asyncio.Event()

    async def work() -> None:
        await never.wait()

    task = asyncio.create_task(grace.limit(work()))
    await asyncio.sleep(0)
    assert not task.done()
    grace.begin()
    await asyncio.wait_for(task, 60)
    await asyncio.wait_for(grace.limit(work()), 60)
