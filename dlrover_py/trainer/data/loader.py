"""``ElasticLoader`` wraps torch's ``DataLoader``: it yields optimizer steps instead of batches.

A step has the same samples for each world. Each rank computes its share of them in micro-batches,
and weighs the losses so that the gradient is the mean over all samples of the step.
"""

import hashlib
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.collectives import rank_and_world, total
from dlrover_py.trainer.data.agreement import Agreement
from dlrover_py.trainer.data.ledger import (
    DigestedBatch,
    DigestedDataset,
    DigestingCollate,
    LedgerWriter,
)
from dlrover_py.trainer.data.sampler import ElasticSampler, PerWorker
from dlrover_py.trainer.data.seeds import SeededDataset, SeededSampler
from dlrover_py.trainer.data.shard_sources import fingerprint_of
from dlrover_py.trainer.data.shares import MicroBatch
from dlrover_py.trainer.data.tuning import LoaderTuner

_FOR_WORKERS = ("multiprocessing_context", "persistent_workers", "prefetch_factor", "timeout")
"""Arguments of ``DataLoader`` that it refuses if it reads the data in this process."""

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ElasticLoader:
    """Yields the steps of the present epoch, from the last committed step on.

    It has ``state_dict`` and ``load_state_dict``, so it is a part of the checkpoint like a model.
    The loader's workers may prefetch: only :meth:`TrainingStep.commit` moves the position.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int | PerWorker,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        block: int = 1,
        seed_samples: bool = False,
        ledger: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """Create the loader at the start of epoch 0.

        Args:
            dataset: a map-style dataset: it has ``__len__`` and ``__getitem__``. It may have a text
                ``fingerprint``, which says which data it is: another one is then refused.
            global_batch: number of samples of an optimizer step, of all ranks together; or
                ``PerWorker(n)``, with which it is resized together with the world (see
                :class:`dlrover_py.trainer.data.BatchScaling`).
            micro_batch: greatest number of samples that a rank computes at once; None: its share
                of the step.
            seed: chooses the order of the samples, and the random numbers of the loader's workers.
            shuffle: False keeps the order of the dataset.
            block: number of neighbouring samples that stay together when they are shuffled.
            seed_samples: seed the random generators of torch, Python and NumPy before each sample
                is read. Random transforms in ``__getitem__`` then depend on seed, epoch and sample
                alone, and neither on the world nor on the loader's workers.
            ledger: folder, which all nodes share, for a record of the samples that each step was
                trained on: 8 bytes for each step of each rank. ``dlrover data verify`` reads it.
                None: there is no record.
            options: further arguments of torch's ``DataLoader``, such as ``num_workers``.

        Raises:
            ConfigError: an argument cannot be used, or contradicts that each sample is trained
                exactly once.
        """
        _check(dataset, options)
        self.sampler = ElasticSampler(
            len(dataset),
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            shuffle=shuffle,
            block=block,
        )
        self.sampler.fingerprint = fingerprint_of(dataset)
        batches: Any = self.sampler
        if seed_samples:
            dataset, batches = SeededDataset(dataset, self.sampler.seed), SeededSampler(batches)
        self._ledger = None if ledger is None else LedgerWriter(ledger)
        if self._ledger is not None:
            dataset = DigestedDataset(dataset)
            options["collate_fn"] = DigestingCollate(options.get("collate_fn"))
        # Without a generator of its own, each new iterator of a DataLoader draws a number from the
        # script's. The dropout after a restart would then differ.
        self._generator = None if "generator" in options else torch.Generator()
        options.setdefault("generator", self._generator)
        self._options: dict[str, Any] = {"dataset": dataset, "batch_sampler": batches, **options}
        self.loader = DataLoader(**self._options)
        self._settings = LoaderTuner(self.sampler, self.loader.num_workers)
        self.weight: Callable[[Any], Any] | None = None
        """Returns the weight of a batch; None: it is the number of samples."""
        self._agreement = Agreement()
        self._step: TrainingStep | None = None
        """The step that the script computes now; None before the first and after a load."""

    def weigh_by(self, count: Callable[[Any], Any]) -> None:
        """Let :meth:`TrainingStep.weigh` average over something other than samples, such as tokens.

        Call this right after the loader was created. The gradient changes only if the script uses
        ``weigh``. All micro-batches of a step are then read before the first one is computed, and
        the ranks add up their counts.

        Args:
            count: gets a batch as the ``DataLoader`` has collated it. It returns a finite number
                from 0, such as that of the tokens that are not padding.
        """
        self.weight = count

    def divide_among(self, data_parallel: "DeviceMesh | tuple[int, int]") -> None:
        """Divide the samples among some ranks, and give the others the same ones as these.

        Call this right after the loader was created, if several ranks compute one copy of the model
        together (tensor, pipeline or context parallelism), and so need the same samples.

        Args:
            data_parallel: the ranks that have different samples: a ``DeviceMesh`` with one
                dimension, or the place of this rank among them, from 0, and their number.

        Raises:
            ConfigError: the mesh has several dimensions, or is one of other ranks; or there is no
                such place.
        """
        self.sampler.place(*_place_in(data_parallel))
        self._agreement = Agreement(is_shared=True)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks may have the same samples, as :meth:`divide_among` says."""
        return self._agreement.is_shared

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.sampler.epoch

    @property
    def steps(self) -> int:
        """Number of committed steps since the start of the training."""
        return self.sampler.steps

    @property
    def samples(self) -> int:
        """Number of samples in committed steps since the start of the training."""
        return self.sampler.samples

    @property
    def current(self) -> "TrainingStep | None":
        """The step that the script computes now; None before the first one and after a load."""
        return self._step

    def __len__(self) -> int:
        """Return the number of steps from the committed position to the end of the epoch."""
        return self.sampler.steps_left()

    def __iter__(self) -> "Iterator[TrainingStep]":
        """Yield the steps that are left in this epoch. All ranks must begin the loop together.

        Raises:
            ConfigError: the last step was computed, but neither committed nor discarded. Or the
                ranks have other positions or arguments, or another world than the process group.
                Later: another loop has begun, or a state was loaded.
        """
        self._check_last_step()
        self._step = None
        sampler = self.sampler
        ledger = self._ledger
        rank = (rank_and_world() or (sampler.rank, 0))[0]
        reserved = 0 if ledger is None or rank else ledger.reserve(sampler)
        note = reserved, self._settings.proposal()
        options = {
            "ledger": "none" if ledger is None else "a folder",
            "weigh_by": "none" if self.weight is None else "a function",
            "seed_samples": isinstance(self._options["batch_sampler"], SeededSampler),
        }
        notes, is_first = self._agreement.check(sampler, note, options)
        segment = notes[0][0]
        if ledger is not None:
            if not segment:
                raise ConfigError(
                    f"data: rank 0 cannot use the ledger: {ledger.fault or 'see its log'}: "
                    "expected a folder of this loader that it can write; mend it, or leave "
                    "ledger= out"
                )
            if is_first:
                try:
                    ledger.begin(segment, sampler)
                except OSError as error:
                    raise ConfigError(
                        f"data: rank {rank} cannot write the ledger: {error}: expected a folder "
                        "that all ranks can write; mend it, or leave ledger= out"
                    ) from error
            else:
                ledger = None  # another rank with the same samples keeps the record
        self._settings.begin([proposal for _, proposal in notes])
        epoch = sampler.epoch
        steps, batches = self._begin_reading()
        while (micro_batches := next(steps, None)) is not None:
            step = self._step = TrainingStep(self, ledger, micro_batches, batches)
            yield step
            if self._step is not step:
                raise ConfigError(
                    "data: another loop over this loader has begun, or a state was loaded: begin "
                    "the loop over the loader again"
                )
            self._check_last_step()
            if not step.committed:
                raise ConfigError(
                    f"data: the loop asks for the next step, but step {sampler.steps + 1} is not "
                    "committed: compute its micro-batches, and call step.commit()"
                )
            changed = self._settings.after_step(full=step.samples == sampler.global_batch)
            if changed and sampler.epoch == epoch:
                # The script still has the step, and the processes that read for it would go on.
                batches = step._batches = iter(())
                steps, batches = self._begin_reading()
        self._settings.end()
        if ledger is not None:
            ledger.end()

    def _begin_reading(self) -> tuple[Iterator[list[MicroBatch]], Iterator[Any]]:
        """Begin to read the rest of the epoch from the committed position, with present settings.

        Returns:
            This rank's micro-batches step by step, and the data of each micro-batch.
        """
        sampler, workers = self.sampler, self._settings.workers
        if workers != self.loader.num_workers:
            unused = () if workers else _FOR_WORKERS
            options = {name: self._options[name] for name in self._options.keys() - set(unused)}
            self.loader = DataLoader(**options | {"num_workers": workers})
        if self._generator is not None:
            where = f"{sampler.seed}/{sampler.epoch}/{sampler.offset}/{sampler.rank}"
            digest = hashlib.blake2b(where.encode(), digest_size=8).digest()
            self._generator.manual_seed(int.from_bytes(digest, "little"))
        # Another default device of the script does not have this generator. Without one there must
        # be no context: processes that are forked in it go through Python for each call of torch.
        on_cpu = torch.get_default_device().type == "cpu"
        with nullcontext() if on_cpu else torch.device("cpu"):
            return _by_step(sampler.plan()), iter(self.loader)

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position; see :meth:`ElasticSampler.state_dict`."""
        if self._step is not None and self._step.computed:
            self._step.saved_early = not self._step.committed
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a state. Begin a new loop over the loader afterwards.

        Raises:
            ConfigError: the state has another form, or belongs to another order. Nothing changes.
        """
        self.sampler.load_state_dict(state)
        self._step = None

    def _check_last_step(self) -> None:
        """Raise ConfigError if the last step was computed, and neither committed nor discarded."""
        step = self._step
        if step is not None and step.computed and not (step.committed or step.discarded):
            raise ConfigError(
                f"data: step {self.steps + 1} is computed, but not committed: call step.commit() "
                "after optimizer.step(), or step.discard() if the model has not changed"
            )


class TrainingStep:
    """This rank's share of one optimizer step; an iterator of its micro-batches."""

    def __init__(
        self,
        loader: ElasticLoader,
        ledger: LedgerWriter | None,
        micro_batches: list[MicroBatch],
        batches: Iterator[Any],
    ) -> None:
        """Create the step; ``ElasticLoader`` does this.

        Args:
            loader: the loader that yields the step.
            ledger: gets the digest of this rank's samples.
            micro_batches: this rank's micro-batches.
            batches: yields what the dataset has for each micro-batch.
        """
        self._loader, self._ledger, self._sampler = loader, ledger, loader.sampler
        self._todo = list(reversed(micro_batches))
        self._batches = batches
        self._current: MicroBatch | None = None
        self._ahead: deque[tuple[Any, float]] = deque()
        """Batches that were read but not yielded, with their weights."""
        self._weight = 0.0
        """Weight of the present micro-batch: its samples, unless the loader has another weight."""
        self._total = float(micro_batches[0].total)
        """Weight of the step, of all ranks together."""
        self._failed = False
        self._unweighed = 0
        """Number of micro-batches with a weight that were yielded since the last :meth:`weigh`."""
        self._skipped = 0
        """How many of these came before the present one."""
        self._is_weighed = False
        """Whether :meth:`weigh` was called."""
        self._digest = 0
        """Sum of the digests of this rank's samples so far, if there is a ledger."""
        self.epoch = loader.epoch
        """The epoch of the step, from 0."""
        self.start = loader.sampler.offset
        """The first position of the step in the order of the epoch."""
        self.samples = micro_batches[0].total
        """Number of samples of the step, of all ranks together."""
        self.committed = False
        """Whether :meth:`commit` was called."""
        self.discarded = False
        """Whether :meth:`discard` was called."""
        self.saved_early = False
        """Whether a state was taken after the last micro-batch and before the commit."""

    def __iter__(self) -> Iterator[Any]:
        """Yield what the loader has collated for each micro-batch. All ranks have equally many.

        Raises:
            ConfigError: an earlier micro-batch of the step could not be read.
        """
        while self._todo:
            if self._failed:
                raise ConfigError(
                    "data: a micro-batch of this step could not be read: begin the loop over the "
                    "loader again, from the committed position"
                )
            self._failed = True
            batch, self._weight = self._read()
            self._failed = False
            part = self._current = self._todo.pop()
            self._skipped = self._unweighed
            self._unweighed += self._weight > 0  # what counts nothing needs no loss
            if isinstance(batch, DigestedBatch):
                if part.samples:
                    self._digest += batch.digest
                if part.last and self._ledger is not None:
                    self._ledger.add(self._digest)
                batch = batch.batch
            yield batch

    def _read(self) -> tuple[Any, float]:
        """Return the next micro-batch and its weight.

        If the loader has a weight, the first call reads all micro-batches of the step, and is
        collective.

        Raises:
            ConfigError: the weight of a micro-batch, on any rank, is not a number from 0.
        """
        weight_of = self._loader.weight
        if weight_of is None:
            return self._next(), float(self._todo[-1].samples)
        if not self._ahead:
            for part in reversed(self._todo):
                batch = self._next()
                plain = batch.batch if isinstance(batch, DigestedBatch) else batch
                self._ahead.append((batch, float(weight_of(plain)) if part.samples else 0.0))
            self._total = self._sum([weight for _, weight in self._ahead])
        return self._ahead.popleft()

    def _next(self) -> Any:
        """Return what the dataset has for the next micro-batch, and measure how long it takes."""
        meter = self._loader._settings.meter
        began = meter.clock()
        batch = next(self._batches)
        meter.waited(meter.clock() - began)
        return batch

    def _sum(self, weights: list[float]) -> float:
        """Return the sum of the weights of all ranks that have different samples. Collective.

        Raises:
            ConfigError: one of them is not a number from 0. All ranks raise it.
        """
        wrong = [weight for weight in weights if not 0 <= weight < math.inf]
        world = self._sampler.world
        # Ranks with the same samples have the same weights, and all of them are in the sum.
        ranks = (rank_and_world() or (0, world))[1] if self._loader.is_shared else world
        whole = total([math.nan if wrong else sum(weights)], ranks)[0]
        if math.isnan(whole):
            raise ConfigError(
                "data: the function of weigh_by() has returned "
                f"{wrong[0] if wrong else 'a wrong number on another rank'}: expected a finite "
                "number from 0"
            )
        return whole / (ranks // world)

    @property
    def computed(self) -> bool:
        """Whether all micro-batches were yielded."""
        return not self._todo

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that was yielded last.

        Raises:
            ConfigError: none was yielded yet.
        """
        if self._current is None:
            raise ConfigError("data: no micro-batch yet: expected a loop over the step")
        return self._current

    def weigh(self, loss: Tensor, *, reduction: str = "mean") -> Tensor:
        """Return the loss of the micro-batch that was yielded last, weighted for ``backward()``.

        The gradient that DDP or FSDP averages over the ranks is then the mean over all samples of
        the step; or over all tokens, if :meth:`ElasticLoader.weigh_by` counts them. The weight of
        an empty micro-batch is 0, and so is that of one without tokens: it may be left out.

        Args:
            loss: a tensor with one element.
            reduction: how the loss combines the samples (or tokens): ``"mean"`` or ``"sum"``.

        Raises:
            ConfigError: the reduction is not one of these; or an earlier micro-batch with a weight
                was read and not weighed, so that it is not known to which one the loss belongs.
        """
        part, world = self.micro_batch, self._sampler.world
        if self._skipped:
            raise ConfigError(
                f"data: step.weigh() after {self._skipped + 1} micro-batches were read: expected "
                "one call for each, before the next is read: read one micro-batch at a time, "
                "without list(step) and without a prefetcher"
            )
        self._unweighed, self._is_weighed = 0, True
        weight_of_all = self._total or math.inf  # without any weight the gradient is 0
        match reduction:
            case "mean":
                return loss * (self._weight * world / weight_of_all)
            case "sum":
                return loss * (world / weight_of_all if part.samples else 0.0)
        raise ConfigError(f"data: reduction is {reduction!r}: expected 'mean' or 'sum'")

    def sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for ``forward`` and ``backward``.

        In all micro-batches but the last one, the ranks exchange no gradients.

        Args:
            model: a module in ``DistributedDataParallel``, one of ``fully_shard``, or a plain one.
        """
        if hasattr(model, "set_requires_gradient_sync"):
            return _exchange(model, self.micro_batch.last)
        if hasattr(model, "no_sync") and not self.micro_batch.last:
            return cast(AbstractContextManager[None], model.no_sync())
        return nullcontext()

    def commit(self) -> None:
        """Count the samples of the step as trained. Call this once, after ``optimizer.step()``.

        A checkpoint that is saved afterwards continues with the next step.

        Raises:
            ConfigError: the step has been committed or discarded, is not the current one, or has
                micro-batches that were not computed; or only some of those with a weight were
                weighed. Or a state was taken after the last micro-batch: its model may have learnt
                from the step, but its position is before it.
        """
        if self.committed or self.discarded or self._loader._step is not self:
            raise ConfigError(
                "data: step.commit() of a step that is committed or discarded already, or of an "
                "earlier loop"
            )
        if not self.computed:
            raise ConfigError(
                f"data: step.commit() with {len(self._todo)} micro-batches left: expected a loop "
                "over all micro-batches of the step"
            )
        if self._is_weighed and self._unweighed:
            raise ConfigError(
                f"data: step.commit() after {self._unweighed} micro-batches without step.weigh(): "
                "expected a call for each micro-batch of the step whose weight is not 0"
            )
        if self.saved_early:
            raise ConfigError(
                f"data: a state was saved before step {self._sampler.steps + 1} was committed: "
                "call step.commit() after optimizer.step(), and save then"
            )
        self.committed = True
        self._sampler.commit()

    def discard(self) -> None:
        """Give the step up: its samples count as not trained. The model must not have changed.

        The gradients are the script's affair: call ``zero_grad()``. The next loop over the loader
        yields the step again.
        """
        self.discarded = True


def _by_step(plan: Iterator[MicroBatch]) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of one rank step by step."""
    step: list[MicroBatch] = []
    for micro_batch in plan:
        step.append(micro_batch)
        if micro_batch.last:
            yield step
            step = []


@contextmanager
def _exchange(model: Any, exchange: bool) -> Iterator[None]:
    """Set whether a module of ``fully_shard`` exchanges its gradients in ``backward``."""
    model.set_requires_gradient_sync(exchange)
    yield


def _place_in(data_parallel: "DeviceMesh | tuple[int, int]") -> tuple[int, int]:
    """Return the rank of this worker among those that divide the samples, and their number.

    Raises:
        ConfigError: the mesh has several dimensions, or is one of other ranks.
    """
    if isinstance(data_parallel, tuple):
        rank, world = data_parallel
        return rank, world
    if data_parallel.ndim != 1:
        raise ConfigError(
            f"data: divide_among() got a mesh with {data_parallel.ndim} dimensions: expected one, "
            'such as mesh["dp"]; flatten several: mesh["replicate", "shard"]._flatten()'
        )
    if data_parallel.get_coordinate() is None:
        raise ConfigError(
            "data: divide_among() got a mesh without this rank: expected a mesh of all ranks"
        )
    return data_parallel.get_local_rank(), data_parallel.size()


def _check(dataset: Any, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a dataset or an argument of ``DataLoader`` that cannot be used.

    Args:
        dataset: it must have samples that can be numbered.
        options: arguments for ``DataLoader``, without those that the loader decides itself.
    """
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise ConfigError(
            f"data: the dataset is a {type(dataset).__name__}, which has no numbered samples: "
            "expected a map-style dataset, with __len__ and __getitem__, that is no "
            "IterableDataset; use ShardLoader with hugging_face_source or IterableSource for an "
            "iterable, and with ChunkSource for a StreamingDataset of Mosaic"
        )
    if not len(dataset):
        raise ConfigError(f"data: the dataset, a {type(dataset).__name__}, has no samples")
    for name, value in options.items():
        if name == "drop_last" and value:
            raise ConfigError(
                "data: found drop_last=True: leave it out, since each sample is trained exactly "
                "once: the last step of an epoch has the samples that are left"
            )
        if name in ("batch_size", "sampler", "batch_sampler"):
            raise ConfigError(
                f"data: found {name}={value!r}: expected global_batch and micro_batch instead, "
                "since each sample is trained exactly once"
            )
        if name == "in_order" and not value:
            raise ConfigError(
                "data: found in_order=False: expected batches in order, since each step has its "
                "own samples"
            )
