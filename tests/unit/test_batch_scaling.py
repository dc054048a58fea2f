"""The learning rate of a batch that grows with the world, and schedules that count samples."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    ReduceLROnPlateau,
)
from torch.utils.data import TensorDataset

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.trainer.data import BatchScaling, ElasticLoader, ElasticSampler, PerWorker
from dlrover_py.trainer.data.scaling import Noise, Rule, scaled

N = 96


class Training:
    """A training of one process that stands for a world of several, which compute the same."""

    def __init__(self, world: int, *, rule: Rule = "linear", kind: Any = None, **options: Any):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(N, 3, generator=generator, dtype=torch.float64)
        self.loader = ElasticLoader(
            TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch=4 * world
        )
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1).double()
        make = kind or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.optimizer: torch.optim.Optimizer = make(self.model.parameters())
        self.scaling = BatchScaling(self.optimizer, self.loader, base_batch=8, rule=rule, **options)
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=2 * N // 8)
        self.seen: list[dict[str, Any]] = []
        self.optimizer.register_step_pre_hook(
            lambda optimizer, *_: self.seen.append({**optimizer.param_groups[0]})
        )

    def steps(self, count: int) -> list[float]:
        """Train some steps, and return the learning rates that they had."""
        del self.seen[:]
        while len(self.seen) < count:
            for step in self.loader:
                for inputs, targets in step:
                    step.weigh(nn.functional.mse_loss(self.model(inputs), targets)).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                step.commit()
                self.scaling.follow(self.schedule)
                if len(self.seen) == count:
                    break
        return [group["lr"] for group in self.seen]

    def state(self) -> dict[str, Any]:
        parts = (self.model, self.optimizer, self.loader, self.scaling, self.schedule)
        return {type(part).__name__: part.state_dict() for part in parts}

    def load(self, state: dict[str, Any]) -> "Training":
        for part in (self.model, self.scaling, self.optimizer, self.loader, self.schedule):
            part.load_state_dict(state[type(part).__name__])
        return self


@pytest.mark.parametrize(
    ("rule", "factors"),
    [("linear", (1, 2, 0.5)), ("sqrt", (1, 2**0.5, 0.5**0.5)), ("none", (1,) * 3)],
)
def test_each_rule_has_its_factor(rule: Rule, factors: tuple[float, ...]) -> None:
    for world, factor in zip((2, 4, 1), factors, strict=True):
        training = Training(world, rule=rule)
        assert training.steps(1) == [pytest.approx(0.1 * factor)]
        assert training.scaling.factor == pytest.approx(factor)
        assert training.optimizer.param_groups[0]["lr"] == training.schedule.get_last_lr()[0]


def test_sqrt_changes_adam_as_the_paper_says() -> None:
    training = Training(
        8, rule="sqrt", kind=lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.99), eps=1e-6)
    )
    training.steps(1)
    (group,) = training.seen
    assert group["betas"] == (pytest.approx(0.6), pytest.approx(0.96))
    assert group["eps"] == pytest.approx(5e-7)
    assert training.optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    assert scaled({"lr": 1.0, "betas": (0.5, 0.9), "eps": 1.0}, "sqrt", 2.0)["betas"] == (
        0.0,
        pytest.approx(0.6),
    )


def test_a_larger_batch_is_warmed_up_to_and_a_smaller_one_holds_at_once() -> None:
    small = Training(2, warmup_steps=3)
    small.steps(2)
    large = Training(4, warmup_steps=3).load(small.state())
    large.schedule.base_lrs[0], large.schedule.T_max = 0.1, 10**9  # as good as constant
    rates = [rate / large.optimizer.param_groups[0]["lr"] for rate in large.steps(5)]
    assert rates == sorted(rates)
    assert rates == pytest.approx([1.25, 1.5, 1.75, 2.0, 2.0], rel=1e-3)
    again = Training(2, warmup_steps=3).load(large.state())
    again.schedule.T_max = 10**9
    assert again.steps(1) == [pytest.approx(again.optimizer.param_groups[0]["lr"])]


def test_a_warm_up_goes_on_after_a_restart() -> None:
    small = Training(2, warmup_steps=3)
    small.steps(2)
    large = Training(4, warmup_steps=3).load(small.state())
    large.steps(1)
    copy = Training(4, warmup_steps=3).load(large.state())
    assert copy.steps(6) == large.steps(6)


@pytest.mark.parametrize(
    "make", [lambda o: CosineAnnealingLR(o, 20), lambda o: ExponentialLR(o, 0.9)]
)
def test_a_schedule_follows_the_samples(make: Any) -> None:
    def rates(worlds: list[int]) -> dict[int, float]:
        found, state = {}, None
        for world in worlds:
            training = Training(world)
            training.schedule = make(training.optimizer)
            if state is not None:
                training.load(state)
            training.steps(1)
            found[training.loader.samples] = training.optimizer.param_groups[0]["lr"]
            state = training.state()
        return found

    fixed, resized = rates([2] * 12), rates([2, 4, 4, 1, 1, 2, 6, 2])
    for samples, rate in resized.items():
        assert rate == pytest.approx(fixed[samples // 8 * 8]), f"after {samples} samples"


def test_the_gain_is_that_of_the_formula_for_a_known_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    signal, variance, size, parts = 2.0, 32.0, 4, 8
    noise = Noise()
    for _ in range(3000):
        # 64 components, so that one measurement is not all chance.
        mean = torch.full((64,), (signal / 64) ** 0.5, dtype=torch.float64)
        deviation = (variance / 64 / size) ** 0.5
        each = mean + deviation * torch.randn(parts, 64, generator=generator, dtype=torch.float64)
        noise = noise.measured(
            parts=parts,
            samples=parts * size,
            small=float(each.pow(2).sum(1).mean()),
            large=float(each.mean(0).pow(2).sum()),
        )
    for batch in (8, 32, 128):
        expected = (variance / 8 + signal) / (variance / batch + signal)
        assert noise.gain(8, batch) == pytest.approx(expected, rel=0.05)


@given(
    values=st.tuples(*[st.floats(-1e9, 1e9)] * 2),
    base=st.integers(1, 10**6),
    batch=st.integers(1, 10**6),
)
def test_a_gain_lies_between_one_and_the_ratio(
    values: tuple[float, float], base: int, batch: int
) -> None:
    low, high = sorted((1.0, batch / base))
    assert low <= Noise(*values, weight=0.5).gain(base, batch) <= high
    assert Noise().gain(base, batch) == low


def test_adascale_measures_micro_batches_of_unequal_size() -> None:
    training = Training(2, rule="adascale")
    sampler = training.loader.sampler
    sampler.micro_batch = 3  # 8 samples are parts of 3, 3 and 2
    weights = [p.detach().clone() for p in training.model.parameters()]
    gradients: list[torch.Tensor] = []
    sizes: list[int] = []
    for _, part in zip(range(3), sampler.plan(), strict=False):
        order = list(sampler)[len(sizes)]
        inputs, targets = zip(*(training.loader.loader.dataset[i] for i in order), strict=True)
        loss = nn.functional.mse_loss(
            nn.functional.linear(torch.stack(inputs), *(w.requires_grad_() for w in weights)),
            torch.stack(targets),
        )
        grads = torch.autograd.grad(loss, weights)
        gradients.append(torch.cat([g.flatten() for g in grads]))
        sizes.append(part.samples)
    assert sizes == [3, 3, 2]
    share = torch.tensor(sizes) / 8
    whole = sum(s * g for s, g in zip(share, gradients, strict=True))
    assert isinstance(whole, torch.Tensor)
    expected = Noise().measured(
        parts=3,
        samples=8,
        small=float(sum(s * g.pow(2).sum() for s, g in zip(share, gradients, strict=True))),
        large=float(whole.pow(2).sum()),
    )
    training.steps(1)
    state = training.scaling.state_dict()
    assert state["variance"] == pytest.approx(expected.variance, rel=1e-5)
    assert state["signal"] == pytest.approx(expected.signal, rel=1e-5)


def test_adascale_lies_between_no_scaling_and_linear() -> None:
    training = Training(8, rule="adascale")
    training.loader.sampler.micro_batch = 4
    training.schedule.T_max = 10**9  # as good as constant
    assert all(0.0999 <= rate <= 0.4001 for rate in training.steps(9))
    assert 9 <= training.scaling.progress <= 4 * 9
    assert training.scaling.factor > 1.0


@pytest.mark.parametrize("measures", [False, True])
def test_a_step_that_a_scaler_skips_is_not_measured(measures: bool) -> None:
    """The first steps of a training in float16 overflow as a rule."""
    found = []
    for overflows in (True, False):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
        training = Training(2, rule="adascale", loss_scale=scaler.get_scale)
        training.loader.sampler.micro_batch = 4
        factors = []
        for number, step in enumerate(training.loader):
            if number == 5:
                break
            for inputs, targets in step:
                loss = nn.functional.mse_loss(training.model(inputs), targets)
                loss = loss * (math.inf if overflows and not number else 1.0)
                scaler.scale(step.weigh(loss)).backward()
            scaler.unscale_(training.optimizer)
            if measures:
                training.scaling.measure()
            if number or overflows:  # the other training leaves the step out, too
                scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
            step.commit()
            factors.append(training.scaling.factor)
        state = training.scaling.state_dict()
        assert math.isfinite(state["variance"])
        assert state["weight"] > 0
        found.append((factors, state))
    assert found[0][0] == pytest.approx(found[1][0])
    assert found[0][1] == pytest.approx(found[1][1])


@pytest.mark.parametrize("rule", ["linear", "adascale"])
def test_the_samples_of_a_step_that_a_scaler_skips_count(rule: Rule) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
    training = Training(2, rule=rule, loss_scale=scaler.get_scale)
    found = []
    for number, step in enumerate(training.loader):
        for inputs, targets in step:
            loss = nn.functional.mse_loss(training.model(inputs), targets)
            scaler.scale(step.weigh(loss * (math.inf if number in (1, 2) else 1.0))).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        step.commit()
        found.append(training.scaling.state_dict()["progress"])
        training.scaling.follow(training.schedule)
        found.append(training.scaling.progress)
    assert len(training.seen) == N // 8 - 2
    assert found == [number for number in range(1, N // 8 + 1) for _ in range(2)]
    assert training.schedule.last_epoch == N // 8


def test_a_loader_may_not_change_what_adascale_compares() -> None:
    weighed, divided = Training(1, rule="adascale"), Training(1, rule="adascale")
    weighed.loader.weigh_by(len)
    divided.loader.divide_among((0, 1))
    for training in (weighed, divided):
        with pytest.raises(ConfigError, match=r"a loader with divide_among\(\) or weigh_by"):
            training.steps(1)


def test_measurements_that_are_not_finite_are_dropped() -> None:
    """Also those that a checkpoint has from before."""
    assert Noise().measured(parts=2, samples=8, small=math.inf, large=1.0) == Noise()
    training = Training(2, rule="adascale")
    training.scaling.load_state_dict(
        {**training.scaling.state_dict(), "variance": math.nan, "signal": math.nan, "weight": 0.5}
    )
    assert training.scaling.state_dict()["variance"] == 0.0
    assert training.scaling.state_dict()["weight"] == 0.0


def test_a_schedule_that_counts_no_steps_is_refused() -> None:
    training = Training(1)
    chained = ChainedScheduler([training.schedule])
    plateau = ReduceLROnPlateau(training.optimizer)
    for schedule in (chained, plateau):
        with pytest.raises(ConfigError, match=f"got a {type(schedule).__name__}: expected"):
            training.scaling.follow(schedule)


def test_arguments_and_states_that_cannot_be_used() -> None:
    with pytest.raises(ConfigError, match="'cubic': expected one of linear, sqrt"):
        Training(1, rule="cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="base_batch=0"):
        BatchScaling(Training(1).optimizer, Training(1).loader, base_batch=0)
    weighed, divided = Training(1), Training(1)
    weighed.loader.weigh_by(len)
    divided.loader.divide_among((0, 1))
    for each in (weighed, divided):
        with pytest.raises(ConfigError, match=r"a loader with divide_among\(\) or weigh_by"):
            BatchScaling(each.optimizer, each.loader, base_batch=1, rule="adascale")
    training = Training(1)
    with pytest.raises(ConfigError, match="those of BatchScaling"):
        training.scaling.load_state_dict({"progress": 1})
    with pytest.raises(ConfigError, match="PerWorker is 0"):
        ElasticLoader([1, 2], global_batch=PerWorker(0))


def test_a_batch_per_worker_grows_with_the_world() -> None:
    for world in (1, 3):
        sampler = ElasticSampler(100, global_batch=PerWorker(4), rank=0, world=world)
        assert sampler.global_batch == 4 * world
        assert len(next(iter(sampler))) == 4
    loader = ElasticLoader(range(100), global_batch=PerWorker(4))
    loader.divide_among((1, 3))
    assert loader.sampler.global_batch == 12
