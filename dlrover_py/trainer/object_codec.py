"""Encode values of a state that are not tensors, in the form that ``torch.load`` reads.

An encoded object must be readable with ``weights_only=True``, so that a checkpoint can execute
nothing. Values that this refuses, such as arrays of NumPy, are packed into values that it reads.
"""

import ctypes
import io
import marshal
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.words import output_line
from dlrover_py.trainer.torch_compat import reason_of_unpickler

_PACKED = "dlrover.packed."
"""Prefix of the first item of a tuple that replaces a value which ``weights_only=True`` refuses."""
_NPY, _BYTES_IO, _DEFAULTS = (f"{_PACKED}{name}" for name in ("npy", "BytesIO", "defaultdict"))
"""First items of such tuples: arrays of NumPy, ``BytesIO``, ``defaultdict``."""
_SCALAR = f"{_PACKED}scalar"
"""First item of the tuple that replaces a scalar of NumPy: its dtype and its bytes follow."""
_NUMBERS = "biufcmM"
"""Kinds of dtypes of NumPy's numbers and times. None of them has a pointer."""
_EMPTY = f"{_PACKED}bytes"
"""First item of the tuple that replaces empty bytes."""
_INT = f"{_PACKED}int"
"""First item of the tuple that replaces a very large int, which has its hexadecimal digits."""
_INT_BITS = 2032
"""Bits of the largest int of which ``torch.load`` is sure to read the pickle."""
_LONG4 = b"\x8b"
"""The opcode of pickle for larger ints. ``torch.load`` refuses it with ``weights_only=True``."""
_FORMS = frozenset({_NPY, _SCALAR, _BYTES_IO, _DEFAULTS, _EMPTY, _INT})
FACTORIES = {kind.__name__: kind for kind in (bool, bytes, dict, float, int, list, set, str, tuple)}
"""Default factories that a ``defaultdict`` may have, by name."""
PLAIN_TENSORS = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
"""Types of tensors that have their bytes in one ordinary storage."""
SAFE = frozenset({int, float, bool, str, bytes, type(None)})
"""Types that ``torch.load`` reads with ``weights_only=True``, other than tensors."""
LEAVES = SAFE | PLAIN_TENSORS
"""Types that contain no other values."""
CONTAINERS = frozenset({dict, list, tuple})
_ENCODED_ONCE = SAFE | CONTAINERS
"""Types of values that are encoded again only after a change."""
_UNPACKED = LEAVES | CONTAINERS
"""Types of values that need no :func:`_packed`."""
_encoded: dict[str, tuple[bytes, bytes]] = {}
"""Key → last encoding of the object, by marshal and by torch.save. Most objects do not change
during a run. The bytes of marshal are used only for comparison, and are never written."""
_read_back: dict[str, set[type]] = {}
"""Key → types of the value, and of all values in it, that were read back without an error."""


@dataclass(frozen=True, slots=True)
class StateStructure:
    """The nesting of an object's state, which its flat keys do not show.

    The object that is to be filled may have no such state yet: a new optimizer, an empty history.
    """

    tree: Any
    """A tree of dicts (or their known subclasses) and lists. In the place of a tensor or an object
    it has a bool: whether the value is a DTensor. In the place of a module, an optimizer or
    another object with keys of its own it has None."""


def encode_object(key: str, value: object) -> bytes:
    """Return a value as ``torch.save`` writes it, in types that ``weights_only=True`` accepts.

    Values that ``torch.load`` would refuse, such as arrays of NumPy, are converted first. The last
    encoding of each key is kept, and returned again for an equal plain value. Other values are read
    back as a check, once for each key and set of types.

    Args:
        key: the key of the value, for messages and for the kept encoding.
        value: the value, or the :class:`StateStructure` whose tree is encoded.

    Raises:
        ConfigError: the value could not be read back with ``weights_only=True``, or an object of
            the user has raised an exception.
    """
    value = value.tree if isinstance(value, StateStructure) else value
    try:
        kinds = _kinds(value)
        if not kinds <= _UNPACKED or bytes in kinds:
            value = _packed(value)
            kinds = _kinds(value)
    except Exception as error:  # code of the user may raise, or another thread write
        raise refused(key, error) from error
    plain = b""
    if kinds <= _ENCODED_ONCE:
        with suppress(ValueError):  # nested too deeply
            plain = marshal.dumps(cast(Any, value), 2)  # takes a hundredth of torch.save's time
    known = _encoded.get(key)
    if plain and known is not None and known[0] == plain:
        return known[1]
    try:
        data = _saved(value)
        large = int in kinds and _LONG4 in data and _has_large_int(value)
        if large:
            data = _saved(_packed(value))
        if large or (not plain and not kinds <= _read_back.get(key, set())):
            decode_object(data)  # the longest part of a save: not at each save
            _read_back[key] = kinds
    except Exception as error:
        why = unreadable(error)
        raise ConfigError(
            f"checkpoint: {key} is a {type(value).__qualname__}, which torch.load does not read "
            "with weights_only=True: expected tensors, numbers, strings, and lists and dicts of "
            "these; leave it out, convert it, or allow its class with "
            f"torch.serialization.add_safe_globals ({why})"
        ) from error
    if plain:
        _encoded[key] = plain, data
    return data


def _saved(value: object) -> bytes:
    """Return a value as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def decode_object(data: bytes) -> object:
    """Return the value that :func:`encode_object` encoded. Its tensors are on the CPU.

    Damaged bytes raise whatever ``torch.load`` raises, such as ``pickle.UnpicklingError``.
    """
    value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return _unpacked(value) if _PACKED.encode() in data else value


def same_plain(one: object, other: object) -> bool:
    """Return whether two values are the same, in containers and leaves of Python alone.

    False: they differ, if only in the order of a dict; they have values of other types, such as
    tensors; or they are nested too deeply.
    """
    if not (_kinds(one) <= _ENCODED_ONCE and _kinds(other) <= _ENCODED_ONCE):
        return False
    try:
        return marshal.dumps(cast(Any, one), 0) == marshal.dumps(cast(Any, other), 0)
    except ValueError:  # nested too deeply
        return False


def refused(key: str, error: Exception) -> ConfigError:
    """Return the error for an exception of a user's object: its key, and one line of text.

    A ConfigError is returned unchanged.
    """
    if isinstance(error, ConfigError):
        return error
    key = key if len(key) <= 200 else f"{key[:200]}…"
    return ConfigError(f"checkpoint: {key} cannot be saved: {first_line(error)}")


def unreadable(error: Exception) -> str:
    """Return why ``torch.load`` cannot read an object, in one line without torch's advice."""
    return reason_of_unpickler(error) or first_line(error)


def first_line(error: Exception) -> str:
    """Return class and first line of an exception, whose class may be the user's own."""
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001 - it is the user's own, too
        text = ""
    name = type(error).__name__
    return output_line(f"{name}: {text}".partition("\n")[0][:300]) if text else name


def _packed(value: Any) -> Any:
    """Return a value in types that ``torch.load`` reads with ``weights_only=True``.

    A scalar of NumPy becomes its dtype and its bytes in hexadecimal digits: a list may have
    thousands of them. Arrays of NumPy, and structured scalars, become the bytes of an ``.npy`` file
    (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html). A scalar of another
    package, such as bfloat16 of ml_dtypes, becomes a number of Python. A ``BytesIO`` becomes
    its bytes, and a very large int its digits. A ``defaultdict`` becomes its items and the name of
    its factory. Each of these, and empty bytes, is put into a tuple whose first item names the
    form. The items of plain containers are converted in the same way. All other values are returned
    unchanged.

    Raises:
        ValueError: an array of objects, which an ``.npy`` file can hold only as a pickle.
    """
    numpy = sys.modules.get("numpy")
    kind = type(value)
    if numpy is not None and isinstance(value, numpy.generic):
        if kind is numpy.str_:
            return (_SCALAR, "U", str.__str__(value))
        if kind is numpy.bytes_:
            return (_SCALAR, "S", bytes(value).hex())
        if value.dtype.kind in _NUMBERS:
            return (_SCALAR, value.dtype.str, value.tobytes().hex())
        if kind is numpy.void:
            return (_NPY, _npy(numpy.asarray(value)), True)
        return _packed(value.item())
    if numpy is not None and kind is numpy.ndarray:
        return (_NPY, _npy(value), False)
    if kind is bytes:  # torch.load reads all bytes except b""
        return value or (_EMPTY, 0, 0)
    if kind is int and value.bit_length() > _INT_BITS:
        return (_INT, hex(value), 0)
    if kind is io.BytesIO:
        return (_BYTES_IO, _tensor(value.getvalue()), value.tell())
    if kind is defaultdict:
        factory = value.default_factory
        if factory is not None and factory not in FACTORIES.values():
            return value  # encode_object() refuses it, and names its key
        items = {_packed(name): _packed(item) for name, item in value.items()}
        return (_DEFAULTS, None if factory is None else factory.__name__, items)
    if kind is dict or kind is OrderedDict:
        return kind((_packed(name), _packed(item)) for name, item in value.items())
    if kind in (list, tuple, set):
        return kind(map(_packed, value))
    return value


def _unpacked(value: Any) -> Any:
    """Return the value that :func:`_packed` has converted."""
    kind = type(value)
    if kind is tuple and len(value) == 3 and type(value[0]) is str and value[0] in _FORMS:
        form, data, more = value
        if form == _EMPTY:
            return b""
        if form == _INT:
            return int(data, 16)
        if form == _SCALAR:
            return _scalar(data, more)
        if form == _DEFAULTS:
            items = {_unpacked(name): _unpacked(item) for name, item in more.items()}
            return defaultdict(None if data is None else FACTORIES[data], items)
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


def _scalar(form: str, data: str) -> Any:
    """Return a scalar of NumPy.

    Args:
        form: its dtype; ``U`` for a text, ``S`` for bytes.
        data: its bytes in hexadecimal digits, or the text.

    Raises:
        TypeError: the dtype is unknown, or cannot be that of a scalar here.
        ValueError: the number of bytes is not that of the dtype.
    """
    import numpy

    if form == "U":
        return numpy.str_(data)
    if form == "S":
        return numpy.bytes_(bytes.fromhex(data))
    if (dtype := numpy.dtype(form)).kind not in _NUMBERS:
        raise TypeError(f"a scalar of dtype {form}: expected one of a kind in {_NUMBERS}")
    (value,) = numpy.frombuffer(bytes.fromhex(data), dtype)
    return value


def _npy(array: Any) -> torch.Tensor:
    """Return the bytes of the ``.npy`` file of an array."""
    import numpy

    file = io.BytesIO()
    numpy.lib.format.write_array(file, array, allow_pickle=False)
    return _tensor(file.getvalue())


def _tensor(data: bytes) -> torch.Tensor:
    """Return bytes as a tensor: a pickle of bytes would take twice the space."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _kinds(value: object) -> set[type]:
    """Return the types of a value and of everything in its containers.

    Containers must be searched at each save: a list of floats may later get a float of NumPy, which
    ``torch.load`` does not read.
    """
    found, rest, seen = {type(value)}, [value], set[int]()
    while rest:
        one = rest.pop()
        if not isinstance(one, Mapping | list | tuple | set | frozenset) or id(one) in seen:
            continue
        seen.add(id(one))  # it may contain itself
        items = _items(one)
        kinds = set(map(type, items))
        found |= kinds
        if not kinds <= SAFE:
            rest += items
    return found


def _has_large_int(value: object) -> bool:
    """Return whether a value, or anything in its containers, is a very large int."""
    rest, seen = [value], set[int]()
    while rest:
        one = rest.pop()
        if type(one) is int and one.bit_length() > _INT_BITS:
            return True
        if isinstance(one, Mapping | list | tuple | set | frozenset) and id(one) not in seen:
            seen.add(id(one))
            rest += _items(one)
    return False


def _items(container: Any) -> list[Any]:
    """Return the items of a container; of a mapping, its keys and its values."""
    return [*container, *container.values()] if isinstance(container, Mapping) else [*container]
