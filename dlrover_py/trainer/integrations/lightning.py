"""PyTorch Lightning: a strategy that makes ``Trainer.fit`` elastic, and its data exact.

::

    import lightning as L

    from dlrover_py.trainer import Checkpointer
    from dlrover_py.trainer.data import ElasticLoader
    from dlrover_py.trainer.integrations.lightning import ElasticStrategy

    loader = ElasticLoader(dataset, global_batch=256, micro_batch=16, num_workers=2)
    trainer = L.Trainer(max_epochs=10, strategy=ElasticStrategy(Checkpointer("/data/run-1")))
    trainer.fit(model, loader)

What Lightning calls a batch is a whole optimizer step here. So its numbers of batches, steps and
epochs mean the same at each world size. The micro-batches of a step run inside ``optimizer_step``.

The state is saved when Lightning asks for the next step. Validation, schedulers and callbacks of
the last step are done by then, and a restart continues from the same point of Lightning's loop.
"""

import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import session
from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.data.loader import ElasticLoader, TrainingStep
from dlrover_py.trainer.data.shares import MicroBatch
from dlrover_py.trainer.state_dict import RandomState


class ElasticStrategy(DDPStrategy):
    """Trains with DDP in the world that the launcher has made; a restart may have another one.

    It works under ``elastic-run``, ``torchrun`` and ``python``. ``devices`` and ``num_nodes`` of
    the trainer do not make the world. With GPUs, ``devices`` must leave one for each worker.
    """

    def __init__(self, checkpointer: Checkpointer | None = None, **options: Any) -> None:
        """Create the strategy.

        Args:
            checkpointer: saves the training after each step. None: one with the job's settings.
                ``fit`` closes it.
            options: arguments of Lightning's ``DDPStrategy``, such as ``find_unused_parameters``.

        Raises:
            ConfigError: an option contradicts that the gradient is the mean over the step.
        """
        for name, why in _WHY_NO_OPTION.items():
            if options.get(name):
                raise ConfigError(
                    f"lightning: found ElasticStrategy({name}={options[name]!r}): expected no "
                    f"{name}: {why}"
                )
        super().__init__(cluster_environment=_World(), **options)
        # Lightning reads the rank when it is imported, and a warm worker gets it after that.
        rank_zero_only.rank = session.world().rank
        self._checkpointer = checkpointer
        self._run: _Run | None = None
        """The training that ``fit`` does now; None before and after it."""

    # --- The world ---

    @property
    def root_device(self) -> torch.device:
        """The device of this worker.

        Raises:
            ConfigError: the trainer has no device for this worker's local rank. With CPUs, all
                workers share one.
        """
        devices = self.parallel_devices or [torch.device("cpu")]
        here = session.world()
        if devices[0].type == "cpu":
            return devices[0]
        if here.local_rank >= len(devices):
            raise ConfigError(
                f"lightning: this node has {here.local_size} workers, and the trainer has "
                f"{len(devices)} devices: expected one for each worker: start fewer workers "
                '(--nproc-per-node), leave devices out, or use accelerator="cpu"'
            )
        return devices[here.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the ``DistributedSampler`` that Lightning adds to loaders of validation."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def setup_environment(self) -> None:
        """Look at the trainer and the module, and join the process group.

        Raises:
            ConfigError: something of them cannot be exact.
        """
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == TrainerFn.FITTING:
            _check(module.trainer)
        super().setup_environment()

    def setup_distributed(self) -> None:
        """Join the process group. A script that no launcher has started is a world of its own."""
        if not TorchElasticEnvironment.detect() and not dist.is_initialized():
            backend = self._get_process_group_backend()
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        super().setup_distributed()

    # --- A training ---

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batch that ``training_step`` computes now: which part of the step it is.

        Raises:
            ConfigError: no training runs.
        """
        if self._run is None:
            raise ConfigError("lightning: no micro-batch: expected a call from training_step()")
        return self._run.step.micro_batch

    def setup(self, trainer: Trainer) -> None:
        """Wrap the model; in ``fit``, load the newest checkpoint. All ranks must call it together.

        Raises:
            ConfigError: in ``fit``, there is not one optimizer, it is LBFGS, or ReduceLROnPlateau
                has the interval "step".
            CheckpointError: there are checkpoints, but none could be loaded.
        """
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            _check_optimizers(trainer)
            self._run = _Run(trainer, self._checkpointer or Checkpointer())
            self._run.load()

    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader in the form that Lightning gets.

        Raises:
            ConfigError: the training has no ``ElasticLoader``, or more than one; its batch is
                resized with the world, and a schedule counts steps; or the position in the
                checkpoint belongs to another one.
        """
        run = self._run
        if run is None or not run.trainer.training:
            return super().process_dataloader(dataloader)
        return run.feed(dataloader)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of the present micro-batch.

        Raises:
            ConfigError: the module returned no loss.
        """
        if self._run is not None and self._run.later_batch is not None:
            args = (self._run.later_batch, *args[1:])
        found = super().training_step(*args, **kwargs)
        if found is None:
            raise ConfigError(
                "lightning: training_step() returned None: expected a loss, since each sample is "
                "trained once: return one that is 0 instead"
            )
        return found

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Weigh the loss, so that the gradient is the mean over the step, and propagate it.

        Args:
            closure_loss: the loss of one micro-batch.
            optimizer: the optimizer of the step.
            args: further arguments of Lightning's strategy.
            kwargs: its further named arguments.
        """
        if self._run is not None:
            closure_loss = self._run.step.weigh(closure_loss)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Compute all micro-batches of the step, update the weights, and commit the step.

        Args:
            optimizer: updates the weights.
            closure: Lightning's closure: forward and backward of one micro-batch.
            model: the module.
            kwargs: further arguments of ``optimizer.step``.

        Raises:
            ConfigError: the closure is not Lightning's, or the optimizer calls it twice.
        """
        if self._run is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        results = [self._run.compute(closure, self.block_backward_sync)]

        def once() -> Any:
            if not results:
                raise ConfigError(
                    f"lightning: {type(optimizer).__name__} evaluates the loss more than once in a "
                    "step: expected an optimizer that needs the gradient only"
                )
            return results.pop()

        found = super().optimizer_step(optimizer, once, model, **kwargs)
        self._run.commit()
        return found

    # --- Hooks of Lightning ---

    def on_train_start(self) -> None:
        """Take Lightning's handler of SIGTERM away under an agent.

        It sends a collective from the handler. After the death of another rank it would wait for
        that rank, and hold up the restart.
        """
        super().on_train_start()
        if self._run is not None:
            self._run.restore_handler()

    def on_train_end(self) -> None:
        """Save the end of the training."""
        super().on_train_end()
        if self._run is not None:
            self._run.end()

    def on_exception(self, exception: BaseException) -> None:
        """Leave the checkpointer open: not all ranks may be here, and closing it is collective."""
        self._run = None
        super().on_exception(exception)

    def teardown(self) -> None:
        """Close the checkpointer."""
        run, self._run = self._run, None
        if run is not None:
            run.checkpointer.close()
        super().teardown()


_WHY_NO_OPTION = {
    "cluster_environment": "the world is that of the launcher",
    "start_method": "start the workers with elastic-run --nproc-per-node",
    "static_graph": "only the last micro-batch of a step exchanges gradients",
    "model_averaging_period": "gradients are averaged in each step",
}
"""Options of ``DDPStrategy`` that are refused, and the reasons."""


class _World(TorchElasticEnvironment):
    """The world that the launcher has made. Without a launcher it has one worker."""

    def world_size(self) -> int:
        """Return the number of workers."""
        return session.world().size

    def global_rank(self) -> int:
        """Return the rank of this worker."""
        return session.world().rank

    def local_rank(self) -> int:
        """Return the rank of this worker on its node."""
        return session.world().local_rank

    def node_rank(self) -> int:
        """Return the rank of this node."""
        return session.world().node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any ``devices`` and ``num_nodes``: they do not make the world."""


class _Run:
    """One training: its loader, its state, and the step that is computed now."""

    def __init__(self, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self.trainer, self.checkpointer = trainer, checkpointer
        self.loader: ElasticLoader | None = None
        self._step: TrainingStep | None = None
        self.steps: Iterator[TrainingStep] = iter(())
        """The steps of this epoch."""
        self._batches: Iterator[Any] = iter(())
        self.later_batch: Any = None
        """The present micro-batch, if it is not the first one of its step, which Lightning has."""
        self._progress = _Progress(self)
        self._state = {
            "model": trainer.lightning_module,
            "optimizer": trainer.optimizers[0],
            "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
            "trainer": self._progress,
        }
        self._saved = 0
        """Step that the newest checkpoint has."""
        self._resume: Callable[[], None] | None = None
        """What to do at the first step after a load."""
        self._handler = signal.getsignal(signal.SIGTERM)

    @property
    def step(self) -> TrainingStep:
        """The step that is computed now."""
        assert self._step is not None
        return self._step

    # --- Data ---

    def feed(self, dataloader: object) -> "_Feed":
        """Return a loader in the form that Lightning gets, at the position of the checkpoint.

        Raises:
            ConfigError: as in :meth:`ElasticStrategy.process_dataloader`.
        """
        if not isinstance(dataloader, ElasticLoader):
            raise ConfigError(
                f"lightning: the training data is a {type(dataloader).__name__}: expected one "
                "ElasticLoader, which knows which samples are trained"
            )
        if self.loader is not None and self.loader is not dataloader:
            raise ConfigError(
                "lightning: found several loaders of training data: expected one ElasticLoader"
            )
        self._check_schedules(dataloader)
        self.loader = dataloader
        feed = _Feed(self, dataloader)
        # Lightning itself would load the position only if the epoch has begun.
        for state in self.trainer.fit_loop._combined_loader_states_to_load:
            feed.load_state_dict(state)
        self._saved = dataloader.steps
        return feed

    def _check_schedules(self, loader: ElasticLoader) -> None:
        """Raise ConfigError if a schedule counts steps, whose size depends on the world."""
        trainer = self.trainer
        by_lightning = (
            type(trainer.lightning_module).lr_scheduler_step is LightningModule.lr_scheduler_step
        )
        by_step = any(config.interval == "step" for config in trainer.lr_scheduler_configs)
        if loader.sampler.is_per_worker and by_step and by_lightning:
            raise ConfigError(
                'lightning: found global_batch=PerWorker(…) and a schedule with interval="step", '
                "which would depend on the world: expected that lr_scheduler_step() of the module "
                "calls follow() of a BatchScaling, or that global_batch is a number of samples"
            )

    def begin_epoch(self, steps: int) -> None:
        """Let Lightning know how many steps an epoch has.

        Lightning counts them once, at its start. They change if the script has begun within an
        epoch that other steps were counted in, because ``global_batch`` was another one.
        """
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        fit_loop._combined_loader.limits = None
        if fit_loop.max_batches == steps:
            return
        fit_loop.max_batches = steps
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(steps * trainer.val_check_interval))

    def begin(self, step: TrainingStep) -> Any:
        """Make a step the present one, and return its first micro-batch."""
        self._step, self._batches, self.later_batch = step, iter(step), None
        return next(self._batches)

    def compute(self, closure: Callable[[], Any], block: Callable[[], Any]) -> Any:
        """Compute forward and backward of all micro-batches; return the result of the last one.

        Args:
            closure: Lightning's closure: forward and backward of one micro-batch.
            block: returns a context in which the ranks exchange no gradients.
        """
        if not isinstance(closure, Closure):
            raise ConfigError(
                "lightning: optimizer_step() of the module passes on another closure: expected the "
                "one that it was given"
            )
        while True:
            with nullcontext() if self.step.micro_batch.last else block():
                result = closure()
            if self.step.computed:
                return result
            closure._zero_grad_fn = None  # only before the first one
            self.later_batch = self._transfer(next(self._batches))

    def commit(self) -> None:
        """Count the step as trained."""
        self.step.commit()
        assert self.loader is not None
        if not self.loader.sampler.offset:
            # Lightning does not ask for another step: it knows that this was the last one. End the
            # loop over the loader here, so that its processes do not stay during a validation.
            next(self.steps, None)

    def _transfer(self, batch: Any) -> Any:
        """Do with a micro-batch what Lightning has done with the first one of the step."""
        trainer, module = self.trainer, self.trainer.lightning_module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        results = trainer._results  # it takes the batch size for self.log() from there
        if results is not None:
            results.batch, results.batch_size = batch, None
        return batch

    # --- The state ---

    def load(self) -> None:
        """Load the newest checkpoint, if there is one. All ranks call it together."""
        session.report_agreement()  # before the first step, which a planned change must not cut off
        if self.checkpointer.load(self._state) is None:
            return
        # That of fit(ckpt_path=…) is for the first start: it is older than ours.
        self.trainer._checkpoint_connector._loaded_checkpoint = {}
        self._progress.apply()
        fit_loop, random = self.trainer.fit_loop, RandomState()
        stepped, numbers = fit_loop.epoch_loop._batches_that_stepped, random.state_dict()

        def resume() -> None:
            # Lightning may count a batch on its way to the first one, and draw random numbers. In
            # an epoch that it restarts, it leaves out ReduceLROnPlateau.
            fit_loop.epoch_loop._batches_that_stepped = stepped
            fit_loop._restarting = False
            random.load_state_dict(numbers)

        self._resume = resume

    def between_steps(self) -> None:
        """Save the last step, at the point of Lightning's loop where the next one begins.

        Raises:
            SIGTERMException: this node is about to leave, and the state is saved.
        """
        if self._resume is not None:
            self._resume()
            self._resume = None
        assert self.loader is not None
        if self.loader.steps > self._saved:
            self._save()
            if self.checkpointer.should_stop:
                self._save(force=True)
                self.checkpointer.close()
                raise SIGTERMException

    def end(self) -> None:
        """Save the end of the training."""
        if self.loader is not None and self.loader.steps:
            self._save(force=True)

    def _save(self, *, force: bool = False) -> None:
        """Save the state, and report the step."""
        assert self.loader is not None
        steps = self._saved = self.loader.steps
        self.checkpointer.save(steps, self._state, force=force)
        session.report_step(steps, max(steps, self._total()) or None)

    def _total(self) -> int:
        """Return the number of steps of the training; 0 if it has no end."""
        total = self.trainer.estimated_stepping_batches
        return int(total) if total != float("inf") else 0

    def restore_handler(self) -> None:
        """Put the handler of SIGTERM back that the script had before the training."""
        if session.active() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)


class _Feed:
    """The loader that Lightning gets: a batch of it is the first micro-batch of a step."""

    def __init__(self, run: _Run, loader: ElasticLoader) -> None:
        self._run, self._loader = run, loader

    def __len__(self) -> int:
        """Return the number of steps of this epoch, with those that are trained already."""
        sampler = self._loader.sampler
        if not sampler.offset:
            return sampler.steps_left()
        batches = self._run.trainer.fit_loop.epoch_loop.batch_progress
        return int(batches.current.ready) + sampler.steps_left()

    def __iter__(self) -> Iterator[Any]:
        """Yield the first micro-batch of each step that is left in this epoch.

        Raises:
            ConfigError: Lightning is in another epoch than the loader.
        """
        epoch = self._run.trainer.current_epoch
        if self._loader.epoch != epoch:
            raise ConfigError(
                f"lightning: the trainer is in epoch {epoch}, and the loader in epoch "
                f"{self._loader.epoch}: expected that each epoch is trained to its end, and that "
                "a checkpoint of fit(ckpt_path=…) has the position of this loader"
            )
        self._run.begin_epoch(len(self))
        self._run.between_steps()
        self._run.steps = iter(self._loader)
        for step in self._run.steps:
            yield self._run.begin(step)
            self._run.between_steps()

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position; see :meth:`ElasticLoader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position; see :meth:`ElasticLoader.load_state_dict`."""
        self._loader.load_state_dict(state)


class _Progress:
    """What a restart needs of the trainer, beside module, optimizer and schedulers."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return it as one object, which is saved faster than its parts."""
        trainer = self._run.trainer
        found = {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "precision": trainer.precision_plugin.state_dict(),
            "module": _added_by(trainer.lightning_module),
            "datamodule": {} if trainer.datamodule is None else trainer.datamodule.state_dict(),
            "should_stop": trainer.should_stop,
        }
        if (loader := self._run.loader) is not None and loader.sampler.offset:
            _reopen_epoch(found["loops"]["epoch_progress"])
        found = apply_to_collection(found, Tensor, lambda value: value.detach().cpu())
        return {"state": tuple(found.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until the other parts are loaded, too."""
        self._loaded = dict(state["state"])

    def apply(self) -> None:
        """Give the trainer the state that was loaded."""
        assert self._loaded is not None
        found, self._loaded = self._loaded, None
        trainer = self._run.trainer
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        fit_loop.load_state_dict(found["loops"])
        positions = fit_loop._combined_loader_states_to_load
        if not any(position["offset"] for position in positions):
            # The state may be of the end of an epoch: no step of the next one is counted.
            epoch_loop.batch_progress.reset_on_run()
            epoch_loop.scheduler_progress.reset_on_run()
            epoch_loop.automatic_optimization.optim_progress.reset_on_run()
        for callback in trainer.callbacks:
            if state := found["callbacks"].get(callback.state_key):
                callback.load_state_dict(deepcopy(state))
        if found["precision"]:
            trainer.precision_plugin.load_state_dict(found["precision"])
        if found["module"]:
            module = trainer.lightning_module
            module.on_load_checkpoint({**found["module"], "state_dict": module.state_dict()})
        if found["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(found["datamodule"])
        trainer.should_stop = found["should_stop"]


def _reopen_epoch(progress: dict[str, Any]) -> None:
    """Count an epoch as not trained whose last steps are left out, because the training has ended.

    Args:
        progress: Lightning's counters of epochs.
    """
    for counts in (progress["total"], progress["current"]):
        counts["processed"] = counts["completed"] = counts["started"] - 1


def _added_by(module: LightningModule) -> dict[str, Any]:
    """Return what ``on_save_checkpoint`` of a module adds to a checkpoint."""
    if type(module).on_save_checkpoint is LightningModule.on_save_checkpoint:
        return {}
    trainer = module.trainer
    given = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": module.state_dict(),
    }
    checkpoint = dict(given)
    module.on_save_checkpoint(checkpoint)
    return {key: value for key, value in checkpoint.items() if key not in given}


# --- What is refused ---


def _check(trainer: Trainer) -> None:
    """Raise ConfigError if something of a trainer or of its module cannot be exact."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise ConfigError(
            "lightning: the module optimizes by hand (automatic_optimization=False): expected "
            "automatic optimization, so that a step of the optimizer is a step of the data"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(
            "lightning: training_step(dataloader_iter) reads the data itself: expected "
            "training_step(batch) or training_step(batch, batch_idx)"
        )
    for name, expected in _EXPECTED.items():
        value = getattr(trainer, name)
        if repr(value) != repr(expected):  # a limit of 1 is one batch, and of 1.0 all of them
            raise ConfigError(
                f"lightning: found Trainer({name}={value!r}): expected {expected!r}: {_WHY[name]}"
            )
    for callback in trainer.callbacks:
        kind = type(callback)
        if isinstance(callback, _NO_CALLBACKS):
            raise ConfigError(
                f"lightning: found the callback {kind.__name__}: expected none of its kind: it "
                "trains steps of its own, or changes what a step is"
            )
        if kind.on_save_checkpoint is not Callback.on_save_checkpoint:
            raise ConfigError(
                f"lightning: the callback {kind.__name__} has on_save_checkpoint(): expected "
                "state_dict() and load_state_dict(), since no file of Lightning is written"
            )


_EXPECTED = {
    "accumulate_grad_batches": 1,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "limit_train_batches": 1.0,
    "reload_dataloaders_every_n_epochs": 0,
}
"""Arguments of the trainer that must have their defaults."""
_WHY = {
    "accumulate_grad_batches": "pass micro_batch to ElasticLoader instead",
    "fast_dev_run": "each sample of an epoch is trained; use a smaller dataset",
    "overfit_batches": "each sample of an epoch is trained; use a smaller dataset",
    "limit_train_batches": "each sample of an epoch is trained; use a smaller dataset",
    "reload_dataloaders_every_n_epochs": "a new loader has no position",
}
"""What to do instead."""
_NO_CALLBACKS = (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
"""Callbacks that are refused."""


def _check_optimizers(trainer: Trainer) -> None:
    """Raise ConfigError if the optimizer or a scheduler cannot be exact."""
    if len(trainer.optimizers) != 1 or isinstance(trainer.optimizers[0], LBFGS):
        found = ", ".join(type(each).__name__ for each in trainer.optimizers)
        raise ConfigError(
            f"lightning: configure_optimizers() returned {found or 'nothing'}: expected one "
            "optimizer that needs the gradient only"
        )
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step":
            raise ConfigError(
                'lightning: found ReduceLROnPlateau with interval="step": expected "epoch": '
                "Lightning steps it once more after a restart"
            )
