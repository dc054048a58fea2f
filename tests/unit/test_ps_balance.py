"""Servers are evened by the rows that workers ask for, with few moves, and not to and fro."""

import cProfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import zmq

from dlrover_py.ps import messages as m
from dlrover_py.ps.balance import MIN_RATE, PAUSE_S, WINDOW_S, WINDOWS, BucketLoads
from dlrover_py.ps.cluster_map import AckMode, ClusterMap, Placement
from dlrover_py.ps.door import guard, guarded
from dlrover_py.ps.hashing import bucket_of, salt_of
from dlrover_py.ps.planner import Planner, PlanRules, foresee
from dlrover_py.ps.server import ParameterServer
from dlrover_py.ps.specs import TableSpec
from dlrover_py.ps.spread import led_loads, unevenness, unevenness_of
from dlrover_py.ps.wire import JobAccess, decode, send
from tests.ps_threads import TOKEN, connect

IDS = 1_000_000
ROWS = 200_000
"""Rows that workers ask for in a window."""
T = TypeVar("T")
Counts = npt.NDArray[np.int64]


def zipf(buckets: int, *, exponent: float = 1.1, table: str = "user") -> npt.NDArray[np.float64]:
    """Return the probability that a row of Zipf traffic is in each bucket."""
    chances = 1 / np.arange(1, IDS + 1, dtype=np.float64) ** exponent
    found = bucket_of(np.arange(IDS, dtype=np.int64), salt_of(table), buckets)
    return np.bincount(found, chances / chances.sum(), buckets).astype(np.float64)


def planner(servers: int, buckets: int, **rules: object) -> Planner:
    made = PlanRules(buckets=buckets, servers=servers, **rules)  # type: ignore[arg-type]
    plan = Planner(ClusterMap("j", ack=made.ack), made, 0.0)
    for index in range(servers):
        plan.heard(f"ps{index}", f"at-{index}", 0.0)
    return plan


def move_one(plan: Planner) -> bool:
    """Let the first learner get its rows; return whether there was one."""
    for bucket, one in enumerate(plan.map.placements):
        if one.learner:
            plan.synced(one.primary, bucket, one.term, one.learner)
            return True
    return False


def ratio(plan: Planner, chances: npt.NDArray[np.float64]) -> float:
    """Return the true load of the busiest server, as a multiple of the mean."""
    return unevenness_of(plan.map, chances.tolist())


def whole(plan: Planner, copies: int = 2) -> bool:
    """Return whether each bucket has its in-sync copies, on different servers."""
    members = [(one.primary, *one.backups) for one in plan.map.placements]
    return all(len(set(one)) == len(one) == copies for one in members)


def move_all(plan: Planner) -> None:
    while move_one(plan):
        pass


def holders(plan: Planner) -> set[str]:
    """Return the servers that have buckets, or are getting some."""
    return {name for one in plan.map.placements for name in one.members}


def test_a_standby_has_no_rows_until_it_takes_those_of_a_lost_server_at_once() -> None:
    plan = planner(3, 12, standbys=1)
    plan.heard("ps3", "at-3", 0.0)
    assert holders(plan) == {"ps0", "ps1", "ps2"}
    plan.lost("ps1")
    assert {one.learner for one in plan.map.placements} == {"ps3"}, "all copies are made there"
    plan.heard("ps4", "at-4", 0.0)
    move_all(plan)
    assert holders(plan) == {"ps0", "ps2", "ps3"}
    assert whole(plan)
    assert sorted(Counter(one.primary for one in plan.map.placements).values()) == [4, 4, 4]
    plan.drain("ps0")
    move_all(plan)
    assert holders(plan) == {"ps2", "ps3", "ps4"}


def test_the_number_of_servers_with_rows_follows_the_desired_one() -> None:
    plan = planner(2, 12, standbys=1)
    plan.heard("ps10", "at-10", 0.0)
    assert holders(plan) == {"ps0", "ps1"}
    plan.expect(3, least=3, standbys=1)  # the new server has not come yet
    move_all(plan)
    assert holders(plan) == {"ps0", "ps1", "ps10"}
    plan = Planner(plan.map, plan.rules, 0.0)  # of the next master
    plan.expect(2, least=2, standbys=1)
    move_all(plan)
    assert holders(plan) == {"ps0", "ps1"}, "those that came first"
    plan.expect(2, least=2)
    move_all(plan)
    assert holders(plan) == {"ps0", "ps1", "ps10"}, "without standbys, all have rows"


def test_a_server_that_comes_back_does_not_take_its_rows_from_the_standby() -> None:
    plan = planner(2, 4, standbys=1)
    plan.heard("ps2", "at-2", 0.0)
    for name in ("ps0", "ps2"):
        plan.heard(name, f"at-{name}", 10.0)
    plan.tick(10.0)
    move_all(plan)
    assert holders(plan) == {"ps0", "ps2"}
    plan.heard("ps1", "at-1", 11.0)
    assert holders(plan) == {"ps0", "ps2"}
    assert not any(one.learner for one in plan.map.placements)


def test_a_move_from_a_silent_server_holds_up_no_other_one() -> None:
    plan = planner(2, 4, replicas=1, moves=1)
    plan.heard("ps2", "at-2", 0.0)
    (moving,) = [one for one in plan.map.placements if one.learner]
    others = {"ps0", "ps1", "ps2"} - {moving.primary}
    for name in others:
        plan.heard(name, f"at-{name}", 10.0)
    plan.tick(10.0)
    (leaving,) = others - {"ps2"}
    plan.drain(leaving)
    move_all_of(plan, leaving)
    assert leaving not in holders(plan)


def move_all_of(plan: Planner, primary: str) -> None:
    """Let the learners of a server's buckets get their rows."""
    while found := [
        (bucket, one)
        for bucket, one in enumerate(plan.map.placements)
        if one.learner and one.primary == primary
    ]:
        for bucket, one in found:
            plan.synced(primary, bucket, one.term, one.learner)


def test_buckets_are_placed_when_the_least_number_of_servers_has_come() -> None:
    plan = Planner(ClusterMap("j"), PlanRules(buckets=6, servers=3, least=2), 0.0)
    plan.heard("ps0", "at-0", 0.0)
    assert not plan.map.placements
    plan.heard("ps1", "at-1", 0.0)
    assert holders(plan) == {"ps0", "ps1"}
    plan.heard("ps2", "at-2", 0.0)
    move_all(plan)
    assert sorted(Counter(one.primary for one in plan.map.placements).values()) == [2, 2, 2]


def test_a_standby_is_no_reason_to_even_the_servers() -> None:
    plan = planner(2, 4, standbys=1)
    plan.heard("ps2", "at-2", 0.0)
    assert led_loads(plan.map, [1.0] * 4) == {"ps0": 2.0, "ps1": 2.0}
    assert unevenness_of(plan.map, [1.0] * 4) == 1.0
    later = foresee(plan.map, plan.rules, [9, 1, 1, 1])
    assert {name for one in later.placements for name in one.members} == {"ps0", "ps1"}


@pytest.mark.parametrize("buckets", [64, 1024])
@pytest.mark.parametrize("ack", list(AckMode))
def test_zipf_traffic_on_eight_servers_is_evened(ack: AckMode, buckets: int) -> None:
    chances = zipf(buckets)
    plan = planner(8, buckets, ack=ack)
    assert ratio(plan, chances) > 1.5, "by number alone"
    plan.weigh([max(1, round(one * buckets * 1000)) for one in chances])
    moves = 0
    while True:
        moving = sum(bool(one.replacing) for one in plan.map.placements)
        assert moving <= plan.rules.moves
        assert whole(plan), "a bucket has fewer copies while it moves"
        if not move_one(plan):
            break
        moves += 1
    assert whole(plan)
    assert ratio(plan, chances) <= 1.10
    assert moves < buckets / 2
    copies = [sum(name in one.members for one in plan.map.placements) for name in plan.map.servers]
    assert unevenness(copies) <= 1.15


@pytest.mark.parametrize("lost", ["ps0", "ps1", "ps2"])
@pytest.mark.parametrize("ack", list(AckMode))
def test_the_loss_of_one_server_loses_no_bucket_that_moves(ack: AckMode, lost: str) -> None:
    """With ``primary``, a copy that was to lead was no copy while it caught up."""
    plan = planner(3, 16, ack=ack)
    plan.weigh([3 if one.primary == "ps0" else 1 for one in plan.map.placements])
    moving = [one.learner for one in plan.map.placements]
    assert ack is AckMode.BACKUP or any(moving)
    plan.lost(lost)
    assert not any(one.lost for one in plan.map.placements)


@pytest.mark.parametrize("ack", list(AckMode))
def test_a_copy_takes_the_lead_and_no_row_is_copied(ack: AckMode) -> None:
    plan = planner(2, 8, ack=ack)
    before = plan.map.placements
    plan.weigh([3 if one.primary == "ps0" else 1 for one in plan.map.placements])
    while move_one(plan):
        assert whole(plan)
    pairs = list(zip(before, plan.map.placements, strict=True))
    assert any(old.primary != new.primary for old, new in pairs)
    assert all(set(old.members) == set(new.members) for old, new in pairs)


def test_what_is_foreseen_happens() -> None:
    chances = zipf(256)
    plan = planner(8, 256)
    weights = [max(1, round(one * 256 * 1000)) for one in chances]
    foreseen = foresee(plan.map, plan.rules, weights)
    assert not plan.map.weights, "nothing was changed"
    plan.weigh(weights)
    while any(one.learner for one in plan.map.placements):
        plan.catch_up()
    assert [one.members for one in foreseen.placements] == [
        one.members for one in plan.map.placements
    ]


@pytest.mark.parametrize("ack", list(AckMode))
def test_most_buckets_are_not_compared_with_each_server(ack: AckMode) -> None:
    """With 16384 buckets on 32 servers, the coordinator looked ahead for 4 to 10 s."""
    buckets, profile = 4096, cProfile.Profile()
    plan = planner(32, buckets, ack=ack)
    weights = [max(1, round(one * buckets * 1000)) for one in zipf(buckets)]
    profile.enable()
    foreseen = foresee(plan.map, plan.rules, weights)
    profile.disable()
    moved = sum(
        old.members != new.members
        for old, new in zip(plan.map.placements, foreseen.placements, strict=True)
    )
    assert moved > buckets / 32
    calls = sum(one.callcount for one in profile.getstats())
    assert calls < 200 * buckets, "it was above 800"


class Traffic:
    """Servers that count the rows of workers, a planner, and the watch between them."""

    def __init__(self, plan: Planner, chances: npt.NDArray[np.float64], rows: int = ROWS) -> None:
        self.plan, self.chances, self.rows = plan, chances, rows
        self.watch = BucketLoads(0.0)
        self.random = np.random.default_rng(7)
        self.now, self.decisions = 0.0, 0

    def window(self) -> int:
        """Let a window pass; return how many buckets have got other members."""
        before = [set(one.members) for one in self.plan.map.placements]
        counts = self.random.multinomial(self.rows, self.chances).tolist()
        for server in self.plan.map.servers:
            self.watch.heard(server, enumerate(counts), self.plan.map)
        self.now += WINDOW_S
        weights = self.watch.tick(self.plan.map, self.now)
        if weights is not None:
            self.decisions += 1
            self.plan.weigh(weights)
        while move_one(self.plan):
            pass
        after = [set(one.members) for one in self.plan.map.placements]
        return sum(old != new for old, new in zip(before, after, strict=True))

    def windows(self, count: int) -> Iterator[int]:
        for _ in range(count):
            yield self.window()


def test_uneven_servers_are_evened_once_and_then_stay() -> None:
    traffic = Traffic(planner(8, 1024), zipf(1024))
    assert sum(traffic.windows(WINDOWS - 1)) == 0, "a few windows decide nothing"
    assert traffic.window() > 0
    assert ratio(traffic.plan, traffic.chances) <= 1.10
    assert sum(traffic.windows(30)) == 0, "buckets move to and fro"
    assert traffic.decisions == 1


def test_other_ids_become_hot() -> None:
    traffic = Traffic(planner(8, 1024), zipf(1024))
    list(traffic.windows(WINDOWS))
    traffic.chances = zipf(1024, table="other")
    assert ratio(traffic.plan, traffic.chances) > 1.25
    list(traffic.windows(int(PAUSE_S / WINDOW_S) + 2 * WINDOWS))
    assert ratio(traffic.plan, traffic.chances) <= 1.10
    assert sum(traffic.windows(20)) == 0


def test_a_server_that_comes_gets_its_part_of_the_load() -> None:
    chances = zipf(256)
    plan = planner(4, 256)
    plan.weigh([max(1, round(one * 256 * 1000)) for one in chances])
    while move_one(plan):
        pass
    plan.heard("ps4", "at-4", 0.0)
    while move_one(plan):
        assert whole(plan)
    assert led_loads(plan.map, chances.tolist())["ps4"] > 0.75 / 5
    assert ratio(plan, chances) <= 1.10


@pytest.mark.parametrize("rows", [0, int(MIN_RATE * WINDOW_S / 2)])
def test_few_rows_say_nothing(rows: int) -> None:
    traffic = Traffic(planner(2, 4), np.array([1.0, 0, 0, 0]), rows)
    assert sum(traffic.windows(10)) == 0
    assert traffic.watch.weights == ()


def test_even_traffic_moves_nothing() -> None:
    """Each row of a batch is asked for once: the loads of buckets differ by chance only."""
    traffic = Traffic(planner(8, 64), np.full(64, 1 / 64))
    assert sum(traffic.windows(20)) == 0
    assert traffic.decisions == 0


def test_nothing_is_decided_while_buckets_move() -> None:
    traffic = Traffic(planner(2, 16), zipf(16))
    traffic.plan.heard("ps2", "at-2", 0.0)
    assert any(one.learner for one in traffic.plan.map.placements)
    for _ in range(2 * WINDOWS):
        traffic.now += WINDOW_S
        traffic.watch.heard("ps0", ((bucket, 10_000) for bucket in range(16)), traffic.plan.map)
        assert traffic.watch.tick(traffic.plan.map, traffic.now) is None


def test_only_the_primary_of_a_bucket_counts_its_rows() -> None:
    plan = planner(2, 2)
    watch = BucketLoads(0.0)
    for server in plan.map.servers:
        watch.heard(server, [(0, 5000), (1, 15000), (-1, 9), (7, 9)], plan.map)
    watch.heard("stranger", [(0, 10**9)], plan.map)
    watch.tick(plan.map, WINDOW_S)
    assert watch.weights == (500, 1500)


def test_the_next_planner_goes_on_with_the_weights() -> None:
    """It would move all buckets back, to give each server as many."""
    chances = zipf(256)
    plan = planner(8, 256)
    plan.weigh([max(1, round(one * 256 * 1000)) for one in chances])
    while move_one(plan):
        pass
    stored = msgspec.json.decode(msgspec.json.encode(plan.map), type=ClusterMap)
    later = Planner(stored, plan.rules, 5.0)
    later.heard("ps0", "at-another-place", 6.0)
    assert later.map.placements == plan.map.placements


def test_a_server_that_leaves_gives_heavy_buckets_to_those_with_the_least_load() -> None:
    chances = zipf(256)
    plan = planner(4, 256)
    plan.weigh([max(1, round(one * 256 * 1000)) for one in chances])
    while move_one(plan):
        pass
    plan.drain("ps3")
    while move_one(plan):
        assert whole(plan)
    assert not any("ps3" in one.members for one in plan.map.placements)
    assert ratio(plan, chances) <= 1.10


def test_one_bucket_that_is_too_heavy_moves_nothing_again_and_again() -> None:
    chances = np.array([0.5] + [0.5 / 63] * 63)
    traffic = Traffic(planner(4, 64), chances)
    list(traffic.windows(WINDOWS))
    settled = traffic.plan.map.placements
    assert {one.primary for one in settled[1:]}.isdisjoint({settled[0].primary})
    assert sum(traffic.windows(30)) == 0
    assert sum(traffic.windows(330)) == 0
    assert traffic.decisions <= 7, "an hour, and the pauses grow"


def test_without_weights_an_old_map_can_be_read() -> None:
    stored = msgspec.to_builtins(replace(planner(2, 4).map))
    del stored["weights"]
    assert msgspec.convert(stored, ClusterMap).weights == ()


def test_what_a_server_refuses_is_no_load() -> None:
    """A worker asks for it again and again while buckets move: each time counted as load."""
    table, ids = TableSpec("t", 2), np.arange(100)
    places = (Placement(1, "ps0"), Placement(1, "ps1"))
    context = zmq.Context()
    guard(context, key := JobAccess("tests", "", TOKEN).key)
    coordinator = guarded(context)
    port = coordinator.bind_to_random_port("tcp://127.0.0.1")
    access = JobAccess("tests", f"tcp://127.0.0.1:{port}", TOKEN)
    server = ParameterServer(access, "ps0")
    thread = threading.Thread(target=server.run)
    thread.start()

    def heard(kind: type[T]) -> tuple[bytes, T]:
        """Return the next message of a kind from the server, and the connection."""
        while coordinator.poll(30_000):
            route, *frames = coordinator.recv_multipart()
            message, _ = decode(frames, access.key)
            if isinstance(message, kind):
                return route, message
        raise AssertionError(f"no {kind.__name__}")

    try:
        route, alive = heard(m.Alive)
        servers = {"ps0": alive.address, "ps1": "tcp://127.0.0.1:9"}
        known = ClusterMap(
            "tests", 1, tables=(table,), servers=servers, clients={"w": 1}, placements=places
        )
        send(coordinator, m.MapNews(known), [], access.key, route)
        while alive.epoch < known.epoch:  # what comes before the map is refused
            alive = heard(m.Alive)[1]
        worker = connect(context, alive.address, key)
        for seq in range(1, 4):
            for asked in (m.Pull(1, seq, (0, 1)), m.Push("w", 1, 1, seq, (0, 1))):
                grads = [np.ones((100, 2), np.float32)] if isinstance(asked, m.Push) else []
                send(worker, asked, [("t", [ids, *grads])], access.key)
        counted: Counter[int] = Counter()
        led = int((bucket_of(ids, salt_of("t"), 2) == 0).sum())
        while counted[0] < 6 * led:
            counted.update(dict(heard(m.Load)[1].bucket_rows))
        assert counted == {0: 6 * led}
    finally:
        server.stop()
        thread.join()
        server.close()
        context.destroy(linger=0)


def test_second_copies_stay_if_all_servers_are_silent_at_once() -> None:
    """The program that plans may be cut off: the servers hear each other, and serve workers."""
    plan = planner(servers=3, buckets=6)
    before = [(one.primary, one.backups) for one in plan.map.placements]
    plan.tick(plan.rules.silence_s + 0.1)
    assert [(one.primary, one.backups) for one in plan.map.placements] == before
    plan.heard("ps0", "at-0", 4.0)
    plan.heard("ps1", "at-1", 4.0)
    plan.tick(4.0 + plan.rules.silence_s)
    assert set(plan.map.servers) == {"ps0", "ps1", "ps2"}
    plan.heard("ps0", "at-0", 7.1)
    plan.heard("ps1", "at-1", 7.1)
    plan.tick(7.2)
    assert set(plan.map.servers) == {"ps0", "ps1"}, "it has only the usual time after others came"
    plan.tick(20.0)
    plan.tick(20.1 + plan.rules.return_s)
    assert not plan.map.servers, "none has come back"


def test_a_late_message_of_a_server_that_has_ended_does_not_bring_it_back() -> None:
    plan = planner(servers=2, buckets=4)
    plan.lost("ps0")
    plan.heard("ps0", "at-0", 0.1)
    assert set(plan.map.servers) == {"ps1"}
    plan.heard("ps2", "at-2", 0.2)
    assert all(one.learner == "ps2" for one in plan.map.placements)
