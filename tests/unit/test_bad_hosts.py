"""Hosts that fail in several jobs: what is noted, counted, told and avoided."""

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlrover_operator.host_watch import decide
from dlrover_py.bad_hosts import (
    AHEAD_S,
    WEIGHTS,
    HostPolicy,
    HostRecord,
    HostScores,
    bad_hosts,
    to_avoid,
)
from dlrover_py.master.core.events import JobChanged, NodeSeen
from dlrover_py.protocol.agents import (
    Confidence,
    FailureCause,
    FailureClass,
    FailureKind,
    WorkerFailure,
)
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.hosts import BadHosts, HostFaultKind
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import HostFault
from tests.builders import Bench, elastic_job, job_file, running
from tests.unit.test_scale import FLAT, work

POLICY = HostPolicy()
DAY = POLICY.half_life_s
NAMES = [f"h{i}" for i in range(6)]
FAULTS = st.builds(
    HostFault,
    host=st.sampled_from(NAMES),
    at=st.floats(0, 10 * DAY),
    kind=st.sampled_from(HostFaultKind),
)
OF_JOBS = st.dictionaries(st.sampled_from("abcd"), st.lists(FAULTS, max_size=32), max_size=4)
NOW = st.floats(0, 20 * DAY)


def records_of(faults: dict[str, list[HostFault]], now: float) -> list[HostRecord]:
    return HostScores({"default": faults}, now, POLICY).records("default")


def fault(host: str, at: float = 0.0, kind: HostFaultKind = HostFaultKind.HARDWARE) -> HostFault:
    return HostFault(host=host, at=at, kind=kind)


# --- How faults count ---


@given(OF_JOBS, NOW, st.integers(0, 100), st.sets(st.sampled_from(NAMES)))
def test_few_hosts_are_avoided_and_those_with_the_highest_scores(
    faults: dict[str, list[HostFault]], now: float, hosts: int, before: set[str]
) -> None:
    records = records_of(faults, now)
    found = bad_hosts(records, before, POLICY)
    assert all(record.score >= POLICY.over * POLICY.limit for record in found)
    assert all(len(record.jobs) > 1 for record in found)
    assert [
        record for record in records if record.score >= POLICY.limit or record in found
    ] == found
    avoided = to_avoid(found, hosts, POLICY)
    assert len(avoided) <= POLICY.share * hosts
    assert avoided == [record.name for record in found[: len(avoided)]]


@given(st.lists(FAULTS, max_size=100), NOW)
def test_no_job_alone_makes_a_host_bad(faults: list[HostFault], now: float) -> None:
    records = records_of({"a": faults}, now)
    assert not bad_hosts(records, {fault.host for fault in faults}, POLICY)


@given(OF_JOBS, NOW, st.floats(0, 10 * DAY))
def test_scores_fall_with_time(
    faults: dict[str, list[HostFault]], now: float, later: float
) -> None:
    now = max([now, *(one.at for of_job in faults.values() for one in of_job)])
    first = {r.name: r.score for r in records_of(faults, now)}
    then = {r.name: r.score for r in records_of(faults, now + later)}
    assert first.keys() == then.keys()
    assert all(then[name] <= score + 1e-9 for name, score in first.items())


def test_two_jobs_with_failed_devices_make_a_host_bad_for_most_of_a_day() -> None:
    faults = {"a": [fault("h1")], "b": [fault("h1"), fault("h2"), fault("h2")]}

    def bad(now: float, *before: str) -> list[str]:
        return [r.name for r in bad_hosts(records_of(faults, now), before, POLICY)]

    assert bad(0.0) == ["h1"]
    assert bad(0.4 * DAY) == ["h1"]
    assert bad(0.5 * DAY) == []
    assert bad(0.5 * DAY, "h1") == ["h1"], "it stays bad for a while"
    assert bad(0.9 * DAY, "h1") == []


# --- What the operator decides ---


def obj(
    name: str, *faults: HostFault, nodes: int = 30, space: str = "default", **status: Any
) -> dict[str, Any]:
    document = job_file(2)
    document["metadata"] = {"name": name, "namespace": space, "uid": name}
    training = {
        "hostFaults": [one.model_dump(mode="json", by_alias=True) for one in faults],
        "nodes": [{"phase": "Running", "host": f"h{i}"} for i in range(nodes)],
    }
    document["status"] = {"training": training, **status}
    return document


def bad_objects(**status: Any) -> list[dict[str, Any]]:
    a, b = obj("a", fault("h1"), phase="Failed"), obj("b", fault("h1"), fault("h2"))
    ended = {"type": "Failed", "status": "True"}
    a["status"]["conditions"] = [ended]
    b["status"].update(status)
    return [a, b]


def test_running_jobs_are_told_and_faults_of_ended_ones_count() -> None:
    ((key, told),) = decide(bad_objects(), "act", 0.0).items()
    assert key == ("default", "b")
    assert told == BadHosts(
        hosts=["h1"],
        avoid=["h1"],
        reason="hosts have failed in several jobs: h1 (2 hardware in 2 jobs); new nodes avoid h1",
    )
    ((_, told),) = decide(bad_objects(), "tell", 0.0).items()
    assert told is not None
    assert not told.avoid
    assert told.reason.endswith("; they are not avoided")


def test_nothing_is_written_again_and_what_is_over_is_removed() -> None:
    written = decide(bad_objects(), "act", 0.0)["default", "b"]
    assert written is not None
    told = written.model_dump(by_alias=True)
    assert not decide(bad_objects(badHosts=told), "act", 10.0)
    assert decide(bad_objects(badHosts=told), "off", 10.0) == {("default", "b"): None}
    assert decide(bad_objects(badHosts=told), "act", 3 * DAY) == {("default", "b"): None}
    assert not decide(bad_objects(), "off", 0.0)


def test_a_namespace_alone_makes_no_host_bad_for_the_jobs_of_others() -> None:
    """Its users may write any status of their jobs, and make any number of jobs."""
    theirs = [obj(f"t{i}", *[fault(f"h{n}") for n in range(30)], space="t") for i in range(9)]
    mine = obj("m", space="m")
    assert {key[0] for key in decide([*theirs, mine], "act", 0.0)} == {"t"}
    both = decide([*theirs, mine, obj("n", fault("h7"), space="n")], "act", 0.0)
    told = both["m", "m"]
    assert told is not None
    assert told.hosts == ["h7"], "two other namespaces agree"
    assert told.reason.startswith("hosts have failed in several jobs: h7 (10 hardware in 10 jobs)")


@pytest.mark.parametrize("invented", [0, 100])
def test_a_namespace_alone_cannot_raise_the_number_of_hosts(invented: int) -> None:
    """Of fewer than ten hosts none is avoided, whatever another namespace writes."""
    mine = obj("m", fault("h1"), nodes=4, space="m")
    theirs = obj("t", fault("h1"), nodes=invented, space="t")
    told = decide([mine, theirs], "act", 0.0)["m", "m"]
    assert told is not None
    assert (told.hosts, told.avoid) == (["h1"], [])
    more = obj("u", nodes=invented, space="u")
    told = decide([mine, theirs, more], "act", 0.0)["m", "m"]
    assert told is not None
    assert told.avoid == (["h1"] if invented else []), "two namespaces are believed"


def test_a_small_cluster_loses_no_host() -> None:
    jobs = [obj(name, fault("h1"), nodes=9) for name in "ab"]
    told = decide(jobs, "act", 0.0)["default", "a"]
    assert told is not None
    assert (told.hosts, told.avoid) == (["h1"], [])


def test_a_status_of_another_form_does_no_harm() -> None:
    odd = obj("c", badHosts=7)
    odd["status"]["training"]["hostFaults"] = [{"host": 3}, "x", {"host": "h1", "kind": "new"}]
    odd["status"]["training"]["nodes"] = None
    assert not decide([odd], "act", 0.0)


@pytest.mark.parametrize("name", ["a b", "H1", "-h", "h" * 254, "h1\n"])
def test_what_cannot_be_a_host_is_in_no_pod(name: str) -> None:
    jobs = [obj(which, fault(name)) for which in "ab"]
    assert not decide(jobs, "act", 0.0)


def test_a_fault_far_in_the_future_does_not_count() -> None:
    jobs = [obj(which, fault("h1", at=1e6)) for which in "ab"]
    assert not decide(jobs, "act", 0.0)
    assert decide(jobs, "act", 1e6)


def test_what_an_ended_job_was_told_keeps_no_host_bad() -> None:
    jobs = bad_objects()
    jobs[0]["status"]["badHosts"] = {"hosts": ["h1"], "avoid": [], "reason": "x"}
    later = next(at for at in range(0, int(3 * DAY), 600) if not decide(bad_objects(), "tell", at))
    assert not decide(jobs, "tell", later)


@dataclass(frozen=True)
class Case:
    """A job, as far as the decision is concerned."""

    space: str
    faults: list[HostFault]
    nodes: set[str]
    before: set[str]
    ended: bool

    def made(self, name: str) -> dict[str, Any]:
        made = obj(name, *self.faults, space=self.space)
        made["status"]["training"]["nodes"] = [{"host": host} for host in self.nodes]
        if self.before:
            made["status"]["badHosts"] = {"hosts": sorted(self.before)}
        if self.ended:
            made["status"]["conditions"] = [{"type": "Failed", "status": "True"}]
        return made


CASES = st.lists(
    st.builds(
        Case,
        space=st.sampled_from("mtuv"),
        faults=st.lists(
            st.builds(
                fault,
                st.sampled_from(NAMES[:3]),
                st.floats(0, DAY),
                st.sampled_from(HostFaultKind),
            ),
            max_size=4,
        ),
        nodes=st.sets(st.sampled_from(NAMES)),
        before=st.sets(st.sampled_from(NAMES)),
        ended=st.booleans(),
    ),
    max_size=8,
)


def defined(cases: list[Case], space: str, now: float) -> tuple[list[str], list[str]]:
    """The bad hosts of a namespace and those to avoid, one namespace after the other."""
    worth, namers = defaultdict[tuple[str, str], float](float), dict[str, set[str]]()
    for number, case in enumerate(cases):
        source = f"job {number}" if case.space == space else case.space
        for host in case.nodes | {one.host for one in case.faults}:
            namers.setdefault(host, set()).add(case.space)
        for one in case.faults:
            if one.at <= now + AHEAD_S:
                age = max(0.0, now - one.at) / DAY
                worth[one.host, source] += WEIGHTS[one.kind] * 0.5**age
    before = {h for c in cases if c.space == space and not c.ended for h in c.before}
    score = defaultdict[str, float](float)
    for (host, _), value in worth.items():
        score[host] += min(value, 1.0)
    bad = [h for h in score if round(score[h], 9) >= (1.125 if h in before else 1.5)]
    bad.sort(key=lambda host: (-round(score[host], 9), host))
    known = [host for host, who in namers.items() if space in who or len(who) > 1]
    return bad, bad[: len(known) // 2]


@given(CASES, st.floats(0, DAY))
@example([Case(s, [fault("h1")], {f"{s}2", f"{s}3"}, set(), False) for s in "mtu"], 0.0)
def test_each_namespace_gets_what_is_defined(cases: list[Case], now: float) -> None:
    found = decide(
        [case.made(f"j{i}") for i, case in enumerate(cases)], "act", now, HostPolicy(share=0.5)
    )
    for i, case in enumerate(cases):
        bad, avoid = defined(cases, case.space, now)
        told = found.get((case.space, f"j{i}"))
        if told is not None:
            assert (told.hosts, told.avoid) == (bad, avoid)
        elif case.ended or (case.space, f"j{i}") not in found:
            same = (case.before, set[str]()) == (set(bad), set(avoid))
            assert case.ended or same, "it has what it would be told"
        else:
            assert case.before
            assert not bad


def spread(jobs: int, spaces: int) -> list[dict[str, Any]]:
    """Jobs in so many namespaces. Five hosts fail in all, each other one in a single job."""
    return [
        obj(f"j{i}", fault(f"h{i}"), fault(f"bad{i % 5}"), nodes=4, space=f"s{i % spaces}")
        for i in range(jobs)
    ]


@pytest.mark.parametrize("mode", ["off", "tell", "act"])
def test_the_cost_does_not_grow_with_faults_times_namespaces(
    mode: Literal["off", "tell", "act"],
) -> None:
    def cost(jobs: int, spaces: int, mode: Literal["off", "tell", "act"] = mode) -> int:
        """Bytecodes of the decision."""
        objects = spread(jobs, spaces)
        return work(lambda: decide(objects, mode, 0.0), ("/bad_hosts.py", "host_watch.py"))

    assert cost(800, 400) <= FLAT * 8 * cost(100, 50)
    assert cost(200, 100) <= FLAT * 2 * cost(200, 1)
    if mode == "off":
        assert cost(200, 100) <= 0.5 * cost(200, 100, "tell")


# --- What a master notes, and does ---


def noted(bench: Bench) -> list[tuple[str, str]]:
    status = bench.job.status(bench.now, bench.now)
    return [(one.host, one.kind) for one in status.host_faults]


def failure(what: FailureClass) -> WorkerFailure:
    sure = Confidence.SURE
    return WorkerFailure(
        kind=FailureKind.EXCEPTION,
        local_rank=0,
        rank=0,
        pid=7,
        exit_code=1,
        message="died",
        cause=FailureCause(failure_class=what, confidence=sure, evidence="", advice=""),
    )


@pytest.mark.parametrize("what", FailureClass)
def test_only_failed_devices_count_against_a_host(what: FailureClass) -> None:
    bench = running(elastic_job(3))
    bench.agent("n1").fail(failure(what))
    bench.pass_time(2.0)
    expected = [("n1", "hardware")] if what is FailureClass.HARDWARE else []
    assert noted(bench) == expected


def silent(bench: Bench) -> None:
    """n1 falls silent, and there is no room for the node that replaces it."""
    bench.set_capacity(2)
    bench.agent("n1").frozen = True
    bench.pass_time(6.0)
    bench.step(NodeSeen(NodeId("n3"), False, message="0/3 nodes are available"))


def told(bench: Bench, job: ElasticJob, bad: BadHosts | None) -> None:
    status = {} if bad is None else {"badHosts": bad.model_dump(by_alias=True)}
    bench.step(JobChanged(job.with_status_of({"status": status})))


@pytest.mark.parametrize("avoid", [True, False])
def test_new_nodes_avoid_the_bad_hosts_of_other_jobs(avoid: bool) -> None:
    job = elastic_job(3, 2)
    bench = running(job)
    bad = BadHosts(hosts=["h8", "h9"], avoid=["h9"] if avoid else [], reason="they failed")
    told(bench, job, bad)
    told(bench, job, bad)
    (event,) = [e for e in bench.job.state.events if e.reason == EventReason.BAD_HOSTS]
    assert event.message == "they failed"
    silent(bench)
    assert noted(bench) == [("n1", "lost")]
    assert bench.avoided[NodeId("n3")] == (("h9", "n1") if avoid else ("n1",))
    told(bench, job, None)
    assert bench.reasons().count(EventReason.BAD_HOSTS) == 2


def test_bad_hosts_are_used_if_there_is_no_room_elsewhere() -> None:
    job = elastic_job(3, 2)
    bench = running(job)
    told(bench, job, BadHosts(hosts=["h8"], avoid=["h8"]))
    silent(bench)
    bench.pass_time(25.0)
    assert bench.avoided[NodeId("n4")] == ()
    bench.step(NodeSeen(NodeId("n4"), False, message="0/3 nodes are available"))
    bench.pass_time(60.0)
    assert NodeId("n5") not in bench.avoided, "n4 is not requested again"


def test_no_file_can_name_bad_hosts() -> None:
    with pytest.raises(ConfigError, match="badHosts: unknown field"):
        ElasticJob.parse(job_file(2) | {"badHosts": {"hosts": ["h1"]}})
    read = ElasticJob.read(
        job_file(2) | {"status": {"badHosts": {"hosts": ["h1"], "avoid": ["h1"]}}}
    )
    assert read.bad_hosts == BadHosts(hosts=["h1"], avoid=["h1"])
    assert ElasticJob.read(json.loads(read.model_dump_json(by_alias=True))) == read
