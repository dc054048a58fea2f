"""A coordinator that starts again goes on with the map, at the same address."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from dlrover_py.protocol.errors import ConfigError, SupersededError, TransientError
from dlrover_py.ps import messages as m
from dlrover_py.ps import specs
from dlrover_py.ps.cluster_map import ClusterMap, CutPlace
from dlrover_py.ps.coordinator import CHECK_S, DOUBT_S, Coordinator
from dlrover_py.ps.map_store import MapFile
from dlrover_py.ps.planner import Planner, PlanRules
from dlrover_py.ps.server import ParameterServer
from dlrover_py.ps.specs import Consistency, ConsistencyKind
from dlrover_py.ps.wire import decode, send
from tests.ps_threads import connect

RULES = PlanRules(buckets=4, servers=2, silence_s=60)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        yield made


@contextmanager
def coordinator(folder: Path, listener: socket.socket) -> Iterator[Coordinator]:
    made = Coordinator(
        "job", "token", MapFile(folder / "map.json"), RULES, time.monotonic(), listener=listener
    )
    try:
        yield made
    finally:
        made.close()


@contextmanager
def program(access: Any) -> Iterator[Any]:
    """Connect as a server or a worker; yield a call that sends a message and returns the map."""
    context = zmq.Context()
    dealer = connect(context, access.address, access.key)

    def ask(by: Coordinator, message: Any, now: float | None = None) -> ClusterMap:
        again = 0.0
        deadline = time.monotonic() + 30
        while (real := time.monotonic()) < deadline:
            if again <= real:  # the one before it may have got the message
                again = real + 1.0
                send(dealer, message, [], access.key)
            by.receive(real if now is None else now)
            by.tick(real if now is None else now)
            if dealer.poll(20):
                answer, _ = decode(dealer.recv_multipart(), access.key)
                assert isinstance(answer, m.MapNews)
                return answer.map
        raise AssertionError("there was no answer")

    try:
        yield ask
    finally:
        context.destroy(linger=0)


def serve_turns(made: Coordinator, now: float, seconds: float) -> float:
    """Let a coordinator serve for some seconds; return the time afterwards."""
    for _ in range(int(seconds / 0.5)):
        now += 0.5
        made.receive(now)
        made.tick(now)
    return now


@pytest.mark.parametrize("damaged", [b"", b"{}", b'{"job": "\x80"}'])
def test_a_damaged_map_is_refused(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "map.json").write_bytes(damaged)
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as listener,
        pytest.raises(ConfigError, match="expected the map of job job"),
        coordinator(tmp_path, listener),
    ):
        pass


def test_the_next_coordinator_is_reached_by_the_same_connection(
    tmp_path: Path, listener: socket.socket
) -> None:
    with coordinator(tmp_path, listener) as first, program(first.access) as ask:
        assert ask(first, m.JoinClient("w", "call")).clients == {"w": 1}
        first.close()
        with coordinator(tmp_path, listener) as second:
            assert second.access == first.access
            assert ask(second, m.WatchMap(-1)).clients == {"w": 1}


def test_what_was_being_saved_is_given_up_by_a_newer_map(
    tmp_path: Path, listener: socket.socket
) -> None:
    stored = ClusterMap("job", 7, cut=CutPlace("/d", "step-1.0", 1))
    (tmp_path / "map.json").write_bytes(msgspec.json.encode(stored))
    with coordinator(tmp_path, listener) as made, program(made.access) as ask:
        known = ask(made, m.WatchMap(7))
        assert known == replace(stored, epoch=8, cut=None)
        stored_now = msgspec.json.decode((tmp_path / "map.json").read_bytes(), type=ClusterMap)
        assert stored_now == known


def test_servers_that_do_not_exist_are_lost_and_not_heard(
    tmp_path: Path, listener: socket.socket
) -> None:
    with coordinator(tmp_path, listener) as made, program(made.access) as ask:
        for name in ("ps0", "ps1"):
            known = ask(made, m.Alive(name, f"tcp://{name}", -1))
        assert {one.primary for one in known.placements} == {"ps0", "ps1"}
        made.present(frozenset({"ps1", "ps2"}), 2)
        known = made.planner.map
        assert known.servers.keys() == {"ps1"}
        assert {one.members for one in known.placements} == {("ps1",)}
        made.present(frozenset({"ps2"}), 2)
        assert all(one.lost for one in made.planner.map.placements)
        ask(made, m.Alive("ps1", "tcp://ps1", -1))  # it arrives late; an older map is the answer
        while "w" not in (known := ask(made, m.JoinClient("w", "call"))).clients:
            pass
        assert known.servers == {}


def test_a_draining_server_is_known_to_the_next_coordinator() -> None:
    before = Planner(ClusterMap("job"), replace(RULES, servers=3), 0.0)
    for name in ("a", "b", "c"):
        before.heard(name, name, 0.0)
    before.drain("b")
    stored = msgspec.json.decode(msgspec.json.encode(before.map), type=ClusterMap)
    after = Planner(stored, replace(RULES, servers=3), 1.0)
    assert after.draining == {"b"}
    while moving := [(i, one) for i, one in enumerate(after.map.placements) if one.learner]:
        for bucket, one in moving:
            assert one.learner != "b"
            after.synced(one.primary, bucket, one.term, one.learner)
    assert not any("b" in one.members for one in after.map.placements)
    after.lost("b")
    assert after.draining == frozenset()


def test_a_map_that_cannot_be_stored_is_sent_to_nobody(
    tmp_path: Path, listener: socket.socket
) -> None:
    with coordinator(tmp_path, listener) as made, program(made.access) as ask:
        assert ask(made, m.WatchMap(-1)).epoch == 0
        (tmp_path / "map.new").mkdir()
        with pytest.raises(TransientError, match="Is a directory"):
            ask(made, m.JoinClient("w", "call"))
        made.receive(time.monotonic())
        with pytest.raises(TransientError, match="Is a directory"):
            made.tick(time.monotonic())
        (tmp_path / "map.new").rmdir()
        assert ask(made, m.WatchMap(-1)).clients == {"w": 1}


def test_buckets_are_placed_when_as_many_servers_have_come_as_are_desired_now() -> None:
    made = Planner(ClusterMap("job"), replace(RULES, servers=3), 0.0)
    made.heard("ps0", "tcp://a", 0.0)
    assert not made.map.placements
    made.expect(1)  # the user wants fewer
    assert [one.members for one in made.map.placements] == [("ps0",)] * RULES.buckets
    made.heard("ps1", "tcp://b", 0.0)  # and then more: each bucket gets its second copy
    assert all(one.learner == "ps1" for one in made.map.placements)


def test_whoever_leaves_hears_each_time_that_there_is_a_coordinator(
    tmp_path: Path, listener: socket.socket
) -> None:
    with coordinator(tmp_path, listener) as made, program(made.access) as ask:
        ask(made, m.Alive("ps0", "tcp://a", 0))
        first = ask(made, m.Drain("ps0"))
        assert first.draining == ("ps0",)
        assert ask(made, m.Drain("ps0")) == first


@contextmanager
def serving(access: Any, name: str) -> Iterator[tuple[ParameterServer, "Future[bool]"]]:
    """Run a server in a thread; yield it, and what its run returns."""
    server = ParameterServer(access, name, alone_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(server.run)
        try:
            yield server, ran
        finally:
            server.stop()
            wait([ran], 30)
            server.close()


def serve_until(made: Coordinator, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        made.socket.poll(20)
        made.receive(time.monotonic())
        made.tick(time.monotonic())
        assert time.monotonic() < deadline


def test_a_server_that_leaves_an_ended_job_does_not_wait_for_a_coordinator(
    tmp_path: Path, listener: socket.socket
) -> None:
    """Nobody takes the rows, and its Pod must not stay for its whole grace."""
    with coordinator(tmp_path, listener) as made:
        made.planner.expect(1)
        with serving(made.access, "ps0") as (server, ran):
            serve_until(made, lambda: server.has_buckets)
            made.end()
            server.leave()
            serve_until(made, ran.done)
            assert ran.result() is False, "rows are left"


def test_a_server_that_leaves_waits_for_the_next_coordinator_with_its_rows(
    tmp_path: Path, listener: socket.socket
) -> None:
    with coordinator(tmp_path, listener) as made:
        made.planner.expect(1)
        access = made.access
        with serving(access, "ps0") as (server, ran):
            serve_until(made, lambda: server.has_buckets)
            server.leave()
            serve_until(made, lambda: bool(made.planner.map.draining))
            made.close()
            assert not wait([ran], 1.0).done, "it has the only copy"
            with coordinator(tmp_path, listener) as second, serving(access, "ps1"):
                serve_until(second, ran.done)
                assert ran.result() is True
                assert {one.members for one in second.planner.map.placements} == {("ps1",)}


def test_one_who_could_not_be_heard_was_not_silent(tmp_path: Path, listener: socket.socket) -> None:
    """The API server has not answered for 5 s. The words of all workers and servers wait."""
    rules, at = PlanRules(buckets=2, servers=1, silence_s=3.0), 100.0
    context = zmq.Context()
    with closing(
        Coordinator("job", "t", MapFile(tmp_path / "map"), rules, at, listener=listener)
    ) as made:
        dealers = {}
        for name in ("a", "b", "c", "ps0"):
            dealers[name] = connect(context, made.access.address, made.access.key)

        def say(name: str, message: Any, now: float) -> None:
            send(dealers[name], message, [], made.access.key)
            assert made.socket.poll(30_000)
            made.receive(now)

        def stepped(name: str, step: int, now: float) -> None:
            known = made.planner.map
            ended = known.steps.generation, step
            word = m.Stepped(name, known.clients[name], known.epoch, ended, 3)
            say(name, word, now)

        try:
            say("ps0", m.Alive("ps0", "tcp://ps0", 0), at)
            made.planner.use(Consistency(ConsistencyKind.SYNC, silence_s=5.0))
            for name in ("a", "b", "c"):
                say(name, m.JoinClient(name, "call"), at)
            for name in ("a", "b", "c"):
                stepped(name, 0, at)
            made.tick(at)
            assert made.planner.map.steps.members.keys() == {"a", "b", "c"}
            at += 5.2
            stepped("a", 1, at)
            made.tick(at)
            assert made.planner.map.steps.members.keys() == {"a", "b", "c"}
            assert made.planner.map.servers.keys() == {"ps0"}
            stepped("b", 1, at)
            stepped("c", 1, at)
            made.tick(at)
            assert made.planner.map.steps.done == 1
            for _ in range(20):  # it listens all the time
                at += 0.5
                made.tick(at)
            assert not made.planner.map.steps.members
            assert not made.planner.map.servers
        finally:
            context.destroy(linger=0)


def test_all_messages_are_heard_while_the_map_cannot_be_stored(
    tmp_path: Path, listener: socket.socket
) -> None:
    with coordinator(tmp_path, listener) as made, program(made.access) as ask:
        ask(made, m.WatchMap(-1))
        (tmp_path / "map.new").mkdir()
        context = zmq.Context()
        dealer = connect(context, made.access.address, made.access.key)
        for name in "abc":
            send(dealer, m.JoinClient(name, "call"), [], made.access.key)
        deadline = time.monotonic() + 30
        while made.planner.map.clients.keys() != set("abc") and time.monotonic() < deadline:
            made.socket.poll(20)
            made.receive(time.monotonic())
        context.destroy(linger=0)
        assert made.planner.map.clients.keys() == set("abc")


def test_a_server_with_a_newer_map_is_refused(tmp_path: Path, listener: socket.socket) -> None:
    """The stored map was deleted while there was no coordinator: the rows belong to another one."""
    with coordinator(tmp_path, listener) as made:
        context = zmq.Context()
        dealer = connect(context, made.access.address, made.access.key)
        try:
            send(dealer, m.Alive("ps0", "tcp://ps0", 57), [], made.access.key)
            assert made.socket.poll(30_000)
            made.receive(time.monotonic())
            assert dealer.poll(30_000)
            answer, _ = decode(dealer.recv_multipart(), made.access.key)
            assert isinstance(answer, m.CoordinatorRefusal)
            assert "the stored map was lost" in answer.words
            assert not made.planner.map.servers
        finally:
            context.destroy(linger=0)


def test_a_worker_that_missed_the_end_of_a_step_gets_it_with_its_next_word(
    tmp_path: Path, listener: socket.socket
) -> None:
    """The news goes to the connections of that moment. A worker may have made another one."""
    with coordinator(tmp_path, listener) as made:
        made.planner.use(specs.sync(silence_s=60.0))
        incarnation = made.planner.join("w", "call")
        word = m.Stepped("w", incarnation, made.planner.map.epoch, (0, 0), 1)
        with program(made.access) as ask:
            known = ask(made, word)
            assert known.steps.members == {"w": incarnation}
            ended = replace(word, epoch=known.epoch, step=(1, 1))
            assert ask(made, ended).steps.done == 1
        with program(made.access) as ask:
            assert ask(made, ended).steps.done == 1


def test_who_cannot_reach_the_next_coordinator_at_once_is_not_taken_for_dead(
    tmp_path: Path, listener: socket.socket
) -> None:
    """In a cluster, programs reach a new master one after the other, seconds after its start."""
    rules = replace(RULES, silence_s=3.0)
    before = Planner(ClusterMap("job"), rules, 0.0)
    before.use(specs.sync(silence_s=5.0))
    for name in ("ps0", "ps1"):
        before.heard(name, f"tcp://{name}", 0.0)
    members = {name: before.join(name, "call") for name in ("a", "b")}
    before.step(replace(before.map.steps, generation=1, members=members), ())
    (tmp_path / "map").write_bytes(msgspec.json.encode(before.map))

    context = zmq.Context()
    with closing(
        Coordinator("job", "t", MapFile(tmp_path / "map"), rules, 100.0, listener=listener)
    ) as made:
        dealer = connect(context, made.access.address, made.access.key)
        try:
            now = serve_turns(made, 100.0, 60.0)  # nobody can reach it yet
            send(dealer, m.Alive("ps0", "tcp://ps0", 0), [], made.access.key)
            send(dealer, m.Stepped("a", members["a"], 0, (1, 0), 2), [], made.access.key)
            assert made.socket.poll(30_000)
            now = serve_turns(made, now, 2.0)
            send(dealer, m.Alive("ps0", "tcp://ps0", 0), [], made.access.key)
            made.socket.poll(30_000)
            now = serve_turns(made, now, 2.5)
            known = made.planner.map
            assert known.placements == before.map.placements
            assert known.servers.keys() == {"ps0", "ps1"}
            assert known.steps.members == members
            serve_turns(made, now, 30.0)
            assert not made.planner.map.servers
            assert not made.planner.map.steps.members
        finally:
            context.destroy(linger=0)


class SharedStore:
    """The document of several coordinators. The one that has read it last may write it."""

    name, step_buckets = "a shared store", 2

    def __init__(self, place: list[bytes], readers: list["SharedStore"]) -> None:
        self.place, self.readers, self.reached = place, readers, True

    def read(self) -> bytes | None:
        self.readers.append(self)
        return self.place[-1] if self.place else None

    def check(self) -> bool:
        if not self.reached:
            raise TransientError("no answer")
        if self.readers[-1] is not self:
            raise SupersededError("another coordinator owns it")
        return bool(self.place)

    def write(self, document: bytes) -> None:
        self.check()
        self.place.append(document)


def test_a_coordinator_that_does_not_reach_its_store_lets_others_find_the_next_one(
    listener: socket.socket,
) -> None:
    """Its master cannot reach the API server, but servers and workers can reach its Pod."""
    place, readers = list[bytes](), list[SharedStore]()
    old, new = SharedStore(place, readers), SharedStore(place, readers)
    now = 100.0
    with closing(Coordinator("job", "t", old, RULES, now, listener=listener)) as first:
        serve_turns(first, now, 1)
        with program(first.access) as ask:
            assert ask(first, m.JoinClient("w", "call"), now).clients == {"w": 1}
            old.reached = False
            now = serve_turns(first, now, CHECK_S - 1)
            assert not first.socket.closed
            with pytest.raises(TransientError):
                serve_turns(first, now, 2)
            with pytest.raises(TransientError):
                first.tick(now + DOUBT_S)
            assert first.socket.closed
            with closing(Coordinator("job", "t", new, RULES, now, listener=listener)) as second:
                assert ask(second, m.WatchMap(-1)).clients == {"w": 1}
            old.reached = True
            with pytest.raises(SupersededError):
                first.tick(now + DOUBT_S)


def test_a_coordinator_that_reaches_its_store_again_takes_connections_again(
    listener: socket.socket,
) -> None:
    store = SharedStore([], [])
    rules, now = replace(RULES, silence_s=3.0), 100.0
    with (
        closing(Coordinator("job", "t", store, rules, now, listener=listener)) as made,
        program(made.access) as ask,
    ):
        ask(made, m.Alive("ps0", "tcp://ps0", -1), now)
        store.reached = False
        with pytest.raises(TransientError):
            made.tick(now + DOUBT_S + 1)
        assert made.socket.closed
        now += DOUBT_S + 1
        for _ in range(1000):  # as the master's loop does, 50 s long
            now += 0.05
            made.receive(now)
            with suppress(TransientError):
                made.tick(now)
        assert made.planner.map.servers.keys() == {"ps0"}, "nobody could speak"
        store.reached = True
        now = serve_turns(made, now, 20)
        assert made.planner.map.servers.keys() == {"ps0"}, "it has not been able to speak"
        assert ask(made, m.WatchMap(-1), now).servers.keys() == {"ps0"}


def test_steps_are_refused_if_each_would_write_too_large_a_map(listener: socket.socket) -> None:
    store, context = SharedStore([], []), zmq.Context()
    with closing(Coordinator("job", "t", store, RULES, 100.0, listener=listener)) as made:
        dealer = connect(context, made.access.address, made.access.key)
        try:
            send(dealer, m.UseConsistency(specs.sync()), [], made.access.key)
            assert made.socket.poll(30_000)
            made.receive(100.0)
            assert dealer.poll(30_000)
            answer, _ = decode(dealer.recv_multipart(), made.access.key)
            assert isinstance(answer, m.CoordinatorRefusal)
            assert "have 4 buckets: expected at most 2 with ps.sync()" in answer.words
            assert made.planner.map.steps.consistency is None
        finally:
            context.destroy(linger=0)


def test_what_servers_count_moves_buckets(tmp_path: Path, listener: socket.socket) -> None:
    """One of two servers leads both buckets that workers ask for."""
    with coordinator(tmp_path, listener) as made, program(made.access) as ask:
        for name in ("ps0", "ps1"):
            known = ask(made, m.Alive(name, f"tcp://{name}", -1))
        busy = [i for i, one in enumerate(known.placements) if one.primary == "ps0"]
        assert len(busy) == 2
        context = zmq.Context()
        dealer = connect(context, made.access.address, made.access.key)
        now = time.monotonic()
        try:
            for _ in range(20):
                rows = tuple((bucket, 5000) for bucket in busy)
                for name, counts in (("ps0", rows), ("ps1", ())):
                    load = m.Load(name, 1, 1, 1.0, 1.0, 0, counts)
                    send(dealer, load, [], made.access.key)
                assert made.socket.poll(30_000)
                now = serve_turns(made, now, 2.0)
        finally:
            context.destroy(linger=0)
        after = made.planner.map
        assert len(set(after.weights)) > 1
        assert {after.placements[bucket].primary for bucket in busy} == {"ps0", "ps1"}
        stored = msgspec.json.decode((tmp_path / "map.json").read_bytes(), type=ClusterMap)
        assert stored.weights == after.weights


def test_a_request_to_even_servers_is_answered_once(
    tmp_path: Path, listener: socket.socket
) -> None:
    with coordinator(tmp_path, listener) as made, program(made.access) as ask:
        for name in ("ps0", "ps1"):
            known = ask(made, m.Alive(name, f"tcp://{name}", -1))
        led = [i for i, one in enumerate(known.placements) if one.primary == "ps0"]
        made.rebalance("one")
        now = serve_turns(made, time.monotonic(), 1.0)
        assert made.rebalanced is None, "nothing was measured yet"
        made.bucket_loads.heard("ps0", ((bucket, 5000) for bucket in led), known)
        now = serve_turns(made, now, 10.0)
        assert made.rebalanced == (
            "one",
            "the busiest server has 2.00 times the mean load, and will have 1.00: 1 bucket will be "
            "led by other servers, 0 will be copied",
        )
        after = made.planner.map
        assert {after.placements[bucket].primary for bucket in led} == {"ps0", "ps1"}
        made.rebalance("one")
        now = serve_turns(made, now, 1.0)
        assert made.planner.map == after
        made.rebalance("two")
        now = serve_turns(made, now, 1.0)
        assert made.rebalanced == (
            "two",
            "nothing moves: the busiest server has 1.00 times the mean load",
        )
        made.close()
    with coordinator(tmp_path, listener) as second, program(second.access) as ask:
        second.rebalance("two")
        assert second.rebalanced == ("two", "an earlier master has answered this request")
        second.rebalance("three")
        assert ask(second, m.WatchMap(-1)).weights == after.weights
        serve_turns(second, time.monotonic(), 11.0)
        assert second.rebalanced is not None
        assert "too few rows" in second.rebalanced[1]
        assert second.planner.map.rebalanced == "three"
