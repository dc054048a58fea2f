"""What a watch yields, and how long it waits after its end."""

import asyncio
from collections.abc import (
    Callable,
)
from dataclasses import dataclass
from typing import Generic, TypeVar

from dlrover_py.kubernetes.errors import (
    ForbiddenError,
    KubeError,
    NotFoundError,
    ServerDownError,
    ThrottledError,
    UnauthenticatedError,
)
from dlrover_py.pacing import Backoff

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """All objects of a watch. An object that is not listed no longer exists."""

    items: list[T]


@dataclass(frozen=True, slots=True)
class Changed(Generic[T]):
    """One new or changed object of a watch. The same change may be reported twice."""

    item: T


@dataclass(frozen=True, slots=True)
class Gone(Generic[T]):
    """One deleted object of a watch, in its last state."""

    item: T


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Timeouts and delays of a client. Other values than the defaults are for tests."""

    call_s: float = 30.0
    """Deadline of a call, in seconds."""
    first_wait_s: float = 0.8
    """Delay after the first failure of a watch, in seconds."""
    longest_wait_s: float = 30.0
    """Longest delay after failures, in seconds. Delays double from the first to the longest;
    each is shortened at random, by up to half.
    """
    denied_s: float = 30.0
    """Longest delay, in seconds, between attempts that only a person can help: a right, an
    account or a CRD is missing. The first attempts follow soon, because a starting server
    refuses what it will allow later.
    """
    watch_s: float = 300.0
    """Seconds after which the server ends a watch, spread by a fifth. The next watch continues
    from there.
    """
    stall_s: float = 90.0
    """Seconds without a byte after which a watch counts as broken. A healthy server sends a
    bookmark each minute.
    """
    steady_s: float = 5.0
    """Seconds. A watch that ends sooner counts as a failure; otherwise such watches would become
    a hot loop.
    """


class WatchState:
    """The state of one watch: how long to wait after its end, and what to report to its caller."""

    def __init__(self, times: ClientTimes, on_error: Callable[[KubeError | None], None]) -> None:
        self._times, self._on_error = times, on_error
        self._now = asyncio.get_running_loop().time
        self._failures = 0
        self._error_kind: tuple[object, ...] | None = None
        self._since: float | None = None

    def connected(self) -> None:
        """Note that the server has accepted the watch.

        If an error was reported before, None is reported now: the watch works again.
        """
        self._since = self._now()
        if self._error_kind is not None:
            self._error_kind = None
            self._on_error(None)

    def ended(self) -> float:
        """Note a regular end of the watch; return the seconds to wait before the next one.

        They are 0 if the watch lasted at least ``steady_s``; otherwise they grow as after failures.
        """
        return 0.0 if self._was_steady() else self._backoff()

    def failed(self, error: KubeError) -> float:
        """Note a failure of the watch; return the seconds to wait before the next attempt.

        The caller's ``on_error`` gets the error only if it differs from the last one in its class,
        its HTTP status or its reason. A connection that breaks after the server has accepted the
        watch is no failure: the result is that of :meth:`ended`. The seconds after a
        ThrottledError are at least those that the server has asked for.
        """
        if self._since is not None and isinstance(error, ServerDownError) and not error.status:
            return self.ended()  # an error only if no new connection works
        self._since = None
        kind = (type(error), error.status, error.reason)
        if kind != self._error_kind:
            self._error_kind = kind
            self._on_error(error)
        if isinstance(error, (UnauthenticatedError, ForbiddenError, NotFoundError)):
            return self._backoff(self._times.denied_s)
        wait_s = self._backoff()
        return max(wait_s, error.retry_after) if isinstance(error, ThrottledError) else wait_s

    def _was_steady(self) -> bool:
        """Note the end of the watch; return whether it lasted long enough to count as a success.

        If it did, the delays start again from the first one. A watch that the server has not
        accepted did not. A second call returns False.
        """
        since, self._since = self._since, None
        steady = since is not None and self._now() - since >= self._times.steady_s
        if steady:
            self._failures = 0
        return steady

    def _backoff(self, longest_s: float | None = None) -> float:
        """Return the delay after a failure, in seconds, and double the next one."""
        longest_s = self._times.longest_wait_s if longest_s is None else longest_s
        wait_s = Backoff(self._times.first_wait_s, longest_s).delay_s(self._failures)
        self._failures += 1
        return wait_s
