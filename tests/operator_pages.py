"""The operator's pages at a port of this machine, about the jobs of a small API server."""

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from dlrover_operator import dashboard
from dlrover_operator.loop import Operator
from dlrover_operator.manifests import Options
from dlrover_operator.observed import Key
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.kinds import ELASTICJOBS, NAMESPACES, Obj
from dlrover_py.net import http_server
from dlrover_py.protocol import names
from dlrover_py.protocol.status import JobStatus, Training
from tests.fakes_kube import fake_cluster

TOKEN = "token-of-ann"


class SeenJobs(Operator):
    """An operator that has seen these jobs."""

    def __init__(self, api: KubeClient, jobs: Sequence[Obj]) -> None:
        super().__init__(api, Options(image="m"))
        self._seen = jobs

    @property
    def jobs(self) -> dict[Key, Obj]:
        return {(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in self._seen}


def elastic_job(
    namespace: str, name: str, status: JobStatus, *, queue: str = "", **more: Any
) -> Obj:
    """Return an ElasticJob with the status of a master.

    Args:
        namespace: its namespace.
        name: its name.
        status: the status that its master has published.
        queue: queue of Kueue; empty for none.
        more: further fields of the status, which the operator writes.
    """
    training = Training.of(status).model_dump(mode="json", by_alias=True)
    meta = {
        "namespace": namespace, "name": name, "uid": f"{namespace}-{name}", "resourceVersion": "1",
        "labels": {names.LABEL_QUEUE: queue} if queue else {},
        "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(status.started_at)),
    }  # fmt: skip
    told = {"phase": status.phase.value, "training": training}
    return {"metadata": meta, "spec": {}, "status": told | more}


def behind_proxy(pages: ASGIApp, prefix: str) -> ASGIApp:
    """Return an application that serves pages as a proxy does that removes a prefix."""

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"].startswith(f"{prefix}/"), scope["path"]
        path = scope["path"].removeprefix(prefix)
        await pages({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    return proxy


@contextmanager
def operator_pages(jobs: Sequence[Obj], prefix: str = "") -> Iterator[str]:
    """Serve the pages to a viewer who may list all jobs and whose token is ``TOKEN``.

    Yields the address.

    Args:
        jobs: the jobs.
        prefix: begin of each path, which a proxy removes; empty without a proxy.
    """
    over = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):

        async def serve() -> None:
            async with fake_cluster(Path(folder)) as (cluster, kube):
                cluster.users[TOKEN] = {"username": "ann", "groups": ["ml"]}, []
                cluster.listers["ann"] = {""}
                for job in jobs:
                    cluster.put(NAMESPACES, {"metadata": {"name": job["metadata"]["namespace"]}})
                    cluster.put(ELASTICJOBS, job)
                pages = dashboard.app(SeenJobs(kube, jobs), kube, time.monotonic)
                serving = http_server.server(behind_proxy(pages, prefix) if prefix else pages)
                answers = asyncio.create_task(serving.serve(sockets=[listener]))
                await asyncio.to_thread(over.wait)
                serving.force_exit = True
                serving.end()
                await answers

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}{prefix}/"
        finally:
            over.set()
            thread.join()
