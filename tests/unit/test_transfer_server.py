"""The depot over real sockets and real slots: who may ask, what is told, what breaks."""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrover_agent.checkpoint import server as server
from dlrover_agent.checkpoint.server import TransferServer, TransferTiming
from dlrover_py.checkpoint import shm
from dlrover_py.checkpoint.shm import ShmSlot
from dlrover_py.checkpoint.transfer import (
    SlotOverwrittenError,
    TransferConnection,
    connect_to_peer,
    proof,
)
from dlrover_py.protocol.agents import (
    ReplicaLocation,
    ReplicaLocations,
    RestoreCandidate,
    RestoreCandidates,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import (
    CheckpointError,
    TransientError,
    UnauthorizedError,
    UnreachableError,
)
from dlrover_py.protocol.slots import PAGE, Layout, SlotHeader, TensorChunk, encode_objects
from dlrover_py.protocol.transfer import NONCE, VERSION, TransferChallenge
from dlrover_py.trainer.candidates import CandidateSearch, CheckpointSources, SearchTiming
from tests.ids import checkpoint_id
from tests.slots import Lookup

JOB, TOKEN = "u1", "secret"
T = TypeVar("T")
HERE = "127.0.0.1"
HOLDER = ReplicaLocation(rank=3, node="n1", addr=HERE, port=9, part="p")


def stage(
    folder: Path, name: str = "0.0", *, nbytes: int = 5000, job: str = JOB, **facts: int
) -> SlotHeader:
    """A slot with two tensors, the second one private, and an object."""
    rank = facts.get("rank", 0)
    layout = Layout(
        [
            TensorChunk("model.w", "uint8", (nbytes,), (nbytes,), (0,)),
            TensorChunk(f"rank/{rank}/rng", "uint8", (16,), (16,), (0,)),
        ]
    )
    all_facts = {"step": 1, "round": 1, "timeline": 0, "world": 2, "rank": rank, **facts}
    with ShmSlot(folder / name, write=True) as slot:
        slot.reserve(layout.end + shm.OBJECT_HEADROOM)
        slot.begin()
        view, sums = slot.view(), []
        for chunk, at in layout:
            block = hashlib.sha256(f"{all_facts} {chunk.key}".encode()).digest()
            view[at : at + chunk.nbytes] = (block * (chunk.nbytes // 32 + 1))[: chunk.nbytes]
            sums.append(shm.digest(view[at : at + chunk.nbytes]))
        view.release()
        return slot.seal(
            layout.encode(),
            sums,
            encode_objects([("epoch", b"4")]),
            layout.end,
            job=job,
            part="p",
            private_offset=layout.private_offset,
            **all_facts,
        )


def candidate(step: int, round: int, timeline: int) -> RestoreCandidate:
    return RestoreCandidate(step=step, round=round, timeline=timeline, world=4)


def there(rank: int) -> ReplicaLocation:
    return HOLDER.model_copy(update={"rank": rank})


def line(words: object) -> bytes:
    return json.dumps(words).encode() + b"\n"


@dataclass
class Running:
    folder: Path
    path: Path
    port: int

    def dial(self, token: str = TOKEN) -> TransferConnection:
        return connect_to_peer(HERE, self.port, token)

    @property
    def where(self) -> str:
        return f"{HERE}:{self.port}"

    def raw(self) -> socket.socket:
        return socket.create_connection((HERE, self.port), timeout=60)


@contextlib.asynccontextmanager
async def serving(
    base: Path, token: str = TOKEN, *, ranks: int = 1, timing: TransferTiming | None = None
) -> AsyncIterator[Running]:
    folder = base / "pool"
    folder.mkdir(exist_ok=True)

    async def candidates(round: int) -> RestoreCandidates:
        if round == 404:
            raise TransientError("the master is away")
        return RestoreCandidates(candidates=[candidate(7, round, 1), candidate(6, round, 0)])

    async def locations(checkpoint: CheckpointId) -> ReplicaLocations:
        return ReplicaLocations(locations=[there(checkpoint.step)] * ranks)

    depot = TransferServer(
        folder,
        JOB,
        token,
        base / "slots.sock",
        lookup=Lookup(candidates, locations),
        addr=HERE,
    )
    task = asyncio.create_task(depot.run(timing))
    try:
        yield Running(folder, base / "slots.sock", depot.port)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def timing() -> TransferTiming:
    """The time limits of the server; a test that needs other ones sets them as a parameter."""
    return TransferTiming()


@pytest_asyncio.fixture
async def depot(tmp_path: Path, timing: TransferTiming) -> AsyncIterator[Running]:
    async with serving(tmp_path, timing=timing) as running:
        yield running


async def doing(work: Callable[[], T]) -> T:
    """Blocking work, while the loop serves; a deadline makes of a hang a failure."""
    async with asyncio.timeout(120):
        return await asyncio.to_thread(work)


async def test_a_worker_asks_its_agent(depot: Running) -> None:
    def work() -> None:
        with TransferConnection.local(depot.path) as link:
            assert link.candidates(3) == [candidate(7, 3, 1), candidate(6, 3, 0)]
            assert link.locations(checkpoint_id(5, 2)) == [there(5)]
            with pytest.raises(TransientError, match="the master is away"):
                link.candidates(404)
            assert link.candidates(4)[0].round == 4  # the connection is still good

    assert depot.path.stat().st_mode & 0o777 == 0o600
    await doing(work)


@pytest.mark.parametrize("gone", [False, True])
async def test_a_load_that_has_lost_its_connection_makes_a_new_one(
    depot: Running, gone: bool
) -> None:
    timing = SearchTiming(ask_timeout_s=1.0, ask_interval_s=0.01)

    def work() -> None:
        with TransferConnection.local(depot.path) as link:
            link.abandon()
            if gone:
                depot.path.unlink()
            sources = CheckpointSources(agent=link, round=3, timing=timing)
            listed = CandidateSearch(sources, logging.getLogger("test")).candidates()
            assert [one.step for one in listed.found] == ([] if gone else [7, 6])
            assert ("No such file" in listed.incomplete_reason) is gone

    await doing(work)


@pytest.mark.parametrize("local", [True, False])
async def test_a_slot_is_read_as_it_was_written(depot: Running, local: bool) -> None:
    header = stage(depot.folder, nbytes=(1 << 22) + 12345)
    stage(depot.folder, "1.0", job="another")
    (depot.folder / shm.OWNER_FILE).touch()

    def work() -> None:
        with TransferConnection.local(depot.path) if local else depot.dial() as link:
            assert link.slots() == [("0.0", header)]
            found = link.contents("0.0", header.write_id)
            with ShmSlot(depot.folder / "0.0") as slot:
                assert found == replaced(shm.contents(slot), found)
            targets = [(at, memoryview(bytearray(chunk.nbytes))) for chunk, at in found.layout]
            told: list[int] = []
            parts = link.read_all("0.0", header.write_id, targets, arrived=told.append)
            assert tuple(map(shm.digest, parts)) == found.digests
            assert sum(told) == sum(len(target) for _, target in targets)
            link.read_into("0.0", header.write_id, 0, memoryview(bytearray()))

    await doing(work)


def replaced(mine: shm.SlotContents, other: shm.SlotContents) -> shm.SlotContents:
    """Layouts have no equality of their own."""
    assert mine.layout.encode() == other.layout.encode()
    return shm.SlotContents(mine.header, other.layout, mine.digests, mine.objects)


async def test_a_connection_to_a_peer_is_handed_over(depot: Running, tmp_path: Path) -> None:
    """The worker has the bytes, and never the token."""
    (tmp_path / "peer").mkdir()
    async with serving(tmp_path / "peer") as peer, serving_elsewhere(tmp_path) as stranger:
        header = stage(peer.folder, "4.1", rank=9, world=10)

        def work() -> None:
            with (
                TransferConnection.local(depot.path) as link,
                link.connect(HERE, peer.port) as other,
            ):
                assert other.slots() == [("4.1", header)]
                assert link.slots() == []
                with pytest.raises(
                    TransientError,
                    match="expected the token of this job, found the server of another",
                ):
                    link.connect(HERE, stranger.port)
                with pytest.raises(CheckpointError, match="expected a request for this socket"):
                    other.candidates(1)  # not for peers

        await doing(work)


@contextlib.asynccontextmanager
async def serving_elsewhere(base: Path) -> AsyncIterator[Running]:
    (base / "stranger").mkdir()
    async with serving(base / "stranger", "another secret") as running:
        yield running


async def test_a_worker_of_a_large_job_learns_where_all_slots_are(tmp_path: Path) -> None:
    async with serving(tmp_path, ranks=20_000) as depot:

        def work() -> None:
            with TransferConnection.local(depot.path) as link:
                assert len(link.locations(checkpoint_id(5))) == 20_000

        await doing(work)


async def test_a_wrong_token_is_refused_by_both_sides(depot: Running) -> None:
    def work() -> None:
        with pytest.raises(
            UnauthorizedError, match="expected the token of this job, found the server of another"
        ):
            depot.dial("wrong")
        with depot.raw() as stream, stream.makefile("rb") as lines:  # that does not look at ours
            stream.sendall(line({"hello": bytes(NONCE).hex()}))
            assert "proof" in json.loads(lines.readline())
            stream.sendall(line({"proof": "0" * 64}))
            assert lines.readline() == b""

    await doing(work)


HELLO = {"hello": bytes(NONCE).hex()}


@pytest.mark.parametrize(
    "said",
    [
        line({"op": "list"}),
        line({"op": "get", "name": "0.0", "write_id": "f", "at": 0, "nbytes": 1}),
        line({"proof": "0" * 64}),
        line({"hello": "00"}),
        line({"hello": "x" * 2 * NONCE}),
        line({"hello": 7}),
        line({}),
        b"[]\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
        b"x" * 10_000,
    ],
    ids=lambda said: said[:20].decode(errors="replace"),
)
async def test_a_stranger_is_told_nothing_not_even_what_is_wrong(
    depot: Running, said: bytes
) -> None:
    """Neither at once, nor after the nonce that a good hello is answered with."""
    stage(depot.folder)

    def work() -> None:
        for first in (b"", line(HELLO)):
            with depot.raw() as stream, stream.makefile("rb") as lines:
                if first:
                    stream.sendall(first)
                    assert set(json.loads(lines.readline())) == {"nonce", "proof", "version"}
                with contextlib.suppress(OSError):  # it does not read to the end
                    stream.sendall(said)
                    stream.shutdown(socket.SHUT_WR)
                    assert lines.read() == b""

    await doing(work)


async def test_an_agent_of_another_job_gets_nothing(depot: Running) -> None:
    """It dials as peers do, and goes on although the depot's own proof is not its token's."""
    stage(depot.folder)

    def work() -> None:
        with depot.raw() as stream, stream.makefile("rb") as lines:
            stream.sendall(line(HELLO))
            answered = bytes.fromhex(json.loads(lines.readline())["nonce"])
            mine = proof("of another job", "client", depot.where, bytes(NONCE), answered)
            stream.sendall(line({"proof": mine}) + line({"op": "list"}))
            stream.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert lines.read() == b""

    await doing(work)


def test_a_depot_of_another_version_is_refused_in_words() -> None:
    """Its proof differs as well, and that said that it had another token."""

    def answer(server: socket.socket) -> None:
        with server.accept()[0] as peer, peer.makefile("rb") as asks:
            asks.readline()
            challenge = TransferChallenge(nonce="0" * 64, proof="0" * 64, version=VERSION + 1)
            peer.sendall(challenge.encode())
            asks.readline()

    with socket.create_server((HERE, 0)) as server:
        peer = threading.Thread(target=answer, args=(server,))
        peer.start()
        words = rf"its handshake has version {VERSION + 1}: expected version {VERSION}; use the"
        with pytest.raises(UnauthorizedError, match=words):
            connect_to_peer(HERE, server.getsockname()[1], TOKEN)
        peer.join()


async def test_a_handshake_that_is_handed_on_opens_nothing(depot: Running) -> None:
    """Somebody has the address of a depot that was there before, and hands on what is said."""

    def hand_on(strange: socket.socket, told: list[bytes]) -> None:
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(strange.accept()[0])
            there = stack.enter_context(depot.raw())
            asks, answers = (stack.enter_context(s.makefile("rb")) for s in (peer, there))
            there.sendall(asks.readline())
            peer.sendall(answers.readline())
            there.sendall(asks.readline() or line({"proof": "0" * 64}))
            told.append(answers.readline())

    def work() -> None:
        told: list[bytes] = []
        with socket.create_server((HERE, 0)) as strange:
            between = threading.Thread(target=hand_on, args=(strange, told))
            between.start()
            with pytest.raises(UnauthorizedError, match="found the server of another job"):
                connect_to_peer(HERE, strange.getsockname()[1], TOKEN)
            between.join()
        assert told == [b""]

    await doing(work)


async def test_a_recorded_handshake_opens_nothing(depot: Running) -> None:
    """The server's nonce is another each time; its own proof is none of the client's."""

    def work() -> None:
        asked = os.urandom(NONCE)
        with depot.raw() as stream, stream.makefile("rb") as lines:
            stream.sendall(line({"hello": asked.hex()}))
            answer = json.loads(lines.readline())
            answered = bytes.fromhex(answer["nonce"])
            right = proof(TOKEN, "client", depot.where, asked, answered)
            stream.sendall(line({"proof": right}))
            assert json.loads(lines.readline())["error"] == ""
        for made in (lambda said: right, lambda said: said["proof"]):
            with depot.raw() as stream, stream.makefile("rb") as lines:
                stream.sendall(line({"hello": asked.hex()}))
                again = json.loads(lines.readline())
                assert again["nonce"] != answer["nonce"]
                stream.sendall(line({"proof": made(again)}))
                assert lines.readline() == b""

    await doing(work)


@pytest.mark.parametrize(
    "name",
    ["../secret", "owner", "0.0/../../secret", "/etc/passwd", "0.0\0", "", "٣.٠", "x" * 17, 3],
)
async def test_no_name_leads_out_of_the_pool(depot: Running, name: object) -> None:
    (depot.folder.parent / "secret").write_bytes(bytes(PAGE))
    (depot.folder / shm.OWNER_FILE).write_bytes(bytes(PAGE))
    stage(depot.folder)

    def work() -> None:
        with depot.dial() as link:
            ask = {"op": "get", "name": name, "write_id": "", "at": 0, "nbytes": 1}
            with pytest.raises(CheckpointError, match="name"):
                link.say(line(ask))

    await doing(work)


OTHER_VERSION = rf"it has version {VERSION + 1}: expected version {VERSION}; use the same release"


async def test_a_request_of_another_version_is_refused_with_both_versions(depot: Running) -> None:
    def local() -> TransferConnection:
        return TransferConnection.local(depot.path)

    def work() -> None:
        for connect in (depot.dial, local):
            for op in ("list", "get", "candidates", "locations", "connect", "copied"):
                with connect() as link, pytest.raises(CheckpointError, match=OTHER_VERSION):
                    link.say(line({"op": op, "version": VERSION + 1, "new": [1]}))

    await doing(work)


async def test_the_log_names_the_version_of_a_peer_that_is_refused(
    depot: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        with depot.raw() as stream, stream.makefile("rb") as lines:
            stream.sendall(line(HELLO | {"version": VERSION + 1}))
            assert json.loads(lines.readline())["version"] == VERSION, "the client names both"
            assert lines.read() == b""

    await doing(work)
    (record,) = caplog.records
    assert re.search(OTHER_VERSION, vars(record)["why"])


@pytest.mark.parametrize(
    ("at", "nbytes"), [(-1, 1), (0, 1 << 40), (1 << 61, 1 << 61), (True, 1), (0.5, 1), ("0", 1)]
)
async def test_only_what_was_sealed_is_given(depot: Running, at: object, nbytes: int) -> None:
    header = stage(depot.folder)

    def work() -> None:
        with depot.dial() as link:
            ask = {
                "op": "get",
                "name": "0.0",
                "write_id": header.write_id,
                "at": at,
                "nbytes": nbytes,
            }
            with pytest.raises(CheckpointError, match=r"expected a range in|its get.at: "):
                link.say(line(ask))

    await doing(work)


async def test_what_is_not_there_is_told_apart_from_what_is_wrong(depot: Running) -> None:
    header = stage(depot.folder)
    alien = stage(depot.folder, "1.0", job="another")
    target = memoryview(bytearray(8))

    def work() -> None:
        with depot.dial() as link:
            for name, write_id in (
                ("0.0", "old"),
                ("0.1", header.write_id),
                ("1.0", alien.write_id),
            ):
                with pytest.raises(SlotOverwrittenError):
                    link.read_into(name, write_id, 0, target)
            with pytest.raises(SlotOverwrittenError):
                link.contents("0.0", "old")
            link.read_into("0.0", header.write_id, PAGE, target)  # the connection is still good

    await doing(work)


async def test_a_slot_that_is_overtaken_while_it_is_read_is_told(depot: Running) -> None:
    """A writer comes when half of it has arrived: nothing more than the trailer says so."""
    nbytes = 64 << 20
    header = stage(depot.folder, nbytes=nbytes)
    target = memoryview(bytearray(nbytes))
    came = 0

    def overtake(more: int) -> None:
        nonlocal came
        if came == 0:
            stage(depot.folder, step=2, nbytes=100)
        came += more

    def work() -> None:
        with depot.dial() as link, pytest.raises(SlotOverwrittenError, match="filled again"):
            link.read_into("0.0", header.write_id, PAGE, target, on_data=overtake)

    await doing(work)
    assert came == nbytes


@pytest.mark.parametrize(
    ("timing", "kept"), [(TransferTiming(), True), (TransferTiming(pin_limit_s=0.0), False)]
)
async def test_a_pin_keeps_writers_away_for_a_while_only(depot: Running, kept: bool) -> None:
    nbytes = 64 << 20
    header = stage(depot.folder, nbytes=nbytes)
    target = memoryview(bytearray(nbytes))
    seen: list[bool] = []

    def look(_: int) -> None:
        if len(seen) < 1:
            with ShmSlot(depot.folder / "0.0", write=True) as writer:
                seen.append(writer.lock(shared=False))

    def read(*, pin: bool) -> bool:
        seen.clear()
        with depot.dial() as link:
            link.read_into("0.0", header.write_id, PAGE, target, pin=pin, on_data=look)
        return seen[0]

    assert await doing(lambda: read(pin=False))
    assert await doing(lambda: read(pin=True)) is not kept


async def test_of_a_hollow_slot_only_what_is_there_is_given(depot: Running) -> None:
    stage(depot.folder)
    with ShmSlot(depot.folder / "0.0", write=True) as slot:
        found = slot.header()
        assert found is not None
        values = {name: getattr(found, name) for name in found.__slots__}
        slot.put(SlotHeader(**values | {"private_only": True}))

    def work() -> None:
        with depot.dial() as link:
            link.read_into("0.0", found.write_id, found.private_offset, memoryview(bytearray(16)))
            link.read_into("0.0", found.write_id, 0, memoryview(bytearray(PAGE)))
            with pytest.raises(CheckpointError, match="partial replica"):
                link.read_into("0.0", found.write_id, PAGE, memoryview(bytearray(16)))

    await doing(work)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sent=st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.integers() | st.text() | st.floats(),
            lambda inner: (
                st.dictionaries(
                    st.sampled_from(
                        ["op", "name", "write_id", "at", "nbytes", "addr", "port", "x"]
                    ),
                    inner,
                )
                | st.lists(inner)
            ),
        ).map(line),
        st.sampled_from([b"[" * 4000 + b"\n", b"x" * 5000, b'{"op":"get"}\n' * 500]),
        st.fixed_dictionaries(
            {"op": st.sampled_from(["get", "list", "connect", "locations", "candidates"])},
            optional={
                key: st.one_of(st.text(max_size=20), st.integers(), st.just("0.0"))
                for key in ("name", "write_id", "at", "nbytes", "step", "round", "timeline", "pin")
            },
        ).map(line),
    ),
    how=st.sampled_from(["stranger", "peer", "worker"]),
)
def test_garbage_is_refused_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: bytes, how: str
) -> None:
    def work(depot: Running) -> None:
        if how == "worker":
            stream = socket.socket(socket.AF_UNIX)
            stream.connect(str(depot.path))
        elif how == "peer":
            with depot.dial() as link:
                stream = socket.socket(fileno=os.dup(link.fileno()))
        else:
            stream = depot.raw()
        with stream:
            stream.settimeout(60)
            with contextlib.suppress(OSError):
                stream.sendall(sent)
                stream.shutdown(socket.SHUT_WR)
                while stream.recv(65536):
                    pass
        with TransferConnection.local(depot.path) as link:  # it goes on
            assert link.slots() == []

    async def run() -> None:
        async with serving(tmp_path) as depot:
            await doing(lambda: work(depot))

    asyncio.run(run())
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("timing", [TransferTiming(challenge_timeout_s=300.0)])
async def test_a_flood_of_strangers_keeps_no_peer_out(depot: Running) -> None:
    """No connection is closed for the time that it takes."""
    stage(depot.folder)

    def work() -> None:
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(depot.raw()) for _ in range(3 * server.MAX_HALF_OPEN)]
            with depot.dial() as link:
                assert len(link.slots()) == 1
                again = [stack.enter_context(depot.raw()) for _ in range(server.MAX_HALF_OPEN)]
                assert len(link.slots()) == 1  # who has proved itself is not thrown out
            assert many[0].recv(1) == b""  # who has waited longest goes
            again[-1].settimeout(0.0)
            with pytest.raises(BlockingIOError):
                again[-1].recv(1)

    await doing(work)


async def test_guests_leave_the_agent_half_of_its_descriptors(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as serves:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (240, hard))
        try:
            depot = await serves.enter_async_context(serving(tmp_path))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

        def work() -> None:
            with contextlib.ExitStack() as stack:
                guests = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(121)]
                for guest in guests:
                    guest.settimeout(60)
                    guest.connect(str(depot.path))
                assert guests[-1].recv(1) == b"", "one more is let go"
                for guest in guests[:-1]:
                    guest.sendall(line({"op": "list"}))
                assert all(guest.recv(1) for guest in guests[:-1])

        await doing(work)


@pytest.mark.parametrize("timing", [TransferTiming(challenge_timeout_s=0.05)])
async def test_who_does_not_prove_itself_in_time_goes(depot: Running) -> None:
    def work() -> None:
        with depot.raw() as stream:
            stream.sendall(b'{"hello"')
            assert stream.recv(1) == b""

    await doing(work)


def staged_for_a_read(depot: Running) -> tuple[SlotHeader, bytes]:
    """A slot of 64 MB, and the request for all of it."""
    nbytes = 64 << 20
    header = stage(depot.folder, nbytes=nbytes)
    ask = {"op": "get", "name": "0.0", "write_id": header.write_id, "at": PAGE, "nbytes": nbytes}
    return header, line(ask)


async def test_a_reader_that_stops_reading_costs_nobody_else(depot: Running) -> None:
    header, ask = staged_for_a_read(depot)
    nbytes = 64 << 20

    def work() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stuck = stack.enter_context(depot.dial())
                assert stuck.say(ask).nbytes == nbytes
            link = stack.enter_context(depot.dial())
            target = memoryview(bytearray(nbytes))
            link.read_into("0.0", header.write_id, PAGE, target)
            found = link.contents("0.0", header.write_id)
            assert shm.digest(target) == found.digests[0]

    await doing(work)


@pytest.mark.parametrize("timing", [TransferTiming(read_timeout_s=0.05)])
async def test_a_reader_that_stops_reading_is_given_up(depot: Running) -> None:
    _, ask = staged_for_a_read(depot)

    def given_up() -> None:
        with depot.dial() as link:
            link.say(ask)
            seen = asyncio.run_coroutine_threadsafe(alone(), loop).result(90)
            assert seen

    loop = asyncio.get_running_loop()

    async def alone() -> bool:
        """Until the stuck connection's task is gone; the link is still open here."""
        async with asyncio.timeout(60):
            while any("_serve" in repr(task.get_coro()) for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)
        return True

    await doing(given_up)


async def test_a_depot_that_dies_is_told_in_words(tmp_path: Path) -> None:
    async with serving(tmp_path) as depot:
        header = stage(depot.folder)
        link, local = (
            await doing(depot.dial),
            await doing(lambda: TransferConnection.local(depot.path)),
        )
    with link, local:
        for one in (link, local):
            with pytest.raises(UnreachableError):
                one.read_into("0.0", header.write_id, 0, memoryview(bytearray(8)))
    with pytest.raises(UnreachableError, match="transfer server at"):
        depot.dial()
    with pytest.raises(UnreachableError, match="agent's transfer server"):
        TransferConnection.local(depot.path)


def test_a_silent_peer_is_given_up() -> None:
    with socket.create_server((HERE, 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UnreachableError, match="no data came within"):
            connect_to_peer(HERE, port, TOKEN, deadline_s=0.1)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[" * 70000, b"{}\n"])
async def test_what_is_no_depot_is_not_believed(answer: bytes) -> None:
    async def other(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(other, HERE, 0) as strange:
        port = strange.sockets[0].getsockname()[1]

        def work() -> None:
            with pytest.raises((UnauthorizedError, UnreachableError)):
                connect_to_peer(HERE, port, TOKEN)

        await doing(work)


def test_a_byte_now_and_then_does_not_put_the_deadline_off() -> None:
    """Whoever had taken a depot's port held a thread of the agent for a day."""
    done = threading.Event()

    def drip(listening: socket.socket) -> None:
        stream, _ = listening.accept()
        with stream, contextlib.suppress(OSError):
            while not done.wait(0.01):
                stream.sendall(b"x")

    with socket.create_server((HERE, 0)) as listening:
        slow = threading.Thread(target=drip, args=(listening,))
        slow.start()
        try:
            with pytest.raises(UnreachableError, match="it has not answered in time"):
                connect_to_peer(HERE, listening.getsockname()[1], TOKEN, deadline_s=0.2)
        finally:
            done.set()
            slow.join()
