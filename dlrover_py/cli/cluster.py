"""Jobs of a Kubernetes cluster, through its API server alone."""

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, Self, TypeVar

from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from dlrover_py.cli import view
from dlrover_py.cli.jobfile import Document
from dlrover_py.cli.logs import LogWish
from dlrover_py.cli.podlogs import PodLogs, node_of_rank
from dlrover_py.cli.screen import News, Style
from dlrover_py.cli.settings import Target
from dlrover_py.kube import (
    ELASTICJOBS,
    EVENTS,
    PODS,
    AlreadyExists,
    Changed,
    Conflict,
    Forbidden,
    Gone,
    Kind,
    Kube,
    KubeError,
    Listed,
    NotFound,
    Obj,
    Throttled,
    Times,
    Unauthenticated,
)
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    TransientError,
    Unreachable,
)
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import History
from dlrover_py.protocol.status import Condition, JobEvent, JobPhase, JobStatus, unix_seconds
from dlrover_py.protocol.words import counted

T = TypeVar("T")
CALL_S = 10.0
APPLY_TRIES = 5
Rows = list[tuple[view.Row, Obj]]


class NoCluster(ConfigError):
    """No cluster is configured, or the configuration cannot be used."""


class Cluster:
    """A cluster, as whoever the kubeconfig says; use it with ``with``.

    Calls are made one after the other on a loop of its own, which Ctrl-C interrupts.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._warned: set[str] = set()
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        # What the library would log is raised as well, and said in our words.
        logging.getLogger("kubernetes").addHandler(logging.NullHandler())
        try:
            self.kube = self._runner.run(self._connect())
        except ConfigError as error:
            self._runner.close()
            raise NoCluster(f"no cluster: {error}") from error
        self.kube.times = Times(call_s=CALL_S)
        self.kube.on_warning = self._warn
        return self

    def _warn(self, words: str) -> None:
        """Print what the API server warns of, once: a dry run and the call itself say the same."""
        if words not in self._warned:
            self._warned.add(words)
            print(f"dlrover: {self.kube.host} warns: {words}", file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        self._runner.run(self.kube.close())
        self._runner.close()

    async def _connect(self) -> Kube:
        target = self._target
        return await Kube.connect(kubeconfig=target.kubeconfig, context=target.context or None)

    @property
    def namespace(self) -> str:
        """The one that is meant where none is said."""
        return self._target.namespace or self.kube.namespace

    def place(self, namespace: str) -> str:
        """A namespace of this cluster, in words."""
        return f"in namespace {namespace} of {self.kube.host}"

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Make calls; errors are in words of this command."""
        try:
            return self._runner.run(call)
        except KubeError as error:
            raise self.explained(error) from error

    def explained(self, error: KubeError) -> DLRoverError:
        """A refusal of the API server, and what to do."""
        host = self.kube.host
        if isinstance(error, Unauthenticated):
            return Unauthenticated(
                f"{host} does not know you ({error}): log in again, or choose another --context"
            )
        if isinstance(error, Forbidden):
            return ConfigError(f"{host} does not allow it: {error}")
        if isinstance(error, NotFound) and _kind_is_missing(error):
            return ConfigError(
                f"{host} knows no ElasticJobs: install DLRover there "
                "(helm install dlrover charts/dlrover), or choose another --context"
            )
        if isinstance(error, (TransientError, Throttled)):
            words = str(error) if host in str(error) else f"{host}: {error}"
            return Unreachable(f"the cluster does not answer: {words}; try again, or see --context")
        if "strict decoding error" in str(error):
            return ConfigError(
                f"{error}: correct the spelling; or is DLRover's CRD there older than this command?"
            )
        return ConfigError(str(error))

    # --- one job ---

    def job(self, name: str | None) -> "ClusterJob":
        """The job of this name, or the only one of the namespace.

        Raises:
            ConfigError: there is no such job.
        """
        place = self.place(self.namespace)
        if name is None:
            found = self.run(self.kube.list(ELASTICJOBS, self.namespace))
            if len(found) != 1:
                called = ", ".join(obj["metadata"]["name"] for obj in found[:10])
                words = f"{len(found)} jobs are {place}, name one: {called}"
                raise ConfigError(words if found else f"no job is {place}")
            return ClusterJob(self, found[0])
        try:
            return ClusterJob(self, self._get(name, self.namespace))
        except NotFound as error:
            raise ConfigError(f"job {name} is not {place}; see `dlrover job get -A`") from error

    def _get(self, name: str, namespace: str) -> Obj:
        """An object; NotFound stays what it is, if it is the object that is missing."""
        try:
            return self._runner.run(self.kube.get(ELASTICJOBS, name, namespace))
        except KubeError as error:
            if isinstance(error, NotFound) and not _kind_is_missing(error):
                raise
            raise self.explained(error) from error

    # --- all jobs ---

    def rows(self, name: str | None, *, everywhere: bool) -> Rows:
        """The jobs of the namespace, or of all, or the one of this name."""
        if name is not None and not everywhere:
            return [_row(self.job(name).obj)]
        fields = "" if name is None else f"metadata.name={name}"
        space = "" if everywhere else self.namespace
        found = self.run(self.kube.list(ELASTICJOBS, space, fields=fields))
        return [_row(obj) for obj in found]

    def watch_rows(
        self, name: str | None, *, everywhere: bool, show: Callable[[Rows], None]
    ) -> NoReturn:
        """Show the jobs, and then each that changes, until it is interrupted."""
        fields = "" if name is None else f"metadata.name={name}"
        space = "" if everywhere else self.namespace
        self.run(self._watch_rows(space, fields, show))
        raise AssertionError("a watch never ends")

    async def _watch_rows(self, space: str, fields: str, show: Callable[[Rows], None]) -> None:
        known: dict[str, view.Row] = {}
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

    # --- submit ---

    def submit(
        self, documents: Sequence[Document], *, apply: bool, dry_run: bool
    ) -> list[tuple[str, "ClusterJob"]]:
        """Create jobs, or make those that are there what their files say.

        Nothing is changed if the server refuses one of them.

        Returns:
            What was done to each.

        Raises:
            ConfigError: a name is taken, or the server refuses a job.
        """
        wishes = [self._placed(document) for document in documents]
        named = [(w["metadata"]["namespace"], w["metadata"]["name"]) for w in wishes]
        for namespace, name in named:
            if named.count((namespace, name)) > 1:
                raise ConfigError(f"job {name} stands twice in what is submitted")
        if dry_run or len(wishes) > 1:
            checked = [self._send(wish, apply=apply, dry_run=True) for wish in wishes]
            if dry_run:
                return checked
        return [self._send(wish, apply=apply, dry_run=False) for wish in wishes]

    def _placed(self, document: Document) -> Obj:
        written = document.written
        meta = dict(written["metadata"])
        given, own = self._target.namespace, meta.get("namespace")
        if given and own and given != own:
            raise ConfigError(
                f"job {meta['name']}: its file says namespace {own} and --namespace {given}: "
                "expected one of the two"
            )
        meta["namespace"] = own or self.namespace
        return written | {"metadata": meta}

    def _send(self, wish: Obj, *, apply: bool, dry_run: bool) -> tuple[str, "ClusterJob"]:
        name, namespace = wish["metadata"]["name"], wish["metadata"]["namespace"]
        try:
            done, obj = self._runner.run(self._write(wish, apply=apply, dry_run=dry_run))
        except AlreadyExists as error:
            raise ConfigError(
                f"job {name} is already {self.place(namespace)}, and nothing was changed: --apply "
                f"makes it what the file says; or delete it: dlrover job delete {name} -n "
                f"{namespace}"
            ) from error
        except KubeError as error:
            explained = self.explained(error)
            raise type(explained)(f"job {name}: {explained}") from error
        return done, ClusterJob(self, obj)

    async def _write(self, wish: Obj, *, apply: bool, dry_run: bool) -> tuple[str, Obj]:
        """Its spec becomes the file's, but for ``suspend`` if the file does not say it."""
        meta = wish["metadata"]
        for _ in range(APPLY_TRIES if apply else 1):
            with contextlib.suppress(*((AlreadyExists,) if apply else ())):
                made = await self.kube.create(ELASTICJOBS, wish, dry_run=dry_run, strict=True)
                return "submitted", made
            with contextlib.suppress(NotFound, Conflict):  # somebody else was faster: once more
                old = await self.kube.get(ELASTICJOBS, meta["name"], meta["namespace"])
                new = _applied(old, wish)
                obj = await self.kube.replace(ELASTICJOBS, new, dry_run=dry_run, strict=True)
                return "changed" if _content(obj) != _content(old) else "unchanged", obj
        raise Conflict(f"{meta['name']} is changed by others all the time; try again")


class ClusterJob:
    """One job of a cluster, as it was when it was looked up."""

    def __init__(self, cluster: Cluster, obj: Obj) -> None:
        self.obj = obj
        self.name: str = obj["metadata"]["name"]
        self.namespace: str = obj["metadata"]["namespace"]
        self._cluster, self._kube = cluster, cluster.kube

    @property
    def where(self) -> str:  # noqa: D102
        return self._cluster.place(self.namespace)

    def picture(self, *, whole: bool = False) -> view.Picture:  # noqa: D102
        notes: list[str] = []
        events = self._cluster.run(self._seen(EVENTS, notes, fields=self._fields()))
        pods: list[Obj] = []
        if whole:
            label = f"{names.LABEL_JOB}={self.name}"
            pods = self._cluster.run(self._seen(PODS, notes, labels=label))
        return picture(self.obj, events, pods, where=self.where, notes=notes)

    def _fields(self) -> str:
        uid = self.obj["metadata"]["uid"]
        return f"involvedObject.kind={names.KIND},involvedObject.uid={uid}"

    async def _seen(
        self, kind: Kind, notes: list[str], *, labels: str = "", fields: str = ""
    ) -> list[Obj]:
        try:
            return await self._kube.list(kind, self.namespace, labels=labels, fields=fields)
        except Forbidden as error:
            notes.append(f"{kind.plural} cannot be seen: {error}")
            return []

    def history(self) -> History:  # noqa: D102
        return History()  # the API server keeps none: the events have to do

    def show_logs(self, wish: LogWish) -> None:  # noqa: D102
        if wish.round is not None:
            raise ConfigError(
                "--round: the log of a Pod does not tell one round from another; leave it out"
            )
        status, only = read_status(self.obj), wish.node
        if wish.rank is not None:
            only, workers = node_of_rank(status, wish.rank)
            if workers > 1:
                print(
                    f"{only} has {workers} workers; what each of them wrote can be told apart "
                    "with `elastic-run --tee 3`",
                    file=sys.stderr,
                )
        with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
            self._cluster.run(self._show_logs(wish, only))

    async def _show_logs(self, wish: LogWish, only: str | None) -> None:
        logs = PodLogs(self._kube, self.obj, wish, only)
        if not wish.follow:
            await logs.print_all(ended=_ended(self.obj))
            return
        following = asyncio.create_task(logs.follow(ended=_ended(self.obj)))
        ending = asyncio.create_task(self._end())
        try:
            await asyncio.wait({following, ending}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
            ending.result()
            await logs.finish()
        finally:
            for task in (following, ending):
                task.cancel()
            await asyncio.gather(following, ending, return_exceptions=True)

    async def _end(self) -> None:
        async for obj in self._changes():
            if obj is None or _ended(obj):
                return

    async def _changes(self) -> AsyncIterator[Obj | None]:
        """The object each time that it has changed; None once it is gone."""
        uid = self.obj["metadata"]["uid"]
        fields = f"metadata.name={self.name}"
        async for change in watching(self._cluster, ELASTICJOBS, self.namespace, fields=fields):
            seen = change.items if isinstance(change, Listed) else [change.item]
            mine = [obj for obj in seen if obj["metadata"]["uid"] == uid]
            if isinstance(change, Gone) or not mine:
                yield None
                return
            yield mine[0]

    # --- change ---

    def scale(self, replicas: int) -> str:  # noqa: D102
        ElasticJob.read(self.obj).scaled(replicas)
        self._patch({"spec": {"replicas": replicas}}, "scale")
        return f"{self.name} now wishes {counted(replicas, 'node')}"

    def suspend(self, on: bool) -> str:  # noqa: D102
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended; it can be neither suspended nor resumed")
        self._patch({"spec": {"suspend": on}})
        return f"{self.name} is {'suspended' if on else 'resumed'}"

    def restart(self, *, rolling: bool) -> str:  # noqa: D102
        if _ended(self.obj):
            raise ConfigError(f"{self.name} has ended; it cannot be restarted. Submit it anew")
        at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        self._patch({"spec": {"restart": {"at": at, "rolling": rolling}}})
        return f"all nodes of {self.name} are being replaced"

    def _patch(self, patch: Obj, subresource: str = "") -> None:
        self._cluster.run(
            self._kube.patch(ELASTICJOBS, self.name, patch, self.namespace, subresource=subresource)
        )

    def stop(self, *, wait: bool) -> str:  # noqa: D102
        raise ConfigError(
            f"{self.name} is {self.where}: there a job is ended by `dlrover job delete`, with its "
            "Pods and their logs, or held by `dlrover job suspend`"
        )

    def delete(  # noqa: D102
        self, *, cascade: str, wait: bool, sure: Callable[[str], None]
    ) -> str:
        stay = cascade == "orphan"
        sure(f"{self.name} {self.where}{'' if stay else ', with its Pods and their logs'}")
        self._cluster.run(self._delete(cascade, wait=wait))
        return f"{self.name} {'is' if wait else 'is being'} deleted"

    async def _delete(self, cascade: str, *, wait: bool) -> None:
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
        label, left = names.workers_of(self.name), set()
        async for change in watching(self._cluster, PODS, self.namespace, labels=label):
            if isinstance(change, Listed):
                left = {p["metadata"]["uid"] for p in change.items if _is_owned(p, uid)}
            elif isinstance(change, Gone):
                left.discard(change.item["metadata"]["uid"])
            if not left:
                return

    # --- wait ---

    def wait(self, style: Style) -> int:
        """Show how it goes until it ends; return the exit code of the command."""
        try:
            if style != "live":
                return self._cluster.run(self._wait(style, None))
            with Live(console=Console(), auto_refresh=False, transient=False) as screen:
                return self._cluster.run(self._wait(style, screen))
        except KeyboardInterrupt:
            print(f"{self.name} goes on {self.where}", file=sys.stderr)
            raise

    async def _wait(self, style: Style, screen: Live | None) -> int:
        now = asyncio.get_running_loop().time
        news, status = News(style, since=now()), None
        async for obj in self._changes():
            if obj is None:
                raise ConfigError(f"{self.name} was deleted")
            seen = picture(obj, (), (), where=self.where)
            status = seen.status
            if screen is not None:
                master = f"term {status.term}" if status is not None else seen.reason
                size = screen.console.size
                hint = f"in another terminal: dlrover job describe|why|logs -f {self.name} -n "
                hint += f"{self.namespace}; Ctrl-C leaves the job running"
                drawn = view.live(self.name, status, master, hint=hint, size=size)
                screen.update(drawn, refresh=True)
            else:
                news.tell(status, now())
            if seen.phase in _ENDS or _refused(seen.conditions):
                if screen is None:
                    news.end(status)
                if style != "json":
                    said = status is not None and status.phase.ended
                    for line in view.farewell(status) if status is not None and said else ():
                        print(line, flush=True)
                    if not said:
                        print(view.plain(f"{self.name} is {seen.phase}: {seen.reason}"), flush=True)
                return 0 if seen.phase in (JobPhase.SUCCEEDED, JobPhase.STOPPED) else 1
        raise AssertionError("a watch never ends")


FINAL = ("Unsupported", "InvalidSpec")
"""Refusals that only another spec is a cure for; what is in the way may go."""
_ENDS = tuple(phase.value for phase in JobPhase if phase.ended)


async def watching(
    cluster: Cluster, kind: Kind, namespace: str, *, labels: str = "", fields: str = ""
) -> AsyncIterator[Listed[Obj] | Changed[Obj] | Gone[Obj]]:
    """A watch that gives up at once where only a person can help, or if it does not even begin."""
    begun = False

    def on_trouble(error: KubeError | None) -> None:
        if error is None:
            return
        if not begun or not isinstance(error, TransientError):
            raise error
        print(f"dlrover: {cluster.explained(error)}", file=sys.stderr, flush=True)

    changes = cluster.kube.watch(
        kind, namespace, labels=labels, fields=fields, view=lambda o: o, on_trouble=on_trouble
    )
    async with contextlib.aclosing(changes):
        async for change in changes:
            begun = True
            yield change


# --- what an object says: pure ---


def read_status(obj: Obj) -> JobStatus | None:
    """What the master says, with everybody's conditions; None if there is nothing to be read."""
    training = (obj.get("status") or {}).get("training")
    if not isinstance(training, dict):
        return None
    conditions = [c.model_dump() for c in read_conditions(obj)]
    with contextlib.suppress(ValidationError):  # of another version
        return JobStatus.model_validate(training | {"conditions": conditions})
    return None


def read_conditions(obj: Obj) -> list[Condition]:
    """The conditions of an object."""
    found = []
    for condition in (obj.get("status") or {}).get("conditions") or []:
        with contextlib.suppress(ValidationError):
            at = unix_seconds(condition.get("lastTransitionTime")) or 0.0
            found.append(
                Condition.model_validate(
                    {"reason": "", "message": "", **condition, "lastTransitionTime": at}
                )
            )
    return found


def picture(
    obj: Obj, events: Sequence[Obj], pods: Sequence[Obj], *, where: str, notes: Sequence[str] = ()
) -> view.Picture:
    """Put together what the API server has of a job.

    Args:
        obj: the ElasticJob.
        events: Kubernetes' events of it.
        pods: Pods with its label.
        where: it is, in words.
        notes: what could not be found out.
    """
    status, conditions = read_status(obj), read_conditions(obj)
    phase, reason = _phase(obj, status, conditions)
    uid = obj["metadata"]["uid"]
    words = _pods(obj["metadata"]["name"], uid, pods)
    return view.Picture(
        name=obj["metadata"]["name"],
        heads=list(_heads(obj, where, pods)),
        phase=phase,
        reason=reason,
        status=status,
        conditions=conditions,
        events=read_events(status, events),
        document={"job": obj, "status": view.dump(status), "pods": words},
        pods=words,
        notes=notes,
    )


def _heads(obj: Obj, where: str, pods: Sequence[Obj]) -> Iterator[str]:
    meta, spec = obj["metadata"], obj.get("spec") or {}
    yield f"{meta['name']}  generation {meta.get('generation', 1)}"
    try:
        yield view.wished(ElasticJob.read(obj).worker)
    except ConfigError as error:
        yield f"wish      cannot be run: {str(error).splitlines()[0]}"
    created = unix_seconds(meta.get("creationTimestamp")) or 0.0
    yield f"where     {where}, since {view.short_age(created)}"
    if spec.get("suspend"):
        yield "suspend   all nodes are to be stopped (`dlrover job resume`)"
    for pod in pods:
        labels = pod["metadata"].get("labels") or {}
        if labels.get(names.LABEL_ROLE) == names.ROLE_MASTER:
            yield f"master    Pod {_pod_words(pod)}"


def _phase(obj: Obj, status: JobStatus | None, conditions: list[Condition]) -> tuple[str, str]:
    """The operator's word, and who knows why."""
    meta, said = obj["metadata"], (obj.get("status") or {}).get("phase") or ""
    if meta.get("deletionTimestamp"):
        return said or "Deleting", "it is being deleted"
    managed_by = (obj.get("spec") or {}).get("managedBy")
    if not said and status is None:
        if managed_by not in (None, "", names.MANAGED_BY):
            return "Created", f"{managed_by} is to look after it (spec.managedBy)"
        return "Created", (
            "no operator has looked at it: is one installed, and does it watch this namespace?"
        )
    if status is not None and said in ("", status.phase.value):
        return said or status.phase.value, status.reason
    for condition in view.troubles(conditions):
        return said, view.trouble_line(condition)
    for condition in conditions:
        if condition.type in (said, "MasterReady") and condition.message:
            return said, condition.message
    return said, "its master has not published a status yet" if status is None else status.reason


def _pods(job: str, uid: str, pods: Sequence[Obj]) -> dict[str, str]:
    """The Pod of each node, in words."""
    return {
        pod["metadata"]["name"].removeprefix(f"{job}-"): _pod_words(pod)
        for pod in pods
        if _is_owned(pod, uid)
    }


def _pod_words(pod: Obj) -> str:
    meta, status = pod["metadata"], pod.get("status") or {}
    words = f"{meta['name']} {status.get('phase', 'Pending')}"
    if meta.get("deletionTimestamp"):
        words += ", being deleted"
    containers = status.get("containerStatuses") or []
    for container in containers:
        state = container.get("state") or {}
        reason = (state.get("waiting") or state.get("terminated") or {}).get("reason")
        if reason not in (None, "Completed", "Error", "ContainerCreating"):
            words += f", {reason}"
    if node := (pod.get("spec") or {}).get("nodeName"):
        words += f" on {node}"
    restarts = sum(int(c.get("restartCount") or 0) for c in containers)
    return words + (f", {counted(restarts, 'restart')}" if restarts else "")


def read_events(status: JobStatus | None, events: Sequence[Obj]) -> list[JobEvent]:
    """What the master has said lately, its older events that Kubernetes keeps, and the operator's.

    Only the first have causes: the others have negative numbers, or one that is known no more.
    """
    found = {event.id: event for event in (status.events if status is not None else [])}
    for number, obj in enumerate(events, start=1):
        by_master = _component(obj) == names.ROLE_MASTER
        tail = obj["metadata"]["name"].rpartition(".")[2]
        event_id = int(tail) if by_master and tail.isdecimal() else -number
        seen = obj.get("lastTimestamp") or obj.get("eventTime") or obj.get("firstTimestamp")
        at = unix_seconds(seen) or 0.0
        count = int(obj.get("count") or 1)
        event = JobEvent(
            id=event_id,
            at=at,
            type="Warning" if obj.get("type") == "Warning" else "Normal",
            reason=obj.get("reason") or "",
            message=(obj.get("message") or "") + (f" ({count} times)" if count > 1 else ""),
        )
        found.setdefault(event_id, event)
    return sorted(found.values(), key=lambda e: (e.at, e.id))


def _component(event: Obj) -> str:
    source = (event.get("source") or {}).get("component")
    return str(source or event.get("reportingComponent") or "")


def _row(obj: Obj, *, gone: bool = False) -> tuple[view.Row, Obj]:
    meta, status = obj["metadata"], obj.get("status") or {}
    training = status.get("training") or {}
    summary = training.get("summary") or {}

    def text(value: object) -> str:
        return "" if value is None else str(value)

    row = view.Row(
        namespace=meta["namespace"],
        name=meta["name"],
        phase="Deleted" if gone else text(status.get("phase") or training.get("phase")),
        ready=text(summary.get("ready")),
        round=text(training.get("round")),
        progress=text(summary.get("progress")),
        restarts=text(summary.get("restarts")),
        goodput=text(summary.get("goodput")),
        age=view.short_age(unix_seconds(meta.get("creationTimestamp")) or 0.0),
    )
    return row, obj


def _applied(old: Obj, wish: Obj) -> Obj:
    """The object with a file's spec, labels and annotations."""
    meta = dict(old["metadata"])
    for part in ("labels", "annotations"):
        if given := wish["metadata"].get(part):
            meta[part] = (meta.get(part) or {}) | given
    spec = dict(wish["spec"])
    if "suspend" in old["spec"]:
        spec.setdefault("suspend", old["spec"]["suspend"])
    return old | {"metadata": meta, "spec": spec}


def _content(obj: Obj) -> tuple[Any, ...]:
    """What a file can change, with the server's defaults."""
    meta = obj["metadata"]
    return obj["spec"], meta.get("labels") or {}, meta.get("annotations") or {}


def _ended(obj: Obj) -> bool:
    status = obj.get("status") or {}
    return (status.get("phase") or (status.get("training") or {}).get("phase")) in _ENDS


def _refused(conditions: Sequence[Condition]) -> bool:
    """The operator will not run it."""
    return any(
        c.type == "Accepted" and c.status == "False" and c.reason in FINAL for c in conditions
    )


def _is_owned(obj: Obj, uid: str) -> bool:
    return any(o.get("uid") == uid for o in obj["metadata"].get("ownerReferences") or ())


def _kind_is_missing(error: NotFound) -> bool:
    words = str(error)
    return "404 page not found" in words or "could not find the requested resource" in words


def rows_as_json(rows: Rows) -> list[str]:
    """One object for each job, for scripts."""
    return [
        json.dumps(
            {
                "namespace": row.namespace,
                "name": row.name,
                "phase": row.phase,
                "status": view.dump(read_status(obj)),
            }
        )
        for row, obj in rows
    ]
