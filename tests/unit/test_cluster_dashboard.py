"""The operator's pages: who sees whose jobs, what they say, and what is refused."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urljoin

import pytest
from starlette.types import ASGIApp, Message

from dlrover_operator import cluster_page, dashboard, viewers
from dlrover_operator.cluster_page import Filter
from dlrover_operator.settings import Settings
from dlrover_py.dashboard import pages
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import ACCESS_REVIEWS, ELASTICJOBS, NAMESPACES, TOKEN_REVIEWS, Obj
from dlrover_py.protocol import names
from dlrover_py.protocol.status import JobPhase, LastCheckpoint, Training
from tests.fakes_kube import FakeCluster, fake_cluster
from tests.operator_pages import SeenJobs
from tests.unit.test_dashboard import running
from tests.unit.test_report import AT, STORY, Page, event, told
from tests.unit.test_view import hostile

NOW = 1_800_000_000.0
WORDS = "</title><script>a</script><img src=x onx=a>\"'&{{ 7 * 7 }}\x1b[\x00"
ANN, BOB, OPS, NONE = "token-of-ann", "token-of-bob", "token-of-ops", "token-of-none"
USERS = {"ann": (ANN, {"a"}), "bob": (BOB, {"b"}), "ops": (OPS, {""}), "none": (NONE, set[str]())}
HOST = "127.0.0.1:8765"
OF_ONE = "/jobs/a/one/"


def job(namespace: str, name: str, phase: str = "Running", **status: Any) -> Obj:
    training = {
        "phase": phase,
        "summary": {"ready": "2/3", "progress": "7", "goodput": "91.5%", "restarts": 0},
        "nodes": [{"phase": "live", "host": f"host-of-{namespace}"}],
    }
    meta = {
        "namespace": namespace, "name": name, "uid": f"{namespace}-{name}", "labels": {},
        "creationTimestamp": "2027-01-15T07:00:00Z", "resourceVersion": "1",
    }  # fmt: skip
    return {
        "metadata": meta,
        "spec": {},
        "status": {"phase": phase, "training": training | status.pop("training", {})} | status,
    }


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Browser:
    """Calls the application as a server would, and keeps a cookie."""

    app: ASGIApp
    cookie: str = ""

    async def call(
        self, method: str, path: str, origin: str = "", *, htmx: bool = False, **form: str
    ) -> Answer:
        sent: list[Message] = []
        await self.exchange(method, path, sent.append, origin, htmx=htmx, **form)
        found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        body = b"".join(m.get("body", b"") for m in sent[1:]).decode()
        return Answer(sent[0]["status"], found, body)

    async def exchange(
        self,
        method: str,
        path: str,
        note: Callable[[Message], None],
        origin: str = "",
        *,
        htmx: bool = False,
        **form: str,
    ) -> None:
        """Make a call, and note each part of the answer. Without a form it never hangs up."""
        path, _, query = path.partition("?")
        headers = [(b"host", HOST.encode())]
        headers += [(b"cookie", self.cookie.encode())] if self.cookie else []
        headers += [(b"origin", origin.encode())] if origin else []
        headers += [(b"hx-request", b"true")] if htmx else []
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "headers": headers,
            "query_string": query.encode(), "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
        }  # fmt: skip
        parts = [{"type": "http.request", "body": urlencode(form).encode(), "more_body": False}]

        async def receive() -> Message:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        async def send(message: Message) -> None:
            note(message)

        await self.app(scope, receive, send)

    async def enter(self, token: str) -> Answer:
        answer = await self.call("POST", "/enter", f"http://{HOST}", token=token)
        if "set-cookie" in answer.headers:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer


@dataclass
class Bed:
    """Pages about some jobs, their API server, and a clock that the test moves."""

    cluster: FakeCluster
    kube: KubeClient
    jobs: list[Obj]
    clock: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        for name, (token, spaces) in USERS.items():
            self.cluster.users[token] = ({"username": name, "groups": ["g"]}, [])
            self.cluster.listers[name] = set(spaces)
        for one in self.jobs:
            space = {"metadata": {"name": one["metadata"]["namespace"]}}
            self.cluster.put(NAMESPACES, space)
            self.cluster.put(ELASTICJOBS, one)
        seen = SeenJobs(self.kube, self.jobs)
        self.app = dashboard.app(seen, self.kube, lambda: self.clock[0], poll_s=0.001)

    async def viewer(self, token: str) -> Browser:
        browser = Browser(self.app)
        answer = await browser.enter(token)
        assert (answer.status, answer.headers["location"]) == (303, "./")
        return browser

    def asked(self, kind: Any) -> list[Obj]:
        return [c.body["spec"] for c in self.cluster.calls if c.path == kind.path()]


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    async with fake_cluster(tmp_path) as (cluster, kube):
        yield Bed(cluster, kube, [job("a", "one"), job("b", "two"), job("b", "three")])


# --- who sees what ---


OPENED = ["/", "/hosts", "/tables/jobs", "/tables/hosts"]


@pytest.mark.parametrize("path", [*OPENED, "/?namespace=a", "/changes/jobs", "/nothing", "/docs"])
@pytest.mark.parametrize("cookie", ["", "{}=", "{}=x", "{}=ä"])
async def test_without_a_session_nothing_is_shown(bed: Bed, path: str, cookie: str) -> None:
    entered = await bed.viewer(OPS)
    browser = Browser(bed.app, cookie.format(entered.cookie.partition("=")[0]))
    answer = await browser.call("GET", path)
    assert answer.status == 401
    for secret in ("one", "two", "host-of-a"):
        assert f">{secret}<" not in answer.text
    for one in ("/jobs/a/one/", "/jobs/a/none/"):
        assert (await browser.call("GET", one)).status == 401
    assert (await browser.call("GET", "/static/style.css")).status == 200


async def test_each_viewer_sees_the_jobs_that_they_may_list(bed: Bed) -> None:
    everything = {"one", "two", "three", "host-of-a", "host-of-b"}
    for token, seen in (
        (ANN, {"one", "host-of-a"}),
        (BOB, {"two", "three", "host-of-b"}),
        (OPS, everything),
        (NONE, set[str]()),
    ):
        browser = await bed.viewer(token)
        shown = set[str]()
        for path in OPENED:
            answer = await browser.call("GET", path)
            assert answer.status == 200
            shown |= {word for word in everything if f">{word}</" in answer.text}
        assert shown == seen
        others = {"a", "b"} - {one.partition("-of-")[2] for one in seen}
        text = (await browser.call("GET", "/")).text
        assert not any(f'<option value="{space}"' in text for space in others)


async def test_a_namespace_that_one_may_not_see_is_as_one_that_does_not_exist(bed: Bed) -> None:
    browser = await bed.viewer(ANN)
    for path in ("/?namespace={}", "/hosts?namespace={}", "/?text=two&namespace={}"):
        hidden, unknown = [
            (await browser.call("GET", path.format(space))).text for space in ("b", "c")
        ]
        assert hidden == unknown.replace("namespace=c", "namespace=b")


async def test_a_job_has_a_page_for_those_who_may_read_it(bed: Bed) -> None:
    bed.cluster.readers["none"] = {("b", "two"), ("b", "unborn")}
    ann, single, ops = [await bed.viewer(token) for token in (ANN, NONE, OPS)]
    wanted = [
        (ann, "a/one", 200), (ann, "b/two", 404), (ann, "a/unborn", 404), (ann, "c/x", 404),
        (single, "b/two", 200), (single, "b/three", 404), (single, "b/unborn", 404),
        (ops, "b/three", 200), (ops, "b/x%2F..%2Fthree", 404),
    ]  # fmt: skip
    refusals = set()
    for browser, path, status in wanted:
        answer = await browser.call("GET", f"/jobs/{path}/")
        assert answer.status == status, path
        if status == 200:
            assert f"<h1>{path[2:]} " in answer.text
        else:
            refusals.add(answer.text)
    assert len(refusals) == 1, "one cannot tell what exists from what may not be seen"
    bed.cluster.remove(ELASTICJOBS, "one", "a")
    assert (await ann.call("GET", "/jobs/a/one/")).text in refusals


async def test_the_page_of_a_job_shows_the_sections_without_actions(bed: Bed) -> None:
    said = running(nodes=3).status
    assert said is not None
    training = Training.of(said).model_dump(mode="json", by_alias=True) | {"leftOut": 2}
    one = job("a", "one", training=training, reason="Waiting")
    bed.cluster.put(ELASTICJOBS, one)
    answer = await (await bed.viewer(ANN)).call("GET", "/jobs/a/one/")
    page = Page(answer.text)
    for words in ("Nodes", "2 nodes are not in the status", "dashboard one -n a"):
        assert words in page.text
    assert "form" not in page.tags
    assert answer.text.index("<h1>") < answer.text.index('class="sections"'), "the name comes first"
    assert {v for k, v in page.attributes if k == "href"} == {
        *(f"../../../{rest}" for rest in ("", "hosts", "static/style.css", "static/icon.svg")),
        "#main",
        *(f"#{name}" for name in (*pages.TITLES, "actions", "runs")),
    }


async def test_the_page_of_a_job_gets_its_sections_anew_only_when_they_have_changed(
    bed: Bed,
) -> None:
    viewer = await bed.viewer(ANN)
    (seen,) = re.findall(r'name="seen" value="(\w+)"', (await viewer.call("GET", OF_ONE)).text)
    answer = await viewer.call("GET", f"{OF_ONE}?seen={seen}", htmx=True)
    assert (answer.status, answer.text) == (204, "")
    bed.cluster.put(ELASTICJOBS, job("a", "one", "Failed"))
    answer = await viewer.call("GET", f"{OF_ONE}?seen={seen}", htmx=True)
    assert answer.status == 200
    assert "Failed" in answer.text
    assert "<html" not in answer.text
    bed.clock[0] += viewers.SESSION_S
    assert (await viewer.call("GET", OF_ONE, htmx=True)).status == 401


@pytest.mark.parametrize("end", [JobPhase.SUCCEEDED, JobPhase.FAILED])
async def test_a_job_that_has_ended_keeps_its_page_of_how_it_went(bed: Bed, end: JobPhase) -> None:
    """Its master has no Pod any more, and its nodes are gone: the ElasticJob has it all."""
    last = LastCheckpoint(step=60, where="storage", at=AT + 19, stored_step=60, folder="/ckpt/60")
    said = told(end).model_copy(
        update={
            "last_checkpoint": last,
            "checkpoints_stored": 3,
            "memory_checkpoints": [],
            "nodes": [],
            "ready": 0,
        }
    )
    over = event(11, f"Job{end}", 20, f"the job has {end.lower()}", round_=2)
    training = Training.of(said.model_copy(update={"events": [*STORY, over]}))
    document = training.model_dump(mode="json", by_alias=True, exclude_none=True)
    bed.jobs[0] = job("a", "one", end.value, training=document)
    bed.cluster.put(ELASTICJOBS, bed.jobs[0])
    ann = await bed.viewer(ANN)
    assert ">one</a>" in (await ann.call("GET", f"/?phase={end}")).text
    answer = await ann.call("GET", OF_ONE)
    page = Page(answer.text)
    for words in (
        f"the job has {end.lower()}",  # why
        "node n1 was lost: host-1 was killed",  # which ended the first round
        "first step of round 2 is 21",
        "detect 40 ms, decide <10 ms, restore 1.5 s",
        "A: productive, 75.0% (15.0 s)",
        "3 checkpoints stored; the newest in storage is /ckpt/60",
    ):
        assert words in page.text, words
    facts = dict(re.findall("<dt>([^<]+)</dt><dd>([^<]+?) *<", answer.text))
    assert (facts["ran for"], facts["goodput"]) == ("20.0 s", "75.0%")
    assert "nodes" not in facts
    drawn = re.findall('<svg[^>]* aria-label="([^"]*)"', answer.text)
    assert len(drawn) >= 3, "rounds, time and steps are drawn"
    assert (await (await bed.viewer(BOB)).call("GET", OF_ONE)).status == 404


async def test_the_viewers_name_groups_and_extra_fields_are_asked_about(bed: Bed) -> None:
    user = {"username": "ann", "uid": "7", "groups": ["g", "h"], "extra": {"scopes": ["x"]}}
    bed.cluster.users[ANN] = user, []
    await (await bed.viewer(ANN)).call("GET", "/")
    wanted = {"user": "ann", "uid": "7", "groups": ["g", "h"], "extra": {"scopes": ["x"]}}
    asked = bed.asked(ACCESS_REVIEWS)
    assert [{k: v for k, v in one.items() if k != "resourceAttributes"} for one in asked] == [
        wanted
    ] * 3
    assert [one["resourceAttributes"].get("namespace", "") for one in asked] == ["", "a", "b"]


async def test_rights_that_are_taken_away_or_given_count_soon(bed: Bed) -> None:
    browser = await bed.viewer(ANN)
    assert ">one</a>" in (await browser.call("GET", "/")).text
    bed.cluster.listers["ann"].clear()
    number = len(bed.asked(ACCESS_REVIEWS))
    await browser.call("GET", "/")
    assert len(bed.asked(ACCESS_REVIEWS)) == number, "a page that is loaded often asks seldom"
    bed.clock[0] += viewers.ALLOWED_S
    assert ">one</a>" not in (await browser.call("GET", "/")).text
    bed.cluster.listers["ann"].add("a")
    bed.clock[0] += viewers.REFUSED_S
    assert ">one</a>" in (await browser.call("GET", "/")).text


async def test_without_an_answer_about_rights_nothing_is_shown(bed: Bed) -> None:
    browser = await bed.viewer(OPS)
    bed.cluster.fail(403, "Forbidden", "the operator may not", path=ACCESS_REVIEWS.plural)
    answer = await browser.call("GET", "/")
    assert (answer.status, "the operator may not" in answer.text) == (503, False)
    assert "<td>" not in answer.text


# --- tokens and sessions ---


@pytest.mark.parametrize("token", ["", " ", "x", "ä", "admin ", "0" * 20_000])
async def test_a_token_of_no_user_begins_no_session(bed: Bed, token: str) -> None:
    browser = Browser(bed.app)
    answer = await browser.enter(token)
    assert (answer.status, browser.cookie) == (401, "")


async def test_a_form_that_is_too_large_is_refused(bed: Bed) -> None:
    assert (await Browser(bed.app).enter("0" * 40_000)).status == 413
    assert bed.asked(TOKEN_REVIEWS) == []


@pytest.mark.parametrize(
    ("audiences", "status"),
    [([], 303), (["dlrover-dashboard"], 303), (["dlrover-dashboard", "x"], 303), (["vault"], 401)],
)
async def test_tokens_for_these_pages_and_for_the_api_server_are_taken(
    bed: Bed, audiences: list[str], status: int
) -> None:
    bed.cluster.users[ANN] = {"username": "ann"}, audiences
    assert (await Browser(bed.app).enter(ANN)).status == status


async def test_a_server_that_knows_no_audiences_does_not_stand_for_ours(bed: Bed) -> None:
    """It leaves them out of its answer, and has looked at the token as one for itself."""

    class Answers(KubeClient):
        async def create(self, kind: Any, obj: Obj, **_: Any) -> Obj:
            asked.append(obj["spec"].get("audiences"))
            user = {"username": "ann"}
            return {"status": {"authenticated": "audiences" in obj["spec"], "user": user}}

    asked: list[Any] = []
    found = viewers.Viewers(Answers.__new__(Answers), lambda: 0.0)
    assert await found.enter(ANN) is None
    assert asked == [["dlrover-dashboard"], None]


async def test_neither_token_nor_secret_is_shown_kept_or_logged(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "operator"):
        browser = Browser(bed.app)
        answer = await browser.enter(ANN)
        wrong = await Browser(bed.app).enter("wrong-token")
        page = await browser.call("GET", "/")
    secret = browser.cookie.partition("=")[2]
    assert len(secret) > 40
    said = repr([record.__dict__ for record in caplog.records])
    for hidden in (ANN, secret, "wrong-token"):
        assert hidden not in said
        assert hidden not in page.text + wrong.text
    assert ANN not in repr(answer.headers)
    assert {"HttpOnly", "SameSite=strict", "Path=/", "Max-Age=3600"} <= set(
        answer.headers["set-cookie"].split("; ")
    )


async def test_a_session_ends_after_an_hour_and_when_its_viewer_leaves(bed: Bed) -> None:
    first, second = await bed.viewer(ANN), await bed.viewer(ANN)
    answer = await first.call("POST", "/leave", f"http://{HOST}")
    assert answer.status == 303
    assert [(await one.call("GET", "/")).status for one in (first, second)] == [401, 200]
    bed.clock[0] += viewers.SESSION_S
    assert (await second.call("GET", "/")).status == 401


@pytest.mark.parametrize(
    "origin",
    ["", "null", "http://evil.example", "http://127.0.0.1:1", f"http://{HOST}.evil", "http://["],
)
async def test_another_site_can_neither_enter_nor_leave_for_a_viewer(bed: Bed, origin: str) -> None:
    browser = await bed.viewer(ANN)
    number = len(bed.asked(TOKEN_REVIEWS))
    for path in ("/enter", "/leave"):
        assert (await browser.call("POST", path, origin, token=BOB)).status == 403
    assert len(bed.asked(TOKEN_REVIEWS)) == number
    assert (await browser.call("GET", "/")).status == 200


async def test_a_viewer_has_ten_sessions_and_ends_nobody_elses(bed: Bed) -> None:
    other = await bed.viewer(BOB)
    many = [await bed.viewer(ANN) for _ in range(viewers.SESSIONS_OF_VIEWER + 2)]
    statuses = [(await one.call("GET", "/")).status for one in (other, *many)]
    assert statuses == [200, 401, 401, *[200] * viewers.SESSIONS_OF_VIEWER]


async def test_nobody_is_kept_out_by_those_who_begin_many_sessions(bed: Bed) -> None:
    found = viewers.Viewers(bed.kube, lambda: bed.clock[0])
    bob = await found.enter(BOB)
    assert bob is not None
    for number in range(viewers.SESSIONS):  # with names for ten sessions each
        name = f"u{number // viewers.SESSIONS_OF_VIEWER}"
        bed.cluster.users[f"t{number}"] = {"username": name}, [viewers.AUDIENCE]
        assert await found.enter(f"t{number}") is not None
    ann = await found.enter(ANN)
    assert ann is not None
    assert found.session(ann[0]) is not None
    assert found.session(bob[0]) is not None


async def test_many_wrong_tokens_delay_no_page(bed: Bed) -> None:
    found = viewers.Viewers(bed.kube, lambda: bed.clock[0])
    _, session = await found.enter(ANN) or pytest.fail("no session")
    flood = [asyncio.create_task(found.enter(f"wrong-{n}")) for n in range(300)]
    await asyncio.sleep(0)
    await found.visible(session, ["a"])
    asked = len(bed.asked(TOKEN_REVIEWS))
    answers = await asyncio.gather(*flood, return_exceptions=True)
    assert asked < 2 * viewers.TOKENS, "the page waited for all tokens"
    refused = [one for one in answers if isinstance(one, viewers.TooManyTokensError)]
    assert len(refused) == 300 - viewers.TOKENS
    assert await found.enter(ANN) is not None


@pytest.mark.parametrize("path", ["/jobs/a/one/", "/hosts", "/"])
async def test_the_form_for_a_token_works_on_each_page(bed: Bed, path: str) -> None:
    """On the page of a job, it was sent to an address below that page."""
    asked = await Browser(bed.app).call("GET", path)
    assert asked.status == 401
    (action,) = re.findall(r'action="([^"]*)"', asked.text)
    assert urljoin(path, action) == "/enter"
    (style,) = re.findall(r'href="([^"]*style.css)"', asked.text)
    assert urljoin(path, style) == "/static/style.css"


# --- changes ---


async def test_a_table_that_is_open_is_announced_when_it_changes_until_the_session_ends(
    bed: Bed,
) -> None:
    browser, said = await bed.viewer(ANN), list[str]()

    def note(message: Message) -> None:
        part = message.get("body", b"").decode()
        said.append(part)
        if "event" in part and said.count(part) == 1:
            bed.jobs.append(job("b", "of-another-viewer"))
        elif "still here" in part and len(bed.jobs) == 4:
            bed.jobs.append(job("a", "new"))
        elif "event" in part:
            bed.clock[0] += viewers.SESSION_S

    for path, what in (("/", "jobs"), ("/hosts", "hosts")):
        text = (await browser.call("GET", path)).text
        assert f'hx-get="tables/{what}?"' in text
        assert f'hx-sse:connect="changes/{what}?"' in text
    await asyncio.wait_for(browser.exchange("GET", "/changes/jobs", note), 60)
    parts = [part for part in said if part]
    assert [p for i, p in enumerate(parts) if i == 0 or p != parts[i - 1]] == [
        "event: table\ndata:\n\n", ": still here\n\n", "event: table\ndata:\n\n",
    ]  # fmt: skip
    again = await bed.viewer(ANN)
    assert ">new<" in (await again.call("GET", "/tables/jobs")).text
    for path in ("/changes/secrets", "/tables/secrets"):
        assert (await again.call("GET", path)).status == 404


async def test_a_session_has_few_streams(bed: Bed) -> None:
    browser = await bed.viewer(ANN)
    opened = [asyncio.Event() for _ in range(dashboard.STREAMS)]

    async def stream(opens: asyncio.Event) -> None:
        await browser.exchange("GET", "/changes/jobs", lambda _: opens.set())

    streams = [asyncio.create_task(stream(one)) for one in opened]
    await asyncio.wait_for(asyncio.gather(*(one.wait() for one in opened)), 60)
    assert (await browser.call("GET", "/changes/jobs")).status == 429
    bed.clock[0] += viewers.SESSION_S
    await asyncio.wait_for(asyncio.gather(*streams), 60)


@pytest.mark.parametrize("name", ["x" * 254, "A", "%00", "a/../b", "-"])
async def test_a_name_that_no_job_can_have_is_not_asked_about(bed: Bed, name: str) -> None:
    browser = await bed.viewer(NONE)
    before = len(bed.cluster.calls)
    assert (await browser.call("GET", f"/jobs/a/{name}/")).status == 404
    assert len(bed.cluster.calls) == before


async def test_a_stream_outlives_an_api_server_that_does_not_answer(bed: Bed) -> None:
    browser, said = await bed.viewer(ANN), list[str]()
    bed.cluster.fail(500, path=ACCESS_REVIEWS.plural, times=3)

    def note(message: Message) -> None:
        said.append(message.get("body", b"").decode())
        if sum("event" in part for part in said) == 2:
            bed.clock[0] += viewers.SESSION_S

    await asyncio.wait_for(browser.exchange("GET", "/changes/hosts", note), 60)
    assert sum("event" in part for part in said) == 2


# --- what the pages say ---


@pytest.mark.parametrize("path", ["/", "/hosts", "/enter", "/nothing"])
async def test_every_answer_forbids_what_is_foreign(bed: Bed, path: str) -> None:
    answer = await (await bed.viewer(OPS)).call("GET", path)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"
    for name, value in Page(answer.text).attributes:
        assert name != "style", "the policy forbids it"
        if name in ("href", "src", "action", "hx-get", "hx-sse:connect"):
            assert value is not None
            assert ":" not in value
            assert not value.startswith("/")


@pytest.mark.parametrize("path", [*OPENED, "/?{}", "/hosts?{}"])
async def test_no_word_of_a_user_a_script_or_a_pod_is_markup(bed: Bed, path: str) -> None:
    hostile = job(
        "a",
        WORDS,
        WORDS,
        reason=WORDS,
        conditions=[{"type": "Ready", "reason": WORDS, "message": WORDS}],
        allocation={"nodes": WORDS, "reason": WORDS},
        badHosts={"hosts": [WORDS], "avoid": [WORDS]},
        training={
            "summary": dict.fromkeys(("ready", "progress", "goodput"), WORDS),
            "nodes": [{"host": WORDS, "phase": WORDS}],
            "hostFaults": [{"host": WORDS, "at": "2027-01-15T07:00:00Z", "kind": "lost"}],
        },
    )
    hostile["metadata"]["labels"] = {names.LABEL_QUEUE: WORDS}
    bed.jobs[:] = [hostile]
    bed.cluster.users[OPS] = {"username": WORDS}, []
    bed.cluster.listers[WORDS] = {""}
    browser = await bed.viewer(OPS)
    query = urlencode({"namespace": "a", "text": "</title>"})
    page = Page((await browser.call("GET", path.format(query))).text)
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    assert "img" not in page.tags
    assert page.tags.count("script") in (0, 2)
    assert "49" not in page.text
    assert "\x1b" not in page.text


async def test_no_word_in_the_status_of_a_job_is_markup(bed: Bed) -> None:
    said = hostile(WORDS).status
    assert said is not None
    training = Training.of(said).model_dump(mode="json", by_alias=True)
    conditions = [{"type": "Ready", "status": "False", "reason": WORDS, "message": WORDS}]
    one = job("a", "one", "Failed", training=training, reason=WORDS, conditions=conditions)
    bed.cluster.put(ELASTICJOBS, one)
    page = Page((await (await bed.viewer(ANN)).call("GET", "/jobs/a/one/")).text)
    assert WORDS[:8] in page.text, "the words are shown as text"
    assert "{{ 7 * 7 }}" in page.text
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert "\x1b" not in page.text


async def test_words_of_the_address_are_no_markup(bed: Bed) -> None:
    browser = await bed.viewer(OPS)
    query = urlencode({"namespace": WORDS, "phase": WORDS, "text": WORDS, "start": -3})
    for path in ("/?", "/hosts?"):
        page = Page((await browser.call("GET", path + query)).text)
        assert "img" not in page.tags
        assert not {name for name, _ in page.attributes if name.startswith("on")}


def test_a_job_has_its_queue_its_problem_and_its_numbers() -> None:
    told = job(
        "a",
        "x",
        "Pending",
        reason="Waiting",
        conditions=[
            {"type": "Accepted", "reason": "Valid", "message": "no"},
            {"type": "MasterReady", "reason": "Waiting", "message": "no room"},
        ],
        allocation={"nodes": 2, "reason": "of 4"},
    )
    told["metadata"]["labels"] = {names.LABEL_QUEUE: "gold"}
    (row,) = cluster_page.job_table([told], Filter(), NOW).rows
    assert (row.phase, row.reason, row.message) == ("Pending", "Waiting", "no room")
    assert (row.ready, row.progress, row.goodput) == ("2/3", "7", "91.5%")
    assert row.queue == "gold: 2 nodes"
    new = {"metadata": {"namespace": "a", "name": "y"}, "spec": {}}
    (row,) = cluster_page.job_table([new], Filter(), NOW).rows
    assert (row.phase, row.reason, row.queue, row.created_at) == ("Created", "", "", 0.0)


def test_jobs_are_counted_filtered_and_shown_in_pages() -> None:
    many = [job(f"s{i % 3}", f"j{i:04}", ("Running", "Failed")[i % 2]) for i in range(1000)]
    table = cluster_page.job_table(many, Filter(), NOW)
    assert (len(table.rows), table.total, len(table.pages)) == (100, 1000, 10)
    assert table.counts == {"Failed": 500, "Running": 500}
    assert table.namespaces == {"s0": 334, "s1": 333, "s2": 333}
    last = cluster_page.job_table(many, Filter(start=900), NOW)
    assert last.rows[-1].name == "j0998"
    asked = Filter(namespace="s1", phase="Failed", text="j00")
    some = cluster_page.job_table(many, asked, NOW)
    assert {(r.namespace, r.phase, r.name[:3]) for r in some.rows} == {("s1", "Failed", "j00")}
    assert some.counts.keys() == {"Failed", "Running"}, "the other phase can be chosen"
    assert asked.link(start=100) == "?namespace=s1&phase=Failed&text=j00&start=100"
    assert cluster_page.job_table(many, Filter(start=10**9), NOW).rows == []


def test_a_host_has_its_jobs_its_faults_and_who_avoids_it() -> None:
    def fault(kind: str, minute: int) -> Obj:
        return {"host": "h1", "at": f"2027-01-15T07:{minute:02}:00Z", "kind": kind}

    on = {"nodes": [{"host": h, "phase": "live"} for h in ("h1", "h1", "h2")]}
    faults = {"hostFaults": [fault("lost", 1), fault("hardware", 3), fault("exploded", 4)]}
    jobs = [
        job("a", "x", training=on | faults, badHosts={"hosts": ["h1"], "avoid": []}),
        job("b", "y", training=on | {"hostFaults": [fault("lost", 2)]},
            badHosts={"hosts": ["h1"], "avoid": ["h1"]}),
        job("c", "old", "Succeeded", training=on | {"endedAt": "2027-01-15T07:00:00Z"},
            badHosts={"hosts": ["h2"], "avoid": ["h2"]}),
        job("d", "gone", training={"nodes": [{"host": "h3", "phase": "gone"}]}),
    ]  # fmt: skip
    first, second = cluster_page.host_table(jobs, Filter(), NOW).rows
    assert (first.name, first.jobs, first.state) == ("h1", {"a/x", "b/y"}, "avoided in b")
    assert first.health == "1 hardware, 2 lost"
    assert [(f.kind, by) for f, by in first.history] == [
        ("hardware", "a/x"), ("lost", "b/y"), ("lost", "a/x"),
    ]  # fmt: skip
    assert (second.name, second.jobs, second.state) == ("h2", {"a/x", "b/y"}, "")
    (alone,) = cluster_page.host_table(jobs[:1], Filter(text="h1"), NOW).rows
    assert alone.state == "bad, but not avoided, in a"
    many = job("a", "z", training={"nodes": [{"host": f"n{i}"} for i in range(250)]})
    many["status"]["training"]["leftOut"] = 7
    table = cluster_page.host_table([many], Filter(start=200), NOW)
    assert (len(table.rows), table.total, table.left_out) == (50, 250, 7)


def test_a_host_leads_to_its_jobs() -> None:
    def shown(count: int) -> Page:
        on = {"nodes": [{"host": "h1", "phase": "live"}]}
        jobs = [job("a", f"j{number}", training=on) for number in range(count)]
        table = cluster_page.host_table(jobs, Filter(), NOW)
        return Page(pages.render("cluster/hosts_table.html", table=table))

    few, many = shown(2), shown(9)
    links = [value for name, value in few.attributes if name == "href"]
    assert links == ["jobs/a/j0/", "jobs/a/j1/"]
    assert "more" not in few.text
    assert "and 4 more" in many.text


def test_a_page_of_a_thousand_jobs_is_small() -> None:
    hosts = [{"host": f"h{i}", "phase": "live"} for i in range(12)]
    many = [job(f"s{i % 20}", f"j{i}", training={"nodes": hosts}) for i in range(1000)]
    for make, template in (
        (cluster_page.job_table, "cluster/jobs.html"),
        (cluster_page.host_table, "cluster/hosts.html"),
    ):
        table = make(many, Filter(), NOW)
        text = pages.render(template, table=table, viewer="ann", root="")
        assert len(text) < 100_000


def test_the_pages_are_served_only_if_a_port_is_given() -> None:
    given = ["--master-image=m"]
    assert Settings.parse(given).dashboard_port == 0
    assert Settings.parse([*given, "--dashboard-port=8090"]).dashboard_port == 8090
    for wrong in ("0", "65536", "0.0.0.0:8090", "x"):
        with pytest.raises(SystemExit):
            Settings.parse([*given, f"--dashboard-port={wrong}"])
