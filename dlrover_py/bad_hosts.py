"""Which hosts of a cluster have failed again and again, in several jobs (pure functions).

Each job's status has the faults that its master attributes to a host: a device that failed, a
failed check, a lost node. Errors of a script, a lack of memory and preemptions are no such faults.
A fault counts less the older it is. No single job can make a host a bad one, nor can all jobs of
another namespace together.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.status import HostFault
from dlrover_py.protocol.words import counted

WEIGHTS: Mapping[HostFaultKind, float] = {
    HostFaultKind.HARDWARE: 1.0,
    HostFaultKind.CHECK: 1.0,
    HostFaultKind.LOST: 0.5,
}
"""How much a fault counts. A node may also be lost because of its script."""


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """When a host is a bad one."""

    limit: float = 1.5
    """A host is bad from this score on."""
    half_life_s: float = 86_400.0
    """Seconds after which a fault counts half."""
    most_of_source: float = 1.0
    """Most that all faults of one source count. It is below the limit, so a source alone decides
    nothing."""
    share: float = 0.1
    """At most this share of the hosts is avoided, those with the highest scores."""
    over: float = 0.75
    """A bad host is one until its score is below this share of the limit."""


@dataclass(slots=True)
class HostRecord:
    """What is known of one host."""

    name: str
    score: float = 0.0
    """The faults, each by its weight and age."""
    jobs: set[str] = field(default_factory=set)
    """Ids of the jobs with these faults."""
    kinds: Counter[HostFaultKind] = field(default_factory=Counter)
    """Number of the faults of each kind."""
    newest: float = 0.0
    """Unix time of the newest fault."""

    @property
    def faults(self) -> str:
        """The faults in words, such as ``2 hardware, 1 lost``."""
        return ", ".join(f"{number} {kind}" for kind, number in sorted(self.kinds.items()))


def host_records(
    faults: Mapping[str, Iterable[HostFault]],
    now: float,
    policy: HostPolicy,
    sources: Mapping[str, str] | None = None,
) -> list[HostRecord]:
    """Return what is known of each host with a fault, the worst first.

    Args:
        faults: The faults of each job, by its id.
        now: Unix time.
        policy: How faults are counted.
        sources: Names of those who speak for several jobs, by the id of the job. A job that is not
            there speaks for itself.
    """
    found: dict[str, HostRecord] = {}
    scores: dict[tuple[str, str], float] = {}
    for job, of_job in faults.items():
        source = (sources or {}).get(job, job)
        for fault in of_job:
            age_s = max(0.0, now - fault.at)
            worth = WEIGHTS[fault.kind] * 0.5 ** (age_s / policy.half_life_s)
            scores[fault.host, source] = scores.get((fault.host, source), 0.0) + worth
            record = found.setdefault(fault.host, HostRecord(fault.host))
            record.kinds[fault.kind] += 1
            record.newest = max(record.newest, fault.at)
            record.jobs.add(job)
    for (host, _), score in scores.items():
        found[host].score += min(score, policy.most_of_source)
    return sorted(found.values(), key=lambda record: (-record.score, record.name))


def bad_hosts(
    records: Iterable[HostRecord], before: Iterable[str], policy: HostPolicy
) -> list[HostRecord]:
    """Return the bad hosts, the worst first.

    Args:
        records: What is known of hosts, the worst first.
        before: The hosts that are bad so far. They stay so a little longer.
        policy: When a host is bad.
    """
    bad_before = set(before)
    least = {True: policy.over * policy.limit, False: policy.limit}
    return [record for record in records if record.score >= least[record.name in bad_before]]


def to_avoid(bad: Sequence[HostRecord], hosts: int, policy: HostPolicy) -> list[str]:
    """Return the names of the bad hosts to avoid: the worst, and no more than the permitted share.

    Args:
        bad: The bad hosts, the worst first.
        hosts: Number of all hosts that are known.
        policy: The share.
    """
    return [record.name for record in bad[: math.floor(policy.share * hosts)]]


def in_words(record: HostRecord) -> str:
    """Return why a host is bad, in words."""
    return f"{record.name} ({record.faults} in {counted(len(record.jobs), 'job')})"
