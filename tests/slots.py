"""Hand-made slots, and persisters that write them: the trainer and the agent as these see them."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrover_py import arena
from dlrover_py.arena import Slot, digest
from dlrover_py.protocol.checkpoint import (
    Answer,
    Cancel,
    Grant,
    Layout,
    Manifest,
    Order,
    Phase,
    Piece,
    Summary,
    encode_objects,
    read_line,
)
from dlrover_py.storage import Store

JOB = "job-uid-1"


def stage(
    path: Path,
    tensors: Sequence[tuple[Piece, bytes]],
    objects: Mapping[str, bytes] | None = None,
    *,
    rank: int = 0,
    world: int = 1,
    step: int = 7,
    **facts: Any,
) -> Summary:
    """Fill and seal a slot as a worker does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    said = {piece.box: data for piece, data in tensors}
    layout = Layout(piece for piece, _ in tensors)
    known = {"job": JOB, "round": 1, "lap": 0, "part": "p"}
    with Slot(path, write=True) as slot:
        assert slot.lock(shared=False)
        slot.reserve(layout.end + arena.SPARE)
        slot.begin()
        sums = []
        for piece, at in layout:
            data = said[piece.box]
            assert len(data) == piece.nbytes, piece
            source = ctypes.create_string_buffer(data, len(data) or 1)
            target = slot.view()[at : at + piece.nbytes]
            sums.append(arena.copy_summed(ctypes.addressof(source), target))
        return slot.seal(
            layout.encode(),
            sums,
            encode_objects(list((objects or {}).items())),
            layout.end,
            private_at=layout.private_at,
            rank=rank,
            world=world,
            step=step,
            **{**known, **facts},
        )


def full(key: str, shape: tuple[int, ...], dtype: str = "float32") -> Piece:
    """A piece that is a whole tensor."""
    return Piece(key, dtype, shape, shape, (0,) * len(shape))


def rows(key: str, first: int, count: int, of: int, width: int) -> Piece:
    """Some rows of a matrix, as FSDP shards it."""
    return Piece(key, "float32", (count, width), (of, width), (first, 0))


def raw(tensor: Any) -> bytes:
    """A tensor's bytes."""
    import torch

    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def saved(value: object) -> bytes:
    """An object as slots have it."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Persister:
    """``python -m dlrover_py.persist``, as an agent has it."""

    def __init__(self, *, preexec: Any = None, env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dlrover_py.persist"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=preexec,
            env={**os.environ, **(env or {})},
        )
        self._answers: queue.Queue[Answer] = queue.Queue()
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
            assert isinstance(answer, Answer)
            self._answers.put(answer)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.decode())

    def send(self, message: Order | Grant | Cancel) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(message.encode())
        self.process.stdin.flush()

    def next(self, *phases: Phase, attempt: str, timeout: float = 150) -> Answer:
        """The next answer of one of these phases; others of the attempt are passed over."""
        deadline = time.monotonic() + timeout
        while True:
            answer = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
            if answer.attempt == attempt and answer.phase in phases:
                return answer

    def end(self, attempt: str, timeout: float = 150) -> Answer:
        """How an attempt has ended."""
        return self.next(Phase.DONE, Phase.FAILED, attempt=attempt, timeout=timeout)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def close(self) -> None:
        """End it as its owner does: by closing its input."""
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


def order(arena_: Path, store: Path | str, attempt: str, **more: Any) -> Order:
    """An order to one node that writes alone, and may commit."""
    made = Order(
        attempt=attempt,
        step=7,
        round=1,
        lap=0,
        world=1,
        ranks=(0,),
        arena=str(arena_),
        dir=str(store),
        job=JOB,
        node="n0",
        writers=("n0",),
        grant=0,
        deadline_s=120.0,
    )
    return replace(made, **more)


LOADER = """
import json, sys, warnings, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
warnings.simplefilter("ignore")
where, shapes = sys.argv[1], json.loads(sys.argv[2])
types = {key: getattr(torch, dtype) for key, (_, dtype) in shapes.items()}
state = {key: torch.empty(shape, dtype=types[key]) for key, (shape, _) in shapes.items()}
dcp.load(state, checkpoint_id=where)
dcp_to_torch_save(where, where + ".pt")
torch.save(state, where + ".loaded")
"""


def load_with_torch(where: str, shapes: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, Any]:
    """What plain torch reads, in a process that knows nothing of us."""
    import torch

    subprocess.run(
        [sys.executable, "-c", LOADER, where, json.dumps(shapes)],
        check=True,
        timeout=240,
        cwd="/",
    )
    loaded: dict[str, Any] = torch.load(where + ".loaded", weights_only=True)
    loaded["__nested__"] = torch.load(where + ".pt", weights_only=False)
    return loaded


def verify(store: Store, manifest: Manifest) -> None:
    """Every byte that the manifest speaks of is there, and is what was staged."""
    for written in manifest.pieces:
        data = bytearray(written.piece.nbytes)
        store.read_into(manifest, written.file, written.position, memoryview(data))
        assert digest(bytes(data)) == written.xxh3, written
    for item in manifest.objects:
        data = bytearray(item.nbytes)
        store.read_into(manifest, item.file, item.position, memoryview(data))
        assert digest(bytes(data)) == item.xxh3, item


@contextmanager
def no_more_files() -> Iterator[None]:
    """No further file can be opened, nor mapped."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
