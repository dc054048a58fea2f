"""Labels of hosts on the Pods of workers, so that masters know where their nodes are.

A master may read Pods of its namespace only. The API server copies the label of a host's zone to
its Pods by itself, from Kubernetes 1.35 on. The operator does the same with other labels.
"""

import asyncio
import contextlib
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

log = logging.getLogger("operator")

RETRY = Backoff(first_s=1.0, most_s=300.0, jitter=0.3)
"""First and longest delay in seconds before a refused write of one Pod is tried again."""
PAUSE = Backoff(first_s=1.0, most_s=60.0, jitter=0.3)
"""First and longest delay in seconds before any write, while the server refuses each of them."""
REFUSES_EACH = (0, 401, 429)
"""Status codes after which the next write would end in the same way; 0: there is no answer."""
AFTER_S = 0.5
"""Seconds after a change until labels are copied, with all changes in between."""
AT_ONCE = 8
"""Largest number of writes at the same time."""
PASS_S = 5.0
"""Seconds after which further writes wait for a new look at what is due."""


class LabelledPod(NamedTuple):
    """The view of a worker's Pod."""

    uid: str
    host: str
    """Name of its host; empty if it has none, has ended, or no ElasticJob owns it."""
    labels: Mapping[str, str]
    """Labels of the Pod that are copied from hosts."""

    @classmethod
    def of(cls, obj: Obj, labels: Iterable[str]) -> Self:
        """Return the view of an object."""
        meta = obj["metadata"]
        over = (obj.get("status") or {}).get("phase") in ("Succeeded", "Failed")
        host = (obj.get("spec") or {}).get("nodeName") or ""
        return cls(meta["uid"], host if owner(meta) and not over else "", _only(obj, labels))


class Write(NamedTuple):
    """Labels that a Pod lacks."""

    key: Key
    uid: str
    labels: Mapping[str, str]


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
        self._refused: dict[str, tuple[int, float]] = {}
        """Number of refusals in a row, and time of the next try, by the uid of a Pod."""
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
        """Write labels of hosts to Pods after each change of a host or Pod, until canceled.

        What the API server has refused is written again, after pauses that grow.
        """
        pauses = 0
        while True:
            retry_at = min((at for _, at in self._refused.values()), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(retry_at):
                    await self._changed.wait()
            await asyncio.sleep(PAUSE.delay_s(pauses - 1) if pauses else AFTER_S)
            self._changed.clear()
            due = self._due()
            known = set(self._refused)
            async with asyncio.TaskGroup() as tasks:
                writers = [tasks.create_task(self._write(due)) for _ in range(AT_ONCE)]
            answers = [answer for writer in writers for answer in writer.result()]
            refusals = [answer for answer in answers if answer is not None]
            if self._refused.keys() - known and not pauses:
                fields = {"why": str(refusals[0]), "pods": len(self._refused)}
                log.warning("host_labels_not_copied", extra=fields)
            stopped = any(refusal.status in REFUSES_EACH for refusal in refusals)
            pauses = (1 if None in answers else pauses + 1) if stopped else 0
            if due or stopped:
                self._changed.set()

    def _due(self) -> list[Write]:
        """Return what to write now; the Pods that were refused least often are the last ones."""
        hosts = {name: labels for (_, name), labels in self._views.items(NODES)}
        lacking = [
            Write(key, pod.uid, labels)
            for key, pod in self._views.items(PODS)
            if (labels := missing(pod, hosts))
        ]
        self._refused = {w.uid: self._refused[w.uid] for w in lacking if w.uid in self._refused}
        now, never = asyncio.get_running_loop().time(), (0, 0.0)
        due = [w for w in lacking if self._refused.get(w.uid, never)[1] <= now]
        return sorted(due, key=lambda w: self._refused.get(w.uid, never), reverse=True)

    async def _write(self, due: list[Write]) -> list[KubeError | None]:
        """Take writes from the end of the list, one after the other, for a few seconds.

        The list is cleared if the server refuses each write.

        Returns:
            The answers; None for a write that was done, or whose Pod is gone.
        """
        now = asyncio.get_running_loop().time
        until, answers = now() + PASS_S, list[KubeError | None]()
        while due and now() < until:
            (namespace, name), uid, labels = due.pop()
            patch = {"metadata": {"uid": uid, "labels": labels}}
            answer = None
            try:
                await self._api.patch(PODS, name, patch, namespace)
            except (NotFoundError, ConflictError):
                pass  # it has gone meanwhile, and another one may have its name
            except KubeError as error:
                answer = error
                times, _ = self._refused.get(uid, (0, 0.0))
                self._refused[uid] = times + 1, now() + RETRY.delay_s(times)
                if error.status in REFUSES_EACH:
                    due.clear()
            else:
                self._refused.pop(uid, None)
            answers.append(answer)
        return answers


def _only(obj: Obj, labels: Iterable[str]) -> dict[str, str]:
    """Return those of an object's labels that are among these."""
    found = obj["metadata"].get("labels") or {}
    return {label: found[label] for label in labels if found.get(label)}
