"""The agent's socket for the SDK: what it takes, and what it says of the rest."""

import logging
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover_agent.channels.sdk_socket import SdkServer
from dlrover_py.protocol import sdk
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
