"""``Checkpointer``: saves without stopping the training, and loads what is newest.

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

It works under ``python``, ``torchrun`` and ``elastic-run``, which keeps the memory when a worker
dies. What the script does not say, the job's ``checkpoint:`` does, and else the defaults do:

================  ============================================================================
``every=1``       each call of ``save`` saves, since that costs the training next to nothing
``persist_every`` ``"5m"``: what is lost at most when memory is (a node and its peer at once, or
                  the whole job). That is 1 % of the time between two failures eight hours apart,
                  and a state of 10 GB then takes 33 MB/s of the storage, read at low priority.
                  Under ``python`` and ``torchrun`` the first one goes there after 30 s.
================  ============================================================================

``"auto"`` chooses the interval with the least lost time, where one save costs δ and a failure comes
every M on average: J. W. Young (A first order approximation to the optimum checkpoint interval,
CACM 17(9), 1974), as refined by J. T. Daly (A higher order estimate of the optimum checkpoint
interval for restart dumps, FGCS 22(3), 2006), equation 37::

    T = √(2δM) · (1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ     for δ < 2M, else M

For ``every`` δ is what a save has blocked the training for, the optimizer that waited included, as
measured. For ``persist_every`` it is how much longer steps took while the persister was busy, times
as long as it was, as measured; and the interval is never shorter than that time. M is
(6 h + the job's time) / (restarts + 1): six hours without a failure are assumed before anything is
known.
"""

import atexit
import contextlib
import itertools
import logging
import os
import re
import secrets
import sys
import threading
import time
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import IntEnum
from functools import partial
from math import inf, sqrt
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, SupportsFloat, cast

import torch
import torch.distributed as dist

from dlrover_py import arena
from dlrover_py.arena import NoRoom
from dlrover_py.owner import is_own
from dlrover_py.protocol.checkpoint import (
    Age,
    Answer,
    Id,
    Keep,
    Manifest,
    Order,
    Phase,
    Summary,
    age_of,
)
from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.trainer import session
from dlrover_py.trainer.alone import OVERTAKEN, PATIENCE_S, Memory, Persister, amend, host, unflag
from dlrover_py.trainer.rollcall import KeyValueStore, RollCall
from dlrover_py.trainer.settings import Settings
from dlrover_py.trainer.staging import Place, Stager, Staging
from dlrover_py.trainer.state import RNG, PerRank, Random, flatten, refused

if TYPE_CHECKING:
    from dlrover_py.trainer.restore import Loaded

log = logging.getLogger(__name__)

EVERY = 1
PERSIST_EVERY = "5m"
FIRST_S = 30.0
"""By default the first one goes to storage after so long, where no agent keeps the memory."""
PRIOR_S = 6 * 3600.0
"""One failure in so long is assumed before anything is known."""
DRAIN_S = 30.0
"""``close`` waits so long for the last vote: other ranks may be gone."""
LAST_TRIES, TRY_S = 100, 0.02
"""The last save before the end, which was asked for, tries so often to find a slot."""
LEAST_SLOWDOWN = 0.01
"""A busy persister is taken to cost at least so much of the training."""
AMENDS, AMEND_S = 100, 0.01
"""So often, and after such pauses, a slot is written that somebody else is writing."""
SOUGHT_S = 0.5
"""How often storage is looked at for what others still write there."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Every:
    """How often: one of these."""

    steps: int = 0
    seconds: float = 0.0
    auto: bool = False

    @classmethod
    def parse(cls, name: str, value: object) -> Self:
        """Read ``10``, ``"30s"``, ``"5m"``, ``"2h"`` or ``"auto"``.

        Raises:
            ConfigError: it is none of these.
        """
        if type(value) is int and value >= 1:
            return cls(steps=value)
        if value == "auto":
            return cls(auto=True)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value) if isinstance(value, str) else None
        if match is None or not float(match[1]):
            raise ConfigError(
                f"checkpoint: {name} is {value!r}: expected a number of steps (10), a time "
                '("30s", "5m", "2h") or "auto"'
            )
        return cls(seconds=float(match[1]) * _UNITS[match[2]])


def optimum_s(cost_s: float, mtbf_s: float) -> float:
    """The interval with the least lost time (Daly 2006, equation 37).

    Args:
        cost_s: what one save costs the training.
        mtbf_s: mean time between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(slots=True)
class Stats:
    """What saving has cost this rank so far."""

    calls: int = 0
    saves: int = 0
    """Begun."""
    sealed: int = 0
    skipped: int = 0
    """Due, but no slot was free, or no memory."""
    failed: int = 0
    blocked_s: float = 0.0
    """The training was held up, in ``save`` and before the optimizer's step, all in all."""
    cost_s: float = 0.0
    """The part of it that is the saves' own: calls that save nothing cost a little too."""
    persisted: int = 0
    """Known to be in storage; rank 0 counts them."""
    persist_s: float = 0.0
    """What the last one of these took."""
    why: str = ""
    """Why the last one that was skipped or has failed was."""


class Vote(NamedTuple):
    """What all ranks have agreed on: the greatest of each."""

    save: int = 0
    """Rank 0's clock says that a save is due."""
    persist: int = 0
    """… that one is to go to storage; 2: even if a persister is busy."""
    busy: int = 0
    """Some node's persister is."""
    stop: int = 0
    """Some rank was asked to stop."""
    fate: int = 0
    """Of the oldest save that is not settled: a :class:`Fate`."""
    part: int = 0
    """Digest of which part of the state a rank has in it."""
    unpart: int = 0
    """Minus that: all ranks have the same if the greatest of both say the same."""
    uncopied: int = 0
    """Of the save that peers copy: 0 all have, 1 some have not yet, 2 it is not there any more."""


class Marks(NamedTuple):
    """What a rank has in memory of its own when it has loaded."""

    ages: tuple[Age, ...]
    """Of all its sets."""
    marked: Mapping[Id, tuple[bool, int]]
    """Those that all were to copy: whether its peer has it, and the world of that time."""

    def denies(self, one: Id) -> bool:
        """Whether it would have the set if all had copied it; a rank that has come later, or was
        away then, knows nothing of it."""
        if one in self.marked:
            return not self.marked[one][0]
        age = age_of(one)
        return bool(self.ages) and min(self.ages) <= age and max(self.ages)[:2] >= age[:2]


def copied_by_all(said: Sequence[Marks], loaded: Id) -> Id | None:
    """The newest set that outlives the loss of a node, as far as the ranks can tell.

    One of which every rank of its world speaks is better than a newer one of which some have gone:
    their parts are at their peers alone.

    Args:
        said: by each rank.
        loaded: what is newer than this could not be, for something of it is gone.
    """
    worlds = {one: world for mine in said for one, (_, world) in mine.marked.items()}
    found = list[tuple[bool, Age, Id]]()
    for one, world in worlds.items():
        having = sum(mine.marked.get(one, (False, 0))[0] for mine in said)
        sure = having == world or (having and not any(mine.denies(one) for mine in said))
        if sure and age_of(one) <= age_of(loaded):
            found.append((having == world, age_of(one), one))
    return max(found)[2] if found else None


class Fate(IntEnum):
    """What has become of a save. The greatest counts: what is missed is known once all are done."""

    SEALED = 0
    MISSED = 1
    UNDER_WAY = 2


@dataclass(eq=False, slots=True)
class _Attempt:
    """A save that is due, until all ranks know what has become of it on all of them.

    That a save is due, and that one is settled, ranks learn in the same call. So the oldest that is
    not settled is the same one for all, and a vote need not name it.
    """

    id: Id
    flagged: bool
    began: float
    """By the clock."""
    forced: bool = False
    staging: Staging | None = None
    missed: bool = False
    """On this rank: not begun, for want of a slot or of memory, or the state cannot be saved."""

    @property
    def fate(self) -> Fate:
        """On this rank."""
        if self.missed:
            return Fate.MISSED
        if self.staging is None or not self.staging.done.is_set():
            return Fate.UNDER_WAY
        return Fate.MISSED if self.staging.summary is None else Fate.SEALED


class Checkpointer:
    """Saves and loads the state of a training. All ranks of a world use it in the same way."""

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        *,
        every: int | str | None = None,
        persist_every: int | str | None = None,
        keep: int | Mapping[str, int] | Keep | None = None,
        rng: bool = True,
        strict: bool = True,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take nothing yet: the first ``load`` or ``save`` does.

        Args:
            dir: where checkpoints go that are to outlive the job: a folder that all nodes share, or
                an address that fsspec knows (``s3://bucket/run-1``). None: the job's; if it has
                none, they are kept in memory only.
            every: how often the state is saved in memory: steps, a time (``"30s"``), ``"auto"``.
            persist_every: how often one of these goes to ``dir``.
            keep: how many checkpoints stay in ``dir``, or rules as a job has them
                (``{"last": 3, "every": 1000, "best": 2}``; the best has the lowest metric, or with
                ``"highest": True`` the highest).
            rng: save the state of the random generators too.
            strict: ``load`` refuses a checkpoint that lacks a tensor of the state.
            settings: this worker's place; as the environment says if None.
            clock: seconds that only grow.

        Raises:
            ConfigError: an argument, or the job's ``checkpoint:``, cannot be used.
        """
        self.settings = Settings.from_environment() if settings is None else settings
        job = self.settings.checkpoint
        self.every = Every.parse("every", _first(every, job.get("every"), EVERY))
        self.persist_every = Every.parse(
            "persist_every", _first(persist_every, job.get("persistEvery"), PERSIST_EVERY)
        )
        where = dir if dir is not None else job.get("dir")
        self.dir = None if where is None else _directory(where)
        self.keep = _keep(_first(keep, job.get("keep"), Keep()))
        self.rng, self.strict = rng, strict
        self.stats = Stats()
        self._clock = clock
        self._pid = os.getpid()
        self._age_s = float(job.get("ageS") or 0.0)
        """Of the job, when this round began."""
        self._began = clock()
        self._closed = False
        self._inside: int | None = None
        """The thread that is in the midst of a call."""
        self._kind = self._doing = ""
        """The call that is under way, or was last, in words."""
        self._rollcall: RollCall | None = None
        self._stop = False
        self._asks = False
        """The script has asked whether to stop."""
        self._open_at: _Site | None = None
        self._lap = 0
        self._previous: int | None = None
        self._flagged_step: int | None = None
        self._attempts: deque[_Attempt] = deque()
        """Not settled yet, oldest first: two at most."""
        self._attempted = -1
        """The greatest step of this lap."""
        self._whole: Id | None = None
        """The newest set that is known to be sealed on all ranks."""
        self._unstored: Id | None = None
        """The newest that all ranks have, if nothing newer has gone to storage."""
        self._saved = False
        """All ranks have called `save`."""
        self._accepted = False
        """The state could be saved, once."""
        self._again = False
        """A set that was to go to storage was missed: the next one is to."""
        self._sharded = False
        """Ranks have different parts: copies of one set are needed of all of them."""
        self._copying: Id | None = None
        """What peers copy now."""
        self._marked = False
        """This rank has marked that; one that has not the memory has not."""
        self._copied: Id | None = None
        """What all peers have: the loss of a node costs no more than what came after it."""
        self._voted_copy: Id | None = None
        """Of which the vote that is not heard yet speaks."""
        self._loaded = ""
        self._pending: Callable[[float | None], list[int]] | None = None
        """The vote that was given in the call before."""
        self._vote = Vote()
        self._hurries = (
            persist_every is None and "persistEvery" not in job and not self.settings.arena
        )
        """The first one goes to storage after `FIRST_S`."""
        self._saved_at = clock()
        self._flagged_at = self._saved_at - self._ahead_s
        self._busy: Id | None = None
        self._busy_since = 0.0
        self._ordered: Id | None = None
        """What was last on its way to storage."""
        self._stored: Future[bool] | None = None
        """Whether that is there; None: it is on its way, or nobody has asked."""
        self._finished = ""
        """The last attempt that this rank's persister has brought to a good end."""
        self._steps = _StepTimes(clock)
        self._told: set[str] = set()
        atexit.register(self._at_exit)

    # --- what scripts call ---

    def save(
        self,
        step: int,
        state: Mapping[str, object],
        *,
        metric: SupportsFloat | None = None,
        force: bool = False,
    ) -> bool:
        """Save the state, if that is due; call it after each step, on all ranks.

        It returns when everything has been copied that may change before the next
        ``optimizer.step()``; that waits for the rest, if it is not done by then. Memory that does
        not suffice or is in use, and an object of the state that raises after a first good save,
        cost this save and a line in the log, never the training.

        Args:
            step: steps finished, counted from the start of the training.
            state: modules, optimizers, tensors, what has ``state_dict``, and mappings of these.
            metric: what the step is worth, where ``keep`` has ``best``: a number, or its tensor.
            force: save it whatever the policy says, have it go to storage, and return once all
                ranks have it in memory. For all ranks, or none.

        Returns:
            Whether this rank has begun to save it. False in the handler of a signal that has come
            in the midst of another call, or while an optimizer waits for a copy: neither can go on
            before the handler is over.

        Raises:
            ConfigError: the first state has something that cannot be saved, or that raises, which
                in a later one costs that save; or the process group of a larger world has not been
                initialised.
        """
        if os.getpid() != self._pid:
            return False
        if self._closed:
            self._say_once("save() after close() saves nothing: close it once all is saved")
            return False
        if self._interrupts("save()"):
            return False
        if type(step) is not int or not 0 <= step <= session.MAX_COUNT:
            raise ValueError(f"step is {step!r}: expected an int from 0 to 2**53")
        if isinstance(metric, torch.Tensor):
            metric = metric.detach()  # a loss that has a graph
        worth = None if metric is None else float(metric)
        _see_whether_it_has_keys(state)
        began = time.perf_counter()
        with self._call("save()", step):
            site = self._site()
            waited, site.fenced_s = site.stager.waited_s - site.fenced_s, site.stager.waited_s
            self.stats.blocked_s += waited
            self.stats.cost_s += waited
            self.stats.calls += 1
            if self.stats.calls == 1 and site.rank == 0 and self.dir is not None:
                self._look_for_obstacles()
            self._steps.tick(busy=self._busy is not None)
            try:
                return self._save(site, step, state, worth, force)
            finally:
                self.stats.blocked_s += time.perf_counter() - began
                self._previous = step

    def load(
        self, state: Mapping[str, object], *, init: str | os.PathLike[str] | None = None
    ) -> int | None:
        """Fill the state with the newest checkpoint there is; collective.

        From this node's memory, else from a peer's, else from storage. Call it once everything in
        the state is built, and wrapped (DDP, ``fully_shard``).

        Args:
            state: as ``save`` is given it.
            init: what a training without a checkpoint yet begins with: a folder or address that
                ``torch.distributed.checkpoint.save`` has written.

        Returns:
            Its step; None if there is none, and the state is as it was, or as ``init`` has it.

        Raises:
            CheckpointError: one that exists could not be read as a whole, and the state has been
                touched.
            ConfigError: as ``save``; or ``dir`` is a checkpoint by itself.
        """
        _see_whether_it_has_keys(state)
        with self._call("load()"):
            return self._load(state, init)

    def _load(self, state: Mapping[str, object], init: str | os.PathLike[str] | None) -> int | None:
        from dlrover_py import depot
        from dlrover_py.storage import Store
        from dlrover_py.trainer import restore

        site = self._site()
        self._settle(site)
        agent = depot.Link.local(self.settings.depot) if self.settings.depot else None
        try:
            found = restore.load(
                self._whole_state(state),
                rank=site.rank,
                world=site.world,
                arena=site.folder,
                agent=agent,
                store=None if self.dir is None else Store(self.dir),
                strict=self.strict,
                log=log,
                round=site.round,
                job=site.job,
            )
        finally:
            if agent is not None:
                agent.close()
        self._lap, self._attempted = self._lap + 1, -1
        self._attempts.clear()
        self._whole, self._again = None, False
        self._ordered = self._unstored = None
        self._go_on_with_copies(site, found.id if found is not None and found.memory else None)
        self._flagged_step = self._previous = None
        self._saved_at = self._clock()
        self._flagged_at = self._saved_at - self._passed_s(found)
        step: int | None = None
        if found is not None:
            step = self._previous = self._flagged_step = found.step
            self._loaded = found.folder
            self._tell_of_store()
            self._whole = found.id
        elif init is not None:
            from dlrover_py.trainer.foreign import load_dcp

            where = os.fspath(init)
            load_dcp(state, where, rank=site.rank, world=site.world, strict=self.strict, log=log)
        elif self.dir is not None and (wrong := Store(self.dir).mistaken()):
            raise ConfigError(
                f"{wrong}: name the folder above it, or load(state, init=…) to begin with it"
            )
        site.stager.warm(_expected_bytes(self._whole_state(state), site.rank))
        return step

    @property
    def should_stop(self) -> bool:
        """Whether to end the loop now: the same on all ranks after the same ``save``.

        ``session.should_stop()`` of any rank, agreed on by all: asked for in one ``save``, true
        from the next one on, which is due then. So the newest state is in memory, and goes to
        storage by itself.
        """
        self._asks = True
        site = self._open_at
        alone = site is None or site.world == 1
        if not self._stop and alone and (not self.stats.calls or self._previous == self._attempted):
            self._stop = session.should_stop()
        return self._stop

    def wait(self, *, persisted: bool = False, timeout_s: float | None = None) -> bool:
        """Wait until what this rank has saved is sealed.

        Args:
            persisted: and until what is to go to storage is there, or has failed; on all ranks.
            timeout_s: for so long at most.

        Returns:
            False: it has taken too long; or what was to go to storage is not there, and the log or
            the job's condition says why.
        """
        site = self._open_at
        if site is None or os.getpid() != self._pid:
            return True
        if self._interrupts("wait()"):
            return False
        with self._call("wait()"):
            return self._wait(site, persisted, timeout_s)

    def _wait(self, site: "_Site", persisted: bool, timeout_s: float | None) -> bool:
        end = None if timeout_s is None else self._clock() + timeout_s
        if not persisted:
            return site.stager.wait(timeout_s)
        self._settle(site)  # by all or by none: a copy ends, so the limit is the storage's
        pause = threading.Event()
        while self._busy_now(site):
            left = 0.05 if end is None else min(0.05, end - self._clock())
            if left <= 0:
                return False
            if site.persister is not None:
                site.persister.wait(left)
            pause.wait(left)  # the agent's persister says by the slot that it is done
        if self._again or self._ordered is None:  # some rank has missed it, or there was none
            return not self._again
        if self._stored is None:
            self._stored = self._is_stored(site, self._ordered)
        left = PATIENCE_S if end is None else max(0.0, end - self._clock())
        try:
            return self._stored.result(left)
        except TimeoutError:
            return False

    def close(self) -> None:
        """Wait for what is under way, and let go of everything. Call it on all ranks, or on none.

        Without an agent that includes what is being written to storage.
        """
        if self._closed or os.getpid() != self._pid or self._interrupts("close()"):
            return
        with self._call("close()"):
            if self._open_at is not None:
                self._settle(self._open_at)
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._let_go(failed=True)  # the other ranks may not come

    @contextlib.contextmanager
    def _call(self, kind: str, step: int | None = None) -> Iterator[None]:
        self._inside = threading.get_ident()
        self._kind, self._doing = kind, kind if step is None else f"{kind} of step {step}"
        try:
            yield
        finally:
            self._inside = None

    def _interrupts(self, what: str) -> bool:
        """Whether this thread is in the midst of another call, or waits at the fence: then this is
        a signal's handler, and what it would wait for, or take away, is held below it."""
        here, site = threading.get_ident(), self._open_at
        if here not in (self._inside, None if site is None else site.stager.waiter):
            return False
        self._say_once(
            f"{what} does nothing in the handler of a signal that has come in the midst of another "
            "call of the Checkpointer, or while an optimizer waits for a copy: have the handler "
            "set a flag, and the loop save and end where it finds that"
        )
        return True

    # --- one save ---

    def _save(
        self,
        site: "_Site",
        step: int,
        state: Mapping[str, object],
        metric: float | None,
        force: bool,
    ) -> bool:
        stops = self._stop
        self._hear(site)
        last = self._stop and not stops  # the same on all ranks
        due = force or last or self._due(step)
        persist = due and self.dir is not None and (force or self._persist_due(step))
        attempt: _Attempt | None = None
        if due:
            site.stager.wait()  # so that this vote settles the save before
            attempt = self._begin(site, step, flagged=persist, forced=force)
        self._ask(site)
        if attempt is None:
            return False
        if force or last:
            self._hear(site)
        try:
            return self._stage(
                site, attempt, state, metric, tries=LAST_TRIES if force or last else 1
            )
        finally:
            if force or last:  # even if the state is refused: the other ranks wait for this vote
                site.stager.wait()
                self._ask(site)
                self._hear(site)

    def _begin(self, site: "_Site", step: int, *, flagged: bool, forced: bool) -> _Attempt:
        """A save is due: the same on all ranks, whatever becomes of it on this one."""
        if step <= self._attempted:  # gone back, or the same once more: another set
            self._lap += 1
        self._attempted = step
        now = self._saved_at = self._clock()
        if flagged:
            self._flagged_at, self._flagged_step, self._again = now, step, False
        attempt = _Attempt((step, site.round, self._lap), flagged, now, forced)
        self._attempts.append(attempt)
        return attempt

    def _due(self, step: int) -> bool:
        if not self.every.steps:
            return bool(self._vote.save)
        previous = step - 1 if self._previous is None else self._previous
        return step // self.every.steps != previous // self.every.steps

    def _persist_due(self, step: int) -> bool:
        vote = self._vote
        if self.persist_every.steps:
            base = self._flagged_step
            if base is None:
                base = self._flagged_step = step - 1
            due = step // self.persist_every.steps != base // self.persist_every.steps
        else:
            due = vote.persist > 0
        return (due or self._again) and (not vote.busy or vote.persist == 2)

    def _stage(
        self,
        site: "_Site",
        attempt: _Attempt,
        state: Mapping[str, object],
        metric: float | None,
        *,
        tries: int,
    ) -> bool:
        began = time.perf_counter()
        step, _, lap = attempt.id
        attempt.missed = True
        first = not self._accepted
        try:
            flat = flatten(self._whole_state(state), rank=site.rank)
            objects = flat.encoded()
        except ConfigError as error:
            if first:
                raise
            self._missed(step, str(error))  # the other ranks go on, and wait for this one's votes
            session.report_unsaved(self.stats.why)
            return False
        self._accepted = True
        for note in flat.notes:
            self._say_once(note)
        # What all ranks are known to have, until they are known to have the one after it; and what
        # peers copy, or have.
        spared = {one.id for one in self._attempts if one is not attempt}
        copying = self._copying if self._marked else None
        spared |= {one for one in (self._whole, copying, self._copied) if one is not None}
        copy = self._sharded and self._copying is None and site.copies
        if copy:  # the same on all ranks, whatever becomes of it on this one
            self._copying, self._marked = attempt.id, False
        pause = threading.Event()
        try:
            copy = copy and site.stager.grow()
            for _ in range(tries):  # who reads a slot lets go of it
                attempt.staging = site.stager.stage(
                    step,
                    flat.leaves,
                    objects,
                    lap=lap,
                    persist=attempt.flagged,
                    metric=metric,
                    copy=copy,
                    spared=spared,
                )
                if attempt.staging is not None or tries == 1:
                    break
                pause.wait(TRY_S)
        except NoRoom as error:
            self._missed(step, str(error))
            session.report_unsaved(str(error))
            return False
        except FileNotFoundError as error:  # without an agent it goes with the node's first rank
            self._missed(step, f"the memory is gone: {error}")
            return False
        except OSError as error:  # no descriptors are left, say
            self._missed(step, f"the memory cannot be used: {error}")
            session.report_unsaved(self.stats.why)
            return False
        except Exception as error:  # a tensor without bytes to read, a device out of memory
            refusal = refused("the state", error)
            if first:
                self._accepted = False
                raise refusal from error
            self._missed(step, str(refusal))
            session.report_unsaved(self.stats.why)
            return False
        if attempt.staging is None:
            if self._copying in (None, attempt.id):
                self._missed(step, "all slots are needed, or are being read")
            else:  # each second one goes on, and the memory is worth more than the other
                self.stats.skipped += 1
            return False
        attempt.missed = False
        if self._copying == attempt.id:
            self._marked = bool(attempt.staging.facts["copy"])
        self.stats.saves += 1
        self.stats.cost_s += time.perf_counter() - began
        return True

    def _missed(self, step: int, why: str) -> None:
        self.stats.skipped += 1
        self.stats.why = why
        if why not in self._told:
            self._told = {*self._told, why} if len(self._told) < 100 else {why}
            log.warning("checkpoint of step %d is skipped: %s", step, why)

    def _whole_state(self, state: Mapping[str, object]) -> Mapping[str, object]:
        if not self.rng:
            return state
        own: MutableMapping[str, object] = {RNG: PerRank(Random())}
        return ChainMap(cast(MutableMapping[str, object], state), own)  # load() writes into state

    def _say_once(self, note: str) -> None:
        kind = re.sub(r"[\d,.]+", "", note)  # the same reason with another size is the same
        if kind not in self._told:
            self._told.add(kind)
            log.warning("checkpoints: %s", note)

    # --- what peers copy ---

    def _go_on_with_copies(self, site: "_Site", loaded: Id | None) -> None:
        """Until peers have something of this lap, the loss of a node costs no more than what came
        after the set that all of them had before it. Collective.

        Args:
            site: of this worker.
            loaded: from memory; None: from elsewhere, or nothing.
        """
        self._copying = self._copied = None
        if site.copies and site.world > 1:
            found = [s for s in site.stager.found() if s is not None]
            marked = {s.id: (s.copied, s.world) for s in found if s.copy}
            said = site.gather(Marks(tuple(s.age for s in found), marked))
            self._copied = None if loaded is None else copied_by_all(said, loaded)
            self._sharded = any(mine.marked for mine in said)  # else the next votes will tell
        self._unmark(site)

    def _unmark(self, site: "_Site") -> None:
        """Have peers copy and keep nothing of this rank but what is known to be copied by all, or
        is to be; if that is nothing, whatever is newest, for all nodes have the same."""
        marked = {self._copying, self._copied}

        def change(summary: Summary) -> Summary:
            return summary if summary.id in marked else replace(summary, copy=False, copied=False)

        site.amend(change)

    def _uncopied(self, site: "_Site") -> int:
        """What has become of the save that peers copy."""
        if self._copying is None or not self._marked:
            return 0
        found = site.stager.found()
        for summary in found:
            if summary is not None and summary.id == self._copying:
                return int(not summary.copied)
        return 1 if None in found else 2  # it is being filled, or its first page written anew

    def _clock_says(self) -> Vote:
        """What rank 0's clock and figures say."""
        now = self._clock()
        save = persist = 0
        if not self.every.steps:
            seconds = self.every.seconds
            if self.every.auto:
                cost_s = self.stats.cost_s / max(1, self.stats.saves)
                seconds = optimum_s(cost_s, self.mtbf_s) if cost_s else 0.0
            save = int(now - self._saved_at >= seconds)
        wait_s = self._persist_s
        if self.dir is not None:
            if not self.persist_every.steps:
                persist = int(now - self._flagged_at >= wait_s)
            waiting = self._busy is not None and not any(one.flagged for one in self._attempts)
            if waiting and now - self._busy_since > max(PATIENCE_S, 4 * wait_s):
                persist = 2
        return Vote(save=save, persist=persist)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures, as far as it is known."""
        age_s = self._age_s + self._clock() - self._began
        return (PRIOR_S + age_s) / (self.settings.restart_count + 1)

    def _passed_s(self, found: "Loaded | None") -> float:
        """How much of the interval between two that go to storage is over, of that which was
        loaded. Rank 0's clock says when the next one is due, to all.

        If each start began a new one, a job that fails more often would never store anything.
        """
        if found is not None and found.stored_at is not None:
            past = time.time() - found.stored_at  # noqa: TID251 - as the manifest has it; clamped
        elif self.settings.restart_count and "ageS" not in self.settings.checkpoint:
            past = inf  # nobody knows how long it has run, with nothing in storage
        elif self.settings.restart_count or found is not None:
            past = self._age_s + self._clock() - self._began
        else:
            past = self._ahead_s
        return min(max(past, 0.0), self._persist_s)

    @property
    def _ahead_s(self) -> float:
        """By how much the first one that goes to storage comes earlier than the later ones."""
        return self._persist_s - FIRST_S if self._hurries else 0.0

    @property
    def _persist_s(self) -> float:
        return self._best_persist_s() if self.persist_every.auto else self.persist_every.seconds

    def _best_persist_s(self) -> float:
        if not self.stats.persist_s:
            return Every.parse("", PERSIST_EVERY).seconds
        cost = self.stats.persist_s * max(LEAST_SLOWDOWN, self._steps.slowdown)
        return max(self.stats.persist_s, optimum_s(cost, self.mtbf_s))

    def _mine(self, site: "_Site") -> Vote:
        """This rank's vote."""
        mine = self._clock_says() if site.rank == 0 else Vote()
        oldest = self._attempts[0].staging if self._attempts else None
        part = 0 if oldest is None else int(str(oldest.facts["part"])[:15], 16)
        return mine._replace(
            busy=int(self._busy_now(site)),
            uncopied=self._uncopied(site),
            part=part,
            unpart=-part,
            # Who never asks is signalled at once, and not only when the grace is over.
            stop=int(self._stop or (self._asks and session.should_stop())),
            fate=self._attempts[0].fate if self._attempts else Fate.UNDER_WAY,
        )

    def _ask(self, site: "_Site") -> None:
        """Give this rank's vote, which is heard in the next call."""
        if site.ballot is None:  # nobody else to ask
            self._hear(site)
        else:
            self._voted_copy = self._copying
            self._pending = site.ballot.launch(self._mine(site))

    def _hear(self, site: "_Site", timeout_s: float | None = None) -> None:
        """Take what was agreed on in the call before.

        Raises:
            RuntimeError: another rank is gone, or has not voted in this time.
        """
        if site.ballot is None:
            self._vote = self._mine(site)
        elif self._pending is not None:
            heard, self._pending = self._pending, None
            with self._rollcall.during(self._kind, self._doing) if self._rollcall else _ALONE:
                self._vote = Vote(*heard(timeout_s))
        else:
            return
        self._stop = self._stop or bool(self._vote.stop)
        if self._attempts and self._vote.fate != Fate.UNDER_WAY:
            if self._vote.fate == Fate.SEALED:
                self._sharded = self._vote.part != -self._vote.unpart
                if not self._sharded and (self._copied or self._copying):
                    self._copied = self._copying = None
                    self._unmark(site)
            self._resolve(site, self._attempts.popleft(), whole=self._vote.fate == Fate.SEALED)
        known = all(one.id != self._copying for one in self._attempts)  # that all have it
        if self._copying is not None and self._voted_copy == self._copying and known:
            if self._vote.uncopied == 0:
                self._copied = self._copying
            if self._vote.uncopied != 1:
                self._copying = None
            if self._vote.uncopied == 2:
                self._unmark(site)

    def _settle(self, site: "_Site") -> None:
        """Learn what has become of all saves; collective, but for ranks that are gone."""
        site.stager.wait()
        try:
            self._hear(site, DRAIN_S)
            if any(one.flagged for one in self._attempts):  # it is to be ordered, or not
                if self._rollcall is not None:
                    self._rollcall.check_in(self._kind, self._doing, limit_s=DRAIN_S)
                self._ask(site)
                self._hear(site, DRAIN_S)
        # A ValueError: the group is no more. A ConfigError: some ranks did not come.
        except (RuntimeError, ValueError, ConfigError) as error:
            log.warning("the last vote on checkpoints was not heard: %s", error)

    def _resolve(self, site: "_Site", one: _Attempt, *, whole: bool) -> None:
        """All ranks know now whether all have it."""
        if one.staging is not None:
            if one.staging.summary is not None:
                self.stats.sealed += 1
            else:
                self.stats.failed += 1
                self.stats.why = one.staging.why
        if whole:
            self._whole, self._unstored = one.id, None if one.flagged else one.id
            site.tidy()
            if one.flagged:
                self._busy, self._busy_since = one.id, one.began
                self._ordered, self._stored = one.id, None
                if site.persister is not None:
                    self._order(site, site.persister, one.id)
            return
        if site.rank == 0 and (one.forced or one.flagged):
            log.warning(
                "checkpoint of step %d is nobody's: some rank has not got it, and its log says "
                "why%s",
                one.id[0],
                "; the next one goes to storage in its place" if one.flagged else "",
            )
        if one.id == self._copying:  # copies of it would be of no use
            self._copying = None
            self._unmark(site)
        if one.flagged:
            site.amend(lambda s: replace(s, persist=False) if s.id == one.id else s)
            self._again = True

    # --- storage ---

    def _order(self, site: "_Site", persister: Persister, one: Id) -> None:
        """Where there is no agent: have this node's share written."""
        assert self.dir is not None
        step, round_, lap = one
        persister.order(
            Order(
                attempt=_attempt_of(site, one),
                step=step,
                round=round_,
                lap=lap,
                world=site.world,
                ranks=tuple(site.ranks),
                arena=str(site.folder),
                dir=self.dir,
                job=site.job,
                node=site.node,
                writers=tuple(site.nodes) if site.rank == 0 else (),
                grant=0,
                keep=self.keep,
                spare=(self._loaded,) if self._loaded else (),
            ),
            queue=len(site.nodes) == 1,
        )

    def _answered(self, answer: Answer) -> None:
        """What the persister says; in its thread."""
        for note in answer.notes:
            log.warning("checkpoint %s: %s", answer.attempt, note)
        site = self._open_at
        if answer.phase is Phase.DONE:
            self._finished = answer.attempt
        if answer.phase is Phase.FAILED:
            self.stats.why = answer.why
            if answer.why != OVERTAKEN:
                log.warning("a checkpoint was not written to %s: %s", self.dir, answer.why)
            else:
                self._say_once(f"some are not written to {self.dir}: {answer.why}")
        if site is not None and answer.phase in (Phase.DONE, Phase.FAILED):
            for _, summary in arena.scan(site.folder):  # it does so itself, unless it has died
                if summary.persist and _attempt_of(site, summary.id) == answer.attempt:
                    unflag(site.folder, summary.id)

    def _busy_now(self, site: "_Site") -> bool:
        """Whether a set of this rank is on its way to storage: its slot says so."""
        if any(one.flagged for one in self._attempts):
            return True  # or will be
        if self._busy is None:
            return False
        held = (s for s in site.stager.found() if s is not None and s.id == self._busy)
        if any(summary.persist for summary in held):
            return True
        if site.persister is not None and not site.persister.wait(0):
            return True  # how it went is said in a moment
        if site.rank == 0:  # the slot says that it is over, and not how it went
            took_s = self._clock() - self._busy_since
            self._stored = self._is_stored(site, self._busy)
            self._stored.add_done_callback(partial(self._count, took_s))
        self._busy = None
        return False

    def _count(self, took_s: float, stored: "Future[bool]") -> None:
        if stored.result():
            self.stats.persisted += 1
            self.stats.persist_s = took_s

    def _is_stored(self, site: "_Site", one: Id) -> "Future[bool]":
        """Whether storage has a set that was to go there.

        Without an agent rank 0 has the persister that commits. The others look for the manifest, in
        a thread: a store may hang.
        """
        found: Future[bool] = Future()
        if site.persister is not None and site.rank == 0:
            found.set_result(self._finished == _attempt_of(site, one))
        else:
            threading.Thread(
                target=lambda: found.set_result(self._seek(site, one)),
                name="dlrover-store",
                daemon=True,
            ).start()
        return found

    def _seek(self, site: "_Site", one: Id) -> bool:
        """Look for a set in storage, for as long as other nodes still write their parts of it."""
        from dlrover_py.storage import PARTS, Store

        assert self.dir is not None
        pause, end = threading.Event(), time.monotonic() + PATIENCE_S
        try:
            place = Store(self.dir).place
            while time.monotonic() < end:
                place.refresh("")
                names = {n for n in place.names() if n.startswith(f"step-{one[0]}.")}
                for name in names:
                    if name.endswith(".json"):
                        m = Manifest.decode(place.read(name))
                        if (m.job, m.step, m.round, m.lap) == (site.job, *one) and not m.void:
                            return True
                begun = (n for n in names if not n.endswith(".json") and f"{n}.json" not in names)
                if not any(place.names(f"{name}/{PARTS}") for name in begun):
                    return False
                pause.wait(SOUGHT_S)
        except (OSError, ValueError, DLRoverError) as error:
            log.warning("whether step %d is in %s is not known: %s", one[0], self.dir, error)
        return False

    # --- beginning and end ---

    def _site(self) -> "_Site":
        self._check_in()
        if self._open_at is None:
            self._take_place()
            self._open_at = _Site(self.settings, self.dir is not None, self._answered)
            self._tell_of_store()
            held = [s for s in self._open_at.stager.found() if s is not None]
            # Nothing is known of it yet; it may be what the job is to be restored from.
            newest = max(held, key=lambda s: s.age, default=None)
            self._whole = None if newest is None else newest.id
        return self._open_at

    def _check_in(self) -> None:
        """Wait for the other ranks before the first save, and before each load.

        A rank that alone saves or loads is found before its collectives could be taken for those
        of the training. Later saves are not worth that: :meth:`RollCall.during` looks after them.
        """
        if (self._kind == "save()" and self._saved) or not dist.is_available():
            return
        if self._rollcall is None and dist.is_initialized() and dist.get_world_size() > 1:
            self._rollcall = RollCall(
                dist.get_rank(),
                dist.get_world_size(),
                _store_of_the_group(),
                name=f"checkpointer-{next(_numbers)}",
                say=lambda words: log.warning("checkpoints: %s", words),
            )
        if self._rollcall is not None and self._kind in ("save()", "load()"):
            self._rollcall.check_in(self._kind, self._doing)
        if self._kind == "save()":
            self._saved = True

    def _look_for_obstacles(self) -> None:
        """Warn of a directory that cannot be written to long before the first write is due.

        In a thread, for a file system may hang.
        """
        from dlrover_py.storage import Store

        def look() -> None:
            if why := Store(str(self.dir)).obstacle():
                log.warning("checkpoints: nothing can be written to %s: %s", self.dir, why)

        threading.Thread(target=look, name="dlrover-store", daemon=True).start()

    def _take_place(self) -> None:
        """See that nobody else of this process has its place in the job's memory.

        Two would fill each other's slots, and one would load what the other has saved.

        Raises:
            ConfigError: somebody has.
        """
        if not self.settings.arena:
            return
        place = self.settings.arena, self.settings.place, self.settings.local_rank
        before = _places.get(place)
        if before is not None and before._pid == os.getpid():
            if not before._closed:
                raise ConfigError(
                    "checkpoint: this worker has an open Checkpointer already, and the job's "
                    "memory has room for one: put all that is to be saved into one state"
                )
            if before.dir != self.dir:
                raise ConfigError(
                    f"checkpoint: this worker had a Checkpointer for {before.dir}, and what it has "
                    f"saved is in the job's memory: expected the same directory, found {self.dir}; "
                    "make another training a job of its own"
                )
            self._lap = before._lap + 1  # what it stages is newer
        _places[place] = self

    def _tell_of_store(self) -> None:
        """What the agent's persister has to know."""
        if self.settings.arena and self.dir is not None:
            spare = (self._loaded,) if self._loaded else ()
            session.report_store(self.dir, self.keep.rules, spare)

    def _at_exit(self) -> None:
        """Let go, if the script has not; without the other ranks, which may be gone."""
        self._let_go(failed=hasattr(sys, "last_value"))

    def _let_go(self, *, failed: bool = False) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        site = self._open_at
        if site is not None:
            if site.world == 1:  # nobody else need be there for what is due to be written
                self._settle(site)
            if not failed:
                self._tell_what_is_lost(site)
        self._closed = True
        if self._rollcall is not None:
            self._rollcall.close()
        atexit.unregister(self._at_exit)
        if site is not None:
            site.close(failed=failed)

    def _tell_what_is_lost(self, site: "_Site") -> None:
        site.stager.wait()
        unheard = (one.id for one in reversed(self._attempts) if one.fate is Fate.SEALED)
        lost = next(unheard, self._unstored)
        if site.rank != 0 or lost is None or self._stop:
            return
        if self.dir is None:
            log.warning(
                "checkpoints: step %d is in memory only, and goes with the job, for no directory "
                'is given: Checkpointer("/data/run-1"), or the job\'s checkpoint.dir',
                lost[0],
            )
        elif not self.settings.arena:  # else the job stores it
            log.warning(
                "step %d is in memory only, and goes with it: save(step, state, force=True), and "
                "close() on all ranks, have it written to %s",
                lost[0],
                self.dir,
            )


_places: dict[tuple[str, int | None, int], Checkpointer] = {}
"""Who had a place in an agent's memory last; of a parent process, perhaps."""


_numbers = itertools.count()
"""Of the Checkpointers of this process that several ranks use together."""
_ALONE = contextlib.nullcontext()


def _store_of_the_group() -> KeyValueStore | None:
    """The store by which the ranks of the default group have met; None if torch hides it."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else cast(KeyValueStore, find())


class _StepTimes:
    """How long steps take, with a busy persister and without: means that forget."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: float | None = None
        self._mean: dict[bool, float] = {}

    def tick(self, *, busy: bool) -> None:
        """A step has ended."""
        now = self._clock()
        if self._last is not None:
            spent, mean = now - self._last, self._mean.get(busy)
            self._mean[busy] = spent if mean is None else 0.95 * mean + 0.05 * spent
        self._last = now

    @property
    def slowdown(self) -> float:
        """By which part steps take longer while it is busy; 0 as long as that is not known."""
        idle, busy = self._mean.get(False), self._mean.get(True)
        return max(0.0, busy / idle - 1.0) if idle and busy else 0.0


_works: deque[Any] = deque(maxlen=64)
"""Gloo's thread must not be the last to let go of one: it would then wait for the GIL, which who
drops the process group (DDP, at the end of a script) holds while it waits for that thread."""


class _Ballot:
    """An asynchronous all-reduce of a few numbers in the default group, on its own device."""

    def __init__(self) -> None:
        backend = str(dist.get_backend())
        on_host = any(name in backend for name in ("gloo", "mpi", "ucc"))
        self._device = torch.device("cpu" if on_host else torch.accelerator.current_accelerator())
        self._side: Any = None if on_host else torch.cuda.Stream()

    def launch(self, vote: Vote) -> Callable[[float | None], list[int]]:
        """Begin; what is returned waits for the end, and gives the greatest of each number.

        It takes seconds, or None for the group's own limit, and raises RuntimeError after that. On
        a GPU the group's watchdog knows the limit.
        """
        numbers = torch.tensor(vote, dtype=torch.int64, device=self._device)
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, async_op=True)
        if self._side is None:
            _works.append(work)

            def wait(timeout_s: float | None) -> list[int]:
                if timeout_s is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout_s))
                return [int(n) for n in numbers.tolist()]

            return wait
        with torch.cuda.stream(self._side):  # the training's own stream waits for nothing
            work.wait()
            here = torch.empty_like(numbers, device="cpu", pin_memory=True)
            here.copy_(numbers, non_blocking=True)
            event = self._side.record_event()

        def heard(_: float | None) -> list[int]:
            event.synchronize()
            return [int(n) for n in here.tolist()]

        return heard


class _Site:
    """Where this worker is: its world, its slots, and without an agent its node's persister."""

    def __init__(
        self, settings: Settings, stores: bool, answered: Callable[[Answer], None]
    ) -> None:
        together = dist.is_available() and dist.is_initialized()
        if settings.size > 1 and not together:
            raise ConfigError(
                f"checkpoint: this is one of {settings.size} workers: expected "
                "torch.distributed.init_process_group() before the first load() or save()"
            )
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        self.ballot = _Ballot() if self.world > 1 else None
        self.memory: Memory | None = None
        self.persister: Persister | None = None
        self.fenced_s = 0.0
        """What the stager's fence had cost at the last ``save``."""
        self.ranks, self.node, self.nodes = [self.rank], "n0", ["n0"]
        number = settings.local_rank if settings.place is None else settings.place
        if settings.arena:
            self.folder, self.job = Path(settings.arena), settings.job
            is_own(self.folder, hint=arena.HINT)
            self.round = settings.round
        else:
            self.round = settings.restart_count
            number = self._alone(settings, stores, answered)
        self.copies = (
            bool(settings.arena)
            and settings.nodes > 1
            and settings.checkpoint.get("replicas", 1) != 0
        )
        """Peers keep copies of this node's memory."""
        slots, extra = arena.place(self.folder, number), arena.extra(self.folder, number)
        self._own = {path.name for path in (*slots, extra)}
        self._unused: Path | None = None
        if extra.exists():  # of the round before, and it may hold what peers have
            if self.copies:
                slots.append(extra)
            else:
                self._unused = extra
        place = Place(self.job, self.round, self.world, self.rank)
        self.stager = Stager(slots, place, extra=extra, told=_tell, failed=session.report_unsaved)

    def _alone(self, settings: Settings, stores: bool, answered: Callable[[Answer], None]) -> int:
        """Find the others of this node; its first worker takes the memory for all of them."""
        mine = (host(), secrets.token_hex(8))
        all_: list[Any] = [mine]
        if self.world > 1:
            all_ = [None] * self.world
            dist.all_gather_object(all_, mine)
        hosts = list(dict.fromkeys(one[0] for one in all_))
        self.job = f"run-{all_[0][1]}"
        self.nodes = [f"n{index}" for index in range(len(hosts))]
        self.node = self.nodes[hosts.index(mine[0])]
        self.ranks = [rank for rank, one in enumerate(all_) if one[0] == mine[0]]
        root = Path(settings.shm_dir)
        self.folder = root / f"{arena.PREFIX}{self.job}-{self.node}"
        number = self.ranks.index(self.rank)
        trouble: list[Any] = [""]
        if number == 0:
            try:
                self.memory = Memory(root, self.job, self.node)
            except (OSError, ConfigError) as error:
                trouble = [f"{type(error).__name__}: {error}"]
            if stores and not trouble[0]:
                self.persister = Persister(answered)
        if self.world > 1:
            mine_ = trouble[0]
            trouble = [None] * self.world
            dist.all_gather_object(trouble, mine_)
        if any(trouble):
            raise ConfigError(f"checkpoint: no shared memory: {next(t for t in trouble if t)}")
        return number

    def gather(self, mine: Any) -> list[Any]:
        """What each rank says."""
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, mine)
        return said

    def amend(self, change: Callable[[Summary], Summary]) -> None:
        """Change what is said of this rank's own sets."""
        pause = threading.Event()
        for _ in range(AMENDS):
            if amend(self.folder, change, only=self._own):
                return
            pause.wait(AMEND_S)  # its agent, or the persister, writes a first page

    def tidy(self) -> None:
        """Memory that is needed no more, now that there is something newer."""
        path, self._unused = self._unused, None
        if path is not None:
            with contextlib.suppress(OSError), arena.Slot(path) as slot:
                found = slot.summary()
                if found is None or not found.persist:
                    path.unlink()

    def close(self, *, failed: bool) -> None:
        """Let go; waits for the persister.

        Args:
            failed: the script has; parts of other nodes may not come, and those who would start it
                again wait for its end.
        """
        self.stager.close()
        if self.persister is not None:
            self.persister.close(DRAIN_S if failed and len(self.nodes) > 1 else None)
        if self.memory is not None:
            self.memory.close()


def _see_whether_it_has_keys(state: object) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"checkpoint: the state is a {type(state).__name__}: expected a dict, such as "
            '{"model": model, "optimizer": optimizer}'
        )


def _tell(summary: Summary) -> None:
    session.report_staged(summary.step, urgent=summary.persist)


def _attempt_of(site: _Site, one: Id) -> str:
    """The same on all nodes, and drawn by nobody else: the run's name is random."""
    step, round_, lap = one
    return f"{arena.digest(f'{site.job} {step} {round_} {lap}'.encode()):016x}"


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _directory(where: str | os.PathLike[str]) -> str:
    """Give the address of a directory that outlives this process.

    Raises:
        ConfigError: it cannot be used.
    """
    from dlrover_py.storage import address

    found = address(where)
    if found.startswith("memory://"):
        raise ConfigError(
            f"checkpoint directory {found}: it is the memory of the process that writes, and goes "
            "with it; leave the directory out to keep checkpoints in the job's memory"
        )
    return found


def _keep(value: object) -> Keep:
    """Rules of retention.

    Raises:
        ConfigError: they cannot be used.
    """
    if isinstance(value, Keep):
        return value
    if type(value) is int and value >= 1:
        return Keep(newest=value)
    if isinstance(value, Mapping):
        numbers = [v for k, v in value.items() if v is not None and k != "highest"]
        rightly = all(type(v) is int and v >= 0 for v in numbers)
        rightly &= value.get("highest") in (None, False, True)
        if rightly and value.keys() <= Keep().rules.keys():
            return Keep.of(value)
    raise ConfigError(
        f"checkpoint: keep is {value!r}: expected a number, or "
        '{"last": 3, "every": 1000, "best": 2, "highest": True} or a part of that'
    )


def _expected_bytes(state: Mapping[str, object], rank: int) -> int:
    """What a save will take, with the state that optimizers have after their first step."""
    flat = flatten(state, rank=rank)
    with contextlib.suppress(ConfigError):  # else said by the save
        flat.encoded()  # what is new is read back, which the first save need not wait for then
    size = sum(leaf.piece.nbytes + 512 for leaf in flat.leaves)
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            own = sum(p.nbytes for group in value.param_groups for p in group["params"])
            betas, momentum = "betas" in value.defaults, value.defaults.get("momentum")
            size += own * (2 if betas else 1 if momentum else 0)
    return size
