import pytest

from dlrover_py.master.core.policy import (
    FailureAction,
    FailureDecision,
    after_worker_failure,
    in_words,
    relaunch_delay,
    repeats,
)
from dlrover_py.protocol.agents import FailureKind, WorkerFailure
from tests.builders import crash, user_error


def rule(
    failure: WorkerFailure,
    *,
    earlier: WorkerFailure | None = None,
    restarts: int = 0,
    relaunches: int = 0,
    can_replace: bool = True,
) -> FailureDecision:
    return after_worker_failure(
        failure,
        earlier=earlier,
        restarts=restarts,
        budget=3,
        relaunches=relaunches,
        relaunch_budget=2,
        can_replace=can_replace,
    )


def test_within_the_budget_workers_are_restarted() -> None:
    assert [rule(crash(), restarts=n).action for n in (0, 1, 2)] == [FailureAction.RESTART] * 3
    assert rule(crash(), restarts=2).message == "restart 3 of 3"


def test_then_the_node_is_replaced_and_then_the_job_stops() -> None:
    assert rule(crash(), restarts=3).action is FailureAction.REPLACE
    assert rule(crash(), restarts=3, relaunches=1).action is FailureAction.REPLACE
    last = rule(crash(), restarts=3, relaunches=2)
    assert (last.action, last.reason) == (FailureAction.STOP, "RestartsExhausted")


def test_the_last_words_say_what_failed_and_why_there_is_no_restart() -> None:
    failure = crash()
    last = rule(failure, restarts=3, can_replace=False)
    used = "its 3 restarts are used up without steady progress"
    assert last.message == f"{used}; the last failure: {failure.message}"
    none = after_worker_failure(
        failure,
        earlier=None,
        restarts=0,
        budget=0,
        relaunches=0,
        relaunch_budget=0,
        can_replace=False,
    )
    allowed = "no restarts are allowed (restartCount, --max-restarts)"
    assert none.message == f"{failure.message}; {allowed}"


def test_what_cannot_be_replaced_stops_the_job() -> None:
    assert rule(crash(), restarts=3, can_replace=False).action is FailureAction.STOP


def test_the_same_exception_at_the_same_step_is_not_retried() -> None:
    ruling = rule(user_error("E", 5), earlier=user_error("E", 5))
    assert (ruling.action, ruling.reason) == (FailureAction.STOP, "NonRetryable")
    assert "step 5" in ruling.message


@pytest.mark.parametrize(
    ("now", "before", "same"),
    [
        (user_error("E", 5), user_error("E", 5), True),
        (user_error("E", 5), user_error("F", 5), False),
        (user_error("E", 5), user_error("E", 6), False),
        (user_error("E", None), user_error("E", 5), False),
        (user_error("", 5), user_error("", 5), False),
        (crash(FailureKind.SIGNAL, fingerprint="E", step=5), user_error("E", 5), False),
        (user_error("E", 5), crash(FailureKind.PEER, fingerprint="E", step=5), False),
    ],
)
def test_repeats(now: WorkerFailure, before: WorkerFailure, same: bool) -> None:
    assert repeats(now, before) is same


@pytest.mark.parametrize(
    ("now_s", "before_s", "same"),
    [(5, 3, True), (5.25, 3, False), (120, 100, True), (121, 100, False), (80, 100, True)],
)
def test_without_steps_a_like_time_stands_in(now_s: float, before_s: float, same: bool) -> None:
    def after(seconds: float) -> WorkerFailure:
        return crash(FailureKind.EXCEPTION, fingerprint="E", ran_s=seconds)

    assert repeats(after(now_s), after(before_s)) is same


@pytest.mark.parametrize(
    ("cold_s", "forked_s", "same"),
    [(5, 0.2, True), (10, 0.2, True), (11, 0.2, False), (3, 6, False)],
)
def test_a_forked_worker_is_quicker_by_its_imports(
    cold_s: float, forked_s: float, same: bool
) -> None:
    cold = crash(FailureKind.EXCEPTION, fingerprint="E", ran_s=cold_s)
    forked = crash(FailureKind.EXCEPTION, fingerprint="E", ran_s=forked_s, forked=True)
    assert repeats(forked, cold) is same
    assert repeats(cold, forked) is same


def test_replacements_wait_longer_each_time_up_to_a_minute() -> None:
    assert [relaunch_delay(n) for n in (0, 1, 2, 3, 4, 99, 10**6)] == [*(0, 0, 1, 2, 4, 60, 60)]


def test_in_words() -> None:
    assert in_words(crash()) == "worker 0 (rank 0) died"
