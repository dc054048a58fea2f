"""Posts more output than waits for a console, says so on standard error, and finishes it."""

import os

from dlrover_agent.cli import finish_output
from dlrover_py.process.blocking import BackgroundWriter, shared_writer
from dlrover_py.telemetry import setup

setup("elastic-run", aside=True)
for _ in range(3 * BackgroundWriter.MAX_BYTES // 1000):
    shared_writer(1).write(b"x" * 999 + b"\n")
os.write(2, b"all is posted\n")
finish_output()
finish_output()
