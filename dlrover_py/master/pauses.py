"""The pauses of the master after calls that have failed."""

from dlrover_py.pacing import Backoff
from dlrover_py.protocol.errors import TransientError

RETRY = Backoff(first_s=0.05, most_s=2.0)
"""Pauses after failures of a call."""


def pause_s(tries: int, error: TransientError | None = None) -> float:
    """Return the seconds to wait after this many failures; the caller sleeps.

    The time is random within limits, because a thousand masters may fail at the same moment. It is
    at least the ``retry_after`` of the error. The limits double with each failure, up to 2 s.

    Args:
        tries: Number of failures in a row before the present one.
        error: The present failure; None if nobody asked for a longer wait.
    """
    wait_s = RETRY.delay_s(tries)
    return wait_s if error is None else max(wait_s, error.retry_after)
