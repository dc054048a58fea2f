"""What is known of a job, and what people are told first: problems, causes and progress.

All functions are pure.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from dlrover_py.protocol.agents import Progress
from dlrover_py.protocol.reasons import ConditionReason, ConditionType, EventReason
from dlrover_py.protocol.status import (
    Condition,
    DatasetStatus,
    GoodputStatus,
    JobEvent,
    JobStatus,
    LoaderStatus,
    StreamStatus,
    TablesStatus,
    TimeBucket,
)
from dlrover_py.protocol.words import counted, duration, plain

_GOOD_WHEN_TRUE = (
    ConditionType.ACCEPTED,
    ConditionType.MASTER_READY,
    ConditionType.JOURNAL_WRITABLE,
)
"""Conditions that are good when they are true. Others are good when they are false."""
_NEUTRAL = (
    ConditionType.SCALING_ACTIVE,
    ConditionType.RESOURCES_ADVISED,
    ConditionType.PODS_READY,
    ConditionType.RUNNING,
    ConditionType.SUCCEEDED,
    ConditionType.SUSPENDED,
    ConditionType.STOPPED,
)
"""Conditions that are neither good nor bad."""
_NO_HELP_NEEDED = (
    ConditionReason.FINISHED,
    ConditionReason.SUSPENDED,
    ConditionReason.WAITING,
    ConditionReason.CREATING,
)
"""Reasons of a master that is not ready, though no help is needed."""


@dataclass(frozen=True, slots=True)
class LogTail:
    """The newest lines of the logs of some workers, each with its origin."""

    lines: Sequence[str]
    """Complete lines. Those of one log are in their order."""
    growing: Sequence[str] = ()
    """The last line of each log that does not end with a newline. It may still grow."""


@dataclass(frozen=True, slots=True)
class JobView:
    """What is known of a job, on this machine or in a cluster."""

    name: str
    header_lines: Sequence[str]
    """Lines about the job's spec and the place where it runs."""
    phase: str
    reason: str
    status: JobStatus | None
    """The master's status; None if there is none yet."""
    conditions: Sequence[Condition]
    """The master's conditions, and in a cluster also the operator's."""
    events: Sequence[JobEvent]
    document: Mapping[str, object]
    """Everything, for ``--json``."""
    pods: Mapping[str, str] = field(default_factory=dict)
    """In a cluster: a description of each node's Pod."""
    notes: Sequence[str] = ()
    """What could not be read, and why."""
    new_hosts: str = ""
    """In a cluster: what the program that makes hosts says of a Pod that has no place."""

    @property
    def size_reason(self) -> str:
        """Why the job has its number of nodes; empty if it does not scale by itself."""
        for condition in self.conditions:
            if condition.type == ConditionType.SCALING_ACTIVE:
                return f"size: {condition.message}"
        return ""

    @property
    def resource_advice(self) -> str:
        """What is advised for memory and CPUs of its nodes; empty without ``resourceAdvice``."""
        for condition in self.conditions:
            if condition.type == ConditionType.RESOURCES_ADVISED:
                return condition.message
        return ""

    @property
    def problems(self) -> list[Condition]:
        """The conditions that report a problem."""
        return problems(self.conditions, self.status.round if self.status is not None else 0)


def problems(conditions: Iterable[Condition], rounds: int = 0) -> list[Condition]:
    """Return the conditions that report a problem, in their order.

    Left out are conditions that are neither good nor bad, and those with a reason that needs no
    help.

    Args:
        conditions: all conditions of a job.
        rounds: number of rounds that the job has formed. After the first one its command has
            joined.
    """
    found = []
    for condition in conditions:
        if condition.type in _NEUTRAL:
            continue
        if (
            condition.reason == ConditionReason.DOES_NOT_JOIN
            and condition.status == "True"
            and not rounds
        ):
            found.append(condition)
            continue
        good = "True" if condition.type in _GOOD_WHEN_TRUE else "False"
        if condition.status != good and condition.reason not in _NO_HELP_NEEDED:
            found.append(condition)
    return found


def problems_without_event(conditions: Iterable[Condition]) -> list[Condition]:
    """Return the problems that no event reports: a master that cannot write its journal."""
    return [c for c in problems(conditions) if c.type == ConditionType.JOURNAL_WRITABLE]


def problem_line(condition: Condition) -> str:
    """Return a problem as one line: its name and the first line of its message."""
    lines = condition.message.splitlines()
    label = condition.type if condition.status == "True" else f"not {condition.type}"
    label = condition.reason if condition.reason == ConditionReason.DOES_NOT_JOIN else label
    return plain(f"{label}: {lines[0] if lines else condition.reason}")


def outdated_nodes(status: JobStatus) -> int:
    """Return the number of present nodes that were made from an older template.

    It is 0 if that is not known, or if the job has ended.
    """
    if status.updated is None or status.phase.ended:
        return 0
    return max(0, status.ready - status.updated)


def progress_words(progress: Progress | None) -> str:
    """Return step, speed and the script's own metrics as text; empty without progress.

    A total or a speed of 0 is left out.
    """
    if progress is None:
        return ""
    of = f"/{progress.total}" if progress.total else ""
    speed = f", {progress.steps_per_s:.1f} steps/s" if progress.steps_per_s else ""
    metrics = "".join(f", {k} {v:.4g}" for k, v in progress.metrics.items())
    return plain(f"step {progress.step}{of}{speed}{metrics}")


_FINAL_REASONS = (EventReason.JOB_SUCCEEDED, EventReason.SUSPENDED)
"""Reasons of events that end a story without having a cause."""


def causal_chain(events: Sequence[JobEvent], round_number: int | None = None) -> list[JobEvent]:
    """Return the chain of causes that led to a round, or to the job's present state, oldest first.

    Other events between its first and its last one are part of it. The list is empty if no event is
    about the round, or none has a cause.
    """
    by_id = {e.id: e for e in events}
    ends = [
        e
        for e in events
        if e.reason in (EventReason.ROUND_FORMED, EventReason.TRAINING_RESUMED)
        or (round_number is None and (e.cause is not None or e.reason in _FINAL_REASONS))
    ]
    if round_number is not None:
        ends = [e for e in ends if e.round == round_number]
    if not ends:
        return []
    chain: dict[int, JobEvent] = {}
    last: JobEvent | None = ends[-1]
    while last is not None and last.id not in chain:
        chain[last.id] = last
        last = by_id.get(last.cause or 0)
    first = min(chain)
    # Other events in between belong to the story.
    return [e for e in events if first <= e.id <= ends[-1].id]


class TimeShare(TypedDict):
    """A part of the time that a job has taken."""

    what: str
    """What it was used for: a :class:`~dlrover_py.protocol.status.TimeBucket`."""
    share: float
    """The part, from 0 to 1."""
    seconds: float
    """Seconds that were used for it."""


def time_shares(goodput: GoodputStatus | None) -> list[TimeShare]:
    """Return where the time went: productive time first, then each other part, the largest first.

    It is empty before the job has begun.
    """
    if goodput is None or not goodput.wall_s:
        return []
    parts = sorted(goodput.seconds.items(), key=lambda i: (i[0] != TimeBucket.PRODUCTIVE, -i[1]))
    return [TimeShare(what=name, share=s / goodput.wall_s, seconds=s) for name, s in parts]


def tables_words(tables: TablesStatus) -> str:
    """Return what the servers of a parameter server have as one line."""
    line = f"{counted(len(tables.tables), 'table')} in {counted(tables.buckets, 'bucket')}"
    line += f" on {counted(len(tables.servers), 'server')}"
    line += " and further ones" if tables.unlisted_buckets else ""
    if tables.step:
        line += f", step {tables.step}"
    if tables.cut_step is not None:
        line += f", cut of step {tables.cut_step}"
    if tables.lost_buckets:
        line += f"; the rows of {counted(tables.lost_buckets, 'bucket')} are lost: ps.restore()"
    return line


def load_shares(tables: TablesStatus, leaving: Collection[str] = ()) -> dict[str, float]:
    """Return the load of each server as a multiple of the mean.

    It is empty if nothing was measured, or if the status of the job does not list all servers.

    Args:
        tables: The tables of a parameter server.
        leaving: Servers that are to leave. The mean is that of all others but standbys, as for the
            planner.
    """
    staying = [
        one.asked_per_s
        for one in tables.servers
        if one.id not in leaving
        and (not tables.standbys or one.leads or one.backs_up or one.receives)
    ]
    total = sum(staying)
    if not total or tables.unlisted_buckets:
        return {}
    return {one.id: one.asked_per_s * len(staying) / total for one in tables.servers}


def ceiling_line(goodput: GoodputStatus) -> str:
    """Return the best goodput that could be reached, and why; empty before the first failure."""
    best = goodput.ceiling
    if best is None:
        return ""
    reached = ""
    if goodput.share is not None and best.share > 0:
        reached = f", of which {100 * goodput.share / best.share:.1f}% is reached"
    return (
        f"ceiling {100 * best.share:.1f}%{reached}: one failure in {duration(best.between_s)}, "
        f"{duration(best.recovery_s)} to recover, {duration(goodput.save_s or 0.0)} for a save "
        f"(best: one in {duration(best.interval_s)})"
    )


def dataset_line(dataset: DatasetStatus) -> str:
    """Return how far the present epoch of a dataset with dynamic shards is, as one line."""
    epochs = f" of {dataset.epochs}" if dataset.epochs is not None else ""
    if dataset.epochs is not None and dataset.epoch >= dataset.epochs:
        line = f"{dataset.name}: all {counted(dataset.epochs, 'epoch')} are trained"
    else:
        line = f"{dataset.name}: epoch {dataset.epoch + 1}{epochs}, {dataset.finished} of "
        line += f"{counted(dataset.shards, 'shard')} finished, {dataset.begun} begun"
    line += f", {counted(dataset.samples, 'sample')} in an epoch"
    return line + (f", {dataset.quarantined} in quarantine" if dataset.quarantined else "")


def loader_line(loader: LoaderStatus) -> str:
    """Return how far the script's ``ElasticLoader`` is, as one line."""
    samples = counted(loader.samples, "sample")
    if loader.epoch and not loader.position:
        line = f"ElasticLoader: {counted(loader.epoch, 'epoch')} of {samples} trained"
    else:
        share = 100 * loader.position / max(1, loader.samples)
        line = f"ElasticLoader: epoch {loader.epoch + 1}, {loader.position} of {samples} trained"
        line += f" ({share:.0f}%)"
    return line + (f", {loader.batch} in a step" if loader.batch else "")


def stream_line(stream: StreamStatus) -> str:
    """Return how far a stream is trained as one line, with the partition that lags most."""
    text = f"{stream.name}: watermark {stream.watermark} or more in "
    text += f"{counted(stream.partition_count, 'partition')}, lag {stream.lag}"
    if stream.partitions and stream.lag:
        worst = stream.partitions[0]
        text += f", most in {worst.name} ({worst.watermark} of {worst.end})"
    return text + (", ended" if stream.ended else "")
