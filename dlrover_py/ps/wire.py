"""Messages as frames of ZeroMQ: a prelude, a body in MessagePack, and the arrays.

An array has one frame, or several if it is larger than :data:`~dlrover_py.ps.door.FRAME_BYTES`.

The prelude has the version, and a proof that the sender knows the job's key: a keyed hash of all
that follows. The key itself is never sent, because another program may listen at the address of a
server that has died. Nothing of a message is used before version and proof are right.
"""

import functools
import hashlib
import hmac
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import xxhash
import zmq

from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.ps import messages
from dlrover_py.ps.door import FRAME_BYTES
from dlrover_py.ps.store import Payload

VERSION = 6
"""Version of these frames. Servers and workers of one job have the same."""
MAX_BODY_BYTES = FRAME_BYTES
MAX_PAYLOAD_BYTES = 1 << 30
"""Bytes of the arrays of a message."""
MAX_ARRAYS = 1 << 18
"""Arrays of a message. The copy of a bucket has two for each table and worker whose push waits."""
LARGE_BYTES = 32768
"""Frames of this size are not copied when they are sent."""
_MAGIC = b"DLPS"
_HEAD = struct.Struct("<4sHH")
_PROOF_BYTES = 16
NO_KEY = bytes(16)
"""The key of an answer to a program that has not proved that it knows the job's key. An answer with
a right proof could be passed on to a program that believes it."""
_DTYPES = {
    dtype.str: dtype
    for dtype in map(np.dtype, ("|i1", "<i4", "<i8", "<u2", "<u4", "<f2", "<f4", "<f8"))
}
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(messages.Message)}


class WireError(DLRoverError):
    """A message cannot be used; nothing was done."""


class UnprovenError(WireError):
    """The sender of a message has not proved that it knows the job's key.

    It is a stranger, a program of another job or version, or the message was damaged on the way.
    """


class _Body(msgspec.Struct, array_like=True):
    kind: str
    message: msgspec.Raw
    tables: list[tuple[str, list[tuple[str, tuple[int, ...]]]]]


@dataclass(frozen=True, slots=True)
class JobAccess:
    """Where the coordinator of a job is, and what its programs know."""

    job: str
    address: str
    token: str

    @property
    def key(self) -> bytes:
        """The key of each message of the job, 16 bytes."""
        data = f"{self.job}\0{self.token}".encode()
        return hashlib.blake2b(data, digest_size=16, person=b"dlrover-ps").digest()


def encode(message: Any, payload: Payload, key: bytes) -> list[Any]:
    """Return the frames of a message.

    Args:
        message: One of ``messages.Message``.
        payload: Its arrays.
        key: The key of the job.

    Raises:
        ConfigError: The arrays, or the rest, are larger than a message may be, or too many.
    """
    arrays = [np.ascontiguousarray(array) for _, part in payload for array in part]
    size = sum(array.nbytes for array in arrays)
    if len(arrays) > MAX_ARRAYS:
        raise ConfigError(
            f"a message would have {len(arrays)} arrays: expected at most {MAX_ARRAYS}; use fewer "
            "tables or workers"
        )
    if size > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"a message would have {size} bytes: expected at most {MAX_PAYLOAD_BYTES}; use smaller "
            "batches, or more buckets"
        )
    tables = [(name, [(array.dtype.str, array.shape) for array in part]) for name, part in payload]
    raw = msgspec.Raw(msgspec.msgpack.encode(message))
    body = msgspec.msgpack.encode(_Body(type(message).__name__, raw, tables))
    if len(body) > MAX_BODY_BYTES:
        raise ConfigError(
            f"a {type(message).__name__} would have {len(body)} bytes besides its arrays: expected "
            f"at most {MAX_BODY_BYTES}; use fewer tables, buckets or workers"
        )
    frames = [body, *(piece for array in arrays for piece in _pieces(array))]
    head = _HEAD.pack(_MAGIC, VERSION, 0)
    return [head + proof(head, frames, key), *frames]


def send(socket: Any, message: Any, payload: Payload, key: bytes, route: bytes = b"") -> None:
    """Send a message without waiting. Large frames are not copied.

    Args:
        socket: The socket.
        message: One of ``messages.Message``.
        payload: Its arrays.
        key: The key of the job.
        route: The connection, if the socket has several.

    Raises:
        zmq.Again: The queue of the receiver is full.
        ConfigError: The arrays are larger than a message may be.
    """
    frames = encode(message, payload, key)
    large = any(len(frame) >= LARGE_BYTES for frame in frames)
    socket.send_multipart([route, *frames] if route else frames, zmq.NOBLOCK, copy=not large)


def decode(frames: Sequence[Any], key: bytes) -> tuple[Any, Payload]:
    """Return a message and its arrays, which are read-only; those of one frame are views of it.

    Args:
        frames: Buffers: prelude, body, arrays.
        key: The key of the job.

    Raises:
        UnprovenError: The message is damaged, too large, of another version or of another job.
        WireError: Its sender knows the key, but the message cannot be read.
    """
    size = _HEAD.size + _PROOF_BYTES
    if len(frames) < 2 or len(frames[0]) < _HEAD.size:
        raise UnprovenError(f"expected a prelude of {size} bytes and a body")
    prelude = bytes(frames[0])
    magic, version, _ = _HEAD.unpack_from(prelude)
    if magic != _MAGIC:
        raise UnprovenError("expected a message of DLRover-Py's parameter server")
    if version != VERSION:
        raise UnprovenError(
            f"expected version {VERSION} of the messages, found {version}: use the same release "
            "of DLRover-Py for servers and workers"
        )
    if len(prelude) != size:
        raise UnprovenError(f"expected a prelude of {size} bytes and a body")
    if (
        len(frames[1]) > MAX_BODY_BYTES
        or len(frames) > MAX_ARRAYS + MAX_PAYLOAD_BYTES // FRAME_BYTES + 2
    ):
        raise UnprovenError("the message is too large")
    if sum(len(frame) for frame in frames[2:]) > MAX_PAYLOAD_BYTES:
        raise UnprovenError(f"expected at most {MAX_PAYLOAD_BYTES} bytes of arrays")
    head, given = prelude[: _HEAD.size], prelude[_HEAD.size :]
    if not hmac.compare_digest(given, proof(head, frames[1:], key)):
        raise UnprovenError(
            "the message is of another job, of a program without the job's token, or damaged"
        )
    try:
        body = msgspec.msgpack.decode(bytes(frames[1]), type=_Body)
        kind = _KINDS.get(body.kind)
        if kind is None:
            raise WireError(f"expected a known kind of message, found {body.kind[:40]!r}")
        message = msgspec.msgpack.decode(body.message, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the message is malformed: {error}") from None
    return message, _payload(body, frames[2:])


def _pieces(array: "np.ndarray[Any, Any]") -> Iterator[Any]:
    """Yield the frames of an array: as many as :func:`_count` says."""
    if not array.size:
        yield b""
    content = array.data.cast("B") if array.size else memoryview(b"")
    for start in range(0, len(content), FRAME_BYTES):
        yield content[start : start + FRAME_BYTES]


def _count(nbytes: int) -> int:
    """Return the number of frames of an array of some bytes."""
    return max(1, -(-nbytes // FRAME_BYTES))


def _payload(body: _Body, frames: Sequence[Any]) -> Payload:
    at = 0
    payload: Payload = []
    for name, arrays in body.tables:
        part = []
        for dtype, shape in arrays:
            known = _DTYPES.get(dtype)
            if known is None or len(shape) > 2 or min(shape, default=0) < 0:
                raise WireError(f"an array of table {name[:40]!r} has type {dtype[:8]!r} {shape}")
            nbytes = math.prod(shape) * known.itemsize
            pieces = frames[at : at + _count(nbytes)]
            found = sum(len(piece) for piece in pieces)
            if not pieces or found != nbytes:
                raise WireError(f"an array of table {name[:40]!r} has {found} bytes")
            at += len(pieces)
            content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            part.append(np.frombuffer(content, known).reshape(shape))
        payload.append((name, part))
    if at != len(frames):
        raise WireError("the message has another number of arrays than it says")
    return payload


def proof(head: bytes, frames: Sequence[Any], key: bytes) -> bytes:
    """Return the proof of a message, 16 bytes: a BLAKE2b with the key of what the frames contain.

    A large message is not hashed with BLAKE2b, which would take longer than the network, but with
    XXH3. That hash is not sent, and its seed is made from the key, so that nobody else can make a
    second message with the same hash.

    Args:
        head: The first bytes of the prelude: magic, version and flags.
        frames: All further frames: the body, then the arrays. The body says how long each array is.
        key: The key of the job.
    """
    hashed = xxhash.xxh3_128(seed=_seed(key))
    for frame in frames:
        hashed.update(frame)
    content = head + len(frames[0]).to_bytes(8, "little") + hashed.digest()
    return hashlib.blake2b(content, digest_size=_PROOF_BYTES, key=key).digest()


@functools.lru_cache(maxsize=8)
def _seed(key: bytes) -> int:
    """Return the seed of the hash of a message, which only programs with the key know."""
    digest = hashlib.blake2b(key=key, digest_size=8, person=b"dlrover-ps-seed").digest()
    return int.from_bytes(digest, "little")
