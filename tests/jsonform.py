"""Checks of the JSON that commands print for scripts (docs/cli.md, "JSON")."""

import re
from collections.abc import Iterator

TIME_KEY = re.compile(r"at|\w+_(at|since|time)")
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def keys(document: object) -> set[str]:
    """Return all keys of a document, except those of Kubernetes objects."""
    return {key for key, _ in _items(document)}


def faults(document: object) -> set[str]:
    """Return keys that are not in snake_case, and times that are not RFC 3339 with milliseconds."""
    found = set()
    for key, value in _items(document):
        if key != key.lower():
            found.add(key)
        if not TIME_KEY.fullmatch(key) or value is None:
            continue
        if not (isinstance(value, str) and RFC_3339.fullmatch(value)):
            found.add(f"{key}: {value!r}")
    return found


def _items(document: object) -> Iterator[tuple[str, object]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield key, value
            if not (key == "job" and isinstance(value, dict)):
                yield from _items(value)
    elif isinstance(document, list):
        for value in document:
            yield from _items(value)
