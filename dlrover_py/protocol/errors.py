"""The errors that cross a border between two modules or two programs.

::

    DLRoverError
    ├── ConfigError           the user must act: bad file, flag or environment       exit 2
    │   └── UnsupportedError  a valid file for training that is not supported yet
    ├── TransientError        the same call may succeed later
    │   ├── FileLimitError    this process may open no more files
    │   └── UnreachableError  no answer from the address before the deadline         exit 4
    ├── SupersededError       a newer term, round or incarnation exists: stop        exit 3
    ├── UnauthorizedError     the token or the peer's certificate was refused        exit 4
    ├── CheckpointError       a checkpoint could not be read: what was tried, what to do
    ├── KubeError             the Kubernetes API server refused a request
    │                         (dlrover_py.kubernetes.errors, with subclasses of its own)
    └── InvariantError        a bug: crash, the journal stays                        exit 70

Each message says what was expected, what was found, and what to do.
"""

import resource
from collections.abc import Iterable
from enum import IntEnum, StrEnum

from dlrover_py.protocol.words import without_passwords


class ExitCode(IntEnum):
    """Exit codes of DLRover-Py's programs. 1: the training failed, as with torchrun."""

    OK = 0
    FAILED = 1
    USAGE = 2
    SUPERSEDED = 3
    UNREACHABLE = 4
    BUG = 70


class ErrorCode(StrEnum):
    """The ``code`` in the body of an error reply."""

    UNAUTHORIZED = "unauthorized"
    SUPERSEDED = "superseded"
    TOO_LARGE = "too_large"
    INVALID = "invalid"
    PASSIVE = "passive"
    CONFLICT = "conflict"
    NOT_FOUND = "not_found"


class DLRoverError(Exception):
    """Base class of all errors of DLRover-Py.

    What to do: catch it to catch all of them. The message says what to do.
    """

    exit_code = ExitCode.FAILED
    """The exit code of a program that ends with this error."""


class ConfigError(DLRoverError):
    """An input of the user cannot be used. Nothing was changed.

    What to do: correct the file, flag, argument or variable that the message names.
    """

    exit_code = ExitCode.USAGE


class UnsupportedError(ConfigError):
    """A job that DLRover runs and that DLRover-Py does not run yet.

    What to do: change what the message names, or run this job with DLRover.
    """


class TransientError(DLRoverError):
    """The same call may succeed later.

    What to do: repeat the call, not before its ``retry_after`` seconds have passed.
    """

    retry_after: float = 0.0
    """Seconds for which the server asked the caller not to repeat the call."""


class UnreachableError(TransientError):
    """The address did not answer before the deadline.

    What to do: see whether the program at the address runs and this machine reaches it; repeat the
    call.
    """

    exit_code = ExitCode.UNREACHABLE


USUAL_FILES = 256
"""Limit of open files that is enough for an agent with 8 workers, which needs about 60."""


class FileLimitError(TransientError):
    """This process has as many open files as its limit (``ulimit -n``) allows.

    What to do: raise the limit to what the message says.
    """

    def __init__(self, message: str) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        super().__init__(
            f"{message}; this process may have {limit} open files (ulimit -n): expected at least "
            f"{max(USUAL_FILES, 2 * limit)}"
        )


class SupersededError(DLRoverError):
    """A newer term, round or incarnation exists: the caller must stop, and must not retry.

    What to do: nothing. The newer program goes on with the work.
    """

    exit_code = ExitCode.SUPERSEDED


class UnauthorizedError(DLRoverError):
    """The token was refused, or the certificate of the peer cannot be verified.

    What to do: take the token file and the certificate of this job, or the kubeconfig of this
    cluster.
    """

    exit_code = ExitCode.UNREACHABLE


class CheckpointError(DLRoverError):
    """A checkpoint that exists could not be read completely.

    What to do: follow the message. ``dlrover ckpt verify`` finds what is damaged.
    """


class InvariantError(DLRoverError):
    """An invariant of DLRover-Py does not hold: this is a bug.

    What to do: report it with the log.
    """

    exit_code = ExitCode.BUG


_KINDS = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


def shown(value: object) -> str:
    """Return a value for an error message: its kind in words, and at most 60 of its characters.

    None is ``nothing``. Control characters are escaped, and passwords of addresses are hidden.
    """
    if value is None:
        return "nothing"
    text = without_passwords(repr(value))
    kind = _KINDS.get(type(value), type(value).__name__)
    return f"{kind} {text if len(text) <= 60 else text[:57] + '…'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint about a name that is not among the known ones.

    It is the closest known one, or advice to check the spelling. Upper and lower case do not count.
    """
    import difflib  # rarely needed

    by_lower_case = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f"did you mean {by_lower_case[close[0]]}?" if close else "check its spelling"
