"""Found by people who tried to break it: each of these failed once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.process.harness import CALM, Place, alive, carrying, eventually, job, lines, members
from tests.programs import PROGRAMS

PARENT = PROGRAMS / "have_a_child.py"
WAITS = PROGRAMS / "wait_for_go.py"


@pytest.mark.timeout(240)
def test_a_real_ddp_scripts_exceptions_are_told_apart(place: Place) -> None:
    # torch.distributed puts "[rank1]: " before each line of a traceback.
    go = place.folder / "go"
    with job(
        place,
        script=PROGRAMS / "fail_twice_under_ddp.py",
        args=(str(go),),
        replicas=2,
        restartCount=5,
        settings=CALM,
    ) as run:
        run.until(lambda s: s.restarts == {"failure": 2}, "two restarts", within_s=150)
        failed = [e for e in run.status().events if e.reason == "WorkerFailed"]
        assert [("OSError: first" in e.message, e.node) for e in failed] == [
            (True, failed[0].node),
            (False, failed[0].node),
        ]
        assert "ConnectionError: second" in failed[1].message
        go.touch()
        assert run.wait(within_s=120) == 0


def test_a_node_that_was_given_up_is_killed_before_it_can_write_again(place: Place) -> None:
    quick = {"lease_s": "5", "exchange_s": "0.5"}
    with job(place, replicas=1, standbyReplicas=1, hosts=2, settings=quick) as run:
        run.until(lambda s: s.standby == 1, "a standby")
        before = run.running(1)
        old = members(before)[0]
        os.kill(old.agent_pid, signal.SIGSTOP)  # its worker goes on
        run.running(1, round_after=before.round)
        eventually(lambda: not alive(old.pids[0]), "the old rank 0 is gone")


def test_children_in_sessions_of_their_own_end_with_their_round(place: Place) -> None:
    args = ("own-session", "without-environment")
    with job(place, script=PARENT, args=args, replicas=1, settings=CALM) as run:
        before = run.running(1)
        node = members(before)[0]
        first = int(eventually(lambda: lines(run, node.id, "child"), "a child")[0].split()[1])
        os.kill(node.pids[0], signal.SIGKILL)
        run.running(1, round_after=before.round)
        assert not alive(first)
        both = eventually(lambda: lines(run, node.id, "child")[1:], "a child of the next round")
        second = int(both[0].split()[1])
        run.stop()
        eventually(lambda: not alive(second), "it is gone as well")


def test_a_killed_guardian_is_replaced_and_ends_what_the_workers_have_left(
    place: Place, shm: Path
) -> None:
    """Without a platform: that would end what an agent leaves behind, too."""
    place.script(PROGRAMS / "ask_transfer_server.py")
    agent = place.popen("elastic-run", "--standalone", "train.py")

    def guardians() -> list[int]:
        found = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(agent.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(x.split()[0]) for x in found.stdout.splitlines() if "reaper.py" in x]

    try:
        eventually((place.folder / "children").exists, "the worker's children")
        children = [int(pid) for pid in (place.folder / "children").read_text().split()]
        (first,) = guardians()
        os.kill(first, signal.SIGKILL)
        eventually(lambda: guardians() not in ([], [first]), "another guardian")
        # The agent does one thing after another: when it answers, that one knows whom to end.
        (place.folder / "go").touch()
        eventually((place.folder / "answered").exists, "the agent has answered since")
        assert all(map(alive, children))
    finally:
        agent.kill()
        agent.wait()
    eventually(lambda: not any(map(alive, children)), "what the worker had started is gone")


LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
"""The number of the last process: the next one gets a higher number."""


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK) or os.getuid() != 0, reason="not root")
def test_a_number_that_is_another_programs_by_now_is_not_killed(place: Place) -> None:
    place.script(WAITS)
    run = place.popen("elastic-run", "--standalone", "--nproc-per-node=2", "train.py", "1")
    early, late = place.folder / "pid0", place.folder / "pid1"
    eventually(lambda: early.exists() and late.exists(), "both run")
    number = int(early.read_text())
    eventually(lambda: not Path(f"/proc/{number}").exists(), "the one that is done is reaped")
    stranger = eventually(lambda: of_number(number), "a stranger with its number")
    (place.folder / "go").touch()
    assert run.wait(timeout=120) == 0
    assert stranger.poll() is None
    stranger.kill()
    stranger.communicate()


def of_number(number: int) -> "subprocess.Popen[bytes] | None":
    """A process that leads a session and has this number, if nobody else was faster."""
    LAST_PID.write_text(str(number - 1))
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
    if process.pid == number:
        return process
    process.communicate()
    return None


def test_settings_that_cannot_be_used_end_the_command(place: Place) -> None:
    bad = {"DLROVER_MASTER_LEASE_S": "abc"}
    place.script("print('never')")
    done = place.call("elastic-run", "--standalone", "train.py", env=bad)
    assert done.returncode == 1
    assert "lease_s" in done.stderr
    with job(place, replicas=1, settings={"lease_s": "abc"}) as run:
        assert run.wait() == 2
        assert "lease_s" in "".join(run.output)


def test_a_variable_that_no_process_can_have_is_refused(place: Place) -> None:
    with job(place, replicas=1, env={"A=B": "x"}) as run:
        assert run.wait() == 2
        assert "containers[0].env[0].name" in "".join(run.output)


def test_a_repeated_exception_stops_standalone_without_log_files_too(place: Place) -> None:
    place.script(PROGRAMS / "raise_exceptions.py")
    calm = {"DLROVER_MASTER_LEASE_S": CALM["lease_s"]}
    flags = ["--standalone", "--max-restarts=10"]
    done = place.call("elastic-run", *flags, "train.py", "long", env=calm)
    assert done.returncode == 1
    assert (place.folder / "runs").read_text() == "xx"
    assert "the same exception was raised again" in done.stderr


def test_a_reader_that_does_not_read_stops_nobody(place: Place) -> None:
    place.script(PROGRAMS / "print_much.py")
    held = place.popen(
        "elastic-run",
        "--standalone",
        "--tee=3",
        "--log-dir",
        "logs",
        "train.py",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    eventually(lambda: (place.folder / "done").exists(), "the script ends")
    assert held.wait(timeout=120) == 0
    assert held.stdout is not None
    held.stdout.close()


def test_a_paused_terminal_costs_no_restart(place: Place) -> None:
    place.script(WAITS)
    run = place.popen("elastic-run", "--standalone", "train.py")
    eventually(lambda: (place.folder / "runs").exists(), "the script runs")
    run.send_signal(signal.SIGSTOP)
    subprocess.run(
        [sys.executable, "-c", "import threading; threading.Event().wait(7)"], check=True
    )
    run.send_signal(signal.SIGCONT)
    (place.folder / "go").touch()
    assert run.wait(timeout=120) == 0
    assert (place.folder / "runs").read_text() == "x"


def test_closed_streams_and_nohup(place: Place) -> None:
    place.script("print('hello')")
    shell = subprocess.run(
        ["sh", "-c", "elastic-run --standalone train.py <&- >&- 2>&-"],
        cwd=place.folder,
        env=place.env,
        timeout=150,
        check=False,
    )
    assert shell.returncode == 0
    place.script(WAITS)
    with ignoring(signal.SIGHUP):
        run = place.popen("elastic-run", "--standalone", "train.py")
    eventually(lambda: (place.folder / "runs").exists(), "it runs")
    run.send_signal(signal.SIGHUP)
    (place.folder / "go").touch()
    assert run.wait(timeout=120) == 0
    eventually(lambda: not carrying(place.mark), "nothing is left")


def test_a_job_under_nohup_outlives_its_terminal(place: Place) -> None:
    with ignoring(signal.SIGHUP), job(place, replicas=1) as run:
        before = run.running(1)
        run.process.send_signal(signal.SIGHUP)
        os.kill(members(before)[0].pids[0], signal.SIGKILL)
        run.running(1, round_after=before.round)
        assert run.stop() == 130


def test_workers_ignore_what_torchruns_ignore(place: Place) -> None:
    # nohup ignores SIGHUP; a shell without job control ignores the other two for what it starts
    # with &.
    place.script(PROGRAMS / "ignored_signals.py")
    found = {}
    with ignoring(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        for launcher in ("torchrun", "elastic-run"):
            flags = ("--standalone", "train.py")
            done = place.call(launcher, *flags, env={"TEST_LAUNCHER": launcher})
            assert done.returncode == 0, done.stderr
            found[launcher] = (place.folder / f"ignored-{launcher}").read_text()
    assert found["elastic-run"] == found["torchrun"]
    assert not int(found["torchrun"], 16) & 1 << signal.SIGHUP - 1


@contextmanager
def ignoring(*numbers: int) -> Iterator[None]:
    """Programs that are started meanwhile ignore these signals."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
