"""Lightning goes on from the step where it was interrupted, and refuses what cannot be exact."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.data import BatchScaling, ElasticLoader, PerWorker
from dlrover_py.trainer.integrations.lightning import ElasticStrategy
from dlrover_py.trainer.settings import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]
SAMPLES, BATCH, STEPS, EPOCHS = 23, 5, 5, 2
"""An epoch has four steps of five samples and one of three."""


class KilledError(Exception):
    """Stands for the death of the process: it ends ``fit`` without a save."""


class Data(TensorDataset):
    def __init__(self) -> None:
        inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0)).double()
        super().__init__(torch.arange(SAMPLES), inputs, inputs.sum(dim=1, keepdim=True).sin())


class History(Callback):
    """What a training has done, by step. What is done again after a restart replaces it."""

    def __init__(self, stop: Callable[[str, int], bool] = lambda *_: False) -> None:
        self.found: dict[tuple[Any, ...], Any] = {}
        self.stop = stop

    def note(self, trainer: L.Trainer, what: str, *more: Any) -> None:
        self.found[what, trainer.global_step] = (trainer.current_epoch, *more)
        if self.stop(what, trainer.global_step):
            raise KilledError

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        self.note(trainer, "begin", index)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        samples, module.samples = sorted(module.samples), []
        self.note(trainer, "end", trainer.fit_loop.epoch_loop.batch_idx, rate, samples)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.note(trainer, "validated", float(trainer.callback_metrics["distance"]))

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "epoch")


class Metrics(DummyLogger):
    def __init__(self, found: dict[tuple[Any, ...], Any]) -> None:
        super().__init__()
        self.found = found

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        for name, value in metrics.items():
            self.found["metric", name, step] = value


class Regression(L.LightningModule):
    def __init__(self, *, plateau: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plateau = plateau
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1)).double()
        self.samples: list[int] = []
        self.mine = 0

    def training_step(self, batch: Any, index: int) -> Any:
        samples, inputs, targets = batch
        self.mine += 1
        self.samples += samples.tolist()[: self.trainer.strategy.micro_batch.samples]
        loss = nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return {"loss": loss}

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("distance", sum(p.abs().sum() for p in self.parameters()), sync_dist=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        if self.plateau:
            lower = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=9, patience=0)
            return [optimizer], [{"scheduler": lower, "interval": "epoch", "monitor": "distance"}]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.mine

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """Leave the process group that a strategy has joined."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


Fit = Callable[..., L.LightningModule]


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """Train with the checkpoints of one job, each time as a new process would."""
    pool = tmp_path / "pool"

    def run(
        history: History | None = None,
        *,
        module: L.LightningModule | None = None,
        data: Any = None,
        job: str = "job",
        fit_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> L.LightningModule:
        pool.mkdir(exist_ok=True)
        module = module or Regression()
        history = history or History()
        loader = data or ElasticLoader(Data(), global_batch=BATCH, micro_batch=2, seed=1)
        checkpointer = Checkpointer(settings=Settings(pool=str(pool), job=job))
        callbacks = [history, *options.pop("callbacks", ())]
        trainer = L.Trainer(
            **{
                "max_epochs": EPOCHS,
                "accelerator": "cpu",
                "strategy": ElasticStrategy(checkpointer),
                "logger": Metrics(history.found),
                "log_every_n_steps": 1,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
                "default_root_dir": str(tmp_path),
                "callbacks": callbacks,
            }
            | options
        )
        validation = DataLoader(Data(), batch_size=SAMPLES)
        try:
            trainer.fit(module, loader, validation, **(fit_options or {}))
        finally:
            checkpointer.close()
        return module

    return run


def weights(module: L.LightningModule) -> list[float]:
    return [value for p in module.parameters() for value in p.detach().flatten().tolist()]


@pytest.mark.parametrize(("check", "plateau"), [(2, False), (1.0, True)], ids=str)
def test_a_restart_at_any_point_goes_on_as_if_nothing_had_been(
    fit: Fit, tmp_path: Path, check: float, plateau: bool
) -> None:
    """Each step, validation, schedule, logged value and random number is as without a restart."""

    def train(history: History, job: str) -> tuple[L.LightningModule, list[float]]:
        best = ModelCheckpoint(tmp_path / job, monitor="distance", save_top_k=2)
        module = fit(
            history,
            job=job,
            module=Regression(plateau=plateau),
            max_epochs=3 if plateau else EPOCHS,
            val_check_interval=check,
            callbacks=[best],
        )
        return module, sorted(float(score) for score in best.best_k_models.values())

    history = History()
    trained, scores = train(history, "whole")
    points = [key for key in history.found if key[0] != "metric"]
    assert len(points) > 2 * STEPS * EPOCHS
    for point in points[plateau::3]:
        again, job = History(lambda *now, at=point: now == at), "-".join(map(str, point))
        with pytest.raises(KilledError):
            train(again, job)
        again.stop = lambda *_: False
        module, found = train(again, job)
        assert again.found == history.found, point
        assert weights(module) == weights(trained)
        assert module.mine == trained.mine
        assert found == scores


def test_the_weights_are_those_of_a_plain_loop_over_whole_batches(fit: Fit) -> None:
    """So the gradients of the micro-batches are weighed, summed up and cleared once."""

    def without_dropout() -> Regression:
        module = Regression()
        module.layers[1].p = 0.0
        return module

    trained, plain = fit(module=without_dropout()), without_dropout()
    (optimizer,), (schedule,) = plain.configure_optimizers()
    loader = ElasticLoader(Data(), global_batch=BATCH, seed=1)
    while loader.epoch < EPOCHS:
        for step in loader:
            for _, inputs, targets in step:
                nn.functional.mse_loss(plain.layers(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule["scheduler"].step()
            step.commit()
    assert weights(trained) == pytest.approx(weights(plain), rel=1e-12, abs=1e-13)


class Weighed(Regression):
    """Its loss is a mean over tokens: a sample has as many as its first feature says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].p = 0.0

    def training_step(self, batch: Any, index: int) -> Any:
        _, inputs, targets = batch
        counts = inputs[:, :1].abs()
        return ((self.layers(inputs) - targets) ** 2 * counts).sum() / counts.sum()


def test_the_mean_is_one_over_what_the_loader_weighs_by(fit: Fit) -> None:
    found = []
    for micro_batch in (None, 2):
        loader = ElasticLoader(Data(), global_batch=BATCH, micro_batch=micro_batch)
        loader.weigh_by(lambda batch: batch[1][:, 0].abs().sum())
        module = Weighed()
        fit(module=module, data=loader, job=str(micro_batch), callbacks=[])
        found.append(weights(module))
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_a_finished_training_is_not_trained_again_but_goes_on_with_more_epochs(fit: Fit) -> None:
    """So it does if its steps are limited, in the middle of an epoch or at its end."""
    history = History()
    whole = fit(history)
    for limit in (STEPS, STEPS + 2):
        again, job = History(), f"limit-{limit}"
        fit(again, job=job, max_steps=limit)
        before = dict(again.found)
        fit(again, job=job, max_steps=limit)
        assert again.found == before
        module = fit(again, job=job, max_steps=STEPS * EPOCHS)
        steps = {key: value for key, value in history.found.items() if key[0] in ("begin", "end")}
        assert steps.items() <= again.found.items()
        assert weights(module) == weights(whole)


def test_an_early_stop_is_not_trained_further_after_a_restart(fit: Fit) -> None:
    """The process dies between the last save and its end."""
    history = History()
    for _ in range(2):
        fit(history, callbacks=[EarlyStopping("distance", divergence_threshold=0.0)])
    assert max(step for what, step, *_ in history.found if what == "end") == STEPS


def test_another_global_batch_in_the_middle_of_an_epoch(fit: Fit) -> None:
    """Each sample is trained once, and validation comes at the end of each epoch."""
    history = History(lambda what, step: (what, step) == ("begin", 3))
    with pytest.raises(KilledError):
        fit(history)
    history.stop = lambda *_: False
    fit(history, data=ElasticLoader(Data(), global_batch=2, seed=1))
    trained: dict[int, list[int]] = {}
    for (what, *_), value in history.found.items():
        if what == "end":
            trained.setdefault(value[0], []).extend(value[3])
    assert [sorted(samples) for samples in trained.values()] == [list(range(SAMPLES))] * EPOCHS
    validated = [step for what, step, *_ in history.found if what == "validated"]
    assert validated == [3 + 4, 3 + 4 + 12]


class Scaled(Regression):
    """Its schedule counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.loader = ElasticLoader(Data(), global_batch=PerWorker(2), seed=1)

    def configure_optimizers(self) -> Any:
        optimizers, schedules = super().configure_optimizers()
        self.scaling = BatchScaling(optimizers[0], self.loader, base_batch=BATCH)
        return optimizers, schedules

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.scaling.follow(scheduler)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["scaling"] = self.scaling.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.scaling.load_state_dict(checkpoint["scaling"])


def test_a_schedule_follows_a_batch_per_worker(fit: Fit) -> None:
    history, module = History(), Scaled()
    trained = fit(history, module=module, data=module.loader, job="whole")
    assert module.scaling.factor == 2 / BATCH
    assert module.scaling.progress == pytest.approx(EPOCHS * SAMPLES / BATCH)
    rates = [value[2] for (what, *_), value in history.found.items() if what == "end"]
    assert rates[-1] == pytest.approx(0.1 * 0.9 ** (EPOCHS * SAMPLES // BATCH // 2))
    again, module = History(lambda what, step: (what, step) == ("begin", 7)), Scaled()
    with pytest.raises(KilledError):
        fit(again, module=module, data=module.loader)
    again.stop, module = (lambda *_: False), Scaled()
    assert weights(fit(again, module=module, data=module.loader)) == weights(trained)
    assert again.found == history.found


def test_checkpoints_of_lightning_go_on_working(fit: Fit, tmp_path: Path) -> None:
    """A file that was written within an epoch has the position in the data."""
    history = History()
    files = ModelCheckpoint(tmp_path / "files", every_n_train_steps=7, save_top_k=-1)
    trained = fit(history, callbacks=[files])
    path = tmp_path / "files" / "epoch=1-step=7.ckpt"
    again = History()
    module = fit(again, job="other", fit_options={"ckpt_path": path, "weights_only": False})
    assert {key for key in again.found if key[0] == "end"} == {
        key for key in history.found if key[0] == "end" and key[1] > 7
    }
    assert all(history.found[key] == again.found[key] for key in again.found if key[0] == "end")
    assert len(weights(module)) == len(weights(trained))


def test_our_checkpoint_is_newer_than_that_of_fit(fit: Fit, tmp_path: Path) -> None:
    history = History()
    files = ModelCheckpoint(tmp_path / "files", every_n_train_steps=7, save_top_k=-1)
    trained = fit(history, callbacks=[files])
    again = History()
    path = tmp_path / "files" / "epoch=1-step=7.ckpt"
    module = fit(again, fit_options={"ckpt_path": path, "weights_only": False})
    assert not again.found
    assert weights(module) == weights(trained)


# --- What is refused ---


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TakesIterator(Regression):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        """Take nothing."""


class Optimizes(Regression):
    def __init__(self, found: Callable[[Any], Any]) -> None:
        super().__init__()
        self.found = found

    def configure_optimizers(self) -> Any:
        return self.found(list(self.parameters()))


class ReturnsNone(Regression):
    def training_step(self, batch: Any, index: int) -> Any:
        return None


class OtherClosure(Regression):
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure=lambda: closure())


class TwiceOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class SavesItself(Callback):
    def on_save_checkpoint(self, *_: Any) -> None:
        """Add nothing."""


def plateau(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = {"scheduler": schedule, "interval": "step", "monitor": "loss"}
    return {"optimizer": optimizer, "lr_scheduler": config}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "by hand": ({"module": ByHand}, "automatic_optimization"),
    "iterator": ({"module": TakesIterator}, "dataloader_iter"),
    "accumulate": ({"accumulate_grad_batches": 2}, "micro_batch"),
    "limit": ({"limit_train_batches": 0.5}, "limit_train_batches"),
    "one batch": ({"limit_train_batches": 1}, "limit_train_batches=1"),
    "fast": ({"fast_dev_run": True}, "fast_dev_run"),
    "overfit": ({"overfit_batches": 2}, "overfit_batches"),
    "reload": ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
    "finder": ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder"),
    "average": ({"callbacks": [WeightAveraging()]}, "WeightAveraging"),
    "own state": ({"callbacks": [SavesItself()]}, "SavesItself has on_save_checkpoint"),
    "plain loader": (
        {"data": DataLoader(Data(), 5)},
        "is a DataLoader: expected one ElasticLoader",
    ),
    "several": (
        {"data": [ElasticLoader(Data(), global_batch=5), ElasticLoader(Data(), global_batch=5)]},
        "several loaders",
    ),
    "per worker": (
        {"data": ElasticLoader(Data(), global_batch=PerWorker(5))},
        "expected that lr_scheduler_step",
    ),
    "LBFGS": ({"module": lambda: Optimizes(torch.optim.LBFGS)}, "returned LBFGS"),
    "plateau": ({"module": lambda: Optimizes(plateau)}, "ReduceLROnPlateau"),
    "no loss": ({"module": ReturnsNone}, "returned None"),
    "closure": ({"module": OtherClosure}, "another closure"),
    "twice": ({"module": lambda: Optimizes(TwiceOptimizer)}, "TwiceOptimizer evaluates the loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(fit: Fit, name: str) -> None:
    options, words = REFUSED[name]
    history = History()
    if "module" in options:
        options = options | {"module": options["module"]()}
    with pytest.raises(ConfigError, match=words):
        fit(history, **options)
    assert not [key for key in history.found if key[0] == "end"]


@pytest.mark.parametrize("option", ["start_method", "static_graph", "model_averaging_period"])
def test_options_of_ddp_that_contradict_the_step_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: 1}
    with pytest.raises(ConfigError, match=f"expected no {option}"):
        ElasticStrategy(**options)


def test_a_loader_in_another_epoch_is_refused(fit: Fit) -> None:
    """As if a hook had left an epoch before its end."""

    class Leaves(Regression):
        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            return -1 if index == 2 else None

    with pytest.raises(ConfigError, match="the trainer is in epoch 1, and the loader in epoch 0"):
        fit(module=Leaves())
