"""Checks before the training: real workers, matmuls and all-reduces, and a node that fails."""

import os
import signal

import pytest

from dlrover_py.protocol.status import JobStatus
from tests.process.harness import Job, Place, job, members

pytestmark = pytest.mark.timeout(400)
CHECK = ("--network-check",)
LONG = 120.0
"""A check imports torch in each worker, and this machine may be busy."""


def fault(text: str) -> dict[str, str]:
    return {"DLROVER_CHECK_FAULT": text}


def said(status: JobStatus, reason: str) -> list[str]:
    return [e.message for e in status.events if e.reason == reason]


def test_good_nodes_are_checked_and_train(place: Place) -> None:
    with job(place, replicas=2, flags=("--precheck=2", "--nproc-per-node=2")) as run:
        status = run.running(2, within_s=LONG)
        assert status.round == 1
        assert said(status, "CheckStarted") == ["check 1 started: n0+n1"]
        (passed,) = said(status, "NodesChecked")
        assert passed.startswith("2 nodes are fit to train: n0 matmul ")
        assert "busbw" in passed
        assert status.restarts == {}
        log = (run.logs / "n1" / "agent.log").read_text()
        assert "check_ended" in log
        assert "busbw_gb_s" in log
        assert "DLROVER_RESTART_REASON" not in log


def test_without_the_flag_nothing_is_checked(place: Place) -> None:
    with job(place, replicas=2, env=fault("n0=fail")) as run:
        status = run.running(2)
        assert not said(status, "CheckStarted")


def test_a_node_that_fails_is_replaced_and_the_rest_trains(place: Place) -> None:
    with job(place, replicas=3, minReplicas=2, flags=CHECK, env=fault("n1=fail")) as run:
        status = run.running(2, within_s=LONG)
        assert [n.id for n in members(status)] == ["n0", "n2"]
        (why,) = said(status, "NodeExcluded")
        assert why.startswith("node n1 is not fit to train: n1: worker 0 raised RuntimeError")
        assert status.restarts == {}
        assert status.last_failure is None
        after = run.running(3, within_s=LONG)
        assert [n.id for n in members(after)] == ["n0", "n2", "n3"]
        assert "node n1 is not fit to train" in run.cli("job", "events")


def test_where_the_replacements_fail_too_the_job_fails_and_says_why(place: Place) -> None:
    env = fault("n1=fail,n2=fail")
    with job(place, replicas=2, restartCount=1, flags=CHECK, env=env) as run:
        assert run.wait(within_s=2 * LONG) == 1
        last = "".join(run.output)
        assert "NetworkCheckFailed" in last
        assert "n2 is not fit to train" in last


def test_a_bad_link_between_two_nodes_is_said(place: Place) -> None:
    env = fault("n1=link")
    with job(place, replicas=2, restartCount=0, flags=CHECK, env=env) as run:
        assert run.wait(within_s=LONG) == 1
        said = "".join(run.output)
        assert "n0 and n1 each work alone, but not together" in said, said


def test_a_check_that_hangs_is_ended(place: Place) -> None:
    quick = {"check_s": "50"}
    env = fault("n0=hang")
    with job(place, replicas=2, minReplicas=1, flags=CHECK, env=env, settings=quick) as run:
        status = run.running(1, within_s=2.5 * LONG)
        assert [n.id for n in members(status)] == ["n1"]
        (why,) = said(status, "NodeExcluded")
        assert "n0 did not finish within 50 s" in why


def checking(status: JobStatus) -> bool:
    return all(n.workers == "checking" and any(n.pids) for n in status.nodes)


def test_a_stopped_worker_of_a_check_costs_its_node_no_restart(place: Place) -> None:
    with job(place, replicas=2, flags=CHECK, settings={"check_s": "45"}) as run:
        status = run.until(checking, "a check")
        os.kill(status.nodes[0].pids[0], signal.SIGSTOP)
        after = run.running(2, within_s=1.5 * LONG)
        assert [n.id for n in members(after)] == ["n0", "n1"], "it passed when it was tried anew"
        assert all(n.restarts == n.relaunches == 0 for n in after.nodes)
        assert len(said(after, "NodesSuspected")) == 1


def test_a_killed_worker_of_a_check_is_seen_at_once_and_tried_anew(place: Place) -> None:
    with job(place, replicas=2, flags=CHECK) as run:
        status = run.until(checking, "a check")
        os.kill(status.nodes[1].pids[0], signal.SIGKILL)
        after = run.running(2, within_s=LONG)
        assert "n1: worker 0 was killed by SIGKILL" in said(after, "NodesSuspected")[0]
        assert (after.restarts, after.last_failure) == ({}, None)


def test_a_node_that_is_lost_in_a_check_is_replaced(place: Place) -> None:
    with job(place, replicas=2, hosts=3, flags=CHECK) as run:
        run.until(checking, "a check")
        run.hurt("n1", "kill")
        run.until(lambda s: "n1" not in {n.id for n in members(s)}, "it is given up")
        after = run.running(2, within_s=LONG)
        assert [n.id for n in members(after)] == ["n0", "n2"]
        assert not said(after, "NodesSuspected")


def test_a_master_that_is_killed_in_a_check_begins_it_anew(place: Place) -> None:
    with job(place, replicas=2, flags=CHECK) as run:
        run.until(checking, "a check")
        os.kill(run.snapshot().master_pid, signal.SIGKILL)
        run.until(lambda s: s.term == 2, "another master")
        after = run.running(2, within_s=LONG)
        assert said(after, "CheckStarted") == ["check 1 started: n0+n1", "check 2 started: n0+n1"]


def straggler(place: Place, *flags: str) -> tuple[Job, JobStatus]:
    env = fault("n1=slow")
    with job(place, replicas=3, minReplicas=2, hosts=3, flags=(*CHECK, *flags), env=env) as run:
        return run, run.until(lambda s: s.phase == "Running", "a round", within_s=LONG)


def test_a_straggler_is_only_told_of(place: Place) -> None:
    _, status = straggler(place)
    assert len(members(status)) == 3
    (passed,) = said(status, "NodesChecked")
    assert "slow: a matmul took" in passed


def test_a_straggler_is_left_out_where_that_is_wished(place: Place) -> None:
    _, status = straggler(place, "--exclude-straggler")
    assert [n.id for n in members(status)] == ["n0", "n2"]
    (why,) = said(status, "NodeExcluded")
    assert why.startswith("node n1 is slow: ")


def test_a_node_that_joins_is_checked_and_disturbs_nobody(place: Place) -> None:
    with job(place, replicas=2, minReplicas=1, hosts=1, flags=CHECK) as run:
        before = run.running(1, within_s=LONG)
        pids = members(before)[0].pids
        run.api("POST", "/v1/hosts?count=1")
        late = run.until(
            lambda s: [n for n in s.nodes if n.id == "n1" and n.workers == "checking"],
            "a check of the node that joins",
            within_s=LONG,
        )
        assert (late.phase, late.round, members(late)[0].pids) == ("Running", 1, pids)
        after = run.running(2, round_after=1, within_s=LONG)
        assert said(after, "CheckStarted") == ["check 1 started: n0", "check 2 started: n1"]


def test_a_job_of_one_node_is_checked_alone(place: Place) -> None:
    place.script("import os\nprint('start', os.environ['DLROVER_RESTART_REASON'] or 'first')")
    good = place.call("elastic-run", "--standalone", *CHECK, "train.py", timeout=LONG)
    assert (good.returncode, good.stdout) == (0, "start first\n")
    bad = place.call(
        "elastic-run",
        "--standalone",
        *CHECK,
        "train.py",
        timeout=LONG,
        env=fault("n0=fail") | {"DLROVER_NODE_ID": "n0"},
    )
    assert bad.returncode == 1
    assert "n0 is not fit to train" in bad.stderr
