"""Pod templates at random: of the right form, and with one place of another form."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from dlrover_py.protocol.podfields import FIELDS

NAMES = st.sampled_from(["main", "a", "", "dlrover-job", "NODE_RANK", "DLROVER_MASTER_ADDR", "x=y"])
SCALARS = st.none() | st.booleans() | st.integers(-1, 70_000) | NAMES | st.just("/dev/shm/")
JSON = st.recursive(
    SCALARS | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
# What the master looks at is drawn more often than the rest.
COMMON = ("name", "env", "volumes", "volumeMounts", "mountPath", "affinity", "nodeAffinity")
COMMON += ("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms", "matchFields")
COMMON += ("labels", "annotations", "image", "command")
ALWAYS = {"PodTemplateSpec": ("spec",), "PodSpec": ("containers",), "NodeSelector": COMMON}


@st.composite
def templates(draw: st.DrawFn, kind: str = "PodTemplateSpec") -> dict[str, Any]:
    """An object of a type of the table, with few of its fields."""
    forms = dict(word.partition(":")[::2] for word in FIELDS[kind].split())
    common = [name for name in COMMON if name in forms] or list(forms)
    some = st.sampled_from(common) | st.sampled_from(sorted(forms))
    chosen = {*draw(st.lists(some, max_size=3)), *ALWAYS.get(kind, ())} & forms.keys()
    return {name: draw(_value(forms[name])) for name in sorted(chosen)}


def _value(form: str) -> st.SearchStrategy[Any]:
    if form == "{}":
        return st.dictionaries(NAMES, SCALARS, max_size=2)
    if form.startswith("["):
        inner = templates(form[1:-1]) if form != "[]" else SCALARS
        return st.lists(inner, min_size=int(form == "[Container]"), max_size=2)
    if form == "any":
        return JSON
    return templates(form) if form else SCALARS


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each mapping or list within a value, with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from places(inner)


@st.composite
def broken(draw: st.DrawFn) -> dict[str, Any]:
    """A template with anything at all in one or two of its places."""
    made = copy.deepcopy(draw(templates()))
    for _ in range(draw(st.integers(1, 2))):
        holder, key = draw(st.sampled_from(list(places(made))))
        holder[key] = draw(JSON)
    return made
