"""Changes of the desired state: another spec, a restart of all nodes, suspend and resume."""

import math
from dataclasses import replace

from dlrover_py.master.core.capacity import Capacity
from dlrover_py.master.core.checkpointing import Checkpointing
from dlrover_py.master.core.departures import Departures
from dlrover_py.master.core.events import DeleteNode
from dlrover_py.master.core.history import CoreContext
from dlrover_py.master.core.nodes import Readiness
from dlrover_py.master.core.state import NON_DISRUPTIVE, desired_nodes, pace_of
from dlrover_py.master.core.transitions import Transitions
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import Round
from dlrover_py.protocol.reasons import EventReason
from dlrover_py.protocol.status import JobPhase, NodePhase
from dlrover_py.protocol.words import counted

NOW_DESIRED = "; the desired size is now "
"""Words between the cause of a round and the last change of the number of nodes."""


class SpecChanges:
    """Takes in new specs, and follows requests to restart, suspend and resume."""

    def __init__(
        self,
        context: CoreContext,
        transitions: Transitions,
        capacity: Capacity,
        departures: Departures,
        checkpointing: Checkpointing,
    ) -> None:
        self.state, self.live, self.log = context.state, context.live, context.log
        self._transitions = transitions
        self._capacity = capacity
        self._departures = departures
        self._checkpointing = checkpointing

    def take_spec(self, job: ElasticJob) -> None:
        """Take in a new spec; an older generation than the present one is ignored.

        The policy for checkpoints and the pace of reports follow the new spec. If it differs from
        the old one and the job has not ended, the journal keeps it. If ``suspend`` has changed, the
        rest is left to :meth:`suspend_or_resume`. Otherwise an event is recorded, and abandoned
        places are filled again. Nodes that cannot start are replaced if the template has changed.
        The number of nodes and rounds follow later in the same step, or after ``settle_s``.
        """
        if job.metadata.generation < self.live.spec.metadata.generation:
            return
        old, self.live.spec = self.live.spec, job
        self.live.template_hash = job.worker.template_hash
        self._checkpointing.follow_spec()
        pace = pace_of(job, self.live.rules)
        # Nodes keep the pace of their last assignment, so their lease must not become shorter.
        lease_s = max(pace.lease_s, self.live.pace.lease_s)
        self.live.pace = replace(pace, lease_s=lease_s)
        self.live.nodes.lease_s = lease_s
        if job.bad_hosts != old.bad_hosts and not self.state.phase.ended:
            bad = job.bad_hosts
            text = "no host has failed in several jobs any more" if bad is None else bad.reason
            self.log.record(EventReason.BAD_HOSTS, text, warning=bad is not None)
        if self.state.phase.ended or (job.spec, job.allocation) == (old.spec, old.allocation):
            return
        self.state.accept(job)
        if job.spec == old.spec and job.most_nodes == old.most_nodes:
            return  # another reason for the same number of nodes
        if job.spec != old.spec and job.with_requests_of(old) == old.spec:
            return  # only a snapshot or a checkpoint was requested
        if job.rests != old.rests:
            return  # handled in `suspend_or_resume`, as it may also have changed without a master
        if job.spec != old.spec and (
            job.spec.model_copy(update={"tuning": old.spec.tuning}) == old.spec
        ):
            return  # only settings of data loaders: :class:`Tuning` follows them
        if job.differs_in_servers_only(old):  # no node of a round is concerned
            self.log.record(EventReason.SPEC_CHANGED, f"the desired size is now {_servers_of(job)}")
            return
        self.state.abandoned_slots = 0  # a new spec is a new start for places that were given up
        if job.spec == old.spec:
            why = "the job may have all nodes again"
            why = job.allocation.reason if job.allocation is not None else why
            event = self.log.record(EventReason.NODES_ALLOCATED, why)
        else:
            event = self.log.record(EventReason.SPEC_CHANGED, self._change_of_spec(old))
        pending = self.state.pending_round
        if pending is None or pending.kind in NON_DISRUPTIVE:
            self.live.round_causes[Round(self.state.round + 1)] = (event, self.live.now)
            self.live.spec_changed_at = self.live.now
        elif (desired := desired_nodes(job)) != desired_nodes(old):
            # That may be what lets the round form.
            begin, _, _ = pending.reason.partition(NOW_DESIRED)
            pending.reason = f"{begin}{NOW_DESIRED}{desired}"
            self.state.changed()
        if job.worker.template != old.worker.template:
            for node in [n for n in self.live.nodes if n.stuck]:
                self._capacity.replace_stuck(node, event)

    def restart_nodes(self) -> bool:
        """Have nodes replaced that were created before ``spec.restart`` was written.

        These nodes are marked as leaving, and their deletion is requested. A rolling restart takes
        one unit at a time, and continues once the job trains at full size again. A template that
        cannot start thus costs one unit, and the job trains on.

        Returns:
            False if no node was asked to leave now. That is so without ``spec.restart``, after all
            nodes were replaced, or while a rolling restart waits. It is also so if the job has
            ended or is suspended, or where nodes come by themselves. After the journal was lost, it
            is so before the first list of nodes.
        """
        restart = self.live.spec.spec.restart
        rests = self.state.phase.ended or self.state.phase is JobPhase.SUSPENDED
        if restart is None or rests or self._capacity.unlisted or not self.live.rules.can_create:
            return False
        due = [
            node
            for node in self.live.nodes
            if node.readiness is not Readiness.OUT and node.record.restart != restart.at
        ]
        if restart.rolling and due:
            if not self._is_complete():
                return False
            ranks = self.state.world.rank_of if self.state.world is not None else {}
            due.sort(key=lambda node: ranks.get(node.id, math.inf), reverse=True)  # standbys first
            del due[self.live.spec.worker.node_unit :]
        if due:
            self._capacity.spot.forget()
        for node in due:
            self._departures.node_leaving(node, "a restart of all nodes was requested")
            grace = self.live.grace_s if node.incarnation else 0.0
            self.live.emit(DeleteNode(node.id, grace, node.leaving))
        return bool(due)

    def suspend_or_resume(self) -> None:
        """Suspend or resume the job if ``spec.suspend`` or its allocation differs from its phase.

        A suspension requests that the newest checkpoint is stored, drops the round and dismisses
        all nodes. A job that resumes needs a first round; its nodes are requested later in the same
        step. Nothing happens if the job has ended.
        """
        suspend = self.live.spec.rests
        if self.state.phase.ended or suspend == (self.state.phase is JobPhase.SUSPENDED):
            return
        if suspend:
            self._suspend()
            return
        self.state.phase, self.state.reason = JobPhase.PENDING, "waiting for nodes"
        self.state.abandoned_slots = 0  # all places are filled again
        self._capacity.spot.forget()
        event = self.log.record(
            EventReason.RESUMED, f"the job was resumed with {desired_nodes(self.live.spec)}"
        )
        self._transitions.need_round("start", "resumed", event)

    def _change_of_spec(self, old: ElasticJob) -> str:
        """Describe what has changed since the old spec."""
        message = f"the desired size is now {desired_nodes(self.live.spec)}"
        if self.live.spec.spec.replica_specs.ps != old.spec.replica_specs.ps:
            message += f" and {_servers_of(self.live.spec)}"
        if self.live.spec.worker.template != old.worker.template:
            message += (
                "; the template has changed: new nodes are created from it, and running nodes keep "
                "the old one until `dlrover job restart`"
            )
        restart = self.live.spec.spec.restart
        if restart is not None and restart != old.spec.restart:
            message += "; all nodes are replaced"
            message += ", one unit after the other" if restart.rolling else ", all at the same time"
        return message

    def _is_complete(self) -> bool:
        """Return whether a round of full size trains, and all desired nodes are ready.

        If the script has ever reported steps, the round must have made one.
        """
        if (
            self.state.phase is not JobPhase.RUNNING
            or self.state.pending_round is not None
            or self.state.world is None
        ):
            return False
        if not self.state.resumed and self.state.max_step is not None:
            return False  # the script reports its steps, and has made none in this round
        size = self.live.size
        ready = self.live.nodes.count(Readiness.READY)
        full = size.fit(min(size.desired, ready))
        return ready >= self._capacity.wanted and len(self.state.world.members) >= full

    def _suspend(self) -> None:
        """Suspend the job, because ``spec.suspend`` or the operator's allocation says so.

        The newest checkpoint is requested to be stored, the round ends, and all nodes are
        dismissed. Restart budgets and incarnations of nodes are kept.
        """
        why = "spec.suspend is true: no node runs until `dlrover job resume`"
        allocation = self.live.spec.allocation
        if not self.live.spec.spec.suspend and allocation is not None:
            why = allocation.reason
        self.log.record(EventReason.SUSPENDED, why)
        self._checkpointing.flush("the job is suspended", self.live.grace_s)
        self.state.phase, self.state.reason = JobPhase.SUSPENDED, why
        self._transitions.close_round()
        self.state.replacement_slots.clear()
        for node in list(self.live.nodes):
            if node.phase is not NodePhase.GONE and not node.leaving:
                self._capacity.dismiss(node, "the job is suspended", ExitCode.OK)
        self.live.round_causes.clear()


def _servers_of(job: ElasticJob) -> str:
    """Return the desired number of servers, in words."""
    if job.servers is None:
        return counted(0, "server")
    standbys = job.servers.standby_replicas
    return counted(job.servers.size, "server") + (f" and {standbys} on standby" if standbys else "")
