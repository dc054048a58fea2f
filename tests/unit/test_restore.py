"""From slots and files into a user's state: bit for bit, or not at all."""

import asyncio
import contextlib
import copy
import io
import logging
import os
import pickle
import random
import re
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from dlrover_agent.checkpoint.server import TransferServer
from dlrover_py.checkpoint import shm, transfer
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.protocol.agents import (
    ReplicaLocation,
    ReplicaLocations,
    RestoreCandidate,
    RestoreCandidates,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import CheckpointError, DLRoverError, UnreachableError
from dlrover_py.protocol.manifest import Manifest, WrittenChunk, WrittenObject
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.slots import SlotHeader, TensorChunk
from dlrover_py.trainer import reshard, restore
from dlrover_py.trainer.candidates import (
    CheckpointSources,
    SearchTiming,
    local_agent,
    merge,
    without_rejected,
)
from dlrover_py.trainer.collectives import Ranks
from dlrover_py.trainer.dcp_import import load_dcp
from dlrover_py.trainer.key_differences import KeyDifferences
from dlrover_py.trainer.object_codec import encode_object
from dlrover_py.trainer.reshard import copy_leaves
from dlrover_py.trainer.restore import KeysDifferError, Loaded
from dlrover_py.trainer.restore_targets import RestorePlan, targets
from dlrover_py.trainer.sources import Catalog, PeerSource, RestoreSource, TensorLocation
from dlrover_py.trainer.state_dict import STRUCTURE, PerRank, RandomState, StateLeaf, flatten
from tests import slots
from tests.ids import wrong_after
from tests.slots import Lookup
from tests.staged import stage

LOG = logging.getLogger("test")
DEADLINE_S = 30.0
alone = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:TypedStorage is deprecated"
)


def load(state: Any, pool: Path, **changes: Any) -> Loaded | None:
    names = {"agent", "store", "round", "job", "timing"} & changes.keys()
    sources = CheckpointSources(pool=pool, **{name: changes.pop(name) for name in names})
    return restore.load(state, sources, **{"rank": 0, "world": 1, "log": LOG, **changes})


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def trained(seed: int, steps: int = 3) -> dict[str, Any]:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optim": optimizer, "sched": schedule, "epoch": steps}


def fresh(seed: int) -> dict[str, Any]:
    return {**trained(seed, 0), "epoch": -1}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}


def test_a_state_is_restored_into_new_objects(tmp_path: Path) -> None:
    saved = trained(1)
    stage(tmp_path / "0.0", saved, step=3)
    state = fresh(2)
    found = load(state, tmp_path)
    assert found is not None
    assert (found.step, found.missing) == (3, ())
    assert same(dicts(state), dicts(saved))
    assert found.nbytes.keys() == {"memory"}


def test_lists_of_modules_and_optimizers_are_restored(tmp_path: Path) -> None:
    def listed(state: dict[str, Any]) -> dict[str, Any]:
        return {"models": [state["model"]], "rest": [state["optim"], state["sched"], 7]}

    saved, state = trained(1), fresh(2)
    stage(tmp_path / "0.0", listed(saved), step=3)
    assert load(listed(state), tmp_path) is not None
    assert same({**dicts(state), "epoch": 3}, dicts(saved))


def test_an_optimizer_that_had_no_state_has_none_again(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", fresh(1), step=0)
    state = trained(2)
    assert load(state, tmp_path) is not None
    assert state["optim"].state == {}
    assert same(dicts(state)["model"], fresh(1)["model"].state_dict())


def grouped(*groups: list[str], lr: float = 0.0) -> dict[str, Any]:
    """A model of two layers; its parameters in groups, which differ in their lr."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = dict(model.named_parameters())
    parts = [
        {"params": [named[name] for name in names], "lr": lr + n} for n, names in enumerate(groups)
    ]
    optimizer = torch.optim.AdamW(parts)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


def rates(state: dict[str, Any]) -> list[float]:
    return [group["lr"] for group in state["optim"].param_groups]


WEIGHTS, BIASES = ["0.weight", "1.weight"], ["0.bias", "1.bias"]


def test_groups_in_another_order_are_told_by_their_parameters(tmp_path: Path) -> None:
    saved = grouped(WEIGHTS, BIASES, lr=1.0)
    stage(tmp_path / "0.0", saved)
    state = grouped(BIASES[::-1], WEIGHTS, lr=7.0)
    load(state, tmp_path)
    assert rates(state) == [2.0, 1.0]
    theirs = saved["optim"].state[saved["model"][1].bias]
    assert same(state["optim"].state[state["model"][1].bias], theirs)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ([WEIGHTS, BIASES], [["0.weight"], [*BIASES, "1.weight"]], "1.weight in group 0"),
        ([WEIGHTS, BIASES], [[*WEIGHTS, *BIASES]], "0.weight, 1.weight in group 0, 0.bias"),
        ([[*WEIGHTS, *BIASES]], [WEIGHTS, BIASES], "0.bias, 1.bias in group 0"),
    ],
)
def test_groups_of_other_parameters_are_refused_or_stay_as_they_are(
    before: list[list[str]],
    now: list[list[str]],
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = grouped(*before, lr=1.0)
    stage(tmp_path / "0.0", saved)
    state = grouped(*now, lr=7.0)
    with pytest.raises(KeysDifferError, match=words):
        load(state, tmp_path)
    load(state, tmp_path, strict=False)
    assert rates(state) == [7.0 + n for n in range(len(now))]
    assert words in caplog.text
    theirs = saved["optim"].state[
        saved["model"][1].bias
    ]  # what it has by name is loaded all the same
    assert same(state["optim"].state[state["model"][1].bias], theirs)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([["1.weight"], ["1.bias"]], [WEIGHTS, BIASES], [1.0, 2.0]),
        ([["1.weight"], ["1.bias"]], [BIASES, WEIGHTS], [2.0, 1.0]),
        ([["1.weight", "1.bias"]], [[*WEIGHTS, *BIASES]], [1.0]),
    ],
)
def test_a_group_may_gain_parameters(
    before: list[list[str]], now: list[list[str]], expected: list[float], tmp_path: Path
) -> None:
    stage(tmp_path / "0.0", grouped(*before, lr=1.0))
    state = grouped(*now, lr=7.0)
    load(state, tmp_path)
    assert rates(state) == expected
    assert len(state["optim"].state) == sum(map(len, before))


def test_groups_of_parameters_without_names_are_told_by_their_number(tmp_path: Path) -> None:
    def build(lr: float) -> dict[str, Any]:
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr + n} for n in range(2)]
        return {"optim": torch.optim.SGD(groups)}

    stage(tmp_path / "0.0", build(1.0))
    state = build(7.0)
    load(state, tmp_path)
    assert rates(state) == [1.0, 2.0]


def test_an_optimizer_of_one_rank_alone_may_be_missing(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"model": net(1)})
    state = trained(2)
    found = load({"model": state["model"], "own": PerRank(state["optim"])}, tmp_path)
    assert found is not None
    assert found.missing == ("rank/0/own.param_groups.0",)
    assert state["optim"].state


def test_the_state_of_a_low_precision_parameter_keeps_its_dtype(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return {"optim": torch.optim.AdamW([p]), "p": p}

    saved = build()
    saved["optim"].state[saved["p"]] = {"exp_avg": torch.full((3,), 1 / 3), "step": torch.ones(())}
    stage(tmp_path / "0.0", saved)
    state = build()
    load(state, tmp_path)
    (entries,) = state["optim"].state.values()
    assert same(entries, saved["optim"].state[saved["p"]])


def test_keys_that_differ_are_told_before_anything_is_changed(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", trained(1))
    state = {**fresh(2), "extra": torch.zeros(2)}
    del state["sched"]
    before = {k: v.clone() for k, v in state["model"].state_dict().items()}
    with pytest.raises(KeysDifferError, match=r"does not have extra; .* no place for sched\."):
        load(state, tmp_path)
    assert same(state["model"].state_dict(), before)
    found = load(state, tmp_path, strict=False)
    assert found is not None
    assert found.missing == ("extra",)
    assert {key.partition(".")[0] for key in found.unexpected} == {"sched"}
    assert not same(state["model"].state_dict(), before)


def test_another_shape_is_told_even_where_keys_may_differ(tmp_path: Path) -> None:
    """Somebody trains it: a tensor that is put in its place would not be trained."""
    stage(tmp_path / "0.0", {"w": torch.zeros(4, 3, requires_grad=True)})
    with pytest.raises(KeysDifferError, match=r"w has the shape \(4, 3\), and \(5, 3\) here"):
        load({"w": torch.zeros(5, 3, requires_grad=True)}, tmp_path, strict=False)


class History:
    """Its state has other tensors after each step, as a data loader's has."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        tensors = {f"t{n}": torch.tensor([v]) for n, v in enumerate(self.values)}
        return {"all": torch.tensor(self.values), "deep": [{"all": torch.tensor(self.values)}]} | (
            tensors if len(self.values) > 1 else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["all"].tolist()
        assert torch.equal(state["deep"][0]["all"], state["all"])
        assert [float(state[f"t{n}"]) for n in range(len(self.values))] == self.values


def test_what_an_object_says_of_itself_may_have_another_shape(tmp_path: Path) -> None:
    saved = {"history": History([1.0, 2.0, 3.0]), "own": PerRank(History([4.0, 5.0]))}
    stage(tmp_path / "0.0", saved)
    for old in ([], [9.0], [9.0] * 5):
        state: dict[str, Any] = {"history": History(list(old)), "own": PerRank(History(list(old)))}
        assert load(state, tmp_path) is not None
        assert state["history"].values == [1.0, 2.0, 3.0]
        assert state["own"].value.values == [4.0, 5.0]


class Trainer:
    """A trainer, as many are written: its state is those of others, in a dict."""

    def __init__(self, mesh: Any = None) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(4, 3)
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.taken: dict[str, Any] = {}

    def train(self) -> "Trainer":
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).square().sum().backward()
        self.optimizer.step()
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Grows:
    """Its state is whatever it has come to hold."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


def test_an_optimizer_within_an_object_comes_back(tmp_path: Path) -> None:
    saved = Trainer().train()
    stage(tmp_path / "0.0", {"trainer": saved})
    state = Trainer()
    found = load({"trainer": state}, tmp_path)
    assert found is not None
    assert (found.missing, found.unexpected) == ((), ())
    assert same(state.taken, saved.state_dict())
    assert same(state.train().state_dict(), saved.train().state_dict())


class Wrapping(torch.optim.Optimizer):
    """As timm's Lookahead does it: the state is another one's, and its own has none."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.base.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


class Counting(torch.optim.SGD):
    """It has something of its own."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state.pop("steps")
        super().load_state_dict(state)


def hooked(parameters: Any) -> torch.optim.Optimizer:
    made = torch.optim.Adam(parameters)

    def renamed(old: str, new: str) -> Callable[..., dict[str, Any]]:
        return lambda _, state: {new if k == old else k: v for k, v in state.items()}

    made.register_state_dict_post_hook(renamed("state", "moments"))
    made.register_load_state_dict_pre_hook(renamed("moments", "state"))
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: Wrapping(torch.optim.Adam(ps)),
        lambda ps: Counting(ps, lr=0.1, momentum=0.9),
        hooked,
    ],
)
def test_an_optimizer_that_says_more_than_torchs_is_taken_at_its_word(
    make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    def begin(seed: int, steps: int) -> dict[str, Any]:
        model = net(seed)
        optimizer = make(model.parameters())
        for _ in range(steps):
            model(torch.ones(5, 8)).square().mean().backward()
            optimizer.step()
        return {"model": model, "optim": optimizer}

    saved, state = begin(1, 3), begin(2, 0)
    stage(tmp_path / "0.0", saved)
    flat = flatten(saved, rank=0)
    assert any("state_dict is not torch's own" in note for note in flat.notes), flat.notes
    assert not any(leaf.deferrable for leaf in flat.leaves)
    found = load(state, tmp_path)
    assert found is not None
    assert (found.missing, found.unexpected) == ((), ())
    assert same(dicts(state), dicts(saved))


FULL: dict[str, Any] = {
    "loss": {"train": torch.ones(2), "by": {7: [torch.zeros(1), {"n": 1}], "none": {}}},
    "list": [torch.ones(1), 5, []],
    "with.dots": torch.ones(3),
    "plain": {"a": 1},
}


@pytest.mark.parametrize(
    "fresh",
    [
        {},
        {"loss": {}, "list": [], "plain": {}},
        {"loss": {"train": torch.zeros(2), "by": {}}, "list": [torch.zeros(4)]},
        {"loss": {"by": {7: [torch.zeros(2)]}}},
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_an_object_takes_what_it_had_as_it_was_nested(
    fresh: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    def state(grows: Grows) -> dict[str, Any]:
        return {"h": PerRank(grows) if own else grows}

    stage(tmp_path / "0.0", state(Grows(**FULL)))
    grows = Grows(**copy.deepcopy(fresh))
    load(state(grows), tmp_path)
    assert same(grows.held, FULL)


def test_what_an_object_has_is_its_own_until_it_takes_another(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"h": Grows(loss={"a": torch.ones(2), "b": torch.ones(1)})})
    inner = {"a": torch.zeros(1)}
    with pytest.raises(KeysDifferError, match="does not have more"):
        load({"h": Grows(loss=inner), "more": torch.ones(1)}, tmp_path)
    assert same(inner, {"a": torch.zeros(1)})


@alone
def test_where_nothing_says_how_keys_are_nested_they_are_refused(tmp_path: Path) -> None:
    saved = {"h": {"loss": {"train": torch.ones(2)}, "flat": torch.ones(1)}}
    dcp.save(saved, checkpoint_id=tmp_path)
    grows = Grows()
    with pytest.raises(
        KeysDifferError, match=r"how h\.loss\.train are nested is not in the checkpoint"
    ):
        load_dcp({"h": grows}, tmp_path, rank=0, world=1, log=LOG)
    load_dcp({"h": grows}, tmp_path, rank=0, world=1, strict=False, log=LOG)
    assert same(grows.held, {"flat": torch.ones(1)})


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """Of one rank."""
    meet = tmp_path / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    # torch 2.6 holds the GIL while it joins gloo's threads. One that still frees a tensor needs it.
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch trains on GPUs only"
)
def test_shards_within_an_object_are_placed_as_those_beside_them(mesh: Any, tmp_path: Path) -> None:
    saved = Trainer(mesh).train()
    stage(tmp_path / "0.0", {"trainer": saved})
    state = Trainer(mesh)
    load({"trainer": state}, tmp_path)
    assert same(state.train().state_dict(), saved.train().state_dict())
    with pytest.raises(
        KeysDifferError, match=r"exp_avg, .* were DTensors, and no DTensor of this shape"
    ):
        load({"trainer": Grows()}, tmp_path, strict=False)


def test_a_sharded_model_and_a_copy_that_begins_as_itself_come_back_apart(
    mesh: Any, tmp_path: Path
) -> None:
    def build(*, value: float) -> dict[str, Any]:
        model = nn.Linear(3, 4, bias=False)
        fully_shard(model, mesh=mesh)
        nn.init.constant_(model.weight, value)
        return {"best": model.state_dict(), "model": model}

    saved = build(value=3.0)
    saved["best"] = {key: value.detach().clone() + 4 for key, value in saved["best"].items()}
    stage(tmp_path / "0.0", saved)
    state = build(value=0.0)
    load(state, tmp_path)
    assert torch.equal(state["model"].weight.full_tensor(), torch.full((4, 3), 3.0))
    assert torch.equal(state["best"]["weight"].full_tensor(), torch.full((4, 3), 7.0))
    assert state["best"]["weight"].placements == state["model"].weight.placements


@pytest.mark.parametrize(
    ("shape", "place"),
    [((4, 1), Shard(0)), ((4,), Shard(0)), ((1, 3), Replicate()), ((), Replicate())],
)
def test_shards_of_another_shape_than_their_parameter_are_shards_again(
    shape: tuple[int, ...], place: Any, mesh: Any, tmp_path: Path
) -> None:
    def build() -> dict[str, Any]:
        model = nn.Linear(3, 4, bias=False)
        fully_shard(model, mesh=mesh)
        return {"model": model, "optim": torch.optim.SGD(model.parameters())}

    saved = build()
    value = DTensor.from_local(torch.full(shape, 2.0), mesh, [place])
    saved["optim"].state[saved["model"].weight] = {"sum": value, "step": torch.ones(())}
    stage(tmp_path / "0.0", saved)
    state = build()
    load(state, tmp_path)
    entries = state["optim"].state[state["model"].weight]
    assert type(entries["step"]) is torch.Tensor
    assert entries["sum"].placements == (place,)
    assert torch.equal(entries["sum"].full_tensor(), value.full_tensor())
    assert state["optim"].param_groups[0].keys() == saved["optim"].param_groups[0].keys()


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert load(fresh(1), tmp_path) is None
    assert load(fresh(1), tmp_path / "none") is None


def flip(path: Path, key: str) -> None:
    """Change a byte of a tensor in a slot."""
    with ShmSlot(path, write=True) as slot:
        found = shm.contents(slot)
        at = next(at for chunk, at in found.layout if chunk.key == key)
        slot.view()[at] ^= 1


def test_a_flipped_bit_is_found_and_the_copy_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = trained(1)
    stage(tmp_path / "0.0", saved, rank=0, world=2)
    stage(tmp_path / "1.0", saved, rank=1, world=2)
    flip(tmp_path / "0.0", "model.0.weight")
    state = fresh(2)
    assert load(state, tmp_path) is not None
    assert same(dicts(state), dicts(saved))
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("model.0.weight in "), "in words, whoever set up the log"


def test_what_is_damaged_everywhere_gives_way_to_the_one_before(tmp_path: Path) -> None:
    older = trained(1, 2)
    stage(tmp_path / "0.0", older, step=2)
    stage(tmp_path / "0.1", trained(1, 3), step=3)
    flip(tmp_path / "0.1", "model.2.bias")
    state = fresh(2)
    found = load(state, tmp_path)
    assert found is not None
    assert found.step == 2
    assert same(dicts(state), dicts(older))


def test_after_a_byte_was_copied_it_is_an_error_to_have_loaded_nothing(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", trained(1))
    flip(tmp_path / "0.0", "model.2.bias")
    state = fresh(2)
    with pytest.raises(CheckpointError, match=r"model\.2\.bias.*do not train on"):
        load(state, tmp_path)
    assert state["epoch"] == -1


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_damaged_one_has_left_in_a_tensor_is_not_called_loaded(
    tmp_path: Path, strict: bool
) -> None:
    own = {"own": PerRank(torch.ones(4))} if strict else {"extra": torch.ones(4)}
    stage(tmp_path / "0.0", {"w": torch.full((3,), 2.0)}, step=2)
    stage(tmp_path / "0.1", {"w": torch.full((3,), 3.0), **own}, step=3)
    flip(tmp_path / "0.1", "w")
    state = {"w": torch.zeros(3), **own}
    key = "rank/0/own" if strict else "extra"
    with pytest.raises(CheckpointError, match=rf"no value for {key}, .*do not train on"):
        load(state, tmp_path, strict=strict)
    stage(tmp_path / "0.2", {"w": torch.ones(3), **own}, step=1)
    found = load(state, tmp_path, strict=strict)
    assert found is not None
    assert found.step == 1, "it has something for each"


def test_of_what_is_put_in_at_the_end_a_damaged_one_has_left_nothing(tmp_path: Path) -> None:
    def state(values: list[float]) -> dict[str, Any]:
        return {**fresh(2), "history": History(values)}

    # The older one lacks the tensors of an optimizer, and one of an object that makes its own.
    stage(tmp_path / "0.0", state([1.0, 2.0]), step=2)
    stage(tmp_path / "0.1", {**trained(1), "history": History([4.0, 5.0, 6.0])}, step=3)
    flip(tmp_path / "0.1", "model.2.bias")
    into = {**trained(3), "history": History([7.0, 8.0, 9.0])}
    found = load(into, tmp_path, strict=False)
    assert found is not None
    assert (found.step, found.missing) == (2, ())
    assert into["optim"].state == {}
    assert into["history"].values == [1.0, 2.0]


def test_an_optimizer_that_an_older_one_does_not_have_keeps_nothing_of_a_damaged_one(
    tmp_path: Path,
) -> None:
    saved = trained(1)
    stage(tmp_path / "0.0", {"model": saved["model"]}, step=2)
    stage(tmp_path / "0.1", {"model": saved["model"], "optim": saved["optim"]}, step=3)
    flip(tmp_path / "0.1", "model.2.bias")
    new = fresh(2)
    found = load({"model": new["model"], "optim": new["optim"]}, tmp_path, strict=False)
    assert found is not None
    assert new["optim"].state == {}
    old = trained(2)
    with pytest.raises(CheckpointError, match=r"no value for optim\.state\.0\..*do not train on"):
        load({"model": old["model"], "optim": old["optim"]}, tmp_path, strict=False)


def test_keys_that_differ_from_those_of_an_older_one_are_no_harmless_matter(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"v": torch.ones(3)}, step=2)
    stage(tmp_path / "0.1", {"w": torch.ones(3)}, step=3)
    flip(tmp_path / "0.1", "w")
    with pytest.raises(CheckpointError, match=r"a different state.*do not train on") as caught:
        load({"w": torch.zeros(3)}, tmp_path)
    assert not isinstance(caught.value, KeysDifferError), "which says that nothing was changed"


def saved_by_torch(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_a_set_without_all_its_parts_is_none(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"w": torch.ones(3)}, rank=0, world=2)
    assert load({"w": torch.zeros(3)}, tmp_path) is None


@pytest.mark.parametrize("pickled", [b"no file of torch.save", saved_by_torch(deque())])
def test_a_checkpoint_in_memory_that_cannot_be_read_is_no_reason_to_start_anew(
    pickled: bytes, tmp_path: Path
) -> None:
    flat = flatten({"h": {"a": 1}}, rank=0)
    objects = {key: encode_object(key, value) for key, value in flat.objects.items()}
    objects[f"h{STRUCTURE}"] = pickled
    slots.stage(tmp_path / "0.0", [], objects, job="", step=1, round=0, part="0" * 16)
    state = {"h": {"a": 0}}
    with pytest.raises(
        CheckpointError, match=r"no checkpoint could be loaded; .*h/structure"
    ) as caught:
        load(state, tmp_path)
    assert str(caught.value).isprintable()
    assert state == {"h": {"a": 0}}


def test_a_slot_that_is_being_filled_is_left_alone(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"w": torch.ones(3)}, step=1)
    stage(tmp_path / "0.1", {"w": torch.zeros(3)}, step=2)
    with ShmSlot(tmp_path / "0.1", write=True) as writer:
        assert writer.lock(shared=False)
        found = load({"w": torch.zeros(3)}, tmp_path)
        assert found is not None
        assert found.step == 1


def test_slots_are_given_back(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"w": torch.ones(3)})
    load({"w": torch.zeros(3)}, tmp_path)
    with ShmSlot(tmp_path / "0.0", write=True) as writer:
        assert writer.lock(shared=False)


@pytest.mark.parametrize(("mine", "expected", "missing"), [(7, 7, ()), (None, -1, ("rank/0/x",))])
def test_what_belongs_to_one_rank_is_its_own_or_left(
    tmp_path: Path, mine: int | None, expected: int, missing: tuple[str, ...]
) -> None:
    own = {} if mine is None else {"x": PerRank(mine)}
    stage(tmp_path / "0.0", {"w": torch.ones(2), **own}, rank=0, world=2)
    stage(tmp_path / "1.0", {"w": torch.ones(2), "x": PerRank(8)}, rank=1, world=2)
    state = {"w": torch.zeros(2), "x": PerRank(-1)}
    found = load(state, tmp_path)
    assert found is not None
    assert (state["x"].value, found.missing) == (expected, missing)


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    state = {"rng": PerRank(RandomState())}
    stage(tmp_path / "0.0", state)
    drawn = random.random(), torch.rand(3)
    assert load(state, tmp_path) is not None
    again = random.random(), torch.rand(3)
    assert drawn[0] == again[0]
    assert torch.equal(drawn[1], again[1])


def test_tensors_that_are_not_contiguous_or_of_another_dtype_are_filled(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4)
    stage(tmp_path / "0.0", {"w": value, "v": value, "m": nn.ParameterList([value])})
    w, v = torch.zeros(4, 3).t(), torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    module = nn.ParameterList([value.bfloat16() * 0])
    load({"w": w, "v": v, "m": module}, tmp_path)
    assert torch.equal(w, value)
    assert torch.equal(v, value.double())
    assert torch.equal(module[0], value.bfloat16())


class Holds(nn.Module):
    """It has a tensor as its extra state, and a buffer of the type that it loads."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = value
        self.bank: torch.Tensor
        self.register_buffer("bank", value.clone())

    def get_extra_state(self) -> torch.Tensor:
        return self.value

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.value = state

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.bank = torch.zeros_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (torch.tensor([10**12]), torch.int32),
        (torch.tensor([1 + 1e-12], dtype=torch.float64), torch.float32),
        (torch.tensor([16777217]), torch.float32),
        (torch.tensor([300]), torch.uint8),
        (torch.tensor([True]), torch.float32),
        (torch.tensor([0.5]), torch.float64),
        (torch.tensor([0.5]), torch.int64),
    ],
)
def test_a_tensor_outside_of_modules_keeps_the_dtype_that_was_saved(
    saved: torch.Tensor, here: torch.dtype, mesh: Any, tmp_path: Path
) -> None:
    def build(value: torch.Tensor) -> dict[str, Any]:
        shard = DTensor.from_local(value.clone(), mesh, [Shard(0)])
        return {"x": value, "l": [value], "o": Grows(v=value), "m": Holds(value), "d": shard}

    stage(tmp_path / "0.0", build(saved))
    state = build(torch.zeros(1, dtype=here))
    load(state, tmp_path)
    values = (state["x"], state["l"][0], state["o"].held["v"], state["m"].value, state["m"].bank)
    assert all(same(value, saved) for value in (*values, state["d"].full_tensor()))


def test_a_state_in_which_nothing_can_be_replaced_is_refused_before_it_is_written(
    tmp_path: Path,
) -> None:
    stage(tmp_path / "0.0", {"x": torch.ones(1)})
    x = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(KeysDifferError, match="x is of float32, and of int32 here"):
        load(MappingProxyType({"x": x}), tmp_path)
    assert x.tolist() == [0]


def test_a_tensor_that_is_trained_is_not_rounded(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"w": torch.ones(3)})
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        w = torch.zeros(3).to(dtype).requires_grad_()
        with pytest.raises(KeysDifferError, match=r"w is of float32, and of \w+ here"):
            load({"w": w}, tmp_path)


def negative(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view that says that its values are the negative ones of the memory."""
    return torch._neg_view(tensor)


def test_views_that_only_say_what_their_values_are_are_saved_and_filled(tmp_path: Path) -> None:
    value = torch.randn(4, dtype=torch.complex64)
    stage(tmp_path / "0.0", {"c": value.conj(), "n": negative(value.real.clone())})
    c, n = torch.zeros(4, dtype=torch.complex64), torch.zeros(4)
    load({"c": c.conj(), "n": negative(n)}, tmp_path)
    assert torch.equal(c, value)
    assert torch.equal(n, value.real)


class Box:
    """What a rank has of a tensor, without a mesh of real ranks."""

    def __init__(self, rank: int, whole: torch.Tensor, at: tuple[int, ...], shape: Any) -> None:
        self.rank, self.whole, self.at, self.shape = rank, whole, at, shape

    @property
    def tensor(self) -> torch.Tensor:
        cut = tuple(slice(a, a + n) for a, n in zip(self.at, self.shape, strict=True))
        return self.whole[cut]

    @property
    def chunk(self) -> TensorChunk:
        return TensorChunk("w", "float32", tuple(self.shape), tuple(self.whole.shape), self.at)


def grid(data: st.DataObject, shape: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Cut a tensor into boxes, at random places in each dimension; some may be empty."""
    cuts = []
    for size in shape:
        inner = data.draw(st.lists(st.integers(0, size), max_size=3))
        edges = [0, *sorted(inner), size]
        cuts.append(list(pairwise(edges)))
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in product(*cuts)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_boxes_are_read_out_of_any_others(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    catalog = Catalog()
    source = Bytes()
    for at, size in data.draw(st.permutations(grid(data, shape))):
        box = Box(0, whole, at, size)
        raw = box.tensor.contiguous().numpy().tobytes()
        catalog.add(box.chunk, TensorLocation(source, "", source.put(raw), shm.digest(raw)))
    found = torch.zeros(shape)
    leaves = []
    for at, size in grid(data, shape):
        box = Box(0, found, at, size)
        leaves.append(StateLeaf(box.chunk, box.tensor, False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reshard, "CACHED_COPY_BYTES", data.draw(st.sampled_from([8, shm.CACHED_COPY_BYTES]))
        )
        for leaf in leaves:
            copy_leaves(catalog, [leaf], LOG)
    assert torch.equal(found, whole)


class Bytes:
    """A source: bytes one behind the other."""

    kind, where = "memory", "here"

    def __init__(self) -> None:
        self.data = b""

    def put(self, data: bytes) -> int:
        self.data += data
        return len(self.data) - len(data)

    def read(self, file: str, position: int, target: memoryview) -> None:
        target[:] = self.data[position : position + len(target)]


class Mute:
    """A connection that breaks, and does not say why."""

    where = "transfer server of n1"

    def contents(self, name: str, write_id: str) -> None:
        """Say nothing of a slot."""

    def read_all(self, *_: object, **__: object) -> Iterator[memoryview]:
        raise EOFError


def test_what_a_peer_did_not_send_without_a_word_is_read_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    value, found, catalog, there = torch.arange(4.0), torch.zeros(4), Catalog(), Bytes()
    raw = value.numpy().tobytes()
    chunk = TensorChunk("w", "float32", (4,), (4,), (0,))
    mute: Any = Mute()
    peer = PeerSource(mute, "0.0", "written once", threading.Lock())
    catalog.add(chunk, TensorLocation(peer, "", 0, shm.digest(raw)))
    catalog.add(chunk, TensorLocation(there, "", there.put(raw), shm.digest(raw)))
    nbytes = copy_leaves(catalog, [StateLeaf(chunk, found, False)], LOG)
    assert torch.equal(found, value)
    assert nbytes == {"memory": 16}
    assert "w in 0.0 of the transfer server of n1 is not used: EOFError" in caplog.text


# --- which is the newest ---


def one(
    step: int, round: int = 0, timeline: int = 0, job: str = "", folder: str = ""
) -> RestoreSource:
    return RestoreSource(Step(step), Round(round), Timeline(timeline), 1, job, not folder, folder)


def test_a_set_in_memory_and_in_storage_is_one_candidate() -> None:
    memory, stored = [one(3), one(2)], [one(2, folder="s2"), one(1, folder="s1")]
    assert [(f.step, f.memory, f.folder) for f in merge(memory, stored, "")] == [
        (3, True, ""), (2, True, "s2"), (1, False, "s1"),
    ]  # fmt: skip


def test_a_script_that_went_back_is_believed() -> None:
    memory = [one(5, round=2, job="j")]
    stored = [one(9, round=1, job="j", folder="old")]
    assert [f.step for f in merge(memory, stored, "j")] == [5, 9]
    assert [f.step for f in merge(stored=memory, memory=stored, job="j")] == [5, 9]


def test_what_another_job_has_left_is_older_than_ones_own_memory() -> None:
    memory, stored = [one(5, job="j")], [one(9, job="k", folder="old")]
    assert [f.step for f in merge(memory, stored, "j")] == [5, 9]


def test_what_has_wrong_values_is_no_candidate() -> None:
    found = [one(12, 2, job="j"), one(11, 1, job="j"), one(10, 1, job="j", folder="s"), one(9, 1)]
    left = without_rejected(found, "j", [wrong_after(1, 10)])
    assert [(f.step, f.round) for f in left] == [(12, 2), (10, 1), (9, 1)]
    left = without_rejected(found, "j", [wrong_after(1, 10), wrong_after(2, 5)])
    assert [f.step for f in left] == [9], "only another job's is left"


# --- torch's own ---


@alone
def test_what_dcp_save_wrote_is_loaded(tmp_path: Path) -> None:
    saved = trained(1)
    dcp.save(
        {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in saved.items()},
        checkpoint_id=tmp_path,
    )
    state = fresh(2)
    load_dcp(state, tmp_path, rank=0, world=1, log=LOG)
    assert same(dicts(state), dicts(saved))


@alone
def test_what_get_state_dict_gives_is_loaded(tmp_path: Path) -> None:
    saved = trained(1)
    model, optimizer = get_state_dict(saved["model"], saved["optim"])
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path)
    state = fresh(2)
    del state["epoch"], state["sched"]
    load_dcp(state, tmp_path, rank=0, world=1, log=LOG)
    assert same(dicts(state)["model"], dicts(saved)["model"])
    assert same(dicts(state)["optim"], dicts(saved)["optim"])


def test_metadata_that_name_anything_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(os.kill))
    with pytest.raises(CheckpointError, match=r"names posix\.kill: expected torch's metadata"):
        load_dcp(fresh(1), tmp_path, rank=0, world=1, log=LOG)


def test_the_password_of_initial_values_is_refused_and_not_shown() -> None:
    with pytest.raises(CheckpointError, match="it has a password") as caught:
        load_dcp(fresh(1), "ftp://me:hunter2@nas/run", rank=0, world=1, log=LOG)
    assert str(caught.value).startswith(
        "ftp://me:***@nas/run cannot be read: initial values in 'ftp://me:***@nas/run': "
    )
    assert "hunter2" not in str(caught.value)


@alone
def test_a_damaged_tensor_in_a_file_of_torchs_is_told(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    state = {"w": torch.zeros(4)}
    with pytest.raises(CheckpointError, match=r"w cannot be read: .*do not train on") as caught:
        load_dcp(state, tmp_path, rank=0, world=1, log=LOG)
    assert str(caught.value).isprintable()


@alone
@pytest.mark.parametrize(
    ("saved", "flat", "state", "expected"),
    [
        ({"x": {"a.b": 5, "c": 6}}, False, {"x": {"a": 1, "c": 0}}, {"x": {"a": 1, "c": 6}}),
        ({"x.a.b": 5, "x.a.b.c": 6, "y": 7}, True, {"x.a": 1, "y": 0}, {"x.a": 1, "y": 7}),
        ({"x.a.b.c": 6, "x.a.b": 5, "y": 7}, True, {"x.a": 1, "y": 0}, {"x.a": 1, "y": 7}),
        ({"x.a": {"b": 5}, "x": {"a": {"c": 6}}}, False, {"x.a": 0}, {"x.a": {"b": 5}}),
        ({"x": {"a": {"c": [{"d": 1}, 6]}}}, False, {"x.a": 0}, {"x.a": {"c": [{"d": 1}, 6]}}),
    ],
)
def test_of_keys_of_torchs_only_those_that_are_an_objects_own_make_one(
    saved: dict[str, Any],
    flat: bool,
    state: dict[str, Any],
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=not flat)
    dcp.save(saved, checkpoint_id=tmp_path, planner=planner)
    load_dcp(state, tmp_path, rank=0, world=1, strict=False, log=LOG)
    assert state == expected


def without_location(metadata: Any) -> None:
    metadata.storage_data = {
        index: info for index, info in metadata.storage_data.items() if index.fqn != "n"
    }


def with_odd_locations(metadata: Any) -> None:
    metadata.storage_data = dict.fromkeys(metadata.storage_data, 7)


def with_odd_bounds(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks[0].offsets = ("a",)


def without_properties(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties = None


def with_a_type_that_is_none(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = "os"


def with_a_number_as_key(metadata: Any) -> None:
    metadata.state_dict_metadata[3] = metadata.state_dict_metadata.pop("w")


def without_chunks(metadata: Any) -> None:
    del metadata.state_dict_metadata["w"].chunks


@alone
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_location, "n has no valid location in its .metadata"),
        (with_odd_locations, "has no valid location in its .metadata"),
        (with_odd_bounds, "w has no valid chunk in its .metadata"),
        (without_properties, "its .metadata is malformed: AttributeError: "),
        (with_a_type_that_is_none, "w has no valid chunk in its .metadata"),
        (with_a_number_as_key, "3 in its .metadata is no key"),
        (without_chunks, "its .metadata is malformed: AttributeError: "),
    ],
)
def test_malformed_metadata_are_refused(
    damage: Callable[[Any], None], words: str, tmp_path: Path
) -> None:
    dcp.save({"w": torch.ones(4), "n": 5}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    damage(metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"w": torch.zeros(4), "n": 0}
    with pytest.raises(CheckpointError, match=re.escape(words)):
        load_dcp(state, tmp_path, rank=0, world=1, log=LOG)
    assert same(state, {"w": torch.zeros(4), "n": 0})


@alone
def test_what_another_planner_has_noted_is_no_matter(tmp_path: Path) -> None:
    dcp.save({"x": {"a": 5}}, checkpoint_id=tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    odd: list[object] = [7, {"x.a": 7}, {"x.a": ()}, {"x.a": ("x", {})}, {"x.a": ("y", "a")}]
    for noted in odd:
        metadata.planner_data = noted
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        state: dict[str, Any] = {"x": 0}
        load_dcp(state, tmp_path, rank=0, world=1, log=LOG)
        assert state == {"x": {"a": 5}}


# --- from storage and from peers ---


def persist(folder: Path, slot_path: Path) -> CheckpointDirectory:
    """Write what a slot holds to storage, the simplest way."""
    store = CheckpointDirectory(folder)
    with ShmSlot(slot_path) as slot:
        found = shm.contents(slot)
        raw = bytes(slot.view())
    s = found.header
    name = f"step-{s.step}.a"
    (folder / name).mkdir(parents=True)
    chunks = []
    for (chunk, at), xxh3 in zip(found.layout, found.digests, strict=True):
        chunks.append(WrittenChunk(chunk, "raw", at, xxh3))
    objects = []
    for key, data in found.objects.items():
        objects.append(WrittenObject(key, "raw", len(raw), len(data), shm.digest(data)))
        raw += data
    (folder / name / "raw").write_bytes(raw)
    store.commit(
        Manifest(
            step=s.step, attempt="a", job=s.job, round=s.round, timeline=s.timeline, world=s.world,
            folder=name, at=0.0, chunks=tuple(chunks), objects=tuple(objects),
        )
    )  # fmt: skip
    return store


def test_a_new_job_starts_from_storage(tmp_path: Path) -> None:
    saved = trained(1)
    stage(tmp_path / "0.0", saved, step=3)
    store = persist(tmp_path / "store", tmp_path / "0.0")
    state = fresh(2)
    found = load(state, tmp_path / "none", store=store)
    assert found is not None
    assert (found.step, found.folder, set(found.nbytes)) == (3, "step-3.a", {"storage"})
    assert same(dicts(state), dicts(saved))


def test_a_ranks_own_is_read_from_storage_where_memory_has_lost_it(tmp_path: Path) -> None:
    """It went with its node; all else is in the others' memory."""
    (folder := tmp_path / "pool").mkdir()
    everything = {"w": torch.ones(2), "x": PerRank(7)}
    stage(tmp_path / "0.0", everything, rank=0, world=2)
    store = persist(tmp_path / "store", tmp_path / "0.0")
    stage(folder / "0.0", {"w": torch.ones(2)}, rank=0, world=2)
    stage(folder / "1.0", {"w": torch.ones(2), "x": PerRank(8)}, rank=1, world=2)
    state = {"w": torch.zeros(2), "x": PerRank(-1)}
    found = load(state, folder, store=store)
    assert found is not None
    assert (state["x"].value, found.missing) == (7, ())
    assert found.memory
    assert set(found.nbytes) == {"memory"}


def test_only_what_memory_has_lost_is_read_from_storage(tmp_path: Path) -> None:
    saved = trained(1)
    (tmp_path / "pool").mkdir()
    stage(tmp_path / "pool" / "0.0", saved)
    store = persist(tmp_path / "store", tmp_path / "pool" / "0.0")
    flip(tmp_path / "pool" / "0.0", "model.2.weight")
    state = fresh(2)
    found = load(state, tmp_path / "pool", store=store)
    assert found is not None
    assert found.nbytes["storage"] == state["model"][2].weight.nbytes
    assert found.nbytes["memory"] > found.nbytes["storage"]
    assert same(dicts(state), dicts(saved))


def test_a_checkpoint_that_cannot_be_read_is_no_reason_to_start_anew(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", trained(1), step=3)
    store = persist(tmp_path / "store", tmp_path / "0.0")
    (tmp_path / "store" / "step-3.a" / "raw").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint could be loaded; tried step 3"):
        load(fresh(2), tmp_path / "none", store=store)


def test_a_damaged_manifest_that_may_be_the_only_one_is_no_reason_either(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    stage(tmp_path / "pool" / "0.0", trained(1), step=3)
    store = persist(tmp_path / "store", tmp_path / "pool" / "0.0")
    path = tmp_path / "store" / "step-3.a.json"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=r"step-3\.a\.json is damaged .* restore it, or rem"):
        load(fresh(2), tmp_path / "none", store=CheckpointDirectory(store.place.url))
    there = load(fresh(2), tmp_path / "pool", store=CheckpointDirectory(store.place.url))
    assert there is not None, "memory has one"


def test_what_cannot_be_read_is_named_where_another_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (3, 4):
        stage(tmp_path / f"{step}" / "0.0", trained(1), step=step)
        store = persist(tmp_path / "store", tmp_path / f"{step}" / "0.0")
    newest = tmp_path / "store" / "step-4.a.json"
    newest.unlink()
    newest.symlink_to(newest.name)  # no user can read it
    found = load(fresh(2), tmp_path / "none", store=CheckpointDirectory(store.place.url))
    assert found is not None
    assert found.step == 3
    assert "not all checkpoints are known" in caplog.text
    assert "step-4.a.json is skipped: it cannot be read: Too many levels" in caplog.text


class Broken(CheckpointDirectory):
    """A storage that does not answer."""

    def checkpoints(self) -> list[Manifest]:
        raise OSError("the server is away")


def test_a_storage_that_does_not_answer_may_have_something(tmp_path: Path) -> None:
    store = Broken(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"server is away; it is not known whether"):
        load(fresh(2), tmp_path / "none", store=store)
    stage(tmp_path / "0.0", trained(1))
    assert load(fresh(2), tmp_path, store=store) is not None


@pytest.mark.parametrize("below", ["", "run-1"])
def test_a_file_in_the_place_of_the_directory_is_told(tmp_path: Path, below: str) -> None:
    """It said "it is not known whether there is a checkpoint: try again"."""
    (tmp_path / "file").touch()
    store = CheckpointDirectory(tmp_path / "file" / below)
    with pytest.raises(CheckpointError, match="is a file, or lies below one: expected a folder"):
        load(fresh(2), tmp_path / "none", store=store)
    stage(tmp_path / "0.0", trained(1))
    assert load(fresh(2), tmp_path, store=store) is not None


class Hanging(CheckpointDirectory):
    """A file system whose server is gone."""

    def checkpoints(self) -> list[Manifest]:
        threading.Event().wait()
        raise AssertionError


def test_a_storage_that_hangs_holds_up_nobody_whose_memory_has_one(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", trained(1), step=3)
    store, timing = Hanging(tmp_path / "store"), SearchTiming(store_timeout_s=0.1)
    found = load(fresh(2), tmp_path, store=store, timing=timing)
    assert found is not None
    assert (found.step, found.memory) == (3, True)


class Late(logging.Handler, CheckpointDirectory):
    """A file system that answers once it was said twice that it does not."""

    def __init__(self, folder: Path) -> None:
        logging.Handler.__init__(self)
        CheckpointDirectory.__init__(self, folder)
        self.said: list[str] = []
        self.back = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if len(self.said) == 2:
            self.back.set()

    def checkpoints(self) -> list[Manifest]:
        self.back.wait(60)
        return super().checkpoints()


def test_a_storage_that_may_have_the_only_one_is_waited_for_and_that_is_said(
    tmp_path: Path,
) -> None:
    timing = SearchTiming(store_timeout_s=0.01, message_interval_s=0.01)
    stage(tmp_path / "0.0", trained(1), step=3)
    persist(tmp_path / "store", tmp_path / "0.0")
    store = Late(tmp_path / "store")
    log = logging.getLogger("test.late")
    log.addHandler(store)
    found = load(fresh(2), tmp_path / "none", store=store, log=log, timing=timing)
    log.removeHandler(store)
    assert found is not None
    assert found.step == 3
    assert len(store.said) >= 2
    assert f"{tmp_path}/store has not listed its checkpoints" in store.said[0]


@contextlib.contextmanager
def depots(
    folders: dict[str, Path], rows: list[tuple[str, SlotHeader]], base: Path
) -> Iterator[transfer.TransferConnection]:
    """Real depots, the first of them one's own; each row is a node, and what it holds."""
    loop = asyncio.new_event_loop()
    served: dict[str, TransferServer] = {}
    at = {s.id: s.world for _, s in rows}

    async def candidates(round: int) -> RestoreCandidates:
        return RestoreCandidates(
            candidates=[
                RestoreCandidate(**asdict(id_), world=at[id_]) for id_ in sorted(at, reverse=True)
            ]
        )

    async def locations(_: CheckpointId) -> ReplicaLocations:
        return ReplicaLocations(
            locations=[
                ReplicaLocation(
                    rank=s.rank,
                    node=node,
                    addr="127.0.0.1",
                    port=served[node].port,
                    part=s.part,
                    private_only=s.private_only,
                )
                for node, s in rows
            ]
        )

    async def main(ready: threading.Event) -> None:
        for node, folder in folders.items():
            served[node] = TransferServer(
                folder, "", "token", base / f"{node}.sock",
                lookup=Lookup(candidates, locations), addr="127.0.0.1",
            )  # fmt: skip
        ready.set()
        await asyncio.gather(*(one.run() for one in served.values()))

    ready = threading.Event()
    task = loop.create_task(main(ready))
    thread = threading.Thread(target=lambda: loop.run_until_complete(wait(task)))
    thread.start()
    try:
        assert ready.wait(60)
        with transfer.TransferConnection.local(base / f"{next(iter(folders))}.sock") as link:
            yield link
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        loop.close()


async def wait(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("damaged", [False, True])
def test_a_node_without_memory_reads_its_peers(tmp_path: Path, damaged: bool) -> None:
    saved = trained(1)
    folders = {name: tmp_path / name for name in ("own", "a", "b")}
    rows = []
    for rank, node in enumerate(("a", "b")):
        folders[node].mkdir()
        header = stage(folders[node] / "0.0", saved, rank=rank, world=2, round=4)
        rows.append((node, header))
    if damaged:
        flip(folders["a"] / "0.0", "model.0.weight")
    folders["own"].mkdir()
    state = fresh(2)
    with depots(folders, rows, tmp_path) as link:
        found = load(state, folders["own"], agent=link, round=5)
    assert found is not None
    assert (found.step, found.round, set(found.nbytes)) == (1, 4, {"peer"})
    assert same(dicts(state), dicts(saved))


def test_what_only_some_ranks_have_grown_makes_nothing_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would drop its own, and nothing would be loaded."""
    fit = RestorePlan(targets({}, rank=0))
    fit.keys = KeyDifferences(
        missing=["net.w"], unexpected=["model.w"], new_entries=["a.x"], disjoint=True
    )
    other = copy.deepcopy(fit.keys)
    other.new_entries = ["b.y"]
    ranks = Ranks(0, 1)
    monkeypatch.setattr(ranks, "all", lambda said: [said, ("", asdict(other))])
    with pytest.raises(KeysDifferError, match=r"no keys in common: the checkpoint has model\.w"):
        restore.agree(ranks, "step 7", fit, None, strict=False)
    other.new_entries = ["a.x"]
    fit.keys.disjoint = other.disjoint = True
    assert restore.agree(ranks, "step 7", fit, None, strict=False) == ""


# --- two ranks ---


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Two ranks, each a thread with a process group of its own."""
    from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]
    from torch.testing._internal.distributed.multi_threaded_pg import (
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    def run(act: Callable[[int], None]) -> None:
        store, limit = dist.FileStore(str(tmp_path / "meet"), 2), timedelta(seconds=DEADLINE_S)

        def rank(number: int) -> None:
            dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=limit)
            try:
                act(number)
            finally:
                dist.destroy_process_group()

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(rank, range(2)))

    _set_thread_isolation_mode(True)
    _install_threaded_pg()
    yield run
    _uninstall_threaded_pg()
    _set_thread_isolation_mode(False)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_load_fails_on_all_ranks_if_the_agent_of_one_does_not_answer(
    two_ranks: Callable[[Callable[[int], None]], None], tmp_path: Path, silent: int
) -> None:
    """Its memory may have the newest checkpoint."""
    said: dict[int, DLRoverError] = {}

    def act(rank: int) -> None:
        socket = str(tmp_path / "none.sock") if rank == silent else ""
        try:
            with local_agent(socket) as agent:
                load({"w": torch.zeros(2)}, tmp_path, rank=rank, world=2, agent=agent)
        except DLRoverError as error:
            said[rank] = error

    two_ranks(act)
    assert type(said[silent]) is UnreachableError
    assert type(said[1 - silent]) is CheckpointError
    assert str(said[1 - silent]).startswith(f"rank {silent}: nothing can be loaded: the agent's ")
