"""What a command line starts, and what that means for a job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.commands import calls, remarks, split

RUN = ["python", "-m", "torch.distributed.run"]
DLROVER = ["python", "-m", "dlrover.trainer.torch.main"]
ALONE = [
    (["torchrun", "--nproc_per_node", "2", "t.py", "--x"], "torchrun"),
    ([*RUN, "--rdzv_backend=c10d", "t.py"], "torchrun"),
    (["python3.12", "-um", "torch.distributed.launch", "--use_env", "t.py"], "torchrun"),
    (["/opt/bin/python", "/opt/bin/torchrun", "t.py"], "torchrun"),
    (["python", "/x/torch/distributed/run.py", "t.py"], "torchrun"),
    (["bash", "-lc", "pip install x; timeout -k 5 60 torchrun t.py > log 2>&1"], "torchrun"),
    (["sh", "-c", "cd /x &&\\\n  A='b c' exec torchrun \\\n --nnodes 2 t.py"], "torchrun"),
    (["bash", "-c", "# run\nif [ -f x ]; then\n  torchrun t.py\nfi"], "torchrun"),
    (["accelerate", "launch", "t.py"], "accelerate launch"),
    (["deepspeed", "--num_gpus", "2", "t.py"], "deepspeed"),
    (["mpirun", "-np", "2", "python", "t.py"], "mpirun"),
    (["srun", "python", "t.py"], "srun"),
    (["apptainer", "exec", "--nv", "image.sif", "torchrun", "t.py"], "torchrun"),
    (["docker", "run", "--rm", "-v", "/a:/b", "image", "torchrun", "t.py"], "torchrun"),
    (["python", "train.py", "--lr", "0.1"], "python train.py"),
    (["tini", "--", "python", "-X", "dev", "-m", "pkg.train"], "python -m pkg.train"),
    (["sh", "-ec", "export A=1; exec python -u train.py"], "python train.py"),
    (["bash", "-o", "pipefail", "-c", "torchrun t.py"], "torchrun"),
    (["bash", "-euxo", "pipefail", "-c", "torchrun t.py"], "torchrun"),
    (["bash", "--rcfile", "x", "-c", "-e", "--", "torchrun t.py"], "torchrun"),
    (["sh", "-c", 'exec "$@"', "--", "torchrun", "t.py"], "torchrun"),
    (["/usr/bin/env", "-i", "torchrun", "t.py"], "torchrun"),
    (["bash", "-c", "cd /x  # it's there\ntorchrun t.py  # don't wait"], "torchrun"),
    (["bash", "-c", "cat > t.py <<'E'\nx = \"it's\"\nE\ntorchrun t.py"], "torchrun"),
    (["accelerate-launch", "t.py"], "accelerate launch"),
    (["pixi", "run", "torchrun", "t.py"], "torchrun"),
    (["bash", "-euo", "pipefail", "-c", "python train.py 2>&1 | tee log"], "python train.py"),
    (["bash", "-eu", "-o", "pipefail", "-c", "torchrun t.py | tee log"], "torchrun"),
    (["bash", "-ce", "for i in 1 2; do python train.py; done"], "python train.py"),
    (["sh", "-c", "python train.py; code=$?; sleep 5; exit $code"], "python train.py"),
    (["/usr/bin/tini", "-s", "--", "/bin/nice", "-n", "5", "torchrun", "t.py"], "torchrun"),
    (["sh", "-c", "python $(which torchrun) --nnodes 2 t.py"], "torchrun"),
    (["sh", "-c", "`command -v deepspeed` t.py"], "deepspeed"),
    (["busybox", "sh", "-c", "eval torchrun t.py"], "torchrun"),
    (["sh", "-c", "elastic-run --standalone prepare.py && torchrun t.py"], "torchrun"),
    (["python", "-m", "dlrover.trainer.torch.elastic_run", "t.py"], "dlrover.trainer.torch"),
    (["python", "/x/dlrover/trainer/torch/main.py", "t.py"], "dlrover.trainer.torch"),
    ([*DLROVER, "--rdzv-backend=dlrover", "t.py"], "dlrover.trainer.torch"),
]
MAY_JOIN = [
    ["elastic-run", "t.py"],
    ["/usr/bin/dlrover-run", "--network-check", "t.py"],
    ["python", "-m", "dlrover_agent", "t.py"],
    ["bash", "-c", "python prepare.py && exec elastic-run t.py"],
    ["elastic-run", "train.py", "torchrun", "-m", "torch.distributed.run"],
    ["elastic-run", "--log-dir", "torchrun", "t.py"],
    ["elastic-run", "--no-python", "./own", "torchrun"],
    ["elastic-run", "t.py", "--standalone"],
    ["torchrun", "--rdzv-backend=dlrover", "t.py"],
    ["./run.sh"],
    ["bash", "run.sh"],
    ["bash", "-c", "$LAUNCH t.py"],
    ["bash", "-c", "python prepare.py; ./run.sh"],
    ["bash", "-c", "torchrun 'without an end"],
    ["bash", "-c", "if [ $A = 1 ]; then torchrun t.py; else elastic-run t.py; fi"],
    ["bash", "-c", "elastic-run t.py && torchrun evaluate.py"],
    ["bash", "-c", "elastic-run --standalone --nnodes=1 prepare.py && elastic-run t.py"],
    ["bash", "-c", "elastic-run t.py; elastic-run --stand evaluate.py"],
    ["elastic-run", "--no-python", "bash", "-c", "elastic-run --standalone evaluate.py"],
    ["bash", "-c", "cat > run.sh <<E\ntorchrun t.py\nE\necho done"],
    ["bash", "-c", "echo 'a # b'; elastic-run t.py"],
    ["bash", "-o", "pipefail", "run.sh", "-c", "torchrun t.py"],
    ["bash", "-c", "python prepare.py | tee log; elastic-run t.py 2>&1 | tee -a log"],
    ["bash", "-o", "pipefail", "run.sh", "-c", "torchrun t.py"],
    ["bash", "--rcfile", "-c", "torchrun"],
    ["sh", "-c", "python prepare.py; ./run.sh | tee log"],
    ["echo", "torchrun"],
    ["python", "-m", "pip", "install", "torchrun"],
    ["python", "-c", "torchrun"],
    [],
]
NESTED = [
    (["elastic-run", "-m", "torch.distributed.run", "--nproc_per_node=2", "t.py"], "torchrun"),
    (["elastic-run", "-m", "torch.distributed.launch", "t.py"], "torchrun"),
    (["elastic-run", "--module", "accelerate.commands.launch", "t.py"], "accelerate launch"),
    (["elastic-run", "--no-python", "torchrun", "t.py"], "torchrun"),
    (["elastic-run", "--no_python", *RUN, "t.py"], "torchrun"),
    (["elastic-run", "/opt/bin/torchrun", "t.py"], "torchrun"),
    (["elastic-run", "--no-python", "bash", "-c", "A=1 accelerate launch t.py"], "accelerate"),
    (["sh", "-c", "exec elastic-run --no-python deepspeed t.py"], "deepspeed"),
    (["elastic-run", "--no-python", "bash", "-eo", "pipefail", "-c", "torchrun t.py"], "torchrun"),
    (["elastic-run", "-m", "deepspeed.launcher.launch", "t.py"], "deepspeed"),
    (["elastic-run", "-m", "dlrover.trainer.torch.main", "t.py"], "dlrover.trainer.torch"),
]


@pytest.mark.parametrize(("words", "what"), ALONE)
def test_a_command_that_would_train_alone_is_told(words: list[str], what: str) -> None:
    said = remarks(words)
    assert said.startswith(f"{what} does not join the job")
    assert "write: elastic-run" in said


@pytest.mark.parametrize("words", MAY_JOIN)
def test_nothing_is_said_of_a_command_that_joins_or_cannot_be_read(words: list[str]) -> None:
    assert remarks(words) == ""


@pytest.mark.parametrize(("words", "what"), NESTED)
def test_another_launcher_as_the_script_is_told(words: list[str], what: str) -> None:
    assert remarks(words).startswith(f"the script is another launcher, {what}")


def test_what_to_write_keeps_flags_and_arguments() -> None:
    words = [
        "elastic-run",
        "-m",
        "torch.distributed.launch",
        "--use-env",
        "--nnodes=2",
        "t.py",
        "-x",
    ]
    assert remarks(words).endswith("write: elastic-run --nnodes=2 t.py -x")
    assert remarks(["python", "-m", "a.b", "--c"]).endswith("write: elastic-run -m a.b --c")


@pytest.mark.parametrize("module", ["main", "elastic_run"])
def test_dlrovers_own_launcher_is_replaced_with_its_flags(module: str) -> None:
    """The advice was to run DLRover's launcher in each worker."""
    words = ["python", "-m", f"dlrover.trainer.torch.{module}", "--nnodes=2:4", "--network-check"]
    said = remarks([*words, "--precheck", "1", "t.py", "--lr", "1"])
    flags = "--nnodes=2:4 --network-check --precheck 1"
    assert said.endswith(f"write: elastic-run {flags} t.py --lr 1")


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (["torchrun", "t.py", "--", "--lr"], ("t.py", "--", "--lr")),
        (["torchrun", "--", "t.py", "--", "--lr"], ("t.py", "--", "--lr")),
        (["torchrun", "--", "-t.py"], ("-t.py",)),
        (["python", "t.py", "--", "--lr"], ("t.py", "--", "--lr")),
    ],
)
def test_dashes_mean_the_same_in_what_to_write(words: list[str], args: tuple[str, ...]) -> None:
    written = remarks(words).rpartition("write: elastic-run ")[2].split()
    assert split(written, elastic_run=True).script == args


STANDALONE = [
    ["elastic-run", "--standalone", "t.py"],
    ["bash", "-c", "elastic-run --standalone a.py && elastic-run --stand t.py"],
    ["bash", "-c", "elastic-run --standalone a.py && python t.py"],
]


@pytest.mark.parametrize("words", STANDALONE)
def test_standalone_is_told(words: list[str]) -> None:
    assert remarks(words).startswith("elastic-run is given --standalone")
    assert "leave the flag out" in remarks(words)


@pytest.mark.parametrize("words", [["elastic-run", "t.py"], ["bash", "run.sh"], [], STANDALONE[0]])
def test_standalone_by_the_environment_is_told(words: list[str]) -> None:
    said = remarks(words, {"PET_STANDALONE": "1"})
    assert said.startswith("PET_STANDALONE is given to elastic-run, so that each node trains alone")
    for off in ("0", "yes", ""):  # elastic-run refuses the last two
        assert remarks(words, {"PET_STANDALONE": off}) == remarks(words)
    assert remarks(["torchrun", "t.py"], {"PET_STANDALONE": "1"}).startswith("torchrun does not")


FRAGMENTS = "sh -c python -m elastic-run --no-python torchrun -- - -=x env A=b accelerate launch"
FRAGMENTS += " --nnodes --nn -mr -W"
WORDS = st.lists(
    st.sampled_from(["", "torchrun t.py &&", *FRAGMENTS.split()]) | st.text(max_size=8), max_size=8
)


@given(WORDS)
def test_any_words_can_be_read(words: list[str]) -> None:
    remarks(words)
    assert len(calls(words)) < 50


@given(WORDS, WORDS)
def test_what_follows_a_script_changes_nothing_before_it(head: list[str], tail: list[str]) -> None:
    before = split([*head, "t.py"], elastic_run=True)
    after = split([*head, "t.py", *tail], elastic_run=True)
    if before.script:
        assert after.flags == before.flags
        assert after.script == (*before.script, *tail)


def test_flags_are_found_whatever_the_shell_is_told() -> None:
    line = "cd /x  # it's there\nelastic-run --nnodes=2:8 t.py"
    _, found, _ = calls(["bash", "-eo", "pipefail", "-c", line])  # cd, elastic-run, python
    assert found.split.value("--nnodes") == "2:8"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "words",
    [
        ["env"] * 400_000,
        ["A=1"] * 400_000,
        ["elastic-run", *["--x"] * 400_000],
        ["elastic-run"] * 400_000,
        ["sh", "-c", "\n" * 1_500_000],
        ["sh", "-c", "env " * 400_000],
        ["torchrun", "-" + "1" * 1_500_000],
    ],
)
def test_a_command_of_an_objects_largest_size_is_read_at_once(words: list[str]) -> None:
    """An API server stores 1.5 MB. The operator reads it in its loop: hours would end it."""
    # no assert: the time limit of the test fails if it is slow
    for _ in range(10):
        calls(words)


@pytest.mark.parametrize(
    "word", ["env", "elastic-run", "A=b", "env -x", "sh -c", "python -m", "--"]
)
def test_a_line_that_is_made_to_be_slow_to_read_is_read(word: str) -> None:
    """The operator reads the command of each job: 5,000 times `env` held it up for a minute."""
    words = (f"{word} " * 200_000).split()
    assert len(calls(words)) < 50
    remarks(["sh", "-c", f"{word} " * 2000])
