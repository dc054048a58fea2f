"""``ElasticSampler`` inside torchdata's ``StatefulDataLoader``, with processes that read ahead."""

from typing import Any

import pytest

from dlrover_py.trainer.data import ElasticSampler

stateful: Any = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
N, BATCH = 37, 5


def ranks(world: int) -> list[tuple[ElasticSampler, Any]]:
    """Return the sampler and the loader of each rank."""
    samplers = [
        ElasticSampler(N, global_batch=BATCH, micro_batch=2, rank=rank, world=world)
        for rank in range(world)
    ]
    return [
        (one, stateful.StatefulDataLoader(list(range(N)), batch_sampler=one, num_workers=2))
        for one in samplers
    ]


def train(sampler: ElasticSampler, loader: Any, steps: int) -> list[int]:
    """Train some steps, and return their samples. The loader has then read more of them."""
    found: list[int] = []
    for batch, part in zip(loader, sampler.plan(), strict=False):
        found += batch.tolist()[: part.samples]
        if part.last:
            sampler.commit()
            if (steps := steps - 1) == 0:
                break
    return found


def test_the_state_of_the_sampler_continues_at_another_world_size() -> None:
    (first,) = ranks(1)
    found = train(*first, steps=3)
    state = first[0].state_dict()
    for sampler, loader in ranks(2):
        sampler.load_state_dict(state)
        found += train(sampler, loader, steps=N)
        assert (sampler.epoch, sampler.offset) == (1, 0)
    assert sorted(found) == list(range(N))
