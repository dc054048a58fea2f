"""Limits of this process that a test lowers for a while."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count


def open_files() -> int:
    """Return the number of descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def room_for(files: int) -> Iterator[None]:
    """Let this process open only so many more files during a block."""
    free = (fd for fd in count() if not os.path.lexists(f"/proc/self/fd/{fd}"))
    limit = [next(free) for _ in range(files + 1)][-1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
