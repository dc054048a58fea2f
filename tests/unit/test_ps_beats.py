"""A server with long work to do is not taken for dead."""

import time
from dataclasses import replace
from pathlib import Path

import zmq

from dlrover_py.ps.beats import Beats
from dlrover_py.ps.coordinator import Coordinator
from dlrover_py.ps.map_store import MapFile
from dlrover_py.ps.planner import PlanRules
from tests.ps_threads import turn

RULES = PlanRules(buckets=1, servers=1, silence_s=1.0, return_s=1.0)


def test_a_server_whose_process_runs_is_not_lost(tmp_path: Path) -> None:
    made = Coordinator("job", "token", MapFile(tmp_path / "map.json"), RULES, time.monotonic())
    context = zmq.Context()
    try:
        made.planner.heard("s0", "tcp://here", time.monotonic())
        with Beats(context, made.access, "s0") as beats:
            until = time.monotonic() + 3 * RULES.silence_s
            while time.monotonic() < until:
                turn(made)
            assert "s0" in made.planner.map.servers
            assert not made.planner.map.placements[0].lost
            beats.turned()
        _turn_until_lost(made)
    finally:
        context.destroy(linger=0)
        made.close()


def test_a_server_whose_thread_is_stuck_is_lost(tmp_path: Path) -> None:
    made = Coordinator("job", "token", MapFile(tmp_path / "map.json"), RULES, time.monotonic())
    context = zmq.Context()
    try:
        made.planner.heard("s0", "tcp://here", time.monotonic())
        with Beats(context, made.access, "s0", stuck_s=2.0):
            _turn_until_lost(made)
        assert not made.planner.map.servers
    finally:
        context.destroy(linger=0)
        made.close()


def test_a_server_that_was_lost_does_not_come_back_by_its_beats(tmp_path: Path) -> None:
    rules = replace(RULES, servers=2)
    made = Coordinator("job", "token", MapFile(tmp_path / "map.json"), rules, time.monotonic())
    made.planner.heard("s0", "tcp://here", 0.0)
    made.planner.lost("s0")
    made.planner.beat("s0", 1.0)
    assert not made.planner.map.servers
    made.close()


def _turn_until_lost(made: Coordinator) -> None:
    deadline = time.monotonic() + 60
    while "s0" in made.planner.map.servers:
        assert time.monotonic() < deadline, "a silent server stays in the map"
        turn(made)
