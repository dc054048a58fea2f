"""The jobs for programs and notebooks, without a job that runs."""

import asyncio
import importlib.util
import inspect
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.cli.dashboard import HISTORIES_KEPT, JobPages
from dlrover_py.cli.logs import TAIL_LINES, LogQuery, tail
from dlrover_py.cli.view import JobRow
from dlrover_py.client import JobList, Jobs, NamedJob, TimeShare
from dlrover_py.dashboard import pages
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job_view import JobView, time_shares
from dlrover_py.protocol.local import History
from dlrover_py.protocol.status import GoodputStatus, JobEvent, JobPhase, TimeBucket
from tests.unit.test_dashboard import running
from tests.unit.test_report import Page
from tests.unit.test_runs import made
from tests.unit.test_view import status

T = TypeVar("T")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without jobs and without a cluster."""
    monkeypatch.setenv("DLROVER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    return tmp_path


def ended(root: Path) -> None:
    """A run of the job ``demo`` that has succeeded."""
    last = status(JobPhase.SUCCEEDED).model_copy(update={"ended_at": 5.0})
    (made(root, "demo@1") / names.STATUS_FILE).write_text(last.model_dump_json(by_alias=True))


@contextmanager
def job_that_hangs_up(root: Path, name: str) -> Iterator[None]:
    """A running job whose cluster process ends each call without an answer."""
    (root / name).mkdir(parents=True)
    root.chmod(0o700)

    def serve(listening: socket.socket) -> None:
        while True:
            try:
                call, _ = listening.accept()
            except OSError:
                return
            call.close()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / name / names.CLUSTER_SOCKET))
        listening.listen()
        serving = threading.Thread(target=serve, args=(listening,))
        serving.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            serving.join()


def test_a_job_without_a_readable_status_is_listed_with_its_problem(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """The list of the dashboard failed as a whole for the one, and called the other killed."""
    ended(here / "state")
    made(here / "state", "killed@1", last=False)
    (made(here / "state", "damaged@1") / names.STATUS_FILE).write_text("{")
    monkeypatch.chdir(here)  # the path of a socket is short
    monkeypatch.setenv("DLROVER_RUNTIME_DIR", "run")
    with job_that_hangs_up(Path("run"), "mute"):
        rows = {row.name: row for row in JobPages(Jobs()).rows()}
    assert {name: row.phase for name, row in rows.items()} == {
        "mute": "Unknown",
        "demo": "Succeeded",
        "killed": "Killed",
        "damaged": "Damaged",
    }
    assert "run/mute" in rows["mute"].reason
    assert "damaged: " in rows["damaged"].reason
    assert (rows["demo"].reason, rows["killed"].reason) == ("", "")


def test_a_notebook_whose_event_loop_runs_can_call(here: Path) -> None:
    ended(here / "state")

    async def cell() -> tuple[str, str]:
        jobs = Jobs()
        (row,) = jobs.list()
        return row.name, jobs.get("demo").wait(timeout_s=0)

    assert asyncio.run(cell()) == ("demo", "Succeeded")


SECONDS = {"productive": 3.0, "wasted_progress": 3.0}


def test_goodput_is_a_frame_where_pandas_is_there(here: Path) -> None:
    folder = made(here / "state", "demo@1")
    told = status(JobPhase.SUCCEEDED).model_copy(
        update={"goodput": GoodputStatus(wall_s=6.0, share=0.5, seconds=SECONDS)}
    )
    (folder / names.STATUS_FILE).write_text(told.model_dump_json(by_alias=True))
    table = Jobs().get("demo").goodput()
    if importlib.util.find_spec("pandas") is None:
        assert table == time_shares(told.goodput)
    else:
        assert list(table.columns) == ["what", "share", "seconds"]
        assert list(table["what"]) == ["productive", "wasted_progress"]
        assert table["seconds"][1] == 3.0


def test_each_call_to_a_job_that_does_not_exist_is_refused_in_words(here: Path) -> None:
    with pytest.raises(ConfigError, match="job nobody is not known on this machine"):
        Jobs().get("nobody")
    with pytest.raises(ConfigError, match="nodes=2: hosts are simulated on this machine only"):
        Jobs(namespace="a").submit("job.yaml", nodes=2)
    with pytest.raises(ConfigError, match="apply=True changes a job of a cluster"):
        Jobs().submit("job.yaml", apply=True)
    with pytest.raises(ConfigError, match="kubectl drain"):
        NamedJob(Jobs(namespace="a"), "x").drain("n0")


def test_a_page_about_a_job_of_this_machine_never_reaches_a_cluster(here: Path) -> None:
    """The page stays open after the job's end. A job of a cluster may have the same name."""
    shown = JobPages(Jobs())
    ended(here / "state")
    for call in (
        lambda: shown.change("demo", "suspend", ""),
        lambda: shown.change("demo", "scale", "3"),
        lambda: shown.load("another"),
        lambda: shown.log_tail("another", "n0", None),
        lambda: shown.evidence("another", "n0"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert "this machine" in str(error.value)
        assert "kubeconfig" not in str(error.value)


def test_the_newest_lines_of_a_node_are_those_of_all_its_ranks(tmp_path: Path) -> None:
    """With eight ranks, only the last one was shown."""
    for rank in range(8):
        folder = tmp_path / "n0" / "1" / "1" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("".join(f"line {i}\n" for i in range(300)))
    found = tail(tmp_path, LogQuery(node="n0")).lines
    assert len(found) == TAIL_LINES
    origins = Counter(line.partition("]")[0] for line in found)
    assert len(origins) == 8
    assert set(origins.values()) == {TAIL_LINES // 8}
    assert found[-1].endswith("line 299")


def test_many_runs_of_one_job_hide_no_other(here: Path) -> None:
    last = status(JobPhase.SUCCEEDED).model_copy(update={"ended_at": 5.0})
    for number in range(60):
        at = last.model_copy(update={"name": "often", "ended_at": 100.0 + number})
        folder = made(here / "state", f"often@{100 + number}")
        (folder / names.STATUS_FILE).write_text(at.model_dump_json(by_alias=True))
    ended(here / "state")
    assert [row.name for row in JobPages(Jobs()).rows()] == ["often", "demo"]


def test_an_earlier_run_has_a_page_and_a_killed_one_has_the_events_of_its_journal(
    here: Path,
) -> None:
    first = status(JobPhase.FAILED).model_copy(update={"ended_at": 1.0, "reason": "the first one"})
    folder = made(here / "state", "demo@1")
    (folder / names.STATUS_FILE).write_text(first.model_dump_json(by_alias=True))
    killed = made(here / "state", "demo@2", last=False)
    event = JobEvent(id=1, at=1.0, reason="NodeLost", message="from the journal")
    journal = json.dumps({"term": 1, "events": [event.model_dump(mode="json")]})
    (killed / names.JOURNAL_FILE).write_text(journal)
    made(here / "state", "demo@3")
    made(here / "state", "another@1")
    shown = JobPages(Jobs())
    assert shown.runs("demo") == shown.runs("demo@1") == ["demo@3", "demo@2", "demo@1"]
    assert shown.load("demo@1")[0].reason == "the first one"
    assert [e.message for e in shown.load("demo@2")[0].events] == ["from the journal"]
    assert shown.load("demo@3")[0].name == "demo@3"
    (killed / names.JOURNAL_FILE).write_text("{")
    assert shown.load("demo@2")[0].events == []
    for wrong in ("demo@4", "demo@", "@1", "../state/demo@1", "x@../demo@1"):
        with pytest.raises(ConfigError, match="is not known on this machine"):
            shown.load(wrong)


def test_a_notebook_shows_no_word_as_markup(here: Path) -> None:
    words = "</td><script>a</script><img src=x onx=a>\"'"
    page = Page(JobList([JobRow(*[words] * 10)]).table())
    assert not {"script", "img"} & set(page.tags)
    ended(here / "state")
    page = Page(Jobs().get("demo").frame())
    assert page.tags == ["iframe"]
    attributes = dict(page.attributes)
    assert attributes["sandbox"] is None, "nothing in it may run"
    assert "<h1>" in str(attributes["srcdoc"])


@given(st.dictionaries(st.sampled_from(list(TimeBucket)), st.floats(1e-3, 1e6), min_size=1))
def test_the_shares_are_all_of_the_time(seconds: dict[str, float]) -> None:
    shown = time_shares(GoodputStatus(wall_s=sum(seconds.values()), seconds=seconds))
    assert {part["what"]: part["seconds"] for part in shown} == seconds
    assert sum(part["share"] for part in shown) == pytest.approx(1.0)
    if TimeBucket.PRODUCTIVE in seconds:
        assert shown[0]["what"] == TimeBucket.PRODUCTIVE
    assert time_shares(None) == []


class ClusterSeen(Jobs):
    """Jobs of a cluster, of which one is known."""

    def __init__(self, view: JobView) -> None:
        super().__init__(namespace="a")
        self.view = [view]  # a copy of this object shares it

    def read(self, name: str | None, call: Callable[[Any], T]) -> T:
        return call(self)

    def load_view(self, *, with_pods: bool = False) -> JobView:
        return self.view[0]

    def history(self) -> History:
        return History()


def test_the_pages_of_a_clusters_job_collect_what_a_page_has_seen_of_its_run(here: Path) -> None:
    began = running()
    assert began.status is not None
    assert began.status.progress is not None
    jobs = ClusterSeen(began)
    shown = JobPages(jobs)
    progress = began.status.progress.model_copy(update={"step": 5})
    for step in (5, 5, 8):
        now = progress.model_copy(update={"step": step})
        jobs.view[0] = replace(began, status=began.status.model_copy(update={"progress": now}))
        _, history = shown.load("demo")
    assert [one.step for one in history.samples] == [5, 8]
    assert history.partial
    page = pages.JobPage(jobs.view[0], history, began.status.published_at)
    assert "in which a page of this job was open here" in pages.section("curves", page)
    again = began.status.model_copy(update={"started_at": 1.0, "progress": progress})
    jobs.view[0] = replace(began, status=again)
    assert [one.step for one in shown.load("demo")[1].samples] == [5], "it is another run"
    for i in range(HISTORIES_KEPT):
        shown.load(f"job-{i}")
    jobs.view[0] = replace(began, status=again.model_copy(update={"progress": None}))
    assert shown.load("demo")[1].samples == [], "the history of the job seen longest ago is gone"


def test_what_a_notebook_can_call_is_small_and_has_types() -> None:
    """At most 200 lines of signatures, each of at most 100 characters."""
    lines = 0
    for owner in (Jobs, NamedJob, JobList, TimeShare):
        for name, member in vars(owner).items():
            function = member.fget if isinstance(member, property) else member
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            found = inspect.signature(function)
            types = [p.annotation for p in found.parameters.values() if p.name != "self"]
            assert inspect.Signature.empty not in (*types, found.return_annotation), name
            assert not inspect.iscoroutinefunction(function), name
            lines += 1 + len(f"def {name}{found}") // 100
    assert 20 < lines <= 200
