"""What of a status goes into the object: never more than the object bears."""

import pytest

from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.status import (
    TRAINING_BYTES,
    GoodputStatus,
    JobEvent,
    JobPhase,
    JobStatus,
    NodePhase,
    NodeRole,
    NodeStatus,
    Training,
)


def status(nodes: int, events: int = 0, message: str = "") -> JobStatus:
    return JobStatus(
        name="x",
        generation=1,
        phase=JobPhase.RUNNING,
        reason="",
        term=1,
        round=3,
        world_size=nodes,
        nodes_in_round=nodes - 1,
        desired=nodes,
        minimum=1,
        ready=nodes,
        standby=0,
        restarts={"failure": 2, "loss": 1, "scale": 5},
        nodes=[
            NodeStatus(
                id=f"n{i}", phase=NodePhase.LIVE, role=NodeRole.MEMBER, incarnation=1, pids=[1] * 8
            )
            for i in range(nodes)
        ],
        events=[JobEvent(id=i, at=1.0, reason="Something", message=message) for i in range(events)],
        started_at=0.0,
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (status(3, 5), (3, 5)),
        (status(2000, 400), (64, 30)),
        (status(3, 30, "x" * 1500), (3, 14)),
        (status(3, 30, "ä" * 1500), (3, 7)),
        (status(2000, 30, "x" * 60_000), (64, 0)),
    ],
)
def test_it_is_cut_to_size(given: JobStatus, shown: tuple[int, int]) -> None:
    made = Training.of(given)
    assert (len(made.nodes), len(made.events)) == shown
    assert made.left_out == len(given.nodes) - len(made.nodes)
    assert len(made.model_dump_json(by_alias=True).encode()) <= TRAINING_BYTES
    if made.events:
        assert made.events[-1] == given.events[-1]


def test_nodes_that_are_not_in_order_come_first_and_those_gone_last() -> None:
    given = status(200)
    bad = given.nodes[150].model_copy(update={"message": "it is slow"})
    gone = given.nodes[0].model_copy(update={"phase": NodePhase.GONE, "message": "it is gone"})
    nodes = [gone] * 100 + [*given.nodes[100:150], bad]
    shown = Training.of(given.model_copy(update={"nodes": nodes})).nodes
    assert shown[0] == bad
    assert [n.phase for n in shown[1:]] == [NodePhase.LIVE] * 50 + [NodePhase.GONE] * 13


def test_the_columns() -> None:
    given = status(8).model_copy(update={"goodput": GoodputStatus(wall_s=1, share=0.98765)})
    assert Training.of(given).summary.model_dump() == {
        "ready": "7/8",
        "progress": "",
        "restarts": 3,
        "goodput": "98.8%",
    }
    for total, words in ((None, "20"), (80, "25% (20/80)")):
        progress = Progress(step=20, total=total, started_at_step=0, first_step_after_s=0.0)
        shown = Training.of(given.model_copy(update={"progress": progress})).summary
        assert shown.progress == words
