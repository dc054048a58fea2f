"""The CustomResourceDefinition of ElasticJobs, generated from the models in ``protocol``.

``python -m dlrover_operator.crd`` prints it. The schema of the spec is that of
``protocol/job.py``; rules between fields are written in CEL. The schema of the status is lenient:
it has no bounds and no required fields. After an upgrade of the CRD, masters of the previous
version continue to write their status.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import yaml
from pydantic import BaseModel

from dlrover_py.protocol import names
from dlrover_py.protocol.job import (
    OTHER_ROLES,
    JobSpec,
)
from dlrover_py.protocol.reasons import ConditionType
from dlrover_py.protocol.status import ElasticJobStatus

Schema = dict[str, Any]
"""A part of an OpenAPI schema, or of the definition."""

KEPT: tuple[str, ...] = ("type", "enum", "default", "pattern", "minimum", "maximum", "format")
KEPT += ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
"""Keywords of JSON schema that the schema of the spec keeps."""
LENIENT: tuple[str, ...] = ("type", "format")
"""Keywords of JSON schema that the schema of the status keeps."""
MAP_KEYS = {"conditions": ["type"]}
"""Lists that are maps, with the keys of their elements."""


def definition() -> Schema:
    """Return the complete CustomResourceDefinition."""
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
    """Return the schema of an ElasticJob.

    It consists of the schemas of the spec and the status, and of the rules between fields.
    """
    spec = _convert(JobSpec.model_json_schema(by_alias=True), JobSpec, KEPT)
    spec["x-kubernetes-validations"] = [
        _fixed("managedBy"),
        _fixed("distributionStrategy"),
        _fixed("topology"),
    ]
    roles = spec["properties"]["replicaSpecs"]
    roles.pop("required")  # a PS job without workers is accepted; its status says Unsupported
    roles["x-kubernetes-validations"] = [
        _rule(
            " || ".join(f"has(self.{role})" for role in ("worker", *OTHER_ROLES)),
            "expected the role worker",
        ),
        _rule(
            # The status of a job with another role says Unsupported, whatever its workers are.
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
    # The master opens the port of the servers when it starts, and reads these fields then.
    roles["x-kubernetes-validations"].append(
        _rule(
            "has(self.ps) == has(oldSelf.ps)",
            "ps cannot be added or removed; delete the job and create it again",
        )
    )
    roles["properties"]["ps"]["x-kubernetes-validations"] = [
        *_bounds("(has(self.replicas) ? self.replicas : 1)"),
        *map(_fixed, ("replication", "ack", "buckets", "checkpoints")),
    ]
    roles["properties"]["worker"]["properties"]["replicas"]["minimum"] = 0
    roles["properties"]["worker"]["x-kubernetes-validations"] = list(_of_worker())
    status = _convert(ElasticJobStatus.model_json_schema(by_alias=True), ElasticJobStatus, LENIENT)
    training = status["properties"]["training"]
    training["properties"].pop("conditions")
    # A master that was disconnected writes its status as soon as it is connected again, before it
    # can know that a newer one has taken over.
    training["x-kubernetes-validations"] = [
        _rule(
            "!has(oldSelf.term) || (has(self.term) && self.term >= oldSelf.term)",
            "a newer master has written the status: an older master must not write it",
        )
    ]
    return {
        "description": "An elastic PyTorch training job.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": "Version of the schema.", "type": "string"},
            "kind": {"description": "ElasticJob.", "type": "string"},
            "metadata": {"type": "object"},  # the API server adds its description
            "spec": {"description": "The desired state, written by the user."} | spec,
            "status": {"description": "The observed state, written by the operator and the master."}
            | status,
        },
        "x-kubernetes-validations": [
            _rule(
                "size(self.metadata.name) <= 37",
                "metadata.name: expected at most 37 characters, because Pods are named after it",
            ),
            _rule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "metadata.name: expected lowercase letters, digits and '-', and a letter first",
            ),
        ],
    }


def _columns() -> list[Schema]:
    """Return the columns of ``kubectl get``."""
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
        ("Accepted", "string", _reason_of(ConditionType.ACCEPTED), 1),
        ("Master", "string", _reason_of(ConditionType.MASTER_READY), 1),
        ("Why", "string", f"{training}.reason", 1),
    ]
    return [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": wide} if wide else {})
        for name, kind, path, wide in shown
    ]


def _reason_of(condition: ConditionType) -> str:
    """Return the JSON path of the reason of a condition."""
    return f'.status.conditions[?(@.type=="{condition}")].reason'


# --- Rules between fields ---


def _bounds(replicas: str) -> Iterator[Schema]:
    """Yield the rules that the number of nodes of a role is between its bounds.

    Args:
        replicas: The number as an expression in CEL.
    """
    # The messages contain no numbers. The server refuses string(int), whose cost it cannot bound.
    yield _rule(
        f"!has(self.minReplicas) || self.minReplicas <= {replicas}",
        "minReplicas is larger than replicas: expected minReplicas <= replicas",
    )
    yield _rule(
        f"!has(self.maxReplicas) || {replicas} <= self.maxReplicas",
        "replicas is larger than maxReplicas: expected replicas <= maxReplicas",
    )


def _of_worker() -> Iterator[Schema]:
    """Yield the rules between the fields of the worker role."""
    yield from _bounds("self.replicas")
    yield _rule(
        "!has(self.autoscale) || !has(self.autoscale.sizes) || !has(self.autoscale.nodeUnit)",
        "autoscale has sizes and nodeUnit: expected one of them",
    )
    yield _rule(
        "!has(self.autoscale) || self.autoscale.objective != 'deadline' || "
        "has(self.autoscale.deadline)",
        "autoscale.objective is deadline and autoscale.deadline is absent: expected a time",
    )
    yield _rule(
        "!has(self.resourceAdvice) || self.resourceAdvice.mode != 'auto' || "
        "has(self.resourceAdvice.memory) || has(self.resourceAdvice.cpu)",
        "resourceAdvice.mode is auto: expected resourceAdvice.memory or resourceAdvice.cpu",
    )
    for field in ("replicas", "minReplicas", "maxReplicas"):
        absent = "" if field == "replicas" else f"!has(self.{field}) || "
        yield _rule(
            f"{absent}self.{field} % self.nodeUnit == 0",
            f"{field} is not a multiple of nodeUnit",
        )


def _fixed(field: str) -> Schema:
    """Return the rule that a field cannot be changed, added or removed.

    The rule is on the parent, because a field that is removed or added has no ``oldSelf``.
    """
    same = f"!has(self.{field}) || self.{field} == oldSelf.{field}"
    return _rule(
        f"has(self.{field}) == has(oldSelf.{field}) && ({same})",
        f"{field} cannot be changed, added or removed; delete the job and create it again",
    )


def _rule(rule: str, message: str) -> Schema:
    """Return a validation rule in CEL."""
    return {"rule": rule, "message": message}


# --- From pydantic's JSON schema to a structural schema ---


def _convert(whole: Schema, model: type[BaseModel], kept: tuple[str, ...]) -> Schema:
    """Return the structural schema of a model, with these keywords kept.

    Descriptions come from the docstrings of the model. ``null`` in a choice of types is dropped,
    and so are empty defaults and all other keywords. Required fields are kept for the spec only. A
    choice of two types that a structural schema cannot express fails an assertion.

    Args:
        whole: The JSON schema of the model, as pydantic makes it.
        model: The model.
        kept: The keywords that stay.
    """
    models = {m.__name__: m for m in _models(model)}

    def convert(node: Schema, owner: type[BaseModel] | None = None) -> Schema:
        """Convert a node; ``owner`` is the model whose docstrings describe its fields."""
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

    def int_or_string(node: Schema, number: Schema, text: Schema) -> Schema:
        """Return the only choice of types that a structural schema permits.

        A bound applies only to values of its own type.
        """
        if kept is not KEPT:
            return {"x-kubernetes-int-or-string": True}
        bounds = {k: v for n in (number, text) for k, v in n.items() if k in kept and k != "type"}
        default = {"default": node["default"]} if node.get("default") is not None else {}
        types = [{"type": "integer"}, {"type": "string"}]
        return {"anyOf": types, "x-kubernetes-int-or-string": True} | bounds | default

    def fields(node: Schema, owner: type[BaseModel] | None) -> Schema:
        """Return the keywords for the fields of an object, or for the values of a mapping."""
        if "properties" in node:
            descriptions = _docs(owner) if owner is not None else {}
            properties = {}
            for name, child in node["properties"].items():
                properties[name] = convert(child)
                text = descriptions.get(name) or _about(child, models)
                if text:
                    properties[name] = {"description": text} | properties[name]
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
    """Return a model and all models in its fields, recursively, as a set without order."""
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


def _plain_text(text: str) -> str:
    """Return text without the markup of docstrings."""
    return " ".join(re.sub(r":\w+:`([^`]*)`|``", r"\1", text).split())


def _about(node: Schema, models: dict[str, type[BaseModel]]) -> str:
    """Return the docstring of the model of a field, for a field without a docstring of its own.

    The result is "" if the field's type is no model.

    Args:
        node: The JSON schema of the field.
        models: The models by their names.
    """
    for one in (node, *node.get("anyOf", ())):
        model = models.get(one.get("$ref", "").rpartition("/")[2])
        if model is not None:
            return _plain_text(inspect.getdoc(model) or "")
    return ""


def _docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a model, by the field's name in the object.

    Fields without a docstring are left out. A docstring of a subclass replaces that of its base
    class.
    """
    descriptions: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        body = _classes(base.__module__)[base.__name__].body
        for field, text in pairwise(body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ) if name in model.model_fields:
                    alias = model.model_fields[name].alias or name
                    descriptions[alias] = _plain_text(doc)
    return descriptions


@cache  # inspect.getsource of a class reads its whole module, each time
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


# --- As text ---

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
    """A YAML dumper without anchors and aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """Return the definition as YAML."""
    return yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, width=100)


def chart() -> str:
    """Return the definition as a template of the Helm chart.

    Values of the chart decide whether it is installed, and whether it stays when the release is
    uninstalled.
    """
    plain = text().replace("{{", '{{ "{{" }}')
    name = f"  name: {names.PLURAL}.{names.GROUP}\n"
    assert plain.count(name) == 1
    return _HEAD + plain.replace(name, name + _KEEP) + "{{- end }}\n"


def main() -> int:
    """Print the definition and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dlrover_operator.crd", description=__doc__)
    parser.add_argument("--chart", action="store_true", help="as a template of the Helm chart")
    sys.stdout.write(chart() if parser.parse_args().chart else text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
