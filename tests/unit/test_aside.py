"""Calls that block hold up nothing but themselves."""

import asyncio
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dlrover_agent.workers.logs import LogFiles, StreamPump
from dlrover_agent.workers.streams import WorkerStream
from dlrover_py.process.blocking import (
    BackgroundThread,
    BackgroundWriter,
    OverdueError,
)
from dlrover_py.telemetry import setup


async def test_a_call_that_hangs_is_waited_for_within_its_limit_and_all_else_goes_on() -> None:
    aside, gate, late = BackgroundThread("test"), threading.Event(), []
    over = threading.Event()

    def hangs() -> str:
        gate.wait(60)
        return "after all"

    def took(outcome: str) -> None:
        late.append(outcome)
        over.set()

    ran = []
    hung = asyncio.create_task(aside.run(hangs, 0.05, discard=took))
    with pytest.raises(OverdueError, match=r"no answer within 0\.05 s"):
        await hung
    with pytest.raises(OverdueError):
        await aside.run(lambda: ran.append("too late"), 0.01)
    gate.set()
    assert await aside.run(lambda: "next", 60) == "next"
    assert over.wait(60)
    assert late == ["after all"], "what it returned is taken care of"
    assert not ran, "a call that had not begun in time is never made"


async def test_signals_are_left_to_the_main_thread() -> None:
    aside = BackgroundThread("test")
    blocked = await aside.run(lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), 60)
    assert {signal.SIGINT, signal.SIGTERM} <= blocked
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


async def test_an_outcome_that_nobody_waits_for_any_more_is_taken_care_of() -> None:
    aside, late = BackgroundThread("test"), []
    over = threading.Event()

    def took(outcome: int) -> None:
        late.append(outcome)
        over.set()

    for _ in range(100):  # at any point of the call
        over.clear()
        late.clear()
        task = asyncio.create_task(aside.run(lambda: 1, 60, took, over.set))
        await asyncio.sleep(0)
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(outcome, asyncio.CancelledError):
            assert await asyncio.to_thread(over.wait, 60)
        else:
            assert not late


async def test_an_exception_is_told_to_who_waits() -> None:
    aside = BackgroundThread("test")
    with pytest.raises(ZeroDivisionError):
        await aside.run(lambda: 1 // 0, 60)
    assert await aside.run(lambda: 1, 60) == 1


def test_the_oldest_are_dropped_and_no_call_without_a_size() -> None:
    aside, gate, made = BackgroundThread("test", max_waiting=10), threading.Event(), []
    aside.post(lambda: gate.wait(60))
    for number in range(8):
        size = 0 if number == 1 else 4
        aside.post(lambda number=number: made.append(number), size)  # type: ignore[misc]
    assert not aside.finish(0.01)
    gate.set()
    assert aside.finish(60)
    assert made == [1, 6, 7]
    assert aside.dropped == 5 * 4


def full_pipe() -> tuple[int, int]:
    read, write = os.pipe()
    os.set_blocking(write, False)
    for size in (65536, 1):  # as long as there is room for a byte
        try:
            while True:
                os.write(write, b"x" * size)
        except BlockingIOError:
            continue
    os.set_blocking(write, True)
    return read, write


def test_a_log_that_is_not_read_holds_up_nobody() -> None:
    read, write = full_pipe()
    with open(write, "w", closefd=False) as stream:
        setup("test", stream=stream, logger="dlrover-test", aside=True)
        logging.getLogger("dlrover-test").warning("said_in_vain")  # would block for ever
        os.set_blocking(read, False)
        text = b""
        deadline = time.monotonic() + 60
        while b"said_in_vain" not in text and time.monotonic() < deadline:
            try:
                text += os.read(read, 1 << 20)
            except BlockingIOError:
                os.sched_yield()
        assert b'"event": "said_in_vain"' in text
    logging.getLogger("dlrover-test").handlers.clear()
    os.close(read)
    os.close(write)


async def test_a_worker_waits_for_a_slow_console_and_loses_nothing() -> None:
    read, write = os.pipe()
    console, files = BackgroundWriter(write), LogFiles()
    pump = StreamPump(WorkerStream(prefix="> "), console, files)
    lines = [
        b"%08d %s\n" % (i, b"x" * 9000) for i in range(4 * BackgroundWriter.HIGH_BYTES // 9000)
    ]

    def work() -> None:
        for line in lines:
            os.write(pump.end, line)
        os.close(pump.end)

    worker = asyncio.create_task(asyncio.to_thread(work))
    deadline = time.monotonic() + 60
    while not console.slow and time.monotonic() < deadline:
        await asyncio.sleep(0)
    assert console.slow
    assert not worker.done(), "it waits, and this loop does not"
    with open(read, "rb") as reader:
        taken = asyncio.create_task(asyncio.to_thread(reader.read))
        await worker
        pump.close()
        assert await asyncio.to_thread(console.finish, 60)
        assert console.give_up() == 0
        os.close(write)
        assert await taken == b"".join(b"> " + line for line in lines)


def test_lines_that_a_late_reader_has_missed_are_counted_once() -> None:
    read, write = full_pipe()
    console = BackgroundWriter(write)
    lines = 3 * BackgroundWriter.MAX_BYTES // 10_000
    for _ in range(lines):
        console.write(b"x" * 9999 + b"\n")
    taken: list[bytes] = []

    def takes() -> None:
        with open(read, "rb") as reader:
            taken.append(reader.read())

    reader = threading.Thread(target=takes)
    reader.start()
    assert console.finish(60)
    os.close(write)
    reader.join()
    lost = console.take_lost()
    assert lost > 0
    assert taken[0].count(b"\n") + lost == lines
    assert console.take_lost() == console.give_up() == 0


async def test_after_a_signal_a_console_that_is_not_read_is_given_up() -> None:
    read, write = full_pipe()
    console = BackgroundWriter(write, hung_after_s=0.0)
    pump = StreamPump(WorkerStream(), console, LogFiles())

    def work(lines: int) -> None:
        for _ in range(lines):
            os.write(pump.end, b"x" * 9999 + b"\n")

    lines = 3 * BackgroundWriter.MAX_BYTES // 10_000
    worker = asyncio.create_task(asyncio.to_thread(work, lines))
    deadline = time.monotonic() + 60
    while not console.slow and time.monotonic() < deadline:
        await asyncio.sleep(0)
    assert not worker.done()
    console.waits_for_reader = False
    await asyncio.wait_for(worker, 60)
    os.close(pump.end)
    pump.close()
    assert not console.finish(0.01)
    lost = console.give_up()
    assert lines - 7 <= lost <= lines, "all but those of the write that hangs"
    assert console.give_up() == 0, "they are counted once"
    os.close(read)
    os.close(write)


async def test_a_log_file_whose_disk_hangs_costs_lines_and_holds_up_no_pump(tmp_path: Path) -> None:
    fifo = tmp_path / "stdout.log"
    os.mkfifo(fifo)  # opening it hangs until somebody reads
    read, write = full_pipe()
    files = LogFiles()
    pump = StreamPump(WorkerStream((fifo,), shown=True), BackgroundWriter(write), files)
    turns = 0
    for _ in range(100):
        os.write(pump.end, b"line\n" * 1000)
        await asyncio.sleep(0)
        pump.drain()
        turns += 1
    os.close(pump.end)
    pump.close()
    assert turns == 100
    assert pump.words().endswith(b"line\n" * 1000), "the last words are there all the same"
    with open(fifo, "rb") as reader:
        assert reader.read() == b"line\n" * 100_000
    files.finish(60)
    os.close(read)
    os.close(write)
