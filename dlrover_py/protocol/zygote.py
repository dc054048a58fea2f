"""The messages between an agent, its zygote and the processes that the zygote forks.

The agent writes a :class:`ZygoteConfig` to a file, and perhaps another one later. All other
messages go over a socket: JSON after a length of four bytes. The zygote sends one
:class:`ZygoteFitness`, and one :class:`ForkAnswer` to each :class:`ForkWorkers` or
:class:`ForkStore`. Descriptors come with the first byte of a request. A forked process has a socket
of its own, with one byte in each direction: :data:`GO` and :data:`STARTED`.

All of them run from the same installation, so the messages have no version. A zygote imports as
little as possible, so this module needs only the standard library.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Self

from dlrover_py.protocol.json_text import decoded

LENGTH: Final = 4
"""Bytes of the length before a message (big endian)."""
MAX_MESSAGE: Final = 1 << 29
"""Bytes that a message has at most: it has the environments of all workers of a node."""
GO: Final = b"g"
"""The agent lets a forked process go. The process ends if the socket is closed before."""
STARTED: Final = b"s"
"""A forked process is about to run the user's code, or serves the store."""

RecipeLine = tuple[str, str, str | None]
"""A line of an import recipe: its kind (``import``, ``env``, ``own`` or ``unfit``), a name, and a
value."""


class ZygoteConfig(NamedTuple):
    """The configuration of a zygote."""

    socket: int
    """File descriptor of the socket to the agent."""
    agent: int
    """Process id of the agent. It becomes the parent of the workers."""
    recipe: Sequence[RecipeLine]
    """The import recipe, in order.

    Its lines are ``["import", name, origin]``, ``["env", key, value]``, ``["env", key, null]``, and
    ``["own", name, origin]`` for a module that must not be imported. So it is with ``["unfit",
    name, origin]``: an installed module that has made a zygote unfit.
    """
    per_rank: Sequence[str]
    """Environment variables that differ between workers. No import may read them."""
    more: bool = False
    """Whether the agent knows only the first lines of the recipe yet.

    Later it sends one message more: the path of a file that has this object with the whole recipe.
    """

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Return a configuration; ValueError if the bytes are none."""
        found = _fields(
            body,
            socket=_number,
            agent=_number,
            recipe=recipe_lines,
            per_rank=_texts,
            more=_truth,
        )
        lines = [(what, name, value) for what, name, value in found["recipe"]]
        return cls(**found | {"recipe": lines})


class ZygoteFitness(NamedTuple):
    """The zygote's report, after it has imported the recipe and tested itself."""

    unfit: str = ""
    """Why the zygote cannot fork workers; empty if it can."""
    blame: Sequence[str] = ()
    """Modules at fault, with those that import them. Without them, a zygote may be fit."""
    modules: int = 0
    """Number of imported modules."""

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Return a report; ValueError if the bytes are none."""
        return cls(**_fields(body, unfit=_text, blame=_texts, modules=_number))


class WorkerFork(NamedTuple):
    """A worker that is to be forked."""

    argv: list[str]
    """Command line of the worker: ``PYTHON -u [-m] SCRIPT ARGS…``."""
    env: dict[str, str]
    """Its environment."""
    observe: list[str]
    """The file for a record of its imports, and the folders of installed packages, separated by
    ``os.pathsep``; empty if its imports are not recorded."""


class ForkWorkers(NamedTuple):
    """A request to fork workers; descriptors of each: control socket, output, errors."""

    workers: list[WorkerFork]
    """The workers, at least one."""


class ForkStore(NamedTuple):
    """A request to fork a TCPStore process; descriptors: control socket, listening socket."""

    store: int
    """Port of the store."""


class ForkAnswer(NamedTuple):
    """The zygote's answer to a request."""

    pids: list[int]
    """Process ids, in the order of the request. There are fewer if some could not be forked."""
    refusal: str
    """Why nothing was forked; empty if something was."""

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Return an answer; ValueError if the bytes are none."""
        return cls(**_fields(body, pids=_numbers, refusal=_text))


def encode(message: ZygoteConfig | ZygoteFitness | ForkWorkers | ForkStore | ForkAnswer) -> bytes:
    """Return a message as a JSON object, without the length that precedes it on the socket."""
    fields = message._asdict()
    if isinstance(message, ForkWorkers):
        fields["workers"] = [worker._asdict() for worker in message.workers]
    return json.dumps(fields).encode()


def read_request(body: bytes) -> ForkWorkers | ForkStore:
    """Return the request of an agent.

    Raises:
        ValueError: The bytes are not a request.
    """
    document = decoded(body)
    if isinstance(document, dict) and "store" in document:
        return ForkStore(**_fields(document, store=_number))
    found = _fields(document, workers=_any_list)["workers"]
    fields = (_fields(one, argv=_command, env=_environment, observe=_texts) for one in found)
    workers = [WorkerFork(**one) for one in fields]
    if not workers:
        raise ValueError("workers: expected at least one, found none")
    return ForkWorkers(workers)


# --- Fields ---


def _fields(document: Any, **fits: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the fields of an object, each checked by a function. Other fields are ignored.

    Raises:
        ValueError: It is not a JSON object, or a field is missing or has another form.
    """
    if isinstance(document, bytes):
        document = decoded(document)
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {type(document).__name__}")
    for name, fit in fits.items():
        if not fit(document.get(name)):
            expected = fit.__name__.strip("_").replace("_", " ")
            found = ascii(document.get(name))[:60]
            raise ValueError(f"{name}: expected {expected}, found {found}")
    return {name: document[name] for name in fits}


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _any_list(value: Any) -> bool:
    return isinstance(value, list)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _command(value: Any) -> bool:
    return _texts(value) and len(value) > 2


def _environment(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_text, value.values()))


def _line(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and _texts(value[:2])
        and (value[2] is None or _text(value[2]))
    )


def recipe_lines(value: Any) -> bool:
    """Return whether a value from JSON is a list of the lines of a recipe."""
    return isinstance(value, list) and all(map(_line, value))
