"""Labels of hosts on the Pods of workers, so that masters know where their nodes are.

A master may read Pods of its namespace only. The API server copies the label of a host's zone to
its Pods by itself, from Kubernetes 1.35 on. The operator does the same with other labels.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Self

from dlrover_operator.observed import Key, Obj, owner
from dlrover_operator.sharing import WORKERS
from dlrover_operator.views import Views
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import ConflictError, KubeError, NotFoundError
from dlrover_py.kubernetes.kinds import NODES, PODS, Kind
from dlrover_py.pacing import Backoff
from dlrover_py.protocol.errors import TransientError

log = logging.getLogger("operator")

RETRY = Backoff(first_s=1.0, most_s=60.0, jitter=0.3)
"""First and longest delay in seconds before a retry after a failed write."""
AFTER_S = 0.5
"""Seconds after a change until labels are copied, with all changes in between."""
MOST_REFUSED = 100
"""Number of refused writes after which the others wait for the retry."""


class LabelledPod(NamedTuple):
    """The view of a worker's Pod."""

    uid: str
    host: str
    """Name of its host; empty if it has none, has ended, or no ElasticJob owns it."""
    labels: Mapping[str, str]
    """Those of its labels that are copied from hosts."""

    @classmethod
    def of(cls, obj: Obj, labels: Iterable[str]) -> Self:
        """Return the view of an object."""
        meta = obj["metadata"]
        over = (obj.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        host = (obj.get("spec") or {}).get("nodeName") or ""
        return cls(meta["uid"], host if owner(meta) and not over else "", _only(obj, labels))


def missing(pod: LabelledPod, hosts: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the labels of a Pod's host that the Pod lacks, or has with another value."""
    wanted = hosts.get(pod.host, {})
    return {label: value for label, value in wanted.items() if pod.labels.get(label) != value}


class HostLabels:
    """Copies labels of hosts to the Pods of workers on them."""

    def __init__(
        self,
        api: KubeClient,
        labels: tuple[str, ...],
        scopes: tuple[str, ...],
        failed: Callable[[Kind], None],
    ) -> None:
        """Observe nothing yet; :meth:`follow` begins.

        Args:
            api: client of the API server.
            labels: the labels to copy; without any, nothing is observed.
            scopes: namespaces of the jobs; an empty name for all of them.
            failed: called with the kind of objects at each failure of a watch.
        """
        self._api, self._labels, self._scopes = api, labels, scopes
        self._changed = asyncio.Event()
        self._views = Views(api, changed=self._changed.set, failed=failed)

    async def follow(self) -> None:
        """Copy until the task is canceled. Errors of the server do not end it."""
        labels = self._labels
        if not labels:
            return
        async with asyncio.TaskGroup() as tasks:
            for scope in self._scopes:
                tasks.create_task(
                    self._views.follow(
                        PODS, scope, WORKERS, lambda obj: LabelledPod.of(obj, labels)
                    )
                )
            # A host without any of the labels is not kept.
            tasks.create_task(
                self._views.follow(NODES, "", "", lambda obj: _only(obj, labels) or None)
            )
            tasks.create_task(self._copy())

    async def _copy(self) -> None:
        """Write labels after each change, one Pod after the other, indefinitely."""
        failures = 0
        while True:
            await self._changed.wait()
            await asyncio.sleep(RETRY.delay_s(failures - 1) if failures else AFTER_S)
            self._changed.clear()
            hosts = {name: labels for (_, name), labels in self._views.items(NODES)}
            refused: list[KubeError] = []
            for key, pod in list(self._views.items(PODS)):
                labels = missing(pod, hosts)
                failure = await self._write(key, pod.uid, labels) if labels else None
                if failure is not None:
                    refused.append(failure)
                    if isinstance(failure, TransientError) or len(refused) == MOST_REFUSED:
                        break  # the next call would end in the same way
            if refused and not failures:
                log.warning("host_labels_not_copied", extra={"why": str(refused[0])})
            if refused:
                self._changed.set()
            failures = failures + 1 if refused else 0

    async def _write(self, key: Key, uid: str, labels: Mapping[str, str]) -> KubeError | None:
        """Write labels of one Pod, unless it is gone; return the error if the server refuses."""
        namespace, name = key
        patch = {"metadata": {"uid": uid, "labels": labels}}
        try:
            await self._api.patch(PODS, name, patch, namespace)
        except (NotFoundError, ConflictError):
            pass  # it has gone meanwhile, and another one may have its name
        except KubeError as error:
            return error
        return None


def _only(obj: Obj, labels: Iterable[str]) -> dict[str, str]:
    """Return those of an object's labels that are among these."""
    found = obj["metadata"].get("labels") or {}
    return {label: found[label] for label in labels if found.get(label)}
