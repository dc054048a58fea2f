"""What a user installs: the wheel of ``make dist``, and the environment of ``make setup``."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
SOURCES = {
    "dlrover_py": ROOT / "dlrover_py",
    "dlrover_agent": ROOT / "agent/dlrover_agent",
    "dlrover_operator": ROOT / "operator/dlrover_operator",
}


def called(*argv: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        argv, cwd=cwd, env=os.environ | env, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_the_wheel_is_whole_and_trains(tmp_path: Path) -> None:
    uv = (sys.executable, "-m", "uv")
    called(*uv, "build", "--out-dir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")  # uv makes it of the source archive
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"{name}/{path.relative_to(folder)}"
        for name, folder in SOURCES.items()
        for path in folder.rglob("*.py")
    }
    assert wanted - held == set()
    assert {name.split("/")[0] for name in held} == {*SOURCES, "dlrover_py-0.1.0.dist-info"}

    venv = tmp_path / "venv"
    called(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / "bin/python"
    # The libraries come from here. Nothing of the project does: the file that makes this
    # environment see the working tree is not read by another one.
    site = next(venv.glob("lib/python3.*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    called(
        *uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, wheel,
        cwd=tmp_path,
    )  # fmt: skip
    clean = {"PYTHONPATH": "", "PATH": f"{venv}/bin:/usr/bin:/bin"}
    assert "--nproc-per-node" in called(venv / "bin/elastic-run", "--help", cwd=tmp_path, **clean)
    assert "0.1.0" in called(venv / "bin/dlrover", "--version", cwd=tmp_path, **clean)
    for program in ("dlrover-run", "dlrover-master", "dlrover-operator"):
        assert "usage" in called(venv / f"bin/{program}", "--help", cwd=tmp_path, **clean).lower()
    lines = called(python, PROGRAMS / "import_all.py", cwd=tmp_path, **clean).splitlines()
    # DeepSpeed prints lines of its own when it is imported.
    found = [line.removeprefix("package ") for line in lines if line.startswith("package ")]
    assert all(Path(file).is_relative_to(venv) for file in found), found
    assert len(found) == len(SOURCES)

    (archive,) = tmp_path.glob("*.tar.gz")
    called("tar", "-xzf", archive, "--strip-components=1", cwd=tmp_path)
    said = called(
        venv / "bin/elastic-run", "--nproc-per-node=2", "train.py", "--epochs=5",
        cwd=tmp_path / "examples/01-digits", **clean,
    )  # fmt: skip
    assert "epoch 5 of 5" in said


def setup(tmp_path: Path, *shims: str) -> "subprocess.CompletedProcess[str]":
    """Run scripts/setup.sh where some Pythons are shims of versions that are not switched on."""
    for name in shims:
        shim = tmp_path / name
        shim.write_text(f"#!/bin/sh\necho 'pyenv: {name}: command not found' >&2\nexit 127\n")
        shim.chmod(0o755)
    return subprocess.run(
        ["bash", "scripts/setup.sh", sys.prefix, "build"],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("shims", [(), ("python3.13", "python3.12"), ("python3.13", "python3.11")])
def test_shims_of_pythons_that_are_not_there_say_nothing(
    tmp_path: Path, shims: tuple[str, ...]
) -> None:
    done = setup(tmp_path, *shims)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("stamps", "what"), [((), "user"), ((".installed",), ""), ((".installed-user",), "")]
)
def test_what_is_installed_already_is_not_installed_again(
    tmp_path: Path, stamps: tuple[str, ...], what: str
) -> None:
    for name in stamps:
        (tmp_path / name).touch()

    def planned(target: str) -> str:
        return called("make", "-n", target, f"VENV={tmp_path}", cwd=ROOT)

    assert ("scripts/setup.sh" in planned("setup")) == bool(what)
    assert ("scripts/setup.sh" in planned("demo")) == bool(what)
    wants_dev = ".installed" not in stamps
    assert (f"scripts/setup.sh {tmp_path} dev" in planned("check")) == wants_dev
    if what:
        assert f"scripts/setup.sh {tmp_path} {what}" in planned("setup")


def test_an_operator_without_its_extra_says_so() -> None:
    script = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from dlrover_operator.__main__ import main\n"
        "sys.exit(main(['--master-image', 'm']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "dlrover-operator: the package cryptography is not installed: install DLRover-Py with its "
        "extra operator\n"
    )
