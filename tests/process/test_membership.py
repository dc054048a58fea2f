"""Real masters, agents and workers: nodes come, die, freeze and go, and the round follows."""

import contextlib
import os
import signal
from functools import partial

from dlrover_py.protocol.status import JobStatus, NodeStatus
from tests.process.harness import Job, Place, alive, eventually, job, lines, members
from tests.programs import PROGRAMS

QUICK = {"lease_s": "5", "exchange_s": "0.5"}


def test_a_killed_worker_restarts_the_round_in_place(place: Place) -> None:
    with job(place, replicas=2, flags=("--nproc-per-node=2",)) as run:
        before = run.running(2)
        old = [pid for n in members(before) for pid in n.pids]
        os.kill(members(before)[1].pids[0], signal.SIGKILL)
        after = run.running(2, round_after=before.round)
        assert [n.id for n in members(after)] == [n.id for n in members(before)]
        assert not any(alive(pid) for pid in old)
        assert after.world_size == 4
        assert after.restarts == {"failure": 1}
        failure = after.last_failure
        assert failure is not None
        assert (failure.node, failure.worker.rank, failure.worker.exit_code) == ("n1", 2, -9)


def test_a_standby_takes_the_rank_of_a_killed_node(place: Place) -> None:
    with job(place, replicas=3, standbyReplicas=1, hosts=4) as run:
        before = run.until(lambda s: s.nodes_in_round == 3 and s.standby == 1, "a standby")
        before = run.running(3)
        run.hurt(members(before)[1].id, "kill")
        after = run.running(3, round_after=before.round)
        old, new = [n.id for n in members(before)], [n.id for n in members(after)]
        assert (new[0], new[2]) == (old[0], old[2])
        assert new[1] not in old
        # Its replacement has no host, until one comes: then it is the next standby.
        run.until(lambda s: any("no free host" in n.message for n in s.nodes), "a pending node")
        run.api("POST", "/v1/hosts?count=1")
        run.until(lambda s: s.standby == 1, "a new standby")
        assert run.status().round == after.round


def test_rank_0_may_be_lost_and_the_world_shrinks_and_grows(place: Place) -> None:
    patient = {"replacement_wait_s": "60"}  # else who starts late joins later
    with job(place, replicas=3, minReplicas=2, hosts=3, settings=patient) as run:
        before = run.running(3)
        run.hurt(members(before)[0].id, "kill")
        small = run.running(2, round_after=before.round)
        assert [n.id for n in members(small)] == [n.id for n in members(before)][1:]
        assert small.restarts == {"loss": 1}
        run.api("POST", "/v1/hosts?count=1")
        big = run.running(3, round_after=small.round)
        assert [n.id for n in members(big)][:2] == [n.id for n in members(small)]
        assert big.restarts == {"loss": 1, "join": 1}


def test_below_the_minimum_workers_are_stopped_until_a_node_comes(place: Place) -> None:
    with job(place, replicas=2, hosts=2) as run:
        before = run.running(2)
        survivor = members(before)[0]
        run.hurt(members(before)[1].id, "kill")
        run.until(
            lambda s: s.phase == "Forming" and "1 of at least 2 nodes" in s.reason,
            "a job that waits",
        )
        eventually(lambda: not alive(survivor.pids[0]), "the survivor's worker is stopped")
        run.api("POST", "/v1/hosts?count=1")
        run.running(2, round_after=before.round)


def test_a_frozen_node_is_replaced_and_refused_when_it_comes_back(place: Place) -> None:
    with job(place, replicas=2, standbyReplicas=1, hosts=3, settings=QUICK) as run:
        run.until(lambda s: s.standby == 1, "a standby")
        before = run.running(2)
        victim = members(before)[0]
        run.hurt(victim.id, "freeze")
        after = run.running(2, round_after=before.round)
        assert victim.id not in [n.id for n in members(after)]
        assert alive(victim.pids[0])
        run.hurt(victim.id, "thaw")
        run.until(lambda s: "NodeRefused" in [e.reason for e in s.events], "a refusal")
        eventually(lambda: not alive(victim.pids[0]), "its worker ends")
        eventually(lambda: not alive(victim.agent_pid), "its agent ends")
        # Its host is free again, for the next standby.
        run.until(lambda s: s.standby == 1, "a standby on the host that came back")
        assert run.status().round == after.round


def test_units_of_nodes(place: Place) -> None:
    with job(place, replicas=4, minReplicas=2, nodeUnit=2, hosts=4) as run:
        before = run.running(4)
        run.hurt(members(before)[3].id, "kill")
        small = run.running(2, round_after=before.round)
        assert small.standby == 1
        run.api("POST", "/v1/hosts?count=1")
        run.running(4, round_after=small.round)


def test_scale_down_and_up(place: Place) -> None:
    with job(place, replicas=2, minReplicas=1, maxReplicas=3, hosts=3) as run:
        before = run.running(2)
        assert "3 nodes" in run.cli("job", "scale", "3")
        big = run.running(3, round_after=before.round)
        run.cli("job", "scale", "1")
        small = run.running(1, round_after=big.round)
        assert members(small)[0].id == members(before)[0].id
        refused = place.call("dlrover", "job", "scale", "4")
        assert refused.returncode == 2
        assert "maxReplicas is 3" in refused.stderr
        run.until(lambda s: sum(n.phase == "live" for n in s.nodes) == 1, "the others end")


def test_a_restart_replaces_all_nodes_one_after_the_other(place: Place) -> None:
    with job(place, replicas=2, hosts=2) as run:
        before = run.running(2)
        assert "are being replaced" in run.cli("job", "restart", "--rolling")
        after = run.until(
            lambda s: {n.id for n in members(s)} == {"n2", "n3"} and s.phase == "Running",
            "new nodes",
        )
        assert after.round == before.round + 2
        assert after.restarts == {"drain": 2}
        assert {n.restarts + n.relaunches for n in after.nodes} == {0}


def test_suspend_and_resume(place: Place) -> None:
    with job(place, replicas=2) as run:
        before = run.running(2)
        run.cli("job", "suspend")
        run.until(lambda s: all(n.phase == "gone" for n in s.nodes), "all nodes are gone")
        assert run.status().phase == "Suspended"
        run.cli("job", "resume")
        after = run.running(2, round_after=before.round)
        assert {n.id for n in members(after)}.isdisjoint(n.id for n in members(before))
        assert after.restarts == {}


def test_a_drained_node_leaves_and_nobody_is_charged(place: Place) -> None:
    patient = {"replacement_wait_s": "60"}
    with job(place, replicas=2, minReplicas=1, hosts=2, settings=patient) as run:
        before = run.running(2)
        victim = members(before)[1]
        run.cli("node", "drain", victim.id)
        after = run.running(1, round_after=before.round)
        assert after.restarts == {"drain": 1}
        run.until(lambda s: any(n.phase == "gone" for n in s.nodes), "it is gone")
        assert all(n.relaunches == 0 for n in run.status().nodes)


def test_a_killed_master_comes_back_and_touches_no_worker(place: Place) -> None:
    with job(place, replicas=2, standbyReplicas=1, hosts=3) as run:
        run.until(lambda s: s.standby == 1, "a standby")
        before = run.running(2)
        os.kill(run.snapshot().master_pid, signal.SIGKILL)
        back = run.until(lambda s: s.term == before.term + 1 and s.ready == 3, "the next term")
        assert back.round == before.round
        assert [n.pids for n in members(back)] == [n.pids for n in members(before)]
        assert all(alive(pid) for n in members(back) for pid in n.pids)
        run.hurt(members(back)[0].id, "kill")
        after = run.running(2, round_after=back.round)
        assert members(after)[1].id == members(back)[1].id
        stays = members(back)[1].id
        eventually(lambda: len(lines(run, stays, "start 1 2")) == 2, "its second start")


def test_a_stopped_master_stops_nobody(place: Place) -> None:
    with job(place, replicas=2, settings=QUICK) as run:
        before = run.running(2)
        master = run.snapshot().master_pid
        os.kill(master, signal.SIGSTOP)
        # Longer than a lease: when it goes on, it must not blame the nodes for its own pause.
        eventually(
            lambda: all(
                "master_unreachable" in p.read_text() for p in run.logs.glob("n*/agent.log")
            ),
            "the agents miss it",
        )
        go_on(master)
        eventually(
            lambda: all(
                "master_answers_again" in p.read_text() for p in run.logs.glob("n*/agent.log")
            ),
            "the agents are back",
        )
        after = run.status()
        assert after.round == before.round
        assert [n.pids for n in members(after)] == [n.pids for n in members(before)]


TICKS = """
    import itertools, time
    for number in itertools.count():
        print("tick", number, flush=True)
        time.sleep(0.1)
"""


def said(run: Job, node: str, word: str) -> None:
    log = run.logs / node / "agent.log"
    eventually(lambda: word in log.read_text(), f"{node}: {word}", within_s=60)


def paused_master(run: Job, round_of: JobStatus) -> int:
    """It stands still: to its agents the same as to be cut off from it, without a word."""
    for node in members(round_of):
        if len(members(round_of)) > 1:
            said(run, node.id, "peer_probe_answered")
    master = run.snapshot().master_pid
    os.kill(master, signal.SIGSTOP)
    return master


def go_on(master: int) -> None:
    """Let a paused master go on; one that stood still for long has been replaced meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(master, signal.SIGCONT)


def test_workers_train_on_without_a_master_for_as_long_as_it_takes(place: Place) -> None:
    """Longer than an agent would wait for anybody: they hear of each other."""

    def trained_on(node: str, count: int) -> bool:
        return len(lines(run, node, "tick")) > count + 120

    with job(place, script=TICKS, replicas=3, settings=QUICK) as run:
        before = run.running(3)
        master = paused_master(run, before)
        for node in members(before):
            said(run, node.id, "master_unreachable")
        for node in members(before):
            count = len(lines(run, node.id, "tick"))
            eventually(
                partial(trained_on, node.id, count),
                "it trains on for twelve seconds",
                within_s=60,
            )
        go_on(master)
        after = run.until(lambda s: s.ready == 3, "all are back")
        assert after.round == before.round
        assert [n.pids for n in members(after)] == [n.pids for n in members(before)]


def test_nodes_that_hear_of_nobody_stop_their_workers_by_themselves(place: Place) -> None:
    def stopped(node: NodeStatus) -> bool:
        return not alive(node.pids[0])

    with job(place, replicas=3, minReplicas=2, hosts=3, settings=QUICK) as run:
        before = run.running(3)
        first, *others = members(before)
        master = paused_master(run, before)
        run.hurt(first.id, "freeze")
        for node in others:
            eventually(partial(stopped, node), "its workers are stopped", within_s=60)
            assert alive(node.agent_pid)
        assert alive(first.pids[0]), "it stands still, and cannot know"
        go_on(master)
        after = run.running(2, round_after=before.round)
        assert [n.id for n in members(after)] == [n.id for n in others]
        assert "NodeCutOff" in run.event_reasons()
        assert all(n.restarts == 0 for n in after.nodes), "nobody is to blame"


def test_rank_0_stops_its_workers_when_nobody_asks_for_it(place: Place) -> None:
    with job(place, replicas=2, minReplicas=1, hosts=2, settings=QUICK) as run:
        before = run.running(2)
        first, other = members(before)
        master = paused_master(run, before)
        run.hurt(other.id, "freeze")
        eventually(lambda: not alive(first.pids[0]), "its workers are stopped", within_s=60)
        go_on(master)
        after = run.running(1, round_after=before.round)
        assert [n.id for n in members(after)] == [first.id]


def test_who_is_alone_in_its_round_does_not_need_the_master(place: Place) -> None:
    with job(place, script=TICKS, replicas=1, settings=QUICK) as run:
        before = run.running(1)
        master = paused_master(run, before)
        said(run, "n0", "master_unreachable")
        count = len(lines(run, "n0", "tick"))
        eventually(lambda: len(lines(run, "n0", "tick")) > count + 150, "it trains on", within_s=60)
        go_on(master)
        after = run.until(lambda s: s.ready == 1, "it is back")
        assert (after.round, members(after)[0].pids) == (before.round, members(before)[0].pids)


def test_a_killed_agent_leaves_no_orphan(place: Place) -> None:
    with job(place, script=PROGRAMS / "have_a_child.py", replicas=2, minReplicas=1, hosts=2) as run:
        before = run.running(2)
        victim = members(before)[1]
        (line,) = eventually(lambda: lines(run, victim.id, "child"), "the worker's child")
        child = int(line.split()[1])
        os.kill(victim.agent_pid, signal.SIGKILL)
        eventually(lambda: not alive(victim.pids[0]) and not alive(child), "all of it ends")
        after = run.running(2, round_after=before.round)
        assert victim.id not in [n.id for n in members(after)]
