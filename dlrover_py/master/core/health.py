"""Which nodes are fit to train: plans checks of a few nodes each, and judges them.

A *step* checks disjoint groups at the same time. All new nodes are checked in pairs; who was in a
group that failed is checked anew with a node known to be good, or else alone, and whoever fails
again is bad. A node that is slow in two groups is slow. See docs/network-check.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.protocol.agents import CheckResult, Count
from dlrover_py.protocol.names import NodeId, id_key

SLOW = 2.0
"""Times the median, as DLRover."""

Group = tuple[NodeId, ...]


class Verdict(StrEnum):
    """What is known of a node."""

    OPEN = "open"  # not checked yet, or to be checked again
    GOOD = "good"
    BAD = "bad"
    SLOW = "slow"


NOT_BAD = (Verdict.OPEN, Verdict.GOOD)


class Mark(BaseModel):
    """What the checks have shown of one life of a node."""

    model_config = ConfigDict(allow_inf_nan=False)

    incarnation: Count
    exclude_slow: bool
    verdict: Verdict = Verdict.OPEN
    tried: list[Group] = Field(default_factory=list)
    """Groups that it was checked in."""
    failed: list[Group] = Field(default_factory=list)
    """Those of them that failed and may be its fault."""
    slow: Count = 0
    """Groups that it was slow in."""
    matmul_s: float = 0.0
    allreduce_s: float = 0.0
    nodes: Count = 0
    """In the group that ``allreduce_s`` was measured in."""

    @property
    def doubted(self) -> bool:
        """It is checked for another time."""
        return bool(self.failed or self.slow)


@dataclass(frozen=True, slots=True)
class Finding:
    """News of nodes. OPEN: they are in doubt, and checked again."""

    nodes: Group
    verdict: Verdict
    words: str


@dataclass(slots=True)
class _Trial:
    """A group of the running step."""

    nodes: Group
    results: dict[NodeId, CheckResult] = field(default_factory=dict)
    why: str = ""
    """It failed; the first that went wrong."""
    void: bool = False
    """A node of it is needed elsewhere or gone: it says nothing."""
    over: bool = False


class Health:
    """Verdicts, and the step that runs. ``number`` and ``marks`` outlive the master; a step does
    not, and is done again."""

    def __init__(self, number: int = 0, marks: dict[NodeId, Mark] | None = None) -> None:
        self.number = number
        self.marks = marks or {}
        self.open = {n for n, mark in self.marks.items() if mark.verdict is Verdict.OPEN}
        """Nodes without a verdict."""
        self.due = math.inf
        """When the running step must have ended."""
        self._trials: list[_Trial] = []
        self._trial_of: dict[NodeId, _Trial] = {}
        self._pending = 0
        """Groups that have not ended."""

    @property
    def runs(self) -> bool:
        """Whether a step runs."""
        return bool(self._trials)

    def enter(self, node: NodeId, incarnation: int, *, exclude_slow: bool) -> bool:
        """The node wishes to be checked; true if that is news."""
        mark = self.marks.get(node)
        if mark is not None and mark.incarnation == incarnation:
            return False
        self.forget(node)
        self.marks[node] = Mark(incarnation=incarnation, exclude_slow=exclude_slow)
        self.open.add(node)
        return True

    def forget(self, node: NodeId) -> None:
        """The node, or this life of it, goes or is gone."""
        self.marks.pop(node, None)
        self.open.discard(node)
        self.withdraw(node)

    def withdraw(self, node: NodeId) -> None:
        """The node is needed elsewhere; the others of its group are checked anew."""
        if trial := self._trial_of.get(node):
            trial.void = True
            self._end(trial)

    def decide(self, node: NodeId, verdict: Verdict) -> None:
        """This is known of the node from now on."""
        self.marks[node].verdict = verdict
        self.open.discard(node)

    def take(self, node: NodeId, number: int, result: CheckResult) -> None:
        """How a node did in the step of this number."""
        trial = self._trial_of.get(node)
        if number != self.number or trial is None or trial.over:
            return
        trial.results[node] = result
        if not result.passed:
            trial.why = f"{node}: {result.why}"
        if trial.why or len(trial.results) == len(trial.nodes):
            self._end(trial)

    def _end(self, trial: _Trial) -> None:
        self._pending -= not trial.over
        trial.over = True

    def expire(self, now: float, limit_s: float) -> None:
        """End what takes too long."""
        if now < self.due:
            return
        for trial in self._trials:
            late = [n for n in trial.nodes if n not in trial.results]
            if not trial.over:
                trial.why = f"{' and '.join(late)} did not finish within {limit_s:g} s"
                self._end(trial)

    # --- what a step has shown ---

    def judge(self) -> list[Finding]:
        """What is known now, once all groups of the step have ended."""
        if not self._trials or self._pending:
            return []
        trials, self._trials, self.due = self._trials, [], math.inf
        self._trial_of.clear()
        trials = [trial for trial in trials if not trial.void]
        for trial in trials:
            for node in trial.nodes:
                self._note(node, trial)
        findings = self._failed([trial for trial in trials if trial.why])
        # Medians over all that were ever measured: a node that comes alone is compared as well.
        matmul = self._medians("matmul_s", by_nodes=False)
        allreduce = self._medians("allreduce_s", by_nodes=True)
        for trial in trials:
            if not trial.why:
                findings += self._passed(trial, matmul.get(0, 0.0), allreduce)
        return findings

    def _note(self, node: NodeId, trial: _Trial) -> None:
        mark = self.marks[node]
        mark.tried.append(trial.nodes)
        if trial.why:
            return
        mark.failed = [group for group in mark.failed if group != trial.nodes]
        result = trial.results[node]
        mark.matmul_s = min(mark.matmul_s or math.inf, result.matmul_s)
        if len(trial.nodes) > 1:
            mark.allreduce_s, mark.nodes = result.allreduce_s, len(trial.nodes)

    def _medians(self, name: str, *, by_nodes: bool) -> dict[int, float]:
        times: dict[int, list[float]] = {}
        for mark in self.marks.values():
            if seconds := getattr(mark, name):
                times.setdefault(mark.nodes if by_nodes else 0, []).append(seconds)
        # Of two, the lower one: else no node could be slower than twice the median of a pair.
        return {nodes: median_low(known) for nodes, known in times.items()}

    def _failed(self, trials: Sequence[_Trial]) -> list[Finding]:
        guilty, doubted = [], []
        for trial in trials:
            for node in trial.nodes:
                mark = self.marks[node]
                mark.failed.append(trial.nodes)
                if mark.verdict is not Verdict.OPEN:
                    continue
                if self._trusted(trial.nodes, node) and len(mark.failed) > 1:
                    words = f"{trial.why} (it failed {_where(mark.failed, node)})"
                    guilty.append(Finding((node,), Verdict.BAD, words))
            if not guilty or guilty[-1].nodes[0] not in trial.nodes:
                doubted.append(Finding(trial.nodes, Verdict.OPEN, trial.why))
        for found in guilty:
            (node,) = found.nodes
            self.decide(node, Verdict.BAD)
            for name, mark in self.marks.items():
                if name != node:  # that explains what failed with it
                    mark.failed = [group for group in mark.failed if node not in group]
        return doubted + guilty

    def _trusted(self, nodes: Group, accused: NodeId) -> bool:
        """Whether the others of a group are known to work with everybody else."""
        others = [self.marks[n] for n in nodes if n != accused]
        return all(
            mark.verdict is Verdict.GOOD and all(accused in group for group in mark.failed)
            for mark in others
        )

    def _passed(
        self, trial: _Trial, matmul: float, allreduce: dict[int, float]
    ) -> Iterator[Finding]:
        alone = len(trial.nodes) == 1
        for node in trial.nodes:
            mark, result = self.marks[node], trial.results[node]
            if mark.verdict is not Verdict.OPEN:
                continue
            if alone and (mark.failed or (len(mark.tried) > 1 and not mark.slow)):
                continue  # that it works alone does not say that it works with others
            words, slow = _speed(trial, result), ""
            if result.matmul_s > SLOW * matmul:
                slow = f"a matmul took {result.matmul_s:.3g} s, the median is {matmul:.3g} s"
            elif not alone and result.allreduce_s > SLOW * allreduce[len(trial.nodes)]:
                median = f"{allreduce[len(trial.nodes)]:.3g} s"
                slow = f"an all-reduce took {result.allreduce_s:.3g} s, the median is {median}"
            if slow:
                mark.slow += 1
            if not slow or not mark.exclude_slow:
                mark.failed = []
                self.decide(node, Verdict.GOOD)
                yield Finding((node,), Verdict.GOOD, f"{words}, slow: {slow}" if slow else words)
            elif mark.slow > 1:
                self.decide(node, Verdict.SLOW)
                yield Finding((node,), Verdict.SLOW, f"slow in {_where(mark.tried, node)}: {slow}")
            else:
                yield Finding((node,), Verdict.OPEN, f"{node} is slow: {slow}")

    # --- the next step ---

    def plan(self, able: Sequence[NodeId], helpers: Sequence[NodeId]) -> list[Finding]:
        """Decide the groups of the next step, if there is one; findings where none would help.

        Args:
            able: nodes without a verdict that can be checked now.
            helpers: good ones that have nothing else to do.
        """
        groups: list[Group] = []
        findings: list[Finding] = []
        spare = sorted(helpers, key=lambda n: self.marks[n].matmul_s)
        fresh = [n for n in able if not self.marks[n].doubted]
        lone: list[NodeId] = []
        for node in (n for n in able if self.marks[n].doubted):
            mark = self.marks[node]
            if partner := self._partner(node, spare):
                spare.remove(partner)
                groups.append((partner, node))
            elif not mark.failed or (node,) not in mark.tried or (node,) in mark.failed:
                groups.append((node,))
            else:
                lone.append(node)  # it works alone, so its links are in doubt
        pairs = [(fresh[i], fresh[i + 1]) for i in range(0, len(fresh) - 1, 2)]
        odd = fresh[-1] if len(fresh) % 2 else None
        left = []
        while lone:
            node = lone.pop(0)
            if partner := self._partner(node, lone):
                lone.remove(partner)
                groups.append((node, partner))
            elif odd is not None and self._partner(node, [odd]):
                groups.append((node, odd))
                odd = None
            else:
                left.append(node)
        if odd is not None:
            if partner := self._partner(odd, spare):
                groups.append((partner, odd))
            elif pairs:
                groups.append((*pairs.pop(), odd))
            elif (odd,) not in self.marks[odd].tried:
                groups.append((odd,))
            else:  # what it failed with is known to be bad
                self.decide(odd, Verdict.GOOD)
                findings.append(Finding((odd,), Verdict.GOOD, "it works alone"))
        groups += pairs
        if left and not groups:  # before a link is blamed, it is tried for a second time
            for node in left:
                if partner := self._partner(node, [*left, *spare], tries=2):
                    groups.append((node, partner))
                    break
        if groups:
            self._trials = [_Trial(nodes) for nodes in groups]
            self._trial_of = {n: trial for trial in self._trials for n in trial.nodes}
            self._pending = len(groups)
            self.number += 1
        elif left:
            findings += self._settle(left, helpers)
        return findings

    @property
    def groups(self) -> list[Group]:
        """Of the running step."""
        return [trial.nodes for trial in self._trials]

    def _partner(self, node: NodeId, among: Sequence[NodeId], *, tries: int = 1) -> NodeId | None:
        """Somebody whom it was not paired with yet, or not so often."""
        met = [set(group) for group in self.marks[node].tried]
        return next((n for n in among if n != node and met.count({n, node}) < tries), None)

    def _settle(self, left: Sequence[NodeId], helpers: Sequence[NodeId]) -> Iterator[Finding]:
        """Each of these works alone, and there is nobody left to try it with: of two between which
        the link is bad, the one with fewer such links stays."""
        for node in left:
            mark = self.marks[node]
            while mark.verdict is Verdict.OPEN and mark.failed:
                party = sorted({n for group in mark.failed for n in group}, key=id_key)
                marks = self.marks
                party = [n for n in party if n in marks and marks[n].verdict in NOT_BAD]
                if party == [node]:
                    break
                worst = max((n for n in party if n in left or n in helpers), key=self._blame)
                self.decide(worst, Verdict.BAD)
                words = (
                    f"{' and '.join(party)} each work alone, but not together: a link between them "
                    f"is bad, and no other node can tell whose it is; {worst} is left out"
                )
                yield Finding((worst,), Verdict.BAD, words)
            if mark.verdict is Verdict.OPEN:
                self.decide(node, Verdict.GOOD)
                yield Finding((node,), Verdict.GOOD, "it works alone")

    def _blame(self, node: NodeId) -> tuple[int, bool, tuple[tuple[str, int], ...]]:
        mark = self.marks[node]
        met = {n for group in mark.failed for n in group}
        return len(met), mark.verdict is Verdict.OPEN, id_key(node)


def _where(groups: Sequence[Group], node: NodeId) -> str:
    """``n0`` was with: 'with n1, and with n2 and n3, and alone'."""
    words = [" and ".join(n for n in g if n != node) for g in groups]
    return ", and ".join(f"with {text}" if text else "alone" for text in words)


def _speed(trial: _Trial, result: CheckResult) -> str:
    words = f"matmul {result.matmul_s:.3g} s"
    if result.allreduce_s:
        words += f", all-reduce {result.allreduce_s:.3g} s"
    if result.algbw_gb_s:
        words += f", algbw {result.algbw_gb_s:.3g} GB/s, busbw {result.busbw_gb_s:.3g} GB/s"
    return words + (" (alone)" if len(trial.nodes) == 1 else "")
