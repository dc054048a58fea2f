"""The table of a Pod template's fields, from the models of the official client.

``python scripts/pod_fields.py`` prints it; with ``--write`` it goes into
``dlrover_py/protocol/podfields.py``.
"""

import re
import sys
import textwrap
from pathlib import Path

from kubernetes import __version__
from kubernetes.aio.client import models

MODULE = Path(__file__).parents[1] / "dlrover_py/protocol/podfields.py"
ROOT = "PodTemplateSpec"
_HEAD = '''\
"""The fields of a Pod template, by type: made by ``python scripts/pod_fields.py --write``.

Source: the models of the Python package ``kubernetes`` {version}. A field is written as
``name`` (a scalar), ``name:any``, ``name:Type``, ``name:[Type]``, ``name:[]`` (a list of scalars)
or ``name:{{}}`` (a mapping with keys of any name).
"""

from typing import Final

FIELDS: Final[dict[str, str]] = {{
'''


def fields() -> dict[str, dict[str, str]]:
    """Each type that a Pod template is made of: the form of each field by its name."""
    found: dict[str, dict[str, str]] = {}
    todo = [ROOT]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        model = getattr(models, f"V1{name}", None) or getattr(models, name)
        found[name] = {}
        for attribute, kind in model.openapi_types.items():
            form = _form(kind)
            found[name][model.attribute_map[attribute]] = form
            todo += [inner for inner in [form.strip("[]{}")] if inner not in ("", "any")]
    return found


def _form(kind: str) -> str:
    """``[Type]``, ``Type``, ``[]``, ``{}`` or ``any``; empty for a scalar."""
    if kind.startswith("Dict["):
        return "{}"
    if found := re.fullmatch(r"List\[(\w+)\]", kind):
        return f"[{_form(found[1])}]"
    if kind == "object":
        return "any"
    return kind.removeprefix("V1") if hasattr(models, kind) else ""


def module() -> str:
    """The text of the module."""
    lines = [_HEAD.format(version=__version__)]
    for name, inner in sorted(fields().items()):
        words = " ".join(f"{key}:{form}" if form else key for key, form in sorted(inner.items()))
        parts = textwrap.wrap(words, 88, break_long_words=False, break_on_hyphens=False)
        if len(parts) < 2 and len(f'    "{name}": "{words}",') <= 100:
            lines.append(f'    "{name}": "{words}",\n')
            continue
        lines.append(f'    "{name}": (\n')
        for number, part in enumerate(parts, start=1):
            lines.append(f'        "{part}{"" if number == len(parts) else " "}"\n')
        lines.append("    ),\n")
    return "".join([*lines, "}\n"])


if __name__ == "__main__":
    if "--write" in sys.argv:
        MODULE.write_text(module())
    else:
        sys.stdout.write(module())
