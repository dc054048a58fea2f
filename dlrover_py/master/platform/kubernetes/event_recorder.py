"""Kubernetes events about the ElasticJob: those of the core, and conditions that became True."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Sequence

from dlrover_py.kubernetes.errors import AlreadyExistsError, InvalidError
from dlrover_py.kubernetes.kinds import EVENTS
from dlrover_py.master.platform.kubernetes.context import JobContext
from dlrover_py.master.platform.kubernetes.pods import Obj
from dlrover_py.pacing import TokenBucket, random_delay_s
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobEvent, rfc3339

log = logging.getLogger("master.kubernetes")

EVENTS_AT_ONCE, EVENTS_PER_S = 100, 1.0
"""Limits of Kubernetes events: at the same time, and per second. More events wait, and the oldest
are left out. A client with the job's token could otherwise cause any number of events."""
EVENT_CHARS = 1024
"""Limit of an event's message, in characters; the API server sets it."""


class EventRecorder:
    """Sends events at a limited rate. Event ids in names prevent duplicates."""

    def __init__(self, context: JobContext) -> None:
        """Start without events."""
        self._context = context
        self._tokens = TokenBucket(EVENTS_PER_S, EVENTS_AT_ONCE, now=0.0)
        """A token for each event that may be sent immediately."""
        self._newest = 0
        """Id of the newest event that was sent."""
        self._events: Sequence[JobEvent] = ()
        """The job's events as they were last published."""
        self._warnings: dict[str, Obj] = {}
        """Conditions of the platform, by type, that became True and have no event yet."""
        self._sending = False

    def skip_to(self, newest: int) -> None:
        """Leave out events up to an id, because an earlier master has sent them."""
        self._newest = newest

    def warn(self, condition: Obj) -> None:
        """Keep a condition that has become True, for an event that :meth:`publish` sends.

        Only the last such condition of each type is kept.
        """
        self._warnings[condition["type"]] = condition

    def publish(self, events: Sequence[JobEvent]) -> None:
        """Start to send those of the job's events that were not sent yet, in the background.

        If a sending task runs, it takes over the new list. Events that are no longer in the list
        are never sent. If the right to make events is missing, the rest waits for the next call.
        """
        self._events = events
        if not self._sending:
            self._sending = True
            self._context.tasks.start(self._send())

    async def record_template(self, warnings: Sequence[str]) -> None:
        """Send the API server's warnings about the template as one event.

        Equal warnings are sent once for a job. The event is not repeated after a refusal.

        Raises:
            KubeError: The API server refuses the event, or does not answer.
        """
        message = f"the API server warns about the Pod template: {'; '.join(warnings)}"
        mark = f"template-{hashlib.sha256(message.encode()).hexdigest()[:16]}"
        at = rfc3339(self._context.kube.wall())
        await self._post(self._event(mark, "Warning", EventReason.TEMPLATE_WARNING, message, at))

    async def _send(self) -> None:
        """Send warnings and new events as Kubernetes events at the limited rate until none is left.

        Conditions that became True are sent before events of the job. While the API server does not
        answer, it tries again. An event whose content is refused is left out with a warning in the
        log. Any other refusal ends the task, and the event stays for the next call of
        :meth:`publish`.

        Raises:
            KubeError: The API server refuses an event for another reason than its content.
        """
        try:
            while self._warnings or self._fresh():
                now = asyncio.get_running_loop().time()
                if (wait_s := self._tokens.wait_s(1, now)) > 0:
                    await asyncio.sleep(wait_s)
                    continue  # the oldest may have been dropped meanwhile
                self._tokens.take(1, now)
                try:
                    await self._send_next()
                except TransientError:
                    longest_s = self._context.timing.event_retry_s
                    await asyncio.sleep(random_delay_s(longest_s / 2, longest_s))
        finally:
            self._sending = False

    async def _send_next(self) -> None:
        """Send the oldest warning, or else the oldest new event; it stays if it cannot be sent now.

        Raises:
            KubeError: The API server does not answer, or refuses any event.
        """
        if self._warnings:
            kind, condition = next(iter(self._warnings.items()))
            await self._post(self._warning(condition))
            if self._warnings[kind] is condition:
                del self._warnings[kind]
            return
        event = self._fresh()[0]
        at = rfc3339(event.at)
        await self._post(self._event(str(event.id), event.type, event.reason, event.message, at))
        self._newest = event.id

    def _fresh(self) -> list[JobEvent]:
        """Return the job's events that were not sent yet."""
        return [e for e in self._events if e.id > self._newest]

    async def _post(self, event: Obj) -> None:
        """Send an event, unless it exists already; log it if its content is refused."""
        try:
            with contextlib.suppress(AlreadyExistsError):
                await self._context.kube.create(EVENTS, event)
        except InvalidError as error:  # the next one may be accepted
            log.warning("event_refused", extra={"event": event["reason"], "why": str(error)})

    def _warning(self, condition: Obj) -> Obj:
        """Return the event for a condition that has become True."""
        kind, since = condition["type"], condition["lastTransitionTime"]
        mark = hashlib.sha256(f"{kind} {since}".encode()).hexdigest()[:10]
        return self._event(mark, "Warning", kind, condition["message"], since)

    def _event(self, mark: str, type_: str, reason: str, message: str, at: str) -> Obj:
        """Return an event about the ElasticJob. Nothing is sent.

        Args:
            mark: Distinguishes the event from the job's other events; equal events have equal
                marks.
            type_: ``Normal`` or ``Warning``.
            reason: A CamelCase word.
            message: The text for people; cut to 1,024 characters.
            at: Time as RFC 3339.
        """
        context = self._context
        about = {"namespace": context.namespace}
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {**about, "name": f"{context.name}.{context.pod_context.uid[:8]}.{mark}"},
            "involvedObject": {
                **about,
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": context.name,
                "uid": context.pod_context.uid,
            },
            "type": type_,
            "reason": reason,
            "message": message[:EVENT_CHARS],
            "source": {"component": "dlrover-master"},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
