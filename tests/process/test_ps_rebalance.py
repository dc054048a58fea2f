"""A user evens the servers of a parameter server by their loads, and lets one of them leave."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from dlrover_py.protocol.job_view import load_shares
from tests.process.harness import CALM, Job, Place, eventually, job
from tests.programs import PROGRAMS

pytestmark = pytest.mark.process


def seen(run: Job) -> dict[str, Any]:
    """Return the map, as scripts get it."""
    found: dict[str, Any] = json.loads(run.cli("ps", "map", "--json"))
    return found


def placed(known: dict[str, Any]) -> list[tuple[str, list[str], list[str]]]:
    """Return where each bucket of a map is."""
    return [(one["primary"], one["backups"], one["receivers"]) for one in known["placements"]]


def busiest(run: Job, lowest: float, highest: float) -> Callable[[], bool]:
    """Return a check whether the busiest server has about so many times the mean load."""

    def looked() -> bool:
        tables = run.status().tables
        return tables is not None and (
            lowest <= max(load_shares(tables).values(), default=0.0) <= highest
        )

    return looked


def is_whole(run: Job, servers: set[str]) -> bool:
    """Return whether each bucket has two copies on these servers, and nothing moves."""
    known = seen(run)
    return {one["id"] for one in known["servers"]} == servers and all(
        {one["primary"], *one["backups"]} == servers and not one["receivers"]
        for one in known["placements"]
    )


def test_servers_are_evened_and_drained_while_workers_push(place: Place) -> None:
    given = {"settings": CALM, "ps": {"replicas": 2, "buckets": 8}, "replicas": 1}
    script, args = PROGRAMS / "count_hot_rows.py", (str(place.folder),)
    with job(place, script=script, args=args, **given) as run:  # type: ignore[arg-type]
        run.running(1)
        eventually(busiest(run, 1.15, 1.25), "one server with 1.2 times the mean load")
        before = seen(run)
        assert [one["primary"] for one in before["placements"]] == ["ps0", "ps1"] * 4
        assert [one["backups"] for one in before["placements"]] == [["ps1"], ["ps0"]] * 4
        shown = run.cli("ps", "map")
        assert "0 2 4 6" in shown
        assert "1 3 5 7" in shown

        foreseen = run.cli("ps", "rebalance", "--dry-run")
        assert "1 bucket would move" in foreseen
        assert "ps0 → ps1, which has a copy" in foreseen
        assert placed(seen(run)) == placed(before)
        said = run.cli("ps", "rebalance")
        assert "1 bucket will be led by other servers, 0 will be copied" in said
        eventually(busiest(run, 1.0, 1.08), "even servers")
        assert "nothing moves" in run.cli("ps", "rebalance")
        leads = [one["primary"] for one in seen(run)["placements"]]
        assert (leads.count("ps0"), leads.count("ps1")) == (3, 5)

        wrong = place.call("dlrover", "ps", "drain", "ps9")
        assert wrong.returncode == 2
        assert "has no server ps9: expected one of ps0, ps1" in wrong.stderr
        run.cli("node", "add")
        assert "ps0 has left" in run.cli("ps", "drain", "ps0")
        eventually(lambda: is_whole(run, {"ps1", "ps2"}), "two copies of each bucket")
        events = [one.reason for one in run.status().events]
        assert "NodeLost" not in events
        (place.folder / "enough").touch()
        assert run.wait() == 0
    steps, _, values = (place.folder / "rows").read_text().partition(" ")
    assert values == f"[{float(steps)}]", "a push was lost, or counted twice"
