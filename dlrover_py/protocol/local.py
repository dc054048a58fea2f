"""What the cluster on this machine (:mod:`dlrover_py.local`) and its callers tell each other.

It plays the API server for one job: JSON over a unix socket that only its user can open.

========  ===========================  ==================================================
method    path                         what it does
========  ===========================  ==================================================
GET       /v1/job                      the :class:`Snapshot`
GET       /v1/history                  the :class:`History`
GET       /v1/watch                    endless lines of :class:`Seen`: whole state, then changes
PUT       /v1/status                   the master's :class:`~dlrover_py.protocol.status.JobStatus`
PUT       /v1/nodes/{id}               create a node, now or when there is a free host
DELETE    /v1/nodes/{id}?grace_s=      end it
POST      /v1/scale?replicas=          change the wish
POST      /v1/suspend?on=              set ``spec.suspend``
POST      /v1/restart?at=&rolling=     set ``spec.restart``
POST      /v1/stop                     end the job and the cluster
POST      /v1/nodes/{id}/{verb}        kill, freeze, thaw or drain it: faults, for people and tests
POST      /v1/hosts?count=             more hosts
========  ===========================  ==================================================
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import JobStatus

Verb = Literal["kill", "freeze", "thaw", "drain"]


class _Doc(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Seen(_Doc):
    """One line of the watch; the fields that belong to its kind are set."""

    kind: Literal["job", "node", "ended", "listed", "stopped"]
    job: ElasticJob | None = None
    node: str = ""
    near: bool = False
    host: str = ""
    message: str = ""
    leaving: str = ""
    why: str = ""
    exit_code: int | None = None
    free: bool = False
    output: str = ""
    nodes: list[str] = Field(default_factory=list)


class LocalNode(_Doc):
    """A node as this machine has it."""

    id: str
    host: str = ""
    pid: int = 0
    state: Literal["pending", "running", "frozen", "ended"]
    leaving: str = ""
    message: str = ""


class Sample(_Doc):
    """How far the training was at one moment."""

    at: float
    """Unix seconds."""
    step: int
    round: int
    nodes: int
    """In the round."""


class History(_Doc):
    """How the training went on, thinned out when it is long; it stays when the job has ended."""

    samples: list[Sample] = Field(default_factory=list)

    def grown(self, status: JobStatus, most: int) -> "History":
        """With what a status says.

        Args:
            status: of now.
            most: so many samples are kept: beyond that every second one is dropped.
        """
        step = status.progress.step if status.progress is not None else None
        if step is None:
            return self
        new = Sample(
            at=status.published_at, step=step, round=status.round, nodes=status.nodes_in_round
        )
        last = self.samples[-1] if self.samples else None
        if last is not None and (last.step, last.round) == (new.step, new.round):
            return self
        samples = [*self.samples, new]
        if len(samples) > most:
            samples = [*samples[:-1:2], new]
        return History(samples=samples)


class Snapshot(_Doc):
    """The job, its newest status, and what runs here."""

    job: ElasticJob
    status: JobStatus | None = None
    nodes: list[LocalNode] = Field(default_factory=list)
    hosts: list[str] = Field(default_factory=list)
    cluster_pid: int
    master_pid: int = 0
    master_addr: str
    health_addr: str
    token_file: str
    log_dir: str
