"""A loader of leased shards in a script without an agent: sources, commits and checkpoints."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError, SupersededError
from dlrover_py.protocol.shards import (
    AnswerCode,
    DatasetSpec,
    Ledger,
    Level,
    ShardAnswer,
    ShardRequest,
)
from dlrover_py.shards.queue import ShardQueue
from dlrover_py.shards.records import QueueRecord
from dlrover_py.trainer import collectives, session
from dlrover_py.trainer.data import (
    LineSource,
    MapSource,
    ParquetSource,
    ShardLoader,
    ShardUnreadableError,
    leases,
    verify_shards,
)
from dlrover_py.trainer.data.shard_sources import ShardSource
from dlrover_py.trainer.state_dict import flatten


def epoch_of(loader: ShardLoader, size: int = 3, most: int = 10**6) -> list[Any]:
    """Return the records of the rest of an epoch, or of the first batches of it."""
    found = []
    for number, records in enumerate(loader.batches(size), start=1):
        assert 0 < len(records) <= size
        found += records
        loader.commit()
        if number == most:
            break
    return found


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 7), st.booleans())
def test_each_sample_comes_once_in_each_epoch(
    samples: int, shard_size: int, batch: int, shuffle: bool
) -> None:
    source = MapSource(range(samples), shard_size=shard_size)
    loader = ShardLoader("train", source, epochs=2, shuffle=shuffle)
    orders = []
    while not loader.over:
        orders.append(epoch_of(loader, batch))
        assert sorted(orders[-1]) == list(range(samples))
    assert len(orders) == 2
    assert shuffle or orders == [list(range(samples))] * 2


@given(st.integers(2, 40), st.integers(1, 9), st.integers(1, 20))
def test_model_and_position_go_back_together(samples: int, shard_size: int, steps: int) -> None:
    source = MapSource(range(samples), shard_size=shard_size)
    loader = ShardLoader("train", source, epochs=2)
    first = epoch_of(loader, 2, steps)
    state = json.loads(json.dumps(loader.state_dict()))
    epoch_of(loader, 3, 4)  # is lost
    loader.load_state_dict(state)
    if Counter(first) == Counter(range(samples)):
        assert loader.epoch == 1
        first = []
    rest = epoch_of(loader)
    assert sorted(first + rest) == list(range(samples))
    del loader
    fresh = ShardLoader("train", source, epochs=2)  # another process
    fresh.load_state_dict(state)
    assert sorted(first + epoch_of(fresh)) == list(range(samples))


@pytest.mark.parametrize("level", [level for level in Level if level != "exactly_once_effect"])
def test_a_new_queue_of_another_level_begins_with_the_first_epoch(level: Level) -> None:
    source = MapSource(range(12), shard_size=4)
    loader = ShardLoader("train", source, epochs=3, level=level)
    epoch_of(loader)
    state = loader.state_dict()
    loader.load_state_dict(state)  # the queue does not go back
    assert sorted(epoch_of(loader)) == list(range(12))
    assert loader.epoch == 1
    del loader
    fresh = ShardLoader("train", source, epochs=3, level=level)  # another job
    fresh.load_state_dict(state)
    polls = iter(range(9))
    records = []
    for batch in fresh.batches(12, stop=lambda: next(polls) == 8):
        records += batch
        fresh.commit()
    assert sorted(records) == list(range(12))
    assert fresh.epoch == 0
    again = Ledger.model_validate_json(str(fresh.state_dict()["ledger"]))
    assert again == Ledger(epoch=1)


def test_a_save_within_a_shard_is_no_loss_of_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_session", None)  # other tests have loaded checkpoints
    loader = ShardLoader("saved", MapSource(range(12), shard_size=6), epochs=1)
    for _ in loader.batches(2):
        loader.commit()
        loader.state_dict()
    assert loader.over
    assert not caplog.records


def test_a_state_at_the_end_of_an_epoch_stays_the_same() -> None:
    source = MapSource(range(9), shard_size=2)
    loader = ShardLoader("ends", source, epochs=2)
    assert loader.state_dict() == loader.state_dict()
    epoch_of(loader)
    state = loader.state_dict()
    assert loader.state_dict() == state
    loader.load_state_dict(state)
    assert loader.epoch == 1
    assert sorted(epoch_of(loader)) == list(range(9))
    assert loader.over


LINES = st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")))


@given(LINES.filter(bool), st.integers(1, 30), st.booleans())
def test_each_line_comes_once_however_the_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], shard_bytes: int, end: bool
) -> None:
    content = b"\n".join(lines) + (b"\n" if end else b"")
    if not content:
        return
    path = tmp_path_factory.mktemp("lines") / "a.txt"
    path.write_bytes(content)
    expected = content.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    loader = ShardLoader("lines", LineSource([path], shard_bytes=shard_bytes, parse=bytes))
    first = epoch_of(loader, 1, 2)
    state = loader.state_dict()
    loader.load_state_dict(state)
    if Ledger.model_validate_json(str(state["ledger"])).epoch == 0:
        first += epoch_of(loader)
    assert sorted(first) == sorted(expected)


def test_several_files_and_empty_ones(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    paths[0].write_text('{"a": 1}\n{"a": 2}\n')
    paths[1].write_text("")
    paths[2].write_text('{"a": 3}')
    loader = ShardLoader("rows", LineSource(paths, shard_bytes=5, parse=json.loads), epochs=1)
    assert sorted(row["a"] for row in epoch_of(loader)) == [1, 2, 3]
    assert loader.over


@pytest.mark.parametrize("fault", ["gone", "cut"])
def test_a_shard_that_cannot_be_read_is_visible_and_never_done(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("a\nb\n")
    bad.write_text("c\nd\n")
    loader = ShardLoader("lines", LineSource([good, bad], shard_bytes=100), epochs=2)
    if fault == "gone":
        bad.unlink()
    else:
        bad.write_text("c\n")
    assert sorted(epoch_of(loader)) == ["a", "b"]
    assert loader.quarantined == 1
    words = "the file is gone" if fault == "gone" else "expected at least 4 bytes, found 2"
    assert any(words in record.getMessage() for record in caplog.records)
    assert any("is in quarantine" in record.getMessage() for record in caplog.records)
    assert sorted(epoch_of(loader)) == ["a", "b"], "the next epoch leaves it out as well"


@pytest.mark.parametrize("left", ["an empty folder", "nothing"])
def test_a_node_that_has_lost_its_mount_puts_no_shard_into_quarantine(
    tmp_path: Path, left: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    paths = [folder / f"{number}.txt" for number in range(3)]
    for path in paths:
        path.write_text("a\n")
    loader = ShardLoader("mount", LineSource(paths))
    for path in paths:
        path.unlink()
    if left == "nothing":
        folder.rmdir()
    with pytest.raises(ConfigError, match="found its folder gone or empty on this node: mount"):
        epoch_of(loader)
    assert loader.quarantined == 0


def test_rows_of_parquet_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"a": list(range(10)), "b": [0] * 10}), path, row_group_size=4
    )
    source = ParquetSource([path], columns=["a"])
    assert source.sizes == [(1, 4), (1, 4), (1, 2)]
    loader = ShardLoader("rows", source, epochs=1)
    assert sorted(row["a"] for row in epoch_of(loader)) == list(range(10))
    assert list(source.read(1, 1, 3)) == [({"a": 5}, 2), ({"a": 6}, 3)]
    path.rename(tmp_path / "b.parquet")
    again = ShardLoader("again", source, epochs=1)
    with pytest.raises(ConfigError, match="3 of 3 shards are in quarantine"):
        epoch_of(again)


def test_parquet_files_that_are_damaged_are_told_from_a_system_that_fails(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"a": list(range(1000))}), path, compression="zstd")
    source = ParquetSource([path])
    whole = path.read_bytes()
    for damaged in (b"", b"PAR1", whole[:-1], b"x" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(ShardUnreadableError):
            list(source.read(0, 0, 1000))
    path.unlink()
    path.mkdir()  # any error of the system
    with pytest.raises(IsADirectoryError):
        list(source.read(0, 0, 1000))


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "3", None])
def test_a_size_that_is_no_number_from_1_is_refused(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a size of shards from 1"):
        MapSource([1, 2], shard_size=size)
    loader = ShardLoader("sizes", MapSource([1, 2], shard_size=1))
    with pytest.raises(ConfigError, match="expected batches of a number of records from 1"):
        next(loader.batches(size))


def test_one_path_is_no_list_of_paths(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("a\n")
    for one in (path, str(path)):
        with pytest.raises(ConfigError, match=r"expected a list of paths, found .*a\.jsonl"):
            LineSource(one)  # type: ignore[arg-type]


class Uneven:
    """Shards of these sizes, which nobody reads."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = sizes

    def read(self, shard: int, start: int, stop: int) -> Any:
        raise AssertionError


def test_equal_neighbours_count_as_one_and_too_many_changes_are_told() -> None:
    assert not ShardLoader("equal", Uneven([(1, 5)] * 20_000)).over
    with pytest.raises(ConfigError, match="changes 20000 times from one to the next, expected at"):
        ShardLoader("uneven", Uneven([(1, 1), (1, 2)] * 10_000)).over  # noqa: B018


class Letters:
    """A source of one's own."""

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(2, 3)]

    def read(self, shard: int, start: int, stop: int) -> Any:
        for at in range(start, stop):
            yield "abcdef"[3 * shard + at], at + 1


def test_the_state_of_another_dataset_is_refused() -> None:
    """Sizes and orders are equal; only the names and the data differ."""
    train = ShardLoader("train", MapSource(range(10), shard_size=3))
    epoch_of(train, 2, 4)
    state = train.state_dict()
    other = ShardLoader("validation", MapSource(range(10, 20), shard_size=3))
    with pytest.raises(ConfigError, match="found that of the dataset train"):
        other.load_state_dict(state)
    assert sorted(epoch_of(other)) == list(range(10, 20))


def test_other_files_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(f"{path.stem}\n" * 50)
    loader = ShardLoader("files", LineSource(paths, shard_bytes=20))
    epoch_of(loader, 3, 4)
    state = loader.state_dict()
    del loader
    turned = ShardLoader("files", LineSource(paths[::-1], shard_bytes=20))
    with pytest.raises(ConfigError, match="files, shards, seed and shuffle of the checkpoint"):
        turned.load_state_dict(state)


def test_a_fingerprint_may_be_added_and_taken_away_but_not_exchanged() -> None:
    class Numbers(list[int]):
        fingerprint = ""

    def loader(fingerprint: str) -> ShardLoader:
        numbers = Numbers(range(10))
        numbers.fingerprint = fingerprint
        return ShardLoader("numbers", MapSource(numbers, shard_size=3))

    states = {}
    for fingerprint in ("", "v 1", "v 2"):
        one = loader(fingerprint)
        epoch_of(one, 2, 4)
        states[fingerprint] = one.state_dict()
        del one
    for found, state in states.items():
        for own in states:
            again = loader(own)
            if found and own and found != own:
                with pytest.raises(ConfigError, match="seed and shuffle of the checkpoint"):
                    again.load_state_dict(state)
            else:
                again.load_state_dict(state)
            del again


def test_nodes_with_another_order_of_files_are_refused(tmp_path: Path) -> None:
    """The sizes are equal, so only the names say that the shards are others."""
    specs: list[DatasetSpec] = []
    for turn in (1, -1, 1):
        paths = [tmp_path / str(len(specs)) / name for name in ("a", "b")]  # another mount point
        for path in paths:
            path.parent.mkdir(exist_ok=True)
            path.write_text("line\n" * 50)
        source = LineSource(paths[::turn], shard_bytes=20)
        specs.append(DatasetSpec(sizes=source.sizes, fingerprint=source.fingerprint))
    queue = ShardQueue(QueueRecord(spec=specs[0]))
    requests = [
        ShardRequest(dataset="d", round=1, local_rank=0, seq=1, want=1, spec=spec) for spec in specs
    ]
    answers = [queue.take(str(node), one, 0.0) for node, one in enumerate(requests)]
    assert [one.code for one in answers] == [AnswerCode.OK, AnswerCode.REFUSED, AnswerCode.OK]
    assert "sort the list of a folder" in answers[1].why


class QueueOfTheMaster:
    """The way to one queue, which outlives the loaders of a process."""

    def __init__(self) -> None:
        self.queue: ShardQueue | None = None
        self.now = 0.0
        self.histories: dict[Any, Any] = {}
        """What the process remembers of its loaders."""

    def begin(self) -> None:
        """Begin as a new process and a new master."""
        self.queue = None
        self.histories.clear()

    def ask(self, request: ShardRequest) -> ShardAnswer:
        if self.queue is None:
            assert request.spec is not None
            self.queue = ShardQueue(QueueRecord(spec=request.spec))
        return self.queue.take("a", request, self.now)


@pytest.fixture
def one_queue(monkeypatch: pytest.MonkeyPatch) -> QueueOfTheMaster:
    """Let all loaders of a test ask one queue, as loaders in one round do."""
    queue = QueueOfTheMaster()
    monkeypatch.setattr(leases, "_AgentChannel", lambda path: queue)
    monkeypatch.setattr(leases, "_histories", queue.histories)
    monkeypatch.setenv("DLROVER_SHARDS_SOCKET", "one")
    return queue


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(["anew", "same", "save", "back", "read"])),
        max_size=12,
    ),
    st.integers(1, 5),
)
def test_a_loader_that_is_made_anew_continues(
    one_queue: QueueOfTheMaster, plan: list[tuple[int, str]], size: int
) -> None:
    """What its predecessor has committed counts; what it has read and not committed comes again."""
    one_queue.begin()
    source = MapSource(range(23), shard_size=5)
    loader: ShardLoader | None = ShardLoader("anew", source, epochs=1)
    trained: list[int] = []
    saved: tuple[dict[str, Any], list[int]] | None = None
    for batches, what in plan:
        assert loader is not None
        if batches:
            trained += epoch_of(loader, size, batches)
        if what == "read" and not loader.over:
            next(loader.batches(size), None)  # is not committed
        if what == "save":
            saved = loader.state_dict(), list(trained)
        if what == "back" and saved is not None:
            loader = None
            loader = ShardLoader("anew", source, epochs=1)
            loader.load_state_dict(saved[0])
            trained = list(saved[1])
        if what in ("anew", "read"):
            loader = None
            loader = ShardLoader("anew", source, epochs=1)
    assert loader is not None
    trained += epoch_of(loader, size)
    assert sorted(trained) == list(range(23))


def lose_a_shard(one_queue: QueueOfTheMaster, name: str) -> tuple[ShardLoader, dict[str, Any]]:
    """Return a loader that has committed samples of a lost shard, and its state before that."""
    one_queue.begin()
    loader = ShardLoader(name, MapSource(range(23), shard_size=5), epochs=1)
    state = loader.state_dict()
    epoch_of(loader, 2, 1)
    assert one_queue.queue is not None
    one_queue.queue.expire(70.0)
    one_queue.now = 70.0
    return loader, state


def test_no_state_has_the_samples_of_a_shard_that_was_lost(one_queue: QueueOfTheMaster) -> None:
    loader, state = lose_a_shard(one_queue, "lost")
    for _ in range(2):  # the first save says so, and no later one may seem to succeed
        with pytest.raises(SupersededError, match=r"made no progress for 60 s.* larger lease_s="):
            flatten({"a": {"data": loader}}, rank=0)
    for call in (loader.commit, lambda: next(loader.batches(2))):
        with pytest.raises(SupersededError, match="start again from its checkpoint"):
            call()
    loader.load_state_dict(state)
    assert sorted(epoch_of(loader)) == list(range(23))


class OtherRank:
    """What another rank of two sends in a collective, and what it gets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: list[Any] | None) -> None:
        self.got: list[Any] = []
        self.fault = fault
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(collectives, "rank_and_world", lambda: (0, 2))
        monkeypatch.setattr(collectives, "gather", self.gather)

    def gather(self, value: Any, world: int) -> list[Any]:
        self.got.append(value)
        return [value, [0, [], "", self.fault] if len(value) == 4 else value]


def test_all_ranks_say_that_one_has_no_state(
    one_queue: QueueOfTheMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that raised before the collective would leave the others waiting in it."""
    other = OtherRank(monkeypatch, None)
    loader, _ = lose_a_shard(one_queue, "ranks")
    with pytest.raises(SupersededError, match="dataset ranks: 1 shards of this worker"):
        loader.state_dict()
    fatal, words = other.got[-1][3]
    assert fatal
    assert "dataset ranks: 1 shards of this worker" in words


@pytest.mark.parametrize("fatal", [True, False])
def test_a_rank_without_a_state_ends_the_save_of_the_others(
    fatal: bool, one_queue: QueueOfTheMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_queue.begin()
    OtherRank(monkeypatch, [fatal, "its last batch is not committed"])
    loader = ShardLoader("others", MapSource(range(23), shard_size=5))
    with pytest.raises(SupersededError if fatal else ConfigError, match="rank 1: its last batch"):
        loader.state_dict()


def test_the_ledger_of_a_loader_that_is_made_anew(
    one_queue: QueueOfTheMaster, tmp_path: Path
) -> None:
    """What the second loader has trained after a state is lost when the third one loads it."""
    one_queue.begin()

    def new_loader() -> ShardLoader:
        loader = ShardLoader("kept", MapSource(range(23), shard_size=5), epochs=1)
        loader.keep_ledger(tmp_path)
        return loader

    loader: ShardLoader | None = new_loader()
    assert loader is not None
    epoch_of(loader, 2, 3)
    state = loader.state_dict()
    loader = None
    loader = new_loader()
    epoch_of(loader, 2, 3)
    loader = None
    loader = new_loader()
    loader.load_state_dict(state)
    epoch_of(loader)
    report = verify_shards.verify(tmp_path)
    assert report.exact, report
    assert [(epoch.finished, epoch.repeated) for epoch in report.epochs] == [(True, 0)]


def test_a_line_that_cannot_be_parsed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n')
    source = LineSource([path], parse=json.loads)
    with pytest.raises(ValueError, match=r"lines.jsonl: the line at byte 9 cannot be parsed"):
        list(source.read(0, 0, 18))


def test_a_source_of_ones_own() -> None:
    source: ShardSource = Letters()
    loader = ShardLoader("letters", source, epochs=1)
    assert sorted(epoch_of(loader)) == list("abcdef")


def test_a_batch_must_be_committed() -> None:
    loader = ShardLoader("uncommitted", MapSource(range(9), shard_size=3))
    batches = loader.batches(2)
    next(batches)
    with pytest.raises(ConfigError, match="not committed"):
        loader.state_dict()
    with pytest.raises(ConfigError, match="not committed"):
        next(batches)


def test_mistakes_are_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MapSource(range(9), shard_size=3)
    loader = ShardLoader("mistakes", source)
    with pytest.raises(ConfigError, match="found another"):
        ShardLoader("mistakes", source)
    state = loader.state_dict()
    del loader
    other = ShardLoader("mistakes", MapSource(range(10), shard_size=3))
    with pytest.raises(ConfigError, match="expected 9 samples, as in the checkpoint, found 10"):
        other.load_state_dict(state)
    del other
    seeded = ShardLoader("mistakes", source, seed=1)
    with pytest.raises(ConfigError, match="found others"):
        seeded.load_state_dict(state)
    del seeded
    loader = ShardLoader("mistakes", source)
    for bad in ({}, {"epoch": 0}, {**state, "ledger": "{}"}):
        with pytest.raises(ConfigError, match="expected the state of a ShardLoader"):
            loader.load_state_dict(bad)
    with pytest.raises(ConfigError, match="dataset: String should match"):
        ShardLoader("a name", source)
    with pytest.raises(ConfigError, match="ahead: expected 1 to 32, found 0"):
        ShardLoader("zero", source, ahead=0)
    with pytest.raises(ConfigError, match="expected samples in the dataset, found none"):
        MapSource([], shard_size=3)
    with pytest.raises(ConfigError, match="found generator"):
        MapSource((one for one in "a"), shard_size=3)
    with pytest.raises(ConfigError, match="No such file"):
        LineSource([tmp_path / "none.txt"])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="found 1 empty files"):
        LineSource([tmp_path / "empty.txt"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start the script with elastic-run"):
        ShardLoader("world", source)
