"""Tells that a job has become slow, and why. If the job allows it, a slow node is then checked.

The check comes before any action: only a node that is slow with good nodes too is left out.
"""

from collections import Counter
from dataclasses import asdict

from dlrover_py.master.core.admission import Admission
from dlrover_py.master.core.diagnosis.slowness import (
    LEAST_SHIFT,
    Excess,
    Parts,
    Slowness,
    SlowWatch,
    Window,
    in_words,
)
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Readiness
from dlrover_py.master.core.state import NON_DISRUPTIVE, Look
from dlrover_py.protocol.agents import AgentReport, Progress
from dlrover_py.protocol.diagnosis import EvidenceKind, SlowKind
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase

WINDOW_S = 8.0
"""Least seconds of a window on each node. A job that is slow for six windows is told within a
minute, also if the change comes within a window, and reports take a second."""
WINDOW_STEPS = 5
"""Least steps of a window on each node."""
WARM_UP = 2
"""First windows of a round that are left out: compilers and caches warm up."""
EARLIER = 16
"""Number of earlier rounds whose differences between nodes are kept."""
CHECKED_AN_HOUR = 0.02
"""Share of the nodes of a job that are checked in an hour at most, because it is slow."""
WITNESSES = 2
"""Members that a suspect is checked with, beside a standby: two pairs can be compared."""
MOST_FACTS = 64
"""Most lines about nodes in a bundle of evidence."""
OVER = 3
"""Windows in a row that are not slow after which the job counts as fast again."""


class SlowJob:
    """The detector of slow steps of one job."""

    def __init__(self, context: CoreContext, admission: Admission) -> None:
        self._admission = admission
        self.state, self.live, self.log = context.state, context.live, context.log
        self._round = self.state.round
        self._earlier: list[tuple[int, Excess]] = []
        """What differed in earlier rounds: their number of nodes, and the node."""
        self._watch = self._new_watch()
        self._windows = self._fast = 0
        self._begun: dict[NodeId, Progress] = {}
        """Progress of each member at the begin of the window."""
        self._newest: dict[NodeId, AgentReport] = {}
        """Newest report of each member that has progress."""
        self._complete: set[NodeId] = set()
        """Members whose part of the window is complete."""
        self._told: Slowness | None = None
        """Why the job is slow, as it was told; None if it is not."""
        self._event = 0
        """Id of the event that told it."""
        self._seen = 0
        """Number of further windows for which it is slow for this reason."""
        self._other = 0
        """Number of windows in a row for which it is slow for another reason."""

    def take_report(self, node_id: NodeId, report: AgentReport) -> None:
        """Take in the progress of a member of the round, and what its node lacks."""
        node = self.live.nodes.get(node_id)
        if node is None or node.report is not report or report.follows != self.state.round:
            return
        if not self.state.trains(node_id, node.incarnation) or report.progress is None:
            return
        if self._round != self.state.round:
            self._begin_round()
        if "run" not in report.progress.spent:
            return  # the script's SDK does not measure it
        begun = self._begun.setdefault(node_id, report.progress)
        if _run(report.progress) < _run(begun):  # a worker was started again in this round
            begun = self._begun[node_id] = report.progress
            self._complete.discard(node_id)
        self._newest[node_id] = report
        if _run(report.progress) - _run(begun) >= WINDOW_S and (
            report.progress.step - begun.step >= WINDOW_STEPS
        ):
            self._complete.add(node_id)

    def decide(self) -> None:
        """Judge each complete window, and tell what is new."""
        state, pending = self.state, self.state.pending_round
        ends = pending is not None and pending.kind not in NON_DISRUPTIVE
        off = self.live.spec.spec.diagnosis.slow == "off"
        if state.world is None or state.phase is not JobPhase.RUNNING or ends or off:
            self._end("the round is over")
            return
        if self._round != state.round:
            self._begin_round()
        if len(self._complete) < len(state.world.members):
            return
        window = self._window()
        self._begun = {name: _progress(report) for name, report in self._newest.items()}
        self._complete.clear()
        self._windows += 1
        if self._windows <= WARM_UP:
            return
        self._watch.saw(window)
        self._tell(self._watch.slow, window)

    def _begin_round(self) -> None:
        """Discard the step times of the last round: a step of this one may take another time."""
        if (excess := self._watch.excess) is not None:
            self._earlier = [*self._earlier[1 - EARLIER :], (len(self._watch.ranks), excess)]
        self._round = self.state.round
        self._watch = self._new_watch()
        self._windows = self._fast = 0
        for known in (self._begun, self._newest, self._complete):
            known.clear()

    def _new_watch(self) -> SlowWatch:
        """Return a watch for the present round, which knows what differed in earlier ones."""
        world = self.state.world
        ranks = {str(node): rank for node, rank in world.rank_of.items()} if world else {}
        earlier = [excess for nodes, excess in self._earlier if nodes == len(ranks)]
        return SlowWatch(ranks=ranks, earlier=earlier)

    def _window(self) -> Window:
        """Return what each member did per step, from the begin of the window until now.

        Each member must have made a step since then. Times of saves and loads do not count.
        """
        nodes, times = {}, []
        addresses = Counter(report.offer.addr for report in self._newest.values())
        node_at = {r.offer.addr: str(n) for n, r in self._newest.items()}
        for name, report in self._newest.items():
            begun, now = self._begun[name], _progress(report)

            def each(part: str, old: Progress = begun, new: Progress = now) -> float:
                spent = new.spent.get(part, 0.0) - old.spent.get(part, 0.0)
                return max(0.0, spent) / (new.step - old.step)

            times.append(max(1e-6, each("run") - each("save") - each("load")))
            load = report.load
            peer = load.peer if load is not None else ""
            nodes[str(name)] = Parts(
                data=each("data"),
                gc=each("gc"),
                cpu=each("cpu"),
                throttled=load.throttled if load is not None else 0.0,
                pressure=load.cpu if load is not None else 0.0,
                memory=load.memory if load is not None else 0.0,
                io=load.io if load is not None else 0.0,
                sending=load.sending * times[-1] if load is not None else 0.0,
                clocks=load.clocks if load is not None else 0.0,
                speed=load.link_bytes_s if load is not None else 0.0,
                resent=load.resent if load is not None else 0.0,
                errors=load.network_errors if load is not None else 0.0,
                # On one machine, several nodes have the same address.
                peer=node_at[peer] if addresses[peer] == 1 else "",
            )
        return Window(
            step=min(progress.step for progress in self._begun.values()),
            step_s=sorted(times)[len(times) // 2],
            nodes=nodes,
        )

    def _tell(self, slow: Slowness | None, window: Window) -> None:
        """Record that the job is slow, for another reason than before, or is not any more.

        The first time, all ranks are looked at, too.

        Args:
            slow: Why it is slow; None if it is not.
            window: The newest steps.
        """
        told = self._told
        if slow is None:
            self._fast += 1
            if self._fast >= OVER:
                self._end("steps take the usual time again")
            return
        self._fast = 0
        self.live.slow = in_words(slow)
        self._seen += 1
        same = told is not None and (told.kind, told.node) == (slow.kind, slow.node)
        self._other = 0 if same else self._other + 1
        # Causes that take turns are told once: each event is kept, and takes the place of another.
        if told is None or self._other >= OVER:
            self._event = self.log.record(
                EventReason.SLOW,
                self.live.slow,
                node=slow.node or None,
                cause=self._event if told is not None else None,
                warning=True,
            )
            self._told, self._seen, self._other = slow, 0, 0
            look = Look(EvidenceKind.SLOW, self.live.slow, facts(window, slow.node), slow.node)
            self.live.look = self.live.look or look
        if self.live.spec.spec.diagnosis.slow == "act" and (why := self._check(slow)):
            self.live.slow += f". It is not checked: {why}"

    def _check(self, slow: Slowness) -> str:
        """Have the named node checked with good nodes; return why not, or an empty text."""
        state, live = self.state, self.live
        if slow.kind not in (SlowKind.MACHINE, SlowKind.LINK):
            return "no node is at fault for a slowness of this class"
        suspect = live.nodes.get(NodeId(slow.node)) if slow.node else None
        if suspect is None:
            return "no node is named"
        if self._seen < OVER:
            return "it may be over soon"
        world = state.world
        if world is None or state.pending_round is not None or state.succeeded:
            return "the round is about to end"
        if suspect.leaving or not world.has(suspect.id, suspect.incarnation):
            return f"{suspect.id} is no member of the round any more"
        ready = [n for n in live.nodes if n.readiness is Readiness.READY and n is not suspect]
        standbys = [n for n in ready if n.id not in world.rank_of]
        if not standbys:
            return "no standby is ready to take its place"
        pause_s = 3600 / (CHECKED_AN_HOUR * len(world.members))
        left_s = state.health.confirmed_at + pause_s - live.steady_wall
        if state.health.confirmed_at and left_s > 0:
            return f"the last check was too recent; the next may be in {left_s / 60:.0f} minutes"
        members = [n for n in ready if n.id in world.rank_of and n.id != slow.peer]
        if slow.kind is SlowKind.LINK and len(members) < WITNESSES:
            return "fewer than two members to compare with, besides both ends of the link"
        others = [standbys[0], *members[:WITNESSES]]
        slow_from = 1 + min(1.0, max(LEAST_SHIFT, (slow.shift - 1) / 2))
        self._admission.confirm(suspect, others, slow_from, in_words(slow), self._event)
        return ""

    def _end(self, why: str) -> None:
        """Record that the job is not slow any more; do nothing if it was not."""
        if self._told is None:
            return
        self._told, self.live.slow = None, ""
        self.log.record(EventReason.SLOW_OVER, why, cause=self._event)


def facts(window: Window, first: str = "") -> tuple[str, ...]:
    """Return what each node has spent in a step, and what it has lacked, in words.

    What is neither computed by the thread that trains nor waited for data is its wait for other
    ranks, or for a device.

    Args:
        window: The newest steps.
        first: The node that comes first, as the lines of many nodes are left out.
    """
    found = [f"a step takes {window.step_s:.3g} s"]
    for name, parts in sorted(window.nodes.items(), key=lambda one: (one[0] != first, one[0])):
        waits = window.step_s - parts.data - parts.cpu
        numbers = {n: v for n, v in asdict(parts).items() if isinstance(v, float) and v}
        words = [f"{part} {value:.3g}" for part, value in numbers.items()]
        words += [f"waits {waits:.3g}"] if parts.cpu and waits > 0 else []
        found.append(f"{name}: {', '.join(words) or 'nothing that is measured'}")
    return tuple(found[:MOST_FACTS])


def _progress(report: AgentReport) -> Progress:
    assert report.progress is not None
    return report.progress


def _run(progress: Progress) -> float:
    """Return the seconds from the first reported step to the newest one."""
    return progress.spent.get("run", 0.0)
