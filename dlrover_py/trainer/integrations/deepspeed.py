"""DeepSpeed ZeRO 1, 2 and 3 with exact data, and with checkpoints that fit each world size.

::

    from dlrover_py.trainer import Checkpointer
    from dlrover_py.trainer.data import ElasticLoader
    from dlrover_py.trainer.integrations.deepspeed import ElasticEngine

    loader = ElasticLoader(dataset, global_batch=256, micro_batch=16)
    elastic = ElasticEngine(loader, model=model, config="ds.json")  # not deepspeed.initialize(…)
    engine = elastic.engine
    state = {"engine": elastic, "data": loader}
    checkpointer = Checkpointer()
    checkpointer.load(state)
    for step in loader:
        for inputs, targets in step:
            elastic.backward(step, loss_of(engine(inputs), targets))  # not engine.backward(…)
        elastic.step(step)  # not engine.step()
        checkpointer.save(loader.steps, state)

DeepSpeed's own checkpoints are bound to the world size. This module does not use them. It describes
the partitions of the optimizer as shards of tensors whose shape does not depend on the world. So
``Checkpointer`` saves them in memory, and cuts them anew for another world.

============ =======================================================================================
ZeRO         how a rank's part lies in the whole
============ =======================================================================================
1 and 2      All parameters of a group lie one behind another in one flat tensor, of which each rank
             has one piece. A piece is a whole number of pairs, because DeepSpeed aligns it to two
             elements. So the tensor of pairs is sharded as DTensor shards its first dimension.
3            Each parameter is flat and cut into equal pieces, of which the last ones are shorter or
             empty. That is DTensor's rule again.
============ =======================================================================================

The layout was read in, and is checked against, DeepSpeed 0.19. Names of its attributes that are
used here: ``optimizer``, ``bit16_groups``, ``single_partition_of_fp32_groups``, ``partition_size``,
``update_lp_params``, ``fp16_groups``, ``fp16_partitioned_groups_flat``, ``sub_group_to_group_id``,
``fp32_partitioned_groups_flat``, ``_unflatten_partitioned_parameters``, ``checkpoint_event_…``,
``ds_tensor``, ``ds_numel``, ``loss_scaler``, ``dynamic_loss_scale`` and the engine's counters.
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dlrover_py.protocol import json_text
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import ElasticLoader, TrainingStep

PAIR = 2
"""Elements to which DeepSpeed aligns the pieces of ZeRO 1 and 2."""
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""Attributes of the engine that count."""


class ElasticEngine:
    """A DeepSpeed engine whose steps are those of an ``ElasticLoader``, at any number of workers.

    It has ``state_dict`` and ``load_state_dict``, so it is a part of the checkpoint: the weights
    and the state of the optimizer, the learning rate and its schedule, the loss scale, buffers and
    DeepSpeed's counters.
    """

    def __init__(
        self,
        loader: ElasticLoader,
        *,
        config: Mapping[str, Any] | str | os.PathLike[str],
        **options: Any,
    ) -> None:
        """Create the engine with ``deepspeed.initialize``. All ranks must do this together.

        The batch sizes of the config are those of the loader, whatever the world is.

        Args:
            loader: the loader of the training samples.
            config: DeepSpeed's config: a mapping, or the path of a JSON file.
            options: further arguments of ``deepspeed.initialize``, such as ``model`` and
                ``optimizer``.

        Raises:
            ConfigError: the config cannot be read, contradicts the loader, or asks for something
                that does not survive another world size. Or DeepSpeed has made an engine or an
                optimizer of another kind than this module knows.
        """
        sampler = loader.sampler
        for name in ("training_data", "mpu", "mesh_param", "config_params"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"deepspeed: found {name}: expected the data in an ElasticLoader, the config "
                    "in config, and data parallelism only"
                )
        if loader.is_shared:
            raise ConfigError(
                "deepspeed: the loader uses divide_among(): expected that it does not, since "
                "DeepSpeed averages gradients over all ranks"
            )
        if sampler.is_per_worker:
            raise ConfigError(
                "deepspeed: found global_batch=PerWorker(…): expected a number of samples, since "
                "BatchScaling cannot scale the learning rate of DeepSpeed's optimizer"
            )
        if isinstance(options.get("model"), deepspeed.PipelineModule):
            raise ConfigError(
                "deepspeed: the model is a PipelineModule: expected a plain module, since pipeline "
                "parallelism does not survive another world size"
            )
        prepared = prepare_config(
            config,
            world=sampler.world,
            global_batch=sampler.global_batch,
            micro_batch=sampler.micro_batch,
        )
        self.engine, *_ = deepspeed.initialize(config=prepared, **options)
        """The engine that ``deepspeed.initialize`` has made."""
        self._shards = _shards_of(self.engine)
        self._made: list[Tensor] = []
        """Partitions whose optimizer state is only a place for a load to fill."""
        self.engine.set_gradient_accumulation_boundary(False)

    def backward(self, step: TrainingStep, loss: Tensor, *, reduction: str = "mean") -> None:
        """Run the backward pass of the micro-batch that was yielded last.

        The loss is weighted, so that the step's gradient is the mean over the samples of all ranks.

        Args:
            step: the step of the loader.
            loss: the loss of the micro-batch, a tensor with one element.
            reduction: how the loss combines the samples: ``"mean"`` or ``"sum"``.

        Raises:
            ConfigError: the reduction is not one of these, or no micro-batch was yielded yet.
        """
        weighted = step.weigh(loss, reduction=reduction)
        self._drop_placeholders()
        self.engine.set_gradient_accumulation_boundary(step.micro_batch.last)
        self.engine.backward(weighted, scale_wrt_gas=False)

    def step(self, step: TrainingStep) -> None:
        """Change the weights once all micro-batches are computed, and commit the step.

        DeepSpeed may skip the change if gradients are not finite. The samples count as trained all
        the same, as under ``torch.amp.GradScaler``.

        Args:
            step: the step of the loader.

        Raises:
            ConfigError: :meth:`backward` was not called for all micro-batches of the step, or the
                step was committed already.
        """
        if not step.computed or not self.engine.is_gradient_accumulation_boundary():
            raise ConfigError(
                "deepspeed: step() before the last micro-batch of the step: expected "
                "ElasticEngine.backward() of each of them, and not that of the engine"
            )
        self.engine.step()
        self.engine.set_gradient_accumulation_boundary(False)
        self.engine.global_samples += step.samples - self.engine.train_batch_size()
        step.commit()

    # --- The state ---

    def state_dict(self) -> dict[str, Any]:
        """Return the state, whose tensors are the engine's own memory.

        It has the same form and shapes on each world. Where the optimizer has no state yet, it gets
        one: a load needs a place to fill. The next backward pass removes it if nothing was loaded.
        """
        self._make_placeholders()
        engine, zero = self.engine, self.engine.optimizer
        weights, moments = self._shards.state()
        state: dict[str, Any] = {
            "layout": self._shards.layout,
            "weights": weights,
            "moments": moments,
            "groups": [
                {k: v for k, v in group.items() if k != "params"}
                for group in zero.optimizer.param_groups
            ],
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "module": self._shards.other_entries(),
        }
        if zero.dynamic_loss_scale:
            state["loss_scale"] = _plain_attributes(zero.loss_scaler)
        for name, part in self._parts_with_state():
            state[name] = part.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of any world size. All ranks must do this together.

        Raises:
            ConfigError: the state is that of another model, another ZeRO stage, or another config.
        """
        engine, zero, shards = self.engine, self.engine.optimizer, self._shards
        if state.get("layout") != shards.layout:
            raise ConfigError(
                "deepspeed: the checkpoint was made with another ZeRO stage, or by a model with "
                "other parameters: expected the same. Change it back, or start a new training"
            )
        with torch.no_grad():
            weights, moments = shards.state()
            _copy_into(weights, state["weights"])
            _copy_into(moments, state["moments"])
        shards.put_scalars(state["moments"])
        for group, saved in zip(zero.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        if zero.dynamic_loss_scale and "loss_scale" in state:
            for name, value in state["loss_scale"].items():
                setattr(zero.loss_scaler, name, value)
        for name, part in self._parts_with_state():
            if name in state:
                part.load_state_dict(state[name])
        shards.put_other_entries(state["module"])
        shards.publish()
        self._made.clear()

    def _parts_with_state(self) -> Iterator[tuple[str, Any]]:
        """Yield the other objects of the engine that have a state, by name."""
        parts = {
            "lr_scheduler": self.engine.lr_scheduler,
            "scaler": getattr(self.engine.optimizer, "torch_autocast_gradscaler", None),
        }
        for name, part in parts.items():
            if hasattr(part, "state_dict"):
                yield name, part

    def _make_placeholders(self) -> None:
        """Give each partition without optimizer state a state of zeros, which a load can fill.

        A step of the optimizer makes it, and the weights are put back afterwards. The next backward
        pass removes it if nothing was loaded.
        """
        base = self.engine.optimizer.optimizer
        groups = base.param_groups
        for flat, group in self._shards.partitions():
            if base.state.get(flat):
                continue
            before = flat.detach().clone()
            flat.grad = torch.zeros_like(flat)
            base.param_groups = [{**copy.copy(groups[group]), "params": [flat]}]
            try:
                base.step()
            finally:
                base.param_groups = groups
            flat.grad = None
            with torch.no_grad():
                flat.copy_(before)
            for value in base.state[flat].values():
                if isinstance(value, Tensor):
                    value.zero_()
            self._made.append(flat)

    def _drop_placeholders(self) -> None:
        """Remove optimizer state that no load has filled."""
        state = self.engine.optimizer.optimizer.state
        for flat in self._made:
            state.pop(flat, None)
        self._made.clear()


# --- The config ---


def prepare_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    world: int,
    global_batch: int,
    micro_batch: int | None,
) -> dict[str, Any]:
    """Return a copy of DeepSpeed's config with the batch sizes of one world.

    DeepSpeed demands that ``train_batch_size`` is the product of micro-batch, accumulation and
    world. No such numbers exist for most worlds, so the accumulation is 1, and
    :class:`ElasticEngine` sets its boundaries. ``train_batch_size`` is then only a number in logs.

    Args:
        config: a mapping, or the path of a JSON file.
        world: number of workers.
        global_batch: number of samples of a step, of all workers together.
        micro_batch: greatest number of samples of a micro-batch; None: a worker's share of a step.

    Raises:
        ConfigError: the config cannot be read, contradicts the batch sizes, or asks for something
            that does not survive another world size.
    """
    prepared = _read_config(config)
    _refuse(prepared)
    given = prepared.get("train_batch_size", "auto")
    if given not in ("auto", global_batch):
        raise ConfigError(
            f"deepspeed: the config has train_batch_size={given}, and the loader has "
            f"global_batch={global_batch}: expected the same number, or none in the config"
        )
    given = prepared.get("train_micro_batch_size_per_gpu", "auto")
    if given not in ("auto", micro_batch):
        raise ConfigError(
            f"deepspeed: the config has train_micro_batch_size_per_gpu={given}, and the loader has "
            f"micro_batch={micro_batch}: expected the same number, or none in the config"
        )
    share = -(-global_batch // world)
    micro = share if micro_batch is None else min(micro_batch, share)
    prepared["train_micro_batch_size_per_gpu"] = micro
    prepared["gradient_accumulation_steps"] = 1
    prepared["train_batch_size"] = micro * world
    return prepared


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return a copy of a config.

    Raises:
        ConfigError: the file cannot be read, or its content is not a mapping.
    """
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    try:
        read = json_text.decoded(Path(config).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"deepspeed: the config {os.fspath(config)} cannot be read: {error}: expected a file "
            "with one JSON object"
        ) from error
    if not isinstance(read, dict):
        raise ConfigError(
            f"deepspeed: the config {os.fspath(config)} is a {type(read).__name__}: expected one "
            "JSON object"
        )
    return read


_ZERO_REFUSED = {
    "elastic_checkpoint": "leave it out: checkpoints fit each world size without it",
    "parameter_alignment": "leave it out: it is not supported yet",
    "round_robin_gradients": "leave it out: it orders parameters by the world size",
    "zenflow": "leave it out: it is not supported yet",
    "zero_quantized_gradients": "leave it out: it is not supported yet",
    "zero_quantized_nontrainable_weights": "leave it out: it is not supported yet",
    "zero_quantized_weights": "leave it out: it is not supported yet",
}
"""Switches of ``zero_optimization`` that are refused, and what to do."""
_SECTIONS_REFUSED = {
    "amp": "use bf16, fp16 or torch_autocast: apex keeps state that is not saved",
    "compression_training": "it keeps state that is not saved",
    "curriculum_learning": "it reads other samples than ElasticLoader deals",
    "data_efficiency": "it reads other samples than ElasticLoader deals",
}
"""Sections that are refused if they are enabled, and why."""


def _refuse(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a config asks for something that does not survive another world size."""
    if "elasticity" in config:
        raise ConfigError(
            "deepspeed: the config has a section elasticity: remove it. elastic-run changes the "
            "world, and ElasticLoader keeps the global batch"
        )
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    if zero.get("stage") not in (1, 2, 3):
        raise ConfigError(
            f"deepspeed: zero_optimization.stage is {zero.get('stage')!r}: expected 1, 2 or 3. "
            "Without ZeRO use DistributedDataParallel"
        )
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name)
        if isinstance(section, Mapping) and section.get("device", "none") != "none":
            raise ConfigError(
                f"deepspeed: zero_optimization.{name} is on: remove it, since offloaded state is "
                "not supported yet"
            )
    for name, advice in _ZERO_REFUSED.items():
        if zero.get(name):
            raise ConfigError(f"deepspeed: found zero_optimization.{name}={zero[name]!r}: {advice}")
    if zero.get("zero_hpz_partition_size", 1) > 1:
        raise ConfigError(
            "deepspeed: zero_optimization.zero_hpz_partition_size is greater than 1: expected 1, "
            "since secondary partitions are not supported yet"
        )
    for name, why in _SECTIONS_REFUSED.items():
        section = config.get(name)
        if isinstance(section, Mapping) and section.get("enabled", name == "compression_training"):
            raise ConfigError(f"deepspeed: the config has a section {name}: remove it: {why}")
    parallel = config.get("tensor_parallel")
    ways = parallel.get("autotp_size", 1) if isinstance(parallel, Mapping) else 1
    if ways > 1 or config.get("sequence_parallel_size", 1) > 1:
        raise ConfigError(
            "deepspeed: the config asks for tensor or sequence parallelism: expected data "
            "parallelism only, since ElasticLoader deals different samples to all ranks"
        )
    if config.get("managed_gradient_accumulation") is False:
        raise ConfigError(
            "deepspeed: found managed_gradient_accumulation=false: leave it out: ElasticEngine "
            "sets the boundaries of gradient accumulation"
        )
    checkpoint = config.get("checkpoint")
    if isinstance(checkpoint, Mapping) and checkpoint.get("load_universal"):
        raise ConfigError(
            "deepspeed: found checkpoint.load_universal: remove it: Checkpointer loads a "
            "checkpoint at any world size"
        )
    optimizer = config.get("optimizer")
    kind = str(optimizer.get("type", "")).lower() if isinstance(optimizer, Mapping) else ""
    if kind in ("muon", "onebitadam", "zerooneadam", "onebitlamb"):
        raise ConfigError(
            f"deepspeed: the optimizer is {kind}: expected one whose state has the shape of its "
            "parameters, such as AdamW"
        )


# --- The partitions ---


@dataclass(frozen=True)
class _Piece:
    """This rank's piece of one tensor that is sharded over all ranks."""

    name: str
    """Name of the tensor, the same on each world."""
    flat: Tensor
    """The partition of the optimizer that contains the piece."""
    start: int
    """First element of the piece in the partition."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    def of(self, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the piece of a tensor that is laid out as the partition is.

        Args:
            tensor: the partition itself, or state of the optimizer of the same shape.
            mesh: all ranks.
        """
        rank, world = mesh.get_local_rank(), mesh.size()
        width = self.shape[1] if len(self.shape) > 1 else 1
        rows = -(-self.shape[0] // world)
        count = max(0, min(rows, self.shape[0] - rank * rows))
        local = tensor.detach().narrow(0, self.start, count * width).view(count, *self.shape[1:])
        stride = (width, 1)[2 - len(self.shape) :]
        return DTensor.from_local(
            local,
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size(self.shape),
            stride=stride,
        )


class _Shards:
    """The partitions of a ZeRO optimizer as shards of tensors that do not depend on the world."""

    def __init__(self, engine: Any, stage: int) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._mesh: DeviceMesh | None = None
        self._views: dict[tuple[str, str], tuple[int, DTensor]] = {}
        """Name of a piece and entry → address of the memory, and the piece."""
        names = {id(p): name for name, p in engine.module.named_parameters()}
        self._pieces = list(self._find(names))
        owned = {id(p) for group in self._trained() for p in group}
        self._trained_names = {name for number, name in names.items() if number in owned}
        self._others = {
            name: p for name, p in engine.module.named_parameters() if id(p) not in owned
        }
        parameters = [
            [[names[id(p)], list(getattr(p, "ds_shape", p.shape))] for p in group]
            for group in self._by_group()
        ]
        digest = hashlib.blake2b(json.dumps(parameters).encode(), digest_size=16).hexdigest()
        self.layout = {"format": 1, "stages": "1, 2" if stage < 3 else "3", "parameters": digest}
        """What a checkpoint must have in common with this engine: the stage, and a digest of the
        names and shapes of the parameters."""

    # --- What differs between ZeRO 1, 2 and 3 ---

    def _find(self, names: Mapping[int, str]) -> Iterator[_Piece]:
        """Yield the pieces of this rank.

        Raises:
            ConfigError: DeepSpeed has laid the partitions out in another way than expected.
        """
        raise NotImplementedError

    def _trained(self) -> list[list[Tensor]]:
        """Return the parameters that the optimizer has."""
        raise NotImplementedError

    def _by_group(self) -> list[list[Tensor]]:
        """Return the same parameters by group, in an order that does not depend on the world."""
        raise NotImplementedError

    def partitions(self) -> Iterator[tuple[Tensor, int]]:
        """Yield each partition of this rank, and the number of its group."""
        raise NotImplementedError

    def publish(self) -> None:
        """Let the model have the weights of the partitions. All ranks must do this together."""
        raise NotImplementedError

    # --- What does not differ ---

    def state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Return the weights by name, and the optimizer's state by name and entry.

        Raises:
            ConfigError: the optimizer has state of another shape than its parameters.
        """
        weights: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Any]] = {}
        for piece in self._pieces:
            weights[piece.name] = self._view(piece, "", piece.flat)
            entries = moments[piece.name] = {}
            for entry, value in self._zero.optimizer.state.get(piece.flat, {}).items():
                if not isinstance(value, Tensor) or not value.dim():
                    entries[entry] = value
                elif value.shape == piece.flat.shape:
                    entries[entry] = self._view(piece, entry, value)
                else:
                    raise ConfigError(
                        f"deepspeed: the optimizer's state {entry} has the shape "
                        f"{tuple(value.shape)}: expected that of the flat parameters, "
                        f"{tuple(piece.flat.shape)}. Use an optimizer such as AdamW"
                    )
        for name, p in self._others.items():
            if hasattr(p, "ds_tensor"):
                piece = _Piece(name, p.ds_tensor, 0, (p.ds_numel,))
                weights[f"frozen/{name}"] = self._view(piece, "", p.ds_tensor)
        return weights, moments

    def _view(self, piece: _Piece, entry: str, tensor: Tensor) -> DTensor:
        """Return the piece of a tensor; it is made once for as long as the memory is the same."""
        found = self._views.get((piece.name, entry))
        if found is None or found[0] != tensor.data_ptr():
            if self._mesh is None:
                self._mesh = init_device_mesh(tensor.device.type, (dist.get_world_size(),))
            found = tensor.data_ptr(), piece.of(tensor, self._mesh)
            self._views[piece.name, entry] = found
        return found[1]

    def put_scalars(self, moments: Mapping[str, Mapping[str, Any]]) -> None:
        """Put the entries of the optimizer's state that are no shards, such as ``step``."""
        for piece in self._pieces:
            own = self._zero.optimizer.state[piece.flat]
            for entry, value in moments[piece.name].items():
                if not isinstance(value, Tensor):
                    own[entry] = value
                elif not value.dim():
                    own[entry].copy_(value)

    def other_entries(self) -> dict[str, Any]:
        """Return the entries of the model that the optimizer does not have, such as buffers."""
        return {
            name: value
            for name, value in self._engine.module.state_dict().items()
            if name not in self._trained_names and not hasattr(self._others.get(name), "ds_tensor")
        }

    def put_other_entries(self, entries: Mapping[str, Any]) -> None:
        """Put the entries of the model that the optimizer does not have."""
        if entries:
            self._engine.module.load_state_dict(dict(entries), strict=False)


class _FlatShards(_Shards):
    """The shards of ZeRO 1 and 2: one flat tensor of pairs for each group."""

    def _find(self, names: Mapping[int, str]) -> Iterator[_Piece]:
        """Yield one piece for each group."""
        world = dist.get_world_size()
        for number, (flat, _) in enumerate(self.partitions()):
            pairs = -(-sum(p.numel() for p in self._zero.bit16_groups[number]) // PAIR)
            expected = PAIR * -(-pairs // world)
            _expect("a partition of ZeRO 1 or 2", flat.numel(), expected)
            yield _Piece(str(number), flat, 0, (pairs, PAIR))

    def _trained(self) -> list[list[Tensor]]:
        """Return the parameters of each group."""
        found: list[list[Tensor]] = self._zero.bit16_groups
        return found

    def _by_group(self) -> list[list[Tensor]]:
        """Return the parameters of each group."""
        return self._trained()

    def partitions(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the partition of each group."""
        for number, flat in enumerate(self._zero.single_partition_of_fp32_groups):
            yield flat, number

    def publish(self) -> None:
        """Copy the partition into the model's weights, and gather those of the other ranks."""
        self._zero.update_lp_params()


class _ParameterShards(_Shards):
    """The shards of ZeRO 3: one flat tensor for each parameter."""

    def _find(self, names: Mapping[int, str]) -> Iterator[_Piece]:
        """Yield one piece for each parameter."""
        world = dist.get_world_size()
        for (flat, _), parameters in zip(self.partitions(), self._zero.fp16_groups, strict=True):
            start = 0
            for parameter in parameters:
                size = parameter.ds_tensor.ds_numel
                _expect("a partition of ZeRO 3", size, -(-parameter.ds_numel // world))
                yield _Piece(names[id(parameter)], flat, start, (parameter.ds_numel,))
                start += size
            _expect("a subgroup of ZeRO 3", flat.numel(), start)

    def _trained(self) -> list[list[Tensor]]:
        """Return the parameters of each subgroup."""
        found: list[list[Tensor]] = self._zero.fp16_groups
        return found

    def _by_group(self) -> list[list[Tensor]]:
        """Return the parameters of each group. Its subgroups may depend on the world."""
        groups: dict[int, list[Tensor]] = {}
        for (_, number), parameters in zip(self.partitions(), self._trained(), strict=True):
            groups.setdefault(number, []).extend(parameters)
        return [groups[number] for number in sorted(groups)]

    def partitions(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the partition of each subgroup."""
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            yield flat, self._zero.sub_group_to_group_id[number]

    def publish(self) -> None:
        """Copy the partitions into the model's, and gather the small parameters that stay whole."""
        zero = self._zero
        zero.checkpoint_event_prologue()
        with torch.no_grad():
            for number, (flat, _) in enumerate(self.partitions()):
                zero.fp16_partitioned_groups_flat[number].copy_(flat)
                zero._unflatten_partitioned_parameters(number)
        zero.checkpoint_event_epilogue()


def _shards_of(engine: Any) -> _Shards:
    """Return the partitions of an engine's optimizer.

    Raises:
        ConfigError: engine or optimizer are of a kind that is not supported, or the ranks do not
            hold different parts of one model.
    """
    zero = engine.optimizer
    kinds = {DeepSpeedZeroOptimizer: _FlatShards, DeepSpeedZeroOptimizer_Stage3: _ParameterShards}
    if type(engine) is not DeepSpeedEngine or type(zero) not in kinds or engine.has_moe_layers:
        raise ConfigError(
            f"deepspeed: the engine is a {type(engine).__name__} with a {type(zero).__name__}: "
            "expected a DeepSpeedEngine with ZeRO 1, 2 or 3 and without experts (MoE)"
        )
    world = dist.get_world_size()
    if dist.get_world_size(group=zero.dp_process_group) != world:
        raise ConfigError(
            f"deepspeed: {dist.get_world_size(group=zero.dp_process_group)} of {world} ranks have "
            "different samples: expected data parallelism over all ranks"
        )
    return kinds[type(zero)](engine, engine.zero_optimization_stage())


def _expect(what: str, found: int, expected: int) -> None:
    """Raise ConfigError if a partition has another size than expected."""
    if found != expected:
        raise ConfigError(
            f"deepspeed: {what} has {found} elements: expected {expected}. DeepSpeed "
            f"{deepspeed.__version__} lays it out in a way that is not known: use 0.19"
        )


def _copy_into(targets: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Copy shards into those of this engine. A load has filled most of them in place already."""
    for name, target in targets.items():
        value = values[name]
        if isinstance(target, Mapping):
            _copy_into(target, value)
        elif isinstance(target, DTensor) and value is not target:
            target.to_local().copy_(value.to_local() if isinstance(value, DTensor) else value)


def _plain_attributes(thing: object) -> dict[str, bool | int | float]:
    """Return the attributes of an object that are numbers."""
    return {name: value for name, value in vars(thing).items() if type(value) in (bool, int, float)}
