"""Functions that run a program to its end, with its output in the error."""

import fcntl
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class LabError(Exception):
    """An operation of the lab failed."""


def run(
    *argv: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    within_s: float = 120,
) -> str:
    """Run a program; return its standard output.

    Args:
        argv: the program and its arguments.
        env: environment; None for that of this process.
        cwd: working directory.
        stdin: standard input; None for none.
        within_s: seconds after which the program fails.

    Raises:
        LabError: the program fails. The message has its output.
    """
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
    """Run a program; return whether it succeeded."""
    try:
        run(*argv)
    except (LabError, OSError):
        return False
    return True


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold the lock of a file during the block. A second process waits for it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tail(log: Path, lines: int = 8) -> str:
    """Return the last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return f"(no {log})"
