"""Messages of the parameter server: what is sent arrives, and what is wrong is refused in words."""

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrover_py.protocol.errors import ConfigError, SupersededError
from dlrover_py.ps import messages as m
from dlrover_py.ps import specs, wire
from dlrover_py.ps.client import PsClient
from dlrover_py.ps.cluster_map import ClusterMap, Placement
from dlrover_py.ps.connections import Connections
from dlrover_py.ps.door import FRAME_BYTES, MAX_STRANGERS, guard, guarded, new_context, visitor
from dlrover_py.ps.settings import Settings, read_access, write_access
from dlrover_py.ps.specs import TableSpec
from dlrover_py.ps.wire import JobAccess, UnprovenError, WireError
from tests.ps_threads import client, connect, servers

KEY = JobAccess("job", "tcp://x", "token").key
IDS = np.arange(20, dtype=np.int64)
TABLE = TableSpec("t", 2, specs.sgd(1.0), specs.uniform(0.0, 0.0))
PUSH = m.Push("w", 1, 0, 1, (1, 2))
GRADS = np.ones((20, 2), np.float32)


def sent(message: Any, payload: Any, key: bytes = KEY) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(message, payload, key)]


@pytest.mark.parametrize(
    "message",
    [
        PUSH,
        m.RefusedRequest(1, (3,), m.RefusalReason.MOVED, 4, "words"),
        m.BucketCopy("s", (1, 2, 3, 4), 1, 0, True, {"w": (1, 2)}),
        m.PartsTaken("s", (m.CopyProgress(1, 2, 3, 4),)),
        m.Alive("s", "tcp://x", 1, ((1, 2, "t"),)),
        m.MapNews(
            ClusterMap("j", 3, tables=(TABLE,), placements=(Placement(1, "a", ("b",), "c"),))
        ),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    payload: Any = [("t", [IDS, GRADS, np.zeros((0, 2), np.float32)]), ("u", [])]
    got, arrays = wire.decode(sent(message, payload), KEY)
    assert got == message
    assert [name for name, _ in arrays] == ["t", "u"]
    for mine, other in zip(arrays[0][1], payload[0][1], strict=True):
        assert mine.dtype == other.dtype
        assert (mine == other).all()


def changed(frames: list[bytes], at: int, replacement: bytes) -> list[bytes]:
    return [*frames[:at], replacement, *frames[at + 1 :]]


GOOD = sent(PUSH, [("t", [IDS, GRADS])])
OTHER_JOB = JobAccess("other", "tcp://x", "token").key
NEXT_VERSION = GOOD[0][:4] + b"\x07" + GOOD[0][5:]
WRONG = [
    (sent(PUSH, [], OTHER_JOB), "another job"),
    (changed(GOOD, 0, NEXT_VERSION), "expected version 6 .* found 7"),
    (changed(GOOD, 0, b"HTTP" + GOOD[0][4:]), "DLRover-Py's"),
    (changed(GOOD, 2, GOOD[2][:-1] + b"\xff"), "damaged"),
    (changed(GOOD, 1, GOOD[1][:-1]), "damaged"),
    (GOOD[:-1], "damaged"),
    (changed(GOOD, 0, GOOD[0][:-1]), "a prelude"),
    (GOOD[:1], "a prelude"),
    ([], "a prelude"),
    ([b"", *GOOD], "a prelude"),
]


@pytest.mark.parametrize(("frames", "words"), WRONG)
def test_a_wrong_message_is_refused_with_words(frames: list[bytes], words: str) -> None:
    with pytest.raises(UnprovenError, match=words):
        wire.decode(frames, KEY)


@given(st.lists(st.binary(max_size=60), max_size=4), st.integers(0, 400), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_no_damaged_message_is_taken(noise: list[bytes], at: int, flip: int) -> None:
    with pytest.raises(WireError):
        wire.decode(noise, KEY)
    frames = [bytearray(frame) for frame in GOOD]
    frame = frames[at % len(frames)]
    frame[at % len(frame)] ^= flip
    with pytest.raises(WireError):
        wire.decode(frames, KEY)


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 99) | st.text()), st.binary(max_size=40))
@example({}, b"\x93\xa1\x80\xc0\x90")  # its kind is no UTF-8
@settings(max_examples=50, deadline=None)
def test_a_body_of_another_form_is_refused(fields: Any, noise: bytes) -> None:
    """The proof is right here: a program with the token may have a bug."""
    import msgspec

    for body in (noise, msgspec.msgpack.encode(["Push", fields, []]),
                 msgspec.msgpack.encode(["Push", fields, [["t", [["<f4", [-1]]]]]])):  # fmt: skip
        head = GOOD[0][:8]
        with pytest.raises(WireError, match=r"malformed|a known kind|another number") as refused:
            wire.decode([head + wire.proof(head, [body], KEY), body], KEY)
        assert not isinstance(refused.value, UnprovenError)


def test_no_message_has_the_key_or_is_proven_for_another_content() -> None:
    """A message may be read by a program that listens at the address of a dead server."""
    answer = sent(m.Unreadable("words"), [])
    for frames in (GOOD, answer):
        assert KEY not in b"".join(frames)
    with pytest.raises(UnprovenError):
        wire.decode([answer[0], *GOOD[1:]], KEY)
    # The same bytes, divided in another way.
    with pytest.raises(UnprovenError):
        wire.decode([GOOD[0], GOOD[1] + GOOD[2][:1], GOOD[2][1:], *GOOD[3:]], KEY)


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobAccess]:
    with servers(tmp_path_factory.mktemp("ps")) as found:
        yield found


def total(worker: PsClient) -> float:
    return float(worker.pull({"t": IDS}).result()["t"].sum())


def test_a_server_applies_nothing_of_what_it_refuses(access: JobAccess) -> None:
    with client(access) as worker, zmq.Context() as context:
        worker.create(TABLE)
        worker.push({"t": (IDS, -GRADS)}).result()
        before = total(worker)
        placement = worker.map.placements[0]
        socket = connect(context, worker.map.servers[placement.primary], access.key)
        for frames, _ in WRONG[:-2]:  # the next answer is that to a later message
            socket.send_multipart(frames)
        buckets = tuple(range(8))
        epoch = worker.map.epoch
        wrong: list[tuple[Any, str]] = [
            ([("t", [IDS.astype(np.int32), GRADS])], "expected ids as int64"),
            ([("t", [IDS, GRADS.astype(np.float64)])], "expected gradients as float32"),
            ([("t", [IDS, GRADS[:, :1]])], "expected gradients as float32"),
            ([("x", [IDS, GRADS])], "expected a table"),
        ]
        for payload, words in wrong:
            push = m.Push("zombie", 1, epoch, 1, buckets)
            socket.send_multipart(wire.encode(push, payload, access.key))
            answer, _ = wire.decode(socket.recv_multipart(), access.key)
            assert answer.reason is m.RefusalReason.INVALID
            assert words in answer.words
        for odd in ((0, 0), (99,), (-1,)):
            push = m.Push("zombie", 1, epoch, 1, odd)
            socket.send_multipart(wire.encode(push, [], access.key))
            answer, _ = wire.decode(socket.recv_multipart(), access.key)
            assert answer.reason is m.RefusalReason.INVALID
        assert total(worker) == before
        socket.close()


def test_a_worker_is_refused_before_it_sends(access: JobAccess) -> None:
    with client(access, "w1") as worker:
        worker.create(TABLE)
        worker.create(TABLE)
        with pytest.raises(ConfigError, match="exists with other properties"):
            worker.create(TableSpec("t", 3))
        with pytest.raises(ConfigError, match="ids as int64"):
            worker.pull({"t": IDS.astype(np.int32)})
        with pytest.raises(ConfigError, match="gradients as float32"):
            worker.push({"t": (IDS, GRADS.astype(np.float64))})
        with pytest.raises(ConfigError, match="does not exist"):
            worker.pull({"x": IDS})
        big = np.broadcast_to(np.int64(1), (1 << 26,))
        with pytest.raises(ConfigError, match="smaller batches"):
            worker.pull({"t": big})
        assert worker.pull({"t": IDS[:0]}).result()["t"].shape == (0, 2)
        nan = np.full((20, 2), np.nan, np.float32)
        with pytest.raises(ConfigError, match="not a number"):
            worker.push({"t": (IDS, nan)}).result()


def test_a_worker_of_another_job_is_refused(access: JobAccess) -> None:
    other = JobAccess(access.job, access.address, "another-token")
    with pytest.raises(ConfigError, match="another job"):
        PsClient(other, "w", timeout_s=60)


def test_a_stranger_gets_nothing_that_proves_anything(access: JobAccess) -> None:
    """The answer to a byte had the key of the job."""
    with client(access) as worker, zmq.Context() as context:
        addresses = [access.address, *worker.map.servers.values()]
        for address in addresses:
            with connect(context, address, access.key) as stranger:  # it has learned the password
                for frames in ([b"x"], [b"", b""], *(frames for frames, _ in WRONG[:-2])):
                    stranger.send_multipart(frames)
                # Only the coordinator answers strangers: its answer to a program of the job is the
                # first of a server's.
                stranger.send_multipart(sent(m.Push("z", 1, 0, 1, (99,)), [], access.key))
                proven = False
                while not proven:
                    assert stranger.poll(20_000)
                    got = stranger.recv_multipart()
                    assert access.key not in b"".join(got)
                    try:
                        wire.decode(got, access.key)
                        proven = True
                    except UnprovenError:
                        assert address == access.address


def test_a_program_at_the_address_of_a_dead_server_learns_and_ends_nothing() -> None:
    lines = Connections("tcp://127.0.0.1:1", KEY)
    with zmq.Context() as context, guarded(context) as rogue:
        guard(context, KEY)
        port = rogue.bind_to_random_port("tcp://127.0.0.1")
        lines.send("s0", f"tcp://127.0.0.1:{port}", PUSH, [("t", [IDS, GRADS])])
        assert rogue.poll(20_000)
        route, *frames = rogue.recv_multipart()
        assert KEY not in b"".join(frames)
        rogue.send_multipart([route, b"x"])
        rogue.send_multipart([route, *sent(m.Unreadable("ends the training"), [], OTHER_JOB)])
        rogue.send_multipart([route, *frames])  # all that it can prove is what was sent to it
        got: list[Any] = []
        while not got:
            lines.poll(20.0)
            got = [message for message, _ in lines.received()]
    lines.close(0)
    assert got == [PUSH]


def test_a_newer_worker_ends_the_rights_of_an_older_one(access: JobAccess) -> None:
    with client(access, "w2") as old:
        old.create(TABLE)
        with client(access, "w2") as new:
            new.push({"t": (IDS, GRADS)}).result()
            with pytest.raises(SupersededError):
                old.push({"t": (IDS, GRADS)}).result()


def test_the_access_file(tmp_path: Path) -> None:
    path = tmp_path / "access"
    write_access(path, JobAccess("j", "tcp://x", "t"))
    assert read_access(path) == JobAccess("j", "tcp://x", "t")
    assert path.stat().st_mode & 0o777 == 0o600
    for other in (b"{}", b'{"job": "\x80"}', b"\xff"):
        path.write_bytes(other)
        with pytest.raises(ConfigError, match="dlrover ps serve"):
            read_access(path)
    assert Settings.from_environment({"RANK": "3"}).rank == "3"


def test_strangers_fill_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All users of the machine reach the port."""
    with servers(tmp_path, 1, 1) as access, client(access) as worker:
        address = worker.map.servers["s0"]
        context = zmq.Context()
        stranger = connect(context, address, access.key)
        for _ in range(50):
            stranger.send_multipart(sent(PUSH, []))
        stranger.send_multipart(sent(m.Pull(0, 1, (99,), {}), [], access.key))
        assert stranger.poll(20_000)  # it has read them all
        context.destroy(linger=0)
    assert len([r for r in caplog.records if "message was refused" in r.getMessage()]) <= 1


def test_a_bucket_with_pushes_of_many_workers_that_wait_fits_into_a_message() -> None:
    """1,024 workers push 16 tables: two arrays each."""
    one: Any = np.zeros(1, np.int64)
    payload = [("t", [one, one])] * (1024 * 16)
    found, arrays = wire.decode(wire.encode(PUSH, payload, KEY), KEY)
    assert found == PUSH
    assert len(arrays) == len(payload)
    with pytest.raises(ConfigError, match="arrays: expected at most"):
        wire.encode(PUSH, [("t", [one] * (wire.MAX_ARRAYS + 1))], KEY)


def test_an_array_larger_than_a_frame_arrives() -> None:
    big = np.arange(FRAME_BYTES // 8 + 1)
    frames = wire.encode(PUSH, [("t", [IDS, big, IDS])], KEY)
    assert max(len(frame) for frame in frames) == FRAME_BYTES
    _, [(_, arrays)] = wire.decode(frames, KEY)
    assert [len(one) for one in arrays] == [20, len(big), 20]
    assert (arrays[1] == big).all()
    assert not arrays[1].flags.writeable
    cut_off = wire.proof(frames[0][:8], [*frames[1:3]], KEY)
    with pytest.raises(WireError, match="has 0 bytes"):
        wire.decode([frames[0][:8] + cut_off, *frames[1:3]], KEY)


def greeting(mechanism: bytes) -> bytes:
    """The first bytes of a connection in ZeroMQ's protocol (RFC 23)."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def command(content: bytes) -> bytes:
    return b"\x04" + bytes([len(content)]) + content


STRANGERS = {
    "no password": greeting(b"NULL") + command(b"\x05READY"),
    "a wrong password": greeting(b"PLAIN") + command(b"\x05HELLO\x01u\x01p"),
    "a password without an end": greeting(b"PLAIN") + b"\x06" + (1 << 40).to_bytes(8, "big"),
}


@pytest.mark.parametrize("first", STRANGERS.values(), ids=STRANGERS)
def test_a_message_of_a_stranger_that_never_ends_is_not_kept(
    access: JobAccess, first: bytes
) -> None:
    """Whoever reached a port could fill the memory with it."""
    part = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)  # more frames follow
    with client(access) as worker:
        for address in (access.address, *worker.map.servers.values()):
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            taken = 0
            line = socket.create_connection((host, int(port)), 20)
            with line, suppress(ConnectionError):
                line.sendall(first)
                while taken < 4 * FRAME_BYTES:
                    line.sendall(part)
                    taken += len(part)
            assert taken < FRAME_BYTES, "what the kernel keeps, and what came with the greeting"
        worker.create(TABLE)
        assert total(worker) == 0


def test_nothing_of_many_connections_of_strangers_comes_in() -> None:
    with zmq.Context() as context, guarded(context) as inbox, new_context() as theirs:
        guard(context, KEY)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        lines = [visitor(theirs, OTHER_JOB) for _ in range(100)]
        refused = zmq.Event.HANDSHAKE_FAILED_AUTH
        watched = [line.get_monitor_socket(refused) for line in lines]
        for line in lines:
            line.connect(address)
            with suppress(zmq.Again):  # a refused connection has no queue
                for _ in range(100):
                    line.send_multipart(GOOD, zmq.NOBLOCK)
        assert all(one.poll(20_000) for one in watched)
        with connect(theirs, address, KEY) as member:
            member.send_multipart(GOOD)
            assert inbox.poll(20_000)
            assert inbox.recv_multipart()[1:] == GOOD
            assert not inbox.poll(0)
        theirs.destroy(linger=0)


def test_strangers_are_few() -> None:
    """The number of connections without a password was unlimited."""
    first = greeting(b"PLAIN")
    # These sockets keep a connection without a password for 30 s.
    with zmq.Context() as context, guarded(context) as inbox, new_context() as theirs:
        guard(context, KEY)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        with ExitStack() as lines:

            def stranger() -> socket.socket:
                line = lines.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                line.sendall(first)
                left = len(first)
                while left:
                    left -= len(line.recv(left))
                return line

            member = connect(theirs, f"tcp://127.0.0.1:{port}", KEY)
            gone = member.get_monitor_socket(zmq.Event.DISCONNECTED)
            member.send_multipart(GOOD)
            assert inbox.recv_multipart()[1:] == GOOD
            old = [stranger() for _ in range(10)]
            new = [stranger() for _ in range(MAX_STRANGERS)]
            assert [line.recv(64) for line in old] == [b""] * 10, "the oldest ones are ended"
            assert not select.select(new, [], [], 0)[0]
            later = connect(theirs, f"tcp://127.0.0.1:{port}", KEY)
            for one in (later, member):
                one.send_multipart(GOOD)
                assert inbox.poll(20_000)
                assert inbox.recv_multipart()[1:] == GOOD
            assert not gone.poll(0)
            theirs.destroy(linger=0)


def test_a_stranger_that_says_nothing_more_is_ended() -> None:
    with new_context() as context, guarded(context) as inbox:
        guard(context, KEY)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port), 20) as line:
            line.sendall(greeting(b"PLAIN"))
            while line.recv(64):
                pass
            assert not inbox.poll(0)
