"""The place of a worker: its ranks, its slots in shared memory, and what else may use them."""

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlrover_py.checkpoint import shm
from dlrover_py.process.ownership import is_own
from dlrover_py.protocol import names
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.protocol.persister import WriteReply
from dlrover_py.protocol.slots import SlotHeader
from dlrover_py.trainer import session
from dlrover_py.trainer.collectives import AsyncAllReduce, gather, rank_and_world
from dlrover_py.trainer.settings import Settings
from dlrover_py.trainer.staging import Stager, StagingContext
from dlrover_py.trainer.standalone import (
    StandaloneMemory,
    StandalonePersister,
    memory_host,
    update_headers,
)

DRAIN_S = 30.0
"""Seconds that the last vote, or the last write of a failed script, may take at the end: other
ranks may be gone."""
UPDATE_TRIES, UPDATE_PAUSE_S = 100, 0.01
"""Number of attempts to change a slot's header while another process writes it, and the seconds
between two attempts."""


class SlotClaim:
    """The claim of a Checkpointer on the slots of a worker."""

    def __init__(self, dir: str | None) -> None:
        self.dir = dir
        """The address of the directory of checkpoints."""
        self.timeline = Timeline(0)
        """Number of the timeline in this round. It grows with each load, and each time the training
        goes back."""
        self.closed = False
        """The Checkpointer is closed."""
        self._pid = os.getpid()

    @property
    def mine(self) -> bool:
        """Whether this process has created it, and is not a forked child."""
        return self._pid == os.getpid()

    @contextlib.contextmanager
    def making(self, settings: Settings) -> Iterator[None]:
        """Ensure that no other Checkpointer of this process uses the same slots.

        In the job's memory, two of them would overwrite each other's slots, and one would load what
        the other has saved. An exception in the block withdraws the claim, so that the script may
        call again. After a closed one, a new timeline begins. Nothing is checked without an agent,
        because each Checkpointer then has its own memory.

        Args:
            settings: the settings of this worker.

        Raises:
            ConfigError: an open Checkpointer of this process uses the slots, or a closed one has
                used them for another directory.
        """
        if not settings.pool:
            yield
            return
        worker = settings.pool, settings.place, settings.local_rank
        before = _claims.get(worker)
        if before is not None and before.mine:
            if not before.closed:
                raise ConfigError(
                    "checkpoint: this worker has an open Checkpointer already: expected one "
                    "for each worker; put everything that is saved into one state"
                )
            if before.dir != self.dir:
                raise ConfigError(
                    f"checkpoint: this worker had a Checkpointer for {before.dir}, and what it has "
                    f"saved is in the job's memory: expected the same directory, found {self.dir}; "
                    "run another training as a separate job"
                )
            self.timeline = before.timeline
            self.begin_timeline()  # what this one stages is newer
        _claims[worker] = self
        try:
            yield
        except BaseException:
            del _claims[worker]
            if before is not None:
                _claims[worker] = before
            raise

    def id_of(self, round: Round, step: int) -> CheckpointId:
        """Return the identity of the checkpoint of a step in this timeline."""
        return CheckpointId(round=round, timeline=self.timeline, step=Step(step))

    def begin_timeline(self) -> None:
        """Begin a timeline: what is saved from here on is newer than all before in this round."""
        self.timeline = Timeline(self.timeline + 1)


_claims: dict[tuple[str, int | None, int], SlotClaim] = {}
"""The last claim on each place in an agent's memory. It may have been copied from a parent process
by a fork."""


class WorkerContext:
    """This worker's world and slots and, without an agent, its node's memory and persister."""

    def __init__(
        self, settings: Settings, stores: bool, on_reply: Callable[[WriteReply], None]
    ) -> None:
        """Find the place of this worker, open its slots and start its stager's thread.

        Without an agent, this is collective, and the first worker of a node creates the pool.

        Args:
            settings: the settings of this worker.
            stores: whether there is a directory for checkpoints.
            on_reply: receives the replies of a persister that this worker runs, in a thread.

        Raises:
            ConfigError: the process group is not initialized, or there is no shared memory. Also if
                another user can change the pool, or a slot has a newer format.
            OSError: the agent's pool is gone, or its slots cannot be opened.
        """
        group = rank_and_world()
        if settings.size > 1 and group is None:
            raise ConfigError(
                f"checkpoint: this is one of {settings.size} workers: expected "
                "torch.distributed.init_process_group() before the first load() or save()"
            )
        self.rank, self.world = group or (0, 1)
        self.ballot = AsyncAllReduce() if self.world > 1 else None
        self.memory: StandaloneMemory | None = None
        self.persister: StandalonePersister | None = None
        self._waited_s = 0.0
        """Total seconds that the stager's fence had cost at the last ``save``."""
        self.ranks, self.node, self.nodes = [self.rank], "n0", ["n0"]
        number = settings.local_rank if settings.place is None else settings.place
        if settings.pool:
            self.folder, self.job = Path(settings.pool), settings.job
            is_own(self.folder, hint=shm.HINT)
            self.round = Round(settings.round)
        else:
            self.round = Round(settings.restart_count)
            number = self._alone(settings, stores, on_reply)
        self.copies = (
            bool(settings.pool)
            and settings.nodes > 1
            and settings.checkpoint.get("replicas", 1) != 0
        )
        """Peers keep copies of this node's memory."""
        slots, extra = shm.slots_of(self.folder, number), shm.extra_slot(self.folder, number)
        self._own = {path.name for path in (*slots, extra)}
        self._old_slot: Path | None = None
        if extra.exists():  # it is of the previous round, and may hold what peers have copied
            if self.copies:
                slots.append(extra)
            else:
                self._old_slot = extra
        place = StagingContext(self.job, self.round, self.world, self.rank)
        self.stager = Stager(
            slots, place, extra=extra, on_sealed=_report_sealed, on_failed=session.report_unsaved
        )

    def _alone(
        self, settings: Settings, stores: bool, answered: Callable[[WriteReply], None]
    ) -> int:
        """Find the other workers of this node; the first of them creates the pool for all.

        This is collective. If there is a directory, the first worker also makes the persister
        object; its process starts with the first request. The call sets `job`, `node`, `nodes`,
        `ranks` and `folder`, and for the first worker `memory` and `persister`.

        Args:
            settings: the settings of this worker.
            stores: whether there is a directory for checkpoints.
            answered: receives the replies of the persister, in a thread.

        Returns:
            The number of this worker on its node.

        Raises:
            ConfigError: some node has no shared memory; all ranks raise it.
        """
        own = (memory_host(), secrets.token_hex(8))
        all_ = self.gather(own)
        hosts = list(dict.fromkeys(one[0] for one in all_))
        self.job = f"run-{all_[0][1]}"
        self.nodes = [f"n{index}" for index in range(len(hosts))]
        self.node = self.nodes[hosts.index(own[0])]
        self.ranks = [rank for rank, one in enumerate(all_) if one[0] == own[0]]
        root = Path(settings.shm_dir)
        self.folder = root / f"{shm.POOL_PREFIX}{self.job}-{self.node}"
        number = self.ranks.index(self.rank)
        problem = ""
        if number == 0:
            try:
                self.memory = StandaloneMemory(root, self.job, self.node)
            except ConfigError as error:
                problem = str(error)
            except OSError as error:
                problem = (
                    f"{error.filename or root}: {error.strerror or error}; expected a folder of a "
                    f"tmpfs that can be written to: {names.ENV_SHM_DIR} can name another one"
                )
            if stores and not problem:
                self.persister = StandalonePersister(answered)
        if problems := [text for text in self.gather(problem) if text]:
            raise ConfigError(f"checkpoint: no shared memory: {problems[0]}")
        return number

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank. This is collective."""
        return gather(value, self.world)

    def waited_s(self) -> float:
        """Return the seconds that the fence has made optimizers wait since the last call."""
        before, self._waited_s = self._waited_s, self.stager.waited_s
        return self._waited_s - before

    def newest(self) -> CheckpointId | None:
        """Return the newest checkpoint in this rank's slots; None if there is none."""
        held = [header for header in self.stager.found() if header is not None]
        newest = max(held, key=lambda header: header.id, default=None)
        return None if newest is None else newest.id

    def attempt_of(self, one: CheckpointId) -> str:
        """Return the id of a write attempt, which is the same on all nodes.

        Only runs without an agent use it. It is unique, because the name of the run is random.
        """
        name = f"{self.job} {one.step} {one.round} {one.timeline}"
        return f"{shm.digest(name.encode()):016x}"

    def update_headers(self, change: Callable[[SlotHeader], SlotHeader]) -> None:
        """Change the headers of this rank's own slots; a header that stays equal is not written.

        While another process writes a header, this is repeated for about a second. After that the
        header is left as it is, without an error.
        """
        pause = threading.Event()
        for _ in range(UPDATE_TRIES):
            if update_headers(self.folder, change, only=self._own):
                return
            pause.wait(UPDATE_PAUSE_S)  # its agent, or the persister, is writing a header

    def tidy(self) -> None:
        """Delete the extra slot of an earlier round; a newer checkpoint made it unnecessary.

        A worker's extra slot is the one in which it keeps what peers have copied
        (:func:`~dlrover_py.checkpoint.shm.extra_slot`). Nothing is done if there is none. A slot
        that is still to go to storage stays. Only the first call after the start has an effect, and
        errors are ignored.
        """
        path, self._old_slot = self._old_slot, None
        if path is not None:
            with contextlib.suppress(OSError, ConfigError), shm.ShmSlot(path) as slot:
                slot.check_format()
                found = slot.header()
                if found is None or not found.persist:
                    path.unlink()

    def close(self, *, failed: bool) -> None:
        """Release all resources; wait for the copy under way and for the persister.

        The wait for the persister has no limit, unless the script has failed on several nodes:
        then it is `DRAIN_S`.

        Args:
            failed: the script has failed. The shards of other nodes may never arrive, and whatever
                restarts the script waits for its end.
        """
        self.stager.close()
        if self.persister is not None:
            self.persister.close(DRAIN_S if failed and len(self.nodes) > 1 else None)
        if self.memory is not None:
            self.memory.close()


def _report_sealed(header: SlotHeader) -> None:
    """Report a sealed slot to the agent, immediately if it is to go to storage."""
    session.report_staged(header.step, urgent=header.persist)
