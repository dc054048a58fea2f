"""Tells which log rules apply. Agents search the lines of workers, and report what they find."""

import re

from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.state import NON_DISRUPTIVE
from dlrover_py.protocol.agents import AgentReport, LogFinding
from dlrover_py.protocol.log_rules import NVML, LogRule
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase
from dlrover_py.protocol.words import counted

_Key = tuple[str, str]
"""A rule; and for GPUs what they report, because one old fault must not hide another one. How often
it has happened is left out: it grows."""
_COUNT = re.compile(r"(?<=: )\d+ ")
SHOWN = 4
"""Largest number of nodes whose GPUs are described."""


class LogFindings:
    """The log rules of one job that apply now."""

    def __init__(self, context: CoreContext) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._found: dict[NodeId, tuple[int, list[LogFinding]]] = {}
        """What each node reports, and its round; nodes that report nothing are left out."""
        self._told: dict[_Key, tuple[int, float]] = {}
        """The event of each rule that applies, and since when it applies."""
        self._told_in: dict[_Key, int] = {}
        """The rules that were told in the newest round that had any, with that round."""

    def take_report(self, node_id: NodeId, report: AgentReport) -> None:
        """Take in what a member of the round has found."""
        node = self.live.nodes.get(node_id)
        if node is None or node.report is not report or report.follows != self.state.round:
            return
        if report.log_findings and self.state.trains(node_id, node.incarnation):
            self._found[node_id] = (report.follows, report.log_findings)
        else:
            self._found.pop(node_id, None)

    def decide(self) -> None:
        """Record which rules apply since this step, and which do not any more."""
        state, pending = self.state, self.state.pending_round
        over = state.world is None or state.phase is not JobPhase.RUNNING
        over |= pending is not None and pending.kind not in NON_DISRUPTIVE
        self._told_in = {key: told for key, told in self._told_in.items() if told == state.round}
        applies: dict[_Key, list[tuple[NodeId, LogFinding]]] = {}
        for node_id, (number, findings) in self._found.items():
            for finding in findings if number == state.round else ():
                key = finding.rule, _COUNT.sub("", finding.said) if finding.rule == NVML else ""
                applies.setdefault(key, []).append((node_id, finding))
        if not applies and not self._told:
            return
        texts, self.live.log_hang = [], None
        for key, found in applies.items():
            if over and self._told_in.get(key) == state.round:
                continue  # nodes go on to report it until the next round begins
            node_id, first = found[0]
            texts.append(_in_words(found))
            if key not in self._told:
                self._told_in[key] = state.round
                event = self.log.record(EventReason.LOG_RULE, texts[-1], node=node_id, warning=True)
                self._told[key] = event, self.live.now - self._expected_s(key[0])
            if first.verdict == "HANG" and self.live.log_hang is None:
                expected = self._rule(key[0])
                ends = expected is not None and expected.expected_every_seconds is not None
                self.live.log_hang = texts[-1], self._told[key][1], ends
        if over:  # told all the same: a worker may have died of what it has printed
            self._found.clear()
            applies.clear()
            texts, self.live.log_hang = [], None
        for key in [key for key in self._told if key not in applies]:
            event, _ = self._told.pop(key)
            rule = key[0]
            message = f"log rule {rule} does not apply any more" if rule else "the round is over"
            if rule == NVML:
                if any(other == NVML for other, _ in applies):
                    continue  # a GPU reports another fault, or one more
                message = "the round is over" if over else "no GPU reports a fault any more"
            self.log.record(EventReason.LOG_RULE_OVER, message, cause=event)
        self.live.log_rule = "; ".join(texts)

    def _expected_s(self, name: str) -> float:
        """Return the seconds for which lines have stayed away when a rule begins to apply."""
        found = self._rule(name)
        return float((found.expected_every_seconds if found is not None else None) or 0)

    def _rule(self, name: str) -> LogRule | None:
        """Return the rule of this name; None if the job has none, but an agent may have."""
        rules = self.live.spec.spec.diagnosis.log_rules
        return next((rule for rule in rules if rule.name == name), None)


def _in_words(found: list[tuple[NodeId, LogFinding]]) -> str:
    """Return what one rule has found on all nodes, in one line."""
    node_id, first = found[0]
    if first.verdict == "UNUSED":
        what = f"log rule {first.rule} is" if first.rule else "log rules are"
        return f"{what} not used on node {node_id}: {first.said}"
    if first.rule == NVML:
        texts = [f"node {name}: {finding.said}" for name, finding in found[:SHOWN]]
        more = f"; and {counted(len(found) - SHOWN, 'more node')}" if len(found) > SHOWN else ""
        return f"{'; '.join(texts)}{more}: {first.verdict}. Drain the node and test its GPUs"
    others = sum(len(finding.ranks) for _, finding in found) - 1
    more = f"; so do {counted(others, 'other rank')}" if others > 1 else ""
    more = "; so does 1 other rank" if others == 1 else more
    return f"log rule {first.rule}: {first.said} (node {node_id}){more}: {first.verdict}"
