"""The folders of past runs on this machine: find them and remove them."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from dlrover_py.cli.evidence import snapshot_in_copies, with_copies
from dlrover_py.process.blocking import read_regular
from dlrover_py.process.ownership import STATE_HINT, is_own
from dlrover_py.protocol import names
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import EvidenceManifest, JobEvent, JobStatus

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Seconds in each unit of a duration."""
_STAMP = "%Y%m%d-%H%M%S"
"""Time in the name of a run's folder, in this machine's time zone, without its milliseconds."""
MAX_DOCUMENT_BYTES = 1 << 26
"""Bytes of the largest document in the folder of a run."""
D = TypeVar("D", bound=BaseModel)
REMOVED_PREFIX = ".removed-"
"""Prefix of the name of a folder that is being removed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job that has ended."""

    folder: Path
    """State folder of the run."""
    name: str
    """Name of the job."""
    ended_at: float
    """End of the run, in Unix seconds."""
    status: JobStatus | None
    """The last status; None if the run was killed before it was written, or it is damaged."""
    damage: str = ""
    """Why the last status cannot be read; empty if it can, or if there is none."""

    @property
    def state(self) -> Literal["ended", "damaged", "killed"]:
        """How the run has ended: ``ended``, ``damaged`` or ``killed``."""
        return "damaged" if self.damage else "ended" if self.status is not None else "killed"


def read_document(path: Path, kind: type[D]) -> D:
    """Return a document from the folder of a run.

    Args:
        path: file of the document. A pipe or a device is not opened.
        kind: model of the document.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file is damaged, or cannot be read.
    """
    hint = "remove the run with `dlrover job rm`, or read its logs with `dlrover job logs`"
    try:
        return kind.model_validate_json(read_regular(path, MAX_DOCUMENT_BYTES))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {hint}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"{place}: {first['msg']}" if place else first["msg"]
        raise ConfigError(f"{path}: it is damaged: {text}; {hint}") from error


def bundles(folder: Path) -> list[EvidenceManifest]:
    """Return the manifests of the bundles of evidence in the folder of a run, the oldest first.

    A bundle without a manifest is left out, as it is still being written. So is a damaged one.
    """
    found = []
    for path in sorted((folder / names.EVIDENCE_FOLDER).glob(f"*/{names.MANIFEST_FILE}")):
        with contextlib.suppress(FileNotFoundError, ConfigError):
            manifest = read_document(path, EvidenceManifest)
            found.append(manifest.model_copy(update={"folder": str(path.parent)}))
    return found


def evidence(folder: Path) -> list[EvidenceManifest]:
    """Return the bundles of a run, with those that only the bucket of its job has."""
    return with_copies(bundles(folder), _job_of(folder), folder.name)


def _job_of(folder: Path) -> ElasticJob | None:
    """Return the job of a run; None if its file is missing or damaged."""
    with contextlib.suppress(FileNotFoundError, ConfigError):
        return read_document(folder / names.JOB_FILE, ElasticJob)
    return None


class _JournalEvents(BaseModel):
    """The part of a master's journal that is read here. Its other fields are ignored."""

    events: list[JobEvent] = []


def journal_events(folder: Path) -> list[JobEvent]:
    """Return the events in the journal of a run's master, oldest first.

    None are returned if there is no journal, or it cannot be read.
    """
    with contextlib.suppress(FileNotFoundError, ConfigError):
        return read_document(folder / names.JOURNAL_FILE, _JournalEvents).events
    return []


def node_snapshot(folder: Path, node: str) -> NodeSnapshot | None:
    """Return a node's part of the newest bundle that has one; None if there is none.

    Args:
        folder: folder of the run.
        node: id of the node.
    """
    if not re.fullmatch(names.NODE_ID, node):
        return None
    paths = (folder / names.EVIDENCE_FOLDER).glob(f"*/{node}.json")
    for path in sorted(paths, reverse=True):
        with contextlib.suppress(FileNotFoundError, ConfigError):
            return read_document(path, NodeSnapshot)
    return snapshot_in_copies(node, _job_of(folder), folder.name)


def ended(state_root: Path | None) -> list[Run]:
    """Return the runs that have ended, the newest first; none if no folder is known or exists.

    Folders that cannot be read are left out. A damaged status is reported in the run.

    Raises:
        ConfigError: another user could have made the folders.
    """
    found: list[Run] = []
    if state_root is None or not is_own(state_root, shared=True, hint=STATE_HINT):
        return found
    for folder, name in _folders(state_root):
        with contextlib.suppress(OSError):
            if (run := _ended_run(folder, name)) is not None:
                found.append(run)
    return sorted(found, key=lambda run: run.ended_at, reverse=True)


def _folders(state_root: Path) -> list[tuple[Path, str]]:
    """Return the folder of each run with the name of its job; none if they cannot be listed."""
    found = []
    with contextlib.suppress(OSError):
        for folder in state_root.iterdir():
            name, at, _ = folder.name.rpartition("@")
            if at and not name.startswith(".") and not folder.is_symlink():
                found.append((folder, name))
    return found


def newest(state_root: Path | None, name: str | None) -> Path | None:
    """Return the folder of the run that began last, of those that have ended; None if none has.

    A run that was killed before it had a last status has ended, too.

    Args:
        state_root: folder of all runs; None if it is not known.
        name: name of the job; None for any job.

    Raises:
        ConfigError: another user could have made the folders.
    """
    if state_root is None or not is_own(state_root, shared=True, hint=STATE_HINT):
        return None
    of_job = [folder for folder, job in _folders(state_root) if name in (None, job)]
    for folder in sorted(of_job, key=lambda path: path.name.rpartition("@")[2], reverse=True):
        with contextlib.suppress(OSError):
            if (folder / names.STATUS_FILE).exists() or was_killed(folder):
                return folder
    return None


def stamps(state_root: Path | None, name: str) -> list[str]:
    """Return when the runs of a job began, as the names of their folders say it, newest first.

    Args:
        state_root: folder of all runs; None if it is not known.
        name: name of the job.

    Raises:
        ConfigError: another user could have made the folders.
    """
    if state_root is None or not is_own(state_root, shared=True, hint=STATE_HINT):
        return []
    found = (folder.name for folder, job in _folders(state_root) if job == name)
    return sorted((text.rpartition("@")[2] for text in found), reverse=True)


def stamp_of(at: datetime) -> str:
    """Return how the name of a run's folder has the time at which it began."""
    return at.strftime(f"{_STAMP}.%f")[:-3]


def began_at(stamp: str) -> float:
    """Return the Unix time at which a run began, from the name of its folder.

    Raises:
        ValueError: the name has no time.
    """
    return datetime.strptime(stamp, f"{_STAMP}.%f").astimezone().timestamp()


def was_killed(folder: Path) -> bool:
    """Return whether the process of a run has ended without leaving a last status.

    Raises:
        OSError: the folder cannot be read.
    """
    with _locked(folder, fcntl.LOCK_SH) as locked:  # first: it may end in the meantime
        return locked and not (folder / names.STATUS_FILE).exists()


def goes_on(folder: Path) -> bool:
    """Return whether the process of a run still holds the lock of its folder."""
    with contextlib.suppress(OSError), _locked(folder, fcntl.LOCK_SH) as has_ended:
        return not has_ended and not (folder / names.STATUS_FILE).exists()
    return False


def _ended_run(folder: Path, name: str) -> Run | None:
    """Return the run of a folder; None if it still runs, or has neither a lock file nor a status.

    Without a time in the status, the run ended when its folder last changed. A damaged status is
    noted in the result.

    Args:
        folder: state folder of the run.
        name: name of the job.

    Raises:
        OSError: the folder cannot be read.
    """
    status, damage = None, ""
    with _locked(folder, fcntl.LOCK_SH) as locked:  # first: it may end in the meantime
        if not locked:
            return None
    try:
        status = read_document(folder / names.STATUS_FILE, JobStatus)
    except FileNotFoundError:
        pass
    except ConfigError as error:
        damage = str(error)
    if status is not None and status.ended_at is not None:
        return Run(folder, name, status.ended_at, status)
    return Run(folder, name, folder.stat().st_mtime, status, damage)


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[bool]:
    """Lock the folder of a run for the block, without waiting; yield whether the run has ended.

    The run counts as going on if another process holds the lock. A folder without a lock file
    belongs to an ended run if it has a last status; such a folder is not locked.

    Args:
        folder: state folder of the run.
        kind: ``fcntl.LOCK_SH`` to look at it, as several commands can at the same time, or
            ``fcntl.LOCK_EX``.

    Raises:
        OSError: the lock file cannot be opened.
    """
    try:
        lock = os.open(folder / names.RUN_LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield (folder / names.STATUS_FILE).exists()
        return
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def to_remove(
    runs: Sequence[Run], *, jobs: Sequence[str], older_than_s: float | None, keep: int, now: float
) -> list[Run]:
    """Choose the runs to remove, without removing them. Each condition excludes more runs.

    Args:
        runs: ended runs, the newest first.
        jobs: names of jobs; empty for all jobs.
        older_than_s: only runs that ended longer ago, in seconds; None for all runs.
        keep: number of the newest runs of each job that stay.
        now: Unix seconds.
    """
    left: dict[str, int] = {}
    found = []
    for run in runs:
        left[run.name] = left.get(run.name, 0) + 1
        if left[run.name] <= keep or (jobs and run.name not in jobs):
            continue
        if older_than_s is None or now - run.ended_at > older_than_s:
            found.append(run)
    return found


def remove(run: Run) -> bool:
    """Remove the folder of a run; return False, and remove nothing, if it is in use or gone.

    The folder is renamed first. If that is all that succeeds, its rest is no run any more:
    :func:`finish_removals` removes it.

    Raises:
        ConfigError: the folder cannot be removed.
    """
    try:
        with _locked(run.folder, fcntl.LOCK_EX) as locked:
            if not locked:
                return False
            renamed = run.folder.with_name(REMOVED_PREFIX + run.folder.name)
            run.folder.rename(renamed)
        shutil.rmtree(renamed)
    except FileNotFoundError:
        return False  # another command has removed it
    except OSError as error:
        raise ConfigError(f"{error.filename or run.folder}: {error.strerror}") from error
    return True


def finish_removals(state_root: Path | None) -> list[str]:
    """Remove what is left of runs whose removal has failed or was interrupted.

    Args:
        state_root: folder of the runs, which others cannot write to; None if it is not known:
            nothing is removed.

    Returns:
        For each folder that cannot be removed, its path and the reason.
    """
    problems = []
    for rest in state_root.glob(f"{REMOVED_PREFIX}*") if state_root is not None else ():
        try:
            shutil.rmtree(rest)
        except FileNotFoundError:
            continue  # another command removes it
        except OSError as error:
            problems.append(f"{rest}: {error.strerror or error}")
    return problems


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder. What cannot be read counts as 0."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, file)).st_size
    return total


def seconds(text: str) -> float:
    """Convert ``90s``, ``30m``, ``12h``, ``7d`` or ``2w`` to seconds.

    Raises:
        ConfigError: the text has another form.
    """
    match = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    if match is None:
        raise ConfigError(f"found {text!r}, expected a time such as 12h, 7d or 2w")
    return int(match[1]) * _UNITS[match[2]]
