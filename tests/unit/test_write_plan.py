"""The documents by which several nodes write one checkpoint, and what is decided from them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.checkpoint.directory import FolderBackend
from dlrover_py.checkpoint.exchange import PartsFolder
from dlrover_py.checkpoint.plan import IncompleteCheckpointError, assemble, file_of, make_plan
from dlrover_py.protocol.documents import Document
from dlrover_py.protocol.errors import SupersededError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.persister import WriteRequest
from dlrover_py.protocol.shares import (
    NodeShares,
    SharedObject,
    StoredChunk,
    StoredObject,
    WriteFailure,
    WritePlan,
    WriteShare,
    WrittenFile,
    WrittenFiles,
)
from dlrover_py.protocol.slots import TensorChunk
from tests.slots import full, rows
from tests.unit.test_checkpoint_documents import DIGESTS, FILES, NUMBERS, SIZES, TEXT, chunks

ORDER = WriteRequest(
    attempt="a1",
    step=7,
    round=1,
    timeline=0,
    world=2,
    ranks=[0],
    writers=["n0", "n1"],
    pool="/pool",
    dir="/ckpt",
    job="u1",
    node="n0",
)


def share(rank: int, *pieces: TensorChunk) -> WriteShare:
    return WriteShare(rank, False, None, pieces, tuple(range(len(pieces))), ())


# --- the documents ---


@st.composite
def shares(draw: st.DrawFn) -> WriteShare:
    pieces = draw(st.lists(chunks(), max_size=3))
    return WriteShare(
        draw(NUMBERS),
        draw(st.booleans()),
        draw(st.none() | st.floats(allow_nan=False)),
        tuple(pieces),
        tuple(draw(DIGESTS) for _ in pieces),
        tuple(draw(st.lists(st.builds(SharedObject, TEXT, SIZES, DIGESTS), max_size=2))),
    )


def by_node(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(TEXT, st.dictionaries(NUMBERS, st.lists(of, max_size=3)), max_size=3)


def some(*fields: st.SearchStrategy[Any], of: type) -> st.SearchStrategy[Any]:
    return st.lists(st.builds(of, *fields), max_size=3).map(tuple)


DOCUMENTS: st.SearchStrategy[Document] = st.one_of(
    st.builds(NodeShares, st.lists(shares(), max_size=3).map(tuple)),
    st.builds(WritePlan, by_node(NUMBERS), by_node(TEXT), st.lists(TEXT, max_size=2)),
    st.builds(
        WrittenFiles,
        some(NUMBERS, NUMBERS, SIZES, SIZES, SIZES, DIGESTS, of=StoredChunk),
        some(NUMBERS, TEXT, SIZES, SIZES, DIGESTS, of=StoredObject),
        some(FILES, SIZES, DIGESTS, of=WrittenFile),
    ),
    st.builds(WriteFailure, TEXT),
)


@given(DOCUMENTS)
def test_a_document_is_read_as_it_was_written(document: Document) -> None:
    assert type(document).decode(document.encode()) == document


SHARE: dict[str, Any] = {
    "rank": 0, "private_only": False, "metric": None, "digests": [7], "objects": [["o", 3, 7]],
    "chunks": [["w", "float32", [2], [2], [0]]],
}  # fmt: skip
DONE: dict[str, Any] = {
    "chunks": [[0, 0, 0, 64, 64, 7]], "objects": [[0, "o", 8, 3, 7]],
    "files": [["__0_0.distcp", 72, 7]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (NodeShares, {"shares": [SHARE | {"digests": []}]}, "0 digests of 1 chunks"),
        (NodeShares, {"shares": [SHARE | {"rank": -1}]}, r"its shares\.0\.rank: .*or equal to 0"),
        (
            NodeShares,
            {"shares": [SHARE | {"private_only": 1}]},
            r"its shares\.0\.private_only: .*boolean",
        ),
        (NodeShares, {"shares": [SHARE | {"chunks": [["w"]]}]}, r"its shares\.0\.chunks\.0"),
        (
            NodeShares,
            {"shares": [SHARE | {"chunks": [["w", "float32", [4], [2], [0]]]}]},
            "expected a chunk inside of its tensor",
        ),
        (NodeShares, [SHARE], "it is not valid"),
        (WritePlan, {"chunks": {"n0": {"x": [0]}}}, r"its chunks\.n0\.x"),
        (WritePlan, {"chunks": {"n0": {"0": [-1]}}}, r"its chunks\.n0\.0\.0: .*or equal to 0"),
        (WritePlan, {"chunks": {"n0": {"0": [True]}}}, r"its chunks\.n0\.0\.0: .*integer"),
        (WritePlan, {"objects": {"n0": {"0": [1]}}}, r"its objects\.n0\.0\.0: .*str"),
        (WrittenFiles, DONE | {"files": [["../x", 1, 1]]}, r"its files\.0\.0|its files\.0\.name"),
        (WrittenFiles, DONE | {"chunks": [[0, 0, 0, 1 << 62, 0, 7]]}, r"its chunks\.0"),
        (WriteFailure, {"why": 5}, "its why: "),
        (WriteFailure, "why", "it is not valid"),
    ],
)
def test_an_invalid_document_is_refused_in_words(
    kind: type[Document], values: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        kind.decode(json.dumps(values).encode())


ODD: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
VALUES: dict[type[Document], dict[str, Any]] = {
    NodeShares: {"shares": [SHARE]},
    WritePlan: {"chunks": {"n0": {"0": [0]}}, "objects": {"n0": {"0": ["o"]}}, "notes": ["x"]},
    WrittenFiles: DONE,
    WriteFailure: {"why": "x"},
}


@given(st.sampled_from(list(VALUES)), st.data())
def test_a_document_of_any_content_is_read_or_refused(
    kind: type[Document], data: st.DataObject
) -> None:
    """No other exception than ValueError is raised, and what is read can be written."""
    values = json.loads(json.dumps(VALUES[kind] | {"format": 1}))
    inside: Any = values
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(inside[key], dict | list) or not inside[key] or data.draw(st.booleans()):
            break
        inside = inside[key]
    inside[key] = data.draw(ODD)
    try:
        found = kind.decode(json.dumps(values).encode())
    except ValueError:
        return
    assert kind.decode(found.encode()) == found


# --- the plan ---


@given(data=st.data(), world=st.integers(1, 5), nodes=st.integers(1, 3))
def test_a_plan_has_each_box_written_once_and_shares_the_work(
    data: st.DataObject, world: int, nodes: int
) -> None:
    """Some tensors are sharded by rows, some copied to all ranks, of any sizes."""
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=8))
    layouts: dict[str, list[WriteShare]] = {f"n{node}": [] for node in range(nodes)}
    for rank in range(world):
        pieces = [full(f"rank/{rank}/rng", (2,), "uint8")]
        for number, (size, sharded) in enumerate(sizes):
            if sharded:
                pieces.append(rows(f"s{number}", rank * size, size, size * world, 3))
            else:
                pieces.append(full(f"c{number}", (size, 3)))
        sums = tuple(hash(p.box) % 1000 for p in pieces)
        objects = (SharedObject("epoch", 3, 1), SharedObject(f"rank/{rank}/x", 3, rank))
        layouts[f"n{rank % nodes}"].append(
            WriteShare(rank, False, None, tuple(pieces), sums, objects)
        )
    plan = make_plan(layouts)
    assert WritePlan.decode(plan.encode()) == plan
    written: list[TensorChunk] = []
    load = dict.fromkeys(layouts, 0)
    for node, found_shares in layouts.items():
        for one in found_shares:
            mine = [one.chunks[index] for index in plan.chunks[node][one.rank]]
            written += mine
            load[node] += sum(p.nbytes for p in mine)
            private = [p for p in mine if p.private]
            assert [p.key for p in private] == [f"rank/{one.rank}/rng"]
    boxes = [p.box for p in written]
    assert len(boxes) == len(set(boxes)) == world + sum(world if s else 1 for _, s in sizes)
    keys = [k for ranks in plan.objects.values() for found in ranks.values() for k in found]
    assert sorted(keys) == sorted(["epoch", *(f"rank/{r}/x" for r in range(world))])
    assert plan.notes == []
    if sizes and not any(sharded for _, sharded in sizes) and world >= nodes:
        largest = max(p.nbytes for p in written)
        assert max(load.values()) - min(load.values()) <= largest + 2 * world


def test_a_plan_refuses_what_is_not_whole() -> None:
    with pytest.raises(IncompleteCheckpointError, match="20 of its 60 elements"):
        make_plan({"n0": [share(0, rows("w", 0, 4, 12, 5))]})
    with pytest.raises(IncompleteCheckpointError, match="80 of its 60 elements"):
        make_plan({"n0": [share(0, rows("w", 0, 8, 12, 5)), share(1, rows("w", 4, 8, 12, 5))]})
    with pytest.raises(
        IncompleteCheckpointError, match=r"w: ranks disagree on what it is: float32\[12\], float32"
    ):
        make_plan({"n0": [share(0, full("w", (12,))), share(1, full("w", (13,)))]})
    plan = make_plan({"n0": [share(0, rows("w", 0, 8, 12, 5)), share(1, full("w", (12, 5)))]})
    assert plan.chunks == {"n0": {0: [], 1: [0]}}, "a whole one beside shards will do"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (WritePlan({"n0": {0: [2]}}), "the plan assigns tensor 2 of rank 0 to n0, whose slot does"),
        (WritePlan({}, {"n0": {0: ["x"]}}), "the plan assigns object 'x' of rank 0 to n0"),
    ],
)
def test_a_plan_that_does_not_fit_a_slot_is_refused(plan: WritePlan, words: str) -> None:
    mine = share(0, full("a", (2,)), full("b", (2,)))
    assert WritePlan({"n0": {0: [1]}}).part_of("n0", mine) == ([1], [])
    assert WritePlan({"n1": {0: [9]}}).part_of("n0", mine) == ([], []), "another node's part"
    with pytest.raises(ValueError, match=words):
        plan.part_of("n0", mine)


# --- the written checkpoint ---

LAYOUTS = {"n0": (share(0, rows("w", 0, 2, 4, 3)),), "n1": (share(1, rows("w", 2, 2, 4, 3)),)}
PLAN = WritePlan({"n0": {0: [0]}, "n1": {1: [0]}}, {"n0": {0: []}, "n1": {1: []}}, ["odd"])


def done(rank: int, index: int = 0, file: str = "") -> WrittenFiles:
    return WrittenFiles(
        (StoredChunk(rank, index, 0, 80, 56, 9),), (), (WrittenFile(file or file_of(rank), 90, 5),)
    )


def test_the_parts_of_all_nodes_make_one_checkpoint() -> None:
    made, extents = assemble(ORDER, PLAN, LAYOUTS, {"n1": done(1), "n0": done(0)}, at=1.5)
    assert [w.chunk.at for w in made.chunks] == [(0, 0), (2, 0)]
    assert made.files == [file_of(0), file_of(1)]
    assert made.sums == ((90, 5), (90, 5))
    assert (made.folder, made.notes, made.at) == ("step-7.a1", ("odd",), 1.5)
    assert set(extents.values()) == {(0, 80)}
    assert Manifest.decode(made.encode()) == made


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"n0": done(0)}, "1 tensors were written: expected 2"),
        ({"n0": done(0), "n1": done(0)}, "n1 has written tensor 0 of rank 0, which its slots do"),
        ({"n0": done(0), "n1": done(1, 3)}, "n1 has written tensor 3 of rank 1, which its slots"),
        ({"n0": done(0), "n1": done(1, file="x")}, "__1_0.distcp has tensors: expected its size"),
    ],
)
def test_parts_that_do_not_fit_the_plan_are_no_checkpoint(
    files: dict[str, WrittenFiles], words: str
) -> None:
    with pytest.raises(IncompleteCheckpointError, match=words):
        assemble(ORDER, PLAN, LAYOUTS, files, at=1.5)


def test_an_object_that_a_node_leaves_out_is_missed() -> None:
    plan = WritePlan(PLAN.chunks, {"n0": {0: ["epoch"]}, "n1": {1: []}})
    with pytest.raises(IncompleteCheckpointError, match="0 objects were written: expected 1"):
        assemble(ORDER, plan, LAYOUTS, {"n1": done(1), "n0": done(0)}, at=1.5)


# --- the folder ---


def folder(tmp_path: Path, node: str = "n0") -> PartsFolder:
    order = ORDER.model_copy(update={"node": node, "writers": ORDER.writers * (node == "n0")})
    return PartsFolder(FolderBackend(tmp_path), "step-7.a1", order)


def test_documents_of_nodes_meet_in_a_folder(tmp_path: Path) -> None:
    mine, other = folder(tmp_path), folder(tmp_path, "n1")
    mine.make()
    mine.put(NodeShares(LAYOUTS["n0"]))
    found: dict[str, NodeShares] = {}
    assert mine.gather(NodeShares, found) == ["n1"]
    other.put(NodeShares(LAYOUTS["n1"]))
    assert other.plan() is None
    assert mine.gather(NodeShares, found) == []
    assert {node: one.shares for node, one in found.items()} == LAYOUTS
    mine.put(PLAN)
    assert other.plan() == PLAN
    other.fail("the disk is full")
    with pytest.raises(SupersededError, match="n1: the disk is full"):
        mine.gather(WrittenFiles, {})


def test_a_removed_folder_is_the_end_of_an_attempt(tmp_path: Path) -> None:
    mine = folder(tmp_path)
    mine.make()
    with pytest.raises(SupersededError, match=r"step-7\.a1 was removed: the attempt was given up"):
        mine.plan()
    mine.fail("called off")
    assert list((tmp_path / "step-7.a1/parts").iterdir()) == [], "there is nobody to be told"


@pytest.mark.parametrize("text", ["[]", '{"shares": 1}', "[" * 3000, '{"format": 2, "shares": 1}'])
def test_a_file_that_is_no_document_is_named(tmp_path: Path, text: str) -> None:
    mine = folder(tmp_path)
    mine.make()
    mine.put(NodeShares(LAYOUTS["n0"]))
    (tmp_path / "step-7.a1/parts/n1.layout.json").write_text(text)
    with pytest.raises(ValueError, match=r"step-7\.a1/parts/n1\.layout\.json: it"):
        mine.gather(NodeShares, {})
