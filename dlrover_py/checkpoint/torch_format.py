"""The file formats of torch, written without torch.

The persister writes the files of torch.distributed.checkpoint (DCP). It must be ready when a node
has only seconds left, and to import torch takes seconds and hundreds of megabytes. So this module
makes the bytes around the data of a tensor, and the index of a checkpoint. torch 2.6 and all later
versions read them.

Sources: torch/serialization.py, torch/_utils.py, and metadata.py and filesystem.py of
torch/distributed/checkpoint; PKWARE's APPNOTE.TXT (zip); CPython's pickletools.py (pickle).
"""

import pickle  # noqa: TID251  only to write: DCP's index is a pickle
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.slots import ALIGN, TensorChunk

# --- Pickle ---

_KEPT = 100
"""First entry of the memo for values that are kept; those before it are free for `_value`."""
_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"


def _value(value: int | str | tuple[int, ...] | tuple[str, ...]) -> bytes:
    """Return the pickle opcodes that push a number, a string or a tuple of a few strings.

    They use the first entries of the memo, one for each string and for the tuple.
    """
    return pickle.dumps(value, 2)[2:-1]


def _global(module: str, name: str) -> bytes:
    """Return the pickle opcodes that push a class or function of a module."""
    return f"c{module}\n{name}\n".encode()


_REPEATED = {
    "torch.Size": _global("torch", "Size"),
    "MetadataIndex": _global(_METADATA, "MetadataIndex"),
    "ChunkStorageMetadata": _global(_METADATA, "ChunkStorageMetadata"),
    "TensorStorageMetadata": _global(_METADATA, "TensorStorageMetadata"),
    "TensorProperties": _global(_METADATA, "TensorProperties"),
    "BytesStorageMetadata": _global(_METADATA, "BytesStorageMetadata"),
    "_StorageInfo": _global(_FILES, "_StorageInfo"),
    "layout": _global("torch.serialization", "_get_layout") + _value("torch.strided") + b"\x85R",
    "contiguous": _global(_METADATA, "_MEM_FORMAT_ENCODING") + _value(0) + b"\x85R",
}
_FIELDS = (
    ("fqn", "offset", "index"),
    ("offsets", "sizes"),
    ("properties", "size", "chunks"),
    ("relative_path", "length"),
)
_REPEATED |= {name: _value(name) for fields in _FIELDS for name in fields}
"""What an index has many times: it is pickled once, and kept in the memo."""
_GET = {name: b"h" + bytes([_KEPT + place]) for place, name in enumerate(_REPEATED)}
"""The pickle opcodes that push these values from the memo."""
_KEEP = b"".join(b"%bq%c0" % (ops, _KEPT + place) for place, ops in enumerate(_REPEATED.values()))
"""The pickle opcodes that put these values into the memo."""


def _dict(items: Iterable[bytes]) -> bytes:
    """Return the pickle opcodes that push a dict, from those of each key and its value."""
    return b"}(%bu" % b"".join(items)


def _object(cls: str, **fields: bytes) -> bytes:
    """Return the pickle opcodes that push an object, from those of the values of its fields."""
    return _GET[cls] + b")\x81%bb" % _dict([_GET[name] + ops for name, ops in fields.items()])


def _size(lengths: Sequence[int]) -> bytes:
    """Return the pickle opcodes that push a ``torch.Size``."""
    return _GET["torch.Size"] + _value(tuple(lengths)) + b"\x85R"


# --- Index of a checkpoint ---


def dcp_metadata(manifest: Manifest, extents: Mapping[tuple[Any, ...], tuple[int, int]]) -> bytes:
    """Return the contents of DCP's ``.metadata`` file of a checkpoint.

    Args:
        manifest: the chunks and objects of the checkpoint, and their files.
        extents: offset and length in bytes of the zip of each chunk, by ``TensorChunk.box``.
    """
    tensors: dict[str, tuple[TensorChunk, list[bytes]]] = {}
    places: list[bytes] = []
    for written in manifest.chunks:
        chunk = written.chunk
        _, known = tensors.setdefault(chunk.key, (chunk, []))
        at = _size(chunk.at)
        position, length = extents[chunk.box]
        places.append(
            _object("MetadataIndex", fqn=_value(chunk.key), offset=at, index=_value(len(known)))
            + _place(written.file, position, length)
        )
        known.append(_object("ChunkStorageMetadata", offsets=at, sizes=_size(chunk.shape)))
    entries = [_value(key) + _entry(first, known) for key, (first, known) in tensors.items()]
    for item in manifest.objects:
        entries.append(_value(item.key) + _GET["BytesStorageMetadata"] + b")\x81")
        key = _object("MetadataIndex", fqn=_value(item.key))
        places.append(key + _place(item.file, item.position, item.nbytes))
    keys = [*tensors, *(item.key for item in manifest.objects)]
    # dcp_to_torch_save nests by these paths: one level, so that load_state_dict accepts ["model"].
    paths = {key: (key,) if "/" in key else tuple(key.split(".", 1)) for key in keys}
    top = {path[0] for path in paths.values() if len(path) == 1}
    paths = {key: (key,) if path[0] in top else path for key, path in paths.items()}
    fields = (
        _value("state_dict_metadata") + _dict(entries),
        _value("planner_data") + _dict([_value(key) + _value(at) for key, at in paths.items()]),
        _value("storage_data") + _dict(places),
    )
    metadata = _global(_METADATA, "Metadata") + b")\x81%bb" % _dict(fields)
    return b"\x80\x02" + _KEEP + metadata + b"."


def _entry(chunk: TensorChunk, chunks: Iterable[bytes]) -> bytes:
    """Return the pickle opcodes that push what DCP knows of a tensor.

    Args:
        chunk: one of its chunks.
        chunks: the pickle opcodes that push each of them.
    """
    values = (_global("torch", chunk.dtype), _GET["layout"], b"\x89", _GET["contiguous"], b"\x89")
    # The third and the last one: requires_grad and pin_memory are False.
    return _object(
        "TensorStorageMetadata",
        properties=_GET["TensorProperties"] + b")\x81(%btb" % b"".join(values),
        size=_size(chunk.whole),
        chunks=b"](%be" % b"".join(chunks),
    )


def _place(file: str, position: int, length: int) -> bytes:
    """Return the pickle opcodes that push where DCP finds some bytes."""
    fields = {"relative_path": _value(file), "offset": _value(position), "length": _value(length)}
    return _object("_StorageInfo", **fields)


# --- Zip of a tensor ---

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_OLD_END = struct.Struct("<4s4H2IH")
_VERSION, _UTF8, _DATE = 45, 1 << 11, 1 << 5 | 1
"""Version of zip with 8-byte sizes; flag of names in UTF-8; 1 January 1980."""
_SEE_EXTRA = 0xFFFFFFFF
"""Size in a header, if the extra field has it."""


def zip_around(chunk: TensorChunk) -> tuple[bytes, bytes]:
    """Return the bytes before and after the data of a chunk that make both a ``torch.save`` zip.

    The data begin at a multiple of `ALIGN` bytes of the zip. Their CRC is 0, as torch does not
    compare it: a checkpoint has an XXH3 of all bytes.
    """
    small = {
        b"archive/data.pkl": _tensor(chunk),
        b"archive/byteorder": sys.byteorder.encode(),
        b"archive/version": b"3\n",
    }
    head, central = b"", b""
    for name, content in small.items():
        fixed = _fixed(len(content), zlib.crc32(content))
        central += _central(name, fixed, len(head))
        head += _LOCAL_HEADER.pack(b"PK\3\4", *fixed, len(name), 0) + name + content
    name, fixed = b"archive/data/0", _fixed(_SEE_EXTRA, 0)
    sizes = struct.pack("<2H2Q", 1, 16, chunk.nbytes, chunk.nbytes)
    central += _central(name, fixed, len(head), sizes)
    unpadded = len(head) + _LOCAL_HEADER.size + len(name) + len(sizes) + 4
    padding = bytes(-unpadded % ALIGN)
    extra = sizes + struct.pack("<2sH", b"FB", len(padding)) + padding  # torch's name for padding
    head += _LOCAL_HEADER.pack(b"PK\3\4", *fixed, len(name), len(extra)) + name + extra
    at, count = len(head) + chunk.nbytes, len(small) + 1
    end = _END.pack(
        b"PK\6\6", _END.size - 12, _VERSION, _VERSION, 0, 0, count, count, len(central), at
    )
    locator = _LOCATOR.pack(b"PK\6\7", 0, at + len(central), 1)
    old_end = _OLD_END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _SEE_EXTRA, _SEE_EXTRA, 0)
    return head, central + end + locator + old_end


def _fixed(nbytes: int, crc: int) -> tuple[int, ...]:
    """Return the fields that both headers of an entry of a zip have, of uncompressed content."""
    return _VERSION, _UTF8, 0, 0, _DATE, crc, nbytes, nbytes


def _central(name: bytes, fixed: tuple[int, ...], at: int, extra: bytes = b"") -> bytes:
    """Return the entry of the directory of a zip, for the content whose header is there."""
    start = _CENTRAL_HEADER.pack(b"PK\1\2", _VERSION, *fixed, len(name), len(extra), 0, 0, 0, 0, at)
    return start + name + extra


def _tensor(chunk: TensorChunk) -> bytes:
    """Return the pickle of a contiguous tensor, whose data are the entry ``data/0`` of its zip."""
    strides = [*accumulate(reversed(chunk.shape[1:]), lambda a, b: a * max(b, 1), initial=1)][::-1]
    parts = (
        _global("torch._utils", "_rebuild_tensor_v3") + b"(",
        b"(" + _value("storage") + _global("torch.storage", "UntypedStorage"),
        _value("0") + _value("cpu") + _value(chunk.nbytes) + b"tQ",
        _value(0) + _value(chunk.shape) + _value(tuple(strides[: len(chunk.shape)])),
        b"\x89" + _global("collections", "OrderedDict") + b")R",
        _global("torch", chunk.dtype) + b"tR.",
    )
    return b"\x80\x02" + b"".join(parts)
