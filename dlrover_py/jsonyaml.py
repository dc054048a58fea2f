"""YAML whose values are JSON's, as Kubernetes' own programs read it."""

import math
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_INT, _FLOAT = f"{_TAG}int", f"{_TAG}float"


def fault(words: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    """An error that has its line."""
    return yaml.constructor.ConstructorError(None, None, words, node.start_mark)


class Loader(yaml.SafeLoader):
    """Dates are text, as is ``12:30``, which YAML 1.1 counts as seconds; keys are text.

    Values that JSON does not have (``!!binary``, ``.inf``) are refused.
    """

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the type of a value that says none itself."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        odd = tag == f"{_TAG}timestamp" or (tag in (_INT, _FLOAT) and ":" in value)
        return f"{_TAG}str" if odd and kind is yaml.ScalarNode else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping with keys as they are written."""
        self.flatten_mapping(node)
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise fault("expected text as the key of a mapping", key)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Return a number that JSON has."""
        value = float(super().construct_yaml_float(node))
        if not math.isfinite(value):
            raise fault("expected a finite number", node)
        return value


_JSON = (None, *(_TAG + name for name in ("null", "bool", "int", "str", "seq", "map")))
Loader.yaml_constructors = {
    tag: made for tag, made in yaml.SafeLoader.yaml_constructors.items() if tag in _JSON
}
Loader.add_constructor(_FLOAT, Loader.construct_yaml_float)
