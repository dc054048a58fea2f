"""A Pod template, which the API server stores unread: its form, and fields that do not exist.

The table of fields is that of one version of Kubernetes (:mod:`dlrover_py.protocol.podfields`).
A mapping or a list in a wrong place is a fault in every version. An unknown field is for the API
server to judge, which may be newer than the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from dlrover_py.protocol.errors import did_you_mean, shown
from dlrover_py.protocol.podfields import FIELDS

POD_TEMPLATE: Final = "PodTemplateSpec"
DEPTH: Final = 64
"""Levels of an object at most. Kubernetes' own fields need fewer than 20."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A place of a template that Kubernetes cannot read."""

    path: str
    words: str
    unknown: bool = False
    """The table has no such field; otherwise the value has a wrong form."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.path}: {self.words}"


def faults_of(value: object, path: str, kind: str = POD_TEMPLATE) -> Iterator[Fault]:
    """Compare an object with the table; null is a field that is absent.

    Args:
        value: a Pod template, or an object of the type ``kind``, as JSON gives it.
        path: where it stands; the paths of the faults begin with it.
        kind: a type of the table.
    """
    if not isinstance(value, dict):
        yield Fault(path, f"found {shown(value)}: expected a mapping")
        return
    known = _fields(kind)
    for name, inner in value.items():
        where = f"{path}.{name}"
        if name not in known:
            yield Fault(where, f"unknown field; {did_you_mean(str(name), known)}", unknown=True)
        elif inner is not None:
            yield from _field_faults(inner, where, known[name])


def _field_faults(value: Any, path: str, form: str) -> Iterator[Fault]:
    if form.startswith("["):
        if not isinstance(value, list):
            yield Fault(path, f"found {shown(value)}: expected a list")
            return
        kind = form[1:-1]
        for index, item in enumerate(value):
            if kind:
                yield from faults_of(item, f"{path}[{index}]", kind)
            elif isinstance(item, (dict, list)):
                yield Fault(f"{path}[{index}]", f"found {shown(item)}: expected one value")
    elif form == "{}":
        if not isinstance(value, dict):
            yield Fault(path, f"found {shown(value)}: expected a mapping")
    elif form and form != "any":
        yield from faults_of(value, path, form)
    elif not form and isinstance(value, (dict, list)):
        yield Fault(path, f"found {shown(value)}: expected one value")


@cache
def _fields(kind: str) -> dict[str, str]:
    """The form of each field of a type."""
    parts = (word.partition(":") for word in FIELDS[kind].split())
    return {name: form for name, _, form in parts}


def is_deeper(value: object, levels: int = DEPTH) -> bool:
    """Whether mappings and lists stand in each other on more than so many levels."""
    layer = [value]
    for _ in range(levels + 1):
        # Each once: YAML's aliases may repeat a value without end.
        inner = {id(v): v for v in layer if isinstance(v, (dict, list))}
        if not inner:
            return False
        layer = [c for v in inner.values() for c in (v.values() if isinstance(v, dict) else v)]
    return True
