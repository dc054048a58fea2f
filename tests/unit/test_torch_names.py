"""Private names of torch are used in one module of the trainer, which reads what torch records."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.protocol.diagnosis import Collective
from dlrover_py.trainer import torch_compat

FOLDER = Path(torch_compat.__file__).parent
MODULES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
COMPAT = "torch_compat"
OF_TORCH = ("_StorageInfo", "_c10d_init", "_is_in_bad_fork", "_get_default_store", "_world")
OF_NAMED_TUPLES = {"_asdict", "_fields", "_replace"}
OF_PYTHON = {"__dict__", "__func__", "__getattr__", "__module__", "__name__", "__qualname__"}
OF_PYTHON |= {"__self__", "__setitem__", "__str__", "__wrapped__"}


def own_names() -> set[str]:
    """The private names that the trainer's modules define themselves."""
    found: set[str] = set()
    for source in MODULES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def documentation(tree: ast.Module) -> set[int]:
    """The ids of the constants that are docstrings."""
    return {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def private(source: str, own: set[str]) -> Iterator[str]:
    """The private names of others that a module imports, reads, or has in a text."""
    tree = ast.parse(source)
    docs = documentation(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            paths = []
        yield from (path for path in paths if re.search(r"(^|\.)_(?!_future__)", path))
        yield from (path for path in paths if "planner_helpers" in path)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if node.attr not in own | OF_NAMED_TUPLES | OF_PYTHON:
                yield node.attr
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docs
            and node.value not in own | OF_PYTHON
            and re.match(r"_\w|(.*\b)?torch\._|__\w+__$", node.value)
        ):
            yield node.value


PRODUCT = FOLDER.parents[1]
OUTSIDE = {
    "agent/dlrover_agent/torch_compat/rendezvous.py": {"_C"},
    "agent/dlrover_agent/warm/compiler.py": {"_inductor"},
    "agent/dlrover_agent/warm/store_server.py": {"_C", "_c10d_init"},
    "agent/dlrover_agent/warm/zygote.py": {"_is_in_bad_fork"},
    "dlrover_py/checkpoint/torch_format.py": {"_utils"},
}
"""Modules outside of the trainer, which may not import it, and their private names of torch."""


def torchs(path: Path) -> set[str]:
    """The private names in a module that is not the trainer's, as far as torch has them."""
    tree = ast.parse(path.read_text())
    found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} & set(OF_TORCH)
    docs = documentation(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found |= set(re.findall(r"torch(?:\.\w+)*?\.(_\w+)", node.value))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= set(re.findall(r"torch(?:\.\w+)*?\.(_\w+)", ast.unparse(node)))
    return found


def test_private_names_of_torch_outside_of_the_trainer_are_known() -> None:
    found = {}
    for folder in ("dlrover_py", "agent", "operator"):
        for path in (PRODUCT / folder).rglob("*.py"):
            if path.parent != FOLDER and (names := torchs(path)):
                found[str(path.relative_to(PRODUCT))] = names
    assert found == OUTSIDE


def test_private_names_of_torch_are_used_in_one_module_of_the_trainer() -> None:
    own = own_names()
    found = {name: list(private(source, own)) for name, source in MODULES.items()}
    assert len(found.pop(COMPAT)) > 20
    assert found == {name: [] for name in found}


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "import torch._dynamo",
        "from torch._dynamo.symbolic_convert import InstructionTranslator",
        "from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list",
        "print(tensor._version)",
        "value.__create_chunk_list__()",
        'getattr(optimizer, "_overlap_with_ddp", False)',
        'hasattr(value, "__tensor_flatten__")',
        'sys.modules.get("torch._dynamo")',
        'name.replace("_orig_mod.", "")',
        "class Reader(pickle._Unpickler): ...",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(private(line, own_names()))


def test_each_private_name_is_in_the_table_of_the_module() -> None:
    table = torch_compat.__doc__ or ""
    source = MODULES[COMPAT]
    names = {name.strip(".").rpartition(".")[2] for name in private(source, own_names())}
    assert {name for name in names if name not in table} == set()


def entry(operation: str, seq: int, at_ns: int, **fields: Any) -> dict[str, Any]:
    """An entry of a flight recorder of torch, of the group of all ranks."""
    return {
        "process_group": ["0", "default_pg"],
        "profiling_name": operation,
        "collective_seq_id": seq,
        "time_created_ns": at_ns,
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "retired": True,
        **fields,
    }


def test_the_collectives_of_both_flight_recorders_are_found() -> None:
    """The votes of a checkpoint use gloo beside the NCCL of the training, in the same group."""
    gloo = [entry("gloo:all_reduce", seq, seq * 10**9) for seq in range(1, 4)]
    nccl = [entry("nccl:all_reduce", seq, (seq + 1) * 10**9) for seq in range(1, 30)]
    nccl.append(entry("nccl:all_reduce", 30, 31 * 10**9, retired=False))
    sent = entry("nccl:send", 0, 5, is_p2p=True)
    found = torch_compat.newest_collectives([*gloo, *nccl, sent], {"0": [0, 2]}, 40 * 10**9)
    kept = [(one["backend"], one["seq"]) for one in found]
    assert kept[-1] == ("nccl", 30)
    assert ("gloo", 3) in kept
    assert len(kept) == 3 + torch_compat.FLIGHT_RECORDS_OF_GROUP
    newest = Collective.model_validate(found[-1])
    assert (newest.open, newest.age_s, newest.ranks) == (True, 9.0, [(0, 2, 2)])
    assert (newest.op, newest.shape) == ("all_reduce", "Float [3, 4]")
