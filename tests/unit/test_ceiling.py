"""The best goodput that failures, recoveries and saves allow: the formula, and a job's numbers."""

from math import exp, expm1

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.cli.view import ceiling_line
from dlrover_py.master.core.ceiling import best_goodput
from dlrover_py.protocol.status import GoodputCeiling, GoodputStatus
from tests.builders import Bench, crash, elastic_job, running


def goodput(between_s: float, recovery_s: float, save_s: float, interval_s: float) -> float:
    """The goodput with one interval (Daly 2006)."""
    down = between_s * exp(recovery_s / between_s)
    return interval_s / (down * expm1((interval_s + save_s) / between_s))


@given(st.floats(60, 1e7), st.floats(0, 7200), st.floats(0.01, 600), st.floats(1e-4, 5))
def test_no_interval_is_better(
    between_s: float, recovery_s: float, save_s: float, other: float
) -> None:
    best, interval_s = best_goodput(between_s, recovery_s, save_s)
    assert 0 <= best <= 1
    tried = goodput(between_s, recovery_s, save_s, other * between_s)
    assert tried <= best + 1e-6
    if interval_s > 1e-3 * between_s and best > 1e-6:
        found = goodput(between_s, recovery_s, save_s, interval_s)
        assert found == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(
    ("between_h", "save_s", "recovery_s", "share", "interval_s"),
    [
        (8.9, 120, 1800, 0.866, 2700),
        (8.9, 0.2, 60, 0.995, 113),
        (3.1, 120, 600, 0.815, 1600),
        (0.3, 0.2, 30, 0.954, 21),
    ],
)
def test_known_ceilings(
    between_h: float, save_s: float, recovery_s: float, share: float, interval_s: float
) -> None:
    best, interval = best_goodput(3600 * between_h, recovery_s, save_s)
    assert best == pytest.approx(share, abs=6e-4)
    assert interval == pytest.approx(interval_s, rel=0.06)


def test_saves_that_cost_nothing_leave_the_recoveries_alone() -> None:
    best, interval_s = best_goodput(1000.0, 100.0, 0.0)
    assert best == pytest.approx(exp(-0.1))
    assert interval_s == pytest.approx(0.0, abs=1e-3)


def goodput_of(bench: Bench) -> GoodputStatus:
    found = bench.job.status(bench.now, 1e6 + bench.now).goodput
    assert found is not None
    return found


def ceiling(bench: Bench) -> GoodputCeiling | None:
    return goodput_of(bench).ceiling


def train(bench: Bench, step: int, seconds: float, **spent: float) -> None:
    bench.pass_time(seconds)
    bench.agent("n0").reach(step)
    progress = bench.agent("n0").progress
    assert progress is not None
    bench.agent("n0").progress = progress.model_copy(update={"steps_per_s": 1.0, "spent": spent})
    bench.exchange()


def test_a_job_measures_its_ceiling() -> None:
    bench = running(elastic_job(2, 1))
    train(bench, 1, 5.0)
    train(bench, 501, 500.0, save=50.0, saves=100.0)
    assert ceiling(bench) is None, "nothing has failed"
    bench.agent("n1").fail(crash())
    bench.exchange()
    bench.settle()
    train(bench, 482, 30.0)
    train(bench, 982, 500.0, save=25.0, saves=50.0)
    found = ceiling(bench)
    assert found is not None
    assert (found.failures, goodput_of(bench).save_s) == (1, 0.5)
    assert found.between_s == pytest.approx(bench.now, abs=1.0)
    assert found.recovery_s == pytest.approx(30.0, abs=3.0), "without the 20 repeated steps"
    share, interval_s = best_goodput(found.between_s, found.recovery_s, 0.5)
    assert (found.share, found.interval_s) == pytest.approx((share, interval_s), abs=1e-3)
    bench.restart_master()
    bench.settle()
    train(bench, 1200, 10.0, save=25.0, saves=50.0)
    again = ceiling(bench)
    assert again is not None
    assert (again.failures, goodput_of(bench).save_s) == (1, 0.5), "a new master knows it"
    status = bench.job.status(bench.now, 1e6 + bench.now).goodput
    assert status is not None
    line = ceiling_line(status)
    assert line.startswith(f"ceiling {100 * again.share:.1f}%, of which ")
    assert "500 ms for a save" in line
    assert not ceiling_line(status.model_copy(update={"ceiling": None}))
