"""The registry of the agent's child processes.

A session is a group of processes that one process leads. The agent's reaper kills the sessions that
a killed agent leaves behind.
"""

from collections.abc import Iterable
from typing import Protocol

from dlrover_py.process.identity import ProcessId


class SessionObserver(Protocol):
    """Follows the sessions that must end with the agent, to name them to the agent's reaper."""

    def session_started(self, session: ProcessId) -> None:
        """Take note of a new session."""

    def session_ended(self, session: ProcessId) -> None:
        """Take note that a session has ended."""


class ChildRegistry:
    """The agent's child processes: sessions that must end with it, and children of other kinds."""

    def __init__(self, non_worker_pids: Iterable[int] = ()) -> None:
        """Create the registry, without sessions.

        Args:
            non_worker_pids: Process ids of children that exist already.
        """
        self.non_worker_pids = set(non_worker_pids)
        """Process ids of children that are neither workers nor left behind by workers."""
        self.sessions: set[ProcessId] = set()
        """Sessions that must end when the agent ends."""
        self.observer: SessionObserver | None = None
        """Follows the sessions from now on; None if there is no reaper yet."""

    def add_session(self, session: ProcessId) -> None:
        """Register a session that must end with the agent, and inform the reaper of it.

        Without an observer the session is only registered.
        """
        self.sessions.add(session)
        if self.observer is not None:
            self.observer.session_started(session)

    def remove_session(self, session: ProcessId) -> None:
        """Remove a session that has ended, and inform the reaper; an unknown one is no error.

        Without an observer the session is only removed.
        """
        self.sessions.discard(session)
        if self.observer is not None:
            self.observer.session_ended(session)
