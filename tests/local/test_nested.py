"""What tells a launcher below a worker from the worker's own processes."""

import os
import subprocess
import sys

import pytest

from dlrover_agent.workers.nested_launchers import ExpectedWorld, find_launcher
from dlrover_py.process.identity import ProcessId
from tests import slots

WORLD = ExpectedWorld(3, 4, 29501, "/run/agent", frozenset({"PMI_SIZE"}))
OURS = {
    "DLROVER_AGENT_SOCKET": "/run/agent",
    "DLROVER_ROUND": "3",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_PORT": "29501",
}


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        (OURS, ""),
        (OURS | {"WORLD_SIZE": "1"}, "1"),
        (OURS | {"MASTER_PORT": "29500"}, "4"),
        (OURS | {"OMPI_COMM_WORLD_SIZE": "2"}, "2"),
        (OURS | {"PMI_SIZE": "2"}, ""),
        (OURS | {"WORLD_SIZE": "1", "DLROVER_ROUND": "2"}, ""),
        (OURS | {"WORLD_SIZE": "1", "DLROVER_AGENT_SOCKET": "/run/its-own"}, ""),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}, ""),
        ({"DLROVER_ROUND": "3", "WORLD_SIZE": "1", "MASTER_PORT": "1"}, ""),
        ({}, ""),
    ],
)
def test_a_world_of_its_own_is_told_by_the_environment(environ: dict[str, str], size: str) -> None:
    assert WORLD.other(environ) == size


@pytest.mark.parametrize("size", ["1", "4"])
def test_a_processs_descendants_are_looked_through(size: str) -> None:
    ends = "import sys; print(flush=True); sys.stdin.read()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ends!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", starts],
        env=os.environ | OURS | {"WORLD_SIZE": size},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdout.readline()
        name = ProcessId.of(worker.pid)
        found = find_launcher(WORLD, [None, name])
        worker.stdin.close()
    assert found == "" if size == "4" else found.startswith("worker 1 has started process")
    assert find_launcher(WORLD, [name]) == "", "it has ended"


def test_without_file_descriptors_a_look_finds_nothing_and_the_next_one_follows() -> None:
    worker = ProcessId.of(os.getpid())
    with slots.no_more_files():
        assert find_launcher(WORLD, [worker]) == ""
