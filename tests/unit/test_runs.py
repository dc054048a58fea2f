"""Past runs of this machine: which have ended, and which are removed."""

import contextlib
import fcntl
import io
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.cli import logs, runs
from dlrover_py.cli.commands import main
from dlrover_py.cli.local_jobs import find_to_read
from dlrover_py.cli.logs import LogQuery
from dlrover_py.cli.runs import Run, ended, remove, to_remove
from dlrover_py.cli.settings import Settings
from dlrover_py.dashboard import curves
from dlrover_py.localcluster.cluster import _tail
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.local import History, ProgressSample, Snapshot
from tests.unit.test_output import status

NOW = 1000.0


@given(
    ends=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 900)), max_size=12),
    jobs=st.lists(st.sampled_from("abc"), max_size=2),
    older=st.none() | st.integers(0, 1000),
    keep=st.integers(0, 3),
)
def test_each_condition_leaves_fewer(
    ends: list[tuple[str, int]], jobs: list[str], older: int | None, keep: int
) -> None:
    found = [Run(Path(str(i)), name, float(at), None) for i, (name, at) in enumerate(ends)]
    found.sort(key=lambda run: run.ended_at, reverse=True)
    gone = to_remove(found, jobs=jobs, older_than_s=older, keep=keep, now=NOW)
    for run in gone:
        newer = [r for r in found[: found.index(run)] if r.name == run.name]
        assert len(newer) >= keep
        assert not jobs or run.name in jobs
        assert older is None or NOW - run.ended_at > older
    every = to_remove(found, jobs=(), older_than_s=None, keep=0, now=NOW)
    assert every == found
    for name in "abc":
        mine = [r for r in found if r.name == name]
        if older is None and (not jobs or name in jobs):
            assert [r for r in gone if r.name == name] == mine[keep:]


def made(root: Path, name: str, *, lock: bool = True, last: bool = True) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    if lock:
        (folder / names.RUN_LOCK).touch()
    if last:
        text = status().model_copy(update={"ended_at": 5.0}).model_dump_json(by_alias=True)
        (folder / names.STATUS_FILE).write_text(text)
    return folder


def test_a_run_that_goes_on_is_never_removed(tmp_path: Path) -> None:
    done = made(tmp_path, "a@1")
    killed = made(tmp_path, "a@2", last=False)
    old = made(tmp_path, "b@1", lock=False)  # as earlier versions left them
    made(tmp_path, "b@2", lock=False, last=False)  # it may be starting at this moment
    going = made(tmp_path, "a@3")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c@1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "notes.txt").touch()
    with (going / names.RUN_LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = ended(tmp_path)
        assert {run.folder for run in found} == {done, killed, old}
        assert not remove(Run(going, "a", 0.0, None))
        assert going.exists()
    assert {run.folder for run in ended(tmp_path)} == {done, killed, old, going}
    assert all(map(remove, found))
    assert not any(map(remove, found))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"a@3", "b@2", "c@1", "elsewhere", "notes.txt"}
    assert ended(tmp_path / "nowhere") == []


@pytest.mark.parametrize("name", ["a@1", "b@1"])
def test_what_a_failed_removal_has_left_is_removed_by_the_next_one(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path, "b@1")
    made(tmp_path, f"{runs.REMOVED_PREFIX}{name}", last=False)
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path))
    for least_age in ("9999w", "1s"):
        assert main(["job", "rm", "--yes", "--older-than", least_age]) == 0
        assert [path.name for path in tmp_path.iterdir()] == (["b@1"] if least_age != "1s" else [])


@pytest.mark.parametrize("names", [["NOSUCH"], ["b", "NOSUCH"], [""]])
def test_the_name_of_a_job_that_is_not_there_removes_nothing_and_fails(
    tmp_path: Path,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = made(tmp_path, "b@1")
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path))
    assert main(["job", "rm", "--yes", *names]) == 2
    assert f"no run of {names[-1] or chr(39) * 2} has ended" in capfd.readouterr().err
    assert folder.exists()


def test_what_cannot_be_removed_is_told_with_its_path_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each later removal failed, and named the file without its folder."""
    made(tmp_path, "b@1")
    stuck = tmp_path / f"{runs.REMOVED_PREFIX}a@1"
    stuck.write_text("a file is no folder, so it is not removed as one")
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path))
    assert main(["job", "rm", "--yes", "--older-than", "1s"]) == 0
    assert f"left by an earlier removal: {stuck}: " in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [stuck.name]


def test_times_have_a_unit() -> None:
    assert [runs.seconds(t) for t in ("90s", "30m", "12h", "7d", "2w")] == [
        90, 1800, 43200, 604800, 1209600,
    ]  # fmt: skip
    for bad in ("7", "d", "-1d", "1.5h", "7 d", "7D", ""):
        with pytest.raises(ConfigError, match="expected a time such as 12h"):
            runs.seconds(bad)


@pytest.mark.parametrize("name", [None, "evil"])
def test_a_run_that_another_user_could_have_put_there_is_not_looked_at(
    tmp_path: Path, name: str | None
) -> None:
    """Its status was a FIFO, and each command that looks at a job waited for it without end."""
    folder = tmp_path / "state" / "evil@2"
    folder.mkdir(parents=True)
    os.mkfifo(folder / names.STATUS_FILE)
    (tmp_path / "state").chmod(0o777)
    settings = Settings(tmp_path / "run", tmp_path / "state", {})
    with pytest.raises(ConfigError, match="others can write to it"):
        find_to_read(settings, name)


def test_of_a_log_without_limits_only_the_end_is_read(tmp_path: Path) -> None:
    """A node's log of a terabyte ended the cluster of this machine."""
    log = tmp_path / "agent.log"
    with log.open("wb") as file:
        file.seek(1 << 40)
        file.write(b"\nits last words\n")
    assert _tail(log).endswith("its last words")


def test_a_log_is_shown_in_parts(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A log may be larger than the memory, and so may be a line of it."""
    long = b"x" * (logs.LONGEST_LINE + 3 * logs.READ_BYTES)
    folder = tmp_path / "n0" / "1" / "1" / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_bytes(b"one\ntwo\n" + long + b"\nlast")
    logs.print_logs(tmp_path, None, LogQuery())
    said = capfdbinary.readouterr().out.splitlines()
    lines = [line.partition(b"] ")[2] for line in said]
    assert lines[:2] == [b"one", b"two"]
    assert lines[-1] == b"last"
    assert b"".join(lines[2:-1]) == long
    assert max(map(len, lines)) <= logs.LONGEST_LINE + logs.READ_BYTES


def test_a_log_that_could_not_be_opened_once_is_followed_later(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, out = tmp_path / "running", tmp_path / "n0" / "1" / "1" / "0" / "stdout.log"
    running.touch()
    out.parent.mkdir(parents=True)
    os.mkfifo(out)
    told = threading.Event()

    class Errors(io.StringIO):
        def write(self, text: str) -> int:
            told.set()
            return super().write(text)

    monkeypatch.setattr("sys.stderr", errors := Errors())
    following = threading.Thread(target=logs.print_logs, args=(tmp_path, running, LogQuery()))
    following.start()
    assert told.wait(30)
    (new := tmp_path / "new").write_text("step 1\n")
    new.replace(out)
    running.unlink()
    following.join()
    assert b"step 1" in capfdbinary.readouterr().out
    assert errors.getvalue().count(str(out)) == 1


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for runs of this machine, which the commands use."""
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.mark.parametrize("older", [False, True])
def test_a_run_that_was_killed_is_shown_and_not_an_older_one(
    here: Path, capsys: pytest.CaptureFixture[str], older: bool
) -> None:
    if older:
        made(here, "ghost@1")
    folder = made(here, "ghost@2", last=False)
    out = folder / "logs" / "n0" / "1" / "1" / "0" / "stdout.log"
    out.parent.mkdir(parents=True)
    out.write_bytes(b"step 1\n")

    def call(*argv: str) -> str:
        assert main(["job", *argv]) == 0, argv
        return "".join(capsys.readouterr())

    listed = call("list").splitlines()
    assert [line.split()[1] for line in listed[1:]] == ["Killed", "Running"][: 1 + older]
    assert json.loads(call("list", "--json"))[0]["state"] == "killed"
    for name in (["ghost"], []):
        assert "step 1" in call("logs", *name)
        for command in ("describe", "why", "report", "get"):
            if name or command != "get":
                said = call(command, *name)
                assert "Killed" in said, command
                assert "Running" not in said.rpartition("</style>")[2], command
        for argv in (["events"], ["events", "--json"], ["why", "--json"]):
            assert "the run was killed before it had a last status" in call(*argv, *name)
        described = json.loads(call("describe", "--json", *name))
        assert described["phase"] == "Killed"
        assert described.keys() == {"name", "phase", "reason", *Snapshot.model_fields}
    assert str(folder / "logs") in call("describe", "ghost")
    assert json.loads(call("get", "--json", "ghost"))[0]["phase"] == "Killed"


def test_a_run_is_there_while_another_command_looks_at_it(here: Path) -> None:
    folder = made(here, "ghost@2", last=False)
    with (folder / names.RUN_LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert [run.state for run in ended(here)] == ["killed"]
        assert runs.newest(here, "ghost") == folder
    with (folder / names.RUN_LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its process is there
        assert runs.newest(here, "ghost") is None


@pytest.fixture
def ending(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a job that ends as soon as its cluster process is asked for anything."""

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the test ended without a call
            while True:
                call, _ = listening.accept()
                with call:
                    if call.recv(65536):  # without a byte it is a look whether anyone listens
                        out = made(here, "ghost@1") / "logs" / "n0" / "1" / "1" / "0" / "stdout.log"
                        out.parent.mkdir(parents=True)
                        out.write_bytes(b"step 1\n")
                        listening.close()

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.setenv("DLROVER_RUNTIME_DIR", folder)
        Path(folder, "ghost").mkdir()
        listening.bind(str(Path(folder, "ghost", names.CLUSTER_SOCKET)))
        listening.listen()
        serving = threading.Thread(target=serve, args=(listening,))
        serving.start()
        yield "ghost"
        with contextlib.suppress(OSError):  # it is closed
            listening.shutdown(socket.SHUT_RDWR)
        serving.join()


@pytest.mark.parametrize("command", ["describe", "events", "get", "report", "why"])
def test_a_job_that_ends_while_it_is_asked_is_read_as_an_ended_one(
    ending: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", command, ending]) == 0, capsys.readouterr().err


def test_a_job_that_ends_while_it_is_asked_for_logs_has_those_of_its_run(
    ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", "logs", ending]) == 0
    assert "step 1" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("scale", "2", "--job"), ("stop",), ("suspend",)])
def test_a_job_that_ends_before_a_change_is_told_as_ended(
    ending: str, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", *command, ending]) == 2
    assert "job ghost has just ended; see `dlrover job describe ghost`" in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["DLROVER_STATE_DIR", "DLROVER_RUNTIME_DIR"])
def test_nobody_is_told_to_remove_a_folder_that_a_variable_names(
    here: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
) -> None:
    """The advice about ``DLROVER_STATE_DIR=/tmp`` was to remove ``/tmp``."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv(variable, str(shared))
    assert main(["job", "list"]) == 2
    said = capsys.readouterr().err
    assert f"dlrover: {shared}: others can write to it" in said
    assert f"set {variable} to another folder" in said
    assert "remove" not in said.partition("; expected ")[2]


DAMAGES = {
    "empty": b"",
    "cut off": b"{",
    "of other types": b'{"name": 7, "phase": [], "samples": 7}',
    "nested": b"[" * 100_000,
    "not text": b"\xff\xfe",
}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("damage", [*DAMAGES, fifo, device])
def test_a_damaged_status_is_named_and_hides_neither_run_nor_logs(
    tmp_path: Path,
    damage: str | Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A FIFO and an endless device must not be waited for either."""
    folder = made(tmp_path, "gpt@1", last=False)
    file = folder / names.STATUS_FILE
    if callable(damage):
        damage(file)
    else:
        file.write_bytes(DAMAGES[damage])
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(tmp_path / "run"))
    for command in ("describe", "why", "events"):
        assert main(["job", command, "gpt"]) == 2
        said = capsys.readouterr().err
        assert f"dlrover: {file}: " in said
        assert "remove the run with `dlrover job rm`" in said
        assert "Traceback" not in said
    assert main(["job", "list", "--all"]) == 0
    listed = capsys.readouterr()
    assert listed.out.splitlines()[1].split()[:2] == ["gpt", "Damaged"]
    assert str(file) in listed.err
    out = folder / "logs" / "n0" / "1" / "1" / "0" / "stdout.log"
    out.parent.mkdir(parents=True)
    out.write_bytes(b"step 1\n")
    os.mkfifo(out.with_name("stderr.log"))
    assert main(["job", "logs", "gpt"]) == 0
    shown = capsys.readouterr()
    assert "step 1" in shown.out
    assert "stderr.log: it is not a regular file" in shown.err


@pytest.mark.parametrize("damage", [*DAMAGES, fifo, device])
def test_a_damaged_history_is_named_in_the_report(
    tmp_path: Path, damage: str | Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path, "gpt@1")
    job = find_to_read(Settings(tmp_path / "run", tmp_path, {}), "gpt")
    assert job.history().samples == []
    assert capsys.readouterr().err == ""
    if callable(damage):
        damage(folder / names.HISTORY_FILE)
    else:
        (folder / names.HISTORY_FILE).write_bytes(DAMAGES[damage])
    assert job.history().samples == []
    assert f"the history is left out: {folder / names.HISTORY_FILE}: " in capsys.readouterr().err


def test_curves_of_a_past_run_are_csv_and_an_event_file_that_replaces_the_last_one(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = made(here, "gpt@1"), tmp_path / "runs"
    tensorboard = ["job", "curves", "gpt", "--tensorboard", str(out)]
    assert main(tensorboard) == 2
    assert "job gpt has no history: expected a job of this machine" in capsys.readouterr().err
    assert not out.exists()
    for steps in (2, 3):
        history = History(
            samples=[ProgressSample(at=1e9 + i, step=i, round=1, nodes=2) for i in range(steps)]
        )
        (folder / names.HISTORY_FILE).write_text(history.model_dump_json())
        assert main(["job", "curves", "gpt"]) == 0
        assert capsys.readouterr().out == curves.as_csv(history)
        assert main(tensorboard) == 0
        assert f"{steps} samples" in capsys.readouterr().out
        (file,) = (out / "gpt").iterdir()
        assert file.read_bytes() == curves.as_event_file(history)
    file.unlink()
    file.mkdir()
    assert main(tensorboard) == 2
    assert f"dlrover: {file}: Is a directory" in capsys.readouterr().err
    assert list((out / "gpt").iterdir()) == [file]
