"""Which jobs must be told of which bad hosts: from the objects of a cluster (pure functions).

What is decided is written into ``status.badHosts`` of the jobs, and the faults are in their status,
too. Nothing else is kept, so the operator may die between any two writes.

Whoever may start Pods in a namespace may write the status of its jobs. So for the jobs of each
namespace, all jobs of another one count as much as a single job.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import ValidationError

from dlrover_operator.facts import final_phase
from dlrover_operator.observed import Key, Obj
from dlrover_py.bad_hosts import (
    HostPolicy,
    HostRecord,
    bad_hosts,
    host_records,
    in_words,
    to_avoid,
)
from dlrover_py.protocol import names
from dlrover_py.protocol.hosts import BadHosts
from dlrover_py.protocol.status import HostFault

AHEAD_S = 300.0
"""Seconds that a fault may be in the future, by the clock of a master."""
_HOST = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
MOST = 100
"""Most bad hosts of which jobs are told."""
Mode = Literal["off", "tell", "act"]


def decide(
    jobs: Iterable[Obj], mode: Mode, now: float, policy: HostPolicy | None = None
) -> dict[Key, BadHosts | None]:
    """Return what must be written into the status of which jobs; None: no host is bad any more.

    Jobs that have ended keep what they have, and their faults still count.

    Args:
        jobs: all ElasticJobs.
        mode: ``off``: no host is bad. ``tell``: jobs are told. ``act``: they also avoid the worst.
        now: Unix time.
        policy: when a host is bad; None: the default.
    """
    policy, jobs = policy or HostPolicy(), list(jobs)
    faults: dict[str, list[HostFault]] = {}
    spaces: dict[str, str] = {}
    known = set[str]()
    before: dict[str, set[str]] = {}
    told: dict[Key, BadHosts | None] = {}
    for job in jobs:
        meta, status = job["metadata"], job.get("status") or {}
        training = status.get("training") or {}
        faults[meta["uid"]] = of_job = [f for f in _faults(training) if f.at <= now + AHEAD_S]
        spaces[meta["uid"]] = meta["namespace"]
        known |= {fault.host for fault in of_job}
        known |= {
            host for node in training.get("nodes") or () if _is_name(host := node.get("host"))
        }
        if not final_phase(status) and _runs_here(job):
            told[meta["namespace"], meta["name"]] = present = _bad_hosts(status)
            hosts = present.hosts if present is not None else ()
            before.setdefault(meta["namespace"], set()).update(hosts)
    wanted: dict[str, BadHosts | None] = {}
    for space, bad_before in before.items():
        others = {job: f"namespace {other}" for job, other in spaces.items() if other != space}
        records = host_records(faults, now, policy, others)
        found = bad_hosts(records, bad_before, policy)[:MOST]
        avoid = to_avoid(found, len(known), policy) if mode == "act" else []
        wanted[space] = _in_words(found, avoid) if found and mode != "off" else None
    return {key: wanted[key[0]] for key, had in told.items() if _differ(had, wanted[key[0]])}


def _in_words(found: Sequence[HostRecord], avoid: list[str]) -> BadHosts:
    """Return what jobs are told of bad hosts, some of which new nodes avoid."""
    then = f"new nodes avoid {', '.join(avoid)}" if avoid else "they are not avoided"
    reason = f"hosts have failed in several jobs: {', '.join(map(in_words, found))}; {then}"
    return BadHosts(hosts=[r.name for r in found], avoid=avoid, reason=reason[:4096])


def _differ(present: BadHosts | None, wanted: BadHosts | None) -> bool:
    """Return whether other hosts are bad, or something else follows; another reason is none."""
    if present is None or wanted is None:
        return present is not wanted
    return [set(present.hosts), set(present.avoid)] != [set(wanted.hosts), set(wanted.avoid)]


def _runs_here(job: Obj) -> bool:
    return (job.get("spec") or {}).get("managedBy") in (None, names.MANAGED_BY)


def _faults(training: Mapping[str, Obj]) -> Iterable[HostFault]:
    """Yield the faults in the status of a job; those of another form are left out."""
    for fault in training.get("hostFaults") or ():
        try:
            found = HostFault.model_validate(fault)
        except ValidationError:
            continue
        if _is_name(found.host):
            yield found


def _is_name(host: object) -> bool:
    """Return whether this may be the name of a Node: Pods with another one would be refused."""
    return isinstance(host, str) and len(host) <= 253 and bool(_HOST.fullmatch(host))


def _bad_hosts(status: Obj) -> BadHosts | None:
    """Return the bad hosts in the status of a job; None if there are none of this form."""
    try:
        return BadHosts.model_validate(status.get("badHosts"))
    except ValidationError:
        return None
