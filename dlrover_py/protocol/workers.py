"""The messages between a worker and its agent: datagrams of JSON on a unix socket.

The worker's SDK (:mod:`dlrover_py.trainer.session`) sends :class:`WorkerProgress` to the agent's
socket (``DLROVER_AGENT_SOCKET``), and never waits for it. The agent replies to the sender with
:class:`WorkerRequest`. A lost datagram does no harm: the next one has newer values.

The SDK encodes and decodes with :mod:`dlrover_py.protocol.sdk`, which does not need pydantic.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError

from dlrover_py.protocol.agents import (
    Count,
    Line,
    LoaderSettings,
    LoaderState,
    Spent,
    Wire,
    Words,
    WrongValue,
)
from dlrover_py.protocol.documents import explain
from dlrover_py.protocol.sdk import MAX_DIR, MAX_METRICS, MAX_NAME, VERSION, check_size


class CheckpointTarget(Wire):
    """The place that a script has chosen for checkpoints that outlive the job."""

    dir: Annotated[str, StringConstraints(min_length=1, max_length=MAX_DIR)]
    """An absolute path, or an fsspec address."""
    keep: dict[Annotated[str, StringConstraints(max_length=16)], Count] = Field(
        default_factory=dict, max_length=8
    )
    """Which checkpoints to keep, as in the job's ``checkpoint.keep``."""
    spare: list[Line] = Field(default_factory=list, max_length=8)
    """Names of folders that must not be deleted, even if ``keep`` does not include them: the
    checkpoint that was loaded."""


class WorkerProgress(Wire):
    """A worker's report to its agent: the progress of the script."""

    version: Literal[1] = VERSION
    """The version of the messages; another one is refused."""
    round: Count
    """The round of the worker."""
    local_rank: Count
    """Rank of the worker on its node."""
    step: Count | None = None
    """Number of finished steps since the start of the training, not of the round."""
    total: Count | None = None
    """Number of all steps, if it is known."""
    metrics: dict[Annotated[str, StringConstraints(max_length=MAX_NAME)], float] = Field(
        default_factory=dict, max_length=MAX_METRICS
    )
    """Numbers that the script reported, by name."""
    staged: Count | None = None
    """Newest step whose slot in the node's shared-memory pool this worker has sealed."""
    unsaved: Words = ""
    """Why this worker's newest state is not saved (not enough memory, say); empty if it is
    saved."""
    store: CheckpointTarget | None = None
    """The place for checkpoints that the script has chosen; None if it has chosen none."""
    polls: bool = False
    """True if the script calls ``should_stop()``: it is then asked to stop before it gets a
    signal."""
    agrees: bool = False
    """True if the ranks agree on a last step and save it when the script is asked to stop: before a
    planned change they have the time for this."""
    loader: LoaderState | None = None
    """The state of its ``ElasticLoader``; None if it has none."""
    spent: Spent = Field(default_factory=dict)
    """Seconds that it has spent since its start, as in ``Progress``."""
    wrong: list[WrongValue] = Field(default_factory=list, max_length=2)
    """Wrong values that it has found, as long as they last: one of each kind."""


class WorkerRequest(Wire):
    """An agent's reply to a worker: what the script must do."""

    version: Literal[1] = VERSION
    """The version of the messages; another one is refused."""
    stop: Words = ""
    """Why the script must finish its step, save, and end; empty if it must not."""
    loader: LoaderSettings | None = None
    """The settings of its data loaders; None if none were ever changed."""

    def encode(self) -> bytes:
        """Return the request as a datagram."""
        return self.model_dump_json().encode()


def read_progress(datagram: bytes) -> WorkerProgress:
    """Return the report in a datagram; unknown fields are ignored.

    Raises:
        ValueError: The datagram is not a valid report, or has another version.
    """
    check_size(datagram)
    try:
        return WorkerProgress.model_validate_json(datagram)
    except ValidationError as error:
        raise ValueError(explain(error)) from error
