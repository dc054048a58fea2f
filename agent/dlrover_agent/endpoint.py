"""Where the master of a job without a platform runs: on this machine alone, or on the node that is
torchrun's rendezvous endpoint.

Light: the master starts before the agent imports the rest of itself.
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
from typing import Self

from dlrover_agent import flags as given
from dlrover_agent import scratch
from dlrover_agent.flags import C10D_PORT, STATIC_PORT, Flags
from dlrover_py.helpers import end
from dlrover_py.protocol.errors import ConfigError, ExitCode, Unreachable
from dlrover_py.protocol.names import API_VERSION, KIND, MAIN_CONTAINER, TOKEN_FILE

log = logging.getLogger("agent.endpoint")

FAREWELL_S = 8.0
"""The other nodes must have been told of the job's end by then."""
CONF = ("join_timeout", "last_call_timeout", "read_timeout", "timeout", "is_host")
"""Keys of ``--rdzv-conf`` that mean here what they mean to torchrun."""
LEASE = ("keep_alive_interval", "keep_alive_max_attempt")
TIMES: Mapping[str, str] = {
    "join_timeout": "JOIN_TIMEOUT_S",
    "last_call_timeout": "LAST_CALL_S",
    "lastcall_timeout": "LAST_CALL_S",
}
JOIN_TIMEOUT_S = 600.0
DEFAULTS: Mapping[str, str] = {
    "DLROVER_MASTER_LOG_LEVEL": "WARNING",
    "DLROVER_MASTER_JOIN_TIMEOUT_S": f"{JOIN_TIMEOUT_S:g}",
    "DLROVER_MASTER_LAST_CALL_S": "5",
}
"""Settings of the master that neither the flags nor the environment say."""
NAMELESS = ("none", "torchrun none")
"""Ids of runs that were given none: elastic-run's default, and torchrun's as its backend has it."""
A_DAY = 86400.0
NOT_USED: Mapping[str, str] = {
    "store_type": "the rendezvous is our master's; it has no store",
    "close_timeout": "a job is closed by its end",
    "heartbeat_timeout": "a closed connection is seen at once",
    "rank": "--node-rank says it",
    "pend_timeout": "a node that is not needed yet stands by as long as the job lives",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the flags say of the rendezvous."""

    run_id: str
    fewest: int = 1
    most: int = 1
    node_unit: int = 1
    host: str = ""
    """Empty: this machine alone."""
    port: int = 0
    node_rank: int | None = None
    """Of this node, if the ranks are given (static)."""
    hosts: bool | None = None
    """Whether the master is to run here; None: if the host is this machine, and nobody else on it
    was first."""
    local_addr: str | None = None
    connect_s: float = 60.0
    """To find the master."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """Settings of the master."""

    @classmethod
    def of(cls, flags: Flags) -> Self:
        """Read the rendezvous from flags as torchrun does (config_from_args of its run.py).

        Raises:
            ConfigError: they contradict each other, or make no sense.
        """
        fewest, most = given.nodes(flags.nnodes)
        backend, target = flags.rdzv_backend, flags.rdzv_endpoint
        static = backend == "static"
        if flags.standalone or (static and not target and flags.master_port is None and most == 1):
            if fewest > 1:
                words = f"--nnodes is {flags.nnodes}: --standalone is a job of exactly one node"
                raise ConfigError(words)
            return cls(run_id=str(uuid.uuid4()), local_addr=flags.local_addr)
        unit = flags.node_unit
        if unit < 1 or most % unit or fewest % unit:
            raise ConfigError(
                f"--node-unit is {unit} and --nnodes {flags.nnodes}: expected multiples of the unit"
            )
        if not (static or backend in ("c10d", "dlrover")):
            raise ConfigError(
                f"--rdzv-backend is {backend!r}: expected c10d or static; our own master does the "
                "rendezvous, at the node that --rdzv-endpoint names, and needs no other service"
            )
        conf = given.conf(flags.rdzv_conf)
        rank = None
        if static:
            if fewest != most:
                raise ConfigError(
                    f"--nnodes is {flags.nnodes} with the static rendezvous: expected one number; "
                    "for MIN:MAX give --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
                )
            rank = flags.node_rank
            if not 0 <= rank < most:
                words = f"--node-rank is {rank} and --nnodes {most}"
                raise ConfigError(f"{words}: expected a rank from 0 to {most - 1}")
            at = STATIC_PORT if flags.master_port is None else flags.master_port
            target = target or f"{flags.master_addr}:{at}"
        host, port = given.endpoint(target, STATIC_PORT if static else C10D_PORT)
        if port == 0 and most > 1:
            raise ConfigError("the endpoint has port 0: other nodes could not find it; name a port")
        hosts = rank == 0 if rank is not None else None
        if "is_host" in conf:
            hosts = conf["is_host"].lower() in ("1", "true", "t", "yes", "y")
        timeout = "timeout" if static else "read_timeout"
        return cls(
            run_id=flags.rdzv_id,
            fewest=fewest,
            most=most,
            node_unit=unit,
            host=host,
            port=port,
            node_rank=rank,
            hosts=hosts,
            local_addr=flags.local_addr,
            connect_s=_seconds(conf, timeout, 900.0 if static else 60.0),
            rules=_rules(conf),
        )

    @property
    def token(self) -> str:
        """What keeps other jobs away where no secret was given: all know the run's id."""
        words = b"dlrover run id\0" + self.run_id.encode(errors="surrogateescape")
        return hashlib.sha256(words).hexdigest()

    @property
    def address(self) -> str:
        """``host:port``, as clients write it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def is_here(self) -> bool:
        """Whether the endpoint's host is this machine, by its name or an address of it."""
        if self.host in ("localhost", socket.gethostname(), _full_name()):
            return True  # a cluster's name service may not know us yet
        return any(_is_ours(family, address) for family, address in _resolved(self.host))

    def numeric(self) -> str:
        """``address``, with the host's number: names mean nothing in an interpreter that ends."""
        for family, number in _resolved(self.host):
            if _source(family, number):
                return f"[{number}]:{self.port}" if ":" in number else f"{number}:{self.port}"
        return self.address

    def check(self, ca_file: Path | None) -> None:
        """Refuse what would be promised and not kept.

        Raises:
            ConfigError: TLS is asked for.
        """
        if ca_file is not None:
            raise ConfigError(
                f"DLROVER_CA_FILE is {ca_file}: a master that runs at the endpoint of its job does "
                "not speak TLS; unset it, or run the job on a platform"
            )

    def node_id(self) -> str:
        """Under which this node reports: the order of the ids is the first order of the ranks."""
        if self.node_rank is not None or not self.host:
            return f"n{self.node_rank or 0}"
        name = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-") or "node"
        return f"{name}-{os.getpid()}-{secrets.token_hex(2)}"  # containers may share both

    def advertised(self, pause: Callable[[float], object]) -> str:
        """The address at which others reach this node.

        Args:
            pause: waits for so many seconds.
        Raises:
            Unreachable: the endpoint's name means nothing for longer than ``connect_s``.
        """
        if self.local_addr:
            return self.local_addr
        if not self.host:
            return "127.0.0.1"
        if self.host == "localhost":
            return "127.0.0.1"  # others are here as well, and nobody else is to come
        if self.hosts or self.is_here():
            return self.host  # what it means here (127.0.1.1) may be nothing elsewhere
        deadline = time.monotonic() + self.connect_s
        while True:  # in a cluster a name may come up after who asks for it
            for family, address in _resolved(self.host):
                if source := _source(family, address):
                    return source
            if time.monotonic() > deadline:
                words = f"endpoint {self.host}: no such host within {self.connect_s:g} s"
                raise Unreachable(f"{words}; see --rdzv-endpoint")
            pause(0.5)


def _full_name() -> str:
    """This machine's name with its domain, as far as the name service knows it."""
    try:
        return socket.getfqdn()
    except UnicodeError:  # a part of 64 letters: the kernel allows it, and DNS does not
        return socket.gethostname()


def _resolved(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Addresses of a host; none if there is no such name (yet)."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _source(family: socket.AddressFamily, address: str) -> str:
    """Our address on the way to another; empty if there is no way."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing: picks the route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _is_ours(family: socket.AddressFamily, address: str) -> bool:
    """The way to an address of our own begins there, or on the loopback device."""
    source = _source(family, address)
    return bool(source) and (source in (address, "::1") or source.startswith("127."))


def _rules(conf: Mapping[str, str]) -> dict[str, str]:
    """Settings of the master that ``--rdzv-conf`` asks for."""
    for key in conf:
        if key in NOT_USED:
            log.warning("flag_not_used", extra={"flag": f"--rdzv-conf {key}", "why": NOT_USED[key]})
        elif key not in (*CONF, *LEASE, *TIMES):
            raise ConfigError(
                f"--rdzv-conf has {key!r}: expected one of {', '.join((*CONF, *LEASE))}"
            )
    rules = {name: _seconds(conf, key, 0.0) for key, name in TIMES.items() if key in conf}
    if any(key in conf for key in LEASE):
        lease = _seconds(conf, LEASE[0], 5.0) * _seconds(conf, LEASE[1], 3)
        rules |= {"LEASE_S": lease, "EXCHANGE_S": min(1.0, lease / 2)}
    for name, value in rules.items():
        if value > A_DAY:
            words = f"--rdzv-conf: {name.lower()} comes to {value:g}: expected at most a day"
            raise ConfigError(words)
    return {f"DLROVER_MASTER_{name}": f"{value:g}" for name, value in rules.items()}


def _seconds(conf: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(conf.get(key, default))
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ConfigError(f"--rdzv-conf {key} is {conf[key]!r}: expected a number above 0")
    return value


class Taken(Exception):
    """Somebody else listens at the endpoint."""


class OwnMaster:
    """Started on entry, ended on exit; between, :meth:`keep` starts it again if it dies."""

    def __init__(self, endpoint: Endpoint, token: str = "") -> None:
        """Start nothing yet.

        Args:
            endpoint: where it listens, and what it is for.
            token: of the job; one is drawn if this machine is all of it.
        """
        self._endpoint = endpoint
        self._alone = not endpoint.host
        self._secret = bool(token)
        self.token = token or (secrets.token_urlsafe(24) if self._alone else endpoint.token)
        self.address = ""
        self.name = f"elastic-run-{secrets.token_hex(4)}"
        """Of this run, as it is at ``/v1/job/name``."""

    def __enter__(self) -> Self:
        self._folder = scratch.made(f"dlrover-run-{os.getpid()}-")
        self._sockets: list[socket.socket] = []
        self._read, self._write = os.pipe()
        try:
            token_file = self._folder / TOKEN_FILE
            try:
                token_file.touch(mode=0o600)
                token_file.write_text(self.token)
            except OSError as error:
                raise ConfigError(f"token file {token_file}: {error.strerror}") from error
            self._sockets.append(self._listen())
            self._sockets.append(_on_loopback())
            job, health = self._sockets
            self.address = f"{_loopback(job)}:{job.getsockname()[1]}"
            self._health = f"{_loopback(health)}:{health.getsockname()[1]}"
            argv = [sys.executable, "-m", "dlrover_py.master", "--static", self._document()]
            argv += ["--state-dir", str(self._folder), "--token-file", str(token_file)]
            argv += ["--listen-fd", str(job.fileno()), "--health-fd", str(health.fileno())]
            # If we are killed, it removes the folder.
            self._argv = [*argv, "--lifeline-fd", str(self._read), "--temporary"]
            self._process = self._spawn()
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._alone:  # nobody is to be told, and what must last is in its journal
            self._process.kill()
        os.close(self._write)  # the end of its lifeline: it tells the other nodes, and ends
        self._write = -1
        end(self._process, FAREWELL_S)
        self._clean()

    async def keep(self, kin: set[int]) -> None:
        """Start it again whenever it has died or stands still: the journal is kept, and the port
        is ours.

        Args:
            kin: our children that are no workers; the master is one of them.
        Raises:
            ConfigError: it cannot use its settings.
        """
        import asyncio

        from dlrover_py.attend import attended

        pause = 0.1
        while True:
            kin.add(self._process.pid)
            code = await attended(self._process, self._health)
            kin.discard(self._process.pid)
            if code == ExitCode.USAGE:
                raise ConfigError("the master cannot be started; it said why")
            log.warning("master_ended", extra={"code": code, "then": "it is restarted"})
            await asyncio.sleep(pause)
            pause = min(5.0, pause * 2)
            self._process = self._spawn()

    def _listen(self) -> socket.socket:
        """Listen at the endpoint: on the loopback device if it is there, else everywhere.

        Raises:
            Taken: another process does.
            ConfigError: it cannot be.
        """
        if self._alone:
            return _on_loopback()
        host, port = self._endpoint.host, self._endpoint.port
        # A name of this machine may mean 127.0.1.1 here (Debian's hosts file), and not elsewhere.
        v6 = ":" in host
        try:
            if host == "localhost" or host == "::1" or host.startswith("127."):
                family = socket.AF_INET6 if v6 else socket.AF_INET
                return socket.create_server((host, port), family=family, backlog=4096)
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(
                ("", port), family=family, dualstack_ipv6=both, backlog=4096
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Taken(f"port {port} of {host} is in use") from error
            raise ConfigError(f"endpoint {host}:{port}: {error.strerror}") from error
        if not self._secret and self._endpoint.run_id in NAMELESS:
            why = "the job has no --rdzv-id, of which its token would be made"
            then = "anybody who reaches the port can join the job and read its state"
            instead = "give all nodes the same --rdzv-id that others do not know, or the same "
            instead += "secret in a file that DLROVER_TOKEN_FILE names"
            more = {"port": listening.getsockname()[1], "why": why, "then": then}
            log.warning("no_secret", extra=more | {"instead": instead})
        return listening

    def _spawn(self) -> "subprocess.Popen[bytes]":
        # A session of its own: Ctrl-C is the agent's affair.
        defaults = dict(DEFAULTS)
        if self._endpoint.most == 1:
            # Nobody could replace the one node, so that its silence (Ctrl-Z) means nothing.
            defaults |= {"DLROVER_MASTER_LEASE_S": "86400", "DLROVER_MASTER_SUSPECT_S": "86400"}
        environ = {**defaults, **os.environ, **self._endpoint.rules}  # noqa: TID251
        keep = [*(s.fileno() for s in self._sockets), self._read]
        return subprocess.Popen(self._argv, pass_fds=keep, env=environ, start_new_session=True)

    def _document(self) -> str:
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

    def _clean(self) -> None:
        if self._write >= 0:
            os.close(self._write)
        os.close(self._read)
        for listening in self._sockets:
            listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def hosted(endpoint: Endpoint, secret: str) -> Iterator[OwnMaster | None]:
    """The job's master, if it is to run here and nobody else of this machine was first.

    Args:
        endpoint: where it listens.
        secret: the job's token; empty if it was not given one.
    Raises:
        ConfigError: it has to be here, and the port is in use.
    """
    with contextlib.ExitStack() as stack:
        master = None
        here = endpoint.hosts
        if here or not endpoint.host or (here is None and endpoint.is_here()):
            try:
                master = stack.enter_context(OwnMaster(endpoint, secret))
            except Taken as taken:
                if here:
                    words = "this node is to run the master there; free it, or name another"
                    raise ConfigError(f"{taken}: {words}") from taken
        yield master


def _on_loopback() -> socket.socket:
    """Listen at any free port of this machine alone.

    Raises:
        ConfigError: that cannot be.
    """
    why = "there is no way to it"  # of a device that is down the address can be bound
    if _source(socket.AF_INET, "127.0.0.1"):
        try:
            return socket.create_server(("127.0.0.1", 0))
        except OSError as error:
            why = error.strerror or str(error)
    raise ConfigError(
        f"cannot listen on 127.0.0.1: {why}; expected a loopback device that is up and has this "
        "address: ip link set lo up; ip address add 127.0.0.1/8 dev lo"
    )


def _loopback(listening: socket.socket) -> str:
    """How this machine calls a socket of its own."""
    address = str(listening.getsockname()[0])
    if address in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{address}]" if ":" in address else address
