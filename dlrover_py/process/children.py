"""End a helper process within a limit.

A helper may hang forever: it was stopped (SIGSTOP, a debugger), or a driver or a file system holds
it. Its work is done by then, or is done in another way. So no wait for its end may be unlimited.
"""

import os
import select
import signal
import subprocess

KILLED_S = 5.0
"""Seconds that the caller waits for the end of a process after SIGKILL.

A process ends immediately after SIGKILL. The exception is a process that a dead file system holds:
it ends when the file system answers, and the caller does not wait for it.
"""


def wake(process: "subprocess.Popen[bytes]") -> None:
    """Continue a helper that was stopped. A running or reaped helper is not affected."""
    process.send_signal(signal.SIGCONT)  # Popen sends no signal to a process that was reaped


def end(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """Wait for the end of a helper that was asked to end, and kill it after a limit.

    A stopped helper is continued first. The call blocks for at most ``within_s``, and after SIGKILL
    for at most :data:`KILLED_S` more. It reaps the helper, unless that survives SIGKILL.

    Args:
        process: A child of this process.
        within_s: The limit in seconds; 0 kills the helper now.

    Returns:
        True if the helper has ended by itself, False if it was killed or survives SIGKILL.
    """
    wake(process)
    if _wait(process, within_s):
        return True
    process.kill()
    _wait(process, KILLED_S)
    return False


def _wait(process: "subprocess.Popen[bytes]", within_s: float) -> bool:
    """Return whether a process ends in time, by its pidfd, and reap it then.

    ``Popen.wait`` with a timeout would poll 20 times a second.

    Args:
        process: A child of this process.
        within_s: The limit in seconds.
    """
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
