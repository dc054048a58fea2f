"""The session of a script that runs in a process of its own, and of one that forks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover_py.trainer import session
from tests.programs import PROGRAMS
from tests.unit.test_session import Agent, agent, clock, path, worker  # noqa: F401 - fixtures

ROOT = Path(session.__file__).parents[2]
PROGRAM = str(PROGRAMS / "use_session.py")


@pytest.fixture
def script(path: Path) -> Callable[[str], str]:
    """Runs a script as a worker would, and gives what it printed."""

    def run(*args: str, **environ: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error", PROGRAM, *args],
            env={"PYTHONPATH": str(ROOT), **environ},
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    return run


def inside(path: Path) -> dict[str, str]:
    return {"DLROVER_AGENT_SOCKET": str(path), "DLROVER_ROUND": "3"}


# --- where am I ---


def test_outside_a_job_everything_is_neutral(script: Callable[..., str]) -> None:
    printed = script("say_all")
    assert printed == "True False\n0 '' 0\nFalse ''\n"


def test_importing_is_cheap(script: Callable[..., str]) -> None:
    printed = script("say_imports")
    assert printed == "[]\n"


def test_last_step_is_sent_at_exit(agent: Agent, path: Path, script: Callable[..., str]) -> None:
    script("report", **inside(path))
    steps = [news.step for news in agent.waiting()]
    assert steps[0] == 1
    assert steps[-1] == 500
    assert len(steps) < 10


# --- processes ---


def test_forked_child_does_not_speak_for_its_parent(
    agent: Agent, path: Path, script: Callable[..., str]
) -> None:
    printed = script("report_in_a_child", **inside(path))
    assert printed == "False True\n0\n"
    assert [(news.step, news.polls) for news in agent.waiting()] == [(1, False), (2, False)]


def test_forked_child_does_not_take_the_orders_of_its_parent(agent: Agent, path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, PROGRAM, "ask_in_a_child"],
        env={"PYTHONPATH": str(ROOT), **inside(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert agent.news().polls
        agent.order("enough")  # in the queue before the fork
        printed, _ = process.communicate("\n", timeout=150)
    assert sorted(printed.split("\n")) == ["", "False", "child False", "parent True"]


def test_process_forked_after_the_import_learns_its_own_place(
    agent: Agent, path: Path, script: Callable[..., str]
) -> None:
    script("fork_workers", str(path))
    assert [(news.local_rank, news.step) for news in agent.waiting()] == [(0, 10), (1, 11)]


def test_nobody_but_the_agent_can_send_to_a_script_before_it_is_connected(
    script: Callable[..., str], agent: Agent, path: Path
) -> None:
    """The script's socket has a name that anybody can send to, and what came early was kept."""
    said = script("hear_a_stranger", **inside(path))
    assert said == "False \n"
