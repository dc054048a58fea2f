"""How a helper process of ours is ended: no wait for it is without a limit.

A helper may stand still for ever: somebody has stopped it (SIGSTOP, a debugger), or a driver or a
file system holds it. What it was there for is done, or is done otherwise; the limits are for those
who wait behind us.
"""

import os
import select
import signal
import subprocess

KILLED_S = 5.0
"""After SIGKILL a process goes at once. One that a dead file system holds goes when that answers,
and nobody waits for it."""


def wake(process: "subprocess.Popen[bytes]") -> None:
    """Let a helper go on that somebody has stopped; one that runs does not notice."""
    process.send_signal(signal.SIGCONT)  # not to a process that has been waited for


def end(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """Wait for the end of a helper that knows that it is time; kill it after a limit.

    Args:
        process: a child of ours.
        within_s: the limit; 0 kills it now.

    Returns:
        Whether it has ended by itself.
    """
    wake(process)
    if _wait(process, within_s):
        return True
    process.kill()
    _wait(process, KILLED_S)
    return False


def _wait(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """Whether it ends in time. By its pidfd: `Popen.wait` with a limit looks 20 times a second."""
    if process.poll() is not None:
        return True
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:  # another thread has waited for it
        return True
    try:
        over = select.poll()
        over.register(fd, select.POLLIN)
        gone = bool(over.poll(within_s * 1000))
    finally:
        os.close(fd)
    if gone:
        process.wait()
    return gone
