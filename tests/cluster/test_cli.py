"""``dlrover job …`` against a real cluster, with the operator."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import yaml

from tests.cluster.conftest import rolled_out
from tests.cluster.harness import Cluster, until
from tests.cluster.jobs import OPERATOR, STEPS, Job, Watched, document, steps, watching

pytestmark = pytest.mark.timeout(900)
TALKER = f"print('hello', flush=True)\n{STEPS}"
DLROVER = Path(sys.executable).parent / "dlrover"


class Terminal:
    """Where ``dlrover`` is called, about one namespace."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.env = cluster.env | {
            "DLROVER_RUNTIME_DIR": str(folder / "run"),
            "DLROVER_STATE_DIR": str(folder / "state"),
        }

    def start(self, *argv: str, out: IO[str] | None = None) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [str(DLROVER), "job", *argv, "-n", self.namespace],
            env=self.env,
            cwd=self.folder,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=out or pipe,
            stderr=pipe,
        )

    def call(self, *argv: str, code: int = 0, within_s: float = 180) -> str:
        """Run a command; its standard output, or if it is to fail its standard error."""
        process = self.start(*argv)
        out, err = process.communicate(timeout=within_s)
        assert process.returncode == code, f"{argv}: {process.returncode}\n{out}\n{err}"
        return err if code else out


@pytest.fixture
def there(cluster: Cluster, operator: str, namespace: str) -> Iterator[Watched]:
    """A namespace that is watched, of a cluster with the operator in it."""
    with watching(cluster, namespace) as watched:
        yield watched


@pytest.fixture
def terminal(cluster: Cluster, namespace: str, tmp_path: Path) -> Terminal:
    return Terminal(cluster, namespace, tmp_path)


def test_a_job_is_submitted_looked_at_changed_and_deleted(
    there: Watched, terminal: Terminal, agent_image: str
) -> None:
    command = [*steps()[:-3], TALKER, *steps()[-2:]]
    wish = document("job", agent_image, command, minReplicas=2, maxReplicas=3)
    (terminal.folder / "job.yaml").write_text(yaml.safe_dump(wish))
    assert "would be submitted" in terminal.call("submit", "--dry-run", "job.yaml")
    assert "job submitted" in terminal.call("submit", "job.yaml")
    assert "exists already" in terminal.call("submit", "job.yaml", code=2)
    assert "unchanged" in terminal.call("submit", "--apply", "job.yaml")
    run = Job(there.cluster, there, "job")
    first = run.runs(2)

    run.until(lambda: run.phase == "Running", "the operator has seen it")
    # An agent that is late for a moment is not ready.
    until(
        lambda: (
            [row.split()[1:3] for row in terminal.call("get").splitlines()[1:]]
            == [["Running", "2/2"]]
        ),
        "both are ready",
    )
    run.until(
        lambda: [p["status"].get("phase") for p in run.pods.values()] == ["Running"] * 2,
        "their kubelets have said so",
    )
    described = terminal.call("describe", "job")
    for words in ("job-n0 Running on", "job-n1 Running on", "MasterReady", "master    Pod"):
        assert words in described
    assert "trouble" not in described
    assert json.loads(terminal.call("describe", "job", "--json"))["status"]["phase"] == "Running"
    assert "RoundFormed" in terminal.call("why", "job")
    until(
        lambda: terminal.call("logs", "job") == "[n0] hello\n[n1] hello\n",
        "the workers' lines only, once both have said them",
    )
    assert '"program": "elastic-run"' in terminal.call("logs", "job", "--agents", "--node", "n0")

    assert "is scaled to 3 nodes" in terminal.call("scale", "3", "--job", "job")
    second = run.runs(3, after=first.round)
    assert "maxReplicas is 3" in terminal.call("scale", "4", "--job", "job", code=2)
    lines = terminal.folder / "followed"
    with lines.open("w") as out:
        follower = terminal.start("logs", "job", "-f", out=out)

    def greet() -> int:
        return len({line for line in lines.read_text().splitlines() if "hello" in line})

    until(lambda: greet() == 3, "it follows all three nodes")
    terminal.call("suspend", "job")
    run.until(lambda: run.phase == "Suspended", "it is suspended")
    assert "Suspended" in terminal.call("get", "job")
    terminal.call("resume", "job")
    run.runs(3, after=second.round)
    # A Pod that is deleted takes its log with it.
    until(lambda: greet() == 6, "of the nodes after the resume, too")
    terminal.call("delete", "job", "--yes", "--wait")
    there.until(lambda: not run.obj, "it is gone")
    follower.communicate(timeout=180)
    said = lines.read_text()
    assert said.count("[n0] hello\n") == 2, "once for each of its rounds"
    assert "is not in namespace" in terminal.call("describe", "job", code=2)


def test_a_job_is_waited_for(terminal: Terminal, operator: str, agent_image: str) -> None:
    good = document("good", agent_image, steps(20, 0.05))
    (terminal.folder / "good.yaml").write_text(yaml.safe_dump(good))
    said = terminal.call("submit", "--wait", "good.yaml", within_s=400)
    assert "RoundFormed" in said
    assert "good succeeded after" in said
    assert "[n0] done" in terminal.call("logs", "good")
    command = ["elastic-run", "--no-python", "python3", "-c", "raise ValueError('no')"]
    bad = document("bad", agent_image, command, restartCount=0)
    (terminal.folder / "bad.yaml").write_text(yaml.safe_dump(bad))
    process = terminal.start("submit", "--wait", "bad.yaml")
    out, err = process.communicate(timeout=400)
    assert (process.returncode, err) == (1, "")
    assert "bad failed after" in out


def test_the_operators_pages_are_reached_also_after_its_pod_is_deleted(
    cluster: Cluster, operator: str, tmp_path: Path
) -> None:
    def entrance() -> str:
        with urllib.request.urlopen(f"{link}/enter", timeout=10) as answer:
            return str(answer.read().decode())

    with (tmp_path / "told").open("w") as told_file:
        command = subprocess.Popen(
            [str(DLROVER), "dashboard", "--operator", "-n", operator],
            env=cluster.env,
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=told_file,
        )
    try:
        assert command.stdout is not None
        printed = command.stdout.readline()
        assert printed, (tmp_path / "told").read_text()
        link = printed.split()[-1]
        assert "token" in entrance()
        cluster.kubectl("delete", "pod", "-n", operator, "-l", OPERATOR)
        rolled_out(cluster, operator)

        def again() -> bool:
            try:
                return "token" in entrance()
            except OSError:  # kubectl sees the loss with the next connection
                return False

        until(again, "the pages of the next Pod")
        command.send_signal(signal.SIGINT)
        assert command.wait(30) == 0
    finally:
        command.kill()
        command.communicate()
    told = (tmp_path / "told").read_text()
    assert "is lost; it is made again" in told
    assert "is there again" in told
