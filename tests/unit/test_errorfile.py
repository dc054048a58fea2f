"""Error files of any kind and size."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_agent.workers import error_file
from dlrover_agent.workers.failures import describe


def recorded(message: str, callstack: str) -> bytes:
    """As torch's ``record`` writes it."""
    extra = {"py_callstack": callstack, "timestamp": "1"}
    return json.dumps({"message": {"message": message, "extraInfo": extra}}).encode()


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(recorded("ValueError: \u20ac", "Traceback"))
    assert error_file.read(path) == path.read_text()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "link", "device", "folder", "nothing"])
def test_what_is_no_regular_file_is_empty_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "error.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "other").write_text("secret")
        path.symlink_to(tmp_path / "other")
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    assert error_file.read(path) == ""


@pytest.mark.timeout(20)
def test_a_parents_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device"):
        error_file.write(tmp_path / "pipe", "{}")
    error_file.write(tmp_path / "file", "long before")
    error_file.write(tmp_path / "file", "{}")
    assert (tmp_path / "file").read_text() == "{}"


def test_of_a_large_file_both_texts_are_known(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    text = "cannot use " + "0.1234, " * (4 << 20)
    trace = f"""Traceback (most recent call last):
  File "/job/train.py", line 12, in <module>
    main()
ValueError: {text}"""
    path.write_bytes(recorded(f"ValueError: {text}", trace))
    said = error_file.read(path)
    assert len(said) < 4 * error_file.PIECE
    failure = describe(exit_code=1, local_rank=0, rank=0, pid=1, error_file=said, stderr_tail="",
                       step=None, ran_s=1.0)  # fmt: skip
    assert failure.message.startswith("raised ValueError: cannot use 0.1234")
    assert failure.fingerprint.endswith("/job/train.py:12")


@given(st.text(max_size=50), st.integers(0, 600))
def test_a_text_may_be_cut_anywhere(text: str, cut: int) -> None:
    whole = json.dumps(text)[1:-1]
    found = error_file.decoded(whole.encode()[:cut])
    assert text.startswith(found)
    assert len(found) >= min(len(text), max(0, cut - 12) // 12)


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_are_no_error(data: bytes) -> None:
    # no assert: no exception is raised
    error_file.decoded(data)
