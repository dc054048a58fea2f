"""The settings of workers and servers. Only this module of the package reads the environment."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from dlrover_py.process.blocking import read_regular
from dlrover_py.process.token_file import read_token
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import (
    ENV_JOB_NAME,
    ENV_LIFELINE_FD,
    ENV_NODE_ID,
    ENV_POD_IP,
    ENV_PS,
    ENV_ROUND,
    NODE_MOUNT,
    SECRET_TOKEN,
    is_server,
)
from dlrover_py.ps.wire import JobAccess

MAX_ACCESS_BYTES = 65536
_ADDRESS = "tcp://"
"""Beginning of an address in ``DLROVER_PS``."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker knows of its parameter server."""

    access: str = ""
    """Where the servers are (``DLROVER_PS``): see :func:`read_access`. Empty if nothing says so."""
    rank: str = "0"
    """Global rank of this worker (``RANK``)."""
    world: int = 1
    """Number of workers (``WORLD_SIZE``)."""
    round: int = 0
    """Number of the round in which it was started (``DLROVER_ROUND``)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the environment.

        Args:
            environ: The variables. None: those of this process.

        Raises:
            ConfigError: ``WORLD_SIZE`` or ``DLROVER_ROUND`` is no number.
        """
        environ = os.environ if environ is None else environ
        world = environ.get("WORLD_SIZE") or "1"
        if not world.isdecimal():
            raise ConfigError(f"WORLD_SIZE is {world!r}: expected the number of workers")
        started = environ.get(ENV_ROUND) or "0"
        if not started.isdecimal():
            raise ConfigError(f"{ENV_ROUND} is {started!r}: expected the number of a round")
        return cls(environ.get(ENV_PS, ""), environ.get("RANK") or "0", int(world), int(started))


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a server knows of the job that has started it as a node."""

    access: str
    """Where the job's master is (``DLROVER_PS``): see :func:`read_access`."""
    id: str
    """Id of the node (``DLROVER_NODE_ID``)."""
    lifeline: int
    """Descriptor of a pipe whose other end is open while the job runs; -1 if there is none."""
    host: str = "127.0.0.1"
    """The address of this machine, or of this Pod, that others reach (``POD_IP``)."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the environment.

        Args:
            environ: The variables. None: those of this process.

        Raises:
            ConfigError: No job has started this process as a server.
        """
        environ = os.environ if environ is None else environ
        access, node = environ.get(ENV_PS, ""), environ.get(ENV_NODE_ID, "")
        lifeline = environ.get(ENV_LIFELINE_FD, "-1")
        if not access or not is_server(node) or not lifeline.removeprefix("-").isdecimal():
            raise ConfigError(
                "this is the command of the role ps in a job file: expected `dlrover job run FILE` "
                "or a cluster to start it; without a job file, use `dlrover ps serve`"
            )
        return cls(access, node, int(lifeline), environ.get(ENV_POD_IP) or "127.0.0.1")


def environment(access: Path) -> dict[str, str]:
    """Return this process's environment, with the file of a job's servers."""
    return {**os.environ, ENV_PS: str(access)}


def write_access(path: Path, access: JobAccess) -> None:
    """Write how to reach the servers of a job, for this user only."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(access))
    fresh.rename(path)


def token_of(job_token: str) -> str:
    """Return the token of a job's servers, which is made from the token of its agents."""
    digest = hashlib.blake2b(job_token.encode(), digest_size=16, person=b"dlrover-ps")
    return digest.hexdigest()


def read_access(where: str | Path) -> JobAccess:
    """Read how to reach the servers of a job.

    Args:
        where: A file of :func:`write_access`. In a Pod it is the address of the coordinator, as
            ``tcp://HOST:PORT``; the job's token is then in the Pod's volume.

    Raises:
        ConfigError: The file, or the token, cannot be read, or has another content.
    """
    if str(where).startswith(_ADDRESS):
        token = read_token(Path(NODE_MOUNT, SECRET_TOKEN), private=False)
        return JobAccess(os.environ.get(ENV_JOB_NAME, ""), str(where), token_of(token))
    path = Path(where)
    try:
        return msgspec.json.decode(read_regular(path, MAX_ACCESS_BYTES), type=JobAccess)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: expected the file that `dlrover ps serve` writes: {error}"
        ) from error
