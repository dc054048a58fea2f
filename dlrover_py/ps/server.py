"""A server of the parameter server: one process with rows in memory, around one machine.

    python -m dlrover_py.ps.server ACCESS_FILE SERVER_ID

One thread receives, decides and sends. Another one tells the coordinator that the process runs.
SIGTERM makes the server give its buckets away and end.
"""

import argparse
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import zmq

from dlrover_py import telemetry
from dlrover_py.process.identity import signal_at_parents_end
from dlrover_py.protocol.errors import ConfigError, ExitCode
from dlrover_py.ps import messages as m
from dlrover_py.ps.beats import Beats
from dlrover_py.ps.bucket_copies import PART_BYTES
from dlrover_py.ps.codecs import decoded
from dlrover_py.ps.door import Line, guard, guarded, new_context
from dlrover_py.ps.load import RowMeter
from dlrover_py.ps.replication import Replica
from dlrover_py.ps.settings import read_access
from dlrover_py.ps.store import Payload, Store
from dlrover_py.ps.transfer import CutReader, CutWriter, parts_of
from dlrover_py.ps.wire import (
    JobAccess,
    UnprovenError,
    WireError,
    decode,
    send,
)

ALIVE_S = 0.5
"""Seconds between two messages to the coordinator."""
WRITTEN_S = 5.0
"""Seconds after which the coordinator is told again what was written of a cut."""
TICK_S = 0.05
BUSY_S = 0.002
"""Seconds between two looks at a thread that writes or reads a cut."""
ALONE_S = 30.0
"""Seconds without a coordinator after which a server of an ended job ends with its rows.

Workers may still push or save. While the job goes on, a server that leaves waits for the next
coordinator: what it knows of other copies is old, as their servers may be leaving, too."""
RETRY_S = 1.0
"""Seconds after which a cut that could not be read is read again."""
AT_ONCE = 32
"""Messages that are handled before other sockets have their turn."""
TURN_S = 0.3
"""Seconds after which other sockets have their turn in any case.

The coordinator and the copies must not wait for a server that has many large pulls to answer."""
QUEUED = 256
"""Messages that a server reads ahead, to find the copies among them."""
Request = tuple[bytes, Any, Payload]
"""A message with its arrays, and the connection from which it came."""
_LOG = logging.getLogger(__name__)
_LOG.addFilter(telemetry.RepeatFilter())


def in_turn(queued: deque[Request], clock: Callable[[], float]) -> Iterator[Request]:
    """Take requests out of a queue, :data:`AT_ONCE` at most, and none after :data:`TURN_S`.

    Args:
        queued: The queue. It may change while the requests are handled.
        clock: Returns the time in seconds.
    """
    until = clock() + TURN_S
    for _ in range(AT_ONCE):
        if not queued:
            return
        yield queued.popleft()
        if clock() >= until:
            return


def without_copies(queued: Iterable[Request], route: bytes, pull: m.Pull) -> list[Request]:
    """Return the requests that are left when a pull was answered.

    A worker sends a pull again when the answer takes long. All copies would take as long.

    Args:
        queued: Requests that had come before the answer was sent.
        route: The connection of the worker.
        pull: Its pull.
    """
    buckets = set(pull.buckets)

    def is_copy(one: Request) -> bool:
        known = one[1]
        return (
            isinstance(known, m.Pull)
            and (one[0], known.seq) == (route, pull.seq)
            and buckets.issuperset(known.buckets)
        )

    return [one for one in queued if not is_copy(one)]


class ParameterServer:
    """The sockets of one server, and its machine."""

    def __init__(
        self,
        access: JobAccess,
        server: str,
        host: str = "127.0.0.1",
        *,
        alone_s: float = ALONE_S,
    ) -> None:
        """Open the sockets.

        Args:
            access: The job.
            server: Id of this life of the server.
            host: The address of this machine that others reach.
            alone_s: Seconds without a coordinator after which a server ends that leaves a job that
                has ended.
        """
        self._access, self._key, self._id, self._alone_s = access, access.key, server, alone_s
        host = f"[{host}]" if ":" in host else host
        self._context = new_context(ipv6="[" in host)
        guard(self._context, self._key)
        self._inbox = guarded(self._context)
        port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self._address = f"tcp://{host}:{port}"
        self._up = Line(self._context, access.address, self._key)
        self._coordinator = self._up.socket
        self._peers: dict[str, Line] = {}
        self._queued: deque[Request] = deque()
        """What has come from workers and servers, in order."""
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._coordinator, zmq.POLLIN)
        self._replica: Replica | None = None
        self._store = Store(0)
        self._meter = RowMeter(server, time.monotonic())
        self._writers: list[CutWriter] = []
        """One for each file of the cut that is being made. The last one may still write."""
        self._reader: CutReader | None = None
        self._read_at = 0.0
        self._said: tuple[m.Alive, list[m.CutPart | m.CutFailed]] | None = None
        self._written_at = 0.0
        """When the coordinator was told last what was written of a cut."""
        self._stopped = False
        self._lifeline = -1
        self._heard_at = time.monotonic()
        """When the coordinator was heard last; it answers whoever leaves."""
        self._left_at = 0.0
        """When the server began to leave; 0 if it stays."""
        self._job_ended = False

    @property
    def has_buckets(self) -> bool:
        """Whether its map gives it buckets."""
        known = self._replica.map if self._replica is not None else None
        return known is not None and any(self._id in one.members for one in known.placements)

    def end_with(self, lifeline: int) -> None:
        """Let :meth:`run` end as soon as the other end of a pipe is closed.

        Args:
            lifeline: Descriptor of this end, to which nothing is ever written.
        """
        self._lifeline = lifeline
        self._poller.register(lifeline, zmq.POLLIN)

    def leave(self) -> None:
        """Let :meth:`run` give all buckets away, and then end.

        It waits for a coordinator until it is killed. If the job has ended, it waits ``alone_s``.
        """
        self._left_at = self._left_at or time.monotonic()

    def stop(self) -> None:
        """Let :meth:`run` end soon, without giving buckets away."""
        self._stopped = True

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    def run(self) -> bool:
        """Serve until all buckets are given away, after :meth:`leave`.

        Returns:
            False if rows are left on this server, although it was to give them away.
        """
        with Beats(self._context, self._access, self._id) as beats:
            self._serve(beats)
        return not self._left_at or not self.has_buckets

    def _serve(self, beats: Beats) -> None:
        self._say_alive()
        alive_at = tick_at = 0.0
        while not self._stopped and not self._has_left():
            beats.turned()
            until = min(alive_at, tick_at) - time.monotonic()
            if self._transfers(time.monotonic()):
                until = min(until, BUSY_S)
            if self._queued:
                until = 0.0
            if self._lifeline in dict(self._poller.poll(max(0, int(until * 1000)))):
                break
            self._store.now = time.monotonic()
            for _, message, _ in self._received(self._coordinator, AT_ONCE):
                self._from_coordinator(message)
                self._send_all()
            self._serve_queued()
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                for line in (self._up, *self._peers.values()):
                    line.mend(now)
                if self._replica is not None:
                    self._replica.tick(now)
                    self._send_all()
                    if self._meter.due(now):
                        load = self._meter.load(self._store, self._replica, now)
                        self._send(self._coordinator, load, [])
            if now >= alive_at or self._state() != self._said:
                alive_at = now + ALIVE_S
                self._say_alive()

    def _has_left(self) -> bool:
        if not self._left_at:
            return False
        alone_s = time.monotonic() - max(self._left_at, self._heard_at)
        return not self.has_buckets or (self._job_ended and alone_s > self._alone_s)

    def _state(self) -> tuple[m.Alive, list[m.CutPart | m.CutFailed]]:
        """Return what the coordinator must know."""
        replica = self._replica
        if replica is None or replica.map is None:
            return m.Alive(self._id, self._address, 0), []
        ready, loaded = tuple(replica.synced()), tuple(replica.loaded())
        alive = m.Alive(self._id, self._address, replica.map.epoch, ready, loaded)
        return alive, [one.result for one in self._writers if one.result is not None]

    def _say_alive(self) -> None:
        before, now = self._said, time.monotonic()
        self._said = alive, written = self._state()
        self._send(self._coordinator, alive, [])
        if before is None or before[1] != written or now - self._written_at > WRITTEN_S:
            self._written_at = now
            for one in written:
                for part in parts_of(one) if isinstance(one, m.CutPart) else [one]:
                    self._send(self._coordinator, part, [])
        if self._left_at:
            self._send(self._coordinator, m.Drain(self._id), [])

    # --- Cuts ---

    def _transfers(self, now: float) -> bool:
        """Pass buckets to and from the threads; return whether one of them is at work."""
        if self._replica is None or self._replica.map is None:
            return False
        return self._write_cut(self._replica) | self._read_cut(self._replica, now)

    def _write_cut(self, replica: Replica) -> bool:
        assert replica.map is not None
        place, led = replica.map.cut, replica.led()
        writer = self._writers[-1] if self._writers else None
        if writer is not None and writer.place != place:
            writer.stop()
            self._writers, writer = [], None
        if place is None:
            return False
        if writer is not None and not set(writer.left) <= set(led):
            writer.stop()  # a bucket has moved: its new primary writes it
            self._writers.pop()
            writer = self._writers[-1] if self._writers else None
        if writer is None or isinstance(writer.result, m.CutPart):
            # Buckets that it leads only now, after the loss of another server, go to a new file.
            done = {bucket for old in self._writers for bucket in old.buckets}
            new = [bucket for bucket in led if bucket not in done]
            if not new:
                return False
            writer = CutWriter(
                place, self._id, new, lambda bucket: self._store.parts(bucket, PART_BYTES)
            )
            self._writers.append(writer)
        until = time.monotonic() + TICK_S
        while writer.wants and time.monotonic() < until:
            writer.give(replica.numbers)
        return writer.result is None

    def _read_cut(self, replica: Replica, now: float) -> bool:
        assert replica.map is not None
        wanted, source = replica.to_load(), replica.map.source
        if self._reader is not None and not set(wanted) <= set(self._reader.wanted.items()):
            self._reader.stop()
            self._reader = None
        if self._reader is None and wanted and source is not None and now >= self._read_at:
            self._reader = CutReader(source, wanted)
        if self._reader is None:
            return False
        for bucket, payload in self._reader.taken(time.monotonic, TICK_S):
            replica.on_loaded(bucket, self._reader.wanted[bucket], payload)
        if self._reader.error:
            _LOG.error("a cut cannot be read", extra={"fields": {"error": self._reader.error}})
            self._read_at = now + RETRY_S
        if self._reader.error or not replica.to_load():
            self._reader.stop()  # it may have read what is not wanted any more
            self._reader = None
        return self._reader is not None

    def _serve_queued(self) -> None:
        """Handle some of what has come: see :func:`in_turn`."""
        self._store.now = time.monotonic()
        self._queued.extend(self._received(self._inbox, QUEUED - len(self._queued)))
        for route, message, payload in in_turn(self._queued, time.monotonic):
            try:
                self._handle(route, message, payload)
            except WireError as error:
                self._refuse(error, route)
            self._send_all()
            if isinstance(message, m.Pull):  # copies were sent before the worker had this answer
                self._queued.extend(self._received(self._inbox, QUEUED - len(self._queued)))
                left = without_copies(self._queued, route, message)
                self._queued.clear()
                self._queued.extend(left)

    def _received(self, socket: Any, most: int) -> Iterator[Request]:
        """Yield messages that have come: the connection, empty for the coordinator's, and more."""
        for _ in range(most):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            route = frames.pop(0).bytes if socket is self._inbox else b""
            try:
                yield (route, *decode([frame.buffer for frame in frames], self._key))
            except WireError as error:
                self._refuse(error, route)

    def _refuse(self, error: WireError, route: bytes) -> None:
        _LOG.warning("a message was refused", extra={"fields": {"error": str(error)}})
        if route and not isinstance(error, UnprovenError):
            self._send(self._inbox, m.Unreadable(str(error)), [], route)

    def _from_coordinator(self, message: Any) -> None:
        self._heard_at = time.monotonic()
        self._job_ended = self._job_ended or isinstance(message, m.JobEnded)
        if isinstance(message, m.MapNews):
            if self._replica is None and message.map.placements:
                self._store = Store(len(message.map.placements))
                self._replica = Replica(self._id, self._store)
            if self._replica is not None:
                self._replica.on_map(message.map, time.monotonic())
                for name in self._peers.keys() - message.map.servers.keys():
                    self._peers.pop(name).close()

    def _handle(self, route: bytes, message: Any, payload: Payload) -> None:
        replica, now = self._replica, time.monotonic()
        if replica is None:
            if isinstance(message, m.Push | m.Pull):
                moved = m.RefusedRequest(message.seq, message.buckets, m.RefusalReason.MOVED, 0)
                self._send(self._inbox, moved, [], route)
            return
        match message:
            case m.Push():
                replica.on_push(route, message, decoded(payload, self._store.dims), now)
            case m.Pull():
                replica.on_pull(route, message, payload)
            case m.Replicate():
                replica.on_replicate(message, payload)
            case m.BucketCopy():
                replica.on_copy(message, payload)
            case m.PartsTaken():
                replica.on_parts_taken(message, now)
            case m.Compare():
                replica.on_compare(message)
            case m.Held():
                replica.on_held(message, now)
            case m.Lacking():
                replica.on_lacking(message, now)
            case _:
                raise WireError(f"a server takes no {type(message).__name__}")

    def _send_all(self) -> None:
        if self._replica is None:
            return
        for one in self._replica.take():
            if isinstance(one.to, bytes):
                self._send(self._inbox, one.message, one.payload, one.to)
                continue
            known = self._replica.map
            address = known.servers.get(one.to) if known is not None else None
            if one.to not in self._peers and address is not None:
                self._peers[one.to] = Line(self._context, address, self._key)
            if one.to in self._peers:
                self._send(self._peers[one.to].socket, one.message, one.payload)

    def _send(self, socket: Any, message: Any, payload: Payload, route: bytes = b"") -> None:
        """Send a message; if it cannot be sent, log a warning and go on.

        It cannot be sent if the receiver is so slow that its queue is full, or if the message is
        too large. Workers ask again for an answer that does not come; a primary and its backup
        compare their states and send what is missing.

        Args:
            socket: The socket.
            message: The message.
            payload: Its arrays.
            route: The connection, if the socket has several.
        """
        try:
            send(socket, message, payload, self._key, route)
        except zmq.Again:
            _LOG.warning("a slow receiver: a message was not sent")
        except ConfigError as error:
            _LOG.warning("a message was not sent", extra={"fields": {"error": str(error)}})


def main(argv: list[str] | None = None) -> int:
    """Run a server until it has given its buckets away, or is killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("access", type=Path, help="the file of the job's servers")
    parser.add_argument("server", help="id of this life of the server")
    given = parser.parse_args(argv)
    signal_at_parents_end(signal.SIGKILL)
    return serve(read_access(given.access), given.server)


def serve(access: JobAccess, name: str, lifeline: int = -1, host: str = "127.0.0.1") -> ExitCode:
    """Run a server until it has given its buckets away, after SIGTERM, or is killed.

    Args:
        access: The job.
        name: Id of this life of the server.
        lifeline: Descriptor of a pipe; the server ends when its other end is closed. -1: none.
        host: The address of this machine that others reach.

    Returns:
        The exit code: ``FAILED`` if rows are left that it was to give away.
    """
    telemetry.setup("ps-server", level=telemetry.wished_level("WARNING"))
    server = ParameterServer(access, name, host)
    if lifeline >= 0:
        server.end_with(lifeline)

    def leave(_number: int, _frame: Any) -> None:
        server.leave()

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started it
    try:
        return ExitCode.OK if server.run() else ExitCode.FAILED
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main())
