"""The parts of the client of Kubernetes that need no cluster, and how it finds one."""

import asyncio
import base64
import json
import math
import os
import ssl
import time
from collections.abc import AsyncIterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.kubernetes import kinds
from dlrover_py.kubernetes.auth import ServiceAccountAccess
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.kubernetes.clock import _PROMPT_S, ServerClock
from dlrover_py.kubernetes.errors import (
    LONGEST_RETRY_S,
    AlreadyExistsError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    ServerDownError,
    ThrottledError,
    UnauthenticatedError,
    refusal_of,
)
from dlrover_py.kubernetes.kinds import DEPLOYMENTS, ELASTICJOBS, NODES, PODS, SECRETS
from dlrover_py.kubernetes.watch import ClientTimes, WatchState
from dlrover_py.kubernetes.wire import cut_at, split_lines, warnings_in, watch_event
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    ExitCode,
    TransientError,
    UnauthorizedError,
)
from tests.certificates import Certificates, issue
from tests.fakes_kube import FakeCluster, write_kubeconfig

# --- pure parts ---


def dated(seconds: float) -> str:
    return formatdate(seconds, usegmt=True)


@given(
    off=st.floats(-86_400, 86_400),
    answers=st.lists(
        st.tuples(st.floats(0.01, 60), st.floats(0, 1.9), st.floats(0, 1)), min_size=1, max_size=20
    ),
)
def test_the_time_is_the_servers_within_what_an_answer_takes(
    off: float, answers: list[tuple[float, float, float]]
) -> None:
    """However wrong the clock of this machine is: ``off`` is what the server's is ahead of it."""
    here, before = [0.0], time.time()
    clock = ServerClock(lambda: here[0])
    for wait, took, part in answers:
        here[0] += wait
        stamped = before + off + here[0] + part * took
        here[0] += took
        clock.take_date(dated(math.floor(stamped)), took)
        assert abs(clock() - (before + off + here[0])) <= 1 + took + 0.1
    right = clock()
    here[0] += 5
    clock.take_date(dated(0), _PROMPT_S + 1)
    odd = f"Mon, 01 Jan 2024 00:00:00 +{'9' * 20}", f"Mon, 01 Jan {'2' * 20} 00:00:00 GMT"
    for word in ("yesterday", "", *odd):
        clock.take_date(word, 0.0)
    assert clock() == pytest.approx(right + 5), "late answers and other words are not believed"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_step_of_the_time_is_believed_once_two_answers_in_a_row_say_so(step: float) -> None:
    """One server of three may be wrong; of this machine's own clock the first answer decides."""
    clock = ServerClock()
    right = math.floor(clock()) + 7200.0
    clock.take_date(dated(right), 0.1)
    assert clock() == pytest.approx(right, abs=2)
    for said in (right + step, right, right + step, right + 2 * step):
        clock.take_date(dated(said), 0.1)
        assert clock() == pytest.approx(right, abs=2)
        assert clock.disputed == (said != right)
    clock.take_date(dated(right + 2 * step + 2), 0.1)
    assert clock() == pytest.approx(right + 2 * step, abs=4)
    assert not clock.disputed


def test_paths() -> None:
    assert PODS.path() == "/api/v1/pods"
    assert PODS.path("ns", "a", "log") == "/api/v1/namespaces/ns/pods/a/log"
    assert NODES.path("ns", "a") == "/api/v1/nodes/a"
    assert DEPLOYMENTS.path("ns") == "/apis/apps/v1/namespaces/ns/deployments"
    assert PODS.path("a/../b", "c?d") == "/api/v1/namespaces/a%2F..%2Fb/pods/c%3Fd"
    assert ELASTICJOBS.api_version == "elastic.iml.github.io/v1alpha1"


@pytest.mark.parametrize(
    ("code", "reason", "kind", "transient"),
    [
        (400, "BadRequest", InvalidError, False),
        (401, "Unauthorized", UnauthenticatedError, False),
        (403, "Forbidden", ForbiddenError, False),
        (404, "NotFound", NotFoundError, False),
        (408, "Timeout", ServerDownError, True),
        (409, "AlreadyExists", AlreadyExistsError, False),
        (409, "Conflict", ConflictError, False),
        (410, "Expired", ExpiredError, False),
        (410, "Gone", ExpiredError, False),
        (413, "RequestEntityTooLarge", KubeError, False),
        (422, "Invalid", InvalidError, False),
        (429, "TooManyRequests", ThrottledError, True),
        (500, "InternalError", ServerDownError, True),
        (503, "ServiceUnavailable", ServerDownError, True),
        (504, "Timeout", ServerDownError, True),
    ],
)
def test_refusals(code: int, reason: str, kind: type[KubeError], transient: bool) -> None:
    error = refusal_of(code, {"message": "its words", "reason": reason}, "/path")
    assert type(error) is kind
    assert (str(error), error.status, error.reason) == ("its words", code, reason)
    assert isinstance(error, TransientError) == transient


def test_a_refusal_without_words_says_where() -> None:
    assert str(refusal_of(418, {}, "/api/v1/pods")) == "HTTP 418 without a message (/api/v1/pods)"


def test_exit_codes_of_programs() -> None:
    assert refusal_of(503, {}, "/").exit_code == ExitCode.UNREACHABLE
    assert refusal_of(401, {}, "/").exit_code == ExitCode.USAGE
    assert isinstance(refusal_of(401, {}, "/"), UnauthorizedError)


@given(st.lists(st.text("ab\n", max_size=8).map(str.encode), max_size=12))
def test_lines_are_whole_however_they_are_cut(chunks: list[bytes]) -> None:
    async def given_chunks() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def read() -> list[bytes]:
        return [line async for line in split_lines(given_chunks(), 1 << 20)]

    assert asyncio.run(read()) == b"".join(chunks).split(b"\n")[:-1]


@pytest.mark.parametrize(
    "line", [b"<html>", b"[]", b"{}", b'{"type": "ADDED"}', b'{"type": "AD', b""]
)
def test_what_is_no_event_is_said(line: bytes) -> None:
    with pytest.raises(ServerDownError, match=r"expected .*; is a proxy in between"):
        watch_event(line)


NESTED = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab[]{}",\\\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='a[}"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(NESTED, st.integers(0, 6))
def test_json_is_cut_below_so_many_levels(value: Any, levels: int) -> None:
    def cut(value: Any, left: int) -> Any:
        if isinstance(value, dict):
            return {k: cut(v, left - 1) for k, v in value.items()} if left else None
        if isinstance(value, list):
            return [cut(v, left - 1) for v in value] if left else None
        return value

    for ascii_only in (True, False):
        data = json.dumps(value, ensure_ascii=ascii_only).encode()
        assert json.loads(cut_at(levels, data)) == cut(value, levels)


@pytest.mark.parametrize("deep", [b"[" * 9000 + b"]" * 9000, b'{"a":' * 9000 + b"1" + b"}" * 9000])
def test_json_of_any_depth_is_read(deep: bytes) -> None:
    kind, obj = watch_event(b'{"type": "ADDED", "object": {"deep": %s, "other": 1}}' % deep)
    assert (kind, obj["other"]) == ("ADDED", 1)
    with pytest.raises(ServerDownError, match="expected JSON"):
        watch_event(b"[" * 9000)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ('299 - "plain"', ["plain"]),
        (r'299 - "unknown field \"spec.x\""', ['unknown field "spec.x"']),
        (r'299 - "a, b" , 299 agent "c\\d"', ["a, b", r"c\d"]),
        ("199 - none", []),
        ('299 - "no end', []),
    ],
)
def test_warnings_of_a_server(header: str, words: list[str]) -> None:
    assert list(warnings_in([header])) == words


async def test_waits_grow_to_the_longest_and_fall_when_it_was_steady() -> None:
    course = WatchState(ClientTimes(steady_s=0.0), lambda _: None)
    error = ServerDownError("no", status=500)
    for expected in (0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0):
        assert expected / 2 <= course.failed(error) <= expected
    course.connected()
    assert course.ended() == 0.0
    assert course.failed(error) <= 0.8


async def test_throttled_watches_wait_as_they_were_told_and_do_not_come_back_as_one() -> None:
    course = WatchState(ClientTimes(), lambda _: None)
    waits = [course.failed(ThrottledError("slow", retry_after=50.0)) for _ in range(100)]
    assert all(50.0 <= wait_s <= 1.25 * 50.0 for wait_s in waits)
    assert max(waits) - min(waits) > 5.0
    assert ThrottledError("in an hour", retry_after=3600.0).retry_after <= 1.25 * LONGEST_RETRY_S


async def test_a_server_that_starts_and_knows_no_rights_yet_costs_seconds() -> None:
    course = WatchState(ClientTimes(), lambda _: None)
    waits = [course.failed(ForbiddenError("not yet", status=403)) for _ in range(20)]
    assert sum(waits[:4]) <= 0.8 + 1.6 + 3.2 + 6.4, "it is asked again soon"
    assert all(15 <= wait_s <= 30 for wait_s in waits[6:]), "and seldom, if it is for a person"


async def test_each_trouble_is_told_once() -> None:
    told: list[str] = []
    course = WatchState(ClientTimes(), lambda error: told.append(str(error)))
    for error in (
        ServerDownError("a"),
        ServerDownError("b"),
        ForbiddenError("c", status=403),
        ServerDownError("d"),
    ):
        course.failed(error)
    course.connected()
    course.connected()
    assert told == ["a", "c", "d", "None"]


# --- kubeconfigs ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("KUBE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        yield cluster


def access_of(kube: KubeClient) -> Any:
    return kube._access


def read_a_minute_ago(kube: KubeClient) -> None:
    """Have the client's credentials been read so long ago that they may be read again."""
    access_of(kube)._read_at -= 60


def no_longer_good(kube: KubeClient) -> None:
    """Have the time pass for which the client's credentials are used without a look."""
    access_of(kube)._valid_until = 0.0


SERVER = {"server": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it names no context: set current-context"),
        ("just words", "expected a kubeconfig"),
        ("users: {}", "users: found a mapping {}"),
        ("users: [{name: u, user: {token: 5}}]", "users[0].user.token: found a number 5"),
        ("users: [{name: u}, {name: u}]", "the name 'u' appears twice"),
        ("kind: Pod", "found kind Pod of v1: expected Config of v1"),
        ("a: [b", "expected ',' or ']'"),
        ("kind: Config", "it names no context"),
        (
            "{current-context: x, contexts: [{name: y}]}",
            "there is no context 'x': expected one of: y",
        ),
    ],
)
async def test_a_bad_kubeconfig_is_named(home: Path, text: str, words: str) -> None:
    path = home / "bad"
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        await KubeClient.connect(kubeconfig=path)
    assert str(path) in str(told.value)
    assert words in str(told.value)


@pytest.mark.parametrize(
    "cluster",
    [
        {"server": "https://me:hunter2@127.0.0.1:1"},
        {"server": "https://127.0.0.1:1", "proxy-url": "socks5://me:hunter2@127.0.0.1:1"},
        {"server": "https://10.9.9.9:1", "proxy-url": "http://me:hunter2@127.0.0.1:none"},
    ],
)
async def test_no_error_shows_a_password(home: Path, cluster: dict[str, Any]) -> None:
    """Not that of the server, and not that of the proxy; the first one was a traceback."""
    path = write_kubeconfig(home / "config", cluster, {"token": "t"})
    with pytest.raises(DLRoverError) as told:
        async with await KubeClient.connect(kubeconfig=path) as api:
            await api.get(PODS, "x", "default")
    assert "127.0.0.1" in str(told.value)
    assert "hunter2" not in str(told.value)


async def test_nothing_says_where_the_cluster_is(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.kube/config: there is no such file.*KUBECONFIG"):
        await KubeClient.connect()
    with pytest.raises(ConfigError, match="missing: there is no such file"):
        await KubeClient.connect(kubeconfig=home / "missing")


@pytest.mark.parametrize(
    ("cluster", "user", "words"),
    [
        ({}, {}, "expected https://host:port"),
        ({"server": "nonsense"}, {"token": "t"}, "expected https://host:port"),
        ({"server": "https://a", "certificate-authority": "/no/ca"}, {}, "/no/ca"),
        (SERVER | {"proxy-url": "socks5://a:1"}, {"token": "t"}, "only http:// and https://"),
        (SERVER, {"tokenFile": "/no/token"}, "/no/token"),
        (SERVER, {"exec": {"command": "x"}}, "exec: expected command and apiVersion"),
        (SERVER, {"token": "t", "username": "u"}, "token and username exclude each other"),
        (SERVER, {"as-groups": ["g"]}, "as-groups and as-user-extra need as"),
        (SERVER, {"as": "a\r\nHost: b"}, "expected printable text"),
        (SERVER, {"client-certificate-data": "YQ=="}, "needs a client-key"),
        (SERVER, {"auth-provider": {"name": "gcp"}}, "expected oidc"),
        (SERVER | {"certificate-authority-data": "x"}, {}, "base64"),
        (SERVER | {"certificate-authority-data": "!!!!"}, {}, "base64"),
    ],
)
async def test_what_cannot_be_used_is_named(
    home: Path, cluster: dict[str, Any], user: dict[str, Any], words: str
) -> None:
    path = write_kubeconfig(home / "config", cluster, user)
    with pytest.raises(ConfigError) as told:
        await KubeClient.connect(kubeconfig=path)
    assert str(path) in str(told.value)
    assert words in str(told.value)


@pytest.mark.parametrize("code", [302, 401, 403, 404, 429, 500])
async def test_the_time_is_not_that_of_a_refusal(
    home: Path, cluster: FakeCluster, code: int
) -> None:
    """It may be by something on the way."""
    cluster.ahead_s = -3600
    fault = cluster.fail(code, times=2)
    async with await KubeClient.connect(kubeconfig=cluster.kubeconfig(home / "config")) as kube:
        before = kube.wall() - time.monotonic()
        with pytest.raises(KubeError):
            await kube.list(PODS)
        assert kube.wall() - time.monotonic() == pytest.approx(before)
        fault.times = 0
        while kube.wall() > time.time() - 1800:  # an answer that took long is not believed
            await kube.list(PODS)
        assert kube.wall() == pytest.approx(time.time() - 3600, abs=60)


async def test_a_token_file_is_read_again(home: Path, cluster: FakeCluster) -> None:
    (home / "token").write_text("admin")
    path = cluster.kubeconfig(home / "config", tokenFile="token")
    async with await KubeClient.connect(kubeconfig=path) as kube:
        await kube.list(PODS)
        (home / "token").write_text("second\n")
        cluster.token = "second"
        no_longer_good(kube)
        await kube.list(PODS)
        assert len(cluster.calls) == 2, "it was read before it was refused"
        (home / "token").unlink()
        no_longer_good(kube)
        await kube.list(PODS)  # what was read is still good


async def test_several_kubeconfigs_are_merged(
    home: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = home / "one", home / "two"
    one.write_text(yaml.safe_dump({"users": [{"name": "u", "user": {"token": "admin"}}]}))
    two.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": cluster.url}}],
                "contexts": [
                    {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "of-x"}},
                    {"name": "y", "context": {"cluster": "c", "user": "u"}},
                ],
                "current-context": "x",
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", f"{one}:{home / 'missing'}:{two}")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    async with await KubeClient.connect() as kube:
        assert kube.namespace == "of-x"
        cluster.put(kinds.NAMESPACES, {"metadata": {"name": "of-x"}})
        made = await kube.create(SECRETS, {"metadata": {"name": "s"}})
        assert made["metadata"]["namespace"] == "of-x"
    async with await KubeClient.connect(context="y") as kube:
        assert kube.namespace == "default"
    with pytest.raises(ConfigError, match="there is no context 'z': expected one of: x, y"):
        await KubeClient.connect(context="z")


# --- TLS, certificates, proxies ---


def its_tls(made: Certificates, *, ask: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert, made.key)
    if ask:
        context.load_verify_locations(made.authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


async def test_client_certificates(home: Path) -> None:
    made = issue(home, "api.test")
    async with FakeCluster(tls=its_tls(made, ask=True)) as cluster:
        where = {
            "server": cluster.url,
            "certificate-authority-data": data(made.authority),
            "tls-server-name": "api.test",
        }
        mine = {"client-certificate-data": data(made.cert), "client-key-data": data(made.key)}
        path = write_kubeconfig(home / "config", where, mine | {"token": "admin"})
        async with await KubeClient.connect(kubeconfig=path) as kube:
            assert await kube.list(PODS) == []
        path = write_kubeconfig(home / "config", where, {"token": "admin"})
        async with await KubeClient.connect(kubeconfig=path) as kube:
            with pytest.raises(ServerDownError, match=cluster.url):
                await kube.list(PODS)


@pytest.fixture
async def account(home: Path) -> AsyncIterator[tuple[FakeCluster, Path, dict[str, str]]]:
    """A cluster as a Pod sees it: a folder, two variables."""
    made = issue(home, "localhost")
    folder = home / "account"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(made.authority.read_bytes())
    (folder / "namespace").write_text("of-pod")
    (folder / "token").write_text("admin")
    async with FakeCluster(tls=its_tls(made)) as cluster:
        port = cluster.url.rpartition(":")[2]
        env = {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": port}
        yield cluster, folder, env


Seat = tuple[FakeCluster, Path, dict[str, str]]


async def test_a_service_account_whose_token_is_replaced(account: Seat) -> None:
    cluster, folder, env = account
    async with KubeClient(ServiceAccountAccess(folder, env)) as kube:
        assert await kube.list(PODS) == []
        assert kube.namespace == "of-pod"
        cluster.token = "second"
        (folder / "token").write_text("second")
        no_longer_good(kube)
        await kube.list(PODS)
        assert len(cluster.calls) == 2, "it was read before it was refused"
        cluster.token = "third"
        (folder / "token").write_text("third")
        read_a_minute_ago(kube)
        await kube.list(PODS)  # refused, and read again at once


async def test_an_authority_that_is_replaced(account: Seat, tmp_path: Path) -> None:
    _, folder, env = account
    right = (folder / "ca.crt").read_bytes()
    (tmp_path / "other").mkdir()
    (folder / "ca.crt").write_bytes(issue(tmp_path / "other").authority.read_bytes())
    async with KubeClient(ServiceAccountAccess(folder, env)) as kube:
        with pytest.raises(UnauthenticatedError, match=r"its certificate is refused.*account"):
            await kube.list(PODS)
        (folder / "ca.crt").write_bytes(right)
        read_a_minute_ago(kube)
        assert await kube.list(PODS) == []


async def test_a_pod_does_not_go_through_a_proxy(
    account: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder, env = account
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with KubeClient(ServiceAccountAccess(folder, env)) as kube:
        assert await kube.list(PODS) == []


@pytest.mark.parametrize("by", ["kubeconfig", "environment", "neither"])
async def test_a_kubeconfig_may_go_through_a_proxy(
    home: Path, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    lines: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 8\r\n\r\nno route")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    address = "http://{}:{}".format(*server.sockets[0].getsockname())
    # An API server of this machine is called without the environment's proxy.
    url = "http://api.test:1" if by == "environment" else cluster.url
    where = {"server": url} | ({"proxy-url": address} if by == "kubeconfig" else {})
    if by != "kubeconfig":
        monkeypatch.setenv("http_proxy", address)
    if by == "neither":
        monkeypatch.setenv("no_proxy", "127.0.0.1")
    path = write_kubeconfig(home / "config", where, {"token": "admin"})
    async with server, await KubeClient.connect(kubeconfig=path) as kube:
        if by == "neither":
            assert await kube.list(PODS) == []
            return
        with pytest.raises(ServerDownError, match="no route"):
            await kube.list(PODS)
        assert lines == [f"GET {url}/api/v1/pods?limit=500 HTTP/1.1\r\n".encode()]
