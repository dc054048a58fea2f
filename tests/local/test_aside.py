"""Threads that start a process, or write for one."""

import re
import subprocess
import sys

from dlrover_py.process.blocking import (
    BackgroundThread,
    BackgroundWriter,
    inheritable_signals,
)
from tests.programs import PROGRAMS


async def test_a_process_that_a_thread_starts_blocks_no_signal_of_its_own() -> None:
    def blocked() -> str:
        with inheritable_signals():
            return subprocess.check_output(["grep", "SigBlk", "/proc/self/status"], text=True)

    expected = subprocess.check_output(["grep", "SigBlk", "/proc/self/status"], text=True)
    assert await BackgroundThread("test").run(blocked, 60) == expected


def test_lines_that_a_late_reader_has_missed_are_counted_once_at_the_end() -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "outrun_the_console.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        assert run.stderr is not None
        assert run.stderr.readline() == b"all is posted\n"
        out, err = run.communicate(timeout=120)
    assert run.returncode == 0
    (lost,) = re.findall(rb'"lines": ([0-9]+)', err)
    assert int(lost) > 0
    assert out.count(b"\n") + int(lost) == 3 * BackgroundWriter.MAX_BYTES // 1000
    assert b"the reader of standard output has let 16 MiB wait" in err
