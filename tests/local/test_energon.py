"""Positions of Megatron-Energon's loader, with a WebDataset that is written here."""

import io
import json
import tarfile
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import RankPositions

energon: Any = pytest.importorskip(
    "megatron.energon", reason="its packages need older libraries than those of constraints.txt"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of Energon, and of torch about its use

META = """\
sample_type:
  __module__: megatron.energon
  __class__: TextSample
field_map:
  text: txt
"""
ALL = sorted(str(10 * shard + at) for shard in range(4) for at in range(6))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a dataset of four tar files with six samples each."""
    from megatron.energon.flavors import BaseWebdatasetFactory

    root = tmp_path_factory.mktemp("energon")
    names = [f"{shard}.tar" for shard in range(4)]
    for shard, name in enumerate(names):
        with tarfile.open(root / name, "w") as tar:
            for at in range(6):
                text = str(10 * shard + at).encode()
                info = tarfile.TarInfo(f"{shard}-{at}.txt")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))
    BaseWebdatasetFactory.prepare_dataset(
        root, names, split_parts_ratio=[("train", 1.0)], workers=1
    )
    (root / ".nv-meta" / "dataset.yaml").write_text(META)
    return root


def loader_of(
    dataset: Path, processes: int, rank: int = 0, world: int = 1, **options: Any
) -> tuple[Any, RankPositions]:
    """Return a new loader and its positions."""
    from dlrover_py.trainer.integrations.energon import energon_positions

    config = energon.WorkerConfig(rank=rank, world_size=world, num_workers=processes)
    options = {"batch_size": 2, "shuffle_buffer_size": 4, **options}
    loader = energon.get_savable_loader(
        energon.get_train_dataset(
            dataset, worker_config=config, max_samples_per_sequence=None, **options
        )
    )
    return loader, energon_positions(loader)


def read(loader: Any, batches: int | None = None) -> list[list[str]]:
    """Return the texts of the next batches."""
    return [list(batch.text) for batch in islice(loader, batches)]


def saved(positions: list[RankPositions]) -> dict[str, Any]:
    """Return the state that ranks save together, after a way through a file."""
    states = [one.state_dict() for one in positions]
    joined = [text for state in states for text in json.loads(state["positions"])]
    return dict(json.loads(json.dumps({**states[0], "positions": json.dumps(joined)})))


@pytest.mark.parametrize("processes", [0, 2])
def test_a_training_goes_on_with_the_next_batch(dataset: Path, processes: int) -> None:
    loader, _ = loader_of(dataset, processes)
    expected = read(loader, 16)
    found: list[list[str]] = []
    state: dict[str, Any] | None = None
    for batches in (0, 5, 1, 0, 1, 2, 7):  # shorter than the number of processes, too
        loader, positions = loader_of(dataset, processes)
        if state is not None:
            positions.load_state_dict(state)
        found += read(loader, batches)
        state = saved([positions])
        read(loader, 1)  # is lost
    assert found == expected


@pytest.mark.parametrize(("world", "processes"), [(1, 4), (4, 1), (2, 2)])
def test_the_number_of_processes_may_be_divided_in_another_way(
    dataset: Path, world: int, processes: int
) -> None:
    def ranks(world: int, processes: int) -> list[tuple[Any, RankPositions]]:
        options = {"shuffle_buffer_size": None, "batch_size": 1, "repeat": False}
        return [loader_of(dataset, processes, rank, world, **options) for rank in range(world)]

    before = ranks(2, 2)
    found = [text for loader, _ in before for batch in read(loader, 3) for text in batch]
    state = saved([positions for _, positions in before])
    for loader, positions in ranks(world, processes):
        positions.load_state_dict(state)
        found += [text for batch in read(loader) for text in batch]
    assert sorted(found) == ALL


def test_what_energon_cannot_do_is_refused(dataset: Path) -> None:
    loader, positions = loader_of(dataset, 2)
    read(loader, 3)
    state = saved([positions])
    with pytest.raises(ConfigError, match=r"cannot go .* workers are running: load it before"):
        positions.load_state_dict(state)
    for world, processes in ((2, 2), (1, 1), (2, 0)):
        _, positions = loader_of(dataset, processes, 1 if world > 1 else 0, world)
        with pytest.raises(
            ConfigError,
            match=rf"expected 1 ranks with 2 worker .* found {world} ranks with {processes}: ",
        ):
            positions.load_state_dict(state)
    _, positions = loader_of(dataset, 2, batch_size=1)
    positions.load_state_dict(state)
    assert json.loads(json.loads(positions.state_dict()["positions"])[0])["batch"] == 1
    _, positions = loader_of(dataset, 2, batch_size=4)
    with pytest.raises(ConfigError, match="larger micro batch size"):
        positions.load_state_dict(state)
    _, positions = loader_of(dataset, 2)
    with pytest.raises(ConfigError, match="expected the positions of Energon's loaders"):
        positions.load_state_dict({**state, "positions": '["{}"]'})


def test_another_loader_is_refused() -> None:
    from dlrover_py.trainer.integrations.energon import energon_positions

    with pytest.raises(ConfigError, match="found list: make it with get_savable_loader"):
        energon_positions([1, 2])


def test_a_state_of_another_class_is_refused(dataset: Path) -> None:
    loader, positions = loader_of(dataset, 0)
    vars(loader.dataset)["_sample_index"] = Path("x")  # a class that no state may have
    with pytest.raises(ConfigError, match="Path"):
        positions.state_dict()
