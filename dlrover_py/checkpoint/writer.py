"""The persister, a process on each node that writes staged checkpoints to storage.

``python -m dlrover_py.checkpoint.writer`` reads requests from standard input and writes replies to
standard output (:mod:`dlrover_py.protocol.persister`, one JSON document per line). It ends at an
empty line or when its input ends, and cancels a write that is in progress. It is killed when the
thread that started it ends (PR_SET_PDEATHSIG), so a long-lived thread must start it.

The nodes that write a checkpoint communicate only by files in the folder of the checkpoint::

    file                       contents                                        written by
    parts/<node>.layout.json   slots of a node: tensor chunks and digests      each writer
    parts/plan.json            which node writes which chunk                   the coordinator
    __<rank>_0.distcp          torch DCP files, a ``torch.save`` zip a tensor  each writer
    parts/<node>.done.json     position of each chunk; the files are synced    each writer
    .metadata                  torch DCP's index                               the coordinator

Once the commit is granted, the coordinator writes the manifest
(:mod:`dlrover_py.checkpoint.directory`). All bytes are hashed while they are written and compared
with the digests of the staged bytes. Bytes that differ never become part of a checkpoint.

Nothing here imports torch (:mod:`dlrover_py.checkpoint.torch_format`).
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import xxhash

from dlrover_py import telemetry
from dlrover_py.checkpoint.directory import (
    PARTS_FOLDER,
    RENEW_S,
    CheckpointDirectory,
    DirectoryClaimedError,
    DirectoryOwner,
    FileWriter,
    folder_of,
)
from dlrover_py.checkpoint.exchange import KINDS, PartsFolder
from dlrover_py.checkpoint.held_slots import OpenSlot, close_slots, lock_slots
from dlrover_py.checkpoint.plan import (
    WrittenCheckpoint,
    assemble,
    file_of,
    make_plan,
)
from dlrover_py.checkpoint.shm import DamagedDataError
from dlrover_py.checkpoint.torch_format import dcp_metadata, zip_around
from dlrover_py.process.identity import ignore_sent_to_all, signal_at_parents_end
from dlrover_py.protocol.agents import PersistPhase, StoredCheckpoint
from dlrover_py.protocol.documents import Document
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.protocol.persister import (
    MAX_REQUEST,
    CancelWrite,
    CommitGrant,
    PersisterLine,
    WatchLease,
    WriteReply,
    WriteRequest,
    read_line,
)
from dlrover_py.protocol.shares import (
    NodeShares,
    StoredChunk,
    StoredObject,
    WritePlan,
    WriteShare,
    WrittenFile,
    WrittenFiles,
)

log = logging.getLogger("persister")

NICE = 10
"""Nice value of the persister process."""
POLL_PAUSES_S = (0.01, 2.0)
"""First and longest pause in seconds between two looks for files of other nodes."""
WRITE_BYTES = 1 << 22
"""Bytes that are hashed and then written in one step: few, so that they stay in the CPU cache."""
COMBINE_BELOW = 1 << 16
"""Size in bytes below which writes are combined."""
METADATA_FILE = ".metadata"
"""Name of torch DCP's index file."""

T = TypeVar("T")
D = TypeVar("D", bound=Document)


# --- Files ---


class _HashedFile:
    """A file that is written from its beginning, with the hash of all its bytes."""

    def __init__(self, sink: FileWriter, stopped: Callable[[], bool]) -> None:
        """Start at the beginning of a file; ``stopped`` is called before each large write."""
        self._sink, self._stopped = sink, stopped
        self.position = 0
        """Offset of the next byte in the file."""
        self.whole = xxhash.xxh3_64()
        """Hash of all bytes that were passed on to the file."""
        self._small = bytearray()
        """Combined small writes that were not passed on yet."""

    def write(self, data: bytes | memoryview) -> int:
        """Hash and write data, and return their own XXH3; small writes are combined.

        Args:
            data: bytes; a memoryview must have the format ``B``.

        Raises:
            WriteCancelledError: the attempt was canceled; looked up before each `WRITE_BYTES`.
            OSError: the data cannot be written.
        """
        size = len(data)
        self.position += size
        if size < COMBINE_BELOW:
            self._small += data
            if len(self._small) >= WRITE_BYTES:
                self.flush_small()
            return xxhash.xxh3_64_intdigest(data)
        self.flush_small()
        digest = xxhash.xxh3_64()
        rest = memoryview(data)
        for at in range(0, size, WRITE_BYTES):
            if self._stopped():
                raise WriteCancelledError
            part = rest[at : at + WRITE_BYTES]
            digest.update(part)
            self.whole.update(part)
            self._sink.write(part)
        return digest.intdigest()

    def flush_small(self) -> None:
        """Pass the combined small writes on to the file."""
        if self._small:
            self.whole.update(self._small)
            self._sink.write(memoryview(self._small))
            self._small = bytearray()


# --- Attempt ---


class WriteCancelledError(Exception):
    """The attempt was canceled or has timed out; a reply about this was already sent."""


class WriteAttempt:
    """The execution of one write request in a thread of its own.

    The *coordinator* is the node whose request lists ``writers``: it plans the work and commits.
    """

    def __init__(
        self,
        request: WriteRequest,
        open_directory: Callable[[str], CheckpointDirectory],
        send: Callable[[WriteReply], None],
        previous: "threading.Thread | None",
    ) -> None:
        """Prepare an attempt; `start` starts it.

        Args:
            request: the write request.
            open_directory: returns the checkpoint directory of a path or address.
            send: sends a reply.
            previous: thread of the previous attempt, which may hang in a store without an answer;
                None if there was no attempt.
        """
        self.order, self._open_directory, self._send, self._previous = (
            request,
            open_directory,
            send,
            previous,
        )
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._committing = False
        self._term = request.grant
        self._activity = ("it has not begun", "")
        self._lease_holder = ""
        """Whose writer lease it waits for, as the last reply says it; empty if for none."""
        self._progressed_at = self._started_at
        """Time by time.monotonic() of the last progress."""
        self._waits_for_nodes = False
        """Whether it has written its part and waits for other nodes, which have own time limits."""
        self._locked: list[OpenSlot] = []
        self._files: list[str] = []
        self._nbytes = 0
        self._folder_made = False
        self._deadline = self._timer(request.deadline_s)
        self.thread = threading.Thread(target=self._run, name=request.attempt, daemon=True)
        self.folder = folder_of(request.step, request.attempt)

    def start(self) -> None:
        """Send the reply ``writing``, and start the thread and the timer for its time limit."""
        self._deadline.start()
        self._reply(PersistPhase.WRITING)
        self.thread.start()

    def grant(self, term: int) -> None:
        """Permit the commit, in a term of the master; the thread commits once all is written.

        A later term replaces an earlier one until the commit starts.
        """
        with self._lock:
            self._term = term
            self._wake.set()

    def give_up(self, why: str, *, force: bool = False) -> None:
        """Cancel the attempt and reply ``failed``, unless its end was already reported.

        The slots are unlocked immediately. The thread ends when it next checks, and removes its
        files; it may hang in the store until then.

        Args:
            why: the reason, for the reply.
            force: cancel the attempt even if its commit has started, which may succeed all the
                same. Otherwise an attempt whose commit has started goes on.
        """
        with self._lock:
            if self._stopped or (self._committing and not force):
                return
            self._stopped = True
            self._wake.set()
            for held in self._locked:  # its thread may hang: the trainer must not wait for it
                with contextlib.suppress(OSError):
                    held.slot.unlock()
        self._deadline.cancel()
        self._reply(PersistPhase.FAILED, why=why)

    def _timer(self, seconds: float) -> threading.Timer:
        """Return a timer, not started, that checks for progress."""
        timer = threading.Timer(seconds, self._check_progress)
        timer.daemon = True
        return timer

    def _check_progress(self) -> None:
        """Give the attempt up if it made no progress for its time limit; the timer calls this.

        Otherwise the timer is started again. There is no limit while the attempt has written its
        part and waits for other nodes.
        """
        limit = self.order.deadline_s
        left = limit if self._waits_for_nodes else self._progressed_at + limit - time.monotonic()
        if left <= 0:
            self._time_out()
            return
        with self._lock:
            if not self._stopped:
                self._deadline = self._timer(left)
                self._deadline.start()

    def _time_out(self) -> None:
        """Report a timeout, with the activity that did not end."""
        activity, hint = self._activity
        waited = time.monotonic() - self._progressed_at
        hint = f": {hint}" if hint else ""
        self.give_up(f"{activity} for {waited:.0f} s{hint}", force=True)

    def _reply(self, phase: PersistPhase, **more: Any) -> None:
        """Send a reply about this attempt."""
        took = time.monotonic() - self._started_at
        self._send(
            WriteReply(
                attempt=self.order.attempt,
                phase=phase,
                seconds=took,
                nbytes=self._nbytes,
                **more,
            )
        )

    # --- Thread of the attempt ---

    def _run(self) -> None:
        """Write the checkpoint and report the end of the attempt.

        Nothing is reported if `give_up` has reported its end before. The slots are released, and
        the files of a failed attempt are removed (`_clean_up`).
        """
        why = ""
        try:
            stored, notes = self._write()
            self._release_slots()
            with self._lock:
                self._stopped, late = True, self._stopped
            if not late:
                self._reply(PersistPhase.DONE, stored=stored, notes=notes)
        except WriteCancelledError:
            why = "canceled"
        except (OSError, DLRoverError, ValueError) as error:
            why = _error_message(error)
        except Exception as error:
            log.exception("attempt_failed", extra={"attempt": self.order.attempt})
            why = f"{type(error).__name__}: {error}"
        if why:
            self._release_slots()
            self._set_activity(f"{why}; and {self.order.dir} has not answered since")
            self._clean_up(why)
            self.give_up(why, force=True)
        self._deadline.cancel()

    def _set_activity(self, doing: str, hint: str = "") -> None:
        """Record the current activity, which the message of a timeout names.

        A new activity counts as progress; the same one again does not.
        """
        if self._activity[0] != doing:
            self._activity, self._progressed_at = (doing, hint), time.monotonic()

    def _is_cancelled(self) -> bool:
        """Record progress, and return whether the attempt was canceled; called at each chunk."""
        self._progressed_at = time.monotonic()
        return self._stopped

    def _write(self) -> tuple[StoredCheckpoint | None, tuple[str, ...]]:
        """Write this node's part; the coordinator also commits and returns ``stored`` and notes.

        The other nodes return None and no notes. They do not learn whether the commit succeeds.
        The thread first waits until that of the previous attempt has ended.

        Raises:
            WriteCancelledError: the attempt was canceled.
            SupersededError: another node has failed, or a newer attempt exists.
            DLRoverError: the slots or files are damaged or incomplete, or another job writes there.
            ValueError: a document of another node is not valid.
            OSError: the store fails.
        """
        request = self.order
        if self._previous is not None:
            self._set_activity(f"{request.dir} has not answered the previous attempt")
            while self._previous.is_alive():
                self._previous.join(0.2)
                self._check()
        self._set_activity(f"no slot of step {request.step}")
        self._locked = self._poll(self._lock_slots)
        self._set_activity(f"{request.dir} has not answered")
        store = self._open_directory(request.dir)
        if request.writers:
            found = self._poll(lambda: self._acquire_lease(store))
            self._check()
            self._set_activity(f"{request.dir} has not answered")
            if isinstance(found, Manifest):
                return self._stored(store, found), ()
            if not request.without_master:  # else attempts of another node may be under way
                store.sweep({self.folder}, now=_wall_time())
        parts = PartsFolder(store.place, self.folder, request)
        self._folder_made = True
        parts.make()
        self._check()
        mine = NodeShares(tuple(held.share for held in self._locked))
        parts.put(mine)
        layouts: dict[str, tuple[WriteShare, ...]] = {}
        plan = self._plan(parts, mine, layouts) if request.writers else self._read_plan(parts)
        if not request.writers:
            store.join(DirectoryOwner(request.job, request.name))
        written = self._write_files(store, plan)
        self._check()
        parts.put(written)
        if not request.writers:
            return None, ()
        self._waits_for_nodes = True
        done = self._gather(parts, written)
        self._waits_for_nodes = False
        return self._commit(store, assemble(request, plan, layouts, done, at=_wall_time()))

    def _check(self) -> None:
        """Raise WriteCancelledError if the attempt was canceled."""
        if self._stopped:
            raise WriteCancelledError

    def _poll(self, look: Callable[[], T | None]) -> T:
        """Call ``look`` with growing pauses (`POLL_PAUSES_S`) until its result is not None.

        There is no other limit than that of the attempt, whose end raises WriteCancelledError.
        """
        pause, longest = POLL_PAUSES_S
        while True:
            self._check()
            if (found := look()) is not None:
                return found
            if self._wake.wait(pause):
                self._wake.clear()
            pause = min(2 * pause, longest)

    # --- Slots ---

    def _lock_slots(self) -> list[OpenSlot] | None:
        """Lock one slot for each rank; None, with no lock held, if some are missing.

        Raises:
            IncompleteCheckpointError: a rank has only a slot with a later checkpoint, or a slot has
                another world size.
        """
        held, missing = lock_slots(self.order)
        if not missing:
            return held
        ranks = ", ".join(map(str, sorted(missing)))
        self._set_activity(f"step {self.order.step} of rank {ranks} is not in {self.order.pool}")
        return None

    def _release_slots(self) -> None:
        """Unlock the slots and clear their ``persist`` mark, so that they may be filled again."""
        for one in self._locked:
            one.unmark()
        with self._lock:  # a concurrent give_up() must not see closed slots
            held, self._locked = self._locked, []
        close_slots(held)

    # --- Exchange with other nodes ---

    def _gather(self, parts: PartsFolder, mine: D, hint: str = "") -> dict[str, D]:
        """Wait until each writer has written its document of the kind of ``mine``.

        Args:
            parts: folder of the documents.
            mine: document of this node, which is not read back.
            hint: advice, shown with what the attempt waits for.

        Returns:
            The documents of all writers, this node's among them, by node.

        Raises:
            WriteCancelledError: the attempt was canceled, also because its time was over.
            SupersededError: another node has failed, or the attempt was removed.
            ValueError: a document is not valid, or has a newer format.
        """
        kind, found = type(mine), {self.order.node: mine}

        def look() -> dict[str, D] | None:
            late = parts.gather(kind, found)
            if not late:
                return found
            nodes = ", ".join(late[:5]) + (f" and {len(late) - 5} more" if len(late) > 5 else "")
            self._set_activity(f"{KINDS[kind]} of {nodes} not seen in {parts.url}", hint)
            return None

        return self._poll(look)

    def _acquire_lease(self, store: CheckpointDirectory) -> Literal[True] | Manifest | None:
        """Take the writer lease; None, without the lease, while its present holder may be dead.

        Without a master, the lease is that of this node alone. The result is None as well while
        another part of the job has the lease, and it is a checkpoint if that part has stored this
        step or a later one.

        Raises:
            DirectoryClaimedError: the lease belongs to another job whose writer lives.
            ConfigError: the lease has a newer format.
            OSError: the store fails.
        """
        request = self.order
        owner = DirectoryOwner(request.job, request.name)
        if request.without_master:
            for one in store.checkpoints():
                if one.job == request.job and one.id >= request.id:
                    return one
            owner = replace(owner, job=f"{request.job}/{request.node}")
        try:
            shared = len(request.writers) > 1
            store.acquire_lease(owner, request.attempt, shared=shared)
        except DirectoryClaimedError as error:
            if error.is_alive and not request.without_master:
                raise
            if self._lease_holder != str(error):
                self._lease_holder = str(error)
                self._reply(PersistPhase.WRITING, why=f"waits for the end of its lease: {error}")
            if error.is_alive and error.job.partition("/")[0] == request.job:
                self._set_activity("another node of this job is storing its state")
                self._progressed_at = time.monotonic()  # its write has limits of its own
            else:
                self._set_activity(str(error))
            return None
        if self._lease_holder:
            self._lease_holder = ""
            self._reply(PersistPhase.WRITING)  # what it waited for is no reason any more
        return True

    def _plan(
        self, parts: PartsFolder, mine: NodeShares, layouts: dict[str, tuple[WriteShare, ...]]
    ) -> WritePlan:
        """Gather the shares of all nodes, and make and publish the plan.

        Args:
            parts: folder of the documents.
            mine: shares of this node.
            layouts: receives the shares by node.

        Raises:
            WriteCancelledError: the attempt was canceled.
            SupersededError: another node has failed, or the attempt was removed.
            IncompleteCheckpointError: the shares together are no complete checkpoint.
            ValueError: a document is not valid, or has a newer format.
        """
        hint = "is it a folder that all nodes share?" if len(self.order.writers) > 1 else ""
        found = self._gather(parts, mine, hint)
        layouts.update((node, found[node].shares) for node in self.order.writers)
        plan = make_plan(layouts)
        self._check()
        parts.put(plan)
        return plan

    def _read_plan(self, parts: PartsFolder) -> WritePlan:
        """Wait for the plan of the coordinator, and return it.

        Raises:
            WriteCancelledError: the attempt was canceled.
            SupersededError: another node has failed, or the attempt was removed.
            ValueError: the plan is not valid, or has a newer format.
        """
        hint = "is it a folder that all nodes share?"
        self._set_activity(f"the coordinator's plan not seen in {parts.url}", hint)
        return self._poll(parts.plan)

    # --- Writing ---

    def _write_files(self, store: CheckpointDirectory, plan: WritePlan) -> WrittenFiles:
        """Write and sync this node's files, and return what is in them.

        A rank of which the plan assigns nothing to this node gets no file.

        Raises:
            WriteCancelledError: the attempt was canceled.
            ValueError: the plan does not fit to the slots.
            DamagedDataError: the bytes of a slot are not those that were staged.
            OSError: a file cannot be written.
        """
        chunks: list[StoredChunk] = []
        objects: list[StoredObject] = []
        files: list[WrittenFile] = []
        for held in self._locked:
            rank = held.share.rank
            indices, keys = plan.part_of(self.order.node, held.share)
            if not indices and not keys:
                continue
            name = file_of(rank)
            path = f"{self.folder}/{name}"
            self._set_activity(f"writing {store.place.url}/{path}")
            self._check()
            self._files.append(path)
            wanted = sum(held.share.chunks[i].nbytes for i in indices)
            wanted += sum(len(held.found.objects[key]) for key in keys)
            sink = store.place.sink(path, wanted)
            try:
                stream = _HashedFile(sink, self._is_cancelled)
                chunks += [self._write_chunk(held, i, stream) for i in indices]
                sums = {key: xxh3 for key, _, xxh3 in held.share.objects}
                for key in keys:
                    value = held.found.objects[key]
                    at = stream.position
                    stream.write(value)
                    objects.append(StoredObject(rank, key, at, len(value), sums[key]))
                stream.flush_small()
                self._check()
                self._set_activity(f"syncing {store.place.url}/{path}")
                sink.finish()
                files.append(WrittenFile(name, stream.position, stream.whole.intdigest()))
                self._nbytes += stream.position
            finally:
                sink.abandon()
        store.place.settle(self.folder)
        return WrittenFiles(tuple(chunks), tuple(objects), tuple(files))

    def _write_chunk(self, held: OpenSlot, index: int, stream: _HashedFile) -> StoredChunk:
        """Write a chunk, and return where it is.

        Args:
            held: the slot of the chunk.
            index: index of the chunk in the share of the slot.
            stream: the file.

        Raises:
            WriteCancelledError: the attempt was canceled.
            DamagedDataError: the bytes in the slot are not those that were staged.
            ValueError: the slot is too short for the chunk.
            OSError: the file cannot be written.
        """
        chunk, at = held.share.chunks[index], held.slot_offsets[index]
        data = held.slot.view()[at : at + chunk.nbytes]
        if len(data) != chunk.nbytes:
            raise ValueError(f"{held.slot.path}: it ends within {chunk.key}")
        before, after = zip_around(chunk)
        start = stream.position
        stream.write(before)
        payload = stream.position
        xxh3 = stream.write(data)
        stream.write(after)
        self._check()
        if xxh3 != held.share.digests[index]:
            raise DamagedDataError(
                f"{chunk.key} of rank {held.share.rank}: its bytes in {held.slot.path} are not "
                "those that were staged; nothing of this step is stored. If the script edits "
                "tensors through .data or NumPy after save(), let it do so before; else, if it "
                "happens again, have the memory of this node tested"
            )
        length = stream.position - start
        return StoredChunk(held.share.rank, index, start, length, payload, xxh3)

    # --- Commit by the coordinator ---

    def _commit(
        self, store: CheckpointDirectory, written: WrittenCheckpoint
    ) -> tuple[StoredCheckpoint, tuple[str, ...]]:
        """Write the index, wait for the grant and commit; return ``stored`` and notes.

        The reply ``ready`` is sent if the grant has not come yet. After the commit, the checkpoints
        that no rule keeps are removed. If this fails, a note says so.

        Raises:
            WriteCancelledError: the attempt was canceled before the commit started.
            SupersededError: a newer attempt, a newer term, a tombstone or a later checkpoint
                exists. Nothing was committed.
            OSError: the store fails. If the commit had started, it may have succeeded.
        """
        request = self.order
        self._set_activity(f"writing {store.place.url}/{self.folder}/{METADATA_FILE}")
        self._files.append(f"{self.folder}/{METADATA_FILE}")
        content = dcp_metadata(written.manifest, written.extents)
        manifest = replace(written.manifest, index=xxhash.xxh3_64_intdigest(content))
        store.place.put(f"{self.folder}/{METADATA_FILE}", content)
        if self._term is None:
            self._set_activity("no permission from the master to commit")
            self._reply(PersistPhase.READY)
        term = self._poll(lambda: self._term)
        with self._lock:
            if self._stopped:
                raise WriteCancelledError
            self._committing = True
        self._set_activity(f"committing to {store.place.url}; whether it was is not known")
        manifest = store.commit(replace(manifest, term=term))
        log.info(
            "checkpoint_stored",
            extra={"step": request.step, "where": store.where(manifest), "nbytes": manifest.nbytes},
        )
        notes = [*manifest.notes]
        if store.stuck:
            name, why = next(iter(store.stuck.items()))
            more = f", and {len(store.stuck) - 1} more" if len(store.stuck) > 1 else ""
            notes.append(
                f"{store.place.url}/{name} is left over and could not be removed: {why}{more}"
            )
        try:
            store.place.remove_folder(f"{self.folder}/{PARTS_FOLDER}")
            if not request.without_master:  # else another part of the job may read an older one
                store.retain(request.keep, {*request.spare, self.folder})
        except OSError as error:  # the checkpoint itself is stored
            notes.append(f"older checkpoints could not be removed: {_error_message(error)}")
        return self._stored(store, manifest), tuple(notes)

    @staticmethod
    def _stored(store: CheckpointDirectory, manifest: Manifest) -> StoredCheckpoint:
        """Return what a reply says about a checkpoint in the directory."""
        return StoredCheckpoint(
            step=manifest.step,
            round=manifest.round,
            timeline=manifest.timeline,
            where=store.where(manifest),
            at=manifest.at,
            number=manifest.number,
        )

    def _clean_up(self, why: str) -> None:
        """Remove the files of a failed attempt; a later attempt sweeps what remains.

        Nothing is done before the attempt uses its folder. Nothing is removed once the commit has
        started, because it may have succeeded. The coordinator removes the whole folder of the
        attempt. Another node removes its own files and then publishes its failure. The first error
        ends the clean-up, and is ignored.

        Args:
            why: the reason of the failure, for the other nodes.
        """
        if not self._folder_made or self._committing:
            return  # the next attempt finds out whether the commit succeeded
        with contextlib.suppress(OSError, DLRoverError):
            store = self._open_directory(self.order.dir)
            backend = store.place
            if self.order.writers:  # only the coordinator can commit
                store.clear(self.folder)
                return
            for name in self._files:
                backend.remove(name)
            PartsFolder(backend, self.folder, self.order).fail(why)


def _wall_time() -> float:
    """Return the seconds since the epoch, for people; it never decides which of two is newer."""
    return datetime.now(UTC).timestamp()


def _error_message(error: Exception) -> str:
    """Return the message of an error; one of the system names the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'storage'}: {error.strerror}"
    return str(error) or type(error).__name__


# --- Program ---


class PersisterProcess:
    """The main object of the persister; the request of a new attempt cancels the previous one."""

    def __init__(
        self,
        send: Callable[[WriteReply], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a thread that renews the writer leases every `RENEW_S` seconds.

        Args:
            send: sends a reply.
            clock: a monotonic clock in seconds, by which leases of other jobs expire.
        """
        self._send, self._clock = send, clock
        self._directories: dict[str, CheckpointDirectory] = {}
        self._opening = threading.Lock()
        self._attempt: WriteAttempt | None = None
        self._closing = threading.Event()
        self._renewals = threading.Thread(target=self._renew_leases, daemon=True)
        self._renewals.start()

    def take(self, message: PersisterLine) -> None:
        """Start to process a message and return without waiting for the result.

        A write request of another attempt cancels the present one; if its commit has started, that
        is finished first. The same request again only passes on its grant. Grants and cancellations
        of other attempts are ignored.
        """
        now = self._attempt
        same = now is not None and now.order.attempt == getattr(message, "attempt", "")
        match message:
            case WriteRequest() if not same:
                if now is not None:
                    now.give_up(f"canceled by a newer request: step {message.step}")
                before = now.thread if now is not None else None
                self._attempt = WriteAttempt(message, self._directory, self._send, before)
                self._attempt.start()
            case WriteRequest(grant=int(term)) | CommitGrant(term=term) if same and now is not None:
                now.grant(term)
            case CancelWrite() if same and now is not None:
                now.give_up("canceled")
            case WatchLease():
                threading.Thread(target=self._watch_lease, args=(message,), daemon=True).start()

    def close(self, grace_s: float = 5.0) -> None:
        """Cancel the write in progress and release the writer leases.

        A commit that has started is not canceled. Threads that do not end in time are left behind.

        Args:
            grace_s: longest wait in seconds for the attempt, and again for the leases.
        """
        self._closing.set()
        if self._attempt is not None:
            self._attempt.give_up("the persister is ending")
            self._attempt.thread.join(grace_s)
        release = threading.Thread(target=self._release, daemon=True)
        release.start()
        release.join(grace_s)  # a store may hang

    def _release(self) -> None:
        """Release the writer leases of all directories; errors are ignored."""
        for store in list(self._directories.values()):
            with contextlib.suppress(OSError):
                store.release()

    def _directory(self, url: str) -> CheckpointDirectory:
        """Return the checkpoint directory of a path or address, and create it if needed.

        Raises:
            ConfigError: the address is not valid, or the store does not support exclusive creation.
            OSError: the directory cannot be created, or the store does not answer.
        """
        store = self._named(url)
        store.prepare()  # each time, because it may have been removed
        return store

    def _named(self, url: str) -> CheckpointDirectory:
        """Return the checkpoint directory of a path or address; nothing is read or created.

        Raises:
            ConfigError: the address is not valid.
        """
        with self._opening:
            store = self._directories.get(url)
            if store is None:
                store = self._directories[url] = CheckpointDirectory(url, clock=self._clock)
            return store

    def _watch_lease(self, request: WatchLease) -> None:
        """Watch the lease of another job until there is none; an error ends this.

        The first write finds out what remains. This is the body of a thread.
        """
        with contextlib.suppress(OSError, DLRoverError):
            store = self._named(request.dir)
            while store.watch_lease(request.job):
                if self._closing.wait(RENEW_S):
                    return

    def _renew_leases(self) -> None:
        """Renew the writer leases every `RENEW_S` seconds until `close` is called.

        Errors are ignored, and the next round tries again.
        """
        while not self._closing.wait(RENEW_S):
            for store in list(self._directories.values()):
                with contextlib.suppress(OSError):
                    store.renew_lease()


def main(*, nice: int = NICE) -> int:
    """Run until standard input ends or has an empty line, and return the exit status.

    An invalid request is logged and skipped. Replies that cannot be written are dropped. What other
    code prints to standard output goes to standard error. The result is always 0.

    Args:
        nice: the nice value to which the process is raised; a higher one stays.
    """
    parent = os.getppid()
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        return 0
    ignore_sent_to_all()
    with contextlib.suppress(OSError):
        os.nice(max(0, nice - os.nice(0)))
    telemetry.setup("persister", level=telemetry.wished_level("WARNING"))
    replies_fd = os.dup(1)
    os.dup2(2, 1)  # print() must not write between the replies
    lock = threading.Lock()

    def send(answer: WriteReply) -> None:
        rest = memoryview(answer.encode())
        with lock, contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(replies_fd, rest) :]

    persister = PersisterProcess(send)
    log.info("persister_ready")
    for line in iter(lambda: sys.stdin.buffer.readline(MAX_REQUEST), b""):
        if line == b"\n":
            break  # the input may never end: see dlrover_py/trainer/standalone.py
        try:
            message = read_line(line)
        except (ValueError, TypeError) as error:
            log.warning("persister_request_invalid", extra={"why": str(error)})
            continue
        persister.take(message)
    persister.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # without waiting for a thread that hangs in a store
