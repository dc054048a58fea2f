"""A real Prometheus reads a real master and a real operator, with the chart's alerts."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from dlrover_py.kubernetes.kinds import ELASTICJOBS, NAMESPACES
from tests.builders import job_file
from tests.fakes_kube import fake_cluster
from tests.process.harness import CALM, Place, eventually, free_port, job
from tests.programs import PROGRAMS
from tests.prometheus import FILES, Prometheus, program, prometheus
from tests.unit.test_docs import named

LABELS = {"namespace": "team", "elasticjob_dlrover_name": "job"}
ABSENT = {
    "dlrover_problem",
    "dlrover_certificate_expiry_timestamp_seconds",
    "dlrover_checkpoint_step",
    "dlrover_checkpoint_age_seconds",
    "dlrover_checkpoint_stored_step",
    "dlrover_checkpoint_stored_age_seconds",
    "dlrover_checkpoint_unstored_seconds",
}
"""Metrics that a job without problems, TLS and checkpoints does not have."""
PARTS = ("dlrover_ps_", "dlrover_gpu_")
"""How the names of metrics begin that a job without a parameter server and GPUs does not have."""


@pytest.fixture(autouse=True)
def _there() -> None:
    program("prometheus")


def queries(prefix: str) -> list[str]:
    """The queries of the chart's dashboard about metrics with a prefix."""
    board = json.loads((FILES / "dashboard.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [re.sub(r"\$(namespace|job)", ".*", one) for one in found if prefix in one]


def alerts(server: Prometheus) -> dict[str, str]:
    """The health of each alert, by its name, once all were evaluated."""

    def seen() -> dict[str, str] | None:
        groups = server.api("rules")["groups"]
        found = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        return None if "unknown" in found.values() else found

    return eventually(seen, "all alerts evaluated")


def test_a_prometheus_sees_the_documented_series_of_a_job(place: Place, tmp_path: Path) -> None:
    script, args = PROGRAMS / "report_steps.py", ("1000000", "0.1")
    with job(place, script=script, args=args, replicas=2, settings=CALM) as run:
        first = run.running(2)
        pid = next(node.pids[0] for node in first.nodes if node.id == "n1")
        os.kill(pid, signal.SIGKILL)  # there is a ceiling of goodput then
        run.until(lambda s: s.round > 1 and s.progress is not None, "a step after a failure")
        address, port = run.snapshot().health_addr, free_port()
        with prometheus(tmp_path, port, address, LABELS) as server:
            eventually(server.ready, "a Prometheus that answers")
            wanted = named("Metrics of the master", "metric") - ABSENT
            wanted = {name for name in wanted if not name.startswith(PARTS)}
            eventually(lambda: server.names() == wanted, "exactly the metrics of docs/metrics.md")
            assert server.query('up{job="dlrover"}') == [
                ({"__name__": "up", "job": "dlrover", "instance": address} | LABELS, 1.0)
            ]
            ((labels, ready),) = server.query("dlrover_master_ready")
            assert labels.items() >= LABELS.items()
            assert ready == 1
            ((labels, _),) = server.query("dlrover_phase == 1")
            assert labels["phase"] == "Running"
            assert server.query('dlrover_new_rounds_total{cause="failure"}')[0][1] == 1
            health = alerts(server)
            rules = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
            assert health == {r["alert"]: "ok" for group in rules for r in group["rules"]}
            for expression in queries("dlrover_"):
                absent = any(name in expression for name in (*ABSENT, *PARTS))
                delta = "[1h]" in expression  # of one value there is no difference yet
                assert server.query(expression) or absent or delta, expression


@pytest.fixture
async def operator(tmp_path: Path) -> AsyncIterator[str]:
    """A running operator of one job, on an API server in memory; its address for metrics."""
    async with fake_cluster(tmp_path) as (cluster, kube):
        cluster.put(NAMESPACES, {"metadata": {"name": "default"}})
        document = job_file(3)
        document["metadata"] = {"name": "x", "namespace": "default"}
        await kube.create(ELASTICJOBS, document)
        address = f"127.0.0.1:{free_port()}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dlrover_operator", "--master-image=m:1"),
            f"--health={address}",
            env=os.environ | {"KUBECONFIG": str(tmp_path / "kubeconfig")},
        )
        try:
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), 60)


async def test_a_prometheus_sees_the_documented_series_of_the_operator(
    operator: str, tmp_path: Path
) -> None:
    folder = tmp_path / "prometheus"
    folder.mkdir()

    def look() -> None:
        with prometheus(folder, free_port(), operator, {}) as server:
            eventually(server.ready, "a Prometheus that answers")
            created = 'elasticjob_jobs{phase="Created"} == 1'
            eventually(lambda: server.query(created), "the job")
            documented = named("Metrics of the operator", "metric")
            found = {re.sub("_(bucket|sum|count)$", "", name) for name in server.names()}
            assert found - documented == set()
            assert documented - found <= {"elasticjob_watch_errors_total"}, "none has failed"
            assert set(alerts(server).values()) == {"ok"}
            for expression in queries("elasticjob_jobs") + queries("workqueue_"):
                assert server.query(expression), expression

    await asyncio.to_thread(look)
