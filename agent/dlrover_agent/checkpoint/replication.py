"""Replicas of a peer's checkpoints in this node's memory, so that they outlive the peer.

Example (as :mod:`dlrover_agent.checkpoint.saver` uses it)::

    replicas = Replicator(pool.path, job_uid, token, on_change=report_now, mb_per_s=…)
    task = asyncio.create_task(replicas.run())  # runs until it is cancelled
    replicas.follow(assignment.peer)            # with each assignment; None: replicate no peer
    replicas.last_error                         # last error in one line; empty if all is well

:func:`dlrover_py.checkpoint.shm.scan` lists the replicas: slots ``peer-<rank>.<0..1>``.
``on_change`` is called in the event loop when the replicas or the last error change. A report
should follow.

A slot is a file in shared memory with one worker's checkpoint. In this module, the checkpoint of a
node consists of the slots that its workers have filled for one step, round and timeline. A timeline
is a part of a round: a script that loads a state begins another one. A shard group is the set of
ranks that hold the same part of the state.

:func:`plan` decides which of the peer's checkpoints to copy, and into which slots. It takes two
lists and does no I/O. A thread copies one slot at a time, straight into shared memory, and computes
the checksums while the bytes arrive. A slot is completed only if all checksums are right. Each rank
has a pair of slots. One keeps a complete replica while the other is filled.

A replica may be partial (``private_only``). It lacks the bytes that all ranks of a shard group
have, when another slot on this node has them.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import (
    DamagedDataError,
    ShmFullError,
    ShmSlot,
    SlotContents,
    format_size,
)
from dlrover_py.checkpoint.transfer import SlotOverwrittenError, TransferConnection, connect_to_peer
from dlrover_py.pacing import Backoff, TokenBucket
from dlrover_py.protocol.agents import ReplicationPeer
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import DLRoverError, TransientError
from dlrover_py.protocol.slots import PAGE, SlotHeader

log = logging.getLogger("agent.replicas")

PREFIX = "peer-"
"""Start of the names of slots with replicas."""
SLOTS_PER_RANK = 2
"""Number of slots for each rank: one is complete while the other is filled."""
POLL_S = 1.0
"""Seconds between two requests for newer checkpoints of the peer."""
MAX_BACKOFF_S = 30.0
"""Most seconds to wait after errors."""
MAX_OVERWRITTEN = 5
"""Number of overwritten copies in a row after which this is reported as an error."""
PIN_AFTER = 2
"""Number of overwritten copies in a row after which a slot of the peer is locked for the copy."""
BURST_S = 0.1
"""Seconds of unused bandwidth that may be used in one burst."""
LOCK_RETRY_S = 0.05
"""Seconds between two attempts to reserve memory while a worker reserves some."""
CHUNK_BYTES = 1 << 24
"""Bytes that are requested, and added to a checksum, in one chunk."""

_OWN = re.compile(r"[0-9]+\.[0-9]", re.ASCII)
_COPY = re.compile(PREFIX + r"([0-9]+)\.([0-9])", re.ASCII)
NamedHeader = tuple[str, SlotHeader]
"""Name and header of a slot."""


class _NotYetError(TransientError):
    """The replication cannot go on now, without an error; it is tried again."""


@dataclass(frozen=True, slots=True)
class ReplicaPull:
    """A slot of the peer to copy."""

    name: str
    """Name of the slot on the peer."""
    header: SlotHeader
    """Header of the slot."""
    to: str
    """Name of the slot on this node that is filled."""
    private_only: bool
    """Whether the bytes that other ranks have too are already on this node."""


@dataclass(frozen=True, slots=True)
class ReplicationPlan:
    """The next steps of a replication, in the order of the fields."""

    pulls: tuple[ReplicaPull, ...] = ()
    """Slots of the peer to copy."""
    spare: tuple[str, ...] = ()
    """Replicas that are not needed any more after the copies."""
    last: tuple[str, ...] = ()
    """Replicas that may be removed before the copies if the memory does not suffice, in order.

    They include ``spare``."""
    flags: tuple[tuple[str, bool], ...] = ()
    """Replicas whose ``persist`` flag differs from the peer's, with the new value."""
    told: CheckpointId | None = None
    """Checkpoint of which the peer's workers wait to learn that its copy is complete."""


def newest(found: Iterable[tuple[object, SlotHeader]]) -> CheckpointId | None:
    """Return the most complete checkpoint: the one that covers the most ranks or workers.

    Among checkpoints that cover equally many, it is the newest one. It may still lack ranks.

    Args:
        found: Pairs of a rank or worker, and the header of a slot that it has.

    Returns:
        The checkpoint; None if there are no slots.
    """
    covers: dict[CheckpointId, set[object]] = {}
    for holder, header in found:
        covers.setdefault(header.id, set()).add(holder)
    return max(covers, key=lambda one: (len(covers[one]), one), default=None)


def plan(
    peer_slots: Sequence[NamedHeader],
    local_slots: Sequence[NamedHeader],
    wanted: CheckpointId | None = None,
) -> ReplicationPlan:
    """Decide what of the peer's memory is copied.

    Ranks of one shard group hold the same part of the state. If a job has several shard groups, its
    workers mark a checkpoint: all nodes must copy it, and no worker overwrites it until then. The
    marks on this node and on the peer show whether there are several shard groups, and which
    checkpoints still count.

    Args:
        peer_slots: Names and headers of the slots on the peer.
        local_slots: Names and headers of the slots on this node.
        wanted: The checkpoint to copy, because the peer leaves. It need not be marked, and the peer
            may have parts of it as replicas. None: the peer's most complete checkpoint is copied.

    Returns:
        A plan that copies those slots of the peer's most complete checkpoint that are not on this
        node. No copy overwrites a slot of the most complete replica. The plan is empty if the peer
        has no slots of its own, or not the wanted checkpoint. It is empty too while a mark is still
        missing in the newest timeline of the peer, if older timelines have marks.
    """
    at_peer = [
        (name, s)
        for name, s in peer_slots
        if not s.private_only and (_OWN.fullmatch(name) or s.id == wanted)
    ]
    own = [(name, s) for name, s in local_slots if _OWN.fullmatch(name)]
    copies = {name: s for name, s in local_slots if _COPY.fullmatch(name)}
    marked_at_peer = _marked_slots(at_peer)
    marked = _valid_marks(marked_at_peer, _marked_slots(own)) or _marks_of_replicas(
        copies, at_peer, own
    )
    desired = wanted or newest((_worker_number(name), s) for name, s in marked_at_peer or at_peer)
    if wanted is not None:
        if not any(s.id == wanted for _, s in at_peer):
            return ReplicationPlan()
    elif desired is None or (
        marked and not marked_at_peer and max(marked).timeline_key < desired.timeline_key
    ):
        # The peer will soon mark a checkpoint of this timeline. Another one would be of no use.
        return ReplicationPlan()
    assert desired is not None
    ranks = {s.rank: (name, s) for name, s in at_peer if s.id == desired}
    counting = [s for s in copies.values() if s.id in marked and s.rank in ranks]
    kept = newest((s.rank, s) for s in counting or copies.values())
    held_ranks = {s.rank for s in copies.values() if s.id == desired}
    staying = ((name, s) for name, s in local_slots if name not in copies or s.rank in ranks)
    parts = {(s.id, s.part) for _, s in staying if not s.private_only}
    pulls = []
    for rank, (name, header) in sorted(ranks.items()):
        if rank in held_ranks:
            continue
        pair = [f"{PREFIX}{rank}.{index}" for index in range(SLOTS_PER_RANK)]
        free = [to for to in pair if to not in copies or copies[to].id != kept]
        to = min(
            free or pair,
            key=lambda to: (to in copies, copies[to].id if to in copies else desired, to),
        )
        shard_group = (desired, header.part)
        pulls.append(ReplicaPull(name, header, to, private_only=shard_group in parts))
        parts.add(shard_group)
    # The next round is restored from the replicas of a lost node. They stay until that round has a
    # checkpoint of its own, on the peer and on this node. With different shard groups, all nodes
    # must have copied it, because only then the writers mark another one. But a new replica does
    # not wait for the memory of these old ones.
    own_begun = max((s.id.timeline_key for _, s in own), default=desired.timeline_key)
    begun = min(desired.timeline_key, own_begun)
    copied = sorted(marked)[-2].timeline_key if len(marked) > 1 else None
    old = {
        name: s
        for name, s in sorted(copies.items())
        if s.rank not in ranks and s.id.timeline_key < begun
    }
    obsolete = tuple(
        name
        for name, s in old.items()
        if not marked or (copied is not None and s.id.timeline_key < copied)
    )
    evictable = sorted(old, key=lambda n: (n not in obsolete, old[n].id in marked, old[n].id, n))
    gone = {*old, *(pull.to for pull in pulls)}
    persist_at_peer = {(s.id, s.rank): s.persist for _, s in at_peer}
    persist_changes = (
        (name, persist_at_peer[key])
        for name, s in sorted(copies.items())
        if name not in gone and persist_at_peer.get(key := (s.id, s.rank), s.persist) != s.persist
    )
    awaited = any(s.copy and not s.copied for _, s in ranks.values())
    complete = _live_workers(at_peer) <= {
        _worker_number(name) for name, s in at_peer if s.id == desired
    }
    confirm = desired if awaited and complete else None
    return ReplicationPlan(
        tuple(pulls), obsolete, tuple(evictable), tuple(persist_changes), confirm
    )


def _worker_number(name: str) -> str:
    """Return the number of the worker on its node, from the name of its slot."""
    return name.partition(".")[0]


def _live_workers(own: Sequence[NamedHeader]) -> set[str]:
    """Return the workers of a node that have filled a slot in its newest timeline.

    The others are taken for workers of an earlier round that do not exist any more. The set is
    empty without slots.
    """
    last = max((s.id.timeline_key for _, s in own), default=None)
    return {_worker_number(name) for name, s in own if s.id.timeline_key == last}


def _marked_slots(own: Sequence[NamedHeader]) -> list[NamedHeader]:
    """Return the slots of a node that are marked for copies on all nodes."""
    live = _live_workers(own)
    return [(name, s) for name, s in own if s.copy and _worker_number(name) in live]


def _valid_marks(
    peer_slots: Sequence[NamedHeader], own: Sequence[NamedHeader]
) -> set[CheckpointId]:
    """Return the marked checkpoints that count. A mark asks all nodes to copy the checkpoint.

    The peer may already know that a checkpoint was given up which is still marked on this node. So
    for the peer's newest timeline only the peer's marks count.

    The set is empty if nothing is marked on this node or on the peer.
    """
    peer_ids = {s.id for _, s in peer_slots}
    last = max(peer_ids).timeline_key if peer_ids else None
    return peer_ids | {s.id for _, s in own if s.id.timeline_key != last}


def _marks_of_replicas(
    copies: dict[str, SlotHeader], at_peer: Sequence[NamedHeader], own: Sequence[NamedHeader]
) -> set[CheckpointId]:
    """Return the newest checkpoint among this node's replicas that peers must copy, as a set.

    Such a checkpoint is marked by the flag :attr:`SlotHeader.copy`. The function is used if no slot
    of a worker has the flag, here or at the peer: for example, if both nodes are new.

    The set is empty if no replica has the flag. It is also empty if both nodes hold the same part
    of the state, since they need no flag then.

    Args:
        copies: Headers of the replicas on this node, by name.
        at_peer: Names and headers of the peer's own slots.
        own: Names and headers of this node's own slots.
    """
    here = {s.part for name, s in own if _worker_number(name) in _live_workers(own)}
    if any(s.part in here for _, s in at_peer):
        return set()
    found = [s.id for s in copies.values() if s.copy]
    return {max(found)} if found else set()


class Replicator:
    """A task that keeps replicas of the assigned peer's checkpoints, until it is cancelled."""

    def __init__(
        self,
        folder: Path,
        job: str,
        token: str,
        *,
        on_change: Callable[[], None],
        mb_per_s: float = 0.0,
        poll_s: float = POLL_S,
    ) -> None:
        """Prepare the replication; nothing is copied yet.

        Args:
            folder: Folder of the node's shared-memory pool.
            job: Unique id of the job.
            token: Token of the job.
            on_change: Function that is called in the event loop when the replicas or the last error
                have changed.
            mb_per_s: Bandwidth in 10**6 bytes per second; 0 for no limit.
            poll_s: Seconds between two requests for newer checkpoints of the peer.
        """
        self._folder, self._job, self._token = folder, job, token
        self._on_change, self._poll_s = on_change, poll_s
        self._mb_per_s = mb_per_s
        self._bucket = TokenBucket(mb_per_s * 1e6, mb_per_s * 1e6 * BURST_S, time.monotonic())
        self._peer: ReplicationPeer | None = None
        self._wanted: CheckpointId | None = None
        self._peer_changed = asyncio.Event()
        self._closing = threading.Event()
        self._connection: TransferConnection | None = None
        self._change_count = self._overwritten_count = 0
        self._suspect_slot = ("", "")
        """Name and write id of a slot with a wrong checksum, which may have been overwritten."""
        self.last_error = ""
        """Why there are no newer replicas, in one line; empty if all is well."""

    def follow(self, peer: ReplicationPeer | None, wanted: CheckpointId | None = None) -> None:
        """Replicate this peer from now on; replicas of another peer stay until they are replaced.

        The copies are made by the task of :meth:`run`. A change of the peer breaks off a copy that
        is under way; the same peer again changes nothing. A peer without a transfer port counts as
        None.

        Args:
            peer: Peer that the master has assigned. None: no peer is replicated, and all replicas
                stay.
            wanted: The checkpoint to copy, because the peer leaves; None for what a loss of the
                peer must not cost.
        """
        if peer is not None and not peer.port:
            peer = None
        if (peer, wanted) != (self._peer, self._wanted):
            self._peer, self._wanted = peer, wanted
            self._abandon_connection()
            self._peer_changed.set()

    def limit(self, mb_per_s: float) -> None:
        """Change the bandwidth; a copy under way keeps to it from its next chunk (16 MB) on.

        Args:
            mb_per_s: Bandwidth in 10**6 bytes per second; 0 for no limit.
        """
        if mb_per_s != self._mb_per_s:
            self._mb_per_s = mb_per_s
            self._bucket = TokenBucket(mb_per_s * 1e6, mb_per_s * 1e6 * BURST_S, time.monotonic())

    async def run(self) -> None:
        """Copy newer checkpoints of the peer, until cancelled; errors are kept in ``last_error``.

        The peer is asked every ``poll_s`` seconds, and after errors with pauses of up to 30 s. An
        overwritten or postponed copy counts as an error only from ``MAX_OVERWRITTEN`` in a row on.
        ``on_change`` is called when replicas or ``last_error`` have changed.

        Without a peer the task waits for one. When it is cancelled, it breaks off the copy under
        way and waits for its thread.
        """
        tries = 0
        work: asyncio.Future[None] | None = None
        try:
            while True:
                self._peer_changed.clear()
                peer, error_text, before = self._peer, "", self._change_count
                if peer is not None:
                    try:
                        work = asyncio.ensure_future(asyncio.to_thread(self._poll_peer, peer))
                        work.add_done_callback(_retrieve_exception)
                        await asyncio.shield(work)
                        tries = self._overwritten_count = 0
                    except (SlotOverwrittenError, _NotYetError) as error:
                        self._overwritten_count += 1
                        if self._overwritten_count >= MAX_OVERWRITTEN:
                            error_text = f"no newer replica of {peer.node}: {error}"
                    except (DLRoverError, OSError) as error:
                        tries += 1
                        error_text = f"no newer replica of {peer.node}: {error}"
                # If the peer has changed, the error comes from the connection's abandonment.
                same = peer == self._peer
                if same and error_text != self.last_error:
                    self.last_error = error_text
                    if error_text:
                        log.warning("replica_failed", extra={"why": error_text})
                    else:
                        log.info("replica_recovered", extra={"peer": peer.node if peer else ""})
                    self._change_count += 1
                if self._change_count != before:
                    self._on_change()
                if same:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(None if peer is None else self._pause_s(tries)):
                            await self._peer_changed.wait()
        finally:
            self._closing.set()
            self._abandon_connection()
            if work is not None:
                await asyncio.wait({work})
            self._close()

    def _pause_s(self, tries: int) -> float:
        """Return the seconds until the next request; after errors they grow, and are random."""
        return Backoff(self._poll_s, MAX_BACKOFF_S).delay_s(tries) if tries else self._poll_s

    def _abandon_connection(self) -> None:
        """Abandon the connection, so that the thread that copies gets an error and ends.

        The method does not wait for the thread, and does nothing without a connection.
        """
        if (connection := self._connection) is not None:
            connection.abandon()

    def _poll_peer(self, peer: ReplicationPeer) -> None:
        """Ask the peer once, and copy what is newer. This runs in a thread.

        It also removes old replicas and copies the ``persist`` flags. It informs the peer of a
        complete copy if the peer's workers wait for it. After an error the connection is closed;
        the next call opens another one.

        Raises:
            _NotYetError: The copy cannot be made now, and is to be tried again.
            SlotOverwrittenError: The peer has filled a slot again during the copy.
            DLRoverError: The peer does not answer or refuses, its data is damaged, or the memory of
                this node does not suffice.
            OSError: A file of this node's pool cannot be opened, changed or removed.
        """
        connection = self._connection
        if connection is None or connection.where != f"transfer server at {peer.addr}:{peer.port}":
            self._close()
            connection = self._connection = connect_to_peer(peer.addr, peer.port, self._token)
            if self._closing.is_set() or peer != self._peer:
                connection.abandon()
        try:
            slots = self._of_this_job(connection.slots())
            next_plan = plan(slots, self._local_slots(), self._wanted)
            self._make_room(next_plan)
            for pull in next_plan.pulls:
                self._pull_checked(connection, pull)
                self._change_count += 1
            if next_plan.spare:
                self._remove_replicas(next_plan.spare)
            for name, persist in next_plan.flags:
                self._set_persist(name, persist=persist)
            if next_plan.told is not None:
                connection.copied(next_plan.told)
        except (DLRoverError, OSError):
            self._close()  # the connection may still have unread answers
            raise

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _of_this_job(self, found: Iterable[NamedHeader]) -> list[NamedHeader]:
        return [(name, header) for name, header in found if header.job == self._job]

    def _local_slots(self) -> list[NamedHeader]:
        return self._of_this_job((path.name, header) for path, header in shm.scan(self._folder))

    def _make_room(self, next_plan: ReplicationPlan) -> None:
        """Check that the memory suffices for a plan, and remove old replicas only if it does not.

        Replicas are not removed if the memory would not suffice even then.

        Raises:
            ShmFullError: The memory does not suffice even without the old replicas.
            _NotYetError: Replicas of a lost node, which are still needed, take the memory.
        """
        need = sum(
            max(0, _memory_cost(pull) - _memory_taken(self._folder / pull.to))
            for pull in next_plan.pulls
        )
        room, gone = shm.headroom(self._folder), list[str]()
        for name in next_plan.last:
            if need > room:
                room += _memory_taken(self._folder / name)
                gone.append(name)
        if need > room and any(
            _COPY.fullmatch(name) and header.rank not in {p.header.rank for p in next_plan.pulls}
            for name, header in self._local_slots()
        ):
            raise _NotYetError("replicas of a lost node, which are still needed, take the memory")
        if need > room:
            raise ShmFullError(
                f"a replica needs {format_size(need)} more in {self._folder}, which has "
                f"{format_size(room)}: give the node more memory; existing replicas stay"
            )
        self._remove_replicas(gone)

    def _remove_replicas(self, names: Iterable[str]) -> None:
        """Remove replicas; readers of a removed file keep its bytes until they close it."""
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
            self._change_count += 1

    def _set_persist(self, name: str, *, persist: bool) -> None:
        """Set the ``persist`` flag of a replica, unless it was removed or is being filled."""
        with (
            contextlib.suppress(FileNotFoundError),
            ShmSlot(self._folder / name, write=True) as slot,
        ):
            found = slot.header()
            if found is not None and slot.update_header(found, replace(found, persist=persist)):
                self._change_count += 1

    def _pull_checked(self, connection: TransferConnection, pull: ReplicaPull) -> None:
        """Copy one slot of the peer, and report damage only at the second wrong checksum.

        A writer on the peer may overwrite the bytes while they are sent. This may show only as a
        wrong checksum. The first one is therefore noted, and the copy is tried again later. The
        data is damaged if the next wrong checksum has the same slot and the same
        ``SlotHeader.write_id``. The writer sets a new ``write_id`` each time it fills a slot.

        After an error, the slot on this node may be empty, without its earlier replica.

        Raises:
            _NotYetError: A checksum was wrong for the first time. Or a reader uses the slot on
                this node, or the agent is ending.
            DamagedDataError: The same data was wrong again.
            SlotOverwrittenError: The peer has filled the slot again.
            DLRoverError: The peer does not answer or refuses the request, the memory does not
                suffice, or the slot on this node has a newer format.
            OSError: A file of this node's pool cannot be opened, changed or removed.
        """
        try:
            self._pull(connection, pull)
        except SlotOverwrittenError:
            raise
        except DamagedDataError as error:
            before, self._suspect_slot = self._suspect_slot, (pull.name, pull.header.write_id)
            if before != self._suspect_slot:
                raise _NotYetError(str(error)) from error
            raise

    def _pull(self, connection: TransferConnection, pull: ReplicaPull) -> None:
        """Copy one slot, and complete it if all checksums are right.

        An existing file that does not fit is removed first. After an error the target slot may be
        empty.

        Raises:
            _NotYetError: A reader uses the target slot, or the agent is ending.
            DamagedDataError: A checksum is wrong.
            SlotOverwrittenError: The peer has filled the slot again.
            DLRoverError: The peer does not answer or refuses the request, the memory does not
                suffice, or the slot on this node has a newer format.
            OSError: A file of this node's pool cannot be opened, changed or removed.
        """
        found = connection.contents(pull.name, pull.header.write_id)
        header = found.header
        path = self._folder / pull.to
        with contextlib.suppress(FileNotFoundError), ShmSlot(path) as old:
            old.check_format()
        if not _fits(path, header, private_only=pull.private_only):
            path.unlink(missing_ok=True)  # a new file is needed; readers keep the old one
        with ShmSlot(path, write=True) as slot:
            if not slot.lock(shared=False):
                raise _NotYetError(f"{pull.to} is being read")
            try:
                self._fill(connection, pull, slot, found)
            finally:
                slot.unlock()  # the mapping may outlive the open file, and keep the lock with it

    def _fill(
        self, connection: TransferConnection, pull: ReplicaPull, slot: ShmSlot, found: SlotContents
    ) -> None:
        """Copy the tensor chunks and tables of a slot, then write its header.

        Readers find the slot empty until the header is written. After ``PIN_AFTER`` overwritten
        copies in a row, the peer is asked to lock its slot meanwhile. The bandwidth limit may make
        the method wait between chunks.

        Args:
            connection: Connection to the peer.
            pull: The slot to copy.
            slot: Slot on this node, which the caller has locked.
            found: Header and tables of the peer's slot.

        Raises:
            DamagedDataError: A checksum is wrong.
            SlotOverwrittenError: The peer has filled the slot again.
            ShmFullError: The memory does not suffice.
            TransientError: The connection to the peer broke.
            _NotYetError: The agent is ending.
        """
        header = found.header
        with self._reservation_lock():
            _reserve(slot, header, private_only=pull.private_only)
        slot.begin()
        view = slot.view()
        chunks = [
            (chunk, offset, digest)
            for (chunk, offset), digest in zip(found.layout, found.digests, strict=True)
            if chunk.nbytes and (chunk.private or not pull.private_only)
        ]
        ranges = (
            (offset + start, view[offset + start : offset + min(chunk.nbytes, start + CHUNK_BYTES)])
            for chunk, offset, _ in chunks
            for start in range(0, chunk.nbytes, CHUNK_BYTES)
        )
        pin = self._overwritten_count >= PIN_AFTER
        parts = connection.read_all(
            pull.name, header.write_id, ranges, pin=pin, arrived=self._throttle
        )
        for chunk, _, digest in chunks:
            running = xxhash.xxh3_64()
            for _ in range(0, chunk.nbytes, CHUNK_BYTES):
                with next(parts) as part:
                    running.update(part)
            if running.intdigest() != digest:
                raise DamagedDataError(
                    f"{chunk.key} in {pull.name} of {connection.where} is damaged: its checksum "
                    "differs"
                )
        for _ in parts:
            pass
        for region in (header.objects, header.table, header.digests):
            target = view[region.at : region.at + region.nbytes]
            connection.read_into(pull.name, header.write_id, region.at, target)
            if shm.digest(target) != region.xxh3:
                raise DamagedDataError(
                    f"the tables of {pull.name} of {connection.where} are damaged: a checksum "
                    "differs"
                )
            target.release()
        view.release()
        slot.put(replace(header, write_id=secrets.token_hex(8), private_only=pull.private_only))

    @contextlib.contextmanager
    def _reservation_lock(self) -> Iterator[None]:
        """Hold the pool's lock for reservations, because the workers reserve memory as well.

        The lock is tried again every ``LOCK_RETRY_S`` seconds, without a limit, until it is free.

        Raises:
            _NotYetError: The agent is ending.
        """
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(shm.reservation_lock(self._folder, wait=False))
                    break
                except BlockingIOError:  # no blocking wait, so that the agent can end meanwhile
                    if self._closing.wait(LOCK_RETRY_S):
                        raise _NotYetError("the agent is ending") from None
            yield

    def _throttle(self, nbytes: int) -> None:
        """Wait until the bandwidth limit allows that many bytes. It blocks the calling thread.

        Args:
            nbytes: The size of the next part of the copy.

        Raises:
            _NotYetError: The agent is ending, so the copy must stop.
        """
        wait_s = self._bucket.take(nbytes, time.monotonic())
        if wait_s:
            self._closing.wait(wait_s)
        if self._closing.is_set():
            raise _NotYetError("the agent is ending")


def _memory_cost(pull: ReplicaPull) -> int:
    """Return the bytes of memory that a replica takes."""
    header = pull.header
    return PAGE + header.size - header.private_offset if pull.private_only else header.size


def _memory_taken(path: Path) -> int:
    """Return the bytes of memory that a file takes, without its holes; 0 if it does not exist."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _fits(path: Path, header: SlotHeader, *, private_only: bool) -> bool:
    """Return whether a replica can be written to this path without removing the file there.

    True if there is no file. False if the file has a hole, if the replica needs a hole, or if the
    file is much too large.

    Args:
        path: Path of the replica.
        header: Header of the slot to copy.
        private_only: Whether the replica is partial, so that its file has a hole.
    """
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return True
    without_holes = stat.st_blocks * 512 >= stat.st_size
    return not private_only and without_holes and stat.st_size <= header.size + shm.MAX_SURPLUS


def _reserve(slot: ShmSlot, header: SlotHeader, *, private_only: bool) -> None:
    """Reserve the memory of a replica; for a partial one only the ranges that will have bytes.

    Args:
        slot: Slot to fill, opened for writing.
        header: Header of the slot to copy.
        private_only: Whether the replica is partial.

    Raises:
        ShmFullError: The memory does not suffice.
    """
    if not private_only:
        slot.reserve(header.size)
        return
    try:
        start = header.private_offset
        shm.check_room(slot.path.parent, PAGE + header.size - start, "a replica needs")
        os.ftruncate(slot.fd, header.size)
        os.posix_fallocate(slot.fd, 0, PAGE)
        os.posix_fallocate(slot.fd, start, header.size - start)
    except OSError as error:
        raise ShmFullError(
            f"no memory for a replica in {slot.path.parent}: {error.strerror}"
        ) from error


def _retrieve_exception(work: "asyncio.Future[None]") -> None:
    """Retrieve the exception of a copy: it may fail after its task was cancelled."""
    if not work.cancelled():
        work.exception()
