"""Generates the table of a Pod template's fields from the models of the official client.

``python scripts/pod_fields.py`` prints the table. With ``--write`` it writes the table into
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
QUANTITIES = ("limits", "requests", "overhead", "sizeLimit", "divisor")
"""Fields of Kubernetes' type Quantity, which may also be a number. The models have ``str``."""
_HEAD = '''\
"""The fields of a Pod template, by type: made by ``python scripts/pod_fields.py --write``.

Source: the models of the Python package ``kubernetes`` {version}. A field is written as
``name`` (text), ``name:Type``, ``name:[Type]``, ``name:[]`` (a list of texts), ``name:{{}}`` (a
mapping of texts with keys of any name) or ``name:any``. Texts are replaced by ``int``, ``bool`` or
``quantity`` where the type is another one.
"""

from typing import Final

FIELDS: Final[dict[str, str]] = {{
'''


def fields() -> dict[str, dict[str, str]]:
    """Return the fields of each type in a Pod template: the form of each field by its name.

    Types that only fields of these types use are included.
    """
    found: dict[str, dict[str, str]] = {}
    todo = [ROOT]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        model = getattr(models, f"V1{name}", None) or getattr(models, name)
        found[name] = {}
        for attribute, kind in model.openapi_types.items():
            field = model.attribute_map[attribute]
            form = found[name][field] = _form(kind, field)
            todo += [inner for inner in [form.strip("[]{}")] if inner[:1].isupper()]
    return found


def _form(kind: str, field: str) -> str:
    """Return the form of a field, as the table has it; empty for text.

    Times are text. Fields that the models have as text but that are quantities have their own form.
    """
    if found := re.fullmatch(r"Dict\[str, (\w+)\]", kind):
        return f"{{{_form(found[1], field)}}}"
    if found := re.fullmatch(r"List\[(\w+)\]", kind):
        return f"[{_form(found[1], field)}]"
    if hasattr(models, kind):
        return kind.removeprefix("V1")
    if kind == "str" and field in QUANTITIES:
        return "quantity"
    return {"str": "", "datetime": "", "object": "any"}.get(kind, kind)


def module() -> str:
    """Return the text of the module ``podfields``, formatted as ruff would. Nothing is written."""
    lines = [_HEAD.format(version=__version__)]
    for name, inner in sorted(fields().items()):
        words = " ".join(f"{key}:{form}" if form else key for key, form in sorted(inner.items()))
        parts = [words]
        if len(words) > 90:  # otherwise the formatter joins the parts
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
