"""A Kubernetes API server in memory, over real HTTP (tests/contracts/test_kube.py checks it).

It has objects, versions and watches, but no kubelet, scheduler or garbage collector. A test acts as
these with :meth:`FakeCluster.put` and :meth:`FakeCluster.remove`.
"""

import asyncio
import base64
import contextlib
import copy
import json
import re
import ssl
import uuid
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from dlrover_py.kubernetes import kinds
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import Kind, Obj
from dlrover_py.protocol.template import faults_of
from tests.process.harness import free_port

API_AUDIENCE = "https://kubernetes.default.svc"
"""Audience of the tokens for the API server itself."""
KINDS = [value for value in vars(kinds).values() if isinstance(value, Kind)]
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.:]*[a-z0-9])?")
_MERGE_KEYS = {
    "conditions": "type",
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "name",
    "ownerReferences": "uid",
}
"""Lists whose items are merged by a key in a server-side apply. Other lists are replaced."""
_WITH_STATUS = {"pods", "deployments", "elasticjobs", "services", "nodes", "namespaces"}

Key = tuple[str, str, str]  # kind's path, namespace, name
Path_ = tuple[str, ...]


class RefusedError(Exception):
    """A refusal of a request, which is sent as a Status object."""

    def __init__(self, code: int, reason: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.code, self.reason, self.retry_after = code, reason, retry_after

    def status(self) -> Obj:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }


@dataclass(frozen=True)
class Call:
    """A request that the server received."""

    method: str
    path: str
    query: dict[str, str]
    body: Any
    at: float
    headers: dict[str, str] = field(repr=False, default_factory=dict)

    @property
    def watch(self) -> bool:
        return "watch" in self.query


@dataclass
class Fault:
    """Refuses the requests that match, a number of times."""

    refusal: RefusedError
    times: int
    method: str
    path: str
    query: str
    watch: bool | None

    def fits(self, call: Call) -> bool:
        return (
            self.times > 0
            and self.method in ("", call.method)
            and self.path in call.path
            and (not self.query or self.query in call.query)
            and self.watch in (None, call.watch)
        )


@dataclass(frozen=True)
class Change:
    """A change of an object, which watches may report."""

    version: int
    key: Key
    before: Obj | None
    after: Obj | None


class FakeCluster:
    """The server; use it with ``async with``.

    Attributes:
        calls: all requests that came in.
        watches: how many watches are open.
        token: the bearer token that is expected.
        stalled: whether all watches are silent, without bookmarks.
        deaf: kinds (plural) whose watches are silent.
        page: largest number of objects in one page of a list.
        bookmark_s: seconds between two bookmarks of a watch that requests them.
        logs: output of each Pod (namespace, name).
        ahead_s: seconds that the server's clock is ahead of this machine's clock.
        warnings: warnings in the reply to each creation.
        users: by token, the user and the audiences of a token (empty: the API server).
        listers: by name of a user, the namespaces whose ElasticJobs the user may list and read (an
            empty one: all).
        readers: by name of a user, namespace and name of single ElasticJobs that the user may read.
        fixed: kinds whose spec cannot be changed.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self.calls: list[Call] = []
        self.watches = 0
        self.token = "admin"
        self.stalled = False
        self.deaf: set[str] = set()
        self.page = 10_000
        self.bookmark_s = 0.5
        self.ahead_s = 0.0
        self.warnings: list[str] = []
        self.logs: dict[tuple[str, str], str] = {}
        self.users: dict[str, tuple[Obj, list[str]]] = {}
        self.listers: dict[str, set[str]] = {}
        self.readers: dict[str, set[tuple[str, str]]] = {}
        self.url = ""
        self._tls, self._port = tls, 0
        self._kinds = {kind.path(): kind for kind in KINDS}
        self.fixed: set[Kind] = set()
        self._objects: dict[Key, Obj] = {}
        self._managers: dict[Key, dict[str, set[Path_]]] = {}
        self._changes: list[Change] = []
        self._version, self._oldest = 100, 0
        self._snapshots: dict[str, tuple[int, list[Obj]]] = {}
        self._faults: list[Fault] = []
        self._gates: list[list[Any]] = []
        self._news = asyncio.Event()
        self._open: dict[web.StreamResponse, Kind] = {}
        self._cut: tuple[int, bytes] = (0, b"")
        self._runner: web.AppRunner | None = None
        for name in ("default", "kube-system"):
            self.put(kinds.NAMESPACES, {"metadata": {"name": name}})

    async def __aenter__(self) -> "FakeCluster":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for gate, *_rest in self._gates:  # left by a test that has failed
            gate.set()
        await self.stop()

    async def start(self) -> None:
        """Listen, at the same port as before: no other program gets it in between."""
        app = web.Application(client_max_size=8 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        app.on_response_prepare.append(self._dated)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        self._port = self._port or free_port()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await site.start()
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        """Break all connections and stop listening."""
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def serve(self, group: str, *kinds_of_it: Kind) -> None:
        """Serve these kinds of an API group, and no others of it."""
        kept = {path: kind for path, kind in self._kinds.items() if kind.group != group}
        self._kinds = kept | {kind.path(): kind for kind in kinds_of_it}

    def kubeconfig(self, path: Path, **user: Any) -> Path:
        """Write a kubeconfig for this server, with its token unless a user is given."""
        return write_kubeconfig(path, {"server": self.url}, user or {"token": self.token})

    def all(self, kind: Kind, namespace: str = "") -> list[Obj]:
        """Return copies of all objects of a kind."""
        return copy.deepcopy(self._of(kind.path(), namespace))

    def gets(self, path: str) -> int:
        """Return how often an object was read."""
        return sum(c.method == "GET" and c.path.endswith(path) for c in self.calls)

    def one(self, kind: Kind, name: str, namespace: str = "default") -> Obj | None:
        """Return a copy of an object; None if it does not exist."""
        space = namespace if kind.namespaced else ""
        return copy.deepcopy(self._objects.get((kind.path(), space, name)))

    def put(self, kind: Kind, obj: Obj) -> Obj:
        """Create or replace an object with its status, without any check."""
        obj = copy.deepcopy(obj)
        meta = obj.setdefault("metadata", {})
        if kind.namespaced:
            meta.setdefault("namespace", "default")
        key = (kind.path(), meta.get("namespace", ""), meta["name"])
        return copy.deepcopy(self._write(kind, key, obj))

    def remove(self, kind: Kind, name: str, namespace: str = "default") -> None:
        """Delete an object immediately."""
        self._remove((kind.path(), namespace if kind.namespaced else "", name))

    def fail(
        self,
        code: int,
        reason: str = "",
        message: str = "made to fail",
        *,
        times: int = 1,
        method: str = "",
        path: str = "",
        query: str = "",
        watch: bool | None = None,
        retry_after: int | None = None,
    ) -> Fault:
        """Refuse the next requests that match. Set ``times`` of the result to 0 to end this.

        Args:
            code: HTTP status.
            reason: reason in the Status object.
            message: message in the Status object.
            times: number of requests to refuse.
            method: HTTP method; empty for any.
            path: part of the path; empty for any.
            query: name of a query parameter; empty for any.
            watch: True for watches only, False for other requests only; None for both.
            retry_after: seconds in the header Retry-After; None for no header.
        """
        fault = Fault(
            RefusedError(code, reason, message, retry_after), times, method, path, query, watch
        )
        self._faults.append(fault)
        return fault

    def hold(self, path: str, *, method: str = "", times: int = 1000) -> asyncio.Event:
        """Delay the next requests that match until the returned event is set.

        Args:
            path: part of the path.
            method: HTTP method; empty for any.
            times: number of requests to delay.
        """
        gate = asyncio.Event()
        self._gates.append([gate, path, method, times])
        return gate

    def cut(self, rest: bytes = b"") -> None:
        """Break the connections of all watches, after sending these bytes."""
        self._cut = (self._cut[0] + 1, rest)
        self._wake()

    def say(self, event: str, obj: Obj) -> None:
        """Send an event to all open watches immediately; that of a job only to those of jobs."""
        for reply, kind in list(self._open.items()):
            if obj.get("kind") in (kind.name, "Status", None):
                asyncio.get_running_loop().create_task(reply.write(_line(event, obj)))

    def compact(self) -> None:
        """Discard all history: older watches and unfinished lists expire."""
        self._version += 1
        self._oldest = self._version
        self._snapshots.clear()

    def _clock(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead_s)

    def _now(self) -> str:
        return self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")

    # --- Requests ---

    async def _dated(self, _: web.Request, reply: web.StreamResponse) -> None:
        reply.headers["Date"] = format_datetime(self._clock(), usegmt=True)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        query = dict(request.query)
        body = json.loads(data) if data else None
        now = asyncio.get_running_loop().time()
        headers = dict(request.headers)
        call = Call(request.method, request.path, query, body, now, headers)
        self.calls.append(call)
        for held in self._gates:
            gate, path, method, times = held
            if path in call.path and method in ("", call.method) and times:
                held[3] -= 1
                await gate.wait()
        try:
            if headers.get("Authorization", "").lower() != f"bearer {self.token}":
                raise RefusedError(401, "Unauthorized", "Unauthorized")
            for fault in self._faults:
                if fault.fits(call):
                    fault.times -= 1
                    raise fault.refusal
            return await self._route(request, call)
        except RefusedError as refusal:
            after = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
            return web.json_response(refusal.status(), status=refusal.code, headers=after)

    async def _route(self, request: web.Request, call: Call) -> web.StreamResponse:
        if found := re.fullmatch(r"/apis/([^/]+)(?:/([^/]+))?", call.path):
            return web.json_response(self._discovery(*found.groups()))
        kind, namespace, name, subresource = self._parse(call.path)
        key = (kind.path(), namespace, name)
        if not name and call.watch:
            return await self._watch(request, kind, namespace, call.query)
        if not name and call.method == "GET":
            return web.json_response(self._list(kind, namespace, call.query))
        if call.method == "POST":
            reply = web.json_response(self._create(kind, namespace, call), status=201)
            unknown = _unknown_fields(call.body) if kind.plural == "pods" else []
            for words in [*self.warnings, *(f'unknown field "{path}"' for path in unknown)]:
                escaped = words.replace("\\", "\\\\").replace('"', '\\"')
                reply.headers.add("Warning", f'299 - "{escaped}"')
            return reply
        if subresource == "log":
            return await self._log(request, key, call.query)
        if subresource == "scale":
            return web.json_response(self._scale(kind, key, call))
        if call.method == "PATCH" and "apply" in call.headers["Content-Type"]:
            return web.json_response(self._apply(kind, key, call, subresource))
        old = self._existing(key)
        if call.method == "GET":
            return web.json_response(old)
        if call.method == "DELETE":
            return web.json_response(self._delete(kind, key, old, call.body or {}))
        if call.method == "PUT" and call.query.get("dryRun"):
            return web.json_response(call.body)
        if call.method == "PUT":
            return web.json_response(self._update(kind, key, call.body, subresource))
        merged = _merged(old, call.body)
        return web.json_response(self._update(kind, key, merged, subresource))

    def _discovery(self, group: str, version: str | None) -> Obj:
        """Return the versions of an API group, or the kinds of one version."""
        kinds = [kind for kind in self._kinds.values() if kind.group == group]
        if version is None and kinds:
            versions = dict.fromkeys(kind.version for kind in kinds)
            return {"versions": [{"version": one} for one in versions]}
        there = [kind for kind in kinds if kind.version == version]
        if not there:
            raise RefusedError(404, "", "404 page not found")
        return {
            "resources": [
                {"name": kind.plural, "kind": kind.name, "namespaced": kind.namespaced}
                for kind in there
            ]
        }

    def _parse(self, path: str) -> tuple[Kind, str, str, str]:
        found = re.fullmatch(
            r"(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+)(?=/.))?/([^/]+)(?:/([^/]+))?(?:/([^/]+))?",
            path,
        )
        kind = self._kinds.get(f"{found[1]}/{found[3]}") if found else None
        if found is None or kind is None:
            raise RefusedError(404, "", "404 page not found")
        return kind, found[2] or "", found[4] or "", found[5] or ""

    def _existing(self, key: Key) -> Obj:
        if key not in self._objects:
            plural = key[0].rpartition("/")[2]
            raise RefusedError(404, "NotFound", f'{plural} "{key[2]}" not found')
        return self._objects[key]

    def _of(self, path: str, namespace: str) -> list[Obj]:
        found = sorted(key for key in self._objects if key[0] == path)
        return [self._objects[key] for key in found if namespace in ("", key[1])]

    def _list(self, kind: Kind, namespace: str, query: dict[str, str]) -> Obj:
        version, rest = self._version, self._of(kind.path(), namespace)
        if token := query.get("continue"):
            if token not in self._snapshots:
                raise RefusedError(410, "Expired", "The provided continue parameter is too old")
            version, rest = self._snapshots[token]
        else:
            rest = [obj for obj in rest if _selected(obj, query)]
        limit = min(int(query.get("limit", 0)), self.page) or len(rest)
        page, rest = rest[:limit], rest[limit:]
        meta: Obj = {"resourceVersion": str(version)}
        if rest:
            meta["continue"] = uuid.uuid4().hex
            self._snapshots[meta["continue"]] = (version, rest)
        return {
            "kind": f"{kind.name}List",
            "apiVersion": kind.api_version,
            "metadata": meta,
            "items": page,
        }

    async def _log(
        self, request: web.Request, key: Key, query: dict[str, str]
    ) -> web.StreamResponse:
        """Send the output of a Pod. The time of each line is its number."""
        if _pod_phase(self._existing(key)) == "Pending":
            words = f'container "main" in pod "{key[2]}" is waiting to start: ContainerCreating'
            raise RefusedError(400, "BadRequest", words)
        reply = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await reply.prepare(request)
        said, cut = 0, self._cut[0]
        try:
            while self._cut[0] == cut:
                news, ended = self._news, _pod_phase(self._objects.get(key)) != "Running"
                lines = self.logs.get(key[1:], "").splitlines(keepends=True)
                first = said or -int(query.get("tailLines", 0))
                for number, line in list(enumerate(lines))[first:]:
                    stamp = f"2026-01-01T00:00:00.{number:09d}Z "
                    if stamp.strip() >= query.get("sinceTime", ""):
                        await reply.write(
                            ((stamp if "timestamps" in query else "") + line).encode()
                        )
                said = len(lines)
                if ended or "follow" not in query:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await news.wait()
            else:
                if request.transport is not None:
                    request.transport.close()
        except ConnectionError:
            pass
        return reply

    def _scale(self, kind: Kind, key: Key, call: Call) -> Obj:
        """Answer a request to ``/scale``, as the CRD maps it."""
        old = self._existing(key)
        if call.method == "PATCH":
            worker = {"worker": {"replicas": call.body["spec"]["replicas"]}}
            old = self._update(kind, key, _merged(old, {"spec": {"replicaSpecs": worker}}), "")
        replicas = old["spec"]["replicaSpecs"]["worker"]["replicas"]
        return {"kind": "Scale", "metadata": old["metadata"], "spec": {"replicas": replicas}}

    # --- Writes ---

    def _review_token(self, asked: Obj) -> Obj:
        """Answer as an API server that knows audiences: a token is for those that it names."""
        user, audiences = self.users.get(asked["spec"]["token"], ({}, []))
        wanted = asked["spec"].get("audiences") or [API_AUDIENCE]
        shared = [one for one in audiences or [API_AUDIENCE] if one in wanted]
        if not user or not shared:
            return asked | {"status": {"user": {}, "error": "invalid bearer token"}}
        return asked | {"status": {"authenticated": True, "user": user, "audiences": shared}}

    def _review_access(self, asked: Obj) -> Obj:
        """Answer whether a user may list or read ElasticJobs; nobody may do anything else."""
        spec, wanted = asked["spec"], asked["spec"]["resourceAttributes"]
        user, space, verb = spec["user"], wanted.get("namespace", ""), wanted["verb"]
        kind = kinds.ELASTICJOBS.group, kinds.ELASTICJOBS.plural
        known = verb in ("get", "list") and (wanted["group"], wanted["resource"]) == kind
        allowed = not self.listers.get(user, set()).isdisjoint(("", space))
        if verb == "get":
            allowed |= (space, wanted.get("name", "")) in self.readers.get(user, set())
        return asked | {"status": {"allowed": known and allowed}}

    def _create(self, kind: Kind, namespace: str, call: Call) -> Obj:
        obj: Obj = copy.deepcopy(call.body)
        if kind is kinds.TOKEN_REVIEWS:
            return self._review_token(obj)
        if kind is kinds.ACCESS_REVIEWS:
            return self._review_access(obj)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        name = meta.get("name") or ""
        if not _NAME.fullmatch(name) or len(name) > 253:
            words = f'{kind.name} "{name}" is invalid: metadata.name: Invalid value: "{name}"'
            raise RefusedError(422, "Invalid", words)
        if kind.namespaced:
            meta["namespace"] = namespace
            self._existing((kinds.NAMESPACES.path(), "", namespace))
        key = (kind.path(), namespace, name)
        if key in self._objects:
            raise RefusedError(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
        if kind.plural in _WITH_STATUS:
            obj.pop("status", None)
        if kind.plural == "pods":
            if call.query.get("fieldValidation") == "Strict" and (unknown := _unknown_fields(obj)):
                named = ", ".join(f'unknown field "{path}"' for path in unknown)
                words = 'Pod in version "v1" cannot be handled as a Pod: strict decoding error: '
                raise RefusedError(400, "BadRequest", words + named)
            _check_pod(obj)
            obj["status"] = {"phase": "Pending"}
        if call.query.get("dryRun"):
            return self._finished(kind, key, obj)
        self._managers[key] = {}
        return self._write(kind, key, obj)

    def _update(self, kind: Kind, key: Key, new: Obj, subresource: str) -> Obj:
        old = self._existing(key)
        meta = new.get("metadata") or {}
        version = meta.get("resourceVersion")
        if version not in (None, "", old["metadata"]["resourceVersion"]):
            words = (
                f'Operation cannot be fulfilled on {kind.plural} "{key[2]}": the object has been '
            )
            raise RefusedError(
                409, "Conflict", words + "modified; please apply your changes to the latest"
            )
        if meta.get("uid") not in (None, "", old["metadata"]["uid"]):
            raise RefusedError(
                409, "Conflict", f'"{key[2]}": Precondition failed: UID in precondition'
            )
        if kind in self.fixed and new.get("spec") != old.get("spec"):
            raise RefusedError(422, "Invalid", "spec: Invalid value: field is immutable")
        if old.get("immutable") and (new.get("stringData") or old.get("data") != new.get("data")):
            words = "data: Forbidden: field is immutable when `immutable` is set"
            raise RefusedError(422, "Invalid", f'Secret "{key[2]}" is invalid: {words}')
        obj = copy.deepcopy(new)
        if subresource:
            obj = copy.deepcopy(old) | {subresource: obj.get(subresource, {})}
        elif kind.plural in _WITH_STATUS:
            obj.pop("status", None)
            if "status" in old:
                obj["status"] = old["status"]
        return self._write(kind, key, obj)

    def _apply(self, kind: Kind, key: Key, call: Call, subresource: str) -> Obj:
        new: Obj = call.body
        uid = (new.get("metadata") or {}).get("uid")
        old = self._objects.get(key)
        if old is None and subresource:
            self._existing(key)
        if old is None and uid:
            raise RefusedError(
                409, "Conflict", f'"{key[2]}": uid mismatch: there is no such object'
            )
        if kind.plural in _WITH_STATUS and not subresource:
            new = {part: value for part, value in new.items() if part != "status"}
        stored = old or self._create(kind, key[1], Call("POST", call.path, {}, new, call.at))
        managers = self._managers.setdefault(key, {})
        manager = f"{call.query['fieldManager']}/{subresource}"
        mine = _leaves(_tree(new))
        theirs = set().union(*(paths for who, paths in managers.items() if who != manager))
        dropped = managers.get(manager, set()) - mine - theirs
        managers[manager] = mine
        if old is None:
            return stored
        before, tree = _tree(old), _laid_over(_tree(old), _tree(new))
        taken = {path for path in mine if _at(before, path) != _at(tree, path)}
        for who, paths in managers.items():
            paths -= taken if who != manager else set()
        for path in dropped:
            _drop(tree, path)
        return self._update(kind, key, _plain(tree), subresource)

    def _delete(self, kind: Kind, key: Key, old: Obj, options: Obj) -> Obj:
        wanted = (options.get("preconditions") or {}).get("uid")
        meta = old["metadata"]
        if wanted not in (None, meta["uid"]):
            words = f"the UID in the precondition ({wanted}) does not match the UID in record"
            raise RefusedError(409, "Conflict", f"Precondition failed: {words} ({meta['uid']})")
        running = (old.get("spec") or {}).get("nodeName")
        graceful = kind.plural == "pods" and options.get("gracePeriodSeconds") != 0
        if graceful or meta.get("finalizers"):
            leaving = copy.deepcopy(old)
            leaving["metadata"].setdefault("deletionTimestamp", self._now())
            if kind.plural == "pods":
                usual = (old.get("spec") or {}).get("terminationGracePeriodSeconds", 30)
                grace = options.get("gracePeriodSeconds", usual if running else 0)
                shortest = min(grace, meta.get("deletionGracePeriodSeconds", grace))
                leaving["metadata"]["deletionGracePeriodSeconds"] = shortest
            written = self._write(kind, key, leaving)
            if running or meta.get("finalizers"):
                return written
        self._remove(key)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _finished(self, kind: Kind, key: Key, obj: Obj) -> Obj:
        """Add the fields that an API server sets."""
        old = self._objects.get(key)
        meta = obj["metadata"]
        was = old["metadata"] if old else {}
        meta["uid"] = was.get("uid") or meta.get("uid") or str(uuid.uuid4())
        meta["creationTimestamp"] = was.get("creationTimestamp") or self._now()
        same_spec = old is None or old.get("spec") == obj.get("spec")
        meta["generation"] = was.get("generation", 1) + (0 if same_spec else 1)
        meta["resourceVersion"] = str(self._version)
        if kind == kinds.SECRETS and "stringData" in obj:
            texts = obj.pop("stringData")
            coded = {name: _base64(text) for name, text in texts.items()}
            obj["data"] = (obj.get("data") or {}) | coded
        if kind == kinds.SERVICES:
            address = f"10.96.0.{len(self._of(kind.path(), '')) + 10}"
            obj.setdefault("spec", {}).setdefault("clusterIP", address)
        return {"kind": kind.name, "apiVersion": kind.api_version} | obj

    def _write(self, kind: Kind, key: Key, obj: Obj) -> Obj:
        before = self._objects.get(key)
        if before is not None and _content(before) == _content(obj):
            return before  # as in the real server, no event follows a write that changes nothing
        self._version += 1
        after = self._finished(kind, key, obj)
        meta = after["metadata"]
        held = before is not None and before["metadata"].get("finalizers")
        if held and meta.get("deletionTimestamp") and not meta.get("finalizers"):
            self._remove(key)
            return after
        self._objects[key] = after
        self._record(Change(self._version, key, before, after))
        return after

    def _remove(self, key: Key) -> None:
        before = self._existing(key)
        del self._objects[key]
        self._managers.pop(key, None)
        self._version += 1
        last = copy.deepcopy(before)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._record(Change(self._version, key, last, None))

    def _record(self, change: Change) -> None:
        self._changes.append(change)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # --- Watches ---

    async def _watch(
        self, request: web.Request, kind: Kind, namespace: str, query: dict[str, str]
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        reply.enable_chunked_encoding()
        await reply.prepare(request)
        self._open[reply] = kind
        self.watches += 1
        cut = self._cut[0]
        try:
            async for data in self._events(kind, namespace, query, cut):
                await reply.write(data)
            if self._cut[0] != cut:
                await reply.write(self._cut[1])
                if request.transport is not None:
                    request.transport.close()
        except ConnectionError:
            pass
        finally:
            self._open.pop(reply, None)
            self.watches -= 1
        return reply

    async def _events(
        self, kind: Kind, namespace: str, query: dict[str, str], cut: int
    ) -> AsyncIterator[bytes]:
        version = int(query["resourceVersion"])
        if version < self._oldest:
            words = f"too old resource version: {version} ({self._oldest})"
            yield _line("ERROR", RefusedError(410, "Expired", words).status())
            return
        place = bisect_right(self._changes, version, key=lambda change: change.version)
        now = asyncio.get_running_loop().time
        end = now() + int(query.get("timeoutSeconds", 3600))
        bookmark_at = now() + self.bookmark_s
        while now() < end and self._cut[0] == cut:
            news = self._news
            if not self.stalled and kind.plural not in self.deaf:
                for change in self._changes[place:]:
                    place, version = place + 1, change.version
                    here = change.key[0] == kind.path() and namespace in ("", change.key[1])
                    if here and (line := _said(change, query)):
                        yield line
                if now() >= bookmark_at and query.get("allowWatchBookmarks"):
                    bookmark_at = now() + self.bookmark_s
                    meta = {"resourceVersion": str(version), "creationTimestamp": None}
                    mark = {"kind": kind.name, "apiVersion": kind.api_version, "metadata": meta}
                    yield _line("BOOKMARK", mark)
            try:
                async with asyncio.timeout_at(min(end, max(bookmark_at, now() + 0.05))):
                    await news.wait()
            except TimeoutError:
                continue


@asynccontextmanager
async def fake_cluster(tmp: Path) -> AsyncIterator[tuple[FakeCluster, KubeClient]]:
    """Run a fake cluster; yield it with a client."""
    async with (
        FakeCluster() as cluster,
        await KubeClient.connect(kubeconfig=cluster.kubeconfig(tmp / "kubeconfig")) as client,
    ):
        yield cluster, client


def write_kubeconfig(path: Path, cluster: Obj, user: Obj, namespace: str = "") -> Path:
    """Write a kubeconfig with one context, ``here``."""
    context = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": context}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(config))
    return path


def _line(event: str, obj: Obj) -> bytes:
    return json.dumps({"type": event, "object": obj}).encode() + b"\n"


def _said(change: Change, query: dict[str, str]) -> bytes:
    """Return the event of a watch for a change.

    An object that no longer matches the selectors is reported as deleted.
    """
    was = change.before is not None and _selected(change.before, query)
    fits = change.after is not None and _selected(change.after, query)
    if change.after is not None and fits:
        return _line("MODIFIED" if was else "ADDED", change.after)
    if was and change.before is not None:
        last = copy.deepcopy(change.before)
        last["metadata"]["resourceVersion"] = str(change.version)
        return _line("DELETED", last)
    return b""


def _selected(obj: Obj, query: dict[str, str]) -> bool:
    labels = obj["metadata"].get("labels") or {}
    wanted = re.split(r",(?![^(]*\))", query.get("labelSelector", ""))
    fields = [part for part in query.get("fieldSelector", "").split(",") if part]
    return all(_label_fits(labels, part.strip()) for part in wanted if part) and all(
        _field_fits(obj, part) for part in fields
    )


def _label_fits(labels: dict[str, str], part: str) -> bool:
    if found := re.fullmatch(r"(\S+) (in|notin) \((.*)\)", part):
        one_of = labels.get(found[1]) in [value.strip() for value in found[3].split(",")]
        return one_of == (found[2] == "in")
    if "!=" in part:
        name, value = part.split("!=")
        return labels.get(name) != value
    if "=" in part:
        name, _, value = part.partition("=")
        return labels.get(name) == value.removeprefix("=")
    return part[1:] not in labels if part.startswith("!") else part in labels


def _field_fits(obj: Obj, part: str) -> bool:
    path, _, value = part.partition("=")
    found: Any = obj
    for step in path.removesuffix("!").split("."):
        found = (found or {}).get(step)
    return ((found or "") == value.removeprefix("=")) != path.endswith("!")


def _pod_phase(obj: Obj | None) -> str:
    return str(((obj or {}).get("status") or {}).get("phase") or "")


def _unknown_fields(pod: Obj) -> list[str]:
    found = faults_of(pod.get("spec") or {}, "spec", "PodSpec")
    return [fault.path for fault in found if fault.unknown]


def _check_pod(obj: Obj) -> None:
    containers = (obj.get("spec") or {}).get("containers")
    missing = "spec.containers: Required value" if not containers else ""
    for number, container in enumerate(containers or ()):
        for part in ("name", "image"):
            if not container.get(part):
                missing = missing or f"spec.containers[{number}].{part}: Required value"
    if missing:
        raise RefusedError(422, "Invalid", f'Pod "{obj["metadata"]["name"]}" is invalid: {missing}')


def _merged(old: Any, patch: Any) -> Any:
    """Merge a JSON merge patch into an object (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    found = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = _merged(found.get(name), value)
    return found


class _Keyed(dict[str, Any]):
    """A list that is merged by a key, as a tree."""


def _tree(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {part: _tree(inner, part) for part, inner in value.items()}
    by = _MERGE_KEYS.get(name)
    if by and isinstance(value, list):
        keys: list[Any] = [item.get(by) if isinstance(item, dict) else None for item in value]
        if None not in keys and len(set(keys)) == len(keys):
            return _Keyed(zip(keys, map(_tree, value), strict=True))
    return copy.deepcopy(value)


def _plain(tree: Any) -> Any:
    if isinstance(tree, _Keyed):
        return [_plain(inner) for inner in tree.values()]
    if isinstance(tree, dict):
        return {part: _plain(inner) for part, inner in tree.items()}
    return tree


def _leaves(tree: Any, path: Path_ = ()) -> set[Path_]:
    """Return the paths of the fields that an object sets."""
    if not isinstance(tree, dict) or not tree:
        return {path}
    return set().union(*(_leaves(inner, (*path, part)) for part, inner in tree.items()))


def _at(tree: Any, path: Path_) -> Any:
    for step in path:
        tree = tree.get(step) if isinstance(tree, dict) else None
    return tree


def _laid_over(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or type(old) is not type(new):
        return new
    for part, value in new.items():
        old[part] = _laid_over(old.get(part), value)
    return old


def _drop(tree: Any, path: Path_) -> None:
    """Remove a field, and the objects that are empty without it."""
    step, *rest = path
    if not isinstance(tree, dict) or step not in tree:
        return
    if rest:
        _drop(tree[step], tuple(rest))
    if not rest or tree[step] == {}:
        del tree[step]


def _content(obj: Obj) -> Obj:
    meta = dict(obj.get("metadata") or {})
    for name in ("resourceVersion", "generation", "uid", "creationTimestamp", "managedFields"):
        meta.pop(name, None)
    body = {part: value for part, value in obj.items() if part not in ("kind", "apiVersion")}
    return body | {"metadata": meta}


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
