"""Nodes as Pods of a Kubernetes cluster; the Pods themselves are spelled in ``pods``."""

import asyncio
import contextlib
import hashlib
import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlrover_py.kube import (
    ELASTICJOBS,
    EVENTS,
    PODS,
    AlreadyExists,
    Changed,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    Kube,
    KubeError,
    Listed,
    NotFound,
)
from dlrover_py.master.core.events import (
    Event,
    JobChanged,
    JobStopped,
    NodeEnded,
    NodeSeen,
    NodesListed,
)
from dlrover_py.master.platform import Known, pods
from dlrover_py.master.platform.ends import End
from dlrover_py.master.platform.pods import Obj, PodView, Site
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError, Superseded, TransientError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.refusals import Refusal, refusal_in
from dlrover_py.protocol.status import (
    PROGRESS_S,
    Condition,
    JobEvent,
    JobPhase,
    JobStatus,
    Training,
    rfc3339,
    unix_seconds,
)

log = logging.getLogger("master.kubernetes")

CALLS = 48
"""Pods that are asked for at the same time: three of four calls of ``kube.IN_FLIGHT``, so that the
journal and the status find their turn."""
ASKING_AGAIN = 8
"""Of the Pods that were refused so many ask again at a time: what one lacks they all lack."""
BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Between two requests for a Pod that the API server refuses."""
LINGER_S = 2.0
"""A node that was lost because its agent died: its kubelet says a moment later how, and its log is
kept. Whoever is frozen does no harm meanwhile."""
NOT_ENDING_S = 30.0
"""A Pod that was deleted is gone so long after its grace, or it is told of."""
SIDECARS_S = 30
"""Of a Pod whose agent has ended the other containers have the template's grace, but no longer."""
KILL_S = 1
"""A Pod that is to end at once: not 0, which would forget it before its kubelet has ended it."""
PREPARED_S = 10.0
"""A Pod has its volumes and its network after so long, or it is told of."""
TRY_S = 60.0
"""A template that was refused is tried again: a policy or an account is mended without the job."""
EVENTS_AT_ONCE, EVENTS_PER_S = 100, 1.0
"""More of Kubernetes' events than these wait, and the oldest are left out: whoever holds a job's
token can make its master tell of as many refusals as it likes."""
ENDED_KEPT = 32
"""Pods that have ended are kept for their logs, the newest ones."""
HEAR_S = 12.0
"""Where nothing was heard of the API server for so long it is asked something, and so seldom. It is
more where progress is written more seldom, so that a job that takes steps never asks."""
DOUBT_S = 10.0
"""An API server that starts refuses with 403 what it does not know to be allowed yet. A right
that is missing for longer is a condition."""
CREATION = "creation of Pods"
TRIAL = NodeId("trial")
GONE = "JobGone"
PROBLEMS = (
    *("ImagePullBackOff", "Unschedulable", "InvalidTemplate", "QuotaExceeded", "PodNotStarting"),
    *("PodsForbidden", "PodsRefused", "NameConflict", "PermissionDenied", "PodNotEnding", GONE),
)
"""Conditions that are ours: True as long as it is so."""
WARNED = "TemplateWarning"
"""Reason of an event: the API server takes the Pod template, and warns of something in it."""
EVENT_CHARS = 1024
WHY_CHARS = 300
LOG_LINES, LOG_S, SLOW_LOG_S = 20, 3.0, 0.3


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a Pod is not there: a condition of the job."""

    type: str
    message: str


class KubernetesPlatform:
    """The ``Platform`` of a job on Kubernetes.

    It adopts Pods that the ElasticJob of this uid owns, and no others, whatever their names.
    """

    can_create = True
    routed_s = 5.0  # readiness, endpoints of the Service, kube-proxy on each node, a retry

    def __init__(
        self, kube: Kube, namespace: str, job: str, site: Site, *, progress_s: float = PROGRESS_S
    ) -> None:
        """Remember who to call.

        Args:
            kube: the API server.
            namespace, job: the ElasticJob.
            site: what its Pods are told.
            progress_s: seconds between two writes of a status in which only the progress is new.
        """
        self._kube, self._namespace, self._name, self._site = kube, namespace, job, site
        self._progress_s = progress_s
        self.known = Known()
        self._job: ElasticJob | None = None
        self._template: Problem | None = None
        """What is wrong with the template of the newest spec, whether or not a Pod is needed."""
        self._pods: dict[NodeId, PodView] = {}
        self._facts: asyncio.Queue[list[Event]] = asyncio.Queue()
        self._refusals: dict[NodeId, Problem] = {}
        self._denied: dict[str, str] = {}
        """What the API server does not let us do or see, and its words."""
        self._doubted: dict[str, float] = {}
        """Since when."""
        self._past: dict[str, Condition] = {}
        self._calls = asyncio.Semaphore(CALLS)
        self._failures = 0
        """Calls for Pods that failed in a row."""
        self._again = asyncio.Semaphore(ASKING_AGAIN)
        self._refused = 0
        """Pods that were refused in a row."""
        self._made = asyncio.Event()
        self._no_logs_until = 0.0
        self._told: Obj = {}
        self._told_at = 0.0
        self._newest_event = 0
        self._telling = False
        self._to_tell: Sequence[JobEvent] = ()
        self._warnings: dict[str, Obj] = {}
        """Conditions of trouble, by type, that became True and of which no event was made yet."""
        self._tellable, self._tellable_at = float(EVENTS_AT_ONCE), 0.0
        """So many events may be told at once, as of then."""
        self._orphaned = False
        self._known = False
        """No Pod has gone since the job was last known to be there."""
        self._looking = asyncio.Lock()
        self._newest_term = 0
        self._times: dict[str, tuple[str, str]] = {}
        """Status of each condition and since when, as it stands in the cluster."""
        self._posts: dict[NodeId, asyncio.Task[Problem | None]] = {}
        self._endings: dict[str, asyncio.Task[None]] = {}
        """By uid of the Pod: see to it that a Pod whose agent has ended, ends."""
        self._turned_away: list[str] = []
        """Pods that their hosts have refused since one began to run last, in words."""
        self._due: dict[str, float] = {}
        """By uid: when a Pod that was deleted should have gone."""
        self._news = asyncio.Event()
        self._sweeping = False
        self._background: set[asyncio.Task[None]] = set()

    async def get_job(self, accepted: ElasticJob | None = None) -> ElasticJob:  # noqa: D102
        with _transient():
            obj = await self._kube.get(ELASTICJOBS, self._name, self._namespace)
        if obj["metadata"].get("uid") != self._site.uid:
            raise TransientError("another ElasticJob has this name; that of this master is gone")
        for condition in (obj.get("status") or {}).get("conditions") or []:
            kind, since = condition["type"], condition.get("lastTransitionTime") or ""
            self._times[kind] = condition["status"], since
            if kind in PROBLEMS:
                self._past.setdefault(kind, _read_condition(condition))
        self._known = True
        self.known = _remembered((obj.get("status") or {}).get("training") or {})
        self._newest_event = self.known.event  # Kubernetes has forgotten the older ones by now
        try:
            return self._read(obj, accepted)
        except ConfigError as error:
            raise TransientError(f"the spec cannot be used: {error}") from error

    # --- watch ---

    async def watch(self) -> AsyncIterator[Sequence[Event]]:  # noqa: D102
        self._facts = asyncio.Queue()
        looks = (self._watch_job(), self._watch_pods(), self._listen())
        watches = [asyncio.create_task(look) for look in looks]
        fact = asyncio.create_task(self._facts.get())
        try:
            while True:
                await asyncio.wait([fact, *watches], return_when=asyncio.FIRST_COMPLETED)
                for failed in (task for task in watches if task.done()):
                    failed.result()  # a watch never ends by itself
                if fact.done():
                    yield fact.result()
                    fact = asyncio.create_task(self._facts.get())
        finally:
            for task in (fact, *watches):
                task.cancel()

    def silent_s(self) -> float:  # noqa: D102
        return self._kube.silent_s

    async def _listen(self) -> None:
        """A watch that says nothing for a minute tells of no cut before."""
        hear_s = max(HEAR_S, 1.2 * self._progress_s)
        while True:
            left = hear_s - self._kube.silent_s
            if left <= 0:
                with contextlib.suppress(KubeError, TimeoutError):
                    async with asyncio.timeout(HEAR_S):
                        await self._kube.get(ELASTICJOBS, self._name, self._namespace)
                left = hear_s
            await asyncio.sleep(left + random.random())

    async def _watch_job(self) -> None:
        changes = self._kube.watch(
            ELASTICJOBS,
            self._namespace,
            fields=f"metadata.name={self._name}",
            view=lambda obj: obj,
            on_trouble=lambda error: self._on_trouble("ElasticJobs", error),
        )
        async with contextlib.aclosing(changes):
            async for change in changes:
                match change:
                    case Listed(items):
                        if not any(i["metadata"].get("uid") == self._site.uid for i in items):
                            await self._ask_its_pods()
                        found = [self._job_event(item) for item in items] or [self._job_gone()]
                        self._facts.put_nowait([e for e in found if e is not None])
                    case Changed(item):
                        if event := self._job_event(item):
                            self._facts.put_nowait([event])
                    case Gone():
                        if event := self._job_gone():
                            self._facts.put_nowait([event])

    def _job_event(self, obj: Obj) -> Event | None:
        """What is new of the job; each write of its status comes back as well."""
        meta = obj["metadata"]
        if meta.get("uid") != self._site.uid:
            return self._job_gone()
        status = obj.get("status") or {}
        self._newest_term = int((status.get("training") or {}).get("term") or 0)
        self._orphaned = "orphan" in (meta.get("finalizers") or [])
        if meta.get("deletionTimestamp"):
            return self._job_gone()
        for condition in status.get("conditions") or []:
            if condition["type"] == "DeadlineExceeded" and condition["status"] == "True":
                return JobStopped(condition.get("message") or "too late", "DeadlineExceeded")
        if self._job is not None and self._job.metadata.generation == meta.get("generation"):
            return None
        try:
            return JobChanged(self._read(obj, self._job))
        except ConfigError as error:  # and there is none that was accepted: the job is gone
            log.error("spec_refused", extra={"why": str(error)})
            return None

    async def _ask_its_pods(self) -> None:
        """It was deleted while nobody looked. If its Pods were to stay, the garbage collector has
        made them nobody's before (Kubernetes: finalizer ``orphan``)."""
        with _transient():
            found = await self._kube.list(
                PODS, self._namespace, labels=names.workers_of(self._name)
            )
        ours = [seen for seen in map(pods.view, found) if self._is_ours(seen)]
        self._orphaned |= any(seen.orphan for seen in ours)

    def _job_gone(self) -> Event | None:
        """Its object is gone, or about to be, and its Pods with it, unless they shall stay."""
        return None if self._orphaned else JobStopped()

    def _read(self, obj: Obj, accepted: ElasticJob | None) -> ElasticJob:
        """What is wished. CEL sees no templates and lets other roles be added: of an edit that
        cannot be used counts what can be read.

        Raises:
            ConfigError: it cannot be used, and none was accepted before.
        """
        try:
            self._job = ElasticJob.read(obj)
        except ConfigError as error:
            if accepted is None:
                raise
            self._job = accepted.under(obj)
            then = "the last one that was accepted stays, but for suspend and numbers of nodes"
            fields = {"why": str(error), "then": then, "generation": self._job.metadata.generation}
            log.error("spec_refused", extra=fields)
        self._chore(self._try_template(self._job))
        return self._job

    async def _try_template(self, job: ElasticJob) -> None:
        """Ask before a Pod is needed: a bad edit must not be found at the next failure."""
        self._template = None
        while True:
            problem = None
            warnings: list[str] = []
            try:
                wish = pods.pod(job, TRIAL, self._site)
                await self._kube.create(
                    PODS, wish, dry_run=True, strict=True, on_warning=warnings.append
                )
            except (ConfigError, Invalid, Forbidden) as error:
                found = _refused(job, error)
                # A quota may have room when it matters, and a right is asked for again.
                if found.type in ("InvalidTemplate", Refusal.POLICY):
                    problem = found
            except TransientError:
                problem = self._template
            if self._job is not job:
                return  # a later edit is tried
            if warnings:
                self._chore(self._pass_on(warnings))
            self._judge(problem)
            if problem is None:
                return
            await asyncio.sleep(TRY_S * random.uniform(0.8, 1.0))

    async def _pass_on(self, warnings: Sequence[str]) -> None:
        """Make an event of what the API server warns of, once for the same words."""
        words = f"the API server warns of the Pod template: {'; '.join(warnings)}"
        event = self._event(
            JobEvent(id=0, at=self._kube.wall(), type="Warning", reason=WARNED, message=words)
        )
        mark = hashlib.sha256(words.encode()).hexdigest()[:16]
        event["metadata"]["name"] = f"{self._name}.{self._site.uid[:8]}.template-{mark}"
        with contextlib.suppress(AlreadyExists):
            await self._kube.create(EVENTS, event)

    def _judge(self, template: Problem | None) -> None:
        if template != self._template:
            self._template = template
            self._facts.put_nowait([])

    async def _watch_pods(self) -> None:
        changes = self._kube.watch(
            PODS,
            self._namespace,
            labels=names.workers_of(self._name),
            view=pods.view,
            on_trouble=lambda error: self._on_trouble("Pods", error),
        )
        async with contextlib.aclosing(changes):
            async for change in changes:
                match change:
                    case Listed(items):
                        ours = {self._node(p): p for p in items if self._is_ours(p)}
                        for node in self._pods.keys() - ours.keys():
                            self._forget(node)
                        events = [
                            await self._seen(node, p, listed=True) for node, p in ours.items()
                        ]
                        self._facts.put_nowait([*events, NodesListed(frozenset(ours), free=True)])
                    case Changed(seen):
                        if self._is_ours(seen):
                            self._facts.put_nowait([await self._seen(self._node(seen), seen)])
                    case Gone(seen):
                        node = self._node(seen)
                        if self._is_ours(seen) and self._pods.get(node, seen).uid == seen.uid:
                            self._known = False
                            self._forget(node)
                            self._facts.put_nowait(
                                [NodeEnded(node, "its Pod was deleted", free=True)]
                            )

    async def _seen(self, node: NodeId, seen: PodView, *, listed: bool = False) -> Event:
        before = self._pods.get(node)
        if not seen.prepared and not seen.ended:
            if before is None or before.prepared or before.uid != seen.uid:
                self._chore(self._not_starting(node, seen.uid))
            elif before.trouble == "PodNotStarting":
                seen = replace(seen, trouble=before.trouble, message=before.message)
        self._pods[node] = seen
        self._see_to_its_end(node, seen)
        self._known &= not seen.leaving
        self._refusals.pop(node, None)
        self._ring()
        output = ""
        fresh = seen.ended and not (before and before.ended)
        if seen.runs and not (before and before.runs):
            self._turned_away.clear()
        elif fresh and seen.refused_by and not listed:
            self._turned_away.insert(0, f"{node} on {seen.refused_by}: {seen.ended}")
            del self._turned_away[ENDED_KEPT:]
        end = seen.end
        if fresh and end and end.exit_code and not end.words and not listed:  # lists do not wait
            output = await self._last_words(seen, end)
        return pods.fact(node, seen, output)

    def _see_to_its_end(self, node: NodeId, seen: PodView) -> None:
        """A node is gone with its agent. Its Pod holds resources until all containers end."""
        loop = asyncio.get_running_loop()
        if seen.done:
            return
        if seen.deleted and seen.uid not in self._due:
            self._due[seen.uid] = due = loop.time() + seen.grace_s + NOT_ENDING_S
            loop.call_at(due, lambda: self._facts.put_nowait([]))
        elif seen.ended and not seen.deleted and seen.uid not in self._endings:
            task = asyncio.create_task(self._end(node, seen.uid))
            self._endings[seen.uid] = task
            task.add_done_callback(lambda _: self._endings.pop(seen.uid))

    async def _end(self, node: NodeId, uid: str) -> None:
        """Delete a Pod that does not end with its agent."""

        def left() -> PodView | None:
            seen = self._pods.get(node)
            gone = seen is None or seen.uid != uid or seen.done or seen.deleted
            return None if gone or self._orphaned else seen

        right = _deletion_of(names.pod_of(self._name, node))
        while (seen := left()) is not None:
            await asyncio.sleep(LINGER_S if seen.lingers else LINGER_S + seen.allowed_s)
            after = left()
            if after is None or after.lingers != seen.lingers:
                continue
            grace_s = round(max(KILL_S, min(seen.allowed_s, SIDECARS_S)))
            with contextlib.suppress(TransientError):
                async with self._turn():
                    with self._permitted(right), _transient(Forbidden):
                        await self._kube.delete(
                            PODS, seen.name, self._namespace, uid=uid, grace_s=grace_s
                        )
        self._allow(right)

    async def _comes(self, true: Callable[[], bool], within_s: float) -> bool:
        """Wait for what news of Pods bring."""
        try:
            async with asyncio.timeout(within_s if within_s < math.inf else None):
                while not true():
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _not_starting(self, node: NodeId, uid: str) -> None:
        """Only its kubelet knows what the Pod waits for, and says so in events alone."""
        await asyncio.sleep(PREPARED_S)
        seen = self._pods.get(node)
        if seen is None or seen.uid != uid or seen.prepared or seen.ended or seen.trouble:
            return
        more = f"kubectl describe pod {seen.name} has more"
        why = f"no volumes or no network on {seen.host} yet; {more}"
        seen = self._pods[node] = replace(seen, trouble="PodNotStarting", message=why)
        self._facts.put_nowait([pods.fact(node, seen)])

    async def _last_words(self, seen: PodView, end: End) -> str:
        """Other Pods' news wait meanwhile: for a tenth of the time at most."""
        now = asyncio.get_running_loop().time
        if now() < self._no_logs_until:
            return ""
        began = now()
        try:
            async with asyncio.timeout(LOG_S):
                text = await self._kube.log(
                    seen.name, self._namespace, tail=LOG_LINES, container=end.speaker
                )
        except (KubeError, TimeoutError) as error:
            log.info("log_not_read", extra={"pod": seen.name, "why": str(error)})
            return ""
        finally:
            if (took := now() - began) > SLOW_LOG_S:
                self._no_logs_until = now() + 10 * took
        return text.strip()[-2000:]

    def _forget(self, node: NodeId) -> None:
        if (seen := self._pods.pop(node, None)) is not None:
            self._due.pop(seen.uid, None)
        self._ring()

    def _ring(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _is_ours(self, seen: PodView) -> bool:
        return seen.owner == self._site.uid

    def _node(self, seen: PodView) -> NodeId:
        return pods.node_of(self._name, seen.name)

    def _on_trouble(self, what: str, error: KubeError | None) -> None:
        if isinstance(error, Forbidden):
            self._denied[what] = str(error)
            self._doubts(what)
        else:
            self._denied.pop(what, None)
            self._doubted.pop(what, None)
        self._facts.put_nowait([])  # a condition may have changed

    def _doubts(self, what: str) -> bool:
        """Whether this right is missing for so short a time that it may be the server's start."""
        loop = asyncio.get_running_loop()
        if what not in self._doubted:
            self._doubted[what] = loop.time()
            loop.call_later(DOUBT_S, lambda: self._facts.put_nowait([]))
        return loop.time() < self._doubted[what] + DOUBT_S

    # --- create and delete ---

    async def create_node(self, node: NodeId, avoid: Sequence[str] = ()) -> None:
        """Ask until it is there; why it is not yet stands in the conditions and in the node."""
        try:
            problem = await self._create(node, avoid)
            while problem is not None:
                if problem != self._refusals.get(node):
                    log.warning(problem.type, extra={"node": node, "why": problem.message})
                    self._refusals[node] = problem
                    refused = NodeSeen(node, False, message=problem.message, there=False)
                    self._facts.put_nowait([refused])
                async with self._again:
                    await self._wait_for_room()
                    problem = await self._create(node, avoid)
                    self._refused += problem is not None
            self._refused = 0
            self._made.set()
            self._made = asyncio.Event()
        finally:
            self._refusals.pop(node, None)

    async def _wait_for_room(self) -> None:
        """Until it may be another time: after a while, or once any Pod was not refused."""
        wait = BACKOFF_S[min(self._refused // ASKING_AGAIN, len(BACKOFF_S) - 1)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(wait / 2, wait)):
                await self._made.wait()

    async def _create(self, node: NodeId, avoid: Sequence[str]) -> Problem | None:
        """One attempt, which is not interrupted: who deletes the node has to know how it ended."""
        post = self._posts.get(node)
        if post is None:
            post = self._posts[node] = asyncio.create_task(self._post(node, avoid))
            post.add_done_callback(lambda _: self._posts.pop(node))
        return await asyncio.shield(post)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of few at a time. Who is told to come back later keeps its turn until then: a
        thousand nodes bother an API server in trouble no more than a few do."""
        async with self._calls:
            try:
                yield
                self._failures = 0
            except TransientError as error:
                wait = BACKOFF_S[min(self._failures // CALLS, len(BACKOFF_S) - 1)]
                self._failures += 1
                await asyncio.sleep(max(random.uniform(wait / 2, wait), error.retry_after))
                raise

    async def _post(self, node: NodeId, avoid: Sequence[str]) -> Problem | None:
        async with self._turn():
            if not self._known and not self._orphaned:
                # Pods go with their job: it may be that which is being deleted.
                await self._look_after_job()
            if self._orphaned or self._job is None:
                return Problem(GONE, "its ElasticJob was deleted: no more Pods are made")
            job = self._job
            try:
                wish = pods.pod(job, node, self._site, avoid)
                with _transient(ConfigError, AlreadyExists, Invalid, Forbidden, NotFound):
                    made = await self._kube.create(PODS, wish, strict=True)
            except AlreadyExists:
                return await self._what_exists(node)
            except (ConfigError, Invalid, Forbidden) as error:
                problem = _refused(job, error)
                if problem.type != Refusal.RIGHTS:
                    self._doubted.pop(CREATION, None)
                elif self._doubts(CREATION):
                    raise TransientError(str(error)) from error
                return problem
            except NotFound as error:  # the namespace
                return Problem("PodsForbidden", str(error))
        self._doubted.pop(CREATION, None)
        if self._job is job:
            self._judge(None)
        log.info("pod_created", extra={"node": node, "pod": made["metadata"]["name"]})
        if not self._sweeping and sum(p.done for p in self._pods.values()) > ENDED_KEPT:
            self._sweeping = True
            self._chore(self._keep_newest())
        return None

    async def _look_after_job(self) -> None:
        """Find out whether it is still there; one looks for all who want to know."""
        async with self._looking:
            if not self._known and self._job is not None:
                await self._look()

    async def _look(self) -> None:
        with _transient(NotFound):
            try:
                obj = await self._kube.get(ELASTICJOBS, self._name, self._namespace)
            except NotFound:
                self._job = None
                return
        event = self._job_event(obj)
        if isinstance(event, JobStopped):
            self._job = None
        else:
            self._known = True
        if event is not None:
            self._facts.put_nowait([event])

    async def _what_exists(self, node: NodeId) -> Problem | None:
        name = names.pod_of(self._name, node)
        found = await self._get(name)
        if found is None:
            return Problem("NameConflict", f"Pod {name} was there a moment ago; asked again")
        if not self._is_ours(found):
            return Problem(
                "NameConflict",
                f"a Pod {name} exists and is not of this job (its owner is {found.owner or 'none'})"
                "; delete it, or give the job another name",
            )
        if found.ended or found.leaving:  # of a life of this job that no journal tells of
            self._facts.put_nowait([NodeEnded(node, found.ended or found.leaving, free=True)])
        return None

    async def delete_node(self, node: NodeId, grace_s: float) -> None:
        """End a Pod. One that ends by itself within the grace stays for its log; what is left of a
        Pod whose agent has ended is for :meth:`_end`."""
        self._refusals.pop(node, None)
        if (post := self._posts.get(node)) is not None:
            await asyncio.wait([post])
        name = names.pod_of(self._name, node)
        right = _deletion_of(name)
        if await self._ends_by_itself(node, grace_s or LINGER_S):
            self._allow(right)
            return
        async with self._turn():
            with self._permitted(right):
                found = await self._get(name)
                if found is None or not self._is_ours(found):
                    self._facts.put_nowait([NodeEnded(node, "it has no Pod", free=True)])
                elif not (found.ended or self._orphaned or (found.leaving and grace_s > 0)):
                    with _transient(Forbidden):
                        await self._kube.delete(
                            PODS, found.name, self._namespace, uid=found.uid, grace_s=KILL_S
                        )

    @contextlib.contextmanager
    def _permitted(self, what: str) -> Iterator[None]:
        """A right that was taken away is a condition until it is back."""
        try:
            yield
        except Forbidden as error:
            self._on_trouble(what, error)
            raise TransientError(str(error)) from error
        self._allow(what)

    def _allow(self, what: str) -> None:
        """It was allowed, or is not needed any more."""
        if what in self._denied:
            self._on_trouble(what, None)

    async def _get(self, name: str) -> PodView | None:
        with _transient(NotFound, Forbidden):
            try:
                return pods.view(await self._kube.get(PODS, name, self._namespace))
            except NotFound:
                return None

    async def _ends_by_itself(self, node: NodeId, grace_s: float) -> bool:
        """Wait for it: its agent was told to stop."""

        def decided() -> bool:
            seen = self._pods.get(node)
            return seen is None or bool(seen.ended) or not seen.host  # nobody there to be told

        await self._comes(decided, grace_s)
        seen = self._pods.get(node)
        return seen is not None and bool(seen.ended)

    async def _keep_newest(self) -> None:
        """Delete the oldest of the many Pods that have ended, as new ones come: what is there at
        the job's end stays."""
        try:
            ended = [p for p in self._pods.values() if p.done]
            ended.sort(key=lambda p: p.created_at)
            for old in ended[:-ENDED_KEPT]:
                await self._kube.delete(PODS, old.name, self._namespace, uid=old.uid)
        finally:
            self._sweeping = False

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that may fail without harm."""

        async def quietly() -> None:
            try:
                await work
            except KubeError as error:
                log.warning("not_done", extra={"why": str(error)})

        task = asyncio.create_task(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --- publish ---

    async def publish(self, status: JobStatus) -> None:
        """Write the master's part of the status, if it says something new, and the new events."""
        if self._orphaned:
            return  # nobody to tell
        if status.term < self._newest_term:
            # Its agents are to go to the other one: it gives up those that it does not hear of.
            raise Superseded(f"term {self._newest_term} has begun: this master is over")
        conditions = self._conditions(status)
        status = status.model_copy(update={"reason": _why(status, conditions)})
        body = shown(status, conditions, names.workers_of(self._name), self._times)
        gist = _gist(body)
        now = asyncio.get_running_loop().time()
        soon = now - self._told_at < self._progress_s
        if gist == _gist(self._told) and (body == self._told or soon):
            return
        job = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": self._name,
                "namespace": self._namespace,
                "uid": self._site.uid,
            },
            "status": body,
        }
        with _transient(NotFound, Conflict):
            try:
                await self._kube.apply(
                    ELASTICJOBS, job, manager=names.MASTER_MANAGER, subresource="status"
                )
            except (NotFound, Conflict) as error:  # it was deleted, or another one has its name
                log.warning("status_not_written", extra={"why": str(error)})
        for condition in body["conditions"]:
            kind, came = condition["type"], condition["status"] == "True"
            if kind in PROBLEMS and came and self._times.get(kind, ("", ""))[0] != "True":
                self._warnings[kind] = condition
        self._times = {
            c["type"]: (c["status"], c["lastTransitionTime"]) for c in body["conditions"]
        }
        self._told, self._told_at = body, now
        self._to_tell = status.events
        if not self._telling:
            self._telling = True
            self._chore(self._tell_events())

    async def _tell_events(self) -> None:
        """As Kubernetes' own events: a name that grows with the job's, so that none comes twice."""
        try:
            while self._warnings or self._fresh_events():
                if (wait_s := self._events_wait_s()) > 0:
                    await asyncio.sleep(wait_s)
                    continue  # the oldest may be forgotten by now
                self._tellable -= 1
                if self._warnings:
                    kind, condition = next(iter(self._warnings.items()))
                    await self._post_event(self._warning(condition))
                    if self._warnings[kind] is condition:
                        del self._warnings[kind]
                else:
                    event = self._fresh_events()[0]
                    await self._post_event(self._event(event))
                    self._newest_event = event.id
        finally:
            self._telling = False

    def _fresh_events(self) -> list[JobEvent]:
        return [e for e in self._to_tell if e.id > self._newest_event]

    async def _post_event(self, event: Obj) -> None:
        with contextlib.suppress(AlreadyExists):
            await self._kube.create(EVENTS, event)

    def _events_wait_s(self) -> float:
        """Until one may be told (a token bucket, as client-go's recorders have)."""
        now = asyncio.get_running_loop().time()
        more = (now - self._tellable_at) * EVENTS_PER_S
        self._tellable = min(EVENTS_AT_ONCE, self._tellable + more)
        self._tellable_at = now
        return max(0.0, 1 - self._tellable) / EVENTS_PER_S

    def _event(self, event: JobEvent) -> Obj:
        at = rfc3339(event.at)
        return self._kube_event(str(event.id), event.type, event.reason, event.message, at)

    def _warning(self, condition: Obj) -> Obj:
        """The event of a condition of trouble that has become True."""
        kind, since = condition["type"], condition["lastTransitionTime"]
        mark = hashlib.sha256(f"{kind} {since}".encode()).hexdigest()[:10]
        return self._kube_event(mark, "Warning", kind, condition["message"], since)

    def _kube_event(self, mark: str, type_: str, reason: str, message: str, at: str) -> Obj:
        """An event about the ElasticJob.

        Args:
            mark: tells it from the job's other events; the same event has the same mark.
            type_: ``Normal`` or ``Warning``.
            reason: a CamelCase word.
            message: what people read; cut to 1,024 characters.
            at: RFC 3339.
        """
        about = {"namespace": self._namespace}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {**about, "name": f"{self._name}.{self._site.uid[:8]}.{mark}"},
            "involvedObject": {
                **about,
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": self._name,
                "uid": self._site.uid,
            },
            "type": type_,
            "reason": reason,
            "message": message[:EVENT_CHARS],
            "source": {"component": "dlrover-master"},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }

    def _overdue(self) -> list[str]:
        """Pods that were deleted and do not go, in words."""
        now = asyncio.get_running_loop().time()
        return [
            f"{node}: Pod {seen.name} was deleted and still holds resources on "
            f"{seen.host or 'no host'}. If that host is lost for good, delete its Node, or taint "
            "it with node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
            for node, seen in sorted(self._pods.items())
            if not seen.done and now >= self._due.get(seen.uid, math.inf)
        ]

    def _conditions(self, status: JobStatus) -> list[Condition]:
        """The core's, and what the Pods and the API server say."""
        found: dict[str, list[str]] = {}
        if self._template is not None and not self._refusals:
            found[self._template.type] = [self._template.message]
        for node, problem in sorted(self._refusals.items()):
            found.setdefault(problem.type, []).append(f"{node}: {problem.message}")
        for node, seen in sorted(self._pods.items()):
            if seen.trouble and not seen.leaving:
                found.setdefault(seen.trouble, []).append(f"{node}: {seen.message}")
        rests = status.phase.ended or status.phase is JobPhase.SUSPENDED
        if self._turned_away and not rests:
            found["PodsRefused"] = self._turned_away
        if not rests and (overdue := self._overdue()):
            # Later this is for the operator to tell, which stays: ``PodsLeft``.
            found["PodNotEnding"] = overdue
        for what, words in self._denied.items():
            if self._doubts(what):
                continue
            found.setdefault("PermissionDenied", []).append(f"{what}: {words}")
        mine = {}
        for kind in sorted(found.keys() | self._past.keys()):
            said = found.get(kind)
            message = "it is over"
            if said:
                message = said[0] + (f" (and {len(said) - 1} more)" if len(said) > 1 else "")
            old = self._past.get(kind)
            state: Any = "True" if said else "False"
            same = old is not None and old.status == state
            mine[kind] = Condition(
                type=kind,
                status=state,
                reason=kind if said else "Over",
                message=message,
                last_transition_time=(
                    old.last_transition_time if old is not None and same else status.published_at
                ),
            )
        self._past = mine
        return [*status.conditions, *mine.values()]


def _remembered(training: Obj) -> Known:
    """What the status says of earlier masters."""
    ids = [str(node.get("id", "")).removeprefix("n") for node in training.get("nodes") or []]
    numbers = [int(number) for number in ids if number.isdigit()]
    events = [int(event.get("id") or 0) for event in training.get("events") or []]
    term, number = (int(training.get(what) or 0) for what in ("term", "round"))
    return Known(term, number, max(numbers, default=-1), max(events, default=0))


def _deletion_of(pod: str) -> str:
    """A right that may be missing, as a condition tells of it."""
    return f"deletion of Pod {pod}"


def _refused(job: ElasticJob, error: Exception) -> Problem:
    """Which condition a refusal of a Pod is: the server says it in words only."""
    words = str(error)
    if isinstance(error, Forbidden) and "is being terminated" in words:
        return Problem(GONE, words)
    kind = refusal_in(words)
    if kind is None and not isinstance(error, Forbidden):
        return Problem("InvalidTemplate", "; ".join(pods.refusal(job, words).splitlines()))
    return Problem((kind or Refusal.POLICY).value, words)


def shown(
    status: JobStatus,
    conditions: Sequence[Condition],
    selector: str,
    times: Mapping[str, tuple[str, str]],
) -> Obj:
    """The master's part of ``status``, at most 50 kB.

    Args:
        status: all that there is to tell.
        conditions: the core's, and ours.
        selector: of the worker Pods.
        times: status and last transition of each condition as it stands there: an earlier master
            may have seen it come.
    """
    training = Training.of(status).model_dump(mode="json", by_alias=True, exclude_none=True)
    for left_out in ("conditions", "publishedAt"):
        del training[left_out]
    return {
        "conditions": [_condition(c, times, status.generation) for c in conditions],
        "replicas": status.ready - status.standby,
        "selector": selector,
        "training": _finite(training),
    }


def _why(status: JobStatus, conditions: Sequence[Condition]) -> str:
    """The column: what keeps nodes from being there comes before their number."""
    short = status.phase is JobPhase.RUNNING and status.nodes_in_round < status.wanted
    if not (short or status.phase in (JobPhase.PENDING, JobPhase.FORMING)):
        return status.reason
    held = (c for c in conditions if c.type in PROBLEMS and c.status == "True")
    words = [f"{c.type}: {c.message}"[:WHY_CHARS] for c in held]
    return "; ".join([*words[:1], status.reason])


def _finite(value: Any) -> Any:
    """JSON knows no NaN, and the API server refuses the whole status for one."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items() if not _is_odd(v)}
    return [_finite(v) for v in value] if isinstance(value, list) else value


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _condition(condition: Condition, times: Mapping[str, tuple[str, str]], generation: int) -> Obj:
    state, since = times.get(condition.type, ("", ""))
    same = state == condition.status and since
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason or condition.type,
        "message": condition.message[:8192],
        "lastTransitionTime": since if same else rfc3339(condition.last_transition_time),
        "observedGeneration": generation,
    }


def _read_condition(obj: Obj) -> Condition:
    return Condition(
        type=obj["type"],
        status=obj["status"],
        reason=obj.get("reason") or "",
        message=obj.get("message") or "",
        last_transition_time=unix_seconds(obj.get("lastTransitionTime")) or 0.0,
    )


@contextlib.contextmanager
def _transient(*known: type[Exception]) -> Iterator[None]:
    """Whatever the API server has against us, it may think better of it: nothing here ends the
    master. What is ``known`` is seen to by the caller."""
    try:
        yield
    except KubeError as error:
        if isinstance(error, (TransientError, *known)):
            raise
        raise TransientError(str(error)) from error


VOLATILE = ("progress", "goodput", "nodes", "summary")


def _gist(body: Obj) -> Obj:
    """What is told at once when it changes."""
    training = body.get("training") or {}
    return {
        **body,
        "training": {k: v for k, v in training.items() if k not in VOLATILE},
        "summary": {k: v for k, v in (training.get("summary") or {}).items() if k not in VOLATILE},
        "nodes": [(n["id"], n["phase"], n["role"]) for n in training.get("nodes") or []],
    }
