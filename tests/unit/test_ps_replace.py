"""Large embeddings of a model become tables on the servers; what cannot is refused."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.ps import formats, normal, replace_embeddings, sgd
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.embedding import Embedding, EmbeddingBag, Optimizer
from tests.ps_threads import client, servers


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PsClient]:
    with servers(tmp_path_factory.mktemp("ps")) as access, client(access) as connected:
        yield connected


class Towers(nn.Module):
    """Two towers that share a table, a list, a small table and one that no machine could hold."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Embedding(100, 4, padding_idx=3)
        self.left = nn.Sequential(shared, nn.Linear(4, 4))
        self.right = nn.Sequential(shared, nn.Linear(4, 4))
        self.bags = nn.ModuleList(
            [nn.EmbeddingBag(100, 4, mode=mode, padding_idx=0, sparse=mode == "sum")
             for mode in ("sum", "mean", "max")]
        )  # fmt: skip
        self.small = nn.Embedding(99, 4)
        self.huge = nn.EmbeddingBag(10**12, 4, include_last_offset=True, device="meta")


def test_large_embeddings_are_replaced(worker: PsClient) -> None:
    model = Towers()
    found = replace_embeddings(
        model, min_rows=100, optimizer=sgd(0.5), init=normal(seed=1), formats=formats(pull="fp16"),
        client=worker,
    )  # fmt: skip
    assert found is model
    assert model.left[0] is model.right[0]
    assert isinstance(model.left[0], Embedding)
    assert type(model.small) is nn.Embedding
    assert [bag.mode for bag in model.bags] == ["sum", "mean", "max"]
    assert isinstance(model.huge, EmbeddingBag)
    assert model.huge.include_last_offset
    assert model.huge(torch.tensor([10**12 - 1]), torch.tensor([0, 1])).shape == (1, 4)
    names = {table.name for table in worker.map.tables}
    assert names == {"left.0", "bags.0", "bags.1", "bags.2", "huge"}
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {
        "left", "right", "small"
    }  # fmt: skip
    with pytest.raises(ConfigError, match="there is none"):
        replace_embeddings(model, min_rows=100, client=worker)


@pytest.mark.parametrize("mode", ["", "sum", "mean", "max"])
def test_padding_is_that_of_torch(worker: PsClient, mode: str) -> None:
    name = f"padded-{mode}"
    theirs: nn.Module = nn.Embedding(10, 3, padding_idx=7)
    if mode:
        theirs = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=7)
    holder = nn.ModuleDict({name: theirs})
    ours = replace_embeddings(holder, min_rows=10, optimizer=sgd(0.5), client=worker)[name]
    pulled = worker.pull({name: torch.arange(10).numpy()}).result()[name]
    theirs.weight.data.copy_(torch.from_numpy(pulled))
    theirs.weight.data[7] = 0
    step, optimizer = Optimizer(ours), torch.optim.SGD(theirs.parameters(), 0.5)
    ids = torch.tensor([[7, 1, 7], [7, 7, 7], [2, 7, 1]])
    for _ in range(3):
        found, expected = ours(ids), theirs(ids)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
        for output in (found, expected):
            (output * torch.arange(3.0)).sin().sum().backward()
        step.step()
        optimizer.step()
        optimizer.zero_grad()


def changed(change: Callable[[nn.Module], object]) -> nn.Module:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 100, bias=False))
    change(model)
    return model


class Doubled(nn.Embedding):
    """Computes something else."""


REFUSED = [
    (nn.Embedding(100, 4), "the model cannot be a table on the servers: it has no path"),
    (nn.Sequential(nn.Embedding(100, 4, max_norm=1.0)), "0 cannot .* max_norm"),
    (nn.Sequential(nn.EmbeddingBag(100, 4, scale_grad_by_freq=True)), "how often an id"),
    (nn.Sequential(nn.Embedding(100, 4, dtype=torch.float16)), "torch.float16, and rows are"),
    (nn.Sequential(nn.Embedding.from_pretrained(torch.zeros(100, 4))), "frozen"),
    (nn.Sequential(Doubled(100, 4)), "its class Doubled may compute something else"),
    (changed(lambda model: setattr(model[1], "weight", model[0].weight)), "the same weight"),
]


@pytest.mark.parametrize(("model", "words"), REFUSED)
def test_what_a_table_cannot_do_is_refused(worker: PsClient, model: nn.Module, words: str) -> None:
    before = list(model.modules())
    with pytest.raises(ConfigError, match=words):
        replace_embeddings(model, min_rows=100, client=worker)
    assert list(model.modules()) == before


def test_a_model_stays_whole_when_one_of_its_tables_is_refused(worker: PsClient) -> None:
    model = nn.ModuleDict({"whole": nn.Embedding(100, 4), "a b": nn.Embedding(100, 4)})
    with pytest.raises(ConfigError, match="'a b': expected at most 128 letters"):
        replace_embeddings(model, min_rows=100, client=worker)
    assert all(type(one) is nn.Embedding for one in model.values())
