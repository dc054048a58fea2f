"""``ElasticSampler`` deals the samples of each optimizer step to the ranks, in micro-batches.

It is a batch sampler for torch's ``DataLoader``. Most scripts use it through
:class:`dlrover_py.trainer.data.ElasticLoader`. Others use it by itself::

    sampler = ElasticSampler(len(dataset), global_batch=256)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
    state = {"model": model, "optimizer": optimizer, "data": sampler}
    checkpointer.load(state)
    for batch, part in zip(loader, sampler.plan()):
        (loss_of(ddp(batch)) * part.weight(sampler.world)).backward()
        if part.last:
            optimizer.step()
            optimizer.zero_grad()
            sampler.commit()
            checkpointer.save(sampler.steps, state)

Each step takes the next ``global_batch`` positions of the epoch's order, whatever the world is. So
the position is one number for all ranks, and any world continues from it.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import MAX_COUNT
from dlrover_py.trainer import session
from dlrover_py.trainer.collectives import rank_and_world
from dlrover_py.trainer.data.order import SampleOrder
from dlrover_py.trainer.data.shares import MicroBatch, count_micro_batches, micro_batches

FORMAT = 1
"""Version of the state and of the order that it belongs to."""
_AHEAD = 8192
"""Samples whose place in the order is computed at once. It costs the same for few as for many."""


@dataclass(frozen=True)
class PerWorker:
    """A global batch that is resized together with the world."""

    samples: int
    """Number of samples of an optimizer step for each worker."""


class ElasticSampler:
    """Yields the samples of this rank's micro-batches, from the committed position on.

    It neither pads nor drops: the last step of an epoch has the samples that are left. Use the same
    arguments on all ranks.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int | PerWorker,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        block: int = 1,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        """Create the sampler at the start of epoch 0.

        Args:
            length: number of samples of the dataset.
            global_batch: number of samples of an optimizer step, of all ranks together; or
                ``PerWorker(n)``, with which it is resized together with the world.
            micro_batch: greatest number of samples that a rank computes at once; None: its share
                of the step.
            seed: chooses the order of the samples.
            shuffle: False keeps the order of the dataset.
            block: number of neighbouring samples that stay together when they are shuffled, so
                that a rank reads few files at a time.
            rank: global rank of this worker. None: that of the default process group; without one,
                that of the environment.
            world: number of workers; None: as for ``rank``.

        Raises:
            ConfigError: an argument is not a whole number in its range.
        """
        self.length = _counted("length", length, least=1)
        if micro_batch is not None:
            micro_batch = _counted("micro_batch", micro_batch, least=1)
        self.micro_batch = micro_batch
        self.seed = _counted("seed", seed, least=0)
        self.shuffle = bool(shuffle)
        self.block = _counted("block", block, least=1)
        self._batch = global_batch
        place = session.world()
        group = rank_and_world() or (place.rank, place.size)
        self.place(group[0] if rank is None else rank, group[1] if world is None else world)
        self.epoch = 0
        """The epoch of the next step, from 0."""
        self.offset = 0
        """Number of samples of the epoch that are in committed steps."""
        self.steps = 0
        """Number of committed steps since the start of the training."""
        self.fingerprint = ""
        """Says which data it is; empty if it is not known."""

    def place(self, rank: int, world: int) -> None:
        """Set which part of each step is this rank's.

        Args:
            rank: the number of the part, from 0.
            world: number of parts.

        Raises:
            ConfigError: an argument is not a whole number in its range.
        """
        self.rank = _counted("rank", rank, least=0)
        self.world = _counted("world", world, least=1)
        if self.rank >= self.world:
            raise ConfigError(f"data: rank is {self.rank}: expected less than world, {self.world}")
        batch = self._batch
        if isinstance(batch, PerWorker):
            batch = self.world * _counted("PerWorker", batch.samples, least=1)
        self.global_batch = _counted("global_batch", batch, least=1)

    @property
    def is_per_worker(self) -> bool:
        """Whether the global batch is resized together with the world."""
        return isinstance(self._batch, PerWorker)

    # --- The position ---

    @property
    def samples(self) -> int:
        """Number of samples in committed steps since the start of the training."""
        return self.epoch * self.length + self.offset

    @property
    def next_stop(self) -> int:
        """One past the last position of the next step."""
        return min(self.offset + self.global_batch, self.length)

    def commit(self) -> None:
        """Count the samples of the step as trained. Call this once per ``optimizer.step()``.

        A checkpoint that is saved afterwards continues with the next step.
        """
        self.offset = self.next_stop
        self.steps += 1
        if self.offset == self.length:
            self.epoch, self.offset = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position. It is the same on all ranks, and holds for each world."""
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "offset": self.offset,
            "steps": self.steps,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "block": self.block,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a state. ``global_batch`` may be another one.

        A fingerprint of the state is kept if this run has none, for the next checkpoint.

        Raises:
            ConfigError: the state has another form, or belongs to another order. Nothing changes.
        """
        mine = self.state_dict()
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"data: expected the state of an ElasticSampler, found {state!r}: load a "
                "checkpoint that has it"
            )
        if set(state) != set(mine):
            raise ConfigError(
                f"data: the state has the keys {', '.join(sorted(map(str, state)))}: expected "
                f"those of ElasticSampler: {', '.join(sorted(mine))}. The state of another "
                "sampler or loader cannot be continued"
            )
        for name, what in _IDENTITY.items():
            is_unknown = name == "fingerprint" and "" in (state[name], mine[name])
            if state[name] != mine[name] and not is_unknown:
                raise ConfigError(
                    f"data: the checkpoint was made with {name}={state[name]}, and this run has "
                    f"{name}={mine[name]}: {what}"
                )
        epoch = _counted("epoch of the state", state["epoch"], least=0)
        offset = _counted("offset of the state", state["offset"], least=0)
        steps = _counted("steps of the state", state["steps"], least=0)
        if offset >= self.length:
            raise ConfigError(
                f"data: the state has the offset {offset}: expected less than the number of "
                f"samples, {self.length}"
            )
        self.epoch, self.offset, self.steps = epoch, offset, steps
        self.fingerprint = self.fingerprint or state["fingerprint"]

    # --- The samples ---

    def steps_left(self) -> int:
        """Return the number of steps from the committed position to the end of the epoch."""
        return -(-(self.length - self.offset) // self.global_batch)

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank to the end of the epoch."""
        steps, rest = divmod(self.length - self.offset, self.global_batch)
        count = steps * count_micro_batches(self.global_batch, self.world, self.micro_batch)
        return count + (count_micro_batches(rest, self.world, self.micro_batch) if rest else 0)

    def plan(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches, from the committed position to the end of the epoch.

        The iterator keeps the position of this call, because it runs ahead of the training.
        """
        return self._plan_from(self.offset)

    def _plan_from(self, offset: int) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches from a position to the end of the epoch."""
        for start in range(offset, self.length, self.global_batch):
            yield from micro_batches(
                start,
                min(start + self.global_batch, self.length),
                rank=self.rank,
                world=self.world,
                limit=self.micro_batch,
            )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the samples of each micro-batch of :meth:`plan`.

        An empty micro-batch yields one sample of its step. Its loss must have weight 0.
        """
        order = SampleOrder(self.length, self.seed, self.epoch, self.shuffle, self.block)
        return _batches(order, self.plan())


_IDENTITY = {
    "format": "another version has written it; continue the training with that version",
    "length": "samples were added or removed. Use the same dataset, or start a new training",
    "seed": "pass the seed of the checkpoint, or start a new training",
    "shuffle": "pass the value of the checkpoint, or start a new training",
    "block": "pass the value of the checkpoint, or start a new training",
    "fingerprint": "it is another dataset. Use that of the checkpoint, or start a new training",
}
"""Entries of a state that must not differ, and what to do if they do."""


def _batches(order: SampleOrder, plan: Iterator[MicroBatch]) -> Iterator[list[int]]:
    """Yield the samples of each micro-batch; many are looked up at once."""
    ahead: list[range] = []
    count = 0
    for micro_batch in plan:
        ahead.append(micro_batch.positions)
        count += len(micro_batch.positions)
        if count >= _AHEAD:
            yield from _samples(order, ahead)
            ahead, count = [], 0
    if ahead:
        yield from _samples(order, ahead)


def _samples(order: SampleOrder, ranges: list[range]) -> Iterator[list[int]]:
    """Yield the samples at each range of positions."""
    sizes = [len(each) for each in ranges]
    ends = list(accumulate(sizes))
    # Place i of the result has the position i + shift, with the same shift in each range.
    shifts = [each.stop - end for each, end in zip(ranges, ends, strict=True)]
    shift, size = torch.tensor([shifts, sizes], device="cpu")
    positions = torch.arange(ends[-1], device="cpu") + shift.repeat_interleave(size)
    samples = order.at(positions).tolist()
    for start, end in pairwise([0, *ends]):
        yield samples[start:end]


def _counted(what: str, value: object, *, least: int) -> int:
    """Return a value as an int if it is a whole number from ``least`` to 2**53.

    An integer of NumPy is accepted. A float such as 3.0 and a bool are not.

    Raises:
        ConfigError: it is not.
    """
    if hasattr(value, "__index__") and not isinstance(value, bool):  # one of NumPy will do
        number = operator.index(value)
        if least <= number <= MAX_COUNT:
            return number
    raise ConfigError(f"data: {what} is {value!r}: expected a whole number from {least} to 2**53")
