"""Names that the shell's completion of ``dlrover`` offers."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from dlrover_py.cli.commands import root
from dlrover_py.protocol.names import CLUSTER_SOCKET, RUN_LOCK, STATUS_FILE
from tests.builders import elastic_job, running


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs alpha and beta run here, killed has left its socket, old has ended; no cluster.

    The process of ghost was killed.
    """
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    running_jobs = ExitStack()
    for name in ("alpha", "beta", "killed"):
        folder = tmp_path / "run" / name
        folder.mkdir(parents=True, mode=0o700)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(folder / CLUSTER_SOCKET))
        if name == "killed":
            listening.close()
        else:
            listening.listen()
            running_jobs.enter_context(listening)
    (tmp_path / "run").chmod(0o700)
    bench = running(elastic_job(2))
    status = bench.job.status(0.0, 1.0).model_copy(update={"name": "old"})
    folder = tmp_path / "state" / "old@1"
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "state").chmod(0o700)
    (folder / STATUS_FILE).write_text(status.model_dump_json())
    (tmp_path / "state" / "ghost@2").mkdir()
    (tmp_path / "state" / "ghost@2" / RUN_LOCK).touch()
    with running_jobs:
        yield


def offered(*words: str) -> list[str]:
    *before, incomplete = words
    complete = ShellComplete(root, {}, "dlrover", "_DLROVER_COMPLETE")
    return [item.value for item in complete.get_completions(before, incomplete)]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("line", "names"),
    [
        (["job", "describe", ""], ["alpha", "beta", "ghost", "old"]),
        (["job", "logs", "-f", "al"], ["alpha"]),
        (["job", "suspend", ""], ["alpha", "beta"]),
        (["job", "stop", "b"], ["beta"]),
        (["job", "scale", "3", "--job", ""], ["alpha", "beta"]),
        (["job", "delete", ""], []),
        (["job", "describe", "-n", "ml", ""], []),
        (["job", "logs", "old", "--node", ""], ["n0", "n1"]),
        (["job", "logs", "old", "--node", "n1"], ["n1"]),
        (["job", "logs", "ghost", "--node", ""], []),
        (["node", "kill", "--job", "gone", ""], []),
        (["node", "kill", ""], []),
    ],
)
def test_names_are_offered(line: list[str], names: list[str]) -> None:
    assert offered(*line) == names
