"""Split a user's state into tensor chunks and objects, for a save and for a load.

Keys are those that ``torch.distributed.checkpoint`` gives the same state (``_traverse.py``): nested
keys joined by dots. Modules and optimizers are accepted directly:

============================  =====================================================
value in the state            its keys
============================  =====================================================
``{"a": {"b": tensor}}``      ``a.b``
module at ``model``           ``model.fc.weight``: without the prefixes of DDP,
                              ``torch.compile`` and activation checkpointing
optimizer at ``optim``        ``optim.state.fc.weight.exp_avg``; one object for each
                              group: ``optim.param_groups.0``
anything with ``state_dict``  ``sched.last_epoch``: one for each entry; ``sched/structure``, if
                              the keys alone do not say how the entries are nested
``{"a": [{"n": 1}]}``         ``a.0.n``, and ``a/structure``: how it is nested. This restores
                              what was added or removed since the state was built
``PerRank(value)`` at ``x``   ``rank/3/x``
============================  =====================================================

An optimizer's state has the parameters' names in the first module of the state that has them. Where
two parameters of an optimizer would have the same name, the module's own key is put before it. A
parameter that is in no module is named ``<group>.<index>``. This is the form of ``get_state_dict``
in torch/distributed/checkpoint/state_dict.py, without its casts and collectives. If an optimizer's
``state_dict`` is not torch's, the optimizer has more state than torch's attributes show. Its own
``state_dict`` is used in that case.
"""

import copy
import random
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
)
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from dlrover_py.protocol.errors import CheckpointError, ConfigError, SupersededError
from dlrover_py.protocol.slots import ITEM_BYTES, PRIVATE, TensorChunk, private_key
from dlrover_py.trainer.object_codec import (
    CONTAINERS,
    FACTORIES,
    LEAVES,
    PLAIN_TENSORS,
    SAFE,
    StateStructure,
    encode_object,
    refused,
    same_plain,
)
from dlrover_py.trainer.torch_compat import (
    EXTRA_STATE,
    WRAPPER_PREFIXES,
    changes_in_backward,
    changes_unseen,
    chunks_of,
    has_fsdp1,
    has_inner_tensors,
    has_more_state,
    inner_optimizer,
    is_sharded,
    loads_by_itself,
    spec_of,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DEFER_BYTES = 64 << 10
"""Bytes below which a tensor is copied immediately: to defer its copy would cost more than the
copy."""
SLOW_S = 0.05
"""Seconds of encoding above which an object is reported, since each save takes them."""
READ_TRIES = 3
"""Number of attempts to read a dict to which another thread writes at the same time."""
NOTE_BYTES = 1 << 20
"""Bytes that are copied immediately for one reason, below which the reason is not reported."""

_DTYPES = {getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)}
"""Type of torch → its name in a checkpoint."""


@dataclass(slots=True)
class StateLeaf:
    """A tensor chunk, and its memory in this process."""

    chunk: TensorChunk
    """The chunk's key, type and position in its tensor."""
    tensor: torch.Tensor
    """This rank's part of the tensor, on any device, of any strides. It is detached only if it is
    to be filled. To detach hundreds of tensors takes a good part of the time that a save costs."""
    deferrable: bool
    """True if nothing changes the tensor before the next ``step()`` of its optimizer, so that its
    copy may be deferred until then."""


@dataclass
class FlatState:
    """A state as a flat list of tensors and objects."""

    leaves: list[StateLeaf] = field(default_factory=list)
    """The tensors."""
    objects: dict[str, object] = field(default_factory=dict)
    """Key → value that is not a tensor. These are the user's own objects: they must be encoded
    before they change."""
    notes: list[str] = field(default_factory=list)
    """Reasons why a save takes long, one line each. Example: something large must be copied
    immediately."""

    def encoded(self, slow_s: float = SLOW_S) -> list[tuple[str, bytes]]:
        """Return the keys of the objects, and the objects as they are stored.

        A note is added for each object that takes long to encode.

        Args:
            slow_s: seconds of encoding above which an object gets a note.

        Raises:
            ConfigError: an object could not be read back, or its own code has raised an exception.
        """
        found = []
        for key, value in self.objects.items():
            began = time.perf_counter()
            found.append((key, encode_object(key, value)))
            took = time.perf_counter() - began
            if took > slow_s and RNG not in key:  # the user cannot change that one
                self.notes.append(
                    f"{key} took {took:.2f} s to encode, which the training waits for: a tensor "
                    "would be copied much faster"
                )
        return found


SHARDED = "dlrover.sharded"
"""Key in the object of an optimizer's group: names of the entries of the optimizer's state that are
DTensors of another shape than their parameter. The saved bytes do not show this."""
OWNERS = "dlrover.owners"
"""Key in the object of an optimizer's first group: those keys of the optimizer's state that are
strings instead of parameters."""
STRUCTURE = "/structure"
"""Suffix of an object's key: the key under which its :class:`StateStructure` is saved."""
NAMES = "dlrover.names"
"""Key of the state's own names that are not plain strings, by their text in the other keys."""
RNG = "dlrover.rng"
"""Key of each rank's RNG state; no script uses it."""


class PerRank:
    """A value that belongs to one rank: it is never loaded from the checkpoint of another rank."""

    def __init__(self, value: object) -> None:
        self.value = value


class RandomState:
    """The state of this process's RNGs: Python's, NumPy's and torch's, on the CPU and CUDA devices.

    NumPy's global RNG is included only if NumPy is imported, and those of CUDA devices only if CUDA
    is initialized.
    """

    def state_dict(self) -> dict[str, object]:
        """Return ``{"state": ((generator, state), …)}``; ``torch.load`` reads it as weights only.

        NumPy's global RNG is included if NumPy is imported, and those of CUDA devices if CUDA is
        initialized.
        """
        version, words, gauss = random.getstate()
        found: dict[str, object] = {
            # A script may have set another default device.
            "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
            "torch": torch.get_rng_state(),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = numpy.random.get_state()
            words = torch.from_numpy(keys.astype("int64"))
            found["numpy"] = (str(name), words, *(_plain(value) for value in rest))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = tuple(torch.cuda.get_rng_state_all())
        return {"state": tuple(found.items())}  # a tuple is always saved as one object

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the states of the RNGs that were saved.

        NumPy's state is ignored if NumPy is not imported, and states of devices that do not exist
        here. An RNG that was not saved keeps its state.
        """
        found = dict(state["state"])
        version, words, gauss = found["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        torch.set_rng_state(found["torch"])
        if "numpy" in found and (numpy := sys.modules.get("numpy")) is not None:
            name, words, *rest = found["numpy"]
            numpy.random.set_state((name, words.numpy().astype("uint32"), *rest))
        if "cuda" in found and torch.cuda.is_available():
            for device, state_of in zip(
                range(torch.cuda.device_count()), found["cuda"], strict=False
            ):
                torch.cuda.set_rng_state(state_of, device)


def _plain(value: Any) -> object:
    """Return a number of NumPy as a number of Python; return any other value unchanged."""
    return value.item() if hasattr(value, "item") else value


def flatten(state: Mapping[str, object], *, rank: int) -> FlatState:
    """Split a state into tensors and objects.

    The ``state_dict`` of modules and other objects is called, which may be collective in objects of
    the user. Apart from that, no collective runs. No tensor is copied, except one whose bytes are
    not its values: it has a pending conjugation or negation.

    Args:
        state: tensors, DTensors, modules, optimizers, objects with ``state_dict`` and
            ``load_state_dict``, plain values, and mappings and lists of these.
        rank: the rank of this process, for the keys of :class:`PerRank` values.

    Raises:
        ConfigError: something in the state cannot be saved; the message names its key.
        SupersededError: a loader of the state has lost shards that its model has learnt from.
    """
    return StateWalk(rank, load=False).run(state).flat


@dataclass(eq=False)
class ReplaceableSubtree:
    """A part of a state whose entries a load may replace, add or remove.

    It is a plain value, the ``state_dict`` of an object, or entries that a module loads by methods
    of its own.
    """

    key: str
    """The key of the subtree, or the prefix of all its keys."""
    holder: Any
    """A container made for the load, which has the subtree. The user's objects change only at the
    end, when everything is put into them."""
    name: object
    """The subtree's name in its holder."""
    plain: bool = False
    """True if it has no ``load_state_dict``: it is put into the user's own dict or list."""
    keys: set[str] = field(default_factory=set)
    """Keys that the subtree has in this process."""
    inner: tuple[tuple[str, str], ...] = ()
    """For a module: pairs of a prefix of keys that the module may have or not, and the same prefix
    in its ``state_dict``."""
    told: bool = False
    """True if the checkpoint says how the subtree is nested."""
    own: tuple[str, ...] = ()
    """Prefixes of the keys in it that belonged to modules, optimizers and similar objects."""

    @property
    def value(self) -> Any:
        """The subtree's current value."""
        return self.holder[self.name]

    def has(self, key: str) -> bool:
        """Return whether a key would be in this subtree."""
        if self.inner:
            return any(key.startswith(prefix) for prefix, _ in self.inner)
        return key == self.key or key.startswith(f"{self.key}.")


def _update_in_place(old: object, new: Any, updated: dict[int, tuple[object, object]]) -> Any:
    """Put a value into the user's own dicts and lists where their types match, and return it.

    Args:
        old: the user's value.
        new: the value that was loaded. Its containers were made for the load.
        updated: the user's containers that were filled before, by id. A container that the state
            has twice is filled once. Its second place gets a container of its own, unless both
            places were saved with the same value.
    """
    if old is new:
        return new
    alike = type(old) is type(new) or not isinstance(old, dict)
    mapping = isinstance(new, Mapping) and isinstance(old, MutableMapping) and alike
    if not mapping and not (type(new) is list and isinstance(old, list)):
        return new
    if id(old) in updated:
        return old if same_plain(updated[id(old)][1], new) else new
    updated[id(old)] = old, new
    if isinstance(old, MutableMapping):
        items = {name: _update_in_place(old.get(name), item, updated) for name, item in new.items()}
        old.clear()
        old.update(items)
    elif isinstance(old, list):
        old[:] = [
            _update_in_place(old[index] if index < len(old) else None, item, updated)
            for index, item in enumerate(new)
        ]
    return old


@dataclass(frozen=True, slots=True)
class ModuleState:
    """Entries that a module must load by its own ``load_state_dict``."""

    module: nn.Module
    """The module."""
    entries: dict[str, Any]
    """Its entries, with the values that were loaded."""
    names: frozenset[str]
    """The names of its entries when the state was built."""

    def __call__(self, strict: bool) -> None:
        """Let the module load the entries.

        A hook of the user may have left entries out (the frozen part of a model). They are neither
        in the state nor in the checkpoint, and do not count as missing. If the class of the module
        has a ``load_state_dict`` of its own, it gets all entries, ``strict`` is ignored, and its
        exceptions are raised.

        Args:
            strict: whether it is an error that the module has no place for an entry, or lacks one.

        Raises:
            CheckpointError: with ``strict``, the module has no place for an entry, or lacks one.
        """
        if type(self.module).load_state_dict is not nn.Module.load_state_dict:
            self.module.load_state_dict(self.entries)
            return
        own_tensors = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        done = {name for name, value in self.entries.items() if id(value) in own_tensors}
        found = self.module.load_state_dict(self.entries, strict=False)
        left = [n for n in found.unexpected_keys if n in self.entries and n not in done]
        missing = [n for n in found.missing_keys if n in self.names and n not in self.entries]
        if strict and (left or missing):
            raise CheckpointError(f"it has no place for {left}, and it lacks {missing}")


class StateWalk:
    """One pass over a state, which collects its tensors, objects and setters."""

    def __init__(self, rank: int, *, load: bool) -> None:
        self.rank = rank
        self.load = load
        self.flat = FlatState()
        self.put: dict[str, Callable[[object], None]] = {}
        self.finish: list[tuple[str, Callable[[], None] | ModuleState]] = []
        self.subtrees: list[ReplaceableSubtree] = []
        self.held: dict[str, tuple[Any, object]] = {}
        """Key of a tensor in a subtree → the container that has it, and its name there."""
        self.tensors: dict[str, torch.Tensor] = {}
        """For a load: key → the user's own tensor."""
        self.in_modules: set[str] = set()
        """For a load: the keys of modules' tensors."""
        self.kept: set[str] = set()
        """For a load: the keys of plain tensors that must stay the same tensors, since they are
        trained, or since their mapping cannot be changed."""
        self._updated: dict[int, tuple[object, object]] = {}
        """Id of a container of the user that the load has filled → the container, and the value
        with which it was filled."""
        self._subtree: ReplaceableSubtree | None = None
        """The subtree that contains the values now visited."""
        self._visiting: set[int] = set()
        """Ids of the containers that are being visited, to find a container in itself."""
        self.modules: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self.optimizers: list[tuple[str, Optimizer, dict[int, str]]] = []
        self._parameter_names: dict[int, tuple[str, str]] = {}
        self._deferrable: set[int] = set()
        self._immediate_reasons: dict[int, str] = {}
        self._immediate_bytes: dict[str, int] = {}

    def run(self, state: Mapping[str, object]) -> "StateWalk":
        """Visit the whole state.

        Raises:
            ConfigError: something in the state cannot be saved or loaded; the message names its
                key.
        """
        found: list[tuple[str, Optimizer]] = []
        tree = self._visit_mapping("", state, found)
        texts = _names_by_text(tree)
        if texts and not self.load:
            self._add_object(NAMES, texts, None, None)
        for key, module, entries in self.modules:
            names = _clean_names(module, entries)
            for raw, value in entries.items():
                if id(value) not in self._parameter_names and isinstance(value, nn.Parameter):
                    self._parameter_names[id(value)] = key, names[raw]
        for key, optimizer in found:
            self._visit_optimizer(key, optimizer)
        for key, module, entries in self.modules:
            self._visit_module(key, module, entries)
        keys = {leaf.chunk.key for leaf in self.flat.leaves}
        if len(keys) != len(self.flat.leaves) or not keys.isdisjoint(self.flat.objects):
            seen: set[str] = set(self.flat.objects)
            for leaf in self.flat.leaves:
                if leaf.chunk.key in seen:
                    raise ConfigError(
                        f"checkpoint: two values of the state have the key {leaf.chunk.key}: "
                        "expected keys that differ once they are joined by dots"
                    )
                seen.add(leaf.chunk.key)
        for why, size in self._immediate_bytes.items():
            if size >= NOTE_BYTES:
                self.flat.notes.append(
                    f"{size / 1e6:,.0f} MB are copied before save() returns: {why}"
                )
        return self

    def _visit_mapping(
        self, prefix: str, values: Mapping[Any, object], found: list[tuple[str, Optimizer]]
    ) -> dict[Any, object]:
        """Visit all values of a mapping; return how they are nested, by name.

        Args:
            prefix: the key of the mapping and a dot; empty for the whole state.
            values: the mapping.
            found: receives the optimizers, with their keys.

        Raises:
            ConfigError: a key at the top of the state is reserved for values of one rank, or a
                value cannot be saved or loaded.
        """
        tree: dict[Any, object] = {}
        for name, value in _items(values):
            if not prefix and str(name).startswith(f"{PRIVATE}/"):
                raise ConfigError(
                    f"checkpoint: the key {name} is reserved for values of one rank: "
                    "wrap the value in PerRank instead"
                )
            saved = name if type(name) is str or not prefix else _name(prefix, name)
            _check_name(prefix, saved)
            tree[saved] = self._visit(f"{prefix}{saved}", value, found, values, name)
        return tree

    def _visit(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> object:
        """Visit one value, which its holder has under a name.

        Args:
            key: the key of the value.
            value: the value.
            found: receives the optimizers, with their keys.
            holder: the container that has the value.
            name: the name or index of the value in its holder.

        Returns:
            How the value is nested (:class:`StateStructure`).

        Raises:
            ConfigError: the value cannot be saved, or an object of the user has raised an
                exception.
            SupersededError: the value belongs to a history that must not go on, so that a log line
                and a later save would be wrong.
        """
        try:
            return self._visit_by_type(key, value, found, holder, name)
        except SupersededError:
            raise
        except Exception as error:
            raise refused(key, error) from error

    def _visit_by_type(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> object:
        """Visit a value as its type requires; return how it is nested.

        The result is None for a value that is not in a subtree, or that has keys of its own, such
        as a module. Modules and optimizers are only collected here.

        Args:
            key: the key of the value.
            value: the value.
            found: receives the optimizers, with their keys.
            holder: the container that has the value.
            name: the name or index of the value in its holder.

        Raises:
            ConfigError: the value cannot be saved or loaded, such as a PerRank within a PerRank.
        """
        if not has_own_keys(value):
            if self._subtree is not None:
                return self._visit_in_subtree(key, value, found, holder, name)
            self._visit_plain(key, value, found, holder, name)
        elif isinstance(value, nn.Module):
            _refuse_fsdp1(key, value)
            self.modules.append((key, value, value.state_dict(keep_vars=True)))
        elif isinstance(value, Optimizer):
            if has_more_state(value):
                kind = type(value).__qualname__
                self.flat.notes.append(
                    f"{key} is a {kind} whose state_dict is not torch's own: its result is "
                    "saved, and parameters are copied before save() returns"
                )
                self._visit_stateful(key, value, found)
            else:
                found.append((key, value))
        elif isinstance(value, PerRank):
            if key.startswith(f"{PRIVATE}/"):
                raise ConfigError(f"checkpoint: {key} is PerRank within PerRank: expected it once")
            outer, self._subtree = self._subtree, None
            self._visit(private_key(self.rank, key), value.value, found, vars(value), "value")
            self._subtree = outer
        else:
            self._visit_stateful(key, value, found)
        return None

    def _visit_in_subtree(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> object:
        """Visit a value of a subtree; return how it is nested.

        The result is a dict or list of the results of :meth:`_visit`, in which a module, say, is
        None. For a tensor or an object it is a bool: whether the value is a DTensor.

        Args:
            key: the key of the value.
            value: the value.
            found: receives the optimizers, with their keys.
            holder: the container that has the value.
            name: the name or index of the value in its holder.

        Raises:
            ConfigError: a container contains itself, or a value cannot be saved.
        """
        assert self._subtree is not None
        if type(value) not in SAFE:
            if isinstance(value, torch.Tensor):
                if self.tensor(key, value, "it is neither a module's nor an optimizer's"):
                    self.held[key] = holder, name
                    self._subtree.keys.add(key)
                    if self._subtree.plain and value.requires_grad:
                        self.kept.add(key)
                else:
                    self._add_object(key, value, holder, name)
                return type(value) not in PLAIN_TENSORS and is_sharded(value)
            if isinstance(value, Mapping) or (
                isinstance(value, list) and not _is_single_object(value)
            ):
                if id(value) in self._visiting:
                    raise ConfigError(
                        f"checkpoint: {key} contains itself: expected a tree of values"
                    )
                self._visiting.add(id(value))
                try:
                    if isinstance(value, Mapping):
                        kind = type(value)
                        tree = self._visit_mapping(f"{key}.", value, found)
                        return _typed_tree(cast(Any, value), tree) if kind in _TREES else tree
                    return [
                        self._visit(f"{key}.{index}", item, found, value, index)
                        for index, item in enumerate(list(value))
                    ]
                finally:
                    self._visiting.discard(id(value))
        self._add_object(key, value, holder, name)
        return False

    def _visit_plain(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> None:
        """Visit a value without ``load_state_dict``: a load replaces it.

        For a load, the value is visited in new containers. At the end of the load they are put into
        the user's own dict or list.

        Args:
            key: the key of the value.
            value: the value.
            found: receives the optimizers, with their keys.
            holder: the container that has the value.
            name: the name or index of the value in its holder.

        Raises:
            ConfigError: the value cannot be set in its holder, or cannot be saved.
        """
        if isinstance(value, Mapping) and value.keys() == {"state", "param_groups"}:
            self.flat.notes.append(
                f"{key} is an optimizer's state_dict(), and load() fills that dict, not the "
                "optimizer: give the optimizer itself"
            )
        container = {name: _copied(value) if self.load else value}
        self._subtree = region = ReplaceableSubtree(key, container, name, plain=True)
        tree = self._visit_in_subtree(key, container[name], found, container, name)
        self._subtree = None
        if not self.load:
            if isinstance(tree, dict | list):
                self._add_object(f"{key}{STRUCTURE}", StateStructure(tree), None, None)
            return
        settable = hasattr(holder, "__setitem__")
        if not settable and not isinstance(value, torch.Tensor | MutableMapping | list):
            raise ConfigError(
                f"checkpoint: {key} cannot be set in a {type(holder).__qualname__}: "
                "expected a dict or a list"
            )
        if not settable and isinstance(value, torch.Tensor):
            self.kept.add(key)
        self.subtrees.append(region)

        def finish() -> None:
            made = _update_in_place(value, container[name], self._updated)
            if made is not value:
                holder[name] = made

        self.finish.append((key, finish))

    def _add_object(self, key: str, value: object, holder: Any, name: object) -> None:
        """Add a value that is saved as one object, and for a load its setter.

        Args:
            key: the key of the value.
            value: the value.
            holder: the container into which a load sets the value.
            name: its name in that container.

        Raises:
            ConfigError: another object has the same key.
        """
        self._note_object(key, value)
        if self.load:
            self.put[key] = partial(holder.__setitem__, name)
            if self._subtree is not None:
                self._subtree.keys.add(key)

    def _note_object(self, key: str, value: object) -> None:
        """Add a value that is saved as one object, without a setter.

        Raises:
            ConfigError: another object has the same key.
        """
        if key in self.flat.objects:
            raise ConfigError(
                f"checkpoint: two values of the state have the key {key}: expected keys that "
                "differ once they are joined by dots"
            )
        self.flat.objects[key] = value

    def _visit_stateful(self, key: str, value: Any, found: list[tuple[str, Optimizer]]) -> None:
        """Visit an object that has ``state_dict`` and ``load_state_dict``.

        Its state is saved as one object if that is not a mapping with strings as keys. Otherwise
        each entry has a key. Entries without tensors are not split. If they were, a key that comes
        and goes within them (a data loader's position, say) would be missing.

        Args:
            key: the key of the object.
            value: the object.
            found: receives optimizers within the state, with their keys.
        """
        state = value.state_dict()
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            self._note_object(key, state)
            if self.load:
                self.put[key] = value.load_state_dict
            return
        entries: dict[str, object] = dict(_items(state))
        outer = self._subtree
        self._subtree = region = ReplaceableSubtree(key, {"": entries}, "")
        tree: dict[str | int, object] = {}
        nesting_known = True
        for name, entry in entries.items():
            full = f"{key}.{name}"
            _check_name(f"{key}.", name)
            tensor = isinstance(entry, torch.Tensor)
            if tensor or _has_tensors(entry):
                if self.load:  # the object changes only when everything is loaded
                    entries[name] = entry = _copied(entry)
                tree[name] = node = self._visit(full, entry, found, entries, name)
                nesting_known = nesting_known and tensor and not node
            else:
                self._add_object(full, entry, entries, name)
                tree[name] = False
        self._subtree = outer
        if not self.load and not (nesting_known and not any("." in name for name in entries)):
            self._add_object(f"{key}{STRUCTURE}", StateStructure(tree), None, None)
        if self.load:
            self.subtrees.append(region)
            self.finish.append((key, partial(value.load_state_dict, entries)))

    def _visit_module(self, key: str, module: nn.Module, entries: dict[str, Any]) -> None:
        """Visit the entries of a module's ``state_dict``.

        A load fills the module's own tensors in place. Entries that a load cannot fill in this way
        are put in by the module's ``load_state_dict`` at the end. These are objects, tensors that a
        hook has made, and entries that the user's own methods load.

        Args:
            key: the key of the module.
            module: the module.
            entries: its ``state_dict``, with the tensors themselves.
        """
        names = _clean_names(module, entries)
        own, free, in_place, container = set[int](), tuple[str, ...](), True, {"": entries}
        region = ReplaceableSubtree(key, container, "")
        if self.load:
            own = {id(t) for t in (*module.parameters(), *module.buffers())}
            free = tuple(
                f"{name}." if name else ""
                for name, inner in module.named_modules(remove_duplicate=False)
                if loads_by_itself(inner)
            )
            clean = _cleaned(module, free)
            region.inner = tuple((f"{key}.{clean[prefix]}", prefix) for prefix in free)
            in_place = not free
        for raw, value in entries.items():
            full = f"{key}.{names[raw]}"
            number = id(value)
            defer = number in self._deferrable
            if defer:
                why = ""
            elif isinstance(value, nn.Parameter):  # slow: only for the few others
                why = self._immediate_reasons.get(
                    number, "parameters that no optimizer of the state has"
                )
            else:
                why = "buffers change in the forward pass"
            is_object = not isinstance(value, torch.Tensor) or not self.tensor(
                full, value, why, defer=defer
            )
            if is_object:
                self._add_object(full, value, entries, raw)
                in_place = False
            elif self.load and number not in own:  # a user's hook made it
                in_place = False
            if self.load and not is_object:
                self.in_modules.add(full)
            if self.load and (raw.startswith(free) or raw.rpartition(".")[2] == EXTRA_STATE):
                region.keys.add(full)
                if not is_object:
                    self.held[full] = entries, raw
        if self.load:
            if region.keys or free:
                self.subtrees.append(region)
            if not in_place:
                loader = ModuleState(module, entries, frozenset(entries))
                self.finish.append((key, loader))

    def _visit_optimizer(self, key: str, optimizer: Optimizer) -> None:
        """Visit an optimizer: its groups always, its state only for a save.

        Raises:
            ConfigError: the optimizer has state of a parameter that is in none of its groups. Or an
                entry of a parameter's state has a name that is not a str.
        """
        names = _names(optimizer, self._parameter_names)
        self.optimizers.append((key, optimizer, names))
        for number, group in enumerate(optimizer.param_groups):
            values: dict[str, object] = {k: v for k, v in group.items() if k != "params"}
            values["params"] = [names[id(p)] for p in group["params"]]
            self._note_object(f"{key}.param_groups.{number}", values)
        if self.load:
            return
        sharded, owners = set[str](), set[str]()
        not_deferrable = changes_unseen(optimizer)
        for group in optimizer.param_groups:
            why = not_deferrable
            if not why and group.get("capturable"):
                why = "a capturable optimizer may step within a CUDA graph"
            for p in group["params"]:
                own = why
                if not own and changes_in_backward(p):
                    own = "hooks may change parameters in the backward pass"
                if own:
                    self._immediate_reasons[id(p)] = own
                else:
                    self._deferrable.add(id(p))
        for owner, entries in inner_optimizer(optimizer).state.items():
            number = id(owner)
            if isinstance(owner, str) and owner not in names.values():
                owners.add(owner)
            elif number not in names:
                raise ConfigError(
                    f"checkpoint: {key} has state of a parameter that is in none of its groups"
                )
            prefix = f"{key}.state.{names.get(number, owner)}."
            if not isinstance(entries, Mapping):
                self._note_object(prefix.removesuffix("."), entries)
                continue
            defer = number in self._deferrable
            why = (
                ""
                if defer
                else self._immediate_reasons.get(number, "state that belongs to no parameter")
            )
            why, shape = why or "state of another shape than its parameter", None
            if defer:
                shape = owner.shape
            for entry, value in entries.items():
                if not isinstance(entry, str):
                    raise ConfigError(
                        f"checkpoint: {prefix[:-1]} has the entry {entry!r}: expected a str"
                    )
                _check_name(prefix, entry)
                full = f"{prefix}{entry}"
                sharded_value = type(value) not in LEAVES and is_sharded(value)
                if sharded_value and value.shape != getattr(owner, "shape", None):
                    sharded.add(entry)
                if not isinstance(value, torch.Tensor) or not self.tensor(
                    full, value, why, defer=defer and value.shape == shape
                ):
                    self._note_object(full, value)
        for number in range(len(optimizer.param_groups)):
            saved: Any = self.flat.objects[f"{key}.param_groups.{number}"]
            if sharded:
                saved[SHARDED] = sorted(sharded)
            if owners and not number:
                saved[OWNERS] = sorted(owners)

    def tensor(self, key: str, value: torch.Tensor, why: str, *, defer: bool = False) -> bool:
        """Add a tensor. Return False if only torch.save can write a tensor of its kind.

        True is also the result for a DTensor of which this rank has no part: nothing is added then.

        Args:
            key: the tensor's key.
            value: the tensor.
            why: why its copy cannot be deferred; empty if the reason need not be reported.
            defer: whether its copy may be deferred.

        Raises:
            ConfigError: the tensor has no memory, or is a DTensor that cannot be saved: a pending
                sum, for example.
        """
        kind = type(value)
        if kind not in PLAIN_TENSORS and is_sharded(value):
            found = _dtensor_chunk(key, value)
            if found is None:
                return True  # this rank has no part of it
            chunk, local = found
            if local.is_meta:
                raise _no_memory(key)
        else:
            dtype = _DTYPES.get(value.dtype)
            if kind not in PLAIN_TENSORS:
                if isinstance(value, nn.parameter.UninitializedTensorMixin):
                    raise _no_memory(key)
                if has_inner_tensors(value):
                    return False
            if dtype is None or value.layout is not torch.strided:
                return False
            try:
                shape = value.shape
            except RuntimeError:  # a nested tensor
                return False
            if value.is_meta:
                raise _no_memory(key)
            known = _chunk_cache.get(key)
            if known is None or not (known.shape == shape == known.whole and known.dtype == dtype):
                shape = tuple(shape)
                known = _chunk_cache[key] = TensorChunk(key, dtype, shape, shape, (0,) * len(shape))
            chunk, local = known, value.detach() if self.load else value
        if chunk.nbytes and not local.untyped_storage().nbytes():  # FSDP frees memory this way
            raise _no_memory(key)
        if not self.load and (local.is_neg() or local.is_conj()):  # its bytes are not its values
            local = local.detach().resolve_conj().resolve_neg()
        if defer and chunk.nbytes < DEFER_BYTES:
            defer = False
        elif defer and not local.is_contiguous():
            defer, why = False, "tensors that are not contiguous"
        if why and not defer and chunk.nbytes >= DEFER_BYTES:
            self._immediate_bytes[why] = self._immediate_bytes.get(why, 0) + chunk.nbytes
        if self.load:
            self.tensors[key] = value
        self.flat.leaves.append(StateLeaf(chunk, local, defer))
        return True


def _names(optimizer: Optimizer, known: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return the names of an optimizer's parameters, by id.

    Args:
        optimizer: the optimizer.
        known: for each parameter of a module, by id: the module's key, and its name in the module.
    """
    names: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, p in enumerate(group["params"]):
            found = known.get(id(p))
            names[id(p)] = found[1] if found else f"{number}.{index}"
    if len(set(names.values())) != len(names):
        for p, (module, name) in known.items():
            if p in names:
                names[p] = f"{module}.{name}"
    return names


def _no_memory(key: str) -> ConfigError:
    """Return the error for a tensor without memory."""
    return ConfigError(
        f"checkpoint: {key} has no memory yet: expected it initialised; run a lazy module once, "
        "and call to_empty() of a module on the meta device and set its values"
    )


def expected_bytes(state: Mapping[str, object], rank: int) -> int:
    """Return about how many bytes a save will need, with the state that optimizers create later.

    Objects do not count, and of optimizers without a state only those at the top level do. The
    objects are encoded here once, so that the first save need not wait for this.

    Args:
        state: the state, as for :func:`flatten`, which raises ConfigError if it cannot be saved.
        rank: the rank of this process.
    """
    flat = flatten(state, rank=rank)
    with suppress(ConfigError):  # else the save reports it
        flat.encoded()  # reads back new values, so that the first save need not wait for it
    size = sum(leaf.chunk.nbytes + 512 for leaf in flat.leaves)
    for value in state.values():
        if isinstance(value, Optimizer) and not value.state:
            own = sum(p.nbytes for group in value.param_groups for p in group["params"])
            betas, momentum = "betas" in value.defaults, value.defaults.get("momentum")
            size += own * (2 if betas else 1 if momentum else 0)
    return size


def leaf_of(key: str, value: torch.Tensor) -> StateLeaf | None:
    """Return this rank's part of a tensor that is to be loaded; both share their memory.

    None: the rank has no part, or the tensor is of a kind that only torch.save can write.

    Raises:
        ConfigError: the tensor has no memory, or is a DTensor that cannot be saved: a pending sum,
            for example.
    """
    walk = StateWalk(0, load=True)
    walk.tensor(key, value, "")
    return walk.flat.leaves[0] if walk.flat.leaves else None


_chunk_cache: dict[str, TensorChunk] = {}
"""Key → last chunk of a tensor; used again only if type and shape are the same."""
_dtensor_cache: dict[str, tuple[object, TensorChunk]] = {}
"""Key → spec of a DTensor and its last chunk; used again only if the spec is the same object."""
_clean_name_cache: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""Module → its raw names and the names without prefixes of wrappers."""


def _dtensor_chunk(key: str, value: "DTensor") -> tuple[TensorChunk, torch.Tensor] | None:
    """Return this rank's chunk of a DTensor and its memory; None if the rank is outside the mesh.

    Raises:
        ConfigError: the DTensor is a pending sum, or has a type that is not saved. Or it does not
            have one chunk of its local shape on this rank.
    """
    with torch.no_grad():
        local = value.to_local()
    spec = spec_of(value)
    known = _dtensor_cache.get(key)
    if known is not None and known[0] is spec and known[1].shape == local.shape:
        return known[1], local
    if value.device_mesh.get_coordinate() is None:
        return None
    try:
        chunks = chunks_of(value)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"checkpoint: {key} is a DTensor placed as {value.placements}, of which no chunk can "
            f"be saved: redistribute it to Shard or Replicate first ({error})"
        ) from error
    if len(chunks) != 1 or chunks[0][1] != tuple(local.shape):
        raise ConfigError(
            f"checkpoint: {key} is a DTensor placed as {value.placements}: expected one chunk of "
            f"the shape {tuple(local.shape)} on this rank, found {[shape for _, shape in chunks]}"
        )
    dtype = _DTYPES.get(local.dtype)
    if dtype is None:
        raise ConfigError(f"checkpoint: {key} is a DTensor of {local.dtype}, which is not saved")
    chunk = TensorChunk(key, dtype, tuple(local.shape), tuple(value.shape), chunks[0][0])
    _dtensor_cache[key] = spec, chunk
    return chunk, local


def _clean_names(module: nn.Module, entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a module's state without the prefixes of wrappers."""
    known = _clean_name_cache.get(module)
    if known is None or known.keys() != entries.keys():
        known = _clean_name_cache[module] = _cleaned(module, entries)
    return known


def _without_wrappers(name: str) -> str:
    """Return a name without the prefixes of torch.compile and activation checkpointing."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _cleaned(module: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the names without the prefixes of wrappers, by raw name."""
    wrappers = []
    for name, inner in module.named_modules(remove_duplicate=False):
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            wrappers.append(_without_wrappers(f"{name}." if name else ""))
    wrappers.sort(key=len, reverse=True)  # inner ones first
    names: dict[str, str] = {}
    for raw in keys:
        name = _without_wrappers(raw)
        for prefix in wrappers:
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        names[raw] = name
    return names


def _refuse_fsdp1(key: str, module: nn.Module) -> None:
    """Refuse a module whose state is not complete at any rank.

    Raises:
        ConfigError: the module contains a FullyShardedDataParallel.
    """
    if has_fsdp1(module):
        raise ConfigError(
            f"checkpoint: {key} has a FullyShardedDataParallel: expected fully_shard (FSDP2), "
            "whose parameters are DTensors; or give its state_dict() and its optimizer's"
        )


def _is_single_object(values: list[object]) -> bool:
    """Return whether a list is saved as one object.

    DCP splits lists that contain tensors or mappings. Lists that contain modules, optimizers and
    similar objects are split as well.
    """
    return SAFE.issuperset(map(type, values)) or not any(
        isinstance(value, torch.Tensor | Mapping)
        or (isinstance(value, list) and not _is_single_object(value))
        or has_own_keys(value)
        for value in values
    )


def _copied(value: object) -> Any:
    """Return a value in new dicts and lists.

    Tensors, and objects with keys of their own, are not copied.
    """
    if has_own_keys(value):
        return value
    if isinstance(value, Mapping):
        made = copy.copy(value) if isinstance(value, dict) else dict(value)
        made.update((name, _copied(item)) for name, item in value.items())
        return made
    if isinstance(value, list):
        return list(value) if _is_single_object(value) else list(map(_copied, value))
    return value


def has_own_keys(value: object) -> bool:
    """Return whether a value defines its keys in a checkpoint itself.

    Modules, optimizers, `PerRank` and other objects with `state_dict` and `load_state_dict` do.
    Tensors, mappings and other containers do not.
    """
    kind = type(value)
    if kind in CONTAINERS or kind in LEAVES or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, nn.Module | Optimizer | PerRank):
        return True
    if isinstance(value, Mapping):
        return False
    return hasattr(value, "load_state_dict") and hasattr(value, "state_dict")


_TREES = frozenset({OrderedDict, defaultdict, Counter})
"""Types of mappings that are restored as the type that was saved."""


def _typed_tree(value: Any, tree: dict[Any, object]) -> Any:
    """Return the nesting of a mapping whose type is in `_TREES`, as a mapping of the same type.

    A ``defaultdict`` becomes a plain dict if its factory is not one that can be saved.

    Args:
        value: the mapping.
        tree: the nesting of its items.
    """
    if type(value) is defaultdict:
        known = value.default_factory is None or value.default_factory in FACTORIES.values()
        return defaultdict(value.default_factory, tree) if known else tree
    return type(value)(tree)


def _items(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a mapping to which another thread may write at the same time.

    A RuntimeError is raised if its size changes at each of several attempts.
    """
    for _ in range(READ_TRIES):
        with suppress(RuntimeError):  # its size has changed
            return list(values.items())
    return list(values.items())


def _check_name(prefix: str, name: object) -> None:
    """Raise ConfigError if a value with this name would be taken for a nesting."""
    if isinstance(name, str) and name.endswith(STRUCTURE):
        raise ConfigError(
            f"checkpoint: the key {prefix}{name} is reserved: expected one that does not end with "
            f"{STRUCTURE}"
        )


def _name(prefix: str, name: Any) -> Any:
    """Return a mapping's key in the form in which it is saved.

    Raises:
        ConfigError: ``torch.load`` would not read it with ``weights_only=True``.
    """
    kind = type(name)
    if kind in SAFE:
        return name
    if isinstance(name, str):  # an Enum of strings, say: equal to its string
        return str.__str__(name)
    if isinstance(name, int):
        return int(name)
    if kind is tuple:
        return tuple(_name(prefix, part) for part in name)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(name, numpy.number):
        return name.item()
    raise ConfigError(
        f"checkpoint: {prefix.rstrip('.')} has the key {name!r}, a {kind.__qualname__}: expected "
        "a str or a number"
    )


def _names_by_text(tree: Iterable[object]) -> dict[str, Any]:
    """Return the names that are not plain strings, by their text in keys.

    Those that ``torch.load`` would not read are left out: they come back as their text.
    """
    names = {}
    for name in tree:
        if type(name) is not str:
            with suppress(ConfigError):
                names[f"{name}"] = _name("the state", name)
    return names


def _has_tensors(value: object) -> bool:
    """Return whether a container has a tensor, module or optimizer at any depth."""
    return any(True for _ in _inside(value))


def _inside(value: object) -> Iterator[object]:
    """Yield the tensors, modules and optimizers in a container."""
    if isinstance(value, torch.Tensor | nn.Module | Optimizer):
        yield value
    elif isinstance(value, Mapping | list):
        items = list(value.values()) if isinstance(value, Mapping) else value
        if not SAFE.issuperset(map(type, items)):  # there may be millions
            for item in items:
                yield from _inside(item)
