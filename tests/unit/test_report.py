"""``dlrover job report``: a page that stands alone, in which no word means anything but itself."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.cli.view import JobView
from dlrover_py.dashboard import pages
from dlrover_py.dashboard.pages import report as page
from dlrover_py.dashboard.timeline import (
    node_timelines,
    outages,
    round_timelines,
    samples,
    with_node_and_round,
)
from dlrover_py.protocol.local import History, ProgressSample
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import (
    GoodputStatus,
    JobEvent,
    JobPhase,
    JobStatus,
    RecoveryPhases,
    TimeBucket,
)
from tests.unit.test_view import hostile, status

VOID = {"meta", "br", "hr", "img", "link", "input"}
AT = 1_700_000_000.0


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what matters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            return  # "<line/>" is told as an end too
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def alone(text: str) -> Page:
    """The page, after it was seen to need nothing from elsewhere and to run nothing."""
    page = Page(text)
    assert {"script", "link", "img", "iframe", "object", "form", "a"}.isdisjoint(page.tags)
    names = {name for name, _ in page.attributes}
    assert not any(name.startswith("on") for name in names), names
    assert {"src", "href", "xlink:href", "action", "srcdoc"}.isdisjoint(names)
    assert "url(" not in text
    assert "@import" not in text
    policy = dict(page.attributes).get("content"), "default-src 'none'" in text
    assert policy[1]
    return page


def event(
    number: int, reason: str, at: float, message: str, *, round_: int | None = None,
    cause: int | None = None, node: str | None = None, took: float | None = None,
    warning: bool = False,
) -> JobEvent:  # fmt: skip
    return JobEvent(
        id=number, at=AT + at, reason=reason, message=message, round=round_, cause=cause,
        node=node, took_s=took, type="Warning" if warning else "Normal",
    )  # fmt: skip


LOST = "lost: host-1 was killed"
STORY = [
    event(1, "JobStarted", 0, "job demo started with a desired size of 2 nodes"),
    event(2, "NodeJoined", 1, "node n0 joined", node="n0"),
    event(3, "NodeJoined", 1, "node n1 joined", node="n1"),
    event(4, "RoundFormed", 1, "round 1: 2 nodes", round_=1, cause=1),
    event(5, "TrainingResumed", 4, "first step of round 1 is 1", round_=1, cause=4, took=4),
    event(6, "NodeLost", 10, f"node n1 was {LOST}", node="n1", round_=1, warning=True),
    event(7, "RoundFormed", 10, "round 2: 1 node", round_=2, cause=6),
    event(8, "NodeJoined", 12, "3 nodes joined: n2, n3, n4 and 1 more"),
    event(
        9, "TrainingResumed", 11,
        "first step of round 2 is 21; step 20 had been reached: no steps are repeated",
        round_=2, cause=7, took=1,
    ),
    event(10, "MasterStarted", 15, "the master of term 2 took over in round 2", round_=2),
]  # fmt: skip


GOODPUT = GoodputStatus(
    wall_s=20.0,
    share=0.75,
    seconds={
        TimeBucket.PRODUCTIVE: 15.0,
        TimeBucket.PROGRAM_STARTUP: 4.0,
        TimeBucket.WASTED_PROGRESS: 1.0,
    },
)


RECOVERY = RecoveryPhases(
    round=2, took_s=2.0, phases={"detect": 0.04, "decide": 0.001, "restore": 1.5}
)


def told(phase: JobPhase = JobPhase.SUCCEEDED) -> JobStatus:
    return status(phase).model_copy(
        update={
            "events": STORY, "started_at": AT, "ended_at": AT + 20, "goodput": GOODPUT,
            "restarts": {"loss": 1}, "published_at": AT + 20, "recoveries": [RECOVERY],
        }
    )  # fmt: skip


def picture(job: JobStatus, events: list[JobEvent] | None = None) -> JobView:
    return JobView(
        name=job.name, header_lines=["head"], phase=job.phase.value, reason=job.reason, status=job,
        conditions=job.conditions, events=job.events if events is None else events, document={},
    )  # fmt: skip


def test_the_page_tells_the_story() -> None:
    history = History(
        samples=[ProgressSample(at=AT + t, step=2 * t, round=1, nodes=2) for t in range(4, 20)]
    )
    found = alone(page(picture(told()), history, now=AT + 100))
    for words in (
        "demo", "Succeeded", "because [of] that", "20.0 s", "30 of 60", "75.0%", "loss 1.5",
        "round 1", "round 2", f"node n1 was {LOST}", "no steps are repeated", "1.0 s",
        "A: productive, 75.0%", "B: program startup, 20.0% (4.0 s)", "master of term 2",
        "C: wasted progress, 5.0% (1.0 s)", "detect 40 ms, decide <10 ms, restore 1.5 s",
    ):  # fmt: skip
        assert words in found.text, words
    assert found.attributes.count(("role", "img")) == 3
    (line,) = [value for name, value in found.attributes if name == "points"]
    assert line is not None
    places = [tuple(map(float, pair.split(","))) for pair in line.split()]
    assert len(places) >= 16
    assert places == sorted(places, key=lambda place: place[0])


@pytest.mark.parametrize(
    ("node", "events"), [("n0", [2, 7]), ("n1", [3, 6]), ("n3", [8]), ("n9", [])]
)
def test_the_page_of_a_node_has_its_events_and_its_rounds(node: str, events: list[int]) -> None:
    """One event may name several nodes, and a node that never failed had an empty table."""
    shown = pages.JobPage(picture(told(), STORY), History(), AT + 100)
    assert [event.id for event in shown.events_of(node)] == events
    assert ("None of the events" in pages.render("node_now.html", page=shown, node=node)) is (
        not events
    )


def test_what_ended_each_round_is_told_once() -> None:
    found = [(o.cause.id, o.round, o.resumed.id if o.resumed else 0) for o in outages(STORY)]
    assert found == [(6, 2, 9), (10, 0, 0)]


ROUNDS = [
    event(1, "JobStarted", 0, "job demo started with a desired size of 3 nodes"),
    event(4, "RoundFormed", 1, "round 1: 2 nodes, 4 workers (joined: n0, n1); because it starts"),
    event(5, "SpecChanged", 5, "the desired size is now 3 nodes"),
    event(6, "RoundFormed", 6, "round 2: 3 nodes, 6 workers (joined: n2); because of 5", cause=5),
    event(7, "CheckpointStored", 7, "the checkpoint of step 3 was stored"),
    event(8, "CheckpointFailed", 8, "the disk is full", warning=True),
    event(9, "NodeLost", 9, f"node n1 was {LOST}", node="n1", warning=True),
    event(
        10, "RoundFormed", 11,
        "round 3: 3 nodes, 6 workers (joined: n3; left: n1); because node n1 was lost", cause=9,
    ),
]  # fmt: skip


@pytest.mark.parametrize("known", [0, 2])
def test_who_was_in_each_round_and_why_it_ended_is_told(known: int) -> None:
    """Also without the first events, if the status names the members of the last round."""
    job = told(JobPhase.RUNNING)
    nodes = [
        job.nodes[0].model_copy(update={"id": node, "node_rank": rank})
        for rank, node in enumerate(("n0", "n3", "n2"))
    ]
    job = job.model_copy(update={"round": 3, "nodes": nodes if known else []})
    found = round_timelines(job, with_node_and_round(ROUNDS[known:]), AT + 20)
    text = [(r.number, r.who, r.workers, r.since - AT, r.until - AT, r.ended) for r in found]
    every = [
        (1, "n0, n1", 4, 1, 6, "the desired size is now 3 nodes"),
        (2, "n0, n1, n2", 6, 6, 9, f"node n1 was {LOST}"),
        (3, "n0, n2, n3", 6, 11, 20, ""),
    ]
    assert text == (every[1:] if known else every)


@pytest.mark.parametrize("phase", [JobPhase.SUSPENDED, JobPhase.FORMING, JobPhase.RUNNING])
def test_a_round_ends_when_the_job_is_suspended(phase: JobPhase) -> None:
    """It lasted until the next round, which may be days later, because "the job is resumed"."""
    story = [
        *ROUNDS,
        event(11, "Suspended", 14, "spec.suspend is true"),
        event(12, "Resumed", 18, "the job is resumed"),
        event(13, "RoundFormed", 19, "round 4: 1 node, 1 worker (joined: n0)", cause=12),
    ]
    known = {JobPhase.SUSPENDED: 9, JobPhase.FORMING: 10, JobPhase.RUNNING: 11}[phase]
    job = told(phase).model_copy(update={"reason": "1 of 2 nodes (resumed)", "ended_at": None})
    found = round_timelines(job, with_node_and_round(story[:known]), AT + 20)
    text = [(r.number, r.until - AT, r.ended) for r in found[2:]]
    assert text == [(3, 14, "spec.suspend is true"), (4, 20, "")][: 1 + (known == 11)]


def test_a_round_whose_loss_leaves_too_few_nodes_has_ended_then() -> None:
    lost = f"node n0 was {LOST}"
    story = [*ROUNDS, event(11, "NodeLost", 13, lost, node="n0", warning=True)]
    job = told(JobPhase.FORMING).model_copy(
        update={"reason": f"2 of at least 3 nodes are ready ({lost})", "ended_at": None}
    )
    last = round_timelines(job, with_node_and_round(story), AT + 20)[-1]
    assert (last.number, last.until - AT, last.ended) == (3, 13, lost)


def test_members_that_no_event_names_are_only_counted() -> None:
    story = [
        event(1, "RoundFormed", 1, "round 7: 40 nodes, 40 workers (joined: n0, n1 and 1 more)"),
        event(2, "RoundFormed", 2, "round 8: 1 node, 1 worker (left: n1)"),
        event(3, "RoundFormed", 3, "round 9"),
    ]
    found = round_timelines(told(), with_node_and_round(story), AT + 20)
    assert [r.who for r in found] == ["n0, n1 and 38 more", "not known", ""]


def test_a_list_that_is_cut_tells_nothing_of_the_members_of_other_rounds() -> None:
    """After 20 of 40 nodes had left, four of them were named as members of the next round."""
    first = [f"n{i}" for i in range(16)]
    gone = ", ".join(f"n{i}" for i in range(8, 24))
    story = [
        event(1, "RoundFormed", 1, f"round 1: 16 nodes, 16 workers (joined: {', '.join(first)})"),
        event(2, "RoundFormed", 2, f"round 2: 8 nodes, 8 workers (left: {gone} and 4 more)"),
        event(3, "RoundFormed", 3, "round 3: 9 nodes, 9 workers (joined: n50)"),
        event(4, "RoundFormed", 4, "round 4: 1 node, 1 worker (joined: n60; left: n1)"),
        event(5, "RoundFormed", 5, "round 5: 3 nodes, 3 workers (joined: n61)"),
    ]
    job = told(JobPhase.RUNNING)
    nodes = [job.nodes[0].model_copy(update={"id": n, "node_rank": 0}) for n in ("a", "b", "n61")]
    job = job.model_copy(update={"round": 5, "nodes": nodes})
    found = round_timelines(job, with_node_and_round(story), AT + 20)
    assert [r.who for r in found] == [
        ", ".join(first), "not known", "n50 and 8 more", "n60", "a, b, n61",
    ]  # fmt: skip


def test_scalings_checkpoints_and_terms_are_marks_in_the_picture_and_rounds_a_table() -> None:
    job = told().model_copy(update={"events": [*ROUNDS, STORY[-1]]})
    text = page(picture(job), History(), now=AT)
    for words in ("the desired size is now 3 nodes", "the disk is full", "master of term 2"):
        assert f"<title>{words}" in text.replace("the master of", "master of"), words
    assert "<title>round 3: 3 nodes (n0, n2, n3), 9.0 s; it ended: " in text
    assert '<td class="who">n0, n1, n2</td>' in text
    for shape in ("▲ size", "■ checkpoints", "◆ master"):
        assert shape in text
    assert "▲ size" not in page(picture(told(), STORY[:6]), History(), now=AT)


def test_many_checkpoints_at_one_place_are_one_mark() -> None:
    stored = [event(n, "CheckpointStored", n / 9, f"step {n} was stored") for n in range(200)]
    job = told().model_copy(update={"events": stored, "ended_at": AT + 1000})
    text = page(picture(job), History(), now=AT + 1000)
    assert 1 <= text.count("of which the last are:") <= 3
    assert "step 199 was stored" in text


def test_nodes_live_from_their_joining_until_they_are_lost() -> None:
    found = {lane.node: (lane.since - AT, lane.until - AT, lane.lost)
             for lane in node_timelines(told(), with_node_and_round(STORY), AT + 99)}  # fmt: skip
    assert found["n0"] == (1, 20, False)
    assert found["n1"] == (1, 10, True)
    assert {found[n] for n in ("n2", "n3", "n4")} == {(12, 20, False)}
    assert set(found) == {"n0", "n1", "n2", "n3", "n4"}


@pytest.mark.parametrize("again", ["NodeRestarted", "NodeJoined"])
def test_a_node_that_comes_back_is_not_lost(again: str) -> None:
    story = [*STORY, event(11, again, 16, "node n1 has come back", node="n1")]
    (n1,) = (lane for lane in node_timelines(told(), story, AT + 99) if lane.node == "n1")
    assert (n1.since - AT, n1.until - AT, n1.lost) == (1, 20, False)


def test_a_node_that_leaves_by_plan_is_not_lost_and_one_that_never_started_is_not_shown() -> None:
    """As after ``scale 50`` with three hosts, and ``scale 2``."""
    left = event(90, EventReason.NODE_LEFT, 20, "node n1 has left: no longer needed", node="n1")
    why = "node n7 has left: it was deleted before it was started"
    never = event(91, EventReason.NODE_LEFT, 20, why, node="n7")
    story = [one for one in with_node_and_round(STORY) if one.reason != EventReason.NODE_LOST]
    lanes = {lane.node: lane for lane in node_timelines(told(), [*story, left, never], AT + 99)}
    assert (lanes["n1"].until - AT, lanes["n1"].lost) == (20, False)
    assert "n7" not in lanes


def test_a_node_that_comes_back_with_many_others_is_not_lost() -> None:
    """The event of all that joined names 16 of them; the status has the others."""
    job = told(JobPhase.RUNNING)
    nodes = [job.nodes[0].model_copy(update={"id": f"n{i}"}) for i in range(20)]
    named = ", ".join(f"n{i}" for i in range(16))
    story = [
        *(event(i, "NodeLost", 10, f"node n{i} was {LOST}", node=f"n{i}") for i in range(21)),
        event(30, "NodeJoined", 12, f"20 nodes joined: {named} and 4 more"),
    ]
    found = node_timelines(job.model_copy(update={"nodes": nodes}), story, AT + 15)
    assert [lane.node for lane in found if lane.lost] == ["n20"]
    assert {lane.until - AT for lane in found if not lane.lost} == {15}


def test_a_cluster_tells_of_a_new_agent_only_in_words() -> None:
    words = "node n1 has a new agent process (incarnation 2)"
    (n1,) = [
        lane
        for lane in node_timelines(
            told(), with_node_and_round([*STORY, event(11, "NodeRestarted", 16, words)]), AT + 99
        )
        if lane.node == "n1"
    ]
    assert not n1.lost


def test_a_cluster_that_keeps_only_words_tells_the_same() -> None:
    bare = [e.model_copy(update={"node": None, "round": None}) for e in STORY]
    assert [(e.node, e.round) for e in with_node_and_round(bare)][5:7] == [("n1", None), (None, 2)]
    assert with_node_and_round(with_node_and_round(bare)) == with_node_and_round(bare)
    points = samples(History(), told(), with_node_and_round(bare))
    assert [(p.at - AT, p.step) for p in points] == [(4, 1), (10, 20), (11, 21), (20, 30)]
    shown = alone(page(picture(told().model_copy(update={"events": []}), bare), History(), now=AT))
    assert "round 2" in shown.text
    assert "None" not in shown.text


@pytest.mark.parametrize("phase", list(JobPhase))
def test_any_phase_and_any_lack_is_a_page(phase: JobPhase) -> None:
    bare = told(phase).model_copy(
        update={"events": [], "progress": None, "goodput": None, "nodes": [], "ended_at": None}
    )
    alone(page(picture(bare), History(), now=AT))
    nothing = JobView("x", [], phase.value, "r", None, [], [], {})
    assert phase.value in alone(page(nothing, History(), now=AT)).text


WORDS = "</title></style><script>a</script><img src=x onx=a>\"'&\x1b[\x00"


def test_no_word_of_a_script_or_a_worker_means_anything() -> None:
    found = alone(page(hostile(WORDS), History(), now=AT))
    spelled = WORDS.replace("\x1b", r"\x1b").replace("\x00", r"\x00")
    assert found.text.count(spelled) >= 5
    bad = STORY[5].model_copy(update={"message": WORDS, "node": WORDS})
    job = told().model_copy(update={"events": [*STORY[:5], bad, *STORY[6:]]})
    assert spelled in alone(page(picture(job), History(), now=AT)).text


@given(
    texts=st.lists(st.text(max_size=40), min_size=1, max_size=6),
    times=st.lists(st.floats(-1e3, 1e11), min_size=1, max_size=6),
    reason=st.sampled_from(["NodeJoined", "NodeLost", "RoundFormed", "TrainingResumed", "X"]),
    steps=st.lists(st.tuples(st.floats(0, 1e11), st.integers(0, 2**53)), max_size=5),
)
def test_any_words_and_times_are_a_page(
    texts: list[str], times: list[float], reason: str, steps: list[tuple[float, int]]
) -> None:
    events = [
        JobEvent(id=i, at=at, reason=reason, message=text, node=text, round=i, cause=i - 1)
        for i, (text, at) in enumerate(zip(texts, times, strict=False))
    ]
    history = History(
        samples=[ProgressSample(at=at, step=step, round=1, nodes=1) for at, step in steps]
    )
    job = told().model_copy(update={"events": events, "reason": texts[0], "name": texts[-1]})
    text = page(picture(job), history, now=AT)
    alone(text)
    assert not re.search(
        r"nan|inf\b", " ".join(re.findall(r'(?:x|y|width|points)="([^"]*)"', text))
    )
