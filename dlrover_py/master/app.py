"""Wiring: the only place that picks implementations."""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter

from dlrover_py.master.exchange import Exchanges
from dlrover_py.master.loop import Clock, Loop
from dlrover_py.master.platform import Platform
from dlrover_py.master.server import health_app, job_app, server
from dlrover_py.master.settings import Settings
from dlrover_py.master.store import Store
from dlrover_py.processes import signal_at_parents_end
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import MASTER_NAME
from dlrover_py.rpc import watch_silence
from dlrover_py.web import raise_file_limit

log = logging.getLogger("master")

FAREWELL_S = 6.0
"""Where nodes come by themselves nobody but their master can tell them of its end."""
LAST_WORDS_S = 1.0
"""To publish what a job's end has left unsaid; its journal has it anyway."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """Where the master listens."""

    job: socket.socket
    health: socket.socket


async def serve(
    platform: Platform,
    store: Store,
    settings: Settings,
    sockets: Sockets,
    *,
    token: str,
    clock: Clock,
    tls: ssl.SSLContext | None = None,
    lifeline: int | None = None,
) -> None:
    """Run the master of one job until SIGTERM or SIGINT, or until its lifeline ends."""
    raise_file_limit()
    collect_seldom()
    watch_silence(sockets.job, settings.lease_s)
    rules = settings.rules(can_create=platform.can_create, routed_s=platform.routed_s)
    loop = Loop(platform, store, rules, clock=clock, publish_s=settings.publish_s)
    registry = CollectorRegistry()
    denied = Counter(
        "dlrover_unauthorized_requests", "Requests without the token.", registry=registry
    )
    exchanges = Exchanges(
        loop,
        token=token,
        max_body_bytes=settings.max_body_bytes,
        body_s=settings.header_s,
    )
    jobs = server(
        job_app(loop, exchanges, denied),
        header_s=settings.header_s,
        exchanges=exchanges,
        tls=tls,
    )
    health = server(health_app(loop, registry), header_s=settings.header_s)
    stop = asyncio.Event()
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop.set)
    if lifeline is not None:
        _follow(lifeline, stop)
    tasks = [
        asyncio.create_task(loop.run()),
        asyncio.create_task(jobs.serve([sockets.job])),
        asyncio.create_task(health.serve([sockets.health])),
    ]
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not done & set(tasks) and not platform.can_create:
        await loop.farewell("the node that runs the job's master has ended", FAREWELL_S)
    if not tasks[0].done():
        await loop.last_words(LAST_WORDS_S)
    jobs.should_exit = health.should_exit = True
    tasks[0].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    for task, outcome in zip(tasks, ended, strict=True):
        if task in done and isinstance(outcome, BaseException):
            raise outcome


def collect_seldom() -> None:
    """Let the garbage collector look at what is new, and hardly ever at all there is.

    Ten thousand agents are a million objects that stay: to walk through them again and again as
    they came took two fifths of the master's time, in steps of up to a second. What a closed
    connection leaves behind is freed without it (``server``).
    """
    gc.freeze()
    gc.set_threshold(20_000, 1_000, 10)


def listen(address: str) -> socket.socket:
    """A listening socket at ``host:port``.

    Raises:
        ConfigError: the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    try:
        if not 0 <= int(port) < 65536:
            raise ValueError(port)
        return socket.create_server((host.strip("[]"), int(port)), backlog=4096)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "the port is no number up to 65535"
        raise ConfigError(
            f"cannot listen on {address}: {why}; expected a free host:port (port 0 takes any)"
        ) from error


def inherited(fd: int) -> socket.socket:
    """A listening socket that the parent has opened: the port survives this process.

    Raises:
        ConfigError: it is not a socket.
    """
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"descriptor {fd} is not a listening socket: {error.strerror}") from error


def read_certificate(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """What the master proves itself to agents with; None if it is to serve them without TLS.

    Raises:
        ConfigError: one of the two is missing, cannot be used, or the key is no secret.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        given, missing = ("--tls-cert", "--tls-key") if key is None else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} is given and {missing} is not: expected both, or none")
    for what, path in (("certificate", cert), ("key", key)):
        try:
            with path.open("rb"):
                mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(f"TLS {what} {path}: {error.strerror}") from error
        if what == "key" and mode & 0o007:
            raise ConfigError(f"TLS key {path}: others may read it; expected mode 0600")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # An agent keeps its connection, and its next process knows no ticket.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        words = error.reason if isinstance(error, ssl.SSLError) else str(error)
        raise ConfigError(
            f"TLS certificate {cert} with key {key}: {words or 'not PEM'}; expected a certificate "
            f"for {MASTER_NAME} and its key without a password, both as PEM"
        ) from error
    return context


def read_token(path: Path) -> str:
    """The job's token.

    Raises:
        ConfigError: missing, empty, readable by others, or written by others.
    """
    try:
        with path.open() as file:
            token = file.read().strip()
            found = os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(f"token file {path}: {error.strerror}") from error
    if len(token) < 16:
        raise ConfigError(f"token file {path}: expected at least 16 characters")
    if found.st_mode & 0o007:
        raise ConfigError(f"token file {path}: others may read it; expected mode 0600")
    if found.st_mode & 0o020:  # a mounted Secret is for its group to read: 0440, and root's
        raise ConfigError(f"token file {path}: its group may write to it; expected mode 0600")
    if found.st_uid not in (os.getuid(), 0):
        raise ConfigError(
            f"token file {path}: it belongs to user {found.st_uid}; expected user {os.getuid()}, "
            "as whom this runs, or root"
        )
    return token


def port_of(sock: socket.socket) -> int:
    """The port that it listens on."""
    return int(sock.getsockname()[1])


def _follow(fd: int, stop: asyncio.Event) -> None:
    """End when the pipe's other end is closed: its holder is gone. That wakes us if we were
    stopped (SIGSTOP)."""
    signal_at_parents_end(signal.SIGCONT)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(fd, 64):
            loop.remove_reader(fd)
            stop.set()

    loop.add_reader(fd, readable)
