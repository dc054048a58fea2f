"""The recipes that runs leave for later ones: what is kept, and when it is used."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_agent.settings import Settings
from dlrover_agent.warm.earlier_run import EarlierRun
from dlrover_py.process.ownership import NotOwnedError
from dlrover_py.process.recipe_cache import MAX_FILES, KeptRecipe, RecipeCache
from dlrover_py.protocol.zygote import RecipeLine

TEXT = st.text(st.characters(codec=None), max_size=8)
LINES = st.lists(st.tuples(st.sampled_from(["import", "own"]), TEXT, st.none() | TEXT), max_size=3)
STATES = st.dictionaries(TEXT, st.tuples(st.integers(), st.integers()), max_size=3)


@given(TEXT, LINES, st.floats(0, 3600), STATES)
def test_a_file_is_read_as_it_was_written(
    script: str, lines: list[RecipeLine], import_s: float, files: dict[str, tuple[int, int]]
) -> None:
    there = KeptRecipe(script, lines, import_s, files)
    assert KeptRecipe.decode(there.encode()) == there


@given(st.binary(max_size=40))
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"compressed|[Ee]xpect"):
        KeptRecipe.decode(body)


class Site:
    """A script with a module of its own and an installed one, and runs of it."""

    def __init__(self, folder: Path) -> None:
        self.site, self.cache = folder / "site", RecipeCache(folder / "cache" / "recipes")
        self.site.mkdir()
        self.library, self.own = self.site / "library.py", folder / "own.py"
        self.script = folder / "train.py"
        for file in (self.library, self.own, self.script):
            file.write_text("A = 1\n")
        self.command = [str(self.script)]
        self.args, self.env = ["--lr", "0.1"], {"TORCH_LOGS": "", "TERM": "a"}
        self.now = 1e9

    def run(self, *, later_s: float = 3600.0) -> EarlierRun:
        self.now += later_s
        argv = ["python", "-u", *self.command, *self.args]
        return EarlierRun(self.cache, argv, self.env, [f"{self.site}/"], wall=lambda: self.now)

    def keep(self) -> None:
        run = self.run()
        run.load()
        lines = [("import", "library", str(self.library)), ("own", "own", str(self.own))]
        assert run.store(lines, 3.0)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_next_run_of_the_same_command_finds_it(site: Site) -> None:
    assert site.run().load() is None
    site.keep()
    found = site.run().load()
    assert found is not None
    assert [name for _, name, _ in found.lines] == ["library", "own"]
    assert found.import_s == 3.0
    (site.site / "__pycache__").mkdir()
    os.utime(site.own, (1, 1))
    site.env |= {"NVIDIA_VISIBLE_DEVICES": "GPU-1"}
    site.env |= {"TERM": "b", "TORCHELASTIC_RUN_ID": "other", "TORCHINDUCTOR_CACHE_DIR": "/c"}
    assert site.run().load() is not None, "nothing that decides about imports"


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("evil", "{site}/../evil.py"),
        ("evil", "{site}//evil.py"),
        ("evil", "{site}/library.py"),
        ("evil.library", "{site}/evil/__init__.py"),
    ],
)
def test_a_recipe_that_names_what_is_not_installed_is_not_used(
    site: Site, name: str, origin: str
) -> None:
    """Whoever may write where recipes are kept must not choose what is imported."""
    lines = [("import", name, origin.format(site=site.site))]
    run = site.run()
    run.load()
    assert run.store(lines, 3.0)
    assert site.run().load() is None


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("torch", "torch/__init__.py"),
        ("torch.nn", "torch/nn/__init__.pyc"),
        ("torch._C", "torch/_C.cpython-311-x86_64-linux-gnu.so"),
        ("_json", "lib-dynload/_json.abi3.so"),
    ],
)
def test_installed_modules_of_any_kind_are_used(site: Site, name: str, file: str) -> None:
    run = site.run()
    run.load()
    assert run.store([("import", name, f"{site.site}/{file}")], 3.0)
    assert site.run().load() is not None


CHANGES: dict[str, Callable[[Site], object]] = {
    "the script": lambda site: site.script.write_text("A = 2\n"),
    "the arguments": lambda site: site.args.append("--more"),
    "a module of its own": lambda site: site.own.write_text("AB = 1\n"),
    "a library": lambda site: site.library.write_text("AB = 1\n"),
    "a file that is gone": lambda site: site.own.unlink(),
    "a package": lambda site: (site.site / "more").mkdir(),
    "the environment": lambda site: site.env.update(TORCH_LOGS="+dynamo"),
    "a new variable": lambda site: site.env.update(LD_PRELOAD="x"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_it_is_not_used_once_something_has_changed(site: Site, what: str) -> None:
    os.utime(site.site, (1, 1))  # a change within one tick of the clock counts, too
    site.keep()
    CHANGES[what](site)
    assert site.run().load() is None


def test_a_script_that_changes_meanwhile_leaves_nothing(site: Site) -> None:
    run = site.run()
    run.load()
    site.script.write_text("A = 2\n")
    assert not run.store([("import", "library", str(site.library))], 3.0)
    assert not site.cache.folder.exists()


def test_after_a_forked_worker_has_died_early_ever_more_runs_start_cold(site: Site) -> None:
    """It may have died of a missing file, so it is tried again; but not in every second run."""
    lines = [("import", "library", str(site.library))]
    site.keep()
    for cold_runs in (2, 4, 8):
        run = site.run()
        assert run.load() is not None
        run.distrust(forked=True)
        run.distrust(forked=True)
        assert not run.store(lines, 3.0)
        neighbour = site.run(later_s=3.0)
        neighbour.load()
        neighbour.distrust(forked=True)
        for left in reversed(range(cold_runs)):
            run, neighbour = site.run(), site.run(later_s=3.0)
            for one in (run, neighbour):
                assert one.load() is None
            for _ in range(2):
                assert run.store(lines, 3.0) is (left == 0)
            assert neighbour.store(lines, 3.0) is (left == 0), "a run counts once, on all nodes"


@pytest.mark.parametrize("in_the_same_run", [False, True])
def test_a_script_that_dies_without_a_fork_too_is_at_fault_itself(
    site: Site, in_the_same_run: bool
) -> None:
    site.keep()
    run = site.run()
    run.load()
    run.distrust(forked=True)
    if not in_the_same_run:
        run = site.run()
        run.load()
    run.distrust(forked=False)
    run.distrust(forked=True)
    site.keep()
    assert site.run().load() is not None


@pytest.mark.parametrize("of_file", [False, True])
def test_what_others_can_change_is_refused(site: Site, of_file: bool) -> None:
    site.keep()
    (file,) = site.cache.folder.iterdir()
    (file if of_file else site.cache.folder).chmod(0o777)
    with pytest.raises(NotOwnedError, match="others can write to it"):
        site.run().load()


def test_a_damaged_file_is_ignored_and_shown(site: Site) -> None:
    site.keep()
    (file,) = site.cache.folder.iterdir()
    file.write_bytes(b"x")
    assert site.run().load() is None
    assert [entry.recipe for entry in site.cache.entries()] == [None]
    assert site.cache.remove(site.cache.entries()[0].key)
    assert site.cache.entries() == []


def test_what_was_not_used_for_longest_is_removed(tmp_path: Path) -> None:
    cache = RecipeCache(tmp_path / "recipes")
    for i in range(MAX_FILES):
        cache.store(f"k{i}", KeptRecipe("", (), 1.0, {}))
        os.utime(cache.folder / f"k{i}.recipe", (i, i))
    assert cache.load("k0") is not None, "the recipe of a daily job"
    cache.store("new", KeptRecipe("", (), 1.0, {}))
    keys = [entry.key for entry in cache.entries()]
    assert len(keys) == MAX_FILES
    assert "new" in keys[:2]
    assert "k0" in keys
    assert "k1" not in keys


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"DLROVER_CACHE_DIR": "/c", "HOME": "/h"}, "/c/recipes"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/dlrover-py/recipes"),
        ({"HOME": "/h"}, "/h/.cache/dlrover-py/recipes"),
        ({"DLROVER_CACHE_DIR": "none", "HOME": "/h"}, None),
        ({}, None),
    ],
)
def test_where_it_is(environ: dict[str, str], folder: str | None) -> None:
    found = RecipeCache.of(environ)
    assert (None if found is None else str(found.folder)) == folder


@pytest.mark.parametrize(
    ("ca_file", "environ", "with_master"),
    [
        ("/dlrover/ca.crt", {}, True),
        ("/dlrover/ca.crt", {"DLROVER_CACHE_DIR": "/volume"}, False),
        ("/dlrover/ca.crt", {"DLROVER_CACHE_DIR": "none"}, False),
        (None, {}, False),
    ],
)
def test_the_master_of_a_cluster_keeps_it_unless_a_folder_is_named(
    ca_file: str | None, environ: dict[str, str], with_master: bool
) -> None:
    authority = {} if ca_file is None else {"DLROVER_CA_FILE": ca_file}
    assert Settings.from_environment(environ | authority).recipes_with_master is with_master


def test_a_module_of_an_installed_package_has_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on the agent's path, for example by the .pth file of an editable package."""
    site = Site(tmp_path)
    (package := tmp_path / "source" / "trainer_package").mkdir(parents=True)
    (package / "__main__.py").write_text("A = 1\n")
    site.command = ["-m", "trainer_package"]
    with pytest.raises(FileNotFoundError, match="its file is not known"):
        site.run().load()
    monkeypatch.syspath_prepend(str(package.parent))
    site.keep()
    assert site.run().load() is not None
    (package / "__main__.py").write_text("A = 2\n")
    assert site.run().load() is None, "it has changed"
