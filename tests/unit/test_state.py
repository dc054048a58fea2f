"""A user's state, flat: keys as torch has them, and what may be copied late."""

import copy
import io
import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.object_codec import decode_object, encode_object
from dlrover_py.trainer.restore_targets import targets
from dlrover_py.trainer.state_dict import (
    DEFER_BYTES,
    STRUCTURE,
    FlatState,
    PerRank,
    RandomState,
    flatten,
)

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
LARGE = 128  # squared, and four bytes each: as large as what is deferred
KEYS = {"0.weight", "0.bias", "1.weight", "1.bias"}
BUFFERS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(LARGE, LARGE), nn.BatchNorm1d(LARGE))


def train(model: nn.Module, optimizer: Any) -> None:
    model(torch.randn(3, LARGE)).sum().backward()
    optimizer.step()


def keys(flat: FlatState) -> set[str]:
    return {leaf.chunk.key for leaf in flat.leaves}


def deferred(flat: FlatState) -> set[str]:
    return {leaf.chunk.key for leaf in flat.leaves if leaf.deferrable}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A world of one rank."""
    meet = tmp_path / "meet"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_keys_are_those_of_torch() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    flat = flatten({"model": model, "optim": optimizer}, rank=0)
    their_model, their_optimizer = get_state_dict(model, optimizer)
    state: Any = their_optimizer["state"]
    expected = {f"model.{key}" for key in their_model}
    expected |= {f"optim.state.{name}.{entry}" for name in state for entry in state[name]}
    assert keys(flat) == expected
    (group,) = flat.objects.values()
    assert isinstance(group, dict)
    assert group["params"] == their_optimizer["param_groups"][0]["params"]


@pytest.mark.parametrize("wrapped", ["compile", "ddp", "both", "checkpoint"])
def test_wrappers_leave_no_trace_in_keys(wrapped: str, alone: None) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model: Any = net()
    if wrapped in ("compile", "both"):
        model = torch.compile(model)
    if wrapped in ("ddp", "both"):
        model = DistributedDataParallel(model)
    if wrapped == "checkpoint":
        model[0] = checkpoint_wrapper(model[0])
    optimizer = torch.optim.SGD(model.parameters())
    flat = flatten({"m": model, "o": optimizer}, rank=0)
    assert keys(flat) == {f"m.{key}" for key in KEYS | BUFFERS}
    assert set(flat.objects["o.param_groups.0"]["params"]) == KEYS  # type: ignore[index]


def test_a_module_called_module_keeps_its_name() -> None:
    flat = flatten({"ema": AveragedModel(net())}, rank=0)
    assert "ema.module.0.weight" in keys(flat)
    assert "ema.n_averaged" in keys(flat)
    assert deferred(flat) == set()


def test_nested_values_have_the_keys_that_dcp_gives_them() -> None:
    tensor = torch.ones(2)
    state = {
        "a": {"b": tensor, 3: 4}, "l": [1, 2], "m": [tensor, 5], "n": [{"x": 1}], "t": (tensor,),
        "none": None,
    }  # fmt: skip
    flat = flatten(state, rank=0)
    assert keys(flat) == {"a.b", "m.0"}
    told = {key for key in flat.objects if key.endswith(STRUCTURE)}
    assert told == {f"{key}{STRUCTURE}" for key in "amn"}
    assert set(flat.objects) - told == {"a.3", "l", "m.1", "n.0.x", "t", "none"}


def test_parameters_that_no_module_names_have_their_place_in_the_groups() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [p]}, {"params": [q], "lr": 1.0}], momentum=0.9)
    (p * q).sum().backward()
    optimizer.step()
    flat = flatten({"o": optimizer}, rank=0)
    assert keys(flat) == {"o.state.0.0.momentum_buffer", "o.state.1.0.momentum_buffer"}


def test_two_models_of_one_optimizer_are_told_apart() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()])
    flat = flatten({"one": one, "other": other, "o": optimizer}, rank=0)
    names = ["one.weight", "one.bias", "other.weight", "other.bias"]
    assert flat.objects["o.param_groups.0"]["params"] == names  # type: ignore[index]


def test_shared_tensors_have_both_keys_and_one_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    flat = flatten({"m": model, "o": optimizer}, rank=0)
    assert {"m.0.weight", "m.1.weight", "o.state.0.weight.momentum_buffer"} <= keys(flat)
    assert "o.state.1.weight.momentum_buffer" not in keys(flat)


def test_what_belongs_to_one_rank_has_its_rank_in_the_key() -> None:
    flat = flatten(
        {"x": PerRank({"t": torch.ones(1), "n": 1}), "rng": PerRank(RandomState())}, rank=3
    )
    assert keys(flat) == {"rank/3/x.t"}
    assert set(flat.objects) == {"rank/3/x.n", "rank/3/x/structure", "rank/3/rng.state"}
    assert all(leaf.chunk.private for leaf in flat.leaves)


class SaysFive:
    """An object whose state is a number."""

    def state_dict(self) -> Any:
        return 5

    def load_state_dict(self, state: Any) -> None:
        """Take nothing."""


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"two values .* key a\.b"):
        flatten({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, rank=0)
    optimizer = torch.optim.SGD([p := nn.Parameter(torch.ones(2))])
    optimizer.state[p] = {"n": 1, "t": torch.ones(2)}
    for key in ("o.param_groups.0", "o.state.0.0.n"):
        with pytest.raises(ConfigError, match=rf"two values .* key {key}: expected keys that"):
            flatten({"o": optimizer, key: "mine"}, rank=0)
    optimizer.state[p] = 5
    with pytest.raises(ConfigError, match=r"two values .* key o\.state\.0\.0"):
        flatten({"o": optimizer, "o.state.0.0": "mine"}, rank=0)
    for state in (
        {"a.b": "mine", "a": {"b": SaysFive()}},
        {"a": {"b": SaysFive()}, "a.b": "mine"},
        {"a": [SaysFive()], "a.0": SaysFive()},
    ):
        for act in (flatten, targets):
            with pytest.raises(ConfigError, match=r"two values .* key a\.[b0]"):
                act(state, rank=0)
    with pytest.raises(ConfigError, match="wrap the value in PerRank"):
        flatten({"rank/0/x": 1}, rank=0)
    with pytest.raises(ConfigError, match=r"m\.weight has no memory yet"):
        flatten({"m": nn.Linear(2, 2, device="meta")}, rank=0)


@pytest.mark.parametrize(
    "state",
    [
        {"x/structure": 1},
        {"x/structure": torch.ones(1)},
        {"h": {"x/structure": 1}},
        {"o": torch.optim.lr_scheduler.LRScheduler.__new__(torch.optim.lr_scheduler.LRScheduler)},
    ],
)
def test_a_key_that_would_be_taken_for_a_nesting_is_refused(state: dict[str, Any]) -> None:
    if "o" in state:
        vars(state["o"])["x/structure"] = 1
    with pytest.raises(ConfigError, match=r"the key \S*x/structure is reserved: expected one that"):
        flatten(state, rank=0)


def test_a_tensor_is_the_users_own_memory() -> None:
    model = net()
    flat = flatten({"m": model}, rank=0)
    found = {leaf.chunk.key: leaf.tensor for leaf in flat.leaves}
    assert found["m.0.weight"].data_ptr() == model[0].weight.data_ptr()
    filled = {leaf.chunk.key: leaf.tensor for leaf in targets({"m": model}, rank=0).leaves}
    assert filled["m.0.weight"].data_ptr() == found["m.0.weight"].data_ptr()
    assert not filled["m.0.weight"].requires_grad


def test_a_state_that_changes_its_shape_is_seen() -> None:
    state = {"t": torch.ones(2), "m": net()}
    flatten(state, rank=0)
    state["t"] = torch.ones(3, dtype=torch.int64)
    state["m"][0].weight.data = torch.ones(5, LARGE)
    chunks = {leaf.chunk.key: leaf.chunk for leaf in flatten(state, rank=0).leaves}
    assert (chunks["t"].shape, chunks["t"].dtype) == ((3,), "int64")
    assert chunks["m.0.weight"].shape == chunks["m.0.weight"].whole == (5, LARGE)


# --- shards ---


@pytest.mark.parametrize(("rank", "rows", "start"), [(0, 2, 0), (1, 2, 2), (2, 1, 4), (3, 0, 5)])
def test_shards_are_boxes_uneven_and_empty_ones_too(rank: int, rows: int, start: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        local = torch.zeros(rows, 3)
        whole = torch.Size((5, 3))
        given = DTensor.from_local(local, mesh, [Shard(0)], shape=whole, stride=(3, 1))
        twice = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        flat = flatten({f"w{rank}": given, "r": twice}, rank=rank)
        chunks = {leaf.chunk.key: leaf.chunk for leaf in flat.leaves}
        chunk = chunks[f"w{rank}"]
        assert (chunk.shape, chunk.at, chunk.whole) == ((rows, 3), (start, 0), (5, 3))
        assert chunks["r"].shape == chunks["r"].whole == (2,)
    finally:
        dist.destroy_process_group()


# --- what may be copied late ---

PARTS = ("exp_avg", "exp_avg_sq")


def test_large_parameters_and_their_state_may_be_copied_late() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it replaces the instance's step, harmlessly
    flat = flatten({"m": model, "o": optimizer, "ema": copy.deepcopy(model)}, rank=0)
    assert deferred(flat) == {"m.0.weight", *(f"o.state.0.weight.{part}" for part in PARTS)}
    assert min(leaf.tensor.nbytes for leaf in flat.leaves if leaf.deferrable) >= DEFER_BYTES


def own_step(optimizer: Any) -> None:
    optimizer.step = lambda: None


def capturable(optimizer: Any) -> None:
    optimizer.param_groups[0]["capturable"] = True


def in_backward(optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.register_post_accumulate_grad_hook(lambda p: None)


def not_contiguous(optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.data = p.data.t() if p.dim() > 1 else p.data
        for value in optimizer.state[p].values():
            value.data = value.data.t() if value.dim() > 1 else value.data


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (own_step, "step of this AdamW was replaced"),
        (capturable, "CUDA graph"),
        (in_backward, "in the backward pass"),
        (not_contiguous, "not contiguous"),
    ],
)
def test_where_the_fence_cannot_be_trusted_all_is_copied_at_once(change: Any, why: str) -> None:
    model = nn.Linear(4 * LARGE, 4 * LARGE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4 * LARGE)).sum().backward()
    optimizer.step()
    change(optimizer)
    flat = flatten({"m": model, "o": optimizer}, rank=0)
    assert deferred(flat) == set()
    assert len(flat.notes) == 1
    assert why in flat.notes[0]


def test_a_step_that_torch_does_not_know_is_not_trusted() -> None:
    class Bare(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            type(self).step = lambda self: None

    model = nn.Linear(4 * LARGE, 4 * LARGE)
    flat = flatten({"m": model, "o": Bare(model.parameters())}, rank=0)
    assert deferred(flat) == set()
    assert "torch does not hook" in flat.notes[0]


def test_sharded_optimizers_give_what_this_rank_owns(alone: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    train(model, optimizer)
    flat = flatten({"m": model, "o": optimizer}, rank=0)
    assert {f"o.state.{name}.{part}" for name in KEYS for part in PARTS} <= keys(flat)
    assert "o.state.0.weight.exp_avg" in deferred(flat)


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch trains on GPUs only"
)
def test_fully_sharded_parameters_may_be_copied_late(alone: None) -> None:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    flat = flatten({"m": model, "o": optimizer}, rank=0)
    assert {"m.0.weight", "o.state.0.weight.exp_avg"} <= deferred(flat)


def test_shards_without_memory_are_refused(alone: None) -> None:
    """Both to save and to load: nothing would come of it, and nobody would know."""
    model = nn.Linear(2, 2, device="meta")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    for use in (flatten, targets):
        with pytest.raises(ConfigError, match=r"m\.weight has no memory yet"):
            use({"m": model}, rank=0)


# --- objects ---


@pytest.mark.parametrize(
    "value", [3, 0.5, "x", None, [1, {"a": (2, None)}], {"t": torch.ones(2, 2)}, True, b"x"]
)
def test_objects_come_back(value: object) -> None:
    assert str(decode_object(encode_object("k", value))) == str(value)


HUGE = 2**2048


@pytest.mark.parametrize(
    "value",
    [
        HUGE, -HUGE, 2**2040, 1 << 9_000, [1, HUGE], {HUGE: (1, HUGE)}, {"s": {HUGE}},
        defaultdict(list, {HUGE: [HUGE]}), b"", [b""], np.bytes_(b""), [np.bytes_(b"")],
        {"t": torch.tensor([0x8B], dtype=torch.uint8), "n": 1},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_that_torch_load_does_not_read_by_itself_come_back(value: Any) -> None:
    found = decode_object(encode_object("k", value))
    assert type(found) is type(value)
    assert found == value


def test_a_large_int_where_it_cannot_be_converted_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint: seen is a Counter, which"):
        encode_object("seen", Counter({HUGE: 1}))


def test_what_equals_another_value_is_not_taken_for_it() -> None:
    assert decode_object(encode_object("same", 1)) == 1
    assert decode_object(encode_object("same", True)) is True
    assert str(decode_object(encode_object("zero", 0.0))) == "0.0"
    assert str(decode_object(encode_object("zero", -0.0))) == "-0.0"


def test_an_object_that_cannot_be_read_back_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint: loader\.rng is a Random, which"):
        encode_object("loader.rng", random.Random())


def test_what_a_container_gets_later_is_looked_at_too() -> None:
    history: dict[str, list[object]] = {"loss": [0.5]}
    encode_object("history", history)
    history["loss"].append(random.Random())
    with pytest.raises(ConfigError, match=r"checkpoint: history is a dict, which"):
        encode_object("history", history)


def test_what_stays_as_it_is_is_encoded_once() -> None:
    order: dict[str, Any] = {"perm": list(range(100)), "at": (1, None, "x", b"y", 0.5)}
    before = encode_object("order", order)
    assert encode_object("order", copy.deepcopy(order)) is before
    order["perm"][7] = True
    after = encode_object("order", order)
    assert str(decode_object(after)) == str(order)
    order["perm"] = torch.arange(100)
    assert str(decode_object(encode_object("order", order))) == str(order)


def test_what_takes_long_to_encode_is_told() -> None:
    flat = flatten({"perm": [1, 2]}, rank=0)
    assert flat.encoded(slow_s=-1.0) == [("perm", encode_object("perm", [1, 2]))]
    assert flat.notes[0].startswith("perm took 0.")


@pytest.mark.parametrize(
    "value",
    [
        *(np.float32(0.1), np.float64(0.1), np.float16(2), np.longdouble("0.1"), np.int64(3)),
        *(np.uint8(255), np.bool_(True), np.complex64(1 + 2j), np.datetime64("NaT")),
        *(np.datetime64("2026-11-27", "ns"), np.timedelta64(3, "s"), np.str_(""), np.str_("ü")),
        *(np.bytes_(b""), np.bytes_(b"a\0"), np.array([(1, 0.5)], "i4,f4")[0]),
    ],
    ids=lambda value: f"{type(value).__name__}-{value}",
)
def test_a_scalar_of_numpys_keeps_its_type(value: Any) -> None:
    saved: dict[str, Any] = {"list": [value], "tuple": (value,)}
    if not isinstance(value, np.void):  # it has no hash
        saved |= {"set": {value}, "name": {value: None}}
    found: Any = decode_object(encode_object("x", saved))
    assert repr(found) == repr(saved)
    for (one,) in found.values():
        assert (type(one), one.dtype) == (type(value), value.dtype)


def test_a_scalar_of_another_package_is_a_number() -> None:
    """NumPy alone could not read its dtype back."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert repr(decode_object(encode_object("x", [ml_dtypes.bfloat16(0.5)]))) == "[0.5]"


def test_numbers_that_older_versions_have_written_are_those_of_python() -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(np.datetime64("2026")), allow_pickle=False)
    data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    packed = ("dlrover.packed.npy", data, True)
    written = io.BytesIO()
    torch.save([0.5, packed], written)
    assert repr(decode_object(written.getvalue())) == repr([0.5, np.datetime64("2026")])


@pytest.mark.parametrize(
    ("form", "data"), [("O", "00" * 8), ("i4,O", "00"), ("<f4", "00"), ("<f4", "00" * 8)]
)
def test_a_scalar_that_no_save_has_written_is_an_error(form: str, data: str) -> None:
    file = io.BytesIO()
    torch.save(("dlrover.packed.scalar", form, data), file)
    with pytest.raises((TypeError, ValueError)):
        decode_object(file.getvalue())


def test_a_container_may_hold_itself() -> None:
    value: list[object] = [1]
    value.append(value)
    assert len(encode_object("ring", value))


def test_random_numbers_are_saved_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        flat = flatten({"rng": PerRank(RandomState())}, rank=0)
    found = decode_object(encode_object("rng", flat.objects["rank/0/rng.state"]))
    # no assert: no exception is raised
    RandomState().load_state_dict({"state": found})


def test_a_refused_value_is_named_without_torchs_advice_and_colours() -> None:
    with pytest.raises(
        ConfigError, match=r"collections\.deque was not an allowed global"
    ) as caught:
        encode_object("recent", deque([1, 2]))
    assert str(caught.value).isprintable()
