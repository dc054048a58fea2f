"""What ``save`` accepts, ``load`` gives back to a state that was built anew.

The oracle is ``torch.save`` and ``load_state_dict``.
"""

import io
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dlrover_py.protocol.errors import CheckpointError, ConfigError
from dlrover_py.trainer import restore
from dlrover_py.trainer.state import STRUCTURE, encode_object, flatten
from tests import slots
from tests.staged import stage

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of schedulers and optimizers
LOG = logging.getLogger("test")


def load(state: dict[str, Any], arena: Path) -> None:
    found = restore.load(
        state, rank=0, world=1, arena=arena, agent=None, store=None, log=LOG, job=""
    )
    assert found is not None


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, of the same types; NumPy's numbers are Python's."""
    one, other = (v.item() if isinstance(v, np.generic) else v for v in (one, other))
    if type(one) is not type(other) and not (isinstance(one, dict) and type(other) is dict):
        return False  # (a dict stays of the type that it has here)
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# --- plain values ---

tensors = st.builds(
    lambda shape, dtype, number: torch.full(shape, number).to(dtype),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from([torch.float32, torch.int64, torch.bool]),
    st.integers(0, 9),
)
arrays = st.builds(
    lambda shape, dtype, number: np.full(shape, number).astype(dtype),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(["float32", "int64", "bool", "<U3", "datetime64[s]"]),
    st.integers(0, 9),
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary()
    | st.sampled_from([np.float32(0.5), np.int64(3), np.bool_(True), np.float64(2.5)])
    | tensors | arrays
)  # fmt: skip
names = st.sampled_from(["a", "b", "c.d", 0, 1, 7, -1, 0.5, (1, 2)])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(names, inner, max_size=3).filter(
        lambda items: len(set(map(str, items))) == len(items)
    )
    return (
        dicts
        | st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | dicts.map(OrderedDict)
        | dicts.map(lambda items: defaultdict(list, items))
    )


values = st.recursive(leaves, containers, max_leaves=8)
states = st.dictionaries(st.sampled_from("xyz"), values, max_size=3)


def clash(value: Any, key: str = "") -> list[str]:
    """The keys of all that a value is taken apart to, which must differ."""
    if isinstance(value, dict):
        return [key, *(k for n, v in value.items() for k in clash(v, f"{key}.{n}"))]
    if isinstance(value, list):
        return [key, *(k for n, v in enumerate(value) for k in clash(v, f"{key}.{n}"))]
    return [key]


@settings(max_examples=150, deadline=None)
@given(built=states, saved=states)
def test_plain_values_come_back_whatever_was_there(
    built: dict[str, Any], saved: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if len(keys := clash(saved)) != len(set(keys)):
        return
    arena = tmp_path_factory.mktemp("arena")
    stage(arena / "0.0", saved)
    state = {name: by_torch(value) for name, value in built.items() if name in saved}
    load(state, arena)
    assert equal(state, by_torch(saved)), state


# --- modules, optimizers, schedulers ---


class Extra(nn.Linear):
    """Its ``get_extra_state`` gives more after each step, or another kind of value."""

    form = 0

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.detach().mean()))
        return super().forward(x)

    def get_extra_state(self) -> Any:
        if self.form == 0:
            return torch.tensor(self.seen)
        if self.form == 1:
            return torch.tensor(self.seen) if self.seen else None
        if self.form == 2:
            file = io.BytesIO()
            torch.save(self.seen, file)
            return file
        return {"seen": self.seen, "all": torch.tensor(self.seen)} if self.seen else []

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, io.BytesIO):
            state.seek(0)
            state = torch.load(state, weights_only=True)
        if isinstance(state, dict):
            state = state["seen"]
        self.seen = [float(value) for value in (() if state is None else state)]


class Bank(nn.Module):
    """A memory bank: its buffer grows, and its own method loads one of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("bank", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x.detach()])
        return self.fc(x)  # type: ignore[no-any-return]

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.bank = torch.zeros_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *rest)


class Observers(nn.Module):
    """It has one more buffer after each step, and a hook that makes room for them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.gone = False
        self.register_buffer("first", torch.zeros(1))
        self.register_load_state_dict_pre_hook(self.make_room)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "first" in self._buffers:
            del self.first
        self.register_buffer(f"at{len(self._buffers)}", x.detach().mean())
        return self.fc(x)  # type: ignore[no-any-return]

    @staticmethod
    def make_room(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in list(module._buffers):
            del module._buffers[name]
        for key, value in state.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and "." not in name:
                module.register_buffer(name, torch.zeros_like(value))


class Lora(nn.Module):
    """Its frozen base is left out by a hook, and one that it loads by allows that."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.base.requires_grad_(False)
        nn.init.ones_(self.base.weight)
        nn.init.ones_(self.base.bias)
        self.fc = nn.Linear(3, 3)
        self.register_state_dict_post_hook(self.leave_out)
        self.register_load_state_dict_post_hook(self.allow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.fc(x)  # type: ignore[no-any-return]

    @staticmethod
    def leave_out(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}base.")]:
            del state[key]

    @staticmethod
    def allow(module: Any, found: Any) -> None:
        found.missing_keys[:] = [k for k in found.missing_keys if ".base." not in f".{k}"]


def observer() -> nn.Module:
    from torch.ao.quantization.observer import HistogramObserver, PerChannelMinMaxObserver

    return nn.Sequential(nn.Linear(3, 3), PerChannelMinMaxObserver(ch_axis=1), HistogramObserver())


def normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3), nn.LayerNorm(3)
    )


MODULES: list[Callable[[], nn.Module]] = [
    Extra, Bank, Observers, Lora, observer, normed,
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.0),
    lambda: torch.optim.swa_utils.AveragedModel(nn.Sequential(nn.Linear(3, 3), Extra())),
]  # fmt: skip
OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD([{"params": [one], "lr": torch.tensor(0.1)} for one in p]),
    lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    lambda p: torch.optim.LBFGS(p, max_iter=2),
    *(
        getattr(torch.optim, name)
        for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam",
                     "RAdam", "Rprop")
    ),
]  # fmt: skip
rates = torch.optim.lr_scheduler
SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: rates.StepLR(o, 2),
    lambda o: rates.LambdaLR(o, lambda step: 0.9**step),
    lambda o: rates.CosineAnnealingWarmRestarts(o, 3),
    lambda o: rates.SequentialLR(
        o, [rates.ConstantLR(o, total_iters=1), rates.ExponentialLR(o, 0.9)], [1]
    ),
    lambda o: rates.ChainedScheduler([rates.LinearLR(o), rates.MultiStepLR(o, [1, 3])]),
]


def states_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.state_dict() for name, value in state.items()}


@settings(max_examples=100, deadline=None)
@given(
    module=st.sampled_from(MODULES),
    form=st.integers(0, 3),
    optimizer=st.sampled_from(OPTIMIZERS),
    scheduler=st.sampled_from(SCHEDULERS),
    before=st.integers(0, 2),
    after=st.integers(0, 4),
)
def test_all_of_torchs_comes_back_as_load_state_dict_has_it(
    module: Callable[[], nn.Module],
    form: int,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any],
    before: int,
    after: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    Extra.form = form

    def made(seed: int, steps: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = module()
        optim = optimizer([p for p in model.parameters() if p.requires_grad])
        state = {"model": model, "optim": optim, "sched": scheduler(optim)}

        def closure() -> torch.Tensor:
            optim.zero_grad()
            loss = model(torch.randn(4, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            closure()
            optim.step(closure)  # type: ignore[arg-type]
            state["sched"].step()
        return state

    saved = made(1, after)
    arena = tmp_path_factory.mktemp("arena")
    stage(arena / "0.0", saved)
    theirs, ours = made(2, before), made(2, before)
    for name, value in by_torch(states_of(saved)).items():
        theirs[name].load_state_dict(value)
    load(ours, arena)
    assert equal(states_of(ours), states_of(theirs))
    assert equal(states_of(ours), states_of(saved))


# --- in words, or not at all ---


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (nn.ParameterList([nn.Parameter(torch.ones(2))]),
         nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)]),
         r"m\.0 is of float32, and of int64 here"),
        (nn.ParameterList([nn.Parameter(torch.ones(3, 2))]),
         nn.ParameterList([nn.Parameter(torch.zeros(1, 2).expand(3, 2))]),
         r"m\.0 has elements here that share memory"),
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_take_what_was_saved_is_told_before_anything_changes(
    saved: nn.Module, here: nn.Module, words: str, tmp_path: Path
) -> None:
    stage(tmp_path / "0.0", {"m": saved, "x": [torch.ones(1)]})
    state = {"m": here, "x": []}
    with pytest.raises(restore.KeysDiffer, match=words):
        load(state, tmp_path)
    assert state["x"] == []


def test_what_has_no_memory_is_refused_however_often_its_key_was_seen(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"m": nn.Linear(2, 2)})
    for empty in (nn.Linear(2, 2, device="meta"), nn.LazyLinear(2)):
        with pytest.raises(ConfigError, match=r"m\.weight has no memory yet: expected it init"):
            load({"m": empty}, tmp_path)


def test_the_users_own_dicts_and_lists_are_filled(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"h": {"log": [{"n": 1}], "loss": [0.5]}, "x": [1, 2]})
    history, numbers = {"log": [], "loss": [1.0], "gone": 3}, [7]
    log, loss = history["log"], history["loss"]
    load({"h": history, "x": numbers}, tmp_path)
    assert history == {"log": [{"n": 1}], "loss": [0.5]}
    assert history["log"] is log
    assert history["loss"] is loss
    assert numbers == [1, 2]


def test_objects_among_plain_values_stay_what_they_are(tmp_path: Path) -> None:
    def made(**more: Any) -> dict[str, Any]:
        return {"all": {"m": nn.Linear(2, 2), **more}, "l": [nn.Linear(1, 1)]}

    saved, here = made(best=0.5, log=[{"n": torch.ones(1)}]), made(best=None, other=1)
    stage(tmp_path / "0.0", saved)
    inner = here["all"]["m"], here["l"][0]
    load(here, tmp_path)
    assert (here["all"].pop("m"), here["l"].pop()) == inner
    assert torch.equal(inner[0].weight, saved["all"]["m"].weight)
    assert equal(here["all"], {"best": 0.5, "log": [{"n": torch.ones(1)}]})


def test_where_nothing_says_how_a_value_is_nested_it_must_be_what_it_was(tmp_path: Path) -> None:
    """As in the memory and the files of the versions before this one."""
    flat = flatten({"h": {"a": 1, "log": [{"n": 2}]}}, rank=0)
    del flat.objects[f"h{STRUCTURE}"]
    objects = {key: encode_object(key, value) for key, value in flat.objects.items()}
    slots.stage(tmp_path / "0.0", [], objects, job="", step=1, round=0, part="0" * 16)
    state = {"h": {"a": 0, "log": [{"n": 0}]}}
    load(state, tmp_path)
    assert state == {"h": {"a": 1, "log": [{"n": 2}]}}
    with pytest.raises(restore.KeysDiffer, match=r"how h\.log\.0\.n are nested is not in the ch"):
        load({"h": {"a": 0, "log": []}}, tmp_path)


def test_a_module_that_does_not_take_it_is_named(tmp_path: Path) -> None:
    class Picky(Extra):
        def set_extra_state(self, state: Any) -> None:
            raise ValueError("not this one")

    stage(tmp_path / "0.0", {"net": Extra()})
    with pytest.raises(CheckpointError, match=r"net does not take .*not this one.*do not train on"):
        load({"net": Picky()}, tmp_path)
