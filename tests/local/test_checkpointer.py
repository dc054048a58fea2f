"""A Checkpointer in a script that runs without an agent, and in one that forks."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrover_py.checkpoint import shm as pool
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.persister import WriteReply, WriteRequest
from dlrover_py.trainer.standalone import REPLACED_BY_NEWER, StandalonePersister
from tests.programs import PROGRAMS
from tests.unit.test_checkpointer import DEADLINE_S

ROOT = Path(pool.__file__).parents[2]
PERSISTER = (sys.executable, str(PROGRAMS / "persister.py"))
ALONE = str(PROGRAMS / "checkpoint_alone.py")


def ran(*args: str, timeout: float = 150, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, ALONE, *args],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.timeout(600)
def test_a_checkpoint_is_loaded_by_another_version_of_torch(tmp_path: Path) -> None:
    """`make matrix-torch` names the interpreter with the other version; else it is the same one."""
    other = os.environ.get("OTHER_PYTHON", sys.executable)
    program = str(PROGRAMS / "exchange_checkpoint.py")
    for number, pair in enumerate({(sys.executable, other), (other, sys.executable)}):
        for python, way in zip(pair, ("save", "load"), strict=True):
            done = subprocess.run(
                [python, program, way, str(tmp_path / str(number))],
                env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
                check=False,
            )
            assert done.returncode == 0, f"{way} with {python}"


def test_of_orders_that_come_faster_than_they_are_written_each_begun_is_finished(
    tmp_path: Path,
) -> None:
    told: list[tuple[str, str]] = []
    one = StandalonePersister(
        lambda answer: told.append((answer.attempt, answer.why)),
        (*PERSISTER, "done", str(tmp_path)),
    )
    made = WriteRequest(
        attempt="1",
        step=7,
        round=1,
        world=1,
        ranks=[0],
        pool="/nowhere",
        dir="/nowhere",
        job="j",
        node="n0",
        writers=["n0"],
        grant=0,
    )
    one.order(made, queue=True)
    one.order(made.model_copy(update={"attempt": "2"}), queue=True)
    one.order(made.model_copy(update={"attempt": "3"}), queue=True)
    assert told == [("2", REPLACED_BY_NEWER)]
    assert not one.wait(0.01)
    for attempt in ("1", "3"):
        (tmp_path / attempt).touch()
    one.close()
    assert told == [("2", REPLACED_BY_NEWER), ("1", ""), ("3", "")]


@pytest.mark.timeout(150)
def test_an_order_of_a_persister_that_has_died_fails_while_the_next_one_lives(
    tmp_path: Path,
) -> None:
    """The next one may be started before the end of the first one is read."""
    told: list[tuple[str, str]] = []
    pid, started, read, failed = tmp_path / "pid", *(threading.Event() for _ in range(3))

    def on_reply(answer: WriteReply) -> None:
        if answer.phase is PersistPhase.FAILED:
            told.append((answer.attempt, answer.why))
            failed.set()
        elif answer.attempt == "1":
            started.set()
            assert read.wait(DEADLINE_S)

    argv = ("/bin/sh", "-c", f'echo $$ > {pid}; exec "$@"', "sh", *PERSISTER, "echo")
    one = StandalonePersister(on_reply, argv)
    made = WriteRequest(
        attempt="1",
        step=7,
        round=1,
        world=1,
        ranks=[0],
        pool="/nowhere",
        dir="/nowhere",
        job="j",
        node="n0",
        writers=["n0"],
        grant=0,
    )
    one.order(made)
    assert started.wait(DEADLINE_S)
    first = int(pid.read_text())
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    one.order(made.model_copy(update={"attempt": "2"}))
    read.set()
    assert failed.wait(DEADLINE_S)
    assert told == [("1", "the persister has ended with code -9")]
    one.close(0.1)
    assert one.wait(DEADLINE_S)
    assert told[1:] == [("2", "the persister has ended with code -9")]


def test_a_script_that_fails_does_not_wait_for_what_cannot_be_finished(tmp_path: Path) -> None:
    """Parts of another node, say, which is gone."""
    told: list[str] = []
    one = StandalonePersister(
        lambda answer: told.append(answer.why), (*PERSISTER, "done", str(tmp_path))
    )
    one.order(
        WriteRequest(
            attempt="1",
            step=7,
            round=1,
            world=1,
            ranks=[0],
            pool="/nowhere",
            dir="/nowhere",
            job="j",
            node="n0",
            writers=["n0", "n1"],
            grant=0,
        )
    )
    one.close(0.1)
    assert one.wait(DEADLINE_S)
    assert told == ["the persister has ended with code -9"]


def test_a_forked_child_that_fails_lets_go_of_nothing(tmp_path: Path) -> None:
    done = ran(
        "fork_a_child_that_fails",
        WHERE=str(tmp_path / "ckpt"),
        DLROVER_SHM_DIR=str(tmp_path),
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(("where", "stored"), [("ckpt", True), ("file", False)])
def test_after_close_a_checkpointer_answers_what_is_known(
    tmp_path: Path, where: str, stored: bool
) -> None:
    (tmp_path / "file").touch()
    done = ran("call_after_close", WHERE=str(tmp_path / where), DLROVER_SHM_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    refused = "checkpoint: load() after close(): expected another Checkpointer"
    assert done.stdout.splitlines() == [f"True {stored}", refused]


def test_forced_saves_in_a_row_reach_storage_while_it_goes_on(tmp_path: Path) -> None:
    done = ran(
        "force_in_a_row",
        WHERE=str(tmp_path / "ckpt"),
        DLROVER_SHM_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    last, there = map(int, done.stdout.split())
    assert there > 2
    kept = [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()]
    assert max(kept) == last, "and what was newest at the end is there"


def test_alone_it_says_that_storage_has_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = ran(
        "force",
        WHERE=str(tmp_path / "file" / "run"),
        DLROVER_SHM_DIR=str(tmp_path),
    )
    assert done.stdout.split() == ["False", "0", "0.0"], done.stderr
    assert "Not a directory" in done.stderr


def test_the_session_comes_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "import_session.py")], capture_output=True, text=True
    )
    assert "has no attribute 'Nothing'" in done.stdout, done.stderr


def test_alone_it_cleans_up_at_the_end(tmp_path: Path) -> None:
    done = ran("keep_in_memory", DLROVER_SHM_DIR=str(tmp_path))
    assert done.stdout.startswith(pool.POOL_PREFIX), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_alone_it_leaves_nothing_behind_when_it_is_killed(tmp_path: Path) -> None:
    done = ran("keep_in_memory", "kill", DLROVER_SHM_DIR=str(tmp_path))
    assert done.returncode == -9
    nothing_is_left(tmp_path)


def test_a_memory_folder_that_cannot_be_used_is_told_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = ran("keep_in_memory", DLROVER_SHM_DIR=str(tmp_path / "file"))
    assert done.returncode == 1
    assert ": Not a directory; expected a folder of a tmpfs that can be written to" in done.stderr
    assert "DLROVER_SHM_DIR can name another one" in done.stderr


def nothing_is_left(folder: Path) -> None:
    """In a moment."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.02)):
        if not list(folder.iterdir()):
            return
        pause.wait(0.02)
    raise AssertionError(json.dumps([str(p) for p in folder.iterdir()]))


@pytest.mark.parametrize("end", ["close", "exit"])
def test_alone_it_ends_though_forked_workers_of_a_data_loader_live(
    tmp_path: Path, end: str
) -> None:
    (shm := tmp_path / "shm").mkdir()
    done = ran(
        *("have_a_data_loader", end),
        DLROVER_SHM_DIR=str(shm),
        WHERE=str(tmp_path / "ckpt"),
    )
    assert done.stdout == "[2]\n", done.stderr
    assert list(shm.iterdir()) == []
    assert list((tmp_path / "ckpt").glob("step-1.*.json")), "what was asked for is written"


@pytest.mark.parametrize("end", ["pass", "raise"])
def test_alone_what_is_due_is_written_though_nobody_closes(tmp_path: Path, end: str) -> None:
    done = ran(
        *("save_two_steps", end),
        WHERE=str(tmp_path / "ckpt"),
        DLROVER_SHM_DIR=str(tmp_path),
    )
    assert [m.step for m in CheckpointDirectory(tmp_path / "ckpt").checkpoints()] == [2], (
        done.stderr
    )
    assert "is only in memory" not in done.stderr


@pytest.mark.parametrize("end", ["close", "pass", "raise"])
def test_what_goes_with_the_job_for_want_of_a_directory_is_told(tmp_path: Path, end: str) -> None:
    done = ran(
        *("save_two_steps", end),
        DLROVER_SHM_DIR=str(tmp_path),
    )
    told = "step 2 is only in memory and is lost with the job, because no directory is given"
    assert done.stderr.count(told) == (end != "raise"), done.stderr


def test_alone_it_leaves_nothing_behind_when_it_is_killed_and_a_forked_child_lives(
    tmp_path: Path,
) -> None:
    parent = subprocess.Popen(
        [sys.executable, ALONE, "keep_in_memory", "fork"],
        env={"PYTHONPATH": str(ROOT), "DLROVER_SHM_DIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.wait(150) == -9
        nothing_is_left(tmp_path)
        child, _ = parent.communicate(b"\n")  # it ends now
    assert child.endswith(b"alive")


def test_alone_it_writes_to_storage(tmp_path: Path) -> None:
    done = ran(
        "store_and_load",
        DLROVER_SHM_DIR="/dev/shm",
        WHERE=str(tmp_path / "ckpt"),
    )
    assert done.stdout.splitlines()[-1:] == ["2 [1.0, 2.0, 3.0, 4.0, 5.0]"], done
    (manifest,) = (tmp_path / "ckpt").glob("step-2.*.json")
    (tmp_path / "other" / manifest.stem / "parts").mkdir(parents=True)
    left = CheckpointDirectory(tmp_path / "other").sweep(now=0.0)
    assert left == [manifest.stem], "by its name a sweep knows an attempt"
    assert "step 3 is only in memory" in done.stderr, "and nothing has step 4"
    assert "step 2 is only in memory" not in done.stderr
