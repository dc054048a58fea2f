"""What a failed script leaves behind, from scripts that are run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover_agent.warm import script
from dlrover_py.master.core.policy import repeats
from dlrover_py.protocol.agents import FailureKind
from tests.programs import PROGRAMS, source
from tests.unit.test_failures import death, recorded_raw


def ran(script: Path | str, folder: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """What Python itself says of this script's end."""
    path = folder / "train.py"
    path.write_text(source(script))
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | env,
        timeout=150,
        check=False,
    )


# --- real Python ---


def test_a_chain_of_exceptions_ends_with_the_one_that_was_raised(tmp_path: Path) -> None:
    done = ran(
        """
        def read():
            try:
                {}["weights"]
            except KeyError as error:
                raise RuntimeError("no weights") from error
        try:
            read()
        except RuntimeError:
            int("x")
        """,
        tmp_path,
    )
    assert done.stderr.count("Traceback (most recent call last)") == 3
    failure = death(stderr_tail=done.stderr)
    assert failure.message == "raised ValueError: invalid literal for int() with base 10: 'x'"
    assert failure.fingerprint.endswith("train.py:10")


def test_exceptions_of_torch_record_are_read_from_its_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "error.json"
    done = ran(
        PROGRAMS / "fail_in_main_under_record.py", tmp_path, TORCHELASTIC_ERROR_FILE=str(file)
    )
    assert done.returncode == 1
    failure = death(error_file=file.read_text())
    assert failure.kind is FailureKind.EXCEPTION
    assert failure.message == "raised OSError: no such shard"
    assert 'raise OSError("no such shard")' in failure.traceback
    assert failure.fingerprint == "OSError|no such shard|" + str(tmp_path / "train.py") + ":8"
    # The same from its last words, where no file can be written.
    assert death(stderr_tail=done.stderr).fingerprint == failure.fingerprint


def test_what_fails_after_the_exception_while_python_ends_is_not_the_cause(tmp_path: Path) -> None:
    done = ran(PROGRAMS / "fail_while_python_ends.py", tmp_path)
    assert done.stderr.count("Traceback") == 4
    assert death(stderr_tail=done.stderr).message == "raised ValueError: a mistake of the user"


COLD = ["-u", "-c", script.OBSERVED_START]


@pytest.mark.parametrize("end", ["os.abort()", "os.kill(os.getpid(), 9)", "None"])
def test_what_becomes_the_script_writes_its_exception_down(tmp_path: Path, end: str) -> None:
    file, record = tmp_path / "error.json", tmp_path / "record"
    record.write_bytes(bytes(1 << 16))
    train = tmp_path / "train.py"
    train.write_text(
        f"import atexit, os\natexit.register(lambda: {end})\n"
        "raise ValueError('cannot use ' + 'x' * 500_000)\n"
    )
    done = subprocess.run(
        [sys.executable, *COLD, str(record), "/nowhere", str(train)],
        env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(file)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert file.stat().st_size < 200_000
    failure = death(exit_code=done.returncode, error_file=file.read_text())
    assert failure.message.startswith("raised ValueError: cannot use xxx")
    assert failure.fingerprint.endswith(f"|{train}:3")
    assert failure.traceback.startswith("Traceback"), "with its frames"


def test_the_error_file_of_torch_is_left_as_it_is(tmp_path: Path) -> None:
    file, record = tmp_path / "error.json", tmp_path / "record"
    record.write_bytes(bytes(1 << 16))
    train = tmp_path / "train.py"
    train.write_text(f"open({str(file)!r}, 'w').write('by torch')\nraise ValueError\n")
    subprocess.run(
        [sys.executable, *COLD, str(record), "/nowhere", str(train)],
        env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(file)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert file.read_text() == "by torch"


# --- fingerprints ---


def test_a_fingerprint_is_the_same_for_the_same_place_and_another_for_others(
    tmp_path: Path,
) -> None:

    def fingerprint(function: str, number: int) -> str:
        argv = [sys.executable, str(PROGRAMS / "raise_at.py"), function, str(number)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=False)
        return death(stderr_tail=done.stderr, pid=number, step=number).fingerprint

    first = fingerprint("first", 12)
    assert first == fingerprint("first", 4711), "numbers and addresses differ from run to run"
    others = [fingerprint(f, 12) for f in ("second", "third", "fourth")]
    assert len({first, *others}) == 4
    assert all((first, *others))


GROUP = """
    def load(kind, text):
        raise kind(text)

    errors = []
    for kind in ({}, {}):
        try:
            load(kind, "shard")
        except Exception as error:
            errors.append(error)
    raise ExceptionGroup("loading failed", errors)
    """


def test_groups_of_exceptions_are_not_taken_for_one_another(tmp_path: Path) -> None:
    marks = []
    for kinds in [("ValueError", "OSError"), ("KeyError", "TypeError")]:
        done = ran(GROUP.format(*kinds), tmp_path)
        assert "Exception Group Traceback" in done.stderr
        failure = death(stderr_tail=done.stderr)
        assert failure.kind is FailureKind.EXCEPTION
        group = "raised ExceptionGroup: loading failed (2 sub-exceptions)"
        text = "'shard'" if kinds[0] == "KeyError" else "shard"
        assert failure.message == f"{group}, of which the first is {kinds[0]}: {text}"
        assert failure.fingerprint.endswith("train.py:3")
        marks.append(failure.fingerprint)
        assert death(error_file=recorded_raw(done.stderr)).fingerprint == failure.fingerprint
    assert marks[0] != marks[1]


def test_a_group_without_tracebacks_has_raised_itself(tmp_path: Path) -> None:
    done = ran('raise ExceptionGroup("loading failed", [ValueError("a")])', tmp_path)
    failure = death(stderr_tail=done.stderr)
    group = "raised ExceptionGroup: loading failed (1 sub-exception)"
    assert failure.message == f"{group}, of which the first is ValueError: a"
    assert failure.fingerprint.endswith("train.py:1")


def test_a_script_with_a_syntax_error_has_raised_it(tmp_path: Path) -> None:
    done = ran("x = (1,\n", tmp_path)
    assert "Traceback" not in done.stderr
    failure = death(stderr_tail=done.stderr)
    assert failure.kind is FailureKind.EXCEPTION
    assert failure.message.startswith("raised SyntaxError: ")
    assert failure.fingerprint.endswith("train.py:1")
    assert failure.traceback.startswith('  File "')


@pytest.mark.parametrize(
    "script",
    [
        """
            import argparse
            parser = argparse.ArgumentParser()
            parser.add_argument("--lr", type=float)
            parser.parse_args(["--lrr", "3"])
        """,
        """
            import click
            click.command()(lambda: None)(["--lrr", "3"])
        """,
    ],
    ids=["argparse", "click"],
)
def test_a_command_line_that_a_script_refuses_is_told_and_comes_again(
    tmp_path: Path, script: str
) -> None:
    ended = ran(script, tmp_path)
    found = death(exit_code=ended.returncode, stderr_tail=ended.stderr, step=None)
    assert found.kind is FailureKind.EXCEPTION
    assert found.message.startswith("refused its command line: ")
    assert "--lrr" in found.message
    again = death(exit_code=ended.returncode, stderr_tail=ended.stderr, step=None)
    assert repeats(again, found)
