"""Shell completion for ``dlrover``: the names of jobs and nodes.

Click calls these functions when the user presses Tab. Names that cannot be found quickly are left
out.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from dlrover_py.cli import local_jobs, runs
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.status import NodePhase

TIMEOUT_S = 2.0
"""Seconds that the API server gets to answer. A user who presses Tab waits no longer."""
READ_COMMANDS = ("describe", "events", "why", "logs", "verify")
"""Commands that also take a job of this machine that has ended."""
CLUSTER_ONLY = ("delete",)
"""Commands that take only jobs of a cluster."""
LOCAL_ONLY = ("stop",)
"""Commands that take only jobs of this machine, though they have the flags of a cluster."""


def jobs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of the jobs that the command may take, each with its place.

    Jobs of a cluster that does not answer within ``TIMEOUT_S`` are left out.

    Args:
        ctx: context of the command line.
        _: not used.
        incomplete: beginning of the name.
    """
    found: dict[str, str] = {}
    target = _target(ctx)
    if not (target is not None and target.given) and ctx.command.name not in CLUSTER_ONLY:
        for name in _running():
            found[name] = "runs on this machine"
        for run in _past(ctx):
            found.setdefault(run.name, "has ended on this machine")
    if target is not None:
        for obj in _in_cluster(target):
            meta = obj["metadata"]
            found.setdefault(str(meta["name"]), f"in namespace {meta['namespace']}")
    return [CompletionItem(n, help=h) for n, h in sorted(found.items()) if n.startswith(incomplete)]


def folders_or_jobs(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the names of jobs, as :func:`jobs` does; the shell adds folders if there are none.

    Args:
        ctx: context of the command line.
        param: not used.
        incomplete: beginning of the name.
    """
    return [CompletionItem(incomplete, type="dir"), *jobs(ctx, param, incomplete)]


def nodes(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the nodes of the job that the command names, or of the only job that runs here.

    The list is empty if there is no such job or it does not answer. Nodes that are gone are left
    out for a running job.

    Args:
        ctx: context of the command line.
        _: not used.
        incomplete: beginning of the name.
    """
    ids = list(dict.fromkeys(_nodes(ctx)))
    return [CompletionItem(node) for node in ids if node.startswith(incomplete)]


def _nodes(ctx: click.Context) -> Iterator[str]:
    """Yield the ids of the nodes, which may repeat.

    There are none if the job is not found or does not answer.
    """
    # After an option without a value click has not parsed the arguments yet.
    name = ctx.params.get("name") or next(iter(ctx.args), None)
    target, running = _target(ctx), _running()
    if not (target is not None and target.given):
        if name is None and len(running) == 1:
            name = next(iter(running))
        if name in running:
            with contextlib.suppress(DLRoverError, OSError, ValueError):
                status = running[name].snapshot().status
                alive = [n for n in status.nodes if n.phase is not NodePhase.GONE] if status else []
                yield from (n.id for n in alive)
            return
        for past in _past(ctx):
            if past.name == name:
                yield from (n.id for n in past.status.nodes) if past.status is not None else ()
                return
    if target is not None and name is not None:
        for obj in _in_cluster(target, f"metadata.name={name}"):
            reported = ((obj.get("status") or {}).get("training") or {}).get("nodes") or []
            yield from (str(n["id"]) for n in reported if isinstance(n, dict) and "id" in n)


def _past(ctx: click.Context) -> list[runs.Run]:
    """Return the ended runs of this machine for a command that reads; none if they are unknown."""
    if ctx.command.name not in READ_COMMANDS:
        return []
    with contextlib.suppress(DLRoverError, OSError):
        return runs.ended(Settings.from_environment().state_folder)
    return []


def _running() -> dict[str, local_jobs.RunningJob]:
    """Return the jobs that run on this machine, by name; none if they cannot be found out."""
    with contextlib.suppress(DLRoverError, OSError):
        return local_jobs.running(Settings.from_environment())
    return {}


def _target(ctx: click.Context) -> Target | None:
    """Return the cluster that the command means; None if the command concerns only this machine."""
    if ctx.command.name in LOCAL_ONLY or not any(
        option.name == "kubeconfig" for option in ctx.command.params
    ):
        return None
    given = ctx.params
    context, kubeconfig = given.get("context"), given.get("kubeconfig")
    return Target(given.get("namespace") or "", context or "", kubeconfig)


def _in_cluster(target: Target, fields: str = "") -> list[dict[str, Any]]:
    """Return the ElasticJobs of the target's namespace; none if the cluster is missing or slow.

    It blocks for ``TIMEOUT_S`` seconds at most.
    """
    from dlrover_py.kubernetes.client import KubeClient  # importing takes 0.2 s
    from dlrover_py.kubernetes.kinds import ELASTICJOBS

    logging.getLogger("kubernetes").addHandler(
        logging.NullHandler()
    )  # no log lines between the names

    async def list_jobs() -> list[dict[str, Any]]:
        kube = await KubeClient.connect(
            kubeconfig=target.kubeconfig, context=target.context or None
        )
        try:
            return await kube.list(ELASTICJOBS, target.namespace or kube.namespace, fields=fields)
        finally:
            await kube.close()

    with contextlib.suppress(DLRoverError, OSError):  # TimeoutError is an OSError, too
        return asyncio.run(asyncio.wait_for(list_jobs(), TIMEOUT_S))
    return []
