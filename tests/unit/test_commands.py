"""What a command line starts, and what that means for a job."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.commands import calls, remarks, split

RUN = ["python", "-m", "torch.distributed.run"]
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
    (["python", "train.py", "--lr", "0.1"], "python train.py"),
    (["tini", "--", "python", "-X", "dev", "-m", "pkg.train"], "python -m pkg.train"),
    (["sh", "-ec", "export A=1; exec python -u train.py"], "python train.py"),
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


def test_standalone_is_told() -> None:
    assert "leave the flag out" in remarks(["elastic-run", "--standalone", "t.py"])


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
    before = split([*head, "t.py"], ours=True)
    after = split([*head, "t.py", *tail], ours=True)
    if before.script:
        assert after.flags == before.flags
        assert after.script == (*before.script, *tail)
