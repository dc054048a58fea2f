"""Every string that two processes share: ids, environment names, ports, file names.

A worker's environment follows torchrun (torch/distributed/elastic/agent/server)
and, inside an ElasticJob, DLRover's names; ours begin with ``DLROVER_``.
"""

import re
from typing import Final, NewType

NodeId = NewType("NodeId", str)
"""Name of one agent's place in the job (``n0``, ``n1`` …): never reused, and not a rank."""

_PART = re.compile(r"(\D*)(\d*)")


def id_key(node: NodeId) -> tuple[tuple[str, int], ...]:
    """Sorts n2 before n10 (torchrun sorts node10 before node2, pytorch#191190)."""
    return tuple((word, int(number or -1)) for word, number in _PART.findall(node))


Round = NewType("Round", int)
"""Number of an agreed membership, +1 each time; 0 means none yet."""

Incarnation = NewType("Incarnation", int)
"""Lives of a node id, assigned by the master; 0 means not assigned yet."""

Term = NewType("Term", int)
"""Number of a master's reign, from the journal; agents refuse lower ones."""

GROUP: Final = "elastic.iml.github.io"
API_VERSION: Final = f"{GROUP}/v1alpha1"
KIND: Final = "ElasticJob"
PLURAL: Final = "elasticjobs"
MANAGED_BY: Final = f"{GROUP}/dlrover-py-operator"
"""``spec.managedBy`` of a job that our operator looks after; absent means the same."""
MAIN_CONTAINER: Final = "main"

WIRE_VERSION: Final = "1.0"

# --- what the platform tells an agent (environment of a node) ---
ENV_MASTER_ADDR: Final = "DLROVER_MASTER_ADDR"
"""``host:port`` of the job's master."""
ENV_TOKEN_FILE: Final = "DLROVER_TOKEN_FILE"
"""File with the job's token; only its owner can read it."""
ENV_CA_FILE: Final = "DLROVER_CA_FILE"
"""Certificate of the authority that the master's is checked by; without it the line is plain."""
ENV_JOB_NAME: Final = "ELASTIC_JOB_NAME"
ENV_NODE_ID: Final = "DLROVER_NODE_ID"
ENV_JOB_UID: Final = "JOB_UID"
ENV_NODE_NUMBER: Final = "NODE_ID"
"""The number in the node's id."""
ENV_NODE_RANK: Final = "NODE_RANK"
"""The same: DLRover's scripts may read it; a node's rank is the master's to give."""
ENV_NODE_NUM: Final = "NODE_NUM"
"""The wished number of nodes when the Pod was made."""
ENV_NODE_TYPE: Final = "NODE_TYPE"
ENV_NODE_IP: Final = "NODE_IP"
ENV_POD_NAME: Final = "POD_NAME"
ENV_POD_IP: Final = "POD_IP"
ENV_LOG_DIR: Final = "DLROVER_LOG_DIR"
"""Where an agent keeps its workers' logs: ``<dir>/<node>/<incarnation>/<round>/<rank>/``."""
ENV_LIFELINE_FD: Final = "DLROVER_LIFELINE_FD"
"""A pipe's read end: when it reports end of file the platform is gone, and so ends the process."""

ENV_CONNECT_S: Final = "DLROVER_CONNECT_S"
"""The master must have answered an agent once within this time; 60 s if it is not set."""
ENV_NODE_MARK: Final = "DLROVER_NODE_MARK"
"""Random per node of this machine's cluster: every process of the node carries it."""

# --- what an agent tells its workers, beyond torchrun's names ---
ENV_AGENT_MARK: Final = "DLROVER_AGENT_MARK"
"""Random per agent: all that it starts, and that its workers start, carries it."""
ENV_AGENT_SOCKET: Final = "DLROVER_AGENT_SOCKET"
ENV_LOCAL_RANK: Final = "DLROVER_LOCAL_RANK"
"""The worker's place on its node; LOCAL_RANK is 0 for all of them with --virtual-local-rank."""
ENV_ROUND: Final = "DLROVER_ROUND"
ENV_RESTART_REASON: Final = "DLROVER_RESTART_REASON"
ENV_ARENA: Final = "DLROVER_ARENA"
"""The node's folder of shared memory (:mod:`dlrover_py.arena`)."""
ENV_DEPOT: Final = "DLROVER_DEPOT"
"""Unix socket at which the agent answers its workers' questions on checkpoints."""
ENV_CHECKPOINT: Final = "DLROVER_CHECKPOINT"
"""The job's ``checkpoint:``, as JSON."""
ENV_SHM_DIR: Final = "DLROVER_SHM_DIR"
"""Where agents have their arenas; ``/dev/shm`` if it is not set."""

JOB_ENV: Final = (
    ENV_MASTER_ADDR,
    ENV_TOKEN_FILE,
    ENV_CA_FILE,
    ENV_JOB_NAME,
    ENV_NODE_ID,
    ENV_LOG_DIR,
    ENV_LIFELINE_FD,
    ENV_NODE_MARK,
    ENV_AGENT_MARK,
    ENV_AGENT_SOCKET,
    ENV_LOCAL_RANK,
    ENV_ROUND,
    ENV_RESTART_REASON,
    ENV_ARENA,
    ENV_DEPOT,
    ENV_CHECKPOINT,
)
"""All that makes a process a part of a job."""

# --- what is kept from the workers, so that no script speaks for its agent unasked; one that looks
# for the token in its Pod, or as its user, finds it ---
PRIVATE_ENV: Final = (ENV_TOKEN_FILE, ENV_LIFELINE_FD)

# --- the master ---
MASTER_PORT: Final = 50001
"""DLRover's port, kept."""
MASTER_NAME: Final = "dlrover-master"
"""The name in the master's certificate: it is called by its address."""

# --- a job on Kubernetes: what the operator and the master make ---
LABEL_JOB: Final = "elasticjob.dlrover/name"
LABEL_ROLE: Final = "elasticjob.dlrover/replica-type"
LABEL_INDEX: Final = "elasticjob.dlrover/replica-index"
LABEL_UID: Final = "elasticjob.dlrover/uid"
"""Tells whose a Pod is once its ElasticJob was deleted without it (``--cascade=orphan``)."""
NOTE_PLAN: Final = "elasticjob.dlrover/plan"
"""Annotation of a master's Deployment: a sum of what was planned."""
NOTE_TEMPLATE: Final = "elasticjob.dlrover/template"
"""Annotation of a node's Pod: of which template it was made."""
LABEL_APP: Final = "app"
APP: Final = "dlrover"
ROLE_WORKER: Final = "worker"
ROLE_MASTER: Final = "dlrover-master"

OPERATOR_MANAGER: Final = "dlrover-operator"
"""Field managers of server-side apply: each owns its own part of the status."""
MASTER_MANAGER: Final = "dlrover-master"

HEALTH_PORT: Final = 8080
AGENTS_PORT_NAME: Final = "agents"
HEALTH_PORT_NAME: Final = "health"
TOKEN_MOUNT: Final = "/var/run/dlrover/token"
"""In the master's Pod: a folder with the keys of the token's Secret."""
TLS_MOUNT: Final = "/var/run/dlrover/tls"
NODE_MOUNT: Final = "/var/run/dlrover"
"""In a worker's Pod: the same Secret."""
SECRET_TOKEN: Final = "token"
SECRET_CA: Final = "ca.crt"
SECRET_CERT: Final = "tls.crt"
SECRET_KEY: Final = "tls.key"
TOKEN_FOLLOWS: Final = "elasticjob.dlrover/token-follows"
"""Annotation of a certificate's Secret: the job's token is what follows from its key."""
ENV_MASTER_JOB_UID: Final = "DLROVER_JOB_UID"
"""To a master: it adopts only what belongs to this very object."""
ENV_MASTER_SERVICE: Final = "DLROVER_MASTER_SERVICE"
"""To a master: ``host:port`` that its nodes are to call."""
ENV_POD_UID: Final = "POD_UID"


def master_of(job: str) -> str:
    """Name of a job's Deployment, Service, ServiceAccount, Role, RoleBinding, NetworkPolicy."""
    return f"elasticjob-{job}-dlrover-master"


def workers_policy_of(job: str) -> str:
    """Name of the NetworkPolicy of a job's worker Pods."""
    return f"elasticjob-{job}-worker"


def token_of(job: str, uid: str) -> str:
    """Secret with the job's token and the authority that its master's certificate is by.

    The job's uid is in the name: a kubelet may keep an immutable Secret for as long as one Pod has
    it, and give it to the Pods of the next job of this name too.
    """
    return f"elasticjob-{job}-token-{uid[:8]}"


def tls_of(job: str, uid: str) -> str:
    """Secret with the master's certificate and key; only the master has it."""
    return f"elasticjob-{job}-tls-{uid[:8]}"


def journal_of(job: str) -> str:
    """Secret that the master keeps its journal in."""
    return f"elasticjob-{job}-journal"


def pod_of(job: str, node: NodeId) -> str:
    """Name of a node's Pod."""
    return f"{job}-{node}"


def workers_of(job: str) -> str:
    """Label selector of a job's worker Pods."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"


def owner(job: str, uid: str) -> dict[str, object]:
    """The owner reference that has everything of a job deleted with it."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


# --- a job on this machine ---
CLUSTER_SOCKET: Final = "cluster.sock"
JOB_FILE: Final = "job.json"
STATUS_FILE: Final = "status.json"
HISTORY_FILE: Final = "history.json"
RUN_LOCK: Final = "run.lock"
"""In the folder of a run: locked as long as it goes on."""
JOURNAL_FILE: Final = "journal.json"
TOKEN_FILE: Final = "token"
