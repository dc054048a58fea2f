"""Permissions that the master lacks."""

import asyncio
import contextlib
from collections.abc import Iterator

from dlrover_py.kubernetes.errors import ForbiddenError, KubeError
from dlrover_py.master.platform.kubernetes.context import JobContext
from dlrover_py.protocol.errors import TransientError, UnauthorizedError

UNCHECKED = (TransientError, UnauthorizedError)
"""Errors of requests whose permission the API server has not checked."""


class Rights:
    """The permissions that are missing, and since when."""

    def __init__(self, context: JobContext) -> None:
        """Start with no missing permission.

        Args:
            context: The job.
        """
        self._facts, self._start_s = context.facts, context.timing.api_server_start_s
        self._denials: dict[str, str] = {}
        """Missing permissions, with the message of the API server."""
        self._denied_since: dict[str, float] = {}
        """Since when each permission is missing, by the event loop's clock."""

    def on_error(self, what: str, error: KubeError | None) -> None:
        """Note a missing permission, or that it is there again; the status is then published again.

        An error that comes before the check of permissions (no answer, too many requests, refused
        credentials) does not show that a permission is there that was reported as missing. Any
        other error does, and any error does while the lack may be brief.

        Args:
            what: The permission, in words.
            error: The refusal; None if the call works.
        """
        if isinstance(error, ForbiddenError):
            self._denials[what] = str(error)
            self.may_be_temporary(what)
        elif not (isinstance(error, UNCHECKED) and self._is_reported(what)):
            self._denials.pop(what, None)
            self._denied_since.pop(what, None)
        self._facts.conditions_changed()

    def may_be_temporary(self, what: str) -> bool:
        """Return whether a permission is missing only briefly, as when the API server starts.

        The first call for a permission starts its time, and has the status published again after
        ``api_server_start_s`` seconds. The result is True until then.
        """
        loop = asyncio.get_running_loop()
        if what not in self._denied_since:
            self._denied_since[what] = loop.time()
            loop.call_later(self._start_s, self._facts.conditions_changed)
        return loop.time() < self._denied_since[what] + self._start_s

    def _is_reported(self, what: str) -> bool:
        """Return whether the permission is among those that :meth:`missing` describes."""
        return what in self._denials and not self.may_be_temporary(what)

    def note_not_denied(self, what: str) -> None:
        """Note that a call with the permission was not refused for its lack.

        Only the time of :meth:`may_be_temporary` begins again. A condition that reports the
        permission stays until :meth:`note_granted`.
        """
        self._denied_since.pop(what, None)

    @contextlib.contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Report a permission that the body of the ``with`` lacks as a condition, until it is back.

        The condition appears only when the permission has been missing for ``api_server_start_s``
        seconds.

        Raises:
            TransientError: The permission is missing.
        """
        try:
            yield
        except ForbiddenError as error:
            self.on_error(what, error)
            raise TransientError(str(error)) from error
        self.note_granted(what)

    def note_granted(self, what: str) -> None:
        """Note that the permission exists or is not needed any more.

        Nothing happens if it was not reported as missing.
        """
        if what in self._denials:
            self.on_error(what, None)

    def missing(self) -> list[str]:
        """Describe the permissions that are missing for ``api_server_start_s`` seconds or longer.

        The call starts the time of a permission that has none.
        """
        return [
            f"{what}: {message}"
            for what, message in self._denials.items()
            if not self.may_be_temporary(what)
        ]


def deletion_of(pod: str) -> str:
    """Return the name of a permission, as a condition shows it."""
    return f"deletion of Pod {pod}"
