"""What a load fills: the places that a state has, and the plan that puts a checkpoint into them.

:func:`targets` finds the places of a state. :func:`plan_restore` compares them with the catalog of
a checkpoint, and finds a place for each of its keys. A :class:`RestorePlan` then has everything
that one rank must read and set. Until :meth:`RestorePlan.finish`, a load changes nothing but the
bytes of tensors: what else is loaded is kept in containers that were made for the load.
"""

import copy
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import Optimizer

from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.protocol.slots import TensorChunk, is_private, private_key
from dlrover_py.trainer.key_differences import KeyDifferences, format_keys, match_groups
from dlrover_py.trainer.memory_ranges import MemoryRanges
from dlrover_py.trainer.object_codec import first_line
from dlrover_py.trainer.sources import Catalog
from dlrover_py.trainer.state_dict import (
    NAMES,
    OWNERS,
    RNG,
    SHARDED,
    STRUCTURE,
    ModuleState,
    PerRank,
    ReplaceableSubtree,
    StateLeaf,
    StateWalk,
    has_own_keys,
    leaf_of,
)
from dlrover_py.trainer.torch_compat import inner_optimizer, is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# --- The places of a state ---


class RestoreTargets:
    """A state that is to be filled: what it has, and how all other values are put in."""

    def __init__(self, walk: "StateWalk", state: Mapping[str, object]) -> None:
        self.leaves = walk.flat.leaves
        self.there = list(walk.flat.leaves)
        """All tensors of the state, whether the checkpoint has them or not."""
        self.put = walk.put
        """Key of an object → function that sets it."""
        hyperparameters = MemoryRanges()
        self.optimizers = [OptimizerTarget(*found, hyperparameters) for found in walk.optimizers]
        self.subtrees = walk.subtrees
        """Subtrees whose entries the load may replace, add or remove."""
        self.strict = True
        """True if it is an error that a module does not accept an entry."""
        self._state = state
        self.rank = walk.rank
        self.in_modules = walk.in_modules
        """The keys of modules' tensors."""
        self.kept = walk.kept
        """The keys of plain tensors that must stay the same tensors, because they are trained."""
        self._tensors = walk.tensors
        self._tensor_containers = walk.held
        self._finish = walk.finish
        self._destinations: dict[str, tuple[Any, Any]] = {}
        """Key → container that will have the value, and the name in it, where the checkpoint says
        so."""
        self._sharded: dict[str, str] = {}
        """Key of a DTensor in ``_destinations`` → key of its subtree."""
        self._templates: dict[tuple[str, tuple[int, ...]], DTensor | None] = {}

    def add(self, key: str, names: Mapping[str, object]) -> ReplaceableSubtree | None:
        """Add a subtree for a plain value at the top level that the state does not have yet.

        The value is put into the state at the end of the load, unless the subtree is removed
        before.

        Args:
            key: the key of the value in the checkpoint.
            names: the saved names of values at the top level that are not plain strings, by their
                text in keys.

        Returns:
            The subtree. None if the state cannot be changed, already has this name, or the name is
            reserved.
        """
        own = private_key(self.rank, "")
        text = key.removeprefix(own)
        name = cast(Any, names.get(text, text))
        if not isinstance(self._state, MutableMapping) or name in self._state or name == RNG:
            return None
        container: dict[object, object] = {name: None}
        region = ReplaceableSubtree(key, container, name, plain=True)
        self.subtrees.append(region)

        def finish() -> None:
            if region in self.subtrees:
                value = container[name]
                cast(Any, self._state)[name] = PerRank(value) if text != key else value

        self._finish.append((key, finish))
        return region

    def remove(self, keys: Collection[str]) -> set[str]:
        """Remove subtrees that were added, and return all their keys."""
        gone = [region for region in self.subtrees if region.plain and region.key in keys]
        self.subtrees = [region for region in self.subtrees if region not in gone]
        return {key for region in gone for key in region.keys}

    def nest(self, region: ReplaceableSubtree, tree: object, saved: Collection[str]) -> None:
        """Nest a subtree as it was nested when it was saved.

        Only the containers that were made for the load are changed. Values that the nesting lacks
        are removed from them, except those that another rank has saved, and modules and the like.

        Args:
            region: one of ``subtrees``.
            tree: the nesting, as in :class:`StateStructure`; False: it was a single value.
            saved: all keys of the checkpoint.
        """
        region.told = True
        region.own = tuple(_leaf_keys(region.key, tree, own=True))
        there = {key for key in saved if region.has(key)}  # less those in the tree
        there -= set(_leaf_keys(region.key, tree))
        outer = {key[:index] for key in there for index, letter in enumerate(key) if letter == "."}
        self._kept: list[str] = []
        self._nest(
            region, region.key, region.holder, region.name, tree, region.value, there | outer
        )
        kept = tuple(f"{key}." for key in self._kept)
        for key in list(region.keys):
            destination = self._destinations.get(key)
            if destination is None:
                if not key.startswith(kept):
                    self._remove_value(region, key)
                continue
            if key in self.put:
                self.put[key] = partial(destination[0].__setitem__, destination[1])
            if key in self._tensor_containers:
                self._tensor_containers[key] = destination
        region.keys |= {key for key in self._destinations if region.has(key)}
        for key in region.keys & self._tensor_containers.keys():
            holder, name = self._tensor_containers[key]
            value = holder[name]
            if is_sharded(value):
                like = self._templates.setdefault((region.key, tuple(value.shape)), value)
                if like is not None and _placement(like) != _placement(value):
                    self._templates[region.key, tuple(value.shape)] = None

    def _nest(
        self,
        region: ReplaceableSubtree,
        key: str,
        holder: Any,
        name: Any,
        node: Any,
        old: Any,
        saved: Collection[str],
    ) -> None:
        """Put one value in its place. Its siblings are in the order in which they were saved.

        Args:
            region: the subtree that has the value.
            key: the key of the value.
            holder: the container that receives the value.
            name: its name or index in that container.
            node: how the value was nested, as in :class:`StateStructure`.
            old: the value that the state has; None if it has none.
            saved: keys of the subtree that the checkpoint has and the nesting lacks, and their
                prefixes.
        """
        if node is None:  # a module, say: it stays if it is here
            if old is not None:
                holder[name] = old
        elif isinstance(node, dict):
            made = _container_for(node, old)
            before = dict(old) if isinstance(old, Mapping) else {}
            made.clear()
            for inner, what in node.items():
                there = before.pop(inner, None)
                self._nest(region, f"{key}.{inner}", made, inner, what, there, saved)
            for inner, what in before.items():
                full = f"{key}.{inner}"
                if full in saved:  # only by another rank: left alone
                    self._kept.append(full)
                    if full in region.keys:
                        self._destinations[full] = made, inner
                if full in saved or has_own_keys(what):
                    made[inner] = what
            holder[name] = made
        elif isinstance(node, list):
            made = old if isinstance(old, list) else []
            items = [*made, *[None] * len(node)]
            made[:] = items[: len(node)]
            for index, what in enumerate(node):
                self._nest(region, f"{key}.{index}", made, index, what, items[index], saved)
            holder[name] = made
        else:
            holder[name] = old
            self._destinations[key] = holder, name
            if node:
                self._sharded[key] = region.key

    def take(
        self, region: ReplaceableSubtree, boxes: Collection[str], objects: Collection[str]
    ) -> None:
        """Prepare a subtree for entries that changed between tensor and object, or that are gone.

        An entry that is gone is removed if it belongs to an object of which the checkpoint has
        other entries. This is left to :meth:`nest` if the checkpoint says how they are nested.

        Args:
            region: one of ``subtrees``.
            boxes: keys of the checkpoint's tensors.
            objects: keys of its other values.
        """
        begun = any(map(region.has, boxes)) or any(map(region.has, objects))
        for key in list(region.keys):
            if key in self.put and key not in objects and key in boxes:
                self._destinations.setdefault(key, self._setter_target(key))
                del self.put[key]
            elif key in self._tensor_containers and key not in boxes and key in objects:
                self._destinations.setdefault(key, self._tensor_containers[key])
                self._remove_value(region, key)
            elif begun and not region.told and not region.plain and key not in (*boxes, *objects):
                holder, name = self._tensor_containers.get(key) or self._setter_target(key)
                named = key == f"{region.key}.{name}" or region.inner
                within = any(other.startswith(f"{key}.") for other in (*boxes, *objects))
                if named and isinstance(holder, MutableMapping) and not within:
                    holder.pop(name, None)
                    self._remove_value(region, key)

    def _setter_target(self, key: str) -> tuple[Any, Any]:
        """Return the container that an object's setter writes to, and the name in it."""
        put = cast(Any, self.put[key])  # subtrees have only setters of this kind
        return put.func.__self__, put.args[0]

    def _remove_value(self, region: ReplaceableSubtree, key: str) -> None:
        """Remove the place of a value that was not saved."""
        region.keys.discard(key)
        self.put.pop(key, None)
        if self._tensor_containers.pop(key, None) is not None:
            self.leaves[:] = [leaf for leaf in self.leaves if leaf.chunk.key != key]

    def _destination(self, key: str) -> tuple[Any, Any] | None:
        """Return the container for a value that the state does not have yet, and the name in it.

        None: the state has no place for the key, or its place is not known.
        """
        if key in self._destinations:
            return self._destinations[key]
        for region in self.subtrees:
            if region.told or region.plain or not region.has(key):
                continue
            for prefix, raw in region.inner:
                if key.startswith(prefix):
                    return region.value, raw + key[len(prefix) :]
            name = key[len(region.key) + 1 :]
            return (region.value, name) if "." not in name else None
        return None

    def is_of_other_rank(self, key: str) -> bool:
        """Return whether a key is only in another rank's version of a plain value.

        A plain value should be the same on all ranks. On this rank it has fewer entries, or is a
        different one.
        """
        return any(
            region.plain and region.told and region.has(key)
            and not any(key == own or key.startswith(f"{own}.") for own in region.own)
            for region in self.subtrees
        )  # fmt: skip

    def has_unknown_nesting(self, key: str) -> bool:
        """Return whether a subtree would have a place for a key, if its nesting were known."""
        return any(region.has(key) for region in self.subtrees) and self._destination(key) is None

    def new_setter(self, key: str) -> Callable[[object], None] | None:
        """Return the setter of an object that the state lacks; None if there is no place for it."""
        destination = self._destination(key)
        return None if destination is None else partial(destination[0].__setitem__, destination[1])

    def new_tensor(self, key: str, dtype: str, global_shape: tuple[int, ...]) -> StateLeaf | None:
        """Return a new tensor of the saved type and shape, if the state may have a different one.

        An object (a data loader, a history) decides itself what it has, and a tensor in a user's
        dict may have been replaced. Therefore any shape is right there. The tensor is put into the
        container that was made for the load; its values are not set yet.

        Args:
            key: the tensor's key.
            dtype: the name of its type.
            global_shape: its global shape.

        Returns:
            The tensor, which is a Parameter if the existing one is. None if there is no container
            for it. None as well if it is sharded, and no DTensor of this shape shows how.
        """
        new = key not in self._tensor_containers
        destination = self._destination(key) if new else self._tensor_containers[key]
        if destination is None or not isinstance(destination[0], MutableMapping | list):
            return None
        holder, name = destination
        old = holder.get(name) if isinstance(holder, MutableMapping) else holder[name]
        kind = getattr(torch, dtype)
        if new and key in self._sharded:
            template = self._templates.get((self._sharded[key], global_shape))
            if template is None:
                return None
            holder[name] = torch.empty_like(template, dtype=kind, requires_grad=False)
        elif isinstance(old, torch.Tensor) and is_sharded(old):
            if tuple(old.shape) != global_shape:
                return None
            holder[name] = torch.empty_like(old, dtype=kind, requires_grad=False)
        else:
            device = old.device if isinstance(old, torch.Tensor) else "cpu"
            holder[name] = torch.zeros(global_shape, dtype=kind, device=device)
        if isinstance(old, nn.Parameter):
            trained = old.requires_grad and (kind.is_floating_point or kind.is_complex)
            holder[name] = nn.Parameter(holder[name], requires_grad=trained)
        return leaf_of(key, holder[name])

    def tensor(self, key: str) -> torch.Tensor:
        """Return the user's own tensor that a leaf belongs to."""
        return self._tensors[key]

    def drop(self, keys: Iterable[str]) -> None:
        """Remove values that were to be added."""
        for holder, name in filter(None, map(self._destination, keys)):
            if isinstance(holder, MutableMapping):
                holder.pop(name, None)

    def has_unknown_mesh(self, key: str) -> bool:
        """Return whether a key was saved as a DTensor whose mesh is unknown here."""
        return key in self._sharded and key not in self._tensor_containers

    def finish(self) -> None:
        """Put everything that was loaded into the user's objects: optimizers, then inner objects.

        Raises:
            CheckpointError: an object of the user has refused its state; the message names its key.
        """
        for optimizer in self.optimizers:
            optimizer.finish()
        for key, loader in self._finish:
            try:
                loader(self.strict) if isinstance(loader, ModuleState) else loader()
            except Exception as error:
                raise CheckpointError(
                    f"{key} does not accept its saved state: {first_line(error)}"
                ) from error


class OptimizerTarget:
    """An optimizer whose state is replaced by the state in a checkpoint."""

    def __init__(
        self,
        key: str,
        optimizer: Optimizer,
        names: Mapping[int, str],
        hyperparameters: MemoryRanges,
    ) -> None:
        """Create the target.

        Args:
            key: the optimizer's key in the state.
            optimizer: the optimizer.
            names: the names of its parameters, by id.
            hyperparameters: the memory of groups' tensors that the load has set.
        """
        self.key = key
        self.prefix = f"{key}.state."
        self.groups = f"{key}.param_groups"
        self._outer = optimizer
        self._inner = inner_optimizer(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.known = {names[id(p)]: number for number, p in enumerate(parameters)}
        """Name of a parameter → its number in ``optimizer.state_dict()``."""
        self.parameters = {
            names[id(p)]: (p, group)
            for group in self._inner.param_groups
            for p in group["params"]
            if id(p) in names
        }
        """Name → parameter and group, for the parameters whose state this rank has."""
        self.fresh: dict[Any, Any] = {}
        self.members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        """The names of the parameters, by group."""
        self.sharded: set[object] = set()
        """Names of the state's entries that were DTensors of another shape than their parameter."""
        self.owners: set[str] = set()
        """Keys of the state that was saved that are strings instead of parameters."""
        self.saved: set[str] = set()
        """Names of the parameters that were saved, and ``owners``."""
        self.loaded = False
        """True if the checkpoint has this optimizer: its current state is then discarded."""
        self._hyperparameters = hyperparameters

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of the groups and of the current state."""
        for values in (*self._outer.param_groups, *self._inner.state.values()):
            if isinstance(values, Mapping):
                yield from (v for v in values.values() if isinstance(v, torch.Tensor))

    def allocate(
        self,
        name: str,
        entry: str,
        dtype: torch.dtype,
        global_shape: tuple[int, ...],
        filled: MemoryRanges,
    ) -> torch.Tensor:
        """Return the tensor that the load fills with one entry of the optimizer's state.

        The tensor of the current state is used if it has the saved type and shape, and shares no
        memory with ``filled``. A new tensor is made otherwise, and its values are not loaded yet.
        Either one becomes part of ``fresh``, the state that replaces the current one in
        :meth:`finish`. The caller adds its memory to ``filled``.

        Args:
            name: the name of the parameter, or a key in ``owners``.
            entry: the name of the entry.
            dtype: the type that was saved.
            global_shape: the global shape that was saved.
            filled: the memory that the load fills for other keys.
        """
        key = self._state_key(name)
        state = self.fresh.setdefault(key, {})
        old = self._current(key).get(entry)
        fits = (
            isinstance(old, torch.Tensor)
            and old.dtype == dtype
            and tuple(old.shape) == global_shape
        )
        if fits and isinstance(old, torch.Tensor) and not filled.overlaps(old):
            state[entry] = old
        elif name in self.owners:
            state[entry] = torch.zeros(
                global_shape, dtype=dtype, device=self._device(old, global_shape)
            )
        else:
            state[entry] = self._state_tensor(name, entry, dtype, global_shape)
        found: torch.Tensor = state[entry]
        return found

    def _state_tensor(
        self, name: str, entry: str, dtype: torch.dtype, global_shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a new tensor for an entry of a parameter's state; its values are not loaded yet.

        A tensor of the parameter's shape is like the parameter. Another one is a DTensor if it was
        saved as one and the parameter is one. Any other is on the parameter's device, except that
        ``step`` is on the CPU unless a kernel reads it.

        Args:
            name: the name of the parameter.
            entry: the name of the entry.
            dtype: the type that was saved.
            global_shape: the global shape that was saved.
        """
        parameter, group = self.parameters[name]
        if global_shape == tuple(parameter.shape):
            return torch.empty_like(  # not zeros: as slow as the reading
                parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format
            )
        if entry in self.sharded and is_sharded(parameter):
            return _dtensor_like(parameter, dtype, global_shape)
        # `step` is on the CPU unless a kernel reads it
        there = entry != "step" or group.get("capturable") or group.get("fused")
        local = parameter.to_local() if is_sharded(parameter) else parameter
        return torch.zeros(global_shape, dtype=dtype, device=local.device if there else "cpu")

    def _device(self, old: object, global_shape: tuple[int, ...]) -> torch.device:
        """Return the device for a tensor that belongs to no parameter.

        A single number is on the CPU, since a kernel takes it from there. All other tensors are
        where the parameters are.
        """
        if isinstance(old, torch.Tensor):
            return old.device
        devices = (
            [parameter.device for parameter, _ in self.parameters.values()] if global_shape else []
        )
        return devices[0] if devices else torch.device("cpu")

    def _state_key(self, name: str) -> Any:
        """Return the key of the optimizer's state: a parameter, or a string of ``owners``."""
        return name if name in self.owners else self.parameters[name][0]

    def _current(self, key: Any) -> Mapping[str, object]:
        """Return the current state of a parameter; empty if there is none."""
        found = self._inner.state.get(key, {})
        return found if isinstance(found, Mapping) else {}

    def holds(self, name: str, entry: str, tensor: torch.Tensor) -> bool:
        """Return whether this very tensor is in the optimizer's current state.

        Args:
            name: the name of a parameter that this rank has, or a key of the state that is a string
                (``owners``).
            entry: the name of the entry.
            tensor: the tensor.
        """
        return self._current(self._state_key(name)).get(entry) is tensor

    def put(self, name: str, entry: str, value: object) -> None:
        """Set an entry that is not a tensor.

        Args:
            name: the name of the parameter.
            entry: the name of the entry; empty if the value is the whole state of that name.
            value: its value.
        """
        key = self._state_key(name)
        if name not in self.owners:
            value = _on_device(value, key.device)
        if entry:
            self.fresh.setdefault(key, {})[entry] = value
        else:
            self.fresh[key] = value

    def split(self, path: str) -> tuple[str, str]:
        """Split a key of the saved state into the name of the parameter and that of the entry.

        Without a known name in it, the last dot separates both. This is so if the checkpoint does
        not say its parameters' names.

        Args:
            path: the key, without ``prefix``. Both names may have dots.
        """
        name = path
        while name and name not in self.saved:
            name = name.rpartition(".")[0]
        if not name:  # the checkpoint does not say its parameters' names
            name = path.rpartition(".")[0]
        return name, path[len(name) + 1 :]

    def put_group(self, number: int, values: Mapping[str, object]) -> None:
        """Set the hyperparameters of a group; its parameters stay.

        A tensor that fits is filled in place, because a compiled step reads it. It is replaced if
        the type or shape differs, or if groups that shared it have different values now.

        Args:
            number: the number of the group.
            values: the values that were saved, by name.
        """
        group = self._outer.param_groups[number]
        for key, value in values.items():
            old = group.get(key)
            if key in ("params", SHARDED, OWNERS):
                continue
            number = isinstance(value, torch.Tensor | float | int)
            if not isinstance(old, torch.Tensor) or not number:
                group[key] = value
                continue
            new = torch.as_tensor(value, device=old.device)
            if not isinstance(value, torch.Tensor):
                new = new.to(old.dtype).expand_as(old)
            fits = (new.dtype, new.shape) == (old.dtype, old.shape)
            if fits and (not self._hyperparameters.overlaps(old) or torch.equal(old, new)):
                old.copy_(new)  # a compiled or captured step reads this tensor
                self._hyperparameters.add(old)
            else:  # groups that shared this tensor have different values now
                group[key] = new.clone()

    def finish(self) -> None:
        """Replace the optimizer's state by the one that was loaded."""
        if self.loaded:
            self._inner.state.clear()
            self._inner.state.update(self.fresh)


def targets(state: Mapping[str, object], *, rank: int) -> RestoreTargets:
    """Split a state into the places that a load fills.

    Tensors are written in place. The state of optimizers is not among them, since a new optimizer
    has none: see :attr:`RestoreTargets.optimizers`.

    Args:
        state: as for :func:`flatten`.
        rank: the rank of this process.

    Raises:
        ConfigError: something in the state cannot be loaded; the message names its key.
    """
    return RestoreTargets(StateWalk(rank, load=True).run(state), state)


def _leaf_keys(key: str, node: object, *, own: bool = False) -> Iterator[str]:
    """Yield the keys of the values in a tree; with ``own``, the prefixes of modules etc."""
    if isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaf_keys(f"{key}.{name}", inner, own=own)
    elif (node is None) == own:
        yield key


def _container_for(node: Any, old: object) -> Any:
    """Return the mapping to be filled; the caller empties it first.

    The existing mapping is filled if it has the saved type, or if a plain dict was saved. Otherwise
    the result is a new mapping of the saved type.

    Args:
        node: the mapping that was saved, with the nesting of its items.
        old: the existing value.
    """
    if type(node) is dict or type(node) is type(old):
        return old if isinstance(old, MutableMapping) else {}
    return copy.copy(node)


def _placement(value: "DTensor") -> object:
    """Return the mesh and the placements of a DTensor."""
    return value.device_mesh, value.placements


def _dtensor_like(
    parameter: "DTensor", dtype: torch.dtype, global_shape: tuple[int, ...]
) -> "DTensor":
    """Return a DTensor on a parameter's mesh, split like it along the dimensions of equal size."""
    from torch.distributed.tensor import Replicate, zeros

    shared = {
        dim
        for dim, (one, other) in enumerate(zip(global_shape, parameter.shape, strict=False))
        if one == other
    }
    placements = [
        placement if getattr(placement, "dim", None) in shared else Replicate()
        for placement in parameter.placements
    ]
    return zeros(
        global_shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements
    )


def _on_device(value: object, device: torch.device) -> object:
    """Return a value with its tensors on a device, in new plain lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_on_device(item, device) for item in value]
    if type(value) is tuple:
        return tuple(_on_device(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _on_device(item, device) for key, item in value.items()}
    return value


def may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether elements may share memory, as those of an expanded tensor do."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


# --- The plan ---


class PlannedObject(NamedTuple):
    """A value that is not a tensor, and that a load sets."""

    key: str
    """The value's key."""
    put: Callable[[Any], None]
    """Sets the value."""
    read: Callable[[], object]
    """Reads the value."""


@dataclass
class RestorePlan:
    """The plan for putting a checkpoint into a state, at one rank."""

    target: RestoreTargets
    """The state that is filled."""
    leaves: list[StateLeaf] = field(default_factory=list)
    """The tensors that are filled."""
    objects: list[PlannedObject] = field(default_factory=list)
    """The other values that are set."""
    private: list[str] = field(default_factory=list)
    """Keys that belong to this rank alone and that the checkpoint does not have: left unchanged."""
    own: list[StateLeaf] = field(default_factory=list)
    """Tensors among ``leaves`` that are the state's own memory: not put into it at the end."""
    keys: KeyDifferences = field(default_factory=KeyDifferences)
    """What differs between the state and the checkpoint."""
    gaps: list[str] = field(default_factory=list)
    """Keys of tensors of which parts are in no source that is known."""

    def accept(
        self,
        keys: KeyDifferences,
        *,
        new_entries: Collection[str],
        new_values: Collection[str],
        strict: bool,
    ) -> None:
        """Keep of the plan what all ranks have agreed on.

        Args:
            keys: this rank's differences. Keys that another rank has a place for are not among its
                ``unexpected``.
            new_entries: the keys that all ranks would add.
            new_values: the plain values at the top level that all ranks would add.
            strict: whether it is an error that a module does not accept an entry.
        """
        others = set(keys.new_entries).difference(new_entries)
        others |= self.target.remove(set(keys.new_values).difference(new_values))
        if others:
            self.leaves = [leaf for leaf in self.leaves if leaf.chunk.key not in others]
            self.objects = [one for one in self.objects if one.key not in others]
            self.target.drop(others)
        keys.new_values = list(new_values)
        self.keys, self.target.strict = keys, strict

    def unreplaced(self, written: Sequence[StateLeaf]) -> list[str]:
        """Return the keys of tensors that would keep the bytes of a damaged candidate.

        Args:
            written: the tensors into which candidates that failed have copied bytes.
        """
        optimizers = self.target.optimizers
        replaced = tuple(one.prefix for one in optimizers if one.loaded)
        # A tensor that an object made for its state_dict() is no part of the object any more: the
        # next state_dict() has made another one.
        there = {_memory_of(leaf) for leaf in self.target.there}
        stays = [
            leaf
            for leaf in written
            if _memory_of(leaf) in there
            or any(leaf.chunk.key.startswith(one.prefix) for one in optimizers)
        ]
        renewed = {_memory_of(leaf) for leaf in self.leaves}
        keys = {leaf.chunk.key for leaf in stays if _memory_of(leaf) not in renewed}
        return sorted(key for key in keys if not key.startswith(replaced))

    def finish(self, values: Sequence[object]) -> None:
        """Put everything that was loaded into the user's objects.

        Until then, the load has written only into tensors.

        Args:
            values: the value of each of ``objects``.

        Raises:
            CheckpointError: an object of the user has refused its state. Others may have been
                changed.
        """
        with torch.no_grad():
            for one, value in zip(self.objects, values, strict=True):
                one.put(value)
            self.target.finish()


def plan_restore(target: RestoreTargets, catalog: Catalog) -> RestorePlan:
    """Compare the keys of a state and of a checkpoint, and find a place for each.

    The state of optimizers is allocated; no tensor is copied. Nestings, groups of optimizers and
    objects that DCP has split are read from the checkpoint. A CheckpointError is raised if one of
    them cannot be read.

    Args:
        target: the state to be filled. Its places are adapted to the checkpoint.
        catalog: what the checkpoint has.

    Returns:
        The plan. It says which keys differ, and which tensors have gaps.
    """
    return _RestorePlanner(target, catalog).run()


class _RestorePlanner:
    """Makes the plan for one state and one checkpoint."""

    def __init__(self, target: RestoreTargets, catalog: Catalog) -> None:
        self._target, self._catalog = target, catalog
        self._plan = RestorePlan(target)
        self._keys = self._plan.keys
        self._used: set[str] = set()
        """Keys of the checkpoint that have found their place."""
        self._filled = MemoryRanges()
        """The memory that the load fills, or that keeps its values."""
        self._kept = MemoryRanges()
        """The memory of plain tensors that must stay the same tensors."""
        self._key_of: dict[int, str] = {}
        """Id of a tensor of the user that is filled → its key."""

    def run(self) -> RestorePlan:
        """Return the plan."""
        self._plan_nesting()
        self._plan_modules()
        self._plan_other_tensors(kept=True)
        for key, put in self._target.put.items():
            self._plan_object(key, put)
        for optimizer in self._target.optimizers:
            self._plan_groups(optimizer)
            self._plan_optimizer_state(optimizer)
        for optimizer in self._target.optimizers:
            for tensor in optimizer.tensors():
                self._filled.add(tensor)
        self._plan_other_tensors(kept=False)
        self._place_new_keys()
        fitted = {leaf.chunk.key for leaf in self._plan.leaves}
        fitted |= {one.key for one in self._plan.objects}
        self._keys.disjoint = fitted <= set(self._keys.new_entries)
        self._plan.gaps = self._catalog.gaps(
            leaf.chunk.key for leaf in self._plan.leaves if 0 not in leaf.chunk.shape
        )
        return self._plan

    def _plan_nesting(self) -> None:
        """Nest parts of the state as they were saved, where the saved entries differ.

        A place is added for each plain value at the top level that only the checkpoint has. How the
        parts were nested is read from the checkpoint.
        """
        target, tensors, objects = self._target, self._catalog.chunks, self._catalog.objects
        saved = tensors.keys() | objects.keys()
        self._used.add(NAMES)  # it is no value of the state
        if not self._catalog.foreign:
            names: Any = self._catalog.value(NAMES) if NAMES in objects else {}
            tops = {key.removesuffix(STRUCTURE) for key in objects if key.endswith(STRUCTURE)}
            tops |= {key for key in saved if "." not in key and not key.endswith(STRUCTURE)}
            tops = {top for top in tops if not any(region.has(top) for region in target.subtrees)}
            for top in sorted(
                tops - target.put.keys() - {region.key for region in target.subtrees}
            ):
                of_this_rank = not is_private(top) or top.startswith(private_key(target.rank, ""))
                if of_this_rank and target.add(top, names) is not None and not is_private(top):
                    self._keys.new_values.append(top)
        for region in target.subtrees:
            key = region.key + STRUCTURE
            if key in objects:
                target.nest(region, self._catalog.value(key), saved)
            elif region.plain and region.key in saved:
                target.nest(region, False, saved)
            target.take(region, tensors.keys(), objects.keys())

    def _plan_modules(self) -> None:
        """Plan to fill the tensors of modules, which stay the tensors that they are.

        Tied parameters are one tensor. If they were not tied when they were saved, the last one is
        taken, as ``load_state_dict`` does.
        """
        target, saved = self._target, self._catalog.chunks
        leaves = [leaf for leaf in target.leaves if leaf.chunk.key in target.in_modules]
        keys = [leaf.chunk.key for leaf in leaves if leaf.chunk.key in saved]
        last = {id(target.tensor(key)): key for key in keys}
        for leaf in leaves:
            key = leaf.chunk.key
            if key in saved and last[id(target.tensor(key))] != key:
                self._used.add(key)
                if problem := mismatch(self._catalog.any_chunk(key), leaf, cast=True):
                    self._keys.mismatched.append(f"{key} {problem}")
            else:
                self._plan_tensor(leaf)

    def _plan_other_tensors(self, *, kept: bool) -> None:
        """Plan to fill the tensors of plain values and of objects.

        Tensors may share memory here that they did not share when they were saved: two sums that
        begin as one tensor of zeros, a model and the best one so far. Each gets memory of its own.
        What the checkpoint does not have keeps its memory.

        Args:
            kept: whether to plan those that stay the tensors that they are, because they are
                trained, or all others.
        """
        target, saved = self._target, self._catalog.chunks
        leaves = [
            leaf
            for leaf in target.leaves
            if leaf.chunk.key not in target.in_modules and (leaf.chunk.key in target.kept) == kept
        ]
        for leaf in sorted(leaves, key=lambda leaf: (leaf.chunk.key in saved) != kept):
            if not self._is_filled(leaf):
                self._plan_tensor(leaf)

    def _is_filled(self, leaf: StateLeaf) -> bool:
        """Return whether a leaf is the very tensor of another key, and was saved with its value."""
        key = leaf.chunk.key
        other = self._key_of.get(id(self._target.tensor(key)))
        filled = other is not None and self._catalog.same(key, other)
        if filled:
            self._used.add(key)
        return filled

    def _plan_tensor(self, leaf: StateLeaf) -> None:
        """Plan to fill a tensor that the state has, or a new one in its place.

        A new one is used if the saved type or shape differs, or if the memory is filled for another
        key. Where no new one is possible, the key is noted as mismatched. A key that the checkpoint
        does not have is noted as missing.
        """
        target, key = self._target, leaf.chunk.key
        if key not in self._catalog.chunks:
            self._note_missing(key)
            self._filled.add(leaf.tensor)
            return
        self._used.add(key)
        saved = self._catalog.any_chunk(key)
        kept, in_module = key in target.kept, key in target.in_modules
        problem = mismatch(saved, leaf, cast=in_module)
        shared = not in_module and self._filled.overlaps(leaf.tensor)
        if shared and kept and self._kept.overlaps(leaf.tensor):
            problem = (
                "shares memory here with another trained tensor, and had another value when it was "
                "saved: expected a clone()"
            )
            shared = False
        new = None
        if shared or ((problem or saved.dtype != leaf.chunk.dtype) and not kept):
            new = target.new_tensor(key, saved.dtype, saved.whole)
        if new is None:
            if shared:
                problem = "shares memory here with another value, and cannot be replaced"
            if problem:
                self._keys.mismatched.append(f"{key} {problem}")
            self._key_of[id(target.tensor(key))] = key
            self._plan.own.append(leaf)
        fits = new or leaf
        self._plan.leaves.append(fits)
        self._filled.add(fits.tensor)
        if kept:
            self._kept.add(fits.tensor)

    def _plan_object(self, key: str, put: Callable[[Any], None]) -> None:
        """Plan to set an object, or note that its key is missing."""
        if key in self._catalog.objects:
            self._used.add(key)
            read = partial(self._catalog.value, key)
            self._plan.objects.append(PlannedObject(key, put, read))
        elif (rebuilt := self._catalog.rebuild(key)) is not None:
            value, keys = rebuilt
            self._plan_value(key, put, value, keys)
        else:
            self._note_missing(key)

    def _plan_value(
        self, key: str, put: Callable[[Any], None], value: object, keys: Iterable[str]
    ) -> None:
        """Plan to set a value that was read already, from these keys of the checkpoint."""
        self._used.update(keys)
        self._plan.objects.append(PlannedObject(key, put, lambda: value))

    def _note_missing(self, key: str) -> None:
        """Note a key of the state that the checkpoint does not have."""
        (self._plan.private if is_private(key) else self._keys.missing).append(key)

    def _plan_groups(self, optimizer: OptimizerTarget) -> None:
        """Match an optimizer's groups with the groups that were saved, which are read here.

        The hyperparameters of a matched group are planned. A group without a saved one is noted as
        missing, and one that may be several saved groups as ambiguous. The optimizer counts as
        loaded if the checkpoint has a group of it. Its ``sharded``, ``owners`` and ``saved`` are
        filled, which :meth:`_plan_optimizer_state` needs.
        """
        saved: list[Any] = []
        keys: list[list[str]] = []
        while (found := self._catalog.find(f"{optimizer.groups}.{len(saved)}")) is not None:
            saved.append(found[0])
            keys.append(found[1])
        names = [_members(group) for group in saved]
        optimizer.loaded = bool(saved)
        for group in saved:
            if isinstance(group, Mapping):
                optimizer.sharded.update(group.get(SHARDED) or ())
                optimizer.owners.update(group.get(OWNERS) or ())
        if not self._catalog.foreign:
            optimizer.saved.update(optimizer.owners)
            optimizer.saved.update(str(name) for members in names for name in members)
        matched, ambiguous = match_groups(optimizer.members, names)
        for number, others in ambiguous.items():
            self._keys.ambiguous_groups.append(
                _ambiguity(optimizer, number, {j: names[j] for j in others})
            )
            self._used.update(key for j in others for key in keys[j])
        for number in range(len(optimizer.members)):
            if number in matched:
                value, value_keys = saved[matched[number]], keys[matched[number]]
                self._plan_value(
                    value_keys[0], partial(optimizer.put_group, number), value, value_keys
                )
            elif number not in ambiguous:
                self._note_missing(f"{optimizer.groups}.{number}")

    def _plan_optimizer_state(self, optimizer: OptimizerTarget) -> None:
        """Allocate an optimizer's state, and plan to fill it.

        State of parameters that this rank does not have is ignored, if another rank may have them.
        State of unknown parameters is left for `_place_new_keys`.
        """
        by_number = {str(number): name for name, number in optimizer.known.items()}
        start = len(optimizer.prefix)
        for key in self._catalog.keys_under(optimizer.prefix):
            name, entry = optimizer.split(key[start:])
            if name not in optimizer.known:
                name = by_number.get(name, name)
            if name not in optimizer.known and name not in optimizer.owners:
                continue
            self._used.add(key)
            if name not in optimizer.parameters and name not in optimizer.owners:
                continue
            if key not in self._catalog.chunks:
                self._plan_object(key, partial(optimizer.put, name, entry))
                continue
            chunk = self._catalog.any_chunk(key)
            dtype = getattr(torch, chunk.dtype)
            tensor = optimizer.allocate(name, entry, dtype, chunk.whole, self._filled)
            self._filled.add(tensor)
            if (leaf := leaf_of(key, tensor)) is not None:
                self._plan.leaves.append(leaf)
                if optimizer.holds(name, entry, tensor):
                    self._plan.own.append(leaf)

    def _place_new_keys(self) -> None:
        """Find places for the keys that the state does not have yet.

        A key with a place is noted as a new entry. A key without one is noted as unexpected, or as
        a DTensor of unknown mesh. Private keys are noted neither as new nor as unexpected. Keys
        that belong to other ranks are ignored.
        """
        target, keys = self._target, self._keys
        own = private_key(target.rank, "")
        for key in (*self._catalog.chunks, *self._catalog.objects):
            if key in self._used or (is_private(key) and not key.startswith(own)):
                continue
            if key.endswith(STRUCTURE):
                continue  # the object's other keys are looked at instead
            if not self._plan_new_value(key):
                if target.has_unknown_mesh(key):
                    keys.unknown_mesh.append(key)
                    continue
                if not target.is_of_other_rank(key):
                    if target.has_unknown_nesting(key):
                        keys.unknown_nesting.append(key)
                    if not is_private(key):
                        keys.unexpected.append(key)
                    continue
            if not is_private(key):
                keys.new_entries.append(key)

    def _plan_new_value(self, key: str) -> bool:
        """Plan to add a value to the state. Return False if the state has no place for it."""
        put = self._target.new_setter(key) if key in self._catalog.objects else None
        saved = self._catalog.any_chunk(key) if key in self._catalog.chunks else None
        leaf = None if saved is None else self._target.new_tensor(key, saved.dtype, saved.whole)
        if put is not None:
            self._plan_object(key, put)
        elif leaf is not None:
            self._plan.leaves.append(leaf)
        return put is not None or leaf is not None


def _members(group: Any) -> list[object]:
    """Return the parameters' names in a saved group; empty if the group has none."""
    found = group.get("params") if isinstance(group, Mapping) else None
    return found if isinstance(found, list) else []


def _ambiguity(optimizer: OptimizerTarget, number: int, saved: Mapping[int, list[object]]) -> str:
    """Return why a group has no saved group, in words.

    Args:
        optimizer: the optimizer.
        number: the number of the group.
        saved: the members of the saved groups that it may be, by number.
    """
    members = optimizer.members[number]
    where = ", ".join(
        f"{format_keys([name for name in members if name in names], 3)} in group {j}"
        for j, names in saved.items()
    )
    return (
        f"{optimizer.groups}.{number} has {format_keys(members, 3)}, and the checkpoint has "
        f"{where}, in other groups: give each group the parameters that it had, or its "
        "hyperparameters are not loaded"
    )


def mismatch(saved: TensorChunk, leaf: StateLeaf, *, cast: bool) -> str:
    """Return why a saved tensor cannot be copied into a leaf, in words; empty if it can.

    Args:
        saved: a chunk of the tensor that was saved.
        leaf: the leaf.
        cast: whether the copy may round values, as that of a module's ``load_state_dict`` does.
    """
    here = leaf.tensor
    if saved.whole != leaf.chunk.whole:
        return f"has the shape {saved.whole}, and {leaf.chunk.whole} here"
    kind = getattr(torch, saved.dtype)
    if not (torch.can_cast(kind, here.dtype) if cast else _is_exact(kind, here.dtype)):
        return f"is of {saved.dtype}, and of {leaf.chunk.dtype} here"
    if may_overlap(here):
        return "has elements here that share memory: expected a clone() of the expanded tensor"
    return ""


def _is_exact(kind: torch.dtype, other: torch.dtype) -> bool:
    """Return whether each value of a type is known to be one of another type as well."""
    if kind == other:
        return True
    same_class = (kind.is_floating_point, kind.is_complex) == (
        other.is_floating_point,
        other.is_complex,
    )
    try:
        return same_class and torch.promote_types(kind, other) == other
    except RuntimeError:  # torch has no common type: float8, say
        return False


def _memory_of(leaf: StateLeaf) -> tuple[int, int]:
    """Return the address and the size of a leaf's memory."""
    return leaf.tensor.data_ptr(), leaf.tensor.nbytes
