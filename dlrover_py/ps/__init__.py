"""The parameter server: tables that outgrow one node, on servers that may be lost.

Names are imported when they are first used. Servers need no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover_py.ps.calls import restore, save
    from dlrover_py.ps.client import DataLossError, PsClient, connect
    from dlrover_py.ps.cut_item import Tables, tables
    from dlrover_py.ps.embedding import Embedding, EmbeddingBag, Optimizer
    from dlrover_py.ps.local import LocalServers
    from dlrover_py.ps.replace import replace_embeddings
    from dlrover_py.ps.specs import (
        TableSpec,
        adagrad,
        adam,
        formats,
        ftrl,
        keep,
        normal,
        row_adagrad,
        sgd,
        ssp,
        sync,
        uniform,
    )

__all__ = [
    "DataLossError",
    "Embedding",
    "EmbeddingBag",
    "LocalServers",
    "Optimizer",
    "PsClient",
    "TableSpec",
    "Tables",
    "adagrad",
    "adam",
    "connect",
    "formats",
    "ftrl",
    "keep",
    "normal",
    "replace_embeddings",
    "restore",
    "row_adagrad",
    "save",
    "sgd",
    "ssp",
    "sync",
    "tables",
    "uniform",
]

_HOMES = {
    "DataLossError": "client",
    "PsClient": "client",
    "connect": "client",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding",
    "Optimizer": "embedding",
    "LocalServers": "local",
    "replace_embeddings": "replace",
    "restore": "calls",
    "save": "calls",
    "Tables": "cut_item",
    "tables": "cut_item",
}
"""Module of each name. All others are in ``specs``."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first accessed.

    Raises:
        AttributeError: This package has no such name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'specs')}"), name)
