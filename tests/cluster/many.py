"""Jobs of thousands of Pods: their requests to the API server, and simulated agents.

The Pods are Running on fake nodes, where nothing runs. The requests of a master are in the audit
log of the API server. Simulated agents (``benchmarks/scale.py``) connect to the master in its Pod
from this process. The master cannot distinguish them from real agents.
"""

import asyncio
import base64
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.scale import Agent, Swarm
from dlrover_py.kubernetes.client import IN_FLIGHT, KubeClient
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.master.platform.kubernetes import pods
from dlrover_py.master.platform.kubernetes.pods import PodContext
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import MASTER_PORT, NodeId, master_of, token_of
from tests.cluster.harness import Cluster, Obj, on_fakes
from tests.cluster.jobs import Job, Watched, document, submit

MASTER = "elasticjob.dlrover/replica-type=dlrover-master"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


def at(stamp: str) -> float:
    """Return the time of an audit event in Unix seconds."""
    return datetime.fromisoformat(stamp).timestamp()


def what(event: Obj) -> tuple[str, str]:
    """Return the verb of an audit event, and its resource with the subresource."""
    ref = event["objectRef"]
    return event["verb"], "/".join(filter(None, (ref["resource"], ref.get("subresource"))))


class MasterRequests:
    """The requests of a job's master to the API server since a time, without dry runs."""

    def __init__(self, run: Job, since: float = 0.0) -> None:
        found = run.cluster.asked(master_of(run.name), run.namespace)
        self.events = [
            e
            for e in found
            if at(e["requestReceivedTimestamp"]) >= since and "dryRun=" not in e["requestURI"]
        ]

    def of(self, verb: str, resource: str, code: int = 0) -> "list[Obj]":
        """Return the requests of one kind.

        Args:
            verb: verb of the requests.
            resource: resource with its subresource.
            code: only requests with this HTTP status; 0 for all.
        """
        return [
            e
            for e in self.events
            if what(e) == (verb, resource) and code in (0, e["responseStatus"]["code"])
        ]

    @property
    def writes(self) -> Counter[tuple[str, str]]:
        """The number of writes of each kind, including refused ones."""
        return Counter(what(e) for e in self.events if e["verb"] in WRITES)

    def created(self) -> tuple[int, float, float]:
        """Return the number of created Pods, and the times of the first request and last reply."""
        made = self.of("create", "pods", 201)
        return (
            len(made),
            min(at(e["requestReceivedTimestamp"]) for e in made),
            max(at(e["stageTimestamp"]) for e in made),
        )

    def closest(self, verb: str, resource: str) -> float:
        """Return the shortest time between two requests of a kind, in seconds."""
        times = sorted(at(e["requestReceivedTimestamp"]) for e in self.of(verb, resource))
        return min((b - a for a, b in pairwise(times)), default=float("inf"))


def many(there: Watched, name: str, replicas: int, **more: Any) -> Job:
    """Submit a job whose Pods are on fake nodes.

    Args:
        there: the namespace.
        name: name of the job.
        replicas: number of nodes.
        more: other arguments of ``document()``.
    """
    doc = document(name, "no/image:1", ["elastic-run", "x.py"], replicas=replicas, pod=on_fakes(),
                   **more)  # fmt: skip
    return submit(there.cluster, there, doc)


def running(run: Job) -> int:
    """Return the number of the job's Pods that run."""
    return sum(p["status"].get("phase") == "Running" for p in run.pods.values())


async def bare(kubeconfig: Path, job: Obj, first: int, number: int) -> float:
    """Create the Pods of a job as its master would, and do nothing else.

    The client and the number of parallel requests are those of a master.

    Args:
        kubeconfig: kubeconfig of the cluster.
        job: the ElasticJob.
        first: number in the id of the first node.
        number: number of Pods.

    Returns:
        The seconds that it took.
    """
    parsed = ElasticJob.read(job)
    site = PodContext(job["metadata"]["uid"], "10.0.0.1:50001")
    wishes = [pods.pod(parsed, NodeId(f"n{first + i}"), site) for i in range(number)]
    turns = asyncio.Semaphore(IN_FLIGHT)
    async with await KubeClient.connect(kubeconfig=kubeconfig) as kube:

        async def create(wish: Obj) -> None:
            async with turns:
                await kube.create(PODS, wish)

        await kube.list(
            PODS, job["metadata"]["namespace"]
        )  # the connection is open, as that of a master
        began = time.monotonic()
        await asyncio.gather(*map(create, wishes))
        return time.monotonic() - began


def master_mb(run: Job) -> float:
    """Return the peak memory of the job's master in MiB."""
    (pod,) = run.cluster.list("pods", run.namespace, MASTER)
    peaks = []
    for pid in run.cluster.processes(pod["metadata"]["name"], run.namespace):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        peaks += [int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM:")]
    return max(peaks)


class Agents:
    """Simulated agents of a job's nodes. Ids grow as Pods are replaced."""

    def __init__(self, run: Job, swarm: Swarm) -> None:
        self.run, self.swarm = run, swarm

    def of(self, nodes: Sequence[str]) -> "list[Agent]":
        """Return the agents of these nodes."""
        return [self.swarm.agents[int(node.removeprefix("n"))] for node in nodes]

    async def form(self, nodes: Sequence[str], size: int) -> None:
        """Connect the agents of these nodes; wait until all agents are in a round of this size."""
        agents = self.of(nodes)
        await self.swarm.connect(agents)
        told = self.swarm.until(self.swarm.living, lambda told: told.get("nnodes") == size)
        for agent in agents:
            agent.report()
        await self.swarm.wait(told, f"a round of {size}")

    @property
    def rounds(self) -> dict[int, int]:
        """The size of each round that an agent has received."""
        return {number: formed.nnodes for (_, number), formed in self.swarm.formed.items()}


@asynccontextmanager
async def agents_of(run: Job, number: int) -> AsyncIterator[Agents]:
    """Yield at most this number of agents for a job on fake nodes."""
    cluster: Cluster = run.cluster
    (pod,) = await asyncio.to_thread(cluster.list, "pods", run.namespace, MASTER)
    name = token_of(run.name, run.obj["metadata"]["uid"])
    secret = await asyncio.to_thread(cluster.get, "secret", name, run.namespace)
    assert secret is not None
    known = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    swarm = Swarm(
        number,
        MASTER_PORT,
        token=known["token"].strip(),
        tls=ssl.create_default_context(cadata=known["ca.crt"]),
        host=pod["status"]["podIP"],
    )
    try:
        yield Agents(run, swarm)
    finally:
        swarm.close()
