"""The operator's pages for a browser: jobs and hosts, as far as the viewer's own rights go.

Nothing is shown without a session, and a session begins with a Kubernetes token. The pages change
nothing (docs/decisions/0021-pages-in-the-cluster.md).
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from markupsafe import Markup
from starlette.types import ASGIApp

from dlrover_operator import cluster_page
from dlrover_operator.cluster_page import Filter, TablePage
from dlrover_operator.loop import Operator
from dlrover_operator.observed import Obj, uid_of
from dlrover_operator.viewers import SESSION_S, TooManyTokensError, Viewers, ViewerSession
from dlrover_py.dashboard import pages
from dlrover_py.dashboard.server import (
    HEADERS,
    Guard,
    changed_part,
    form_of,
    live_part,
    no_page,
    problem,
)
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.local import History

log = logging.getLogger("operator")

NO_JOB = "there is no such job that you may see"
"""The answer for a job that does not exist, and for one that the viewer may not see."""
MAX_FORM_BYTES = 1 << 15
"""Largest form. A token of OpenID with many groups has some kilobytes."""
TABLES: dict[str, Callable[[list[Obj], Filter, float], TablePage]] = {
    "jobs": cluster_page.job_table,
    "hosts": cluster_page.host_table,
}
"""The tables, by the last part of their address."""
TABLE_S, TABLES_KEPT = 5.0, 100
"""Seconds for which a table is kept, and how many are."""
STREAMS = 8
"""Most streams of a session at a time."""
POLL_S = 10.0
"""Seconds between two looks at a table that is open in a browser."""
OPEN = HEADERS | {"Referrer-Policy": "same-origin"}
"""Headers of every answer. With ``no-referrer``, browsers would not say where a form comes from."""


def _asked(namespace: str = "", phase: str = "", text: str = "", start: int = 0) -> Filter:
    """Return what the query of an address asks for."""
    return Filter(namespace, phase, text, max(0, start))


Asked = Annotated[Filter, Depends(_asked)]


def app(
    operator: Operator, api: KubeClient, clock: Callable[[], float], *, poll_s: float = POLL_S
) -> ASGIApp:
    """Return the pages. Their links are relative, so they work below any path.

    Args:
        operator: the operator that has seen the jobs.
        api: client that may create TokenReviews and SubjectAccessReviews.
        clock: seconds of a clock that never goes back.
        poll_s: seconds between two looks at a table that is open in a browser.
    """
    viewers = Viewers(api, clock)
    # Browsers tell no port of a machine from another: each operator has its own cookie.
    cookie = f"dlrover-viewer-{secrets.token_hex(4)}"
    found = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    def session(request: Request) -> ViewerSession | None:
        return viewers.session(request.cookies.get(cookie, ""))

    tables: dict[tuple[str, str, Filter], tuple[float, TablePage]] = {}

    async def jobs_for(viewer: ViewerSession) -> tuple[str, list[Obj]]:
        """Return the jobs that a viewer may list, after a text that changes with them."""
        jobs = operator.jobs
        spaces = await viewers.visible(viewer, {space for space, _ in jobs})
        found = [job for (space, _), job in jobs.items() if space in spaces]
        seen = sorted((uid_of(job), job["metadata"].get("resourceVersion", "")) for job in found)
        return hashlib.sha256(repr(seen).encode()).hexdigest(), found

    async def table(viewer: ViewerSession, what: str, asked: Filter, template: str) -> str:
        """Return a template with a table of what the viewer may see.

        Viewers that may see the same jobs share a table for a moment: with thousands of nodes it
        takes a tenth of a second, in which the operator does nothing else.
        """
        version, jobs = await jobs_for(viewer)
        kept = tables.get((what, version, asked))
        if kept is None or clock() >= kept[0]:
            if len(tables) >= TABLES_KEPT:
                tables.clear()
            kept = clock() + TABLE_S, TABLES[what](jobs, asked, api.wall())
            tables[what, version, asked] = kept
        return pages.render(
            f"cluster/{template}.html", table=kept[1], viewer=viewer.viewer, root=""
        )

    async def shown(request: Request, what: str, asked: Filter, template: str) -> Response:
        """Answer with a table, or ask for a token if the session has just ended."""
        viewer = session(request)
        if viewer is None:
            return HTMLResponse(pages.render("cluster/enter.html", root=""), 401)
        return HTMLResponse(await table(viewer, what, asked, template))

    @found.exception_handler(DLRoverError)
    async def failed(request: Request, error: Exception) -> Response:
        """Show nothing, as the viewer's rights are not known; the log has the details."""
        log.warning("viewer_not_checked", extra={"why": str(error)})
        words = "the API server does not say now what you may see; the operator's log says why"
        return problem(request, words, 503)

    found.add_exception_handler(404, no_page)

    @found.get("/enter")
    async def entrance(request: Request) -> Response:
        """Ask for a token."""
        return HTMLResponse(pages.render("cluster/enter.html", root=""))

    @found.post("/enter")
    async def enter(request: Request) -> Response:
        """Exchange a token for a cookie, and go to the pages."""
        if not _own_form(request):
            return problem(request, "not a form of this page", 403)
        form = await form_of(request, MAX_FORM_BYTES)
        if form is None:
            return problem(request, "the form is too large", 413)
        try:
            entered = await viewers.enter(form.get("token", "").strip())
        except TooManyTokensError:
            return problem(request, "many tokens are being checked: try again in a moment", 429)
        if entered is None:
            words = "the cluster knows no user with this token; it may have expired"
            return HTMLResponse(pages.render("cluster/enter.html", root="", problem=words), 401)
        secret, begun = entered
        log.info("viewer_entered", extra={"user": begun.viewer})
        answer = RedirectResponse("./", status_code=303)
        answer.set_cookie(
            cookie,
            secret,
            max_age=int(SESSION_S),
            path=request.scope.get("root_path", "") + "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return answer

    @found.post("/leave")
    async def leave(request: Request) -> Response:
        """End the session."""
        if not _own_form(request):
            return problem(request, "not a form of this page", 403)
        viewers.leave(request.cookies.get(cookie, ""))
        answer = RedirectResponse("./", status_code=303)
        answer.delete_cookie(cookie, path=request.scope.get("root_path", "") + "/")
        return answer

    @found.get("/")
    async def jobs(request: Request, asked: Asked) -> Response:
        """Show the jobs."""
        return await shown(request, "jobs", asked, "jobs")

    @found.get("/hosts")
    async def hosts(request: Request, asked: Asked) -> Response:
        """Show the hosts of the jobs."""
        return await shown(request, "hosts", asked, "hosts")

    @found.get("/tables/{what}")
    async def only_table(request: Request, what: str, asked: Asked) -> Response:
        """Return the table of a page."""
        if what not in TABLES:
            return HTMLResponse("", 404)
        return await shown(request, what, asked, f"{what}_table")

    @found.get("/changes/{what}")
    async def changes(request: Request, what: str) -> Response:
        """Stream an event each time the jobs of a table have changed, until the session ends."""
        if what not in TABLES:
            return HTMLResponse("", 404)

        viewer = session(request)
        if viewer is None or viewer.streams >= STREAMS:
            return HTMLResponse("", 401 if viewer is None else 429)

        async def events(viewer: ViewerSession) -> AsyncIterator[str]:
            told: str | None = None
            if viewer.streams >= STREAMS:  # many were asked for in the same moment
                return
            viewer.streams += 1
            try:
                while session(request) is viewer:
                    new = ""
                    with contextlib.suppress(DLRoverError):  # the next look may succeed
                        new, _ = await jobs_for(viewer)
                    yield ": still here\n\n" if new == told else "event: table\ndata:\n\n"
                    told = new
                    await asyncio.sleep(poll_s)
            finally:
                viewer.streams -= 1

        return StreamingResponse(events(viewer), media_type="text/event-stream")

    @found.get("/jobs/{namespace}/{name}/")
    async def one_job(request: Request, namespace: str, name: str) -> Response:
        """Show one job, as far as its ElasticJob says. The page asks for its newest sections."""
        viewer = session(request)
        if viewer is None:
            return HTMLResponse(pages.render("cluster/enter.html", root="../../../"), 401)
        job = await viewers.job(viewer, namespace, name)
        if job is None or (namespace, name) not in operator.jobs:
            return problem(request, NO_JOB, 404)
        page = pages.JobPage(cluster_page.job_view(job), History(), api.wall(), linked=False)
        parts = [(name, Markup(pages.section(name, page))) for name in pages.SECTIONS]
        text = pages.render(
            "cluster/job_sections.html", page=page, sections=parts, titles=pages.TITLES
        )
        if "hx-request" in request.headers:
            return changed_part(request, text)
        return HTMLResponse(
            pages.render(
                "cluster/job.html",
                page=page,
                live=live_part(text)[0],
                namespace=namespace,
                viewer=viewer.viewer,
                root="../../../",
            )
        )

    found.mount("/static", StaticFiles(directory=pages.FOLDER / "static"))
    return Guard(
        found,
        lambda request: session(request) is not None,
        entrance="cluster/enter.html",
        headers=OPEN,
    )


def _own_form(request: Request) -> bool:
    """Return whether a form was sent by a page of this address.

    Browsers name the origin of every form. Another site, and another port of this machine, cannot
    change what they write there.
    """
    _, _, origin = request.headers.get("origin", "").partition("://")
    return bool(origin) and origin == request.headers.get("host", "")
