"""The warm recipe: what is made of the records of observed workers."""

import contextlib
import json
import os
import socket
import sysconfig
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_agent.warm import pool
from dlrover_agent.warm.pool import ImportRecipe
from dlrover_agent.warm.zygote import (
    Zygote,
    _importable,
    _watched_environment,
    origin_before_import,
)
from dlrover_agent.warm.zygote_start import may_begin_with
from dlrover_py.protocol.recipe import decode_record
from dlrover_py.protocol.zygote import ZygoteConfig

SITE = ("/site/", "/lib/")
TORCH = ("import", "torch", "/site/torch/__init__.py")
JSON = ("import", "json", "/lib/json/__init__.py")
OWN = ("import", "model", "/home/me/model.py")


def record(*lines: tuple[str, str, str | None]) -> str:
    return "".join(f"{line!a}\n" for line in lines)


def recipe(*records: str) -> ImportRecipe:
    return ImportRecipe.from_records(records, SITE)


def test_the_order_is_kept_and_the_users_modules_are_marked() -> None:
    assert recipe(record(JSON, OWN, TORCH)).lines == (JSON, ("own", *OWN[1:]), TORCH)
    assert recipe(record(JSON, OWN, TORCH)).imports == {"json", "torch"}


def test_workers_are_merged() -> None:
    assert recipe(record(JSON), record(TORCH, JSON)).lines == (JSON, TORCH)


def test_environment_counts_only_before_an_import() -> None:
    made = ("env", "A", "1")
    assert recipe(record(JSON, made)).shared
    before = recipe(record(made, JSON))
    assert before.lines == (made, JSON)
    assert not before.shared, "it may be a secret"


def test_a_variable_of_a_rank_is_left_to_each_worker() -> None:
    """A script that chose its device so was never warm."""
    device, same = ("env", "CUDA_VISIBLE_DEVICES"), ("env", "SAME", "1")
    found = recipe(record((*device, "0"), same, JSON), record((*device, "1"), same, JSON))
    assert found.lines == (("rank", "CUDA_VISIBLE_DEVICES", None), same, JSON)
    assert not found.shared, "another node has other ranks"
    assert recipe(record(same, JSON)).with_imports_of(found).lines == (same, JSON, found.lines[0])
    only_one = recipe(record((*device, "0"), same, JSON), record(same, JSON))
    assert only_one.lines == found.lines


def test_what_the_start_of_python_changes_must_be_the_same_in_all_workers() -> None:
    changed = ("start", "MY_DEVICE")
    found = recipe(record((*changed, "a"), JSON), record((*changed, "a"), JSON), "")
    assert found.lines == ((*changed, "a"), JSON)
    assert not found.shared
    for other in record((*changed, "b"), JSON), record(JSON):
        with pytest.raises(ValueError, match="found others of MY_DEVICE: set them in the script"):
            recipe(record((*changed, "a"), JSON), other)


def test_a_worker_that_is_behind_does_not_disagree() -> None:
    one = record(("env", "A", "0"), JSON, ("env", "B", "0"), TORCH)
    assert recipe(one, record(("env", "A", "0"), JSON)).imports == {"json", "torch"}


def test_torch_may_come_first_if_only_the_standard_library_came_before() -> None:
    paths = sysconfig.get_paths()
    standard = ("import", "json", f"{paths['stdlib']}/json/__init__.py")
    library = ("import", "numpy", f"{paths['purelib']}/numpy/__init__.py")
    own, later = ("own", *OWN[1:]), ("import", "json.scanner", "/lib/json/scanner.py")
    assert may_begin_with((standard, own, TORCH, library, later), "torch")
    for line in (
        library,
        ("env", "A", "1"),
        ("rank", "A", None),
        ("import", "b", "/elsewhere/b.py"),
    ):
        assert not may_begin_with((standard, line, TORCH), "torch")
    assert not may_begin_with((standard,), "torch"), "the script does not use it"


def test_a_torn_line_is_left_out() -> None:
    assert recipe(record(JSON) + "\0\0('import\n" + record(TORCH)).imports == {"json", "torch"}


def test_without_a_module_goes_what_is_in_it() -> None:
    lines = record(
        TORCH,
        ("import", "torch.cuda", "/site/torch/cuda.py"),
        ("import", "torchvision", "/site/torchvision.py"),
    )
    assert recipe(lines).without(["torch"]).imports == {"torchvision"}


def test_an_unfit_module_is_not_learned_again() -> None:
    """Each node that had the recipe from the master built one more zygote in vain."""
    older = recipe(record(TORCH, JSON)).without(["torch"])
    again = recipe(record(TORCH, ("import", "torch.cuda", "/site/torch/cuda.py"), JSON))
    newer = again.without(older.unfit)
    assert newer.imports == older.imports == {"json"}
    assert older.extended_by(newer).imports == newer.with_imports_of(older).imports == {"json"}
    assert recipe(record(JSON)).with_imports_of(older).unfit == {"torch"}


def test_what_was_learnt_before_is_kept() -> None:
    newer = recipe(record(("env", "A", "1"), JSON)).with_imports_of(
        recipe(record(JSON, OWN, TORCH))
    )
    assert newer.lines == (("env", "A", "1"), JSON, TORCH)


def test_what_forked_workers_import_comes_after_what_their_zygote_has() -> None:
    made, later = ("env", "A", "1"), ("import", "later", "/site/later.py")
    older = recipe(record(made, TORCH))
    newer = recipe(record(made, ("env", "B", "2"), later))
    assert older.extended_by(newer).lines == (made, TORCH, ("env", "B", "2"), later)
    assert older.extended_by(recipe(record(TORCH))) == older


TEXT = st.text(st.characters(codec=None), max_size=8)


@given(st.lists(st.tuples(st.sampled_from(["import", "own", "env"]), TEXT, st.none() | TEXT)))
def test_it_crosses_the_wire(lines: list[tuple[str, str, str | None]]) -> None:
    there = ImportRecipe(tuple(lines))
    back = ImportRecipe.from_wire(there.to_wire())
    assert back == there
    assert back.digest == there.digest


@pytest.mark.parametrize("body", [b"", b"x", b"x\x9c", ImportRecipe(()).to_wire()[:-1] + b"!"])
def test_other_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="the master's recipe is refused: "):
        ImportRecipe.from_wire(body)


def test_a_recipe_of_another_version_is_refused_with_both_versions() -> None:
    body = zlib.compress(json.dumps({"version": 2, "lines": "other"}).encode())
    with pytest.raises(ValueError, match="refused: it has version 2: expected version 1; use"):
        ImportRecipe.from_wire(body)


@given(
    st.text(max_size=40) | st.builds(ascii, st.tuples(TEXT, TEXT, st.none() | TEXT | st.just(1)))
)
def test_any_line_of_a_record_is_read_or_refused_in_words(line: str) -> None:
    with contextlib.suppress(ValueError):
        found = decode_record(line)
        assert decode_record(ascii(found)) == found


@pytest.mark.parametrize(
    "line", ["(" * 100_000, "1", "('import', 'x')", "('import', 'x', 1)", "x("]
)
def test_other_lines_of_a_record_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="has a line that is not understood"):
        decode_record(line)


def test_what_a_folder_can_hide(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("json.py", "random.npy", "torch.old.py", "readme", "pickle.txt", "data.json"):
        (tmp_path / name).touch()
    (tmp_path / "math.cpython-311-x86_64-linux-gnu.so").touch()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "folder").mkdir()
    wanted = {"json", "random", "torch", "readme", "pickle", "data", "package", "folder"}
    assert _importable(str(tmp_path), wanted) == {"json", "package"}
    assert _importable(str(tmp_path), ["json"]) == {"json"}, "others need not be looked at"
    assert _importable(str(tmp_path / "missing"), wanted) == set()


@pytest.mark.parametrize(
    "code",
    [
        "dict(os.environ)",
        "os.environ.copy()",
        "{**os.environ}",
        "os.environ.items() and list(os.environ.items())",
        "for name in os.environ: pass",
    ],
)
def test_a_module_that_copies_the_environment_reads_the_rank(code: str) -> None:
    module = {"__name__": "copier"}
    with _watched_environment(frozenset(["RANK"])) as looked:
        exec(compile(f"import os\n{code}", "copier.py", "exec"), module)
    assert looked[0][0] == "all variables"
    assert looked[0][1][0] == "copier"


def test_a_function_that_looks_for_a_librarys_own_variables_is_no_reader_of_the_rank() -> None:
    """Modules do so that most scripts import."""
    with _watched_environment(frozenset(["RANK"])) as looked:
        exec(
            "import os\ndef own(): return [n for n in os.environ if n.startswith('X_')]\nown()", {}
        )
        assert os.environ.get("NO_SUCH_NAME") is None
    assert looked == []


def test_a_start_in_a_deleted_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The zygote ended with a traceback instead."""
    (folder := tmp_path / "gone").mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        zygote = Zygote(ZygoteConfig(theirs.fileno(), os.getpid(), [], []), theirs, {})
        why = zygote.refusal_reason(["python", "-u", "-m", "train"])
    assert why == "the working directory was deleted, and a start with -m expects it"


def test_what_an_import_would_run_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("hidden_one.py", "hidden_two/__init__.py", "hidden_two/part.py", "bare/part.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemError('it was run')\n")
    assert origin_before_import("hidden_one") == str(tmp_path / "hidden_one.py")
    assert origin_before_import("hidden_two") == str(tmp_path / "hidden_two" / "__init__.py")
    assert origin_before_import("hidden_two.part") is None, "its package would be run"
    assert origin_before_import("bare.part") == str(tmp_path / "bare" / "part.py")
    assert origin_before_import("json.tool") == str(Path(json.__file__).with_name("tool.py"))
    assert origin_before_import("json.decoder.part") is None
    assert origin_before_import("hidden_three") is None


def test_where_pip_has_installed_something_libraries_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a volume, say, that PYTHONPATH or a .pth file names; a folder of the user's has none."""
    libraries, own = tmp_path / "libraries", tmp_path / "own"
    (libraries / "torch-2.9.0.dist-info").mkdir(parents=True)
    own.mkdir()
    for folder in (libraries, own, tmp_path / "gone"):
        monkeypatch.syspath_prepend(str(folder))
    found = pool.installed_folders()
    assert f"{libraries}/" in found
    assert f"{own}/" not in found
    assert any(pool.__file__.startswith(folder) for folder in found), "we are no script's"
