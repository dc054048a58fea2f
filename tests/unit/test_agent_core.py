"""The agent's decisions, by hand and against a machine that plays master, workers and people.

No process, no clock: ``Core.handle`` gets events and returns effects.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dlrover_agent.core import (
    AFTER_FAILURE_S,
    EXCHANGE_OVERDUE_S,
    Assigned,
    Core,
    Effect,
    Event,
    Exit,
    Kill,
    MasterLost,
    MasterUnreachable,
    NodeRefused,
    PeerSeen,
    ProbePeer,
    Report,
    ReserveNextPort,
    Signalled,
    Start,
    StepReported,
    Stop,
    Tick,
    WorkerEnded,
    WorkersGone,
    WorkersStuck,
)
from dlrover_py.protocol.agents import (
    Assignment,
    CheckResult,
    Directive,
    FailureKind,
    WorkerFailure,
    WorkerPhase,
)
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.timing import AGENT_DISCONNECTED_S

RUN, WAIT, STOP = Directive.RUN, Directive.WAIT, Directive.STOP
CHECK = Directive.CHECK
TERM = Signalled("SIGTERM", 15)


def assignment(version: int, directive: Directive = RUN, **fields: Any) -> Assignment:
    fields = {"term": 1, "incarnation": 1, "reason": "a test", "round": version} | fields
    return Assignment(version=version, directive=directive, **fields)


def failure(local_rank: int = 0) -> WorkerFailure:
    return WorkerFailure(
        kind=FailureKind.EXIT,
        local_rank=local_rank,
        rank=local_rank,
        pid=7,
        exit_code=3,
        message="exited with code 3",
    )


def told(core: Core, *events: Event, now: float = 0.0) -> list[Effect]:
    """All effects of these events."""
    return [effect for event in events for effect in core.handle(event, now)]


def phase(core: Core) -> WorkerPhase:
    """Its phase; mypy takes an attribute to stay as it was."""
    return core.phase


def running(nproc: int = 1, version: int = 1) -> Core:
    """A core whose workers of a round run."""
    core = Core(nproc=nproc)
    told(core, Assigned(assignment(version)))
    assert core.phase is WorkerPhase.RUNNING
    return core


# --- rounds ---


def test_the_first_round_starts_at_once_with_a_fresh_offer_for_the_next() -> None:
    core = Core(nproc=2)
    first = assignment(1, round=5)
    assert told(core, Assigned(first)) == [ReserveNextPort(5), Start(first), Report()]
    assert (core.follows, core.have, core.incarnation) == (5, (1, 1), 1)


def test_the_next_round_starts_only_when_nothing_of_the_old_one_is_left() -> None:
    core = running()
    second = assignment(2, stop_grace_s=3.5, reason="node n1 was lost")
    assert told(core, Assigned(second)) == [
        ReserveNextPort(2),
        Report(),
        Stop("node n1 was lost", 3.5),
    ]
    assert told(core, WorkerEnded(1, 0, failure())) == []
    assert told(core, WorkersGone(1)) == [Start(second)]


@pytest.mark.parametrize("directive", [RUN, WAIT, CHECK])
def test_where_nothing_is_broken_the_workers_may_finish_their_step(directive: Directive) -> None:
    core = running()
    planned = assignment(2, directive, check=1, last_step_s=20.0, reason="node n1 is leaving")
    polite = Stop("node n1 is leaving", 1.0, graceful=True, last_step_s=20.0)
    assert told(core, Assigned(planned))[-1] == polite
    again = assignment(3, WAIT, last_step_s=20.0)
    assert told(core, Assigned(again)) == []
    broken = assignment(4, directive, round=2, check=1, reason="node n2 was lost")
    assert Stop("node n2 was lost", 1.0) in told(core, Assigned(broken)), "no step can end now"
    assert told(core, Assigned(assignment(5, WAIT, reason="once more"))) == []


def test_who_fails_in_the_last_step_ends_the_wait_of_the_others_beside_it() -> None:
    core = running(nproc=3)
    told(core, Assigned(assignment(2, last_step_s=20.0)))
    assert told(core, WorkerEnded(1, 0, None)) == []
    others = Stop("a worker of this node failed", AFTER_FAILURE_S, graceful=True)
    assert told(core, WorkerEnded(1, 1, failure(1))) == [others]
    assert told(core, WorkerEnded(1, 2, failure(2))) == []
    assert WorkerPhase.STOPPING is core.phase, "neither a success nor a failure"


@pytest.mark.parametrize(
    ("events", "departs"),
    [
        ([Assigned(assignment(2, STOP))], True),
        ([Assigned(assignment(2, WAIT)), Assigned(assignment(3, STOP))], True),
        ([TERM], True),
        ([WorkerEnded(1, 0, None), Assigned(assignment(2, STOP))], False),
        ([Assigned(assignment(2, STOP, exit_code=1))], False),
        ([NodeRefused("it was given up as lost")], False),
    ],
    ids=["told", "told while it stops", "signalled", "finished", "failed", "superseded"],
)
def test_who_leaves_while_others_go_on_says_when_its_workers_have_ended(
    events: list[Event], departs: bool
) -> None:
    core = running()
    assert not core.leaves_job
    told(core, *events)
    assert core.oldest_live_round == 1
    assert isinstance(told(core, WorkersGone(1))[-1], Exit)
    assert (core.leaves_job, core.oldest_live_round) == (departs, 2)


def test_a_healthy_round_is_not_stopped_by_what_its_assignment_says_of_the_last() -> None:
    core = running()
    told(core, Assigned(assignment(2, last_step_s=20.0)), WorkersGone(1))
    assert core.phase is WorkerPhase.RUNNING
    assert told(core, Assigned(assignment(3, round=2))) == []


def test_only_the_newest_of_two_rounds_is_started() -> None:
    core = running()
    second, third = assignment(2), assignment(3)
    told(core, Assigned(second))
    assert told(core, Assigned(third)) == [ReserveNextPort(3), Report()]
    assert told(core, WorkersGone(1)) == [Start(third)]


def test_a_round_that_was_called_off_while_the_old_one_ended_is_not_started() -> None:
    core = running()
    told(core, Assigned(assignment(2)))
    assert told(core, Assigned(assignment(3, WAIT, round=2))) == []
    assert told(core, WorkersGone(1)) == [Report()]
    assert core.phase is WorkerPhase.IDLE


@pytest.mark.parametrize(
    "older",
    [
        assignment(4, STOP, term=2),
        assignment(5, RUN, term=2, round=9),
        assignment(99, STOP, term=1),
        assignment(99, RUN, term=1, round=9),
    ],
)
def test_an_older_assignment_changes_nothing(older: Assignment) -> None:
    core = Core(nproc=1)
    told(core, Assigned(assignment(5, term=2, round=3)))
    assert told(core, Assigned(older)) == []
    assert (core.have, core.follows, core.phase) == ((2, 5), 3, WorkerPhase.RUNNING)


def test_a_restarted_master_that_repeats_the_round_touches_no_worker() -> None:
    core = running()
    assert told(core, Assigned(assignment(1, term=2, round=1))) == []
    assert core.have == (2, 1)


def test_a_report_never_says_that_a_round_ended_well_before_it_was_started() -> None:
    core = running()
    told(core, WorkerEnded(1, 0, None))
    assert phase(core) is WorkerPhase.SUCCEEDED
    told(core, Assigned(assignment(2)))  # another node has failed; our processes are not gone yet
    assert core.follows == 2
    assert phase(core) is WorkerPhase.STOPPING
    assert isinstance(told(core, WorkersGone(1))[-1], Start)


def test_the_failure_of_an_old_round_is_not_reported_for_the_next() -> None:
    core = running()
    told(core, WorkerEnded(1, 0, failure()), Assigned(assignment(2)))
    assert (core.follows, core.failure, core.phase) == (2, None, WorkerPhase.STOPPING)


# --- ends of workers ---


def test_a_round_has_succeeded_when_all_workers_exited_0() -> None:
    core = running(nproc=2)
    assert told(core, WorkerEnded(1, 1, None)) == []
    assert phase(core) is WorkerPhase.RUNNING
    assert told(core, WorkerEnded(1, 0, None)) == [Report()]
    assert phase(core) is WorkerPhase.SUCCEEDED
    assert told(core, WorkersGone(1)) == []
    assert phase(core) is WorkerPhase.SUCCEEDED


def test_a_failed_worker_ends_the_round_here_without_waiting_for_the_master() -> None:
    core = running(nproc=2)
    effects = told(core, WorkerEnded(1, 1, failure(1)))
    assert effects == [Report(), Stop("a worker of this node failed", 1.0)]
    assert (core.phase, core.failure) == (WorkerPhase.FAILED, failure(1))
    assert told(core, WorkerEnded(1, 0, failure(0))) == [], (
        "it was stopped: a consequence, not a cause"
    )
    told(core, WorkersGone(1))
    assert (core.phase, core.failure) == (WorkerPhase.FAILED, failure(1))


@pytest.mark.parametrize(
    "order",
    [
        Assigned(assignment(2)),
        Assigned(assignment(2, WAIT)),
        Assigned(assignment(2, STOP)),
        NodeRefused("superseded"),
        TERM,
    ],
    ids=["next round", "wait", "stop", "refused", "signal"],
)
@pytest.mark.parametrize("end", [None, failure()], ids=["exit 0", "failure"])
def test_an_end_after_an_order_to_stop_is_neither_success_nor_failure(
    order: Event, end: WorkerFailure | None
) -> None:
    core = running()
    told(core, order)
    assert told(core, WorkerEnded(1, 0, end)) == []
    told(core, WorkersGone(1))
    assert core.phase not in (WorkerPhase.SUCCEEDED, WorkerPhase.FAILED)
    assert core.failure is None


def test_late_news_of_an_old_round_change_nothing() -> None:
    core = running()
    told(core, Assigned(assignment(2)), WorkersGone(1))
    before = vars_of(core)
    late: list[Event] = [
        WorkerEnded(1, 0, None),
        WorkerEnded(1, 0, failure()),
        WorkersGone(1),
        WorkersStuck(1, (4,)),
        StepReported(1, 0, 9, None, {}),
    ]
    for event in late:
        assert told(core, event) == []
    assert vars_of(core) == before


def vars_of(core: Core) -> dict[str, object]:
    return {name: repr(getattr(core, name)) for name in core.__dataclass_fields__}


def test_processes_that_survive_sigkill_end_the_agent() -> None:
    core = running()
    told(core, Assigned(assignment(2)))
    (end,) = told(core, WorkersStuck(1, (31, 32)))
    assert isinstance(end, Exit)
    assert end.code == ExitCode.FAILED
    assert "31, 32" in end.message


# --- the end of the agent ---


def test_stop_ends_an_idle_agent_at_once_with_the_masters_code() -> None:
    core = Core(nproc=1)
    assert told(core, Assigned(assignment(1, STOP, exit_code=7, reason="over"))) == [
        Exit(7, "over")
    ]


def test_stop_lets_scripts_end_by_themselves_and_then_exits() -> None:
    core = running()
    stop = assignment(2, STOP, stop_grace_s=30, exit_code=0, reason="the job is over")
    assert told(core, Assigned(stop)) == [Stop("the job is over", 30, graceful=True)]
    assert told(core, WorkerEnded(1, 0, None)) == []
    assert told(core, WorkersGone(1)) == [Exit(0, "the job is over")]


def test_the_workers_of_a_job_that_has_failed_are_looked_at_before_they_stop() -> None:
    stop = assignment(2, STOP, stop_grace_s=30, exit_code=1, reason="n0: it failed")
    assert told(running(), Assigned(stop)) == [Stop("n0: it failed", 30, graceful=True, fault=True)]


def test_nothing_is_started_after_stop() -> None:
    core = running()
    told(core, Assigned(assignment(2, STOP)))
    assert told(core, Assigned(assignment(3))) == []
    assert told(core, WorkersGone(1)) == [Exit(0, "a test")]


def test_stop_calls_off_the_round_that_waits_for_the_old_one_to_end() -> None:
    core = running()
    told(core, Assigned(assignment(2)), Assigned(assignment(3, STOP)))
    assert told(core, WorkersGone(1)) == [Exit(0, "a test")]


def test_a_refused_agent_kills_at_once_and_exits_as_superseded() -> None:
    core = running()
    assert told(core, NodeRefused("n0: it was given up as lost")) == [Kill()]
    (end,) = told(core, WorkersGone(1))
    assert end == Exit(ExitCode.SUPERSEDED, "refused by the master: n0: it was given up as lost")
    idle = Core(nproc=1)
    assert told(idle, NodeRefused("x")) == [Exit(ExitCode.SUPERSEDED, "refused by the master: x")]


def test_the_first_signal_is_handed_on_with_a_grace_and_the_second_kills() -> None:
    core = running()
    first = told(core, Signalled("SIGINT", 2))
    assert first == [Report(), Stop("the agent received SIGINT", 30.0, graceful=True, signal=2)]
    assert core.leaving == "the agent received SIGINT"
    assert told(core, Signalled("SIGINT", 2)) == [Kill()]
    assert told(core, Signalled("SIGTERM", 15)) == [Kill()]
    assert told(core, WorkersGone(1)) == [Exit(ExitCode.FAILED, "the agent received SIGINT")]


def test_a_signal_ends_an_agent_without_workers_at_once() -> None:
    core = Core(nproc=1)
    assert told(core, TERM) == [Report(), Exit(ExitCode.FAILED, "the agent received SIGTERM")]


def test_an_agent_without_a_master_ends_once_it_has_nothing_to_do() -> None:
    core = running()
    assert told(core, MasterLost("gone")) == []  # workers need no master
    told(core, WorkerEnded(1, 0, failure()))
    assert told(core, MasterLost("gone")) == []  # their processes are not gone yet
    told(core, WorkersGone(1))
    assert told(core, MasterLost("gone")) == [Exit(ExitCode.FAILED, "gone")]
    assert told(core, MasterLost("gone")) == []


def test_an_agent_whose_workers_have_succeeded_needs_no_master_to_say_so() -> None:
    core = running()
    told(core, WorkerEnded(1, 0, None), WorkersGone(1))
    assert told(core, MasterLost("gone")) == [Exit(ExitCode.OK, "gone")]


def test_a_second_signal_kills_workers_that_were_told_to_stop() -> None:
    core = running()
    told(core, Assigned(assignment(2, STOP, stop_grace_s=30)))
    told(core, TERM)
    assert told(core, TERM) == [Kill()]
    assert told(core, WorkersGone(1)) == [Exit(0, "a test")]


def test_a_signal_calls_off_the_next_round() -> None:
    core = running()
    told(core, Assigned(assignment(2)), TERM)
    assert told(core, WorkersGone(1)) == [Exit(ExitCode.FAILED, "the agent received SIGTERM")]


# --- progress ---


def test_the_first_step_says_how_long_the_recovery_took() -> None:
    core = Core(nproc=1)
    told(core, Assigned(assignment(1)), now=10.0)
    assert told(core, StepReported(1, 0, 40, 100, {"loss": 2.0}), now=12.5) == [Report()]
    progress = core.progress
    assert progress is not None
    assert (progress.step, progress.total, progress.started_at_step) == (40, 100, 40)
    assert progress.first_step_after_s == 2.5
    assert progress.metrics == {"loss": 2.0}


def test_steps_only_grow_and_their_speed_is_measured() -> None:
    core = Core(nproc=2)
    told(core, Assigned(assignment(1)), now=0.0)
    told(core, StepReported(1, 0, 10, 100, {"loss": 2.0}), now=1.0)
    assert told(core, StepReported(1, 0, 20, None, {}), now=2.0) == []
    assert told(core, StepReported(1, 1, 19, None, {}), now=3.0) == []
    progress = core.progress
    assert progress is not None
    assert (progress.step, progress.total, progress.steps_per_s) == (20, 100, 10.0)
    assert progress.metrics == {"loss": 2.0}


@pytest.mark.parametrize("lag_s", [0.0, 0.01, 0.2, 0.35])
def test_the_speed_is_that_of_the_training_however_two_workers_report(lag_s: float) -> None:
    """Each reports every 0.4 s; the training makes 20 steps per second after a slow first one."""
    core = Core(nproc=2)
    told(core, Assigned(assignment(1)), now=0.0)
    told(core, StepReported(1, 0, 0, None, {}), now=0.0)
    times = sorted((5.0 + 0.4 * i + lag_s * rank, rank) for i in range(60) for rank in (0, 1))
    for at, rank in times:
        told(core, StepReported(1, rank, int((at - 5.0) * 20) + 1, None, {}), now=at)
    assert core.progress is not None
    assert core.progress.steps_per_s == pytest.approx(20, rel=0.05)


def test_the_last_step_of_a_job_that_is_stopped_is_shown() -> None:
    core = running()
    told(core, StepReported(1, 0, 688, None, {"loss": 2.0}), Assigned(assignment(2, STOP)))
    told(core, StepReported(1, 0, 691, None, {"loss": 1.0}))
    assert core.progress is not None
    assert (core.progress.step, core.progress.metrics) == (691, {"loss": 1.0})
    assert core.reached_step == 691
    told(core, StepReported(1, 0, 690, None, {}))
    assert core.progress.step == 691


def test_a_new_round_counts_its_steps_anew() -> None:
    core = running()
    told(core, StepReported(1, 0, 50, None, {}))
    told(core, Assigned(assignment(2)))
    assert core.progress is None
    told(core, StepReported(1, 0, 51, None, {}))
    assert core.progress is None, "the old workers are on their way out"
    told(core, WorkersGone(1), StepReported(2, 0, 31, None, {}))
    assert core.progress is not None
    assert core.progress.started_at_step == 31


def test_steps_of_a_round_that_is_over_are_kept_as_reached() -> None:
    core = running()
    told(core, StepReported(1, 0, 50, None, {}), Assigned(assignment(2)))
    assert core.reached_step == 50, "the last report may have told an older step"
    told(core, StepReported(1, 0, 51, None, {}), StepReported(1, 0, 49, None, {}))
    assert (core.reached_step, core.progress) == (51, None)
    told(core, WorkersGone(1), StepReported(2, 0, 52, None, {}))
    assert core.reached_step == 51, "step 52 is progress of round 2"
    told(core, Assigned(assignment(3, WAIT)), StepReported(2, 0, 53, None, {}))
    assert core.reached_step == 53, "the last step before a wait"


def test_steps_of_a_check_are_never_reached() -> None:
    core = Core(nproc=1)
    told(core, Assigned(assignment(1, CHECK, round=0, check=1)))
    told(core, Assigned(assignment(2, round=1)), StepReported(0, 0, 7, None, {}))
    assert core.reached_step is None


# --- checks before the training ---

TIMES = {"matmul_s": 0.5, "allreduce_s": 0.25, "busbw_gb_s": 8.0}


def checking(nproc: int = 2) -> Core:
    core = Core(nproc=nproc)
    told(core, Assigned(assignment(1, CHECK, check=4, round=0)))
    assert core.phase is WorkerPhase.CHECKING
    return core


def test_a_check_is_taken_up_with_a_fresh_offer_and_is_no_round() -> None:
    core = Core(nproc=2)
    first = assignment(1, CHECK, check=4, round=0)
    assert told(core, Assigned(first)) == [ReserveNextPort(0), Start(first), Report()]
    assert (core.checks, core.follows) == (4, 0)
    assert told(core, Assigned(assignment(2, CHECK, check=4, round=0))) == []


def test_a_node_is_as_fast_as_its_slowest_worker() -> None:
    core = checking()
    told(
        core,
        StepReported(0, 0, 0, None, TIMES),
        StepReported(0, 1, 0, None, TIMES | {"matmul_s": 0.75}),
    )
    assert told(core, WorkerEnded(0, 0, None)) == []
    assert core.check is None
    assert told(core, WorkerEnded(0, 1, None)) == [Report()]
    assert core.check == CheckResult(
        passed=True, matmul_s=0.75, allreduce_s=0.25, algbw_gb_s=0.0, busbw_gb_s=8.0
    )
    assert core.progress is None
    assert told(core, WorkersGone(0)) == [Report()]
    assert core.phase is WorkerPhase.IDLE
    first = assignment(2, RUN, round=1)
    assert told(core, Assigned(first)) == [ReserveNextPort(1), Start(first), Report()]


def test_a_check_that_fails_is_no_failure_of_the_workers() -> None:
    core = checking()
    effects = told(core, WorkerEnded(0, 1, failure(1)))
    assert effects == [Report(), Stop("the check has failed", 0.0)]
    assert core.check == CheckResult(passed=False, why="worker 1 exited with code 3")
    assert core.failure is None
    told(core, WorkerEnded(0, 0, failure(0)), WorkersGone(0))
    assert core.phase is WorkerPhase.IDLE
    assert core.check is not None
    assert core.check.why == "worker 1 exited with code 3"


def test_a_check_that_ends_without_a_result_has_failed() -> None:
    core = checking(nproc=1)
    told(core, WorkerEnded(0, 0, None))
    assert core.check == CheckResult(passed=False, why="worker 0 ended without a result")


def test_the_next_check_or_round_takes_the_place_of_a_check() -> None:
    core = checking()
    second = assignment(2, CHECK, check=5, round=0, reason="again")
    assert told(core, Assigned(second)) == [ReserveNextPort(0), Report(), Stop("again", 1.0)]
    assert (core.checks, core.check) == (5, None)
    assert told(core, WorkerEnded(0, 0, failure())) == [], "news of the older one"
    assert told(core, WorkersGone(0)) == [Start(second)]
    first = assignment(3, RUN, round=1)
    told(core, Assigned(first))
    assert told(core, WorkersGone(0)) == [Start(first)]
    assert core.check is None


def test_a_check_is_called_off() -> None:
    core = checking()
    assert told(core, Assigned(assignment(2, WAIT, round=0))) == [Stop("a test", 1.0)]
    assert told(core, WorkersGone(0)) == [Report()]
    assert (core.phase, core.check) == (WorkerPhase.IDLE, None)


# --- when the master does not answer ---

LEASE_S, EXCHANGE_S = 8.0, 3.0
ASK = ProbePeer("h0", 5000)
STOPPED = "neither the master nor rank 0 was heard for 8 s"


def placed(version: int = 1, node_rank: int = 1, nnodes: int = 3, **fields: Any) -> Assignment:
    return assignment(
        version,
        node_rank=node_rank,
        nnodes=nnodes,
        master_addr="h0",
        master_port=5000,
        lease_s=LEASE_S,
        exchange_s=EXCHANGE_S,
        stop_grace_s=2.5,
        **fields,
    )


def member(**fields: Any) -> Core:
    """One of several nodes, that has been in contact once."""
    core = Core(nproc=1)
    told(core, Assigned(placed(**fields)), PeerSeen(1))
    return core


def test_a_node_of_which_nobody_hears_stops_its_workers_and_says_so_later() -> None:
    core = member()
    assert told(core, MasterUnreachable(), now=10.0) == []
    assert told(core, MasterUnreachable(), Tick(), now=17.75) == [ASK]
    assert told(core, Tick(), now=18.0) == [Stop(STOPPED, 2.5), Report()]
    assert (core.phase, core.cut_off) == (WorkerPhase.STOPPING, STOPPED)
    assert told(core, Tick(), now=60.0) == []
    assert told(core, WorkerEnded(1, 0, failure()), WorkersGone(1)) == [Report()]
    assert (core.phase, core.cut_off, core.failure) == (WorkerPhase.IDLE, STOPPED, None)
    # Its round has not been given up, as far as the master knows; then there is another one.
    assert told(core, Assigned(placed(2, round=1))) == []
    assert core.cut_off == STOPPED
    assert told(core, Assigned(placed(3, round=2)))[-2] == Start(placed(3, round=2))
    assert core.cut_off == ""


def test_when_only_the_master_is_gone_workers_go_on_for_as_long_as_it_takes() -> None:
    core, first = member(), member(node_rank=0)
    told(core, MasterUnreachable(), now=1.0)
    told(first, MasterUnreachable(), now=1.0)
    for now in range(2, 1000):
        assert told(core, Tick(), now=now) == [ASK]
        assert told(first, Tick(), now=now) == []
        if now % 7 == 0:
            told(core, PeerSeen(1), now=now)
            told(first, PeerSeen(1), now=now)
    assert core.stands(1)
    assert first.stands(1)


def test_the_master_s_answer_ends_the_silence() -> None:
    core = member()
    told(core, MasterUnreachable(), now=10.0)
    assert told(core, Assigned(placed()), Tick(), now=17.75) == []
    told(core, MasterUnreachable(), now=17.75)
    assert told(core, Tick(), now=25.5) == [ASK]
    assert isinstance(told(core, Tick(), now=25.75)[0], Stop)


def test_an_older_master_that_is_cut_off_too_does_not_count() -> None:
    core = member(term=2)
    told(core, MasterUnreachable(), now=10.0)
    told(core, Assigned(placed(9, term=1)), now=17.0)
    assert isinstance(told(core, Tick(), now=18.0)[0], Stop)


def test_a_master_that_is_cut_off_with_us_is_enough_for_a_while_only() -> None:
    """It answers, and cannot know whether the others go on under another one."""
    core = member()
    cut_off = Assigned(placed(master_disconnected=True))
    told(core, cut_off, now=10.0)
    patience = LEASE_S + AGENT_DISCONNECTED_S
    for now in range(11, 48):
        assert told(core, cut_off, Tick(), now=now) == [ASK]
    told(core, PeerSeen(1), now=47.5)
    assert told(core, cut_off, Tick(), now=47.5 + patience - 0.25) == [ASK]
    (stop, _) = told(core, cut_off, Tick(), now=47.5 + patience)
    assert isinstance(stop, Stop)
    assert "neither a master that reaches its platform nor rank 0" in stop.why


def test_a_master_that_is_back_in_touch_is_enough() -> None:
    core = member()
    told(core, Assigned(placed(master_disconnected=True)), now=10.0)
    told(core, Assigned(placed()), now=40.0)
    assert told(core, Tick(), now=1000.0) == []


def test_a_master_that_was_adrift_and_then_says_nothing_is_missed_like_any() -> None:
    core = member()
    told(core, Assigned(placed(master_disconnected=True)), now=10.0)
    told(core, MasterUnreachable(), now=20.0)
    assert isinstance(told(core, Tick(), now=20.0)[0], Stop)


def test_rank_0_gives_the_others_time_to_miss_the_master() -> None:
    core = member(node_rank=0)
    told(core, MasterUnreachable(), now=10.0)
    patience = LEASE_S + EXCHANGE_S + EXCHANGE_OVERDUE_S
    assert told(core, Tick(), now=10.0 + patience - 0.25) == []
    stop, report = told(core, Tick(), now=10.0 + patience)
    assert isinstance(stop, Stop)
    assert "neither the master nor any other node of the round" in stop.why
    assert report == Report()


def test_a_node_that_is_alone_in_its_round_needs_nobody() -> None:
    core = member(node_rank=0, nnodes=1)
    told(core, MasterUnreachable())
    assert told(core, Tick(), now=1000.0) == []


def test_silence_where_no_question_has_ever_got_through_says_nothing() -> None:
    """A firewall, say. It is asked in health until it has been answered once in the round."""
    core = Core(nproc=1)
    told(core, Assigned(placed()))
    assert told(core, Tick()) == [ASK]
    told(core, MasterUnreachable())
    assert told(core, Tick(), now=1000.0) == [ASK]
    told(core, Assigned(placed()), PeerSeen(1), now=1001.0)
    assert told(core, Tick(), now=1002.0) == [], "in health nobody asks"
    told(core, Assigned(placed(2)), WorkersGone(1), PeerSeen(1), now=1003.0)
    assert told(core, Tick(), now=1004.0) == [ASK], "the next round has another rank 0"


def test_who_has_finished_still_asks_for_rank_0_s_sake() -> None:
    core, first = member(), member(node_rank=0)
    told(core, WorkerEnded(1, 0, None), MasterUnreachable(), now=10.0)
    assert told(core, Tick(), now=11.0) == [ASK]
    assert told(core, Tick(), now=100.0) == [ASK], "though a process of its own is left"
    told(core, WorkersGone(1))
    assert told(core, Tick(), now=1000.0) == [ASK]
    assert (core.phase, core.cut_off) == (WorkerPhase.SUCCEEDED, "")
    told(first, WorkerEnded(1, 0, None))
    assert first.stands(1), "its workers are missed by nobody"


def test_who_has_failed_or_stopped_is_not_in_the_round_any_more() -> None:
    core = member(node_rank=0)
    assert not core.stands(2)
    told(core, WorkerEnded(1, 0, failure()))
    assert not core.stands(1)


# --- all of it, in any order ---


@dataclass
class Workers:
    """The processes of one round, as the machine plays them."""

    round: int
    alive: set[int]
    check: bool = False
    ordered: bool = False
    """They were told to stop, or killed, before they had all ended."""


@dataclass
class Master:
    """What the machine's master has said, newest last."""

    term: int = 1
    version: int = 0
    round: int = 0
    check: int = 0
    sent: list[Assignment] = field(default_factory=list)


class AgentMachine(RuleBasedStateMachine):
    """Plays everybody else, and keeps a second opinion of what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.nproc = 2
        self.core = Core(nproc=self.nproc)
        self.master = Master()
        self.workers: Workers | None = None
        self.started: list[int] = []
        self.verdicts: dict[int, str] = {}
        """How the workers of a round ended by themselves."""
        self.newest: Assignment | None = None
        self.signals = 0
        self.last: str | None = None
        """Why the agent is on its way out."""
        self.exit: Exit | None = None
        self.now = 0.0
        self.answered_at = self.met_at = 0.0
        self.met_in = 0
        """Round in which another node was met."""
        self.calm = 0
        """Nothing that ends the agent happens before so many events."""

    @property
    def may_end(self) -> bool:
        return self.exit is None and self.now > self.calm / 4

    # --- what the core is told ---

    def tell(self, event: Event) -> list[Effect]:
        before, quiet = self._news(), self.last is None
        self.now += 0.25
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._perform(effect)
        if self._news() != before and quiet and self.last is None:
            assert Report() in effects, f"{before} became {self._news()} and nobody is told"
        return effects

    def _news(self) -> tuple[object, ...]:
        core = self.core
        settled = core.phase in (WorkerPhase.FAILED, WorkerPhase.SUCCEEDED, WorkerPhase.IDLE)
        phase = core.phase if settled else None
        return core.follows, core.failure, core.leaving, core.cut_off, phase

    def _perform(self, effect: Effect) -> None:
        assert self.exit is None, f"{effect} after the agent's end"
        match effect:
            case Start(new):
                assert self.workers is None, "workers of two rounds overlap"
                assert self.last is None, f"a start although {self.last}"
                assert self.newest is not None
                assert new.directive is self.newest.directive, "it was called off"
                assert new.directive in (RUN, CHECK)
                assert new.round == self.newest.round, "the master has a newer round"
                assert new.check == self.newest.check, "the master has a newer check"
                check = new.directive is CHECK
                self.workers = Workers(new.round, set(range(self.nproc)), check)
                if not check:
                    assert not self.started or new.round > self.started[-1]
                    self.started.append(new.round)
            case ProbePeer(addr, _):
                assert self.newest is not None
                assert (addr, self.newest.nnodes, self.newest.node_rank) == ("h0", 3, 1)
            case Stop() | Kill():
                assert self.workers is not None, "there is nobody to stop"
                if self.workers.alive:
                    self.workers.ordered = True
            case Exit(code, _):
                assert self.workers is None, "the agent ends and leaves workers behind"
                assert self.last is not None, "nobody has asked for this"
                self.exit = effect
                expected = {"signal": 1, "refused": 3, "stop": 42}[self.last]
                assert code == expected

    @initialize(calm=st.integers(0, 25), place=st.sampled_from([(1, 0), (3, 0), (3, 1)]))
    def begin(self, calm: int, place: tuple[int, int]) -> None:
        self.calm = calm
        self.nnodes, self.node_rank = place

    @precondition(lambda self: self.exit is not None)
    @rule()
    def nothing_more_happens(self) -> None:
        """The agent has ended."""

    @precondition(lambda self: self.exit is None)
    @rule(
        directive=st.sampled_from([RUN, RUN, RUN, CHECK, WAIT]),
        new_term=st.sampled_from([False, False, False, True]),
        new_round=st.booleans(),
    )
    def the_master_assigns(self, directive: Directive, new_term: bool, new_round: bool) -> None:
        master = self.master
        if new_term:
            master.term, master.version = master.term + 1, 0
        master.version += 1
        over = self.newest is None or self.newest.directive is not directive
        if directive is RUN and (new_round or over):  # what was called off never runs again
            master.round += 1
        if directive is CHECK and (new_round or over):
            master.check += 1
        new = Assignment(
            term=master.term,
            version=master.version,
            incarnation=1,
            directive=directive,
            reason="a test",
            round=master.round,
            check=master.check if directive is CHECK else 0,
            exit_code=42,
            nnodes=self.nnodes,
            node_rank=self.node_rank,
            master_addr="h0",
            master_port=5000,
            lease_s=LEASE_S,
            exchange_s=EXCHANGE_S,
        )
        master.sent.append(new)
        self.answered_at = self.now
        self.newest = new
        if directive is STOP and self.last is None:
            self.last = "stop"
        again = directive is RUN and new.round <= self.core.follows
        again |= directive is CHECK and new.check <= self.core.checks
        effects = self.tell(Assigned(new))
        if again:
            assert effects == [], "a round that is known asks for nothing"

    @precondition(lambda self: self.exit is None and self.master.sent)
    @rule(pick=st.integers(0, 1000))
    def an_old_answer_comes_late(self, pick: int) -> None:
        before = vars_of(self.core)
        sent = self.master.sent
        late = sent[-1 - pick % len(sent)]
        assert self.tell(Assigned(late)) == []
        if late.term == self.core.have[0]:
            self.answered_at = self.now
            before["_master_missing_since"] = "None"
        assert vars_of(self.core) == before

    @precondition(lambda self: self.may_end)
    @rule(new_term=st.booleans())
    def the_master_ends_it(self, new_term: bool) -> None:
        self.the_master_assigns(STOP, new_term, new_round=False)

    @precondition(lambda self: self.may_end)
    @rule()
    def the_master_refuses(self) -> None:
        self.last = "refused"
        self.tell(NodeRefused("given up"))

    @precondition(lambda self: self.may_end)
    @rule()
    def a_signal_comes(self) -> None:
        self.signals += 1
        if self.last is None:
            self.last = "signal"
        effects = self.tell(TERM)
        if self.signals > 1 and self.workers is not None:
            assert Kill() in effects, "the second signal is not to be waited for"

    @precondition(lambda self: self.exit is None and self.workers is not None)
    @rule(pick=st.integers(0, 10), fails=st.booleans())
    def a_worker_ends(self, pick: int, fails: bool) -> None:
        workers = self.workers
        assert workers is not None
        if not workers.alive:
            return
        rank = sorted(workers.alive)[pick % len(workers.alive)]
        workers.alive.discard(rank)
        if not workers.ordered and self.last is None and not workers.check:
            if fails:
                self.verdicts[workers.round] = "failed"
            elif not workers.alive:
                self.verdicts[workers.round] = "succeeded"
        self.tell(WorkerEnded(workers.round, rank, failure(rank) if fails else None))

    @precondition(lambda self: self.exit is None and self.workers and not self.workers.alive)
    @rule()
    def all_processes_are_gone(self) -> None:
        assert self.workers is not None
        gone, self.workers = self.workers.round, None
        self.tell(WorkersGone(gone))

    @precondition(lambda self: self.exit is None and len(self.started) > 1)
    @rule(kind=st.integers(0, 4))
    def late_news_of_an_old_round(self, kind: int) -> None:
        old = self.started[-2]
        events: list[Event] = [
            WorkerEnded(old, 0, failure()),
            WorkerEnded(old, 0, None),
            WorkersGone(old),
            WorkersStuck(old, (5,)),
            StepReported(old, 0, 5, None, {}),
        ]
        before = vars_of(self.core)
        assert self.tell(events[kind]) == []
        assert vars_of(self.core) == before

    @precondition(lambda self: self.exit is None and self.workers is not None)
    @rule(step=st.integers(0, 50))
    def a_step(self, step: int) -> None:
        assert self.workers is not None
        self.tell(StepReported(self.workers.round, 0, step, None, {}))

    @precondition(lambda self: self.exit is None)
    @rule()
    def the_master_does_not_answer(self) -> None:
        assert self.tell(MasterUnreachable()) == []

    @precondition(lambda self: self.exit is None and self.started)
    @rule(old=st.booleans())
    def another_node_is_met(self, old: bool) -> None:
        round_number = self.started[-1] - old
        assert self.tell(PeerSeen(round_number)) == []
        if self.workers is not None and self.workers.round == round_number:
            self.met_at, self.met_in = self.now, round_number

    @precondition(lambda self: self.exit is None)
    @rule(seconds=st.sampled_from([0.0, 2.0, LEASE_S, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        was, phase = self.core.cut_off, self.core.phase
        effects = self.tell(Tick())
        if self.core.cut_off == was:
            assert effects in ([], [ASK]), "looking at the clock does nothing else"
            return
        assert self.nnodes > 1
        assert self.workers is not None
        assert phase is WorkerPhase.RUNNING, "what has ended well stays so"
        assert self.met_in == self.workers.round, "it may be a firewall"
        assert self.now - max(self.answered_at, self.met_at) >= LEASE_S
        assert isinstance(effects[0], Stop)

    @precondition(lambda self: self.core.phase is WorkerPhase.RUNNING)
    @rule()
    def nobody_answers_for_long(self) -> None:
        self.the_master_does_not_answer()
        self.time_passes(LEASE_S + EXCHANGE_S + EXCHANGE_OVERDUE_S)
        alone = self.nnodes > 1 and self.met_in == self.core.follows
        assert self.core.stands(self.core.follows) is not alone

    # --- what a report may say ---

    @invariant()
    def the_report_is_true(self) -> None:
        core = self.core
        said = self.verdicts.get(core.follows)
        if core.phase is WorkerPhase.SUCCEEDED:
            assert said == "succeeded", f"round {core.follows}: {said}"
        if core.phase is WorkerPhase.FAILED or core.failure is not None:
            assert said == "failed", f"round {core.follows}: {said}"
        if core.phase is WorkerPhase.RUNNING:
            assert self.workers is not None
            assert self.workers.round == core.follows
            assert not self.workers.ordered
            assert not self.workers.check
        if core.phase is WorkerPhase.CHECKING:
            assert self.workers is not None
            assert self.workers.check
        if core.phase is WorkerPhase.IDLE:
            assert self.workers is None
        if self.newest is not None:
            assert core.have == (self.newest.term, self.newest.version)

    def teardown(self) -> None:
        """Workers that were told to stop do; then what was decided has happened."""
        for _ in range(10):
            if self.exit is not None or self.workers is None:
                break
            while self.workers is not None and self.workers.alive:
                self.a_worker_ends(0, fails=False)
            self.all_processes_are_gone()
        if self.last is not None:
            assert self.exit is not None, f"the agent stays although {self.last}"
        elif self.newest is not None and self.newest.directive is RUN:
            assert self.started, "nothing was ever started"
            assert self.started[-1] == self.newest.round


TestAgentMachine = AgentMachine.TestCase
TestAgentMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
