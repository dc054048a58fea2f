"""The coordinator of a job's servers: the sockets and the stored map of one planner.

A new map is stored before anyone gets it, so a later coordinator goes on where this one ended.
"""

import contextlib
import logging
import os
import socket as sockets
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import zmq

from dlrover_py import telemetry
from dlrover_py.checkpoint.directory import RENEW_S
from dlrover_py.protocol.errors import (
    CheckpointError,
    ConfigError,
    SupersededError,
    TransientError,
)
from dlrover_py.protocol.words import counted
from dlrover_py.ps import messages as m
from dlrover_py.ps.balance import LEAST_ASKED_GAIN, LEAST_GAIN, BucketLoads
from dlrover_py.ps.cluster_map import ClusterMap, CutPlace
from dlrover_py.ps.cuts import CutDirectory, SavedCut
from dlrover_py.ps.door import guard, guarded, new_context
from dlrover_py.ps.map_store import MapStore, MapTooLargeError
from dlrover_py.ps.meetings import Meetings
from dlrover_py.ps.planner import Planner, PlanRules, outlook
from dlrover_py.ps.specs import Consistency, ConsistencyKind
from dlrover_py.ps.spread import after
from dlrover_py.ps.steps import StepGroup
from dlrover_py.ps.wire import (
    NO_KEY,
    JobAccess,
    UnprovenError,
    WireError,
    decode,
    send,
)

FORGET_S = 60.0
"""Seconds of silence after which a connection gets no more maps. Workers ask more often."""


TURN_S = 0.5
"""Seconds that count at most, for silences, from one look at the messages to the next.

While the coordinator waits for a disk or the API server, it hears nobody. That is no silence."""

CHECK_S = 10.0
"""Seconds without a new map after which a coordinator checks that the stored one is its own."""

LAST_WORDS_MS = 1000
"""Milliseconds for the news of the job's end to leave."""
DOUBT_S = 15.0
"""Seconds without a success of the store after which a coordinator closes all connections.

A master that cannot reach the API server may still reach servers and workers. While they are
connected to it, they do not find the next one."""

NO_CUTS = (
    "there is no directory for cuts: give spec.replicaSpecs.ps.checkpoints one in the job file, or "
    "start the servers with dlrover ps serve --checkpoints DIR"
)
WAITED_FOR_S = 10.0
"""Seconds after which a cut is given up that no worker asks for. Pushes must not wait for ever."""
_LOG = logging.getLogger(__name__)
_LOG.addFilter(telemetry.RepeatFilter())


@dataclass(slots=True)
class _Cut:
    """A cut that is being made."""

    place: CutPlace
    asked: tuple[m.Meet, ...]
    heard: float
    """When one of the workers was heard last."""
    parts: list[m.CutPart] = field(default_factory=list)


class _Hearing:
    """The time, in seconds, that this coordinator has spent where it could hear others.

    It begins with the first message. Before that, perhaps nobody can reach this coordinator yet.
    """

    def __init__(self, now: float) -> None:
        self.now = self._seen = now
        self.begun = False

    def pass_to(self, now: float) -> float:
        """Return the time of hearing at a moment, which counts :data:`TURN_S` at most."""
        if self.begun:
            self.now += max(0.0, min(now - self._seen, TURN_S))
        self._seen = max(now, self._seen)
        return self.now


class Coordinator:
    """Owns the map of a job. One thread at a time may call it."""

    def __init__(
        self,
        job: str,
        token: str,
        store: MapStore,
        rules: PlanRules,
        now: float,
        *,
        cuts: CutDirectory | None = None,
        source: SavedCut | None = None,
        listener: sockets.socket | None = None,
    ) -> None:
        """Open the socket, and go on with a stored map if there is one.

        Args:
            job: Name of the job.
            token: The job's secret.
            store: Where the map is kept.
            rules: How buckets are kept.
            now: The time in seconds.
            cuts: Where cuts are saved. None: nowhere.
            source: The cut that the first servers read, unless there is a stored map.
            listener: A socket that listens. It stays open for the next coordinator, so programs of
                the job keep its address. None: a new one on the loopback device.

        Raises:
            ConfigError: The rules are wrong, or the stored document is not the map of this job.
            TransientError: The map cannot be read now.
        """
        rules.check()
        self._store = store
        if source is not None:
            rules = replace(rules, buckets=source.buckets)
        start = _first_map(ClusterMap(job, ack=rules.ack), store, source)
        self._cuts = cuts
        self._cut: _Cut | None = None
        self._meetings = Meetings()
        self._hearing = _Hearing(now)
        self._group = StepGroup(now, rules.return_s)
        self._renew_at = now
        self.planner = Planner(start, rules, now)
        self._context, self._listener = new_context(), listener
        self._key = JobAccess(job, "", token).key
        guard(self._context, self._key)
        self.socket = guarded(self._context)
        """It is closed while servers and workers must find another coordinator, if there is one."""
        port = _bind(self.socket, listener)
        self.access = JobAccess(job, f"tcp://127.0.0.1:{port}", token)
        self._routes: dict[bytes, float] = {}
        """When each connection was heard last."""
        self._published = -1
        self._owned_at = now
        """When the store was last known to be this coordinator's own."""
        self._answers: dict[bytes, m.Met] = {}
        """What is sent to a connection when the map is stored of which it speaks."""
        self.loads: dict[str, m.Load] = {}
        """What each server has said last of its load."""
        self.bucket_loads = BucketLoads(now)
        """What workers have asked of each bucket lately."""
        self._request = ""
        """A request to even the servers that is not answered yet; empty if there is none."""
        self.rebalanced: tuple[str, str] | None = None
        """The last request that was answered, and the answer."""
        self._present: frozenset[str] | None = None
        """The servers that exist; None if nobody has said so."""
        self._ended = False
        """Whether the job has ended."""

    def close(self) -> None:
        """Close the socket, and let others write cuts."""
        if self._cuts is not None:
            with contextlib.suppress(OSError):  # it lapses
                self._cuts.close()
        # Servers that do not hear of the job's end wait for the next coordinator, minutes long.
        self._context.destroy(linger=LAST_WORDS_MS if self._ended else 0)

    def receive(self, now: float) -> None:
        """Handle the messages that have come. :meth:`tick` stores what they have changed."""
        heard = self._hearing.pass_to(now)
        for _ in range(0 if self.socket.closed else 64):
            try:
                route, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, _ = decode(frames, self._key)
                self._hearing.begun = True
                self._handle(route, message, heard)
            except UnprovenError as error:  # a worker of another job or version needs the words
                self._send(route, m.Unreadable(str(error)), NO_KEY)
            except WireError as error:
                self._send(route, m.Unreadable(str(error)))
            except ConfigError as error:
                self._send(route, m.CoordinatorRefusal(str(error)))

    def tick(self, now: float) -> None:
        """Take note of the time, then store the map and send it to all, if it is new.

        Servers that were silent count as lost, and workers that were silent leave their group. The
        time in which this coordinator was blocked does not count. :meth:`receive` comes first, so
        that one who has spoken meanwhile is heard.

        After :data:`DOUBT_S` without a success of the store, the socket is closed, unless no other
        coordinator can take its place. It is opened again when the store has answered.

        Raises:
            TransientError: The map cannot be stored. Nobody gets it; a later call tries again. Its
                ``retry_after`` is the least delay until then.
            SupersededError: Another coordinator owns the map.
        """
        heard = self._hearing.pass_to(now)
        self.planner.tick(heard)
        known = self.planner.map
        self.planner.step(*self._group.plan(known.steps, known.clients, heard))
        weights = self.bucket_loads.tick(self.planner.map, heard)
        if weights is not None:
            self._even(weights, LEAST_GAIN)
        if self._request and self.bucket_loads.rates is not None:
            self._answer(self._request)
        self.loads = {one: self.loads[one] for one in self.loads.keys() & known.servers.keys()}
        self._routes = {route: at for route, at in self._routes.items() if heard - at < FORGET_S}
        if self._cut is not None and any(one.lost for one in self.planner.map.placements):
            self._fail_cut("rows were lost while it was made: their servers have died")
        if self._cut is not None and heard - self._cut.heard > WAITED_FOR_S:
            self._fail_cut("no worker waits for it any more")
        if self._cuts is not None and now >= self._renew_at:
            self._renew_at = now + RENEW_S
            with contextlib.suppress(OSError):  # the next cut says so
                self._cuts.renew()
        try:
            self._publish(now)
        except MapTooLargeError:
            raise  # the store is reached: there is no other master to go to
        except TransientError:
            if now - self._owned_at > DOUBT_S and self._listener is not None:
                self._disconnect()
            raise
        if self.socket.closed:
            self._connect()

    def lost(self, server: str) -> None:
        """Note that the process of a server has ended."""
        self.planner.lost(server)

    def present(
        self, servers: frozenset[str], desired: int, *, least: int | None = None, standbys: int = 0
    ) -> None:
        """Take note of all servers that exist. Any other one has ended, with all its rows.

        From now on, nothing is heard from a server that is not among them: what it sent before its
        end may arrive late.

        Args:
            servers: The servers that exist.
            desired: The desired number of servers.
            least: Number of servers with which rows are placed first. None: all that are desired.
            standbys: Number of further servers, which have no rows while the desired ones run.
        """
        self._present = servers
        self.planner.expect(desired, least=least, standbys=standbys)
        known = self.planner.map
        members = {one.primary for one in known.placements if not one.lost}
        for server in sorted((known.servers.keys() | members) - servers):
            self.planner.lost(server)

    def end(self) -> None:
        """Tell the servers, now and as they leave, that the job has ended: nobody needs rows."""
        self._ended = True
        for route in self._routes:
            self._send(route, m.JobEnded())

    def rebalance(self, request: str) -> None:
        """Even the servers by their loads, as soon as these are measured; then :attr:`rebalanced`.

        Args:
            request: Any text. Each one is answered once. Empty: nothing is requested.
        """
        if request == self.planner.map.rebalanced:
            self._request = ""
            if request and self.rebalanced is None:
                self.rebalanced = (request, "an earlier master has answered this request")
        else:
            self._request = request

    def _answer(self, request: str) -> None:
        self._request, weights = "", self.bucket_loads.weights
        if len(weights) == len(self.planner.map.placements) > 0:
            words = self._even(weights, LEAST_ASKED_GAIN)
        else:
            words = "nothing moves: workers have asked for too few rows in the last half minute"
        self.rebalanced = (request, words)
        self.planner.rebalanced(request)

    def _even(self, weights: tuple[int, ...], least_gain: float) -> str:
        """Even the servers by some weights, and say so; or say that nothing moves.

        Args:
            weights: How much each bucket counts.
            least_gain: Least decrease of the busiest server's load, as a part of the mean.
        """
        known = self.planner.map
        found = outlook(known, self.planner.rules, weights, least_gain)
        if not found.moves:
            return f"nothing moves: the busiest server has {found.busiest:.2f} times the mean load"
        self.planner.weigh(weights)
        pairs = list(zip(known.placements, found.map.placements, strict=True))
        led = sum(after(old)[0] != after(new)[0] for old, new in pairs)
        copied = sum(not set(new.members) <= set(old.members) for old, new in pairs)
        fields = {"busiest": round(found.busiest, 2), "expected": round(found.later, 2)}
        _LOG.info("buckets move to even the servers", extra={"fields": fields})
        return (
            f"the busiest server has {found.busiest:.2f} times the mean load, and will have "
            f"{found.later:.2f}: "
            f"{counted(led, 'bucket')} will be led by other servers, {copied} will be copied"
        )

    def _disconnect(self) -> None:
        """Close all connections. Their other ends connect again, perhaps to another coordinator."""
        self.socket.close(linger=0)
        self._routes, self._answers = {}, {}
        self._hearing.begun = False  # nobody can speak, so nobody is silent

    def _connect(self) -> None:
        """Take connections again. Their other ends have as much time as with a new coordinator."""
        self.socket = guarded(self._context)
        _bind(self.socket, self._listener)
        self.planner.wait_for_all(self._hearing.now)
        self._group.wait_for_all(self._hearing.now)

    def _publish(self, now: float) -> None:
        if self.planner.map.epoch == self._published:
            if now - self._owned_at < CHECK_S:
                return
            is_there = self._store.check()
            self._owned_at = now
            if is_there:
                return
        self._store.write(msgspec.json.encode(self.planner.map))
        self._published, self._owned_at = self.planner.map.epoch, now
        for route in self._routes:
            self._send(route, m.MapNews(self.planner.map))
        for route, answer in self._answers.items():
            self._send(route, answer)
        self._answers = {}

    def _handle(self, route: bytes, message: Any, now: float) -> None:
        planner = self.planner
        if isinstance(message, m.Beat):  # its connection gets no map
            planner.beat(message.server, now)
            return
        self._routes[route] = now
        epoch = planner.map.epoch
        match message:
            case m.Alive():
                if self._present is not None and message.server not in self._present:
                    return
                if message.epoch > epoch:
                    self._refuse_newer(message, epoch)
                planner.heard(message.server, message.address, now)
                for bucket, term, learner in message.synced:
                    planner.synced(message.server, bucket, term, learner)
                for bucket, term in message.loaded:
                    planner.loaded(message.server, bucket, term)
                epoch = message.epoch
            case m.WatchMap():
                epoch = message.epoch
            case m.JoinClient():
                planner.join(message.client, message.call)
                epoch = -1  # the answer is a map in any case
            case m.CreateTable():
                planner.create_table(message.spec, message.client, message.incarnation)
                epoch = -1
            case m.UseConsistency():
                self._check_steps(message.consistency)
                planner.use(message.consistency)
                epoch = -1
            case m.Stepped():
                epoch = message.epoch
                self._group.heard(message, now)
            case m.Drain():
                planner.drain(message.server)
                epoch = -1  # whoever leaves must hear that there is a coordinator
                if self._ended:
                    self._send(route, m.JobEnded())
            case m.Meet():
                self._on_meet(route, message, now)
                return
            case m.Load():
                if message.server in planner.map.servers:
                    self.loads[message.server] = message
                    self.bucket_loads.heard(message.server, message.bucket_rows, planner.map)
                return
            case m.CutPart():
                self._on_part(message)
            case m.CutFailed():
                if self._cut is not None and self._cut.place.folder == message.folder:
                    self._fail_cut(f"{message.server}: {message.words}")
            case _:
                raise WireError(f"the coordinator takes no {type(message).__name__}")
        if epoch < planner.map.epoch == self._published:
            self._send(route, m.MapNews(planner.map))

    def _refuse_newer(self, alive: m.Alive, epoch: int) -> None:
        """Refuse a server with a newer map than this coordinator, whose stored map was lost.

        The rows of that server belong to a map that nobody can read any more.
        """
        words = (
            f"server {alive.server} has the map of epoch {alive.epoch}: expected at most {epoch}, "
            f"the one in {self._store.name}; the stored map was lost: start the job anew"
        )
        _LOG.warning("a server has a newer map", extra={"fields": {"error": words}})
        raise ConfigError(words)

    def _check_steps(self, wanted: Consistency) -> None:
        """Refuse steps if the map, which is written after each of them, is too large for that."""
        buckets, most = self.planner.rules.buckets, self._store.step_buckets
        if wanted.kind is not ConsistencyKind.ASYNC and buckets > most:
            raise ConfigError(
                f"the tables have {buckets} buckets: expected at most {most} with ps.sync() and "
                f"ps.ssp(), because each step writes the map of all into {self._store.name}; "
                "set a smaller number of buckets for the role ps, and start the job anew"
            )

    # --- Cuts ---

    def _on_meet(self, route: bytes, asked: m.Meet, now: float) -> None:
        answer = self._meetings.answer(asked) or self._met_before(asked)
        if self._cut is not None and asked in self._cut.asked:
            self._cut.heard = now
        elif answer is None:
            try:
                all_asked = self._meetings.join(asked, self.planner.map.clients, now)
                if all_asked and asked.origin:
                    self._begin_or_restore(all_asked, now)
                elif all_asked and asked.restore:
                    self._restore(all_asked)
                elif all_asked:
                    self._begin_cut(all_asked, now)
            except ConfigError as error:
                self._send(route, m.Met(asked.number, -1, 0, str(error)))
                return
            answer = self._meetings.answer(asked)
        if answer is None:
            return
        if self.planner.map.epoch == self._published:
            self._send(route, answer)
        else:
            self._answers[route] = answer

    def _met_before(self, asked: m.Meet) -> m.Met | None:
        """Return the answer that an earlier coordinator has not given; None if there is none."""
        known = self.planner.map
        if known.source is None or known.met.get(asked.client) != _call(asked):
            return None
        return m.Met(asked.number, known.source.step, known.epoch, folder=known.source.folder)

    def _begin_or_restore(self, asked: tuple[m.Meet, ...], now: float) -> None:
        """Go back to the rows with which the training began, or save them if it begins now."""
        known = self.planner.map
        if known.origin is not None:
            self._restore(asked)
        elif known.source is None:
            self._begin_cut(asked, now)
        else:
            words = (
                f"the rows went back to the cut of step {known.source.step} before, or were saved "
                "as it, and there is no checkpoint: it is not known with which rows the training "
                "begins; start the job anew, or call ps.restore() before load()"
            )
            self._meetings.end(asked, -1, known.epoch, words)

    def _begin_cut(self, asked: tuple[m.Meet, ...], now: float) -> None:
        """Begin the cut that all workers have asked for; no push is applied until it ends.

        It cannot begin without a directory, during another cut, while rows are lost, or if the
        directory refuses. The meeting then ends, and each worker is told why.
        """
        planner, words = self.planner, ""
        if self._cuts is None:
            words = NO_CUTS
        elif self._cut is not None:
            words = "another cut is being made: expected one call by all workers"
        elif any(one.lost for one in planner.map.placements):
            words = "rows are lost, because their servers have died: go back to a cut first"
        else:
            try:
                place = self._cuts.begin(max(0, asked[0].step))
            except (OSError, ConfigError) as error:
                words = str(error)
            else:
                self._cut = _Cut(place, asked, now)
                planner.begin_cut(place)
        if words:
            self._meetings.end(asked, -1, planner.map.epoch, words)

    def _on_part(self, part: m.CutPart) -> None:
        """Note what a server has written; commit when all buckets are there."""
        cut, planner = self._cut, self.planner
        if cut is None or self._cuts is None or part.folder != cut.place.folder:
            return
        first = part.buckets[:1]
        if any((part.file, first) == (known.file, known.buckets[:1]) for known in cut.parts):
            return
        cut.parts.append(part)
        written = {saved.bucket for known in cut.parts for saved in known.buckets}
        if not written >= set(range(len(planner.map.placements))):
            return
        needed: set[str] | None = set()
        for one in cut.asked:
            needed = None if needed is None or one.needed is None else {*needed, *one.needed}
        try:
            self._cuts.commit(cut.place, planner.map, cut.parts, len(cut.asked), needed)
        except (OSError, CheckpointError, SupersededError) as error:
            self._fail_cut(str(error))
            return
        self._cut = None
        planner.end_cut(_calls(cut.asked), origin=cut.asked[0].origin)
        place = cut.place
        self._meetings.end(cut.asked, place.step, planner.map.epoch, folder=place.folder)

    def _fail_cut(self, words: str) -> None:
        assert self._cut is not None
        assert self._cuts is not None
        cut, self._cut = self._cut, None
        self.planner.end_cut()
        self._meetings.end(cut.asked, -1, self.planner.map.epoch, words)
        with contextlib.suppress(OSError):  # the next cut removes what is left
            self._cuts.give_up()

    def _restore(self, asked: tuple[m.Meet, ...]) -> None:
        """Go back to a cut whose every byte is right, or change nothing."""
        planner, first, words, folder = self.planner, asked[0], "", ""
        step = first.step
        if self._cut is not None:
            self._fail_cut("other workers have gone back to a cut meanwhile")
        try:
            if self._cuts is None:
                raise ConfigError(NO_CUTS)
            which: str | None = first.folder or str(step)
            if step < 0 and not first.folder:
                newest = planner.map.origin if first.origin else planner.map.source
                which = newest.folder if newest is not None else None
            found = SavedCut.open(self._cuts.url, which)
            if found is None:
                step = -1
                if any(one.lost for one in planner.map.placements):
                    words = "rows are lost, and there is no cut to go back to"
            else:
                found.verify()
                step, folder = found.place.step, found.place.folder
                planner.restore(
                    found.place,
                    found.document.tables,
                    found.buckets,
                    {one.client for one in asked},
                    first.new,
                    origin=not first.folder,
                    met=_calls(asked),
                )
        except (ConfigError, CheckpointError) as error:
            words = str(error)
        step, folder = (-1, "") if words else (step, folder)
        self._meetings.end(asked, step, planner.map.epoch, words, folder=folder)

    def _send(self, route: bytes, message: Any, key: bytes | None = None) -> None:
        with contextlib.suppress(zmq.Again):  # it asks again
            send(self.socket, message, [], self._key if key is None else key, route)


def _call(asked: m.Meet) -> tuple[int, int]:
    return asked.incarnation, asked.number


def _calls(asked: tuple[m.Meet, ...]) -> dict[str, tuple[int, int]]:
    """Return the incarnation of each worker, and the number of its call."""
    return {one.client: _call(one) for one in asked}


def _bind(socket: Any, listener: sockets.socket | None) -> int:
    """Have a socket of ZeroMQ listen, and return its port.

    Args:
        socket: The socket.
        listener: A socket that listens, which is shared. None: a new one on the loopback device.
    """
    if listener is None:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))
    port: int = listener.getsockname()[1]
    listener.setblocking(False)
    socket.setsockopt(zmq.USE_FD, os.dup(listener.fileno()))  # ZeroMQ closes it
    socket.bind(f"tcp://127.0.0.1:{port}")
    return port


def _first_map(empty: ClusterMap, store: MapStore, source: SavedCut | None) -> ClusterMap:
    """Return the map to begin with.

    Args:
        empty: The map of a job that begins.
        store: Where a map may be stored. It counts if there is one.
        source: The cut that servers are to read, if there is no stored map.

    Raises:
        ConfigError: The stored document is not the map of this job.
        TransientError: It cannot be read now.
    """
    document = store.read()
    if document is not None:
        expected = f"{store.name}: expected the map of job {empty.job}"
        try:
            stored = msgspec.json.decode(document, type=ClusterMap)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{expected}: {error}") from error
        if stored.job != empty.job:
            raise ConfigError(f"{expected}, found {stored.job}'s")
        # Workers ask again for what was being saved. Servers must learn that it was given up.
        return replace(stored, cut=None, epoch=stored.epoch + (stored.cut is not None))
    if source is None:
        return empty
    made = source.document
    return replace(
        empty,
        epoch=made.epoch + 1,
        tables=made.tables,
        clients=made.clients,
        source=source.place,
        restored=made.epoch + 1,
    )
