"""The allocator: bounds, order, capacity, and that sizes come to rest, for any set of jobs."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover_py.allocator import (
    BETTER,
    CHURN,
    PATIENCE_S,
    Allocation,
    Demand,
    Pool,
    allocate,
    demand_of,
)
from dlrover_py.protocol.autoscale import NodeAllocation
from tests.builders import elastic_job

DAY_S = 86_400.0
NOW = 1.8e9
CURVES = st.one_of(
    st.none(),
    st.tuples(st.just(1.0), st.floats(0, 0.5), st.floats(0, 0.01)),
)


@st.composite
def demands(draw: st.DrawFn, new: bool = False) -> list[Demand]:
    """Draw jobs: new ones, or ones that have nodes and intents that need not agree."""
    found = []
    for index in range(draw(st.integers(0, 8))):
        unit = draw(st.sampled_from((1, 1, 2, 4)))
        only = draw(st.sets(st.integers(1, 3).map((3 * unit).__mul__))) if unit < 3 else set()
        least = draw(st.integers(1, 6)) * unit
        most = least + draw(st.integers(0, 8)) * unit
        if only:
            least, most = min(only), max(only)
        sizes = st.one_of(st.just(0), st.integers(least // unit, most // unit).map(unit.__mul__))
        granted = None if new else draw(st.one_of(st.none(), sizes))
        found.append(
            Demand(
                name=f"job-{index}",
                minimum=least,
                maximum=most,
                unit=unit,
                sizes=tuple(sorted(only)),
                priority=draw(st.integers(0, 2)),
                queue=draw(st.sampled_from("ab")),
                weight=draw(st.sampled_from((1.0, 2.0))),
                queued_at=NOW - draw(st.integers(0, 7200)),
                curve=draw(CURVES),
                standbys=draw(st.sampled_from((0, 0, 1, 3))),
                measured=draw(st.integers(0, most)),
                size=0 if new else draw(sizes),
                granted=granted,
                granted_at=NOW - draw(st.sampled_from((0.0, 100.0, DAY_S, -DAY_S))),
                spot_policy=draw(st.sampled_from(("any", "onDemandMin"))),
            )
        )
    return found


POOLS = st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=5).map(
    lambda found: [Pool(name=f"p{i}", nodes=n, spot=s) for i, (n, s) in enumerate(found)]
)


def follow(jobs: Sequence[Demand], found: Mapping[str, Allocation], now: float) -> list[Demand]:
    """Return the jobs once they have exactly the nodes that they were granted."""
    return [
        replace(
            job,
            size=found[job.name].nodes,
            placed=found[job.name].pools,
            granted=found[job.name].nodes,
            granted_at=job.granted_at if job.granted == found[job.name].nodes else now,
        )
        for job in jobs
    ]


def settled(jobs: Sequence[Demand], pools: Sequence[Pool]) -> tuple[list[Demand], float, int]:
    """Follow the allocator until it changes nothing; return the jobs, the time and the calls."""
    now, jobs = NOW, list(jobs)
    for calls in range(60):
        after = follow(jobs, allocate(jobs, pools, now), now)
        if [j.granted for j in after] == [j.granted for j in jobs] and calls:
            return after, now, calls
        jobs, now = after, now + 400.0
    raise AssertionError(f"still moving after 60 calls: {jobs}")


def utility(jobs: Sequence[Demand]) -> float:
    """Return the sum that the allocator raises, over the jobs that have nodes."""
    return sum(job.weight * math.log(job.speed(job.granted)) for job in jobs if job.granted)


@given(demands(), POOLS)
def test_sizes_are_allowed_and_hosts_are_not_given_twice(
    jobs: list[Demand], pools: list[Pool]
) -> None:
    found = allocate(jobs, pools, NOW)
    total = sum(pool.nodes for pool in pools)
    assert found.keys() == {job.name for job in jobs}
    assert sum(one.goal for one in found.values()) <= total
    old = {job.name: job.size if job.granted is None else job.granted for job in jobs}
    before = sum(max(job.size, old[job.name]) for job in jobs)
    # Whichever of the numbers are written: those that rise fit beside all old ones.
    held = sum(max(job.size, old[job.name], found[job.name].nodes) for job in jobs)
    assert held <= max(total, before), "a host is promised before it is free"
    for job in jobs:
        one = found[job.name]
        start = job.size if job.granted is None else job.granted
        assert one.goal == 0 or job.least <= one.goal <= job.most
        assert one.goal == job.fit(one.goal)
        assert one.nodes in (one.goal, start) or max(start + 1, job.least) <= one.nodes < one.goal
        assert one.nodes in (start, job.fit(one.nodes))
        assert one.nodes <= max(one.goal, start)
        assert one.reason


@given(demands(new=True), POOLS)
def test_places_are_in_the_pools_and_minima_are_stable(
    jobs: list[Demand], pools: list[Pool]
) -> None:
    found = allocate(jobs, pools, NOW)
    for pool in pools:
        assert sum(one.pools.get(pool.name, 0) for one in found.values()) <= pool.nodes
    stable = {pool.name for pool in pools if not pool.spot}
    for job in jobs:
        one = found[job.name]
        assert sum(one.pools.values()) == one.nodes + (one.standbys if one.nodes else 0)
        if job.spot_policy == "onDemandMin" and one.nodes:
            assert sum(one.pools.get(name, 0) for name in stable) >= job.least


@given(demands(), st.integers(0, 40))
def test_no_minimum_waits_for_the_surplus_or_for_a_lower_priority(
    jobs: list[Demand], nodes: int
) -> None:
    jobs = [replace(job, spot_policy="any", queued_at=NOW, granted_at=NOW) for job in jobs]
    found = allocate(jobs, [Pool(name="p", nodes=nodes)], NOW)
    for job in jobs:
        if found[job.name].goal:
            continue
        before = [o for o in jobs if found[o.name].goal and o.priority >= job.priority]
        rest = nodes - sum(other.least + other.standbys for other in before)
        needs = job.least + (0 if job.size or job.granted else job.standbys)
        assert rest < needs, f"{job} is held back: {found}"


@settings(max_examples=40)
@given(demands(), POOLS)
def test_sizes_come_to_rest_and_only_rise_in_use(jobs: list[Demand], pools: list[Pool]) -> None:
    # A time in the future is that of a clock that has jumped. While it comes nearer, a job seems to
    # wait ever shorter, and others may pass it.
    jobs = [replace(job, granted_at=min(job.granted_at, NOW)) for job in jobs]
    rested, now, _ = settled(jobs, pools)
    again = allocate(rested, pools, now + DAY_S)
    assert {n: one.nodes for n, one in again.items()} == {j.name: j.granted for j in rested}
    assert all(one.goal == one.nodes for one in again.values())
    assert {n: one.pools for n, one in again.items()} == {j.name: j.placed for j in rested}


@settings(max_examples=40)
@given(demands(new=True), st.integers(1, 60))
def test_each_call_raises_the_use_of_the_same_jobs(jobs: list[Demand], nodes: int) -> None:
    pools = [Pool(name="p", nodes=nodes)]
    jobs = follow(jobs, allocate(jobs, pools, NOW), NOW)
    now = NOW
    for _ in range(5):
        now += 400
        after = follow(jobs, allocate(jobs, pools, now), now)
        shrunk = any((a.granted or 0) < (b.granted or 0) for a, b in zip(after, jobs, strict=True))
        if not shrunk:  # a move takes two calls: first the nodes are given back
            assert utility(after) >= utility(jobs) - 1e-9
        moved = sum(
            max(0, (b.granted or 0) - (a.granted or 0)) for a, b in zip(after, jobs, strict=True)
        )
        assert moved <= max(0, int(CHURN * nodes)) * 2 + 2 * len(jobs)
        jobs = after


@given(demands(), POOLS)
def test_the_same_input_gives_the_same_output_in_any_order(
    jobs: list[Demand], pools: list[Pool]
) -> None:
    assert allocate(jobs, pools, NOW) == allocate(list(reversed(jobs)), pools, NOW)


@settings(max_examples=20)
@given(demands(), POOLS, st.floats(-1e9, 1e9))
def test_a_jump_of_the_clock_breaks_nothing(
    jobs: list[Demand], pools: list[Pool], jump: float
) -> None:
    rested, now, _ = settled(jobs, pools)
    found = allocate(rested, pools, now + jump)
    assert {n: one.nodes for n, one in found.items()} == {j.name: j.granted for j in rested}


def job(name: str, minimum: int, maximum: int, **more: object) -> Demand:
    """Return a job that has the nodes that were granted to it."""
    more.setdefault("size", more.get("granted") or 0)
    return Demand(name=name, minimum=minimum, maximum=maximum, **more)  # type: ignore[arg-type]


def nodes(found: Mapping[str, Allocation]) -> dict[str, int]:
    """Return the nodes that each job may have now."""
    return {name: one.nodes for name, one in found.items()}


SIX = [Pool(name="p", nodes=6)]


def test_an_arrival_of_higher_priority_waits_until_the_surplus_is_seen_gone() -> None:
    low = job("low", 2, 6, granted=6)
    high = job("high", 2, 2, priority=1)
    found = allocate([low, high], SIX, NOW)
    assert found["low"].nodes == 4
    assert found["low"].reason == "6→4: 2 nodes given back, high gets them"
    assert found["high"].nodes == 0
    assert found["high"].reason == "0→2: waits until other jobs have given 2 nodes back"
    low = replace(low, granted=4, granted_at=NOW, size=5)  # one Pod still ends
    assert nodes(allocate([low, high], SIX, NOW + 1)) == {"low": 4, "high": 0}
    low = replace(low, size=4)
    found = allocate([low, high], SIX, NOW + 2)
    assert nodes(found) == {"low": 4, "high": 2}
    assert found["high"].reason == "2 nodes: the minimum is 2"


@given(demands(), st.integers(0, 40), st.integers(1, 10_000))
def test_no_standby_suspends_a_job(jobs: list[Demand], nodes: int, standbys: int) -> None:
    """Neither a new job with standbys, nor more standbys of one that has nodes."""
    jobs = [replace(one, spot_policy="any", granted_at=NOW, queued_at=NOW) for one in jobs]
    pools = [Pool(name="p", nodes=nodes)]
    jobs = [replace(one, standbys=0) for one in jobs]
    has_nodes = [one for one in jobs if one.size or one.granted]
    before = allocate(has_nodes, pools, NOW)
    for more in has_nodes:
        alike = [replace(o, standbys=standbys if o is more else 0) for o in has_nodes]
        after = allocate(alike, pools, NOW)
        assert all(after[n].goal for n, one in before.items() if one.goal), after
    new = job("new", 1, 1, standbys=max(standbys, nodes), priority=9)
    after = allocate([*has_nodes, new], pools, NOW)
    assert {n: one.goal for n, one in after.items()} == {
        n: one.goal for n, one in before.items()
    } | {"new": 0}
    assert after["new"].reason == (
        f"held back: it needs {new.standbys + 1} nodes with "
        f"{new.standbys} standby{'s' if new.standbys > 1 else ''}, and the cluster has {nodes}"
    )


def test_standbys_are_taken_from_the_surplus_and_return_when_there_is_room() -> None:
    a = job("a", 2, 6, granted=4)
    b = job("b", 1, 1, standbys=1)
    found = allocate([a, b], [Pool(name="p", nodes=4)], NOW)
    assert found["a"].nodes == 2, "one for b, and one for its standby"
    assert found["b"] == Allocation(0, 1, found["b"].reason, standbys=1)
    a = replace(a, granted=2, size=2, granted_at=NOW)
    found = allocate([a, b], [Pool(name="p", nodes=4)], NOW)
    assert nodes(found) == {"a": 2, "b": 1}
    b = job("b", 1, 1, standbys=1, granted=1, standing=1)
    assert nodes(allocate([a, b], [Pool(name="p", nodes=3)], NOW)) == {"a": 2, "b": 1}


def test_a_standby_is_given_up_before_a_job_is_suspended() -> None:
    a = job("a", 2, 2, granted=2, standbys=1, standing=1)
    b = job("b", 2, 2, priority=1)
    four = [Pool(name="p", nodes=4)]
    found = allocate([a, b], four, NOW)
    assert nodes(found) == {"a": 2, "b": 0}
    assert found["a"].standbys == 0
    assert found["b"].reason == "0→2: waits until other jobs have given 1 node back"
    ended = replace(a, standing=0)
    assert nodes(allocate([ended, b], four, NOW + 1)) == {"a": 2, "b": 2}
    five = [Pool(name="p", nodes=5)]
    found = allocate([ended, replace(b, granted=2, size=2)], five, NOW + 2)
    assert found["a"].standbys == 1, "it comes back when there is room"


@given(demands(), st.integers(0, 40), st.integers(0, 3))
def test_a_job_is_suspended_only_if_the_minima_alone_do_not_fit(
    jobs: list[Demand], nodes: int, standing: int
) -> None:
    jobs = [
        replace(one, spot_policy="any", standing=min(standing, one.standbys), queued_at=NOW)
        for one in jobs
    ]
    found = allocate(jobs, [Pool(name="p", nodes=nodes)], NOW)
    kept = [one for one in jobs if found[one.name].goal]
    for one in jobs:
        if (one.size or one.granted) and not found[one.name].goal:
            before = [o for o in kept if o.priority >= one.priority]
            taken = sum(o.least + found[o.name].standbys for o in before)
            assert taken + one.least > nodes
    assert sum(found[one.name].goal + found[one.name].standbys for one in kept) <= nodes
    assert all(0 <= found[one.name].standbys <= one.standbys for one in jobs)


def test_a_standby_that_exists_is_no_reason_to_suspend_a_job_that_has_lost_a_host() -> None:
    a = job("a", 2, 2, granted=2, standbys=1, standing=1)
    b = job("b", 2, 2, granted=2)
    found = allocate([a, b], [Pool(name="p", nodes=4)], NOW)
    assert nodes(found) == {"a": 2, "b": 2}


@settings(max_examples=40)
@given(demands(new=True), demands(new=True), st.integers(0, 6))
def test_no_job_waits_for_ever_for_a_standby(
    running: list[Demand], new: list[Demand], more: int
) -> None:
    """Jobs that have a standby each, and others that arrive, in a cluster with some room."""
    here = [
        replace(one, size=one.least, granted=one.least, standbys=1, standing=1, spot_policy="any")
        for one in running
    ]
    come = [replace(one, name=f"new-{one.name}", spot_policy="any") for one in new]
    pools = [Pool(name="p", nodes=sum(one.size + 1 for one in here) + more)]
    jobs, now = [*here, *come], NOW
    for _ in range(60):
        found = allocate(jobs, pools, now)
        now += 400.0
        after = [
            replace(one, standing=found[one.name].standbys if one.granted else 0)
            for one in follow(jobs, found, now)
        ]
        if [one.granted for one in after] == [one.granted for one in jobs]:
            break
        jobs = after
    assert not [one.reason for one in found.values() if "waits until" in one.reason]


def test_a_raised_minimum_suspends_no_other_job_of_the_same_priority() -> None:
    old = job("old", 6, 8, granted=4, queued_at=NOW - 100)
    young = job("young", 4, 8, granted=4, queued_at=NOW - 10)
    eight = [Pool(name="p", nodes=8)]
    assert nodes(allocate([old, young], eight, NOW)) == {"old": 0, "young": 4}
    more = replace(young, granted=6, size=6)
    found = allocate([old, more], [Pool(name="p", nodes=10)], NOW)
    assert {n: one.goal for n, one in found.items()} == {"old": 6, "young": 4}, (
        "it takes what is above the minimum"
    )
    higher = replace(old, priority=1)
    assert allocate([higher, young], eight, NOW)["young"].nodes == 0


def test_a_job_that_waits_for_stable_hosts_keeps_no_job_from_spot_hosts() -> None:
    pools = [Pool(name="s", nodes=4), Pool(name="spot", nodes=6, spot=True)]
    runs = job("runs", 2, 2, granted=2, placed={"s": 2}, spot_policy="onDemandMin")
    long = NOW - PATIENCE_S - 1
    first = job("first", 4, 4, queued_at=long, spot_policy="onDemandMin")
    choosy = job("choosy", 2, 2, queued_at=NOW, spot_policy="onDemandMin")
    cheap = job("cheap", 5, 5, queued_at=NOW)
    large = job("large", 2, 2, queued_at=NOW + 1)
    found = allocate([runs, first, choosy, cheap, large], pools, NOW)
    assert nodes(found) == {"runs": 2, "first": 0, "choosy": 0, "cheap": 5, "large": 0}
    assert found["large"].reason == "held back: first waits before it", "one spot host is left"


def test_free_hosts_are_taken_at_once_while_a_pod_hangs() -> None:
    a = job("a", 1, 3, granted=3, size=4, granted_at=NOW - 1000)
    b = job("b", 1, 3, granted=0, granted_at=NOW - 500)
    found = allocate([a, b], SIX, NOW)
    assert found["b"].nodes == 2
    text = "2 nodes: the minimum is 1; 1 more when other jobs have given them back"
    assert found["b"].reason == text
    held = replace(b, minimum=3)
    assert allocate([a, held], SIX, NOW)["b"].nodes == 0
    running = job("c", 1, 5, granted=2)
    hangs = job("x", 1, 1, granted=1, size=2, granted_at=NOW - 1000)
    assert nodes(allocate([running, hangs], SIX, NOW)) == {"c": 4, "x": 1}
    soon = replace(hangs, granted_at=NOW - 10)
    found = allocate([running, soon], SIX, NOW)
    assert found["c"].nodes == 2, "one change of size is better than two"


def test_only_given_sizes_are_granted() -> None:
    spec = elastic_job(4, 2, maxReplicas=8, autoscale={"mode": "auto", "sizes": [4, 8]})
    new = demand_of(spec, None, queued_at=0.0, size=0)
    for total, size in ((3, 0), (4, 4), (5, 4), (7, 4), (8, 8)):
        one = allocate([new], [Pool(name="p", nodes=total)], NOW)[new.name]
        assert (one.nodes, one.goal) == (size, size), one
    urgent = job("urgent", 1, 1, priority=1)
    running = replace(new, size=8, granted=8, measured=8)
    found = allocate([running, urgent], [Pool(name="p", nodes=8)], NOW)
    assert found[new.name].nodes == 4, "7 is no size"
    four = replace(new, size=4, granted=4, measured=4)
    found = allocate([four, urgent], [Pool(name="p", nodes=4)], NOW)
    assert nodes(found) == {new.name: 0, "urgent": 0}, "3 are too few"
    held = NodeAllocation(nodes=3)
    assert spec.allocated(held).rests
    assert not spec.allocated(NodeAllocation(nodes=4)).rests
    advised = elastic_job(2, 2, maxReplicas=8, autoscale={"mode": "advise", "nodeUnit": 4})
    assert demand_of(advised, None, queued_at=0.0, size=0).least == 2, "advice changes no size"


def test_who_was_held_back_a_moment_ago_blocks_nobody() -> None:
    jobs = [
        job("a", 4, 4, granted=4),
        job("large", 6, 6, queued_at=NOW - 7200, granted=0, granted_at=NOW - 5),
        job("small", 2, 2, queued_at=NOW),
    ]
    assert allocate(jobs, SIX, NOW)["small"].nodes == 2
    assert allocate(jobs, SIX, NOW + PATIENCE_S)["small"].nodes == 0


def test_a_forced_size_is_not_kept_for_long() -> None:
    lost = job("a", 2, 4, granted=3, granted_at=NOW - 61, forced=True)
    assert nodes(allocate([lost], SIX, NOW)) == {"a": 4}
    chosen = replace(lost, forced=False)
    assert nodes(allocate([chosen], SIX, NOW)) == {"a": 3}
    assert allocate([job("a", 2, 4, granted=4)], [Pool(name="p", nodes=3)], NOW)["a"].forced


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(CURVES, st.integers(1, 2)), min_size=2, max_size=3),
    st.integers(3, 8),
    st.booleans(),
)
def test_a_small_cluster_is_shared_about_as_well_as_possible(
    about: list[tuple[tuple[float, float, float] | None, int]], total: int, one_by_one: bool
) -> None:
    """Compared with all possible sizes, whether the jobs come together or one after the other."""
    jobs = [
        job(f"j{i}", 1, total, curve=curve, measured=total, weight=float(weight))
        for i, (curve, weight) in enumerate(about)
    ]
    pools = [Pool(name="p", nodes=total)]
    rested = list[Demand]()
    for group in [[one] for one in jobs] if one_by_one else [jobs]:
        old = [replace(one, granted_at=-math.inf) for one in rested]
        rested, _, _ = settled([*old, *group], pools)
    best = max(
        sum(j.weight * math.log(j.speed(n)) for j, n in zip(jobs, sizes, strict=True))
        for sizes in itertools.product(range(1, total + 1), repeat=len(jobs))
        if sum(sizes) <= total
    )
    regret = best - utility(rested)
    assert regret <= REGRET * sum(one.weight for one in jobs), [one.granted for one in rested]


REGRET = 0.15
"""Mean of the logarithm of a speed that the best sizes may have more."""


def test_a_job_takes_what_another_has_left() -> None:
    found = allocate([job("a", 2, 6, granted=2)], SIX, NOW)
    assert found["a"] == Allocation(6, 6, "2→6: 4 more nodes add 169 %", {"p": 6})
    again = allocate([job("a", 2, 6, granted=6)], SIX, NOW)
    assert again["a"].reason == "6 nodes: the maximum"


def test_a_job_of_higher_priority_suspends_one_without_a_surplus() -> None:
    low, high = job("low", 6, 6, granted=6), job("high", 4, 4, priority=1)
    found = allocate([low, high], SIX, NOW)
    assert nodes(found) == {"low": 0, "high": 0}
    assert found["low"].reason == "6→0: it needs 6 nodes, and 2 are left by other jobs"
    assert found["high"].goal == 4


def test_jobs_of_the_same_priority_do_not_end_each_other() -> None:
    running, waiting = job("a", 4, 4, granted=4), job("b", 4, 4, queued_at=-1.0)
    found = allocate([running, waiting], SIX, NOW)
    assert nodes(found) == {"a": 4, "b": 0}
    assert found["b"].reason == "held back: it needs 4 nodes, and 2 are left by other jobs"


def test_a_job_that_is_too_large_says_so_and_holds_no_other_back() -> None:
    found = allocate([job("a", 9, 9), job("b", 2, 2, queued_at=NOW)], SIX, NOW)
    assert found["a"].reason == "held back: it needs 9 nodes, and the cluster has 6"
    assert found["b"].nodes == 2


@pytest.mark.parametrize(("waited_s", "small"), [(60.0, 2), (7200.0, 0)])
def test_small_jobs_overtake_a_large_one_for_an_hour(waited_s: float, small: int) -> None:
    jobs = [
        job("a", 4, 4, granted=4),
        job("large", 6, 6, queued_at=NOW - waited_s),
        job("small", 2, 2, queued_at=NOW),
    ]
    found = allocate(jobs, SIX, NOW)
    assert found["small"].nodes == small
    if not small:
        assert found["small"].reason == "held back: large waits before it"


def test_queues_get_equal_shares_of_the_minima() -> None:
    many = [job(f"a{i}", 2, 2, queue="a", queued_at=float(i)) for i in range(4)]
    one = job("b0", 2, 2, queue="b", queued_at=100.0)
    found = allocate([*many, one], SIX, NOW)
    assert nodes(found) == {"a0": 2, "a1": 2, "a2": 0, "a3": 0, "b0": 2}


def test_nodes_go_where_they_bring_most() -> None:
    steep = job("steep", 1, 16, curve=(1.0, 0.0, 0.0), measured=16)
    flat = job("flat", 1, 16, curve=(1.0, 0.5, 0.0), measured=16)
    found = allocate([steep, flat], [Pool(name="p", nodes=16)], NOW)
    assert found["steep"].nodes > 2 * found["flat"].nodes
    assert found["flat"].reason.startswith(f"{found['flat'].nodes} node")


def test_what_was_never_measured_is_not_trusted() -> None:
    new = job("a", 1, 64, curve=(1.0, 0.0, 0.0), measured=4, granted=4)
    found = allocate([new], [Pool(name="p", nodes=64)], NOW)
    assert found["a"].nodes == 8
    again = allocate([replace(new, granted=8, size=8)], [Pool(name="p", nodes=64)], NOW)
    assert again["a"].reason == "8 nodes: the speed with more is not known yet"


def test_a_move_for_speed_needs_a_gain_that_is_clearly_larger() -> None:
    pools = [Pool(name="p", nodes=20)]
    alike = [job("a", 1, 20, granted=11), job("b", 1, 20, granted=9)]
    assert nodes(allocate(alike, pools, NOW)) == {"a": 11, "b": 9}
    apart = [job("a", 1, 20, granted=16), job("b", 1, 20, granted=4)]
    found = allocate(apart, pools, NOW)
    assert found["a"].nodes < 16, f"{BETTER:.0%} more is reached"
    assert found["a"].nodes >= 16 - 2 - 1, "one call moves a tenth of the nodes"
    assert found["a"].reason.endswith("b gets them")
    costly = [replace(one, resize_s=1800.0) for one in apart]
    assert nodes(allocate(costly, pools, NOW)) == {"a": 16, "b": 4}, "the change costs more"
    fresh = [replace(one, granted_at=NOW - 10) for one in apart]
    assert nodes(allocate(fresh, pools, NOW)) == {"a": 16, "b": 4}


def test_a_spot_pool_that_keeps_reclaiming_gets_no_more_nodes() -> None:
    stable = Pool(name="s", nodes=2)
    spot = Pool(name="spot", nodes=6, spot=True)
    one = job("a", 2, 8, granted=4, placed={"s": 2, "spot": 2}, spot_policy="onDemandMin")
    assert allocate([one], [stable, spot], NOW)["a"].pools == {"s": 2, "spot": 6}
    bad = replace(spot, used=2, reclaimed_at=(NOW - 9, NOW - 600, NOW - 60))
    assert allocate([one], [stable, bad], NOW)["a"].pools == {"s": 2, "spot": 2}
    assert nodes(allocate([one], [stable, bad], NOW + 3600)) == {"a": 8}
    large = replace(spot, nodes=80, used=2, reclaimed_at=(NOW - 9, NOW - 600, NOW - 60))
    assert nodes(allocate([one], [stable, large], NOW)) == {"a": 8}, "few, for so many hosts"


def test_a_minimum_may_start_in_a_pool_that_keeps_reclaiming_if_no_other_has_room() -> None:
    stable = Pool(name="s", nodes=2)
    bad = Pool(name="spot", nodes=9, spot=True, used=2, reclaimed_at=(NOW,) * 3)
    old = job("a", 2, 8, granted=2, placed={"spot": 2})
    found = allocate([old, job("b", 4, 8)], [stable, bad], NOW)
    assert nodes(found) == {"a": 2, "b": 4}
    assert found["b"].pools == {"s": 2, "spot": 2}


def test_racks_stay_whole_and_the_smallest_part_is_given_up() -> None:
    racks = [Pool(name=f"rack-{i}", nodes=4) for i in range(3)]
    found = allocate([job("a", 4, 4), job("b", 4, 4), job("c", 3, 3)], racks, NOW)
    assert all(len(one.pools) == 1 for one in found.values())
    wide = job("a", 2, 6, granted=6, placed={"rack-0": 4, "rack-1": 2})
    tall = job("b", 8, 8, priority=1)
    assert allocate([wide, tall], racks, NOW)["a"].pools == {"rack-0": 4}


def test_no_smaller_size_is_faster_than_the_least_that_was_measured() -> None:
    """A curve without a constant part would be infinitely fast with one node."""
    one = replace(job("a", 1, 4, curve=(0.0, 1.0, 0.0), measured=4), least_measured=2)
    assert one.speed(1) <= one.speed(2)
