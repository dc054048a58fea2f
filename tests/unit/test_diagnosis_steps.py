"""The learned bound of a step: when a hang is suspected, and when not."""

from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.core.diagnosis.steps import FEWEST_GAPS, LONGEST, TYPICAL, StepClock

GAPS = st.lists(st.floats(0.01, 500.0), min_size=FEWEST_GAPS, max_size=80)


def clock(least_s: float = 10.0, first_s: float = 600.0) -> StepClock:
    made = StepClock(least_s=least_s, first_s=first_s)
    made.begin(0.0)
    return made


def trained(gaps: list[float], made: StepClock | None = None, start: float = 5.0) -> StepClock:
    made = made or clock()
    now = start
    made.saw(1, None, now)
    for step, gap in enumerate(gaps, start=2):
        now += gap
        made.saw(step, None, now)
    return made


@given(GAPS, st.floats(1.0, 60.0))
def test_a_pause_as_long_as_one_before_is_never_suspected(gaps: list[float], least: float) -> None:
    made = trained(gaps, clock(least_s=least))
    assert made.bound_s >= 0.999 * LONGEST * max(gaps)
    assert made.due >= made.moved_at + least


@given(st.floats(0.01, 500.0), st.integers(FEWEST_GAPS, 200))
def test_the_bound_of_even_steps_is_a_few_steps(gap: float, count: int) -> None:
    made = trained([gap] * count, clock(least_s=1.0))
    assert made.bound_s <= max(1.0, TYPICAL * gap) * 1.001


@given(GAPS)
def test_a_report_without_a_higher_step_moves_nothing(gaps: list[float]) -> None:
    made = trained(gaps)
    before = made.due, made.bound_s
    assert not made.saw(len(gaps) + 1, None, made.moved_at + 3.0)
    assert not made.saw(1, None, made.moved_at + 4.0)
    assert (made.due, made.bound_s) == before


def test_the_first_steps_of_a_job_have_the_long_bound() -> None:
    made = clock()
    assert made.bound_s == 600.0
    made.saw(1, None, 30.0)
    assert made.bound_s == 600.0
    for step in range(2, 2 + FEWEST_GAPS):
        made.saw(step, None, 30.0 + step)
    assert made.bound_s == 10.0


def test_a_later_round_knows_the_usual_step_but_not_how_long_its_first_one_takes() -> None:
    made = trained([1.0] * 10)
    made.begin(100.0)
    assert made.bound_s == 600.0
    made.saw(11, None, 500.0)
    assert made.bound_s == 10.0
    made.begin(1000.0)
    assert made.bound_s == LONGEST * 400.0, "a first step took 400 s before"


def test_one_outage_hides_no_later_hang_and_a_pause_that_comes_again_is_usual() -> None:
    made = trained([1.0] * 10)
    bound = made.bound_s
    outage = made.moved_at + 1800.0
    made.saw(100, None, outage, hung=True)
    assert made.bound_s == bound
    made.saw(101, None, outage + 300.0, hung=True)
    assert made.bound_s == LONGEST * 300.0, "an evaluation that came once more"


def test_a_hang_before_the_first_step_makes_no_later_one_usual() -> None:
    made = clock()
    made.saw(1, None, 1200.0, hung=True)
    for step in range(2, 12):
        made.saw(step, None, 1200.0 + step)
    bound = made.bound_s
    made.saw(100, None, made.moved_at + 100.0, hung=True)
    assert made.bound_s == bound


def test_after_the_last_step_there_is_time_for_what_ends_a_training() -> None:
    made = trained([1.0] * 10)
    made.saw(20, 20, 30.0)
    assert made.bound_s == 600.0


def test_a_standstill_of_the_master_is_nobody_elses() -> None:
    made = trained([1.0] * 10)
    due = made.due
    made.shift(7.0)
    assert made.due == due + 7.0
