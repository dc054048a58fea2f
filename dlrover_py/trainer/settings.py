"""What a worker is told by its agent, or by torchrun: the only reader of its environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import (
    ENV_AGENT_SOCKET,
    ENV_LOCAL_RANK,
    ENV_RESTART_REASON,
    ENV_ROUND,
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
