"""Leaps of a loss: which are found, and that a healthy loss, however noisy, is none."""

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.diagnosis.spikes import FEWEST, IN_A_ROW, KEPT, SpikeWatch


def fed(values: list[float], watch: SpikeWatch | None = None) -> SpikeWatch:
    """Give a watch one value for each step; fail if a spike is found on the way."""
    watch = watch or SpikeWatch()
    start = (watch.good or 0) + 1
    for step, value in enumerate(values, start):
        watch.saw(step, value)
        assert watch.leap is None, (step, value)
    return watch


@given(
    st.integers(0, 2**32),
    st.floats(0.01, 0.5),
    st.floats(10.0, 2000.0),
    st.floats(0.0, 5.0),
)
def test_a_healthy_loss_is_no_spike(
    seed: int,
    noise: float,
    decay: float,
    floor: float,
) -> None:
    """A loss that falls, with noise whose tail is heavier than a normal one."""
    random = Random(seed)
    mean = [floor + 10 * math.exp(-step / decay) for step in range(600)]
    assert fed([value * math.exp(random.gauss(0, noise)) for value in mean]).leap is None


@given(st.lists(st.floats(-1e6, 1e6), max_size=FEWEST))
def test_nothing_is_found_before_the_usual_value_is_known(values: list[float]) -> None:
    assert fed(values).leap is None


def test_one_odd_batch_is_no_spike() -> None:
    assert (
        fed([1.0] * 30 + [500.0] * (IN_A_ROW - 1) + [1.0] * 10 + [500.0] + [1.0] * 10).leap is None
    )


def test_a_loss_that_hardly_varies_may_drift() -> None:
    assert fed([1.0 + 0.001 * step for step in range(300)]).leap is None


@given(st.integers(FEWEST, 200), st.floats(3.0, 1e6), st.floats(0.001, 1e3))
def test_a_leap_that_lasts_is_found_with_its_first_step(
    before: int, factor: float, level: float
) -> None:
    watch = fed([level * (1 + 0.05 * math.sin(step)) for step in range(before)])
    for step in range(before + 1, before + IN_A_ROW + 1):
        watch.saw(step, level * factor)
    assert watch.leap is not None
    assert watch.leap[0] == before + 1
    assert watch.good == before
    watch.saw(before + IN_A_ROW + 1, level)
    assert watch.leap is None, "it is over"


def test_a_leap_that_stays_becomes_the_usual() -> None:
    watch = fed([1.0] * 30)
    for step in range(31, 31 + KEPT):
        watch.saw(step, 50.0)
    assert fed([50.0] * 30, watch).leap is None


def test_values_that_are_mostly_zero_have_no_usual_size() -> None:
    watch = SpikeWatch()
    for step in range(FEWEST + IN_A_ROW):
        watch.saw(step, 0.0 if step < FEWEST else 1e-3)
    assert watch.leap is None
