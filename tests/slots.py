"""Slots of shared memory that a test fills, and a persister process that writes them.

To this code, the test acts as the trainer and as the agent.
"""

import ctypes
import io
import json
import os
import queue
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.checkpoint.shm import ShmSlot, digest
from dlrover_py.protocol.agents import PersistPhase, ReplicaLocations, RestoreCandidates
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.persister import (
    CancelWrite,
    CommitGrant,
    WriteReply,
    WriteRequest,
    read_line,
)
from dlrover_py.protocol.slots import Layout, SlotHeader, TensorChunk, encode_objects
from tests.programs import PROGRAMS

JOB = "job-uid-1"


@dataclass(frozen=True)
class Lookup:
    """The two requests about checkpoints in memory that a worker makes to the master."""

    candidates: Callable[[int], Awaitable[RestoreCandidates]]
    locations: Callable[[CheckpointId], Awaitable[ReplicaLocations]]


def stage(
    path: Path,
    tensors: Sequence[tuple[TensorChunk, bytes]],
    objects: Mapping[str, bytes] | None = None,
    *,
    rank: int = 0,
    world: int = 1,
    step: int = 7,
    **facts: Any,
) -> SlotHeader:
    """Fill and seal a slot as a worker does; return its header.

    Args:
        path: file of the slot.
        tensors: tensor chunks and their bytes.
        objects: encoded objects by key.
        rank: rank of the worker.
        world: number of workers.
        step: training step.
        facts: other fields of the header.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {chunk.box: data for chunk, data in tensors}
    layout = Layout(chunk for chunk, _ in tensors)
    known = {"job": JOB, "round": 1, "timeline": 0, "part": "p"}
    with ShmSlot(path, write=True) as slot:
        assert slot.lock(shared=False)
        slot.reserve(layout.end + shm.OBJECT_HEADROOM)
        slot.begin()
        sums = []
        for chunk, at in layout:
            data = said[chunk.box]
            assert len(data) == chunk.nbytes, chunk
            source = ctypes.create_string_buffer(data, len(data) or 1)
            target = slot.view()[at : at + chunk.nbytes]
            sums.append(shm.copy_summed(ctypes.addressof(source), target))
        return slot.seal(
            layout.encode(),
            sums,
            encode_objects(list((objects or {}).items())),
            layout.end,
            private_offset=layout.private_offset,
            rank=rank,
            world=world,
            step=step,
            **{**known, **facts},
        )


def full(key: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorChunk:
    """Return a chunk that is a complete tensor."""
    return TensorChunk(key, dtype, shape, shape, (0,) * len(shape))


def rows(key: str, first: int, count: int, of: int, width: int) -> TensorChunk:
    """Return a chunk of some rows of a matrix, as FSDP shards it.

    Args:
        key: key of the tensor.
        first: number of the first row.
        count: number of rows of the chunk.
        of: number of rows of the matrix.
        width: number of columns.
    """
    return TensorChunk(key, "float32", (count, width), (of, width), (first, 0))


def raw(tensor: Any) -> bytes:
    """Return the bytes of a tensor."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def saved(value: object) -> bytes:
    """Return an object in the encoding of slots."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Persister:
    """A persister process (``python -m dlrover_py.checkpoint.writer``), as an agent starts it."""

    def __init__(self, *, preexec: Any = None, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dlrover_py.checkpoint.writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=preexec,
            env={**os.environ, **(env or {})},
        )
        self._answers: queue.Queue[WriteReply] = queue.Queue()
        self.log: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_answers, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_answers(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = read_line(line)
            assert isinstance(answer, WriteReply)
            self._answers.put(answer)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.decode())

    def send(self, message: WriteRequest | CommitGrant | CancelWrite) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(message.encode())
        self.process.stdin.flush()

    def next(self, *phases: PersistPhase, attempt: str, timeout: float = 150) -> WriteReply:
        """Return the next answer of an attempt that has one of these phases. Others are skipped."""
        deadline = time.monotonic() + timeout
        while True:
            answer = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
            if answer.attempt == attempt and answer.phase in phases:
                return answer

    def end(self, attempt: str, timeout: float = 150) -> WriteReply:
        """Return the last answer of an attempt."""
        return self.next(PersistPhase.DONE, PersistPhase.FAILED, attempt=attempt, timeout=timeout)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        """End the process as its agent does: by closing its input."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(90)
        finally:
            if self.process.poll() is None:
                self.kill()
            for reader in self._readers:
                reader.join(10)
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            self.process.stdout.close()
            self.process.stderr.close()


def order(pool_: Path, store: Path | str, attempt: str, **more: Any) -> WriteRequest:
    """Return a write request to a node that writes alone and may commit.

    Args:
        pool_: folder of the node's slots.
        store: checkpoint directory.
        attempt: id of the attempt.
        more: other fields of the request.
    """
    known = {
        "attempt": attempt,
        "step": 7,
        "round": 1,
        "world": 1,
        "ranks": [0],
        "pool": str(pool_),
        "dir": str(store),
        "job": JOB,
        "node": "n0",
        "writers": ["n0"],
        "grant": 0,
        "deadline_s": 120.0,
    }
    return WriteRequest(**known | more)


def load_with_torch(where: str, shapes: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, Any]:
    """Return what torch loads from a checkpoint, in a process without DLRover.

    Args:
        where: path of the checkpoint.
        shapes: shape and dtype of each tensor.
    """
    import torch

    subprocess.run(
        [sys.executable, PROGRAMS / "load_with_torch.py", where, json.dumps(shapes)],
        check=True,
        timeout=240,
        cwd="/",
    )
    loaded: dict[str, Any] = torch.load(where + ".loaded", weights_only=True)
    loaded["__nested__"] = torch.load(where + ".pt", weights_only=False)
    return loaded


def verify(store: CheckpointDirectory, manifest: Manifest) -> None:
    """Check that all bytes of a manifest exist and are those that were staged."""
    for written in manifest.chunks:
        data = bytearray(written.chunk.nbytes)
        store.read_into(manifest, written.file, written.position, memoryview(data))
        assert digest(bytes(data)) == written.xxh3, written
    for item in manifest.objects:
        data = bytearray(item.nbytes)
        store.read_into(manifest, item.file, item.position, memoryview(data))
        assert digest(bytes(data)) == item.xxh3, item


@contextmanager
def no_more_files() -> Iterator[None]:
    """Set the limit of open files to 0 during a block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
