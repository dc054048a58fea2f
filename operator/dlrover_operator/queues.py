"""What the operator observes and writes for jobs in queues of Kueue."""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from dlrover_operator.kueue import (
    SEEN_S,
    Changes,
    Cluster,
    Flavor,
    QueuedPod,
    Workload,
    decide,
    queue_of,
)
from dlrover_operator.observed import Key, Obj, owner, uid_of
from dlrover_operator.views import Views
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.kubernetes.kinds import LOCAL_QUEUES, PODS, RESOURCE_FLAVORS, WORKLOADS, Kind
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import TransientError

log = logging.getLogger("operator")

WORKERS = f"{names.LABEL_JOB},{names.LABEL_ROLE}={names.ROLE_WORKER}"
"""Label selector of the Pods of all workers."""
REFUSED_S = 30.0
"""Seconds until a Workload that was refused is tried again."""
REASONS_S = 10.0
"""Seconds between two writes that change only reasons."""


class _Refusal(NamedTuple):
    """The refusal of a Workload of a job by the API server."""

    uid: str
    """Uid of the job."""
    why: str
    until: float
    """Unix time before which it is not tried again."""


class Queues:
    """The queues, the Workloads and the Pods of jobs."""

    def __init__(
        self,
        api: KubeClient,
        scopes: tuple[str, ...],
        *,
        changed: Callable[[], None],
        failed: Callable[[Kind], None],
    ) -> None:
        """Observe nothing yet; :meth:`follow` begins.

        Args:
            api: client of the API server.
            scopes: namespaces of the jobs; an empty name for all of them.
            changed: called after each change of an object.
            failed: called with the kind of objects at each failure of a watch.
        """
        self._api, self._scopes = api, scopes
        self._views = Views(api, changed=changed, failed=failed)
        self._refused: dict[Key, _Refusal] = {}
        """Refusals of Workloads, by job."""
        self._deleted: set[str] = set()
        """Uids of Workloads that were deleted, until that is observed."""
        self._pending: dict[Key, Changes] = {}
        """What :meth:`finish` has to do."""
        self._waits = False
        """Whether quota is to be given back soon."""
        self._reasons_at = 0.0
        """Unix time of the last write that changed only a reason."""

    async def follow(self) -> None:
        """Observe until the task is canceled. Errors of the server do not end it."""
        follow = self._views.follow
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(RESOURCE_FLAVORS, "", "", Flavor.of))
            for scope in self._scopes:
                tasks.create_task(follow(WORKLOADS, scope, names.LABEL_JOB, Workload.of))
                tasks.create_task(follow(LOCAL_QUEUES, scope, "", lambda _: True))
                tasks.create_task(follow(PODS, scope, WORKERS, QueuedPod.of))

    @property
    def ready(self) -> bool:
        """Whether all objects were listed once, or cannot be listed."""
        return self._views.settled == 1 + 3 * len(self._scopes)

    def manages(self, job: Obj) -> bool:
        """Return whether a job is in a queue, or still has Workloads."""
        own = uid_of(job)
        return bool(queue_of(job)) or any(w.owner == own for w in self._views.all(WORKLOADS))

    @property
    def again_s(self) -> float:
        """Seconds until the next decision if nothing changes."""
        return SEEN_S if self._waits else math.inf

    def writes(self, jobs: Iterable[Obj], now: float) -> dict[Key, NodeAllocation | None]:
        """Return the allocations to write now, by job.

        None stands for a job whose allocation stays, and whose Workloads change. For each job in
        the answer, :meth:`finish` must be called after the allocation was written. A change of the
        reason alone is left out if one was written less than ``REASONS_S`` seconds ago.

        Args:
            jobs: all ElasticJobs.
            now: Unix time.
        """
        workloads, pods = defaultdict(list), defaultdict(list)
        seen = list(self._views.all(WORKLOADS))
        self._deleted &= {workload.uid for workload in seen}
        for workload in seen:
            if workload.uid in self._deleted:  # its quota must not be counted twice
                workload = replace(workload, leaving=True, reserved=False, admitted=False)
            workloads[workload.owner].append(workload)
        for pod in self._views.all(PODS):
            pods[pod.job].append(pod)
        cluster = Cluster(
            queues=frozenset(key for key, _ in self._views.items(LOCAL_QUEUES)),
            flavors={name: f for (_, name), f in self._views.items(RESOURCE_FLAVORS)},
            missing=next((f"Kueue: {why}" for why in self._views.refusals.values()), ""),
        )
        found: dict[Key, Changes] = {}
        for job in jobs:
            meta = job["metadata"]
            key, uid, own = (meta["namespace"], meta["name"]), meta["uid"], uid_of(job)
            if queue_of(job) or own in workloads:
                refused = self._refused.get(key)
                if refused is not None and refused.uid != uid:
                    refused = None
                why = "" if refused is None else refused.why
                try:
                    one = decide(job, workloads[own], pods[own], cluster, now, why)
                except Exception:
                    # Whoever may write one job must not stop the decisions for all others.
                    log.exception("job_not_understood", extra={"job": "/".join(key)})
                    continue
                if refused is not None and now < refused.until:
                    one = replace(one, create=())
                found[key] = one
        self._refused = {key: one for key, one in self._refused.items() if key in found}
        self._waits = any(one.waits for one in found.values())
        early = abs(now - self._reasons_at) < REASONS_S
        for key, one in found.items():
            if one.allocation is not None and one.allocation.since != now:
                if early:
                    found[key] = replace(one, allocation=None)
                else:
                    self._reasons_at = now
        self._pending = {
            k: one for k, one in found.items() if one.create or one.delete or one.allocation
        }
        return {key: one.allocation for key, one in self._pending.items()}

    async def finish(self, key: Key) -> None:
        """Create and delete the Workloads of a job, as last decided.

        Args:
            key: namespace and name of the job.

        Raises:
            KubeError: the API server refuses a call, or does not answer. The refusal of a new
                Workload is no error: the job says so, and the Workload is tried again later.
        """
        changes = self._pending.pop(key)
        for one in changes.delete:
            await self._api.delete(WORKLOADS, one.name, key[0], uid=one.uid)
            self._deleted.add(one.uid)
        for obj in changes.create:
            try:
                await self._api.create_or_own(WORKLOADS, obj, owner(obj["metadata"]))
            except KubeError as error:
                if isinstance(error, TransientError):
                    raise
                why, until = f"its Workload is refused: {error}", self._api.wall() + REFUSED_S
                self._refused[key] = _Refusal(owner(obj["metadata"]), why, until)
                self._waits = True
                return
        if changes.create:
            self._refused.pop(key, None)
