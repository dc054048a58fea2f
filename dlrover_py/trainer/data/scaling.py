"""``BatchScaling`` adapts the learning rate to a global batch that grows with the world.

::

    loader = ElasticLoader(dataset, global_batch=PerWorker(32))
    scaling = BatchScaling(optimizer, loader, base_batch=256, rule="linear", warmup_steps=100)
    state = {"model": model, "optimizer": optimizer, "data": loader, "scaling": scaling}
    ...
            optimizer.step()  # with the scaled learning rate
            step.commit()
            scaling.follow(schedule)  # instead of schedule.step()

The optimizer holds the values of ``base_batch``. The scaled ones are in it only during
``optimizer.step()``, so neither a schedule nor a checkpoint ever sees them.
"""

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.collectives import total
from dlrover_py.trainer.data.loader import ElasticLoader, TrainingStep

Rule = Literal["linear", "sqrt", "adascale", "none"]
FORMAT = 1
"""Version of the state."""
MEMORY = 0.95
"""Part of the old estimate of gradient noise that each step keeps."""


@dataclass(frozen=True)
class Noise:
    """Moving averages of two moments of the gradient. Pure.

    With parts of ``b`` samples, the expected square of a part's gradient is
    ``signal + variance / b``. So two sizes of parts give both unknowns (S. McCandlish et al., *An
    Empirical Model of Large-Batch Training*, 2018, appendix A).
    """

    variance: float = 0.0
    """Trace of the covariance of one sample's gradient, times ``weight``."""
    signal: float = 0.0
    """Square of the norm of the expected gradient, times ``weight``."""
    weight: float = 0.0
    """Total weight of the measurements, from 0 to 1."""

    def measured(self, *, parts: int, samples: int, small: float, large: float) -> "Noise":
        """Return the averages with the gradients of one more step.

        A step with a gradient that is not finite is left out, as a GradScaler leaves it out.

        Args:
            parts: number of micro-batches with samples, of all ranks; with one nothing is learnt.
            samples: number of samples of the step.
            small: mean of the squared norms of the micro-batches' gradients, weighted by their
                numbers of samples.
            large: squared norm of the gradient of the step.
        """
        if parts < 2 or not math.isfinite(small + large):
            return self
        variance = (small - large) * samples / (parts - 1)
        signal = large - variance / samples
        return Noise(
            MEMORY * self.variance + (1 - MEMORY) * variance,
            MEMORY * self.signal + (1 - MEMORY) * signal,
            MEMORY * self.weight + (1 - MEMORY),
        )

    def gain(self, base: int, batch: int) -> float:
        """Return how many steps of ``base`` samples one step of ``batch`` samples is worth.

        This is the gain of T. Johnson et al., *AdaScale SGD*, ICML 2020. It lies between 1 and
        ``batch / base``. Before the first measurement it is the smaller of these.
        """
        low, high = sorted((1.0, batch / base))
        if self.weight == 0:
            return low
        variance, signal = max(self.variance, 0.0), max(self.signal, 0.0)
        large = variance / batch + signal
        return min(max((variance / base + signal) / large, low), high) if large > 0 else low


def scaled(group: Mapping[str, Any], rule: Rule, factor: float) -> dict[str, Any]:
    """Return the entries of a parameter group that a rule changes, with their scaled values.

    Args:
        group: a parameter group of an optimizer, with its values for the base batch.
        rule: ``"sqrt"`` also changes the betas and eps of Adam, as in S. Malladi et al., *On the
            SDEs and Scaling Rules for Adaptive Gradient Algorithms*, NeurIPS 2022. No beta gets
            below 0.
        factor: by what the learning rate is multiplied.
    """
    found = {"lr": group["lr"] * factor}
    if rule == "sqrt" and "betas" in group:
        ratio = factor * factor
        found["betas"] = tuple(max(0.0, 1 - ratio * (1 - beta)) for beta in group["betas"])
        found["eps"] = group["eps"] / factor
    return found


@dataclass(frozen=True)
class _State:
    """What a checkpoint has of the scaling."""

    format: int = FORMAT
    progress: float = 0.0
    """How far the training is, in steps of the base batch."""
    batch: int = 0
    """Global batch of the last step; 0 before the first."""
    start: float = 0.0
    """Factor from which the warm-up has begun."""
    warmed: int = 0
    """Steps since the last change of the batch."""
    factor: float = 1.0
    """Factor of the last step."""
    variance: float = 0.0
    signal: float = 0.0
    weight: float = 0.0


class BatchScaling:
    """Scales the learning rate, and counts progress in samples. Create it alike on all ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        loader: ElasticLoader,
        *,
        base_batch: int,
        rule: Rule = "linear",
        warmup_steps: int = 0,
        loss_scale: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """Attach the scaling to an optimizer.

        Args:
            optimizer: its learning rate, betas and eps are those for ``base_batch``.
            loader: has the global batch.
            base_batch: the global batch that the script was tuned for.
            rule: factor of the learning rate, for a batch that is κ times ``base_batch``:
                ``"linear"`` κ, ``"sqrt"`` √κ, ``"adascale"`` the measured gain, ``"none"`` 1.
            warmup_steps: steps in which the factor rises evenly after the batch has grown. A
                smaller factor holds at once.
            loss_scale: by what the loss is multiplied at present, for ``"adascale"`` only: the
                ``get_scale`` of a GradScaler.

        Raises:
            ConfigError: the rule is not known; a number is out of its range; or the rule is
                ``"adascale"`` and the model is sharded by FSDP2, so that no rank has a whole
                gradient, or the loader uses ``divide_among`` or ``weigh_by``.
        """
        if rule not in get_args(Rule):
            raise ConfigError(
                f"data: rule is {rule!r}: expected one of {', '.join(get_args(Rule))}"
            )
        if base_batch < 1 or warmup_steps < 0:
            raise ConfigError(
                f"data: found base_batch={base_batch!r} and warmup_steps={warmup_steps!r}: "
                "expected at least 1 and at least 0"
            )
        self._optimizer, self._loader = optimizer, loader
        self._base, self._rule, self._warmup = base_batch, rule, warmup_steps
        self._state = _State()
        self._originals: list[dict[str, Any]] = []
        """Per parameter group, the values that are scaled during ``optimizer.step()``."""
        self._squares = _Squares(loader, loss_scale) if rule == "adascale" else None
        self._counted: Callable[[], TrainingStep | None] = lambda: None
        """Returns the last step that is in the progress; None if there is none any more."""
        if self._squares is not None:
            self._check_loader()
            self._squares.watch(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _check_loader(self) -> None:
        """Raise ConfigError if the gradients of micro-batches cannot be compared."""
        if self._loader.is_shared or self._loader.weight is not None:
            raise ConfigError(
                'data: rule="adascale" and a loader with divide_among() or weigh_by(): '
                'expected neither; choose "linear" or "sqrt"'
            )

    @property
    def factor(self) -> float:
        """Multiplier of the learning rate in the last step. It is 1 before the first step."""
        return self._state.factor

    @property
    def progress(self) -> float:
        """How far the training is, in steps of ``base_batch``: what a schedule should count."""
        return self._state.progress

    def follow(self, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
        """Advance a schedule to the present progress. Call this instead of ``schedule.step()``.

        The schedule is written for steps of ``base_batch``. It may take several steps at once, or
        none. After the commit, a step that a GradScaler has skipped counts, too.

        Args:
            schedule: counts its steps in ``last_epoch``, as most schedules of torch do.

        Raises:
            ConfigError: it does not count its steps, or follows a metric instead of them.
        """
        if isinstance(schedule, ReduceLROnPlateau) or not hasattr(schedule, "last_epoch"):
            raise ConfigError(
                f"data: follow() got a {type(schedule).__name__}: expected a schedule that counts "
                "its steps: call step() of one that follows a metric yourself; replace a "
                "ChainedScheduler by a LambdaLR with the product of the factors, or by a "
                "SequentialLR"
            )
        self._count_skipped()
        while schedule.last_epoch < int(self.progress + 1e-6):
            schedule.step()

    def measure(self) -> None:
        """Measure the gradient of the step, for ``"adascale"``. This call is collective.

        ``optimizer.step()`` does this by itself. Call it only before gradients are clipped.
        """
        if self._squares is not None:
            self._squares.close(self._optimizer)

    def state_dict(self) -> dict[str, float | int]:
        """Return the progress, the warm-up and the measurements. They are alike on all ranks."""
        self._count_skipped()
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which may be that of another batch.

        Raises:
            ConfigError: the state has another form. Nothing changes.
        """
        if set(state) != set(asdict(self._state)) or state["format"] != FORMAT:
            raise ConfigError(
                f"data: the state has the keys {', '.join(sorted(map(str, state)))}: expected "
                f"those of BatchScaling in format {FORMAT}"
            )
        found = _State(**state)
        if not math.isfinite(found.variance + found.signal):
            found = replace(found, **asdict(Noise()))  # of a gradient that has overflowed
        self._state = found

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Put the scaled values into the optimizer.

        Raises:
            ConfigError: the rule is ``"adascale"``, and the loader now uses ``divide_among`` or
                ``weigh_by``.
        """
        step = self._loader.current
        if step is None:  # torch makes the state of a new optimizer by a step without gradients
            return
        now, batch = self._state, self._loader.sampler.global_batch
        worth = step.samples / self._base
        ratio = batch / self._base
        match self._rule:
            case "linear":
                target = ratio
            case "sqrt":
                target = ratio**0.5
            case "none":
                target = 1.0
            case "adascale":
                assert self._squares is not None
                self._check_loader()  # the script may have called them since
                self._squares.close(optimizer)
                noise = self._squares.add_to(
                    Noise(now.variance, now.signal, now.weight), step.samples
                )
                worth = target = noise.gain(self._base, batch)
                now = replace(now, **asdict(noise))
        if batch != now.batch:
            # The first batch of a training has no warm-up: the script's own schedule has one.
            start = now.factor if now.batch else target
            now = replace(now, batch=batch, start=start, warmed=0)
        warmed = now.warmed + 1
        if now.start < target and warmed <= self._warmup:
            factor = now.start + (target - now.start) * warmed / (self._warmup + 1)
        else:
            factor = target
        self._state = replace(now, factor=factor, warmed=warmed, progress=now.progress + worth)
        self._counted = weakref.ref(step)
        for group in optimizer.param_groups:
            values = scaled(group, self._rule, factor)
            self._originals.append({name: group[name] for name in values})
            group.update(values)

    def _count_skipped(self) -> None:
        """Count the samples of a step that is committed, although the optimizer made none."""
        step, now = self._loader.current, self._state
        if step is None or not step.committed or self._counted() is step:
            return
        worth = step.samples / self._base
        if self._rule == "adascale":
            noise = Noise(now.variance, now.signal, now.weight)
            worth = noise.gain(self._base, self._loader.sampler.global_batch)
        self._state = replace(now, progress=now.progress + worth)
        self._counted = weakref.ref(step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Put the script's values back."""
        for group, values in zip(optimizer.param_groups, self._originals, strict=False):
            group.update(values)
        self._originals.clear()


class _Squares:
    """Sums the squared norms of the gradients of one step: of its micro-batches, and the whole."""

    def __init__(self, loader: ElasticLoader, loss_scale: Callable[[], float]) -> None:
        """Create the sums.

        Args:
            loader: has the present step and micro-batch.
            loss_scale: by what the loss is multiplied at present.
        """
        self._loader, self._loss_scale = loader, loss_scale
        self._step: Callable[[], TrainingStep | None] = lambda: None
        """Returns the step that the sums belong to; None if there is none any more."""
        self._small: Tensor | float = 0.0
        """Sum over the micro-batches of this rank: samples times squared norm."""
        self._parts: set[int] = set()
        """The first positions of the micro-batches that had samples and a gradient."""
        self._closed: tuple[int, float, float] | None = None
        """Number of parts and sum of all ranks, and squared norm of the whole; None while gradients
        are computed."""

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at each gradient of the optimizer's parameters.

        Raises:
            ConfigError: a parameter is sharded.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if hasattr(parameter, "placements"):  # a DTensor
                    raise ConfigError(
                        'data: rule="adascale" with a sharded model: expected a plain one or '
                        'DistributedDataParallel; choose "linear" or "sqrt"'
                    )
                if parameter.requires_grad:
                    parameter.register_hook(self._see)

    def _see(self, gradient: Tensor) -> None:
        """Add the gradient of one parameter in one micro-batch."""
        step = self._loader.current
        if step is None or not (part := step.micro_batch).samples:
            return
        self._begin(step)
        weight = part.weight(self._loader.sampler.world) * self._loss_scale()
        square = gradient.detach().float().pow(2).sum() / weight**2
        self._small = self._small + square * part.samples
        self._parts.add(part.start)

    def _begin(self, step: TrainingStep) -> None:
        """Forget the sums of an earlier step, which a GradScaler or the script has skipped."""
        if self._step() is not step:
            self._step = weakref.ref(step)
            self._small, self._parts, self._closed = 0.0, set(), None

    def close(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradient of the step, and sum the others over all ranks, once per step.

        Args:
            optimizer: has the parameters, with the gradient of the whole step.
        """
        step = self._loader.current
        if step is not None:  # a rank without samples in it has not seen its beginning
            self._begin(step)
        if self._closed is not None:
            return
        mine = float(self._small), float(len(self._parts))
        small, parts = total(mine, self._loader.sampler.world)
        large = sum(
            float(parameter.grad.detach().float().pow(2).sum())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
        self._closed = int(parts), small, large

    def add_to(self, noise: Noise, samples: int) -> Noise:
        """Return the averages with the step that was closed, and begin the next one.

        Args:
            noise: the averages before the step.
            samples: number of samples of the step, of all ranks together.
        """
        assert self._closed is not None
        parts, small, large = self._closed
        self._small, self._parts, self._closed = 0.0, set(), None
        return noise.measured(parts=parts, samples=samples, small=small / samples, large=large)
