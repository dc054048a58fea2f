"""A real master that serves agents over TLS, and who may and may not talk to it."""

import http.client
import json
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlrover_py.master.app import certificate_end, read_certificate
from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import AgentReport, Assignment, Directive, Offer
from dlrover_py.protocol.errors import ConfigError, UnauthorizedError, UnreachableError
from dlrover_py.protocol.status import JobStatus
from tests.certificates import Certificates, issue
from tests.process.harness import CALM, Place, document, eventually

TOKEN = "correct-horse-battery-staple"
SOON = 60.0


@pytest.fixture
def ours(place: Place) -> Certificates:
    return issue(place.folder)


def another(place: Place, name: str) -> Certificates:
    folder = place.folder / "another"
    folder.mkdir()
    return issue(folder, name)


@contextmanager
def master(place: Place, tls: Certificates | None, nodes: int = 1) -> Iterator[tuple[int, int]]:
    """A master of a job of so many nodes; its ports for agents and for health."""
    token = place.folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    read, write = os.pipe()
    argv = ["-m", "dlrover_py.master", "--token-file", str(token), "--announce-fd", str(write)]
    argv += ["--static", json.dumps(document(["true"], replicas=nodes))]
    argv += ["--state-dir", str(place.folder / "state")]
    if tls is not None:
        argv += ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    process = place.popen(
        "python",
        *argv,
        pass_fds=[write],
        stderr=subprocess.DEVNULL,
        env={f"DLROVER_MASTER_{k.upper()}": v for k, v in CALM.items()},
    )
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            ports = json.loads(pipe.readline())
        eventually(lambda: ready(ports["health"]), "a master that is ready")
        yield ports["job"], ports["health"]
    finally:
        process.terminate()
        assert process.wait(timeout=SOON) == 0


def ready(health: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", health, timeout=SOON)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    finally:
        connection.close()


async def ask(port: int, ca_file: Path | None, path: str = "/v1/job") -> bytes:
    client = HttpClient(f"127.0.0.1:{port}", token=TOKEN, ca_file=ca_file)
    try:
        return await client.call("GET", path, deadline_s=SOON)
    finally:
        client.close()


async def test_an_agents_client_talks_over_tls_and_health_stays_plain(
    place: Place, ours: Certificates
) -> None:
    report = AgentReport(boot_id="a" * 16, seq=1, offer=Offer(addr="10.0.0.1", port=2000))
    with master(place, ours) as (port, health):
        client = HttpClient(f"127.0.0.1:{port}", token=TOKEN, ca_file=ours.authority)
        body = report.model_dump_json().encode()
        answer = await client.call("POST", "/v1/nodes/n0/exchange", body, deadline_s=SOON)
        assert Assignment.model_validate_json(answer).directive is Directive.RUN
        status = JobStatus.model_validate_json(await client.call("GET", "/v1/job", deadline_s=SOON))
        assert status.nodes_in_round == 1
        client.close()
        assert await ask(health, None, "/readyz") == b"ok"
        metrics = (await ask(health, None, "/metrics")).decode()
        told = re.search(r"^dlrover_certificate_expiry_timestamp_seconds (\S+)$", metrics, re.M)
        assert told is not None
        assert float(told[1]) == certificate_end(ours.cert.read_text())


async def test_a_master_that_another_authority_vouches_for_is_not_believed(
    place: Place, ours: Certificates
) -> None:
    other = another(place, names.MASTER_NAME)
    with master(place, ours) as (port, _), pytest.raises(UnauthorizedError) as caught:
        await ask(port, other.authority)
    assert "its certificate is refused: unable to get local issuer" in str(caught.value)
    assert str(other.authority) in str(caught.value)


async def test_a_certificate_for_somebody_else_is_not_believed(place: Place) -> None:
    other = another(place, "somebody-else")
    with master(place, other) as (port, _), pytest.raises(UnauthorizedError) as caught:
        await ask(port, other.authority)
    assert f"expected one for {names.MASTER_NAME}" in str(caught.value)


async def test_who_speaks_plainly_to_tls_is_told_what_may_be_missing(
    place: Place, ours: Certificates
) -> None:
    with master(place, ours) as (port, _), pytest.raises(UnreachableError) as caught:
        await ask(port, None)
    assert "without an answer; if the server expects TLS, set DLROVER_CA_FILE" in str(caught.value)


async def test_who_speaks_tls_to_a_plain_master_is_told(place: Place, ours: Certificates) -> None:
    with master(place, None) as (port, _), pytest.raises(UnreachableError) as caught:
        await ask(port, ours.authority)
    assert "TLS failed (" in str(caught.value)


def test_old_tls_is_refused(place: Place, ours: Certificates) -> None:
    context = read_certificate(ours.cert, ours.key)
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_job_runs_over_tls(place: Place, ours: Certificates) -> None:
    script = place.script(
        """
        import os
        path = f"{os.environ['OUT']}/{os.environ['RANK']}"
        with open(path, "w") as file:
            file.write(os.environ["WORLD_SIZE"])
        """
    )
    out = place.folder / "out"
    out.mkdir()
    with master(place, ours, nodes=2) as (port, _):
        env = {
            names.ENV_MASTER_ADDR: f"127.0.0.1:{port}",
            names.ENV_CA_FILE: str(ours.authority),
            names.ENV_TOKEN_FILE: str(place.folder / "token"),
            names.ENV_JOB_NAME: "job",
            names.ENV_LOG_DIR: str(place.folder / "logs"),
            "OUT": str(out),
        }
        agents = [
            place.popen("elastic-run", str(script), env=env | {names.ENV_NODE_ID: f"n{i}"})
            for i in range(2)
        ]
        assert [agent.wait(timeout=120) for agent in agents] == [0, 0]
    found = eventually(lambda: sorted(out.iterdir()), "what the workers wrote")
    assert [path.read_text() for path in found] == ["2", "2"]


def test_an_agent_that_does_not_believe_its_master_says_so_and_ends(
    place: Place, ours: Certificates
) -> None:
    other = another(place, names.MASTER_NAME)
    with master(place, ours) as (port, _):
        env = {
            names.ENV_MASTER_ADDR: f"127.0.0.1:{port}",
            names.ENV_CA_FILE: str(other.authority),
            names.ENV_TOKEN_FILE: str(place.folder / "token"),
            names.ENV_NODE_ID: "n0",
        }
        done = place.call("elastic-run", str(place.script("")), env=env)
    assert done.returncode == 4, done.stderr
    assert "its certificate is refused" in done.stderr


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("tls.pem", None, "--tls-cert is given and --tls-key is not: expected both, or none"),
        (None, "tls.key", "--tls-key is given and --tls-cert is not: expected both, or none"),
        ("none.pem", "tls.key", "TLS certificate .*none.pem: No such file"),
        ("tls.pem", "none.key", "TLS key .*none.key: No such file"),
        ("tls.key", "tls.key", "expected a certificate for dlrover-master"),
        ("tls.pem", "open.key", "TLS key .*open.key: others may read it; expected mode 0600"),
        ("tls.pem", "another/tls.key", "KEY_VALUES_MISMATCH"),
    ],
)
def test_a_certificate_that_cannot_be_used(
    place: Place, ours: Certificates, cert: str | None, key: str | None, words: str
) -> None:
    another(place, names.MASTER_NAME)
    (place.folder / "open.key").write_bytes(ours.key.read_bytes())
    (place.folder / "open.key").chmod(0o644)
    with pytest.raises(ConfigError, match=words):
        read_certificate(*(place.folder / n if n else None for n in (cert, key)))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("nonsense", "expected certificates in PEM format")],
)
def test_an_authority_that_cannot_be_used(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        HttpClient("127.0.0.1:1", ca_file=path)
