"""Jobs in a Kueue queue: which Workloads they need, and what the admitted ones allow (pure).

A job has one Workload for its minimum, its *base*, and one for each further step of ``nodeUnit``.
Kueue admits and evicts each by itself. The number of nodes in ``status.allocation`` follows, so a
step that is evicted costs the job some nodes, and the base all of them.

A Workload that has quota is deleted only when the job's Pods fit into the others. So the quota of a
job always covers the Pods that hold resources. What is decided follows from the observed objects
alone, and the operator may die between any two writes.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from dlrover_operator.facts import ACTIVE_PHASES, final_phase
from dlrover_operator.observed import JobUid, Obj, job_of, uid_of
from dlrover_py.allocator import Demand, demand_of
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation, PodPlace
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.status import MeasuredSpeed
from dlrover_py.protocol.words import counted

NOTE_STEP = "elasticjob.dlrover/step"
"""Annotation of a Workload: 0 for the base, else the number of the step."""
NOTE_STANDBYS = "elasticjob.dlrover/standbys"
"""Annotation of a base: how many of its Pods are standbys."""
NOTE_REQUEST = "elasticjob.dlrover/request"
"""Annotation of a Workload: a digest of what it asks for."""
STEP_PRIORITY = -1_000_000
"""Priority of the steps relative to the base. Bases of all jobs come before steps of any job: the
priorities of two jobs differ by less."""
WAITING_STEPS = 8
"""Greatest number of steps of a job that wait for quota at the same time."""
SEEN_S = 2.0
"""Seconds after a new allocation before quota is given back. The master must have read it, and a
Pod that it has created before must be observed."""
MOST_OWN = 48
"""Kinds of hosts of a job from which on further Workloads share those of their flavors, whatever
their checks say of Pods. An allocation may have 64 of them."""
SUSPENDED = "held back: the job was suspended"
OF_POD = (
    *("nodeSelector", "tolerations", "affinity", "overhead", "runtimeClassName"),
    *("resourceClaims", "resources"),
)
"""Fields of a Pod that decide about quota and flavors."""
OF_CONTAINER = ("name", "image", "resources", "restartPolicy")
"""Fields of a container that decide about quota and flavors."""
SILENT_S = 120.0
"""Seconds after which a job without Pods and without nodes to create gives its quota back, although
no master has said that it wants none: there may be no master."""
_COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)
POD_SET = "main"
"""Name of the only Pod set of a Workload."""


@dataclass(frozen=True, slots=True)
class PodUpdates:
    """What the admission checks of a Workload have its Pods get.

    A ProvisioningRequest has them name it in an annotation, and may name the hosts that it made.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Obj, ...] = ()

    @classmethod
    def of(cls, status: Obj) -> Self:
        """Return what the checks in a Workload's status that are ready have said.

        The order of the checks, and of their tolerations, does not matter.
        """
        checks = [c for c in status.get("admissionChecks") or () if c.get("state") == "Ready"]
        checks.sort(key=lambda check: str(check.get("name")))
        # There is one set of Pods.
        found = [one for check in checks for one in check.get("podSetUpdates") or ()]

        def merged(name: str) -> dict[str, str]:
            return {k: v for one in found for k, v in (one.get(name) or {}).items()}

        more = [toleration for one in found for toleration in one.get("tolerations") or ()]
        more.sort(key=lambda one: json.dumps(one, sort_keys=True))
        return cls(merged("labels"), merged("annotations"), merged("nodeSelector"), tuple(more))

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self.labels or self.annotations or self.node_selector or self.tolerations)


@dataclass(frozen=True, slots=True)
class Workload:
    """The view of a Workload of a job."""

    name: str
    uid: str
    owner: JobUid
    """The ElasticJob that owns it."""
    step: int
    """0 for the base."""
    nodes: int
    """Number of Pods for which it asks."""
    queue: str
    request: str
    """Digest of what it asks for."""
    reserved: bool = False
    """Whether it holds quota."""
    admitted: bool = False
    """Whether Kueue allows its Pods."""
    why: str = ""
    """What Kueue says of its state."""
    standbys: int = 0
    """Number of the Pods that are standbys."""
    evicted: bool = False
    """Whether Kueue takes back what it has admitted."""
    leaving: bool = False
    """Whether it was deleted but still exists."""
    flavors: tuple[str, ...] = ()
    """Names of the ResourceFlavors that its Pods get, sorted."""
    updates: PodUpdates = field(default_factory=PodUpdates, hash=False)
    """What its Pods get besides."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of an object. One that is no Workload of ours has the step -1."""
        meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
        notes = meta.get("annotations") or {}
        conditions = {c.get("type"): c for c in status.get("conditions") or ()}
        true = {kind for kind, c in conditions.items() if c.get("status") == "True"}
        evicted = "Evicted" in true
        admission = status.get("admission") or {}
        given = (admission.get("podSetAssignments") or [{}])[0]
        told = conditions.get("Evicted" if evicted else "QuotaReserved") or {}
        if "QuotaReserved" in true and "Admitted" not in true and not evicted:
            told = {"message": "its admission checks are not done"}
        sets = spec.get("podSets") or [{}]
        return cls(
            name=meta["name"],
            uid=meta["uid"],
            owner=job_of(meta),
            step=_count(notes.get(NOTE_STEP), -1),
            standbys=_count(notes.get(NOTE_STANDBYS), 0),
            nodes=sets[0].get("count", 1),
            queue=spec.get("queueName", ""),
            request=notes.get(NOTE_REQUEST, ""),
            reserved=bool(admission),
            admitted=bool(admission) and "Admitted" in true and not evicted,
            why=told.get("message", ""),
            evicted=evicted,
            leaving="deletionTimestamp" in meta,
            flavors=tuple(sorted(set((given.get("flavors") or {}).values()))),
            updates=PodUpdates.of(status),
        )

    @property
    def placement(self) -> str:
        """Return the name of the kind of hosts that its flavors are."""
        return _short(".".join(self.flavors))

    @property
    def own_placement(self) -> str:
        """Return the name of a kind of hosts for its Pods alone; no flavor has such a name.

        What the checks have said is no part of it: Pods that run stay when that changes.
        """
        return _short(f"{'.'.join(self.flavors) or 'any'}_{self.step}")


@dataclass(frozen=True, slots=True)
class Flavor:
    """The view of a ResourceFlavor."""

    labels: Mapping[str, str]
    """Labels of its hosts."""
    tolerations: tuple[Obj, ...]
    """Tolerations that Pods on its hosts need."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of an object."""
        spec = obj.get("spec") or {}
        return cls(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))


@dataclass(frozen=True, slots=True)
class QueuedPod:
    """The view of a worker's Pod."""

    job: JobUid
    """The ElasticJob that owns it."""
    placement: str
    """Name of the kind of hosts that it was given; empty if it was given none."""
    holds: bool
    """Whether it holds resources: it has not ended."""

    @classmethod
    def of(cls, obj: Obj) -> Self:
        """Return the view of an object."""
        meta = obj["metadata"]
        return cls(
            job_of(meta),
            (meta.get("labels") or {}).get(names.LABEL_PLACEMENT, ""),
            (obj.get("status") or {}).get("phase") not in ("Succeeded", "Failed"),
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the cluster has of Kueue."""

    queues: frozenset[tuple[str, str]] = frozenset()
    """Namespace and name of all LocalQueues."""
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    """ResourceFlavors by name."""
    missing: str = ""
    """Why nothing is known of Kueue; empty if all is known."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What must change for one job."""

    create: tuple[Obj, ...] = ()
    """Workloads to create."""
    delete: tuple[Workload, ...] = ()
    """Workloads to delete."""
    allocation: NodeAllocation | None = None
    """The allocation to write; None if it stays."""
    waits: bool = False
    """Whether quota is to be given back as soon as the master has read the allocation."""


def queue_of(job: Obj) -> str:
    """Return the name of the queue that a job asks for; empty if it asks for none."""
    return str((job["metadata"].get("labels") or {}).get(names.LABEL_QUEUE) or "")


def decide(
    job: Obj,
    workloads: Iterable[Workload],
    pods: Iterable[QueuedPod],
    cluster: Cluster,
    now: float,
    refused: str = "",
) -> Changes:
    """Return what must change for a job that is in a queue or has Workloads. Nothing is done.

    Args:
        job: the ElasticJob.
        workloads: the Workloads in its namespace; those of other jobs are ignored.
        pods: the Pods of workers; those of other jobs are ignored.
        cluster: what the cluster has of Kueue.
        now: Unix time.
        refused: why the API server has refused a Workload of the job; empty if it has not.
    """
    meta, spec = job["metadata"], job.get("spec") or {}
    if meta.get("deletionTimestamp") or spec.get("managedBy") not in (None, names.MANAGED_BY):
        return Changes()
    own = sorted((w for w in workloads if _is_of(w, job)), key=lambda w: w.step)
    held = Counter(pod.placement for pod in pods if pod.job == uid_of(job) and pod.holds)
    return _Decision(job, own, held, cluster, now, refused).changes()


class _Decision:
    """The decision for one job."""

    def __init__(
        self,
        job: Obj,
        own: Sequence[Workload],
        held: Counter[str],
        cluster: Cluster,
        now: float,
        refused: str,
    ) -> None:
        """Keep what is known.

        Args:
            job: the ElasticJob.
            own: its Workloads, the base first.
            held: number of its Pods that hold resources, by placement.
            cluster: what the cluster has of Kueue.
            now: Unix time.
            refused: why a Workload of the job was refused; empty if none was.
        """
        self._obj, self._own, self._held = job, own, held
        self._cluster, self._now, self._refused = cluster, now, refused
        self._granted = ElasticJob.allocation_in(job)
        training = (job.get("status") or {}).get("training") or {}
        self._speed = MeasuredSpeed.read(training.get("speed"))
        # Until a master reports that it wants fewer nodes, it may create those that are missing.
        wanted = training.get("desired", 0) if training.get("phase") in ACTIVE_PHASES else 0
        over = self._is_over(held)
        if over:
            wanted = 0
        self._wanted: int = wanted
        """Nodes that the master wants."""
        worker = ((job.get("spec") or {}).get("replicaSpecs") or {}).get("worker") or {}
        self._standbys: int = worker.get("standbyReplicas") or 0
        self._pods = max(held.total(), wanted + self._standbys if wanted else 0)
        """Pods that hold resources, or may do so soon."""
        self._follows = None if over else training.get("followedAllocation")
        """``since`` of the allocation that the master follows. None if it follows none any more, or
        is of a release that does not report it."""
        self._placement = self._placement_of_each()
        """Name of the kind of hosts of each Workload with quota, by the name of the Workload."""

    def _placement_of_each(self) -> dict[str, str]:
        """Return the name of the kind of hosts of each Workload with quota, by its name.

        Workloads of the same flavors share one. If the checks of a Workload have said something of
        its Pods, it has one of its own. But it keeps the one that it was given, so that its Pods
        stay: with checks that speak later, or of a time before operators heard them.
        """
        granted = {} if self._granted is None else {p.name: p for p in self._granted.placements}
        # The greater of both: Pods that still end are of a Workload, too.
        left = Counter({name: place.nodes for name, place in granted.items()}) | self._held
        found: dict[str, str] = {}

        def turn(one: Workload) -> tuple[bool, bool, int]:
            return bool(one.updates), not one.admitted or one.leaving, one.step

        for one in sorted((w for w in self._own if w.reserved), key=turn):
            own, shared = one.own_placement, one.placement
            full = len(set(found.values())) >= MOST_OWN
            # One that gives its quota back gets no Pods any more, and its Pods are where they were.
            starts = one.admitted and not one.leaving and one.updates and not full
            alone = own in granted or self._held[own] or (starts and left[shared] < one.nodes)
            place = found[one.name] = own if alone else shared
            left[place] -= one.nodes
        return found

    def _is_over(self, held: Counter[str]) -> bool:
        """Return whether no master creates Pods any more, whatever one has reported last.

        The operator has ended or suspended the job without a master, or the job may have no nodes
        for so long that a master would have reported that.
        """
        status = self._obj.get("status") or {}
        suspended = any(
            (c.get("type"), c.get("status")) == (ConditionType.SUSPENDED, "True")
            for c in status.get("conditions") or ()
        )
        granted = self._granted
        stopped = granted is not None and not granted.nodes
        silent = granted is not None and self._now - granted.since >= SILENT_S
        return bool(final_phase(status)) or suspended or (stopped and silent and not held)

    def changes(self) -> Changes:
        """Return what must change."""
        queue = queue_of(self._obj)
        ended = final_phase(self._obj.get("status") or {})
        if self._cluster.missing:
            held = None if ended else self._hold(self._cluster.missing, keep=True)
            return Changes(allocation=held)
        if ended:
            return self._released(self._own, None)
        if self._obj["spec"].get("suspend") is True:
            return self._released(self._own, self._grant(0, SUSPENDED))
        try:
            job = ElasticJob.read(self._obj)
        except ConfigError:
            return self._only_taken_back(None)  # the condition Accepted has the reason
        faults = [fault for fault in job.worker.faults() if not fault.unknown]
        if faults:  # the API server stores a template of any form
            return self._only_taken_back(
                self._hold(f"its Pod template is refused: {faults[0]}", keep=True)
            )
        template = job.worker.template.get("metadata") or {}
        if names.LABEL_QUEUE in (template.get("labels") or {}):
            why = (
                f"two owners of quota: the label {names.LABEL_QUEUE} is on the job and in the "
                "metadata of its Pod template; remove it from the template"
            )
            return self._only_taken_back(self._hold(why, keep=True))
        now_in = next((w.queue for w in self._own if w.reserved), "")
        if not now_in and (self._obj["metadata"]["namespace"], queue) not in self._cluster.queues:
            if not queue:
                return self._released(self._own, None)
            namespace = self._obj["metadata"]["namespace"]
            why = f"there is no LocalQueue {queue} in the namespace {namespace}; create it"
            return self._released(self._own, self._hold(f"{why}, or correct the label"))
        note = ""
        if now_in and now_in != queue:
            other = f"the queue {queue}" if queue else "no queue"
            note = f"; the label now names {other}: suspend and resume the job to move it"
        return self._queued(job, now_in or queue, note)

    def _only_taken_back(self, otherwise: NodeAllocation | None) -> Changes:
        """Return what must change for a job whose spec cannot be used: only what Kueue takes back.

        Args:
            otherwise: the allocation to write if Kueue takes back nothing, or the job has none yet;
                None if it stays.
        """
        gone = [w for w in self._own if w.evicted or w.leaving]
        kept = [w for w in self._own if w.admitted and w not in gone and self._known(w)]
        if not gone or self._granted is None:
            return Changes(allocation=otherwise)
        if not kept or kept[0].step:
            why = gone[0].why or "its base was deleted"
            return self._released(self._own, self._grant(0, f"held back: {why}"))
        nodes = min(sum(w.nodes for w in kept) - kept[0].standbys, self._granted.nodes)
        words = f"the queue {kept[0].queue} has taken back {counted(len(gone), 'step')}"
        return self._released(gone, self._grant(nodes, words, self._placements(kept)))

    def _queued(self, job: ElasticJob, queue: str, note: str) -> Changes:
        """Return what must change for a job that is to have nodes.

        Args:
            job: the job.
            queue: name of its queue.
            note: added to the reason of the allocation.
        """
        demand = demand_of(job, self._speed, queued_at=0.0, size=0)
        base = next((w for w in self._own if w.step == 0), None)
        wanted = _workload(job, self._obj, queue, 0, demand, demand.least + self._standbys)
        steps = [w for w in self._own if w.step > 0]
        if base is None:
            # Pods of a time before the queue, or of a base that was deleted, must end first.
            ready = not self._pods and not steps
            why = self._refused or f"waits for the queue {queue}{note}"
            changes = self._released(steps, self._hold(why))
            return Changes((wanted,) if ready else (), *_rest(changes))
        if not base.admitted:
            stale = not base.reserved and base.request != _request(wanted)
            told = f": {base.why}" if base.why else ": Kueue has not admitted it yet"
            gone = base.leaving or stale or base.evicted
            return self._released(
                [*steps, *([base] if gone else [])],
                self._hold(f"waits in the queue {queue}{told}{note}"),
            )
        if base.leaving:
            return self._released(steps, self._hold(f"waits in the queue {queue}{note}"))
        if not self._known(base):
            why = f"there is no ResourceFlavor of the name {' or '.join(base.flavors)}"
            return Changes(allocation=self._hold(why, keep=True))
        return self._sized(job, demand, [base, *steps], note)

    def _sized(
        self, job: ElasticJob, demand: Demand, own: Sequence[Workload], note: str
    ) -> Changes:
        """Return what must change for a job whose base is admitted.

        Args:
            job: the job.
            demand: what it asks for.
            own: its Workloads, the base first.
            note: added to the reason of the allocation.
        """
        base, *steps = own
        most, have = self._useful(job, demand), base.nodes - base.standbys
        kept: list[Workload] = []
        waiting = 0
        for one in sorted(steps, key=lambda w: (not w.admitted, not w.reserved, w.step)):
            size = demand.after(have) - have
            fits = have < most and (one.reserved or one.nodes == size)
            wish = _workload(job, self._obj, base.queue, one.step, demand, size)
            current = one.request == _request(wish)
            if one.leaving or one.evicted or not fits or not (one.reserved or current):
                continue
            kept.append(one)
            waiting += not one.reserved
            have += one.nodes
        create = []
        free = (number for number in count(1) if all(w.step != number for w in steps))
        # Given sizes are apart by different numbers of nodes, so their order matters.
        while have < most and waiting < (1 if demand.sizes else WAITING_STEPS):
            size = demand.after(have) - have
            create.append(_workload(job, self._obj, base.queue, next(free), demand, size))
            have, waiting = have + size, waiting + 1
        admitted = [base, *(w for w in kept if w.admitted and self._known(w))]
        nodes = demand.fit(min(sum(w.nodes for w in admitted) - base.standbys, most))
        words = f"the queue {base.queue} has admitted {counted(nodes, 'node')}"
        if waiting:
            words += f"; {counted(most - nodes, 'more node')} wait for quota"
        changes = self._released(
            [w for w in steps if w not in kept],
            self._grant(nodes, words + note, self._placements(admitted)),
        )
        return Changes(tuple(create), *_rest(changes))

    def _useful(self, job: ElasticJob, demand: Demand) -> int:
        """Return the number of nodes for which a job asks.

        A job that scales by itself asks for what it may use soon: the nodes that its master wants,
        or the larger size that its measured speeds recommend. With a deadline it is the next larger
        size, because only the master knows which one is enough. Quota without Pods would be lost to
        all others.

        Args:
            job: the job.
            demand: what it may have.
        """
        scaling, most = job.worker.scaling, max(demand.least, demand.fit(demand.maximum))
        if scaling is None or scaling.mode != "auto":
            return most
        if self._speed is None:
            return min(most, max(demand.least, demand.fit(max(job.worker.replicas, self._wanted))))
        size = min(most, max(demand.least, demand.fit(self._wanted)))
        top = min(most, max(size, demand.most))
        sizes = [size]
        while sizes[-1] < top:  # by a tenth, or to the next size
            larger = max(demand.after(sizes[-1]), demand.fit(sizes[-1] * 11 // 10))
            sizes.append(min(larger, top))
        if scaling.objective != "throughput":
            if scaling.deadline is not None:
                return sizes[min(1, len(sizes) - 1)]
            return min(sizes, key=lambda n: n / demand.speed(n))
        best = max(map(demand.speed, sizes))
        enough = next(n for n in sizes if demand.speed(n) * (1 + scaling.min_gain / 4) >= best)
        gain = demand.speed(enough) / demand.speed(size) - 1
        return enough if gain >= scaling.min_gain else size

    def _known(self, workload: Workload) -> bool:
        """Return whether all flavors of a Workload are known, as far as it has any."""
        return all(name in self._cluster.flavors for name in workload.flavors)

    def _placements(self, admitted: Iterable[Workload]) -> list[PodPlace]:
        """Return the kinds of hosts of admitted Workloads, by name, with the number of their Pods.

        All flavors of the Workloads must be known.
        """
        groups: dict[str, list[Workload]] = {}
        for one in admitted:
            groups.setdefault(self._placement[one.name], []).append(one)
        found = []
        for name, some in sorted(groups.items()):
            flavors = [self._cluster.flavors[flavor] for flavor in some[0].flavors]
            # Pods of several Workloads cannot be told apart, so all must say the same.
            updates = some[0].updates
            if any(one.updates != updates for one in some):
                updates = PodUpdates()
            place = PodPlace(
                name=name,
                nodes=sum(one.nodes for one in some),
                node_selector={k: v for f in flavors for k, v in f.labels.items()}
                | dict(updates.node_selector),
                tolerations=[
                    *(toleration for f in flavors for toleration in f.tolerations),
                    *updates.tolerations,
                ],
                labels=dict(updates.labels),
                annotations=dict(updates.annotations),
            )
            found.append(place)
        return found

    def _released(self, unwanted: Iterable[Workload], allocation: NodeAllocation | None) -> Changes:
        """Return the change of the allocation, and the Workloads that can be deleted now.

        A Workload without quota can be deleted at once, one with quota when all Pods fit into the
        others. While there are Pods, the latter also waits until the allocation is `SEEN_S` old,
        and the master follows it. Until then, a Pod may be created in a place that is taken back.
        `Changes.waits` says whether one has to wait.

        Args:
            unwanted: Workloads that the job does not want any more.
            allocation: the allocation to write; None if it stays.
        """
        quota = Counter[str]()
        for one in self._own:
            if one.reserved:
                quota[self._placement[one.name]] += one.nodes
        # Pods that have no place any more, or are too many for it, are covered by other Workloads.
        excess = sum(max(0, n - quota[place]) for place, n in self._held.items())
        granted = allocation or self._granted
        recent = granted is not None and (
            0 <= self._now - granted.since < SEEN_S or self._follows not in (None, granted.since)
        )
        delete, waits = [], False
        for one in sorted(unwanted, key=lambda w: w.step, reverse=True):
            if one.leaving:
                continue
            if not one.reserved:
                delete.append(one)
                continue
            place = self._placement[one.name]
            here = quota[place] - one.nodes
            fits = self._held[place] + excess <= here
            fits &= self._pods <= quota.total() - one.nodes
            if fits and not (recent and self._pods):
                quota[place] = here
                delete.append(one)
            else:
                waits = True
        return Changes((), tuple(delete), allocation, waits)

    def _hold(self, why: str, *, keep: bool = False) -> NodeAllocation | None:
        """Return the allocation of a job that may not have nodes now; None if it has that already.

        Args:
            why: the reason.
            keep: leave the nodes to a job that has some, and change only the reason.
        """
        if keep and self._granted is not None and self._granted.nodes:
            changed = self._granted.model_copy(update={"reason": why})
            return changed if changed != self._granted else None
        return self._grant(0, f"held back: {why}")

    def _places_kept(self) -> list[PodPlace]:
        """Return the places of Workloads that still have quota, of a job without nodes.

        If the job has nodes again before that quota is given back, the Workloads have these places
        again. Until then, a master that is late may create Pods there.
        """
        quota = Counter[str]()
        for one in self._own:
            if one.reserved:
                quota[self._placement[one.name]] += one.nodes
        granted = () if self._granted is None else self._granted.placements
        return [
            place.model_copy(update={"nodes": min(place.nodes, quota[place.name])})
            for place in granted
            if quota[place.name]
        ]

    def _grant(
        self, nodes: int, why: str, placements: Sequence[PodPlace] = ()
    ) -> NodeAllocation | None:
        """Return an allocation; None if the job has it already.

        Args:
            nodes: number of nodes.
            why: the reason.
            placements: where the Pods go.
        """
        old = self._granted
        places = list(placements) if nodes else self._places_kept()
        # Without nodes, no Pods are created anywhere.
        same = old is not None and old.nodes == nodes and (not nodes or old.placements == places)
        since = old.since if same and old is not None else self._now
        made = NodeAllocation(nodes=nodes, reason=why, since=since, placements=places)
        return None if made == old else made


def _short(name: str) -> str:
    """Return a name that may be the value of a label: a long one ends with its digest."""
    if len(name) <= 63:
        return name
    return f"{name[:50].rstrip('._-')}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _rest(changes: Changes) -> tuple[tuple[Workload, ...], NodeAllocation | None, bool]:
    """Return all but the Workloads to create."""
    return changes.delete, changes.allocation, changes.waits


def _workload(job: ElasticJob, obj: Obj, queue: str, step: int, demand: Demand, nodes: int) -> Obj:
    """Return a Workload to create.

    Args:
        job: the job.
        obj: its object.
        queue: name of the LocalQueue.
        step: 0 for the base, else the number of the step.
        demand: what the job asks for.
        nodes: number of Pods.
    """
    meta, template = obj["metadata"], job.worker.template["spec"]
    # Steps of the same number compete, so jobs of one priority get about equal numbers of steps.
    priority = demand.priority + (STEP_PRIORITY - step if step else 0)
    spec = {name: template[name] for name in OF_POD if name in template}
    for group in ("containers", "initContainers"):
        some = [{k: c[k] for k in OF_CONTAINER if k in c} for c in template.get(group) or ()]
        spec |= {group: some} if some else {}
    asked: Obj = {
        "queueName": queue,
        "priority": max(-(2**31), min(priority, 2**31 - 1)),
        "podSets": [
            {
                "name": POD_SET,
                "count": nodes,
                "template": {"metadata": {}, "spec": spec | {"restartPolicy": "Never"}},
            }
        ],
    }
    notes = {NOTE_STEP: str(step)}
    if step == 0:
        notes[NOTE_STANDBYS] = str(nodes - demand.least)
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "metadata": {
            "name": _name(meta, step),
            "namespace": meta["namespace"],
            "annotations": notes | {NOTE_REQUEST: digest},
            "labels": {names.LABEL_APP: names.APP, names.LABEL_JOB: meta["name"]},
            "ownerReferences": [names.owner(meta["name"], meta["uid"])],
        },
        "spec": asked,
    }


def _name(meta: Obj, step: int) -> str:
    """Return the name of a Workload of the job with this metadata."""
    return f"elasticjob-{meta['name']}-{meta['uid'][:8]}-{step}"


def _is_of(workload: Workload, job: Obj) -> bool:
    """Return whether a Workload is one that the operator has made for the job."""
    return (
        workload.owner == uid_of(job)
        and workload.step >= 0
        and workload.name == _name(job["metadata"], workload.step)
    )


def _count(text: object, otherwise: int) -> int:
    """Return the number in an annotation, which anybody may have written."""
    return int(text) if isinstance(text, str) and _COUNT.fullmatch(text) else otherwise


def _request(workload: Obj) -> str:
    """Return the digest of what a Workload asks for."""
    return str(workload["metadata"]["annotations"][NOTE_REQUEST])
