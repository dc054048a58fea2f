"""Checkpoints of one node: the agent owns their memory, reports them and has them stored.

The shared-memory pool (:mod:`dlrover_py.checkpoint.shm`) outlives the workers. It also outlives a
killed agent if the same node returns. Checkpoints are written to storage by a separate process, the
persister (:mod:`dlrover_py.checkpoint.writer`), when the master requests it. The pool is in memory,
so reading it never waits for a disk. Nothing in this module stops the training: errors are
reported.

A slot is a file of the pool with one worker's checkpoint. An attempt is one try to write a
checkpoint of all nodes to storage. The node that coordinates it needs a grant of the master to
commit, which makes the stored checkpoint valid.
"""

import asyncio
import contextlib
import logging
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlencode

from pydantic import TypeAdapter

from dlrover_agent.checkpoint.replication import PREFIX, Replicator
from dlrover_agent.checkpoint.server import TransferServer
from dlrover_agent.child_processes import ChildRegistry
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.directory import address
from dlrover_py.checkpoint.shm import ShmPool, ShmSlot
from dlrover_py.process.children import KILLED_S, wake
from dlrover_py.process.identity import ProcessId, ended, shielded_child
from dlrover_py.process.starter import Starter, kill_and_reap
from dlrover_py.protocol import json_text, names
from dlrover_py.protocol.agents import (
    Assignment,
    MemoryCheckpoint,
    PersistPhase,
    PersistProgress,
    PersistRequest,
    ReplicaLocations,
    ReplicationPeer,
    RestoreCandidates,
    StoredCheckpoint,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.documents import read
from dlrover_py.protocol.errors import CheckpointError, ConfigError, DLRoverError
from dlrover_py.protocol.persister import (
    MAX_REPLY,
    WRITE_DEADLINE_S,
    CancelWrite,
    CommitGrant,
    KeepRules,
    WatchLease,
    WriteReply,
    WriteRequest,
    read_line,
)
from dlrover_py.protocol.slots import SlotHeader
from dlrover_py.protocol.workers import CheckpointTarget

if TYPE_CHECKING:
    from dlrover_py.protocol.job import CheckpointSpec

log = logging.getLogger("agent.saver")

PERSISTER = (sys.executable, "-P", "-m", "dlrover_py.checkpoint.writer")
"""Command line of the persister."""
MAX_CHECKPOINTS = 64
"""Most checkpoints in a report. The newest ones are reported."""
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds before a start of the persister, by the number of times it died in a row."""
ALONE_S = 120.0
"""Seconds without progress after which a write without a master fails. They include the wait for
the writer lease of a lost node, which ends after `LEASE_S`."""
END_OF_PATIENCE = "the grace period was over, or no master answers"
"""Why a checkpoint was not stored, if nothing else is known."""
LEAVE_S = 2.0
"""Longest time in seconds that the persister has to release its writer leases at the end."""
WAKE_S = 5.0
"""Seconds between two SIGCONT for a persister that may be stopped, while a write is open."""

T = TypeVar("T")
_CANDIDATES = TypeAdapter(RestoreCandidates)
_LOCATIONS = TypeAdapter(ReplicaLocations)


class MasterConnection(Protocol):
    """The connection to the master, for requests of workers and for reports."""

    async def ask(self, path: str) -> bytes:
        """Return the master's answer to a GET request for a path.

        Raises:
            DLRoverError: The master does not answer.
        """

    def urge(self) -> None:
        """Ask for a report with the change soon; the connection's own task sends it."""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The node whose checkpoints are kept, and where they are kept."""

    root: Path
    """Folder in a tmpfs."""
    job: str
    """Unique id of the job."""
    name: str
    """Name of the job for people who read its lease; empty if the name is a secret."""
    node: str
    """Id of the node."""
    token: str
    """Token of the job."""
    nproc: int
    """Number of workers on this node."""
    socket: Path
    """Path of the unix socket for workers. It must be short."""
    returns: bool = False
    """Whether the same node returns after its agent was killed."""
    addr: str = ""
    """Address at which other nodes reach this one."""


class Saver:
    """The checkpoints of one node: its memory, its transfer server, replicas and persister."""

    def __init__(
        self,
        node: NodeContext,
        environ: Mapping[str, str],
        *,
        master: MasterConnection,
        children: ChildRegistry,
    ) -> None:
        """Create the node's memory for checkpoints; log a warning if that is impossible.

        The transfer server starts in a task. The persister starts later.

        Args:
            node: The node, and the place of its memory.
            environ: Environment of the persister.
            master: Connection to the master.
            children: Registry of the agent's child processes. The persister is added.
        """
        self._node, self._master = node, master
        self.last_error = ""
        """Why the memory for checkpoints or its server is missing; empty if both are there."""
        self._pool: ShmPool | None = None
        self.server: TransferServer | None = None
        """Server for the checkpoints in memory; None if it could not be created."""
        self._replicas: Replicator | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._open_memory()
        self._persister = PersisterClient(environ, self._on_reply, children)
        self._progress: PersistProgress | None = None
        self._stored: StoredCheckpoint | None = None
        self._request: PersistRequest | None = None
        self._granted = False
        self._common_shard_group = ""
        """The shard group that every rank has, as the master said it last; empty if none is."""
        self._write_ended = asyncio.Event()
        """Set by the last reply to the request that is open."""
        self._alone = False
        """Whether this node stores by itself, whatever a late answer of the master says."""
        self._written_step = -1
        """Newest step of which this node has written its part to storage; -1 if there is none."""
        self._watched_dir = ""
        """Directory whose lease the persister was told to watch; empty if there was none."""
        self._policy: CheckpointSpec | None = None
        """``checkpoint:`` in the job's spec; None if it has none."""
        self._policy_text = ""
        self._target: CheckpointTarget | None = None
        """Directory and retention that a script has set; None if none has."""
        self._persist_requested: dict[int, set[CheckpointId]] = {}
        """Checkpoints in memory that must be stored, by local rank."""
        self._unsaved: dict[int, str] = {}
        """Why the state of a worker is not saved, by local rank."""
        self._reported: set[CheckpointId] = set()
        """Checkpoints whose request for storage was reported immediately."""
        self._memory: list[MemoryCheckpoint] = []
        """Checkpoints in memory, as they were last read."""
        self._read_error = ""
        """Why ``_memory`` is not up to date; empty if it is."""
        self.in_use = False
        """Whether this node's memory holds, or has held, a checkpoint."""
        self.memory()

    def _open_memory(self) -> None:
        """Create the shared-memory pool, and start its server in a task.

        If one of them is impossible, the reason is kept in ``last_error`` and logged. If only the
        server cannot be created, the pool is used without it.
        """
        node = self._node
        try:
            now = time.time()  # noqa: TID251 - files have their age by the wall clock
            self._pool = ShmPool(node.root, node.job, node.node, now=now)
            self.server = TransferServer(
                self._pool.path,
                node.job,
                node.token,
                node.socket,
                lookup=self,
                addr=node.addr,
            )
            self._tasks.append(asyncio.create_task(self.server.run()))
        except (OSError, DLRoverError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.last_error = f"no memory for checkpoints in {node.root}: {reason}"
            log.warning("checkpoint_memory_unavailable", extra={"why": self.last_error})

    @property
    def path(self) -> Path | None:
        """Folder of the shared-memory pool; None if there is no pool."""
        return self._pool.path if self._pool is not None else None

    def environment(self) -> dict[str, str]:
        """Return the environment variables about checkpoints for the workers of all rounds."""
        env = {names.ENV_JOB_UID: self._node.job}
        if self.path is not None:
            env[names.ENV_SHM_POOL] = str(self.path)
        if self.server is not None:
            env[names.ENV_TRANSFER_SOCKET] = str(self._node.socket)
        return env

    # --- Fields of the report ---

    def facts(self) -> dict[str, Any]:
        """Return the fields of the agent's report about checkpoints, from the present memory.

        The call also renews the sign that this pool is in use, so that other agents do not remove
        it. ``checkpoint_error`` names only the most important error. ``transfer_port`` is 0 until
        the memory is in use.
        """
        if self._pool is not None:
            self._pool.alive()
        copies = self._replicas.last_error if self._replicas is not None else ""
        unsaved = self._unsaved[min(self._unsaved)] if self._unsaved else ""
        return {
            "memory": self.memory(),
            "transfer_port": self.server.port if self.server is not None and self.in_use else 0,
            "stores": bool(self._target),
            "persisting": self._progress,
            "stored": self._stored,
            "checkpoint_error": (
                self.last_error
                or self._read_error
                or unsaved
                or self._persister.last_error
                or copies
            ),
        }

    def memory(self) -> list[MemoryCheckpoint]:
        """Return the complete checkpoints in the node's memory, the newest first.

        If the memory cannot be read, the last list is returned and the error is kept for the
        report. The list is empty if there is no memory for checkpoints.
        """
        if self.path is None:
            return []
        try:
            self._memory, self._read_error = memory_checkpoints(self.path, self._node.job), ""
        except OSError as error:  # for example if there are no more file descriptors
            reason = f"{error.filename or self.path}: {error.strerror}"
            self._read_error = f"the checkpoint memory cannot be read: {reason}"
        self.in_use |= bool(self._memory)
        return self._memory

    def unwritten_step(self) -> int | None:
        """Return the newest step in memory, if this node has not written its part to storage.

        None: it has, its own workers have no checkpoint in memory, or no directory is known.
        """
        own = [one.step for one in self.memory() if not one.replica]
        stored = self._stored.step if self._stored is not None else -1
        newest = own[0] if own and self._dir else -1
        return newest if newest > max(stored, self._written_step) else None

    def warn_of_unwritten(self, why: str = "") -> None:
        """Log a warning if the newest step in memory is lost with this agent, which ends.

        Args:
            why: The reason, if no write has failed.
        """
        if (step := self.unwritten_step()) is not None:
            told = self._progress.why if self._progress is not None else ""
            reason = told or self._persister.last_error or why or END_OF_PATIENCE
            log.warning("checkpoint_not_stored", extra={"step": step, "why": reason})

    async def store_without_master(self, round_number: int, term: int) -> None:
        """Have this node store the newest state in its memory by itself, and wait for the end.

        This is for a node whose master is lost for good, after its workers have ended. Only a state
        that this node has as a whole is stored, which it is if all ranks have the same shard group.
        It must be of the newest round, because only the master knew which older states have wrong
        values. Nothing is lost if the master lives elsewhere: its writer lease is respected, and a
        later checkpoint of the job stays the newest one.

        Args:
            round_number: The newest round of this node.
            term: Term of the last master.
        """
        if self.unwritten_step() is None:
            return
        common, held = self._common_shard_group, self.memory()
        whole = [
            one.id
            for one in held
            if one.round >= round_number
            and any(part == common for r, part in one.ranks.items() if r not in one.private_only)
        ]
        if not whole:
            self.warn_of_unwritten(
                "no master answers, and this node has only a part of the state"
                if not common
                else "no master answers, and the state in memory is of an earlier round"
            )
            return
        newest = max(whole)
        parts = [one for one in held if one.id == newest]
        request = PersistRequest(
            attempt=secrets.token_hex(6),
            step=newest.step,
            round=newest.round,
            timeline=newest.timeline,
            world=parts[0].world,
            ranks=sorted({rank for one in parts for rank in one.ranks}),
            writers=[self._node.node],
            grant=term,
        )
        self._write_ended.clear()
        self._alone = True
        self._start_write(request, without_master=True)
        await self._write_ended.wait()
        stored = self._stored
        if stored is not None and stored.id >= newest:
            why = "the master is lost; start the job again to continue from this step"
            fields = {"step": stored.step, "where": stored.where, "why": why}
            log.warning("checkpoint_stored_without_master", extra=fields)

    # --- Events of workers and the master ---

    def staged(self, local_rank: int, step: int) -> None:
        """Take note that a worker has completed a slot in shared memory.

        The call starts the persister if a directory is known. It asks for an immediate report on
        the first slot of this node. It does so too if all workers have a checkpoint that must be
        stored, once for each such checkpoint.

        Args:
            local_rank: Rank of the worker on its node.
            step: Step of the checkpoint in the slot.
        """
        if not self.in_use:
            self.in_use = True
            self._master.urge()  # the report now includes the port at which peers can copy it
        self._start_persister()
        if self.path is None:
            return
        self._persist_requested[local_rank] = set()
        extra = shm.extra_slot(self.path, local_rank)
        for path in (*shm.slots_of(self.path, local_rank), extra):
            # An error is suppressed here. The next report includes it.
            with contextlib.suppress(OSError), ShmSlot(path) as slot:
                found = slot.header()
                if found is not None and found.persist:
                    self._persist_requested[local_rank].add(found.id)
        if len(self._persist_requested) >= self._node.nproc:
            requested = set.intersection(*self._persist_requested.values())
            if requested - self._reported:
                self._master.urge()
            self._reported = requested

    def unsaved(self, local_rank: int, why: str) -> None:
        """Take note that a worker's state is not saved; the next report says it.

        A report is requested immediately only when the worker's state changes between saved and not
        saved.

        Args:
            local_rank: Rank of the worker on its node.
            why: The reason. It is empty if the state is saved, as far as the worker knows.
        """
        before = self._unsaved.pop(local_rank, "")
        if why:
            self._unsaved[local_rank] = why
            self.in_use = True
        if bool(why) != bool(before):
            self._master.urge()

    def assigned(self, assignment: Assignment) -> None:
        """Carry out the part of an assignment that is about checkpoints.

        It covers the job's ``checkpoint:``, the peer to replicate, and the request to store a
        checkpoint. An assignment without a request, or with another attempt, cancels the write that
        is under way. Each attempt is started once, and its grant to commit is passed on once.
        """
        if self._alone:
            return
        if assignment.checkpoint and assignment.checkpoint != self._policy_text:
            self._policy_text = assignment.checkpoint
            self._read_policy()
        self._common_shard_group = assignment.common_shard_group
        wanted = assignment.peer_checkpoint
        self._follow(assignment.peer, wanted.id if wanted is not None else None)
        new, old = assignment.persist, self._request
        if old is not None and (new is None or new.attempt != old.attempt):
            self._persister.say(CancelWrite(attempt=old.attempt), start=False)
            self._request = None
        if new is None:
            return
        if old is None or new.attempt != old.attempt:
            self._start_write(new)
        if new.grant is not None and not self._granted and self._request is not None:
            self._granted = True
            self._persister.say(CommitGrant(attempt=new.attempt, term=new.grant), start=False)

    def stores(self, target: CheckpointTarget) -> None:
        """Use the directory that a script has set; it takes precedence over the job's spec.

        A write that is under way keeps its directory. Only the first directory leads to an
        immediate report.
        """
        if target != self._target:
            first, self._target = self._target is None, target
            if first:
                self._master.urge()

    def _read_policy(self) -> None:
        """Read the job's ``checkpoint:``; if it is invalid, warn and keep the previous one."""
        # Imported here because most jobs have no `checkpoint:`.
        from dlrover_py.protocol.job import CheckpointSpec

        try:
            policy = json_text.decoded(self._policy_text)
            self._policy = CheckpointSpec.model_validate(policy, extra="ignore")
        except ValueError as error:
            log.warning("checkpoint_policy_invalid", extra={"why": str(error)[:1000]})

    def _follow(self, peer: ReplicationPeer | None, wanted: CheckpointId | None) -> None:
        """Have the replicator copy this peer's checkpoints; start it if this is the first peer.

        None means that no peer is copied; existing replicas stay. Without memory nothing happens.
        If the peer leaves, ``wanted`` is the checkpoint to copy.
        """
        policy = self._policy
        mb_per_s = policy.bandwidth / 1e6 if policy is not None and policy.bandwidth else 0.0
        if self._replicas is None:
            if peer is None or self.path is None:
                return
            self._replicas = Replicator(
                self.path,
                self._node.job,
                self._node.token,
                on_change=self._master.urge,
                mb_per_s=mb_per_s,
            )
            self._tasks.append(asyncio.create_task(self._replicas.run()))
        self._replicas.limit(mb_per_s)
        self._replicas.follow(peer, wanted)

    @property
    def _dir(self) -> str:
        """Directory or address for checkpoints; empty if it is unknown or cannot be used."""
        if self._target is not None:
            return self._target.dir
        where = (self._policy.dir if self._policy is not None else None) or ""
        with contextlib.suppress(ConfigError):  # the script's Checkpointer reports this error
            return address(where) if where else ""
        return ""

    def _start_write(self, new: PersistRequest, *, without_master: bool = False) -> None:
        """Request from the persister that it stores a checkpoint; start its process if necessary.

        Its replies arrive in :meth:`_on_reply`. The attempt is reported as failed immediately if
        there is no usable directory, or this node has no shared memory for checkpoints.
        """
        self._request, self._granted = new, False
        self._progress = PersistProgress(attempt=new.attempt)
        where = self._dir
        if not where or self.path is None:
            self._on_reply(
                WriteReply(
                    attempt=new.attempt,
                    phase=PersistPhase.FAILED,
                    why=self.last_error or "no directory for checkpoints is known: set `dir`",
                )
            )
            return
        keep: Mapping[str, int | None] = {}
        if self._target is not None:
            keep = self._target.keep
        elif self._policy is not None and self._policy.keep is not None:
            keep = self._policy.keep.model_dump()
        self._persister.say(
            WriteRequest(
                **dict(new),
                pool=str(self.path),
                dir=where,
                job=self._node.job,
                node=self._node.node,
                keep=KeepRules.of(keep),
                spare=tuple(self._target.spare) if self._target is not None else (),
                name=self._node.name,
                without_master=without_master,
                deadline_s=ALONE_S if without_master else WRITE_DEADLINE_S,
            )
        )

    def _start_persister(self) -> None:
        """Start the persister early, because at a drain each second counts.

        It also looks at the writer lease early: at a drain there may be no time until the lease of
        a killed job expires. The method does nothing while no directory is known.
        """
        if not (where := self._dir):
            return
        if self._persister.start() or where != self._watched_dir:
            self._watched_dir = where
            self._persister.say(WatchLease(dir=where, job=self._node.job), start=False)

    def _on_reply(self, answer: WriteReply) -> None:
        """Take a reply of the persister into the next report, log it, and ask for that report.

        A reply to an older attempt does not change the reported progress. The newest stored
        checkpoint and the notes are taken from every reply.
        """
        if answer.stored is not None:
            self._stored = answer.stored
        for note in answer.notes:
            log.warning("checkpoint_note", extra={"attempt": answer.attempt, "why": note})
        request = self._request
        if answer.attempt and request is not None and answer.attempt == request.attempt:
            self._progress = answer
            if answer.phase is PersistPhase.DONE:
                self._written_step = max(self._written_step, request.step)
            failed = answer.phase is PersistPhase.FAILED
            fields: dict[str, object] = {"step": request.step, "phase": answer.phase.value}
            fields["took_s"] = round(answer.seconds, 3)
            log.log(
                logging.WARNING if failed else logging.INFO,
                "checkpoint_persists",
                extra=fields | ({"why": answer.why} if failed else {}),
            )
            if failed or answer.phase is PersistPhase.DONE:
                self._write_ended.set()
        self._master.urge()

    # --- Requests of workers ---

    async def candidates(self, round_number: int) -> RestoreCandidates:
        """Ask the master for the checkpoints in memory that a round's nodes could restore from.

        From then on, this node's memory counts as in use: reports name its transfer port.

        Raises:
            DLRoverError: The master does not answer, or its answer is not understood.
        """
        self.in_use = True
        return await self._fetch(_CANDIDATES, f"/v1/checkpoints?round={round_number}")

    async def locations(self, checkpoint: CheckpointId) -> ReplicaLocations:
        """Ask the master for the replica locations of a checkpoint, by rank.

        Raises:
            DLRoverError: The master does not answer, or its answer is not understood.
        """
        query = urlencode(asdict(checkpoint))
        return await self._fetch(_LOCATIONS, f"/v1/checkpoints/locations?{query}")

    async def _fetch(self, schema: TypeAdapter[T], path: str) -> T:
        """Return the master's answer to a GET request, which is not repeated.

        Raises:
            DLRoverError: The master does not answer.
            CheckpointError: The answer is not understood.
        """
        body = await self._master.ask(path)
        try:
            return read(schema, body)
        except ValueError as error:
            raise CheckpointError(f"the master's answer is invalid: {error}") from error

    async def close(self) -> None:
        """End the persister and all tasks, and remove the shared-memory pool.

        A pool whose node may return keeps its files if the agent is killed, but not after this
        call.
        """
        await self._persister.close()
        await asyncio.sleep(0)  # a task that is cancelled before it began would not clean up
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pool is not None:
            self._pool.remove()


def memory_checkpoints(folder: Path, job: str) -> list[MemoryCheckpoint]:
    """Return the newest checkpoints of a job in a shared-memory pool, the newest first.

    At most ``MAX_CHECKPOINTS`` are returned. A node's own slots and its replicas of a peer make
    separate entries. An entry may lack ranks: it lists those whose slots are complete. Its
    ``private_only`` names the ranks that have only a partial replica.

    Args:
        folder: Folder of the pool.
        job: Unique id of the job.

    Raises:
        OSError: The pool cannot be read, for example if there are no more file descriptors.
    """
    by_checkpoint: dict[tuple[CheckpointId, bool], list[SlotHeader]] = {}
    for path, header in shm.scan(folder):
        if header.job == job:
            replica = path.name.startswith(PREFIX)
            by_checkpoint.setdefault((header.id, replica), []).append(header)
    newest = sorted(by_checkpoint, reverse=True)[:MAX_CHECKPOINTS]
    return [
        _memory_checkpoint(by_checkpoint[id_, replica], replica=replica) for id_, replica in newest
    ]


def _memory_checkpoint(headers: Iterable[SlotHeader], *, replica: bool) -> MemoryCheckpoint:
    """Describe one checkpoint from its slots, of which there is at least one.

    A replica never asks for storage: its ``persist`` is False.
    """
    found = list(headers)
    first = found[0]
    return MemoryCheckpoint(
        step=first.step,
        round=first.round,
        timeline=first.timeline,
        world=first.world,
        ranks={s.rank: s.part for s in sorted(found, key=lambda s: s.rank)},
        private_only=sorted(s.rank for s in found if s.private_only),
        replica=replica,
        persist=any(s.persist for s in found) and not replica,
        nbytes=sum(s.size for s in found),
        certified=all(s.certified for s in found),
    )


class PersisterClient:
    """The agent's side of the persister, the process that writes checkpoints to storage.

    The process is started early. After its death the next request starts it again.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        on_reply: Callable[[WriteReply], None],
        children: ChildRegistry,
        argv: Sequence[str] = PERSISTER,
        *,
        wake_interval_s: float = WAKE_S,
    ) -> None:
        """Prepare the client; the process is not started yet.

        Args:
            environ: Environment of the process. Variables for the agent alone are left out.
            on_reply: Function that is called with each reply of the process.
            children: Registry of the agent's child processes. The persister is added.
            argv: Command line of the process.
            wake_interval_s: Seconds between two signals that wake a stopped process.
        """
        self._wake_interval_s = wake_interval_s
        self._environ = {k: v for k, v in environ.items() if k not in names.PRIVATE_ENV}
        self._on_reply, self._children, self._argv = on_reply, children, argv
        self._task: asyncio.Task[None] | None = None
        self._starter = Starter("persister")
        self._stdin: asyncio.WriteTransport | None = None
        """Pipe to the process; None if it does not run."""
        self._session: ProcessId | None = None
        self._queued_lines: list[bytes] = []
        """Lines for a process that is being started."""
        self._open_attempts: set[str] = set()
        """Attempts without a final reply."""
        self._has_written = False
        """Whether there was an attempt, so that the process may have a writer lease."""
        self._deaths = 0
        """How often the process has died in a row."""
        self._closing = False
        self.last_error = ""
        """Why the process does not run; empty if all is well."""

    def start(self) -> bool:
        """Begin to start the process in a task, unless it runs or is being started.

        After deaths in a row, the start is delayed by ``RESTART_DELAYS_S``. After :meth:`close`
        nothing happens.

        Returns:
            Whether a start was begun.
        """
        if self._closing or (self._task is not None and not self._task.done()):
            return False
        self._task = asyncio.create_task(self._run())
        return True

    def say(
        self, document: WriteRequest | CommitGrant | CancelWrite | WatchLease, *, start: bool = True
    ) -> None:
        """Send a document to the process, or queue it until the process has started.

        There is no confirmation. If the process dies, queued documents are dropped and each write
        without a final reply is reported as failed.

        Args:
            document: The document.
            start: Whether the process is started if it does not run. If not, the document is
                dropped without a process.
        """
        if isinstance(document, WriteRequest):
            self._open_attempts.add(document.attempt)
            self._has_written = True
        running = self._task is not None and not self._task.done()
        if not running and not start:
            return
        if self._stdin is not None:
            self._stdin.write(document.encode())
        else:
            self._queued_lines.append(document.encode())
        self.start()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        """Start the process in a session of its own; this runs in the starter's thread."""
        with shielded_child():
            return subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
            )

    async def _run(self) -> None:
        """Run the process until it ends; wait before that if the last one has died.

        When the task is cancelled, the process is killed. Otherwise its end or failed start is
        passed on to :meth:`_on_death`; this method does not start it again.
        """
        pause = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S) - 1)]
        await asyncio.sleep(pause)
        try:
            process = await self._starter.start(
                self._spawn,
                undo=kill_and_reap,
            )
        except OSError as error:  # includes OverdueError
            self._on_death(f"could not be started: {error.strerror or error}")
            return
        self._children.non_worker_pids.add(process.pid)
        with contextlib.suppress(ProcessLookupError):  # the process has already ended
            self._session = ProcessId.of(process.pid)
            self._children.add_session(self._session)
        waking = asyncio.create_task(self._wake(process))
        assert process.stdin is not None
        assert process.stdout is not None
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=MAX_REPLY)
        output: asyncio.ReadTransport | None = None
        try:
            output, _ = await loop.connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), process.stdout
            )
            self._stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
            self._stdin.writelines(self._queued_lines)
            self._queued_lines.clear()
            await self._read_replies(reader)
            code = await ended(process)
        finally:
            waking.cancel()
            if self._stdin is not None:
                if not self._stdin.is_closing():
                    self._stdin.abort()
                self._stdin = None
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(TimeoutError):  # a hung file system may block its end
                    await asyncio.wait_for(ended(process), KILLED_S)
            if output is not None:
                output.close()
            if self._session is not None:
                self._children.remove_session(self._session)
                self._session = None
            self._children.non_worker_pids.discard(process.pid)
        if not self._closing:
            self._on_death(f"has ended with code {code}")

    async def _wake(self, process: "subprocess.Popen[bytes]") -> None:
        """Send SIGCONT periodically while a write is open, in case the process is stopped."""
        while True:
            await asyncio.sleep(self._wake_interval_s)
            if self._open_attempts:
                wake(process)

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        """Read the replies of the process until the end of its output, and pass them on.

        A line that is not understood is logged and dropped.
        """
        while True:
            line = b""
            try:
                if not (line := await reader.readline()):
                    return
                message = read_line(line)
            except ValueError as error:  # also for a line that is too long, which is dropped
                text = repr(line[:100])
                log.warning("persister_reply_invalid", extra={"line": text, "why": str(error)})
                continue
            if isinstance(message, WriteReply):
                if message.phase in (PersistPhase.DONE, PersistPhase.FAILED):
                    self._open_attempts.discard(message.attempt)
                if message.phase is not PersistPhase.FAILED:
                    self._deaths, self.last_error = 0, ""
                self._on_reply(message)

    def _on_death(self, what: str) -> None:
        """Log the death of the process, and let its open attempts fail.

        Queued documents are dropped. The process starts again with the next request, not here.
        """
        self._deaths += 1
        self._queued_lines.clear()
        self.last_error = f"the persister {what}"
        pause = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S) - 1)]
        log.warning("persister_ended", extra={"why": self.last_error, "again_after_s": pause})
        left, self._open_attempts = self._open_attempts, set()
        for attempt in left:
            self._on_reply(
                WriteReply(attempt=attempt, phase=PersistPhase.FAILED, why=self.last_error)
            )

    async def close(self) -> None:
        """End the process; the client starts no process any more.

        A process that has written and has nothing left to write gets ``LEAVE_S`` seconds to release
        its writer leases, so that the next job can write into the directory sooner. It is killed
        otherwise, and a checkpoint that it has not committed stays incomplete. The wait for its end
        is ``KILLED_S`` seconds at most.
        """
        self._closing = True
        if self._task is not None:
            if self._has_written and not self._open_attempts and self._stdin is not None:
                self._stdin.close()
                await asyncio.wait({self._task}, timeout=LEAVE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
