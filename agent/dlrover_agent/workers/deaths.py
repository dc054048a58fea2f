"""Why workers of a round have died, from what is known at their ends and from their error files."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from dlrover_agent.workers import error_file
from dlrover_agent.workers.failures import WorkerDeath, describe
from dlrover_agent.workers.worker import Worker
from dlrover_py.process import cgroups
from dlrover_py.process.blocking import BackgroundThread, OverdueError
from dlrover_py.protocol.agents import WorkerFailure

log = logging.getLogger("agent.workers")

ERROR_FILE_S = 2.0
"""Seconds that the disk has to return a worker's error file."""
FINAL_STDERR_S = 5.0
"""Seconds before a worker's death by a signal in which a traceback counts as the cause."""


class DeathRecords:
    """The failures of a round's workers, and the search for their causes."""

    def __init__(self, scratch: Path) -> None:
        """Create the records of the first round.

        Args:
            scratch: Folder for the error files that are removed with the agent.
        """
        self._scratch = scratch
        self._file_thread = BackgroundThread("error-files")
        self.deaths: list[WorkerDeath] = []
        """Failures of the round's workers in order of time, without workers that were stopped."""
        self._oom_kills = cgroups.oom_kills()
        """The OOM kills at the start of the round."""

    def new_round(self) -> None:
        """Forget the failures of the last round, and read the number of OOM kills so far.

        An OOM kill is the end of a process by the kernel's out-of-memory killer.
        """
        self.deaths = []
        self._oom_kills = cgroups.oom_kills()

    def facts(
        self, worker: Worker, code: int, step: int | None, ended_ranks: Sequence[int]
    ) -> Callable[..., WorkerFailure]:
        """Collect what is known of a death now. The content of the error file is added later.

        Args:
            worker: The worker that has ended.
            code: Exit code, or the negative signal number.
            step: Newest step that the worker has reported; None if there is none.
            ended_ranks: Ranks of this node that have ended with exit code 0.

        Returns:
            A function that describes the death. Its argument ``error_file`` is the content of the
            worker's error file.
        """
        return functools.partial(
            describe,
            exit_code=code,
            forked=worker.child is not None,
            single_worker=worker.env["WORLD_SIZE"] == "1",
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=worker.pid,
            stderr_tail=worker.last_lines,
            final_stderr=worker.errors.words(FINAL_STDERR_S).decode("utf-8", "replace"),
            step=step,
            ran_s=time.monotonic() - worker.started_at,
            out_of_memory=cgroups.oom_kills().since(self._oom_kills),
            ended_ranks=ended_ranks,
        )

    async def explain(
        self, worker: Worker, describer: Callable[..., WorkerFailure], *, stopped: bool
    ) -> WorkerFailure:
        """Describe a death, with the content of the error file if the disk is fast enough.

        The wait for the disk takes ``ERROR_FILE_S`` at most; then a warning is logged. The death is
        added to ``deaths``, unless the agent has stopped the worker.

        Args:
            worker: The worker that has ended.
            describer: Result of :meth:`facts`.
            stopped: Whether the agent has stopped the worker, so that the death is not recorded.
        """
        content = ""
        if worker.error_file is not None:
            try:
                path = worker.error_file
                content = await self._file_thread.run(lambda: error_file.read(path), ERROR_FILE_S)
            except OverdueError as error:
                more = {"path": str(worker.error_file), "why": str(error)}
                log.warning("error_file_not_read", extra=more)
        # Regular expressions over the worker's text hold the GIL, so a thread would not help. The
        # texts have limits: the worst texts of 128 KiB take some 50 ms.
        failure = describer(error_file=content)
        if not stopped:
            self.deaths.append(self._death(worker, failure, content))
        return failure

    def _death(self, worker: Worker, failure: WorkerFailure, content: str) -> WorkerDeath:
        """Return the record of a failure, with the present time.

        Args:
            worker: The worker that has failed.
            failure: Its failure.
            content: Content of its error file. If it is empty, the record names no error file. The
                same holds for a file that is removed after the run.
        """
        path = worker.error_file
        if path is None or path.is_relative_to(self._scratch) or not content:
            path = None
        now = datetime.now(UTC).astimezone()
        return WorkerDeath(failure, now, str(path) if path is not None else "", content)
