"""Which hosts of a cluster have failed again and again, in several jobs (pure functions).

Each job's status has the faults that its master attributes to a host: a device that failed, a
failed check, a lost node. Errors of a script, a lack of memory and preemptions are no such faults.
A fault counts less the older it is. No single job can make a host a bad one, nor can all jobs of
another namespace together.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from dlrover_py.protocol.hosts import HostFaultKind
from dlrover_py.protocol.status import HostFault
from dlrover_py.protocol.words import counted

WEIGHTS: Mapping[HostFaultKind, float] = {
    HostFaultKind.HARDWARE: 1.0,
    HostFaultKind.CHECK: 1.0,
    HostFaultKind.LOST: 0.5,
}
"""How much a fault counts. A node may also be lost because of its script."""
AHEAD_S = 300.0
"""Seconds that a fault may be in the future, by the clock of a master."""
_DIGITS = 9
"""Scores are rounded to these digits, so that the order of the sum decides nothing."""


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


class HostScores:
    """What the faults of all jobs count against each host, for the jobs of any namespace.

    Whoever may start Pods in a namespace may write the status of its jobs. So for the jobs of a
    namespace, each of them counts up to the limit, and so do all jobs of another one together.
    Each fault is weighed once, however many namespaces are asked about.
    """

    def __init__(
        self,
        faults: Mapping[str, Mapping[str, Iterable[HostFault]]],
        now: float,
        policy: HostPolicy,
    ) -> None:
        """Weigh the faults.

        Args:
            faults: The faults of each job, by its namespace and its id.
            now: Unix time. Faults that are later by far are left out.
            policy: How faults are counted.
        """
        self._policy = policy
        self._hosts: dict[str, HostRecord] = {}
        """What is known of each host, with its score for a namespace without a fault of it."""
        self._more: dict[str, dict[str, float]] = {}
        """How much higher the score is for the namespace's own jobs, by namespace and host."""
        for space, jobs in faults.items():
            alone, together = defaultdict[str, float](float), defaultdict[str, float](float)
            for job, of_job in jobs.items():
                for host, worth in self._weighed(job, of_job, now).items():
                    alone[host] += min(worth, policy.most_of_source)
                    together[host] += worth
            self._more[space] = more = {}
            for host, worth in together.items():
                capped = min(worth, policy.most_of_source)
                self._hosts[host].score += capped
                more[host] = alone[host] - capped
        for record in self._hosts.values():
            record.score = round(record.score, _DIGITS)
        self._bad = [one for one in _worst(self._hosts.values()) if one.score >= policy.limit]

    def _weighed(self, job: str, faults: Iterable[HostFault], now: float) -> dict[str, float]:
        """Return what the faults of one job count against each host; its record notes them."""
        found = defaultdict[str, float](float)
        for fault in faults:
            if fault.at > now + AHEAD_S:
                continue
            age_s = max(0.0, now - fault.at)
            found[fault.host] += WEIGHTS[fault.kind] * 0.5 ** (age_s / self._policy.half_life_s)
            record = self._hosts.setdefault(fault.host, HostRecord(fault.host))
            record.kinds[fault.kind] += 1
            record.newest = max(record.newest, fault.at)
            record.jobs.add(job)
        return found

    def records(self, space: str) -> list[HostRecord]:
        """Return what is known of each host with a fault, for one namespace, the worst first."""
        return _worst(self._for(space, self._hosts))

    def bad(self, space: str, before: Collection[str], most: int) -> list[HostRecord]:
        """Return the bad hosts for the jobs of one namespace, the worst first.

        The work grows with the faults of this namespace, not with those of all.

        Args:
            space: The namespace.
            before: Its hosts that are bad so far. They stay so a little longer.
            most: Most hosts to return.
        """
        own = self._more.get(space, {})
        of_others = islice((one.name for one in self._bad if one.name not in own), most)
        named = {*own, *of_others, *before} & self._hosts.keys()
        return bad_hosts(_worst(self._for(space, named)), before, self._policy)[:most]

    def _for(self, space: str, hosts: Iterable[str]) -> Iterator[HostRecord]:
        """Yield what is known of these hosts, with the score that counts for a namespace."""
        own = self._more.get(space, {})
        for host in hosts:
            record = self._hosts[host]
            more = own.get(host, 0.0)
            yield replace(record, score=round(record.score + more, _DIGITS)) if more else record


def _worst(records: Iterable[HostRecord]) -> list[HostRecord]:
    """Return the records, the highest score first."""
    return sorted(records, key=lambda record: (-record.score, record.name))


def bad_hosts(
    records: Iterable[HostRecord], before: Collection[str], policy: HostPolicy
) -> list[HostRecord]:
    """Return the bad hosts, the worst first.

    Args:
        records: What is known of hosts, the worst first.
        before: The hosts that are bad so far. They stay so a little longer.
        policy: When a host is bad.
    """
    least = {True: policy.over * policy.limit, False: policy.limit}
    return [record for record in records if record.score >= least[record.name in before]]


def to_avoid(bad: Sequence[HostRecord], hosts: int, policy: HostPolicy) -> list[str]:
    """Return the names of the bad hosts to avoid: the worst, and no more than the permitted share.

    Args:
        bad: The bad hosts, the worst first.
        hosts: Number of the hosts that are known.
        policy: The share.
    """
    return [record.name for record in bad[: math.floor(policy.share * hosts)]]


def in_words(record: HostRecord) -> str:
    """Return why a host is bad, in words."""
    return f"{record.name} ({record.faults} in {counted(len(record.jobs), 'job')})"
