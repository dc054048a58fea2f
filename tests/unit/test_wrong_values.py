"""Wrong values of a training, as its master sees them: event, condition, policy and checkpoints."""

from collections.abc import Sequence
from typing import Any

import pytest

from dlrover_py.master.core.checkpoints import CheckpointRecord
from dlrover_py.master.core.diagnosis.spikes import FEWEST, IN_A_ROW
from dlrover_py.master.core.events import RestoreAsked
from dlrover_py.protocol.agents import FailureKind, WrongKind, WrongValue
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reasons import ConditionType, EventReason
from dlrover_py.protocol.status import JobPhase
from tests.builders import Bench, job_file, running
from tests.ids import wrong_after


def spec(**fields: Any) -> ElasticJob:
    document = job_file(3, restartCount=3)
    document["spec"]["diagnosis"] = fields
    return ElasticJob.parse(document)


def not_finite(step: int, rank: int, good: int | None) -> WrongValue:
    return WrongValue(
        kind=WrongKind.NOT_FINITE, step=step, good=good, ranks=[rank], metric="loss", value="nan"
    )


def replicas(step: int, good: int, *ranks: int) -> WrongValue:
    return WrongValue(kind=WrongKind.REPLICAS, step=step, good=good, ranks=list(ranks))


class Train:
    """A job of three nodes with a checkpoint of each step in memory."""

    def __init__(self, **fields: Any) -> None:
        self.bench: Bench = running(spec(**fields))

    def go(self, first: int, last: int, loss: float | None = None) -> None:
        """Train at one step a second."""
        for step in range(first, last + 1):
            for agent in self.bench.living():
                agent.reach(step)
                agent.save(step, persist=False)
                if loss is not None:
                    assert agent.progress is not None
                    update = {"metrics": {"loss": loss}}
                    agent.progress = agent.progress.model_copy(update=update)
            self.bench.pass_time(1.0)

    def say(self, node: str, wrong: Sequence[WrongValue]) -> None:
        self.bench.agent(node).wrong = list(wrong)
        self.bench.pass_time(1.0)

    def told(self) -> list[str]:
        kinds = (EventReason.NOT_FINITE, EventReason.SPIKE, EventReason.REPLICAS_DIFFER)
        return [e.message for e in self.bench.job.state.events if e.reason in kinds]

    def condition(self) -> str:
        status = self.bench.job.status(self.bench.now, self.bench.now)
        found = {c.type: c for c in status.conditions}.get(ConditionType.WRONG_VALUES)
        return "" if found is None else f"{found.status}: {found.message}"

    def restorable(self) -> list[int]:
        """The steps that may be restored from memory."""
        known = self.bench.job.live.checkpoints.memory.checkpoints
        return sorted(k.step for k in known if not self.record.rejects(k))

    @property
    def record(self) -> CheckpointRecord:
        return self.bench.job.state.checkpoints


def test_a_value_that_is_not_finite_is_told_once_with_its_rank() -> None:
    train = Train()
    train.go(1, 5)
    assert not train.condition()
    train.say("n1", [not_finite(6, 1, 5)])
    train.say("n2", [not_finite(7, 2, 6)])
    (message,) = train.told()
    assert message == ("the loss of rank 1 (node n1) is nan at step 6; step 5 is the last good one")
    assert train.condition() == f"True: {message}"
    assert train.bench.job.state.pending_round is None, "nothing is done about it"
    train.say("n1", [])
    train.say("n2", [])
    assert train.condition() == "False: the values are right again"


def test_it_is_told_in_no_way_if_the_job_wants_that() -> None:
    train = Train(wrong="off")
    train.go(1, 5)
    train.say("n1", [not_finite(6, 1, 5), replicas(6, 5, 1)])
    assert not train.told()
    assert not train.condition()


def test_a_rollback_restarts_the_round_from_the_newest_good_checkpoint() -> None:
    train = Train(wrong="rollback")
    train.go(1, 5)
    train.say("n1", [not_finite(5, 1, 4)])
    assert not train.told(), "the other nodes have not reported since"
    train.bench.pass_time(1.0)
    assert "restarts from the newest checkpoint up to step 4" in train.told()[0]
    state = train.bench.job.state
    assert state.last_failure is not None
    assert state.last_failure.worker.kind is FailureKind.WRONG
    assert state.last_failure.node == "n1"
    assert 5 not in train.restorable()
    for agent in train.bench.living():
        agent.wrong = []
    train.bench.settle()
    assert state.round == 2
    assert train.condition() == "False: the values are right again"
    assert '"rejected":[[1,4]]' in train.bench.job.live.checkpoint_policy
    train.bench.restart_master()
    train.bench.settle()
    assert train.record.rejected == [wrong_after(1, 4)], "a new master knows it"
    train.go(5, 6)
    assert 6 in train.restorable(), "later rounds are not concerned"


def test_a_value_that_is_wrong_on_all_ranks_is_charged_to_no_node() -> None:
    """It comes from the data or the model. So no node is replaced, and at last the job ends."""
    train = Train(wrong="rollback")
    step = 0
    for number in range(4):
        train.go(step + 1, step + 5)
        step += 5
        for rank, agent in enumerate(train.bench.living()):
            agent.wrong = [not_finite(step, rank, step - 1)]
        train.bench.pass_time(1.0)
        assert len(train.told()) == number + 1
        assert "the loss of ranks 0–2 is nan" in train.told()[-1]
        for agent in train.bench.living():
            agent.wrong = []
        train.bench.settle()
    state = train.bench.job.state
    assert state.phase is JobPhase.FAILED
    assert "the job: its 3 restarts are used up" in state.reason
    assert train.bench.members == ["n0", "n1", "n2"], "none was replaced"


def test_wrong_values_from_the_first_step_on_cast_doubt_on_the_checkpoint_itself() -> None:
    train = Train(wrong="rollback")
    train.go(1, 5)
    train.say("n1", [not_finite(5, 1, 4)])
    train.bench.pass_time(1.0)
    for agent in train.bench.living():
        agent.wrong = []
    train.bench.settle()
    start = max(train.restorable())
    assert start <= 4
    train.bench.step(RestoreAsked(1, 2))
    train.say("n1", [not_finite(start + 1, 1, None)])
    train.bench.pass_time(1.0)
    assert train.record.rejected == [wrong_after(2, start - 1)]


def test_a_stop_ends_the_job_and_keeps_the_bad_state_out_of_storage() -> None:
    train = Train(wrong="stop")
    train.go(1, 5)
    train.say("n0", [replicas(5, 3, 2)])
    state = train.bench.job.state
    assert state.phase is JobPhase.FAILED
    assert state.reason == (
        "the parameters of rank 2 (node n2) differ from those of 2 other replicas at step 5; "
        "step 3 is the last good one"
    )
    assert train.restorable() in ([], [3])


def test_replicas_without_a_majority_name_no_rank() -> None:
    train = Train()
    train.go(1, 3)
    train.say("n0", [replicas(3, 2)])
    assert "no majority shows which are wrong" in train.told()[0]


@pytest.mark.parametrize("policy", ["tell", "rollback"])
def test_a_loss_that_leaps_up_and_stays_is_told(policy: str) -> None:
    train = Train(spike=policy)
    train.go(1, FEWEST + 2, loss=1.0)
    train.go(FEWEST + 3, FEWEST + 2 + IN_A_ROW, loss=40.0)
    (message,) = train.told()
    assert message.startswith("the loss has leapt from about 1 to 40 at step 19; step 18 is the")
    assert bool(train.record.rejected) == (policy == "rollback")


def test_a_spike_of_any_size_is_told() -> None:
    train = Train()
    train.go(1, FEWEST, loss=-1.234567e-300)
    train.go(FEWEST + 1, FEWEST + IN_A_ROW, loss=1.234567e300)
    assert "from about -1.23e-300 to 1.23e+300" in train.told()[0]


def test_several_wrong_values_at_once_end_the_job_once() -> None:
    train = Train(wrong="stop")
    train.go(1, 3)
    train.say("n0", [replicas(3, 2, 1), not_finite(3, 0, 2)])
    assert train.bench.job.state.phase is JobPhase.FAILED
    assert len(train.told()) == 2, "what was told, and the end of the job"


def test_a_rank_that_is_none_of_the_round_is_not_believed() -> None:
    train = Train(wrong="rollback")
    train.go(1, 3)
    train.say("n0", [replicas(3, 2, 17)])
    assert "no majority" in train.told()[0]
