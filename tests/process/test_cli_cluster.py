"""``dlrover job …`` against a cluster: real processes, and an API server in memory."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
import yaml

from dlrover_py.client import Jobs
from dlrover_py.kubernetes.kinds import ELASTICJOBS, EVENTS, NAMESPACES, PODS, Obj
from dlrover_py.protocol.errors import ConfigError
from tests import jsonform
from tests.builders import job_file
from tests.fakes_kube import FakeCluster
from tests.process.harness import BIN, Place, free_port

AGENT = (
    '{"at": "2026-01-01T00:00:00.000+00:00", "level": "info", "event": "round_started", '
    '"program": "elastic-run", "node": "n0"}'
)


class Terminal:
    """Where ``dlrover`` is called, with a kubeconfig of a cluster in memory."""

    def __init__(self, place: Place, cluster: FakeCluster) -> None:
        self.place, self.cluster = place, cluster
        kubeconfig = cluster.kubeconfig(place.folder / "kubeconfig")
        self.env = place.env | {"KUBECONFIG": str(kubeconfig)}

    async def start(
        self, *argv: str, of: str = "job", env: Mapping[str, str] = MappingProxyType({})
    ) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            str(BIN / "dlrover"),
            of,
            *argv,
            env={**self.env, **env},
            cwd=self.place.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )

    async def call(
        self,
        *argv: str,
        code: int = 0,
        of: str = "job",
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Run a command; return what it says: standard output, or if it fails standard error."""
        process = await self.start(*argv, of=of, env=env)
        out, err = await asyncio.wait_for(process.communicate(), 90)
        assert process.returncode == code, f"{argv}: {process.returncode}\n{out!r}\n{err.decode()}"
        assert b"Traceback (most recent call last):\n  File" not in err
        return (err if code else out).decode()

    def file(self, *documents: Obj, name: str = "job.yaml") -> str:
        (self.place.folder / name).write_text(yaml.safe_dump_all(documents))
        return name


@pytest.fixture
async def terminal(place: Place) -> AsyncIterator[Terminal]:
    async with FakeCluster() as cluster:
        cluster.put(NAMESPACES, {"metadata": {"name": "ml"}})
        yield Terminal(place, cluster)


def document(name: str = "x", replicas: int = 2, **worker: Any) -> Obj:
    made = job_file(replicas, **worker)
    made["metadata"] = {"name": name}
    for container in made["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]:
        container.setdefault("image", "i")
    return made


def training(phase: str = "Running", **fields: Any) -> Obj:
    """What a master writes."""
    return {
        "name": "x",
        "generation": 1,
        "phase": phase,
        "reason": "all 2 nodes train",
        "term": 1,
        "round": 2,
        "worldSize": 2,
        "nodesInRound": 2,
        "desired": 2,
        "minimum": 2,
        "ready": 2,
        "standby": 0,
        "startedAt": 1000.0,
        "restarts": {"loss": 1},
        "summary": {"ready": "2/2", "progress": "40% (4/10)", "restarts": 1, "goodput": "97.5%"},
        "nodes": [
            {
                "id": node,
                "phase": "live",
                "role": "member",
                "incarnation": 1,
                "nodeRank": rank,
                "host": f"host-{rank}",
            }
            for rank, node in enumerate(("n0", "n2"))
        ],
        "events": [
            event(1, "JobStarted", "the job starts"),
            event(4, "NodeLost", "node n1 was lost: its Pod was deleted"),
            event(5, "RoundFormed", "round 2 of 2 nodes", cause=4),
        ],
        **fields,
    }


def event(number: int, reason: str, message: str, **fields: Any) -> Obj:
    return {"id": number, "at": 1000.0 + number, "reason": reason, "message": message} | fields


def condition(kind: str, status: str, message: str, reason: str = "Because") -> Obj:
    at = "2026-01-01T00:00:00Z"
    told = {"type": kind, "status": status, "reason": reason, "message": message}
    return told | {"lastTransitionTime": at}


def put_job(
    cluster: FakeCluster, name: str = "x", namespace: str = "default", **status: Any
) -> Obj:
    obj = document(name, minReplicas=1, maxReplicas=4)
    obj["metadata"]["namespace"] = namespace
    return cluster.put(ELASTICJOBS, obj | {"status": status})


def put_pod(cluster: FakeCluster, job: Obj, node: str, phase: str = "Running") -> None:
    name = job["metadata"]["name"]
    state = {"Running": "running", "Pending": "waiting"}.get(phase, "terminated")
    cluster.put(
        PODS,
        {
            "metadata": {
                "name": f"{name}-{node}",
                "labels": {
                    "elasticjob.dlrover/name": name,
                    "elasticjob.dlrover/replica-type": "worker",
                },
                "ownerReferences": [{"kind": "ElasticJob", "uid": job["metadata"]["uid"]}],
            },
            "spec": {"containers": [{"name": "main", "image": "i"}], "nodeName": "host-9"},
            "status": {
                "phase": phase,
                "containerStatuses": [{"name": "main", "state": {state: {}}}],
            },
        },
    )


async def test_submit_passes_on_what_is_remarked_and_warned_of(terminal: Terminal) -> None:
    odd = document()
    container = odd["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
    container["resource"] = {"limits": {"cpu": 1}}
    terminal.cluster.warnings = ['unknown field "a"', "deprecated"]
    process = await terminal.start("submit", terminal.file(odd, document("y")))
    _, err = await asyncio.wait_for(process.communicate(), 90)
    lines = err.decode().splitlines()
    path = "spec.replicaSpecs.worker.template.spec.containers[0].resource"
    assert [line for line in lines if path in line and "did you mean resources?" in line]
    for words in terminal.cluster.warnings:
        said = f"dlrover: {terminal.cluster.url} warns: {words}"
        assert lines.count(said) == 1, "the dry run, the call and the second job say the same"
    (made, _) = (
        c for c in terminal.cluster.calls if c.method == "POST" and "dryRun" not in c.query
    )
    assert made.query["fieldValidation"] == "Strict"


async def test_submit_checks_creates_and_never_overwrites(terminal: Terminal) -> None:
    cluster = terminal.cluster
    bad = document()
    bad["spec"]["replicaSpecs"]["worker"]["replica"] = 3
    said = await terminal.call("submit", terminal.file(document("a"), bad), code=2)
    assert "spec.replicaSpecs.worker.replica: unknown field" in said
    assert cluster.all(ELASTICJOBS) == []

    good = terminal.file(document("a"), document("b"))
    assert "a would be submitted" in await terminal.call("submit", "--dry-run", good)
    assert cluster.all(ELASTICJOBS) == []
    said = await terminal.call("submit", good, "-n", "ml")
    assert f"a submitted in namespace ml of {cluster.url}" in said
    assert "dlrover job describe a -n ml" in said
    assert [j["metadata"]["name"] for j in cluster.all(ELASTICJOBS, "ml")] == ["a", "b"]

    other = terminal.file(document("a", 3), document("c"))
    said = await terminal.call("submit", other, "-n", "ml", code=2)
    assert "job a exists already in namespace ml" in said
    assert "--apply" in said
    assert cluster.one(ELASTICJOBS, "c", "ml") is None, "all or none"
    said = await terminal.call("submit", "--apply", other, "-n", "ml")
    assert "a changed" in said
    assert "c submitted" in said
    changed = cluster.one(ELASTICJOBS, "a", "ml")
    assert changed is not None
    assert changed["spec"]["replicaSpecs"]["worker"]["replicas"] == 3
    assert "a unchanged" in await terminal.call("submit", "--apply", other, "-n", "ml")

    fixed = document("a")
    fixed["metadata"]["namespace"] = "default"
    said = await terminal.call("submit", terminal.file(fixed), "-n", "ml", code=2)
    assert "its file has namespace default, and --namespace is ml" in said


async def test_submit_waits_for_the_end_and_exits_with_it(terminal: Terminal) -> None:
    cluster = terminal.cluster
    for phase, code, words in (
        ("Succeeded", 0, "x succeeded after"),
        ("Failed", 1, "x failed after"),
    ):
        process = await terminal.start("submit", terminal.file(document()), "--wait")
        assert process.stdout is not None
        assert b"submitted" in await asyncio.wait_for(process.stdout.readline(), 90)
        job = cluster.all(ELASTICJOBS)[0]
        cluster.put(ELASTICJOBS, job | {"status": {"phase": "Running", "training": training()}})
        while b"RoundFormed" not in (line := await process.stdout.readline()):
            assert line
        ended = training(phase, reason="so it ends", endedAt=1100.0)
        cluster.put(ELASTICJOBS, job | {"status": {"phase": phase, "training": ended}})
        out, err = await asyncio.wait_for(process.communicate(), 90)
        assert (process.returncode, err) == (code, b"")
        assert f"{words} 1 min 40 s: so it ends" in out.decode()
        cluster.remove(ELASTICJOBS, "x")


async def test_who_waits_no_longer_leaves_the_job_running(terminal: Terminal) -> None:
    process = await terminal.start("submit", terminal.file(document()), "--wait")
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 90)
    while not any(call.watch for call in terminal.cluster.calls):
        await asyncio.wait({asyncio.create_task(process.wait())}, timeout=0.02)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 90)
    said = f"x continues in namespace default of {terminal.cluster.url}"
    assert (process.returncode, err.decode().strip()) == (130, said)
    assert terminal.cluster.one(ELASTICJOBS, "x") is not None


async def test_a_job_that_the_operator_refuses_is_not_waited_for(terminal: Terminal) -> None:
    put_job(
        terminal.cluster,
        phase="Failed",
        conditions=[condition("Accepted", "False", "spec: not like this", "InvalidSpec")],
    )
    said = await terminal.call("describe", "x")
    assert said.splitlines()[0] == "problem   not Accepted: spec: not like this"


async def test_the_table_of_jobs_and_its_changes(terminal: Terminal) -> None:
    cluster = terminal.cluster
    for flags in [(), ("-A",)]:
        process = await terminal.start("get", "missing", "--watch", *flags)
        _, err = await asyncio.wait_for(process.communicate(), 90)
        assert (process.returncode, b"missing" in err) == (2, True)
    assert await terminal.call("get") == ""
    put_job(cluster, phase="Running", training=training())
    put_job(cluster, "y", "ml")
    (head, row) = (await terminal.call("get")).splitlines()
    columns = "NAME PHASE REASON READY ROUND PROGRESS RESTARTS GOODPUT AGE"
    assert head.split() == columns.split()
    assert row.split()[:-1] == ["x", "Running", "2/2", "2", "40%", "(4/10)", "1", "97.5%"]
    everywhere = (await terminal.call("get", "-A")).splitlines()
    assert [line.split()[:2] for line in everywhere[1:]] == [["default", "x"], ["ml", "y"]]
    for more in ((), ("--json",)):
        said = await terminal.call("get", "nosuch", "-A", *more, code=2)
        assert f"job nosuch is in no namespace of {cluster.url}" in said
        assert "start one" not in said
    (one,) = json.loads(await terminal.call("get", "x", "--json"))
    assert (one["phase"], one["status"]["round"]) == ("Running", 2)

    process = await terminal.start("get", "-w")
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(2)]
    assert b"Running" in lines[1]
    put_job(cluster, phase="Succeeded", training=training())
    assert b"Succeeded" in await asyncio.wait_for(process.stdout.readline(), 90)
    cluster.remove(ELASTICJOBS, "x")
    assert b"Deleted" in await asyncio.wait_for(process.stdout.readline(), 90)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 130
    assert b"Traceback" not in err


async def test_describe_why_and_events_put_trouble_first(terminal: Terminal) -> None:
    cluster = terminal.cluster
    failure = {
        "at": 1004.0,
        "node": "n1",
        "round": 1,
        "worker": {
            "kind": "exception",
            "localRank": 0,
            "rank": 1,
            "pid": 7,
            "exitCode": 1,
            "message": "ValueError: no",
            "traceback": "File train.py, line 3",
            "ranS": 5.0,
        },
    }
    job = put_job(
        cluster,
        phase="Running",
        training=training(lastFailure=failure),
        conditions=[
            condition("MasterReady", "True", "the master serves its nodes"),
            condition("Unschedulable", "True", "n3: 0/3 nodes are available"),
        ],
    )
    put_pod(cluster, job, "n0")
    put_pod(cluster, job, "n7", "Pending")
    about = {"kind": "ElasticJob", "name": "x", "uid": job["metadata"]["uid"]}
    for name, component, reason in (
        ("x.12345678.2", "dlrover-master", "Older"),
        ("x.12345678.4", "dlrover-master", "NodeLost"),
        ("x.abc", "dlrover-operator", "MasterCreated"),
    ):
        cluster.put(
            EVENTS,
            {
                "metadata": {"name": name},
                "involvedObject": about,
                "source": {"component": component},
                "reason": reason,
                "message": "m",
                "lastTimestamp": "1970-01-01T00:16:42Z",
            },
        )
    said = await terminal.call("describe", "x")
    lines = said.splitlines()
    assert lines[0] == "problem   Unschedulable: n3: 0/3 nodes are available"
    for words in ("2 nodes (min 1, max 4", f"in namespace default of {cluster.url}", "round 2"):
        assert words in said
    assert any(line.startswith("n0") and "x-n0 Running on host-9" in line for line in lines)
    assert any(line.startswith("n7") and "x-n7 Pending" in line for line in lines)
    assert "File train.py, line 3" in said
    told = [line.split()[1] for line in (await terminal.call("events", "x")).splitlines()]
    assert told == ["JobStarted:", "MasterCreated:", "Older:", "NodeLost:", "RoundFormed:"]
    why = await terminal.call("why")  # the only job
    assert "x is Running: all 2 nodes train" in why
    assert why.index("Unschedulable") < why.index("node n1 was lost") < why.index("round 2 of 2")
    assert "MasterCreated" not in why
    described = json.loads(await terminal.call("describe", "x", "--json"))
    assert described["status"]["round"] == 2
    (got,) = json.loads(await terminal.call("get", "x", "--json"))
    told_as_json = (await terminal.call("events", "x", "--json")).splitlines()
    found = [described, got, json.loads(await terminal.call("why", "--json"))]
    found += map(json.loads, told_as_json)
    assert len(told_as_json) == len(told)
    assert {"at", "last_transition_time", "started_at"} <= jsonform.keys(found)
    assert jsonform.faults(found) == set()
    assert described["job"]["metadata"]["uid"] == job["metadata"]["uid"]


async def test_logs_of_pods(terminal: Terminal) -> None:
    cluster = terminal.cluster
    job = put_job(cluster, phase="Running", training=training())
    for node, phase in (("n0", "Running"), ("n1", "Failed"), ("n2", "Running")):
        put_pod(cluster, job, node, phase)
        cluster.logs["default", f"x-{node}"] = f"hello from {node}\n{AGENT}\n"
    assert await terminal.call("logs") == "[n0] hello from n0\n[n2] hello from n2\n"
    assert await terminal.call("logs", "x", "--node", "n1") == "hello from n1\n"
    assert await terminal.call("logs", "--rank", "1") == "hello from n2\n"
    assert "[n1] hello" in await terminal.call("logs", "--previous")
    assert await terminal.call("logs", "--agents", "--node", "n0") == f"{AGENT}\n"
    assert "node n9 has no Pod; nodes with a Pod: n0, n1, n2" in await terminal.call(
        "logs", "--node", "n9", code=2
    )
    assert "does not separate rounds" in await terminal.call("logs", "--round", "1", code=2)


async def test_a_program_reads_and_changes_a_job_of_a_cluster(terminal: Terminal) -> None:
    cluster = terminal.cluster
    job = put_job(cluster, phase="Running", training=training())
    for node in ("n0", "n1", "n2"):
        put_pod(cluster, job, node, "Running")
        lines = "".join(f"{node} step {step}\n" for step in range(300))
        cluster.logs["default", f"x-{node}"] = f"{lines}{AGENT}\n"

    def program() -> None:
        jobs = Jobs(namespace="default", kubeconfig=terminal.env["KUBECONFIG"])
        assert [(row.name, row.phase) for row in jobs.list()] == [("x", "Running")]
        found = jobs.get()
        assert (found.name, found.phase()) == ("x", "Running")
        said = found.logs("n1")
        assert said[-1] == "[n1] n1 step 299", "the agent's own lines are left out"
        assert len(said) < 300, "the newest are enough"
        assert found.logs(rank=1)[-1] == "[n2] n2 step 299"
        with pytest.raises(TimeoutError, match="x is Running after 0 s"):
            found.wait(timeout_s=0)
        assert found.suspend() == "x is suspended"
        with pytest.raises(ConfigError, match="kubectl drain"):
            found.drain("n0")

    await asyncio.to_thread(program)
    changed = cluster.one(ELASTICJOBS, "x")
    assert changed is not None
    assert changed["spec"]["suspend"] is True


async def test_logs_are_followed_over_a_broken_line_to_the_end_of_the_job(
    terminal: Terminal,
) -> None:
    cluster = terminal.cluster
    job = put_job(cluster, phase="Running", training=training())
    put_pod(cluster, job, "n0")
    cluster.logs["default", "x-n0"] = "one\n"
    process = await terminal.start("logs", "-f")
    assert process.stdout is not None

    async def line() -> str:
        assert process.stdout is not None
        return (await asyncio.wait_for(process.stdout.readline(), 90)).decode()

    assert await line() == "[n0] one\n"
    put_pod(cluster, job, "n3", "Pending")
    cluster.logs["default", "x-n3"] = "late\n"
    put_pod(cluster, job, "n3")
    assert await line() == "[n3] late\n"
    cluster.cut()
    cluster.logs["default", "x-n0"] += "two\n"
    assert await line() == "[n0] two\n", "each line once"
    cluster.logs["default", "x-n0"] += "last, without an end"
    for node in ("n0", "n3"):
        put_pod(cluster, job, node, "Succeeded")
    put_job(cluster, phase="Succeeded", training=training("Succeeded"))
    out, err = await asyncio.wait_for(process.communicate(), 90)
    assert out.decode() == "[n0] last, without an end\n"
    assert process.returncode == 0, err


@pytest.mark.parametrize("phase", ["Running", "Succeeded"])
async def test_logs_that_may_not_be_read_are_an_error_when_followed(
    terminal: Terminal, phase: str
) -> None:
    cluster = terminal.cluster
    job = put_job(cluster, phase=phase, training=training(phase))
    for node in ("n0", "n1"):
        put_pod(cluster, job, node, phase)
    words = 'pods "x" is forbidden: User "u" cannot get resource "pods/log"'
    cluster.fail(403, "Forbidden", words, times=1000, path="/log")
    said = await terminal.call("logs", "-f", code=2)
    assert words in said
    assert "never retrieved" not in said


async def test_the_servers_of_a_job_are_scaled_by_their_role(terminal: Terminal) -> None:
    cluster = terminal.cluster
    job = put_job(cluster, phase="Running", training=training())
    said = await terminal.call("scale", "3", "--role", "ps", "--job", "x", code=2)
    assert "x has no role ps" in said
    main = {"name": "main", "image": "i", "command": ["dlrover", "ps", "server"]}
    servers = {"replicas": 2, "replication": 2, "template": {"spec": {"containers": [main]}}}
    job["spec"]["replicaSpecs"]["ps"] = servers
    workers = job["spec"]["replicaSpecs"]["worker"]
    cluster.put(ELASTICJOBS, job)
    said = await terminal.call("scale", "3", "--role", "ps", "--job", "x")
    assert said == "x is scaled to 3 servers\n"
    found = cluster.one(ELASTICJOBS, "x")
    assert found is not None
    assert found["spec"]["replicaSpecs"] == {"worker": workers, "ps": servers | {"replicas": 3}}
    said = await terminal.call("scale", "1", "--role", "ps", "--job", "x", code=2)
    assert "cannot scale to 1: replication is 2" in said
    said = await terminal.call("suspend", "x", code=2)
    assert "x cannot be suspended: its servers have all rows in memory" in said
    assert await terminal.call("resume", "x") == "x is resumed\n"


def put_servers(cluster: FakeCluster, *servers: str, **tables: Any) -> Obj:
    """Put a job whose servers have four buckets, all of them led by the first one."""
    obj = cluster.one(ELASTICJOBS, "x") or put_job(cluster)
    main = {"name": "main", "image": "i", "command": ["dlrover", "ps", "server"]}
    role = {"replicas": 2, "template": {"spec": {"containers": [main]}}}
    obj["spec"]["replicaSpecs"]["ps"] = role
    loads: list[Obj] = [{"id": one, "leads": 0, "backsUp": 0} for one in servers]
    loads[0] |= {"leads": 4, "leading": [0, 1, 2, 3], "askedPerS": 800.0}
    loads[-1] |= {"backsUp": 4, "backing": [0, 1, 2, 3]} if len(loads) > 1 else {}
    seen = {"epoch": 9, "tables": ["t"], "buckets": 4, "servers": loads}
    seen |= {"bucketRowsPerS": [200.0] * 4, **tables}
    obj["status"] = {"phase": "Running", "training": training(tables=seen)}
    return cluster.put(ELASTICJOBS, obj)


async def test_servers_are_evened_by_a_request_in_the_spec(terminal: Terminal) -> None:
    cluster = terminal.cluster
    put_servers(cluster, "ps0", "ps1")
    found = json.loads(await terminal.call("map", "x", "--json", of="ps"))
    assert (found["busiest"], found["placements"][3]["primary"]) == (2.0, "ps0")
    assert found["placements"][3]["backups"] == ["ps1"]
    said = await terminal.call("rebalance", "x", "--dry-run", of="ps")
    assert "2 buckets would move" in said
    process = await terminal.start("rebalance", "x", of="ps")
    async with asyncio.timeout(60):
        while (at := (cluster.one(ELASTICJOBS, "x") or {})["spec"].get("rebalanceServers")) is None:
            await asyncio.sleep(0.05)
    put_servers(cluster, "ps0", "ps1", rebalanced={"request": "another", "words": "old"})
    put_servers(cluster, "ps0", "ps1", rebalanced={"request": at, "words": "2 buckets move"})
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (0, b"x: 2 buckets move\n")


async def test_a_drained_server_is_a_pod_that_is_deleted(terminal: Terminal) -> None:
    cluster = terminal.cluster
    job = put_servers(cluster, "ps0", "ps1")
    said = await terminal.call("drain", "ps7", "--job", "x", of="ps", code=2)
    assert "x has no server ps7: expected one of ps0, ps1" in said
    stranger = {"metadata": {"name": "y", "uid": "of-another-job"}}
    put_pod(cluster, stranger, "ps1")
    pod = cluster.one(PODS, "y-ps1")
    assert pod is not None
    cluster.put(PODS, pod | {"metadata": pod["metadata"] | {"name": "x-ps1"}})
    said = await terminal.call("drain", "ps1", "--job", "x", of="ps", code=2)
    assert "x has no Pod x-ps1" in said
    put_pod(cluster, job, "ps1")
    process = await terminal.start("drain", "ps1", "--job", "x", of="ps")
    async with asyncio.timeout(60):
        while (left := cluster.one(PODS, "x-ps1")) and "deletionTimestamp" not in left["metadata"]:
            await asyncio.sleep(0.05)
    (call,) = [one for one in cluster.calls if one.method == "DELETE"]
    assert call.path.endswith("/pods/x-ps1"), "it has the grace of its own"
    put_servers(cluster, "ps0")
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (0, b"x: ps1 has left\n")


async def test_pages_show_and_change_a_job_of_a_cluster(terminal: Terminal) -> None:
    cluster = terminal.cluster
    job = put_job(cluster, phase="Running", training=training() | {"leftOut": 7})
    put_pod(cluster, job, "n0", "Running")
    cluster.logs["default", "x-n0"] = "n0 step 1\n"

    def look(link: str) -> None:
        browser, base = build_opener(HTTPCookieProcessor()), link.partition("/enter")[0]
        page = browser.open(link).read().decode()
        assert "7 nodes are not in the status" in page, "they would seem to be gone"
        with browser.open(f"{base}/jobs/x/nodes/n0/log", timeout=60) as stream:
            assert any(b"n0 step 1" in line for line in stream)
        (csrf,) = set(re.findall(r'name="csrf" value="([^"]+)"', page))
        form = urlencode({"csrf": csrf, "value": "3"}).encode()
        said = browser.open(f"{base}/jobs/x/actions/scale", form).read().decode()
        assert "x is scaled to 3 nodes" in said

    process = await terminal.start("x", "-n", "default", of="dashboard")
    assert process.stdout is not None
    link = (await process.stdout.readline()).decode().split()[-1]
    await asyncio.to_thread(look, link)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 30) == 0
    changed = cluster.one(ELASTICJOBS, "x")
    assert changed is not None
    assert changed["spec"]["replicaSpecs"]["worker"]["replicas"] == 3


async def test_scale_suspend_resume(terminal: Terminal) -> None:
    cluster = terminal.cluster
    put_job(cluster, phase="Running", training=training())

    def spec() -> Obj:
        obj = cluster.one(ELASTICJOBS, "x")
        assert obj is not None
        found: Obj = obj["spec"]
        return found

    assert await terminal.call("scale", "4", "--job", "x") == "x is scaled to 4 nodes\n"
    assert spec()["replicaSpecs"]["worker"]["replicas"] == 4
    assert any(c.path.endswith("/x/scale") and c.method == "PATCH" for c in cluster.calls)
    said = await terminal.call("scale", "5", "--job", "x", code=2)
    assert "cannot scale to 5: replicas is 5 and maxReplicas is 4" in said
    cluster.fail(422, "Invalid", "replicas: the server's own words", path="/scale")
    assert "the server's own words" in await terminal.call("scale", "3", "--job", "x", code=2)
    assert await terminal.call("suspend", "x") == "x is suspended\n"
    assert spec()["suspend"] is True
    assert await terminal.call("resume", "x", "-n", "default") == "x is resumed\n"
    assert spec()["suspend"] is False
    assert "no job runs on this machine" in await terminal.call("suspend", code=2)
    assert "the name of the job is missing" in await terminal.call(
        "suspend", "-n", "default", code=2
    )
    assert "dlrover job delete" in await terminal.call("stop", "x", code=2)


async def test_restart_is_a_wish_in_the_spec(terminal: Terminal) -> None:
    put_job(terminal.cluster, phase="Running", training=training(updated=0))

    def wish() -> Obj:
        obj = terminal.cluster.one(ELASTICJOBS, "x")
        assert obj is not None
        found: Obj = obj["spec"]["restart"]
        return found

    said = "2 nodes are from an older template: `dlrover job restart` replaces all nodes"
    assert said in await terminal.call("describe", "x")
    assert await terminal.call("restart", "x", "--rolling") == "all nodes of x are being replaced\n"
    first = wish()
    assert first["rolling"] is True
    await terminal.call("restart", "x")
    assert wish()["rolling"] is False
    assert wish()["at"] > first["at"], "it is another wish"
    put_job(terminal.cluster, "y", phase="Failed", training=training("Failed"))
    assert "it cannot be restarted" in await terminal.call("restart", "y", code=2)


async def test_delete_asks_and_waits(terminal: Terminal) -> None:
    cluster = terminal.cluster
    put_pod(cluster, put_job(cluster), "n0")
    assert "confirm with --yes" in await terminal.call("delete", "x", code=2)
    assert cluster.one(ELASTICJOBS, "x") is not None
    process = await terminal.start("delete", "x", "--yes", "--wait")
    assert process.stderr is not None
    async with asyncio.timeout(90):
        while not any(c.watch and "/pods" in c.path for c in cluster.calls):
            await asyncio.wait({asyncio.create_task(process.wait())}, timeout=0.02)
    assert process.returncode is None, "its Pod is still there"
    cluster.remove(PODS, "x-n0")
    out, _ = await asyncio.wait_for(process.communicate(), 90)
    assert (await process.wait(), out) == (0, b"x is deleted\n")
    assert cluster.one(ELASTICJOBS, "x") is None
    (call,) = [c for c in cluster.calls if c.method == "DELETE"]
    assert call.body["propagationPolicy"] == "Background"


async def test_what_cannot_be_done_is_one_sentence_each(terminal: Terminal, tmp_path: Path) -> None:
    cluster = terminal.cluster
    said = await terminal.call("describe", "nosuch", code=2)
    here, there = said.splitlines()
    assert here.startswith("dlrover: job nosuch is not known on this machine")
    assert there.startswith(f"dlrover: job nosuch is not in namespace default of {cluster.url}")
    said = await terminal.call("get", "--kubeconfig", str(tmp_path / "none"), code=2)
    assert said.startswith("dlrover: no cluster: kubeconfig")
    assert len(said.splitlines()) == 1
    for status, reason, words, code in (
        (401, "Unauthorized", "refuses your credentials", 2),
        (403, "Forbidden", "denies you access: made to fail", 2),
        (503, "ServiceUnavailable", "the cluster does not answer", 4),
    ):
        fault = cluster.fail(status, reason, times=9)
        assert words in await terminal.call("get", "-w", code=code)
        fault.times = 0
    cluster.fail(404, "", "404 page not found")
    assert "has no resource type ElasticJob: install DLRover" in await terminal.call(
        "why", "x", code=2
    )
    await cluster.stop()
    assert "the cluster does not answer" in await terminal.call("get", code=4)
    await cluster.start()


async def test_a_job_that_runs_here_comes_first(terminal: Terminal) -> None:
    run = terminal.place.folder / "run" / "x"
    run.mkdir(parents=True)
    run.parent.chmod(0o700)
    put_job(terminal.cluster, phase="Running", training=training())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'{"message": "x of this machine"}'
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, run / "cluster.sock")
    async with server:
        assert await terminal.call("suspend", "x") == "x of this machine\n"
        assert await terminal.call("suspend", "x", "-n", "default") == "x is suspended\n"
        assert "end it with `dlrover job stop x`" in await terminal.call("delete", "x", code=2)
    os.unlink(run / "cluster.sock")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (["job", "describe", "x"], ["x", "xy"]),
        (["job", "delete", ""], ["x", "xy"]),
        (["job", "get", "-n", "ml", ""], ["z"]),
        (["job", "logs", "x", "--node", ""], ["n0", "n2"]),
    ],
)
async def test_the_shell_completes_names(
    terminal: Terminal, line: list[str], names: list[str]
) -> None:
    put_job(terminal.cluster, "x", training=training())
    put_job(terminal.cluster, "xy")
    put_job(terminal.cluster, "z", "ml")
    words = {"COMP_WORDS": " ".join(["dlrover", *line]), "COMP_CWORD": str(len(line))}
    terminal.env |= {"_DLROVER_COMPLETE": "bash_complete"} | words
    said = ""
    for _ in range(10):  # on a busy machine, the cluster may not answer in time: press Tab again
        said = said.strip() or await terminal.call()
    assert said.splitlines() == [f"plain,{name}" for name in names]


OPERATOR_POD: Obj = {
    "metadata": {
        "name": "op",
        "namespace": "ml",
        "labels": {"app.kubernetes.io/name": "dlrover-operator"},
    },
    "spec": {"containers": [{"name": "o", "image": "op", "args": ["--dashboard-port=8090"]}]},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}


def kubectl_that(does: str, folder: Path) -> dict[str, str]:
    """A program in place of kubectl. The real one is run in tests/cluster/test_cli.py."""
    program = folder / "kubectl"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


async def test_the_operators_pages_need_an_operator_that_serves_them(
    terminal: Terminal, tmp_path: Path
) -> None:
    path = kubectl_that("echo error: lost connection to pod; exit 1", tmp_path)

    async def refused() -> str:
        return await terminal.call("--operator", "-n", "ml", of="dashboard", code=2, env=path)

    assert "found no operator that is ready in the namespace ml" in await refused()
    without = {"containers": [{"name": "operator", "image": "op", "args": ["--tls"]}]}
    terminal.cluster.put(PODS, OPERATOR_POD | {"spec": without})
    assert "serves no pages: set dashboard.enabled=true" in await refused()
    terminal.cluster.put(PODS, OPERATOR_POD)
    assert "kubectl port-forward has ended: error: lost connection to pod" in await refused()
    nowhere = {"PATH": str(tmp_path / "empty")}
    told = await terminal.call("--operator", of="dashboard", code=2, env=nowhere)
    assert "found no kubectl in PATH" in told


async def test_a_lost_way_to_the_operators_pages_says_why_once_and_gives_no_port_away(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.cluster.put(PODS, OPERATOR_POD)
    port = free_port()
    path = kubectl_that(f"echo 'Forwarding from 127.0.0.1:{port} -> 8090'", tmp_path)
    flags = ("--operator", "-n", "ml", "--port", str(port))
    command = await terminal.start(*flags, of="dashboard", env=path)
    assert command.stdout is not None
    assert command.stderr is not None
    assert f":{port}" in (await asyncio.wait_for(command.stdout.readline(), 60)).decode()
    terminal.cluster.remove(PODS, "op", "ml")
    said = ""
    while "no connection yet: found no operator" not in said:
        said += (await asyncio.wait_for(command.stderr.readline(), 60)).decode()
    with socket.create_server(("127.0.0.1", port)):
        said += (await asyncio.wait_for(command.stderr.read(), 60)).decode()
    assert await command.wait() == 2
    assert said.count("no connection yet") == 1
    assert "another program may answer there now" in said
