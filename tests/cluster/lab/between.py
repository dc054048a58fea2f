"""A proxy between Pods and the API server, which can refuse or delay requests.

It has the certificate of the API server, so clients do not notice it. Kubelets, the scheduler and
tests do not use it. So only the requests of DLRover's Pods are affected.
"""

import asyncio
import base64
import contextlib
import gc
import json
import ssl
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

_HEADERS = ("Authorization", "Content-Type", "Accept", "User-Agent")


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed the proxy."""

    account: str
    """Service account, as ``namespace:name``."""
    verb: str
    """Verb in lower case; for a GET: get, list or watch."""
    path: str
    at: float
    status: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal of matching requests."""

    code: int
    reason: str
    retry_after: int
    verbs: tuple[str, ...]
    path: str

    def fits(self, verb: str, path: str) -> bool:
        return self.path in path and (not self.verbs or verb in self.verbs)


class Between:
    """The proxy, which runs in its own thread."""

    def __init__(self, host: str, upstream: str, cert: Path, key: Path) -> None:
        self.host, self.port = host, 0
        self._upstream = upstream
        self._served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._served.load_cert_chain(cert, key)
        self._trusts = ssl.create_default_context(cafile=str(cert))
        self._calls: list[Call] = []
        self._refusal: Refusal | None = None
        self._silent = False
        self._streams: dict[asyncio.Task[object], Call | None] = {}
        """The tasks of running requests. Tasks whose reply has begun have their request."""
        self._loop = asyncio.new_event_loop()
        self._up, self._stop = threading.Event(), asyncio.Event()
        self._client: aiohttp.ClientSession
        self._thread = threading.Thread(target=self._loop.run_until_complete, daemon=True,
                                        args=(self._run(),))  # fmt: skip

    def __enter__(self) -> "Between":
        self._thread.start()
        if not self._up.wait(60):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()
        with warnings.catch_warnings():
            # Connections in the middle of a handshake are dropped now, not during another test.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    @contextmanager
    def refuses(
        self,
        code: int,
        reason: str = "",
        *,
        retry_after: int = 0,
        verbs: tuple[str, ...] = (),
        path: str = "",
    ) -> Iterator[None]:
        """Refuse matching requests while the block runs. Open watches are broken before.

        Args:
            code: HTTP status.
            reason: reason in the Status object.
            retry_after: seconds in the header Retry-After; 0 for no header.
            verbs: verbs of the requests; empty for all.
            path: part of the path.
        """
        self._refusal = Refusal(code, reason, retry_after, verbs, path)
        self.cut()
        try:
            yield
        finally:
            self._refusal = None

    @contextmanager
    def silences(self) -> Iterator[None]:
        """Make watches silent from their next event in the block on; connections stay open."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    def cut(self) -> None:
        """Break all connections."""
        done = threading.Event()

        def cut() -> None:
            for stream in self._streams:
                stream.cancel()
            done.set()

        self._loop.call_soon_threadsafe(cut)
        done.wait(10)

    def calls(self, account: str, since: float = 0.0) -> list[Call]:
        """Return the requests of an account (``namespace:name``) since a monotonic time."""
        return [c for c in list(self._calls) if c.account == account and c.at >= since]

    def watched(self, account: str) -> list[str]:
        """Return the paths of the open watches of an account."""
        open_now = [c for c in list(self._streams.values()) if c is not None and c.status == 200]
        return [c.path for c in open_now if c.verb == "watch" and c.account == account]

    async def _run(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, self.host, 0, ssl_context=self._served)
        await site.start()
        self.port = runner.addresses[0][1]
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as client:
            self._client = client
            self._up.set()
            await self._stop.wait()
            for stream in self._streams:
                stream.cancel()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        verb = _verb(request)
        refusal, account = self._refusal, _account(request.headers.get("Authorization", ""))
        if refusal is not None and refusal.fits(verb, request.path):
            self._note(account, verb, request.path, refusal.code)
            words = {"code": refusal.code, "reason": refusal.reason, "message": "by a test"}
            body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", **words}
            after = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after else {}
            return web.json_response(body, status=refusal.code, headers=after)
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        url = URL(f"{self._upstream}{request.raw_path}", encoded=True)
        data = await request.read()
        task = asyncio.current_task()
        assert task is not None
        self._streams[task] = None
        try:
            async with self._client.request(
                request.method, url, data=data or None, headers=headers, ssl=self._trusts
            ) as reply:
                self._streams[task] = self._note(account, verb, request.path, reply.status)
                response = web.StreamResponse(status=reply.status)
                response.content_type = reply.content_type
                await response.prepare(request)
                async for chunk in reply.content.iter_any():
                    if self._silent and verb == "watch":
                        await asyncio.Event().wait()  # until the client closes the connection
                    await response.write(chunk)
                await response.write_eof()
                return response
        finally:
            del self._streams[task]

    def _note(self, account: str, verb: str, path: str, status: int) -> Call:
        call = Call(account, verb, path, time.monotonic(), status)
        self._calls.append(call)
        return call


def _verb(request: web.Request) -> str:
    if request.method != "GET":
        return request.method.lower()
    if "watch" in request.query:
        return "watch"
    parts = [p for p in request.path.split("/") if p]
    below = parts[parts.index("namespaces") + 2 :] if "namespaces" in parts else parts[3:]
    return "list" if len(below) == 1 else "get"


def _account(authorization: str) -> str:
    """Return the account that a token names. The API server verifies the token."""
    with contextlib.suppress(ValueError, IndexError, KeyError):
        claims = authorization.split(".")[1]
        said = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
        return str(said["sub"]).removeprefix("system:serviceaccount:")
    return ""
