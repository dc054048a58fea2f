"""Each acknowledged push is kept once, whatever happens to servers, messages and the coordinator.

Servers, two workers and a planner, over a network that loses, repeats and reorders messages. The
model is a single table: every push of a worker, added up. A server is only killed while each bucket
that it leads has a running in-sync backup, so no bucket may be lost. Workers without an open push
may save the table, or go back to what they saved last; the model does the same.
"""

import inspect
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from dlrover_py.ps import bucket_copies, planner, replication, specs
from dlrover_py.ps import messages as m
from dlrover_py.ps.cluster_map import AckMode, ClusterMap, CutPlace
from dlrover_py.ps.hashing import bucket_of, salt_of
from dlrover_py.ps.session import PendingRequests
from dlrover_py.ps.specs import TableSpec
from dlrover_py.ps.store import Store
from tests.ps_rows import copied

BUCKETS = 3
TABLE = TableSpec("t", 1, specs.sgd(1.0), specs.uniform(0.0, 0.0))
IDS = np.arange(12, dtype=np.int64)
BUCKET_OF = bucket_of(IDS, salt_of("t"), BUCKETS).tolist()
CLIENTS = ("a", "b")
COORDINATOR = "coordinator"
ROW_BYTES = 8 + 4 + 8
"""Bytes of a row in a copy: id, value and steps."""
PART_BYTES = st.sampled_from([1, 2 * ROW_BYTES, 1 << 20])


@dataclass
class Client:
    """A worker: it pushes 1 for some ids, and waits for all acknowledgements."""

    name: str
    incarnation: int
    requests: PendingRequests = field(default_factory=PendingRequests)
    seq: int = 0
    ids: tuple[int, ...] = ()
    old: list[tuple[str, m.Push, Any]] = field(default_factory=list)


Packet = tuple[str, str, Any, Any]
"""Sender, receiver, message and payload."""


class PsMachine(RuleBasedStateMachine):
    """Servers, workers, a planner, and the network between them."""

    replication: Any = replication
    planner: Any = planner
    workers: tuple[str, ...] = CLIENTS

    @initialize(
        servers=st.integers(2, 4),
        replicas=st.sampled_from([2, 2, 1]),
        ack=st.sampled_from([AckMode.BACKUP, AckMode.BACKUP, AckMode.PRIMARY]),
        part_bytes=PART_BYTES,
    )
    def begin(self, servers: int, replicas: int, ack: AckMode, part_bytes: int) -> None:
        self.part_bytes = part_bytes
        self.wanted = self.planner.PlanRules(
            buckets=BUCKETS, servers=servers, replicas=replicas, ack=ack, moves=2, return_s=3.0
        )
        self.may_kill = replicas == 2 and ack is AckMode.BACKUP
        self.now = 0.0
        self.network: list[Packet] = []
        self.servers: dict[str, Any] = {}
        self.data: dict[str, Store] = {}
        self.addresses: dict[str, str] = {}
        self.dead: set[str] = set()
        self.leaving: set[str] = set()
        self.plan = self.planner.Planner(ClusterMap("job", ack=ack), self.wanted, self.now)
        self.plan.create_table(TABLE)
        self.epoch = 0
        self.clients: dict[str, Any] = {
            name: Client(name, self.plan.join(name, "call")) for name in self.workers
        }
        self.expected = np.zeros(len(IDS))
        self.acknowledged: dict[tuple[int, str], tuple[int, int]] = {}
        """The last acknowledged push of each bucket and worker."""
        self.cuts = 0
        self.parts: dict[int, Any] = {}
        """The buckets of the cut that is being written: numbers of pushes, and rows."""
        self.saved: tuple[CutPlace, dict[int, Any], Any] | None = None
        """The last cut, with the model at that time."""
        for _ in range(servers):
            self.start_server()
        self.deliver_all()

    # --- The network ---

    def start_server(self) -> None:
        name = f"s{len(self.addresses)}"
        self.addresses[name] = f"at-{name}"
        self.data[name] = Store(BUCKETS)
        self.servers[name] = self.replication.Replica(
            name, self.data[name], copies=2, part_bytes=self.part_bytes
        )
        self.say_alive(name)

    def say_alive(self, name: str) -> None:
        replica = self.servers[name]
        epoch = replica.map.epoch if replica.map else 0
        ready, loaded = tuple(replica.synced()), tuple(replica.loaded())
        alive = m.Alive(name, self.addresses[name], epoch, ready, loaded)
        self.network.append((name, COORDINATOR, alive, None))

    def flush(self, name: str) -> None:
        for one in self.servers[name].take():
            to = one.to if isinstance(one.to, str) else one.to.decode()
            self.network.append((name, to, one.message, one.payload))

    def publish(self) -> None:
        """Send the map to all, if it is new. The test's planner stores it by keeping it."""
        if self.plan.map.epoch > self.epoch:
            self.epoch = self.plan.map.epoch
            news = m.MapNews(self.plan.map)
            for name in (*self.servers, *self.clients):
                self.network.append((COORDINATOR, name, news, None))

    def deliver(self, packet: Packet) -> None:
        sender, to, message, payload = packet
        if to == COORDINATOR:
            self.at_coordinator(message)
        elif to in self.clients:
            self.at_client(self.clients[to], message)
        elif to in self.servers:
            self.at_server(self.servers[to], sender, message, payload)
            self.flush(to)
        self.publish()

    def at_coordinator(self, message: m.Alive) -> None:
        if message.server in self.dead:
            return
        self.plan.heard(message.server, message.address, self.now)
        for bucket, term, learner in message.synced:
            self.plan.synced(message.server, bucket, term, learner)
        for bucket, term in message.loaded:
            self.plan.loaded(message.server, bucket, term)
        if message.epoch < self.plan.map.epoch:
            self.network.append((COORDINATOR, message.server, m.MapNews(self.plan.map), None))

    def at_server(self, replica: Any, sender: str, message: Any, payload: Any) -> None:
        match message:
            case m.MapNews():
                replica.on_map(message.map, self.now)
            case m.Push():
                replica.on_push(sender.encode(), message, payload, self.now)
            case m.Replicate():
                replica.on_replicate(message, payload)
            case m.BucketCopy():
                replica.on_copy(message, payload)
            case m.PartsTaken():
                replica.on_parts_taken(message, self.now)
            case m.Compare():
                replica.on_compare(message)
            case m.Held():
                replica.on_held(message, self.now)
            case m.Lacking():
                replica.on_lacking(message, self.now)

    def at_client(self, client: Client, message: Any) -> None:
        match message:
            case m.MapNews():
                self.send_parts(client, client.requests.on_map(message.map, self.now))
            case m.Pushed():
                for bucket in client.requests.answered(message.seq, message.buckets):
                    self.acknowledged[bucket, client.name] = (client.incarnation, client.seq)
            case m.RefusedRequest():
                assert message.reason is m.RefusalReason.MOVED, message
                client.requests.refused(message.seq, message.buckets, self.now)

    def send_parts(self, client: Client, parts: Any) -> None:
        for part in parts:
            ids = IDS[[one for one in client.ids if BUCKET_OF[one] in part.buckets]]
            payload = [("t", [ids, np.full((len(ids), 1), -1, np.float32)])]
            assert client.requests.map is not None
            push = m.Push(
                client.name, client.incarnation, client.requests.map.epoch, part.seq, part.buckets
            )
            self.network.append((client.name, part.server, push, payload))
            client.old.append((part.server, push, payload))

    def deliver_all(self) -> None:
        """Deliver what is on its way in order, and what follows from it."""
        for _ in range(2000):
            if not self.network:
                return
            self.deliver(self.network.pop(0))
        pytest.fail("the servers never stop sending")

    def idle(self) -> bool:
        """Return whether no push is on its way."""
        return not any(len(one.requests) for one in self.clients.values())

    # --- What happens ---

    @rule(picks=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=30))
    def deliver_some(self, picks: list[tuple[int, int]]) -> None:
        for index, fate in picks:
            if not self.network:
                return
            packet = self.network[index % len(self.network)]
            if fate != 1:
                self.network.pop(index % len(self.network))
            if fate != 0:
                self.deliver(packet)

    @rule(count=st.integers(1, 60))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.network))):
            self.deliver(self.network.pop(0))

    @rule(name=st.sampled_from(CLIENTS), ids=st.sets(st.sampled_from(range(len(IDS))), min_size=1))
    def push(self, name: str, ids: set[int]) -> None:
        client, known = self.clients[name], self.clients[name].requests.map
        if len(client.requests) or self.plan.map.cut is not None:
            return
        if known is None or known.epoch < self.plan.map.restored:  # it waits for that map
            return
        client.seq += 1
        client.ids = tuple(sorted(ids))
        for one in ids:
            self.expected[one] += 1
        buckets = sorted({BUCKET_OF[one] for one in ids})
        self.send_parts(client, client.requests.start(client.seq, buckets, self.now))

    @rule(name=st.sampled_from(CLIENTS), index=st.integers(0, 20))
    def an_old_push_arrives_again(self, name: str, index: int) -> None:
        old = self.clients[name].old
        if old:
            server, push, payload = old[index % len(old)]
            self.network.append((name, server, push, payload))

    @rule(passed=st.sampled_from([0.1, 0.6, 1.1]), alive=st.booleans())
    def time_passes(self, passed: float, alive: bool) -> None:
        self.now += passed
        for name in list(self.servers):
            self.servers[name].tick(self.now)
            self.flush(name)
            if alive:
                self.say_alive(name)
        for client in self.clients.values():
            self.send_parts(client, client.requests.due(self.now))
            if alive:  # a worker asks for the map as often
                self.network.append((COORDINATOR, client.name, m.MapNews(self.plan.map), None))

    @rule()
    def a_server_comes(self) -> None:
        if len(self.servers) < 5:
            self.start_server()

    @rule(index=st.integers(0, 9))
    def a_server_dies(self, index: int) -> None:
        name = sorted(self.servers)[index % len(self.servers)]
        if len(self.servers) == 1:
            return
        for one in self.plan.map.placements:
            if one.loading and self.may_kill:
                continue
            alive = [backup for backup in one.backups if backup in self.servers]
            if not self.may_kill or (one.primary == name and not alive):
                return
            if one.primary not in self.servers and name in alive:
                return
        del self.servers[name], self.data[name]
        self.dead.add(name)
        self.plan.lost(name)
        self.publish()

    @rule(index=st.integers(0, 9))
    def a_server_is_taken_for_lost(self, index: int) -> None:
        name = sorted(self.servers)[index % len(self.servers)]
        if not self.may_kill:
            return
        self.now += self.wanted.silence_s + 1
        for other in self.servers:
            if other != name and other in self.plan.map.servers:
                self.plan.heard(other, self.addresses[other], self.now)
        self.plan.tick(self.now)
        self.publish()

    @rule(index=st.integers(0, 9))
    def a_server_drains(self, index: int) -> None:
        name = sorted(self.servers)[index % len(self.servers)]
        if len(self.servers) - len(self.plan.draining) > 2:
            self.plan.drain(name)
            self.publish()

    @rule()
    def the_coordinator_starts_again(self) -> None:
        self.plan = self.planner.Planner(self.plan.map, self.wanted, self.now)

    # --- What must be true ---

    @invariant()
    def what_is_acknowledged_is_on_all_in_sync_copies(self) -> None:
        if self.wanted.ack is AckMode.PRIMARY:
            return
        for (bucket, name), number in self.acknowledged.items():
            placement = self.plan.map.placements[bucket]
            for server in (placement.primary, *placement.backups):
                if server in self.servers:
                    held = self.servers[server].numbers(bucket).get(name, (0, 0))
                    assert held >= number, f"{server} lacks an acknowledged push"

    @invariant()
    def no_bucket_is_lost(self) -> None:
        assert not any(one.lost for one in self.plan.map.placements)

    def cuts_go_on(self) -> None:
        """Let servers finish a cut, and read what they have to."""

    def teardown(self) -> None:
        """Let everything arrive, and compare the tables with the model."""
        if not hasattr(self, "plan"):
            return
        for _ in range(40):
            self.cuts_go_on()
            self.time_passes(1.1, True)
            self.deliver_all()
        self.what_is_acknowledged_is_on_all_in_sync_copies()
        open_ = [client.name for client in self.clients.values() if len(client.requests)]
        assert not open_, "a push was never acknowledged"
        found = np.zeros(len(IDS))
        copies: dict[int, int] = defaultdict(int)
        for bucket, placement in enumerate(self.plan.map.placements):
            inside = [at for at in range(len(IDS)) if BUCKET_OF[at] == bucket]
            assert not placement.learner, "a bucket is still moving"
            for server in (placement.primary, *placement.backups):
                rows = self.data[server].tables["t"].read(IDS[inside])[:, 0]
                assert (rows == self.expected[inside]).all(), f"bucket {bucket} of {server}"
                copies[bucket] += 1
            found[inside] = rows
        active = set(self.plan.targets)
        holding = {name for one in self.plan.map.placements for name in one.members}
        assert not active or holding <= active, "a standby has rows"
        if not active:  # the servers that leave have all rows, and keep them
            return
        assert set(copies.values()) == {min(self.wanted.replicas, len(active))}
        if len(set(self.plan.map.weights)) > 1:
            later = planner.foresee(self.plan.map, self.wanted, self.plan.map.weights)
            assert later.placements == self.plan.map.placements, "the servers can be more even"
            return
        leads = [one.primary for one in self.plan.map.placements]
        counts = [leads.count(server) for server in active]
        assert max(counts) - min(counts) <= 1, "the servers are uneven"


class PsCutMachine(PsMachine):
    """The same, and workers save and go back, servers are evened by load, and there are standbys.

    Planted bugs are found sooner without that.
    """

    @rule(weights=st.sampled_from([[1, 1, 1], [1, 1, 1], [9, 1, 1], [5, 6, 4], [1, 9, 8]]))
    def servers_are_evened_by_load(self, weights: list[int]) -> None:
        if self.plan.map.placements:
            self.plan.weigh(weights)
            self.publish()

    @rule(count=st.integers(1, 4), standbys=st.sampled_from([0, 1, 1]))
    def other_numbers_of_servers_are_desired(self, count: int, standbys: int) -> None:
        self.wanted = replace(self.wanted, servers=count, standbys=standbys)
        self.plan.expect(count, standbys=standbys)
        self.publish()

    @rule()
    def workers_save(self) -> None:
        if self.plan.map.cut is None and self.idle():
            self.cuts += 1
            self.parts = {}
            self.plan.begin_cut(CutPlace("cuts", f"step-{self.cuts}", self.cuts))
            self.publish()

    @rule()
    def servers_write(self) -> None:
        """Each server that knows of the cut writes what it leads. The first copy counts."""
        place = self.plan.map.cut
        for name, replica in self.servers.items():
            if place is not None and replica.map is not None and replica.map.cut == place:
                for bucket in replica.led():
                    part = (replica.numbers(bucket), copied(self.data[name], bucket))
                    self.parts.setdefault(bucket, part)
        if place is not None and len(self.parts) == BUCKETS:
            self.saved = (place, self.parts, self.expected.copy())
            self.plan.end_cut()
            self.publish()

    @rule()
    def workers_go_back(self) -> None:
        if self.saved is not None and self.plan.map.cut is None and self.idle():
            place, _, model = self.saved
            self.plan.restore(place, (TABLE,), BUCKETS, set(self.clients))
            self.expected, self.acknowledged = model.copy(), {}
            self.publish()

    @rule(count=st.integers(1, BUCKETS))
    def servers_read(self, count: int) -> None:
        for name in list(self.servers):
            for bucket, term in self.servers[name].to_load()[:count]:
                assert self.saved is not None
                self.servers[name].on_loaded(bucket, term, self.saved[1][bucket][1])
            self.flush(name)

    def cuts_go_on(self) -> None:
        self.servers_write()
        self.servers_read(BUCKETS)


TestPs = PsCutMachine.TestCase
TestPs.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@contextmanager
def run_in_its_place(module: types.ModuleType, source: str) -> Iterator[types.ModuleType]:
    """Run a source as a module, which others import instead of the real one until the end."""
    assert module.__file__ is not None
    copy = types.ModuleType(module.__name__)
    copy.__dict__["__file__"] = module.__file__
    saved = sys.modules[module.__name__]
    sys.modules[module.__name__] = copy
    try:
        exec(compile(source, module.__file__, "exec"), copy.__dict__)
        yield copy
    finally:
        sys.modules[module.__name__] = saved


def mutated(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """Return a copy of a module in which some text is replaced.

    If the text is in ``bucket_copies``, the copy is one of ``replication``, which imports it.
    """
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"expected once in {module.__name__}: {old}"
    with run_in_its_place(module, source.replace(old, new)) as copy:
        if module is not bucket_copies:
            return copy
        with run_in_its_place(replication, inspect.getsource(replication)) as user:
            return user


MUTANTS = {
    "a push that comes again is applied again": (
        replication, "elif number > last and", "elif (number > last or True) and"),
    "an acknowledgement does not wait for backups": (
        replication, "safe = _copied(state, left_out)", "safe = state.version"),
    "a learner is not waited for after it is in sync": (
        replication, "follower.required, follower.synced_at = True, state.version",
        "follower.synced_at = state.version"),
    "a learner is in sync before it has caught up": (
        replication, "if known and known.required and known.held >= known.synced_at:",
        "if known:"),
    "a follower takes a change without the one before": (
        replication,
        "if (state.last_term, state.version) == (change.from_term, change.from_version):",
        "if state.version < change.version:"),
    "a copy does not bring the numbers of pushes": (
        bucket_copies, "state.clients, state.stepping = dict(message.clients), stepping",
        "state.clients, state.stepping = {}, stepping"),
    "a change does not bring the number of its push": (
        replication,
        "                if message.client:\n", "                if waits:\n"),
    "a server that is no member any more goes on": (
        replication,
        "                state.followers, state.since = {}, 0\n"
        "                self._outgoing.set_followers(bucket, ())\n", ""),
    "a change between two parts of a copy is left out": (
        bucket_copies, "            self._keep(known, change.bucket, payload)\n",
        "            pass\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    module, old, new = MUTANTS[name]
    copy = mutated(module, old, new)

    class Mutant(PsMachine):
        replication = copy if module in (bucket_copies, replication) else replication
        planner = copy if module is planner else planner

    one_try = settings(
        max_examples=400, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], print_blob=False,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutant, settings=one_try)
