"""A loader changes its settings between two steps, and reports it."""

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from dlrover_py.protocol.agents import LoaderSettings, LoaderState
from dlrover_py.protocol.sdk import (
    MAX_DATAGRAM,
    MAX_LOADER_WORKERS,
    MAX_MICRO_BATCH,
    MAX_TUNING,
    LoaderTuning,
)
from dlrover_py.protocol.workers import WorkerRequest, read_progress
from dlrover_py.trainer import session
from dlrover_py.trainer.data import ElasticLoader
from dlrover_py.trainer.data.tuning import Meter, pack, unpack
from dlrover_py.trainer.session import Session
from dlrover_py.trainer.settings import Settings

N, BATCH = 50, 8

tunings = st.builds(
    LoaderTuning,
    st.integers(0, MAX_TUNING),
    st.none() | st.integers(1, MAX_MICRO_BATCH),
    st.none() | st.integers(0, MAX_LOADER_WORKERS),
)


@given(tunings, tunings)
def test_settings_are_one_number_that_is_greater_for_newer_ones(
    one: LoaderTuning, other: LoaderTuning
) -> None:
    assert unpack(pack(one)) == one
    assert 0 <= pack(one) < 1 << 63, "it must fit into a tensor of int64"
    if one.number < other.number:
        assert pack(one) < pack(other)


def test_a_meter_leaves_out_the_first_step_after_a_pause() -> None:
    times = iter([10.0, 11.0, 14.0, 20.0, 100.0, 102.0])
    meter = Meter(clock=lambda: next(times))
    for waited, counts in ((0.0, True), (0.5, True), (1.5, True), (3.0, False)):
        meter.waited(waited)
        meter.step(counts=counts)
    assert (meter.steps, meter.step_s, meter.data_wait) == (2, 2.0, 0.5)
    meter.pause()
    meter.step(counts=True)
    meter.step(counts=True)
    assert (meter.steps, meter.step_s) == (3, 2.0)
    meter.reset()
    assert (meter.steps, meter.step_s, meter.data_wait) == (0, 0.0, 0.0)


class Agent:
    """The agent's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.sender = b""

    def newest(self) -> LoaderState | None:
        """Return the newest state that was reported."""
        state = None
        while True:
            try:
                data, self.sender = self.socket.recvfrom(MAX_DATAGRAM)
            except BlockingIOError:
                return state
            state = read_progress(data).loader

    def send(self, **fields: Any) -> None:
        settings = LoaderSettings.model_validate(fields)
        self.socket.sendto(WorkerRequest(loader=settings).encode(), self.sender)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """An agent; the session of this process is connected to it."""
    folder = Path(tempfile.mkdtemp())  # a unix socket's path may have 107 bytes
    agent = Agent(folder / "s")
    loader = LoaderTuning(2, micro_batch=3)
    own = Session(Settings(agent_socket=str(folder / "s"), loader=loader))
    monkeypatch.setattr(session, "_session", own)
    yield agent
    own.close()
    agent.socket.close()
    shutil.rmtree(folder)


def train(loader: ElasticLoader, at: dict[int, Any]) -> tuple[list[list[int]], list[int]]:
    """Train an epoch; return the sizes of micro-batches of each step, and all samples.

    Args:
        loader: the loader.
        at: what is called after the commit of a step, by its number.
    """
    sizes: list[list[int]] = []
    samples: list[int] = []
    for step in loader:
        sizes.append([])
        for (batch,) in step:
            sizes[-1].append(len(batch))
            samples += batch.tolist()
        step.commit()
        at.get(loader.steps, lambda: None)()
    return sizes, samples


def test_settings_hold_from_the_next_step_on_and_each_sample_comes_once(agent: Agent) -> None:
    loader = ElasticLoader(TensorDataset(torch.arange(N)), global_batch=BATCH, micro_batch=1)
    found: list[LoaderState | None] = []

    def change() -> None:
        found.append(agent.newest())
        agent.send(number=3, micro_batch=8)

    sizes, samples = train(loader, {2: change, 4: lambda: found.append(agent.newest())})
    assert sizes == [[3, 3, 2]] * 2 + [[8]] * 4 + [[2]]
    assert sorted(samples) == list(range(N))
    first, second = found
    assert first is not None
    assert (first.number, first.micro_batch, first.share, first.step) == (2, 3, 8, 0)
    assert second is not None
    assert (second.number, second.micro_batch, second.step, second.refused) == (3, 8, 2, False)


def test_older_settings_are_ignored_and_a_reset_returns_to_the_script(agent: Agent) -> None:
    loader = ElasticLoader(TensorDataset(torch.arange(N)), global_batch=BATCH, micro_batch=4)

    def change(number: int, **fields: Any) -> Any:
        def send() -> None:
            agent.newest()
            agent.send(number=number, **fields)

        return send

    sizes, _ = train(loader, {1: change(1, micro_batch=8), 3: change(4)})
    assert sizes == [[3, 3, 2]] * 3 + [[4, 4]] * 3 + [[2]]


def test_too_many_workers_are_refused_and_the_rest_is_done(agent: Agent) -> None:
    loader = ElasticLoader(TensorDataset(torch.arange(N)), global_batch=BATCH)
    found: list[LoaderState | None] = []

    def change() -> None:
        agent.newest()
        agent.send(number=5, micro_batch=4, loader_workers=MAX_LOADER_WORKERS)

    sizes, _ = train(loader, {1: change, 3: lambda: found.append(agent.newest())})
    assert sizes[1:6] == [[4, 4]] * 5
    (state,) = found
    assert state is not None
    assert (state.number, state.refused, state.loader_workers) == (5, True, 0)


def test_settings_of_the_last_step_hold_from_the_next_epoch_on(agent: Agent) -> None:
    loader = ElasticLoader(TensorDataset(torch.arange(N)), global_batch=BATCH)

    def change() -> None:
        agent.newest()
        agent.send(number=3, micro_batch=2)

    sizes, samples = train(loader, {7: change})
    assert len(sizes) == 7
    assert sorted(samples) == list(range(N))
    sizes, samples = train(loader, {})
    assert sizes == [[2, 2, 2, 2]] * 6 + [[2]]
    assert sorted(samples) == list(range(N))


def test_the_end_of_an_epoch_is_reported_though_no_step_follows(agent: Agent) -> None:
    loader = ElasticLoader(TensorDataset(torch.arange(N)), global_batch=BATCH)
    found: list[LoaderState | None] = []
    train(loader, {1: lambda: found.append(agent.newest())})
    found.append(agent.newest())
    places = [(state.epoch, state.position, state.samples) for state in found if state is not None]
    assert places == [(0, 0, N), (1, 0, N)]


def test_without_an_agent_nothing_changes() -> None:
    loader = ElasticLoader(TensorDataset(torch.arange(N)), global_batch=BATCH, micro_batch=4)
    assert train(loader, {})[0] == [[4, 4]] * 6 + [[2]]
