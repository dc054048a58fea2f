"""A real master with a few hundred simulated agents: those of the benchmark, but fewer."""

import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.scale import TOKEN, Master, Outcome, Run, Swarm, open_files
from dlrover_py.master.app import listen
from dlrover_py.net.http_client import enable_keepalive
from tests.certificates import issue

AGENTS = 300
LEASE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All agents are in this process, which may be held up."""
    monkeypatch.setenv("DLROVER_MASTER_LEASE_S", str(LEASE_S))


@asynccontextmanager
async def swarm(folder: Path, *, tls: bool) -> AsyncIterator[tuple[Run, Swarm, Outcome]]:
    """So many agents, connected and in their first round."""
    certificates = issue(folder) if tls else None
    context = None
    if certificates is not None:
        context = ssl.create_default_context(cafile=str(certificates.authority))
    open_files(AGENTS)
    master = Master(folder, AGENTS, os.sched_getaffinity(0), certificates)
    agents = Swarm(AGENTS, master.port, token=TOKEN, tls=context)
    outcome = Outcome(AGENTS, tls)
    try:
        master.start()
        run = Run(master, agents, outcome, steady_s=1.0)
        await run.join()
        yield run, agents, outcome
    finally:
        agents.close()
        master.stop()
    assert not agents.surprises
    assert "Traceback" not in master.log()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_who_does_not_read_or_stops_in_the_middle_holds_up_nobody(
    tmp_path: Path, tls: bool
) -> None:
    async with swarm(tmp_path, tls=tls) as (run, agents, outcome):
        await run.adversity()
        took = {part.name: part.took_s for part in outcome.parts}
        # Of the lease, which is what waiting for one of them would take, nothing is seen.
        assert took["adversity"] < LEASE_S / 2
        assert {agent.follows for agent in agents.agents} == {3}


async def test_all_find_their_next_master_and_stay_in_their_round(tmp_path: Path) -> None:
    async with swarm(tmp_path, tls=False) as (run, agents, _):
        await run.restart()
        assert {agent.follows for agent in agents.agents} == {1}
        assert {agent.have[0] for agent in agents.agents} == {2}


@pytest.mark.parametrize("silence_s", [2, 5, 17, 60, 86400])
def test_an_accepted_connection_is_watched_by_the_kernel(silence_s: int) -> None:
    with listen("127.0.0.1:0") as door:
        enable_keepalive(door, silence_s)
        with socket.create_connection(door.getsockname()), door.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            tcp = socket.IPPROTO_TCP
            idle = accepted.getsockopt(tcp, socket.TCP_KEEPIDLE)
            every = accepted.getsockopt(tcp, socket.TCP_KEEPINTVL)
            times = accepted.getsockopt(tcp, socket.TCP_KEEPCNT)
            assert 0.7 * silence_s <= idle + every * times <= silence_s
            assert accepted.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == silence_s * 1000
