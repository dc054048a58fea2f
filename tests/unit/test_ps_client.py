"""A worker's client of the parameter server, with a coordinator that the test drives."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from dlrover_py.protocol.errors import ConfigError, DLRoverError, SupersededError
from dlrover_py.ps import messages as m
from dlrover_py.ps import specs
from dlrover_py.ps.calls import save
from dlrover_py.ps.client import DataLossError, PsClient, default_client
from dlrover_py.ps.client import connect as connect_worker
from dlrover_py.ps.coordinator import Coordinator
from dlrover_py.ps.door import guard, guarded
from dlrover_py.ps.hashing import bucket_of, salt_of
from dlrover_py.ps.map_store import MapFile
from dlrover_py.ps.planner import PlanRules
from dlrover_py.ps.request_rows import TableRows
from dlrover_py.ps.settings import write_access
from dlrover_py.ps.specs import TableSpec
from dlrover_py.ps.wire import decode, send
from tests.ps_threads import TOKEN, client, coordinating, servers, turn

WAIT_S = 30.0


def test_a_request_that_begins_after_its_rows_were_lost_fails_at_once(tmp_path: Path) -> None:
    """It waited for the next map, which may never come."""
    rules = PlanRules(buckets=4, silence_s=2 * WAIT_S)
    coordinator = Coordinator("job", TOKEN, MapFile(tmp_path / "map.json"), rules, time.monotonic())
    coordinator.planner.heard("s0", "tcp://127.0.0.1:9", time.monotonic())  # nothing listens
    with (
        coordinating(coordinator) as stop,
        PsClient(coordinator.access, "worker-0", timeout_s=2 * WAIT_S) as worker,
    ):
        worker.create(TableSpec("table", 4))
        stop()
        coordinator.lost("s0")
        coordinator.tick(time.monotonic())  # the last map that the worker gets
        deadline = time.monotonic() + WAIT_S
        while not any(one.lost for one in worker.map.placements):
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        with pytest.raises(DataLossError, match="all copies of some rows are lost"):
            worker.pull({"table": np.arange(9)}).result(WAIT_S)
        grads = np.zeros((9, 4), np.float32)
        with pytest.raises(DataLossError, match="all copies of some rows are lost"):
            worker.push({"table": (np.arange(9), grads)}).result(WAIT_S)


class DeafAtFirst(Coordinator):
    """A coordinator that reads each kind of request only when it comes a second time."""

    def __init__(self, folder: Path) -> None:
        rules = PlanRules(buckets=4, silence_s=2 * WAIT_S)
        super().__init__("job", TOKEN, MapFile(folder / "map.json"), rules, time.monotonic())
        self.ignored: list[type] = []

    def _handle(self, route: bytes, message: Any, now: float) -> None:
        if type(message) in self.ignored:
            super()._handle(route, message, now)
        self.ignored.append(type(message))


def test_two_programs_of_one_name_never_have_the_same_rights(tmp_path: Path) -> None:
    """One that began before there were servers took the rights of the next one."""
    rules = PlanRules(buckets=4, silence_s=2 * WAIT_S)
    coordinator = Coordinator("job", TOKEN, MapFile(tmp_path / "map.json"), rules, time.monotonic())
    errors: list[Exception] = []

    def begin() -> None:
        try:
            PsClient(coordinator.access, "worker-0", timeout_s=WAIT_S).close()
        except DLRoverError as error:
            errors.append(error)

    program = threading.Thread(target=begin)
    program.start()
    try:
        deadline = time.monotonic() + WAIT_S
        while "worker-0" not in coordinator.planner.map.clients and time.monotonic() < deadline:
            turn(coordinator)
        turn(coordinator)
        coordinator.planner.join("worker-0", "another program")
        coordinator.planner.heard("s0", "tcp://127.0.0.1:9", time.monotonic())
        while program.is_alive() and time.monotonic() < deadline:
            turn(coordinator)
    finally:
        program.join()
        coordinator.close()
    assert [type(error) for error in errors] == [SupersededError]


def test_a_request_that_a_dead_coordinator_did_not_read_is_sent_again(
    tmp_path: Path,
) -> None:
    coordinator = DeafAtFirst(tmp_path)
    coordinator.planner.heard("s0", "tcp://127.0.0.1:9", time.monotonic())
    with coordinating(coordinator):
        with PsClient(coordinator.access, "worker-0", timeout_s=WAIT_S, watch_s=0.2) as worker:
            worker.create(TableSpec("table", 4))
            worker.use(specs.ssp(2), 1)
            incarnation = worker.map.clients["worker-0"]
            assert {m.JoinClient, m.CreateTable, m.UseConsistency} <= set(coordinator.ignored)
        assert coordinator.planner.map.clients == {"worker-0": incarnation}


def test_the_rows_of_all_buckets_in_another_order_are_put_in_their_places() -> None:
    ids = np.array([10, 11, 12, 20])
    part = TableRows("t", [ids], np.array([0, 3, 3, 4]), np.arange(4), np.zeros((4, 1), np.float32))
    assert part.of((0, 1, 2))[0] is ids
    assert part.of((2, 1, 0))[0].tolist() == [20, 10, 11, 12]
    part.receive((2, 0), [np.array([[20.0], [10.0], [11.0], [12.0]], np.float32)])
    assert part.rows is not None
    assert part.rows[:, 0].tolist() == ids.tolist()


def test_a_future_that_its_owner_gives_up_stops_nothing(tmp_path: Path) -> None:
    """Its thread died, and no later call ever returned. ``asyncio.wait_for`` cancels, too."""
    with servers(tmp_path, 1) as access, client(access) as worker:
        worker.create(TableSpec("table", 4))
        ids = np.arange(9)
        assert not worker.pull({"table": ids}).cancel()
        grads = np.zeros((9, 4), np.float32)
        assert not worker.push({"table": (ids, grads)}).cancel()
        assert worker.pull({"table": ids}).result(WAIT_S)["table"].shape == (9, 4)
    with pytest.raises(DLRoverError, match="the client was closed"):
        worker.pull({"table": ids})


def test_an_answer_that_the_client_cannot_use_ends_all_calls(tmp_path: Path) -> None:
    """The rows of the table are missing in it. Each later call waited for ever."""
    rules = PlanRules(buckets=4, silence_s=2 * WAIT_S)
    coordinator = Coordinator("job", TOKEN, MapFile(tmp_path / "map.json"), rules, time.monotonic())
    key, context = coordinator.access.key, zmq.Context()
    guard(context, key)
    router = guarded(context)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    coordinator.planner.heard("s0", f"tcp://127.0.0.1:{port}", time.monotonic())
    try:
        with (
            coordinating(coordinator),
            PsClient(coordinator.access, "worker-0", timeout_s=2 * WAIT_S) as worker,
        ):
            worker.create(TableSpec("table", 4))
            found = worker.pull({"table": np.arange(9)})
            assert router.poll(int(WAIT_S * 1000))
            route, *frames = router.recv_multipart()
            asked, _ = decode(frames, key)
            send(router, m.Pulled(asked.seq, asked.buckets), [], key, route)
            with pytest.raises(DLRoverError, match="the client of the parameter server has failed"):
                found.result(WAIT_S)
            with pytest.raises(DLRoverError, match="has failed"):
                worker.pull({"table": np.arange(9)})
    finally:
        context.destroy(linger=0)


def test_a_push_is_done_although_the_next_one_cannot_be_sent(tmp_path: Path) -> None:
    """Its future never was, because the error of the next push came first."""
    rules = PlanRules(buckets=2, servers=2, replicas=1, silence_s=2 * WAIT_S)
    coordinator = Coordinator("job", TOKEN, MapFile(tmp_path / "map.json"), rules, time.monotonic())
    key, context = coordinator.access.key, zmq.Context()
    guard(context, key)
    router = guarded(context)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    coordinator.planner.heard("s0", f"tcp://127.0.0.1:{port}", time.monotonic())
    coordinator.planner.heard("s1", "an address that does not exist", time.monotonic())
    buckets = bucket_of(np.arange(9), salt_of("table"), 2)
    try:
        with (
            coordinating(coordinator),
            PsClient(coordinator.access, "worker-0", timeout_s=2 * WAIT_S) as worker,
        ):
            worker.create(TableSpec("table", 4))
            first, second = (
                worker.push({"table": (ids, np.ones((len(ids), 4), np.float32))})
                for ids in (np.flatnonzero(buckets == bucket) for bucket in range(2))
            )
            assert router.poll(int(WAIT_S * 1000))
            route, *frames = router.recv_multipart()
            asked, _ = decode(frames, key)
            send(router, m.Pushed(asked.seq, asked.buckets), [], key, route)
            with pytest.raises(DLRoverError, match="the client of the parameter server has failed"):
                second.result(WAIT_S)
            assert first.result(WAIT_S) == {}
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_nothing_is_applied_of_a_gradient_that_is_no_number(tmp_path: Path, wrong: float) -> None:
    """Only the server with its row refused it, and the client could do nothing more."""
    ids, grads = np.arange(10), -np.ones((10, 2), np.float32)
    with servers(tmp_path) as access, client(access) as worker:
        worker.create(TableSpec("table", 2, specs.sgd(1.0), specs.uniform(0.0, 0.0)))
        worker.create(TableSpec("other", 2, specs.sgd(1.0), specs.uniform(0.0, 0.0)))
        odd = grads.copy()
        odd[3, 1] = wrong
        with pytest.raises(ConfigError, match="table: the gradient of id 3 is infinite or not a"):
            worker.push({"other": (ids, grads), "table": (ids, odd)}).result(WAIT_S)
        for name in ("table", "other"):
            assert not worker.pull({name: ids}).result(WAIT_S)[name].any()
        worker.push({"table": (ids, grads)}).result(WAIT_S)
        assert (worker.pull({"table": ids}).result(WAIT_S)["table"] == 1).all()


def test_the_first_connection_of_a_process_is_that_of_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save connected again under the same name, and that ended the rights of the first one."""
    ids, grads = np.arange(5), np.ones((5, 4), np.float32)
    with servers(tmp_path, 1, cuts=str(tmp_path / "cuts")) as access:
        write_access(tmp_path / "access.json", access)
        monkeypatch.setenv("DLROVER_PS", str(tmp_path / "access.json"))
        with connect_worker(name="other"), connect_worker(timeout_s=WAIT_S) as worker:
            assert default_client() is worker
            worker.create(TableSpec("table", 4))
            worker.push({"table": (ids, grads)}).result(WAIT_S)
            save(1)
            worker.push({"table": (ids, grads)}).result(WAIT_S)
        with default_client() as second:
            assert second is not worker, "the first one is closed"
            assert default_client() is second
