import math

import pytest

from dlrover_py.master.core.nodes import Node, NodeRecord, Nodes, Readiness, ReportOutcome
from dlrover_py.protocol.agents import AgentReport
from dlrover_py.protocol.names import Incarnation, NodeId, Term
from dlrover_py.protocol.status import NodePhase
from tests.builders import fresh_offer

N = NodeId("n0")


def report(
    seq: int, *, boot: str = "boot-a", incarnation: int = 0, have: tuple[int, int] = (0, 0)
) -> AgentReport:
    return AgentReport(
        boot_id=boot.ljust(8, "-"),
        incarnation=incarnation,
        seq=seq,
        have_term=have[0],
        have_version=have[1],
        offer=fresh_offer("n0"),
    )


@pytest.fixture
def nodes() -> Nodes:
    nodes = Nodes(lease_s=5.0, suspect_s=1.0)
    nodes.plan(N)
    return nodes


def hear(nodes: Nodes, said: AgentReport, now: float = 0.0, term: int = 1) -> ReportOutcome:
    return nodes.take_report(N, said, now, Term(term))


def lost(nodes: Nodes, now: float) -> list[str]:
    return [gone.why for gone in nodes.expire(now)]


def test_the_first_report_begins_a_life(nodes: Nodes) -> None:
    assert nodes[N].readiness is Readiness.NEAR
    assert hear(nodes, report(1)) is ReportOutcome.NEW_INCARNATION
    assert (nodes[N].incarnation, nodes[N].phase) == (1, NodePhase.LIVE)
    assert hear(nodes, report(2)) is ReportOutcome.ACCEPTED
    assert nodes[N].readiness is Readiness.READY


@pytest.mark.parametrize("seq", [1, 2])
def test_an_older_report_changes_nothing(nodes: Nodes, seq: int) -> None:
    hear(nodes, report(2))
    assert hear(nodes, report(seq), now=3.0) is ReportOutcome.STALE
    assert nodes[N].lease_until == 5.0


def test_a_new_agent_supersedes_the_old_one_for_ever(nodes: Nodes) -> None:
    hear(nodes, report(9))
    assert hear(nodes, report(1, boot="boot-b")) is ReportOutcome.NEW_INCARNATION
    assert nodes[N].incarnation == 2
    assert hear(nodes, report(10)) is ReportOutcome.REFUSED
    assert hear(nodes, report(10, incarnation=1)) is ReportOutcome.REFUSED
    assert nodes[N].boot_id == "boot-b--"


def test_a_life_that_was_never_given_is_refused(nodes: Nodes) -> None:
    assert hear(nodes, report(1, incarnation=3)) is ReportOutcome.REFUSED
    assert nodes[N].incarnation == 0


def test_who_is_gone_stays_gone(nodes: Nodes) -> None:
    hear(nodes, report(1))
    nodes.give_up(nodes[N])
    assert hear(nodes, report(2)) is ReportOutcome.REFUSED
    assert hear(nodes, report(1, boot="boot-b")) is ReportOutcome.REFUSED
    assert nodes.count(Readiness.OUT) == 1
    assert nodes.present == 0


def test_who_was_taken_back_supersedes_who_spoke_before(nodes: Nodes) -> None:
    hear(nodes, report(9))
    nodes.give_up(nodes[N])
    nodes.readmit(N, "boot-b--")
    assert hear(nodes, report(1, boot="boot-b")) is ReportOutcome.NEW_INCARNATION
    assert hear(nodes, report(10)) is ReportOutcome.REFUSED
    assert nodes[N].boot_id == "boot-b--"


def test_who_is_taken_back_itself_may_go_on(nodes: Nodes) -> None:
    hear(nodes, report(9))
    nodes.give_up(nodes[N])
    nodes.readmit(N, "boot-a--")
    assert hear(nodes, report(10)) is ReportOutcome.NEW_INCARNATION
    assert hear(nodes, report(11)) is ReportOutcome.ACCEPTED
    assert nodes[N].incarnation == 2


def test_a_node_that_is_gone_does_not_count_as_warm(nodes: Nodes) -> None:
    """Otherwise the next round would begin without the cold nodes that start."""
    hear(nodes, report(1).model_copy(update={"warm": True}))
    assert nodes.any_warm
    nodes.give_up(nodes[N])
    assert not nodes.any_warm


def test_a_lease_lapses_unless_it_is_renewed(nodes: Nodes) -> None:
    hear(nodes, report(1), now=0.0)
    hear(nodes, report(2), now=4.0)
    assert nodes.wake_at <= 9.0
    assert lost(nodes, 5.0) == lost(nodes, 8.75) == []
    assert lost(nodes, 9.0) == ["its lease expired: it sent no report for 5 s"]
    assert nodes.wake_at == math.inf


def test_a_closed_connection_has_a_short_grace(nodes: Nodes) -> None:
    hear(nodes, report(1))
    assert nodes.disconnected(N, "boot-a--", 1, 0.25)
    assert (nodes[N].phase, nodes.wake_at) == (NodePhase.SUSPECT, 1.25)
    assert lost(nodes, 1.0) == []
    assert lost(nodes, 1.25) == ["its connection closed and it did not reconnect"]


def test_who_comes_back_is_not_suspect(nodes: Nodes) -> None:
    hear(nodes, report(1))
    nodes.disconnected(N, "boot-a--", 1, 0.0)
    assert hear(nodes, report(2), now=0.75) is ReportOutcome.ACCEPTED
    assert nodes[N].phase is NodePhase.LIVE
    assert lost(nodes, 5.5) == []


@pytest.mark.parametrize(("boot", "seq"), [("boot-a--", 1), ("boot-b--", 2)])
def test_only_the_newest_connection_counts(nodes: Nodes, boot: str, seq: int) -> None:
    hear(nodes, report(1))
    hear(nodes, report(2))
    assert not nodes.disconnected(N, boot, seq, 0.0)
    assert nodes[N].phase is NodePhase.LIVE


def test_flapping_connections_leave_no_timers_behind(nodes: Nodes) -> None:
    hear(nodes, report(0))
    for turn in range(1, 200):
        now = turn / 4
        nodes.disconnected(N, "boot-a--", turn - 1, now)
        hear(nodes, report(turn), now=now)
        nodes.expire(now)
    assert nodes.timers <= 8


def test_a_member_is_busy_until_it_has_what_it_was_told(nodes: Nodes) -> None:
    hear(nodes, report(1))
    nodes.require_version(nodes[N], 3)
    assert nodes[N].readiness is Readiness.BUSY
    hear(nodes, report(2, have=(1, 2)))
    assert nodes[N].readiness is Readiness.BUSY
    hear(nodes, report(3, have=(1, 3)))
    assert nodes[N].readiness is Readiness.READY


def test_what_an_earlier_master_told_is_not_an_acknowledgement(nodes: Nodes) -> None:
    hear(nodes, report(1), term=2)
    nodes.require_version(nodes[N], 1)
    hear(nodes, report(2, have=(1, 9)), term=2)
    assert nodes[N].readiness is Readiness.BUSY
    hear(nodes, report(3, have=(2, 1)), term=2)
    assert nodes[N].readiness is Readiness.READY


def returning(*cut_off: int) -> Nodes:
    """Three that had spoken to an earlier term; the hosts of some are not heard of."""
    nodes = Nodes(lease_s=5.0, suspect_s=1.0)
    for number in range(3):
        node = NodeId(f"n{number}")
        nodes.plan(node, NodeRecord(incarnation=Incarnation(1), boot_id="boot-a--"))
        nodes.recall(node, 0.0, return_s=10.0, unreached_s=60.0, unrouted_s=300.0)
    for number in cut_off:
        unheard_host(nodes, number, 0.0)
    return nodes


def unheard_host(nodes: Nodes, number: int, now: float) -> None:
    nodes.observe(
        NodeId(f"n{number}"), near=True, runs=True, exists=True, topology=(), message="",
        cut_off=True, now=now,
    )  # fmt: skip


def back(nodes: Nodes, number: int, now: float) -> None:
    nodes.take_report(NodeId(f"n{number}"), report(1, incarnation=1), now, Term(2))


def test_who_is_cut_off_is_not_waited_for_once_all_others_are_back() -> None:
    nodes = returning(2)
    back(nodes, 0, 2.0)
    assert not nodes.expire(5.0), "another one is awaited"
    back(nodes, 1, 5.0)
    assert not nodes.expire(5.75), "it may be on its way"
    why = "it did not report to the new master, and its host has lost contact with the platform"
    assert [(x.node.id, x.why) for x in nodes.expire(6.0)] == [("n2", why)]


def test_of_a_host_that_is_cut_off_it_may_be_heard_last() -> None:
    nodes = returning()
    back(nodes, 0, 1.0)
    back(nodes, 1, 2.0)
    unheard_host(nodes, 2, 3.0)
    assert [x.node.id for x in nodes.expire(4.0)] == ["n2"]


def test_the_platform_is_not_believed_of_hosts_if_one_of_them_reports() -> None:
    nodes = returning(0, 1, 2)
    back(nodes, 0, 5.25)
    assert not nodes.expire(10.0)
    assert {"n1", "n2"} <= {x.node.id for x in nodes.expire(10.25)}


def test_whoever_is_cut_off_and_comes_in_time_lives() -> None:
    nodes = returning(2)
    back(nodes, 0, 1.0)
    back(nodes, 1, 1.0)
    back(nodes, 2, 1.75)
    assert not nodes.expire(5.75)


def test_a_host_that_is_heard_again_gives_its_node_the_time_of_the_others() -> None:
    nodes = returning(2)
    back(nodes, 0, 5.25)
    back(nodes, 1, 5.25)
    nodes.observe(NodeId("n2"), near=True, runs=True, exists=True, topology=(), message="", now=5.5)
    assert not nodes.expire(10.0)


def test_cut_off_or_not_nobody_is_given_up_as_long_as_the_master_is_not_reached() -> None:
    assert not returning(0, 1, 2).expire(59.0)


def test_nodes_that_run_are_not_given_up_for_a_master_that_nobody_finds() -> None:
    """Campaign, seed 11, fault 160: after the API server was killed the Service of the new master
    had no endpoints for two minutes."""
    nodes = returning(2)
    lost: dict[str, tuple[float, bool]] = {}
    for quarter in range(4 * 301):
        lost |= {x.node.id: (quarter / 4, x.free) for x in nodes.expire(quarter / 4)}
    assert lost == {"n2": (60.0, False), "n0": (300.0, True), "n1": (300.0, True)}
    nodes = returning(2)
    for quarter in range(4 * 120):
        nodes.expire(quarter / 4)
    back(nodes, 0, 120.0)
    assert not nodes.expire(124.75)
    assert [(x.node.id, x.free) for x in nodes.expire(125.0)][-1] == ("n1", False)


def test_a_suspect_member_is_waited_for_and_a_suspect_standby_is_near(nodes: Nodes) -> None:
    hear(nodes, report(1))
    nodes.disconnected(N, "boot-a--", 1, 0.0)
    assert nodes[N].readiness is Readiness.NEAR
    nodes.require_version(nodes[N], 1)
    assert nodes[N].readiness is Readiness.BUSY


def test_a_recalled_member_has_one_lease_and_is_busy() -> None:
    nodes = Nodes(lease_s=5.0, suspect_s=1.0)
    nodes.plan(N, NodeRecord(incarnation=Incarnation(4), boot_id="boot-a--"))
    nodes.recall(N, 10.0, member=True)
    assert (nodes[N].readiness, nodes.wake_at) == (Readiness.BUSY, 15.0)
    assert hear(nodes, report(7, incarnation=4), now=11.0) is ReportOutcome.ACCEPTED
    assert nodes[N].incarnation == 4


def test_a_stalled_master_blames_nobody(nodes: Nodes) -> None:
    hear(nodes, report(1))
    nodes.stalled(10.0, 5.0)
    assert lost(nodes, 14.75) == []
    assert len(lost(nodes, 15.0)) == 1


def test_who_hung_up_on_a_master_has_as_long_to_come_back_as_it_stood_still(nodes: Nodes) -> None:
    for stood_s, back_s in ((0.3, 1.0), (3.0, 3.0), (60.0, 5.0)):
        nodes = Nodes(lease_s=5.0, suspect_s=1.0)
        nodes.plan(N)
        hear(nodes, report(1))
        nodes.stalled(10.0, stood_s)
        nodes.disconnected(N, "boot-a--", 1, 10.0)
        assert lost(nodes, 10.0 + back_s - 0.25) == []
        assert len(lost(nodes, 10.0 + back_s)) == 1


def test_short_stalls_do_not_keep_a_lost_node_for_long(nodes: Nodes) -> None:
    hear(nodes, report(1))
    nodes.disconnected(N, "boot-a--", 1, 0.0)
    nodes.stalled(1.5, 0.5)  # in the turn that was to give it up
    assert lost(nodes, 2.25) == []
    nodes.stalled(3.0, 0.5)
    assert len(lost(nodes, 4.0)) == 1


def test_the_platform_says_how_near_a_node_is(nodes: Nodes) -> None:
    nodes.observe(N, near=False, runs=False, exists=True, topology=("z",), message="no room")
    assert nodes[N].readiness is Readiness.PENDING
    nodes.observe(N, near=True, runs=True, exists=True, topology=("z",), message="")
    assert nodes[N].readiness is Readiness.NEAR
    hear(nodes, report(1))
    nodes.observe(N, near=False, runs=False, exists=True, topology=("z",), message="")
    assert nodes[N].readiness is Readiness.READY, "it has spoken: that is newer"


def test_who_leaves_is_out(nodes: Nodes) -> None:
    hear(nodes, report(1))
    nodes.leave(nodes[N], "drained")
    assert nodes[N].readiness is Readiness.OUT
    assert nodes.present == 0


def test_counts_follow_every_change(nodes: Nodes) -> None:
    nodes.plan(NodeId("n1"))

    def counted() -> dict[Readiness, int]:
        return {s: sum(1 for n in nodes if n.readiness is s) for s in Readiness}

    def check() -> None:
        assert {s: nodes.count(s) for s in Readiness} == counted()

    node: Node = nodes[N]
    for change in (
        lambda: nodes.observe(N, near=False, runs=False, exists=True, topology=(), message=""),
        lambda: hear(nodes, report(1)),
        lambda: nodes.require_version(node, 1),
        lambda: nodes.disconnected(N, "boot-a--", 1, 0.0),
        lambda: nodes.expire(2.0),
        lambda: nodes.readmit(N, "boot-a--"),
        lambda: hear(nodes, report(5), now=3.0),
        lambda: nodes.leave(node, "x"),
        lambda: nodes.forget(node),
    ):
        change()
        check()


def test_a_master_that_stands_still_does_not_shorten_the_time_to_return() -> None:
    nodes = Nodes(lease_s=5.0, suspect_s=1.0)
    nodes.plan(N, NodeRecord(incarnation=Incarnation(1), boot_id="boot-000"))
    nodes.recall(N, 0.0, return_s=93.0)
    nodes.stalled(1.0, 1.0)
    assert not nodes.expire(92.0)
    assert [x.why for x in nodes.expire(93.0)] == ["it did not report to the new master"]
