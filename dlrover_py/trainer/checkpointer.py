"""``Checkpointer`` saves checkpoints while the training goes on, and loads the newest one.

::

    from dlrover_py.trainer import Checkpointer

    with Checkpointer("/data/run-1") as checkpointer:
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        step = checkpointer.load(state) or 0
        while step < total and not checkpointer.should_stop:
            train(step)
            step += 1
            checkpointer.save(step, state)
        checkpointer.save(step, state, force=True)  # the last one goes to storage

It works under ``python``, ``torchrun`` and ``elastic-run``. Under ``elastic-run`` the checkpoints
in memory survive the death of a worker. An option that the script leaves out is taken from the
job's ``checkpoint:`` section. If that has no value either, the default holds:

================  ============================================================================
``every=1``       Each call of ``save`` saves, because that costs the training very little.
``persist_every`` ``"5m"``: at most this much work is lost when the memory is lost (a node and
                  its peer at the same time, or the whole job). That is 1 % of the time between
                  two failures that are eight hours apart. A state of 10 GB then takes 33 MB/s
                  of the storage, and is read at low priority. Under ``python`` and ``torchrun``
                  the first checkpoint goes to storage after 30 s.
================  ============================================================================

``"auto"`` chooses the interval that loses the least time (:mod:`dlrover_py.trainer.schedule`).
"""

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self, SupportsFloat

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import MAX_COUNT
from dlrover_py.protocol.persister import KeepRules
from dlrover_py.trainer import session
from dlrover_py.trainer.calls import CallGuard, CallsDifferError
from dlrover_py.trainer.notices import NoticeLog, SaveStats
from dlrover_py.trainer.options import SaveOptions
from dlrover_py.trainer.placement import DRAIN_S, SlotClaim, WorkerContext
from dlrover_py.trainer.replica_check import ReplicaCheck
from dlrover_py.trainer.replica_tracking import ReplicaTracker
from dlrover_py.trainer.saving import SaveStarter
from dlrover_py.trainer.schedule import SaveSchedule
from dlrover_py.trainer.settings import Settings
from dlrover_py.trainer.state_dict import expected_bytes
from dlrover_py.trainer.storage_progress import StorageProgress
from dlrover_py.trainer.table_cuts import TableCuts
from dlrover_py.trainer.vote import RankVote, SaveAttempt, SaveOutcome, SaveVotes

if TYPE_CHECKING:
    from dlrover_py.trainer.restore import Loaded

log = logging.getLogger(__name__)

LATE_ANSWER_S = 60.0
"""Seconds that ``wait`` without a limit waits for storage, if it is called after ``close``."""


class Checkpointer:
    """Saves and loads the state of a training. All ranks of a world must use it in the same way."""

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        every: int | str | None = None,
        persist_every: int | str | None = None,
        keep: int | Mapping[str, int] | KeepRules | None = None,
        rng: bool = True,
        strict: bool = True,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the checkpointer. The first ``load`` or ``save`` allocates the memory.

        The directory is not looked at yet. A checkpointer that is not closed releases its memory
        when the interpreter exits.

        Args:
            dir: where checkpoints are stored that must outlive the job: a folder that all nodes
                share, or an address that fsspec knows (``s3://bucket/run-1``). None: the directory
                of the job. If the job has none, checkpoints are kept only in memory.
            every: how often to save in memory: every N steps, a time (``"30s"``), or ``"auto"``.
            persist_every: how often a checkpoint goes to ``dir``, in the same forms.
            keep: how many checkpoints stay in ``dir``, or rules in the form of a job, such as
                ``{"last": 3, "every": 1000, "best": 2}``. The best checkpoint has the lowest
                metric, or with ``"highest": True`` the highest.
            rng: whether to save the states of the random generators, too.
            strict: whether ``load`` refuses a checkpoint whose keys differ from those of the state:
                it lacks some, or has others for which the state has no place.
            settings: the place of this worker. None: read it from the environment.
            clock: returns seconds that never decrease.

        Raises:
            ConfigError: an argument, the job's ``checkpoint:`` section, or the environment of this
                worker cannot be used.
        """
        self.settings = Settings.from_environment() if settings is None else settings
        options = SaveOptions.choose(
            self.settings, dir=dir, every=every, persist_every=persist_every, keep=keep
        )
        self.dir, self.keep = options.dir, options.keep
        self.every, self.persist_every = options.rules.every, options.rules.persist_every
        self.rng, self.strict = rng, strict
        self.stats, self._clock = SaveStats(), clock
        notices = self._notices = NoticeLog(log, self.stats)
        self._calls = CallGuard(notices)
        self._claim = SlotClaim(self.dir)
        self._opened: WorkerContext | None = None
        """The context of this worker; None before the first ``load`` or ``save``."""
        self._schedule = SaveSchedule(options.rules, options.age, self.stats, clock)
        self._votes, self._replicas = SaveVotes(), ReplicaTracker()
        self.replica_check = ReplicaCheck(self.settings.checkpoint.get("compareEvery"), notices)
        self._storage = StorageProgress(self.dir, self.keep, self.stats, notices, clock)
        self._cuts = TableCuts(self._storage)
        self._starter = SaveStarter(self._replicas, self.stats, notices, self._cuts, rng=rng)
        self._last_due_step = -1
        """The greatest step of this timeline for which a save was due."""
        self._newest_complete: CheckpointId | None = None
        """The newest checkpoint that is known to be sealed on all ranks."""
        self._newest_unstored: CheckpointId | None = None
        """The newest checkpoint that all ranks have; None if it is itself to go to storage."""
        self._polls_stop = False
        """The script reads ``should_stop``."""
        atexit.register(self._at_exit)

    # --- Public methods ---

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metric: SupportsFloat | None = None,
        force: bool = False,
    ) -> bool:
        """Save the state if a save is due. Call this after each step, on all ranks.

        The method returns when it has copied everything that may change before the next
        ``optimizer.step()``. The rest is copied in the background. If the copy is not finished by
        then, ``optimizer.step()`` waits for it. A checkpoint that is due for storage is written
        there later, by the agent or a persister process, once all ranks have it in memory.

        Two conditions cost only this save and a line in the log, never the training. One is that
        the memory does not suffice or is in use. The other is an object of the state that raises
        after the first successful save.

        Args:
            step: number of finished steps since the start of the training.
            state: a mapping of modules, optimizers, tensors, objects with ``state_dict``, and
                mappings of these.
            metric: how good the step is, if ``keep`` has ``best``: a number, or a tensor with one
                element.
            force: save whatever the interval says, send the checkpoint to storage, and return once
                all ranks have it in memory or some rank has failed to save it. All ranks must pass
                the same value.

        Returns:
            Whether this rank has started to save the state. It is False if no save is due or this
            one is skipped, after :meth:`close`, and in a forked child. It is also False in the
            handler of a signal that arrived during another call, or while an optimizer waits for a
            copy. Neither can continue before the handler returns.

        Raises:
            ConfigError: the state is not a mapping; or the first state contains something that
                cannot be saved, or that raises. In a later state, this costs only that save.
                Another cause is that some ranks do not make this call, make a different one, or use
                other options (:class:`~dlrover_py.trainer.calls.CallsDifferError`). At the first
                call, further causes are a process group that is not initialized, missing shared
                memory, and another open Checkpointer of this worker.
            OSError: at the first call, the slots in shared memory cannot be opened.
            SupersededError: a ``ShardLoader`` of the state has lost shards: the script must end.
            ValueError: the step is not an integer from 0 to 2**53, or the metric is not a number.
            RuntimeError: another rank is gone.
        """
        if not self._claim.mine:
            return False
        if self._claim.closed:
            self._notices.warn_once(
                "save() after close() saves nothing: call close() after the last save()"
            )
            return False
        if self._interrupts("save()"):
            return False
        _check_step(step)
        metric_value = None if metric is None else session.number_of("metric", metric)
        _check_mapping(state)
        began = time.perf_counter()
        with session.spending("save"), self._calls.inside("save()", step, forced=bool(force)):
            context = self._site()
            waited_s = context.waited_s()
            self.stats.blocked_s += waited_s
            self.stats.cost_s += waited_s
            self.stats.calls += 1
            if self.stats.calls == 1 and context.rank == 0 and self.dir is not None:
                self._storage.warn_of_obstacles()
            self._schedule.tick(busy=self._storage.busy is not None)
            try:
                return self._save(context, step, state, metric_value, force)
            finally:
                self.stats.blocked_s += time.perf_counter() - began
                self._schedule.previous = step

    def load(
        self, state: Mapping[str, object], *, init: str | os.PathLike[str] | None = None
    ) -> int | None:
        """Fill the state with the newest checkpoint. This call is collective.

        The checkpoint is read from the memory of this node, else from a peer's memory, else from
        storage. Call this once everything in the state is built and wrapped (DDP, ``fully_shard``).
        Saves that are under way are completed first. Tables of a parameter server in the state go
        back to the cut of the checkpoint. If memory has no checkpoint, the wait for storage has no
        limit.

        Args:
            state: the same mapping that ``save`` receives.
            init: initial values for a training that has no checkpoint yet: a folder or address that
                ``torch.distributed.checkpoint.save`` has written.

        Returns:
            The step of the checkpoint. None if there is no checkpoint: the state is then unchanged,
            or has the values of ``init``.

        Raises:
            CheckpointError: there are checkpoints but none could be read; the storage could not be
                listed; or the newest checkpoint is of another state. The message says whether the
                state has been modified.
            ConfigError: the state cannot be loaded; the ranks make different calls; ``dir`` is
                itself a checkpoint; or :meth:`close` was called. At the first call, causes are also
                a process group that is not initialized, missing shared memory, and another open
                Checkpointer of this worker.
            OSError: at the first call, the slots in shared memory cannot be opened.
            UnreachableError: the transfer server of this node's agent does not answer. Ranks of
                other nodes raise CheckpointError. Or the servers of the tables do not answer some
                rank. All ranks raise it then.
            RuntimeError: another rank is gone.
        """
        from dlrover_py.trainer import loading

        _check_mapping(state)
        if self._claim.closed:
            raise ConfigError("checkpoint: load() after close(): expected another Checkpointer")
        with session.spending("load"), self._calls.inside("load()"):
            context = self._site()
            self._finish_saves(context)
            with_rng = self._starter.whole(state)
            found = loading.load_newest(
                with_rng,
                context,
                self.settings,
                dir=self.dir,
                strict=self.strict,
                prepare=partial(self._cuts.restore, state),
            )
            self._cuts.loaded(state, None if found is None else found.id)
            self._begin_timeline(context, found)
            if found is None:
                loading.initialize(state, context, init, dir=self.dir, strict=self.strict)
            context.stager.warm(expected_bytes(with_rng, context.rank))
            return None if found is None else found.step

    @property
    def should_stop(self) -> bool:
        """Whether to end the loop now. All ranks get the same value after the same ``save``.

        It is true if ``session.should_stop()`` is true on any rank, and all ranks have agreed on
        it. One ``save`` distributes the request, and the property is true from the next ``save``
        on. That save is always due. The newest state is therefore in memory. The agent writes it to
        ``dir``, if there is one, without further calls. A world of one rank needs no such ``save``
        if its newest state is saved already. Reading the property lets the agent know that this
        script ends on request. The property is always false without an agent.
        """
        self._polls_stop = True
        session.report_agreement()  # once; before a step that no save has followed yet
        context, votes, previous = self._opened, self._votes, self._schedule.previous
        alone = (context.world if context is not None else session.world().size) == 1
        if not votes.stop and alone and (not self.stats.calls or previous == self._last_due_step):
            votes.stop = session.should_stop()
        return votes.stop

    def wait(self, *, persisted: bool = False, timeout_s: float | None = None) -> bool:
        """Wait until what this rank has saved is sealed, which means complete in memory, or failed.

        Args:
            persisted: wait as well until the checkpoint that must go to storage is there, or has
                failed. All ranks must pass the same value.
            timeout_s: seconds to wait at most. With ``persisted`` they limit only the wait for
                storage, because a copy always ends. None: there is no limit.

        Returns:
            True once that is reached; if nothing was saved; and in a forked child. False if the
            time is over; in the handler of a signal as for ``save``; or if the checkpoint is not in
            storage, and the log or the condition of the job says why. After :meth:`close`, a call
            with ``persisted`` only looks for the checkpoint, and waits as long as nodes write it.
            Without a time, it waits for ``LATE_ANSWER_S`` at most.
            False may then mean that its write has not begun: the next call looks again.

        Raises:
            CallsDifferError: with ``persisted``, some ranks make another call.
        """
        context = self._opened
        if context is None or not self._claim.mine:
            return True
        if self._claim.closed:
            end = self._clock() + (LATE_ANSWER_S if timeout_s is None else timeout_s)
            return not persisted or self._storage.result(context, end, may_be_written=True)
        if self._interrupts("wait()"):
            return False
        with self._calls.inside("wait()"):
            return self._wait(context, persisted, timeout_s)

    def close(self) -> None:
        """Wait for what is under way, and release all resources. Call it on all ranks, or on none.

        Without an agent this includes the write to storage. With one, the agent writes it later. A
        second call does nothing, and neither does one in a forked child or in the handler of a
        signal that interrupts another call.

        Raises:
            CallsDifferError: other ranks make another call. The resources are then released when
                the interpreter exits.
        """
        if self._claim.closed or not self._claim.mine or self._interrupts("close()"):
            return
        with self._calls.inside("close()"):
            if self._opened is not None:
                self._finish_saves(self._opened)
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release(failed=True)  # the other ranks may not make this call

    # --- A save: due? → stage → agree → to storage ---

    def _save(
        self,
        context: WorkerContext,
        step: int,
        state: Mapping[str, object],
        metric: float | None,
        force: bool,
    ) -> bool:
        """Take the result of the last vote, start a save if one is due, and start the next vote.

        The next vote starts even if this rank does not save. A forced save, and the first one after
        a request to stop, also wait until the outcome is known on all ranks.

        Args:
            context: the context of this worker.
            step: the step that is finished.
            state: what is saved.
            metric: how good the step is; None if it is not known.
            force: whether the save is due in any case and goes to storage.

        Returns:
            Whether a copy was started on this rank.

        Raises:
            CallsDifferError: the ranks started the last vote in different calls.
            ConfigError: the state cannot be saved, and none was saved before.
            RuntimeError: another rank is gone.
        """
        stop_was_known = self._votes.stop
        self._finish_vote(context)
        last = force or (self._votes.stop and not stop_was_known)  # the same on all ranks
        attempt: SaveAttempt | None = None
        due = last or self._schedule.due(step, self._votes.last)
        persist = due and self._schedule.persist_due(step, self._votes.last, forced=force)
        agreed = self.replica_check.run(context, step, state, stores=persist)
        if due:
            context.stager.wait()  # so that this vote decides the save before
            attempt = self._begin(context, step, persist=persist, forced=force)
            attempt.certified = agreed
        self._start_vote(context)
        if attempt is None:
            return False
        if last:
            self._finish_vote(context)
        # Keep the checkpoint that all ranks are known to have, until they are known to have the
        # next one.
        protected = {one.id for one in self._votes.attempts if one is not attempt}
        protected |= set() if self._newest_complete is None else {self._newest_complete}
        try:
            return self._starter.start(
                context, attempt, self._starter.whole(state), metric, protected=protected, last=last
            )
        finally:
            # Do this even if the state is refused: the other ranks wait for this vote.
            if last:
                context.stager.wait()
                self._start_vote(context)
                self._finish_vote(context)

    def _begin(
        self, context: WorkerContext, step: int, *, persist: bool, forced: bool
    ) -> SaveAttempt:
        """Register a save that is due: the same on all ranks, whatever its outcome on this one.

        No copy starts here. A step that is not greater than that of the last registered save begins
        a new timeline.

        Args:
            context: the context of this worker.
            step: the step of the save.
            persist: whether the checkpoint is to go to storage.
            forced: whether the script has passed ``force=True``.
        """
        if step <= self._last_due_step:  # the training went back or repeats it: a new checkpoint
            self._claim.begin_timeline()
        self._last_due_step = step
        now = self._schedule.begun(step, persist_requested=persist)
        attempt = SaveAttempt(self._claim.id_of(context.round, step), persist, now, forced)
        self._votes.attempts.append(attempt)
        return attempt

    def _own_vote(self, context: WorkerContext) -> RankVote:
        """Return the vote of this rank.

        Rank 0 decides which saves are due by the clock. If the script reads ``should_stop``, the
        agent is asked here whether it must stop.
        """
        base = RankVote()
        if context.rank == 0:
            since = None if self._votes.persist_requested else self._storage.writing_since
            base = self._schedule.says(busy_since=since)
        return self._votes.mine(
            base,
            call=self._calls.number,
            busy=self._busy_now(context),
            uncopied=self._replicas.uncopied(context),
            # A rank that never asks is sent a signal immediately, and not only when the grace
            # period is over.
            stop=self._votes.stop or (self._polls_stop and session.should_stop()),
        )

    def _start_vote(self, context: WorkerContext) -> None:
        """Start a vote. Its result is taken in the next call; a single rank applies its own now."""
        if context.ballot is None:  # there are no other ranks
            self._finish_vote(context)
        else:
            self._replicas.voted()
            self._votes.launch(context.ballot, self._own_vote(context))

    def _finish_vote(self, context: WorkerContext, timeout_s: float | None = None) -> None:
        """Take and apply the result of the vote that the previous call started, if there is one.

        A single rank applies its own vote instead. A save that the vote decides is sealed or missed
        from here on.

        Args:
            context: the context of this worker.
            timeout_s: seconds to wait for other ranks; None: the limit of the process group.

        Raises:
            CallsDifferError: the ranks started the vote in different calls. The saves that were
                undecided are made unusable first.
            RuntimeError: another rank is gone, or has not voted within the timeout.
        """
        if context.ballot is None:
            vote = self._own_vote(context)
        elif self._votes.pending:
            with self._calls.report_missing_ranks():
                vote = self._votes.result(timeout_s)
            if vote.calls_differ:
                self._void_undecided(context)
                self._calls.raise_difference(self._votes)
        else:
            return
        if (attempt := self._votes.decide(vote)) is not None:
            sealed = vote.outcome == SaveOutcome.SEALED
            if sealed:
                self._replicas.sealed(context, vote)
            self._apply_outcome(context, attempt, complete=sealed)
        self._replicas.heard(context, vote, [one.id for one in self._votes.attempts])

    def _void_undecided(self, context: WorkerContext) -> None:
        """Make the undecided saves unusable: they are of calls that differ between ranks."""
        context.stager.wait()
        void = {one.id for one in self._votes.attempts}
        # Slots of other jobs are ignored.
        context.update_headers(lambda s: replace(s, job="", persist=False) if s.id in void else s)
        self._votes.attempts.clear()

    def _finish_saves(self, context: WorkerContext) -> None:
        """Wait for the copy, and learn the outcome of saves. This is collective.

        A second vote is held only if an undecided save is to go to storage. The outcome of another
        last save stays unknown. Ranks that are gone are tolerated: their votes are awaited for
        `DRAIN_S` seconds. Then a warning is logged and the outcome stays unknown.

        Raises:
            CallsDifferError: the ranks started the last vote in different calls.
        """
        context.stager.wait()
        try:
            self._finish_vote(context, DRAIN_S)
            if self._votes.persist_requested:  # decide whether it is written to storage
                self._calls.check_in_again(DRAIN_S)
                self._start_vote(context)
                self._finish_vote(context, DRAIN_S)
        except CallsDifferError:
            raise
        # A ValueError means that the process group no longer exists. A ConfigError means that some
        # ranks did not make this call.
        except (RuntimeError, ValueError, ConfigError) as error:
            log.warning("the result of the last vote on checkpoints is not known: %s", error)

    def _apply_outcome(self, context: WorkerContext, one: SaveAttempt, *, complete: bool) -> None:
        """Apply the outcome of a save, which all ranks know now.

        If the save was to go to storage, a complete one is sent there. For an incomplete one, its
        mark is cleared, and the next save goes there instead. Rank 0 logs a warning about an
        incomplete save that was forced or was to go to storage.

        Args:
            context: the context of this worker.
            one: the save.
            complete: whether all ranks have sealed it.
        """
        if one.staging is not None:
            self.stats.ended(sealed=one.staging.header is not None, why=one.staging.why)
        if complete:
            self._newest_complete = one.id
            self._newest_unstored = None if one.persist_requested else one.id
            context.tidy()
            if one.persist_requested:
                self._storage.begin(context, one.id, one.began)
            return
        if context.rank == 0 and (one.forced or one.persist_requested):
            self._notices.warn_incomplete(one.id.step, unstored=one.persist_requested)
        self._replicas.missed(context, one.id)
        if one.persist_requested:
            context.update_headers(lambda s: replace(s, persist=False) if s.id == one.id else s)
            self._schedule.again = True

    # --- A load ---

    def _begin_timeline(self, context: WorkerContext, found: "Loaded | None") -> None:
        """Begin a new timeline after a load, and restart the intervals of saves. Collective.

        Saves that are still undecided are dropped: their outcome does not matter any more.
        Retention spares the folder that was loaded.

        Args:
            context: the context of this worker.
            found: what was loaded; None if there was no checkpoint.
        """
        self._claim.begin_timeline()
        self._last_due_step = -1
        self._starter.goes_on |= found is not None
        self.replica_check.good = 0 if found is None else found.step
        if found is not None and self.settings.rejected:  # they would keep their slots
            context.update_headers(lambda s: replace(s, persist=False) if s.id > found.id else s)
        self._votes.attempts.clear()
        self._storage.ordered = self._newest_unstored = None
        self._replicas.loaded(context, found.id if found is not None and found.memory else None)
        self._newest_complete = None if found is None else found.id
        self._schedule.loaded(found, time.time())  # noqa: TID251 - as the manifest has it; clamped
        if found is not None:
            self._storage.loaded(self.settings, found.folder)

    # --- Start, waiting and end ---

    def _site(self) -> WorkerContext:
        """Return the context of this worker; create it on the first call.

        The call first waits for the other ranks (`CallGuard.check_in`), and the creation is
        collective. A creation that fails raises, for example because the ranks use different
        options. The next call tries again.
        """
        self._calls.check_in()
        if self._opened is None:
            stores = "no dir" if self.dir is None else "a dir"
            self._calls.check_options(
                f"every={self.every}, persist_every={self.persist_every}, {stores}"
            )
            with self._claim.making(self.settings):
                self._opened = WorkerContext(
                    self.settings,
                    self.dir is not None,
                    lambda answer: self._storage.answered(self._opened, answer),
                )
            self._storage.report(self.settings)
            # Its outcome on other ranks is not known yet. The job may have to be restored from it.
            self._newest_complete = self._opened.newest()
        return self._opened

    def _interrupts(self, call: str) -> bool:
        """Return whether a call comes in the handler of a signal, where it can do nothing."""
        context = self._opened
        return self._calls.interrupts(call, None if context is None else context.stager.waiter)

    def _busy_now(self, context: WorkerContext) -> bool:
        """Return whether a checkpoint of this rank is on its way to storage, or will be soon.

        The latter is a save that is to go there and whose outcome is still undecided.
        """
        return self._votes.persist_requested or self._storage.is_busy(context)

    def _wait(self, context: WorkerContext, persisted: bool, timeout_s: float | None) -> bool:
        """Wait for the copy of this rank, or for the checkpoint that must go to storage.

        Args:
            context: the context of this worker.
            persisted: wait for storage, too. This is collective.
            timeout_s: seconds to wait for the copy or, if ``persisted``, for storage only. None:
                there is no limit.

        Returns:
            False if the time is over. With ``persisted`` also if storage does not have the
            checkpoint.
        """
        end = None if timeout_s is None else self._clock() + timeout_s
        if not persisted:
            return context.stager.wait(timeout_s)
        # Do this on all ranks or on none. A copy always ends, so the time limit applies to storage
        # only.
        self._finish_saves(context)
        if not self._storage.wait(context, lambda: self._busy_now(context), end):
            return False
        if self._schedule.again:  # some rank has missed the save
            return False
        return self._storage.result(context, end)

    def _at_exit(self) -> None:
        """Release all resources at exit, if the script has not. The other ranks may be gone."""
        self._release(failed=hasattr(sys, "last_value"))

    def _release(self, *, failed: bool = False) -> None:
        """Release all resources; no other rank needs to take part.

        The copy that is under way is awaited, and so are writes of this worker's own persister. A
        single rank also begins a write to storage that is still due. Rank 0 logs a warning if the
        newest checkpoint will be lost and no stop was asked for. A second call does nothing, and
        neither does one in a forked child.

        Args:
            failed: whether the script has failed. No warning is logged then, and on several nodes
                the wait for the persister ends after `DRAIN_S`.
        """
        if self._claim.closed or not self._claim.mine:
            return
        context = self._opened
        if context is not None:
            if context.world == 1:  # no other rank is needed for a write that is due
                self._finish_saves(context)
            if not failed:
                context.stager.wait()
                lost = self._votes.newest_sealed() or self._newest_unstored
                if context.rank == 0 and lost is not None and not self._votes.stop:
                    self._storage.warn_of_loss(lost.step, pool=bool(self.settings.pool))
        self._claim.closed = True
        self._calls.close()
        atexit.unregister(self._at_exit)
        if context is not None:
            context.close(failed=failed)


def _check_step(step: object) -> None:
    """Raise ValueError if the step is not a plain integer from 0 to 2**53."""
    if type(step) is not int or not 0 <= step <= MAX_COUNT:
        raise ValueError(f"step is {step!r}: expected an int from 0 to 2**53")


def _check_mapping(state: object) -> None:
    """Raise ConfigError if the state is not a mapping."""
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"checkpoint: the state is a {type(state).__name__}: expected a dict, such as "
            '{"model": model, "optimizer": optimizer}'
        )
