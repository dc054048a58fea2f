"""A small HTTP/1.1 client for JSON documents, over TCP or a unix socket.

The protocol is h11's; ours is the connection: deadlines, a pool of idle connections, the kernel's
keep-alive as the detector of silent hosts. An agent has to be up within a tenth of a second, so
that httpx and aiohttp (0.2 s of imports each) are not used (docs/decisions/0002-light-agent.md).
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import h11

from dlrover_py.protocol.agents import ErrorReply
from dlrover_py.protocol.errors import (
    ConfigError,
    ErrorCode,
    Superseded,
    TransientError,
    Unauthorized,
    Unreachable,
)
from dlrover_py.protocol.names import ENV_CA_FILE, MASTER_NAME

CONNECT_S = 5.0
TCP_CONNECT_S = 1.0
"""For each address. A call's deadline is no bound for this: on Kubernetes a connection that was
begun while a Service still led to a Pod that is gone leads there until it is given up."""
_CHUNK = 65536


class _Connection:
    """One connection; h11 keeps it honest about whose turn it is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, request: h11.Request, body: bytes) -> None:
        data = self._http.send(request) or b""
        if body:
            data += self._http.send(h11.Data(data=body)) or b""
        data += self._http.send(h11.EndOfMessage()) or b""
        self._writer.write(data)
        await self._writer.drain()

    async def event(self) -> h11.Response | h11.Data | h11.EndOfMessage:
        """The next part of the reply."""
        while True:
            event = self._http.next_event()
            if isinstance(event, (h11.Response, h11.Data, h11.EndOfMessage)):
                return event
            if event is h11.NEED_DATA:
                data = await self._reader.read(_CHUNK)
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise ConnectionResetError("it closed the connection without an answer")
                self._http.receive_data(data)
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise ConnectionError("closed before the reply was complete")

    def reusable(self) -> bool:
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return not self._reader.at_eof() and not self._writer.is_closing()

    @property
    def stale(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and body of a reply."""

    status: int
    body: bytes


class Client:
    """Calls one address: ``host:port``, ``[v6]:port`` or ``unix:/path``."""

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        ca_file: Path | None = None,
        silence_s: float = 5.0,
    ) -> None:
        """Remember the address; nothing is opened yet.

        Args:
            address: where to.
            token: sent as a bearer token, if given.
            ca_file: call over TLS, and believe who has a certificate by this authority for the
                master's name.
            silence_s: the kernel gives a silent peer up after about this long.

        Raises:
            ConfigError: the authority's file cannot be used.
        """
        self.address = address
        self._may_miss_tls = ca_file is None and not address.startswith("unix:")
        self._ca_file, self._tls = ca_file, None if ca_file is None else _trust(ca_file)
        self._headers = [("Host", "localhost"), ("Content-Type", "application/json")]
        if token:
            self._headers.append(("Authorization", f"Bearer {token}"))
        self._silence_s = silence_s
        self._idle: list[_Connection] = []

    async def call(self, method: str, path: str, body: bytes = b"", *, deadline_s: float) -> bytes:
        """Send a request and return the body of its 200 reply.

        All our requests are whole documents, so that one that got no answer on an old connection
        is sent once more on a fresh one.

        Raises:
            Unreachable: no answer until the deadline.
            Unauthorized: it does not take our token, or we do not believe who it is.
            Superseded, ConfigError, TransientError: by the code of the reply.
        """
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._exchange(method, path, body)
        except ssl.SSLError as error:
            raise self._distrust(error) from error
        except (OSError, TimeoutError, UnicodeError, h11.RemoteProtocolError) as error:
            words = f"{self.address}: {_words(error, deadline_s)}"
            if isinstance(error, ConnectionResetError) and self._may_miss_tls:
                words += f"; if it expects TLS, {ENV_CA_FILE} has to name its authority's file"
            raise Unreachable(words) from error
        self._may_miss_tls = False
        if reply.status == 200:
            return reply.body
        raise _error(self.address, reply)

    async def lines(self, path: str) -> AsyncIterator[bytes]:
        """Yield the lines of an endless reply as they come, until it ends.

        Raises:
            Unreachable: the connection could not be made, or broke.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await self._open()
        except (OSError, TimeoutError) as error:
            raise Unreachable(f"{self.address}: {_words(error, CONNECT_S)}") from error
        try:
            await connection.send(self._request("GET", path, b""), b"")
            buffer = b""
            status = 0
            while not isinstance(event := await connection.event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                    continue
                buffer += bytes(event.data)
                if status != 200:
                    continue
                *whole, buffer = buffer.split(b"\n")
                for line in whole:
                    yield line
            if status != 200:
                raise _error(self.address, Reply(status, buffer))
        except (OSError, h11.RemoteProtocolError) as error:
            raise Unreachable(f"{self.address}: {_words(error, 0)}") from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _exchange(self, method: str, path: str, body: bytes) -> Reply:
        request = self._request(method, path, body)
        while self._idle:
            connection = self._idle.pop()
            if connection.stale:
                connection.close()
                continue
            with contextlib.suppress(OSError, h11.RemoteProtocolError):
                return await self._talk(connection, request, body)
        return await self._talk(await self._open(), request, body)

    async def _talk(self, connection: _Connection, request: h11.Request, body: bytes) -> Reply:
        done = False
        try:
            await connection.send(request, body)
            status, received = 0, bytearray()
            while not isinstance(event := await connection.event(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                else:
                    received += event.data
            done = connection.reusable()
            return Reply(status, bytes(received))
        finally:
            if done:
                self._idle.append(connection)
            else:
                connection.close()

    def _request(self, method: str, path: str, body: bytes) -> h11.Request:
        headers = [*self._headers, ("Content-Length", str(len(body)))]
        return h11.Request(method=method, target=path, headers=headers)

    async def _open(self) -> _Connection:
        if self.address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(self.address[5:])
        else:
            host, _, port = self.address.rpartition(":")
            name = None if self._tls is None else MASTER_NAME
            sock = await _connect(host.strip("[]"), int(port))
            watch_silence(sock, self._silence_s)
            reader, writer = await asyncio.open_connection(
                sock=sock, ssl=self._tls, server_hostname=name
            )
        return _Connection(reader, writer)

    def _distrust(self, error: ssl.SSLError) -> Exception:
        if isinstance(error, ssl.SSLCertVerificationError):
            return Unauthorized(
                f"{self.address}: its certificate is refused: {error.verify_message}; expected "
                f"one for {MASTER_NAME} by the authority in {self._ca_file}"
            )
        why = (error.reason or str(error)).lower().replace("_", " ")
        return Unreachable(f"{self.address}: no TLS ({why}); expected a master that speaks it")


async def _connect(host: str, port: int) -> socket.socket:
    """Connect to the first of the host's addresses that answers.

    Raises:
        OSError: none does; what the last one said.
    """
    loop = asyncio.get_running_loop()
    failed: OSError = ConnectionError(f"{host} has no address")
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # longer than a name may be, or bytes that are no text
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


def _trust(ca_file: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"authority's file {ca_file}: expected certificates as PEM") from error
    except OSError as error:
        raise ConfigError(f"authority's file {ca_file}: {error.strerror}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def watch_silence(sock: socket.socket, silence_s: float) -> None:
    """Let the kernel find a host that has fallen silent: it costs no Python.

    On a listening socket it holds for each connection that is accepted there.
    """
    seconds = max(2, round(silence_s))
    idle = min(seconds // 2, 32767)  # the kernel's limit: a job without a network waits for ever
    probes = min(seconds - idle, 9)
    every = (seconds - idle) // probes
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, min(every, 32767))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def check_address(address: str) -> None:
    """Refuse what cannot be called.

    Raises:
        ConfigError: neither ``host:port`` nor ``unix:/path``.
    """
    host, _, port = address.rpartition(":")
    fine = address.startswith("unix:/") or (host and port.isdigit() and 0 < int(port) < 65536)
    if not fine:
        raise ConfigError(f"address {address!r}: expected host:port, such as 10.0.0.7:50001")


def _words(error: Exception, deadline_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {deadline_s:g} s"
    return str(error) or type(error).__name__


def _error(address: str, reply: Reply) -> Exception:
    try:
        said = ErrorReply.model_validate_json(reply.body)
    except ValueError:
        said = ErrorReply(code="", message=reply.body[:200].decode("utf-8", "replace"))
    text = f"{address}: {said.message}"
    if reply.status == 401:
        return Unauthorized(text)
    if said.code == ErrorCode.SUPERSEDED:
        return Superseded(said.message)
    if reply.status >= 500 or said.code == ErrorCode.PASSIVE:
        return TransientError(text)
    return ConfigError(said.message or f"{text} (HTTP {reply.status})")
