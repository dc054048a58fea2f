"""The dashboard's HTTP server: pages, their changes as one event stream, and actions.

Nobody sees a page without access. The link that is printed at the start has a token. It is
exchanged for a cookie that scripts cannot read and that other sites cannot send. An action is a
POST with the session's second secret, which only our own pages have.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol
from urllib.parse import parse_qs, quote
from weakref import WeakValueDictionary

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from markupsafe import Markup
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlrover_py.dashboard import curves, logs, pages
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.job_view import JobView, LogTail
from dlrover_py.protocol.local import History
from dlrover_py.protocol.status import EvidenceManifest
from dlrover_py.protocol.words import plain

log = logging.getLogger("dashboard")

COOKIE = "dlrover-session"
MAX_FORM_BYTES = 4096
ACTIONS = ("scale", "suspend", "resume", "restart", "drain", "stacks", "checkpoint")
"""What a page can ask of a job."""
NODE_ACTIONS = ("drain", "stacks")
"""What the page of a node can ask for."""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # else nginx keeps an event until its buffer is full
}
"""Headers of every answer: nothing is loaded from elsewhere, framed, or kept."""
QUIET = 5
"""Greatest factor of the pause after looks at a job that have found nothing new."""
PICTURES_S = 5.0
"""Least seconds between two announcements of a picture, which is large."""
SECTION_BYTES_PER_S = 2048
"""A viewer loads no more of one section than that, however large it is."""
LAST_LOOK_S = 0.5
"""Seconds that the last look at a job may take, for the last words of a page. The server waits for
its streams for a second."""
PING_S = 20.0
"""Seconds without a change after which the event stream sends a comment, so that it stays open."""


class ListRow(Protocol):
    """One job in the list."""

    @property
    def name(self) -> str:
        """Name of the job."""

    @property
    def phase(self) -> str:
        """Its phase."""


class ShownJobs(Protocol):
    """The jobs that are shown, and changed. All calls may block; each runs in a thread.

    Every method may raise :class:`DLRoverError`, whose words the page shows.
    """

    @property
    def where(self) -> str:
        """The place of the jobs, such as ``on this machine``."""

    @property
    def can_drain(self) -> bool:
        """Whether :meth:`change` can drain a node. In a cluster, its host is drained instead."""

    def rows(self) -> Sequence[ListRow]:
        """Return the jobs, running ones first."""

    def runs(self, name: str) -> Sequence[str]:
        """Return the names of the runs of a job, newest first, each of which has a page."""

    def load(self, name: str) -> tuple[JobView, History]:
        """Return what is known of a job."""

    def change(self, name: str, action: str, value: str) -> str:
        """Do what a page asks for; return a sentence about the new state.

        Args:
            name: Name of the job.
            action: One of :data:`ACTIONS`.
            value: What the form says: a number of nodes, or a node; else empty.
        """

    def log_tail(self, name: str, node: str, rank: int | None) -> LogTail:
        """Return the newest lines that a node's workers have printed.

        Args:
            name: Name of the job.
            node: Id of the node.
            rank: The only global rank; None for all of the node.
        """

    def evidence(
        self, name: str, node: str
    ) -> tuple[Sequence[EvidenceManifest], NodeSnapshot | None]:
        """Return the bundles of evidence, the oldest first, and the newest stacks of a node."""


class Access:
    """The secrets of one dashboard, and the check of a request against them."""

    def __init__(self) -> None:
        """Draw the secrets."""
        self.token = secrets.token_urlsafe(32)
        self._cookie, self.csrf = (self._derived(use) for use in ("cookie", "csrf"))
        # Browsers tell no port of a machine from another: a second dashboard has its own cookie.
        self.cookie_name = f"{COOKIE}-{self._derived('name')[:8]}"

    def _derived(self, use: str) -> str:
        """Return a secret that does not tell the token."""
        return hmac.new(self.token.encode(), use.encode(), hashlib.sha256).hexdigest()

    def enter(self, token: str, to: str, *, path: str, secure: bool) -> Response | None:
        """Return the answer that sets the cookie, or None if the token is wrong.

        Args:
            token: What was sent.
            to: Where the browser goes then.
            path: Path of the cookie.
            secure: Send the cookie over TLS only.
        """
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return None
        answer = RedirectResponse(to, status_code=303)
        answer.set_cookie(
            self.cookie_name,
            self._cookie,
            httponly=True,
            samesite="strict",
            path=path,
            secure=secure,
        )
        return answer

    def known(self, request: Request) -> bool:
        """Return whether a request has the cookie."""
        sent = request.cookies.get(self.cookie_name, "")
        return hmac.compare_digest(sent.encode(), self._cookie.encode())

    def confirmed(self, sent: str) -> bool:
        """Return whether a form came from one of our own pages."""
        return hmac.compare_digest(sent.encode(), self.csrf.encode())


def pause_after(pause_s: float, poll_s: float, changed: Collection[str]) -> float:
    """Return the pause after a look at a job: longer with each one that has found nothing new.

    The pictures change with the clock alone, so a change of theirs is nothing new.

    Args:
        pause_s: The pause before it, in seconds.
        poll_s: The least pause, in seconds.
        changed: Names of the sections that have changed.
    """
    if set(changed).difference(pages.PICTURES):
        return poll_s
    return min(pause_s + poll_s, QUIET * poll_s)


Changes = tuple[list[str], str]
"""Names of sections that have changed, and the revision of that change."""


class SectionWatch:
    """Looks at one job while somebody watches it, and tells which sections have changed.

    Each change has a revision. A viewer says which one its page has, so nobody misses a change:
    neither between a page and its stream, nor while the connection was lost.
    """

    def __init__(self, load: Callable[[], Awaitable[pages.JobPage]], poll_s: float) -> None:
        self._load, self._poll_s = load, poll_s
        self._name, self._revision = secrets.token_hex(4), 0
        self._revised: dict[str, int] = {}
        """The revision of the last change of each section."""
        self._digests: dict[str, str] = {}
        self._told_at: dict[str, float] = {}
        self._queues: set[asyncio.Queue[Changes | None]] = set()
        self._asked = asyncio.Event()
        """Set by :meth:`look_now`."""
        self._task: asyncio.Task[None] | None = None
        self._page: pages.JobPage | None = None
        self.sections: dict[str, str] = {}
        """The newest sections, each made once for all viewers."""

    @property
    def page(self) -> pages.JobPage | None:
        """The newest page; None if nobody watches, or the last look has failed."""
        return self._page

    @property
    def is_watched(self) -> bool:
        """Whether somebody watches."""
        return bool(self._queues)

    @property
    def revision(self) -> str:
        """The newest revision, for :meth:`changes`."""
        return f"{self._name}-{self._revision}"

    async def changes(self, since: str) -> AsyncGenerator[Changes, None]:
        """Yield the sections that have changed, with the revision; no sections now and then.

        It ends with :meth:`close`.

        Args:
            since: The revision of the viewer's page. For that of another watch, or none, all
                sections count as changed.
        """
        name, _, number = since.partition("-")
        known = int(number) if name == self._name and re.fullmatch("[0-9]{1,15}", number) else -1
        missed = [section for section, revision in self._revised.items() if revision > known]
        queue: asyncio.Queue[Changes | None] = asyncio.Queue()
        self._queues.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            if missed:
                yield missed, self.revision
            while True:
                try:
                    changed = await asyncio.wait_for(queue.get(), PING_S)
                except TimeoutError:
                    changed = [], ""
                if changed is None:
                    return
                yield changed
        finally:
            self._queues.discard(queue)
            if not self._queues and self._task is not None:
                self._task.cancel()
                self._task = self._page = None
                self.sections = {}

    def look_now(self) -> None:
        """Look at the job at once, and then as often as after a change: somebody has changed it."""
        self._asked.set()

    def close(self) -> None:
        """End the streams of all viewers."""
        for queue in self._queues:
            queue.put_nowait(None)

    async def _run(self) -> None:
        pause_s = self._poll_s
        while True:
            try:
                self._page = page = await self._load()
                self._render(page)
                news = self.sections
            except Exception as error:  # the next look may succeed, and viewers must hear of it
                if not isinstance(error, DLRoverError):
                    log.exception("page_failed")
                self._page, self.sections, news = None, {}, {"head": str(error)}
                # Who asks for a section now gets an error in its place, so all are told again.
                self._digests = {"head": self._digests.get("head", "")}
            changed = self._changed(news)
            for queue in self._queues if changed else ():
                queue.put_nowait((changed, self.revision))
            pause_s = pause_after(pause_s, self._poll_s, changed)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), pause_s)
                self._asked.clear()
                pause_s = 0.0

    def _render(self, page: pages.JobPage) -> None:
        """Make the sections anew that may be announced now. The others stay as they are."""
        for name in pages.SECTIONS:
            if name not in self.sections or self._may_tell(name, self.sections[name]):
                self.sections[name] = pages.section(name, page)

    def _may_tell(self, name: str, text: str) -> bool:
        """Return whether a section may be announced: pictures and large ones not too often."""
        least_s = PICTURES_S if name in pages.PICTURES else 0.0
        now = asyncio.get_running_loop().time()
        return now - self._told_at.get(name, -1e9) >= max(least_s, len(text) / SECTION_BYTES_PER_S)

    def _changed(self, news: dict[str, str]) -> list[str]:
        """Return the names of the sections to announce."""
        changed = []
        for name, text in news.items():
            digest = hashlib.sha256(text.encode()).hexdigest()
            if self._digests.get(name) != digest and self._may_tell(name, text):
                self._digests[name] = digest
                self._told_at[name] = asyncio.get_running_loop().time()
                changed.append(name)
        self._revision += bool(changed)
        self._revised |= dict.fromkeys(changed, self._revision)
        return changed


def digest_of(*texts: str) -> str:
    """Return a few characters that are others for other texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def live_part(text: str, key: str = "live") -> tuple[Markup, str]:
    """Return a part of a page with its digest, which it sends when it asks for a newer one."""
    digest = digest_of(text)
    live = pages.render("live.html", text=Markup(text), digest=digest, key=key)
    return Markup(live), digest


def changed_part(request: Request, text: str, key: str = "live") -> Response:
    """Return a part of a page, or nothing if the page has the same.

    Args:
        request: The request, which says what the page has.
        text: The part.
        key: Its name, other than that of each other part of the page.
    """
    live, digest = live_part(text, key)
    same = request.query_params.get("seen") == digest
    return Response(status_code=204) if same else HTMLResponse(live)


def root_of(request: Request) -> str:
    """Return the relative address of the first page, from the page of a request."""
    scope = request.scope
    before: str = scope.get("app_root_path", scope.get("root_path", ""))  # the first one in a mount
    path: str = scope["path"]
    return "../" * (path.removeprefix(before).count("/") - 1)


def problem(request: Request, message: str, status: int) -> Response:
    """Return a problem in words: as a page, or as a part of the page that has asked for it.

    Args:
        request: The request.
        message: The words.
        status: The HTTP status.
    """
    part = "hx-request" in request.headers
    template = "error.html" if part else "error_page.html"
    return HTMLResponse(pages.render(template, message=message, root=root_of(request)), status)


async def no_page(request: Request, error: Exception) -> Response:
    """Answer a request for a page that does not exist: an exception handler for status 404."""
    return problem(request, "there is no such page", 404)


def is_open(path: str) -> bool:
    """Return whether a path needs no session: the entrance, and what its page loads."""
    return path == "/enter" or path.startswith("/static/")


async def form_of(request: Request, most_bytes: int) -> dict[str, str] | None:
    """Return the fields of a form, each with its first value; None if the form is too large."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most_bytes:
            return None
    fields = parse_qs(body.decode("utf-8", "replace"))
    return {name: values[0] for name, values in fields.items()}


class Guard:
    """Middleware before every page: refuses a request without a session, and sets the headers."""

    def __init__(
        self,
        app: ASGIApp,
        known: Callable[[Request], bool],
        *,
        entrance: str = "enter.html",
        headers: Mapping[str, str] = HEADERS,
    ) -> None:
        """Guard an application.

        Args:
            app: The pages.
            known: Whether a request has a session.
            entrance: Template that a request without a session gets.
            headers: Headers of every answer.
        """
        self._app, self._known = app, known
        self._entrance, self._headers = entrance, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it has a session or asks for one; answer others with status 401."""
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        path = scope["path"].removeprefix(scope.get("root_path", ""))
        request = Request(scope)
        answer: ASGIApp
        if is_open(path) or self._known(request):
            answer = self._app
        elif "hx-request" in request.headers:  # a part of a page, which has another address
            answer = problem(request, "the session has ended: load the page anew", 401)
        else:
            text = pages.render(self._entrance, root=root_of(request))
            answer = HTMLResponse(text, 401)
        await answer(scope, receive, with_headers)


def _number(text: str) -> int | None:
    """Return a rank that a page asks for; None for all ranks."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


class Dashboard:
    """The dashboard of some jobs as an ASGI application, and its end."""

    def __init__(
        self, jobs: ShownJobs, access: Access, now: Callable[[], float], *, poll_s: float = 1.0
    ) -> None:
        """Nothing is read before the first request.

        Args:
            jobs: The jobs.
            access: The secrets.
            now: Wall clock, in Unix seconds.
            poll_s: Seconds between two looks at a job that somebody watches.
        """
        self._watches: dict[str, SectionWatch] = {}
        self._closing = asyncio.Event()
        routes = _routes(jobs, access, now, poll_s, self._watches, self._closing)
        self.asgi: ASGIApp = Guard(routes, access.known)

    def close(self) -> None:
        """End the event streams. Otherwise the server would wait for their viewers."""
        self._closing.set()
        for watch in self._watches.values():
            watch.close()


def _routes(
    jobs: ShownJobs,
    access: Access,
    now: Callable[[], float],
    poll_s: float,
    watches: dict[str, SectionWatch],
    closing: asyncio.Event,
) -> FastAPI:
    """Return the pages and actions. Their links are relative, so they work below any path.

    Args:
        jobs: The jobs.
        access: The secrets.
        now: Wall clock, in Unix seconds.
        poll_s: Seconds between two looks at a job that somebody watches.
        watches: Gets a watch for each job that somebody watches.
        closing: Ends the streams of output once it is set.
    """
    # Its own redirect names the whole address, which a proxy may have changed.
    looks: WeakValueDictionary[tuple[str, str, int | None], logs.SharedLook] = WeakValueDictionary()
    ends: dict[tuple[str, bool], asyncio.Future[str]] = {}
    found = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    async def load(name: str) -> pages.JobPage:
        view, history = await asyncio.to_thread(jobs.load, name)
        return pages.JobPage(view, history, now())

    async def newest(name: str) -> pages.JobPage:
        """Return the page that a watch has just loaded, else load it."""
        watch = watches.get(name)
        return (watch.page if watch is not None else None) or await load(name)

    @found.exception_handler(DLRoverError)
    async def failed(request: Request, error: Exception) -> Response:
        """Show the words of an error, with status 409."""
        return problem(request, str(error), 409)

    found.add_exception_handler(404, no_page)

    @found.get("/enter")
    async def enter(request: Request, token: str = "", job: str = "") -> Response:
        """Exchange the token of the printed link for a cookie, and go to the pages."""
        path = request.scope.get("root_path", "") + "/"
        to = f"./jobs/{quote(job, safe='')}/" if job else "./"
        answer = access.enter(token, to, path=path, secure=request.url.scheme == "https")
        return answer or HTMLResponse(pages.render("enter.html", root=""), 401)

    def live_page(request: Request, template: str, text: str, **values: Any) -> Response:
        """Return a page with a part that asks every few seconds whether it has changed.

        The page itself gets the part alone, or nothing if it has not changed.

        Args:
            request: The request. It says which part the page has, by its digest.
            template: Template of the page.
            text: The part.
            values: Further values of the template.
        """
        if "hx-request" in request.headers or "seen" in request.query_params:
            return changed_part(request, text)
        return HTMLResponse(pages.render(template, live=live_part(text)[0], **values))

    @found.get("/")
    async def index(request: Request) -> Response:
        """List the jobs."""
        rows = await asyncio.to_thread(jobs.rows)
        text = pages.render("jobs_table.html", rows=rows, linked=True)
        return live_page(request, "jobs.html", text, where=jobs.where, root="")

    @found.get("/jobs/{name}")
    async def job_without_slash(name: str) -> Response:
        """Go to the page of a job."""
        return RedirectResponse(f"./{quote(name, safe='')}/", status_code=307)

    @found.get("/jobs/{name}/")
    async def job(name: str) -> Response:
        """Show one job."""
        page = await newest(name)
        watch = watches.get(name)
        since = watch.revision if watch is not None and watch.page is page else ""
        parts = [(s, pages.section(s, page)) for s in pages.SECTIONS]
        runs = await asyncio.to_thread(jobs.runs, name)
        values: dict[str, Any] = {
            "runs": runs,
            "here": name if "@" in name else next(iter(runs), ""),
        }
        values |= {
            "sections": parts,
            "titles": pages.TITLES,
            "csrf": access.csrf,
            "can_drain": jobs.can_drain,
            "since": since,
            "root": "../../",
        }
        return HTMLResponse(pages.render("job.html", page=page, **values))

    def titled(section: str, text: str, page: pages.JobPage | None) -> str:
        """Return a section; the head of a page with the title that the page then has."""
        if section != "head" or page is None:
            return text
        return Markup("<title>{}</title>").format(plain(page.title)) + Markup(text)

    @found.get("/jobs/{name}/sections/{section}")
    async def one_section(
        name: str, section: str, start: int = 0, *, whole: bool = False
    ) -> Response:
        """Return one section of a job's page: what is in it, or its element.

        The element keeps which part of the table of nodes was chosen.
        """
        if section not in pages.SECTIONS:
            return HTMLResponse("", 404)
        watch = watches.get(name)
        if not (start or whole) and watch is not None and section in watch.sections:
            return HTMLResponse(titled(section, watch.sections[section], watch.page))
        page = replace(await newest(name), nodes_from=max(0, start))
        text = pages.section(section, page)
        if whole:
            text = pages.render("section.html", name=section, start=page.nodes_from, text=text)
        return HTMLResponse(titled(section, text, page))

    @found.get("/jobs/{name}/changes")
    async def changes(name: str, request: Request, since: str = "") -> Response:
        """Stream the names of the sections that change, as server-sent events."""
        since = request.headers.get("last-event-id", since)
        watch = watches.setdefault(name, SectionWatch(lambda: load(name), poll_s))

        async def events() -> AsyncIterator[str]:
            try:
                async with aclosing(watch.changes(since)) as found:
                    async for changed, revision in found:
                        told = f"id: {revision}\ndata:\n\n"
                        text = "".join(f"event: {s}\n{told}" for s in changed)
                        yield text or ": still here\n\n"
                if closing.is_set():
                    yield await last_words(name, whole=True)
            finally:
                if not watch.is_watched and watches.get(name) is watch:
                    del watches[name]

        return StreamingResponse(events(), media_type="text/event-stream")

    @found.get("/jobs/{name}/curves.csv")
    async def csv_file(name: str) -> Response:
        """Return the numbers of the curves as CSV."""
        page = await newest(name)
        return Response(curves.as_csv(page.history), media_type="text/csv; charset=utf-8")

    @found.get("/jobs/{name}/curves.tfevents")
    async def event_file(name: str) -> Response:
        """Return the numbers of the curves as an event file of TensorBoard."""
        page = await newest(name)
        content = await asyncio.to_thread(curves.as_event_file, page.history)
        return Response(content, media_type="application/octet-stream")

    @found.get("/jobs/{name}/nodes/{node}/")
    async def node(name: str, node: str, request: Request) -> Response:
        """Show one node: its state, its events, the output of its workers, and their stacks."""
        page = await newest(name)
        text = pages.render("node_now.html", page=page, node=node)
        if "hx-request" in request.headers:
            return changed_part(request, text)
        rank = _number(request.query_params.get("rank", ""))
        every = await asyncio.to_thread(jobs.log_tail, name, node, None)
        ranks = logs.ranks_in([*every.lines, *every.growing])  # the log of a Pod has none
        shown = every if rank is None else await asyncio.to_thread(jobs.log_tail, name, node, rank)
        return live_page(
            request,
            "node.html",
            text,
            page=page,
            node=node,
            csrf=access.csrf,
            can_drain=jobs.can_drain,
            root="../../../../",
            rank=rank,
            ranks=sorted(ranks if rank is None or not ranks else {*ranks, rank}),
            lines=Markup(pages.render("log_lines.html", log=shown, whole=True)),
            growing=Markup(pages.render("log_growing.html", log=shown)),
            evidence=live_part(await evidence_of(name, node), "evidence")[0],
        )

    async def evidence_of(name: str, node: str) -> str:
        """Return the stacks of a node, and the evidence of its job, as a part of its page."""
        bundles, snapshot = await asyncio.to_thread(jobs.evidence, name, node)
        return pages.render("node_evidence.html", bundles=bundles, snapshot=snapshot, node=node)

    @found.get("/jobs/{name}/nodes/{node}/evidence")
    async def evidence(name: str, node: str, request: Request) -> Response:
        """Return the stacks of a node, and the evidence of its job, unless the page has them."""
        return changed_part(request, await evidence_of(name, node), "evidence")

    @found.get("/jobs/{name}/nodes/{node}/log")
    async def log_stream(name: str, node: str, rank: str = "") -> Response:
        """Stream what a node's workers print, as parts of its page."""
        number = _number(rank)

        async def look() -> LogTail:
            return await asyncio.to_thread(jobs.log_tail, name, node, number)

        async def has_ended() -> bool:
            return (await newest(name)).has_ended

        shared = looks.setdefault((name, node, number), logs.SharedLook(look, poll_s))

        async def parts() -> AsyncIterator[str]:
            changing = logs.changes(shared.newest, has_ended, poll_s, closing)
            async with aclosing(changing) as found:
                async for news in found:
                    if news is None:
                        yield ": still here\n\n"
                        continue
                    text = pages.render("log_part.html", log=news.log, whole=news.whole)
                    yield "".join(f"data: {line}\n" for line in text.split("\n")) + "\n"
            if closing.is_set():
                yield await last_words(name, whole=False)

        return StreamingResponse(parts(), media_type="text/event-stream")

    @found.post("/jobs/{name}/actions/{action}")
    async def act(name: str, action: str, request: Request) -> Response:
        """Do what a form asks for, and say what was done."""
        return await acted(name, action, request)

    @found.post("/jobs/{name}/nodes/{node}/actions/{action}")
    async def act_on_node(name: str, node: str, action: str, request: Request) -> Response:
        """Do what a form of a node's page asks for, and say what was done."""
        return await acted(name, action, request, node)

    async def acted(name: str, action: str, request: Request, node: str = "") -> Response:
        """Do what a form asks for, and say what was done.

        Args:
            name: Name of the job.
            action: What the form asks for.
            request: The request.
            node: Id of the node to whose page the form belongs; empty for the job's page.
        """
        form = await form_of(request, MAX_FORM_BYTES)
        if form is None:
            return problem(request, "the form is too large", 413)
        if not access.confirmed(form.get("csrf", "")):
            return problem(request, "the form is not of this page: load the page anew", 403)
        if action not in (NODE_ACTIONS if node else ACTIONS):
            return HTMLResponse("", 404)
        value = node if action == "drain" and node else form.get("value", "")
        page = await (load(name) if "sure" in form else newest(name))
        question = page.risk(action, value)
        asked = digest_of(question, page.run)
        if question and form.get("sure") != asked:  # what was confirmed may be true no more
            ask = {"question": question, "action": action, "value": value, "csrf": access.csrf}
            return HTMLResponse(pages.render("confirm.html", sure=asked, **ask))
        log.info("action", extra={"data": {"job": name, "action": action, "value": value}})
        done = await asyncio.to_thread(jobs.change, name, action, value)
        if (watch := watches.get(name)) is not None:
            watch.look_now()
        return HTMLResponse(pages.render("done.html", message=done, focus="sure" in form))

    @found.get("/jobs/{name}/nodes/{node}/actions/keep")
    @found.get("/jobs/{name}/actions/keep")
    async def keep(name: str) -> Response:
        """Answer who does not confirm an action."""
        words = f"nothing was changed at {name}"
        return HTMLResponse(pages.render("done.html", message=words, focus=True))

    async def last_words(name: str, *, whole: bool) -> str:
        """Return the last message of a stream, made once for all viewers: see `farewell`."""
        if (name, whole) not in ends:
            ends[name, whole] = asyncio.ensure_future(farewell(name, whole=whole))
        return await asyncio.shield(ends[name, whole])

    async def farewell(name: str, *, whole: bool) -> str:
        """Return the last message of a stream: that the pages end, and where to look then.

        Args:
            name: Name of the job; empty for all.
            whole: Also send the newest sections of the job's page.
        """
        words, title, parts = "This dashboard has ended.", "", []
        with contextlib.suppress(DLRoverError, TimeoutError):
            page = await asyncio.wait_for(load(name), LAST_LOOK_S) if name else None
            if page is not None and page.view.status is not None and page.view.status.phase.ended:
                words = f"{name} has ended: {page.view.phase}. This dashboard has ended, too."
            if page is not None and whole:
                title = page.title
                parts = [(s, Markup(pages.section(s, page))) for s in pages.SECTIONS]
        words += f" To look again: dlrover dashboard {name}".rstrip()
        text = pages.render("over.html", words=words, title=title, sections=parts)
        return "".join(f"data: {line}\n" for line in text.split("\n")) + "\n"

    @found.get("/over")
    async def over() -> Response:
        """Stream nothing but the end of the dashboard."""

        async def parts() -> AsyncIterator[str]:
            while not closing.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(closing.wait(), PING_S)
                    yield await last_words("", whole=False)
                    return
                yield ": still here\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    found.mount("/static", StaticFiles(directory=pages.FOLDER / "static"))
    return found
