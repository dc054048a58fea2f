"""A user's state as pieces and objects, and back.

Keys are those that ``torch.distributed.checkpoint`` gives the same state (``_traverse.py``):
nested keys joined by dots. Modules and optimizers are taken as they stand:

============================  =====================================================
what                          its keys
============================  =====================================================
``{"a": {"b": tensor}}``      ``a.b``
module at ``model``           ``model.fc.weight``: without what DDP, ``torch.compile``
                              and activation checkpointing put before the names
optimizer at ``optim``        ``optim.state.fc.weight.exp_avg``; one object for each
                              group: ``optim.param_groups.0``
anything with ``state_dict``  ``sched.last_epoch``: one for each entry; ``sched/structure``, if
                              keys alone do not tell how what is in them is nested
``PerRank(value)`` at ``x``   ``rank/3/x``
============================  =====================================================

An optimizer's state is named by the parameters' names, in the first module of the state that has
them (with the module's own key before it where two of the optimizer's would be called the same), or
``<group>.<index>`` where no module does. That is the form of ``get_state_dict`` in
torch/distributed/checkpoint/state_dict.py, without its casts and collectives. An optimizer whose
``state_dict`` is not torch's has more than that shows, and is taken by that instead.
"""

import copy
import io
import marshal
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from dlrover_py.protocol.checkpoint import ITEM_BYTES, PRIVATE, Piece, private_key
from dlrover_py.protocol.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

with suppress(ImportError):  # torch.save imports it, the first time: the first save need not wait
    import torch.utils.serialization.config

DEFER_BYTES = 64 << 10
"""Smaller tensors are copied at once: waiting for them costs more than they do."""
SLOW_S = 0.05
"""What takes longer to encode, at each save, is told of."""
NOTE_BYTES = 1 << 20
"""What is copied at once for one reason, and is less than this, is nothing to write home about."""

_DTYPES = {getattr(torch, name): name for name in ITEM_BYTES if hasattr(torch, name)}
_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_MARKS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile and the wrapper of activation checkpointing add to names."""


@dataclass(slots=True)
class Leaf:
    """A piece, and where it is in this process."""

    piece: Piece
    tensor: torch.Tensor
    """What this rank has of it, on any device, of any strides. Detached if it is to be filled: for
    hundreds of tensors, to detach each is a good part of what a save costs the training."""
    deferrable: bool
    """Nothing changes it before the next ``step()`` of its optimizer."""


@dataclass
class Flat:
    """A state, flat."""

    leaves: list[Leaf] = field(default_factory=list)
    objects: dict[str, object] = field(default_factory=dict)
    """What is no tensor: the user's own objects, to be encoded before they change."""
    notes: list[str] = field(default_factory=list)
    """Why something large has to be copied at once: a line for each reason."""

    def encoded(self) -> list[tuple[str, bytes]]:
        """The objects as they are stored. Notes which of them hold the training up.

        Raises:
            ConfigError: one could not be read back.
        """
        found = []
        for key, value in self.objects.items():
            began = time.perf_counter()
            found.append((key, encode_object(key, value)))
            if (took := time.perf_counter() - began) > SLOW_S:
                self.notes.append(
                    f"{key} took {took:.2f} s to encode, which the training waits for: in a tensor "
                    "it would be copied in no time"
                )
        return found


@dataclass(frozen=True, slots=True)
class Structure:
    """How the state of an object is nested, which its flat keys do not tell.

    Who is to take the state may have none of it yet: a new optimizer, a history that is empty.
    """

    tree: dict[str | int, Any]
    """Of dicts and lists; instead of a tensor or an object whether it is a DTensor."""


SHARDED = "dlrover.sharded"
"""In a group's object: entries of the optimizer's state that are DTensors of another shape than
their parameter, of which their bytes do not tell."""
STRUCTURE = "/structure"
"""Behind an object's key: where its :class:`Structure` is."""


class PerRank:
    """A value that belongs to one rank alone: it is never taken from another one's checkpoint."""

    def __init__(self, value: object) -> None:
        self.value = value


class Random:
    """The state of this process's random generators: python's, numpy's and torch's, of all devices.

    Those of numpy and of the accelerator only if the script has begun to use them.
    """

    def state_dict(self) -> dict[str, object]:
        """As values that ``torch.load`` takes back with ``weights_only=True``."""
        version, words, gauss = random.getstate()
        found: dict[str, object] = {
            # (a script may have set another default device)
            "python": (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss),
            "torch": torch.get_rng_state(),
        }
        if (numpy := sys.modules.get("numpy")) is not None:
            name, keys, *rest = numpy.random.get_state()
            words = torch.from_numpy(keys.astype("int64"))
            found["numpy"] = (str(name), words, *(_plain(value) for value in rest))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = tuple(torch.cuda.get_rng_state_all())
        return {"state": tuple(found.items())}  # a tuple is one object, whatever is in it

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set them all."""
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
    return value.item() if hasattr(value, "item") else value


def flatten(state: Mapping[str, object], *, rank: int) -> Flat:
    """Take a state apart; nothing is copied, and no collective runs.

    Args:
        state: tensors, DTensors, modules, optimizers, objects with ``state_dict`` and
            ``load_state_dict``, plain values, and mappings and lists of these.
        rank: of this process, for what is :class:`PerRank`.

    Raises:
        ConfigError: something in the state cannot be saved; names its key.
    """
    return _Walk(rank, load=False).run(state).flat


def encode_object(key: str, value: object) -> bytes:
    """A value as ``torch.save`` writes it.

    Raises:
        ConfigError: it could not be read back with ``weights_only=True``.
    """
    value = value.tree if isinstance(value, Structure) else value
    kinds = _kinds(value)
    plain = b""
    if kinds <= _ENCODED_ONCE:
        with suppress(ValueError):  # nested too deeply
            plain = marshal.dumps(cast(Any, value), 2)  # a hundredth of what torch.save takes
    known = _encoded.get(key)
    if plain and known is not None and known[0] == plain:
        return known[1]
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        data = buffer.getvalue()
        if not plain and not kinds <= _read_back.get(key, set()):
            decode_object(data)  # it takes longer than all else of a save: not at each of them
            _read_back[key] = kinds
    except Exception as error:
        raise ConfigError(
            f"checkpoint: {key} is a {type(value).__qualname__}, which torch.load does not read "
            "with weights_only=True: expected tensors, numbers, strings, and lists and dicts of "
            "these; leave it out, convert it, or allow its class with "
            f"torch.serialization.add_safe_globals ({str(error).strip().splitlines()[0]})"
        ) from error
    if plain:
        _encoded[key] = plain, data
    return data


def decode_object(data: bytes) -> object:
    """Read what :func:`encode_object` wrote; tensors in it come to the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_SAFE = frozenset({int, float, bool, str, bytes, type(None)})
_LEAVES = _SAFE | _PLAIN
_CONTAINERS = frozenset({dict, list, tuple})
_ENCODED_ONCE = _SAFE | _CONTAINERS
_encoded: dict[str, tuple[bytes, bytes]] = {}
"""By key, what was encoded before, as marshal has it and as torch has: most stays as it is for the
whole of a run. Nothing of marshal's is written anywhere."""
_read_back: dict[str, set[type]] = {}
"""Of which types the value was, all that was in it too, that was read back well; by key."""


def _kinds(value: object) -> set[type]:
    """The types of a value, and of all that its containers hold: a list of floats may get one of
    NumPy's later, which nobody could load."""
    found, rest, seen = {type(value)}, [value], set[int]()
    while rest:
        one = rest.pop()
        if not isinstance(one, Mapping | list | tuple | set | frozenset) or id(one) in seen:
            continue
        seen.add(id(one))  # it may hold itself
        items = [*one, *one.values()] if isinstance(one, Mapping) else list(one)
        kinds = set(map(type, items))
        found |= kinds
        if not kinds <= _SAFE:
            rest += items
    return found


class Targets:
    """A state that is to be filled: what there is, and how the rest is put in."""

    def __init__(self, walk: "_Walk") -> None:
        self.leaves = walk.flat.leaves
        self.put = walk.put
        """Key of an object → sets it."""
        self.optimizers = [OptimizerTarget(walk, *found) for found in walk.optimizers]
        self.growing = walk.growing
        """What is before the keys of an object's state → that state, for it to take at the end."""
        self._held = walk.held
        self._finish = walk.finish
        self._places: dict[str, tuple[Any, Any]] = {}
        """Key → what is to hold it, and under which name, where the checkpoint has told that."""
        self._sharded: dict[str, str] = {}
        """Keys of DTensors among these → the prefix of the object's."""
        self._likes: dict[tuple[str, tuple[int, ...]], DTensor | None] = {}

    def reshape(self, prefix: str, tree: object) -> None:
        """Nest the state of an object as it was when it was saved: see :class:`Structure`."""
        if isinstance(tree, dict):
            self._reshape(prefix, prefix, self.growing[prefix], tree)
        for key, (holder, name) in self._held.items():
            value = holder[name]
            if key.startswith(prefix) and _is_sharded(value):
                like = self._likes.setdefault((prefix, tuple(value.shape)), value)
                if like is not None and _placed(like) != _placed(value):
                    self._likes[prefix, tuple(value.shape)] = None

    def _reshape(self, outer: str, prefix: str, holder: Any, tree: Any) -> None:
        for name, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
            key = f"{prefix}{name}"
            old = holder.get(name) if isinstance(tree, dict) else holder[name]
            if isinstance(inner, dict | list) and key in self.put:
                del self.put[key]
                old = None  # it was one object, all of which is another one now
            if isinstance(inner, dict):
                holder[name] = old if isinstance(old, MutableMapping) else {}
                self._reshape(outer, f"{key}.", holder[name], inner)
            elif isinstance(inner, list):
                holder[name] = old = old if isinstance(old, list) else []
                old += [None] * (len(inner) - len(old))
                self._reshape(outer, f"{key}.", old, inner)
            else:
                holder[name] = old  # in its place among the others, which are in the order saved
                self._places[key] = holder, name
                if inner:
                    self._sharded[key] = outer

    def _place(self, key: str) -> tuple[Any, Any] | None:
        """What is to hold something that the state does not have yet, and under which name."""
        if key in self._places:
            return self._places[key]
        for prefix, entries in self.growing.items():
            if key.startswith(prefix):
                name = key[len(prefix) :]
                return (entries, name) if "." not in name else None
        return None

    def unplaced(self, key: str) -> bool:
        """Whether an object of the state would take it, if it were known how it is nested."""
        return any(map(key.startswith, self.growing)) and self._place(key) is None

    def grown(self, key: str) -> Callable[[object], None] | None:
        """How an object is put in that the state does not have yet, but has a place for."""
        place = self._place(key)
        return None if place is None else partial(place[0].__setitem__, place[1])

    def renewed(self, key: str, dtype: str, whole: tuple[int, ...]) -> Leaf | None:
        """A tensor of the saved shape, where an object takes it with its ``load_state_dict``.

        Such an object (a data loader, a history) says itself what it has: no shape is wrong there.
        None: the tensor is written in place, or it is one of many ranks'.
        """
        new = key not in self._held
        place = self._place(key) if new else self._held[key]
        if place is None or not isinstance(place[0], MutableMapping | list):
            return None
        holder, name = place
        old = holder.get(name) if isinstance(holder, MutableMapping) else holder[name]
        kind = getattr(torch, dtype)
        if new and key in self._sharded:
            like = self._likes.get((self._sharded[key], whole))
            if like is None:
                return None
            holder[name] = torch.empty_like(like, dtype=kind, requires_grad=False)
        elif isinstance(old, torch.Tensor) and _is_sharded(old):
            return None
        else:
            device = old.device if isinstance(old, torch.Tensor) else "cpu"
            holder[name] = torch.zeros(whole, dtype=kind, device=device)
        return leaf_of(key, holder[name])

    def drop(self, keys: Iterable[str]) -> None:
        """Take out again what was to be put in."""
        for holder, name in filter(None, map(self._place, keys)):
            if isinstance(holder, MutableMapping):
                holder.pop(name, None)

    def adrift(self, key: str) -> bool:
        """Whether it was a DTensor, and nothing beside it tells on which mesh it is to be."""
        return key in self._sharded and key not in self._held

    def finish(self) -> None:
        """Tell objects with ``load_state_dict`` what was put into their state, inner ones first."""
        for told in self._finish:
            told()


def targets(state: Mapping[str, object], *, rank: int) -> Targets:
    """Take a state apart to fill it.

    Leaves are written in place; optimizers' state is not among them, since a new optimizer has
    none (:attr:`Targets.optimizers`).

    Raises:
        ConfigError: as :func:`flatten`.
    """
    return Targets(_Walk(rank, load=True).run(state))


class OptimizerTarget:
    """An optimizer whose state is replaced by that of a checkpoint."""

    def __init__(
        self, walk: "_Walk", key: str, optimizer: Optimizer, names: dict[int, str]
    ) -> None:
        self.key = key
        self.prefix = f"{key}.state."
        self.groups = f"{key}.param_groups"
        self._outer = optimizer
        self._inner = _inner(optimizer)
        order = [p for group in optimizer.param_groups for p in group["params"]]
        self.known = {names[id(p)]: number for number, p in enumerate(order)}
        """Parameter's name → its number in ``optimizer.state_dict()``."""
        self.owned = {
            names[id(p)]: (p, group)
            for group in self._inner.param_groups
            for p in group["params"]
            if id(p) in names
        }
        """Of these the state is this rank's."""
        self.fresh: dict[Any, dict[str, Any]] = {}
        self.members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        """The parameters' names, by group."""
        self.sharded: set[object] = set()
        """Entries that were DTensors, even of another shape than their parameter."""
        self.loaded = False
        """The checkpoint has this optimizer: what the state of it is now goes."""

    def allocate(
        self, name: str, entry: str, dtype: torch.dtype, whole: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor for an entry of a parameter's state: the one that is there, if it fits."""
        parameter, group = self.owned[name]
        state = self.fresh.setdefault(parameter, {})
        old = self._inner.state[parameter].get(entry) if parameter in self._inner.state else None
        fits = isinstance(old, torch.Tensor) and old.dtype == dtype and tuple(old.shape) == whole
        if fits and isinstance(old, torch.Tensor):
            state[entry] = old
        elif whole == tuple(parameter.shape):
            state[entry] = torch.empty_like(  # no zeros: they would take as long as the reading
                parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format
            )
        elif entry in self.sharded and _is_sharded(parameter):
            state[entry] = _sharded_as(parameter, dtype, whole)
        else:  # `step` stands on the CPU unless a kernel reads it
            there = entry != "step" or group.get("capturable") or group.get("fused")
            local = parameter.to_local() if _is_sharded(parameter) else parameter
            state[entry] = torch.zeros(whole, dtype=dtype, device=local.device if there else "cpu")
        found: torch.Tensor = state[entry]
        return found

    def holds(self, name: str, entry: str, tensor: torch.Tensor) -> bool:
        """Whether it is the very one that the optimizer has now."""
        parameter, _ = self.owned[name]
        state = self._inner.state
        return parameter in state and state[parameter].get(entry) is tensor

    def put(self, name: str, entry: str, value: object) -> None:
        """Set an entry that is no tensor."""
        parameter, _ = self.owned[name]
        self.fresh.setdefault(parameter, {})[entry] = _to(value, parameter.device)

    def put_group(self, number: int, values: Mapping[str, object]) -> None:
        """Set a group's hyperparameters."""
        group = self._outer.param_groups[number]
        for key, value in values.items():
            old = group.get(key)
            if key in ("params", SHARDED):
                continue
            if isinstance(old, torch.Tensor):  # a compiled or captured step reads this very one
                old.copy_(torch.as_tensor(value))
            else:
                group[key] = value

    def finish(self) -> None:
        """Let the state be the one that was loaded, and nothing else."""
        if self.loaded:
            self._inner.state.clear()
            self._inner.state.update(self.fresh)


def match_groups(
    here: Sequence[Sequence[str]], saved: Sequence[Sequence[object]]
) -> tuple[dict[int, int], dict[int, list[int]]]:
    """Which saved group each of an optimizer's groups is: the one of the same parameters.

    One that has gained some, or lost some, is the same where no other has any of them. Names that
    are only positions say nothing: groups of these, and of new names, are matched by their number.

    Args:
        here, saved: the parameters' names, by group.

    Returns:
        Number here → the saved one; and number here → those that it might be, where that is not
        clear: who guessed would train parameters with hyperparameters of others.
    """
    ours, theirs = [_named(names) for names in here], [_named(names) for names in saved]
    equal = {names: j for j, names in enumerate(theirs) if names}
    found = {i: equal[names] for i, names in enumerate(ours) if names in equal}
    unclear: dict[int, list[int]] = {}
    for i, names in enumerate(ours):
        if i in found:
            continue
        mine = [j for j, others in enumerate(theirs) if names & others]
        if len(mine) == 1 and sum(bool(theirs[mine[0]] & others) for others in ours) == 1:
            found[i] = mine[0]
        elif mine:
            unclear[i] = mine
    for i in range(min(len(ours), len(theirs))):
        if i not in found and not any(theirs[i] & names for names in ours) and i not in unclear:
            found[i] = i
    return found, unclear


def _named(names: Sequence[object]) -> frozenset[str]:
    """The names that a module has given."""
    return frozenset(n for n in names if isinstance(n, str) and not _POSITION.fullmatch(n))


_POSITION = re.compile(r"[0-9]+\.[0-9]+")
"""The name of a parameter that no module names: its group, and its place there."""


def _to(value: object, device: torch.device) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return value


class _Walk:
    """One pass over a state."""

    def __init__(self, rank: int, *, load: bool) -> None:
        self.rank = rank
        self.load = load
        self.flat = Flat()
        self.put: dict[str, Callable[[object], None]] = {}
        self.finish: list[Callable[[], None]] = []
        self.growing: dict[str, MutableMapping[str, object]] = {}
        self.held: dict[str, tuple[Any, object]] = {}
        """Tensors in the state of an object: by key, what holds them, and under which name."""
        self._within = False
        self.modules: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self.optimizers: list[tuple[str, Optimizer, dict[int, str]]] = []
        self._owner: dict[int, tuple[str, str]] = {}
        self._deferrable: set[int] = set()
        self._why: dict[int, str] = {}
        self._at_once: dict[str, int] = {}

    def run(self, state: Mapping[str, object]) -> "_Walk":
        """All of it."""
        found: list[tuple[str, Optimizer]] = []
        self._mapping("", state, found)
        for key, module, entries in self.modules:
            names = _clean_names(module, entries)
            for raw, value in entries.items():
                if id(value) not in self._owner and isinstance(value, nn.Parameter):
                    self._owner[id(value)] = key, names[raw]
        for key, optimizer in found:
            self._optimizer(key, optimizer)
        for key, module, entries in self.modules:
            self._module(key, module, entries)
        keys = {leaf.piece.key for leaf in self.flat.leaves}
        if len(keys) != len(self.flat.leaves) or not keys.isdisjoint(self.flat.objects):
            seen: set[str] = set(self.flat.objects)
            for leaf in self.flat.leaves:
                if leaf.piece.key in seen:
                    raise ConfigError(
                        f"checkpoint: two values of the state have the key {leaf.piece.key}: "
                        "expected keys that differ once they are joined by dots"
                    )
                seen.add(leaf.piece.key)
        for why, size in self._at_once.items():
            if size >= NOTE_BYTES:
                self.flat.notes.append(f"{size / 1e6:,.0f} MB are copied at once: {why}")
        return self

    def _mapping(
        self, prefix: str, values: Mapping[str, object], found: list[tuple[str, Optimizer]]
    ) -> None:
        for name, value in values.items():
            if not prefix and str(name).startswith(f"{PRIVATE}/"):
                raise ConfigError(
                    f"checkpoint: the key {name} is taken for what belongs to one rank: "
                    "wrap the value in PerRank instead"
                )
            self._value(f"{prefix}{name}", value, found, values, name)

    def _value(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> None:
        """One value, which its holder has under a name."""
        if isinstance(value, torch.Tensor):
            if not self.tensor(key, value, "it is neither a module's nor an optimizer's"):
                self._object(key, value, holder, name)
            elif self._within:
                self.held[key] = holder, name
        elif isinstance(value, nn.Module):
            _refuse(key, value)
            self.modules.append((key, value, value.state_dict(keep_vars=True)))
        elif isinstance(value, Optimizer):
            if _says_more(value):
                kind = type(value).__qualname__
                self.flat.notes.append(
                    f"{key} is a {kind} whose state_dict is not torch's own: what that says is "
                    "saved, and parameters are copied at once"
                )
                self._stateful(key, value, found)
            else:
                found.append((key, value))
        elif isinstance(value, PerRank):
            if key.startswith(f"{PRIVATE}/"):
                raise ConfigError(f"checkpoint: {key} is PerRank within PerRank: expected it once")
            self._value(private_key(self.rank, key), value.value, found, vars(value), "value")
        elif isinstance(value, Mapping):
            if not self._within and value.keys() == {"state", "param_groups"}:
                self.flat.notes.append(
                    f"{key} is an optimizer's state_dict(), and load() fills that dict, not the "
                    "optimizer: give the optimizer itself"
                )
            self._mapping(f"{key}.", value, found)
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self._stateful(key, value, found)
        elif isinstance(value, list) and not _terminal(value):
            for index, item in enumerate(value):
                self._value(f"{key}.{index}", item, found, value, index)
        else:
            self._object(key, value, holder, name)

    def _object(self, key: str, value: object, holder: Any, name: object) -> None:
        if key in self.flat.objects:
            raise ConfigError(f"checkpoint: two values of the state have the key {key}")
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.number | numpy.bool_):
            value = value.item()  # torch.load would not read it: the mean of some losses, say
        self.flat.objects[key] = value
        if self.load:
            if not hasattr(holder, "__setitem__"):
                raise ConfigError(
                    f"checkpoint: {key} cannot be set in a {type(holder).__qualname__}: "
                    "expected a dict or a list"
                )
            self.put[key] = partial(holder.__setitem__, name)

    def _stateful(self, key: str, value: Any, found: list[tuple[str, Optimizer]]) -> None:
        """An object that gives its state, and takes it.

        Entries without tensors are not taken apart, so that what comes and goes within them (a data
        loader's position, say) is no key that is missing.
        """
        state = value.state_dict()
        if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
            self.flat.objects[key] = state
            if self.load:
                self.put[key] = value.load_state_dict
            return
        entries: dict[str, object] = dict(state)
        outer, self._within = self._within, True
        tree: dict[str | int, object] = {}
        told = True
        for name, entry in entries.items():
            tensor = isinstance(entry, torch.Tensor)
            if tensor or _has_tensors(entry):
                if self.load:  # what is put in is not the object's before it takes all of it
                    entries[name] = entry = _copied(entry)
                else:
                    tree[name] = node = _nested(entry)
                    told = told and tensor and not node
                self._value(f"{key}.{name}", entry, found, entries, name)
            else:
                self._object(f"{key}.{name}", entry, entries, name)
                tree[name] = False
        self._within = outer
        if not self.load and not (told and not any("." in name for name in entries)):
            self._object(f"{key}{STRUCTURE}", Structure(tree), None, None)
        if self.load:
            self.growing[f"{key}."] = entries
            self.finish.append(partial(value.load_state_dict, entries))

    def _module(self, key: str, module: nn.Module, entries: dict[str, Any]) -> None:
        names = _clean_names(module, entries)
        own = {id(t) for t in (*module.parameters(), *module.buffers())} if self.load else set()
        in_place = True
        for raw, value in entries.items():
            full = f"{key}.{names[raw]}"
            if not isinstance(value, torch.Tensor):
                self._object(full, value, entries, raw)
                in_place = False
                continue
            number = id(value)
            defer = number in self._deferrable
            if defer:
                why = ""
            elif isinstance(value, nn.Parameter):  # (slow: it is asked for the few others only)
                why = self._why.get(number, "parameters that no optimizer of the state has")
            else:
                why = "buffers change in the forward pass"
            if not self.tensor(full, value, why, defer=defer):
                self._object(full, value, entries, raw)
                in_place = False
            elif self.load and number not in own:  # made for the occasion by a hook of the user's
                in_place = False
        if self.load and not in_place:
            self.finish.append(partial(module.load_state_dict, entries))

    def _optimizer(self, key: str, optimizer: Optimizer) -> None:
        names = self._names(optimizer)
        self.optimizers.append((key, optimizer, names))
        for number, group in enumerate(optimizer.param_groups):
            values: dict[str, object] = {k: v for k, v in group.items() if k != "params"}
            values["params"] = [names[id(p)] for p in group["params"]]
            self.flat.objects[f"{key}.param_groups.{number}"] = values
        if self.load:
            return
        sharded: set[str] = set()
        never = _changes_unseen(optimizer)
        for group in optimizer.param_groups:
            why = never
            if not why and group.get("capturable"):
                why = "a capturable optimizer may step within a CUDA graph"
            for p in group["params"]:
                own = why
                if not own and (
                    p._post_accumulate_grad_hooks or "_in_backward_optimizers" in p.__dict__
                ):
                    own = "hooks may change parameters in the backward pass"
                if own:
                    self._why[id(p)] = own
                else:
                    self._deferrable.add(id(p))
        for owner, entries in _inner(optimizer).state.items():
            number = id(owner)
            name = names.get(number, owner if isinstance(owner, str) else None)
            if name is None:
                raise ConfigError(
                    f"checkpoint: {key} has state of a parameter that is in none of its groups"
                )
            prefix = f"{key}.state.{name}."
            defer = number in self._deferrable
            why = "" if defer else self._why.get(number, "state that belongs to no parameter")
            why, shape = why or "state of another shape than its parameter", None
            if defer:
                shape = owner.shape
            for entry, value in entries.items():
                full = f"{prefix}{entry}"
                odd = type(value) not in _LEAVES and _is_sharded(value)
                if odd and value.shape != getattr(owner, "shape", None):
                    sharded.add(entry)
                if not isinstance(value, torch.Tensor) or not self.tensor(
                    full, value, why, defer=defer and value.shape == shape
                ):
                    self.flat.objects[full] = value
        if sharded:
            for number in range(len(optimizer.param_groups)):
                group = self.flat.objects[f"{key}.param_groups.{number}"]
                group[SHARDED] = sorted(sharded)  # type: ignore[index]

    def _names(self, optimizer: Optimizer) -> dict[int, str]:
        """The names of an optimizer's parameters, by id."""
        names: dict[int, str] = {}
        for number, group in enumerate(optimizer.param_groups):
            for index, p in enumerate(group["params"]):
                known = self._owner.get(id(p))
                names[id(p)] = known[1] if known else f"{number}.{index}"
        if len(set(names.values())) != len(names):
            for p, (module, name) in self._owner.items():
                if p in names:
                    names[p] = f"{module}.{name}"
        return names

    def tensor(self, key: str, value: torch.Tensor, why: str, *, defer: bool = False) -> bool:
        """Add a tensor; False: it is of a kind that only torch.save can write."""
        kind = type(value)
        if kind not in _PLAIN and _is_sharded(value):
            found = _shard(key, value)
            if found is None:
                return True  # this rank has nothing of it
            piece, local = found
            if local.is_meta:
                raise _no_memory(key)
        else:
            dtype = _DTYPES.get(value.dtype)
            if dtype is None or value.layout is not torch.strided:
                return False
            if kind not in _PLAIN and hasattr(value, "__tensor_flatten__"):
                return False  # a subclass that has its bytes in other tensors
            shape = value.shape
            known = _pieces.get(key)
            if known is None or not (known.shape == shape == known.whole and known.dtype == dtype):
                if value.is_meta or isinstance(value, nn.UninitializedParameter):
                    raise _no_memory(key)
                shape = tuple(shape)
                known = _pieces[key] = Piece(key, dtype, shape, shape, (0,) * len(shape))
            piece, local = known, value.detach() if self.load else value
        if not self.load and (local.is_neg() or local.is_conj()):  # its bytes are not its values
            local = local.detach().resolve_conj().resolve_neg()
        if defer and piece.nbytes < DEFER_BYTES:
            defer = False
        elif defer and not local.is_contiguous():
            defer, why = False, "tensors that are not contiguous"
        if why and not defer and piece.nbytes >= DEFER_BYTES:
            self._at_once[why] = self._at_once.get(why, 0) + piece.nbytes
        self.flat.leaves.append(Leaf(piece, local, defer))
        return True


def _no_memory(key: str) -> ConfigError:
    return ConfigError(f"checkpoint: {key} has no memory yet: expected it initialised")


def leaf_of(key: str, value: torch.Tensor) -> Leaf | None:
    """What this rank has of a tensor; None if that is nothing."""
    walk = _Walk(0, load=True)
    walk.tensor(key, value, "")
    return walk.flat.leaves[0] if walk.flat.leaves else None


_pieces: dict[str, Piece] = {}
"""By key; believed only if dtype and shape agree."""
_shards: dict[str, tuple[object, Piece]] = {}
"""By key, with the DTensor's spec: believed only if that is the same object."""
_clean: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


def _shard(key: str, value: "DTensor") -> tuple[Piece, torch.Tensor] | None:
    """What this rank has of a DTensor; None if it is outside of its mesh.

    Raises:
        ConfigError: a sum that is still to be made, or no single box.
    """
    with torch.no_grad():
        local = value.to_local()
    spec = value._spec
    known = _shards.get(key)
    if known is not None and known[0] is spec and known[1].shape == local.shape:
        return known[1], local
    if value.device_mesh.get_coordinate() is None:
        return None
    try:
        boxes = value.__create_chunk_list__()
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"checkpoint: {key} is a DTensor placed as {value.placements}, of which no box can be "
            f"saved: redistribute it to Shard or Replicate first ({error})"
        ) from error
    if len(boxes) != 1 or tuple(boxes[0].sizes) != tuple(local.shape):
        raise ConfigError(
            f"checkpoint: {key} is a DTensor placed as {value.placements}: expected one box of the "
            f"shape {tuple(local.shape)} on this rank, found {[tuple(b.sizes) for b in boxes]}"
        )
    dtype = _DTYPES.get(local.dtype)
    if dtype is None:
        raise ConfigError(f"checkpoint: {key} is a DTensor of {local.dtype}, which is not saved")
    piece = Piece(
        key, dtype, tuple(local.shape), tuple(value.shape), tuple(map(int, boxes[0].offsets))
    )
    _shards[key] = spec, piece
    return piece, local


def _clean_names(module: nn.Module, entries: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a module's state without what wrappers have put before them."""
    known = _clean.get(module)
    if known is not None and known.keys() == entries.keys():
        return known
    wrappers = []
    for name, inner in module.named_modules(remove_duplicate=False):
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            wrappers.append(_unmarked(f"{name}." if name else ""))
    wrappers.sort(key=len, reverse=True)  # inner ones first
    names: dict[str, str] = {}
    for raw in entries:
        name = _unmarked(raw)
        for prefix in wrappers:
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        names[raw] = name
    _clean[module] = names
    return names


def _unmarked(name: str) -> str:
    for mark in _MARKS:
        name = name.replace(mark, "")
    return name


def _inner(optimizer: Optimizer) -> Optimizer:
    """The one that has the state: within ZeroRedundancyOptimizer, that of what this rank owns."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        inner: Optimizer = optimizer.optim
        return inner
    return optimizer


def _says_more(optimizer: Optimizer) -> bool:
    """Whether its state is not (only) in ``state`` and ``param_groups``: it wraps another one, say,
    or counts something of its own."""
    said = (Optimizer.state_dict, Optimizer.load_state_dict)
    if _inner(optimizer) is not optimizer:  # ZeroRedundancyOptimizer gathers by its own
        return False
    kind, own = type(optimizer), vars(optimizer)
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return (kind.state_dict, kind.load_state_dict) != said or any(
        own.get(f"_optimizer_{hook}_hooks") for hook in hooks
    )


def _changes_unseen(optimizer: Optimizer) -> str:
    """Why the hook before ``step()`` does not see each change of the optimizer's parameters."""
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


def _is_sharded(value: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether it is a DTensor: none is there before its module, which takes a second to import."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _sharded_as(parameter: "DTensor", dtype: torch.dtype, whole: tuple[int, ...]) -> "DTensor":
    """A DTensor on the mesh of a parameter, split as that along the dimensions they share."""
    from torch.distributed.tensor import Replicate, zeros

    shared = {
        dim
        for dim, (one, other) in enumerate(zip(whole, parameter.shape, strict=False))
        if one == other
    }
    places = [
        place if getattr(place, "dim", None) in shared else Replicate()
        for place in parameter.placements
    ]
    return zeros(whole, dtype=dtype, device_mesh=parameter.device_mesh, placements=places)


def _refuse(key: str, module: nn.Module) -> None:
    """Refuse a module whose state no single rank has.

    Raises:
        ConfigError: FullyShardedDataParallel.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None and any(
        isinstance(inner, fsdp.FullyShardedDataParallel) for inner in module.modules()
    ):
        raise ConfigError(
            f"checkpoint: {key} has a FullyShardedDataParallel: expected fully_shard (FSDP2), "
            "whose parameters are DTensors; or give its state_dict() and its optimizer's"
        )


def _terminal(values: list[object]) -> bool:
    """Whether a list is one object: DCP takes those apart that have tensors or mappings in them.
    So are lists of modules, optimizers and the like."""
    return _SAFE.issuperset(map(type, values)) or not any(
        isinstance(value, torch.Tensor | Mapping)
        or (isinstance(value, list) and not _terminal(value))
        or _own(value)
        for value in values
    )


def _placed(value: "DTensor") -> object:
    return value.device_mesh, value.placements


def _nested(value: object) -> object:
    """How a value is nested, as :class:`Structure` has it; as ``_value`` takes it apart."""
    kind = type(value)
    if kind in _LEAVES:
        return False
    if isinstance(value, torch.Tensor):
        return _is_sharded(value)
    if kind is dict or isinstance(value, Mapping):
        items: Iterable[tuple[object, object]] = value.items()  # type: ignore[attr-defined]
        return {
            name: type(item) not in _LEAVES and _nested(item)  # (it is called for each save)
            for name, item in items
            if type(name) in _NAMES and (type(item) in _LEAVES or not _own(item))
        }
    if isinstance(value, list) and not _terminal(value):
        return list(map(_nested, value))
    return False


def _copied(value: object) -> Any:
    """A value in containers of its own."""
    if _own(value):
        return value
    if isinstance(value, Mapping):
        made = copy.copy(value) if isinstance(value, dict) else dict(value)
        made.update((name, _copied(item)) for name, item in value.items())
        return made
    if isinstance(value, list) and not _terminal(value):
        return list(map(_copied, value))
    return value


def _own(value: object) -> bool:
    """Whether it has keys of its own making."""
    if type(value) in _CONTAINERS or isinstance(value, torch.Tensor | Mapping):
        return False
    return isinstance(value, nn.Module | Optimizer | PerRank) or hasattr(value, "load_state_dict")


_NAMES = frozenset({str, int})
"""Of keys in a :class:`Structure`: anything else torch.load might not read."""


def _has_tensors(value: object) -> bool:
    """Whether there is a tensor, or what has some, somewhere in a container."""
    return any(True for _ in _inside(value))


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, torch.Tensor | nn.Module | Optimizer):
        yield value
    elif isinstance(value, Mapping | list):
        items = list(value.values()) if isinstance(value, Mapping) else value
        if not _SAFE.issuperset(map(type, items)):  # there may be millions
            for item in items:
                yield from _inside(item)
