"""``ElasticAccelerator`` is Accelerate's ``Accelerator`` with exact data and memory checkpoints.

::

    from dlrover_py.trainer.data import ElasticLoader
    from dlrover_py.trainer.integrations.accelerate import ElasticAccelerator

    accelerator = ElasticAccelerator()
    loader = ElasticLoader(dataset, global_batch=256, micro_batch=16)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    for epoch in accelerator.epochs(3):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(inputs), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    accelerator.end_training()

Each optimizer step has the same samples for any number of workers. It is saved at the end of the
``accumulate`` block in which its gradients are exchanged.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, GradientAccumulationPlugin, send_to_device

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.data.loader import TrainingStep
from dlrover_py.trainer.data.shares import MicroBatch

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Distributed types of Accelerate in which each worker has the whole model."""


class ElasticAccelerator(Accelerator):
    """An ``Accelerator`` whose training survives failures and resizes.

    Pass an :class:`~dlrover_py.trainer.data.ElasticLoader` to :meth:`prepare` for the training.
    Other data loaders, such as one for an evaluation, are prepared as Accelerate does it.
    """

    def __init__(
        self, *args: Any, checkpointer: Checkpointer | None = None, **options: Any
    ) -> None:
        """Create the accelerator. It initializes the process group.

        Args:
            args: arguments of ``Accelerator``.
            checkpointer: saves the training; None: ``Checkpointer()``.
            options: further arguments of ``Accelerator``.

        Raises:
            ConfigError: the arguments ask for gradient accumulation, or the workers would divide
                the model among them (FSDP, DeepSpeed, Megatron-LM, tensor parallelism).
        """
        steps = options.pop("gradient_accumulation_steps", 1)
        if steps != 1 or options.get("gradient_accumulation_plugin") is not None:
            raise ConfigError(
                "accelerate: found a gradient accumulation: expected none, since the number of "
                "micro-batches follows from global_batch and micro_batch of the ElasticLoader"
            )
        options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(
            num_steps=1, adjust_scheduler=False
        )
        super().__init__(*args, **options)
        if self.distributed_type not in _KINDS or self.parallelism_config is not None:
            raise ConfigError(
                f"accelerate: found the distributed type {self.distributed_type.value}"
                f"{' with a parallelism_config' if self.parallelism_config is not None else ''}: "
                "expected that each worker has the whole model (DDP). Other types are not "
                "supported yet"
            )
        self.checkpointer = Checkpointer() if checkpointer is None else checkpointer
        self._state: dict[str, Any] = {}
        """What is saved. It has torch's objects, not Accelerate's wrappers."""
        self._batches: ElasticBatches | None = None
        self._restored = False
        self._stepped: set[int] = set()
        """Which optimizers have made their step in the present ``accumulate`` block, by ``id``."""
        self._accumulating = False
        self._begun: TrainingStep | None = None
        """The last step of which a micro-batch was computed."""
        self._gradient: Any = None
        """A parameter that has a gradient of earlier micro-batches of the step."""
        self._rates: list[Any] = []
        """The positions of the schedulers when the last step was saved."""
        self._total: int | None = None
        """Number of optimizer steps of the whole training, if it is known."""

    # --- Preparation ---

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare objects as Accelerate does. An ``ElasticLoader`` becomes :class:`ElasticBatches`.

        Args:
            args: the objects.
            options: further arguments of ``Accelerator.prepare``.

        Raises:
            ConfigError: a second ``ElasticLoader`` is prepared.
        """
        for one in args:
            if isinstance(one, ElasticLoader):
                self._adopt(one)
        found = super().prepare(*args, **options)
        if len(args) == 1:
            return self._batches if isinstance(found, ElasticLoader) else found
        return tuple(self._batches if isinstance(one, ElasticLoader) else one for one in found)

    def prepare_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Prepare a model; without ``evaluation_mode`` it becomes a part of the checkpoint.

        Args:
            model: the module.
            args: further arguments of ``Accelerator.prepare_model``.
            options: the same.
        """
        prepared = super().prepare_model(model, *args, **options)
        if not (options.get("evaluation_mode") or (len(args) > 1 and args[1])):
            self._add("model", prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Any, *args: Any, **options: Any) -> Any:
        """Prepare an optimizer, which becomes a part of the checkpoint.

        Args:
            optimizer: the optimizer of torch.
            args: further arguments of ``Accelerator.prepare_optimizer``.
            options: the same.
        """
        prepared = super().prepare_optimizer(optimizer, *args, **options)
        if self._add("optimizer", prepared.optimizer):
            prepared.optimizer.register_step_post_hook(self._note_step)
            prepared.zero_grad = partial(self._zero_grad, prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler, which becomes a part of the checkpoint.

        It makes one step per optimizer step. Accelerate's makes one for each worker.

        Args:
            scheduler: the scheduler of torch.
        """
        prepared = super().prepare_scheduler(scheduler)
        prepared.split_batches = True
        self._add("scheduler", prepared.scheduler)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make objects a part of the checkpoint, and of what ``save_state`` writes.

        Args:
            objects: they have ``state_dict`` and ``load_state_dict``.
        """
        super().register_for_checkpointing(*objects)
        for one in objects:
            self._add("object", one)

    def _adopt(self, loader: ElasticLoader) -> None:
        """Train with a loader.

        Raises:
            ConfigError: there is one already.
        """
        if self._batches is not None:
            raise ConfigError(
                "accelerate: a second ElasticLoader is prepared: expected one for the training. "
                "Use a DataLoader of torch for an evaluation"
            )
        self._batches = ElasticBatches(self, loader)
        super().register_for_checkpointing(loader)
        self._add("data", loader)

    def _add(self, kind: str, value: Any) -> bool:
        """Make a value a part of the checkpoint; return whether it was none yet.

        Args:
            kind: what the value is; it begins the key.
            value: the value.
        """
        if any(one is value for one in self._state.values()):
            return False
        count = sum(key.split(".")[0] == kind for key in self._state)
        self._state[kind if not count else f"{kind}.{count}"] = value
        return True

    # --- The training ---

    @property
    def should_stop(self) -> bool:
        """Whether this process was asked to end. The loop over the batches has then ended, too."""
        return self.checkpointer.should_stop

    def restore(self) -> int | None:
        """Load the newest checkpoint, once. :meth:`epochs` does this. The call is collective.

        Returns:
            The step of the checkpoint; None if there is none, or if this was called before.

        Raises:
            CheckpointError: as in ``Checkpointer.load``.
            ConfigError: no ``ElasticLoader`` was prepared; or as in ``Checkpointer.load``.
            OSError: as in ``Checkpointer.load``.
            RuntimeError: another rank is gone.
        """
        if self._batches is None:
            raise ConfigError(
                "accelerate: there is no data: expected prepare(…, loader) with an ElasticLoader"
            )
        if self._restored:
            return None
        self._restored = True
        return self.checkpointer.load(self._parts())

    def epochs(self, count: int) -> Iterator[int]:
        """Restore the training, and yield the epochs that are left, from the present one on.

        A loop over the batches that is left early (``break``) ends the training.

        Args:
            count: number of epochs of the whole training.

        Raises:
            CheckpointError: as in :meth:`restore`.
            ConfigError: as in :meth:`restore`.
            OSError: as in :meth:`restore`.
            RuntimeError: another rank is gone.
        """
        self.restore()
        assert self._batches is not None  # restore() has checked it
        self._total = count * self._batches.steps_per_epoch
        epoch = -1
        while epoch < self._batches.epoch < count and not self.should_stop:
            epoch = self._batches.epoch
            yield epoch

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Compute one micro-batch in this block. After the last one of a step, the step is saved.

        The block has ``backward``, and the ``step`` of optimizers and schedulers.

        Args:
            models: the prepared models. They exchange gradients in the last micro-batch only.

        Raises:
            ConfigError: the batch is not one of the ``ElasticLoader``; no optimizer has made its
                step in the last micro-batch; or a scheduler made a step outside of the block.
        """
        step = self._present_step("accumulate()")
        last = step.micro_batch.last
        if self._rates and self._rates != self._positions():
            raise ConfigError(
                "accelerate: a scheduler has made a step outside of accumulate(): expected "
                "scheduler.step() in the block, since the step is saved at its end"
            )
        self.sync_gradients = last
        self._stepped.clear()
        if step is not self._begun:
            # A script may have its zero_grad() before backward(), where the step is not complete.
            for optimizer in self._optimizers:
                optimizer.optimizer.zero_grad()
            self._begun, self._gradient = step, None
        self._accumulating = True
        try:
            with ExitStack() as contexts:
                if not last:
                    for model in models:
                        contexts.enter_context(self.no_sync(model))
                yield
        finally:
            self._accumulating = False
        if last:
            self._finish(step)
        elif self._gradient is None:
            self._gradient = next((p for p in self._parameters() if p.grad is not None), None)

    def backward(self, loss: Any, *, reduction: str = "mean", **options: Any) -> None:
        """Compute the gradients of a loss, weighted by the samples of the micro-batch.

        Args:
            loss: a tensor with one element.
            reduction: how the loss combines the samples: ``"mean"`` or ``"sum"``.
            options: arguments of ``Accelerator.backward``.

        Raises:
            ConfigError: the call is not in an ``accumulate`` block; the reduction is unknown; or
                the gradients of earlier micro-batches are gone.
        """
        if not self._accumulating:
            raise ConfigError(
                "accelerate: backward() outside of accumulate(): expected both in the block "
                "`with accelerator.accumulate(model):`"
            )
        step = self._present_step("backward()")
        if self._gradient is not None and self._gradient.grad is None:
            raise ConfigError(
                "accelerate: the gradients of the micro-batches before are gone: expected "
                "optimizer.zero_grad() of a prepared optimizer, and no model.zero_grad()"
            )
        super().backward(step.weigh(loss, reduction=reduction), **options)

    def clip_grad_norm_(self, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
        """Clip the gradient of the step by its norm, in the last micro-batch. Else do nothing.

        Args:
            parameters: the parameters with the gradient.
            max_norm: greatest norm.
            norm_type: kind of the norm.

        Returns:
            The norm before; 0 before the last micro-batch, where there is no gradient of the step.
        """
        if not self.sync_gradients:
            return torch.zeros((), device=self.device)
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: Any) -> None:
        """Clip the values of the step's gradient, in the last micro-batch. Else do nothing.

        Args:
            parameters: the parameters with the gradient.
            clip_value: greatest absolute value.
        """
        if self.sync_gradients:
            super().clip_grad_value_(parameters, clip_value)

    def end_training(self) -> None:
        """Send the last step to storage, close the checkpointer, and end Accelerate's trackers.

        Raises:
            ConfigError: as in ``Checkpointer.save``.
            RuntimeError: another rank is gone.
        """
        if self._batches is not None and self._batches.steps:
            self.checkpointer.save(self._batches.steps, self._parts(), force=True)
        self.checkpointer.close()
        super().end_training()

    def _present_step(self, call: str) -> TrainingStep:
        """Return the step that the script computes.

        Raises:
            ConfigError: there is none.
        """
        if self._batches is None or self._batches.step is None:
            raise ConfigError(
                f"accelerate: {call} without a batch of the ElasticLoader: expected it in the loop "
                "over the loader that prepare() has returned"
            )
        return self._batches.step

    def _parts(self) -> dict[str, Any]:
        """Return what is saved."""
        return self._state if self.scaler is None else {**self._state, "scaler": self.scaler}

    def _parameters(self) -> Iterator[Any]:
        """Yield the parameters of all optimizers."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def _positions(self) -> list[Any]:
        """Return the positions of all schedulers."""
        schedulers = (v for k, v in self._state.items() if k.split(".")[0] == "scheduler")
        return [getattr(one, "last_epoch", None) for one in schedulers]

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        """Note that an optimizer has made its step; torch calls this."""
        self._stepped.add(id(optimizer))

    def _zero_grad(self, prepared: AcceleratedOptimizer, *args: Any, **options: Any) -> None:
        """Remove the gradients of a prepared optimizer, but not before it has used them.

        Args:
            prepared: the optimizer.
            args: arguments of its ``zero_grad``.
            options: the same.
        """
        is_in_use = self._gradient is not None and id(prepared.optimizer) not in self._stepped
        if not (self._accumulating and is_in_use):
            AcceleratedOptimizer.zero_grad(prepared, *args, **options)

    def _finish(self, step: TrainingStep) -> None:
        """Commit a step and save it.

        Raises:
            ConfigError: no optimizer has made its step.
        """
        assert self._batches is not None  # it has yielded the step
        if not self._stepped and not self.optimizer_step_was_skipped:
            raise ConfigError(
                f"accelerate: no optimizer made its step in the last micro-batch of step "
                f"{self._batches.steps + 1}: expected optimizer.step() of a prepared optimizer in "
                "each accumulate() block. It does nothing before the last micro-batch"
            )
        step.commit()
        self._rates = self._positions()
        self.checkpointer.save(self._batches.steps, self._parts())
        session.report_step(self._batches.steps, self._total)


class ElasticBatches:
    """The micro-batches of this rank, on its device. ``ElasticAccelerator.prepare`` creates it."""

    def __init__(self, accelerator: ElasticAccelerator, loader: ElasticLoader) -> None:
        self._accelerator = accelerator
        self._loader = loader
        self.step: TrainingStep | None = None
        """The optimizer step whose micro-batches are yielded now."""

    @property
    def epoch(self) -> int:
        """The epoch of the next optimizer step, from 0."""
        return self._loader.epoch

    @property
    def steps(self) -> int:
        """Number of optimizer steps since the start of the training."""
        return self._loader.steps

    @property
    def steps_per_epoch(self) -> int:
        """Number of optimizer steps of a whole epoch. It does not depend on the world size."""
        return -(-self._loader.sampler.length // self._loader.sampler.global_batch)

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that was yielded last: the positions of its samples, and their number.

        Raises:
            ConfigError: none was yielded yet.
        """
        if self.step is None:
            raise ConfigError("accelerate: no micro-batch yet: expected a loop over the loader")
        return self.step.micro_batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches that are left in this epoch; after a request to stop, no more.

        Raises:
            ConfigError: the training was not restored; or a micro-batch was computed without
                ``accumulate``.
        """
        accelerator = self._accelerator
        if not accelerator._restored:
            raise ConfigError(
                "accelerate: the training was not restored: expected `for epoch in "
                "accelerator.epochs(n)` around the loop, or accelerator.restore() before it"
            )
        try:
            for step in self._loader:
                self.step = step
                for batch in step:
                    yield send_to_device(
                        batch, accelerator.device, non_blocking=accelerator.non_blocking
                    )
                if not step.committed:
                    raise ConfigError(
                        "accelerate: a step has ended outside of accumulate(): expected `with "
                        "accelerator.accumulate(model):` around each micro-batch"
                    )
                if accelerator.should_stop:
                    return
        finally:
            self.step = None
