"""Faults: how to find the target of a role, how to inject a fault, and how to undo it.

The search for a target uses the API server. The injection of a fault into a process does not, so it
works without an API server.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dlrover_py.protocol.names import master_of
from dlrover_py.protocol.status import NodePhase, NodeRole, NodeStatus
from tests.cluster.chaos.check import Blame, Partition
from tests.cluster.chaos.plan import STANDBY, Fault, Kind
from tests.cluster.harness import Cluster, LabError, Obj, until
from tests.cluster.jobs import Job

OPERATOR = "app.kubernetes.io/name=dlrover-operator"
ROLE = "elasticjob.dlrover/replica-type"
NAME = "elasticjob.dlrover/name"
WORKER = r"^\S*python\S* -u \S*/worker\.py "
SPOT, MARK = "dlrover.test/spot", "dlrover-test-chaos"
PATIENCE = 2
"""Number of restarts of a container after which the kubelet's delay is too long for a test."""
ALONE_S, BESIDE_S = 30.0, 70.0
"""Seconds after which a cut-off node stops: alone, and on the host of its master.

A node without contact stops within a lease and 12 s. Beside its master it stops within a minute,
because the master waits that long (docs/decisions/0004). Two busy cores may add a delay.
"""
NOTHING: Callable[[], None] = lambda: None  # noqa: E731


@dataclass
class Strike:
    """A fault with its target."""

    whom: str
    hit: Callable[[], object]
    mend: Callable[[], object] = NOTHING
    blame: dict[str, Blame] = field(default_factory=dict)
    """For each job: what may count against its restart budgets."""
    parted: dict[str, Partition] = field(default_factory=dict)
    """For each job: its nodes that are cut off until the fault is undone."""
    breaks: frozenset[str] = frozenset()
    """Jobs whose round ends through the fault."""
    holds: frozenset[str] = frozenset()
    """Jobs whose round may end through the fault.

    If it does not end, only steps after the fault was undone prove a recovery.
    """
    sizes: dict[str, int] = field(default_factory=dict)
    """For each job: the number of nodes that it must have afterwards."""


class Striker:
    """Injects faults into the jobs of one namespace."""

    def __init__(self, cluster: Cluster, operator: str, jobs: list[Job]) -> None:
        self.cluster, self.operator, self.jobs = cluster, operator, jobs

    def aim(self, fault: Fault) -> Strike:
        """Find the target of a fault."""
        job = self.jobs[fault.job % len(self.jobs)]
        kind = fault.kind
        match kind:
            case Kind.WORKER_KILLED:
                return self._worker(job, fault)
            case Kind.AGENT_KILLED | Kind.POD_DELETED | Kind.POD_FORCED | Kind.EVICTED:
                return self._pod(job, fault)
            case Kind.CORDONED:
                return self._cordoned(job, fault)
            case Kind.MASTER_KILLED | Kind.MASTER_DELETED | Kind.MASTER_FORCED | Kind.MASTER_TWICE:
                return self._master(job, kind)
            case Kind.OPERATOR_KILLED:
                return Strike("operator", self._kill_operators)
            case Kind.OPERATOR_AWAY:
                return Strike("operator", partial(self._operators, 0), partial(self._operators, 1))
            case Kind.HOST_CUT | Kind.HOST_CRASHED | Kind.KUBELET_HUNG:
                return self._host(kind, self._host_of(job, self._node(job, fault.rank)))
            case Kind.HEAD_CUT:
                return self._host(kind, self._bring_master_to_rank_0(job))
            case Kind.API_CUT:
                return self._host(kind, str(self._running_master(job)["spec"]["nodeName"]))
            case Kind.ALL_FORCED:
                return self._all_forced(job)
            case Kind.DRAINED | Kind.TAINTED:
                return self._emptied(job, fault)
            case Kind.QUOTA:
                return self._without_room(job, fault)
            case Kind.BAD_IMAGE:
                return self._without_image(job, fault)
            case Kind.API_STOPPED | Kind.API_KILLED | Kind.API_FORGOT | Kind.ETCD_STOPPED:
                return self._api(kind)
            case Kind.API_BROKEN:
                return self._broken(job)
            case Kind.API_FORBIDS:
                return self._forbidden(job)
            case Kind.SCALED | Kind.FLAPPED:
                return self._scaled(job, fault)
            case Kind.SUSPENDED:
                return self._suspended(job)
            case Kind.PAIR:
                raise ValueError("a pair is two faults")

    # --- Nodes ---

    def _worker(self, job: Job, fault: Fault) -> Strike:
        node = self._node(job, max(fault.rank, 0))
        pod = f"{job.name}-{node.id}"
        found = self.cluster.processes(pod, job.namespace)
        pids = [pid for pid, said in found.items() if re.search(WORKER, said)]
        if not pids:
            raise LabError(f"no worker in {pod}: {found}")
        return Strike(
            f"{pod}, pid {pids}",
            partial(_kill, pids),
            blame={job.name: Blame(failures=1, nodes=frozenset({node.id}), owed=True)},
            breaks=frozenset({job.name}),
        )

    def _pod(self, job: Job, fault: Fault) -> Strike:
        node = self._node(job, fault.rank)
        pod, kind = f"{job.name}-{node.id}", fault.kind
        hit: Callable[[], None]
        blame, lost = Blame(), Blame(losses=1, nodes=frozenset({node.id}))
        match kind:
            case Kind.AGENT_KILLED:
                found = self.cluster.processes(pod, job.namespace)
                first = [pid for pid in found if _is_first(pid)]
                if not first:
                    raise LabError(f"no agent in {pod}: {found}")
                hit, blame = partial(_kill, first), lost
            case Kind.POD_FORCED:
                hit, blame = partial(self._delete, pod, job, force=True), lost
            case Kind.EVICTED:
                hit = partial(self._evict, pod, job)
            case _:
                hit = partial(self._delete, pod, job)
        return Strike(pod, hit, blame={job.name: blame}, breaks=_of(job, node))

    def _all_forced(self, job: Job) -> Strike:
        """Delete all Pods of a job, so that no checkpoint is left in memory."""
        labels = f"{NAME}={job.name},{ROLE}=worker"
        how = ("--force", "--grace-period=0", "--wait=false")
        every = frozenset(n.id for n in job.training.nodes if n.phase is not NodePhase.GONE)

        def hit() -> None:
            job.kubectl("delete", "pods", "-l", labels, *how)

        return Strike(
            f"{len(every)} Pods of {job.name}",
            hit,
            blame={job.name: Blame(losses=len(every), nodes=every)},
            breaks=frozenset({job.name}),
        )

    def _cordoned(self, job: Job, fault: Fault) -> Strike:
        node = self._node(job, fault.rank)
        host, pod = self._host_of(job, node), f"{job.name}-{node.id}"

        def hit() -> None:
            self.cluster.cordon(host)
            self._delete(pod, job)

        mend = partial(self.cluster.uncordon, host)
        return Strike(f"{pod} on {host}", hit, mend, breaks=_of(job, node))

    def _delete(self, pod: str, job: Job, *, force: bool = False) -> None:
        with suppress(LabError):  # the other fault of a pair has removed it
            self.cluster.delete_pod(pod, job.namespace, force=force)

    def _evict(self, pod: str, job: Job) -> None:
        meta = {"name": pod, "namespace": job.namespace}
        wish = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        path = f"/api/v1/namespaces/{job.namespace}/pods/{pod}/eviction"
        with suppress(LabError):
            self.cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(wish))

    def _node(self, job: Job, rank: int) -> NodeStatus:
        nodes = job.training.nodes
        if rank == STANDBY:
            spare = [n for n in nodes if n.role is NodeRole.STANDBY and n.phase is NodePhase.LIVE]
            if spare:
                return spare[0]
        members = sorted(
            (n for n in nodes if n.role is NodeRole.MEMBER), key=lambda n: n.node_rank or 0
        )
        return members[rank % len(members)]

    # --- Masters and operators ---

    def _master(self, job: Job, kind: Kind) -> Strike:
        name = self._running_master(job)["metadata"]["name"]
        hit: Callable[[], None] = partial(self._delete, name, job)
        if kind is Kind.MASTER_KILLED:
            pids = list(self.cluster.processes(name, job.namespace))
            hit = partial(_kill, pids)
            if _restarts(job.watched.all("Pod")[name]) >= PATIENCE:
                # The kubelet would wait longer each time, but another Pod starts immediately.
                hit = partial(self._delete, name, job, force=True)
        elif kind is Kind.MASTER_FORCED:
            hit = partial(self._delete, name, job, force=True)
        elif kind is Kind.MASTER_TWICE:

            def hit() -> None:
                self._delete(name, job, force=True)
                other = self._running_master(job, but=name)["metadata"]["name"]
                self._delete(other, job, force=True)

        return Strike(name, hit)

    def _running_master(self, job: Job, *, but: str = "") -> Obj:
        """Return the Pod of a running master."""

        def look() -> Obj | None:
            for name, pod in job.watched.all("Pod").items():
                labels = pod["metadata"].get("labels") or {}
                states = (pod.get("status") or {}).get("containerStatuses") or []
                if (
                    (labels.get(ROLE), labels.get(NAME)) == ("dlrover-master", job.name)
                    and name != but
                    and "deletionTimestamp" not in pod["metadata"]
                    and any("running" in (s.get("state") or {}) for s in states)
                ):
                    return pod
            return None

        found = job.until(look, "a master that runs", within_s=240)
        assert found is not None
        return found

    def _kill_operators(self) -> None:
        """Kill the operators and delete their Pods, because each restart would be delayed more."""
        for pod in self.cluster.list("pods", self.operator, OPERATOR):
            name = pod["metadata"]["name"]
            with suppress(LabError):  # it has not started yet
                self.cluster.kill(name, self.operator)
            with suppress(LabError):
                self.cluster.delete_pod(name, self.operator, force=True)

    def _operators(self, number: int) -> None:
        scale = ("scale", "deploy/dlrover-operator", "-n", self.operator)
        self.cluster.kubectl(*scale, f"--replicas={number}")

    # --- Hosts ---

    def _host_of(self, job: Job, node: NodeStatus) -> str:
        return str(job.pods[node.id]["spec"]["nodeName"])

    def _host(self, kind: Kind, host: str) -> Strike:
        stack, cluster = ExitStack(), self.cluster
        fault = {
            Kind.HOST_CRASHED: cluster.crashed,
            Kind.KUBELET_HUNG: cluster.hung,
            Kind.API_CUT: cluster.cut_off_from_api,
        }.get(kind, cluster.cut_off)
        blame, parted = dict[str, Blame](), dict[str, Partition]()
        for job in self.jobs:
            mine, every = self._on(job, host), frozenset(job.pods)
            beside = self._has_master(job, host)
            if not (mine or beside):
                continue
            # Its master may lose all other nodes as well, unless they still reach it.
            lost = every if beside and kind is not Kind.API_CUT else mine
            if kind is not Kind.KUBELET_HUNG:
                hosts = frozenset({host})
                blame[job.name] = Blame(losses=len(every), nodes=lost, hosts=hosts)
            if kind is not Kind.HOST_CRASHED:  # on a crashed host nothing runs on
                cut = kind in (Kind.HOST_CUT, Kind.HEAD_CUT)
                wait_s = BESIDE_S if beside else ALONE_S
                parted[job.name] = Partition(mine, wait_s, sure=cut and len(mine) == 1)
        return Strike(
            host,
            lambda: stack.enter_context(fault(host)),
            stack.close,
            blame=blame,
            parted=parted,
            breaks=self._train_on(host) if kind is Kind.HOST_CRASHED else frozenset(),
            holds=frozenset(parted) | frozenset(blame),
        )

    def _on(self, job: Job, host: str) -> frozenset[str]:
        """Return the nodes of a job on a host."""
        return frozenset(
            node
            for node, pod in job.pods.items()
            if pod["spec"].get("nodeName") == host
            and pod["status"].get("phase") in ("Pending", "Running")
        )

    def _has_master(self, job: Job, host: str) -> bool:
        return any(
            pod["spec"].get("nodeName") == host
            and pod["metadata"]["labels"].get(ROLE) == "dlrover-master"
            and pod["metadata"]["labels"].get(NAME) == job.name
            and pod["status"].get("phase") in ("Pending", "Running")
            for pod in job.watched.all("Pod").values()
        )

    def _bring_master_to_rank_0(self, job: Job) -> str:
        """Move the master to the host of rank 0, and return the host."""
        host = self._host_of(job, self._node(job, 0))
        master = self._running_master(job)
        if master["spec"]["nodeName"] == host:
            return host
        try:
            for other in self.cluster.nodes:
                if other != host:
                    self.cluster.cordon(other)
            name = master["metadata"]["name"]
            self._delete(name, job)
            new = self._running_master(job, but=name)
            term = job.training.term
            until(
                lambda: (
                    self.cluster.pod_ready(new["metadata"]["name"], job.namespace)
                    or job.training.term > term
                ),
                "the master on the host of rank 0 is ready",
                within_s=120,
                every_s=0.5,
            )
        finally:
            self.cluster.heal()
        return host

    def _emptied(self, job: Job, fault: Fault) -> Strike:
        host, kubectl = self._host_of(job, self._node(job, fault.rank)), self.cluster.kubectl
        hit: Callable[[], object]
        mend: Callable[[], object]
        if fault.kind is Kind.DRAINED:
            hit = partial(self.cluster.drain, host, within_s=120)
            mend = partial(self.cluster.uncordon, host)
        else:
            hit = partial(kubectl, "taint", "node", host, f"{SPOT}=soon:NoExecute")
            mend = partial(kubectl, "taint", "node", host, f"{SPOT}-")
        return Strike(host, hit, mend, breaks=self._train_on(host))

    def _without_room(self, job: Job, fault: Fault) -> Strike:
        """Delete a Pod while a quota permits no replacement."""
        lost = self._pod(job, replace(fault, kind=Kind.POD_FORCED))
        quota = {"apiVersion": "v1", "kind": "ResourceQuota",
                 "metadata": {"name": MARK, "namespace": job.namespace},
                 "spec": {"hard": {"pods": "0"}}}  # fmt: skip

        def hit() -> None:
            self.cluster.apply(quota, namespace=job.namespace)
            self._until_refused(job)
            lost.hit()

        return replace(lost, hit=hit, mend=partial(self._remove, quota))

    def _without_image(self, job: Job, fault: Fault) -> Strike:
        """Delete a Pod while the template has an image that does not exist."""
        lost = self._pod(job, replace(fault, kind=Kind.POD_FORCED))
        good = job.obj["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
        bad = [{**container, "image": "dlrover.test/no-such:1"} for container in good]

        def wish(containers: list[Obj]) -> None:
            spec = {"template": {"spec": {"containers": containers}}}
            job.patch({"replicaSpecs": {"worker": spec}})

        def hit() -> None:
            wish(bad)
            lost.hit()

        return replace(lost, hit=hit, mend=partial(wish, good))

    def _train_on(self, host: str) -> frozenset[str]:
        """Return the jobs that have a member of their round on a host."""
        return frozenset(
            job.name
            for job in self.jobs
            for node in job.training.nodes
            if node.role is NodeRole.MEMBER
            and node.id in job.pods
            and self._host_of(job, node) == host
        )

    # --- The API server and the specs of jobs ---

    def _api(self, kind: Kind) -> Strike:
        stack, cluster = ExitStack(), self.cluster
        fault = {
            Kind.API_STOPPED: cluster.api_server_stopped,
            Kind.API_KILLED: cluster.api_server_killed,
            Kind.API_FORGOT: self._api_server_forgets,
            Kind.ETCD_STOPPED: cluster.etcd_stopped,
        }[kind]
        return Strike(kind.value, lambda: stack.enter_context(fault()), stack.close)

    @contextmanager
    def _api_server_forgets(self) -> Iterator[None]:
        with self.cluster.api_server_killed():
            yield
            self.cluster.compact()

    def _broken(self, job: Job) -> Strike:
        """Make all writes of masters fail (500), by a webhook without a server."""
        mine = f"request.userInfo.username.startsWith('system:serviceaccount:{job.namespace}:')"
        hook = {
            "name": "broken.dlrover.test",
            "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": "Fail",
            "clientConfig": {"service": {"name": "none", "namespace": job.namespace}},
            "rules": [{"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["*"],
                       "resources": ["*/*"]}],
            "matchConditions": [{"name": "ours", "expression": mine}],
        }  # fmt: skip
        hooks = {"apiVersion": "admissionregistration.k8s.io/v1",
                 "kind": "ValidatingWebhookConfiguration",
                 "metadata": {"name": MARK}, "webhooks": [hook]}  # fmt: skip

        def hit() -> None:
            self.cluster.apply(hooks)
            self._until_refused(job)

        return Strike("webhook", hit, partial(self._remove, hooks))

    def _forbidden(self, job: Job) -> Strike:
        name = master_of(job.name)
        rules = json.loads(job.kubectl("get", "role", name, "-ojson"))["rules"]

        def allow(these: list[Obj]) -> None:
            wish = json.dumps([{"op": "replace", "path": "/rules", "value": these}])
            job.kubectl("patch", "role", name, "--type=json", "-p", wish)

        def hit() -> None:
            allow([])
            self._until_refused(job)

        return Strike(name, hit, partial(allow, rules))

    def _until_refused(self, job: Job) -> None:
        """Wait until the job's master cannot create Pods."""
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": MARK},
               "spec": {"containers": [{"name": "main", "image": "none"}]}}  # fmt: skip
        account = f"system:serviceaccount:{job.namespace}:{master_of(job.name)}"
        wish = ("create", "--dry-run=server", f"--as={account}", "-f", "-")

        def refused() -> bool:
            try:
                self.cluster.kubectl(*wish, "-n", job.namespace, stdin=json.dumps(pod))
            except LabError:
                return True
            return False

        until(refused, f"{account} is refused", within_s=30, every_s=0.1)

    def _remove(self, obj: Obj) -> None:
        self.cluster.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=json.dumps(obj))

    def _scaled(self, job: Job, fault: Fault) -> Strike:
        def hit() -> None:
            for size in fault.sizes:
                job.kubectl("scale", f"ej/{job.name}", f"--replicas={size}")

        size = {job.name: fault.sizes[-1]} if fault.kind is Kind.SCALED else {}
        return Strike(job.name, hit, sizes=size)

    def _suspended(self, job: Job) -> Strike:
        def hit() -> None:
            job.patch({"suspend": True})
            job.until(lambda: job.holds("Suspended"), "Suspended", within_s=240)

        mend = partial(job.patch, {"suspend": False})
        return Strike(job.name, hit, mend, breaks=frozenset({job.name}))


def _of(job: Job, node: NodeStatus) -> frozenset[str]:
    return frozenset({job.name} if node.role is NodeRole.MEMBER else ())


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_first(pid: int) -> bool:
    """Return whether a process is process 1 of its container, with which the container ends."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[-1] == "1"
    return False


def _restarts(pod: Obj) -> int:
    states = (pod.get("status") or {}).get("containerStatuses") or []
    return sum(int(s.get("restartCount", 0)) for s in states)
