"""Dynamic shards in a job: whose requests count, what a failure costs, and a new master."""

from typing import Any

import pytest

from dlrover_py.cli.view import stream_line
from dlrover_py.master.core.events import ShardsAnswer, ShardsAsked
from dlrover_py.protocol.agents import (
    Confidence,
    FailureCause,
    FailureClass,
    FailureKind,
    HeldLease,
    WorkerFailure,
    WorkerLeases,
)
from dlrover_py.protocol.errors import SupersededError
from dlrover_py.protocol.job_view import dataset_line
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.shards import (
    AnswerCode,
    Credit,
    DatasetSpec,
    Level,
    ShardAnswer,
    ShardLease,
    ShardRequest,
)
from tests.builders import Bench, SimAgent, crash, elastic_job, running

SPEC = DatasetSpec(sizes=[(20, 10)], shuffle=False, level=Level.EXACTLY_ONCE_ACCOUNTING)


class Script:
    """A worker of a node that trains on shards."""

    def __init__(self, bench: Bench, node: str, *, dataset: str = "d") -> None:
        self.bench, self.agent, self.dataset = bench, bench.agent(node), dataset
        self.seq, self.leases = 0, list[ShardLease]()
        self.round = self.agent.follows

    def ask(self, **fields: Any) -> ShardAnswer | None:
        self.seq += 1
        request = ShardRequest(
            **{"dataset": self.dataset, "round": self.round, "local_rank": 0, "epoch": 0,
               "spec": SPEC, "want": 1, **fields, "seq": self.seq}
        )  # fmt: skip
        out = self.bench.step(ShardsAsked(self.seq, self.agent.node, self.agent.boot, request))
        (effect,) = [one for one in out.effects if isinstance(one, ShardsAnswer)]
        assert effect.number == self.seq
        if effect.answer is not None:
            self.leases = effect.answer.leases
        return effect.answer

    def finish(self) -> ShardAnswer | None:
        return self.ask(credits=[Credit(token=self.leases[0].token, ranges=self.leases[0].todo)])

    def report_leases(self) -> None:
        held = [HeldLease(token=x.token, position=x.position, epoch=0) for x in self.leases]
        mine = WorkerLeases(dataset=self.dataset, local_rank=0, load=0, leases=held)
        self.bench.say(self.agent, self.agent.report().model_copy(update={"leases": [mine]}))

    def done(self) -> list[tuple[int, int]]:
        return self.bench.job.state.shards[self.dataset].done


def code(answer: ShardAnswer | None) -> AnswerCode | None:
    return None if answer is None else answer.code


def test_a_job_without_shards_has_nothing_of_them() -> None:
    bench = running()
    assert bench.job.state.shards == {}
    assert '"shards":{}' in bench.job.state.to_json()
    assert "leases" not in bench.agent("n0").report().model_dump_json(exclude_defaults=True)


def test_credits_are_in_the_journal_before_the_answer() -> None:
    bench = running()
    script = Script(bench, "n0")
    script.ask()
    assert script.finish() is not None
    assert bench.journal is not None
    assert bench.journal.shards["d"].done == [(0, 1)]
    assert bench.journal.shards["d"].applied == {"n0/0": 2}


def test_only_workers_of_the_round_are_heard() -> None:
    bench = running(elastic_job(2, 2))
    script = Script(bench, "n0")
    assert code(script.ask(spec=None)) is AnswerCode.UNKNOWN
    assert code(script.ask(round=7)) is None, "an agent reports a round before its workers run"
    stranger = Script(bench, "n1")
    stranger.agent = SimAgent(NodeId("n1"))
    assert code(stranger.ask()) is AnswerCode.SUPERSEDED
    stranger.agent = SimAgent(NodeId("n9"))
    assert code(stranger.ask()) is AnswerCode.SUPERSEDED
    bench.agent("n1").fail(crash())
    bench.settle()
    assert code(script.ask()) is AnswerCode.SUPERSEDED, "its round is over"


def test_a_lost_node_returns_its_shards_without_blame() -> None:
    bench = running(elastic_job(2, 1))
    lost, other = Script(bench, "n0"), Script(bench, "n1")
    for _ in range(5):
        lost.ask()
    bench.kill(NodeId("n0"))
    bench.deliver_facts()
    assert code(lost.ask()) is AnswerCode.SUPERSEDED, "its workers may run on, cut off"
    other.ask()
    assert other.leases[0].shard == 0
    assert bench.job.state.shards["d"].failures == {}


@pytest.mark.parametrize(
    ("kind", "exit_code", "blamed"),
    [
        (FailureKind.EXCEPTION, 1, True),
        (FailureKind.SIGNAL, -9, True),
        (FailureKind.SIGNAL, -15, False),
        (FailureKind.PEER, 1, False),
    ],
)
def test_a_failure_is_charged_to_the_shard_that_was_trained(
    kind: FailureKind, exit_code: int, *, blamed: bool
) -> None:
    bench = running(elastic_job(2, 2))
    script = Script(bench, "n0")
    script.ask(want=3)
    failure = crash().model_copy(update={"kind": kind, "exit_code": exit_code, "local_rank": 0})
    bench.agent("n0").fail(failure)
    bench.exchange()
    bench.exchange()
    failures = bench.job.state.shards["d"].failures
    assert {shard: found.count for shard, found in failures.items()} == ({0: 1} if blamed else {})
    bench.pass_time(2)
    bench.settle()
    again = Script(bench, "n1")
    again.ask(want=9)
    assert [lease.shard for lease in again.leases][:3] == [0, 1, 2], "all come first again"


@pytest.mark.parametrize(
    "failure",
    [
        crash(FailureKind.HANG),
        crash(FailureKind.WRONG),
        crash(FailureKind.EXCEPTION, fingerprint=f"{SupersededError.__module__}.SupersededError|#"),
        *(
            crash(FailureKind.EXCEPTION).model_copy(update={"cause": FailureCause(
                failure_class=one, confidence=Confidence.SURE, evidence="", advice="")})
            for one in (FailureClass.DEVICE_MEMORY, FailureClass.COMMUNICATION,
                        FailureClass.HARDWARE)
        ),
    ],
)  # fmt: skip
def test_failures_that_say_nothing_about_the_shard(failure: WorkerFailure) -> None:
    bench = running(elastic_job(1, 1))
    Script(bench, "n0").ask()
    bench.agent("n0").fail(failure)
    bench.exchange()
    assert bench.job.state.shards["d"].failures == {}


def test_a_poison_shard_becomes_a_condition_and_an_event() -> None:
    bench = running(elastic_job(1, 1))
    for _ in range(3):
        script = Script(bench, "n0")
        script.ask(spec=SPEC.model_copy(update={"failures": 3}))
        assert script.leases[0].shard == 0
        bench.agent("n0").fail(crash())
        bench.exchange()
        bench.pass_time(1)
        bench.settle()
    assert bench.reasons().count("ShardsQuarantined") == 1
    conditions = {c.type: c for c in bench.job.status(bench.now, 0.0).conditions}
    found = conditions[ConditionType.SHARDS_QUARANTINED]
    assert found.status == "True"
    assert "dataset d: 1 shard is in quarantine" in found.message
    script = Script(bench, "n0")
    script.ask()
    script.finish()
    (told,) = bench.job.status(bench.now, 0.0).data.datasets
    assert (told.name, told.epoch, told.shards) == ("d", 0, SPEC.shards)
    assert (told.finished, told.begun, told.quarantined) == (1, 0, 1)
    assert told.quarantine[0].startswith("shard 0: ")
    assert dataset_line(told).startswith(f"d: epoch 1, 1 of {SPEC.shards} shards finished, 0 begun")


def test_a_worker_without_progress_loses_its_shard() -> None:
    bench = running(elastic_job(2, 2))
    slow, other = Script(bench, "n0"), Script(bench, "n1")
    slow.ask()
    token = slow.leases[0].token
    bench.pass_time(61)
    other.ask()
    assert other.leases[0].shard == 0
    late = slow.ask(credits=[Credit(token=token, ranges=[(0, 10)])], want=0)
    assert late is not None
    assert late.refused == [token]
    assert slow.done() == []


def test_a_new_master_waits_for_all_members_and_continues_their_leases() -> None:
    bench = running(elastic_job(2, 2))
    first, second = Script(bench, "n0"), Script(bench, "n1")
    first.ask()
    second.ask()
    bench.restart_master()
    assert first.finish() is None, "who holds which lease is not known yet"
    first.seq -= 1  # the agent repeats the request
    first.report_leases()
    assert first.finish() is None
    first.seq -= 1
    second.report_leases()
    answer = first.finish()
    assert answer is not None
    assert (answer.refused, answer.term) == ([], 2)
    assert first.leases[0].shard == 2, "the second shard is still leased"
    assert first.done() == [(0, 1)]
    assert code(second.finish()) is AnswerCode.OK
    assert second.done() == [(0, 2)]


def test_a_new_master_does_not_count_a_failure_again() -> None:
    bench = running(elastic_job(2, 2))
    script, other = Script(bench, "n0"), Script(bench, "n1")
    script.ask()
    other.ask()
    other.agent.warming = True  # the next round must wait for it
    bench.exchange(other.agent)
    script.agent.fail(crash())
    script.report_leases()
    assert bench.job.state.shards["d"].failures[0].count == 1
    bench.restart_master()
    script.report_leases()
    other.report_leases()
    assert bench.job.state.shards["d"].failures[0].count == 1
    other.agent.warming = False
    bench.settle()
    again = Script(bench, "n0")
    again.ask()
    again.agent.fail(crash())
    again.report_leases()
    assert bench.job.state.shards["d"].failures[0].count == 2, "another round, another failure"


def test_a_member_that_does_not_come_back_is_not_waited_for_forever() -> None:
    bench = running(elastic_job(2, 1))
    first, second = Script(bench, "n0"), Script(bench, "n1")
    first.ask()
    second.ask()
    bench.restart_master()
    first.report_leases()
    assert first.ask() is None
    bench.agent("n1").frozen = True
    bench.pass_time(30)
    assert code(first.ask()) in (AnswerCode.OK, AnswerCode.SUPERSEDED)


def test_at_least_once_is_written_later() -> None:
    bench = running(elastic_job(1, 1))
    spec = SPEC.model_copy(update={"level": Level.AT_LEAST_ONCE})
    script = Script(bench, "n0")
    script.ask(spec=spec)
    token, todo = script.leases[0].token, script.leases[0].todo
    script.ask(spec=spec, credits=[Credit(token=token, ranges=todo)])
    assert bench.journal is not None
    assert bench.journal.shards["d"].done == []
    bench.pass_time(6)
    assert bench.journal.shards["d"].done == [(0, 1)]


def test_two_datasets_are_independent() -> None:
    bench = running(elastic_job(1, 1))
    first, second = Script(bench, "n0"), Script(bench, "n0", dataset="e")
    first.ask()
    second.ask()
    first.finish()
    assert (first.done(), second.done()) == ([(0, 1)], [])


def test_the_status_has_the_watermarks_and_the_lag_of_a_stream() -> None:
    bench = running(elastic_job(1, 1))
    script = Script(bench, "n0")
    spec = DatasetSpec(range_size=10, level=Level.EXACTLY_ONCE_ACCOUNTING)
    script.ask(spec=spec, ends={"a": 15, "b": 30})
    (lease,) = script.leases
    script.ask(spec=spec, credits=[Credit(token=lease.token, ranges=lease.todo)])
    (found,) = bench.job.status(bench.now, 0.0).data.streams
    assert (found.name, found.watermark, found.lag, found.ended) == ("d", 0, 35, False)
    shown = [(one.name, one.watermark, one.end, one.lag) for one in found.partitions]
    assert shown == [("b", 0, 30, 30), ("a", 10, 15, 5)]
    assert bench.journal is not None
    assert bench.journal.shards["d"].stream.partitions["a"].credited == [(0, 10)]
    bench.restart_master()
    assert bench.job.status(bench.now, 0.0).data.streams == [found]
    line = stream_line(found)
    assert line == "d: watermark 0 or more in 2 partitions, lag 35, most in b (0 of 30)"
