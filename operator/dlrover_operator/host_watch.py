"""Which jobs must be told of which bad hosts: from the objects of a cluster (pure functions).

What is decided is written into ``status.badHosts`` of the jobs, and the faults are in their status,
too. Nothing else is kept, so the operator may die between any two writes.

Whoever may start Pods in a namespace may write the status of its jobs. So for the jobs of each
namespace, all jobs of another one count as much as a single job.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Literal, TypeGuard

from pydantic import ValidationError

from dlrover_operator.facts import final_phase
from dlrover_operator.observed import Key, Obj
from dlrover_py.bad_hosts import (
    HostPolicy,
    HostRecord,
    HostScores,
    in_words,
    to_avoid,
)
from dlrover_py.protocol import names
from dlrover_py.protocol.hosts import BadHosts
from dlrover_py.protocol.status import HostFault

_HOST = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
MOST = 100
"""Most bad hosts of which jobs are told."""
Mode = Literal["off", "tell", "act"]


def decide(
    jobs: Iterable[Obj], mode: Mode, now: float, policy: HostPolicy | None = None
) -> dict[Key, BadHosts | None]:
    """Return what must be written into the status of which jobs; None: no host is bad any more.

    Jobs that have ended keep what they have, and their faults still count. The work grows with the
    jobs, their nodes and their faults, not with their product with the namespaces.

    Args:
        jobs: all ElasticJobs.
        mode: ``off``: no host is bad. ``tell``: jobs are told. ``act``: they also avoid the worst.
        now: Unix time.
        policy: when a host is bad; None: the default.
    """
    policy, jobs = policy or HostPolicy(), list(jobs)
    told: dict[str, dict[Key, BadHosts | None]] = {}
    faults: dict[str, dict[str, list[HostFault]]] = {}
    for job in jobs:
        meta, status = job["metadata"], job.get("status") or {}
        space = meta["namespace"]
        if not final_phase(status) and _runs_here(job):
            told.setdefault(space, {})[space, meta["name"]] = _bad_hosts(status)
        if mode != "off" and (of_job := list(faults_in(status.get("training") or {}))):
            faults.setdefault(space, {})[meta["uid"]] = of_job
    scores = HostScores(faults, now, policy)
    known = _known_hosts(jobs) if mode == "act" and faults else Counter[str]()
    wanted: dict[Key, BadHosts | None] = {}
    for space, had in told.items():
        before = {host for one in had.values() if one is not None for host in one.hosts}
        found = scores.bad(space, before, MOST)
        avoid = to_avoid(found, known[space], policy)
        differ = [key for key, one in had.items() if _differ(one, found, avoid)]
        if differ:  # the words are made for few
            wanted |= dict.fromkeys(differ, _in_words(found, avoid) if found else None)
    return wanted


def _known_hosts(jobs: Iterable[Obj]) -> Counter[str]:
    """Return how many hosts each namespace knows: its own, and those that two others name.

    So no other namespace alone can raise the number, whatever it writes.
    """
    own: dict[str, set[str]] = {}
    for job in jobs:
        training = (job.get("status") or {}).get("training") or {}
        named = (*(training.get("nodes") or ()), *(training.get("hostFaults") or ()))
        hosts = (one.get("host") for one in named if isinstance(one, Mapping))
        own.setdefault(job["metadata"]["namespace"], set()).update(filter(is_host, hosts))
    namers = Counter(chain.from_iterable(own.values()))
    shared = {host for host, number in namers.items() if number > 1}
    return Counter({s: len(hosts) + len(shared) - len(hosts & shared) for s, hosts in own.items()})


def _in_words(found: Sequence[HostRecord], avoid: list[str]) -> BadHosts:
    """Return what jobs are told of bad hosts, some of which new nodes avoid."""
    then = f"new nodes avoid {', '.join(avoid)}" if avoid else "they are not avoided"
    reason = f"hosts have failed in several jobs: {', '.join(map(in_words, found))}; {then}"
    return BadHosts(hosts=[r.name for r in found], avoid=avoid, reason=reason[:4096])


def _differ(present: BadHosts | None, found: Sequence[HostRecord], avoid: list[str]) -> bool:
    """Return whether other hosts are bad, or something else follows; another reason is none."""
    if present is None or not found:
        return present is not None or bool(found)
    return [set(present.hosts), set(present.avoid)] != [{r.name for r in found}, set(avoid)]


def _runs_here(job: Obj) -> bool:
    return (job.get("spec") or {}).get("managedBy") in (None, names.MANAGED_BY)


def faults_in(training: Mapping[str, Obj]) -> Iterable[HostFault]:
    """Yield the faults in the status of a job; those of another form are left out."""
    for fault in training.get("hostFaults") or ():
        try:
            found = HostFault.model_validate(fault)
        except ValidationError:
            continue
        if is_host(found.host):
            yield found


def is_host(host: object) -> TypeGuard[str]:
    """Return whether this may be the name of a Node: Pods with another one would be refused."""
    return isinstance(host, str) and len(host) <= 253 and bool(_HOST.fullmatch(host))


def _bad_hosts(status: Obj) -> BadHosts | None:
    """Return the bad hosts in the status of a job; None if there are none of this form."""
    if status.get("badHosts") is None:
        return None
    try:
        return BadHosts.model_validate(status["badHosts"])
    except ValidationError:
        return None
