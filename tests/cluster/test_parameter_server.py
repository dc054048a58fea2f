"""Servers of a parameter server as Pods: some are lost, their number changes, and no push is."""

import base64
import gzip
import os
import re
import signal
from pathlib import Path

import msgspec
import pytest

from dlrover_py.protocol.names import ROLE_MASTER, servers_of
from dlrover_py.ps.cluster_map import ClusterMap
from tests.cluster.harness import Obj, inside
from tests.cluster.jobs import Job, Watched, document, submit
from tests.programs import PROGRAMS, source

pytestmark = pytest.mark.timeout(900)


def ps_document(image: str, program: str = "count_on_ps.py", *args: str) -> Obj:
    """Return a job with two servers, and two workers that count on them."""
    command = ["python3", "-c", source(PROGRAMS / program), "0.05", *args]
    doc = document(
        "job",
        image,
        ["elastic-run", "--no-python", *command],
        spec={"distributionStrategy": "ParameterServerStrategy"},
    )
    main = {"name": "main", "image": image, "command": ["dlrover", "ps", "server"]}
    doc["spec"]["replicaSpecs"]["ps"] = {
        "replicas": 2,
        "template": {"spec": {"containers": [main]}},
    }
    return doc


def servers(job: Job) -> set[str]:
    """Return the servers that run and do not leave."""
    known = job.seen.servers if job.seen is not None else []
    return {one.id for one in known if one.running and not one.message}


def stored_map(job: Job) -> ClusterMap:
    """Return the map in the job's Secret; an empty one if there is none yet."""
    secret = job.cluster.get("secret", servers_of(job.name), job.namespace) or {}
    packed = (secret.get("data") or {}).get("map.json.gz")
    if packed is None:
        return ClusterMap(job.name)
    return msgspec.json.decode(gzip.decompress(base64.b64decode(packed)), type=ClusterMap)


def is_whole(job: Job, names: set[str]) -> bool:
    """Return whether these servers run, and no others, and each row has two copies on them."""
    known = stored_map(job)
    if servers(job) != names or not known.placements:
        return False
    return known.servers.keys() == names and all(
        not one.learner and len(one.members) == 2 and set(one.members) <= names
        for one in known.placements
    )


def moves_on(job: Job) -> None:
    """Wait until a step follows that begins after this call."""
    before = job.training.progress
    last = before.step if before is not None else 0
    job.until(
        lambda: (now := job.training.progress) is not None and now.step > last + 2, "more steps"
    )


def whole(job: Job, *names: str) -> None:
    """Wait until these servers, and no others, have two copies of each row."""
    job.until(lambda: is_whole(job, set(names)), f"two copies of each row on {names}")


def test_server_pods_are_lost_and_their_number_changes_and_no_push_is_lost(
    there: Watched, agent_image: str
) -> None:
    job = submit(there.cluster, there, ps_document(agent_image))
    whole(job, "ps0", "ps1")
    hosts = {there.all("Pod")[f"job-{name}"]["spec"]["nodeName"] for name in ("ps0", "ps1")}
    assert len(hosts) == 2, "the copies of a row are on different hosts"
    moves_on(job)

    there.cluster.kill("job-ps0", there.namespace, "ps server")
    whole(job, "ps1", "ps2")
    moves_on(job)

    # The next master goes on with the map. It takes no server for dead that comes a little later.
    before = stored_map(job).placements
    master = f"elasticjob.dlrover/replica-type={ROLE_MASTER}"
    job.kubectl("delete", "pod", "-l", master, "--wait=false")
    job.until(lambda: job.training.term == 2, "the next master")
    moves_on(job)
    assert stored_map(job).placements == before, "no bucket got a new term, or another copy"

    # A server whose Pod is deleted gives its rows away first.
    job.kubectl("delete", "pod", "job-ps1", "--wait=false")
    whole(job, "ps2", "ps3")
    moves_on(job)

    job.patch({"replicaSpecs": {"ps": {"replicas": 3}}})
    whole(job, "ps2", "ps3", "ps4")
    moves_on(job)
    job.patch({"replicaSpecs": {"ps": {"replicas": 2}}})
    whole(job, "ps2", "ps3")
    moves_on(job)

    lost = [one.node for one in job.training.events if one.reason == "NodeLost"]
    assert lost == ["ps0"]
    assert job.training.round == 1
    counts_are_right(job)
    job.until(lambda: not servers(job), "the servers end after the workers")


def counts_are_right(job: Job) -> None:
    """Let the workers end, and compare the rows with their steps."""
    for node in ("n0", "n1"):
        for pid in job.workers(node):
            inside(pid, "/tmp/enough").touch()
    job.ends("Succeeded")
    found = {}
    for node in ("n0", "n1"):
        said = re.search(r"counted (\d) (\d+) (\d+) (\d+)", job.kubectl("logs", f"job-{node}"))
        assert said is not None
        rank, step, wrong, total = map(int, said.groups())
        found[rank] = (step, wrong, total)
    assert found.keys() == {0, 1}
    assert [wrong for _, wrong, _ in found.values()] == [0, 0]
    assert max(total for *_, total in found.values()) == sum(step for step, *_ in found.values())


def saved(job: Job, after: int) -> int:
    """Wait until the newest cut is of a later step than this one, and return its step."""

    def newest() -> int:
        source = stored_map(job).source
        return 0 if source is None or source.step <= after else source.step

    return job.until(newest, f"a cut after step {after}")


def test_all_servers_die_and_the_last_cut_comes_back(
    there: Watched, agent_image: str, tmp_path: Path
) -> None:
    doc = ps_document(agent_image, "count_with_cuts.py", "40")
    role = doc["spec"]["replicaSpecs"]["ps"]
    role["checkpoints"] = "/cuts/tables"
    tmp_path.chmod(0o777)
    pod = role["template"]["spec"]
    pod["volumes"] = [{"name": "x", "hostPath": {"path": str(tmp_path), "type": "Directory"}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "x", "mountPath": "/cuts"}]
    job = submit(there.cluster, there, doc)
    whole(job, "ps0", "ps1")
    step = saved(job, 0)
    # All at once: a server that is killed later may have given its rows to a new one.
    for pid in [
        pid
        for server in ("job-ps0", "job-ps1")
        for pid, said in there.cluster.processes(server, there.namespace).items()
        if "ps server" in said
    ]:
        os.kill(pid, signal.SIGKILL)
    whole(job, "ps2", "ps3")
    step = saved(job, step)
    events = {one.reason: one.message for one in job.training.events}
    assert "the rows of" in events["TablesAtRisk"]
    assert re.search(r"back to the cut of step \d+", events["TablesRestored"])

    # The next master writes there at once.
    master = f"elasticjob.dlrover/replica-type={ROLE_MASTER}"
    job.kubectl("delete", "pod", "-l", master, "--wait=false")
    job.until(lambda: job.training.term == 2, "the next master")
    saved(job, saved(job, step))
    begun = [job.kubectl("logs", f"job-{node}") for node in ("n0", "n1")]
    assert all(re.search(r"begins at \d [1-9]", log) for log in begun)
    counts_are_right(job)
    # The newest three stay, and the one that the training went back to first.
    assert len(list((tmp_path / "tables").glob("step-*.json"))) <= 4


def test_no_server_stays_when_its_job_is_deleted(there: Watched, agent_image: str) -> None:
    job = submit(there.cluster, there, ps_document(agent_image))
    whole(job, "ps0", "ps1")
    job.kubectl("delete", "elasticjob", "job", "--wait=false")
    # Nobody takes their rows. They have 600 s, and do not use them.
    there.until(lambda: not there.all("Pod"), "there is no Pod any more", within_s=150)
