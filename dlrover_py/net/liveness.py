"""Liveness probes of a master that is a child process, as a kubelet probes a container.

The end of the process is noticed immediately. But a master may hang without ending, for example
because it was stopped (SIGSTOP). So its health is requested repeatedly. A master that does not
answer is killed. The program that runs it starts it again, and the master continues from its
journal.
"""

import asyncio
import logging
import subprocess
from dataclasses import dataclass

from dlrover_py.net.http_client import MAX_SHORT_REPLY_BYTES, HttpClient
from dlrover_py.process.identity import ended
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.timing import MASTER_LOST_S

log = logging.getLogger(__name__)

MISSED = 3
"""Number of consecutive probes without an answer after which the master is killed.

One answer may be missing because this process itself was stopped (Ctrl-Z), or because the machine
has no memory left.
"""
RESTART_PAUSES_S = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
"""Seconds before each new start of a master that has ended soon after its start.

The last value is used for all later starts.
"""


@dataclass(frozen=True, slots=True)
class ProbeTiming:
    """The times by which a master that is a child process is probed and restarted, in seconds.

    Raises:
        ValueError: A master that hangs would be killed too late.
    """

    probe_interval_s: float = 5.0
    """Time between two probes, and time limit of an answer."""
    first_answer_timeout_s: float = 120.0
    """Time limit of the first answer. A start imports many modules, perhaps from a slow disk."""
    stable_after_s: float = 60.0
    """Time after which a running master counts as stable. The pauses before a restart are then
    short again."""

    def __post_init__(self) -> None:
        if self.hung_after_s >= MASTER_LOST_S:
            raise ValueError(
                f"a master that hangs is killed after {self.hung_after_s:g} s: expected less than "
                f"{MASTER_LOST_S:g}, for which idle agents wait for it"
            )

    @property
    def hung_after_s(self) -> float:
        """Longest time in seconds after which a master that hangs is killed."""
        return (MISSED + 1) * self.probe_interval_s


class RestartPause:
    """The pause before each new start of a master, which grows while the master does not last."""

    def __init__(self, timing: ProbeTiming | None = None) -> None:
        """Start without a failure.

        Args:
            timing: When a master counts as stable; None for the default.
        """
        self._stable_after_s = (timing or ProbeTiming()).stable_after_s
        self._failures = 0

    def next_s(self, ran_s: float) -> float:
        """Return the seconds to wait before the next start, and count one more failure.

        The count starts again at 0 after a master that was stable. The caller does the waiting.

        Args:
            ran_s: Seconds that the last master ran; 0 if it could not be started.
        """
        if ran_s >= self._stable_after_s:
            self._failures = 0
        pause = RESTART_PAUSES_S[min(self._failures, len(RESTART_PAUSES_S) - 1)]
        self._failures += 1
        return pause


async def supervise(
    process: "subprocess.Popen[bytes]", health: str, timing: ProbeTiming | None = None
) -> int:
    """Wait for the end of a master and return its exit code. A master that hangs is killed.

    The exit code is the negative signal number after a signal. The master is not started again
    here. If this task is canceled, the probes end and the master continues.

    Args:
        process: Process of the master.
        health: Address of its health endpoint.
        timing: Times of the probes; None for the defaults.

    Raises:
        ProcessLookupError: Other code has reaped the process.
    """

    async def kill_if_hung() -> None:
        why = await _wait_until_failed(health, timing or ProbeTiming())
        log.warning("master_not_responding", extra={"why": why, "then": "it is killed"})
        process.kill()

    probing = asyncio.create_task(kill_if_hung())
    try:
        return await ended(process)
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)


async def _wait_until_failed(health: str, timing: ProbeTiming) -> str:
    """Probe a master until it has missed ``MISSED`` probes in a row; return the last error.

    A first probe without an answer counts as all of them. The coroutine never returns for a healthy
    master.

    Args:
        health: Address of the master's health endpoint.
        timing: Times of the probes.
    """
    client = HttpClient(health)
    try:
        why = await _probe(client, timing.first_answer_timeout_s)
        failed = MISSED if why else 0
        while failed < MISSED:
            if not failed:
                await asyncio.sleep(timing.probe_interval_s)
            why = await _probe(client, timing.probe_interval_s)
            failed = failed + 1 if why else 0
        return why
    finally:
        client.close()


async def _probe(client: HttpClient, within_s: float) -> str:
    """Probe a master once; return the error, or empty text if it is healthy."""
    try:
        await client.call("GET", "/healthz", deadline_s=within_s, max_bytes=MAX_SHORT_REPLY_BYTES)
    except DLRoverError as error:
        return str(error)
    return ""
