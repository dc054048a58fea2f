"""The ``dlrover`` command, with a standard output that takes nothing, a part, or has no reader."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover_py.protocol.errors import ExitCode
from tests.programs import PROGRAMS
from tests.unit.test_runs import made

DLROVER = Path(sys.executable).with_name("dlrover")
MAX_FILE_BYTES = 300


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a command on a machine where one job has ended."""
    log = made(tmp_path / "state", "demo@1") / "logs" / "n0" / "1" / "1" / "0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"step 1\n" * 1000)
    folders = {f"DLROVER_{name.upper()}_DIR": str(tmp_path / name) for name in ("state", "run")}
    return {**os.environ, **folders, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["--help", "job list", "job report", "job describe", "job why --json", "job logs"]
)
def test_a_full_disk_is_told_in_a_line_and_is_no_failed_job(
    env: dict[str, str], command: str, unbuffered: str
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [DLROVER, *command.split()],
            env=env | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=150,
        )
    lines = [line for line in done.stderr.splitlines() if not line.startswith("demo on this")]
    assert lines == ["dlrover: standard output: No space left on device"]
    assert done.returncode == ExitCode.USAGE


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "job report", "job logs"])
def test_output_that_a_file_takes_in_part_is_not_lost_without_a_word(
    env: dict[str, str], tmp_path: Path, command: str, unbuffered: str
) -> None:
    """Without a buffer, Python ignored that a write had taken only a part of the page."""
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [DLROVER, *command.split()],
            env=env | {"PYTHONUNBUFFERED": unbuffered},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=150,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES)
            ),
        )
    assert (tmp_path / "out").stat().st_size == MAX_FILE_BYTES
    assert done.stderr.endswith("dlrover: standard output: File too large\n")
    assert "Traceback" not in done.stderr
    assert done.returncode == ExitCode.USAGE


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--help", "job report", "job describe", "job logs"])
def test_nothing_is_said_of_a_reader_that_has_gone(
    env: dict[str, str], command: str, unbuffered: str
) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [DLROVER, *command.split()],
            env=env | {"PYTHONUNBUFFERED": unbuffered},
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=150,
        )
    finally:
        os.close(write)
    assert [line for line in done.stderr.splitlines() if not line.startswith("demo on this")] == []
    assert done.returncode in (0, 1)


@pytest.mark.parametrize(
    "module", ["dlrover_py.telemetry", "dlrover_py.cli.commands", "dlrover_py.cli.view"]
)
def test_ctrl_c_while_modules_are_imported_ends_the_command_as_later(module: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "interrupt_import.py", module],
        capture_output=True,
        text=True,
        timeout=150,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
