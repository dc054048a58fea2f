"""The chart's dashboard against Grafana's own types, which Grafana makes from its schema."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.prometheus import FILES

BOARD: dict[str, Any] = json.loads((FILES / "dashboard.json").read_text())


def unknown(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of our values that Grafana's types have dropped or changed."""
    if isinstance(ours, dict):
        for key, value in ours.items():
            if isinstance(theirs, dict) and key in theirs:
                yield from unknown(value, theirs[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from unknown(one, other, f"{path}/{index}")
    elif ours != theirs:
        yield path


def as_grafana_reads(board: dict[str, Any]) -> Any:
    """Return a dashboard as Grafana's types read and write it."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def test_grafana_knows_every_field_of_the_dashboard() -> None:
    assert [*unknown(BOARD, as_grafana_reads(BOARD))] == []
    odd = BOARD | {"pannels": []}
    assert [*unknown(odd, as_grafana_reads(odd))] == ["/pannels"], "others are found"


def test_each_panel_has_a_number_and_a_place_of_its_own() -> None:
    panels = BOARD["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    for one, other in itertools.combinations((panel["gridPos"] for panel in panels), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)
        assert one["x"] + one["w"] <= 24
