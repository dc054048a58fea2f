"""The form of requests and answers: JSON of any depth, the lines of watches and logs, warnings."""

import json
import re
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
)
from dataclasses import dataclass
from typing import Any

from dlrover_py.kubernetes.errors import ServerDownError
from dlrover_py.kubernetes.kinds import Obj

_LEVELS = 200
"""Levels of nesting that are kept of a document that is too deep for Python's parser."""
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_WARNING = re.compile(r'299 \S+ "((?:[^"\\]|\\.)*)"')
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The largest answers that a client accepts, in bytes."""

    answer_bytes: int = 1 << 30
    """Largest body. A list of all Pods of a large cluster has a tenth of it."""
    event_bytes: int = 1 << 26
    """Largest event of a watch. etcd stores objects of a few MiB at most."""


def too_long(path: str, most: int) -> ServerDownError:
    """Return the error about an answer that exceeds its limit."""
    expected = f"at most {most >> 20} MiB were expected; is a proxy in between?"
    return ServerDownError(f"{path}: the answer does not end: {expected}", status=200)


async def split_lines(chunks: AsyncIterable[bytes], most: int) -> AsyncIterator[bytes]:
    """Yield complete lines without their line ends. An incomplete line at the end is dropped.

    Raises:
        ServerDownError: a line has more than ``most`` bytes.
    """
    begun, size = list[bytes](), 0
    async for chunk in chunks:
        first, *others = chunk.split(b"\n")
        begun.append(first)
        size = len(chunk) - chunk.rfind(b"\n") - 1 if others else size + len(first)
        if size > most:
            raise too_long("a watch", most)
        if others:
            yield b"".join(begun)
            begun = [others.pop()]
            for line in others:
                yield line


def stamped(line: bytes) -> tuple[str, bytes]:
    """Split a line of a log into its time and its text; without a space, the text is empty."""
    stamp, _, text = line.partition(b" ")
    return stamp.decode("ascii", "replace"), text


def watch_event(line: bytes) -> tuple[str, Obj]:
    """Return the type and the object of a watch event.

    Raises:
        ServerDownError: the line is no event.
    """
    document = json_object(line, "a watch")
    kind, obj = document.get("type"), document.get("object")
    if not isinstance(kind, str) or not isinstance(obj, dict):
        raise ServerDownError("a watch: expected events; is a proxy in between?")
    return kind, obj


def encoded(body: Obj) -> bytes:
    """Encode an object as JSON that is also valid YAML.

    The server reads applied objects as YAML. YAML does not know JSON's surrogate pairs, so
    characters are written directly. Other characters that YAML excludes are escaped, the only form
    that it accepts. Half of a surrogate pair becomes U+FFFD.
    """
    text = json.dumps(body, ensure_ascii=False)
    return _NOT_YAML.sub(lambda found: _escape(found[0]), text).encode()


def _escape(one: str) -> str:
    """Return the JSON escape of a character."""
    half = "\ud800" <= one <= "\udfff"  # half of a surrogate pair, which no encoding has
    return "\ufffd" if half else f"\\u{ord(one):04x}"


def json_value(data: bytes) -> Any:
    """Parse JSON of any depth. Values nested too deep for Python's parser become null.

    An API server stores up to 10,000 levels. One such object must not prevent a list of all
    objects.

    Raises:
        ValueError: the data is not JSON.
    """
    try:
        return json.loads(data)
    except RecursionError:
        return json.loads(cut_at(_LEVELS, data))


def cut_at(levels: int, data: bytes) -> bytes:
    """Return JSON in which mappings and lists below this many levels are null.

    The data is not checked, and is returned as it is if it has fewer levels.
    """
    kept: list[bytes] = []
    depth = end = 0
    for token in _BRACKET.finditer(data):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth == levels + 1:
                kept += data[end : token.start()], b"null"
        elif token[0] in (b"]", b"}"):
            if depth == levels + 1:
                end = token.end()
            depth -= 1
    return b"".join([*kept, data[end:]])


def json_object(data: bytes, path: str) -> Obj:
    """Parse an answer that must be a JSON object.

    Args:
        data: the answer.
        path: API path of the call, for the message.

    Raises:
        ServerDownError: the answer is no JSON object.
    """
    try:
        document = json_value(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ServerDownError(f"{path}: expected JSON, found {data[:80]!r}; is a proxy in between?")
    return document


def warnings_in(headers: Iterable[str]) -> Iterator[str]:
    """Yield the texts of ``Warning`` headers (RFC 7234), in the form that Kubernetes sends.

    Other warnings than those with the code 299 are ignored.
    """
    for header in headers:
        for warning in _WARNING.findall(header):
            yield re.sub(r"\\(.)", r"\1", warning)
