"""A job with the role ``ps``: servers and the master die while it trains, and no row changes."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from dlrover_py.protocol.names import PS_MAP_FILE, is_server
from dlrover_py.ps.cluster_map import ClusterMap
from tests.process.harness import CALM, Job, Place, eventually, job
from tests.process.test_parameter_server import steps, undisturbed
from tests.programs import PROGRAMS

PROGRAM = PROGRAMS / "train_on_ps.py"
STEPS = 150


def servers(run: Job) -> dict[str, int]:
    """Return the processes of the servers that run, by node."""
    found = run.snapshot().nodes
    return {one.id: one.pid for one in found if is_server(one.id) and one.state == "running"}


def map_of(run: Job) -> ClusterMap:
    return msgspec.json.decode((run.logs.parent / PS_MAP_FILE).read_bytes(), type=ClusterMap)


def holders(run: Job) -> set[str]:
    """Return the servers that have rows."""
    return {name for one in map_of(run).placements for name in one.members}


def is_whole(run: Job, count: int) -> bool:
    """Return whether this many servers run and each row has two copies on some of them."""
    known = map_of(run)
    return (
        len(known.servers) == count
        and known.servers.keys() == servers(run).keys()
        and not known.draining
        and all(
            not one.learner and len(one.members) == 2 and set(one.members) <= known.servers.keys()
            for one in known.placements
        )
    )


def _rows_are_told(run: Job) -> Callable[[], bool]:
    """Return a check whether each server has said that it has rows."""

    def told() -> bool:
        tables = run.status().tables
        return (
            tables is not None
            and len(tables.servers) == 3
            and all(one.rows > 0 and one.memory_bytes > 0 for one in tables.servers)
        )

    return told


def held(folder: Path, step: int) -> Callable[[], bool]:
    """Return a check whether both ranks wait after a step."""
    return lambda: all(len(steps(folder, rank)) == step + 1 for rank in (0, 1))


def test_the_job_replaces_servers_and_its_master_and_no_row_changes(place: Place) -> None:
    folder = place.folder / "run-1"
    folder.mkdir()
    for step in (50, 100):
        (folder / f"hold.{step}").touch()
    given = {"settings": CALM, "ps": {"replicas": 3}, "replicas": 2}
    args = (str(folder), str(STEPS))
    with job(place, script=PROGRAM, args=args, **given) as run:  # type: ignore[arg-type]
        eventually(lambda: len(steps(folder, 0)) > 10, "10 steps")
        first = servers(run)
        assert first.keys() == {"ps0", "ps1", "ps2"}
        os.kill(first["ps1"], signal.SIGKILL)
        eventually(lambda: is_whole(run, 3), "a server in the place of the killed one")
        eventually(held(folder, 50), "the first hold")
        assert servers(run).keys() == {"ps0", "ps2", "ps3"}
        assert run.status().nodes_in_round == 2

        # A server dies while there is no master: the next one finds out.
        os.kill(run.snapshot().master_pid, signal.SIGKILL)
        os.kill(first["ps0"], signal.SIGKILL)
        (folder / "hold.50").unlink()
        eventually(held(folder, 100), "the second hold")
        eventually(lambda: is_whole(run, 3), "servers of the next master")
        assert servers(run).keys() == {"ps2", "ps3", "ps4"}

        # A drained server gives its rows away first. Its host is gone then.
        run.hurt("ps2", "drain")
        run.cli("node", "add")
        eventually(lambda: is_whole(run, 3) and "ps2" not in servers(run), "the drained server")
        lost = [one.node for one in run.status().events if one.reason == "NodeLost"]
        assert lost == ["ps1", "ps0"]
        assert run.status().round == 1
        (folder / "hold.100").unlink()
        assert run.wait() == 0
    rows = [(folder / f"rows.{rank}").read_text() for rank in (0, 1)]
    assert rows == undisturbed(place.folder / "calm", STEPS)


def test_a_standby_takes_the_rows_of_a_killed_server_and_keeps_them(place: Place) -> None:
    folder = place.folder / "run-1"
    folder.mkdir()
    (folder / "hold.40").touch()
    given = {"settings": CALM, "ps": {"replicas": 2, "standbyReplicas": 1}, "replicas": 2}
    args = (str(folder), "60")
    with job(place, script=PROGRAM, args=args, **given) as run:  # type: ignore[arg-type]
        eventually(lambda: len(steps(folder, 0)) > 10, "10 steps")
        eventually(lambda: is_whole(run, 3), "two servers with rows, and a standby")
        first = holders(run)  # those that came first
        (standby,) = {"ps0", "ps1", "ps2"} - first
        killed = max(first)
        os.kill(servers(run)[killed], signal.SIGKILL)
        left = {"ps0", "ps1", "ps2", "ps3"} - {killed}
        eventually(lambda: servers(run).keys() == left and is_whole(run, 3), "the next standby")
        assert holders(run) == {*first, standby} - {killed}
        (folder / "hold.40").unlink()
        assert run.wait() == 0
    rows = [(folder / f"rows.{rank}").read_text() for rank in (0, 1)]
    assert rows == undisturbed(place.folder / "calm", 60)


def test_a_suspended_job_goes_on_from_its_newest_cut(place: Place) -> None:
    folder = place.folder / "run-1"
    folder.mkdir()
    (folder / "hold.30").touch()
    given = {"settings": CALM, "flags": ("--nproc-per-node=2",), "replicas": 1}
    given["ps"] = {"replicas": 2, "checkpoints": str(place.folder / "cuts"), "restartCount": 0}
    args = (str(folder), "60", "20")
    with job(place, script=PROGRAM, args=args, **given) as run:  # type: ignore[arg-type]
        eventually(held(folder, 30), "the hold")
        run.cli("job", "suspend")
        eventually(lambda: all(one.state == "ended" for one in run.snapshot().nodes), "a rest")
        (folder / "hold.30").unlink()
        run.cli("job", "resume")
        eventually(lambda: servers(run).keys() == {"ps2", "ps3"}, "new servers")
        assert run.wait() == 0
    assert [len(steps(folder, rank)) for rank in (0, 1)] == [31 + 40, 31 + 40]
    rows = [(folder / f"rows.{rank}").read_text() for rank in (0, 1)]
    assert rows == undisturbed(place.folder / "calm", 60)


def test_a_job_whose_servers_die_too_often_fails(place: Place) -> None:
    with job(place, settings=CALM, ps={"restartCount": 0}, replicas=1) as run:
        run.running(1)
        os.kill(eventually(lambda: servers(run), "a server")["ps0"], signal.SIGKILL)
        assert run.wait() == 1
    assert "restartCount of the role ps" in "".join(run.output)


def test_the_number_of_servers_changes_while_training_and_no_row_does(place: Place) -> None:
    folder = place.folder / "run-1"
    folder.mkdir()
    for step in (40, 80, 120):
        (folder / f"hold.{step}").touch()
    given = {"settings": CALM, "ps": {"replicas": 2}, "replicas": 2}
    args = (str(folder), str(STEPS))
    with job(place, script=PROGRAM, args=args, **given) as run:  # type: ignore[arg-type]
        eventually(lambda: len(steps(folder, 0)) > 10, "10 steps")
        run.cli("node", "add", "--count", "2")
        run.cli("job", "scale", "4", "--role", "ps")
        (folder / "hold.40").unlink()  # buckets move while workers push
        eventually(lambda: is_whole(run, 4), "4 servers")
        eventually(held(folder, 80), "the second hold")
        run.cli("job", "scale", "3", "--role", "ps")
        (folder / "hold.80").unlink()
        eventually(lambda: is_whole(run, 3), "3 servers")
        eventually(held(folder, 120), "the third hold")
        assert servers(run).keys() == {"ps0", "ps1", "ps2"}
        assert [one.running for one in run.status().servers] == [True, True, True]
        loads = json.loads(run.cli("ps", "stats", "--json"))["servers"]
        assert [one["id"] for one in loads] == ["ps0", "ps1", "ps2"]
        assert sum(one["leads"] for one in loads) == sum(one["backs_up"] for one in loads) == 64
        table = run.cli("ps", "stats")
        assert "in 64 buckets on 3 servers" in table
        eventually(_rows_are_told(run), "rows in all servers, and rates")
        events = [one.reason for one in run.status().events]
        assert "NodeLost" not in events
        assert run.status().round == 1
        said = [one.message for one in run.status().events if one.reason == "SpecChanged"]
        assert said == ["the desired size is now 4 servers", "the desired size is now 3 servers"]
        (folder / "hold.120").unlink()
        assert run.wait() == 0
    assert [len(steps(folder, rank)) for rank in (0, 1)] == [STEPS, STEPS]
    rows = [(folder / f"rows.{rank}").read_text() for rank in (0, 1)]
    assert rows == undisturbed(place.folder / "calm", STEPS)
