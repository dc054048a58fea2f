"""``python -m dlrover_operator.crd``: the CustomResourceDefinition, made from ``protocol``.

The schema of the spec is that of ``protocol/job.py``; what holds between fields is said in CEL.
That of the status is lenient (no bounds, nothing required): after an upgrade of the CRD masters of
the last version go on writing theirs.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from dlrover_py.protocol import names
from dlrover_py.protocol.job import (
    OTHER_ROLES,
    JobSpec,
)
from dlrover_py.protocol.status import ElasticJobStatus

Schema = dict[str, Any]

KEPT: tuple[str, ...] = ("type", "enum", "default", "pattern", "minimum", "maximum", "format")
KEPT += ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LENIENT: tuple[str, ...] = ("type", "format")
MAP_KEYS = {"conditions": ["type"]}


def definition() -> Schema:
    """The whole CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": ["ej"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": names.API_VERSION.rpartition("/")[2],
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": _columns(),
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicaSpecs.worker.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "schema": {"openAPIV3Schema": schema()},
                }
            ],
        },
    }


def schema() -> Schema:
    """The schema of the object."""
    spec = _convert(JobSpec.model_json_schema(by_alias=True), JobSpec, KEPT)
    spec["x-kubernetes-validations"] = [
        _fixed("managedBy"),
        _fixed("distributionStrategy"),
    ]
    roles = spec["properties"]["replicaSpecs"]
    roles.pop("required")  # a PS job may have no worker: it is accepted, and told Unsupported
    roles["x-kubernetes-validations"] = [
        _rule(
            " || ".join(f"has(self.{role})" for role in ("worker", *OTHER_ROLES)),
            "expected the role worker",
        ),
        _rule(
            # A job of another role is told Unsupported, whatever its workers are.
            " || ".join(
                (
                    "!has(self.worker)",
                    "self.worker.replicas > 0",
                    *tuple(
                        f"(has(self.{role}) && (!has(self.{role}.replicas) || "
                        f"self.{role}.replicas > 0))"
                        for role in OTHER_ROLES
                    ),
                )
            ),
            "worker.replicas is 0: expected at least 1",
        ),
    ]
    roles["properties"]["worker"]["properties"]["replicas"]["minimum"] = 0
    roles["properties"]["worker"]["x-kubernetes-validations"] = list(_of_worker())
    status = _convert(ElasticJobStatus.model_json_schema(by_alias=True), ElasticJobStatus, LENIENT)
    training = status["properties"]["training"]
    training["properties"].pop("conditions")
    # A master that was cut off says what it has to say as soon as it is back, before it can know.
    training["x-kubernetes-validations"] = [
        _rule(
            "!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)",
            "a newer master has written the status: that of an older one is refused",
        )
    ]
    return {
        "description": "An elastic PyTorch training job.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": "Version of the schema.", "type": "string"},
            "kind": {"description": "ElasticJob.", "type": "string"},
            "metadata": {"type": "object"},  # the API server describes it itself
            "spec": {"description": "What the user wants."} | spec,
            "status": {"description": "How the job is, by operator and master."} | status,
        },
        "x-kubernetes-validations": [
            _rule(
                "size(self.metadata.name) <= 37",
                "metadata.name: expected at most 37 characters, as Pods are named after it",
            ),
            _rule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name: expected small letters, digits and '-', and a letter first",
            ),
        ],
    }


def _columns() -> list[Schema]:
    training = ".status.training"
    shown = [
        ("Phase", "string", ".status.phase", 0),
        ("Reason", "string", ".status.reason", 0),
        ("Ready", "string", f"{training}.summary.ready", 0),
        ("Progress", "string", f"{training}.summary.progress", 0),
        ("Restarts", "integer", f"{training}.summary.restarts", 0),
        ("Goodput", "string", f"{training}.summary.goodput", 0),
        ("Age", "date", ".metadata.creationTimestamp", 0),
        ("Round", "integer", f"{training}.round", 1),
        ("World", "integer", f"{training}.worldSize", 1),
        ("Standby", "integer", f"{training}.standby", 1),
        ("Accepted", "string", _reason_of("Accepted"), 1),
        ("Master", "string", _reason_of("MasterReady"), 1),
        ("Why", "string", f"{training}.reason", 1),
    ]
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": wide} if wide else {})
        for name, kind, path, wide in shown
    ]


def _reason_of(condition: str) -> str:
    return f'.status.conditions[?(@.type=="{condition}")].reason'


# --- what holds between fields ---


def _of_worker() -> Iterator[Schema]:
    # The messages hold no numbers: the cost of string(int) has no bound that the server accepts.
    yield _rule(
        "!has(self.minReplicas) || self.minReplicas <= self.replicas",
        "minReplicas is larger than replicas: expected minReplicas <= replicas",
    )
    yield _rule(
        "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
        "replicas is larger than maxReplicas: expected replicas <= maxReplicas",
    )
    for field in ("replicas", "minReplicas", "maxReplicas"):
        absent = "" if field == "replicas" else f"!has(self.{field}) || "
        yield _rule(
            f"{absent}self.{field} % self.nodeUnit == 0",
            f"{field} is no multiple of nodeUnit",
        )


def _fixed(field: str) -> Schema:
    """Cannot be changed: on the parent, since a field that goes and comes has no old self."""
    same = f"!has(self.{field}) || self.{field} == oldSelf.{field}"
    return _rule(
        f"has(self.{field}) == has(oldSelf.{field}) && ({same})",
        f"{field} cannot be changed, added or removed; delete the job and make another",
    )


def _rule(rule: str, message: str) -> Schema:
    return {"rule": rule, "message": message}


# --- from pydantic's JSON schema to a structural one ---


def _convert(whole: Schema, model: type[BaseModel], kept: tuple[str, ...]) -> Schema:
    models = {m.__name__: m for m in _models(model)}

    def convert(node: Schema, owner: type[BaseModel] | None = None) -> Schema:
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            beside = {k: v for k, v in node.items() if k != "$ref"}
            return convert(whole["$defs"][name] | beside, models.get(name))
        if "anyOf" in node:
            some = [n for n in node["anyOf"] if n.get("type") != "null"]
            if [n.get("type") for n in some] == ["integer", "string"]:
                return int_or_string(node, *some)
            assert len(some) == 1, f"only X or nothing can be said structurally: {node}"
            beside = {k: v for k, v in node.items() if k != "anyOf"}
            return convert(some[0] | beside, owner)
        if "const" in node:
            node = node | {"enum": [node["const"]]}
        made = {k: node[k] for k in kept if k in node and node[k] is not None}
        if made.get("default") in ([], {}):
            made.pop("default")
        if made.get("type") == "integer":
            most = made.get("maximum")
            made["format"] = "int32" if most is not None and most < 2**31 else "int64"
        elif made.get("type") == "number":
            made["format"] = "double"
        elif made.get("type") == "array":
            made["items"] = convert(node["items"])
        elif made.get("type") == "object":
            made |= fields(node, owner)
        return made

    def int_or_string(node: Schema, number: Schema, words: Schema) -> Schema:
        """The one choice that a structural schema has; a bound holds for its own type only."""
        if kept is not KEPT:
            return {"x-kubernetes-int-or-string": True}
        bounds = {k: v for n in (number, words) for k, v in n.items() if k in kept and k != "type"}
        default = {"default": node["default"]} if node.get("default") is not None else {}
        types = [{"type": "integer"}, {"type": "string"}]
        return {"anyOf": types, "x-kubernetes-int-or-string": True} | bounds | default

    def fields(node: Schema, owner: type[BaseModel] | None) -> Schema:
        if "properties" in node:
            told = _docs(owner) if owner is not None else {}
            properties = {}
            for name, child in node["properties"].items():
                properties[name] = convert(child)
                words = told.get(name) or _about(child, models)
                if words:
                    properties[name] = {"description": words} | properties[name]
                if name in MAP_KEYS:
                    properties[name] |= {
                        "x-kubernetes-list-type": "map",
                        "x-kubernetes-list-map-keys": MAP_KEYS[name],
                    }
                    properties[name]["items"]["required"] = MAP_KEYS[name]
            strict = "required" in node and kept is KEPT
            return {"properties": properties} | ({"required": node["required"]} if strict else {})
        values = node.get("additionalProperties", True)
        if values is True:
            return {"x-kubernetes-preserve-unknown-fields": True}
        return {"additionalProperties": convert(values)}

    return convert(whole, model)


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    """A model and all that its fields are made of."""
    found: set[type[BaseModel]] = set()
    todo: list[Any] = [model]
    while todo:
        one = todo.pop()
        if isinstance(one, type) and issubclass(one, BaseModel):
            if one not in found:
                found.add(one)
                todo += [f.annotation for f in one.model_fields.values()]
        else:
            todo += getattr(one, "__args__", ())
    return found


def _plain(words: str) -> str:
    """Text without the marks of docstrings."""
    return " ".join(re.sub(r":\w+:`([^`]*)`|``", r"\1", words).split())


def _about(node: Schema, models: dict[str, type[BaseModel]]) -> str:
    """What the model of a field says of itself, where the field says nothing."""
    for one in (node, *node.get("anyOf", ())):
        model = models.get(one.get("$ref", "").rpartition("/")[2])
        if model is not None:
            return _plain(inspect.getdoc(model) or "")
    return ""


def _docs(model: type[BaseModel]) -> dict[str, str]:
    """What stands below each field, by its name in the object."""
    told: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        (body,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ) if name in model.model_fields:
                    alias = model.model_fields[name].alias or name
                    told[alias] = _plain(words)
    return told


# --- as text ---

_HEAD = """\
{{- /* Made by `python -m dlrover_operator.crd --chart`; a test fails when it differs. */ -}}
{{- if .Values.crds.enabled }}
"""
_KEEP = """\
  {{- if .Values.crds.keep }}
  annotations:
    helm.sh/resource-policy: keep
  {{- end }}
"""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """The definition as YAML."""
    return yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=100)


def chart() -> str:
    """The same as a template of the Helm chart: it can be left out, and outlives the release."""
    plain = text().replace("{{", '{{ "{{" }}')
    name = f"  name: {names.PLURAL}.{names.GROUP}\n"
    assert plain.count(name) == 1
    return _HEAD + plain.replace(name, name + _KEEP) + "{{- end }}\n"


def main() -> int:
    """Print the definition."""
    parser = argparse.ArgumentParser(prog="python -m dlrover_operator.crd", description=__doc__)
    parser.add_argument("--chart", action="store_true", help="as a template of the Helm chart")
    sys.stdout.write(chart() if parser.parse_args().chart else text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
