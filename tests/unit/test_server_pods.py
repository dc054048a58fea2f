"""Servers of a parameter server as Pods, and what the operator makes for them."""

import json
from typing import Any

import pytest

from dlrover_operator import manifests
from dlrover_operator.manifests import Options
from dlrover_py.master.core.events import NodeEnded, NodeSeen
from dlrover_py.master.core.servers import LEAVE_S
from dlrover_py.master.platform.kubernetes.pods import PodContext, fact, misplaced, pod, view
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import PodPlace
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from tests.builders import job_file

PS3, N0 = NodeId("ps3"), NodeId("n0")
SITE = PodContext(uid="uid-1", master_addr="10.96.0.9:50001")
OPTIONS = Options(image="master:1")


def job(servers: dict[str, Any] | None = None, **role: Any) -> ElasticJob:
    document = job_file(2)
    document["metadata"] |= {"namespace": "ns", "uid": "u1"}
    main = {"name": "main", "image": "i", "command": ["dlrover", "ps", "server"]}
    template = {"spec": {"containers": [main], **(servers or {})}}
    document["spec"]["replicaSpecs"]["ps"] = {"replicas": 2, "template": template, **role}
    return ElasticJob.read(document)


def env_of(made: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in made["spec"]["containers"][0]["env"]}


def test_a_server_is_a_pod_of_its_own_template_and_role() -> None:
    spec = job({"nodeSelector": {"memory": "much"}}, priority="high")
    made = pod(spec, PS3, SITE)
    assert made["metadata"]["name"] == "x-ps3"
    labels = made["metadata"]["labels"]
    assert (labels[names.LABEL_ROLE], labels[names.LABEL_INDEX]) == ("ps", "3")
    assert spec.servers is not None
    assert made["metadata"]["annotations"][names.NOTE_TEMPLATE] == spec.servers.template_hash
    assert made["spec"]["nodeSelector"] == {"memory": "much"}
    assert made["spec"]["priorityClassName"] == "high"
    assert made["spec"]["restartPolicy"] == "Never", "a server that starts again has no rows"
    told = env_of(made)
    assert told[names.ENV_PS] == "tcp://10.96.0.9:50002"
    assert (told[names.ENV_NODE_ID], told[names.ENV_NODE_TYPE]) == ("ps3", "ps")
    assert env_of(pod(spec, N0, SITE))[names.ENV_PS] == "tcp://10.96.0.9:50002"
    six = PodContext(uid="u", master_addr="[fd00::1]:50001")
    assert env_of(pod(spec, N0, six))[names.ENV_PS] == "tcp://[fd00::1]:50002"
    assert names.ENV_PS not in env_of(pod(ElasticJob.parse(job_file(2)), N0, SITE))


def test_a_server_has_time_to_give_its_rows_away_and_a_host_without_another_one() -> None:
    made = pod(job(), PS3, SITE)["spec"]
    assert made["terminationGracePeriodSeconds"] == LEAVE_S
    (preferred,) = made["affinity"]["podAntiAffinity"].popitem()[1]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == {names.LABEL_JOB: "x", names.LABEL_ROLE: "ps"}
    own = {"terminationGracePeriodSeconds": 5, "affinity": {"podAntiAffinity": {}}}
    made = pod(job(own), PS3, SITE)["spec"]
    assert made["terminationGracePeriodSeconds"] == 5
    assert made["affinity"]["podAntiAffinity"] == {}


def test_a_fault_in_the_template_of_servers_has_its_path() -> None:
    with pytest.raises(ConfigError, match=r"spec\.replicaSpecs\.ps\.template.*containers\[0\]"):
        pod(job({"containers": [{"name": "main", "command": ["dlrover ps server"], "env": 3}]}),
            PS3, SITE)  # fmt: skip
    with pytest.raises(ConfigError, match="expected the template of ps3, found none"):
        pod(ElasticJob.parse(job_file(2)), PS3, SITE)


def test_the_state_of_a_server_is_that_of_its_pod() -> None:
    made = pod(job(), PS3, SITE)
    seen = fact(PS3, view(made))
    assert isinstance(seen, NodeSeen)
    assert not seen.runs
    state = {"terminated": {"exitCode": 137, "reason": "Error"}}
    made["status"] = {"phase": "Failed", "containerStatuses": [{"name": "main", "state": state}]}
    ended = fact(PS3, view(made))
    assert isinstance(ended, NodeEnded)
    assert (ended.exit_code, ended.free) == (137, False)


def test_servers_have_no_place_in_a_queue() -> None:
    made = view(pod(job(), PS3, SITE))
    places = [PodPlace(name="a", nodes=1), PodPlace(name="b", nodes=1)]
    assert misplaced(places, [made]) == []


def test_the_master_of_a_job_with_servers_has_a_port_for_them() -> None:
    spec = job()
    (container,) = manifests.deployment(spec, "10.0.0.1", OPTIONS)["spec"]["template"]["spec"][
        "containers"
    ]
    given = dict(zip(container["command"][1::2], container["command"][2::2], strict=True))
    assert given["--ps-listen"] == ":50002"
    assert {"name": "servers", "containerPort": 50002} in container["ports"]
    ports = manifests.service(spec)["spec"]["ports"]
    assert [(one["name"], one["port"]) for one in ports] == [("agents", 50001), ("servers", 50002)]
    agents, health = manifests.network_policy(spec)["spec"]["ingress"]
    assert [one["port"] for one in agents["ports"]] == [50001, 50002]
    assert agents["from"], "only Pods of the job may reach it"
    assert "from" not in health
    selector = manifests.workers_network_policy(spec)["spec"]["podSelector"]
    (roles,) = selector["matchExpressions"]
    assert (roles["key"], roles["values"]) == (names.LABEL_ROLE, ["worker", "ps"])
    assert selector["matchLabels"] == {names.LABEL_JOB: "x"}


def test_the_master_may_write_the_map_and_only_if_there_are_servers() -> None:
    def secrets_of(made: ElasticJob) -> list[str]:
        rules = manifests.role(made)["rules"]
        (found,) = (rule for rule in rules if rule["resources"] == ["secrets"])
        return list(found["resourceNames"])

    own = ["elasticjob-x-journal", "elasticjob-x-evidence", "dlrover-recipes"]
    assert secrets_of(job()) == [*own, "elasticjob-x-servers"]
    made = manifests.servers_secret(job())
    assert made["metadata"]["name"] == "elasticjob-x-servers"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u1"
    plain = job_file(2)
    plain["metadata"] |= {"namespace": "ns", "uid": "u1"}
    without = ElasticJob.read(plain)
    assert secrets_of(without) == own
    objects = [
        manifests.deployment(without, "10.0.0.1", OPTIONS),
        manifests.service(without),
        manifests.network_policy(without),
    ]
    assert "50002" not in json.dumps(objects)
