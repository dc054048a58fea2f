"""``python -m dlrover_py.master``: the master of one job; platforms start it, not people."""

import argparse
import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import uvloop

from dlrover_py.master.app import (
    Sockets,
    inherited,
    listen,
    port_of,
    read_certificate,
    read_token,
    serve,
)
from dlrover_py.master.platform import Platform
from dlrover_py.master.platform.local import LocalPlatform
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.master.settings import Settings
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.telemetry import setup


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="dlrover-master", description=__doc__)
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--cluster", metavar="SOCKET", help="the cluster on this machine")
    where.add_argument("--static", metavar="JOB", help="a job's JSON; nodes come by themselves")
    p.add_argument("--listen", default="127.0.0.1:0", help="host:port for agents")
    p.add_argument("--listen-fd", type=int, help="a listening socket to take instead")
    p.add_argument("--health", default="127.0.0.1:0", help="host:port for health and metrics")
    p.add_argument("--health-fd", type=int, help="a listening socket to take instead")
    p.add_argument("--state-dir", type=Path, required=True, help="where the journal is kept")
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


def main(argv: list[str] | None = None) -> int:
    """Run a master; return its exit code."""
    args = parser().parse_args(argv)
    code = 0
    try:
        settings = Settings.from_environment()
        setup("master", level=settings.log_level)
        token = read_token(args.token_file)
        tls = read_certificate(args.tls_cert, args.tls_key)
        job = listen(args.listen) if args.listen_fd is None else inherited(args.listen_fd)
        health = listen(args.health) if args.health_fd is None else inherited(args.health_fd)
        platform: Platform
        if args.cluster:
            platform = LocalPlatform(args.cluster)
        else:
            platform = StaticPlatform(ElasticJob.parse(json.loads(args.static)))
        if args.announce_fd is not None:
            ports = {"job": port_of(job), "health": port_of(health)}
            os.write(args.announce_fd, json.dumps(ports).encode() + b"\n")
            os.close(args.announce_fd)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                serve(
                    platform,
                    settings,
                    Sockets(job, health),
                    token=token,
                    tls=tls,
                    state_dir=args.state_dir,
                    lifeline=args.lifeline_fd,
                )
            )
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
