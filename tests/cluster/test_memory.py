"""A container that needs more than its memory limit, on a real kernel."""

import pytest

from tests.cluster.jobs import Watched, document, submit
from tests.programs import PROGRAMS, source

pytestmark = pytest.mark.timeout(600)
MIB = 1 << 20


def test_nodes_that_are_killed_for_lack_of_memory_get_more_and_nothing_is_charged(
    there: Watched, agent_image: str
) -> None:
    script = source(PROGRAMS / "report_and_allocate.py")
    command = ["elastic-run", "--no-python", "python3", "-c", script, "300"]
    doc = document(
        "job",
        agent_image,
        command,
        restartCount=0,
        memoryGrowth={"limit": "700Mi", "factor": 2},
    )
    (main,) = doc["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    main["resources"] = {"limits": {"memory": "256Mi"}, "requests": {"memory": "64Mi"}}
    job = submit(there.cluster, there, doc)
    job.until(
        lambda: (s := job.seen) is not None and s.progress is not None and s.progress.step > 20,
        "both nodes have enough memory",
    )
    limits = {
        pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
        for pod in job.pods.values()
        if pod["status"]["phase"] == "Running"
    }
    assert limits == {str(512 * MIB)}
    training = job.training
    assert "MemoryRaised" in {event.reason for event in training.events}
    assert {node.relaunches for node in training.nodes if node.phase.value == "live"} == {0}

    def known() -> bool:
        """Say whether the status has what the nodes use; they measure it every ten seconds."""
        found = [n for n in job.training.nodes if n.phase.value == "live"]
        return all(300 * MIB < n.memory_bytes < n.memory_limit == 512 * MIB for n in found)

    job.until(known, "it is known how much memory the nodes use")
