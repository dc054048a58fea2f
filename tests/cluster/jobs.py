"""ElasticJobs for tests: submitted, watched (no polling), hurt."""

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import yaml

from dlrover_py.kube import ELASTICJOBS, PODS, Changed, Gone, Kind, Kube, Listed
from dlrover_py.master.store import HOLDER
from dlrover_py.protocol.agents import WorkerPhase
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import ENV_ROUND, journal_of, master_of
from dlrover_py.protocol.status import JobPhase, NodeRole, Training
from tests.cluster.harness import Cluster, Obj, until

T = TypeVar("T")
OPERATOR = "app.kubernetes.io/name=dlrover-operator"
WORKER = r"^\S*python3 -c"
"""Command line of a worker of ``steps()``; its agent's has the script too, further behind."""
LEASE_S = 10.0
"""Of these jobs' masters. The product's 5 s are too short for agents that share two busy cores with
a whole cluster; a host is NotReady only after 12."""

STEPS = """
import sys, time
from dlrover_py.trainer import session
total, pause = int(sys.argv[1]), float(sys.argv[2])
for step in range(1, total + 1):
    if session.should_stop():
        print("asked to stop at", step, flush=True)
        sys.exit(0)
    session.report_step(step, total)
    time.sleep(pause)
print("done", session.world().rank, flush=True)
"""
"""A script without torch: it starts in a moment."""


def document(
    name: str,
    image: str,
    command: list[str],
    *,
    replicas: int = 2,
    spec: Obj | None = None,
    pod: Obj | None = None,
    lease_s: float = LEASE_S,
    **worker: Any,
) -> Obj:
    """An ElasticJob; ``worker`` are fields of its replica spec, ``pod`` of its template's spec."""
    main = {"name": "main", "image": image, "command": command}
    # Short, but a kubelet that is late must be able to say that a Pod has ended by itself.
    template = {"spec": {"containers": [main], "terminationGracePeriodSeconds": 15, **(pod or {})}}
    role = {"replicas": replicas, "template": template, **worker}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {
            "replicaSpecs": {"worker": role, "dlrover-master": patient(lease_s)},
            **(spec or {}),
        },
    }


def patient(lease_s: float = LEASE_S) -> Obj:
    """A master's replica spec, with that lease."""
    env = [{"name": "DLROVER_MASTER_LEASE_S", "value": str(lease_s)}]
    return {"template": {"spec": {"containers": [{"name": "main", "env": env}]}}}


def steps(total: int = 100_000, pause: float = 0.05) -> list[str]:
    """The command of a job that takes so many steps and does nothing else."""
    return ["elastic-run", "--no-python", "python3", "-c", STEPS, str(total), str(pause)]


def spread() -> Obj:
    """Of a template: Pods of the job on different hosts."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"elasticjob.dlrover/name": "job",
                                          "elasticjob.dlrover/replica-type": "worker"}},
    }  # fmt: skip
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"podAntiAffinity": {key: [{"weight": 100, "podAffinityTerm": term}]}}}


class Watched:
    """What there is in a namespace, by a watch of its own.

    ``notice`` is told of each version that is seen, in the watch's thread: the kind, the object,
    and whether it comes from a list, before which versions may have been missed.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        *,
        also: Sequence[Kind] = (),
        notice: Callable[[str, Obj, bool], None] = lambda _kind, _obj, _listed: None,
    ) -> None:
        self.cluster, self.namespace = cluster, namespace
        self._kinds, self._notice = (ELASTICJOBS, PODS, *also), notice
        self._found: dict[str, dict[str, Obj]] = {kind.name: {} for kind in self._kinds}
        self._news = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._main: asyncio.Task[None] | None = None
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._watch_all())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.close()

    async def _watch_all(self) -> None:
        async with await Kube.connect(kubeconfig=self.cluster.kubeconfig) as kube:
            await asyncio.gather(*(self._watch(kube, kind) for kind in self._kinds))

    async def _watch(self, kube: Kube, kind: Kind) -> None:
        changes = kube.watch(kind, self.namespace, view=lambda obj: obj)
        async with contextlib.aclosing(changes):
            async for change in changes:
                with self._news:
                    found = self._found[kind.name]
                    match change:
                        case Listed(items):
                            found.clear()
                            found.update({i["metadata"]["name"]: i for i in items})
                            for item in items:
                                self._notice(kind.name, item, True)
                        case Changed(item):
                            found[item["metadata"]["name"]] = item
                            self._notice(kind.name, item, False)
                        case Gone(item):
                            found.pop(item["metadata"]["name"], None)
                    self._news.notify_all()

    def all(self, kind: str) -> dict[str, Obj]:
        """Objects by name, as they were last seen."""
        with self._news:
            return dict(self._found[kind])

    def until(self, look: Callable[[], T], what: str, *, within_s: float = 120.0) -> T:
        """Wait until there is something (truthy), and return it."""
        deadline = time.monotonic() + within_s
        with self._news:
            while not (seen := look()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {within_s:g} s: {what}\n{self.story()}")
                self._news.wait(min(left, 1.0))  # not all that is looked at is watched
            return seen

    def close(self) -> None:
        """Watch no more."""
        if self._main is not None:
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10)

    def story(self) -> str:
        """What there is to be said of jobs and Pods when something has gone wrong."""
        lines = []
        for name, job in self._found["ElasticJob"].items():
            status = job.get("status") or {}
            lines.append(f"job {name}: phase {status.get('phase')}")
            lines += [
                f"  {c['type']}={c['status']} {c['reason']}: {c['message'][:300]}"
                for c in status.get("conditions") or []
            ]
            events = (status.get("training") or {}).get("events") or []
            lines += [f"  event {e['reason']}: {e['message'][:300]}" for e in events]
        for name, pod in self._found["Pod"].items():
            status = pod.get("status") or {}
            states = [c.get("state") for c in status.get("containerStatuses") or []]
            lines.append(f"pod {name}: {status.get('phase')} {states}")
        return "\n".join(lines)


class Job:
    """One ElasticJob."""

    def __init__(self, cluster: Cluster, watched: Watched, name: str) -> None:
        self.cluster, self.watched, self.name = cluster, watched, name
        self.namespace = watched.namespace

    @property
    def obj(self) -> Obj:
        """The object; empty if it is gone."""
        return self.watched.all("ElasticJob").get(self.name, {})

    @property
    def status(self) -> Obj:
        """Its status."""
        found: Obj = self.obj.get("status") or {}
        return found

    @property
    def phase(self) -> str:
        """As the operator says."""
        return str(self.status.get("phase", ""))

    @property
    def seen(self) -> Training | None:
        """As the master says, if it has said anything."""
        found = self.status.get("training")
        return None if found is None else Training.model_validate(found)

    @property
    def training(self) -> Training:
        """As the master says."""
        seen = self.seen
        assert seen is not None, f"no master of {self.name} has said anything"
        return seen

    def condition(self, kind: str) -> Obj:
        """The condition of this type; empty if there is none."""
        found = (c for c in self.status.get("conditions") or [] if c["type"] == kind)
        return next(found, {})

    def holds(self, kind: str) -> bool:
        """Whether the condition is True."""
        return bool(self.condition(kind).get("status") == "True")

    @property
    def pods(self) -> dict[str, Obj]:
        """Its workers' Pods by node id."""
        label = "elasticjob.dlrover/replica-type"
        return {
            name.removeprefix(f"{self.name}-"): pod
            for name, pod in self.watched.all("Pod").items()
            if pod["metadata"].get("labels", {}).get(label) == "worker"
            and pod["metadata"]["labels"].get("elasticjob.dlrover/name") == self.name
        }

    def until(self, look: Callable[[], T], what: str, *, within_s: float = 120.0) -> T:
        """Wait until there is something (truthy)."""
        return self.watched.until(look, f"{self.name}: {what}", within_s=within_s)

    def runs(self, nodes: int, *, after: int = 0, within_s: float = 180.0) -> Training:
        """Wait for a round of so many nodes, later than that one, that has made a step and of
        whose nodes each has said what it runs: the first step may be another node's."""

        def look() -> Training | None:
            seen = self.seen
            good = (
                seen is not None
                and seen.phase is JobPhase.RUNNING
                and seen.nodes_in_round == nodes
                and seen.round > after
                and any(
                    e.reason == "TrainingResumed" and e.round == seen.round for e in seen.events
                )
                and all(
                    n.pids and all(n.pids) and n.workers is not WorkerPhase.STOPPING
                    for n in seen.nodes
                    if n.role is NodeRole.MEMBER
                )
            )
            return seen if good else None

        return self.until(look, f"a round of {nodes} nodes after {after}", within_s=within_s)

    def formed(self, number: int, *, within_s: float = 120.0) -> str:
        """Wait for a round; what was said of it. It may be over already: the status of one that
        lasts for a moment is never written."""

        def look() -> str:
            events = self.seen.events if self.seen is not None else []
            found = (e for e in events if e.reason == "RoundFormed" and e.round == number)
            return next((e.message for e in found), "")

        return self.until(look, f"round {number}", within_s=within_s)

    @property
    def holder(self) -> str:
        """The master's Pod that has written the journal last; "" once it has let go of it."""
        journal = self.cluster.get("secret", journal_of(self.name), self.namespace) or {}
        notes: dict[str, str] = journal.get("metadata", {}).get("annotations") or {}
        return str(json.loads(notes[HOLDER])["pod"]) if notes.get(HOLDER) else ""

    @property
    def account(self) -> str:
        """Who its master is to the API server."""
        return f"system:serviceaccount:{self.namespace}:{master_of(self.name)}"

    def workers(self, node: str) -> set[int]:
        """The node's workers of the present round; none while it is about to start them."""
        pod, mark = f"{self.name}-{node}", f"{ENV_ROUND}={self.training.round}"
        found = self.cluster.processes(pod, self.namespace, having=mark)
        return {pid for pid, said in found.items() if re.search(WORKER, said)}

    def kill_worker(self, node: str) -> None:
        """Kill the node's worker of the present round, once it runs."""

        def look() -> int:
            number = self.training.round
            return number if self.workers(node) else 0

        mark = f"{ENV_ROUND}={self.until(look, f'the worker of {node} runs')}"
        self.cluster.kill(f"{self.name}-{node}", self.namespace, WORKER, having=mark)

    def ends(self, phase: str, *, within_s: float = 180.0) -> Obj:
        """Wait until it has ended so."""
        self.until(lambda: self.phase == phase, f"phase {phase}", within_s=within_s)
        return self.status

    def patch(self, spec: Obj) -> None:
        """Change its spec."""
        self.cluster.kubectl(
            *("patch", "elasticjob", self.name, "-n", self.namespace, "--type=merge"),
            *("-p", json.dumps({"spec": spec})),
        )

    def kubectl(self, *args: str) -> str:
        """kubectl in its namespace."""
        return self.cluster.kubectl(*args, "-n", self.namespace)


def submit(cluster: Cluster, watched: Watched, doc: Obj) -> Job:
    """Create a job."""
    ElasticJob.parse(doc)
    cluster.kubectl("create", "-f", "-", "-n", watched.namespace, stdin=yaml.safe_dump(doc))
    return Job(cluster, watched, doc["metadata"]["name"])


@contextmanager
def watching(cluster: Cluster, namespace: str) -> Iterator[Watched]:
    """A watch for a test."""
    watched = Watched(cluster, namespace)
    try:
        yield watched
    finally:
        watched.close()


@contextmanager
def no_operator(cluster: Cluster, release: str) -> Iterator[None]:
    """Nobody mends what the block breaks, nor does what it wishes: the operator comes back after
    it."""
    scale = ("scale", "deploy/dlrover-operator", "-n", release)
    cluster.kubectl(*scale, "--replicas=0")
    try:
        until(lambda: not cluster.list("pods", release, OPERATOR), "there is no operator")
        yield
    finally:
        cluster.kubectl(*scale, "--replicas=1")
