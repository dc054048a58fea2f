"""Shards of other frameworks' datasets, written at random here, and positions of their loaders."""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import (
    ChunkSource,
    IterableSource,
    RankPositions,
    ShardLoader,
    hugging_face_source,
)
from dlrover_py.trainer.data.shard_sources import ShardSource, ShardUnreadableError
from tests.unit.test_shard_loader import epoch_of


def number_of(record: Any) -> int:
    return int(record)


def interrupted(source: ShardSource, steps: int, number: Callable[[Any], int]) -> list[int]:
    """Return the numbers of an epoch that is cut off, goes back to a checkpoint, and ends."""
    loader = ShardLoader("interrupted", source, epochs=1)
    first = epoch_of(loader, 2, steps) if steps else []
    state = json.loads(json.dumps(loader.state_dict()))
    if not loader.over:
        epoch_of(loader, 3, 2)  # is lost
    del loader
    fresh = ShardLoader("interrupted", source, epochs=1)  # another process
    fresh.load_state_dict(state)
    rest = [] if fresh.over else epoch_of(fresh, 2)
    assert fresh.over
    return sorted(number(record) for record in first + rest)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 9))
def test_each_record_of_an_iterable_comes_once(lengths: list[int], steps: int) -> None:
    def begin(shard: int, skip: int) -> Iterator[int]:
        yield from range(100 * shard + skip, 100 * shard + lengths[shard])

    found = interrupted(IterableSource(len(lengths), begin), steps, number_of)
    assert found == [100 * shard + at for shard, n in enumerate(lengths) for at in range(n)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.integers(0, 9))
def test_each_sample_of_a_chunk_comes_once(chunks: list[int], steps: int) -> None:
    source = ChunkSource(range(sum(chunks)), chunks)
    assert interrupted(source, steps, number_of) == list(range(sum(chunks)))


def test_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 shard, found 0"):
        IterableSource(0, lambda shard, skip: [])
    for chunks in ([], [0], [3, -1, 1]):
        with pytest.raises(ConfigError, match="expected chunks with samples"):
            ChunkSource(range(3), chunks)
    with pytest.raises(ConfigError, match="chunks of 5 samples, as the dataset has, found 4"):
        ChunkSource(range(5), [2, 2])
    with pytest.raises(ConfigError, match="found list: use MapSource"):
        hugging_face_source([1, 2])
    with pytest.raises(ConfigError, match="found list: pass iter"):
        RankPositions.of_grain([1, 2])


@pytest.mark.parametrize("steps", [0, 3, 7])
def test_an_iterable_dataset_of_hugging_face(steps: int) -> None:
    datasets = pytest.importorskip("datasets")

    def numbers(parts: list[int]) -> Iterator[dict[str, int]]:
        for part in parts:
            for at in range(5):
                yield {"n": 10 * part + at}

    dataset = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"parts": [0, 1, 2]})
    dataset = dataset.filter(lambda row: row["n"] % 10 != 4).map(lambda row: {"n": row["n"] + 1})
    found = interrupted(hugging_face_source(dataset), steps, lambda row: int(row["n"]))
    assert found == [10 * part + at + 1 for part in range(3) for at in range(4)]


def test_each_record_of_a_shuffle_buffer_of_hugging_face_comes_once() -> None:
    datasets = pytest.importorskip("datasets")

    def numbers(parts: list[int]) -> Iterator[dict[str, int]]:
        for part in parts:
            yield from ({"n": 10 * part + at} for at in range(7))

    dataset = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"parts": [0, 1, 2]})
    shuffled = dataset.shuffle(seed=5, buffer_size=3)
    for steps in range(8):  # its state_dict would lose what is in the buffer
        found = interrupted(hugging_face_source(shuffled), steps, lambda row: int(row["n"]))
        assert found == [10 * part + at for part in range(3) for at in range(7)]


@pytest.mark.parametrize("steps", [0, 3, 7])
def test_tar_files_of_webdataset(
    tmp_path: Path, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("webdataset")
    from dlrover_py.trainer.integrations.webdataset import tar_source

    paths = [tmp_path / f"{shard}.tar" for shard in range(3)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as tar:
            for at in range(5):
                for kind, text in (("txt", str(10 * shard + at)), ("json", '{"a": 1}')):
                    info = tarfile.TarInfo(f"k{at}.{kind}")
                    info.size = len(text)
                    tar.addfile(info, io.BytesIO(text.encode()))
    source = tar_source(paths, lambda samples: samples.decode().to_tuple("txt", "json"))
    found = interrupted(source, steps, lambda sample: int(sample[0]))
    assert found == [10 * shard + at for shard in range(3) for at in range(5)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (first, _), *_ = source.read(0, 0, 5)
    assert first == ("0", {"a": 1}), "WebDataset does not divide the samples a second time"
    monkeypatch.undo()
    paths[1].unlink()
    loader = ShardLoader("gone", source, epochs=1)
    assert len(epoch_of(loader)) == 10
    assert loader.quarantined == 1
    whole = paths[0].read_bytes()
    paths[0].write_bytes(whole[: 512 * 6] + bytes(1024))  # cut at the end of a member
    with pytest.raises(ShardUnreadableError, match=r"expected at least .* bytes, found 4096"):
        list(source.read(0, 0, 100))
    paths[0].write_bytes(whole)
    with pytest.raises(ConfigError, match="expected a tar file"):
        tar_source(paths)


def test_the_position_of_grain() -> None:
    grain = pytest.importorskip("grain")

    def loader() -> Any:
        return iter(grain.MapDataset.range(20).shuffle(seed=3).to_iter_dataset())

    expected = [int(one) for one in loader()]
    iterator = loader()
    first = [int(next(iterator)) for _ in range(7)]
    state = RankPositions.of_grain(iterator).state_dict()
    again = loader()
    RankPositions.of_grain(again).load_state_dict(json.loads(json.dumps(state)))
    assert first + [int(one) for one in again] == expected


def test_the_elastic_iterator_of_grain_fits_another_world() -> None:
    grain = pytest.importorskip("grain")
    elastic = pytest.importorskip("grain.experimental").ElasticIterator

    def rank(index: int, world: int) -> Any:
        options = grain.sharding.ShardOptions(shard_index=index, shard_count=world)
        return iter(elastic(grain.MapDataset.range(24), 4, options))

    before = [rank(index, 2) for index in range(2)]
    seen = [int(one) for each in before for _ in range(2) for one in next(each)]
    state = RankPositions.of_grain(before[0], any_world=True).state_dict()
    after = [rank(index, 4) for index in range(4)]
    for each in after:
        RankPositions.of_grain(each, any_world=True).load_state_dict(state)
        seen += [int(one) for batch in each for one in batch]
    assert sorted(seen) == list(range(24))


def test_a_loader_may_choose_among_the_positions_of_all_ranks() -> None:
    found: list[Any] = []

    def choose(positions: Any) -> Any:
        if len(positions) > 2:
            raise ConfigError(f"data: expected 2 ranks, found {len(positions)}")
        return [one["at"] for one in positions]

    positions = RankPositions(lambda: {"at": 3}, found.append, choose=choose)
    state = positions.state_dict()
    for texts in (['{"at": 3}'], ['{"at": 3}', '{"at": 4}']):
        positions.load_state_dict({**state, "positions": json.dumps(texts)})
    assert found == [[3], [3, 4]]
    with pytest.raises(ConfigError, match="expected 2 ranks, found 3"):
        positions.load_state_dict({**state, "positions": json.dumps(["1", "2", "3"])})
    assert len(found) == 2


def test_a_position_of_another_world_is_refused() -> None:
    found: list[Any] = []
    positions = RankPositions(lambda: {"at": 3}, found.append)
    state = positions.state_dict()
    positions.load_state_dict(state)
    assert found == [{"at": 3}]
    two = {**state, "positions": json.dumps(['{"at": 3}', '{"at": 4}'])}
    with pytest.raises(ConfigError, match="expected 2 workers, as in the checkpoint, found 1"):
        positions.load_state_dict(two)
    with pytest.raises(ConfigError, match="expected any_world=False"):
        RankPositions(dict, found.append, any_world=True).load_state_dict(state)
    with pytest.raises(ConfigError, match="expected a state of RankPositions"):
        positions.load_state_dict({})
    with pytest.raises(ConfigError, match="cannot be saved"):
        RankPositions(object, found.append).state_dict()
    assert found == [{"at": 3}]
