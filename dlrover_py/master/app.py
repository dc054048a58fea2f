"""Assembly of the master from its parts; the only module that connects them."""

import asyncio
import gc
import logging
import os
import re
import signal
import socket
import ssl
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from dlrover_py.master.evidence import EvidenceStore
from dlrover_py.master.exchange import Exchanges, server
from dlrover_py.master.journal_store import JournalStore
from dlrover_py.master.loop import Clock, Loop
from dlrover_py.master.platform import Platform
from dlrover_py.master.recipe_secret import RecipeSecret
from dlrover_py.master.servers import ServerMap
from dlrover_py.master.settings import Settings
from dlrover_py.master.traces import RecoveryTimes, trace_exporter
from dlrover_py.net.http_client import enable_keepalive
from dlrover_py.net.http_server import raise_file_limit
from dlrover_py.process.identity import SENT_TO_ALL, signal_at_parents_end
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import MASTER_NAME
from dlrover_py.protocol.timing import END_NOTICE_S

log = logging.getLogger("master")

PUBLISH_END_S = 1.0
"""Time to publish what the job's end has left unpublished, in seconds.

The journal has it anyway.
"""


EVIDENCE_END_S = 3.0
"""Time for the last decision on evidence and to keep it, in seconds.

The program that has started the master may kill it after five. The other steps may take two.
"""
SEND_END_S = 1.0
"""Time to send the traces that are left at the end, in seconds."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The sockets on which the master listens."""

    job: socket.socket
    health: socket.socket


async def serve(
    platform: Platform,
    store: JournalStore,
    settings: Settings,
    sockets: Sockets,
    *,
    token: str,
    clock: Clock,
    tls: ssl.SSLContext | None = None,
    lifeline: int | None = None,
    evidence: EvidenceStore | None = None,
    certificate_ends: float | None = None,
    servers: ServerMap | None = None,
    earlier_recipes: RecipeSecret | None = None,
) -> None:
    """Run the master of one job until SIGTERM or SIGINT, or until its lifeline is closed.

    Where nodes come by themselves, the job ends with its master. A master with a lifeline ignores
    signals there, so that a stray one does not end the job. Elsewhere the next master goes on with
    the job. An end of the job that was not published yet is published at last, if 1 s suffices.
    Signal handlers, the signal mask, the limit of open files and the garbage collector of this
    process are changed, and not restored.

    Args:
        platform: Where nodes run.
        store: Where the journal is kept.
        settings: Settings of the master.
        sockets: The sockets on which it listens.
        token: The job's token.
        clock: Sources of time.
        tls: TLS settings for agents; None for plain HTTP.
        lifeline: Descriptor of a pipe. The master ends when the other end is closed. None if the
            master does not depend on another process.
        evidence: Keeps bundles of evidence; None keeps none.
        certificate_ends: End of the certificate of ``tls``, in Unix seconds; None if not known.
        servers: Owner of the map of the job's parameter server; None if no server can be run.
        earlier_recipes: Import recipes of earlier runs; None where agents keep them in files.

    Raises:
        ConfigError: The journal cannot be used.
        ExceptionGroup: The loop of the job has failed. The group contains SupersededError if
            another master holds the journal or has begun a later term.
    """
    raise_file_limit()
    collect_seldom()
    enable_keepalive(sockets.job, settings.lease_s)
    rules = settings.rules(
        can_create=platform.can_create,
        avoids_hosts=platform.avoids_hosts,
        limits_memory=platform.limits_memory,
        routed_s=platform.routed_s,
    )
    exporter = trace_exporter() if settings.traces() else None
    loop = Loop(
        platform,
        store,
        rules,
        clock=clock,
        publish_s=settings.publish_s,
        evidence=evidence,
        servers=servers,
        traces=None if exporter is None else RecoveryTimes(exporter.send),
    )
    exchanges = Exchanges(
        loop,
        token=token,
        max_body_bytes=settings.max_body_bytes,
        body_s=settings.header_s,
    )
    exchanges.earlier = earlier_recipes
    pages = _LatePages(loop, exchanges, certificate_ends)
    jobs = server(
        pages.job,
        header_s=settings.header_s,
        exchanges=exchanges,
        tls=tls,
    )
    health = server(pages.health, header_s=settings.header_s)
    stop = asyncio.Event()
    running = asyncio.get_running_loop()
    if lifeline is not None:
        # A batch system may send a signal to all processes of a job. The agents handle it, and need
        # the master to store the newest step.
        for number in SENT_TO_ALL:
            signal.signal(number, signal.SIG_IGN)
    if lifeline is None or platform.can_create:
        for number in (signal.SIGTERM, signal.SIGINT):
            running.add_signal_handler(number, stop.set)
    # The program that starts the master may block signals at that time, as elastic-run does.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if lifeline is not None:
        _follow(lifeline, stop)
    tasks = [
        asyncio.create_task(loop.run()),
        asyncio.create_task(jobs.serve([sockets.job])),
        asyncio.create_task(health.serve([sockets.health])),
    ]
    if platform.can_create:  # probes of the platform come soon, and wait a second
        pages.prepare()
    stopped = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not done & set(tasks) and not platform.can_create:
        await loop.end_job("the node that runs the job's master has ended", END_NOTICE_S)
    if not tasks[0].done():
        await loop.publish_end(PUBLISH_END_S)
        await loop.keep_evidence(EVIDENCE_END_S)
    jobs.end()
    health.end()
    tasks[0].cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    if exporter is not None:
        await exporter.finish(SEND_END_S)
    for task, outcome in zip(tasks, ended, strict=True):
        if task in done and isinstance(outcome, BaseException):
            raise outcome


class _LatePages:
    """The applications of both ports, which are imported with their first request.

    FastAPI takes half of the master's time to start, and reports of agents do not need it. So the
    first workers of a job start earlier.
    """

    def __init__(self, loop: Loop, exchanges: Exchanges, certificate_ends: float | None) -> None:
        """Take what the applications show; nothing is imported yet.

        Args:
            loop: The loop that runs the job.
            exchanges: Takes the reports of agents.
            certificate_ends: End of the certificate, in Unix seconds; None if it is not known.
        """
        self._loop, self._exchanges = loop, exchanges
        self._certificate_ends = certificate_ends
        self._made: asyncio.Future[tuple[ASGIApp, ASGIApp]] | None = None

    def prepare(self) -> "asyncio.Future[tuple[ASGIApp, ASGIApp]]":
        """Begin to import the applications in a thread, if that has not begun before."""
        if self._made is None:
            self._made = asyncio.ensure_future(asyncio.to_thread(self._make))
        return self._made

    def _make(self) -> tuple[ASGIApp, ASGIApp]:
        from dlrover_py.master.server import applications

        return applications(self._loop, self._exchanges, self._certificate_ends)

    @property
    def job(self) -> ASGIApp:
        """The application of the job's port."""

        async def job(scope: Scope, receive: Receive, send: Send) -> None:
            await (await asyncio.shield(self.prepare()))[0](scope, receive, send)

        return job

    @property
    def health(self) -> ASGIApp:
        """The application of the port for health and metrics."""

        async def health(scope: Scope, receive: Receive, send: Send) -> None:
            await (await asyncio.shield(self.prepare()))[1](scope, receive, send)

        return health


def collect_seldom() -> None:
    """Make the garbage collector of this process look at all objects very rarely.

    Ten thousand agents are a million objects that stay. To traverse them again and again while they
    arrived took two fifths of the master's time, in pauses of up to a second. The objects of a
    closed connection are freed without the collector (``server``). New objects are still looked at.
    """
    gc.freeze()
    gc.set_threshold(20_000, 1_000, 10)


def listen(address: str) -> socket.socket:
    """Return a listening socket at ``host:port``.

    Args:
        address: The address. A host is a name, or an IPv4 address, or an IPv6 address in brackets.
            For a name, this machine listens at its IPv4 address. An empty host means all addresses:
            of IPv4, and of IPv6 where this machine has it. So does ``[::]``.

    Raises:
        ConfigError: The port is no number up to 65535, or this machine cannot listen at the
            address.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    try:
        if not 0 <= int(port) < 65536:
            raise ValueError(port)
        return socket.create_server(
            ("::" if both else host, int(port)),
            family=socket.AF_INET6 if both or ":" in host else socket.AF_INET,
            backlog=4096,
            dualstack_ipv6=both,
        )
    except (OSError, ValueError) as error:
        why = (
            error.strerror if isinstance(error, OSError) else "the port is not a number up to 65535"
        )
        raise ConfigError(
            f"cannot listen on {address}: {why}; expected a free host:port (port 0 takes any)"
        ) from error


def inherited(fd: int) -> socket.socket:
    """Return the listening socket of a descriptor that the parent has opened.

    The parent holds it too, so the port stays taken when this process ends.

    Raises:
        ConfigError: The descriptor is not a listening socket.
    """
    try:
        found = socket.socket(fileno=fd)
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.detach()
            raise ValueError("it does not listen")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"descriptor {fd} is not a listening socket: {why}") from error
    return found


def read_certificate(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the TLS settings with which the master identifies itself to agents.

    Returns:
        None if agents are served without TLS.

    Raises:
        ConfigError: Only one of the two files is given, one cannot be read, or others may read the
            key. Also if they are no certificate with its key, as PEM without a password.
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
    # An agent keeps its connection, and its next process has no session ticket.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError) as error:
        message = error.reason if isinstance(error, ssl.SSLError) else str(error)
        raise ConfigError(
            f"TLS certificate {cert} with key {key}: {message or 'not PEM'}; expected a "
            f"certificate for {MASTER_NAME} and its key without a password, both as PEM"
        ) from error
    return context


_VALIDITY = re.compile(
    rb"\x30.(?:\x17\x0d|\x18\x0f)\d{12,14}Z(\x17\x0d|\x18\x0f)(\d{12,14})Z", re.DOTALL
)
"""The two times of a certificate in DER, each a UTCTime or, from 2050 on, a GeneralizedTime."""


def certificate_end(pem: str) -> float | None:
    """Return the end of the first certificate in a text, in Unix seconds; None if there is none.

    The ssl module tells this of peers only.
    """
    begin, end = ssl.PEM_HEADER, ssl.PEM_FOOTER
    first = f"{begin}{pem.partition(begin)[2].partition(end)[0]}{end}"
    try:
        found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(first))
        if found is None:
            return None
        year = "" if found[1].startswith(b"\x18") else "20"
        at = datetime.strptime(f"{year}{found[2].decode()}Z+0000", "%Y%m%d%H%M%SZ%z")
    except ValueError:
        return None
    return at.timestamp()


def port_of(sock: socket.socket) -> int:
    """Return the port that the socket listens on."""
    return int(sock.getsockname()[1])


def _follow(fd: int, stop: asyncio.Event) -> None:
    """Set ``stop`` later, when the other end of a pipe is closed; return immediately.

    The process that holds the other end is gone then. If that process is the parent, the kernel
    also sends SIGCONT, which wakes this process if it was stopped (SIGSTOP).

    Args:
        fd: Descriptor of this end of the pipe. What arrives there is dropped.
        stop: The event to set.
    """
    signal_at_parents_end(signal.SIGCONT)
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(fd, 64):
            loop.remove_reader(fd)
            stop.set()

    loop.add_reader(fd, readable)
