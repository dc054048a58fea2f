"""What a user can get wrong: it is said where and what, nothing is started, and the code is 2."""

import io
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_py.cli import main
from tests.process.harness import BIN, Place, document, free_port, job, members

GOOD = """\
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: job
spec:
  replicaSpecs:
    worker:
      replicas: 2
      template:
        spec:
          containers:
            - name: main
              command: [elastic-run, train.py]
"""
WORKER = "spec.replicaSpecs.worker"
POD = f"{WORKER}.template.spec.containers"


class Desk:
    """A folder in which ``dlrover`` is called, in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.file = folder / "job.yaml"

    def refuse(self, *argv: str) -> list[str]:
        """Call it; it must refuse and start nothing. Return what it says."""
        assert main(argv) == 2
        out, err = self._capsys.readouterr()
        assert out == ""
        assert "Traceback" not in err
        left = {p.name for p in self.folder.iterdir()} - {"job.yaml"}
        assert not left, "something was made"
        return err.splitlines()

    def refuse_file(self, text: str | bytes) -> list[str]:
        """Run a job file; return the faults without the name of the program."""
        self.file.write_bytes(text if isinstance(text, bytes) else text.encode())
        said = self.refuse("job", "run", str(self.file))
        assert all(line.startswith(f"dlrover: {self.file}") for line in said), said
        return [line.removeprefix(f"dlrover: {self.file}") for line in said]


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Desk:
    for name in ("RUNTIME", "STATE"):
        monkeypatch.setenv(f"DLROVER_{name}_DIR", str(tmp_path / name.lower()))
    return Desk(tmp_path, capsys)


# --- the job file ---


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "replicas: 2",
            "replicas: 3\n      minReplicas: 4\n      maxReplicas: 2",
            [
                f":7: {WORKER}: minReplicas is 4 and replicas is 3: expected minReplicas ≤ ",
                f":7: {WORKER}: replicas is 3 and maxReplicas is 2: expected replicas ≤ max",
            ],
        ),
        (
            "replicas: 2",
            "replicas: 3\n      nodeUnit: 2",
            [
                f":7: {WORKER}: replicas is 3 and nodeUnit is 2: expected a multiple of 2 "
                "(such as 2 or 4)"
            ],
        ),
        (
            "replicas: 2",
            "replicsa: 2",
            [f":8: {WORKER}.replicsa: unknown field (found a number 2); did you mean replicas?"],
        ),
        (
            "replicas: 2",
            "replicas: two",
            [f":8: {WORKER}.replicas: found text 'two': input should be a valid integer"],
        ),
        (
            "replicas: 2",
            'replicas: "2"',
            [f":8: {WORKER}.replicas: found text '2': input should be a valid integer"],
        ),
        (
            "replicas: 2",
            "replicas: true",
            [f":8: {WORKER}.replicas: found a boolean True: input should be a valid integer"],
        ),
        (
            "replicas: 2",
            "replicas: 2.5",
            [f":8: {WORKER}.replicas: found a number 2.5: input should be a valid integer"],
        ),
        (
            "replicas: 2",
            "replicas: 0\n      restartCount: -1\n      standbyReplicas: []",
            [
                f":8: {WORKER}.replicas: found a number 0: input should be greater than or equal "
                "to 1",
                f":10: {WORKER}.standbyReplicas: found a list []: input should be a valid integer",
                f":9: {WORKER}.restartCount: found a number -1: input should be greater than or "
                "equal to 0",
            ],
        ),
        ("name: job", "name: My_Job", [":4: metadata.name: found text 'My_Job': expected lower-"]),
        ("name: job", "name: " + "j" * 38, [":4: metadata.name: found text 'jjj"]),
        ("  name: job\n", "", [":3: metadata: found nothing: expected a mapping"]),
        (
            "v1alpha1",
            "v1",
            [
                ":1: apiVersion: found text 'elastic.iml.github.io/v1': input should be "
                "'elastic.iml.github.io/v1alpha1'"
            ],
        ),
        (
            "kind: ElasticJob",
            "kind: Job",
            [":2: kind: found Job: expected ElasticJob; Job objects are for kubectl apply"],
        ),
        ("kind: ElasticJob\n", "", [":1: kind: missing; expected a value here"]),
        (
            "spec:\n  rep",
            "spec:\n  suspend: soon\n  rep",
            [":6: spec.suspend: found text 'soon': input should be a valid boolean"],
        ),
        (
            "              command: [elastic-run, train.py]\n",
            "",
            [f":11: {POD}[main].command: missing; expected a command"],
        ),
        ("[elastic-run, train.py]", "elastic-run", [f":13: {POD}[0].command: found text"]),
        (
            "            - name: main\n              command: [elastic-run, train.py]\n",
            "",
            [f":11: {POD}: expected a list of at least one container"],
        ),
        (
            "- name: main",
            "- name: a\n            - name: b",
            [f":11: {POD}: found 2 containers and none named 'main'"],
        ),
    ],
)
def test_a_fault_in_the_job_file_is_named_with_its_line(
    desk: Desk, old: str, new: str, said: list[str]
) -> None:
    assert old in GOOD
    found = desk.refuse_file(GOOD.replace(old, new, 1))
    assert len(found) == len(said), found
    for line, start in zip(found, said, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: expected a mapping with apiVersion: elastic.iml.github.io/v1alpha1"),
        ("# nothing\n", ":1: expected a mapping with apiVersion"),
        ("- a\n", ":1: expected a mapping with apiVersion"),
        ("just words", ":1: expected a mapping with apiVersion"),
        (GOOD.replace("spec:", "spec: [", 1), ": not valid YAML: "),
        (GOOD.replace("  name: job", "\tname: job"), ":4: not valid YAML: found character '\\t'"),
        (GOOD + "---\n" + GOOD, ":15: found 2 jobs, expected one"),
        ("kind: ConfigMap\n---\n" + GOOD, ":1: found ConfigMap beside the job: expected an Elast"),
        (GOOD + "---\nkind: Secret\n", ":15: found Secret beside the job: expected an Elast"),
        ("a: !!python/object/apply:os.system ['touch pwned']", ":1: not valid YAML: "),
        ("a: *unknown", ":1: not valid YAML: "),
        (b"\xff\xfe\x00binary", ": it is not UTF-8 text"),
        (b"a: \x00", ": not valid YAML: "),
    ],
)
def test_a_file_that_is_no_job(desk: Desk, text: str | bytes, said: str) -> None:
    (line,) = desk.refuse_file(text)
    assert said in line
    assert line[0] == ":"


def test_a_file_that_is_not_there(desk: Desk) -> None:
    (line,) = desk.refuse("job", "run", str(desk.file))
    assert line == f"dlrover: {desk.file}: No such file or directory"


@pytest.mark.parametrize(
    "argv",
    [
        ["job", "run"],
        ["job", "run", "/"],
        ["job", "run", "job.yaml", "--nodes", "0"],
        ["job", "run", "job.yaml", "--nodes", "many"],
        ["job", "run", "job.yaml", "--grace", "-1"],
        ["job", "run", "job.yaml", "--grace", "nan"],
        ["ckpt", "export", ".", "out", "--shard-gb", "nan"],
        ["job", "run", "job.yaml", "--no-such-flag"],
        ["job", "jump"],
        ["job", "describe", "nobody"],
        ["job", "scale", "0"],
        ["node", "kill"],
        ["node", "kill", "n0"],
    ],
    ids=" ".join,
)
def test_flags_and_names_that_make_no_sense(desk: Desk, argv: list[str]) -> None:
    assert desk.refuse(*argv)


def test_a_job_file_without_an_end_is_refused(desk: Desk) -> None:
    (line,) = desk.refuse("job", "run", "/dev/zero")
    assert line == "dlrover: /dev/zero: it has more than 16 MiB: expected a file with jobs"


def test_standard_input_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a: \xff\n"), "utf-8"))
    assert main(["job", "submit", "-"]) == 2
    assert capsys.readouterr().err.splitlines() == ["dlrover: standard input: it is not UTF-8 text"]


def test_a_user_without_a_home_folder_can_still_use_a_cluster(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Containers run as users who are not in /etc/passwd."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert main(["job", "list"]) == 0
    for name in ("DLROVER_STATE_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert main(["job", "list"]) == 0
    assert "no jobs; start one" in capsys.readouterr().err
    desk.file.write_text(GOOD)
    (line,) = desk.refuse("job", "run", str(desk.file))
    assert line.endswith("this user has no home folder: set HOME, or DLROVER_STATE_DIR")


def test_a_token_file_that_is_a_pipe_is_refused(place: Place) -> None:
    """To open it would block, and no signal would end elastic-run."""
    pipe = place.folder / "token"
    os.mkfifo(pipe, 0o600)
    place.script("")
    master = {"DLROVER_MASTER_ADDR": "127.0.0.1:9", "DLROVER_NODE_ID": "n0"}
    done = place.call(
        "elastic-run", "train.py", env={**master, "DLROVER_TOKEN_FILE": str(pipe)}, timeout=30
    )
    assert done.returncode == 2
    assert f"token file {pipe}: it is not a regular file; expected a file with" in done.stderr


def test_a_folder_that_cannot_be_made_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.file.write_text(GOOD)
    for name in ("RUNTIME", "STATE"):
        with monkeypatch.context() as other:
            other.setenv("DLROVER_RUNTIME_DIR", str(desk.folder / ".." / "elsewhere"))
            other.setenv(f"DLROVER_{name}_DIR", f"{desk.file}/x")
            (line,) = desk.refuse("job", "run", str(desk.file))
            assert line.startswith(f"dlrover: {desk.file}")
            assert "Not a directory" in line


@pytest.mark.parametrize(
    "argv",
    [
        ["job", "run", "job.yaml"],
        ["job", "list"],
        ["job", "get", "job"],
        ["job", "describe"],
        ["job", "logs", "job"],
        ["job", "stop", "job"],
        ["node", "kill", "n0"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("theirs", ["written to", "owned", "a link"])
def test_a_folder_that_is_somebody_elses_as_well_is_not_used(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any, theirs: str, argv: list[str]
) -> None:
    other = tmp_path_factory.mktemp("other")
    root = other / "run"
    root.mkdir(mode=0o755)
    if theirs == "written to":
        root.chmod(0o777)
        words = "others can write to it (mode 0777)"
    elif os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    elif theirs == "owned":
        os.chown(root, 54322, 54322)
        words = "it belongs to user 54322"
    else:
        root.rename(other / "mine")
        root.symlink_to(other / "mine")
        os.lchown(root, 54322, 54322)
        words = "it belongs to user 54322"
    desk.file.write_text(GOOD)
    monkeypatch.chdir(desk.folder)
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(root))
    with monkeypatch.context() as quiet, socket.socket(socket.AF_UNIX) as stranger:
        quiet.chdir(root)  # the path is long
        Path("job").mkdir()
        stranger.bind("job/cluster.sock")
        stranger.listen()
        stranger.setblocking(False)
        quiet.chdir(desk.folder)
        (line,) = desk.refuse(*argv)
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert line.startswith(f"dlrover: {root}: {words}; expected a folder that belongs to you")
    assert "set DLROVER_RUNTIME_DIR to another" in line
    assert {p.name for p in root.iterdir()} == {"job"}


def test_a_folder_that_others_can_only_read_is_used(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    root = tmp_path_factory.mktemp("run")
    root.chmod(0o755)
    (root.parent / "link").symlink_to(root)
    for path in (root, root.parent / "link", root / "not-yet"):
        monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(path))
        assert "no job runs" in desk.refuse("node", "kill", "n0")[0]


def test_a_checkpoint_directory_that_means_nothing_is_refused_before_the_start(desk: Desk) -> None:
    desk.file.write_text(GOOD.replace("spec:\n", "spec:\n  checkpoint: {dir: 's3:/bucket'}\n", 1))
    (line,) = desk.refuse("job", "run", str(desk.file))
    assert "checkpoint directory 's3:/bucket': expected two slashes" in line


def test_a_path_that_is_too_long_for_a_socket_is_named(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.file.write_text(GOOD)
    deep = desk.folder.parent / ("d" * 100)
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(deep))
    monkeypatch.setenv("DLROVER_STATE_DIR", str(deep))
    (line,) = desk.refuse("job", "run", str(desk.file))
    assert "DLROVER_RUNTIME_DIR can name another folder" in line
    assert not (deep / "job").exists()


def test_the_command_itself_exits_with_2(place: Place) -> None:
    (place.folder / "job.yaml").write_text(GOOD.replace("replicas: 2", "replicas: two"))
    done = place.call("dlrover", "job", "run", "job.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith(f"dlrover: job.yaml:8: {WORKER}.replicas: found text 'two'")
    assert {p.name for p in place.folder.iterdir()} == {"job.yaml"}


# --- elastic-run alone ---


def test_what_elastic_run_cannot_use_is_said_and_nothing_is_started(place: Place) -> None:
    place.script("print('started')")
    text = place.folder / "text"
    text.write_text("no program")
    alone = ["--standalone"]
    member = {"DLROVER_MASTER_ADDR": "127.0.0.1:1", "DLROVER_NODE_ID": "n0"}
    token = {"DLROVER_TOKEN_FILE": str(place.folder / "no-token")}
    job = {"DLROVER_MASTER_ADDR": "h:1"}
    two = ["--nnodes=2"]
    binary = {"DLROVER_TOKEN_FILE": str(place.folder / "binary")}
    (place.folder / "binary").write_bytes(b"\xff\xfe")
    good = member | {"DLROVER_TOKEN_FILE": str(place.folder / "good")}
    (place.folder / "good").touch(mode=0o600)
    (place.folder / "good").write_text("0123456789abcdef")
    long = "9" * 5000
    nowhere = ["--rdzv-backend=c10d", "--rdzv-endpoint=no.such.host.invalid"]
    nowhere += ["--rdzv-conf=read_timeout=1"]
    free, taken = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    # The codes are torchrun's: 2 from its parser, else 1. A platform is told by 2.
    cases: list[tuple[int, list[str], dict[str, str], str]] = [
        (1, [*alone, "gone.py"], {}, f"script {place.folder}/gone.py: there is no such file"),
        (1, [*alone, *two, "train.py"], {}, "--nnodes is 2: --standalone is a job of exactly"),
        (1, ["--nnodes=two", "train.py"], {}, "--nnodes is 'two': expected N or MIN:MAX"),
        (1, ["--nproc-per-node=many", "train.py"], {}, "--nproc-per-node is 'many': expected"),
        (1, ["--nproc_per_node=-1", "train.py"], {}, "--nproc-per-node is '-1': expected"),
        (1, ["--nproc_per_node=gpu", "train.py"], {"CUDA_VISIBLE_DEVICES": ""}, "no GPU"),
        (1, ["--no-python", "./text"], {}, "program ./text: not found, or not executable"),
        (1, ["--no-python", "-m", "text"], {}, "--module and --no-python exclude each other"),
        (1, ["--max-restarts=-1", "train.py"], {}, "expected a number from 0"),
        (1, [f"--max-restarts={10**30}", "train.py"], {}, "expected a number from 0 to 1000000000"),
        (1, [f"--nnodes={long}", "train.py"], {}, "expected N or MIN:MAX"),
        (1, ["--nnodes=100001", "train.py"], {}, "expected 0 < MIN ≤ MAX ≤ 100000"),
        (1, ["--nproc-per-node=²", "train.py"], {}, "expected a number from 1 to 1024"),
        (1, ["--local-addr=\udcff", "train.py"], {}, "expected a host name or an IP address"),
        (1, [f"--tee={long}:1", "train.py"], {}, "expected 0, 1, 2 or 3, or by local rank"),
        (1, ["--redirects=7", "train.py"], {}, "--redirects is '7': expected 0, 1, 2 or 3"),
        (1, ["--local-ranks-filter=a", "train.py"], {}, "expected local ranks, such as 0,1"),
        (1, ["--logs-specs=none", "train.py"], {}, "group torchrun.logs_specs; installed are"),
        (1, ["--event-log-handler=x", "train.py"], {}, "expected one of console, dynamic_rendez"),
        (1, ["--signals-to-handle=SIGX", "train.py"], {}, "has 'SIGX': expected names such as"),
        (1, ["--shutdown-timeout=-1", "train.py"], {}, "--shutdown-timeout is '-1': expected"),
        (1, ["--log-dir=text", "-r3", "train.py"], {}, "cannot be used as a folder: File exists"),
        (1, [*two, "--rdzv-backend=etcd", "train.py"], {}, "expected c10d or static"),
        (1, [*two, "--node-rank=2", "train.py"], {}, "expected a rank from 0 to 1"),
        (1, [*two, f"--rdzv-endpoint={taken}", "train.py"], {}, "is in use: this node must run"),
        (
            1,
            [*two, "--node-rank=1", f"--rdzv-endpoint={free}", "--rdzv-conf=timeout=1", "train.py"],
            {},
            f"the master did not answer for 1 s: {free}",
        ),
        (
            1,
            [*two, *nowhere, "train.py"],
            {},
            "endpoint no.such.host.invalid: no such host within 1 s",
        ),
        (1, ["train.py"], {"DLROVER_CONNECT_S": "soon"}, "DLROVER_CONNECT_S is 'soon': expected a"),
        (1, ["train.py"], {"DLROVER_CONNECT_S": "nan"}, "DLROVER_CONNECT_S is 'nan': expected a"),
        (1, ["train.py"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "²"}, "expected a number of seconds"),
        (1, ["train.py"], {"PET_MODULE": "yes"}, "PET_MODULE is 'yes': expected 0 or 1"),
        (2, [*alone], {}, "the following arguments are required: training_script"),
        (2, ["--max-restarts=x", "train.py"], {}, "invalid int value: 'x'"),
        (2, ["--node-rank=", "train.py"], {}, "value: ''; a variable of the shell may be empty"),
        (2, ["-u", "train.py"], {}, "-u is a flag of Python, which elastic-run starts by itself: "),
        (2, ["-Wignore", "train.py"], {}, "by itself: set PYTHONWARNINGS in its place"),
        (2, ["--frob", "train.py"], {}, "unknown flag --frob: neither torchrun nor DLRover"),
        (
            2,
            ["--training_port", "1", "train.py"],
            {},
            "is not supported: the agents reserve a free port for each round",
        ),
        (2, ["train.py"], {"DLROVER_MASTER_ADDR": "nowhere"}, "address 'nowhere': expected host:"),
        (2, ["train.py"], job, "DLROVER_NODE_ID is not"),
        (2, ["gone.py"], job, "there is no such file"),
        (2, ["train.py"], member | token, "no-token: No such file or directory"),
        (2, ["train.py"], member | binary, "binary: expected one line of printable ASCII"),
        (2, ["train.py"], good | {"POD_IP": "\udcff"}, "POD_IP is '\\udcff': expected a host"),
        (2, ["train.py"], good | {"DLROVER_NODE_ID": "a b"}, "NODE_ID is 'a b': expected an id"),
        (2, ["train.py"], good | {"DLROVER_LIFELINE_FD": "99"}, "LIFELINE_FD is 99: expected the"),
        (2, ["train.py"], good | {"DLROVER_CONNECT_S": "soon"}, "DLROVER_CONNECT_S is 'soon'"),
        (2, ["train.py"], {"DLROVER_MASTER_ADDR": f"h:{long}"}, "expected host:port, such as"),
    ]
    with socket.create_server(("127.0.0.1", int(taken.rpartition(":")[2]))):
        for some in (cases[i : i + 6] for i in range(0, len(cases), 6)):
            started = [
                place.popen(
                    "elastic-run", *argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
                for _, argv, env, _ in some
            ]
            for (code, argv, _, words), process in zip(some, started, strict=True):
                out, err = process.communicate(timeout=60)
                assert process.returncode == code, (argv, err)
                assert words in err, argv
                assert "Traceback" not in err
                assert out == "", argv
                assert err.count("\n") == 1, err
                assert not leftovers(process.pid)


def leftovers(pid: int) -> list[Path]:
    """Folders of an elastic-run with this pid."""
    return [*Path("/tmp").glob(f"dlrover-{pid}-*"), *Path("/tmp").glob(f"dlrover-run-{pid}-*")]


def test_a_program_that_cannot_be_executed_has_failed(place: Place) -> None:
    program = place.folder / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    done = place.call(
        "elastic-run", "--standalone", "--no-python", "--nproc-per-node=2", "./broken"
    )
    assert done.returncode == 1
    assert "could not be started: ./broken: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["e" * 240, os.fsdecode(b"by\xfftes")], ids=["long", "no UTF-8"])
def test_a_program_that_goes_has_failed_whatever_its_path(place: Place, name: str) -> None:
    folder = place.folder / ("d" * 240) / name
    folder.mkdir(parents=True)
    program = folder / "program"
    program.write_text('#!/bin/sh\nrm "$0"\nexit 3\n')
    program.chmod(0o755)
    flags = ["--standalone", "--no-python", "--nproc-per-node=1", "--max-restarts=1"]
    done = place.call("elastic-run", *flags, str(program))
    assert done.returncode == 1
    assert "/program: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


WHERE = 'import os; print("socket", os.environ["DLROVER_AGENT_SOCKET"])'


def test_temporary_files_are_where_tmpdir_says(place: Place) -> None:
    place.script(WHERE)
    for folder, inside in ((place.folder / "scratch", True), (place.folder / ("d" * 80), False)):
        folder.mkdir()
        flags = ["--standalone", "--nproc-per-node=1"]
        done = place.call("elastic-run", *flags, "train.py", env={"TMPDIR": str(folder)})
        assert done.returncode == 0
        assert (f"socket {folder}/dlrover-" in done.stdout) is inside, "a socket's path is short"
        assert not list(folder.iterdir())


ISOLATED = ["unshare", "--user", "--map-root-user"]
# What is in it stays: this very program may be there.
READ_ONLY = "mount --rbind {0} {0}; mount -o remount,ro,bind {0}"


@pytest.mark.parametrize(
    ("how", "before", "words"),
    [
        ("--mount", f"{READ_ONLY.format('/tmp')}; {READ_ONLY.format('/var/tmp')}", "set TMPDIR"),
        ("--net", "true", "ip link set lo up"),
        ("--net", "ip link set lo up; ip address del 127.0.0.1/8 dev lo", "ip link set lo up"),
    ],
    ids=["no /tmp", "no loopback", "IPv6 alone"],
)
def test_what_the_machine_lacks_is_said_in_one_line(
    place: Place, how: str, before: str, words: str
) -> None:
    if subprocess.run([*ISOLATED, how, "true"], check=False).returncode:
        pytest.skip("namespaces of users are not allowed here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        script = Path(folder, "train.py")
        script.write_text("print('started')")
        run = f"{before}; cd /; exec {BIN / 'elastic-run'} --standalone {script}"
        done = subprocess.run(
            [*ISOLATED, how, "sh", "-c", run],
            env={k: v for k, v in place.env.items() if k != "TMPDIR"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("elastic-run: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("silent", [False, True], ids=["nobody there", "never answers"])
def test_a_master_that_cannot_be_reached_at_the_start(place: Place, silent: bool) -> None:
    place.script("print('started')")
    token = place.folder / "token"
    token.touch(mode=0o600)
    token.write_text("x" * 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}" if silent else "127.0.0.1:1"
        env = {
            "DLROVER_MASTER_ADDR": address,
            "DLROVER_NODE_ID": "n0",
            "DLROVER_TOKEN_FILE": str(token),
            "DLROVER_CONNECT_S": "1",
        }
        done = place.call("elastic-run", "train.py", env=env, timeout=20)
    assert done.returncode == 4
    assert f"elastic-run: the master did not answer for 1 s: {address}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


# --- a job ---


def test_a_missing_script_ends_the_job_at_once(place: Place) -> None:
    wish = document(["elastic-run", "gone.py"], replicas=3)
    (place.folder / "job.yaml").write_text(yaml.safe_dump(wish))
    done = place.call("dlrover", "job", "run", "job.yaml", "--json")
    assert done.returncode == 1
    status = last_status(done.stdout)
    assert status["phase"] == "Failed"
    (failed,) = [c for c in status["conditions"] if c["type"] == "Failed"]
    assert failed["reason"] == "InvalidCommand"
    assert f"script {place.folder}/gone.py: there is no such file" in failed["message"]
    assert {n["id"] for n in status["nodes"]} <= {"n0", "n1", "n2"}, "no node was replaced"
    assert status["round"] == 0


def test_a_missing_program_ends_the_job(place: Place) -> None:
    wish = document(["no-such-program"], replicas=2, restartCount=1)
    (place.folder / "job.yaml").write_text(yaml.safe_dump(wish))
    done = place.call("dlrover", "job", "run", "job.yaml", "--json")
    assert done.returncode == 1
    status = last_status(done.stdout)
    assert status["phase"] == "Failed"
    assert "no-such-program: no such program on the PATH" in done.stdout
    (failed,) = [c for c in status["conditions"] if c["type"] == "Failed"]
    assert failed["reason"] == "InvalidCommand"
    assert {n["id"] for n in status["nodes"]} <= {"n0", "n1"}, "no node was replaced"


def test_a_command_that_never_joins_is_told_before_and_after(place: Place) -> None:
    (place.folder / "train.py").write_text("print('trained', flush=True)")
    wish = document(["sh", "-c", "exec python train.py"], replicas=2)
    (place.folder / "job.yaml").write_text(yaml.safe_dump(wish))
    done = place.call("dlrover", "job", "run", "job.yaml", "--plain")
    assert done.returncode == 1
    where = "spec.replicaSpecs.worker.template.spec.containers[0].command"
    assert f"warning: {where}: python train.py does not join the job" in done.stderr
    assert "never joined the job: start the script with elastic-run" in done.stdout
    said = place.call("dlrover", "job", "logs", "job").stdout
    assert {line.partition("] ")[2] for line in said.splitlines()} == {"trained"}
    assert set(said.split()) & {"[n0]", "[n1]"}
    assert not set(said.split()) & {"[n2]", "[n3]"}, "no node was replaced"


def last_status(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith('{"status"')]
    status: dict[str, Any] = json.loads(line)["status"]
    return status


def test_strangers_are_turned_away_from_a_job_that_goes_on(place: Place) -> None:
    with job(place, replicas=1) as run:
        before = run.running(1)
        # A second job of the same name.
        second = place.call("dlrover", "job", "run", "job.yaml")
        assert second.returncode == 2
        assert "a job named job runs already" in second.stderr
        assert "`dlrover job stop job`" in second.stderr
        # An agent with another token, and one that the job has not asked for.
        snapshot = run.snapshot()
        wrong = place.folder / "wrong-token"
        wrong.touch(mode=0o600)
        wrong.write_text("a-token-of-another-job")
        env = {"DLROVER_MASTER_ADDR": snapshot.master_addr, "DLROVER_NODE_ID": "n7"}
        strangers = [
            place.popen(
                "elastic-run",
                "train.py",
                env=env | {"DLROVER_TOKEN_FILE": str(path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for path in (wrong, snapshot.token_file)
        ]
        (_, first), (_, other) = (s.communicate(timeout=60) for s in strangers)
        assert (strangers[0].returncode, strangers[1].returncode) == (4, 3)
        assert "elastic-run: " in first
        assert "the request needs the job's token" in first
        assert Path(snapshot.token_file).read_text() not in first
        assert "a-token-of-another-job" not in first
        assert "n7: it is not a node of this job" in other
        after = run.until(lambda s: "NodeRefused" in [e.reason for e in s.events], "a refusal")
        assert [n.pids for n in members(after)] == [n.pids for n in members(before)]
        assert after.round == before.round
        assert run.metric("dlrover_unauthorized_requests_total") == 1


def test_a_launcher_that_the_command_line_does_not_show_is_told(place: Place) -> None:
    program = place.folder / "run.sh"
    program.write_text('#!/bin/sh\nWORLD_SIZE=1 MASTER_PORT=29500 python "$1"\n:\n')
    program.chmod(0o755)
    with job(place, flags=("--no-python", str(program)), replicas=2) as run:
        status = run.until(
            lambda status: [e for e in status.events if e.reason == "NestedLauncher"],
            "the launcher is told",
        )
    (event, *_) = [e for e in status.events if e.reason == "NestedLauncher"]
    assert "worker 0 has started process" in event.message
    assert "in a world of 1 of its own, not in this round's of 2" in event.message


def test_variables_of_dlrover_in_a_template_have_no_effect(place: Place) -> None:
    """As in a Pod. One of them names the node's mark, by which its processes are found."""
    theirs = {"DLROVER_MASTER_ADDR": "192.0.2.1:1", "DLROVER_TOKEN_FILE": "/none"}
    marked = {"DLROVER_NODE_ID": "n77", "DLROVER_NODE_MARK": "x", "DLROVER_LIFELINE_FD": "2"}
    with job(place, script="print('trained')", env=theirs | marked) as run:
        assert run.wait() == 0
