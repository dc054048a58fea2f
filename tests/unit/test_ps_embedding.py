"""The embeddings of the parameter server give what those of torch give."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import adagrad, adam, normal, sgd, uniform
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.embedding import Embedding, EmbeddingBag, Optimizer
from tests.ps_threads import client, servers

BAGS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
OFFSETS = torch.tensor([0, 2, 2, 7, 10])  # the second bag and the last one are empty


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PsClient]:
    with servers(tmp_path_factory.mktemp("ps")) as access, client(access) as connected:
        yield connected


def far(ids: torch.Tensor) -> torch.Tensor:
    """Return ids that no dense table could have."""
    return ids * 2**58 - 5


def reference(ours: Any, theirs: Any, rows: int = 10) -> torch.optim.Optimizer | None:
    """Give torch's table the first values of ours."""
    pulled = ours.client.pull({ours.table.name: far(torch.arange(rows)).numpy()}).result()
    theirs.weight.data.copy_(torch.from_numpy(pulled[ours.table.name]))
    return None


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("kind", ["offsets", "rows", "weights", "last"])
def test_bags_are_those_of_torch(worker: PsClient, mode: str, kind: str) -> None:
    last = kind == "last"
    ours = EmbeddingBag(f"{mode}-{kind}", 4, mode=mode, optimizer=sgd(0.1),
                        include_last_offset=last, client=worker)  # fmt: skip
    theirs = nn.EmbeddingBag(10, 4, mode=mode, include_last_offset=last)
    reference(ours, theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    mine = Optimizer(ours)
    ids, offsets, weights = BAGS, OFFSETS, None
    if kind == "rows":
        ids, offsets = BAGS.reshape(2, 5), None
    if kind == "weights":
        if mode != "sum":
            pytest.skip("torch has weights for sums only")
        weights = torch.linspace(-1, 1, 10)
    for step in range(5):
        found = ours(far(ids), offsets, weights)
        expected = theirs(ids, offsets, weights)
        assert torch.allclose(found, expected, rtol=1e-6, atol=2e-6)
        for output, one in ((found, mine), (expected, optimizer)):
            one.zero_grad() if step == 0 else None
            (output.sin() * torch.linspace(0, 1, output.numel()).view_as(output)).sum().backward()
            one.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_a_model_learns_as_with_torch(worker: PsClient, name: str) -> None:
    """All rows are in each batch, so that lazy Adam is Adam."""
    torch.manual_seed(1)
    spec = adagrad(0.1) if name == "adagrad" else adam(0.01)
    ours = Embedding(f"learn-{name}", 4, optimizer=spec, init=normal(seed=3), client=worker)
    theirs = nn.Embedding(10, 4)
    reference(ours, theirs)
    make: Any = torch.optim.Adagrad if name == "adagrad" else torch.optim.Adam
    their_optimizer = make(theirs.parameters(), spec.lr)
    heads = [nn.Linear(4, 1) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    dense = [torch.optim.SGD(head.parameters(), 0.05) for head in heads]
    mine = Optimizer(nn.ModuleList([ours, heads[0]]), dense[0])
    for step in range(30):
        ids = torch.cat([torch.randperm(10), torch.randint(0, 10, (5,))])
        if step % 3 == 0:
            ours.prefetch(far(ids))
        losses = []
        for table, head, mapped in ((ours, heads[0], far(ids)), (theirs, heads[1], ids)):
            loss = (head(table(mapped)).squeeze() - ids.float().cos()).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        mine.step()
        their_optimizer.step()
        dense[1].step()
        for one in (mine, their_optimizer, dense[1]):
            one.zero_grad()
    rows = worker.pull({ours.table.name: far(torch.arange(10)).numpy()}).result()
    found = torch.from_numpy(rows[ours.table.name])
    torch.testing.assert_close(found, theirs.weight.detach(), rtol=1e-5, atol=1e-5)


def test_shapes_and_modes(worker: PsClient) -> None:
    table = Embedding("shapes", 3, client=worker)
    assert table(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 3)
    assert table(torch.ones(2, 5, dtype=torch.int64)).shape == (2, 5, 3)
    with pytest.raises(ConfigError, match=r"torch\.int64"):
        table(torch.ones(2, dtype=torch.int32))
    table.eval()
    assert not table(torch.ones(2, dtype=torch.int64)).requires_grad
    bag = EmbeddingBag("empty", 3, client=worker)
    found = bag(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]))
    assert found.tolist() == [[0.0] * 3] * 2
    assert list(bag.parameters()) == []
    with pytest.raises(ConfigError, match="expected mode"):
        EmbeddingBag("mode", 3, mode="median", client=worker)
    with pytest.raises(ConfigError, match="expected a model"):
        Optimizer(nn.Linear(1, 1))


def test_gradients_of_several_passes_are_summed(worker: PsClient) -> None:
    table = Embedding("passes", 1, optimizer=sgd(1.0), client=worker)
    ids = torch.tensor([7, 8])
    before = table(ids).detach()
    optimizer = Optimizer(table, scale=0.5)
    optimizer.zero_grad()
    (table(ids).sum() + 3 * table(ids[:1]).sum()).backward()
    optimizer.step()
    assert (before - table(ids)).flatten().tolist() == pytest.approx([2.0, 0.5])


def test_the_gradients_of_a_closure_are_pushed_by_its_step(worker: PsClient) -> None:
    """They were pushed by the next step, and the last ones never."""
    table = Embedding("closure", 1, optimizer=sgd(1.0), init=uniform(0, 0), client=worker)
    weight = nn.Parameter(torch.ones(1))
    optimizer = Optimizer(table, torch.optim.SGD([weight], 0.0))
    for step in range(3):
        ids = torch.tensor([step])

        def closure(ids: torch.Tensor = ids) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight * (table(ids) + 2)).sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 2
        assert table(ids).item() == -1
    table.eval()
    assert table(torch.arange(4)).flatten().tolist() == [-1, -1, -1, 0]


def test_prefetched_rows_are_not_used_when_they_are_too_old(tmp_path: Path) -> None:
    """They were used as long as 50 steps later, and after a return to a cut."""
    ids = torch.arange(3)
    with servers(tmp_path, 1, cuts=str(tmp_path / "cuts")) as access, client(access) as worker:
        table = Embedding("old", 1, optimizer=sgd(1.0), init=uniform(0, 0), client=worker)
        optimizer = Optimizer(table)

        def steps(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                (-table(ids[:1])).sum().backward()
                optimizer.step()

        def first() -> float:
            return float(table(ids)[0].item())

        def prefetch(within: int) -> None:
            table.prefetch(ids, steps=within)
            worker.pull({"old": ids.numpy()}).result()  # the rows before it have come

        steps(1)
        worker.save(1, 1)
        prefetch(1)
        steps(1)
        assert first() == 1, "it is one step old"
        prefetch(1)
        steps(2)
        assert first() == 4
        prefetch(2)
        steps(2)
        assert first() == 4
        prefetch(2)
        assert worker.restore(1, 1) == 1
        assert first() == 1
