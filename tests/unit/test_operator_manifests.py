"""What the operator makes for a job."""

import ssl
import time
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.verification import PolicyBuilder, Store

from dlrover_operator import credentials, manifests
from dlrover_operator.manifests import Options
from dlrover_operator.settings import Settings
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from tests.builders import job_file

OPTIONS = Options(image="master:1", pull_policy="Never", pull_secrets=("p",))


def job(master: dict[str, Any] | None = None, **template_spec: Any) -> ElasticJob:
    document = job_file(3)
    document["metadata"] |= {"namespace": "ns", "uid": "u1"}
    roles = document["spec"]["replicaSpecs"]
    roles["worker"]["template"]["spec"] |= template_spec
    if master is not None:
        roles["dlrover-master"] = {"template": master}
    return ElasticJob.read(document)


def pod_of(made: ElasticJob, address: str = "10.0.0.1") -> dict[str, Any]:
    pod = manifests.deployment(made, address, OPTIONS)["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def test_everything_is_the_jobs() -> None:
    made = job()
    fresh = manifests.MasterCredentials(b"a", b"c", b"k")
    objects = [
        manifests.service_account(made),
        manifests.role(made),
        manifests.role_binding(made),
        manifests.network_policy(made),
        manifests.workers_network_policy(made),
        manifests.service(made),
        manifests.deployment(made, "10.0.0.1", OPTIONS),
        manifests.journal_secret(made),
        manifests.tls_secret(made, fresh),
        manifests.token_secret(made, b"t", b"a"),
    ]
    for obj in objects:
        meta = obj["metadata"]
        assert meta["namespace"] == "ns"
        assert meta["labels"][names.LABEL_JOB] == "x"
        assert len(meta["name"]) <= 63
        (owner,) = meta["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            "u1",
            True,
            True,
        )


def test_the_longest_name_fits() -> None:
    assert len(names.master_of("x" * 37)) == 63


def test_the_master_gets_what_it_is_promised() -> None:
    (container,) = pod_of(job())["containers"]
    command = container["command"]
    assert command[:3] == ["dlrover-master", "--kubernetes", "ns/x"]
    env = {
        e["name"]: e.get("value") or e["valueFrom"]["fieldRef"]["fieldPath"]
        for e in container["env"]
    }
    assert env == {
        "DLROVER_JOB_UID": "u1",
        "DLROVER_MASTER_SERVICE": "10.0.0.1:50001",
        "DLROVER_MASTER_PROGRESS_S": "10",
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
    }
    assert container["imagePullPolicy"] == "Never"
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError", "why it has crashed"
    told = pod_of(job(), "fd00::1")["containers"][0]["env"][1]["value"]
    assert told == "[fd00::1]:50001"


def test_the_master_listens_at_all_addresses_of_its_pod() -> None:
    """Those of a Pod in an IPv6-only cluster are none of IPv4."""
    (container,) = pod_of(job())["containers"]
    given = dict(zip(container["command"][1::2], container["command"][2::2], strict=True))
    assert given["--listen"] == ":50001"
    assert given["--health"] == ":8080"
    assert Settings.parse(["--master-image=m"]).health == ":8080"


def test_the_template_schedules_the_master_and_does_not_say_what_it_runs() -> None:
    template = {
        "metadata": {"labels": {"team": "a", names.LABEL_JOB: "y"}, "annotations": {"k": "v"}},
        "spec": {
            "nodeSelector": {"a": "b"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "schedulerName": "volcano",
            "imagePullSecrets": [{"name": "q"}],
            "hostNetwork": True,
            "containers": [
                {
                    "name": "main",
                    "image": "upstream",
                    "command": ["python"],
                    "resources": {"limits": {"cpu": "2"}},
                    "env": [
                        {"name": "DLROVER_MASTER_LEASE_S", "value": "9"},
                        {"name": "DLROVER_MASTER_SERVICE", "value": "evil"},
                        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://c:4318"},
                        {"name": "OTEL_PYTHON_CONFIGURATOR", "value": "evil"},
                        {"name": "OTHER", "value": "1"},
                    ],
                },
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    made = manifests.deployment(job(template), "10.0.0.1", OPTIONS)["spec"]["template"]
    pod = made["spec"]
    assert made["metadata"]["labels"]["team"] == "a"
    assert made["metadata"]["labels"][names.LABEL_JOB] == "x"
    evictable = {"cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": "tmp"}
    assert made["metadata"]["annotations"] == {"k": "v"} | evictable
    assert pod["nodeSelector"] == {"a": "b"}
    assert pod["tolerations"][0] == {"key": "gpu", "operator": "Exists"}
    assert {t["tolerationSeconds"] for t in pod["tolerations"][1:]} == {10}
    assert (pod["priorityClassName"], pod["schedulerName"]) == ("high", "volcano")
    assert pod["imagePullSecrets"] == [{"name": "p"}, {"name": "q"}]
    assert "hostNetwork" not in pod
    (container,) = pod["containers"]
    assert container["image"] == "master:1"
    assert container["resources"] == {"limits": {"cpu": "2"}}
    env = {e["name"]: e.get("value") for e in container["env"]}
    assert env["DLROVER_MASTER_LEASE_S"] == "9"
    assert env["DLROVER_MASTER_SERVICE"] == "10.0.0.1:50001"
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c:4318"
    assert {"OTHER", "OTEL_PYTHON_CONFIGURATOR"}.isdisjoint(env)


@pytest.mark.parametrize(
    ("jobs", "own", "said"),
    [(0, "", "10"), (500, "", "10"), (501, "", "20"), (1000, "", "20"), (4001, "", "160"),
     (4001, "3", "3")],
)  # fmt: skip
def test_progress_is_written_more_seldom_where_there_are_many_jobs(
    jobs: int, own: str, said: str
) -> None:
    """All masters together write 50 times a second at most, unless a job says otherwise."""
    variable = {"name": "DLROVER_MASTER_PROGRESS_S", "value": own}
    template = {"spec": {"containers": [{"name": "main", "env": [variable] * bool(own)}]}}
    made = manifests.deployment(job(template), "10.0.0.1", OPTIONS, jobs)["spec"]["template"]
    env = [e for e in made["spec"]["containers"][0]["env"] if e["name"] == variable["name"]]
    assert env == [variable | {"value": said}]
    assert Settings.parse(["--master-image=m", "--progress-interval=60"]).masters.progress_s == 60


@pytest.mark.parametrize("template", [{}, {"spec": {}}, {"spec": {"containers": [{"name": "a"}]}}])
def test_a_template_may_lack_nearly_everything(template: dict[str, Any]) -> None:
    assert pod_of(job(template))["containers"][0]["resources"] == OPTIONS.resources


def test_only_the_jobs_pods_reach_the_agents_port_but_on_the_hosts_network_anyone() -> None:
    agents, health = manifests.network_policy(job())["spec"]["ingress"]
    assert agents["from"] == [{"podSelector": {"matchLabels": {names.LABEL_JOB: "x"}}}]
    assert "from" not in health
    agents, _ = manifests.network_policy(job(hostNetwork=True))["spec"]["ingress"]
    assert "from" not in agents


def test_servers_on_the_hosts_network_reach_the_master_and_the_workers() -> None:
    """Only the template of the role ps has it."""
    template = {"spec": {"containers": [{"name": "main", "command": ["dlrover", "ps", "server"]}]}}
    document = job_file(3)
    document["metadata"] |= {"namespace": "ns", "uid": "u1"}
    document["spec"]["distributionStrategy"] = "ParameterServerStrategy"
    document["spec"]["replicaSpecs"]["ps"] = {"replicas": 2, "template": template}
    made = ElasticJob.read(document)
    agents, _ = manifests.network_policy(made)["spec"]["ingress"]
    assert agents["from"]
    template["spec"]["hostNetwork"] = True  # type: ignore[assignment]
    made = ElasticJob.read(document)
    agents, _ = manifests.network_policy(made)["spec"]["ingress"]
    assert "from" not in agents
    assert [one["port"] for one in agents["ports"]] == [names.MASTER_PORT, names.SERVERS_PORT]
    assert manifests.workers_network_policy(made)["spec"]["ingress"] == [{}]


def test_only_the_jobs_pods_reach_its_workers_whose_ports_ask_for_no_password() -> None:
    policy = manifests.workers_network_policy(job())
    assert policy["spec"]["podSelector"]["matchLabels"] == {
        names.LABEL_JOB: "x",
        names.LABEL_ROLE: names.ROLE_WORKER,
    }
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    of_job = {"podSelector": {"matchLabels": {names.LABEL_JOB: "x"}}}
    assert policy["spec"]["ingress"] == [{"from": [of_job]}], "any port: they change"
    assert policy["metadata"]["name"] != manifests.network_policy(job())["metadata"]["name"]
    on_host = manifests.workers_network_policy(job(hostNetwork=True))
    assert on_host["spec"]["ingress"] == [{}], "a policy cannot name those Pods"


def test_the_certificate_is_the_masters_by_an_authority_of_its_own(tmp_path: Any) -> None:
    one, other = credentials.issue(time.time()), credentials.issue(time.time())
    assert credentials.token(one.key) == credentials.token(one.key)
    assert credentials.token(one.key) != credentials.token(other.key)
    assert len(credentials.token(one.key)) >= 32
    cert = x509.load_pem_x509_certificate(one.cert)
    years = 86400.0 * 3000
    old = x509.load_pem_x509_certificate(credentials.issue(time.time() - years).cert)
    assert (cert.not_valid_before_utc - old.not_valid_before_utc).days == 3000, "not by our clock"
    key = cert.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    names_of = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names_of.get_values_for_type(x509.DNSName) == [names.MASTER_NAME]
    for authority, good in ((one.ca, True), (other.ca, False)):
        store = Store([x509.load_pem_x509_certificate(authority)])
        verifier = PolicyBuilder().store(store)
        builder = verifier.build_server_verifier(x509.DNSName(names.MASTER_NAME))
        if good:
            builder.verify(cert, [])
        else:
            with pytest.raises(x509.verification.VerificationError):
                builder.verify(cert, [])
    for name, data in (("c", one.cert), ("k", one.key)):
        (tmp_path / name).write_bytes(data)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "c", tmp_path / "k")


def test_the_command_line() -> None:
    given = ["--master-image=m:1", "--namespace=a", "--namespace=b", "--namespace=a"]
    given += ["--image-pull-secret=s", '--master-resources={"limits": {"cpu": "1"}}']
    settings = Settings.parse(given)
    assert settings.namespaces == ("a", "b")
    assert settings.masters == Options("m:1", "", ("s",), {"limits": {"cpu": "1"}})
    for bad in ("{", "[]", '{"cpu": 1}'):
        with pytest.raises(ConfigError, match="--master-resources"):
            Settings.parse(["--master-image=m", f"--master-resources={bad}"])


@pytest.mark.parametrize("bad", ["abc", "0", "-1", "3601", "nan", ""])
def test_an_interval_that_makes_no_sense_is_refused_in_words(
    bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        Settings.parse(["--master-image=m", f"--progress-interval={bad}"])
    assert "expected seconds from 1 to 3600" in capsys.readouterr().err
