"""``python -m dlrover_py.master``: the master of one job; platforms start it, not people."""

import argparse
import asyncio
import contextlib
import os
import shutil
import ssl
import sys
from pathlib import Path

import uvloop

from dlrover_py.master.app import (
    Sockets,
    certificate_end,
    inherited,
    listen,
    port_of,
    read_certificate,
    serve,
)
from dlrover_py.master.evidence import BundleCopies, BundleFolder, EvidenceStore
from dlrover_py.master.journal_store import FileJournalStore, JournalStore, SecretJournalStore
from dlrover_py.master.loop import Clock
from dlrover_py.master.platform import Platform
from dlrover_py.master.platform.local import LocalPlatform
from dlrover_py.master.platform.static import StaticPlatform
from dlrover_py.master.recipe_secret import RecipeSecret
from dlrover_py.master.servers import ServerMap, ServerPlace
from dlrover_py.master.settings import Settings
from dlrover_py.process.token_file import read_token
from dlrover_py.protocol import json_text
from dlrover_py.protocol.errors import ConfigError, DLRoverError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.local import MasterPorts
from dlrover_py.protocol.names import (
    JOURNAL_FILE,
    PS_MAP_FILE,
    evidence_of,
    journal_of,
    servers_of,
)
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.telemetry import setup

BY_AGENT = frozenset(
    {
        EventReason.WORKER_FAILED,
        EventReason.PEER_LOST,
        EventReason.RESTARTS_EXHAUSTED,
        EventReason.NON_RETRYABLE,
    }
)
"""Reasons of the events that the agent beside this master shows itself: restarts, and the end."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(prog="dlrover-master", description=__doc__)
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--cluster", metavar="SOCKET", help="run a job of the local cluster with this socket"
    )
    where.add_argument(
        "--static", metavar="JOB", help="run the job in this JSON; its nodes start by themselves"
    )
    where.add_argument(
        "--kubernetes",
        metavar="NAMESPACE/JOB",
        type=_namespaced,
        help="run an ElasticJob of the cluster that this Pod is in",
    )
    p.add_argument("--listen", default="127.0.0.1:0", help="host:port for agents")
    p.add_argument("--listen-fd", type=int, help="descriptor of a listening socket to use instead")
    p.add_argument("--health", default="127.0.0.1:0", help="host:port for health and metrics")
    p.add_argument("--health-fd", type=int, help="descriptor of a listening socket to use instead")
    p.add_argument("--state-dir", type=Path, help="folder of the journal")
    p.add_argument("--token-file", type=Path, required=True, help="file with the job's token")
    p.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate for TLS")
    p.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of the certificate")
    p.add_argument("--lifeline-fd", type=int, help="end when this pipe is closed")
    p.add_argument("--ps-fd", type=int, help="listening socket for a parameter server")
    p.add_argument("--ps-listen", help="host:port for a parameter server in a cluster")
    p.add_argument("--ps-access", type=Path, help="file to write that says where that socket is")
    p.add_argument("--temporary", action="store_true", help="remove --state-dir at a normal end")
    p.add_argument(
        "--announce-fd",
        type=int,
        help="write the ports, as JSON, to this descriptor once they listen",
    )
    return p


def _namespaced(text: str) -> tuple[str, str]:
    """Return the namespace and the name in ``NAMESPACE/JOB``.

    Raises:
        ArgumentTypeError: One of the two is missing.
    """
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
    certificate_ends: float | None,
) -> None:
    """Build the platform and the journal's store, and serve until a signal or the lifeline ends it.

    An end of the job does not end the master. On Kubernetes, times that people read are the API
    server's, and the status is published once a second at most. The journal is in a Secret there,
    and in a file in ``--state-dir`` elsewhere.

    Args:
        args: The command line.
        settings: Settings of the master.
        sockets: The sockets on which it listens.
        token: The job's token.
        tls: TLS settings for agents; None for plain HTTP.
        certificate_ends: End of the certificate of ``tls``, in Unix seconds; None if not known.

    Raises:
        ConfigError: ``--state-dir`` or the operator's environment is missing, the job in
            ``--static`` is not valid, or the journal cannot be used.
        ExceptionGroup: A task of the loop has failed; SupersededError is in it if another master
            has taken over.
    """
    async with contextlib.AsyncExitStack() as stack:
        platform: Platform
        store: JournalStore
        clock, servers, earlier_recipes = Clock(), None, None
        evidence: EvidenceStore
        if args.kubernetes:
            # Imported here: a job on one machine starts a fifth of a second earlier without them.
            from dlrover_py.kubernetes.client import KubeClient
            from dlrover_py.master.platform.kubernetes.platform import KubernetesPlatform
            from dlrover_py.master.platform.kubernetes.pods import PodContext
            from dlrover_py.master.platform.kubernetes.timing import PlatformTiming

            namespace, name = args.kubernetes
            own = settings.in_cluster()
            kube = await stack.enter_async_context(await KubeClient.connect())
            clock.wall = kube.wall  # the next master, on another machine, reads these times
            site = PodContext(own.job_uid, own.service)
            timing = PlatformTiming(
                progress_s=settings.progress_s, silence_s=settings.platform_silence_s
            )
            platform = on_pods = KubernetesPlatform(kube, namespace, name, site, timing=timing)
            earlier_recipes = RecipeSecret(kube, namespace, lambda: on_pods.program)
            stack.push_async_callback(earlier_recipes.close)
            store = SecretJournalStore(
                kube,
                namespace,
                journal_of(name),
                job_uid=own.job_uid,
                pod=own.pod_name,
                pod_uid=own.pod_uid,
            )
            from dlrover_py.master.evidence_secret import BundleSecret

            kept_in = BundleSecret(kube, namespace, evidence_of(name), job_uid=own.job_uid)
            evidence = EvidenceStore(kept_in, BundleCopies(own.job_uid))
            if args.ps_listen is not None:
                from dlrover_py.master.map_secret import SecretMapStore

                listener = stack.enter_context(listen(args.ps_listen))
                secret = SecretMapStore(kube, namespace, servers_of(name), job_uid=own.job_uid)
                servers = ServerMap(ServerPlace(listener, None, secret, token))
            settings = settings.model_copy(update={"publish_s": max(settings.publish_s, 1.0)})
        else:
            if args.state_dir is None:
                raise ConfigError("--state-dir is needed: a folder for the journal")
            store = FileJournalStore(args.state_dir / JOURNAL_FILE)
            folder = None if args.temporary else BundleFolder(args.state_dir)
            evidence = EvidenceStore(folder, BundleCopies(args.state_dir.name))
            if args.ps_fd is not None:
                from dlrover_py.ps.map_store import MapFile

                maps = MapFile(args.state_dir / PS_MAP_FILE)
                place = ServerPlace(inherited(args.ps_fd), args.ps_access, maps, token)
                servers = ServerMap(place)
            platform = (
                LocalPlatform(args.cluster)
                if args.cluster
                else StaticPlatform(_static_job(args.static))
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
            evidence=evidence,
            certificate_ends=certificate_ends,
            servers=servers,
            earlier_recipes=earlier_recipes,
        )


def _static_job(text: str) -> ElasticJob:
    """Return the job of ``--static``; ConfigError if the text is not a valid job."""
    try:
        document = json_text.decoded(text)
    except ValueError as error:
        raise ConfigError(f"--static: expected a job as JSON: {error}") from error
    return ElasticJob.parse(document)


def main(argv: list[str] | None = None) -> int:
    """Run a master until it is told to end; return its exit code.

    A ``DLRoverError`` is written to standard error, and its exit code is returned. The code is 2
    for a wrong setting, and 3 if another master has taken over. Any other error is raised. A wrong
    command line ends the process with exit code 2.

    The ports are written to ``--announce-fd`` once they listen. With ``--temporary``, the state
    directory is removed at an end without an error.

    Args:
        argv: The arguments; None for those of this process.
    """
    args = parser().parse_args(argv)
    code = 0
    try:
        settings = Settings.from_environment()
        hidden = BY_AGENT if args.temporary else ()
        setup("master", level=settings.log_level, elsewhere=hidden, aside=True)
        token = read_token(args.token_file, private=True)
        tls = read_certificate(args.tls_cert, args.tls_key)
        ends = None if tls is None else certificate_end(args.tls_cert.read_text(errors="replace"))
        job = listen(args.listen) if args.listen_fd is None else inherited(args.listen_fd)
        health = listen(args.health) if args.health_fd is None else inherited(args.health_fd)
        if args.announce_fd is not None:
            ports = MasterPorts(job=port_of(job), health=port_of(health))
            os.write(args.announce_fd, ports.model_dump_json().encode() + b"\n")
            os.close(args.announce_fd)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(args, settings, Sockets(job, health), token, tls, ends))
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
