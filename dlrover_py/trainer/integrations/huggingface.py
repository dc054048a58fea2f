"""``ElasticTrainer`` is transformers' ``Trainer`` with exact data and memory checkpoints.

::

    from dlrover_py.trainer.integrations.huggingface import ElasticTrainer

    args = TrainingArguments("output", per_device_train_batch_size=16, num_train_epochs=3)
    trainer = ElasticTrainer(model, args, train_dataset=dataset, global_batch=256)
    trainer.train()
    if not trainer.should_stop:
        trainer.save_model()

Each optimizer step has the same ``global_batch`` samples for any number of workers. A worker
computes at most ``per_device_train_batch_size`` of them at once. ``Trainer`` sees one batch per
step, which is a list of micro-batches, so its counts of steps and epochs do not depend on the world
size either.
"""

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dlrover_py.protocol import json_text
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.collectives import gather, total
from dlrover_py.trainer.data import ElasticLoader, PerWorker
from dlrover_py.trainer.data.loader import TrainingStep
from dlrover_py.trainer.data.shares import MicroBatch

log = logging.getLogger(__name__)

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""Distributed types of Accelerate in which each worker has the whole model."""
_PROGRESS = (
    "global_step",
    "epoch",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of ``TrainerState`` that are saved as they are. The others follow from the arguments."""
_POSITION = "elastic_data.json"
"""File in a checkpoint of ``Trainer`` with the state of the loader."""
_UNCOUNTED = -100
"""Label that the losses of transformers leave out."""
_MANY = 2**20
"""Factor of the number of labels that leaves nothing of a loss which is divided by it."""

StepInputs = list[tuple[MicroBatch, Any]]
"""The micro-batches of this rank in an optimizer step, each with what the collator has made."""


class ElasticTrainer(Trainer):
    """A ``Trainer`` whose training survives failures and resizes.

    ``train`` continues from the newest checkpoint in memory or storage, if there is one. It ends
    early if the process is asked to end; :attr:`should_stop` is then true.

    A subclass may override ``compute_loss``. ``training_step`` gets :data:`StepInputs` here.
    """

    lr_scheduler: Any

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *positional: Any,
        global_batch: int,
        checkpointer: Checkpointer | None = None,
        block: int = 1,
        seed_samples: bool = False,
        ledger: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        """Create the trainer.

        Args:
            model: as in ``Trainer``.
            args: as in ``Trainer``. ``per_device_train_batch_size`` is the greatest number of
                samples that a worker computes at once.
            positional: further arguments of ``Trainer``.
            global_batch: number of samples of an optimizer step, of all workers together.
            checkpointer: saves the training; None: ``Checkpointer()``.
            block: see :class:`~dlrover_py.trainer.data.ElasticLoader`.
            seed_samples: see :class:`~dlrover_py.trainer.data.ElasticLoader`.
            ledger: see :class:`~dlrover_py.trainer.data.ElasticLoader`.
            options: further arguments of ``Trainer``.

        Raises:
            ConfigError: an argument contradicts that each sample is trained exactly once, or is
                not supported.
        """
        if isinstance(global_batch, PerWorker):
            raise ConfigError(
                f"huggingface: found global_batch={global_batch!r}: expected a number of samples, "
                "since Trainer counts epochs in steps of one size"
            )
        args = TrainingArguments("tmp_trainer") if args is None else args
        _check_arguments(args)
        super().__init__(model, args, *positional, **options)
        _check_placement(self)
        self.checkpointer = Checkpointer() if checkpointer is None else checkpointer
        self._global_batch = global_batch
        self._loader_options: dict[str, Any] = {
            "block": block,
            "seed_samples": seed_samples,
            "ledger": ledger,
        }
        self._loader: ElasticLoader | None = None
        self._steps: Iterator[TrainingStep] | None = None
        """Yields the steps of the present epoch."""
        self._unsaved = False
        """A step is committed, but not saved."""
        self._stopped_early = False
        """A callback has ended the training before its last step."""
        self._drained = False
        """The training has ended because the process was asked to end."""
        self._kind: str | None = None
        """How the loss depends on ``num_items_in_batch``; see :func:`_dependence`."""
        self.add_callback(_StepEnd(self))

    @property
    def should_stop(self) -> bool:
        """Whether ``train`` has ended because this process was asked to end."""
        return self._drained

    # --- The data ---

    def get_train_dataloader(self) -> Any:
        """Return the optimizer steps of an epoch. The dataset must be a map-style one.

        Raises:
            ConfigError: the dataset or an argument of the data loader cannot be used.
        """
        return ElasticSteps(self._data())

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Return the number of samples of an optimizer step, of all workers together."""
        return self._global_batch

    def get_batch_samples(
        self, epoch_iterator: Iterator[TrainingStep], num_batches: int, device: torch.device
    ) -> tuple[list[StepInputs], Tensor | int | None]:
        """Save the last step, and read the micro-batches of the next one.

        Args:
            epoch_iterator: yields the steps of the epoch.
            num_batches: 1, since a step is one batch for ``Trainer``.
            device: where the number of items is put.

        Returns:
            The batches of the step: one, or none if the epoch or the training ends here. And the
            number of labels in the step, of all workers together; None if they cannot be counted.
        """
        self._save_step()
        if self.checkpointer.should_stop:
            self._save_step(force=True)
            self._drained = self.control.should_training_stop = True
            return [], None
        step = next(epoch_iterator, None)
        if step is None:
            return [], None
        self._steps = epoch_iterator
        inputs = [(step.micro_batch, batch) for batch in step]
        counted = [batch if part.samples else _without_labels(batch) for part, batch in inputs]
        return [inputs], self._get_num_items_in_batch(counted, device)

    def floating_point_ops(self, inputs: StepInputs) -> int:
        """Return the number of floating-point operations of this worker's share of a step."""
        return sum(super(ElasticTrainer, self).floating_point_ops(batch) for _, batch in inputs)

    def _data(self) -> ElasticLoader:
        """Return the loader of the training; create it on the first call.

        Raises:
            ConfigError: the dataset or an argument of the data loader cannot be used.
        """
        if self._loader is None:
            if isinstance(self.train_dataset, IterableDataset) or not (
                hasattr(self.train_dataset, "__len__")
                and hasattr(self.train_dataset, "__getitem__")
            ):
                raise ConfigError(
                    f"huggingface: train_dataset is a {type(self.train_dataset).__name__}: "
                    "expected a map-style dataset, with __len__ and __getitem__"
                )
            prepared = super().get_train_dataloader()
            args = self.args
            self._loader = ElasticLoader(
                prepared.dataset,
                global_batch=self._global_batch,
                micro_batch=args.per_device_train_batch_size,
                seed=args.seed if args.data_seed is None else args.data_seed,
                shuffle=args.train_sampling_strategy == "random",
                **self._loader_options,
                **{name: getattr(prepared, name) for name in _LOADER_OPTIONS},
            )
        return self._loader

    # --- A step ---

    def training_step(
        self,
        model: Any,
        inputs: StepInputs,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Compute the gradients of an optimizer step. They are exchanged after its last part.

        Args:
            model: the model, in ``DistributedDataParallel`` if there are several workers.
            inputs: the micro-batches of this worker.
            num_items_in_batch: number of labels in the step, of all workers together; None if
                they are not counted.

        Returns:
            The loss. Its mean over the workers is that of the whole step.

        Raises:
            ConfigError: it is not clear how the loss depends on the number of labels.
        """
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.clamp(min=1)  # without labels the sum is 0
        kind = self._kind_of_loss(model, inputs[0][1], num_items_in_batch)
        weights = self._weights(kind, inputs)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        loss_of_step = torch.zeros((), device=self.args.device)
        for (part, batch), weight in zip(inputs, weights, strict=True):
            items = None if kind == "independent" else num_items_in_batch
            if kind == "independent" and not weight:
                batch = _with_labels(batch)
            if kind == "both" and items is not None and weight:
                items = items * weight  # the weight must not change the part that is divided
            with nullcontext() if part.last else self.accelerator.no_sync(model):
                prepared = self._prepare_inputs(batch)
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, prepared, num_items_in_batch=items)
                loss = loss * weight
                self.accelerator.backward(loss)
            loss_of_step = loss_of_step + loss.detach()
        return loss_of_step

    def count_labels(self, batch: Any) -> int | None:
        """Return over how many labels the loss of a batch is a mean; None: it is over its samples.

        This is asked if the loss ignores ``num_items_in_batch``. It counts as ``Trainer`` does.
        Override it for a loss that is a mean over something else.

        Args:
            batch: what the collator has made.
        """
        if not isinstance(batch, Mapping):
            return None
        # The mean of a CTC loss is one over samples, although they have several labels each.
        if hasattr(getattr(self.model, "config", None), "ctc_loss_reduction"):
            return None
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return None  # only classes can be left out
        if "shift_labels" not in batch and self._loss_shifts_labels:
            labels = labels[..., 1:]
        return int(labels.ne(_UNCOUNTED).sum())

    def _weights(self, kind: str, inputs: StepInputs) -> list[float]:
        """Return by what the loss of each micro-batch is multiplied. Collective.

        Args:
            kind: how the loss depends on the number of labels.
            inputs: the micro-batches of this worker.
        """
        if kind == "divided":
            return [float(part.samples > 0) for part, _ in inputs]
        if kind == "both":  # compute_loss() has multiplied by the number of workers
            return [part.samples / part.total for part, _ in inputs]
        world = self._data().sampler.world
        counts = [self.count_labels(batch) for _, batch in inputs]
        if None in counts:
            return [part.weight(world) for part, _ in inputs]
        mine = [
            float(n or 0) if p.samples else 0.0 for n, (p, _) in zip(counts, inputs, strict=True)
        ]
        weight_of_all = total([sum(mine)], world)[0] or math.inf  # without labels, no gradient
        return [count * world / weight_of_all for count in mine]

    def _kind_of_loss(self, model: Any, batch: Any, items: Tensor | int | None) -> str:
        """Return how the loss depends on the number of labels; see :func:`_dependence`.

        ``Trainer`` assumes that it is divided if the model takes further arguments, but some losses
        ignore the number. So the loss of one batch is compared with those for other numbers. The
        first call with a number is collective.

        Args:
            model: the model.
            batch: a batch of this worker.
            items: number of labels in the step; None if they are not counted.

        Raises:
            ConfigError: the loss depends on the number in another way, or the workers differ.
        """
        if items is None or self.loss_is_scaled_for_ga is not None:
            return "divided" if items is not None and self.loss_is_scaled_for_ga else "independent"
        if self._kind is None:
            model.eval()
            losses = []
            for factor in (1, 2, _MANY):
                with torch.no_grad(), torch.random.fork_rng(), self.compute_loss_context_manager():
                    loss = self.compute_loss(
                        model, self._prepare_inputs(batch), num_items_in_batch=items * factor
                    )
                losses.append(float(loss))
            kind = _dependence(*losses, rounding=torch.finfo(loss.dtype).eps)
            found = gather(kind, self._data().sampler.world)
            kinds = {one for one in found if one is not None}
            if not kinds:  # no worker has a label: there is no gradient
                return "independent"
            if "both" in kinds:  # a worker may have only labels, or none, in its batch
                kinds -= {"divided", "independent"}
            if len(kinds) > 1 or "other" in kinds:
                raise ConfigError(
                    "huggingface: the loss is neither independent of num_items_in_batch nor "
                    f"divided by it: it is {losses[0]:.6g}, and {losses[1]:.6g} for twice the "
                    "number: set trainer.loss_is_scaled_for_ga to True if it is divided by the "
                    "number, or to False if it is the mean over the labels of a batch"
                )
            self._kind = kinds.pop()
        return self._kind

    def _end_step(self) -> None:
        """Commit the step whose optimizer has just made its step."""
        step = self._data().current
        assert step is not None  # Trainer has computed one
        step.commit()
        self._unsaved = True
        self.state.epoch = self._epoch()
        session.report_step(self.state.global_step, self.state.max_steps)

    def _epoch(self) -> float:
        """Return how many epochs are committed, as ``Trainer`` counts them."""
        sampler = self._data().sampler
        size = sampler.global_batch
        return sampler.epoch + -(-sampler.offset // size) / -(-sampler.length // size)

    # --- The state ---

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **options: Any
    ) -> Any:
        """Train, from the newest checkpoint on.

        Args:
            resume_from_checkpoint: as in ``Trainer``: where to begin if no checkpoint is in memory
                or in the directory of the checkpointer.
            trial: None, since a search of hyperparameters is not supported.
            options: further arguments of ``Trainer.train``.

        Returns:
            What ``Trainer.train`` returns.

        Raises:
            CheckpointError: as in ``Checkpointer.load``.
            ConfigError: ``train`` was called before, or for a search; or as in
                ``Checkpointer.load`` and ``Checkpointer.save``.
            OSError: as in ``Checkpointer.load``.
            RuntimeError: another worker is gone.
        """
        if trial is not None:
            raise ConfigError(
                "huggingface: found a search of hyperparameters: expected train() without a trial"
            )
        if self._loader is not None and self._loader.steps:
            raise ConfigError(
                "huggingface: train() was called before: expected one call, since a second one "
                "would continue from the checkpoint at the end of the first"
            )
        return super().train(resume_from_checkpoint, trial, **options)

    def _init_training_state(self, *args: Any, **options: Any) -> tuple[int, int]:
        """Begin the state of the training, or restore it from a checkpoint of ``Trainer``.

        Args:
            args: as in ``Trainer``.
            options: as in ``Trainer``.

        Returns:
            The epoch and the step at which ``Trainer`` begins to count: 0 and 0. The loader has
            the position, and :meth:`_run_epoch` passes over complete epochs.
        """
        super()._init_training_state(*args, **options)
        return 0, 0

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        """Wrap the model, make optimizer and scheduler, and restore the training.

        Args:
            max_steps: number of optimizer steps of the training.
            train_dataloader: the steps of an epoch.
            resume_from_checkpoint: a checkpoint of ``Trainer``; None for none.
        """
        prepared = super()._prepare_for_training(
            max_steps, train_dataloader, resume_from_checkpoint
        )
        if self.checkpointer.load(self._parts()) is None and resume_from_checkpoint is not None:
            loader = self._data()
            loader.load_state_dict(_position(resume_from_checkpoint, loader, self.state))
            self._load_rng_state(resume_from_checkpoint)
        if self.args.max_steps <= 0:
            self._extend(max_steps)
        return prepared

    def _extend(self, planned: int) -> None:
        """Count the steps that are left again, because the restored ones may have another size.

        Args:
            planned: number of steps of a training whose steps all have the present size.
        """
        epochs = self.args.num_train_epochs
        steps = self.state.global_step + _steps_left(self._data(), epochs)
        if steps == planned or not self.state.global_step:
            return
        self.state.max_steps = steps
        if not (self._created_lr_scheduler and isinstance(self.lr_scheduler, LambdaLR)):
            return  # a scheduler of the script's own, or one that has no last step
        state = self.lr_scheduler.state_dict()
        self.lr_scheduler = None
        self.create_scheduler(steps)
        # The scheduler has put the rate of step 0 into the optimizer. One step back and one ahead
        # put that of the restored step there.
        state["last_epoch"] -= 1
        self.lr_scheduler.load_state_dict(state)
        self.lr_scheduler.step()
        self.callback_handler.lr_scheduler = self.lr_scheduler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint of ``Trainer``, with the position in the data.

        Args:
            model: as in ``Trainer``.
            trial: as in ``Trainer``.
        """
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = Path(self._get_output_dir(trial=trial)) / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _POSITION).write_text(json.dumps(self._data().state_dict()))
        super()._save_checkpoint(model, trial)

    def _run_epoch(self, *, epoch: int, **options: Any) -> None:
        """Train up to the end of an epoch, from where the restored training is.

        Args:
            epoch: the epoch, from 0.
            options: further arguments of ``Trainer``.
        """
        options["resume_from_checkpoint"] = None  # the loader has the position
        loader = self._data()
        # With max_steps, the number of epochs is that of steps that all have the present size.
        by_steps = self.args.max_steps > 0 and epoch + 1 >= self.state.num_train_epochs
        while loader.epoch <= epoch or by_steps:
            if self._stopped_early or self.state.global_step >= self.state.max_steps:
                self.control.should_training_stop = True  # what was restored has ended
                return
            began = loader.epoch
            super()._run_epoch(epoch=began, **options)
            if loader.epoch > began and self._steps is not None:
                next(self._steps, None)  # the loader notes the end of the epoch
            if self.control.should_training_stop:
                break
        if not self._drained:
            # With max_steps, the number of epochs is that of the present batch, and ends nothing: a
            # larger batch may have completed as many in fewer steps.
            by_epochs = self.args.max_steps <= 0 and loader.epoch >= self.state.num_train_epochs
            ends = self.control.should_training_stop or by_epochs
            self._stopped_early = ends and self.state.global_step < self.state.max_steps
            self._save_step(force=ends)

    def _save_step(self, force: bool = False) -> None:
        """Save the last step, if it is not saved yet or is to go to storage."""
        if self._unsaved or force:
            self._unsaved = False
            self.checkpointer.save(self._data().steps, self._parts(), force=force)

    def _parts(self) -> dict[str, Any]:
        """Return what is saved: torch's objects, not Accelerate's wrappers."""
        parts = {
            "model": self.model,
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
            "scheduler": self.lr_scheduler,
            "data": self._data(),
            "trainer": TrainerProgress(self),
        }
        scaler = self.accelerator.scaler
        return parts if scaler is None else {**parts, "scaler": scaler}


class ElasticSteps:
    """The optimizer steps of an epoch, as ``Trainer`` expects a data loader."""

    def __init__(self, loader: ElasticLoader) -> None:
        self.loader = loader
        """Deals the samples of each step."""
        self.dataset = loader.loader.dataset

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch."""
        return -(-self.loader.sampler.length // self.loader.sampler.global_batch)

    def __iter__(self) -> Iterator[TrainingStep]:
        """Yield the steps that are left in the epoch."""
        return iter(self.loader)


class _StepEnd(TrainerCallback):
    """Commits each step, and ends an epoch that is not complete without an evaluation."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit the step."""
        self._trainer._end_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Do nothing at a stop within an epoch: the next process does it at the epoch's end."""
        if self._trainer.should_stop:
            control.should_log = control.should_evaluate = control.should_save = False


class TrainerProgress:
    """The part of a training that only ``Trainer`` has, for a checkpoint."""

    def __init__(self, trainer: ElasticTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Return counts, the log, and the state of callbacks."""
        trainer = self._trainer
        return {
            **{name: getattr(trainer.state, name) for name in _PROGRESS},
            "stopped_early": trainer._stopped_early,
            # As one text: a checkpoint has an entry of its own for each number of a list.
            "log_history": json.dumps(trainer.state.log_history, default=str),
            "callbacks": json.dumps(
                {
                    name: [one.state()["attributes"] for one in same]
                    for name, same in self._callbacks().items()
                },
                default=str,
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of another process."""
        trainer = self._trainer
        for name in _PROGRESS:
            setattr(trainer.state, name, state[name])
        best = trainer.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):  # Trainer does the same
            log.warning("huggingface: the best checkpoint %s does not exist any more", best)
            trainer.state.best_model_checkpoint = None
        trainer._stopped_early = state["stopped_early"]
        trainer.state.log_history = json_text.decoded(state["log_history"])
        self._restore_callbacks(json_text.decoded(state["callbacks"]))

    def _restore_callbacks(self, found: Any) -> None:
        """Give each callback the state of the one with its class in the checkpoint.

        Args:
            found: states by the name of the class, in the order of the callbacks.
        """
        if not isinstance(found, Mapping):
            log.warning("huggingface: the checkpoint does not name its callbacks: they begin anew")
            return
        callbacks = self._callbacks()
        for name, states in found.items():
            same = callbacks.get(name, [])
            for one, attributes in zip(same, states, strict=False):
                for key, value in attributes.items():
                    setattr(one, key, value)
            if len(same) < len(states):
                log.warning("huggingface: a callback of the checkpoint is missing: %s", name)

    def _callbacks(self) -> dict[str, list[Any]]:
        """Return the callbacks that have a state, by the name of their class."""
        found: dict[str, list[Any]] = {}
        for one in self._trainer.callback_handler.callbacks:
            if isinstance(one, ExportableState):
                found.setdefault(type(one).__name__, []).append(one)
        return found


def _position(checkpoint: str, loader: ElasticLoader, state: Any) -> dict[str, Any]:
    """Return the position of a checkpoint of ``Trainer``, as a state of the loader.

    Args:
        checkpoint: its folder.
        loader: the loader of this training.
        state: the ``TrainerState`` of the checkpoint.

    Raises:
        ConfigError: the position cannot be read; or the checkpoint has none, because
            :class:`ElasticTrainer` did not write it, and it lies within an epoch.
    """
    path = Path(checkpoint) / _POSITION
    try:
        found = json_text.decoded(path.read_text())
    except FileNotFoundError:
        epoch = float(state.epoch or 0)
        if not epoch.is_integer():
            raise ConfigError(
                f"huggingface: {checkpoint} has no {_POSITION}, and was saved within an epoch "
                f"({epoch:g}): it is not known which samples of it were trained: expected a "
                "checkpoint of ElasticTrainer, or one at the end of an epoch"
            ) from None
        own = loader.state_dict()
        return {**own, "epoch": int(epoch), "offset": 0, "steps": state.global_step}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"huggingface: {path}: expected the position in the data: {error}: choose another "
            "checkpoint"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"huggingface: {path}: expected an object, found {found!r}")
    return found


def _steps_left(loader: ElasticLoader, epochs: float) -> int:
    """Return the number of steps from the position of a loader to the end of a training.

    Args:
        loader: has the position and the present size of a step.
        epochs: number of epochs of the training; a fraction counts whole steps.
    """
    sampler = loader.sampler
    size, length = sampler.global_batch, sampler.length
    per_epoch = -(-length // size)
    whole = int(epochs)
    # Steps of an epoch that is not a whole one. ``Trainer`` rounds up the sum of all steps, and a
    # product with a part such as 1.1 - 1 may be rounded up to one step more.
    last = math.ceil(epochs * per_epoch) - whole * per_epoch
    if sampler.epoch < whole:
        return sampler.steps_left() + (whole - sampler.epoch - 1) * per_epoch + last
    if sampler.epoch == whole:
        return max(0, -(-(min(last * size, length) - sampler.offset) // size))
    return 0


_LOADER_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "multiprocessing_context",
    "prefetch_factor",
    "worker_init_fn",
)
"""Options of a ``DataLoader`` that the trainer's arguments decide."""


def _check_arguments(args: TrainingArguments) -> None:
    """Raise ConfigError for an argument that contradicts exact data, or is not supported."""
    exact = "since each sample is trained exactly once"
    whole = "since each worker needs the whole model (DDP)"
    refused = {
        "gradient_accumulation_steps": (
            args.gradient_accumulation_steps == 1,
            "expected 1: the number of micro-batches follows from global_batch and "
            "per_device_train_batch_size",
        ),
        "dataloader_drop_last": (not args.dataloader_drop_last, f"expected False, {exact}"),
        "dataloader_in_order": (
            args.dataloader_in_order,
            "expected True, since each step has its own samples",
        ),
        "train_sampling_strategy": (
            args.train_sampling_strategy in ("random", "sequential"),
            "expected 'random' or 'sequential', whose order does not depend on the world size",
        ),
        "auto_find_batch_size": (
            not args.auto_find_batch_size,
            "expected False: choose per_device_train_batch_size",
        ),
        "average_tokens_across_devices": (
            args.average_tokens_across_devices,
            "expected True, else the gradient depends on the world size",
        ),
        "include_num_input_tokens_seen": (
            args.include_num_input_tokens_seen == "no",
            "expected 'no': it is not supported yet",
        ),
        "torch_empty_cache_steps": (
            args.torch_empty_cache_steps is None,
            "expected None: it is not supported yet",
        ),
        "enable_jit_checkpoint": (
            not args.enable_jit_checkpoint,
            "expected False: the checkpointer saves each step",
        ),
        "ddp_static_graph": (
            not args.ddp_static_graph,
            "expected False, since gradients are exchanged in the last micro-batch only",
        ),
        "optim": (
            not any(word in str(args.optim.value) for word in ("lomo", "layerwise")),
            "expected an optimizer that makes its step after the last micro-batch",
        ),
        "deepspeed": (not args.deepspeed, f"expected none, {whole}"),
        "fsdp": (not args.fsdp, f"expected none, {whole}"),
        "parallelism_config": (args.parallelism_config is None, f"expected none, {whole}"),
        "accelerator_config.gradient_accumulation_kwargs": (
            not args.accelerator_config.gradient_accumulation_kwargs,
            "expected none: gradients are exchanged in the last micro-batch",
        ),
    }
    for name, (fits, what) in refused.items():
        if not fits:
            found: Any = args
            for part in name.split("."):
                found = getattr(found, part)
            raise ConfigError(f"huggingface: found {name}={found!r}: {what}")


def _check_placement(trainer: ElasticTrainer) -> None:
    """Raise ConfigError if a worker does not have the whole model on one device."""
    kind, devices = trainer.accelerator.distributed_type, trainer.args.n_gpu
    parts = trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers
    if kind not in _KINDS or parts or devices > 1:
        raise ConfigError(
            f"huggingface: found the distributed type {kind.value} with {devices} devices in this "
            f"process{' and a model on several devices' if parts else ''}: expected that each "
            "worker has the whole model on one device (DDP): start one worker per device"
        )


def _without_labels(batch: Any) -> Any:
    """Return a batch whose labels are not counted: its samples have weight 0."""
    if not isinstance(batch, Mapping):
        return batch
    return {
        name: torch.full_like(value, _UNCOUNTED)
        if name in ("labels", "shift_labels") and isinstance(value, Tensor)
        else value
        for name, value in batch.items()
    }


def _with_labels(batch: Any) -> Any:
    """Return a batch of weight 0 with a loss that is a number: a mean over no labels is none."""
    if not isinstance(batch, Mapping):
        return batch
    return {
        name: torch.zeros_like(value)
        if name in ("labels", "shift_labels")
        and isinstance(value, Tensor)
        and not value.is_floating_point()
        else value
        for name, value in batch.items()
    }


def _dependence(loss: float, for_twice: float, for_many: float, *, rounding: float) -> str | None:
    """Return how a loss depends on the number of labels; None if it does not show.

    Args:
        loss: the loss for the number.
        for_twice: the loss for twice the number.
        for_many: the loss for ``_MANY`` times the number.
        rounding: relative error of a loss.

    Returns:
        "independent", "divided" by the number, or "other". It is "both" if the loss has a part of
        each kind, such as that of the experts' router beside the one of the labels.
    """
    if not loss or loss != loss:
        return None
    if abs(for_many / loss - 1) < max(1e-4, 4 * rounding):
        return "independent"
    if abs(for_twice - (loss + for_many) / 2) > 0.01 * abs(loss):
        return "other"
    # A smaller part of the other kind than this is not seen.
    return "divided" if abs(for_many) < abs(loss) * 4 / _MANY else "both"
