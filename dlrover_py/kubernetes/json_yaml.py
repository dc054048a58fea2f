"""A YAML loader with the value types of JSON, as Kubernetes' own programs read YAML."""

import math
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_INT, _FLOAT = f"{_TAG}int", f"{_TAG}float"
MAX_VALUES = 1_000_000
"""Largest number of values in a document. The values behind an alias count each time it is used:
eight lines of aliases can make 10^9 values.
"""


def fault(message: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    """Return an error that carries the line of a node."""
    return yaml.constructor.ConstructorError(None, None, message, node.start_mark)


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the values of a tree. A node that several aliases refer to counts as many times.

    The keys of a mapping count as values.

    Args:
        node: the root.
        known: counts of the nodes seen so far, by their ``id()``; it is extended. A node whose
            values are being counted has the count 0.

    Raises:
        MarkedYAMLError: a value contains itself.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if known.get(id(node)) == 0:
        raise fault("an alias is inside the value that it refers to", node)
    if id(node) not in known:
        known[id(node)] = 0
        pairs = isinstance(node, yaml.MappingNode)
        below = [part for pair in node.value for part in (pair if pairs else (pair,))]
        known[id(node)] = 1 + sum(_values(part, known) for part in below)
    return known[id(node)]


class Loader(yaml.SafeLoader):
    """A YAML loader whose values are JSON values and whose keys are text.

    Dates are text, and so is ``12:30``, which YAML 1.1 reads as a number of seconds. Values that
    JSON does not have (``!!binary``, ``.inf``) are refused.
    """

    def compose_document(self) -> yaml.Node | None:
        """Return the tree of a document; None for an empty document.

        Raises:
            MarkedYAMLError: the document has more than ``MAX_VALUES`` values, or a value of it
                contains itself.
        """
        node = super().compose_document()
        if node is not None and _values(node, {}) > MAX_VALUES:
            raise fault(f"its aliases expand to more than {MAX_VALUES} values", node)
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the tag of a value that has no explicit tag.

        Args:
            kind: class of the node.
            value: text of the node.
            implicit: whether the node is written plain or quoted.
        """
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        odd = tag == f"{_TAG}timestamp" or (tag in (_INT, _FLOAT) and ":" in value)
        return f"{_TAG}str" if odd and kind is yaml.ScalarNode else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping whose keys are text as written in the document.

        If a key appears twice, the last value counts.

        Raises:
            MarkedYAMLError: a key is a list or a mapping.
        """
        self.flatten_mapping(node)
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise fault("expected text as the key of a mapping", key)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Return a finite number.

        Raises:
            MarkedYAMLError: the number is not finite, so JSON cannot hold it.
        """
        value = float(super().construct_yaml_float(node))
        if not math.isfinite(value):
            raise fault("expected a finite number", node)
        return value


_JSON = (None, *(_TAG + name for name in ("null", "bool", "int", "str", "seq", "map")))
Loader.yaml_constructors = {
    tag: made for tag, made in yaml.SafeLoader.yaml_constructors.items() if tag in _JSON
}
Loader.add_constructor(_FLOAT, Loader.construct_yaml_float)
