"""The SDK inside the user's script: it speaks with the local agent, and with nobody else.

Light on purpose: no torch, no pydantic, nothing that a script would not have imported anyway.
``Checkpointer`` and ``PerRank`` bring torch in, and are loaded when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_py.trainer.checkpoint import Checkpointer
    from dlrover_py.trainer.state import PerRank

__all__ = ["Checkpointer", "PerRank"]

_HOMES = {"Checkpointer": "checkpoint", "PerRank": "state"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
