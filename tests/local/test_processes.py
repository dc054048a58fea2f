"""Identifiers and signals of processes that run."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_agent.observation.snapshot import IdleClock, cpu_time
from dlrover_py.process import identity
from dlrover_py.process.identity import (
    ProcessId,
    all_processes,
    children,
    descendants,
    environment,
    exit_code,
    is_stopped,
    marked,
    members,
    signal_all,
)

MARK = "DLROVER_MARK_OF_A_TEST"
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=lambda: (print("here", flush=True), time.sleep(600))).start()
ctypes.CDLL(None).syscall(60, 0)  # exit: of this thread alone
"""


@pytest.fixture
def leader() -> Iterator["subprocess.Popen[bytes]"]:
    """It leads a session with another process in it, carries a mark, and does not end by itself."""
    script = 'sleep 600 & echo "$!"; wait; exec sleep 600'
    with subprocess.Popen(
        ["sh", "-c", script],
        env=os.environ | {MARK: secrets.token_hex(8)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        name = ProcessId.of(process.pid)
        yield process
        for member in members([name]):
            member.id.signal(signal.SIGKILL)


def former(now: ProcessId) -> ProcessId:
    """Who had the same number before."""
    return ProcessId(now.pid, now.started - 1)


def test_who_had_the_number_before_is_gone_and_nothing_reaches_it(
    leader: "subprocess.Popen[bytes]",
) -> None:
    now = ProcessId.of(leader.pid)
    assert ProcessId.parse(str(now)) == now
    assert now.alive
    assert not former(now).alive
    with pytest.raises(ProcessLookupError):
        former(now).open()
    former(now).signal(signal.SIGKILL)
    assert len(members([now])) == 2
    assert members([former(now)]) == []
    now.signal(signal.SIGKILL)
    assert leader.wait(60) == -signal.SIGKILL
    left = members([now])
    assert len(left) == 1, "the session goes on without its first process"
    left[0].id.signal(signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        ProcessId.of(leader.pid)


def test_a_process_that_is_stopped_is_known_as_such(leader: "subprocess.Popen[bytes]") -> None:
    assert not is_stopped(leader.pid)
    leader.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, leader.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_stopped(leader.pid)


def test_a_mark_is_found_in_whole_and_signalled_until_nothing_new_turns_up(
    leader: "subprocess.Popen[bytes]",
) -> None:
    mark = _environ(leader.pid)[MARK]
    found = {process.pid for process in marked(MARK, mark)}
    assert leader.pid in found
    assert len(found) == 2
    assert marked(MARK, mark[:-1]) == []
    assert marked(MARK[:-1], mark) == []
    signal_all(lambda: marked(MARK, mark), signal.SIGKILL)
    assert leader.wait(60) == -signal.SIGKILL


def test_an_environment_is_read_while_its_process_is_in_execve(tmp_path: Path) -> None:
    """``/proc/PID/environ`` is empty then: without a second look, one in 100 reads fails."""
    script = tmp_path / "again"
    script.write_text('exec sh "$0"')
    with subprocess.Popen(["sh", script], env=os.environ | {MARK: "here"}) as process:
        missed = sum(MARK not in _environ(process.pid) for _ in range(5000))
        process.kill()
    assert missed == 0
    with subprocess.Popen(["sleep", "600"], env={}) as process:
        assert environment(process.pid) == b"", "and none is not waited for"
        process.kill()
    with pytest.raises(OSError, match=str(process.pid)):
        environment(process.pid)


def _environ(pid: int) -> dict[str, str]:
    pairs = (line.partition("=") for line in environment(pid).decode().split("\0"))
    return {name: value for name, _, value in pairs}


def test_a_worker_is_not_idle_while_the_child_of_a_child_computes() -> None:
    """As the workers of the pool of ``torch.compile`` do, while their rank waits for them."""
    computes = "while :; do :; done"
    script = f"sh -c 'sh -c \"{computes}\" & echo $!; wait' & wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        busy = int(process.stdout.readline())
        now = [100.0]
        clock, pids = IdleClock(lambda: now[0]), [process.pid]
        try:
            assert busy in descendants(process.pid, list(all_processes()))
            for _ in range(2):
                now[0] += 1000.0
                clock.seconds(pids)
            until = cpu_time(busy) + 0.1
            while cpu_time(busy) < until:
                os.sched_yield()
            now[0] += 1.0
            assert clock.seconds(pids) == 0.0
        finally:
            for pid in [*descendants(process.pid, list(all_processes())), process.pid]:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("ends", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("true", 0)])
def test_an_exit_code_is_read_while_the_number_is_kept(ends: str, code: int) -> None:
    with subprocess.Popen(["sh", "-c", f"read line; {ends}"], stdin=subprocess.PIPE) as process:
        assert exit_code(os.P_PID, process.pid) is None
        name = ProcessId.of(process.pid)
        fd = os.pidfd_open(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code(os.P_PIDFD, fd) == exit_code(os.P_PID, process.pid) == code
        os.close(fd)
        assert name in children(os.getpid(), ended=True)
        assert ProcessId.of(process.pid) == name
        assert not name.alive
        assert process.wait() == code


def test_a_process_whose_first_thread_has_ended_is_running_still() -> None:
    """As one is that hangs in a driver, with the device open, while all else of it has died."""
    with subprocess.Popen(
        [sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stat = Path(f"/proc/{process.pid}/stat")
        while b") Z " not in stat.read_bytes():  # its first thread ends
            os.sched_yield()
        name = ProcessId.of(process.pid)
        assert name.alive
        assert [member.id for member in members([name])] == [name]
        assert name in children(os.getpid())
        name.signal(signal.SIGKILL)
        process.wait(30)
        assert members([name]) == []


@pytest.mark.parametrize("number", identity.SENT_TO_ALL)
def test_a_signal_to_all_does_not_kill_a_helper_at_its_start(number: int) -> None:
    """The signal comes before the first instruction of the program, and is ignored afterwards."""
    argv = [
        "-c",
        "from dlrover_py.process.identity import ignore_sent_to_all as ignore\n"
        "input(); ignore(); import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))",
    ]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with identity.shielded_child():
        helper = subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    helper.send_signal(number)
    out, _ = helper.communicate("\n", timeout=60)
    assert helper.returncode == 0
    assert out == f"{mask}\n"
