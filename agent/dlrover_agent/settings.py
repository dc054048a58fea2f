"""Settings of an agent, and the only module that reads the agent's environment.

This module imports little, because a standalone job starts its master before the agent imports its
other modules.
"""

import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Self, TypeVar

from dlrover_py.process.token_file import read_token
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError

if TYPE_CHECKING:
    from dlrover_py.protocol.log_rules import LogRule

DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which an agent is asked to end: the default of ``--signals-to-handle``."""
LINE_PREFIX = "[${role_name}${local_rank}]:"
"""Prefix of tee'd lines, unless the user gives another one."""
_HOST = re.compile(r"[\w.:%-]{1,255}")
_DOMAIN = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?")
_MAX_LEVELS = 8  # as in protocol/agents.py, whose import takes a tenth of a second
T = TypeVar("T", int, float)


def environment() -> dict[str, str]:
    """Return a copy of this process's environment."""
    return dict(os.environ)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one agent, from its environment."""

    master_addr: str = ""
    """Address of the master (``host:port``); empty if no platform has started this agent."""
    token_file: Path | None = None
    """File with the job's token; None if none was named."""
    ca_file: Path | None = None
    """Certificate authority of the master's TLS certificate; None for a connection without TLS."""
    node_id: str = ""
    """Id of this node in its job."""
    job_name: str = ""
    """Name of the job."""
    advertised_addr: str = "127.0.0.1"
    """Address at which other nodes reach this one."""
    log_dir: Path | None = None
    """Folder where the platform looks for the workers' output; None if it does not."""
    lifeline_fd: int | None = None
    """Descriptor of a pipe whose end means that the platform is gone; None if there is none."""
    python: str = sys.executable
    """Python interpreter that runs the script."""
    connect_s: float = 60.0
    """Seconds within which the master must have answered once."""
    own_master: bool = False
    """Whether one of the nodes runs the master, so that no platform restarts a lost one."""
    asks_proof: bool = False
    """Whether the master must prove that it knows the token, before it gets the token.

    It must at an endpoint, whose port another program may have taken.
    """
    shm_dir: Path = Path("/dev/shm")
    """Folder in a tmpfs for checkpoints in memory, which outlive the workers."""
    job_uid: str = ""
    """Unique id of the job; if it is empty, the job's name is used."""
    run_name: str = ""
    """Random name of this run, which its master has; empty where a platform starts the nodes."""
    returns: bool = False
    """Whether the same node returns after its agent was killed, and finds its checkpoints."""
    log_level: str = ""
    """Level of log lines; empty means INFO in a job, and WARNING elsewhere."""
    topology: tuple[str, ...] = ()
    """Topology domain of this node, from the widest level to the narrowest; empty if not known."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The complete environment, which the workers inherit."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings from an environment, by default that of this process.

        Only numbers and the topology are checked here; see :meth:`check` for the rest. The token
        file is not read. A missing or empty variable gives the default, and so does a time to
        connect of 0. But an empty POD_IP is kept, and refused later: no other node would reach the
        default.

        Raises:
            ConfigError: The lifeline's descriptor or the time to connect is not a number from 0, or
                the topology has another form.
        """
        environ = environment() if environ is None else environ
        token, logs = environ.get(names.ENV_TOKEN_FILE), environ.get(names.ENV_LOG_DIR)
        authority = environ.get(names.ENV_CA_FILE)
        return cls(
            master_addr=environ.get(names.ENV_MASTER_ADDR, ""),
            token_file=Path(token) if token else None,
            ca_file=Path(authority) if authority else None,
            node_id=environ.get(names.ENV_NODE_ID, ""),
            job_name=environ.get(names.ENV_JOB_NAME, ""),
            advertised_addr=environ.get(names.ENV_POD_IP, "127.0.0.1"),
            log_dir=Path(logs) if logs else None,
            lifeline_fd=_number(environ, names.ENV_LIFELINE_FD, int),
            python=environ.get("PYTHON_EXEC") or sys.executable,
            connect_s=_number(environ, names.ENV_CONNECT_S, float) or 60.0,
            shm_dir=Path(environ.get(names.ENV_SHM_DIR) or "/dev/shm"),
            job_uid=environ.get(names.ENV_JOB_UID, ""),
            log_level=environ.get("DLROVER_LOG_LEVEL", ""),
            topology=_topology(environ.get(names.ENV_TOPOLOGY, "")),
            environ=environ,
        )

    @property
    def in_job(self) -> bool:
        """Whether a platform has started this agent as a node of a job."""
        return bool(self.master_addr)

    @property
    def recipes_with_master(self) -> bool:
        """Whether the master keeps the recipes of earlier runs, and not a folder of this node.

        The master of a cluster does: a Pod loses its files. Only masters of clusters have a
        certificate. A folder that the user has named comes first.
        """
        return self.ca_file is not None and not self.environ.get(names.ENV_CACHE_DIR)

    def check(self) -> None:
        """Check that the settings are complete enough to join a job.

        Raises:
            ConfigError: A setting is missing or cannot be used. The message says what should set
                it.
        """
        # Imported here because the import takes a tenth of a second.
        from dlrover_py.net.http_client import check_address

        check_address(self.master_addr)
        check_host(names.ENV_POD_IP, self.advertised_addr)
        if self.lifeline_fd is not None:
            try:
                os.fstat(self.lifeline_fd)
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"{names.ENV_LIFELINE_FD} is {self.lifeline_fd}: expected the descriptor of a "
                    "pipe that is open"
                ) from error
        for name, value in (
            (names.ENV_NODE_ID, self.node_id),
            (names.ENV_TOKEN_FILE, self.token_file),
        ):
            if not value:
                raise ConfigError(
                    f"{names.ENV_MASTER_ADDR} is set and {name} is not: inside a job the platform "
                    "sets both; to train on this machine alone, unset it and use --standalone"
                )
        if not re.fullmatch(names.NODE_ID, self.node_id):
            raise ConfigError(
                f"{names.ENV_NODE_ID} is {self.node_id!r}: expected an id of lower-case letters, "
                "digits, - and ., such as n0"
            )

    def token(self) -> str:
        """Read the job's token from its file; the read blocks while the disk hangs.

        In a Pod all users may read it: the user of a Pod's image is not known to who mounts the
        Secret. Elsewhere it must be closed to other users, as a key of ssh.

        Raises:
            ConfigError: The file cannot be used; see ``read_token``.
        """
        assert self.token_file is not None
        return read_token(self.token_file, private="KUBERNETES_SERVICE_HOST" not in self.environ)


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """The flags for the output of the workers; the defaults are torchrun's."""

    log_dir: Path | None = None
    """Folder for log files; ``/dev/null`` for no files at all."""
    redirects: Mapping[int | None, int] = field(default_factory=dict)
    """Streams that go to files only, by local rank.

    1 is stdout, 2 is stderr, 3 is both. The key ``None`` stands for all other local ranks.
    """
    tee: Mapping[int | None, int] = field(default_factory=dict)
    """Streams that go to files and to the console, as in ``redirects``."""
    shown: frozenset[int] | None = None
    """Local ranks whose output is shown on the console; None for all."""
    stdout_filters: tuple[str, ...] = ()
    """Words by which tee'd lines of stdout are copied to one file for all local ranks."""
    stderr_filters: tuple[str, ...] = ()
    """Words by which tee'd lines of stderr are copied to one file for all local ranks."""
    prefix: str = LINE_PREFIX
    """Template of the prefix of tee'd lines."""
    specs: str | None = None
    """Name of a class in the entry-point group ``torchrun.logs_specs``; None for the default."""

    @property
    def wants_files(self) -> bool:
        """Whether a stream of any worker goes into a file."""
        return any((*self.redirects.values(), *self.tee.values()))

    def line_prefix(self, role: str, rank: int, local_rank: int) -> str:
        """Return the prefix of a worker's tee'd lines; other names in the template stay.

        Args:
            role: Role of the worker.
            rank: Rank of the worker in the round.
            local_rank: Rank of the worker on its node.
        """
        return Template(self.prefix).safe_substitute(
            role_name=role, rank=rank, local_rank=local_rank, hostname=os.uname().nodename
        )

    @staticmethod
    def of(which: Mapping[int | None, int], local_rank: int) -> int:
        """Return the entry of one local rank in ``redirects`` or ``tee``; 0 without an entry."""
        return which.get(local_rank, which.get(None, 0))


@dataclass(frozen=True, slots=True)
class Command:
    """What each worker runs, and how."""

    argv: tuple[str, ...]
    """``PYTHON -u [-m] SCRIPT ARGS…``, or a program and its arguments."""
    nproc: int
    """Number of workers on this node."""
    environ: Mapping[str, str]
    """Environment of the agent, which the workers inherit."""
    name: str = ""
    """Name of the script, module or program, for messages."""
    role: str = "default"
    """Role of the workers."""
    log_dir: Path | None = None
    """Folder where the platform looks for both streams of all workers; None if it does not."""
    output: OutputSettings = OutputSettings()
    """Flags for the output of the workers."""
    event_handler: str = "null"
    """Name of the handler of torch's elastic events."""
    cold: str = ""
    """Why workers are never forked from the zygote; empty if they may be.

    The zygote is the process that warm workers are forked from.
    """
    signals: tuple[signal.Signals, ...] = DEFAULT_SIGNALS
    """Signals by which the agent is asked to end. Workers get the same signal."""
    shutdown_s: float = 30.0
    """Seconds from such a signal to SIGKILL."""
    virtual_local_rank: bool = False
    """Whether each worker has LOCAL_RANK 0 and sees its own GPU only."""
    cpus: tuple[frozenset[int], ...] = ()
    """CPUs of each worker by local rank; if empty, workers run on the CPUs of the agent."""
    precheck: int = 0
    """Level of the check before training: 0 none, 1 a check, 2 also logs the network's speed."""
    save_at_breakpoint: bool = False
    """Whether the newest state is stored after a failure of a worker."""
    auto_tune: bool = False
    """Whether the job's auto-tuner chooses the settings of data loaders."""
    log_rules: "tuple[LogRule, ...]" = ()
    """Rules for the lines of the workers, beside those of the job."""
    exclude_straggler: bool = False
    """Whether a node that the check finds slow is left out."""


def check_host(name: str, text: str) -> None:
    """Check that a text looks like the address of a machine.

    Args:
        name: Name of the flag or variable, for the error message.
        text: Its value.

    Raises:
        ConfigError: The text is neither a host name nor an IP address.
    """
    if not _HOST.fullmatch(text):
        raise ConfigError(f"{name} is {text[:60]!r}: expected a host name or an IP address")


def _topology(text: str) -> tuple[str, ...]:
    """Return the names of a topology domain, from the widest level to the narrowest.

    Raises:
        ConfigError: A name has a form that no label's value has, or there are too many levels.
    """
    levels = tuple(text.split("/")) if text else ()
    if len(levels) > _MAX_LEVELS or not all(map(_DOMAIN.fullmatch, levels)):
        raise ConfigError(
            f"{names.ENV_TOPOLOGY} is {text[:60]!r}: expected up to {_MAX_LEVELS} names of "
            "letters, digits, -, _ and ., the widest level first, such as zone-a/rack-3"
        )
    return levels


def _number(environ: Mapping[str, str], name: str, kind: type[T]) -> T | None:
    """Return the number in a variable; None if the variable is empty or not set.

    Args:
        environ: Environment with the variable.
        name: Name of the variable.
        kind: Type of the number: int or float.

    Raises:
        ConfigError: The text is not a finite number, 0 or larger.
    """
    text = environ.get(name)
    if not text:
        return None
    try:
        number = kind(text)
    except ValueError:
        number = kind(-1)
    if not 0 <= number < math.inf:
        raise ConfigError(f"{name} is {text[:60]!r}: expected a number from 0")
    return number
