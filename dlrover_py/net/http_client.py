"""A small HTTP/1.1 client for JSON documents, over TCP or a Unix socket.

The h11 library implements the protocol. This module adds the connections: deadlines, a pool of idle
connections, and the kernel's keep-alive to detect silent hosts. An agent must start within a tenth
of a second, so httpx and aiohttp are not used: each needs 0.2 s for its imports
(docs/decisions/0002-light-agent.md).
"""

import asyncio
import errno
import hmac
import os
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import h11

from dlrover_py.protocol import proof
from dlrover_py.protocol.agents import ErrorReply
from dlrover_py.protocol.errors import (
    ConfigError,
    ErrorCode,
    FileLimitError,
    SupersededError,
    TransientError,
    UnauthorizedError,
    UnreachableError,
)
from dlrover_py.protocol.names import ENV_CA_FILE, MASTER_NAME

CONNECT_S = 5.0
"""Seconds to open the connection of an endless reply."""
TCP_CONNECT_S = 1.0
"""Seconds for a TCP connection to each address.

The deadline of a call is too long for this. On Kubernetes, a connection may begin while a Service
still leads to a Pod that is gone. It then leads there until it is given up.
"""
_CHUNK = 65536
MAX_REPLY_BYTES = 1 << 28
"""Bytes of a reply, or of a line in an endless reply, unless the call has its own limit.

A limit is needed: any program may answer.
"""
MAX_SHORT_REPLY_BYTES = 1 << 16
"""Bytes of a reply that is a name, a proof or a few words."""


class _Connection:
    """One connection to a server. The h11 library checks the order of requests and replies."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, request: h11.Request, body: bytes) -> None:
        """Send a request with its body."""
        data = self._http.send(request) or b""
        if body:
            data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        self._writer.write(data)
        await self._writer.drain()

    async def ask(self, request: h11.Request, body: bytes, max_bytes: int) -> "HttpReply":
        """Send a request with its body, and return the complete reply, whatever its status is.

        There is no time limit here.

        Args:
            request: Head of the request.
            body: Body of the request.
            max_bytes: Largest body of the reply in bytes.

        Raises:
            ConnectionError: If the body is larger, or the connection was closed before the body.
            OSError: If the connection fails.
            h11.RemoteProtocolError: If the reply is not HTTP, or ends within its body.
        """
        await self.send(request, body)
        status, received = 0, bytearray()
        while not isinstance(event := await self.event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            else:
                received += event.data
                _check_size(len(received), max_bytes)
        return HttpReply(status, bytes(received))

    async def event(self) -> h11.Response | h11.Data | h11.EndOfMessage:
        """Wait, without a time limit, for the next part of the reply, and return it.

        It is the head (Response), a part of the body (Data) or the end (EndOfMessage).

        Raises:
            ConnectionError: If the connection was closed before the head was complete.
            OSError: If the connection fails.
            h11.RemoteProtocolError: If the reply is not HTTP, or ends within its body.
        """
        while True:
            event = self._http.next_event()
            if isinstance(event, (h11.Response, h11.Data, h11.EndOfMessage)):
                return event
            if event is h11.NEED_DATA:
                data = await self._reader.read(_CHUNK)
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise ConnectionResetError("the server closed the connection without an answer")
                self._http.receive_data(data)
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise ConnectionError("the connection was closed before the reply was complete")

    def reusable(self) -> bool:
        """Return whether the connection can carry another request, and prepare it for that.

        It can if request and reply are complete and the server has not closed it. Call this method
        only once after each reply.
        """
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def stale(self) -> bool:
        """Whether the server has closed the connection."""
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()


class OtherProgramError(ConfigError):
    """An answer with an error that is not from one of DLRover's programs."""


class AnswerTooLargeError(ConnectionError):
    """A reply has more bytes than the caller takes."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """The status and body of a reply."""

    status: int
    body: bytes


class HttpClient:
    """A client for one address: ``host:port``, ``[v6]:port`` or ``unix:/path``."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        ca_file: Path | None = None,
        silence_s: float = 5.0,
        asks_proof: bool = False,
    ) -> None:
        """Create the client. It opens no connection yet.

        Args:
            address: Address of the server.
            token: Bearer token of the requests; empty for none.
            ca_file: File of a certificate authority. If given, the client uses TLS, and accepts a
                certificate of this authority for the master's name.
            silence_s: Seconds after which the kernel gives up a silent peer, approximately.
            asks_proof: Whether the server must prove on each new connection that it knows the
                token, before the token is sent. Another program may have taken its address.

        Raises:
            ConfigError: If the authority's file cannot be used.
        """
        self.address = address
        self._may_miss_tls = ca_file is None and not address.startswith("unix:")
        self._ca_file, self._tls = ca_file, None if ca_file is None else _tls_context(ca_file)
        self._headers = [("Host", "localhost"), ("Content-Type", "application/json")]
        if token:
            self._headers.append(("Authorization", f"Bearer {token}"))
        self._silence_s = silence_s
        self._token, self._asks_proof = token, asks_proof
        self._idle: list[_Connection] = []

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        deadline_s: float,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> bytes:
        """Send a request and return the body of its 200 reply.

        All requests of DLRover are complete documents. So a request that got no complete answer on
        an idle connection is sent again on another one, within the same deadline. The server may
        therefore get it twice. After a failure on a new connection it is not sent again.

        Args:
            method: HTTP method.
            path: Path of the URL.
            body: JSON document; empty for none.
            deadline_s: Seconds until the reply must be complete.
            max_bytes: Largest reply in bytes.

        Raises:
            UnreachableError: If there is no complete answer within the deadline, the connection
                fails, or the answer is too large or not HTTP.
            FileLimitError: If this process may open no more files.
            UnauthorizedError: If the server refuses the token, has not proved that it knows the
                token, or has a certificate that is not trusted.
            SupersededError: If the reply says that the sender was superseded.
            TransientError: If the server cannot answer now, so that a later try may succeed.
            ConfigError: If the path or the token cannot be sent, or the server refuses the request
                for another reason.
        """
        request = self._request(method, path, body)
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._exchange(request, body, max_bytes)
        except ssl.SSLError as error:
            raise self._tls_error(error) from error
        except (OSError, TimeoutError, UnicodeError, h11.RemoteProtocolError) as error:
            text = f"{self.address}: {_description(error, deadline_s)}"
            if _lacks_files(error):
                raise FileLimitError(text) from error
            if isinstance(error, ConnectionResetError) and self._may_miss_tls:
                text += f"; if the server expects TLS, set {ENV_CA_FILE} to its authority's file"
            raise UnreachableError(text) from error
        self._may_miss_tls = False
        if reply.status == 200:
            return reply.body
        raise _error(self.address, reply)

    async def lines(self, path: str, *, max_bytes: int = MAX_REPLY_BYTES) -> AsyncIterator[bytes]:
        """Yield the lines of an endless reply as they arrive, until it ends.

        Opening the connection is limited to ``CONNECT_S`` seconds; afterwards there is no limit,
        and a silent server keeps the caller waiting. A last line without a line break is dropped.
        The request is sent once.

        Args:
            path: Path and query of the URL.
            max_bytes: Largest size of a line, in bytes.

        Raises:
            UnreachableError: If the connection could not be opened, or broke, or a line is too
                large. Also if the server's certificate is not trusted.
            DLRoverError: If the status is not 200, or nothing can be sent, as in :meth:`call`.
        """
        request = self._request("GET", path, b"")
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._open()
        except (OSError, TimeoutError) as error:
            raise UnreachableError(f"{self.address}: {_description(error, CONNECT_S)}") from error
        try:
            await connection.send(request, b"")
            buffer = b""
            status = 0
            while not isinstance(event := await connection.event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                    continue
                buffer += bytes(event.data)
                _check_size(len(buffer), max_bytes)
                if status != 200:
                    continue
                *whole, buffer = buffer.split(b"\n")
                for line in whole:
                    yield line
            if status != 200:
                raise _error(self.address, HttpReply(status, buffer))
        except (OSError, h11.RemoteProtocolError) as error:
            raise UnreachableError(f"{self.address}: {_description(error, 0)}") from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the idle connections.

        Calls in progress are not affected, and later calls open new connections.
        """
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, request: h11.Request, body: bytes, max_bytes: int) -> HttpReply:
        """Send a request on an idle connection, or on a new one if no idle connection works.

        Idle connections that the server has closed are discarded. If an error occurs on an idle
        connection, the request is sent again on the next one. It is not sent again if the reply was
        too large.

        Args:
            request: Head of the request.
            body: Body of the request.
            max_bytes: Largest reply in bytes.

        Raises:
            OSError: If the new connection cannot be opened or fails, or its reply is too large.
            h11.RemoteProtocolError: If the reply on the new connection is not HTTP, or ends within
                its body.
            UnauthorizedError: If the server of the new connection has not proved its token.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.stale:
                connection.close()
                continue
            try:
                return await self._send_on(connection, request, body, max_bytes)
            except AnswerTooLargeError:
                raise  # the server has carried out the request
            except (OSError, h11.RemoteProtocolError):
                continue
        return await self._send_on(await self._open(), request, body, max_bytes)

    async def _send_on(
        self, connection: _Connection, request: h11.Request, body: bytes, max_bytes: int
    ) -> HttpReply:
        """Send a request on a connection, and return the reply.

        The connection then becomes idle for the next request, or is closed if it cannot be used
        again.

        Args:
            connection: The connection.
            request: Head of the request.
            body: Body of the request.
            max_bytes: Largest reply in bytes.

        Raises:
            OSError: If the connection fails, or the reply is too large.
            h11.RemoteProtocolError: If the reply is not HTTP, or ends within its body.
        """
        done = False
        try:
            reply = await connection.ask(request, body, max_bytes)
            done = connection.reusable()
            return reply
        finally:
            if done:
                self._idle.append(connection)
            else:
                connection.close()

    def _request(self, method: str, path: str, body: bytes) -> h11.Request:
        """Return the head of a request. Nothing is sent.

        Raises:
            ConfigError: If the path or the token has characters that HTTP does not allow.
        """
        headers = [*self._headers, ("Content-Length", str(len(body)))]
        try:
            return h11.Request(method=method, target=path, headers=headers)
        except (h11.LocalProtocolError, UnicodeEncodeError):  # their messages may show the token
            raise ConfigError(
                f"{self.address}: {path!r} is not sent: expected a path of ASCII characters "
                "without spaces, and a token of printable ASCII characters"
            ) from None

    async def _open(self) -> _Connection:
        """Open a new connection to the address: Unix socket, TCP, or TLS.

        Keep-alive and the server's proof of the token apply to TCP and TLS only. The caller limits
        the time.

        Raises:
            OSError: If the connection cannot be opened; ssl.SSLError if TLS fails.
            UnauthorizedError: If the server has not proved that it knows the token.
            DLRoverError: If the server cannot answer the request for its proof.
        """
        if self.address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(self.address[5:])
            return _Connection(reader, writer)
        host, _, port = self.address.rpartition(":")
        name = None if self._tls is None else MASTER_NAME
        sock = await _connect(host.strip("[]"), int(port))
        enable_keepalive(sock, self._silence_s)
        peer = sock.getpeername()
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=self._tls, server_hostname=name
        )
        connection = _Connection(reader, writer)
        if self._asks_proof:
            try:
                await self._verify_proof(connection, peer)
            except BaseException:
                connection.close()
                raise
        return connection

    async def _verify_proof(self, connection: _Connection, peer: tuple[str, int]) -> None:
        """Verify that the server of a new connection knows the token, without sending the token.

        A reply other than 200, 401 or 404 says nothing about the token, so it raises the error that
        :meth:`call` raises for it.

        Args:
            connection: The connection, which has carried no request yet.
            peer: Address and port of the server; the proof is valid only for them.

        Raises:
            UnauthorizedError: If the server has not proved it.
            ConnectionResetError: If the connection cannot be used after the proof.
            DLRoverError: If the status is none of these three.
        """
        nonce = secrets.token_hex(proof.NONCE_BYTES)
        headers = [("Host", "localhost"), ("Content-Length", "0")]
        target = f"{proof.PATH}?nonce={nonce}"
        request = h11.Request(method="GET", target=target, headers=headers)
        reply = await connection.ask(request, b"", MAX_SHORT_REPLY_BYTES)
        if reply.status not in (200, 401, 404):
            raise _error(self.address, reply)
        expected = proof.master_proof(self._token, nonce, proof.connection_address(*peer[:2]))
        if not hmac.compare_digest(reply.body, f'"{expected}"'.encode()):
            raise UnauthorizedError(
                f"the program at {self.address} is not the master of this job: it has not proved "
                "that it knows the job's token, so the token was not sent to it"
            )
        if not connection.reusable():
            raise ConnectionResetError("it closed the connection after its proof")

    def _tls_error(self, error: ssl.SSLError) -> Exception:
        """Return the exception for a failure of TLS, without raising it.

        It is UnauthorizedError for an untrusted certificate, and UnreachableError for any other
        failure.
        """
        if isinstance(error, ssl.SSLCertVerificationError):
            return UnauthorizedError(
                f"{self.address}: its certificate is refused: {error.verify_message}; expected "
                f"one for {MASTER_NAME} that the authority in {self._ca_file} has signed"
            )
        why = (error.reason or str(error)).lower().replace("_", " ")
        return UnreachableError(f"{self.address}: TLS failed ({why}); expected a master with TLS")


def _check_size(nbytes: int, max_bytes: int) -> None:
    """Check the size of a reply.

    Raises:
        AnswerTooLargeError: If the reply is larger than the limit.
    """
    if nbytes > max_bytes:
        raise AnswerTooLargeError(f"the answer is too large: expected at most {max_bytes} bytes")


async def _connect(host: str, port: int) -> socket.socket:
    """Connect to the first of the host's addresses that answers, in the order of the resolver.

    Each address has ``TCP_CONNECT_S`` seconds. The look-up of the name has no limit here.

    Raises:
        OSError: If none answers: the error of the last address. Also if the name is not known, or
            this process may open no more files.
    """
    loop = asyncio.get_running_loop()
    failed: OSError = ConnectionError(f"{host} has no address")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # too long for a name, or not text
        raise ConnectionError(f"{host!r} is no host name: {error}") from error
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(TCP_CONNECT_S):
                await loop.sock_connect(sock, address)
        except TimeoutError:
            sock.close()
            failed = ConnectionError(f"{address[0]}: no connection within {TCP_CONNECT_S:g} s")
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failed


def _tls_context(ca_file: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts only the authorities in a file, with TLS 1.2 or newer.

    Raises:
        ConfigError: If the file cannot be read or has no certificates.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise ConfigError(
            f"certificate authority {ca_file}: expected certificates in PEM format"
        ) from error
    except OSError as error:
        raise ConfigError(f"certificate authority {ca_file}: {error.strerror}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def enable_keepalive(sock: socket.socket, silence_s: float) -> None:
    """Have the kernel close a connection whose peer's kernel does not answer any more.

    Reads and writes then fail with an OSError. A process that hangs is not noticed, because its
    kernel still answers. If the socket listens, the setting is for each connection that it accepts.

    Args:
        sock: A TCP socket.
        silence_s: Seconds after which the kernel gives up a silent peer, approximately. It is
            rounded to whole seconds, at least 2.
    """
    seconds = max(2, round(silence_s))
    idle = min(seconds // 2, 32767)  # the kernel's limit; silence_s may be larger
    probes = min(seconds - idle, 9)
    every = (seconds - idle) // probes
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(every, 32767))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def check_address(address: str) -> None:
    """Check the form of an address for :class:`HttpClient`. No connection is opened.

    Raises:
        ConfigError: If it is neither ``host:port`` nor ``unix:/path``.
    """
    host, _, port = address.rpartition(":")
    number = int(port) if re.fullmatch(r"[0-9]{1,5}", port) else 0
    valid = address.startswith("unix:/") or (host and 0 < number < 65536)
    if not valid:
        raise ConfigError(f"address {address!r}: expected host:port, such as 10.0.0.7:50001")


def _lacks_files(error: Exception) -> bool:
    """Return whether a connection failed because this process may open no more files.

    After a failed look-up of a name, this is tested by opening ``/dev/null``.
    """
    if isinstance(error, socket.gaierror):  # the resolver does not say why it failed
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as cause:
            error = cause
    return isinstance(error, OSError) and error.errno == errno.EMFILE


def _description(error: Exception, deadline_s: float) -> str:
    """Describe an error of a connection."""
    if isinstance(error, TimeoutError):
        return f"no answer within {deadline_s:g} s"
    return str(error) or type(error).__name__


def _error(address: str, reply: HttpReply) -> Exception:
    """Return the exception for a reply whose status is not 200, without raising it.

    Status 401 is UnauthorizedError. The code of the reply decides about SupersededError and
    TransientError; a status of 500 or more is a TransientError as well. Any other reply is a
    ConfigError; it is OtherProgramError if it has no code.
    """
    try:
        reply_error = ErrorReply.model_validate_json(reply.body)
    except ValueError:
        text = f"HTTP {reply.status}{_first_line(reply.body)}"
        if reply.status < 500:  # a proxy may send 5xx while the master is away
            text += "; expected DLRover's master, but another program answers there"
        reply_error = ErrorReply(code="", message=text)
    text = f"{address}: {reply_error.message}"
    if reply.status == 401:
        return UnauthorizedError(text)
    if reply_error.code == ErrorCode.SUPERSEDED:
        return SupersededError(reply_error.message)
    if reply.status >= 500 or reply_error.code == ErrorCode.PASSIVE:
        return TransientError(text)
    if reply_error.code:
        return ConfigError(reply_error.message)
    return OtherProgramError(text)


def _first_line(body: bytes) -> str:
    """Return the beginning of an unknown program's reply on one line, after a colon."""
    text = "".join(c if c.isprintable() else " " for c in body[:200].decode("utf-8", "replace"))
    return f": {text.strip()}" if text.strip() else ""
