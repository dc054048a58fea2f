"""What the command understands of an ElasticJob that the API server has."""

from typing import Any

import pytest

from dlrover_py.cli.cluster import picture, read_status
from dlrover_py.cli.podlogs import node_of_rank
from dlrover_py.protocol.errors import ConfigError
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
    "wanted": 2,
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
        (job(), "Created", "no operator has looked at it"),
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
    seen = picture(obj, (), (), where="there")
    assert seen.phase == phase
    assert reason in seen.reason


def test_a_status_of_another_version_is_no_status() -> None:
    assert read_status(job(training={"phase": "Dancing"})) is None
    assert read_status(job(training=MASTER | {"news": 1})) is not None


def test_the_node_of_a_rank() -> None:
    status = read_status(job(training=MASTER))
    assert [node_of_rank(status, rank) for rank in (0, 1, 2)] == [("n7", 2), ("n7", 2), ("n4", 2)]
    with pytest.raises(ConfigError, match="shows the nodes of 4 ranks"):
        node_of_rank(status, 4)
    with pytest.raises(ConfigError, match="of 0 ranks"):
        node_of_rank(None, 0)
