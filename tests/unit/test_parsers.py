"""What comes from outside of a process, parsed: whatever it is, it is good or refused in words.

Each parser may raise what it says and nothing else, and takes no memory because a length says so.
Inputs are good documents in which something was changed, and any bytes. tests/fuzz.py looks for
longer, led by the lines that are reached.
"""

import asyncio
import codecs
import contextlib
import copy
import json
import os
import pickle
import resource
import socket
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any, NamedTuple

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from dlrover_agent import zygote
from dlrover_agent.warm import Recipe
from dlrover_py import arena
from dlrover_py.arena import PAGE, Damaged, Slot
from dlrover_py.cli import jobfile
from dlrover_py.depot import Link
from dlrover_py.master.store import FileStore
from dlrover_py.protocol import checkpoint
from dlrover_py.protocol.agents import AgentReport
from dlrover_py.protocol.checkpoint import Manifest, read_line
from dlrover_py.protocol.errors import CheckpointError, ConfigError, DLRoverError
from dlrover_py.protocol.workers import News
from dlrover_py.trainer import foreign
from dlrover_py.trainer.session import _stop_in

ROOM = 1 << 29
"""Bytes of address space that a parser may take beyond what the process has."""


class Target(NamedTuple):
    """A parser."""

    parse: Callable[[bytes], object]
    says: tuple[type[Exception], ...]
    """What it may raise."""
    seeds: list[bytes]


def digest(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def again(kind: Any) -> Callable[[bytes], object]:
    """What was taken can be written, and is the same when it is read."""

    def parse(data: bytes) -> None:
        found = kind.model_validate_json(data)
        assert kind.model_validate_json(found.model_dump_json()) == found

    return parse


def in_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def parse(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal.json"
            path.write_bytes(data)
            read(path)

    return parse


def journal(path: Path) -> None:
    async def read() -> None:
        store = FileStore(path)
        try:
            await store.acquire()
        finally:
            await store.release()

    asyncio.run(read())


def slot(path: Path) -> None:
    """The first page's sum is right, as those of the tables are: they are no signature."""
    words, _, tables = path.read_bytes().partition(b"\0")
    head = b"DLRSLOT1" + len(words).to_bytes(8, "little") + digest(words).to_bytes(8, "little")
    path.write_bytes((head + words).ljust(PAGE, b"\0") + tables.ljust(64, b"\0"))

    class Whole:
        def __init__(self, slot: Slot) -> None:
            self.path, self.summary, self._slot = slot.path, slot.summary, slot

        def region(self, region: checkpoint.Region) -> bytes:
            data = os.pread(self._slot.fd, region.nbytes, region.at)
            return self._slot.region(checkpoint.Region(region.at, region.nbytes, digest(data)))

    with Slot(path) as opened:
        found = arena.contents(Whole(opened))
        assert found.summary.size <= opened.size
        assert Path(path).stat().st_size >= sum(map(len, found.objects.values()))


def manifest(data: bytes) -> None:
    found = Manifest.decode(b'{"xxh3": "%016x", "manifest": %s}\n' % (digest(data), data))
    assert Manifest.decode(found.encode()) == found
    assert found.nbytes >= 0


def lines(data: bytes) -> None:
    found = read_line(data)
    assert read_line(found.encode()) == found


def answered(data: bytes) -> None:
    """A depot that says anything."""
    for ask in (Link.slots, lambda link: link.candidates(1), lambda link: link.holders(1, 1, 1),
                lambda link: link.contents("0.0", "f"), lambda link: link.connect("h", 1),
                lambda link: link.read_into("0.0", "f", 0, memoryview(bytearray(9)))):  # fmt: skip
        ours, theirs = socket.socketpair()
        theirs.sendall(data[:4096] + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        with theirs, Link(ours, "depot") as link, contextlib.suppress(DLRoverError):
            ask(link)


def message(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        zygote.receive(ours)


BOX = m.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
TENSOR = m.TensorStorageMetadata(m.TensorProperties(torch.float32), torch.Size([2]), [BOX])
METADATA = m.Metadata(
    {"w": TENSOR, "o": m.BytesStorageMetadata()},
    {"w": ("w",), "o": ("o", 0)},
    {m.MetadataIndex("w", torch.Size([0])): _StorageInfo("__0_0.distcp", 0, 9), "o": PosixPath()},
)
done: list[str] | None = None


def _done(event: str, _: object) -> None:
    if done is not None and event not in ("pickle.find_class", "import", "object.__getattr__"):
        done.append(event)


for codec in ("ascii", "latin_1", "raw_unicode_escape", "unicode_escape", "utf_8"):
    codecs.lookup(codec)  # a pickle's texts: the first one of a kind would load its module
sys.addaudithook(_done)


def metadata(data: bytes) -> None:
    """What it may name is made of it, and nothing else happens: no file, process, module."""
    global done
    modules, done = set(sys.modules), []
    try:
        foreign._read(data)
    finally:
        seen, done = done, None
        assert not seen
        assert set(sys.modules) == modules


SUMMARY: dict[str, Any] = {
    "job": "j", "step": 1, "round": 1, "lap": 0, "world": 1, "rank": 0, "part": "p", "fill": "f",
    "size": PAGE + 64, "private_at": PAGE, "format": 1, "metric": 0.5,
    "table": {"at": PAGE, "nbytes": 2, "xxh3": 0},
    "digests": {"at": PAGE + 2, "nbytes": 0, "xxh3": 0},
    "objects": {"at": PAGE + 2, "nbytes": 20, "xxh3": 0},
}  # fmt: skip
ROW = ["w", "float32", [2], [2], [0]]
OBJECTS = checkpoint.encode_objects([("e", b"4")])
MANIFEST = {
    "step": 1, "attempt": "a", "job": "j", "round": 1, "lap": 0, "world": 1, "folder": "step-1.a",
    "at": 1.5, "files": ["f"], "pieces": [[*ROW, 0, 0, 7]], "objects": [["o", 0, 8, 1, 7]],
    "notes": ["n"], "format": 1,
}  # fmt: skip
REPORT = {
    "boot_id": "b" * 16, "seq": 1, "offer": {"addr": "h", "port": 1}, "pids": [1],
    "progress": {"step": 1, "started_at_step": 0, "first_step_after_s": 0.5,
                 "metrics": {"loss": 0.5}},
    "memory": [{"step": 1, "round": 1, "world": 1, "ranks": {"0": "p"}}],
    "stored": {"step": 1, "where": "/c", "at": 1.5},
}  # fmt: skip
JOB = b"""apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: j}
spec:
  replicaSpecs:
    worker: {replicas: 1, template: {spec: {containers: [{name: main, command: [a]}]}}}
"""
LINES = [
    {"kind": "order", "attempt": "a", "step": 1, "round": 1, "lap": 0, "world": 1, "ranks": [0],
     "arena": "/a", "dir": "/d", "job": "j", "node": "n", "keep": {"newest": 3}},
    {"kind": "grant", "attempt": "a", "term": 1},
    {"kind": "answer", "attempt": "a", "phase": "done", "stored": [1, 1, 0, "/c", 1.5, 1]},
]  # fmt: skip


def coded(*documents: object) -> list[bytes]:
    return [json.dumps(document).encode() for document in documents]


def told(body: bytes) -> bytes:
    return b'{"nbytes":%d}\n%s{"stands":true}\n' % (len(body), body)


NEWS = {
    "round": 1,
    "local_rank": 0,
    "metrics": {"a": 0.5},
    "store": {"dir": "/c", "keep": {"a": 1}},
}
LIST = coded({}, [1])
ANSWERS = [
    told(coded([["0.0", SUMMARY | {"fill": "f"}]])[0]),
    told(b"x" * 9),
    *coded({"candidates": [[1, 1, 0, 1]]}, {"holders": [[0, "n", "h", 1, "p", False]]}),
    *coded({"error": "e", "code": "trouble"}, {"ok": True}, {"nbytes": 1 << 61}),
]


def packed(data: bytes) -> None:
    Recipe.from_wire(zlib.compress(data))


TARGETS = {
    "report": Target(again(AgentReport), (ValueError,), coded(REPORT)),
    "news": Target(again(News), (ValueError,), coded(NEWS)),
    "order": Target(lambda data: _stop_in(data) + "", (), coded({"stop": "x"})),
    "jobfile": Target(in_file(jobfile.load_all), (ConfigError,), [JOB]),
    "journal": Target(in_file(journal), (ConfigError,), coded({"job": "j", "term": 1})),
    "slot": Target(in_file(slot), (Damaged,), [s + b"\0[]" + OBJECTS for s in coded(SUMMARY)]),
    "layout": Target(checkpoint.Layout.decode, (ValueError,), coded([ROW])),
    "objects": Target(checkpoint.decode_objects, (ValueError,), [OBJECTS]),
    "manifest": Target(manifest, (ValueError,), coded(MANIFEST)),
    "lines": Target(lines, (ValueError,), coded(*LINES)),
    "answers": Target(answered, (), ANSWERS),
    "recipe": Target(Recipe.from_wire, (ValueError,), [zlib.compress(b'[["env", "a", "b"]]')]),
    "unpacked": Target(packed, (ValueError,), coded([["import", "a", "b"]])),
    "messages": Target(message, (EOFError, OSError), [len(b).to_bytes(4, "big") + b for b in LIST]),
    "metadata": Target(metadata, (CheckpointError,), [pickle.dumps(METADATA, n) for n in (2, 4)]),
}
DEEP = [b"[" * 3_000, b'{"a":' * 1_500]
ODD = [None, True, -1, 0, 7, 1 << 62, 1 << 80, 1.5, float("nan"), float("inf"), "", "x", "/", "0",
       "\0", "\ud800", [], {}, [[]], [-1], ["x"], {"": 0}, [None] * 9]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container of a document, with each key or index in it."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in list(inside):
        yield value, key
        if isinstance(below, dict | list):
            yield from places(below)


@st.composite
def changed(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """A good document with something odd in it; of another form: with other bytes in it."""
    seed = draw(st.sampled_from(seeds))
    head, cut, tail = seed.partition(b"\0")
    try:
        document = [json.loads(head)]
    except ValueError:
        data = bytearray(seed)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(data)))
            data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=9))
        return bytes(data)
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(list(places(document))))
        if isinstance(holder, dict) and draw(st.booleans()) and draw(st.booleans()):
            del holder[key]
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return json.dumps(document[0] if document else None).encode() + cut + tail


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("name", TARGETS)
def test_it_is_good_or_refused(name: str) -> None:
    target = TARGETS[name]

    def one(data: bytes) -> None:
        with little_room(), contextlib.suppress(*target.says):
            target.parse(data)

    for seed in target.seeds:
        target.parse(seed)  # these are good
    for deep in DEEP:
        one(deep)

    @settings(
        max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(data=changed(target.seeds) | changed(target.seeds) | st.binary(max_size=200))
    def tried(data: bytes) -> None:
        one(data)

    tried()


class Evil:
    def __init__(self, made: tuple[Any, ...]) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made


@pytest.mark.parametrize(
    "document",
    [
        pickle.dumps(Evil((os.system, ("true",)))),
        pickle.dumps(Evil((eval, ("1",)))),
        b"ctorch\n_dynamo\n.",
        b"ctorch\nload\n.",
        b"\x80\x04\x8c\x07pathlib\x8c\x09Path.home\x93)R.",
        # State of a class, of a function, of a constant: it would be the whole process's.
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}\x8c\x01xK\x01s\x86b.",
        b"\x80\x04ctorch.serialization\n_get_layout\n}\x8c\x01xK\x01sb.",
        b"\x80\x04ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\x00\x85R"
        b"}\x8c\x01xK\x01sb.",
        # Memory that is claimed, in a length and in a number of the memo.
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x82\x01.",
    ],
)
def test_of_a_strangers_metadata_nothing_is_called_or_changed(document: bytes) -> None:
    with little_room(), pytest.raises(CheckpointError):
        metadata(document)
    assert not hasattr(m.Metadata, "x")
    assert not hasattr(m._MEM_FORMAT_ENCODING(0), "x")
    assert not hasattr(torch.serialization._get_layout, "x")


def test_a_number_that_json_does_not_have_is_refused_at_once() -> None:
    """Written on, it would be null: to its reader a fault of the whole report, or journal."""
    metrics = b'{"round":1,"local_rank":0,"step":3,"metrics":{"loss":%s}}'
    assert News.model_validate_json(metrics % b"0.5").metrics == {"loss": 0.5}
    for odd in (b"NaN", b"Infinity", b"1e999"):
        with pytest.raises(ValueError, match="finite"):
            News.model_validate_json(metrics % odd)
