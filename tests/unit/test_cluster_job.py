"""What the command understands of an ElasticJob that the API server has."""

from collections.abc import Callable
from typing import Any

import pytest

from dlrover_operator.crd import definition
from dlrover_py.cli.cluster import ClusterJob, _row, job_view
from dlrover_py.cli.logs import LogQuery
from dlrover_py.cli.podlogs import node_of_rank, selected_node
from dlrover_py.cli.view import JobTable, problem_line
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job_object import new_hosts, read_status, waiting_pod
from tests.builders import job_file

MASTER = {
    "name": "x",
    "generation": 1,
    "phase": "Running",
    "reason": "2 nodes train",
    "term": 1,
    "round": 3,
    "worldSize": 4,
    "nodesInRound": 2,
    "desired": 2,
    "minimum": 2,
    "ready": 2,
    "standby": 0,
    "startedAt": 1000.0,
    "summary": {"ready": "2/2"},
    "nodes": [
        {"id": f"n{i}", "phase": "live", "role": "member", "incarnation": 1, "nproc": 2}
        | {"nodeRank": rank}
        for i, rank in ((4, 1), (7, 0))
    ],
}


def job(spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    obj = job_file(2)
    obj["metadata"] = {"name": "x", "namespace": "ml", "uid": "u"}
    obj["spec"] |= spec or {}
    return obj | {"status": status}


def told(kind: str, state: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": state, "message": message}


@pytest.mark.parametrize(
    ("obj", "phase", "reason"),
    [
        (job(), "Created", "no operator has processed it"),
        (job({"managedBy": "kueue.x-k8s.io/multikueue"}), "Created", "kueue.x-k8s.io/multikueue"),
        (job(phase="Created"), "Created", "its master has not published a status yet"),
        (job(training=MASTER), "Running", "2 nodes train"),
        (job(phase="Running", training=MASTER), "Running", "2 nodes train"),
        (
            job(
                phase="Failed",
                training=MASTER,
                conditions=[told("DeadlineExceeded", "True", "it ran for an hour")],
            ),
            "Failed",
            "DeadlineExceeded: it ran for an hour",
        ),
        (
            job(phase="Suspended", conditions=[told("Suspended", "True", "spec.suspend is true")]),
            "Suspended",
            "spec.suspend is true",
        ),
    ],
)
def test_phase_and_reason(obj: dict[str, Any], phase: str, reason: str) -> None:
    seen = job_view(obj, (), (), where="there")
    assert seen.phase == phase
    assert reason in seen.reason


def test_the_table_has_what_is_wrong_and_each_column_that_kubectl_shows() -> None:
    obj = job(phase="Pending", reason="Unschedulable")
    obj["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    row, _ = _row(obj)
    table = JobTable([row])
    (version,) = definition()["spec"]["versions"]
    shown = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert {name.upper() for name in shown} <= set(table.header().split())
    assert table.line(row).split()[:3] == ["x", "Pending", "Unschedulable"]


@pytest.mark.parametrize(("rounds", "told_of"), [(0, True), (1, False)])
def test_a_command_that_does_not_join_is_trouble_until_a_round_is_formed(
    rounds: int, told_of: bool
) -> None:
    words = "torchrun does not join the job; write: elastic-run t.py"
    accepted = told("Accepted", "True", f"{words}\nmore") | {"reason": "DoesNotJoin"}
    status = MASTER | {"round": rounds, "phase": "Running" if rounds else "Pending"}
    seen = job_view(job(training=status, conditions=[accepted]), (), (), where="there")
    assert not seen.notes
    cut = job(training=status | {"leftOut": 7}, conditions=[accepted])
    assert job_view(cut, (), (), where="there").notes == ["7 nodes are not in the status"]
    said = [problem_line(c) for c in seen.problems]
    assert said == ([f"DoesNotJoin: {words}"] if told_of else [])


FIRST = 1767225600.0
"""The start of 2026, in Unix seconds."""


def by(program: str, reason: str, at: int, *, new: bool = False) -> dict[str, Any]:
    source = {"reportingComponent": program} if new else {"source": {"component": program}}
    when = {"lastTimestamp": f"2026-01-01T00:00:{at:02}Z"}
    return source | when | {"reason": reason, "message": f"words of {at}"}


def test_the_newest_words_of_a_program_that_makes_hosts_are_said() -> None:
    words = "n3: 0/4 nodes are available: 4 Insufficient cpu. (and 2 more)"
    waits = job(training=MASTER, conditions=[told("Unschedulable", "True", words)])
    assert waiting_pod(waits) == "x-n3"
    over = job(training=MASTER, conditions=[told("Unschedulable", "False", "it is over")])
    odd = job(training=MASTER, conditions=[told("Unschedulable", "True", "n3,a=b: c")])
    assert (waiting_pod(over), waiting_pod(odd), waiting_pod(job())) == ("", "", "")
    events = [
        by("cluster-autoscaler", "TriggeredScaleUp", 2),
        by("cluster-autoscaler", "NotTriggerScaleUp", 1),
        by("default-scheduler", "FailedScheduling", 3),
    ]
    said = "x-n3: cluster-autoscaler: TriggeredScaleUp: words of 2"
    assert new_hosts("x-n3", events, 0.0) == said
    assert new_hosts("x-n3", events, FIRST + 2) == said
    assert new_hosts("x-n3", events, FIRST + 2.5) == "", "it was the Pod of an earlier job"
    events.append(by("karpenter", "Nominated", 4, new=True))
    assert new_hosts("x-n3", events, 0.0) == "x-n3: karpenter: Nominated: words of 4"
    assert new_hosts("x-n3", events[2:3], 0.0) == new_hosts("x-n3", (), 0.0) == ""


class Refusing:
    """A cluster of which nothing can be asked."""

    kube = None

    def run(self, _: Any) -> None:
        raise AssertionError("the API server is asked")


def test_a_job_that_has_ended_is_neither_scaled_nor_suspended_nor_restarted() -> None:
    ended = ClusterJob(Refusing(), job(phase="Failed"))  # type: ignore[arg-type]
    changes: tuple[Callable[[], object], ...] = (
        lambda: ended.scale(3),
        lambda: ended.suspend(on=True),
        lambda: ended.restart(rolling=False),
    )
    for change in changes:
        with pytest.raises(ConfigError, match="x has ended"):
            change()


def test_a_status_of_another_version_is_no_status() -> None:
    assert read_status(job(training={"phase": "Dancing"})) is None
    assert read_status(job(training=MASTER | {"news": 1})) is not None


def test_the_node_of_a_rank() -> None:
    status = read_status(job(training=MASTER))
    assert [node_of_rank(status, rank) for rank in (0, 1, 2)] == [("n7", 2), ("n7", 2), ("n4", 2)]
    with pytest.raises(ConfigError, match="the nodes in the status have 4 ranks"):
        node_of_rank(status, 4)
    with pytest.raises(ConfigError, match="have 0 ranks"):
        node_of_rank(None, 0)
    for query, selected in (
        (LogQuery(), (None, 0)),
        (LogQuery(node="n4"), ("n4", 0)),
        (LogQuery(rank=1), ("n7", 2)),
        (LogQuery(node="n7", rank=1), ("n7", 2)),
    ):
        assert selected_node(status, query) == selected
    with pytest.raises(ConfigError, match="rank 1 is on node n7, not on n4"):
        selected_node(status, LogQuery(node="n4", rank=1))
