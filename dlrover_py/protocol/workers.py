"""What a worker and its agent tell each other, as datagrams of JSON on a unix socket.

The worker's SDK (:mod:`dlrover_py.trainer.session`) sends :class:`News` to the agent's socket
(``DLROVER_AGENT_SOCKET``) without ever waiting; the agent answers to the sender with
:class:`Order`. A lost datagram does no harm: the next one says more.
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from dlrover_py.protocol.agents import Count, Line, Wire, Words

MAX_DATAGRAM = 8192


class Store(Wire):
    """Where a script wants checkpoints to go that are to outlive the job, if it says so itself."""

    dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """A path, not a relative one, or an fsspec address."""
    keep: dict[Annotated[str, StringConstraints(max_length=16)], Count] = Field(
        default_factory=dict, max_length=8
    )
    """As the job's ``checkpoint.keep``."""
    spare: list[Line] = Field(default_factory=list, max_length=8)
    """Folders there that stay whatever ``keep`` says: the one that was loaded."""


class News(Wire):
    """Up: where the script stands."""

    round: Count
    local_rank: Count
    step: Count | None = None
    """Steps finished, counted from the start of the training, not of the round."""
    total: Count | None = None
    """Steps in all, if known."""
    metrics: dict[Annotated[str, StringConstraints(max_length=64)], float] = Field(
        default_factory=dict, max_length=32
    )
    staged: Count | None = None
    """Newest step whose slot in the node's arena this worker has sealed."""
    unsaved: Words = ""
    """Why this worker's newest state is not saved, for want of memory say; empty if it is."""
    store: Store | None = None
    polls: bool = False
    """The script asks ``should_stop()``, so it is told before it is signalled."""


class Order(Wire):
    """Down: what the agent asks of the script."""

    stop: Words = ""
    """Why the script should finish its step, save, and end; empty if it should not."""
