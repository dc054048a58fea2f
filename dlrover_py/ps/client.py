"""The worker's side of the parameter server: pulls and pushes of rows, by a thread of their own.

Pushes go one after the other: the next one starts when all buckets of the last are acknowledged. A
push that is sent again, to whichever server, keeps its number, so it counts once.

With steps of all workers (``sync`` and ``ssp``), each push ends a step of this worker. With
``sync``, a push waits on the servers until the step is over. If the group of workers has changed
before, it is sent again as a push of the next step, under a new number.
"""

import atexit
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover_py.protocol.errors import (
    CheckpointError,
    ConfigError,
    DLRoverError,
    SupersededError,
    UnreachableError,
)
from dlrover_py.ps import messages as m
from dlrover_py.ps.cluster_map import ClusterMap, StepId
from dlrover_py.ps.connections import Connections
from dlrover_py.ps.hashing import Floats, Ids
from dlrover_py.ps.request_rows import SentTables, TableRows, received
from dlrover_py.ps.session import PendingRequests, SendPart
from dlrover_py.ps.settings import Settings, read_access
from dlrover_py.ps.specs import Consistency, ConsistencyKind, Formats, TableSpec
from dlrover_py.ps.steps import Fate, StepFollower
from dlrover_py.ps.store import Payload
from dlrover_py.ps.wire import JobAccess, WireError

WATCH_S = 5.0
ASK_S = 0.5
"""Seconds after which the coordinator is asked again what became of a meeting, or of a step."""
TICK_S = 0.05
LEAVING_MS = 200
"""Milliseconds for the last word of a worker, after which others do not wait for it."""


_LOST = (
    "all copies of some rows are lost: their servers have died; start the workers again, and go "
    "back to the last cut of all rows with ps.restore()"
)


class DataLossError(DLRoverError):
    """All copies of a bucket died: rows of acknowledged pushes are gone.

    What to do: go back to the last cut with ``ps.restore()``. Until then all calls fail.
    """


def _running() -> "Future[Any]":
    """Return a future that cannot be cancelled: the thread sets its result in any case."""
    made: Future[Any] = Future()
    made.set_running_or_notify_cancel()
    return made


@dataclass(slots=True)
class _Request:
    parts: list[TableRows]
    buckets: tuple[int, ...]
    push: bool
    deadline: float
    future: "Future[Any]" = field(default_factory=_running)
    step: StepId = (0, 0)
    """The step of the workers that this push ends."""

    def part(
        self, one: SendPart, client: str, incarnation: int, epoch: int, *, sync: bool
    ) -> tuple[m.Push | m.Pull, Payload]:
        """Return the message to one server, and its arrays.

        Args:
            one: The server, and the buckets of the part.
            client: Name of the worker.
            incarnation: Incarnation of the worker.
            epoch: Epoch of the worker's map.
            sync: Whether the pushes of all workers in a step are applied together.
        """
        payload: Payload = [(part.table, part.of(one.buckets)) for part in self.parts]
        if self.push:
            step = self.step if sync else (0, 0)
            return m.Push(client, incarnation, epoch, one.seq, one.buckets, step), payload
        formats = {part.table: part.format for part in self.parts}
        return m.Pull(epoch, one.seq, one.buckets, formats), payload

    def receive(self, buckets: tuple[int, ...], payload: Payload) -> None:
        """Take in the rows of some buckets."""
        for part, (_, arrays) in zip(self.parts, payload, strict=True):
            part.receive(buckets, arrays)


@dataclass(slots=True)
class _Pace:
    """How this worker steps with others."""

    follower: StepFollower
    world: int
    round: int
    push: _Request | None = None
    """A push that all servers have, whose step others have not ended yet."""
    due: float = 0.0
    """When it says again how far it is."""

    def word(self, name: str, incarnation: int, epoch: int, leaving: bool) -> m.Stepped:
        """Return how far the worker is, or that it leaves, for the coordinator."""
        ended = self.follower.ended
        return m.Stepped(name, incarnation, epoch, ended, self.world, self.round, leaving)


@dataclass(slots=True)
class _Meeting:
    """A call that all workers make, after the pushes before it."""

    message: m.Meet
    deadline: float
    future: "Future[m.Met]" = field(default_factory=_running)
    due: float = 0.0
    """When the coordinator is asked again."""


class PsClient(AbstractContextManager["PsClient"]):
    """The connection of one worker to the servers of its job."""

    def __init__(
        self, access: JobAccess, name: str, *, timeout_s: float = 120.0, watch_s: float = WATCH_S
    ) -> None:
        """Connect, and wait until the servers are there.

        Args:
            access: The job.
            name: Name of the worker. A newer client of the same name ends the rights of this one.
            timeout_s: Seconds after which a request has failed.
            watch_s: Seconds after which the coordinator is asked again.

        Raises:
            ConfigError: The coordinator refuses this worker.
            UnreachableError: There is no coordinator, or too few servers have come in time.
        """
        self.name, self._timeout_s, self._watch_s = name, timeout_s, watch_s
        self._incarnation = 0
        self._call = secrets.token_hex(8)
        """Names the request of this program to begin, however often it is sent."""
        self._joined = 0
        """The incarnation of this program; 0 until the coordinator has heard of it."""
        self._broken: DLRoverError | None = None
        """Why this client can do nothing more."""
        self._changed = threading.Condition()
        self._commands: deque[_Request | _Meeting | m.CreateTable | m.UseConsistency] = deque()
        self._refusal = ""
        self._requests = PendingRequests()
        self._open: dict[int, _Request] = {}
        self._pushes: deque[_Request | _Meeting] = deque()
        self._pulls: deque[_Request] = deque()
        """Pulls that wait until this worker is a member: rows of an earlier step are too old."""
        self._meeting: _Meeting | None = None
        self._meetings = 0
        self._pace: _Pace | None = None
        self._seq = 0
        self.pushes = 0
        """Pushes that were asked for. With steps, each ends one."""
        self._tables = SentTables(name)
        self._address = access.address
        self._lines = Connections(access.address, access.key)
        self._over = False
        self._thread = threading.Thread(target=self._run, name="ps-client", daemon=True)
        self._thread.start()
        try:
            self._wait(lambda: self._incarnation > 0, "the servers of the job")
        except DLRoverError:
            self.close()
            raise

    @property
    def map(self) -> ClusterMap:
        """The newest map."""
        assert self._requests.map is not None
        return self._requests.map

    def create(self, spec: TableSpec, formats: Formats | None = None) -> None:
        """Make a table, or check that it exists with the same properties.

        Args:
            spec: The table.
            formats: The formats of its rows and gradients in this worker's messages. None: float32.

        Raises:
            ConfigError: The table is malformed, or exists with other properties; or this worker
                already uses it with other formats.
            UnreachableError: The coordinator did not answer.
        """
        formats = formats or Formats()
        self._tables.check(spec, formats)
        command = m.CreateTable(spec, self.name, self._incarnation)
        self._wait(lambda: self.map.table(spec.name) == spec, f"table {spec.name}", command)
        self._tables.add(spec, formats)

    def use(self, consistency: Consistency, world: int | None = None) -> None:
        """Order the steps of this worker and of all others. Call it before the first push.

        Each push then ends a step. Its future is done when the next step may begin. Pulls wait
        until all workers have come.

        Args:
            consistency: What workers see of the steps of others. It is the same for all.
            world: Number of workers. None: ``WORLD_SIZE``.

        Raises:
            ConfigError: The workers of this job use another one, or it is malformed.
            UnreachableError: The coordinator did not answer.
        """
        command = m.UseConsistency(consistency)
        self._wait(lambda: self.map.steps.consistency == consistency, f"{consistency}", command)
        if consistency.kind is not ConsistencyKind.ASYNC and self._pace is None:
            found = Settings.from_environment()
            self._pace = _Pace(StepFollower(consistency), world or found.world, found.round)
            self._lines.wake()

    @property
    def synchronous(self) -> bool:
        """Whether the pushes of all workers in a step are applied together."""
        return self._pace is not None and self._pace.follower.sync

    def pull(self, ids: Mapping[str, Ids]) -> "Future[dict[str, Floats]]":
        """Ask for rows.

        Args:
            ids: Ids by table, int64, shape ``[n]``.

        Returns:
            The rows by table, shape ``[n, dim]``, in the order of the ids. The future may raise
            what :meth:`push` says. It cannot be cancelled.

        Raises:
            ConfigError: Ids are not int64, or a table does not exist.
        """
        return self._request({name: (one,) for name, one in ids.items()}, push=False)

    def push(self, grads: "Mapping[str, tuple[Ids, Floats]]") -> "Future[dict[str, Floats]]":
        """Send gradients, which the servers apply once.

        Args:
            grads: Ids, int64, shape ``[n]``, and gradients, float32, shape ``[n, dim]``, by table.

        Returns:
            Done when all gradients are acknowledged, and the next step may begin. It may raise
            :class:`DataLossError`, ``SupersededError`` (a newer client of this name exists, or the
            others went on without this one), ``UnreachableError`` or ``ConfigError``.

        Raises:
            ConfigError: An array has another type or shape, a gradient is no number that the format
                of the table's gradients has, or a table does not exist. Nothing is sent then, and
                the next push may follow.
        """
        found = self._request(grads, push=True)
        self.pushes += 1
        return found

    def save(self, step: int, world: int | None = None) -> None:
        """Save all tables as one cut, and wait until it exists. Every worker calls this.

        The cut has all pushes that the workers sent before the call, and none that they send after.
        What was not sent of gradients, of tables with ``top``, is sent first.

        Args:
            step: Number of the step, of which cuts have their names.
            world: Number of workers. None: ``WORLD_SIZE``.

        Raises:
            CheckpointError: There is no directory, it cannot be written, or rows are lost.
            UnreachableError: Not all workers called in time.
        """
        self.meet(step, world)

    def restore(
        self, step: int | None = None, world: int | None = None, *, new: Collection[str] = ()
    ) -> int | None:
        """Go back to a cut with all tables. Every worker calls this before its first pull.

        Pushes after the cut do not count any more. Workers that do not call it may not push any
        more. It also ends the loss of rows.

        Args:
            step: Step of the cut. None: the newest one.
            world: Number of workers. None: ``WORLD_SIZE``.
            new: Tables that the cut need not have, although it has others that the job does not
                use. Such a table has perhaps been renamed, so it is refused without this.

        Returns:
            The step; None if there is no cut and no loss. Then nothing was changed.

        Raises:
            CheckpointError: There is no such cut, it is damaged, or it has other tables.
            UnreachableError: Not all workers called in time.
        """
        step = -1 if step is None else step
        found = self.meet(step, world, restore=True, new=tuple(sorted(new))).step
        return None if found < 0 else found

    def meet(
        self, step: int, world: int | None = None, *, restore: bool = False, **more: Any
    ) -> m.Met:
        """Ask for a cut, or to go back to one, and wait until all workers have asked for the same.

        Earlier pushes of this client are acknowledged first.

        Args:
            step: Step of the cut; -1: the newest one, to go back to.
            world: Number of workers. None: ``WORLD_SIZE``.
            restore: Whether to go back to a cut. Otherwise a cut is made.
            more: Further fields of :class:`~dlrover_py.ps.messages.Meet`.

        Returns:
            What became of it. Its step is -1 if there is no cut to go back to.

        Raises:
            CheckpointError: The coordinator refuses the request, or the cut fails.
            UnreachableError: Not all workers called in time.
            DLRoverError: This client is broken, for example because a push has failed.
        """
        if restore:
            self._tables.forget()
        for name, rest in self._tables.unsent():
            self._request({name: rest}, push=True, whole=True).result()
        world = Settings.from_environment().world if world is None else world
        self._meetings += 1
        meet = m.Meet(self.name, self._incarnation, self._meetings, step, world, restore, **more)
        meeting = _Meeting(meet, time.monotonic() + self._timeout_s)
        self._post(meeting)
        met = meeting.future.result()
        if met.words:
            done = "restored" if restore else "saved"
            raise CheckpointError(f"the tables were not {done}: {met.words}")
        return met

    def close(self) -> None:
        """Stop the thread. Requests that are not done fail."""
        self._over = True
        self._lines.wake()
        self._thread.join()

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- The caller's thread ---

    def _request(
        self, tables: "Mapping[str, Sequence[Any]]", *, push: bool, whole: bool = False
    ) -> "Future[Any]":
        """Check and order the arrays of a request, and pass it to the thread.

        Args:
            tables: The arrays of each table.
            push: Whether it is a push.
            whole: Whether all values of gradients are sent now, whatever their ``top`` is.
        """
        parts, buckets = self._tables.ordered(self.map, tables, push=push, whole=whole)
        request = _Request(parts, buckets, push, time.monotonic() + self._timeout_s)
        if buckets or (push and self._pace):
            self._post(request)
        else:
            request.future.set_result(received(request.parts))
        return request.future

    def _post(self, command: _Request | _Meeting | m.CreateTable | m.UseConsistency) -> None:
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._commands.append(command)
        self._lines.wake()

    def _wait(
        self, ready: Any, what: str, command: m.CreateTable | m.UseConsistency | None = None
    ) -> None:
        """Wait until the thread has news that fulfil a condition.

        Args:
            ready: The condition.
            what: What is waited for.
            command: What the coordinator is told, again and again: the next one may not know it.

        Raises:
            ConfigError: The coordinator refused it.
            UnreachableError: Nothing came in time.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            self._refusal = "" if command else self._refusal
            while not ready() and (left_s := deadline - time.monotonic()) > 0:
                if command:
                    self._post(command)
                self._changed.wait_for(
                    lambda: ready() or self._refusal or self._broken, min(self._watch_s, left_s)
                )
                if not ready() and (self._broken or self._refusal):
                    raise self._broken or ConfigError(self._refusal)
            if ready():
                return
        raise UnreachableError(
            f"{what}: no answer of the coordinator at {self._address} within {self._timeout_s:g} s"
        )

    # --- The thread ---

    def _run(self) -> None:
        watch_at = 0.0
        try:
            while not self._over:
                now = time.monotonic()
                if now >= watch_at:
                    watch_at = now + self._watch_s
                    begin = m.JoinClient(self.name, self._call)
                    self._send("", m.WatchMap(self.map.epoch) if self._joined else begin)
                self._lines.poll(TICK_S)
                self._take_commands()
                self._receive()
                self._tick(time.monotonic())
        except Exception as fault:  # noqa: BLE001 - whoever waits for an answer gets it
            error = UnreachableError(f"the client of the parameter server has failed: {fault!r}")
            error.__cause__ = fault
            self._break(error)
        finally:
            self._break(UnreachableError("the client was closed"))
            self._report(leaving=True)
            self._lines.close(LEAVING_MS)

    def _take_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if isinstance(command, m.CreateTable | m.UseConsistency):
                self._send("", command)
            elif isinstance(command, _Meeting) or command.push:
                self._pushes.append(command)
            else:
                self._pulls.append(command)
        self._next_push()

    def _next_push(self) -> None:
        """Start the oldest waiting push or meeting of workers, if none is under way, and all pulls.

        With steps, pushes and pulls wait until this worker is a member of the group.
        """
        while self._pulls and (self._pace is None or self._is_member()):
            self._start(self._pulls.popleft())
        busy = self._meeting is not None or any(one.push for one in self._open.values())
        if not self._pushes or busy or (self._pace is not None and self._pace.push is not None):
            return
        first = self._pushes[0]
        if isinstance(first, _Request) and self._pace is not None and not self._is_member():
            return
        self._pushes.popleft()
        if isinstance(first, _Request):
            self._start(first)
        else:
            self._meeting = first
            self._ask(first)

    # --- Steps with other workers ---

    def _is_member(self) -> bool:
        return self.map.steps.members.get(self.name) == self._incarnation

    def _report(self, *, leaving: bool = False) -> None:
        """Say how far this worker is."""
        pace = self._pace
        if pace is not None and (self._broken is None or leaving):
            pace.due = time.monotonic() + ASK_S
            self._send("", pace.word(self.name, self._incarnation, self.map.epoch, leaving))

    def _follow_steps(self) -> None:
        """Go on if the newest map allows it, or begin the step again with the new group."""
        pace, steps = self._pace, self.map.steps
        if pace is None or not self._incarnation:
            return
        if self._is_member() and pace.follower.follow(steps):
            self._report()
        waiting = pace.push
        if waiting is not None:
            fate = pace.follower.fate(waiting.step, steps)
            pace.push = waiting if fate is Fate.WAIT else None
            if fate is Fate.GO_ON:
                waiting.future.set_result(received(waiting.parts))
            elif fate is Fate.AGAIN:
                self._pushes.appendleft(waiting)
        for seq, request in list(self._open.items()):
            if request.push and pace.follower.fate(request.step, steps) is Fate.AGAIN:
                self._requests.cancel(seq)
                del self._open[seq]
                self._pushes.appendleft(request)
        self._next_push()

    def _ended(self, request: _Request) -> None:
        """Take note that all servers have a push, which ends a step of this worker."""
        pace = self._pace
        if not request.push or pace is None:
            request.future.set_result(received(request.parts))
            self._next_push()  # its error is not that of this request
            return
        pace.follower.end(request.step)
        pace.push = request
        self._report()
        self._follow_steps()

    def _ask(self, meeting: _Meeting) -> None:
        meeting.due = time.monotonic() + ASK_S
        self._send("", meeting.message)

    def _on_met(self, met: m.Met) -> None:
        meeting = self._meeting
        # Rows of the map before may be older: the newer map comes first.
        if meeting and met.number == meeting.message.number and met.epoch <= self.map.epoch:
            self._meeting = None
            meeting.future.set_result(met)
            self._next_push()

    def _start(self, request: _Request) -> None:
        if self._broken is not None:
            request.future.set_exception(self._broken)
            return
        self._seq += 1
        now = time.monotonic()
        request.deadline = now + self._timeout_s  # it may have waited for others
        if request.push and self._pace is not None:
            request.step = self._pace.follower.step()
            if not request.buckets:
                self._ended(request)
                return
        self._open[self._seq] = request
        parts = self._without_lost(self._requests.start(self._seq, request.buckets, now))
        self._send_parts(parts)

    def _without_lost(self, parts: list[SendPart]) -> list[SendPart]:
        """Fail the requests for lost rows; return the parts of all others."""
        lost = self._requests.lost()
        for seq in lost:
            self._fail(seq, DataLossError(_LOST))
        return [part for part in parts if part.seq not in lost]

    def _send_parts(self, parts: list[SendPart]) -> None:
        for one in parts:
            request, here = self._open[one.seq], (self.name, self._incarnation, self.map.epoch)
            self._send(one.server, *request.part(one, *here, sync=self.synchronous))

    def _send(self, server: str, message: Any, payload: Payload | None = None) -> None:
        address = self.map.servers[server] if server else self._address
        self._lines.send(server, address, message, payload or [])

    def _receive(self) -> None:
        try:
            for message, payload in self._lines.received():
                self._handle(message, payload)
        except WireError as error:
            self._break(ConfigError(f"an answer of the parameter server: {error}"))

    def _handle(self, message: Any, payload: Payload) -> None:
        match message:
            case m.MapNews():
                self._on_map(message.map)
            case m.Pushed():
                self._answered(message.seq, message.buckets)
            case m.Pulled():
                self._pulled(message, payload)
            case m.RefusedRequest():
                self._refused(message)
            case m.Met():
                self._on_met(message)
            case m.CoordinatorRefusal():
                with self._changed:
                    self._refusal = message.words
                    self._changed.notify_all()
            case m.Unreadable():
                self._break(ConfigError(f"the parameter server refused a message: {message.words}"))

    def _on_map(self, new: ClusterMap) -> None:
        now = time.monotonic()
        parts = self._requests.on_map(new, now)
        current = self.map
        self._lines.keep({"", *current.servers})
        self._follow_steps()
        self._send_parts([one for one in self._without_lost(parts) if one.seq in self._open])
        newest = current.clients.get(self.name, 0)
        if not self._joined and current.calls.get(self.name) == self._call:
            self._joined = newest
        if self._meeting is not None:
            self._ask(self._meeting)
        if self._joined and newest > self._joined:
            words = f"a newer client has the name {self.name}, or the other workers went on without"
            self._break(SupersededError(f"{words} it: expected one that is heard all the time"))
        with self._changed:
            if current.placements and not self._broken:
                self._incarnation = self._joined
            self._changed.notify_all()

    def _pulled(self, message: m.Pulled, payload: Payload) -> None:
        request = self._open.get(message.seq)
        if request is None or request.push:
            return
        request.receive(message.buckets, payload)
        self._answered(message.seq, message.buckets)

    def _answered(self, seq: int, buckets: tuple[int, ...]) -> None:
        self._requests.answered(seq, buckets)
        if seq in self._open and not self._requests.is_open(seq):
            self._ended(self._open.pop(seq))

    def _refused(self, message: m.RefusedRequest) -> None:
        if message.reason is m.RefusalReason.MOVED:
            self._requests.refused(message.seq, message.buckets, time.monotonic())
            if message.epoch > self.map.epoch:
                self._send("", m.WatchMap(self.map.epoch))
        elif message.reason is m.RefusalReason.OLD_CLIENT:
            self._break(SupersededError(message.words))
        else:
            self._fail(message.seq, ConfigError(message.words))

    def _tick(self, now: float) -> None:
        self._send_parts(self._requests.due(now))
        meeting = self._meeting
        if meeting is not None and meeting.deadline < now:
            self._meeting = None
            words = f"not all workers have made the same call within {self._timeout_s:g} s"
            meeting.future.set_exception(UnreachableError(words))
        elif meeting is not None and meeting.due <= now:
            self._ask(meeting)
        pace = self._pace
        if pace is not None and self._incarnation:
            if pace.due <= now:
                self._report()
            self._next_push()
            first = pace.push or next(iter((*self._pulls, *self._pushes)), None)
            # Members are heard all the time, so a member waits for a slow one as long as it takes.
            if isinstance(first, _Request) and first.deadline < now and not self._is_member():
                words = f"expected {pace.world} workers within {self._timeout_s:g} s: fewer came"
                self._break(UnreachableError(words))
        for seq, request in list(self._open.items()):
            if request.deadline < now:
                self._fail(seq, UnreachableError(f"no server answered in {self._timeout_s:g} s"))

    def _fail(self, seq: int, error: DLRoverError) -> None:
        """End a request without success. After a push, which may be applied in part, all end."""
        self._requests.cancel(seq)
        request = self._open.pop(seq, None)
        if request is not None:
            request.future.set_exception(error)
            if request.push:
                self._break(error)

    def _break(self, error: DLRoverError) -> None:
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()
        self._fail_all(error)

    def _fail_all(self, error: DLRoverError) -> None:
        waiting = [one for one in self._commands if isinstance(one, _Request | _Meeting)]
        if self._pace is not None and self._pace.push is not None:
            waiting.append(self._pace.push)
            self._pace.push = None
        if self._meeting is not None:
            waiting.append(self._meeting)
            self._meeting = None
        for request in (*self._open.values(), *self._pulls, *self._pushes, *waiting):
            request.future.set_exception(error)
        for seq in self._open:
            self._requests.cancel(seq)
        self._open.clear()
        self._pulls.clear()
        self._pushes.clear()
        self._commands.clear()


_default: list[PsClient] = []
"""The connection of this process; empty until there is one."""


def default_client() -> PsClient:
    """Return the connection of this process, which is made when it is first needed."""
    return _default[0] if _default and not _default[0]._over else connect()


def connect(
    access: Path | None = None, name: str | None = None, *, timeout_s: float = 120.0
) -> PsClient:
    """Connect this worker to the parameter server of its job.

    The first connection without a name of its own is that of this process: tables without a
    ``client``, ``ps.save`` and ``ps.restore`` use it. A second one would end its rights.

    Args:
        access: The file that ``dlrover ps serve`` has written. None: that of ``DLROVER_PS``.
        name: Name of the worker, which no other one has. None: ``worker-RANK``.
        timeout_s: Seconds after which a request has failed.

    Raises:
        ConfigError: There is no such file.
    """
    settings = Settings.from_environment()
    where = access or settings.access
    if not where:
        raise ConfigError(
            "DLROVER_PS is not set: start the script with `dlrover ps serve -- COMMAND`"
        )
    made = PsClient(read_access(where), name or f"worker-{settings.rank}", timeout_s=timeout_s)
    if name is None and all(one._over for one in _default):
        _default[:] = [made]
        atexit.register(made.close)  # others do not wait for this worker then
    return made
