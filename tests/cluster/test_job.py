"""An ElasticJob on a real cluster: submitted, hurt, resized, ended."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrover_py.protocol.names import master_of
from dlrover_py.protocol.status import JobPhase, NodeStatus
from tests.cluster.harness import Cluster, Obj, until
from tests.cluster.jobs import WORKER, Job, Watched, document, no_operator, spread, steps, submit
from tests.cluster.test_chart import may
from tests.programs import PROGRAMS

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(900)


def job(there: Watched, image: str, name: str = "job", **more: Any) -> Job:
    """A job that takes steps until it is stopped."""
    command = more.pop("command", steps())
    return submit(there.cluster, there, document(name, image, command, **more))


def reasons(job: Job) -> list[str]:
    return [e.reason for e in job.seen.events] if job.seen else []


# --- from the first to the last step ---


def test_a_job_runs_to_its_end_and_its_master_goes(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, command=steps(30, 0.05), replicas=2)
    status = run.ends("Succeeded")
    assert run.holds("Succeeded")
    assert status["completionTime"]
    assert status["training"]["summary"]["progress"] == "100% (30/30)"
    there.until(
        lambda: set(there.all("Pod")) == {"job-n0", "job-n1"}, "nothing but the finished Pods"
    )
    assert "done" in run.kubectl("logs", "job-n0")


def test_the_columns_tell_the_story(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=2)
    run.runs(2)
    run.until(lambda: run.phase == "Running", "the operator has seen it")
    head, _ = run.kubectl("get", "ej", "job").splitlines()
    assert head.split() == [
        "NAME",
        "PHASE",
        "REASON",
        "READY",
        "PROGRESS",
        "RESTARTS",
        "GOODPUT",
        "AGE",
    ]
    # An agent that is late for a moment is not ready.
    until(
        lambda: run.kubectl("get", "ej", "job").splitlines()[1].split()[1:3] == ["Running", "2/2"],
        "both are ready",
    )
    about = ("get", "events", "--field-selector=involvedObject.kind=ElasticJob")

    def told(reason: str) -> bool:
        return reason in run.kubectl(*about)

    for reason in ("RoundFormed", "TrainingResumed"):
        until(partial(told, reason), reason)


def test_dlrovers_own_kind_of_manifest_runs(there: Watched, agent_image: str) -> None:
    """A shell as PID 1, --nnodes from the environment, a check of the network, DLRover's fields."""
    script = steps(10, 0.05)
    inner = (
        "exec 3>&1; dlrover-run --network-check --nnodes=3:$NODE_NUM --max-restarts=1 "
        "--no-python python3 -c "
    )
    command = ["/bin/bash", "-c", f"{inner} '{script[-3]}' 10 0.05; exit $?"]
    doc = document("job", agent_image, command, replicas=3, restartCount=3, autoScale=True,
                   restartPolicy="Never", priority="0.5")  # fmt: skip
    doc["metadata"]["annotations"] = {"pre_check_ops": "[]", "enable_dashboard": "true"}
    doc["spec"] |= {
        "distributionStrategy": "AllreduceStrategy",
        "optimizeMode": "single-job",
        "enableDynamicSharding": False,
        "envs": {"a": {"name": "A", "value": "b"}},
    }
    resources = {"requests": {"cpu": "10m"}}
    theirs = {"name": "main", "image": "somebody/elses:master", "resources": resources}
    template: Obj = {"spec": {"containers": [theirs], "restartPolicy": "Never"}}
    doc["spec"]["replicaSpecs"]["dlrover-master"] = {"replicas": 1, "template": template}
    worker = doc["spec"]["replicaSpecs"]["worker"]
    worker["template"] = there.cluster.with_torch(worker["template"])  # the check needs it
    run = submit(there.cluster, there, doc)
    run.ends("Succeeded", within_s=400)
    assert run.training.minimum == 3, "of --nnodes"
    assert "NodesChecked" in reasons(run)


def test_a_parameter_server_job_is_told_that_it_is_not_run_yet(
    there: Watched, agent_image: str
) -> None:
    doc = document("job", agent_image, ["x"])
    doc["spec"]["distributionStrategy"] = "ParameterServerStrategy"
    doc["spec"]["replicaSpecs"]["ps"] = doc["spec"]["replicaSpecs"]["worker"]
    cluster = there.cluster
    cluster.kubectl("create", "-f", "-", "-n", there.namespace, stdin=json.dumps(doc))
    run = Job(cluster, there, "job")
    told = run.until(lambda: run.condition("Accepted"), "a condition")
    assert (told["status"], told["reason"]) == ("False", "Unsupported")
    assert run.kubectl("get", "ej", "job", "-owide").splitlines()[1].split()[1] == "Refused"
    assert "Unsupported" in run.kubectl("get", "ej", "job", "-owide")
    assert not there.all("Pod")


# --- what is lost ---


def test_a_worker_that_is_killed_is_restarted_in_its_pod(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=2)
    before = run.runs(2)
    run.kill_worker("n0")
    after = run.runs(2, after=before.round)
    assert after.restarts == {"failure": 1}
    assert after.last_failure is not None
    assert after.last_failure.node == "n0"
    assert after.last_failure.worker.exit_code == -9
    assert set(run.pods) == {"n0", "n1"}


def test_a_pod_that_is_lost_is_replaced_and_the_rest_goes_on_without_it(
    there: Watched, agent_image: str
) -> None:
    run = job(there, agent_image, replicas=3, minReplicas=2)
    before = run.runs(3)
    there.cluster.delete_pod("job-n1", there.namespace, force=True)
    full = run.runs(3, after=before.round + 1)
    assert "2 nodes, 2 workers (left: n1)" in run.formed(before.round + 1)
    assert {n.id for n in full.nodes if n.phase.value == "live"} == {"n0", "n2", "n3"}
    assert full.restarts.keys() <= {"drain", "join"}, "the API server gives notice first"
    budgets = [n.relaunches for n in full.nodes]
    assert budgets == [0] * len(budgets), "to delete a Pod is nobody's failure"


def test_a_standby_takes_the_lost_ones_place(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=2, standbyReplicas=1)
    before = run.runs(2)
    run.until(lambda: run.training.standby == 1, "a standby")
    run.until(lambda: run.status["replicas"] == 2, "standbys are not counted")
    roles = {n.role.value: n.id for n in run.training.nodes}
    there.cluster.delete_pod(f"job-{roles['member']}", there.namespace, force=True)
    after = run.runs(2, after=before.round)
    assert roles["standby"] in {n.id for n in after.nodes if n.role.value == "member"}


def test_a_pod_that_is_deleted_may_save_first(there: Watched, agent_image: str) -> None:
    run = job(
        there, agent_image, replicas=2, minReplicas=1, pod={"terminationGracePeriodSeconds": 20}
    )
    run.runs(2)
    run.until(lambda: all(n.step for n in members(run)), "both can be told: they take steps")
    with there.cluster.following("job-n1", there.namespace) as said:
        run.kubectl("delete", "pod", "job-n1", "--wait=false")
        assert "asked to stop" in said()
    run.until(lambda: "NodeLeaving" in reasons(run), "the event")
    run.until(lambda: run.training.restarts.get("drain") == 1, "the round without it")


def test_a_node_that_is_drained_loses_its_pods_without_blame(
    there: Watched, agent_image: str
) -> None:
    cluster = there.cluster
    run = job(there, agent_image, replicas=3, minReplicas=1, pod=spread())
    before = run.runs(3)
    # A master that has to go too may not live to write down that they leave.
    near = cluster.node_of(run.holder, there.namespace)
    where = {cluster.node_of(f"job-{node}", there.namespace) for node in run.pods}
    host = min(where - {near})
    cluster.drain(host)
    run.until(
        lambda: all(n.host != host for n in members(run)) and len(members(run)) == 3,
        "all train elsewhere",
        within_s=240,
    )
    run.formed(before.round + 1)  # of less than a second, perhaps: in no status
    assert all(n.relaunches == n.restarts == 0 for n in run.training.nodes)
    assert run.training.restarts.keys() <= {"drain", "join"}


def members(run: Job) -> list[NodeStatus]:
    return [n for n in run.training.nodes if n.role.value == "member"]


def test_the_api_server_may_go_and_come_back(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=2)
    before, master = run.runs(2), run.holder
    with there.cluster.api_server_killed():
        pass  # it takes its time to come back
    run.kill_worker("n0")
    after = run.runs(2, after=before.round)
    # Kubernetes may have heard of no host for too long, and moved the master.
    assert after.term == before.term or run.holder != master
    assert after.restarts == {"failure": 1}


def test_a_job_that_is_deleted_without_its_pods_trains_on(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=1)
    run.runs(1)
    run.kubectl("delete", "ej", "job", "--cascade=orphan")
    there.until(lambda: "job" not in there.all("ElasticJob"), "it is gone")
    there.cluster.kill("job-n0", there.namespace, WORKER)
    until(
        lambda: [
            said
            for said in there.cluster.processes("job-n0", there.namespace).values()
            if re.search(WORKER, said)
        ],
        "its agent has started another worker",
    )
    assert run.pods["n0"]["status"]["phase"] == "Running"
    run.kubectl("delete", "all,secrets", "-l", "elasticjob.dlrover/name=job")


def test_a_long_name_a_sidecar_and_an_init_container(there: Watched, agent_image: str) -> None:
    name = "a" * 37
    doc = document(name, agent_image, steps(20, 0.05), replicas=1)
    spec = doc["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    forever = {"name": "sidecar", "image": agent_image, "command": ["sleep", "9999"]}
    spec["containers"].insert(0, forever)
    spec["initContainers"] = [{"name": "init", "image": agent_image, "command": ["true"]}]
    run = submit(there.cluster, there, doc)
    run.ends("Succeeded")
    bad = document("bad", agent_image, steps(20, 0.05), replicas=1, restartCount=0)
    spec = bad["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    spec["initContainers"] = [{"name": "init", "image": agent_image, "command": ["false"]}]
    failed = submit(there.cluster, there, bad)
    failed.ends("Failed")
    assert "init container init ended with exit code 1" in failed.condition("Failed")["message"]


def test_a_job_with_sidecars_leaves_no_pod_that_holds_resources(
    there: Watched, agent_image: str
) -> None:
    """Smaller, suspended, succeeded or failed: one sidecar sleeps, one ignores SIGTERM, one is a
    native one."""

    def sidecar(name: str, *command: str, **more: Any) -> Obj:
        return {"name": name, "image": agent_image, "command": [*command], **more}

    def started(name: str, command: list[str], **worker: Any) -> Job:
        doc = document(
            name, agent_image, command, pod={"terminationGracePeriodSeconds": 5}, **worker
        )
        spec = doc["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
        spec["containers"] += [
            sidecar("proxy", "sleep", "9999"),
            sidecar("stubborn", "sh", "-c", "trap '' TERM; while :; do sleep 1; done"),
        ]
        native = sidecar("native", "sleep", "9999", restartPolicy="Always")
        spec["initContainers"] = [native]
        return submit(there.cluster, there, doc)

    def holding(run: Job) -> list[str]:
        """As the API server has it now: what schedulers and quotas count."""
        label = f"elasticjob.dlrover/name={run.name},elasticjob.dlrover/replica-type=worker"
        fields = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
        return run.kubectl("get", "pods", "-l", label, fields, "-o", "name").split()

    goes = started("goes", steps(), replicas=2)
    good = started("good", steps(20, 0.05), replicas=1)
    bad = started("bad", ["elastic-run", "--no-python", "false"], replicas=1, restartCount=0)
    for run, phase in ((good, "Succeeded"), (bad, "Failed")):
        run.ends(phase)
        run.until(partial(run.condition, "PodsLeft"), "all has gone")
        assert run.condition("PodsLeft")["status"] == "False"
        assert holding(run) == []
    before = goes.runs(2)
    goes.kubectl("scale", "ej/goes", "--replicas=1")
    goes.runs(1, after=before.round)
    goes.until(lambda: len(holding(goes)) == 1, "one Pod has gone")
    goes.patch({"suspend": True})
    goes.until(lambda: goes.holds("Suspended"), "Suspended")
    assert holding(goes) == []


def test_the_first_example_runs(there: Watched, cluster: Cluster) -> None:
    doc = yaml.safe_load((EXAMPLES / "01-digits/job.yaml").read_text())
    role = doc["spec"]["replicaSpecs"]["worker"]
    role["template"] = cluster.with_torch(role["template"])
    main = role["template"]["spec"]["containers"][0]
    main["image"] = cluster.image("examples")
    main["command"] += ["--epochs=3", "--step-delay=0.05"]
    run = submit(cluster, there, doc)
    run.ends("Succeeded", within_s=400)
    logs = [until(partial(cluster.logs, f"digits-{n}", there.namespace), n) for n in run.pods]
    assert "accuracy 0." in "".join(logs)


def test_a_host_that_is_cut_off_is_survived_and_kept_out(there: Watched, agent_image: str) -> None:
    cluster = there.cluster
    run = job(there, agent_image, replicas=2, minReplicas=1, pod=spread())
    before = run.runs(2)
    master = cluster.list("pods", there.namespace, "elasticjob.dlrover/replica-type=dlrover-master")
    near_master = master[0]["spec"]["nodeName"]
    victim = next(n for n, p in run.pods.items() if p["spec"]["nodeName"] != near_master)
    host = run.pods[victim]["spec"]["nodeName"]
    with cluster.cut_off(host):
        assert f"1 node, 1 worker (left: {victim})" in run.formed(before.round + 1)
        again = run.runs(2, after=before.round + 1)
        assert host not in {n.host for n in again.nodes if n.role.value == "member"}
    new = next(n for n in again.nodes if n.role.value == "member" and n.id not in ("n0", "n1"))
    affinity = json.dumps(run.pods[new.id]["spec"]["affinity"])
    assert f'["{host}"]' in affinity
    cluster_is_well(cluster, host)


def cluster_is_well(cluster: Cluster, host: str) -> None:
    until(lambda: cluster.node_ready(host), f"{host} is Ready")


def test_a_master_that_is_deleted_is_replaced_and_the_workers_do_not_notice(
    there: Watched, agent_image: str
) -> None:
    run = job(there, agent_image, replicas=2)
    before = run.runs(2)
    label = "elasticjob.dlrover/replica-type=dlrover-master"
    run.kubectl("delete", "pod", "-l", label, "--wait=false")
    run.until(lambda: run.training.term == before.term + 1, "a new term")
    after = run.until(lambda: all(n.pids for n in run.training.nodes) and run.training, "pids")
    assert after.round == before.round
    assert {n.pids[0] for n in after.nodes} == {n.pids[0] for n in before.nodes}
    run.kill_worker("n0")
    run.runs(2, after=before.round)


def test_running_jobs_do_not_notice_the_operator(
    there: Watched, agent_image: str, operator: str
) -> None:
    cluster = there.cluster
    run = job(there, agent_image, replicas=2)
    before = run.runs(2)
    with no_operator(cluster, operator):
        run.kill_worker("n0")
        middle = run.runs(2, after=before.round)
    run.patch({"suspend": True})
    what = "suspended by the operator that came back"
    run.until(lambda: run.holds("Suspended"), what, within_s=240)
    assert run.training.round == middle.round


# --- what is wished ---


def test_a_job_is_scaled_while_it_runs(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=1, maxReplicas=3)
    one = run.runs(1)
    run.kubectl("scale", "ej/job", "--replicas=3")
    three = run.runs(3, after=one.round)
    run.kubectl("scale", "ej/job", "--replicas=2")
    two = run.runs(2, after=three.round)
    assert two.generation == 3
    with pytest.raises(Exception, match="maxReplicas"):
        run.kubectl("scale", "ej/job", "--replicas=4")


def test_an_autoscaler_finds_its_way(there: Watched, agent_image: str) -> None:
    """There are no metrics here; that the minimum is kept takes all of ``/scale`` but those."""
    run = job(there, agent_image, replicas=1)
    one = run.runs(1)
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "job"},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "elastic.iml.github.io/v1alpha1",
                "kind": "ElasticJob",
                "name": "job",
            },
            "minReplicas": 2,
            "maxReplicas": 3,
        },
    }
    there.cluster.apply(scaler, namespace=there.namespace)
    # no assert: runs() waits for 2 nodes, and fails without them
    run.runs(2, after=one.round)


def test_a_job_is_suspended_and_resumed(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=2)
    before = run.runs(2)
    run.patch({"suspend": True})
    run.until(lambda: run.holds("Suspended"), "Suspended")
    there.until(
        lambda: all(
            p["status"]["phase"] in ("Succeeded", "Failed") for p in there.all("Pod").values()
        ),
        "nothing runs",
    )
    run.patch({"suspend": False})
    run.runs(2, after=before.round)
    run.until(lambda: run.phase == "Running", "the operator has seen it")
    assert run.condition("Suspended")["status"] == "False"


def test_a_resumed_job_and_one_that_is_submitted_again_start_warm(
    there: Watched, agent_image: str
) -> None:
    """Their Pods and masters are new. The recipe is the namespace's."""
    text = {"train.py": (PROGRAMS / "report_steps.py").read_text()}
    scripts = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"}}
    there.cluster.apply(scripts | {"data": text}, namespace=there.namespace)

    def submitted(name: str) -> Job:
        doc = document(name, agent_image, ["elastic-run", "/scripts/train.py", "100000", "0.05"])
        spec = doc["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
        spec["volumes"] = [{"name": "scripts", "configMap": {"name": "scripts"}}]
        spec["containers"][0]["volumeMounts"] = [{"name": "scripts", "mountPath": "/scripts"}]
        return submit(there.cluster, there, doc)

    def log(run: Job, node: str) -> str:
        return there.cluster.logs(f"{run.name}-{node}", there.namespace)

    def first_starts(run: Job, nodes: set[str]) -> list[bool]:
        """How the first workers of each node were started; nothing of one without any yet."""
        lines = (log(run, node).splitlines() for node in sorted(nodes))
        found = (next((x for x in of if '"workers_started"' in x), "") for of in lines)
        return [bool(json.loads(line)["warm"]) for line in found if line]

    run = submitted("job")
    before = run.runs(2)
    old = set(run.pods)
    until(lambda: first_starts(run, old) == [False, False], "the first start is cold")
    until(lambda: any("recipe_kept" in log(run, node) for node in old), "it is kept")
    run.patch({"suspend": True})
    run.until(lambda: run.phase == "Suspended", "Suspended")
    run.patch({"suspend": False})
    run.runs(2, after=before.round)
    new = set(run.pods) - old
    until(lambda: first_starts(run, new) == [True, True], "all that is resumed is forked")

    run.kubectl("delete", "ej", "job")
    again = submitted("again")
    again.runs(2)
    until(lambda: first_starts(again, set(again.pods)) == [True, True], "and what comes again")


def test_a_spec_that_is_refused_stops_neither_suspend_nor_scale_nor_a_new_master(
    there: Watched, agent_image: str
) -> None:
    """CEL sees no templates and lets roles be added."""
    run = job(there, agent_image, replicas=1)
    before = run.runs(1)
    run.patch({"replicaSpecs": {"worker": {"template": {"spec": {"containers": "x"}}}}})
    run.patch({"replicaSpecs": {"chief": {"replicas": 1}}})
    run.until(lambda: run.condition("Accepted").get("status") == "False", "the edit is refused")
    label = "elasticjob.dlrover/replica-type=dlrover-master"
    run.kubectl("delete", "pod", "-l", label, "--wait=false")
    run.until(lambda: run.training.term == before.term + 1, "another master")
    run.patch({"replicaSpecs": {"worker": {"replicas": 2}}})
    run.runs(2, after=before.round)
    run.patch({"suspend": True})
    run.until(lambda: run.holds("Suspended"), "Suspended")


def test_a_job_that_is_suspended_from_the_start_costs_nothing(
    there: Watched, agent_image: str
) -> None:
    run = job(there, agent_image, replicas=1, spec={"suspend": True})
    run.until(lambda: run.phase == "Suspended", "Suspended")
    assert not there.all("Pod")
    run.patch({"suspend": False})
    run.runs(1)


def test_deadlines_and_the_time_to_live_are_kept(there: Watched, agent_image: str) -> None:
    late = job(there, agent_image, "late", replicas=1, spec={"activeDeadlineSeconds": 15})
    job(there, agent_image, "short", replicas=1, command=steps(5, 0.05),
                spec={"ttlSecondsAfterFinished": 1})  # fmt: skip
    stuck = job(there, agent_image, "stuck", replicas=1, spec={"pendingTimeoutSeconds": 10},
                pod={"nodeSelector": {"no": "such"}})  # fmt: skip
    late.ends("Failed")
    assert late.condition("Failed")["reason"] == "DeadlineExceeded"
    stuck.ends("Failed")
    assert stuck.condition("DeadlineExceeded")["reason"] == "PendingTimeout"
    there.until(lambda: "short" not in there.all("ElasticJob"), "short is deleted")
    there.until(lambda: not any(n.startswith("short-") for n in there.all("Pod")), "and its Pods")


def test_a_deleted_job_takes_all_with_it(there: Watched, agent_image: str) -> None:
    run = job(there, agent_image, replicas=2)
    run.runs(2)
    run.kubectl("delete", "ej", "job", "--wait=false")
    there.until(lambda: not there.all("Pod"), "no Pod is left")
    kinds = "secrets,deployments,services,roles,rolebindings,serviceaccounts,networkpolicies"
    label = "elasticjob.dlrover/name=job"
    until(lambda: not run.kubectl("get", kinds, "-l", label, "-oname").strip(), "nothing is left")


def test_a_job_of_the_same_name_starts_anew(there: Watched, agent_image: str) -> None:
    first = job(there, agent_image, replicas=1)
    first.runs(1)
    uid = first.obj["metadata"]["uid"]
    first.kubectl("delete", "ej", "job", "--wait=false")
    there.until(lambda: "job" not in there.all("ElasticJob"), "it is gone")
    second = job(there, agent_image, replicas=1, command=steps(30, 0.05))
    assert second.until(lambda: second.obj, "it")["metadata"]["uid"] != uid
    second.ends("Succeeded", within_s=240)


# --- what cannot be had ---


def trouble(run: Job, kind: str, within_s: float = 180.0) -> str:
    return str(run.until(lambda: run.holds(kind) and run.condition(kind)["message"], kind,
                         within_s=within_s))  # fmt: skip


MOUNT = {"name": "v", "mountPath": "/v"}


def test_what_a_pod_lacks_is_a_condition(there: Watched, agent_image: str) -> None:
    image = job(there, "dlrover.test/no-such:1", "image", replicas=1)
    room = job(there, agent_image, "room", replicas=1, pod={"nodeSelector": {"no": "such"}})
    wrong = document("wrong", agent_image, steps(), replicas=1)
    wrong["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]["env"] = [
        {"name": "a", "valueFrom": {"nothing": {}}}
    ]
    bad = submit_unchecked(there, wrong)
    missing = document("volume", agent_image, steps(), replicas=1)
    spec = missing["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    spec["volumes"] = [{"name": "v", "configMap": {"name": "no-such"}}]
    spec["containers"][0]["volumeMounts"] = [MOUNT]
    volume = submit(there.cluster, there, missing)
    assert "no-such:1" in trouble(image, "ImagePullBackOff")
    assert "node affinity/selector" in trouble(room, "Unschedulable")
    assert trouble(bad, "InvalidTemplate")
    assert "kubectl describe pod volume-n0" in trouble(volume, "PodNotStarting")
    for run, why in (
        (image, "ImagePullBackOff"),
        (room, "Unschedulable"),
        (bad, "InvalidTemplate"),
        (volume, "PodNotStarting"),
    ):
        run.until(partial(in_column, run, why), f"{why} in the column")
        # Kubelets say by turns that they try and that they wait.
        until(
            partial(printed, run, why),
            f"{why} in the column, as people see it",
        )


def in_column(run: Job, why: str) -> bool:
    return run.training.reason.startswith(why)


def printed(run: Job, why: str) -> bool:
    return f"{why}: " in run.kubectl("get", "ej", run.name, "-owide")


def test_a_job_keeps_its_size_under_what_cannot_be_had_and_grows_once_it_can(
    there: Watched, agent_image: str
) -> None:
    """Its user scales it up with a template that is no good, mends that, and tries the next."""
    run = job(there, agent_image, replicas=1, maxReplicas=2)

    def over(kind: str) -> bool:
        return not run.holds(kind)

    one = run.runs(1)
    good = run.obj["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    main = good["containers"][0]
    port = [{"name": "main", "image": agent_image, "command": ["x"], "ports": [{"name": "x"}]}]
    secret = {"name": "v", "secret": {"secretName": "no-such"}}
    for kind, bad in (
        ("ImagePullBackOff", {"containers": [main | {"image": "dlrover.test/no-such:1"}]}),
        ("Unschedulable", {"nodeSelector": {"no": "such"}}),
        ("InvalidTemplate", {"containers": port}),
        ("PodNotStarting", {"volumes": [secret], "containers": [main | {"volumeMounts": [MOUNT]}]}),
    ):
        run.patch({"replicaSpecs": {"worker": {"replicas": 2, "template": {"spec": bad}}}})
        trouble(run, kind)
        assert run.training.round == one.round
        mended = {**dict.fromkeys(bad), **good}
        run.patch({"replicaSpecs": {"worker": {"template": {"spec": mended}}}})
        two = run.runs(2, after=one.round)
        run.until(partial(over, kind), "it is over")
        run.patch({"replicaSpecs": {"worker": {"replicas": 1}}})
        one = run.runs(1, after=two.round)
    assert one.term == 1, "nothing was started anew"
    assert run.pods["n0"]["status"]["phase"] == "Running"
    assert one.restarts.keys() <= {"join", "scale"}


def submit_unchecked(there: Watched, doc: Obj) -> Job:
    cluster = there.cluster
    cluster.kubectl("create", "--validate=false", "-f", "-", "-n", there.namespace,
                    stdin=json.dumps(doc))  # fmt: skip
    return Job(cluster, there, doc["metadata"]["name"])


def test_a_quota_is_a_condition_and_more_of_it_is_enough(there: Watched, agent_image: str) -> None:
    cluster = there.cluster
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
             "spec": {"hard": {"pods": "2"}}}  # fmt: skip
    cluster.apply(quota, namespace=there.namespace)
    until(
        lambda: (cluster.get("quota", "q", there.namespace) or {}).get("status", {}).get("hard"),
        "the quota is heeded",
    )
    run = job(there, agent_image, replicas=2, minReplicas=1)
    small = run.runs(1)
    assert "exceeded quota" in trouble(run, "QuotaExceeded")
    cluster.apply({**quota, "spec": {"hard": {"pods": "9"}}}, namespace=there.namespace)
    after = run.runs(2, after=small.round)
    run.until(lambda: not run.holds("QuotaExceeded"), "it is over")
    assert after.term == small.term, "without a new master"


def test_pods_that_the_cluster_forbids_are_a_condition(there: Watched, agent_image: str) -> None:
    there.cluster.kubectl("label", "ns", there.namespace,
                           "pod-security.kubernetes.io/enforce=restricted")  # fmt: skip
    run = job(there, agent_image, replicas=1)
    assert "PodSecurity" in trouble(run, "PodsForbidden"), "and the master itself is allowed"


def test_a_name_that_is_taken_is_a_condition(there: Watched, agent_image: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job-n0"},
           "spec": {"containers": [{"name": "c", "image": agent_image, "command": ["sleep", "9"]}],
                    "terminationGracePeriodSeconds": 1}}  # fmt: skip
    there.cluster.apply(pod, namespace=there.namespace)
    run = job(there, agent_image, replicas=1)
    assert "does not belong to this job" in trouble(run, "NameConflict")
    run.kubectl("delete", "pod", "job-n0")
    assert run.runs(1).term == 1, "without a new master"


def test_a_right_that_is_taken_away_is_a_condition(
    there: Watched, agent_image: str, operator: str
) -> None:
    run = job(there, agent_image, replicas=1, maxReplicas=2)
    before = run.runs(1)
    rules = run.kubectl("get", "role", master_of("job"), "-ojson")
    fewer = json.loads(rules)
    fewer["rules"][0]["verbs"].remove("create")
    with no_operator(there.cluster, operator):  # which would give it back
        replace(there, fewer)
        until(
            lambda: not may(there.cluster, run.account, "create", "pods", there.namespace),
            "the API server has heard of it",
        )
        run.kubectl("scale", "ej/job", "--replicas=2")
        assert "cannot create resource" in trouble(run, "PermissionDenied")
        assert run.training.phase is JobPhase.RUNNING
        replace(there, json.loads(rules))
        assert run.runs(2, after=before.round).term == before.term, "without a new master"


def replace(there: Watched, obj: Obj) -> None:
    obj["metadata"].pop("resourceVersion", None)
    there.cluster.kubectl("replace", "-f", "-", "-n", there.namespace, stdin=json.dumps(obj))
