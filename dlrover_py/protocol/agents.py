"""What an agent and the master tell each other: :class:`AgentReport` up, :class:`Assignment` down.

Both are whole documents: a lost, repeated or late one does no harm, because numbers that only
grow (``seq``, ``follows``, ``incarnation``; ``term``, ``version``, ``round``) say which is newer.
Unknown fields are ignored, so that an old agent survives a new master.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from dlrover_py.protocol.names import WIRE_VERSION

Name = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)
]
Line = Annotated[str, StringConstraints(max_length=1024)]
"""A name of ours; a longer one is refused."""


def sendable(text: str) -> str:
    """Text as UTF-8 has it: bytes that Python could not decode, such as those of a path or of an
    environment variable, become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _cut(most: int) -> BeforeValidator:
    def cut(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        value = sendable(value)
        return value if len(value) <= most else value[: most - 1] + "…"

    return BeforeValidator(cut)


Words = Annotated[str, StringConstraints(max_length=1024), _cut(1024)]
"""Text for people that may hold what the user wrote: it is cut, and never refused."""
COUNT = Field(ge=0, le=2**53)
Count = Annotated[int, COUNT]
Counted = Annotated[int, Field(ge=0, le=2**48)]
"""A number in a report that the master counts on from: the result is a Count."""
Port = Annotated[int, Field(ge=0, le=65535)]
"""0: there is none."""

_NOT_KEPT: set[str] = set()


class Wire(BaseModel):
    """Base of all messages: immutable, lenient towards newer peers."""

    # JSON has no NaN: it would be written as null, which its own reader then refuses.
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def model_post_init(self, context: Any, /) -> None:
        """Forget which fields were given: nobody asks, and of an assignment that is 2 kB."""
        object.__setattr__(self, "__pydantic_fields_set__", _NOT_KEPT)


class WorkerPhase(StrEnum):
    """What the workers of one node do, taken together."""

    IDLE = "idle"  # none runs
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"  # all of the round's workers exited 0
    FAILED = "failed"
    CHECKING = "checking"  # not the user's script: this node is tried out before it trains


class FailureKind(StrEnum):
    """How a worker died."""

    EXCEPTION = "exception"  # an uncaught Python exception of the script
    PEER = "peer"  # an exception that says that another rank's connection broke
    SIGNAL = "signal"  # killed: segmentation fault, out of memory, kill -9
    EXIT = "exit"  # another exit code than 0, with no exception seen
    START = "start"  # could not be started at all


class Shown(Wire):
    """A message that stands in the job's status as well, there in camelCase as all of it."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, loc_by_alias=False)


class WorkerFailure(Shown):
    """Why a worker died, as its agent saw it."""

    kind: FailureKind
    """How it died."""
    local_rank: Count
    """Its rank on its node."""
    rank: Count
    """Its rank in the round."""
    pid: Count
    """Its process id, on its host."""
    exit_code: int
    """Exit code; the negative signal number when a signal killed it."""
    message: Annotated[str, StringConstraints(max_length=2048), _cut(2048)]
    """Why it died, in words."""
    traceback: Annotated[str, StringConstraints(max_length=8192), _cut(8192)] = ""
    """Its Python traceback, cut; empty if there was none."""
    fingerprint: Annotated[str, StringConstraints(max_length=512), _cut(512)] = ""
    """Same text for the same exception at the same place; empty if no exception was seen."""
    step: Count | None = None
    """Last step that was reported before it."""
    ran_s: Annotated[float, Field(ge=0)] = 0.0
    """Time from the start of the worker to its death."""
    forked: bool = False
    """It was a warm start: a fork could be to blame for an early death."""
    out_of_memory: Line = ""
    """What the kernel's out-of-memory killer did, with limit and peak; empty if it is not to
    blame."""


class Offer(Wire):
    """Where rank 0 could listen if this node became the first: reserved by the agent."""

    addr: Annotated[str, StringConstraints(min_length=1, max_length=253)]
    port: Annotated[int, Field(ge=1, le=65535)]


class Progress(Shown):
    """What the script said of itself through ``dlrover_py.trainer.session``."""

    step: Count
    """Newest step that was reported."""
    total: Count | None = None
    """Steps in all, if the script says so."""
    started_at_step: Count
    """First step that was reported in this round."""
    first_step_after_s: Annotated[float, Field(ge=0)]
    """From taking up the round to that first step."""
    steps_per_s: Annotated[float, Field(ge=0)] = 0.0
    """Steps per second, lately."""
    metrics: dict[Annotated[str, StringConstraints(max_length=64)], float] = Field(
        default_factory=dict, max_length=32
    )
    """Numbers that the script reported, by name."""


class CheckResult(Wire):
    """How a node did in a check (docs/network-check.md): times are the slowest worker's."""

    passed: bool
    why: Words = ""
    """What went wrong, if it did not pass."""
    matmul_s: Annotated[float, Field(ge=0)] = 0.0
    """Of one matrix product: speaks of this node alone."""
    allreduce_s: Annotated[float, Field(ge=0)] = 0.0
    """Of one all-reduce: speaks of all nodes of the group; 0 for a worker that was alone."""
    algbw_gb_s: Annotated[float, Field(ge=0)] = 0.0
    """Bytes that were reduced in a second, and what each link carried for it; only with
    ``--precheck 2``."""
    busbw_gb_s: Annotated[float, Field(ge=0)] = 0.0


class Held(Wire):
    """What a node's memory holds whole of one checkpoint (:mod:`dlrover_py.arena`)."""

    step: Count
    round: Count
    lap: Count = 0
    world: Annotated[Count, Field(ge=1)]
    ranks: Annotated[
        dict[Count, Annotated[str, StringConstraints(max_length=32)]], Field(min_length=1)
    ]
    """Digest of the part that each rank here has of it: equal digests, equal parts."""
    hollow: list[Count] = Field(default_factory=list)
    """Ranks of which only what is theirs alone is here: replicas where the rest is known to be."""
    replica: bool = False
    """Held for a peer."""
    persist: bool = False
    """It is to go to storage."""


class PersistPhase(StrEnum):
    """How far a node is with an order to write a checkpoint to storage."""

    WRITING = "writing"
    READY = "ready"  # only of the coordinator: every shard is there, it asks for the grant
    DONE = "done"  # its shards are there; of the coordinator: the manifest is
    FAILED = "failed"


class Persisting(Wire):
    """How a node's persister is."""

    attempt: Line = ""
    """Of the newest order that it has taken up."""
    phase: PersistPhase = PersistPhase.WRITING
    why: Words = ""
    """What is wrong, in words, if it failed."""


class Stored(Wire):
    """A checkpoint that exists in storage: its manifest does."""

    step: Count
    where: Words
    """Path or address of its folder."""
    at: float
    """When it was committed, in seconds of the epoch, by the committer's clock: for people."""
    number: Count = 0
    """Of the commit in its directory: what is newer is told by it."""
    round: Count = 0
    lap: Count = 0
    """When it was saved; with the step they tell what is older than it."""


class AgentReport(Wire):
    """All that a node has to say, each time."""

    wire: Line = WIRE_VERSION
    boot_id: Annotated[str, StringConstraints(min_length=8, max_length=64)]
    """Random, drawn once by each agent process: tells a restarted agent from a retry."""
    incarnation: Counted = 0
    """As assigned by the master; 0 until it was."""
    seq: Counted
    """Grows with each report of this agent process."""
    have_term: Counted = 0
    have_version: Counted = 0
    """Term and version of the newest assignment that arrived."""
    follows: Counted = 0
    """Newest round that this agent has taken up. A join for the next round is told from a retry
    by it, and an offer is good only for rounds after it."""
    phase: WorkerPhase = WorkerPhase.IDLE
    """Of the workers of round ``follows``."""
    nproc: Annotated[int, Field(ge=1, le=1024)] = 1
    role: Line = "default"
    """Of its workers: those of one role are counted on their own as well."""
    pids: list[Count] = Field(default_factory=list, max_length=1024)
    """Worker processes by local rank; 0 for one that has ended."""
    agent_pid: Count = 0
    offer: Offer
    max_restarts: Count | None = None
    """From ``--max-restarts`` where it was given; the job's spec beats it."""
    failure: WorkerFailure | None = None
    """Why round ``follows`` failed here, until the next one is taken up."""
    progress: Progress | None = None
    warm: bool = False
    """Its next start is a fork, and takes a moment only."""
    warming: bool = False
    """This agent is not ready for its first round: it makes itself able to start warm, which
    takes no longer than a cold start would."""
    leaving: Words = ""
    """Why this node is about to go (SIGTERM …); empty if it is not."""
    cut_off: Words = ""
    """Why this node has stopped the workers of round ``follows`` without being told: it heard of
    nobody, and others may train in its place. Empty if it did not."""
    precheck: Annotated[int, Field(ge=0, le=2)] = 0
    """The node wishes to be checked before its first round (1); speeds are told too (2)."""
    exclude_straggler: bool = False
    """If the check shows that it is slow, it wishes to be left out."""
    checks: Counted = 0
    """Newest check that this agent has taken up."""
    check: CheckResult | None = None
    """How check ``checks`` ended here."""
    memory: list[Held] = Field(default_factory=list, max_length=64)
    memory_round: Counted = 0
    """The look at ``memory`` was taken when no worker of a round before this one ran any more."""
    depot: Port = 0
    """Port at which peers get at its memory; 0 if they cannot."""
    persisting: Persisting | None = None
    stored: Stored | None = None
    """Newest checkpoint that this node's persister has seen in storage."""
    stores: bool = False
    """A script here has said where checkpoints go that are to outlive the job."""
    checkpoint_trouble: Words = ""
    """Why checkpoints are not what they should be: the disk is full, memory does not suffice."""
    save_at_breakpoint: bool = False
    """After a failure of a worker the newest state is to be stored; the job's spec may say so
    too."""
    gives_up: Words = ""
    """Why this node ends the job for all, where no platform could replace it; empty if it does not.
    torchrun's agents count restarts themselves, and the first that has none left closes the
    rendezvous."""
    nested: Words = ""
    """What another launcher below the workers has started, as a world of its own; empty if none
    was seen."""


class Directive(StrEnum):
    """What the master wants of a node."""

    WAIT = "wait"  # run nothing: the node is a standby, or the round is still forming
    CHECK = "check"  # try this node out, together with the others of `check`
    RUN = "run"  # run the workers of `round`
    STOP = "stop"  # end the workers, then exit with `exit_code`


class Peer(Wire):
    """The node whose memory this one keeps a copy of."""

    node: Line
    addr: Line
    port: Port


class PersistOrder(Wire):
    """Write a checkpoint from memory to storage; a newer order, or none, calls it off."""

    attempt: Annotated[str, StringConstraints(pattern=r"^[0-9a-z]{1,32}$")]
    """Random, so that nobody else has written into its folder."""
    step: Count
    round: Count
    lap: Count = 0
    world: Count
    ranks: list[Count]
    """Whose slots this node writes."""
    writers: list[Line] = Field(default_factory=list)
    """To the coordinator alone, which makes the plan and commits: all nodes that write."""
    grant: Count = 0
    """The term in which the coordinator may commit; 0 as long as it may not."""


class Candidate(Wire):
    """A checkpoint that is whole in memory, newest first in :class:`Candidates`."""

    step: Count
    round: Count
    lap: Count = 0
    world: Count


class Candidates(Wire):
    """Reply to ``GET /v1/checkpoints?round=R``: what the nodes of the round could restore from."""

    candidates: list[Candidate] = Field(default_factory=list)


class Holders(Wire):
    """Reply to ``GET /v1/checkpoints/holders?step=&round=&lap=``: who has it, by rank."""

    ranks: dict[Count, Peer] = Field(default_factory=dict)
    parts: dict[Count, Line] = Field(default_factory=dict)
    hollow: list[Count] = Field(default_factory=list)


class Assignment(Wire):
    """What one node has to do; its own ranks and one endpoint, never the table of all nodes."""

    wire: Line = WIRE_VERSION
    term: Count
    version: Count
    """Grows with each change of this node's assignment within a term."""
    incarnation: Count
    directive: Directive
    reason: Annotated[str, _cut(8192)]
    """Why, in words."""
    round: Count = 0
    check: Count = 0
    """With CHECK: its number, which only grows; ranks and addresses are those of its group."""
    node_rank: Count = 0
    nnodes: Count = 0
    rank_offset: Count = 0
    """Global rank of this node's local rank 0."""
    world_size: Count = 0
    """Workers in the round."""
    role_rank_offset: Count = 0
    role_world_size: Count = 0
    """The same, among the workers of this node's role."""
    master_addr: str = ""
    master_port: Port = 0
    restart_count: Count = 0
    """Rounds that ended in a failure before this one (TORCHELASTIC_RESTART_COUNT)."""
    max_restarts: Count = 0
    exit_code: Annotated[int, Field(ge=0, le=255)] = 0
    cold: bool = False
    """Start the workers cold: warm ones are in doubt."""
    stop_grace_s: Annotated[float, Field(ge=0)] = 1.0
    """SIGTERM to SIGKILL when the workers are stopped for this assignment."""
    last_step_s: Annotated[float, Field(ge=0)] = 0.0
    """Scripts that ask ``should_stop()`` have so long to agree on a last step, and to save it,
    before they are signalled. 0: their round is broken already."""
    recipe: Line = ""
    """Digest of the warm recipe that the master keeps (``/v1/recipe``); empty if it has none."""
    checkpoint: Annotated[str, StringConstraints(max_length=16384)] = ""
    """The job's ``checkpoint:`` as JSON, for the workers; empty if it has none."""
    peer: Peer | None = None
    persist: PersistOrder | None = None
    linger: bool = False
    """With STOP: the agent stays when its workers have ended, within the grace, for what its memory
    holds is about to be stored."""
    adrift: bool = False
    """The master does not hear of its platform: another one may be in its place."""
    exchange_s: Annotated[float, Field(gt=0)] = 2.0
    """The master answers a report after this time at the latest."""
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    """The node is taken for lost this long after its last report."""


class ErrorReply(Wire):
    """Body of a reply that is not 200."""

    code: str
    message: str
