"""The worker's side of the messages between a worker and its agent: limits, encoder and decoder.

A script waits for the imports of the SDK, so this module needs only the standard library.
:mod:`dlrover_py.protocol.workers` has the same messages as checked types, for the agent.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

from dlrover_py.protocol import json_text
from dlrover_py.protocol.versions import other_version

VERSION: Final = 1
"""Version of the messages. The SDK of a script may be of another release than the agent."""
MAX_DATAGRAM: Final = 8192
"""Greatest size of a datagram, in bytes."""
MAX_METRICS: Final = 32
"""Greatest number of metrics in a report."""
MAX_NAME: Final = 64
"""Greatest length of a metric's name, in characters."""
MAX_DIR: Final = 4096
"""Greatest length of the address of a directory, in characters."""


class TargetFields(TypedDict):
    """The fields of :class:`~dlrover_py.protocol.workers.CheckpointTarget`."""

    dir: str
    keep: Mapping[str, int]
    spare: Sequence[str]


class ProgressFields(TypedDict, total=False):
    """The fields of :class:`~dlrover_py.protocol.workers.WorkerProgress`."""

    version: int
    round: int
    local_rank: int
    step: int | None
    total: int | None
    metrics: Mapping[str, float]
    staged: int | None
    unsaved: str
    store: TargetFields | None
    polls: bool


def encode(message: ProgressFields | TargetFields) -> bytes:
    """Return a message as compact JSON in UTF-8."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def check_size(datagram: bytes) -> None:
    """Refuse a datagram that may have been cut.

    Raises:
        ValueError: It is larger than :data:`MAX_DATAGRAM`.
    """
    if len(datagram) > MAX_DATAGRAM:
        raise ValueError(f"it is too large: expected at most {MAX_DATAGRAM} bytes")


def read_stop(datagram: bytes) -> str:
    """Return why the script must stop, from a request of the agent; empty if it must not.

    An absent version counts as the present one, and other fields are ignored.

    Raises:
        ValueError: The datagram is not a request, or has another version.
    """
    check_size(datagram)
    request = json_text.decoded(datagram)
    if not isinstance(request, dict):
        raise ValueError(f"expected a JSON object, found {type(request).__name__}")
    version, stop = request.get("version", VERSION), request.get("stop", "")
    if type(version) is not int:
        raise ValueError(f"version: expected an integer, found {type(version).__name__}")
    if version != VERSION:
        raise ValueError(other_version("it", version, VERSION))
    if not isinstance(stop, str):
        raise ValueError(f"stop: expected text, found {type(stop).__name__}")
    return stop
