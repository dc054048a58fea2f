"""Full disks, silent callers, scripts that fail again and again, and signals at every moment."""

import asyncio
import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.status import Condition, JobStatus
from tests.fakes import fill_up, small_disk
from tests.process.harness import (
    SLEEPER,
    Halt,
    Job,
    Place,
    alive,
    carrying,
    document,
    eventually,
    job,
    lines,
    members,
)
from tests.programs import PROGRAMS

STEPPER = PROGRAMS / "count_steps.py"
HANDLER = PROGRAMS / "handle_signals.py"
RAISE = PROGRAMS / "raise_exceptions.py"


def condition(status: JobStatus, kind: str) -> Condition | None:
    found = [c for c in status.conditions if c.type == kind]
    return found[0] if found else None


def stepped(status: JobStatus) -> bool:
    """Return whether the first step of a round has been told, which is written before."""
    return any(event.reason == "TrainingResumed" for event in status.events)


def final(run: Job) -> JobStatus:
    """The status that is kept when a job has ended."""
    (path,) = (run.place.folder / "state").glob("job@*/status.json")
    return JobStatus.model_validate_json(path.read_text())


# --- full disks ---


def test_while_the_disk_is_full_training_goes_on_and_afterwards_all_is_handled(
    place: Place,
) -> None:
    steps = place.folder / "steps"
    with (
        small_disk(place.folder / "state", "1m") as disk,
        job(place, script=STEPPER, replicas=2, env={"STEPS": str(steps)}) as run,
    ):
        run.running(2)
        before = run.until(stepped, "the first step in the journal: a later write would make room")
        survivor, victim = members(before)
        filler = disk / "filler"
        fill_up(filler)
        os.kill(victim.pids[0], signal.SIGKILL)
        full = run.until(unwritable, "a journal that cannot be written")
        said = condition(full, "JournalWritable")
        assert said is not None
        assert "journal.json: the disk is full; training goes on" in said.message
        assert full.round == before.round
        assert "the disk is full" in readiness(run)
        # A master that dies now finds the same, and hurts nobody either.
        os.kill(run.snapshot().master_pid, signal.SIGKILL)
        run.until(lambda s: s.term == before.term + 1 and unwritable(s), "another master")
        reached = Path(f"{steps}0")
        at = int(eventually(lambda: reached.exists() and reached.read_text(), "steps"))
        eventually(lambda: int(reached.read_text()) > at + 5, "more steps")
        assert alive(survivor.pids[0])
        assert run.status().round == before.round
        # There is room again.
        filler.unlink()
        after = run.running(2, round_after=before.round)
        assert condition(after, "JournalWritable") is None
        assert after.restarts == {"failure": 1}
        assert readiness(run) == "ok"
        os.kill(members(after)[0].pids[0], signal.SIGKILL)
        run.running(2, round_after=after.round)
        assert run.stop() == 130
        assert "Traceback" not in "".join(run.output)


def test_while_the_disk_hangs_training_goes_on_and_afterwards_all_is_handled(
    place: Place,
) -> None:
    """All threads of the master that write to a disk stand still."""
    steps = place.folder / "steps"
    with (
        job(place, script=STEPPER, replicas=2, env={"STEPS": str(steps)}) as run,
        contextlib.ExitStack() as resumed,
    ):
        before = run.running(2)
        survivor, victim = members(before)
        master = run.snapshot().master_pid
        disk = Halt(master, first=False)
        resumed.callback(disk.resume)
        os.kill(victim.pids[0], signal.SIGKILL)
        hung = run.until(unwritable, "a journal that cannot be written")
        said = condition(hung, "JournalWritable")
        assert said is not None
        assert "journal.json: the disk has not answered within 5 s; training" in said.message
        reached = Path(f"{steps}0")
        at = int(eventually(lambda: reached.exists() and reached.read_text(), "steps"))
        eventually(lambda: int(reached.read_text()) > at + 400, "steps of longer than a lease")
        assert "the disk has not answered" in readiness(run)
        assert alive(survivor.pids[0])
        assert run.status().round == before.round
        disk.resume()
        after = run.running(2, round_after=before.round)
        assert condition(after, "JournalWritable") is None
        assert after.restarts == {"failure": 1}
        assert run.snapshot().master_pid == master
        assert after.term == before.term
        assert run.stop() == 130


def unwritable(status: JobStatus) -> bool:
    said = condition(status, "JournalWritable")
    return said is not None and said.status == "False"


def readiness(run: Job) -> str:
    """What ``/readyz`` of the master says."""
    client = HttpClient(run.snapshot().health_addr)

    async def read() -> bytes:
        try:
            return await client.call("GET", "/readyz", deadline_s=10)
        except TransientError as error:
            return str(error).encode()
        finally:
            client.close()

    return asyncio.run(read()).decode()


def test_a_full_disk_costs_log_lines_and_not_the_job(place: Place) -> None:
    script = """
        for n in range(3000):
            print(n, "x" * 100, flush=True)
        """
    with small_disk(place.folder / "small", "64k") as disk:
        env = {"DLROVER_LOG_DIR": str(disk)}
        with job(place, script=script, replicas=2, env=env) as run:
            assert run.wait() == 0
            assert final(run).phase == "Succeeded"
            written = [p.stat().st_size for p in disk.rglob("stdout.log")]
            assert len(written) == 2
            assert sum(written) <= 64 * 1024
            for log in run.logs.glob("n*/agent.log"):
                text = log.read_text()
                assert text.count("log_lines_lost") == 1, "it is said, and only once"
                assert "No space left" in text
                assert '"level": "error"' not in text
            assert "Traceback" not in "".join(run.output)


def test_a_disk_that_was_full_from_the_start_is_said(place: Place) -> None:
    with small_disk(place.folder / "state", "64k") as disk:
        fill_up(disk / "filler")
        with job(place, replicas=1) as run:
            first = run.until(unwritable, "a journal that cannot be written")
            assert first.round == 0, "no round that a later master would not know of"
            os.kill(run.snapshot().master_pid, signal.SIGKILL)  # a line for the log, say
            assert run.stop() == 130
            assert "Traceback" not in "".join(run.output)


# --- callers that say nothing ---


def test_a_thousand_connections_that_say_nothing(place: Place) -> None:
    with (
        many_descriptors(2000),
        job(place, replicas=2, settings={"header_s": "4"}) as run,
        contextlib.ExitStack() as stack,
    ):
        before = run.running(2)
        snapshot = run.snapshot()
        host, _, port = snapshot.master_addr.rpartition(":")
        token = Path(snapshot.token_file).read_text()
        half = (
            f"POST /v1/nodes/n0/exchange HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        )
        half += 'Content-Length: 1000\r\n\r\n{"boot_id": '
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            for _ in range(1000)
        ]
        for sock in silent[:20]:
            sock.sendall(half.encode())
        os.kill(members(before)[1].pids[0], signal.SIGKILL)
        after = run.running(2, round_after=before.round)
        assert after.restarts == {"failure": 1}
        assert [n.id for n in members(after)] == [n.id for n in members(before)]
        eventually(lambda: not still_open(silent), "all of them are closed")
        assert run.status().round == after.round


def still_open(socks: list[socket.socket]) -> list[socket.socket]:
    """Those whose other side has not closed them."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLRDHUP)
    gone = {fd for fd, _ in poll.poll(0)}
    return [s for s in socks if s.fileno() not in gone]


@contextlib.contextmanager
def many_descriptors(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number:
        pytest.skip(f"at most {hard} descriptors may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- scripts that fail ---


@pytest.mark.parametrize("reports", [True, False], ids=["with steps", "without"])
def test_an_exception_that_comes_again_at_the_same_place_ends_the_job(
    place: Place, reports: bool
) -> None:
    args = ("at-step-5" if reports else "without-steps",)
    with job(place, script=RAISE, args=args, replicas=2, restartCount=5) as run:
        assert run.wait() == 1
        status = final(run)
        assert status.phase == "Failed"
        failed = condition(status, "Failed")
        assert failed is not None
        assert failed.reason == "NonRetryable"
        assert ("at step 5" if reports else "after a similar time") in failed.message
        assert 'raise ValueError(f"loss of process' in failed.message
        assert "ValueError: loss of process" in failed.message
        assert status.last_failure is not None
        assert status.last_failure.worker.step == (5 if reports else None)
        # One restart showed that restarts do not help; the other four are not burnt. (Without
        # steps a run that is held up is not alike, and takes another one.)
        restarts = status.restarts["failure"]
        assert restarts == 1 if reports else restarts < 5
        assert [n.id for n in status.nodes] == ["n0", "n1"], "no node was replaced"
        assert len(lines(run, "n0", "start")) == restarts + 1


def test_different_exceptions_use_up_the_budgets_of_node_and_place(place: Place) -> None:
    with job(place, script=RAISE, args=("by-round",), replicas=1, restartCount=1, hosts=1) as run:
        assert run.wait() == 1
        status = final(run)
        failed = condition(status, "Failed")
        assert failed is not None
        assert failed.reason == "RestartsExhausted"
        assert "its 1 restart is used up" in failed.message
        assert "OSError: bad" in failed.message
        assert 'raise KINDS[session.round() - 1]("bad")' in failed.message
        replaced = [e.message for e in status.events if e.reason == "RestartsExhausted"]
        assert "n0: its 1 restart is used up without steady progress; it is replaced" in replaced
        assert [n.id for n in status.nodes] == ["n0", "n1"]
        assert [len(lines(run, node, "start")) for node in ("n0", "n1")] == [2, 2]


@pytest.mark.parametrize(
    ("restarts", "how", "runs", "words"),
    [
        (0, "always", 1, "no restarts are allowed (restartCount, --max-restarts)"),
        (2, "differently", 3, "its 2 restarts are used up"),
        (2, "always", 2, "the same exception was raised again"),
    ],
)
def test_a_script_alone_that_fails_is_started_again_so_often(
    place: Place, restarts: int, how: str, runs: int, words: str
) -> None:
    place.script(RAISE)
    flags = ["--standalone", f"--max-restarts={restarts}"]
    done = place.call("elastic-run", *flags, "train.py", how)
    assert done.returncode == 1
    assert (place.folder / "runs").read_text() == "x" * runs
    said, _, summary = done.stderr.partition("train.py FAILED")
    for text, times in ((said, runs), (summary, 1)):
        assert text.count("Traceback (most recent call last)") == times
        assert text.count('sys.argv[1] == "differently"') == times
    last = done.stderr.splitlines()[-1]
    assert last.startswith("elastic-run: ")
    assert words in last


def test_an_agent_that_may_open_no_file_for_a_while_still_ends_the_round(place: Place) -> None:
    """It cannot list the processes of the round then. It tries again, and the training goes on.

    If its exchange with the master needs a new connection meanwhile, it ends and says why.
    """
    # In one piece: two workers share a pipe.
    place.script("import os, signal; os.write(1, b'%d\\n' % os.getpid()); signal.pause()")
    process = place.popen(
        *("elastic-run", "--standalone", "--nproc-per-node=2", "--max-restarts=3", "train.py"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    first = [int(process.stdout.readline()) for _ in range(2)]
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (0, limits[1]))
    os.kill(first[0], signal.SIGKILL)
    errors = ""
    while "processes_not_listed" not in errors and (line := process.stderr.readline()):
        errors += line
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
    second = [process.stdout.readline() for _ in range(2)]
    process.terminate()
    errors += process.communicate(timeout=60)[1]
    assert not any(alive(pid) for pid in first)
    why = "open files (ulimit -n): expected at least"
    assert ("processes_not_listed" in errors and all(second)) or why in errors, errors


@pytest.mark.parametrize("flag", [(), ("--cold-start",)], ids=["observed", "cold"])
def test_an_exception_counts_though_its_process_is_aborted_while_it_ends(
    place: Place, flag: tuple[str, ...]
) -> None:
    place.script(RAISE)
    done = place.call("elastic-run", *flag, "--max-restarts=3", "train.py", "aborted")
    assert done.returncode == 1
    assert (place.folder / "runs").read_text() == "xx", "the same exception again ends the job"
    last = done.stderr.splitlines()[-1]
    assert "raised ValueError: a mistake of the user, and was killed by SIGABRT" in last
    assert "traceback : Traceback" in " ".join(done.stderr.split())


def test_exit_0_after_an_order_to_stop_is_no_success(place: Place) -> None:
    with job(place, script=HANDLER, replicas=2, minReplicas=1, hosts=2) as run:
        before = run.running(2)
        eventually(lambda: len(ready(run)) == 2, "both scripts are ready")
        run.hurt(members(before)[1].id, "drain")
        after = run.running(1, round_after=before.round)
        assert after.phase == "Running"
        eventually(lambda: len(ready(run)) == 3, "the script of the next round is ready")
        run.api("POST", "/v1/stop")
        run.wait()
        status = final(run)
        assert status.phase == "Stopped"
        assert "JobSucceeded" not in [e.reason for e in status.events]


def ready(run: Job) -> list[str]:
    return [line for node in ("n0", "n1") for line in lines(run, node, "ready")]


# --- signals ---

Stage = Callable[[Place, int], object]
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])


def at_once(place: Place, pid: int) -> bool:
    return True


def never_began(done: "subprocess.CompletedProcess[str]", number: int) -> bool:
    """The signal ended Python itself; a Ctrl-C while it starts is an error to it (CPython). Or it
    was quicker than the signal."""
    return done.returncode in (-number, 128 + number) or (
        done.returncode == 1
        and (
            (number == signal.SIGINT and done.stdout.startswith("Fatal Python error: init_"))
            or f"elastic-run: the agent received {signal.Signals(number).name}" in done.stdout
        )
    )


def has_its_folder(place: Place, pid: int) -> list[Path]:
    return leftovers(pid)


def processes(number: int) -> Stage:
    """So many processes carry the mark of the test: master, agents and workers, as they come."""

    def stage(place: Place, pid: int) -> bool:
        return len(carrying(place.mark)) >= number

    return stage


WORKERS_RUN = processes(3)


def leftovers(pid: int) -> list[Path]:
    """Folders of an elastic-run with this pid."""
    return [*Path("/tmp").glob(f"dlrover-{pid}-*"), *Path("/tmp").glob(f"dlrover-run-{pid}-*")]


def interrupt(
    place: Place, argv: list[str], stage: Stage, number: int, *, within_s: float = 20.0
) -> "subprocess.CompletedProcess[str]":
    """Start a program, signal it as a terminal does once it is so far; it must end soon."""
    process = place.popen(
        *argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not stage(place, process.pid):  # no rest between two looks: the stages are short
        assert process.poll() is None, "it has ended before it was so far"
        assert time.monotonic() < deadline, "it never came so far"
    family = [process.pid, *carrying(place.mark)]
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=within_s)
    assert '"level": "error"' not in out
    assert not [path for pid in family for path in leftovers(pid)]
    return subprocess.CompletedProcess(argv, process.returncode, out)


@SIGNALS
@pytest.mark.parametrize(
    "stage",
    [at_once, has_its_folder, processes(2), WORKERS_RUN],
    ids=["at once", "preparing", "the master starts", "workers run"],
)
def test_elastic_run_alone_ends_at_every_stage(place: Place, stage: Stage, number: int) -> None:
    place.script(SLEEPER)
    done = interrupt(place, ["elastic-run", "--standalone", "train.py"], stage, number)
    if stage is at_once:
        assert never_began(done, number)
        return
    assert done.returncode == 1
    *before, last = done.stdout.splitlines()
    assert last == f"elastic-run: the agent received {signal.Signals(number).name}"
    if number == signal.SIGINT:  # which the agent passes on to a worker that may just begin
        begun = [x.startswith(("Fatal Python error: init_", "Traceback")) for x in before]
        at = [*begun, True].index(True)
        assert not any("dlrover" in line for line in before[at:]), "its own, not one of ours"
        before = before[:at]
    # A master that was just being forked has had the signal too; and the worker may run by then.
    assert [x for x in before if "master_ended" not in x and not x.startswith("start ")] == []


@SIGNALS
def test_the_second_signal_ends_workers_that_ignore_the_first(place: Place, number: int) -> None:
    place.script(HANDLER)
    process = place.popen(
        "elastic-run",
        "--standalone",
        "--nproc-per-node=2",
        "train.py",
        "deaf",
        stdout=subprocess.PIPE,
    )
    with process:
        out = process.stdout
        assert out is not None
        assert [out.readline(), out.readline()] == ["ready\n", "ready\n"]
        process.send_signal(number)
        assert [out.readline(), out.readline()] == [f"no {int(number)}\n"] * 2
        assert process.poll() is None, "it gives them time"
        process.send_signal(number)
        assert process.wait(timeout=10) == 1


@SIGNALS
def test_workers_that_exit_0_on_a_signal_have_not_succeeded(place: Place, number: int) -> None:
    place.script(HANDLER)
    process = place.popen(
        "elastic-run",
        "--standalone",
        "train.py",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert out == f"elastic-run: the agent received {signal.Signals(number).name}\n"


def a_job_file(place: Place, *, script: str = SLEEPER, **worker: Any) -> list[str]:
    """Write a job; return the command that runs it."""
    place.script(script)
    wish = document(["elastic-run", "train.py"], **worker)
    (place.folder / "job.yaml").write_text(yaml.safe_dump(wish))
    return ["dlrover", "job", "run", "job.yaml", "--json"]


def runtime_exists(name: str) -> Stage:
    def stage(place: Place, pid: int) -> bool:
        return (place.folder / "run" / name).exists()

    return stage


@SIGNALS
@pytest.mark.parametrize(
    "stage",
    [
        at_once,
        runtime_exists("job.lock"),
        runtime_exists("job/cluster.sock"),
        processes(2),
        processes(3),
        processes(6),
    ],
    ids=["at once", "preparing", "prepared", "the master starts", "agents start", "workers start"],
)
def test_a_job_ends_at_every_stage(place: Place, stage: Stage, number: int) -> None:
    done = interrupt(place, a_job_file(place, replicas=2), stage, number)
    run = place.folder / "run"
    assert not (run / "job").exists(), "its sockets and its token are gone"
    if stage is at_once:
        assert never_began(done, number)
        return
    assert done.returncode == 128 + number
    assert "Traceback" not in done.stdout
    assert "Succeeded" not in done.stdout


@pytest.mark.parametrize("how", ["stop", "drain, then Ctrl-C"])
def test_a_job_that_is_stopped_has_time_to_save(place: Place, how: str) -> None:
    script = PROGRAMS / "save_when_stopped.py"
    env = {"NODE": "$(DLROVER_NODE_ID)"}
    with job(place, script=script, replicas=2, minReplicas=1, hosts=2, env=env) as run:
        run.running(2)
        eventually(lambda: len(ready(run)) == 2, "both scripts are ready")
        if how == "stop":
            run.api("POST", "/v1/stop")
        else:
            run.hurt("n1", "drain")
            eventually(lambda: lines(run, "n1", "saving"), "it saves")
            run.process.send_signal(signal.SIGINT)
        run.wait(within_s=20)
        saved = {path.name for path in place.folder.glob("saved-by-*")}
        # After a drain the other one's script has been restarted, perhaps not far enough to save.
        assert saved >= ({"saved-by-n0", "saved-by-n1"} if how == "stop" else {"saved-by-n1"})


@SIGNALS
def test_a_second_ctrl_c_ends_a_job_at_once(place: Place, number: int) -> None:
    with job(place, script=HANDLER, args=("deaf",), replicas=2) as run:
        run.running(2)
        eventually(lambda: len(ready(run)) == 2, "both scripts are ready")
        run.process.send_signal(number)
        eventually(
            lambda: all(lines(run, node, "no 15") for node in ("n0", "n1")), "both were asked"
        )
        assert run.process.poll() is None, "it gives them time"
        run.process.send_signal(number)
        assert run.wait(within_s=25) == 128 + number


def test_two_signals_at_the_same_moment(place: Place) -> None:
    with job(place, script=HANDLER, args=("deaf",), replicas=1) as run:
        run.running(1)
        for number in (signal.SIGINT, signal.SIGTERM):  # two of a kind would be one
            run.process.send_signal(number)
        assert run.wait(within_s=15) in (130, 143)


def test_when_the_cluster_is_killed_all_ends_even_a_frozen_node(place: Place) -> None:
    with job(place, replicas=2, script=HANDLER, args=("deaf", "child")) as run:
        before = run.running(2)
        eventually(lambda: len(ready(run)) == 2, "both scripts are ready")
        run.hurt("n1", "freeze")
        snapshot = run.snapshot()
        agents = [n.agent_pid for n in members(before)]
        helpers = [pid for agent in agents for pid in guardians_of(agent)]
        assert len(helpers) == 2
        folders = [path for agent in agents for path in leftovers(agent)]
        assert len(folders) == 2
        run.process.kill()
        assert run.wait() == -signal.SIGKILL
        everybody = [
            snapshot.master_pid,
            *agents,
            *helpers,
            *(p for n in members(before) for p in n.pids),
        ]
        eventually(lambda: not any(map(alive, everybody)), "all of them end", within_s=25)
        eventually(lambda: not carrying(place.mark), "nothing is left, no child of a worker either")
        assert lines(run, "n0", "no 15"), "the one that could hear was asked first"
        assert not lines(run, "n1", "no 15")
        assert not [path for path in folders if path.exists()]
        # Its name is free, and what it left behind is taken over.
        assert run.socket.exists()
        place.script("print('done')")
        again = place.call("dlrover", "job", "run", "job.yaml", "--json")
        assert again.returncode == 0, again.stderr
        assert not run.socket.exists()


def guardians_of(agent: int) -> list[int]:
    """The processes that clean up after this agent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                its = any(a.startswith(f"{agent}@".encode()) for a in argv)
                if its and any(a.endswith(b"reaper.py") for a in argv):
                    found.append(int(entry.name))
    return found


@pytest.mark.parametrize("flag", [(), ("--cold-start",)], ids=["observed", "cold"])
def test_a_temporary_folder_that_is_removed_meanwhile_costs_nothing(
    place: Place, flag: tuple[str, ...]
) -> None:
    """Batch systems remove TMPDIR at the end of a job step, and cleaners what is old in /tmp."""
    temporary = place.folder / "tmp"
    temporary.mkdir()
    place.script(PROGRAMS / "remove_temporary_folder.py")
    env = {"TMPDIR": str(temporary)}
    flags = ["--standalone", "--max-restarts=5", *flag]
    done = place.call("elastic-run", *flags, "train.py", env=env, timeout=60)
    told = [line for line in done.stdout.splitlines() if line.startswith("attempt")]
    assert told == [f"attempt {n} [True, True]" for n in range(3)], done.stderr
    assert done.returncode == 0
    assert list(temporary.iterdir()) == []
