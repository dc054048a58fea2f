"""What follows from a failure: plain functions, each answer with its reason in words."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypedDict, Unpack

from dlrover_py.protocol.agents import FailureKind, WorkerFailure
from dlrover_py.protocol.words import are, counted


class Remedy(Enum):
    """What to do about a failure."""

    RESTART = auto()  # new workers on the same nodes, in the next round
    REPLACE = auto()  # the node has used up its budget: a new one in its place
    STOP = auto()  # the job fails


@dataclass(frozen=True, slots=True)
class Ruling:
    """A remedy and its reason."""

    remedy: Remedy
    reason: str
    """A fixed CamelCase word."""
    message: str


class Budgets(TypedDict):
    """What a node has used up, and what it may."""

    restarts: int
    """Failures charged to it so far, without this one."""
    budget: int
    """Failures that a node may have without steady progress."""
    relaunches: int
    """Nodes that were lost in its place before."""
    relaunch_budget: int
    """As many may be."""
    can_replace: bool
    """Whether the platform creates nodes."""


def after_worker_failure(
    failure: WorkerFailure,
    *,
    earlier: WorkerFailure | None,
    **budgets: Unpack[Budgets],
) -> Ruling:
    """What follows from a worker's death.

    Args:
        failure: the root cause of the round's end.
        earlier: the last exception that ended a round, if no new ground was gained since.
        budgets: what the node has used up, and what it may.
    """
    if earlier is not None and repeats(failure, earlier):
        where = "after a like time" if failure.step is None else f"at step {failure.step}"
        return Ruling(
            Remedy.STOP,
            "NonRetryable",
            f"the same exception came again {where}, so another restart would not help: "
            f"{failure.message}",
        )
    return after_restart(failure.message, **budgets)


def after_restart(message: str, **budgets: Unpack[Budgets]) -> Ruling:
    """What the budgets allow after a failure that the message tells of."""
    restarts, budget = budgets["restarts"], budgets["budget"]
    if restarts < budget:
        return Ruling(Remedy.RESTART, "WorkerFailed", f"restart {restarts + 1} of {budget}")
    used = f"its {counted(budget, 'restart')} {are(budget)} used up without steady progress"
    if budgets["can_replace"] and budgets["relaunches"] < budgets["relaunch_budget"]:
        return Ruling(Remedy.REPLACE, "RestartsExhausted", f"{used}; it is replaced")
    return Ruling(Remedy.STOP, "RestartsExhausted", f"{used}; the last failure was: {message}")


def repeats(failure: WorkerFailure, earlier: WorkerFailure) -> bool:
    """Whether the same user exception came at the same step, or after a like time.

    Without reported steps the time to the failure stands in: within a fifth, or 2 s for those
    that fail early (start-up times scatter that much on a busy machine).
    """
    kind = FailureKind.EXCEPTION
    if failure.kind is not kind or earlier.kind is not kind:
        return False
    if not failure.fingerprint or failure.fingerprint != earlier.fingerprint:
        return False
    if failure.step is not None or earlier.step is not None:
        return failure.step == earlier.step
    return abs(failure.ran_s - earlier.ran_s) <= max(2.0, 0.2 * earlier.ran_s)


EARLY_S = 10.0


def in_doubt(failure: WorkerFailure) -> bool:
    """Whether a forked worker's death may be the fork's fault: early, and not from outside."""
    return (
        failure.forked
        and failure.ran_s < EARLY_S
        and failure.step is None
        and failure.kind in (FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL)
        and failure.exit_code != -9
    )


def relaunch_delay(relaunches: int, unheard: int = 0) -> float:
    """Seconds before a lost node is replaced: none at first, then doubling up to a minute.

    Args:
        relaunches: nodes that were lost in its place, this one included.
        unheard: those of the last ones that never spoke, whoever is to blame: a host that refuses
            each node at once must not be asked a thousand times.
    """
    tries = max(relaunches, unheard)
    return 0.0 if tries <= 1 else min(60.0, 2.0 ** min(tries - 2, 6))  # 2**1024 is no float


def in_words(failure: WorkerFailure) -> str:
    """One line on a worker's death."""
    who = f"worker {failure.local_rank} (rank {failure.rank})"
    return f"{who} {failure.message}"
