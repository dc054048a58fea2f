"""What ``save`` accepts, ``load`` gives back to a state that was built anew.

The oracle is ``torch.save`` and ``load_state_dict``.
"""

import io
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import StrEnum
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
from dlrover_py.trainer.candidates import CheckpointSources
from dlrover_py.trainer.object_codec import encode_object
from dlrover_py.trainer.state_dict import STRUCTURE, PerRank, flatten
from tests import slots
from tests.staged import stage

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of schedulers and optimizers
LOG = logging.getLogger("test")


def load(state: dict[str, Any], pool: Path) -> None:
    found = restore.load(state, CheckpointSources(pool=pool), rank=0, world=1, log=LOG)
    assert found is not None


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, of the same types."""
    if type(one) is not type(other) and not (isinstance(one, dict) and type(other) is dict):
        return False  # (a dict stays of the type that it has here)
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and bool(torch.equal(one, other))
    if isinstance(one, np.ndarray | np.generic):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, io.BytesIO):
        return bool(one.getvalue() == other.getvalue())
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
    st.sampled_from([torch.float32, torch.float64, torch.int32, torch.int64, torch.bool]),
    st.integers(0, 9),
)
arrays = st.builds(
    lambda shape, dtype, number: np.full(shape, number).astype(dtype),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(["float32", "int64", "bool", "<U3", "datetime64[s]"]),
    st.integers(0, 9),
)
scalars = st.builds(
    lambda dtype, number: np.asarray(number).astype(dtype)[()],
    st.sampled_from(["bool", "int8", "int64", "uint16", "float16", "float32", "float64"])
    | st.sampled_from(["longdouble", "complex64", "timedelta64[s]", "<U3", "S2"])
    | st.sampled_from(["datetime64[ns]", "datetime64[D]"]),
    st.integers(0, 99),
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary()
    | st.sampled_from([np.bytes_(b""), np.float32("nan"), np.datetime64("NaT"), 2**2048])
    | tensors | arrays | scalars
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
@given(built=states, saved=states, shared=st.sampled_from([None, *"xyz"]), nested=st.booleans())
def test_plain_values_come_back_whatever_was_there(
    built: dict[str, Any],
    saved: dict[str, Any],
    shared: str | None,
    nested: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if len(keys := clash(saved)) != len(set(keys)):
        return
    pool = tmp_path_factory.mktemp("pool")
    stage(pool / "0.0", saved)
    state = {name: by_torch(value) for name, value in built.items() if name in saved}
    if shared in state:  # one object, at several places
        one = state[shared]
        state.update({name: [one, {"a": one}] if nested else one for name in state})
    load(state, pool)
    assert equal(state, by_torch(saved)), state


class Part(StrEnum):
    BEST = "best"


@pytest.mark.parametrize("kind", [lambda value: value, PerRank])
def test_names_of_the_state_come_back_as_they_were(
    kind: Callable[[object], object], tmp_path: Path
) -> None:
    saved: dict[Any, Any] = {7: kind([1]), (1, 2): kind(torch.ones(2))}
    saved |= {Part.BEST: kind(0.5), "text": kind(None)}
    stage(tmp_path / "0.0", saved)
    state: dict[Any, Any] = {}
    load(state, tmp_path)
    state = {name: v.value if isinstance(v, PerRank) else v for name, v in state.items()}
    assert equal(state, {7: [1], (1, 2): torch.ones(2), "best": 0.5, "text": None})
    assert {type(name) for name in state} == {int, tuple, str}


def test_a_name_of_the_state_that_could_not_be_read_back_comes_back_as_its_text(
    tmp_path: Path,
) -> None:
    """It was refused by the first save, after a training had been resumed."""
    saved: dict[Any, Any] = {frozenset(): [1], 7: [2]}
    stage(tmp_path / "0.0", saved)
    state: dict[Any, Any] = {}
    load(state, tmp_path)
    assert equal(state, {"frozenset()": [1], 7: [2]})


# --- values that are one object here ---


def zeros() -> torch.Tensor:
    return torch.zeros(2)


def two(one: Any) -> dict[str, Any]:
    return {"one": one, "two": one}


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (lambda: two(zeros()), lambda s: s.update(one=zeros() + 1, two=zeros() + 5)),
        (lambda: {"m": two(zeros())}, lambda s: s["m"].update(one=zeros() + 1, two=zeros() + 5)),
        (lambda: {"m": [zeros()] * 3}, lambda s: s.update(m=[zeros() + n for n in range(3)])),
        (lambda: (lambda t: {"one": t, "two": t[1:]})(zeros()),
         lambda s: s.update(one=zeros() + 1, two=zeros()[1:] + 5)),
        (lambda: (lambda t: {"two": t[1:], "one": t})(zeros()),
         lambda s: s.update(one=zeros() + 1, two=zeros()[1:] + 5)),
        (lambda: {"h": two([])}, lambda s: s.update(h={"one": [1.0], "two": [2.0]})),
        (lambda: {"h": two({})}, lambda s: s.update(h={"one": {1: 1}, "two": {2: 2}})),
        (lambda: two([]), lambda s: s.update(one=[1], two=[2])),
        (lambda: two([]), lambda s: s.update(one=[zeros()], two=[zeros() + 1])),
        (lambda: {"l": [[0]] * 3}, lambda s: s.update(l=[[1], [2], [3]])),
        (lambda: {"l": [[zeros()]] * 2}, lambda s: s.update(l=[[zeros()], [zeros() + 1]])),
    ],
)  # fmt: skip
def test_plain_values_that_are_one_object_here_come_back_apart(
    build: Callable[[], dict[str, Any]], change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    saved = build()
    change(saved)
    stage(tmp_path / "0.0", saved)
    state = build()
    load(state, tmp_path)
    assert equal(state, saved), state


def test_plain_values_that_are_one_object_and_were_saved_as_one_stay_one(tmp_path: Path) -> None:
    def build(n: int) -> dict[str, Any]:
        return {"t": two(torch.full((2,), n)), "l": two([n]), "d": two({"n": [n]})}

    stage(tmp_path / "0.0", build(3))
    state = build(0)
    inner = [state["t"]["one"], state["l"]["one"], state["d"]["one"], state["d"]["one"]["n"]]
    load(state, tmp_path)
    assert equal(state, build(3))
    for key in ("one", "two"):
        found = [state["t"][key], state["l"][key], state["d"][key], state["d"][key]["n"]]
        assert all(map(lambda a, b: a is b, found, inner)), key


def weights(state: dict[str, Any]) -> dict[str, list[float]]:
    """The values of all tensors and of modules' weights, by key."""
    found = {}
    for key, value in state.items():
        value = value.weight if isinstance(value, nn.Module) else value
        value = value["weight"] if isinstance(value, dict) else value
        if isinstance(value, torch.Tensor):
            found[key] = value.flatten().tolist()
    return found


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("size", [2, 1 << 17])
@pytest.mark.parametrize(
    "view",
    [
        lambda m: m.state_dict(),
        lambda m: m.weight.data,
        lambda m: m.weight.detach()[:, 1:],
        lambda m: m.weight,
    ],
)
def test_a_copy_that_begins_as_the_module_itself_comes_back_apart(
    view: Callable[[nn.Module], Any], order: int, size: int, tmp_path: Path
) -> None:
    def build() -> dict[str, Any]:
        model = nn.Linear(size, 1, bias=False)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        return dict([("model", model), ("best", view(model)), ("optim", optim)][::order])

    saved = build()
    saved["best"] = by_torch(saved["best"])
    saved["model"].weight.data.fill_(9)
    stage(tmp_path / "0.0", saved)
    state = build()
    weight = state["model"].weight
    load(state, tmp_path)
    assert weights(state) == weights(saved)
    assert state["model"].weight is weight
    assert state["optim"].param_groups[0]["params"][0] is weight


def test_a_plain_tensor_that_is_trained_stays_the_tensor_that_it_is(tmp_path: Path) -> None:
    def build(n: float) -> dict[str, Any]:
        w = torch.full((2,), n, requires_grad=True)
        optim = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        w.sum().backward()
        optim.step()
        average = optim.state[w]["momentum_buffer"]
        return {"best": w.detach(), "average": average, "w": w, "optim": optim}

    saved = build(3.0)
    saved["best"], saved["average"] = saved["best"] + 4, saved["average"] + 7
    stage(tmp_path / "0.0", saved)
    state = build(0.0)
    w = state["w"]
    load(state, tmp_path)
    assert weights(state) == weights(saved)
    assert state["w"] is w
    assert equal(list(state["optim"].state.values()), list(saved["optim"].state.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_frozen_parameter_of_another_shape_or_type_comes_back_as_one(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def build(size: int, dtype: torch.dtype) -> dict[str, Any]:
        frozen = nn.Parameter(torch.ones(size, dtype=dtype), requires_grad=False)
        return {"top": frozen, "inner": {"list": [by_torch(frozen)]}}

    saved = build(3, dtype)
    stage(tmp_path / "0.0", saved)
    state = build(2, torch.float32)
    load(state, tmp_path)
    assert equal(state, saved), state
    assert not state["top"].requires_grad


def test_two_keys_of_one_trained_tensor_take_no_two_values(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2, requires_grad=True), "b": torch.zeros(2, requires_grad=True)}
    stage(tmp_path / "0.0", saved)
    w = torch.full((2,), 5.0, requires_grad=True)
    with pytest.raises(restore.KeysDifferError, match="b shares memory here with another trained"):
        load({"a": w, "b": w}, tmp_path)
    assert w.tolist() == [5.0, 5.0]
    stage(tmp_path / "0.0", {"a": saved["a"], "b": saved["a"]})
    load({"a": w, "b": w}, tmp_path)
    assert w.tolist() == [1.0, 1.0]


def test_parameters_that_are_tied_only_here_take_the_last_value(tmp_path: Path) -> None:
    """As ``load_state_dict`` does; they are so large that the digest of each is compared."""
    saved = nn.ParameterList([torch.full((1 << 18,), 1.0), torch.full((1 << 18,), 2.0)])
    stage(tmp_path / "0.0", {"m": saved})
    shared = nn.Parameter(torch.zeros(1 << 18))
    load({"m": nn.ParameterList([shared, shared])}, tmp_path)
    assert shared.unique().tolist() == [2.0]


def test_a_value_that_the_checkpoint_lacks_does_not_get_that_of_another(tmp_path: Path) -> None:
    stage(tmp_path / "0.0", {"two": torch.ones(2)})
    state = two(zeros())
    restore.load(state, CheckpointSources(pool=tmp_path), rank=0, world=1, log=LOG, strict=False)
    assert weights(state) == {"one": [0.0, 0.0], "two": [1.0, 1.0]}


def test_learning_rates_that_are_one_tensor_here_come_back_apart(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        lr = torch.tensor(0.5)
        groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for _ in range(3)]
        return {"optim": torch.optim.SGD(groups[:2]), "other": torch.optim.SGD(groups[2:])}

    def rates_of(state: dict[str, Any]) -> list[float]:
        return [float(g["lr"]) for o in state.values() for g in o.param_groups]

    saved = build()
    for n, group in enumerate(g for o in saved.values() for g in o.param_groups):
        group["lr"] = torch.tensor(float(n))
    stage(tmp_path / "0.0", saved)
    state = build()
    load(state, tmp_path)
    assert rates_of(state) == [0.0, 1.0, 2.0]


def test_entries_of_an_optimizer_that_are_one_tensor_here_come_back_apart(tmp_path: Path) -> None:
    def build(n: int) -> dict[str, Any]:
        w = nn.Parameter(torch.ones(2))
        optim = torch.optim.SGD([w])
        optim.state[w].update(two(torch.full((2,), n)), slow=w.data)
        return {"w": w, "optim": optim}

    saved = build(1)
    (entries,) = saved["optim"].state.values()
    entries.update(two=torch.full((2,), 5), slow=torch.full((2,), 7.0))
    stage(tmp_path / "0.0", saved)
    state = build(0)
    load(state, tmp_path)
    assert equal(list(state["optim"].state.values()), [entries])
    assert state["w"].tolist() == [1.0, 1.0]


# --- modules, optimizers, schedulers ---


class Odd(torch.optim.SGD):
    """Its state has more than that of parameters, and entries with dots."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        state: Any = self.state
        state["global"]["steps"] = state["global"].get("steps", 0) + 1
        state["global"]["a.b"] = torch.ones(3)
        state["global"]["mean"] = torch.tensor(2.5)
        state["a.b"]["c.d"] = [1]
        state["flag"] = True
        for group in self.param_groups:
            for p in group["params"]:
                state[p]["a.b"] = torch.full_like(p, 2)
                state[p]["weight.x"] = {"n": 1}


@pytest.mark.parametrize("steps", [0, 1])
def test_state_that_belongs_to_no_parameter_comes_back(steps: int, tmp_path: Path) -> None:
    def build(steps: int) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optim = Odd([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
        return {"model": model, "optim": optim}

    saved = build(3)
    stage(tmp_path / "0.0", saved)
    ours, theirs = build(steps), build(steps)
    theirs["optim"].load_state_dict(by_torch(saved["optim"].state_dict()))
    load(ours, tmp_path)
    assert equal(ours["optim"].state_dict(), theirs["optim"].state_dict())
    assert equal(ours["optim"].state_dict(), saved["optim"].state_dict())


def test_an_entry_of_an_optimizer_that_would_come_back_under_another_name_is_refused() -> None:
    w = nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD([w])
    optim.state[w][0] = torch.ones(2)
    with pytest.raises(ConfigError, match=r"o\.state\.0\.0 has the entry 0: expected a str"):
        flatten({"o": optim}, rank=0)


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
        self.bank: torch.Tensor
        self.register_buffer("bank", torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.bank = torch.cat([self.bank, x.detach()])
        return self.fc(x)

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
        return self.fc(x)

    @staticmethod
    def make_room(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in dict(module.named_buffers(recurse=False)):
            delattr(module, name)
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
        return self.base(x) + self.fc(x)

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
            optim.step(closure)
            state["sched"].step()
        return state

    saved = made(1, after)
    pool = tmp_path_factory.mktemp("pool")
    stage(pool / "0.0", saved)
    theirs, ours = made(2, before), made(2, before)
    for name, value in by_torch(states_of(saved)).items():
        theirs[name].load_state_dict(value)
    load(ours, pool)
    assert equal(states_of(ours), states_of(theirs))
    assert equal(states_of(ours), states_of(saved))


def test_entries_that_are_one_tensor_here_and_were_two_at_the_save_come_back(
    tmp_path: Path,
) -> None:
    """A SequentialLR and its first part begin with one tensor as their learning rate."""

    def made(steps: int) -> tuple[torch.optim.Optimizer, Any]:
        parameter = torch.zeros(2, requires_grad=True)
        optim = torch.optim.SGD([{"params": [parameter], "lr": torch.tensor(0.1)}])
        parts = [rates.ConstantLR(optim, total_iters=1), rates.ExponentialLR(optim, 0.9)]
        scheduler = rates.SequentialLR(optim, parts, [1])
        for _ in range(steps):
            optim.step()
            scheduler.step()
        return optim, scheduler

    _, saved = made(3)
    stage(tmp_path / "0.0", {"sched": saved})
    _, ours = made(0)
    load({"sched": ours}, tmp_path)
    assert equal(ours.state_dict(), saved.state_dict())


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
    with pytest.raises(restore.KeysDifferError, match=words):
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
    with pytest.raises(
        restore.KeysDifferError, match=r"how h\.log\.0\.n are nested is not in the ch"
    ):
        load({"h": {"a": 0, "log": []}}, tmp_path)


def test_a_module_that_does_not_take_it_is_named(tmp_path: Path) -> None:
    class Picky(Extra):
        def set_extra_state(self, state: Any) -> None:
            raise ValueError("not this one")

    stage(tmp_path / "0.0", {"net": Extra()})
    with pytest.raises(
        CheckpointError, match=r"net does not accept .*not this one.*do not train on"
    ):
        load({"net": Picky()}, tmp_path)
