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
import re
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

from dlrover_agent.warm import zygote
from dlrover_agent.warm.pool import ImportRecipe
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import DamagedDataError, ShmSlot
from dlrover_py.checkpoint.transfer import TransferConnection
from dlrover_py.cli import jobfile
from dlrover_py.master.journal_store import FileJournalStore
from dlrover_py.protocol import json_text
from dlrover_py.protocol.agents import AgentReport
from dlrover_py.protocol.errors import CheckpointError, ConfigError, DLRoverError
from dlrover_py.protocol.lease import WriterLease
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.persister import read_line
from dlrover_py.protocol.sdk import read_worker_request
from dlrover_py.protocol.shares import NodeShares, WritePlan, WrittenFiles
from dlrover_py.protocol.slots import PAGE, Layout, SlotRegion, decode_objects, encode_objects
from dlrover_py.protocol.workers import WorkerProgress, read_progress
from dlrover_py.protocol.zygote import (
    LENGTH,
    ForkAnswer,
    ZygoteConfig,
    ZygoteFitness,
    encode,
    read_request,
    read_task,
)
from dlrover_py.trainer import torch_compat
from tests.ids import checkpoint_id

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


def again(kind: Any, read: Callable[[bytes], Any] | None = None) -> Callable[[bytes], object]:
    """What was taken can be written, and is the same when it is read."""

    def parse(data: bytes) -> None:
        found = (read or kind.model_validate_json)(data)
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
        store = FileJournalStore(path)
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
        def __init__(self, slot: ShmSlot) -> None:
            self.path, self.header, self._slot = slot.path, slot.header, slot

        def region(self, region: SlotRegion) -> bytes:
            data = os.pread(self._slot.fd, region.nbytes, region.at)
            return self._slot.region(SlotRegion(region.at, region.nbytes, digest(data)))

    with ShmSlot(path) as opened:
        found = shm.contents(Whole(opened))
        assert found.header.size <= opened.size
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
    for ask in (
        TransferConnection.slots,
        lambda link: link.candidates(1),
        lambda link: link.locations(checkpoint_id(1, 1, 1)),
        lambda link: link.contents("0.0", "f"),
        lambda link: link.connect("h", 1),
        lambda link: link.read_into("0.0", "f", 0, memoryview(bytearray(9))),
    ):
        ours, theirs = socket.socketpair()
        theirs.sendall(data[:4096] + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        with theirs, TransferConnection(ours, "depot") as link, contextlib.suppress(DLRoverError):
            ask(link)


def message(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data[:4096])
        theirs.shutdown(socket.SHUT_WR)
        body, _ = zygote.receive(ours)
        for decode in (
            read_request,
            read_task,
            ZygoteConfig.decode,
            ZygoteFitness.decode,
            ForkAnswer.decode,
        ):
            with contextlib.suppress(ValueError):
                found = decode(body)
                assert decode(encode(found)) == found


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
        torch_compat.read_metadata(data)
    finally:
        seen, done = done, None
        assert not seen
        assert set(sys.modules) == modules


SUMMARY: dict[str, Any] = {
    "job": "j", "step": 1, "round": 1, "timeline": 0, "world": 1, "rank": 0, "part": "p",
    "write_id": "f", "size": PAGE + 64, "private_offset": PAGE, "format": 1, "metric": 0.5,
    "table": {"at": PAGE, "nbytes": 2, "xxh3": 0},
    "digests": {"at": PAGE + 2, "nbytes": 0, "xxh3": 0},
    "objects": {"at": PAGE + 2, "nbytes": 20, "xxh3": 0},
}  # fmt: skip
ROW = ["w", "float32", [2], [2], [0]]
OBJECTS = encode_objects([("e", b"4")])
MANIFEST = {
    "step": 1, "attempt": "a", "job": "j", "round": 1, "timeline": 0, "world": 1,
    "folder": "step-1.a", "at": 1.5, "chunks": [[ROW, "f", 0, 7]],
    "objects": [["o", "f", 8, 1, 7]], "notes": ["n"], "format": 1,
}  # fmt: skip
SHARE = {
    "rank": 0, "private_only": False, "metric": 0.5, "chunks": [ROW], "digests": [7],
    "objects": [["o", 1, 7]],
}  # fmt: skip
FILES = {
    "chunks": [[0, 0, 0, 9, 0, 7]], "objects": [[0, "o", 8, 1, 7]], "files": [["f", 9, 7]],
    "format": 1,
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
    worker: {replicas: 1, template: {spec: {containers: [{name: main, image: i, command: [a]}]}}}
"""
LINES = [
    {"kind": "write", "attempt": "a", "step": 1, "round": 1, "timeline": 0, "world": 1,
     "ranks": [0], "pool": "/a", "dir": "/d", "job": "j", "node": "n", "keep": {"newest": 3}},
    {"kind": "grant", "attempt": "a", "term": 1},
    {"kind": "reply", "attempt": "a", "phase": "done",
     "stored": {"step": 1, "round": 1, "where": "/c", "at": 1.5, "number": 1}},
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
RECIPE = coded({"version": 1, "lines": [["env", "a", "b"], ["import", "a", None]]})
ZYGOTE = coded(
    {"workers": [{"argv": ["python", "-u", "x"], "env": {"A": "1"}}]},
    {"store": 1},
    {"pids": [1], "refusal": ""},
    {"unfit": "", "blame": ["a"], "modules": 1},
    {"socket": 1, "agent": 1, "recipe": [["env", "a", None]], "per_rank": ["RANK"]},
)
ANSWERS = [
    told(coded([["0.0", SUMMARY | {"write_id": "f"}]])[0]),
    told(b"x" * 9),
    *(
        told(document)
        for document in coded(
            {"candidates": [{"step": 1, "round": 1, "timeline": 0, "world": 1}]},
            {"locations": [{"rank": 0, "node": "n", "addr": "h", "port": 1, "part": "p"}]},
        )
    ),
    *coded({"error": "e", "code": "retry later"}, {}, {"nbytes": 1 << 61}),
]


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH, "big") + body


def packed(data: bytes) -> None:
    ImportRecipe.from_wire(zlib.compress(data))


TARGETS = {
    "report": Target(again(AgentReport), (ValueError,), coded(REPORT)),
    "news": Target(again(WorkerProgress, read_progress), (ValueError,), coded(NEWS)),
    "order": Target(
        lambda data: read_worker_request(data).stop + "",
        (ValueError,),
        coded({"stop": "x", "loader": {"number": 3, "micro_batch": 2}}),
    ),
    "jobfile": Target(in_file(jobfile.load_all), (ConfigError,), [JOB]),
    "journal": Target(in_file(journal), (ConfigError,), coded({"job": "j", "term": 1})),
    "slot": Target(
        in_file(slot), (DamagedDataError,), [s + b"\0[]" + OBJECTS for s in coded(SUMMARY)]
    ),
    "layout": Target(Layout.decode, (ValueError,), coded([ROW])),
    "objects": Target(decode_objects, (ValueError,), [OBJECTS]),
    "manifest": Target(manifest, (ValueError,), coded(MANIFEST)),
    "lease": Target(WriterLease.decode, (ValueError,), [WriterLease("j", "n", "a").encode()]),
    "shares": Target(
        NodeShares.decode,
        (ValueError,),
        coded({"shares": [SHARE], "format": 1}),
    ),
    "plan": Target(
        WritePlan.decode, (ValueError,), [WritePlan({"n": {0: [0]}}, {"n": {0: ["o"]}}).encode()]
    ),
    "files": Target(WrittenFiles.decode, (ValueError,), coded(FILES)),
    "lines": Target(lines, (ValueError,), coded(*LINES)),
    "answers": Target(answered, (), ANSWERS),
    "recipe": Target(ImportRecipe.from_wire, (ValueError,), list(map(zlib.compress, RECIPE))),
    "unpacked": Target(packed, (ValueError,), RECIPE),
    "messages": Target(message, (EOFError, OSError), list(map(framed, ZYGOTE))),
    "requests": Target(lambda data: message(framed(data[:4000])), (), ZYGOTE),
    "metadata": Target(metadata, (CheckpointError,), [pickle.dumps(METADATA, n) for n in (2, 4)]),
}
DEEP = [b"[" * 3_000, b'{"a":' * 1_500]
ODD: list[Any]
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

    # no assert: any other exception than a refusal is raised
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
    assert WorkerProgress.model_validate_json(metrics % b"0.5").metrics == {"loss": 0.5}
    for odd in (b"NaN", b"Infinity", b"1e999"):
        with pytest.raises(ValueError, match="finite"):
            WorkerProgress.model_validate_json(metrics % odd)


@pytest.mark.parametrize("deep", [b"[" * 1_000_000, b'{"a":' * 200_000, "[" * 1_000_000])
def test_json_without_an_end_is_bad_input(deep: str | bytes) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        json_text.decoded(deep)


OWN_DECODERS = {
    "dlrover_py/protocol/json_text.py",
    "dlrover_py/kubernetes/wire.py",  # cuts what is nested too deeply off, and reads the rest
    "agent/dlrover_agent/workers/error_file.py",  # one string, which has no depth
}


def test_json_of_others_is_decoded_in_one_place() -> None:
    root = Path(__file__).parents[2]
    sources = [p for top in ("dlrover_py", "agent", "operator") for p in (root / top).rglob("*.py")]
    found = {
        str(p.relative_to(root)) for p in sources if re.search(r"json\.loads?\(", p.read_text())
    }
    assert found == OWN_DECODERS
