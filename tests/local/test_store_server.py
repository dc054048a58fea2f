"""The TCP store that starts cold: torch's class without the rest of torch."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from dlrover_agent.warm.script import BOOT
from dlrover_agent.warm.store_server import STORE_ALONE
from dlrover_py.protocol.zygote import STARTED

WITHOUT_TORCH = """
import sys
from dlrover_agent.warm import store_server
store_server.STORE_ALONE = {versions!r}
cls = store_server.tcp_store_type()
store = cls("127.0.0.1", 0, None, True, wait_for_workers=False)
store.set("key", "value")
print(store.get("key").decode(), "torch.nn" in sys.modules)
"""


@contextmanager
def store() -> Iterator[int]:
    """Start a store cold, as the agent does, and return its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        agent_end, store_end = socket.socketpair()
        fds = listening.fileno(), store_end.fileno()
        argv = [sys.executable, "-u", "-c", BOOT.format(module="store_server")]
        argv += map(str, (os.getpid(), port, *fds))
        process = subprocess.Popen(argv, pass_fds=fds)
        store_end.close()
    try:
        assert agent_end.recv(len(STARTED)) == STARTED
        yield port
    finally:
        agent_end.close()
        process.kill()
        process.wait()


def test_a_process_group_meets_at_a_store_that_started_cold() -> None:
    with store() as port:
        client = dist.TCPStore("127.0.0.1", port, 1, False)
        dist.init_process_group("gloo", store=client, rank=0, world_size=1)
        try:
            sum_of_one = torch.ones(1)
            dist.all_reduce(sum_of_one)
            assert sum_of_one.item() == 1
            assert client.num_keys() > 0
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("tested", [True, False])
def test_only_a_version_that_was_tested_does_without_the_rest_of_torch(tested: bool) -> None:
    versions = STORE_ALONE if tested else ()
    program = WITHOUT_TORCH.format(versions=versions)
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    this = ".".join(torch.__version__.split(".")[:2])
    assert found.stdout.split() == ["value", str(this not in versions)]
