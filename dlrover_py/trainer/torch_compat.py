"""Everything that the trainer uses of torch beyond torch's documented interface.

No other module of the trainer touches a private name of torch: a test refuses it. A new version of
torch is therefore reviewed and tried here. Each name below has been run with **torch 2.13.0**, and
each that needs no GPU with **torch 2.15.0**, too. It has those of GPUs, but they have not been run.

=========================================== =======================================================
name or behavior of torch                   what it is used for
=========================================== =======================================================
``Tensor._version``                         finds operations in place, see :func:`version_of`
``DTensor._spec``,                          the chunk that a rank has of a DTensor
``DTensor.__create_chunk_list__``
``__tensor_flatten__``                      finds tensors that have their bytes in other tensors
``Tensor._post_accumulate_grad_hooks``,     finds parameters that change in the backward pass
``_in_backward_optimizers``
``Module._load_from_state_dict``,           finds modules that load by methods of the user
``_load_state_dict_pre_hooks``,
``_load_state_dict_post_hooks``
``_orig_mod.``,                             the names without wrappers: :data:`WRAPPER_PREFIXES`
``_checkpoint_wrapped_module.``,
``_fsdp_wrapped_module.``
``_extra_state``                            the entry of ``get_extra_state``
``Optimizer._optimizer_*_hooks``            finds optimizers with more state than torch's own
``Optimizer.step.hooked``,                  finds optimizers whose step the fence would miss
``_wrapped_by_lr_sched``,
``_overlap_with_ddp``
``ZeroRedundancyOptimizer.optim``           the optimizer that has the state of this rank
``_torchdynamo_disable``,                   a hook that the compiler does not trace
``_dynamo_marked_constant``
``torch._dynamo.symbolic_convert``,         whether the compiler makes one graph of a step
``InstructionTranslator.current_tx``
``distributed_c10d._get_default_store``     the store at which the ranks have met
``cudart().cudaHostRegister``,              copies from a GPU into shared memory without a detour
``cudart().cudaHostUnregister``,
``torch.cuda.check_error``
``_C._distributed_c10d``,                   the collectives that this process has entered:
``_dump_fr_trace_json``,                    :func:`flight_records`
``_dump_nccl_trace_json``
``distributed_c10d._world``                 the ranks and the names of its process groups
``distributed_c10d._get_default_group``,    the devices of the default process group
``ProcessGroup._device_types``
``checkpoint.planner_helpers``,             cuts chunks out of other chunks, as DCP does
``create_read_items_for_chunk_list``
``_StorageInfo``, ``_get_layout``,          what DCP's ``.metadata`` may contain
``_MEM_FORMAT_ENCODING``
``pickle._Unpickler`` (of Python)           reads ``.metadata``, as ``torch.load`` does
``WeightsUnpickler error:``                 the line of torch's message that names a class
``torch.utils.serialization.config``        ``torch.save`` imports it: this is done ahead
=========================================== =======================================================
"""

import io
import pickle  # noqa: TID251  torch's own metadata are one
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dlrover_py.protocol import json_text
from dlrover_py.protocol.errors import CheckpointError, DLRoverError
from dlrover_py.protocol.rank_ranges import ranges_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.tensor import DTensor

with suppress(ImportError):  # torch.save() imports it: the first save must not wait
    import torch.utils.serialization.config

WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Parts of names that torch.compile and the wrapper of activation checkpointing add to names."""
EXTRA_STATE = "_extra_state"
"""Entry that a module's ``get_extra_state`` returns and its ``set_extra_state`` accepts: any
value."""

# --- Tensors ---


def version_of(tensor: Any) -> int | None:
    """Return the version that torch counts for a tensor; None if it counts none."""
    try:
        return int(tensor._version)
    except RuntimeError:  # tensors of inference mode have no version
        return None


def is_sharded(value: torch.Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor.

    Before its module is imported, which takes a second, there can be no DTensor.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def spec_of(value: "DTensor") -> object:
    """Return the description of a DTensor's mesh, placements and shape.

    It is the same object for as long as they are the same.
    """
    return value._spec


def chunks_of(value: "DTensor") -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the offsets and the shape of each chunk of a DTensor on this rank.

    Raises:
        RuntimeError: its local part is not a tensor.
        ValueError: its placements have no chunks, because they include a pending sum.
    """
    return [
        (tuple(map(int, chunk.offsets)), tuple(chunk.sizes))
        for chunk in value.__create_chunk_list__()
    ]


def has_inner_tensors(value: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that has its bytes in other tensors."""
    return hasattr(value, "__tensor_flatten__")


def changes_in_backward(parameter: torch.Tensor) -> bool:
    """Return whether hooks may change a parameter in the backward pass."""
    return bool(
        parameter._post_accumulate_grad_hooks or "_in_backward_optimizers" in parameter.__dict__
    )


# --- Modules ---

_TORCHS = ("torch.nn.", "torch.distributed.", "torch._dynamo.", "torch.optim.")
"""Packages of modules that load exactly the entries that they had when they were built."""


def loads_by_itself(module: nn.Module) -> bool:
    """Return whether a module, without its children, loads by methods or hooks of the user.

    Such a module may load what it does not have: buffers of another size, more of them, or fewer.
    """
    kind = type(module)
    ways = [kind.load_state_dict, kind._load_from_state_dict]
    hooks = [
        *module._load_state_dict_pre_hooks.values(),
        *module._load_state_dict_post_hooks.values(),
    ]
    return any(not str(way.__module__).startswith(_TORCHS) for way in ways) or any(
        not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks
    )


def has_fsdp1(module: nn.Module) -> bool:
    """Return whether a module contains a FullyShardedDataParallel (FSDP1)."""
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    return fsdp is not None and any(
        isinstance(inner, fsdp.FullyShardedDataParallel) for inner in module.modules()
    )


# --- Optimizers ---


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that has the state: in ZeroRedundancyOptimizer, the one of this rank."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        inner: Optimizer = optimizer.optim
        return inner
    return optimizer


def has_more_state(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has state outside of ``state`` and ``param_groups``.

    It may wrap another optimizer, for example, or have a counter of its own.
    """
    keys = (Optimizer.state_dict, Optimizer.load_state_dict)
    if inner_optimizer(optimizer) is not optimizer:  # ZeroRedundancyOptimizer gathers itself
        return False
    kind, own = type(optimizer), vars(optimizer)
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return (kind.state_dict, kind.load_state_dict) != keys or any(
        own.get(f"_optimizer_{hook}_hooks") for hook in hooks
    )


def changes_unseen(optimizer: Optimizer) -> str:
    """Return why ``step()`` of an optimizer may change parameters without torch's hook before it.

    The hook is that of ``register_optimizer_step_pre_hook``. Empty if no reason is found. Steps
    within a CUDA graph (``capturable``), hooks in the backward pass, and changes by other code are
    not looked for.
    """
    kind = type(optimizer)
    if not getattr(kind.step, "hooked", False):
        return f"torch does not hook {kind.__qualname__}.step"
    own = vars(optimizer).get("step")
    if own is not None:
        function = getattr(own, "__func__", own)
        scheduled = getattr(function, "_wrapped_by_lr_sched", False)
        if not scheduled or getattr(function, "__wrapped__", None) is not kind.step:
            return f"step of this {kind.__qualname__} was replaced"
    if getattr(optimizer, "_overlap_with_ddp", False):
        return "overlap_with_ddp steps in the backward pass"
    return ""


# --- The compiler ---


def untraced(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function, at which torch's compiler breaks the graph.

    ``torch.compiler.disable`` sets the same attribute, but imports the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def constant_when_traced(function: Callable[[], bool]) -> Callable[[], bool]:
    """Return the function, whose value torch's compiler takes once, during the trace.

    ``torch.compiler.assume_constant_result`` sets the same attribute, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traces_one_graph() -> bool:
    """Return whether torch's compiler makes one graph of what it traces (``fullgraph=True``).

    This works only while the compiler traces. If torch does not say it, the result is True.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(getattr(InstructionTranslator.current_tx(), "one_graph", True))


# --- Processes and devices ---


def store_of_default_group() -> Any:
    """Return the store at which the ranks of the default group have met; None if torch hides it."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def register_host_memory(address: int, nbytes: int) -> None:
    """Register memory of this process with CUDA, so that copies from a GPU run on their own.

    Raises:
        torch.cuda.CudaError: CUDA refuses it.
    """
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))


def unregister_host_memory(address: int) -> None:
    """Remove the registration of memory; an error is ignored."""
    torch.cuda.cudart().cudaHostUnregister(address)


# --- torch.load and torch.distributed.checkpoint (DCP) ---


def reason_of_unpickler(error: Exception) -> str:
    """Return the line of ``torch.load``'s message that names a class which is not allowed.

    The result is "" for any other error, also for a class of a module that torch blocks.
    """
    if type(error).__name__ == "UnpicklingError":  # torch's; messages leave its module out
        named = re.search(r"WeightsUnpickler error: .+", str(error))
        if named is not None:
            return named[0]
    return ""


Box = tuple[Sequence[int], Sequence[int]]
"""Offsets of a chunk in its tensor, and its shape."""


def cuts(
    key: str, dtype: str, whole: Sequence[int], saved: Sequence[Box], wanted: Box
) -> Iterator[tuple[int, Sequence[int], Sequence[int], Sequence[int]]]:
    """Plan how to cut a chunk out of those that were saved, as DCP's DefaultLoadPlanner does.

    (torch/distributed/checkpoint/default_planner.py: create_default_local_load_plan.) The planner
    takes long to import. A part of the chunk that no saved chunk has is left out.

    Args:
        key: the tensor's key.
        dtype: the name of its type.
        whole: its global shape.
        saved: the chunks that were saved.
        wanted: the chunk to be filled.

    Yields:
        The index of a saved chunk, the offsets in the wanted chunk, the offsets in the saved chunk,
        and the shape of the region that both have.
    """
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    def chunk(box: Box) -> ChunkStorageMetadata:
        """Return a chunk in the form of DCP."""
        return ChunkStorageMetadata(torch.Size(box[0]), torch.Size(box[1]))

    properties = TensorProperties(dtype=getattr(torch, dtype))
    there = TensorStorageMetadata(properties, torch.Size(whole), [chunk(box) for box in saved])
    for item in create_read_items_for_chunk_list(key, there, [chunk(wanted)]):
        yield item.storage_index.index, item.dest_offsets, item.storage_offsets, item.lengths


_ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
"""Names that ``.metadata`` may contain, each as module and name; also dtypes and layouts of
torch."""
_OF_DCP = "torch.distributed.checkpoint."
"""The package of the classes whose instances may get a state from ``.metadata``."""
_MALFORMED = (DLRoverError, OSError, RuntimeError, ValueError, EOFError, ArithmeticError,
              AttributeError, LookupError, TypeError, struct.error)  # fmt: skip
"""Exceptions that reading a malformed ``.metadata`` may raise."""
_FORMS = (pickle.BYTEARRAY8, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER)
"""Opcodes that torch's metadata do not contain: the first allocates any size it names, the others
refer to data outside the pickle."""


class DcpUnpickler(pickle._Unpickler):
    """An unpickler that creates only what ``.metadata`` consists of.

    It is the implementation in Python, which ``torch.load`` also uses with ``weights_only=True``.
    The implementation in C allocates as much memory as a pickle names, and lets a pickle change the
    classes that it may name.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in {form[0] for form in _FORMS}
    }
    """The handlers of the opcodes that are allowed."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class, function or constant of this name.

        Raises:
            CheckpointError: the name is not allowed in ``.metadata``.
        """
        found = vars(torch).get(name) if module == "torch" else None  # getattr() may import
        if (module, name) in _ALLOWED or isinstance(found, torch.dtype | torch.layout):
            return super().find_class(module, name)
        raise CheckpointError(f"its .metadata names {module}.{name}: expected torch's metadata")

    def load_build(self) -> None:
        """Give an object the state that the pickle has for it.

        Only an instance of a class of DCP can get one. Classes, functions and constants are
        refused, because the whole process shares them.

        Raises:
            CheckpointError: the object can get no state.
        """
        made = self.stack[-2]  # type: ignore[attr-defined]
        if not type(made).__module__.startswith(_OF_DCP) or isinstance(made, Enum):
            raise CheckpointError(f"its .metadata changes a {type(made).__name__}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(document: bytes) -> "Metadata":
    """Return what the ``.metadata`` of DCP says. The entries in it are not checked.

    Raises:
        CheckpointError: the document cannot be read, names what torch does not write, or is not the
            metadata of a checkpoint.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        metadata = DcpUnpickler(io.BytesIO(document)).load()
    except (*_MALFORMED, pickle.UnpicklingError) as error:
        raise CheckpointError(f"its .metadata cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("its .metadata is not that of a checkpoint of torch's")
    return metadata


# --- Collectives ---

FLIGHT_RECORDS = 64
"""Most collectives that :func:`flight_records` returns."""
FLIGHT_RECORDS_OF_GROUP = 16
"""Most collectives of one process group and backend among them."""
FLIGHT_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
"""Functions of torch that return the document of a flight recorder."""


def devices_of_group() -> list[torch.device]:
    """Return the kinds of devices whose tensors the default process group takes."""
    return list(dist.distributed_c10d._get_default_group()._device_types)


def flight_records() -> list[dict[str, Any]]:
    """Return the newest collectives of this process, the oldest first.

    They are read from the flight recorders of torch: one for NCCL, and since torch 2.8 one for
    gloo. A collective that hangs has not been *retired*; its ``state`` says nothing with gloo.
    Point-to-point operations are left out. Each collective has the fields of a
    ``protocol.diagnosis.Collective``.

    Raises:
        AttributeError: This version of torch has no flight recorder.
        ValueError: Its document is not understood.
    """
    source = torch._C._distributed_c10d
    dumps = [getattr(source, name) for name in FLIGHT_RECORDERS if hasattr(source, name)]
    if not dumps:
        raise AttributeError("this version of torch has no flight recorder")
    # Both have entries if a script uses NCCL and this library votes with gloo.
    entries = [entry for dump in dumps for entry in json_text.decoded(dump()).get("entries", [])]
    return newest_collectives(entries, _group_members(), time.time_ns())


def newest_collectives(
    entries: Sequence[dict[str, Any]], members: dict[str, list[int]], now_ns: int
) -> list[dict[str, Any]]:
    """Return the newest collectives among the entries of flight recorders, the oldest first.

    Args:
        entries: The entries of all recorders of this process.
        members: Global ranks of the groups, by name.
        now_ns: Unix time in nanoseconds.
    """
    found: list[dict[str, Any]] = []
    counts: dict[tuple[str, str], int] = {}
    ranges = {name: ranges_of(ranks) for name, ranks in members.items()}
    for entry in sorted(entries, key=lambda entry: int(entry["time_created_ns"]), reverse=True):
        name = str(entry["process_group"][0])
        backend, _, op = str(entry["profiling_name"]).rpartition(":")
        if entry.get("is_p2p") or len(found) >= FLIGHT_RECORDS:
            continue
        place = (backend, name)
        counts[place] = counts.get(place, 0) + 1
        opened = not entry.get("retired", True)
        if counts[place] > FLIGHT_RECORDS_OF_GROUP and not opened:
            continue
        sizes = "x".join(str(size) for size in entry.get("input_sizes") or [])
        types = ", ".join(entry.get("input_dtypes") or [])
        found.append(
            {
                "group": name,
                "backend": backend,
                "seq": int(entry["collective_seq_id"]),
                "op": op,
                "shape": f"{types} {sizes}".strip(),
                "open": opened,
                "age_s": max(0.0, (now_ns - int(entry["time_created_ns"])) / 1e9),
                "ranks": ranges.get(name, []),
            }
        )
    return found[::-1]


def _group_members() -> dict[str, list[int]]:
    """Return the global ranks of each process group by its name."""
    world = dist.distributed_c10d._world
    return {
        str(world.pg_names[group]): sorted(ranks)
        for group, ranks in world.pg_group_ranks.items()
        if group in world.pg_names
    }
