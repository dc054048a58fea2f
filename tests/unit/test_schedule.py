"""When saves are due, and what votes decide, without a state and without torch."""

from collections.abc import Callable, Sequence

import pytest

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.trainer.notices import SaveStats
from dlrover_py.trainer.schedule import (
    FIRST_PERSIST_S,
    JobAge,
    SaveInterval,
    SaveSchedule,
    ScheduleRules,
)
from dlrover_py.trainer.vote import (
    RankVote,
    SaveAttempt,
    SaveOutcome,
    SaveVotes,
    call_number,
    describe_call,
)
from tests.ids import checkpoint_id

NONE = RankVote()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def schedule(
    every: object = 1, persist_every: object = "5m", age: JobAge | None = None, *,
    stores: bool = True, hurries: bool = False,
) -> tuple[SaveSchedule, Clock]:  # fmt: skip
    rules = ScheduleRules(
        SaveInterval.parse("every", every),
        SaveInterval.parse("persist_every", persist_every),
        stores,
        hurries,
    )
    clock = Clock()
    return SaveSchedule(rules, age or JobAge(0.0), SaveStats(), clock), clock


def test_intervals_in_steps_count_from_the_last_call() -> None:
    due, _ = schedule(every=10)
    assert [step for step in range(1, 31) if due.due(step, NONE)] == [10, 20, 30]
    due.previous = 8
    assert due.due(15, NONE)  # the script calls save() every seven steps
    due.previous = 15
    assert not due.due(19, NONE)


def test_what_was_missed_goes_to_storage_with_the_next_save() -> None:
    due, _ = schedule(persist_every=100)
    assert not due.persist_due(1, NONE, forced=False)
    due.again = True
    assert due.persist_due(2, NONE, forced=False)
    assert not due.persist_due(2, RankVote(busy=1), forced=False)
    assert due.persist_due(2, RankVote(busy=1, persist=2), forced=False)
    assert due.persist_due(2, RankVote(busy=1), forced=True)
    due.begun(2, persist_requested=True)
    assert not due.persist_due(3, NONE, forced=False)
    assert not schedule(stores=False)[0].persist_due(2, RankVote(persist=1), forced=True)


def test_rank_0_votes_by_its_clock() -> None:
    due, clock = schedule(every="10s", persist_every="1m", hurries=True)
    assert due.says(busy_since=None) == NONE
    clock.now += 10
    assert due.says(busy_since=None) == RankVote(save=1)
    clock.now += FIRST_PERSIST_S - 10
    assert due.says(busy_since=None) == RankVote(save=1, persist=1)
    due.begun(1, persist_requested=True)
    clock.now += 59
    assert due.says(busy_since=None).persist == 0
    assert due.says(busy_since=clock.now - 4000).persist == 2


@pytest.mark.parametrize(
    ("age", "stored_s", "left_s"),
    [
        (JobAge(0.0), None, 300.0),
        (JobAge(100.0, restarts=1), None, 200.0),
        (JobAge(None, restarts=1), None, 0.0),
        (JobAge(None, restarts=1), 120.0, 180.0),
        (JobAge(100.0, restarts=1), -5.0, 300.0),  # the clock of the committer is ahead
    ],
)
def test_a_load_goes_on_with_the_interval(
    age: JobAge, stored_s: float | None, left_s: float
) -> None:
    class Found:
        step = 7
        stored_at = None if stored_s is None else 1000.0 - stored_s

    due, clock = schedule(age=age)
    due.loaded(Found() if stored_s is not None else None, 1000.0)
    clock.now += left_s
    assert due.says(busy_since=None).persist == 1
    if left_s:
        clock.now -= 1
        assert due.says(busy_since=None).persist == 0


class Ballot:
    """All ranks vote alike."""

    def launch(self, vote: Sequence[int], /) -> Callable[[float | None], list[int]]:
        return lambda _: list(vote)


def test_a_vote_decides_the_oldest_save() -> None:
    votes = SaveVotes()
    ids: list[CheckpointId] = [checkpoint_id(step) for step in (1, 2)]
    votes.attempts += [SaveAttempt(ids[0], True, 0.0, missed=True), SaveAttempt(ids[1], False, 0.0)]
    mine = votes.mine(NONE, call=0, busy=False, uncopied=0, stop=False)
    assert mine.outcome == SaveOutcome.MISSED
    assert votes.persist_requested
    votes.launch(Ballot(), mine)
    decided = votes.decide(votes.result(None))
    assert decided is not None
    assert decided.id == ids[0]
    assert not votes.persist_requested
    mine = votes.mine(NONE, call=0, busy=False, uncopied=0, stop=True)
    assert votes.decide(mine) is None  # the other one is under way
    assert votes.stop


@pytest.mark.parametrize(
    ("kind", "step", "words"),
    [
        ("save()", 0, "save() of step 0"),
        ("save(force=True)", 2**53, f"save(force=True) of step {2**53}"),
        ("close()", None, "close()"),
    ],
)
def test_the_number_of_a_call_has_its_kind_and_step(
    kind: str, step: int | None, words: str
) -> None:
    number = call_number(kind, step)
    assert describe_call(number) == words
    assert number < 2**63
    assert not RankVote(call=number, negated_call=-number).calls_differ
    assert RankVote(call=number + 1, negated_call=-number).calls_differ
