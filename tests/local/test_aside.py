"""Threads that start a process."""

import subprocess

from dlrover_py.process.blocking import (
    BackgroundThread,
    inheritable_signals,
)


async def test_a_process_that_a_thread_starts_blocks_no_signal_of_its_own() -> None:
    def blocked() -> str:
        with inheritable_signals():
            return subprocess.check_output(["grep", "SigBlk", "/proc/self/status"], text=True)

    expected = subprocess.check_output(["grep", "SigBlk", "/proc/self/status"], text=True)
    assert await BackgroundThread("test").run(blocked, 60) == expected
