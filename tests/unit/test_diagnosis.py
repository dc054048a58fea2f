"""A job that stands still, as its master sees it: suspicion, snapshot, verdict and action."""

from typing import Any, Literal

import pytest

from dlrover_py.master.core.diagnosis.watch import SNAPSHOT_S
from dlrover_py.master.core.events import KeepEvidence, SnapshotArrived, Stalled
from dlrover_py.master.core.state import Step
from dlrover_py.protocol.agents import FailureKind, WorkerPhase
from dlrover_py.protocol.diagnosis import Collective, Frame, HangKind, NodeSnapshot, WorkerSnapshot
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionType, EventReason
from tests.builders import Bench, elastic_job, job_file, running

LOCK = [Frame(function="update", file="/job/model.py", line=12)]
SAVE = [Frame(function="save", file="/site-packages/torch/serialization.py", line=1)]
SHORT_S, FIRST_S = 20, 100


def spec(hang: Literal["off", "tell", "act"] = "tell", **fields: Any) -> ElasticJob:
    document = job_file(3, restartCount=3)
    times = {"hangSeconds": SHORT_S, "firstStepSeconds": FIRST_S}
    document["spec"]["diagnosis"] = {"hang": hang, **times, **fields}
    return ElasticJob.parse(document)


class Train:
    """A job of three nodes that trains until it stands still."""

    def __init__(self, job: ElasticJob | None = None) -> None:
        self.bench: Bench = running(job or spec())
        self.step = 0
        self.asked: dict[NodeId, int] = {}

    def go(self, steps: int = 10) -> None:
        """Train at one step a second."""
        for _ in range(steps):
            self.step += 1
            for agent in self.bench.living():
                agent.reach(self.step)
            self.bench.pass_time(1.0)

    def number(self) -> int:
        """The number of the snapshot that agents are asked for; 0 without one."""
        told = [a for _, a in self.bench.history if a.round == self.bench.job.state.round]
        return max((a.snapshot for a in told[-3:]), default=0)

    def snapshots(self) -> int:
        return self.bench.job.state.snapshots

    def until_asked(self, most_s: int) -> int:
        """Stand still until a snapshot is asked for; return the seconds."""
        for second in range(most_s):
            if self.number():
                return second
            self.bench.pass_time(1.0)
        raise AssertionError(f"no snapshot within {most_s} s")

    def answer(self, guilty: str = "n1", *, age_s: float = 1e4, **fields: Any) -> Step:
        """Send the snapshots of all nodes: all ranks but that of one node wait."""
        out = Step()
        number = self.bench.job.state.snapshots
        for agent in self.bench.living():
            rank = self.bench.members.index(agent.node)
            waits = agent.node != guilty
            record = Collective(
                group="0", seq=9 if waits else 8, op="all_reduce", open=waits, age_s=age_s
            )
            worker = WorkerSnapshot(
                **{"rank": rank, "local_rank": 0, "pid": 7, "state": "S", "stack": LOCK,
                   "collectives": [record], "recorded": True, **({} if waits else fields)}
            )  # fmt: skip
            snapshot = NodeSnapshot(
                boot_id=agent.boot, number=number, round=agent.follows, workers=[worker]
            )
            out = self.bench.step(SnapshotArrived(agent.node, snapshot))
        return out

    def condition(self) -> str:
        status = self.bench.job.status(self.bench.now, self.bench.now)
        found = {c.type: c for c in status.conditions}.get(ConditionType.HANGING)
        return "" if found is None else f"{found.status}: {found.message}"


def test_a_job_that_trains_is_never_looked_at() -> None:
    train = Train()
    train.go(200)
    assert not train.bench.job.state.snapshots
    assert not train.condition()


def test_a_hang_is_suspected_looked_at_and_told() -> None:
    train = Train()
    train.go()
    assert train.until_asked(SHORT_S + 3) >= SHORT_S - 2
    out = train.answer()
    (kept,) = [effect for effect in out.effects if isinstance(effect, KeepEvidence)]
    assert kept.manifest.verdict is not None
    assert kept.manifest.verdict.kind is HangKind.NOT_ENTERED
    assert kept.manifest.nodes == ["n0", "n1", "n2"]
    assert train.bench.reasons()[-1] == EventReason.HANG
    assert train.condition().startswith("True: rank 1 (node n1) has not entered the all_reduce")
    assert train.bench.job.state.pending_round is None, "nothing is done about it"
    train.go(1)
    assert train.bench.reasons()[-1] == EventReason.HANG_OVER
    assert train.condition().startswith("False")


def test_the_same_verdict_is_told_once_and_looked_at_ever_more_rarely() -> None:
    train = Train()
    train.go()
    train.until_asked(SHORT_S + 3)
    train.answer()
    for _ in range(200):
        train.bench.pass_time(1.0)
        if train.number():
            train.answer()
    assert train.bench.reasons().count(EventReason.HANG) == 1
    assert 3 <= train.bench.job.state.snapshots <= 5


def test_a_rank_that_computes_is_told_only_after_the_time_of_a_first_step() -> None:
    train = Train()
    train.go()
    train.until_asked(SHORT_S + 3)
    train.answer(cpu=1.0)
    assert EventReason.HANG not in train.bench.reasons()
    for _ in range(FIRST_S * 2):
        train.bench.pass_time(1.0)
        if train.number():
            train.answer(cpu=1.0)
    assert train.bench.reasons().count(EventReason.HANG) == 1


def test_a_node_that_sends_nothing_is_waited_for_only_for_a_while() -> None:
    train = Train()
    train.go()
    train.until_asked(SHORT_S + 3)
    number = train.bench.job.state.snapshots
    train.bench.pass_time(SNAPSHOT_S + 1)
    assert train.bench.reasons()[-1] != EventReason.HANG, "without any snapshot nothing is known"
    diagnosis = train.bench.job.live.diagnosis
    assert diagnosis is not None
    assert diagnosis.number == number


def test_only_a_sure_verdict_restarts_the_round_and_its_node_is_charged() -> None:
    train = Train(spec("act"))
    train.go()
    train.until_asked(SHORT_S + 3)
    train.answer()
    failure = train.bench.job.state.last_failure
    assert failure is not None
    assert failure.worker.kind is FailureKind.HANG
    assert failure.node == "n1"
    train.bench.settle()
    assert train.bench.job.state.round == 2
    node = train.bench.job.live.nodes.get(NodeId("n1"))
    assert node is not None
    assert node.restarts == 1


def test_off_looks_only_when_a_user_asks() -> None:
    train = Train(spec("off"))
    train.go()
    train.bench.pass_time(FIRST_S * 3)
    assert not train.bench.job.state.snapshots
    asked = train.bench.spec.with_snapshot("now")
    train.bench.change(asked)
    assert EventReason.SPEC_CHANGED not in train.bench.reasons()
    train.bench.exchange()
    train.answer()
    status = train.bench.job.status(train.bench.now, 0)
    assert status.diagnosis is not None
    assert status.diagnosis.request == "now"
    assert status.diagnosis.lines
    train.bench.pass_time(5.0)
    assert train.snapshots() == 1, "one text is one request"
    train.bench.restart_master()
    train.bench.settle()
    train.bench.pass_time(5.0)
    assert train.snapshots() == 1, "also for the next master"


def test_a_script_without_steps_is_watched_only_if_a_time_is_set() -> None:
    train = Train(spec(silentSeconds=30))
    for agent in train.bench.living():
        report = agent.report().model_copy(update={"idle_s": 29.0})
        train.bench.say(agent, report)
    train.bench.pass_time(0.1)
    assert not train.bench.job.state.snapshots
    for agent in train.bench.living():
        train.bench.say(agent, agent.report().model_copy(update={"idle_s": 31.0}))
    assert train.snapshots() == 1
    other = Train()
    for agent in other.bench.living():
        other.bench.say(agent, agent.report().model_copy(update={"idle_s": 9999.0}))
    other.bench.pass_time(FIRST_S - 1)
    assert not other.bench.job.state.snapshots


@pytest.mark.parametrize("age_s", [0.3, 1e4])
def test_before_any_step_a_collective_that_stays_open_is_told_and_nothing_is_done(
    age_s: float,
) -> None:
    """A script may report no steps at all, or rank 0 may have to get the data first."""
    train = Train(spec(hang="act"))
    assert train.until_asked(FIRST_S + 3) >= FIRST_S - 2
    train.answer(age_s=age_s)
    told = EventReason.HANG in train.bench.reasons()
    assert told == (age_s > FIRST_S)
    assert train.bench.job.state.pending_round is None
    train.go(1)
    assert (train.bench.reasons()[-1] == EventReason.HANG_OVER) == told


def test_before_any_step_ranks_without_collectives_may_do_anything() -> None:
    train = Train()
    train.until_asked(FIRST_S + 3)
    for agent in train.bench.living():
        waits = WorkerSnapshot(rank=0, local_rank=0, pid=7, state="S", stack=LOCK, recorded=True)
        snapshot = NodeSnapshot(
            boot_id=agent.boot, number=train.snapshots(), round=agent.follows, workers=[waits]
        )
        train.bench.step(SnapshotArrived(agent.node, snapshot))
    assert EventReason.HANG not in train.bench.reasons()


def test_a_rank_that_waits_for_storage_is_not_restarted_before_a_first_step_could_be_made() -> None:
    """After the restart it would wait for the same storage again."""
    train = Train(spec(hang="act"))
    train.go()
    train.until_asked(SHORT_S + 3)
    train.answer(stack=SAVE)
    assert train.bench.reasons()[-1] == EventReason.HANG
    number, since = train.bench.job.state.round, train.bench.now
    while train.bench.job.state.round == number:
        train.bench.pass_time(1.0)
        if train.number():
            train.answer(stack=SAVE)
        assert train.bench.now < 4 * FIRST_S
    assert train.bench.now - since > FIRST_S - SHORT_S


def test_after_an_outage_the_next_hang_is_found_as_soon_as_before() -> None:
    train = Train()
    train.go()
    for _ in range(2):
        train.until_asked(SHORT_S + 3)
        train.answer()
        train.bench.pass_time(60.0)
        train.go(5)
        assert train.bench.reasons()[-1] == EventReason.HANG_OVER


def test_a_standstill_of_the_master_is_no_hang() -> None:
    train = Train()
    train.go()
    train.bench.now += 60.0
    train.bench.step(Stalled(60.0))
    train.bench.exchange()
    train.bench.pass_time(2.0)
    assert not train.bench.job.state.snapshots


@pytest.mark.parametrize("change", ["boot", "number", "round"])
def test_a_snapshot_of_another_time_is_dropped(change: str) -> None:
    train = Train()
    train.go()
    train.until_asked(SHORT_S + 3)
    agent = train.bench.agent("n0")
    number, boot, of = train.bench.job.state.snapshots, agent.boot, agent.follows
    snapshot = NodeSnapshot(
        boot_id="another-boot" if change == "boot" else boot,
        number=number - 1 if change == "number" else number,
        round=of + 1 if change == "round" else of,
    )
    for node in ("n0", "n1", "n2"):
        train.bench.step(SnapshotArrived(NodeId(node), snapshot))
    assert train.bench.job.live.diagnosis is None


def test_a_hang_that_is_not_looked_for_any_more_is_over() -> None:
    train = Train()
    train.go()
    train.until_asked(SHORT_S + 3)
    train.answer()
    assert train.condition().startswith("True")
    train.bench.change(spec("off"))
    assert train.condition().startswith("False")


def test_a_job_stands_still_after_one_of_its_nodes_has_ended() -> None:
    """The data of n1 ended earlier. The others get as long as a first step may take."""
    train = Train()
    train.go()
    train.bench.agent("n1").phase = WorkerPhase.SUCCEEDED
    assert train.until_asked(FIRST_S + 5) >= FIRST_S - 2
    train.bench.agent("n1").ended = True
    train.answer()
    assert train.bench.reasons()[-1] == EventReason.HANG
    assert train.condition().startswith("True: rank 1 (node n1) has not entered the all_reduce")
    assert "it has ended" in train.condition()


def test_members_alone_are_asked_and_a_failure_ends_the_snapshot() -> None:
    train = Train(elastic_job(2, standby=1))
    train.go()
    train.bench.change(train.bench.spec.with_snapshot("now"))
    told = {e: a for e, a in train.bench.history[-3:] if a.snapshot}
    assert len(told) == 2
    train.bench.kill(NodeId("n0"))
    train.bench.settle()
    train.bench.pass_time(SNAPSHOT_S * 2)
    assert train.bench.job.live.snapshot == 0
    train.bench.check_running()
