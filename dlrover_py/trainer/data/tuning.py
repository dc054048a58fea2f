"""Changes the settings of a data loader while it is used, at the same step on all ranks.

The agent of each node sends new settings when they come, so the ranks get them at different times.
Once in a while the ranks therefore vote, with an asynchronous all-reduce of a few numbers. The
result is taken before the next step, and all ranks then have the newest settings of any rank.
"""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from dlrover_py.process import cgroups
from dlrover_py.protocol.sdk import MAX_LOADER_WORKERS, MAX_MICRO_BATCH, LoaderFields, LoaderTuning
from dlrover_py.trainer import session
from dlrover_py.trainer.collectives import AsyncAllReduce, rank_and_world
from dlrover_py.trainer.data.sampler import ElasticSampler

VOTE_S = 0.2
"""Seconds between two votes, about."""
MOST_STEPS = 1000
"""Greatest number of steps between two votes."""
REPORT_S = 0.5
"""Seconds between two reports of what is measured."""
KEPT = 32
"""Number of newest steps whose times are kept."""
_WORKER_BITS = 11


def pack(tuning: LoaderTuning) -> int:
    """Return settings as one number: of two of them, the newer ones have the greater number."""
    workers = 0 if tuning.loader_workers is None else tuning.loader_workers + 1
    size = tuning.micro_batch or 0
    return (tuning.number * (MAX_MICRO_BATCH + 1) + size << _WORKER_BITS) + workers


def unpack(number: int) -> LoaderTuning:
    """Return the settings that :func:`pack` has packed."""
    rest, workers = divmod(number, 1 << _WORKER_BITS)
    newest, size = divmod(rest, MAX_MICRO_BATCH + 1)
    return LoaderTuning(newest, size or None, workers - 1 if workers else None)


class Meter:
    """Measures the steps of a loader since its settings were changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget all steps, because the settings have changed."""
        self.steps = 0
        """Number of measured steps."""
        self.memory = 0.0
        """Greatest share of memory that was in use."""
        self._times: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """Seconds of each step, and those of them in which it waited for data."""
        self.pause()

    def pause(self) -> None:
        """Leave out the step that follows: new processes read for it, and it may compile."""
        self._since: float | None = None
        self._waited = 0.0

    def waited(self, seconds: float) -> None:
        """Add time in which a step has waited for data."""
        self._waited += seconds
        session.spend("data", seconds)

    def step(self, *, counts: bool) -> None:
        """Take in the end of a step.

        Args:
            counts: whether it is measured; a step with fewer samples than others is not.
        """
        now = self.clock()
        if self._since is not None and counts:
            self._times.append((now - self._since, self._waited))
            self.steps += 1
        self._since, self._waited = now, 0.0

    @property
    def step_s(self) -> float:
        """Median of the seconds of a step; 0 before the first."""
        return statistics.median(each for each, _ in self._times) if self._times else 0.0

    @property
    def data_wait(self) -> float:
        """Share of the time in which the steps waited for data."""
        total = sum(each for each, _ in self._times)
        return sum(waited for _, waited in self._times) / total if total else 0.0


class LoaderTuner:
    """The settings of one loader: those of the script, until others come.

    ``micro_batch`` of the sampler and :attr:`workers` are the present ones.
    """

    def __init__(self, sampler: ElasticSampler, workers: int) -> None:
        """Begin with the settings of the script.

        Args:
            sampler: the sampler of the loader; its micro-batch is changed.
            workers: number of processes that read the data.
        """
        self._sampler = sampler
        self._own = sampler.micro_batch, workers
        self.workers = workers
        """Number of processes that read the data."""
        self.meter = Meter()
        self._taken = LoaderTuning()
        """The newest settings that all ranks know of."""
        self._refused = False
        self._step = 0
        self._cpus = len(os.sched_getaffinity(0))
        self._fewest_cpus = self._cpus
        self._vote_at = 0
        """Number of committed steps from which on the next vote is due."""
        self._channel: AsyncAllReduce | None = None
        self._result: Callable[[float | None], list[int]] | None = None
        """Waits for the result of the vote that was begun; None if there is none."""
        self._report_at = 0.0
        self._memory_before: float | None = None
        """Share of memory in use before the first step; None before the first loop."""

    # --- At the start of a loop ---

    def proposal(self) -> list[int]:
        """Return what this rank knows at the start of a loop, for the greatest of all ranks.

        A vote that was begun ends here, since all ranks begin a loop together.
        """
        if self._result is not None:
            self._take(self._result(None))
        return self._vote()

    def begin(self, votes: Sequence[Sequence[int]]) -> None:
        """Begin a loop with the newest settings that any rank knows; all ranks then use the same.

        If a rank has fewer CPUs than the new number of loader workers, the present number stays.

        Args:
            votes: what :meth:`proposal` has returned on each rank.
        """
        self.meter.pause()
        if self._memory_before is None and session.active():
            self._memory_before = _memory_use()
        self._take([max(column) for column in zip(*votes, strict=True)])
        self._vote_at = self._sampler.steps + 1
        self._report(urgent=True)

    # --- After each step ---

    def after_step(self, *, full: bool) -> bool:
        """Return whether the settings change now, for all ranks. All ranks call this together.

        Args:
            full: whether the step had as many samples as most steps have.
        """
        if not session.active():
            return False
        self.meter.step(counts=full)
        changed = False
        if self._result is not None:
            changed = self._take(self._result(None))
        elif (group := rank_and_world()) is None or group[1] == 1:
            changed = self._take(self._vote())
        elif self._sampler.steps >= self._vote_at:
            self._channel = self._channel or AsyncAllReduce()
            self._result = self._channel.launch(self._vote())
        self._report(urgent=changed)
        return changed

    def end(self) -> None:
        """Report the position at the end of an epoch: no step of another one may follow."""
        self._report(urgent=True)

    def _vote(self) -> list[int]:
        """Return this rank's newest settings, minus its CPUs, and the steps to the next vote."""
        newest = max(session.loader_tuning(), self._taken, key=lambda tuning: tuning.number)
        step_s = self.meter.step_s
        pause = min(MOST_STEPS, int(VOTE_S / step_s)) if step_s else 1
        return [pack(newest), -self._cpus, max(1, pause)]

    def _take(self, vote: Sequence[int]) -> bool:
        """Use the result of a vote; return whether the settings of this loader change."""
        self._result = None
        newest, fewest, pause = unpack(vote[0]), -vote[1], vote[2]
        self._fewest_cpus = fewest
        self._vote_at = self._sampler.steps + pause
        if newest.number == self._taken.number:
            return False
        self._taken, self._step = newest, self._sampler.steps
        self._refused = newest.loader_workers is not None and newest.loader_workers > fewest
        own_size, own_workers = self._own
        size = own_size if newest.micro_batch is None else newest.micro_batch
        workers = own_workers if newest.loader_workers is None else newest.loader_workers
        workers = self.workers if self._refused else workers
        changed = (size, workers) != (self._sampler.micro_batch, self.workers)
        self._sampler.micro_batch, self.workers = size, workers
        if changed:
            self.meter.reset()
        self._report(urgent=True)
        return changed

    def _report(self, *, urgent: bool) -> None:
        """Report settings and measurements to the agent, if that is due."""
        now = self.meter.clock()
        if not session.active() or (now < self._report_at and not urgent):
            return
        self._report_at = now + REPORT_S
        meter, sampler = self.meter, self._sampler
        meter.memory = max(meter.memory, _memory_use())
        share = min(MAX_MICRO_BATCH, -(-sampler.global_batch // sampler.world))
        size = share if sampler.micro_batch is None else min(sampler.micro_batch, share)
        state: LoaderFields = {
            "number": self._taken.number,
            "refused": self._refused,
            "step": self._step,
            "micro_batch": size,
            "share": share,
            "batch": min(2**53, sampler.global_batch),
            "loader_workers": min(MAX_LOADER_WORKERS, self.workers),
            "most_workers": min(MAX_LOADER_WORKERS, self._fewest_cpus),
            "measured": meter.steps,
            "samples_per_s": sampler.global_batch / meter.step_s if meter.step_s else 0.0,
            "memory": round(meter.memory, 3),
            "memory_before": round(self._memory_before or 0.0, 3),
            "data_wait": round(meter.data_wait, 3),
            "epoch": min(2**53, sampler.epoch),
            "position": min(2**53, sampler.offset),
            "samples": min(2**53, sampler.length),
        }
        session.report_loader(state, urgent=urgent)


def _memory_use() -> float:
    """Return the used share of the memory of this rank's GPU, or else of its control group."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return float(1 - free / total)
    return cgroups.memory_use() or 0.0
