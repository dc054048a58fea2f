"""Activation checkpointing: it computes again, and changes no number."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.activation_checkpoints import checkpoint_activations


class Block(nn.Module):
    """A block with dropout that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return inputs + nn.functional.dropout(self.inner(inputs).tanh(), 0.3, self.training) * scale


class Model(nn.Module):
    """Blocks in a list, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs, scale=0.5)
        return self.head(inputs)


def losses(model: nn.Module, steps: int = 5) -> list[float]:
    """Train a model on random points, and return the loss of each step."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(4, 8)) ** 2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def model() -> Model:
    torch.manual_seed(3)
    return Model()


def calls(model: Any) -> list[int]:
    return [block.calls for block in model.blocks]


@pytest.mark.parametrize("modules", [None, Block, (nn.Conv1d, Block)])
def test_the_losses_are_the_same_and_the_blocks_are_computed_twice(modules: Any) -> None:
    plain, ours = model(), model()
    assert checkpoint_activations(ours, modules) == 3
    assert losses(ours) == losses(plain)
    assert calls(plain) == [5, 5, 5]
    assert calls(ours) == [10, 10, 10]
    assert list(ours.state_dict()) == list(plain.state_dict())


def test_a_second_call_changes_nothing() -> None:
    ours = model()
    checkpoint_activations(ours)
    assert checkpoint_activations(ours) == 3
    losses(ours, steps=1)
    assert calls(ours) == [2, 2, 2]


def test_only_the_outermost_of_the_chosen_modules_is_computed_again() -> None:
    assert checkpoint_activations(model(), (Block, nn.Linear)) == 4  # the blocks and the head


def test_a_deep_copy_computes_with_its_own_weights() -> None:
    ours = model()
    checkpoint_activations(ours)
    other = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert losses(other) == losses(model())


def test_nothing_is_computed_twice_without_gradients() -> None:
    ours = model()
    checkpoint_activations(ours)
    with torch.no_grad():
        ours(torch.randn(2, 8))
    assert calls(ours) == [1, 1, 1]


@pytest.mark.parametrize("modules", [None, nn.Conv1d])
def test_a_model_without_such_modules_is_refused(modules: Any) -> None:
    with pytest.raises(ConfigError, match="has no such part"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2)), modules)
