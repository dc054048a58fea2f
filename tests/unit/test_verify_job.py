"""``dlrover data verify JOB``: the ledger of a job is found beside its checkpoints."""

import shutil
from pathlib import Path

import pytest

from dlrover_py.cli.commands import main
from dlrover_py.cli.data import ledger_of
from dlrover_py.cli.view import JobView
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.status import JobPhase, JobStatus, LastCheckpoint
from tests.unit.test_ledger import World
from tests.unit.test_runs import made
from tests.unit.test_view import status

PROVEN = "epoch 0: finished: all 53 samples once\nepoch 1: in progress: exact so far\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with one ended job, ``demo``, whose checkpoints and ledger are in ``data``."""
    for name in ("DLROVER_STATE_DIR", "DLROVER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    run = made(tmp_path / "DLROVER_STATE_DIR", "demo@1")
    last = stored(f"{tmp_path}/data/step-7")
    (run / names.STATUS_FILE).write_text(last.model_dump_json(by_alias=True))
    World(1, tmp_path / "data/ledger").train(7)
    return tmp_path


def stored(folder: str) -> JobStatus:
    """The status of a job whose newest stored checkpoint is in a folder."""
    last = LastCheckpoint(step=7, where="storage", at=1.0, folder=folder)
    found = status(JobPhase.SUCCEEDED)
    return found.model_copy(update={"ended_at": 5.0, "last_checkpoint": last})


def view_of(directory: str | None, folder: str = "") -> JobView:
    """A job with this ``spec.checkpoint.dir``, and with this stored checkpoint."""
    checkpoint = None if directory is None else {"dir": directory}
    job = {"spec": {"checkpoint": checkpoint}}
    return JobView("demo", [], "Running", "", stored(folder), [], [], {"job": job})


@pytest.mark.parametrize("name", ["demo", "demo@1", None])
def test_a_job_is_read(name: str | None, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", *([name] if name else [])]) == 0
    said = capfd.readouterr()
    assert said.out == PROVEN
    assert f"its ledger is {here}/data/ledger" in said.err
    assert ("later runs that continue it" in said.err) == (name == "demo@1")


@pytest.mark.parametrize("folder", ["data", "./data/ledger"])
def test_a_folder_is_read(folder: str, here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", folder]) == 0
    assert capfd.readouterr() == (PROVEN, "")


def test_a_folder_is_preferred_to_a_job_of_its_name(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "demo").mkdir()
    assert main(["data", "verify", "demo"]) == 2
    assert "demo: found no ledger" in capfd.readouterr().err


@pytest.mark.parametrize("before", ["", "./"])
def test_a_name_that_no_folder_can_have(
    before: str, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Path.is_dir raises an error here, as where another user's folder hides it."""
    name = before + "a" * 300
    assert main(["data", "verify", name]) == 2
    assert f"{'a' * 300}: " in capfd.readouterr().err


def test_a_ledger_that_is_gone_is_named_with_its_place(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(here / "data/ledger")
    assert main(["data", "verify", "demo"]) == 2
    said = capfd.readouterr().err
    assert f"{here}/data/ledger, in the folder of its newest stored checkpoint" in said
    assert "give the folder of the ledger" in said


def test_the_directory_of_the_spec_is_looked_at_before_there_is_a_checkpoint(here: Path) -> None:
    assert ledger_of(view_of(f"{here}/data")) == here / "data/ledger"
    assert ledger_of(view_of("data/")) == here / "data/ledger"
    assert ledger_of(view_of(f"file://{here}/data")) == here / "data/ledger"
    assert ledger_of(view_of("s3://bucket/run", f"{here}/data/step-7")) == here / "data/ledger"


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        ("/of/pods", "/of/pods/ledger, in its spec.checkpoint.dir"),
        ("s3://bucket/run", "s3://bucket/run, its spec.checkpoint.dir: a ledger is in a folder"),
        (None, "it has no spec.checkpoint.dir, and its status names no checkpoint"),
    ],
)
def test_what_was_looked_for_is_said(directory: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ledger_of(view_of(directory))
    assert said in str(refusal.value)
