"""Documents that a schema accepts, taken in by the cores: no one of them may raise.

An exception would end the process, which is started again, hears the same, and ends again. So each
document is either taken or refused when it is read.
"""

import json
import math
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from dlrover_agent.core import (
    MEASURED,
    Assigned,
    Core,
    Event,
    MasterUnreachable,
    Signalled,
    StepReported,
    Tick,
    WorkerEnded,
    WorkersGone,
)
from dlrover_py.master.core.events import (
    Assign,
    NodeEnded,
    NodeSeen,
    NodesListed,
    Reported,
    RestoreAsked,
    Rules,
)
from dlrover_py.master.core.job import Job
from dlrover_py.master.core.state import DurableState
from dlrover_py.protocol.agents import AgentReport, Assignment
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId, Term
from dlrover_py.protocol.workers import WorkerProgress
from tests.builders import WALL, Bench, crash, dumped, elastic_job, running
from tests.schemas import documents

OFTEN = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


M = TypeVar("M")


def read(kind: type[M], document: dict[str, Any]) -> M | None:
    """The document as it is read from a connection; None if it is refused."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(document))
    except ValidationError:
        return None


def looked_at(job: Job, now: float) -> None:
    """All that leaves a master can be written, and be read again."""
    for effect in job.step([], now, WALL).effects:
        if isinstance(effect, Assign):
            text = effect.assignment.model_dump_json()
            assert Assignment.model_validate_json(text) == effect.assignment
    status = job.status(now, WALL)
    assert type(status).model_validate_json(status.model_dump_json()) == status
    journal = job.state
    read = DurableState.from_json(journal.to_json())
    assert dumped(read, {"generation"}) == dumped(journal, {"generation"})


def jobs(rules: Rules) -> Bench:
    bench = Bench(elastic_job(2, 1), rules)
    if rules.can_create:
        return running(elastic_job(2, 1), rules)
    bench.step()
    for name in ("n0", "n1"):
        bench.boot(NodeId(name))
    for _ in range(3):
        bench.exchange()
    bench.check_running()
    return bench


GOOD = running().agent("n0").report().model_dump(mode="json")
KEPT = {"boot_id", "offer"}
"""Of an agent process that goes on: it draws them once, or each time anew."""


@pytest.mark.parametrize("can_create", [True, False])
def test_no_report_raises_in_the_master(can_create: bool) -> None:
    @OFTEN
    @given(
        changes=st.lists(
            st.tuples(st.sampled_from(["n0", "n1", "n2"]), documents(AgentReport, GOOD)),
            min_size=1,
            max_size=4,
        )
    )
    def tried(changes: list[tuple[str, dict[str, Any]]]) -> None:
        bench = jobs(Rules(can_create=can_create, check_s=5.0))
        job, now = bench.job, bench.now
        for name, document in changes:
            agents = bench.agents[NodeId(name)]
            mine = agents[-1].report().model_dump(mode="json") if agents else GOOD
            drawn = {k: v for k, v in document.items() if GOOD.get(k) != v and k not in KEPT}
            report = read(AgentReport, {**mine, **drawn, "seq": mine["seq"]})
            if report is None:
                continue
            now += 1.0
            job.step([Reported(NodeId(name), report), RestoreAsked(1, report.follows)], now, WALL)
            looked_at(job, now)
            for held in report.memory:
                job.live.checkpoints.memory.locations(held.id)
        now += 60.0
        job.step([], now, WALL)
        again = Job.resume(
            job.live.spec, bench.rules, job.state, term=Term(job.state.term + 1), now=now, wall=WALL
        )
        again.step([], now, WALL)
        looked_at(again, now)

    # no assert: no exception is raised
    tried()


KEPT_BY_A_MASTER = json.loads(running().job.state.to_json())


@pytest.mark.parametrize("can_create", [True, False])
def test_a_journal_is_refused_when_it_is_read_or_can_be_gone_on_from(can_create: bool) -> None:
    @OFTEN
    @given(document=documents(DurableState, KEPT_BY_A_MASTER))
    def tried(document: dict[str, Any]) -> None:
        journal = read(DurableState, document)
        if journal is None:
            return
        rules, term = Rules(can_create=can_create), Term(journal.term + 1)
        job = Job.resume(elastic_job(3), rules, journal, term=term, now=100.0, wall=WALL)
        job.step([], 100.0, WALL)
        for name in ("n0", "n1", "n2"):
            report = AgentReport.model_validate({**GOOD, "boot_id": f"boot-{name}-{name}"})
            job.step([Reported(NodeId(name), report)], 101.0, WALL)
        job.step([], 200.0, WALL)
        looked_at(job, 200.0)

    # no assert: looked_at() asserts; no exception is raised
    tried()


TOLD = {
    "term": 1, "version": 1, "incarnation": 1, "directive": "run", "reason": "the job starts",
    "round": 1, "nnodes": 2, "world_size": 2, "master_addr": "127.0.0.1", "master_port": 29500,
}  # fmt: skip
CHECKED = {**TOLD, "directive": "check", "check": 1}


@OFTEN
@given(
    told=st.lists(
        documents(Assignment, TOLD) | documents(Assignment, CHECKED), min_size=1, max_size=4
    ),
    said=st.lists(documents(WorkerProgress, {"round": 1, "local_rank": 0}), max_size=3),
    measured=st.dictionaries(
        st.sampled_from(sorted(MEASURED)), st.sampled_from([-1.0, 0.0, 1e308])
    ),
    last=st.sampled_from(["passes", "fails", "signal"]),
)
def test_no_assignment_and_no_word_of_a_worker_raises_in_the_agent(
    told: list[dict[str, Any]], said: list[dict[str, Any]], measured: dict[str, float], last: str
) -> None:
    core, now = Core(nproc=2), 0.0
    for document in told:
        assignment = read(Assignment, document)
        if assignment is None:
            continue
        now += 1.0
        happens: list[Event] = [Assigned(assignment), MasterUnreachable(), Tick()]
        for words in said:
            if (news := read(WorkerProgress, {**words, "round": assignment.round})) is not None:
                step, metrics = news.step or 0, measured or news.metrics
                happens += [
                    StepReported(news.round, rank, step, news.total, metrics)
                    for rank in (0, 1, news.local_rank)
                ]
        failure = crash() if last == "fails" else None
        happens += [
            WorkerEnded(assignment.round, 0, failure),
            WorkerEnded(assignment.round, 1, None),
        ]
        happens += (
            [Signalled("SIGTERM", 15)] if last == "signal" else [WorkersGone(assignment.round)]
        )
        for event in happens:
            core.handle(event, now)
        for result in (core.check, core.progress):
            assert result is None or type(result).model_validate_json(result.model_dump_json())


NODE = st.sampled_from([NodeId(n) for n in ("n0", "n1", "n2", "n²", "n" + "9" * 250, "", "a.b")])
TEXT = st.sampled_from(["", "x", "\0", "é" * 5000])
TOPOLOGY = st.lists(TEXT, max_size=3).map(tuple)
SECONDS = st.sampled_from([-1.0, 0.0, 1e308, math.inf])
FACTS = st.one_of(
    st.builds(
        NodeSeen,
        NODE,
        st.booleans(),
        topology=TOPOLOGY,
        message=TEXT,
        leaving=TEXT,
        runs=st.booleans(),
        grace_s=SECONDS,
        exists=st.booleans(),
        cut_off=st.booleans(),
        template_hash=TEXT,
    ),
    st.builds(
        NodeEnded,
        NODE,
        TEXT,
        exit_code=st.sampled_from([None, -(2**31), -9, 0, 2, 2**31]),
        free=st.booleans(),
        output=TEXT,
    ),
    st.builds(NodesListed, st.frozensets(NODE), free=st.booleans()),
)


@pytest.mark.parametrize("can_create", [True, False])
def test_no_fact_of_a_platform_raises_in_the_master(can_create: bool) -> None:
    @OFTEN
    @given(facts=st.lists(FACTS, min_size=1, max_size=5))
    def tried(facts: list[NodeSeen | NodeEnded | NodesListed]) -> None:
        bench = jobs(Rules(can_create=can_create))
        now = bench.now
        for fact in facts:
            now += 1.0
            bench.job.step([fact], now, WALL)
            looked_at(bench.job, now)
        bench.job.step([], now + 100.0, WALL)
        looked_at(bench.job, now + 100.0)

    # no assert: looked_at() asserts; no exception is raised
    tried()


def test_a_checkpoint_folder_with_the_longest_name_can_be_told() -> None:
    job = elastic_job(2).model_dump(by_alias=True, mode="json")
    job["spec"]["checkpoint"] = {"dir": "/" + "\U0001f4be" * 1023}
    # no assert: the bench checks each step
    running(ElasticJob.read(job))
