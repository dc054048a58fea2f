"""The page docs/reference/protocol.md: all kinds of processes, and all messages between them.

:data:`PROCESSES` and :data:`WIRES` hold the facts that no single module has. The messages are read
from the classes. A test demands that each class of ``dlrover_py/protocol/``, and each module that
starts a process, is here.
"""

import ast
import dataclasses
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from annotated_types import GroupedMetadata
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dlrover_agent.channels import master_client, peer_probe
from dlrover_agent.checkpoint import saver
from dlrover_agent.checkpoint import server as transfer_server
from dlrover_agent.checkpoint.server import TransferTiming
from dlrover_agent.flags import TORCH_S
from dlrover_agent.observation import snapshot
from dlrover_agent.reaper import AGENT_END_MS
from dlrover_agent.reaper_client import DISMISSED_S, RESTART_PAUSE_S
from dlrover_agent.warm import forks, observer, pool, tcpstore, zygote
from dlrover_agent.workers import supervisor
from dlrover_py.checkpoint import directory, shm, transfer, writer
from dlrover_py.cli import runs
from dlrover_py.kubernetes.auth import CredentialTiming
from dlrover_py.master import journal_store
from dlrover_py.master import server as master_server
from dlrover_py.master.core import state
from dlrover_py.master.settings import Settings
from dlrover_py.net import http_client, http_server, liveness
from dlrover_py.process import starter
from dlrover_py.protocol import (
    agents,
    autoscale,
    bundles,
    data_ledger,
    diagnosis,
    errors,
    hosts,
    job,
    lease,
    local,
    log_rules,
    manifest,
    memory_growth,
    names,
    persister,
    probe,
    proof,
    reaper,
    reasons,
    recipe,
    refusals,
    resource_advice,
    sdk,
    shard_ledger,
    shards,
    shares,
    slots,
    status,
    timing,
    versions,
    workers,
)
from dlrover_py.protocol import transfer as transfer_messages
from dlrover_py.protocol import zygote as zygote_messages
from dlrover_py.ps import messages as ps_messages
from dlrover_py.ps import wire as ps_wire
from dlrover_py.ps.door import FRAME_BYTES
from scripts.reference import Row, _plain, attribute_texts, code, filled, page, table

UNANSWERED_S = liveness.ProbeTiming().hung_after_s
"""Seconds after which a master that does not answer is killed."""


# --- Processes ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One kind of process."""

    name: str
    started: str
    """Who starts it, and when."""
    ends: str
    """How it ends by itself."""
    killed: str
    """Who kills it, apart from its user, an administrator and the kernel's out-of-memory killer."""
    lost: str
    """What is lost if it is killed at any moment."""
    noticed: str
    """Who notices its end, and what follows."""
    starters: tuple[str, ...] = ()
    """Modules of DLRover that start it; empty if it is started from outside."""


PROCESSES: tuple[Process, ...] = (
    Process(
        name="operator",
        started="Kubernetes: the Deployment of the chart.",
        ends="At SIGTERM or SIGINT.",
        killed="The kubelet, when `/healthz` does not answer.",
        lost="Nothing: its state is in the objects of the API server. Jobs that are to be started, "
        "suspended or deleted wait.",
        noticed="The kubelet, which starts it again.",
    ),
    Process(
        name="master on Kubernetes",
        started="Kubernetes: a Deployment for each job, which the operator makes.",
        ends="At SIGTERM, or when another master has its journal.",
        killed="The kubelet, when `/healthz` does not answer. The operator ends it when the job is "
        "over or suspended.",
        lost="Nothing that counts: the journal is in a Secret. Workers go on. "
        "Agents send the import recipe again.",
        noticed="The kubelet, which starts it again. Agents see the closed connection and try "
        "again.",
    ),
    Process(
        name="cluster process",
        started="A user: `dlrover job run`, or `Jobs.submit` of a program or a notebook. "
        "`dlrover cluster run` starts one for each job.",
        ends="When the job has ended. At Ctrl-C, SIGTERM, SIGHUP or `dlrover job stop`.",
        killed="No process.",
        lost="The job. Its logs and its journal stay in the state folder.",
        noticed="The master, the agents and the reapers, by the end of the lifeline pipe. They "
        "end.",
        starters=("dlrover_py/cli/jobs.py", "dlrover_py/cli/shared.py"),
    ),
    Process(
        name="master on this machine",
        started="The cluster process, with sockets that outlive a master.",
        ends="At SIGTERM, or at the end of the lifeline pipe.",
        killed=f"The cluster process, after about {UNANSWERED_S:g} s without an answer.",
        lost="Nothing that counts: the journal is in a file. Workers go on. "
        "Agents send the import recipe again.",
        noticed="The cluster process immediately, which starts it again. Agents see the closed "
        "connection and try again.",
        starters=("dlrover_py/localcluster/cluster.py",),
    ),
    Process(
        name="parameter server",
        started="`dlrover ps serve`, which has the coordinator of its servers. In a job, the "
        "cluster process at the master's request. One that dies is replaced.",
        ends="At SIGTERM, when it has given its rows away. When its starter has ended.",
        killed="`dlrover ps serve`, at its end. The cluster process, when the workers have ended.",
        lost="Nothing that counts, if another server has copies of its rows.",
        noticed="`dlrover ps serve`, or the master of the job, immediately: it promotes the "
        "copies.",
        starters=("dlrover_py/ps/local.py",),
    ),
    Process(
        name="command of `dlrover ps serve`",
        started="`dlrover ps serve`, such as `elastic-run` with a script.",
        ends="By itself. `dlrover ps serve` passes SIGTERM and SIGHUP on.",
        killed="No process.",
        lost="What its workers have not pushed.",
        noticed="`dlrover ps serve`, which ends with its exit code.",
        starters=("dlrover_py/cli/ps.py",),
    ),
    Process(
        name="kubectl of `dlrover dashboard --operator`",
        started="`dlrover dashboard --operator`, for each Pod of the operator.",
        ends="When the Pod ends, or `dlrover dashboard`.",
        killed="`dlrover dashboard`, when it does not end within seconds.",
        lost="The connection to the operator's pages.",
        noticed="`dlrover dashboard`, which starts it again.",
        starters=("dlrover_py/cli/operator_pages.py",),
    ),
    Process(
        name="own master",
        started="The agent (or torchrun's agent) at the endpoint of a job without a platform, "
        "before its first round.",
        ends="At the end of the lifeline pipe. It then tells the other nodes to stop, within "
        f"{timing.END_NOTICE_S:g} s, and removes its folder. It ignores SIGTERM and SIGINT.",
        killed=f"Its agent, after about {UNANSWERED_S:g} s without an answer, or "
        f"{timing.OWN_MASTER_END_S:g} s after the end of the lifeline pipe. In a job of one "
        "node: immediately when the agent ends.",
        lost="Nothing that counts while its agent lives: the journal is in a folder of this "
        "run. Workers go on.",
        noticed="Its agent immediately, which starts it again with the same sockets. Other agents "
        "see the closed connection and try again.",
        starters=("agent/dlrover_agent/standalone.py",),
    ),
    Process(
        name="agent",
        started="Kubernetes: the main container of a Pod. The cluster process: one for each node. "
        "A user or a scheduler such as Slurm: `elastic-run`.",
        ends="When the master says stop. At SIGTERM, or at the end of the lifeline pipe. When an "
        f"own master was unreachable for {timing.MASTER_LOST_S:g} s and no workers run. When a "
        "process survives SIGKILL.",
        killed="The kubelet or the cluster process, after the grace period or by "
        f"`dlrover node kill`. Its reaper, {AGENT_END_MS // 1000} s after the end of the "
        "lifeline pipe.",
        lost="The node in this round, with its workers, and its checkpoints in memory. The memory "
        "stays if the platform starts the same node again.",
        noticed="Its reaper, which kills what is left. The master, by the closed connection or "
        "at the latest by the lease. The platform, which reports the end.",
        starters=("dlrover_py/localcluster/cluster.py",),
    ),
    Process(
        name="py-spy",
        started="The agent: once for each worker that cannot say what it does, for a snapshot.",
        ends="When it has written the stacks.",
        killed=f"The agent, after {snapshot.PY_SPY_S:g} s.",
        lost="The Python stack of one worker in one snapshot.",
        noticed="The agent, by the end of the output.",
        starters=("agent/dlrover_agent/observation/snapshot.py",),
    ),
    Process(
        name="torchrun's agent",
        started="A user: `torchrun --rdzv-backend=dlrover`.",
        ends="As torchrun does, and when the master says that the job has ended.",
        killed="No process of DLRover.",
        lost="The node in this round. After SIGKILL, its workers run on until they notice.",
        noticed="The master, by the closed connection or at the latest by the lease.",
    ),
    Process(
        name="reaper",
        started="The agent, before its workers.",
        ends="When its agent is gone: it kills what the agent has left, removes the agent's "
        "folders, and ends.",
        killed="Its agent, if it does not read its pipe, or has not ended "
        f"{DISMISSED_S:g} s after the agent's end.",
        lost="Nothing while the agent lives. If both are killed, processes that have left their "
        "worker's care run on, and folders stay.",
        noticed="Its agent immediately, which starts another and sends it all sessions. A failed "
        f"start is tried again after {RESTART_PAUSE_S:g} s.",
        starters=("agent/dlrover_agent/reaper_client.py",),
    ),
    Process(
        name="worker",
        started="The agent, for each local rank and round: cold, or forked from the zygote.",
        ends="When the user's script ends.",
        killed="Its agent at the end of the round: SIGTERM, then SIGKILL after the grace period. "
        "The kernel, when the agent ends. The reaper: its session, and what has the agent's mark.",
        lost="The steps since the newest checkpoint. Checkpoints in shared memory stay.",
        noticed="Its agent immediately, which reports the failure. The master forms the next "
        "round.",
        starters=(
            "agent/dlrover_agent/workers/supervisor.py",
            "agent/dlrover_agent/warm/zygote.py",
        ),
    ),
    Process(
        name="check worker",
        started="The agent, for each local rank, when the master asks for a "
        "[check](../network-check.md).",
        ends="When it has sent its times. Exit code 0 means that it has.",
        killed="As a worker.",
        lost="The check: it has failed.",
        noticed="Its agent immediately, which reports a failed check.",
        starters=("agent/dlrover_agent/workers/supervisor.py",),
    ),
    Process(
        name="zygote",
        started="The agent, once it has an import recipe. See "
        "[warm starts](../warm-start-internals.md).",
        ends="When its socket to the agent is closed.",
        killed="Its agent: it is not ready within "
        f"{pool.BuildTiming().timeout_s:g} s, an answer takes over {forks.FORK_S:g} s, or it "
        "is out of date. The kernel, when the agent ends.",
        lost="Nothing that counts. The next start of workers is cold, unless a new zygote is "
        "ready. Its spares, which are processes of their own, end with it.",
        noticed="Its agent immediately, which builds another. Workers and stores that it has "
        "forked are the agent's children, and go on.",
        starters=("agent/dlrover_agent/warm/zygote_start.py",),
    ),
    Process(
        name="helper forks of the zygote",
        started="The zygote: a child that tests a fork, and a process in between for each request.",
        ends="At once.",
        killed=f"The zygote: a test that takes longer than {zygote.PROBE_S:g} s.",
        lost="The test, or the request. The start is then cold.",
        noticed="The zygote, which waits for them.",
        starters=("agent/dlrover_agent/warm/zygote.py",),
    ),
    Process(
        name="TCPStore process",
        started="The agent of rank 0 for each round: forked from the zygote, or cold when a "
        "worker imports torch or connects.",
        ends="It does not.",
        killed="Its agent: at the end of the round, or if it does not serve within "
        f"{tcpstore.READY_S:g} s. The kernel, when the agent ends.",
        lost="The keys of the round, and so the round.",
        noticed="Its agent immediately, which reports a failure. The master forms the next round.",
        starters=("agent/dlrover_agent/warm/tcpstore.py", "agent/dlrover_agent/warm/zygote.py"),
    ),
    Process(
        name="persister",
        started="The agent: with the first staged checkpoint if a place for checkpoints is known, "
        "else with the first request.",
        ends="At an empty line, or at the end of its input. It cancels a write in progress.",
        killed="Its agent, at the agent's end. The kernel, when the agent ends.",
        lost="The write in progress. A checkpoint without a manifest does not exist; its slots "
        "stay in memory.",
        noticed="Its agent immediately, which reports the write as failed. The next request starts "
        f"another, at most {saver.RESTART_DELAYS_S[-1]:g} s later.",
        starters=("agent/dlrover_agent/checkpoint/saver.py",),
    ),
    Process(
        name="persister without an agent",
        started="The first worker of each node under `python` or `torchrun`, with the first "
        "request.",
        ends="At an empty line, or at the end of its input. It cancels a write in progress.",
        killed="The worker at its end, if the persister takes too long. The kernel, when the "
        "worker ends.",
        lost="The write in progress, as above.",
        noticed="A thread of that worker immediately. The next request starts another.",
        starters=("dlrover_py/trainer/standalone.py",),
    ),
    Process(
        name="cleanup shell without an agent",
        started="The first worker of each node under `python` or `torchrun`, with its memory for "
        "checkpoints.",
        ends="When it reads a line, or when the worker is gone. It removes the memory.",
        killed="The worker at its end, if the shell takes too long.",
        lost="Nothing while the worker lives. If both are killed, the memory stays. The next pool "
        f"of this user removes it when it is {shm.STALE_S / 60:g} minutes old.",
        noticed="No process.",
        starters=("dlrover_py/trainer/standalone.py",),
    ),
    Process(
        name="question to torch",
        started="`elastic-run`, to count devices or to explain an unknown flag.",
        ends="When it has answered.",
        killed=f"`elastic-run`, after {TORCH_S:g} s.",
        lost="The answer: `elastic-run` then goes on without it.",
        noticed="`elastic-run`, which waits for it.",
        starters=("agent/dlrover_agent/cli.py", "agent/dlrover_agent/flags.py"),
    ),
    Process(
        name="credential plugin",
        started="A program that calls the API server with a kubeconfig that names a plugin.",
        ends="When it has written the credentials.",
        killed=f"The program that started it, after {CredentialTiming().plugin_timeout_s:g} s.",
        lost="The call fails, or is made with older credentials that are still valid.",
        noticed="The program that started it, which waits for it.",
        starters=("dlrover_py/kubernetes/kubeconfig.py",),
    ),
    Process(
        name="`dlrover` command",
        started="A user.",
        ends="When it has done what it was asked.",
        killed="No process.",
        lost="Nothing: what it has asked for goes on.",
        noticed="No process. `dlrover job run` is the cluster process instead.",
    ),
    Process(
        name="self-test",
        started="Kubernetes: the Pod of `helm test`.",
        ends="When its small job has ended.",
        killed="The kubelet, when the Pod is deleted.",
        lost="Nothing: the operator removes the small job ten minutes after its end.",
        noticed="`helm test`, which fails.",
    ),
)
"""All kinds of processes."""

TREE = """
user ── dlrover job run (cluster process)
          ├── master
          └── agent, one for each node

Kubernetes ── operator
          ├── master, one for each job
          └── agent, one for each Pod

agent ── reaper
  ├── own master (where there is no platform, at the endpoint)
  ├── persister (if checkpoints go to storage)
  ├── worker, one for each local rank; check worker during a check
  ├── TCPStore process (on the node of rank 0)
  └── zygote ── forks workers and the TCPStore process, which become the agent's children

worker without an agent ── persister, cleanup shell
"""


# --- Wires ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One channel between processes."""

    title: str
    speakers: str
    """Who speaks, and to whom."""
    transport: str
    framing: str
    """How the bytes are divided into messages."""
    authentication: str
    version: str
    """How versions are told apart, and what a message of another version does."""
    limits: str
    """Sizes and times."""
    module: ModuleType | None = None
    """A module of ``dlrover_py/protocol/``, all of whose messages belong to this wire."""
    classes: tuple[type, ...] = ()
    """Further messages."""
    untyped: str = ""
    """What has no class in ``dlrover_py/protocol/``; empty if everything has one."""
    more: Callable[[], list[str]] = list
    """Returns lines of Markdown before the messages."""


def size(number: int) -> str:
    """Return a number of bytes as text with a unit."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 1 << power and number % (1 << power) == 0:
            return f"{number >> power} {unit}"
    return f"{number} bytes"


FORMAT_RULE = "See [the rule](../architecture.md#versions-of-documents)."
"""Where the rule for unknown fields and newer formats is."""
WIRES: tuple[Wire, ...] = (
    Wire(
        title="Agent and master",
        speakers="The agent calls the master. So do torchrun's agent and, for `/v1/job`, people. "
        "[Architecture](../architecture.md#one-exchange) explains the exchange.",
        transport="TCP: HTTP/1.1, with TLS 1.2 or newer on Kubernetes. Port "
        f"{names.MASTER_PORT} there.",
        framing="JSON in the body of a request and of a reply. The recipe is bytes.",
        authentication="`Authorization: Bearer` with the job's token. The master's certificate, "
        "or its [proof](#proof-of-a-master) where there is no TLS.",
        version=f"{versions.HTTP_API}, in the paths: `/v1/`. A request with another version gets "
        "status 404 and the refusal. An agent then ends with exit code 2.",
        limits=f"A body has at most {size(Settings.model_fields['max_body_bytes'].default)}, a "
        f"head {size(http_server.MAX_HEAD_BYTES)}, an assignment "
        f"{size(master_client.MAX_ASSIGNMENT_BYTES)}. The answer is held for `exchange_s` at most.",
        module=agents,
        classes=(errors.ErrorCode,),
        more=lambda: paths(routes(master_server.job_app)),
    ),
    Wire(
        title="Proof of a master",
        speakers="An agent asks, before it sends the token over a connection without TLS. See "
        "[security](../security.md#the-proof-of-a-master).",
        transport="The same connection, with `GET /v1/proof`.",
        framing="The nonce is in the query. The reply is one JSON string: the proof in "
        "hexadecimal.",
        authentication="HMAC-SHA256 with the token as the key, of the nonce and the address of "
        "the connection.",
        version="None: the path is the same in all versions. A master without it gets no token.",
        limits="The nonce has 16 to 64 bytes, the reply at most "
        f"{size(http_client.MAX_SHORT_REPLY_BYTES)}.",
        module=proof,
    ),
    Wire(
        title="Health and metrics",
        speakers="The kubelet, Prometheus, the cluster process, and the agent with an own master "
        "call the master. The first two also call the operator.",
        transport=f"TCP: HTTP/1.1 without TLS. Port {names.HEALTH_PORT} on Kubernetes, a port of "
        "the loopback device elsewhere.",
        framing="Plain text. Metrics have the format of Prometheus.",
        authentication="None: no secrets are shown.",
        version="None.",
        limits="A program on the same machine asks every "
        f"{liveness.ProbeTiming().probe_interval_s:g} s. It kills the master after "
        f"{liveness.MISSED} requests without an answer.",
        untyped="There are no documents. [Operations](../operations.md#health) lists the metrics, "
        "and the operator's answers.",
        more=lambda: paths(routes(master_server.health_app)),
    ),
    Wire(
        title="Worker and agent",
        speakers="The worker's SDK reports progress, and never waits. A check worker sends its "
        "times. The agent asks a script to stop.",
        transport=f"Unix datagrams, to the socket in `{names.ENV_AGENT_SOCKET}`.",
        framing="One JSON document for each datagram.",
        authentication="The socket's file mode 0600, and the round in each message.",
        version=f"`version`: {sdk.VERSION}. The agent drops a report of another version, and its "
        "log has the refusal once a round. The script trains on, but is not asked to stop before "
        "its signal.",
        limits=f"{size(sdk.MAX_DATAGRAM)} for each datagram.",
        module=workers,
    ),
    Wire(
        title="Dynamic shards",
        speakers="A worker asks its agent, which passes the request on to the master. See [dynamic "
        "shards](../dynamic-shards.md).",
        transport=f"Unix socket (`{names.ENV_SHARDS_SOCKET}`), then "
        "`POST /v1/nodes/{id}/shards` of the master. The master answers when its journal is "
        "written. The agent repeats a request until then.",
        framing="Worker and agent: one JSON document for each line. Agent and master: JSON bodies.",
        authentication="The socket's file mode 0600, and the round in each request. Agent and "
        "master: as above.",
        version=f"`version`: {shards.VERSION}. Another one is refused in words. Unknown fields are "
        "ignored.",
        limits=f"A request has at most {size(shards.MAX_REQUEST)}. The agent waits "
        f"{master_client.SHARDS_S:g} s for an answer before it asks again.",
        module=shards,
    ),
    Wire(
        title="Snapshots",
        speakers="An assignment asks for a snapshot. The agent asks the probe of each worker, a "
        "thread that connects to the agent, and sends all answers to the master. See "
        "[diagnosis](../diagnosis.md).",
        transport=f"Unix socket (`{names.ENV_PROBE_SOCKET}`), then "
        "`POST /v1/nodes/{id}/snapshot` of the master.",
        framing="The worker sends its round and local rank in a line. Then each line of the agent "
        "gets a line of JSON. Agent and master: JSON bodies.",
        authentication="The socket's file mode 0600; the worker checks the user of the agent. "
        "Agent and master: as above.",
        version="None: the probe is a part of the agent's release. Unknown fields are ignored.",
        limits=f"A worker has {snapshot.ANSWER_S:g} s to answer. A snapshot has at most "
        f"{size(diagnosis.MAX_SNAPSHOT_BYTES)}: stacks are cut to fit.",
        module=diagnosis,
    ),
    Wire(
        title="Environment of a worker",
        speakers="An agent starts a worker with it. The script and its SDK read it.",
        transport="Environment variables: those of torchrun, of DLRover, and `DLROVER_*`.",
        framing=f"Text. `{names.ENV_CHECKPOINT}` is the job's `checkpoint:` as a JSON object.",
        authentication="None: only the agent starts its workers.",
        version="None: a variable keeps its meaning, and a new meaning gets a new name. A variable "
        "that is absent has its default.",
        limits="6 MiB with the command line (execve).",
        more=lambda: filled(
            "`dlrover_py/protocol/names.py` has the names, and says what they mean."
        ),
    ),
    Wire(
        title="Cluster on this machine",
        speakers="The master and the `dlrover` command call the cluster process.",
        transport=f"Unix socket `{names.CLUSTER_SOCKET}` in the runtime folder: HTTP/1.1.",
        framing="JSON bodies. The watch is one JSON document for each line.",
        authentication="The runtime folder has mode 0700: only its user can enter it.",
        version=f"{versions.HTTP_API}, in the paths: `/v1/`. A `dlrover` command of another "
        "version ends with the refusal and exit code 2. Unknown fields of the job are refused.",
        limits=f"A status has at most {size(local.MAX_STATUS)}, an answer and a line of the watch "
        f"{size(http_client.MAX_REPLY_BYTES)}.",
        module=local,
        more=lambda: paths(local_routes()),
    ),
    Wire(
        title="Files of a run",
        speakers="The cluster process writes them. `dlrover` reads them when the run has ended.",
        transport=f"`{names.JOB_FILE}`, `{names.STATUS_FILE}` and `{names.HISTORY_FILE}` in the "
        "state folder of the run.",
        framing="One JSON document for each file: an ElasticJob, a `JobStatus`, a `History`.",
        authentication="The state folder belongs to its user alone.",
        version=f"That of the ElasticJob: {code(names.API_VERSION)}. A file that is not understood "
        "is reported as damaged, with the first fault. The logs can still be read.",
        limits=f"{size(runs.MAX_DOCUMENT_BYTES)} for each file.",
    ),
    Wire(
        title="Transfer of checkpoints",
        speakers="Workers call the transfer server of their own agent. Agents call the servers of "
        "their peers. A worker gets an open connection to a peer from its agent.",
        transport="Unix socket for workers "
        f"(`{names.ENV_TRANSFER_SOCKET}`), TCP for peers. Bytes go from the slot to the socket by "
        "`sendfile`.",
        framing="One JSON document for each line. `nbytes` in a reply says how many bytes follow. "
        "A descriptor comes with the reply to `connect`.",
        authentication="Workers: only this user can open the socket. Peers: both sides prove with "
        "HMAC-SHA256 that they have the token.",
        version=f"`version`: {transfer_messages.VERSION}. Each side refuses another one in words. "
        "Both proofs cover the version, too. Unknown fields are ignored.",
        limits=f"A request has at most {size(transfer_server.MAX_LINE)}, a line of a reply "
        f"{size(transfer.MAX_LINE)}, a document {size(transfer.MAX_DOCUMENT)}. "
        f"{transfer_server.MAX_CLIENTS} connections. The handshake takes at most "
        f"{TransferTiming().challenge_timeout_s:g} s. A pin lasts "
        f"{TransferTiming().pin_limit_s:g} s.",
        module=transfer_messages,
    ),
    Wire(
        title="Requests to a persister",
        speakers="An agent, or a worker without an agent, sends requests to its persister, which "
        "replies.",
        transport="Pipes: standard input and standard output of the persister.",
        framing="One JSON document for each line. An empty line ends the persister.",
        authentication="None: only its parent has the pipes.",
        version="None: a persister runs from the installation of the process that starts it, and "
        "ends with it.",
        limits=f"A request has at most {size(persister.MAX_REQUEST)}, a reply "
        f"{size(persister.MAX_REPLY)}. A line that is not understood costs a warning.",
        module=persister,
    ),
    Wire(
        title="Shares of persisters",
        speakers="The persisters of the nodes that write one checkpoint. One of them is the "
        "coordinator.",
        transport="Files below `step-<n>.<attempt>/parts/` in the directory or bucket of the "
        "checkpoints.",
        framing="One JSON document for each file. A node that fails writes why, into "
        "`<node>.failed.json`.",
        authentication="The rights of the directory or bucket. The folder's name has the random "
        "`attempt` of the master's request.",
        version=f"`format`: {shares.FORMAT}. A newer one ends the attempt. {FORMAT_RULE}",
        limits="A persister looks for the files of the others every "
        f"{writer.POLL_PAUSES_S[1]:g} s or more often.",
        module=shares,
        more=lambda: writers_files(),
    ),
    Wire(
        title="Lease of a directory",
        speakers="The persisters of all jobs that write into one directory of checkpoints.",
        transport=f"The file `{directory.LEASE_FILE}` in the directory or bucket.",
        framing="One JSON document.",
        authentication="The rights of the directory or bucket.",
        version=f"`format`: {lease.FORMAT}. A newer one is refused and never expires. "
        f"{FORMAT_RULE}",
        limits=f"At most {size(directory.MAX_LEASE)}. It is renewed every "
        f"{directory.RENEW_S:g} s, and expires {directory.LEASE_S:g} s after its last change.",
        module=lease,
    ),
    Wire(
        title="Ledger of the data",
        speakers="The workers of a training, and `dlrover data verify`.",
        transport="A folder, with a file for each rank in each loop over the loader.",
        framing="One line with a JSON document, and then "
        f"{data_ledger.DIGEST_BYTES} bytes for each committed step.",
        authentication="The rights of the folder.",
        version=f"`format`: {data_ledger.FORMAT}. {FORMAT_RULE}",
        limits=f"The line has at most {size(data_ledger.LONGEST_HEADER)}.",
        module=data_ledger,
    ),
    Wire(
        title="Ledger of leased shards",
        speakers="The workers of a training, and `dlrover data verify`.",
        transport="A folder, with a file for each worker in each history: a round, and each state "
        "that is loaded in it.",
        framing="Lines of JSON: the header, and then a list for each batch, answer of the lease "
        "queue, state and epoch.",
        authentication="The rights of the folder.",
        version=f"`format`: {shard_ledger.FORMAT}. {FORMAT_RULE}",
        limits=f"The header has at most {size(shard_ledger.LONGEST_HEADER)}, and each other line "
        f"{size(shard_ledger.LONGEST_LINE)}.",
        module=shard_ledger,
    ),
    Wire(
        title="Manifest of a checkpoint",
        speakers="The coordinating persister writes it. Scripts, `dlrover ckpt` and later "
        "persisters read it.",
        transport="The file `step-<n>.<attempt>.json` in the directory or bucket. A checkpoint "
        "exists once its manifest exists.",
        framing='One JSON document: `{"xxh3": "…", "manifest": {…}}`. The digest covers the '
        "manifest.",
        authentication="The rights of the directory or bucket. A digest is not a signature.",
        version=f"`format`: {manifest.FORMAT}. A newer one is refused, and stays. {FORMAT_RULE}",
        limits=f"At most {size(directory.MAX_DOCUMENT)}.",
        module=manifest,
    ),
    Wire(
        title="Slots in shared memory",
        speakers="Workers write slots. The agent, its transfer server, its persister and later "
        "workers read them.",
        transport=f"Files in a folder of a tmpfs (`{names.ENV_SHM_POOL}`), mapped into memory.",
        framing="The first page has the header as JSON with its XXH3. Then come tensors, "
        "objects, the table of chunks, and digests.",
        authentication="The folder belongs to its user alone. A writer holds an exclusive lock on "
        "a slot (`flock`).",
        version=f"`format`: {slots.FORMAT}, for all documents in the slot. A newer one is refused, "
        f"and stays. {FORMAT_RULE} The magic `DLRSLOT1` never changes.",
        limits=f"{shm.SLOTS} slots for each worker. The header fits into {slots.PAGE} bytes.",
        module=slots,
    ),
    Wire(
        title="Ranks of a script",
        speakers="The Checkpointers of all workers of a round.",
        transport="torch.distributed: collectives of the script's process group, and its TCPStore.",
        framing="An all-reduce of whole numbers for each save (`RankVote`). JSON otherwise.",
        authentication="As torch: [none](../security.md#ports-of-the-store-gloo-and-nccl).",
        version="None: the workers of one job are expected to have the same version of DLRover-Py.",
        limits="Those of the process group.",
        untyped="The values are in `dlrover_py/trainer/`, which alone sends and receives them.",
    ),
    Wire(
        title="Parameter server",
        speakers="Workers and servers call the coordinator, which is in the master of a job or in "
        "`dlrover ps serve`. Workers push rows to servers and pull them. Servers copy buckets to "
        "each other. See [the parameter server](../parameter-server.md).",
        transport="TCP: ZeroMQ (DEALER to ROUTER).",
        framing="A prelude, a body in MessagePack, and the arrays of rows, in frames of at most "
        f"{size(FRAME_BYTES)}.",
        authentication="Before any message, a password made from the job's token (PLAIN); then "
        "each prelude proves that the sender knows the token.",
        version=f"{ps_wire.VERSION}, in the prelude. A message of another version is answered with "
        "`Unreadable`, and nothing is done.",
        limits=f"A body has at most {size(ps_wire.MAX_BODY_BYTES)}, the arrays of a message "
        f"{size(ps_wire.MAX_PAYLOAD_BYTES)}.",
        classes=get_args(ps_messages.Message),
        untyped="Only programs with the parameter server use the classes, which are in "
        "`dlrover_py/ps/messages.py`.",
    ),
    Wire(
        title="Import recipes",
        speakers="An agent stores the recipe of its job on the master. Agents that start later "
        "fetch it. In a cluster, the master also keeps recipes for later runs.",
        transport="`PUT /v1/recipe` and `GET /v1/recipe` of the master. `recipe` in an assignment "
        "is its digest. `/v1/recipes/{key}` is for later runs, with the content of a file of the "
        "[cache](../warm-start.md#the-first-start).",
        framing="JSON that is compressed with zlib.",
        authentication="As between agent and master.",
        version=f"`version`: {recipe.VERSION}. A recipe that is refused costs a warning and a cold "
        "start.",
        limits=f"{size(recipe.MAX_RECIPE)} when unpacked, and the master's limit of a body.",
        module=recipe,
    ),
    Wire(
        title="Records of imports",
        speakers="A worker that was started cold writes what it imports. Its agent reads it.",
        transport="A file in the agent's folder, mapped into memory.",
        framing="One Python tuple for each line: `('import', name, origin)`, `('env', key, value)` "
        "or `('env', key, None)`; at first `('start', key, value)`.",
        authentication="The folder belongs to its user alone.",
        version="None: agent and recorder run from the same installation.",
        limits=f"{size(observer.RECORD_SIZE)}. The agent looks every {observer.RECORD_POLL_S:g} s.",
        untyped="`protocol/recipe.py` reads the lines, as tuples. "
        "`agent/dlrover_agent/warm/script.py` writes them: a worker must not import `dlrover_py` "
        "before the script, which may bring another release of it.",
    ),
    Wire(
        title="Requests to a zygote",
        speakers="The agent configures its zygote, and asks it to fork. The zygote answers.",
        transport="A file with the configuration, then a pair of unix sockets. Descriptors come "
        "with the first byte of a message.",
        framing=f"JSON after a length of {zygote_messages.LENGTH} bytes (big endian).",
        authentication="None: only the two processes have the sockets.",
        version="None: agent and zygote run from the same installation. With another interpreter "
        "in `PYTHON_EXEC` there is no zygote.",
        limits=f"{size(zygote_messages.MAX_MESSAGE)} and {forks.MAX_FDS} descriptors for each "
        f"message. An answer takes at most {forks.FORK_S:g} s. A request that is not understood is "
        "refused in words.",
        module=zygote_messages,
    ),
    Wire(
        title="Control socket of a forked process",
        speakers="The agent gives a forked process its task, as a message to a zygote is written, "
        "and lets it go. The process says that it has started.",
        transport="A pair of unix sockets.",
        framing=f"The task; one byte in each direction: `{zygote_messages.GO.decode()}` (go), and "
        f"`{zygote_messages.STARTED.decode()}` (started). If the agent closes the socket before "
        "`g`, the process ends.",
        authentication="None: only the two processes have the sockets.",
        version="None: both run from the same installation.",
        limits=f"A worker must have started within {supervisor.FORK_START_S:g} s, a store within "
        f"{tcpstore.READY_S:g} s.",
    ),
    Wire(
        title="Lines to a reaper",
        speakers="The agent names to its reaper the sessions that it has started and that have "
        "ended.",
        transport="A pipe.",
        framing="Lines `+PID@TICKS` (started) and `-PID@TICKS` (ended). The end of the pipe means "
        "that the agent is gone.",
        authentication="None: only the agent has the other end.",
        version="None: agent and reaper run from the same installation.",
        limits=f"{size(reaper.MAX_LINE)} for each line. A reaper that reads another line ends, and "
        "one that does not read is killed. Another one gets all sessions.",
        module=reaper,
    ),
    Wire(
        title="Pipe to a cleanup shell",
        speakers="A worker without an agent ends its cleanup shell.",
        transport="A pipe: standard input of the shell.",
        framing="An empty line, or the end of the pipe, means that the memory is to be removed.",
        authentication="None: only its parent has the pipe.",
        version="None: the shell is started with its program.",
        limits="None of its own.",
        untyped="There are no messages.",
    ),
    Wire(
        title="Lifeline pipe",
        speakers="The cluster process, to its master, agents and reapers. An agent, to its own "
        "master.",
        transport=f"A pipe whose read end is inherited (`{names.ENV_LIFELINE_FD}`, "
        "`--lifeline-fd`).",
        framing="Nothing is written. The end of the pipe means that the holder of the write end "
        "is gone.",
        authentication="None: only the holder has the write end.",
        version="None.",
        limits=f"An agent that does not end {AGENT_END_MS // 1000} s later is killed by its "
        "reaper.",
        untyped="There are no messages.",
    ),
    Wire(
        title="Probe of rank 0",
        speakers="Agents of a round ask the agent of rank 0 whether it is there, while the master "
        "is silent. See [decision 0004](../decisions/0004-cut-off-nodes.md).",
        transport="UDP, to the number of the round's `MASTER_PORT`.",
        framing=f"{probe.LENGTH} bytes: 8 of the round (big endian), {probe.NONCE} of a nonce, "
        "32 of a proof. The answer repeats the nonce.",
        authentication="HMAC-SHA256 with the token, of `dlrover contact 1`, the side (`ask` or "
        "`answer`), the round and the nonce.",
        version=f"{probe.VERSION}; the proof covers it, so a datagram of another version is "
        "ignored. Silence of an agent that was never heard means nothing.",
        limits=f"{peer_probe.MAX_DATAGRAMS} datagrams are read before other work is done.",
        module=probe,
    ),
    Wire(
        title="Error file of a worker",
        speakers="A worker writes the exception that ended it. Its agent reads it.",
        transport="The file in `TORCHELASTIC_ERROR_FILE`.",
        framing="One JSON document, in the format of torch's `record`.",
        authentication="The folder belongs to its user alone.",
        version="Torch's.",
        limits="The agent waits 2 s for it, then uses the last words of the worker.",
        untyped="Torch defines the document.",
    ),
    Wire(
        title="Journal of a job",
        speakers="A master, to the next master of the job.",
        transport=f"The file `{names.JOURNAL_FILE}` in the run's folder, or a Secret (compressed).",
        framing="One JSON document, which each write replaces.",
        authentication="One writer: a lock on a file, or the version of the Secret.",
        version="`version`: 1. Another one is refused. Unknown fields are ignored.",
        limits=f"{size(journal_store.MAX_BYTES)} when unpacked. A write takes at most "
        f"{journal_store.SAVE_S:g} s.",
        untyped="Only masters read it, so its classes are in `dlrover_py/master/core/`. Its inner "
        "records are not listed here.",
        classes=(state.DurableState, state.PendingRound, state.ReplacementSlot),
    ),
    Wire(
        title="Kubernetes objects",
        speakers="The operator, masters and `dlrover` call the API server. [The "
        "guide](../kubernetes.md#what-a-job-is-made-of) lists the objects.",
        transport="HTTPS.",
        framing="JSON, as Kubernetes defines it. The fields of an ElasticJob are in [its "
        "reference](elasticjob.md).",
        authentication="ServiceAccounts, kubeconfigs and RBAC. See "
        "[security](../kubernetes.md#security).",
        version=f"{code(names.API_VERSION)}.",
        limits="A status has at most 50 kB.",
    ),
)
"""All channels between processes."""

ELSEWHERE: Mapping[ModuleType, str] = {
    autoscale: "[ElasticJob](elasticjob.md#what-you-write-spec)",
    bundles: "[Diagnosis](../diagnosis.md#evidence)",
    memory_growth: "[ElasticJob](elasticjob.md#what-you-write-spec)",
    resource_advice: "[ElasticJob](elasticjob.md#what-you-write-spec)",
    hosts: "[ElasticJob](elasticjob.md#what-is-reported-status)",
    job: "[ElasticJob](elasticjob.md#what-you-write-spec)",
    log_rules: "[ElasticJob](elasticjob.md#what-you-write-spec)",
    status: "[ElasticJob](elasticjob.md#what-is-reported-status)",
    reasons: "[Conditions](conditions.md), [Events](events.md)",
    refusals: "[Conditions](conditions.md)",
}
"""Modules of ``dlrover_py/protocol/`` whose fields are on other pages."""

NOT_SENT: Mapping[str, str] = {
    "CheckpointId": "Messages carry its three numbers: see `CheckpointReference`.",
    "Rejection": "The key `rejected` of the checkpoint policy in `Assignment` has some of them.",
    "Document": "Base of the classes that are files of JSON.",
    "Split": "Words of a command line, inside of one process.",
    "Call": "Words of a command line, inside of one process.",
    "TemplateFault": "A fault of a Pod template, which becomes a sentence.",
    "CutStorage": "Fields of the Pod of a master that writes cuts.",
    "Timing": "Settings of the master: see [Settings](settings.md#settings-of-the-master).",
    "AgentRequest": "`WorkerRequest` as a tuple, for the SDK, which has no pydantic.",
    "LoaderFields": "`LoaderState` as a dictionary, for the SDK, which has no pydantic.",
    "LoaderTuning": "`LoaderSettings` as a tuple, for the SDK, which has no pydantic.",
    "RankRange": "`Collective` has some: a list of three numbers each.",
    "ProgressFields": "`WorkerProgress` as a dictionary, for the SDK, which has no pydantic.",
    "TargetFields": "`CheckpointTarget` as a dictionary, for the SDK.",
    "TimeShare": "A row about where the time went, inside of one process.",
    "WrongFields": "`WrongValue` as a dictionary, for the SDK.",
    "LogTail": "Output as people are shown it, inside of one process.",
    "JobView": "What people are shown of a job, inside of one process.",
    "ExitCode": "See [Exit codes](exit-codes.md).",
}
"""Classes of ``dlrover_py/protocol/`` that are not messages, with the reason."""


# --- Paths of HTTP ---


def routes(made: Callable[..., object]) -> Iterator[Row]:
    """Yield method, path and meaning of each path of an application, from the code that makes it.

    The meaning is the first sentence of the function's docstring.

    Args:
        made: The function that makes the application.
    """
    scope = inspect.unwrap(made).__globals__
    for node in ast.walk(ast.parse(inspect.getsource(made))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for mark in node.decorator_list:
            match mark:
                case ast.Call(
                    func=ast.Attribute(attr="get" | "put" | "post" | "delete" as verb),
                    args=[path, *_],
                ):
                    said = first_sentence(ast.get_docstring(node) or "")
                    yield verb.upper(), _constant(path, scope), said


def _constant(node: ast.expr, scope: Mapping[str, Any]) -> str:
    """Return the value of a constant, or of a name such as ``PATH`` or ``proof.PATH``."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.Name(id=name):
            return str(scope[name])
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return str(getattr(scope[module], name))
    raise ValueError(f"expected a constant for a path, found {ast.unparse(node)}")


def local_routes() -> Iterator[Row]:
    """Yield method, path and meaning from the table in the docstring of ``protocol/local.py``."""
    rows: list[list[str]] = []
    for line in inspect.getdoc(local).splitlines():  # type: ignore[union-attr]
        if re.match(r"(GET|PUT|POST|DELETE) ", line):
            rows.append(re.split(r"\s{2,}", line, maxsplit=2))
        elif rows and line.startswith(" "):
            rows[-1][2] += " " + line.strip()
    for verb, path, said in rows:
        yield verb, path, prose(said)


def paths(found: Iterable[Row]) -> list[str]:
    """Return a table of paths."""
    rows = [(verb, code(path), said) for verb, path, said in found]
    return table(("method", "path", "what it does"), rows)


def writers_files() -> list[str]:
    """Return the table of the files of a checkpoint, from the docstring of the persister."""
    said = inspect.getdoc(writer) or ""
    block = said.partition("::\n\n")[2].partition("\n\n")[0]
    head, *rows = [re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in block.splitlines()]
    return table(tuple(head), [(code(file), prose(what), who) for file, what, who in rows])


# --- Messages ---


def in_module(module: ModuleType) -> list[type]:
    """Return the public classes that a module defines, but no errors, in their order."""
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and one.__module__ == module.__name__
        and not one.__name__.startswith("_")
        and not issubclass(one, Exception)
    ]


def prose(text: str) -> str:
    """Return the text of a docstring as Markdown."""
    return _plain(re.sub(r":(?!mod)\w+:`~?(?:dlrover_[a-z_.]+)?([\w.]+)`", r"`\1`", text))


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, as Markdown.

    Without a full stop it is the whole text.
    """
    text = " ".join(inspect.cleandoc(text).split())
    found = re.match(r".*?\.(?=\s|$)", text)
    return prose(found[0] if found else text)


def listed() -> set[str]:
    """Return the names of the classes that have a heading on the page."""
    return {one.__name__ for wire in WIRES for one in messages(wire)}


def messages(wire: Wire) -> list[type]:
    """Return the messages of a wire."""
    return [*(in_module(wire.module) if wire.module else []), *wire.classes]


def named(one: type) -> str:
    """Return the name of a class, with a link to its fields if any page has them, else as code."""
    name = one.__name__
    if name in listed():
        return f"[{name}](#{name.lower()})"
    for module, where in ELSEWHERE.items():
        if one.__module__ == module.__name__:
            return re.sub(r"\[\w+\]", f"[{name}]", where.split(",", maxsplit=1)[0])
    return code(name)


SIMPLE: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    type(None): "null",
    Any: "any",
}


def kind(of: Any, *limits: Any) -> str:
    """Return a type in words.

    Args:
        of: The type.
        limits: Metadata of the field, as pydantic has them.
    """
    origin, inner = get_origin(of), get_args(of)
    if origin is Annotated:
        return kind(inner[0], *inner[1:], *limits)
    if isinstance(of, NewType):
        return kind(of.__supertype__, *limits)
    if any(hasattr(one, "json_schema") and one.json_schema for one in limits):
        return "time (RFC 3339)"
    if origin in (Union, types.UnionType):
        return " or ".join(kind(one) for one in inner)
    if origin is Literal:
        words = ", ".join(code(str(one)) for one in inner)
        return f"one of {words}" if len(inner) > 1 else words
    bounds = _bounds(limits)
    if origin is tuple and inner[-1:] != (...,):
        return f"list of {len(inner)}: {', '.join(map(kind, inner))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key = kind(inner[0])
        by = "" if key == "string" else f", by {key},"
        return f"map{_some(bounds)}{by} of {kind(inner[1])}"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"list{_some(bounds)} of {kind(inner[0])}"
    if of is str:
        form = f" of the form {code(bounds['pattern'])}" if "pattern" in bounds else ""
        return f"string{_some(bounds)}{form}"
    if of in (int, float):
        return SIMPLE[of] + _range(bounds)
    return SIMPLE[of] if of in SIMPLE else named(of)


def _bounds(limits: Iterable[Any]) -> dict[str, Any]:
    """Return the limits in the metadata of a field, by their names in pydantic."""
    found: dict[str, Any] = {}
    for one in limits:
        if isinstance(one, FieldInfo):
            found |= _bounds(one.metadata)
        elif isinstance(one, GroupedMetadata):
            found |= _bounds(one)
        else:
            for name in ("ge", "gt", "le", "min_length", "max_length", "pattern"):
                if getattr(one, name, None) is not None:
                    found[name] = getattr(one, name)
    return found


def _some(bounds: Mapping[str, Any]) -> str:
    """Return the limits of a length in brackets, as ``[1 to 64]``; empty if there are none."""
    least, most = bounds.get("min_length"), bounds.get("max_length")
    if least is not None and most is not None:
        return f" [{least} to {most}]"
    if most is not None:
        return f" [at most {most}]"
    return f" [{least} or more]" if least is not None else ""


def _range(bounds: Mapping[str, Any]) -> str:
    """Return the limits of a number in brackets; empty if there are none."""
    if "gt" in bounds:
        return f" [more than {bounds['gt']}]"
    if "ge" in bounds and "le" in bounds:
        return f" [{bounds['ge']} to {_number(bounds['le'])}]"
    return f" [{bounds['ge']} or more]" if "ge" in bounds else ""


def _number(value: Any) -> str:
    """Return a number; a power of two that is hard to read as 2^n."""
    for less in (0, 1):
        power = value + less
        if isinstance(power, int) and power >= 1 << 32 and power & (power - 1) == 0:
            return f"2^{power.bit_length() - 1}" + (" - 1" if less else "")
    return str(value)


def default(value: Any) -> str:
    """Return the default of a field as JSON, in code; empty if JSON cannot express it."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, tuple | set):
        value = list(value)
    try:
        return code(json.dumps(value))
    except TypeError:
        return ""


def fields(one: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and default of each field that a class itself defines.

    Fields that are never sent, and inherited ones, are left out. The default of a field without one
    is ``required``.
    """
    own = inspect.get_annotations(one)
    known = getattr(one, "model_fields", None) or getattr(one, "__pydantic_fields__", None)
    if known is not None:
        for name, field in known.items():
            if name in own and not field.exclude:
                value = field.get_default(call_default_factory=True)
                given = "required" if field.is_required() else default(value)
                yield name, kind(field.annotation, *field.metadata), given
        return
    hints = get_type_hints(one, include_extras=True)
    givens: dict[str, Any] = dict(getattr(one, "_field_defaults", {}))
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            if field.default is not dataclasses.MISSING:
                givens[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                givens[field.name] = field.default_factory()
    for name in own:
        yield name, kind(hints[name]), default(givens[name]) if name in givens else "required"


def message(one: type) -> list[str]:
    """Return the section of a class: its first sentence, and its fields or values.

    The fields of a base that has a section are not repeated.
    """
    texts = attribute_texts(inspect.getsource(one))
    name, said = one.__name__, first_sentence(one.__doc__ or "")
    if issubclass(one, Enum):
        values = [(code(str(value)), text) for value, text in _values(one)]
        lines = table(("value", "meaning"), values)
        if not any(text for _, text in values):
            lines = filled(f"The values are {', '.join(value for value, _ in values)}.")
        return [f"### {name}", "", *filled(said), "", *lines]
    rows = list(fields(one))
    bases = [base for base in one.__bases__ if base.__name__ in listed() and _has_fields(base)]
    lines = [f"### {name}", "", *filled(said)]
    if bases:
        lines += ["", *filled(f"It has the fields of {' and '.join(map(named, bases))}.")]
    if rows:
        head = ("field", "type", "default", "meaning")
        cells = []
        for field, of, given in rows:
            meaning = prose(texts.get(field, ""))
            if not meaning and re.fullmatch(r"`[a-z0-9]+`", of):
                meaning = "Always this value."
            cells.append((code(field), of, given, meaning))
        lines += ["", *table(head, cells)]
    return lines


def _has_fields(one: type) -> bool:
    return issubclass(one, BaseModel) and bool(one.model_fields)


def _values(words: type[Enum]) -> Iterator[tuple[str, str]]:
    """Yield each value of an enumeration with its docstring or comment, or with empty text."""
    source = inspect.getsource(words)
    texts = attribute_texts(source)
    for member in words:
        found = re.search(rf"^    {member.name} = .*?  # (.+)$", source, re.MULTILINE)
        said = texts.get(member.name) or (found[1] if found else "")
        yield member.value, prose(said)


# --- The page ---


def processes() -> list[list[str]]:
    """Return the sections about processes."""
    return [
        ["## Processes", "", "```text", *TREE.strip().splitlines(), "```"],
        filled(
            """
            These tables have every kind of process. A user, an administrator and the kernel's
            out-of-memory killer may kill each of them. The column *killed by* names who else does.
            """
        ),
        ["### Start and end"],
        table(
            ("process", "started by", "ends by itself", "killed by"),
            [(one.name, one.started, one.ends, one.killed) for one in PROCESSES],
        ),
        ["### What a kill costs"],
        table(
            ("process", "what is lost", "who notices, and what follows"),
            [(one.name, one.lost, one.noticed) for one in PROCESSES],
        ),
        filled(
            f"""
            A start in a thread that takes longer than {starter.START_S:g} s is given up, and its
            process is killed. [Architecture](../architecture.md#what-may-block) has all limits.
            Handlers of elastic events and logs specs are threads, not processes.
            """
        ),
    ]


def version_rule() -> list[str]:
    """Return the section about versions: the docstring of ``protocol/versions.py``."""
    text = inspect.cleandoc(versions.__doc__ or "").replace("``", "`")
    more = "[Versions of documents](../architecture.md#versions-of-documents) has what follows for "
    more += "each kind of document."
    return ["## Versions and unknown fields", "", *text.splitlines(), "", *filled(more)]


def wires() -> Iterator[Sequence[str]]:
    """Yield the sections about wires: an overview, then each wire with its messages."""
    head: Row = ("wire", "transport", "defined in `dlrover_py/protocol/`")
    rows = [
        (
            f"[{wire.title}](#{wire.title.lower().replace(' ', '-')})",
            wire.transport,
            "no" if wire.untyped else "yes",
        )
        for wire in WIRES
    ]
    yield ["## Wires", "", *table(head, rows)]
    for wire in WIRES:
        facts = [
            ("speakers", wire.speakers),
            ("transport", wire.transport),
            ("framing", wire.framing),
            ("authentication", wire.authentication),
            ("version", wire.version),
            ("limits", wire.limits),
        ]
        if wire.untyped:
            facts.append(("not defined in `dlrover_py/protocol/`", wire.untyped))
        yield [f"## {wire.title}", "", *table(("", ""), facts)]
        if more := wire.more():
            yield more
        for one in messages(wire):
            yield message(one)
    head = ("class", "meaning", "its fields")
    yield table(
        head,
        [
            (code(one.__name__), first_sentence(one.__doc__ or ""), where)
            for module, where in ELSEWHERE.items()
            for one in in_module(module)
        ],
    )


def protocol() -> str:
    """Return the page docs/reference/protocol.md."""
    intro = """
        All kinds of processes of DLRover-Py, and all that they send to one another. The tables of
        messages are made from the classes in the code.

        [Architecture](../architecture.md) explains how the processes work together, and
        [security](../security.md) whom they trust.

        In the tables of fields, brackets have limits: the values of a number, the characters of a
        string, or the elements of a list or a map. `None` in a meaning is JSON's `null`.
    """
    rest = [
        ["## Classes that are not sent"],
        filled("These classes of `dlrover_py/protocol/` stay inside of one process."),
        table(("class", "what it is"), [(code(name), why) for name, why in NOT_SENT.items()]),
    ]
    return page("Processes and messages", intro, *processes(), version_rule(), *wires(), *rest)
