"""The PodGroups that the operator observes."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from dlrover_operator.gang import POD_GROUPS, WORKLOADS, changed, gang_of, own_kind
from dlrover_operator.observed import Gang, Obj, PodGroup, owner
from dlrover_operator.views import Views
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import InvalidError, KubeError
from dlrover_py.kubernetes.kinds import COSCHEDULING_GROUPS, SCHEDULING, VOLCANO_GROUPS, Kind

log = logging.getLogger("operator")


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
        self._api, self._scopes, self._changed = api, scopes, changed
        self._views = Views(api, changed=changed, failed=failed)
        self._own: dict[Kind, tuple[Kind | None, str]] = {}
        """Kubernetes' own kinds with their versions, or why there are none; empty before it is
        known."""

    async def follow(self) -> None:
        """Observe until the task is canceled. Errors of the server do not end it."""
        async with asyncio.TaskGroup() as tasks:
            for kind in (VOLCANO_GROUPS, COSCHEDULING_GROUPS):
                for scope in self._scopes:
                    tasks.create_task(self._views.follow(kind, scope, "", PodGroup.of))
            tasks.create_task(self._follow_own())

    async def _follow_own(self) -> None:
        """Observe Kubernetes' own groups, in the version that the API server has of them."""
        while True:
            self._own = await self._asked()
            self._changed()
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._views.follow(kind, scope, "", view))
                    for wanted, view in ((POD_GROUPS, PodGroup.of), (WORKLOADS, PodGroup.parts))
                    if (kind := self._own[wanted][0]) is not None
                    for scope in self._scopes
                ]
                while True:
                    if await self._asked() != self._own:
                        break
                    await asyncio.sleep(self._api.times.denied_s)
                for task in running:
                    task.cancel()

    async def _asked(self) -> dict[Kind, tuple[Kind | None, str]]:
        """Ask the API server which kinds it has, until it answers."""
        while True:
            try:
                served = await self._api.served(SCHEDULING)
            except KubeError as error:
                log.warning("discovery_failed", extra={"group": SCHEDULING, "why": str(error)})
                await asyncio.sleep(self._api.times.denied_s)
            else:
                return {wanted: own_kind(wanted, served) for wanted in (POD_GROUPS, WORKLOADS)}

    def of(self, job: Obj) -> Gang | None:
        """Return the group of a job, as it is observed.

        The result is None if the template names no group, or nothing is known of the groups yet.
        """
        gang = gang_of(job)
        if gang is None:
            return None
        if gang.kind.group == SCHEDULING:
            if not self._own:
                return None
            kind, missing = self._own[gang.kind]
            if kind is None:
                return replace(gang, missing=missing)
            gang = replace(gang, kind=kind)
        namespace = job["metadata"]["namespace"]
        refusals = self._views.refusals
        missing = refusals.get((gang.kind, ""), "") or refusals.get((gang.kind, namespace), "")
        if not missing and not self._views.has_listed(gang.kind, len(self._scopes)):
            return None
        key = namespace, gang.name
        group = next((g for k, g in self._views.items(gang.kind) if k == key), None)
        if gang.part and group is not None:
            group = PodGroup.part(group, gang.part)
        return replace(gang, group=group, missing=missing)


async def keep(api: KubeClient, kind: Kind, obj: Obj, existing: str) -> None:
    """Create a PodGroup, or change its minimum.

    A group of Kubernetes' own that cannot be changed is deleted, which is what Kubernetes before
    1.37 needs. It is created again when its end is observed.

    Args:
        api: client of the API server.
        kind: kind of the group.
        obj: the group.
        existing: uid of the group that exists; empty if there is none.

    Raises:
        KubeError: the API server refuses a call, or does not answer.
    """
    name, namespace = obj["metadata"]["name"], obj["metadata"]["namespace"]
    if not existing:
        await api.create_or_own(kind, obj, owner(obj["metadata"]))
        return
    try:
        await api.patch(kind, name, {"spec": changed(obj["spec"])}, namespace)
    except InvalidError:
        if kind.group != SCHEDULING:
            raise
        await api.delete(kind, name, namespace, uid=existing)
