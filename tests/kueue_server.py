"""The real Kueue for tests: its controllers beside an API server, as a child process.

The program and its definitions lie in one folder: ``DLROVER_KUEUE``, or the one that
``python -m tests.cluster.lab kueue`` has built. Nothing calls Kueue's webhooks.
"""

import asyncio
import base64
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import NotFoundError
from dlrover_py.kubernetes.kinds import (
    CRDS,
    KUEUE,
    LOCAL_QUEUES,
    NAMESPACES,
    RESOURCE_FLAVORS,
    SECRETS,
    WORKLOADS,
    Kind,
)
from tests.process.harness import free_port

SPACE, SERVICE, SECRET = "kueue-system", "kueue-webhook-service", "kueue-webhook-server-cert"
HOOKS = [
    Kind("admissionregistration.k8s.io", "v1", f"{name.lower()}s", name, namespaced=False)
    for name in ("ValidatingWebhookConfiguration", "MutatingWebhookConfiguration")
]
CLUSTER_QUEUES = Kind(KUEUE, "v1beta2", "clusterqueues", "ClusterQueue", namespaced=False)
WITHIN_S = 180.0


def folder() -> Path | str:
    """Return the folder of the program, or the reason why there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dlrover-py/cluster"
    given = os.environ.get("DLROVER_KUEUE")
    found = [Path(given)] if given else sorted((cache / "bin").glob("kueue-*"))
    if found and (found[-1] / "kueue").is_file():
        return found[-1]
    return "no Kueue: `python -m tests.cluster.lab kueue` builds it"


@asynccontextmanager
async def kueue(at: Path, program: Path, kubeconfig: Path, kube: KubeClient) -> AsyncIterator[None]:
    """Install Kueue's definitions, and run its controllers until they act.

    Args:
        at: folder for its files.
        program: folder of the program.
        kubeconfig: kubeconfig of an administrator.
        kube: client of the same API server.
    """
    for file in sorted((program / "crds").glob("*.yaml")):
        document = yaml.safe_load(file.read_text())
        # Kueue insists on a conversion webhook. One version is used, so nobody calls it.
        client = {"url": "https://127.0.0.1:1/convert"}
        hook = {"clientConfig": client, "conversionReviewVersions": ["v1"]}
        document["spec"]["conversion"] = {"strategy": "Webhook", "webhook": hook}
        document.pop("status", None)
        await kube.apply(CRDS, document, manager="test")
    async with asyncio.timeout(WITHIN_S):
        while not await _served(kube):
            await asyncio.sleep(0.05)
    await kube.create(NAMESPACES, {"metadata": {"name": SPACE}})
    await kube.create(SECRETS, {"metadata": {"name": SECRET, "namespace": SPACE}})
    for kind, name in zip(HOOKS, ("validating", "mutating"), strict=True):
        await kube.create(kind, {"metadata": {"name": f"kueue-{name}-webhook-configuration"}})
    certificates = at / "certificates"
    certificates.mkdir(parents=True)
    config: dict[str, Any] = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{free_port()}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": free_port(), "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": ["batch/job"]},
    }
    (at / "config.yaml").write_text(yaml.safe_dump(config))
    command = [
        str(program / "kueue"),
        f"--config={at / 'config.yaml'}",
        "--feature-gates=VisibilityOnDemand=false",
    ]
    env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    with (at / "kueue.log").open("wb") as out:
        running = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    mounting = asyncio.create_task(_mount(kube, certificates))
    try:
        yield
        assert running.poll() is None, (at / "kueue.log").read_text()[-3000:]
    finally:
        mounting.cancel()
        running.kill()
        running.wait()


async def _served(kube: KubeClient) -> bool:
    """Return whether all kinds are served that tests use."""
    try:
        for kind in (WORKLOADS, LOCAL_QUEUES, RESOURCE_FLAVORS, CLUSTER_QUEUES):
            await kube.list(kind)
    except NotFoundError:
        return False
    return True


async def _mount(kube: KubeClient, certificates: Path) -> None:
    """Write the Secret of the certificate into its folder, as a kubelet does."""
    while True:
        held = await kube.get(SECRETS, SECRET, SPACE)
        for name, value in (held.get("data") or {}).items():
            (certificates / name).write_bytes(base64.b64decode(value))
        await asyncio.sleep(0.2)
