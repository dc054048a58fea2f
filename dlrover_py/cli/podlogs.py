"""Shows what Pods have written, and follows them while their job runs."""

import asyncio
import contextlib
import re
import sys
from dataclasses import dataclass

from dlrover_py.cli.logs import LogWish
from dlrover_py.kube import (
    PODS,
    Gone,
    Invalid,
    Kube,
    KubeError,
    Listed,
    NotFound,
    Obj,
)
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.names import MAIN_CONTAINER, NodeId, id_key
from dlrover_py.protocol.status import JobStatus, NodePhase

AGAIN_S = 0.5
"""Before a log whose line broke is asked for again."""
LAST_S = 10.0
"""For logs to come to their end once the job has ended."""
_AGENT = re.compile(rb'^\{"at": "[^"]*", "level": "[^"]*", "event": "[^"]*", "program": ')
"""A line of the agent's own, among those of its workers (dlrover_py/telemetry.py)."""


@dataclass(frozen=True, slots=True)
class _Pod:
    """What is needed of a Pod to read its log."""

    uid: str
    name: str
    owner: str
    """Uid of the job that it belongs to; empty for the master's, which its Deployment owns."""
    label: str
    """Of its lines: the node's id, or ``master``."""
    container: str
    begun: bool
    ended: bool

    @classmethod
    def view(cls, job: str, obj: Obj) -> "_Pod":
        meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
        is_master = (meta.get("labels") or {}).get(names.LABEL_ROLE) == names.ROLE_MASTER
        containers = [c.get("name", "") for c in spec.get("containers") or []]
        container = MAIN_CONTAINER if MAIN_CONTAINER in containers else (containers or [""])[0]
        owners = meta.get("ownerReferences") or []
        ended = status.get("phase") in ("Succeeded", "Failed")
        state: Obj = {}
        for found in status.get("containerStatuses") or []:
            if found.get("name") == container:
                state = found.get("state") or {}
        return cls(
            uid=meta.get("uid", ""),
            name=meta["name"],
            owner=next((o["uid"] for o in owners if o.get("kind") == names.KIND), ""),
            label="master" if is_master else meta["name"].removeprefix(f"{job}-"),
            container=container,
            begun=ended or "running" in state or "terminated" in state,
            ended=ended or "terminated" in state,
        )


class PodLogs:
    """The logs of a job's Pods."""

    def __init__(self, kube: Kube, job: Obj, wish: LogWish, only: str | None) -> None:
        """Remember what is wished: of the node ``only``, or of all."""
        meta = job["metadata"]
        self._kube, self._job, self._namespace = kube, meta["name"], meta["namespace"]
        self._uid = meta["uid"]
        self._wish, self._only = wish, only
        self._pods: dict[str, _Pod] = {}
        self._left_out: set[str] = set()
        self._following: dict[str, asyncio.Task[None]] = {}
        self._labelled = only is None

    async def print_all(self, *, ended: bool) -> None:
        """Print what there is, Pod by Pod.

        Raises:
            ConfigError: there is no such node.
        """
        pods = self._chosen(await self._list(), ended=ended)
        self._labelled = len(pods) > 1
        for pod in pods:
            await self._print(pod, follow=False)

    async def follow(self, *, ended: bool) -> None:
        """Print what there is and what comes, of all Pods at once; it does not end by itself."""
        selector = f"{names.LABEL_JOB}={self._job}"
        changes = self._kube.watch(
            PODS,
            self._namespace,
            labels=selector,
            view=lambda obj: _Pod.view(self._job, obj),
            on_trouble=_give_up,
        )
        first = True
        async with contextlib.aclosing(changes):
            async for change in changes:
                if isinstance(change, Listed):
                    if first:
                        chosen = {p.uid for p in self._chosen(change.items, ended=ended)}
                        self._left_out = {p.uid for p in change.items if p.ended} - chosen
                        first = False
                    for pod in change.items:
                        self._start(pod)
                elif not isinstance(change, Gone):
                    self._start(change.item)

    async def finish(self) -> None:
        """Print the rest, now that the job has ended, of Pods that have come last, too."""
        with contextlib.suppress(KubeError):
            for pod in await self._list():
                self._start(pod)
        if self._following:
            _, late = await asyncio.wait(self._following.values(), timeout=LAST_S)
            for task in late:
                task.cancel()

    async def _list(self) -> list[_Pod]:
        selector = f"{names.LABEL_JOB}={self._job}"
        found = await self._kube.list(PODS, self._namespace, labels=selector)
        return [_Pod.view(self._job, obj) for obj in found]

    def _chosen(self, pods: list[_Pod], *, ended: bool) -> list[_Pod]:
        """Those whose logs are there to be shown now."""
        fitting = sorted((p for p in pods if self._fits(p)), key=lambda p: id_key(NodeId(p.label)))
        if self._only is not None and not fitting:
            there = ", ".join(sorted(p.label for p in pods if p.label != "master")) or "none"
            raise ConfigError(f"node {self._only} has no Pod; these have: {there}")
        if self._only is not None or self._wish.previous or ended:
            return fitting
        living = [p for p in fitting if not p.ended]
        if not living:
            hint = "; see those that have ended with --previous" if fitting else ""
            print(f"dlrover: no Pod of {self._job} runs{hint}", file=sys.stderr, flush=True)
        return living

    def _fits(self, pod: _Pod) -> bool:
        if pod.label == "master":
            return self._wish.agents and self._only is None
        return pod.owner == self._uid and self._only in (None, pod.label)

    def _start(self, pod: _Pod) -> None:
        """Follow a Pod from when its container runs."""
        self._pods[pod.uid] = pod
        if pod.uid in self._left_out or pod.uid in self._following:
            return
        if pod.begun and self._fits(pod):
            self._following[pod.uid] = asyncio.create_task(self._print(pod, follow=True))

    async def _print(self, pod: _Pod, *, follow: bool) -> None:
        """One log to its end, over lines that break; a log that is gone is no matter."""
        last = ""
        while True:
            over = not follow or self._pods[pod.uid].ended
            try:
                lines = self._kube.log_lines(
                    pod.name, self._namespace, container=pod.container, follow=follow, since=last
                )
                async with contextlib.aclosing(lines):
                    async for stamp, line in lines:
                        last = stamp
                        self._write(pod, line)
            except (NotFound, Invalid):  # deleted, or its container has not started
                over = True
            except KubeError as error:
                if not follow or not isinstance(error, TransientError):
                    raise
                over = False
            finally:
                sys.stdout.buffer.flush()
            if over:
                return
            await asyncio.sleep(AGAIN_S)

    def _write(self, pod: _Pod, line: bytes) -> None:
        if pod.label != "master" and self._wish.agents != bool(_AGENT.match(line)):
            return
        origin = f"[{pod.label}] ".encode() if self._labelled else b""
        sys.stdout.buffer.write(origin + line + b"\n")
        if self._wish.follow:
            sys.stdout.buffer.flush()


def node_of_rank(status: JobStatus | None, rank: int) -> tuple[str, int]:
    """The node that has this global rank, and how many workers it has.

    Raises:
        ConfigError: nobody has, as far as can be seen.
    """
    members = [
        n
        for n in (status.nodes if status is not None else [])
        if n.node_rank is not None and n.phase is not NodePhase.GONE
    ]
    first = 0
    for place, node in enumerate(sorted(members, key=lambda n: n.node_rank or 0)):
        if node.node_rank != place:
            break  # the status shows only some of the nodes
        if rank < first + node.nproc:
            return node.id, node.nproc
        first += node.nproc
    raise ConfigError(
        f"rank {rank}: the status shows the nodes of {first} ranks; name a node with --node"
    )


def _give_up(error: KubeError | None) -> None:
    """A person has to help, or the server will be there again."""
    if error is not None and not isinstance(error, TransientError):
        raise error
