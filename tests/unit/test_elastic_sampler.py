"""Each sample once per epoch, whatever the worlds are and wherever a checkpoint is loaded."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint
from torch.distributed.checkpoint.stateful import Stateful

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import ElasticSampler

N = 103


def ranks(world: int, length: int = N, **options: Any) -> list[ElasticSampler]:
    options = {"global_batch": 10, "seed": 4, **options}
    return [ElasticSampler(length, rank=r, world=world, **options) for r in range(world)]


def step(samplers: list[ElasticSampler]) -> list[int]:
    """Return the samples of the next step, of all ranks together, and commit it."""
    found = []
    for sampler in samplers:
        for micro_batch, samples in zip(sampler.plan(), sampler, strict=False):
            found += samples[: micro_batch.samples]
            if micro_batch.last:
                break
        sampler.commit()
    return found


@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 20),
    micro=st.none() | st.integers(1, 6),
    moves=st.lists(
        st.tuples(st.sampled_from(["train", "resize", "save", "go back"]), st.integers(1, 7)),
        max_size=30,
    ),
)
def test_any_sequence_of_resizes_and_rollbacks_trains_each_sample_once(
    length: int, batch: int, micro: int | None, moves: list[tuple[str, int]]
) -> None:
    def world_of(size: int) -> list[ElasticSampler]:
        return ranks(size, length, global_batch=batch, micro_batch=micro)

    samplers = world_of(1)
    surviving: list[int] = []
    saved, saved_samples = samplers[0].state_dict(), 0
    for what, number in moves:
        match what:
            case "train":
                for _ in range(number):
                    surviving += step(samplers)
            case "save":
                saved, saved_samples = samplers[-1].state_dict(), len(surviving)
            case "resize" | "go back":
                if what == "resize":
                    saved, saved_samples = samplers[-1].state_dict(), len(surviving)
                samplers = world_of(number)
                del surviving[saved_samples:]
                for sampler in samplers:
                    sampler.load_state_dict(saved)
    epoch = samplers[0].epoch
    while samplers[0].epoch == epoch:
        surviving += step(samplers)
    assert len(surviving) == length * (epoch + 1)
    for number in range(epoch + 1):
        assert sorted(surviving[number * length : (number + 1) * length]) == list(range(length))


def test_the_samples_of_a_step_are_the_same_for_each_world() -> None:
    worlds = [ranks(world, micro_batch=micro) for world in (1, 2, 3, 16) for micro in (None, 2)]
    for _ in range(2 * 11):
        assert len({tuple(step(samplers)) for samplers in worlds}) == 1


def test_the_last_step_of_an_epoch_has_the_rest() -> None:
    (sampler,) = ranks(1)
    assert sampler.steps_left() == len(sampler) == 11
    assert [len(step([sampler])) for _ in range(12)] == [10] * 10 + [3, 10]
    assert (sampler.epoch, sampler.offset, sampler.steps) == (1, 10, 12)


def test_each_epoch_has_another_order() -> None:
    (sampler,) = ranks(1, global_batch=N)
    first, second = step([sampler]), step([sampler])
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("micro", [None, 2])
def test_the_length_counts_the_micro_batches(world: int, micro: int | None) -> None:
    sampler = ranks(world, micro_batch=micro)[-1]
    assert len(sampler) == len(list(sampler))
    sampler.commit()
    assert len(sampler) == len(list(sampler))


def test_a_large_dataset_needs_no_table() -> None:
    sampler = ElasticSampler(10**9, global_batch=4096, micro_batch=32, rank=5, world=64)
    assert len(set(next(iter(sampler)))) == 32
    assert len(repr(sampler.state_dict())) < 1000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 0}, "length is 0: expected a whole number from 1"),
        ({"length": 10.0}, "length is 10.0"),
        ({"length": True}, "length is True"),
        ({"length": 2**60}, "expected a whole number from 1 to 2**53"),
        ({"global_batch": 0}, "global_batch is 0: expected a whole number from 1"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"seed": -1}, "seed is -1: expected a whole number from 0"),
        ({"block": 0}, "block is 0"),
        ({"rank": 2, "world": 2}, "rank is 2: expected less than world, 2"),
    ],
)
def test_arguments_that_cannot_be_used(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ElasticSampler(**{"length": 10, "global_batch": 2, "rank": 0, "world": 1, **options})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 9}, "length=9, and this run has length=103: samples were added or removed"),
        ({"seed": 5}, "seed=5, and this run has seed=4: pass the seed of the checkpoint"),
        ({"shuffle": False}, "shuffle=False"),
        ({"block": 2}, "block=2"),
        ({"format": 2}, "another version has written it"),
        ({"offset": N}, "the offset 103: expected less than the number of samples"),
        ({"offset": -1}, "offset of the state is -1"),
        ({"epoch": 1.5}, "epoch of the state is 1.5"),
        ({"extra": 1}, "expected those of ElasticSampler"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, Any], words: str
) -> None:
    (sampler,) = ranks(1)
    step([sampler])
    before = sampler.state_dict()
    with pytest.raises(ConfigError) as error:
        sampler.load_state_dict({**before, "offset": 20, **change})
    assert words in str(error.value)
    assert sampler.state_dict() == before


def test_the_state_of_another_loader_is_refused() -> None:
    torchdata = {"_snapshot": {}, "_steps_since_snapshot": 3, "_iterator_finished": False}
    with pytest.raises(ConfigError, match="another sampler or loader cannot be continued"):
        ranks(1)[0].load_state_dict(torchdata)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_checkpoint_of_torch_has_the_position(tmp_path: Path) -> None:
    """``ElasticSampler`` is a ``Stateful`` of ``torch.distributed.checkpoint``."""
    (before,), (after,) = ranks(1), ranks(1)
    step([before])
    assert isinstance(before, Stateful)
    checkpoint.save({"data": before}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint.load({"data": after}, checkpoint_id=tmp_path, no_dist=True)
    assert after.state_dict() == before.state_dict()
    assert after.offset == 10


def test_a_checkpoint_may_be_continued_with_another_batch() -> None:
    (sampler,) = ranks(1)
    trained = step([sampler])
    (other,) = ranks(1, global_batch=31)
    other.load_state_dict(sampler.state_dict())
    while not other.epoch:
        trained += step([other])
    assert sorted(trained) == list(range(N))
