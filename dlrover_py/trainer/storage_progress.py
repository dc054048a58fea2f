"""The way of checkpoints to storage, as a worker sees it.

Under an agent, the agent's persister writes what is marked in the slots. Without one, the first
worker of each node has a persister of its own, and requests each write. In both cases the slots say
when a write has ended, and storage says whether it has succeeded.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from dlrover_py.checkpoint import shm
from dlrover_py.protocol.agents import PersistPhase
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.persister import KeepRules, WriteReply, WriteRequest
from dlrover_py.trainer import session
from dlrover_py.trainer.notices import NoticeLog, SaveStats
from dlrover_py.trainer.placement import WorkerContext
from dlrover_py.trainer.settings import Settings
from dlrover_py.trainer.standalone import (
    CANCEL_AFTER_S,
    REPLACED_BY_NEWER,
    StandalonePersister,
    clear_persist,
)

log = logging.getLogger(__name__)

STORAGE_POLL_S = 0.5
"""Seconds between two looks into storage for what other nodes still write."""


class StorageProgress:
    """The checkpoints that are to go to storage, and how far they have come."""

    def __init__(
        self,
        dir: str | None,
        keep: KeepRules,
        stats: SaveStats,
        notices: NoticeLog,
        clock: Callable[[], float],
    ) -> None:
        """Create the object. It reads and writes nothing yet.

        Args:
            dir: address of the directory of checkpoints; None if there is none.
            keep: which checkpoints stay there.
            stats: counts the writes, and keeps why the last one failed.
            notices: receives the failures.
            clock: returns seconds that never decrease.
        """
        self.dir, self._keep = dir, keep
        self._stats, self._notices, self._clock = stats, notices, clock
        self.busy: CheckpointId | None = None
        """The checkpoint that is on its way to storage."""
        self._writing_since = 0.0
        """Since when it is, by the clock."""
        self.ordered: CheckpointId | None = None
        """The last checkpoint that was sent to storage."""
        self._stored: Future[bool] | None = None
        """Whether ``ordered`` is in storage. None: it is on its way, or nothing has asked yet."""
        self._finished = ""
        """The last attempt that the persister of this rank has completed."""
        self._protected: tuple[str, ...] = ()
        """The folder that was loaded, which retention must not delete."""

    @property
    def writing_since(self) -> float | None:
        """Since when a checkpoint is on its way to storage, by the clock; None if none is."""
        return None if self.busy is None else self._writing_since

    @property
    def on_the_way(self) -> set[CheckpointId]:
        """The checkpoints that are or may be on their way to storage, which does not list them."""
        return {one for one in (self.busy, self.ordered) if one is not None}

    def report(self, settings: Settings) -> None:
        """Report the directory and the rules of retention to the agent, for its persister.

        Nothing is done without an agent or without a directory.
        """
        if settings.pool and self.dir is not None:
            session.report_store(self.dir, self._keep.rules, self._protected)

    def loaded(self, settings: Settings, folder: str) -> None:
        """Record the folder that was loaded, so that retention spares it; "" if there is none.

        The agent gets a report of this. A persister of this worker gets it with the next request.
        """
        self._protected = (folder,) if folder else ()
        self.report(settings)

    def warn_of_obstacles(self) -> None:
        """Log a warning if the directory cannot be written, long before the first write is due.

        A thread checks this after the call has returned, because a file system may hang.
        """
        from dlrover_py.checkpoint.directory import CheckpointDirectory

        def look() -> None:
            if why := CheckpointDirectory(str(self.dir)).obstacle():
                log.warning("checkpoints: nothing can be written to %s: %s", self.dir, why)

        threading.Thread(target=look, name="dlrover-store", daemon=True).start()

    def warn_of_loss(self, step: int, *, pool: bool) -> None:
        """Log that a checkpoint exists only in memory and will be lost.

        Nothing is logged if there is a directory and an agent, which stores the checkpoint.

        Args:
            step: its step.
            pool: whether an agent has the memory, and stores the checkpoint.
        """
        if self.dir is None:
            log.warning(
                "checkpoints: step %d is only in memory and is lost with the job, because no "
                "directory "
                'is given: Checkpointer("/data/run-1"), or the job\'s checkpoint.dir',
                step,
            )
        elif not pool:
            log.warning(
                "step %d is only in memory and will be lost: save(step, state, force=True), and "
                "close() on all ranks, write it to %s",
                step,
                self.dir,
            )

    def begin(self, context: WorkerContext, one: CheckpointId, since: float) -> None:
        """Record that a checkpoint goes to storage now. All ranks have sealed it.

        Without an agent, the write is requested from the persister that this worker may have. With
        one, nothing is sent: the agent finds the ``persist`` mark in the slots and writes them.

        Args:
            context: the context of this worker.
            one: the checkpoint.
            since: when its save began, by the clock.
        """
        self.busy, self._writing_since = one, since
        self.ordered, self._stored = one, None
        if context.persister is not None:
            self._request_write(context, context.persister, one)

    def _request_write(
        self, context: WorkerContext, persister: StandalonePersister, one: CheckpointId
    ) -> None:
        """Request the persister of this node to write its shards. Used only without an agent.

        On a single node the request waits while another checkpoint is written, and a newer request
        replaces it. On several nodes it cancels the write in progress.
        """
        assert self.dir is not None
        persister.order(
            WriteRequest(
                attempt=context.attempt_of(one),
                step=one.step,
                round=one.round,
                timeline=one.timeline,
                world=context.world,
                ranks=context.ranks,
                pool=str(context.folder),
                dir=self.dir,
                job=context.job,
                node=context.node,
                writers=context.nodes if context.rank == 0 else [],
                grant=0,
                keep=self._keep,
                spare=self._protected,
            ),
            queue=len(context.nodes) == 1,
        )

    def answered(self, context: WorkerContext | None, answer: WriteReply) -> None:
        """Handle a reply of the persister: log failures, and clear the ``persist`` mark at the end.

        :class:`StandalonePersister` calls this, in its own thread or in the one that sends a
        request.

        Args:
            context: the context of this worker. None: no mark is cleared.
            answer: the reply.
        """
        for note in answer.notes:
            log.warning("checkpoint %s: %s", answer.attempt, note)
        if answer.phase is PersistPhase.DONE:
            self._finished = answer.attempt
        if answer.phase is PersistPhase.FAILED:
            self._stats.why = answer.why
            if answer.why != REPLACED_BY_NEWER:
                log.warning("a checkpoint was not written to %s: %s", self.dir, answer.why)
            else:
                self._notices.warn_once(
                    f"some checkpoints are not written to {self.dir}: {answer.why}"
                )
        if context is not None and answer.phase in (PersistPhase.DONE, PersistPhase.FAILED):
            # the persister clears the flag, unless it has died
            for _, header in shm.scan(context.folder):
                if header.persist and context.attempt_of(header.id) == answer.attempt:
                    clear_persist(context.folder, header.id)

    def is_busy(self, context: WorkerContext) -> bool:
        """Return whether a checkpoint of this rank is on its way to storage, as its slot says.

        When a write is found to have ended, `busy` becomes None. Rank 0 then also starts to find
        out whether it has succeeded, which the statistics count.
        """
        if self.busy is None:
            return False
        held = (s for s in context.stager.found() if s is not None and s.id == self.busy)
        if any(header.persist for header in held):
            return True
        if context.persister is not None and not context.persister.wait(0):
            return True  # its reply comes in a moment
        if context.rank == 0:  # the slot says that the write has ended, not its outcome
            took_s = self._clock() - self._writing_since
            self._stored = self._is_stored(context, self.busy)
            self._stored.add_done_callback(partial(self._count, took_s))
        self.busy = None
        return False

    def _count(self, took_s: float, stored: "Future[bool]") -> None:
        """Count a write to storage if it has succeeded."""
        if stored.result():
            self._stats.persisted += 1
            self._stats.persist_s = took_s

    def wait(self, context: WorkerContext, busy: Callable[[], bool], end: float | None) -> bool:
        """Wait until no checkpoint is on its way to storage. Return False if the time is over.

        Args:
            context: the context of this worker.
            busy: returns whether one is.
            end: the end of the time, by the clock; None: there is no limit.

        Returns:
            True also if the write has failed: see `result`.
        """
        pause = threading.Event()
        while busy():
            left = 0.05 if end is None else min(0.05, end - self._clock())
            if left <= 0:
                return False
            if context.persister is not None:
                context.persister.wait(left)
            pause.wait(left)  # the agent's persister marks the slot when it is done
        return True

    def result(
        self, context: WorkerContext, end: float | None, *, may_be_written: bool = False
    ) -> bool:
        """Return whether the last checkpoint that was to go to storage is there.

        True if there was none. False also if storage cannot be read, or has not answered in time.
        The answer is kept.

        Args:
            context: the context of this worker.
            end: the end of the time, by the clock; None: wait for ``CANCEL_AFTER_S``.
            may_be_written: whether the write may begin later, because :meth:`wait` has not returned
                True. The next call then looks for a checkpoint again that is not there.
        """
        if self.ordered is None:  # nothing was sent
            return True
        if self._stored is None:
            self._stored = self._is_stored(context, self.ordered)
        left = CANCEL_AFTER_S if end is None else max(0.0, end - self._clock())
        try:
            found = self._stored.result(left)
        except TimeoutError:
            return False
        if may_be_written and not found:
            self._stored = None
        return found

    def _is_stored(self, context: WorkerContext, one: CheckpointId) -> "Future[bool]":
        """Return a future of whether storage has a checkpoint that was to go there.

        Without an agent, rank 0 has the persister that commits the checkpoint. All other ranks look
        for the manifest in a thread, because a store may hang.
        """
        found: Future[bool] = Future()
        if context.persister is not None and context.rank == 0:
            found.set_result(self._finished == context.attempt_of(one))
        else:
            threading.Thread(
                target=lambda: found.set_result(self._find_in_storage(context, one)),
                name="dlrover-store",
                daemon=True,
            ).start()
        return found

    def _find_in_storage(self, context: WorkerContext, one: CheckpointId) -> bool:
        """Return whether storage has a complete checkpoint; wait while a node may still write it.

        Storage is read every `STORAGE_POLL_S` seconds. The result is True once a valid manifest of
        this checkpoint and job is there. It is False once no attempt at this step is under way.
        Files in the folder `PARTS_FOLDER` of an attempt without a manifest show that it is.

        The result is also False after `CANCEL_AFTER_S` seconds, or if storage cannot be read. The
        latter is logged as a warning.

        Args:
            context: the context of this worker.
            one: the checkpoint.
        """
        from dlrover_py.checkpoint.directory import PARTS_FOLDER, CheckpointDirectory

        assert self.dir is not None
        pause, end = threading.Event(), time.monotonic() + CANCEL_AFTER_S
        try:
            place = CheckpointDirectory(self.dir).place
            while time.monotonic() < end:
                place.refresh("")
                names = {n for n in place.names() if n.startswith(f"step-{one.step}.")}
                for name in names:
                    if not name.endswith(".json"):
                        continue
                    # That of another attempt may be damaged, or removed at this moment.
                    with contextlib.suppress(FileNotFoundError, ValueError):
                        m = Manifest.decode(place.read(name))
                        if (m.job, m.id) == (context.job, one) and not m.void:
                            return True
                begun = (n for n in names if not n.endswith(".json") and f"{n}.json" not in names)
                if not any(place.names(f"{name}/{PARTS_FOLDER}") for name in begun):
                    return False
                pause.wait(STORAGE_POLL_S)
        except (OSError, ValueError, DLRoverError) as error:
            log.warning("whether step %d is in %s is not known: %s", one.step, self.dir, error)
        return False
