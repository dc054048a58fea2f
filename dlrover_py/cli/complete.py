"""Names for the shell's completion of ``dlrover``: jobs and nodes.

Click asks for them when the user presses Tab. What cannot be found out soon is left out.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from dlrover_py.cli import here
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.protocol.errors import DLRoverError
from dlrover_py.protocol.status import NodePhase

PATIENCE_S = 2.0
"""For the API server. Who presses Tab waits no longer."""
LOOKS = ("describe", "events", "why", "logs")
"""Commands that take a job of this machine that has ended, too."""
NOT_HERE = ("delete",)
"""Commands that take jobs of a cluster only."""
HERE_ONLY = ("stop",)
"""Commands that take jobs of this machine only, though they have a cluster's flags."""


def jobs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the jobs that the command could mean, and where each is."""
    found: dict[str, str] = {}
    target = _target(ctx)
    if not (target is not None and target.given) and ctx.command.name not in NOT_HERE:
        for name in _running():
            found[name] = "runs on this machine"
        for status in here.past(Settings.from_environment()) if ctx.command.name in LOOKS else ():
            found.setdefault(status.name, "has ended on this machine")
    if target is not None:
        for obj in _in_cluster(target):
            meta = obj["metadata"]
            found.setdefault(str(meta["name"]), f"in namespace {meta['namespace']}")
    return [CompletionItem(n, help=h) for n, h in sorted(found.items()) if n.startswith(incomplete)]


def nodes(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The nodes of the job that is named in the command, or of the only one that runs here."""
    ids = list(dict.fromkeys(_nodes(ctx)))
    return [CompletionItem(node) for node in ids if node.startswith(incomplete)]


def _nodes(ctx: click.Context) -> Iterator[str]:
    # Behind an option that still lacks its value, click has not come to the arguments.
    name = ctx.params.get("name") or next(iter(ctx.args), None)
    target, running = _target(ctx), _running()
    if not (target is not None and target.given):
        if name is None and len(running) == 1:
            name = running[0]
        if name in running:
            with contextlib.suppress(DLRoverError, OSError, ValueError):
                status = here.RunningJob(Settings.from_environment(), name).snapshot().status
                alive = [n for n in status.nodes if n.phase is not NodePhase.GONE] if status else []
                yield from (n.id for n in alive)
            return
        for past in here.past(Settings.from_environment()) if ctx.command.name in LOOKS else ():
            if past.name == name:
                yield from (n.id for n in past.nodes)
                return
    if target is not None and name is not None:
        for obj in _in_cluster(target, f"metadata.name={name}"):
            told = ((obj.get("status") or {}).get("training") or {}).get("nodes") or []
            yield from (str(n["id"]) for n in told if isinstance(n, dict) and "id" in n)


def _running() -> list[str]:
    with contextlib.suppress(DLRoverError, OSError):
        return here.running(Settings.from_environment())
    return []


def _target(ctx: click.Context) -> Target | None:
    """The cluster that the command means; None if it is about this machine only."""
    if ctx.command.name in HERE_ONLY or not any(
        option.name == "kubeconfig" for option in ctx.command.params
    ):
        return None
    given = ctx.params
    context, kubeconfig = given.get("context"), given.get("kubeconfig")
    return Target(given.get("namespace") or "", context or "", kubeconfig)


def _in_cluster(target: Target, fields: str = "") -> list[dict[str, Any]]:
    """ElasticJobs of the target's namespace; none if there is no cluster, or it is slow."""
    from dlrover_py.kube import ELASTICJOBS, Kube  # a fifth of a second

    logging.getLogger("kubernetes").addHandler(logging.NullHandler())  # not between the names

    async def ask() -> list[dict[str, Any]]:
        kube = await Kube.connect(kubeconfig=target.kubeconfig, context=target.context or None)
        try:
            return await kube.list(ELASTICJOBS, target.namespace or kube.namespace, fields=fields)
        finally:
            await kube.close()

    with contextlib.suppress(DLRoverError, OSError):  # a timeout is one, too
        return asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
    return []
