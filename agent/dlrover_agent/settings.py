"""What the platform tells an agent: the only reader of its environment.

Light: a standalone job starts its master before the agent imports the rest of itself.
"""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Self, TypeVar

from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which an agent is asked to end."""
LINE_PREFIX = "[${role_name}${local_rank}]:"
"""Before tee'd lines, unless TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE says another."""
T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Settings:
    """The environment of one agent."""

    master_addr: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None
    """The master is called over TLS, and checked by this authority."""
    node_id: str = ""
    job_name: str = ""
    advertise: str = "127.0.0.1"
    """Address at which other nodes reach this one."""
    log_dir: Path | None = None
    lifeline_fd: int | None = None
    python: str = sys.executable
    connect_s: float = 60.0
    """The master must have answered once by then."""
    own_master: bool = False
    """No platform brings a lost master back: one of the nodes runs it."""
    shm_dir: Path = Path("/dev/shm")
    """A tmpfs, where what is saved outlives the workers."""
    job_uid: str = ""
    """Of this job and no other; empty: its name."""
    returns: bool = False
    """After an agent that was killed the same node comes again, and finds what is saved."""
    log_level: str = ""
    """Empty: INFO in a job, WARNING on somebody's terminal."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """All of it, for the workers to inherit."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the environment.

        Raises:
            ConfigError: a value cannot be used.
        """
        environ = dict(os.environ) if environ is None else environ
        token, logs = environ.get(names.ENV_TOKEN_FILE), environ.get(names.ENV_LOG_DIR)
        authority = environ.get(names.ENV_CA_FILE)
        return cls(
            master_addr=environ.get(names.ENV_MASTER_ADDR, ""),
            token_file=Path(token) if token else None,
            ca_file=Path(authority) if authority else None,
            node_id=environ.get(names.ENV_NODE_ID, ""),
            job_name=environ.get(names.ENV_JOB_NAME, ""),
            advertise=environ.get(names.ENV_POD_IP, "127.0.0.1"),
            log_dir=Path(logs) if logs else None,
            lifeline_fd=_number(environ, names.ENV_LIFELINE_FD, int),
            python=environ.get("PYTHON_EXEC", sys.executable),
            connect_s=_number(environ, names.ENV_CONNECT_S, float) or 60.0,
            shm_dir=Path(environ.get(names.ENV_SHM_DIR) or "/dev/shm"),
            job_uid=environ.get(names.ENV_JOB_UID, ""),
            log_level=environ.get("DLROVER_LOG_LEVEL", ""),
            environ=environ,
        )

    @property
    def in_job(self) -> bool:
        """Whether a platform has started this agent as a node of a job."""
        return bool(self.master_addr)

    def check(self) -> None:
        """Refuse an environment in which no job can be joined.

        Raises:
            ConfigError: what is missing, and who should have set it.
        """
        from dlrover_py.rpc import check_address  # a tenth of a second of imports

        check_address(self.master_addr)
        for name, value in (
            (names.ENV_NODE_ID, self.node_id),
            (names.ENV_TOKEN_FILE, self.token_file),
        ):
            if not value:
                raise ConfigError(
                    f"{names.ENV_MASTER_ADDR} is set and {name} is not: inside a job the platform "
                    "sets both; to train on this machine alone, unset it and use --standalone"
                )

    def token(self) -> str:
        """The job's token.

        Raises:
            ConfigError: the file cannot be read, or is empty.
        """
        assert self.token_file is not None
        try:
            token = self.token_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"token file {self.token_file}: {error.strerror}") from error
        if not token:
            raise ConfigError(
                f"token file {self.token_file}: it is empty; expected the job's token"
            )
        return token


@dataclass(frozen=True, slots=True)
class Output:
    """Where the flags want the workers' output; the defaults are torchrun's."""

    log_dir: Path | None = None
    """``/dev/null``: no files at all."""
    redirects: Mapping[int | None, int] = field(default_factory=dict)
    tee: Mapping[int | None, int] = field(default_factory=dict)
    """1 stdout, 2 stderr, 3 both, by local rank; ``None`` is all others."""
    shown: frozenset[int] | None = None
    """Local ranks that are shown on the console; None is all."""
    out_words: tuple[str, ...] = ()
    err_words: tuple[str, ...] = ()
    """Tee'd lines with one of them are copied to a file of all local ranks."""
    prefix: str = LINE_PREFIX
    specs: str | None = None
    """Name in the entry-point group ``torchrun.logs_specs``."""

    @property
    def wants_files(self) -> bool:
        """Whether a stream of some worker goes into a file."""
        return any((*self.redirects.values(), *self.tee.values()))

    def line_prefix(self, role: str, rank: int, local_rank: int) -> str:
        """What stands before each tee'd line of a worker."""
        return Template(self.prefix).safe_substitute(
            role_name=role, rank=rank, local_rank=local_rank
        )

    @staticmethod
    def of(which: Mapping[int | None, int], local_rank: int) -> int:
        """What it says of one local rank."""
        return which.get(local_rank, which.get(None, 0))


@dataclass(frozen=True, slots=True)
class Command:
    """What each worker runs, and how."""

    argv: tuple[str, ...]
    """``PYTHON -u [-m] SCRIPT ARGS…``, or a program and its arguments."""
    nproc: int
    inherit: Mapping[str, str]
    """The agent's environment."""
    name: str = ""
    """What people call it: the script."""
    role: str = "default"
    log_dir: Path | None = None
    """Where the platform looks for both streams of all workers; None if it does not."""
    output: Output = Output()
    event_handler: str = "null"
    cold: str = ""
    """Why workers are never forked from a zygote; empty if they may be."""
    signals: tuple[signal.Signals, ...] = HANDLED
    """By which the agent is asked to end; workers get the same one."""
    shutdown_s: float = 30.0
    """From such a signal to SIGKILL."""
    virtual_local_rank: bool = False
    cpus: tuple[frozenset[int], ...] = ()
    """CPUs of each worker by local rank; empty: those of the agent."""
    precheck: int = 0
    """1: the node is checked before it trains. 2: and the speed of its network is told."""
    save_at_breakpoint: bool = False
    """After a failure of a worker the newest state goes to storage."""
    exclude_straggler: bool = False
    """A node that the check shows to be slow does not train."""


def _number(environ: Mapping[str, str], name: str, kind: type[T]) -> T | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}: expected a number") from error
