"""The operator's shell: what is seen goes into plans, plans into calls of the API server.

Four watches keep a view of all jobs and of what belongs to their masters. Whatever changes puts
its job's key into a queue; a few workers plan and carry out, one key at a time. Nothing else is
remembered: an operator that starts anew sees the same and plans the same.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily

from dlrover_operator import credentials, manifests, plan
from dlrover_operator.manifests import Options
from dlrover_operator.plan import (
    Deployment,
    MasterPod,
    Plan,
    Seen,
    Service,
    Trouble,
    WorkerPod,
)
from dlrover_operator.workqueue import WorkQueue
from dlrover_py import kube
from dlrover_py.kube import Kind, Kube, KubeError, Obj
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.refusals import Refusal, refusal_in
from dlrover_py.protocol.status import rfc3339, unix_seconds

log = logging.getLogger("operator")

Key = tuple[str, str]
"""Namespace and name of a job."""

WORKERS = 8
RESYNC_S = 30.0
RETRY_S = (0.2, 30.0)
REFUSED_S = (2.0, 60.0)
"""What was refused may be allowed later: a quota, a right, a name."""
DOUBT_S = 10.0
"""An API server that starts refuses with 403 what it does not know to be allowed yet. A right
that is missing for longer is told."""
STUCK_S = 300.0
"""Work on one job never takes as long: each call has its own deadline."""

KINDS: dict[str, Kind] = {
    "ServiceAccount": kube.SERVICE_ACCOUNTS,
    "Role": kube.ROLES,
    "RoleBinding": kube.ROLE_BINDINGS,
    "NetworkPolicy": kube.NETWORK_POLICIES,
    "Secret": kube.SECRETS,
    "Service": kube.SERVICES,
    "Deployment": kube.DEPLOYMENTS,
}
FOLLOWS = {"Role": ("rules",), "RoleBinding": ("subjects",), "NetworkPolicy": ("spec",)}
"""What another version of the operator, another template, or somebody who edits it may want
otherwise than it is."""


@dataclass(frozen=True, slots=True)
class _Item:
    key: Key
    name: str
    view: Any


@dataclass(frozen=True, slots=True)
class _Watch:
    kind: Kind
    labels: str
    view: Callable[[Obj], Any]


_OF_JOB = names.LABEL_JOB
WATCHES = (
    _Watch(kube.ELASTICJOBS, "", lambda obj: _lean(obj)),
    _Watch(kube.SERVICES, _OF_JOB, Service.of),
    _Watch(kube.DEPLOYMENTS, _OF_JOB, Deployment.of),
    _Watch(kube.PODS, f"{names.LABEL_ROLE}={names.ROLE_MASTER}", MasterPod.of),
)
JOBS, MASTER_SERVICES, MASTERS, MASTER_PODS = (watch.kind for watch in WATCHES)


class Operator:
    """Looks after the ElasticJobs of a cluster, or of some namespaces."""

    def __init__(
        self,
        api: Kube,
        options: Options,
        namespaces: tuple[str, ...] = (),
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Remember who to call; nothing is called yet."""
        self._api, self._options = api, options
        self._scopes = namespaces or ("",)
        self.registry = registry or CollectorRegistry()
        self._queue: WorkQueue[Key] = WorkQueue("elasticjobs", self.registry)
        self._held: dict[Kind, dict[Key, dict[str, _Item]]] = {w.kind: {} for w in WATCHES}
        self._listed: set[tuple[Kind, str]] = set()
        self._failures: dict[Key, int] = {}
        self._doubted: dict[Key, float] = {}
        """Since when a right is missing."""
        self._trouble: dict[Key, Trouble] = {}
        self._made_at: dict[Key, float] = {}
        self._rights_at: dict[Key, float] = {}
        self._account_at: dict[Key, float] = {}
        self._metrics = _Metrics(self)

    # --- life ---

    async def run(self) -> None:
        """Work until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for watch in WATCHES:
                for scope in self._scopes:
                    tasks.create_task(self._follow(watch, scope))
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    @property
    def ready(self) -> bool:
        """Everything has been listed once."""
        return len(self._listed) == len(WATCHES) * len(self._scopes)

    @property
    def stuck(self) -> bool:
        """Work on one job does not end."""
        return self._queue.longest_s > STUCK_S

    # --- seeing ---

    async def _follow(self, watch: _Watch, scope: str) -> None:
        def view(obj: Obj) -> _Item:
            meta = obj["metadata"]
            name = meta["name"]
            job = name if watch.kind is JOBS else (meta.get("labels") or {}).get(_OF_JOB, "")
            return _Item((meta["namespace"], job), name, watch.view(obj))

        def trouble(error: KubeError | None) -> None:
            fields = {"kind": watch.kind.plural, "namespace": scope}
            if error is None:
                log.info("watch_recovered", extra=fields)
            else:
                self._metrics.watch_troubles.labels(watch.kind.plural).inc()
                log.warning("watch_failed", extra=fields | {"why": str(error)})

        async with contextlib.aclosing(
            self._api.watch(watch.kind, scope, labels=watch.labels, view=view, on_trouble=trouble)
        ) as changes:
            async for change in changes:
                match change:
                    case kube.Listed(items):
                        self._take_all(watch.kind, scope, items)
                    case kube.Changed(item):
                        self._hold(watch.kind, item)
                    case kube.Gone(item):
                        self._drop(watch.kind, item)

    def _take_all(self, kind: Kind, scope: str, items: list[_Item]) -> None:
        held = self._held[kind]
        fresh = {(item.key, item.name) for item in items}
        for key, named in list(held.items()):
            for item in list(named.values()):
                if scope in ("", key[0]) and (item.key, item.name) not in fresh:
                    self._drop(kind, item)
        for item in items:
            self._hold(kind, item)
        self._listed.add((kind, scope))
        if self.ready:  # a job that was listed before its master was would look masterless
            for key in self._held[JOBS]:
                self._queue.add(key)

    def _hold(self, kind: Kind, item: _Item) -> None:
        self._held[kind].setdefault(item.key, {})[item.name] = item
        if self.ready:
            self._queue.add(item.key)

    def _drop(self, kind: Kind, item: _Item) -> None:
        named = self._held[kind].get(item.key, {})
        named.pop(item.name, None)
        if not named:
            self._held[kind].pop(item.key, None)
        if self.ready:
            self._queue.add(item.key)

    def _seen(self, key: Key) -> Seen | None:
        master = names.master_of(key[1])

        def one(kind: Kind, name: str) -> Any:
            item = self._held[kind].get(key, {}).get(name)
            return None if item is None else item.view

        job = one(JOBS, key[1])
        if job is None:
            return None
        pods = self._held[MASTER_PODS].get(key, {}).values()
        return Seen(
            job=job,
            deployment=one(MASTERS, master),
            service=one(MASTER_SERVICES, master),
            pods=tuple(item.view for item in pods),
            made_at=self._made_at.get(key, 0.0),
            account_at=self._account_at.get(key, 0.0),
            refused=self._trouble[key].message if key in self._trouble else "",
            jobs=len(self._held[JOBS]),
            # After a start of ours the jobs are spread: each turn asks six things of each.
            rights_at=self._rights_at.setdefault(
                key, self._api.wall() + random.uniform(0, plan.RIGHTS_S)
            ),
        )

    # --- doing ---

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            try:
                result = await self._reconcile(key)
            except Exception as error:
                result = "error"
                log.error("reconcile_failed", exc_info=error, extra=_fields(key))
                self._queue.retry_after(key, self._backoff(key, RETRY_S))
            finally:
                self._queue.done(key)
            self._metrics.reconciles.labels(result).inc()

    async def _reconcile(self, key: Key) -> str:
        seen = self._seen(key)
        if seen is None:
            self._failures.pop(key, None)
            self._doubted.pop(key, None)
            self._trouble.pop(key, None)
            self._made_at.pop(key, None)
            self._rights_at.pop(key, None)
            self._account_at.pop(key, None)
            self._queue.forget(key)
            return "gone"
        now = self._api.wall()
        wish = plan.plan(seen, now, self._options)
        try:
            if wish.looks:
                seen = replace(seen, holding=await self._holding(key, seen.job))
                wish = plan.plan(seen, now, self._options)
            if wish.grave:  # what is watched may be old: the watch has broken, or hangs
                job = await self._api.get(JOBS, key[1], key[0])
                if job["metadata"]["uid"] != seen.job["metadata"]["uid"]:
                    raise TransientError("another job has its name, which is about to be seen")
                if self._api.wall.doubtful:
                    raise TransientError("its time is in doubt: the next answer may say the same")
                seen, now = replace(seen, job=_lean(job)), self._api.wall()
                wish = plan.plan(seen, now, self._options)
            for action in wish.actions:
                await self._do(key, seen.job, action)
            self._trouble.pop(key, None)
        except (TransientError, kube.Conflict, kube.NotFound) as error:
            return self._later(key, error)
        except KubeError as error:
            if _may_be_starting(error) and self._doubts(key):
                return self._later(key, error)
            trouble = Trouble(_reason(error), str(error))
            if self._trouble.get(key) != trouble:
                log.warning("refused", extra=_fields(key) | {"why": str(error)})
            self._trouble[key] = trouble
            wish = plan.plan(replace(seen, trouble=trouble), now, self._options)
            with contextlib.suppress(KubeError):
                await self._report(key, seen.job, wish)
            self._queue.retry_after(key, self._backoff(key, REFUSED_S))
            return "refused"
        try:
            await self._report(key, seen.job, wish)
        except KubeError as error:  # there is no other place to tell it
            return self._later(key, error)
        self._failures.pop(key, None)
        self._doubted.pop(key, None)
        wait_s = RESYNC_S * random.uniform(0.8, 1.0)
        if wish.wake_at is not None:
            wait_s = min(wait_s, max(wish.wake_at - now, 0.05))
        self._queue.add_after(key, wait_s)
        return "done" if wish.actions or wish.status else "unchanged"

    def _doubts(self, key: Key) -> bool:
        """Whether a right is missing for so short a time that it may be the server's start."""
        now = asyncio.get_running_loop().time()
        return now < self._doubted.setdefault(key, now) + DOUBT_S

    def _later(self, key: Key, error: Exception) -> str:
        wait_s = self._backoff(key, RETRY_S)
        if isinstance(error, kube.Throttled):
            wait_s = max(wait_s, error.retry_after)
        log.info("retry", extra=_fields(key) | {"why": str(error), "in_s": round(wait_s, 2)})
        self._queue.retry_after(key, wait_s)
        return "retry"

    def _backoff(self, key: Key, bounds: tuple[float, float]) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        least, most = bounds
        return min(most, least * 2.0 ** min(failures, 16)) * random.uniform(0.7, 1.0)

    async def _report(self, key: Key, job: Obj, wish: Plan) -> None:
        for action in wish.status:
            await self._do(key, job, action)

    async def _do(self, key: Key, job: Obj, action: plan.Action) -> None:
        namespace, name = key
        uid = job["metadata"]["uid"]
        api = self._api
        if not isinstance(action, (plan.SetStatus, plan.Tell)):
            log.info("action", extra=_fields(key) | {"action": _words(action)})
        self._metrics.actions.labels(type(action).__name__).inc()
        match action:
            case plan.Create(what, obj):
                there = await api.create_or_own(KINDS[what], obj, uid, strict=True)
                if any(there.get(part) != obj[part] for part in FOLLOWS.get(what, ())):
                    await api.replace(KINDS[what], obj | {"metadata": there["metadata"]})
                if what == "ServiceAccount":
                    self._see_account(key, there)
                if what == "RoleBinding":
                    self._rights_at[key] = api.wall()
            case plan.MakeCredentials(elastic_job):
                await self._make_credentials(elastic_job)
                self._made_at[key] = api.wall()
            case plan.KeepToken(elastic_job):
                with contextlib.suppress(kube.NotFound):
                    await self._keep_token(elastic_job)
                self._made_at[key] = api.wall()
            case plan.Replan(obj):
                await api.replace(kube.DEPLOYMENTS, obj, strict=True)
            case plan.ScaleToZero(what, its):
                patch = {"metadata": {"uid": its}, "spec": {"replicas": 0}}
                await api.patch(kube.DEPLOYMENTS, what, patch, namespace)
            case plan.DeleteService(what, its):
                await api.delete(kube.SERVICES, what, namespace, uid=its)
            case plan.DeleteMasterPod(what, its):
                await api.delete(kube.PODS, what, namespace, uid=its)
            case plan.DeletePods():
                await self._delete_pods(key, job)
            case plan.DeleteJob(its):
                await api.delete(JOBS, name, namespace, uid=its, propagation="Background")
            case plan.SetStatus(status):
                meta = {"name": name, "namespace": namespace, "uid": uid}
                await api.apply(
                    JOBS,
                    {"metadata": meta, "status": status},
                    manager=names.OPERATOR_MANAGER,
                    subresource="status",
                )
            case plan.Tell(loud, reason, message):
                await self._tell(key, job, loud, reason, message)

    def _see_account(self, key: Key, account: Obj) -> None:
        made_at = unix_seconds(account["metadata"].get("creationTimestamp")) or 0.0
        if self._account_at.get(key) != made_at:
            self._account_at[key] = made_at
            self._queue.add(key)  # what was planned did not know of it

    async def _make_credentials(self, job: Any) -> None:
        """Whoever makes the certificate first has said the authority: the token's follows."""
        fresh = credentials.issue(self._api.wall())
        uid = job.metadata.uid
        tls = await self._api.create_or_own(kube.SECRETS, manifests.tls_secret(job, fresh), uid)
        ca, wanted = credentials.decoded(tls, names.SECRET_CA), _token_of(job, tls)
        token = await self._api.create_or_own(kube.SECRETS, wanted, uid)
        if credentials.decoded(token, names.SECRET_CA) != ca:  # the certificate was deleted
            meta = token["metadata"]
            await self._api.delete(kube.SECRETS, meta["name"], meta["namespace"], uid=meta["uid"])
            await self._api.create_or_own(kube.SECRETS, wanted, uid)

    async def _keep_token(self, job: Any) -> None:
        """Make what the master that runs knows, or nothing: by another one its nodes are refused.

        Raises:
            NotFound: the certificate is gone.
        """
        name, uid, namespace = job.metadata.name, job.metadata.uid, job.metadata.namespace
        with contextlib.suppress(kube.NotFound):
            await self._api.get(kube.SECRETS, names.token_of(name, uid), namespace)
            return
        tls = await self._api.get(kube.SECRETS, names.tls_of(name, uid), namespace)
        if names.TOKEN_FOLLOWS in (tls["metadata"].get("annotations") or {}):
            await self._api.create_or_own(kube.SECRETS, _token_of(job, tls), uid)

    async def _holding(self, key: Key, job: Obj) -> tuple[WorkerPod, ...]:
        """Ask which worker Pods of the job hold resources."""
        listed = await self._api.list(kube.PODS, key[0], labels=names.workers_of(key[1]))
        seen = (WorkerPod.of(pod, job["metadata"]["uid"]) for pod in listed)
        return tuple(pod for pod in seen if pod is not None)

    async def _delete_pods(self, key: Key, job: Obj) -> None:
        for pod in await self._holding(key, job):
            if not pod.leaving:
                await self._api.delete(kube.PODS, pod.name, key[0], uid=pod.uid)

    async def _tell(self, key: Key, job: Obj, loud: str, reason: str, message: str) -> None:
        """An event, named after what it says: told again it is the same one."""
        meta = job["metadata"]
        said = "\0".join((meta["uid"], str(meta.get("generation")), reason, message))
        now = rfc3339(self._api.wall())
        event = {
            "metadata": {
                "name": f"{key[1]}.{hashlib.sha256(said.encode()).hexdigest()[:16]}",
                "namespace": key[0],
            },
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": key[1],
                "namespace": key[0],
                "uid": meta["uid"],
            },
            "type": loud,
            "reason": reason,
            "message": message or reason,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": names.OPERATOR_MANAGER},
        }
        try:
            await self._api.create(kube.EVENTS, event)
        except kube.AlreadyExists:
            pass
        except KubeError as error:  # the condition says the same
            log.info("event_lost", extra=_fields(key) | {"why": str(error)})


class _Metrics:
    def __init__(self, operator: Operator) -> None:
        registry = operator.registry
        self._operator = operator
        self.reconciles = Counter(
            "elasticjob_reconcile", "Plans that were carried out.", ["result"], registry=registry
        )
        self.actions = Counter(
            "elasticjob_actions", "What was done for jobs.", ["action"], registry=registry
        )
        self.watch_troubles = Counter(
            "elasticjob_watch_troubles", "Failures of watches.", ["kind"], registry=registry
        )
        ready = Gauge("elasticjob_operator_ready", "Everything was listed.", registry=registry)
        ready.set_function(lambda: operator.ready)
        registry.register(self)

    def collect(self) -> Any:
        """What prometheus_client asks for."""
        held = self._operator._held
        phases: dict[str, int] = {}
        for named in held[JOBS].values():
            for item in named.values():
                phase = (item.view.get("status") or {}).get("phase") or "New"
                phases[phase] = phases.get(phase, 0) + 1
        jobs = GaugeMetricFamily("elasticjob_jobs", "Jobs by phase.", labels=["phase"])
        for phase, count in phases.items():
            jobs.add_metric([phase], count)
        yield jobs
        cached = GaugeMetricFamily("elasticjob_cache_objects", "Objects in view.", labels=["kind"])
        for kind, items in held.items():
            cached.add_metric([kind.plural], sum(map(len, items.values())))
        yield cached


def _lean(obj: Obj) -> Obj:
    """A job without what only others need: a thousand of them stay in memory."""
    meta = {k: v for k, v in obj["metadata"].items() if k != "managedFields"}
    status = obj.get("status") or {}
    training = status.get("training")
    if training:
        kept = ("phase", "generation", "endedAt", "leftOut", "nodesInRound", "wanted")
        lean = {k: training[k] for k in kept if k in training}
        lean["nodes"] = [{"phase": n.get("phase")} for n in training.get("nodes") or ()]
        status = status | {"training": lean}
    return obj | {"metadata": meta, "status": status}


def _token_of(job: Any, tls: Obj) -> Obj:
    ca = credentials.decoded(tls, names.SECRET_CA)
    token = credentials.token(credentials.decoded(tls, names.SECRET_KEY))
    return manifests.token_secret(job, token, ca)


def _reason(error: KubeError) -> str:
    if isinstance(error, kube.Leftover):
        return "Waiting"
    if isinstance(error, (kube.NameConflict, kube.AlreadyExists)):
        return "NameConflict"
    if (refusal := refusal_in(str(error))) is not None:
        return refusal.value
    if isinstance(error, kube.Forbidden):
        return Refusal.POLICY.value
    return "Refused"


def _may_be_starting(error: KubeError) -> bool:
    """Whether it may be an API server that does not know yet who may do what."""
    return isinstance(error, kube.Unauthenticated) or refusal_in(str(error)) is Refusal.RIGHTS


def _fields(key: Key) -> dict[str, str]:
    return {"namespace": key[0], "job": key[1]}


def _words(action: plan.Action) -> str:
    return f"Create {action.what}" if isinstance(action, plan.Create) else type(action).__name__
