"""What people see: the commands of a second terminal, and the SDK's news in the status."""

import json
import os
import re
import shutil
import signal
import stat

import yaml

from tests.process.harness import Place, document, eventually, job, members

STEPPER = """
    import os, signal, sys, threading
    from dlrover_py.trainer import session
    world = session.world()
    assert world.rank == int(os.environ["RANK"]) and session.active()
    print("round", session.round(), "because", session.restart_reason() or "-", flush=True)
    wait = threading.Event()
    step = 0
    while not session.should_stop():
        step += 1
        session.report_step(step, total=1000000, loss=1 / step)
        wait.wait(0.01)
    print("asked to stop:", session.stop_reason(), flush=True)
"""


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
        for word in ("wish", "2 nodes", "n0", "PodsReady", "RoundFormed"):
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
        assert re.search(r"n1 is lost: (host-1 was killed|its connection closed)", why)
        assert "RoundFormed" in why
        assert "the job starts" in run.cli("job", "why", "--round", "1")
        chain = json.loads(run.cli("job", "why", "--json"))
        assert chain[0]["reason"] == "NodeLost"
        assert "NodeLost" in run.cli("job", "events")
        assert "host-2" in run.cli("node", "add")
        for bad, words in (
            (("node", "kill", "n77"), "node n77 does not run; these do: n0"),
            (("job", "describe", "nosuch"), "job nosuch is not known"),
            (("job", "why", "--round", "99"), "round 99"),
        ):
            done = place.call("dlrover", *bad)
            assert done.returncode == 2, bad
            assert words in done.stderr
        assert "is being stopped" in run.cli("job", "stop")
        assert run.wait() == 0
    ended = place.call("dlrover", "job", "list").stdout.splitlines()[1].split()
    assert (ended[1:3], ended[-1]) == (["Stopped", "0/2"], "ago")
    assert place.call("dlrover", "job", "get", "job").stdout.splitlines()[1].split()[1] == "Stopped"
    described = place.call("dlrover", "job", "describe").stdout
    assert "trouble" not in described
    assert re.search(r"PodsReady +no +the job has ended", described)
    assert "start 0 2" in place.call("dlrover", "job", "logs", "job").stdout
    assert "JobStopped" in place.call("dlrover", "job", "events").stdout
    nothing = place.call("dlrover", "job", "scale", "2")
    assert (nothing.returncode, "no job runs" in nothing.stderr) == (2, True)


def test_what_the_script_prints_is_shown_while_it_runs_and_at_the_end(place: Place) -> None:
    script = """
        import os, pathlib, threading
        from dlrover_py.trainer import session
        rank = os.environ["RANK"]
        session.report_step(7, 7)
        print("hello from", rank, flush=True)
        while not pathlib.Path("go").exists():
            threading.Event().wait(0.02)
        print("bye from", rank, flush=True)
    """
    for flags, expected in (
        ((), {"n0 rank 0": ["hello from 0", "bye from 0"]}),
        (
            ("--logs", "all"),
            {f"n{r} rank {r}": [f"hello from {r}", f"bye from {r}"] for r in (0, 1)},
        ),
    ):
        place.script(script)
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
        assert "at step 7/7: all workers exited 0" in text
        assert "last line of rank 0: bye from 0" in text


def test_keys_are_in_snake_case_but_for_the_object_of_kubernetes(place: Place) -> None:
    def keys(found: object) -> set[str]:
        if isinstance(found, dict):
            return set(found).union(*(keys(v) for k, v in found.items() if k != "job"))
        return set().union(*map(keys, found)) if isinstance(found, list) else set()

    with job(place, script=STEPPER, replicas=1) as run:
        run.until(lambda s: s.progress is not None, "a step")
        told = {verb: run.cli("job", verb, "--json") for verb in ("list", "get", "describe", "why")}
        told |= {"events": run.cli("job", "events", "--json")}
        object_of_kubernetes = json.loads(told["describe"])["job"]
        assert "replicaSpecs" in object_of_kubernetes["spec"]
        run.stop()
        told |= {
            "ended": run.cli("job", "describe", "--json"),
            "run": "".join(
                line
                for line in run.output
                if not line.startswith("dlrover: ")  # standard error
            ),
        }
    for verb, text in told.items():
        found = set().union(*(keys(json.loads(line)) for line in text.splitlines()))
        assert len(found) > 5, verb
        assert {key for key in found if key != key.lower()} == set(), verb
    assert "started_at" in keys(json.loads(told["describe"]))


def test_past_runs_are_removed_and_one_that_goes_on_is_not(place: Place) -> None:
    state = place.folder / "state"
    with job(place, script="print('x')", replicas=1) as run:
        assert run.wait() == 0
    with job(place, replicas=1) as run:
        run.running(1)
        assert len(list(state.iterdir())) == 2
        for argv, words in (
            (("rm",), "say which runs"),
            (("rm", "--older-than", "1x"), "expected a time such as 12h"),
            (("rm", "other"), "no run of other has ended"),
            (("rm", "--all"), "nobody to be asked"),
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
    script = """
        import os, pathlib, threading
        print("hello from", os.environ["RANK"], flush=True)
        while not pathlib.Path("go").exists():
            threading.Event().wait(0.02)
        print("bye from", os.environ["RANK"], flush=True)
    """
    with job(place, script=script, replicas=2) as run:
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
