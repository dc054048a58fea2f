"""Measures recovery and resizing on a cluster of three nodes, up to the next training step.

The script is a small DDP model on gloo with warm starts. It only reports its steps to DLRover. Each
worker prints ``time.monotonic()`` at its first step. The nodes share one machine, so this is one
clock. A figure is the time from right before the fault to the first step of the *last* rank in the
next round. Figures can be compared only within one run.

``--only pods`` measures a job of a thousand Pods on fake nodes. It measures how fast the master
requests the Pods, beside a plain loop that creates the same Pods with the same client. It counts
the writes of the master. It also measures how soon 30 of 32 Pods are replaced that are deleted at
the same time.

It needs a cluster (``make cluster``). ``--write`` puts the tables into docs/benchmarks.md.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import statistics
import struct
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import Progress

from benchmarks.page import write_section
from benchmarks.scale import machine
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.master.platform.kubernetes.pods import IMAGE_PROBLEMS
from dlrover_py.protocol.names import RECIPES
from tests.cluster.conftest import installed
from tests.cluster.harness import Cluster, Obj, cluster_for_tests, inside, until
from tests.cluster.jobs import Job, Watched, document, spread, steps, submit, watching
from tests.cluster.many import MasterRequests, agents_of, at, bare, many, master_mb, running

SPACE = "dlrover-bench"
WINDOW_S = 20.0
SCRIPT = """
import os, struct, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dlrover_py.trainer import session

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
step = 0
times = open("/tmp/steps", "ab", buffering=0)
while not session.should_stop():
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    session.report_step(step)
    times.write(struct.pack("d", time.monotonic()))
    if step == 1:
        said = ["STEP", session.round(), dist.get_rank(), dist.get_world_size(), time.monotonic()]
        os.write(1, (" ".join(map(str, said)) + "\\n").encode())
    time.sleep(0.02)
"""
AGENT = re.compile(r"elastic-run /scripts/train.py$")
WORKER = re.compile(r"python\S* -u /scripts/train.py$")
STEP = re.compile(r"STEP (\d+) (\d+) (\d+) ([\d.]+)")


class Bench:
    """A warm job of three nodes that is subjected to one fault after another."""

    def __init__(self, cluster: Cluster, watched: Watched, image: str) -> None:
        self.cluster, self.watched, self.image = cluster, watched, image
        self.away = ""
        """A host whose kubelet cannot be asked for logs; empty if there is none."""
        self.masters: list[tuple[float, float]] = []
        """Both figures of each lost master, because two rows share one measurement."""
        self.resumes: list[tuple[float, float]] = []
        """Both figures of each resume, for the same reason."""

    def job(self, name: str, *, replicas: int, **worker: Any) -> Job:
        """Submit a job, and wait until all of its nodes can start warm."""
        doc = document(name, self.image, ["elastic-run", "/scripts/train.py"], replicas=replicas,
                       lease_s=5.0, **worker)  # fmt: skip
        template = doc["spec"]["replicaSpecs"]["worker"]["template"]
        template["spec"]["volumes"] = [{"name": "scripts", "configMap": {"name": "scripts"}}]
        main = template["spec"]["containers"][0]
        main["volumeMounts"] = [{"name": "scripts", "mountPath": "/scripts"}]
        doc["spec"]["replicaSpecs"]["worker"]["template"] = self.cluster.with_torch(template)
        job = submit(self.cluster, self.watched, doc)
        job.runs(replicas, within_s=300)
        self.warm(job, replicas + worker.get("standbyReplicas", 0))
        return job

    def warm(self, job: Job, nodes: int) -> None:
        """Wait until the given number of its running nodes have a zygote."""

        def ready() -> bool:
            living = [n for n, p in job.pods.items() if p["status"].get("phase") == "Running"]
            logs = (self.cluster.logs(f"{job.name}-{n}", SPACE) for n in living)
            return sum("zygote_ready" in text for text in logs) >= nodes

        until(ready, "all nodes are warm", within_s=300, every_s=1)

    def steps(self, job: Job) -> dict[int, dict[int, tuple[float, int]]]:
        """Return the first steps by round and rank: the time and the world size."""
        found: dict[int, dict[int, tuple[float, int]]] = {}
        for node, pod in job.pods.items():
            if self.away and pod["spec"].get("nodeName") == self.away:
                continue
            for line in STEP.findall(self.cluster.logs(f"{job.name}-{node}", SPACE)):
                number, rank, world = map(int, line[:3])
                found.setdefault(number, {})[rank] = float(line[3]), world
        return found

    def after(self, job: Job, began: float, world: int, number: int) -> float:
        """Return the seconds until the last rank's first step of the first full round of this size.

        Logs are read once the master has published a round after ``number``. Before that,
        ``kubectl`` would use one of the two cores.
        """
        job.runs(world, after=number, within_s=180)

        def look() -> float | None:
            for _, ranks in sorted(self.steps(job).items()):
                times = [at for at, size in ranks.values() if size == world]
                if len(times) == world and min(times) > began:
                    return max(times) - began
            return None

        return float(until(look, f"a round of {world}", within_s=180, every_s=0.5) or 0.0)


def worker_killed(
    bench: Bench, times: int, tick: Callable[[], None], *, nodes: int = 3
) -> list[float]:
    """Measure ``kill -9`` of a worker process in a Pod."""
    name = f"kill-{nodes}"
    job, found = bench.job(name, replicas=nodes, minReplicas=nodes, restartCount=1000), []
    for number in range(times):
        node = sorted(job.pods)[number % nodes]
        before = job.training.round
        there = bench.cluster.processes(f"{name}-{node}", SPACE)  # this call takes a while
        (worker,) = [pid for pid, said in there.items() if WORKER.search(said)]
        began = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        found.append(bench.after(job, began, nodes, before))
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def pod_lost(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """Measure ``kubectl delete pod --force``, where the other nodes continue."""
    job, found = bench.job("lost", replicas=3, minReplicas=2), []
    for _ in range(times):
        victim = members(job)[-1]
        # The replacement shares the two cores of this machine. It must not start before the other
        # nodes continue.
        for node in bench.cluster.nodes:
            bench.cluster.cordon(node)
        before, began = job.training.round, time.monotonic()
        bench.cluster.delete_pod(f"lost-{victim}", SPACE, force=True)
        found.append(bench.after(job, began, 2, before))
        for node in bench.cluster.nodes:
            bench.cluster.uncordon(node)
        job.runs(3, after=job.training.round, within_s=180)
        bench.warm(job, 3)
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def standby(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """Measure the loss of a Pod with a standby, which restores the full size."""
    job, found = bench.job("standby", replicas=2, standbyReplicas=1), []
    for _ in range(times):
        victim = members(job)[-1]
        before, began = job.training.round, time.monotonic()
        bench.cluster.delete_pod(f"standby-{victim}", SPACE, force=True)
        found.append(bench.after(job, began, 2, before))
        job.until(lambda: job.training.standby == 1, "a new standby", within_s=180)
        bench.warm(job, 3)
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def scaled(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """Measure ``kubectl scale --replicas=+1``, from the start of the new Pod's warm container."""

    def added(known: set[str]) -> set[str]:
        return set(job.pods) - known

    def is_warm(name: str) -> bool:
        return "zygote_ready" in bench.cluster.logs(name, SPACE)

    job, found = bench.job("scale", replicas=2, minReplicas=2), []
    for _ in range(times):
        known = set(job.pods)
        before = job.training.round
        job.kubectl("scale", "ej/scale", "--replicas=3")
        began = time.monotonic()
        (new,) = job.until(partial(added, known), "the new Pod")
        name = f"scale-{new}"
        until(partial(is_warm, name), "warm", within_s=180, every_s=0.1)
        whole = bench.after(job, began, 3, before)
        warm = stamp(bench.cluster.logs(name, SPACE), "zygote_ready")
        found.append(began + whole - (warm - time.time() + time.monotonic()))
        job.kubectl("scale", "ej/scale", "--replicas=2")
        job.until(lambda: job.training.nodes_in_round == 2, "two again", within_s=120)
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def master_lost(bench: Bench, times: int, tick: Callable[[], None], *, figure: int) -> list[float]:
    """Delete the Pod of the master by force, and measure two figures.

    The first is the time until another master is ready. The second compares the time between two
    steps of a worker: its 99th percentile, divided by that of a similar job whose master stays.
    """
    if not bench.masters:
        job, other = (bench.job(name, replicas=2) for name in ("master", "other"))
        for _ in range(times):
            (old,) = masters(job)
            began = time.monotonic()
            bench.cluster.delete_pod(old, SPACE, force=True)
            job.until(partial(has_another_master, job, old), "another master")
            took = time.monotonic() - began
            time.sleep(max(0.0, WINDOW_S - took))
            bench.masters.append((took, p99(bench, job, began) / p99(bench, other, began)))
            tick()
        job.kubectl("delete", "ej", job.name, other.name)
    return [one[figure] for one in bench.masters]


def resumed(bench: Bench, times: int, tick: Callable[[], None], *, figure: int) -> list[float]:
    """Suspend and resume a job, and measure up to the last rank's first step.

    The first figure begins with the start of the last agent, so the start of the Pods is left out.
    The second one begins when the last node has imported what its recipe lists.
    """
    if not bench.resumes:
        job = bench.job("resumed", replicas=2)
        until(partial(has_recipe, bench, job), "its recipe is kept", within_s=180, every_s=1)
        for _ in range(times):
            old, last = resume(bench, job)
            new = [f"resumed-{node}" for node in sorted(set(job.pods) - old)]
            if not all('"warm": true' in first_start(bench, pod) for pod in new):
                raise SystemExit("expected that all nodes start their first workers warm")
            offset = time.monotonic() - time.time()
            ready = [stamp(bench.cluster.logs(pod, SPACE), "zygote_ready") for pod in new]
            starts = [started_at(bench, pod) for pod in new]
            bench.resumes.append((last - max(starts), last - max(ready) - offset))
            tick()
        job.kubectl("delete", "ej", "resumed")
    return [one[figure] for one in bench.resumes]


def resumed_cold(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """Measure the first figure of ``resumed`` for a job whose recipe is removed meanwhile."""
    job, found = bench.job("cold", replicas=2), []
    for _ in range(times):
        bench.warm(job, 2)
        old, last = resume(bench, job, forget=True)
        new = [f"cold-{node}" for node in sorted(set(job.pods) - old)]
        found.append(last - max(started_at(bench, pod) for pod in new))
        tick()
    job.kubectl("delete", "ej", "cold")
    return found


def resume(bench: Bench, job: Job, *, forget: bool = False) -> tuple[set[str], float]:
    """Suspend and resume a job of two nodes.

    Args:
        bench: The cluster.
        job: The job.
        forget: Whether the recipes of the namespace are removed meanwhile.

    Returns:
        Its nodes before, and the time of the last rank's first step after the resume.
    """
    before, old = job.training.round, set(job.pods)
    job.patch({"suspend": True})
    job.until(lambda: job.phase == "Suspended", "Suspended", within_s=120)
    until(lambda: not masters(job), "its master has gone", within_s=60)
    if forget:
        patch = ("--type=merge", "-p", '{"data":null}')
        bench.cluster.kubectl("patch", "secret", RECIPES, "-n", SPACE, *patch)
    began = time.monotonic()
    job.patch({"suspend": False})
    return old, began + bench.after(job, began, 2, before)


def has_recipe(bench: Bench, job: Job) -> bool:
    """Return whether the job has left a recipe, or has found that of an earlier job."""
    logs = [bench.cluster.logs(f"{job.name}-{node}", SPACE) for node in members(job)]
    return any("recipe_kept" in log or "recipe_found" in log for log in logs)


def started_at(bench: Bench, pod: str) -> float:
    """Return when the agent of a Pod was started, by the clock of ``time.monotonic()``."""
    there = bench.cluster.processes(pod, SPACE)
    (agent,) = [pid for pid, said in there.items() if AGENT.search(said)]
    stat = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()
    return int(stat[19]) / os.sysconf("SC_CLK_TCK")


def first_start(bench: Bench, pod: str) -> str:
    """Return the line in an agent's log that says how its first workers were started."""
    log = bench.cluster.logs(pod, SPACE)
    return next((line for line in log.splitlines() if "workers_started" in line), "")


def masters(job: Job) -> dict[str, bool]:
    """Return the job's master Pods that are not being deleted, and whether each is ready."""
    found = {}
    for name, pod in job.watched.all("Pod").items():
        labels = pod["metadata"].get("labels", {})
        whose = [labels.get(f"elasticjob.dlrover/{word}") for word in ("name", "replica-type")]
        if whose == [job.name, "dlrover-master"] and "deletionTimestamp" not in pod["metadata"]:
            said = {c["type"]: c for c in pod["status"].get("conditions", ())}
            found[name] = said.get("Ready", {}).get("status") == "True"
    return found


def has_another_master(job: Job, old: str) -> bool:
    """Return whether a master Pod of the job other than ``old`` is ready."""
    return any(ready and name != old for name, ready in masters(job).items())


def p99(bench: Bench, job: Job, since: float) -> float:
    """Return the 99th percentile of the seconds between two steps, over all workers."""
    gaps: list[float] = []
    for node in members(job):
        there = bench.cluster.processes(f"{job.name}-{node}", SPACE)
        (worker,) = [pid for pid, said in there.items() if WORKER.search(said)]
        data = inside(worker, "/tmp/steps").read_bytes()
        ends = [end for (end,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]
        ends = [end for end in ends if since <= end < since + WINDOW_S]
        gaps += [b - a for a, b in itertools.pairwise(ends)]
    return statistics.quantiles(gaps, n=100)[98]


def cut_off(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """Cut off a host without the master; measure up to the last first step of the two others."""
    found = []
    for _ in range(times):
        job = bench.job("job", replicas=3, minReplicas=2, pod=spread())  # one on each host
        (name,) = masters(job)
        its = job.watched.all("Pod")[name]["spec"]["nodeName"]
        host = next(h for n in members(job) if (h := host_of(job, n)) != its)
        before, began, bench.away = job.training.round, time.monotonic(), host
        with bench.cluster.cut_off(host):
            found.append(bench.after(job, began, 2, before))
        bench.away = ""
        job.kubectl("delete", "ej", job.name)
        until(partial(gone, job), "its Pods are gone", within_s=120)
        tick()
    return found


def master_cut_off(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """Cut off the host of the master and of rank 0, and measure the time to the next step.

    The time of the cluster itself is subtracted: until the host is NotReady, and from the creation
    of the next master Pod until it is ready.
    """
    found, (host, *others) = [], bench.cluster.nodes
    for _ in range(times):
        for other in others:
            bench.cluster.cordon(other)
        job = bench.job("job", replicas=1, pod=spread())
        for other in others:
            bench.cluster.uncordon(other)
        job.patch({"replicaSpecs": {"worker": {"replicas": 3, "minReplicas": 2}}})
        job.runs(3, within_s=180)
        bench.warm(job, 3)
        (old,), first = masters(job), members(job)[0]
        if {job.watched.all("Pod")[old]["spec"]["nodeName"], host_of(job, first)} != {host}:
            raise SystemExit(f"the master and rank 0 were to be on {host}")
        before, began, bench.away = job.training.round, time.monotonic(), host
        with bench.cluster.cut_off(host):
            until(lambda: not bench.cluster.node_ready(host), "NotReady", within_s=90, every_s=0.5)
            silent = time.monotonic() - began
            whole = bench.after(job, began, 2, before)
            (new,) = [name for name, ready in masters(job).items() if ready and name != old]
            meta, status = (job.watched.all("Pod")[new][part] for part in ("metadata", "status"))
            ready = next(c for c in status["conditions"] if c["type"] == "Ready")
            ends = (ready["lastTransitionTime"], meta["creationTimestamp"])
            start, made = (datetime.fromisoformat(end).timestamp() for end in ends)
            found.append(whole - silent - (start - made))
        bench.away = ""
        job.kubectl("delete", "ej", job.name)
        until(partial(gone, job), "its Pods are gone", within_s=120)
        tick()
    return found


def gone(job: Job) -> bool:
    """Return whether the job has no Pods."""
    return not job.pods


def host_of(job: Job, node: str) -> str:
    """Return the host of a node's Pod."""
    return str(job.pods[node]["spec"]["nodeName"])


def told(
    bench: Bench, times: int, tick: Callable[[], None], *, kind: str, image: str = ""
) -> list[float]:
    """Measure how soon the status says that a job cannot run, from its submission.

    This includes the start of the master. With ``image``, it starts when the status of the Pod
    says that the image cannot be pulled.
    """
    pod: Obj = {"nodeSelector": {"no": "such"}} if kind == "Unschedulable" else {}
    if kind == "InvalidTemplate":
        pod = {"volumes": [{"name": "a"}, {"name": "a"}]}
    limit = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "limit"},
             "spec": {"hard": {"pods": "1"}}}  # fmt: skip
    if kind == "QuotaExceeded":
        bench.cluster.apply(limit, namespace=SPACE)
    found = []
    for number in range(times):
        name = f"{kind.lower()}-{number}"
        doc = document(name, image or bench.image, steps(), replicas=1, pod=pod)
        began = time.monotonic()
        job = submit(bench.cluster, bench.watched, doc)
        if image:
            job.until(partial(not_pulled, job), "a pull that fails", within_s=120)
            began = time.monotonic()
        job.until(partial(job.holds, kind), kind, within_s=120)
        found.append(time.monotonic() - began)
        job.kubectl("delete", "ej", name)
        until(lambda: not bench.cluster.list("pods", SPACE), "its Pods are gone", within_s=60)
        tick()
    bench.cluster.kubectl("delete", "quota", "limit", "-n", SPACE, "--ignore-not-found")
    return found


def not_pulled(job: Job) -> bool:
    """Return whether the kubelet has reported a failed pull for one of the job's Pods."""
    states = [s.get("state", {}) for p in job.pods.values()
              for s in p["status"].get("containerStatuses", ())]  # fmt: skip
    return any(s.get("waiting", {}).get("reason") in IMAGE_PROBLEMS for s in states)


def stamp(log: str, event: str) -> float:
    """Return the wall-clock time of a line in an agent's log."""
    line = next(x for x in log.splitlines() if event in x)
    return datetime.fromisoformat(json.loads(line)["at"]).timestamp()


def members(job: Job) -> list[str]:
    """Return the nodes in the round, ordered by rank."""
    nodes = [n for n in job.training.nodes if n.role.value == "member"]
    return [n.id for n in sorted(nodes, key=lambda n: n.node_rank or 0)]


def ended(job: Job) -> bool:
    """Return whether the job has ended, with success or without."""
    return job.phase in ("Succeeded", "Failed")


def submits(bench: Bench, number: int, tick: Callable[[], None]) -> tuple[int, float, list[str]]:
    """Submit many small jobs at the same time.

    Returns:
        How many succeed, the seconds until all have ended, and the Pods that are left.
    """
    began = time.monotonic()
    jobs = []
    for index in range(number):
        doc = document(f"small-{index}", bench.image, steps(3, 0.01), replicas=1)
        jobs.append(submit(bench.cluster, bench.watched, doc))
    done = 0
    for job in jobs:
        job.until(partial(ended, job), "its end", within_s=900)
        done += job.phase == "Succeeded"
        tick()
    took = time.monotonic() - began
    label = "elasticjob.dlrover/replica-type=dlrover-master"
    until(lambda: not bench.cluster.list("pods", SPACE, label), "masters are gone", within_s=120)
    left = sorted({p["metadata"]["labels"]["elasticjob.dlrover/replica-type"]
                   for p in bench.cluster.list("pods", SPACE)})  # fmt: skip
    return done, took, left


def of_a_thousand(
    cluster: Cluster, there: Watched, number: int, times: int, tick: Callable[[], None]
) -> tuple[list[tuple[str, str, str]], list[Obj]]:
    """Measure a job of many Pods from submission until no Pod is left, beside a plain loop."""

    def all_run(run: Job) -> bool:
        return running(run) == number

    def suspended(run: Job) -> bool:
        return run.holds("Suspended") and not run.pods

    # the owner of the Pods that the loop creates
    wish = many(there, "bare", number, spec={"suspend": True})
    wish.until(lambda: wish.phase == "Suspended", "the operator has seen it")
    found: list[Obj] = []
    for turn in range(times):
        alone = asyncio.run(bare(cluster.kubeconfig, wish.obj, turn * number, number))
        until(lambda: running(wish) == number, "the bare Pods run", within_s=300)
        wish.kubectl("delete", "pods", "-l", "elasticjob.dlrover/name=bare", "--wait=false")
        until(lambda: not wish.pods, "the bare Pods are gone", within_s=300)
        tick()
        submitted = time.time()
        run = many(there, f"many-{turn}", number)
        run.until(partial(all_run, run), "all run", within_s=300)
        asked, memory = MasterRequests(run), master_mb(run)
        made, first, last = asked.created()
        run.patch({"suspend": True})
        run.until(partial(suspended, run), "none", within_s=300)
        asked = MasterRequests(run)
        found.append({
            "bare": alone, "first": first - submitted, "all": last - submitted, "made": made,
            "ours": last - first, "ratio": (last - first) / alone, "mb": memory,
            "writes": asked.writes.total() / number,
            "kinds": {" ".join(kind): n for kind, n in asked.writes.items()},
            "status": asked.closest("patch", "elasticjobs/status"),
        })  # fmt: skip
        run.kubectl("delete", "ej", run.name)
        tick()
    wish.kubectl("delete", "ej", "bare")

    def span(key: str, unit: str, digits: int = 2) -> str:
        values = [f[key] for f in found]
        three = (min(values), statistics.median(values), max(values))
        return " / ".join(f"{v:.{digits}f}" for v in three) + unit

    kinds = ", ".join(f"{n} × {kind}" for kind, n in found[-1]["kinds"].items())
    return [
        (f"bare loop: the same {number} Pods are created", "–", span("bare", " s")),
        ("the master: first Pod asked for → last one created", "–", span("ours", " s")),
        ("the same, by the bare loop just before", "≤ 1.3", span("ratio", "")),
        ("submit → first Pod asked for: its master starts", "–", span("first", " s")),
        ("submit → last Pod created", "–", span("all", " s")),
        ("the master's largest memory", "≤ 150 MB", span("mb", " MB", 0)),
        (f"writes a Pod, from submit until none is left ({kinds})", "≤ 4", span("writes", "")),
        ("shortest time between two writes of the status", "≥ 1 s", span("status", " s")),
    ], found


async def mass_deletion(there: Watched, times: int, tick: Callable[[], None]) -> list[Obj]:
    """Delete 30 of 32 Pods repeatedly; measure until the last replacement is created."""
    run = many(there, "mass", 32, minReplicas=1)
    await asyncio.to_thread(run.until, lambda: running(run) == 32, "all run", within_s=120)
    found = []
    async with (
        agents_of(run, 32 + 30 * times) as agents,
        await KubeClient.connect(kubeconfig=there.cluster.kubeconfig) as kube,
    ):
        nodes = [f"n{i}" for i in range(32)]
        await agents.form(nodes, 32)
        for turn in range(times):
            before, began = max(agents.rounds), time.time()
            left = agents.swarm.until(agents.of(nodes[:2]), lambda told: told.get("nnodes") == 2)
            gone = (kube.delete(PODS, f"mass-{n}", SPACE, grace_s=0) for n in nodes[2:])
            calls = asyncio.gather(*gone)
            agents.swarm.lose(agents.of(nodes[2:]))
            await calls
            deleted = time.time() - began
            told = await agents.swarm.wait(left, "the two") - time.monotonic() + time.time()
            nodes[2:] = [f"n{32 + 30 * turn + i}" for i in range(30)]
            await asyncio.to_thread(run.until, lambda: running(run) == 32, "all run again")
            made = MasterRequests(run, began).of("create", "pods", 201)
            found.append({
                "deleted": deleted, "told": told - began, "made": len(made),
                "created": max(at(e["stageTimestamp"]) for e in made) - began,
                "rounds": sum(number > before for number in agents.rounds),
            })  # fmt: skip
            await agents.form(nodes[2:], 32)
            tick()
        if agents.swarm.surprises:
            raise AssertionError(agents.swarm.surprises)
    run.kubectl("delete", "ej", "mass")
    return found


def of_many(
    cluster: Cluster, args: argparse.Namespace, progress: Progress
) -> tuple[list[str], list[Obj]]:
    """Return the table of a thousand Pods."""
    with cluster.fake_nodes(8), watching(cluster, SPACE) as there:
        task = progress.add_task(f"{args.pods} Pods", total=2 * args.times)
        tick = partial(progress.advance, task)
        rows, samples = of_a_thousand(cluster, there, args.pods, args.times, tick)
        task = progress.add_task("30 of 32 Pods", total=args.times)
        lost = asyncio.run(mass_deletion(there, args.times, partial(progress.advance, task)))
    for key, words, target in (
        ("deleted", "30 of 32 Pods deleted, 30 calls at once → all answered", "–"),
        ("told", "→ the two that are left are told of their round", "–"),
        ("created", "→ the last of 30 replacements is created", "≤ 2 s"),
    ):
        values = sorted(one[key] for one in lost)
        three = (values[0], statistics.median(values), values[-1])
        rows.append((words, target, " / ".join(f"{v:.2f}" for v in three) + " s"))
    numbers = ", ".join(str(one["rounds"]) for one in lost)
    rows.append(("rounds from one deletion until all are replaced", "1", numbers))
    table = [
        f"`python benchmarks/cluster.py --only pods --times {args.times} --pods {args.pods}` on "
        f"{machine()}.",
        "",
        "| what | target | min / median / max |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return table, [*samples, *lost]


Measure = Callable[[Bench, int, Callable[[], None]], list[float]]
ROWS: dict[str, tuple[Measure, str, str]] = {
    "worker process `kill -9` in a Pod, of three → next step": (
        worker_killed, "cold restart of all, 5–17 s measured", "≤ 0.5 s"),
    "the same, of two: as many as there are cores": (
        partial(worker_killed, nodes=2), "the same", "≤ 0.5 s"),
    "`kubectl delete pod --force` of a worker → next step at reduced size": (
        pod_lost, "60 s last call", "≤ 2 s"),
    "the same with a standby Pod, at full size": (
        standby, "~30 s for a cold Pod; all restart twice", "≤ 2 s"),
    "the master's Pod is deleted by force → another one is ready": (
        partial(master_lost, figure=0), "all workers restart", "≤ 10 s"),
    "the same: 99th percentile of the time between two steps, by that of a job beside it": (
        partial(master_lost, figure=1), "–", "1"),
    "a host is cut off → next step of the others": (cut_off, "–", "≤ 7 s: lease 5 s + 2 s"),
    "the host of the master and rank 0 is cut off → next step, without the time until it is "
    "NotReady and the next master Pod's own start": (master_cut_off, "–", "≤ 13 s"),
    "a suspended job is resumed → its first step, from the start of its last agent": (
        partial(resumed, figure=0), "–", "≤ 1 s"),
    "a suspended job is resumed → the same, from its last zygote being ready": (
        partial(resumed, figure=1), "–", "–"),
    "a suspended job is resumed without its recipe, so cold → from the start of its last agent": (
        resumed_cold, "–", "–"),
    "`kubectl scale ej/x --replicas=+1` → first step of the larger world, from the new Pod being "
    "warm": (scaled, "impossible", "≤ 1 s"),
    **{f"a job that cannot be is submitted → condition {kind}": (
        partial(told, kind=kind), "no condition", "≤ 10 s")
       for kind in ("Unschedulable", "InvalidTemplate", "QuotaExceeded")},
    **{f"a first pull has failed{where} → condition ImagePullBackOff": (
        partial(told, kind="ImagePullBackOff", image=image), "no condition", "≤ 10 s")
       for where, image in ((", the registry's name not being known", "dlrover.test/no-such:1"),
                            (", the registry refusing", "localhost:9/no-such:1"))},
}  # fmt: skip


def main() -> int:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="of each fault")
    parser.add_argument("--submits", type=int, default=60)
    parser.add_argument("--pods", type=int, default=1000, help="of the large job")
    parser.add_argument("--only", default="", help="rows whose name has this word; or: pods")
    parser.add_argument("--json", type=Path, help="keep all samples there")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    console, where = Console(stderr=True), machine()
    rows: list[tuple[str, ...]] = []
    samples: dict[str, list[Any]] = {}
    with cluster_for_tests() as cluster, Progress(console=console) as progress:
        installed(cluster, cluster.image("operator"), cluster.image("master"))
        prepare(cluster)
        if args.only in ("", "pods"):
            table, many_samples = of_many(cluster, args, progress)
            samples["pods"] = many_samples
            show(table, "pods", write=args.write)
        with watching(cluster, SPACE) as watched:
            bench = Bench(cluster, watched, cluster.image("agent"))
            for name, (measure, theirs, target) in ROWS.items():
                if args.only not in name or args.only == "pods" or not args.times:
                    continue
                task = progress.add_task(name[:50], total=args.times)
                found = measure(bench, args.times, partial(progress.advance, task))
                samples[name] = found
                words = f"{min(found):.2f} / {statistics.median(found):.2f} / {max(found):.2f} s"
                rows.append((name, theirs, target, f"{words} (n={len(found)})"))
            if args.submits and args.only in "submits":
                task = progress.add_task("submits", total=args.submits)
                done, took, left = submits(bench, args.submits, lambda: progress.advance(task))
                name = f"{args.submits} submits of small jobs → all Succeeded"
                pods = ", ".join(left) or "none"
                words = f"{done} of {args.submits} in {took:.0f} s; Pods left: {pods}"
                rows.append((name, "–", f"{args.submits} of {args.submits}", words))
        cluster.kubectl("delete", "namespace", SPACE, "--wait=false")
    table = [
        f"`python benchmarks/cluster.py --times {args.times} --submits {args.submits}` on {where}.",
        "",
        "| what | DLRover (documents, code) | target | ours: min / median / max |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    if rows:
        show(table, "cluster", write=args.write)
    if args.json:
        args.json.write_text(json.dumps(samples))
    return 0


def prepare(cluster: Cluster) -> None:
    """Create an empty namespace that contains the script."""
    cluster.kubectl("delete", "namespace", SPACE, "--ignore-not-found")
    cluster.kubectl("create", "namespace", SPACE)
    scripts: Obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"},
                    "data": {"train.py": SCRIPT}}  # fmt: skip
    cluster.apply(scripts, namespace=SPACE)


def show(table: list[str], name: str, *, write: bool) -> None:
    """Print a table. With ``write``, put it between its markers in docs/benchmarks.md."""
    print("\n".join(table), flush=True)
    if write:
        write_section(name, "\n".join(table))


if __name__ == "__main__":
    sys.exit(main())
