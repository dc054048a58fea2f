"""``python -m dlrover_operator.selftest``: a small job from its creation to its end (`helm test`).

It proves what no look at the installed objects can: that the definition is there and refuses what
is wrong, that the operator sees jobs and may make masters, that masters may make Pods, and that
images are found. It needs nothing from outside the cluster.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from dlrover_py import kube
from dlrover_py.kube import ELASTICJOBS, Kube, KubeError, Obj
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import DLRoverError

KEEP_S = 600
"""If this process is killed the operator removes the job so long after its end."""


def job(name: str, namespace: str, image: str, pull_secrets: Sequence[str] = ()) -> Obj:
    """One node whose worker ends at once; within Pod Security ``restricted``."""
    container = {
        "name": names.MAIN_CONTAINER,
        "image": image,
        "command": ["elastic-run", "--nproc-per-node=1", "--no-python", "true"],
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    pod: Obj = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }
    if pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in pull_secrets]
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "ttlSecondsAfterFinished": KEEP_S,
            "replicaSpecs": {
                "worker": {"replicas": 1, "restartCount": 0, "template": {"spec": pod}}
            },
        },
    }


async def check(api: Kube, wanted: Obj) -> str:
    """Run the job; return why it did not succeed, "" if it did. The job is deleted afterwards."""
    meta = wanted["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    worker = wanted["spec"]["replicaSpecs"]["worker"]
    wrong = wanted["spec"] | {"replicaSpecs": {"worker": worker | {"minReplicas": 2}}}
    try:
        await api.create(ELASTICJOBS, wanted | {"spec": wrong}, dry_run=True)
        return "a job with minReplicas 2 and replicas 1 was accepted: the definition is another one"
    except kube.Invalid as error:
        _say(f"a wrong job is refused: {error}")
    await _remove(api, name, namespace)
    made = await api.create(ELASTICJOBS, wanted)
    try:
        return await _ended(api, made)
    finally:
        await _remove(api, name, namespace)


async def _ended(api: Kube, made: Obj) -> str:
    meta = made["metadata"]
    told: set[str] = set()
    async for change in api.watch(
        ELASTICJOBS, meta["namespace"], fields=f"metadata.name={meta['name']}", view=_same
    ):
        items = change.items if isinstance(change, kube.Listed) else [change.item]
        for status in (i.get("status") or {} for i in items if _is(i, meta["uid"])):
            for condition in status.get("conditions") or ():
                words = " ".join(str(condition.get(k, "")) for k in ("type", "status", "message"))
                if words not in told:
                    told.add(words)
                    _say(words.strip())
            phase = status.get("phase")
            if phase == "Succeeded":
                return ""
            if phase in ("Failed", "Stopped"):
                return f"the job has ended as {phase}"
    raise AssertionError("a watch does not end")


async def _remove(api: Kube, name: str, namespace: str) -> None:
    """Delete a job, and wait until it is gone."""
    fields = f"metadata.name={name}"
    while await api.delete(ELASTICJOBS, name, namespace, propagation="Background"):
        async for change in api.watch(ELASTICJOBS, namespace, fields=fields, view=_same):
            if isinstance(change, kube.Gone) or (
                isinstance(change, kube.Listed) and not change.items
            ):
                break


def _same(obj: Obj) -> Obj:
    return obj


def _is(obj: Obj, uid: str) -> bool:
    return bool(obj["metadata"]["uid"] == uid)


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


async def _run(args: Any) -> str:
    async with await Kube.connect() as api:
        try:
            async with asyncio.timeout(args.within):
                return await check(
                    api, job(args.name, args.namespace, args.image, args.image_pull_secret)
                )
        except TimeoutError:
            return f"the job has not ended within {args.within:g} s: see the last lines"
        except KubeError as error:
            return str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Say how it went; return 0 if all is well."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrover_operator.selftest", description="Runs a small job to its end."
    )
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--name", required=True, help="of the job")
    parser.add_argument("--image", required=True, help="of its worker: one with elastic-run")
    parser.add_argument("--image-pull-secret", action="append", default=[])
    parser.add_argument("--within", type=float, default=180.0, help="seconds")
    args = parser.parse_args(argv)
    try:
        why = asyncio.run(_run(args))
    except DLRoverError as error:
        why = str(error)
    _say(f"FAILED: {why}" if why else "the job has succeeded: all is well")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
