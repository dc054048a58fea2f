"""A printer of the logs of Pods, which can follow them while their job runs."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dlrover_py.cli.logs import TAIL_LINES, LogQuery, as_displayed, for_terminal
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import InvalidError, KubeError, NotFoundError
from dlrover_py.kubernetes.kinds import PODS, Obj
from dlrover_py.kubernetes.watch import Gone, Listed
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, TransientError
from dlrover_py.protocol.names import MAIN_CONTAINER, NodeId, id_key
from dlrover_py.protocol.status import JobStatus, NodePhase
from dlrover_py.protocol.words import counted

RETRY_S = 0.5
"""Seconds before a log whose connection broke is requested again."""
FINISH_S = 10.0
"""Seconds that logs get to reach their end once the job has ended."""
TAIL_PODS = 10
"""Greatest number of Pods whose newest lines are read at once."""
_AGENT = re.compile(rb'^\{"at": "[^"]*", "level": "[^"]*", "event": "[^"]*", "program": ')
"""The form of an agent's own log line, which appears among the lines of its workers
(dlrover_py/telemetry.py).
"""


@dataclass(frozen=True, slots=True)
class _Pod:
    """The parts of a Pod that are needed to read its log."""

    uid: str
    name: str
    owner: str
    """Uid of the job that owns the Pod; empty for the master's Pod, which belongs to its
    Deployment.
    """
    label: str
    """Prefix of its lines: the id of the node, or ``master``."""
    container: str
    started: bool
    """The container has started, so it has a log."""
    ended: bool
    """The container or the Pod has ended."""

    @classmethod
    def from_object(cls, job: str, obj: Obj) -> "_Pod":
        """Return these parts of a Pod object.

        The container is ``main``, or else the first one. Without a status it counts as not started.
        """
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
            started=ended or "running" in state or "terminated" in state,
            ended=ended or "terminated" in state,
        )


class PodLogs:
    """The logs of a job's Pods."""

    def __init__(self, kube: KubeClient, job: Obj, query: LogQuery, only_node: str | None) -> None:
        """Set up the printer; no log is read yet.

        Args:
            kube: client of the cluster.
            job: the ElasticJob.
            query: selection of the lines.
            only_node: id of the only node whose log is printed; None for all nodes.
        """
        meta = job["metadata"]
        self._kube, self._job, self._namespace = kube, meta["name"], meta["namespace"]
        self._uid = meta["uid"]
        self._query, self._only_node = query, only_node
        self._pods: dict[str, _Pod] = {}
        self._left_out: set[str] = set()
        self._following: dict[str, asyncio.Task[None]] = {}
        self._prefixed = only_node is None
        self._terminal = sys.stdout.isatty()

    async def print_all(self, *, ended: bool) -> None:
        """Print the present logs, Pod by Pod.

        Pods whose log does not exist are skipped. If no Pod runs, standard error says so.

        Args:
            ended: the job has ended, so the logs of ended Pods are printed, too.

        Raises:
            ConfigError: the only node to print has no Pod.
            KubeError: the API server refuses a call, or does not answer.
        """
        pods = self._selected_pods(await self._list(), ended=ended)
        self._prefixed = len(pods) > 1
        for pod in pods:
            await self._print(pod, follow=False)

    async def tail(self) -> list[str]:
        """Return the newest lines of the selected Pods that have started.

        Each line begins with the id of its node. There are at most ``TAIL_LINES`` lines of all Pods
        together. Only the first ``TAIL_PODS`` Pods are read: those that run come first. A Pod
        without a log, or whose log is gone, is left out.

        Raises:
            KubeError: the API server refuses a call, or does not answer.
        """
        pods = [pod for pod in await self._list() if pod.started and self._is_selected(pod)]
        pods.sort(key=lambda pod: (pod.ended, id_key(NodeId(pod.label))))
        found: list[str] = []
        for pod in pods[:TAIL_PODS]:
            lines = self._kube.log_lines(
                pod.name, self._namespace, container=pod.container, tail=TAIL_LINES
            )
            with contextlib.suppress(NotFoundError, InvalidError):
                async with contextlib.aclosing(lines):
                    async for _, line in lines:
                        if not _AGENT.match(line):
                            found.append(f"[{pod.label}] {as_displayed(line)}")
        return found[-TAIL_LINES:]

    async def follow(self, until: Callable[[], Awaitable[None]], *, ended: bool) -> None:
        """Print the logs of the selected Pods at the same time, and follow them to the job's end.

        After the end of the job, the logs have ``FINISH_S`` seconds to reach their end; the rest is
        lost. Transient errors are retried every ``RETRY_S`` seconds, without a limit.

        Args:
            until: called once; returns at the end of the job.
            ended: the job has ended, so the logs of ended Pods are printed, too.

        Raises:
            ConfigError: the only node to print has no Pod.
            KubeError: the watch of the Pods or a log fails in a way that only a person can resolve.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(tasks, ended=ended))
                await until()
                watch.cancel()
                await self._finish(tasks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _watch(self, tasks: asyncio.TaskGroup, *, ended: bool) -> None:
        """Follow the log of each Pod of the job that exists or appears, until the task is canceled.

        Args:
            tasks: The group in which the log of each Pod is followed.
            ended: Whether the query selects Pods that have ended before the first list too. Else
                these are left out.

        Raises:
            KubeError: The API server refuses, and a repetition cannot help.
        """
        selector = f"{names.LABEL_JOB}={self._job}"
        changes = self._kube.watch(
            PODS,
            self._namespace,
            labels=selector,
            view=lambda obj: _Pod.from_object(self._job, obj),
            on_error=_raise_if_permanent,
        )
        first = True
        async with contextlib.aclosing(changes):
            async for change in changes:
                if isinstance(change, Listed):
                    if first:
                        selected = {p.uid for p in self._selected_pods(change.items, ended=ended)}
                        self._left_out = {p.uid for p in change.items if p.ended} - selected
                        first = False
                    for pod in change.items:
                        self._start(tasks, pod)
                elif not isinstance(change, Gone):
                    self._start(tasks, change.item)

    async def _finish(self, tasks: asyncio.TaskGroup) -> None:
        """Print the rest of the logs after the end of the job, for ``FINISH_S`` seconds at most.

        This includes the logs of Pods that appeared last, if the API server lists them.
        """
        with contextlib.suppress(KubeError):
            for pod in await self._list():
                self._start(tasks, pod)
        if self._following:
            _, unfinished = await asyncio.wait(self._following.values(), timeout=FINISH_S)
            for task in unfinished:
                task.cancel()

    async def _list(self) -> list[_Pod]:
        """Return the Pods of the job."""
        selector = f"{names.LABEL_JOB}={self._job}"
        found = await self._kube.list(PODS, self._namespace, labels=selector)
        return [_Pod.from_object(self._job, obj) for obj in found]

    def _selected_pods(self, pods: list[_Pod], *, ended: bool) -> list[_Pod]:
        """Return the Pods whose logs are printed now, sorted by node.

        Ended Pods are left out, unless one node or ``--previous`` was given or the job has ended.
        If they are left out and no other Pod is there, standard error says so.

        Raises:
            ConfigError: the only node to print has no Pod.
        """
        selected = sorted(
            (p for p in pods if self._is_selected(p)), key=lambda p: id_key(NodeId(p.label))
        )
        if self._only_node is not None and not selected:
            with_pod = ", ".join(sorted(p.label for p in pods if p.label != "master")) or "none"
            raise ConfigError(f"node {self._only_node} has no Pod; nodes with a Pod: {with_pod}")
        if self._only_node is not None or self._query.previous or ended:
            return selected
        running = [p for p in selected if not p.ended]
        if not running:
            hint = "; see those that have ended with --previous" if selected else ""
            print(f"dlrover: no Pod of {self._job} runs{hint}", file=sys.stderr, flush=True)
        return running

    def _is_selected(self, pod: _Pod) -> bool:
        """Return whether the query selects a Pod."""
        if pod.label == "master":
            return self._query.agents and self._only_node is None
        return pod.owner == self._uid and self._only_node in (None, pod.label)

    def _start(self, tasks: asyncio.TaskGroup, pod: _Pod) -> None:
        """Start a task that follows the log of a Pod, once its container has started.

        Nothing is started for a Pod that is followed already, was left out, or is not selected.
        """
        self._pods[pod.uid] = pod
        if pod.uid in self._left_out or pod.uid in self._following:
            return
        if pod.started and self._is_selected(pod):
            self._following[pod.uid] = tasks.create_task(self._print(pod, follow=True))

    async def _print(self, pod: _Pod, *, follow: bool) -> None:
        """Print the log of one Pod; with ``follow`` until the Pod has ended.

        With ``follow`` a broken connection is made again as often as needed. The log of a Pod that
        is deleted, or whose container has not started, is skipped, also with ``follow``.

        Raises:
            KubeError: A call fails; with ``follow`` only if a repetition cannot help.
        """
        last = ""
        while True:
            at_end = not follow or self._pods[pod.uid].ended
            try:
                lines = self._kube.log_lines(
                    pod.name, self._namespace, container=pod.container, follow=follow, since=last
                )
                async with contextlib.aclosing(lines):
                    async for stamp, line in lines:
                        last = stamp
                        self._write(pod, line)
            except (
                NotFoundError,
                InvalidError,
            ):  # the Pod is deleted, or its container has not started
                at_end = True
            except KubeError as error:
                if not follow or not isinstance(error, TransientError):
                    raise
                at_end = False
            finally:
                sys.stdout.buffer.flush()
            if at_end:
                return
            await asyncio.sleep(RETRY_S)

    def _write(self, pod: _Pod, line: bytes) -> None:
        """Print a line if the query selects it; otherwise drop it.

        In the Pod of a node, the query selects either the lines of the agent or those of the
        workers. All lines of the master are printed.
        """
        if pod.label != "master" and self._query.agents != bool(_AGENT.match(line)):
            return
        origin = f"[{pod.label}] " if self._prefixed else ""
        text = for_terminal(origin, line) if self._terminal else origin.encode() + line
        sys.stdout.buffer.write(text + b"\n")
        if self._query.follow:
            sys.stdout.buffer.flush()


def node_of_rank(status: JobStatus | None, rank: int) -> tuple[str, int]:
    """Return the node that has this global rank, and its number of workers.

    Nodes that are gone do not count. A status that leaves out nodes knows only the first ranks.

    Raises:
        ConfigError: no node in the status has this rank.
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
        f"rank {rank}: the nodes in the status have {counted(first, 'rank')}; select a node with "
        "--node"
    )


def selected_node(status: JobStatus | None, query: LogQuery) -> tuple[str | None, int]:
    """Return the only node that a query selects, None for all, and its number of workers.

    The number is 0 if the query names no rank.

    Raises:
        ConfigError: no node in the status has the rank of the query, or another one than it names.
    """
    if query.rank is None:
        return query.node, 0
    node, workers = node_of_rank(status, query.rank)
    if query.node not in (None, node):
        raise ConfigError(
            f"rank {query.rank} is on node {node}, not on {query.node}: name the node or the rank"
        )
    return node, workers


def _raise_if_permanent(error: KubeError | None) -> None:
    """Raise an error that only a person can resolve; ignore a transient one."""
    if error is not None and not isinstance(error, TransientError):
        raise error
