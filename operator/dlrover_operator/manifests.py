"""PURE: from a job to the objects of its master. Made once, and again at a resume only.

Nothing here looks at the cluster. What is random (the token, the certificate) is handed in.
"""

import base64
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from dlrover_py.protocol import names
from dlrover_py.protocol.job import MASTER_SETTING, ElasticJob
from dlrover_py.protocol.status import PROGRESS_S

Obj = dict[str, Any]

USER = 65532
"""Of the image: no user of the node has it."""
AWAY_S = 10
"""A master on a node that is not ready is given up after so long; Kubernetes would wait 300 s."""
PROGRESS_WRITES_PER_S = 50.0
"""Masters together write progress so often at most: each write is a version in etcd and goes to all
who watch jobs. Doubling keeps the plan of a master the same while single jobs come and go."""
NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(frozen=True, slots=True)
class Options:
    """What the administrator of the operator decides for all masters."""

    image: str
    pull_policy: str = ""
    pull_secrets: tuple[str, ...] = ()
    resources: Obj = field(
        default_factory=lambda: {
            "requests": {"cpu": "100m", "memory": "192Mi"},
            "limits": {"cpu": "2", "memory": "1Gi"},
        }
    )
    workers_policy: bool = True
    """Whether a job's worker Pods get a NetworkPolicy."""
    progress_s: float = PROGRESS_S
    """Seconds between two writes of a status in which only the progress is new, with few jobs."""

    def progress_for(self, jobs: int) -> float:
        """The same with so many jobs: doubled until all masters together write seldom enough."""
        doublings = math.ceil(math.log2(max(1.0, jobs / (PROGRESS_WRITES_PER_S * self.progress_s))))
        return self.progress_s * 2.0**doublings


@dataclass(frozen=True, slots=True)
class Credentials:
    """What agents know their master by."""

    ca: bytes
    cert: bytes
    key: bytes


def role(job: ElasticJob) -> Obj:
    """What a master may do: Pods of its namespace, and its own journal and job."""
    name = job.metadata.name

    def allow(group: str, resources: list[str], verbs: list[str], only: str = "") -> Obj:
        rule: Obj = {"apiGroups": [group], "resources": resources, "verbs": verbs}
        return rule | ({"resourceNames": [only]} if only else {})

    jobs = names.PLURAL
    rules = [
        allow("", ["pods"], ["get", "list", "watch", "create", "delete"]),
        allow("", ["pods/log"], ["get"]),
        allow("", ["secrets"], ["get", "update"], names.journal_of(name)),
        allow("", ["events"], ["create"]),
        allow(names.GROUP, [jobs], ["get", "list", "watch"], name),
        allow(names.GROUP, [f"{jobs}/status"], ["get", "patch"], name),
        # Where OwnerReferencesPermissionEnforcement is on, Pods cannot block it otherwise.
        allow(names.GROUP, [f"{jobs}/finalizers"], ["update"], name),
    ]
    return {"metadata": _master_meta(job), "rules": rules}


def role_binding(job: ElasticJob) -> Obj:
    """Gives the role to the master's account."""
    name = names.master_of(job.metadata.name)
    account = {"kind": "ServiceAccount", "name": name, "namespace": job.metadata.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return {"metadata": _master_meta(job), "roleRef": role, "subjects": [account]}


def service_account(job: ElasticJob) -> Obj:
    """The master's account; its Pod asks for the token, others of that account get none."""
    return {"metadata": _master_meta(job), "automountServiceAccountToken": False}


def network_policy(job: ElasticJob) -> Obj:
    """Agents' port for the job's Pods only; health and metrics for anyone in the cluster."""
    agents: Obj = {"ports": [{"protocol": "TCP", "port": names.MASTER_PORT}]}
    if not _spec(job.worker.template).get("hostNetwork"):  # such Pods have no address of their own
        agents["from"] = [_of_job(job)]
    health = {"ports": [{"protocol": "TCP", "port": names.HEALTH_PORT}]}
    spec = {
        "podSelector": {"matchLabels": _selector(job)},
        "policyTypes": ["Ingress"],
        "ingress": [agents, health],
    }
    return {"metadata": _master_meta(job), "spec": spec}


def workers_network_policy(job: ElasticJob) -> Obj:
    """Workers' ports for the job's Pods only: the store that they meet at, gloo and NCCL ask for no
    password."""
    on_host = _spec(job.worker.template).get("hostNetwork")  # nothing can tell such Pods apart
    spec = {
        "podSelector": {"matchLabels": _selector(job, names.ROLE_WORKER)},
        "policyTypes": ["Ingress"],
        "ingress": [{} if on_host else {"from": [_of_job(job)]}],
    }
    return {"metadata": _meta(job, names.workers_policy_of(job.metadata.name)), "spec": spec}


def service(job: ElasticJob, cluster_ip: str = "") -> Obj:
    """Where agents call: by its address, since Pods of the host network may not resolve names."""
    port = {
        "name": names.AGENTS_PORT_NAME,
        "protocol": "TCP",
        "port": names.MASTER_PORT,
        "targetPort": names.AGENTS_PORT_NAME,
    }
    spec: Obj = {"selector": _selector(job), "ports": [port]}
    if cluster_ip:
        spec["clusterIP"] = cluster_ip
    return {"metadata": _master_meta(job), "spec": spec}


def tls_secret(job: ElasticJob, made: Credentials) -> Obj:
    """The master's certificate; the authority stands beside it, so that the token's can follow."""
    data = {names.SECRET_CERT: made.cert, names.SECRET_KEY: made.key, names.SECRET_CA: made.ca}
    name = names.tls_of(job.metadata.name, job.metadata.uid)
    made_of = _secret(job, name, data, kind="kubernetes.io/tls")
    made_of["metadata"]["annotations"] = {names.TOKEN_FOLLOWS: "true"}
    return made_of


def token_secret(job: ElasticJob, token: bytes, ca: bytes) -> Obj:
    """What each node has."""
    data = {names.SECRET_TOKEN: token, names.SECRET_CA: ca}
    return _secret(job, names.token_of(job.metadata.name, job.metadata.uid), data)


def journal_secret(job: ElasticJob) -> Obj:
    """An empty page; only the master writes on it."""
    return {"metadata": _meta(job, names.journal_of(job.metadata.name)), "type": "Opaque"}


def deployment(job: ElasticJob, cluster_ip: str, options: Options, jobs: int = 1) -> Obj:
    """The master: one at a time, within Pod Security ``restricted``.

    Args:
        job: whose master it is.
        cluster_ip: address of the master's Service.
        options: what holds for all masters.
        jobs: how many ElasticJobs the operator looks after.
    """
    name = names.master_of(job.metadata.name)
    asked = job.spec.replica_specs.dlrover_master
    template = asked.template if asked is not None else {}
    theirs, meta = _spec(template), _dict(template.get("metadata"))
    main = _main(theirs)
    pod: Obj = {
        key: theirs[key]
        for key in ("nodeSelector", "affinity", "priorityClassName", "schedulerName")
        if theirs.get(key)
    }
    away = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": AWAY_S}
        for key in NOT_READY
    ]
    pulls = [{"name": secret} for secret in options.pull_secrets]
    pulls += [s for s in _list(theirs.get("imagePullSecrets")) if s not in pulls]
    pod |= {"imagePullSecrets": pulls} if pulls else {}
    pod |= {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 10,
        "tolerations": [*_list(theirs.get("tolerations")), *away],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, cluster_ip, options, jobs, main)],
        "volumes": [
            _volume("token", names.token_of(job.metadata.name, job.metadata.uid)),
            _volume("tls", names.tls_of(job.metadata.name, job.metadata.uid)),
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    labels = _dict(meta.get("labels")) | _labels(job) | _selector(job)
    # What is in its /tmp may go: else Cluster Autoscaler would keep its host for it.
    evictable = {"cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": "tmp"}
    pod_meta: Obj = {"labels": labels, "annotations": evictable | _dict(meta.get("annotations"))}
    spec: Obj = {
        "replicas": 1,
        "revisionHistoryLimit": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _selector(job)},
        "template": {"metadata": pod_meta, "spec": pod},
    }
    # What a server stores has its defaults too: by this it is told whether another was planned.
    planned = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "metadata": _master_meta(job) | {"annotations": {names.NOTE_PLAN: planned}},
        "spec": spec,
    }


def _container(job: ElasticJob, cluster_ip: str, options: Options, jobs: int, main: Obj) -> Obj:
    meta = job.metadata
    ours = {
        names.ENV_MASTER_JOB_UID: meta.uid,
        names.ENV_MASTER_SERVICE: f"{_host(cluster_ip)}:{names.MASTER_PORT}",
    }
    env: list[Obj] = [{"name": name, "value": value} for name, value in ours.items()]
    for name, path in ((names.ENV_POD_NAME, "name"), (names.ENV_POD_UID, "uid")):
        env.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{path}"}}})
    progress = f"{MASTER_SETTING}PROGRESS_S"
    theirs = {str(_dict(v).get("name", "")): v for v in _list(main.get("env"))}
    if progress not in theirs:
        env.append({"name": progress, "value": f"{options.progress_for(jobs):g}"})
    env += [v for name, v in theirs.items() if name.startswith(MASTER_SETTING) and name not in ours]
    container: Obj = {
        "name": names.MAIN_CONTAINER,
        "image": options.image,
        "command": [
            "dlrover-master",
            *("--kubernetes", f"{meta.namespace}/{meta.name}"),
            *("--listen", f"0.0.0.0:{names.MASTER_PORT}"),
            *("--health", f"0.0.0.0:{names.HEALTH_PORT}"),
            *("--token-file", f"{names.TOKEN_MOUNT}/{names.SECRET_TOKEN}"),
            *("--tls-cert", f"{names.TLS_MOUNT}/{names.SECRET_CERT}"),
            *("--tls-key", f"{names.TLS_MOUNT}/{names.SECRET_KEY}"),
        ],
        "env": env,
        "ports": [
            {"name": names.AGENTS_PORT_NAME, "containerPort": names.MASTER_PORT},
            {"name": names.HEALTH_PORT_NAME, "containerPort": names.HEALTH_PORT},
        ],
        "resources": main.get("resources") or options.resources,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": names.HEALTH_PORT_NAME},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
        },
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": names.HEALTH_PORT_NAME},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "token", "mountPath": names.TOKEN_MOUNT, "readOnly": True},
            {"name": "tls", "mountPath": names.TLS_MOUNT, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    if options.pull_policy:
        container["imagePullPolicy"] = options.pull_policy
    return container


def _volume(name: str, secret: str) -> Obj:
    # 0440: root's, readable by the group of fsGroup; others may not.
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _secret(job: ElasticJob, name: str, data: dict[str, bytes], kind: str = "Opaque") -> Obj:
    coded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"metadata": _meta(job, name), "type": kind, "immutable": True, "data": coded}


def _master_meta(job: ElasticJob) -> Obj:
    return _meta(job, names.master_of(job.metadata.name))


def _meta(job: ElasticJob, name: str) -> Obj:
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": _labels(job),
        "ownerReferences": [names.owner(job.metadata.name, job.metadata.uid)],
    }


def _labels(job: ElasticJob) -> dict[str, str]:
    return {names.LABEL_APP: names.APP, names.LABEL_JOB: job.metadata.name}


def _selector(job: ElasticJob, role: str = names.ROLE_MASTER) -> dict[str, str]:
    return {names.LABEL_JOB: job.metadata.name, names.LABEL_ROLE: role}


def _of_job(job: ElasticJob) -> Obj:
    return {"podSelector": {"matchLabels": {names.LABEL_JOB: job.metadata.name}}}


def _host(cluster_ip: str) -> str:
    return f"[{cluster_ip}]" if ":" in cluster_ip else cluster_ip


def _main(pod: Obj) -> Obj:
    containers = [_dict(c) for c in _list(pod.get("containers"))]
    mains = [c for c in containers if c.get("name") == names.MAIN_CONTAINER]
    return (mains or containers or [{}])[0] if len(containers) == 1 or mains else {}


def _spec(template: Obj) -> Obj:
    return _dict(template.get("spec"))


def _dict(value: object) -> Obj:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
