"""The messages between an agent, its zygote and the processes that the zygote forks.

The agent writes a :class:`ZygoteConfig` to a file, and perhaps another one later. All other
messages go over sockets: JSON after a length of four bytes. Descriptors come with the first byte of
a message. The zygote sends one :class:`ZygoteFitness`, and one :class:`ForkAnswer` to each
:class:`ForkChildren`. A forked process has a socket of its own. It gets its task on it, which is a
:class:`WorkerTask` or a :class:`StoreTask`, then :data:`GO`, and it sends :data:`STARTED`.

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
"""Bytes that a message has at most: an environment has megabytes at most, a recipe less."""
GO: Final = b"g"
"""The agent lets a forked process go. The process ends if the socket is closed before."""
STARTED: Final = b"s"
"""A forked process is about to run the user's code, or serves the store."""

RecipeLine = tuple[str, str, str | None]
"""A line of an import recipe: its kind (``import``, ``env``, ``own``, ``unfit``, ``rank`` or
``start``), a name, and a value."""


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
    name, origin]``: an installed module that has made a zygote unfit. ``["rank", key, null]`` is a
    variable to which the script gives another value in each worker; see ``per_rank``. ``["start",
    key, value]`` is a variable that was changed when the interpreters of the workers started.
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


class ForkChildren(NamedTuple):
    """A request to fork children without a task; descriptors: the control socket of each.

    Without descriptors, the zygote only checks the command line.
    """

    checked: list[str]
    """Command line of the workers: the zygote refuses if its modules are not those that they would
    import. Empty if nothing is to be checked."""


class WorkerTask(NamedTuple):
    """What a child runs as a worker; descriptors: standard output, standard error."""

    argv: list[str]
    """Command line of the worker: ``PYTHON -u [-m] SCRIPT ARGS…``."""
    env: dict[str, str]
    """Its environment."""
    observe: list[str]
    """The file for a record of its imports, and the folders of installed packages, separated by
    ``os.pathsep``; empty if its imports are not recorded."""


class StoreTask(NamedTuple):
    """What a child needs that serves a TCPStore; descriptor: the listening socket."""

    store: int
    """Port of the store."""


class ForkAnswer(NamedTuple):
    """The zygote's answer to a request."""

    pids: list[int]
    """Process ids, in the order of the request. There are fewer if some could not be forked."""
    refusal: str
    """Why nothing was forked; empty if nothing is wrong."""

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Return an answer; ValueError if the bytes are none."""
        return cls(**_fields(body, pids=_numbers, refusal=_text))


Message = ZygoteConfig | ZygoteFitness | ForkChildren | WorkerTask | StoreTask | ForkAnswer


def encode(message: Message) -> bytes:
    """Return a message as a JSON object, without the length that precedes it on the socket."""
    return json.dumps(message._asdict()).encode()


def read_request(body: bytes) -> ForkChildren:
    """Return the request of an agent.

    Raises:
        ValueError: The bytes are not a request.
    """
    return ForkChildren(**_fields(body, checked=_command_or_none))


def read_task(body: bytes) -> WorkerTask | StoreTask:
    """Return the task of a forked process.

    Raises:
        ValueError: The bytes are not a task.
    """
    document = decoded(body)
    if isinstance(document, dict) and "store" in document:
        return StoreTask(**_fields(document, store=_number))
    return WorkerTask(**_fields(document, argv=_command, env=_environment, observe=_texts))


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


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _command(value: Any) -> bool:
    return _texts(value) and len(value) > 2


def _command_or_none(value: Any) -> bool:
    return value == [] or _command(value)


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
