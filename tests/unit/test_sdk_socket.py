"""The agent's socket for the SDK: what it takes, and what it says of the rest."""

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_agent.channels.sdk_socket import SdkServer
from dlrover_py.protocol import sdk
from dlrover_py.protocol.agents import LoaderSettings
from dlrover_py.protocol.workers import CheckpointTarget, WorkerProgress


class Listener:
    """A listener that ignores checkpoints."""

    def staged(self, local_rank: int, step: int) -> None:
        raise AssertionError(step)

    def stores(self, target: CheckpointTarget) -> None:
        raise AssertionError(target)

    def unsaved(self, local_rank: int, why: str) -> None:
        assert why == ""


@pytest.fixture
def path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())  # a unix socket's path may have 107 bytes
    yield folder / "s"
    shutil.rmtree(folder)


async def test_a_report_of_another_version_is_refused_once_a_round_and_in_words(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[WorkerProgress] = []
    server = SdkServer(path, 1, taken.append, Listener())
    newer = sdk.encode({"version": 2, "round": 0, "local_rank": 0, "step": 1, "polls": True})
    whole = sdk.encode({"version": 1, "round": 0, "local_rank": 0, "step": 2})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.connect(str(path))
        for data in (newer, newer, whole):
            link.send(data)
            server.drain()
        assert [news.step for news in taken] == [2]
        assert server.stop_pollers == set()
        words = ["it has version 2: expected version 1; use the same release of DLRover-Py at both "
                 "ends"]  # fmt: skip
        assert [vars(record)["why"] for record in caplog.records] == words
        server.new_round(1)
        link.send(newer)
        server.drain()
        assert [vars(record)["why"] for record in caplog.records] == words * 2
    server.close()


async def test_a_script_that_agrees_may_end_its_first_step_before_it_has_saved_one(
    path: Path,
) -> None:
    server = SdkServer(path, 2, lambda progress: None, Listener())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.connect(str(path))
        link.bind(b"")  # a name, for answers
        for local_rank, agrees in ((0, True), (1, False)):
            link.send(
                sdk.encode(
                    {
                        "round": 0,
                        "local_rank": local_rank,
                        "polls": True,
                        "agrees": agrees,
                        "step": 1,
                    }
                )
            )
        assert (server.stop_pollers, server.last_step_savers) == ({0, 1}, {0})
        server.new_round(1)
        assert server.last_step_savers == set()
    server.close()


async def test_a_datagram_that_was_cut_is_refused_by_its_size(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken: list[WorkerProgress] = []
    server = SdkServer(path, 1, taken.append, Listener())
    whole = sdk.encode({"version": 1, "round": 0, "local_rank": 0, "step": 2})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.connect(str(path))
        link.send(whole.ljust(sdk.MAX_DATAGRAM))
        link.send(whole.ljust(sdk.MAX_DATAGRAM + 1))
        server.drain()
    server.close()
    assert len(taken) == 1
    (record,) = caplog.records
    assert vars(record)["why"] == "it is too large: expected at most 8192 bytes"
    assert record.levelno == logging.WARNING


def state(number: int, local_rank: int = 0) -> bytes:
    """A report of a data loader that has taken up settings."""
    loader: sdk.LoaderFields = {
        "number": number,
        "refused": False,
        "step": 4,
        "micro_batch": 2,
        "share": 8,
        "batch": 16,
        "loader_workers": 0,
        "most_workers": 4 - local_rank,
        "measured": 0,
        "samples_per_s": 0.0,
        "memory": 0.0,
        "memory_before": 0.0,
        "data_wait": 0.0,
        "epoch": 0,
        "position": 0,
        "samples": 0,
    }
    return sdk.encode({"version": 1, "round": 1, "local_rank": local_rank, "loader": loader})


def received(link: socket.socket) -> list[sdk.AgentRequest]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(sdk.read_worker_request(link.recv(sdk.MAX_DATAGRAM)))
    return found


async def test_each_loader_gets_new_settings_once(path: Path) -> None:
    server = SdkServer(path, 2, lambda _: None, Listener())
    server.new_round(1)
    server.tune(LoaderSettings(number=2, micro_batch=8))
    assert server.loader(1) is None
    with contextlib.ExitStack() as stack:
        links = []
        for local_rank in range(2):
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            link.connect(str(path))
            link.bind(b"")
            link.setblocking(False)
            links.append(link)
            link.send(state(local_rank, local_rank))
            link.send(state(local_rank, local_rank))
        server.drain()
        slowest = server.loader(1)
        assert slowest is not None
        assert (slowest.number, slowest.most_workers) == (0, 3)
        assert server.loader(2) is None, "its workers are those of another round"
        expected = sdk.AgentRequest("", sdk.LoaderTuning(2, 8, None))
        assert [received(link) for link in links] == [[expected], [expected]]
        links[0].send(state(2))
        server.tune(LoaderSettings(number=3))
        newer = sdk.AgentRequest("", sdk.LoaderTuning(3, None, None))
        assert [received(link) for link in links] == [[newer], [newer]]
        server.new_round(2)
        assert server.loader(2) is None
    server.close()
