"""What the ranks of a world say to one another, over ``torch.distributed``."""

import json
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dlrover_py.protocol import json_text
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.trainer import torch_compat

T = TypeVar("T")
MAX_VALUE_BYTES = 1 << 30
"""Bytes of the largest value that a rank may send to the others."""


def rank_and_world() -> tuple[int, int] | None:
    """Return rank and world size in the default group; None if there is no such group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def gather(value: Any, world: int) -> list[Any]:
    """Return on every rank the values of all ranks, by rank.

    All ranks must call it (it is collective), unless ``world`` is 1.

    ``dist.all_gather_object`` is not used: it runs any code that a received pickle names, and
    neither gloo nor the store where its peers meet knows who they are.

    Args:
        value: the value of this rank, for JSON. A tuple in it arrives as a list.
        world: number of ranks of the default group.

    Raises:
        CheckpointError: what a rank has sent is no JSON, or too large.
    """
    if world == 1:
        return [value]
    device = _device_of_group()
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(own)], dtype=torch.int64, device=device))
    sizes = [int(count) for count in counts]
    longest = max(sizes)
    if longest > MAX_VALUE_BYTES:
        raise CheckpointError(
            f"a rank sends {longest} bytes to the others: expected at most {MAX_VALUE_BYTES}"
        )
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return [
        _decoded(part[: max(0, size)].cpu().numpy().tobytes())
        for part, size in zip(parts, sizes, strict=True)
    ]


def _decoded(data: bytes) -> Any:
    """Return the value in what a rank has sent.

    Raises:
        CheckpointError: it is no JSON.
    """
    try:
        return json_text.decoded(data)
    except ValueError as error:
        raise CheckpointError(f"what a rank has sent cannot be read: {error}") from error


def total(values: Sequence[float], world: int) -> list[float]:
    """Return the sum of each value over all ranks. This is collective.

    Args:
        values: the numbers of this rank; equally many on all ranks.
        world: number of ranks of the default group; a single rank does not communicate.
    """
    if world == 1:
        return list(values)
    numbers = torch.tensor(values, dtype=torch.float64, device=_device_of_group())
    dist.all_reduce(numbers)
    found: list[float] = numbers.tolist()
    return found


def _device_of_group() -> torch.device:
    """Return where the default group takes tensors: on the CPU, if it can."""
    # Not by the name of its backend: without one, torch chooses a backend for each device.
    devices = torch_compat.devices_of_group()
    return next((device for device in devices if device.type == "cpu"), devices[0])


_recent_works: deque[Any] = deque(maxlen=64)
"""The last collectives. The thread of Gloo must not be the last that drops a reference to one: it
would then wait for the GIL. The thread that destroys the process group (DDP, at the end of a
script) holds the GIL while it waits for Gloo's thread."""


class AsyncAllReduce:
    """An asynchronous all-reduce of a few numbers in the default group, on the group's device."""

    def __init__(self) -> None:
        self._device = _device_of_group()
        self._stream: Any = None if self._device.type == "cpu" else torch.cuda.Stream()

    def launch(self, vote: Sequence[int]) -> Callable[[float | None], list[int]]:
        """Start the all-reduce and return without waiting for it.

        Args:
            vote: the numbers of this rank; equally many on all ranks.

        Returns:
            A function that waits for the end and returns the greatest of each number. It takes
            seconds, or None for the limit of the group. It raises RuntimeError after that time. On
            a GPU it ignores its argument: the watchdog of the group knows the limit.
        """
        numbers = torch.tensor(vote, dtype=torch.int64, device=self._device)
        work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, async_op=True)
        if self._stream is None:
            _recent_works.append(work)

            def wait(timeout_s: float | None) -> list[int]:
                if timeout_s is None:
                    work.wait()
                else:
                    work.wait(timedelta(seconds=timeout_s))
                return [int(n) for n in numbers.tolist()]

            return wait
        with torch.cuda.stream(self._stream):  # the training's own stream waits for nothing
            work.wait()
            here = torch.empty_like(numbers, device="cpu", pin_memory=True)
            here.copy_(numbers, non_blocking=True)
            event = self._stream.record_event()

        def heard(_: float | None) -> list[int]:
            event.synchronize()
            return [int(n) for n in here.tolist()]

        return heard


class Ranks:
    """The processes that load together.

    Raises:
        CheckpointError: there are several processes, and torch.distributed is not initialized.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        if world > 1 and rank_and_world() is None:
            raise CheckpointError(
                f"load() is collective over {world} ranks: call "
                "torch.distributed.init_process_group() before it"
            )

    def all(self, said: T) -> list[T]:
        """Return the value of each rank, in the order of ranks. Collective."""
        return gather(said, self.world)

    def first(self, why: str) -> str:
        """Return the reason of the first rank that has one; empty if none has. Collective."""
        return self.words(self.all(why))

    def words(self, said: Sequence[str]) -> str:
        """Return the first reason in a list of what all ranks said; empty if there is none."""
        for rank, reason in enumerate(said):
            if reason:
                return reason if self.world == 1 else f"rank {rank}: {reason}"
        return ""

    def refuse(self, said: Sequence[str], kind: type[CheckpointError] = CheckpointError) -> None:
        """Raise on all ranks if one rank has a reason. A rank raises its own reason, if it has one.

        Nothing happens if no rank has a reason. All ranks must pass the same list.

        Args:
            said: the reasons of all ranks, in the order of ranks; empty where there is none.
            kind: the class of the exception.

        Raises:
            CheckpointError: or the class given: a rank has a reason.
        """
        if reason := said[self.rank] or self.words(said):
            raise kind(reason)
