"""Plans and results of node checks, which find the nodes that are fit to train.

A *step* checks disjoint groups of nodes at the same time. All new nodes are checked in pairs. Each
node of a group that failed is checked again, with a node known to be good or else alone. A node
that fails again is bad. A node that is slow in two groups is slow. See docs/network-check.md.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic import dataclasses as records

from dlrover_py.protocol.agents import CheckResult, Count
from dlrover_py.protocol.names import NodeId, id_key
from dlrover_py.protocol.status import HostFault

SLOW = 2.0
"""A node is slow if it takes this many times the median, as in DLRover."""
LEAST_ALLREDUCE = 1.5
"""Times the usual all-reduce from which on it is slow, at least: it varies more than a matmul."""

Group = tuple[NodeId, ...]
"""Nodes that are checked together."""


class Verdict(StrEnum):
    """The state of knowledge about a node."""

    OPEN = "open"  # not checked yet, or to be checked again
    GOOD = "good"
    BAD = "bad"
    SLOW = "slow"


NOT_BAD = (Verdict.OPEN, Verdict.GOOD)
"""Verdicts of nodes that may still be fit to train."""


class NodeHealthRecord(BaseModel):
    """Results of the checks of one incarnation of a node."""

    model_config = ConfigDict(allow_inf_nan=False)

    incarnation: Count
    exclude_slow: bool
    """Whether the node may not train if it is slow."""
    verdict: Verdict = Verdict.OPEN
    tried: list[Group] = Field(default_factory=list)
    """Groups in which the node was checked."""
    failed: list[Group] = Field(default_factory=list)
    """Groups among ``tried`` that failed, possibly because of this node."""
    slow: Count = 0
    """Number of groups in which the node was slow."""
    matmul_s: float = 0.0
    """The shortest time of its matrix multiplication, in seconds; 0 if there is none."""
    allreduce_s: float = 0.0
    """Time of its last all-reduce, in seconds; 0 if there is none."""
    nodes: Count = 0
    """Size of the group in which ``allreduce_s`` was measured."""
    slow_from: Annotated[float, Field(ge=1)] = SLOW
    """The node is slow if it takes this many times the median."""

    @property
    def needs_recheck(self) -> bool:
        """Whether the node is checked again after a failed or slow check."""
        return bool(self.failed or self.slow)


@records.dataclass(slots=True, kw_only=True)
class JobHealthRecord:
    """All that outlives the master about the health of a job's nodes and hosts."""

    host_faults: list[HostFault] = field(default_factory=list)
    """The newest faults that are attributed to a host, for other jobs."""
    number: Count = 0
    """Number of the newest step of checks."""
    node_records: dict[NodeId, NodeHealthRecord] = field(default_factory=dict)
    """Results of each node."""
    confirmed: list[NodeId] = field(default_factory=list)
    """The node that is checked because its job is slow, and the nodes with it; empty if there is
    none."""
    confirmed_at: float = 0.0
    """When the last such check was begun (Unix time); 0 if there was none."""


@dataclass(frozen=True, slots=True)
class Finding:
    """New knowledge about nodes; with the verdict OPEN, they are in doubt and checked again."""

    nodes: Group
    verdict: Verdict
    message: str
    """Result of the check, in words."""
    void: bool = False
    """Whether the check says nothing about the nodes, so that they go on as before."""


@dataclass(slots=True)
class _CheckGroup:
    """One group of the running step."""

    nodes: Group
    results: dict[NodeId, CheckResult] = field(default_factory=dict)
    why: str = ""
    """The first failure of the group; empty if there was none."""
    void: bool = False
    """Whether the result does not count, because a node is gone or needed elsewhere."""
    over: bool = False
    """Whether the check of the group has ended."""


class Health:
    """The verdicts on all nodes, and the running step of checks.

    The record outlives the master, and is changed in place. A step that runs when the master ends
    is repeated.
    """

    def __init__(self, record: JobHealthRecord | None = None) -> None:
        self._record = record if record is not None else JobHealthRecord()
        self.node_records = self._record.node_records
        """Results of each node."""
        self.open = {n for n, record in self.node_records.items() if record.verdict is Verdict.OPEN}
        """Nodes without a verdict."""
        self.due = math.inf
        """Time at which the running step must have ended."""
        self._check_groups: list[_CheckGroup] = []
        self._check_group_of: dict[NodeId, _CheckGroup] = {}
        self._pending = 0
        """Number of groups that have not ended."""

    @property
    def number(self) -> int:
        """Number of the newest step."""
        return self._record.number

    def adopt_number(self, number: int) -> None:
        """Go on from a higher number, which an agent knows; a running step is dropped.

        Its nodes stay without a verdict, and are checked again.
        """
        self._record.number, self.due = number, math.inf
        self._check_groups, self._check_group_of, self._pending = [], {}, 0

    @property
    def runs(self) -> bool:
        """Whether a step runs."""
        return bool(self._check_groups)

    def enter(self, node: NodeId, incarnation: int, *, exclude_slow: bool) -> bool:
        """Register a node that asks to be checked.

        Args:
            node: Id of the node.
            incarnation: Its incarnation.
            exclude_slow: Whether it may not train if it is slow.

        Returns:
            True if the node now waits for a check, without the results of an earlier incarnation.
            False if this incarnation is registered already.
        """
        record = self.node_records.get(node)
        if record is not None and record.incarnation == incarnation:
            return False
        self.forget(node)
        self.node_records[node] = NodeHealthRecord(
            incarnation=incarnation, exclude_slow=exclude_slow
        )
        self.open.add(node)
        return True

    def reopen(self, suspect: NodeId, nodes: Mapping[NodeId, int], slow_from: float) -> None:
        """Have a node that has trained checked anew, with nodes that are thought to be good.

        Args:
            suspect: The node. It may not train any more if it is slow.
            nodes: All nodes of the check, and the incarnation of each.
            slow_from: The suspect is slow if it takes this many times the median.
        """
        for node, incarnation in nodes.items():
            self.forget(node)
            self.node_records[node] = NodeHealthRecord(
                incarnation=incarnation,
                exclude_slow=node == suspect,
                slow_from=slow_from if node == suspect else SLOW,
            )
            self.open.add(node)
        self._record.confirmed = [suspect, *(node for node in nodes if node != suspect)]

    @property
    def confirming(self) -> Sequence[NodeId]:
        """The suspect of the last :meth:`reopen` and the nodes with it; empty if that is over."""
        nodes = self._record.confirmed
        return nodes if any(node in self.open for node in nodes) else ()

    def forget(self, node: NodeId) -> None:
        """Drop a node that leaves or is gone, or the results of its earlier incarnation."""
        confirmed = self._record.confirmed
        if confirmed and node == confirmed[0]:  # the suspect: the others are like new nodes now
            self._record.confirmed = []
        elif node in confirmed:
            confirmed.remove(node)
        self.node_records.pop(node, None)
        self.open.discard(node)
        self.withdraw(node)

    def withdraw(self, node: NodeId) -> None:
        """Void the running check of a node that is needed elsewhere, or leaves, with its group.

        The others of the group that have no verdict are checked again. Nothing happens if the node
        is in no group of the running step.
        """
        if check_group := self._check_group_of.get(node):
            check_group.void = True
            self._end(check_group)

    def decide(self, node: NodeId, verdict: Verdict) -> None:
        """Set the verdict on a node."""
        self.node_records[node].verdict = verdict
        self.open.discard(node)

    def take(self, node: NodeId, number: int, result: CheckResult) -> None:
        """Take in a node's result in the running step.

        Results of other steps, and of groups that have ended, are ignored. A group ends with its
        first failure, or when all its nodes have passed. What follows is decided by :meth:`judge`.

        Args:
            node: Id of the node.
            number: Number of the step that the result belongs to.
            result: The result.
        """
        check_group = self._check_group_of.get(node)
        if number != self.number or check_group is None or check_group.over:
            return
        check_group.results[node] = result
        if not result.passed:
            check_group.why = f"{node}: {result.why}"
        if check_group.why or len(check_group.results) == len(check_group.nodes):
            self._end(check_group)

    def _end(self, check_group: _CheckGroup) -> None:
        """End the check of a group."""
        self._pending -= not check_group.over
        check_group.over = True

    def expire(self, now: float, limit_s: float) -> None:
        """End the running step if its time is over: unfinished groups have failed.

        Before that time, or without a step, nothing happens. The findings come from :meth:`judge`.

        Args:
            now: Monotonic time.
            limit_s: The time limit, for the message.
        """
        if now < self.due:
            return
        for check_group in self._check_groups:
            late = [n for n in check_group.nodes if n not in check_group.results]
            if not check_group.over:
                check_group.why = f"{' and '.join(late)} did not finish within {limit_s:g} s"
                self._end(check_group)

    # --- Evaluation of a step ---

    def judge(self) -> list[Finding]:
        """Evaluate the step once all its groups have ended; return what is new.

        The step is then over. Results and verdicts are entered into the records of the nodes.

        Returns:
            Empty if no step runs, or some groups have not ended. Voided groups give no finding.
        """
        if not self._check_groups or self._pending:
            return []
        check_groups, self._check_groups, self.due = self._check_groups, [], math.inf
        self._check_group_of.clear()
        check_groups = [check_group for check_group in check_groups if not check_group.void]
        suspect = next(iter(self.confirming), None)
        for check_group in check_groups:
            if suspect is not None and check_group.why and suspect not in check_group.nodes:
                return self._give_up(check_group.why)
        for check_group in check_groups:
            for node in check_group.nodes:
                self._record_result(node, check_group)
        findings = self._find_bad_nodes(
            [check_group for check_group in check_groups if check_group.why]
        )
        # The medians include all earlier results, so that a node that comes alone is compared too.
        matmul = self._medians("matmul_s", by_nodes=False)
        allreduce = self._medians("allreduce_s", by_nodes=True)
        if suspect is not None:
            matmul, allreduce = self._witnessed(suspect, check_groups)
        for check_group in check_groups:
            if not check_group.why:
                findings += self._judge_passed(check_group, matmul.get(0, 0.0), allreduce)
        if not self.confirming:
            self._record.confirmed = []
        return findings

    def _record_result(self, node: NodeId, check_group: _CheckGroup) -> None:
        """Enter the result of a group into the node's record; a failure adds no measurements."""
        record = self.node_records[node]
        record.tried.append(check_group.nodes)
        if check_group.why:
            return
        record.failed = [group for group in record.failed if group != check_group.nodes]
        result = check_group.results[node]
        record.matmul_s = min(record.matmul_s or math.inf, result.matmul_s)
        if len(check_group.nodes) > 1:
            record.allreduce_s, record.nodes = result.allreduce_s, len(check_group.nodes)

    def _medians(self, name: str, *, by_nodes: bool) -> dict[int, float]:
        """Return the median of a measurement, by group size if wanted, else under the key 0."""
        times: dict[int, list[float]] = {}
        for record in self.node_records.values():
            if seconds := getattr(record, name):
                times.setdefault(record.nodes if by_nodes else 0, []).append(seconds)
        # The lower one of two: otherwise no node could be slower than twice the median of a pair.
        return {nodes: median_low(known) for nodes, known in times.items()}

    def _give_up(self, why: str) -> list[Finding]:
        """Let all nodes of a confirmation train again: the check also fails without the suspect.

        Then the failure says nothing about the suspect, and the others have trained until now.
        """
        nodes = [node for node in self.confirming if node in self.open]
        for node in nodes:
            self.decide(node, Verdict.GOOD)
        self._record.confirmed = []
        return [Finding((node,), Verdict.GOOD, why, void=True) for node in nodes]

    def _witnessed(
        self, suspect: NodeId, check_groups: Sequence[_CheckGroup]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the times with which a suspect is compared, as :meth:`_medians` does.

        Earlier checks do not count: the machines may have been cooler then. An all-reduce is
        compared with the slowest one of the same size without the suspect, of this step or the one
        before, because good groups differ, too; without such a group, with nothing.
        """
        known = [self.node_records[n].matmul_s for n in self.confirming if n != suspect]
        measured = [seconds for seconds in known if seconds]
        slowest: dict[int, float] = {}
        for node in self.confirming:
            record = self.node_records[node]
            if record.allreduce_s and suspect not in record.tried[-1]:
                before = slowest.get(record.nodes, 0.0)
                slowest[record.nodes] = max(before, record.allreduce_s)
        for group in check_groups:
            slowest.setdefault(len(group.nodes), math.inf)
        return {0: median_low(measured) if measured else math.inf}, slowest

    def _find_bad_nodes(self, check_groups: Sequence[_CheckGroup]) -> list[Finding]:
        """Find the bad nodes of failed groups; other nodes without a verdict are in doubt.

        A node is bad if it has failed more than once, and all other nodes of its group are good.
        The failures that a bad node explains are removed from the records of the others.

        Returns:
            One finding for each group without a bad node, then one for each bad node.
        """
        bad, needs_recheck = [], []
        for check_group in check_groups:
            for node in check_group.nodes:
                record = self.node_records[node]
                record.failed.append(check_group.nodes)
                if record.verdict is not Verdict.OPEN:
                    continue
                if self._others_are_good(check_group.nodes, node) and len(record.failed) > 1:
                    message = f"{check_group.why} (it failed {_where(record.failed, node)})"
                    bad.append(Finding((node,), Verdict.BAD, message))
            if not bad or bad[-1].nodes[0] not in check_group.nodes:
                needs_recheck.append(Finding(check_group.nodes, Verdict.OPEN, check_group.why))
        for found in bad:
            (node,) = found.nodes
            self.decide(node, Verdict.BAD)
            for name, record in self.node_records.items():
                if name != node:  # the bad node explains the failures of its groups
                    record.failed = [group for group in record.failed if node not in group]
        return needs_recheck + bad

    def _others_are_good(self, nodes: Group, suspect: NodeId) -> bool:
        """Return whether all other nodes of a group are good, and failed only with the suspect."""
        others = [self.node_records[n] for n in nodes if n != suspect]
        return all(
            record.verdict is Verdict.GOOD and all(suspect in group for group in record.failed)
            for record in others
        )

    def _judge_passed(
        self, check_group: _CheckGroup, matmul: float, allreduce: dict[int, float]
    ) -> Iterator[Finding]:
        """Judge the nodes of a group that passed, by their speed.

        A slow node whose record has ``exclude_slow`` is in doubt the first time. The second time,
        its verdict is ``SLOW``. All other nodes are good. Nodes that have a verdict are left out.
        So are nodes that passed alone after a failure. Each verdict is set when its finding is
        taken from the iterator.

        Args:
            check_group: The group.
            matmul: Median of the matrix multiplications of all nodes, in seconds.
            allreduce: Median of the all-reduces, in seconds, by size of the group.
        """
        alone = len(check_group.nodes) == 1
        for node in check_group.nodes:
            record, result = self.node_records[node], check_group.results[node]
            if record.verdict is not Verdict.OPEN:
                continue
            if alone and (record.failed or (len(record.tried) > 1 and not record.slow)):
                continue  # that it works alone does not show that it works with others
            message, slow = _speed(check_group, result), ""
            if result.matmul_s > record.slow_from * matmul:
                slow = f"a matmul took {result.matmul_s:.3g} s, the median is {matmul:.3g} s"
            elif not alone and result.allreduce_s > (
                max(record.slow_from, LEAST_ALLREDUCE) * allreduce[len(check_group.nodes)]
            ):
                median = f"{allreduce[len(check_group.nodes)]:.3g} s"
                slow = f"an all-reduce took {result.allreduce_s:.3g} s, the median is {median}"
            if slow:
                record.slow += 1
            if not slow or not record.exclude_slow:
                record.failed = []
                self.decide(node, Verdict.GOOD)
                yield Finding(
                    (node,), Verdict.GOOD, f"{message}, slow: {slow}" if slow else message
                )
            elif record.slow > 1:
                self.decide(node, Verdict.SLOW)
                yield Finding((node,), Verdict.SLOW, f"slow {_where(record.tried, node)}: {slow}")
            else:
                yield Finding((node,), Verdict.OPEN, f"{node} is slow: {slow}")

    # --- Plan of the next step ---

    def plan(self, able: Sequence[NodeId], helpers: Sequence[NodeId]) -> list[Finding]:
        """Start the next step of checks, if there is anything to check; no step may run.

        Agents are informed by the caller. Without a group to check, no step starts, and the number
        of the newest step stays.

        Args:
            able: Nodes without a verdict that can be checked now.
            helpers: Good nodes that are idle.

        Returns:
            Verdicts on nodes for which no further check would help.
        """
        groups: list[Group] = []
        spare = sorted(helpers, key=lambda n: self.node_records[n].matmul_s)
        fresh = [n for n in able if not self.node_records[n].needs_recheck]
        works_alone: list[NodeId] = []
        for node in (n for n in able if self.node_records[n].needs_recheck):
            record = self.node_records[node]
            if partner := self._partner(node, spare):
                spare.remove(partner)
                groups.append((partner, node))
            elif not record.failed or (node,) not in record.tried or (node,) in record.failed:
                groups.append((node,))
            else:
                works_alone.append(node)  # it works alone, so its links are in doubt
        pairs = [(fresh[i], fresh[i + 1]) for i in range(0, len(fresh) - 1, 2)]
        unpaired = fresh[-1] if len(fresh) % 2 else None
        left = []
        while works_alone:
            node = works_alone.pop(0)
            if partner := self._partner(node, works_alone):
                works_alone.remove(partner)
                groups.append((node, partner))
            elif unpaired is not None and self._partner(node, [unpaired]):
                groups.append((node, unpaired))
                unpaired = None
            else:
                left.append(node)
        if unpaired is not None:
            if partner := self._partner(unpaired, spare):
                groups.append((partner, unpaired))
            elif pairs:
                groups.append((*pairs.pop(), unpaired))
            elif (unpaired,) not in self.node_records[unpaired].tried:
                groups.append((unpaired,))
        groups += pairs
        if left and not groups:  # a link is tried twice before it is blamed
            for node in left:
                if partner := self._partner(node, [*left, *spare], tries=2):
                    groups.append((node, partner))
                    break
        if groups:
            self._check_groups = [_CheckGroup(nodes) for nodes in groups]
            self._check_group_of = {
                n: check_group for check_group in self._check_groups for n in check_group.nodes
            }
            self._pending = len(groups)
            self._record.number += 1
            return []  # a node that only works alone waits: a good node may be idle then
        findings = list(self._decide_bad_links(left, helpers))
        if unpaired is not None:  # the nodes that it failed with are known to be bad
            self.decide(unpaired, Verdict.GOOD)
            findings.append(Finding((unpaired,), Verdict.GOOD, "it works alone"))
        return findings

    @property
    def groups(self) -> list[Group]:
        """Groups of the running step."""
        return [check_group.nodes for check_group in self._check_groups]

    def _partner(self, node: NodeId, among: Sequence[NodeId], *, tries: int = 1) -> NodeId | None:
        """Return the first of ``among`` with which ``node`` was paired fewer than ``tries`` times.

        Returns:
            None if there is none.
        """
        partners = [set(group) for group in self.node_records[node].tried]
        return next((n for n in among if n != node and partners.count({n, node}) < tries), None)

    def _decide_bad_links(
        self, left: Sequence[NodeId], helpers: Sequence[NodeId]
    ) -> Iterator[Finding]:
        """Decide on nodes that each work alone and have no partner left.

        If a link between two nodes is bad, the one with more bad links is excluded, but only a node
        of ``left`` or of ``helpers`` (good nodes that are idle). A node that is not excluded is
        good. Each verdict is set when its finding is taken from the iterator.
        """
        for node in left:
            record = self.node_records[node]
            while record.verdict is Verdict.OPEN and record.failed:
                involved = sorted({n for group in record.failed for n in group}, key=id_key)
                node_records = self.node_records
                involved = [
                    n for n in involved if n in node_records and node_records[n].verdict in NOT_BAD
                ]
                if involved == [node]:
                    break
                worst = max((n for n in involved if n in left or n in helpers), key=self._blame_key)
                self.decide(worst, Verdict.BAD)
                message = (
                    f"{' and '.join(involved)} each work alone, but not together: a link between "
                    "them is bad. No other node can show whose link it is, so "
                    f"{worst} is excluded"
                )
                yield Finding((worst,), Verdict.BAD, message)
            if record.verdict is Verdict.OPEN:
                self.decide(node, Verdict.GOOD)
                yield Finding((node,), Verdict.GOOD, "it works alone")

    def _blame_key(self, node: NodeId) -> tuple[int, bool, tuple[tuple[str, int], ...]]:
        """Return a sort key: the node with the highest key is blamed for a bad link."""
        record = self.node_records[node]
        partners = {n for group in record.failed for n in group}
        return len(partners), record.verdict is Verdict.OPEN, id_key(node)


def _where(groups: Sequence[Group], node: NodeId) -> str:
    """Name the partners of ``node`` in words: 'with n1, and with n2 and n3, and alone'."""
    message = [" and ".join(n for n in g if n != node) for g in groups]
    return ", and ".join(f"with {text}" if text else "alone" for text in message)


def _speed(check_group: _CheckGroup, result: CheckResult) -> str:
    """Describe the measurements of a node."""
    message = f"matmul {result.matmul_s:.3g} s"
    if result.allreduce_s:
        message += f", all-reduce {result.allreduce_s:.3g} s"
    if result.algbw_gb_s:
        message += f", algbw {result.algbw_gb_s:.3g} GB/s, busbw {result.busbw_gb_s:.3g} GB/s"
    return message + (" (alone)" if len(check_group.nodes) == 1 else "")
