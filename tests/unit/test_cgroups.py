"""What control groups say of memory, from files as the kernel writes them."""

from pathlib import Path

import pytest

from dlrover_py.process import cgroups

V1 = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
V2 = ("memory.max", "memory.peak", "memory.events")
OURS = {
    1: "4:hugetlb,memory:/user.slice/job_7.scope\n0::/\n",
    2: "0::/user.slice/job_7.scope\n",
}


def group(root: Path, version: int, where: str, limit: str, peak: int, kills: int) -> None:
    """One group's files."""
    folder = root / ("memory" if version == 1 else ".") / where
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, peak_file, events = V1 if version == 1 else V2
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / peak_file).write_text(f"{peak}\n")
    (folder / events).write_text(f"under_oom 0\noom_kill {kills}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_is_told_with_the_limit_and_the_peak(tmp_path: Path, version: int) -> None:
    ours = tmp_path / "ours"
    ours.write_text(OURS[version])
    group(tmp_path, version, "user.slice", "2000000000", 1_990_000_000, 0)
    group(tmp_path, version, "user.slice/job_7.scope", "max", 1_980_000_000, 3)
    before = cgroups.oom_kills(tmp_path, ours)
    assert before == cgroups.OomKills(3, 2_000_000_000, 1_990_000_000)
    assert before.since(before) == ""
    group(tmp_path, version, "user.slice/job_7.scope", "max", 1_980_000_000, 4)
    assert cgroups.oom_kills(tmp_path, ours).since(before) == (
        "out of memory: the limit of its container is 2.0 GB, and it had used 2.0 GB"
    )


@pytest.mark.parametrize(("version", "unlimited"), [(1, "9223372036854771712"), (2, "max")])
def test_a_group_without_a_limit_blames_the_machine(
    tmp_path: Path, version: int, unlimited: str
) -> None:
    ours = tmp_path / "ours"
    ours.write_text(OURS[version])
    group(tmp_path, version, "user.slice/job_7.scope", unlimited, 5, 1)
    words = cgroups.oom_kills(tmp_path, ours).since(cgroups.OomKills(0, None, None))
    assert words == "out of memory: the machine had none left (its container has no limit)"


@pytest.mark.parametrize("version", [1, 2])
def test_kills_of_neighbors_are_not_counted_and_the_first_own_kill_is(
    tmp_path: Path, version: int
) -> None:
    ours = tmp_path / "ours"
    ours.write_text(OURS[version])
    counts = []
    for above, own in ((7, 0), (8, 0), (9, 1)):
        group(tmp_path, version, "user.slice", "max", 0, above)
        group(tmp_path, version, "user.slice/job_7.scope", "2000000000", 5, own)
        counts.append(cgroups.oom_kills(tmp_path, ours))
    assert [count.count for count in counts] == [0, 0, 1]
    assert counts[1].since(counts[0]) == ""
    assert "the limit of its container" in counts[2].since(counts[1])


def test_files_that_are_missing_or_odd_are_no_kills(tmp_path: Path) -> None:
    assert cgroups.oom_kills(tmp_path, tmp_path / "no") == cgroups.OomKills(0, None, None)
    (tmp_path / "memory.events").write_text("oom_kill\noom_kill many\n\n")
    (tmp_path / "memory.max").write_bytes(b"\xff\n")
    assert cgroups.oom_kills(tmp_path, tmp_path / "no") == cgroups.OomKills(0, None, None)
    assert cgroups.free_bytes(tmp_path, tmp_path / "no") is None


@pytest.mark.parametrize(
    ("limit", "expected"), [("1000", 0.6), ("10000", 0.25), ("max", 0.25), (None, 0.25)]
)
def test_the_use_of_memory_is_that_of_the_tightest_limit(
    tmp_path: Path, limit: str | None, expected: float
) -> None:
    machine, ours = tmp_path / "meminfo", tmp_path / "ours"
    machine.write_text("MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:  3000 kB\n")
    ours.write_text("0::/own\n")
    if limit is not None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own/memory.max").write_text(limit)
        (tmp_path / "own/memory.current").write_text("800")
        (tmp_path / "own/memory.stat").write_text("inactive_file 200\n")
    assert cgroups.memory_use(tmp_path, ours, machine) == pytest.approx(expected)


def test_the_use_of_memory_may_be_unknown(tmp_path: Path) -> None:
    no = tmp_path / "no"
    assert cgroups.memory_use(tmp_path, no, no) is None


@pytest.mark.parametrize(
    ("outer", "inner", "limit"),
    [("max", "900", 900), ("5000", "max", 5000), ("5000", "900", 900), ("max", "max", None)],
)
def test_what_is_used_is_that_of_the_innermost_group_with_a_limit(
    tmp_path: Path, outer: str, inner: str, limit: int | None
) -> None:
    ours = tmp_path / "ours"
    ours.write_text("0::/outer/own\n")
    for place, most, used in (("outer", outer, 4000), ("outer/own", inner, 800)):
        folder = tmp_path / place
        folder.mkdir()
        (folder / "memory.max").write_text(most)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text("inactive_file 200\n")
        (folder / "cpu.stat").write_text("usage_usec 70\n")
    found = cgroups.usage(tmp_path, ours)
    if limit is None:
        assert found is None
    else:
        assert found == cgroups.Usage(600 if limit == 900 else 3800, limit, 70)
