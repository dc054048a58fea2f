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
    every_s: float = 0.1,
) -> T:
    """Call a function until its result is true, and return the result.

    Args:
        condition: the function.
        what: what is waited for, for the error message.
        within_s: seconds after which it fails, with the last result in the message.
        every_s: seconds between two calls.
    """
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        seen = condition()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {seen!r}")
        pause.wait(every_s)
