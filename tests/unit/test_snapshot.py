"""A node's snapshot: the probe in a worker, its agent, and the bundle on the master's disk."""

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlrover_agent.channels.probe_socket import ProbeServer
from dlrover_agent.observation.snapshot import (
    IdleClock,
    SnapshotTaker,
    io_bytes,
    process_facts,
    read_spied,
)
from dlrover_py.cli.runs import bundles, node_snapshot
from dlrover_py.master.core.events import EvidenceKept, KeepEvidence
from dlrover_py.master.evidence import MAX_WAITING, BundleFolder, EvidenceStore
from dlrover_py.process import probe
from dlrover_py.process.identity import ProcessId
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import Assignment, Directive, FailureKind, WorkerFailure
from dlrover_py.protocol.bundles import MAX_BUNDLES
from dlrover_py.protocol.diagnosis import LAST_LOOK_NODES, MAX_LINES, NodeSnapshot
from dlrover_py.protocol.errors import TransientError
from dlrover_py.protocol.names import NodeId
from dlrover_py.protocol.status import EvidenceManifest
from tests.builders import crash

OWN = ProcessId.of(os.getpid())


class Master:
    """Takes snapshots; the first attempts fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.taken = failures, list[NodeSnapshot]()
        self.arrived = asyncio.Event()

    async def send_snapshot(self, body: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise TransientError("not yet")
        self.taken.append(NodeSnapshot.model_validate_json(body))
        self.arrived.set()


@pytest.fixture
def path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # a unix socket's path may have 107 bytes
    yield folder / "s"
    shutil.rmtree(folder)


def order(number: int) -> Assignment:
    return Assignment(
        term=1, version=number, incarnation=1, directive=Directive.RUN, reason="", round=3,
        rank_offset=4, snapshot=number,
    )  # fmt: skip


@dataclass(frozen=True)
class Looked:
    process: ProcessId | None
    not_started: bool = False
    last_lines: str = ""

    @property
    def pid(self) -> int:
        return 0 if self.not_started else OWN.pid


def test_the_names_of_the_probe_are_those_of_the_protocol() -> None:
    found = (probe.SOCKET, probe.LOCAL_RANK, probe.ROUND)
    assert found == (names.ENV_PROBE_SOCKET, names.ENV_LOCAL_RANK, names.ENV_ROUND)


async def test_a_worker_that_hangs_is_described_by_its_probe(path: Path) -> None:
    """The worker is this process, whose main thread waits in the event loop."""
    master = Master(failures=1)
    workers = [Looked(OWN), Looked(None), Looked(None, not_started=True)]
    taker = SnapshotTaker(path, "boot-0001", master, lambda: workers)
    taker.probes.new_round(3)
    record = {"group": "0", "seq": 7, "op": "all_reduce", "open": True}
    environ = {probe.SOCKET: str(path), probe.LOCAL_RANK: "0", probe.ROUND: "3"}
    probe.start(environ, lambda: [record])
    probe.start(environ, lambda: [record])
    assert await asyncio.wait_for(_connected(taker.probes), 30)
    taker.assigned(order(5))
    taker.assigned(order(5))
    await asyncio.wait_for(master.arrived.wait(), 30)
    (snapshot,) = master.taken
    assert (snapshot.number, snapshot.round) == (5, 3)
    alive, ended, starting = snapshot.workers
    assert (alive.rank, alive.pid, alive.state != "") == (4, os.getpid(), True)
    functions = {frame.function.rpartition(".")[2] for frame in alive.stack}
    # A coroutine that is suspended while its stack is read has no caller any more.
    assert functions & {"run_until_complete", "ask"}
    assert alive.recorded
    assert (ended.rank, ended.pid, ended.state, ended.ended) == (5, 0, "", True)
    assert (starting.rank, starting.starting, starting.ended) == (6, True, False)
    await taker.close()


def failed(rank: int) -> WorkerFailure:
    return crash(FailureKind.EXCEPTION).model_copy(update={"rank": rank, "local_rank": rank - 4})


async def test_before_a_fault_ends_a_round_its_workers_are_looked_at(path: Path) -> None:
    """One of them answers, one does not, and one has ended with an exception."""
    master = Master()
    lines = "\n".join(f"line {n}" for n in range(MAX_LINES + 5))
    workers = [Looked(OWN, last_lines=lines), Looked(OWN), Looked(None, last_lines="KeyError: 1")]
    taker = SnapshotTaker(path, "boot-0001", master, lambda: workers)
    taker.new_round(order(0))
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"3 0\n")
    while (asking := asyncio.create_task(taker.probes.ask(0, 30))) in (
        await asyncio.wait({asking}, timeout=0.01)
    )[0]:
        pass  # the worker is not known yet
    assert await reader.readline() == b"?\n"
    writer.write(b"{}\n")
    assert await asking == b"{}\n"
    stopped = asyncio.Event()
    taker.last_look_s = 30.0
    taker.stop_workers(stopped.set, look=True)
    assert not stopped.is_set()
    assert await reader.readline() == b"?\n"
    writer.write(b'{"stack": [{"function": "update"}], "recorded": true}\n')
    await asyncio.wait_for(stopped.wait(), 30)
    taker.round_over([failed(6)])
    await asyncio.wait_for(master.arrived.wait(), 30)
    (look,) = master.taken
    assert (look.number, look.round) == (0, 3)
    alive, silent, ended = look.workers
    assert (alive.rank, alive.pid, alive.stack[0].function) == (4, OWN.pid, "update")
    assert alive.output[-1] == f"line {MAX_LINES + 4}"
    assert len(alive.output) == MAX_LINES
    assert silent.remarks == ["its probe does not answer"]
    assert ended.pid == 0
    assert ended.failure == failed(6)
    assert ended.output == ["KeyError: 1"]
    writer.close()
    await taker.close()


async def test_a_last_look_never_keeps_a_stop_and_is_sent_by_few_nodes(path: Path) -> None:
    master = Master()
    workers = [Looked(OWN)]
    taker = SnapshotTaker(path, "boot-0001", master, lambda: workers)
    taker.new_round(order(0).model_copy(update={"node_rank": LAST_LOOK_NODES}))
    stops: list[int] = []
    taker.stop_workers(lambda: stops.append(1), look=True)
    taker.stop_workers(lambda: stops.append(2), look=True)
    assert stops == [1, 2], "no stop waits for the look of the one before, or for another one"
    taker.stop_now()
    assert stops == [1, 2]
    taker.round_over([])
    workers.clear()
    taker.stop_workers(lambda: stops.append(3), look=True)
    assert stops == [1, 2, 3], "nobody is left who could answer"
    taker.round_over([failed(4)])
    taker.round_over([failed(4)])
    await asyncio.wait_for(master.arrived.wait(), 30)
    await taker.close()
    assert len(master.taken) == 1
    assert stops == [1, 2, 3]


async def test_nodes_that_only_lost_their_peer_send_no_look_beyond_the_first(path: Path) -> None:
    """Else all nodes of a large job would, as all lose a peer."""
    master = Master()
    workers = list[Looked]()
    taker = SnapshotTaker(path, "boot-0001", master, lambda: workers)
    taker.new_round(order(0).model_copy(update={"node_rank": LAST_LOOK_NODES}))
    peer = crash(FailureKind.PEER)
    for failures in ([peer], [], [peer, failed(4)]):
        taker.stop_workers(lambda: None, look=True)
        taker.round_over(failures)
    await asyncio.wait_for(master.arrived.wait(), 30)
    await taker.close()
    assert len(master.taken) == 1


async def test_a_look_that_cannot_be_sent_gives_way_to_the_next_one(path: Path) -> None:
    master = Master(failures=1)
    workers = list[Looked]()
    taker = SnapshotTaker(path, "boot-0001", master, lambda: workers)
    for number in (3, 4):
        taker.new_round(order(0).model_copy(update={"round": number}))
        taker.stop_workers(lambda: None, look=True)
        taker.round_over([])
        await asyncio.sleep(0)  # the first attempt fails
    await asyncio.wait_for(master.arrived.wait(), 30)
    before = asyncio.all_tasks() - {asyncio.current_task()}
    await taker.close()
    assert [look.round for look in master.taken] == [4]
    assert not asyncio.all_tasks() & before


async def test_a_second_stop_of_a_round_does_not_replace_its_look(path: Path) -> None:
    """The node that fails stops by itself; the order of the master comes meanwhile."""
    master = Master()
    workers = [Looked(OWN), Looked(None)]
    taker = SnapshotTaker(path, "boot-0001", master, lambda: workers)
    taker.new_round(order(0))
    stopped = asyncio.Event()
    taker.last_look_s = 0.01
    taker.stop_workers(stopped.set, look=True)
    await asyncio.wait_for(stopped.wait(), 30)
    workers[0] = Looked(None)  # it has followed the signal
    again: list[int] = []
    taker.stop_workers(lambda: again.append(1), look=True)
    assert again == [1]
    taker.round_over([failed(5)])
    await asyncio.wait_for(master.arrived.wait(), 30)
    await taker.close()
    assert master.taken[0].workers[0].remarks == ["its probe does not answer"]


async def test_only_some_bundles_wait_for_a_slow_place_and_the_end_waits_for_them() -> None:
    place = SlowPlace()
    store = EvidenceStore(place)
    done: list[EvidenceKept] = []
    await store.finish(0.0)
    for number in range(1, MAX_WAITING + 4):
        manifest = EvidenceManifest(number=number, at=1.0, round=1, reason="asked")
        store.keep(KeepEvidence(manifest, ()), done.append)
        await asyncio.sleep(0)
    await store.finish(0.01)
    assert not done, "the end of the time is no error"
    place.open.set()
    await store.finish(30.0)
    assert [kept.number for kept in done] == [1, *range(4, MAX_WAITING + 4)]


class SlowPlace:
    """A place for bundles that takes none until it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def keep(self, evidence: KeepEvidence) -> str:
        await self.open.wait()
        return f"place {evidence.manifest.number}"


async def _connected(server: ProbeServer) -> bool:
    while await server.ask(0, 1.0) is None:
        await asyncio.sleep(0.01)
    return True


async def test_a_worker_without_an_answer_is_not_waited_for(path: Path) -> None:
    server = ProbeServer(path)
    server.new_round(3)
    assert await server.ask(0, 0.01) is None
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"3 0\n")
    await reader.readexactly(2) if await server.ask(0, 0.2) else None
    assert await server.ask(0, 0.01) is None, "it has connected, and says nothing"
    server.new_round(4)
    assert await server.ask(0, 0.01) is None, "it is of another round"
    writer.close()
    await server.close()


async def test_a_client_that_says_nonsense_is_dropped(path: Path) -> None:
    server = ProbeServer(path)
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"what\n")
    assert await reader.read() == b""
    writer.close()
    path.unlink()
    fresh = server.rebind()
    assert fresh is not None
    server.use(fresh)
    _, again = await asyncio.open_unix_connection(str(path))
    again.close()
    await server.close()


def test_the_stack_of_a_lock_is_seen_from_its_thread() -> None:
    go = threading.Event()
    waiting = threading.Thread(target=go.wait, name="waiting")
    waiting.start()
    found = probe.observe(threading.main_thread().ident or 0, list)
    go.set()
    waiting.join()
    assert found["stack"][1]["function"].startswith("test_the_stack_of_a_lock")
    assert "waiting" in [thread["name"] for thread in found["threads"]]


def test_the_documents_of_py_spy() -> None:
    frame = b'{"name": "f", "filename": "/a.py", "line": 3, "module": null}'
    main = b'{"thread_name": "MainThread", "frames": [' + frame + b"]}"
    other = b'{"thread_name": null, "frames": null}'
    found = read_spied(b"[" + other + b"," + main + b"]")
    assert found["stack"] == [{"function": "f", "file": "/a.py", "line": 3}]
    assert len(found["threads"]) == 1
    assert read_spied(b"") == read_spied(b"[]") == read_spied(b"{}") == {}


def test_a_process_that_uses_its_cpu_is_not_idle() -> None:
    now = [100.0]
    clock = IdleClock(lambda: now[0])
    pids = [os.getpid(), 0]
    assert clock.seconds(pids) == 0.0
    now[0] += 1000.0
    assert clock.seconds(pids) == 1000.0, "a little CPU in a long time"
    until = sum(os.times()[:2]) + 0.3
    while sum(os.times()[:2]) < until:
        pass
    now[0] += 1.0
    assert clock.seconds(pids) == 0.0
    assert clock.seconds([]) == 0.0


def test_a_process_that_reads_or_writes_is_not_idle(tmp_path: Path) -> None:
    now = [100.0]
    clock, before = IdleClock(lambda: now[0]), io_bytes(os.getpid())
    pids = [os.getpid()]
    assert clock.seconds(pids) == 0.0
    (tmp_path / "saved").write_bytes(bytes(4_000_000))
    assert io_bytes(os.getpid()) - before >= 4_000_000
    assert io_bytes(2**22 + 1) == 0
    now[0] += 2.0
    assert clock.seconds(pids) == 0.0
    now[0] += 1000.0
    assert clock.seconds(pids) == 1000.0


def test_the_kernel_knows_the_state_of_a_process() -> None:
    found = process_facts(os.getpid())
    assert found is not None
    assert found.state == "R"
    assert process_facts(2**22 + 1) is None


async def test_bundles_are_kept_up_to_a_number(tmp_path: Path) -> None:
    store = EvidenceStore(BundleFolder(tmp_path))
    done: asyncio.Queue[EvidenceKept] = asyncio.Queue()
    snapshot = NodeSnapshot(boot_id="boot-0001", number=1, round=1)
    for number in range(1, MAX_BUNDLES + 4):
        manifest = EvidenceManifest(number=number, at=1.0, round=1, reason="asked")
        store.keep(KeepEvidence(manifest, ((NodeId("n0"), snapshot),)), done.put_nowait)
        kept = await asyncio.wait_for(done.get(), 30)
        assert Path(kept.folder, "n0.json").exists()
    assert node_snapshot(tmp_path, "n0") == snapshot
    assert node_snapshot(tmp_path, "n9") is None
    assert node_snapshot(tmp_path, "../manifest") is None
    found = bundles(tmp_path)
    assert [bundle.number for bundle in found] == list(range(4, MAX_BUNDLES + 4))
    assert found[0].nodes == ["n0"]
    EvidenceStore(None).keep(KeepEvidence(manifest, ()), done.put_nowait)
    assert done.empty()


async def test_a_disk_without_space_costs_the_bundle_only(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = EvidenceStore(BundleFolder(blocked))
    manifest = EvidenceManifest(number=1, at=1.0, round=1, reason="asked")
    called: list[EvidenceKept] = []
    store.keep(KeepEvidence(manifest, ()), called.append)
    await asyncio.gather(*(t for t in asyncio.all_tasks() if t is not asyncio.current_task()))
    assert not called
