"""Documents of checkpoints: each is read as it was written; an invalid one is refused in words."""

import json
from math import isnan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.manifest import Manifest, WrittenChunk, WrittenObject
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.persister import (
    CancelWrite,
    CommitGrant,
    PersisterLine,
    WatchLease,
    WriteReply,
    WriteRequest,
    read_line,
)
from dlrover_py.protocol.slots import (
    ITEM_BYTES,
    Layout,
    SlotHeader,
    SlotRegion,
    TensorChunk,
    decode_objects,
    encode_objects,
)
from dlrover_py.protocol.transfer import (
    BytesRequest,
    CandidatesRequest,
    ConnectRequest,
    CopiedRequest,
    LocationsRequest,
    SlotsRequest,
    TransferRequest,
    read_request,
)
from tests.schemas import documents

LINES: list[type[PersisterLine]] = [WriteRequest, CommitGrant, CancelWrite, WatchLease, WriteReply]
REQUESTS: list[type[TransferRequest]] = [
    SlotsRequest,
    BytesRequest,
    CopiedRequest,
    CandidatesRequest,
    LocationsRequest,
    ConnectRequest,
]

TEXT = st.text(st.characters(), max_size=9)
"""Also halves of surrogate pairs, as in the names of files that are no UTF-8."""
NUMBERS = st.sampled_from([0, 1, 1 << 53]) | st.integers(0, 9)
SIZES = st.sampled_from([0, 1, (1 << 62) - 1]) | st.integers(0, 99)
DIGESTS = st.integers(0, (1 << 64) - 1)
FILES = st.sampled_from(["__0_0.distcp", "raw", "x" * 255])


@st.composite
def chunks(draw: st.DrawFn) -> TensorChunk:
    rows = draw(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=3))
    return TensorChunk(
        draw(TEXT),
        draw(st.sampled_from(sorted(ITEM_BYTES))),
        tuple(size for size, _, _ in rows),
        tuple(size + before + after for size, before, after in rows),
        tuple(before for _, before, _ in rows),
    )


@st.composite
def headers(draw: st.DrawFn) -> SlotHeader:
    size, world = draw(SIZES), draw(st.integers(1, 1 << 53))

    def region() -> SlotRegion:
        at = draw(st.integers(0, size))
        return SlotRegion(at, draw(st.integers(0, size - at)), draw(DIGESTS))

    return SlotHeader(
        job=draw(st.text(max_size=9)),
        step=Step(draw(NUMBERS)),
        round=Round(draw(NUMBERS)),
        timeline=Timeline(draw(NUMBERS)),
        world=world,
        rank=draw(st.integers(0, world - 1)),
        part=draw(st.text(max_size=32)),
        write_id=draw(st.text(max_size=9)),
        size=size,
        private_offset=draw(SIZES),
        table=region(),
        digests=region(),
        objects=region(),
        persist=draw(st.booleans()),
        private_only=draw(st.booleans()),
        copy=draw(st.booleans()),
        copied=draw(st.booleans()),
        metric=draw(st.none() | st.floats(allow_nan=False)),
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    written = draw(st.lists(st.builds(WrittenChunk, chunks(), FILES, SIZES, DIGESTS), max_size=3))
    objects = draw(
        st.lists(st.builds(WrittenObject, TEXT, FILES, SIZES, SIZES, DIGESTS), max_size=3)
    )
    files = {w.file for w in written} | {o.file for o in objects}
    return Manifest(
        step=Step(draw(NUMBERS)),
        attempt=draw(TEXT),
        job=draw(TEXT),
        round=Round(draw(NUMBERS)),
        timeline=Timeline(draw(NUMBERS)),
        world=draw(NUMBERS),
        folder=draw(TEXT),
        at=draw(st.floats(allow_nan=False, allow_infinity=False)),
        number=draw(NUMBERS),
        term=draw(NUMBERS),
        chunks=tuple(written),
        objects=tuple(objects),
        metric=draw(st.none() | st.floats()),
        notes=tuple(draw(st.lists(TEXT, max_size=2))),
        void=draw(TEXT),
        index=draw(DIGESTS),
        sums=tuple((draw(SIZES), draw(DIGESTS)) for _ in files),
    )


@given(st.sampled_from(LINES).flatmap(lambda kind: documents(kind).map(kind.model_validate)))
def test_a_line_of_a_persister_is_read_as_it_was_written(line: PersisterLine) -> None:
    assert read_line(line.encode()) == line
    more = json.loads(line.encode()) | {"news": 1}
    assert read_line(json.dumps(more).encode()) == line


@given(st.sampled_from(REQUESTS).flatmap(lambda kind: documents(kind).map(kind.model_validate)))
def test_a_request_for_a_transfer_is_read_as_it_was_written(request: TransferRequest) -> None:
    assert read_request(request.encode()) == request


@given(headers())
def test_a_header_is_read_as_it_was_written(header: SlotHeader) -> None:
    assert SlotHeader.decode(header.encode()) == header


@given(st.lists(chunks(), max_size=4), st.dictionaries(TEXT, st.binary(max_size=9)))
def test_a_layout_and_objects_are_read_as_they_were_written(
    several: list[TensorChunk], objects: dict[str, bytes]
) -> None:
    layout = Layout(several)
    assert list(Layout.decode(layout.encode())) == list(layout)
    assert decode_objects(encode_objects(list(objects.items()))) == objects


@given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest: Manifest) -> None:
    found = Manifest.decode(manifest.encode())
    if manifest.metric is not None and isnan(manifest.metric):
        assert found.metric is not None
        assert isnan(found.metric)
        return
    assert found == manifest


HEADER = {
    "job": "j", "step": 1, "round": 1, "timeline": 0, "world": 1, "rank": 0, "part": "p",
    "write_id": "f", "size": 9, "private_offset": 0, "format": 1,
    "table": {"at": 0, "nbytes": 2, "xxh3": 0},
    "digests": {"at": 2, "nbytes": 0, "xxh3": 0},
    "objects": {"at": 2, "nbytes": 7, "xxh3": 0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "1"}, "its step: .*integer, found '1'"),
        ({"step": True}, "its step: .*integer, found True"),
        ({"round": -1}, "its round: .*greater than or equal to 0, found -1"),
        ({"timeline": (1 << 53) + 1}, "its timeline: .*less than or equal to"),
        ({"persist": "yes"}, "its persist: .*boolean, found 'yes'"),
        ({"part": "x" * 33}, "its part: .*at most 32 characters"),
        ({"table": [0, 2, 0]}, "its table: .*"),
        ({"table": {"at": 8, "nbytes": 2, "xxh3": 0}}, "2 bytes at 8 are beyond its 9"),
        ({"rank": 1}, "it is of rank 1 in a world of 1"),
        ({"format": "1"}, "its format: .*integer, found '1'"),
        ({"format": 0}, "its format: .*greater than or equal to 1, found 0"),
        ({"format": 2, "step": None}, "it has format 2, .* reads formats up to 1: use a version"),
    ],
)
def test_an_invalid_header_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    SlotHeader.decode(json.dumps(HEADER).encode())
    with pytest.raises(ValueError, match=words):
        SlotHeader.decode(json.dumps(HEADER | change).encode())
