"""The master of a job without a platform, and the rendezvous endpoint where it runs.

In a job of one node the master runs on this machine. In a larger job it runs on the node that is
torchrun's rendezvous endpoint. This module imports little, because the master starts before the
agent imports its other modules.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dlrover_agent import flags as given
from dlrover_agent import temporary_folder
from dlrover_agent.flags import C10D_PORT, STATIC_PORT, Flags
from dlrover_agent.settings import check_host
from dlrover_py.process.children import end
from dlrover_py.process.identity import shielded_child
from dlrover_py.protocol.errors import ConfigError, ExitCode, UnreachableError
from dlrover_py.protocol.names import (
    API_VERSION,
    ENV_AGENT_MARK,
    ENV_NODE_MARK,
    JOB_ENV,
    KIND,
    MAIN_CONTAINER,
    TOKEN_FILE,
)

if TYPE_CHECKING:
    from dlrover_py.net.liveness import ProbeTiming

log = logging.getLogger("agent.endpoint")

CONF_KEYS = ("join_timeout", "last_call_timeout", "read_timeout", "timeout", "is_host")
"""Keys of ``--rdzv-conf`` that mean the same as in torchrun."""
LEASE_KEYS = ("keep_alive_interval", "keep_alive_max_attempt")
"""Keys of ``--rdzv-conf`` whose product is the lease of a node, in seconds."""
MASTER_TIMES: Mapping[str, str] = {
    "join_timeout": "JOIN_TIMEOUT_S",
    "last_call_timeout": "LAST_CALL_S",
    "lastcall_timeout": "LAST_CALL_S",
}
"""Settings of the master by keys of ``--rdzv-conf``."""
JOIN_TIMEOUT_S = 600.0
"""Default of ``join_timeout``, in seconds."""
DEFAULTS: Mapping[str, str] = {
    "DLROVER_MASTER_LOG_LEVEL": "WARNING",
    "DLROVER_MASTER_JOIN_TIMEOUT_S": f"{JOIN_TIMEOUT_S:g}",
    "DLROVER_MASTER_LAST_CALL_S": "5",
}
"""Environment of the master, unless the flags or the agent's environment set a variable."""
OF_ANOTHER_JOB = tuple(name for name in JOB_ENV if name not in (ENV_NODE_MARK, ENV_AGENT_MARK))
"""Variables of a job in whose node or worker this one runs; its own master does not get them.

By the marks, the other job ends all processes of its node.
"""
DEFAULT_RUN_IDS = ("", "none", "torchrun none")
"""Ids that everyone can guess: an empty one, and those of runs without ``--rdzv-id``: by
``elastic-run``, and by torchrun with its backend."""
MAX_SETTING_S = 86400.0
"""Seconds of a day, the largest value of a setting of the master."""
UNUSED_CONF_KEYS: Mapping[str, str] = {
    "store_type": "the master does the rendezvous, without a store",
    "close_timeout": "the rendezvous is closed when the job ends",
    "heartbeat_timeout": "the master notices a closed connection immediately",
    "cas_backoff_max_seconds": "the master does the rendezvous, without a store",
    "rank": "--node-rank sets it",
    "pend_timeout": "a node that is not needed yet is a standby until the job ends",
}
"""Keys of ``--rdzv-conf`` without effect, with the reason."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The rendezvous of a job without a platform, as the flags describe it."""

    run_id: str
    """Value of ``--rdzv-id``, or a random id for a job on this machine alone."""
    fewest: int = 1
    """Fewest nodes of a round."""
    most: int = 1
    """Most nodes of a round."""
    node_unit: int = 1
    """A round has a multiple of this number of nodes."""
    host: str = ""
    """Host of the master; empty for a job on this machine alone."""
    port: int = 0
    """Port of the master."""
    node_rank: int | None = None
    """Rank of this node in a static rendezvous; None if the master assigns the ranks."""
    hosts: bool | None = None
    """Whether the master must run on this node.

    None: the master runs here if the host is this machine and no other process of it has the port.
    """
    local_addr: str | None = None
    """Value of ``--local-addr``: the address at which other nodes reach this one."""
    connect_s: float = 60.0
    """Seconds within which the master must be found."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the master that ``--rdzv-conf`` sets."""

    @classmethod
    def of(cls, flags: Flags) -> Self:
        """Read the rendezvous from flags as torchrun does (config_from_args of its run.py).

        With ``--standalone``, or without an endpoint for one node, the result describes a job on
        this machine alone. A warning is logged for each key of ``--rdzv-conf`` without effect.

        Raises:
            ConfigError: The flags contradict each other, or a value cannot be used.
        """
        min_nodes, max_nodes = given.nodes(flags.nnodes)
        if flags.local_addr is not None:
            check_host("--local-addr", flags.local_addr)
        conf = given.conf(flags.rdzv_conf)
        backend, target = flags.rdzv_backend, flags.rdzv_endpoint
        static = backend == "static"
        if flags.standalone or (
            static and not target and flags.master_port is None and max_nodes == 1
        ):
            if min_nodes > 1:
                message = f"--nnodes is {flags.nnodes}: --standalone is a job of exactly one node"
                raise ConfigError(message)
            for key in conf:
                _warn_unused_key(key, "a job of one node needs no rendezvous")
            return cls(run_id=str(uuid.uuid4()), local_addr=flags.local_addr)
        unit = flags.node_unit
        if unit < 1 or max_nodes % unit or min_nodes % unit:
            raise ConfigError(
                f"--node-unit is {unit} and --nnodes {flags.nnodes}: expected multiples of the unit"
            )
        if not (static or backend in ("c10d", "dlrover")):
            raise ConfigError(
                f"--rdzv-backend is {backend!r}: expected c10d or static; the job's own master "
                "does the rendezvous, at the node that --rdzv-endpoint names, and needs no other "
                "service"
            )
        rank = None
        if static:
            if min_nodes != max_nodes:
                raise ConfigError(
                    f"--nnodes is {flags.nnodes} with the static rendezvous: expected one number; "
                    "for MIN:MAX give --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
                )
            rank = flags.node_rank
            if not 0 <= rank < max_nodes:
                message = f"--node-rank is {rank} and --nnodes {max_nodes}"
                raise ConfigError(f"{message}: expected a rank from 0 to {max_nodes - 1}")
            at = STATIC_PORT if flags.master_port is None else flags.master_port
            if not target:
                check_host("--master-addr", flags.master_addr)
                if not 0 <= at <= 65535:
                    raise ConfigError(f"--master-port is {at}: expected a port from 0 to 65535")
            target = target or f"{flags.master_addr}:{at}"
        host, port = given.endpoint(target, STATIC_PORT if static else C10D_PORT)
        if port == 0 and max_nodes > 1:
            raise ConfigError("the endpoint has port 0: other nodes could not find it; name a port")
        runs_master = rank == 0 if rank is not None else None
        if "is_host" in conf:
            runs_master = conf["is_host"].lower() in ("1", "true", "t", "yes", "y")
        timeout = "timeout" if static else "read_timeout"
        return cls(
            run_id=flags.rdzv_id,
            fewest=min_nodes,
            most=max_nodes,
            node_unit=unit,
            host=host,
            port=port,
            node_rank=rank,
            hosts=runs_master,
            local_addr=flags.local_addr,
            connect_s=_seconds(conf, timeout, 900.0 if static else 60.0),
            rules=_master_environ(conf),
        )

    @property
    def token(self) -> str:
        """Token of a job without a secret, derived from its run id.

        It keeps agents of other jobs away. Everyone who knows the run id can compute it.
        """
        seed = b"dlrover run id\0" + self.run_id.encode(errors="surrogateescape")
        return hashlib.sha256(seed).hexdigest()

    @property
    def address(self) -> str:
        """Address of the master as ``host:port``, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Return whether the endpoint's host is this machine, by its name or by an address.

        The result is False if the name is not this machine's and cannot be resolved. The call
        blocks while the name service does not answer.
        """
        if self.host in ("localhost", socket.gethostname(), _full_name()):
            return True  # a cluster's name service may not know this machine yet
        return any(_is_own_address(family, address) for family, address in _resolve(self.host))

    def is_elsewhere(self) -> bool:
        """Return whether other nodes look for the master on another machine than this one.

        The result is False if the endpoint's name cannot be resolved, and for a job of one node.
        """
        return self.most > 1 and bool(_resolve(self.host)) and not self.is_here()

    def numeric(self) -> str:
        """Return :attr:`address` with the host's IP address in the place of its name.

        An interpreter that is ending cannot look up names any more. The name stays if it cannot be
        resolved, or if this machine has no route to its addresses.
        """
        for family, number in _resolve(self.host):
            if _source_address(family, number):
                return f"[{number}]:{self.port}" if ":" in number else f"{number}:{self.port}"
        return self.address

    def check(self, ca_file: Path | None) -> None:
        """Refuse settings that a master at the endpoint cannot fulfill.

        The master of a job on this machine alone has a port of the loopback device and needs none.
        So a file that the platform of another job has set is ignored.

        Raises:
            ConfigError: A file with a certificate authority is set, which asks for TLS.
        """
        if ca_file is not None and self.host:
            raise ConfigError(
                f"DLROVER_CA_FILE is {ca_file}: a master that runs at the endpoint of its job does "
                "not speak TLS; unset it, or run the job on a platform"
            )

    def size_difference(self, min_nodes: int, max_nodes: int) -> str:
        """Return why ``--nnodes`` has no effect here; empty if the job has the same numbers.

        Args:
            min_nodes: The fewest nodes of a round, as the endpoint's node says.
            max_nodes: The most nodes of a round, as the endpoint's node says.
        """
        if (min_nodes, max_nodes) == (self.fewest, self.most):
            return ""
        there, here = (
            f"{few}:{many}" for few, many in ((min_nodes, max_nodes), (self.fewest, self.most))
        )
        return f"it is {here} here, and {there} at {self.address}, which decides: use one value"

    def node_id(self) -> str:
        """Make an id for this node. The master ranks new nodes in the order of their ids.

        With a static rank, or on this machine alone, the id is ``n`` and the rank. Otherwise the id
        has a random part, so each call returns another one.
        """
        if self.node_rank is not None or not self.host:
            return f"n{self.node_rank or 0}"
        name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "node"
        # Two containers may have the same host name and the same process id.
        return f"{name}-{os.getpid()}-{secrets.token_hex(2)}"

    def advertised_addr(self, pause: Callable[[float], object]) -> str:
        """Return the address at which other nodes reach this one: an IP address or a name.

        ``--local-addr`` comes first. Else it is the endpoint's host if that is this machine, or
        this machine's address on the route to the endpoint. The call may wait for ``connect_s``
        seconds until the endpoint's name can be resolved.

        Args:
            pause: Function that waits for a number of seconds. Its exceptions are passed on.

        Raises:
            UnreachableError: The endpoint's name cannot be resolved, or there is no route to it,
                within ``connect_s``.
        """
        if self.local_addr:
            return self.local_addr
        if not self.host:
            return "127.0.0.1"
        if self.host == "localhost":
            return "127.0.0.1"  # all nodes of this job are on this machine
        if self.hosts or self.is_here():
            # The name is returned, because it may resolve to 127.0.1.1 here, which is of no use on
            # another machine.
            return self.host
        deadline = time.monotonic() + self.connect_s
        while True:  # in a cluster the endpoint's name may appear later than this node
            for family, address in _resolve(self.host):
                if source := _source_address(family, address):
                    return source
            if time.monotonic() > deadline:
                message = f"endpoint {self.host}: no such host within {self.connect_s:g} s"
                raise UnreachableError(f"{message}; see --rdzv-endpoint")
            pause(0.5)


def _full_name() -> str:
    """Return the host name with its domain, if the name service knows the domain."""
    try:
        return socket.getfqdn()
    except UnicodeError:  # a label of 64 letters, which the kernel allows and DNS does not
        return socket.gethostname()


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of a host; empty if the name does not exist (yet).

    The call blocks while the name service does not answer.
    """
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _source_address(family: socket.AddressFamily, address: str) -> str:
    """Return this machine's address on the route to another one; empty without a route."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing, and only chooses the route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _is_own_address(family: socket.AddressFamily, address: str) -> bool:
    """Return whether an address belongs to this machine; False without a route to the address.

    The route to an own address starts at that address, or on the loopback device.
    """
    source = _source_address(family, address)
    return bool(source) and (source in (address, "::1") or source.startswith("127."))


def _master_environ(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the master that ``--rdzv-conf`` sets.

    A warning is logged for each key without effect.

    Raises:
        ConfigError: A key is unknown, or a time is not a positive number of at most a day.
    """
    for key in conf:
        if key in UNUSED_CONF_KEYS:
            _warn_unused_key(key, UNUSED_CONF_KEYS[key])
        elif key not in (*CONF_KEYS, *LEASE_KEYS, *MASTER_TIMES):
            raise ConfigError(
                f"--rdzv-conf has {key!r}: expected one of {', '.join((*CONF_KEYS, *LEASE_KEYS))}"
            )
    rules = {name: _seconds(conf, key, 0.0) for key, name in MASTER_TIMES.items() if key in conf}
    if any(key in conf for key in LEASE_KEYS):
        lease = _seconds(conf, LEASE_KEYS[0], 5.0) * _seconds(conf, LEASE_KEYS[1], 3)
        rules |= {"LEASE_S": lease, "EXCHANGE_S": min(1.0, lease / 2)}
    for name, value in rules.items():
        if value > MAX_SETTING_S:
            message = f"--rdzv-conf: {name.lower()} comes to {value:g}: expected at most a day"
            raise ConfigError(message)
    return {f"DLROVER_MASTER_{name}": f"{value:g}" for name, value in rules.items()}


def _warn_unused_key(key: str, why: str) -> None:
    """Log a warning that a key of ``--rdzv-conf`` has no effect."""
    log.warning("flag_not_used", extra={"flag": f"--rdzv-conf {key}", "why": why})


def _seconds(conf: Mapping[str, str], key: str, default: float) -> float:
    """Return a positive number from ``--rdzv-conf``, or the default if the key is missing.

    Args:
        conf: Values of ``--rdzv-conf`` by key.
        key: Key of the number.
        default: Number without the key; 0 is refused.

    Raises:
        ConfigError: The value is not a number above 0.
    """
    try:
        value = float(conf.get(key, default))
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ConfigError(f"--rdzv-conf {key} is {conf[key]!r}: expected a number above 0")
    return value


def misplaced_nodes(flags: Flags, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return why nodes of a job without a platform will not find each other, and what to do.

    Two cases are seen. Slurm starts more tasks of this command than the job has nodes: each task
    then trains alone, or stands by. Or the job has several nodes, but no endpoint is given.

    Args:
        flags: The command line.
        environ: Environment, with Slurm's variables in a step.

    Returns:
        Two empty texts in all other cases, and with ``--standalone``, by which tasks train alone.
    """
    if flags.standalone:
        return "", ""
    most = given.nodes(flags.nnodes)[1]
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if re.fullmatch(r"[0-9]{1,9}", tasks) and int(tasks) > most:
        return (
            f"Slurm starts {tasks} tasks of this command, each is a node, and --nnodes is "
            f"{flags.nnodes}: every task trains alone, or more nodes come than can train",
            "start one task per node (--ntasks-per-node=1), with --nnodes=$SLURM_NNODES "
            "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT; or give --standalone",
        )
    if most > 1 and not flags.rdzv_endpoint.strip() and "master_addr" not in flags.given:
        return (
            f"--nnodes is {flags.nnodes} and no --rdzv-endpoint or --master-addr names another "
            "machine: the nodes meet at localhost, where only agents of this machine can join",
            "name a node: --rdzv-endpoint=HOST:PORT; a variable of the shell in it may be empty",
        )
    return "", ""


class EndpointTakenError(Exception):
    """Another process listens at the endpoint."""


class OwnMaster:
    """The master of a job without a platform, as a child process of the agent.

    The class is a context manager. The master is started on entry, which does not wait until it
    answers. It is ended on exit: the exit blocks for ``OWN_MASTER_END_S`` seconds at most, and then
    kills it. In between, a task of :meth:`keep` starts it again if it dies.
    """

    def __init__(
        self, endpoint: Endpoint, token: str = "", probes: "ProbeTiming | None" = None
    ) -> None:
        """Prepare the master; it is not started yet.

        Args:
            endpoint: Rendezvous of the job, which says where the master listens.
            token: Token of the job; if it is empty, the token of its endpoint is used. A job on
                this machine alone always gets a random token.
            probes: Times by which the master is probed and restarted; None for the defaults.
        """
        self._endpoint, self._probes = endpoint, probes
        self._local_only = not endpoint.host
        self._has_secret = bool(token)
        self.token = secrets.token_urlsafe(24) if self._local_only else token or endpoint.token
        self.address = ""
        """Address of the master (``host:port``) on this machine; empty before it is started."""
        self.name = f"elastic-run-{secrets.token_hex(4)}"
        """Random name of this run, which the master returns at ``/v1/job/name``."""

    def __enter__(self) -> Self:
        """Listen, and start the master, which opens its state and answers later.

        Raises:
            EndpointTakenError: Another process listens at the endpoint.
            ConfigError: The system refuses the address, there is no folder for temporary files, or
                the token file cannot be written.
            OSError: The process cannot be started.
        """
        self._folder = temporary_folder.create(f"dlrover-run-{os.getpid()}-")
        self._sockets: list[socket.socket] = []
        self._read, self._write = os.pipe()
        try:
            token_file = self._folder / TOKEN_FILE
            self._sockets.append(self._listen())
            self._sockets.append(_listen_on_loopback())
            job, health = self._sockets
            self.address = f"{_connect_address(job)}:{job.getsockname()[1]}"
            self._health = f"{_connect_address(health)}:{health.getsockname()[1]}"
            argv = [sys.executable, "-P", "-m", "dlrover_py.master"]
            argv += ["--static", self._job_document()]
            argv += ["--state-dir", str(self._folder), "--token-file", str(token_file)]
            argv += ["--listen-fd", str(job.fileno()), "--health-fd", str(health.fileno())]
            # With --temporary the master removes the folder if the agent is killed.
            self._argv = [*argv, "--lifeline-fd", str(self._read), "--temporary"]
            self._process = self._spawn()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the master, and remove its folder; kill the master after ``OWN_MASTER_END_S``.

        A master of a job on this machine alone is killed immediately.
        """
        if (
            self._local_only
        ):  # there are no other nodes to notify, and the journal is already written
            self._process.kill()
        os.close(self._write)  # end of the lifeline: the master notifies the other nodes and ends
        self._write = -1
        # Imported here because the import takes a tenth of a second.
        from dlrover_py.protocol.timing import OWN_MASTER_END_S

        end(self._process, OWN_MASTER_END_S)
        self._clean_up()

    async def keep(self, non_worker_pids: set[int]) -> None:
        """Start the master again whenever it has died or hangs, until cancelled.

        A master that hangs is killed first. Its journal, the file with its state, is kept. The
        listening sockets stay open in this process. Cancellation does not end the master.

        The pauses before the starts grow while the master dies soon. A start that the system
        refuses, or whose token file cannot be written, is tried again without a limit. Each end
        before a start is logged.

        Args:
            non_worker_pids: Process ids of child processes that are not workers. The master's is
                among them while it runs.

        Raises:
            ConfigError: The master has refused its settings.
        """
        import asyncio

        from dlrover_py.net.liveness import RestartPause, supervise
        from dlrover_py.process.starter import Starter, kill_and_reap

        starter, pause = Starter("master"), RestartPause(self._probes)
        while True:
            non_worker_pids.add(self._process.pid)
            began = time.monotonic()
            code = await supervise(self._process, self._health, self._probes)
            non_worker_pids.discard(self._process.pid)
            if code == ExitCode.USAGE:
                raise ConfigError("the master cannot be started; the log lines above say why")
            pause_s = pause.next_s(time.monotonic() - began)
            extra = {"code": code, "then": "it is restarted", "again_after_s": pause_s}
            log.warning("master_ended", extra=extra)
            while True:
                await asyncio.sleep(pause_s)
                try:
                    self._process = await starter.start(self._spawn, undo=kill_and_reap)
                    break
                except (OSError, ConfigError) as error:  # OverdueError; the token file
                    why = getattr(error, "strerror", None) or str(error)
                    log.warning("master_not_started", extra={"why": why, "then": "tried again"})
                    pause_s = pause.next_s(0.0)

    def _listen(self) -> socket.socket:
        """Listen at the endpoint's port, on the loopback device or on all addresses.

        It is the loopback device if the endpoint's host is ``localhost`` or a loopback address. A
        job on this machine alone gets a free port there. A warning is logged if the job's token can
        be guessed.

        Raises:
            EndpointTakenError: Another process listens at the port.
            ConfigError: The system refuses the address or the port.
        """
        if self._local_only:
            return _listen_on_loopback()
        host, port = self._endpoint.host, self._endpoint.port
        # A name of this machine may resolve to 127.0.1.1 here (Debian's hosts file), but not on
        # other nodes.
        v6 = ":" in host
        try:
            if host == "localhost" or host == "::1" or host.startswith("127."):
                family = socket.AF_INET6 if v6 else socket.AF_INET
                listening = socket.create_server((host, port), family=family, backlog=4096)
                self._warn_of_no_secret(listening, "each user of this machine")
                return listening
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(
                ("", port), family=family, dualstack_ipv6=both, backlog=4096
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EndpointTakenError(f"port {port} of {host} is in use") from error
            raise ConfigError(f"endpoint {host}:{port}: {error.strerror}") from error
        self._warn_of_no_secret(listening, "everyone who reaches the port")
        return listening

    def _warn_of_no_secret(self, listening: socket.socket, reachable_by: str) -> None:
        """Log a warning if everyone can compute the token of a job with an endpoint.

        Nothing is logged if a token or a run id was given.

        Args:
            listening: Socket of the master.
            reachable_by: Who can reach its port.
        """
        if self._has_secret or self._endpoint.run_id not in DEFAULT_RUN_IDS:
            return
        why = "the job has no --rdzv-id from which its token could be derived"
        then = f"{reachable_by} can join the job and read its state"
        instead = "give all nodes the same secret in a file that DLROVER_TOKEN_FILE names, or an "
        instead += "--rdzv-id that others do not know"
        more = {"port": listening.getsockname()[1], "why": why, "then": then, "instead": instead}
        log.warning("job_token_guessable", extra=more)

    def _write_token(self) -> None:
        """Write the token file, unless it exists; make its folder again if that was removed.

        Raises:
            ConfigError: The file cannot be written, or another user has made the folder again.
        """
        token_file = self._folder / TOKEN_FILE
        try:
            temporary_folder.recreate(self._folder)
            if token_file.exists():
                return
            token_file.touch(mode=0o600)
            token_file.write_text(self.token)
        except OSError as error:
            raise ConfigError(f"token file {token_file}: {error.strerror}") from error

    def _spawn(self) -> "subprocess.Popen[bytes]":
        """Start the master in a session of its own, because Ctrl-C is handled by the agent.

        The token file is written first. Starts of :meth:`keep` run in a thread. The agent's
        environment takes precedence over ``DEFAULTS``, and ``--rdzv-conf`` over both. Variables of
        a job around this one are left out. In a job of one node, the silence after which the node
        counts as lost is a day.

        Raises:
            ConfigError: The token file cannot be written.
            OSError: The process cannot be started.
        """
        self._write_token()
        defaults = dict(DEFAULTS)
        if self._endpoint.most == 1:
            # No other node could replace the only one. So its silence (Ctrl-Z) must not count as
            # a loss.
            defaults |= {"DLROVER_MASTER_LEASE_S": "86400", "DLROVER_MASTER_SUSPECT_S": "86400"}
        inherited = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_JOB}  # noqa: TID251
        environ = {**defaults, **inherited, **self._endpoint.rules}
        keep = [*(s.fileno() for s in self._sockets), self._read]
        with shielded_child():
            return subprocess.Popen(self._argv, pass_fds=keep, env=environ, start_new_session=True)

    def _job_document(self) -> str:
        """Return the job as JSON, as the master's ``--static`` takes it."""
        e = self._endpoint
        main = {"name": MAIN_CONTAINER, "command": ["true"]}
        worker = {
            "replicas": e.most,
            "minReplicas": e.fewest,
            "nodeUnit": e.node_unit,
            "template": {"spec": {"containers": [main]}},
        }
        return json.dumps(
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "metadata": {"name": self.name},
                "spec": {"replicaSpecs": {"worker": worker}},
            }
        )

    def _clean_up(self) -> None:
        if self._write >= 0:
            os.close(self._write)
        os.close(self._read)
        for listening in self._sockets:
            listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def hosted(endpoint: Endpoint, secret: str) -> Iterator[OwnMaster | None]:
    """Run the job's master within the context, if it belongs on this node.

    The master is ended at the end of the context: see :class:`OwnMaster`. A warning is logged if
    other nodes will not find the master here.

    Args:
        endpoint: Rendezvous of the job, which says where the master listens.
        secret: Token of the job; empty if none was given.

    Yields:
        The master; None if it runs elsewhere, or in another process of this machine.

    Raises:
        ConfigError: The master must run here, and the port is in use. Or the system refuses the
            address, or the master's files cannot be written.
        OSError: The master's process cannot be started.
    """
    with contextlib.ExitStack() as stack:
        master = None
        here = endpoint.hosts
        if here or not endpoint.host or (here is None and endpoint.is_here()):
            try:
                master = stack.enter_context(OwnMaster(endpoint, secret))
            except EndpointTakenError as taken:
                if here:
                    hint = "this node must run the master there; free it, or name another"
                    raise ConfigError(f"{taken}: {hint}") from taken
        if master is not None and endpoint.is_elsewhere():
            log.warning(
                "endpoint_elsewhere",
                extra={
                    "endpoint": endpoint.address,
                    "why": "this node runs the master, by its --node-rank or is_host, but the "
                    "endpoint is no address of this machine",
                    "then": "other nodes look for the master at the endpoint",
                    "instead": "give each node a rank of its own: with Slurm, let each task read "
                    "$SLURM_NODEID (srun bash -c 'elastic-run --node-rank=$SLURM_NODEID …')",
                },
            )
        yield master


def _listen_on_loopback() -> socket.socket:
    """Listen at a free port of the loopback device.

    Raises:
        ConfigError: The loopback device is down or does not have the address.
    """
    # The address of a device that is down can be bound, so the route is checked first.
    why = "there is no route to it"
    if _source_address(socket.AF_INET, "127.0.0.1"):
        try:
            return socket.create_server(("127.0.0.1", 0))
        except OSError as error:
            why = error.strerror or str(error)
    raise ConfigError(
        f"cannot listen on 127.0.0.1: {why}; expected a loopback device that is up and has this "
        "address: ip link set lo up; ip address add 127.0.0.1/8 dev lo"
    )


def _connect_address(listening: socket.socket) -> str:
    """Return the address at which this machine connects to one of its own sockets."""
    address = str(listening.getsockname()[0])
    if address in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address
