"""Views of objects that the operator watches beside the jobs and their masters."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dlrover_operator.observed import Key, Obj
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import ForbiddenError, KubeError, NotFoundError
from dlrover_py.kubernetes.kinds import Kind
from dlrover_py.kubernetes.watch import Changed, Gone, Listed

log = logging.getLogger("operator")


class _Item(NamedTuple):
    """An observed object: its namespace and name, and the part that is kept."""

    key: Key
    view: Any


class Views:
    """What is kept of objects, up to date while their watches run."""

    def __init__(
        self, api: KubeClient, *, changed: Callable[[], None], failed: Callable[[Kind], None]
    ) -> None:
        """Observe nothing yet; :meth:`follow` does.

        Args:
            api: client of the API server.
            changed: called after each change of an object.
            failed: called with the kind of objects at each failure of a watch.
        """
        self._api, self._changed, self._failed = api, changed, failed
        self._seen: dict[tuple[Kind, str], dict[Key, Any]] = {}
        """Objects by kind and scope; a kind is missing in a scope before its first list."""
        self.refusals: dict[tuple[Kind, str], str] = {}
        """Why a kind cannot be watched in a scope: it is not served, or a right is missing."""

    @property
    def listed(self) -> int:
        """Return the number of watches that have listed their objects at least once."""
        return len(self._seen)

    @property
    def settled(self) -> int:
        """Return the number of watches that have listed their objects, or were refused."""
        return len(self._seen.keys() | self.refusals.keys())

    def has_listed(self, kind: Kind, scopes: int) -> bool:
        """Return whether the objects of a kind were listed in so many scopes."""
        return sum(known == kind for known, _ in self._seen) == scopes

    def all(self, wanted: Kind) -> Iterator[Any]:
        """Yield the views of all objects of a kind."""
        for (kind, _), held in self._seen.items():
            if kind == wanted:
                yield from (view for view in held.values() if view is not None)

    def items(self, wanted: Kind) -> Iterator[tuple[Key, Any]]:
        """Yield namespace and name, and the view, of all objects of a kind."""
        for (kind, _), held in self._seen.items():
            if kind == wanted:
                yield from ((key, view) for key, view in held.items() if view is not None)

    async def follow(self, kind: Kind, scope: str, labels: str, view: Callable[[Obj], Any]) -> None:
        """Keep the view of one kind of objects up to date, until the task is canceled.

        Args:
            kind: the kind.
            scope: the namespace; empty for all.
            labels: label selector.
            view: returns what is kept of an object. An object for which it raises is left out.
        """

        def item(obj: Obj) -> _Item:
            meta = obj["metadata"]
            key = meta.get("namespace", ""), meta["name"]
            try:
                return _Item(key, view(obj))
            except Exception:
                # Whoever may write one object must not end the watch of all others.
                log.exception("object_not_understood", extra={"kind": kind.plural, "object": key})
                return _Item(key, None)

        def note_error(error: KubeError | None) -> None:
            fields = {"kind": kind.plural, "namespace": scope}
            if error is None:
                log.info("watch_recovered", extra=fields)
                if self.refusals.pop((kind, scope), None) is not None:
                    self._changed()
            elif not isinstance(error, NotFoundError):
                self._failed(kind)
                log.warning("watch_failed", extra=fields | {"why": str(error)})
            if isinstance(error, NotFoundError):
                self.refusals[kind, scope] = f"the API server does not serve {kind.api_version}"
                self._changed()
            elif isinstance(error, ForbiddenError):
                self.refusals[kind, scope] = str(error)
                self._changed()

        async with contextlib.aclosing(
            self._api.watch(kind, scope, labels=labels, view=item, on_error=note_error)
        ) as changes:
            async for change in changes:
                held = self._seen.get((kind, scope), {})
                self.refusals.pop((kind, scope), None)
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
