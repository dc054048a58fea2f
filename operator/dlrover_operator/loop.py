"""The operator's control loop: it observes jobs, plans, and calls the API server.

Four watches keep a view of all jobs and of the objects of their masters. Each change puts the key
of its job into a queue. A few workers take keys, make plans and carry them out; a key is processed
by one worker at a time. The operator keeps no other state that matters: after a restart it sees the
same objects and makes the same plans.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily

from dlrover_operator import (
    actions,
    allotment,
    credentials,
    gangs,
    host_watch,
    kueue,
    manifests,
    plan,
)
from dlrover_operator.allotment import SharedHosts
from dlrover_operator.host_labels import HostLabels
from dlrover_operator.manifests import Options
from dlrover_operator.observed import (
    Deployment,
    Key,
    LastError,
    MasterPod,
    ObservedJob,
    Service,
    WorkerPod,
    lean_job,
)
from dlrover_operator.plan import JobPlan
from dlrover_operator.queues import Queues
from dlrover_operator.sharing import Sharing
from dlrover_operator.timing import OperatorTiming
from dlrover_operator.workqueue import WorkQueue
from dlrover_py.kubernetes import errors, kinds
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.kubernetes.kinds import Kind, Obj
from dlrover_py.kubernetes.watch import Changed, Gone, Listed
from dlrover_py.pacing import Backoff, random_delay_s
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.reasons import ConditionReason
from dlrover_py.protocol.refusals import Refusal, refusal_in
from dlrover_py.protocol.status import rfc3339, unix_seconds

log = logging.getLogger("operator")

HOSTS: Key = ("", "hosts")
"""Key in the queue for the decision which hosts are bad."""
ALLOT: Key = ("", "")
"""Key in the queue for the decision how many nodes each job may have."""
QUEUES: Key = ("", "queues")
"""Key in the queue for the jobs that are in queues of Kueue."""
NO_KUEUE = (
    f"the job has the label {names.LABEL_QUEUE}, and the operator does not work with Kueue: set "
    "kueue.enabled in its chart, or remove the label"
)
"""Why a job in a queue does not start."""
WORKERS = 8
"""Number of jobs that are processed at the same time."""
RESYNC_S = 30.0
"""Longest time in seconds between two plans of a job that does not change."""
RETRY = Backoff(first_s=0.2, most_s=30.0, jitter=0.3)
"""First and longest delay in seconds before a retry after a transient failure."""
REFUSED = Backoff(first_s=2.0, most_s=60.0, jitter=0.3)
"""First and longest delay in seconds before a retry after a refusal.

A refused request may succeed later, when a quota, a right or a name conflict has changed.
"""
STUCK_S = 300.0
"""Seconds of work on one job after which the operator is not healthy.

Work never takes as long, because each call has its own deadline.
"""

KINDS: dict[str, Kind] = {
    "ServiceAccount": kinds.SERVICE_ACCOUNTS,
    "Role": kinds.ROLES,
    "RoleBinding": kinds.ROLE_BINDINGS,
    "NetworkPolicy": kinds.NETWORK_POLICIES,
    "Secret": kinds.SECRETS,
    "Service": kinds.SERVICES,
    "Deployment": kinds.DEPLOYMENTS,
}
"""Kinds of objects that a plan may create."""
FOLLOWS = {"Role": ("rules",), "RoleBinding": ("subjects",), "NetworkPolicy": ("spec",)}
"""Parts of existing objects that are replaced if they differ from the plan.

They differ after a change of the operator's version or of the template, or after a manual edit.
"""
OVERTAKEN = (errors.ConflictError, errors.NotFoundError, errors.AlreadyExistsError)
"""Errors of a write after another client has changed, deleted or created the object meanwhile."""


@dataclass(frozen=True, slots=True)
class _QueueItem:
    """An observed object and the key of its job."""

    key: Key
    name: str
    view: Any


@dataclass(frozen=True, slots=True)
class _Watch:
    """A watch of one kind of object."""

    kind: Kind
    labels: str
    """Label selector."""
    view: Callable[[Obj], Any]
    """Returns the part of an object that is kept in memory."""


class _Parts(TypedDict):
    """What the parts tell the operator."""

    changed: Callable[[], None]
    failed: Callable[[Kind], None]


_OF_JOB = names.LABEL_JOB
WATCHES = (
    _Watch(kinds.ELASTICJOBS, "", lambda obj: lean_job(obj)),
    _Watch(kinds.SERVICES, _OF_JOB, Service.of),
    _Watch(kinds.DEPLOYMENTS, _OF_JOB, Deployment.of),
    _Watch(kinds.PODS, f"{names.LABEL_ROLE}={names.ROLE_MASTER}", MasterPod.of),
)
JOBS, MASTER_SERVICES, MASTERS, MASTER_PODS = (watch.kind for watch in WATCHES)


@dataclass(frozen=True, slots=True)
class Features:
    """What an operator does only if it is asked for."""

    kueue: bool = False
    """Whether jobs may be in queues of Kueue."""
    gangs: bool = False
    """Whether PodGroups that templates name are kept."""
    bad_hosts: host_watch.Mode = "off"
    """What follows if hosts fail in several jobs."""
    host_labels: tuple[str, ...] = ()
    """Labels of hosts that are copied to the Pods of workers on them."""


class Operator:
    """The operator of the ElasticJobs of a cluster, or of some namespaces."""

    def __init__(
        self,
        api: KubeClient,
        options: Options,
        namespaces: tuple[str, ...] = (),
        *,
        shared: SharedHosts | None = None,
        features: Features | None = None,
        registry: CollectorRegistry | None = None,
        timing: OperatorTiming | None = None,
    ) -> None:
        """Make an operator; it starts with `run`.

        Args:
            api: client of the API server.
            options: settings for all masters.
            namespaces: namespaces whose jobs are managed; empty: all namespaces.
            shared: hosts that the jobs share; None: each job takes what it finds.
            features: what the operator does beside that; None: nothing.
            registry: registry of the metrics; None: a new one.
            timing: times of the operator; None: the defaults.
        """
        features = features or Features()
        self._api, self._options, self._bad_hosts = api, options, features.bad_hosts
        self._timing = timing or OperatorTiming()
        self._scopes = namespaces or ("",)
        self.registry = registry or CollectorRegistry()
        self._queue: WorkQueue[Key] = WorkQueue("elasticjobs", self.registry)
        self._cache: dict[Kind, dict[Key, dict[str, _QueueItem]]] = {w.kind: {} for w in WATCHES}
        """Observed objects by kind, job and name."""
        self._listed: set[tuple[Kind, str]] = set()
        """Kinds and namespaces that were listed once."""
        self._failures: dict[Key, int] = {}
        """Number of failures in a row."""
        self._denied_since: dict[Key, float] = {}
        """Time since which a right is missing, on the clock of the event loop."""
        self._last_errors: dict[Key, LastError] = {}
        """Last refusal of the API server."""
        self._credentials_checked_at: dict[Key, float] = {}
        """Time at which the credentials of a job were last made or checked."""
        self._rights_checked_at: dict[Key, float] = {}
        """Time at which the rights of a master were last made or checked."""
        self._account_created_at: dict[Key, float] = {}
        """Creation time of a master's ServiceAccount."""
        self._metrics = _OperatorMetrics(self)
        self._sharing: Sharing | None = None
        """What the jobs share; None if no nodes are allotted."""
        self._queues: Queues | None = None
        """The queues of Kueue; None if the operator does not work with them."""
        self._gangs: gangs.Gangs | None = None
        """The PodGroups; None if the operator keeps none."""
        parts: _Parts = {"changed": self._allot_soon, "failed": self._metrics.note_failure}
        if shared is not None:
            self._sharing = Sharing(api, shared, self._scopes, **parts)
        if features.kueue:
            self._queues = Queues(api, self._scopes, **parts)
        if features.gangs:
            self._gangs = gangs.Gangs(api, self._scopes, **parts | {"changed": self._plan_all})
        self._host_labels = HostLabels(api, features.host_labels, self._scopes, parts["failed"])

    # --- Start and health ---

    async def run(self) -> None:
        """Manage the jobs until the task is canceled.

        Plans begin when all watches have listed their objects. Errors of the API server, and
        unexpected errors in the work on a job, do not end the call.
        """
        async with asyncio.TaskGroup() as tasks:
            for watch in WATCHES:
                for scope in self._scopes:
                    tasks.create_task(self._follow(watch, scope))
            for part in (self._sharing, self._queues, self._gangs, self._host_labels):
                if part is not None:
                    tasks.create_task(part.follow())
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    @property
    def ready(self) -> bool:
        """Whether all watched objects were listed once. It stays True when a watch breaks later."""
        return len(self._listed) == len(WATCHES) * len(self._scopes)

    @property
    def jobs(self) -> dict[Key, Obj]:
        """The ElasticJobs as they were last seen, without the parts that are not used."""
        return {key: named[key[1]].view for key, named in self._cache[JOBS].items()}

    @property
    def stuck(self) -> bool:
        """Whether work on one job runs for more than STUCK_S seconds."""
        return self._queue.longest_s > STUCK_S

    # --- Observation ---

    async def _follow(self, watch: _Watch, scope: str) -> None:
        """Follow one watch in one namespace indefinitely.

        The view of the objects is kept up to date, and jobs whose objects change are queued. A
        failure of the watch is counted and logged, when it differs from the last one.

        Args:
            watch: The kind of objects.
            scope: The namespace; empty for all namespaces.
        """

        def view(obj: Obj) -> _QueueItem:
            meta = obj["metadata"]
            name = meta["name"]
            job = name if watch.kind is JOBS else (meta.get("labels") or {}).get(_OF_JOB, "")
            return _QueueItem((meta["namespace"], job), name, watch.view(obj))

        def note_error(error: KubeError | None) -> None:
            fields = {"kind": watch.kind.plural, "namespace": scope}
            if error is None:
                log.info("watch_recovered", extra=fields)
            else:
                self._metrics.note_failure(watch.kind)
                log.warning("watch_failed", extra=fields | {"why": str(error)})

        async with contextlib.aclosing(
            self._api.watch(watch.kind, scope, labels=watch.labels, view=view, on_error=note_error)
        ) as changes:
            async for change in changes:
                match change:
                    case Listed(items):
                        self._replace_all(watch.kind, scope, items)
                    case Changed(item):
                        if not self._is_outdated(watch.kind, item):
                            self._keep(watch.kind, item)
                    case Gone(item):
                        self._drop(watch.kind, item)

    def _replace_all(self, kind: Kind, scope: str, items: list[_QueueItem]) -> None:
        """Replace the view of a kind in a namespace by a new list; an empty ``scope`` means all.

        Once every kind was listed in every namespace, each list queues all jobs of all namespaces.
        """
        held = self._cache[kind]
        fresh = {(item.key, item.name) for item in items}
        for key, named in list(held.items()):
            for item in list(named.values()):
                if scope in ("", key[0]) and (item.key, item.name) not in fresh:
                    self._drop(kind, item)
        for item in items:
            self._keep(kind, item)
        self._listed.add((kind, scope))
        self._plan_all()
        self._allot_soon()

    def _plan_all(self) -> None:
        """Queue all jobs, if all kinds were listed: before, a job could seem to have no master."""
        if self.ready:
            for key in self._cache[JOBS]:
                self._queue.add(key)

    def _is_outdated(self, kind: Kind, item: _QueueItem) -> bool:
        """Return whether a job is older than in the view, which has the answers to allotments."""
        held = self._cache[kind].get(item.key, {}).get(item.name)
        if kind is not JOBS or held is None:
            return False
        old, new = held.view["metadata"], item.view["metadata"]
        same = old["uid"] == new["uid"]
        return same and int(new["resourceVersion"]) < int(old["resourceVersion"])

    def _keep(self, kind: Kind, item: _QueueItem) -> None:
        """Add an object to the view, or replace it.

        Its job is queued, unless some kind of objects was not listed yet.
        """
        self._cache[kind].setdefault(item.key, {})[item.name] = item
        if self.ready:
            self._queue.add(item.key)
            self._allot_soon()

    def _drop(self, kind: Kind, item: _QueueItem) -> None:
        """Remove an object from the view; one that is not there is ignored.

        Its job is queued, unless some kind of objects was not listed yet.
        """
        named = self._cache[kind].get(item.key, {})
        named.pop(item.name, None)
        if not named:
            self._cache[kind].pop(item.key, None)
        if self.ready:
            self._queue.add(item.key)
            self._allot_soon()

    def _observed(self, key: Key) -> ObservedJob | None:
        """Return the view of one job; None if the job does not exist. No request is made.

        The first call for a job also sets the time of its first check of rights, at random.
        """
        master = names.master_of(key[1])

        def one(kind: Kind, name: str) -> Any:
            """Return the view of an object of the job; None if it does not exist."""
            item = self._cache[kind].get(key, {}).get(name)
            return None if item is None else item.view

        job = one(JOBS, key[1])
        if job is None:
            return None
        pods = self._cache[MASTER_PODS].get(key, {}).values()
        shares = self._sharing is not None and allotment.takes_part(job)
        queued = bool(kueue.queue_of(job)) if self._queues is None else self._queues.manages(job)
        return ObservedJob(
            job=job,
            deployment=one(MASTERS, master),
            service=one(MASTER_SERVICES, master),
            pods=tuple(item.view for item in pods),
            credentials_checked_at=self._credentials_checked_at.get(key, 0.0),
            account_created_at=self._account_created_at.get(key, 0.0),
            refused=self._last_errors[key].message if key in self._last_errors else "",
            jobs=len(self._cache[JOBS]),
            allotted=shares or queued,
            gang=self._gangs.of(job) if self._gangs is not None else None,
            held_for=NO_KUEUE if queued and self._queues is None else "",
            # Spread over time after a start of the operator: a check makes six requests per job.
            rights_checked_at=self._rights_checked_at.setdefault(
                key, self._api.wall() + random_delay_s(0, self._timing.rights_interval_s)
            ),
        )

    # --- Action ---

    async def _work(self) -> None:
        """Take keys from the queue and process them indefinitely.

        An unexpected error is logged, and the job is tried again after at most 30 s.
        """
        while True:
            key = await self._queue.take()
            try:
                result = await self._reconcile(key)
            except Exception as error:
                result = "error"
                log.error("reconcile_failed", exc_info=error, extra=_fields(key))
                self._queue.retry_after(key, self._delay_s(key, RETRY))
            finally:
                self._queue.done(key)
            self._metrics.reconciles.labels(result).inc()

    async def _reconcile(self, key: Key) -> str:
        """Plan one job, carry the plan out, and return the result for the metrics.

        A job that exists is queued again, after at most 30 s. After a failure the delays grow up to
        60 s. Errors of the API server are not raised. A refusal becomes a condition of the job.
        Before a plan that ends something is carried out, the job is read again and planned again.

        Returns:
            ``gone`` if the job does not exist, and all about it was forgotten; ``refused`` if an
            action was refused; ``retry`` after an error that may pass, or if the status could not
            be written; otherwise ``done``, or ``unchanged`` if the plan was empty.
        """
        if key in (ALLOT, QUEUES):
            return await self._allot(key)
        if key == HOSTS:
            return await self._tell_of_hosts()
        seen = self._observed(key)
        if seen is None:
            self._failures.pop(key, None)
            self._denied_since.pop(key, None)
            self._last_errors.pop(key, None)
            self._credentials_checked_at.pop(key, None)
            self._rights_checked_at.pop(key, None)
            self._account_created_at.pop(key, None)
            self._queue.forget(key)
            return "gone"
        now = self._api.wall()
        job_plan = self._plan(seen, now)
        try:
            if job_plan.needs_pods:
                seen = replace(seen, remaining_pods=await self._remaining_pods(key, seen.job))
                job_plan = self._plan(seen, now)
            if job_plan.disruptive:  # the view may be outdated, if the watch is broken or hangs
                job = await self._api.get(JOBS, key[1], key[0])
                if job["metadata"]["uid"] != seen.job["metadata"]["uid"]:
                    raise TransientError("another job has this name now; it is observed soon")
                if self._api.wall.disputed:
                    raise TransientError(
                        "the time of the API server is uncertain: its next answer may confirm it"
                    )
                seen, now = replace(seen, job=lean_job(job)), self._api.wall()
                job_plan = self._plan(seen, now)
            for action in job_plan.actions:
                await self._do(key, seen.job, action)
            self._last_errors.pop(key, None)
        except (TransientError, *OVERTAKEN) as error:
            return self._retry_later(key, error)
        except KubeError as error:
            if _may_be_starting(error) and self._is_recent_denial(key):
                return self._retry_later(key, error)
            last_error = LastError(_reason(error), str(error))
            if self._last_errors.get(key) != last_error:
                log.warning("action_refused", extra=_fields(key) | {"why": str(error)})
            self._last_errors[key] = last_error
            job_plan = self._plan(replace(seen, last_error=last_error), now)
            with contextlib.suppress(KubeError):
                await self._report(key, seen.job, job_plan)
            self._queue.retry_after(key, self._delay_s(key, REFUSED))
            return "refused"
        try:
            await self._report(key, seen.job, job_plan)
        except KubeError as error:  # the status is the only place to report it
            return self._retry_later(key, error)
        self._failures.pop(key, None)
        self._denied_since.pop(key, None)
        wait_s = random_delay_s(0.8 * RESYNC_S, RESYNC_S)
        if job_plan.wake_at is not None:
            wait_s = min(wait_s, max(job_plan.wake_at - now, 0.05))
        self._queue.add_after(key, wait_s)
        return "done" if job_plan.actions or job_plan.status else "unchanged"

    def _allot_soon(self) -> None:
        """Decide soon how many nodes each job may have, if nodes are allotted at all."""
        for source, decides in ((ALLOT, self._sharing), (QUEUES, self._queues)):
            if decides is not None:
                self._queue.add_after(source, self._timing.allot_after_s)
        self._queue.add_after(HOSTS, self._timing.hosts_after_s)

    async def _tell_of_hosts(self) -> str:
        """Tell jobs of hosts that have failed in several jobs; return the result for metrics."""
        if not self.ready:
            return "unchanged"  # the jobs that are not listed yet have faults, too
        jobs = self.jobs
        writes = host_watch.decide(jobs.values(), self._bad_hosts, self._api.wall())
        tell = {key: actions.TellOfHosts(bad) for key, bad in writes.items()}
        return await self._write_all(HOSTS, jobs, tell)

    async def _allot(self, source: Key) -> str:
        """Write how many nodes each job may have; return the result for the metrics.

        Nothing is written before all objects were listed once.

        Args:
            source: who decides, ``ALLOT`` or ``QUEUES``.
        """
        decides = self._sharing if source == ALLOT else self._queues
        if decides is None or not (self.ready and decides.ready):
            return "unchanged"  # the next list causes a decision
        jobs = self.jobs
        writes = decides.writes(jobs.values(), self._api.wall())
        allot = {key: one if one is None else actions.Allot(one) for key, one in writes.items()}
        return await self._write_all(source, jobs, allot, decides)

    async def _write_all(
        self,
        decision: Key,
        jobs: Mapping[Key, Obj],
        writes: Mapping[Key, actions.Action | None],
        decides: Sharing | Queues | None = None,
    ) -> str:
        """Carry out what was decided about several jobs; return the result for the metrics.

        A refusal of one job does not keep the others from theirs: each is right without the rest.

        Args:
            decision: Key in the queue of the decision, which is made again later.
            jobs: All ElasticJobs.
            writes: What to do, by job; None: only what a queue has to do for it.
            decides: Who has decided, if it says when to decide again.
        """
        failure: KubeError | None = None
        for key, action in writes.items():
            try:
                if action is not None and not _is_over(action, self._observed(key)):
                    await self._do(key, jobs[key], action)
                if isinstance(decides, Queues):
                    await decides.finish(key)
            except KubeError as error:
                failure = error
                if isinstance(error, (errors.ServerDownError, errors.ThrottledError)):
                    break  # the next call would wait as long
        if failure is not None:
            return self._retry_later(decision, failure)
        self._failures.pop(decision, None)
        again_s = RESYNC_S if decides is None else decides.again_s
        self._queue.add_after(decision, min(random_delay_s(0.8 * RESYNC_S, RESYNC_S), again_s))
        return "done" if writes else "unchanged"

    def _plan(self, seen: ObservedJob, now: float) -> JobPlan:
        """Return the plan for a job."""
        return plan.plan(seen, now, self._options, self._timing)

    def _is_recent_denial(self, key: Key) -> bool:
        """Return whether a missing right may be due to the start of the API server.

        The first call after a success starts the time, and the result is True for
        ``api_server_start_s`` seconds.
        """
        now = asyncio.get_running_loop().time()
        return now < self._denied_since.setdefault(key, now) + self._timing.api_server_start_s

    def _retry_later(self, key: Key, error: Exception) -> str:
        """Queue a job again after a delay; return the result for the metrics.

        The delay grows with the failures in a row up to 30 s, or longer if the server asks for it.
        The error is logged.
        """
        wait_s = self._delay_s(key, RETRY)
        if isinstance(error, errors.ThrottledError):
            wait_s = max(wait_s, error.retry_after)
        log.info("retry", extra=_fields(key) | {"why": str(error), "in_s": round(wait_s, 2)})
        self._queue.retry_after(key, wait_s)
        return "retry"

    def _delay_s(self, key: Key, backoff: Backoff) -> float:
        """Return the delay of a job after a failure, in seconds, and count the failure."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        return backoff.delay_s(failures)

    async def _report(self, key: Key, job: Obj, job_plan: JobPlan) -> None:
        """Carry out the part of a plan that writes status and events.

        Raises:
            KubeError: The API server refuses the status, or does not answer.
        """
        for action in job_plan.status:
            await self._do(key, job, action)

    async def _do(self, key: Key, job: Obj, action: actions.Action) -> None:
        """Carry out one action, log it and count it. Status and events are not logged.

        An existing object is kept, except for the parts in ``FOLLOWS``, which are replaced if they
        differ. A missing object to delete is no error.

        Args:
            key: Namespace and name of the job.
            job: The ElasticJob.
            action: What to do.

        Raises:
            KubeError: The API server refuses the action, or does not answer.
        """
        namespace, name = key
        uid = job["metadata"]["uid"]
        api = self._api
        if not isinstance(action, (actions.SetStatus, actions.RecordEvent)):
            log.info("action", extra=_fields(key) | {"action": _action_name(action)})
        self._metrics.actions.labels(type(action).__name__).inc()
        match action:
            case actions.Create(what, obj):
                there = await api.create_or_own(KINDS[what], obj, uid, strict=True)
                if any(there.get(part) != obj[part] for part in FOLLOWS.get(what, ())):
                    await api.replace(KINDS[what], obj | {"metadata": there["metadata"]})
                if what == "ServiceAccount":
                    self._note_account(key, there)
                if what == "RoleBinding":
                    self._rights_checked_at[key] = api.wall()
            case actions.MakeCredentials(elastic_job):
                await _make_credentials(api, elastic_job)
                self._credentials_checked_at[key] = api.wall()
            case actions.RestoreToken(elastic_job):
                with contextlib.suppress(errors.NotFoundError):
                    await _keep_token(api, elastic_job)
                self._credentials_checked_at[key] = api.wall()
            case actions.ReplaceDeployment(obj):
                await api.replace(kinds.DEPLOYMENTS, obj, strict=True)
            case actions.ScaleToZero(what, its):
                patch = {"metadata": {"uid": its}, "spec": {"replicas": 0}}
                await api.patch(kinds.DEPLOYMENTS, what, patch, namespace)
            case actions.DeleteService(what, its):
                await api.delete(kinds.SERVICES, what, namespace, uid=its)
            case actions.DeleteMasterPod(what, its):
                await api.delete(kinds.PODS, what, namespace, uid=its)
            case actions.DeletePods():
                await self._delete_pods(key, job)
            case actions.DeleteJob(its):
                await api.delete(JOBS, name, namespace, uid=its, propagation="Background")
            case actions.Allot(allocation):
                granted = allocation and allocation.model_dump(by_alias=True, exclude_none=True)
                status = {"allocation": granted} if granted else {}
                there = await self._apply_status(key, uid, names.ALLOCATOR_MANAGER, status)
                if granted:  # the next decision must know it, even before the watch tells
                    self._keep(JOBS, _QueueItem(key, name, lean_job(there)))
            case actions.KeepPodGroup(kind, obj, existing):
                await gangs.keep(api, kind, obj, existing)
            case actions.TellOfHosts(bad):
                status = {} if bad is None else {"badHosts": bad.model_dump(by_alias=True)}
                await self._apply_status(key, uid, names.HOSTS_MANAGER, status)
            case actions.SetStatus(status):
                await self._apply_status(key, uid, names.OPERATOR_MANAGER, status)
            case actions.RecordEvent():
                await self._record_event(key, job, action)

    async def _apply_status(self, key: Key, uid: str, manager: str, status: Obj) -> Obj:
        """Write all fields of the status that a manager owns; return the ElasticJob.

        Raises:
            KubeError: The API server refuses it, or does not answer.
        """
        meta = {"name": key[1], "namespace": key[0], "uid": uid}
        obj = {"metadata": meta, "status": status}
        return await self._api.apply(JOBS, obj, manager=manager, subresource="status")

    def _note_account(self, key: Key, account: Obj) -> None:
        """Record the creation time of the master's ServiceAccount.

        If it is new, the job is planned again after this plan.
        """
        created_at = unix_seconds(account["metadata"].get("creationTimestamp")) or 0.0
        if self._account_created_at.get(key) != created_at:
            self._account_created_at[key] = created_at
            self._queue.add(key)  # the current plan did not know it

    async def _remaining_pods(self, key: Key, job: Obj) -> tuple[WorkerPod, ...]:
        """List the worker Pods of the job that hold resources, by a request to the API server.

        Pods of another job of the same name are left out.

        Raises:
            KubeError: The API server refuses the call, or does not answer.
        """
        listed = await self._api.list(kinds.PODS, key[0], labels=names.nodes_of(key[1]))
        seen = (WorkerPod.of(pod, job["metadata"]["uid"]) for pod in listed)
        return tuple(pod for pod in seen if pod is not None)

    async def _delete_pods(self, key: Key, job: Obj) -> None:
        """Delete the worker Pods that hold resources and were not deleted before.

        The call does not wait for their end.

        Raises:
            KubeError: The API server refuses a call or does not answer; other Pods may stay.
        """
        for pod in await self._remaining_pods(key, job):
            if not pod.leaving:
                await self._api.delete(kinds.PODS, pod.name, key[0], uid=pod.uid)

    async def _record_event(self, key: Key, job: Obj, action: actions.RecordEvent) -> None:
        """Create an event whose name is derived from its contents, so that it is created once.

        An event that exists is left as it is. Any other failure is only logged, because the
        condition of the job has the same message.

        Args:
            key: Namespace and name of the job.
            job: The ElasticJob.
            action: The event.
        """
        event = _event(key, job, action, rfc3339(self._api.wall()))
        try:
            await self._api.create(kinds.EVENTS, event)
        except errors.AlreadyExistsError:
            pass
        except KubeError as error:  # the condition of the job has the same message
            log.info("event_not_recorded", extra=_fields(key) | {"why": str(error)})


class _OperatorMetrics:
    """The metrics of the operator."""

    def __init__(self, operator: Operator) -> None:
        """Register the metrics of an operator."""
        registry = operator.registry
        self._operator = operator
        self.reconciles = Counter(
            "elasticjob_reconcile",
            "Plans that were carried out, by result.",
            ["result"],
            registry=registry,
        )
        self.actions = Counter(
            "elasticjob_actions",
            "Actions on objects of jobs, by kind of action.",
            ["action"],
            registry=registry,
        )
        self.watch_errors = Counter(
            "elasticjob_watch_errors",
            "Failures of watches, by kind of object.",
            ["kind"],
            registry=registry,
        )
        ready = Gauge(
            "elasticjob_operator_ready",
            "1 if the operator has listed all objects, else 0.",
            registry=registry,
        )
        ready.set_function(lambda: operator.ready)
        registry.register(self)

    def note_failure(self, kind: Kind) -> None:
        """Count a failure of a watch."""
        self.watch_errors.labels(kind.plural).inc()

    def collect(self) -> Any:
        """Yield gauges of jobs by phase and of observed objects; prometheus_client calls this."""
        held = self._operator._cache
        phases: dict[str, int] = {}
        for named in held[JOBS].values():
            for item in named.values():
                phase = (item.view.get("status") or {}).get("phase") or "New"
                phases[phase] = phases.get(phase, 0) + 1
        jobs = GaugeMetricFamily("elasticjob_jobs", "Jobs by phase.", labels=["phase"])
        for phase, count in phases.items():
            jobs.add_metric([phase], count)
        yield jobs
        cached = GaugeMetricFamily(
            "elasticjob_cache_objects",
            "Objects in the cache of the operator, by kind.",
            labels=["kind"],
        )
        for kind, items in held.items():
            cached.add_metric([kind.plural], sum(map(len, items.values())))
        yield cached


def _event(key: Key, job: Obj, action: actions.RecordEvent, now: str) -> Obj:
    """Return the object of an event.

    Args:
        key: Namespace and name of the job.
        job: The ElasticJob.
        action: The event; without a message, its reason is the message.
        now: Time as RFC 3339 writes it.
    """
    meta = job["metadata"]
    identity = "\0".join((meta["uid"], str(meta.get("generation")), action.reason, action.message))
    return {
        "metadata": {
            "name": f"{key[1]}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}",
            "namespace": key[0],
        },
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": key[1],
            "namespace": key[0],
            "uid": meta["uid"],
        },
        "type": action.type,
        "reason": action.reason,
        "message": action.message or action.reason,
        "count": 1,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "source": {"component": names.OPERATOR_MANAGER},
    }


async def _make_credentials(api: KubeClient, job: Any) -> None:
    """Make the Secrets of the certificate and the token, or keep existing ones.

    If two operators do this at the same time, the first certificate decides the authority. The
    Secret of the token follows it: one with another authority is deleted and made again.

    Raises:
        KubeError: The API server refuses a call or does not answer, or a Secret of this name
            does not belong to the job.
    """
    fresh = credentials.issue(api.wall())
    uid = job.metadata.uid
    tls = await api.create_or_own(kinds.SECRETS, manifests.tls_secret(job, fresh), uid)
    ca, wanted = credentials.decoded(tls, names.SECRET_CA), _token_of(job, tls)
    token = await api.create_or_own(kinds.SECRETS, wanted, uid)
    if credentials.decoded(token, names.SECRET_CA) != ca:  # the certificate was deleted
        meta = token["metadata"]
        await api.delete(kinds.SECRETS, meta["name"], meta["namespace"], uid=meta["uid"])
        await api.create_or_own(kinds.SECRETS, wanted, uid)
    await _keep_recipes(api, job)


async def _keep_recipes(api: KubeClient, job: Any) -> None:
    """Make the Secret for the import recipes of a namespace, unless there is one.

    A job runs without it. So a refusal, as by a quota, is only logged.
    """
    try:
        await api.create(kinds.SECRETS, manifests.recipes_secret(job))
    except errors.AlreadyExistsError:
        pass
    except errors.KubeError as error:
        log.info("recipes_not_kept", extra={"job": job.metadata.name, "why": str(error)})


async def _keep_token(api: KubeClient, job: Any) -> None:
    """Restore a deleted Secret of the token with the token that the running master knows.

    Nothing is done if the Secret exists. If that token cannot be derived, nothing is made: the
    master would refuse nodes with another token.

    Raises:
        NotFoundError: the Secret of the certificate does not exist.
        KubeError: the API server refuses another call, or does not answer.
    """
    name, uid, namespace = job.metadata.name, job.metadata.uid, job.metadata.namespace
    with contextlib.suppress(errors.NotFoundError):
        await api.get(kinds.SECRETS, names.token_of(name, uid), namespace)
        return
    tls = await api.get(kinds.SECRETS, names.tls_of(name, uid), namespace)
    if names.TOKEN_FOLLOWS in (tls["metadata"].get("annotations") or {}):
        await api.create_or_own(kinds.SECRETS, _token_of(job, tls), uid)


def _is_over(action: actions.Action, seen: ObservedJob | None) -> bool:
    """Return whether a job has left its queue, or the allocator, since the action was decided."""
    return isinstance(action, actions.Allot) and (seen is None or not seen.allotted)


def _token_of(job: Any, tls: Obj) -> Obj:
    """Return the Secret of the token that belongs to a Secret of a certificate."""
    ca = credentials.decoded(tls, names.SECRET_CA)
    token = credentials.token(credentials.decoded(tls, names.SECRET_KEY))
    return manifests.token_secret(job, token, ca)


def _reason(error: KubeError) -> ConditionReason:
    """Return the reason of a condition for an error of the API server.

    The reason is ``Refused`` for an error of no known kind, and ``Waiting`` while objects of a
    deleted job of the same name still exist.
    """
    if isinstance(error, errors.LeftoverError):
        return ConditionReason.WAITING
    if isinstance(error, (errors.NameConflictError, errors.AlreadyExistsError)):
        return ConditionReason.NAME_CONFLICT
    if (refusal := refusal_in(str(error))) is not None:
        return ConditionReason(refusal.value)
    if isinstance(error, errors.ForbiddenError):
        return ConditionReason.PODS_FORBIDDEN
    return ConditionReason.REFUSED


def _may_be_starting(error: KubeError) -> bool:
    """Return whether a starting API server may be the cause, which does not know the rights yet."""
    return (
        isinstance(error, errors.UnauthenticatedError) or refusal_in(str(error)) is Refusal.RIGHTS
    )


def _fields(key: Key) -> dict[str, str]:
    """Return the log fields of a job."""
    return {"namespace": key[0], "job": key[1]}


def _action_name(action: actions.Action) -> str:
    """Return the name of an action for the log."""
    return f"Create {action.what}" if isinstance(action, actions.Create) else type(action).__name__
