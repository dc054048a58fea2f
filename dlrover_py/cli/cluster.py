"""Jobs of a Kubernetes cluster, read and changed through its API server alone."""

import asyncio
import base64
import contextlib
import dataclasses
import json
import logging
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, NoReturn, Self, TypeVar

from rich.console import Console
from rich.live import Live

from dlrover_py.bad_hosts import HostPolicy, HostScores
from dlrover_py.cli import view
from dlrover_py.cli.evidence import snapshot_in_copies, with_copies
from dlrover_py.cli.jobfile import JobDocument
from dlrover_py.cli.logs import LogQuery
from dlrover_py.cli.podlogs import PodLogs, selected_node
from dlrover_py.cli.progress import ProgressPrinter, Style
from dlrover_py.cli.settings import Target
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    KubeError,
    NotFoundError,
    ThrottledError,
    UnauthenticatedError,
)
from dlrover_py.kubernetes.kinds import ELASTICJOBS, EVENTS, PODS, SECRETS, Kind, Obj
from dlrover_py.kubernetes.watch import Changed, ClientTimes, Gone, Listed
from dlrover_py.protocol import names
from dlrover_py.protocol.bundles import Bundle, unpacked
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    TransientError,
    UnreachableError,
)
from dlrover_py.protocol.job import ElasticJob, scaled_to
from dlrover_py.protocol.job_object import (
    left_out_notes,
    new_hosts,
    read_conditions,
    read_events,
    read_phase,
    read_status,
    waiting_pod,
)
from dlrover_py.protocol.job_view import LogTail
from dlrover_py.protocol.local import History
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.status import (
    Condition,
    EvidenceManifest,
    HostFault,
    JobPhase,
    date_time,
    unix_seconds,
)
from dlrover_py.protocol.words import counted

T = TypeVar("T")
CALL_S = 10.0
"""Deadline of a call to the API server, in seconds."""
APPLY_TRIES = 5
"""Number of attempts to write a job that others change at the same time."""
Rows = list[tuple[view.JobRow, Obj]]
"""Rows of a table of jobs, each with its ElasticJob object."""


class NoClusterError(ConfigError):
    """No cluster is configured, or the configuration cannot be used."""


class ClusterClient:
    """A connection to a cluster, as the user that the kubeconfig names. Use it with ``with``.

    Calls are made one after the other, on an event loop of the client's own. Ctrl-C interrupts
    them.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._warned: set[str] = set()
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        """Find the cluster and the credentials. The API server is not called yet.

        Raises:
            NoClusterError: no cluster is configured, or the configuration cannot be used.
        """
        # The library logs errors that it also raises; this command prints them itself.
        logging.getLogger("kubernetes").addHandler(logging.NullHandler())
        try:
            self.kube = self._runner.run(self._connect())
        except ConfigError as error:
            self._runner.close()
            raise NoClusterError(f"no cluster: {error}") from error
        self.kube.times = ClientTimes(call_s=CALL_S)
        self.kube.on_warning = self._warn
        return self

    def _warn(self, message: str) -> None:
        """Print a warning of the API server on standard error, once in the life of this client.

        A dry run and the call after it return the same warning.
        """
        if message not in self._warned:
            self._warned.add(message)
            print(view.plain(f"dlrover: {self.kube.host} warns: {message}"), file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.kube.close())
        self._runner.close()

    async def _connect(self) -> KubeClient:
        """Return a client for the target of the command line. The API server is not called yet.

        Raises:
            ConfigError: no cluster is configured, or the configuration cannot be used.
        """
        target = self._target
        return await KubeClient.connect(
            kubeconfig=target.kubeconfig, context=target.context or None
        )

    @property
    def namespace(self) -> str:
        """The namespace that is used if none is given."""
        return self._target.namespace or self.kube.namespace

    def place(self, namespace: str) -> str:
        """Return the description of a namespace of this cluster."""
        return f"in namespace {namespace} of {self.kube.host}"

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that makes calls. Errors are explained for users of this command.

        Raises:
            ConfigError: the API server refuses a call.
            UnauthenticatedError: the API server does not accept the credentials.
            UnreachableError: the API server does not answer, or has too many requests.
        """
        try:
            return self._runner.run(call)
        except KubeError as error:
            raise self.explained(error) from error

    def explained(self, error: KubeError) -> DLRoverError:
        """Return the error for a refusal of the API server, with what to do about it.

        Nothing is raised here.
        """
        host = self.kube.host
        if isinstance(error, UnauthenticatedError):
            return UnauthenticatedError(
                f"{host} refuses your credentials ({error}): log in again, or choose another "
                "--context"
            )
        if isinstance(error, ForbiddenError):
            return ConfigError(f"{host} denies you access: {error}")
        if isinstance(error, NotFoundError) and _kind_is_missing(error):
            return ConfigError(
                f"{host} has no resource type ElasticJob: install DLRover there "
                "(helm install dlrover charts/dlrover), or choose another --context"
            )
        if isinstance(error, (TransientError, ThrottledError)):
            text = str(error) if host in str(error) else f"{host}: {error}"
            return UnreachableError(
                f"the cluster does not answer: {text}; try again, or choose another --context"
            )
        if "strict decoding error" in str(error):
            return ConfigError(
                f"{error}: correct the name of the field, or update DLRover's CRD in the cluster"
            )
        return ConfigError(str(error))

    # --- One job ---

    def job(self, name: str | None) -> "ClusterJob":
        """Return the job with this name, or the only job of the namespace if no name is given.

        Raises:
            ConfigError: there is no such job, there are several and no name is given, or the
                API server refuses the call.
            DLRoverError: the API server does not answer, or does not accept the credentials.
        """
        place = self.place(self.namespace)
        if name is None:
            found = self.run(self.kube.list(ELASTICJOBS, self.namespace))
            if len(found) != 1:
                called = ", ".join(obj["metadata"]["name"] for obj in found[:10])
                text = f"{len(found)} jobs are {place}; name one of {called}"
                raise ConfigError(text if found else f"no job is {place}")
            return ClusterJob(self, found[0])
        try:
            return ClusterJob(self, self._get(name, self.namespace))
        except NotFoundError as error:
            raise ConfigError(f"job {name} is not {place}; see `dlrover job get -A`") from error

    def _get(self, name: str, namespace: str) -> Obj:
        """Return the ElasticJob object of a job.

        Raises:
            NotFoundError: the object itself is missing, but the server knows its kind.
            DLRoverError: the API server refuses the call for another reason, or does not answer.
        """
        try:
            return self._runner.run(self.kube.get(ELASTICJOBS, name, namespace))
        except KubeError as error:
            if isinstance(error, NotFoundError) and not _kind_is_missing(error):
                raise
            raise self.explained(error) from error

    # --- All jobs ---

    def rows(self, name: str | None, *, all_namespaces: bool) -> Rows:
        """Return the jobs of the namespace, or of all namespaces, or those with this name.

        Without a name, the result may be empty.

        Raises:
            ConfigError: there is no job with this name.
            DLRoverError: the API server refuses the call, or does not answer.
        """
        if name is not None and not all_namespaces:
            return [_row(self.job(name).obj)]
        fields = "" if name is None else f"metadata.name={name}"
        space = "" if all_namespaces else self.namespace
        found = self.run(self.kube.list(ELASTICJOBS, space, fields=fields))
        if name is not None and not found:
            host = self.kube.host
            raise ConfigError(f"job {name} is in no namespace of {host}; see `dlrover job get -A`")
        return [_row(obj) for obj in found]

    def hosts(self) -> list[dict[str, Any]]:
        """Return the hosts that have failed, the worst first, as JSON for scripts.

        The score is the one that counts for the jobs of the namespace. The faults of all jobs
        count, or only those of the namespace if the user may not list the jobs of others.

        Raises:
            DLRoverError: the API server refuses, or does not answer.
        """
        try:
            jobs = self._runner.run(self.kube.list(ELASTICJOBS))
        except ForbiddenError:
            jobs = self.run(self.kube.list(ELASTICJOBS, self.namespace))
        except KubeError as error:
            raise self.explained(error) from error
        faults: dict[str, dict[str, list[HostFault]]] = {}
        bad, avoided = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
        for obj in jobs:
            meta, status = obj["metadata"], read_status(obj)
            space = meta["namespace"]
            if status is not None:
                faults.setdefault(space, {})[meta["uid"]] = status.host_faults
            if status is None or not status.phase.ended:  # ended jobs keep what they were told
                told = (obj.get("status") or {}).get("badHosts") or {}
                for host in told.get("hosts") or ():
                    bad[host].add(space)
                for host in told.get("avoid") or ():
                    avoided[host].add(space)
        return [
            {
                "host": record.name,
                "score": round(record.score, 2),
                "faults": record.faults,
                "jobs": len(record.jobs),
                "newest": record.newest,
                "badFor": sorted(bad[record.name]),
                "avoidedFor": sorted(avoided[record.name]),
            }
            for record in HostScores(faults, self.kube.wall(), HostPolicy()).records(self.namespace)
        ]

    def watch_rows(
        self, name: str | None, *, all_namespaces: bool, show: Callable[[Rows], None]
    ) -> NoReturn:
        """Show the jobs, and then each job that changes, until the command is interrupted.

        A deleted job is shown once more, with the phase ``Deleted``. Transient errors after the
        first list are printed.

        Args:
            name: name of a job; None for all jobs.
            all_namespaces: all namespaces, not only the target's.
            show: called with the rows that are new or have changed.

        Raises:
            AssertionError: never; a watch has no end.
        """
        fields = "" if name is None else f"metadata.name={name}"
        space = "" if all_namespaces else self.namespace
        self.run(self._watch_rows(space, fields, show))
        raise AssertionError("a watch never ends")

    async def _watch_rows(self, space: str, fields: str, show: Callable[[Rows], None]) -> None:
        """Show the rows that are new or have changed, indefinitely.

        A row that is the same as before is not shown again. ``show`` also gets an empty first list.
        """
        known: dict[str, view.JobRow] = {}
        async for change in watching(self, ELASTICJOBS, space, fields=fields):
            if isinstance(change, Listed):
                fresh = [_row(obj) for obj in change.items]
            else:
                fresh = [_row(change.item, gone=isinstance(change, Gone))]
            news = []
            for row, obj in fresh:
                uid = obj["metadata"]["uid"]
                if known.get(uid) != row:
                    known[uid] = row
                    news.append((row, obj))
            if news or isinstance(change, Listed):
                show(news)

    # --- Submission ---

    def submit(
        self, documents: Sequence[JobDocument], *, apply: bool, dry_run: bool
    ) -> list[tuple[str, "ClusterJob"]]:
        """Create jobs, or change existing jobs into what their files say.

        Several jobs are first checked by a dry run of the server, so that nothing is changed if it
        refuses one. If a later call fails nevertheless, the jobs before it stay.

        Args:
            documents: the jobs.
            apply: change a job whose name is taken. Otherwise it is refused.
            dry_run: only have the server check the jobs.

        Returns:
            For each job the action (``submitted``, ``changed`` or ``unchanged``) and the job.

        Raises:
            ConfigError: a name is taken or occurs twice, a file and ``--namespace`` name different
                namespaces, or the server refuses a job.
            DLRoverError: the API server does not answer, or does not accept the credentials.
        """
        desired = [self._placed(document) for document in documents]
        named = [(obj["metadata"]["namespace"], obj["metadata"]["name"]) for obj in desired]
        for namespace, name in named:
            if named.count((namespace, name)) > 1:
                raise ConfigError(f"job {name} occurs twice in the files: remove one of them")
        if dry_run or len(desired) > 1:
            checked = [self._send(obj, apply=apply, dry_run=True) for obj in desired]
            if dry_run:
                return checked
        return [self._send(obj, apply=apply, dry_run=False) for obj in desired]

    def _placed(self, document: JobDocument) -> Obj:
        """Return the object of a document, with its namespace: the file's, else the target's.

        Raises:
            ConfigError: the file and ``--namespace`` name different namespaces.
        """
        written = document.written
        meta = dict(written["metadata"])
        given, own = self._target.namespace, meta.get("namespace")
        if given and own and given != own:
            raise ConfigError(
                f"job {meta['name']}: its file has namespace {own}, and --namespace is {given}: "
                "expected the same namespace"
            )
        meta["namespace"] = own or self.namespace
        return written | {"metadata": meta}

    def _send(self, desired: Obj, *, apply: bool, dry_run: bool) -> tuple[str, "ClusterJob"]:
        """Write one job; return what was done and the job.

        With ``dry_run`` the server only checks it.

        Raises:
            ConfigError: the job exists and ``apply`` is false, or the server refuses it.
            DLRoverError: the API server does not answer.
        """
        name, namespace = desired["metadata"]["name"], desired["metadata"]["namespace"]
        try:
            done, obj = self._runner.run(self._write(desired, apply=apply, dry_run=dry_run))
        except AlreadyExistsError as error:
            raise ConfigError(
                f"job {name} exists already {self.place(namespace)}, and nothing was changed: "
                f"update it with --apply, or delete it with `dlrover job delete {name} -n "
                f"{namespace}`"
            ) from error
        except KubeError as error:
            explained = self.explained(error)
            raise type(explained)(f"job {name}: {explained}") from error
        return done, ClusterJob(self, obj)

    async def _write(self, desired: Obj, *, apply: bool, dry_run: bool) -> tuple[str, Obj]:
        """Create an object, or with ``apply`` replace an existing one; return what was done.

        The word is ``submitted``, ``changed`` or ``unchanged``, also with ``dry_run``, with which
        the server only checks. Labels, annotations and ``suspend`` stay if the file does not set
        them. With ``apply``, the write is tried ``APPLY_TRIES`` times while others change the
        object.

        Raises:
            AlreadyExistsError: the object exists, and ``apply`` is false.
            ConflictError: others have changed the object during all tries.
            KubeError: the server refuses the object, or does not answer.
        """
        meta = desired["metadata"]
        for _ in range(APPLY_TRIES if apply else 1):
            with contextlib.suppress(*((AlreadyExistsError,) if apply else ())):
                made = await self.kube.create(ELASTICJOBS, desired, dry_run=dry_run, strict=True)
                return "submitted", made
            with contextlib.suppress(
                NotFoundError, ConflictError
            ):  # another client was faster: try again
                old = await self.kube.get(ELASTICJOBS, meta["name"], meta["namespace"])
                new = _applied(old, desired)
                obj = await self.kube.replace(ELASTICJOBS, new, dry_run=dry_run, strict=True)
                return "changed" if _content(obj) != _content(old) else "unchanged", obj
        raise ConflictError(f"{meta['name']}: other clients change it all the time; try again")


class ClusterJob:
    """One job of a cluster, in the state in which it was looked up."""

    def __init__(self, cluster: ClusterClient, obj: Obj) -> None:
        self.obj = obj
        self.name: str = obj["metadata"]["name"]
        self.namespace: str = obj["metadata"]["namespace"]
        self._cluster, self._kube = cluster, cluster.kube

    @property
    def where(self) -> str:  # noqa: D102
        return self._cluster.place(self.namespace)

    def load_view(self, *, with_pods: bool = False) -> view.JobView:  # noqa: D102
        notes: list[str] = []
        events = self._cluster.run(self._seen(EVENTS, notes, fields=self._fields()))
        pods: list[Obj] = []
        if with_pods:
            label = f"{names.LABEL_JOB}={self.name}"
            pods = self._cluster.run(self._seen(PODS, notes, labels=label))
        about: list[Obj] = []
        pod = "" if notes else waiting_pod(self.obj)  # events may be listed
        if pod:
            fields = f"involvedObject.kind=Pod,involvedObject.name={pod}"
            about = self._cluster.run(self._seen(EVENTS, notes, fields=fields))
        seen = job_view(self.obj, events, pods, where=self.where, notes=notes)
        since = unix_seconds(self.obj["metadata"].get("creationTimestamp")) or 0.0
        return dataclasses.replace(seen, new_hosts=new_hosts(pod, about, since))

    def _fields(self) -> str:
        """Return the field selector of the job's events."""
        uid = self.obj["metadata"]["uid"]
        return f"involvedObject.kind={names.KIND},involvedObject.uid={uid}"

    async def _seen(
        self, kind: Kind, notes: list[str], *, labels: str = "", fields: str = ""
    ) -> list[Obj]:
        """Return the objects of a kind in the job's namespace.

        If the user may not list them, add a note instead, and return an empty list.

        Args:
            kind: kind of the objects.
            notes: receives a note if the objects cannot be listed.
            labels: label selector.
            fields: field selector.

        Raises:
            KubeError: the server refuses the call for another reason, or does not answer.
        """
        try:
            return await self._kube.list(kind, self.namespace, labels=labels, fields=fields)
        except ForbiddenError as error:
            notes.append(f"{kind.plural} cannot be listed: {error}")
            return []

    def history(self) -> History:  # noqa: D102
        return History()  # the API server keeps no history; the report uses the events

    def show_logs(self, query: LogQuery) -> None:
        """Print the lines of the logs of the job's Pods that the query selects.

        With ``query.follow`` it returns when the job has ended or is deleted. Ctrl-C ends it
        without an error, and so does a pipe that has no reader any more.

        Raises:
            ConfigError: the query names a round, a rank that no node has, or a node without a Pod.
            DLRoverError: the API server refuses a call, or does not answer.
        """
        if query.round is not None:
            raise ConfigError(
                "--round works only on this machine: the log of a Pod does not separate rounds"
            )
        only, workers = selected_node(read_status(self.obj), query)
        if workers > 1:
            print(
                f"{only} has {workers} workers in one log; `elastic-run --tee 3` marks each "
                "line with its worker",
                file=sys.stderr,
            )
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            self._cluster.run(self._show_logs(query, only))

    def log_tail(self, query: LogQuery) -> LogTail:
        """Return the newest lines of the logs of the job's Pods that the query selects.

        Raises:
            ConfigError: the query names a rank that no node has, or another node than it names.
            DLRoverError: the API server refuses a call, or does not answer.
        """
        only, _ = selected_node(read_status(self.obj), query)
        return LogTail(self._cluster.run(PodLogs(self._kube, self.obj, query, only).tail()))

    async def _show_logs(self, query: LogQuery, only: str | None) -> None:
        """Print the logs of the job's Pods, and follow them if the query says so."""
        logs = PodLogs(self._kube, self.obj, query, only)
        if query.follow:
            await logs.follow(self._end, ended=_ended(self.obj))
        else:
            await logs.print_all(ended=_ended(self.obj))

    async def _end(self) -> None:
        """Wait until the job has ended or is deleted, without a limit.

        It returns immediately if that is so already.
        """
        async for obj in self._changes():
            if obj is None or _ended(obj):
                return

    async def _changes(self) -> AsyncIterator[Obj | None]:
        """Yield the object now and after each change; yield None once it is deleted, and end.

        A job of the same name with another uid counts as a deletion.
        """
        uid = self.obj["metadata"]["uid"]
        fields = f"metadata.name={self.name}"
        async for change in watching(self._cluster, ELASTICJOBS, self.namespace, fields=fields):
            seen = change.items if isinstance(change, Listed) else [change.item]
            mine = [obj for obj in seen if obj["metadata"]["uid"] == uid]
            if isinstance(change, Gone) or not mine:
                yield None
                return
            yield mine[0]

    # --- Changes ---

    def scale(self, replicas: int, role: str = names.ROLE_WORKER) -> str:
        """Change the desired number of nodes; return a sentence about the new state.

        Only the spec is changed; the job's master adds or removes nodes later.

        Args:
            replicas: the desired number.
            role: ``worker``, or ``ps`` for the servers of a parameter server.

        Raises:
            ConfigError: the job has ended, its spec cannot be used, or the number does not fit the
                limits of the job.
            DLRoverError: the API server refuses the change, or does not answer.
        """
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended; it cannot be scaled. Submit it again")
        ElasticJob.read(self.obj).scaled(replicas, role)
        if role == names.ROLE_WORKER:
            self._patch({"spec": {"replicas": replicas}}, "scale")
        else:
            self._patch({"spec": {"replicaSpecs": {role: {"replicas": replicas}}}})
        return f"{self.name} is scaled to {scaled_to(replicas, role)}"

    def suspend(self, on: bool) -> str:
        """Suspend the job, or resume it; return a sentence about the new state.

        Only ``spec.suspend`` is set; nodes end or start later.

        Raises:
            ConfigError: the job has ended, or it has servers, whose rows would be lost.
            DLRoverError: the API server refuses the change, or does not answer.
        """
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended; it can be neither suspended nor resumed")
        if on and _has_servers(self.obj):
            raise ConfigError(
                f"{self.name} cannot be suspended: its servers have all rows in memory, and cannot "
                "save them in a cluster yet; delete the job instead"
            )
        self._patch({"spec": {"suspend": on}})
        return f"{self.name} is {'suspended' if on else 'resumed'}"

    def restart(self, *, rolling: bool) -> str:
        """Request the replacement of all nodes; return a sentence about the new state.

        It does not wait for the replacement, which the job's master does.

        Raises:
            ConfigError: the job has ended.
            DLRoverError: the API server refuses the change, or does not answer.
        """
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended; it cannot be restarted. Submit it again")
        at = date_time(view.now())
        self._patch({"spec": {"restart": {"at": at, "rolling": rolling}}})
        return f"all nodes of {self.name} are being replaced"

    def take_snapshot(self, at: str) -> str:
        """Request a snapshot of all ranks; return a sentence about the request.

        Args:
            at: text that no earlier request had, such as the time.

        Raises:
            ConfigError: the job has ended.
            DLRoverError: the API server refuses the change, or does not answer.
        """
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended: no rank runs any more")
        self._patch({"spec": {"diagnosis": {"snapshot": at}}})
        return f"all ranks of {self.name} are being looked at"

    def store_checkpoint(self, at: str) -> str:
        """Request that the newest checkpoint is stored; return a sentence about the request.

        Args:
            at: text that no earlier request had, such as the time.

        Raises:
            ConfigError: the job has ended.
            DLRoverError: the API server refuses the change, or does not answer.
        """
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended: nothing is in memory any more")
        self._patch({"spec": {"storeCheckpoint": at}})
        return f"the newest checkpoint of {self.name} is being stored"

    def even_servers(self, at: str) -> str:
        """Request that the servers of a parameter server are evened; return a sentence about it.

        Args:
            at: text that no earlier request had, such as the time.

        Raises:
            ConfigError: the job has ended, or has no servers, or its spec cannot be used.
            DLRoverError: the API server refuses the change, or does not answer.
        """
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended: it has no servers any more")
        ElasticJob.read(self.obj).with_evened_servers(at)
        self._patch({"spec": {"rebalanceServers": at}})
        return f"the servers of {self.name} are being evened"

    def drain_server(self, server: str) -> str:
        """Delete the Pod of a server, which gives its rows away first; return a sentence about it.

        Args:
            server: id of the node.

        Raises:
            ConfigError: the job has no such Pod.
            DLRoverError: the API server refuses the deletion, or does not answer.
        """
        self._cluster.run(self._drain(server))
        return f"{server} was asked to leave"

    async def _drain(self, server: str) -> None:
        name = f"{self.name}-{server}"
        with contextlib.suppress(NotFoundError):
            pod = await self._kube.get(PODS, name, self.namespace)
            if _is_owned(pod, self.obj["metadata"]["uid"]):
                uid = pod["metadata"]["uid"]
                await self._kube.delete(PODS, name, self.namespace, uid=uid)
                return
        raise ConfigError(f"{self.name} has no Pod {name}: expected a server of `dlrover ps map`")

    def evidence(self) -> list[EvidenceManifest]:
        """Return the bundles in the job's Secret and in its bucket, the oldest first.

        If there are none, or the user may read neither, it is the newest snapshot of the
        status; empty if none was taken.
        """
        own = [one.manifest.model_copy(update={"folder": key}) for key, one in self._bundles()]
        if found := with_copies(own, self._spec(), self.obj["metadata"]["uid"]):
            return found
        status = self.load_view().status
        kept = None if status is None else status.diagnosis
        if status is None or kept is None:
            return []
        return [
            EvidenceManifest(
                number=kept.number,
                at=kept.at,
                round=status.round,
                reason=kept.reason,
                verdict=kept.verdict,
                lines=kept.lines,
                folder=kept.folder,
            )
        ]

    def node_snapshot(self, node: str) -> NodeSnapshot | None:
        """Return a node's part of the newest bundle that has one; None if there is none."""
        parts = [one.nodes[node] for _, one in self._bundles() if node in one.nodes]
        if parts:
            return parts[-1]
        return snapshot_in_copies(node, self._spec(), self.obj["metadata"]["uid"])

    def _spec(self) -> ElasticJob | None:
        """Return the job; None if this version does not understand it."""
        with contextlib.suppress(ConfigError):
            return ElasticJob.read(self.obj)
        return None

    def _bundles(self) -> list[tuple[str, Bundle]]:
        """Return the bundles of evidence with their keys in the Secret, the oldest first.

        It is empty if there is no such Secret of this job, or the user may not read it. Damaged
        bundles are left out.
        """
        name = names.evidence_of(self.name)
        secret = self._cluster.run(self._secret(name))
        if secret is None or not _is_owned(secret, self.obj["metadata"]["uid"]):
            return []
        found = []
        for key, content in sorted((secret.get("data") or {}).items()):
            with contextlib.suppress(ValueError):
                found.append((f"{name}/{key}", unpacked(base64.b64decode(content))))
        return found

    async def _secret(self, name: str) -> Obj | None:
        """Return a Secret; None if there is none, or the user may not read it."""
        with contextlib.suppress(ForbiddenError, NotFoundError):
            return await self._kube.get(SECRETS, name, self.namespace)
        return None

    def tune(
        self, *, micro_batch: int | None, loader_workers: int | None, auto: bool | None
    ) -> str:
        """Change the settings of data loaders; return a sentence about the new state.

        Only ``spec.tuning`` is set; workers change later, between two steps. What is None stays as
        it is. If all are None, ``spec.tuning`` is removed.

        Args:
            micro_batch: greatest number of samples that a worker computes at once.
            loader_workers: number of processes that read data for each worker.
            auto: whether the auto-tuner chooses what was never set.

        Raises:
            ConfigError: the job has ended, or its spec or a number cannot be used.
            DLRoverError: the API server refuses the change, or does not answer.
        """
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended; it cannot be tuned. Submit it again")
        job = ElasticJob.read(self.obj).tuned(
            micro_batch=micro_batch, loader_workers=loader_workers, auto=auto
        )
        tuning = job.spec.tuning
        fields = None if tuning is None else tuning.model_dump(by_alias=True, exclude_none=True)
        self._patch({"spec": {"tuning": fields}})
        return f"{self.name} is {job.tuning_in_words()}"

    def _patch(self, patch: Obj, subresource: str = "") -> None:
        """Change fields of the object on the server. ``self.obj`` stays as it was.

        Raises:
            DLRoverError: the API server refuses the change, or does not answer.
        """
        self._cluster.run(
            self._kube.patch(ELASTICJOBS, self.name, patch, self.namespace, subresource=subresource)
        )

    def stop(self, *, wait: bool) -> str:
        """Refuse to stop the job: a job in a cluster is deleted or suspended instead.

        Raises:
            ConfigError: in every case. The message names the two commands.
        """
        raise ConfigError(
            f"{self.name} is {self.where}: delete it, with its Pods and their logs, by "
            "`dlrover job delete`, or pause it by `dlrover job suspend`"
        )

    def delete(self, *, cascade: str, wait: bool, confirm: Callable[[str], None]) -> str:
        """Delete the ElasticJob; return a sentence about the new state.

        Without ``wait`` it returns when the API server has accepted the deletion.

        Args:
            cascade: what happens to its Pods: ``background`` (deleted after the ElasticJob),
                ``foreground`` (deleted before it) or ``orphan`` (not deleted).
            wait: return only when the ElasticJob is gone, and its Pods if they are deleted.
            confirm: called with what will be deleted. It raises an error if the user refuses.

        Raises:
            DLRoverError: ``confirm`` has raised it, the API server refuses a call, or it does not
                answer.
        """
        stay = cascade == "orphan"
        confirm(f"{self.name} {self.where}{'' if stay else ', with its Pods and their logs'}")
        self._cluster.run(self._delete(cascade, wait=wait))
        return f"{self.name} {'is' if wait else 'is being'} deleted"

    async def _delete(self, cascade: str, *, wait: bool) -> None:
        """Delete the object; with ``wait``, wait until its Pods are gone as well, without a limit.

        Pods that are orphaned are not waited for. An object of another uid is not deleted.
        """
        uid = self.obj["metadata"]["uid"]
        propagation = cascade.capitalize()
        await self._kube.delete(
            ELASTICJOBS, self.name, self.namespace, uid=uid, propagation=propagation
        )
        if not wait:
            return
        async for obj in self._changes():
            if obj is None:
                break
        if propagation == "Orphan":
            return
        label, left = names.nodes_of(self.name), set()
        async for change in watching(self._cluster, PODS, self.namespace, labels=label):
            if isinstance(change, Listed):
                left = {p["metadata"]["uid"] for p in change.items if _is_owned(p, uid)}
            elif isinstance(change, Gone):
                left.discard(change.item["metadata"]["uid"])
            if not left:
                return

    # --- Waiting ---

    def wait(self, style: Style) -> int:
        """Show the progress of the job until it ends; return the exit code of the command.

        It also returns if the operator refuses the spec in a way that only another spec resolves.
        There is no time limit. Ctrl-C leaves the job running.

        Args:
            style: form in which progress is shown.

        Returns:
            0 if the job succeeded; 1 if it failed or was stopped, or the operator refuses its spec.

        Raises:
            ConfigError: the job was deleted.
            DLRoverError: the API server refuses a call, or does not answer.
        """
        try:
            if style != "live":
                return self._cluster.run(self._wait(style, None))
            with Live(console=Console(), auto_refresh=False, transient=False) as display:
                return self._cluster.run(self._wait(style, display))
        except KeyboardInterrupt:
            print(f"{self.name} continues {self.where}", file=sys.stderr)
            raise

    async def _wait(self, style: Style, display: Live | None) -> int:
        """Show the progress of the job until it ends, on ``display`` if it is a terminal.

        The result is the exit code, as in :meth:`wait`.

        Raises:
            ConfigError: the job was deleted.
            KubeError: the watch cannot begin, or a person has to help.
        """
        now = asyncio.get_running_loop().time
        printer, status = ProgressPrinter(style, since=now()), None
        async for obj in self._changes():
            if obj is None:
                raise ConfigError(f"{self.name} was deleted")
            seen = job_view(obj, (), (), where=self.where)
            status = seen.status
            if display is not None:
                master = f"term {status.term}" if status is not None else seen.reason
                size = display.console.size
                hint = f"in another terminal: dlrover job describe|why|logs -f {self.name} -n "
                hint += f"{self.namespace}; Ctrl-C leaves the job running"
                drawn = view.live_display(self.name, status, master, hint=hint, size=size)
                display.update(drawn, refresh=True)
            else:
                printer.update(status, now())
            if seen.phase in _ENDS or _refused(seen.conditions):
                if display is None:
                    printer.finish(status)
                else:
                    display.update(view.final_display(self.name, status, size=display.console.size))
                    display.stop()  # what is printed later appears below the display
                if style != "json":
                    published = status is not None and status.phase.ended
                    for line in view.closing_lines(status) if status and published else ():
                        print(line, flush=True)
                    if not published:
                        print(view.plain(f"{self.name} is {seen.phase}: {seen.reason}"), flush=True)
                return 0 if seen.phase == JobPhase.SUCCEEDED else 1
        raise AssertionError("a watch never ends")


FINAL = (ConditionReason.UNSUPPORTED, ConditionReason.INVALID_SPEC)
"""Reasons of refusals that only another spec can resolve. Other obstacles may disappear."""
_ENDS = tuple(phase.value for phase in JobPhase if phase.ended)
"""Phases in which a job has ended."""


async def watching(
    cluster: ClusterClient, kind: Kind, namespace: str, *, labels: str = "", fields: str = ""
) -> AsyncIterator[Listed[Obj] | Changed[Obj] | Gone[Obj]]:
    """Yield the events of a watch without end, but raise errors that only a person can resolve.

    A watch whose first list fails raises as well. Later transient errors are printed on standard
    error, and the watch continues. An error that repeats is printed once.

    Args:
        cluster: the connection.
        kind: kind of the objects.
        namespace: empty for all namespaces.
        labels: label selector.
        fields: field selector.

    Raises:
        KubeError: the watch cannot begin, or a person has to help.
    """
    begun = False

    def on_error(error: KubeError | None) -> None:
        if error is None:
            return
        if not begun or not isinstance(error, TransientError):
            raise error
        print(view.plain(f"dlrover: {cluster.explained(error)}"), file=sys.stderr, flush=True)

    changes = cluster.kube.watch(
        kind, namespace, labels=labels, fields=fields, view=lambda o: o, on_error=on_error
    )
    async with contextlib.aclosing(changes):
        async for change in changes:
            begun = True
            yield change


# --- Views of an object (pure functions) ---


def job_view(
    obj: Obj, events: Sequence[Obj], pods: Sequence[Obj], *, where: str, notes: Sequence[str] = ()
) -> view.JobView:
    """Combine what the API server has about a job. No call is made here.

    Args:
        obj: the ElasticJob.
        events: the Kubernetes events about it.
        pods: the Pods that have its label.
        where: description of the cluster and the namespace.
        notes: what could not be read, and why.
    """
    status, conditions = read_status(obj), read_conditions(obj)
    phase, reason = read_phase(obj, status, conditions)
    uid = obj["metadata"]["uid"]
    descriptions = _pods(obj["metadata"]["name"], uid, pods)
    return view.JobView(
        name=obj["metadata"]["name"],
        header_lines=list(_header_lines(obj, where, pods)),
        phase=phase,
        reason=reason,
        status=status,
        conditions=conditions,
        events=read_events(status, events),
        document={"job": obj, "status": view.dump(status), "pods": descriptions},
        pods=descriptions,
        notes=[*left_out_notes(obj), *notes],
    )


def _header_lines(obj: Obj, where: str, pods: Sequence[Obj]) -> Iterator[str]:
    """Yield the lines about spec and place of a job.

    The master's Pod is named if it is in ``pods``.
    """
    meta, spec = obj["metadata"], obj.get("spec") or {}
    yield f"{meta['name']}  generation {meta.get('generation', 1)}"
    try:
        yield view.desired_line(ElasticJob.read(obj).worker)
    except ConfigError as error:
        yield f"desired   the spec is invalid: {str(error).splitlines()[0]}"
    created = unix_seconds(meta.get("creationTimestamp")) or 0.0
    yield f"where     {where}, created {view.short_age(created)} ago"
    if spec.get("suspend"):
        yield "suspend   yes: `dlrover job resume` continues the job"
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if labels.get(names.LABEL_ROLE) == names.ROLE_MASTER:
            yield f"master    Pod {_pod_description(pod)}"


def _pods(job: str, uid: str, pods: Sequence[Obj]) -> dict[str, str]:
    """Return a description of the Pod of each node.

    Pods that this job does not own are left out.
    """
    return {
        pod["metadata"]["name"].removeprefix(f"{job}-"): _pod_description(pod)
        for pod in pods
        if _is_owned(pod, uid)
    }


def _pod_description(pod: Obj) -> str:
    """Return a description of a Pod: phase, problems, host and restarts."""
    meta, status = pod["metadata"], pod.get("status") or {}
    text = f"{meta['name']} {status.get('phase', 'Pending')}"
    if meta.get("deletionTimestamp"):
        text += ", being deleted"
    containers = status.get("containerStatuses") or []
    for container in containers:
        state = container.get("state") or {}
        reason = (state.get("waiting") or state.get("terminated") or {}).get("reason")
        if reason not in (None, "Completed", "Error", "ContainerCreating"):
            text += f", {reason}"
    if node := (pod.get("spec") or {}).get("nodeName"):
        text += f" on {node}"
    restarts = sum(int(c.get("restartCount") or 0) for c in containers)
    return text + (f", {counted(restarts, 'restart')}" if restarts else "")


def _has_servers(obj: Obj) -> bool:
    """Return whether a job has servers of a parameter server; False if its spec is not usable."""
    try:
        return ElasticJob.read(obj).servers is not None
    except ConfigError:
        return False


def _row(obj: Obj, *, gone: bool = False) -> tuple[view.JobRow, Obj]:
    """Return the table row of a job, and the object. Values that the object lacks are empty."""
    meta, status = obj["metadata"], obj.get("status") or {}
    training = status.get("training") or {}
    summary = training.get("summary") or {}

    def text(value: object) -> str:
        return "" if value is None else str(value)

    row = view.JobRow(
        namespace=meta["namespace"],
        name=meta["name"],
        phase="Deleted" if gone else text(status.get("phase") or training.get("phase")),
        reason="" if gone else text(status.get("reason")),
        ready=text(summary.get("ready")),
        round=text(training.get("round")),
        progress=text(summary.get("progress")),
        restarts=text(summary.get("restarts")),
        goodput=text(summary.get("goodput")),
        age=view.short_age(unix_seconds(meta.get("creationTimestamp")) or 0.0),
    )
    return row, obj


def _applied(old: Obj, desired: Obj) -> Obj:
    """Return the existing object with the spec, labels and annotations of a file.

    Labels and annotations that the file lacks stay, and so does ``suspend``. All else in the spec
    is that of the file.
    """
    meta = dict(old["metadata"])
    for part in ("labels", "annotations"):
        if given := desired["metadata"].get(part):
            meta[part] = (meta.get(part) or {}) | given
    spec = dict(desired["spec"])
    if "suspend" in old["spec"]:
        spec.setdefault("suspend", old["spec"]["suspend"])
    return old | {"metadata": meta, "spec": spec}


def _content(obj: Obj) -> tuple[Any, ...]:
    """Return the parts of an object that a file can change, with the server's defaults."""
    meta = obj["metadata"]
    return obj["spec"], meta.get("labels") or {}, meta.get("annotations") or {}


def _ended(obj: Obj) -> bool:
    """Return whether a job had ended when this object was read."""
    status = obj.get("status") or {}
    return (status.get("phase") or (status.get("training") or {}).get("phase")) in _ENDS


def _refused(conditions: Sequence[Condition]) -> bool:
    """Return whether the operator refuses the job for good."""
    return any(
        c.type == ConditionType.ACCEPTED and c.status == "False" and c.reason in FINAL
        for c in conditions
    )


def _is_owned(obj: Obj, uid: str) -> bool:
    """Return whether an object is owned by the object with this uid."""
    return any(o.get("uid") == uid for o in obj["metadata"].get("ownerReferences") or ())


def _kind_is_missing(error: NotFoundError) -> bool:
    """Return whether the API server lacks the kind itself, not only the object."""
    text = str(error)
    return "404 page not found" in text or "could not find the requested resource" in text


def rows_as_json(rows: Rows) -> list[str]:
    """Return one JSON object for each job, for scripts.

    The status of a job is null if it has none, or has one that cannot be read.
    """
    return [
        json.dumps(
            {
                "namespace": row.namespace,
                "name": row.name,
                "phase": row.phase,
                "reason": row.reason,
                "status": view.dump(read_status(obj)),
            }
        )
        for row, obj in rows
    ]
