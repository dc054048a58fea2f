"""ElasticJobs for tests: to submit them, to watch them without polling, and to inject faults."""

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import yaml

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import ELASTICJOBS, PODS, Kind
from dlrover_py.kubernetes.watch import Changed, Gone, Listed
from dlrover_py.master.journal_store import HOLDER
from dlrover_py.protocol.agents import WorkerPhase
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import ENV_ROUND, journal_of, master_of
from dlrover_py.protocol.status import JobPhase, NodeRole, Training
from tests.cluster.harness import Cluster, LabError, Obj, until
from tests.programs import PROGRAMS, source

T = TypeVar("T")
OPERATOR = "app.kubernetes.io/name=dlrover-operator"
WORKER = r"^\S*python3 -c"
"""Pattern of the command line of a worker of ``steps()``.

The agent's command line has the script too, but not at the beginning.
"""
LEASE_S = 10.0
"""Lease of the masters of these jobs, in seconds.

The default of 5 s is too short for agents that share two busy cores with a whole cluster. A host is
NotReady only after 12 s.
"""

STEPS = source(PROGRAMS / "report_steps.py")
"""A script without torch, which starts quickly."""
UNTIL_STOPPED = source(PROGRAMS / "report_in_a_pod.py")
"""A script whose argument is the pause between two steps."""


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
    """Return an ElasticJob as plain data.

    Args:
        name: name of the job.
        image: image of the workers.
        command: command of the workers.
        replicas: number of nodes.
        spec: more fields of the job's spec.
        pod: fields of the spec of the Pod template.
        lease_s: lease of the master in seconds.
        worker: fields of the replica spec.
    """
    main = {"name": "main", "image": image, "command": command}
    # Short, but long enough for a slow kubelet to report that a Pod has ended by itself.
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
    """Return the replica spec of a master with this lease."""
    env = [{"name": "DLROVER_MASTER_LEASE_S", "value": str(lease_s)}]
    return {"template": {"spec": {"containers": [{"name": "main", "env": env}]}}}


def steps(total: int = 100_000, pause: float = 0.05) -> list[str]:
    """Return the command of a job that only makes steps.

    Args:
        total: number of steps.
        pause: seconds between two steps.
    """
    return ["elastic-run", "--no-python", "python3", "-c", STEPS, str(total), str(pause)]


def spread() -> Obj:
    """Return fields of a Pod template that put the Pods of the job on different hosts."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"elasticjob.dlrover/name": "job",
                                          "elasticjob.dlrover/replica-type": "worker"}},
    }  # fmt: skip
    key = "preferredDuringSchedulingIgnoredDuringExecution"
    return {"affinity": {"podAntiAffinity": {key: [{"weight": 100, "podAffinityTerm": term}]}}}


class Watched:
    """The objects of a namespace, kept up to date by a watch in a thread.

    The thread calls ``notice`` with each version of an object: the kind, the object, and whether it
    comes from a list. Versions before a list may be missing.
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
        async with await KubeClient.connect(kubeconfig=self.cluster.kubeconfig) as kube:
            await asyncio.gather(*(self._watch(kube, kind) for kind in self._kinds))

    async def _watch(self, kube: KubeClient, kind: Kind) -> None:
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
        """Return the newest known objects of a kind, by name."""
        with self._news:
            return dict(self._found[kind])

    def until(
        self, look: Callable[[], T | Literal[False] | None], what: str, *, within_s: float = 120.0
    ) -> T:
        """Call a function until its result is true, and return the result.

        Args:
            look: the function.
            what: what the test waits for, for the error message.
            within_s: seconds after which the test fails.
        """
        deadline = time.monotonic() + within_s
        with self._news:
            while not (seen := look()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {within_s:g} s: {what}\n{self.story()}")
                self._news.wait(min(left, 1.0))  # the function may also read what is not watched
            return seen

    def close(self) -> None:
        """End the watch."""
        if self._main is not None:
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(10)

    def story(self) -> str:
        """Return the state of jobs and Pods as text, for the message of a failed test."""
        lines = []
        for name, job in self._found["ElasticJob"].items():
            status = job.get("status") or {}
            lines.append(f"job {name}: phase {status.get('phase')}")
            lines += [
                f"  {c['type']}={c['status']} {c['reason']}: {c['message'][:300]}"
                for c in status.get("conditions") or []
            ]
            training = status.get("training") or {}
            lines += [f"  node {node}" for node in training.get("nodes") or []]
            events = training.get("events") or []
            lines += [f"  event {e['reason']}: {e['message'][:300]}" for e in events]
        for name, pod in self._found["Pod"].items():
            status = pod.get("status") or {}
            states = [c.get("state") for c in status.get("containerStatuses") or []]
            lines.append(f"pod {name}: {status.get('phase')} {states}")
        return "\n".join(lines)


class Job:
    """An ElasticJob in a watched namespace."""

    def __init__(self, cluster: Cluster, watched: Watched, name: str) -> None:
        self.cluster, self.watched, self.name = cluster, watched, name
        self.namespace = watched.namespace

    @property
    def obj(self) -> Obj:
        """The object; empty if it does not exist."""
        return self.watched.all("ElasticJob").get(self.name, {})

    @property
    def status(self) -> Obj:
        """The status of the job; empty if it has none."""
        found: Obj = self.obj.get("status") or {}
        return found

    @property
    def phase(self) -> str:
        """The phase that the operator publishes."""
        return str(self.status.get("phase", ""))

    @property
    def seen(self) -> Training | None:
        """The status that the master publishes; None if there is none yet."""
        found = self.status.get("training")
        return None if found is None else Training.model_validate(found)

    @property
    def training(self) -> Training:
        """The status that the master publishes. The test fails if there is none."""
        seen = self.seen
        assert seen is not None, f"no master of {self.name} has said anything"
        return seen

    def condition(self, kind: str) -> Obj:
        """Return the condition of a type; empty if there is none."""
        found = (c for c in self.status.get("conditions") or [] if c["type"] == kind)
        return next(found, {})

    def holds(self, kind: str) -> bool:
        """Return whether a condition is True."""
        return bool(self.condition(kind).get("status") == "True")

    @property
    def pods(self) -> dict[str, Obj]:
        """The Pods of the workers, by node id."""
        label = "elasticjob.dlrover/replica-type"
        return {
            name.removeprefix(f"{self.name}-"): pod
            for name, pod in self.watched.all("Pod").items()
            if pod["metadata"].get("labels", {}).get(label) == "worker"
            and pod["metadata"]["labels"].get("elasticjob.dlrover/name") == self.name
        }

    def until(
        self, look: Callable[[], T | Literal[False] | None], what: str, *, within_s: float = 120.0
    ) -> T:
        """Call a function until its result is true, and return the result.

        Args:
            look: the function.
            what: what the test waits for, for the error message.
            within_s: seconds after which the test fails.
        """
        try:
            return self.watched.until(look, f"{self.name}: {what}", within_s=within_s)
        except AssertionError as error:
            with contextlib.suppress(LabError):
                master = f"deployment/{master_of(self.name)}"
                error.add_note(self.kubectl("logs", master, "--tail=80", "--all-containers"))
            raise

    def runs(self, nodes: int, *, after: int = 0, within_s: float = 180.0) -> Training:
        """Wait until a round of this many nodes trains, and return the master's status.

        The round has made a step, and each of its nodes has reported its processes.

        Args:
            nodes: number of nodes.
            after: the round must be newer than this one.
            within_s: seconds after which the test fails.
        """

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
        """Wait for the event that a round was formed, and return its message.

        The round may have ended already. The status of a very short round is never written.
        """

        def look() -> str:
            events = self.seen.events if self.seen is not None else []
            found = (e for e in events if e.reason == "RoundFormed" and e.round == number)
            return next((e.message for e in found), "")

        return self.until(look, f"round {number}", within_s=within_s)

    @property
    def holder(self) -> str:
        """The Pod of the master that holds the journal; empty once it has released it."""
        journal = self.cluster.get("secret", journal_of(self.name), self.namespace) or {}
        notes: dict[str, str] = journal.get("metadata", {}).get("annotations") or {}
        return str(json.loads(notes[HOLDER])["pod"]) if notes.get(HOLDER) else ""

    @property
    def account(self) -> str:
        """The user name of the job's master at the API server."""
        return f"system:serviceaccount:{self.namespace}:{master_of(self.name)}"

    def workers(self, node: str) -> set[int]:
        """Return the process ids of a node's workers in this round; empty before they start."""
        pod, mark = f"{self.name}-{node}", f"{ENV_ROUND}={self.training.round}"
        found = self.cluster.processes(pod, self.namespace, having=mark)
        return {pid for pid, said in found.items() if re.search(WORKER, said)}

    def kill_worker(self, node: str) -> None:
        """Wait for a node's worker of the present round, and kill it."""

        def look() -> int:
            number = self.training.round
            return number if self.workers(node) else 0

        mark = f"{ENV_ROUND}={self.until(look, f'the worker of {node} runs')}"
        self.cluster.kill(f"{self.name}-{node}", self.namespace, WORKER, having=mark)

    def ends(self, phase: str, *, within_s: float = 180.0) -> Obj:
        """Wait until the job has ended in this phase, and return its status."""
        self.until(lambda: self.phase == phase, f"phase {phase}", within_s=within_s)
        return self.status

    def patch(self, spec: Obj) -> None:
        """Change fields of the job's spec."""
        self.cluster.kubectl(
            *("patch", "elasticjob", self.name, "-n", self.namespace, "--type=merge"),
            *("-p", json.dumps({"spec": spec})),
        )

    def kubectl(self, *args: str) -> str:
        """Run kubectl in the namespace of the job."""
        return self.cluster.kubectl(*args, "-n", self.namespace)


def submit(cluster: Cluster, watched: Watched, doc: Obj) -> Job:
    """Create a job from its document."""
    ElasticJob.parse(doc)
    cluster.kubectl("create", "-f", "-", "-n", watched.namespace, stdin=yaml.safe_dump(doc))
    return Job(cluster, watched, doc["metadata"]["name"])


@contextmanager
def watching(cluster: Cluster, namespace: str) -> Iterator[Watched]:
    """Watch a namespace during the block."""
    watched = Watched(cluster, namespace)
    try:
        yield watched
    finally:
        watched.close()


@contextmanager
def no_operator(cluster: Cluster, release: str) -> Iterator[None]:
    """Stop the operator while the block runs, so that it repairs and changes nothing."""
    scale = ("scale", "deploy/dlrover-operator", "-n", release)
    cluster.kubectl(*scale, "--replicas=0")
    try:
        until(lambda: not cluster.list("pods", release, OPERATOR), "there is no operator")
        yield
    finally:
        cluster.kubectl(*scale, "--replicas=1")
