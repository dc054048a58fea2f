"""Kubeconfigs are read as kubectl reads them, and its requests are ours: kubectl itself judges."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from dlrover_py.kubernetes import kubeconfig
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.errors import KubeError
from dlrover_py.protocol.errors import ConfigError
from tests.certificates import issue
from tests.kube_server import kubectl

AT_ONCE = 4


@pytest.fixture(scope="module")
def program() -> Path:
    found = kubectl()
    if isinstance(found, str):
        assert os.environ.get("DLROVER_REQUIRE_CLUSTER") != "1", found
        pytest.skip(found)
    return found


async def run(
    program: Path, env: dict[str, str], *argv: str, within_s: float = 60.0
) -> tuple[int, str]:
    """Exit code and standard output of kubectl; it is killed after a while."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        program, *argv, env=env, stdin=null, stdout=pipe, stderr=null
    )
    try:
        async with asyncio.timeout(within_s):
            out, _ = await process.communicate()
            return process.returncode or 0, out.decode()
    except TimeoutError:
        return -1, ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# --- what is read ---

A, B = "http://a:1", "http://b:2"


def config(server: str = A, user: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"} if user is None else user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
        **more,
    }


FILES: list[list[Any]] = [
    [config()],
    [config(A), config(B)],
    [config(A, **{"current-context": "z"}), config(B)],
    [config(A, **{"current-context": ""}), config(B)],
    [config(A, **{"current-context": None}), config(B)],
    [config(A, {"token": "t"}), config(A, {"username": "a", "password": "b"})],
    ["", config()],
    [" \n", "# words\n", "---\n", "null\n", config()],
    ["just words", config()],
    ["[]"],
    [config(users=None)],
    [config(users={})],
    [config(clusters=None, contexts=None)],
    [config(users=[{"name": "u"}, {"name": "u"}])],
    [config(users=[None, {"name": "v", "user": None}])],
    [config(user={"token": 5})],
    [config(user={"token": None, "tokenFile": "/t"})],
    [config(user={"as": "a", "as-uid": "5", "as-groups": ["g"], "as-user-extra": {"k": ["v"]}})],
    [config(user={"exec": {"apiVersion": "v", "command": "/x", "args": None, "env": None}})],
    [config(user={"exec": {"apiVersion": "v", "command": "x", "env": [{"name": "A"}]}})],
    [config(kind="Config", apiVersion="v1", huh=1)],
    [config(kind="Pod")],
    [config(apiVersion="v2")],
    [config(contexts=[{"name": 5, "context": {}}])],
    [config(contexts=[{"context": {"cluster": "c", "namespace": None}}])],
    [yaml.safe_dump(config()) + "---\n" + yaml.safe_dump(config(B))],
    [yaml.safe_dump(config()).replace("token: t", "token: 2024-01-01")],
    [yaml.safe_dump(config()).replace("token: t", "token: 12:30")],
    [yaml.safe_dump(config()).replace("token: t", "token: on")],
    [yaml.safe_dump(config()).replace("token: t", "token: .inf")],
    [json.dumps(config())],
]

NAMES = st.sampled_from(["a", "b", ""])


def entries(part: str, inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    entry = st.fixed_dictionaries({}, optional={"name": NAMES, part: st.none() | inner})
    return st.none() | st.lists(st.none() | entry, max_size=3)


SERVERS = st.fixed_dictionaries({}, optional={"server": st.sampled_from([A, B, "", None])})
USERS = st.fixed_dictionaries(
    {}, optional={"token": NAMES, "as": NAMES | st.none(), "as-uid": NAMES}
)
CONTEXTS = st.fixed_dictionaries({}, optional={"cluster": NAMES, "user": NAMES, "namespace": NAMES})
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "clusters": entries("cluster", SERVERS),
        "users": entries("user", USERS),
        "contexts": entries("context", CONTEXTS),
        "current-context": NAMES | st.none(),
    },
)


def written(folder: Path, files: Sequence[Any]) -> list[str]:
    paths = []
    for number, content in enumerate(files):
        path = folder / str(number) / "config"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        paths.append(str(path))
    return paths


def ours(paths: Sequence[str]) -> Any:
    """As ``kubectl config view`` shows it; None if it is refused."""

    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            value = value.model_dump(by_alias=True, exclude_defaults=True)
        return value

    try:
        found = kubeconfig.read(paths)
    except ConfigError:
        return None
    return {
        "clusters": {name: plain(part) for name, part in found.clusters.items()},
        "users": {name: plain(part) for name, part in found.users.items()},
        "contexts": {name: plain(part) for name, part in found.contexts.items()},
        "current-context": found.current,
    }


def theirs(code: int, out: str) -> Any:
    if code:
        return None
    said = json.loads(out)
    lists = (("clusters", "cluster"), ("users", "user"), ("contexts", "context"))
    found: dict[str, Any] = {
        kind: {item["name"]: without_defaults(item[part]) for item in said[kind] or ()}
        for kind, part in lists
    }
    return found | {"current-context": said["current-context"]}


def without_defaults(part: Any) -> Any:
    """kubectl shows some fields of a plugin that are empty, and all those that are required."""
    plugin = part.get("exec")
    if plugin is not None:
        kept = {k: v for k, v in plugin.items() if v not in (None, False, "")}
        kept["env"] = [{k: v for k, v in one.items() if v} for one in kept.get("env") or ()]
        if kept.get("interactiveMode") == "IfAvailable":
            del kept["interactiveMode"]
        part = part | {"exec": {k: v for k, v in kept.items() if v}}
    return {k: v for k, v in part.items() if v not in ("", None)}


async def agrees(program: Path, folder: Path, files: Sequence[Any]) -> None:
    paths = written(folder, files)
    env = {"KUBECONFIG": ":".join(paths), "HOME": str(folder)}
    told = theirs(*await run(program, env, "config", "view", "--raw", "-ojson"))
    assert ours(paths) == told, files


async def test_what_is_read_is_what_kubectl_reads(program: Path, tmp_path: Path) -> None:
    # no assert: agrees() compares both
    for number, files in enumerate(FILES):
        await agrees(program, tmp_path / str(number), files)


@settings(max_examples=25)
@given(st.lists(CONFIGS, min_size=1, max_size=3))
def test_files_at_random_are_read_as_kubectl_reads_them(
    program: Path, tmp_path_factory: pytest.TempPathFactory, files: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("random")
    # no assert: agrees() compares both
    asyncio.run(agrees(program, folder, files))


# --- what is asked ---


@asynccontextmanager
async def recorder(folder: Path) -> AsyncIterator[tuple[int, list[dict[str, list[str]]]]]:
    """A server on TLS; its port, and the headers of each request."""
    made = issue(folder, "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    seen: list[dict[str, list[str]]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers: dict[str, list[str]] = {}
        for line in head.splitlines()[1:-1]:
            name, _, value = line.partition(": ")
            headers.setdefault(name.lower(), []).append(value)
        seen.append(headers)
        body = b"Content-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
        writer.write(b"HTTP/1.1 200 OK\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1], seen


PLUGIN = """#!/bin/sh
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
 "status": {"token": "%s"}}' "$WORD"
"""
EXEC: dict[str, Any] = {
    "apiVersion": "client.authentication.k8s.io/v1",
    "command": "./plugin",
    "interactiveMode": "Never",
    "env": [{"name": "WORD", "value": "of-plugin"}],
}
EXTRA = {"example.org/Scopes": ["a", "b"], "odd key%": ["c"]}

WHO: list[tuple[str, Any]] = [
    ("a token", {"token": "t"}),
    ("a token's file, from its own folder", {"tokenFile": "token"}),
    ("the file counts before the token", {"token": "t", "tokenFile": "token"}),
    ("a token whose file is missing", {"token": "t", "tokenFile": "nowhere"}),
    ("a file that is missing", {"tokenFile": "nowhere"}),
    ("a password", {"username": "ä", "password": "p:q"}),
    ("a name alone", {"username": "a"}),
    ("a password and a token", {"username": "a", "password": "p", "token": "t"}),
    ("a plugin, from its own folder", {"exec": EXEC}),
    ("a token counts before a plugin", {"exec": EXEC, "token": "t"}),
    ("a plugin without a command", {"exec": EXEC | {"command": ""}}),
    ("a plugin that is not there", {"exec": EXEC | {"command": "./nowhere"}}),
    ("a plugin of another version", {"exec": EXEC | {"apiVersion": EXEC["apiVersion"] + "beta1"}}),
    ("as another user", {"token": "t", "as": "jane"}),
    ("as another in groups", {"as": "jane", "as-uid": "7", "as-groups": ["g", "h"], "token": "t"}),
    ("as another with more", {"token": "t", "as": "jane", "as-user-extra": EXTRA}),
    ("groups without a user", {"token": "t", "as-groups": ["g"]}),
    ("a cloud's own provider", {"auth-provider": {"name": "gcp"}}),
    ("both ways of a certificate", {"client-certificate": "a", "client-certificate-data": "YQ=="}),
]


async def test_requests_are_those_of_kubectl(program: Path, tmp_path: Path) -> None:
    for number, (what, user) in enumerate(WHO):
        theirs, ours = await both(program, tmp_path / str(number), user)
        assert ours == theirs, what


async def both(program: Path, folder: Path, user: Any) -> list[Any]:
    """What kubectl and we say of who we are; None for nothing at all."""
    folder.mkdir()
    (folder / "token").write_text("of-file\n")
    (folder / "plugin").write_text(PLUGIN)
    (folder / "plugin").chmod(0o755)
    found = []
    async with recorder(folder) as (port, seen):
        where = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
        document = config(user=user, clusters=[{"name": "c", "cluster": where}])
        (folder / "config").write_text(yaml.safe_dump(document, allow_unicode=True))
        env = {
            "KUBECONFIG": str(folder / "config"),
            "HOME": str(folder),
            "PATH": os.environ["PATH"],
        }
        await run(program, env, "get", "--raw", "/version")
        found.append(said(seen))
        seen.clear()
        try:
            async with await KubeClient.connect(kubeconfig=folder / "config") as kube:
                await kube._json("GET", "/version")
        except (ConfigError, KubeError):
            assert not seen
        found.append(said(seen))
    return found


def said(seen: list[dict[str, list[str]]]) -> Any:
    if not seen:
        return None
    names = [name for name in seen[0] if name == "authorization" or name.startswith("impersonate-")]
    return {name: seen[0][name] for name in names}


# --- through which proxy ---

ROADS: list[tuple[str, str, str]] = [
    # server, NO_PROXY, the variable that names the proxy
    ("https://api.test", "", "HTTPS_PROXY"),
    ("https://api.test", "", "https_proxy"),
    ("https://api.test", "", "HTTP_PROXY"),
    ("https://api.test", "", "ALL_PROXY"),
    ("http://api.test", "", "HTTP_PROXY"),
    ("https://api.test:6443", "api.test", "HTTPS_PROXY"),
    ("https://api.test:6443", "API.TEST", "HTTPS_PROXY"),
    ("https://api.test:6443", "other, api.test ,", "HTTPS_PROXY"),
    ("https://api.test:6443", "pi.test", "HTTPS_PROXY"),
    ("https://a.b.test:6443", "b.test", "HTTPS_PROXY"),
    ("https://a.b.test:6443", ".b.test", "HTTPS_PROXY"),
    ("https://a.b.test:6443", "*.b.test", "HTTPS_PROXY"),
    ("https://b.test:6443", ".b.test", "HTTPS_PROXY"),
    ("https://b.test:6443", "b.test:6443", "HTTPS_PROXY"),
    ("https://b.test:6443", "b.test:443", "HTTPS_PROXY"),
    ("https://b.test", "b.test:443", "HTTPS_PROXY"),
    ("https://b.test:6443", "*", "HTTPS_PROXY"),
    ("https://b.test:6443", "*b.test", "HTTPS_PROXY"),
    ("https://192.0.2.1:6443", "192.0.2.0/24", "HTTPS_PROXY"),
    ("https://192.0.2.1:6443", "192.0.3.0/24", "HTTPS_PROXY"),
    ("https://192.0.2.1:6443", "192.0.2.1", "HTTPS_PROXY"),
    ("https://192.0.2.1:6443", "192.0.2.1:443", "HTTPS_PROXY"),
    ("https://192.0.2.1:6443", "2.1", "HTTPS_PROXY"),
    ("https://192.0.2.1:6443", "192.0.2.0/x", "HTTPS_PROXY"),
    ("https://[2001:db8::1]:6443", "2001:db8::/32", "HTTPS_PROXY"),
    ("https://[2001:db8::1]:6443", "[2001:db8::1]", "HTTPS_PROXY"),
    ("https://[2001:db8::1]:6443", "[2001:db8::1]:6443", "HTTPS_PROXY"),
    ("https://[2001:db8::1]:6443", "2001:db8::1", "HTTPS_PROXY"),
    ("https://localhost:1", "", "HTTPS_PROXY"),
    ("https://127.0.0.9:1", "", "HTTPS_PROXY"),
    ("https://[::1]:1", "", "HTTPS_PROXY"),
]


async def test_a_proxy_is_used_where_kubectl_uses_it(program: Path, tmp_path: Path) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        reached = False

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal reached
            reached = True
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        address, exceptions, variable = ROADS[number]
        where = {"server": address, "insecure-skip-tls-verify": address.startswith("https")}
        path = tmp_path / f"config-{number}"
        path.write_text(yaml.safe_dump(config(clusters=[{"name": "c", "cluster": where}])))
        async with turns, await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            proxy = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            env = {"KUBECONFIG": str(path), "HOME": str(tmp_path), variable: proxy}
            env["NO_PROXY"] = exceptions
            found = kubeconfig.environments_proxy(address, env)
            within_s = 60.0 if found else 3.0  # nothing answers at these addresses
            await run(program, env, "get", "--raw", "/version", within_s=within_s)
        assert found == (f"http://{proxy}" if reached else ""), ROADS[number]

    await asyncio.gather(*map(one, range(len(ROADS))))
