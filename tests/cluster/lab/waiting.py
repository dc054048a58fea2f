"""A wait for a condition under a deadline."""

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T | Literal[False] | None],
    what: str,
    *,
    within_s: float = 120.0,
    every_s: float | None = None,
) -> T:
    """Call a function until its result is true, and return the result.

    Args:
        condition: the function.
        what: what is waited for, for the error message.
        within_s: seconds after which it fails, with the last result in the message.
        every_s: seconds between two calls; None for pauses that grow from 0.1 to 0.5 s, because
            many a call starts kubectl, which takes a tenth of a second of processor time.
    """
    deadline = time.monotonic() + within_s
    pause, growing_s = threading.Event(), 0.1
    while True:
        seen = condition()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {seen!r}")
        pause.wait(growing_s if every_s is None else every_s)
        growing_s = min(1.2 * growing_s, 0.5)
