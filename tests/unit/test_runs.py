"""Past runs of this machine: which have ended, and which are removed."""

import fcntl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.cli import runs
from dlrover_py.cli.runs import Run, ended, remove, to_remove
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
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


def test_times_have_a_unit() -> None:
    assert [runs.seconds(t) for t in ("90s", "30m", "12h", "7d", "2w")] == [
        90, 1800, 43200, 604800, 1209600,
    ]  # fmt: skip
    for bad in ("7", "d", "-1d", "1.5h", "7 d", "7D", ""):
        with pytest.raises(ConfigError, match="expected a time such as 12h"):
            runs.seconds(bad)
