"""Consequences of a failure: pure functions, each of which gives its reason in words."""

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypedDict, Unpack

from dlrover_py.protocol.agents import FailureKind, WorkerFailure
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.words import are, counted


class FailureAction(Enum):
    """An action after a failure."""

    RESTART = auto()  # new workers on the same nodes, in the next round
    REPLACE = auto()  # the node has used up its budget: a new node takes its place
    STOP = auto()  # the job fails


@dataclass(frozen=True, slots=True)
class FailureDecision:
    """The action that follows from a failure, with its reason."""

    action: FailureAction
    reason: EventReason
    """Reason of the event that follows."""
    message: str
    """The reason in a sentence."""


class Budgets(TypedDict):
    """The budgets of a node, and what it has used of them."""

    restarts: int
    """Failures charged to the node before this one."""
    budget: int
    """Failures that a node may have without steady progress."""
    relaunches: int
    """Nodes that were lost in the same place before."""
    relaunch_budget: int
    """Nodes that may be lost in one place without steady progress."""
    can_replace: bool
    """Whether the platform creates nodes."""


def after_worker_failure(
    failure: WorkerFailure,
    *,
    earlier: WorkerFailure | None,
    **budgets: Unpack[Budgets],
) -> FailureDecision:
    """Decide what follows from the death of a worker; nothing is counted here.

    The job is stopped if the same exception was raised again at the same step. Otherwise the
    budgets decide.

    Args:
        failure: The root cause of the round's end.
        earlier: The last exception that ended a round, if training has not been steady since.
        budgets: What the node has used of its budgets, and the budgets themselves.
    """
    if earlier is not None and repeats(failure, earlier):
        where = "after a similar time" if failure.step is None else f"at step {failure.step}"
        return FailureDecision(
            FailureAction.STOP,
            EventReason.NON_RETRYABLE,
            f"the same exception was raised again {where}, so another restart would not help: "
            f"{failure.message}",
        )
    return decide_by_budgets(failure.message, **budgets)


def decide_by_budgets(message: str, **budgets: Unpack[Budgets]) -> FailureDecision:
    """Decide what follows from a failure, by the budgets alone; nothing is counted here.

    The workers are restarted while the node has restarts left. Then the node is replaced, if the
    platform creates nodes and replacements are left. Otherwise the job is stopped.

    Args:
        message: The failure in words, for the reason of a stop.
        budgets: What the node has used of its budgets, and the budgets themselves.
    """
    restarts, budget = budgets["restarts"], budgets["budget"]
    if restarts < budget:
        return FailureDecision(
            FailureAction.RESTART, EventReason.WORKER_FAILED, f"restart {restarts + 1} of {budget}"
        )
    used = f"its {counted(budget, 'restart')} {are(budget)} used up without steady progress"
    if budgets["can_replace"] and budgets["relaunches"] < budgets["relaunch_budget"]:
        return FailureDecision(
            FailureAction.REPLACE, EventReason.RESTARTS_EXHAUSTED, f"{used}; it is replaced"
        )
    if not budget:
        used = "no restarts are allowed (restartCount, --max-restarts)"
        return FailureDecision(
            FailureAction.STOP, EventReason.RESTARTS_EXHAUSTED, f"{message}; {used}"
        )
    return FailureDecision(
        FailureAction.STOP, EventReason.RESTARTS_EXHAUSTED, f"{used}; the last failure: {message}"
    )


def repeats(failure: WorkerFailure, earlier: WorkerFailure) -> bool:
    """Return whether the same user exception came at the same step, or after a similar time.

    Without reported steps, the times from start to failure are compared. They may differ by a
    fifth, or by 2 s for early failures: start-up times vary that much on a busy machine. A forked
    worker may also be quicker by ``EARLY_S`` than one that was started cold, because the cold one
    had to import its modules. Other kinds of failures, and exceptions without a fingerprint, never
    count as repeated.
    """
    kind = FailureKind.EXCEPTION
    if failure.kind is not kind or earlier.kind is not kind:
        return False
    if not failure.fingerprint or failure.fingerprint != earlier.fingerprint:
        return False
    if failure.step is not None or earlier.step is not None:
        return failure.step == earlier.step
    if failure.forked != earlier.forked:
        cold, forked = sorted((failure, earlier), key=lambda one: one.forked)
        if forked.ran_s < cold.ran_s <= forked.ran_s + EARLY_S:
            return True
    return abs(failure.ran_s - earlier.ran_s) <= max(2.0, 0.2 * earlier.ran_s)


EARLY_S = 10.0
"""A worker that dies within this many seconds of its start may have died because of its fork."""


MAX_SUSPECT_WARM_STARTS = 2
"""Number of early deaths of forked workers that are attributed to the fork. After them, all workers
are started cold."""


def dies_early(failure: WorkerFailure) -> bool:
    """Return whether a worker died early, before a reported step, and was not killed."""
    return (
        failure.ran_s < EARLY_S
        and failure.step is None
        and failure.kind in (FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL)
        and failure.exit_code != -9
    )


def manner(failure: WorkerFailure) -> str:
    """Return a text that is the same for two deaths of the same kind, by the same exception."""
    return f"{failure.kind} {failure.exit_code} {failure.fingerprint}"


_NO_MEMORY = re.compile(
    r"^raised (\w+\.)*(OutOfMemoryError|MemoryError)\b|CUDA out of memory|can't allocate memory"
)
"""What the exceptions of Python and torch say when they get no memory."""


def ran_out_of_memory(failure: WorkerFailure) -> bool:
    """Return whether a worker died because it got no memory, of its host or of its GPU."""
    return bool(failure.out_of_memory or _NO_MEMORY.search(failure.message))


def relaunch_delay(relaunches: int, failed_before_report: int = 0) -> float:
    """Return the seconds before a lost node is replaced: none at first, then doubling up to 60.

    Args:
        relaunches: Nodes that were lost in the same place, this one included.
        failed_before_report: Nodes in a row, in the same place, that ended before their first
            report, for any reason. A host that refuses each node immediately must not be asked a
            thousand times.
    """
    tries = max(relaunches, failed_before_report)
    return 0.0 if tries <= 1 else min(60.0, 2.0 ** min(tries - 2, 6))  # 2**1024 is not a float


MOST_CHARS = 680
"""Characters of a failure's description that leave space for its cause in a Kubernetes event."""


def with_cause(message: str, failure: WorkerFailure) -> str:
    """Return the description of a failure, followed by its class and by what to do."""
    if failure.cause is None:
        return message
    if len(message) > MOST_CHARS:
        message = message[: MOST_CHARS - 1] + "…"
    return f"{message}. {failure.cause.line}"


def in_words(failure: WorkerFailure) -> str:
    """Describe a worker's death in one line."""
    worker = f"worker {failure.local_rank} (rank {failure.rank})"
    return f"{worker} {failure.message}"
