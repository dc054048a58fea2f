"""The copies of single tensors, and how a change during a copy is found."""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dlrover_py.protocol.slots import TensorChunk
from dlrover_py.trainer.torch_compat import version_of

SAMPLE_BYTES = 64
"""Bytes that are compared at each of two offsets of a tensor, before, in and after its copy."""


class StagedTensor(Protocol):
    """A tensor chunk of the state, with the tensor that holds its values."""

    @property
    def chunk(self) -> TensorChunk:
        """The description of the chunk."""

    @property
    def tensor(self) -> Any:
        """The values: a plain local tensor with the shape and type of ``chunk``."""

    @property
    def deferrable(self) -> bool:
        """Whether it stays unchanged until the next step of an optimizer that has the fence."""


@dataclass(slots=True)
class CopyItem:
    """The copy of one tensor."""

    leaf: StagedTensor
    number: int
    """Index of the tensor in the layout."""
    at: int
    """Offset in the slot, in bytes."""
    nbytes: int
    source: Any
    """The tensor to copy."""
    address: int
    """Address of its first byte; 0 on a GPU."""
    version: int | None = None
    """Version that torch had counted at ``stage``; None if it counts none."""
    samples: tuple[tuple[int, bytes], ...] = ()
    """Offsets, and the bytes that were there at ``stage``."""


def take_item(items: deque[CopyItem]) -> CopyItem | None:
    """Remove and return the next item; None if there is none."""
    try:
        return items.popleft()
    except IndexError:
        return None


def key_of_changed_version(items: Sequence[CopyItem]) -> str:
    """Return the key of a tensor whose version has changed since ``stage``; "" if there is none."""
    for item in items:
        if version_of(item.source) != item.version:
            return item.leaf.chunk.key
    return ""


def key_of_changed_bytes(items: Sequence[CopyItem]) -> str:
    """Return the key of a tensor whose bytes at the compared offsets have changed, or "".

    These bytes may have been copied before the change, and the rest of the tensor after it. A
    change at other offsets is not found.
    """
    for item in items:
        for offset, bytes_then in item.samples:
            if ctypes.string_at(item.address + offset, len(bytes_then)) != bytes_then:
                return item.leaf.chunk.key
    return ""


def sample_bytes(address: int, nbytes: int, seed: int) -> tuple[tuple[int, bytes], ...]:
    """Return a few bytes at two offsets of a tensor, each with its offset in the tensor.

    The offsets differ from save to save. All bytes are returned, with the offset 0, if there are
    fewer than ``2 * SAMPLE_BYTES``.

    Args:
        address: the address of the tensor's first byte.
        nbytes: its size in bytes.
        seed: a number that is another one at each save.
    """
    if nbytes < 2 * SAMPLE_BYTES:
        return ((0, ctypes.string_at(address, nbytes)),)
    count = nbytes // SAMPLE_BYTES
    first = seed % count
    second = (first + count // 2) % count
    return (
        (first * SAMPLE_BYTES, ctypes.string_at(address + first * SAMPLE_BYTES, SAMPLE_BYTES)),
        (second * SAMPLE_BYTES, ctypes.string_at(address + second * SAMPLE_BYTES, SAMPLE_BYTES)),
    )


def enqueue(items: Sequence[CopyItem], view: memoryview, stream: Any, *, wait_for_all: bool) -> Any:
    """Enqueue the copies of one GPU's tensors, and return before they are done.

    The training's stream waits for the copies of tensors that are not deferrable, which the
    training may change at any time (`StagedTensor.deferrable`).

    Args:
        items: the tensors, on the same device.
        view: the memory of the slot, which is registered with CUDA.
        stream: a stream of the device, for the copies.
        wait_for_all: whether the training's stream waits for all copies.

    Returns:
        The event after the last copy; the caller waits for it before it reads the slot.
    """
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    urgent = None
    with torch.cuda.stream(stream):
        for item in sorted(items, key=lambda item: item.leaf.deferrable):
            if urgent is None and item.leaf.deferrable and not wait_for_all:
                urgent = stream.record_event()
            if item.nbytes:
                source = item.source.contiguous().reshape(-1).view(torch.uint8)
                target = torch.frombuffer(
                    view, dtype=torch.uint8, count=item.nbytes, offset=item.at
                )
                target.copy_(source, non_blocking=True)
                item.source.record_stream(stream)
        last = stream.record_event()
    current.wait_event(urgent or last)
    return last
