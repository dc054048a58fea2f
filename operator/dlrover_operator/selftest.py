"""Self-test of an installation (`helm test`), which runs a small job from its creation to its end.

``python -m dlrover_operator.selftest`` shows what an inspection of the installed objects cannot
show. The CustomResourceDefinition exists and refuses wrong jobs. The operator sees jobs and may
create masters. Masters may create Pods, and images are found. The test needs nothing from outside
the cluster.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from dlrover_py.kubernetes import errors
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.kubernetes.kinds import ELASTICJOBS, Obj
from dlrover_py.kubernetes.watch import Gone, Listed
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import DLRoverError

LABEL = "elasticjob.dlrover/self-test"
"""Label of the job of a self-test. A job without it belongs to a user and is never deleted."""
KEEP_S = 600
"""Seconds after its end at which the operator removes the job if this process was killed."""


def job(name: str, namespace: str, image: str, pull_secrets: Sequence[str] = ()) -> Obj:
    """Return a job of one node that ends immediately and fits Pod Security ``restricted``.

    Args:
        name: name of the job.
        namespace: namespace of the job.
        image: image of the worker, which must contain ``elastic-run``.
        pull_secrets: names of image pull Secrets.
    """
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
        "metadata": {"name": name, "namespace": namespace, "labels": {LABEL: "true"}},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "ttlSecondsAfterFinished": KEEP_S,
            "replicaSpecs": {
                "worker": {"replicas": 1, "restartCount": 0, "template": {"spec": pod}}
            },
        },
    }


async def check(api: KubeClient, wanted: Obj) -> str:
    """Run a job, delete it, and return the reason why it did not succeed.

    First the API server must refuse an invalid job. The job of an earlier self-test is then
    deleted. A user's job of the same name stays, and is the reason why the test fails. Progress is
    printed. There is no time limit: the caller sets one.

    Args:
        api: client of the API server.
        wanted: the job.

    Returns:
        "" if the job succeeded. If the invalid job is accepted, no job is run.

    Raises:
        KubeError: The API server refuses a call, or does not answer. The job is then deleted if
            that is possible.
    """
    meta = wanted["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    worker = wanted["spec"]["replicaSpecs"]["worker"]
    wrong = wanted["spec"] | {"replicaSpecs": {"worker": worker | {"minReplicas": 2}}}
    try:
        await api.create(ELASTICJOBS, wanted | {"spec": wrong}, dry_run=True)
        return (
            "a job with minReplicas 2 and replicas 1 was accepted: the CRD is not the expected one"
        )
    except errors.InvalidError as error:
        _say(f"an invalid job was refused, as expected: {error}")
    await _remove(api, name, namespace)
    try:
        made = await api.create(ELASTICJOBS, wanted)
    except errors.AlreadyExistsError as error:
        return (
            f"{error}: expected no job {name} in the namespace {namespace}, found one that is not "
            f"of a self-test (it has no label {LABEL}); give it another name"
        )
    try:
        return await _ended(api, made)
    finally:
        await _remove(api, name, namespace)


async def _ended(api: KubeClient, made: Obj) -> str:
    """Print new conditions until the job ends; return the reason why it failed, or "".

    There is no time limit: for a job that was deleted, the call never returns.
    """
    meta = made["metadata"]
    printed: set[str] = set()
    async for change in api.watch(
        ELASTICJOBS, meta["namespace"], fields=f"metadata.name={meta['name']}", view=_same
    ):
        items = change.items if isinstance(change, Listed) else [change.item]
        for status in (i.get("status") or {} for i in items if _is(i, meta["uid"])):
            for condition in status.get("conditions") or ():
                line = " ".join(str(condition.get(k, "")) for k in ("type", "status", "message"))
                if line not in printed:
                    printed.add(line)
                    _say(line.strip())
            phase = status.get("phase")
            if phase == "Succeeded":
                return ""
            if phase in ("Failed", "Stopped"):
                return f"the job ended with phase {phase}"
    raise AssertionError("a watch does not end")


async def _remove(api: KubeClient, name: str, namespace: str) -> None:
    """Delete the job of a self-test and wait until it no longer exists; nothing if there is none.

    Its Pods may still exist then. A user's job of this name stays. The deletion is repeated if
    another self-test's job appears. There is no time limit.

    Raises:
        KubeError: The API server refuses the deletion, or does not answer.
    """
    labels, fields = f"{LABEL}=true", f"metadata.name={name}"
    while found := await api.list(ELASTICJOBS, namespace, labels=labels, fields=fields):
        uid = found[0]["metadata"]["uid"]
        await api.delete(ELASTICJOBS, name, namespace, uid=uid, propagation="Background")
        async for change in api.watch(
            ELASTICJOBS, namespace, labels=labels, fields=fields, view=_same
        ):
            if isinstance(change, Gone) or (isinstance(change, Listed) and not change.items):
                break


def _same(obj: Obj) -> Obj:
    """Return an object as it is."""
    return obj


def _is(obj: Obj, uid: str) -> bool:
    """Return whether an object has this uid."""
    return bool(obj["metadata"]["uid"] == uid)


def _say(line: str) -> None:
    """Print a line immediately."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _run(args: Any) -> str:
    """Run the job within the time limit; return the reason why it failed, or "".

    A refusal of the API server, and the passing of the limit, are such reasons.

    Raises:
        ConfigError: No API server is configured, or its configuration cannot be used.
    """
    async with await KubeClient.connect() as api:
        try:
            async with asyncio.timeout(args.within):
                return await check(
                    api, job(args.name, args.namespace, args.image, args.image_pull_secret)
                )
        except TimeoutError:
            return f"the job did not end within {args.within:g} s: see the last lines"
        except KubeError as error:
            return str(error)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-test and print the result; return 0 if the job succeeded, otherwise 1."""
    parser = argparse.ArgumentParser(
        prog="python -m dlrover_operator.selftest", description="Runs a small job to its end."
    )
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--name", required=True, help="name of the job")
    parser.add_argument("--image", required=True, help="image of the worker, with elastic-run")
    parser.add_argument("--image-pull-secret", action="append", default=[])
    parser.add_argument("--within", type=float, default=180.0, help="time limit in seconds")
    args = parser.parse_args(argv)
    try:
        why = asyncio.run(_run(args))
    except DLRoverError as error:
        why = str(error)
    _say(f"FAILED: {why}" if why else "the test passed: the job succeeded")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
