"""elastic-run in the place of torchrun: the same command line, the same results, side by side."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from dlrover_py.checkpoint.directory import LEASE_FILE, CheckpointDirectory, DirectoryOwner
from tests.process.harness import Place, alive, carrying, document, eventually, free_port
from tests.programs import PROGRAMS

pytestmark = pytest.mark.process

BOTH = ("torchrun", "elastic-run")


def results(folder: Path) -> dict[str, object]:
    return {p.name: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}


def tree(folder: Path) -> dict[str, str]:
    """Files below the folder of the run, which has a random name, and what they hold."""
    (run,) = folder.iterdir()
    found = {}
    for path in sorted(run.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(run))] = path.read_text()
    return found


CASES = {
    "plain": [],
    "redirect all": ["-r", "3", "--log-dir", "logs"],
    "tee all": ["--tee=3", "--log-dir=logs"],
    "by rank": ["-r", "0:1,1:2", "-t", "1:1", "--log_dir", "logs"],
    "filter ranks": ["-t", "1", "-r", "0:2", "--local-ranks-filter", "1", "--log-dir", "logs"],
    "filter words": [
        *("-t3", "--log-dir", "logs", "--duplicate-stderr-filters", "apple,x"),
        *("--duplicate-stdout-filters", "out 1"),
    ],
    "no logs": ["--log-dir", "/dev/null", "-t3", "--local-ranks-filter", "1"],
    "roles": ["--role", "trainer", "-t", "1", "--log-dir", "logs"],
    "virtual": ["--virtual-local-rank", "--signals-to-handle", "SIGTERM,SIGUSR1"],
    "run path": ["--run-path"],
}
NEWEST = tuple(map(int, version("torch").split(".")[:2])) >= (2, 15)
"""Whether torchrun has the flag of the prefix, and HIP_VISIBLE_DEVICES."""
if NEWEST:
    template = "--log-line-prefix-template=${hostname}:${rank} "
    CASES["prefix"] = ["--tee=3", "--log-dir=logs", template]


@pytest.mark.parametrize("case", list(CASES))
def test_output_and_environment_are_torchruns(place: Place, case: str) -> None:
    script = place.script(PROGRAMS / "report_launch.py")
    found = {}
    for program in BOTH:
        folder = place.folder / program
        folder.mkdir()
        argv = CASES[case]
        env = {"RESULTS": str(folder), "CUDA_VISIBLE_DEVICES": "3,5"}
        if NEWEST:
            env["HIP_VISIBLE_DEVICES"] = "7,9"
        if case == "roles":
            env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "<${role_name}/${rank}/${local_rank}>"
        done = place.call(
            *(program, *argv, "--nproc-per-node=2", str(script), "a b"),
            *("${local_rank}", "x$local_rank", "$$", "$other", "$"),
            env=env,
        )
        assert done.returncode == 0, done.stderr
        logs = place.folder / "logs"
        files = tree(logs) if logs.is_dir() else {}
        if logs.is_dir():
            logs.rename(folder / "logs")
        seen = results(folder)
        for name, one in seen.items():
            assert isinstance(one, dict), name
            run_id = one.pop("TORCHELASTIC_RUN_ID")
            assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run_id)
        ours = [x for x in done.stderr.splitlines() if re.match(r"^(\[|<)?.*err \d", x)]
        found[program] = seen, files, sorted(done.stdout.splitlines()), sorted(ours)
    theirs, mine = found["torchrun"], found["elastic-run"]
    assert mine[0] == theirs[0]
    assert {k: sorted(v.splitlines()) for k, v in mine[1].items()} == {
        k: sorted(v.splitlines()) for k, v in theirs[1].items()
    }
    assert mine[2] == theirs[2]
    assert mine[3] == theirs[3]


def box(text: str, script: Path) -> str:
    """torchrun's failure summary, without what varies."""
    start = text.index(f"{script} FAILED")
    lines = text[start : text.rindex("=" * 50)].splitlines()
    lines = [" ".join(x.split()) for x in lines if not x.startswith(("  time", "  host", "==="))]
    kept = "\n".join(x for x in lines if x)
    kept = re.sub(r"-{4,}", "----", kept)  # as long as the longest line, and some pids are longer
    return re.sub(r"/\S*/attempt", "attempt", re.sub(r"(pid:|PID) \d+", "pid", kept))


def test_failure_is_told_as_torchrun_tells_it(place: Place) -> None:
    script = place.script(PROGRAMS / "fail_under_record.py")
    os.mkfifo(place.folder / "over")
    boxes, told = {}, {}
    for program in BOTH:
        file, logs = place.folder / f"{program}.json", place.folder / f"logs-{program}"
        done = place.call(
            *(program, "--nproc-per-node=2", "--log-dir", str(logs), str(script)),
            env={"TORCHELASTIC_ERROR_FILE": str(file)},
        )
        assert done.returncode == 1
        boxes[program] = box(done.stderr, script)
        told[program] = json.loads(file.read_text())["message"]
        assert [p.name for p in logs.rglob("error.json")] == ["error.json"]
    assert boxes["elastic-run"] == boxes["torchrun"]
    for message in told.values():
        assert message["message"] == "ValueError: nobody expects this"
        assert message["errorCode"] == 1
        assert "nobody expects this" in message["extraInfo"]["py_callstack"]


def test_killed_worker_is_told_as_torchrun_tells_it(place: Place) -> None:
    script = place.script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    boxes = {}
    for program in BOTH:
        done = place.call(program, str(script))
        assert done.returncode == 1
        boxes[program] = box(done.stderr, script)
    assert boxes["elastic-run"] == boxes["torchrun"]
    assert "exitcode : -11 (pid) (SIGSEGV)" in boxes["torchrun"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_restart_is_one_line(place: Place, terminal: bool) -> None:
    place.script(PROGRAMS / "kill_itself_once.py")
    ours, theirs = pty.openpty() if terminal else os.pipe()
    argv = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "train.py")
    process = place.popen("elastic-run", *argv, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while part := os.read(ours, 4096):
            said += part
    os.close(ours)
    assert process.wait() == 0
    lines = said.decode().splitlines()
    if terminal:
        (line,) = lines
        start = "elastic-run: worker 1 was killed by SIGKILL: restart 1 of 1, "
        assert re.fullmatch(
            re.escape(start) + r"(next step|workers run again) after \d+\.\d s", line
        )
    else:
        events = [json.loads(line) for line in lines]
        assert [e["event"] for e in events] == ["WorkerFailed", "restarted"]
        assert events[1]["after_s"] > 0


HANDLER = PROGRAMS / "handle_signals.py"


@pytest.mark.parametrize("program", BOTH)
def test_signals_that_are_named_are_passed_on(place: Place, program: str) -> None:
    script = place.script(HANDLER)
    argv = [program, "--signals-to-handle=SIGUSR1,SIGTERM", str(script)]
    run = place.popen(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGUSR1)
    run.communicate(timeout=60)
    assert run.returncode == 1
    assert (place.folder / "told-0").read_text() == "SIGUSR1"


def test_a_signal_to_all_processes_of_a_batch_job_is_left_to_the_workers(place: Place) -> None:
    argv = ("elastic-run", "--standalone", str(place.script(HANDLER)))
    run = place.popen(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    agent = psutil.Process(run.pid)
    for process in (agent, *agent.children(recursive=True)):
        process.send_signal(signal.SIGUSR1)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 0, errors
    assert (place.folder / "told-0").read_text() == "SIGUSR1"
    assert json.loads(errors.splitlines()[0])["event"] == "signal_ignored"


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_shutdown_timeout_ends_who_does_not_listen(place: Place, how: str) -> None:
    script = place.script(HANDLER)
    argv = ["--shutdown-timeout=5"] if how == "flag" else []
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"} if how == "environment" else {}
    run = place.popen("elastic-run", *argv, str(script), "deaf", stdout=subprocess.PIPE, env=env)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.terminate()
    run.communicate(timeout=25)  # less than the 30 s of the default
    assert run.returncode == 1
    assert (place.folder / "told-0").read_text() == "SIGTERM"


def test_events_reach_a_handler_as_torchruns(place: Place) -> None:
    script = place.script("import os; assert os.environ['RANK'] == '0' or 1")
    kept = {}
    for program in BOTH:
        done = place.call(program, "--event-log-handler=console", str(script))
        assert done.returncode == 0, done.stderr
        events = [json.loads(x) for x in done.stderr.splitlines() if x.startswith('{"name"')]
        kept[program] = events
    names = [e["name"].rpartition(".")[2] for e in kept["elastic-run"]]
    theirs = [e["name"].rpartition(".")[2] for e in kept["torchrun"]]
    assert names == [n for n in theirs if n != "ASSIGN_WORKER_RANKS"]
    for mine, their in zip(kept["elastic-run"], kept["torchrun"], strict=False):
        assert set(mine["metadata"]) == set(their["metadata"])


class Group:
    """Several agents that were started as torchrun's documentation says."""

    program = "elastic-run"
    patience_s = 90.0

    def __init__(self, place: Place) -> None:
        self.place = place
        self.runs: list[subprocess.Popen[str]] = []
        self.lines: list[list[str]] = []
        self.port = free_port()
        self._readers: list[threading.Thread] = []

    def start(self, *argv: str, **env: str) -> int:
        return self.run(self.program, *argv, **env)

    def run(self, *argv: str, **env: str) -> int:
        run = self.place.popen(*argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        lines: list[str] = []
        reader = threading.Thread(target=self._read, args=(run, lines), daemon=True)
        reader.start()
        self.runs.append(run)
        self.lines.append(lines)
        self._readers.append(reader)
        return len(self.runs) - 1

    def _read(self, run: "subprocess.Popen[str]", lines: list[str]) -> None:
        assert run.stdout is not None
        lines.extend(iter(run.stdout.readline, ""))

    def said(self, which: int, pattern: str) -> re.Match[str]:
        """Wait for a line."""

        def look() -> re.Match[str] | None:
            found = [m for x in list(self.lines[which]) if (m := re.search(pattern, x))]
            return found[-1] if found else None

        try:
            found = eventually(look, pattern, within_s=self.patience_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.lines}") from error
        assert found is not None
        return found

    def wait(self, which: int) -> int:
        code = self.runs[which].wait(timeout=2 * self.patience_s)
        self._readers[which].join(timeout=10)
        return code

    def close(self) -> None:
        """End those that still run."""
        for run, reader in zip(self.runs, self._readers, strict=True):
            if run.poll() is None:
                run.kill()
            run.wait()
            reader.join(timeout=10)
            assert run.stdout is not None
            run.stdout.close()


@pytest.fixture
def group(place: Place) -> Iterator[Group]:
    group = Group(place)
    yield group
    group.close()


PLACE = PROGRAMS / "say_place.py"


def test_node_rank_0_on_another_machine_than_the_endpoint_is_warned_of(group: Group) -> None:
    """In a Slurm script, "srun elastic-run --node-rank=$SLURM_NODEID" is 0 on all nodes."""
    script = str(group.place.script("print()"))
    flags = ["--nnodes=2", "--node-rank=0", "--master-addr=192.0.2.1", "--rdzv-id=7"]
    flags += [f"--master-port={group.port}", "--rdzv-conf=join_timeout=1", script]
    done = group.place.call("elastic-run", *flags)
    assert done.returncode == 1
    assert '"endpoint_elsewhere"' in done.stderr
    assert "1 of at least 2 nodes is ready, after 1 s" in done.stderr


def test_static_rendezvous(group: Group) -> None:
    script = str(group.place.script(PLACE))
    (group.place.folder / "go").touch()
    common = ["--nnodes=3", "--master-addr=127.0.0.1", f"--master-port={group.port}"]
    common += ["--nproc-per-node=2", "--rdzv-id=7", script]
    for rank in (2, 0, 1):  # in any order
        group.start(f"--node-rank={rank}", *common)
    for which, rank in enumerate((2, 0, 1)):
        assert group.wait(which) == 0, group.lines
        first = 2 * rank
        said = sorted(x for x in group.lines[which] if x.startswith("place"))
        assert said == [
            f"place {r} of 6 node {rank} role {r} of 6 id 7\n" for r in (first, first + 1)
        ]


def test_elastic_rendezvous_grows_and_shrinks(group: Group) -> None:
    script = str(group.place.script(PLACE))
    common = ["--nnodes=1:3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"]
    common += ["--rdzv-id=x", "--rdzv-conf=last_call_timeout=1", "--max-restarts=1", script]
    host = group.start(*common)
    group.said(host, "place 0 of 1 node 0")
    others = [group.start(*common), group.start(*common)]
    ranks = {int(group.said(i, r"place (\d) of 3")[1]) for i in (host, *others)}
    assert ranks == {0, 1, 2}
    group.runs[others[0]].kill()
    assert {int(group.said(i, r"place (\d) of 2")[1]) for i in (host, others[1])} == {0, 1}
    (group.place.folder / "go").touch()
    assert [group.wait(i) for i in (host, others[1])] == [0, 0], group.lines


def test_the_same_command_once_more_goes_on_and_is_stored(group: Group) -> None:
    """Its rounds begin anew: what the first run has stored is of later ones."""
    script = str(group.place.script(PROGRAMS / "save_two_steps.py"))
    common = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"]
    common += ["--max-restarts=1", script]
    for last in (3, 5):
        nodes = [group.start(*common) for _ in range(2)]
        assert [group.wait(node) for node in nodes] == [0, 0], group.lines
        for node in nodes:
            group.said(node, rf"rank \d: {last} True \[{last}.0, ")
        stored = [m.step for m in CheckpointDirectory(group.place.folder / "store").checkpoints()]
        assert max(stored) == last, group.lines


def test_roles_are_counted_on_their_own(group: Group) -> None:
    script = str(group.place.script(PLACE))
    (group.place.folder / "go").touch()
    common = ["--nnodes=3", f"--rdzv-endpoint=127.0.0.1:{group.port}", script]
    roles = ("actor", "learner", "actor")
    for rank, role in enumerate(roles):
        group.start(f"--node-rank={rank}", f"--role={role}", *common)
    assert [group.wait(i) for i in range(3)] == [0, 0, 0], group.lines
    found = [group.said(i, r"role (\d) of (\d)").groups() for i in range(3)]
    assert found == [("0", "2"), ("0", "1"), ("1", "2")]


def test_another_job_at_the_endpoint_is_refused(group: Group) -> None:
    script = str(group.place.script(PLACE))
    common = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"]
    common += ["--rdzv-conf=last_call_timeout=1"]
    host = group.start(*common, "--rdzv-id=a", script)
    eventually(lambda: group.runs[host].poll() is None and listens(group.port), "the endpoint")
    other = group.start(*common, "--rdzv-id=b", script)
    assert group.wait(other) == 1
    said = "".join(group.lines[other])
    assert "runs another job: expected --rdzv-id=b" in said
    assert "a port of its own for each job in --rdzv-endpoint" in said


def test_a_node_with_another_number_of_nodes_is_warned(group: Group) -> None:
    """The numbers of the endpoint's node decide; the other node would wait for a third in vain."""
    script = str(group.place.script(PLACE))
    (group.place.folder / "go").touch()
    at = f"--rdzv-endpoint=localhost:{group.port}"
    common = ["--rdzv-backend=c10d", at, "--rdzv-conf=last_call_timeout=1"]
    host = group.start("--nnodes=2", *common, script)
    eventually(lambda: group.runs[host].poll() is None and listens(group.port), "the endpoint")
    other = group.start("--nnodes=3", *common, script)
    assert [group.wait(host), group.wait(other)] == [0, 0], group.lines
    words = f"it is 3:3 here, and 2:2 at localhost:{group.port}, which decides: use one value"
    found = ["".join(group.lines[node]).count(words) for node in (host, other)]
    assert found == [0, 1], group.lines


SECRET = "a secret of all nodes of this job"


def test_a_program_that_took_the_endpoint_does_not_get_the_secret(group: Group) -> None:
    script = str(group.place.script(PLACE))
    (group.place.folder / "secret").touch(mode=0o600)
    (group.place.folder / "secret").write_text(SECRET)
    common = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"]
    common += ["--rdzv-id=a", script]
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", group.port)) as taken:
        taken.settimeout(group.patience_s)
        deceived = group.start(*common, DLROVER_TOKEN_FILE="secret")
        for answer in (b"", b'HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"me"'):
            with taken.accept()[0] as connection:
                got.append(connection.recv(65536))
                connection.sendall(answer)
    assert group.wait(deceived) == 1
    assert f"the program at localhost:{group.port} is no master of" in "".join(
        group.lines[deceived]
    )
    assert SECRET.encode() not in b"".join(got)
    assert b"authorization" not in b"".join(got).lower()


def test_two_nodes_with_a_secret(group: Group) -> None:
    script = str(group.place.script(PLACE))
    (group.place.folder / "secret").touch(mode=0o600)
    (group.place.folder / "secret").write_text(SECRET)
    common = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"]
    (group.place.folder / "go").touch()
    both = [group.start(*common, script, DLROVER_TOKEN_FILE="secret") for _ in range(2)]
    assert [group.wait(i) for i in both] == [0, 0], group.lines


def listens(port: int) -> bool:
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [row.split() for t in tables for row in t.read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def test_torchruns_agent_at_the_endpoint_is_no_master(group: Group) -> None:
    script = str(group.place.script(PLACE))
    at = f"--rdzv-endpoint=localhost:{group.port}"
    theirs = group.place.popen(
        *("torchrun", "--nnodes=2", "--rdzv-backend=c10d", at, "--rdzv-id=a", script),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: listens(group.port), "torchrun's store")
        conf = "--rdzv-conf=read_timeout=2"
        ours = group.start("--nnodes=2", "--rdzv-backend=c10d", at, conf, "--rdzv-id=a", script)
        assert group.wait(ours) == 1
        assert "torchrun's agents cannot join its job" in "".join(group.lines[ours])
    finally:
        theirs.kill()
        theirs.wait()


def test_too_few_nodes_for_too_long(group: Group) -> None:
    script = str(group.place.script(PLACE))
    only = group.start(
        *("--nnodes=2:3", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"),
        *("--rdzv-conf=join_timeout=5", script),
    )
    assert group.wait(only) == 1
    assert "1 of at least 2 nodes is ready, after 5 s" in "".join(group.lines[only])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["told", "killed"])
def test_end_of_the_endpoints_node_ends_the_others(group: Group, number: int) -> None:
    script = str(group.place.script(PLACE))
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{group.port}", script]
    host, other = (group.start(f"--node-rank={rank}", *common) for rank in (0, 1))
    group.said(other, "place 1 of 2")
    worker = worker_of(group.runs[other].pid)
    os.kill(group.runs[host].pid, number)
    assert group.wait(other) == 1
    assert "the node that runs the job's master has ended" in "".join(group.lines[other])
    assert not alive(worker)


def worker_of(agent: int) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == agent and "train.py" in (entry / "cmdline").read_text():
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError("no worker")


def test_workers_run_where_they_are_bound_to_cold_and_forked(group: Group) -> None:
    """The binding itself needs GPUs; what follows from one does not."""
    group.place.script(PROGRAMS / "say_cpus.py", "worker.py")
    script = group.place.script(PROGRAMS / "agent_with_bound_workers.py", "agent.py")
    mine = sorted(os.sched_getaffinity(0))
    cpus = [mine[:1], mine[-1:]]
    group.run("python", str(script), json.dumps(cpus))
    group.said(0, "zygote_ready")
    (group.place.folder / "die").touch()
    assert group.wait(0) == 0
    for how in ("cold", "forked"):
        for rank in range(2):
            assert group.said(0, rf"^{how} {rank} (.*)$")[1] == str(cpus[rank])


def test_logs_specs_of_others_decide_as_under_torchrun(place: Place) -> None:
    place.script(PROGRAMS / "flat_logs_specs.py", "flat.py")
    info = place.folder / "flat-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nflat = flat:Flat\n")
    script = place.script("""
        import os
        print("out", os.environ["RANK"], os.environ["TORCHELASTIC_ERROR_FILE"])
        assert int(os.environ["BLOCKED"], 16) == 0, "a child of the plug-in blocks no signal"
        assert os.environ["FROM_SPECS"] == os.environ["TORCHELASTIC_RUN_ID"]
    """)
    found, logs = {}, place.folder / "logs"
    for program in BOTH:
        flags = ["--logs-specs=flat", f"--log-dir={logs}", "-t0:1", "--nproc-per-node=2"]
        done = place.call(program, *flags, str(script), env={"PYTHONPATH": str(place.folder)})
        assert done.returncode == 0, done.stderr
        found[program] = done.stdout, {p.name: p.read_text() for p in logs.glob("out-*")}
        logs.rename(place.folder / program)
    assert found["elastic-run"] == found["torchrun"]
    assert found["torchrun"] == (
        f"[default0]:out 0 {logs}/e0\n",
        {"out-0": f"out 0 {logs}/e0\n", "out-1": f"out 1 {logs}/e1\n"},
    )


def test_two_jobs_one_after_the_other_at_one_endpoint(group: Group) -> None:
    script = str(group.place.script(PLACE))
    (group.place.folder / "go").touch()
    common = ["--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{group.port}", script]
    host = group.start("--node-rank=0", *common)
    first = group.start("--node-rank=1", *common)
    assert group.wait(first) == 0
    second = group.start("--node-rank=1", *common)  # the first job's master may still be there
    assert group.wait(host) == 0
    next_host = group.start("--node-rank=0", *common)
    assert [group.wait(second), group.wait(next_host)] == [0, 0], group.lines
    assert group.said(second, "place 1 of 2")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_who_waits_for_the_endpoints_name(group: Group, number: int) -> None:
    script = str(group.place.script(PLACE))
    waits = group.start("--nnodes=2", "--node-rank=1", "--master-addr=no.such.host.invalid", script)
    pid = group.runs[waits].pid
    blocked = f"{1 << (signal.SIGTERM - 1):016x}"[-4:]

    def masked() -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        mask = int(next(x for x in status.splitlines() if x.startswith("SigBlk")).split()[1], 16)
        # While a process waits for blocked signals, the kernel shows them as not blocked.
        waiting = "sigtimedwait" in Path(f"/proc/{pid}/wchan").read_text()
        return waiting or bool(mask & int(blocked, 16))

    eventually(masked, "it handles signals")
    group.runs[waits].send_signal(number)
    assert group.wait(waits) == 1
    name = signal.Signals(number).name
    assert group.lines[waits] == [f"elastic-run: the agent received {name}\n"]


def test_second_signal_does_not_take_the_last_words(place: Place) -> None:
    script = place.script(HANDLER)
    run = place.popen("elastic-run", str(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    for _ in range(20):
        run.send_signal(signal.SIGINT)
        try:
            run.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    _, err = run.communicate(timeout=20)
    assert (run.returncode, err) == (1, "elastic-run: the agent received SIGINT\n")


def test_a_killed_agent_leaves_no_folder(place: Place) -> None:
    script = place.script(HANDLER)
    run = place.popen("elastic-run", str(script), stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    mine = [f"/tmp/dlrover-{run.pid}-", f"/tmp/dlrover-run-{run.pid}-"]

    def left() -> list[Path]:
        return [p for p in Path("/tmp").iterdir() if str(p).startswith(tuple(mine))]

    assert len(left()) == 2
    run.kill()
    run.communicate(timeout=20)
    eventually(lambda: not left(), "its folders are gone")


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, its reaper too."""
    root = psutil.Process(pid)
    return [pid, *(child.pid for child in root.children(recursive=True))]


def kill_at_once(pids: list[int]) -> None:
    """Kill processes so that none can act on the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def test_folders_of_a_tree_that_was_killed_are_removed_by_the_next_run(place: Place) -> None:
    """As by ``kill -9 -1``, or by a batch system: neither the reaper nor the master was left."""
    temporary, memory = place.folder / "tmp", place.folder / "shm"
    temporary.mkdir()
    memory.mkdir()
    env = {"TMPDIR": str(temporary), "DLROVER_SHM_DIR": str(memory)}
    script = place.script(HANDLER)
    run = place.popen("elastic-run", str(script), stdout=subprocess.PIPE, env=env)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    kill_at_once(descendants(run.pid))
    run.communicate(timeout=20)
    left = list(temporary.glob("dlrover-*"))
    assert len(left) == 2, left
    place.script("print('trained')")
    again = place.call("elastic-run", "train.py", env=env)
    assert (again.stdout, len(list(temporary.iterdir()))) == ("trained\n", 2), "too young"
    for folder in left:
        os.utime(folder, (1.0, 1.0))
    assert place.call("elastic-run", "train.py", env=env).stdout == "trained\n"
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_standalone_ignores_the_job_around_it(place: Place, how: str) -> None:
    """Here one on Kubernetes whose master is not there."""
    place.script("import os; print(os.environ['WORLD_SIZE'])")
    env = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{free_port()}", "DLROVER_NODE_ID": "n7"}
    env |= {"DLROVER_TOKEN_FILE": "token", "DLROVER_CA_FILE": "ca.crt", "POD_IP": "192.0.2.1"}
    env |= {"ELASTIC_JOB_NAME": "other", "JOB_UID": "u", "DLROVER_LOG_DIR": "logs"}
    env |= {"DLROVER_CHECKPOINT": "{", "DLROVER_SHM_POOL": "no-pool"}
    env |= {"DLROVER_AGENT_SOCKET": "no-socket", "DLROVER_ROUND": "9"}
    env |= {"PET_STANDALONE": "1"} if how == "environment" else {}
    flags = ["--standalone"] if how == "flag" else []
    done = place.call("elastic-run", *flags, "train.py", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_standalone_works_in_a_node_and_in_a_worker_of_a_job(place: Place) -> None:
    """To prepare on each node, and to evaluate. Its master refused the address of the job's."""
    place.script(PROGRAMS / "evaluate_alone.py")
    line = "elastic-run --standalone train.py prepare && elastic-run train.py train"
    job = document(["bash", "-c", line], replicas=2)
    (place.folder / "job.yaml").write_text(json.dumps(job))
    done = place.call("dlrover", "job", "run", "job.yaml", "--plain")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "standalone" not in done.stderr
    said = {path.name: path.read_text() for path in place.folder.glob("said-*")}
    assert {name: size for name, size in said.items() if "train" not in name} == {
        **{f"said-prepare-n{node}-0": "1" for node in range(2)},
        **{f"said-evaluate-n{node}-{rank}": "2" for node in range(2) for rank in range(2)},
    }
    assert sorted(name[-1] for name in said if "train" in name) == ["0", "1"]
    assert {size for name, size in said.items() if "train" in name} == {"2"}


@pytest.mark.parametrize("program", ["elastic-run", "python"])
def test_nothing_of_dlrovers_is_imported_from_the_working_directory(
    place: Place, program: str
) -> None:
    """It may be /tmp. Any user could put a module there, which would run as this user."""
    script = place.script(PROGRAMS / "save_once.py")
    here = place.folder / "here"
    here.mkdir()
    for name in (*sys.stdlib_module_names, "dlrover_py", "numpy", "pydantic", "torch", "yaml"):
        (here / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    done = place.call(program, str(script), cwd=here)
    assert (done.returncode, "working directory" in done.stderr) == (0, False), done.stderr
    assert done.stdout == "True\n"


def test_a_signal_to_the_own_master_alone_does_not_end_the_job(place: Place) -> None:
    script = place.script(PROGRAMS / "wait_for_go.py")
    run = place.popen("elastic-run", "--max-restarts=1", str(script))
    worker = place.folder / "pid0"
    eventually(worker.exists, "a worker")
    (master,) = [pid for pid, line in carrying(place.mark).items() if "dlrover_py.master" in line]
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(master, number)
    os.kill(int(worker.read_text()), signal.SIGKILL)  # it takes the master to form another round
    eventually(lambda: (place.folder / "runs").read_text() == "xx", "another round")
    (place.folder / "go").touch()
    assert run.wait(60) == 0


@pytest.mark.parametrize("name", ["USR1", "HUP", "TERM"])
def test_a_signal_to_all_processes_of_a_batch_job_stores_the_newest_step(
    place: Place, name: str
) -> None:
    """As ``sbatch --signal=USR1@120`` sends it: the own master and the store must outlive it."""
    script = place.script(PROGRAMS / "save_until_stopped.py")
    flags = ("--standalone", "--nproc-per-node=2", f"--signals-to-handle=SIGTERM,SIG{name}")
    run = place.popen("elastic-run", *flags, str(script), stdout=subprocess.PIPE)
    assert run.stdout is not None
    for line in run.stdout:
        if line == "step 8\n":
            break
    everybody = [pid for pid in carrying(place.mark) if pid != run.pid]
    for pid in [*everybody, run.pid]:
        os.kill(pid, getattr(signal, f"SIG{name}"))
    out, _ = run.communicate(timeout=120)
    assert len(everybody) >= 4, "master, store and two workers at least"
    steps = [int(line.split()[1]) for line in out.splitlines() if line.startswith("step")]
    stored = CheckpointDirectory(place.folder / "store").checkpoints()
    # A step is complete in memory once the next one has begun on both ranks.
    complete = max([7, *(step for step in set(steps) if steps.count(step) == 2)]) - 1
    assert stored, out
    assert stored[-1].step >= complete, out


@pytest.mark.parametrize("grace_s", ["60", "0.01"], ids=["waited", "told"])
def test_a_signal_before_anything_can_be_stored(place: Place, grace_s: str) -> None:
    """The process that writes to storage begins at the first save, and takes tenths of a second."""
    script = place.script(PROGRAMS / "save_until_stopped.py")
    run = place.popen(
        *("elastic-run", "--standalone", str(script)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"DLROVER_MASTER_DRAIN_GRACE_S": grace_s},
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "step 1\n"
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=150)
    stored = CheckpointDirectory(place.folder / "store").checkpoints()
    assert bool(stored) is (grace_s == "60"), err
    assert ("checkpoint_not_stored" in err) is (grace_s != "60"), err


def test_a_run_waits_for_the_lease_that_another_left_and_leaves_none(place: Place) -> None:
    """A requeued job waited as long as its grace for the lease of the run before, and lost all."""
    script = place.script(PROGRAMS / "save_until_stopped.py")
    folder = place.folder / "store"
    folder.mkdir()
    before = CheckpointDirectory(folder)
    before.acquire_lease(DirectoryOwner("1" * 16), "a1", shared=True)
    before.release()
    assert (folder / LEASE_FILE).exists(), "others of its job might still write"
    run = place.popen(
        *("elastic-run", "--standalone", str(script)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "step 1\n"
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=150)
    assert CheckpointDirectory(folder).checkpoints(), err
    assert not (folder / LEASE_FILE).exists(), "the next run waits for nothing"


def test_the_id_of_an_endpoints_job_is_in_no_file_beside_its_checkpoints(place: Place) -> None:
    """It is the job's secret, and others may read the folder."""
    place.script("""
        import torch
        from dlrover_py.trainer import Checkpointer
        with Checkpointer("store", every=1, persist_every=1) as checkpointer:
            checkpointer.save(1, {"w": torch.zeros(3)})
    """)
    common = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    done = place.call("elastic-run", *common, "--rdzv-id=tell-nobody", "train.py")
    assert done.returncode == 0, done.stderr
    files = [path for path in (place.folder / "store").rglob("*") if path.is_file()]
    assert ".metadata" in [path.name for path in files]
    assert [path for path in files if b"tell-nobody" in path.read_bytes()] == []


def test_an_agent_of_an_earlier_run_does_not_join_the_next_one(group: Group) -> None:
    """A node that hung while its job was requeued comes back with the old command line."""
    script = str(group.place.script(PLACE))
    common = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"]
    common += ["--rdzv-id=x", "--rdzv-conf=last_call_timeout=1", script]
    host = group.start(*common)
    group.said(host, r"place 0 of 1")  # it has the master then
    guest = group.start(*common)
    group.said(guest, r"place 1 of 2")
    group.runs[guest].send_signal(signal.SIGSTOP)
    kill_at_once(descendants(group.runs[host].pid))  # as a power cut: its master tells nobody
    group.wait(host)
    again = group.start(*common, "another argument")
    group.said(again, r"place 0 of 1")
    group.runs[guest].send_signal(signal.SIGCONT)
    assert group.wait(guest) == 1
    group.said(guest, "this agent belongs to an earlier run of the job")
    (group.place.folder / "go").touch()
    assert group.wait(again) == 0
    assert not any("of 2" in line for line in group.lines[again])


def test_a_node_that_was_never_needed_says_so(group: Group) -> None:
    """Two tasks on a node, or two runs with one id, would otherwise end as if they had trained."""
    script = str(group.place.script(PLACE))
    common = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}", "--rdzv-id=x"]
    host = group.start("--nnodes=1", *common, script)
    group.said(host, "place 0 of 1")
    surplus = group.start("--nnodes=1", *common, script, DLROVER_LOG_LEVEL="INFO")
    group.said(surplus, "recipe_learned")  # from the master, so it stands by
    (group.place.folder / "go").touch()
    assert [group.wait(host), group.wait(surplus)] == [0, 0]
    group.said(surplus, "node_not_needed.*its script was never started")
    assert not any("node_not_needed" in line for line in group.lines[host])
