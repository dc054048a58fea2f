"""The operator tells jobs of hosts that fail in several jobs; the test plays the masters.

tests/unit/test_bad_hosts.py has what is decided.
"""

import asyncio
import json
import time
from functools import partial

import pytest

from dlrover_operator.timing import OperatorTiming
from dlrover_py.kubernetes.kinds import ELASTICJOBS, Obj
from dlrover_py.protocol.status import rfc3339
from tests.builders import job_file
from tests.fakes_kube import FakeCluster
from tests.process import test_operator
from tests.process.harness import BIN, Place
from tests.process.test_cli_cluster import training
from tests.process.test_operator import Bed, operator, until

pytestmark = pytest.mark.process
bed = test_operator.bed
SOON = OperatorTiming(hosts_after_s=0.02)


def bad_hosts(cluster: FakeCluster, name: str) -> Obj | None:
    held = cluster.one(ELASTICJOBS, name)
    assert held is not None
    found = (held.get("status") or {}).get("badHosts")
    assert found is None or isinstance(found, dict)
    return found


def put(cluster: FakeCluster, name: str, *hosts: str, at: str) -> None:
    """Play a master that has noted a failed device on each of these hosts."""
    document = cluster.one(ELASTICJOBS, name) or job_file(2)
    document["metadata"] |= {"name": name, "namespace": "default"}
    document.setdefault("status", {})["training"] = {
        "phase": "Running",
        "desired": 2,
        "generation": 1,
        "hostFaults": [{"host": host, "at": at, "kind": "hardware"} for host in hosts],
        "nodes": [{"phase": "Running", "host": f"h{i}"} for i in range(20)],
    }
    cluster.put(ELASTICJOBS, document)


async def test_all_jobs_are_told_of_a_host_that_failed_two(bed: Bed) -> None:
    cluster, kube = bed
    await kube.list(ELASTICJOBS)  # from now on the client knows the time of the server
    now = rfc3339(kube.wall())
    put(cluster, "c", at=now)
    put(cluster, "a", "h1", at=now)
    async with operator(kube, timing=SOON, bad_hosts="act") as one:
        await until(lambda: one.rests, "rest")
        assert bad_hosts(cluster, "a") is None
        put(cluster, "b", "h1", "h2", at=now)
        for name in "abc":
            found = await until(partial(bad_hosts, cluster, name), "a bad host")
            assert (found["hosts"], found["avoid"]) == (["h1"], ["h1"])
            assert "h1 (2 hardware in 2 jobs)" in found["reason"]
    async with operator(kube, timing=SOON, bad_hosts="off"):
        await until(lambda: bad_hosts(cluster, "c") is None, "the end of it")


async def test_the_failed_hosts_are_shown(place: Place) -> None:
    async with FakeCluster() as cluster:
        now = rfc3339(time.time())
        for name, at in (("a", now), ("b", now)):
            fault = {"host": "h1", "at": at, "kind": "hardware"}
            document = job_file(2)
            document["metadata"] = {"name": name, "namespace": "default"}
            document["status"] = {
                "training": training(hostFaults=[fault]),
                "badHosts": {"hosts": ["h1"], "avoid": ["h1"]},
            }
            cluster.put(ELASTICJOBS, document)
        env = place.env | {"KUBECONFIG": str(cluster.kubeconfig(place.folder / "kubeconfig"))}

        async def shown(*flags: str) -> str:
            process = await asyncio.create_subprocess_exec(
                str(BIN / "dlrover"),
                "cluster",
                "hosts",
                *flags,
                env=env,
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await process.communicate()
            assert process.returncode == 0
            return out.decode()

        (line,) = (await shown()).splitlines()
        assert line.split()[0] == "h1"
        assert line.endswith("2 hardware in 2 jobs  bad for default; avoided for default")
        for flags, score in (((), 2.0), (("-n", "other"), 1.0)):
            (row,) = json.loads(await shown("--json", *flags))
            assert (row["host"], row["jobs"]) == ("h1", 2)
            assert (row["badFor"], row["avoidedFor"]) == (["default"], ["default"])
            assert row["score"] == pytest.approx(score, abs=0.1), "jobs of others count as one"
