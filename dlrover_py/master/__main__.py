"""``python -m dlrover_py.master``: the master of one job; platforms start it, not people."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import ssl
import sys
from pathlib import Path

import uvloop

from dlrover_py.kube import Kube
from dlrover_py.master.app import (
    Sockets,
    inherited,
    listen,
    port_of,
    read_certificate,
    read_token,
    serve,
)
from dlrover_py.master.loop import Clock
from dlrover_py.master.platform import Platform
from dlrover_py.master.platform.kubernetes import KubernetesPlatform
from dlrover_py.master.platform.local import LocalPlatform
from dlrover_py.master.platform.pods import Site
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.master.settings import Settings
from dlrover_py.master.store import FileStore, SecretStore, Store
from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import JOURNAL_FILE, journal_of
from dlrover_py.telemetry import setup

BY_AGENT = frozenset(("WorkerFailed", "PeerLost", "RestartsExhausted", "NonRetryable"))
"""What the agent that runs this master tells a person by itself: restarts, and the end."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="dlrover-master", description=__doc__)
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--cluster", metavar="SOCKET", help="the cluster on this machine")
    where.add_argument("--static", metavar="JOB", help="a job's JSON; nodes come by themselves")
    where.add_argument(
        "--kubernetes",
        metavar="NAMESPACE/JOB",
        type=_namespaced,
        help="an ElasticJob of the cluster that this Pod is in",
    )
    p.add_argument("--listen", default="127.0.0.1:0", help="host:port for agents")
    p.add_argument("--listen-fd", type=int, help="a listening socket to take instead")
    p.add_argument("--health", default="127.0.0.1:0", help="host:port for health and metrics")
    p.add_argument("--health-fd", type=int, help="a listening socket to take instead")
    p.add_argument("--state-dir", type=Path, help="where the journal is kept")
    p.add_argument("--token-file", type=Path, required=True, help="file with the job's token")
    p.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="PEM certificate: agents are served over TLS"
    )
    p.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key")
    p.add_argument("--lifeline-fd", type=int, help="end at this pipe's end of file")
    p.add_argument("--temporary", action="store_true", help="remove --state-dir at an orderly end")
    p.add_argument(
        "--announce-fd", type=int, help="write the ports there, as JSON, once they listen"
    )
    return p


def _namespaced(text: str) -> tuple[str, str]:
    namespace, _, job = text.partition("/")
    if not (namespace and job):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAMESPACE/JOB")
    return namespace, job


async def _run(
    args: argparse.Namespace,
    settings: Settings,
    sockets: Sockets,
    token: str,
    tls: ssl.SSLContext | None,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        platform: Platform
        store: Store
        clock = Clock()
        if args.kubernetes:
            namespace, name = args.kubernetes
            own = settings.in_cluster()
            kube = await stack.enter_async_context(await Kube.connect())
            clock.wall = kube.wall  # the next master, on another machine, reads what we stamp
            site = Site(own.job_uid, own.service)
            platform = KubernetesPlatform(
                kube, namespace, name, site, progress_s=settings.progress_s
            )
            store = SecretStore(
                kube,
                namespace,
                journal_of(name),
                job_uid=own.job_uid,
                pod=own.pod_name,
                pod_uid=own.pod_uid,
            )
            settings = settings.model_copy(update={"publish_s": max(settings.publish_s, 1.0)})
        else:
            if args.state_dir is None:
                raise ConfigError("--state-dir is needed: a folder for the journal")
            store = FileStore(args.state_dir / JOURNAL_FILE)
            platform = (
                LocalPlatform(args.cluster)
                if args.cluster
                else StaticPlatform(ElasticJob.parse(json.loads(args.static)))
            )
        await serve(
            platform,
            store,
            settings,
            sockets,
            token=token,
            clock=clock,
            tls=tls,
            lifeline=args.lifeline_fd,
        )


def main(argv: list[str] | None = None) -> int:
    """Run a master; return its exit code."""
    args = parser().parse_args(argv)
    code = 0
    try:
        settings = Settings.from_environment()
        hidden = BY_AGENT if args.temporary else ()
        setup("master", level=settings.log_level, elsewhere=hidden, aside=True)
        token = read_token(args.token_file)
        tls = read_certificate(args.tls_cert, args.tls_key)
        job = listen(args.listen) if args.listen_fd is None else inherited(args.listen_fd)
        health = listen(args.health) if args.health_fd is None else inherited(args.health_fd)
        if args.announce_fd is not None:
            ports = {"job": port_of(job), "health": port_of(health)}
            os.write(args.announce_fd, json.dumps(ports).encode() + b"\n")
            os.close(args.announce_fd)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(args, settings, Sockets(job, health), token, tls))
        if args.temporary:
            shutil.rmtree(args.state_dir, ignore_errors=True)
    except* DLRoverError as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        sys.stderr.write(f"dlrover-master: {first}\n")
        code = int(first.exit_code) if isinstance(first, DLRoverError) else 1
    return code


if __name__ == "__main__":
    sys.exit(main())
