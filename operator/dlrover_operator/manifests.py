"""The Kubernetes objects of a job's master, made from the ElasticJob (pure functions).

The objects are made once, and again only when the job is resumed. Nothing here accesses the
cluster. Random values (the token, the certificate) are arguments.
"""

import base64
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from dlrover_py.protocol import names
from dlrover_py.protocol.bundles import bucket_of
from dlrover_py.protocol.cut_storage import CutStorage, optional_env, store_env
from dlrover_py.protocol.job import MASTER_ENV, MASTER_SETTING, ElasticJob
from dlrover_py.protocol.status import PROGRESS_S

Obj = dict[str, Any]

USER = 65532
"""User id and group id in the image; no user of the node has it."""
AWAY_S = 10
"""Seconds after which the master leaves a node that is not ready; Kubernetes would wait 300 s."""
MASTER_GRACE_S = 10
"""Seconds that a master has to end."""
PROGRESS_WRITES_PER_S = 50.0
"""Largest number of progress updates per second that all masters together should write.

Each write is a version in etcd and is sent to all clients that watch jobs. The interval is only
ever doubled, so that the plan of a master stays the same while single jobs come and go.
"""
NOT_READY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of a node that is not ready."""


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of the operator's administrator for all masters."""

    image: str
    """Image of the master's container."""
    pull_policy: str = ""
    """``imagePullPolicy`` of the master's container; empty: the default of Kubernetes."""
    pull_secrets: tuple[str, ...] = ()
    """Names of image pull Secrets in the job's namespace."""
    resources: Obj = field(
        default_factory=lambda: {
            "requests": {"cpu": "100m", "memory": "192Mi"},
            "limits": {"cpu": "2", "memory": "1Gi"},
        }
    )
    """Resources of a master whose job requests none."""
    workers_policy: bool = True
    """Whether a job's worker Pods get a NetworkPolicy."""
    progress_s: float = PROGRESS_S
    """Seconds between two status updates that change only the progress; it grows with the jobs."""

    def progress_for(self, jobs: int) -> float:
        """Return the seconds between two progress updates of a master, for a number of jobs.

        The interval is doubled until all masters together keep to PROGRESS_WRITES_PER_S. With few
        jobs it is ``progress_s``.
        """
        doublings = math.ceil(math.log2(max(1.0, jobs / (PROGRESS_WRITES_PER_S * self.progress_s))))
        return self.progress_s * 2.0**doublings


@dataclass(frozen=True, slots=True)
class MasterCredentials:
    """The certificates by which agents authenticate their master, in PEM."""

    ca: bytes
    """Certificate of the authority."""
    cert: bytes
    """Certificate of the master."""
    key: bytes
    """Private key of the master's certificate."""


def role(job: ElasticJob) -> Obj:
    """Return the Role of a master: access to Pods of its namespace, its journal and its job.

    The master may also create events. Of the Secrets it may read and change only its journal, its
    bundles of evidence, the map of the job's servers, and the recipes of the namespace.
    """
    name = job.metadata.name

    def allow(group: str, resources: list[str], verbs: list[str], *only: str) -> Obj:
        """Return one rule; ``only`` restricts it to the objects of these names."""
        rule: Obj = {"apiGroups": [group], "resources": resources, "verbs": verbs}
        return rule | ({"resourceNames": list(only)} if only else {})

    own = [names.journal_of(name), names.evidence_of(name), names.RECIPES]
    own += [names.servers_of(name)] if job.servers is not None else []

    jobs = names.PLURAL
    rules = [
        allow("", ["pods"], ["get", "list", "watch", "create", "delete"]),
        allow("", ["pods/log"], ["get"]),
        allow("", ["secrets"], ["get", "update"], *own),
        allow("", ["events"], ["create"]),
        allow(names.GROUP, [jobs], ["get", "list", "watch"], name),
        allow(names.GROUP, [f"{jobs}/status"], ["get", "patch"], name),
        # Required for blockOwnerDeletion of Pods with OwnerReferencesPermissionEnforcement.
        allow(names.GROUP, [f"{jobs}/finalizers"], ["update"], name),
    ]
    return {"metadata": _master_meta(job), "rules": rules}


def role_binding(job: ElasticJob) -> Obj:
    """Return the RoleBinding that gives the Role to the master's ServiceAccount."""
    name = names.master_of(job.metadata.name)
    account = {"kind": "ServiceAccount", "name": name, "namespace": job.metadata.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    return {"metadata": _master_meta(job), "roleRef": role, "subjects": [account]}


def service_account(job: ElasticJob) -> Obj:
    """Return the master's ServiceAccount.

    The master's Pod requests the token explicitly; other Pods of this account get none.
    """
    return {"metadata": _master_meta(job), "automountServiceAccountToken": False}


def network_policy(job: ElasticJob) -> Obj:
    """Return the NetworkPolicy of the master.

    Only Pods of the job may reach the ports for agents and servers. With ``hostNetwork`` of a role,
    any peer may, because such Pods have the address of their host. Health and metrics are open to
    all Pods of the cluster.
    """
    open_ports = [names.MASTER_PORT, *([names.SERVERS_PORT] if job.servers is not None else [])]
    agents: Obj = {"ports": [{"protocol": "TCP", "port": port} for port in open_ports]}
    if not _has_host_network(job):
        agents["from"] = [_of_job(job)]
    health = {"ports": [{"protocol": "TCP", "port": names.HEALTH_PORT}]}
    spec = {
        "podSelector": {"matchLabels": _selector(job)},
        "policyTypes": ["Ingress"],
        "ingress": [agents, health],
    }
    return {"metadata": _master_meta(job), "spec": spec}


def workers_network_policy(job: ElasticJob) -> Obj:
    """Return the NetworkPolicy by which only Pods of the job may reach its workers and servers.

    It is needed because the rendezvous store, gloo and NCCL do not authenticate their peers. With
    ``hostNetwork`` of a role it allows all peers, because a policy cannot select such Pods.
    """
    selector: Obj = {"matchLabels": _selector(job, names.ROLE_WORKER)}
    if job.servers is not None:
        values = [names.ROLE_WORKER, names.SERVER_PREFIX]
        roles: Obj = {"key": names.LABEL_ROLE, "operator": "In", "values": values}
        selector = {
            "matchLabels": {names.LABEL_JOB: job.metadata.name},
            "matchExpressions": [roles],
        }
    spec = {
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{} if _has_host_network(job) else {"from": [_of_job(job)]}],
    }
    return {"metadata": _meta(job, names.workers_policy_of(job.metadata.name)), "spec": spec}


def _has_host_network(job: ElasticJob) -> bool:
    """Return whether workers or servers have the address of their host."""
    templates = [job.worker.template, (job.servers and job.servers.template) or {}]
    return any(_spec(template).get("hostNetwork") for template in templates)


def service(job: ElasticJob, cluster_ip: str = "") -> Obj:
    """Return the master's Service.

    Agents use its address, because Pods of the host network may not resolve names of Services.

    Args:
        job: the job.
        cluster_ip: address that the Service must have; empty: any address.
    """
    wanted = [(names.AGENTS_PORT_NAME, names.MASTER_PORT)]
    wanted += [(names.SERVERS_PORT_NAME, names.SERVERS_PORT)] if job.servers is not None else []
    ports = [
        {"name": name, "protocol": "TCP", "port": port, "targetPort": name} for name, port in wanted
    ]
    spec: Obj = {"selector": _selector(job), "ports": ports}
    if cluster_ip:
        spec["clusterIP"] = cluster_ip
    return {"metadata": _master_meta(job), "spec": spec}


def tls_secret(job: ElasticJob, made: MasterCredentials) -> Obj:
    """Return the Secret with the master's certificate and its authority.

    The Secret of the token takes its authority from this one.
    """
    data = {names.SECRET_CERT: made.cert, names.SECRET_KEY: made.key, names.SECRET_CA: made.ca}
    name = names.tls_of(job.metadata.name, job.metadata.uid)
    made_of = _secret(job, name, data, kind="kubernetes.io/tls")
    made_of["metadata"]["annotations"] = {names.TOKEN_FOLLOWS: "true"}
    return made_of


def token_secret(job: ElasticJob, token: bytes, ca: bytes) -> Obj:
    """Return the Secret that each node mounts: the job's token and the authority.

    Args:
        job: the job.
        token: the token.
        ca: certificate of the authority in PEM.
    """
    data = {names.SECRET_TOKEN: token, names.SECRET_CA: ca}
    return _secret(job, names.token_of(job.metadata.name, job.metadata.uid), data)


def journal_secret(job: ElasticJob) -> Obj:
    """Return an empty Secret for the journal, which only the master writes."""
    return {"metadata": _meta(job, names.journal_of(job.metadata.name)), "type": "Opaque"}


def evidence_secret(job: ElasticJob) -> Obj:
    """Return an empty Secret for bundles of evidence, which only the master writes."""
    return {"metadata": _meta(job, names.evidence_of(job.metadata.name)), "type": "Opaque"}


def recipes_secret(job: ElasticJob) -> Obj:
    """Return an empty Secret for the import recipes of a namespace, which its masters write.

    No job owns it, so that a job that is submitted again finds the recipes of the one before.
    """
    meta = {
        "name": names.RECIPES,
        "namespace": job.metadata.namespace,
        "labels": {names.LABEL_APP: names.APP},
    }
    return {"metadata": meta, "type": "Opaque"}


def servers_secret(job: ElasticJob) -> Obj:
    """Return an empty Secret for the map of a parameter server, which only the master writes."""
    return {"metadata": _meta(job, names.servers_of(job.metadata.name)), "type": "Opaque"}


def deployment(job: ElasticJob, cluster_ip: str, options: Options, jobs: int = 1) -> Obj:
    """Return the master's Deployment: one Pod at a time, within Pod Security ``restricted``.

    An annotation has the hash of the spec, which shows later whether the plan has changed.

    The job's master template decides the node selector, affinity, tolerations, priority class,
    scheduler, pull Secrets, labels and annotations. Of its main container, only the resources and
    the master settings are used. All other fields are ignored. From the template of servers with a
    directory for cuts, it takes what it needs to write there. So it does from that of the workers
    for copies of evidence in a bucket.

    Args:
        job: the job of the master.
        cluster_ip: address of the master's Service.
        options: settings for all masters.
        jobs: number of ElasticJobs in the operator's namespaces.
    """
    name = names.master_of(job.metadata.name)
    asked = job.spec.replica_specs.dlrover_master
    template = asked.template if asked is not None else {}
    user_spec, meta = _spec(template), _dict(template.get("metadata"))
    main = _main(user_spec)
    pod: Obj = {
        key: user_spec[key]
        for key in ("nodeSelector", "affinity", "priorityClassName", "schedulerName")
        if user_spec.get(key)
    }
    away = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": AWAY_S}
        for key in NOT_READY
    ]
    pulls = [{"name": secret} for secret in options.pull_secrets]
    pulls += [s for s in _list(user_spec.get("imagePullSecrets")) if s not in pulls]
    pod |= {"imagePullSecrets": pulls} if pulls else {}
    servers = job.servers
    storage = (servers.cut_storage() if servers is not None else None) or CutStorage()
    pod |= {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": MASTER_GRACE_S,
        "tolerations": [*_list(user_spec.get("tolerations")), *away],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
            **(storage.security or {}),
        },
        "containers": [_container(job, cluster_ip, options, jobs, main)],
        "volumes": [
            _volume("token", names.token_of(job.metadata.name, job.metadata.uid)),
            _volume("tls", names.tls_of(job.metadata.name, job.metadata.uid)),
            {"name": "tmp", "emptyDir": {}},
            *storage.volumes,
        ],
    }
    env = {variable["name"]: variable for variable in storage.env}
    if bucket_of(job):  # the master copies evidence to it
        of_workers = optional_env(store_env(_main(_spec(job.worker.template))))
        env = {variable["name"]: variable for variable in of_workers} | env
    pod["containers"][0]["env"] += env.values()
    pod["containers"][0]["volumeMounts"] += storage.mounts
    labels = _dict(meta.get("labels")) | _labels(job) | _selector(job)
    # The contents of /tmp may be lost. Without this, Cluster Autoscaler would not remove the node.
    evictable = {"cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes": "tmp"}
    pod_meta: Obj = {"labels": labels, "annotations": evictable | _dict(meta.get("annotations"))}
    spec: Obj = {
        "replicas": 1,
        "revisionHistoryLimit": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _selector(job)},
        "template": {"metadata": pod_meta, "spec": pod},
    }
    # The stored object also has defaults of the server. This hash shows whether the plan changed.
    planned = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "metadata": _master_meta(job) | {"annotations": {names.NOTE_PLAN: planned}},
        "spec": spec,
    }


def _container(job: ElasticJob, cluster_ip: str, options: Options, jobs: int, main: Obj) -> Obj:
    """Return the master's container.

    Args:
        job: the job of the master.
        cluster_ip: address of the master's Service.
        options: settings for all masters.
        jobs: number of ElasticJobs in the operator's namespaces; with many, the master writes its
            progress less often.
        main: main container of the job's own master template, or {}. Only its resources, and its
            environment variables that are settings of the master or of traces, are used.
    """
    meta = job.metadata
    own_env = {
        names.ENV_MASTER_JOB_UID: meta.uid,
        names.ENV_MASTER_SERVICE: f"{_host(cluster_ip)}:{names.MASTER_PORT}",
    }
    env: list[Obj] = [{"name": name, "value": value} for name, value in own_env.items()]
    for name, path in ((names.ENV_POD_NAME, "name"), (names.ENV_POD_UID, "uid")):
        env.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.{path}"}}})
    progress = f"{MASTER_SETTING}PROGRESS_S"
    user_env = {str(_dict(v).get("name", "")): v for v in _list(main.get("env"))}
    if progress not in user_env:
        env.append({"name": progress, "value": f"{options.progress_for(jobs):g}"})
    env += [
        v for name, v in user_env.items() if name.startswith(MASTER_ENV) and name not in own_env
    ]
    container: Obj = {
        "name": names.MAIN_CONTAINER,
        "image": options.image,
        "command": [
            "dlrover-master",
            *("--kubernetes", f"{meta.namespace}/{meta.name}"),
            # At all addresses: a Pod may have one of IPv4, one of IPv6, or both.
            *("--listen", f":{names.MASTER_PORT}"),
            *("--health", f":{names.HEALTH_PORT}"),
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
    if job.servers is not None:
        container["command"] += ["--ps-listen", f":{names.SERVERS_PORT}"]
        port = {"name": names.SERVERS_PORT_NAME, "containerPort": names.SERVERS_PORT}
        container["ports"].append(port)
    if options.pull_policy:
        container["imagePullPolicy"] = options.pull_policy
    return container


def _volume(name: str, secret: str) -> Obj:
    """Return a volume of a Secret."""
    # 0440: owned by root and readable by the group of fsGroup only.
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}}


def _secret(job: ElasticJob, name: str, data: dict[str, bytes], kind: str = "Opaque") -> Obj:
    """Return an immutable Secret."""
    coded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"metadata": _meta(job, name), "type": kind, "immutable": True, "data": coded}


def _master_meta(job: ElasticJob) -> Obj:
    """Return the metadata of an object with the master's name."""
    return _meta(job, names.master_of(job.metadata.name))


def _meta(job: ElasticJob, name: str) -> Obj:
    """Return the metadata of an object that the job owns."""
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": _labels(job),
        "ownerReferences": [names.owner(job.metadata.name, job.metadata.uid)],
    }


def _labels(job: ElasticJob) -> dict[str, str]:
    """Return the labels of all objects of a job."""
    return {names.LABEL_APP: names.APP, names.LABEL_JOB: job.metadata.name}


def _selector(job: ElasticJob, role: str = names.ROLE_MASTER) -> dict[str, str]:
    """Return the labels that select the Pods of one role of a job."""
    return {names.LABEL_JOB: job.metadata.name, names.LABEL_ROLE: role}


def _of_job(job: ElasticJob) -> Obj:
    """Return the peer of a NetworkPolicy that means all Pods of a job."""
    return {"podSelector": {"matchLabels": {names.LABEL_JOB: job.metadata.name}}}


def _host(cluster_ip: str) -> str:
    """Return an address as it is written before a port."""
    return f"[{cluster_ip}]" if ":" in cluster_ip else cluster_ip


def _main(pod: Obj) -> Obj:
    """Return the main container of a Pod spec; {} if there is none.

    A single container counts whatever its name is. Of several, only the one with the name
    ``names.MAIN_CONTAINER`` does.
    """
    containers = [_dict(c) for c in _list(pod.get("containers"))]
    mains = [c for c in containers if c.get("name") == names.MAIN_CONTAINER]
    return (mains or containers or [{}])[0] if len(containers) == 1 or mains else {}


def _spec(template: Obj) -> Obj:
    """Return the Pod spec of a template."""
    return _dict(template.get("spec"))


def _dict(value: object) -> Obj:
    """Return a value if it is a mapping, otherwise {}."""
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    """Return a value if it is a list, otherwise []."""
    return value if isinstance(value, list) else []
