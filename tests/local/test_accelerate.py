"""Accelerate's loop: what cannot be exact is refused, and a step is saved whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.integrations.accelerate import ElasticAccelerator

N, BATCH = 53, 12


class Training:
    """A training whose parts are prepared."""

    def __init__(self, micro_batch: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(N, 5, generator=generator, dtype=torch.float64)
        dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        loader = ElasticLoader(dataset, global_batch=BATCH, micro_batch=micro_batch)
        self.accelerator = ElasticAccelerator(cpu=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, self.prepared(loader)
        )

    def prepared(self, loader: ElasticLoader) -> ElasticLoader:
        """Return the loader, as the training needs it."""
        return loader

    def compute(self, batch: Any) -> None:
        """Compute a micro-batch."""
        inputs, targets = batch
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(mse_loss(self.model(inputs), targets))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def train(self, epochs: int) -> list[float]:
        """Train all epochs, and return the weights."""
        for _ in self.accelerator.epochs(epochs):
            for batch in self.loader:
                self.compute(batch)
        return self.weights()

    def weights(self) -> list[float]:
        """Return the weights as a flat list."""
        return [value for p in self.model.parameters() for value in p.flatten().tolist()]


@contextmanager
def training(micro_batch: int | None = None, kind: type[Training] = Training) -> Iterator[Training]:
    """Provide a training, and release its memory."""
    found = kind(micro_batch)
    try:
        yield found
    finally:
        found.accelerator.checkpointer.close()


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
    ],
)
def test_gradient_accumulation_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="from global_batch and micro_batch"):
        ElasticAccelerator(cpu=True, **options)


def test_micro_batches_and_a_schedule_do_not_change_the_steps() -> None:
    found = []
    for micro_batch in (None, 5, 1):
        with training(micro_batch) as one:
            found.append(one.train(2))
            assert one.loader.steps_per_epoch == 5
            assert one.schedule.scheduler.last_epoch == one.loader.steps == 10
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)


class ZeroesFirst(Training):
    """Its gradients are removed before a micro-batch is computed."""

    def compute(self, batch: Any) -> None:
        inputs, targets = batch
        with self.accelerator.accumulate(self.model):
            self.optimizer.zero_grad()
            self.accelerator.backward(mse_loss(self.model(inputs), targets))
            self.optimizer.step()
            self.schedule.step()


class ZeroesOutside(Training):
    """Its gradients are removed before the block."""

    def compute(self, batch: Any) -> None:
        inputs, targets = batch
        self.optimizer.zero_grad()
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(mse_loss(self.model(inputs), targets))
            self.optimizer.step()
            self.schedule.step()


class ZeroesModel(ZeroesOutside):
    """It removes gradients without the optimizer."""

    def compute(self, batch: Any) -> None:
        self.model.zero_grad()
        super().compute(batch)


@pytest.mark.parametrize("kind", [ZeroesFirst, ZeroesOutside])
@pytest.mark.parametrize("micro_batch", [None, 5, 1])
def test_gradients_may_be_removed_before_they_are_computed(
    kind: type[Training], micro_batch: int | None
) -> None:
    with training() as one:
        expected = one.train(2)
    with training(micro_batch, kind) as one:
        assert one.train(2) == pytest.approx(expected, rel=1e-12)


def test_gradients_that_are_removed_from_a_model_are_missed() -> None:
    with (
        training(5, ZeroesModel) as one,
        pytest.raises(ConfigError, match=r"expected optimizer\.zero_grad"),
    ):
        one.train(1)


class Clips(Training):
    """It clips gradients in each block."""

    by_norm = True

    def compute(self, batch: Any) -> None:
        inputs, targets = batch
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(mse_loss(self.model(inputs), targets))
            if self.by_norm:
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.1)
                assert (norm.item() > 0) == self.accelerator.sync_gradients
            else:
                self.accelerator.clip_grad_value_(self.model.parameters(), 0.01)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


class ClipsValues(Clips):
    by_norm = False


@pytest.mark.parametrize("kind", [Clips, ClipsValues])
def test_the_gradient_of_the_whole_step_is_clipped(kind: type[Training]) -> None:
    with training(None, kind) as one:
        expected = one.train(2)
    with training(5, kind) as one:
        assert one.train(2) == pytest.approx(expected, rel=1e-12)


class Weighs(Training):
    """Its loss is a mean over tokens: a sample has as many as its first feature says."""

    def prepared(self, loader: ElasticLoader) -> ElasticLoader:
        loader.weigh_by(lambda batch: batch[0][:, 0].abs().sum())
        return loader

    def compute(self, batch: Any) -> None:
        inputs, targets = batch
        with self.accelerator.accumulate(self.model):
            errors = (self.model(inputs) - targets) ** 2
            loss = (errors[:, 0] * inputs[:, 0].abs()).sum()
            self.accelerator.backward(loss, reduction="sum")
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


def test_the_mean_is_one_over_what_the_loader_weighs_by() -> None:
    found = []
    for micro_batch in (None, 5, 1):
        with training(micro_batch, Weighs) as one:
            found.append(one.train(2))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)


def test_a_state_of_accelerate_has_the_position(tmp_path: Path) -> None:
    """``save_state`` goes on working, and its state is continued after the saved step."""
    with training() as one:
        expected = one.train(2)
    with training(5) as one:
        for _ in one.accelerator.epochs(2):
            for batch in one.loader:
                one.compute(batch)
                if one.accelerator.sync_gradients and one.loader.steps == 7:
                    one.accelerator.save_state(str(tmp_path / "state"))
    with training(3) as one:
        one.accelerator.load_state(str(tmp_path / "state"))
        assert one.loader.steps == 7
        assert one.train(2) == pytest.approx(expected, rel=1e-12)


def test_a_loop_that_is_left_ends_the_training() -> None:
    with training() as one:
        epochs = []
        for epoch in one.accelerator.epochs(3):
            epochs.append(epoch)
            for batch in one.loader:
                one.compute(batch)
                if one.loader.steps == 7:
                    break
        assert (epochs, one.loader.steps) == ([0, 1], 7)


def test_the_training_is_restored_before_it_begins() -> None:
    with training() as one, pytest.raises(ConfigError, match=r"expected `for epoch in acc"):
        next(iter(one.loader))


def test_one_loader_is_trained() -> None:
    with training() as one, pytest.raises(ConfigError, match="a second ElasticLoader"):
        one.accelerator.prepare(ElasticLoader([1, 2], global_batch=1))
    accelerator = ElasticAccelerator(cpu=True)
    with pytest.raises(ConfigError, match="there is no data"):
        accelerator.restore()
    accelerator.checkpointer.close()


def test_a_micro_batch_is_computed_in_its_block() -> None:
    with (
        training() as one,
        pytest.raises(ConfigError, match=r"accumulate\(\) without a batch"),
        one.accelerator.accumulate(one.model),
    ):
        pass


def test_micro_batches_are_not_read_without_their_block() -> None:
    with training() as one:
        one.accelerator.restore()
        batches = iter(one.loader)
        inputs, _ = next(batches)
        with pytest.raises(ConfigError, match=r"backward\(\) outside of accumulate"):
            one.accelerator.backward(one.model(inputs).sum())
        with pytest.raises(ConfigError, match=r"has ended outside of accumulate\(\)"):
            next(batches)


def test_an_optimizer_makes_its_step_in_the_block() -> None:
    with training() as one:
        one.optimizer.step = one.schedule.step = lambda: None
        with pytest.raises(ConfigError, match="no optimizer made its step in the last micro-batch"):
            one.train(1)


def test_a_scheduler_makes_its_step_in_the_block() -> None:
    with training() as one:
        one.accelerator.restore()
        batches = iter(one.loader)
        one.compute(next(batches))
        one.schedule.step()
        with pytest.raises(ConfigError, match="a scheduler has made a step outside"):
            one.compute(next(batches))
