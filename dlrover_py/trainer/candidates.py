"""Which checkpoints there are to load: in the memory of nodes, and in storage."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlrover_py.checkpoint import shm, transfer
from dlrover_py.checkpoint.directory import CheckpointDirectory
from dlrover_py.protocol.agents import RestoreCandidate
from dlrover_py.protocol.checkpoint_id import Rejection
from dlrover_py.protocol.errors import CheckpointError, TransientError, UnreachableError
from dlrover_py.protocol.manifest import Manifest
from dlrover_py.trainer.sources import READ_ERRORS, OpenCandidate, RestoreSource


@dataclass(frozen=True, slots=True)
class SearchTiming:
    """The times of the search for checkpoints, in seconds."""

    ask_timeout_s: float = 120.0
    """Time for which the agent is asked again what memory holds while its master is unreachable."""
    ask_interval_s: float = 0.5
    """Time between two such requests."""
    store_timeout_s: float = 20.0
    """Time to wait for the list of checkpoints in storage, if memory has a checkpoint. If memory
    has none, time until the first message that load() still waits for storage."""
    message_interval_s: float = 60.0
    """Time between further messages that load() still waits for storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSources:
    """Where a rank finds checkpoints, and which of them it may load."""

    pool: Path | None = None
    """The directory of this node's shared-memory pool, which has the slots."""
    agent: transfer.TransferConnection | UnreachableError | None = None
    """The connection to this node's transfer server. Without one, only the slots in the pool count
    as memory. If the server does not answer: the error."""
    store: CheckpointDirectory | None = None
    """The directory of checkpoints in storage."""
    round: int = 0
    """Number of the current rendezvous round. The memory of its nodes is searched."""
    job: str = ""
    """The job's uid: slots of other jobs are ignored. Empty: all slots in the pool are used."""
    rejected: Sequence[Rejection] = ()
    """Checkpoints of this job that have wrong values, and are not loaded."""
    timing: SearchTiming = SearchTiming()
    """Times of the search."""


@contextmanager
def local_agent(
    transfer_socket: str,
) -> Iterator[transfer.TransferConnection | UnreachableError | None]:
    """Connect to this node's transfer server; None if the path of its socket is empty.

    If the agent does not listen, or the socket belongs to another user, the error is not raised but
    returned. The other ranks of a load must learn of it, too.
    """
    agent: transfer.TransferConnection | UnreachableError | None = None
    try:
        if transfer_socket:
            agent = transfer.TransferConnection.local(transfer_socket)
    except UnreachableError as error:
        agent = error
    try:
        yield agent
    finally:
        if isinstance(agent, transfer.TransferConnection):
            agent.close()


@dataclass(frozen=True, slots=True)
class CandidateList:
    """The checkpoints that rank 0 knows of."""

    found: tuple[RestoreSource, ...] = ()
    """The candidates, newest first."""
    any_listed: bool = False
    """True if the agent or storage has listed a checkpoint."""
    incomplete_reason: str = ""
    """Why the list may be incomplete; empty if it is complete."""


class CandidateSearch:
    """Lists the checkpoints that may be loaded, and opens them."""

    def __init__(self, sources: CheckpointSources, log: logging.Logger) -> None:
        """Create the search. It reads nothing yet, and ignores an agent that does not answer.

        Args:
            sources: where checkpoints are.
            log: receives warnings.
        """
        self._sources, self._log = sources, log
        agent = sources.agent
        self._agent = None if isinstance(agent, UnreachableError) else agent
        self._manifests: dict[str, Manifest] = {}

    def candidates(self) -> CandidateList:
        """List the checkpoints that may be loaded, newest first.

        Memory or storage that cannot be listed is left out: a warning is logged, and the list has
        an ``incomplete_reason``. If both cannot be listed, that reason is the one of storage. The
        call may wait for the master (`SearchTiming`). It waits for storage indefinitely if memory
        has no checkpoint.

        Raises:
            CheckpointError: storage has nothing but checkpoints that are damaged or have a newer
                format, and memory has none.
        """
        job = self._sources.job
        memory, claimed, blind = self._list_memory()
        stored, why = self._list_stored(bool(memory))
        blind = why or blind
        if blind:
            self._log.warning("not all checkpoints are known: %s", blind)
        found = without_rejected(merge(memory, stored, job), job, self._sources.rejected)
        return CandidateList(tuple(found), claimed or bool(stored), blind)

    @property
    def stored_at(self) -> float | None:
        """Time at which the newest checkpoint in storage was committed, by its committer's clock.

        None: storage has no checkpoint, or was not listed by this rank.
        """
        newest = next(iter(self._manifests.values()), None)
        return None if newest is None else newest.at

    def open(self, found: RestoreSource, rank: int) -> OpenCandidate:
        """Return a candidate that is opened for a rank; the caller must close it.

        Nothing is read before it is needed.
        """
        return OpenCandidate(
            found,
            rank=rank,
            pool=self._sources.pool,
            agent=self._agent,
            manifest=self._manifest,
            log=self._log,
        )

    def _list_memory(self) -> tuple[Sequence[RestoreSource], bool, str]:
        """Return the candidates in memory, whether the agent has any, and what is unknown.

        The last is "" if the list is complete. If the agent cannot list them, the list is empty and
        the last says why. This node's slots are looked at only if there is no agent.
        """
        agent, job = self._agent, self._sources.job
        if agent is not None:
            try:
                rows = _ask_agent(agent, self._sources.round, self._sources.timing)
            except READ_ERRORS as error:
                return [], False, f"the checkpoints in memory could not be listed: {error}"
            memory = [
                RestoreSource(r.step, r.round, r.timeline, r.world, job, True, "") for r in rows
            ]
            return memory, bool(memory), ""
        if self._sources.pool is None:
            return [], False, ""
        seen = {
            RestoreSource(s.step, s.round, s.timeline, s.world, s.job, True, "")
            for _, s in shm.scan(self._sources.pool)
            if job in ("", s.job)
        }
        return sorted(seen, key=lambda f: f.id, reverse=True), False, ""

    def _list_stored(self, in_memory: bool) -> tuple[Sequence[RestoreSource], str]:
        """Return the candidates in storage, and what is unknown; "" if the list is complete.

        Without a directory there are none, and nothing is unknown.

        Args:
            in_memory: whether memory has a checkpoint. Then the wait for storage has a limit.

        Raises:
            CheckpointError: memory has no checkpoint, and the directory is a file, or storage has
                nothing but checkpoints that are damaged or have a newer format.
        """
        store, timing = self._sources.store, self._sources.timing
        stored: list[RestoreSource] = []
        if store is None:
            return stored, ""
        try:
            for m in self._list_storage(store, timing.store_timeout_s if in_memory else None):
                self._manifests[m.folder] = m
                stored.append(
                    RestoreSource(m.step, m.round, m.timeline, m.world, m.job, False, m.folder)
                )
        except READ_ERRORS as error:
            if isinstance(error, NotADirectoryError) and not in_memory:
                raise CheckpointError(
                    f"{store.place.url} is a file, or lies below one: expected a folder for "
                    "checkpoints, which may not exist yet"
                ) from error
            return stored, f"the checkpoints in storage could not be listed: {error}"
        if store.damaged and not (
            in_memory or stored
        ):  # a start from zero would lose what they have
            if store.newer:
                raise CheckpointError(
                    f"{store.fault(min(store.newer))}; there is no other checkpoint"
                )
            name, why = next(iter(store.damaged.items()))
            raise CheckpointError(
                f"{store.place.url}/{name} is damaged ({why}), and there is no other "
                "checkpoint: restore it, or remove it to start from the beginning"
            )
        if store.unreadable:  # it may be the newest
            name = min(store.unreadable)
            return stored, f"{store.place.url}/{name} is skipped: {store.damaged[name]}"
        return stored, ""

    def _manifest(self, folder: str) -> tuple[CheckpointDirectory, Manifest] | None:
        """Return the directory in storage and the manifest of a folder.

        Ranks other than 0 list the directory only now. The result is None if there is no storage,
        or the folder is not in it. The wait for storage has no limit. An error of the storage is
        raised.
        """
        store = self._sources.store
        if store is None:
            return None
        if folder not in self._manifests:
            self._manifests.update((m.folder, m) for m in self._list_storage(store, None))
        return (store, self._manifests[folder]) if folder in self._manifests else None

    def _list_storage(
        self, store: CheckpointDirectory, within_s: float | None
    ) -> Sequence[Manifest]:
        """List the checkpoints in storage, in a thread that is left behind if it hangs.

        An error of the storage is raised. While the wait has no limit, warnings are logged at the
        intervals of `SearchTiming`.

        Args:
            store: the directory of checkpoints.
            within_s: seconds to wait. None: wait until storage answers, since a checkpoint that it
                may have would be lost otherwise.

        Raises:
            TimeoutError: storage did not answer within ``within_s``. A network file system whose
                server is gone never does.
        """
        found: Future[Sequence[Manifest]] = Future()

        def look() -> None:
            try:
                found.set_result(store.checkpoints())
            except BaseException as error:  # noqa: BLE001  it is raised where it is waited for
                found.set_exception(error)

        threading.Thread(target=look, name="dlrover-store", daemon=True).start()
        waited, timing = 0.0, self._sources.timing
        while True:
            wait_s = within_s or (timing.message_interval_s if waited else timing.store_timeout_s)
            try:
                return found.result(wait_s)
            except TimeoutError as error:
                if found.done():  # it ended meanwhile, or raised a TimeoutError itself
                    return found.result()
                waited += wait_s
                if within_s is not None:
                    raise TimeoutError(f"it did not answer for {within_s:g} s") from error
            self._log.warning(
                "%s has not listed its checkpoints for %.0f s; load() waits, because it may have "
                "the newest: check whether `ls` of it answers, and restore its server or end the "
                "job",
                store.place.url,
                waited,
            )


def merge(
    memory: Sequence[RestoreSource], stored: Sequence[RestoreSource], job: str
) -> list[RestoreSource]:
    """Merge both lists, newest first. A checkpoint in both becomes one candidate.

    Args:
        memory: the candidates in memory, newest first.
        stored: the candidates in storage, the newest commit first.
        job: the uid of this job. Within one job, round and timeline decide what is newer, since a
            script may go back to an earlier step. A checkpoint of another job is never newer than
            one in this job's memory. Empty: the higher step is newer.
    """
    merged: list[RestoreSource] = []
    rest = list(stored)
    for candidate in memory:
        while rest:
            other = rest[0]
            same_job = other.job == candidate.job
            same = other.id == candidate.id and same_job
            if same:
                break
            newer = (
                other.id > candidate.id
                if same_job and job
                else not job and other.step > candidate.step
            )
            if not newer:
                break
            merged.append(rest.pop(0))
        stored_copy = next(
            (o for o in rest if (o.id, o.job) == (candidate.id, candidate.job)), None
        )
        if stored_copy is not None:
            rest.remove(stored_copy)
            candidate = candidate._replace(folder=stored_copy.folder)
        merged.append(candidate)
    return merged + rest


def without_rejected(
    found: Sequence[RestoreSource], job: str, rejected: Sequence[Rejection]
) -> list[RestoreSource]:
    """Return the candidates that have no wrong values, in their order.

    Args:
        found: all candidates.
        job: the uid of this job. The rounds of another job are others.
        rejected: which checkpoints of this job have wrong values.
    """
    return [one for one in found if one.job != job or not any(r.rejects(one.id) for r in rejected)]


def _ask_agent(
    agent: transfer.TransferConnection, round: int, timing: SearchTiming
) -> list[RestoreCandidate]:
    """Return the checkpoints that the nodes of a round together hold in memory, newest first.

    After a transient error the agent is asked again, for ``timing.ask_timeout_s``; then the error
    is raised. A broken connection is replaced before. If the agent does not listen any more,
    UnreachableError is raised at once. An error that is not transient is raised at once, too.
    """
    deadline = time.monotonic() + timing.ask_timeout_s
    while True:
        try:
            return agent.candidates(round)
        except TransientError as error:
            if time.monotonic() > deadline:
                raise
            if isinstance(error, UnreachableError):
                agent.reconnect()
        threading.Event().wait(timing.ask_interval_s)
