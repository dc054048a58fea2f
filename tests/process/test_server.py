"""A real master, and callers that do all wrong: over raw sockets, as nobody's client would."""

import asyncio
import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from dlrover_py.master.app import listen
from dlrover_py.master.core.events import Event, NodeSeen, Rules
from dlrover_py.master.exchange import Exchanges, server
from dlrover_py.master.journal_store import FileJournalStore
from dlrover_py.master.loop import Clock, Loop, ReplyCallback
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.master.server import job_app
from dlrover_py.master.settings import Settings
from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    Directive,
    ErrorReply,
    JobName,
    WorkerPhase,
)
from dlrover_py.protocol.errors import ConfigError, UnauthorizedError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import MasterPorts
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import JobStatus
from tests.loops import working
from tests.process.harness import SLEEPER, Place, alive, document, eventually

TOKEN = "correct-horse-battery-staple"
MAX_BODY = 4096
HEADER_S = 1.0
JOB = json.dumps(document(["true"], name="alone"))
SOON = 20.0


@dataclass
class Reply:
    """One reply, as it came over the wire."""

    status: int
    head: str
    body: bytes

    @property
    def error(self) -> ErrorReply:
        return ErrorReply.model_validate_json(self.body)


@dataclass
class Master:
    """A master that runs, and where it listens."""

    process: "subprocess.Popen[str]"
    job: int
    health: int
    log: Path

    def connect(self, port: int | None = None) -> socket.socket:
        return socket.create_connection(("127.0.0.1", port or self.job), timeout=SOON)

    def send(self, data: bytes, *, port: int | None = None) -> Reply:
        """Send bytes on a fresh connection; return the first reply."""
        with self.connect(port) as sock:
            sock.sendall(data)
            return read_reply(sock)

    def ask(
        self,
        method: str = "GET",
        path: str = "/v1/job",
        body: bytes = b"",
        *,
        auth: str | None = f"Bearer {TOKEN}",
        port: int | None = None,
    ) -> Reply:
        return self.send(request(method, path, body, auth=auth), port=port)

    def exchange(self, body: bytes | dict[str, Any], node: str = "n0") -> Reply:
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return self.ask("POST", f"/v1/nodes/{node}/exchange", data)

    def metric(self, name: str) -> float:
        text = self.ask(path="/metrics", auth=None, port=self.health).body.decode()
        found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in\n{text}"
        return float(found[1])


def request(
    method: str, path: str, body: bytes = b"", *, auth: str | None, length: int | None = None
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(body) if length is None else length}\r\n"
    head += "" if auth is None else f"Authorization: {auth}\r\n"
    return head.encode() + b"\r\n" + body


def read_reply(sock: socket.socket, *, exactly: bool = False) -> Reply:
    """Read one reply; fails if the connection closes before.

    Args:
        sock: the connection.
        exactly: leave what comes after it unread.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(1 if exactly else 65536)
        assert more, f"closed after {data!r}"
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head.lower())
    while found and len(body) < int(found[1]):
        more = sock.recv(int(found[1]) - len(body) if exactly else 65536)
        assert more, "closed in the body"
        body += more
    return Reply(int(head.split()[1]), head.decode(), body)


def readable(sock: socket.socket) -> bool:
    """Whether something, or its end, has come."""
    return bool(select.select([sock], [], [], 0)[0])


def closed(sock: socket.socket) -> bool:
    """Read to the end: true once the other side has closed."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


def report(**fields: Any) -> dict[str, Any]:
    whole = {
        "boot_id": "b" * 16,
        "seq": 1,
        "offer": {"addr": "127.0.0.1", "port": 4000},
        "max_restarts": 0,
    }
    return whole | fields


@contextlib.contextmanager
def running_master(place: Place, **settings: str) -> Iterator[Master]:
    token = place.folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    read, write = os.pipe()
    log = place.folder / "master.log"
    argv = ["python", "-m", "dlrover_py.master", "--static", JOB, "--token-file", str(token)]
    argv += ["--state-dir", str(place.folder / "state"), "--announce-fd", str(write)]
    env = {f"DLROVER_MASTER_{k.upper()}": v for k, v in settings.items()}
    with log.open("w") as out:
        process = place.popen(*argv, env=env, stdout=out, stderr=out, pass_fds=[write])
    os.close(write)
    try:
        with open(read) as pipe:
            line = pipe.readline()
        assert line, log.read_text()
        ports = MasterPorts.model_validate_json(line)
        master = Master(process, ports.job, ports.health, log)
        eventually(lambda: readiness(master) == 200, "the master is ready")
        yield master
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    text = log.read_text()
    assert "Traceback" not in text, text
    assert TOKEN not in text


def readiness(master: Master) -> int:
    try:
        return master.ask(path="/readyz", auth=None, port=master.health).status
    except ConnectionError:
        return 0


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    """One master for all tests here: none of them may hurt it."""
    place = Place()
    settings = {
        "max_body_bytes": str(MAX_BODY),
        "header_s": str(HEADER_S),
        "exchange_s": "0.2",
        "lease_s": "60",
    }
    try:
        with running_master(place, **settings) as master:
            yield master
    finally:
        place.close()


@pytest.fixture(autouse=True)
def unharmed(master: Master) -> Iterator[None]:
    """Whatever a test did, the next caller is served."""
    yield
    assert alive(master.process.pid)
    status = JobStatus.model_validate_json(master.ask().body)
    assert status.name == "alone"


# --- the token ---

NEVER = ["no-such-token", TOKEN[:-1], TOKEN + "x", TOKEN.upper()]


@pytest.mark.parametrize(
    "auth",
    [None, "", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"bearer {TOKEN}", "Bearer \xff"]
    + [f"Bearer {wrong}" for wrong in NEVER],
)
def test_without_the_token_nothing_is_told_and_it_is_counted(
    master: Master, auth: str | None
) -> None:
    before = master.metric("dlrover_unauthorized_requests_total")
    paths = [
        ("GET", "/v1/job"),
        ("POST", "/v1/nodes/n0/exchange"),
        ("GET", "/no/such/path"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/metrics"),
        ("OPTIONS", "/v1/job"),
    ]
    replies = [master.ask(method, path, b"{}", auth=auth) for method, path in paths]
    for reply in replies:
        assert reply.status == 401
        assert "www-authenticate: bearer" in reply.head.lower()
        assert reply.error.code == "unauthorized"
        assert reply.body == replies[0].body, "it does not tell which paths there are"
        assert TOKEN.encode() not in reply.body + reply.head.encode()
        assert TOKEN[:6].encode() not in reply.body
    after = master.metric("dlrover_unauthorized_requests_total")
    assert after - before == len(paths)


def test_a_wrong_token_beats_all_other_faults(master: Master) -> None:
    body = b"x" * (MAX_BODY + 1)
    assert master.ask("POST", "/v1/nodes/n0/exchange", body, auth="Bearer x").status == 401


def test_the_token_is_in_no_command_line_environment_or_file_but_its_own(master: Master) -> None:
    proc = Path("/proc") / str(master.process.pid)
    assert TOKEN.encode() not in (proc / "cmdline").read_bytes()
    assert TOKEN.encode() not in (proc / "environ").read_bytes()
    for path in master.log.parent.rglob("*"):
        if path.is_file() and path.name != "token":
            assert TOKEN.encode() not in path.read_bytes(), path


async def test_our_client_says_that_the_token_is_wrong(master: Master) -> None:
    client = HttpClient(f"127.0.0.1:{master.job}", token="x" * 20)
    with pytest.raises(UnauthorizedError, match="the request needs the job's token"):
        await client.call("GET", "/v1/job", deadline_s=SOON)
    client.close()
    await asyncio.sleep(0)


# --- health and metrics, without the token ---


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_is_told_to_everybody(master: Master, path: str) -> None:
    reply = master.ask(path=path, auth=None, port=master.health)
    assert (reply.status, reply.body) == (200, b"ok")


def test_metrics_are_told_to_everybody_and_hold_no_secret(master: Master) -> None:
    reply = master.ask(path="/metrics", auth=None, port=master.health)
    assert reply.status == 200
    assert "text/plain" in reply.head
    assert TOKEN.encode() not in reply.body
    assert master.metric("dlrover_master_ready") == 1
    assert master.metric("dlrover_journal_writable") == 1
    assert master.metric("dlrover_term") == 1


@pytest.mark.parametrize("path", ["/v1/job", "/v1/nodes/n0/exchange", "/docs", "/openapi.json"])
def test_the_health_port_tells_nothing_else(master: Master, path: str) -> None:
    for auth in (None, f"Bearer {TOKEN}"):
        assert master.ask(path=path, auth=auth, port=master.health).status == 404


# --- paths and ids ---


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/job", 404),
        ("GET", "/v1/job/x", 404),
        ("POST", "/v1/nodes//exchange", 404),
        ("POST", "/v1/nodes/a/b/exchange", 404),
        ("POST", "/v1/nodes/..%2fx/exchange", 404),
        ("POST", "/v1/job", 405),
        ("GET", "/v1/nodes/n0/exchange", 405),
    ],
)
def test_unknown_paths(master: Master, method: str, path: str, status: int) -> None:
    reply = master.ask(method, path, b"{}")
    assert reply.status == status
    if status == 404:
        assert reply.error.code == "not_found"


async def test_an_agent_of_another_version_is_refused_in_words(master: Master) -> None:
    client = HttpClient(f"127.0.0.1:{master.job}", token=TOKEN)
    words = "the request has version 2: expected version 1; use the same release"
    for method in ("GET", "POST"):
        with pytest.raises(ConfigError, match=words):
            await client.call(method, "/v2/nodes/n0/exchange", b"{}", deadline_s=SOON)
    client.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("node", ["N0", "-n0", "n0-", "n_0", "n%200", "n%00", "%c3%a9", "n" * 254])
def test_a_bad_node_id(master: Master, node: str) -> None:
    reply = master.exchange(report(), node)
    assert reply.status == 422
    assert reply.error.code == "invalid"
    assert reply.error.message.startswith("path.node_id: found text ")
    assert "pattern" in reply.error.message


# --- bodies ---


def test_a_good_report_is_answered(master: Master) -> None:
    reply = master.exchange(report(boot_id="a" * 16, invented_later=[1, 2]), "good")
    assert reply.status == 200, reply.body
    answer = Assignment.model_validate_json(reply.body)
    assert answer.directive in (Directive.RUN, Directive.WAIT)
    assert answer.incarnation == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "report: found bytes b'': invalid JSON"),
        (b"{", "report: found bytes b'{': invalid JSON"),
        (b"\xff\xfe", "report: found"),
        (b"[]", "report: found a list []: expected a mapping"),
        (b"null", "report: found nothing: expected a mapping"),
        (b"{}", "report.boot_id: missing"),
        (
            report(boot_id="short"),
            "report.boot_id: found text 'short': string should have at least",
        ),
        (report(seq=-1), "report.seq: found a number -1: input should be greater than or equal to"),
        (report(seq="many"), "report.seq: found text 'many': input should be a valid integer"),
        (report(seq=2**60), "report.seq: found a number"),
        (report(offer={"addr": "x", "port": 0}), "report.offer.port: found a number 0"),
        (report(offer=None), "report.offer: found nothing:"),
        (report(phase="asleep"), "report.phase: found text 'asleep': input should be 'idle'"),
        (report(nproc=5000), "report.nproc: found a number 5000: input should be less than"),
        (report(pids=[1, "x"]), "report.pids[1]: found text 'x'"),
        (report(boot_id="x" * 1500), "report.boot_id: found text 'xxx"),
        (report(progress={"step": 1}), "report.progress.started_at_step: missing"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_a_malformed_report_is_told_what_was_found_and_expected(
    master: Master, body: bytes | dict[str, Any], words: str
) -> None:
    reply = master.exchange(body)
    assert reply.status == 422
    assert reply.error.code == "invalid"
    assert words in reply.error.message
    assert len(reply.error.message) < 500, "it does not repeat what it was sent"


def test_a_body_of_the_largest_size_is_taken_and_one_byte_more_is_not(master: Master) -> None:
    exact = json.dumps(report()).encode().ljust(MAX_BODY)
    assert master.exchange(exact, "exact").status == 200
    reply = master.exchange(exact + b" ", "exact")
    assert reply.status == 413
    assert reply.error.code == "too_large"
    assert f"at most {MAX_BODY} bytes" in reply.error.message


def test_a_large_body_is_refused_before_it_is_read(master: Master) -> None:
    head = request("POST", "/v1/nodes/n0/exchange", auth=f"Bearer {TOKEN}", length=10**12)
    with master.connect() as sock:
        sock.sendall(head)
        assert read_reply(sock).status == 413


@pytest.mark.parametrize(
    "body",
    [
        report(boot_id="b" * 16),
        report(boot_id="d" * 16, incarnation=7),
        report(nproc=0),
        b"",
        b"{",
        b" " * (MAX_BODY + 1),
    ],
    ids=["good", "superseded", "invalid", "empty", "torn", "large"],
)
def test_the_direct_road_and_the_other_say_the_same(
    master: Master, body: bytes | dict[str, Any]
) -> None:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    path, auth = "/v1/nodes/roads/exchange", f"Bearer {TOKEN}"
    assert master.ask("POST", path, json.dumps(report(boot_id="b" * 16)).encode()).status == 200
    plain = request("POST", path, data, auth=auth)
    other = plain.replace(b"\r\n", b"\r\nConnection: keep-alive\r\n", 1)
    one, two = master.send(plain), master.send(other)
    assert (one.status, one.body) == (two.status, two.body)
    assert [head_lines(one), head_lines(two)] == [head_lines(one)] * 2


def head_lines(reply: Reply) -> set[str]:
    """The date may have changed, and the order says nothing."""
    lines = reply.head.lower().split("\r\n")
    return {line for line in lines if not line.startswith("date:")}


def test_requests_that_do_not_wait_for_their_replies_are_answered_in_order(master: Master) -> None:
    """On one connection: exchanges on the direct road, and a call on the other in between."""
    path, auth = "/v1/nodes/eager/exchange", f"Bearer {TOKEN}"
    seen = json.dumps(report(boot_id="c" * 16)).encode()
    first = Assignment.model_validate_json(master.ask("POST", path, seen).body)
    have = {"have_term": first.term, "have_version": first.version, "incarnation": 1}
    held = json.dumps(report(boot_id="c" * 16, seq=2, **have)).encode()
    asked = request("POST", path, held, auth=auth)
    asked += request("GET", "/v1/job", auth=auth)
    asked += request("POST", path, b"{", auth=auth)
    with master.connect() as sock:
        sock.sendall(asked)
        replies = [read_reply(sock, exactly=True) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 422]
    assert Assignment.model_validate_json(replies[0].body).version == first.version
    assert JobStatus.model_validate_json(replies[1].body).name == "alone"


def chunked(*chunks: bytes) -> bytes:
    head = (
        f"POST /v1/nodes/chunks/exchange HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    )
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + body


def test_a_body_in_chunks_is_taken_up_to_the_limit(master: Master) -> None:
    data = json.dumps(report()).encode()
    assert master.send(chunked(data[:20], data[20:], b"")).status == 200
    with master.connect() as sock:
        sock.sendall(chunked(b" " * (MAX_BODY // 2), b" " * (MAX_BODY // 2), b" "))
        reply = read_reply(sock)  # although its end has not come
        assert reply.status == 413
        assert reply.error.code == "too_large"


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_and_hung_up_on(master: Master, data: bytes) -> None:
    with master.connect() as sock:
        sock.sendall(data)
        assert read_reply(sock).status in (400, 401)
        if data[0] != ord("P"):
            assert closed(sock)


LARGE = 1_000_000
"""Bytes of a head: more than is ever taken. The first read of one may have 256 kB."""


def refused(sock: socket.socket) -> bool:
    """Read to the end: true if there is an answer, or the other side left much unread."""
    data = b""
    try:
        while more := sock.recv(65536):
            data += more
    except ConnectionResetError:
        return True
    return data.startswith(b"HTTP/1.1 400 ") and b"expected at most 65536 bytes" in data


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nX: " + b"a" * LARGE,
        b"GET / HTTP/1.1\r\n" + b"X-Abc: 1\r\n" * (LARGE // 10),
        b"GET /" + b"a" * LARGE,
    ],
    ids=["a long value", "many fields", "a long path"],
)
def test_a_head_without_an_end_is_refused_before_it_takes_memory(
    master: Master, said: bytes
) -> None:
    """No token is needed to send one: ten seconds of it cost 1.1 GB, and held up all agents."""
    for port in (master.job, master.health):
        with master.connect(port) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
            assert refused(sock)


def test_fields_behind_a_body_are_limited_as_those_before_it(master: Master) -> None:
    begun = b"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for port in (master.job, master.health):
        with master.connect(port) as sock:
            sock.sendall(begun)
            assert read_reply(sock).status in (401, 405)
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"0\r\n" + b"X-Abc: 1\r\n" * (LARGE // 10))
            assert refused(sock)


# --- callers that stop in the middle ---


def test_a_connection_without_a_whole_head_is_closed(master: Master) -> None:
    whole = request("GET", "/v1/job", auth=f"Bearer {TOKEN}")
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        silent = []
        for port in (master.job, master.health):
            for said in (b"", b"G", b"GET / HTTP/1.1\r\nX: y\r\n"):
                silent.append(stack.enter_context(master.connect(port)))
                silent[-1].sendall(said)
        second = stack.enter_context(master.connect())
        second.sendall(whole)
        assert read_reply(second).status == 200
        second.sendall(whole[:30])  # half a head after a good request
        for sock in [*silent, second] if time.monotonic() - began < HEADER_S / 2 else ():
            assert not readable(sock), "it is given some time"
        for sock in [*silent, second]:
            assert closed(sock)


def test_a_caller_that_is_answered_and_says_no_more_than_a_byte_is_left(master: Master) -> None:
    """uvicorn's own patience after an answer ends with any byte, whatever it belongs to."""
    early = b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
    with contextlib.ExitStack() as stack:
        held = []
        for port in (master.job, master.health):
            for said, more in ((early, b"x"), (request("GET", "/healthz", auth=None), b"\r\n")):
                held.append(stack.enter_context(master.connect(port)))
                held[-1].sendall(said)
                assert read_reply(held[-1]).status in (200, 401, 405)
                held[-1].sendall(more)
        kept = stack.enter_context(master.connect())
        kept.sendall(request("GET", "/v1/job", auth=f"Bearer {TOKEN}"))
        assert read_reply(kept).status == 200
        for sock in held:
            assert closed(sock)
        assert not readable(kept), "an agent's connection is kept between two exchanges"


def test_half_a_body_is_waited_for_only_so_long(master: Master) -> None:
    data = json.dumps(report()).encode()
    whole = request("POST", "/v1/nodes/half/exchange", data, auth=f"Bearer {TOKEN}")
    with master.connect() as sock:
        sock.sendall(whole[:-10])
        reply = read_reply(sock)
        assert reply.status == 408
        assert (
            f"the body of the request was not complete within {HEADER_S:g} s" in reply.error.message
        )
        assert closed(sock)


def test_a_caller_that_leaves_in_the_middle_of_its_body_or_of_the_answer(master: Master) -> None:
    data = json.dumps(report(seq=7)).encode()
    whole = request("POST", "/v1/nodes/leaver/exchange", data, auth=f"Bearer {TOKEN}")
    for cut in (len(whole) - 10, len(whole)):
        with master.connect() as sock:
            sock.sendall(whole[:cut])
    # That it left no trace in the log is seen when the master ends.
    assert master.exchange(report(seq=8), "leaver").status == 200


# --- a master that cannot start ---


def test_a_master_that_cannot_start_says_why_and_exits_2(place: Place) -> None:
    token, torn = place.folder / "token", place.folder / "torn"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    torn.mkdir()
    (torn / "journal.json").write_bytes(b"\xff not a journal")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cases: list[tuple[dict[str, str], str]] = [
            ({"--listen": address}, f"cannot listen on {address}: Address already in use"),
            ({"--token-file": "/no/token"}, "token file /no/token: No such file"),
            ({"--state-dir": str(torn)}, "journal.json: not a journal of this version"),
            ({"LEASE_S": "soon"}, "DLROVER_MASTER_*.lease_s: found text 'soon'"),
        ]
        started = [cannot_start(place, token, change) for change, _ in cases]
        for (change, words), process in zip(cases, started, strict=True):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 2, (change, err)
            assert err.splitlines()[-1].startswith("dlrover-master: "), (change, err)
            assert words in err, (change, err)
            assert "Traceback" not in err
            assert TOKEN not in out + err


def cannot_start(place: Place, token: Path, change: dict[str, str]) -> "subprocess.Popen[str]":
    flags = {
        "--listen": "127.0.0.1:0",
        "--token-file": str(token),
        "--state-dir": str(place.folder / "state"),
    }
    flags |= {k: v for k, v in change.items() if k.startswith("--")}
    env = {f"DLROVER_MASTER_{k}": v for k, v in change.items() if not k.startswith("--")}
    argv = [word for pair in flags.items() for word in pair]
    return place.popen(
        "python",
        *("-m", "dlrover_py.master", "--static", JOB, *argv),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:-1", "127.0.0.1:x", "no.such.host.:80"]
)
def test_an_address_that_makes_no_sense(address: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on {address}: .+ expected a free host"):
        listen(address)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"LEASE_S": "1", "EXCHANGE_S": "1"}, "expected a lease of at least two exchanges"),
        ({"LEASE_S": "-1"}, "DLROVER_MASTER_*.lease_s: found text '-1': input should be greater"),
        ({"LEASES": "1"}, "DLROVER_MASTER_*.leases: unknown field"),
        ({"MAX_BODY_BYTES": "0"}, "DLROVER_MASTER_*.max_body_bytes: found text '0'"),
    ],
)
def test_settings_that_cannot_be_used(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_environment({f"DLROVER_MASTER_{k}": v for k, v in environ.items()})
    assert words in str(caught.value)


# --- the end of a job without a platform ---


def test_next_master_tells_the_members_of_an_ended_job_and_nobody_else(place: Place) -> None:
    def told(master: Master, **fields: Any) -> Assignment:
        reply = master.exchange(report(**fields))
        assert reply.status == 200, reply
        return Assignment.model_validate_json(reply.body)

    with running_master(place, exchange_s="0.2") as master:
        run = told(master)
        named = JobName.model_validate_json(master.ask(path="/v1/job/name").body)
        assert named == JobName(name="alone", fewest=1, most=1)
        assert run.directive is Directive.RUN
        have = {"incarnation": 1, "have_term": run.term, "have_version": run.version}
        ended = {"follows": run.round, "memory_round": run.round + 1, "phase": "succeeded", **have}
        stop = told(master, seq=2, **ended)
        assert (stop.directive, stop.exit_code) == (Directive.STOP, 0)
        # Early for the next run, which must not go by the name of this one: others would not find
        # what it holds in memory.
        reply = master.ask(path="/v1/job/name")
        assert (reply.status, reply.error.code) == (503, "passive")
    with running_master(place, exchange_s="0.2") as master:
        again = told(master, seq=3, **ended)
        assert (again.directive, again.exit_code) == (Directive.STOP, 0)
        reply = master.exchange(report(boot_id="c" * 16))  # of the next job at this address
        assert (reply.status, reply.error.code) == (503, "passive")


def test_who_says_that_its_workers_have_ended_is_not_held_up(place: Place) -> None:
    with running_master(place, exchange_s="60", lease_s="200") as master:

        def told(**fields: Any) -> Assignment:
            reply = master.exchange(report(incarnation=1, leaving="SIGTERM", **fields))
            return Assignment.model_validate_json(reply.body)

        run = Assignment.model_validate_json(master.exchange(report()).body)
        stop = told(seq=2, follows=1, have_term=run.term, have_version=run.version)
        assert (run.directive, stop.directive) == (Directive.RUN, Directive.STOP)
        have = {"have_term": stop.term, "have_version": stop.version}
        last = told(seq=3, follows=1, memory_round=2, **have)
        assert (last.directive, last.stay_until_stored) == (Directive.STOP, False)


class Draining(StaticPlatform):
    """A platform that takes a node away."""

    drained: asyncio.Event

    async def watch(self) -> AsyncIterator[Sequence[Event]]:
        yield []
        await self.drained.wait()
        yield [NodeSeen(NodeId("n0"), True, leaving="drained", grace_s=20.0)]
        await asyncio.Event().wait()


class Hearing(Loop):
    """Keeps what was reported last; its node is drained as soon as its workers run."""

    last: AgentReport
    runs: asyncio.Event

    def exchange(
        self, node_id: NodeId, report: AgentReport, on_reply: ReplyCallback
    ) -> Callable[[], None]:
        self.last = report
        if report.phase is WorkerPhase.RUNNING:
            self.runs.set()
        return super().exchange(node_id, report, on_reply)


async def test_an_agent_that_is_told_to_go_says_when_its_workers_have_ended(
    place: Place, tmp_path: Path
) -> None:
    """The others may wait for a last step with them until then, and are not to if it only died."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    platform = Draining(ElasticJob.parse(document(["true"], name="alone")))
    loop = Hearing(platform, FileJournalStore(tmp_path / "journal"), Rules(can_create=False))
    loop.runs = platform.drained = asyncio.Event()
    exchanges = Exchanges(loop, token=TOKEN, max_body_bytes=2**20, body_s=HEADER_S)
    app = job_app(loop, exchanges, Counter("denied", "", registry=CollectorRegistry()))
    door = socket.create_server(("127.0.0.1", 0))
    serving = server(app, header_s=HEADER_S, exchanges=exchanges)
    tasks = [asyncio.create_task(loop.run()), asyncio.create_task(serving.serve([door]))]
    env = {
        names.ENV_MASTER_ADDR: f"127.0.0.1:{door.getsockname()[1]}",
        names.ENV_TOKEN_FILE: str(token),
        names.ENV_JOB_NAME: "alone",
        names.ENV_NODE_ID: "n0",
        names.ENV_LOG_DIR: str(place.folder / "logs"),
    }
    try:
        agent = place.popen("elastic-run", str(place.script(SLEEPER)), env=env)
        assert await asyncio.to_thread(agent.wait, 60) == 0
        async with asyncio.timeout(10):
            while (loop.last.follows, loop.last.memory_round) != (1, 2):
                await asyncio.sleep(0.01)  # what it has sent last may not have been read yet
    finally:
        serving.end()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_farewell_does_not_wait_for_a_node_that_is_given_up_meanwhile(
    tmp_path: Path,
) -> None:
    platform = StaticPlatform(ElasticJob.parse(document(["true"], name="alone")))
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), Rules(can_create=False))
    # no assert: the time limit fails if it waits
    async with working(loop):
        async with asyncio.timeout(60):
            while not loop.ready:
                await asyncio.sleep(0.001)
            said = AgentReport.model_validate(report(seq=1))
            leave = loop.exchange(NodeId("n0"), said, lambda _: None)
            while not (status := loop.status()) or not status.nodes:
                await asyncio.sleep(0.001)
            leave()
            await loop.end_job("its host ends", 3600)


async def test_a_master_sees_that_it_stood_still_while_nothing_was_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a long lease nothing is for a long time, and agents have hung up by then."""
    paused_s = 0.0
    clock = Clock(now=lambda: time.monotonic() + paused_s)
    platform = StaticPlatform(ElasticJob.parse(document(["true"], name="alone")))
    rules = Rules(can_create=False, lease_s=600.0)
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), rules, clock=clock)
    # no assert: the time limit fails if it does not
    async with working(loop):
        async with asyncio.timeout(60):
            while not loop.ready:
                await asyncio.sleep(0.001)
            loop.exchange(NodeId("n0"), AgentReport.model_validate(report(seq=1)), lambda _: None)
            while not (status := loop.status()) or not status.nodes:
                await asyncio.sleep(0.001)
            paused_s = 60.0
            while "master_stalled" not in caplog.text:
                loop.add_events([])
                await asyncio.sleep(0.001)


async def test_a_sleep_of_the_machine_is_seen_and_counted(tmp_path: Path) -> None:
    slept_s = 1000.0
    clock = Clock(slept=lambda: slept_s)
    platform = StaticPlatform(ElasticJob.parse(document(["true"], name="alone")))
    rules = Rules(can_create=False)
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), rules, clock=clock)
    async with working(loop):
        async with asyncio.timeout(60):
            while not loop.ready:
                await asyncio.sleep(0.001)
            slept_s += 3600.0
            while not (status := loop.status()) or not status.goodput:
                await asyncio.sleep(0.001)
            while "suspended" not in status.goodput.seconds:
                loop.add_events([])
                await asyncio.sleep(0.001)
                status = loop.status()
                assert status is not None
                assert status.goodput is not None
    assert status.goodput is not None
    assert status.goodput.seconds["suspended"] == pytest.approx(3600.0)


class Adrift(StaticPlatform):
    """A platform that may fall silent."""

    silence_s = 0.0

    def silent_s(self) -> float:
        return self.silence_s


@pytest.mark.parametrize("young", [True, False])
async def test_a_master_that_may_have_been_replaced_says_so_and_lets_agents_go(
    tmp_path: Path, young: bool
) -> None:
    """Only a new connection leads to the master that the platform knows by now."""
    rules = Rules(can_create=False, exchange_s=0.1, renew_connection_s=30.0 if young else 0.0)
    platform = Adrift(ElasticJob.parse(document(["true"], name="alone")))
    loop = Loop(platform, FileJournalStore(tmp_path / "journal"), rules)
    exchanges = Exchanges(loop, token=TOKEN, max_body_bytes=MAX_BODY, body_s=HEADER_S)
    app = job_app(loop, exchanges, Counter("denied", "", registry=CollectorRegistry()))
    door = socket.create_server(("127.0.0.1", 0))
    serving = server(app, header_s=HEADER_S, exchanges=exchanges)
    tasks = [asyncio.create_task(loop.run()), asyncio.create_task(serving.serve([door]))]
    reader, writer = await asyncio.open_connection(*door.getsockname())
    seq = 0

    async def exchange() -> tuple[str, Assignment]:
        nonlocal seq
        while True:
            seq += 1
            body = json.dumps(report(seq=seq)).encode()
            writer.write(request("POST", "/v1/nodes/n0/exchange", body, auth=f"Bearer {TOKEN}"))
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"content-length: (\d+)", head)
            assert length
            said = await reader.readexactly(int(length[1]))
            if " 200 " in head:
                return head, Assignment.model_validate_json(said)

    try:
        head, told = await exchange()
        assert (told.master_disconnected, "connection: close" in head) == (False, False)
        platform.silence_s = rules.platform_silence_s + 1
        head, told = await exchange()
        assert (told.master_disconnected, "connection: close" in head) == (True, not young)
        if not young:
            assert await reader.read() == b"", "and it is closed"
    finally:
        writer.close()
        serving.end()
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
