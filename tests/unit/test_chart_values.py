"""Values of the chart and their schema, without helm, which not every developer has."""

import json
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts/dlrover"


def unknown(values: dict[str, Any], schema: dict[str, Any], place: str = "") -> list[str]:
    """Return the names of values that a schema without further properties does not have."""
    known = schema.get("properties", {})
    found = []
    for name, value in values.items():
        if name not in known:
            found += [f"{place}{name}"] if schema.get("additionalProperties") is False else []
        elif isinstance(value, dict):
            found += unknown(value, known[name], f"{place}{name}.")
    return found


def test_the_schema_has_each_value() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert unknown(values, schema) == []
    assert unknown({"kueue": {"wrong": 1}, "new": {}}, schema) == ["kueue.wrong", "new"]
