"""``dlrover data …``: check which samples a training has trained."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dlrover_py.checkpoint.directory import address
from dlrover_py.cli import view
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job_view import JobView
from dlrover_py.protocol.words import counted

if TYPE_CHECKING:
    from dlrover_py.trainer.data.ledger_report import EpochReport, LedgerReport


@click.group()
def data() -> None:
    """Check the samples of a training."""


def ledger_of(job: JobView) -> Path:
    """Return the folder of a job's ledger, which lies beside its checkpoints.

    Args:
        job: what is known of the job.

    Raises:
        ConfigError: it is not known, or cannot be read from here, or the directory is no address.
    """
    folders: dict[str, str] = {}
    last = job.status.last_checkpoint if job.status is not None else None
    if last is not None and last.folder:
        folders[last.folder.rpartition("/")[0]] = "the folder of its newest stored checkpoint"
    if given := _directory(job.document):
        try:
            folders.setdefault(address(given), "its spec.checkpoint.dir")
        except ConfigError:
            if not folders:
                raise
    missed = []
    for folder, what in folders.items():
        place = Path(folder) / "ledger"
        if "://" in folder:
            missed.append(f"  {folder}, {what}: a ledger is in a folder, not behind an address")
        elif os.path.isdir(place):  # False also if another user's folder hides it
            return place
        else:
            missed.append(f"  {place}, in {what}: it is not there, or not readable")
    looked = missed or ["  it has no spec.checkpoint.dir, and its status names no checkpoint"]
    raise ConfigError(
        "\n".join(
            [
                f"job {job.name}: expected its ledger beside its checkpoints, found:",
                *looked,
                "give the folder of the ledger: dlrover data verify DIR; if only the job's nodes "
                "have that folder, run the command on one of them",
            ]
        )
    )


def _directory(document: Mapping[str, object]) -> str:
    """Return ``spec.checkpoint.dir`` of a job; empty if there is none.

    Args:
        document: everything that is known of the job.
    """
    found: object = document
    for key in ("job", "spec", "checkpoint", "dir"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else ""


def print_report(directory: Path, *, as_json: bool) -> bool:
    """Check the ledger in a folder, print what it proves, and return whether that is all.

    Args:
        directory: the ledger, or a folder with it in its folder ``ledger``.
        as_json: print JSON instead of text.

    Raises:
        ConfigError: there is no ledger, or it needs torch, which is not installed.
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
    return report.exact


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
    """Return what is known of an epoch, or of a partition, in words."""
    state = "finished" if epoch.finished else "in progress"
    unit, name, so_far = "sample", f"epoch {epoch.epoch}", "so far"
    if epoch.partition:
        unit, name = "unit", f"partition {view.plain(epoch.partition)}"
        so_far = f"up to the watermark {epoch.samples}"
    if epoch.exact:
        all_of = f"all {counted(epoch.samples, unit)}"
        word = f"{all_of} once" if epoch.finished else f"exact {so_far}"
        if epoch.repeated:  # as the guarantee allows
            word = (
                f"{all_of if epoch.finished else so_far}, {epoch.repeated} of them more than once"
            )
        return [f"{name}: {state}: {word}"]
    words = {
        "missing": (epoch.missing, "not in the ledger"),
        "repeated": (epoch.repeated, "trained more than once"),
        "unproven": (epoch.unproven, "in steps whose record is missing or has other samples"),
    }
    lines = [f"{name}: {state}: NOT EXACT"]
    for kind, (number, text) in words.items():
        if number:
            lines.append(f"  {counted(number, unit)} {text}: {epoch.names(kind)}")
    return lines
