"""Generates the table of the chart's values in docs/install.md, from values.yaml and its comments.

``python scripts/chart_values.py`` prints the table. With ``--write`` it writes the table into the
document.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
VALUES = ROOT / "charts/dlrover/values.yaml"
DOCUMENT = ROOT / "docs/install.md"
BEGIN, END = "<!-- values -->\n", "<!-- /values -->\n"
_LINE = re.compile(r"( *)([A-Za-z]\w*):(.*)")


def described() -> dict[str, str]:
    """Return the comment above each value that has one, by the path of the value (``a.b``).

    An empty line between the comment and the value separates them.
    """
    found: dict[str, str] = {}
    path: list[str] = []
    words: list[str] = []
    for line in VALUES.read_text().splitlines():
        if line.strip().startswith("#"):
            words.append(line.strip(" #"))
        elif match := _LINE.fullmatch(line):
            path[len(match[1]) // 2 :] = [match[2]]
            if words:
                found[".".join(path)] = " ".join(words)
            words = []
        else:
            words = []
    return found


def values() -> dict[str, object]:
    """Return the default of each value that is not a group, by the path of the value.

    A mapping is a group if a value in it has a comment, or if it is the file itself.
    """
    return dict(_leaves("", yaml.safe_load(VALUES.read_text()), described()))


def _leaves(path: str, value: object, told: dict[str, str]) -> Iterator[tuple[str, object]]:
    """Yield the path and the default of each value that is not a group."""
    group = not path or any(known.startswith(f"{path}.") for known in told)
    if isinstance(value, dict) and group:
        for name, below in value.items():
            yield from _leaves(f"{path}.{name}" if path else name, below, told)
    else:
        yield path, value


def table() -> str:
    """Return the table as Markdown."""
    told = described()
    lines = ["| value | default | |", "| --- | --- | --- |"]
    for path, default in values().items():
        said = json.dumps(default) if default or isinstance(default, (bool, int)) else ""
        code = f"`{said.strip(chr(34))}`" if said else ""
        lines.append(f"| `{path}` | {code} | {told.get(path, '')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the table or, with ``--write``, write it into docs/install.md between its two marks."""
    if "--write" not in sys.argv:
        sys.stdout.write(table())
        return 0
    head, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(head + BEGIN + table() + END + rest.split(END)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
