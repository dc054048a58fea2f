"""The dashboard without a browser and without a job: who may see and change what, and its words."""

import asyncio
import csv
import hashlib
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.types import Message
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrover_py.cli.logs import LogQuery, tail
from dlrover_py.cli.view import JobRow
from dlrover_py.dashboard import curves, logs, pages, pictures, ranks, server
from dlrover_py.protocol.agents import WorkerPhase
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import ConfigError, UnreachableError
from dlrover_py.protocol.job_view import JobView, LogTail
from dlrover_py.protocol.local import METRICS_KEPT, History, ProgressSample
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import (
    Condition,
    DatasetStatus,
    DataStatus,
    DiagnosisStatus,
    EvidenceManifest,
    GoodputCeiling,
    GoodputStatus,
    HeldCheckpoint,
    JobEvent,
    JobPhase,
    JobStatus,
    LastCheckpoint,
    LoaderStatus,
    NodePhase,
    ServerLoad,
    ServerStatus,
    StoreAnswer,
    StreamStatus,
    TablesStatus,
)
from dlrover_py.protocol.words import plain
from tests.unit.test_report import Page
from tests.unit.test_view import hostile, status

AT = 1_700_000_000.0
WORDS = "</title><script>a</script><img src=x onx=a>\"'&{{ 7 * 7 }}\x1b[\x00"
SHOWN = ("head", "nodes?start=100")
PAGES = ("/", "/jobs/demo/", "/jobs/demo/nodes/n0/", "/jobs/demo/sections/head")


def running(*, nodes: int = 1) -> JobView:
    """A job with so many nodes."""
    shown = status(JobPhase.RUNNING)
    node = shown.nodes[0].model_copy(update={"phase": NodePhase.LIVE})
    many = [node.model_copy(update={"id": f"n{i}", "node_rank": i}) for i in range(nodes)]
    shown = shown.model_copy(update={"nodes": many})
    return JobView("demo", ["head"], "Running", "r", shown, [], [], {})


@dataclass
class OneJob:
    """One job, and what was asked of it."""

    view: JobView = field(default_factory=running)
    history: History = field(default_factory=History)
    loads: int = 0
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    where: str = "on this machine"
    can_drain: bool = True
    problem: Exception | None = None
    kept: list[EvidenceManifest] = field(default_factory=list)
    snapshot: NodeSnapshot | None = None
    of_name: Sequence[str] = ()
    names: Sequence[str] = ("demo",)
    said: LogTail | None = None

    def rows(self) -> Sequence[JobRow]:
        if self.problem is not None:
            raise self.problem
        return [JobRow.of_job(self.view.name, self.view.status, "")]

    def runs(self, name: str) -> Sequence[str]:
        return self.of_name

    def load(self, name: str) -> tuple[JobView, History]:
        self.loads += 1
        if self.problem is not None:
            raise self.problem
        if name not in self.names:
            raise ConfigError(f"job {name} is not known")
        return self.view, self.history

    def change(self, name: str, action: str, value: str) -> str:
        self.asked.append((name, action, value))
        return f"done: {value}"

    def log_tail(self, name: str, node: str, rank: int | None) -> LogTail:
        lines = [
            f"[{node} round 1 rank {number}] {self.view.reason}"
            for number in (0, 1)
            if rank in (None, number)
        ]
        return self.said or LogTail(lines)

    def evidence(
        self, name: str, node: str
    ) -> tuple[Sequence[EvidenceManifest], NodeSnapshot | None]:
        return self.kept, self.snapshot


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass
class Browser:
    """Calls the application as a server would, and keeps a cookie."""

    jobs: OneJob = field(default_factory=OneJob)
    access: server.Access = field(default_factory=server.Access)
    cookie: str = ""
    poll_s: float = 3600

    def __post_init__(self) -> None:
        self.board = server.Dashboard(self.jobs, self.access, lambda: AT, poll_s=self.poll_s)
        self.app = self.board.asgi

    def call(self, method: str, path: str, body: bytes = b"") -> Answer:
        return asyncio.run(self.called(method, path, body))

    async def called(
        self, method: str, path: str, body: bytes = b"", *, stream: list[Message] | None = None
    ) -> Answer:
        """Make a call. With a ``stream``, which gets the answer, the call never hangs up."""
        path, _, query = path.partition("?")
        headers = [(b"host", b"127.0.0.1")]
        if self.cookie:
            headers.append((b"cookie", self.cookie.encode()))
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "headers": headers,
            "query_string": query.encode(), "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2),
        }  # fmt: skip
        sent: list[Message] = [] if stream is None else stream
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if stream is not None and not parts:
                await asyncio.Event().wait()
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        body = b"".join(m.get("body", b"") for m in sent[1:])
        return Answer(sent[0]["status"], found, body)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[list[Message]]:
        """Watch the job, as its open page does; yield what was told, after the first change."""
        told: list[Message] = []
        opened = self.called("GET", "/jobs/demo/changes?since=", stream=told)
        stream = asyncio.create_task(opened)
        while not any(message.get("body") for message in told):
            await asyncio.sleep(0)
        try:
            yield told
        finally:
            stream.cancel()
            await asyncio.wait([stream])

    def enter(self) -> "Browser":
        answer = self.call("GET", f"/enter?token={self.access.token}")
        assert answer.status == 303
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return self

    def act(self, action: str, **form: str) -> Answer:
        return self.call("POST", f"/jobs/demo/actions/{action}", urlencode(form).encode())


@pytest.mark.parametrize("path", [*PAGES, "/jobs/demo/changes", "/nothing"])
@pytest.mark.parametrize("cookie", ["", "{}=", "{}=ä"])
def test_without_a_session_nothing_is_shown(path: str, cookie: str) -> None:
    browser = Browser()
    browser.cookie = cookie.format(browser.access.cookie_name)
    answer = browser.call("GET", path)
    assert answer.status == 401
    assert "demo" not in answer.text
    assert browser.call("POST", "/jobs/demo/actions/suspend").status == 401
    assert browser.jobs.asked == []


@pytest.mark.parametrize("token", ["", "x", "ä", "0" * 100_000])
def test_a_wrong_token_gets_no_cookie(token: str) -> None:
    answer = Browser().call("GET", f"/enter?{urlencode({'token': token})}")
    assert (answer.status, "set-cookie" in answer.headers) == (401, False)


def test_a_second_dashboard_of_the_machine_ends_no_session() -> None:
    """A browser has one jar for all ports of 127.0.0.1."""
    first, second = Browser().enter(), Browser().enter()
    jar = dict(browser.cookie.split("=") for browser in (first, second))
    for browser in (first, second):
        browser.cookie = "; ".join(f"{name}={value}" for name, value in jar.items())
        assert browser.call("GET", "/").status == 200


def test_the_cookie_is_for_our_pages_only() -> None:
    browser = Browser()
    answer = browser.call("GET", f"/enter?token={browser.access.token}&job=demo")
    assert answer.headers["location"] == "./jobs/demo/"
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert browser.access.token not in answer.headers["set-cookie"]
    elsewhere = browser.call("GET", f"/enter?token={browser.access.token}&job=//evil.example/")
    assert elsewhere.headers["location"] == "./jobs/%2F%2Fevil.example%2F/"


@pytest.mark.parametrize("path", PAGES)
def test_every_answer_forbids_what_is_foreign(path: str) -> None:
    browser = Browser().enter()
    answer = browser.call("GET", path)
    assert answer.status == 200
    for one in (answer, browser.call("GET", "/nothing"), Browser().call("GET", path)):
        assert one.headers["content-security-policy"].startswith("default-src 'self';")
        assert one.headers["x-content-type-options"] == "nosniff"
        assert one.headers["cache-control"] == "no-store"
    page = Page(answer.text)
    for name, value in page.attributes:
        assert name != "style", "the policy forbids it"
        if name in ("href", "src", "hx-get", "hx-post", "hx-sse:connect"):
            assert value is not None
            assert not re.match(r"[a-z]+:|//|/", value), "links work below any path"


@pytest.mark.parametrize("path", PAGES)
def test_no_word_of_a_script_a_user_or_a_pod_is_markup(path: str) -> None:
    told = hostile(WORDS)
    nodes = [told.status.nodes[0].model_copy(update={"id": "n0"})] if told.status else []
    assert told.status is not None
    said = told.status.model_copy(update={"nodes": nodes, "name": WORDS})
    jobs = OneJob(JobView(**{f: getattr(told, f) for f in told.__slots__} | {"status": said}))
    page = Page(Browser(jobs).enter().call("GET", path).text)
    assert not {name for name, _ in page.attributes if name.startswith("on")}
    assert "img" not in page.tags
    assert page.tags.count("script") in (0, 2)
    assert "49" not in page.text
    assert "\x1b" not in page.text


def filled(kind: Any, words: str) -> Any:
    """Return a value of a type in which each text is these words. Nothing is checked."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Annotated, Union, UnionType):
        return filled(next(part for part in parts if part is not type(None)), words)
    if origin is Literal:
        return parts[0]
    if origin in (list, tuple):
        return origin([filled(parts[0], words)])
    if origin is dict:
        return {filled(parts[0], words): filled(parts[1], words)}
    if isinstance(kind, NewType):
        return filled(kind.__supertype__, words)
    if issubclass(kind, Enum):
        return next(iter(kind))
    if issubclass(kind, BaseModel):
        values = {name: filled(one.annotation, words) for name, one in kind.model_fields.items()}
        return kind.model_construct(**values)
    if issubclass(kind, str):
        return words
    if issubclass(kind, tuple):  # a NamedTuple
        return kind(*(filled(one, words) for one in get_type_hints(kind).values()))
    assert kind in (bool, int, float), kind
    return kind(1)


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.FAILED])
def test_no_text_in_any_field_of_a_status_is_markup(phase: JobPhase) -> None:
    said: JobStatus = filled(JobStatus, WORDS).model_copy(update={"phase": phase})
    formed = f"round 1: 1 node, 1 worker (joined: {WORDS}); because {WORDS}"
    changes: list[dict[str, Any]] = [
        {}, {"reason": EventReason.SCALED_UP}, {"reason": EventReason.CHECKPOINT_FAILED},
        {"reason": EventReason.ROUND_FORMED, "message": formed},
    ]  # fmt: skip
    events = [said.events[0].model_copy(update=change) for change in changes]
    said = said.model_copy(update={"events": events, "started_at": 0.0, "published_at": 5.0})
    view = JobView(
        WORDS, [WORDS], WORDS, WORDS, said, said.conditions, events, {}, {WORDS: WORDS}, [WORDS]
    )
    samples = [
        ProgressSample(at=at, step=1, round=1, nodes=1, steps_per_s=1.0, metrics={WORDS: at})
        for at in (1.0, 2.0)
    ]
    page = pages.JobPage(view, History(samples=samples), AT)
    drawn = Page(pages.section("curves", page))
    assert drawn.tags.count("h3") == 2, "the speed, and the number with this name"
    shown = Page("".join(pages.section(name, page) for name in pages.SECTIONS))
    assert not {name for name, _ in shown.attributes if name.startswith("on")}
    assert not {"img", "script"} & set(shown.tags)
    assert "49" not in shown.text
    assert "\x1b" not in shown.text
    assert shown.text.count("&{{ 7 * 7 }}") > 20


def test_no_text_of_a_stack_or_of_evidence_or_of_a_log_is_markup() -> None:
    bundle: EvidenceManifest = filled(EvidenceManifest, WORDS)
    snapshot: NodeSnapshot = filled(NodeSnapshot, WORDS)
    jobs = OneJob(kept=[bundle.model_copy(update={"at": AT})], snapshot=snapshot)
    jobs.view = replace(jobs.view, reason=WORDS)
    browser = Browser(jobs).enter()
    for path in ("", "evidence"):
        page = Page(browser.call("GET", f"/jobs/demo/nodes/n0/{path}").text)
        assert not {name for name, _ in page.attributes if name.startswith("on")}
        assert "img" not in page.tags
        assert "49" not in page.text
        assert "\x1b" not in page.text
        assert page.text.count("&{{ 7 * 7 }}") >= 10


def test_the_output_of_a_node_is_of_the_rank_that_was_chosen() -> None:
    browser = Browser().enter()
    for query, count in (("", 2), ("?rank=1", 1), ("?rank=x", 2)):
        text = browser.call("GET", f"/jobs/demo/nodes/n0/{query}").text
        assert re.findall(r'<option value="(\d)"', text) == ["0", "1"]
        assert text.count(" selected>1<") == (count == 1)
        assert text.count("[n0 round 1 rank ") == count
        assert ('connect="log?rank=1"' in text) == (count == 1)


def test_a_rank_can_be_chosen_only_where_the_output_names_it() -> None:
    """The log of a Pod has all ranks of a node, so a page chose another node's."""
    browser = Browser(OneJob(said=LogTail(["[n0] said"]))).enter()
    for query in ("", "?rank=0"):
        text = browser.call("GET", f"/jobs/demo/nodes/n0/{query}").text
        assert "[n0] said" in text
        assert "<select" not in text


def test_the_last_look_at_a_job_is_made_once_for_all_its_viewers() -> None:
    jobs = OneJob()
    browser = Browser(jobs).enter()

    async def ended() -> int:
        told: list[list[Message]] = [[] for _ in range(3)]
        streams = [
            asyncio.create_task(browser.called("GET", "/jobs/demo/changes", stream=one))
            for one in told
        ]
        while any(len(one) < 2 for one in told):
            await asyncio.sleep(0)
        before = jobs.loads
        browser.board.close()
        await asyncio.wait_for(asyncio.gather(*streams), 30)
        return jobs.loads - before

    assert asyncio.run(ended()) == 1


def test_a_page_that_is_open_when_the_dashboard_ends_says_so_and_shows_the_end() -> None:
    def streamed(path: str) -> str:
        jobs = OneJob()
        return asyncio.run(over(Browser(jobs).enter(), jobs, path))

    async def over(browser: Browser, jobs: OneJob, path: str) -> str:
        told: list[Message] = []
        stream = asyncio.create_task(browser.called("GET", path, stream=told))
        while not told or ("jobs" in path and len(told) < 2):
            await asyncio.sleep(0)
        assert jobs.view.status is not None
        last = jobs.view.status.model_copy(update={"phase": JobPhase.SUCCEEDED})
        jobs.view = replace(jobs.view, status=last, phase="Succeeded", reason="trained")
        browser.board.close()
        await asyncio.wait_for(stream, 30)
        return bytes(told[-2].get("body", b"") or told[-1].get("body", b"")).decode()

    shown = streamed("/jobs/demo/changes")
    assert "demo has ended: Succeeded. This dashboard has ended, too." in shown
    assert '<hx-partial hx-target="#head" hx-swap="innerMorph">' in shown
    assert shown.startswith("data: <title>demo: Succeeded, step "), "it stayed Running"
    assert "trained" in shown
    assert all(line.startswith("data:") for line in shown.strip().split("\n"))
    assert "To look again: dlrover dashboard<" in streamed("/over")


def test_the_title_follows_the_step_and_times_have_a_date() -> None:
    view = running()
    assert view.status is not None
    assert view.status.progress is not None
    progress = view.status.progress.model_copy(update={"step": 7, "total": None})
    said = view.status.model_copy(update={"progress": progress})
    browser = Browser(OneJob(replace(view, name="demo\x1b<b>", status=said))).enter()
    title = r"<title>demo\x1b&lt;b&gt;: Running, step 7</title>"
    assert title in browser.call("GET", "/jobs/demo/").text
    assert browser.call("GET", "/jobs/demo/sections/head").text.startswith(title)
    iso, words = r"(2023-11-1\d\w[^\"]*[+-]\d\d:\d\d)", r"1\d Nov \d\d:\d\d:\d\d"
    assert re.fullmatch(f'<time datetime="{iso}" title="\\1">{words}</time>', pages.when(AT))


def test_the_page_of_a_job_has_links_to_its_other_runs() -> None:
    browser = Browser(OneJob(of_name=[f"demo@{WORDS}", "demo@1"])).enter()
    page = Page(browser.call("GET", "/jobs/demo/").text)
    links = [value for name, value in page.attributes if name == "href" and "%40" in (value or "")]
    assert links[1] == "../demo%401/"
    assert ("aria-current", "page") in page.attributes
    assert "img" not in page.tags
    browser.jobs.names = ("demo", "demo@0", "demo@1")
    for name, marked in (("demo", 1), ("demo@1", 1), ("demo@0", 0)):  # the list has no demo@0
        text = browser.call("GET", f"/jobs/{name}/").text
        assert text.count('/" aria-current="page"') == marked, name
    browser.jobs.of_name = ["demo@1"]
    assert "Runs of this job" not in browser.call("GET", "/jobs/demo/").text


def test_a_stream_of_output_has_the_new_lines_only() -> None:
    jobs = OneJob()
    browser = Browser(jobs, poll_s=0.001).enter()

    async def streamed() -> list[str]:
        told: list[Message] = []
        stream = asyncio.create_task(
            browser.called("GET", "/jobs/demo/nodes/n0/log?rank=0", stream=told)
        )
        for count, reason in ((1, "second\n<b>"), (2, "third"), (3, "third")):
            while sum(bool(message.get("body")) for message in told) < count:
                await asyncio.sleep(0.001)
            jobs.view = replace(jobs.view, reason=reason)
        browser.board.close()
        await asyncio.wait_for(stream, 30)
        return [m["body"].decode() for m in told[1:] if m.get("body")]

    first, *more, last = asyncio.run(streamed())
    assert "This dashboard has ended. To look again: dlrover dashboard demo<" in last
    assert 'hx-swap="innerHTML"' in first
    assert "[n0 round 1 rank 0] r\n" in first
    text = "".join(more)
    assert text.count('hx-swap="beforeend"') == len(more)
    assert text.count("[n0 round 1 rank 0]") == 2
    assert "data: &lt;b&gt;\n" in text
    assert "third" in text
    assert "rank 1" not in text


@given(
    written=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=40),
    looks=st.lists(st.integers(0, 40), max_size=6),
    kept=st.integers(41, 60),
)
def test_each_line_is_new_once(written: list[tuple[int, int]], looks: list[int], kept: int) -> None:
    """Whatever lines are alike: as long as no file has more than are looked at."""
    before: list[str] = []
    told: list[str] = []
    for end in [*sorted(looks), len(written)]:
        files = [[text for file, text in written[:end] if file == one] for one in range(3)]
        now = [
            f"[n0 round 1 rank {one}] {text}"
            for one, lines in enumerate(files)
            for text in lines[-kept:]
        ]
        told += logs.added(before, now)
        before = now
    assert sorted(told) == sorted(f"[n0 round 1 rank {file}] {text}" for file, text in written)


@pytest.mark.parametrize(("length", "piece"), [(1, 1), (1, 116), (400, 1), (400, 116), (400, 4096)])
def test_a_file_that_grows_in_any_pieces_tells_each_line_once(
    tmp_path: Path, length: int, piece: int
) -> None:
    """All lines were told again after each line that was cut at the end or the start of a look."""
    file = tmp_path / "n0" / "1" / "1" / "0" / "stdout.log"
    file.parent.mkdir(parents=True)
    lines = [f"{i} " + "x" * length for i in range(900)]
    text = "".join(f"{line}\n" for line in lines).encode()
    begin = len(text) - 20 * piece
    before: Sequence[str] = ()
    told = []
    for end in range(begin, len(text) + 1, piece):
        file.write_bytes(text[:end])
        now = tail(tmp_path, LogQuery(node="n0"))
        told += logs.added(before, now.lines)
        before = now.lines
        half = text[:end].rpartition(b"\n")[2].decode()
        assert list(now.growing) == ([f"[n0 round 1 rank 0] {half}"] if half else [])
    assert told == [f"[n0 round 1 rank 0] {line}" for line in lines[-len(told) :]]


async def not_ended() -> bool:
    return False


@pytest.mark.parametrize("ended", [False, True])
def test_the_output_of_a_job_that_has_ended_is_looked_at_seldom(ended: bool) -> None:
    """It was looked at for as long as its page was open."""

    async def counted() -> list[int]:
        closing, looks, at = asyncio.Event(), 0, []

        async def tail() -> LogTail:
            nonlocal looks
            looks += 1
            return LogTail(["[n0] said"])

        async def has_ended() -> bool:
            return ended

        found = logs.changes(tail, has_ended, 0.001, closing, ping_s=0.01)
        async with aclosing(found) as stream:
            async for _ in stream:
                at.append(looks)
                if len(at) == 5:
                    closing.set()
        return [after - before for before, after in pairwise(at[1:])]

    per_ping = asyncio.run(counted())
    assert (per_ping == [1, 1, 1]) is ended
    assert min(per_ping) > 1 or ended


def test_the_output_is_looked_at_once_for_all_viewers() -> None:
    async def counted() -> tuple[list[LogTail], int]:
        looks = 0

        async def look() -> LogTail:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0)
            return LogTail([f"look {looks}"])

        shared = logs.SharedLook(look, 3600)
        leaves = asyncio.create_task(shared.newest())
        viewers = [asyncio.create_task(shared.newest()) for _ in range(3)]
        while not looks:
            await asyncio.sleep(0)
        leaves.cancel()
        return [*await asyncio.gather(*viewers), await shared.newest()], looks

    found, looks = asyncio.run(counted())
    assert (looks, {*map(str, found)}) == (1, {str(LogTail(["look 1"]))})


def test_a_line_that_grows_is_sent_alone() -> None:
    """A progress bar, or points without a newline, had all lines sent again at each look."""
    origin = "[n0 round 1 rank 0] "
    looks = [
        LogTail([]),
        LogTail([], [f"{origin}."]),
        LogTail([f"{origin}...."]),
        LogTail([f"{origin}....", f"{origin}end"], [f"{origin}1 %"]),
        LogTail([f"{origin}....", f"{origin}end"], [f"{origin}2 %"]),
    ]

    async def streamed() -> list[logs.LogChange | None]:
        closing, left = asyncio.Event(), iter(looks)

        async def tail() -> LogTail:
            if (now := next(left, None)) is None:
                closing.set()
            return now or looks[-1]

        return [change async for change in logs.changes(tail, not_ended, 0.001, closing)]

    assert asyncio.run(streamed()) == [
        logs.LogChange(looks[0], whole=True),
        logs.LogChange(looks[1], whole=True),
        logs.LogChange(looks[2], whole=True),
        logs.LogChange(LogTail([f"{origin}end"], [f"{origin}1 %"]), whole=False),
        logs.LogChange(LogTail([], [f"{origin}2 %"]), whole=False),
    ]
    shown = pages.render("log_part.html", log=looks[1], whole=True)
    assert "There is none yet" not in shown
    assert f'hx-target="#log-growing" hx-swap="innerHTML">{origin}.' in shown


def test_a_stream_of_output_goes_on_while_looks_fail() -> None:
    """A first look that failed broke the stream, and the page asked for it again at once."""
    line = LogTail(["[n0 round 1 rank 0] said"])

    async def streamed() -> list[logs.LogChange | None]:
        closing, looks = asyncio.Event(), iter([None, None, line, None])

        async def tail() -> LogTail:
            if (look := next(looks, line)) is None:
                raise UnreachableError("no answer")
            return look

        found = []
        async with aclosing(logs.changes(tail, not_ended, 0.001, closing, ping_s=0.0)) as stream:
            async for change in stream:
                found.append(change)
                if len(found) == 4:
                    closing.set()
        return found

    assert asyncio.run(streamed()) == [None, None, logs.LogChange(line, whole=True), None]


def test_lines_that_were_pushed_out_are_not_missed() -> None:
    lines = [f"[n0 round 1 rank 0] {i}" for i in range(30)]
    assert logs.added(lines[:20], lines[5:25]) == lines[20:25]
    assert logs.added(lines[10:20], lines[:22]) == lines[20:22], "a larger share shows older ones"
    assert logs.added(lines[:5], lines[10:15]) == lines[10:15]
    other = ["[n0 round 2 rank 0 err] 1"]
    assert logs.added(lines, other) == other
    assert logs.ranks_in([*lines, *other, "[n0] said", "no"]) == {0}


def test_an_action_needs_a_form_of_our_page() -> None:
    browser = Browser().enter()
    csrf = browser.access.csrf
    assert csrf in browser.call("GET", "/jobs/demo/").text
    for wrong in ({}, {"csrf": ""}, {"csrf": "x"}, {"csrf": browser.access.token}):
        assert browser.act("scale", value="3", **wrong).status == 403
    assert browser.act("explode", csrf=csrf).status == 404
    assert browser.act("scale", csrf=csrf, value="3" * 5000).status == 413
    for risky in ("suspend", "restart", "drain", "scale"):
        asked = browser.act(risky, csrf=csrf, value="<i>" if risky == "drain" else "1")
        assert 'role="alertdialog"' in asked.text
        assert "<i>" not in asked.text
        assert re.search(r'name="sure" value="\w{16}"', asked.text)
    assert "Scale demo from 2 to 1? 1 node less" in asked.text
    assert browser.act("suspend", sure="yes").status == 403
    assert "nothing was changed" in browser.call("GET", "/jobs/demo/actions/keep").text
    assert browser.jobs.asked == []
    answer = browser.act("suspend", csrf=csrf, sure=confirmed(browser.act("suspend", csrf=csrf)))
    assert ("done: " in answer.text, browser.jobs.asked.pop()) == (True, ("demo", "suspend", ""))
    answer = browser.act("scale", csrf=csrf, value="<b>3")
    assert (answer.status, browser.jobs.asked) == (200, [("demo", "scale", "<b>3")])
    assert "done: &lt;b&gt;3" in answer.text


def confirmed(asked: Answer) -> str:
    """What a form sends that confirms an action."""
    found = re.search(r'name="sure" value="(\w+)"', asked.text)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("change", [{"desired": 64}, {"started_at": AT}])
def test_what_is_confirmed_is_what_was_asked(change: dict[str, float]) -> None:
    """A job that had 64 nodes by then was scaled to 1, as was confirmed for 2."""
    browser = Browser().enter()
    csrf, jobs = browser.access.csrf, browser.jobs
    sure = confirmed(browser.act("scale", csrf=csrf, value="1"))
    assert jobs.view.status is not None
    now = jobs.view.status.model_copy(update=change)
    jobs.view = replace(jobs.view, status=now)
    again = browser.act("scale", csrf=csrf, value="1", sure=sure)
    assert f"Scale demo from {now.desired} to 1?" in again.text
    assert jobs.asked == []
    browser.act("scale", csrf=csrf, value="1", sure=confirmed(again))
    assert jobs.asked == [("demo", "scale", "1")]


def test_an_error_is_shown_in_words() -> None:
    answer = Browser().enter().call("GET", "/jobs/other/")
    assert (answer.status, "job other is not known" in answer.text) == (409, True)


def test_many_nodes_are_shown_in_pages() -> None:
    browser = Browser(OneJob(running(nodes=12_500))).enter()
    for start, first in ((0, "n0"), (12_400, "n12400"), (-5, "n0"), (10**9, None)):
        text = browser.call("GET", f"/jobs/demo/sections/nodes?start={start}").text
        assert "12500 live" in text
        links = re.findall(r'href="nodes/(n\d+)/"', text)
        assert links[:1] == ([first] if first else [])
        assert len(links) <= pages.NODES_PER_PAGE
        numbers = re.findall(r"start=(\d+)&amp;[^>]*>(\d+)<", text)
        assert 2 <= len(numbers) <= 7
        assert numbers[0] == ("0", "1")
        assert numbers[-1] == ("12400", "125")
        assert text.count("aria-current") == (first is not None)


def test_the_head_says_what_could_be_reached_and_how_old_the_checkpoint_is() -> None:
    ceiling = GoodputCeiling(
        share=0.987, failures=2, between_s=600.0, recovery_s=1.0, interval_s=10.0
    )
    goodput = GoodputStatus(wall_s=16.0, share=0.75, ceiling=ceiling, seconds={"productive": 12.0})
    last = LastCheckpoint(step=3, where="memory", at=AT - 150)
    shown = status(JobPhase.RUNNING).model_copy(
        update={"goodput": goodput, "last_checkpoint": last, "published_at": AT}
    )
    jobs = OneJob(replace(running(), status=shown))
    page = Browser(jobs).enter().call("GET", "/jobs/demo/").text
    assert "75.0% <small>at most 98.7% could be reached</small>" in page
    assert "ceiling 98.7%, of which 76.0% is reached" in page
    assert "step 3 <small>in memory, 2 min" in page


def test_the_files_of_other_projects_are_those_that_are_named() -> None:
    """And together they are small: a page loads them over a slow link, too."""
    folder = pages.FOLDER / "static"
    table = (folder / "VENDORED.md").read_text()
    named = re.findall(r"\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|", table)
    assert named
    for name, digest in named:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert {path.name for path in folder.glob("*.js")} == {name for name, _ in named}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 120_000


def test_each_node_has_a_letter_by_rank_and_who_lags_is_named() -> None:
    shown = running(nodes=5).status
    assert shown is not None
    state = {"workers": WorkerPhase.RUNNING, "steps_per_s": 1.0}
    changes: list[dict[str, Any]] = [
        {"steps_per_s": 0.5}, {"phase": NodePhase.SUSPECT}, {}, {"node_rank": None}, {},
    ]  # fmt: skip
    nodes = [
        node.model_copy(update=state | change)
        for node, change in zip(shown.nodes, changes, strict=True)
    ]
    view = replace(running(), status=shown.model_copy(update={"nodes": nodes}))
    browser = Browser(OneJob(view)).enter()
    grid = browser.call("GET", "/jobs/demo/sections/ranks").text
    cells = re.findall(r'title="(n\d[^"]*)">(\S)</b>', grid)
    assert [letter for _, letter in cells] == ["L", "?", "T", "T", "W"]
    assert cells[0][0].startswith("n0, rank 0, 2.0 s, 2.00 × median: lags")
    (label,) = (v for name, v in Page(grid).attributes if name == "aria-label")
    assert "2 nodes: trains; 1 node: waits; 1 node: lags" in (label or "")
    assert "1.0 s, 1.00 × median" in browser.call("GET", "/jobs/demo/sections/nodes").text


@pytest.mark.parametrize("count", [1, 1000, 1024, 1025, 12_500])
def test_the_grid_of_any_number_of_nodes_is_small(count: int) -> None:
    view = running(nodes=count)
    assert view.status is not None
    lost = view.status.nodes[-1].model_copy(update={"phase": NodePhase.SUSPECT})
    nodes = [*view.status.nodes[:-1], lost]
    grid = pages.section("ranks", pages.JobPage(replace(
        view, status=view.status.model_copy(update={"nodes": nodes})), History(), AT))  # fmt: skip
    assert len(grid) < 100_000
    page = pages.JobPage(view, History(), AT)
    assert page.rank_grid is page.rank_grid, "it is made once, though the template names it twice"
    assert 0 < grid.count("title=") <= ranks.CELLS
    assert grid.count(">?</b>") == 2, "one cell, and the legend: the worst mark of its nodes"


def test_the_nodes_of_a_page_show_what_they_use_where_it_is_known() -> None:
    view = running(nodes=2)
    assert view.status is not None
    used = {"memory_bytes": 3_100_000_000, "memory_limit": 8 << 30, "cores": 7.49}
    first, second = view.status.nodes
    for nodes, count in (([first, second.model_copy(update=used)], 1), ([first, second], 0)):
        status = view.status.model_copy(update={"nodes": nodes})
        found = pages.section("nodes", pages.JobPage(replace(view, status=status), History(), AT))
        assert found.count("<td>7.5</td><td>3.1 GB of 8.6 GB</td>") == count
        cells = {row.count("<td") + row.count("<th") for row in found.split("<tr")[1:]}
        assert cells == {12 + 2 * count}, "each row has as many columns"
        assert found.count(">CPUs</th>") == count


GPUS = {
    "gpus": 8, "gpu_busy": 0.93, "gpu_least_busy": 0.12,
    "gpu_memory_bytes": 512_000_000_000, "gpu_memory_limit": 640_000_000_000,
}  # fmt: skip


def test_the_pages_show_how_far_gpus_are_used_where_it_is_known() -> None:
    view = running(nodes=2)
    assert view.status is not None
    first, second = view.status.nodes
    busy = [first.model_copy(update=GPUS), second]
    view = replace(view, status=view.status.model_copy(update={"nodes": busy}))
    page = pages.JobPage(view, History(), AT)
    table = pages.section("nodes", page)
    assert "<td>93 % of 8, the least 12 %</td><td>512 GB of 640 GB</td>" in table
    cells = {row.count("<td") + row.count("<th") for row in table.split("<tr")[1:]}
    assert cells == {14}, "each row has as many columns"
    assert pages.section("ranks", page).count("GPUs busy 93 % of 8") == 1
    of_node = pages.render("node_now.html", page=page, node=first.id)
    assert "<dt>GPU memory</dt><dd>512 GB of 640 GB</dd>" in of_node
    assert "GPU" not in pages.render("node_now.html", page=page, node=second.id)
    assert "GPU" not in pages.section("nodes", pages.JobPage(running(), History(), AT))


def test_the_page_says_where_each_checkpoint_is_and_when_the_next_one_is_due() -> None:
    shown = running(nodes=2).status
    assert shown is not None
    kept = {"round": 2, "nodes": 2, "copies": 1, "nbytes": 3_000_000, "complete": True}
    marks = {"certified": False, "stored": False, "writing": False, "at": AT - 125}
    memory = [
        HeldCheckpoint(**kept | marks | {"step": 30, "writing": True}),
        HeldCheckpoint(**kept | marks | {"step": 20, "certified": True, "stored": True}),
    ]
    nodes = [n.model_copy(update={"memory_step": 30, "copy_step": 20}) for n in shown.nodes]
    assert shown.progress is not None
    more = {
        "memory_checkpoints": memory, "nodes": nodes,
        "store_answer": StoreAnswer(request="1", step=20, folder="/s/step-20"),
        "progress": shown.progress.model_copy(update={"steps_per_s": 2.0}),
        "goodput": GoodputStatus(wall_s=60.0, save_s=0.05),
        "last_checkpoint": LastCheckpoint(
            step=30, where="memory", at=AT, stored_step=20, folder="/s/step-20", write_s=3.2
        ),
        "published_at": AT,
    }  # fmt: skip
    view = replace(running(), status=shown.model_copy(update=more))
    browser = Browser(OneJob(view)).enter()
    text = Page(browser.call("GET", "/jobs/demo/sections/checkpoints").text).text
    for part in (
        "being written", "3.0 MB", " 2 min \n", "2 of 2 members", "2 keep a copy",
        "expected at step 40, 10 steps after the last: one in 5.0 s", "is in /s/step-20",
        "/s/step-20, written in 3.2 s; a save stops the training for 50 ms",
    ):  # fmt: skip
        assert part in text, part
    assert "a peer's 20" in browser.call("GET", "/jobs/demo/sections/nodes").text


@pytest.mark.parametrize(("phase", "controls"), [("Pending", True), ("Killed", False)])
def test_a_job_without_a_status_has_a_page(phase: str, controls: bool) -> None:
    """A page that was opened while its job started never had controls."""
    jobs = OneJob(JobView("demo", [], phase, "no status yet", None, [], [], {}))
    text = Browser(jobs).enter().call("GET", "/jobs/demo/").text
    assert "no status yet" in text
    assert ('hx-post="actions/scale"' in text) is controls


def test_only_what_has_changed_is_announced() -> None:
    jobs = OneJob()
    browser = Browser(jobs).enter()

    async def watched() -> list[set[str]]:
        async def load() -> pages.JobPage:
            return pages.JobPage(jobs.view, History(), AT)

        found = []
        watch = server.SectionWatch(load, 0.001)
        async for changed, _ in watch.changes(""):
            found.append(set(changed))
            if len(found) == 2:
                return found
            said = jobs.view.status
            assert said is not None
            jobs.view = JobView("demo", ["head"], "Running", "another", said, [], [], {})
        raise AssertionError

    first, second = asyncio.run(watched())
    assert (first, second) == (set(pages.SECTIONS), {"head"})
    assert browser.call("GET", "/static/style.css").status == 200
    assert browser.call("GET", "/jobs/demo/sections/why").status == 200
    assert browser.call("GET", "/jobs/demo/sections/secrets").status == 404


@pytest.mark.parametrize("failure", [ConfigError("gone"), RuntimeError("a fault of ours")])
def test_a_viewer_that_connects_late_or_after_a_failed_look_misses_no_change(
    failure: Exception,
) -> None:
    """What was announced before the stream of a page began was never told to its viewer."""
    reasons: list[str | Exception] = ["first", "second", failure, "last"]

    async def load() -> pages.JobPage:
        reason = reasons.pop(0) if len(reasons) > 1 else reasons[0]
        if isinstance(reason, Exception):
            raise reason
        shown = replace(running(), reason=reason)
        return pages.JobPage(shown, History(), AT)

    # While a look fails, a section that is asked for is an error. So each is announced again, and
    # a picture or a large section some time later.
    parts = {"head", "why", "checkpoints"}

    async def watched() -> list[list[str]]:
        watch = server.SectionWatch(load, 0.001)
        all_changes, known, late = watch.changes(""), "", []
        again: set[str] = set()
        async with asyncio.timeout(30):
            async for changed, revision in all_changes:
                if not known:
                    assert set(changed) == set(pages.SECTIONS)
                    known = revision  # of a page that is loaded now
                else:
                    again |= set(changed)
                if again >= parts:
                    break
        for since in (known, watch.revision, "of-another-watch", "x" * 500):
            seen = watch.changes(since)
            first = [] if since == watch.revision else (await asyncio.wait_for(anext(seen), 30))[0]
            late.append(first)
            await seen.aclose()
        await all_changes.aclose()
        return late

    missed, nothing, other, strange = asyncio.run(watched())
    assert nothing == []
    assert parts <= set(missed)
    assert set(other) == set(strange) == set(pages.SECTIONS)


def test_a_page_and_its_stream_have_the_same_revision() -> None:
    browser = Browser().enter()

    async def viewed() -> tuple[str, str]:
        async with browser.watching() as told:
            page = (await browser.called("GET", "/jobs/demo/")).text
        return page, b"".join(message.get("body", b"") for message in told).decode()

    page, told = asyncio.run(viewed())
    (since,) = re.findall(r'connect="changes\?since=([0-9a-f]+-1)"', page)
    assert f"event: head\nid: {since}\ndata:\n\n" in told


@pytest.mark.parametrize("path", ["/", "/jobs/demo/nodes/n0/"])
def test_a_list_and_a_node_are_sent_again_only_when_they_have_changed(path: str) -> None:
    jobs = OneJob()
    browser = Browser(jobs).enter()
    (seen, *_) = re.findall(r'name="seen" value="(\w+)"', browser.call("GET", path).text)
    same = browser.call("GET", f"{path}?seen={seen}")
    assert (same.status, same.body) == (204, b"")
    shown = jobs.view.status
    assert shown is not None
    nodes = [shown.nodes[0].model_copy(update={"step": 4711})]
    shown = shown.model_copy(update={"phase": JobPhase.FAILED, "nodes": nodes})
    jobs.view = replace(jobs.view, status=shown)
    again = browser.call("GET", f"{path}?seen={seen}")
    assert again.status == 200
    assert "4711" in again.text or path == "/"
    assert seen not in again.text


def test_an_error_is_a_page_with_a_way_back() -> None:
    browser = Browser().enter()
    for path, code in (("/jobs/other/", 409), ("/nothing", 404), ("/static/nothing", 404)):
        answer = browser.call("GET", path)
        assert answer.status == code
        assert "<title>" in answer.text
        assert f'href="{"../" * (path.count("/") - 1)}static/style.css"' in answer.text


def test_a_job_that_is_watched_is_read_once_for_all_its_fragments() -> None:
    """Each fragment of each viewer read the job anew."""
    browser = Browser(OneJob(running(nodes=150))).enter()

    async def viewed() -> list[str]:
        async with browser.watching():
            return [(await browser.called("GET", f"/jobs/demo/sections/{s}")).text for s in SHOWN]

    head, nodes = asyncio.run(viewed())
    assert browser.jobs.loads == 1
    assert "demo" in head
    assert re.findall(r'href="nodes/(n\d+)/"', nodes)[0] == "n100"
    browser.call("GET", "/jobs/demo/sections/head")
    assert browser.jobs.loads == 2, "nobody watches any more: what was read is old"


def test_a_section_that_was_announced_is_made_once_for_all_viewers() -> None:
    """Each of fifty viewers had the ranks of a thousand nodes drawn anew."""
    jobs = OneJob(running(nodes=2))
    browser = Browser(jobs).enter()
    assert jobs.view.status is not None
    nodes = jobs.view.status.nodes

    async def viewed() -> tuple[str, str]:
        async with browser.watching():
            nodes.append(
                nodes[0].model_copy(update={"id": "late"})
            )  # for all that is made from now on
            path = "/jobs/demo/sections/nodes"
            texts = [(await browser.called("GET", path + more)).text for more in ("", "?start=1")]
        return texts[0], texts[1]

    first, others = asyncio.run(viewed())
    assert "2 live" in first
    assert "3 live" in others, "another part of the table is made when it is asked for"


def test_the_page_says_why_the_job_has_its_size_and_what_its_ranks_do() -> None:
    shown = running()
    assert shown.status is not None
    scaled = JobEvent(id=3, at=AT, reason=EventReason.SCALED_UP, message="2→4: +87 %")
    why = Condition(
        type="ScalingActive",
        status="True",
        reason="",
        message="not scaled: +2 %",
        lastTransitionTime=AT,
    )
    taken = DiagnosisStatus(number=1, at=AT, reason="asked", lines=["ranks 0-1: in all_reduce"])
    said = shown.status.model_copy(update={"diagnosis": taken})
    jobs = OneJob(JobView("demo", [], "Running", "r", said, [why], [scaled], {}))
    browser = Browser(jobs).enter()
    size = browser.call("GET", "/jobs/demo/sections/size").text
    assert "size: not scaled: +2 %" in size
    assert "2→4: +87 %" in size
    assert "in all_reduce" in browser.call("GET", "/jobs/demo/sections/stacks").text
    for action in ("stacks", "checkpoint"):
        assert browser.act(action, csrf=browser.access.csrf).status == 200
    assert browser.call("GET", "/jobs/demo/sections/size").text != ""


def sample(step: int, *, round_: int = 1) -> ProgressSample:
    """A sample of a script with hostile names."""
    metrics = {"loss": round_ / step, "=cmd()": 2.0, WORDS: 3.0}
    at = AT + 10 * round_ + step
    return ProgressSample(at=at, step=step, round=round_, nodes=2, steps_per_s=4.0, metrics=metrics)


def test_what_the_script_reports_is_drawn_and_told_as_csv() -> None:
    jobs = OneJob(history=History(samples=[sample(step) for step in range(1, 5)]))
    browser = Browser(jobs).enter()
    shown = Page(browser.call("GET", "/jobs/demo/sections/curves").text)
    labels = [value for name, value in shown.attributes if name == "aria-label"]
    assert {"steps over time", "steps per second over time", "loss over time"} <= set(labels)
    assert "last 0.25, from 0.25 to 1" in shown.text
    assert "img" not in shown.tags
    answer = browser.call("GET", "/jobs/demo/curves.csv")
    assert answer.headers["content-type"].startswith("text/csv")
    head, *rows = csv.reader(answer.text.splitlines())
    assert head[:5] == ["time", "step", "round", "nodes", "steps_per_s"]
    assert "'=cmd()" in head, "a spreadsheet would call it"
    assert [row[head.index("loss")] for row in rows] == ["1.0", "0.5", str(1 / 3), "0.25"]


def test_tensorboard_reads_the_curves_without_the_steps_that_were_repeated(tmp_path: Path) -> None:
    """A restore in round 2 goes back to step 3."""
    first = [sample(step) for step in range(1, 6)]
    second = [sample(step, round_=2) for step in range(3, 9)]
    jobs = OneJob(history=History(samples=[*first, *second]))
    browser = Browser(jobs).enter()
    shown = Page(browser.call("GET", "/jobs/demo/sections/curves").text)
    assert ("href", "curves.tfevents") in shown.attributes
    assert ("download", "demo.tfevents") in shown.attributes
    answer = browser.call("GET", "/jobs/demo/curves.tfevents")
    assert answer.headers["content-type"] == "application/octet-stream"
    (tmp_path / "demo.tfevents").write_bytes(answer.body)
    read = EventAccumulator(str(tmp_path)).Reload()
    assert set(read.Tags()["scalars"]) == {
        "loss", "=cmd()", plain(WORDS), "dlrover/nodes", "dlrover/round", "dlrover/steps_per_s",
    }  # fmt: skip
    kept = [*first[:2], *second]
    for tag, values in (
        ("loss", [s.metrics["loss"] for s in kept]),
        ("dlrover/round", [s.round for s in kept]),
        ("dlrover/steps_per_s", [4.0] * len(kept)),
    ):
        points = read.Scalars(tag)
        assert [(p.wall_time, p.step) for p in points] == [(s.at, s.step) for s in kept]
        assert [p.value for p in points] == pytest.approx(values)


def test_without_tensorboard_there_is_no_link_and_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    jobs = OneJob(history=History(samples=[sample(step) for step in range(1, 5)]))
    browser = Browser(jobs).enter()
    shown = browser.call("GET", "/jobs/demo/sections/curves").text
    assert "curves.csv" in shown
    assert "tfevents" not in shown
    answer = browser.call("GET", "/jobs/demo/curves.tfevents")
    assert answer.status == 409
    assert "install DLRover-Py with its extra tensorboard" in answer.text


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=2, max_size=9))
def test_any_numbers_are_a_curve_inside_of_its_picture(values: list[float]) -> None:
    points = [(AT + i, value) for i, value in enumerate(values)]
    curve = pictures.value_curve(points, [], pictures.Scale(AT, AT + 9), "x")
    (line,) = re.findall(r'<polyline points="([^"]*)"', curve)
    for point in line.split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= pictures.WIDTH
        assert 9.9 <= y <= 10.1 + pictures.CURVE_HEIGHT


def test_a_long_curve_has_few_points_and_keeps_its_peaks() -> None:
    values = [(AT + i, 1.0) for i in range(1000)]
    values[517] = (AT + 517, 9.0)
    curve = pictures.value_curve(values, [], pictures.Scale(AT, AT + 1000), "x")
    (line,) = re.findall(r'<polyline points="([^"]*)"', curve)
    points = [tuple(map(float, point.split(","))) for point in line.split()]
    assert len(points) <= pictures.CURVE_POINTS
    assert points == sorted(points), "from left to right"
    assert min(y for _, y in points) == 10, "the peak is at the top"


def test_goodput_over_time_is_a_curve_with_its_ceiling_and_a_number_in_the_files() -> None:
    shown = running().status
    assert shown is not None
    assert shown.progress is not None
    ceiling = GoodputCeiling(share=0.9, failures=1, between_s=1.0, recovery_s=1.0, interval_s=1.0)
    kept = History()
    for i, share in enumerate((None, 0.5, 0.75)):
        goodput = GoodputStatus(
            wall_s=10.0, share=share, ceiling=ceiling if i else None, seconds={"productive": 1.0}
        )
        progress = shown.progress.model_copy(update={"step": i})
        changes = {"goodput": goodput, "published_at": AT + i, "progress": progress}
        shown = shown.model_copy(update=changes)
        kept = kept.with_sample(shown, 10)
    assert [sample.goodput for sample in kept.samples] == [None, 0.5, 0.75]
    page = pages.JobPage(replace(running(), status=shown), kept, AT + 3)
    text = pages.section("time", page)
    (line,) = re.findall(r'<polyline points="([^"]*)"', text)
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert heights == [10 + pictures.CURVE_HEIGHT * share for share in (0.5, 0.25)]
    assert "<title>at most 90.0 could be reached</title>" in text
    assert 'aria-label="goodput over time in %"' in text
    assert "<polyline" not in pages.section("time", replace(page, history=History()))
    later = goodput.model_copy(update={"share": 0.25})  # it has stood still since the last step
    for ended in (None, AT + 99):
        changes = {"goodput": later, "published_at": AT + 99, "ended_at": ended}
        still = replace(page.view, status=shown.model_copy(update=changes))
        text = pages.section("time", replace(page, view=still))
        (line,) = re.findall(r'<polyline points="([^"]*)"', text)
        assert float(line.split()[-1].split(",")[1]) == 10 + pictures.CURVE_HEIGHT * 0.75
    assert curves.as_csv(kept).splitlines()[2].split(",")[5] == "0.5"
    assert curves.as_csv(kept).splitlines()[1].split(",")[5] == ""


def test_a_history_keeps_few_numbers_of_a_sample_and_only_finite_ones() -> None:
    shown = running().status
    assert shown is not None
    assert shown.progress is not None
    told = {"bad": float("inf")} | {f"m{i}": float(i) for i in range(20)}
    said = shown.model_copy(
        update={"progress": shown.progress.model_copy(update={"metrics": told})}
    )
    (kept,) = History().with_sample(said, 10).samples
    assert kept.metrics == {f"m{i}": float(i) for i in range(METRICS_KEPT)}


def test_the_parameter_server_shows_which_bucket_and_which_server_has_too_much() -> None:
    served = [
        ServerLoad(
            id="ps0", leads=2, backs_up=1, asked_per_s=1700.0, leading=[0, 1], backing=[2],
            memory_bytes=3_100_000, waiting=2,
        ),
        ServerLoad(
            id="ps1", leads=1, backs_up=1, asked_per_s=300.0, leading=[2], backing=[0],
            receiving=[1],
        ),
        ServerLoad(id="ps2", leads=0, backs_up=0),
    ]  # fmt: skip
    tables = TablesStatus(
        epoch=7, tables=["user"], buckets=4, servers=served, single_buckets=1, lost_buckets=1,
        bucket_rows_per_s=[1500.0, 200.0, 300.0, 0.0],
    )  # fmt: skip
    listed = [ServerStatus(id=one.id, running=True) for one in served]
    listed[2] = listed[2].model_copy(update={"message": "it is drained"})
    view = running()
    assert view.status is not None
    told = view.status.model_copy(update={"tables": tables, "servers": listed})
    page = pages.JobPage(replace(view, status=told), History(), AT)
    found = pages.section("tables", page)
    text = Page(found).text
    for part in (
        "the busiest server is ps0, with 1.70 times the mean",
        "the hottest bucket is 0, with 3.0 times the mean",
        "1 bucket is on one server alone", "2 pushes wait for a copy", "1.70 × mean",
    ):  # fmt: skip
        assert part in text, part
    letters = re.findall(r'<b class="\w+" title="[^"]*">(.)</b>', found)
    assert letters == ["H", "1", "U", "X"]
    assert (
        'title="bucket 1: no copy on another server; ps0 leads, copied to ps1; 200 rows/s' in found
    )
    cells = {row.count("<td") + row.count("<th") for row in found.split("<tr")[1:]}
    assert len(cells) == 1, "each row has as many columns"
    idle = tables.model_copy(update={"servers": [], "buckets": 4096, "bucket_rows_per_s": []})
    many = replace(view, status=told.model_copy(update={"tables": idle}))
    assert "title=" not in pages.section("tables", pages.JobPage(many, History(), AT))


def test_the_top_of_a_page_leads_to_each_section_that_may_have_content() -> None:
    text = Browser(OneJob()).enter().call("GET", "/jobs/demo/").text
    style = (pages.FOLDER / "static" / "style.css").read_text()
    assert pages.TITLES.keys() < set(pages.SECTIONS)
    for name, title in pages.TITLES.items():
        assert f'<li class="to-{name}"><a href="#{name}">{title}</a></li>' in text
        assert f'<section id="{name}"' in text
        assert f"main:not(:has(#{name} > h2)) .to-{name}" in style, "none leads to an empty one"
    assert '<a href="#actions">' in text


def test_the_table_of_nodes_has_a_column_for_messages_where_there_are_any() -> None:
    """The empty column took most of the width, so each step time had four lines."""
    view = running()
    assert view.status is not None
    (node,) = view.status.nodes
    for message, count in (("lost", 1), ("", 0)):
        nodes = [node.model_copy(update={"message": message})]
        status = view.status.model_copy(update={"nodes": nodes})
        page = pages.JobPage(replace(view, status=status), History(), AT)
        assert pages.section("nodes", page).count('class="rest"') == count
        assert pages.section("nodes", page).count(">message</th>") == count


def test_a_nodes_page_drains_the_node_and_takes_stacks_and_nothing_else() -> None:
    jobs = OneJob(running(nodes=2))
    browser = Browser(jobs).enter()
    at = "/jobs/demo/nodes/n1/"
    page = browser.call("GET", at).text
    assert 'hx-post="actions/drain"' in page
    csrf = f"csrf={browser.access.csrf}".encode()
    asked = browser.call("POST", f"{at}actions/drain", csrf + b"&value=n0").text
    assert "Drain node n1 of demo?" in asked, "whatever the form says"
    assert jobs.asked == []
    (sure,) = re.findall(r'name="sure" value="(\w+)"', asked)
    assert (
        browser.call("POST", f"{at}actions/drain", csrf + b"&sure=" + sure.encode()).status == 200
    )
    assert browser.call("POST", f"{at}actions/stacks", csrf).status == 200
    assert jobs.asked == [("demo", "drain", "n1"), ("demo", "stacks", "")]
    assert browser.call("GET", f"{at}actions/keep").status == 200
    assert browser.call("POST", f"{at}actions/scale", csrf + b"&value=1").status == 404
    assert browser.call("POST", f"{at}actions/drain").status == 403
    assert "actions/drain" not in browser.call("GET", "/jobs/demo/nodes/n9/").text, "it is gone"


def test_where_a_host_is_drained_instead_no_page_offers_to_drain_a_node() -> None:
    """In a cluster the form was there, and its answer was always a refusal."""
    browser = Browser(OneJob(running(nodes=2), can_drain=False)).enter()
    for at in ("/jobs/demo/", "/jobs/demo/nodes/n1/"):
        page = browser.call("GET", at).text
        assert "actions/stacks" in page
        assert "actions/drain" not in page


def test_the_head_says_the_limits_of_the_size_and_what_new_hosts_wait_for() -> None:
    view = running(nodes=2)
    assert view.status is not None
    words = pages.section("head", pages.JobPage(view, History(), AT))
    assert "at least 2<" in words
    grows = replace(view, status=view.status.model_copy(update={"maximum": 8}))
    grows = replace(grows, new_hosts="Pod demo-n2 waits: <no> host is free")
    words = pages.section("head", pages.JobPage(grows, History(), AT))
    assert "at least 2, at most 8<" in words
    assert "Pod demo-n2 waits: &lt;no&gt; host is free" in words


def test_the_time_line_of_many_nodes_shows_those_with_failures() -> None:
    view = running(nodes=pictures.NODES_SHOWN + 40)
    assert view.status is not None
    last = view.status.nodes[-1].id
    failed = JobEvent(id=3, at=AT, reason=EventReason.WORKER_FAILED, node=last, message="it failed")
    for events, shown in (([], False), ([failed], True)):
        page = pages.JobPage(replace(view, events=events), History(), AT)
        text = pages.section("rounds", page)
        assert "… and 40 more nodes" in text
        assert (f"<title>{last}</title>" in text) is shown
        assert ("<title>it failed</title>" in text) is shown


def test_the_page_shows_how_far_data_is_and_what_is_in_quarantine() -> None:
    dataset = DatasetStatus(
        name="d", epoch=1, epochs=3, samples=100, shards=10, finished=4, begun=1, quarantined=1,
        quarantine=["shard 7: three workers failed with it"],
    )  # fmt: skip
    stream = StreamStatus(name="s", watermark=5, lag=2, ended=False, partition_count=1)
    view = running()
    assert view.status is not None
    loader = LoaderStatus(epoch=1, position=640, samples=6000, batch=64)
    data = DataStatus(datasets=[dataset], streams=[stream], loader=loader)
    shown = view.status.model_copy(update={"data": data})
    page = pages.JobPage(replace(view, status=shown), History(), AT)
    text = Page(pages.section("data", page)).text
    assert "d: epoch 2 of 3, 4 of 10 shards finished, 1 begun" in text
    assert "shard 7: three workers failed with it" in text
    assert "ElasticLoader: epoch 2, 640 of 6000 samples trained (11%), 64 in a step" in text
    assert "s: watermark 5 or more in 1 partition, lag 2" in text
    assert not pages.section("data", pages.JobPage(view, History(), AT)).strip()


def test_the_last_time_below_a_picture_is_inside_of_it() -> None:
    """Its last letter was cut off."""
    scale = pictures.Scale(0.0, 80.0)
    points = [(0.0, 1.0), (78.0, 2.0)]
    drawn = str(pictures.value_curve(points, [], scale, "loss"))
    times = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">([^<]*)', drawn)
    at, anchor, text = max(times, key=lambda one: float(one[0]))
    assert (float(at), anchor, text) == (pictures.WIDTH, "end", "1.3 min")


def test_a_job_that_does_nothing_new_is_looked_at_less_often() -> None:
    """An open page of such a job took more than half a percent of a core."""
    pauses = [1.0]
    for changed in ([], ["rounds"], [], [], [], ["time", "head"], []):
        pauses.append(server.pause_after(pauses[-1], 1.0, changed))
    assert pauses == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 1.0, 2.0]


def test_a_change_from_the_page_is_looked_for_at_once() -> None:
    """Else its viewer would wait for as long as an idle job is not looked at."""

    async def looks() -> int:
        looked: asyncio.Queue[None] = asyncio.Queue()

        async def load() -> pages.JobPage:
            looked.put_nowait(None)
            return pages.JobPage(running(), History(), AT)

        watch = server.SectionWatch(load, 3600.0)
        changes = watch.changes("")
        async with asyncio.timeout(30):
            await anext(changes)
            for _ in range(2):
                await looked.get()
                watch.look_now()
            await looked.get()
        await changes.aclose()
        return looked.qsize()

    assert asyncio.run(looks()) == 0
