"""Refusals of the API server, and the errors that they become."""

from collections.abc import (
    Mapping,
)
from typing import Final

from dlrover_py.kubernetes.kinds import Obj
from dlrover_py.pacing import random_delay_s
from dlrover_py.protocol.errors import (
    DLRoverError,
    ExitCode,
    TransientError,
    UnauthorizedError,
    UnreachableError,
)


class KubeError(DLRoverError):
    """A refusal of the API server, with its message.

    What to do: follow the message. Its subclasses tell the reasons apart.
    """

    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        """Keep the message and the codes of a refusal.

        Args:
            message: the server's message.
            status: HTTP status code; 0 if there was no answer.
            reason: machine-readable reason of the Kubernetes ``Status`` object.
        """
        super().__init__(message)
        self.status, self.reason = status, reason


class NotFoundError(KubeError):
    """There is no such object, or no such kind."""


class AlreadyExistsError(KubeError):
    """Another object has this name."""


class NameConflictError(KubeError):
    """Another object has this name, and the expected owner does not own it."""


class LeftoverError(NameConflictError):
    """This name belongs to an object of a deleted owner with the same name as the present owner.

    Kubernetes will remove that object soon.
    """


class ConflictError(KubeError):
    """The object has changed since it was read."""


class ForbiddenError(KubeError):
    """This account lacks the right, or a quota or a policy forbids the call."""


class UnauthenticatedError(KubeError, UnauthorizedError):
    """The API server does not accept the credentials."""

    exit_code = ExitCode.USAGE


class InvalidError(KubeError):
    """The API server refuses the object's content."""


class ExpiredError(KubeError):
    """The server no longer keeps the requested resource version."""


LONGEST_RETRY_S = 60.0
"""Longest ``Retry-After`` that is obeyed, in seconds. A proxy may ask for an hour, but the
journal of the master waits for this call.
"""


class ThrottledError(KubeError, TransientError):
    """The API server has too many requests.

    It sends the same ``Retry-After`` to a thousand clients at the same time. They must not all
    return at the same moment, so the delay is spread.
    """

    def __init__(self, message: str, *, retry_after: float, reason: str = "") -> None:
        """Keep the message and the delay.

        :attr:`retry_after` is the server's delay, at most 60 s, made longer by up to a quarter at
        random.

        Args:
            message: the server's message.
            retry_after: seconds that the server asks the client to wait.
            reason: machine-readable reason of the Kubernetes ``Status`` object.
        """
        super().__init__(message, status=429, reason=reason)
        after = min(retry_after, LONGEST_RETRY_S)
        self.retry_after = random_delay_s(after, 1.25 * after)


class ServerDownError(KubeError, UnreachableError):
    """The API server did not answer, or its answer shows a server failure."""


_BY_STATUS: Final[Mapping[int, type[KubeError]]] = {
    400: InvalidError,
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    408: ServerDownError,
    409: ConflictError,
    410: ExpiredError,
    422: InvalidError,
}


def refusal_of(code: int, status: Obj, path: str, retry_after: float = 1.0) -> KubeError:
    """Return the error of a Kubernetes ``Status`` object, with its message. Nothing is raised.

    A code from 500 on becomes ``ServerDownError``. A code without a class of its own becomes
    ``KubeError``.

    Args:
        code: HTTP status code.
        status: the object.
        path: API path of the call, for the message.
        retry_after: seconds that the server asks the client to wait; used for the code 429 only.
    """
    message = status.get("message") or f"HTTP {code} without a message ({path})"
    reason = status.get("reason") or ""
    if code == 429:
        return ThrottledError(message, retry_after=retry_after, reason=reason)
    if code == 409 and reason == "AlreadyExists":
        return AlreadyExistsError(message, status=code, reason=reason)
    kind = _BY_STATUS.get(code, ServerDownError if code >= 500 else KubeError)
    return kind(message, status=code, reason=reason)
