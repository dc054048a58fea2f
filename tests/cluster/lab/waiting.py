"""Wait for a condition with a deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T], what: str, *, within_s: float = 120.0, every_s: float = 0.1
) -> T:
    """Look until there is something (truthy), and return it; fail with what was seen last."""
    deadline = time.monotonic() + within_s
    pause = threading.Event()
    while True:
        seen = condition()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what}; last seen: {seen!r}")
        pause.wait(every_s)
