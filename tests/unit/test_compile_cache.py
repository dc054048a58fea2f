"""The folders of compiled code: which script has which, what is kept, and who gets none."""

import asyncio
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dlrover_agent.settings import Command
from dlrover_agent.warm.compiled_code import VARIABLE, environment, folder_key
from dlrover_py.process.compile_cache import CompileCache, Limits
from dlrover_py.process.ownership import NotOwnedError

KEYS = [f"{i:032x}" for i in range(4)]
STRANGER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
ALWAYS = Limits(folders=2, total_bytes=100, age_s=50.0, interval_s=0.0)


def command(environ: dict[str, str], *argv: str) -> Command:
    words = argv or (sys.executable, "-u", "train.py")
    return Command(words, nproc=2, environ=environ, name="train.py")


def variables(environ: dict[str, str], *argv: str) -> dict[str, str]:
    return asyncio.run(environment(command(environ, *argv)))


@contextmanager
def used(cache: CompileCache, key: str, at: float, size: int = 10) -> Iterator[Path]:
    """Use a folder as a run does that ends with the context."""
    run = CompileCache(cache.folder)
    folder = run.use(key, f"train{key[-1]}.py")
    (folder / "code.so").write_bytes(b"x" * size)
    os.utime(folder / "script.json", (at, at))
    try:
        yield folder
    finally:
        run.close()


def leave(cache: CompileCache, *ages: tuple[str, float, int]) -> None:
    for key, at, size in ages:
        with used(cache, key, at, size):
            pass


def left(cache: CompileCache) -> list[str]:
    return [one.key for one in cache.entries()]


class TestEnvironment:
    def test_workers_get_a_folder_of_their_script(self, tmp_path: Path) -> None:
        found = variables({"DLROVER_CACHE_DIR": str(tmp_path)})
        folder = Path(found[VARIABLE])
        assert found.keys() == {VARIABLE}
        assert folder.parent == tmp_path / "compiled"
        assert folder.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        ("more", "argv"),
        [
            ({VARIABLE: "/own"}, ()),
            ({VARIABLE: ""}, ()),
            ({"DLROVER_CACHE_DIR": "none"}, ()),
            ({"DLROVER_CACHE_DIR": ""}, ()),
            ({}, ("bash", "train.sh")),
            ({}, ("/usr/bin/another-python", "-u", "train.py")),
        ],
    )
    def test_who_gets_none(
        self, tmp_path: Path, more: dict[str, str], argv: tuple[str, ...]
    ) -> None:
        environ = {"DLROVER_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path), **more}
        assert variables(environ, *argv) == {}
        assert not list(tmp_path.iterdir())

    def test_a_users_other_settings_stay(self, tmp_path: Path) -> None:
        own = {"TRITON_CACHE_DIR": "/t", "TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}
        found = variables({"DLROVER_CACHE_DIR": str(tmp_path), **own})
        assert not own.keys() & found.keys()

    def test_a_warning_says_why_a_folder_is_not_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "compiled").mkdir()
        (tmp_path / "compiled").chmod(0o777)
        assert variables({"DLROVER_CACHE_DIR": str(tmp_path)}) == {}
        (said,) = caplog.records
        assert said.levelname == "WARNING"
        assert "others can write to it" in vars(said)["why"]

    def test_a_folder_that_cannot_be_made_costs_only_the_cache(self, tmp_path: Path) -> None:
        (tmp_path / "compiled").touch()
        assert variables({"DLROVER_CACHE_DIR": str(tmp_path)}) == {}


class TestKey:
    CPU = "processor : 0\nmodel name : a\ncpu MHz : 1.5\nflags : avx2\n\nprocessor : 1\n"

    def key(self, of: Command, build: str = "2.15.0", cpu: str = CPU) -> str:
        return folder_key(of, build, cpu)

    def test_what_inductor_does_not_key(self) -> None:
        one = command({})
        keys = [self.key(one), self.key(replace(one, name="other.py")), self.key(one, "2.13.0")]
        keys += [self.key(one, cpu=self.CPU.replace("avx2", "avx512f"))]
        keys += [self.key(one, cpu=self.CPU.replace("name : a", "name : b"))]
        assert len(set(keys)) == len(keys)

    def test_another_libstdcxx_has_another_folder(self, tmp_path: Path) -> None:
        one = command({"LD_LIBRARY_PATH": str(tmp_path)})
        keys = [self.key(one)]
        assert keys == [self.key(command({}))], "it is not in that folder"
        for version in "30", "33":
            (tmp_path / "libstdc++.so.6").unlink(missing_ok=True)
            (tmp_path / "libstdc++.so.6").symlink_to(f"libstdc++.so.6.0.{version}")
            (tmp_path / f"libstdc++.so.6.0.{version}").touch()
            keys.append(self.key(one))
        assert len(set(keys)) == 3

    def test_two_paths_of_one_script_share_a_folder(self) -> None:
        one = command({})
        assert self.key(replace(one, name="./train.py")) == self.key(one)

    def test_arguments_ranks_and_clocks_do_not_count(self) -> None:
        other = command({"A": "1"}, sys.executable, "-u", "train.py", "--lr=1")
        assert self.key(other) == self.key(command({}))
        assert self.key(other, cpu=self.CPU.replace("1.5", "3")) == self.key(other)


class TestLimits:
    def test_the_last_used_folders_are_kept(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", ALWAYS)
        leave(cache, (KEYS[0], 1.0, 10), (KEYS[1], 3.0, 10), (KEYS[2], 2.0, 10))
        cache.trim(10.0)
        assert left(cache) == [KEYS[1], KEYS[2]]

    def test_old_and_empty_folders_go(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", ALWAYS)
        leave(cache, (KEYS[0], 1.0, 10), (KEYS[1], 60.0, 0), (KEYS[2], 60.0, 10))
        cache.trim(70.0)
        assert left(cache) == [KEYS[2]]

    def test_a_used_folder_stays_and_is_begun_anew_if_it_is_too_large(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", ALWAYS)
        with used(cache, KEYS[0], 1.0, 200) as folder:
            leave(cache, (KEYS[1], 2.0, 10))
            cache.trim(10.0)
            assert left(cache) == [KEYS[1], KEYS[0]]
            assert not cache.remove(KEYS[0])
            assert (folder / "code.so").exists()
        assert list(cache.use(KEYS[0], "train.py").iterdir()) == [folder / "script.json"]

    def test_the_start_leaves_many_files_to_the_next_removal(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", replace(ALWAYS, interval_s=3600.0))
        with used(cache, KEYS[0], 1.0, 200):
            cache.trim(5000.0)
        cache.use(KEYS[0], "train.py")
        assert list(cache.folder.glob("removed-*/code.so"))
        cache.trim(5001.0)
        assert not list(cache.folder.glob("removed-*"))

    def test_a_used_folder_that_is_too_large_leaves_room_for_others(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", ALWAYS)
        leave(cache, (KEYS[1], 2.0, 60), (KEYS[2], 1.0, 60))
        with used(cache, KEYS[0], 3.0, 200):
            cache.trim(10.0)
        assert left(cache) == [KEYS[0], KEYS[1]]

    def test_one_node_removes_while_the_others_train(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", ALWAYS)
        leave(cache, (KEYS[0], 1.0, 200))
        with (cache.folder / "trimmed").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            cache.trim(10.0)
            assert left(cache) == [KEYS[0]]
        cache.trim(10.0)
        assert left(cache) == []

    def test_the_files_are_not_looked_at_again_within_an_hour(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", replace(ALWAYS, interval_s=3600.0))
        leave(cache, (KEYS[0], 1.0, 200))
        cache.trim(5000.0)
        assert left(cache) == []
        leave(cache, (KEYS[1], 1.0, 200))
        cache.trim(6000.0)
        assert left(cache) == [KEYS[1]]
        cache.trim(9000.0)
        assert left(cache) == []

    def test_a_removal_that_was_killed_is_finished(self, tmp_path: Path) -> None:
        cache = CompileCache(tmp_path / "compiled", ALWAYS)
        leave(cache, (KEYS[0], 1.0, 10))
        (cache.folder / KEYS[0]).rename(cache.folder / "removed-0")
        cache.trim(2.0)
        assert [one.name for one in cache.folder.iterdir()] == ["trimmed"]


def test_it_is_listed_with_its_script_and_removed(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "compiled")
    assert cache.entries() == []
    leave(cache, (KEYS[0], 7.0, 10))
    (one,) = cache.entries()
    assert (one.key, one.at, one.size, one.script) == (KEYS[0], 7.0, 10, "train0.py")
    assert cache.remove(KEYS[0])
    assert cache.entries() == []


@pytest.mark.parametrize("what", ["", KEYS[0], f"{KEYS[0]}/script.json"])
def test_what_others_can_change_is_refused(tmp_path: Path, what: str) -> None:
    cache = CompileCache(tmp_path / "compiled")
    leave(cache, (KEYS[0], 7.0, 10))
    (cache.folder / what).chmod(0o777)
    with pytest.raises(NotOwnedError, match="others can write"):
        cache.use(KEYS[0], "train.py")


class TestParents:
    @pytest.mark.parametrize("mode", [0o770, 0o707])
    def test_one_in_which_others_can_rename_is_refused(self, tmp_path: Path, mode: int) -> None:
        (tmp_path / "shared" / "own").mkdir(parents=True)
        (tmp_path / "shared").chmod(mode)
        cache = CompileCache(tmp_path / "shared" / "own" / "compiled")
        with pytest.raises(NotOwnedError, match=r"shared: others can write .* use `chmod \+t`"):
            cache.use(KEYS[0], "train.py")
        (tmp_path / "shared").chmod(mode | 0o1000)
        assert cache.use(KEYS[0], "train.py").exists()

    @needs_root
    def test_one_of_another_user_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "theirs" / "mine").mkdir(parents=True)
        os.chown(tmp_path / "theirs", STRANGER, STRANGER)
        with pytest.raises(NotOwnedError, match=f"theirs: it belongs to user {STRANGER}"):
            CompileCache(tmp_path / "theirs" / "mine").use(KEYS[0], "train.py")

    def test_a_link_in_the_path_is_resolved(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared" / "link").symlink_to(tmp_path / "real")
        (tmp_path / "shared").chmod(0o777)
        cache = CompileCache(tmp_path / "shared" / "link" / "compiled")
        assert cache.use(KEYS[0], "train.py") == tmp_path / "real" / "compiled" / KEYS[0]

    def test_missing_ones_are_made_for_this_user_alone(self, tmp_path: Path) -> None:
        before = os.umask(0o002)
        try:
            CompileCache(tmp_path / "a" / "b").use(KEYS[0], "train.py")
        finally:
            os.umask(before)
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
