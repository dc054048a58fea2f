"""Random Pod templates: valid ones, and ones with one or two invalid values."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from dlrover_py.protocol.podfields import FIELDS

NAMES = st.sampled_from(["main", "a", "", "dlrover-job", "NODE_RANK", "DLROVER_MASTER_ADDR", "x=y"])
TEXTS = NAMES | st.just("/dev/shm/")
SCALARS = st.none() | st.booleans() | st.integers(-1, 70_000) | TEXTS
JSON = st.recursive(
    SCALARS | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
SUFFIXES = ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]
SUFFIXES += ["e3", "E-2", "e+10"]
QUANTITIES = st.one_of(
    *(st.integers(0, 10**18), st.floats(0, 1e30), st.sampled_from(["-0", " 1Gi", "0.0"])),
    st.tuples(
        st.sampled_from(["", "+"]),
        st.sampled_from(["0", "1", "007", "1.5", ".5", "5.", "1" * 40]),
        st.sampled_from(SUFFIXES),
    ).map("".join),
)
"""Values of Kubernetes' type Quantity that its parser accepts (apimachinery, quantity.go)."""
# Fields that the master reads are drawn more often than the others.
COMMON: tuple[str, ...]
COMMON = ("name", "env", "volumes", "volumeMounts", "mountPath", "affinity", "nodeAffinity")
COMMON += ("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms", "matchFields")
COMMON += ("labels", "annotations", "image", "command")
ALWAYS = {"PodTemplateSpec": ("spec",), "PodSpec": ("containers",), "NodeSelector": COMMON}


@st.composite
def templates(draw: st.DrawFn, kind: str = "PodTemplateSpec") -> dict[str, Any]:
    """Draw an object of a type of the table, with a few of its fields."""
    forms = dict(word.partition(":")[::2] for word in FIELDS[kind].split())
    common = [name for name in COMMON if name in forms] or list(forms)
    some = st.sampled_from(common) | st.sampled_from(sorted(forms))
    chosen = {*draw(st.lists(some, max_size=3)), *ALWAYS.get(kind, ())} & forms.keys()
    return {name: draw(_value(forms[name])) for name in sorted(chosen)}


OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "": TEXTS,
    "any": JSON,
    "bool": st.booleans(),
    "int": st.integers(-1, 70_000) | st.just(5.0),
    "quantity": QUANTITIES,
}


def _value(form: str) -> st.SearchStrategy[Any]:
    if form.startswith("{"):
        return st.dictionaries(NAMES, st.none() | OF_TYPE[form[1:-1]], max_size=2)
    if form.startswith("["):
        kind = form[1:-1]
        inner = st.none() | OF_TYPE[kind] if kind in OF_TYPE else templates(kind)
        return st.lists(inner, min_size=int(form == "[Container]"), max_size=2)
    return st.none() | OF_TYPE[form] if form in OF_TYPE else templates(form)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each mapping or list in a value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from places(inner)


@st.composite
def broken(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a template in which one or two values are any JSON."""
    made = copy.deepcopy(draw(templates()))
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from(list(places(made))))
        holder[key] = draw(JSON)
    return made
