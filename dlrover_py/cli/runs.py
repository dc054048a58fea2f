"""The folders of past runs on this machine: which there are, and how they are removed."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrover_py.owner import STATE_HINT, is_own
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.status import JobStatus

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LEAVING = ".removed-"
"""Prefix of a folder that is being removed."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job that has ended."""

    folder: Path
    name: str
    """Of the job."""
    ended_at: float
    """Unix seconds."""
    status: JobStatus | None
    """The last one; None if the run was killed before it could be written."""


def ended(state_root: Path) -> list[Run]:
    """The runs that have ended, the newest first.

    Raises:
        ConfigError: another user could have put them there.
    """
    found: list[Run] = []
    if not is_own(state_root, shared=True, hint=STATE_HINT):
        return found
    with contextlib.suppress(OSError):
        for folder in state_root.iterdir():
            name, at, _ = folder.name.rpartition("@")
            if not at or name.startswith(".") or folder.is_symlink():
                continue
            with contextlib.suppress(OSError):
                if (run := _ended(folder, name)) is not None:
                    found.append(run)
    return sorted(found, key=lambda run: run.ended_at, reverse=True)


def _ended(folder: Path, name: str) -> Run | None:
    status = None
    with contextlib.suppress(FileNotFoundError, ValueError):
        status = JobStatus.model_validate_json((folder / names.STATUS_FILE).read_text())
    with _held(folder) as held:
        if not held:
            return None
    if status is not None and status.ended_at is not None:
        return Run(folder, name, status.ended_at, status)
    return Run(folder, name, folder.stat().st_mtime, status)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether the run has ended. A folder without a lock file has, if its last status is there."""
    try:
        lock = os.open(folder / names.RUN_LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield (folder / names.STATUS_FILE).exists()
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(lock)


def to_remove(
    runs: Sequence[Run], *, jobs: Sequence[str], older_than_s: float | None, keep: int, now: float
) -> list[Run]:
    """Choose runs; each condition leaves fewer.

    Args:
        runs: those that have ended, the newest first.
        jobs: names of jobs; empty: of all.
        older_than_s: only runs that ended longer ago, in seconds.
        keep: so many of each job stay, the newest.
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
    """Remove the folder of a run; return False if it is in use after all.

    Raises:
        ConfigError: it cannot be removed.
    """
    try:
        with _held(run.folder) as held:
            if not held:
                return False
            leaving = run.folder.with_name(LEAVING + run.folder.name)
            run.folder.rename(leaving)
        shutil.rmtree(leaving)
    except FileNotFoundError:
        return False  # somebody else was faster
    except OSError as error:
        raise ConfigError(f"{error.filename or run.folder}: {error.strerror}") from error
    return True


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, file)).st_size
    return total


def seconds(text: str) -> float:
    """``90s``, ``30m``, ``12h``, ``7d``, ``2w`` in seconds.

    Raises:
        ConfigError: it is no such time.
    """
    match = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    if match is None:
        raise ConfigError(f"found {text!r}, expected a time such as 12h, 7d or 2w")
    return int(match[1]) * _UNITS[match[2]]
