"""The transfer server of an agent, which serves the checkpoints in this node's memory.

Its clients are the workers of this node and the agents of the job's other nodes.

Example (as :mod:`dlrover_agent.checkpoint.saver` uses it)::

    server = TransferServer(pool.path, job_uid, token, scratch / "slots.sock",
                            lookup=master, addr=addr)
    task = asyncio.create_task(server.run())    # runs until it is cancelled; fails only by a bug
    AgentReport(transfer_port=server.port, …)    # workers: ENV_TRANSFER_SOCKET = the socket's path

The messages are those of :mod:`dlrover_py.protocol.transfer`. Workers connect to a unix socket that
only this user can open. Peers connect by TCP and must pass a mutual challenge. Before that, a peer
gets only a nonce, with a proof that only an owner of the token can check. Bytes go directly from a
slot's pages to the socket (``sendfile``), at the pace of the reader, and are never copied into
this process.

A slot is a file in shared memory with one worker's checkpoint. It gets a new write id each time it
is filled. A client may pin a slot: the server then holds a lock that keeps writers away.
"""

import asyncio
import contextlib
import errno
import hmac
import io
import logging
import re
import resource
import secrets
import socket
import time
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import TypeAdapter

from dlrover_agent.channels.peer_probe import bind_socket
from dlrover_agent.worker_socket import WorkerSocket
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.checkpoint.transfer import CONNECT_S, connect_to_peer, proof
from dlrover_py.protocol.agents import ReplicaLocations, RestoreCandidates, Wire
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.documents import read
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.slots import PAGE, SlotHeader
from dlrover_py.protocol.transfer import (
    NONCE,
    VERSION,
    BytesRequest,
    CandidatesRequest,
    ConnectRequest,
    CopiedRequest,
    LocationsRequest,
    RefusalCode,
    SlotsRequest,
    TransferChallenge,
    TransferHello,
    TransferMessage,
    TransferProof,
    TransferReply,
    read_request,
)
from dlrover_py.protocol.versions import other_version

log = logging.getLogger("agent.transfer")

MAX_HALF_OPEN = 64
"""Most connections of peers that have not passed the challenge yet.

A further one closes the oldest of them. An owner of the token needs two round trips to pass, so a
flood of connections must be that fast to keep it out."""
MAX_CLIENTS = 1024
"""Most connections at the same time, of workers and peers.

At most half of the process's file descriptors are used, because reports and workers need some
too."""
MAX_LINE = 4096
"""Longest request, in bytes."""
SEND_BYTES = 1 << 24
"""Bytes that are sent under one timeout (16 MB)."""
ACCEPT_PAUSE_S = 0.1
"""Seconds without new connections after the process has run out of file descriptors."""
LOG_INTERVAL_S = 60.0
"""Least seconds between two log lines about refused peers."""

_NAME = re.compile(r"(?:peer-)?[0-9]{1,9}\.[0-9]", re.ASCII)
T = TypeVar("T", bound=TransferMessage)


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """The time limits of a transfer server for its clients, in seconds."""

    challenge_timeout_s: float = 5.0
    """Limit for a peer to pass the challenge."""
    pin_limit_s: float = 30.0
    """Longest time that a connection may keep a writer from a slot, even with repeated requests."""
    read_timeout_s: float = 60.0
    """Limit for a client to read a part of ``SEND_BYTES`` bytes, or a whole other answer."""
    idle_timeout_s: float = 600.0
    """Time without a request after which a connection is closed."""


class _RequestRefusedError(Exception):
    """The request is refused, and the connection is closed."""


class _RetryLaterError(Exception):
    """The request cannot be answered now; the connection stays open."""

    def __init__(self, message: str, code: RefusalCode) -> None:
        super().__init__(message)
        self.code = code


class CheckpointLookup(Protocol):
    """What the master knows of the job's checkpoints in memory, for the workers of this node.

    A method may raise a DLRoverError, which the worker then gets.
    """

    def candidates(self, round_number: int, /) -> Awaitable[RestoreCandidates]:
        """Return the checkpoints that the nodes of a round could restore from."""

    def locations(self, checkpoint: CheckpointId, /) -> Awaitable[ReplicaLocations]:
        """Return the replica locations of a checkpoint, by rank."""


class TransferServer(WorkerSocket):
    """A server for the checkpoints in this node's memory, until its task is cancelled."""

    _BACKLOG = 1024

    def __init__(
        self, folder: Path, job: str, token: str, path: Path, *, lookup: CheckpointLookup, addr: str
    ) -> None:
        """Bind the TCP port and the unix socket; requests are not answered yet.

        Args:
            folder: Folder of the node's shared-memory pool.
            job: Unique id of the job. Slots of other jobs are hidden.
            token: Token of the job.
            path: Path of the unix socket, in a folder that only this user can enter.
            lookup: What the master knows of the job's checkpoints.
            addr: Address at which peers reach this node
                (:func:`dlrover_agent.channels.peer_probe.bind_socket`).

        Raises:
            OSError: The address or the socket's folder does not exist, or the socket's path is too
                long or in use.
        """
        self._folder, self._job, self._token = folder, job, token
        self._lookup = lookup
        self._peer_socket = bind_socket(addr, 0, socket.SOCK_STREAM)
        self._peer_socket.listen(self._BACKLOG)
        self.port = int(self._peer_socket.getsockname()[1])
        """TCP port for peers."""
        self._address = f"{addr}:{self.port}"
        try:
            super().__init__(path)
        except OSError:
            self._peer_socket.close()
            raise
        # The limit is read and not raised, because workers inherit it.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_clients = min(MAX_CLIENTS, soft // 2)
        self._timing = TransferTiming()
        self._tasks: set[asyncio.Task[None]] = set()
        self._half_open: dict[asyncio.Task[None], None] = {}
        """Connections of peers that have not passed the challenge, the oldest first."""
        self._logged_at = -LOG_INTERVAL_S
        self._unlogged = 0

    def _read_from(self, bound: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(bound, self._accept, bound)

    async def run(self, timing: TransferTiming | None = None) -> None:
        """Answer requests until cancelled, then close all connections and remove the unix socket.

        Args:
            timing: Time limits for clients; None for the defaults.
        """
        self._timing = timing or TransferTiming()
        loop = asyncio.get_running_loop()
        for listening in (self._peer_socket, self._socket):
            listening.setblocking(False)
            loop.add_reader(listening, self._accept, listening)
        try:
            await loop.create_future()  # waits until this task is cancelled
        finally:
            for listening in (self._peer_socket, self._socket):
                loop.remove_reader(listening)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._close()

    def _close(self) -> None:
        self._peer_socket.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self, listening: socket.socket) -> None:
        """Accept a connection, and start the task that serves it.

        A connection over the limit is closed without an answer. If the process has no more file
        descriptors or memory, a warning is logged and no connection is accepted for
        ``ACCEPT_PAUSE_S``. This is no coroutine, because a cancelled one could lose an accepted
        socket.
        """
        loop = asyncio.get_running_loop()
        try:
            stream, _ = listening.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.warning("transfer_server_full", extra={"why": str(error)})
                loop.remove_reader(listening)
                loop.call_later(ACCEPT_PAUSE_S, self._resume_accept, listening)
            return  # after another error, the client has already gone
        is_peer = listening is self._peer_socket
        if len(self._tasks) >= self._max_clients:
            stream.close()
            return
        task = asyncio.create_task(
            self._serve(_ClientConnection(stream, self._timing), is_peer=is_peer)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # The task cannot close the stream itself, because a task that is cancelled before it began
        # does not run at all.
        task.add_done_callback(lambda _, stream=stream: stream.close())  # type: ignore[misc]
        if is_peer:
            if len(self._half_open) >= MAX_HALF_OPEN:
                oldest = next(iter(self._half_open))
                del self._half_open[oldest]
                oldest.cancel()
            self._half_open[task] = None
            task.add_done_callback(lambda ended: self._half_open.pop(ended, None))

    def _resume_accept(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    async def _serve(self, client: "_ClientConnection", *, is_peer: bool) -> None:
        """Serve one connection until its end; a peer must pass the challenge first.

        A peer that fails the challenge gets no answer. A refused request gets an error and ends the
        connection, and one that may be repeated gets an error only. A timeout ends the connection
        without an answer.
        """
        try:
            if is_peer:
                try:
                    async with asyncio.timeout(self._timing.challenge_timeout_s):
                        await self._authenticate(client)
                except _RequestRefusedError as refusal:
                    self._log_refused(client.name, str(refusal))
                    return  # the peer gets no answer, not even a refusal
                task = asyncio.current_task()
                assert task is not None
                self._half_open.pop(task, None)
            while (line := await client.line()) is not None:
                try:
                    await self._answer(client, line, is_peer=is_peer)
                except _RetryLaterError as error:
                    await client.say(TransferReply(error=str(error), code=error.code))
        except _RequestRefusedError as refusal:
            with contextlib.suppress(OSError, TimeoutError):
                await client.say(TransferReply(error=str(refusal), code=RefusalCode.REFUSED))
        except (OSError, TimeoutError) as error:
            log.debug("transfer_client_gone", extra={"client": client.name, "why": str(error)})

    async def _authenticate(self, client: "_ClientConnection") -> None:
        """Challenge a peer: both sides must prove that they have the token.

        The server's proof is sent first, even to a peer of another version.

        Raises:
            _RequestRefusedError: The peer has another version or token, or means another server.
        """
        hello = await client.message(_HELLO)
        client_nonce = bytes.fromhex(hello.hello)
        server_nonce = secrets.token_bytes(NONCE)
        own_proof = proof(self._token, "server", self._address, client_nonce, server_nonce)
        await client.say(TransferChallenge(nonce=server_nonce.hex(), proof=own_proof))
        if hello.version != VERSION:  # the client names both versions, too
            raise _RequestRefusedError(other_version("it", hello.version, VERSION))
        client_proof = (await client.message(_PROOF)).proof
        expected = proof(self._token, "client", self._address, client_nonce, server_nonce)
        if not hmac.compare_digest(client_proof, expected):
            raise _RequestRefusedError(
                "expected a proof with this job's token for this server, found another proof"
            )
        await client.say(TransferReply())

    async def _answer(self, client: "_ClientConnection", line: bytes, *, is_peer: bool) -> None:
        """Answer a request. A refusal is only raised; the caller sends it.

        Args:
            client: Connection of the client.
            line: The request.
            is_peer: Whether the client is a peer, which may not make all requests of a worker.

        Raises:
            _RequestRefusedError: The request is invalid, or not for this client.
            _RetryLaterError: The request cannot be answered now.
            OSError: The client has gone.
            TimeoutError: The client has not read the answer in time.
        """
        try:
            request = read_request(line)
        except ValueError as error:
            raise _RequestRefusedError(f"expected a request of this protocol: {error}") from error
        match request:
            case SlotsRequest():
                await client.send_body(self._list())
            case BytesRequest():
                await self._send_bytes(client, request)
            case CopiedRequest() if is_peer:
                self._mark_copied(request.id)
                await client.say(TransferReply())
            case CandidatesRequest() if not is_peer:
                await client.send_body(await _master_answer(self._lookup.candidates(request.round)))
            case LocationsRequest() if not is_peer:
                await client.send_body(await _master_answer(self._lookup.locations(request.id)))
            case ConnectRequest() if not is_peer:
                await self._connect(client, request)
            case _:
                raise _RequestRefusedError(
                    f"expected a request for this socket, found {type(request).__name__}"
                )

    def _list(self) -> bytes:
        """Return the names and headers of the job's slots, as JSON, with replicas of a peer.

        Slots that are being filled, and those of other jobs, are left out.
        """
        rows = (
            f'["{path.name}",'.encode() + header.encode() + b"]"
            for path, header in shm.scan(self._folder)
            if _NAME.fullmatch(path.name) and header.job == self._job
        )
        return b"[" + b",".join(rows) + b"]"

    def _mark_copied(self, checkpoint: CheckpointId) -> None:
        """Set the ``copied`` flag in the slots of a checkpoint, because a peer has a complete copy.

        Workers read the flag. A slot that cannot be changed now is skipped without an error. The
        peer repeats its message until it finds the flag in the list of slots.
        """
        for path, header in shm.scan(self._folder):
            if header.id != checkpoint or header.copied or header.job != self._job:
                continue
            if path.name.startswith("peer-"):
                continue
            with contextlib.suppress(OSError), ShmSlot(path, write=True) as slot:
                slot.update_header(header, replace(header, copied=True))

    async def _send_bytes(self, client: "_ClientConnection", request: BytesRequest) -> None:
        """Send a range of a slot, and whether the slot still has the same content after it.

        If the request pins the slot, writers are kept from it meanwhile, for at most
        ``pin_limit_s``. The lock may end before the last byte is sent. A client that has used up
        this time for the content gets the bytes without a lock.

        Raises:
            _RetryLaterError: There is no such slot, it is being filled, or it has another content
                now.
            _RequestRefusedError: The slot has no such range.
            OSError: The client has gone.
            TimeoutError: The client has not read a part in time.
        """
        name, write_id, offset, nbytes = request.name, request.write_id, request.at, request.nbytes
        try:
            slot = ShmSlot(self._folder / name)
        except OSError as error:
            raise _RetryLaterError(
                f"{name}: there is no such slot", RefusalCode.OVERTAKEN
            ) from error
        with slot:
            pins = request.pin and client.may_pin(name, write_id)
            if pins and not slot.lock(shared=True):
                raise _RetryLaterError(f"{name}: it is being filled", RefusalCode.OVERTAKEN)
            found = self._matching_header(slot, write_id)
            if found is None:
                raise _RetryLaterError(
                    f"{name}: the slot now holds another checkpoint", RefusalCode.OVERTAKEN
                )
            if offset + nbytes > found.size:
                raise _RequestRefusedError(
                    f"{name}: expected a range in {found.size} bytes, found {nbytes} from {offset}"
                )
            if (
                found.private_only
                and nbytes
                and offset < found.private_offset
                and offset + nbytes > PAGE
            ):
                raise _RequestRefusedError(
                    f"{name} is a partial replica: expected an offset from {found.private_offset}, "
                    f"found {offset}"
                )
            unpin = asyncio.get_running_loop().call_later(client.pin_s(), slot.unlock)
            try:
                await client.send(slot.fd, offset, nbytes)
            finally:
                unpin.cancel()
            await client.say(
                TransferReply(stands=self._matching_header(slot, write_id) is not None)
            )

    def _matching_header(self, slot: ShmSlot, write_id: str) -> SlotHeader | None:
        """Return the slot's header if it has this write id and belongs to the job; else None."""
        found = slot.header()
        return (
            found
            if found is not None and (found.job, found.write_id) == (self._job, write_id)
            else None
        )

    async def _connect(self, client: "_ClientConnection", request: ConnectRequest) -> None:
        """Connect to a peer's transfer server, and pass the connection to the worker.

        The worker never gets the token.

        Raises:
            _RetryLaterError: The peer cannot be reached, or refuses the connection.
        """
        try:
            connection = await asyncio.to_thread(
                connect_to_peer, request.addr, request.port, self._token, deadline_s=CONNECT_S
            )
        except DLRoverError as error:
            raise _RetryLaterError(str(error), RefusalCode.RETRY_LATER) from error
        try:
            client.hand_over(connection.fileno())
        finally:
            connection.close()

    def _log_refused(self, name: str, why: str) -> None:
        """Log a refused peer, at most once in ``LOG_INTERVAL_S``, because there may be many.

        Other refusals are only counted; the next line has their number.
        """
        self._unlogged += 1
        if time.monotonic() - self._logged_at < LOG_INTERVAL_S:
            return
        log.warning(
            "transfer_client_refused", extra={"client": name, "why": why, "times": self._unlogged}
        )
        self._logged_at, self._unlogged = time.monotonic(), 0


class _ClientConnection:
    """A client connection, on which each read and write has a timeout."""

    def __init__(self, stream: socket.socket, timing: TransferTiming) -> None:
        stream.setblocking(False)
        self._stream, self._timing = stream, timing
        self._buffer = b""
        self._pinned, self._pinned_at = ("", ""), 0.0
        self.name = "a worker"
        if stream.family != socket.AF_UNIX:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                self.name = str(stream.getpeername()[0])

    async def line(self) -> bytes | None:
        """Return the next line; None at the end of the connection.

        Raises:
            _RequestRefusedError: The line is too long.
            TimeoutError: No bytes have arrived for ``idle_timeout_s``.
        """
        loop = asyncio.get_running_loop()
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                raise _RequestRefusedError(f"expected a line of at most {MAX_LINE} bytes")
            async with asyncio.timeout(self._timing.idle_timeout_s):
                data = await loop.sock_recv(self._stream, MAX_LINE)
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        return line

    async def message(self, form: TypeAdapter[T]) -> T:
        """Return the next line as a message of this form.

        Raises:
            _RequestRefusedError: The line has another form or is too long, or the client has closed
                the connection.
            OSError: The connection was reset.
            TimeoutError: No bytes have arrived for ``idle_timeout_s``.
        """
        try:
            return read(form, await self.line() or b"")
        except ValueError as error:
            raise _RequestRefusedError(f"expected a handshake: {error}") from error

    async def say(self, message: TransferMessage) -> None:
        """Send a message."""
        await self._write(message.encode())

    async def send_body(self, body: bytes) -> None:
        """Send a line with the number of bytes, then the bytes."""
        await self._write(TransferReply(nbytes=len(body)).encode() + body)

    async def send(self, fd: int, at: int, nbytes: int) -> None:
        """Send a line with the number of bytes, then a range of a file.

        Args:
            fd: Descriptor of the file.
            at: Offset of the first byte.
            nbytes: Number of bytes.

        Raises:
            OSError: The file is too short, or the client has gone.
            TimeoutError: The client has not read a part in time.
        """
        await self.say(TransferReply(nbytes=nbytes))
        loop = asyncio.get_running_loop()
        with io.FileIO(fd, "rb", closefd=False) as file:
            while nbytes:
                async with asyncio.timeout(self._timing.read_timeout_s):
                    sent = await loop.sock_sendfile(self._stream, file, at, min(SEND_BYTES, nbytes))
                if not sent:
                    raise OSError(errno.EIO, "the slot has become shorter")
                at, nbytes = at + sent, nbytes - sent

    def may_pin(self, name: str, write_id: str) -> bool:
        """Return whether the client may still keep this content of a slot from being overwritten.

        The time limit counts from the client's first call for this content. Another content starts
        it again.

        Args:
            name: Name of the slot.
            write_id: Write id of its content.
        """
        if self._pinned != (name, write_id):
            self._pinned, self._pinned_at = (name, write_id), time.monotonic()
        return self.pin_s() > 0

    def pin_s(self) -> float:
        """Return the seconds for which the client may still keep the content of its last request.

        The value is zero or negative when the time is over.
        """
        return self._pinned_at + self._timing.pin_limit_s - time.monotonic()

    def hand_over(self, fd: int) -> None:
        """Send a file descriptor to the client.

        The client waits for it, so the socket's buffer has room for a line that short.
        """
        socket.send_fds(self._stream, [TransferReply().encode()], [fd])

    async def _write(self, data: bytes) -> None:
        async with asyncio.timeout(self._timing.read_timeout_s):
            await asyncio.get_running_loop().sock_sendall(self._stream, data)


async def _master_answer(answer: Awaitable[Wire]) -> bytes:
    """Return the master's answer as JSON; turn an error into a refusal that allows a retry.

    Raises:
        _RetryLaterError: The master does not answer, or its answer is not understood.
    """
    try:
        return (await answer).model_dump_json().encode()
    except DLRoverError as error:
        raise _RetryLaterError(str(error), RefusalCode.RETRY_LATER) from error


_HELLO = TypeAdapter(TransferHello)
_PROOF = TypeAdapter(TransferProof)
