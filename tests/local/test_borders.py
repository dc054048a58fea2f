"""The import contracts of pyproject.toml fail where a border is crossed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "dlrover_py": Path("dlrover_py"),
    "dlrover_agent": Path("agent/dlrover_agent"),
    "dlrover_operator": Path("operator/dlrover_operator"),
}
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]
EXHAUSTIVE = {c["containers"][0]: c for c in CONTRACTS if c.get("exhaustive")}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the product and its contracts."""
    for folder in FOLDERS.values():
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def folder_of(package: str) -> Path:
    head, *rest = package.split(".")
    return FOLDERS[head].joinpath(*rest)


def packages() -> Iterator[str]:
    """Every package of the product that has modules beside ``__init__``."""
    for name, folder in FOLDERS.items():
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            if len(list(init.parent.iterdir())) > 1:
                yield ".".join([name, *init.parent.relative_to(ROOT / folder).parts])


def lint(tree: Path) -> str:
    """Run the linter on a tree, which must fail; return what it said, without line breaks."""
    path = os.pathsep.join(str((tree / folder).parent) for folder in FOLDERS.values())
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return re.sub(r"\s+", " ", done.stdout)


def test_every_package_has_an_exhaustive_contract() -> None:
    assert set(packages()) == set(EXHAUSTIVE)


def test_a_stray_module_is_refused_in_every_package(tree: Path) -> None:
    for package in packages():
        (tree / folder_of(package) / "stray.py").write_text(
            '"""A module that no contract names."""\n'
        )
    said = lint(tree)
    assert [package for package in packages() if f"{package}.stray" not in said] == []


def test_an_import_of_a_higher_layer_is_refused_in_every_package(tree: Path) -> None:
    planted = []
    for package, contract in EXHAUSTIVE.items():
        layers = [re.split(r"\s*\|\s*", layer) for layer in contract["layers"]]
        if len(layers) < 2:
            continue
        high, low = f"{package}.{layers[0][0]}", f"{package}.{layers[-1][0]}"
        path = tree / folder_of(low)
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        with path.open("a") as file:
            file.write(f"\nimport {high}\n")
        planted.append(f"{low} -> {high}")
    assert len(planted) > 10
    said = lint(tree)
    assert [arrow for arrow in planted if arrow not in said] == []


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("dlrover_py.protocol.names", "time"),
        ("dlrover_py.master.core.policy", "logging"),
        ("dlrover_py.master.platform.kubernetes.pods", "os"),
        ("dlrover_agent.core", "subprocess"),
        ("dlrover_operator.plan", "asyncio"),
        ("dlrover_py.trainer.schedule", "time"),
        ("dlrover_py.trainer.restore", "torch"),
        ("dlrover_py.checkpoint.directory", "torch"),
        ("dlrover_agent.observation.devices", "torch"),
        ("dlrover_agent.observation.tcp_links", "torch"),
        ("dlrover_py.master.core.diagnosis.slow", "torch"),
        ("dlrover_agent.loop", "fastapi"),
        ("dlrover_operator.loop", "kubernetes"),
        ("dlrover_py.trainer.session", "dlrover_py.kubernetes.client"),
    ],
)
def test_a_forbidden_import_is_refused(tree: Path, module: str, forbidden: str) -> None:
    with (tree / folder_of(module)).with_suffix(".py").open("a") as file:
        file.write(f"\nimport {forbidden}\n")
    said = lint(tree)
    assert f"{module} -> {forbidden}" in said
