"""``ElasticLoop`` trains as a loop by hand, and refuses what would spoil a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer import Checkpointer, ElasticLoop
from dlrover_py.trainer.data import ElasticLoader

EPOCHS = 2


class Parts:
    """What a training is made of; the same in each process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(53, 5, generator=generator)
        dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
        self.loader = ElasticLoader(dataset, global_batch=12, micro_batch=5, seed=2)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = StepLR(self.optimizer, step_size=3, gamma=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def loop(self, checkpointer: Checkpointer, **options: Any) -> ElasticLoop:
        return ElasticLoop(self.model, self.optimizer, self.loader, checkpointer, **options)

    def full_loop(self, folder: Path | None) -> ElasticLoop:
        return self.loop(
            Checkpointer(folder),
            scaler=self.scaler,
            before_step=self.clip,
            after_step=self.schedule.step,
            state={"schedule": self.schedule},
        )

    @property
    def weights(self) -> list[float]:
        return [value for p in self.model.parameters() for value in p.flatten().tolist()]


def by_hand() -> list[float]:
    """Return the weights after a training with the loop over the ``ElasticLoader``."""
    parts = Parts()
    while parts.loader.epoch < EPOCHS:
        for step in parts.loader:
            for inputs, targets in step:
                with step.sync(parts.model):
                    loss = mse_loss(parts.model(inputs), targets)
                    parts.scaler.scale(step.weigh(loss)).backward()
            parts.scaler.unscale_(parts.optimizer)
            parts.clip()
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
            parts.optimizer.zero_grad()
            step.commit()
            parts.schedule.step()
    return parts.weights


def train(parts: Parts, loop: ElasticLoop, stop: int = -1) -> None:
    """Train to the end, or up to a step."""
    for epoch in loop.epochs(EPOCHS):
        assert epoch == parts.loader.epoch
        for inputs, targets in loop:
            loop.step(mse_loss(parts.model(inputs), targets))
            if parts.loader.steps == stop:
                break


def test_a_training_is_as_one_by_hand() -> None:
    parts = Parts()
    loop = parts.full_loop(None)
    assert not loop.restored
    train(parts, loop)
    assert parts.weights == by_hand()


def test_a_training_that_is_left_goes_on_as_if_it_was_not(tmp_path: Path) -> None:
    first, second, third = Parts(), Parts(), Parts()
    train(first, first.full_loop(tmp_path), stop=7)
    loop = second.full_loop(tmp_path)
    assert (loop.restored, second.loader.steps) == (True, 7)
    train(second, loop)
    assert second.weights == by_hand()
    train(third, third.full_loop(tmp_path))  # nothing is left
    assert third.weights == second.weights


@pytest.mark.parametrize("where", ["inner", "outer"])
def test_a_training_that_stops_early_is_saved(tmp_path: Path, where: str) -> None:
    """Early stopping, after an evaluation or within an epoch."""
    parts = Parts()
    loop = parts.loop(Checkpointer(tmp_path, every=100))
    for _ in loop.epochs(EPOCHS):
        for inputs, targets in loop:
            loop.step(mse_loss(parts.model(inputs), targets))
            if where == "inner" and parts.loader.steps == 3:
                loop.stop()
        loop.stop()
    steps = 3 if where == "inner" else 5
    assert parts.loader.steps == steps
    again = Parts()
    assert again.loop(Checkpointer(tmp_path)).restored
    assert (again.loader.steps, again.weights) == (steps, parts.weights)


def test_after_the_training_the_optimizer_is_free() -> None:
    parts = Parts()
    train(parts, parts.loop(Checkpointer()))
    before = parts.weights
    mse_loss(parts.model(torch.ones(1, 5)), torch.ones(1, 1)).backward()
    parts.optimizer.step()
    assert parts.weights != before


def misuse(*calls: str) -> None:
    """Train, and make some calls in each turn of the loop."""
    parts = Parts()
    loop = parts.loop(Checkpointer())
    for inputs, targets in loop:
        loss = mse_loss(parts.model(inputs), targets)
        for call in calls:
            match call:
                case "step":
                    loop.step(loss)
                case "optimizer.step":
                    parts.optimizer.step()
                case "zero_grad":
                    parts.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (["step", "optimizer.step"], "found optimizer.step() in the script"),
        (["step", "zero_grad"], "leave optimizer.zero_grad() out"),
        (["zero_grad", "step"], "leave optimizer.zero_grad() out"),
        (["step", "step"], "step() without a micro-batch"),
        ([], "the last one was not trained"),
    ],
)
def test_what_would_spoil_a_step_is_refused(calls: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        misuse(*calls)
    assert words in str(error.value)


def test_a_name_of_the_loop_is_refused_in_the_state() -> None:
    parts = Parts()
    with pytest.raises(ConfigError, match="found data in state"):
        parts.loop(Checkpointer(), state={"data": parts.schedule})
