"""The worker's side of the messages between a worker and its agent: limits, encoder and decoder.

A script waits for the imports of the SDK, so this module needs only the standard library.
:mod:`dlrover_py.protocol.workers` has the same messages as checked types, for the agent.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict

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


MAX_TUNING: Final = 2**20 - 1
"""Greatest number of loader settings."""
MAX_MICRO_BATCH: Final = 2**31 - 1
"""Greatest micro-batch in loader settings."""
MAX_LOADER_WORKERS: Final = 1023
"""Greatest number of loader workers in loader settings."""


WATCHED: Final = ("loss", "grad_norm")
"""Names of the metrics that must be finite, and must not leap up."""


class WrongFields(TypedDict):
    """The fields of :class:`~dlrover_py.protocol.agents.WrongValue`."""

    kind: str
    step: int
    good: int | None
    ranks: Sequence[int]
    metric: str
    value: str


class TargetFields(TypedDict):
    """The fields of :class:`~dlrover_py.protocol.workers.CheckpointTarget`."""

    dir: str
    keep: Mapping[str, int]
    spare: Sequence[str]


class LoaderFields(TypedDict):
    """The fields of :class:`~dlrover_py.protocol.agents.LoaderState`."""

    number: int
    refused: bool
    step: int
    micro_batch: int
    share: int
    batch: int
    loader_workers: int
    most_workers: int
    measured: int
    samples_per_s: float
    memory: float
    memory_before: float
    data_wait: float
    epoch: int
    position: int
    samples: int


class LoaderTuning(NamedTuple):
    """The fields of :class:`~dlrover_py.protocol.agents.LoaderSettings`."""

    number: int = 0
    micro_batch: int | None = None
    loader_workers: int | None = None


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
    agrees: bool
    loader: LoaderFields | None
    spent: Mapping[str, float]
    wrong: Sequence[WrongFields]


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


class AgentRequest(NamedTuple):
    """What an agent asks of a script; see :class:`~dlrover_py.protocol.workers.WorkerRequest`."""

    stop: str
    """Why the script must stop; empty if it must not."""
    loader: LoaderTuning | None
    """The settings of its data loaders; None if there are none."""


def read_worker_request(datagram: bytes) -> AgentRequest:
    """Return what the agent asks of a script.

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
    loader = request.get("loader")
    return AgentRequest(stop, None if loader is None else read_loader_tuning(loader))


def read_loader_tuning(document: Any) -> LoaderTuning:
    """Return the settings of data loaders in a JSON object; absent ones are the script's own.

    Raises:
        ValueError: It is no object, or a number is out of its range.
    """
    if not isinstance(document, dict):
        raise ValueError(f"loader: expected a JSON object, found {type(document).__name__}")
    found: dict[str, int | None] = {}
    limits = (
        ("number", 0, MAX_TUNING),
        ("micro_batch", 1, MAX_MICRO_BATCH),
        ("loader_workers", 0, MAX_LOADER_WORKERS),
    )
    for name, least, most in limits:
        value = document.get(name)
        if value is None and name != "number":
            found[name] = None
        elif type(value) is int and least <= value <= most:
            found[name] = value
        else:
            raise ValueError(f"loader.{name} is {value!r}: expected {least} to {most}")
    return LoaderTuning(found["number"] or 0, found["micro_batch"], found["loader_workers"])
