"""The harness does what it says: each tool has the effect that the other tests rely on."""

import json
import signal
import textwrap
from functools import partial
from typing import Any

import pytest

from tests.cluster.harness import Cluster, LabError, Obj, until
from tests.programs import PROGRAMS, source

SLEEP = "import signal, sys; print('here', flush=True); signal.pause()"


def pod(
    image: str, name: str, *command: str, node: str = "", labels: dict[str, str] | None = None
) -> Obj:
    """A Pod that runs a command and is never started again."""
    container = {"name": "main", "image": image, "command": list(command)}
    spec: Obj = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    metadata = {"name": name, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def sleeper(cluster: Cluster, name: str = "sleeper", **where: Any) -> Obj:
    """A Pod that waits for a signal."""
    return pod(cluster.base_image, name, "python3", "-c", SLEEP, **where)


def runs(cluster: Cluster, namespace: str, *objects: Obj) -> None:
    """Make Pods and wait until they are Ready."""
    cluster.apply(*objects, namespace=namespace)
    for obj in objects:
        name = obj["metadata"]["name"]
        until(partial(cluster.pod_ready, name, namespace), f"{name} is Ready")


def test_pods_talk_to_each_other_across_nodes_and_by_a_service(
    cluster: Cluster, namespace: str
) -> None:
    def got_through(name: str) -> bool:
        return cluster.pod_phase(name, namespace) == "Succeeded"

    first, *_, last = cluster.nodes
    serve = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"
    server = pod(cluster.base_image, "server", "python3", "-c", serve, node=first,
                 labels={"app": "server"})  # fmt: skip
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    cluster.apply(service, namespace=namespace)
    runs(cluster, namespace, server)
    address = (cluster.get("pod", "server", namespace) or {})["status"]["podIP"]
    fetch = source(PROGRAMS / "fetch_url.py")
    for name, url in (
        ("direct", f"http://{address}:8000"),
        ("service", "http://$(WEB_SERVICE_HOST)"),
    ):
        cluster.apply(pod(cluster.base_image, name, "python3", "-c", fetch, url, node=last),
                      namespace=namespace)  # fmt: skip
        until(partial(got_through, name), f"{name} got through")
        assert until(partial(cluster.logs, name, namespace), "its log").strip() == "200"


def test_admission_is_that_of_a_real_cluster(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    refused(cluster, namespace, "violates PodSecurity")
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce-")
    cluster.kubectl("create", "quota", "none", "--hard=pods=0", "-n", namespace)
    refused(cluster, namespace, "exceeded quota")
    with pytest.raises(LabError, match="forbidden"):
        cluster.kubectl("get", "pods", "-n", namespace,
                        f"--as=system:serviceaccount:{namespace}:default")  # fmt: skip


def refused(cluster: Cluster, namespace: str, words: str) -> None:
    """See a Pod refused, in these words."""
    until(
        lambda: words in cluster.refusal(sleeper(cluster), namespace),
        f"a Pod is refused: {words}",
    )
    with pytest.raises(LabError, match=words):
        cluster.apply(sleeper(cluster), namespace=namespace)


def test_a_process_in_a_pod_is_killed(cluster: Cluster, namespace: str) -> None:
    both = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}, "the-worker"])
        print("child ended by", -child.wait(), flush=True)
        {SLEEP}
    """
    runs(cluster, namespace, pod(cluster.base_image, "two", "python3", "-c", textwrap.dedent(both)))
    until(lambda: "here" in cluster.logs("two", namespace), "the child runs")
    before = cluster.processes("two", namespace)
    killed = cluster.kill("two", namespace, "the-worker$")
    assert len(killed) == 1
    until(lambda: "ended by 9" in cluster.logs("two", namespace), "its parent saw it")
    assert set(cluster.processes("two", namespace)) == set(before) - set(killed)
    with pytest.raises(LabError, match="a process of"):
        cluster.kill("two", namespace, "the-worker$", within_s=3)
    cluster.kill("two", namespace, number=signal.SIGKILL)
    until(lambda: cluster.pod_phase("two", namespace) == "Failed", "the Pod has failed")


def test_a_pod_is_deleted_also_by_force(cluster: Cluster, namespace: str) -> None:
    runs(cluster, namespace, sleeper(cluster, "polite"), sleeper(cluster, "forced"))
    cluster.delete_pod("polite", namespace)
    cluster.delete_pod("forced", namespace, force=True)
    assert cluster.get("pod", "forced", namespace) is None
    until(lambda: cluster.get("pod", "polite", namespace) is None, "it is gone")


def test_a_node_is_cut_off_and_comes_back(cluster: Cluster, namespace: str) -> None:
    node = cluster.nodes[-1]
    runs(cluster, namespace, sleeper(cluster, node=node))
    with cluster.cut_off(node):
        until(lambda: not cluster.node_ready(node), "it is NotReady")
        assert cluster.processes("sleeper", namespace)  # it knows nothing of it
        until(lambda: not cluster.pod_ready("sleeper", namespace), "so are its Pods")
    assert cluster.node_ready(node)
    until(lambda: cluster.pod_ready("sleeper", namespace), "the Pod is the same, and Ready")


def test_a_node_crashes_and_starts_again(cluster: Cluster, namespace: str) -> None:
    node = cluster.nodes[-1]
    runs(cluster, namespace, sleeper(cluster, node=node))
    with cluster.crashed(node):
        assert cluster.processes("sleeper", namespace) == {}
        until(lambda: not cluster.node_ready(node), "it is NotReady")
        assert cluster.pod_phase("sleeper", namespace) == "Running"  # nobody could say otherwise
    until(lambda: cluster.pod_phase("sleeper", namespace) == "Failed", "the kubelet found it dead")
    runs(cluster, namespace, sleeper(cluster, "another", node=node))


def test_the_api_server_hangs_and_is_killed(cluster: Cluster, namespace: str) -> None:
    runs(cluster, namespace, sleeper(cluster))
    with cluster.api_server_stopped(), pytest.raises(LabError):
        cluster.kubectl("get", "nodes", "--request-timeout=1s")
    assert cluster.nodes
    with cluster.api_server_killed(), pytest.raises(LabError, match="refused"):
        cluster.kubectl("get", "nodes")
    until(lambda: cluster.pod_ready("sleeper", namespace), "its host was heard of again")


def test_a_node_is_cordoned_and_drained(cluster: Cluster, namespace: str) -> None:
    node = cluster.nodes[0]
    runs(cluster, namespace, sleeper(cluster, node=node, labels={"app": "sleeper"}))
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "all"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "sleeper"}}},
    }
    cluster.apply(budget, namespace=namespace)
    until(
        lambda: (cluster.get("pdb", "all", namespace) or {})["status"].get("currentHealthy") == 1,
        "the budget has counted",
    )
    with pytest.raises(LabError, match="disruption budget"):
        cluster.drain(node, within_s=15)
    cluster.kubectl("delete", "pdb", "all", "-n", namespace)
    cluster.drain(node)
    assert cluster.get("pod", "sleeper", namespace) is None
    cluster.apply(sleeper(cluster, node=node), namespace=namespace)
    until(
        lambda: "unschedulable" in json.dumps(cluster.get("pod", "sleeper", namespace)), "no room"
    )
    cluster.uncordon(node)
    until(lambda: cluster.pod_ready("sleeper", namespace), "room again")


def test_the_agents_image_trains(cluster: Cluster, namespace: str, agent_image: str) -> None:
    """Our image as users have it: not root, torch by a mount, two workers that reduce."""
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "script"},
        "data": {"train.py": source(PROGRAMS / "sum_in_a_pod.py")},
    }
    train = pod(agent_image, "train", "elastic-run", "--standalone", "--nproc-per-node=2",
                "/scripts/train.py")  # fmt: skip
    train["spec"]["volumes"] = [{"name": "script", "configMap": {"name": "script"}}]
    train["spec"]["containers"][0]["volumeMounts"] = [{"name": "script", "mountPath": "/scripts"}]
    cluster.apply(config, cluster.with_torch(train), namespace=namespace)
    until(
        lambda: cluster.pod_phase("train", namespace) in ("Succeeded", "Failed"),
        "it has ended",
        within_s=240,
    )
    assert cluster.pod_phase("train", namespace) == "Succeeded", cluster.logs("train", namespace)
    said = until(lambda: cluster.logs("train", namespace), "its log")
    assert said.count("sum 2 uid 65532") == 2


def test_the_masters_image_starts_its_program(
    cluster: Cluster, namespace: str, master_image: str
) -> None:
    made = pod(master_image, "help")
    made["spec"]["containers"][0] |= {"args": ["--help"]}
    del made["spec"]["containers"][0]["command"]
    cluster.apply(made, namespace=namespace)
    until(lambda: cluster.pod_phase("help", namespace) == "Succeeded", "it has said its help")
    assert "usage: dlrover-master" in until(lambda: cluster.logs("help", namespace), "its log")


def test_a_name_that_nobody_knows_is_refused_at_once(cluster: Cluster, namespace: str) -> None:
    """There is no name server; each of four lookups would take 5 s, as torch's would."""
    ask = source(PROGRAMS / "look_up_names.py")
    cluster.apply(pod(cluster.base_image, "asks", "python3", "-c", ask), namespace=namespace)
    said = until(lambda: cluster.logs("asks", namespace), "an answer")
    assert "asked at once" in said
