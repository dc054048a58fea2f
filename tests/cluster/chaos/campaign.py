"""Carries a plan out on a cluster, while everything that can be seen is checked."""

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
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dlrover_py.kube import SECRETS
from dlrover_py.master.store import HOLDER, JOURNAL_KEY
from dlrover_py.protocol.status import JobPhase, Training
from dlrover_py.storage import Store
from tests.cluster.chaos.check import (
    Blame,
    Checker,
    Committed,
    Journaled,
    Parted,
    Pod,
    Told,
    Violation,
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
"""Steady progress fills the budgets again so soon: else delays before replacements only grow."""
LEASE_S = 10.0
"""Pods that start at once on two busy cores may silence an agent for 5 s, which is charged."""
CHARGED_S = 60.0
"""What follows from a fault is charged within this time, and while it holds: a master that moves
comes after 40 s, and then counts who is there."""
REST = 10
"""After so many faults the job is waited for until it is whole."""
WHOLE_S = 300.0
LIKE_S = 90.0
"""Pods that go have their grace; and kubelets that were away come back to them late."""
LIMITS_S = {
    Kind.WORKER_KILLED: 90.0, Kind.MASTER_KILLED: 60.0, Kind.OPERATOR_KILLED: 60.0,
    Kind.ALL_FORCED: 240.0, Kind.SCALED: 240.0, Kind.SUSPENDED: 240.0, Kind.DRAINED: 180.0,
    Kind.TAINTED: 180.0,
}  # fmt: skip
USUAL_S, HOSTS_S, API_S = 120.0, 240.0, 120.0
"""Generous: a master may have to move first (12 s until a host is NotReady, 10 s tolerated), a host
is kept out for a minute, and two cores serve all of it."""


def limit_s(step: Step) -> float:
    """A fault is recovered from within this time after it was made good."""
    limits = [
        HOSTS_S if f.kind in OF_HOSTS else API_S if f.kind in OF_API
        else LIMITS_S.get(f.kind, USUAL_S)
        for f in step.faults
    ]  # fmt: skip
    return sum(limits)


class Broken(Exception):
    """Something that must not be was seen; the story is in the words."""


@dataclass
class Outcome:
    """One line of the report."""

    number: int
    at_s: float
    kind: str
    what: str
    whom: str
    recovered_s: float
    pause_s: float
    """The longest time without a step, from the fault until it was made good and recovered from."""


@dataclass
class Report:
    """What a campaign found."""

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
        """Recoveries and pauses."""
        found: dict[str, list[tuple[float, float]]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.kind, []).append((outcome.recovered_s, outcome.pause_s))
        return found

    @property
    def between_s(self) -> float:
        """Mean time between faults."""
        return self.took_s / max(1, len(self.outcomes))

    def ceiling(self, *, mean: bool = False) -> float:
        """G*, with the median recovery or the mean."""
        found = [o.recovered_s for o in self.outcomes]
        if not found:
            return 1.0
        recovery_s = statistics.mean(found) if mean else statistics.median(found)
        return ceiling(self.stall_s, recovery_s, self.between_s)


class Tale:
    """What the workers of one job tell, read as it is written."""

    def __init__(self, name: str, folder: Path, checker: "Shared") -> None:
        self.name, self.lines = name, list[Told]()
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
                lines = [Told.parse(line) for line in whole]
                for line in lines:
                    self._checker.told(self.name, line)
                if lines:
                    with self.news:
                        self.lines += lines
                        self.news.notify_all()

    def until(self, look: Callable[[], T], what: str, *, within_s: float) -> T:
        """Wait until there is something (truthy)."""
        deadline = time.monotonic() + within_s
        with self.news:
            while not (seen := look()):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {within_s:.0f} s: {self.name}: {what}")
                self.news.wait(min(left, 1.0))
            return seen

    @property
    def last(self) -> Told | None:
        """The newest step."""
        return next((line for line in reversed(self.lines) if line.what == "step"), None)

    def beyond(
        self, step: int, hit_at: float, *, after: int, calm_at: float, size: int | None
    ) -> Told | None:
        """The first step beyond that one that proves that the training goes on: in a round later
        than ``after``, or once there is calm; in a world of that size, if any is asked for."""
        found, best = list[Told](), step
        for line in reversed(self.lines):
            if line.what == "step":
                if line.at <= hit_at:  # it was on its way when the last one was read
                    best = max(best, int(line.values[0]))
                    break
                found.append(line)
        for line in reversed(found):
            proves = line.round > after or line.at >= calm_at
            if line.values[0] > best and proves and size in (None, line.size):
                return line
        return None

    def pause_s(self, begin: float, end: float) -> float:
        """The longest time without a step between these two."""
        steps = {line.at for line in self.lines if line.what == "step" and begin < line.at < end}
        return max(b - a for a, b in pairwise(sorted({begin, end, *steps})))

    def close(self) -> None:
        """Read no more."""
        self._closed.set()
        self._thread.join(10)


class Shared:
    """The checker, for several threads."""

    def __init__(self) -> None:
        self._lock, self.checker = threading.Lock(), Checker()

    def told(self, name: str, line: Told) -> None:
        """A worker's line."""
        with self._lock:
            self.checker.told(name, line)

    def notice(self, kind: str, obj: Obj, listed: bool) -> None:
        """A version of an object."""
        at, meta = time.monotonic(), obj["metadata"]
        with self._lock:
            if kind == "ElasticJob" and (found := (obj.get("status") or {}).get("training")):
                self.checker.seen(meta["name"], at, Training.model_validate(found))
            elif kind == "Secret" and meta["name"].endswith("-journal"):
                name = meta["name"].removeprefix("elasticjob-").removesuffix("-journal")
                if (data := (obj.get("data") or {}).get(JOURNAL_KEY)) is not None:
                    self.checker.journaled(name, at, _journaled(meta, data, listed))

    def struck(self, blame: dict[str, Blame], for_s: float) -> None:
        """A fault begins."""
        with self._lock:
            for name, allowed in blame.items():
                self.checker.struck(name, time.monotonic(), allowed, for_s=for_s)

    def parted(self, parted: dict[str, Parted]) -> None:
        """These nodes are cut off from now on."""
        with self._lock:
            for name, what in parted.items():
                self.checker.parted(name, time.monotonic(), what)

    def back(self, parted: dict[str, Parted]) -> None:
        """They are so no longer."""
        with self._lock:
            for name in parted:
                self.checker.back(name, time.monotonic())

    def committed(self, name: str, store: Path) -> None:
        """Look what is in storage."""
        found = [Committed(m.number, m.term, m.step) for m in Store(store).checkpoints()]
        with self._lock:
            self.checker.committed(name, time.monotonic(), found)

    def left(self, name: str, things: Sequence[str]) -> None:
        """What should be gone."""
        with self._lock:
            self.checker.left(name, time.monotonic(), things)

    def wrong(self, name: str, rule: str, words: str) -> None:
        """What only the campaign itself can see."""
        with self._lock:
            violation = Violation(time.monotonic(), name, rule, words)
            self.checker.violations.append(violation)

    def take(self) -> list[Violation]:
        """Violations since the last time."""
        with self._lock:
            found, self.checker.violations = self.checker.violations, []
            return found


def _journaled(meta: Obj, data: str, listed: bool) -> Journaled:
    kept = json.loads(gzip.decompress(base64.b64decode(data)))
    holder = json.loads((meta.get("annotations") or {}).get(HOLDER) or "{}")
    boot = f"{holder['pod']}/{holder['boot'][:6]}" if holder else ""
    return Journaled(boot, kept["term"], kept["round"], kept["next_event"], listed)


class Campaign:
    """Jobs on a cluster, and what is done to them."""

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
        self.jobs, self.tales = list[Job](), dict[str, Tale]()
        self._began = time.monotonic()
        for number in range(jobs):
            self._submit(f"gpt{number}")
        self._striker = Striker(cluster, operator, self.jobs)

    def _submit(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir()
        folder.chmod(0o777)
        shutil.copy(HERE / "worker.py", self.folder / "worker.py")
        self.tales[name] = Tale(name, folder, self.shared)
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
        sizes = {"minReplicas": 2, "maxReplicas": 4, "standbyReplicas": 1, "restartCount": 1000}
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

    # --- the plan ---

    def run(self, plan: Sequence[Step], seed: int, *, keep_going: bool = False) -> Report:
        """Do all of it, and count."""
        report = Report(seed, len(plan))
        self._look(report, True, lambda: self._whole(600.0))
        self._began = began = time.monotonic()
        try:
            for step in plan:
                self._look(report, keep_going, lambda s=step: self._step(s, report))
                if step.number % REST == 0 or step is plan[-1]:
                    self._look(report, keep_going, lambda: self._whole(WHOLE_S))
                    self._look(report, keep_going, self._orphans)
                    self._look(report, keep_going, self._as_told)
        except (Broken, KeyboardInterrupt):
            pass  # what was found so far is told
        self._count(report, began)
        return report

    def _look(self, report: Report, keep_going: bool, act: Callable[[], None]) -> None:
        """Do something; what is wrong then is told with its story."""
        try:
            act()
        except AssertionError as error:
            self.shared.wrong("campaign", "it goes on", str(error).partition("\n")[0])
        found = self.shared.take()
        if not found:
            return
        report.violations += found
        words = "\n".join(f"VIOLATION {v}" for v in found)
        self._say(words)
        report.stories.append(f"{words}\n{self.story()}")
        if not keep_going:
            raise Broken(words)

    def _step(self, step: Step, report: Report) -> None:
        pause = threading.Event()
        pause.wait(step.pause_s)
        strikes = self._aim(step)
        last = {name: tale.last for name, tale in self.tales.items()}
        hold_s = max(fault.hold_s for fault in step.faults)
        for strike in strikes:
            blame = strike.blame
            if len(strikes) > 1:  # the other one may end the round, and then nobody is to blame
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
            told = self._beyond(job, strikes, last[job.name], step, first_at, calm_at)
            took = max(took, told.at - began)
            paused = max(paused, self.tales[job.name].pause_s(began, max(told.at, calm_at)))
            self.shared.committed(job.name, self.folder / job.name / "store")
        what = " + ".join(map(str, step.faults))
        whom = " + ".join(strike.whom for strike in strikes)
        outcome = Outcome(
            step.number, began - self._began, step.kind.value, what, whom, took, paused
        )
        report.outcomes.append(outcome)
        self._say(f"{step.number:4}  {outcome.at_s:6.0f} s  {what} [{whom}]  in {took:.2f} s")

    def _aim(self, step: Step) -> list[Strike]:
        """Who is meant may go while it is looked for: then somebody else has taken its place."""
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
        before: Told | None,
        planned: Step,
        hit_at: float,
        calm_at: float,
    ) -> Told:
        assert before is not None, "it was in progress"
        step, number = int(before.values[0]), before.round
        broken = any(job.name in strike.breaks for strike in strikes)
        held = any(job.name in strike.holds for strike in strikes)
        size = next((s.sizes[job.name] for s in strikes if job.name in s.sizes), None)
        calm = float("inf") if broken else calm_at if held else hit_at
        tale = self.tales[job.name]
        found = tale.until(
            lambda: tale.beyond(step, hit_at, after=number, calm_at=calm, size=size),
            f"a step beyond {step} of round {number}"
            f"{f' by {size} workers' if size else ''} after {planned}",
            within_s=limit_s(planned),
        )
        assert found is not None
        return found

    def _in_progress(self) -> None:
        """All jobs make steps, and the API server knows in which round."""
        for job in self.jobs:
            until(lambda j=job: self._known(j), f"{job.name} in progress", within_s=WHOLE_S)

    def _known(self, job: Job) -> Told | None:
        last, seen = self.tales[job.name].last, job.seen
        good = (
            last is not None
            and seen is not None
            and seen.phase is JobPhase.RUNNING
            and seen.round == last.round
            and all(n.id in job.pods for n in seen.nodes if n.role.value == "member")
        )
        return last if good else None

    def _whole(self, within_s: float) -> None:
        """All nodes that are wished are there, in one round, and a standby beside them."""
        for job in self.jobs:

            def look(job: Job = job) -> bool:
                seen = job.seen
                return (
                    self._known(job) is not None
                    and seen is not None
                    and seen.nodes_in_round == seen.wanted
                    and seen.wanted == job.obj["spec"]["replicaSpecs"]["worker"]["replicas"]
                    and seen.standby == 1
                )

            until(look, f"{job.name} is whole again", within_s=within_s, every_s=0.2)

    # --- what nobody tells ---

    def _workers(self) -> dict[int, str]:
        mark = f"{MOUNT}/worker.py {MOUNT}/gpt"
        return {p: said for p, said in self.cluster.in_pods().items() if mark in said}

    def _orphans(self) -> None:
        """Each worker has its agent, in a Pod that there is."""

        def strays() -> list[str]:
            found = {p: said for p, said in self._workers().items() if re.search(WORKER, said)}
            for job in self.jobs:
                for node, pod in job.pods.items():
                    if pod["status"].get("phase") != "Running":
                        continue
                    there: dict[int, str] = {}
                    with suppress(LabError):  # it has gone since
                        there = self.cluster.processes(f"{job.name}-{node}", job.namespace)
                    if any("elastic-run" in said for said in there.values()):
                        for pid in there:
                            found.pop(pid, None)
            return [f"{pid}: {said}" for pid, said in found.items()]

        try:
            until(lambda: not strays(), "", within_s=30, every_s=1)
        except AssertionError:
            self.shared.wrong("all jobs", "no worker without its agent", str(strays()))

    def _as_told(self) -> None:
        """The Pods that there are are those that the masters know, and a master for each job."""

        def differences() -> list[str]:
            jobs = {job.name: (job.obj["metadata"]["uid"], job.training) for job in self.jobs}
            return unlike(jobs, self._pods())

        try:
            until(lambda: not differences(), "", within_s=LIKE_S, every_s=1)
        except AssertionError:
            self.shared.wrong("all jobs", "Pods are as is told", "; ".join(differences()))

    def _pods(self) -> list[Pod]:
        """Those of the namespace that have not ended."""
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
        """What is not needed they end themselves; once they are deleted Kubernetes would."""
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
        """Suspend the jobs, and delete them: nothing is left of them."""
        uids = [pod["metadata"]["uid"] for pod in self.watched.all("Pod").values()]
        self._suspend()
        kinds = ("pods,secrets,deployments,services,roles,rolebindings,serviceaccounts,"
                 "networkpolicies,elasticjobs")  # fmt: skip
        for job in self.jobs:
            job.kubectl("delete", "ej", job.name, "--wait=false")

        def left() -> list[str]:
            said = self.cluster.kubectl("get", kinds, "-n", self.namespace, "-oname")
            usual = ("serviceaccount/default",)
            things = [line for line in said.split() if line not in usual]
            things += [f"process {pid}: {said}" for pid, said in self._workers().items()]
            return things + _in_memory(uids)

        try:
            until(lambda: not left(), "nothing is left", within_s=90, every_s=1)
        except AssertionError:
            self.shared.left("all jobs", left())

    # --- the end ---

    def _count(self, report: Report, began: float) -> None:
        ended = time.monotonic()
        report.took_s = ended - began
        report.checks = self.shared.checker.checks
        for name, tale in self.tales.items():
            report.goodput[name] = useful_s(tale.lines, began, ended) / report.took_s
            steps = [int(line.values[0]) for line in tale.lines if line.what == "step"]
            report.steps[name] = max(steps, default=0)
            report.rounds[name] = max((line.round for line in tale.lines), default=0)
        lines = [line for tale in self.tales.values() for line in tale.lines]
        report.stall_s = stall_s(lines)

    def story(self) -> str:
        """All that helps to understand what has gone wrong."""
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
        for name, tale in self.tales.items():
            lines = [line for line in tale.lines if line.what != "blocked"][-40:]
            parts.append(f"--- workers of {name}\n" + "\n".join(map(str, lines)))
        return "\n".join(parts)

    def close(self) -> None:
        """Watch no more."""
        self.watched.close()
        for tale in self.tales.values():
            tale.close()


def _in_memory(pods: Sequence[str]) -> list[str]:
    """What is mounted of these Pods' volumes in memory, on any of the nodes."""
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    found = [p for p in places if p.endswith("dlrover-job-shm") and any(u in p for u in pods)]
    return [f"mount {place}" for place in found]


@contextmanager
def campaign(cluster: Cluster, operator: str, **options: Any) -> Iterator[Campaign]:
    """A campaign in a namespace of its own, which goes away with all that is in it."""
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
