"""The settings of a worker. Only this module reads its environment.

The agent, or torchrun, sets the environment variables.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dlrover_py.protocol import json_text
from dlrover_py.protocol.checkpoint_id import Rejection
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import (
    ENV_AGENT_SOCKET,
    ENV_CHECKPOINT,
    ENV_JOB_NAME,
    ENV_JOB_UID,
    ENV_LOADER,
    ENV_LOCAL_RANK,
    ENV_PROBE_SOCKET,
    ENV_RESTART_REASON,
    ENV_ROUND,
    ENV_SHARDS_SOCKET,
    ENV_SHM_DIR,
    ENV_SHM_POOL,
    ENV_TRANSFER_SOCKET,
)
from dlrover_py.protocol.sdk import LoaderTuning, read_loader_tuning


@dataclass(frozen=True, slots=True)
class Settings:
    """The place of a worker in its round. The defaults are those of a script that runs alone."""

    rank: int = 0
    """Global rank of this worker (``RANK``)."""
    size: int = 1
    """Number of workers in the round (``WORLD_SIZE``)."""
    local_rank: int = 0
    """Rank of this worker on its node (``LOCAL_RANK``)."""
    local_size: int = 1
    """Number of workers on this node (``LOCAL_WORLD_SIZE``)."""
    node_rank: int = 0
    """Rank of this node (``GROUP_RANK``)."""
    nodes: int = 1
    """Number of nodes in the round (``GROUP_WORLD_SIZE``)."""
    restart_count: int = 0
    """Number of earlier rounds that ended in a failure (``TORCHELASTIC_RESTART_COUNT``)."""
    place: int | None = None
    """Number by which the agent knows this worker. None: ``local_rank``, which may be virtual."""
    agent_socket: str = ""
    """Path of the agent's socket; empty outside an elastic job."""
    round: int = 0
    """Number of the rendezvous round; 0 outside an elastic job."""
    restart_reason: str = ""
    """Why the workers were restarted, in words; empty in the first round."""
    job: str = ""
    """Uid of the job; its name if it has no uid; empty outside an elastic job."""
    pool: str = ""
    """Folder of the agent's shared-memory pool; empty if no agent has one."""
    transfer_socket: str = ""
    """Path of the socket of the agent's transfer server, which serves checkpoints."""
    shards_socket: str = ""
    """Path of the agent's socket for requests about shards of datasets."""
    probe: dict[str, str] = field(default_factory=dict)
    """Variables for the thread that tells the agent what this worker does."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """The ``checkpoint:`` section of the job."""
    loader: LoaderTuning = field(default_factory=LoaderTuning)
    """The settings of data loaders with which this worker starts."""
    shm_dir: str = "/dev/shm"
    """Folder in which a worker without an agent creates its shared-memory pool."""

    @property
    def rejected(self) -> list[Rejection]:
        """Which checkpoints of the job have wrong values."""
        return [Rejection(round=r, good=good) for r, good in self.checkpoint.get("rejected", ())]

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the environment. A variable that is absent or empty gives the default.

        Args:
            environ: the variables. None: those of this process.

        Raises:
            ConfigError: a number or a JSON document is malformed, or the rank is outside the world.
        """
        environ = os.environ if environ is None else environ
        settings = cls(
            rank=_count(environ, "RANK", 0),
            size=_count(environ, "WORLD_SIZE", 1),
            local_rank=_count(environ, "LOCAL_RANK", 0),
            local_size=_count(environ, "LOCAL_WORLD_SIZE", 1),
            node_rank=_count(environ, "GROUP_RANK", 0),
            nodes=_count(environ, "GROUP_WORLD_SIZE", 1),
            restart_count=_count(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            place=_count(environ, ENV_LOCAL_RANK, 0) if environ.get(ENV_LOCAL_RANK) else None,
            agent_socket=environ.get(ENV_AGENT_SOCKET, ""),
            round=_count(environ, ENV_ROUND, 0),
            restart_reason=environ.get(ENV_RESTART_REASON, ""),
            job=environ.get(ENV_JOB_UID) or environ.get(ENV_JOB_NAME, ""),
            pool=environ.get(ENV_SHM_POOL, ""),
            transfer_socket=environ.get(ENV_TRANSFER_SOCKET, ""),
            shards_socket=environ.get(ENV_SHARDS_SOCKET, ""),
            probe={
                name: environ[name]
                for name in (ENV_PROBE_SOCKET, ENV_LOCAL_RANK, ENV_ROUND)
                if name in environ
            },
            checkpoint=_document(environ, ENV_CHECKPOINT),
            loader=_loader(environ),
            shm_dir=environ.get(ENV_SHM_DIR) or "/dev/shm",
        )
        if settings.rank >= settings.size:
            raise ConfigError(
                f"environment: RANK is {settings.rank} and WORLD_SIZE {settings.size}: "
                "expected RANK < WORLD_SIZE; start the script with elastic-run or torchrun"
            )
        return settings


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a whole number.

    Args:
        environ: the variables.
        name: the name of the variable.
        default: the result if the variable is absent or empty.

    Raises:
        ConfigError: the variable is not a whole number from 0.
    """
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"environment: {name} is {text!r}: expected a whole number ≥ 0")
    return int(text)


def _loader(environ: Mapping[str, str]) -> LoaderTuning:
    """Return the settings of data loaders; those of the script if the variable is absent.

    Raises:
        ConfigError: the variable is not such a document.
    """
    found = _document(environ, ENV_LOADER)
    try:
        return read_loader_tuning(found) if found else LoaderTuning()
    except ValueError as error:
        raise ConfigError(f"environment: {ENV_LOADER}: {error}") from error


def _document(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return a variable as a JSON object; {} if the variable is absent or empty.

    Raises:
        ConfigError: the variable is not JSON, or is another kind of value.
    """
    text = environ.get(name, "")
    if not text:
        return {}
    try:
        found = json_text.decoded(text)
    except ValueError as error:
        raise ConfigError(f"environment: {name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"environment: {name} is {text[:60]!r}: expected a JSON object")
    return found
