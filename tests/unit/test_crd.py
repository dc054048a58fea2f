"""The CRD is what ``protocol`` says; a real API server judges it in tests/contracts/test_crd.py."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dlrover_operator import crd
from dlrover_py.protocol.job import JobSpec, ReplicaSpec
from dlrover_py.protocol.status import Training

# Each takes a second, and no test changes what it returns.
schema, definition = cache(crd.schema), cache(crd.definition)
chart = cache(crd.chart)
CHART = Path(__file__).parents[2] / "charts/dlrover/templates/crd.yaml"


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def test_the_chart_has_what_is_generated() -> None:
    assert CHART.read_text() == chart(), (
        "run: python -m dlrover_operator.crd --chart > charts/dlrover/templates/crd.yaml"
    )


def test_the_chart_keeps_it_and_can_leave_it_out() -> None:
    lines = chart().splitlines()
    assert "{{- if .Values.crds.enabled }}" in lines
    plain = "\n".join(line for line in lines if "{{" not in line)
    made = yaml.safe_load(plain)
    assert made["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert made == definition()


def test_it_is_structural() -> None:
    allowed = {*crd.KEPT, "description", "properties", "items", "additionalProperties", "required"}
    for path, node in nodes(schema()):
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node, path
            assert node["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
            assert set(node) <= {*allowed, "anyOf", "x-kubernetes-int-or-string"}, path
            continue
        assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}, path
        assert not {k for k in node if not k.startswith("x-kubernetes-")} - allowed, path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert (node["type"] == "array") == ("items" in node), path
        if path.endswith("template"):
            assert node["x-kubernetes-preserve-unknown-fields"] is True


def test_every_field_of_the_model_is_in_it() -> None:
    found = dict(nodes(schema()))
    for model, path in ((JobSpec, ".spec"), (ReplicaSpec, ".spec.replicaSpecs.worker")):
        for field in model.model_fields.values():
            assert f"{path}.{field.alias}" in found
            assert "description" in found[f"{path}.{field.alias}"] or field.alias == "replicaSpecs"
    for field in Training.model_fields.values():
        assert (f".status.training.{field.alias}" in found) == (field.alias != "conditions")


def test_kubectl_explains_every_field() -> None:
    for path, node in nodes(schema()):
        if path not in ("", ".metadata") and not path.endswith("[]"):
            assert node.get("description", "").strip(), path
        assert ":class:" not in node.get("description", ""), path


def test_the_status_is_lenient() -> None:
    for path, node in nodes(schema()["properties"]["status"]):
        if not path.startswith(".conditions[]"):
            assert not {"required", "enum", "minimum", "maximum", "default"} & set(node), path


def test_each_time_is_rfc_3339() -> None:
    times = {}
    for path, node in nodes(schema()["properties"]["status"]):
        if re.search(r"\.(at|\w+(At|Since|Time|Timestamp))$", path):
            times[path] = (node["type"], node.get("format"))
    assert set(times.values()) == {("string", "date-time")}, times
    known = {".startTime", ".conditions[].lastTransitionTime", ".training.endedAt"}
    assert known <= set(times)


def test_each_column_is_a_scalar_of_the_status() -> None:
    found = dict(nodes(schema()))
    (version,) = definition()["spec"]["versions"]
    for column in version["additionalPrinterColumns"]:
        if column["type"] != "date":
            path = re.sub(r"\[\?\(@\.type==\"\w+\"\)\]", "[]", column["jsonPath"])
            assert found[path]["type"] == column["type"], column
