"""Starts the copy of a state into a slot, and says why where that cannot be."""

import threading
import time
from collections import ChainMap
from collections.abc import Collection, Mapping, MutableMapping
from typing import cast

from dlrover_py.checkpoint.shm import ShmFullError, ShmTooSmallError
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import session
from dlrover_py.trainer.notices import NoticeLog, SaveStats
from dlrover_py.trainer.object_codec import refused
from dlrover_py.trainer.placement import WorkerContext
from dlrover_py.trainer.replica_tracking import ReplicaTracker
from dlrover_py.trainer.state_dict import RNG, PerRank, RandomState, flatten
from dlrover_py.trainer.table_cuts import TableCuts
from dlrover_py.trainer.vote import SaveAttempt

LAST_SAVE_TRIES, LAST_SAVE_PAUSE_S = 100, 0.02
"""Number of attempts of the last save before a requested stop to find a free slot, and the seconds
between two attempts."""


class SaveStarter:
    """Starts saves of one rank."""

    def __init__(
        self,
        replicas: ReplicaTracker,
        stats: SaveStats,
        notices: NoticeLog,
        cuts: TableCuts,
        *,
        rng: bool,
    ) -> None:
        """Create the object.

        Args:
            cuts: makes the cuts of tables that belong to a save.
            replicas: which checkpoint peers copy.
            stats: counts the saves.
            notices: receives the reasons of saves that are not started.
            rng: whether the states of the random generators are saved, too.
        """
        self._rng, self._cuts = rng, cuts
        self._replicas, self._stats, self._notices = replicas, stats, notices
        self._has_saved = False
        """The state could be saved at least once."""
        self.goes_on = False
        """Whether the training has loaded a checkpoint. It then goes on without memory for more."""

    def whole(self, state: Mapping[str, object]) -> Mapping[str, object]:
        """Return the state, with the random generators' states if they are saved, too.

        The script's mapping is not copied: what a load adds to the result is added to it.
        """
        if not self._rng:
            return state
        own: MutableMapping[str, object] = {RNG: PerRank(RandomState())}
        # load() writes into the script's state
        return ChainMap(cast(MutableMapping[str, object], state), own)

    def start(
        self,
        context: WorkerContext,
        attempt: SaveAttempt,
        state: Mapping[str, object],
        metric: float | None,
        *,
        protected: Collection[CheckpointId],
        last: bool,
    ) -> bool:
        """Start to copy the state into a slot. Return whether the copy has started.

        If not, the save is counted as skipped and its reason is logged, each reason once. The agent
        also gets the reason, unless no slot is free or the folder of the memory is gone. A missing
        slot is not logged while peers copy another save.

        Args:
            context: the context of this worker.
            attempt: the save. Its ``missed`` is set, and ``staging`` if the copy has started.
            state: what is saved.
            metric: how good the step is; None if it is not known.
            protected: checkpoints whose slots must not be filled.
            last: whether this is the last save before a stop. It waits about two seconds for a slot
                that another process reads.

        Raises:
            ConfigError: the state cannot be saved, and no state could be saved before. Or it can
                never fit into the memory, and no checkpoint was saved or loaded before.
            SupersededError: a loader of the state has lost shards that its model has learnt from.
        """
        began = time.perf_counter()
        step = attempt.id.step
        attempt.missed = True
        first = not self._has_saved
        in_slots = {header.id for header in context.stager.found() if header is not None}
        kept = {*protected, *self._replicas.kept, *in_slots}
        if why := self._cuts.save(state, attempt.id, kept, lists=context.rank == 0):
            self._missed(step, why)
            return False
        self._stats.cost_s += time.perf_counter() - began
        began = time.perf_counter()
        try:
            flat = flatten(state, rank=context.rank)
            objects = flat.encoded()
        except ConfigError as error:
            if first:
                raise
            # the other ranks continue, and wait for this rank's votes
            self._missed(step, str(error))
            return False
        self._has_saved = True
        for note in flat.notes:
            self._notices.warn_once(note)
        protected = {*protected, *self._replicas.kept}
        copy = self._replicas.begin(context, attempt.id)  # whatever the outcome on this rank
        tries = LAST_SAVE_TRIES if last else 1
        pause = threading.Event()
        try:
            copy = copy and context.stager.grow()
            for _ in range(tries):  # a process that reads a slot releases it soon
                attempt.staging = context.stager.stage(
                    step,
                    flat.leaves,
                    objects,
                    timeline=attempt.id.timeline,
                    persist=attempt.persist_requested,
                    metric=metric,
                    certified=attempt.certified,
                    copy=copy,
                    protected=protected,
                )
                if attempt.staging is not None or tries == 1:
                    break
                pause.wait(LAST_SAVE_PAUSE_S)
        except ShmTooSmallError as error:
            if first and not self.goes_on:
                raise ConfigError(f"checkpoint: {error}") from error
            self._missed(step, str(error))
            return False
        except ShmFullError as error:
            self._missed(step, str(error))
            return False
        except FileNotFoundError as error:  # without an agent it ends with the node's first rank
            self._notices.missed(step, f"the memory is gone: {error}")
            return False
        except OSError as error:  # for example, no file descriptors are left
            self._missed(step, f"the memory cannot be used: {error}")
            return False
        except Exception as error:  # a tensor without readable bytes, or a device out of memory
            refusal = refused("the state", error)
            if first:
                self._has_saved = False
                raise refusal from error
            self._missed(step, str(refusal))
            return False
        if attempt.staging is None:
            if self._replicas.copying in (None, attempt.id):
                self._notices.missed(step, "all slots are needed, or are being read")
            else:  # every second save still succeeds, and a further slot would cost memory
                self._stats.skipped += 1
            return False
        attempt.missed = False
        self._replicas.staged(attempt.id, marked=bool(attempt.staging.facts["copy"]))
        self._stats.saves += 1
        session.spend("saves", 1)
        self._stats.cost_s += time.perf_counter() - began
        return True

    def _missed(self, step: int, why: str) -> None:
        """Count a save that was not started, and report the reason to the log and the agent."""
        self._notices.missed(step, why)
        session.report_unsaved(why)
