"""What a node does for checkpoints: it owns their memory, says what is there, and has it stored.

The arena (:mod:`dlrover_py.arena`) outlives workers, and an agent that was killed where the same
node comes again. What goes to storage is written by a process of its own, by the master's orders
(:mod:`dlrover_py.persist`). Nothing here ever stops the training: what goes wrong is reported.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_agent.depot import Depot
from dlrover_agent.replicas import PREFIX, Replicas
from dlrover_py import arena
from dlrover_py.arena import Arena, Slot
from dlrover_py.depot import Candidate, Holder
from dlrover_py.helpers import KILLED_S
from dlrover_py.processes import ProcessId
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import (
    Assignment,
    Candidates,
    Held,
    Holders,
    Peer,
    Persisting,
    PersistOrder,
    PersistPhase,
    Stored,
)
from dlrover_py.protocol.checkpoint import (
    Answer,
    Cancel,
    Grant,
    Keep,
    Order,
    Phase,
    Summary,
    read_line,
)
from dlrover_py.protocol.errors import CheckpointError, ConfigError, DLRoverError
from dlrover_py.protocol.workers import Store
from dlrover_py.storage import address

if TYPE_CHECKING:
    from dlrover_py.protocol.job import CheckpointSpec

log = logging.getLogger("agent.saver")

PERSISTER = (sys.executable, "-P", "-m", "dlrover_py.persist")
MOST = 64
"""Checkpoints that a report names: the newest."""
AGAIN_S = (0.0, 1.0, 5.0, 15.0, 60.0)
"""How long a persister that has died is not started again."""
WAKE_S = 5.0
"""A persister that somebody has stopped (SIGSTOP) is woken so often while an order is open."""
LINE = 1 << 20

Ask = Callable[[str], Awaitable[bytes]]
"""Asks the master; takes the path of a GET request."""


@dataclass(frozen=True, slots=True)
class Site:
    """Whose memory it is, and where."""

    root: Path
    """A tmpfs."""
    job: str
    """The job's uid."""
    name: str
    """What people call the job."""
    node: str
    returns: bool = False
    """After an agent that was killed the same node comes again."""
    addr: str = ""
    """At which peers reach it."""


class Saver:
    """The checkpoints of one node."""

    def __init__(
        self,
        site: Site,
        *,
        token: str,
        socket: Path,
        nproc: int,
        environ: Mapping[str, str],
        ask: Ask,
        changed: Callable[[], None],
        guard: Callable[[str], None],
        kin: set[int],
    ) -> None:
        """Take the node's memory; if that cannot be had, there is a warning and no more.

        Args:
            site: whose.
            token: the job's.
            socket: where workers ask; short.
            nproc: workers of this node.
            environ: of the persister.
            ask: asks the master.
            changed: called when there is something that must be reported at once.
            guard: tells the guardian of a session (``+1234``, ``-1234``).
            kin: children of this process that are no workers.
        """
        self._site, self._nproc, self._environ = site, nproc, environ
        self._ask, self._changed = ask, changed
        self.trouble = ""
        """Why there is no memory for checkpoints; empty if there is."""
        self._arena: Arena | None = None
        self._depot: Depot | None = None
        self._replicas: Replicas | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._token = token
        self._socket = socket
        try:
            now = time.time()  # noqa: TID251 - files have their age by the wall clock
            self._arena = Arena(site.root, site.job, site.node, now=now)
            self._depot = Depot(
                self._arena.path,
                site.job,
                token,
                socket,
                candidates=self._candidates,
                holders=self._holders,
                addr=site.addr,
            )
            self._tasks.append(asyncio.create_task(self._depot.run()))
        except (OSError, DLRoverError) as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.trouble = f"no memory for checkpoints in {site.root}: {words}"
            log.warning("no_flash_checkpoint", extra={"why": self.trouble})
        self._persister = Persister(environ, self._answered, guard=guard, kin=kin)
        self._persisting: Persisting | None = None
        self._stored: Stored | None = None
        self._order: PersistOrder | None = None
        self._granted = False
        self._policy: CheckpointSpec | None = None
        """The job's ``checkpoint:``."""
        self._policy_text = ""
        self._store: Store | None = None
        self._flagged: dict[int, set[tuple[int, int, int]]] = {}
        """By local rank: sets that are to be stored."""
        self._unsaved: dict[int, str] = {}
        """By local rank: why what the worker has is not saved."""
        self._told: set[tuple[int, int, int]] = set()
        """Sets of which it was said at once that they are to be stored."""
        self._memory: list[Held] = []
        """What was there at the last look."""
        self._unseen = ""
        """Why that is not what is there now."""
        self.in_use = False
        """There is, or was, a checkpoint here."""
        self.memory()

    @property
    def path(self) -> Path | None:
        """The arena; None if there is none."""
        return self._arena.path if self._arena is not None else None

    @property
    def sessions(self) -> list[ProcessId]:
        """What must end with the agent."""
        return self._persister.sessions

    def environment(self) -> dict[str, str]:
        """What workers are told of it, in all rounds."""
        env = {names.ENV_JOB_UID: self._site.job}
        if self.path is not None:
            env[names.ENV_ARENA] = str(self.path)
        if self._depot is not None:
            env[names.ENV_DEPOT] = str(self._socket)
        return env

    # --- what is reported ---

    def facts(self) -> dict[str, Any]:
        """Fields of the report; the memory is looked at now."""
        if self._arena is not None:
            self._arena.alive()
        copies = self._replicas.trouble if self._replicas is not None else ""
        unsaved = self._unsaved[min(self._unsaved)] if self._unsaved else ""
        return {
            "memory": self.memory(),
            "depot": self._depot.port if self._depot is not None and self.in_use else 0,
            "stores": bool(self._store),
            "persisting": self._persisting,
            "stored": self._stored,
            "checkpoint_trouble": (
                self.trouble or self._unseen or unsaved or self._persister.trouble or copies
            ),
        }

    def memory(self) -> list[Held]:
        """What the node holds whole, the newest first; what it did, if that cannot be looked at."""
        if self.path is None:
            return []
        try:
            self._memory, self._unseen = held(self.path, self._site.job), ""
        except OSError as error:  # no more descriptors, say
            words = f"{error.filename or self.path}: {error.strerror}"
            self._unseen = f"memory cannot be looked at: {words}"
        self.in_use |= bool(self._memory)
        return self._memory

    # --- what happens ---

    def staged(self, local_rank: int, step: int) -> None:
        """A worker has sealed a slot."""
        if not self.in_use:
            self.in_use = True
            self._changed()  # peers may come for it from now on
        self._warm_up()
        if self.path is None:
            return
        self._flagged[local_rank] = set()
        extra = arena.extra(self.path, local_rank)
        for path in (*arena.place(self.path, local_rank), extra):
            with contextlib.suppress(OSError), Slot(path) as slot:  # the next report tells of it
                found = slot.summary()
                if found is not None and found.persist:
                    self._flagged[local_rank].add(found.id)
        if len(self._flagged) >= self._nproc:
            flagged = set.intersection(*self._flagged.values())
            if flagged - self._told:
                self._changed()
            self._told = flagged

    def unsaved(self, local_rank: int, why: str) -> None:
        """A worker's state is not saved; empty: it is, as far as the worker knows."""
        before = self._unsaved.pop(local_rank, "")
        if why:
            self._unsaved[local_rank] = why
            self.in_use = True
        if bool(why) != bool(before):
            self._changed()

    def assigned(self, assignment: Assignment) -> None:
        """Take up what the master wants."""
        if assignment.checkpoint and assignment.checkpoint != self._policy_text:
            self._policy_text = assignment.checkpoint
            self._take_policy()
        self._follow(assignment.peer)
        new, old = assignment.persist, self._order
        if old is not None and (new is None or new.attempt != old.attempt):
            self._persister.say(Cancel(old.attempt), start=False)
            self._order = None
        if new is None:
            return
        if old is None or new.attempt != old.attempt:
            self._take_up(new)
        if new.grant and not self._granted and self._order is not None:
            self._granted = True
            self._persister.say(Grant(new.attempt, new.grant), start=False)

    def stores(self, store: Store) -> None:
        """A script has said where checkpoints go; that comes before what the job says."""
        if store != self._store:
            first, self._store = self._store is None, store
            if first:
                self._changed()

    def _take_policy(self) -> None:
        """Read the job's ``checkpoint:``; what was read before holds if it is not understood."""
        from dlrover_py.protocol.job import CheckpointSpec  # most jobs have none

        try:
            policy = json.loads(self._policy_text)
            self._policy = CheckpointSpec.model_validate(policy, extra="ignore")
        except ValueError as error:
            log.warning("checkpoint_policy_not_understood", extra={"why": str(error)[:1000]})

    def _follow(self, peer: Peer | None) -> None:
        """Keep copies of this one's memory."""
        policy = self._policy
        mb_per_s = policy.bandwidth / 1e6 if policy is not None and policy.bandwidth else 0.0
        if self._replicas is None:
            if peer is None or self.path is None:
                return
            self._replicas = Replicas(
                self.path,
                self._site.job,
                self._token,
                changed=self._changed,
                mb_per_s=mb_per_s,
            )
            self._tasks.append(asyncio.create_task(self._replicas.run()))
        self._replicas.limit(mb_per_s)
        self._replicas.follow(peer)

    @property
    def _dir(self) -> str:
        """Where checkpoints go; empty if that is not known, or cannot be used."""
        if self._store is not None:
            return self._store.dir
        where = (self._policy.dir if self._policy is not None else None) or ""
        with contextlib.suppress(ConfigError):  # the script's Checkpointer is refused with words
            return address(where) if where else ""
        return ""

    def _take_up(self, new: PersistOrder) -> None:
        self._order, self._granted = new, False
        self._persisting = Persisting(attempt=new.attempt)
        where = self._dir
        if not where or self.path is None:
            self._answered(
                Answer(
                    new.attempt,
                    Phase.FAILED,
                    why=self.trouble or "it is not known where checkpoints go: set `dir`",
                )
            )
            return
        keep: Mapping[str, int | None] = {}
        if self._store is not None:
            keep = self._store.keep
        elif self._policy is not None and self._policy.keep is not None:
            keep = self._policy.keep.model_dump()
        self._persister.say(
            Order(
                attempt=new.attempt,
                step=new.step,
                round=new.round,
                lap=new.lap,
                world=new.world,
                ranks=tuple(new.ranks),
                arena=str(self.path),
                dir=where,
                job=self._site.job,
                node=self._site.node,
                writers=tuple(new.writers),
                keep=Keep.of(keep),
                spare=tuple(self._store.spare) if self._store is not None else (),
                name=self._site.name,
            )
        )

    def _warm_up(self) -> None:
        """At a drain there is no time to import torch."""
        if self._dir:
            self._persister.start()

    def _answered(self, answer: Answer) -> None:
        if answer.stored is not None:
            step, round_, lap, where, at, number = answer.stored
            self._stored = Stored(
                step=step, round=round_, lap=lap, where=where, at=at, number=number
            )
        for words in answer.notes:
            log.warning("checkpoint_odd", extra={"attempt": answer.attempt, "why": words})
        order = self._order
        if answer.attempt and order is not None and answer.attempt == order.attempt:
            phase = PersistPhase(answer.phase.value)
            self._persisting = Persisting(attempt=answer.attempt, phase=phase, why=answer.why)
            said = {"step": order.step, "phase": phase.value, "took_s": round(answer.seconds, 3)}
            failed = phase is PersistPhase.FAILED
            log.log(
                logging.WARNING if failed else logging.INFO,
                "checkpoint_persists",
                extra=said | ({"why": answer.why} if failed else {}),
            )
        self._changed()

    # --- what workers ask ---

    async def _candidates(self, round_number: int) -> Sequence[Candidate]:
        self.in_use = True
        body = await self._ask(f"/v1/checkpoints?round={round_number}")
        try:
            found = Candidates.model_validate_json(body).candidates
        except ValueError as error:
            raise CheckpointError(f"the master's answer is not understood: {error}") from error
        return [Candidate(c.step, c.round, c.lap, c.world) for c in found]

    async def _holders(self, step: int, round_number: int, lap: int) -> Sequence[Holder]:
        path = f"/v1/checkpoints/holders?step={step}&round={round_number}&lap={lap}"
        body = await self._ask(path)
        try:
            found = Holders.model_validate_json(body)
        except ValueError as error:
            raise CheckpointError(f"the master's answer is not understood: {error}") from error
        hollow = set(found.hollow)
        return [
            Holder(rank, p.node, p.addr, p.port, found.parts.get(rank, ""), rank in hollow)
            for rank, p in found.ranks.items()
        ]

    async def close(self) -> None:
        """The agent ends in order: all memory is given back."""
        await self._persister.close()
        await asyncio.sleep(0)  # who has not begun would not clean up
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._arena is not None:
            self._arena.remove()


def held(folder: Path, job: str) -> list[Held]:
    """What an arena holds whole of a job, by checkpoint; the newest first."""
    sets: dict[tuple[int, int, int, bool], list[Summary]] = {}
    for path, summary in arena.scan(folder):
        if summary.job == job:
            replica = path.name.startswith(PREFIX)
            key = (*summary.id, replica)
            sets.setdefault(key, []).append(summary)
    newest = sorted(sets, reverse=True)[:MOST]
    return [_held(sets[key], replica=key[-1]) for key in newest]


def _held(summaries: Iterable[Summary], *, replica: bool) -> Held:
    found = list(summaries)
    first = found[0]
    return Held(
        step=first.step,
        round=first.round,
        lap=first.lap,
        world=first.world,
        ranks={s.rank: s.part for s in sorted(found, key=lambda s: s.rank)},
        hollow=sorted(s.rank for s in found if s.hollow),
        replica=replica,
        persist=any(s.persist for s in found) and not replica,
    )


class Persister:
    """The process that writes to storage: started early, and again when it has died."""

    def __init__(
        self,
        environ: Mapping[str, str],
        told: Callable[[Answer], None],
        *,
        guard: Callable[[str], None],
        kin: set[int],
        argv: Sequence[str] = PERSISTER,
    ) -> None:
        """Start nothing yet.

        Args:
            environ: of the process.
            told: takes each answer.
            guard, kin: as of :class:`Saver`.
            argv: the program.
        """
        self._environ = {k: v for k, v in environ.items() if k not in names.PRIVATE_ENV}
        self._told, self._guard, self._kin, self._argv = told, guard, kin, argv
        self._task: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._session: ProcessId | None = None
        self._lines: list[bytes] = []
        """For a process that is about to be there."""
        self._open: set[str] = set()
        self._deaths = 0
        self._closing = False
        self.trouble = ""

    @property
    def sessions(self) -> list[ProcessId]:
        """The persister's session, if it runs."""
        return [] if self._session is None else [self._session]

    def start(self) -> None:
        """Have it ready, if it is not."""
        if self._closing or (self._task is not None and not self._task.done()):
            return
        self._task = asyncio.create_task(self._run())

    def say(self, document: Order | Grant | Cancel, *, start: bool = True) -> None:
        """Send a line; without a process only an order starts one."""
        if isinstance(document, Order):
            self._open.add(document.attempt)
        running = self._task is not None and not self._task.done()
        if not running and not start:
            return
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(document.encode())
        else:
            self._lines.append(document.encode())
        self.start()

    async def _run(self) -> None:
        """One life of the process, after a pause if the last one was short."""
        pause = AGAIN_S[min(self._deaths, len(AGAIN_S) - 1)]
        await asyncio.sleep(pause)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=PIPE,
                stdout=PIPE,
                env=self._environ,
                start_new_session=True,
                limit=LINE,
            )
        except OSError as error:
            self._died(f"could not be started: {error.strerror}")
            return
        self._kin.add(process.pid)
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._session = ProcessId.of(process.pid)
            self._guard(f"+{self._session}")
        self._process = process
        assert process.stdin is not None
        process.stdin.writelines(self._lines)
        self._lines.clear()
        waking = asyncio.create_task(self._wake(process))
        try:
            code = await self._listen(process)
        finally:
            waking.cancel()
            self._process = None
            if process.returncode is None:
                process.kill()
                with contextlib.suppress(TimeoutError):  # a dead file system holds it
                    await asyncio.wait_for(process.wait(), KILLED_S)
            if self._session is not None:
                self._guard(f"-{self._session}")
                self._session = None
            self._kin.discard(process.pid)
        if not self._closing:
            self._died(f"has ended with code {code}")

    async def _wake(self, process: Process) -> None:
        while True:
            await asyncio.sleep(WAKE_S)
            if self._open:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    process.send_signal(signal.SIGCONT)

    async def _listen(self, process: Process) -> int:
        assert process.stdout is not None
        while True:
            line = b""
            try:
                if not (line := await process.stdout.readline()):
                    break
                said = read_line(line)
            except ValueError as error:  # a line without end, too: it has been dropped
                said_so = repr(line[:100])
                log.warning("persister_not_understood", extra={"said": said_so, "why": str(error)})
                continue
            if isinstance(said, Answer):
                if said.phase in (Phase.DONE, Phase.FAILED):
                    self._open.discard(said.attempt)
                if said.phase is not Phase.FAILED:
                    self._deaths, self.trouble = 0, ""
                self._told(said)
        return await process.wait()

    def _died(self, what: str) -> None:
        self._deaths += 1
        self._lines.clear()
        self.trouble = f"the persister {what}"
        pause = AGAIN_S[min(self._deaths, len(AGAIN_S) - 1)]
        log.warning("persister_ended", extra={"why": self.trouble, "again_after_s": pause})
        left, self._open = self._open, set()
        for attempt in left:
            self._told(Answer(attempt, Phase.FAILED, why=self.trouble))

    async def close(self) -> None:
        """End it; what it writes is left as it is, and is no checkpoint."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
