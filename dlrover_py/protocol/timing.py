"""Times of the whole system that depend on each other, and the relations between them.

A time stands here if two programs must agree on it, or if an administrator can set it. A time that
concerns one module only is a constant of that module. All times are in seconds.
"""

import math
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0, le=86400)]
"""A duration of more than 0 seconds and at most a day."""

AGENT_DISCONNECTED_S = 30.0
"""Additional seconds before a cut-off node stops its workers, if a disconnected master answers.

A disconnected master has lost its platform. Either it is cut off together with this node, or the
platform is away for all nodes. In the second case a stop would help no node.
"""
AGENT_ASK_S = 60.0
"""Seconds that an agent waits for an answer of the master that may take its time.

For example, a worker asks which checkpoints are in memory.
"""
END_REPORT_S = 5.0
"""Seconds that an agent takes to report the end of its node to the master."""
END_NOTICE_S = 6.0
"""Seconds that agents have to fetch their order to stop from a master that ends.

Where nodes come by themselves, only the master can inform them of its end.
"""
OWN_MASTER_END_S = 8.0
"""Seconds that an agent gives the master that it has started to end."""
MASTER_LOST_S = 30.0
"""Seconds after which an idle agent gives a lost master up, where no platform restarts it."""
API_SERVER_START_S = 10.0
"""Seconds for which a missing permission may be caused by the start of the API server.

It then answers 403 to requests that it does not know to be allowed yet. Later, the master and the
operator report the permission.
"""
POD_GRACE_S = 30
"""A Pod's terminationGracePeriodSeconds if its template does not set it."""

assert END_REPORT_S < END_NOTICE_S < OWN_MASTER_END_S


class Timing(BaseModel):
    """The times by which a master judges its nodes; each can be set as ``DLROVER_MASTER_<NAME>``.

    Raises:
        ValidationError: A time is out of its range, or two times contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease_s: Seconds = 5.0
    """A node that was silent for this time is lost.

    Facts come first: a process that ended, a connection that closed, a host that does not answer
    the kernel. The lease is for frozen processes. In a job of more than 500 nodes it grows with the
    pace of reports (``core.nodes.pace``)."""
    suspect_s: Seconds = 1.0
    """A node whose connection closed may come back within this time."""
    exchange_s: Seconds = 1.0
    """An agent's report is answered after this time at the latest. The time is longer in a job of
    more than 500 nodes, so that a master takes at most 500 reports per second."""
    cause_wait_s: Annotated[float, Field(ge=0, le=3600)] = 0.25
    """A broken connection between two workers is charged to no node until this time has passed.
    The real cause is nearly always known within milliseconds."""
    replacement_wait_s: Annotated[float, Field(ge=0, le=86400)] = 10.0
    """Once the minimum is there, nodes that are starting are waited for at most this long."""
    forgive_after_s: Seconds = 300.0
    """Once a round has run this long and has reached new steps, all restart budgets are full again.
    It takes 10 times as long if the script reports no steps."""
    stop_grace_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Time between SIGTERM and SIGKILL for workers when a round ends."""
    drain_grace_s: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """Time between SIGTERM and SIGKILL for workers on a node that has to leave, so that a script
    can save."""
    join_timeout_s: Annotated[float, Field(gt=0)] = math.inf
    """The job fails after this time with fewer nodes than the minimum."""
    last_call_s: Annotated[float, Field(ge=0, le=86400)] = 0.0
    """Where nodes come by themselves (elastic-run with an endpoint): once the minimum is there, the
    first round waits this long for more nodes."""
    measure_s: Seconds = 10.0
    """The speed of a job that scales by itself is measured in windows of at least this time."""
    check_s: Seconds = 300.0
    """A check before training (``--network-check``) that takes longer has failed. The imports of
    its workers are included."""
    memory_wait_s: Seconds = 10.0
    """Restore candidates in memory are answered after this time, even if some nodes of the round
    have not reported yet what they hold. It must be less than 60 s."""
    persist_s: Seconds = 6 * 3600.0
    """A checkpoint that is not in storage after this time has failed. Without any progress it fails
    much earlier."""
    settle_s: Annotated[float, Field(ge=0, le=86400)] = 1.0
    """A request for fewer nodes is followed after this time. If it is taken back before (a user and
    an autoscaler may disagree), no step is lost."""
    platform_silence_s: Seconds = 25.0
    """A master without contact to the platform for this time may have been replaced."""
    renew_connection_s: Annotated[float, Field(ge=0, le=86400)] = 30.0
    """A master that may have been replaced closes a connection of this age. Only a new connection
    leads to the master that the platform knows."""
    unreached_s: Seconds = 60.0
    """A new master waits this long while no node has reported to it, where traffic to it has to be
    routed again. Without the API server, hosts do not learn the address of the new master."""
    unrouted_s: Seconds = 300.0
    """A new master waits this long, in the same case, for nodes whose hosts report to the platform.
    These nodes train on. The components that publish a Service's address to hosts
    (kube-controller-manager, kube-proxy) may be late by minutes."""

    @model_validator(mode="after")
    def _relations(self) -> Self:
        """Refuse times that contradict each other; return the times unchanged otherwise.

        Raises:
            ValueError: two times contradict each other; the message names both.
        """
        if self.exchange_s * 2 > self.lease_s:
            raise ValueError(
                f"exchange_s is {self.exchange_s:g} and lease_s {self.lease_s:g}: expected a lease "
                "of at least two exchanges, so that one late report does not cost a node"
            )
        if self.memory_wait_s >= AGENT_ASK_S:
            raise ValueError(
                f"memory_wait_s is {self.memory_wait_s:g}: expected less than {AGENT_ASK_S:g}, "
                "so that the agent that has asked still waits for the answer"
            )
        if self.platform_silence_s >= AGENT_DISCONNECTED_S:
            raise ValueError(
                f"platform_silence_s is {self.platform_silence_s:g}: expected less than "
                f"{AGENT_DISCONNECTED_S:g}, so that a cut-off node learns of its "
                "disconnected master before it stops its workers"
            )
        if self.renew_connection_s * 2 > self.unreached_s:
            raise ValueError(
                f"renew_connection_s is {self.renew_connection_s:g} and unreached_s "
                f"{self.unreached_s:g}: expected at most half, so that all nodes have left a "
                "replaced master while the new one waits for them"
            )
        if self.unreached_s > self.unrouted_s:
            raise ValueError(
                f"unreached_s is {self.unreached_s:g} and unrouted_s {self.unrouted_s:g}: expected "
                "a longer time for nodes whose hosts still report to the platform"
            )
        return self
