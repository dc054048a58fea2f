"""The rendezvous backend for an unmodified torchrun: ``--rdzv-backend=dlrover``.

torch loads this package through the entry-point group ``torchrun.handlers``. It does so in every
process that imports ``torch.distributed.elastic`` or ``torch.distributed.checkpoint``, also where
nobody uses the backend. So the package itself imports nothing, and the agent's modules are imported
when torchrun makes a handler.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def backend() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """Return the function that makes a handler; this is the entry point for torchrun."""
    return _make_handler


def _make_handler(params: "RendezvousParameters") -> "RendezvousHandler":
    from dlrover_agent.torch_compat.rendezvous import Handler

    return Handler(params)
