"""What the operator observes, beside jobs, to share hosts among them: hosts and workers' Pods."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from dlrover_operator.allotment import HeldPod, Host, Key, SharedHosts, decide
from dlrover_operator.observed import Obj
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.kubernetes.kinds import NODES, PODS, Kind
from dlrover_py.kubernetes.watch import Changed, Gone, Listed
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation

log = logging.getLogger("operator")

REASONS_S = 10.0
"""Seconds between two writes that change only reasons."""
WORKERS = f"{names.LABEL_JOB},{names.LABEL_ROLE}={names.ROLE_WORKER}"
"""Label selector of the Pods of all workers."""


class _Item(NamedTuple):
    """An observed object: its namespace and name, and the part that is kept."""

    key: Key
    view: Any


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
        self._api, self._shared, self._scopes = api, shared, scopes
        self._changed, self._failed = changed, failed
        self._seen: dict[tuple[Kind, str], dict[Key, Any]] = {}
        """Hosts and Pods by kind and scope; a kind is missing in a scope before its first list."""
        self._reasons_at = 0.0

    async def follow(self) -> None:
        """Observe hosts and Pods until the task is canceled. Errors of the server do not end it."""
        slot = self._shared.slot
        async with asyncio.TaskGroup() as tasks:
            for scope in self._scopes:
                tasks.create_task(self._watch(PODS, scope, WORKERS, HeldPod.of))
            if not self._shared.capacity:
                selector = self._shared.selector
                tasks.create_task(self._watch(NODES, "", selector, lambda obj: Host.of(obj, slot)))

    @property
    def ready(self) -> bool:
        """Whether all hosts and Pods were listed once."""
        return len(self._seen) == len(self._scopes) + (not self._shared.capacity)

    def writes(self, jobs: Iterable[Obj], now: float) -> dict[Key, NodeAllocation]:
        """Return the allocations to write now, by job.

        Those that change only the reason are left out, if some were written less than
        ``REASONS_S`` seconds ago.

        Args:
            jobs: all ElasticJobs.
            now: Unix time.
        """
        found = decide(jobs, self._views(NODES), self._views(PODS), self._shared, now)
        if abs(now - self._reasons_at) < REASONS_S:
            return {key: one for key, one in found.items() if one.since == now}
        if any(one.since != now for one in found.values()):
            self._reasons_at = now
        return found

    def _views(self, wanted: Kind) -> Iterator[Any]:
        """Yield the views of all objects of a kind."""
        for (kind, _), held in self._seen.items():
            if kind is wanted:
                yield from held.values()

    async def _watch(self, kind: Kind, scope: str, labels: str, view: Callable[[Obj], Any]) -> None:
        """Keep the view of one kind of objects up to date, indefinitely.

        Args:
            kind: the kind.
            scope: the namespace; empty for all.
            labels: label selector.
            view: returns what is kept of an object.
        """

        def item(obj: Obj) -> _Item:
            meta = obj["metadata"]
            return _Item((meta.get("namespace", ""), meta["name"]), view(obj))

        def note_error(error: KubeError | None) -> None:
            fields = {"kind": kind.plural, "namespace": scope}
            if error is None:
                log.info("watch_recovered", extra=fields)
            else:
                self._failed(kind)
                log.warning("watch_failed", extra=fields | {"why": str(error)})

        async with contextlib.aclosing(
            self._api.watch(kind, scope, labels=labels, view=item, on_error=note_error)
        ) as changes:
            async for change in changes:
                held = self._seen.get((kind, scope), {})
                match change:
                    case Listed(items):
                        self._seen[kind, scope] = dict(items)
                    case Changed(one):
                        if held.get(one.key) == one.view:
                            continue
                        held[one.key] = one.view
                    case Gone(one):
                        held.pop(one.key, None)
                self._changed()
