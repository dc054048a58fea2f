"""elastic-run in the place of torchrun: the same command line, the same results, side by side."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_py.storage import Store
from tests.process.harness import Place, alive, eventually, free_port

pytestmark = pytest.mark.process

BOTH = ("torchrun", "elastic-run")
WORKER = """
    import json, os, pathlib, sys
    rank = os.environ["RANK"]
    os.write(1, f"out {rank}\\n\\nout again\\n".encode())  # in one piece: others write too
    os.write(2, f"err {rank} apple\\n".encode())
    os.write(2, f"err {rank} pear\\n".encode())
    names = ("RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
        "ROLE_NAME ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS "
        "TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_SIGNALS_TO_HANDLE "
        "OMP_NUM_THREADS CUDA_VISIBLE_DEVICES TORCH_NCCL_ASYNC_ERROR_HANDLING PET_ROLE").split()
    seen = {n: os.environ.get(n) for n in names} | {"argv": sys.argv[1:]}
    seen["error_file"] = pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).name
    where = pathlib.Path(os.environ["RESULTS"])
    (where / f"{rank}.json").write_text(json.dumps(seen))
"""


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


@pytest.mark.parametrize("case", list(CASES))
def test_output_and_environment_are_torchruns(place: Place, case: str) -> None:
    script = place.script(WORKER)
    found = {}
    for program in BOTH:
        folder = place.folder / program
        folder.mkdir()
        argv = CASES[case]
        env = {"RESULTS": str(folder), "CUDA_VISIBLE_DEVICES": "3,5"}
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


RECORDED = """
    import os, sys
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main():
        # Rank 1 fails once rank 0 has ended: who is killed in its imports is told or not, by luck.
        if os.environ["RANK"] == "1":
            open("over").read()
            raise ValueError("nobody expects this")
        os.open("over", os.O_WRONLY)  # open until the process ends

    main()
"""


def box(text: str, script: Path) -> str:
    """torchrun's failure summary, without what varies."""
    start = text.index(f"{script} FAILED")
    lines = text[start : text.rindex("=" * 50)].splitlines()
    lines = [" ".join(x.split()) for x in lines if not x.startswith(("  time", "  host", "==="))]
    kept = "\n".join(x for x in lines if x)
    kept = re.sub(r"-{4,}", "----", kept)  # as long as the longest line, and some pids are longer
    return re.sub(r"/\S*/attempt", "attempt", re.sub(r"(pid:|PID) \d+", "pid", kept))


def test_failure_is_told_as_torchrun_tells_it(place: Place) -> None:
    script = place.script(RECORDED)
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
    place.script(
        """
        import os, signal
        from dlrover_py.trainer import session
        session.report_step(session.restart_count() + 1)
        if os.environ["RANK"] == "1" and not session.restart_count():
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
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


POLITE = """
    import os, pathlib, signal, sys
    def told(number, frame):
        pathlib.Path(f"told-{os.environ['RANK']}").write_text(signal.Signals(number).name)
        if len(sys.argv) == 1:
            sys.exit(0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, told)
    print("ready", flush=True)
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("program", BOTH)
def test_signals_that_are_named_are_passed_on(place: Place, program: str) -> None:
    script = place.script(POLITE)
    argv = [program, "--signals-to-handle=SIGUSR1,SIGTERM", str(script)]
    run = place.popen(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == "ready\n"
    run.send_signal(signal.SIGUSR1)
    run.communicate(timeout=60)
    assert run.returncode == 1
    assert (place.folder / "told-0").read_text() == "SIGUSR1"


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_shutdown_timeout_ends_who_does_not_listen(place: Place, how: str) -> None:
    script = place.script(POLITE)
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


PLACE = """
    import os, pathlib, signal
    e = os.environ
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
    line = "place {} of {} node {} role {} of {}".format(*(e[n] for n in names))
    os.write(1, f"{line} id {e['TORCHELASTIC_RUN_ID']}\\n".encode())  # in one piece
    while not pathlib.Path("go").exists():
        signal.sigtimedwait([], 0.05)
"""


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


SAVES = """
    import os, sys, torch, torch.distributed as dist
    from dlrover_py.trainer import Checkpointer
    dist.init_process_group("gloo")
    state = {"w": torch.zeros(3)}
    checkpointer = Checkpointer("store", every=1, persist_every=1)
    begin = checkpointer.load(state) or 0
    for step in (begin + 1, begin + 2):
        state["w"] += 1
        checkpointer.save(step, state)
        there = checkpointer.wait(persisted=True, timeout_s=30)
        os.write(1, f"rank {dist.get_rank()}: {step} {there} {state['w'].tolist()}\\n".encode())
        if begin == 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(3)
    checkpointer.close()
    dist.destroy_process_group()
"""


def test_the_same_command_once_more_goes_on_and_is_stored(group: Group) -> None:
    """Its rounds begin anew: what the first run has stored is of later ones."""
    script = str(group.place.script(SAVES))
    common = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{group.port}"]
    common += ["--max-restarts=1", script]
    for last in (3, 5):
        nodes = [group.start(*common) for _ in range(2)]
        assert [group.wait(node) for node in nodes] == [0, 0], group.lines
        for node in nodes:
            group.said(node, rf"rank \d: {last} True \[{last}.0, ")
        stored = [m.step for m in Store(group.place.folder / "store").checkpoints()]
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
    assert "runs another job: expected --rdzv-id=b" in "".join(group.lines[other])


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
        assert "torchrun's own agents do not mix" in "".join(group.lines[ours])
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
    assert "1 of at least 2 nodes is there, after 5 s" in "".join(group.lines[only])


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


BOUND = """
    import asyncio, json, os, sys
    from dlrover_agent.endpoint import Endpoint, OwnMaster
    from dlrover_agent.loop import work
    from dlrover_agent.settings import Command, Settings
    from dlrover_py.telemetry import setup

    setup("elastic-run", level="INFO")
    command = Command(
        argv=(sys.executable, "-u", "worker.py"), nproc=2, inherit=dict(os.environ),
        cpus=tuple(frozenset(c) for c in json.loads(sys.argv[1])),
    )
    with OwnMaster(Endpoint(run_id="x")) as master:
        own = Settings(master_addr=master.address, node_id="n0", environ=dict(os.environ))
        agent = work(own, command, token=master.token, max_restarts=1, beside=master.keep)
        print(asyncio.run(agent))
"""


def test_workers_run_where_they_are_bound_to_cold_and_forked(group: Group) -> None:
    """The binding itself needs GPUs; what follows from one does not."""
    group.place.script(
        """
        import os, pathlib, signal, sys
        how = "forked" if "dlrover_agent.zygote" in sys.modules else "cold"
        cpus = sorted(os.sched_getaffinity(0))
        # In one write: unbuffered, print() writes in pieces, and two workers share the pipe.
        sys.stdout.write(f"{how} {os.environ['RANK']} {cpus}\\n")
        last = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        while not last and not pathlib.Path("die").exists():
            signal.sigtimedwait([], 0.05)
        sys.exit(not last)
        """,
        "worker.py",
    )
    script = group.place.script(BOUND, "agent.py")
    mine = sorted(os.sched_getaffinity(0))
    cpus = [mine[:1], mine[-1:]]
    group.run("python", str(script), json.dumps(cpus))
    group.said(0, "zygote_ready")
    (group.place.folder / "die").touch()
    assert group.wait(0) == 0
    for how in ("cold", "forked"):
        for rank in range(2):
            assert group.said(0, rf"^{how} {rank} (.*)$")[1] == str(cpus[rank])


SPECS = """
    import os
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class Flat(DefaultLogsSpecs):
        def reify(self, envs):
            dest = super().reify(envs)
            for i, env in envs.items():
                env["FROM_SPECS"] = env["TORCHELASTIC_RUN_ID"]
                env["TORCHELASTIC_ERROR_FILE"] = dest.error_files[i] = f"{self.root_log_dir}/e{i}"
                dest.stdouts[i] = f"{self.root_log_dir}/out-{env['RANK']}"
                if i in dest.tee_stdouts:
                    dest.tee_stdouts[i] = dest.stdouts[i]
            return dest
"""


def test_logs_specs_of_others_decide_as_under_torchrun(place: Place) -> None:
    place.script(SPECS, "flat.py")
    info = place.folder / "flat-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flat\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nflat = flat:Flat\n")
    script = place.script("""
        import os
        print("out", os.environ["RANK"], os.environ["TORCHELASTIC_ERROR_FILE"])
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
        return bool(mask & int(blocked, 16))

    eventually(masked, "it handles signals")
    group.runs[waits].send_signal(number)
    assert group.wait(waits) == 1
    name = signal.Signals(number).name
    assert group.lines[waits] == [f"elastic-run: the agent received {name}\n"]


def test_second_signal_does_not_take_the_last_words(place: Place) -> None:
    script = place.script(POLITE)
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
    script = place.script(POLITE)
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
