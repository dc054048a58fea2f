"""What an administrator can set for a master: the only reader of its environment."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dlrover_py.master.core.events import Rules
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import explain
from dlrover_py.protocol.status import PROGRESS_S

PREFIX = "DLROVER_MASTER_"

Seconds = Annotated[float, Field(gt=0, le=86400)]


class InCluster(NamedTuple):
    """Where a master on Kubernetes is."""

    job_uid: str
    service: str
    """``host:port`` that its nodes are to call."""
    pod_name: str
    pod_uid: str


class Settings(BaseModel):
    """Settings of one master; each can be set as ``DLROVER_MASTER_<NAME>``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease_s: Seconds = 5.0
    """A node that was silent for so long is lost. Facts (a process that ended, a connection that
    closed, a host that does not answer the kernel) come first; this is for processes that are
    frozen, and grows with the pace of a job of more than 500 nodes (``core.nodes.pace``)."""
    suspect_s: Seconds = 1.0
    """A node whose connection closed may come back for so long."""
    replacement_wait_s: Annotated[float, Field(ge=0, le=86400)] = 10.0
    """Nodes whose process already runs are waited for at most so long, with the minimum there."""
    forgive_after_s: Seconds = 300.0
    """Steady progress for so long fills all restart budgets again."""
    stop_grace_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """SIGTERM to SIGKILL for workers when a round ends."""
    drain_grace_s: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """The same when a node is asked to leave, so that a script can save."""
    join_timeout_s: Annotated[float, Field(gt=0)] = math.inf
    """With fewer nodes than the minimum for so long, the job has failed."""
    last_call_s: Annotated[float, Field(ge=0, le=86400)] = 0.0
    """Where nodes come by themselves (elastic-run with an endpoint): the first round waits so long
    for more than the minimum."""
    exchange_s: Seconds = 1.0
    """An agent's report is answered after so long at the latest; longer in a job of more than 500
    nodes, so that a master takes in 500 reports a second at most."""
    check_s: Seconds = 300.0
    """A check before the training (``--network-check``) has failed where it takes longer."""
    memory_wait_s: Seconds = 10.0
    """What could be restored from memory is told after so long at the latest, whichever node of
    the round has not said yet what it holds."""
    persist_s: Seconds = 6 * 3600.0
    """A checkpoint that is not in storage by then has failed; much earlier if nothing goes on."""
    settle_s: Annotated[float, Field(ge=0)] = 1.0
    """A smaller wish is obeyed once it has stood so long."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 1 << 18
    """A larger request is refused (413): a report of 1,024 workers takes a tenth of it."""
    header_s: Seconds = 10.0
    """A connection that has not sent a request's head by then is closed; the body may take as
    long again."""
    publish_s: Seconds = 0.1
    """The status is published at most this often."""
    progress_s: Seconds = PROGRESS_S
    """On Kubernetes, a status in which only the progress is new is written at most this often. The
    operator sets more where there are many jobs."""
    token_file: Path | None = None
    state_dir: Path | None = None
    log_level: str = "INFO"

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.exchange_s * 2 > self.lease_s:
            raise ValueError(
                f"exchange_s is {self.exchange_s:g} and lease_s {self.lease_s:g}: expected a lease "
                "of at least two exchanges, so that one late report does not cost a node"
            )
        return self

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings.

        Raises:
            ConfigError: with one line for each value that cannot be used.
        """
        environ = os.environ if environ is None else environ
        given = {
            key.removeprefix(PREFIX).lower(): value
            for key, value in environ.items()
            if key.startswith(PREFIX) and not key.startswith(names.ENV_MASTER_SERVICE)
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(explain(error, prefix="environment " + PREFIX + "*")) from error

    @staticmethod
    def in_cluster(environ: Mapping[str, str] | None = None) -> "InCluster":
        """What the operator tells a master on Kubernetes.

        Raises:
            ConfigError: what is missing.
        """
        environ = os.environ if environ is None else environ
        needed: tuple[str, ...] = (names.ENV_MASTER_JOB_UID, names.ENV_MASTER_SERVICE)
        needed += (names.ENV_POD_NAME, names.ENV_POD_UID)
        missing = [name for name in needed if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set: with --kubernetes the operator sets them"
            )
        return InCluster(*(environ[name] for name in needed))

    def rules(self, *, can_create: bool, routed_s: float) -> Rules:
        """What the decisions need of it."""
        return Rules(
            lease_s=self.lease_s,
            suspect_s=self.suspect_s,
            replacement_wait_s=self.replacement_wait_s,
            forgive_after_s=self.forgive_after_s,
            stop_grace_s=self.stop_grace_s,
            drain_grace_s=self.drain_grace_s,
            check_s=self.check_s,
            memory_wait_s=self.memory_wait_s,
            persist_s=self.persist_s,
            settle_s=self.settle_s,
            exchange_s=self.exchange_s,
            join_timeout_s=self.join_timeout_s,
            last_call_s=self.last_call_s,
            can_create=can_create,
            routed_s=routed_s,
        )
