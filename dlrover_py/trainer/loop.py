"""``ElasticLoop`` makes a loop of plain PyTorch exact and elastic, with three other lines.

::

    from dlrover_py.trainer import Checkpointer, ElasticLoop
    from dlrover_py.trainer.data import ElasticLoader

    loader = ElasticLoader(dataset, global_batch=256)
    loop = ElasticLoop(ddp, optimizer, loader, Checkpointer("/data/run-1"))
    for epoch in loop.epochs(10):
        for inputs, targets in loop:
            loss = loss_of(ddp(inputs), targets)
            loop.step(loss)  # backward, optimizer.step, zero_grad

It does what the loop over an ``ElasticLoader`` does by hand, in the same order.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import session

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from dlrover_py.trainer.checkpointer import Checkpointer
    from dlrover_py.trainer.data.loader import ElasticLoader, TrainingStep


def _nothing() -> None:
    """Do nothing."""


class ElasticLoop:
    """Yields the micro-batches of a training, and makes and saves its steps.

    A training of several models or optimizers needs the loop over the ``ElasticLoader`` itself.
    """

    def __init__(
        self,
        model: "nn.Module",
        optimizer: "Optimizer",
        loader: "ElasticLoader",
        checkpointer: "Checkpointer",
        *,
        scaler: "GradScaler | None" = None,
        before_step: Callable[[], Any] = _nothing,
        after_step: Callable[[], Any] = _nothing,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Restore the training. All ranks must do this together.

        Args:
            model: a module in ``DistributedDataParallel``, one of ``fully_shard``, or a plain one.
            optimizer: the optimizer of its parameters. Its ``step`` takes no closure.
            loader: the data of the training.
            checkpointer: saves model, optimizer, data and scaler after each step. The loop closes
                it.
            scaler: scales the losses, for mixed precision.
            before_step: called before each step of the optimizer, when the gradient is complete and
                no longer scaled: to clip it.
            after_step: called after each step of the optimizer, and before the step is saved: to
                move a schedule.
            state: further parts of the checkpoint, such as a schedule.

        Raises:
            CheckpointError: as in ``Checkpointer.load``.
            ConfigError: a name of the state is in use; or as in ``Checkpointer.load``.
            OSError: as in ``Checkpointer.load``.
            RuntimeError: another rank is gone.
        """
        own: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": loader}
        if scaler is not None:
            own["scaler"] = scaler
        if state and (taken := sorted(own.keys() & state.keys())):
            raise ConfigError(
                f"loop: found {', '.join(taken)} in state: expected other names, since the loop "
                "saves its own parts under these"
            )
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._checkpointer, self._scaler = checkpointer, scaler
        self._before_step, self._after_step = before_step, after_step
        self._state = own | dict(state or {})
        self._step: TrainingStep | None = None
        """The step whose micro-batch was yielded and not given to :meth:`step` yet."""
        self._gradient: Any = None
        """A parameter that has a gradient of earlier micro-batches of the step."""
        self._total: int | None = None
        """Number of steps of the whole training."""
        self._is_stepping = self._is_stopped = False
        self._hook = optimizer.register_step_pre_hook(self._refuse_other_steps)
        self.restored = checkpointer.load(self._state) is not None
        """Whether a checkpoint was loaded."""

    @property
    def should_stop(self) -> bool:
        """Whether this process was asked to end. The loop over the batches has then ended, too."""
        return self._checkpointer.should_stop

    def stop(self) -> None:
        """End the training early, after this step. All ranks must call it in the same step.

        The loops over the batches and over the epochs then end by themselves, and the training is
        saved. A ``break`` of the loop over the epochs would leave it unsaved.
        """
        self._is_stopped = True

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left, from the present one on, and then save the training.

        The optimizer is then free for other loops. A loop over the batches that is left early
        (``break``), and :meth:`stop`, end the training and save it. A ``break`` of the loop over
        the epochs does not save it.

        Args:
            count: number of epochs of the whole training.

        Raises:
            ConfigError: as in ``Checkpointer.save``.
            RuntimeError: another rank is gone.
        """
        loader, epoch = self._loader, -1
        sampler = loader.sampler
        self._total = count * -(-sampler.length // sampler.global_batch)
        while epoch < loader.epoch < count and not (self.should_stop or self._is_stopped):
            epoch = loader.epoch
            yield epoch
        self._hook.remove()
        self._checkpointer.save(loader.steps, self._state, force=True)
        self._checkpointer.close()

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches that are left in this epoch; after a request to stop, no more.

        The same holds after :meth:`stop`.

        Raises:
            ConfigError: a micro-batch was not given to :meth:`step`; or as for the loop over an
                ``ElasticLoader``.
        """
        for step in self._loader:
            self._gradient = None
            for batch in step:
                self._step = step
                with step.sync(self._model):
                    yield batch
                if self._step is not None:
                    raise ConfigError(
                        "loop: the loop asks for the next micro-batch, but the last one was not "
                        "trained: call loop.step(loss) once for each micro-batch"
                    )
            if self.should_stop or self._is_stopped:
                return

    def step(self, loss: "Tensor", *, reduction: str = "mean") -> None:
        """Compute the gradients of a micro-batch; after the last one of a step, train and save it.

        It stands in the place of ``loss.backward()``, ``optimizer.step()`` and
        ``optimizer.zero_grad()``.

        Args:
            loss: a tensor with one element.
            reduction: how the loss combines the samples (or tokens): ``"mean"`` or ``"sum"``.

        Raises:
            ConfigError: no micro-batch was yielded since the last call; the gradients of earlier
                micro-batches are gone; or as in ``TrainingStep.weigh`` and ``Checkpointer.save``.
            RuntimeError: another rank is gone.
        """
        step, self._step = self._step, None
        if step is None:
            raise ConfigError(
                "loop: step() without a micro-batch: call it once in each turn of the loop over "
                "the ElasticLoop"
            )
        if self._gradient is not None and self._gradient.grad is None:
            raise ConfigError(
                "loop: the gradients of the micro-batches before are gone: leave "
                "optimizer.zero_grad() out, since loop.step() calls it"
            )
        weighed = step.weigh(loss, reduction=reduction)
        (weighed if self._scaler is None else self._scaler.scale(weighed)).backward()
        if step.computed:
            self._finish(step)
        elif self._gradient is None:
            own = (p for group in self._optimizer.param_groups for p in group["params"])
            self._gradient = next((p for p in own if p.grad is not None), None)

    def _finish(self, step: "TrainingStep") -> None:
        """Make the step of the optimizer, commit it and save it."""
        optimizer, scaler, loader = self._optimizer, self._scaler, self._loader
        if scaler is not None and self._before_step is not _nothing:
            scaler.unscale_(optimizer)
        self._before_step()
        self._is_stepping = True
        try:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        finally:
            self._is_stepping = False
        optimizer.zero_grad()
        step.commit()
        self._after_step()
        self._checkpointer.save(loader.steps, self._state)
        session.report_step(loader.steps, self._total)

    def _refuse_other_steps(self, *_: Any) -> None:
        """Refuse a step of the optimizer that the script makes itself; torch calls this.

        Raises:
            ConfigError: it is one.
        """
        if not self._is_stepping:
            raise ConfigError(
                "loop: found optimizer.step() in the script: leave it out, since loop.step() calls "
                "it after the last micro-batch of a step"
            )
