"""What the operator observes, beside jobs, to share hosts among them: hosts and workers' Pods."""

import asyncio
import bisect
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from dlrover_operator.allotment import HeldPod, Host, SharedHosts, decide, hold, reclaimed
from dlrover_operator.observed import Key, Obj
from dlrover_operator.views import Views
from dlrover_py.allocator import HORIZON_S
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import NODES, PODS, Kind
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation

log = logging.getLogger("operator")

REASONS_S = 10.0
"""Seconds between two writes that change only reasons."""
REASONS = 50
"""Reasons that are written at once: a change of a number must not wait for many of them."""
WORKERS = f"{names.LABEL_JOB},{names.LABEL_ROLE}={names.ROLE_WORKER}"
"""Label selector of the Pods of all workers."""


class Sharing:
    """The hosts that jobs share, and the Pods on them."""

    def __init__(
        self,
        api: KubeClient,
        shared: SharedHosts,
        scopes: tuple[str, ...],
        *,
        changed: Callable[[], None],
        failed: Callable[[Kind], None],
    ) -> None:
        """Observe nothing yet; :meth:`follow` begins.

        Args:
            api: client of the API server.
            shared: the settings.
            scopes: namespaces of the jobs; an empty name for all of them.
            changed: called after each change of a host or a Pod.
            failed: called with the kind of objects at each failure of a watch.
        """
        self._shared, self._scopes = shared, scopes
        self._views = Views(api, changed=changed, failed=failed)
        self._reasons_at = 0.0
        self._reason_of: Key = ("", "")
        """The job whose reason was written last. The next portion begins after it."""
        self.again_s = math.inf
        """Seconds until the next decision if nothing changes."""
        self._watched: dict[str, str] = {}
        """Pools of the spot hosts with Pods of workers, by the names of the hosts."""
        self._reclaims: defaultdict[str, list[float]] = defaultdict(list)
        """Unix times of the reclaims of such hosts that still count, by pool. After a restart of
        the operator, none are known: spot pools are open again."""

    async def follow(self) -> None:
        """Observe hosts and Pods until the task is canceled. Errors of the server do not end it."""
        shared = self._shared
        async with asyncio.TaskGroup() as tasks:
            for scope in self._scopes:
                tasks.create_task(self._views.follow(PODS, scope, WORKERS, HeldPod.of))
            if not shared.capacity:

                def host(obj: Obj) -> Host:
                    return Host.of(obj, shared.slot, shared.pool_label)

                tasks.create_task(self._views.follow(NODES, "", shared.selector, host))

    @property
    def ready(self) -> bool:
        """Whether all hosts and Pods were listed once, or cannot be listed."""
        return self._views.settled == self._watches

    @property
    def _watches(self) -> int:
        """The number of lists that are observed."""
        return len(self._scopes) + (not self._shared.capacity)

    def writes(self, jobs: Iterable[Obj], now: float) -> dict[Key, NodeAllocation]:
        """Return the allocations to write now, by job.

        Those that change only the reason come after all others, in portions. If hosts or Pods
        cannot be listed, all numbers stay, and the reasons say so.

        Args:
            jobs: all ElasticJobs.
            now: Unix time.
        """
        self.again_s = math.inf
        # A right may be lost later: what was seen before is older with each decision.
        if self._views.listed < self._watches or self._views.refusals:
            why = next(iter(self._views.refusals.values()), "they were not listed yet")
            why = f"the hosts and Pods of the cluster cannot be observed: {why}"
            return self._in_portions(hold(jobs, now, why), now)
        hosts: list[Host] = list(self._views.all(NODES))
        pods: list[HeldPod] = list(self._views.all(PODS))
        if self._shared.pool_label:
            gone, self._watched = reclaimed(self._watched, hosts, pods, now)
            for pool in gone:
                recent = [at for at in self._reclaims[pool] if abs(now - at) < HORIZON_S]
                self._reclaims[pool] = [*recent, now]
                log.warning("spot_host_reclaimed", extra={"pool": pool})
        found = decide(jobs, hosts, pods, self._shared, now, self._reclaims)
        self.again_s = min((s for h in hosts if (s := h.lost_in(now))), default=math.inf)
        return self._in_portions(found, now)

    def _in_portions(
        self, found: dict[Key, NodeAllocation], now: float
    ) -> dict[Key, NodeAllocation]:
        """Return what is written now: all numbers, and then some of the changed reasons.

        Reasons may change faster than they are written. So the portions go round all jobs.

        Args:
            found: the allocations that must change.
            now: Unix time.
        """
        numbers = {key: one for key, one in found.items() if one.since == now}
        reasons = sorted(key for key in found if key not in numbers)
        early = abs(now - self._reasons_at) < REASONS_S
        if reasons and (early or len(reasons) > REASONS):
            self.again_s = min(self.again_s, REASONS_S)
        if early or not reasons:
            return numbers
        first = bisect.bisect_right(reasons, self._reason_of)
        chosen = [*reasons[first:], *reasons[:first]][:REASONS]
        self._reasons_at, self._reason_of = now, chosen[-1]
        return numbers | {key: found[key] for key in chosen}
