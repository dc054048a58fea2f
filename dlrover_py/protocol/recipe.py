"""The import recipes that agents exchange by way of their master, and the records of workers.

An agent stores the recipe of its job on the master. Agents that start later fetch it. They may be
of other releases, so a recipe has a version.

A recipe is made from records. A worker that was started cold writes what it imports to a file that
its agent reads: one Python tuple for each line. :mod:`dlrover_agent.warm.script` encodes them. It
must not import this package before the script, which may bring another release of it.
"""

import ast
import contextlib
import json
import zlib
from collections.abc import Sequence
from typing import Final, Literal

from pydantic import TypeAdapter

from dlrover_py.protocol.agents import Wire
from dlrover_py.protocol.documents import read_with_text
from dlrover_py.protocol.zygote import RecipeLine

VERSION: Final = 1
"""Version of a stored recipe."""
MAX_RECIPE: Final = 16 << 20
"""Bytes of a decompressed recipe that are accepted from the master."""


class StoredRecipe(Wire):
    """The recipe that a master stores, as JSON that is compressed with zlib."""

    version: Literal[1] = VERSION
    """The version of the recipe; another one is refused."""
    lines: list[RecipeLine]
    """The lines ``[kind, name, value]``, as in the configuration of a zygote."""


_RECIPE = TypeAdapter(StoredRecipe)


def encode(lines: Sequence[RecipeLine]) -> bytes:
    """Return a recipe for storage by the master, compressed: its many paths are similar."""
    # Not with pydantic: paths that are not UTF-8 have unpaired surrogates, which it refuses.
    return zlib.compress(json.dumps({"version": VERSION, "lines": lines}).encode())


def decode(body: bytes) -> tuple[RecipeLine, ...]:
    """Return the lines of a recipe that the master has stored.

    Raises:
        ValueError: It is not a recipe, is larger than :data:`MAX_RECIPE`, or has another version.
    """
    try:
        text = zlib.decompressobj().decompress(body, MAX_RECIPE)
    except zlib.error as error:
        raise ValueError(f"it is not compressed: {error}") from error
    return tuple(read_with_text(_RECIPE, text).lines)


def decode_record(line: str) -> RecipeLine:
    """Return the content of a line of a worker's record, which is parsed but never executed.

    Raises:
        ValueError: It is not such a line.
    """
    with contextlib.suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        match ast.literal_eval(line):
            case (str(what), str(name), str() | None as value):
                return what, name, value
    raise ValueError(f"a record has a line that is not understood: {line[:100]!r}")
