"""Calls that block hold up nothing but themselves."""

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from dlrover_agent.logs import Files, Pump, Stream
from dlrover_py.aside import Aside, Outlet, Overdue
from dlrover_py.telemetry import setup


async def test_a_call_that_hangs_is_waited_for_within_its_limit_and_all_else_goes_on() -> None:
    aside, gate, late = Aside("test"), threading.Event(), []
    over = threading.Event()

    def hangs() -> str:
        gate.wait(60)
        return "after all"

    def took(outcome: str) -> None:
        late.append(outcome)
        over.set()

    ran = []
    hung = asyncio.create_task(aside.run(hangs, 0.05, late=took))
    with pytest.raises(Overdue, match=r"no answer within 0\.05 s"):
        await hung
    with pytest.raises(Overdue):
        await aside.run(lambda: ran.append("too late"), 0.01)
    gate.set()
    assert await aside.run(lambda: "next", 60) == "next"
    assert over.wait(60)
    assert late == ["after all"], "what it returned is taken care of"
    assert not ran, "a call that had not begun in time is never made"


async def test_an_exception_is_told_to_who_waits() -> None:
    aside = Aside("test")
    with pytest.raises(ZeroDivisionError):
        await aside.run(lambda: 1 // 0, 60)
    assert await aside.run(lambda: 1, 60) == 1


def test_the_oldest_are_dropped_and_no_call_without_a_size() -> None:
    aside, gate, made = Aside("test", most=10), threading.Event(), []
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


async def test_a_log_file_whose_disk_hangs_costs_lines_and_holds_up_no_pump(tmp_path: Path) -> None:
    fifo = tmp_path / "stdout.log"
    os.mkfifo(fifo)  # opening it hangs until somebody reads
    read, write = full_pipe()
    files = Files()
    pump = Pump(Stream((fifo,), shown=True), Outlet(write), files)
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
