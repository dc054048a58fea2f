"""What a campaign of faults is made of, as far as it needs no cluster."""

from collections.abc import Callable
from typing import Any

import pytest

from dlrover_py.protocol.status import (
    JobEvent,
    JobPhase,
    LastCheckpoint,
    NodePhase,
    NodeRole,
    NodeStatus,
    StatusColumns,
    Training,
)
from tests.cluster.chaos.check import (
    Blame,
    Checker,
    Committed,
    Journaled,
    Partition,
    Pod,
    WorkerLine,
    unlike,
)
from tests.cluster.chaos.plan import LEAST, MOST, OF_API, Kind, plan
from tests.cluster.chaos.score import ceiling, rows, stall_s, useful_s


def test_a_seed_is_a_plan_and_a_longer_one_begins_alike() -> None:
    assert plan(7, 300, jobs=2) == plan(7, 300, jobs=2)
    assert plan(7, 300)[:60] == plan(7, 60)
    assert plan(7, 60) != plan(8, 60)


def test_a_plan_has_all_kinds_and_each_can_be_done() -> None:
    steps = plan(1, 2000, jobs=2)
    assert {step.kind for step in steps} == set(Kind)
    size = [3, 3]
    for step in steps:
        for fault in step.faults:
            if fault.kind is Kind.SCALED:
                assert fault.sizes != (size[fault.job],), "it changes something"
            if fault.sizes:
                size[fault.job] = fault.sizes[-1]
            assert LEAST <= size[fault.job] <= MOST
        if step.kind is Kind.PAIR:
            assert step.faults[0].kind not in OF_API, "a host comes back while that is there"
            assert step.apart_s < 1
    assert {"job 1: standby", "job 0: rank 0", "job 1: rank 3"} <= {
        fault.whom for step in steps for fault in step.faults
    }


# --- invariants: a job in order, and each thing that must not be ---


def event(number: int, reason: str = "Something", **more: Any) -> JobEvent:
    fields = {"id": number, "at": float(number), "reason": reason, "message": f"{number} is so"}
    return JobEvent(**(fields | more))


def formed(number: int, round_number: int, **more: Any) -> JobEvent:
    words = f"round {round_number}: 3 nodes, 3 workers; because node n1 was lost"
    fields = {"message": words, "round": round_number, "cause": number - 1}
    return event(number, "RoundFormed", **(fields | more))


def seen(**more: Any) -> Training:
    fields: dict[str, Any] = {
        "name": "job", "generation": 1, "phase": JobPhase.RUNNING, "reason": "", "term": 1,
        "round": 1, "world_size": 3, "nodes_in_round": 3, "desired": 3, "minimum": 2, "ready": 3,
        "standby": 1, "started_at": 0.0, "summary": StatusColumns(ready="3/3"),
        "events": [event(1, "JobStarted"), formed(2, 1)],
    }  # fmt: skip
    return Training(**(fields | more))


def stored(step: int) -> LastCheckpoint:
    return LastCheckpoint(step=step + 3, where="memory", at=0.0, stored_step=step, stored_at=0.0)


def line(what: str, at: float, rank: int = 0, *values: float, **more: Any) -> WorkerLine:
    fields: dict[str, Any] = {"node": f"n{rank}", "round": 1, "size": 3} | more
    return WorkerLine(what, at, rank=rank, values=values, **fields)


def place(name: str, **more: Any) -> NodeStatus:
    fields = {"phase": NodePhase.LIVE, "role": NodeRole.MEMBER, "incarnation": 1, "host": "h1"}
    return NodeStatus(id=name, **(fields | more))


def hurt(*nodes: str, **more: Any) -> Blame:
    fields: dict[str, Any] = {"losses": 1, "nodes": frozenset(nodes)}
    return Blame(**(fields | more))


def stepped(
    checker: Checker, begin: float, end: float, step: int, number: int, name: str = "n0"
) -> int:
    """Rank 0 makes a step each second; the last one."""
    at = begin
    while at < end:
        checker.wrote("job", line("step", at, 0, step, node=name, round=number))
        at, step = at + 1.0, step + 1
    return step - 1


def in_order(checker: Checker) -> None:
    """A job that starts, stores a step, loses a node, and goes on by another master."""
    for rank in range(3):
        checker.wrote("job", line("started", 1.0, rank))
        checker.wrote("job", line("loaded", 1.2, rank, 0, 1.1))
    checker.journaled("job", 1.0, Journaled("a", 1, 1, 3))
    checker.seen("job", 1.0, seen())
    checker.seen("job", 5.0, seen(last_checkpoint=stored(40)))
    stepped(checker, 2.0, 6.0, 1, 1)
    checker.struck("job", 6.0, hurt("n1", failures=1), for_s=60.0)
    lost = event(3, "NodeLost", type="Warning", node="n1")
    events = [event(1, "JobStarted"), formed(2, 1), lost, formed(4, 2)]
    checker.journaled("job", 6.5, Journaled("a", 1, 2, 5))
    nodes = [place("n0"), place("n2"), place("n3", relaunches=1)]
    news: dict[str, Any] = {"round": 2, "restarts": {"loss": 1}, "nodes": nodes}
    checker.seen("job", 7.0, seen(**news, events=events, last_checkpoint=stored(40)))
    for rank in (0, 2, 1):
        node = f"n{rank}" if rank != 1 else "n3"
        checker.wrote("job", line("started", 8.0, rank, node=node, round=2))
        checker.wrote("job", line("loaded", 8.2, rank, 43, 8.1, node=node, round=2))
    checker.journaled("job", 9.0, Journaled("b", 1, 2, 5))
    checker.journaled("job", 9.1, Journaled("b", 2, 2, 6))
    events = [*events[1:], event(5, "MasterStarted")]
    stepped(checker, 9.0, 11.0, 44, 2)
    checker.seen("job", 10.0, seen(**news, term=2, events=events, last_checkpoint=stored(60)))
    checker.committed("job", 10.0, [Committed(2, 2, 60), Committed(1, 1, 40)])
    checker.committed("job", 10.5, [Committed(3, 2, 65), Committed(2, 2, 60)])


def test_a_job_in_order_violates_nothing() -> None:
    checker = Checker()
    in_order(checker)
    assert checker.violations == []
    assert checker.checks > 20


def late(*events: JobEvent, **more: Any) -> Training:
    return seen(**({"round": 2, "term": 2, "events": list(events)} | more))


def after(*events: JobEvent, **more: Any) -> Training:
    return late(*events, **({"round": 3} | more))


def charges(reason: str, *nodes: str) -> list[JobEvent]:
    return [event(6 + n, reason, type="Warning", node=name) for n, name in enumerate(nodes)]


def killed(checker: Checker) -> None:
    """A worker is, and one that it was connected to has told."""
    checker.struck("job", 12.0, Blame(failures=1, nodes=frozenset({"n2"}), owed=True), for_s=60.0)
    lost = event(6, "PeerLost", type="Warning", node="n0")
    checker.seen("job", 13.0, late(lost))


def cut(wait_s: float, *nodes: str, sure: bool = True) -> Partition:
    return Partition(frozenset(nodes or {"n0"}), wait_s, sure)


def next_round(checker: Checker) -> None:
    """The second one trains on, and is followed by a third on other nodes."""
    stepped(checker, 11.0, 31.0, 46, 2)
    checker.wrote("job", line("started", 32.0, 0, node="n4", round=3))
    checker.wrote("job", line("loaded", 32.5, 0, 65, 32.1, node="n4", round=3))
    stepped(checker, 33.0, 80.0, 66, 3, "n4")


Plant = Callable[[Checker], object]


def in_turn(*plants: Plant) -> Plant:
    def all_of_them(checker: Checker) -> None:
        for plant in plants:
            plant(checker)

    return all_of_them


PLANTS: dict[str, tuple[str, Plant]] = {
    "another size": (
        "one world per round",
        lambda c: c.wrote("job", line("started", 11.0, 3, node="n9", round=2, size=4)),
    ),
    "the status knows another size": (
        "one world per round",
        lambda c: c.seen("job", 11.0, late(world_size=2)),
    ),
    "formed twice": (
        "one world per round",
        lambda c: c.seen("job", 11.0, late(formed(6, 2, cause=5))),
    ),
    "a rank twice": (
        "one worker per rank",
        lambda c: c.wrote("job", line("started", 11.0, 1, node="n9", round=2)),
    ),
    "a rank twice on its node": (
        "one worker per rank",
        lambda c: c.wrote("job", line("started", 11.0, 1, node="n3", round=2)),
    ),
    "a rank beyond": (
        "one worker per rank",
        lambda c: c.wrote("job", line("started", 11.0, 3, round=2)),
    ),
    "an older round on a node": (
        "rounds only grow",
        lambda c: c.wrote("job", line("started", 11.0, 0, round=0)),
    ),
    "an older round in the status": (
        "rounds only grow",
        lambda c: c.seen("job", 11.0, late(round=1)),
    ),
    "an older term in the status": (
        "no stale master writes",
        lambda c: c.seen("job", 11.0, late(term=1)),
    ),
    "an event is another": (
        "no stale master writes",
        lambda c: c.seen("job", 11.0, late(event(5, "NodeJoined"))),
    ),
    "an older term in the journal": (
        "no stale master writes",
        lambda c: c.journaled("job", 11.0, Journaled("b", 1, 2, 7)),
    ),
    "a master is back": (
        "no stale master writes",
        lambda c: c.journaled("job", 11.0, Journaled("a", 3, 2, 7)),
    ),
    "two masters in a term": (
        "no stale master writes",
        lambda c: c.journaled("job", 11.0, Journaled("c", 2, 2, 7)),
    ),
    "a step before a stored one": (
        "no step before a stored one",
        lambda c: c.wrote("job", line("loaded", 11.2, 0, 59, 11.1, round=3)),
    ),
    "a step before one that is there": (
        "no step before a stored one",
        lambda c: c.wrote("job", line("loaded", 11.2, 0, 64, 11.1, round=3)),
    ),
    "a stale coordinator commits": (
        "no stale node commits",
        lambda c: c.committed("job", 11.0, [Committed(4, 1, 70)]),
    ),
    "an older step is committed": (
        "no step before a stored one",
        lambda c: c.committed("job", 11.0, [Committed(4, 2, 64)]),
    ),
    "a stored step is gone": (
        "no step before a stored one",
        lambda c: c.seen("job", 11.0, late(last_checkpoint=stored(59))),
    ),
    "two steps in a round": (
        "one step for all",
        lambda c: c.wrote("job", line("loaded", 11.2, 0, 66, 11.1, round=2)),
    ),
    "charged for another's failure": (
        "only affected nodes are charged",
        lambda c: (
            c.seen("job", 11.0, late(event(6, "WorkerFailed", type="Warning", node="n2")))
        ),
    ),
    "charged too late": (
        "only affected nodes are charged",
        lambda c: c.seen("job", 67.0, late(event(6, "WorkerFailed", type="Warning", node="n1"))),
    ),
    "who was drained is charged beside one that was deleted by force": (
        "only affected nodes are charged",
        in_turn(
            lambda c: c.struck("job", 12.0, hurt("n2"), for_s=60.0),
            lambda c: c.struck("job", 20.0, Blame(), for_s=60.0),
            lambda c: c.seen("job", 21.0, late(event(6, "NodeLost", type="Warning", node="n0"))),
        ),
    ),
    "charged twice for one fault": (
        "only affected nodes are charged",
        in_turn(
            lambda c: c.struck("job", 12.0, hurt("n2"), for_s=60.0),
            lambda c: c.seen("job", 13.0, late(*charges("NodeLost", "n2", "n2"))),
        ),
    ),
    "a host is cut off, and a node elsewhere is charged": (
        "only affected nodes are charged",
        in_turn(
            lambda c: c.struck(
                "job", 12.0, hurt("n2", losses=3, hosts=frozenset({"h2"})), for_s=60.0
            ),
            lambda c: c.seen(
                "job", 13.0, late(*charges("NodeLost", "n3"), nodes=[place("n3", relaunches=1)])
            ),
        ),
    ),
    "charged without a word": (
        "only affected nodes are charged",
        lambda c: c.seen("job", 11.0, late(nodes=[place("n0", restarts=1)])),
    ),
    "replaced without a word": (
        "only affected nodes are charged",
        lambda c: c.seen("job", 11.0, late(nodes=[place("n3", relaunches=2)])),
    ),
    "charged still after all was forgiven": (
        "only affected nodes are charged",
        lambda c: c.seen(
            "job", 11.0, late(event(6, "BudgetReset"), nodes=[place("n3", relaunches=1)])
        ),
    ),
    "a worker is killed, and nobody is charged": (
        "the failed node is charged",
        in_turn(killed, lambda c: c.seen("job", 14.0, after(formed(7, 3, cause=6)))),
    ),
    "a decision without words": (
        "every decision is explained",
        lambda c: c.seen("job", 11.0, late(event(6, "NodeJoined", message=" "))),
    ),
    "a place is given up without a cause": (
        "every decision is explained",
        lambda c: c.seen("job", 11.0, late(event(6, "ReplacementsExhausted", node="n1"))),
    ),
    "a node is replaced without a cause": (
        "every decision is explained",
        lambda c: c.seen("job", 11.0, late(event(6, "RestartsExhausted", node="n1"))),
    ),
    "a cause that there is not": (
        "every decision is explained",
        lambda c: c.seen("job", 11.0, late(event(6, "TrainingResumed", cause=7))),
    ),
    "a round is counted that there is not": (
        "every round is explained",
        lambda c: c.seen("job", 11.0, late(restarts={"loss": 1, "drain": 1})),
    ),
    "two rounds train": (
        "no older round continues to train",
        lambda c: stepped(c, 6.0, 40.0, 5, 1),
    ),
    "who is cut off trains on for longer than it waits": (
        "no older round continues to train",
        in_turn(
            lambda c: c.parted("job", 30.0, cut(30.0)),
            next_round,
            lambda c: stepped(c, 31.0, 62.0, 66, 2),
        ),
    ),
    "another one trains on beside who is cut off": (
        "no older round continues to train",
        in_turn(
            lambda c: c.parted("job", 30.0, cut(30.0, "n2")),
            next_round,
            lambda c: stepped(c, 31.0, 52.0, 66, 2),
        ),
    ),
    "who was cut off trains on once it is back": (
        "no older round continues to train",
        in_turn(
            lambda c: c.parted("job", 30.0, cut(5.0, sure=False)),
            lambda c: c.back("job", 33.0),
            lambda c: c.back("job", 60.0),  # of another fault
            next_round,
            lambda c: stepped(c, 31.0, 65.0, 66, 2),
        ),
    ),
    "a worker begins behind what it has loaded": (
        "steps continue from the last one",
        in_turn(
            lambda c: c.wrote("job", line("started", 11.0, 0, round=3)),
            lambda c: c.wrote("job", line("loaded", 11.2, 0, 66, 11.1, round=3)),
            lambda c: c.wrote("job", line("step", 12.0, 0, 66, round=3)),
        ),
    ),
    "a worker begins beyond what it has loaded": (
        "steps continue from the last one",
        in_turn(
            lambda c: c.wrote("job", line("loaded", 11.2, 0, 66, 11.1, round=3)),
            lambda c: c.wrote("job", line("step", 12.0, 0, 68, round=3)),
        ),
    ),
    "a worker that has loaded nothing begins behind what is stored": (
        "steps continue from the last one",
        in_turn(
            lambda c: c.wrote("job", line("started", 11.0, 0, round=3)),
            lambda c: c.wrote("job", line("step", 12.0, 0, 1, round=3)),
        ),
    ),
    "a step again": (
        "steps continue from the last one",
        lambda c: c.wrote("job", line("step", 11.0, 0, 45, round=2)),
    ),
    "a step is left out": (
        "steps continue from the last one",
        lambda c: c.wrote("job", line("step", 11.0, 0, 47, round=2)),
    ),
    "a round without an event": (
        "every round is explained",
        lambda c: c.seen("job", 11.0, late(event(6), round=3)),
    ),
    "a round without a reason": (
        "every round is explained",
        lambda c: c.seen("job", 11.0, late(formed(6, 3, message="round 3"), round=3)),
    ),
    "a round without a cause": (
        "every round is explained",
        lambda c: c.seen("job", 11.0, late(formed(6, 3, cause=None), round=3)),
    ),
    "something is left": ("nothing is left", lambda c: c.left("job", 11.0, ["pod/job-n0"])),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_what_must_not_be_is_found(name: str) -> None:
    rule, plant = PLANTS[name]
    checker = Checker()
    in_order(checker)
    plant(checker)
    assert {v.rule for v in checker.violations} == {rule}, checker.violations


def test_a_round_that_trains_on_is_told_of_once() -> None:
    checker = Checker()
    in_order(checker)
    stepped(checker, 6.0, 60.0, 5, 1)
    assert len(checker.violations) == 1


HARMLESS: dict[str, Plant] = {
    "it was stored when a worker had begun to load already": lambda c: (
        c.wrote("job", line("loaded", 11.0, 0, 43, 9.0, round=3))
    ),
    "a failure that one of the faults accounts for": lambda c: (
        c.seen("job", 11.0, late(event(6, "WorkerFailed", type="Warning", node="n1")))
    ),
    "rounds whose events have made room for newer ones": lambda c: (
        c.seen("job", 12.0, late(event(50), formed(51, 9), round=9, restarts={"loss": 8}))
    ),
    "what was charged meanwhile was not seen": lambda c: (
        c.seen("job", 12.0, late(event(50), nodes=[place("n0", restarts=2, relaunches=3)]))
    ),
    "a cause that has made room": lambda c: (
        c.seen("job", 12.0, late(event(50, cause=48), event(51, cause=50)))
    ),
    "of a list it is not known who wrote what came before": lambda c: (
        c.journaled("job", 12.0, Journaled("c", 2, 2, 8, gap=True))
    ),
    "nothing is left": lambda c: c.left("job", 13.0, []),
    "nobody is to blame": lambda c: c.seen("job", 11.0, late(event(6, "NodeLost", node="n2"))),
    "a node that came to a host that is cut off": in_turn(
        lambda c: c.struck("job", 12.0, hurt("n2", losses=3, hosts=frozenset({"h2"})), for_s=60.0),
        lambda c: c.seen(
            "job", 13.0, late(*charges("NodeLost", "n5"), nodes=[place("n5", host="h2")])
        ),
    ),
    "two faults, two charges": in_turn(
        lambda c: c.struck("job", 12.0, hurt("n2"), for_s=60.0),
        lambda c: c.struck("job", 12.5, hurt("n3"), for_s=60.0),
        lambda c: c.seen(
            "job", 13.0,
            late(*charges("NodeLost", "n3", "n2"), nodes=[place("n4", relaunches=3)]),
        ),
    ),
    "all is forgiven": lambda c: c.seen("job", 11.0, late(event(6, "BudgetReset"))),
    "a worker is killed, and its node charged": in_turn(
        killed,
        lambda c: c.seen(
            "job", 14.0,
            after(event(7, "WorkerFailed", type="Warning", node="n2", cause=6),
                  formed(8, 3, cause=7), nodes=[place("n2", restarts=1)]),
        ),
    ),
    "a worker is killed as its node leaves": in_turn(
        killed,
        lambda c: c.seen(
            "job", 14.0, after(event(7, "NodeLeaving", node="n2"), formed(8, 3, cause=7))
        ),
    ),
    "a worker is killed of a round that is over already": in_turn(
        lambda c: c.seen("job", 11.0, late(event(6, "RoomToGrow"))),
        lambda c: c.struck(
            "job", 12.0, Blame(failures=1, nodes=frozenset({"n2"}), owed=True), for_s=60.0
        ),
        lambda c: c.seen("job", 14.0, after(formed(7, 3, cause=6))),
    ),
    "the job ends for want of nodes": lambda c: (
        c.seen("job", 11.0, late(event(6, "ReplacementsExhausted", type="Warning")))
    ),
    "who is replaced finishes its step": in_turn(
        next_round, lambda c: stepped(c, 31.0, 47.0, 66, 2)
    ),
    "who is cut off trains on for as long as it waits": in_turn(
        lambda c: c.parted("job", 30.0, cut(30.0)),
        next_round,
        lambda c: stepped(c, 31.0, 60.0, 66, 2),
    ),
    "who is cut off beside another one trains on until it is back": in_turn(
        lambda c: c.parted("job", 30.0, cut(5.0, sure=False)),
        lambda c: c.back("job", 50.0),
        next_round,
        lambda c: stepped(c, 31.0, 79.0, 66, 2),
    ),
    "who is cut off in a young round has met nobody": in_turn(
        lambda c: c.parted("job", 12.0, cut(5.0)),
        next_round,
        lambda c: stepped(c, 31.0, 79.0, 66, 2),
    ),
    "a line comes late": in_turn(
        next_round,
        lambda c: c.wrote("job", line("step", 46.0, 0, 66, round=2)),
    ),
    "another worker of the node and round": lambda c: (
        c.wrote("job", line("step", 11.0, 1, 66, node="n0", round=2))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_no_violation(name: str) -> None:
    checker = Checker()
    in_order(checker)
    HARMLESS[name](checker)
    assert checker.violations == []


def test_pods_are_those_that_are_known() -> None:
    gone = place("n0", phase=NodePhase.GONE)
    told_of = {"job": ("u1", seen(nodes=[gone, place("n1"), place("n2", phase=NodePhase.PENDING)]))}
    master = Pod("elasticjob-job-dlrover-master-x", "rs", "job", master=True)
    there = [Pod(f"job-{n}", "u1", "job", master=False) for n in ("n1", "n2")]
    assert unlike(told_of, [master, *there]) == []
    assert unlike(told_of, [master, there[0]]) == ["job-n2 is in the status, and has no Pod"]
    for pod, words in (
        (Pod("job-n0", "u1", "job", master=False), "job-n0 is not in the status"),
        (Pod("job-n9", "u1", "job", master=False), "job-n9 is not in the status"),
        (Pod("job-n1", "u0", "job", master=False), "job-n1 is of an earlier job"),
        (Pod("other-n1", "u0", "other", master=False), "other-n1 belongs to no existing job"),
        (Pod("probe", "", "", master=False), "probe belongs to no existing job"),
        (master._replace(name="elasticjob-job-dlrover-master-y"), "job has 2 masters"),
    ):
        (found,) = unlike(told_of, [master, *there, pod])
        assert found.startswith(words)
    assert unlike(told_of, there) == ["job has 0 masters"]


def test_lines_are_read_as_they_are_written() -> None:
    line = '["loaded", 12.5, "n3", 7, 1, 3, 40, 12.25]'
    assert WorkerLine.parse(line) == WorkerLine("loaded", 12.5, "n3", 7, 1, 3, (40, 12.25))


# --- figures ---


def test_only_new_steps_are_useful() -> None:
    lines = [line("loaded", 0.0, 0, 0, 0.0), *(line("step", float(s), 0, s) for s in (1, 2, 3))]
    assert useful_s(lines, 0.0, 10.0) == 3.0
    again = [line("loaded", 5.0, 0, 1, 5.0, round=2)]
    again += [line("step", 4.0 + s, 0, s, round=2) for s in (2, 3, 4)]
    assert useful_s(lines + again, 0.0, 10.0) == 4.0, "two steps are repeated"
    stale = [line("step", 8.5, 0, 4), line("step", 9.0, 0, 5)]
    assert useful_s(lines + again + stale, 0.0, 10.0) == 4.0, "of a round that is over"
    stuck = [line("step", 100.0, 0, 5, round=2)]
    assert useful_s(lines + again + stuck, 0.0, 100.0) == 14.0, "somebody was waited for"
    assert useful_s(lines, 1.5, 2.5) == 1.0
    assert useful_s([], 0.0, 1.0) == 0.0


def test_the_ceiling_and_what_goes_into_it() -> None:
    assert ceiling(0.2, 30.0, 8.9 * 3600) == pytest.approx(0.996, abs=1e-3)
    assert ceiling(1.0, 180.0, 6.2 * 3600) == pytest.approx(0.983, abs=2e-3)
    assert ceiling(1.0, 100.0, 10.0) == 0.0
    blocked = [line("blocked", 1.0, 0, 20, 1.0), line("blocked", 2.0, 0, 40, 3.0)]
    blocked += [line("blocked", 3.0, 0, 10, 2.0, round=2)]
    assert stall_s(blocked) == 0.1, "the newest of each process"
    assert stall_s([]) == 0.0


def test_recoveries_are_told_by_kind() -> None:
    found = {"a": [(3.0, 1.0)], "b": [(1.0, 0.5), (5.0, 4.0), (2.0, 0.2)], "c": []}
    (first, second) = rows(found)
    assert (first.kind, first.number, first.median_s, first.most_s) == ("b", 3, 2.0, 5.0)
    assert (first.pause_s, first.longest_pause_s) == (0.5, 4.0)
    assert second.kind == "a"
