"""The sessions of viewers of the operator's pages, and the jobs that each viewer may see.

The API server answers both questions. A viewer is whom a token belongs to (TokenReview). What the
viewer may see is what the viewer's own rights say (SubjectAccessReview), not those of the operator.
"""

import asyncio
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import NotFoundError
from dlrover_py.kubernetes.kinds import ACCESS_REVIEWS, ELASTICJOBS, TOKEN_REVIEWS, Obj

AUDIENCE = "dlrover-dashboard"
"""Audience of tokens that open these pages, and nothing else."""
SESSION_S = 3600.0
"""Seconds until a viewer has to send a token again."""
ALLOWED_S, REFUSED_S = 5.0, 30.0
"""Seconds for which an answer counts that allows, or refuses. Most viewers may see few of many
namespaces, so refusals are asked about less often."""
ANSWERS = 1000
"""Most answers that a session keeps. A name has 253 characters at most."""
SESSIONS_OF_VIEWER = 10
"""Most sessions of one viewer; the oldest ends."""
SESSIONS = 1000
"""Most sessions of all viewers; for a further one, a session of whoever has most of them ends."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
"""A name that an object of Kubernetes may have (DNS subdomain)."""
REVIEWS, TOKEN_REVIEWS_AT_ONCE = 8, 2
"""Most questions to the API server at a time, so that the operator's own calls have room. Those
about tokens have turns of their own: whoever sends many wrong ones delays nobody's pages."""
TOKENS = 16
"""Most tokens that are checked or wait for it; further ones are refused."""


class TooManyTokensError(Exception):
    """Many tokens of other viewers are being checked: this one was not, and may be sent again."""


@dataclass(slots=True)
class ViewerSession:
    """A viewer that has shown a token."""

    viewer: str
    """Name of the user."""
    subject: Obj
    """The user as a SubjectAccessReview names one: user, uid, groups and extra."""
    until: float
    """When the session ends, on the clock of :class:`Viewers`."""
    answers: dict[tuple[str, str], tuple[bool, float]] = field(default_factory=dict)
    """Whether the jobs of a namespace may be listed, or a job of this name be read, and until when
    this answer counts. By namespace and name; an empty name stands for a list."""
    streams: int = 0
    """Number of its streams that are open."""


class Viewers:
    """The sessions of all viewers. A token is not kept, and of a session's secret only the hash."""

    def __init__(self, api: KubeClient, clock: Callable[[], float]) -> None:
        """Begin without sessions.

        Args:
            api: client of the API server. Its user may create TokenReviews and
                SubjectAccessReviews.
            clock: seconds of a clock that never goes back.
        """
        self._api, self._clock = api, clock
        self._sessions: dict[str, ViewerSession] = {}
        self._turns = asyncio.Semaphore(REVIEWS - TOKEN_REVIEWS_AT_ONCE)
        self._token_turns = asyncio.Semaphore(TOKEN_REVIEWS_AT_ONCE)
        self._tokens = 0

    async def enter(self, token: str) -> tuple[str, ViewerSession] | None:
        """Begin a session; return its secret and the session, or None for a token of no user.

        The oldest of a user's ten sessions ends. If there are :data:`SESSIONS` of all users, the
        oldest one of the user with most of them ends, so that nobody can keep others out.

        Args:
            token: a bearer token, for :data:`AUDIENCE` or for the API server.

        Raises:
            KubeError: the API server refuses the question, or does not answer.
            TooManyTokensError: many other tokens are being checked.
        """
        if self._tokens >= TOKENS:
            raise TooManyTokensError
        self._tokens += 1
        try:
            async with self._token_turns:
                user = await self._user_of(token)
        finally:
            self._tokens -= 1
        if user is None:
            return None
        self._forget_ended()
        name = str(user["username"])
        own = [key for key, session in self._sessions.items() if session.viewer == name]
        for key in own[: max(0, len(own) - SESSIONS_OF_VIEWER + 1)]:  # the oldest is the first
            del self._sessions[key]
        if len(self._sessions) >= SESSIONS:
            most = Counter(one.viewer for one in self._sessions.values()).most_common(1)[0][0]
            del self._sessions[next(k for k, one in self._sessions.items() if one.viewer == most)]
        subject = {"user": name} | {k: user[k] for k in ("uid", "groups", "extra") if user.get(k)}
        secret = secrets.token_urlsafe(32)
        session = ViewerSession(name, subject, self._clock() + SESSION_S)
        self._sessions[_hash(secret)] = session
        return secret, session

    def session(self, secret: str) -> ViewerSession | None:
        """Return the session of a secret; None if there is none, or if it has ended."""
        found = self._sessions.get(_hash(secret))
        return found if found is not None and self._clock() < found.until else None

    def leave(self, secret: str) -> None:
        """End the session of a secret, if there is one."""
        self._sessions.pop(_hash(secret), None)

    async def visible(self, session: ViewerSession, namespaces: Iterable[str]) -> set[str]:
        """Return those of the namespaces whose ElasticJobs the viewer may list.

        Raises:
            KubeError: the API server refuses the question, or does not answer.
        """
        wanted = set(namespaces)
        if await self._may(session, "list", ""):
            return wanted
        asked = sorted(wanted)
        answers = await asyncio.gather(*(self._may(session, "list", space) for space in asked))
        return {space for space, may in zip(asked, answers, strict=True) if may}

    async def job(self, session: ViewerSession, namespace: str, name: str) -> Obj | None:
        """Return an ElasticJob; None if there is none, or if the viewer may not read it.

        Args:
            session: the viewer's session.
            namespace: namespace of the job.
            name: name of the job.

        Raises:
            KubeError: the API server refuses a call, or does not answer.
        """
        if not (_NAME.fullmatch(namespace) and _NAME.fullmatch(name)):
            return None
        if not await self._may(session, "get", namespace, name):
            return None
        async with self._turns:
            try:
                return await self._api.get(ELASTICJOBS, name, namespace)
            except NotFoundError:
                return None

    async def _may(self, session: ViewerSession, verb: str, namespace: str, name: str = "") -> bool:
        """Return whether a viewer may list the jobs of a namespace, or read one.

        Args:
            session: the viewer's session, which keeps the answer for a while.
            verb: ``list``, or ``get`` with a name.
            namespace: empty for all namespaces.
            name: name of the job.
        """
        now = self._clock()
        known = session.answers.get((namespace, name))
        if known is not None and now < known[1]:
            return known[0]
        if len(session.answers) >= ANSWERS:
            session.answers.clear()
        wanted = {
            "verb": verb,
            "group": ELASTICJOBS.group,
            "resource": ELASTICJOBS.plural,
            "namespace": namespace,
            "name": name,
        }
        spec = session.subject | {"resourceAttributes": {k: v for k, v in wanted.items() if v}}
        async with self._turns:
            asked_at = self._clock()
            answer = await self._api.create(ACCESS_REVIEWS, {"spec": spec})
        may = (answer.get("status") or {}).get("allowed") is True
        until = asked_at + (ALLOWED_S if may else REFUSED_S)
        session.answers[namespace, name] = may, until
        return may

    async def _user_of(self, token: str) -> Obj | None:
        """Return the user that a token belongs to; None if it belongs to none.

        A server that does not know audiences leaves them out of its answer, and then the token is
        one for the API server. So the first answer counts only if it names the audience.
        """
        if not token:
            return None
        for audiences in ([AUDIENCE], None):
            spec: Obj = {"token": token}
            if audiences is not None:
                spec["audiences"] = audiences
            answer = await self._api.create(TOKEN_REVIEWS, {"spec": spec})
            status = answer.get("status") or {}
            named = audiences is None or AUDIENCE in (status.get("audiences") or ())
            user = status.get("user") or {}
            if status.get("authenticated") is True and named and user.get("username"):
                return dict(user)
        return None

    def _forget_ended(self) -> None:
        """Drop the sessions that have ended."""
        now = self._clock()
        self._sessions = {k: one for k, one in self._sessions.items() if now < one.until}


def _hash(secret: str) -> str:
    """Return what is kept of a session's secret."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
