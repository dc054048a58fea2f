"""Client of an agent's transfer server, which serves checkpoints from the memory of nodes.

The server says which node's memory holds which checkpoint, and sends the bytes.

A worker asks its own agent at a unix socket (:meth:`TransferConnection.local`); the agent knows the
master and the job's token. For a peer's transfer server the worker gets a connection that its agent
has opened and authenticated (:meth:`TransferConnection.connect`). Thus no training script ever
holds the token. An agent itself connects with :func:`connect_to_peer`.

The messages are those of :mod:`dlrover_py.protocol.transfer`.

The server sends bytes by ``sendfile``, directly from the pages of the slot. A writer that fills the
slot again changes even bytes that are on their way. The trailer therefore detects an overwritten
slot early and with a clear message. Only the XXH3 shows that bytes are right; the reader compares
it (``SlotContents.digests``).

The sockets are blocking and use the kernel's timeouts, so that ``MSG_WAITALL`` reads straight into
the target.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Self, TypeVar

from pydantic import TypeAdapter

from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import DamagedDataError, SlotContents
from dlrover_py.process.ownership import is_own_socket
from dlrover_py.protocol.agents import (
    ReplicaLocation,
    ReplicaLocations,
    RestoreCandidate,
    RestoreCandidates,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.documents import read
from dlrover_py.protocol.errors import (
    CheckpointError,
    TransientError,
    UnauthorizedError,
    UnreachableError,
)
from dlrover_py.protocol.slots import SlotHeader, SlotRegion, ValidHeader
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
)
from dlrover_py.protocol.versions import other_version

T = TypeVar("T")

CONNECT_S = 3.0
"""Seconds within which a connection must be established."""
QUIET_S = 30.0
"""Seconds without any data after which a peer's connection is given up."""
ASKED_S = 75.0
"""Seconds without any data after which the connection to the own agent is given up.

The agent itself waits for the master, which answers once all nodes have reported.
"""
MAX_LINE = 1 << 16
"""Largest size of one line of a reply, in bytes."""
MAX_DOCUMENT = 1 << 24
"""Largest size of a document, in bytes: room for the slots of some ten thousand ranks."""
TABLE_PART = 1 << 24
"""Largest number of bytes of a table that one request asks for."""
READ_BYTES = 1 << 20
"""Bytes per read, after which ``arrived`` is called while they are still in the CPU cache."""
WAKE_BYTES = 1 << 20
"""Bytes for which the kernel wakes a reader of large data, instead of for each packet."""
MAX_IN_FLIGHT = 8
"""Largest number of requests in flight on one connection."""


class SlotOverwrittenError(DamagedDataError):
    """The slot has been filled again since the requested snapshot was announced."""


def proof(token: str, role: str, address: str, client_nonce: bytes, server_nonce: bytes) -> str:
    """Return the proof of one side of a connection that it knows the job's token.

    Args:
        token: token of the job.
        role: ``client`` or ``server``. The proof of one side is not valid for the other.
        address: ``addr:port`` of the transfer server that the client means, as the server's agent
            offers it. A server at a reused address cannot forward the proof to a third one.
        client_nonce: nonce of the client.
        server_nonce: nonce of the server.
    """
    signed = (
        f"dlrover transfer {VERSION} {role}\0{address}\0".encode() + client_nonce + server_nonce
    )
    return hmac.new(token.encode(), signed, "sha256").hexdigest()


def connect_to_peer(
    addr: str, port: int, token: str, *, deadline_s: float = CONNECT_S
) -> "TransferConnection":
    """Connect to a peer's transfer server; each side proves that it has the job's token.

    Args:
        addr: address of the server.
        port: port of the server.
        token: token of the job.
        deadline_s: seconds for the connection, and again for the handshake.

    Raises:
        UnreachableError: the server did not accept the connection or did not answer in time.
        UnauthorizedError: the server has another token or another version of the messages, or is
            no transfer server.
        TransientError: the server refuses for the moment.
    """
    address = f"{addr}:{port}"
    server = f"transfer server at {address}"
    try:
        stream = socket.create_connection((addr, port), timeout=deadline_s)
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"{server}: {_error_message(error, deadline_s)}") from error
    connection = TransferConnection(stream, server, quiet_s=deadline_s)
    connection.line_deadline = time.monotonic() + deadline_s  # single bytes do not extend it
    try:
        client_nonce = secrets.token_bytes(NONCE)
        try:
            answer = connection.begin_handshake(TransferHello(hello=client_nonce.hex()))
            if answer.version != VERSION:
                refusal = other_version("its handshake", answer.version, VERSION)
                raise UnauthorizedError(f"{server}: {refusal}")
            server_nonce = bytes.fromhex(answer.nonce)
            authentic = hmac.compare_digest(
                answer.proof, proof(token, "server", address, client_nonce, server_nonce)
            )
        except CheckpointError as error:
            raise UnauthorizedError(
                f"{server}: expected a transfer server, found another program: {error}"
            ) from error
        if not authentic:
            raise UnauthorizedError(
                f"{server}: expected the token of this job, found the server of another job"
            )
        try:
            own_proof = proof(token, "client", address, client_nonce, server_nonce)
            connection.say(TransferProof(proof=own_proof).encode())
        except CheckpointError as error:
            raise UnauthorizedError(str(error)) from error
        connection.line_deadline = None
        connection.set_timeout(QUIET_S)
    except BaseException:
        connection.close()
        raise
    return connection


class TransferConnection:
    """A connection to a transfer server; only one thread may use it at a time."""

    def __init__(self, stream: socket.socket, server: str, *, quiet_s: float = QUIET_S) -> None:
        """Take over a connected stream socket.

        Args:
            stream: the socket; one to a peer must be authenticated.
            server: name of the server in error messages.
            quiet_s: seconds without any data after which a call fails with `UnreachableError`;
                0: no limit.
        """
        stream.settimeout(None)
        self._stream, self.where = stream, server
        self._buffer = b""
        """Bytes received after the last line that was read."""
        self._local_path: str | Path | None = None
        """Unix socket of the server, if it is that of this node's agent."""
        self.line_deadline: float | None = None
        """Time by time.monotonic() until which a line must be complete; None: no such limit."""
        self.set_timeout(quiet_s)

    @classmethod
    def local(cls, path: str | Path, *, quiet_s: float = ASKED_S) -> Self:
        """Connect to the transfer server of this node's agent.

        Args:
            path: unix socket of the agent (``ENV_TRANSFER_SOCKET``).
            quiet_s: seconds without any data after which a call fails with `UnreachableError`;
                0: no limit.

        Raises:
            UnreachableError: the agent does not listen, or the socket is neither this user's nor
                root's.
        """
        server = f"the agent's transfer server at {path}"
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.settimeout(CONNECT_S)
            stream.connect(str(path))
        except OSError as error:
            stream.close()
            raise UnreachableError(f"{server}: {_error_message(error, CONNECT_S)}") from error
        if not is_own_socket(path):
            stream.close()
            raise UnreachableError(f"{server}: it belongs to another user")
        connection = cls(stream, server, quiet_s=quiet_s)
        connection._local_path = path
        return connection

    def reconnect(self) -> None:
        """Replace a broken connection to this node's agent, and all that it still brings.

        After an error the present connection stays as it is.

        Raises:
            UnreachableError: the agent does not listen, or the socket is neither this user's nor
                root's.
        """
        assert self._local_path is not None
        new = TransferConnection.local(self._local_path, quiet_s=self._quiet_s)
        self._stream.close()
        self._stream, self._buffer = new._stream, b""

    def set_timeout(self, quiet_s: float) -> None:
        """Set the seconds without any data after which a call fails with `UnreachableError`.

        With 0, a call waits without a limit.
        """
        self._quiet_s = quiet_s
        seconds, part = divmod(quiet_s, 1)
        timeout = struct.pack("@ll", int(seconds), int(part * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._stream.setsockopt(socket.SOL_SOCKET, option, timeout)

    def candidates(self, round: int) -> list[RestoreCandidate]:
        """Return the checkpoints that all nodes of a round together hold in memory, newest first.

        The agent asks the master, which answers once all nodes have reported their memory.

        Raises:
            TransientError: the master is away, or not all nodes have reported yet; ask again.
            CheckpointError: the request was refused, or the answer is not understood.
        """
        return self._request_document(CandidatesRequest(round=round), _CANDIDATES).candidates

    def locations(self, checkpoint: CheckpointId) -> list[ReplicaLocation]:
        """Return which nodes hold which ranks of a checkpoint in memory, as the master knows it.

        The agent asks the master. The result is [] if no node is known to hold it.

        Raises:
            TransientError: the master is away; ask again.
            CheckpointError: the request was refused, or the answer is not understood.
        """
        request = LocationsRequest(**asdict(checkpoint))
        return self._request_document(request, _LOCATIONS).locations

    def copied(self, checkpoint: CheckpointId) -> None:
        """Report to the server that this node has a complete copy of a checkpoint.

        The server is that of the node whose slots were copied. The call waits for its reply.

        Raises:
            TransientError: the connection broke, or no data came in time.
            CheckpointError: the request was refused, or the answer is not understood.
        """
        self.say(CopiedRequest(**asdict(checkpoint)).encode())

    def connect(self, addr: str, port: int) -> "TransferConnection":
        """Return a connection to a peer's transfer server, opened and authenticated by the agent.

        Args:
            addr: address of the peer's server.
            port: port of the peer's server.

        Raises:
            UnreachableError: the agent closed the connection, or did not answer in time.
            TransientError: the peer does not answer the agent, or has another token.
            CheckpointError: the agent refused the request, or handed no connection over.
        """
        self._send(ConnectRequest(addr=addr, port=port).encode())
        line, received_fds = b"", []
        try:
            while not line.endswith(b"\n"):
                with self._errors_as_unreachable():
                    data, fds, _, _ = socket.recv_fds(
                        self._stream, MAX_LINE, 1, socket.MSG_CMSG_CLOEXEC
                    )
                received_fds += fds
                line += data
                if not data or len(line) > MAX_LINE:
                    raise UnreachableError(f"{self.where}: it closed the connection")
            self._check_reply(line)
            if not received_fds:
                raise CheckpointError(
                    f"{self.where}: expected a connection to the peer, found none"
                )
            return TransferConnection(
                socket.socket(fileno=received_fds.pop()), f"transfer server at {addr}:{port}"
            )
        finally:
            for number in received_fds:
                socket.close(number)

    def slots(self) -> list[tuple[str, SlotHeader]]:
        """Return name and header of every complete slot of this job at the server.

        Raises:
            TransientError: the connection broke, or no data came in time.
            CheckpointError: the request was refused, or the answer is not understood, because
                another version of dlrover-py answers.
        """
        return self._request_document(SlotsRequest(), _SLOTS)

    def contents(self, name: str, write_id: str) -> SlotContents:
        """Read the header and the tables of a slot, but no tensor.

        Args:
            name: name of the slot.
            write_id: ``write_id`` in the header of the slot that is wanted.

        Raises:
            SlotOverwrittenError: the slot has been filled again, or does not exist.
            DamagedDataError: its bytes are not those that were written.
            TransientError: the connection broke, or no data came in time.
            CheckpointError: a request was refused, or the answer is not understood.
        """
        found = dict(self.slots()).get(name)
        if found is None or found.write_id != write_id:
            raise SlotOverwrittenError(
                f"{name} of {self.where}: the slot now holds another checkpoint"
            )
        return shm.contents(_RemoteSlot(self, name, found))

    def read_into(
        self,
        name: str,
        write_id: str,
        position: int,
        target: memoryview,
        *,
        pin: bool = False,
        on_data: Callable[[int], None] | None = None,
    ) -> None:
        """Read bytes of a slot straight into memory.

        The bytes are not verified. A caller that needs this compares their XXH3 with
        ``SlotContents.digests``.

        Args:
            name: name of the slot.
            write_id: ``write_id`` in the header of the slot that is wanted.
            position: offset of the first byte in the slot.
            target: writable, contiguous memory of the size that is wanted.
            pin: keep writers from taking the slot meanwhile, for at most half a minute.
            on_data: called after each chunk with the number of bytes received.

        Raises:
            SlotOverwrittenError: the slot was filled again or is gone; the bytes in the target are
                of no use.
            TransientError: the connection broke and cannot be used any more.
            CheckpointError: the slot has no such range, or the answer is not understood. The
                connection cannot be used any more.
        """
        for _ in self.read_all(name, write_id, [(position, target)], pin=pin, arrived=on_data):
            pass

    def read_all(
        self,
        name: str,
        write_id: str,
        wanted: Iterable[tuple[int, memoryview]],
        *,
        pin: bool = False,
        arrived: Callable[[int], None] | None = None,
    ) -> Iterator[memoryview]:
        """Read many ranges of a slot with several requests in flight (`MAX_IN_FLIGHT`).

        The bytes are not verified (see `read_into`). If the slot was filled again, the remaining
        answers are read before the error is raised, and the connection stays usable.

        Args:
            name: name of the slot.
            write_id: ``write_id`` in the header of the slot that is wanted.
            wanted: offset in the slot and target of each range.
            pin: keep writers from taking the slot meanwhile, for at most half a minute.
            arrived: called after each chunk with the number of bytes received.

        Yields:
            Each target once it is filled, in order. A caller that stops early must close the
            connection.

        Raises:
            SlotOverwrittenError: the slot was filled again or is gone; the bytes in the targets are
                of no use.
            TransientError: the connection broke and cannot be used any more.
            CheckpointError: the slot has no such range, or the answer is not understood. Answers
                may be unread, so the connection cannot be used any more.
        """
        in_flight: deque[memoryview] = deque()
        source = iter(wanted)
        failed: DamagedDataError | None = None
        while True:
            while failed is None and len(in_flight) < MAX_IN_FLIGHT:
                following = next(source, None)
                if following is None:
                    break
                position, target = following
                target = target.cast("B")
                in_flight.append(target)
                request = BytesRequest(
                    name=name, write_id=write_id, at=position, nbytes=len(target), pin=pin
                )
                self._send(request.encode())
            if not in_flight:
                break
            target = in_flight.popleft()
            try:
                self._receive_range(name, target, arrived)
            except DamagedDataError as error:  # the other answers are still under way
                failed = failed or error
                continue
            if failed is None:
                yield target
        if failed is not None:
            raise failed

    def say(self, request: bytes) -> TransferReply:
        """Send a line with a request, wait, and return the first line of its reply.

        Bytes that the reply announces are not read.

        Raises:
            SlotOverwrittenError: the request was refused, because the slot has been filled again.
            TransientError: the request was refused and may be repeated.
            CheckpointError: the request was refused, or the answer is not understood.
            UnreachableError: the connection broke, or no data came in time.
        """
        self._send(request)
        return self._reply()

    def begin_handshake(self, hello: TransferHello) -> TransferChallenge:
        """Begin a handshake, and return the challenge of the server, which is not checked here.

        Raises:
            CheckpointError: the answer is not understood.
            UnreachableError: the connection broke, or no data came in time.
        """
        self._send(hello.encode())
        return self._parse(_CHALLENGE, self._read_line())

    def fileno(self) -> int:
        """Return the descriptor of the socket, to hand it over to another process."""
        return self._stream.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def abandon(self) -> None:
        """Break the connection; a thread that waits on it fails immediately.

        Any thread may call this. The descriptor stays open until `close`.
        """
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive_range(
        self, name: str, target: memoryview, on_data: Callable[[int], None] | None
    ) -> None:
        """Read the reply to one `BytesRequest` into the target.

        Args:
            name: name of the slot, for messages.
            target: memory of the size that was requested.
            on_data: called after each chunk with the number of bytes received; None: no call.

        Raises:
            SlotOverwrittenError: the slot was filled again before or during the read, or is gone.
            TransientError: the connection broke, or no data came in time.
            CheckpointError: the request was refused, or the reply has another size. In the second
                case the connection is broken off.
        """
        announced = self._reply().nbytes
        if announced != len(target):
            self.abandon()  # the boundary of the next line is unknown
            raise CheckpointError(f"{self.where}: {announced} bytes: expected {len(target)}")
        self._receive_into(target, on_data)
        if not self._reply().stands:
            raise SlotOverwrittenError(
                f"{name} of {self.where}: it was filled again while it was read"
            )

    def _request_document(self, request: TransferMessage, form: TypeAdapter[T]) -> T:
        """Send a request, and return the document that follows its reply.

        Args:
            request: the request.
            form: form of the document.

        Raises:
            TransientError: the connection broke, or the request was refused and may be repeated.
            CheckpointError: the request was refused, or the document is not valid or too large.
        """
        nbytes = self.say(request.encode()).nbytes
        if nbytes > MAX_DOCUMENT:
            self.abandon()
            raise CheckpointError(f"{self.where}: a document of {nbytes} bytes is too large")
        body = bytearray(nbytes)
        self._receive_into(memoryview(body))
        return self._parse(form, bytes(body))

    def _reply(self) -> TransferReply:
        """Read the next line as a reply; a refusal is raised as an exception."""
        return self._check_reply(self._read_line())

    def _check_reply(self, line: bytes) -> TransferReply:
        """Return the reply in a line; a refusal is raised as an exception.

        Raises:
            SlotOverwrittenError: the slot has been filled again, or is gone.
            TransientError: the request was refused and may be repeated.
            CheckpointError: the request was refused for good, or the line is no reply.
        """
        reply = self._parse(_REPLY, line)
        if not (reply.error or reply.code):
            return reply
        text = f"{self.where}: {reply.error}"
        if reply.code == RefusalCode.OVERTAKEN:
            raise SlotOverwrittenError(text)
        raise (
            TransientError(text) if reply.code == RefusalCode.RETRY_LATER else CheckpointError(text)
        )

    def _send(self, request: bytes) -> None:
        """Send a line with a request without waiting for its reply."""
        with self._errors_as_unreachable():
            self._stream.sendall(request)

    def _read_line(self) -> bytes:
        """Read the next line, without its line feed.

        Raises:
            UnreachableError: the connection broke or was closed, or the line came too late.
            CheckpointError: the line is longer than `MAX_LINE`.
        """
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE:
                self.abandon()
                raise CheckpointError(
                    f"{self.where}: expected a transfer server, found another program"
                )
            if self.line_deadline is not None and time.monotonic() > self.line_deadline:
                raise UnreachableError(f"{self.where}: it has not answered in time")
            with self._errors_as_unreachable():
                data = self._stream.recv(4096)  # few, for bytes behind the line are copied twice
            if not data:
                raise UnreachableError(f"{self.where}: it closed the connection")
            self._buffer += data
        line, self._buffer = self._buffer[:end], self._buffer[end + 1 :]
        return line

    def _receive_into(
        self, target: memoryview, on_data: Callable[[int], None] | None = None
    ) -> None:
        """Fill the target with the next bytes of the connection.

        Args:
            target: the memory to fill.
            on_data: called after each chunk with the number of bytes received; None: no call.

        Raises:
            UnreachableError: the connection broke or was closed, or no data came in time.
        """
        filled = min(len(self._buffer), len(target))
        target[:filled] = self._buffer[:filled]
        self._buffer = self._buffer[filled:]
        if filled and on_data is not None:
            on_data(filled)
        batch = 1
        while filled < len(target):
            part = target[filled : filled + READ_BYTES]
            # Not for the last bytes: a reader that waits for more than will come is never woken.
            if (
                wanted := WAKE_BYTES if len(target) - filled >= READ_BYTES + WAKE_BYTES else 1
            ) != batch:
                batch = wanted
                self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, batch)
            with self._errors_as_unreachable():
                received = self._stream.recv_into(part, len(part), socket.MSG_WAITALL)
            if not received:
                raise UnreachableError(f"{self.where}: it closed the connection")
            filled += received
            if on_data is not None:
                on_data(received)
        if batch != 1:
            self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _parse(self, schema: TypeAdapter[T], document: bytes) -> T:
        """Return a document of the server, checked against its form.

        Raises:
            CheckpointError: the document is not valid. The message advises to run one version of
                dlrover-py on all nodes.
        """
        try:
            return read(schema, document)
        except ValueError as error:
            problem = f"{self.where}: expected another reply: {error}"
            raise CheckpointError(
                f"{problem}; run one version of dlrover-py on all nodes"
            ) from error

    @contextlib.contextmanager
    def _errors_as_unreachable(self) -> Iterator[None]:
        """Turn errors of the socket into UnreachableError."""
        try:
            yield
        except OSError as error:
            raise UnreachableError(
                f"{self.where}: {_error_message(error, self._quiet_s)}"
            ) from error


_REPLY = TypeAdapter(TransferReply)
_CHALLENGE = TypeAdapter(TransferChallenge)
_CANDIDATES = TypeAdapter(RestoreCandidates)
_LOCATIONS = TypeAdapter(ReplicaLocations)
_SLOTS = TypeAdapter(list[tuple[str, ValidHeader]])


class _RemoteSlot:
    """A slot on another node, in the form that :func:`dlrover_py.checkpoint.shm.contents` reads."""

    def __init__(self, connection: TransferConnection, name: str, header: SlotHeader) -> None:
        self._connection, self._name, self._header = connection, name, header
        self.path = f"{name} of {connection.where}"

    def header(self) -> SlotHeader:
        """Return the header of the slot."""
        return self._header

    def region(self, region: SlotRegion) -> bytes:
        """Read a table of the slot and compare its digest.

        Raises:
            DamagedDataError: the bytes are not those that were written.
            SlotOverwrittenError: the slot has been filled again, or is gone.
            TransientError: the connection broke, or no data came in time.
            CheckpointError: the request was refused, or the answer is not understood.
        """
        data = b""
        while len(data) < region.nbytes:  # allocates only for bytes that have arrived
            part = bytearray(min(TABLE_PART, region.nbytes - len(data)))
            offset = region.at + len(data)
            self._connection.read_into(self._name, self._header.write_id, offset, memoryview(part))
            data += part
        if shm.digest(data) != region.xxh3:
            problem = f"the bytes at {region.at} are not those that were written"
            raise DamagedDataError(f"{self.path}: {problem}")
        return data


def _error_message(error: Exception, limit_s: float) -> str:
    """Return the message of an error of a socket with this timeout."""
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return f"no data came within {limit_s:g} s"
    return str(error) or type(error).__name__
