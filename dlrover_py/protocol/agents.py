"""The messages between an agent and its master: :class:`AgentReport` up, :class:`Assignment` down.

Both are complete documents. A message that is lost, repeated or late does no harm, because numbers
that only grow say which message is newer. These are ``seq``, ``follows`` and ``incarnation`` in a
report, and ``term``, ``version`` and ``round`` in an assignment. The paths of the HTTP API have its
version (:mod:`dlrover_py.protocol.versions`).
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import MAX_COUNT, Round, Step, Timeline
from dlrover_py.protocol.sdk import MAX_LOADER_WORKERS, MAX_MICRO_BATCH, MAX_TUNING
from dlrover_py.protocol.timing import Timing

_TIMING = Timing()
"""The default times of a master."""
Name = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
]
"""A name in the form of a DNS subdomain, of at most 253 characters."""
Line = Annotated[str, StringConstraints(max_length=1024)]
"""A short text that DLRover-Py has made; a longer one is refused."""


def sendable(text: str) -> str:
    """Return text that UTF-8 can encode.

    Bytes that Python could not decode, such as those of a path or of an environment variable,
    become question marks.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def cut(most: int) -> BeforeValidator:
    """Return a validator that cuts text to a number of characters; the last one is then ``…``.

    It leaves other values to the checks that follow.
    """

    def shorten(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        value = sendable(value)
        return value if len(value) <= most else value[: most - 1] + "…"

    return BeforeValidator(shorten)


Words = Annotated[str, StringConstraints(max_length=1024), cut(1024)]
"""Text for people, which may contain text of the user: it is cut, and never refused."""
COUNT = Field(ge=0, le=MAX_COUNT)
"""A number that only grows, or a size."""
Count = Annotated[int, COUNT]
Counted = Annotated[int, Field(ge=0, le=2**48)]
"""A number in a report from which the master counts on: the result is a Count."""
Port = Annotated[int, Field(ge=0, le=65535)]
"""A TCP port; 0: there is none."""

MAX_LEVELS = 8
"""The largest number of levels of a topology."""
DomainName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$", max_length=63)
]
"""The name of a topology domain at one level, in the form of the value of a label."""

BootId = Annotated[str, StringConstraints(min_length=8, max_length=64)]
"""Random text that an agent process draws once."""
DatasetName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$", max_length=64)
]
"""Name of a dataset in a job."""

_NOT_KEPT: set[str] = set()


class Wire(BaseModel):
    """Base of all messages: immutable, and lenient towards newer peers."""

    # JSON has no NaN: it would be written as null, which the reader then refuses.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def model_post_init(self, context: Any, /) -> None:
        """Forget which fields were given: no code uses that, and an assignment saves 2 kB."""
        object.__setattr__(self, "__pydantic_fields_set__", _NOT_KEPT)


class WorkerPhase(StrEnum):
    """The state of one node's workers, taken together."""

    IDLE = "idle"  # no worker runs
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"  # all workers of the round exited with 0
    FAILED = "failed"
    CHECKING = "checking"  # a check of this node runs instead of the user's script


class FailureKind(StrEnum):
    """The way in which a worker died."""

    EXCEPTION = "exception"  # an uncaught Python exception of the script
    PEER = "peer"  # an exception that says that another rank's connection broke
    SIGNAL = "signal"  # killed: segmentation fault, out of memory, kill -9
    EXIT = "exit"  # another exit code than 0, without an exception
    START = "start"  # could not be started at all
    HANG = "hang"  # stood still, by a verdict of the master; it was ended for that
    WRONG = "wrong"  # computed wrong values, by a verdict of the master; it was ended for that


class StatusMessage(Wire):
    """A message that is also part of the job's status, where its fields are in camelCase."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, loc_by_alias=False)


class FailureClass(StrEnum):
    """What has made a worker fail, as far as its death shows it."""

    HOST_MEMORY = "host_out_of_memory"  # memory, shared memory or the limit of its container
    DEVICE_MEMORY = "device_out_of_memory"  # memory of its GPU or other accelerator
    CODE = "code_error"  # the script, its settings or its environment
    COMMUNICATION = "communication"  # NCCL, gloo or the store of the process group
    STORAGE = "storage"  # a file system, a disk, a bucket, or a damaged file
    HARDWARE = "hardware"  # a device, its memory or its links
    KILLED = "killed"  # SIGKILL that neither the agent nor a memory limit has caused
    PREEMPTED = "preempted"  # a request to end that the agent has not sent
    HANG = "hang"  # it stood still, and the master has ended the round
    WRONG_VALUES = "wrong_values"  # it computed wrong values, and the master has ended the round
    UNKNOWN = "unknown"


class Confidence(StrEnum):
    """How far the evidence of a :class:`FailureCause` goes."""

    SURE = "sure"  # the text or the kernel names it
    LIKELY = "likely"  # it is the usual reason for such a death
    GUESS = "guess"  # nothing speaks against it


class FailureCause(StatusMessage):
    """What has made a worker fail, why this is believed, and what to do about it."""

    failure_class: FailureClass
    """The class of the failure."""
    confidence: Confidence
    """How far the evidence goes."""
    evidence: Words
    """The words or facts that led to the class."""
    advice: Words
    """What to do."""

    @classmethod
    def ended_early(cls, ranks: Sequence[int], told: str) -> Self:
        """Return the cause of a lost connection after other ranks had ended with exit code 0.

        Args:
            ranks: These ranks, at least one.
            told: The text of the lost connection.
        """
        names = ", ".join(map(str, sorted(ranks)[:5])) + (", …" if len(ranks) > 5 else "")
        names = f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
        return cls(
            failure_class=FailureClass.CODE,
            confidence=Confidence.LIKELY,
            evidence=f"{names} had ended with exit code 0 while others waited for it: {told}",
            advice=f"Look why {names} ended before the others: all ranks must call the same "
            "collectives until the end, also where one has no data left or calls sys.exit(0).",
        )

    @property
    def line(self) -> str:
        """The cause in one line, such as ``storage (sure): Free space on the disk.``."""
        return f"{self.failure_class} ({self.confidence}): {self.advice}"


class WorkerFailure(StatusMessage):
    """The death of a worker, as its agent saw it."""

    kind: FailureKind
    """The way in which it died."""
    local_rank: Count
    """Its rank on its node."""
    rank: Count
    """Its rank in the round."""
    pid: Count
    """Its process id on its host."""
    exit_code: int
    """Its exit code, or the negative number of the signal that killed it."""
    message: Annotated[str, StringConstraints(max_length=2048), cut(2048)]
    """Why it died, in words."""
    traceback: Annotated[str, StringConstraints(max_length=8192), cut(8192)] = ""
    """Its Python traceback, cut; empty if there was none."""
    fingerprint: Annotated[str, StringConstraints(max_length=512), cut(512)] = ""
    """The same text for the same exception at the same place; empty if there was no exception."""
    step: Count | None = None
    """The last step that was reported before."""
    ran_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds from the worker's start to its death."""
    forked: bool = False
    """True if it was a warm start: an early death may be caused by the fork."""
    out_of_memory: Line = ""
    """What the kernel's out-of-memory killer did, with limit and peak; empty if it did not kill the
    worker."""
    cause: FailureCause | None = None
    """What has made it fail; absent if the master has ended it by a verdict of its own."""

    @property
    def failure_class(self) -> FailureClass:
        """The class of the failure."""
        if self.cause is not None:
            return self.cause.failure_class
        verdicts = {
            FailureKind.HANG: FailureClass.HANG,
            FailureKind.WRONG: FailureClass.WRONG_VALUES,
        }
        return verdicts.get(self.kind, FailureClass.UNKNOWN)


class Offer(Wire):
    """What a node offers to the next round: a place, and an address in case it gets rank 0."""

    addr: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    """The host name or IP address."""
    port: Annotated[int, Field(ge=1, le=65535)]
    """The port that is reserved."""
    topology: Annotated[tuple[DomainName, ...], Field(max_length=MAX_LEVELS)] = ()
    """The topology domain of the node, from the widest level to the narrowest, as its environment
    says it; empty if it does not."""


Spent = Annotated[
    dict[Annotated[str, StringConstraints(max_length=16)], Annotated[float, Field(ge=0)]],
    Field(max_length=8),
]
"""Seconds by what they were spent on."""


class Progress(StatusMessage):
    """The progress of the script, as it reports it through ``dlrover_py.trainer.session``."""

    step: Count
    """The newest step that was reported."""
    total: Count | None = None
    """The number of all steps, if the script reports it."""
    started_at_step: Count
    """The first step that was reported in this round."""
    first_step_after_s: Annotated[float, Field(ge=0)]
    """Seconds from the start of the round on this node to that first step."""
    steps_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Steps per second: the mean over the last ten reports of this round, and over ten seconds at
    least; 0 before the second report."""
    metrics: dict[Annotated[str, StringConstraints(max_length=64)], float] = Field(
        default_factory=dict, max_length=32
    )
    """Numbers that the script reported, by name."""
    spent: Spent = Field(default_factory=dict)
    """Seconds that workers have spent in this round, of each the greatest: ``data`` waiting for
    data, ``save`` and ``load`` for checkpoints, ``gc`` in Python's garbage collector, ``cpu`` of
    their CPUs. ``run`` is the time from the first reported step to the newest one. ``saves`` is
    the number of saves, and no time."""


class WrongKind(StrEnum):
    """What is wrong with the values of a training."""

    NOT_FINITE = "not-finite"  # a loss or a gradient norm is NaN or infinite
    SPIKE = "spike"  # a loss or a gradient norm has leapt up; only the master finds this
    REPLICAS = "replicas"  # parameters differ that must be equal on all replicas


class WrongValue(Wire):
    """A wrong value that a worker has found. It is reported as long as it lasts."""

    kind: WrongKind
    """What is wrong."""
    step: Count
    """The first step with the wrong value."""
    good: Count | None = None
    """The newest step that is known to be good; None if the worker knows none in this round."""
    ranks: Annotated[list[Count], Field(max_length=64)] = Field(default_factory=list)
    """The ranks with the wrong value; empty if it is not known which of them are wrong."""
    metric: Annotated[str, StringConstraints(max_length=64)] = ""
    """Name of the metric."""
    value: Annotated[str, StringConstraints(max_length=32)] = ""
    """The value in words, such as ``nan``; of a spike the usual and the new one: ``1.2:57``."""


class CheckResult(Wire):
    """The result of a node's check (docs/network-check.md). Times are of its slowest worker."""

    passed: bool
    """True if the node passed the check."""
    why: Words = ""
    """What failed, in words; empty if it passed."""
    matmul_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds for one matrix product: they depend on this node alone."""
    allreduce_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds for one all-reduce: they depend on all nodes of the group. 0 for a worker that was
    alone."""
    algbw_gb_s: Annotated[float, Field(ge=0)] = 0.0
    """Algorithm bandwidth: gigabytes that were reduced per second. Only with ``--precheck 2``."""
    busbw_gb_s: Annotated[float, Field(ge=0)] = 0.0
    """Bus bandwidth: gigabytes per second that each link carried for it. Only with ``--precheck
    2``."""


class CheckpointReference(Wire):
    """A message that is about one checkpoint, which these three fields identify."""

    step: Annotated[Step, COUNT]
    """The step at which it was saved."""
    round: Annotated[Round, COUNT]
    """The round in which it was saved."""
    timeline: Annotated[Timeline, COUNT] = Timeline(0)
    """Its timeline within the round: it grows with each ``load()``."""

    @property
    def id(self) -> CheckpointId:
        """The identity of the checkpoint."""
        return CheckpointId(round=self.round, timeline=self.timeline, step=self.step)


class MemoryCheckpoint(CheckpointReference):
    """A checkpoint with complete slots in a node's memory (:mod:`dlrover_py.checkpoint.shm`)."""

    world: Annotated[Count, Field(ge=1)]
    """The world size with which it was saved."""
    ranks: Annotated[
        dict[Count, Annotated[str, StringConstraints(max_length=32)]], Field(min_length=1)
    ]
    """Rank → digest of its shard group, for the ranks here. Ranks with equal digests have equal
    shards."""
    private_only: list[Count] = Field(default_factory=list)
    """Ranks here that have only the values of their own: replicas without the bytes of the shard
    group, which other nodes are known to have."""
    replica: bool = False
    """True if the node keeps it for a peer."""
    persist: bool = False
    """True if it must be written to storage."""
    nbytes: Count = 0
    """Size of its slots here, in bytes."""
    certified: bool = False
    """True if all replicas had equal parameters at this step, as the ranks here have agreed."""


class PersistPhase(StrEnum):
    """The progress of a node with a request to write a checkpoint to storage."""

    WRITING = "writing"
    READY = "ready"  # only for the coordinator: all shards are written, it waits for the grant
    DONE = "done"  # its shards are written; for the coordinator: the manifest is written
    FAILED = "failed"


class PersistProgress(Wire):
    """The state of a node's persister."""

    attempt: Line = ""
    """The ``attempt`` of the newest request that it has accepted."""
    phase: PersistPhase = PersistPhase.WRITING
    """The progress of that request."""
    why: Words = ""
    """What failed, or what a write waits for, in words; empty if there is nothing to say."""


class StoredCheckpoint(CheckpointReference):
    """A checkpoint in storage whose manifest exists."""

    where: Words
    """The path or address of its folder."""
    at: float
    """Time of the commit in seconds since the epoch, by the committer's clock. It is for people
    only."""
    number: Count = 0
    """The number of the commit in its directory: it decides which checkpoint is newer."""
    round: Annotated[Round, COUNT] = Round(0)
    """The round in which it was saved."""


class HeldLease(Wire):
    """A shard that a worker holds. Agents report those of their workers to a new master."""

    token: Count
    """The term of the lease: each lease of the dataset has a higher one."""
    position: Count
    """Position of the shard in the order of the epoch."""
    epoch: Count
    """The epoch of the shard."""


class WorkerLeases(Wire):
    """The leases of one worker of a node, in its agent's report."""

    dataset: DatasetName
    """Name of the dataset."""
    local_rank: Annotated[int, Field(ge=0, le=1023)]
    """Rank of the worker on its node."""
    load: Counted
    """The load of its history; the round is that of the report."""
    leases: Annotated[list[HeldLease], Field(max_length=64)]
    """Its leases."""


class LoaderSettings(Wire):
    """What the job wants of each ``ElasticLoader``. Settings with a higher number are newer."""

    number: Annotated[int, Field(ge=0, le=MAX_TUNING)] = 0
    """A number that grows with each change."""
    micro_batch: Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH)] | None = None
    """The greatest number of samples that a worker computes at once; None: the script's own."""
    loader_workers: Annotated[int, Field(ge=0, le=MAX_LOADER_WORKERS)] | None = None
    """The number of processes that read data for a worker; None: the script's own."""


class LoaderState(Wire):
    """The settings of an ``ElasticLoader``, and what was measured with them.

    A node reports the slowest of its workers.
    """

    number: Annotated[int, Field(ge=0, le=MAX_TUNING)] = 0
    """The number of the newest settings that it has taken up or refused."""
    refused: bool = False
    """True if it has refused their number of workers, which is more than ``most_workers``."""
    step: Count = 0
    """The number of committed steps when it took them up."""
    micro_batch: Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH)]
    """The greatest number of samples that it computes at once."""
    share: Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH)]
    """The greatest number of samples that it has in a step; a larger micro-batch changes
    nothing."""
    batch: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Samples of all ranks in a step; 0 if that is not known."""
    loader_workers: Annotated[int, Field(ge=0, le=MAX_LOADER_WORKERS)] = 0
    """The number of processes that read its data."""
    most_workers: Annotated[int, Field(ge=0, le=MAX_LOADER_WORKERS)] = 1
    """The greatest number of such processes that it accepts: the CPUs that it may use."""
    measured: Count = 0
    """The number of steps that were measured with these settings."""
    samples_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Samples of all ranks per second, over the newest of those steps; 0 before the first."""
    memory: Annotated[float, Field(ge=0)] = 0.0
    """The greatest share of its memory that was in use, of the GPU's if it trains on one."""
    memory_before: Annotated[float, Field(ge=0)] = 0.0
    """The share that was in use before its first step."""
    data_wait: Annotated[float, Field(ge=0)] = 0.0
    """The share of the time in which it waited for data."""
    epoch: Annotated[int, Field(ge=0, le=2**53)] = 0
    """The epoch of its next step, from 0 on."""
    position: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Samples of that epoch that all ranks have trained together."""
    samples: Annotated[int, Field(ge=0, le=2**53)] = 0
    """Samples in an epoch; 0 if that is not known."""

    @classmethod
    def of_slowest(cls, states: Sequence[Self]) -> Self:
        """Return one state for several workers: of each number, the one that limits them.

        Args:
            states: at least one.
        """
        oldest = min(states, key=lambda state: state.number)
        behind = min(states, key=lambda state: (state.epoch, state.position))
        return cls(
            number=oldest.number,
            refused=any(s.refused for s in states if s.number == oldest.number),
            step=max(s.step for s in states),
            micro_batch=max(s.micro_batch for s in states),
            share=max(s.share for s in states),
            batch=max(s.batch for s in states),
            loader_workers=max(s.loader_workers for s in states),
            most_workers=min(s.most_workers for s in states),
            measured=min(s.measured for s in states),
            samples_per_s=min(s.samples_per_s for s in states),
            memory=max(s.memory for s in states),
            memory_before=min(s.memory_before for s in states),
            data_wait=max(s.data_wait for s in states),
            epoch=behind.epoch,
            position=behind.position,
            samples=behind.samples,
        )


class NodeLoad(Wire):
    """What the processes of a node use, and how far they lack CPU, memory and storage.

    CPUs and memory in use are known only in a container with a memory limit.
    """

    memory_bytes: Count = 0
    """Memory that they use, without page cache that can be reclaimed immediately."""
    memory_limit: Count = 0
    """The memory limit of their container in bytes; 0 if what they use is not known."""
    memory_peak: Count = 0
    """The most memory that they were seen to use since the agent started, in bytes. It is looked at
    every ten seconds."""
    shm: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of ``/dev/shm`` that is in use. Loaders and checkpoints in memory need it."""
    cores: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Number of CPUs that they use, on average over some seconds."""
    throttled: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the periods in which the CPU limit of the container has stopped it (cgroup)."""
    cpu: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the time in which some process waited for a CPU (pressure stall information)."""
    io: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the time in which some process waited for storage (pressure stall information)."""
    memory: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the time in which some process waited for memory (pressure stall information)."""
    sending: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the time in which the busiest TCP connection of the workers waited for the network:
    it had data that was not acknowledged, and the receiver had room."""
    clocks: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of its GPUs whose clocks are slowed by heat, power or a fault (NVML)."""
    gpus: Count = 0
    """Number of GPUs that say how far they are used (NVML)."""
    gpu_busy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the last minute in which these GPUs ran a kernel, on average over them."""
    gpu_least_busy: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the last minute in which the least used of these GPUs ran a kernel."""
    gpu_memory_bytes: Count = 0
    """Memory of its GPUs that is in use, in bytes."""
    gpu_memory_limit: Count = 0
    """Memory of its GPUs in bytes; 0 if that is not known."""
    peer: Annotated[str, StringConstraints(max_length=64), cut(64)] = ""
    """IP address of the other end of that connection; empty without one."""
    link_bytes_s: Count = 0
    """How fast the links of the node are: the bytes that all TCP connections of the workers have
    sent, for each second in which the busiest one waited for the network. 0 if none waited."""
    resent: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the TCP segments of its network namespace that were sent again."""
    network_errors: Annotated[float, Field(ge=0)] = 0.0
    """Packets that its network interfaces have lost or found damaged, a second."""


class LogFinding(Wire):
    """A log rule that applies to workers of a node, or one that cannot be used there."""

    rule: Annotated[str, StringConstraints(max_length=63)]
    """Name of the rule; empty for all rules. ``NVML`` for what its GPUs report."""
    verdict: Annotated[str, StringConstraints(max_length=8)]
    """``HANG``, ``SLOW`` or ``FAULT``; ``UNUSED`` for a rule that cannot be used."""
    ranks: list[Count] = Field(default_factory=list, max_length=64)
    """The ranks to which it applies, at most 64 of them."""
    said: Annotated[str, StringConstraints(max_length=512), cut(512)]
    """What was found at the first of these ranks, in words."""


class CheckRequest(Wire):
    """A node's request for a check before its first round."""

    level: Annotated[int, Field(ge=1, le=2)]
    """2: the check also measures bandwidth."""
    exclude_slow: bool = False
    """True if the node asks to be left out when the check shows that it is slow."""


class AgentReport(Wire):
    """The complete state of a node. Each report has all of it."""

    boot_id: BootId
    """Random text that each agent process draws once: it distinguishes a restarted agent from a
    retry."""
    run: Annotated[str, StringConstraints(max_length=1024)] = ""
    """The name of the job (:class:`JobName`) that the master had when this agent first asked it,
    where nodes come by themselves; else empty. A master of another run refuses the report."""
    incarnation: Counted = 0
    """The incarnation that the master has assigned; 0 before that."""
    seq: Counted
    """A number that grows with each report of this agent process."""
    have_term: Counted = 0
    """The term of the newest assignment that arrived."""
    have_version: Counted = 0
    """The version of the newest assignment that arrived."""
    follows: Counted = 0
    """The newest round that this agent has started. It distinguishes a join for the next round from
    a retry. The offer is valid only for later rounds."""
    phase: WorkerPhase = WorkerPhase.IDLE
    """The state of the workers of round ``follows``."""
    nproc: Annotated[int, Field(ge=1, le=1024)] = 1
    """The number of its workers."""
    role: Line = "default"
    """The role of its workers: workers of one role are also counted separately."""
    pids: list[Count] = Field(default_factory=list, max_length=1024)
    """Process ids of the workers by local rank; 0 for a worker that has ended."""
    agent_pid: Count = 0
    """The process id of the agent."""
    offer: Offer
    """An address that rank 0 can use if this node becomes the first of a round."""
    max_restarts: Count | None = None
    """The value of ``--max-restarts`` if it was given; the job's spec takes precedence."""
    failure: WorkerFailure | None = None
    """Why round ``follows`` failed here. It stays until the next round starts."""
    progress: Progress | None = None
    """The progress of the script; None before its first report."""
    reached_step: Count | None = None
    """The highest step that scripts of this agent have reported in rounds before ``follows``, or
    while they were being stopped; None if there is none."""
    warm: bool = False
    """True if the next start is a fork, which takes only a moment."""
    warming: bool = False
    """True if this agent is not ready for its first round, since it still prepares for a warm
    start. The preparation takes no longer than a cold start would."""
    leaving: Words = ""
    """Why this node leaves (SIGTERM …); empty if it does not."""
    cut_off: Words = ""
    """Why this node stopped the workers of round ``follows`` without a request. It was cut off from
    the master and from all other nodes, which may train in its place. Empty if it did not."""
    precheck: CheckRequest | None = None
    """The check that the node requests before its first round; None if it requests none."""
    checks: Counted = 0
    """The number of the newest check that this agent has started."""
    check: CheckResult | None = None
    """The result of check ``checks`` here."""
    memory: list[MemoryCheckpoint] = Field(default_factory=list, max_length=64)
    """The checkpoints in the node's memory."""
    memory_round: Counted = 0
    """When ``memory`` was listed, no worker of a round before this one was running."""
    transfer_port: Port = 0
    """The port of the node's transfer server, at which peers read its memory; 0 if they cannot."""
    persisting: PersistProgress | None = None
    """The state of the node's persister; None if it has none."""
    stored: StoredCheckpoint | None = None
    """The newest checkpoint in storage that this node's persister has seen."""
    stores: bool = False
    """True if a script here has named a place for checkpoints that outlive the job."""
    checkpoint_error: Words = ""
    """Why checkpoints are not as complete as they should be: the disk is full, or memory is too
    small."""
    save_at_breakpoint: bool = False
    """True if the newest state must be stored after a worker fails. The job's spec may require it
    as well."""
    gives_up: Words = ""
    """Why this node ends the job for all nodes, where no platform could replace it; empty if it
    does not. As with torchrun, each agent counts its restarts itself. The first agent without
    restarts left closes the rendezvous."""
    leases: list[WorkerLeases] = Field(default_factory=list, max_length=4096)
    """The shards of datasets that the workers of round ``follows`` hold: a new master continues
    their leases. Empty in a job without dynamic shards."""
    idle_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds for which the workers of round ``follows`` have used no CPU time worth mentioning."""
    load: NodeLoad | None = None
    """What the node lacks, over about ten seconds. It changes only if a number has changed by much.
    None if it is not known."""
    auto_tune: bool = False
    """True if ``--auto-tunning`` was given; the job's spec takes precedence."""
    loader: LoaderState | None = None
    """The state of the workers' ``ElasticLoader`` in round ``follows``; None if no script has
    one."""
    wrong: list[WrongValue] = Field(default_factory=list, max_length=64)
    """Wrong values of the workers of round ``follows``, as long as they last."""
    log_findings: list[LogFinding] = Field(default_factory=list, max_length=64)
    """The log rules that apply to workers of round ``follows``, as long as they apply."""
    nested: Words = ""
    """What a second launcher below the workers has started as a world of its own; empty if there is
    none."""


class Directive(StrEnum):
    """The kind of action that the master requests from a node."""

    WAIT = "wait"  # run nothing: the node is a standby, or the round is still pending
    CHECK = "check"  # check this node, together with the others of `check`
    RUN = "run"  # run the workers of `round`
    STOP = "stop"  # end the workers, then exit with `exit_code`


class ReplicationPeer(Wire):
    """The node of whose memory this node keeps a replica."""

    node: Line
    """The id of the node."""
    addr: Line
    """The address of its transfer server."""
    port: Port
    """The port of its transfer server."""


class PersistRequest(CheckpointReference):
    """A request to write a checkpoint from memory to storage.

    A newer request, or an assignment without one, cancels it.
    """

    attempt: Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{1,32}$")]
    """Random text for the name of the folder, so that no other attempt has written to it."""
    world: Count
    """The world size with which it was saved."""
    ranks: list[Count]
    """The ranks whose slots this node writes."""
    writers: list[Line] = Field(default_factory=list)
    """All nodes that write. Only the coordinator, which makes the plan and commits, receives this
    list."""
    grant: Count | None = None
    """The term in which the coordinator may commit; None while it may not commit, and 0 where there
    is no master."""


class RestoreCandidate(CheckpointReference):
    """A checkpoint that is complete in the memory of nodes."""

    world: Count
    """The world size with which it was saved."""


class RestoreCandidates(Wire):
    """The reply to ``GET /v1/checkpoints?round=R``: checkpoints in memory of the round's nodes."""

    candidates: list[RestoreCandidate] = Field(default_factory=list)
    """The checkpoints, newest first."""


class ReplicaLocation(ReplicationPeer):
    """A node that has one rank's slot of a checkpoint."""

    rank: Count
    """The rank."""
    part: Line = ""
    """Digest of its shard group: ranks of the same group hold copies of the same tensors."""
    private_only: bool = False
    """True if the node has only the values of this rank alone, without the bytes of the shard
    group."""


class ReplicaLocations(Wire):
    """The reply to ``GET /v1/checkpoints/locations?round=&timeline=&step=``."""

    locations: list[ReplicaLocation] = Field(default_factory=list)
    """Where the slot of each rank is, in the order of ranks."""


class Assignment(Wire):
    """The task of one node: its own ranks and one endpoint, never the table of all nodes."""

    term: Count
    """The term of the master that assigns."""
    version: Count
    """A number that grows with each change of this node's assignment within a term."""
    incarnation: Count
    """The incarnation that the node has."""
    directive: Directive
    """The action that the node must take."""
    reason: Annotated[str, cut(8192)]
    """Why the node must take it, in words."""
    round: Count = 0
    """The round that the node must run; 0 if there is none."""
    check: Count = 0
    """With CHECK: the number of the check, which only grows. Ranks and addresses are those of the
    check's group."""
    node_rank: Count = 0
    """The rank of this node in the round."""
    nnodes: Count = 0
    """The number of nodes in the round."""
    rank_offset: Count = 0
    """The global rank of the worker with local rank 0."""
    world_size: Count = 0
    """The number of workers in the round."""
    role_rank_offset: Count = 0
    """The first rank of this node's workers among the workers of their role."""
    role_world_size: Count = 0
    """The number of workers in the round that have the role of this node's workers."""
    master_addr: str = ""
    """The host name or IP address of rank 0."""
    master_port: Port = 0
    """The port of rank 0."""
    restart_count: Count = 0
    """The number of earlier rounds that ended in a failure (TORCHELASTIC_RESTART_COUNT)."""
    max_restarts: Count = 0
    """The number of restarts that the job may have."""
    exit_code: Annotated[int, Field(ge=0, le=255)] = 0
    """With STOP: the code with which the agent must exit."""
    cold: bool = False
    """True if the workers must be started cold, since a warm start may be the cause of a
    failure."""
    stop_grace_s: Annotated[float, Field(ge=0)] = _TIMING.stop_grace_s
    """Seconds from SIGTERM to SIGKILL when the workers are stopped for this assignment."""
    last_step_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that scripts with ``should_stop()`` have, before the signal, to agree on a last step
    and to save it. 0: their round is already broken."""
    recipe: Line = ""
    """The digest of the list of modules to import beforehand, which the master keeps
    (``/v1/recipe``); empty if it has none."""
    checkpoint: Annotated[str, StringConstraints(max_length=16384)] = ""
    """The job's ``checkpoint:`` as JSON, for the workers; empty if it has none."""
    log_rules: Annotated[str, StringConstraints(max_length=65536)] = ""
    """The job's ``diagnosis.logRules`` as JSON, for the agent; empty if it has none."""
    loader: LoaderSettings | None = None
    """The settings of the workers' data loaders; None if none were ever changed."""
    peer: ReplicationPeer | None = None
    """The node of whose memory this node must keep a replica; None if there is none."""
    peer_checkpoint: CheckpointReference | None = None
    """The checkpoint that this node must copy from ``peer``, which leaves. None: it copies what the
    loss of one node must not cost."""
    persist: PersistRequest | None = None
    """The checkpoint that this node must write to storage; None if there is none."""
    common_shard_group: Line = ""
    """The shard group that every rank has, so that one node alone can store the whole state if the
    master is lost; empty if ranks have different ones, or if that is not known."""
    snapshot: Count = 0
    """The number of the newest snapshot of all ranks that was requested; 0 if there was none. The
    agent takes it and sends a ``NodeSnapshot``."""
    stay_until_stored: bool = False
    """With STOP: after its workers have ended, the agent stays until its memory is stored, or
    copied to nodes that stay, but no longer than the grace period."""
    master_disconnected: bool = False
    """True if the master is disconnected from its platform: another master may have replaced it."""
    exchange_s: Annotated[float, Field(gt=0)] = _TIMING.exchange_s
    """Seconds within which the master answers a report."""
    lease_s: Annotated[float, Field(gt=0)] = _TIMING.lease_s
    """Seconds after its last report at which the node counts as lost."""


class JobName(Wire):
    """The name and size of a job, for an agent that comes by itself."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    """The name of the job; where nodes come by themselves, it is random."""
    fewest: Count
    """The fewest nodes of a round."""
    most: Count
    """The most nodes of a round."""


class ErrorReply(Wire):
    """The body of a reply whose status is not 200."""

    code: str
    """The kind of the error, for programs: one of
    :class:`~dlrover_py.protocol.errors.ErrorCode`."""
    message: str
    """The error in words, for people."""
