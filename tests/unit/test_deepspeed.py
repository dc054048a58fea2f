"""DeepSpeed: what is refused, batch sizes of each world, and a state without a step."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import ElasticLoader, PerWorker
from dlrover_py.trainer.integrations.deepspeed import ElasticEngine, prepare_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning"),  # DeepSpeed's own
]
deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # it would ask the compiler what it can do
SIZES: dict[str, Any] = {"world": 3, "global_batch": 10, "micro_batch": 2}


def config(stage: object = 2, **more: object) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        **more,
    }


def zero(**more: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **more}}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process alone. It is the only one that DeepSpeed takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_SIZE", "1")  # else it asks a program for the number of processors
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@pytest.mark.parametrize("world", range(1, 8))
@pytest.mark.parametrize("micro_batch", [None, 1, 3, 20])
def test_the_batch_sizes_satisfy_deepspeed_in_each_world(
    world: int, micro_batch: int | None
) -> None:
    made = prepare_config(config(), world=world, global_batch=10, micro_batch=micro_batch)
    micro, accumulation = (
        made["train_micro_batch_size_per_gpu"],
        made["gradient_accumulation_steps"],
    )
    assert made["train_batch_size"] == micro * accumulation * world
    assert 1 <= micro <= (micro_batch or 10)


def test_the_config_of_the_script_does_not_change() -> None:
    given = config(gradient_accumulation_steps=4, train_batch_size="auto")
    before = json.dumps(given)
    prepare_config(given, **SIZES)
    assert json.dumps(given) == before


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(bf16={"enabled": True})))
    assert prepare_config(tmp_path / "ds.json", **SIZES)["bf16"] == {"enabled": True}


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_file_without_a_config_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "ds.json").write_text(content)
    with pytest.raises(ConfigError, match=r"ds\.json"):
        prepare_config(str(tmp_path / "ds.json"), **SIZES)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "zero_optimization.stage"),
        (config(0), "zero_optimization.stage"),
        (config(4), "zero_optimization.stage"),
        (config(elasticity={"enabled": False}), "elasticity"),
        (config(train_batch_size=12), "train_batch_size=12"),
        (config(train_micro_batch_size_per_gpu=4), "train_micro_batch_size_per_gpu=4"),
        (zero(offload_optimizer={"device": "cpu"}), "offload_optimizer"),
        (zero(offload_param={"device": "nvme"}), "offload_param"),
        (zero(round_robin_gradients=True), "round_robin_gradients"),
        (zero(parameter_alignment=True), "parameter_alignment"),
        (zero(elastic_checkpoint=True), "elastic_checkpoint"),
        (zero(zero_quantized_weights=True), "zero_quantized_weights"),
        (zero(zero_hpz_partition_size=2), "zero_hpz_partition_size"),
        (zero(zenflow={"topk_ratio": 0.1}), "zenflow"),
        (config(amp={"enabled": True}), "amp"),
        (config(curriculum_learning={"enabled": True}), "curriculum_learning"),
        (config(data_efficiency={"enabled": True}), "data_efficiency"),
        (config(compression_training={"weight_quantization": {}}), "compression_training"),
        (config(tensor_parallel={"autotp_size": 2}), "tensor or sequence"),
        (config(sequence_parallel_size=2), "tensor or sequence"),
        (config(managed_gradient_accumulation=False), "managed_gradient_accumulation"),
        (config(checkpoint={"load_universal": True}), "load_universal"),
        (config(optimizer={"type": "Muon"}), "muon"),
    ],
)
def test_what_does_not_survive_another_world_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        prepare_config(given, **SIZES)


@pytest.mark.parametrize(
    "allowed",
    [
        zero(offload_optimizer={"device": "none"}),
        config(amp={"enabled": False}, sequence_parallel_size=1),
        config(train_batch_size=10, train_micro_batch_size_per_gpu=2),
    ],
)
def test_what_is_switched_off_is_allowed(allowed: dict[str, Any]) -> None:
    assert prepare_config(allowed, **SIZES)["train_batch_size"] == 6


def test_data_belong_into_the_loader() -> None:
    loader = ElasticLoader(Numbers(), global_batch=4)
    with pytest.raises(ConfigError, match="training_data"):
        ElasticEngine(loader, config=config(), model=nn.Linear(4, 1), training_data=Numbers())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_load_that_finds_nothing_leaves_no_trace(alone: None, stage: int) -> None:
    loader = ElasticLoader(Numbers(), global_batch=4)
    torch.manual_seed(0)
    elastic = ElasticEngine(
        loader, config=config(stage), model=nn.Linear(4, 3), dist_init_required=False
    )
    zero, base = elastic.engine.optimizer, elastic.engine.optimizer.optimizer
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    before = [flat.detach().clone() for flat in getattr(zero, name)]
    state = elastic.state_dict()
    entries = {entry for entries in state["moments"].values() for entry in entries}
    assert entries == {"step", "exp_avg", "exp_avg_sq"}
    after = [flat.detach() for flat in getattr(zero, name)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for step in loader:
        for inputs in step:
            elastic.backward(step, elastic.engine(inputs).mean())
            assert not base.state
        elastic.step(step)
        assert loader.steps == elastic.engine.global_steps == 1
        assert elastic.engine.global_samples == 4
        break


def test_the_state_of_another_model_is_refused(alone: None) -> None:
    states = []
    for size in (3, 5):
        loader = ElasticLoader(Numbers(), global_batch=4)
        elastic = ElasticEngine(
            loader, config=config(), model=nn.Linear(4, size), dist_init_required=False
        )
        states.append(elastic.state_dict())
    with pytest.raises(ConfigError, match="another ZeRO stage, or by a model"):
        elastic.load_state_dict(states[0])


def test_a_step_with_micro_batches_left_is_refused(alone: None) -> None:
    loader = ElasticLoader(Numbers(), global_batch=4, micro_batch=2)
    elastic = ElasticEngine(
        loader, config=config(), model=nn.Linear(4, 1), dist_init_required=False
    )
    for step in loader:
        loss = elastic.engine(next(iter(step))).mean()
        elastic.backward(step, loss)
        with pytest.raises(ConfigError, match="before the last micro-batch"):
            elastic.step(step)
        next(iter(step))
        with pytest.raises(ConfigError, match="of each of them"):  # computed, but not gone back
            elastic.step(step)
        break


def test_a_batch_that_is_resized_with_the_world_is_refused() -> None:
    loader = ElasticLoader(Numbers(), global_batch=PerWorker(4))
    with pytest.raises(ConfigError, match="expected a number of samples, since BatchScaling"):
        ElasticEngine(loader, config=config())


def test_a_loader_for_a_part_of_the_ranks_is_refused() -> None:
    loader = ElasticLoader(Numbers(), global_batch=4)
    loader.divide_among((0, 1))
    with pytest.raises(
        ConfigError, match=r"the loader uses divide_among\(\): expected that it does"
    ):
        ElasticEngine(loader, config=config())
