"""What the operator allots: never more than there is, minima first, and nothing lost by a death."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from dlrover_operator.allotment import (
    LEAVING,
    LOST_S,
    HeldPod,
    Host,
    SharedHosts,
    decide,
    reclaimed,
    takes_part,
)
from dlrover_operator.observed import Key
from dlrover_operator.settings import Settings
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.quantities import quantity
from dlrover_py.protocol.status import rfc3339
from tests.builders import job_file

NOW = 1.8e9
Obj = dict[str, Any]


def job(name: str, most: int, least: int, *, age_s: float = 0.0, **spec: Any) -> Obj:
    of_workers = ("priority", "standbyReplicas", "nodeUnit", "spotPolicy")
    worker = {k: spec.pop(k) for k in of_workers if k in spec}
    document = job_file(most, minReplicas=least, **worker)
    created = rfc3339(NOW - age_s)
    document["metadata"] = {"name": name, "namespace": "default", "uid": f"u-{name}"}
    document["metadata"] |= {"creationTimestamp": created, "generation": 1}
    document["spec"] |= spec
    return document


def opted_out(name: str, most: int, desired: int) -> Obj:
    found = job(name, most, 1)
    found["metadata"]["annotations"] = {names.NOTE_ALLOCATION: "off"}
    found["status"] = {"training": {"phase": "Running", "desired": desired}}
    return found


@dataclass
class World:
    """Jobs whose masters follow their allocations, each at its own pace."""

    jobs: dict[str, Obj]
    shared: SharedHosts
    pods: dict[str, int] = field(default_factory=dict)
    """Pods that hold resources, by name of the job."""
    now: float = NOW
    outside: list[Obj] = field(default_factory=list)
    """Jobs that take no part."""

    def decide(self) -> dict[Key, NodeAllocation]:
        owners = (("default", f"u-{n}") for n, count in self.pods.items() for _ in range(count))
        pods = [HeldPod(owner, "h", True) for owner in owners]
        jobs = [*self.jobs.values(), *self.outside]
        return decide(jobs, (), pods, self.shared, self.now)

    def write(self, writes: Mapping[Key, NodeAllocation]) -> None:
        for (_, name), one in writes.items():
            self.jobs[name].setdefault("status", {})["allocation"] = one.model_dump(by_alias=True)

    def granted(self, name: str) -> int:
        found = (self.jobs[name].get("status") or {}).get("allocation")
        return 0 if found is None else int(found["nodes"])

    def reason(self, name: str) -> str:
        return str(self.jobs[name]["status"]["allocation"]["reason"])

    def follow(self, names: Sequence[str] | None = None) -> None:
        """Have masters report what they want, and their Pods come and go."""
        for name in self.jobs if names is None else names:
            granted = self.granted(name)
            worker = self.jobs[name]["spec"]["replicaSpecs"]["worker"]
            runs = granted >= worker["minReplicas"]
            wanted = min(granted, worker["replicas"]) if runs else 0
            training = {"phase": "Running" if runs else "Suspended", "desired": wanted}
            self.jobs[name].setdefault("status", {})["training"] = training
            self.pods[name] = wanted + (self.standbys(name) if runs else 0)

    def written(self) -> dict[str, int]:
        """Write until nothing changes before a master has done something; return the numbers."""
        for _ in range(5):
            self.write(self.decide())
        return {name: self.granted(name) for name in self.jobs}

    def standbys(self, name: str) -> int:
        """Return how many standbys a job may have now."""
        one = self.jobs[name]
        most = int(one["spec"]["replicaSpecs"]["worker"].get("standbyReplicas", 0))
        allowed = ((one.get("status") or {}).get("allocation") or {}).get("standbys")
        return most if allowed is None else min(most, int(allowed))

    def promised(self) -> int:
        """Return the nodes that exist or may be created."""
        found = 0
        for name in self.jobs:
            granted = self.granted(name)
            found += max(self.pods.get(name, 0), granted + self.standbys(name) if granted else 0)
        return found

    def settle(self) -> None:
        for _ in range(60):
            self.now += 400.0
            writes = self.decide()
            if not writes:
                return
            self.write(writes)
            self.follow()
        raise AssertionError("still moving")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw jobs that run as they were allotted, and jobs that have just arrived.

    One of them takes no part, and has no Pods yet.
    """
    jobs = {}
    for index in range(draw(st.integers(1, 5))):
        least = draw(st.integers(1, 5))
        most = least + draw(st.integers(0, 5))
        priority = draw(st.sampled_from(("0", "1", "high", "low")))
        name, age_s = f"j{index}", float(draw(st.integers(0, 100)))
        standbys = draw(st.sampled_from((0, 0, 0, 1, 2, 100)))
        more = {"standbyReplicas": standbys} if standbys else {}
        jobs[name] = job(name, most, least, age_s=age_s, priority=priority, **more)
    late = draw(st.sets(st.sampled_from(sorted(jobs))))
    world = World({}, SharedHosts(capacity=draw(st.integers(1, 12))))
    world.jobs = {name: one for name, one in jobs.items() if name not in late}
    world.settle()
    world.jobs |= {name: jobs[name] for name in late}
    world.outside = [opted_out("out", 9, draw(st.integers(0, 9)))]
    world.now += 400.0
    return world


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_no_host_is_promised_twice_whenever_the_operator_dies(
    world: World, data: st.DataObject
) -> None:
    """Masters follow late or at once; the operator dies before any of its writes."""
    total = world.shared.capacity
    for _ in range(12):
        writes = data.draw(st.permutations(list(world.decide().items())), "order")
        done = data.draw(st.integers(0, len(writes)), "writes before it dies")
        world.write(dict(writes[:done]))
        assert world.promised() <= total
        world.follow(sorted(data.draw(st.sets(st.sampled_from(sorted(world.jobs))), "masters")))
        assert world.promised() <= total
        world.now += data.draw(st.sampled_from((1.0, 400.0)), "time")
    world.settle()
    for name, one in world.jobs.items():
        worker = one["spec"]["replicaSpecs"]["worker"]
        size = world.granted(name)
        assert size == 0 or worker["minReplicas"] <= size <= worker["replicas"]
        assert world.reason(name)


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_who_comes_after_a_death_writes_the_rest(world: World, data: st.DataObject) -> None:
    """The state lies in the status alone: after any part of the writes, the others follow.

    Nodes that are given back are written first. Otherwise a job that has just started would not be
    the reason to give them back any more.
    """
    writes = list(world.decide().items())
    undisturbed = copy.deepcopy(world)
    world.write(dict(writes[: data.draw(st.integers(0, len(writes)), "writes before it dies")]))
    assert world.written() == undisturbed.written()


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_minima_that_fit_are_given_by_priority(world: World) -> None:
    """If a job is held back, those that are not less important leave no room for it."""
    world.settle()
    order = {"high": 1000, "1": 1, "0": 0, "low": -1000}

    def rank(name: str) -> int:
        return order[world.jobs[name]["spec"]["replicaSpecs"]["worker"]["priority"]]

    def standbys(name: str) -> int:
        return int(world.jobs[name]["spec"]["replicaSpecs"]["worker"].get("standbyReplicas", 0))

    def least(name: str) -> int:
        return int(world.jobs[name]["spec"]["replicaSpecs"]["worker"]["minReplicas"])

    for name in world.jobs:
        if world.granted(name):
            continue
        before = [n for n in world.jobs if world.granted(n) and rank(n) >= rank(name)]
        taken = sum(least(n) + standbys(n) for n in before)
        assert taken + least(name) + standbys(name) > world.shared.capacity
        assert world.reason(name).startswith("held back: ")


def test_a_job_waits_until_the_pods_of_another_are_gone() -> None:
    world = World({"a": job("a", 4, 2)}, SharedHosts(capacity=4))
    world.settle()
    assert world.granted("a") == 4
    world.jobs["b"] = job("b", 2, 2, priority="high")
    world.write(world.decide())
    assert (world.granted("a"), world.granted("b")) == (2, 0)
    assert world.reason("a") == "4→2: 2 nodes given back, b gets them"
    assert world.reason("b") == "0→2: waits until other jobs have given 2 nodes back"
    world.jobs["a"]["status"]["training"]["desired"] = 2
    world.write(world.decide())
    assert world.granted("b") == 0, "the Pods of the other are ending, and hold their hosts"
    world.follow()
    world.write(world.decide())
    assert (world.granted("a"), world.granted("b")) == (2, 2)
    world.follow()
    del world.jobs["b"]
    world.jobs["c"] = job("c", 2, 2, priority="high")
    world.write(world.decide())
    assert world.granted("c") == 0, "the Pods of a job that is gone hold hosts, too"
    del world.jobs["c"], world.pods["b"]
    world.settle()
    assert world.granted("a") == 4


def test_a_master_that_has_not_heard_yet_may_still_create_its_nodes() -> None:
    world = World({"a": job("a", 4, 2)}, SharedHosts(capacity=4))
    world.settle()
    world.pods["a"] = 1  # it waits for the others
    world.jobs["b"] = job("b", 2, 2, priority="high")
    world.write(world.decide())
    assert world.granted("a") == 2
    world.now += 1
    world.write(world.decide())
    assert world.granted("b") == 0
    world.follow(["a"])
    world.write(world.decide())
    assert world.granted("b") == 2


def test_nodes_that_nobody_has_taken_yet_are_taken_back_before_they_are_given_away() -> None:
    """The operator may die after the first of two writes, whichever it is."""
    world = World({"a": job("a", 4, 2)}, SharedHosts(capacity=4))
    world.write(world.decide())
    world.jobs["b"] = job("b", 2, 2, priority="high")
    assert {key[1]: one.nodes for key, one in world.decide().items()} == {"a": 2, "b": 0}
    world.write(world.decide())
    assert world.decide()["default", "b"].nodes == 2


def test_a_running_job_is_taken_over_as_it_is() -> None:
    world = World({"a": job("a", 4, 2), "b": job("b", 2, 2)}, SharedHosts(capacity=4))
    world.pods["a"] = 4
    world.jobs["a"]["status"] = {"training": {"phase": "Running", "desired": 4}}
    (first,) = (one for key, one in world.decide().items() if key[1] == "a")
    assert first.nodes == 2, "less, but it is not suspended"


def test_jobs_that_ask_for_nothing_keep_what_they_hold() -> None:
    ended = job("ended", 2, 2)
    ended["status"] = {"training": {"phase": "Succeeded", "desired": 2}}
    out = opted_out("out", 2, 2)
    foreign = job("foreign", 9, 1, managedBy="others/x")
    foreign["status"] = {"training": {"phase": "Running", "desired": 9}}
    refused = job("refused", 2, 2)
    refused["spec"]["replicaSpecs"]["worker"]["minReplicas"] = 3
    refused["status"] = {"allocation": {"nodes": 2}}
    assert [takes_part(one) for one in (ended, out, foreign)] == [True, False, False]
    world = World({j["metadata"]["name"]: j for j in (ended, out, foreign, refused)},
                  SharedHosts(capacity=10), {"ended": 1, "out": 1, "foreign": 1})  # fmt: skip
    world.jobs["a"] = job("a", 9, 1, standbyReplicas=1)
    writes = world.decide()
    assert {key[1]: one.nodes for key, one in writes.items()} == {"a": 10 - 1 - 2 - 1 - 2 - 1}


def test_standbys_are_given_up_one_by_one_and_come_back() -> None:
    world = World({"a": job("a", 2, 2, standbyReplicas=2)}, SharedHosts(capacity=5))
    world.settle()
    assert (world.granted("a"), world.pods["a"]) == (2, 4)
    world.jobs["b"] = job("b", 2, 2, priority="high")
    writes = world.decide()
    assert {key[1]: (one.nodes, one.standbys) for key, one in writes.items()} == {
        "a": (2, 1),
        "b": (0, None),
    }
    assert next(iter(writes))[1] == "a", "what falls is written first"
    world.settle()
    assert (world.granted("a"), world.granted("b"), world.pods["a"]) == (2, 2, 3)
    del world.jobs["b"], world.pods["b"]
    world.settle()
    assert (world.granted("a"), world.pods["a"]) == (2, 4)
    assert world.jobs["a"]["status"]["allocation"]["standbys"] is None


@pytest.mark.parametrize("standbys", [3, 100, 10_000])
def test_standbys_of_a_job_without_nodes_take_nothing_from_others(standbys: int) -> None:
    world = World({"a": job("a", 4, 2, priority="high")}, SharedHosts(capacity=4))
    world.settle()
    low = job("b", 1, 1, standbyReplicas=standbys, priority="low")
    world.jobs["b"] = low
    world.settle()
    assert (world.granted("a"), world.granted("b")) == (4, 0)
    assert world.reason("b").startswith("held back: it needs ")
    world.jobs["c"] = job("c", 1, 1, standbyReplicas=1, priority="high")
    world.settle()
    assert (world.granted("a"), world.granted("c")) == (2, 1), "its standby has a host, too"


def measured(speed: object, nodes: int = 4, most: int = 8) -> Obj:
    found = job("odd", most, 1)
    training = {"phase": "Running", "desired": nodes, "speed": speed}
    found["status"] = {"allocation": {"nodes": nodes, "since": NOW - 9000}, "training": training}
    return found


NUMBERS = st.one_of(
    st.floats(),
    st.floats(0, 1),
    st.sampled_from((0.0, 5e-324, 1e308, -0.5)),
    st.integers(),
    st.none(),
)
SPEEDS = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "curve": st.one_of(st.none(), st.lists(NUMBERS, min_size=2, max_size=4)),
            "most": NUMBERS,
            "least": NUMBERS,
            "resizeS": NUMBERS,
        },
    ),
)


@given(SPEEDS)
@example({"curve": [1, -0.5, 0], "most": 8})
@example({"curve": [0, 1e308, 0], "most": 8})
@example({"curve": [1e308, 1e308, 1e308], "most": 8})
@example({"curve": [5e-324, 0, 0], "most": 8, "resizeS": 1e308})
def test_no_measured_speed_of_one_job_stops_the_others(speed: object) -> None:
    """Whoever may write the status of one job may write anything."""
    shared = SharedHosts(capacity=8)
    writes = decide([measured(speed), job("b", 4, 2)], (), (), shared, NOW)
    assert sizes(writes)["b"] == 4
    writes = decide([measured(speed, 8), job("b", 4, 2)], (), (), shared, NOW)
    assert sizes(writes)["odd"] in range(4, 7), "it gives nodes back, whatever it reports"


def test_a_job_that_cannot_be_understood_keeps_its_nodes() -> None:
    odd = measured(None)
    odd["status"]["training"]["desired"] = "many"
    writes = decide([odd, job("b", 8, 1)], (), (), SharedHosts(capacity=8), NOW)
    assert sizes(writes) == {"odd": 4, "b": 4}
    assert writes["default", "odd"].reason.startswith(
        "4 nodes: kept, because the status of the job"
    )


def test_a_number_that_cannot_be_written_does_not_hold_free_hosts() -> None:
    world = World({"a": job("a", 4, 2), "c": job("c", 2, 1)}, SharedHosts(capacity=8))
    world.settle()
    world.jobs["a"]["spec"]["replicaSpecs"]["worker"]["replicas"] = 3
    world.jobs["b"] = job("b", 2, 1)
    for _ in range(3):
        world.now += 400
        writes = {key: one for key, one in world.decide().items() if key[1] != "a"}
        world.write(writes)
        world.follow(["b", "c"])
    assert {n: world.granted(n) for n in world.jobs} == {"a": 4, "c": 2, "b": 2}


def test_without_any_host_all_jobs_keep_their_sizes() -> None:
    """A selector that matches nothing is a mistake: hosts do not vanish all at once."""
    shared = SharedHosts(selector="pool=trainin")
    (one,) = decide([member()], [], MEMBERS, shared, NOW).values()
    assert one.nodes == 4
    assert one.reason == (
        "4 nodes: kept, because no host that is shared exists; check the label selector of the "
        "allocator"
    )
    new = decide([job("b", 1, 1)], [], MEMBERS, shared, NOW)["default", "b"]
    assert new.nodes == 0
    assert new.reason.startswith("held back: no host that is shared exists")


def test_urgent_numbers_come_before_reasons() -> None:
    world = World({"z": job("z", 4, 2)}, SharedHosts(capacity=12))
    world.jobs |= {f"r{i}": job(f"r{i}", 4, 2) for i in range(2)}
    world.settle()
    world.jobs |= {f"q{i}": job(f"q{i}", 20, 9) for i in range(20)}
    world.settle()
    del world.jobs["r0"], world.pods["r0"]
    world.jobs = {"a": job("a", 4, 4, priority="high")} | world.jobs
    world.jobs["b"] = job("b", 2, 2, priority="high")
    writes = list(world.decide().items())
    kinds = ["falls" if one.nodes < world.granted(key[1]) else
             "rises" if one.since == world.now else "reason" for key, one in writes]  # fmt: skip
    assert kinds == sorted(kinds, key=["falls", "rises", "reason"].index)
    assert set(kinds) == {"falls", "rises", "reason"}


def test_a_host_that_is_back_soon_costs_no_node() -> None:
    lost = replace(HOSTS[3], open=False, lost_at=NOW)
    hosts, pods = [*HOSTS[:3], lost], MEMBERS[:3]
    for least in (1, 4):
        one = member()
        one["spec"]["replicaSpecs"]["worker"]["minReplicas"] = least
        assert sizes(decide([one], hosts, pods, SharedHosts(), NOW + 20)).get("a", 4) == 4
        after = decide([one], hosts, pods, SharedHosts(), NOW + 46)
        assert sizes(after) == {"a": 3 if least == 1 else 0}
    early = decide([one], hosts, pods, SharedHosts(), NOW - 9)
    assert sizes(early).get("a", 4) == 4, "the two clocks differ a little"
    assert lost.lost_in(NOW - 9) == LOST_S
    assert decide([one], hosts, pods, SharedHosts(), NOW - 46)["m", "a"].nodes == 0
    waits = job("b", 1, 1)
    three = decide([member(3), waits], hosts, pods, SharedHosts(), NOW + 20)
    assert sizes(three)["b"] == 0, "no new Pod can be there now"


def test_a_pod_that_ends_on_a_lost_host_is_no_room() -> None:
    dead = [*HOSTS[:3], replace(HOSTS[3], open=False)]
    pods = [MEMBERS[0], replace(MEMBERS[3], ends=True)]
    writes = decide([member(1), job("b", 3, 1)], dead, pods, SharedHosts(), NOW)
    granted = {"a": 1} | sizes(writes)
    assert sum(granted.values()) == 3, granted


HOSTS = [Host(f"h{n}", 1, True) for n in range(4)]
MEMBERS = [HeldPod(("m", "u-a"), host.name, True) for host in HOSTS]
"""The Pods of the job that ``member`` makes, with as many nodes as there are hosts."""


def member(nodes: int = 4) -> Obj:
    found = job("a", 4, 1)
    found["metadata"]["namespace"] = "m"
    training = {"phase": "Running", "desired": nodes}
    found["status"] = {"allocation": {"nodes": nodes}, "training": training}
    return found


def sizes(writes: Mapping[Key, NodeAllocation]) -> dict[str, int]:
    return {name: one.nodes for (_, name), one in writes.items()}


def forged(name: str, *hosts: str) -> list[HeldPod]:
    return [HeldPod(("default", f"u-{name}"), host, True) for host in hosts]


EVERYWHERE = [host.name for host in HOSTS]
ENDED = job("x", 9, 1) | {"status": {"training": {"phase": "Succeeded"}}}
SUSPENDED_JOB = job("x", 9, 1, suspend=True)
DELETED = job("x", 9, 1)
DELETED["metadata"]["deletionTimestamp"] = rfc3339(NOW)
UNREADABLE = job("x", 9, 10) | {"status": {"training": {"phase": "Running", "desired": 100}}}


# --- Pools ---

POOLED = SharedHosts(pool_label="k.sh/type")


@dataclass
class Pools:
    """Jobs on stable and spot hosts, whose masters create and end Pods as they are placed."""

    hosts: list[Host]
    jobs: dict[str, Obj]
    pods: list[HeldPod] = field(default_factory=list)
    now: float = NOW
    reclaims: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, stable: int, spot: int, *jobs: Obj) -> "Pools":
        hosts = [Host(f"a{n}", 1, True, pool="stable") for n in range(stable)]
        hosts += [Host(f"b{n}", 1, True, pool="cheap", spot=True) for n in range(spot)]
        return cls(hosts, {one["metadata"]["name"]: one for one in jobs})

    def allocation(self, name: str) -> NodeAllocation:
        return NodeAllocation.model_validate(self.jobs[name]["status"]["allocation"])

    def placed(self, name: str) -> Counter[str]:
        """Return the Pods of a job, by pool."""
        pools = {host.name: host.pool for host in self.hosts}
        return Counter(pools[pod.host] for pod in self.pods if pod.job[1] == f"u-{name}")

    def step(self) -> bool:
        """Decide, and have the masters follow; return whether something has changed."""
        self.now += 400.0
        writes = decide(self.jobs.values(), self.hosts, self.pods, POOLED, self.now, self.reclaims)
        for (_, name), one in writes.items():
            self.jobs[name].setdefault("status", {})["allocation"] = one.model_dump(by_alias=True)
        before = list(self.pods)
        places = {name: self.allocation(name).placements for name in self.jobs}
        for name, obj in self.jobs.items():
            uid, nodes = ("default", f"u-{name}"), self.allocation(name).nodes
            wanted = {place.name: place.nodes for place in places[name]}
            for pod in [pod for pod in self.pods if pod.job == uid]:
                wanted[pod.placement] = wanted.get(pod.placement, 0) - 1
                if wanted[pod.placement] < 0 or not nodes:
                    self.pods.remove(pod)
            obj["status"]["training"] = {"phase": "Running", "desired": nodes}
        for name in self.jobs:
            uid, nodes = ("default", f"u-{name}"), self.allocation(name).nodes
            here = Counter(pod.placement for pod in self.pods if pod.job == uid)
            for place in places[name]:
                taken = {pod.host for pod in self.pods}
                free = [h for h in self.hosts if h.pool == place.name and h.name not in taken]
                missing = place.nodes * (nodes > 0) - here[place.name]
                for host in free[: max(0, missing)]:
                    self.pods.append(HeldPod(uid, host.name, True, placement=place.name))
        return bool(writes) or before != self.pods

    def settle(self) -> None:
        for _ in range(40):
            if not self.step():
                return
        raise AssertionError(f"still moving: {self.jobs}")


@st.composite
def pooled(draw: st.DrawFn) -> Pools:
    jobs = []
    for index in range(draw(st.integers(1, 4))):
        least = draw(st.integers(1, 3))
        more: Obj = {"spotPolicy": "onDemandMin"} if draw(st.booleans()) else {}
        more |= {"standbyReplicas": 1} if draw(st.integers(0, 3)) == 3 else {}
        most = least + draw(st.integers(0, 4))
        jobs.append(job(f"j{index}", most, least, priority=str(index % 2), **more))
    return Pools.of(draw(st.integers(0, 5)), draw(st.integers(0, 5)), *jobs)


@settings(max_examples=60, deadline=None)
@given(pooled(), st.data())
def test_the_minimum_is_on_stable_hosts_and_each_pod_finds_its_host(
    world: Pools, data: st.DataObject
) -> None:
    assume(world.hosts)
    late = data.draw(st.sets(st.sampled_from(sorted(world.jobs))))
    arriving = {name: world.jobs.pop(name) for name in late}
    world.settle()
    world.jobs |= arriving
    world.settle()
    given = Counter[str]()
    stable = sum(host.pool == "stable" for host in world.hosts)
    full = sum(world.placed(name)["stable"] for name in world.jobs) == stable
    for name, obj in world.jobs.items():
        one, worker = world.allocation(name), obj["spec"]["replicaSpecs"]["worker"]
        standbys = worker.get("standbyReplicas", 0) if one.standbys is None else one.standbys
        pods = one.nodes + standbys if one.nodes else 0
        assert world.placed(name).total() == pods
        assert sum(place.nodes for place in one.placements) == pods
        given += Counter({place.name: place.nodes for place in one.placements})
        if one.nodes and worker.get("spotPolicy"):
            # One that ran before may go on without them, if a more important one has come.
            assert world.placed(name)["stable"] >= worker["minReplicas"] or (
                full and name not in late
            )
            if world.placed(name)["stable"]:
                assert one.placements[0].name == "stable", "a master fills the first place first"
    assert given <= Counter(host.pool for host in world.hosts)


def test_nodes_are_placed_by_the_label_of_their_pool() -> None:
    world = Pools.of(2, 3, job("a", 5, 2, spotPolicy="onDemandMin"))
    world.settle()
    stable, spot = world.allocation("a").placements
    assert (stable.name, stable.nodes, stable.node_selector) == (
        "stable",
        2,
        {"k.sh/type": "stable"},
    )
    assert (spot.name, spot.nodes, spot.node_selector) == ("cheap", 3, {"k.sh/type": "cheap"})


def test_no_job_starts_whose_minimum_has_no_stable_hosts() -> None:
    world = Pools.of(1, 5, job("a", 5, 2, spotPolicy="onDemandMin"), job("b", 2, 2))
    world.settle()
    assert world.allocation("a").reason == (
        "held back: it needs 2 stable nodes, and the cluster has 1"
    )
    assert world.placed("b") == {"cheap": 2}, "stable hosts are left to those that need them"


@pytest.mark.parametrize(
    ("stable", "spot", "least", "most"), [(4, 4, 4, 8), (5, 3, 4, 8), (1, 5, 4, 6)]
)
def test_a_job_with_nodes_goes_on_although_its_minimum_finds_no_stable_hosts(
    stable: int, spot: int, least: int, most: int
) -> None:
    """One of its stable hosts is lost, or the label is set while it runs on spot hosts."""
    world = Pools.of(stable, spot, job("a", most, least, spotPolicy="onDemandMin"))
    uid = "default", "u-a"
    world.pods = [HeldPod(uid, host.name, True, placement=host.pool) for host in world.hosts]
    world.jobs["a"]["status"] = {"allocation": {"nodes": most}}
    world.settle()
    assert world.allocation("a").nodes == most
    world.hosts[0] = replace(world.hosts[0], open=False)
    del world.pods[0]
    world.settle()
    assert world.allocation("a").nodes == most - 1
    assert world.placed("a") == Counter(stable=stable - 1, cheap=spot)


def test_a_spot_pool_stays_one_if_one_of_its_hosts_loses_its_labels() -> None:
    """The label of pools may be the one that says that a host is a spot host."""
    world = Pools.of(0, 4, job("a", 2, 2))
    world.settle()
    lost = next(pod.host for pod in world.pods)
    world.hosts = [
        Host.of(node(lost), {}, "k.sh/type") if host.name == lost else host for host in world.hosts
    ]
    world.jobs["b"] = job("b", 1, 1, spotPolicy="onDemandMin")
    writes = decide(world.jobs.values(), world.hosts, world.pods, POOLED, world.now)
    assert writes["default", "b"].nodes == 0


def test_a_job_that_starts_has_the_stable_hosts_of_a_less_important_one() -> None:
    world = Pools.of(1, 1, job("low", 1, 1, spotPolicy="onDemandMin"))
    world.settle()
    assert world.placed("low") == {"stable": 1}
    world.jobs["high"] = job("high", 1, 1, spotPolicy="onDemandMin", priority="high")
    world.settle()
    assert (world.placed("high"), world.placed("low")) == ({"stable": 1}, {"cheap": 1})


def test_a_pool_is_a_spot_pool_if_all_of_its_hosts_are() -> None:
    world = Pools.of(4, 0, job("a", 4, 4, spotPolicy="onDemandMin"))
    world.hosts.append(replace(world.hosts[0], name="new", spot=True))
    world.settle()
    assert world.allocation("a").nodes == 4


def test_a_pool_that_keeps_reclaiming_gets_no_further_nodes() -> None:
    world = Pools.of(2, 3, job("a", 5, 2, spotPolicy="onDemandMin"))
    world.settle()
    for host in ("b0", "b1"):
        world.hosts = [one for one in world.hosts if one.name != host]
        world.pods = [pod for pod in world.pods if pod.host != host]
    world.settle()
    assert world.allocation("a").nodes == 3, "their hosts are gone"
    world.hosts += [Host(f"b{n}", 1, True, pool="cheap", spot=True) for n in (8, 9)]
    world.reclaims = {"cheap": [world.now + 3000] * 3}
    world.settle()
    assert world.placed("a") == {"stable": 2, "cheap": 1}, "what is there stays"
    world.reclaims = {}
    world.settle()
    assert world.placed("a") == {"stable": 2, "cheap": 3}


def test_a_missing_pod_takes_no_node_away_while_its_pool_keeps_reclaiming() -> None:
    world = Pools.of(0, 40, job("a", 12, 2), job("b", 20, 20))
    world.settle()
    assert [world.allocation(name).nodes for name in "ab"] == [12, 20]
    world.reclaims = {"cheap": [world.now + 3000] * 20}
    for name in "ab":
        world.pods.remove(next(pod for pod in world.pods if pod.job[1] == f"u-{name}"))
    written = decide(
        world.jobs.values(), world.hosts, world.pods, POOLED, world.now + 600, world.reclaims
    )
    assert not [one for one in written.values() if one.nodes not in (12, 20)], written
    world.settle()
    assert [world.placed(name)["cheap"] for name in "ab"] == [12, 20]


def test_a_minimum_gets_nodes_of_a_pool_that_keeps_reclaiming() -> None:
    world = Pools.of(0, 10, job("a", 4, 2))
    world.settle()
    world.reclaims = {"cheap": [world.now + 3000] * 3}
    world.jobs["b"] = job("b", 6, 3)
    world.settle()
    assert world.placed("b") == {"cheap": 3}, "its minimum, and no further node"


def test_pods_from_before_there_were_pools_stay_where_they_are() -> None:
    world = Pools.of(2, 2, job("a", 4, 2, spotPolicy="onDemandMin"))
    world.pods = [HeldPod(("default", "u-a"), host, True) for host in ("a0", "a1", "b0", "b1")]
    world.jobs["a"]["status"] = {"allocation": {"nodes": 4}}
    before = list(world.pods)
    world.settle()
    assert world.pods == before
    assert [(p.name, p.nodes) for p in world.allocation("a").placements] == [
        ("stable", 0), ("cheap", 0), ("", 4)
    ]  # fmt: skip
    del world.pods[0]
    world.settle()
    assert [pod.placement for pod in world.pods] == ["", "", "", "stable"]


def test_if_no_host_has_the_label_of_pools_all_jobs_keep_their_sizes() -> None:
    hosts = [Host.of(node(host.name), {}, "mistyped") for host in HOSTS]
    shared = SharedHosts(selector="a=b", pool_label="mistyped")
    (one,) = decide([member()], hosts, MEMBERS, shared, NOW).values()
    assert one.nodes == 4
    assert one.reason.startswith("4 nodes: kept, because no host has the label mistyped")


@pytest.mark.parametrize("placement", ["", "cheap", "stable"])
def test_pods_stay_on_hosts_without_the_label_of_pools(placement: str) -> None:
    """Whether the hosts never had it, or have lost it; such hosts get no further Pods."""
    world = Pools.of(2, 0, job("a", 4, 4))
    world.hosts += [Host.of(node(f"c{n}"), {}, "k.sh/type") for n in range(3)]
    uid = "default", "u-a"
    world.pods = [HeldPod(uid, host, True, placement="stable") for host in ("a0", "a1")]
    world.pods += [HeldPod(uid, host, True, placement=placement) for host in ("c0", "c1")]
    world.jobs["a"]["status"] = {"allocation": {"nodes": 4}}
    before = list(world.pods)
    world.jobs["b"] = job("b", 1, 1)
    world.settle()
    assert world.pods == before
    assert (world.allocation("a").nodes, world.allocation("b").nodes) == (4, 0)


SELECTED = {"nodeSelector": {"k.sh/type": "stable"}}
REQUIRED = {
    "nodeSelectorTerms": [{"matchExpressions": [{"key": "k.sh/type", "operator": "Exists"}]}]
}
AFFINE = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": REQUIRED}}


@pytest.mark.parametrize("chosen", [SELECTED, {"affinity": AFFINE}], ids=["selector", "affinity"])
def test_a_job_that_selects_its_pool_itself_has_no_places(chosen: Obj) -> None:
    mine = job("a", 2, 1)
    mine["spec"]["replicaSpecs"]["worker"]["template"]["spec"] |= chosen
    writes = decide([mine], Pools.of(2, 2).hosts, (), POOLED, NOW)
    assert writes["default", "a"].nodes == 2
    assert writes["default", "a"].placements == []


SPOT_TAINT = {"key": "k.sh/spot", "value": "spot", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("tolerations", "usable"),
    [
        ([], False),
        ([{"key": "k.sh/spot", "value": "spot"}], True),
        ([{"key": "k.sh/spot", "operator": "Exists", "effect": "NoSchedule"}], True),
        ([{"operator": "Exists"}], True),
        ([{"key": "k.sh/spot", "value": "spot", "effect": "NoExecute"}], False),
        ([{"key": "k.sh/spot"}], False),
    ],
)
def test_a_pool_with_a_taint_that_a_job_does_not_tolerate_is_no_place(
    tolerations: list[Obj], usable: bool
) -> None:
    """A taint that all pools have does not matter: the cluster may add its toleration."""
    mine = job("a", 3, 3)
    mine["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["tolerations"] = tolerations
    hosts = []
    for number in range(8):
        pool, spot = ("cheap", True) if number < 4 else ("stable", False)
        obj = node(f"h{number}")
        obj["metadata"]["labels"] = {
            "k.sh/type": pool,
            "elasticjob.dlrover/spot": str(spot).lower(),
        }
        taints = [{"key": "gpu", "effect": "NoSchedule"}, *[SPOT_TAINT] * spot]
        taints += [{"key": "node.kubernetes.io/x", "effect": "NoExecute"}] * (not spot)
        obj["spec"]["taints"] = taints
        hosts.append(Host.of(obj, {}, "k.sh/type"))
    (one,) = decide([mine], hosts, (), POOLED, NOW)["default", "a"].placements
    assert (one.name, one.nodes) == ("cheap" if usable else "stable", 3)


def test_a_spot_host_with_pods_that_takes_no_more_is_reclaimed_once() -> None:
    world = Pools.of(1, 3, job("a", 3, 1))
    world.settle()
    gone, watched = reclaimed({}, world.hosts, world.pods, NOW)
    assert (gone, watched) == ([], dict.fromkeys(("b0", "b1", "b2"), "cheap"))
    late = [replace(h, open=False, lost_at=NOW) if h.name == "b0" else h for h in world.hosts]
    assert reclaimed(watched, late, world.pods, NOW) == ([], watched), "it may come back"
    assert reclaimed(watched, late, (), NOW + 60) == ([], {"b0": "cheap"}), "and even later"
    gone, after = reclaimed(watched, late[:1] + late[2:], world.pods, NOW + 60)
    assert (gone, after) == (["cheap"], dict.fromkeys(("b1", "b2"), "cheap"))
    assert reclaimed(after, late[:1] + late[2:], world.pods, NOW + 70) == ([], after)
    gone, _ = reclaimed(after, world.hosts[:1], (), NOW)
    assert gone == ["cheap", "cheap"]


def test_a_cordon_by_hand_is_no_reclaim_and_the_taint_of_a_cloud_is_one() -> None:
    world = Pools.of(1, 2, job("a", 2, 1))
    world.settle()
    _, watched = reclaimed({}, world.hosts, world.pods, NOW)
    about = node("b0")
    about["metadata"]["labels"] = {"k.sh/type": "cheap"}
    about["spec"] = {"unschedulable": True}
    by_hand = [replace(Host.of(about, {}, "k.sh/type"), spot=True), *world.hosts[2:]]
    gone, after = reclaimed(watched, by_hand, world.pods, NOW)
    assert (gone, after) == ([], {"b1": "cheap"})
    assert reclaimed(after, world.hosts[2:], world.pods, NOW)[0] == [], "it was drained before"
    about["spec"]["taints"] = [{"key": LEAVING[1], "effect": "NoSchedule"}]
    told = [replace(Host.of(about, {}, "k.sh/type"), spot=True), *world.hosts[2:]]
    gone, after = reclaimed(watched, told, world.pods, NOW)
    assert (gone, after) == (["cheap"], {"b1": "cheap"})
    assert reclaimed(after, told, world.pods, NOW) == ([], after), "it counts once"


@pytest.mark.parametrize(
    "shared", [SharedHosts(), SharedHosts(capacity=4)], ids=["hosts", "number"]
)
@pytest.mark.parametrize("pods", [["h0"] * 9, [""] * 9, EVERYWHERE], ids=["one", "none", "all"])
@pytest.mark.parametrize(
    "other",
    [None, ENDED, SUSPENDED_JOB, DELETED, UNREADABLE, opted_out("x", 9, 9), job("x", 9, 5)],
    ids=["gone", "ended", "suspended", "deleted", "unreadable", "out", "waits"],
)
def test_no_pods_of_others_take_the_nodes_of_a_job(
    other: Obj | None, pods: list[str], shared: SharedHosts
) -> None:
    """Whoever may write Pods may write any number, without requests, and name any host."""
    jobs = [member(), *([other] if other else [])]
    writes = decide(jobs, HOSTS, [*forged("x", *pods), *MEMBERS], shared, NOW)
    assert sizes(writes).get("a", 4) == 4


@pytest.mark.parametrize(
    ("desired", "pods"),
    [(100, []), (1, [""] * 9), (1, ["h0"] * 9)],
    ids=["status", "pending", "one host"],
)
def test_a_job_holds_no_more_nodes_than_it_may_have(desired: int, pods: list[str]) -> None:
    x = job("x", 1, 1)
    x["status"] = {"allocation": {"nodes": 1}, "training": {"phase": "Running", "desired": desired}}
    writes = decide([x, job("b", 3, 3)], HOSTS, forged("x", *pods), SharedHosts(), NOW)
    assert sizes(writes)["b"] == 3


def test_nodes_that_were_taken_from_a_job_are_not_free_before_their_pods_are_gone() -> None:
    """Pods of others on the same hosts do not count beside them."""
    x = job("x", 1, 1)
    x["status"] = {"allocation": {"nodes": 1}, "training": {"phase": "Running", "desired": 1}}
    pods = [*forged("gone", *EVERYWHERE), *forged("x", *EVERYWHERE)]
    writes = decide([x, job("b", 1, 1)], HOSTS, pods, SharedHosts(), NOW)
    assert sizes(writes)["b"] == 0, "its replicas were lowered from 4 to 1"
    assert sizes(writes).get("x", 1) == 1


@pytest.mark.parametrize("placed", [0, 2])
def test_hosts_that_a_job_outside_is_about_to_take_are_no_further_nodes(placed: int) -> None:
    out, a = opted_out("out", 3, 3), member(1)
    pods = forged("out", *EVERYWHERE[1:][:placed], *[""] * (placed > 0))
    writes = decide([out, a], HOSTS, [MEMBERS[0], *pods], SharedHosts(), NOW)
    assert sizes(writes).get("a", 1) == 1
    b = job("b", 4 - 1 - placed, 4 - 1 - placed)
    writes = decide([out, a, b], HOSTS, [MEMBERS[0], *pods], SharedHosts(), NOW)
    assert sizes(writes)["b"] == 3 - placed, "minima come first"
    out["spec"]["replicaSpecs"]["worker"]["replicas"] = placed or 1
    writes = decide([out, a], HOSTS, [MEMBERS[0], *pods], SharedHosts(), NOW)
    assert sizes(writes)["a"] == 4 - (placed or 1), "its spec allows no more"


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(0, 20))
def test_pods_without_a_host_take_no_node(world: World, desired: int) -> None:
    world.settle()
    world.outside = [opted_out("out", 20, desired)]
    assert all(one.nodes >= world.granted(key[1]) for key, one in world.decide().items())


def test_pods_that_hold_no_shared_host_take_no_room() -> None:
    """Whoever may write Pods may write them as those of another namespace's job, or of none."""
    out = opted_out("out", 1, 100_000)
    hosts = [Host(name, 1, True) for name in ("h1", "h2", "h3")]
    of_job = HeldPod(("default", "u-out"), "h1", True)
    stray = HeldPod.of(
        {
            "metadata": {
                "name": "x",
                "namespace": "other",
                "ownerReferences": [{"kind": names.KIND, "uid": "u-a"}],
            }
        }
    )
    elsewhere = [replace(of_job, host=host) for host in ("", "of another pool")]
    pods = [of_job, *elsewhere * 9, *[stray] * 9]
    writes = decide([out, job("a", 3, 1)], hosts, pods, SharedHosts(), NOW)
    assert sizes(writes) == {"a": 2}


def test_a_suspended_job_asks_again_when_it_resumes() -> None:
    world = World({"a": job("a", 4, 2)}, SharedHosts(capacity=4))
    world.settle()
    world.jobs["a"]["spec"]["suspend"] = True
    world.jobs["b"] = job("b", 4, 1)
    world.write(world.decide())
    assert (world.granted("a"), world.granted("b")) == (0, 0)
    assert world.reason("a") == "held back: the job was suspended"
    world.pods["a"] = 0
    world.write(world.decide())
    assert world.granted("b") == 4
    world.follow(["b"])
    world.jobs["a"]["spec"]["suspend"] = False
    world.write(world.decide())
    assert (world.granted("a"), world.granted("b")) == (0, 2)


def node(name: str = "h", *, gpus: str = "8", ready: str = "True", cordoned: bool = False) -> Obj:
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name},
        "spec": {"unschedulable": True} if cordoned else {},
        "status": {"allocatable": {"g/gpu": gpus, "cpu": "15500m"}, "conditions": conditions},
    }


def test_hosts_count_by_what_is_allocatable() -> None:
    shared = SharedHosts(selector="pool=a", slot={"g/gpu": quantity("4"), "cpu": quantity("2")})
    nodes = [node("a"), node("b", gpus="4"), node("c", gpus="0"), node("d", ready="Unknown"),
             node("e", cordoned=True)]  # fmt: skip
    hosts = [Host.of(obj, shared.slot) for obj in nodes]
    assert [host.slots for host in hosts] == [2, 1, 0, 2, 2]
    assert [Host.of(obj, {}).slots for obj in nodes] == [1, 1, 1, 1, 1]
    noticed = node("f")
    noticed["spec"] = {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}
    assert not Host.of(noticed, {}).usable(NOW), "it is about to be taken away"
    noticed["spec"] = {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}
    assert Host.of(noticed, {}).open
    labels = {"k.sh/type": "cheap", "cloud.google.com/gke-spot": "true"}
    noticed["metadata"]["labels"] = labels
    pooled = Host.of(noticed, {}, "k.sh/type")
    assert (pooled.pool, pooled.spot, pooled.slots) == ("cheap", True, 1)
    unpooled = Host.of(noticed, {}, "k.sh/other")
    assert (unpooled.slots, unpooled.usable(NOW)) == (1, False)
    assert decide([job("a", 9, 1)], hosts, (), shared, NOW)["default", "a"].nodes == 3
    a = "default", "u-a"
    pods = [HeldPod(a, host, True) for host in ("a", "e", "")] + [HeldPod(a, "e", False)]
    here = decide([job("a", 9, 1)], hosts, pods, shared, NOW)
    assert here["default", "a"].nodes == 4, "a cordoned host counts with the Pod that it has"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("500m", 0.5),
        ("64Gi", 2**36),
        ("1e3", 1000),
        ("2k", 2000),
        ("1.5Mi", 1572864),
    ],
)
def test_quantities(text: str, value: float) -> None:
    assert float(quantity(text)) == value


@pytest.mark.parametrize("text", ["", "Gi", "8 GB", "nan", "inf", "-"])
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="expected a quantity"):
        quantity(text)


def test_the_command_line_says_what_is_shared() -> None:
    image = "--master-image=m"
    assert Settings.parse([image]).shared is None
    assert Settings.parse([image, "--allocator-capacity=6"]).shared == SharedHosts(capacity=6)
    hosts = ["--allocator-nodes=a=b", "--allocator-slot=g/gpu=8", "--allocator-hold=20"]
    wanted = SharedHosts(selector="a=b", slot={"g/gpu": quantity("8")}, hold_s=20.0)
    assert Settings.parse([image, *hosts]).shared == wanted
    with pytest.raises(ConfigError, match="expected one of them, found both"):
        Settings.parse([image, "--allocator-capacity=6", "--allocator-nodes=a"])
    pooled = Settings.parse([image, hosts[0], "--allocator-pools=k.sh/type"]).shared
    assert pooled == SharedHosts(selector="a=b", pool_label="k.sh/type")
    with pytest.raises(ConfigError, match="--allocator-pools needs --allocator-nodes"):
        Settings.parse([image, "--allocator-capacity=6", "--allocator-pools=k.sh/type"])
    with pytest.raises(ConfigError, match="--allocator-slot needs --allocator-nodes"):
        Settings.parse([image, "--allocator-capacity=6", "--allocator-slot=cpu=1"])
    for wrong in (
        "--allocator-pools=pool",
        "--allocator-slot=8",
        "--allocator-slot=cpu=0",
        "--allocator-capacity=-1",
    ):
        with pytest.raises(SystemExit):
            Settings.parse([image, wrong])
