"""Jobs of very many Pods: what they cost the API server, and agents for Pods that have none.

The Pods are Running on fake nodes, where nothing runs. What a master has asked for stands in the
API server's audit log. Agents, where a test needs them, are those of ``benchmarks/scale.py``: they
speak to the master in its Pod from here, and are told from real ones by nobody.
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
from dlrover_py.kube import IN_FLIGHT, PODS, Kube
from dlrover_py.master.platform import pods
from dlrover_py.master.platform.pods import Site
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import MASTER_PORT, NodeId, master_of, token_of
from tests.cluster.harness import Cluster, Obj, on_fakes
from tests.cluster.jobs import Job, Watched, document, submit

MASTER = "elasticjob.dlrover/replica-type=dlrover-master"
WRITES = ("create", "update", "patch", "delete", "deletecollection")


def at(stamp: str) -> float:
    """The time of an audit event, as ``time.time()`` says it."""
    return datetime.fromisoformat(stamp).timestamp()


def what(event: Obj) -> tuple[str, str]:
    """Verb, and resource with its subresource."""
    ref = event["objectRef"]
    return event["verb"], "/".join(filter(None, (ref["resource"], ref.get("subresource"))))


class Asked:
    """What a job's master has asked of the API server, since a moment; trials are left out."""

    def __init__(self, run: Job, since: float = 0.0) -> None:
        found = run.cluster.asked(master_of(run.name), run.namespace)
        self.events = [
            e
            for e in found
            if at(e["requestReceivedTimestamp"]) >= since and "dryRun=" not in e["requestURI"]
        ]

    def of(self, verb: str, resource: str, code: int = 0) -> "list[Obj]":
        """Calls of one kind, perhaps only those with this answer."""
        return [
            e
            for e in self.events
            if what(e) == (verb, resource) and code in (0, e["responseStatus"]["code"])
        ]

    @property
    def writes(self) -> Counter[tuple[str, str]]:
        """How many of each kind, refused ones too."""
        return Counter(what(e) for e in self.events if e["verb"] in WRITES)

    def created(self) -> tuple[int, float, float]:
        """How many Pods, when the first was asked for, and when the last was there."""
        made = self.of("create", "pods", 201)
        return (
            len(made),
            min(at(e["requestReceivedTimestamp"]) for e in made),
            max(at(e["stageTimestamp"]) for e in made),
        )

    def closest(self, verb: str, resource: str) -> float:
        """The shortest time between two calls of a kind."""
        times = sorted(at(e["requestReceivedTimestamp"]) for e in self.of(verb, resource))
        return min((b - a for a, b in pairwise(times)), default=float("inf"))


def many(there: Watched, name: str, replicas: int, **more: Any) -> Job:
    """A job whose Pods are on fake nodes."""
    doc = document(name, "no/image:1", ["elastic-run", "x.py"], replicas=replicas, pod=on_fakes(),
                   **more)  # fmt: skip
    return submit(there.cluster, there, doc)


def running(run: Job) -> int:
    """How many of its Pods run."""
    return sum(p["status"].get("phase") == "Running" for p in run.pods.values())


async def bare(kubeconfig: Path, job: Obj, first: int, number: int) -> float:
    """Create the Pods that a master would for this job, from that id on, and do nothing else.

    With the same client and as many calls at once as it lets through. Returns the time it took.
    """
    parsed = ElasticJob.read(job)
    site = Site(job["metadata"]["uid"], "10.0.0.1:50001")
    wishes = [pods.pod(parsed, NodeId(f"n{first + i}"), site) for i in range(number)]
    turns = asyncio.Semaphore(IN_FLIGHT)
    async with await Kube.connect(kubeconfig=kubeconfig) as kube:

        async def create(wish: Obj) -> None:
            async with turns:
                await kube.create(PODS, wish)

        await kube.list(PODS, job["metadata"]["namespace"])  # connected: as a master is
        began = time.monotonic()
        await asyncio.gather(*map(create, wishes))
        return time.monotonic() - began


def master_mb(run: Job) -> float:
    """The most memory that its master has had."""
    (pod,) = run.cluster.list("pods", run.namespace, MASTER)
    peaks = []
    for pid in run.cluster.processes(pod["metadata"]["name"], run.namespace):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        peaks += [int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM:")]
    return max(peaks)


class Agents:
    """Agents of a job's nodes, with ids that grow as Pods are replaced."""

    def __init__(self, run: Job, swarm: Swarm) -> None:
        self.run, self.swarm = run, swarm

    def of(self, nodes: Sequence[str]) -> "list[Agent]":
        """The agents of these nodes."""
        return [self.swarm.agents[int(node.removeprefix("n"))] for node in nodes]

    async def form(self, nodes: Sequence[str], size: int) -> None:
        """These come, and those and all who are there find themselves in a round of this size."""
        agents = self.of(nodes)
        await self.swarm.connect(agents)
        told = self.swarm.until(self.swarm.living, lambda told: told.get("nnodes") == size)
        for agent in agents:
            agent.report()
        await self.swarm.wait(told, f"a round of {size}")

    @property
    def rounds(self) -> dict[int, int]:
        """Size of each round that any agent was told of."""
        return {number: formed.nnodes for (_, number), formed in self.swarm.formed.items()}


@asynccontextmanager
async def agents_of(run: Job, number: int) -> AsyncIterator[Agents]:
    """Up to so many agents for a job on fake nodes."""
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
