"""The API of the cluster on this machine (:mod:`dlrover_py.localcluster.cluster`).

The cluster has the part of the API server for one job. It speaks JSON over a unix socket that only
its user can open.

========  ===========================  ===================================================
method    path                         what it does
========  ===========================  ===================================================
GET       /v1/job                      return the :class:`Snapshot`
GET       /v1/history                  return the :class:`History`
GET       /v1/watch                    return lines of :class:`WatchEvent` without end: the
                                       complete state first, then its changes
PUT       /v1/status                   publish the master's
                                       :class:`~dlrover_py.protocol.status.JobStatus`
PUT       /v1/nodes/{id}               create a node, now or when there is a free host
DELETE    /v1/nodes/{id}?grace_s=      end the node
PUT       /v1/allocation               change how many hosts of a shared cluster the job has
POST      /v1/scale?replicas=&role=    change the desired number of nodes of a role
POST      /v1/suspend?on=              set ``spec.suspend``
POST      /v1/restart?at=&rolling=     set ``spec.restart``
POST      /v1/snapshot?at=             set ``spec.diagnosis.snapshot``
POST      /v1/checkpoint?at=           set ``spec.storeCheckpoint``
POST      /v1/rebalance?at=            set ``spec.rebalanceServers``
POST      /v1/tune?micro_batch=        set fields of ``spec.tuning``: also ``loader_workers=``
                                       and ``auto=``; without any, remove ``spec.tuning``
POST      /v1/stop                     end the job and the cluster
POST      /v1/nodes/{id}/{verb}        kill, freeze, thaw or drain the node: faults that people
                                       and tests cause
POST      /v1/hosts?count=             add hosts
========  ===========================  ===================================================

A call that changes something returns :class:`CallDone`. A refused one returns
:class:`~dlrover_py.protocol.agents.ErrorReply`.
"""

from itertools import islice
from math import isfinite
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import JobStatus, WallTime

MAX_STATUS = 1 << 24
"""Bytes of a published status that are accepted."""
METRICS_KEPT = 8
"""Greatest number of a script's metrics in a sample of the history."""

Verb = Literal["kill", "freeze", "thaw", "drain"]
"""A fault that a person or a test causes at a node."""


class _LocalModel(BaseModel):
    """Base of the documents of this API: immutable, unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class CallDone(_LocalModel):
    """The answer to a call that has changed something."""

    message: str
    """What was done, in words."""


class MasterPorts(_LocalModel):
    """The ports of a master: the line that it writes to the pipe ``--announce-fd``."""

    job: int
    """The port for agents."""
    health: int
    """The port for health and metrics."""


class WatchEvent(_LocalModel):
    """One line of the watch. Only the fields that belong to its kind are set."""

    kind: Literal["job", "node", "ended", "room", "listed", "stopped"]
    """``job``: the job or its spec changed; ``node``: the state of a node; ``ended``: a node has
    ended; ``room``: the number of free hosts; ``listed``: the complete state was sent;
    ``stopped``: the cluster stops."""
    job: ElasticJob | None = None
    """The job, with kind ``job``."""
    node: str = ""
    """The id of the node, with the kinds ``node`` and ``ended``."""
    near: bool = False
    """True if the node's process has been started."""
    host: str = ""
    """The host of the node; empty while it has none."""
    message: str = ""
    """Why the node waits, in words; empty if it does not."""
    leaving: str = ""
    """Why the node leaves, in words; empty if it does not."""
    why: str = ""
    """Why the node has ended, in words."""
    exit_code: int | None = None
    """The exit code of the node's process; None if it never ran."""
    free: bool = False
    """True if the end must not count against the restart budget: the node was drained or
    deleted."""
    output: str = ""
    """The last output of the node's process."""
    nodes: list[str] = Field(default_factory=list)
    """The ids of all nodes that have not ended, with kind ``listed``."""
    hosts: int = 0
    """The number of hosts for which no node waits, with kind ``room``."""


class LocalNode(_LocalModel):
    """The state of a node on this machine."""

    id: str
    """The id of the node."""
    host: str = ""
    """The host of the node; empty while it has none."""
    pid: int = 0
    """The process id of its agent; 0 if there is none."""
    state: Literal["pending", "running", "frozen", "ended"]
    """The state of its process."""
    leaving: str = ""
    """Why the node leaves, in words; empty if it does not."""
    message: str = ""
    """Why the node waits or has ended, in words."""


class ProgressSample(_LocalModel):
    """The progress of the training at one moment."""

    at: WallTime
    """When the status with this progress was made."""
    step: int
    """The newest step."""
    round: int
    """The round that ran."""
    nodes: int
    """The number of nodes in the round."""
    steps_per_s: float = 0.0
    """Steps per second; 0 if it is not known."""
    goodput: float | None = None
    """The productive part of the job's time until then, from 0 to 1; absent if it is not known."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Numbers that the script has reported, by name: the first ``METRICS_KEPT``."""


class History(_LocalModel):
    """The progress over the whole job, with at most a fixed number of samples.

    It stays when the job has ended.
    """

    samples: list[ProgressSample] = Field(default_factory=list)
    """The samples, oldest first."""
    partial: bool = False
    """True if it began later than the job, because nobody had looked before."""

    def with_sample(self, status: JobStatus, most: int) -> "History":
        """Return this history with a sample of a status, or itself if the status shows no new step.

        A status without progress has none, and so has one of the same step and round as the last
        sample.

        Args:
            status: the newest status.
            most: the number of samples to keep; beyond it, every second sample is dropped.
        """
        if status.progress is None:
            return self
        step = status.progress.step
        finite = (item for item in status.progress.metrics.items() if isfinite(item[1]))
        new = ProgressSample(
            at=status.published_at,
            step=step,
            round=status.round,
            nodes=status.nodes_in_round,
            steps_per_s=status.progress.steps_per_s,
            goodput=status.goodput.share if status.goodput is not None else None,
            metrics=dict(islice(finite, METRICS_KEPT)),
        )
        last = self.samples[-1] if self.samples else None
        if last is not None and (last.step, last.round) == (new.step, new.round):
            return self
        samples = [*self.samples, new]
        if len(samples) > most:
            samples = [*samples[:-1:2], new]
        return self.model_copy(update={"samples": samples})


class Snapshot(_LocalModel):
    """The job, its newest status, and what runs on this machine."""

    job: ElasticJob
    """The job."""
    status: JobStatus | None = None
    """The newest status that its master has published; None before the first."""
    nodes: list[LocalNode] = Field(default_factory=list)
    """The job's nodes."""
    hosts: list[str] = Field(default_factory=list)
    """The names of the hosts, which are the places for nodes."""
    cluster_pid: int
    """The process id of the cluster."""
    master_pid: int = 0
    """The process id of the master; 0 if there is none."""
    master_addr: str
    """``host:port`` of the master for agents."""
    health_addr: str
    """``host:port`` of the master's health endpoint."""
    token_file: str
    """The path of the file with the job's token."""
    log_dir: str
    """The directory of the logs."""
