"""Spot hosts: which nodes may be on them, and what happens once they are taken away too often."""

from typing import Any

from dlrover_py.master.core.events import NodeEnded, NodeSeen, Rules
from dlrover_py.master.core.rendezvous import CandidateNode, arrange
from dlrover_py.master.core.spot import RECLAIMS, WITHIN_S
from dlrover_py.master.platform.kubernetes.pods import PodContext, pod
from dlrover_py.protocol.autoscale import NodeAllocation, PodPlace
from dlrover_py.protocol.hosts import SPOT_LABELS
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import LABEL_QUEUE, NodeId
from tests.builders import Bench, elastic_job, job_file, running

POLICY: dict[str, Any] = {"spotPolicy": "onDemandMin"}


def stable(bench: Bench) -> list[str]:
    """The nodes that are there and must be on stable hosts."""
    return [n.id for n in bench.job.live.nodes if n.alive and n.record.stable]


def reclaim(bench: Bench, node: str) -> None:
    """Have the platform take a node away with notice."""
    bench.step(NodeSeen(NodeId(node), True, leaving="its host is taken away", grace_s=30.0))
    bench.pods.pop(NodeId(node), None)
    bench.agent(node).ended = True
    bench.step(NodeEnded(NodeId(node), "was taken away", free=True))
    bench.settle()


PLACED = NodeAllocation(nodes=3, placements=[PodPlace(name="spot", nodes=3)])


def on_spot(bench: Bench) -> str:
    """A node that may be on a spot host."""
    return next(n.id for n in bench.job.live.nodes if n.alive and not n.record.stable)


def test_the_minimum_is_on_stable_hosts_and_stays_there() -> None:
    bench = running(elastic_job(4, 2, **POLICY))
    assert stable(bench) == ["n0", "n1"]
    bench.pods.pop(NodeId("n0"), None)
    bench.agent("n0").ended = True
    bench.step(NodeEnded(NodeId("n0"), "was lost", exit_code=137))
    bench.settle()
    assert stable(bench) == ["n1", "n4"], "a stable node is replaced by one"
    bench.change(bench.spec.scaled(2))
    bench.pass_time(10.0)
    assert {n.id for n in bench.job.live.nodes if n.alive} == {"n1", "n4"}, "spot hosts go first"


def test_as_many_nodes_are_stable_as_the_least_size_has() -> None:
    scaling = {"mode": "auto", "sizes": [3, 4]}
    bench = running(elastic_job(4, 2, maxReplicas=4, autoscale=scaling, **POLICY))
    assert len(stable(bench)) == 3, "a round needs as many"


def test_without_the_policy_or_its_platform_nothing_is_stable() -> None:
    queued = job_file(3, minReplicas=2, **POLICY)
    queued["metadata"]["labels"] = {LABEL_QUEUE: "q"}
    for job, rules in (
        (elastic_job(3, 2), Rules()),
        (elastic_job(3, 2, **POLICY), Rules(avoids_hosts=False)),
        (ElasticJob.parse(queued), Rules()),
        (elastic_job(3, 2, **POLICY).allocated(PLACED), Rules()),
    ):
        bench = running(job, rules)
        assert not stable(bench)
        for _ in range(RECLAIMS + 1):
            reclaim(bench, on_spot(bench))
        assert len([n for n in bench.job.live.nodes if n.alive]) == 3


def test_spot_hosts_that_are_taken_away_too_often_get_no_new_node_for_a_while() -> None:
    bench = running(elastic_job(4, 2, **POLICY))
    for count in range(RECLAIMS):
        assert "SpotHeld" not in bench.reasons(), count
        reclaim(bench, on_spot(bench))
    assert bench.reasons().count("SpotHeld") == 1
    alive = [n for n in bench.job.live.nodes if n.alive]
    assert len(alive) == 3, "the last one has no successor"
    bench.restart_master()
    bench.settle()
    assert len([n for n in bench.job.live.nodes if n.alive]) == 3, "the next master knows it"
    bench.pass_time(WITHIN_S + 60, exchange_s=3.0)
    bench.settle()
    assert len([n for n in bench.job.live.nodes if n.alive]) == 4


def test_a_pod_that_its_kubelet_has_refused_or_evicted_is_no_reclaim() -> None:
    bench = running(elastic_job(4, 2, **POLICY))
    for _ in range(RECLAIMS):
        lost = NodeId(on_spot(bench))
        bench.pods.pop(lost, None)
        bench.agent(lost).ended = True
        bench.step(NodeEnded(lost, "Evicted: its disk was full", free=True, by_platform=True))
        bench.settle()
    assert "SpotHeld" not in bench.reasons()
    assert len([n for n in bench.job.live.nodes if n.alive]) == 4


def test_a_host_that_is_shut_down_counts_though_its_agent_said_so_first() -> None:
    bench = running(elastic_job(4, 2, **POLICY))
    for _ in range(RECLAIMS):
        lost = NodeId(on_spot(bench))
        agent = bench.agent(lost)
        bench.say(agent, agent.report().model_copy(update={"leaving": "SIGTERM"}))
        bench.pods.pop(lost, None)
        agent.ended = True
        bench.step(NodeEnded(lost, "NodeShutdown", free=True, by_platform=True))
        bench.settle()
    assert bench.reasons().count("SpotHeld") == 1


def test_a_large_job_may_lose_more_nodes() -> None:
    bench = running(elastic_job(100, 2, **POLICY))
    for _ in range(4):
        reclaim(bench, on_spot(bench))
    assert "SpotHeld" not in bench.reasons(), "less than 5 % of the nodes"
    reclaim(bench, on_spot(bench))
    assert "SpotHeld" in bench.reasons()


def test_a_clock_that_went_back_and_a_resume_end_the_rest() -> None:
    for back in (True, False):
        bench = running(elastic_job(4, 2, **POLICY))
        for _ in range(RECLAIMS):
            reclaim(bench, on_spot(bench))
        if back:
            bench.job.state.new_nodes.reclaims = [
                t + 1e7 for t in bench.job.state.new_nodes.reclaims
            ]
            bench.step()
        else:
            bench.change(bench.spec.suspended(True))
            bench.settle()
            bench.change(bench.spec.suspended(False))
        bench.settle()
        assert len([n for n in bench.job.live.nodes if n.alive]) == 4


def test_a_stable_node_is_replaced_also_while_spot_hosts_get_none() -> None:
    bench = running(elastic_job(4, 2, **POLICY))
    for _ in range(RECLAIMS):
        reclaim(bench, on_spot(bench))
    lost = stable(bench)[0]
    reclaim(bench, lost)
    assert len(stable(bench)) == 2
    assert bench.reasons().count("SpotHeld") == 1, "its end says nothing about spot hosts"


def test_members_on_stable_hosts_stay_in_a_smaller_round() -> None:
    place = ("zone", "rack", "host")
    before = [(NodeId(f"n{i}"), place) for i in range(4)]
    there = [CandidateNode(n, 1, 1, place, stable=n in ("n2", "n3")) for n, _ in before]
    for size, left in ((3, ["n0", "n2", "n3"]), (2, ["n2", "n3"]), (1, ["n2"])):
        assert [m.node for m in arrange(there, size, before)] == left


# --- Pods ---


def made(stable: bool, affinity: Any = None, **worker: Any) -> Any:
    document = job_file(4, **worker)
    if affinity is not None:
        document["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["affinity"] = affinity
    context = PodContext(uid="u", master_addr="1.2.3.4:5")
    made = pod(ElasticJob.parse(document), NodeId("n7"), context, stable=stable)
    return made["spec"].get("affinity")


def test_a_stable_pod_is_kept_off_spot_hosts_in_every_alternative_of_the_template() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}, {"matchFields": [zone]}]}
    given = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    found = made(True, given, **POLICY)["nodeAffinity"]
    assert list(found) == ["requiredDuringSchedulingIgnoredDuringExecution"]
    first, second = found["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    spot = [{"key": k, "operator": "NotIn", "values": [v]} for k, v in SPOT_LABELS.items()]
    assert first == {"matchExpressions": [zone, *spot]}
    assert second == {"matchFields": [zone], "matchExpressions": spot}


def test_another_pod_prefers_spot_hosts_and_none_does_without_the_policy() -> None:
    found = made(False, **POLICY)["nodeAffinity"]
    (key,) = found
    assert key == "preferredDuringSchedulingIgnoredDuringExecution"
    labels = [e["key"] for p in found[key] for e in p["preference"]["matchExpressions"]]
    assert labels == list(SPOT_LABELS)
    assert made(False) is None
