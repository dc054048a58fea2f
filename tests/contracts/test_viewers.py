"""Whose token it is and what its user may list: as a real API server says it."""

import asyncio
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from dlrover_operator import dashboard
from dlrover_operator.viewers import AUDIENCE
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import (
    ELASTICJOBS,
    NAMESPACES,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    Kind,
    Obj,
)
from tests.contracts.test_crd import cluster
from tests.contracts.test_crd import job as job_of
from tests.kube_server import USERS
from tests.operator_pages import SeenJobs
from tests.process.test_operator import SOON
from tests.unit.test_cluster_dashboard import Browser, job


async def may_see(kube: KubeClient, space: str, **subject: str) -> None:
    """Let somebody list and get the jobs of a namespace."""
    meta = {"name": "lists-jobs", "namespace": space}
    resource = {"apiGroups": [ELASTICJOBS.group], "resources": [ELASTICJOBS.plural]}
    rule = resource | {"verbs": ["get", "list"]}
    await kube.create(ROLES, {"metadata": meta, "rules": [rule]})
    role = {"apiGroup": ROLES.group, "kind": "Role", "name": "lists-jobs"}
    binding = {"metadata": meta, "roleRef": role, "subjects": [subject]}
    await kube.create(ROLE_BINDINGS, binding)


async def account_token(kube: KubeClient, space: str, audience: str) -> str:
    """Return a token of a service account that is made for one audience."""
    kind = Kind("", "v1", "serviceaccounts/viewer/token", "TokenRequest")
    asked: Obj = {
        "apiVersion": "authentication.k8s.io/v1",
        "metadata": {"namespace": space},
        "spec": {"audiences": [audience], "expirationSeconds": 600},
    }
    return str((await kube.create(kind, asked))["status"]["token"])


async def until_shown(app: ASGIApp, token: str, shown: str) -> str:
    """Enter until the page has this job, and return the page: rights are known a little later."""
    async with asyncio.timeout(SOON):
        while True:
            text = (await (await entered(app, token)).call("GET", "/")).text
            if f">{shown}</a>" in text:
                return text
            await asyncio.sleep(0.05)


async def entered(app: ASGIApp, token: str) -> Browser:
    browser = Browser(app)
    assert (await browser.enter(token)).status == 303
    return browser


async def test_users_of_a_real_api_server_see_the_jobs_that_they_may_see(kube_api: Path) -> None:
    async with cluster(kube_api) as (kube, one):
        other = (await kube.create(NAMESPACES, {"metadata": {"generateName": "crd-"}}))["metadata"]
        user: dict[str, Any] = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User"}
        await may_see(kube, one, **user, name="ann")
        account = {"metadata": {"name": "viewer", "namespace": other["name"]}}
        await kube.create(SERVICE_ACCOUNTS, account)
        await may_see(
            kube, other["name"], kind="ServiceAccount", name="viewer", namespace=other["name"]
        )
        made = await kube.create(ELASTICJOBS, job_of(one))
        jobs = [made, job(one, "first"), job(other["name"], "second")]
        app = dashboard.app(SeenJobs(kube, jobs), kube, asyncio.get_running_loop().time)

        assert ">second<" not in await until_shown(app, USERS["ann"], "first")
        ann, bob = [await entered(app, USERS[name]) for name in ("ann", "bob")]
        assert "<td>" not in (await bob.call("GET", "/")).text
        path = f"/jobs/{one}/{made['metadata']['name']}/"
        assert [(await who.call("GET", path)).status for who in (ann, bob)] == [200, 404]
        viewer = await account_token(kube, other["name"], AUDIENCE)
        assert ">first<" not in await until_shown(app, viewer, "second")
        for wrong in (await account_token(kube, other["name"], "vault"), "no-token", "a.b.c"):
            assert (await Browser(app).enter(wrong)).status == 401
