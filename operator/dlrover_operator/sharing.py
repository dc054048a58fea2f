"""What the operator observes, beside jobs, to share hosts among them: hosts and workers' Pods."""

import asyncio
import math
from collections.abc import Callable, Iterable

from dlrover_operator.allotment import HeldPod, Host, SharedHosts, decide
from dlrover_operator.observed import Key, Obj
from dlrover_operator.views import Views
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import NODES, PODS, Kind
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation

REASONS_S = 10.0
"""Seconds between two writes that change only reasons."""
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

    again_s = math.inf
    """Seconds until the next decision if nothing changes."""

    async def follow(self) -> None:
        """Observe hosts and Pods until the task is canceled. Errors of the server do not end it."""
        slot = self._shared.slot
        async with asyncio.TaskGroup() as tasks:
            for scope in self._scopes:
                tasks.create_task(self._views.follow(PODS, scope, WORKERS, HeldPod.of))
            if not self._shared.capacity:
                selector = self._shared.selector
                tasks.create_task(
                    self._views.follow(NODES, "", selector, lambda obj: Host.of(obj, slot))
                )

    @property
    def ready(self) -> bool:
        """Whether all hosts and Pods were listed once."""
        return self._views.listed == len(self._scopes) + (not self._shared.capacity)

    def writes(self, jobs: Iterable[Obj], now: float) -> dict[Key, NodeAllocation]:
        """Return the allocations to write now, by job.

        Those that change only the reason are left out, if some were written less than
        ``REASONS_S`` seconds ago.

        Args:
            jobs: all ElasticJobs.
            now: Unix time.
        """
        found = decide(jobs, self._views.all(NODES), self._views.all(PODS), self._shared, now)
        if abs(now - self._reasons_at) < REASONS_S:
            return {key: one for key, one in found.items() if one.since == now}
        if any(one.since != now for one in found.values()):
            self._reasons_at = now
        return found
