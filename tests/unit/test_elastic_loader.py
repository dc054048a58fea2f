"""Steps of a loader: the gradient is the mean over the samples of the step, for each world."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import ElasticLoader, ElasticSampler
from dlrover_py.trainer.data.agreement import difference
from dlrover_py.trainer.data.ledger import DigestedDataset
from dlrover_py.trainer.data.seeds import SeededDataset
from dlrover_py.trainer.data.shard_sources import MapSource
from dlrover_py.trainer.data.verify import verify

N, BATCH = 53, 12


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


class Rank:
    """A rank of a world that exists only in this process."""

    def __init__(self, rank: int, world: int, **options: Any) -> None:
        options = {"global_batch": BATCH, "seed": 2, **options}
        count = options.pop("weigh_by", None)
        self.loader = ElasticLoader(dataset(), **options)
        if count is not None:
            self.loader.weigh_by(count)
        sampler = self.loader.sampler
        sampler.rank, sampler.world = rank, world
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def gradients(world: int, reduction: str = "mean", **options: Any) -> list[list[torch.Tensor]]:
    """Return the gradients of each step of an epoch: the mean over ranks, as DDP computes it."""
    ranks = [Rank(rank, world, **options) for rank in range(world)]
    loss_of = nn.MSELoss(reduction=reduction)
    found = []
    for steps in zip(*(one.loader for one in ranks), strict=True):
        total = []
        for one, step in zip(ranks, steps, strict=True):
            one.model.zero_grad()
            for inputs, targets in step:
                with step.sync(one.model):
                    step.weigh(loss_of(one.model(inputs), targets), reduction=reduction).backward()
            step.commit()
            total.append([p.grad.clone() / world for p in one.model.parameters()])
        found.append([sum(parts, torch.tensor(0.0)) for parts in zip(*total, strict=True)])
    return found


@pytest.mark.parametrize("world", [2, 3, 4, 16])
@pytest.mark.parametrize("micro", [None, 1, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_does_not_depend_on_the_world(
    world: int, micro: int | None, reduction: str
) -> None:
    alone, shared = gradients(1), gradients(world, reduction, micro_batch=micro)
    assert len(alone) == len(shared) == 5
    for one, other in zip(alone, shared, strict=True):
        for expected, found in zip(one, other, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_loader_continues_after_the_committed_step() -> None:
    """The next step was read ahead, and the one after the checkpoint was trained, but not saved."""
    loader = ElasticLoader(dataset(), global_batch=BATCH)
    seen = []
    for step in loader:
        seen += [row for batch, _ in step for row in batch.tolist()]
        step.commit()
        if loader.steps == 2:
            saved = loader.state_dict()
            kept = list(seen)
        if loader.steps == 3:
            break
    again = ElasticLoader(dataset(), global_batch=BATCH, micro_batch=3)
    again.load_state_dict(saved)
    assert (len(again), again.steps, again.epoch) == (3, 2, 0)
    for step in again:
        kept += [row for batch, _ in step for row in batch.tolist()]
        step.commit()
    assert sorted(kept) == sorted(dataset().tensors[0].tolist())
    assert (len(again), again.steps, again.epoch) == (5, 5, 1)


def test_a_step_must_be_committed_before_the_next() -> None:
    loader = ElasticLoader(dataset(), global_batch=BATCH)
    steps = iter(loader)
    list(next(steps))
    with pytest.raises(ConfigError, match=r"step 1 is computed, but not committed: call step\.com"):
        next(steps)
    with pytest.raises(ConfigError, match=r"or step\.discard\(\)"):
        next(iter(loader))
    with pytest.raises(ConfigError, match="step 1 is not committed: compute its micro-batches"):
        for _ in ElasticLoader(dataset(), global_batch=BATCH):
            pass


def test_a_step_that_is_discarded_comes_again() -> None:
    loader = ElasticLoader(dataset(), global_batch=BATCH)
    step = next(iter(loader))
    first = [batch.tolist() for batch, _ in step]
    step.discard()
    with pytest.raises(ConfigError, match="committed or discarded already"):
        step.commit()
    again = next(iter(loader))
    assert [batch.tolist() for batch, _ in again] == first
    again.commit()
    assert loader.steps == 1


def test_a_step_is_committed_once_and_when_it_is_computed() -> None:
    loader = iter(ElasticLoader(dataset(), global_batch=BATCH, micro_batch=5))
    step = next(loader)
    with pytest.raises(ConfigError, match="with 3 micro-batches left"):
        step.commit()
    assert len(list(step)) == 3
    step.commit()
    with pytest.raises(ConfigError, match="committed or discarded already"):
        step.commit()


def test_a_state_is_not_saved_between_the_optimizer_and_the_commit() -> None:
    loader = ElasticLoader(dataset(), global_batch=BATCH, micro_batch=5)
    steps = iter(loader)
    step = next(steps)
    for _ in step:
        loader.state_dict()  # the step has not changed the model yet
        if step.micro_batch.last:
            break
    with pytest.raises(ConfigError, match="a state was saved before step 1 was committed"):
        step.commit()


def test_a_script_may_go_back_in_the_middle_of_a_step() -> None:
    """A load reads the present state first, as torch's DCP does."""
    loader = ElasticLoader(dataset(), global_batch=BATCH)
    steps = iter(loader)
    step = next(steps)
    first = [batch.tolist() for batch, _ in step]
    saved = ElasticLoader(dataset(), global_batch=BATCH).state_dict()
    assert loader.state_dict() == saved
    loader.load_state_dict(saved)
    with pytest.raises(ConfigError, match="or a state was loaded: begin the loop"):
        next(steps)
    again = next(iter(loader))
    assert [batch.tolist() for batch, _ in again] == first
    again.commit()


def test_a_step_that_cannot_be_read_is_not_trained() -> None:
    class Torn(TensorDataset):
        broken = True

        def __getitem__(self, index: int) -> Any:
            if self.broken:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    data = Torn(*dataset().tensors)
    loader = ElasticLoader(data, global_batch=BATCH)
    step = next(iter(loader))
    with pytest.raises(OSError, match="the disk is gone"):
        list(step)
    data.broken = False
    with pytest.raises(ConfigError, match="could not be read: begin the loop"):
        list(step)
    with pytest.raises(ConfigError, match="with 1 micro-batches left"):
        step.commit()
    assert sum(len(batch) for step in whole(loader) for batch, _ in step) == N


def whole(loader: ElasticLoader) -> Iterator[Any]:
    """Yield the steps of an epoch, and commit each after the caller has read it."""
    for step in loader:
        yield step
        step.commit()


def test_workers_have_other_random_numbers_on_each_rank_and_in_each_epoch() -> None:
    seen = []
    for rank in range(2):
        loader = ElasticLoader(dataset(), global_batch=BATCH)
        loader.sampler.rank, loader.sampler.world = rank, 2
        for _ in range(2):
            seen.append(base_seed(loader))
            for step in whole(loader):
                list(step)
    assert len(set(seen)) == 4


def base_seed(loader: ElasticLoader) -> int:
    """Return a number that the next loop of a loader draws for its workers."""
    step = next(iter(loader))
    step.discard()
    generator = loader.loader.generator
    return int(torch.randint(2**40, (), generator=generator))


def test_only_the_last_micro_batch_exchanges_gradients() -> None:
    class Sharded(nn.Linear):
        exchanges: list[bool] = []  # noqa: RUF012

        def set_requires_gradient_sync(self, on: bool) -> None:
            self.exchanges.append(on)

    model = Sharded(5, 1)
    for step in ElasticLoader(dataset(), global_batch=BATCH, micro_batch=5):
        for _ in step:
            with step.sync(model):
                pass
        break
    assert model.exchanges == [False, False, True]


def test_seeded_samples_have_random_numbers_of_their_own() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(2)

    def epoch(world: int, **options: Any) -> dict[int, list[list[float]]]:
        rows: dict[int, list[list[float]]] = {}
        for rank in range(world):
            loader = ElasticLoader(
                Noisy(*dataset().tensors), global_batch=BATCH, seed_samples=True, **options
            )
            loader.sampler.rank, loader.sampler.world = rank, world
            for step in loader:
                for batch in step:
                    mine = batch.tolist()[: step.micro_batch.samples]
                    rows.setdefault(step.start, []).extend(mine)
                step.commit()
        return rows

    torch.manual_seed(1)
    state = torch.get_rng_state()
    alone = epoch(1)
    assert torch.equal(torch.get_rng_state(), state), "those of the script do not change"
    assert epoch(3, micro_batch=2) == alone
    assert epoch(1, seed=1) != alone
    assert len({tuple(row) for rows in alone.values() for row in rows}) == N


def test_a_wrapped_dataset_can_be_copied() -> None:
    class Named(TensorDataset):
        name = "first"

    wrapped = DigestedDataset(SeededDataset(Named(*dataset().tensors), 7))
    copied = copy.copy(copy.deepcopy(wrapped))
    copied.name = "second"
    assert (wrapped.name, copied.name, len(copied)) == ("first", "second", N)
    del copied.name
    assert copied.name == "first"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (Stream(), {}, "a Stream, which has no numbered samples"),
        (iter([1]), {}, "expected a map-style dataset, with __len__"),
        ([], {}, "a list, has no samples"),
        ([1, 2], {"drop_last": True}, "drop_last=True: leave it out, since each"),
        ([1, 2], {"batch_size": 2}, "batch_size=2"),
        ([1, 2], {"in_order": False}, "expected batches in order"),
        ([1, 2], {"global_batch": 0}, "global_batch is 0"),
    ],
)
def test_arguments_that_cannot_be_used(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        ElasticLoader(data, **{"global_batch": 1, **options})
    assert words in str(error.value)


def test_the_state_of_another_dataset_is_refused() -> None:
    class Numbers(list[int]):
        fingerprint = "numbers 1"

    class Others(list[int]):
        fingerprint = "numbers 2"

    state = ElasticLoader(Numbers(range(10)), global_batch=2).state_dict()
    ElasticLoader(Numbers(range(10)), global_batch=2).load_state_dict(state)
    with pytest.raises(ConfigError, match="fingerprint=numbers 2: it is another dataset"):
        ElasticLoader(Others(range(10)), global_batch=2).load_state_dict(state)
    unknown = ElasticLoader(list(range(10)), global_batch=2)
    ElasticLoader(Others(range(10)), global_batch=2).load_state_dict(unknown.state_dict())
    unknown.load_state_dict(state)
    with pytest.raises(ConfigError, match="fingerprint=numbers 2: it is another dataset"):
        ElasticLoader(Others(range(10)), global_batch=2).load_state_dict(unknown.state_dict())
    with pytest.raises(ConfigError, match="expected the state of an ElasticSampler, found None"):
        ElasticLoader([1], global_batch=2).load_state_dict(None)  # type: ignore[arg-type]


def test_a_loss_belongs_to_one_micro_batch() -> None:
    """Batches that were read ahead have another weight than the one that is computed."""
    loader = ElasticLoader(list(range(10)), global_batch=10, micro_batch=3)
    step = next(iter(loader))
    list(step)
    with pytest.raises(ConfigError, match="after 4 micro-batches were read"):
        step.weigh(torch.ones(()))
    step.discard()
    step = next(iter(loader))
    for number, _ in enumerate(step):
        if number < 3:
            step.weigh(torch.ones(()))
            step.weigh(torch.ones(()))  # a second loss of the same samples
    with pytest.raises(ConfigError, match="after 1 micro-batches without"):
        step.commit()
    step.weigh(torch.ones(()))
    step.commit()


@pytest.mark.parametrize("text", ["x" * 128, "two\nlines", "\x7f", "\ud800"], ids=ascii)
def test_a_fingerprint_that_cannot_be_kept_is_refused(text: str) -> None:
    class Numbers(list[int]):
        fingerprint = text

    with pytest.raises(ConfigError, match="a text of at most 64 characters") as refused:
        ElasticLoader(Numbers(range(10)), global_batch=2)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "found", [torch.ones(3), (1, 2), b"v1", None, 7, lambda: "v1", ["v1"]], ids=str
)
def test_an_attribute_that_is_no_text_is_no_fingerprint(found: Any) -> None:
    class Numbers(list[int]):
        fingerprint = found

    loader = ElasticLoader(Numbers(range(10)), global_batch=2)
    assert loader.state_dict()["fingerprint"] == ""
    loader.load_state_dict(ElasticLoader(list(range(10)), global_batch=2).state_dict())
    assert MapSource(Numbers(range(10)), shard_size=2).fingerprint == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_empty_micro_batch_needs_no_loss(rank: int) -> None:
    """Three samples for two ranks, one at a time: the second rank has an empty micro-batch."""
    loader = ElasticLoader(list(range(3)), global_batch=3, micro_batch=1)
    loader.sampler.place(rank, 2)
    step = next(iter(loader))
    for _ in step:
        if step.micro_batch.samples:
            step.weigh(torch.ones(()))
    step.commit()
    assert loader.epoch == 1


@pytest.mark.parametrize("counts", [(0, 2, 2), (2, 0, 2), (2, 2, 0), (0, 0, 2), (0, 0, 0)])
def test_a_micro_batch_without_tokens_needs_no_loss(counts: tuple[int, int, int]) -> None:
    loader = ElasticLoader(list(counts), global_batch=3, micro_batch=1, shuffle=False)
    loader.weigh_by(lambda batch: batch.sum())
    step = next(iter(loader))
    weights = [step.weigh(torch.ones(())).item() for batch in step if batch.any()]
    step.commit()
    assert sum(weights) == pytest.approx(float(any(counts)))


def test_what_was_read_ahead_is_refused_beside_micro_batches_without_tokens() -> None:
    for counts in ((2, 0), (2, 0, 2), (0, 2, 0)):
        loader = ElasticLoader(list(counts), global_batch=3, micro_batch=1, shuffle=False)
        loader.weigh_by(lambda batch: batch.sum())
        step = next(iter(loader))
        list(step)
        with pytest.raises(ConfigError, match="after 2 micro-batches were read"):
            step.weigh(torch.ones(()))


def test_the_ranks_compare_the_arguments_of_their_loaders() -> None:
    alike = {"offset": 8, "ledger": "none", "weigh_by": "none"}
    assert difference([alike, dict(alike)]) == ""
    assert "ledger=none" in difference([alike, {**alike, "ledger": "a folder"}])
    assert "weigh_by=a function" in difference([{**alike, "weigh_by": "a function"}, alike])


def test_a_reduction_that_is_not_known() -> None:
    step = next(iter(ElasticLoader(dataset(), global_batch=BATCH)))
    with pytest.raises(ConfigError, match="no micro-batch yet"):
        step.weigh(torch.tensor(1.0))
    next(iter(step))
    with pytest.raises(ConfigError, match="expected 'mean' or 'sum'"):
        step.weigh(torch.tensor(1.0), reduction="none")


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("world", [1, 4, 16])
def test_the_sampler_is_a_batch_sampler_of_torch(world: int, micro: int | None) -> None:
    weights, samples = [0.0] * 5, 0
    for rank in range(world):
        sampler = ElasticSampler(N, global_batch=BATCH, micro_batch=micro, rank=rank, world=world)
        batches = torch.utils.data.DataLoader(dataset(), batch_sampler=sampler)
        assert len(batches) == len(sampler)
        for (inputs, _), part in zip(batches, sampler.plan(), strict=True):
            assert len(inputs) == max(part.samples, 1)
            weights[sampler.steps] += part.weight(world) / world
            samples += part.samples
            if part.last:
                sampler.commit()
        assert sampler.epoch == 1
    assert weights == pytest.approx([1.0] * 5)
    assert samples == N


def test_a_script_with_another_default_device() -> None:
    with torch.device("meta"):
        loader = ElasticLoader(list(range(N)), global_batch=BATCH, collate_fn=list)
        found = [sample for step in whole(loader) for batch in step for sample in batch]
    assert sorted(found) == list(range(N))


def tokens(batch: Any) -> Any:
    """A weight: how many of the first inputs are positive."""
    return (batch[0][:, 0] > 0).sum()


@pytest.mark.parametrize("micro", [None, 1, 5])
def test_a_weight_replaces_the_number_of_samples(micro: int | None, tmp_path: Path) -> None:
    """The mean loss of a micro-batch is that over its positive samples."""
    one = Rank(0, 1, weigh_by=tokens, micro_batch=micro, ledger=tmp_path)
    for step in one.loader:
        one.model.zero_grad()
        rows = []
        for inputs, targets in step:
            positive = inputs[:, 0] > 0
            rows.append((inputs[positive], targets[positive]))
            errors = (one.model(inputs) - targets).square()
            step.weigh(errors[positive].sum() / max(int(positive.sum()), 1)).backward()
        found = [p.grad.clone() for p in one.model.parameters()]
        inputs, targets = (torch.cat(each) for each in zip(*rows, strict=True))
        loss = (one.model(inputs) - targets).square().mean()
        expected = torch.autograd.grad(loss, [*one.model.parameters()])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        step.commit()
    report = verify(tmp_path)
    assert (report.exact, report.problems) == (True, [])


def test_a_step_without_weight_has_no_gradient() -> None:
    one = Rank(0, 1, weigh_by=lambda _: 0)
    step = next(iter(one.loader))
    for inputs, _ in step:
        for reduction in ("mean", "sum"):
            assert step.weigh(one.model(inputs).sum(), reduction=reduction).item() == 0


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf")])
def test_a_weight_that_is_no_number_from_0_is_refused(wrong: float) -> None:
    step = next(iter(Rank(0, 1, weigh_by=lambda _: wrong).loader))
    with pytest.raises(ConfigError, match=f"has returned {wrong}.*expected a finite number from 0"):
        next(iter(step))


class Mesh:
    """What a loader needs of torch's ``DeviceMesh``; the real one needs a process group."""

    def __init__(self, rank: int | None, *sizes: int) -> None:
        self.rank, self.sizes, self.ndim = rank, sizes, len(sizes)

    def get_coordinate(self) -> list[int] | None:
        return None if self.rank is None else [self.rank]

    def get_local_rank(self) -> int | None:
        return self.rank

    def size(self) -> int:
        return self.sizes[0]


def test_the_place_among_data_parallel_ranks_comes_from_a_mesh_or_from_numbers() -> None:
    for place in (Mesh(1, 3), (1, 3)):
        loader = ElasticLoader(dataset(), global_batch=BATCH)
        loader.divide_among(place)
        assert (loader.sampler.rank, loader.sampler.world) == (1, 3)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (Mesh(0, 2, 2), "a mesh with 2 dimensions: expected one"),
        (Mesh(None, 2), "a mesh without this rank"),
        ((2, 2), "rank is 2: expected less than world, 2"),
        ((0, 0), "world is 0"),
    ],
)
def test_a_place_that_does_not_exist_is_refused(place: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticLoader(dataset(), global_batch=BATCH).divide_among(place)


def test_a_place_among_several_without_a_process_group_is_refused() -> None:
    loader = ElasticLoader(dataset(), global_batch=BATCH)
    loader.divide_among((0, 2))
    with pytest.raises(ConfigError, match="2 workers, but there is no process group"):
        next(iter(loader))
