"""Nodes that are near each other get neighbouring ranks, and whole domains are given up first."""

from collections.abc import Iterable
from itertools import combinations, groupby
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlrover_agent.settings import Settings
from dlrover_operator.host_labels import LabelledPod, missing
from dlrover_operator.settings import Settings as OperatorSettings
from dlrover_py.master.core.nodes import Node
from dlrover_py.master.core.rendezvous import CandidateNode, arrange
from dlrover_py.master.core.topology import Domain, grouped, in_words, kept
from dlrover_py.master.platform.kubernetes.pods import PodView, misplaced, view
from dlrover_py.protocol.agents import MAX_LEVELS, AgentReport, Offer
from dlrover_py.protocol.autoscale import PodPlace
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import KIND, LABEL_PLACEMENT, NodeId
from tests.builders import Bench, elastic_job, job_file, running

names = st.sampled_from(["", "a", "b", "c"])
domains = st.lists(names, max_size=3).map(tuple)
trees = st.lists(domains, max_size=12)


def prefixes(domain: Domain, depth: int = 3) -> list[Domain]:
    padded = (*domain, *[""] * depth)
    return [padded[:level] for level in range(1, depth + 1)]


@given(trees, st.sets(st.integers(0, 11)))
def test_the_order_by_domain(nodes: list[Domain], settled: set[int]) -> None:
    order = list(enumerate(nodes))
    found = grouped(order, settled)
    assert sorted(found) == list(range(len(nodes))), "a permutation"
    for level in range(3):
        runs = [key for key, _ in groupby(prefixes(nodes[n])[level] for n in found)]
        assert len(runs) == len(set(runs)), "each domain is in one piece"
        for wider, of_it in groupby(runs, key=lambda run: run[:-1]):
            inside = [run[-1] for run in of_it]
            assert "" not in inside[:-1], f"what is not known comes last in {wider}"
    for domain in set(map(tuple, map(prefixes, nodes))):
        within = [n for n in found if tuple(prefixes(nodes[n])) == domain]
        assert within == sorted(within), "within a domain, the given order stays"
    assert grouped([(n, nodes[n]) for n in found], found) == found, "and it is stable"


@given(trees, st.data())
def test_new_nodes_move_no_domain(nodes: list[Domain], data: st.DataObject) -> None:
    """The settled nodes are in the order that they would have alone."""
    settled = data.draw(st.sets(st.integers(0, max(0, len(nodes) - 1))))
    order = list(enumerate(nodes))
    alone = grouped([(n, domain) for n, domain in order if n in settled], settled)
    assert [n for n in grouped(order, settled) if n in settled] == alone


def used(nodes: list[Domain], staying: set[int], level: int) -> tuple[int, int]:
    """How many domains of this level are in use, and how many of them in part."""
    inside: dict[Domain, list[bool]] = {}
    for at, domain in enumerate(nodes):
        inside.setdefault(prefixes(domain)[level], []).append(at in staying)
    return (
        sum(any(stay) for stay in inside.values()),
        sum(any(stay) and not all(stay) for stay in inside.values()),
    )


def check(nodes: list[Domain], count: int, level: int = 0) -> None:
    """Compare the choice with all possible ones, and so within the domain that is used in part."""
    shown = [domain[level:] for domain in nodes]
    staying = kept(shown, count)
    assert staying == sorted(set(staying))
    assert len(staying) == min(count, len(nodes))
    if level == 3:
        assert staying == list(range(len(staying))), "the first nodes stay"
        return
    best = min(used(shown, set(some), 0) for some in combinations(range(len(nodes)), len(staying)))
    assert used(shown, set(staying), 0) == best
    inside: dict[Domain, list[int]] = {}
    for at, domain in enumerate(shown):
        inside.setdefault(prefixes(domain)[0], []).append(at)
    for of_it in inside.values():
        stay = [at for at in of_it if at in staying]
        if 0 < len(stay) < len(of_it):
            below = kept([shown[at][1:] for at in of_it], len(stay))
            assert stay == [of_it[at] for at in below], "the same holds within it"
            check([nodes[at] for at in of_it], len(stay), level + 1)


@given(st.lists(domains, max_size=9), st.integers(0, 9))
@example([("a",)] * 3 + [("b",)] * 2 + [("c",)] * 4, 5)
@example([("a",)] * 4 + [("b",)] * 4 + [("c",)] * 1, 5)
def test_the_choice_of_who_stays_against_all_choices(nodes: list[Domain], count: int) -> None:
    check(nodes, count)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data())
def test_the_choice_among_domains_of_many_sizes(sizes: list[int], data: st.DataObject) -> None:
    nodes: list[Domain] = [(str(i),) for i, size in enumerate(sizes) for _ in range(size)]
    count = data.draw(st.integers(1, len(nodes)))
    in_use, in_part = used(nodes, set(kept(nodes, count)), 0)
    some = [c for n in range(1, len(sizes) + 1) for c in combinations(sizes, n) if sum(c) >= count]
    fewest = min(map(len, some))
    assert in_use == fewest
    assert in_part == (count not in [sum(c) for c in some if len(c) == fewest])


@pytest.mark.parametrize(
    ("racks", "count", "stay"),
    [
        ("aabb", 2, "aa.."),  # ties: the first nodes
        ("abbb", 3, ".bbb"),  # the fewest domains
        ("aabbbcc", 4, "aa...cc"),  # as few of them in part as possible
        ("aabbb", 4, "aabb."),  # of those in use, the last one is used in part
        ("aabb", 3, "aab."),
        ("....", 2, "00.."),  # nothing is known: today's order
    ],
)
def test_examples(racks: str, count: int, stay: str) -> None:
    nodes = [() if rack == "." else (rack,) for rack in racks]
    staying = kept(nodes, count)
    shown = "".join((r if r != "." else "0") if i in staying else "." for i, r in enumerate(racks))
    assert shown == stay


def ranks(now: str, size: int, old: str = "") -> str:
    """The order of nodes; those of names a to f are in the rack left, the others in right."""

    def place(node: str) -> tuple[str, ...]:
        return ("zone", "left" if node < "g" else "right", f"host-{node}")

    previous = [(NodeId(n), place(n)) for n in old]
    candidates = [CandidateNode(NodeId(n), 1, 1, place(n)) for n in now]
    return "".join(m.node for m in arrange(candidates, size, previous))


@pytest.mark.parametrize(
    ("old", "now", "size", "new"),
    [
        ("", "axbyc", 5, "abcxy"),  # side by side from the first round on
        ("abxy", "abcxy", 5, "abcxy"),  # one that joins moves into its rack
        ("abxy", "bxyc", 4, "cbxy"),  # and into the place of a lost one of its rack
        ("abxy", "bxyz", 4, "bzxy"),  # another rack: the survivors of both stay in order
        ("xyab", "xyab", 4, "xyab"),  # racks keep their order, whatever their names
        ("axby", "axby", 4, "abxy"),  # what became known meanwhile counts from this round on
        ("abcxy", "abcxy", 3, "abc"),
        ("abxyz", "abxyz", 3, "xyz"),  # the smaller rack is given up, and rank 0 with it
        ("abxyz", "abxyz", 4, "abxy"),
        ("", "abcxyz", 3, "abc"),  # which start is chosen in the same way
        ("", "abxyz", 3, "xyz"),
        ("abcdwxyz", "wxyev", 4, "wxyv"),  # new nodes are of the racks that are in use
        ("xy", "xyabvw", 4, "xyvw"),
    ],
)
def test_ranks_and_racks(old: str, now: str, size: int, new: str) -> None:
    assert ranks(now, size, old) == new


@given(st.lists(domains, max_size=3), st.lists(domains, max_size=7), st.integers(1, 7))
def test_new_nodes_bring_as_few_domains_as_can_be(
    stay: list[Domain], fresh: list[Domain], size: int
) -> None:
    size = max(len(stay), min(size, len(stay) + len(fresh)))
    places = [(NodeId(f"n{n}"), (*place, "host")) for n, place in enumerate([*stay, *fresh])]
    candidates = [CandidateNode(node, 1, 1, topology) for node, topology in places]
    found = {m.node for m in arrange(candidates, size, places[: len(stay)])} if size else set()
    assert found >= {node for node, _ in places[: len(stay)]}

    def widest(nodes: Iterable[NodeId]) -> int:
        return len({prefixes(dict(places)[node][:-1])[0] for node in nodes})

    of_all = combinations([node for node, _ in places[len(stay) :]], size - len(stay))
    staying = [node for node, _ in places[: len(stay)]]
    assert widest(found) == min(widest([*staying, *some]) for some in of_all)


def test_a_label_that_comes_late_moves_no_rank() -> None:
    def place(node: str, rack: str) -> tuple[str, ...]:
        return ("zone", rack, f"host-{node}")

    racks = {"n0": "l", "n1": "l", "n2": "r", "n3": "r"}
    before = [(NodeId(n), place(n, racks[n])) for n in ("n0", "n1", "n2", "n3")]
    there = [CandidateNode(n, 1, 1, topology) for n, topology in before[1:]]
    for known in (("", "", "host-n8"), ("zone", "", "host-n8"), ()):
        unknown = CandidateNode(NodeId("n8"), 1, 1, known)
        members = arrange([*there, unknown], 4, before)
        assert [m.node for m in members] == ["n8", "n1", "n2", "n3"]
    elsewhere = CandidateNode(NodeId("n8"), 1, 1, place("n8", "r"))
    members = arrange([*there, elsewhere], 4, before)
    assert [m.node for m in members] == ["n1", "n8", "n2", "n3"]


def test_how_a_domain_is_written() -> None:
    assert in_words(("zone-a", "", "clique-3", "")) == "zone-a/-/clique-3"
    assert in_words(("", "")) == in_words(()) == ""


# --- In a job ---


def test_what_becomes_known_during_a_round_counts_from_the_next_one() -> None:
    bench = running(elastic_job(4, 2))
    before = bench.members
    assert before == ["n0", "n1", "n2", "n3"]
    bench.racks = 2
    bench.relist()
    bench.settle()
    assert (bench.job.state.round, bench.members) == (1, before), "nothing restarts for its sake"
    bench.kill(NodeId("n3"))
    bench.settle()
    assert bench.members == ["n0", "n2", "n4", "n1"]
    shown = {n.id: n.domain for n in bench.job.status(0.0, 0.0).nodes}
    assert shown["n1"] == "zone/rack-1"


def test_standbys_outside_of_the_domains_of_the_round_go_first() -> None:
    bench = Bench(elastic_job(2, standby=3))
    bench.racks = 4
    bench.step()
    bench.settle()
    bench.settle()
    assert bench.members == ["n0", "n1"]
    changed = elastic_job(2, standby=1)
    metadata = changed.metadata.model_copy(update={"generation": 2})
    bench.change(changed.model_copy(update={"metadata": metadata}))
    bench.pass_time(10)
    bench.settle()
    left = [n.id for n in bench.job.live.nodes if n.alive and not n.leaving]
    assert sorted(left) == ["n0", "n1", "n4"], "n4 is in the rack of n0"


def test_the_domain_that_an_agent_says_takes_precedence() -> None:
    node = Node(NodeId("n7"), topology=("zone", "host"))
    assert (node.domain, node.place) == (("zone",), ("zone", "host"))
    offer = Offer(addr="10.0.0.1", port=2000, topology=("z", "r"))
    node.report = AgentReport(boot_id="b" * 8, seq=1, offer=offer)
    assert (node.domain, node.place) == (("z", "r"), ("z", "r", "host"))
    node.topology = ()
    assert (node.domain, node.place, node.host) == (("z", "r"), ("z", "r", "n7"), "")


# --- Names and labels ---


@pytest.mark.parametrize("text", ["zone a", "a//b", "/a", "a/", "-a", "a" * 64, "/".join("a" * 9)])
def test_other_words_than_names_of_domains(text: str) -> None:
    with pytest.raises(ConfigError, match="DLROVER_TOPOLOGY is"):
        Settings.from_environment({"DLROVER_TOPOLOGY": text})


def test_the_variable_and_the_report_agree() -> None:
    longest = "/".join(["a" * 63] * MAX_LEVELS)
    said = Settings.from_environment({"DLROVER_TOPOLOGY": longest}).topology
    assert Offer(addr="10.0.0.1", port=2000, topology=said).topology == said
    assert Settings.from_environment({}).topology == ()


def test_of_the_pods_of_one_flavor_a_rack_goes_first() -> None:
    def pod(number: int, rack: str, place: str = "spot") -> PodView:
        meta = {"name": f"x-n{number}", "labels": {LABEL_PLACEMENT: place, "rack": rack}}
        if not rack:  # it is pending
            return view({"metadata": meta, "spec": {"containers": [{"name": "main"}]}}, ["rack"])
        spec = {"containers": [{"name": "main"}], "nodeName": f"host-{number}"}
        status = {"containerStatuses": [{"name": "main", "state": {"running": {}}}]}
        return view({"metadata": meta, "spec": spec, "status": status}, ["rack"])

    table = [pod(n, rack) for n, rack in enumerate("llrrr")]
    table.append(pod(5, "l", "stable"))

    def leave(spot: int) -> list[str]:
        places = [PodPlace(name="spot", nodes=spot), PodPlace(name="stable", nodes=1)]
        return [seen.name for seen in misplaced(places, table)]

    assert leave(3) == ["x-n1", "x-n0"]
    assert leave(2) == ["x-n4", "x-n3", "x-n2"]
    assert leave(0) == ["x-n4", "x-n3", "x-n2", "x-n1", "x-n0"]
    assert leave(6) == []
    table[:] = [pod(n, rack) for n, rack in enumerate(["l", "l", "", "", "r", ""])]
    assert leave(4) == ["x-n5", "x-n3"], "those that run are of use to the job"
    assert leave(2) == ["x-n5", "x-n3", "x-n2", "x-n4"]


def test_a_pod_that_replaces_one_without_a_place_stays() -> None:
    """The allocator moves the room to its place later than the Pod is there."""

    def pod(number: int, place: str, more: dict[str, Any] | None = None) -> PodView:
        meta = {"name": f"x-n{number}", "labels": {LABEL_PLACEMENT: place} if place else {}}
        return view({"metadata": meta | (more or {}), "spec": {"containers": [{"name": "main"}]}})

    places = [PodPlace(name="a", nodes=0), PodPlace(name="", nodes=2)]
    ends = pod(1, "", {"deletionTimestamp": "2026-01-01T00:00:00Z"})
    for gone in ([], [ends]):
        assert misplaced(places, [pod(0, ""), *gone, pod(2, "a")]) == []
        found = misplaced(places, [pod(0, ""), *gone, pod(2, "a"), pod(3, "a")])
        assert [seen.name for seen in found] == ["x-n3"]
    assert [one.name for one in misplaced(places, [pod(0, ""), pod(1, ""), pod(2, "a")])] == [
        "x-n2"
    ]


def job_with(topology: object) -> ElasticJob:
    document = job_file()
    document["spec"]["topology"] = topology
    return ElasticJob.parse(document)


def test_the_labels_of_a_job() -> None:
    default = ("topology.kubernetes.io/zone", "nvidia.com/gpu.clique")
    assert elastic_job().topology_labels == job_with({}).topology_labels == default
    assert job_with({"labels": ["a.b/c", "rack"]}).topology_labels == ("a.b/c", "rack")
    assert job_with({"labels": []}).topology_labels == ()
    with pytest.raises(ConfigError, match=r"spec\.topology\.labels"):
        job_with({"labels": ["no label"]})


@pytest.mark.parametrize("label", ["rack", "elasticjob.dlrover/name", "a.b/", "a.b/c d"])
def test_labels_that_the_operator_does_not_copy(label: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        OperatorSettings.parse(["--master-image=m", f"--host-label={label}"])
    assert "expected a label of hosts with a prefix" in capsys.readouterr().err


def test_labels_that_the_operator_copies() -> None:
    twice = ["--host-label=a.b/c", "--host-label=a.b/d", "--host-label=a.b/c"]
    assert OperatorSettings.parse(["--master-image=m", *twice]).host_labels == ("a.b/c", "a.b/d")
    owned = [{"kind": KIND, "name": "x", "uid": "j", "controller": True}]
    for owners, phase, host in (
        (owned, "Running", "h"),
        (owned, "Succeeded", ""),
        (owned, "Failed", ""),
        ([], "Running", ""),  # it belongs to no job
    ):
        meta = {"uid": "u", "labels": {"a.b/c": "1", "x/y": "2"}, "ownerReferences": owners}
        pod = {"metadata": meta, "spec": {"nodeName": "h"}, "status": {"phase": phase}}
        assert LabelledPod.of(pod, ("a.b/c",)) == ("u", host, {"a.b/c": "1"})
    seen = LabelledPod("u", "h", {"a.b/c": "1", "a.b/d": "2"})
    assert missing(seen, {"h": {"a.b/c": "1", "a.b/d": "3"}}) == {"a.b/d": "3"}
    assert missing(seen, {"h": {"a.b/c": "1"}}) == missing(seen, {}) == {}
