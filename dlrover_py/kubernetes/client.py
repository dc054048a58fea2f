"""The client of the Kubernetes API server: raw objects, list and watch, apply, create-or-own.

Objects stay the dicts that JSON gives. The official client's models cost fifteen times as much per
event of a watch. The client uses the official client's code for service accounts and OpenID tokens.
It uses aiohttp, which the official client brings, as the transport: a cancelled call or watch ends
immediately (docs/decisions/0007-api-client.md). Both libraries are imported only when a connection
is made (:meth:`KubeClient.connect`), so importing this module costs nothing.
"""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Mapping,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar
from urllib.parse import urlencode

from dlrover_py.kubernetes.auth import ApiAccess, find_access
from dlrover_py.kubernetes.clock import ServerClock
from dlrover_py.kubernetes.errors import (
    AlreadyExistsError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    KubeError,
    LeftoverError,
    NameConflictError,
    NotFoundError,
    ServerDownError,
    UnauthenticatedError,
    refusal_of,
)
from dlrover_py.kubernetes.kinds import PODS, Kind, Obj, meta_of, named
from dlrover_py.kubernetes.watch import Changed, ClientTimes, Gone, Listed, WatchState
from dlrover_py.kubernetes.wire import (
    AnswerLimits,
    encoded,
    json_object,
    json_value,
    split_lines,
    stamped,
    too_long,
    warnings_in,
    watch_event,
)
from dlrover_py.pacing import random_delay_s
from dlrover_py.protocol.errors import (
    ConfigError,
    TransientError,
)
from dlrover_py.protocol.words import without_passwords

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
_Seen = tuple[list[T], str]
"""The objects of a list, and the resource version at which the list was complete."""
_Objs = list[Obj]
_Kinds = list[Kind]
_Views = list[T]

PAGE: Final = 500
"""Number of objects in a page of a list."""
IN_FLIGHT: Final = 64
"""Number of calls at the same time. Further calls wait for their turn, within their own
deadlines. Watches do not count.
"""
_REFUSAL = 1 << 20
"""Largest number of bytes read from the body of a refusal."""
_SECONDS = re.compile(r"[0-9]{1,6}")
"""The form of a ``Retry-After`` header that gives seconds."""
LOG_BYTES = 2**20
"""Largest number of bytes returned by :meth:`KubeClient.log`."""
_BUFFER = 2**20
"""Bytes that aiohttp buffers for each response."""


class KubeClient:
    """A client of one API server. One event loop may make any number of calls at the same time.

    A call for one object uses :attr:`namespace` if none is given. A list or a watch without a
    namespace covers all namespaces. Every call may raise a KubeError:

    * UnauthenticatedError and ForbiddenError: the credentials or the rights are refused.
    * NotFoundError: there is no such object, or no such kind.
    * InvalidError: the server refuses the content of the call.
    * ThrottledError: the server has too many requests.
    * ServerDownError: there is no usable answer within the deadline.
    """

    def __init__(self, access: ApiAccess, times: ClientTimes | None = None) -> None:
        """Store where to connect; no connection is opened. Use :meth:`connect` instead."""
        self._access = access
        self.times = times or ClientTimes()
        self.limits = AnswerLimits()
        self.wall = ServerClock()
        self.on_warning: Callable[[str], None] = lambda _: None
        """Called with the text of each warning that the API server adds to an answer."""
        self._heard_at = time.monotonic()
        self._http: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(IN_FLIGHT)

    @classmethod
    async def connect(
        cls, *, kubeconfig: Path | None = None, context: str | None = None
    ) -> "KubeClient":
        """Find the API server and the credentials, and return a client. No call is made yet.

        Kubeconfigs are read as kubectl reads them (:mod:`dlrover_py.kubernetes.kubeconfig`). Their
        plugin may be run. In a Pod its service account is used, unless a kubeconfig or a context is
        given, or a kubeconfig is found.

        Raises:
            ConfigError: no configuration of a cluster was found, or it cannot be used.
        """
        return cls(await find_access(kubeconfig, context))

    @property
    def namespace(self) -> str:
        """The namespace of the kubeconfig's context, or of the service account."""
        return self._access.namespace

    @property
    def host(self) -> str:
        """URL of the API server."""
        return self._access.host

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer or watch event of the API server.

        Before the first one, they are counted from the creation of the client. An answer with a
        status code from 500 on does not count: a proxy may have sent it.
        """
        return time.monotonic() - self._heard_at

    async def close(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def served(self, group: str) -> tuple[Kind, ...]:
        """Return the kinds that the server has of an API group, those of preferred versions first.

        Args:
            group: name of the group. A group that is not served has no kinds.

        Raises:
            KubeError: the server refuses the call, or does not answer; see :class:`KubeClient`.
        """
        found: _Kinds = []
        try:
            versions = (await self._json("GET", f"/apis/{group}")).get("versions") or ()
        except NotFoundError:
            return ()
        for version in [str(one["version"]) for one in versions]:
            with contextlib.suppress(NotFoundError):  # it has just gone
                there = await self._json("GET", f"/apis/{group}/{version}")
                found += [
                    Kind(group, version, one["name"], one["kind"], bool(one.get("namespaced")))
                    for one in there.get("resources") or ()
                    if "/" not in one["name"]  # a subresource
                ]
        return tuple(found)

    async def get(self, kind: Kind, name: str, namespace: str = "") -> Obj:
        """Return one object.

        Args:
            kind: kind of the object.
            name: name of the object.
            namespace: empty for :attr:`namespace`.

        Raises:
            NotFoundError: there is no such object.
        """
        return await self._json("GET", kind.path(self._in(kind, namespace), name))

    async def list(
        self, kind: Kind, namespace: str = "", *, labels: str = "", fields: str = ""
    ) -> _Objs:
        """Return all objects of a namespace, or of all namespaces. They are read in pages.

        If the pages expire during the read, it begins again, at most twice. An empty list means
        that no object fits.

        Args:
            kind: kind of the objects.
            namespace: empty for all namespaces.
            labels: label selector.
            fields: field selector.

        Raises:
            KubeError: the server refuses the call, or does not answer; see :class:`KubeClient`.
        """
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
            kind: kind of the object.
            obj: the object. If it has no namespace, :attr:`namespace` is used.
            dry_run: only check; nothing is stored.
            strict: refuse unknown fields. Otherwise the server drops them with a warning.
            on_warning: called with this call's warnings instead of :attr:`on_warning`.

        Raises:
            AlreadyExistsError: the name is taken.
            InvalidError: the server refuses the object's content.
            ForbiddenError: a right is missing, or a quota or a policy forbids it.
        """
        path = kind.path(self._in(kind, meta_of(obj).get("namespace", "")))
        query = _write_query(dry_run=dry_run, strict=strict)
        return await self._json("POST", path, query, named(kind, obj), on_warning=on_warning)

    async def create_or_own(
        self, kind: Kind, obj: Obj, owner_uid: str, *, strict: bool = False
    ) -> Obj:
        """Create an object. If its name is taken, return the existing object if the owner owns it.

        An existing object is not changed, even if it differs.

        Args:
            kind: kind of the object.
            obj: the object.
            owner_uid: uid of the object that must own the existing object.
            strict: refuse unknown fields.

        Raises:
            NameConflictError: the existing object has another owner, or none.
            LeftoverError: the existing object belonged to a deleted owner of the same name.
            AlreadyExistsError: the name was free for a moment and was then taken again.
            KubeError: the server refuses the object, or does not answer.
        """
        name, namespace = obj["metadata"]["name"], meta_of(obj).get("namespace", "")
        with contextlib.suppress(AlreadyExistsError):
            return await self.create(kind, obj, strict=strict)
        try:
            return _owned(kind, await self.get(kind, name, namespace), obj, owner_uid)
        except NotFoundError:  # it was deleted in between
            return await self.create(kind, obj, strict=strict)

    async def replace(
        self, kind: Kind, obj: Obj, *, dry_run: bool = False, strict: bool = False
    ) -> Obj:
        """Write a whole object that was read before, or only have the server check it.

        The result is the object as the server then has it, or would have it.

        Args:
            kind: kind of the object.
            obj: the object, with the ``resourceVersion`` that was read.
            dry_run: only check; nothing is stored.
            strict: refuse unknown fields. Otherwise the server drops them with a warning.

        Raises:
            ConflictError: the object has been written since it was read.
            NotFoundError: the object was deleted.
            KubeError: the server refuses the object, or does not answer.
        """
        query = _write_query(dry_run=dry_run, strict=strict)
        return await self._json("PUT", self._path_of(kind, obj), query, named(kind, obj))

    async def apply(self, kind: Kind, obj: Obj, *, manager: str, subresource: str = "") -> Obj:
        """Write these fields of an object (server-side apply) and take over their ownership.

        Fields that the manager owns and that are missing in ``obj`` are removed. A missing object
        is created, unless ``obj`` has a uid or a subresource is written.

        Args:
            kind: kind of the object.
            obj: the object, with the fields to write.
            manager: name of the field manager that owns the fields afterwards.
            subresource: such as ``status``; empty for the object itself.

        Raises:
            NotFoundError: there is no such object, and a subresource is written.
            KubeError: the server refuses the fields, or does not answer.
        """
        query = {"fieldManager": manager, "force": "true"}
        path = self._path_of(kind, obj, subresource)
        return await self._json(
            "PATCH", path, query, named(kind, obj), form="application/apply-patch+yaml"
        )

    async def patch(
        self, kind: Kind, name: str, patch: Obj, namespace: str = "", *, subresource: str = ""
    ) -> Obj:
        """Change these fields of an object with a merge patch; null removes a field.

        Args:
            kind: kind of the object.
            name: name of the object.
            patch: the fields to change.
            namespace: empty for :attr:`namespace`.
            subresource: such as ``scale``; empty for the object itself.

        Raises:
            NotFoundError: there is no such object.
            KubeError: the server refuses the change, or does not answer.
        """
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
        """Order the deletion of an object.

        The object may exist until its processes and the objects that it owns have ended.

        Args:
            kind: kind of the object.
            name: name of the object.
            namespace: empty for :attr:`namespace`.
            uid: delete the object only if it has this uid.
            grace_s: seconds that its processes get to end; None for the object's own period.
            propagation: what happens to the objects that it owns: ``Background``, ``Foreground`` or
                ``Orphan``.

        Returns:
            False if there is no such object, or if the object of this name has another uid.

        Raises:
            ConflictError: the server refuses the deletion though no ``uid`` was given.
            KubeError: the server refuses the deletion for another reason, or does not answer.
        """
        options: Obj = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if propagation:
            options["propagationPolicy"] = propagation
        try:
            await self._call("DELETE", kind.path(self._in(kind, namespace), name), {}, options)
        except NotFoundError:
            return False
        except ConflictError:
            if uid:
                return False
            raise
        return True

    async def log(self, pod: str, namespace: str, *, tail: int, container: str = "") -> str:
        """Return the last lines of a Pod's log, at most 1 MiB; empty if it has none.

        The limit is needed because a progress bar may be one line of any length. Bytes that are not
        UTF-8 are replaced.

        Args:
            pod: name of the Pod.
            namespace: empty for :attr:`namespace`.
            tail: number of lines.
            container: name of the container, if the Pod has several.

        Raises:
            NotFoundError: there is no such Pod.
            InvalidError: the container has not started, or the Pod has several and none is named.
            KubeError: the server refuses the call, or does not answer.
        """
        query = {"tailLines": str(tail), "limitBytes": str(LOG_BYTES)}
        query |= {"container": container} if container else {}
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
        tail: int | None = None,
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield the lines of a Pod's log, each with its time.

        After a broken connection the caller may continue with ``since``. The generator must be
        closed, for example with ``contextlib.aclosing``.

        Args:
            pod: name of the Pod.
            namespace: empty for :attr:`namespace`.
            container: name of the container, if the Pod has several.
            follow: continue until the container ends.
            since: yield only lines newer than this time, which is that of an earlier line; empty
                for all lines.
            tail: yield only so many of the newest lines; None for all.

        Raises:
            NotFoundError: there is no such Pod.
            InvalidError: the container has not started, or the Pod has several and none is named.
            ServerDownError: the connection broke, or without ``follow`` was silent for 90 s.
            KubeError: the server refuses the call.
        """
        query = {"timestamps": "true"} | ({"container": container} if container else {})
        query |= ({"follow": "true"} if follow else {}) | ({"sinceTime": since} if since else {})
        query |= {} if tail is None else {"tailLines": str(tail)}
        path = PODS.path(self._in(PODS, namespace), pod, "log")
        read_s = None if follow else self.times.stall_s
        async with self._reply("GET", path, query, read_s=read_s) as reply:
            rest = b""
            async for chunk in reply.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for stamp, text in map(stamped, lines):
                    if stamp > since:
                        yield stamp, text
            stamp, text = stamped(rest)
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
        on_error: Callable[[KubeError | None], None] = lambda _: None,
    ) -> AsyncGenerator[Listed[T] | Changed[T] | Gone[T], None]:
        """Yield all objects, then each change, indefinitely. No error of the API server ends it.

        An exception of ``view`` or ``on_error`` does end it. After an error of the server the watch
        begins again, with a delay of at most 30 s unless the server asks for more.
        All objects are yielded again when the server no longer has the changes in between. The
        generator must be closed, for example with ``contextlib.aclosing``.

        Args:
            kind: kind of the objects.
            namespace: empty for all namespaces.
            labels: label selector.
            fields: field selector.
            view: returns what is kept of an object. The rest is dropped immediately.
            on_error: called with an error that differs from the last one, and with None when the
                watch works again. Changes in between are reported afterwards. A connection that
                breaks is no error if the next attempt works.
        """
        path, select = kind.path(namespace), _selection(labels, fields)
        state = WatchState(self.times, on_error)
        version = ""
        while True:
            try:
                if not version:
                    items, version = await self._listed(path, select, view)
                    yield Listed(items)
                    del items
                async with contextlib.aclosing(
                    self._events(path, select | {"resourceVersion": version}, state)
                ) as events:
                    async for event, obj in events:
                        version = meta_of(obj).get("resourceVersion") or version
                        if event == "DELETED":
                            yield Gone(view(obj))
                        elif event != "BOOKMARK":
                            yield Changed(view(obj))
                wait_s = state.ended()
            except ExpiredError:
                version, wait_s = "", state.ended()
            except KubeError as error:
                if not isinstance(error, (TransientError, ForbiddenError, UnauthenticatedError)):
                    version = ""  # a new list cures any other refusal
                wait_s = state.failed(error)
            await asyncio.sleep(wait_s)

    async def _events(
        self, path: str, query: Mapping[str, str], state: "WatchState"
    ) -> AsyncGenerator[tuple[str, Obj], None]:
        """Yield the events of one watch until the server ends it, which it does after about 300 s.

        Raises:
            KubeError: the server has sent an error event instead, or the connection breaks.
        """
        limit = str(round(random_delay_s(0.8 * self.times.watch_s, 1.2 * self.times.watch_s)))
        asked = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": limit, **query}
        async with self._reply("GET", path, asked, read_s=self.times.stall_s) as reply:
            state.connected()
            async for line in split_lines(reply.content.iter_any(), self.limits.event_bytes):
                self._heard_at = time.monotonic()
                event, obj = watch_event(line)
                if event == "ERROR":
                    raise refusal_of(int(obj.get("code") or 500), obj, path)
                yield event, obj

    async def _listed(
        self, path: str, select: Mapping[str, str], view: Callable[[Obj], T]
    ) -> _Seen[T]:
        """Return the objects of all pages, and the resource version that they show.

        If the pages expire during the read, it begins again, at most twice. The call sets no
        resourceVersion. With "0" the server would answer from a cache, which may be older than what
        the caller has already seen or done.

        Raises:
            ServerDownError: the list expired three times.
        """
        for limit in (PAGE, PAGE, 0):  # the last attempt is one page, which cannot expire
            with contextlib.suppress(ExpiredError):
                return await self._pages(path, select, view, limit)
        raise ServerDownError(
            f"{self._access.host}{path}: the pages of the list expired while they were read"
        )

    async def _pages(
        self, path: str, select: Mapping[str, str], view: Callable[[Obj], T], limit: int
    ) -> _Seen[T]:
        """Return the objects of all pages of one list, and its resource version.

        Args:
            path: API path of the list.
            select: query parameters of the selectors.
            view: returns what is kept of an object.
            limit: number of objects in a page; 0 for one page with all.

        Raises:
            ExpiredError: the pages expired while they were read.
            KubeError: the server refuses the call, or does not answer.
        """
        found: _Views[T] = []
        query = dict(select) | ({"limit": str(limit)} if limit else {})
        while True:
            page = await self._json("GET", path, query)
            found += map(view, page.get("items") or ())
            meta = meta_of(page)
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
        """Make a call as :meth:`_call` does, and return its answer as an object.

        Raises:
            ServerDownError: there was no complete answer within the deadline, or it is no object.
            KubeError: the server refuses the call.
        """
        data = await self._call(method, path, query or {}, body, form=form, on_warning=on_warning)
        return json_object(data, path)

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
        """Make one call within its deadline, and return the body of the answer.

        The deadline of 30 s includes the wait for one of the 64 turns. A failed call is not
        repeated, except once with new credentials. Warnings of the server are passed on.

        Args:
            method: HTTP method.
            path: API path.
            query: query parameters.
            body: object to send; None for none.
            form: media type of the body.
            on_warning: called with this call's warnings instead of :attr:`on_warning`.

        Raises:
            ServerDownError: there was no complete answer within the deadline, or it is too large.
            KubeError: the server refuses the call.
        """
        data = None if body is None else encoded(body)
        try:
            async with (
                asyncio.timeout(self.times.call_s),
                self._turns,
                self._reply(method, path, query, data, form) as reply,
            ):
                for warning in warnings_in(reply.headers.getall("Warning", ())):
                    (on_warning or self.on_warning)(warning)
                return await _body(reply, path, self.limits.answer_bytes)
        except TimeoutError as error:
            message = f"{self._access.host}: no answer within {self.times.call_s:g} s"
            raise ServerDownError(f"{message} ({method} {path})") from error

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
        """Open a successful reply, with its body unread. Everything else raises an error.

        Refused credentials, or an untrusted certificate, are read again once, and the request is
        repeated. The connection is aborted if the body is not read to its end. A successful reply
        also corrects the clock (:attr:`wall`).

        Args:
            method: HTTP method.
            path: API path.
            query: query parameters.
            data: body to send; None for none.
            form: media type of the body.
            read_s: seconds without data after which the connection counts as broken; None for no
                limit.

        Raises:
            UnauthenticatedError: the new credentials are refused as well or cannot be read, or the
                server's certificate is not trusted.
            ServerDownError: the connection cannot be made, or breaks.
            KubeError: the server refuses the call.
        """
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
                        **self._access.request_options,
                    ) as reply:
                        if reply.status < 500:  # 5xx may come from a proxy that has lost the server
                            self._heard_at = time.monotonic()
                        if reply.status == 401 and refused is None:
                            refused = token  # the token may have been renewed since it was read
                            continue
                        if reply.status >= 300:
                            raise await _error(reply, path)
                        # A proxy in between may have written a refusal or a redirect.
                        self.wall.take_date(
                            reply.headers.get("Date", ""), self._heard_at - asked_at
                        )
                        try:
                            yield reply
                        finally:
                            _abort(reply.connection)
                        return
                except aiohttp.ClientConnectorCertificateError as error:
                    if refused is not None:
                        raise UnauthenticatedError(
                            self._access.distrust(error), status=0
                        ) from error
                    refused = token  # the authority may have been renewed, too
        except ConfigError as error:  # it worked before: a watch waits until it works again
            raise UnauthenticatedError(str(error), status=401, reason="Unauthorized") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerDownError(f"{self._access.host}: {_reason(error)}") from error

    def _session(self) -> "aiohttp.ClientSession":
        """Return the HTTP session; create it on first use."""
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
        """Return the path of an object."""
        meta = obj["metadata"]
        return kind.path(self._in(kind, meta.get("namespace", "")), meta["name"], subresource)

    def _in(self, kind: Kind, namespace: str) -> str:
        """Return the namespace that a call for one object uses."""
        return (namespace or self.namespace) if kind.namespaced else ""


async def _body(reply: "aiohttp.ClientResponse", path: str, most: int) -> bytes:
    """Return the whole body of an answer.

    Raises:
        ServerDownError: the body has more bytes than ``most``. The rest is not read.
    """
    pieces, size = list[bytes](), 0
    async for piece in reply.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise too_long(path, most)
    return b"".join(pieces)


def _response_class() -> "type[aiohttp.ClientResponse]":
    """Return aiohttp's response class with a fix: a cancelled start aborts its connection."""
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
    """Abort the connection of a response that was not read to its end.

    Over TLS an ordinary close would wait for the other side. A connection that was given back
    already is None, and nothing happens.
    """
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


async def _error(reply: "aiohttp.ClientResponse", path: str) -> KubeError:
    """Return the error that an unsuccessful reply stands for. Nothing is raised.

    A body that is no Kubernetes ``Status`` gives its first 200 bytes as the message. A missing
    ``Retry-After``, or one that is a date, counts as 1 s.
    """
    try:
        data = await reply.content.readexactly(_REFUSAL)
    except asyncio.IncompleteReadError as error:
        data = error.partial
    try:
        status = json_value(data)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        status = {"message": data[:200].decode("utf-8", "replace").strip()}
    after = reply.headers.get("Retry-After", "")
    return refusal_of(
        reply.status, status, path, float(after) if _SECONDS.fullmatch(after) else 1.0
    )


def _reason(error: Exception) -> str:
    """Return the reason of a connection error for a person."""
    if isinstance(error, TimeoutError):
        return "no data arrived in time; is it reachable from this machine?"
    cause = getattr(error, "os_error", error)  # aiohttp's own message names its objects
    number = getattr(cause, "errno", None) or 0
    why = os.strerror(number) if number > 0 else getattr(cause, "strerror", None) or str(cause)
    why = without_passwords(why)  # of a proxy
    return f"{why or type(error).__name__}; is it running, and reachable from this machine?"


def _owned(kind: Kind, found: Obj, desired: Obj, owner_uid: str) -> Obj:
    """Return the existing object if the owner owns it; otherwise raise the conflict.

    Raises:
        LeftoverError: an owner of the same kind and name, but with another uid, owns it.
        NameConflictError: it has no owner, or another one.
    """
    meta = meta_of(found)
    owners = meta.get("ownerReferences") or ()
    if any(owner.get("uid") == owner_uid for owner in owners):
        return found
    message = f"{kind.name} {meta.get('namespace', '')}/{meta.get('name')} already exists"
    desired_owners = {
        (o.get("kind"), o.get("name")) for o in meta_of(desired).get("ownerReferences") or ()
    }
    if any((owner.get("kind"), owner.get("name")) in desired_owners for owner in owners):
        raise LeftoverError(
            f"{message}: it belongs to a deleted owner of the same name, and is still to be deleted"
        )
    raise NameConflictError(
        f"{message} and is not owned by {owner_uid}; delete or rename one of the two"
    )


def _write_query(*, dry_run: bool, strict: bool) -> dict[str, str]:
    """Return the query parameters of a write."""
    asked = {"dryRun": "All" if dry_run else "", "fieldValidation": "Strict" if strict else ""}
    return {key: value for key, value in asked.items() if value}


def _selection(labels: str, fields: str) -> dict[str, str]:
    """Return the query parameters of the selectors."""
    asked = {"labelSelector": labels, "fieldSelector": fields}
    return {key: value for key, value in asked.items() if value}


def _whole(obj: Obj) -> Obj:
    """Return the object itself, as a view that keeps everything."""
    return obj
