"""The size that a job chooses: properties of the decision on curves of every shape."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dlrover_py.master.core.scaling import (
    HOUR_S,
    WAITS,
    Ban,
    Move,
    PendingChange,
    Sample,
    ScalingRecord,
    Trial,
    View,
    decide,
    spare_wait_s,
)
from dlrover_py.protocol.autoscale import AutoscaleSpec
from dlrover_py.protocol.reasons import ConditionReason

NOW = 1_000_000.0
AUTO = AutoscaleSpec(mode="auto")
Curve = Callable[[int], float]


def law(serial: float, all_to_all: float = 0.0) -> Curve:
    return lambda n: 10 * n / (1 + serial * (n - 1) + all_to_all * n * (n - 1))


CURVES = {
    "linear": law(0.0),
    "almost linear": law(0.01),
    "saturating": law(0.1),
    "saturating early": law(0.3),
    "retrograde": law(0.02, 0.001),
    "retrograde early": law(0.05, 0.01),
}


@dataclass
class Run:
    """A job on a curve: each tick is the time of one measurement."""

    curve: Curve
    sizes: Sequence[int]
    spec: AutoscaleSpec = AUTO
    noise: float = 0.0
    resize_s: float = 15.0
    seed: int = 0
    now: float = NOW
    room: int | None = None
    remaining: float | None = None
    record: ScalingRecord = field(default_factory=ScalingRecord)
    pending: PendingChange = field(default_factory=PendingChange)
    reasons: list[str] = field(default_factory=list)
    sizes_taken: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        if self.record.target is None:
            self.record.target = self.sizes[0]

    @property
    def size(self) -> int:
        assert self.record.target is not None
        return self.record.target

    def view(self) -> View:
        return View(
            spec=self.spec,
            now=self.now,
            sizes=self.sizes,
            target=self.size,
            size=self.size if self.room is None else min(self.size, self.room),
            steady=True,
            room=self.room,
            remaining=self.remaining,
        )

    def tick(self, seconds: float = 60.0) -> None:
        self.now += seconds
        view = self.view()
        self.record.observe(view.size, view.target, self.now)
        error = self.random.gauss(1, self.noise) if self.noise else 1.0
        speed = self.curve(view.size) * max(0.2, error)
        self.record.measured(view.size, speed, self.now, self.noise)
        decision = decide(self.record, view, self.pending)
        assert decision.target in self.sizes, "a target is an allowed size"
        assert decision.again_at > self.now
        assert decision == decide(self.record, view, self.pending), "the same again"
        self.reasons.append(decision.reason)
        self.record.move(decision, view)
        if decision.target != view.target:
            self.record.resized(self.resize_s)
            self.sizes_taken.append((self.now, self.size))
            again = decide(self.record, self.view(), self.pending)
            assert again.target == decision.target, "one change at a time"

    def hours(self, hours: float) -> "Run":
        end = self.now + hours * 3600
        while self.now < end:
            self.tick()
        return self


def best(curve: Curve, sizes: Sequence[int]) -> float:
    return max(map(curve, sizes))


@pytest.mark.parametrize("name", CURVES)
def test_the_best_size_is_reached_in_four_changes(name: str) -> None:
    curve, sizes = CURVES[name], range(4, 65)
    run = Run(curve, sizes).hours(4)
    assert len(run.sizes_taken) <= 5  # the fifth one takes a growth back
    reached = run.sizes_taken[:4][-1][1]
    assert max(curve(run.size), curve(reached)) >= 0.95 * best(curve, sizes)
    assert curve(run.size) >= 0.95 * best(curve, sizes)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    serial=st.floats(0, 0.3),
    all_to_all=st.floats(0, 0.01),
    noise=st.sampled_from([0.0, 0.005, 0.01]),
    seed=st.integers(0, 100),
    least=st.integers(2, 6),
    unit=st.integers(1, 3),
    count=st.integers(1, 12),
)
@example(serial=0.1875, all_to_all=0.009765625, noise=0.01, seed=36, least=2, unit=3, count=3)
def test_a_job_on_any_curve_comes_to_rest_near_the_best_size(
    serial: float, all_to_all: float, noise: float, seed: int, least: int, unit: int, count: int
) -> None:
    curve = law(serial, all_to_all)
    sizes = [unit * (least + i) for i in range(count)]
    run = Run(curve, sizes, noise=noise, seed=seed).hours(3)
    assert curve(run.size) >= 0.93 * best(curve, sizes)
    ways = [(at, b > a) for (at, b), a in zip(run.sizes_taken, taken(run), strict=False)]
    turns = [later for (_, one), (later, other) in pairwise(ways) if one != other]
    assert all(b - a >= HOUR_S - 1 for a, b in pairwise(turns)), "one reversal in an hour"
    if not noise:
        assert run.now - run.sizes_taken[-1][0] > 3600 if run.sizes_taken else True, "a fixed point"


def taken(run: Run) -> list[int]:
    """Return the sizes before each change."""
    return [run.sizes[0], *(size for _, size in run.sizes_taken)]


@given(
    limit=st.integers(1, 4),
    noise=st.floats(0.05, 0.5),
    seed=st.integers(0, 50),
    gain=st.sampled_from([0.0, 0.01, 0.05]),
)
@settings(max_examples=10, deadline=None)
def test_wild_measurements_change_the_size_no_more_often_than_allowed(
    limit: int, noise: float, seed: int, gain: float
) -> None:
    spec = AutoscaleSpec(mode="auto", max_resizes_per_hour=limit, min_gain=gain)
    run = Run(law(0.05, 0.001), range(2, 33), spec, noise, resize_s=1.0, seed=seed).hours(3)
    for index, (at, _) in enumerate(run.sizes_taken):
        later = [t for t, _ in run.sizes_taken[index:] if t < at + HOUR_S - 1]
        assert len(later) <= limit + 1  # a growth that failed is taken back all the same


def test_a_size_that_is_not_allowed_is_left() -> None:
    record = ScalingRecord(target=7)
    view = Run(law(0.1), [2, 4, 8], record=record).view()
    assert decide(record, view, PendingChange()).target == 4
    assert decide(record, replace(view, target=1), PendingChange()).target == 2


def test_reasons_say_what_is_gained() -> None:
    run = Run(law(0.0), [4, 8], resize_s=41.0)
    run.record.resize_s = 41.0
    run.hours(0.2)
    assert run.size == 8
    assert "4→8: +87 % for 41 s of resize" in run.reasons
    assert run.reasons[-1] == "not scaled: 8 nodes are the largest allowed size"


def test_a_small_gain_is_no_reason() -> None:
    run = Run(law(0.3), [4, 8, 9, 11])
    run.record.samples = {4: Sample(21.0, NOW), 8: Sample(26.0, NOW), 9: Sample(26.3, NOW)}
    run.record.target = 9
    run.hours(0.5)
    assert run.size == 9
    assert run.reasons[-1].startswith("not scaled: 2 more nodes would add 4 %"), run.reasons[-1]


def test_without_room_the_gain_is_only_told() -> None:
    run = Run(law(0.0), range(4, 9), room=4).hours(0.5)
    assert run.size == 4
    assert (
        run.reasons[-1] == "not scaled: 4 more nodes would add 87 %, and there is no room for them"
    )
    run.room = 6
    run.hours(0.2)
    assert run.size == 6


def test_nodes_that_do_not_come_are_given_back() -> None:
    run = Run(law(0.0), range(4, 9)).hours(0.1)
    assert run.size == 8
    view = replace(run.view(), size=5)
    run.record.observe(5, 8, run.now)
    late = run.now + WAITS * AUTO.scale_up_delay_seconds
    assert decide(run.record, replace(view, now=late - 1), run.pending).target == 8
    given = decide(run.record, replace(view, now=late), run.pending)
    assert (given.target, given.reason) == (5, "8→5: 3 nodes did not come")


@dataclass
class Full(Run):
    """A job on a platform that cannot say how many nodes it has room for."""

    hosts: int = 4

    def view(self) -> View:
        return replace(super().view(), size=min(self.size, self.hosts), room=None)

    def ticks(self, seconds: float) -> None:
        """Let time pass in small steps."""
        end = self.now + seconds
        while self.now < end:
            self.tick(10.0)


def test_a_full_cluster_is_asked_again_after_growing_delays() -> None:
    run = Full(law(0.0), range(4, 65))
    run.ticks(6 * 3600)
    asked = [at for at, size in run.sizes_taken if size > 4]
    assert 3 <= len(asked) <= 12
    assert {size for _, size in run.sizes_taken} == {4, 8}
    assert asked[-1] - asked[-2] > 2 * (asked[1] - asked[0])
    assert not run.record.moves, "what has not come was no change of size"
    run.hosts = 8
    run.ticks(2 * 3600)
    assert run.view().size == 8
    assert run.record.absence is not None
    assert run.record.absence.size == 8, "the next size was asked for after that"


def test_lost_nodes_are_waited_for_and_not_for_ever() -> None:
    """Whether the job has grown before or not."""
    for record in (ScalingRecord(target=4), ScalingRecord(target=4, trial=Trial(2, 4, NOW - 1e5))):
        run = Full(law(0.0), range(2, 5), record=record, hosts=4)
        run.ticks(1200)
        assert (run.size, run.record.trial) == (4, None)
        run.hosts = 3
        run.ticks(WAITS * AUTO.scale_up_delay_seconds - 30)
        assert run.size == 4, "the host may come back"
        run.ticks(60)
        assert run.size == 3
        assert "4→3: 1 node did not come" in run.reasons
        run.hosts = 4
        run.ticks(3600)
        assert run.size == 4, "it tries again"


def test_without_a_smaller_allowed_size_no_time_is_named_for_lost_nodes() -> None:
    record = ScalingRecord(target=4)
    record.observe(3, 4, NOW)
    view = replace(Run(law(0.0), [4, 8], record=record).view(), size=3, now=NOW + 1e4)
    found = decide(record, view, PendingChange())
    assert (found.target, found.reason) == (4, "3 of 4 nodes train")
    assert found.again_at == math.inf


def test_a_script_that_becomes_slower_keeps_its_size() -> None:
    """The speeds of other sizes are as old as those of the script before."""
    factor = [1.0]
    run = Run(lambda n: 10.0 * n * factor[0], [4, 8]).hours(3)
    assert (run.size, run.record.trial) == (8, None)
    factor[0] = 0.4
    run.hours(3)
    assert [size for _, size in run.sizes_taken] == [8]
    assert run.record.samples[4].speed == pytest.approx(16.0)


def test_a_growth_whose_gain_is_not_clear_is_measured_longer() -> None:
    record = ScalingRecord(target=8, trial=Trial(4, 8, NOW))
    record.samples = {4: Sample(10.0, NOW - 60, 0.03)}
    run = Run(law(0.0), [4, 8], record=record)
    record.measured(8, 9.9, NOW + 60, 0.03)
    run.now = NOW + 60
    view = run.view()
    found = decide(record, view, run.pending)
    assert (found.target, found.why) == (8, ConditionReason.MEASURING)
    assert "is not clear yet: the speeds differ too much" in found.reason
    later = decide(record, replace(view, now=found.again_at), run.pending)
    assert later.target == 4
    record.samples[8] = Sample(9.9, NOW + 60, 0.003)
    record.samples[4].error = 0.003
    assert decide(record, view, run.pending).target == 4
    slow = decide(record, replace(view, slow=True), run.pending)
    assert slow.target == 8
    assert slow.reason.endswith("is not clear yet: the steps are slow")


def test_one_node_more_or_less_is_told_in_the_singular() -> None:
    record = ScalingRecord(target=5, trial=Trial(4, 5, NOW))
    record.samples = {4: Sample(10.0, NOW - 60, 0.03), 5: Sample(9.9, NOW + 60, 0.03)}
    view = Run(law(0.0), [4, 5], record=record, now=NOW + 60).view()
    unclear = decide(record, view, PendingChange())
    assert unclear.reason.startswith("whether 1 more node is worth it is not clear yet: ")
    back = decide(record, replace(view, now=unclear.again_at), PendingChange())
    assert back.reason == "5→4: 1 more node added -1 %"
    record.trial = None
    fewer = decide(record, view, PendingChange(4, NOW - 1e4))
    assert fewer.reason == "5→4: 1 node adds -1 %"


def test_a_global_batch_that_is_too_small_for_more_nodes_is_the_reason() -> None:
    record = ScalingRecord(target=4, samples={4: Sample(10.0, NOW)})
    view = Run(law(0.0), [4, 8], record=record).view()
    found = decide(record, replace(view, most=7), PendingChange())
    assert found.reason == (
        "not scaled: the global batch has no samples for the workers of more nodes"
    )
    record.bans[8] = Ban(NOW + 60)
    found = decide(record, replace(view, most=8), PendingChange())
    assert found.reason.endswith("are not tried again for a while")


def test_another_template_begins_anew() -> None:
    run = Run(law(0.0), [4, 8]).hours(1)
    run.record.renew("a")
    assert set(run.record.samples) == {4, 8}, "those of a master that knew no templates stay"
    run.record.renew("b")
    assert not run.record.samples
    assert run.record.target == 8


def test_a_growth_that_brings_nothing_is_taken_back_and_not_tried_again_soon() -> None:
    run = Run(lambda n: min(n, 4) * 10.0, [4, 8]).hours(1)
    assert run.size == 4
    assert [size for _, size in run.sizes_taken] == [8, 4]
    assert "8→4: 4 more nodes added 0 %" in run.reasons
    assert run.record.bans[8].until > NOW


def test_a_change_must_pay_off_in_the_time_that_is_left() -> None:
    run = Run(law(0.0), [4, 8], remaining=40 * 60.0, resize_s=60.0)
    run.record.resize_s = 60.0
    run.hours(0.3)
    assert run.size == 4
    assert "the change takes 60 s of the time that is left" in run.reasons[-1]


def test_the_lowest_price_of_a_step_is_chosen() -> None:
    spec = AutoscaleSpec(mode="auto", objective="cost", price_per_node_hour=3.6)
    record = ScalingRecord(target=8)
    run = Run(law(0.2), range(2, 9), spec, record=record).hours(1)
    assert run.size == 2
    assert any("a step costs" in why and "for 1000 steps instead of" in why for why in run.reasons)


def deadline_at(seconds: int) -> str:
    minutes, rest = divmod(seconds + 46 * 60 + 40, 60)  # NOW is 13:46:40
    hours, minutes = divmod(minutes + 13 * 60, 60)
    return f"1970-01-12T{hours:02}:{minutes:02}:{rest:02}Z"


def test_the_least_size_that_ends_in_time_is_chosen() -> None:
    spec = AutoscaleSpec(mode="auto", objective="deadline", deadline=deadline_at(4 * 3600))
    assert spec.ends_at == NOW + 4 * 3600
    run = Run(law(0.0), range(2, 17), spec, remaining=60 * 4 * 3600.0)
    while run.size < 5 and run.now < NOW + 3600:
        run.tick()
    assert 7 <= run.size <= 8, "6 nodes would end exactly at the deadline"
    assert any("to end before the deadline" in why for why in run.reasons)


def test_a_deadline_that_has_passed_changes_nothing() -> None:
    spec = AutoscaleSpec(mode="auto", objective="deadline", deadline="1969-01-01T00:00:00Z")
    run = Run(law(0.0), range(2, 17), spec, remaining=1e6).hours(0.5)
    assert run.size == 2
    assert run.reasons[-1] == "not scaled: the deadline 1969-01-01T00:00:00Z has passed"


def test_a_deadline_needs_a_total() -> None:
    spec = AutoscaleSpec(mode="auto", objective="deadline", deadline=deadline_at(3600))
    run = Run(law(0.0), range(2, 17), spec).hours(0.1)
    assert "reports no total number of steps" in run.reasons[-1]


def test_a_script_without_steps_is_not_scaled() -> None:
    view = replace(Run(law(0.0), [2, 4]).view(), stepped=False)
    answer = decide(ScalingRecord(target=2), view, PendingChange())
    assert answer.why is ConditionReason.NO_PROGRESS


@given(
    st.builds(
        ScalingRecord,
        target=st.integers(1, 40),
        samples=st.dictionaries(
            st.integers(1, 40),
            st.builds(Sample, st.floats(1e-3, 1e6), st.floats(-1e12, 1e12)),
            max_size=6,
        ),
        resize_s=st.none() | st.floats(0, 1e6),
        moves=st.lists(
            st.builds(Move, st.floats(-1e12, 1e12), st.integers(1, 40), st.integers(1, 40)),
            max_size=6,
        ),
        trial=st.none()
        | st.builds(Trial, st.integers(1, 40), st.integers(1, 40), st.floats(-1e12, 1e12)),
        bans=st.dictionaries(
            st.integers(1, 40), st.builds(Ban, st.floats(-1e12, 1e12)), max_size=4
        ),
    ),
    st.sets(st.integers(1, 40), min_size=1, max_size=8),
    st.floats(-1e12, 1e12),
    st.none() | st.integers(0, 40),
    st.sampled_from(["throughput", "cost", "deadline"]),
    st.none() | st.floats(0, 1e12),
)
def test_any_record_and_any_clock_give_an_allowed_size(
    record: ScalingRecord,
    sizes: set[int],
    now: float,
    room: int | None,
    objective: str,
    remaining: float | None,
) -> None:
    spec = AutoscaleSpec.model_validate(
        {"mode": "auto", "objective": objective, "deadline": "2030-01-01T00:00:00Z"}
    )
    assert record.target is not None
    view = View(
        spec=spec,
        now=now,
        sizes=sorted(sizes),
        target=record.target,
        size=record.target,
        steady=True,
        room=room,
        remaining=remaining,
    )
    decision = decide(record, view, PendingChange())
    assert decision.target in sizes
    assert decision.again_at > now
    assert decision.reason
    if room is not None and decision.counts:
        assert decision.target <= max(room, record.target)
    record.move(decision, view)
    assert len(record.moves) <= 64


def test_the_wait_for_a_spare_costs_at_most_twice_the_better_choice() -> None:
    for lost in range(1, 8):
        for comes_s in (1, 10, 50, 100, 500, 5000):
            wait_s = spare_wait_s(10_000, resize_s=30, lost=lost, size=8)
            shrink = 60 + comes_s * lost / 8
            took = comes_s if comes_s <= wait_s else wait_s + 60 + (comes_s - wait_s) * lost / 8
            assert took <= 2 * min(comes_s, shrink) + 1e-6
    assert spare_wait_s(None, resize_s=30, lost=1, size=8) == 0
    assert spare_wait_s(20, resize_s=30, lost=1, size=8) == 20
    assert spare_wait_s(20, resize_s=30, lost=8, size=8) == 20
