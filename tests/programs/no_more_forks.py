"""A module that lets no process be forked while there is a file beside the FIFO of the test."""

import errno
import os

plain = os.fork


def fork() -> int:
    if os.path.exists(os.environ["GO"] + ".full"):
        raise BlockingIOError(errno.EAGAIN, "no more processes")
    return plain()


os.fork = fork
