"""A loader of a stream in a script without an agent: growing files, the end, and checkpoints."""

import json
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import LineStream, MapSource, ShardLoader, StreamSource
from tests.unit.test_shard_loader import epoch_of


def write(path: Path, *numbers: int) -> None:
    with path.open("a") as file:
        file.writelines(f'{{"n": {number}}}\n' for number in numbers)


def stream(folder: Path, **fields: Any) -> LineStream:
    return LineStream(folder, parse=lambda line: json.loads(line)["n"], **fields)


@given(
    st.lists(st.lists(st.integers(0, 9999), max_size=9), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 6),
)
def test_each_line_comes_once_however_the_files_grow(
    tmp_path_factory: pytest.TempPathFactory,
    written: list[list[int]],
    range_bytes: int,
    size: int,
    steps: int,
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    seen: list[int] = []
    for number, numbers in enumerate(written):
        write(folder / f"{number}.jsonl", *numbers)
    loader = ShardLoader("lines", stream(folder, range_bytes=range_bytes))
    if steps and any(written):  # without the marker, a loop ends only when it is stopped
        for records in loader.batches(size, stop=lambda: True):
            seen += records
            loader.commit()
            steps -= 1
            if not steps:
                break
    state = json.loads(json.dumps(loader.state_dict()))
    for records in loader.batches(size, stop=lambda: True):
        assert records
        loader.commit()  # is lost
    loader.load_state_dict(state)
    write(folder / "late.jsonl", 10_000)
    (folder / "_END").touch()
    again = epoch_of(loader, size)
    assert loader.over
    assert sorted(seen + again) == sorted([*chain(*written), 10_000])


def test_a_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    source: StreamSource = stream(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n{"n"')
    assert source.ends() == ({"a.jsonl": 9}, False)
    with path.open("a") as file:
        file.write(": 2}\n" + "x" * 200_000)
    assert source.ends() == ({"a.jsonl": 18}, False)
    assert [record for record, _ in source.read("a.jsonl", 0, 18)] == [1, 2]
    path.write_text('{"n": 1}\n{"n": 2}')
    (tmp_path / "_END").touch()
    assert source.ends() == ({"a.jsonl": 17}, True), "nobody completes the last line any more"


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    """A FIFO would block until somebody writes, and whoever may write there may make one."""
    write(tmp_path / "a.jsonl", 1)
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").mkdir()
    (tmp_path / "d.jsonl").symlink_to("/dev/zero")
    ends, ended = stream(tmp_path).ends()
    assert (list(ends), ended) == (["a.jsonl"], False)


def test_a_file_that_is_removed_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", 1)
    write(tmp_path / "b.jsonl", 1)
    source, is_file = stream(tmp_path), Path.is_file

    def removed_behind_it(path: Path) -> bool:
        found = is_file(path)
        if path.name == "a.jsonl":
            path.unlink()
        return found

    monkeypatch.setattr(Path, "is_file", removed_behind_it)
    assert source.ends() == ({"b.jsonl": 9}, False)


class LongNames:
    """A stream whose partitions have names of 300 bytes."""

    range_size = 3

    def ends(self) -> tuple[Mapping[str, int], bool]:
        return {f"{number:03}" + "€" * 97: 5 for number in range(1000)}, False

    def read(self, partition: str, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        raise AssertionError


def test_a_request_that_its_agent_would_not_take_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens on the socket: a request that is sent would be tried for a minute."""
    monkeypatch.setenv("DLROVER_SHARDS_SOCKET", str(tmp_path / "socket"))
    loader = ShardLoader("names", LongNames())
    with pytest.raises(ConfigError, match="names: expected a request of at most 261120 bytes"):
        next(loader.batches(1))


def test_a_file_that_was_cut_goes_to_quarantine(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write(path, 1, 2, 3)
    loader = ShardLoader("cut", stream(tmp_path, range_bytes=9))
    first = next(iter(loader.batches(1)))
    loader.commit()
    (tmp_path / "_END").touch()
    path.write_text("")
    with pytest.raises(StopIteration):
        next(iter(loader.batches(1)))
    assert (first, loader.quarantined, loader.over) == ([1], 2, True)


class Log:
    """A source of one's own: the offsets of two logs."""

    range_size = 3

    def __init__(self) -> None:
        self.logs = {"left": list("abcd"), "right": list("xy")}
        self.ended = False

    def ends(self) -> tuple[Mapping[str, int], bool]:
        return {name: len(log) for name, log in self.logs.items()}, self.ended

    def read(self, partition: str, start: int, stop: int) -> Iterator[tuple[Any, int]]:
        for offset in range(start, stop):
            yield self.logs[partition][offset], offset + 1


def test_a_source_of_ones_own() -> None:
    source = Log()
    loader = ShardLoader("log", source)
    seen = []
    for records in loader.batches(4, stop=lambda: True):
        seen += records
        loader.commit()
    assert sorted(seen) == list("abcdxy")
    state = loader.state_dict()
    del loader
    source.ended = True
    source.logs["left"].append("e")
    loader = ShardLoader("log", source)  # another process, and other ranges
    source.range_size = 2
    loader.load_state_dict(state)
    assert epoch_of(loader) == ["e"]


def test_mistakes_are_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a folder"):
        LineStream(tmp_path / "none")
    with pytest.raises(ConfigError, match="range_bytes: expected at least 1, found 0"):
        LineStream(tmp_path, range_bytes=0)
    with pytest.raises(ConfigError, match="a stream has none, found epochs=2"):
        ShardLoader("epochs", Log(), epochs=2)
    state = ShardLoader("kinds", MapSource(range(9), shard_size=3)).state_dict()
    loader = ShardLoader("kinds", Log())
    with pytest.raises(ConfigError, match="expected 9 samples"):
        loader.load_state_dict(state)


def test_files_of_equal_names_in_several_folders(tmp_path: Path) -> None:
    for number, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "part-0.jsonl", 2 * number, 2 * number + 1)
    (tmp_path / "_END").touch()
    loader = ShardLoader("folders", stream(tmp_path, pattern="*/*.jsonl"))
    assert sorted(epoch_of(loader)) == [0, 1, 2, 3]
    assert (loader.over, loader.quarantined) == (True, 0)
