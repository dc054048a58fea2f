"""What is known of a job that stands still: snapshots of its workers, verdicts, and bundles.

The master asks for a snapshot with the next assignment (``Assignment.snapshot``). Each agent of
the round answers with one :class:`NodeSnapshot`. A verdict is made from all of them. Agents of the
first nodes, and those on which a worker has failed, also send one at the end of a round that a
fault ends.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from dlrover_py.protocol.agents import (
    BootId,
    Count,
    Counted,
    StatusMessage,
    Wire,
    Words,
    WorkerFailure,
    cut,
)
from dlrover_py.protocol.rank_ranges import RankRange

MAX_FRAMES = 48
"""Most frames of a stack, the innermost ones."""
MAX_THREADS = 16
"""Most threads of a worker beside its main thread."""
MAX_COLLECTIVES = 64
"""Most collectives of a worker, the newest ones of each group."""
MAX_SNAPSHOT_BYTES = 200_000
"""Greatest size of a node's snapshot, in bytes of JSON."""
MAX_SNAPSHOT_OF_ALL_BYTES = 16_000_000
"""Greatest size of the snapshots of all nodes together, as far as LEAST_SNAPSHOT_BYTES allows it.
The master has five times as much in memory."""
LEAST_SNAPSHOT_BYTES = 6_000
"""A node may send as much in a job of any size."""
MAX_LAST_BYTES = 64_000
"""Greatest size of a snapshot at the end of a round: many nodes send it as the next one starts."""
MAX_LINES = 40
"""Most lines of a worker's output, the last ones."""
LAST_LOOK_NODES = 16
"""Nodes of a round, the first ones, that send a snapshot at its end though no worker has failed
there. All ranks of a job do the same, and the master must not be busy with their stacks then."""

Short = Annotated[str, StringConstraints(max_length=256), cut(256)]
"""Text of a worker, which is cut and never refused."""


class Frame(Wire):
    """One call on a Python stack."""

    function: Short
    """Name of the function."""
    file: Short = ""
    """Path of its file."""
    line: Counted = 0
    """Line that runs."""


class ThreadStack(Wire):
    """The Python stack of a thread beside the main thread."""

    name: Short = ""
    """Name of the thread."""
    frames: list[Frame] = Field(default_factory=list, max_length=MAX_FRAMES)
    """Its calls, the innermost first."""


class Collective(Wire):
    """A collective that a worker has entered, from the flight record of torch."""

    group: Short
    """Name of the process group."""
    backend: Short = ""
    """The backend that runs it, such as ``gloo``. A group has one for each kind of device."""
    seq: Counted
    """Number of the collective in its group and backend: equal numbers belong together."""
    op: Short
    """Name of the operation, such as ``all_reduce``."""
    shape: Short = ""
    """Sizes and types of its input."""
    open: bool = False
    """Whether it has not ended."""
    age_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds since the worker entered it."""
    ranks: list[RankRange] = Field(default_factory=list, max_length=4096)
    """Global ranks of the group; empty if they are not known."""


class WorkerSnapshot(Wire):
    """One worker at the time of a snapshot."""

    rank: Count
    """Its rank in the round."""
    local_rank: Count
    """Its rank on its node."""
    pid: Count = 0
    """Its process id; 0 if it has ended, or has no process yet."""
    starting: bool = False
    """Whether it has no process yet: a warm start waits until its modules are imported."""
    state: Annotated[str, StringConstraints(max_length=1)] = ""
    """State of its process as in /proc/PID/stat: R runs, S sleeps, D waits for a device or a file
    system, T was stopped by a signal. Empty without a process."""
    wchan: Short = ""
    """Function of the kernel in which its main thread waits; empty if it is not known."""
    kernel: list[Short] = Field(default_factory=list, max_length=32)
    """Its kernel stack, where this may be read."""
    cpu: Annotated[float, Field(ge=0)] = 0.0
    """CPU time of it and its child processes while the snapshot was taken, in cores."""
    io_bytes_per_s: Annotated[float, Field(ge=0)] = 0.0
    """What it and its child processes read and wrote at that time, in files and devices."""
    stack: list[Frame] = Field(default_factory=list, max_length=MAX_FRAMES)
    """Python stack of its main thread, the innermost call first."""
    threads: list[ThreadStack] = Field(default_factory=list, max_length=MAX_THREADS)
    """Its other threads."""
    collectives: list[Collective] = Field(default_factory=list, max_length=MAX_COLLECTIVES)
    """Its newest collectives, the oldest first."""
    recorded: bool = False
    """Whether ``collectives`` could be read. If not, nothing is known of them."""
    remarks: list[Short] = Field(default_factory=list, max_length=8)
    """What could not be read, and why."""
    failure: WorkerFailure | None = None
    """How it has failed; absent if it has not. Only at the end of a round."""
    output: list[Short] = Field(default_factory=list, max_length=MAX_LINES)
    """The last lines of its standard error. Only at the end of a round."""

    @property
    def ended(self) -> bool:
        """Whether it had a process, which has ended."""
        return not self.pid and not self.starting


class NodeSnapshot(Wire):
    """All workers of a node at the time of a snapshot, from its agent."""

    boot_id: BootId
    """The agent process."""
    number: Count
    """Number of the snapshot, from the assignment; 0 at the end of a round that a fault ends."""
    round: Count
    """The round of the workers."""
    workers: list[WorkerSnapshot] = Field(default_factory=list, max_length=1024)
    """The workers."""

    def fitted(self, max_bytes: int = MAX_SNAPSHOT_BYTES) -> "NodeSnapshot":
        """Return this snapshot within a size.

        Other threads go first, then outer frames and old lines, then tracebacks. A worker that is
        in an open collective waits for others, so its frames go before those of the others.
        """
        found = self
        for waiting, other, collectives in (
            (24, 24, 16),
            (3, 24, 6),
            (0, 8, 4),
            (0, 3, 4),
            (0, 0, 4),
        ):
            if len(found.model_dump_json(exclude_defaults=True).encode()) <= max_bytes:
                return found
            workers = [
                _cut(w, waiting if any(one.open for one in w.collectives) else other, collectives)
                for w in self.workers
            ]
            found = self.model_copy(update={"workers": workers})
        return found


def max_snapshot_bytes(nodes: int) -> int:
    """Return the greatest size of a node's snapshot in a job with so many nodes, in bytes."""
    share = MAX_SNAPSHOT_OF_ALL_BYTES // max(1, nodes)
    return min(MAX_SNAPSHOT_BYTES, max(LEAST_SNAPSHOT_BYTES, share))


def _cut(worker: WorkerSnapshot, frames: int, collectives: int) -> WorkerSnapshot:
    """Return a worker without other threads, and with so many innermost frames and collectives."""
    failure = worker.failure
    if failure is not None and not frames:
        failure = failure.model_copy(update={"traceback": ""})
    return worker.model_copy(
        update={
            "threads": [],
            "stack": worker.stack[:frames],
            "kernel": [],
            "collectives": _needed(worker.collectives, collectives),
            "output": worker.output[-frames:] if frames else [],
            "failure": failure,
        }
    )


def _needed(collectives: Sequence[Collective], most: int) -> list[Collective]:
    """Return so many collectives, in their order.

    The oldest open one of each group comes first: it says that the worker waits. Then comes the
    newest one of each group: it says how far the worker is. Newer ones come before older ones.
    """
    oldest_open: dict[tuple[str, str], int] = {}
    newest: dict[tuple[str, str], int] = {}
    for index, one in enumerate(collectives):
        place = (one.group, one.backend)
        newest[place] = index
        if one.open:
            oldest_open.setdefault(place, index)
    order = [*oldest_open.values(), *newest.values(), *range(len(collectives) - 1, -1, -1)]
    kept = list(dict.fromkeys(order))[:most]
    return [collectives[index] for index in sorted(kept)]


class EvidenceKind(StrEnum):
    """The event to which a bundle of evidence belongs."""

    HANG = "hang"  # the job may stand still
    REQUEST = "request"  # a user has asked for it
    SLOW = "slow"  # steps have become slower
    WRONG = "wrong"  # values are wrong
    FAILURE = "failure"  # a worker has failed, or was made to fail by a verdict
    LOST = "lost"  # nodes were lost with their agents


class HangKind(StrEnum):
    """Why a job stands still."""

    FROZEN = "frozen"  # a process was stopped by a signal
    ENDED = "ended"  # a worker has ended, and others wait for it
    MISMATCH = "mismatch"  # ranks are in different collectives of the same number
    NOT_ENTERED = "not-entered"  # a rank has not entered the collective in which others wait
    GROUPS = "groups"  # ranks wait for each other in several process groups
    NO_PROGRESS = "no-progress"  # all ranks have entered the collective, and it does not end
    CODE = "code"  # no collective is open: the code itself stands still
    UNKNOWN = "unknown"  # the evidence does not show it


class Cause(StrEnum):
    """What the guilty rank does, by its stack."""

    DATA = "data"  # it waits for its data loader
    STORAGE = "storage"  # it waits for a device or a file system, or saves a checkpoint
    CODE = "code"  # it is in the user's code
    PROCESS = "process"  # its process does not run
    COLLECTIVE = "collective"  # it is in a collective
    UNKNOWN = "unknown"


class SlowKind(StrEnum):
    """Why a job is slow."""

    DATA = "data"  # a node waits for its data loader
    CODE = "code"  # the garbage collector, or all nodes compute longer
    NEIGHBOUR = "neighbour"  # others take the CPU, or the limit of the container is reached
    MACHINE = "machine"  # one node alone computes longer
    LINK = "link"  # a connection between two nodes is slow, or the network is
    STAGE = "stage"  # a place in the model has more to compute than the others
    UNKNOWN = "unknown"  # nothing that is measured has grown


class HangVerdict(StatusMessage):
    """The result of a snapshot: why the job stands still."""

    kind: HangKind
    """Why."""
    cause: Cause = Cause.UNKNOWN
    """What the first of ``ranks`` does."""
    ranks: list[Count] = Field(default_factory=list, max_length=64)
    """The ranks that the others wait for; empty if no rank is singled out."""
    sure: bool = False
    """Whether the evidence leaves no other explanation, so that the round may be restarted."""
    busy: bool = False
    """Whether the guilty rank uses its CPU: it may only be slow."""
    message: Words = ""
    """The verdict in one line."""
