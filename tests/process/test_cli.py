"""What people see: the commands of a second terminal, and the SDK's news in the status."""

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests import jsonform
from tests.process.harness import SLEEPER, Place, document, eventually, job, members
from tests.programs import PROGRAMS

STEPPER = PROGRAMS / "report_until_stopped.py"


def test_steps_and_metrics_reach_the_status_and_a_stop_reaches_the_script(place: Place) -> None:
    with job(place, script=STEPPER, replicas=2) as run:
        first = run.until(lambda s: s.progress is not None and s.progress.step > 50, "steps")
        assert first.progress is not None
        assert first.progress.total == 1_000_000
        assert first.progress.metrics.keys() == {"loss"}
        run.until(lambda s: s.progress is not None and s.progress.steps_per_s > 1, "a speed")
        os.kill(members(first)[0].pids[0], signal.SIGKILL)
        run.running(2, round_after=first.round)
        resumed = run.until(
            lambda s: [e.round for e in s.events if e.reason == "TrainingResumed"] == [1, 2],
            "the first step of the next round",
        )
        event = resumed.events[-1]
        assert "first step of round 2 is 1" in event.message
        assert "are repeated" in event.message
        assert event.took_s is not None
        why = "round 2 because n0: worker 0 (rank 0) was killed by SIGKILL"
        eventually(  # the first step may have been another's
            lambda: why in run.cli("job", "logs", "--rank", "0"), "rank 0 has begun too"
        )
        run.cli("job", "suspend")
        eventually(
            lambda: "asked to stop: the job is suspended" in run.cli("job", "logs"),
            "the scripts end by themselves",
        )
        assert run.until(lambda s: s.phase == "Suspended", "it is suspended").restarts == {
            "failure": 1
        }


def test_a_terminal_with_another_tmpdir_finds_the_job(place: Place) -> None:
    """Slurm sets a TMPDIR for each of its jobs."""
    with job(place) as run:
        run.running(1)
        env = {"DLROVER_RUNTIME_DIR": str(place.folder / "another")}
        listed = place.call("dlrover", "job", "list", env=env).stdout.splitlines()
        assert listed[1].split()[:2] == ["job", "Running"]
        assert place.call("dlrover", "job", "stop", "job", env=env).returncode == 0
        run.wait()
    listed = place.call("dlrover", "job", "list", env=env).stdout.splitlines()
    assert listed[1].split()[:2] == ["job", "Stopped"]


def test_the_second_terminal(place: Place) -> None:
    with job(place, replicas=2, minReplicas=1, hosts=2) as run:
        before = run.running(2)
        head, listed = run.cli("job", "list", "--all").splitlines()
        assert head.split()[:4] == ["NAME", "PHASE", "READY", "ROUND"]
        assert listed.split()[:4] == ["job", "Running", "2/2", "1"]
        assert run.cli("job", "get").splitlines()[1].split()[:3] == ["job", "Running", "2/2"]
        assert run.cli("job", "get", "job").splitlines()[1].split()[:2] == ["job", "Running"]
        (row,) = json.loads(run.cli("job", "list", "--json"))
        assert (row["name"], row["state"]) == ("job", "running")
        described = run.cli("job", "describe")
        for word in ("desired", "2 nodes", "n0", "PodsReady", "RoundFormed"):
            assert word in described
        assert json.loads(run.cli("job", "describe", "--json"))["status"]["round"] == 1
        node = members(before)[0].id
        eventually(
            lambda: "start 0 2" in run.cli("job", "logs", "job", "--node", node), "it has begun"
        )
        assert "workers_start" in run.cli("job", "logs", "--agents")
        assert "are gone" in run.cli("node", "kill", "n1")
        run.running(1, round_after=before.round)
        why = run.cli("job", "why")
        # On a busy machine the master is the first to notice.
        assert re.search(r"node n1 was lost: (host-1 was killed|its connection closed)", why)
        assert "RoundFormed" in why
        assert "the job starts" in run.cli("job", "why", "--round", "1")
        chain = json.loads(run.cli("job", "why", "--json"))
        assert chain[0]["reason"] == "NodeLost"
        assert "NodeLost" in run.cli("job", "events")
        assert "host-2" in run.cli("node", "add")
        for bad, words in (
            (("node", "kill", "n77"), "node n77 does not run; running nodes: n0"),
            (("node", "kill", "a b"), "node 'a b': expected the id of a node, such as n0"),
            (("node", "drain", "n0/kill?"), "node 'n0/kill?': expected the id of a node"),
            (("node", "thaw", "é"), "node 'é': expected the id of a node"),
            (("job", "describe", "nosuch"), "job nosuch is not known"),
            (("job", "why", "--round", "99"), "round 99: no event is about it"),
            (("job", "why", "--round", "99", "--json"), "round 99: no event is about it"),
        ):
            done = place.call("dlrover", *bad)
            assert (done.returncode, done.stdout) == (2, ""), bad
            assert words in done.stderr
            assert "Traceback" not in done.stderr
        assert "is being stopped" in run.cli("job", "stop")
        assert run.wait() == 1, "its training is not complete"
    ended = place.call("dlrover", "job", "list").stdout.splitlines()[1].split()
    assert (ended[1:3], ended[-1]) == (["Stopped", "0/2"], "ago")
    assert place.call("dlrover", "job", "get", "job").stdout.splitlines()[1].split()[1] == "Stopped"
    described = place.call("dlrover", "job", "describe").stdout
    # A locale without our dots and dashes shows others in their place.
    ascii_only = place.call("dlrover", "job", "describe", env={"PYTHONIOENCODING": "ascii"})
    assert (ascii_only.returncode, ascii_only.stdout) == (0, described.replace("·", "?"))
    absent = place.call("dlrover", "job", "logs", "job", "--node", "n77")
    assert absent.returncode == 2
    assert "there is no log of node n77; existing logs: n0 round 1 rank" in absent.stderr
    assert "trouble" not in described
    assert re.search(r"PodsReady +no +the job has ended", described)
    assert "start 0 2" in place.call("dlrover", "job", "logs", "job").stdout
    assert "JobStopped" in place.call("dlrover", "job", "events").stdout
    nothing = place.call("dlrover", "job", "scale", "2")
    assert (nothing.returncode, "no job runs" in nothing.stderr) == (2, True)


@pytest.mark.parametrize("moment", ["job@*", "job@*/logs/master.log", "job@*/logs/n0/agent.log"])
def test_a_job_that_is_stopped_while_it_starts_has_ended_like_any_other(
    place: Place, moment: str
) -> None:
    place.script(SLEEPER)
    (place.folder / "job.yaml").write_text(
        yaml.safe_dump(document(["elastic-run", "train.py"], replicas=2))
    )
    process = place.popen(
        *("dlrover", "job", "run", "job.yaml", "--plain"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    eventually(lambda: list((place.folder / "state").glob(moment)), moment)
    os.killpg(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    assert "NodeLost" not in printed
    assert "JobStopped: the job was ended by its user" in printed
    assert re.search(r"^job stopped after .+: the job was ended by its user$", printed, re.M)
    listed = place.call("dlrover", "job", "list", "--all").stdout.splitlines()
    assert listed[1].split()[:3] == ["job", "Stopped", "0/2"]
    for command in ("describe", "report", "events", "why", "rm --yes"):
        done = place.call("dlrover", "job", *command.split(), "job")
        assert done.returncode == 0, (command, done.stderr)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such", "train.py"], "no-such: no such program on the PATH"),
        (["/opt/no-such"], "/opt/no-such: there is no such file"),
        (
            ["no-such launch train.py"],
            "no such program; expected each word as an item of a list: [no-such, launch, train.py]",
        ),
    ],
)
def test_a_program_that_is_not_there_fails_the_job_at_once(
    place: Place, command: list[str], words: str
) -> None:
    (place.folder / "job.yaml").write_text(yaml.safe_dump(document(command, replicas=2)))
    done = place.call("dlrover", "job", "run", "job.yaml", "--plain")
    assert done.returncode == 1
    assert re.search(
        rf"^job failed after .*: n\d: could not be started: .*{re.escape(words)}$",
        done.stdout,
        re.M,
    )
    assert len(set(re.findall(r"n\d+ was lost", done.stdout))) <= 2


def test_get_shows_no_jobs_where_there_is_neither_a_cluster_nor_a_job(place: Place) -> None:
    done = place.call("dlrover", "job", "get", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    done = place.call("dlrover", "job", "get")
    assert done.returncode == 0
    assert "no job runs on this machine, and no cluster: kubeconfig" in done.stderr
    assert place.call("dlrover", "job", "get", "nosuch").returncode == 2


def test_a_file_is_no_folder_of_checkpoints_and_a_folder_is_no_script(place: Place) -> None:
    place.script("")
    done = place.call("dlrover", "ckpt", "ls", "train.py")
    assert (done.returncode, "this is a file; expected a folder" in done.stderr) == (2, True)
    done = place.call("elastic-run", "--standalone", ".")
    assert (done.returncode, "a folder without a __main__.py" in done.stderr) == (1, True)


def test_what_the_script_prints_is_shown_while_it_runs_and_at_the_end(place: Place) -> None:
    for flags, expected in (
        ((), {"n0 rank 0": ["hello from 0", "bye from 0"]}),
        (
            ("--logs", "all"),
            {f"n{r} rank {r}": [f"hello from {r}", f"bye from {r}"] for r in (0, 1)},
        ),
    ):
        place.script(PROGRAMS / "greet.py")
        (place.folder / "go").unlink(missing_ok=True)
        command = document(["elastic-run", "train.py"], replicas=2)
        (place.folder / "job.yaml").write_text(yaml.safe_dump(command))
        run = place.popen("dlrover", "job", "run", "--plain", "job.yaml", *flags, stdout=-1)
        assert run.stdout is not None
        text = ""
        while text.count("hello") < len(expected):
            text += (line := run.stdout.readline())
            assert line, text
        (place.folder / "go").touch()
        text += run.communicate(timeout=60)[0]
        assert run.returncode == 0, text
        found: dict[str, list[str]] = {}
        for node, rank, words in re.findall(r"^\[(n\d) rank (\d)\] (.*)$", text, re.MULTILINE):
            found.setdefault(f"rank {rank}", []).append(words)
            assert node in ("n0", "n1")
        assert found == {name.split(" ", 1)[1]: said for name, said in expected.items()}, text
        assert "in another terminal: dlrover job describe|why|logs -f job" in text
        assert "at step 7/7: all workers exited with code 0" in text
        assert "last line of rank 0: bye from 0" in text


def test_what_is_printed_for_scripts_has_one_form_but_for_the_object_of_kubernetes(
    place: Place,
) -> None:
    with job(place, script=STEPPER, replicas=1) as run:
        run.until(lambda s: s.progress is not None, "a step")
        told = {verb: run.cli("job", verb, "--json") for verb in ("list", "get", "describe", "why")}
        told |= {"events": run.cli("job", "events", "--json")}
        object_of_kubernetes = json.loads(told["describe"])["job"]
        assert "replicaSpecs" in object_of_kubernetes["spec"]
        run.stop()
        told |= {
            f"{verb} of an ended job": run.cli("job", verb, "--json", *name)
            for verb, name in (("list", ()), ("get", ("job",)), ("describe", ()))
        }
        told |= {
            "run": "".join(
                line
                for line in run.output
                if not line.startswith("dlrover: ")  # standard error
            ),
        }
    for verb, text in told.items():
        found = [json.loads(line) for line in text.splitlines()]
        assert len(jsonform.keys(found)) > 5, verb
        assert jsonform.faults(found) == set(), verb
    for verb in ("list", "get", "describe"):
        runs, ended = (json.loads(told[name]) for name in (verb, f"{verb} of an ended job"))
        rows = ([runs], [ended]) if verb == "describe" else (runs, ended)
        assert set(rows[0][0]) == set(rows[1][0]), verb
    ended = json.loads(told["describe of an ended job"])
    assert ended["job"]["spec"] == object_of_kubernetes["spec"]
    assert "started_at" in jsonform.keys(json.loads(told["describe"]))
    assert "at" in jsonform.keys(json.loads(told["why"]))


def test_past_runs_are_removed_and_one_that_goes_on_is_not(place: Place) -> None:
    state = place.folder / "state"
    with job(place, script="print('x')", replicas=1) as run:
        assert run.wait() == 0
    with job(place, replicas=1) as run:
        run.running(1)
        assert len(list(state.iterdir())) == 2
        for argv, words in (
            (("rm",), "no runs selected"),
            (("rm", "--older-than", "1x"), "expected a time such as 12h"),
            (("rm", "--all"), "confirm with --yes"),
            (("rm", "job", "other", "-y"), "no run of other has ended"),
        ):
            done = place.call("dlrover", "job", *argv)
            assert (done.returncode, words in done.stderr) == (2, True), done.stderr
        assert len(list(state.iterdir())) == 2
        assert run.cli("job", "rm", "--older-than", "1d", "-y") == ""
        assert run.cli("job", "rm", "--all", "-y") == "removed 1 run\n"
        assert run.logs.exists()  # of the only run that is left
        page = run.cli("job", "report")
        assert page.startswith("<!DOCTYPE html>")
        run.running(1)
        os.kill(run.process.pid, signal.SIGKILL)
        run.wait()
    listed = place.call("dlrover", "job", "list").stdout.splitlines()
    assert [line.split() for line in listed[1:]] == [["job", "Killed"]]
    assert place.call("dlrover", "job", "logs", "--agents", "job").returncode == 0
    done = place.call("dlrover", "job", "scale", "2", "--job", "job")
    assert "job job does not run on this machine; no job runs" in done.stderr  # its socket is there
    assert place.call("dlrover", "job", "rm", "job", "-y").stdout == "removed 1 run\n"
    assert list(state.iterdir()) == []
    shutil.rmtree(place.folder / "run")  # the killed one could not


def test_what_a_job_has_written_is_for_its_user_alone(place: Place) -> None:
    state = place.folder / "state"
    with job(place, script="raise RuntimeError('the password is x')", replicas=1) as run:
        assert run.wait() == 1
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    state.chmod(0o755)  # as it is where somebody else has made it
    with job(place, script="print('x')", replicas=1) as run:
        assert run.wait() == 0
    assert stat.S_IMODE(state.stat().st_mode) == 0o755
    folders = list(state.iterdir())
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700, 0o700]
    assert all((folder / "status.json").exists() for folder in folders)


def test_a_script_says_nothing_to_the_terminal_of_who_looks(place: Place) -> None:
    words = "\x1b]0;mine\x07\x1b[2Jall is well"
    script = f"""
        import sys
        print({words!r}, file=sys.stderr)
        raise RuntimeError({words!r})
    """
    with job(place, script=script, replicas=1, restartCount=0) as run:
        assert run.wait() == 1
    shown = {verb: run.cli("job", verb) for verb in ("describe", "why", "events", "list")}
    shown["run"] = place.call("dlrover", "job", "run", "--plain", "job.yaml").stdout
    for verb, text in shown.items():
        assert all(c.isprintable() or c in "\n\t" for c in text), verb
    for verb in ("describe", "events", "run"):
        assert r"RuntimeError: \x1b]0;mine\x07\x1b[2Jall is well" in shown[verb]
    failure = json.loads(run.cli("job", "describe", "--json"))["status"]["last_failure"]
    assert words in failure["worker"]["message"]
    assert words in run.cli("job", "logs")  # what a worker has written itself


def test_logs_are_followed_to_the_end(place: Place) -> None:
    with job(place, script=PROGRAMS / "greet.py", replicas=2) as run:
        run.running(2)
        follower = place.popen("dlrover", "job", "logs", "-f", stdout=-1)
        assert follower.stdout is not None
        seen = [follower.stdout.readline(), follower.stdout.readline()]
        assert all("hello" in line for line in seen)
        (place.folder / "go").touch()
        assert run.wait() == 0
        rest = follower.communicate(timeout=20)[0]
        assert rest.count("bye from") == 2
        assert "[n0 round 1 rank" in rest


def test_the_job_environment_is_torchruns(place: Place) -> None:
    script = """
        import json, os
        print(json.dumps(dict(os.environ)), flush=True)
    """
    with job(
        place,
        script=script,
        replicas=2,
        flags=("--nproc-per-node=2",),
        env={"GREETING": "hello $(ELASTIC_JOB_NAME) $(UNKNOWN) $$"},
    ) as run:
        assert run.wait() == 0
    ranks = {}
    for path in (place.folder / "state").glob("job@*/logs/n*/1/1/*/stdout.log"):
        env = json.loads(path.read_text())
        ranks[int(env["RANK"])] = env
    assert sorted(ranks) == [0, 1, 2, 3]
    for rank, env in ranks.items():
        expected = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank % 2),
            "GROUP_RANK": str(rank // 2),
            "GROUP_WORLD_SIZE": "2",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_RUN_ID": "job",
            "OMP_NUM_THREADS": "1",
            "GREETING": "hello job $(UNKNOWN) $",
            "MASTER_PORT": ranks[0]["MASTER_PORT"],
        }
        assert {k: env[k] for k in expected} == expected
        assert "DLROVER_TOKEN_FILE" not in env
        assert "DLROVER_LIFELINE_FD" not in env


SYS_WRITE = ("1", "64")
"""Number of write(2) on x86-64 and on ARM."""
TALKER = """
    import signal
    for number in range(300):
        print(number, "x" * 1000, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_job_run_although_its_output_has_no_reader(
    place: Place, number: int, terminal: bool
) -> None:
    place.script(TALKER)
    command = ["elastic-run", "train.py"]
    (place.folder / "job.yaml").write_text(yaml.safe_dump(document(command, replicas=1)))
    read, write = os.openpty() if terminal else os.pipe()
    run = place.popen("dlrover", "job", "run", "job.yaml", "--logs=all", stdout=write)
    os.close(write)

    def blocked() -> bool:
        """Whether a thread of the program waits in write(2) on its standard output."""
        for task in Path(f"/proc/{run.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                call = (task / "syscall").read_text().split()
                if call[0] in SYS_WRITE and call[1] == "0x1":
                    return True
        return False

    try:
        eventually(lambda: all(blocked() for _ in range(50)), "the output is full")
        run.send_signal(number)
        assert run.wait(timeout=60) == 128 + number
    finally:
        os.close(read)
        run.kill()
        run.wait()
