"""Run a program to its end, and say in one error what it said."""

import fcntl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class LabError(Exception):
    """Something of the lab did not work; says what."""


def run(
    *argv: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    within_s: float = 120,
) -> str:
    """Standard output of a program; LabError with its words if it fails."""
    command = [str(a) for a in argv]
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(command)}: not done within {within_s:g} s") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise LabError(f"{' '.join(command)}: exit code {done.returncode}: {said}")
    return done.stdout


def try_run(*argv: str | Path) -> bool:
    """Whether a program went well."""
    try:
        run(*argv)
    except (LabError, OSError):
        return False
    return True


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold a file's lock: of two sessions one waits."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tail(log: Path, lines: int = 8) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"(no {log})"
