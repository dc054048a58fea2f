"""What several real ranks compute together is what the formulas say for all of their samples."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from dlrover_py.trainer.data import ElasticSampler
from tests.programs import PROGRAMS
from tests.programs.weigh_in_gloo_ranks import (
    BATCH,
    PADDING,
    SENTENCES,
    flat,
    language_model,
    sentences,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three ranks has written."""
    folder = tmp_path_factory.mktemp("ranks")
    program = str(PROGRAMS / "weigh_in_gloo_ranks.py")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(folder)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for rank in ranks:
            _, words = rank.communicate(timeout=200)
            assert rank.returncode == 0, words[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("world", [2, 3])
def test_the_gradient_is_the_mean_over_the_tokens_of_the_step(
    found: list[dict[str, Any]], world: int
) -> None:
    model = language_model()
    words, labels = sentences().tensors
    expected = []
    for samples in ElasticSampler(SENTENCES, global_batch=BATCH, seed=1, rank=0, world=1):
        logits, wanted = model(words[samples]).flatten(0, 1), labels[samples].flatten()
        tokens = int((wanted != PADDING).sum())
        loss = cross_entropy(logits, wanted, reduction="sum") / tokens
        expected.append(flat(torch.autograd.grad(loss, [*model.parameters()])))
    assert len(expected) == 3
    for rank in range(world):
        for with_micro_batches in found[rank][f"tokens of {world}"]:
            for ours, theirs in zip(with_micro_batches, expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-14)


def test_a_weight_that_is_wrong_on_one_rank_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    assert "on another rank" in found[0]["refused"]
    assert "has returned -1.0: expected a finite number from 0" in found[1]["refused"]


def test_the_gain_of_adascale_is_that_of_the_paper(found: list[dict[str, Any]]) -> None:
    """T. Johnson et al., AdaScale SGD, 2020: the estimates of section 3.3 for two batches."""
    first, second = found[0]["adascale"], found[1]["adascale"]
    assert len(first) == 12
    variance = signal = 0.0
    for one, other in zip(first, second, strict=True):
        gradients = torch.tensor([one["gradient"], other["gradient"]], dtype=torch.float64)
        whole = float(gradients.mean(0).square().sum())
        new_variance = float(gradients.square().sum()) / (2 - 1) - 2 / (2 - 1) * whole
        new_signal = whole - new_variance / 2
        variance = 0.95 * variance + 0.05 * new_variance
        signal = 0.95 * signal + 0.05 * new_signal
        ratio = max(variance, 0) + max(signal, 0)
        gain = ratio / (max(variance, 0) / 2 + max(signal, 0))
        assert one["factor"] == other["factor"] == pytest.approx(gain, rel=1e-5)
    assert 1.05 < first[-1]["factor"] < 1.95
