"""The PodGroups that the operator observes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from dlrover_operator.gang import gang_of
from dlrover_operator.observed import Gang, Obj, PodGroup
from dlrover_operator.views import Views
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import COSCHEDULING_GROUPS, VOLCANO_GROUPS, Kind


class Gangs:
    """The PodGroups of all jobs, of each kind that is served."""

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
            changed: called after each change of a group.
            failed: called with the kind of objects at each failure of a watch.
        """
        self._scopes = scopes
        self._views = Views(api, changed=changed, failed=failed)

    async def follow(self) -> None:
        """Observe until the task is canceled. Errors of the server do not end it."""
        async with asyncio.TaskGroup() as tasks:
            for kind in (VOLCANO_GROUPS, COSCHEDULING_GROUPS):
                for scope in self._scopes:
                    tasks.create_task(self._views.follow(kind, scope, "", PodGroup.of))

    def of(self, job: Obj) -> Gang | None:
        """Return the group of a job, as it is observed.

        The result is None if the template names no group, or nothing is known of the groups yet.
        """
        gang = gang_of(job)
        if gang is None:
            return None
        namespace = job["metadata"]["namespace"]
        refusals = self._views.refusals
        missing = refusals.get((gang.kind, ""), "") or refusals.get((gang.kind, namespace), "")
        if not missing and not self._views.has_listed(gang.kind, len(self._scopes)):
            return None
        key = namespace, gang.name
        group = next((g for k, g in self._views.items(gang.kind) if k == key), None)
        return replace(gang, group=group, missing=missing)
