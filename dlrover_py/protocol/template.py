"""Check a Pod template, which the API server stores without a check.

The table of fields is that of one version of Kubernetes (:mod:`dlrover_py.protocol.podfields`). A
value of a wrong type is a fault in every version. The API server decides about an unknown field,
since it may be newer than the table.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from dlrover_py.protocol.errors import did_you_mean, shown
from dlrover_py.protocol.podfields import FIELDS

POD_TEMPLATE: Final = "PodTemplateSpec"
"""The type of the table for a Pod template."""
TOLD: Final = 20
"""Number of faults that a message has at most."""
DEPTH: Final = 64
"""Levels of an object at most. Kubernetes' own fields need fewer than 20."""


SAME = 0.85
"""Likeness from which an unknown value of an enumeration is a misspelt one, and not a newer one."""
_QUANTITY = re.compile(r"[+-]?[0-9]*(\.[0-9]*)?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?")
"""The forms of Kubernetes' type Quantity, as its API server reads them."""
_BELOW_ZERO = re.compile(r"-[0.]*[1-9]")
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")
_VALUES: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "Container": {
        "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
        "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    },
    "ContainerPort": {"protocol": ("TCP", "UDP", "SCTP")},
    "HTTPGetAction": {"scheme": ("HTTP", "HTTPS")},
    "HostPathVolumeSource": {
        "type": (
            *("DirectoryOrCreate", "Directory", "FileOrCreate", "File"),
            *("Socket", "CharDevice", "BlockDevice"),
        ),
    },
    "LabelSelectorRequirement": {"operator": _OPERATORS},
    "NodeSelectorRequirement": {"operator": (*_OPERATORS, "Gt", "Lt")},
    "PodSpec": {
        "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
        "preemptionPolicy": ("Never", "PreemptLowerPriority"),
    },
    "SeccompProfile": {"type": ("RuntimeDefault", "Unconfined", "Localhost")},
    "Toleration": {
        "operator": ("Exists", "Equal", "Lt", "Gt"),
        "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    },
    "TopologySpreadConstraint": {"whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway")},
    "VolumeMount": {"mountPropagation": ("None", "HostToContainer", "Bidirectional")},
}
"""The values of fields that every API server checks. It takes an empty text for the default."""


@dataclass(frozen=True, slots=True)
class TemplateFault:
    """A place of a template that Kubernetes cannot read."""

    path: str
    """The path of the value."""
    form: str = ""
    """What is wrong with the value; empty for an unknown field."""
    kind: str = ""
    """The type of the table that has no such field or value; empty for a value that is wrong."""

    @property
    def unknown(self) -> bool:
        """Return whether the table has no such field or value. Otherwise the value is wrong."""
        return bool(self.kind)

    @property
    def message(self) -> str:
        """Return what is wrong and what to do.

        The hint takes long to compute, and a template may have thousands of faults.
        """
        if self.form:
            return self.form
        return f"unknown field; {did_you_mean(self.name, _fields(self.kind))}"

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def faults_of(value: object, path: str, kind: str = POD_TEMPLATE) -> Iterator[TemplateFault]:
    """Compare an object with the table, and yield what differs; nothing if all fits.

    null counts as an absent field. Missing fields are no faults.

    Args:
        value: a Pod template, or an object of the type ``kind``, as JSON gives it.
        path: the path of the object, with which the paths of the faults begin.
        kind: a type of the table.
    """
    if not isinstance(value, dict):
        yield TemplateFault(path, f"found {shown(value)}: expected a mapping")
        return
    known = _fields(kind)
    for name, inner in value.items():
        where = f"{path}.{name}"
        if name not in known:
            yield TemplateFault(where, kind=kind)
        elif inner is not None:
            yield from _field_faults(inner, where, known[name])
            values = _VALUES.get(kind, {}).get(name)
            if values and isinstance(inner, str) and inner and inner not in values:
                yield _unknown_value(inner, where, kind, values)


def in_lines(faults: Sequence[TemplateFault]) -> str:
    """Return one line for each of the first 20 faults, and one line for all others."""
    more = len(faults) - TOLD
    lines = [str(fault) for fault in faults[:TOLD]]
    return "\n".join([*lines, f"and {more} more"] if more > 0 else lines)


def reference_faults(spec: dict[str, Any], path: str, generated: str) -> Iterator[TemplateFault]:
    """Yield the faults in the names of a Pod's containers and volumes.

    These are two containers or two volumes of one name, and mounts of volumes that do not exist.
    Init containers count as containers.

    Args:
        spec: the Pod's spec, in which :func:`faults_of` has found no value of a wrong type.
        path: the path of the spec.
        generated: the name of a volume that is added later, and prefix of the names of others.
            Mounts of these are no faults.
    """
    containers = list(_items(spec, path, "containers", "initContainers"))
    volumes = list(_items(spec, path, "volumes"))
    yield from _twice(containers)
    yield from _twice(volumes)
    there = {volume.get("name") for _, volume in volumes}
    for where, container in containers:
        for at, mount in _items(container, where, "volumeMounts"):
            name = mount.get("name")
            if name and name not in there and not f"{name}-".startswith(f"{generated}-"):
                hint = did_you_mean(name, [known for known in there if known])
                message = f"found {shown(name)}: expected the name of a volume; {hint}"
                yield TemplateFault(f"{at}.name", message)


def _items(holder: dict[str, Any], path: str, *names: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of these lists, each with its path."""
    for name in names:
        for index, item in enumerate(holder.get(name) or ()):
            yield f"{path}.{name}[{index}]", item


def _twice(items: list[tuple[str, dict[str, Any]]]) -> Iterator[TemplateFault]:
    """Yield the objects whose name an earlier object has."""
    first: dict[str, str] = {}
    for where, item in items:
        name = item.get("name")
        if name and first.setdefault(name, where) != where:
            message = f"found {shown(name)}: expected another name than that of {first[name]}"
            yield TemplateFault(f"{where}.name", message)


def _field_faults(value: Any, path: str, form: str) -> Iterator[TemplateFault]:
    """Compare the value of a field with its form in the table, and yield what differs.

    The form ``any`` fits every value.
    """
    inner = form[1:-1]
    if form.startswith("["):
        if not isinstance(value, list):
            yield TemplateFault(path, f"found {shown(value)}: expected a list")
            return
        for index, item in enumerate(value):
            if inner[:1].isupper():
                yield from faults_of(item, f"{path}[{index}]", inner)
            else:
                yield from _scalar_faults(item, f"{path}[{index}]", inner)
    elif form.startswith("{"):
        if not isinstance(value, dict):
            yield TemplateFault(path, f"found {shown(value)}: expected a mapping")
            return
        for name, item in value.items():
            yield from _scalar_faults(item, f"{path}.{name}", inner)
    elif form[:1].isupper():
        yield from faults_of(value, path, form)
    elif form != "any":
        yield from _scalar_faults(value, path, form)


def _scalar_faults(value: Any, path: str, form: str) -> Iterator[TemplateFault]:
    """Compare a single value with its type, and yield a fault if it differs.

    null counts as an absent value. The fault says if quotes are the reason.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    match form:
        case "bool":
            well, expected = isinstance(value, bool), "true or false"
            quoted = value in ("true", "false")
        case "int":  # the API server stores 5.0 as 5
            whole = isinstance(value, int) or (number and value.is_integer())
            well, expected = number and whole, "a whole number"
            quoted = isinstance(value, str) and value.isdecimal()
        case "quantity":
            text = str(value).strip() if number or isinstance(value, str) else ""
            well = bool(text and _QUANTITY.fullmatch(text) and not _BELOW_ZERO.match(text))
            expected, quoted = "a quantity of at least 0, such as 500m, 2 or 10Gi", False
        case _:
            well, expected, quoted = isinstance(value, str), "text", False
            expected += " (put it in quotes)" if number or isinstance(value, bool) else ""
    if not well and value is not None:
        expected += " without quotes" if quoted else ""
        yield TemplateFault(path, f"found {shown(value)}: expected {expected}")


def _unknown_value(value: str, path: str, kind: str, values: tuple[str, ...]) -> TemplateFault:
    """Return the fault of a value that an enumeration of the table lacks.

    A value with a likeness of at least ``SAME`` to a known one is a spelling error, and the fault
    names that one. Any other value may be one of a newer version: its fault is one of an unknown
    value (:attr:`TemplateFault.unknown`).

    Args:
        value: the value.
        path: the path of the value.
        kind: the type of the table that has the field.
        values: the known values of the field, at least two.
    """
    from difflib import get_close_matches  # rarely needed

    by_lower_case = {one.lower(): one for one in values}
    close = get_close_matches(value.lower(), by_lower_case, n=1, cutoff=SAME)
    message = f"found {shown(value)}: expected {', '.join(values[:-1])} or {values[-1]}"
    if close:
        return TemplateFault(path, f"{message}; did you mean {by_lower_case[close[0]]}?")
    return TemplateFault(path, message, kind)


@cache
def _fields(kind: str) -> dict[str, str]:
    """Return the form of each field of a type."""
    parts = (word.partition(":") for word in FIELDS[kind].split())
    return {name: form for name, _, form in parts}


def is_deeper(value: object, levels: int = DEPTH) -> bool:
    """Return whether mappings and lists are nested on more levels than given."""
    layer = [value]
    for _ in range(levels + 1):
        # Each value once: YAML's aliases may repeat a value without end.
        inner = {id(v): v for v in layer if isinstance(v, (dict, list))}
        if not inner:
            return False
        layer = [c for v in inner.values() for c in (v.values() if isinstance(v, dict) else v)]
    return True
