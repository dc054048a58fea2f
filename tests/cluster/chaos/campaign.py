"""Runs the faults of a plan against jobs on a cluster, and checks the invariants meanwhile."""

import base64
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.kubernetes.kinds import SECRETS
from dlrover_py.master.journal_store import HOLDER, JOURNAL_KEY
from dlrover_py.protocol.names import RECIPES
from dlrover_py.protocol.status import JobPhase, Training
from tests.cluster.chaos.check import (
    Blame,
    Checker,
    Committed,
    Journaled,
    Partition,
    Pod,
    Violation,
    WorkerLine,
    unlike,
)
from tests.cluster.chaos.plan import OF_API, OF_HOSTS, Kind, Step
from tests.cluster.chaos.score import ceiling, stall_s, useful_s
from tests.cluster.chaos.strike import NAME, ROLE, WORKER, Strike, Striker
from tests.cluster.harness import Cluster, LabError, Obj, until
from tests.cluster.jobs import Job, Watched, document, submit

T = TypeVar("T")
HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples/02-gpt/job.yaml"
MOUNT = "/chaos"
FORGIVE_S = 15
"""Seconds of steady progress after which restart budgets are full again.

Without this, the delays before replacements would only grow.
"""
LEASE_S = 10.0
"""Lease of the masters in seconds.

Pods that start together on two busy cores may delay an agent for 5 s, which would count as a loss.
"""
CHARGED_S = 60.0
"""Seconds after a fault in which its consequences are charged.

A moved master starts after 40 s, and finds only then which nodes are left.
"""
REST = 10
"""Number of faults after which the job must become complete."""
WHOLE_S = 300.0
LIKE_S = 90.0
"""Seconds in which the Pods must match the status. Pods have a grace period, and a kubelet that was
away ends its Pods late.
"""
LIMITS_S = {
    Kind.WORKER_KILLED: 90.0, Kind.MASTER_KILLED: 60.0, Kind.OPERATOR_KILLED: 60.0,
    Kind.ALL_FORCED: 240.0, Kind.SCALED: 240.0, Kind.SUSPENDED: 240.0, Kind.DRAINED: 180.0,
    Kind.TAINTED: 180.0,
}  # fmt: skip
USUAL_S, HOSTS_S, API_S = 120.0, 240.0, 120.0
"""Seconds for a recovery from other faults, from faults of hosts and from faults of the API server.

They are long: a master may have to move first (12 s until a host is NotReady, 10 s of toleration),
a host is excluded for a minute, and all of it runs on two cores.
"""


def limit_s(step: Step) -> float:
    """Return the seconds in which jobs must recover from a step, after it was undone."""
    limits = [
        HOSTS_S if f.kind in OF_HOSTS else API_S if f.kind in OF_API
        else LIMITS_S.get(f.kind, USUAL_S)
        for f in step.faults
    ]  # fmt: skip
    return sum(limits)


class BrokenError(Exception):
    """An invariant was violated. The message has the details."""


@dataclass
class Outcome:
    """The result of one step."""

    number: int
    at_s: float
    kind: str
    what: str
    whom: str
    recovered_s: float
    pause_s: float
    """Longest time without a training step, from the fault until the recovery."""


@dataclass
class Report:
    """The results of a campaign."""

    seed: int
    planned: int
    outcomes: list[Outcome] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    stories: list[str] = field(default_factory=list)
    checks: int = 0
    took_s: float = 0.0
    goodput: dict[str, float] = field(default_factory=dict)
    stall_s: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)

    @property
    def by_kind(self) -> dict[str, list[tuple[float, float]]]:
        """Recovery and pause of each step, by kind."""
        found: dict[str, list[tuple[float, float]]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.kind, []).append((outcome.recovered_s, outcome.pause_s))
        return found

    @property
    def between_s(self) -> float:
        """Mean seconds between two faults."""
        return self.took_s / max(1, len(self.outcomes))

    def ceiling(self, *, mean: bool = False) -> float:
        """Return the largest possible goodput, with the median or the mean recovery."""
        found = [o.recovered_s for o in self.outcomes]
        if not found:
            return 1.0
        recovery_s = statistics.mean(found) if mean else statistics.median(found)
        return ceiling(self.stall_s, recovery_s, self.between_s)


class WorkerLog:
    """The lines of the workers of one job, read by a thread as they are written."""

    def __init__(self, name: str, folder: Path, checker: "Shared") -> None:
        self.name, self.lines = name, list[WorkerLine]()
        self.news = threading.Condition()
        self._path, self._checker = folder / "story", checker
        self._path.touch()
        self._path.chmod(0o666)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._path.open() as file:
            rest = ""
            while not self._closed.wait(0.1):
                *whole, rest = (rest + file.read()).split("\n")
                lines = [WorkerLine.parse(line) for line in whole]
                for line in lines:
                    self._checker.wrote(self.name, line)
                if lines:
                    with self.news:
                        self.lines += lines
                        self.news.notify_all()

    def until(self, look: Callable[[], T], what: str, *, within_s: float) -> T:
        """Call a function until its result is true, and return the result.

        Args:
            look: the function.
            what: what is waited for, for the error message.
            within_s: seconds after which it fails.
        """
        deadline = time.monotonic() + within_s
        with self.news:
            while not (seen := look()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {within_s:.0f} s: {self.name}: {what}")
                self.news.wait(min(left, 1.0))
            return seen

    @property
    def last(self) -> WorkerLine | None:
        """The line of the newest step; None if there is none."""
        return next((line for line in reversed(self.lines) if line.what == "step"), None)

    def beyond(
        self, step: int, hit_at: float, *, after: int, calm_at: float, size: int | None
    ) -> WorkerLine | None:
        """Return the line of the first step that proves a recovery; None if there is none.

        Args:
            step: the step must be greater.
            hit_at: time of the fault.
            after: the round must be newer than this one, unless the step is later than calm_at.
            calm_at: time after which a step of any round proves the recovery.
            size: number of workers of its world; None for any.
        """
        found, best = list[WorkerLine](), step
        for line in reversed(self.lines):
            if line.what == "step":
                if line.at <= hit_at:  # the step was made before the fault
                    best = max(best, int(line.values[0]))
                    break
                found.append(line)
        for line in reversed(found):
            proves = line.round > after or line.at >= calm_at
            if line.values[0] > best and proves and size in (None, line.size):
                return line
        return None

    def pause_s(self, begin: float, end: float) -> float:
        """Return the longest time without a step between two times."""
        steps = {line.at for line in self.lines if line.what == "step" and begin < line.at < end}
        return max(b - a for a, b in pairwise(sorted({begin, end, *steps})))

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        self._thread.join(10)


class Shared:
    """A checker with a lock, for several threads."""

    def __init__(self) -> None:
        self._lock, self.checker = threading.Lock(), Checker()

    def wrote(self, name: str, line: WorkerLine) -> None:
        """Check a line of a worker."""
        with self._lock:
            self.checker.wrote(name, line)

    def notice(self, kind: str, obj: Obj, listed: bool) -> None:
        """Check a version of an object."""
        at, meta = time.monotonic(), obj["metadata"]
        with self._lock:
            if kind == "ElasticJob" and (found := (obj.get("status") or {}).get("training")):
                self.checker.seen(meta["name"], at, Training.model_validate(found))
            elif kind == "Secret" and meta["name"].endswith("-journal"):
                name = meta["name"].removeprefix("elasticjob-").removesuffix("-journal")
                if (data := (obj.get("data") or {}).get(JOURNAL_KEY)) is not None:
                    self.checker.journaled(name, at, _journaled(meta, data, listed))

    def struck(self, blame: dict[str, Blame], for_s: float) -> None:
        """Register the begin of a fault."""
        with self._lock:
            for name, allowed in blame.items():
                self.checker.struck(name, time.monotonic(), allowed, for_s=for_s)

    def parted(self, parted: dict[str, Partition]) -> None:
        """Register that nodes are cut off from now on."""
        with self._lock:
            for name, what in parted.items():
                self.checker.parted(name, time.monotonic(), what)

    def back(self, parted: dict[str, Partition]) -> None:
        """Register that nodes are connected again."""
        with self._lock:
            for name in parted:
                self.checker.back(name, time.monotonic())

    def committed(self, name: str, store: Path) -> None:
        """Check the checkpoints in storage."""
        found = [
            Committed(m.number, m.term, m.step) for m in CheckpointDirectory(store).checkpoints()
        ]
        with self._lock:
            self.checker.committed(name, time.monotonic(), found)

    def left(self, name: str, things: Sequence[str]) -> None:
        """Report things that should be gone."""
        with self._lock:
            self.checker.left(name, time.monotonic(), things)

    def wrong(self, name: str, rule: str, words: str) -> None:
        """Report a violation that the campaign itself has found."""
        with self._lock:
            violation = Violation(time.monotonic(), name, rule, words)
            self.checker.violations.append(violation)

    def take(self) -> list[Violation]:
        """Return the violations since the last call."""
        with self._lock:
            found, self.checker.violations = self.checker.violations, []
            return found


def _journaled(meta: Obj, data: str, listed: bool) -> Journaled:
    kept = json.loads(gzip.decompress(base64.b64decode(data)))
    holder = json.loads((meta.get("annotations") or {}).get(HOLDER) or "{}")
    boot = f"{holder['pod']}/{holder['boot'][:6]}" if holder else ""
    return Journaled(boot, kept["term"], kept["round"], kept["next_event"], listed)


class Campaign:
    """Jobs on a cluster, and the faults that are injected into them."""

    def __init__(
        self,
        cluster: Cluster,
        operator: str,
        namespace: str,
        folder: Path,
        *,
        jobs: int = 1,
        replicas: int = 3,
        fast: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self._replicas, self._fast, self._say = replicas, fast, say
        self.shared = Shared()
        self.watched = Watched(cluster, namespace, also=(SECRETS,), notice=self.shared.notice)
        self.jobs, self.worker_logs = list[Job](), dict[str, WorkerLog]()
        self._began = time.monotonic()
        for number in range(jobs):
            self._submit(f"gpt{number}")
        self._striker = Striker(cluster, operator, self.jobs)

    def _submit(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir()
        folder.chmod(0o777)
        shutil.copy(HERE / "worker.py", self.folder / "worker.py")
        self.worker_logs[name] = WorkerLog(name, folder, self.shared)
        self.jobs.append(submit(self.cluster, self.watched, self._document(name)))

    def _document(self, name: str) -> Obj:
        command = ["elastic-run", f"{MOUNT}/worker.py", f"{MOUNT}/{name}"]
        labels = {"elasticjob.dlrover/name": name, "elasticjob.dlrover/replica-type": "worker"}
        apart = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels},
        }
        sizes: Obj = {
            "minReplicas": 2,
            "maxReplicas": 4,
            "standbyReplicas": 1,
            "restartCount": 1000,
        }
        rules = {"FORGIVE_AFTER_S": FORGIVE_S, "LEASE_S": LEASE_S}
        env = [{"name": f"DLROVER_MASTER_{k}", "value": str(v)} for k, v in rules.items()]
        master = {"spec": {"containers": [{"name": "main", "env": env}]}}
        pod = {"topologySpreadConstraints": [apart], "terminationGracePeriodSeconds": 15,
               "volumes": [{"name": "chaos", "hostPath": {"path": str(self.folder)}}]}  # fmt: skip
        if self._fast:
            doc = document(name, self.cluster.image("agent"), [*command, "fast"],
                           replicas=self._replicas, pod=pod, **sizes)  # fmt: skip
            worker = doc["spec"]["replicaSpecs"]["worker"]
        else:
            doc = yaml.safe_load(EXAMPLE.read_text())
            doc["metadata"]["name"] = name
            worker = doc["spec"]["replicaSpecs"]["worker"]
            worker.update(sizes, replicas=self._replicas)
            worker["template"]["spec"].update(pod)
            main = worker["template"]["spec"]["containers"][0]
            main["image"] = self.cluster.image("examples")
            main["command"] = [*command, "gpt", "/examples/02-gpt/train.py", "--steps=1000000000",
                               "--persist-every=10s", "--step-delay=0.05"]  # fmt: skip
            worker["template"] = self.cluster.with_torch(worker["template"])
            store = {"dir": f"{MOUNT}/{name}/store", "keep": {"last": 2}}
            doc["spec"]["checkpoint"] = store
        main = worker["template"]["spec"]["containers"][0]
        main.setdefault("volumeMounts", []).append({"name": "chaos", "mountPath": MOUNT})
        doc["spec"]["replicaSpecs"]["dlrover-master"] = {"template": master}
        return dict(doc)

    # --- Run ---

    def run(self, plan: Sequence[Step], seed: int, *, keep_going: bool = False) -> Report:
        """Run all steps, and return the report.

        Args:
            plan: the steps.
            seed: seed of the plan, for the report.
            keep_going: whether to continue after a violation.
        """
        report = Report(seed, len(plan))
        self._look(report, True, lambda: self._whole(600.0))
        self._began = began = time.monotonic()
        try:
            for step in plan:
                self._look(report, keep_going, partial(self._step, step, report))
                if step.number % REST == 0 or step is plan[-1]:
                    self._look(report, keep_going, lambda: self._whole(WHOLE_S))
                    self._look(report, keep_going, self._orphans)
                    self._look(report, keep_going, self._pods_match)
        except (BrokenError, KeyboardInterrupt):
            pass  # the report has what was found so far
        self._count(report, began)
        return report

    def _look(self, report: Report, keep_going: bool, act: Callable[[], None]) -> None:
        """Call a function, and report the violations that it causes."""
        try:
            act()
        except AssertionError as error:
            self.shared.wrong("campaign", "the training continues", str(error).partition("\n")[0])
        found = self.shared.take()
        if not found:
            return
        report.violations += found
        words = "\n".join(f"VIOLATION {v}" for v in found)
        self._say(words)
        report.stories.append(f"{words}\n{self.story()}")
        if not keep_going:
            raise BrokenError(words)

    def _step(self, step: Step, report: Report) -> None:
        pause = threading.Event()
        pause.wait(step.pause_s)
        strikes = self._aim(step)
        last = {name: worker_log.last for name, worker_log in self.worker_logs.items()}
        hold_s = max(fault.hold_s for fault in step.faults)
        for strike in strikes:
            blame = strike.blame
            if len(strikes) > 1:  # the other fault may end the round, and then no node is charged
                blame = {name: b._replace(owed=False) for name, b in blame.items()}
            self.shared.struck(blame, hold_s + CHARGED_S)
            self.shared.parted(strike.parted)
        began = time.monotonic()
        try:
            strikes[0].hit()
            first_at = time.monotonic()
            if len(strikes) > 1:
                pause.wait(max(0.0, began + step.apart_s - time.monotonic()))
                strikes[1].hit()
            pause.wait(hold_s)
        finally:
            for strike in reversed(strikes):
                strike.mend()
                self.shared.back(strike.parted)
        calm_at = time.monotonic()
        took = paused = 0.0
        for job in self.jobs:
            proof = self._beyond(job, strikes, last[job.name], step, first_at, calm_at)
            took = max(took, proof.at - began)
            paused = max(paused, self.worker_logs[job.name].pause_s(began, max(proof.at, calm_at)))
            self.shared.committed(job.name, self.folder / job.name / "store")
        what = " + ".join(map(str, step.faults))
        whom = " + ".join(strike.whom for strike in strikes)
        outcome = Outcome(
            step.number, began - self._began, step.kind.value, what, whom, took, paused
        )
        report.outcomes.append(outcome)
        self._say(f"{step.number:4}  {outcome.at_s:6.0f} s  {what} [{whom}]  in {took:.2f} s")

    def _aim(self, step: Step) -> list[Strike]:
        """Find the targets of a step. Try again if a target disappears during the search."""
        for _ in range(5):
            self._in_progress()
            with suppress(LabError, KeyError):
                return [self._striker.aim(fault) for fault in step.faults]
        self._in_progress()
        return [self._striker.aim(fault) for fault in step.faults]

    def _beyond(
        self,
        job: Job,
        strikes: Sequence[Strike],
        before: WorkerLine | None,
        planned: Step,
        hit_at: float,
        calm_at: float,
    ) -> WorkerLine:
        assert before is not None, "it was in progress"
        step, number = int(before.values[0]), before.round
        broken = any(job.name in strike.breaks for strike in strikes)
        held = any(job.name in strike.holds for strike in strikes)
        size = next((s.sizes[job.name] for s in strikes if job.name in s.sizes), None)
        calm = float("inf") if broken else calm_at if held else hit_at
        worker_log = self.worker_logs[job.name]
        found = worker_log.until(
            lambda: worker_log.beyond(step, hit_at, after=number, calm_at=calm, size=size),
            f"a step beyond {step} of round {number}"
            f"{f' by {size} workers' if size else ''} after {planned}",
            within_s=limit_s(planned),
        )
        assert found is not None
        return found

    def _in_progress(self) -> None:
        """Wait until all jobs make steps in the round that their status has."""
        for job in self.jobs:
            until(partial(self._known, job), f"{job.name} in progress", within_s=WHOLE_S)

    def _known(self, job: Job) -> WorkerLine | None:
        last, seen = self.worker_logs[job.name].last, job.seen
        good = (
            last is not None
            and seen is not None
            and seen.phase is JobPhase.RUNNING
            and seen.round == last.round
            and all(n.id in job.pods for n in seen.nodes if n.role.value == "member")
        )
        return last if good else None

    def _whole(self, within_s: float) -> None:
        """Wait until each job has a round of all desired nodes, and a standby."""
        for job in self.jobs:

            def look(job: Job = job) -> bool:
                seen = job.seen
                return (
                    self._known(job) is not None
                    and seen is not None
                    and seen.nodes_in_round == seen.desired
                    and seen.desired == job.obj["spec"]["replicaSpecs"]["worker"]["replicas"]
                    and seen.standby == 1
                )

            until(look, f"{job.name} is whole again", within_s=within_s, every_s=0.2)

    # --- Checks of Pods and processes ---

    def _workers(self) -> dict[int, str]:
        mark = f"{MOUNT}/worker.py {MOUNT}/gpt"
        return {p: said for p, said in self.cluster.in_pods().items() if mark in said}

    def _orphans(self) -> None:
        """Check that each worker runs beside its agent in an existing Pod."""

        def strays() -> list[str]:
            found = {p: said for p, said in self._workers().items() if re.search(WORKER, said)}
            for job in self.jobs:
                for node, pod in job.pods.items():
                    if pod["status"].get("phase") != "Running":
                        continue
                    there: dict[int, str] = {}
                    with suppress(LabError):  # the Pod is gone
                        there = self.cluster.processes(f"{job.name}-{node}", job.namespace)
                    if any("elastic-run" in said for said in there.values()):
                        for pid in there:
                            found.pop(pid, None)
            return [f"{pid}: {said}" for pid, said in found.items()]

        try:
            until(lambda: not strays(), "", within_s=30, every_s=1)
        except AssertionError:
            self.shared.wrong("all jobs", "each worker has its agent", str(strays()))

    def _pods_match(self) -> None:
        """Check that the Pods match the nodes in the status, and that each job has one master."""

        def differences() -> list[str]:
            jobs = {job.name: (job.obj["metadata"]["uid"], job.training) for job in self.jobs}
            return unlike(jobs, self._pods())

        try:
            until(lambda: not differences(), "", within_s=LIKE_S, every_s=1)
        except AssertionError:
            self.shared.wrong("all jobs", "Pods match the status", "; ".join(differences()))

    def _pods(self) -> list[Pod]:
        """Return the Pods of the namespace that have not ended."""
        found = []
        for name, pod in self.watched.all("Pod").items():
            meta = pod["metadata"]
            labels, owners = meta.get("labels") or {}, meta.get("ownerReferences") or []
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                owner = next((o["uid"] for o in owners if o.get("controller")), "")
                master = labels.get(ROLE) == "dlrover-master"
                found.append(Pod(name, owner, labels.get(NAME, ""), master))
        return found

    def _suspend(self) -> None:
        """Suspend all jobs: they must end their Pods themselves, before Kubernetes does."""
        for job in self.jobs:
            job.patch({"suspend": True})

        def there() -> list[str]:
            found = [job.name for job in self.jobs if not job.holds("Suspended")]
            found += [pod.name for pod in self._pods()]
            return found + [f"process {pid}: {said}" for pid, said in self._workers().items()]

        try:
            until(lambda: not there(), "", within_s=WHOLE_S, every_s=1)
        except AssertionError:
            self.shared.left("all jobs, suspended", there())

    def finish(self) -> None:
        """Suspend and delete the jobs, and check that nothing is left but recipes."""
        uids = [pod["metadata"]["uid"] for pod in self.watched.all("Pod").values()]
        self._suspend()
        kinds = ("pods,secrets,deployments,services,roles,rolebindings,serviceaccounts,"
                 "networkpolicies,elasticjobs")  # fmt: skip
        for job in self.jobs:
            job.kubectl("delete", "ej", job.name, "--wait=false")

        def left() -> list[str]:
            said = self.cluster.kubectl("get", kinds, "-n", self.namespace, "-oname")
            # The recipes outlive the jobs, for those that are submitted again.
            usual = ("serviceaccount/default", f"secret/{RECIPES}")
            things = [line for line in said.split() if line not in usual]
            things += [f"process {pid}: {said}" for pid, said in self._workers().items()]
            return things + _in_memory(uids)

        try:
            until(lambda: not left(), "nothing is left", within_s=90, every_s=1)
        except AssertionError:
            self.shared.left("all jobs", left())

    # --- Results ---

    def _count(self, report: Report, began: float) -> None:
        ended = time.monotonic()
        report.took_s = ended - began
        report.checks = self.shared.checker.checks
        for name, worker_log in self.worker_logs.items():
            report.goodput[name] = useful_s(worker_log.lines, began, ended) / report.took_s
            steps = [int(line.values[0]) for line in worker_log.lines if line.what == "step"]
            report.steps[name] = max(steps, default=0)
            report.rounds[name] = max((line.round for line in worker_log.lines), default=0)
        lines = [line for worker_log in self.worker_logs.values() for line in worker_log.lines]
        report.stall_s = stall_s(lines)

    def story(self) -> str:
        """Return statuses, causes and logs as text, to explain a violation."""
        parts = [self.watched.story()]
        for job in self.jobs:
            dlrover = Path(sys.executable).parent / "dlrover"
            done = subprocess.run(
                [str(dlrover), "job", "why", job.name, "-n", self.namespace],
                env=self.cluster.env, capture_output=True, text=True, check=False, timeout=60,
            )  # fmt: skip
            parts.append(f"--- dlrover job why {job.name}\n{done.stdout}{done.stderr}")
        for name, pod in self.watched.all("Pod").items():
            host = pod["spec"].get("nodeName")
            said = self.cluster.logs(name, self.namespace)
            parts.append(f"--- {name} on {host}\n{said[-4000:]}")
        for name, worker_log in self.worker_logs.items():
            lines = [line for line in worker_log.lines if line.what != "blocked"][-40:]
            parts.append(f"--- workers of {name}\n" + "\n".join(map(str, lines)))
        return "\n".join(parts)

    def close(self) -> None:
        """End the watches."""
        self.watched.close()
        for worker_log in self.worker_logs.values():
            worker_log.close()


def _in_memory(pods: Sequence[str]) -> list[str]:
    """Return the mounts of the memory volumes of these Pods, on all nodes."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    found = [p for p in places if p.endswith("dlrover-job-shm") and any(u in p for u in pods)]
    return [f"mount {place}" for place in found]


@contextmanager
def campaign(cluster: Cluster, operator: str, **options: Any) -> Iterator[Campaign]:
    """Yield a campaign in its own namespace, which is deleted after the block."""
    namespace = f"chaos-{os.getpid()}"
    cluster.make_namespace(namespace)
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as temp:
            folder = Path(temp)
            folder.chmod(0o777)
            made = Campaign(cluster, operator, namespace, folder, **options)
            try:
                yield made
            finally:
                made.close()
    finally:
        cluster.heal()
        with_it = ("--wait=false", "--ignore-not-found")
        try:
            cluster.kubectl("delete", "namespace", namespace, *with_it)
        except LabError as error:
            print(error, file=sys.stderr)
