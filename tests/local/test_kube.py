"""Credentials of the API server that a plugin of kubectl prints."""

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import UnauthenticatedError
from dlrover_py.kubernetes.kinds import PODS
from dlrover_py.protocol.errors import ConfigError
from tests.fakes_kube import FakeCluster, write_kubeconfig
from tests.unit.test_kube import SERVER, cluster, home, read_a_minute_ago  # noqa: F401 - fixtures


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def plugin(path: Path, text: str) -> dict[str, Any]:
    command = str(program(path, text))
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": command}}


GIVES_TOKEN = """echo x >> "$(dirname "$0")/runs"
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
 "status": {"token": "%s"}}' "$(cat "$(dirname "$0")/said")"
"""


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'please log in' >&2; exit 3", "please log in"),
        ("echo hello", "ExecCredential of client.authentication.k8s.io/v1 as JSON, found 6 bytes"),
        (GIVES_TOKEN.replace("}}'", "}'"), "as JSON, found [0-9]+ bytes of another form"),
        (GIVES_TOKEN.replace("token", "nothing"), "it returned neither a token nor a key"),
    ],
)
async def test_a_plugin_that_fails_is_quoted(home: Path, script: str, words: str) -> None:
    (home / "said").write_text("hunter2")
    path = write_kubeconfig(home / "config", SERVER, plugin(home / "plugin", script))
    with pytest.raises(ConfigError, match=words) as told:
        await KubeClient.connect(kubeconfig=path)
    assert "hunter2" not in str(told.value)


async def test_a_plugin_is_asked_again_when_its_token_is_refused(
    home: Path, cluster: FakeCluster
) -> None:
    (home / "said").write_text("admin")
    path = cluster.kubeconfig(home / "config", **plugin(home / "plugin", GIVES_TOKEN))
    async with await KubeClient.connect(kubeconfig=path) as kube:
        await kube.list(PODS)
        await kube.list(PODS)
        assert (home / "runs").read_text().count("x") == 1
        read_a_minute_ago(kube)
        cluster.token = "second"
        (home / "said").write_text("second")
        await asyncio.gather(*(kube.list(PODS) for _ in range(20)))
        assert (home / "runs").read_text().count("x") == 2, "once for all of them"
        read_a_minute_ago(kube)
        cluster.token = "third"
        program(home / "plugin", "echo 'please log in' >&2; exit 3")
        with pytest.raises(UnauthenticatedError, match="please log in"):
            await kube.list(PODS)
