"""A checkpoint of a model and the cut of its tables are one: saved, loaded and kept together."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from dlrover_py.checkpoint.directory import CheckpointDirectory, folder_of
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import CheckpointError, UnreachableError
from dlrover_py.protocol.manifest import Manifest, WrittenObject
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.ps import specs
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.cut_item import Tables
from dlrover_py.ps.specs import TableSpec
from dlrover_py.trainer.checkpointer import Checkpointer
from dlrover_py.trainer.collectives import Ranks
from dlrover_py.trainer.object_codec import encode_object
from dlrover_py.trainer.sources import Catalog
from dlrover_py.trainer.table_cuts import LOOK_THREAD, TableCuts
from tests.ids import checkpoint_id
from tests.ps_threads import client, servers
from tests.unit.test_checkpointer import clock, make  # noqa: F401 - fixtures

COUNT = TableSpec("count", 1, specs.sgd(1.0), specs.uniform(0.0, 0.0))
IDS = np.arange(20, dtype=np.int64)
Make = Callable[..., Checkpointer]


class Recorded:
    """Tables of which no row is saved."""

    def __init__(self) -> None:
        self.needed: list[Any] = []

    def save_cut(self, step: int, needed: Any) -> str:
        self.needed.append(needed)
        return f"cut-{step}"

    def restore_cut(self, name: str) -> None:
        """Do nothing."""

    def restore_origin(self) -> None:
        """Do nothing."""


@dataclass
class Storage:
    dir: str | None
    on_the_way: set[CheckpointId]


class Training:
    """A model that counts its steps, and a table that does the same."""

    def __init__(self, worker: PsClient, checkpointer: Checkpointer) -> None:
        self.worker, self.checkpointer = worker, checkpointer
        worker.create(COUNT)
        self.model = torch.zeros(1)
        self.state: dict[str, Any] = {"model": self.model, "tables": Tables(worker)}

    def load(self) -> int:
        step = self.checkpointer.load(self.state) or 0
        assert self.both() == (step, step)
        return step

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.worker.push({"count": (IDS, np.full((20, 1), -1, np.float32))}).result()
            self.model += 1

    def save(self, **more: Any) -> bool:
        done = self.checkpointer.save(int(self.model), self.state, **more)
        self.checkpointer.wait()
        return done

    def both(self) -> tuple[int, int]:
        rows = self.worker.pull({"count": IDS}).result()["count"]
        assert len(set(rows[:, 0].tolist())) == 1
        return int(self.model), int(rows[0, 0])


@contextmanager
def started(access: Any, checkpointer: Checkpointer) -> Iterator[Training]:
    """A life of the worker, which begins with a load."""
    with client(access) as worker:
        yield Training(worker, checkpointer)
        checkpointer.close()


def cuts_in(folder: Path) -> set[str]:
    return {one.folder for one in CheckpointDirectory(folder).checkpoints()}


def test_model_and_tables_are_of_one_step_whenever_the_worker_dies(
    make: Make,  # noqa: F811
    tmp_path: Path,
) -> None:
    with servers(tmp_path, cuts=str(tmp_path / "cuts")) as access:
        with started(access, make()) as first:
            assert first.load() == 0
            first.train(2)
        with started(access, make()) as second:  # no checkpoint: all begins again
            assert second.load() == 0
            second.train(3)
            assert second.save()
            second.train(2)
            second.worker.save(5)  # it dies before the checkpoint of this cut
        with started(access, make()) as third:
            assert third.load() == 3
            third.train(4)
            assert third.save()
            assert third.load() == 7
            third.train()
        with started(access, make()) as fourth:
            assert fourth.load() == 7


def test_without_a_cut_nothing_is_saved_and_training_goes_on(
    make: Make,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuts = tmp_path / "cuts"
    with servers(tmp_path, cuts=str(cuts)) as access, started(access, make()) as run:
        run.load()
        run.train(2)
        assert run.save()
        cuts.rename(tmp_path / "away")
        cuts.write_text("a file")
        run.train(2)
        with caplog.at_level(logging.WARNING):
            assert not run.save()
        assert "the tables were not saved" in caplog.text
        cuts.unlink()
        (tmp_path / "away").rename(cuts)
        assert run.load() == 2


def test_a_checkpoint_whose_cut_is_gone_or_damaged_gives_way_to_an_older_one(
    make: Make,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cuts = tmp_path / "cuts"
    with servers(tmp_path, cuts=str(cuts)) as access, started(access, make()) as run:
        run.load()
        for _ in (1, 2):
            run.train(2)
            assert run.save()
        directory = CheckpointDirectory(cuts)
        directory.remove(next(one for one in cuts_in(cuts) if one.startswith("step-4.")))
        assert run.load() == 2
        assert "there is no cut 'step-4." in caplog.text
        for one in cuts_in(cuts):
            directory.remove(one)
        with pytest.raises(CheckpointError, match="there is no cut"):
            run.load()


def test_cuts_of_checkpoints_in_storage_stay(make: Make, tmp_path: Path) -> None:  # noqa: F811
    cuts, dir = tmp_path / "cuts", tmp_path / "dir"
    with servers(tmp_path, cuts=str(cuts)) as access, started(access, make(dir)) as run:
        run.load()

        def saves(count: int) -> list[str]:
            made = []
            for _ in range(count):
                run.train()
                assert run.save()
                looked()
                made.append(run.state["tables"].state_dict()["cut"])
            return made

        (origin,) = cuts_in(cuts)
        (first,) = saves(1)
        manifest = stored(dir, 1, first)
        made = saves(8)
        assert cuts_in(cuts) >= {origin, first, *made[-3:]}
        assert made[0] not in cuts_in(cuts)
        CheckpointDirectory(dir).remove(manifest.folder)
        made = saves(3)
        assert first not in cuts_in(cuts)
        assert cuts_in(cuts) >= {origin, *made[-3:]}


def looked() -> None:
    """Wait until the look into storage has ended that the last save began."""
    for thread in threading.enumerate():
        if thread.name == LOOK_THREAD:
            thread.join()


def stored(dir: Path, step: int, cut: str) -> Manifest:
    """Store a checkpoint that has the name of a cut and nothing else."""
    directory, folder = CheckpointDirectory(dir), folder_of(step, "a1")
    data = encode_object("tables.cut", cut)
    directory.prepare()
    directory.place.make(folder)
    directory.place.put(f"{folder}/0", data)
    one = WrittenObject("tables.cut", "0", 0, len(data), xxhash.xxh3_64_intdigest(data))
    manifest = Manifest(
        Step(step), "a1", "u1", Round(3), Timeline(0), 1, folder, time.time(), objects=(one,)
    )
    return directory.commit(manifest)


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Save the next step; return the cuts that its item was told to keep."""
    item, storage = Recorded(), Storage(str(tmp_path / "dir"), set())
    cuts, steps = TableCuts(storage), iter(range(1, 100))

    def save(*kept: CheckpointId) -> Any:
        one = checkpoint_id(next(steps))
        assert cuts.save({"tables": item}, one, kept, lists=True) == ""
        looked()
        return item.needed[-1]

    yield save
    looked()


def test_all_cuts_stay_while_one_that_storage_has_is_not_known(
    recorded: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dir = tmp_path / "dir"
    manifest = stored(dir, 70, "cut-70")
    file = dir / manifest.folder / "0"
    data = file.read_bytes()
    file.write_bytes(bytes(len(data)))
    assert [recorded(), recorded(), recorded()] == [None] * 3
    assert "tables.cut differ from those that were written" in caplog.text
    file.write_bytes(data)
    recorded()
    assert "cut-70" in recorded()
    name = stored(dir, 80, "cut-80").folder + ".json"
    text = (dir / name).read_bytes()
    (dir / name).write_bytes(text[:-9])
    recorded()
    assert {"cut-70", "cut-5", "cut-6"} <= recorded()  # all that it knew, and what came then
    (dir / name).write_bytes(text)
    recorded()
    assert {"cut-70", "cut-80"} <= recorded()
    assert "cut-5" not in recorded()


def test_an_unreadable_manifest_is_not_taken_for_a_removed_one(
    recorded: Callable[..., Any], tmp_path: Path
) -> None:
    dir = tmp_path / "dir"
    for step in (70, 80):
        stored(dir, step, f"cut-{step}")
    name = dir / "step-70.a1.json"
    name.rename(tmp_path / "away")
    name.symlink_to(name)
    recorded()
    assert recorded() is None
    name.unlink()
    (tmp_path / "away").rename(name)
    recorded()
    assert {"cut-70", "cut-80"} <= recorded()


def test_a_checkpoint_that_another_process_made_keeps_all_cuts(
    recorded: Callable[..., Any],
) -> None:
    assert recorded(checkpoint_id(90)) is None
    assert [recorded() for _ in range(2)] == [None, None]  # it may be on its way to storage
    assert recorded() == {"cut-2", "cut-3"}


def test_who_does_not_answer_ends_the_load(tmp_path: Path) -> None:
    class Silent(Recorded):
        def restore_cut(self, name: str) -> None:
            raise UnreachableError("no answer in 60 s")

    catalog = Catalog()
    catalog.add_object("tables.cut", lambda: encode_object("tables.cut", "cut-1"))
    with pytest.raises(UnreachableError, match="cannot go back to a cut: no answer in 60 s"):
        TableCuts(Storage(None, set())).restore({"tables": Silent()}, catalog, Ranks(0, 1))


def test_the_tables_are_a_value_of_the_state_itself(make: Make, tmp_path: Path) -> None:  # noqa: F811
    with servers(tmp_path, cuts=str(tmp_path / "cuts")) as access, started(access, make()) as run:
        run.state = {"all": {"model": run.model, "tables": run.state["tables"]}}
        run.train()
        assert run.save()
        with pytest.raises(CheckpointError, match="value of the state itself"):
            run.checkpointer.load(run.state)


def test_rows_of_another_training_are_never_taken_for_the_first_ones(
    make: Make,  # noqa: F811
    tmp_path: Path,
) -> None:
    cuts = str(tmp_path / "cuts")
    with servers(tmp_path, cuts=cuts) as access, started(access, make()) as run:
        run.load()
        run.train(3)
        assert run.save()
        name = run.state["tables"].state_dict()["cut"]
    other = tmp_path / "other"
    other.mkdir()
    with servers(other, cuts=cuts) as access, client(access) as worker:
        worker.create(COUNT)
        item = Tables(worker)
        item.restore_cut(name)
        with pytest.raises(CheckpointError, match="it is not known with which rows"):
            item.restore_origin()
        assert worker.restore(world=1) == 3  # the user's decision
        worker.push({"count": (IDS, np.full((20, 1), -1, np.float32))}).result()
        item.save_cut(1, set())
        item.restore_origin()
        assert item.state_dict() == {"cut": name}
        assert worker.pull({"count": IDS}).result()["count"][0, 0] == 3


def test_cuts_that_a_worker_needs_stay_and_all_if_that_is_not_known(tmp_path: Path) -> None:
    cuts = tmp_path / "cuts"
    with servers(tmp_path, cuts=str(cuts)) as access, client(access) as worker:
        worker.create(COUNT)
        item = Tables(worker)
        made = [item.save_cut(1, set())]
        made += [item.save_cut(step, {made[0]}) for step in range(2, 7)]
        assert cuts_in(cuts) == {made[0], *made[-3:]}
        made.append(item.save_cut(7, None))
        assert cuts_in(cuts) == {made[0], *made[-4:]}
        made.append(item.save_cut(8, set()))
        assert cuts_in(cuts) == set(made[-3:])


def test_what_is_in_memory_or_on_the_way_needs_its_cut_and_an_unknown_storage_all(
    tmp_path: Path,
) -> None:
    item, storage = Recorded(), Storage(None, set())
    cuts, ids = TableCuts(storage), [checkpoint_id(step) for step in range(1, 6)]
    assert cuts.save({"tables": item}, ids[0], [], lists=True) == ""
    assert cuts.save({"tables": item}, ids[1], [ids[0]], lists=True) == ""
    storage.on_the_way = {ids[0]}
    assert cuts.save({"tables": item}, ids[2], [ids[1]], lists=True) == ""
    storage.on_the_way = set()
    assert cuts.save({"tables": item}, ids[3], [ids[2]], lists=True) == ""
    assert item.needed == [set(), {"cut-1"}, {"cut-1", "cut-2"}, {"cut-1", "cut-2", "cut-3"}]
    for step in (5, 6):  # what has left memory is looked for once more
        assert cuts.save({"tables": item}, checkpoint_id(step), [], lists=True) == ""
    assert item.needed.pop() == {"cut-3", "cut-4", "cut-5"}
    item.needed.clear()
    file = tmp_path / "a file"
    file.touch()
    unknown_storage = Storage(str(file), set())
    unknown = TableCuts(unknown_storage)
    assert unknown.save({"tables": item}, ids[4], [], lists=True) == ""
    assert unknown.save({"tables": item}, ids[4], [], lists=True) == ""
    assert TableCuts(unknown_storage).save({"tables": item}, ids[4], [], lists=False) == ""
    assert item.needed == [None, None, set()]
