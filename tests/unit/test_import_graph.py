"""Which module imports which, and whose threads run."""

import builtins
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrover_agent.warm.import_graph import ImportGraph

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write modules: their code, by name with ``__`` for a dot. They are forgotten at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(**modules: str) -> None:
        for name, code in modules.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def graph_of(*names: str) -> ImportGraph:
    with ImportGraph() as graph:
        for name in names:
            importlib.import_module(name)
            graph.find_threads(name)
    return graph


def test_whoever_imports_a_module_later_is_found_too(write: Write) -> None:
    write(
        zz_fault="",
        zz_first="import zz_fault",
        zz_later="from zz_fault import __name__ as name",
        zz_above="import zz_later",
        zz_other="import json",
    )
    graph = graph_of("zz_first", "zz_above", "zz_other")
    assert graph.with_importers(["zz_fault"]) == ["zz_above", "zz_fault", "zz_first", "zz_later"]
    assert graph.with_importers(["zz_other"]) == ["zz_other"]


def test_a_package_comes_with_those_that_import_a_module_below_it(write: Write) -> None:
    write(
        zz_pack____init__="",
        zz_pack__part="",
        zz_pack__other="from . import part",
        zz_by_name="import zz_pack.part",
        zz_from_it="from zz_pack import part",
    )
    graph = graph_of("zz_by_name", "zz_from_it", "zz_pack.other")
    users = ["zz_by_name", "zz_from_it", "zz_pack.other"]
    assert graph.with_importers(["zz_pack.part"]) == sorted([*users, "zz_pack.part"])
    assert set(graph.with_importers(["zz_pack"])) == {*users, "zz_pack"}


def test_a_function_imports_for_the_module_that_calls_it(write: Write) -> None:
    write(
        zz_fault="",
        zz_tool="def fetch(name):\n    return __import__(name)",
        zz_caller="import zz_tool\nzz_tool.fetch('zz_fault')",
    )
    graph = graph_of("zz_tool", "zz_caller")
    assert graph.with_importers(["zz_fault"]) == ["zz_caller", "zz_fault"]


def test_an_import_that_fails_counts(write: Write) -> None:
    write(zz_fault="1 / 0", zz_tries="try:\n    import zz_fault\nexcept ZeroDivisionError: ...")
    assert graph_of("zz_tries").with_importers(["zz_fault"]) == ["zz_fault", "zz_tries"]


@pytest.mark.parametrize("then", ["", "\nimport zz_later", "\nfrom zz_pack import part"])
def test_threads_belong_to_the_module_that_starts_them(write: Write, then: str) -> None:
    start = "import threading\nEND = threading.Event()\nTHREAD = threading.Thread(target=END.wait)"
    write(
        zz_starts=f"{start}\nTHREAD.start(){then}",
        zz_later="",
        zz_pack____init__="",
        zz_pack__part="",
        zz_above="import zz_starts",
    )
    graph = graph_of("zz_above")
    starts = sys.modules["zz_starts"]
    assert graph.starters_of_threads() == ["zz_starts"]
    starts.END.set()
    starts.THREAD.join()


def test_threads_of_a_module_in_c_are_its_own_though_it_imports_without_a_name() -> None:
    graph, end = ImportGraph(), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    for nobody in ("", "__main__"):  # what is running when its code imports another module
        graph.find_threads(nobody)
    assert graph.starters_of_threads() == []
    graph.find_threads("zz_native")
    assert graph.starters_of_threads() == ["zz_native"]
    end.set()
    thread.join()


def test_imports_are_as_before_afterwards() -> None:
    plain = builtins.__import__
    with ImportGraph():
        assert builtins.__import__ is not plain
    assert builtins.__import__ is plain


def test_a_module_that_replaces_the_import_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)  # restored at the end

    def mine(*args: object) -> object:
        return importlib.__import__(*args)  # type: ignore[arg-type]

    with ImportGraph():
        builtins.__import__ = mine  # type: ignore[assignment]
    assert builtins.__import__ is mine
