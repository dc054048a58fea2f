"""The HTTP client against real servers on this machine, good ones and bad ones."""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from dlrover_py.net.http_client import (
    HttpClient,
    OtherProgramError,
    check_address,
    enable_keepalive,
)
from dlrover_py.protocol import proof
from dlrover_py.protocol.agents import ErrorReply
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    SupersededError,
    TransientError,
    UnauthorizedError,
    UnreachableError,
)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SOON = 60.0


class Server:
    """Plays a server; each connection is handed to ``talk``, and counted."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.connections = 0
        self.requests: list[bytes] = []
        self.address = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def serving(talk: Talk, *, unix: str = "") -> AsyncIterator[Server]:
    server = Server(talk)
    if unix:
        listener = await asyncio.start_unix_server(server.connected, unix)
        server.address = f"unix:{unix}"
    else:
        listener = await asyncio.start_server(server.connected, "127.0.0.1", 0)
        server.address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await server.stop()


@contextlib.asynccontextmanager
async def calling(address: str, *, token: str = "") -> AsyncIterator[HttpClient]:
    client = HttpClient(address, token=token)
    try:
        yield client
    finally:
        client.close()
        await asyncio.sleep(0)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return head, await reader.readexactly(length)


def reply(body: bytes = b"{}", status: str = "200 OK", headers: bytes = b"") -> bytes:
    head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n" % (status.encode(), len(body))
    return head + headers + b"\r\n" + body


def answering(*replies: bytes, forever: bool = False) -> Talk:
    """Answers the requests of a connection in order, then closes it."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            for data in replies:
                await read_request(reader)
                writer.write(data)
                await writer.drain()
            if not forever:
                return

    return talk


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads and never says a word."""
    while await reader.read(65536):
        pass


# --- what works ---


async def test_a_request_is_whole_and_its_reply_is_returned() -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(reply(b"pong"))

    async with serving(talk) as server, calling(server.address, token="s3cret") as client:
        assert await client.call("POST", "/v1/x?y=1", b'{"a": 1}', deadline_s=SOON) == b"pong"
    ((head, body),) = seen
    assert head.startswith(b"POST /v1/x?y=1 HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer s3cret\r\n" in head
    assert body == b'{"a": 1}'


async def test_without_a_token_none_is_sent() -> None:
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append((await read_request(reader))[0])
        writer.write(reply())

    async with serving(talk) as server, calling(server.address) as client:
        await client.call("GET", "/", deadline_s=SOON)
    assert b"authorization" not in seen[0].lower()


async def test_a_connection_is_used_again() -> None:
    talk = answering(reply(b"x"), forever=True)
    async with serving(talk) as server, calling(server.address) as client:
        for _ in range(5):
            assert await client.call("GET", "/", deadline_s=SOON) == b"x"
        assert server.connections == 1


async def test_calls_at_the_same_time_have_a_connection_each_and_both_are_kept() -> None:
    both = asyncio.Event()
    waiting = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting
        while True:
            head, _ = await read_request(reader)
            waiting += 1
            if waiting == 2:
                both.set()
            await both.wait()
            writer.write(reply(head.split()[1]))

    async with serving(talk) as server, calling(server.address) as client:
        calls = [client.call("GET", path, deadline_s=SOON) for path in ("/a", "/b")]
        assert await asyncio.gather(*calls) == [b"/a", b"/b"]
        calls = [client.call("GET", path, deadline_s=SOON) for path in ("/c", "/d")]
        assert await asyncio.gather(*calls) == [b"/c", b"/d"]
        assert server.connections == 2


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\npo\r\n2\r\nng\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\npong",  # ends with the connection
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npong",
        b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\npong",
    ],
    ids=["chunked", "until closed", "100 first", "HTTP/1.0"],
)
async def test_forms_of_a_reply(data: bytes) -> None:
    async with serving(answering(data)) as server, calling(server.address) as client:
        for _ in range(2):
            assert await client.call("GET", "/", deadline_s=SOON) == b"pong"


async def test_a_reply_may_come_byte_by_byte() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in reply(b"pong"):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(talk) as server, calling(server.address) as client:
        assert await client.call("GET", "/", deadline_s=SOON) == b"pong"


async def test_a_unix_socket() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/s.sock"
        talk = answering(reply(b"x"))
        async with serving(talk, unix=path) as server, calling(server.address) as client:
            assert await client.call("GET", "/", deadline_s=SOON) == b"x"
        async with calling(f"unix:{folder}/missing") as client:
            with pytest.raises(UnreachableError, match="missing"):
                await client.call("GET", "/", deadline_s=SOON)


# --- connections that break ---


async def test_an_idle_connection_that_the_server_closed_is_not_used_again() -> None:
    async with serving(answering(reply(b"x"))) as server, calling(server.address) as client:
        for n in range(1, 4):
            assert await client.call("GET", "/", deadline_s=SOON) == b"x"
            assert server.connections == n


async def test_a_request_that_met_a_closing_connection_is_sent_again_on_a_fresh_one() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(reply(b"x"))
        await read_request(reader)  # it closes when the next request is already on its way

    async with serving(talk) as server, calling(server.address) as client:
        for n in range(1, 4):
            assert await client.call("GET", "/", deadline_s=SOON) == b"x"
            assert server.connections == n


async def test_a_connection_that_is_not_made_is_given_up_before_the_deadline() -> None:
    """As one that leads to a Pod that is gone: another try goes elsewhere."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = []
    try:
        for _ in range(4):  # a queue that nobody takes from: the kernel answers no more
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(full.getsockname())
        async with calling(f"127.0.0.1:{full.getsockname()[1]}") as client:
            with pytest.raises(UnreachableError, match="no connection within 1 s"):
                await client.call("GET", "/", deadline_s=60.0)
    finally:
        for each in [full, *waiting]:
            each.close()


@pytest.mark.parametrize("path", ["/v1/nodes/a b", "/v1/nodes/é", "/v1/nodes/a\r\nX: y"])
async def test_a_path_that_no_request_can_have_is_refused_before_anything_is_sent(
    path: str,
) -> None:
    async with serving(answering(reply())) as server, calling(server.address) as client:
        with pytest.raises(ConfigError, match="expected a path of ASCII characters"):
            await client.call("GET", path, deadline_s=5.0)
        with pytest.raises(ConfigError, match="expected a path of ASCII characters"):
            [line async for line in client.lines(path)]
        assert server.connections == 0


async def test_a_token_that_no_request_can_have_is_not_shown() -> None:
    async with calling("127.0.0.1:1", token="se\ncret") as client:
        with pytest.raises(ConfigError, match="and a token") as refused:
            await client.call("GET", "/", deadline_s=5.0)
    assert "cret" not in str(refused.value)


async def test_nobody_there() -> None:
    async with serving(silent) as server:
        gone = server.address
    async with calling(gone) as client:
        with pytest.raises(UnreachableError, match=gone) as caught:
            await client.call("GET", "/", deadline_s=SOON)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhal",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
    ],
    ids=lambda data: data[:24].decode("ascii", "replace") or "nothing",
)
async def test_a_broken_reply_is_unreachable_and_does_no_harm_to_the_next_call(data: bytes) -> None:
    broken = True

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(data if broken else reply(b"x"))
        await writer.drain()

    async with serving(talk) as server, calling(server.address) as client:
        with pytest.raises(UnreachableError, match=server.address):
            await client.call("GET", "/", deadline_s=SOON)
        assert server.connections == 1, "a fresh connection that broke is not tried again"
        broken = False
        assert await client.call("GET", "/", deadline_s=SOON) == b"x"


@pytest.mark.parametrize("endless", [False, True])
async def test_an_answer_without_an_end_takes_no_memory(endless: bool) -> None:
    """Whoever has taken the port of a master sent 1.7 GB within the deadline of one call."""
    most = 100_000

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with serving(talk) as server, calling(server.address) as client:
        asked = (
            anext(client.lines("/", max_bytes=most))
            if endless
            else client.call("GET", "/", deadline_s=SOON, max_bytes=most)
        )
        with pytest.raises(UnreachableError, match="the answer is too large"):
            await asked


async def test_a_request_with_a_large_answer_is_sent_once() -> None:
    """On an idle connection it was sent again: what it asks for was done twice."""
    requests = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while True:
            await read_request(reader)
            requests += 1
            size = 1 if requests == 1 else 5000
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)

    async with serving(talk) as server, calling(server.address) as client:
        await client.call("POST", "/", b"1", deadline_s=SOON)
        with pytest.raises(UnreachableError, match="the answer is too large"):
            await client.call("POST", "/", b"2", deadline_s=SOON, max_bytes=100)
    assert requests == 2


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhal"])
async def test_the_deadline_holds(said: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(said)
        await silent(reader, writer)

    async with serving(talk) as server, calling(server.address) as client:
        started = asyncio.get_running_loop().time()
        with pytest.raises(UnreachableError, match=r"no answer within 0.2 s"):
            await client.call("GET", "/", deadline_s=0.2)
        assert asyncio.get_running_loop().time() - started < SOON


async def test_a_connection_on_which_a_deadline_passed_is_not_used_again() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        if head.startswith(b"GET /slow"):
            await silent(reader, writer)  # until the caller hangs up
            late.set()
        writer.write(reply(head.split()[1]))

    late = asyncio.Event()
    async with serving(talk) as server, calling(server.address) as client:
        with pytest.raises(UnreachableError):
            await client.call("GET", "/slow", deadline_s=0.1)
        async with asyncio.timeout(SOON):
            await late.wait()
        assert await client.call("GET", "/quick", deadline_s=SOON) == b"/quick"


# --- what a server says ---


def said(code: str, message: str = "because") -> bytes:
    return ErrorReply(code=code, message=message).model_dump_json().encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        ("401 Unauthorized", said("unauthorized"), UnauthorizedError, "because"),
        ("401 Unauthorized", b"", UnauthorizedError, ""),
        ("409 Conflict", said("superseded"), SupersededError, "because"),
        ("503 Service Unavailable", said("passive"), TransientError, "because"),
        ("500 Internal Server Error", b"oops", TransientError, "oops"),
        ("502 Bad Gateway", b"<html>\xff</html>", TransientError, "<html>"),
        ("422 Unprocessable Entity", said("invalid"), ConfigError, "because"),
        ("413 Content Too Large", said("too_large"), ConfigError, "because"),
        ("404 Not Found", b'{"detail":"Not Found"}', OtherProgramError, "Not Found"),
        ("404 Not Found", b"", OtherProgramError, "HTTP 404"),
        ("204 No Content", b"", OtherProgramError, "HTTP 204"),
        ("302 Found", b"", OtherProgramError, "HTTP 302"),
    ],
)
async def test_each_error_has_its_exception(
    status: str, body: bytes, kind: type[DLRoverError], text: str
) -> None:
    data = reply(body, status)
    if status.startswith("204"):
        data = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with serving(answering(data, reply(b"x"))) as server, calling(server.address) as client:
        with pytest.raises(kind) as caught:
            await client.call("GET", "/", deadline_s=SOON)
        assert type(caught.value) is kind
        assert text in str(caught.value)
        assert await client.call("GET", "/", deadline_s=SOON) == b"x"
        assert server.connections == 1, "an error is a whole reply: the connection is good"


async def test_the_page_of_another_program_is_called_so_on_one_line() -> None:
    page = b"<!DOCTYPE HTML>\n<html>\n<h1>Error response\x1b[1m</h1>\n"
    data = reply(page, "404 Not Found")
    async with serving(answering(data)) as server, calling(server.address) as client:
        with pytest.raises(ConfigError) as caught:
            await client.call("POST", "/v1/nodes/n0/exchange", deadline_s=SOON)
    text = str(caught.value)
    assert text.isprintable()
    assert text.startswith(f"{server.address}: HTTP 404: <!DOCTYPE HTML> <html>")
    assert "another program answers there" in text


async def test_what_a_server_says_is_cut() -> None:
    data = reply(b"x" * 100_000, "500 Internal Server Error")
    async with serving(answering(data)) as server, calling(server.address) as client:
        with pytest.raises(TransientError) as caught:
            await client.call("GET", "/", deadline_s=SOON)
    assert len(str(caught.value)) < 300


# --- endless replies ---


def streaming(*parts: bytes, end: bytes = b"") -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.write(end)

    return talk


async def test_lines_come_as_they_are_written() -> None:
    more = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\none\ntw\r\n")
        await more.wait()
        writer.write(b"2\r\no\n\r\n0\r\n\r\n")

    async with serving(talk) as server, calling(server.address) as client:
        lines = client.lines("/v1/watch")
        async with asyncio.timeout(SOON):
            assert await anext(lines) == b"one"
            more.set()
            assert [line async for line in lines] == [b"two"]


async def test_lines_of_any_cut() -> None:
    text = b"alpha\nbeta\n\n" + b"x" * 100_000 + b"\nlast\n"
    parts = [text[i : i + 7919] for i in range(0, len(text), 7919)]
    talk = streaming(*parts, end=b"0\r\n\r\n")
    async with serving(talk) as server, calling(server.address) as client:
        assert b"\n".join([line async for line in client.lines("/")]) + b"\n" == text


@pytest.mark.parametrize("end", [b"", b"zz\r\n"], ids=["closed", "garbage"])
async def test_lines_that_break_off_say_so_after_the_whole_ones(end: bytes) -> None:
    talk = streaming(b"one\ntwo\nthr", end=end)
    async with serving(talk) as server, calling(server.address) as client:
        lines = client.lines("/")
        assert [await anext(lines), await anext(lines)] == [b"one", b"two"]
        with pytest.raises(UnreachableError, match=server.address):
            await anext(lines)


async def test_lines_that_are_refused() -> None:
    data = reply(said("unauthorized") + b"\n", "401 Unauthorized")
    async with serving(answering(data)) as server, calling(server.address) as client:
        with pytest.raises(UnauthorizedError, match="because"):
            [line async for line in client.lines("/")]


async def test_lines_of_nobody() -> None:
    async with calling("unix:/nonexistent/x.sock") as client:
        with pytest.raises(UnreachableError, match=r"/nonexistent/x\.sock"):
            [line async for line in client.lines("/")]


# --- addresses ---


@pytest.mark.parametrize(
    "address", ["10.0.0.7:50001", "master.job.svc:1", "[::1]:65535", "unix:/run/x.sock"]
)
def test_good_addresses(address: str) -> None:
    # no assert: a refused address raises
    check_address(address)


@pytest.mark.parametrize(
    "address",
    ["", "host", ":1", "host:", "host:0", "host:65536", "host:x", "host:-1", "unix:", "unix:x"],
)
def test_bad_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="expected host:port"):
        check_address(address)


@pytest.mark.parametrize("silence_s", [0.1, 5.0, 86400.0])
def test_any_silence_is_one_that_the_kernel_can_watch(silence_s: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        enable_keepalive(server, silence_s)
        idle, every, probes = (
            server.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        wished = max(2, round(silence_s))
        assert wished - probes < idle + every * probes <= wished


# --- the proof of a master, before the token is sent ---


def proving(seen: list[bytes], *, token: str, where: str = "", status: str = "200 OK") -> Talk:
    """Answer each request for a proof with the proof by a token, and others with ``pong``."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, _ = await read_request(reader)
            seen.append(head)
            body = b"pong"
            if b"nonce=" in head:
                nonce = head.partition(b"nonce=")[2].partition(b" ")[0].decode()
                at = where or proof.connection_address(*writer.get_extra_info("sockname"))
                body = f'"{proof.master_proof(token, nonce, at)}"'.encode()
            writer.write(reply(body, status))
            await writer.drain()

    return talk


async def test_the_token_is_sent_after_the_proof_alone() -> None:
    seen: list[bytes] = []
    async with serving(proving(seen, token="s3cret")) as server:
        client = HttpClient(server.address, token="s3cret", asks_proof=True)
        for _ in range(2):
            assert await client.call("GET", "/v1/x", deadline_s=SOON) == b"pong"
        client.close()
        assert await client.call("GET", "/v1/x", deadline_s=SOON) == b"pong"
        client.close()
    asked = [b"nonce=" in head for head in seen]
    assert asked == [True, False, False, True, False], "once on each connection"
    assert [b"Bearer s3cret" in head for head in seen] == [not a for a in asked]
    assert len({head for head in seen if b"nonce=" in head}) == 2


@pytest.mark.parametrize(
    "talk",
    [
        lambda seen: proving(seen, token="of another job"),
        lambda seen: proving(seen, token="s3cret", where="127.0.0.1:1"),
        lambda seen: proving(seen, token="of another job", status="401 Unauthorized"),
        lambda seen: proving(seen, token="of another job", status="404 Not Found"),
    ],
)
async def test_a_program_without_the_proof_does_not_get_the_token(
    talk: Callable[[list[bytes]], Talk],
) -> None:
    """It knows another token, has asked a master at another address, or knows no proof."""
    seen: list[bytes] = []
    async with serving(talk(seen)) as server:
        client = HttpClient(server.address, token="s3cret", asks_proof=True)
        with pytest.raises(UnauthorizedError, match="is not the master of this job") as refused:
            await client.call("GET", "/v1/x", deadline_s=SOON)
        assert server.address in str(refused.value)
        client.close()
    assert len(seen) == 1
    assert b"s3cret" not in seen[0]
    assert b"authorization" not in seen[0].lower()


def test_both_ends_see_the_same_place() -> None:
    address = proof.connection_address
    assert address("::ffff:127.0.0.1", 7) == address("127.0.0.1", 7) == "127.0.0.1:7"
    assert address("10.0.0.1", 7) == address("fe80::1", 7) == ":7", "may be translated"
    assert address("::1", 7) == "::1:7"


async def test_a_call_takes_no_larger_reply_than_its_limit() -> None:
    talk = answering(reply(b"x" * 101), forever=True)
    async with serving(talk) as server, calling(server.address) as client:
        with pytest.raises(UnreachableError, match="expected at most 100 bytes"):
            await client.call("GET", "/", deadline_s=SOON, max_bytes=100)
        assert len(await client.call("GET", "/", deadline_s=SOON, max_bytes=101)) == 101
