"""The client of the Kubernetes API server: raw objects, list and watch, apply, create-or-own.

Objects stay the dicts that JSON gives: the official client's models cost fifteen times as much per
event of a watch. Its service accounts and OpenID tokens are used, and aiohttp, which it brings, is
the transport: a call and a watch end at once when they are cancelled
(docs/decisions/0007-api-client.md). Both are imported by :meth:`Kube.connect` only, so that
naming a kind or an error costs nothing.
"""

import asyncio
import contextlib
import json
import math
import os
import random
import re
import ssl
import tempfile
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    ExitCode,
    TransientError,
    Unauthorized,
    Unreachable,
)
from dlrover_py.protocol.names import GROUP, KIND

if TYPE_CHECKING:
    import aiohttp

    from dlrover_py.kubeconfig import Cluster, Credentials, User

Obj = dict[str, Any]
T = TypeVar("T")
_Seen = tuple[list[T], str]
"""What a list showed, and the version at which it did."""
_Objs = list[Obj]
_Views = list[T]

PAGE: Final = 500
IN_FLIGHT: Final = 64
"""Calls at once; more wait for their turn, within their own deadline. Watches do not count."""
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_S: Final = 60.0
"""A kubeconfig's plugin may have to ask somebody; then it is over."""
_REREAD_S = 60.0
_REREAD_LEAST_S = 1.0
_PLUGIN_SKEW_S = 300.0
"""A plugin is asked again so long before its token expires."""
_LEVELS = 200
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_BUFFER = 2**20
_PROMPT_S = 2.0
"""The date of an answer that took longer says little."""
_STEP_S = 60.0
"""A date that is further from what is believed is believed once the next answer agrees."""
_AGREE_S = 5.0
"""Two answers of one clock are never further apart."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a path of the API is made of."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As an object's ``apiVersion`` says it."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The path of one object, or of all in a namespace, or of all."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", quote(namespace, safe="")]
        parts += [self.plural, *(quote(part, safe="") for part in (name, subresource) if part)]
        return "/".join(parts)


PODS: Final = Kind("", "v1", "pods", "Pod")
SECRETS: Final = Kind("", "v1", "secrets", "Secret")
SERVICES: Final = Kind("", "v1", "services", "Service")
EVENTS: Final = Kind("", "v1", "events", "Event")
NODES: Final = Kind("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = Kind("", "v1", "namespaces", "Namespace", namespaced=False)
SERVICE_ACCOUNTS: Final = Kind("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS: Final = Kind("apps", "v1", "deployments", "Deployment")
ROLES: Final = Kind("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS: Final = Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
NETWORK_POLICIES: Final = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
ELASTICJOBS: Final = Kind(GROUP, "v1alpha1", "elasticjobs", KIND)
CRDS: Final = Kind(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)


class KubeError(DLRoverError):
    """The API server's refusal, in its own words."""

    def __init__(self, words: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(words)
        self.status, self.reason = status, reason


class NotFound(KubeError):
    """There is no such object, or no such kind."""


class AlreadyExists(KubeError):
    """Another object has this name."""


class NameConflict(KubeError):
    """An object that is not ours has this name."""


class Leftover(NameConflict):
    """It is of an object of the same name as ours that was deleted, and is about to go."""


class Conflict(KubeError):
    """The object is no longer as it was when it was read."""


class Forbidden(KubeError):
    """This account may not do it, or a quota or a policy is against it."""


class Unauthenticated(KubeError, Unauthorized):
    """The API server does not know who we are."""

    exit_code = ExitCode.USAGE


class Invalid(KubeError):
    """The object cannot be as it was given."""


class Expired(KubeError):
    """That version of the past is no longer kept."""


LONGEST_RETRY_S = 60.0
"""A proxy that says to come back in an hour is not believed: the journal waits for this."""


class Throttled(KubeError, TransientError):
    """The API server has too much to do.

    A thousand are told the same at the same time, and must not come back as one: what was asked for
    is spread.
    """

    def __init__(self, words: str, *, retry_after: float, reason: str = "") -> None:
        super().__init__(words, status=429, reason=reason)
        self.retry_after = min(retry_after, LONGEST_RETRY_S) * random.uniform(1.0, 1.25)


class ServerDown(KubeError, Unreachable):
    """No answer, or one that says that the API server is in trouble."""


_BY_STATUS: Final[Mapping[int, type[KubeError]]] = {
    400: Invalid,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    408: ServerDown,
    409: Conflict,
    410: Expired,
    422: Invalid,
}


@dataclass(frozen=True, slots=True)
class Listed(Generic[T]):
    """All there is: what is not among them is gone."""

    items: list[T]


@dataclass(frozen=True, slots=True)
class Changed(Generic[T]):
    """One that is new or differs; the same may be said twice."""

    item: T


@dataclass(frozen=True, slots=True)
class Gone(Generic[T]):
    """One that was deleted, as it was at last."""

    item: T


@dataclass(frozen=True, slots=True)
class Times:
    """How patient a client is; other values are for tests."""

    call_s: float = 30.0
    first_wait_s: float = 0.8
    longest_wait_s: float = 30.0
    """Waits after failures are doubled from the first to the longest, and spread by half."""
    denied_s: float = 30.0
    """The longest wait between attempts at what needs a person: a right, an account, a missing CRD.
    The first ones come soon: a server that starts refuses what it is about to allow."""
    watch_s: float = 300.0
    """The server ends a watch after this long, spread by a fifth; the next one goes on."""
    stall_s: float = 90.0
    """A server sends a bookmark each minute: without a byte for this long nobody is there."""
    steady_s: float = 5.0
    """A watch that ends sooner than this counts as a failure: it must not become a hot loop."""


class ServerClock:
    """The time as the API server has it.

    What one machine has stamped is read on another, and the clock of either may be wrong: all
    follow the one whose stamps (``creationTimestamp``) are everywhere. Between two answers it is
    as steady as this machine's monotonic clock; a date tells whole seconds, and corrects what
    contradicts it. One server of several may be wrong itself: a step needs two answers.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """This machine's clock is believed until an answer comes."""
        self._now = now
        self._ahead = time.time() - now()
        self._heard = False
        self._doubted: float | None = None
        """How far ahead the last answer said to be, if that is not believed yet."""

    def __call__(self) -> float:
        """Seconds since 1970."""
        return self._now() + self._ahead

    @property
    def doubtful(self) -> bool:
        """The last answer contradicts what is believed; the next one may decide."""
        return self._doubted is not None

    def told(self, date: str, took_s: float) -> None:
        """An answer had this ``Date``, so long after it was asked for."""
        try:
            said = parsedate_to_datetime(date).timestamp() - self._now()
        except (ValueError, OverflowError):
            return  # a proxy's own
        if took_s > _PROMPT_S:
            return
        ahead = min(max(self._ahead, said), said + 1 + took_s)
        step = self._heard and abs(ahead - self._ahead) > _STEP_S
        if step and (self._doubted is None or abs(ahead - self._doubted) > _AGREE_S):
            self._doubted = ahead
        else:
            self._ahead, self._heard, self._doubted = ahead, True, None


class Kube:
    """Calls one API server; any number of calls at once, from one event loop.

    One object without a namespace is one of :attr:`namespace`; a list or a watch without one is
    of all namespaces.
    """

    def __init__(self, access: "_Access", times: Times | None = None) -> None:
        """Remember who to call; nothing is opened yet. Use :meth:`connect`."""
        self._access = access
        self.times = times or Times()
        self.wall = ServerClock()
        self.on_warning: Callable[[str], None] = lambda _: None
        """Gets each warning that the API server adds to an answer, in its words."""
        self._heard_at = time.monotonic()
        self._http: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(IN_FLIGHT)

    @classmethod
    async def connect(cls, *, kubeconfig: Path | None = None, context: str | None = None) -> "Kube":
        """Find out which API server to call, and as whom. No call is made yet.

        Kubeconfigs are read as kubectl reads them (:mod:`dlrover_py.kubeconfig`). In a Pod its
        service account is used, unless a kubeconfig or a context is given, or one is found.

        Raises:
            ConfigError: nothing says where the cluster is, or what does cannot be used.
        """
        from dlrover_py import kubeconfig as kubeconfigs

        given = [str(kubeconfig)] if kubeconfig else kubeconfigs.files(os.environ)
        access: _Access
        if not kubeconfig and not context and _is_pods(given):
            access = _Account(ACCOUNT, os.environ)
        else:
            access = _Kubeconfig(given, context)
        await access.token()
        return cls(access)

    @property
    def namespace(self) -> str:
        """Of the context, or of the service account."""
        return self._access.namespace

    @property
    def host(self) -> str:
        """URL of the API server."""
        return self._access.host

    @property
    def silent_s(self) -> float:
        """How long ago the API server was last heard, in an answer or in a watch."""
        return time.monotonic() - self._heard_at

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Obj:
        """Return one object.

        Raises:
            NotFound: there is none.
        """
        return await self._json("GET", kind.path(self._in(kind, namespace), name))

    async def list(
        self, kind: Kind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> _Objs:
        """Return all objects of a namespace, or of all namespaces, in pages."""
        items, _ = await self._listed(kind.path(namespace), _selection(labels, fields), _whole)
        return items

    async def create(
        self,
        kind: Kind,
        obj: Obj,
        *,
        dry_run: bool = False,
        strict: bool = False,
        on_warning: Callable[[str], None] | None = None,
    ) -> Obj:
        """Create an object, or only have the server check it.

        Args:
            kind: of which kind.
            obj: the object; its namespace is :attr:`namespace` where it has none.
            dry_run: nothing is stored.
            strict: unknown fields are refused; otherwise the server drops them with a warning.
            on_warning: gets this call's warnings instead of :attr:`on_warning`.

        Raises:
            AlreadyExists: the name is taken.
            Invalid, Forbidden: it cannot be, or may not be.
        """
        path = kind.path(self._in(kind, _meta(obj).get("namespace", "")))
        query = _write_query(dry_run=dry_run, strict=strict)
        return await self._json("POST", path, query, _named(kind, obj), on_warning=on_warning)

    async def create_or_own(
        self, kind: Kind, obj: Obj, owner_uid: str, *, strict: bool = False
    ) -> Obj:
        """Create an object; if its name is taken return what is there, if that owner owns it.

        Args:
            kind: of which kind.
            obj: the object.
            owner_uid: uid of the object that has to own what is there.
            strict: unknown fields are refused.

        Raises:
            NameConflict: what is there is somebody else's.
            Leftover: it is what a deleted owner of the same name has left.
        """
        name, namespace = obj["metadata"]["name"], _meta(obj).get("namespace", "")
        with contextlib.suppress(AlreadyExists):
            return await self.create(kind, obj, strict=strict)
        try:
            return _owned(kind, await self.get(kind, name, namespace), obj, owner_uid)
        except NotFound:  # it went in between
            return await self.create(kind, obj, strict=strict)

    async def replace(
        self, kind: Kind, obj: Obj, *, dry_run: bool = False, strict: bool = False
    ) -> Obj:
        """Write a whole object that was read before, or only have the server check it.

        Args:
            kind: of which kind.
            obj: the object, with the ``resourceVersion`` that was read.
            dry_run: nothing is stored.
            strict: unknown fields are refused.

        Raises:
            Conflict: it has been written since.
        """
        query = _write_query(dry_run=dry_run, strict=strict)
        return await self._json("PUT", self._path_of(kind, obj), query, _named(kind, obj))

    async def apply(self, kind: Kind, obj: Obj, *, manager: str, subresource: str = "") -> Obj:
        """Write these fields of an object as theirs, whoever had them (server-side apply)."""
        query = {"fieldManager": manager, "force": "true"}
        path = self._path_of(kind, obj, subresource)
        return await self._json(
            "PATCH", path, query, _named(kind, obj), form="application/apply-patch+yaml"
        )

    async def patch(
        self, kind: Kind, name: str, patch: Obj, namespace: str = "", *, subresource: str = ""
    ) -> Obj:
        """Change these fields of an object; null removes one (merge patch)."""
        path = kind.path(self._in(kind, namespace), name, subresource)
        return await self._json("PATCH", path, {}, patch, form="application/merge-patch+json")

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_s: int | None = None,
        propagation: str = "",
    ) -> bool:
        """Delete an object; return False if it was gone already, or is another one by now."""
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if propagation:
            options["propagationPolicy"] = propagation
        try:
            await self._call("DELETE", kind.path(self._in(kind, namespace), name), {}, options)
        except NotFound:
            return False
        except Conflict:
            if uid:
                return False
            raise
        return True

    async def log(self, pod: str, namespace: str, *, tail: int, container: str = "") -> str:
        """Return the last lines of a Pod's log."""
        query = {"tailLines": str(tail)} | ({"container": container} if container else {})
        path = PODS.path(self._in(PODS, namespace), pod, "log")
        return (await self._call("GET", path, query)).decode("utf-8", "replace")

    async def log_lines(
        self,
        pod: str,
        namespace: str,
        *,
        container: str = "",
        follow: bool = False,
        since: str = "",
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Say the lines of a Pod's log, each with its time; close it with ``contextlib.aclosing``.

        Args:
            pod: its name.
            namespace: where.
            container: which, if it has several.
            follow: go on until the container ends; a line that breaks ends it as well.
            since: only what is newer than this time, which an earlier line had.
        """
        query = {"timestamps": "true"} | ({"container": container} if container else {})
        query |= ({"follow": "true"} if follow else {}) | ({"sinceTime": since} if since else {})
        path = PODS.path(self._in(PODS, namespace), pod, "log")
        read_s = None if follow else self.times.stall_s
        async with self._reply("GET", path, query, read_s=read_s) as reply:
            rest = b""
            async for chunk in reply.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for stamp, text in map(_stamped, lines):
                    if stamp > since:
                        yield stamp, text
            stamp, text = _stamped(rest)
            if stamp > since:
                yield stamp, text

    async def watch(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        view: Callable[[Obj], T],
        on_trouble: Callable[[KubeError | None], None] = lambda _: None,
    ) -> AsyncGenerator[Listed[T] | Changed[T] | Gone[T], None]:
        """Say what there is, then what changes, for ever; close it with ``contextlib.aclosing``.

        Args:
            kind: of which kind.
            namespace: where; empty means everywhere.
            labels: only those; a label selector.
            fields: only those; a field selector.
            view: what of an object is kept; the rest of it is dropped at once.
            on_trouble: told of a failure that is not the last one's like, and None when all is
                well again. What happened meanwhile is said afterwards.
        """
        path, select = kind.path(namespace), _selection(labels, fields)
        course = _Course(self.times, on_trouble)
        version = ""
        while True:
            try:
                if not version:
                    items, version = await self._listed(path, select, view)
                    yield Listed(items)
                    del items
                async with contextlib.aclosing(
                    self._events(path, select | {"resourceVersion": version}, course)
                ) as events:
                    async for event, obj in events:
                        version = _meta(obj).get("resourceVersion") or version
                        if event == "DELETED":
                            yield Gone(view(obj))
                        elif event != "BOOKMARK":
                            yield Changed(view(obj))
                wait_s = course.ended()
            except Expired:
                version, wait_s = "", course.ended()
            except KubeError as error:
                if not isinstance(error, (TransientError, Forbidden, Unauthenticated)):
                    version = ""  # whatever it does not like about it, a new list is the cure
                wait_s = course.failed(error)
            await asyncio.sleep(wait_s)

    async def _events(
        self, path: str, query: Mapping[str, str], course: "_Course"
    ) -> AsyncGenerator[tuple[str, Obj], None]:
        """One watch, until its server ends it."""
        limit = str(round(self.times.watch_s * random.uniform(0.8, 1.2)))
        asked = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": limit, **query}
        async with self._reply("GET", path, asked, read_s=self.times.stall_s) as reply:
            course.works()
            async for line in _lines(reply.content.iter_any()):
                self._heard_at = time.monotonic()
                event, obj = _event(line)
                if event == "ERROR":
                    raise _refusal(int(obj.get("code") or 500), obj, path)
                yield event, obj

    async def _listed(
        self, path: str, select: Mapping[str, str], view: Callable[[Obj], T]
    ) -> _Seen[T]:
        """All pages, and the version that they show.

        No resourceVersion is given: "0" would be answered from a cache that may lie behind what
        its caller has already seen or done.
        """
        for limit in (PAGE, PAGE, 0):  # the last attempt is in one piece, which cannot expire
            with contextlib.suppress(Expired):
                return await self._pages(path, select, view, limit)
        raise ServerDown(f"{self._access.host}{path}: its pages expire while they are read")

    async def _pages(
        self, path: str, select: Mapping[str, str], view: Callable[[Obj], T], limit: int
    ) -> _Seen[T]:
        found: _Views[T] = []
        query = dict(select) | ({"limit": str(limit)} if limit else {})
        while True:
            page = await self._json("GET", path, query)
            found += map(view, page.get("items") or ())
            meta = _meta(page)
            if not meta.get("continue"):
                return found, str(meta.get("resourceVersion", ""))
            query["continue"] = meta["continue"]

    async def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Obj | None = None,
        *,
        form: str = "application/json",
        on_warning: Callable[[str], None] | None = None,
    ) -> Obj:
        data = await self._call(method, path, query or {}, body, form=form, on_warning=on_warning)
        return _document(data, path)

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Obj | None = None,
        *,
        form: str = "application/json",
        on_warning: Callable[[str], None] | None = None,
    ) -> bytes:
        """One exchange within the deadline."""
        data = None if body is None else _encoded(body)
        try:
            async with (
                asyncio.timeout(self.times.call_s),
                self._turns,
                self._reply(method, path, query, data, form) as reply,
            ):
                for words in _warnings(reply.headers.getall("Warning", ())):
                    (on_warning or self.on_warning)(words)
                return await reply.read()
        except TimeoutError as error:
            words = f"{self._access.host}: no answer within {self.times.call_s:g} s"
            raise ServerDown(f"{words} ({method} {path})") from error

    @contextlib.asynccontextmanager
    async def _reply(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        data: bytes | None = None,
        form: str = "",
        *,
        read_s: float | None = None,
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        """A good reply, whose body is still to be read; everything else is an error in words."""
        import aiohttp
        from yarl import URL

        target = path + (f"?{urlencode(query)}" if query else "")
        limits = aiohttp.ClientTimeout(total=None, sock_connect=self.times.call_s, sock_read=read_s)
        refused = None
        try:
            while True:
                token = await self._access.token(refused)
                headers = [("Authorization", token)] if token else []
                headers += [*self._access.headers, *([("Content-Type", form)] if data else [])]
                asked_at = time.monotonic()
                try:
                    async with self._session().request(
                        method,
                        URL(self._access.host + target, encoded=True),
                        data=data,
                        headers=headers,
                        timeout=limits,
                        allow_redirects=False,
                        **self._access.way,
                    ) as reply:
                        if reply.status < 500:  # else it may be a proxy's that has lost it
                            self._heard_at = time.monotonic()
                        if reply.status == 401 and refused is None:
                            refused = token  # it may have been changed since it was read
                            continue
                        if reply.status >= 300:
                            raise await _error(reply, path)
                        # What is refused or redirected may be by something on the way.
                        self.wall.told(reply.headers.get("Date", ""), self._heard_at - asked_at)
                        try:
                            yield reply
                        finally:
                            _abort(reply.connection)
                        return
                except aiohttp.ClientConnectorCertificateError as error:
                    if refused is not None:
                        raise Unauthenticated(self._access.distrust(error), status=0) from error
                    refused = token  # the authority may have been changed, too
        except ConfigError as error:  # it was usable once, so that a watch waits for its return
            raise Unauthenticated(str(error), status=401, reason="Unauthorized") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerDown(f"{self._access.host}: {_words(error)}") from error

    def _session(self) -> "aiohttp.ClientSession":
        import aiohttp

        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                # Compression costs both ends more than a cluster's network does.
                headers={"Accept": "application/json, */*", "Accept-Encoding": "identity"},
                read_bufsize=_BUFFER,
                response_class=_response_class(),
            )
        return self._http

    def _path_of(self, kind: Kind, obj: Obj, subresource: str = "") -> str:
        meta = obj["metadata"]
        return kind.path(self._in(kind, meta.get("namespace", "")), meta["name"], subresource)

    def _in(self, kind: Kind, namespace: str) -> str:
        return (namespace or self.namespace) if kind.namespaced else ""


def _is_pods(files: Iterable[str]) -> bool:
    """Whether the account of this Pod is meant: no kubeconfig that is here names a context."""
    from dlrover_py import kubeconfig

    readable = [path for path in files if os.access(path, os.R_OK)]
    return "KUBERNETES_SERVICE_HOST" in os.environ and not kubeconfig.read(readable).current


class _Access:
    """Where the API server is, and who we are to it; read again when it may have changed."""

    def __init__(self, where: str) -> None:
        self.host, self.namespace = "", "default"
        self.way: dict[str, Any] = {}
        """How aiohttp gets there: TLS and proxy."""
        self.headers: tuple[tuple[str, str], ...] = ()
        """As whom the user acts."""
        self._where = where
        """What is read, in words."""
        self._token = ""
        self._read_at, self._good_until = -math.inf, -math.inf
        self._stamp: object = None
        self._reading = asyncio.Lock()

    def distrust(self, error: "aiohttp.ClientConnectorCertificateError") -> str:
        """Say that who answers is not to be believed."""
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        expected = f"one by the authority that {self._where} names"
        return f"{self.host}: its certificate is refused: {why}; expected {expected}"

    async def token(self, refused: str | None = None) -> str:
        """Say who we are; all is read again if that was refused.

        Raises:
            ConfigError: it cannot be read, or cannot be used.
        """
        now = asyncio.get_running_loop().time
        if refused is None and now() < self._good_until:
            return self._token
        async with self._reading:
            # Fifty calls that are refused at once must not start a plugin fifty times.
            overtaken = self._token != refused or now() < self._read_at + _REREAD_LEAST_S
            if now() >= self._good_until or not overtaken:
                self._read_at = now()
                await self._read_or_keep(anew=refused is not None)
        return self._token

    async def _read_or_keep(self, *, anew: bool) -> None:
        """What cannot be read for the moment leaves what was read before."""
        try:
            await self._read(anew=anew)
        except ConfigError:
            if anew or self._good_until < 0:  # there is nothing to keep
                raise
            self._good_until = asyncio.get_running_loop().time() + _REREAD_S

    async def _read(self, *, anew: bool) -> None:
        from kubernetes.aio.config import ConfigException

        try:
            way, lasts_s = await self._configuration(anew)
            self._take(way)
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from error
        except (ConfigException, OSError, ValueError, LookupError) as error:
            raise ConfigError(f"{self._where}: {_config_words(error)}") from error
        self._good_until = asyncio.get_running_loop().time() + lasts_s

    async def _configuration(self, anew: bool) -> "tuple[_Way, float]":
        """What is read, and for how long it is good."""
        raise NotImplementedError

    def _take(self, new: "_Way") -> None:
        """Take all of it over, or nothing."""
        host = new.host.rstrip("/")
        if urlsplit(host).scheme not in ("http", "https"):
            raise ValueError(f"server {host!r}: expected https://host:port")
        if new.proxy and urlsplit(new.proxy).scheme not in ("http", "https"):
            raise ValueError(f"proxy {new.proxy!r}: only http:// and https:// can be used")
        stamp = (new.verify, new.authority, new.cert, new.key)
        trust = self.way["ssl"] if stamp == self._stamp else _trust(new)
        way = {"ssl": trust, "server_hostname": new.server_name, "proxy": new.proxy}
        self.host, self._stamp = host, stamp
        self.way = {name: value for name, value in way.items() if value}
        self.headers = new.headers
        self._token = new.authorization.strip()


@dataclass(frozen=True, slots=True)
class _Way:
    """How to call an API server, and as whom; certificates and key as PEM."""

    host: str
    authorization: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    authority: bytes = b""
    """Empty: the authorities of this machine."""
    cert: bytes = b""
    key: bytes = b""
    verify: bool = True
    server_name: str = ""
    proxy: str = ""


class _Account(_Access):
    """A Pod's service account: its token is replaced about each hour, its authority sometimes.

    Within a cluster there is no proxy, whatever the environment has for others.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        super().__init__(f"service account in {folder}")
        self._folder, self._env = folder, env

    async def _configuration(self, anew: bool) -> tuple[_Way, float]:
        from kubernetes.aio.client import Configuration
        from kubernetes.aio.config import incluster_config

        config = Configuration()
        authority = self._folder / "ca.crt"
        incluster_config.InClusterConfigLoader(
            token_filename=str(self._folder / "token"),
            cert_filename=str(authority),
            environ=self._env,
        ).load_and_set(config)
        with contextlib.suppress(FileNotFoundError):
            self.namespace = (self._folder / "namespace").read_text().strip() or "default"
        token = config.api_key.get("BearerToken", "")
        return _Way(config.host, token, authority=authority.read_bytes()), _REREAD_S


class _Kubeconfig(_Access):
    """A context of a kubeconfig, or of several that are merged."""

    def __init__(self, files: Sequence[str], context: str | None) -> None:
        super().__init__(f"kubeconfig {os.pathsep.join(files)}")
        self._files, self._context = files, context
        self._chosen: tuple[Cluster, User] | None = None
        self._said: Credentials | None = None
        """Of a plugin, until it is no longer good."""

    async def _configuration(self, anew: bool) -> tuple[_Way, float]:
        from dlrover_py import kubeconfig

        if anew or self._chosen is None:
            self._chosen, self._said = self._choose(), None
        cluster, user = self._chosen
        proxy = cluster.proxy_url or kubeconfig.environments_proxy(cluster.server, os.environ)
        mine = kubeconfig.known(user)
        lasts_s = _REREAD_S if user.token_file else math.inf
        if mine is None:
            if self._said is None or _left_s(self._said) <= 0:
                self._said = await self._asked(cluster, user, proxy)
            mine, lasts_s = self._said, max(_left_s(self._said), _REREAD_S)
        authority = cluster.authority()
        way = _Way(
            cluster.server,
            mine.authorization,
            tuple(user.headers()),
            *(authority, mine.cert, mine.key),
            verify=not cluster.insecure,
            server_name=cluster.tls_server_name,
            proxy=proxy,
        )
        return way, lasts_s

    def _choose(self) -> "tuple[Cluster, User]":
        from dlrover_py import kubeconfig

        if not any(os.path.exists(path) for path in self._files):
            raise ConfigError(
                "there is no such file; give a kubeconfig, set KUBECONFIG, or run in a Pod"
            )
        context, cluster, user = kubeconfig.read(self._files).choose(self._context)
        kubeconfig.check(cluster, user)
        self.namespace = context.namespace or "default"
        return cluster, user

    async def _asked(self, cluster: "Cluster", user: "User", proxy: str) -> "Credentials":
        from dlrover_py import kubeconfig

        try:
            async with asyncio.timeout(PLUGIN_S):
                if user.exec is not None:
                    return await kubeconfig.ask(user.exec, cluster, proxy, os.environ)
                return kubeconfig.Credentials(await _open_id(user))
        except TimeoutError:
            raise ConfigError(f"its plugin did not end within {PLUGIN_S:g} s") from None


def _left_s(said: "Credentials") -> float:
    """How long credentials are good; for thousands of years where they do not say."""
    return (said.good_until - datetime.now(UTC)).total_seconds() - _PLUGIN_SKEW_S


async def _open_id(user: "User") -> str:
    """The token of a user of an OpenID provider; it is renewed if it has expired."""
    from kubernetes.aio.client import Configuration
    from kubernetes.aio.config import kube_config

    provider = user.auth_provider or {}
    if provider.get("name") != "oidc":
        raise ConfigError(
            f"auth-provider {provider.get('name')!r}: expected oidc; clouds have plugins (exec)"
        )
    entries = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://c"}}],
        "users": [{"name": "u", "user": {"auth-provider": provider}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    config = Configuration()
    await kube_config.KubeConfigLoader(entries).load_and_set(config)
    return str(config.api_key.get("BearerToken", ""))


def _trust(way: _Way) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=way.authority.decode("ascii", "replace") or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 refuses authorities without a key identifier, which old clusters have.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if way.cert:
        with tempfile.TemporaryDirectory() as folder:  # OpenSSL reads files only; they are ours
            cert, key = Path(folder, "cert"), Path(folder, "key")
            cert.write_bytes(way.cert)
            key.write_bytes(way.key)
            context.load_cert_chain(cert, key, password="")
    if not way.verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class _Course:
    """How one watch goes: what to wait after it ended, and what its owner has to know."""

    def __init__(self, times: Times, on_trouble: Callable[[KubeError | None], None]) -> None:
        self._times, self._tell = times, on_trouble
        self._now = asyncio.get_running_loop().time
        self._failures = 0
        self._trouble: tuple[object, ...] | None = None
        self._since: float | None = None

    def works(self) -> None:
        """The server has taken the watch."""
        self._since = self._now()
        if self._trouble is not None:
            self._trouble = None
            self._tell(None)

    def ended(self) -> float:
        """It ended as watches do; return how long to wait."""
        return 0.0 if self._was_steady() else self._backoff()

    def failed(self, error: KubeError) -> float:
        """It failed; return how long to wait."""
        if self._since is not None and isinstance(error, ServerDown) and not error.status:
            return self.ended()  # a line that broke or fell silent; trouble is if none can be had
        self._since = None
        kind = (type(error), error.status, error.reason)
        if kind != self._trouble:
            self._trouble = kind
            self._tell(error)
        if isinstance(error, (Unauthenticated, Forbidden, NotFound)):
            return self._backoff(self._times.denied_s)
        wait_s = self._backoff()
        return max(wait_s, error.retry_after) if isinstance(error, Throttled) else wait_s

    def _was_steady(self) -> bool:
        since, self._since = self._since, None
        steady = since is not None and self._now() - since >= self._times.steady_s
        if steady:
            self._failures = 0
        return steady

    def _backoff(self, longest_s: float | None = None) -> float:
        longest_s = self._times.longest_wait_s if longest_s is None else longest_s
        wait_s = min(longest_s, self._times.first_wait_s * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        return wait_s * random.uniform(0.5, 1.0)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Whole lines of any length; what is cut off at the end is dropped."""
    begun: list[bytes] = []
    async for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        if others:
            yield b"".join(begun)
            begun = [others.pop()]
            for line in others:
                yield line


def _stamped(line: bytes) -> tuple[str, bytes]:
    """The time in front of a line of a log, and the line."""
    stamp, _, text = line.partition(b" ")
    return stamp.decode("ascii", "replace"), text


def _event(line: bytes) -> tuple[str, Obj]:
    document = _document(line, "a watch")
    kind, obj = document.get("type"), document.get("object")
    if not isinstance(kind, str) or not isinstance(obj, dict):
        raise ServerDown("a watch: expected events; is a proxy in between?")
    return kind, obj


def _response_class() -> "type[aiohttp.ClientResponse]":
    import aiohttp

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:
            try:
                return await super().start(connection)
            except BaseException:  # cancelled, above all
                _abort(connection)
                raise

    return Response


def _abort(connection: Any) -> None:
    """Break off what was not read to its end: over TLS a close would wait for the other side."""
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def _encoded(body: Obj) -> bytes:
    """As JSON that is YAML too, which is how the server reads what is applied: YAML does not know
    JSON's pairs of surrogates, and escapes are the only way it takes these others as they are."""
    text = json.dumps(body, ensure_ascii=False)
    return _NOT_YAML.sub(lambda found: _escape(found[0]), text).encode()


def _escape(one: str) -> str:
    half = "\ud800" <= one <= "\udfff"  # of a pair: in no encoding
    return "\ufffd" if half else f"\\u{ord(one):04x}"


def _loads(data: bytes) -> Any:
    """JSON of any depth: what is nested too deep for Python's parser is null.

    An API server stores up to 10,000 levels; one such object must not blind who lists them all.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(data)
    except RecursionError:
        return json.loads(_cut_at(_LEVELS, data))


def _cut_at(levels: int, data: bytes) -> bytes:
    """JSON with null for each mapping or list below so many others."""
    kept: list[bytes] = []
    depth = end = 0
    for token in _BRACKET.finditer(data):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth == levels + 1:
                kept += data[end : token.start()], b"null"
        elif token[0] in (b"]", b"}"):
            if depth == levels + 1:
                end = token.end()
            depth -= 1
    return b"".join([*kept, data[end:]])


def _document(data: bytes, path: str) -> Obj:
    try:
        document = _loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ServerDown(f"{path}: expected JSON, found {data[:80]!r}; is a proxy in between?")
    return document


async def _error(reply: "aiohttp.ClientResponse", path: str) -> KubeError:
    data = await reply.read()
    try:
        said = _loads(data)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        said = {"message": data[:200].decode("utf-8", "replace").strip()}
    after = reply.headers.get("Retry-After", "")
    return _refusal(reply.status, said, path, float(after) if after.isdigit() else 1.0)


def _refusal(code: int, said: Obj, path: str, retry_after: float = 1.0) -> KubeError:
    """The error of a Status, in its words."""
    words = said.get("message") or f"HTTP {code} without a word ({path})"
    reason = said.get("reason") or ""
    if code == 429:
        return Throttled(words, retry_after=retry_after, reason=reason)
    if code == 409 and reason == "AlreadyExists":
        return AlreadyExists(words, status=code, reason=reason)
    kind = _BY_STATUS.get(code, ServerDown if code >= 500 else KubeError)
    return kind(words, status=code, reason=reason)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "nothing came for too long; is it reachable from here?"
    cause = getattr(error, "os_error", error)  # aiohttp's own words name its objects
    number = getattr(cause, "errno", None) or 0
    why = os.strerror(number) if number > 0 else getattr(cause, "strerror", None) or str(cause)
    return f"{why or type(error).__name__}; is it up, and reachable from here?"


def _config_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _owned(kind: Kind, found: Obj, wish: Obj, owner_uid: str) -> Obj:
    meta = _meta(found)
    owners = meta.get("ownerReferences") or ()
    if any(owner.get("uid") == owner_uid for owner in owners):
        return found
    words = f"{kind.name} {meta.get('namespace', '')}/{meta.get('name')} is there already"
    ours = {(o.get("kind"), o.get("name")) for o in _meta(wish).get("ownerReferences") or ()}
    if any((owner.get("kind"), owner.get("name")) in ours for owner in owners):
        raise Leftover(f"{words}: what a deleted one of the owner's name has left is not gone yet")
    raise NameConflict(f"{words}, and is not owned by {owner_uid}; delete or rename one of the two")


def _write_query(*, dry_run: bool, strict: bool) -> dict[str, str]:
    asked = {"dryRun": "All" if dry_run else "", "fieldValidation": "Strict" if strict else ""}
    return {key: value for key, value in asked.items() if value}


def _warnings(headers: Iterable[str]) -> Iterator[str]:
    """The words of ``Warning`` headers (RFC 7234), as Kubernetes sends them."""
    for header in headers:
        for words in _WARNING.findall(header):
            yield re.sub(r"\\(.)", r"\1", words)


def _selection(labels: str, fields: str) -> dict[str, str]:
    asked = {"labelSelector": labels, "fieldSelector": fields}
    return {key: value for key, value in asked.items() if value}


def _named(kind: Kind, obj: Obj) -> Obj:
    return {"apiVersion": kind.api_version, "kind": kind.name} | obj


def _meta(obj: Obj) -> Obj:
    return obj.get("metadata") or {}


def _whole(obj: Obj) -> Obj:
    return obj
