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
``{"a": [{"n": 1}]}``         ``a.0.n``, and ``a/structure``: how it is nested. What has been
                              put in, or taken out, since the state was built is so restored
``PerRank(value)`` at ``x``   ``rank/3/x``
============================  =====================================================

An optimizer's state is named by the parameters' names, in the first module of the state that has
them (with the module's own key before it where two of the optimizer's would be called the same), or
``<group>.<index>`` where no module does. That is the form of ``get_state_dict`` in
torch/distributed/checkpoint/state_dict.py, without its casts and collectives. An optimizer whose
``state_dict`` is not torch's has more than that shows, and is taken by that instead.
"""

import copy
import ctypes
import io
import marshal
import random
import re
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from dlrover_py.protocol.checkpoint import ITEM_BYTES, PRIVATE, Piece, private_key
from dlrover_py.protocol.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

with suppress(ImportError):  # torch.save imports it, the first time: the first save need not wait
    import torch.utils.serialization.config

DEFER_BYTES = 64 << 10
"""Smaller tensors are copied at once: waiting for them costs more than they do."""
SLOW_S = 0.05
"""What takes longer to encode, at each save, is told of."""
TRIES = 3
"""So often a dict is read that is written to at the same time."""
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

    tree: Any
    """Of dicts (or their subclasses that are known) and lists. In the place of a tensor or an
    object: whether it is a DTensor. In the place of what has keys of its own making: None."""


SHARDED = "dlrover.sharded"
"""In a group's object: entries of the optimizer's state that are DTensors of another shape than
their parameter, of which their bytes do not tell."""
STRUCTURE = "/structure"
"""Behind an object's key: where its :class:`Structure` is."""
RNG = "dlrover.rng"
"""Key of the random generators' state, for each rank: one that no script has."""


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
    try:
        kinds = _kinds(value)
        if not kinds <= _UNPACKED or bytes in kinds:
            value = _packed(value)
            kinds = _kinds(value)
    except Exception as error:  # it is the user's own, and may be written by another thread
        raise refused(key, error) from error
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
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return _unpacked(value) if _PACKED.encode() in data else value


def refused(key: str, error: Exception) -> ConfigError:
    """What is raised for an exception of the user's objects: with their key, and one line of it."""
    if isinstance(error, ConfigError):
        return error
    words = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    key = key if len(key) <= 200 else f"{key[:200]}…"
    return ConfigError(f"checkpoint: {key} cannot be taken: {words[:300]}")


_PACKED = "dlrover.packed."
"""Begins the first item of a tuple that stands for a value which ``weights_only=True`` refuses."""
_NPY, _BYTES_IO, _DEFAULTS = (f"{_PACKED}{name}" for name in ("npy", "BytesIO", "defaultdict"))
_EMPTY = f"{_PACKED}bytes"
_FORMS = frozenset({_NPY, _BYTES_IO, _DEFAULTS, _EMPTY})
_FACTORIES = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)
}


def _packed(value: Any) -> Any:
    """A value in types that ``torch.load`` reads with ``weights_only=True``.

    NumPy's numbers become Python's. Its arrays become the bytes of an ``.npy`` file
    (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html), ``BytesIO`` its bytes.

    Raises:
        ValueError: an array of objects, which an ``.npy`` file holds as a pickle only.
    """
    numpy = sys.modules.get("numpy")
    kind = type(value)
    if numpy is not None and isinstance(value, numpy.generic):
        number = value.item()
        if type(number) in _SAFE or type(number) is complex:
            return number
        return (_NPY, _npy(numpy.asarray(value)), True)  # a time, a long double
    if numpy is not None and kind is numpy.ndarray:
        return (_NPY, _npy(value), False)
    if kind is bytes:  # torch.load takes all but this one
        return value or (_EMPTY, 0, 0)
    if kind is io.BytesIO:
        return (_BYTES_IO, _tensor(value.getvalue()), value.tell())
    if kind is defaultdict:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORIES.values():
            return value  # refused, with its key
        items = {_packed(name): _packed(item) for name, item in value.items()}
        return (_DEFAULTS, None if factory is None else factory.__name__, items)
    if kind is dict or kind is OrderedDict:
        return kind((_packed(name), _packed(item)) for name, item in value.items())
    if kind in (list, tuple, set):
        return kind(map(_packed, value))
    return value


def _unpacked(value: Any) -> Any:
    """The same back."""
    kind = type(value)
    if kind is tuple and len(value) == 3 and type(value[0]) is str and value[0] in _FORMS:
        form, data, more = value
        if form == _EMPTY:
            return b""
        if form == _DEFAULTS:
            items = {_unpacked(name): _unpacked(item) for name, item in more.items()}
            return defaultdict(None if data is None else _FACTORIES[data], items)
        file = io.BytesIO(ctypes.string_at(data.data_ptr(), data.nbytes) if len(data) else b"")
        if form == _BYTES_IO:
            file.seek(more)
            return file
        import numpy

        array = numpy.lib.format.read_array(file, allow_pickle=False)
        return array[()] if more else array
    if kind is dict or kind is OrderedDict:
        return kind((_unpacked(name), _unpacked(item)) for name, item in value.items())
    if kind in (list, tuple, set):
        return kind(map(_unpacked, value))
    return value


def _npy(array: Any) -> torch.Tensor:
    import numpy

    file = io.BytesIO()
    numpy.lib.format.write_array(file, array, allow_pickle=False)
    return _tensor(file.getvalue())


def _tensor(data: bytes) -> torch.Tensor:
    """Bytes as a tensor, which is saved as it is: a pickle of bytes takes twice the room."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


_SAFE = frozenset({int, float, bool, str, bytes, type(None)})
_LEAVES = _SAFE | _PLAIN
_CONTAINERS = frozenset({dict, list, tuple})
_ENCODED_ONCE = _SAFE | _CONTAINERS
_UNPACKED = _LEAVES | _CONTAINERS
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


@dataclass(eq=False)
class Region:
    """A part of a state that may be another one than it was: plain values, what an object says of
    itself, or entries that a module loads by methods of its own."""

    key: str
    """Its own, or what all of its keys begin with."""
    holder: Any
    """What holds it, of which nothing else sees a change before all of it is put in."""
    name: object
    """Under which name."""
    plain: bool = False
    """It has no ``load_state_dict``: it is put into the user's own dict or list."""
    keys: set[str] = field(default_factory=set)
    """What it has here."""
    inner: tuple[tuple[str, str], ...] = ()
    """Of a module: what keys begin with that it may have or not, and the names of these in its
    ``state_dict``."""
    told: bool = False
    """The checkpoint has said how it is nested."""
    own: tuple[str, ...] = ()
    """What keys in it begin with that belonged to modules, optimizers and the like."""

    @property
    def value(self) -> Any:
        """What is in it now."""
        return self.holder[self.name]

    def has(self, key: str) -> bool:
        """Whether a key would be in it."""
        if self.inner:
            return any(key.startswith(prefix) for prefix, _ in self.inner)
        return key == self.key or key.startswith(f"{self.key}.")


class Targets:
    """A state that is to be filled: what there is, and how the rest is put in."""

    def __init__(self, walk: "_Walk", state: Mapping[str, object]) -> None:
        self.leaves = walk.flat.leaves
        self.there = list(walk.flat.leaves)
        """All tensors that the state has, whether the checkpoint has them or not."""
        self.put = walk.put
        """Key of an object → sets it."""
        self.optimizers = [OptimizerTarget(walk, *found) for found in walk.optimizers]
        self.regions = walk.regions
        """What may be another one than it was."""
        self.strict = True
        """What a module does not take is an error."""
        self._state = state
        self.rank = walk.rank
        self._held = walk.held
        self._finish = walk.finish
        self._places: dict[str, tuple[Any, Any]] = {}
        """Key → what is to hold it, and under which name, where the checkpoint has told that."""
        self._sharded: dict[str, str] = {}
        """Keys of DTensors among these → the region's."""
        self._likes: dict[tuple[str, tuple[int, ...]], DTensor | None] = {}

    def add(self, key: str) -> Region | None:
        """A region for a plain value at the top of the state, which does not have it yet."""
        own = private_key(self.rank, "")
        name = key.removeprefix(own)
        if not isinstance(self._state, MutableMapping) or name in self._state or name == RNG:
            return None
        box: dict[object, object] = {name: None}
        region = Region(key, box, name, plain=True)
        self.regions.append(region)

        def finish() -> None:
            if region in self.regions:
                value = box[name]
                cast(Any, self._state)[name] = PerRank(value) if name != key else value

        self._finish.append((key, finish))
        return region

    def remove(self, keys: Collection[str]) -> set[str]:
        """Take regions out again that were added; all keys that they have."""
        gone = [region for region in self.regions if region.plain and region.key in keys]
        self.regions = [region for region in self.regions if region not in gone]
        return {key for region in gone for key in region.keys}

    def nest(self, region: Region, tree: object, saved: Collection[str]) -> None:
        """Nest a region as it was when it was saved.

        Args:
            region: one of these.
            tree: as :class:`Structure` has it; False: it was one value.
            saved: all keys of the checkpoint.
        """
        region.told = True
        region.own = tuple(_ends(region.key, tree, own=True))
        there = {key for key in saved if region.has(key)}  # of these, what the tree does not have
        there -= set(_ends(region.key, tree))
        outer = {key[:at] for key in there for at, letter in enumerate(key) if letter == "."}
        self._kept: list[str] = []
        self._nest(
            region, region.key, region.holder, region.name, tree, region.value, there | outer
        )
        kept = tuple(f"{key}." for key in self._kept)
        for key in list(region.keys):
            place = self._places.get(key)
            if place is None:
                if not key.startswith(kept):
                    self._forget(region, key)
                continue
            if key in self.put:
                self.put[key] = partial(place[0].__setitem__, place[1])
            if key in self._held:
                self._held[key] = place
        region.keys |= {key for key in self._places if region.has(key)}
        for key in region.keys & self._held.keys():
            holder, name = self._held[key]
            value = holder[name]
            if _is_sharded(value):
                like = self._likes.setdefault((region.key, tuple(value.shape)), value)
                if like is not None and _placed(like) != _placed(value):
                    self._likes[region.key, tuple(value.shape)] = None

    def _nest(
        self,
        region: Region,
        key: str,
        holder: Any,
        name: Any,
        node: Any,
        old: Any,
        saved: Collection[str],
    ) -> None:
        """Put one value in its place among the others, which are in the order saved."""
        if node is None:  # it has keys of its own making, if it is here
            if old is not None:
                holder[name] = old
        elif isinstance(node, dict):
            made = _like(node, old)
            before = dict(old) if isinstance(old, Mapping) else {}
            made.clear()
            for inner, what in node.items():
                there = before.pop(inner, None)
                self._nest(region, f"{key}.{inner}", made, inner, what, there, saved)
            for inner, what in before.items():
                full = f"{key}.{inner}"
                if full in saved:  # by another rank alone, which is none of this one's business
                    self._kept.append(full)
                    if full in region.keys:
                        self._places[full] = made, inner
                if full in saved or _own(what):
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
            self._places[key] = holder, name
            if node:
                self._sharded[key] = region.key

    def take(self, region: Region, boxes: Collection[str], objects: Collection[str]) -> None:
        """Make room for what a region has that is another kind of value now, or is not any more.

        Args:
            region: one of these.
            boxes: keys of the checkpoint's tensors.
            objects: of its other values.
        """
        begun = any(map(region.has, boxes)) or any(map(region.has, objects))
        for key in list(region.keys):
            if key in self.put and key not in objects and key in boxes:
                self._places.setdefault(key, self._put_at(key))
                del self.put[key]
            elif key in self._held and key not in boxes and key in objects:
                self._places.setdefault(key, self._held[key])
                self._forget(region, key)
            elif begun and not region.told and not region.plain and key not in (*boxes, *objects):
                holder, name = self._held.get(key) or self._put_at(key)
                named = key == f"{region.key}.{name}" or region.inner
                within = any(other.startswith(f"{key}.") for other in (*boxes, *objects))
                if named and isinstance(holder, MutableMapping) and not within:
                    holder.pop(name, None)
                    self._forget(region, key)

    def _put_at(self, key: str) -> tuple[Any, Any]:
        put = cast(Any, self.put[key])  # the only kind that regions have
        return put.func.__self__, put.args[0]

    def _forget(self, region: Region, key: str) -> None:
        """Have no place for something that was not saved."""
        region.keys.discard(key)
        self.put.pop(key, None)
        if self._held.pop(key, None) is not None:
            self.leaves[:] = [leaf for leaf in self.leaves if leaf.piece.key != key]

    def _place(self, key: str) -> tuple[Any, Any] | None:
        """What is to hold something that the state does not have yet, and under which name."""
        if key in self._places:
            return self._places[key]
        for region in self.regions:
            if region.told or region.plain or not region.has(key):
                continue
            for prefix, raw in region.inner:
                if key.startswith(prefix):
                    return region.value, raw + key[len(prefix) :]
            name = key[len(region.key) + 1 :]
            return (region.value, name) if "." not in name else None
        return None

    def idle(self, key: str) -> bool:
        """Whether another rank has it in a value that should be the same on all: it has fewer here,
        or is another one."""
        return any(
            region.plain and region.told and region.has(key)
            and not any(key == own or key.startswith(f"{own}.") for own in region.own)
            for region in self.regions
        )  # fmt: skip

    def unplaced(self, key: str) -> bool:
        """Whether a part of the state would take it, if it were known how it is nested."""
        return any(region.has(key) for region in self.regions) and self._place(key) is None

    def grown(self, key: str) -> Callable[[object], None] | None:
        """How an object is put in that the state does not have yet, but has a place for."""
        place = self._place(key)
        return None if place is None else partial(place[0].__setitem__, place[1])

    def renewed(self, key: str, dtype: str, whole: tuple[int, ...]) -> Leaf | None:
        """A tensor as it was saved, where it may be another one than that which is here.

        An object (a data loader, a history) says itself what it has, and in a dict of the user's
        it may have been replaced: no shape is wrong there. None: the tensor is written in place,
        it is one of many ranks', or it is being trained.
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
        elif isinstance(old, torch.Tensor) and old.requires_grad and self._is_plain(key):
            return None  # who trains it has it from elsewhere
        else:
            device = old.device if isinstance(old, torch.Tensor) else "cpu"
            holder[name] = torch.zeros(whole, dtype=kind, device=device)
        return leaf_of(key, holder[name])

    def _is_plain(self, key: str) -> bool:
        return any(region.plain and region.has(key) for region in self.regions)

    def drop(self, keys: Iterable[str]) -> None:
        """Take out again what was to be put in."""
        for holder, name in filter(None, map(self._place, keys)):
            if isinstance(holder, MutableMapping):
                holder.pop(name, None)

    def adrift(self, key: str) -> bool:
        """Whether it was a DTensor, and nothing beside it tells on which mesh it is to be."""
        return key in self._sharded and key not in self._held

    def finish(self) -> None:
        """Have all take what was put into their state, inner ones first.

        Raises:
            CheckpointError: an object of the user's has refused it; names its key.
        """
        for key, told in self._finish:
            try:
                told(self.strict) if isinstance(told, _ModuleState) else told()
            except Exception as error:
                words = f"{type(error).__name__}: {error}".strip()
                raise CheckpointError(
                    f"{key} does not take what was saved of it: {words}"
                ) from error


def _ends(key: str, node: object, *, own: bool = False) -> Iterator[str]:
    """Keys of the values in a tree; ``own``: what those of modules and the like begin with."""
    if isinstance(node, dict | list):
        for name, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _ends(f"{key}.{name}", inner, own=own)
    elif (node is None) == own:
        yield key


def _like(node: Any, old: object) -> Any:
    """A mapping to be filled: the one that is here, unless another type was saved."""
    if type(node) is dict or type(node) is type(old):
        return old if isinstance(old, MutableMapping) else {}
    return copy.copy(node)


def _grafted(old: object, new: Any) -> Any:
    """A value, in the user's own dicts and lists where these are of its type."""
    if old is new:
        return new
    alike = type(old) is type(new) or not isinstance(old, dict)
    if isinstance(new, Mapping) and isinstance(old, MutableMapping) and alike:
        items = {name: _grafted(old.get(name), item) for name, item in new.items()}
        old.clear()
        old.update(items)
        return old
    if type(new) is list and isinstance(old, list):
        old[:] = [
            _grafted(old[index] if index < len(old) else None, item)
            for index, item in enumerate(new)
        ]
        return old
    return new


@dataclass(frozen=True, slots=True)
class _ModuleState:
    """What a module has to take by its own ``load_state_dict``."""

    module: nn.Module
    entries: dict[str, Any]
    names: frozenset[str]
    """Its entries when the state was built."""

    def __call__(self, strict: bool) -> None:
        """Have it taken.

        A hook of the user's may have left entries out (the frozen part of a model): they are
        neither here nor in the checkpoint, and nothing is missing then.

        Raises:
            CheckpointError: the module has no place for something, or lacks something.
        """
        if type(self.module).load_state_dict is not nn.Module.load_state_dict:
            self.module.load_state_dict(self.entries)
            return
        mine = {id(t) for t in (*self.module.parameters(), *self.module.buffers())}
        done = {name for name, value in self.entries.items() if id(value) in mine}
        found = self.module.load_state_dict(self.entries, strict=False)
        left = [n for n in found.unexpected_keys if n in self.entries and n not in done]
        lacking = [n for n in found.missing_keys if n in self.names and n not in self.entries]
        if strict and (left or lacking):
            raise CheckpointError(f"it has no place for {left}, and it lacks {lacking}")


def targets(state: Mapping[str, object], *, rank: int) -> Targets:
    """Take a state apart to fill it.

    Leaves are written in place; optimizers' state is not among them, since a new optimizer has
    none (:attr:`Targets.optimizers`).

    Raises:
        ConfigError: as :func:`flatten`.
    """
    return Targets(_Walk(rank, load=True).run(state), state)


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
        self.finish: list[tuple[str, Callable[[], None] | _ModuleState]] = []
        self.regions: list[Region] = []
        self.held: dict[str, tuple[Any, object]] = {}
        """Tensors in a region: by key, what holds them, and under which name."""
        self._region: Region | None = None
        """In which values are."""
        self._open: set[int] = set()
        """Containers that are being taken apart."""
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
        self, prefix: str, values: Mapping[Any, object], found: list[tuple[str, Optimizer]]
    ) -> dict[Any, object]:
        """What a mapping holds; how that is nested, by name."""
        tree: dict[Any, object] = {}
        for name, value in _items(values):
            if not prefix and str(name).startswith(f"{PRIVATE}/"):
                raise ConfigError(
                    f"checkpoint: the key {name} is taken for what belongs to one rank: "
                    "wrap the value in PerRank instead"
                )
            saved = name if type(name) is str or not prefix else _name(prefix, name)
            tree[saved] = self._value(f"{prefix}{saved}", value, found, values, name)
        return tree

    def _value(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> object:
        """One value, which its holder has under a name; how it is nested (:class:`Structure`).

        Raises:
            ConfigError: it cannot be saved, or is an object of the user's that has raised.
        """
        try:
            return self._take(key, value, found, holder, name)
        except Exception as error:
            raise refused(key, error) from error

    def _take(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> object:
        if not _own(value):
            if self._region is not None:
                return self._parts(key, value, found, holder, name)
            self._plain(key, value, found, holder, name)
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
            outer, self._region = self._region, None
            self._value(private_key(self.rank, key), value.value, found, vars(value), "value")
            self._region = outer
        else:
            self._stateful(key, value, found)
        return None

    def _parts(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> object:
        """A value of a region; how it is nested."""
        assert self._region is not None
        if type(value) not in _SAFE:
            if isinstance(value, torch.Tensor):
                if self.tensor(key, value, "it is neither a module's nor an optimizer's"):
                    self.held[key] = holder, name
                    self._region.keys.add(key)
                else:
                    self._object(key, value, holder, name)
                return type(value) not in _PLAIN and _is_sharded(value)
            if isinstance(value, Mapping) or (isinstance(value, list) and not _terminal(value)):
                if id(value) in self._open:
                    raise ConfigError(f"checkpoint: {key} holds itself: expected a tree of values")
                self._open.add(id(value))
                try:
                    if isinstance(value, Mapping):
                        kind = type(value)
                        tree = self._mapping(f"{key}.", value, found)
                        return _treed(cast(Any, value), tree) if kind in _TREES else tree
                    return [
                        self._value(f"{key}.{index}", item, found, value, index)
                        for index, item in enumerate(list(value))
                    ]
                finally:
                    self._open.discard(id(value))
        self._object(key, value, holder, name)
        return False

    def _plain(
        self,
        key: str,
        value: object,
        found: list[tuple[str, Optimizer]],
        holder: Any,
        name: object,
    ) -> None:
        """A value that is no object with a state: what is saved of it takes its place."""
        if isinstance(value, Mapping) and value.keys() == {"state", "param_groups"}:
            self.flat.notes.append(
                f"{key} is an optimizer's state_dict(), and load() fills that dict, not the "
                "optimizer: give the optimizer itself"
            )
        box = {name: _copied(value) if self.load else value}
        self._region = region = Region(key, box, name, plain=True)
        tree = self._parts(key, box[name], found, box, name)
        self._region = None
        if not self.load:
            if isinstance(tree, dict | list):
                self._object(f"{key}{STRUCTURE}", Structure(tree), None, None)
            return
        settable = hasattr(holder, "__setitem__")
        if not settable and not isinstance(value, torch.Tensor | MutableMapping | list):
            raise ConfigError(
                f"checkpoint: {key} cannot be set in a {type(holder).__qualname__}: "
                "expected a dict or a list"
            )
        self.regions.append(region)

        def finish() -> None:
            made = _grafted(value, box[name])
            if made is not value:
                holder[name] = made

        self.finish.append((key, finish))

    def _object(self, key: str, value: object, holder: Any, name: object) -> None:
        if key in self.flat.objects:
            raise ConfigError(f"checkpoint: two values of the state have the key {key}")
        self.flat.objects[key] = value
        if self.load:
            self.put[key] = partial(holder.__setitem__, name)
            if self._region is not None:
                self._region.keys.add(key)

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
        entries: dict[str, object] = dict(_items(state))
        outer = self._region
        self._region = region = Region(key, {"": entries}, "")
        tree: dict[str | int, object] = {}
        told = True
        for name, entry in entries.items():
            full = f"{key}.{name}"
            tensor = isinstance(entry, torch.Tensor)
            if tensor or _has_tensors(entry):
                if self.load:  # what is put in is not the object's before it takes all of it
                    entries[name] = entry = _copied(entry)
                tree[name] = node = self._value(full, entry, found, entries, name)
                told = told and tensor and not node
            else:
                self._object(full, entry, entries, name)
                tree[name] = False
        self._region = outer
        if not self.load and not (told and not any("." in name for name in entries)):
            self._object(f"{key}{STRUCTURE}", Structure(tree), None, None)
        if self.load:
            self.regions.append(region)
            self.finish.append((key, partial(value.load_state_dict, entries)))

    def _module(self, key: str, module: nn.Module, entries: dict[str, Any]) -> None:
        names = _clean_names(module, entries)
        own, free, in_place, box = set[int](), tuple[str, ...](), True, {"": entries}
        region = Region(key, box, "")
        if self.load:
            own = {id(t) for t in (*module.parameters(), *module.buffers())}
            free = tuple(_loading_themselves(module))
            clean = _cleaned(module, free)
            region.inner = tuple((f"{key}.{clean[prefix]}", prefix) for prefix in free)
            in_place = not free
        for raw, value in entries.items():
            full = f"{key}.{names[raw]}"
            number = id(value)
            defer = number in self._deferrable
            if defer:
                why = ""
            elif isinstance(value, nn.Parameter):  # (slow: it is asked for the few others only)
                why = self._why.get(number, "parameters that no optimizer of the state has")
            else:
                why = "buffers change in the forward pass"
            alone = not isinstance(value, torch.Tensor) or not self.tensor(
                full, value, why, defer=defer
            )
            if alone:
                self._object(full, value, entries, raw)
                in_place = False
            elif self.load and number not in own:  # made for the occasion by a hook of the user's
                in_place = False
            if self.load and (raw.startswith(free) or raw.rpartition(".")[2] == _EXTRA):
                region.keys.add(full)
                if not alone:
                    self.held[full] = entries, raw
        if self.load:
            if region.keys or free:
                self.regions.append(region)
            if not in_place:
                told = _ModuleState(module, entries, frozenset(entries))
                self.finish.append((key, told))

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
            if kind not in _PLAIN:
                if isinstance(value, nn.parameter.UninitializedTensorMixin):
                    raise _no_memory(key)
                if hasattr(value, "__tensor_flatten__"):
                    return False  # a subclass that has its bytes in other tensors
            if dtype is None or value.layout is not torch.strided:
                return False
            try:
                shape = value.shape
            except RuntimeError:  # a nested tensor
                return False
            if value.is_meta:
                raise _no_memory(key)
            known = _pieces.get(key)
            if known is None or not (known.shape == shape == known.whole and known.dtype == dtype):
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
    return ConfigError(
        f"checkpoint: {key} has no memory yet: expected it initialised; give a lazy module a first "
        "batch, and what is on the meta device to_empty() and its values"
    )


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


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements of it may have one place in memory: an expanded tensor's have."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


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
    if known is None or known.keys() != entries.keys():
        known = _clean[module] = _cleaned(module, entries)
    return known


def _cleaned(module: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    wrappers = []
    for name, inner in module.named_modules(remove_duplicate=False):
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            wrappers.append(_unmarked(f"{name}." if name else ""))
    wrappers.sort(key=len, reverse=True)  # inner ones first
    names: dict[str, str] = {}
    for raw in keys:
        name = _unmarked(raw)
        for prefix in wrappers:
            if name.startswith(f"{prefix}module."):
                name = prefix + name[len(prefix) + len("module.") :]
        names[raw] = name
    return names


def _loading_themselves(module: nn.Module) -> Iterator[str]:
    """What names begin with, of modules within it that load by methods or hooks of the user's.

    Such a module may load what it does not have: buffers of another size, more or fewer of them.
    """
    for name, inner in module.named_modules(remove_duplicate=False):
        kind = type(inner)
        ways = [kind.load_state_dict, kind._load_from_state_dict]
        hooks = [
            *inner._load_state_dict_pre_hooks.values(),
            *inner._load_state_dict_post_hooks.values(),
        ]
        if any(not str(way.__module__).startswith(_TORCHS) for way in ways) or any(
            not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks
        ):
            yield f"{name}." if name else ""


_TORCHS = ("torch.nn.", "torch.distributed.", "torch._dynamo.", "torch.optim.")
"""Where classes are whose modules have at each load what they had when they were built."""
_EXTRA = "_extra_state"
"""What ``get_extra_state`` of a module gives, and its ``set_extra_state`` takes: of any form."""


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


def _copied(value: object) -> Any:
    """A value in containers of its own."""
    if _own(value):
        return value
    if isinstance(value, Mapping):
        made = copy.copy(value) if isinstance(value, dict) else dict(value)
        made.update((name, _copied(item)) for name, item in value.items())
        return made
    if isinstance(value, list):
        return list(value) if _terminal(value) else list(map(_copied, value))
    return value


def _own(value: object) -> bool:
    """Whether it has keys of its own making."""
    kind = type(value)
    if kind in _CONTAINERS or kind in _LEAVES or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, nn.Module | Optimizer | PerRank):
        return True
    if isinstance(value, Mapping):
        return False
    return hasattr(value, "load_state_dict") and hasattr(value, "state_dict")


_TREES = frozenset({OrderedDict, defaultdict, Counter})
"""Mappings that are made anew as what they were."""


def _treed(value: Any, tree: dict[Any, object]) -> Any:
    """How a mapping of these types is nested: the same type, with how its items are."""
    if type(value) is defaultdict:
        known = value.default_factory is None or value.default_factory in _FACTORIES.values()
        return defaultdict(value.default_factory, tree) if known else tree
    return type(value)(tree)


def _items(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """What a mapping holds, which another thread may write to meanwhile."""
    for _ in range(TRIES):
        with suppress(RuntimeError):  # its size has changed
            return list(values.items())
    return list(values.items())


def _name(prefix: str, name: Any) -> Any:
    """A key of a mapping that is no str, as it is saved.

    Raises:
        ConfigError: ``torch.load`` would not read it with ``weights_only=True``.
    """
    kind = type(name)
    if kind in _SAFE:
        return name
    if isinstance(name, str):  # an Enum of strings, say: it is found by the string, too
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
