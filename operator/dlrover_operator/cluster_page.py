"""What the operator's pages show: the jobs of a cluster, and their hosts (pure functions).

All is made from the ElasticJobs that are given, so a page tells no more than these objects do.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from dlrover_operator.facts import final_phase
from dlrover_operator.host_watch import faults_in, is_host
from dlrover_operator.observed import Obj
from dlrover_py.protocol import names
from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.job_object import (
    left_out_notes,
    nodes_left_out,
    read_conditions,
    read_events,
    read_phase,
    read_status,
)
from dlrover_py.protocol.job_view import JobView
from dlrover_py.protocol.status import HostFault, NodePhase, unix_seconds
from dlrover_py.protocol.words import minutes

ROWS = 100
"""Most rows of a table on one page."""
MESSAGE = 300
"""Most characters of a message that are shown."""
FAULTS = 10
"""Most faults of one host that are shown, the newest."""
JOBS_OF_HOST = 5
"""Most jobs of one host that are named."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows a viewer asks for."""

    namespace: str = ""
    """The only namespace; empty for all."""
    phase: str = ""
    """The only phase; empty for all."""
    text: str = ""
    """Part of the names."""
    start: int = 0
    """Index of the first row."""

    @property
    def here(self) -> str:
        """The query of a link to the same rows."""
        return self.link(start=self.start)

    def link(self, **changes: str | int) -> str:
        """Return the query of a link to a page with other values."""
        parts = {"namespace": self.namespace, "phase": self.phase, "text": self.text} | changes
        return "?" + urlencode({name: value for name, value in parts.items() if value})


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job in the table. What is not known is empty."""

    namespace: str
    name: str
    phase: str
    reason: str
    """One word for the problem."""
    message: str
    """The problem in words."""
    ready: str
    progress: str
    goodput: str
    queue: str
    """The queue of Kueue, and how many nodes the job may have."""
    created_at: float
    """Unix seconds; 0 if not known."""


@dataclass(slots=True)
class HostLine:
    """One host in the table."""

    name: str
    jobs: set[str] = field(default_factory=set)
    """The jobs with a node on it, as ``namespace/name``."""
    faults: list[tuple[HostFault, str]] = field(default_factory=list)
    """What has failed, each with the job that says so."""
    bad_in: set[str] = field(default_factory=set)
    """Namespaces whose jobs are told that it is bad."""
    avoided_in: set[str] = field(default_factory=set)
    """Namespaces whose jobs start no new node on it."""

    @property
    def state(self) -> str:
        """The state in words; empty for a host that is not bad."""
        if self.avoided_in:
            return f"avoided in {', '.join(sorted(self.avoided_in))}"
        return f"bad, but not avoided, in {', '.join(sorted(self.bad_in))}" if self.bad_in else ""

    @property
    def jobs_shown(self) -> list[str]:
        """The first jobs, as ``namespace/name``."""
        return sorted(self.jobs)[:JOBS_OF_HOST]

    @property
    def more_jobs(self) -> int:
        """The number of further jobs."""
        return len(self.jobs) - len(self.jobs_shown)

    @property
    def health(self) -> str:
        """The number of faults of each kind, such as ``2 hardware, 1 lost``."""
        kinds: Counter[HostFaultKind] = Counter(fault.kind for fault, _ in self.faults)
        return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))

    @property
    def history(self) -> list[tuple[HostFault, str]]:
        """The newest faults, the newest first."""
        return sorted(self.faults, key=lambda one: -one[0].at)[:FAULTS]


@dataclass(frozen=True)
class TablePage:
    """One page of a table, and the links to the others."""

    rows: Sequence[Any]
    total: int
    """Number of rows of all pages."""
    asked: Filter
    now: float
    """Unix seconds."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs in each phase, without the filter of the phase."""
    namespaces: Mapping[str, int] = field(default_factory=dict)
    """Number of jobs in each namespace, without any filter."""
    left_out: int = 0
    """Number of nodes of large jobs whose hosts are not known."""

    @property
    def pages(self) -> list[tuple[str, str, bool]]:
        """The pages: the query of its link, its number, and whether it is this one."""
        starts = range(0, self.total, ROWS)
        return [
            (self.asked.link(start=s), str(i + 1), s == self.asked.start)
            for i, s in enumerate(starts)
        ]

    def age(self, at: float) -> str:
        """Return the time since then in whole minutes; empty if it is not known."""
        if not at:
            return ""
        return minutes(self.now - at)


def job_table(jobs: Iterable[Obj], asked: Filter, now: float) -> TablePage:
    """Return the jobs that a viewer asks for, by namespace and name.

    Args:
        jobs: the ElasticJobs that the viewer may list.
        asked: which of them.
        now: Unix seconds.
    """
    jobs = list(jobs)
    namespaces = Counter(job["metadata"]["namespace"] for job in jobs)
    fitting = [
        job
        for job in jobs
        if asked.namespace in ("", job["metadata"]["namespace"])
        and asked.text in job["metadata"]["name"]
    ]
    counts = Counter(_phase(job) for job in fitting)
    found = [job for job in fitting if asked.phase in ("", _phase(job))]
    found.sort(key=lambda job: (job["metadata"]["namespace"], job["metadata"]["name"]))
    rows = [_job_line(job) for job in found[asked.start : asked.start + ROWS]]
    return TablePage(
        rows, len(found), asked, now, dict(sorted(counts.items())), dict(sorted(namespaces.items()))
    )


def host_table(jobs: Iterable[Obj], asked: Filter, now: float) -> TablePage:
    """Return the hosts that jobs name: avoided and bad ones first, then those with faults.

    Args:
        jobs: the ElasticJobs that the viewer may list.
        asked: which part of the hosts, by their names; a phase does not count.
        now: Unix seconds.
    """
    jobs = list(jobs)
    namespaces = Counter(job["metadata"]["namespace"] for job in jobs)
    chosen = [job for job in jobs if asked.namespace in ("", job["metadata"]["namespace"])]
    hosts = [host for host in _hosts(chosen) if asked.text in host.name]
    hosts.sort(key=lambda h: (not h.avoided_in, not h.bad_in, -len(h.faults), h.name))
    rows = hosts[asked.start : asked.start + ROWS]
    left_out = sum(nodes_left_out(job) for job in chosen)
    spaces = dict(sorted(namespaces.items()))
    return TablePage(rows, len(hosts), asked, now, namespaces=spaces, left_out=left_out)


def job_view(job: Obj) -> JobView:
    """Return what an ElasticJob alone says about itself: not its Pods, nor Kubernetes events."""
    meta, status, conditions = job["metadata"], read_status(job), read_conditions(job)
    phase, reason = read_phase(job, status, conditions)
    return JobView(
        name=meta["name"],
        header_lines=[],
        phase=phase,
        reason=reason,
        status=status,
        conditions=conditions,
        events=read_events(status, ()),
        document=job,
        notes=left_out_notes(job),
    )


def _phase(job: Obj) -> str:
    """Return the phase of a job: the operator's word, else the master's."""
    status = job.get("status") or {}
    return _text(status.get("phase") or (status.get("training") or {}).get("phase")) or "Created"


def _job_line(job: Obj) -> JobLine:
    """Return the row of a job."""
    meta, status = job["metadata"], job.get("status") or {}
    summary = (status.get("training") or {}).get("summary") or {}
    allocation = status.get("allocation") or {}
    reason = _text(status.get("reason"))
    messages = (
        _text(c.get("message"))
        for c in _conditions_where(status.get("conditions"), "reason", reason)
    )
    queue = _text((meta.get("labels") or {}).get(names.LABEL_QUEUE))
    if allocation.get("nodes") is not None:
        queue = f"{queue}: {allocation['nodes']} nodes" if queue else f"{allocation['nodes']} nodes"
    return JobLine(
        namespace=meta["namespace"],
        name=meta["name"],
        phase=_phase(job),
        reason=reason,
        message=next(messages, "")[:MESSAGE] or _text(allocation.get("reason"))[:MESSAGE],
        ready=_text(summary.get("ready")),
        progress=_text(summary.get("progress")),
        goodput=_text(summary.get("goodput")),
        queue=queue,
        created_at=unix_seconds(meta.get("creationTimestamp")) or 0.0,
    )


def _conditions_where(conditions: Any, field_name: str, value: str) -> Iterator[Obj]:
    """Yield the conditions whose field has this value; none if the value is empty."""
    for condition in conditions or ():
        if value and condition.get(field_name) == value:
            yield condition


def _hosts(jobs: Iterable[Obj]) -> Iterable[HostLine]:
    """Return what the jobs say of each host."""
    found: dict[str, HostLine] = {}

    def host(name: str) -> HostLine:
        line = found.get(name)
        if line is None:
            line = found[name] = HostLine(name)
        return line

    told: defaultdict[str, set[str]] = defaultdict(set)
    avoided: defaultdict[str, set[str]] = defaultdict(set)
    for job in jobs:
        meta, status = job["metadata"], job.get("status") or {}
        key, training = f"{meta['namespace']}/{meta['name']}", status.get("training") or {}
        for fault in faults_in(training):
            host(fault.host).faults.append((fault, key))
        if final_phase(status):
            continue  # it has no nodes, and what it was told of hosts is old
        for node in training.get("nodes") or ():
            if node.get("host") and node.get("phase") != NodePhase.GONE:
                host(node["host"]).jobs.add(key)
        bad = status.get("badHosts") or {}
        told[meta["namespace"]].update(filter(is_host, bad.get("hosts") or ()))
        avoided[meta["namespace"]].update(filter(is_host, bad.get("avoid") or ()))
    for space, hosts in told.items():
        for name in hosts:
            host(name).bad_in.add(space)
    for space, hosts in avoided.items():
        for name in hosts:
            host(name).avoided_in.add(space)
    return found.values()


def _text(value: object) -> str:
    """Return a value as text; empty for None."""
    return "" if value is None else str(value)
