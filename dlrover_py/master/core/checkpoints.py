"""Decisions about checkpoints: which are complete in memory, replicated, and stored.

A checkpoint is identified by its :class:`CheckpointId`; see
docs/decisions/0010-flash-checkpoint.md. It is complete when living nodes hold every shard group of
it. Its shard groups are known once each rank of its world has reported its own. Without a report
for this step, the rank's newest step of the same timeline counts. The cost of a report depends on
its own size, and not on what other nodes hold.
"""

import hashlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import dataclasses as records

from dlrover_py.master.core.copies import Copies
from dlrover_py.master.core.memory_index import MemoryIndex, NodeHoldings
from dlrover_py.master.core.replica_pairs import Topology
from dlrover_py.protocol.agents import (
    AgentReport,
    MemoryCheckpoint,
    PersistPhase,
    PersistRequest,
    RestoreCandidate,
    RestoreCandidates,
    StoredCheckpoint,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId, Rejection
from dlrover_py.protocol.names import NodeId, Term, id_key
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import StoreAnswer
from dlrover_py.protocol.words import duration

RoundStart = tuple[int, CheckpointId | None]
"""A round, and the checkpoint that it continued from; None if it continued from none."""

REJECTIONS_KEPT = 16
"""Number of rejections that are remembered."""
ROUND_STARTS_KEPT = 8
"""Number of earlier rounds whose starting checkpoint is remembered."""
TRIES = 2
"""Number of attempts to store a checkpoint that may be lost."""


@dataclass(slots=True)
class _PersistRun:
    """A checkpoint that is being written to storage."""

    id: CheckpointId
    world: int
    attempt: str
    """Id of this attempt."""
    ranks: dict[NodeId, list[int]]
    """The ranks whose slots a node writes, by node."""
    coordinator: NodeId
    """The node that commits the checkpoint once all shards are there."""
    begun: float
    """Monotonic time of its begin."""
    until: float
    """Monotonic time at which the attempt has failed."""
    granted: bool = False
    """Whether the coordinator may commit."""
    done: set[NodeId] = field(default_factory=set)
    """Nodes whose shards are in storage."""

    @classmethod
    def begin(
        cls, memory: MemoryIndex, key: CheckpointId, seed: object, *, now: float, until: float
    ) -> "_PersistRun":
        """Return a new attempt.

        Each rank's slot is written by one node that has it, preferably the rank's own node. The
        writer of the lowest rank commits the checkpoint.

        Args:
            memory: What the nodes hold.
            key: The checkpoint, which must be complete.
            seed: What makes the id of the attempt unique, with the checkpoint and the coordinator.
            now: Monotonic time.
            until: Monotonic time at which the attempt has failed.
        """
        writers = memory.writers(key)
        ranks: dict[NodeId, list[int]] = {}
        for rank, node in writers.items():
            ranks.setdefault(node, []).append(rank)
        coordinator = writers[min(writers)]
        seeds = (memory.nodes[coordinator].boot, seed, key)
        attempt = hashlib.sha256(repr(seeds).encode()).hexdigest()[:12]
        return cls(key, memory.checkpoints[key].world, attempt, ranks, coordinator, now, until)

    def request(self, node: NodeId, term: Term) -> PersistRequest | None:
        """Return what the node has to write; None if that is nothing."""
        if node not in self.ranks:
            return None
        coordinates = node == self.coordinator
        return PersistRequest(
            attempt=self.attempt,
            step=self.id.step,
            round=self.id.round,
            timeline=self.id.timeline,
            world=self.world,
            ranks=self.ranks[node],
            writers=sorted(self.ranks, key=id_key) if coordinates else [],
            grant=term if coordinates and self.granted else None,
        )


@dataclass(slots=True)
class _FlushRequest:
    """A request to store the newest checkpoint in memory, because it may be lost."""

    why: str
    waits: set[NodeId]
    """Nodes whose workers may still run."""
    round: int
    settle_at: float
    """Monotonic time at which the request no longer waits for these nodes."""
    until: float
    """Monotonic time at which the request ends without success."""
    stay: bool
    """Whether nodes that have to leave stay until then."""
    attempt: str = ""
    """Id of its newest attempt. That attempt is not canceled for a newer checkpoint, because a
    round that still trains has a newer one after each step."""
    copy: bool = False
    """Whether nodes that stay copy the checkpoint from nodes that leave, if it is not stored."""


@dataclass(slots=True)
class _RestoreQuery:
    """A node's question which checkpoints could be restored from memory."""

    number: int
    round: int
    until: float


@dataclass(frozen=True, slots=True)
class CheckpointNote:
    """An event about checkpoints, to be shown to people."""

    reason: EventReason
    """A fixed CamelCase word."""
    message: str
    warning: bool = False


@dataclass(slots=True)
class CheckpointOutcome:
    """The result of :meth:`Checkpoints.look`."""

    reassign: set[NodeId] = field(default_factory=set)
    """Nodes whose assignment has changed."""
    notes: list[CheckpointNote] = field(default_factory=list)
    """Events to record."""
    answers: list[tuple[int, RestoreCandidates]] = field(default_factory=list)
    """Number of a question, and the answer to it."""
    journal_changed: bool = False
    """Whether the journal has changed: what is in storage, or what a round has skipped."""
    wake_at: float = math.inf
    """Monotonic time of the next call, if nothing happens before."""

    def note(self, reason: EventReason, message: str, *, warning: bool = False) -> None:
        """Add an event to record.

        Args:
            reason: A fixed CamelCase word.
            message: What has happened, in words.
            warning: Whether it is a problem.
        """
        self.notes.append(CheckpointNote(reason, message, warning))


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest checkpoint that could be restored."""

    step: int
    at: float
    """Unix time."""
    where: str = ""
    """Its folder if it is in storage; otherwise empty."""


@records.dataclass(slots=True, kw_only=True)
class CheckpointRecord:
    """All that outlives the master about checkpoints."""

    stored: StoredCheckpoint | None = None
    """The newest checkpoint in storage."""
    round_starts: list[RoundStart] = field(default_factory=list)
    """The last rounds, newest last, each with the checkpoint that it continued from. Checkpoints
    that are newer than this one and older than the round are never stored."""
    rejected: list[Rejection] = field(default_factory=list)
    """Which checkpoints have wrong values: they are neither restored nor stored."""
    store_answer: StoreAnswer | None = None
    """The answer to the newest ``spec.storeCheckpoint``."""

    def continued_from(self, round_number: int) -> int | None:
        """Return the step that a round has continued from; None if it is not known."""
        starts = (best for number, best in self.round_starts if number == round_number)
        best = next(starts, None)
        return None if best is None else best.step

    def begin_round(self, number: int, best: CheckpointId | None) -> None:
        """Note the checkpoint that a round continues from; None: it begins at step 0."""
        # A checkpoint that an earlier round skipped may be continued from after all.
        kept = [one for one in self.round_starts if best is None or not _skips(one, best)]
        new = number, best
        self.round_starts = [*[one for one in kept if one != new][-ROUND_STARTS_KEPT:], new]

    def skips(self, key: CheckpointId) -> bool:
        """Return whether it has wrong values, or a later round continued from an older one."""
        return self.rejects(key) or any(_skips(one, key) for one in self.round_starts)

    def rejects(self, key: CheckpointId) -> bool:
        """Return whether a checkpoint is known to have wrong values."""
        return any(one.rejects(key) for one in self.rejected)

    def reject(self, new: Rejection) -> None:
        """Reject checkpoints, also those of which it was not known before."""
        kept = [one for one in self.rejected if one.round > new.round or one.good < new.good]
        self.rejected = [*kept, new][-REJECTIONS_KEPT:]
        if self.stored is not None and self.rejects(self.stored.id):
            self.stored = None


class Checkpoints:
    """All knowledge about checkpoints; the record outlives the master, and is changed in place.

    Nothing is sent or written to storage here. Each result of a decision is in the outcome of the
    next :meth:`look`.
    """

    def __init__(self, record: CheckpointRecord | None = None) -> None:
        self._record = record = record if record is not None else CheckpointRecord()
        self.in_use = record.stored is not None
        """Whether the script of some node saves and restores checkpoints."""
        self.storable = record.stored is not None
        """Whether there is a storage, as far as is known."""
        self.failing: str = ""
        """Why the last attempt to store a checkpoint failed; empty if it succeeded."""
        self.commits = self.failures = 0
        self.last_write: tuple[int, float] | None = None
        """Step of the checkpoint that was stored last, and the seconds since the attempt began."""
        self.memory = MemoryIndex()
        self.copies = Copies(self.memory)
        self.node_errors: dict[NodeId, str] = {}
        """Why a node's checkpoints are not as complete as they should be, in words."""
        self._round = 0
        self._not_confirmed: set[NodeId] = set()
        """Members of the round whose memory may still be changed by workers of an earlier round."""
        self.not_reported: set[NodeId] = set()
        """Nodes of an earlier term that have not yet reported to this master what they hold."""
        self._run: _PersistRun | None = None
        self._attempts = 0
        self._flush: _FlushRequest | None = None
        """The request to store what may be lost, if there is one."""
        self._queries: list[_RestoreQuery] = []
        self._outcome = CheckpointOutcome()
        self._needs_decision = False
        """Whether something has changed that may lead to a new attempt to store."""

    @property
    def stored(self) -> StoredCheckpoint | None:
        """The newest checkpoint in storage, or None."""
        return self._record.stored

    # --- Input ---

    def reject(self, new: Rejection) -> None:
        """Never again restore or store checkpoints with wrong values.

        A running attempt to store one is canceled, unless its commit is granted already.
        """
        self._record.reject(new)
        self._needs_decision = self._outcome.journal_changed = True
        if self._run is not None and not self._run.granted and self._record.rejects(self._run.id):
            self._cancel("it has wrong values")

    def recall(self, node: NodeId) -> None:
        """Register a node of an earlier term: it may hold what no other node holds."""
        self.not_reported.add(node)

    def take(self, node: NodeId, report: AgentReport, now: float) -> None:
        """Take in a report of a node; parts that are equal to its last report are skipped.

        The report may finish, fail or cancel the running attempt to store a checkpoint. A new agent
        process of a node cancels an attempt of which this node has not written its part.

        Args:
            node: The node.
            report: Its report.
            now: Monotonic time.
        """
        self.not_reported.discard(node)
        known = self.memory.nodes.setdefault(node, NodeHoldings())
        if known.boot and known.boot != report.boot_id:
            self._writer_lost(node, "has a new agent process")
        known.boot = report.boot_id
        if report.memory != known.memory:
            self._remember(node, known, report.memory)
        if (report.offer.addr, report.transfer_port) != (known.addr, known.transfer_port):
            known.addr, known.transfer_port = report.offer.addr, report.transfer_port
            if holder := self.copies.replica_holder.get(node):
                self._outcome.reassign.add(holder)
        if report.memory_round != known.memory_round:
            known.memory_round = report.memory_round
            self._workers_ended(node, known.memory_round)
        if report.checkpoint_error:
            self.node_errors[node] = report.checkpoint_error
        elif self.node_errors:
            self.node_errors.pop(node, None)
        self.in_use |= report.transfer_port > 0  # even if nothing could be saved yet
        self.storable |= report.stores
        if report.stored != known.stored:
            known.stored = report.stored
            if report.stored is not None:
                self._note_stored(report.stored)
        if report.persisting is not None and self._run is not None:
            self._progressed(node, report, now)

    def drop(self, node: NodeId, now: float = -math.inf) -> None:
        """Drop a node that is gone, with all that it held; an unknown node is ignored.

        An attempt to store a checkpoint is canceled if this node has not written its part of it. If
        the time of the attempt is over, it has failed for that reason: nodes that have to end are
        killed then.

        Args:
            node: Id of the node.
            now: Monotonic time.
        """
        self._expire(now)
        self.not_reported.discard(node)
        known = self.memory.nodes.pop(node, None)
        if known is None:
            return
        self._remember(node, known, [])
        self.node_errors.pop(node, None)
        self._workers_ended(node, math.inf)
        self._writer_lost(node, "is gone")

    def new_round(
        self, number: int, members: Sequence[tuple[NodeId, Topology]], *, replicas: bool
    ) -> None:
        """Begin a round with these members, and choose the pairs of replicas.

        An attempt to store a checkpoint is canceled, unless its commit is granted already.

        Args:
            number: Number of the round.
            members: Node and topology of each member, in the order of ranks.
            replicas: Whether nodes keep replicas of each other's memory.
        """
        self._round = number
        self._not_confirmed = {n for n, _ in members if self.memory.memory_round_of(n) < number}
        if self._run is not None and not self._run.granted:
            self._cancel("a new round has begun")
        self.copies.begin_round(members, replicas=replicas)
        self._needs_decision = True

    def end_round(self) -> None:
        """Keep no more replicas, because the round ends without another one.

        A running attempt to store a checkpoint goes on.
        """
        self.copies.end_round()

    def request_flush(
        self,
        why: str,
        members: Iterable[NodeId],
        round_number: int,
        *,
        now: float,
        until: float,
        stay: bool,
        copy: bool = False,
    ) -> None:
        """Request to keep the newest complete checkpoint once the round's workers have ended.

        It is stored. With ``copy``, and if it cannot be stored, members of the round that stay copy
        what only leaving nodes have. If the workers have not ended after half of the time, this
        begins anyway. They may still make the first checkpoint of all. So a request without
        ``copy`` is ignored only if memory has a checkpoint and no storage is known. A second
        request for the same round only extends the first one, and a request for another round
        replaces it.

        Args:
            why: The reason, in words.
            members: Members of the round.
            round_number: Number of the round.
            now: Monotonic time.
            until: Monotonic time at which the request ends without success.
            stay: Whether nodes that have to end wait for this.
            copy: Whether some nodes leave, and others stay.
        """
        if self.memory.checkpoints and not (self.storable or copy):
            return
        old = self._flush
        if old is not None and old.round == round_number:
            old.until, old.stay = max(old.until, until), old.stay or stay
            old.copy = old.copy or copy
            self._needs_decision = True
            return
        waits = {n for n in members if 0 <= self.memory.memory_round_of(n) <= round_number}
        settle_at = now + (until - now) / 2
        self._outcome.reassign |= self.copies.end_hand_over()
        self._flush = _FlushRequest(why, waits, round_number, settle_at, until, stay, copy=copy)
        self._needs_decision = True

    def ask(self, number: int, round_number: int, until: float) -> None:
        """Note a question what can be restored; a later :meth:`look` has the answer.

        Args:
            number: Number of the question.
            round_number: Round of the node that asks. Its members must have listed their memory
                first.
            until: Monotonic time of the answer, at the latest.
        """
        self._queries.append(_RestoreQuery(number, round_number, until))

    def look(
        self,
        now: float,
        wall: float,
        *,
        term: Term,
        persist_s: float,
        leaving: Collection[NodeId] = (),
    ) -> CheckpointOutcome:
        """Decide what follows from all that was taken in; return what is new since the last call.

        At most one attempt to store a checkpoint runs at a time. It fails after ``persist_s``, or
        when the request that began it ends.

        Args:
            now: Monotonic time.
            wall: Unix time.
            term: Term of this master.
            persist_s: Seconds after which an attempt to store a checkpoint has failed.
            leaving: Nodes that have to end.
        """
        self.memory.leaving = frozenset(leaving)
        self._expire(now)
        if self._needs_decision:
            self._needs_decision = False
            self._decide(now, wall, term, persist_s)
        self._answer(now)
        out, self._outcome = self._outcome, CheckpointOutcome()
        if self._run is not None:
            out.wake_at = min(out.wake_at, self._run.until)
        if (flush := self._flush) is not None:
            due = flush.settle_at if flush.waits and now < flush.settle_at else flush.until
            out.wake_at = min(out.wake_at, due)
        out.wake_at = min([out.wake_at, *(q.until for q in self._queries)])
        return out

    # --- Parts of a node's assignment ---

    def persist_request(self, node: NodeId, term: Term) -> PersistRequest | None:
        """Return what the node has to write to storage in the running attempt, or None.

        A node gets the same request until the attempt ends, also when its own part is written.
        """
        return None if self._run is None else self._run.request(node, term)

    def holds(self, node: NodeId) -> bool:
        """Return whether a node that has to end should stay, because its memory is being stored.

        A node should also stay while it has a checkpoint in memory and a request is open to store
        what may be lost, or while its workers, which use checkpoints, may still make one. That
        applies only to requests for which nodes stay. Once it is known what has to be copied, only
        the nodes that have it stay.
        """
        run = self._run
        if run is not None and node in run.ranks and node not in run.done:
            return True
        flush, known = self._flush, self.memory.nodes.get(node)
        if flush is None or not flush.stay or known is None:
            return False
        if self.copies.wanted is not None:
            return node in self.copies.heirs
        return bool(known.memory) or node in flush.waits

    def needed_until(self, node: NodeId) -> float:
        """Return until when a request waits for this node, even if the node is silent.

        It waits for a node that alone has a part of the checkpoint, since no other node could write
        that part.

        Returns:
            Monotonic time; minus infinity if no request is open, or another node has the part.
        """
        key, flush = self.writing or self.newest_complete(), self._flush
        alone = key is not None and self.memory.is_only_holder(node, key)
        return flush.until if flush is not None and alone and self.holds(node) else -math.inf

    # --- Queries ---

    def newest(self, wall: float) -> NewestCheckpoint | None:
        """Return the checkpoint that would be restored if the job started again now, or None.

        A checkpoint in memory counts only if it is complete, and newer than the one in storage. The
        result is None if none is known.

        Args:
            wall: Unix time. It is noted as the time of a checkpoint in memory that was not seen to
                be complete before.
        """
        for key in sorted(self.memory.checkpoints, reverse=True):
            if self._is_stored(key):
                break
            if self.memory.is_complete(key) and not self._record.rejects(key):
                one = self.memory.checkpoints[key]
                one.complete_at = wall if one.complete_at is None else one.complete_at
                return NewestCheckpoint(key.step, one.complete_at)
        return self.storage

    def newest_complete(self) -> CheckpointId | None:
        """Return the newest complete checkpoint in memory that no round has skipped, or None."""
        return next((k for k in self.memory.complete() if not self._record.skips(k)), None)

    @property
    def writing(self) -> CheckpointId | None:
        """The checkpoint that is being written to storage, or None."""
        return None if self._run is None else self._run.id

    def only_in_memory(self) -> int:
        """Return the newest step in memory, if nothing is in storage and nothing can be stored.

        Returns:
            0 if a checkpoint is in storage or being written, a storage is known, or nothing is in
            memory.
        """
        if self.stored is not None or self.storable or self._run is not None:
            return 0
        return max(self.memory.checkpoints).step if self.memory.checkpoints else 0

    @property
    def storage(self) -> NewestCheckpoint | None:
        """The newest checkpoint in storage, or None."""
        stored = self.stored
        return None if stored is None else NewestCheckpoint(stored.step, stored.at, stored.where)

    # --- Memory ---

    def _remember(self, node: NodeId, known: NodeHoldings, memory: list[MemoryCheckpoint]) -> None:
        """Replace the list of what a node holds; this may lead to a new attempt to store."""
        if self.memory.replace(node, known, memory):  # they have a different common shard group
            self._outcome.reassign.update(self.memory.nodes)
        self.in_use |= bool(memory)
        self.storable |= any(held.persist for held in memory)
        self._needs_decision |= bool(self.memory.requested or self._flush)

    def _workers_ended(self, node: NodeId, number: float) -> None:
        """Take in that workers of rounds before ``number`` can no longer change the node's memory.

        ``number`` is infinite if the node is gone. Nothing follows unless the current round, or a
        request to store what may be lost, waits for the node.
        """
        if number >= self._round and node in self._not_confirmed:
            self._not_confirmed.discard(node)
            self._needs_decision = True
        flush = self._flush
        if flush is not None and number > flush.round and node in flush.waits:
            flush.waits.discard(node)
            self._needs_decision = True
            self._outcome.reassign.add(node)  # it may have been told to stay

    def _answer(self, now: float) -> None:
        """Answer the questions that are due; record what the current round continues from."""
        due = [q for q in self._queries if self._due(q, now)]
        if due:
            found = [c for c in self.memory.candidates() if not self._record.rejects(c.id)]
            self._outcome.answers += [(q.number, RestoreCandidates(candidates=found)) for q in due]
            self._queries = [q for q in self._queries if q not in due]
            self.copies.loading = bool(self.copies.heirs)
            if any(q.round == self._round for q in due):
                self._record_round_start(found)

    def _due(self, question: _RestoreQuery, now: float) -> bool:
        """Return whether a question is to be answered now.

        The answer waits until all members of the question's round, and all nodes of an earlier
        term, have listed their memory. It also waits for a commit that is granted, and for what
        nodes of the round before still have to report or to hand over. The time limit of the
        question, or a newer round, ends the wait.
        """
        known = question.round <= self._round and not (self._not_confirmed or self.not_reported)
        # A checkpoint whose commit is granted will be in storage, where the node looks next.
        known = known and not (self._run is not None and self._run.granted)
        known = known and not self._is_left_open(question.round)
        return known or question.round < self._round or now >= question.until

    def _is_left_open(self, round_number: int) -> bool:
        """Return whether nodes of an earlier round may still add to what a round continues from.

        Their workers may still run while the newest checkpoint is not complete. Or they have a part
        of it that is being copied.
        """
        flush = self._flush
        if flush is None or not flush.copy or flush.round >= round_number:
            return False
        if self.copies.heirs:
            return not self.copies.loading
        newest = max(self.memory.checkpoints, default=None)
        return bool(flush.waits) and newest is not None and not self.memory.is_complete(newest)

    def _record_round_start(self, found: Sequence[RestoreCandidate]) -> None:
        """Record the checkpoint that the round continues from: the best of all known.

        A newer checkpoint from before the round may turn up later. It is not part of the round's
        history, but in storage it would be taken for a part. It must therefore never be stored. A
        running attempt to store it is canceled, unless its commit is granted.

        Args:
            found: What can be restored from memory, best first.
        """
        known = [c.id for c in found[:1]]
        if self.stored is not None:
            known.append(self.stored.id)
        best = max(known, default=None)
        self._record.begin_round(self._round, best)
        # A later master cannot learn this again: running workers ask no second time.
        self._needs_decision = self._outcome.journal_changed = True
        run = self._run
        if run is not None and not run.granted and self._record.skips(run.id):
            self._cancel("the round continued from an older checkpoint")

    # --- Storage ---

    def _note_stored(self, stored: StoredCheckpoint) -> None:
        """Take in a checkpoint that a node has seen in storage.

        The journal keeps the checkpoint only if its number is higher than that of the known one. In
        any case a storage is known from now on.
        """
        self.in_use = self.storable = True
        if self._record.rejects(stored.id):
            return
        if self.stored is None or stored.number > self.stored.number:
            self._record.stored = stored
            self._outcome.journal_changed = True
            self._needs_decision = True

    def _progressed(self, node: NodeId, report: AgentReport, now: float) -> None:
        """Take in a node's progress with the checkpoint that is being written.

        News of other attempts is ignored. The first node that fails ends the attempt. The
        coordinator is the node that commits the checkpoint. When it reports that all shards are
        there, the commit is granted. When it reports the commit, the attempt has succeeded.

        Args:
            node: The node.
            report: Its report.
            now: Monotonic time.
        """
        run, news = self._run, report.persisting
        assert run is not None
        assert news is not None
        if news.attempt != run.attempt or node not in run.ranks:
            return
        if news.phase is PersistPhase.FAILED:
            self._failed(f"{node}: {news.why or 'its persister process failed'}")
        elif node != run.coordinator:
            if news.phase is PersistPhase.DONE and node not in run.done:
                run.done.add(node)
                self._outcome.reassign.add(node)
        elif news.phase is PersistPhase.READY and not run.granted:
            run.granted = True
            self._outcome.reassign.add(node)
        elif news.phase is PersistPhase.DONE and run.granted:
            written = report.stored is not None and report.stored.step == run.id.step
            if written and not self._record.rejects(run.id):
                self._record.stored = report.stored  # another directory has its own numbers
            self._done(run, now)

    def _done(self, run: _PersistRun, now: float) -> None:
        """Close an attempt that has succeeded; the request that it was made for ends too.

        Any other request goes on: memory may have a newer checkpoint than this one.

        Args:
            run: The attempt.
            now: Monotonic time.
        """
        self.commits += 1
        self.last_write = run.id.step, now - run.begun
        self.failing = ""
        self._close(run, stored=True)
        self._outcome.journal_changed = True
        where = f" in {at.where}" if (at := self.stored) and at.step == run.id.step else ""
        message = f"the checkpoint of step {run.id.step} was stored{where}"
        message += f" after {duration(now - run.begun)}"
        self._outcome.note(EventReason.CHECKPOINT_STORED, message)
        self._outcome.reassign.update(run.ranks)
        flush = self._flush
        if flush is not None and flush.attempt == run.attempt:
            self._end_flush()

    def _failed(self, why: str) -> None:
        """End the running attempt to store a checkpoint, which has failed, and count the failure.

        The next outcome has a warning that says why, and :attr:`failing` says it too. The
        writers are reassigned, so that their assignments no longer have the request to write. The
        count and the reason are not in the record, so they are lost with the master.

        The same checkpoint is tried again only for a request to store what may be lost, until
        `TRIES` attempts at it have failed.

        Args:
            why: The reason in words.
        """
        run = self._run
        assert run is not None
        self.failures += 1
        self.failing = f"the checkpoint of step {run.id.step} was not stored: {why}"[:1000]
        self._outcome.note(EventReason.CHECKPOINT_FAILED, self.failing, warning=True)
        self._outcome.reassign.update(run.ranks)
        self._close(run)

    def _close(self, run: _PersistRun, *, stored: bool = False) -> None:
        """Clear and count an attempt that has ended; another one may then begin."""
        self._run = None
        self._needs_decision = True
        if (one := self.memory.checkpoints.get(run.id)) is not None:
            one.tried, one.stored = one.tried + 1, one.stored or stored

    def _cancel(self, why: str) -> None:
        """Cancel the attempt and record an event; the checkpoint may be written again later."""
        run, self._run = self._run, None
        assert run is not None
        message = f"the checkpoint of step {run.id.step} was not stored: {why}"
        self._outcome.note(EventReason.CHECKPOINT_CANCELED, message)
        self._outcome.reassign.update(run.ranks)
        self._needs_decision = True

    def _writer_lost(self, node: NodeId, what: str) -> None:
        """Cancel the attempt if this node has not written its part yet; otherwise do nothing."""
        run = self._run
        if run is not None and node in run.ranks and node not in run.done:
            self._cancel(f"node {node}, which was writing a part of it, {what}")

    def _expire(self, now: float) -> None:
        """Fail an attempt, or end a request, whose time is over."""
        run, flush = self._run, self._flush
        if run is not None and now >= run.until:
            self._failed(f"the write took longer than {run.until - run.begun:g} s")
        if flush is not None and now >= flush.until:
            if loss := self.copies.overdue():
                self._outcome.note(EventReason.CHECKPOINT_NOT_COPIED, loss, warning=True)
            self._end_flush()
        elif flush is not None and flush.waits and now >= flush.settle_at:
            self._needs_decision = True

    def _end_flush(self) -> None:
        """End the request, if there is one; nodes that have waited for it are reassigned."""
        flush, self._flush = self._flush, None
        self._outcome.reassign |= self.copies.end_hand_over()
        if flush is not None and flush.stay:
            self._outcome.reassign.update(
                n for n, known in self.memory.nodes.items() if known.memory or n in flush.waits
            )

    def _decide(self, now: float, wall: float, term: Term, persist_s: float) -> None:
        """Begin to store a checkpoint, if one should be stored now.

        A request to store what may be lost comes first. Its write begins once no worker is waited
        for. It takes the newest complete checkpoint in memory that no round has skipped. The
        request ends if there is none or no storage, if it is in storage already, or was tried
        twice. But if nodes leave, it may have to be copied first.

        An attempt that the request has not begun is canceled for it if its checkpoint is older. If
        the commit of that attempt is granted, the request waits for its end instead.

        Otherwise, and while no attempt runs, the newest complete checkpoint that workers want
        stored is written. Checkpoints that are stored already, were skipped by a round, or were
        tried before are left out.

        Args:
            now: Monotonic time.
            wall: Unix time.
            term: Term of this master.
            persist_s: Seconds after which an attempt without such a request has failed.
        """
        flush = self._flush
        if flush is not None and (not flush.waits or now >= flush.settle_at):
            self._outcome.reassign |= flush.waits  # they may have been told to stay
            flush.waits.clear()
            key = self.newest_complete()
            if key is None or not self._is_worth_writing(key):
                if key is None or not (flush.copy and self._hand_over(key)):
                    self._end_flush()
                return
            self._outcome.reassign |= self.copies.end_hand_over()
            if (run := self._run) is None or (
                run.id < key and run.attempt != flush.attempt and not run.granted
            ):
                if run is not None:
                    self._cancel("a newer checkpoint is stored instead")
                flush.attempt = self.store(key, now, term, flush.until, flush.why)
                self._needs_decision = False
            return
        if self._run is not None:
            return
        for key in sorted(self.memory.requested, reverse=True):
            one = self.memory.checkpoints[key]
            if one.tried or self._is_stored(key) or self._record.skips(key):
                continue
            if self.memory.is_complete(key):
                self._write(key, now, term, now + persist_s)
                return

    def _hand_over(self, key: CheckpointId) -> bool:
        """Have what only leaving nodes have of a checkpoint copied, unless it is in storage.

        Returns:
            Whether leaving nodes have to stay for it.
        """
        if self._is_stored(key):
            return False
        changed, loss = self.copies.hand_over(key)
        self._outcome.reassign |= changed
        if loss:
            self._outcome.note(EventReason.CHECKPOINT_NOT_COPIED, loss, warning=True)
        return bool(self.copies.heirs)

    def _is_worth_writing(self, key: CheckpointId) -> bool:
        """Return whether a write could succeed that stores more than what is in storage."""
        tried = self.memory.checkpoints[key].tried
        return self.storable and not self._is_stored(key) and tried < TRIES

    def _is_stored(self, key: CheckpointId) -> bool:
        """Return whether this checkpoint, or a later one, is in storage."""
        stored = self.stored
        later = stored is not None and stored.id >= key
        return later or self.memory.checkpoints[key].stored

    def store(self, key: CheckpointId, now: float, term: Term, until: float, why: str) -> str:
        """Begin an attempt that somebody has requested, with an event; return its id.

        Args:
            key: The checkpoint, which must be complete, while no attempt runs.
            now: Monotonic time.
            term: Term of this master.
            until: Monotonic time at which the attempt has failed.
            why: The cause, in words.
        """
        message = f"the checkpoint of step {key.step} is being stored now: {why}"
        self._outcome.note(EventReason.CHECKPOINT_REQUESTED, message)
        return self._write(key, now, term, until)

    def _write(self, key: CheckpointId, now: float, term: Term, until: float) -> str:
        """Begin an attempt to store a checkpoint; its writers are to be reassigned.

        Args:
            key: The checkpoint, which must be complete.
            now: Monotonic time.
            term: Term of this master.
            until: Monotonic time at which the attempt has failed.

        Returns:
            Id of the attempt.
        """
        self._attempts += 1
        seed = term, self._attempts
        self._run = run = _PersistRun.begin(self.memory, key, seed, now=now, until=until)
        self._outcome.reassign.update(run.ranks)
        return run.attempt


def _skips(start: RoundStart, key: CheckpointId) -> bool:
    """Return whether a round has skipped a checkpoint: it continued from an older one."""
    number, best = start
    return key.round < number and (best is None or key > best)
