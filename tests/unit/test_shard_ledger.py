"""The ledger of leased shards proves which samples were trained, and names those that were not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover_py.cli.commands import root
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.shard_ledger import LedgerHistory, file_name, parse_name
from dlrover_py.trainer.data import ElasticLoader, LineStream, MapSource, ShardLoader
from dlrover_py.trainer.data.verify_shards import verify

SAMPLES = 23


def new_loader(folder: Path, name: str = "train", **options: Any) -> ShardLoader:
    """Return a loader with a ledger, as in a new process."""
    source = MapSource(range(SAMPLES), shard_size=4)
    loader = ShardLoader(name, source, **{"epochs": 2, "seed": 3, **options})
    loader.keep_ledger(folder)
    return loader


def train(loader: ShardLoader, batches: int = 10**6, size: int = 3) -> dict[str, Any]:
    """Train some batches, and return the state after them."""
    left = batches
    while left and not loader.over:
        for _ in loader.batches(size):
            loader.commit()
            left -= 1
            if not left:
                break
    return json.loads(json.dumps(loader.state_dict()))  # type: ignore[no-any-return]


def files(folder: Path) -> list[Path]:
    """Return the files of a ledger, the newest last."""
    return sorted(path for path in folder.iterdir() if parse_name(path.name))


def change(path: Path, edit: Callable[[list[Any]], None]) -> None:
    """Change the lines of a file behind its header."""
    header, *lines = path.read_text().splitlines()
    found = [json.loads(line) for line in lines]
    edit(found)
    path.write_text("\n".join([header, *map(json.dumps, found)]) + "\n")


PLAN = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from(["save", "roll back", "process", "fresh"])),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLAN, st.integers(1, 9))
def test_any_sequence_of_states_and_rollbacks_is_exact(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, str]], size: int
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    loader = new_loader(folder)
    states: list[dict[str, Any]] = []
    for batches, then in plan:
        state = train(loader, batches, size)
        report = verify(folder)
        assert report.exact, report
        if then == "save":
            states.append(state)
            continue
        if then in ("process", "fresh"):
            del loader
            loader = new_loader(folder)
        if then == "fresh" or not states:
            loader = None  # type: ignore[assignment]
            loader, states = new_loader(folder), []
        else:
            loader.load_state_dict(states[batches % len(states)])
    train(loader, size=size)
    report = verify(folder)
    assert report.exact, report
    assert [epoch.finished for epoch in report.epochs] == [True, True]
    assert not report.problems


def test_a_planted_loss_and_a_planted_double_are_named(tmp_path: Path) -> None:
    loader = new_loader(tmp_path, shuffle=False)
    state = train(loader, 3)
    train(loader, 2)
    loader.load_state_dict(state)
    train(loader)
    before, after = files(tmp_path)
    assert verify(tmp_path).exact
    whole = before.read_text(), after.read_text()

    def lose(lines: list[Any]) -> None:
        trained = [line for line in lines if line[0] == "trained"]
        trained[1][1][0][3:] = [3, 3 + 0]  # samples 3 and 4 … are two parts
        del trained[1][1][0]

    change(before, lose)
    epoch = verify(tmp_path).epochs[0]
    assert (epoch.missing, epoch.named) == (1, {"missing": ["3 of shard 0"]})
    before.write_text(whole[0])

    def double(lines: list[Any]) -> None:
        lines.insert(1, ["trained", [[1, 0, 0, 1, 4], [2, 0, 1, 0, 2]]])

    change(after, double)
    epoch = verify(tmp_path).epochs[0]
    named = {"repeated": ["1–3 of shard 0", "0–1 of shard 1"]}
    assert (epoch.missing, epoch.repeated, epoch.named) == (0, 5, named)


def test_what_is_lost_with_a_rollback_does_not_count(tmp_path: Path) -> None:
    loader = new_loader(tmp_path)
    state = train(loader, 2)
    train(loader, 4)
    loader.load_state_dict(state)
    train(loader, 1)
    report = verify(tmp_path)
    assert (report.exact, report.steps) == (True, 3)
    (epoch,) = report.epochs
    assert not epoch.finished


def test_a_rollback_without_its_credits_is_found(tmp_path: Path) -> None:
    """A state whose credits are those of an earlier one, as if the queue had forgotten some."""
    loader = new_loader(tmp_path)
    early = train(loader, 2)
    late = train(loader, 2)
    forged = json.loads(early["ledger"]) | {"mark": json.loads(late["ledger"])["mark"]}
    loader.load_state_dict({**late, "ledger": json.dumps(forged)})
    train(loader)
    report = verify(tmp_path)
    assert not report.exact
    assert [epoch.repeated for epoch in report.epochs] == [6, 0]


def test_records_that_the_queue_has_refused_do_not_count(tmp_path: Path) -> None:
    loader = new_loader(tmp_path, level="exactly_once_accounting", shuffle=False, epochs=1)
    train(loader)
    (path,) = files(tmp_path)

    def refuse(lines: list[Any]) -> None:
        lines[1:1] = [["trained", [[999, 0, 2, 0, 3]]], ["confirmed", [999]]]

    change(path, refuse)
    assert verify(tmp_path).exact


def test_a_worker_that_died_without_an_answer_neither_loses_nor_doubles(tmp_path: Path) -> None:
    """Of what it trained last it is not known whether it counts: others have trained the rest."""
    loader = new_loader(tmp_path, level="exactly_once_accounting", shuffle=False, epochs=1)
    train(loader)
    (path,) = files(tmp_path)
    other = tmp_path / "000001-00001.shards"
    header, *lines = path.read_text().splitlines()
    header = json.dumps(json.loads(header) | {"rank": 1, "world": 2})
    shards = [number for line in lines for number in [json.loads(line)] if number[0] == "trained"]
    other.write_text("\n".join([header, json.dumps(shards[0])]) + "\n")
    assert verify(tmp_path).exact  # the queue did not count it, and it was trained again

    def forget(found: list[Any]) -> None:
        found.remove(shards[0])

    change(path, forget)
    assert verify(tmp_path).exact  # the queue counted it
    other.unlink()
    assert not verify(tmp_path).exact


@pytest.mark.parametrize("level", ["exactly_once_accounting", "at_least_once"])
def test_other_levels_take_nothing_back(tmp_path: Path, level: str) -> None:
    loader = new_loader(tmp_path, level=level, epochs=1)
    state = train(loader, 2)
    train(loader, 2)
    loader.load_state_dict(state)
    train(loader)
    assert verify(tmp_path).exact
    first, _ = files(tmp_path)
    change(first, lambda lines: lines.insert(0, lines[1]))
    (epoch,) = verify(tmp_path).epochs
    assert epoch.repeated == 3
    assert epoch.exact is (level == "at_least_once")


def test_a_state_without_a_place_in_the_ledger_proves_nothing(tmp_path: Path) -> None:
    loader = ShardLoader("train", MapSource(range(SAMPLES), shard_size=4), epochs=2, seed=3)
    state = train(loader, 4)
    del loader
    with_ledger = new_loader(tmp_path)
    with_ledger.load_state_dict(state)
    train(with_ledger)
    report = verify(tmp_path)
    assert "began with a state that has no ledger" in report.faults[0]
    assert not report.exact


def test_records_before_a_state_that_are_gone_prove_nothing(tmp_path: Path) -> None:
    loader = new_loader(tmp_path)
    loader.load_state_dict(train(loader, 4))
    train(loader)
    files(tmp_path)[0].unlink()
    report = verify(tmp_path)
    assert "the records before its state are not in this ledger" in report.faults[0]
    assert not report.exact


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"{}\n", b"\xff\n", b'{"format": 2}\n'],
    ids=["empty", "cut", "no header", "no text", "newer"],
)
def test_a_newest_file_that_is_damaged(tmp_path: Path, damage: bytes) -> None:
    train(new_loader(tmp_path))
    (tmp_path / "000007-00000.shards").write_bytes(damage)
    report = verify(tmp_path)
    assert report.exact is not damage.endswith(b"\n")  # killed while it began: nothing is in it
    assert len(report.problems) + len(report.faults) == 1


@pytest.mark.parametrize(
    "line",
    [
        '["trained",[[1,0,99,0,1]]]',
        '["trained",[[1,0,0,0,99]]]',
        '["trained",[[1,0,0,2,1]]]',
        '["trained",[[1,-1,0,0,1]]]',
        '["trained",7]',
        '["confirmed",[[]]]',
        '["state",[]]',
        "[",
        "[" * 100_000,
        "7",
    ],
)
def test_a_damaged_line_costs_the_rest_of_its_file(tmp_path: Path, line: str) -> None:
    train(new_loader(tmp_path))
    (path,) = files(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    report = verify(tmp_path)
    assert not report.exact
    assert "the rest of it is not known" in report.faults[0]


@pytest.mark.parametrize("epoch", [10**9, 10**30])
def test_a_damaged_epoch_costs_neither_memory_nor_the_command(tmp_path: Path, epoch: int) -> None:
    train(new_loader(tmp_path), 3)
    (path,) = files(tmp_path)
    change(path, lambda lines: lines.append(["epoch", epoch]))
    report = verify(tmp_path)
    assert [each.epoch for each in report.epochs] == [0]
    assert report.faults == [f"the epoch {epoch} is too large: only those with a record are listed"]


def test_the_newest_file_is_that_with_the_highest_number(tmp_path: Path) -> None:
    train(new_loader(tmp_path))
    train(new_loader(tmp_path), 3)  # began anew
    expected = verify(tmp_path)
    assert not expected.epochs[0].finished
    for path, number in zip(files(tmp_path), (999_999, 1_000_000), strict=True):
        path.rename(tmp_path / file_name(number, 0))
    assert verify(tmp_path) == expected


def test_a_hostile_parent_ends(tmp_path: Path) -> None:
    train(new_loader(tmp_path))
    (path,) = files(tmp_path)
    header, *rest = path.read_text().splitlines()
    found = json.loads(header)
    own = LedgerHistory(found["run"], found["round"], found["load"]).mark(1)
    path.write_text("\n".join([json.dumps(found | {"parent": own}), *rest]) + "\n")
    assert not verify(tmp_path).exact


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    loader = new_loader(tmp_path / "ledger", shuffle=False)
    train(loader, 9)
    result = run.invoke(root, ["data", "verify", str(tmp_path)], standalone_mode=False)
    lines = ["epoch 0: finished: all 23 samples once", "epoch 1: in progress: exact so far"]
    assert (result.return_value, result.output.splitlines()) == (0, lines)
    (path,) = files(tmp_path / "ledger")
    change(path, lambda lines: lines[1][1].pop())
    result = run.invoke(root, ["data", "verify", str(tmp_path)], standalone_mode=False)
    assert result.return_value == 1
    assert result.output.splitlines()[:2] == [
        "epoch 0: finished: NOT EXACT",
        "  3 samples not in the ledger: 0–2 of shard 0",
    ]
    result = run.invoke(root, ["data", "verify", str(tmp_path), "--json"], standalone_mode=False)
    assert json.loads(result.output)["epochs"][0]["named"] == {"missing": ["0–2 of shard 0"]}


@pytest.mark.parametrize(
    ("samples", "seed", "words"),
    [(SAMPLES, 4, "another seed or shuffle"), (9, 3, "23 samples")],
)
def test_a_ledger_has_one_dataset(tmp_path: Path, samples: int, seed: int, words: str) -> None:
    name = f"one{samples}"  # what a failed loop leaves behind keeps its loader alive
    train(new_loader(tmp_path, name), 1)
    other = ShardLoader(name, MapSource(range(samples), shard_size=4), epochs=2, seed=seed)
    other.keep_ledger(tmp_path)
    with pytest.raises(ConfigError, match=words):
        next(other.batches(1))


def test_a_ledger_has_one_loader(tmp_path: Path) -> None:
    train(new_loader(tmp_path, "first"), 1)
    with pytest.raises(ConfigError, match="is that of the dataset first"):
        next(new_loader(tmp_path, "other").batches(1))
    elastic = ElasticLoader(torch.arange(8), global_batch=4, ledger=tmp_path)
    with pytest.raises(ConfigError, match="is that of a ShardLoader"):
        next(iter(elastic))
    plain = tmp_path / "elastic"
    for step in ElasticLoader(torch.arange(8), global_batch=4, ledger=plain):
        list(step)
        step.commit()
    with pytest.raises(ConfigError, match="is that of an ElasticLoader"):
        next(new_loader(plain, "another").batches(1))
    (tmp_path / "000001-00000.ledger").write_bytes(b"")
    assert "ElasticLoader has written to this ledger, too" in verify(tmp_path).faults[0]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    loader = new_loader(tmp_path / "file", "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        next(loader.batches(1))
    with pytest.raises(ConfigError, match="before the first loop"):
        loader.keep_ledger(tmp_path)
    with pytest.raises(ConfigError, match="expected a folder"):
        new_loader("s3://bucket/ledger", "s3")  # type: ignore[arg-type]


# --- Streams ---


def append(folder: Path, name: str, lines: int) -> None:
    """Add lines of four bytes to a partition."""
    with (folder / name).open("a") as file:
        file.write("abc\n" * lines)


def stream_loader(folder: Path, **options: Any) -> ShardLoader:
    """Return a loader of a stream with a ledger, as in a new process."""
    loader = ShardLoader("train", LineStream(folder / "in", range_bytes=10), **options)
    loader.keep_ledger(folder / "ledger")
    return loader


def train_stream(loader: ShardLoader, batches: int = 10**6) -> dict[str, Any]:
    """Train some batches, as far as there is something, and return the state after them."""
    if batches:
        for _ in loader.batches(2, stop=lambda: True):
            loader.commit()
            batches -= 1
            if not batches:
                break
    return json.loads(json.dumps(loader.state_dict()))  # type: ignore[no-any-return]


STREAM_PLAN = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["save", "roll back", "process", "fresh"]),
        st.sampled_from(["a.jsonl", "b.jsonl", "c.jsonl"]),
        st.integers(0, 9),
    ),
    max_size=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STREAM_PLAN)
def test_a_stream_that_grows_and_is_rolled_back_is_exact(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, str, str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("stream")
    (folder / "in").mkdir()
    append(folder / "in", "a.jsonl", 1)
    loader = stream_loader(folder)
    states: list[dict[str, Any]] = []
    train_stream(loader, 1)
    for batches, then, name, lines in plan:
        append(folder / "in", name, lines)
        state = train_stream(loader, batches)
        report = verify(folder)
        assert report.exact, report
        if then == "save":
            states.append(state)
            continue
        if then in ("process", "fresh"):
            del loader
            loader = stream_loader(folder)
        if then == "fresh" or not states:
            loader = None  # type: ignore[assignment]
            loader, states = stream_loader(folder), []
        else:
            loader.load_state_dict(states[batches % len(states)])
    (folder / "in/_END").touch()
    while not loader.over:
        train_stream(loader)
    report = verify(folder)
    assert report.exact, report
    assert not report.problems
    sizes = {path.name: path.stat().st_size for path in (folder / "in").glob("*.jsonl")}
    found = {each.partition: each.samples for each in report.epochs}
    assert {name: found.get(name, 0) for name in sizes} == sizes
    assert all(each.finished for each in report.epochs)


def rolled_back_stream(folder: Path) -> tuple[Path, Path]:
    """Train a stream of 10 lines with a rollback; return the files before and after it."""
    (folder / "in").mkdir()
    append(folder / "in", "a.jsonl", 10)
    loader = stream_loader(folder)
    state = train_stream(loader, 2)
    train_stream(loader, 1)
    loader.load_state_dict(state)
    (folder / "in/_END").touch()
    while not loader.over:
        train_stream(loader)
    assert verify(folder).exact
    before, after = files(folder / "ledger")
    return before, after


def test_a_lost_range_of_a_stream_is_named(tmp_path: Path) -> None:
    before, _ = rolled_back_stream(tmp_path)
    change(before, lambda lines: lines.remove(next(x for x in lines if x[0] == "trained")))
    (each,) = verify(tmp_path).epochs
    assert (each.partition, each.missing, each.named) == ("a.jsonl", 8, {"missing": ["0–7"]})
    run = CliRunner().invoke(root, ["data", "verify", str(tmp_path)], standalone_mode=False)
    assert run.output == (
        "partition a.jsonl: finished: NOT EXACT\n  8 units not in the ledger: 0–7\n"
    )
    assert run.return_value == 1


def test_a_doubled_range_of_a_stream_is_named(tmp_path: Path) -> None:
    _, after = rolled_back_stream(tmp_path)
    double = ["trained", [[1, 0, "a.jsonl", 4, 12]]]
    change(after, lambda lines: lines.insert(0, double))
    (each,) = verify(tmp_path).epochs
    assert (each.missing, each.repeated, each.named) == (0, 8, {"repeated": ["4–11"]})


def test_a_stream_that_was_not_rolled_back_is_found(tmp_path: Path) -> None:
    """The later history says that it has begun with nothing, but goes on behind a state."""
    _, after = rolled_back_stream(tmp_path)
    header, *lines = after.read_text().splitlines()
    assert json.loads(header)["parent"].endswith("/1")
    after.write_text("\n".join([json.dumps(json.loads(header) | {"parent": ""}), *lines]) + "\n")
    (each,) = verify(tmp_path).epochs
    assert (each.missing, each.named) == (16, {"missing": ["0–15"]})


def test_records_behind_the_watermark_are_no_gap(tmp_path: Path) -> None:
    """A range that another worker trains may still be without a record."""
    before, after = rolled_back_stream(tmp_path)
    after.unlink()

    def later(lines: list[Any]) -> None:
        lines.append(["trained", [[9, 0, "a.jsonl", 30, 40]]])
        lines.append(["confirmed", []])

    change(before, later)
    (each,) = verify(tmp_path).epochs
    assert (each.exact, each.finished) == (True, False)
    run = CliRunner().invoke(root, ["data", "verify", str(tmp_path)], standalone_mode=False)
    expected = f"partition a.jsonl: in progress: exact up to the watermark {each.samples}\n"
    assert run.output == expected


def test_a_state_of_a_stream_without_a_ledger_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    append(tmp_path / "in", "a.jsonl", 10)
    loader = ShardLoader("train", LineStream(tmp_path / "in", range_bytes=10))
    state = train_stream(loader, 2)
    del loader
    with_ledger = stream_loader(tmp_path)
    with_ledger.load_state_dict(state)
    train_stream(with_ledger)
    assert "began with a state that has no ledger" in verify(tmp_path).faults[0]


def test_a_stream_that_is_over_without_its_watermarks_is_not_proven(tmp_path: Path) -> None:
    before, after = rolled_back_stream(tmp_path)
    for file in (before, after):
        change(file, lambda lines: lines.__setitem__(slice(None), without_marks(lines)))
    report = verify(tmp_path)
    assert not report.exact
    assert "the last known watermark is 0" in report.faults[0]


def without_marks(lines: list[Any]) -> list[Any]:
    """The lines of a worker whose queue tells no watermark."""
    return [line for line in lines if line[0] != "watermarks"]
