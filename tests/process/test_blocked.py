"""Calls of the agent that block for ever: the exchange with the master goes on, and the agent ends.

An audit hook (PEP 578) in the agent's process makes one call wait at a FIFO: an open, a mkdir, the
start of a process. So the test needs no file system that hangs.
"""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from dlrover_py.protocol.status import JobStatus
from tests.process.harness import Job, Place, eventually, job, members
from tests.process.test_warm import kill_worker, until_ready
from tests.programs import PROGRAMS, source

Provoke = Callable[[Job], object]


def nothing(run: Job) -> None:
    """It comes by itself."""


def next_round(run: Job) -> None:
    run.running(1)
    until_ready(run)
    arm(run)
    kill_worker(run)


def another_reaper(run: Job) -> None:
    run.running(1)
    arm(run)
    agent = psutil.Process(members(run.status())[0].agent_pid)
    (reaper,) = [c for c in agent.children() if any("reaper.py" in a for a in c.cmdline())]
    reaper.kill()


def end_of_store(run: Job) -> None:
    run.running(1)
    agent = psutil.Process(members(run.status())[0].agent_pid)

    def store() -> list[psutil.Process]:
        return [c for c in agent.children() if any("store_server" in a for a in c.cmdline())]

    (found,) = eventually(store, "a store")
    arm(run)
    found.kill()


def arm(run: Job) -> None:
    (run.place.folder / "armed").touch()


@dataclass(frozen=True)
class Seam:
    """A call that blocks."""

    event: str
    pattern: str = ""
    script: str = "sleeps"
    provoke: Provoke = nothing
    then: str = ""
    """What people are told, in the job's events or in the agent's log."""
    runs: int = 0
    """A round that runs though the call blocks still."""
    flags: tuple[str, ...] = ()


START = "subprocess.Popen"
SEAMS = {
    "scratch": Seam(
        "os.mkdir", r"/dlrover-\d+-\w+'", provoke=next_round, then="scratch_folder_unusable", runs=2
    ),
    "log-folders": Seam("os.mkdir", "/logs/n0/", then="no log files, no error file", runs=1),
    "old-error-file": Seam("os.remove", r"error\.json", then="no log files, no error file", runs=1),
    "error-file": Seam("open", r"error\.json", "fails", then="error_file_not_read", runs=2),
    "workers": Seam(
        START, r"train\.py", then="python: no answer within 3 s; expected its file system"
    ),
    "records": Seam("open", r"imports-\d+-0", then="imports_not_recorded", runs=1),
    "zygote": Seam(START, r"zygote-1\.json", then="it cannot be started: no answer within 3 s"),
    "orders": Seam("open", r"zygote-1\.json", then="it cannot be started: no answer within 3 s"),
    "fork": Seam("socket.sendmsg", provoke=next_round, then="zygote_lost", runs=2),
    "store": Seam(
        START, "store_server", "asks", then="the store of the round has ended: it cannot"
    ),
    "store-output": Seam("open", r"store\.log'\)?, 'r'", "asks", end_of_store, "exit code -9"),
    "persister": Seam(
        START, r"dlrover_py\.checkpoint\.writer", "checkpoint", then="persister_ended", runs=1
    ),
    "reaper": Seam(START, r"reaper\.py", provoke=another_reaper, then="reaper_not_started"),
    "event-handler": Seam("handler", runs=1, flags=("--event-log-handler=console",)),
}


def planted_agent(place: Place, event: str, pattern: str) -> tuple[Path, dict[str, str]]:
    """An elastic-run whose call blocks, and the environment that it needs."""
    folder = place.folder / "bin"
    folder.mkdir()
    agent = folder / "elastic-run"
    program = source(PROGRAMS / "agent_with_a_blocked_call.py")
    agent.write_text(f"#!{sys.executable}\n{program}")
    agent.chmod(0o755)
    os.mkfifo(place.folder / "gate")
    variables = {"FOLDER": str(place.folder), "EVENT": event, "PATTERN": pattern}
    return agent, {f"BLOCKED_{name}": value for name, value in variables.items()}


@contextmanager
def planted(place: Place, seam: Seam) -> Iterator[Job]:
    """A job whose agent has a call that blocks."""
    agent, variables = planted_agent(place, seam.event, seam.pattern)
    if seam.provoke is nothing:
        (place.folder / "armed").touch()
    settings = {"lease_s": "60", "exchange_s": "0.2"}
    with job(
        place,
        script=PROGRAMS / "act_once.py",
        replicas=1,
        args=(seam.script,),
        flags=seam.flags,
        settings=settings,
        env={"PATH": f"{agent.parent}:{place.env['PATH']}", **variables},
        restartCount=100,
    ) as run:
        yield run


def exchanges(run: Job) -> float:
    with suppress(OSError, ValueError):
        return run.metric("dlrover_exchanges_total")
    return 0.0


def told(run: Job) -> str:
    """All that people may read."""
    events = [event.message for event in run.status().events]
    logs = [path.read_text() for path in run.logs.glob("n0/agent.log")]
    return "\n".join((*events, *logs))


@pytest.mark.parametrize("name", SEAMS)
def test_a_call_that_blocks_holds_up_no_exchange(place: Place, name: str) -> None:
    seam = SEAMS[name]
    with planted(place, seam) as run:
        seam.provoke(run)
        eventually((place.folder / "blocked").exists, "the call blocks")
        seen = exchanges(run)
        eventually(lambda: exchanges(run) >= seen + 10, "the exchange goes on", within_s=30)
        if seam.then:
            eventually(lambda: seam.then in told(run), f"{seam.then!r} is told")
        if seam.runs:
            run.running(1, round_after=seam.runs - 1)
        status: JobStatus = run.status()
        assert [n.incarnation for n in status.nodes] == [1], "no node was lost"


def test_a_stop_ends_a_start_that_hangs(place: Place) -> None:
    """An exec of a file that is leased to this process waits, as with a dead NFS server."""
    place.script("open('ran', 'w')")
    program = place.script(f'#!/bin/sh\nexec {sys.executable} "$@"\n', "python")
    program.chmod(0o755)
    leased = os.open(program, os.O_RDWR)
    fcntl.fcntl(leased, fcntl.F_SETSIG, signal.SIGURG)  # by default it is ignored
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        run = place.popen(
            *("elastic-run", "--standalone", "train.py"),
            env={"PYTHON_EXEC": str(program)},
            stderr=subprocess.PIPE,
        )
        agent = psutil.Process(run.pid)

        def hangs() -> bool:
            """Between fork and exec the command line is the agent's."""
            return any(child.cmdline() == agent.cmdline() for child in agent.children())

        eventually(hangs, "a worker that is about to run")
        run.terminate()
        _, err = run.communicate(timeout=30)
    finally:
        os.close(leased)
    assert (run.returncode, err) == (1, "elastic-run: the agent received SIGTERM\n")
    assert not (place.folder / "ran").exists()


SILENT = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); signal.pause()"
"""A worker that writes no traceback after SIGINT."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_more_signals_while_a_start_hangs_do_not_take_the_last_words(
    place: Place, number: signal.Signals
) -> None:
    """The thread that starts a process does not block signals, so it gets them in the end."""
    agent, variables = planted_agent(place, START, r"zygote-1\.json")
    (place.folder / "armed").touch()
    run = place.popen(
        *(str(agent), "--standalone", str(place.script(SILENT))),
        env=variables,
        stderr=subprocess.PIPE,
    )
    eventually((place.folder / "blocked").exists, "the call blocks")
    while run.poll() is None:
        run.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            run.wait(timeout=0.001)
    _, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (1, f"elastic-run: the agent received {number.name}\n")


def flooded(place: Place) -> "subprocess.Popen[str]":
    """A job whose worker has written more to the console than pipes hold; nothing is read yet."""
    run = place.popen(
        *("elastic-run", "--standalone", str(place.script(PROGRAMS / "flood_console.py"))),
        stderr=subprocess.PIPE,
    )
    written = place.folder / "written"
    eventually(lambda: written.exists() and int(written.read_text() or 0) > 100, "a full console")
    return run


def test_a_slow_console_loses_no_line(place: Place) -> None:
    run = flooded(place)
    said = run.communicate(timeout=120)[1]
    assert run.returncode == 0
    assert len(said) == 1000 * 9011 + 15
    assert said.endswith("THE-LAST-WORDS\n")


def test_a_stop_does_not_wait_for_a_console_that_is_not_read(place: Place) -> None:
    run = flooded(place)
    run.terminate()
    assert run.wait(timeout=120) == 1
    assert run.stderr is not None
    run.stderr.close()
