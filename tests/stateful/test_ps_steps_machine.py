"""A synchronous step counts whole or not at all, whatever happens to workers, servers and messages.

Workers step together over the network and the servers of ``test_ps_machine``, which lose, repeat
and reorder messages and die. The model is a single table: when the coordinator's map says that a
step is over, the pushes of all members are added to it, and nothing else ever is. The primary of a
bucket that has the newest map must have the model's rows at every moment. A read of a worker that
may push must give the model, too.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from dlrover_py.ps import messages as m
from dlrover_py.ps import replication, specs, steps
from dlrover_py.ps.cluster_map import AckMode, StepId
from dlrover_py.ps.session import PendingRequests
from tests.stateful import test_ps_machine as base

IDS, BUCKET_OF = base.IDS, base.BUCKET_OF
NAMES = ("a", "b", "c")
SYNC = specs.sync(silence_s=3.0)


@dataclass
class Worker(base.Client):
    """A worker that steps with others, as ``PsClient`` does it."""

    follower: Any = None
    requests: PendingRequests = field(default_factory=PendingRequests)
    wants: bool = False
    """Whether it has a push that no step has taken."""
    step: StepId = (0, 0)
    """The step of the push that is on its way, or waits on the servers."""


class StepMachine(base.PsCutMachine):
    """Servers, workers that step together, a planner, and the network between them."""

    steps: Any = steps
    workers = ()

    @initialize(
        servers=st.integers(2, 4),
        replicas=st.sampled_from([2, 2, 1]),
        world=st.integers(1, 3),
        part_bytes=base.PART_BYTES,
    )
    def begin(self, servers: int, replicas: int, world: int, part_bytes: int) -> None:
        self.world = world
        self.group = self.steps.StepGroup(0.0)
        self.pushed: dict[StepId, dict[str, tuple[int, ...]]] = {}
        """The ids that each worker pushes in a step."""
        super().begin(servers, replicas, AckMode.BACKUP, part_bytes)
        self.plan.use(SYNC)
        for name in NAMES[:world]:
            self.a_worker_starts(name)
        self.deliver_all()

    # --- The coordinator ---

    def at_coordinator(self, message: Any) -> None:
        if isinstance(message, m.Stepped):
            self.group.heard(message, self.now)
        else:
            super().at_coordinator(message)

    def publish(self) -> None:
        before = self.plan.map.steps
        self.plan.step(*self.group.plan(before, self.plan.map.clients, self.now))
        after = self.plan.map.steps
        if after.done > before.done:
            assert after.done == before.done + 1, "a step was left out"
            assert after.generation == before.generation
            together = self.pushed.get((after.generation, after.done), {})
            assert together.keys() == after.members.keys(), "a step is over without a member"
            for ids in together.values():
                self.expected[list(ids)] += 1
        super().publish()

    @rule()
    def the_coordinator_starts_again(self) -> None:
        super().the_coordinator_starts_again()
        self.group = self.steps.StepGroup(self.now)

    # --- Workers ---

    def at_client(self, client: Any, message: Any) -> None:
        match message:
            case m.MapNews():
                parts = client.requests.on_map(message.map, self.now)
                self.follow(client)
                if client.name in self.clients:
                    self.send_parts(client, [one for one in parts if one.seq == client.seq])
            case m.Pushed():
                client.requests.answered(message.seq, message.buckets)
                self.staged(client)
            case m.RefusedRequest(reason=m.RefusalReason.OLD_CLIENT):
                del self.clients[client.name]
            case m.RefusedRequest():
                assert message.reason is m.RefusalReason.MOVED, message
                client.requests.refused(message.seq, message.buckets, self.now)

    def follow(self, client: Worker) -> None:
        known = client.requests.map
        assert known is not None
        if known.clients.get(client.name, 0) > client.incarnation:
            del self.clients[client.name]  # its program fails
            return
        member = known.steps.members.get(client.name) == client.incarnation
        if member and client.follower.follow(known.steps):
            self.report(client)
        if client.step != (0, 0):
            fate = client.follower.fate(client.step, known.steps)
            if fate is not self.steps.Fate.WAIT:
                client.requests.cancel(client.seq)
                client.step, client.wants = (0, 0), fate is self.steps.Fate.AGAIN
        if client.wants and member and client.step == (0, 0):
            client.wants = False
            client.seq += 1
            client.step = client.follower.step()
            self.pushed.setdefault(client.step, {})[client.name] = client.ids
            buckets = sorted({BUCKET_OF[one] for one in client.ids})
            if buckets:
                self.send_parts(client, client.requests.start(client.seq, buckets, self.now))
            self.staged(client)

    def staged(self, client: Worker) -> None:
        if client.step != (0, 0) and not client.requests.is_open(client.seq):
            client.follower.end(client.step)
            self.report(client)

    def report(self, client: Worker, *, leaving: bool = False) -> None:
        known, ended = client.requests.map, client.follower.ended
        epoch = known.epoch if known is not None else -1
        word = m.Stepped(client.name, client.incarnation, epoch, ended, self.world, 0, leaving)
        self.network.append((client.name, base.COORDINATOR, word, None))

    def send_parts(self, client: Any, parts: Any) -> None:
        before = len(self.network)
        super().send_parts(client, parts)
        for at in range(before, len(self.network)):
            sender, to, push, payload = self.network[at]
            push = m.Push(
                push.client, push.incarnation, push.epoch, push.seq, push.buckets, client.step
            )
            self.network[at] = (sender, to, push, payload)
            client.old[at - len(self.network)] = (to, push, payload)

    def idle(self) -> bool:
        return all(one.step == (0, 0) and not one.wants for one in self.clients.values())

    # --- What happens ---

    @rule(name=st.sampled_from(NAMES), ids=st.sets(st.sampled_from(range(len(IDS)))))
    def push(self, name: str, ids: set[int]) -> None:
        client = self.clients.get(name)
        if client is None or client.wants or client.step != (0, 0) or self.plan.map.cut is not None:
            return
        known = client.requests.map
        if known is None or known.epoch < self.plan.map.restored:
            return
        client.ids, client.wants = tuple(sorted(ids)), True
        self.follow(client)

    @rule()
    def all_push(self) -> None:
        for name in NAMES:
            self.push(name, set(range(len(IDS))))

    @rule(
        count=st.integers(0, 40),
        name=st.sampled_from(NAMES),
        index=st.integers(0, 20),
        what=st.sampled_from(["nothing", "starts", "leaves", "server comes", "server drains"]),
    )
    def a_step_with_a_change_in_it(self, count: int, name: str, index: int, what: str) -> None:
        """All push; something changes meanwhile; then the rest arrives, and an old push."""
        for missing in NAMES:
            if missing not in self.clients:
                self.a_worker_starts(missing)
        self.cuts_go_on()
        self.time_passes(1.1, True)
        self.deliver_all()
        self.all_push()
        self.deliver_in_order(count)
        if what == "starts":
            self.a_worker_starts(name)
        elif what == "leaves":
            self.a_worker_leaves(name)
        elif what == "server comes":
            self.a_server_comes()
        elif what == "server drains":
            self.a_server_drains(index)
        self.deliver_all()
        self.an_old_push_arrives_again(name, index)

    @rule(name=st.sampled_from(NAMES))
    def a_worker_starts(self, name: str) -> None:
        if name in NAMES[: self.world]:
            follower = self.steps.StepFollower(SYNC)
            self.clients[name] = Worker(
                name, self.plan.join(name, f"call-{self.plan.map.epoch}"), follower=follower
            )
            self.report(self.clients[name])
            self.publish()

    @rule(name=st.sampled_from(NAMES))
    def a_worker_dies(self, name: str) -> None:
        self.clients.pop(name, None)

    @rule(name=st.sampled_from(NAMES))
    def a_worker_leaves(self, name: str) -> None:
        if name in self.clients:
            self.report(self.clients.pop(name), leaving=True)

    @rule(name=st.sampled_from(NAMES))
    def a_worker_is_taken_for_dead(self, name: str) -> None:
        self.now += SYNC.silence_s + 0.1
        for client in self.clients.values():
            if client.name != name:
                self.report(client)
                self.deliver(self.network.pop())
        for server in self.servers:
            if server in self.plan.map.servers:
                self.plan.heard(server, self.addresses[server], self.now)
        self.publish()

    @rule(name=st.sampled_from(NAMES), index=st.integers(0, 20))
    def an_old_push_arrives_again(self, name: str, index: int) -> None:
        if name in self.clients:
            super().an_old_push_arrives_again(name, index)

    @rule(passed=st.sampled_from([0.1, 0.6, 1.1]), alive=st.booleans())
    def time_passes(self, passed: float, alive: bool) -> None:
        super().time_passes(passed, alive)
        for client in self.clients.values():
            self.report(client)

    @rule(name=st.sampled_from(NAMES))
    def a_worker_reads(self, name: str) -> None:
        """Whatever server answers, the rows are those after the last step."""
        client = self.clients.get(name)
        known = client.requests.map if client is not None else None
        if client is None or known is None or client.step != (0, 0):
            return
        member = self.plan.map.steps.members.get(name) == client.incarnation
        if not member or known.epoch < self.plan.map.restored or client.follower.ended[1] == 0:
            return
        for bucket, one in enumerate(known.placements):
            replica = self.servers.get(one.primary)
            if replica is None:
                continue
            ids = IDS[[at for at in range(len(IDS)) if BUCKET_OF[at] == bucket]]
            replica.on_pull(b"reader", m.Pull(known.epoch, 1, (bucket,)), [("t", [ids])])
            for sent in replica.take():
                if sent.to != b"reader":
                    to = sent.to if isinstance(sent.to, str) else sent.to.decode()
                    self.network.append((one.primary, to, sent.message, sent.payload))
                elif isinstance(sent.message, m.Pulled):
                    rows = sent.payload[0][1][0][:, 0]
                    assert (rows == self.expected[ids]).all(), "a worker has read another step"

    # --- What must be true ---

    @invariant()
    def primaries_have_whole_steps(self) -> None:
        for bucket, one in enumerate(self.plan.map.placements):
            replica = self.servers.get(one.primary)
            if replica is None or one.loading or replica.map.epoch != self.plan.map.epoch:
                continue
            ids = IDS[[at for at in range(len(IDS)) if BUCKET_OF[at] == bucket]]
            rows = self.data[one.primary].tables["t"].read(ids)[:, 0]
            assert (rows == self.expected[ids]).all(), "a primary has another state of the steps"

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "plan") and self.clients:
            steps = self.plan.map.steps
            idle = [one for one in self.clients.values() if one.step == (0, 0) and not one.wants]
            assert len(steps.members) < len(self.clients) or any(
                one.follower.ended <= (steps.generation, steps.done) for one in idle
            ), "a step of all workers never ends"


TestSteps = StepMachine.TestCase
TestSteps.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

MUTANTS = {
    "a push does not wait for its step": (
        replication, "elif push.step == (0, 0) or steps.has(push.step):", "elif True:"),
    "the end of a step leaves its pushes": (
        replication, "        if one.step == step:\n", "        if False:\n"),
    "a follower does not learn that a step has ended": (
        replication, "                    _settle(state, message.step)\n",
        "                    pass\n"),
    "a step is over when one worker has ended it": (
        steps, "done = min(ended, default=0)", "done = max(ended, default=0)"),
    "a step that some had ended counts when the group changes": (
        steps, "(known.generation, known.done))", "(known.generation, known.done + 1))"),
    "words of an older generation count": (
        steps, "if name in here and here[name].step[0] == known.generation else 0",
        "if name in here else 0"),
    "a worker waits for a step that never will be over": (
        steps, "return Fate.WAIT if step[0] == steps.generation else Fate.AGAIN",
        "return Fate.WAIT"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    module, old, new = MUTANTS[name]
    copy: Any = base.mutated(module, old, new)

    class Mutant(StepMachine):
        replication = copy if module is replication else replication
        steps = copy if module is steps else steps

    one_try = settings(
        max_examples=600, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], print_blob=False,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mutant, settings=one_try)
