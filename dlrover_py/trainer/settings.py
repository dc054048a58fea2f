"""What a worker is told by its agent, or by torchrun: the only reader of its environment."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import (
    ENV_AGENT_SOCKET,
    ENV_ARENA,
    ENV_CHECKPOINT,
    ENV_DEPOT,
    ENV_JOB_NAME,
    ENV_JOB_UID,
    ENV_LOCAL_RANK,
    ENV_RESTART_REASON,
    ENV_ROUND,
    ENV_SHM_DIR,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """A worker's place in its round; the defaults are those of a script that runs alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    restart_count: int = 0
    place: int | None = None
    """By which its agent knows it; its local rank if absent, which may be virtual."""
    agent_socket: str = ""
    """Path of the agent's socket; empty outside an elastic job."""
    round: int = 0
    restart_reason: str = ""
    job: str = ""
    """The job's uid; empty outside an elastic job."""
    arena: str = ""
    """The agent's folder of shared memory; empty where there is no agent that has one."""
    depot: str = ""
    """Path of the socket at which the agent tells of checkpoints."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """The job's ``checkpoint:``."""
    shm_dir: str = "/dev/shm"
    """Where a worker without an agent has its arena."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the environment; what is absent or empty takes its default.

        Raises:
            ConfigError: a number is malformed, or a rank lies outside its world.
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
            arena=environ.get(ENV_ARENA, ""),
            depot=environ.get(ENV_DEPOT, ""),
            checkpoint=_document(environ, ENV_CHECKPOINT),
            shm_dir=environ.get(ENV_SHM_DIR) or "/dev/shm",
        )
        if settings.rank >= settings.size:
            raise ConfigError(
                f"environment: RANK is {settings.rank} and WORLD_SIZE {settings.size}: "
                "expected RANK < WORLD_SIZE; start the script with elastic-run or torchrun"
            )
        return settings


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"environment: {name} is {text!r}: expected a whole number ≥ 0")
    return int(text)


def _document(environ: Mapping[str, str], name: str) -> dict[str, Any]:
    text = environ.get(name, "")
    if not text:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"environment: {name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"environment: {name} is {text[:60]!r}: expected a JSON object")
    return found
