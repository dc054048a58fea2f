"""All commands of `dlrover`, walked as click has them."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dlrover_py.cli.commands import main, root


def commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands below this one, each with its words."""
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")


def test_each_number_has_a_lower_bound() -> None:
    """`dlrover job logs --rank -1` was accepted."""
    found = 0
    for words, command in commands(root, "dlrover"):
        for param in command.params:
            kind = param.type
            assert kind not in (click.INT, click.FLOAT), (words, param.name)
            if isinstance(kind, click.IntRange | click.FloatRange):
                assert kind.min is not None, (words, param.name)
                found += 1
    assert found > 10


@pytest.mark.parametrize(
    "words",
    [
        ["job", "logs", "--rank", "-1"],
        ["job", "logs", "--round", "0"],
        ["job", "why", "--round", "-1"],
        ["ps", "serve", "--replicas", "3", "--", "true"],
    ],
)
def test_a_number_outside_its_bounds_is_refused(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "is not in the range" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("job scale 3 digits", "found 'digits', expected no further word"),
        ("job scale digits 3", "found 'digits', expected a number of nodes"),
        ("node kill n0 digits", "found 'digits', expected no further word"),
        ("node add digits", "found 'digits', expected no further word"),
    ],
)
def test_the_name_of_a_job_in_the_place_of_another_word_is_led_to_its_flag(
    words: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert f"{said}; a job's name follows --job" in capfd.readouterr().err


NAMED = [
    *(f"job {verb} NOSUCH" for verb in (
        "checkpoint", "curves", "describe", "events", "evidence", "get", "goodput", "logs",
        "report", "restart", "resume", "rm --yes", "stacks", "stop", "suspend", "why",
    )),
    *("job delete --yes NOSUCH", "job scale 2 --job NOSUCH", "job tune NOSUCH --micro-batch 2"),
    *(f"node {verb} n0 --job NOSUCH" for verb in ("drain", "freeze", "kill", "thaw")),
    *("node add --job NOSUCH", "dashboard NOSUCH", "job run NOSUCH", "job submit NOSUCH"),
    *(f"ckpt {verb} NOSUCH" for verb in ("ls", "show", "verify", "rm --yes --keep 1")),
    *("ckpt export NOSUCH out", "cache rm NOSUCH", "data verify NOSUCH"),
    *("ps export NOSUCH --to out.pt", "ps serve --checkpoints NOSUCH --restore newest -- true"),
    *(f"ps {verb} NOSUCH" for verb in ("map", "rebalance", "stats")),
    "ps drain ps0 --job NOSUCH",
]  # fmt: skip
"""A call of each command that takes a name, with a name that is not there."""


@pytest.mark.parametrize("call", NAMED)
def test_a_name_that_is_not_there_is_an_error(
    call: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """`dlrover job rm NOSUCH` ended with 0."""
    for name in ("DLROVER_STATE_DIR", "DLROVER_RUNTIME_DIR", "DLROVER_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    assert main(call.split()) == 2
    said = capfd.readouterr().err
    assert "NOSUCH" in said, said
    assert not (tmp_path / "NOSUCH").exists(), "a command that reads makes no folder"


def test_each_command_with_a_name_is_called_above() -> None:
    called = {tuple(w for w in call.split() if w.islower() and w.isalpha()) for call in NAMED}
    for words, command in commands(root, ""):
        takes = [p for p in command.params if isinstance(p, click.Argument) or p.name == "name"]
        if takes and not isinstance(command, click.Group) and not words.startswith(" cluster"):
            path = tuple(words.split())
            assert any(one[: len(path)] == path for one in called), words
