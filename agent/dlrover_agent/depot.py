"""The agent's depot: what this node's memory holds, for its workers and for the job's other nodes.

How to wire it (:mod:`dlrover_agent.loop`)::

    depot = Depot(arena.path, job_uid, token, scratch / "depot.sock",
                  candidates=ask_for_candidates, holders=ask_for_holders)
    task = asyncio.create_task(depot.run())     # until it is cancelled; it fails only by a bug
    AgentReport(depot=depot.port, …)            # workers: ENV_DEPOT = the socket's path

The frames are :mod:`dlrover_py.depot`'s. Workers come by a unix socket that only this user can
open, peers by TCP after a mutual challenge: who does not pass it is told nothing but a nonce, with
a proof that only the token's holder can judge. Bytes go from a slot's pages to the socket
(``sendfile``), at the pace of who reads; they never pass through us.
"""

import asyncio
import contextlib
import errno
import hmac
import io
import json
import logging
import re
import resource
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrover_agent.contact import bound
from dlrover_py import arena
from dlrover_py.arena import Slot
from dlrover_py.depot import (
    CONNECT_S,
    NONCE,
    OVERTAKEN,
    REFUSED,
    TROUBLE,
    Candidate,
    Holder,
    dial,
    proof,
)
from dlrover_py.protocol.checkpoint import PAGE, Summary
from dlrover_py.protocol.errors import DLRoverError

log = logging.getLogger("agent.depot")

SHAKE_S = 5.0
"""A peer must have proved itself by then."""
HALF_OPEN = 64
"""Peers that have not proved themselves: one more, and the one that has waited longest goes. Who
has the token needs two round trips, so that a flood has to be that fast to keep it out."""
GUESTS = 1024
"""Connections at once, all in all: fewer where that would be more than half of the descriptors that
we may have, for reports and workers need some too."""
LINE = 4096
"""Longest request, in bytes."""
PIN_S = 30.0
"""No connection keeps a writer from a slot for longer, however often it asks."""
PART = 1 << 24
STALL_S = 60.0
"""Who has not taken a part of the bytes (16 MB) by then is given up."""
IDLE_S = 600.0
"""Who has asked nothing for so long is let go."""
FULL_S = 0.1
"""No more descriptors: so long nobody is let in."""
SAID_S = 60.0
"""Strangers are told of once in so long."""
LARGEST = 1 << 62

_NAME = re.compile(r"(?:peer-)?[0-9]{1,9}\.[0-9]", re.ASCII)
Request = dict[str, Any]


class _Refused(Exception):
    """This request is never answered; the connection ends."""


class _NotNow(Exception):
    """This request is not answered now; the connection stays."""

    def __init__(self, words: str, code: str) -> None:
        super().__init__(words)
        self.code = code


class Depot:
    """Answers until its task is cancelled."""

    def __init__(
        self,
        folder: Path,
        job: str,
        token: str,
        path: Path,
        *,
        candidates: Callable[[int], Awaitable[Sequence[Candidate]]],
        holders: Callable[[int, int, int], Awaitable[Sequence[Holder]]],
        addr: str,
    ) -> None:
        """Take a port and the socket; nobody is answered yet.

        Args:
            folder: the node's arena.
            job: the job's uid; slots of others are not shown.
            token: the job's.
            path: of the unix socket; in a folder that only this user can enter.
            candidates: of a round; asks the master.
            holders: of a step, round and lap; asks the master. Both may raise a DLRoverError, which
                the worker is told.
            addr: at which peers reach it (:func:`dlrover_agent.contact.bound`).

        Raises:
            OSError: there is no such address, or no such folder.
        """
        self._folder, self._job, self._token = folder, job, token
        self._ask_candidates, self._ask_holders = candidates, holders
        self._peers = bound(addr, 0, socket.SOCK_STREAM)
        self._peers.listen(1024)
        self.port = int(self._peers.getsockname()[1])
        """For peers."""
        self._where = f"{addr}:{self.port}"
        self._path = path
        self._workers = socket.socket(socket.AF_UNIX)
        try:
            self._workers.bind(str(path))
            path.chmod(0o600)
            self._workers.listen(1024)
        except OSError:
            self._peers.close()
            self._workers.close()
            raise
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # it is the workers' as well
        self._guests = min(GUESTS, soft // 2)
        self._tasks: set[asyncio.Task[None]] = set()
        self._half_open: dict[asyncio.Task[None], None] = {}
        self._said_at = -SAID_S
        self._not_said = 0

    async def run(self) -> None:
        """Answer, until cancelled; then all connections end."""
        loop = asyncio.get_running_loop()
        for listening in (self._peers, self._workers):
            listening.setblocking(False)
            loop.add_reader(listening, self._accept, listening)
        try:
            await loop.create_future()  # for ever
        finally:
            for listening in (self._peers, self._workers):
                loop.remove_reader(listening)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._close()

    def _close(self) -> None:
        self._peers.close()
        self._workers.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self, listening: socket.socket) -> None:
        """Somebody has connected; not awaited, for what has been accepted could be lost in that."""
        loop = asyncio.get_running_loop()
        try:
            stream, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.warning("depot_full", extra={"why": str(error)})
                loop.remove_reader(listening)
                loop.call_later(FULL_S, self._again, listening)
            return  # else it has gone again
        peers = listening is self._peers
        if len(self._tasks) >= self._guests:
            stream.close()
            return
        task = asyncio.create_task(self._serve(_Guest(stream), peers=peers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Not by the task itself: one that is cancelled before it began does nothing.
        task.add_done_callback(lambda _, stream=stream: stream.close())  # type: ignore[misc]
        if peers:
            if len(self._half_open) >= HALF_OPEN:
                oldest = next(iter(self._half_open))
                del self._half_open[oldest]
                oldest.cancel()
            self._half_open[task] = None
            task.add_done_callback(lambda ended: self._half_open.pop(ended, None))

    def _again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _serve(self, guest: "_Guest", *, peers: bool) -> None:
        """One connection, from its first line to its last."""
        try:
            if peers:
                try:
                    async with asyncio.timeout(SHAKE_S):
                        await self._shake(guest)
                except _Refused as refusal:
                    self._say(guest.name, str(refusal))
                    return  # no word to a stranger: not even who it is that does not answer
                task = asyncio.current_task()
                assert task is not None
                self._half_open.pop(task, None)
            while (request := await guest.request()) is not None:
                try:
                    await self._answer(guest, request, peers=peers)
                except _NotNow as trouble:
                    await guest.say({"error": str(trouble), "code": trouble.code})
        except _Refused as refusal:
            with contextlib.suppress(OSError, TimeoutError):
                await guest.say({"error": str(refusal), "code": REFUSED})
        except (OSError, TimeoutError) as error:
            log.debug("depot_guest_gone", extra={"guest": guest.name, "why": str(error)})

    async def _shake(self, guest: "_Guest") -> None:
        """The peer proves that it has the token, and only who has it sees our proof accepted."""
        hello = await guest.request() or {}
        try:
            asked = bytes.fromhex(_text(hello, "hello", 2 * NONCE))
        except ValueError as error:
            raise _Refused("expected a hello with a nonce") from error
        if len(asked) != NONCE:
            raise _Refused(f"expected a nonce of {NONCE} bytes")
        answered = secrets.token_bytes(NONCE)
        ours = proof(self._token, "server", self._where, asked, answered)
        await guest.say({"nonce": answered.hex(), "proof": ours})
        given = _text(await guest.request() or {}, "proof", 2 * NONCE)
        right = proof(self._token, "client", self._where, asked, answered)
        if not hmac.compare_digest(given.encode(errors="replace"), right.encode()):
            raise _Refused("this is the depot of a job with another token, or another was meant")
        await guest.say({"ok": True})

    async def _answer(self, guest: "_Guest", request: Request, *, peers: bool) -> None:
        match request.get("op"):
            case "list":
                await guest.say_with(self._list())
            case "get":
                await self._get(guest, request)
            case "copied" if peers:
                which = [_count(request, key) for key in ("step", "round", "lap")]
                await guest.say({"ok": self._copied(*which)})
            case "candidates" if not peers:
                found = await self._asked(self._ask_candidates(_count(request, "round")))
                await guest.say({"candidates": found})
            case "holders" if not peers:
                which = [_count(request, key) for key in ("step", "round", "lap")]
                await guest.say({"holders": await self._asked(self._ask_holders(*which))})
            case "connect" if not peers:
                await self._connect(guest, request)
            case _:
                raise _Refused("no such request is answered here")

    async def _asked(self, answer: Awaitable[Sequence[tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
        try:
            return list(await answer)
        except DLRoverError as error:
            raise _NotNow(str(error), TROUBLE) from error

    def _list(self) -> bytes:
        rows = (
            f'["{path.name}",'.encode() + summary.encode() + b"]"
            for path, summary in arena.scan(self._folder)
            if _NAME.fullmatch(path.name) and summary.job == self._job
        )
        return b"[" + b",".join(rows) + b"]"

    def _copied(self, step: int, round_: int, lap: int) -> bool:
        """A peer has all of this set: it is noted in the slots, where workers see it."""
        done = True
        for path, summary in arena.scan(self._folder):
            if summary.id != (step, round_, lap) or summary.copied or summary.job != self._job:
                continue
            if path.name.startswith("peer-"):
                continue
            try:
                with Slot(path, write=True) as slot:
                    done = slot.amend(summary, replace(summary, copied=True)) and done
            except OSError:
                done = False
        return done

    async def _get(self, guest: "_Guest", request: Request) -> None:
        name, fill = _text(request, "name", 16), _text(request, "fill", 64)
        at, nbytes = _count(request, "at"), _count(request, "nbytes")
        if not _NAME.fullmatch(name):
            raise _Refused("expected the name of a slot")
        try:
            slot = Slot(self._folder / name)
        except OSError as error:
            raise _NotNow(f"{name}: there is no such slot", OVERTAKEN) from error
        with slot:
            pins = bool(request.get("pin")) and guest.may_pin(name, fill)
            if pins and not slot.lock(shared=True):
                raise _NotNow(f"{name}: it is being filled", OVERTAKEN)
            found = self._holds(slot, fill)
            if found is None:
                raise _NotNow(f"{name}: it holds another checkpoint by now", OVERTAKEN)
            if at + nbytes > found.size:
                raise _Refused(f"{name} has {found.size} bytes: {at} + {nbytes} is beyond them")
            if found.hollow and nbytes and at < found.private_at and at + nbytes > PAGE:
                raise _Refused(f"{name} is hollow: what is before {found.private_at} is elsewhere")
            unpin = asyncio.get_running_loop().call_later(guest.pin_s(), slot.unlock)
            try:
                await guest.send(slot.fd, at, nbytes)
            finally:
                unpin.cancel()
            await guest.say({"stands": self._holds(slot, fill) is not None})

    def _holds(self, slot: Slot, fill: str) -> Summary | None:
        found = slot.summary()
        return found if found is not None and (found.job, found.fill) == (self._job, fill) else None

    async def _connect(self, guest: "_Guest", request: Request) -> None:
        addr, port = _text(request, "addr", 253), _count(request, "port")
        if not (addr and 0 < port < 1 << 16):
            raise _Refused("expected an address and a port")
        try:
            link = await asyncio.to_thread(dial, addr, port, self._token, deadline_s=CONNECT_S)
        except DLRoverError as error:
            raise _NotNow(str(error), TROUBLE) from error
        try:
            guest.hand_over(link.fileno())
        finally:
            link.close()

    def _say(self, name: str, why: str) -> None:
        """Strangers may be many."""
        self._not_said += 1
        if time.monotonic() - self._said_at < SAID_S:
            return
        log.warning("depot_refused", extra={"who": name, "why": why, "times": self._not_said})
        self._said_at, self._not_said = time.monotonic(), 0


class _Guest:
    """A connection; nothing is awaited on it without a deadline."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self._stream = stream
        self._rest = b""
        self._pinned, self._pinned_at = ("", ""), 0.0
        self.name = "a worker"
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                self.name = str(stream.getpeername()[0])

    async def request(self) -> Request | None:
        """The next line, decoded; None at the end."""
        loop = asyncio.get_running_loop()
        while (end := self._rest.find(b"\n")) < 0:
            if len(self._rest) > LINE:
                raise _Refused(f"expected a line of at most {LINE} bytes")
            async with asyncio.timeout(IDLE_S):
                data = await loop.sock_recv(self._stream, LINE)
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest[:end], self._rest[end + 1 :]
        try:
            request = json.loads(line) if len(line) <= LINE else None
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            raise _Refused(f"expected a JSON object in a line of at most {LINE} bytes")
        return request

    async def say(self, words: Request) -> None:
        await self._write(json.dumps(words, separators=(",", ":")).encode() + b"\n")

    async def say_with(self, body: bytes) -> None:
        await self._write(b'{"nbytes":%d}\n' % len(body) + body)

    async def send(self, fd: int, at: int, nbytes: int) -> None:
        """A range of a file, with the line before it."""
        await self._write(b'{"nbytes":%d}\n' % nbytes)
        loop = asyncio.get_running_loop()
        with io.FileIO(fd, "rb", closefd=False) as file:
            while nbytes:
                async with asyncio.timeout(STALL_S):
                    sent = await loop.sock_sendfile(self._stream, file, at, min(PART, nbytes))
                if not sent:
                    raise OSError(errno.EIO, "the slot has become shorter")
                at, nbytes = at + sent, nbytes - sent

    def may_pin(self, name: str, fill: str) -> bool:
        """Whether its time to keep this filling from being overtaken is not over."""
        if self._pinned != (name, fill):
            self._pinned, self._pinned_at = (name, fill), time.monotonic()
        return self.pin_s() > 0

    def pin_s(self) -> float:
        """What is left of that time."""
        return self._pinned_at + PIN_S - time.monotonic()

    def hand_over(self, fd: int) -> None:
        """Give the guest a descriptor; a line this short finds room where it waits for it."""
        socket.send_fds(self._stream, [b'{"ok":true}\n'], [fd])

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(STALL_S):
            await asyncio.get_running_loop().sock_sendall(self._stream, data)


def _text(request: Request, key: str, longest: int) -> str:
    value = request.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise _Refused(f"{key}: expected at most {longest} characters")
    return value


def _count(request: Request, key: str) -> int:
    value = request.get(key)
    if type(value) is not int or not 0 <= value < LARGEST:
        raise _Refused(f"{key}: expected a number of at least 0")
    return value
