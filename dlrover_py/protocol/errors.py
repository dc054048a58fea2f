"""The errors that cross a border between two modules or two programs.

::

    DLRoverError
    ├── ConfigError      the user must act: bad file, flag or environment        exit 2
    │   └── Unsupported  a good file of DLRover's, for training that is not run yet
    ├── TransientError   the same call may work later
    │   └── Unreachable  nobody answered at that address until the deadline      exit 4
    ├── Superseded       a newer term, round or incarnation exists: stop         exit 3
    ├── Unauthorized     the token was refused, or who answers not believed      exit 4
    ├── CheckpointError  a checkpoint could not be read: what was tried, and what to do
    ├── KubeError        the Kubernetes API server's refusal (dlrover_py.kube, with its own tree)
    └── Bug              an invariant is broken: crash, the journal stays        exit 70

Each says what was expected, what was found, and what to do.
"""

from collections.abc import Iterable
from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """Exit codes of our programs. 1 is a training failure, as with torchrun."""

    OK = 0
    FAILED = 1
    USAGE = 2
    SUPERSEDED = 3
    UNREACHABLE = 4
    BUG = 70


class ErrorCode(StrEnum):
    """``code`` in the body of an error reply."""

    UNAUTHORIZED = "unauthorized"
    SUPERSEDED = "superseded"
    TOO_LARGE = "too_large"
    INVALID = "invalid"
    PASSIVE = "passive"
    CONFLICT = "conflict"
    NOT_FOUND = "not_found"


class DLRoverError(Exception):
    """Root of the tree."""

    exit_code = ExitCode.FAILED


class ConfigError(DLRoverError):
    """What the user gave cannot be used; nothing was changed."""

    exit_code = ExitCode.USAGE


class Unsupported(ConfigError):
    """A job that DLRover runs and that is not run here yet."""


class TransientError(DLRoverError):
    """The same call may work later."""

    retry_after: float = 0.0
    """It was asked not to be repeated for so long."""


class Unreachable(TransientError):
    """Nobody answered at the address until the deadline."""

    exit_code = ExitCode.UNREACHABLE


class Superseded(DLRoverError):
    """A newer term, round or incarnation exists: the caller must stop, and not retry."""

    exit_code = ExitCode.SUPERSEDED


class Unauthorized(DLRoverError):
    """The token was refused, or the certificate of who answers is not to be believed."""

    exit_code = ExitCode.UNREACHABLE


class CheckpointError(DLRoverError):
    """A checkpoint that exists could not be read as a whole."""


class Bug(DLRoverError):
    """An invariant of ours is broken."""

    exit_code = ExitCode.BUG


_KINDS = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "nothing",
}


def shown(value: object) -> str:
    """A value in an error message: its kind in words, and the first of its characters."""
    text = repr(value)
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{kind} {text if len(text) <= 60 else text[:57] + '…'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to do about a name that is not among the known ones."""
    import difflib  # rarely needed

    small = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), small, n=1)
    return f"did you mean {small[close[0]]}?" if close else "check its spelling"
