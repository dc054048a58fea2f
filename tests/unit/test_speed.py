"""The measured speed of training, and the model of the speed with other numbers of nodes."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.speed import SpeedMeter, SpeedModel


def law(serial: float, all_to_all: float) -> "dict[int, float]":
    """Return the speeds of 1 to 64 nodes on a curve."""
    return {
        n: 10 * n / (1 + serial * (n - 1) + all_to_all * n * (n - 1)) for n in (1, 2, 4, 8, 16, 64)
    }


def steps(meter: SpeedMeter, speeds: list[float], start: int = 0) -> float:
    """Report each second to a meter, and return the step that was reached."""
    step = float(start)
    for second, speed in enumerate(speeds):
        step += speed
        meter.take(float(second), int(step))
    return step


def test_a_steady_speed_is_measured_once_it_is_warm() -> None:
    meter = SpeedMeter(10.0)
    steps(meter, [0.1] * 10 + [7.0] * 71)
    assert meter.speed() == pytest.approx(7.0, rel=0.03)


def test_a_checkpoint_in_one_window_does_not_count() -> None:
    meter = SpeedMeter(10.0)
    steps(meter, [8.0] * 30 + [0.0] * 7 + [8.0] * 60)
    assert meter.speed() == pytest.approx(8.0, rel=0.03)


def test_a_noisy_speed_takes_longer() -> None:
    rest, noisy = SpeedMeter(1.0), SpeedMeter(1.0)
    numbers = random.Random(4)
    speeds = [max(0.0, numbers.gauss(20, 6)) for _ in range(400)]
    steps(rest, [20.0] * 12)
    assert rest.speed() is not None
    steps(noisy, speeds[:12])
    assert noisy.speed() is None
    steps(noisy, speeds)
    assert noisy.speed() == pytest.approx(20, rel=0.1)


def test_slow_steps_make_long_windows() -> None:
    meter = SpeedMeter(10.0)
    assert not any(meter.take(float(second), second // 60) for second in range(300))
    steps(meter, [1 / 60] * 60 * 5 * 8)
    assert meter.speed() == pytest.approx(1 / 60, rel=0.05)


def test_a_step_that_was_set_back_begins_a_window() -> None:
    meter = SpeedMeter(1.0)
    steps(meter, [10.0] * 4, start=1000)
    steps(meter, [10.0] * 12)
    assert meter.speed() == pytest.approx(10.0, rel=0.03)


@given(st.floats(0, 0.5), st.floats(0, 0.01))
def test_a_curve_is_found_from_its_points(serial: float, all_to_all: float) -> None:
    known = law(serial, all_to_all)
    model = SpeedModel.fit({n: known[n] for n in (1, 4, 8, 16)})
    assert model.at(2) == pytest.approx(known[2], rel=0.05)
    assert model.at(8) == pytest.approx(known[8], rel=0.02)


@given(
    st.dictionaries(st.integers(1, 4096), st.floats(1e-6, 1e9), min_size=1, max_size=8),
    st.integers(1, 100_000),
)
def test_any_measured_speeds_give_a_speed_for_each_size(
    measured: dict[int, float], nodes: int
) -> None:
    speed = SpeedModel.fit(measured).at(nodes)
    assert 0 < speed < math.inf


def test_one_size_predicts_less_than_linear_growth() -> None:
    model = SpeedModel.fit({4: 100.0})
    assert 170 < model.at(8) < 200
    assert 50 < model.at(2) < 60


def test_two_sizes_of_which_the_larger_is_slower_predict_no_growth() -> None:
    model = SpeedModel.fit({4: 100.0, 8: 90.0})
    assert model.at(16) < 90


def test_no_smaller_size_is_faster_than_the_least_that_was_measured() -> None:
    """A curve without a constant part would be infinitely fast with one node."""
    model = SpeedModel({2: 1.0, 4: 0.5}, (0.0, 1.0, 0.0))
    assert model.at(1) <= model.at(2)
