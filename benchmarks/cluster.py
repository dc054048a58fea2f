"""Recovery and resizing on a real cluster of three nodes: from a fault to the next training step.

The script is a small DDP model on gloo with warm starts, and knows nothing of us but that it
reports its steps. Each first step of a worker is printed with ``time.monotonic()``; the nodes share
one machine, so that is one clock. A figure is from right before the fault to the *last* rank's
first step of the next round. Figures are only comparable within one run.

Needs a cluster (``make cluster``). ``--write`` puts the table into docs/benchmarks.md.
"""

import argparse
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.progress import Progress

from benchmarks.scale import machine
from tests.cluster.conftest import installed
from tests.cluster.harness import Cluster, Obj, cluster_for_tests, until
from tests.cluster.jobs import Job, Watched, document, steps, submit, watching

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- cluster: begin -->", "<!-- cluster: end -->"
SPACE = "dlrover-bench"
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dlrover_py.trainer import session

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
step = 0
while not session.should_stop():
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    session.report_step(step)
    if step == 1:
        said = ["STEP", session.round(), dist.get_rank(), dist.get_world_size(), time.monotonic()]
        os.write(1, (" ".join(map(str, said)) + "\\n").encode())
    time.sleep(0.02)
"""
WORKER = re.compile(r"python\S* -u /scripts/train.py$")
STEP = re.compile(r"STEP (\d+) (\d+) (\d+) ([\d.]+)")


class Bench:
    """A warm job of three nodes, that is hurt again and again."""

    def __init__(self, cluster: Cluster, watched: Watched, image: str) -> None:
        self.cluster, self.watched, self.image = cluster, watched, image

    def job(self, name: str, *, replicas: int, **worker: int) -> Job:
        """Submit a job, and wait until all of its nodes can start warm."""
        doc = document(name, self.image, ["elastic-run", "/scripts/train.py"], replicas=replicas,
                       **worker)  # fmt: skip
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
        """Wait until so many of its living nodes have a zygote."""

        def ready() -> bool:
            living = [n for n, p in job.pods.items() if p["status"].get("phase") == "Running"]
            logs = (self.cluster.logs(f"{job.name}-{n}", SPACE) for n in living)
            return sum("zygote_ready" in text for text in logs) >= nodes

        until(ready, "all nodes are warm", within_s=300, every_s=1)

    def steps(self, job: Job) -> dict[int, dict[int, tuple[float, int]]]:
        """First steps by round and rank: when, and in which world."""
        found: dict[int, dict[int, tuple[float, int]]] = {}
        for node in job.pods:
            for line in STEP.findall(self.cluster.logs(f"{job.name}-{node}", SPACE)):
                number, rank, world = map(int, line[:3])
                found.setdefault(number, {})[rank] = float(line[3]), world
        return found

    def after(self, job: Job, began: float, world: int) -> float:
        """From then to the first step of the last rank of the first whole round of this size."""

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
    """``kill -9`` of a worker process in a Pod."""
    name = f"kill-{nodes}"
    job, found = bench.job(name, replicas=nodes, minReplicas=nodes, restartCount=1000), []
    for number in range(times):
        node = sorted(job.pods)[number % nodes]
        before = job.training.round
        there = bench.cluster.processes(f"{name}-{node}", SPACE)  # it takes a while to ask
        (worker,) = [pid for pid, said in there.items() if WORKER.search(said)]
        began = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        found.append(bench.after(job, began, nodes))
        job.runs(nodes, after=before)
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def pod_lost(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """``kubectl delete pod --force``: the others go on."""
    job, found = bench.job("lost", replicas=3, minReplicas=2), []
    for _ in range(times):
        victim = members(job)[-1]
        # The replacement shares our two cores: it shall not start before the others go on.
        for node in bench.cluster.nodes:
            bench.cluster.cordon(node)
        began = time.monotonic()
        bench.cluster.delete_pod(f"lost-{victim}", SPACE, force=True)
        found.append(bench.after(job, began, 2))
        for node in bench.cluster.nodes:
            bench.cluster.uncordon(node)
        job.runs(3, after=job.training.round, within_s=180)
        bench.warm(job, 3)
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def standby(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """The same with a standby: at full size."""
    job, found = bench.job("standby", replicas=2, standbyReplicas=1), []
    for _ in range(times):
        victim = members(job)[-1]
        began = time.monotonic()
        bench.cluster.delete_pod(f"standby-{victim}", SPACE, force=True)
        found.append(bench.after(job, began, 2))
        job.until(lambda: job.training.standby == 1, "a new standby", within_s=180)
        bench.warm(job, 3)
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def scaled(bench: Bench, times: int, tick: Callable[[], None]) -> list[float]:
    """``kubectl scale --replicas=+1``: from the new Pod's start of its container, warm."""
    job, found = bench.job("scale", replicas=2, minReplicas=2), []
    for _ in range(times):
        known = set(job.pods)
        job.kubectl("scale", "ej/scale", "--replicas=3")
        began = time.monotonic()
        (new,) = job.until(lambda known=known: set(job.pods) - known, "the new Pod")
        name = f"scale-{new}"
        until(lambda name=name: "zygote_ready" in bench.cluster.logs(name, SPACE), "warm",
              within_s=180, every_s=0.1)  # fmt: skip
        whole = bench.after(job, began, 3)
        warm = stamp(bench.cluster.logs(name, SPACE), "zygote_ready")
        found.append(began + whole - (warm - time.time() + time.monotonic()))
        job.kubectl("scale", "ej/scale", "--replicas=2")
        job.until(lambda: job.training.nodes_in_round == 2, "two again", within_s=120)
        tick()
    job.kubectl("delete", "ej", job.name)
    return found


def stamp(log: str, event: str) -> float:
    """Wall time of a line of an agent's log."""
    line = next(x for x in log.splitlines() if event in x)
    return datetime.fromisoformat(json.loads(line)["at"]).timestamp()


def members(job: Job) -> list[str]:
    """Nodes in the round, by rank."""
    nodes = [n for n in job.training.nodes if n.role.value == "member"]
    return [n.id for n in sorted(nodes, key=lambda n: n.node_rank or 0)]


def submits(bench: Bench, number: int, tick: Callable[[], None]) -> tuple[int, float, list[str]]:
    """So many small jobs at once: how many succeed, how long it takes, what is left of them."""
    began = time.monotonic()
    jobs = []
    for index in range(number):
        doc = document(f"small-{index}", bench.image, steps(3, 0.01), replicas=1)
        jobs.append(submit(bench.cluster, bench.watched, doc))
    done = 0
    for job in jobs:
        job.until(lambda job=job: job.phase in ("Succeeded", "Failed"), "its end", within_s=900)
        done += job.phase == "Succeeded"
        tick()
    took = time.monotonic() - began
    label = "elasticjob.dlrover/replica-type=dlrover-master"
    until(lambda: not bench.cluster.list("pods", SPACE, label), "masters are gone", within_s=120)
    left = sorted({p["metadata"]["labels"]["elasticjob.dlrover/replica-type"]
                   for p in bench.cluster.list("pods", SPACE)})  # fmt: skip
    return done, took, left


ROWS = {
    "worker process `kill -9` in a Pod, of three → next step": (
        worker_killed, "cold restart of all, 5–17 s measured", "≤ 0.5 s"),
    "the same, of two: as many as there are cores": (
        partial(worker_killed, nodes=2), "the same", "≤ 0.5 s"),
    "`kubectl delete pod --force` of a worker → next step at reduced size": (
        pod_lost, "60 s last call", "≤ 2 s"),
    "the same with a standby Pod, at full size": (
        standby, "~30 s for a cold Pod; all restart twice", "≤ 2 s"),
    "`kubectl scale ej/x --replicas=+1` → first step of the larger world, from the new Pod being "
    "warm": (scaled, "impossible", "≤ 1 s"),
}  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="of each fault")
    parser.add_argument("--submits", type=int, default=60)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--json", type=Path, help="keep all samples there")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    console, where = Console(stderr=True), machine()
    rows, samples = [], {}
    with cluster_for_tests() as cluster, Progress(console=console) as progress:
        installed(cluster, cluster.image("operator"), cluster.image("master"))
        prepare(cluster)
        with watching(cluster, SPACE) as watched:
            bench = Bench(cluster, watched, cluster.image("agent"))
            for name, (measure, theirs, target) in ROWS.items():
                if args.only not in name or not args.times:
                    continue
                task = progress.add_task(name[:50], total=args.times)
                found = measure(bench, args.times, lambda t=task: progress.advance(t))
                samples[name] = found
                words = f"{min(found):.2f} / {statistics.median(found):.2f} / {max(found):.2f} s"
                rows.append((name, theirs, target, f"{words} (n={len(found)})"))
            if args.submits and args.only in "submits":
                task = progress.add_task("submits", total=args.submits)
                done, took, left = submits(bench, args.submits, lambda: progress.advance(task))
                name = f"{args.submits} submits of small jobs → all Succeeded"
                words = f"{done} of {args.submits} in {took:.0f} s; Pods left: {', '.join(left)}"
                rows.append((name, "–", f"{args.submits} of {args.submits}", words))
        cluster.kubectl("delete", "namespace", SPACE, "--wait=false")
    table = [
        f"`python benchmarks/cluster.py --times {args.times} --submits {args.submits}` on {where}.",
        "",
        "| what | DLRover (documents, code) | target | ours: min / median / max |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    print("\n".join(table))
    if args.json:
        args.json.write_text(json.dumps(samples))
    if args.write:
        write(table)
    return 0


def prepare(cluster: Cluster) -> None:
    """An empty namespace with the script in it."""
    cluster.kubectl("delete", "namespace", SPACE, "--ignore-not-found")
    cluster.kubectl("create", "namespace", SPACE)
    scripts: Obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"},
                    "data": {"train.py": SCRIPT}}  # fmt: skip
    cluster.apply(scripts, namespace=SPACE)


def write(table: list[str]) -> None:
    """Between the marks of docs/benchmarks.md."""
    text = DOCS.read_text()
    before, rest = text.split(BEGIN)
    _, behind = rest.split(END)
    DOCS.write_text(before + BEGIN + "\n" + "\n".join(table) + "\n" + END + behind)


if __name__ == "__main__":
    sys.exit(main())
