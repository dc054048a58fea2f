"""All strings that two processes share: ids, environment variables, ports, file names.

A worker's environment has the names of torchrun (torch/distributed/elastic/agent/server) and,
inside an ElasticJob, those of DLRover. Names that only DLRover-Py has begin with ``DLROVER_``.
"""

import re
from typing import Final, NewType

NodeId = NewType("NodeId", str)
"""Name of one agent's place in the job (``n0``, ``n1`` …): it is never reused, and is not a
rank."""

NODE_ID: Final = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
"""Regular expression of a node id. The folder of a node's logs and its Pod have this name."""

SERVER_PREFIX: Final = "ps"
"""Prefix of the ids of servers of a parameter server: ``ps0``, ``ps1`` …"""


def is_server(node: str) -> bool:
    """Return whether a node of this id has the role ``ps``: it is in no round."""
    return node.startswith(SERVER_PREFIX) and node.removeprefix(SERVER_PREFIX).isdecimal()


def role_of(node: str) -> str:
    """Return the role of a node, which its id tells: ``ps`` or ``worker``."""
    return SERVER_PREFIX if is_server(node) else ROLE_WORKER


_PART = re.compile(r"(\D*)(\d*)")


def id_key(node: NodeId) -> tuple[tuple[str, int], ...]:
    """Return a sort key that sorts n2 before n10.

    Any text has a key. (torchrun sorts node10 before node2, pytorch#191190.)
    """
    return tuple((word, int(number or -1)) for word, number in _PART.findall(node))


Round = NewType("Round", int)
"""Number of an agreed membership, +1 each time; 0 means that there is none yet."""

Timeline = NewType("Timeline", int)
"""Number of a timeline within a round: it grows when a script loads a state or goes back a step."""

Step = NewType("Step", int)
"""Number of a training step."""

Incarnation = NewType("Incarnation", int)
"""Number of a node id's incarnation, assigned by the master; 0 means that none is assigned yet."""

Term = NewType("Term", int)
"""Number of a master's term, from the journal; agents refuse lower ones."""

MAX_COUNT: Final = 2**53
"""Largest number of steps, rounds, ranks or bytes in a message: JSON carries it exactly."""

GROUP: Final = "elastic.iml.github.io"
"""API group of the ElasticJob, DLRover's."""
API_VERSION: Final = f"{GROUP}/v1alpha1"
"""API group and version of the ElasticJob."""
KIND: Final = "ElasticJob"
PLURAL: Final = "elasticjobs"
MANAGED_BY: Final = f"{GROUP}/dlrover-py-operator"
"""``spec.managedBy`` of a job that the operator of DLRover-Py manages; absent means the same."""
MAIN_CONTAINER: Final = "main"
"""Name of the container that runs the agent."""

# --- What the platform tells an agent: the environment of a node ---
ENV_MASTER_ADDR: Final = "DLROVER_MASTER_ADDR"
"""``host:port`` of the job's master."""
ENV_TOKEN_FILE: Final = "DLROVER_TOKEN_FILE"
"""File with the job's token; only its owner can read it."""
ENV_CA_FILE: Final = "DLROVER_CA_FILE"
"""Certificate of the authority that verifies the master's certificate; if it is not set, the
connection is not encrypted."""
ENV_JOB_NAME: Final = "ELASTIC_JOB_NAME"
"""Name of the job."""
ENV_NODE_ID: Final = "DLROVER_NODE_ID"
"""Id of the node."""
ENV_JOB_UID: Final = "JOB_UID"
"""uid of the job."""
ENV_NODE_NUMBER: Final = "NODE_ID"
"""The number in the node's id."""
ENV_NODE_RANK: Final = "NODE_RANK"
"""The number in the node's id, too: scripts of DLRover may read it. The master assigns the rank."""
ENV_NODE_NUM: Final = "NODE_NUM"
"""Desired number of nodes when the Pod was created."""
ENV_NODE_TYPE: Final = "NODE_TYPE"
"""Role of the node: ``worker`` or ``ps``."""
ENV_NODE_IP: Final = "NODE_IP"
"""Address of the node."""
ENV_POD_NAME: Final = "POD_NAME"
"""Name of the node's Pod."""
ENV_POD_IP: Final = "POD_IP"
"""IP address of the node's Pod."""
ENV_LOG_DIR: Final = "DLROVER_LOG_DIR"
"""Directory of an agent's worker logs: ``<dir>/<node>/<incarnation>/<round>/<rank>/``."""
ENV_LIFELINE_FD: Final = "DLROVER_LIFELINE_FD"
"""Read end of a pipe. At its end of file the platform is gone, and the process ends."""

ENV_CONNECT_S: Final = "DLROVER_CONNECT_S"
"""Seconds within which the master must have answered an agent once; 60 if it is not set."""
ENV_TOPOLOGY: Final = "DLROVER_TOPOLOGY"
"""The topology domain of the node, from the widest level to the narrowest: ``zone-a/rack-3``."""
ENV_NODE_MARK: Final = "DLROVER_NODE_MARK"
"""Random text for each node of the cluster on this machine: all processes of the node have it."""

# --- What an agent tells its workers, in addition to torchrun's names ---
ENV_AGENT_MARK: Final = "DLROVER_AGENT_MARK"
"""Random text for each agent: all processes that it or its workers start have it."""
ENV_AGENT_SOCKET: Final = "DLROVER_AGENT_SOCKET"
"""Unix datagram socket to which workers report their progress."""
ENV_LOCAL_RANK: Final = "DLROVER_LOCAL_RANK"
"""Rank of the worker on its node; with --virtual-local-rank, LOCAL_RANK is 0 for all workers."""
ENV_ROUND: Final = "DLROVER_ROUND"
"""Number of the round that the worker is in."""
ENV_RESTART_REASON: Final = "DLROVER_RESTART_REASON"
"""Why the round was formed; empty in the first round."""
ENV_SHM_POOL: Final = "DLROVER_SHM_POOL"
"""Directory of the node's shared-memory pool (:mod:`dlrover_py.checkpoint.shm`)."""
ENV_TRANSFER_SOCKET: Final = "DLROVER_TRANSFER_SOCKET"
"""Unix socket at which the agent answers its workers' requests about checkpoints."""
ENV_SHARDS_SOCKET: Final = "DLROVER_SHARDS_SOCKET"
"""Unix socket at which the agent answers its workers' requests about shards of datasets."""
ENV_PROBE_SOCKET: Final = "DLROVER_PROBE_SOCKET"
"""Unix socket at which a thread of each worker waits for the agent's question what it does."""
ENV_CHECKPOINT: Final = "DLROVER_CHECKPOINT"
"""The job's ``checkpoint:`` as JSON."""
ENV_LOADER: Final = "DLROVER_LOADER"
"""The settings of data loaders as JSON: :class:`~dlrover_py.protocol.agents.LoaderSettings`."""
ENV_PS: Final = "DLROVER_PS"
"""File that says where the job's parameter server is; only its owner can read it. In a Pod it is
the address of its coordinator, ``tcp://HOST:PORT``."""
ENV_SHM_DIR: Final = "DLROVER_SHM_DIR"
"""Directory in which agents have their shared-memory pools; ``/dev/shm`` if it is not set."""

ENV_CACHE_DIR: Final = "DLROVER_CACHE_DIR"
"""Folder of what runs keep for later ones; ``none`` for no folder."""

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
    ENV_SHM_POOL,
    ENV_TRANSFER_SOCKET,
    ENV_SHARDS_SOCKET,
    ENV_PROBE_SOCKET,
    ENV_CHECKPOINT,
    ENV_LOADER,
)
"""All variables that make a process a part of a job."""

# --- Variables that workers do not receive ---
# They are removed so that no script acts as its agent by accident. A script that searches its
# Pod, or the files of its user, still finds the token.
PRIVATE_ENV: Final = (ENV_TOKEN_FILE, ENV_LIFELINE_FD)

# --- The master ---
MASTER_PORT: Final = 50001
"""Default port of the master: DLRover's."""
SERVERS_PORT: Final = 50002
"""Port of the master for servers and workers of a parameter server."""
MASTER_NAME: Final = "dlrover-master"
"""The name in the master's certificate, since agents connect to its address."""

# --- A job on Kubernetes: objects of the operator and the master ---
LABEL_JOB: Final = "elasticjob.dlrover/name"
"""Label of an object: the name of its job."""
LABEL_ROLE: Final = "elasticjob.dlrover/replica-type"
"""Label of a Pod: its role in the job."""
LABEL_INDEX: Final = "elasticjob.dlrover/replica-index"
"""Label of a node's Pod: the number in the node's id."""
LABEL_UID: Final = "elasticjob.dlrover/uid"
"""Label with the job's uid. It shows to which job a Pod belongs after the ElasticJob was deleted
without its Pods (``--cascade=orphan``)."""
NOTE_PLAN: Final = "elasticjob.dlrover/plan"
"""Annotation of a master's Deployment: a digest of the plan."""
NOTE_ALLOCATION: Final = "elasticjob.dlrover/allocation"
"""Annotation of an ElasticJob: with the value ``off``, the operator allots no nodes to it."""
LABEL_PLACEMENT: Final = "elasticjob.dlrover/placement"
"""Label of a node's Pod: the kind of hosts that a queue has given to it."""
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""Label of an ElasticJob: the Kueue queue (LocalQueue) that admits it."""
NOTE_TEMPLATE: Final = "elasticjob.dlrover/template"
"""Annotation of a node's Pod: the digest of its template."""
LABEL_APP: Final = "app"
"""Label of all objects: the application."""
APP: Final = "dlrover"
"""Value of ``LABEL_APP``."""
ROLE_WORKER: Final = "worker"
"""Value of ``LABEL_ROLE`` for the Pod of a node with workers. That of a server is ``ps``."""
ROLE_MASTER: Final = "dlrover-master"
"""Value of ``LABEL_ROLE`` for the master's Pod."""

OPERATOR_MANAGER: Final = "dlrover-operator"
"""Field manager of the operator for server-side apply: it owns its own part of the status."""
ALLOCATOR_MANAGER: Final = "dlrover-allocator"
"""Field manager of the operator for ``status.allocation``."""
HOSTS_MANAGER: Final = "dlrover-hosts"
"""Field manager of the operator for ``status.badHosts``."""
MASTER_MANAGER: Final = "dlrover-master"
"""Field manager of the master for server-side apply: it owns its own part of the status."""

HEALTH_PORT: Final = 8080
"""Port of the health endpoint."""
AGENTS_PORT_NAME: Final = "agents"
"""Name of the master's port for agents."""
SERVERS_PORT_NAME: Final = "servers"
"""Name of the master's port for servers of a parameter server."""
HEALTH_PORT_NAME: Final = "health"
"""Name of the port of the health endpoint."""
TOKEN_MOUNT: Final = "/var/run/dlrover/token"
"""Directory in the master's Pod with the keys of the token's Secret."""
TLS_MOUNT: Final = "/var/run/dlrover/tls"
"""Directory in the master's Pod with its certificate and key."""
NODE_VOLUME: Final = "dlrover-job"
"""Name of the volume in a worker's Pod with the job's token, and prefix of other added volumes."""
NODE_MOUNT: Final = "/var/run/dlrover"
"""Directory in a worker's Pod with the keys of the token's Secret."""
SECRET_TOKEN: Final = "token"
"""Key of the token in a Secret."""
SECRET_CA: Final = "ca.crt"
"""Key of the authority's certificate in a Secret."""
SECRET_CERT: Final = "tls.crt"
"""Key of the master's certificate in a Secret."""
SECRET_KEY: Final = "tls.key"
"""Key of the master's private key in a Secret."""
TOKEN_FOLLOWS: Final = "elasticjob.dlrover/token-follows"
"""Annotation of a certificate's Secret: the job's token is derived from its key."""
ENV_MASTER_JOB_UID: Final = "DLROVER_JOB_UID"
"""uid of the job, for a master: it adopts only objects that belong to this job."""
ENV_MASTER_SERVICE: Final = "DLROVER_MASTER_SERVICE"
"""``host:port`` to which the nodes connect, for a master."""
ENV_POD_UID: Final = "POD_UID"
"""uid of the master's Pod."""


def master_of(job: str) -> str:
    """Return the name of the objects of a job's master.

    These are a Deployment, Service, ServiceAccount, Role, RoleBinding and NetworkPolicy.
    """
    return f"elasticjob-{job}-dlrover-master"


def workers_policy_of(job: str) -> str:
    """Return the name of the NetworkPolicy of a job's worker Pods."""
    return f"elasticjob-{job}-worker"


def token_of(job: str, uid: str) -> str:
    """Return the name of the Secret with the job's token.

    The Secret also has the authority that signed the certificate of the job's master. The job's uid
    is in the name. A kubelet may keep an immutable Secret as long as one Pod uses it. It would give
    this Secret to the Pods of the next job with the same name.
    """
    return f"elasticjob-{job}-token-{uid[:8]}"


def tls_of(job: str, uid: str) -> str:
    """Return the name of the Secret with the master's certificate and key.

    Only the master mounts it.
    """
    return f"elasticjob-{job}-tls-{uid[:8]}"


def journal_of(job: str) -> str:
    """Return the name of the Secret in which the master keeps its journal."""
    return f"elasticjob-{job}-journal"


def servers_of(job: str) -> str:
    """Return the name of the Secret in which the master keeps the map of a parameter server."""
    return f"elasticjob-{job}-servers"


def evidence_of(job: str) -> str:
    """Return the name of the Secret in which the master keeps bundles of evidence."""
    return f"elasticjob-{job}-evidence"


RECIPES: Final = f"{APP}-recipes"
"""Name of the Secret in which all masters of a namespace keep import recipes for later runs."""


def pod_of(job: str, node: NodeId) -> str:
    """Return the name of a node's Pod."""
    return f"{job}-{node}"


def workers_of(job: str) -> str:
    """Return the label selector of a job's worker Pods."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"


def nodes_of(job: str) -> str:
    """Return the label selector of the Pods of all nodes of a job: workers and servers."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE} in ({ROLE_WORKER},{SERVER_PREFIX})"


def owner(job: str, uid: str) -> dict[str, object]:
    """Return the owner reference by which everything of a job is deleted together with the job."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


# --- A job on this machine ---
CLUSTER_SOCKET: Final = "cluster.sock"
"""Unix socket of the cluster, in the directory of a run."""
JOB_FILE: Final = "job.json"
"""File with the job, in the directory of a run."""
STATUS_FILE: Final = "status.json"
"""File with the newest status, in the directory of a run."""
EVIDENCE_FOLDER: Final = "evidence"
"""Folder of a run with its bundles of evidence (docs/diagnosis.md)."""
MANIFEST_FILE: Final = "manifest.json"
"""Manifest of a bundle of evidence."""
HISTORY_FILE: Final = "history.json"
"""File with the history, in the directory of a run."""
RUNTIME_LINK: Final = "runtime"
"""Link in the directory of a run to its runtime folder, which depends on the user's TMPDIR."""
RUN_LOCK: Final = "run.lock"
"""File in the directory of a run, which is locked while the run goes on."""
JOURNAL_FILE: Final = "journal.json"
"""File with the master's journal, in the directory of a run."""
PS_ACCESS_FILE: Final = "ps.json"
"""Name of the file that says where a job's parameter server is."""
PS_MAP_FILE: Final = "ps-map.json"
"""Name of the file with the map of a job's parameter server, beside the journal."""
TOKEN_FILE: Final = "token"
"""File with the job's token, in the directory of a run."""
