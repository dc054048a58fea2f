"""What has made a job slow, from simulated windows; and no alarm in a thousand healthy jobs."""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dlrover_py.master.core.diagnosis.slow import MOST_FACTS, OVER, WARM_UP, WINDOW_S, facts
from dlrover_py.master.core.diagnosis.slowness import (
    FEWEST,
    IN_A_ROW,
    KEPT,
    PEER_WINDOWS,
    Excess,
    Parts,
    Slowness,
    SlowWatch,
    Window,
    in_words,
)
from dlrover_py.master.core.events import Rules
from dlrover_py.protocol.agents import NodeLoad
from dlrover_py.protocol.diagnosis import SlowKind
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionType, EventReason
from tests.builders import Bench, job_file, running

HEALTHY_JOBS = 1000
WINDOWS = 72
"""Windows of a healthy job: at least 12 minutes, so 8 days for all jobs."""


def healthy(rng: random.Random) -> Iterator[Window]:
    """Windows of a healthy job of some shape, with what is usual in such jobs.

    Steps vary by up to 8 % from window to window, and the noise of neighbouring windows is related.
    Evaluations and garbage make single windows long. Loaders and sequence lengths have a rhythm.
    Rank 0 logs, so its node uses up to 1.4 times as much CPU. Connections wait for the network up
    to half of the time, of different nodes differently. A twentieth of the windows is far off.
    """
    nodes = [f"n{i}" for i in range(rng.choice((1, 2, 3, 4)))]
    step_s = 10 ** rng.uniform(-2, 1)
    noise, memory = rng.uniform(0.002, 0.08), rng.choice((0.0, 0.3, 0.6))
    data, data_noise = rng.uniform(0, 0.3) * step_s, rng.uniform(0, 1)
    gc, cores = rng.uniform(0, 0.02) * step_s, rng.uniform(0.2, 8)
    throttled, pressure = rng.uniform(0, 0.3), rng.uniform(0, 0.5)
    eval_every = rng.choice((0, 7, 20, 50))
    wave, wave_windows = rng.uniform(0, 0.06), rng.choice((3, 5, 11))
    level, rank0 = 0.0, rng.uniform(1, 1.4)
    sending = {name: rng.uniform(0, 0.5) for name in nodes}
    for number in range(WINDOWS):
        level = memory * level + rng.gauss(0, noise)
        factor = (1 + wave * (number % wave_windows) / wave_windows) * max(0.5, 1 + level)
        if eval_every and number % eval_every == 0:
            factor *= rng.uniform(1.1, 3)
        if rng.random() < 0.05:
            factor *= rng.uniform(1.0, 2.0)
        now = step_s * factor
        parts = {
            name: Parts(
                data=data * max(0.0, 1 + data_noise * rng.gauss(0, 1)),
                gc=gc * rng.uniform(0, 3),
                cpu=cores * now * (rank0 if name == "n0" else 1) * rng.uniform(0.95, 1.05),
                throttled=min(1.0, throttled * rng.uniform(0, 2)),
                pressure=min(1.0, pressure * rng.uniform(0, 2)),
                sending=sending[name] * now * rng.uniform(0, 2),
                peer=rng.choice(nodes),
            )
            for name in nodes
        }
        yield Window(number * 10, now, parts)


def test_a_thousand_healthy_jobs_raise_no_alarm() -> None:
    alarms = []
    for seed in range(HEALTHY_JOBS):
        watch = SlowWatch()
        for window in healthy(random.Random(seed)):
            watch.saw(window)
            if watch.slow is not None:
                alarms.append((seed, window.step, in_words(watch.slow)))
                break
    assert not alarms, alarms[:5]


Change = Callable[[str, Parts], Parts]


def judged(
    change: Change, factor: float, *, seed: int = 0, count: int = 4, after: int = 12
) -> Slowness | None:
    """Return the verdict on a job that changes after some windows.

    Args:
        change: returns the parts of a node after the change.
        factor: times that a step takes after the change.
        seed: seed of the noise of 2 %.
        count: number of nodes.
        after: number of windows after the change.
    """
    rng, watch = random.Random(seed), SlowWatch()
    for number in range(20 + after):
        changed = number >= 20
        now = (factor if changed else 1.0) * (1 + rng.gauss(0, 0.02))
        parts = {}
        for i in range(count):
            name = f"n{i}"
            one = Parts(data=0.05 * rng.uniform(0.8, 1.2), gc=0.005, cpu=rng.uniform(1.95, 2.05))
            parts[name] = change(name, one) if changed else one
        watch.saw(Window(number, now, parts))
    return watch.slow


def on(node: str, **more: float) -> Change:
    """Return a change that adds to the parts of one node, or of all with an empty name."""

    def change(name: str, parts: Parts) -> Parts:
        if node and name != node:
            return parts
        fields: dict[str, Any] = {p: getattr(parts, p) + value for p, value in more.items()}
        return Parts(**({f: getattr(parts, f) for f in Parts.__slots__} | fields))

    return change


CHANGES: list[tuple[Change, float, SlowKind, str]] = [
    (on("n2", data=0.4), 1.4, SlowKind.DATA, "n2"),
    (on("n1", data=0.15), 1.15, SlowKind.DATA, "n1"),
    (on("", data=0.3), 1.3, SlowKind.DATA, ""),
    (on("n3", gc=0.25), 1.25, SlowKind.CODE, "n3"),
    (on("n1", throttled=0.5), 1.6, SlowKind.NEIGHBOUR, "n1"),
    (on("n1", pressure=0.4), 1.3, SlowKind.NEIGHBOUR, "n1"),
    (on("n1", memory=0.4), 1.3, SlowKind.NEIGHBOUR, "n1"),
    (on("n1", io=0.8), 1.4, SlowKind.NEIGHBOUR, "n1"),
    (on("n2", cpu=0.6), 1.3, SlowKind.MACHINE, "n2"),
    (on("n2", cpu=0.3), 1.15, SlowKind.MACHINE, "n2"),
    (on("", cpu=0.6), 1.3, SlowKind.CODE, ""),
    (on("", cpu=0.0), 1.3, SlowKind.UNKNOWN, ""),
    (on("n2", clocks=0.5, cpu=0.6), 1.3, SlowKind.MACHINE, "n2"),
    (on("n2", sending=0.3), 1.3, SlowKind.LINK, "n2"),
    (on("n2", sending=0.25, cpu=0.2), 1.3, SlowKind.LINK, "n2"),
    (on("", sending=0.3), 1.3, SlowKind.LINK, ""),
    (on("n1", sending=0.1), 1.3, SlowKind.UNKNOWN, ""),
    (on("n1", resent=0.05), 1.3, SlowKind.LINK, "n1"),
    (on("n1", resent=0.005, errors=2.0), 1.3, SlowKind.UNKNOWN, ""),
    (on("n1", resent=0.05, data=0.3), 1.3, SlowKind.DATA, "n1"),
]


@pytest.mark.parametrize(("change", "factor", "kind", "node"), CHANGES)
def test_a_change_is_found_with_its_cause(
    change: Change, factor: float, kind: SlowKind, node: str
) -> None:
    for seed in range(20):
        found = judged(change, factor, seed=seed)
        assert found is not None, seed
        assert (found.kind, found.node) == (kind, node), (seed, in_words(found))
        assert found.usual_s == pytest.approx(1.0, rel=0.03)
        assert 20 <= found.since <= 24


@pytest.mark.parametrize(("every", "kind"), [(1, SlowKind.LINK), (3, SlowKind.UNKNOWN)])
def test_segments_sent_again_in_a_few_windows_are_no_bad_link(every: int, kind: SlowKind) -> None:
    windows = 0

    def change(name: str, parts: Parts) -> Parts:
        nonlocal windows
        windows += name == "n1"
        return on("n1", resent=0.3 * (windows % every == 0))(name, parts)

    found = judged(change, 1.3)
    assert found is not None
    assert found.kind is kind


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("pressure", "n1 lacks CPU 60 % of the time, .*: neighbour. Raise the CPU limit"),
        ("memory", "n1 lacks memory 60 % of the time, .*: neighbour. Raise the memory limit"),
        ("io", "n1 waits for storage 60 % of the time, .*: neighbour. Look at its disk"),
    ],
)
def test_what_a_node_lacks_is_named_with_what_to_do(part: str, words: str) -> None:
    found = judged(on("n1", **{part: 0.6}), 1.4, seed=1)
    assert found is not None
    assert re.search(words.replace("60", "[56][0-9]"), in_words(found)), in_words(found)


def linked(*slow: tuple[str, str], count: int = 4) -> Slowness | None:
    """Return the verdict on a job in which the connections of some nodes get slow.

    Args:
        slow: pairs of a node and the node that it sends to.
        count: number of nodes.
    """

    def change(name: str, parts: Parts) -> Parts:
        peer = dict(slow).get(name)
        return parts if peer is None else replace(parts, sending=0.35, peer=peer)

    return judged(change, 1.4, count=count)


def test_the_node_that_most_slow_connections_have_in_common_has_the_slow_link() -> None:
    ring = linked(("n1", "n2"), ("n2", "n3"))
    assert ring is not None
    assert (ring.kind, ring.node, ring.peer) == (SlowKind.LINK, "n2", "n3")
    towards = linked(("n0", "n3"), ("n1", "n3"), ("n2", "n3"))
    assert towards is not None
    assert (towards.node, towards.peer) == ("n3", "n0")
    assert "; the link between n3 and n0 waits for the network " in in_words(towards)


def test_two_nodes_that_wait_for_each_other_are_a_pair() -> None:
    for count in (2, 4):
        pair = linked(("n0", "n1"), ("n1", "n0"), count=count)
        assert pair is not None
        assert {pair.node, pair.peer} == {"n0", "n1"}


def test_without_a_common_end_no_node_is_named() -> None:
    for slow in (
        [("n0", "n1"), ("n1", "n2"), ("n2", "n3"), ("n3", "n0")],
        [("n0", ""), ("n1", ""), ("n2", "")],
        [("n0", "n1"), ("n2", "n3")],
    ):
        found = linked(*slow)
        assert found is not None
        assert (found.kind, found.node) == (SlowKind.LINK, "")
        assert "; connections of several nodes wait for the network: link" in in_words(found)


# --- a link that is slow from the first step on ---


def shaped(rng: random.Random) -> Iterator[Window]:
    """Windows of a healthy job whose nodes have different traffic, or slightly unequal links."""
    count = rng.randint(2, 9)
    nodes = [f"n{i}" for i in range(count)]
    line, volume = 10 ** rng.uniform(7, 10), 10 ** rng.uniform(5, 9)
    speed = {name: line * rng.uniform(0.6, 1) for name in nodes}
    traffic = dict.fromkeys(nodes, volume)
    peer = {name: nodes[(i + 1) % count] for i, name in enumerate(nodes)}
    odd = rng.choice(nodes)
    match rng.choice(("stages", "rack", "racks", "messages", "upload", "little", "root")):
        case "stages":  # their borders have different sizes, and inner stages have two of them
            traffic = {name: volume * 10 ** rng.uniform(-1.5, 1.5) for name in nodes}
            speed = {name: value * rng.choice((1, 2)) for name, value in speed.items()}
        case "rack":  # one node has a longer way, which three nodes share
            speed[odd] = min(speed.values()) / 2
            speed[nodes[nodes.index(odd) - 1]] = speed[odd]
        case "racks":  # the ring crosses the slow border of two racks twice
            for name in (nodes[count // 2 - 1], nodes[-1]):
                speed[name] = line / 6 if count >= 4 else speed[name]
        case "messages":  # all of them wait for acknowledgements
            speed = {name: 10 ** rng.uniform(4, 6.9) for name in nodes}
        case "upload":  # the node that writes to a store far away
            speed[odd], peer[odd] = line / 30, ""
        case "little":  # the node that sends short messages only
            speed[odd], traffic[odd] = line / 30, volume * rng.uniform(0, 0.3)
        case "root":  # one node sends to all
            traffic[odd], speed[odd] = (count - 1) * volume, line
    compute_s = volume / line * 10 ** rng.uniform(-1, 1.5)
    for number in range(3 * PEER_WINDOWS):
        now = {name: value * rng.uniform(0.8, 1.2) for name, value in speed.items()}
        waits = {name: traffic[name] / now[name] for name in nodes}
        step_s = compute_s * rng.uniform(0.97, 1.03) + max(waits.values())
        parts = {
            name: Parts(sending=waits[name], peer=peer[name], speed=now[name]) for name in nodes
        }
        yield Window(number, step_s, parts)


def test_healthy_jobs_with_uneven_traffic_have_no_slow_link() -> None:
    for seed in range(HEALTHY_JOBS):
        watch = SlowWatch()
        for window in shaped(random.Random(seed)):
            watch.saw(window)
            assert watch.slow is None or not watch.slow.speeds, (seed, in_words(watch.slow))


Row = tuple[float, int, float]
"""Share of the time in which a node waits, the node at the other end, and megabytes a second."""
RING: list[Row] = [(0.10, 3, 41.7), (0.14, 2, 29.5), (0.92, 1, 4.6), (0.98, 2, 4.3)]
"""All-reduces of 8 MB with gloo on four nodes at 400 Mbit/s. That of n2 has 40 Mbit/s."""
EVEN: list[Row] = [(0.76, 3, 43.3), (0.76, 0, 43.5), (0.76, 1, 43.3), (0.79, 2, 41.6)]
"""The same with four good links."""
STAGES: list[Row] = [(0.04, 1, 48.8), (0.09, 2, 25.0), (0.39, 3, 5.7), (0.38, 2, 4.7)]
"""Four stages of a pipeline with borders of 8, 2 and 8 MB. The link of n2 has 40 Mbit/s."""
GOOD_STAGES: list[Row] = [(0.21, 1, 48.3), (0.26, 0, 48.4), (0.26, 3, 48.5), (0.22, 2, 45.2)]
"""The same with four good links."""
SMALL: list[Row] = [(0.40, 3, 0.9), (0.32, 0, 1.2), (0.30, 1, 1.3), (0.35, 2, 1.1)]
"""All-reduces of 2 kB."""


def steady(rows: list[Row], count: int = PEER_WINDOWS, step_s: float = 2.8) -> Slowness | None:
    """Return the verdict on a job in which nothing changes."""
    watch = SlowWatch()
    for number in range(count):
        parts = {
            f"n{i}": Parts(sending=share * step_s, peer=f"n{peer}", speed=1e6 * speed)
            for i, (share, peer, speed) in enumerate(rows)
        }
        watch.saw(Window(number, step_s, parts))
    return watch.slow


def test_a_link_that_was_slow_from_the_first_step_on_is_told_after_ten_windows() -> None:
    assert steady(RING, PEER_WINDOWS - 1) is None
    ring = steady(RING)
    assert ring is not None
    assert (ring.kind, ring.node, ring.peer, ring.shift > 6) == (SlowKind.LINK, "n2", "n1", True)
    assert in_words(ring).startswith(
        "since step 0, the link between n2 and n1 carries 4.3 MB/s while data waits for it, "
        "29.5 MB/s on the other nodes: link. Check cable"
    )
    stages = steady(STAGES)
    assert stages is not None
    assert (stages.kind, {stages.node, stages.peer}) == (SlowKind.LINK, {"n2", "n3"})


def test_measured_jobs_with_good_links_have_no_slow_one() -> None:
    for rows in (EVEN, GOOD_STAGES, SMALL, RING[:3], [(*row[:2], row[2] / 10) for row in RING]):
        assert steady(rows, 3 * PEER_WINDOWS) is None


def test_a_link_that_is_slow_now_and_then_or_costs_little_is_not_told() -> None:
    watch = SlowWatch()
    for number in range(3 * PEER_WINDOWS):
        rows = EVEN if number % PEER_WINDOWS == PEER_WINDOWS - 1 else RING
        parts = {
            f"n{i}": Parts(sending=share, peer=f"n{peer}", speed=1e6 * speed)
            for i, (share, peer, speed) in enumerate(rows)
        }
        watch.saw(Window(number, 1.0, parts))
        assert watch.slow is None
    assert steady([(share / 4, peer, speed) for share, peer, speed in RING], 30) is None
    elsewhere = [(0.9, 1, 4.0), (0.8, 0, 40.0), (0.9, 3, 5.0), (0.8, 2, 40.0), (0.8, 0, 40.0)]
    assert steady(elsewhere, 30) is None, "two slow links without a common end"


def uneven(
    count: int, *, node: str = "n2", cpu: float = 1.0, usual: float = 0.5, after: int = 0
) -> Iterator[Window]:
    """Windows in which one node needs more CPU time than the others, from some window on."""
    for number in range(count):
        parts = {f"n{i}": Parts(cpu=usual) for i in range(4)}
        if number >= after:
            parts[node] = Parts(cpu=cpu)
        yield Window(number, 1.05 * cpu if number % 11 != 5 else 2 * cpu, parts)


RANKS = {f"n{i}": i for i in range(4)}


def watched(windows: Iterator[Window], *, earlier: tuple[Excess, ...] = ()) -> SlowWatch:
    """Return a watch after these windows."""
    watch = SlowWatch(ranks=RANKS, earlier=earlier)
    for window in windows:
        watch.saw(window)
    return watch


def test_a_place_that_has_more_to_compute_from_the_first_step_on_is_a_stage() -> None:
    for seed in (1, 2, PEER_WINDOWS - 1):
        assert watched(uneven(seed)).slow is None
    watch = watched(uneven(PEER_WINDOWS + 2))
    assert watch.slow is not None
    assert watch.excess == Excess("n2", 2)
    assert in_words(watch.slow).startswith(
        "since step 0, node n2 needs 1 s CPU time a step, 0.5 s on the other nodes: stage. Split"
    )
    assert watched(uneven(200)).slow is not None


def test_a_difference_that_is_small_came_later_or_costs_nothing_is_no_stage() -> None:
    for windows in (
        uneven(100, usual=0.7),
        uneven(100, after=1),
        (replace(window, step_s=1.5) for window in uneven(100)),
    ):
        watch = watched(windows)
        assert watch.excess is None
        assert watch.slow is None or watch.slow.kind is not SlowKind.STAGE


def test_cpu_times_that_are_not_reported_are_no_difference() -> None:
    """Agents that do not report the CPU time say 0, so each node has endlessly more than that."""
    for before in ((), (Excess("n2", 0),)):
        watch = watched(uneven(100, usual=0.0), earlier=before)
        assert watch.excess is None
        assert watch.slow is None


def test_the_shift_is_that_of_a_step_or_of_the_part_if_no_step_was_faster() -> None:
    changed = Slowness(SlowKind.MACHINE, "n2", 7, step_s=1.5, usual_s=1.0, part=9, others=1)
    assert changed.shift == 1.5
    steady = replace(changed, usual_s=1.5)
    assert steady.shift == 9
    assert replace(steady, others=0.0).shift > 1e6, "the others need no CPU time any more"


def test_what_stays_with_the_place_is_a_stage_and_what_stays_with_the_host_a_machine() -> None:
    place = watched(uneven(20), earlier=(Excess("n9", 2),)).slow
    assert place is not None
    assert (place.kind, place.node, place.peer) == (SlowKind.STAGE, "n2", "n9")
    assert ", as n9 did with this node rank: stage" in in_words(place)
    host = watched(uneven(20), earlier=(Excess("n2", 0),)).slow
    assert host is not None
    assert (host.kind, host.node) == (SlowKind.MACHINE, "n2")
    assert "on the other nodes, and did so with another node rank: machine" in in_words(host)
    same = watched(uneven(20), earlier=(Excess("n2", 2),)).slow
    assert same is not None
    assert same.kind is SlowKind.STAGE


def test_slowed_clocks_of_gpus_show_the_machine_though_all_nodes_use_their_cpus() -> None:
    def change(name: str, parts: Parts) -> Parts:
        return replace(parts, cpu=parts.cpu * 1.5, clocks=0.25 if name == "n3" else 0.0)

    found = judged(change, 1.5)
    assert found is not None
    assert (found.kind, found.node) == (SlowKind.MACHINE, "n3")
    text = (
        "the clocks of 25 % of the GPUs of node n3 are slowed by heat, power or a fault, 0 % before"
    )
    assert text in in_words(found)


@pytest.mark.parametrize("part", ["data", "gc", "throttled", "pressure"])
def test_one_of_two_nodes_is_named(part: str) -> None:
    found = judged(on("n1", **{part: 0.4}), 1.3, count=2)
    assert found is not None
    assert found.node == "n1"
    both = judged(on("", **{part: 0.4}), 1.3, count=2)
    assert both is not None
    assert both.node == ""


def test_six_windows_are_enough_and_five_are_not() -> None:
    assert judged(on("", cpu=0.6), 1.3, after=IN_A_ROW - 1) is None
    assert judged(on("", cpu=0.6), 1.3, after=IN_A_ROW) is not None


@pytest.mark.parametrize(("part", "more"), [("data", 0.1), ("gc", 0.1), ("cpu", 0.2)])
def test_a_tenth_is_found_if_one_node_explains_each_window(part: str, more: float) -> None:
    """The CPU time of a node is 2 s a step, of which a tenth is 0.2 s."""
    found = [judged(on("n1", **{part: more}), 1.1, seed=seed, after=8) for seed in range(40)]
    named = [one for one in found if one is not None and one.node == "n1"]
    assert len(named) >= 32
    assert not any(judged(on("", **{part: more}), 1.1, seed=seed, after=8) for seed in range(20))


def test_less_than_a_tenth_is_no_change() -> None:
    for seed in range(20):
        assert judged(on("", cpu=0.1), 1.05, seed=seed, after=40) is None


def test_one_node_whose_cpu_time_grows_alone_needs_others_to_be_a_machine() -> None:
    found = judged(on("n0", cpu=0.6), 1.3, count=1)
    assert found is not None
    assert found.kind is SlowKind.CODE


def test_a_loader_that_was_always_slower_is_found_though_nothing_changes() -> None:
    watch = SlowWatch()
    for number in range(PEER_WINDOWS):
        parts = {f"n{i}": Parts(data=0.3 if i == 2 else 0.02) for i in range(4)}
        watch.saw(Window(number, 1.0, parts))
    assert watch.slow is not None
    assert in_words(watch.slow).startswith(
        "since step 0, node n2 waits 0.3 s a step for data, 0.02 s on the other nodes: data. Check"
    )


def test_the_only_stage_of_a_pipeline_that_loads_data_is_compared_with_no_other() -> None:
    watch = SlowWatch()
    for number in range(10 * PEER_WINDOWS):
        parts = {f"n{i}": Parts(data=0.12 if i == 0 else 0.0) for i in range(4)}
        watch.saw(Window(number, 1.0, parts))
    assert watch.slow is None


def test_what_comes_and_goes_is_usual() -> None:
    watch, told = SlowWatch(), []
    for number in range(600):
        slow = number % 60 >= 52  # eight slow windows in sixty
        watch.saw(Window(number, 1.3 if slow else 1.0, {"n0": Parts()}))
        if watch.slow is not None:
            told.append(number)
    assert told, "the first time it is a change"
    assert [n for n in told if n >= 60] == []


def test_what_lasts_becomes_usual() -> None:
    watch = SlowWatch()
    for number in range(20):
        watch.saw(Window(number, 1.0, {"n0": Parts()}))
    for number in range(KEPT + FEWEST):
        watch.saw(Window(20 + number, 2.0, {"n0": Parts()}))
    assert watch.slow is None
    for number in range(10):
        watch.saw(Window(200 + number, 3.0, {"n0": Parts()}))
    assert watch.slow is not None
    assert watch.slow.usual_s == 2.0


# --- in a job ---


class Train:
    """A job that trains at one step a second until it is told otherwise."""

    def __init__(
        self, nodes: int = 3, standby: int = 0, rules: Rules | None = None, **diagnosis: Any
    ) -> None:
        """Start the job.

        Args:
            nodes: number of nodes that train.
            standby: number of further nodes.
            rules: times of the master.
            diagnosis: settings of the diagnosis.
        """
        document = job_file(nodes, standbyReplicas=standby)
        document["spec"]["diagnosis"] = diagnosis
        self.bench: Bench = running(ElasticJob.parse(document), rules)
        self.step = 0
        self.spent: dict[str, dict[str, float]] = {}
        self.cpu: dict[str, float] = {}
        """CPU seconds of a step, where they are not half a second."""

    def go(self, steps: int, step_s: float = 1.0, **data: float) -> None:
        """Train some steps; ``data`` has the seconds of a step in which a node waits for data."""
        for _ in range(steps):
            self.step += 1
            for agent in (one for one in self.bench.living() if one.running):
                spent = self.spent.setdefault(agent.node, {"run": 0.0})
                spent["run"] += step_s
                spent["cpu"] = spent.get("cpu", 0.0) + self.cpu.get(agent.node, 0.5)
                spent["data"] = spent.get("data", 0.0) + data.get(agent.node, 0.01)
                agent.reach(self.step)
                assert agent.progress is not None
                agent.progress = agent.progress.model_copy(update={"spent": dict(spent)})
            self.bench.pass_time(step_s)

    def told(self) -> list[tuple[str, str]]:
        kinds = (EventReason.SLOW, EventReason.SLOW_OVER)
        return [(e.reason, e.message) for e in self.bench.job.state.events if e.reason in kinds]

    def messages(self, reason: EventReason) -> list[str]:
        return [e.message for e in self.bench.job.state.events if e.reason == reason]

    def link(self, node: str, peer: str) -> None:
        """Make the link between two nodes slow: both report it."""
        address = {agent.node: agent.report().offer.addr for agent in self.bench.living()}
        for one, other in ((node, peer), (peer, node)):
            load = NodeLoad(sending=0.6 if one == node else 0.5, peer=address[NodeId(other)])
            self.bench.agent(one).load = load

    def condition(self) -> str:
        status = self.bench.job.status(self.bench.now, self.bench.now)
        found = {c.type: c for c in status.conditions}.get(ConditionType.SLOW)
        return "" if found is None else f"{found.status}: {found.message}"


USUAL = int(WINDOW_S) * (WARM_UP + FEWEST + 1)


def test_a_slow_loader_is_told_with_its_node_and_nothing_is_done() -> None:
    train = Train()
    train.go(USUAL)
    assert not train.condition()
    train.go(90, step_s=1.5, n1=0.5)
    ((reason, message),) = train.told()
    assert reason == EventReason.SLOW
    assert message.startswith("a step takes 1.5 s instead of 1 s (+50 %) since step 105")
    assert "; node n1 waits 0.4" in message  # a part of the first window was before
    assert " s a step for data, 0.01" in message
    assert " s before: data. Check its storage" in message
    assert train.condition().startswith("True: a step takes 1.5 s")
    assert train.bench.job.state.pending_round is None
    assert train.bench.job.state.snapshots == 1, "all ranks are looked at, once"
    train.go(10 * (OVER + 1))
    assert [reason for reason, _ in train.told()] == [EventReason.SLOW, EventReason.SLOW_OVER]
    assert train.condition() == "False: steps take the usual time"


def test_causes_that_take_turns_are_told_once() -> None:
    train = Train()
    train.go(USUAL)
    for turn in range(30):
        train.bench.agent("n2").load = NodeLoad(throttled=0.8 * (turn % 2))
        train.go(10, step_s=2.0, n1=0.0 if turn % 2 else 1.0)
    assert len(train.told()) == 1


def test_a_throttled_node_is_told() -> None:
    train = Train()
    train.go(USUAL)
    train.bench.agent("n2").load = NodeLoad(throttled=0.8)
    train.go(90, step_s=2.0)
    ((_, message),) = train.told()
    assert "; node n2 lacks CPU 80 % of the time, 0 % before: neighbour. Raise" in message


def test_a_slow_link_is_told_with_both_ends() -> None:
    train = Train()
    train.go(USUAL)
    agents = {agent.node: agent for agent in train.bench.living()}
    address = agents[NodeId("n2")].report().offer.addr
    assert len({agent.report().offer.addr for agent in agents.values()}) == 3
    agents[NodeId("n1")].load = NodeLoad(sending=0.6, peer=address)
    train.go(90, step_s=2.0)
    ((_, message),) = train.told()
    assert "; the link between n1 and n2 waits for the network " in message
    assert " s a step, 0 s before: link. Check cable" in message


def test_what_the_network_of_a_node_loses_is_told() -> None:
    for load, words in (
        (
            NodeLoad(sending=0.6, resent=0.03, network_errors=12.0),
            " a step, 0 s before; n1 sends 3.0 % of its TCP segments again and loses 12 packets a "
            "second at its interfaces: link. Check cable",
        ),
        (
            NodeLoad(resent=0.03),
            "; node n1 sends 3.0 % of its TCP segments again, 0.0 % before: link. Check cable",
        ),
    ):
        train = Train()
        train.go(USUAL)
        train.bench.agent("n1").load = load
        train.go(90, step_s=2.0)
        ((_, message),) = train.told()
        assert words in message


def test_a_link_that_was_slow_from_the_first_step_on_is_told_in_a_job() -> None:
    train = Train(nodes=4)
    address = {agent.node: agent.report().offer.addr for agent in train.bench.living()}
    for i, (share, peer, speed) in enumerate(RING):
        load = NodeLoad(
            sending=share, peer=address[NodeId(f"n{peer}")], link_bytes_s=int(1e6 * speed)
        )
        train.bench.agent(f"n{i}").load = load
    train.go(USUAL + 20)
    ((_, message),) = train.told()
    assert "the link between n2 and n1 carries 4.3 MB/s while data waits for it, 29.5" in message


def test_a_place_with_more_work_is_told_again_on_another_node() -> None:
    train = Train()
    train.cpu["n2"] = 1.0
    train.go(USUAL + 20)
    ((_, message),) = train.told()
    assert "node n2 needs 1 s CPU time a step, 0.5 s on the other nodes: stage. Split" in message
    train.bench.kill(NodeId("n2"))
    train.bench.settle()
    replacement = train.bench.job.state.world
    assert replacement is not None
    node = replacement.members[2].node
    assert node != "n2"
    train.cpu = {node: 1.0}
    train.go(USUAL + 40)
    (*_, (_, message)) = train.told()
    assert f"node {node} needs 1 s CPU time a step" in message
    assert ", as n2 did with this node rank: stage" in message


def test_nothing_is_told_if_the_job_does_not_want_it_or_does_not_measure() -> None:
    off = Train(slow="off")
    off.go(USUAL)
    off.go(60, step_s=1.5, n1=0.5)
    assert not off.told()
    plain = Train()
    for spent in plain.spent.values():
        spent.clear()
    for step in range(100):
        for agent in plain.bench.living():
            agent.reach(step)
        plain.bench.pass_time(1.0 if step < 60 else 3.0)
    assert not plain.told()


# --- the paired check ---


class Suspected(Train):
    """A job of four nodes with a standby. From some step on, n2 needs more CPU time."""

    def __init__(
        self,
        *,
        standby: int = 1,
        slow: str = "act",
        faults: str = "",
        rules: Rules | None = None,
    ) -> None:
        super().__init__(nodes=4, standby=standby, rules=rules, slow=slow)
        self.go(USUAL)
        self.cpu["n2"] = 0.8
        self.bench.agent("n2").fault = faults
        self.go(40, step_s=1.6)

    def until_checked(self) -> None:
        """Let the round end, and the checks run, until the next round trains."""
        before = self.bench.job.state.round
        for _ in range(60):
            self.go(1, step_s=1.6)
            self.bench.end_checks()
            self.bench.deliver_facts()
            if self.bench.job.state.round > before:
                return
        raise AssertionError(self.bench.job.state.reason)


def test_a_slow_machine_is_checked_in_pairs_between_two_rounds_and_left_out() -> None:
    train = Suspected(faults="slow")
    assert train.bench.job.state.pending_round is None, "it may be over soon"
    assert "It is not checked: it may be over soon" in train.condition()
    train.go(30, step_s=1.6)
    (suspected,) = train.messages(EventReason.NODES_SUSPECTED)
    assert suspected.startswith("n2 is checked with n4 and n0 and n1: a step takes 1.6 s")
    train.until_checked()
    (excluded,) = train.messages(EventReason.NODE_EXCLUDED)
    assert excluded.startswith("node n2 is slow: slow with n4, and with ")
    assert sorted(train.bench.members) == ["n0", "n1", "n3", "n4"]
    assert not train.bench.job.state.restart_count


def test_a_node_that_is_fast_with_good_nodes_stays() -> None:
    train = Suspected()
    train.go(30, step_s=1.6)
    train.until_checked()
    assert not train.messages(EventReason.NODE_EXCLUDED)
    assert len(train.bench.members) == 4
    train.go(USUAL + 90, step_s=1.0)
    assert len(train.messages(EventReason.NODES_SUSPECTED)) == 1


def test_a_new_master_goes_on_with_the_check() -> None:
    train = Suspected(faults="slow")
    train.go(30, step_s=1.6)
    assert train.bench.job.state.pending_round is not None
    train.bench.restart_master()
    train.until_checked()
    assert train.messages(EventReason.NODE_EXCLUDED)
    assert "n2" not in train.bench.members


def test_a_check_that_fails_everywhere_leaves_nobody_out_and_has_an_event() -> None:
    train = Suspected(faults="device")
    for node in ("n0", "n1", "n4"):
        train.bench.agent(node).fault = "device"
    train.go(30, step_s=1.6)
    train.until_checked()
    (void,) = train.messages(EventReason.CHECK_VOID)
    assert void.startswith("the check also fails without the suspect, so it says nothing, and n2 ")
    assert void.endswith(" are free to train: n0: broke")
    for reason in (EventReason.NODE_EXCLUDED, EventReason.NODES_CHECKED):
        assert not train.messages(reason)
    assert len(train.bench.members) == 4


def test_a_job_whose_nodes_are_checked_for_long_does_not_fail_for_lack_of_them() -> None:
    train = Suspected(faults="hang", rules=Rules(check_s=300.0, join_timeout_s=200.0))
    train.go(30, step_s=1.6)
    for _ in range(400):
        train.bench.deliver_facts()
        train.bench.exchange()
        train.bench.end_checks()
        train.bench.pass_time(2.0)
    assert not train.bench.job.state.phase.ended, train.bench.job.state.reason
    assert train.messages(EventReason.NODE_EXCLUDED)
    assert sorted(train.bench.members) == ["n0", "n1", "n3", "n4"]


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_slow_link_needs_two_members_besides_its_ends_to_be_checked(nodes: int) -> None:
    train = Train(nodes=nodes, standby=1, slow="act")
    train.go(USUAL)
    train.link("n0", "n1")
    train.go(100, step_s=2.0)
    assert train.condition().endswith(
        "It is not checked: fewer than two members to compare with, besides both ends of the link"
    )
    assert not train.messages(EventReason.NODES_SUSPECTED)


def test_a_slow_link_is_checked_without_its_other_end() -> None:
    train = Train(nodes=4, standby=1, slow="act")
    train.go(USUAL)
    train.link("n0", "n1")
    train.go(100, step_s=2.0)
    (suspected,) = train.messages(EventReason.NODES_SUSPECTED)
    assert suspected.startswith("n0 is checked with n4 and n2 and n3: ")


def test_a_new_master_waits_for_all_nodes_of_the_check() -> None:
    """Otherwise the first ones would be checked in one group of three, or alone."""
    train = Suspected(faults="slow")
    while not train.messages(EventReason.NODES_SUSPECTED):
        train.go(1, step_s=1.2)
    train.bench.restart_master()
    late = train.bench.agent("n4")
    late.cut = True
    train.go(2, step_s=1.6)
    assert not train.messages(EventReason.CHECK_STARTED)
    late.cut = False
    train.until_checked()
    (first, *_) = train.messages(EventReason.CHECK_STARTED)
    assert first == "check 1 started: n0+n1, n2+n4"


def test_a_node_is_checked_only_with_a_standby_and_if_the_job_allows_it() -> None:
    alone = Suspected(standby=0)
    alone.go(30, step_s=1.6)
    assert alone.condition().endswith("not checked: no standby is ready to take its place")
    told = Suspected(slow="tell")
    told.go(30, step_s=1.6)
    assert "not checked" not in told.condition()
    for train in (alone, told):
        assert train.bench.job.state.pending_round is None
        assert not train.messages(EventReason.NODES_SUSPECTED)


def test_the_next_check_comes_after_the_share_of_the_nodes_in_an_hour() -> None:
    train = Suspected()
    train.go(30, step_s=1.6)
    train.until_checked()
    train.cpu.clear()
    train.go(USUAL)
    train.cpu = dict.fromkeys(train.bench.members[-1:], 0.8)
    train.go(100, step_s=1.6)
    assert "the last check was too recent; the next may be in 7" in train.condition()
    assert len(train.messages(EventReason.NODES_SUSPECTED)) == 1


def test_what_is_no_machine_and_no_link_is_not_checked() -> None:
    train = Train(nodes=4, standby=1, slow="act")
    train.go(USUAL)
    train.go(90, step_s=1.5, n1=0.5)
    assert train.condition().endswith("no node is at fault for a slowness of this class")


def test_the_bundle_of_a_slow_job_has_what_each_node_spends_in_a_step() -> None:
    nodes = {
        "n0": Parts(data=0.25, cpu=0.5, resent=0.03),
        "n1": Parts(cpu=1.25, peer="n0"),
        "n2": Parts(),
    }
    assert facts(Window(step=7, step_s=1.0, nodes=nodes)) == (
        "a step takes 1 s",
        "n0: data 0.25, cpu 0.5, resent 0.03, waits 0.25",
        "n1: cpu 1.25",
        "n2: nothing that is measured",
    )
    many = {f"n{n}": Parts() for n in range(1000)}
    found = facts(Window(step=7, step_s=1.0, nodes=many), "n999")
    assert len(found) == MOST_FACTS
    assert found[1].startswith("n999: "), "the node at fault is never left out"
