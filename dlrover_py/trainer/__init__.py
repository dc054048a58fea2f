"""The SDK that a training script imports; it communicates only with the agent on the same machine.

Importing this package is cheap: it imports neither torch nor pydantic. ``Checkpointer``,
``ElasticLoop`` and ``PerRank`` need torch. They are imported when they are first accessed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_py.trainer.checkpointer import Checkpointer
    from dlrover_py.trainer.loop import ElasticLoop
    from dlrover_py.trainer.state_dict import PerRank

__all__ = ["Checkpointer", "ElasticLoop", "PerRank"]

_HOMES = {"Checkpointer": "checkpointer", "ElasticLoop": "loop", "PerRank": "state_dict"}
"""Module of each name that is imported when it is first accessed."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first accessed.

    Raises:
        AttributeError: this package has no such name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
