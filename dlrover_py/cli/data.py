"""``dlrover data …``: check which samples a training has trained."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlrover_py.cli import view
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.words import counted

if TYPE_CHECKING:
    from dlrover_py.trainer.data.ledger_report import EpochReport, LedgerReport


@click.group()
def data() -> None:
    """Check the samples of a training."""


@data.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def verify(directory: Path, as_json: bool) -> int:
    """Prove that each sample of each finished epoch was trained once.

    DIR is the folder of ElasticLoader(ledger=…) or of ShardLoader.keep_ledger(…), or a folder with
    it in its folder "ledger". The training may be running. Steps that were lost with a failure and
    trained again count once. The exit code is 1 if a sample was left out or trained twice, or if
    that cannot be proven.

    \f

    Args:
        directory: the folder.
        as_json: print JSON instead of text.

    Raises:
        ConfigError: there is no ledger, or torch is not installed.
    """
    report = _checked(directory)
    if as_json:
        epochs = [asdict(each) | {"exact": each.exact} for each in report.epochs]
        document = {"exact": report.exact, "steps": report.steps, "epochs": epochs}
        found = {"problems": report.problems, "faults": report.faults}
        click.echo(json.dumps(document | found))
    else:
        for epoch in report.epochs:
            for line in _lines(epoch):
                click.echo(line)
        for fault in report.faults:
            click.echo(view.plain(f"NOT PROVEN: {fault}"))
        for problem in report.problems:
            click.echo(view.plain(f"note: {problem}"))
    return 0 if report.exact else 1


def _checked(directory: Path) -> "LedgerReport":
    """Check the ledger in a folder.

    Raises:
        ConfigError: there is no ledger, or it needs torch, which is not installed.
    """
    from dlrover_py.trainer.data import verify_shards

    if verify_shards.is_shard_ledger(directory):
        return verify_shards.verify(directory)
    try:
        from dlrover_py.trainer.data.verify import verify as check
    except ModuleNotFoundError as error:
        raise ConfigError(
            "dlrover data verify needs torch, which is not installed: install DLRover-Py with its "
            "extra torch"
        ) from error
    return check(directory)


def _lines(epoch: "EpochReport") -> list[str]:
    """Return what is known of an epoch, in words."""
    state = "finished" if epoch.finished else "in progress"
    if epoch.exact:
        word = f"all {counted(epoch.samples, 'sample')} once" if epoch.finished else "exact so far"
        if epoch.repeated:  # as the guarantee allows
            all_of = f"all {counted(epoch.samples, 'sample')}" if epoch.finished else "so far"
            word = f"{all_of}, {epoch.repeated} of them more than once"
        return [f"epoch {epoch.epoch}: {state}: {word}"]
    words = {
        "missing": (epoch.missing, "not in the ledger"),
        "repeated": (epoch.repeated, "trained more than once"),
        "unproven": (epoch.unproven, "in steps whose record is missing or has other samples"),
    }
    lines = [f"epoch {epoch.epoch}: {state}: NOT EXACT"]
    for kind, (number, text) in words.items():
        if number:
            lines.append(f"  {counted(number, 'sample')} {text}: {epoch.names(kind)}")
    return lines
