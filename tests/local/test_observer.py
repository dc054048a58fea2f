"""The record of what an observed worker imports: a full disk, a full record, and signals."""

import subprocess
import sys
from pathlib import Path

from dlrover_agent.warm.observer import RECORD_SIZE, ImportObserver
from dlrover_agent.warm.pool import installed_folders
from dlrover_agent.warm.script import OBSERVED_START
from dlrover_py.process.blocking import BackgroundThread
from dlrover_py.protocol.recipe import decode_record
from tests.fakes import fill_up, small_disk
from tests.programs import PROGRAMS


def run(program: str, record: Path) -> str:
    done = subprocess.run(
        [sys.executable, PROGRAMS / program, str(record)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout


def made_record(folder: Path, size: int) -> Path:
    path = folder / "record"
    path.write_bytes(bytes(size))
    return path


async def test_on_a_full_disk_workers_are_not_observed(tmp_path: Path) -> None:
    """A worker that wrote to a sparse file was killed by SIGBUS, at each start."""
    (script := tmp_path / "train.py").write_text("import json\n")
    argv = [sys.executable, "-u", str(script)]
    files = BackgroundThread("files")
    with small_disk(tmp_path / "small", "4m") as disk:
        observer = ImportObserver(disk, files)
        (free,) = await observer.observed_argvs([argv], installed_folders())
        assert subprocess.run(free, check=False).returncode == 0
        assert await observer.end()
        assert "'json'" in observer.texts[0]
        fill_up(disk / "filler")
        (full,) = await observer.observed_argvs([argv], installed_folders())
        assert subprocess.run(full, check=False).returncode == 0
        assert full == argv
        assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_record_says_what_the_start_of_python_has_changed(tmp_path: Path) -> None:
    """A zygote runs this code once, and without a rank."""
    hook = "import os\nos.environ['MY_DEVICE'] = os.environ['LOCAL_RANK']\ndel os.environ['OLD']\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    (script := tmp_path / "train.py").write_text("")
    record = made_record(tmp_path, RECORD_SIZE)
    subprocess.run(
        [sys.executable, "-u", "-c", OBSERVED_START, record, "/none", script],
        env={"PYTHONPATH": str(tmp_path), "LOCAL_RANK": "1", "OLD": "1"},
        check=True,
    )
    lines = record.read_bytes().rstrip(b"\0").decode().splitlines()
    found = [line for line in map(decode_record, lines) if line[0] == "start"]
    assert found == [("start", "MY_DEVICE", "1"), ("start", "OLD", None)]


def test_a_record_ends_before_the_first_line_that_does_not_fit(tmp_path: Path) -> None:
    """A later import may depend on the value that is missing."""
    record = made_record(tmp_path, 1024)
    run("note_too_much.py", record)
    assert record.read_bytes().rstrip(b"\0") == b"('env', 'A', '1')\n"


def test_a_signal_handler_may_note_while_the_script_does(tmp_path: Path) -> None:
    """It waited for a lock that its own thread held."""
    record = made_record(tmp_path, RECORD_SIZE)
    handled = int(run("note_signals.py", record))
    assert handled
    lines = record.read_bytes().rstrip(b"\0").decode().splitlines()
    names = [decode_record(line)[1] for line in lines]
    assert (names.count("SCRIPT"), names.count("HANDLED")) == (20_000, handled)
