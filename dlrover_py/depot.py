"""Client of an agent's depot: whose memory holds which checkpoint, and its bytes.

A worker asks its own agent at a unix socket (:meth:`Link.local`), which knows the master and the
job's token; to a peer's depot it gets a connection that its agent has opened and vouched for
(:meth:`Link.connect`), so that no script ever holds the token. An agent dials for itself
(:func:`dial`).

Frames: a request is one line of JSON, ``{"op": …}``. A reply is one line of JSON, and then as many
raw bytes as its ``nbytes`` says; after those of a ``get`` one more line, the trailer, says whether
the filling that was asked for still ``stands``. A refusal is ``{"error": words, "code": …}``.

Bytes come by ``sendfile``: what is on its way are the slot's own pages, and a writer that overtakes
changes them even then. So the trailer tells an overtaken slot early and in words; that bytes are
right is known by their XXH3 alone, which the reader compares (``Contents.digests``).

Blocking sockets with the kernel's timeouts: a ``MSG_WAITALL`` goes straight into the target.
"""

import contextlib
import hmac
import json
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from dlrover_py import arena
from dlrover_py.arena import Contents, Damaged
from dlrover_py.owner import is_own_socket
from dlrover_py.protocol.checkpoint import Region, Summary
from dlrover_py.protocol.errors import (
    CheckpointError,
    TransientError,
    Unauthorized,
    Unreachable,
)

CONNECT_S = 3.0
QUIET_S = 30.0
"""Who has sent nothing for so long is given up."""
ASKED_S = 75.0
"""For an answer that the agent itself has to wait for: the master's, once all have reported."""
LINE = 1 << 16
"""Longest line of a reply, in bytes."""
LIST = 1 << 24
"""Longest list of slots: some thousands of them."""
PART = 1 << 24
"""Of a table, asked for at once."""
CHUNK = 1 << 20
"""Bytes that are read at once, and told of: what is told of is still in the cache."""
BATCH = 1 << 20
"""The reader of many bytes is woken for so many, not for each packet."""
AHEAD = 8
"""Requests that are under way on one connection."""
NONCE = 32
OVERTAKEN, REFUSED, TROUBLE = "overtaken", "refused", "trouble"
"""Codes of a refusal: the slot holds another filling; it would never be answered; try again."""


class Overtaken(Damaged):
    """The slot holds a newer filling than the one that was asked for."""


class Candidate(NamedTuple):
    """A checkpoint that is whole in the memory of living nodes."""

    step: int
    round: int
    lap: int
    world: int


class Holder(NamedTuple):
    """Where a rank's part of a checkpoint is."""

    rank: int
    node: str
    addr: str
    port: int
    part: str
    hollow: bool
    """Only what is this rank's alone is there."""


def proof(token: str, side: str, where: str, asked: bytes, answered: bytes) -> str:
    """That one knows the token, told to who has drawn one of the nonces.

    Args:
        token: of the job.
        side: ``client`` or ``server``: what one side says proves nothing of the other.
        where: the depot that the client means, and that the server is, ``addr:port`` as its agent
            offers it: who has come to have the address of another one's depot cannot hand the
            words on to a third.
        asked, answered: nonces of the client and of the server.
    """
    words = b"dlrover depot 2 " + f"{side}\0{where}\0".encode() + asked + answered
    return hmac.new(token.encode(), words, "sha256").hexdigest()


def dial(addr: str, port: int, token: str, *, deadline_s: float = CONNECT_S) -> "Link":
    """Connect to a peer's depot; each side proves to the other that it has the job's token.

    Raises:
        Unreachable: nobody answered.
        Unauthorized: it has another token than we have, or is no depot.
    """
    meant = f"{addr}:{port}"
    where = f"depot at {meant}"
    try:
        stream = socket.create_connection((addr, port), timeout=deadline_s)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"{where}: {_words(error, deadline_s)}") from error
    link = Link(stream, where, quiet_s=deadline_s)
    try:
        asked = secrets.token_bytes(NONCE)
        try:
            answer = link.say({"hello": asked.hex()})
            answered = bytes.fromhex(answer["nonce"])
            right = hmac.compare_digest(
                str(answer["proof"]).encode(),
                proof(token, "server", meant, asked, answered).encode(),
            )
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            raise Unauthorized(f"{where}: what answers is no depot: {error}") from error
        if not right or len(answered) != NONCE:
            raise Unauthorized(f"{where}: it has another token than this job's, or is another's")
        try:
            link.say({"proof": proof(token, "client", meant, asked, answered)})
        except CheckpointError as error:
            raise Unauthorized(str(error)) from error
        link.wait_at_most(QUIET_S)
    except BaseException:
        link.close()
        raise
    return link


class Link:
    """A connection to a depot; one thread at a time."""

    def __init__(self, stream: socket.socket, where: str, *, quiet_s: float = QUIET_S) -> None:
        """Take a connected stream socket over.

        Args:
            stream: authenticated, if it is to a peer.
            where: how errors call the other side.
            quiet_s: it is given up when nothing comes for so long.
        """
        stream.settimeout(None)
        self._stream, self.where = stream, where
        self._rest = b""
        """What has come behind the line that was last read."""
        self.wait_at_most(quiet_s)

    @classmethod
    def local(cls, path: str | Path, *, quiet_s: float = ASKED_S) -> Self:
        """Connect to the own agent.

        Args:
            path: its unix socket (``ENV_DEPOT``).
            quiet_s: as above.

        Raises:
            Unreachable: it does not listen.
        """
        where = f"the agent's depot at {path}"
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.settimeout(CONNECT_S)
            stream.connect(str(path))
        except OSError as error:
            stream.close()
            raise Unreachable(f"{where}: {_words(error, CONNECT_S)}") from error
        if not is_own_socket(path):
            stream.close()
            raise Unreachable(f"{where}: it belongs to another user")
        return cls(stream, where, quiet_s=quiet_s)

    def wait_at_most(self, quiet_s: float) -> None:
        """Give the other side up when nothing comes for so long."""
        self._quiet_s = quiet_s
        whole, part = divmod(quiet_s, 1)
        timeout = struct.pack("@ll", int(whole), int(part * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._stream.setsockopt(socket.SOL_SOCKET, option, timeout)

    def candidates(self, round: int) -> list[Candidate]:
        """Checkpoints that all nodes of the round together hold whole, newest first.

        The agent asks the master, which answers once all of them have looked at their memory.

        Raises:
            TransientError: the master is away, or not all have answered yet; ask again.
        """
        answer = self.say({"op": "candidates", "round": round})
        with self._understood():
            return [Candidate(*map(int, row)) for row in answer["candidates"]]

    def holders(self, step: int, round: int, lap: int) -> list[Holder]:
        """Which nodes have what of a checkpoint in memory, by rank.

        Raises:
            TransientError: the master is away; ask again.
        """
        answer = self.say({"op": "holders", "step": step, "round": round, "lap": lap})
        with self._understood():
            return [Holder(*row) for row in answer["holders"]]

    def connect(self, addr: str, port: int) -> "Link":
        """A connection to a peer's depot, which the agent has opened and proved itself on.

        Raises:
            TransientError: the peer does not answer, or has another token.
        """
        self._send({"op": "connect", "addr": addr, "port": port})
        line, passed = b"", []
        try:
            while not line.endswith(b"\n"):
                with self._told():
                    data, some, _, _ = socket.recv_fds(
                        self._stream, LINE, 1, socket.MSG_CMSG_CLOEXEC
                    )
                passed += some
                line += data
                if not data or len(line) > LINE:
                    raise Unreachable(f"{self.where}: it closed the connection")
            self._understand(line)
            if not passed:
                raise CheckpointError(f"{self.where}: it handed no connection over")
            return Link(socket.socket(fileno=passed.pop()), f"depot at {addr}:{port}")
        finally:
            for number in passed:
                socket.close(number)

    def slots(self) -> list[tuple[str, Summary]]:
        """All that is whole there, of this job.

        Raises:
            CheckpointError: another version of dlrover-py answers.
        """
        answer = self.say({"op": "list"})
        with self._understood():
            nbytes = int(answer["nbytes"])
        if not 0 <= nbytes <= LIST:
            raise CheckpointError(f"{self.where}: a list of {nbytes} bytes is none of slots")
        body = bytearray(nbytes)
        self._take(memoryview(body))
        with self._understood():
            return [
                (str(name), Summary.decode(json.dumps(words).encode()))
                for name, words in json.loads(body)
            ]

    def contents(self, name: str, fill: str) -> Contents:
        """The tables of a slot.

        Raises:
            Damaged: that filling is not there any more, or its bytes are wrong.
        """
        found = dict(self.slots()).get(name)
        if found is None or found.fill != fill:
            raise Overtaken(f"{name} of {self.where}: it holds another checkpoint by now")
        return arena.contents(_Remote(self, name, found))

    def read_into(
        self,
        name: str,
        fill: str,
        position: int,
        target: memoryview,
        *,
        pin: bool = False,
        arrived: Callable[[int], None] | None = None,
    ) -> None:
        """Read bytes of a slot straight into memory.

        Whoever needs to know that they are right compares their XXH3 with ``Contents.digests``.

        Args:
            name, fill: of the slot.
            position: where they begin in it.
            target: as many as are wanted; writable, contiguous.
            pin: no writer may take the slot meanwhile, for half a minute at most.
            arrived: called with how many bytes have come, after each chunk.

        Raises:
            Overtaken: by a newer filling of the slot; what has come is of no use. It is a Damaged.
            TransientError: the connection broke; it is of no use any more.
        """
        for _ in self.read_all(name, fill, [(position, target)], pin=pin, arrived=arrived):
            pass

    def read_all(
        self,
        name: str,
        fill: str,
        wanted: Iterable[tuple[int, memoryview]],
        *,
        pin: bool = False,
        arrived: Callable[[int], None] | None = None,
    ) -> Iterator[memoryview]:
        """Read many ranges, without waiting for one before the next is asked for.

        Args:
            name, fill, pin, arrived: as for :meth:`read_into`.
            wanted: positions and targets.

        Yields:
            Each target once it is filled, in order. Who stops early closes the link.

        Raises:
            Overtaken, TransientError: as above.
        """
        under_way: deque[memoryview] = deque()
        source = iter(wanted)
        failed: Damaged | None = None
        while True:
            while failed is None and len(under_way) < AHEAD:
                following = next(source, None)
                if following is None:
                    break
                position, target = following
                target = target.cast("B")
                under_way.append(target)
                ask: dict[str, object] = {"op": "get", "name": name, "fill": fill}
                self._send({**ask, "at": position, "nbytes": len(target), "pin": pin})
            if not under_way:
                break
            target = under_way.popleft()
            try:
                self._get(name, target, arrived)
            except Damaged as error:  # the answers to the others still come
                failed = failed or error
                continue
            if failed is None:
                yield target
        if failed is not None:
            raise failed

    def say(self, request: dict[str, object]) -> dict[str, Any]:
        """Send a request; give the line that answers it.

        Raises:
            Damaged, CheckpointError, TransientError: by the code of the refusal.
            Unreachable: the connection broke, or nothing came in time.
        """
        self._send(request)
        return self._understand(self._line())

    def fileno(self) -> int:
        """Its descriptor, to hand it over."""
        return self._stream.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def abandon(self) -> None:
        """Break the connection off, from any thread: who waits on it is told at once."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get(self, name: str, target: memoryview, arrived: Callable[[int], None] | None) -> None:
        told = self._understand(self._line()).get("nbytes")
        if told != len(target):
            self.abandon()  # what follows cannot be told apart
            raise CheckpointError(
                f"{self.where}: {told} bytes of {len(target)} that were asked for"
            )
        self._take(target, arrived)
        if self._understand(self._line()).get("stands") is not True:
            raise Overtaken(f"{name} of {self.where}: filled anew while it was read")

    def _send(self, request: dict[str, object]) -> None:
        with self._told():
            self._stream.sendall(json.dumps(request, separators=(",", ":")).encode() + b"\n")

    def _line(self) -> bytes:
        while (end := self._rest.find(b"\n")) < 0:
            if len(self._rest) > LINE:
                self.abandon()
                raise CheckpointError(f"{self.where}: what answers is no depot")
            with self._told():
                data = self._stream.recv(4096)  # few: what is behind the line is copied once more
            if not data:
                raise Unreachable(f"{self.where}: it closed the connection")
            self._rest += data
        line, self._rest = self._rest[:end], self._rest[end + 1 :]
        return line

    def _take(self, target: memoryview, arrived: Callable[[int], None] | None = None) -> None:
        """Fill the target with what comes next."""
        have = min(len(self._rest), len(target))
        target[:have] = self._rest[:have]
        self._rest = self._rest[have:]
        if have and arrived is not None:
            arrived(have)
        batch = 1
        while have < len(target):
            part = target[have : have + CHUNK]
            # Not for the last ones: who is to be woken by bytes that never come sleeps on.
            if (wanted := BATCH if len(target) - have >= CHUNK + BATCH else 1) != batch:
                batch = wanted
                self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, batch)
            with self._told():
                came = self._stream.recv_into(part, len(part), socket.MSG_WAITALL)
            if not came:
                raise Unreachable(f"{self.where}: it closed the connection")
            have += came
            if arrived is not None:
                arrived(came)
        if batch != 1:
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _understand(self, line: bytes) -> dict[str, Any]:
        try:
            words = json.loads(line)
        except (ValueError, RecursionError):
            words = None
        if not isinstance(words, dict):
            raise CheckpointError(f"{self.where}: what answers is no depot")
        if "error" in words:
            text, code = f"{self.where}: {words['error']}", words.get("code")
            if code == OVERTAKEN:
                raise Overtaken(text)
            raise TransientError(text) if code == TROUBLE else CheckpointError(text)
        return words

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Take an answer apart that is JSON, and may be another version's."""
        try:
            yield
        except (LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
            words = f"{self.where}: its answer is not understood: {error}"
            raise CheckpointError(f"{words}; run one version of dlrover-py on all nodes") from error

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Say what the kernel says in our words."""
        try:
            yield
        except OSError as error:
            raise Unreachable(f"{self.where}: {_words(error, self._quiet_s)}") from error


class _Remote:
    """A slot that is elsewhere, as :func:`arena.contents` reads it."""

    def __init__(self, link: Link, name: str, summary: Summary) -> None:
        self._link, self._name, self._summary = link, name, summary
        self.path = f"{name} of {link.where}"

    def summary(self) -> Summary:
        return self._summary

    def region(self, region: Region) -> bytes:
        data = b""
        while len(data) < region.nbytes:  # memory is taken for what has come, not for what is said
            part = bytearray(min(PART, region.nbytes - len(data)))
            at = region.at + len(data)
            self._link.read_into(self._name, self._summary.fill, at, memoryview(part))
            data += part
        if arena.digest(data) != region.xxh3:
            words = f"the bytes at {region.at} are not those that were written"
            raise Damaged(f"{self.path}: {words}")
        return data


def _words(error: Exception, limit_s: float) -> str:
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return f"nothing came within {limit_s:g} s"
    return str(error) or type(error).__name__
