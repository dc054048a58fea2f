"""The operator's plan for one job, made from the present view of the job (pure functions).

Planning is level-triggered: the same view gives the same plan, whatever happened before. After a
plan was carried out, the next plan is empty. Two operators at the same time do no harm, for three
reasons. The name of every object is derived from the job's name. Objects are created by POST. An
existing object is kept if the job owns it.

The master and the operator communicate by the status of the job. These are the states:

===============  ==================================================================================
refused          The spec cannot be used. Nothing is made. A job that runs already continues, and
                 the objects that its master needs are kept.
running          The Service exists, then the Deployment, which contains the Service's address. Both
                 are made again if they are deleted.
held back        The allocator gives it no nodes, or has not decided yet. No master is made for it.
suspended        The master stops its nodes and reports it. Then the Deployment is scaled to 0. At a
                 resume it is planned again from the spec, with this operator's version.
too late         ``DeadlineExceeded`` is set, and the master ends the job. If there is no master,
                 the operator ends it.
ended            The Deployment is scaled to 0. The job is deleted after its
                 ``ttlSecondsAfterFinished``.
===============  ==================================================================================

A master knows when its agents are gone. Only the API server knows which Pods still hold resources.
Worker Pods are therefore listed before a master ends, and before a job is called suspended
(:attr:`JobPlan.needs_pods`). A Pod holds resources until its phase is Succeeded or Failed, or until
it no longer exists.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dlrover_operator import gang, manifests
from dlrover_operator.actions import (
    Action,
    Allot,
    Create,
    DeleteJob,
    DeleteMasterPod,
    DeletePods,
    DeleteService,
    KeepPodGroup,
    MakeCredentials,
    RecordEvent,
    ReplaceDeployment,
    RestoreToken,
    ScaleToZero,
    SetStatus,
)
from dlrover_operator.conditions import JobConditions
from dlrover_operator.facts import ACTIVE_PHASES, END_GRACE_S, JobFacts
from dlrover_operator.manifests import Options
from dlrover_operator.observed import Deployment, Obj, ObservedJob, Service
from dlrover_operator.timing import OperatorTiming
from dlrover_py.protocol import names
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.status import JobPhase, NodePhase, unix_seconds

SKEW_S = 5.0
"""Largest difference in seconds between creation times that two API servers set."""
_DISRUPTIVE = (ReplaceDeployment, ScaleToZero, DeletePods, DeleteJob)
"""Actions that end something or undo an end (`JobPlan.disruptive`)."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The actions for a job, and the time of the next plan if nothing changes."""

    actions: tuple[Action, ...] = ()
    """Actions to carry out, in this order."""
    status: tuple[SetStatus | RecordEvent, ...] = ()
    """Actions to carry out last; after a refusal, those of a new plan are carried out."""
    wake_at: float | None = None
    """Time in Unix seconds at which the job must be planned again."""
    disruptive: bool = False
    """Whether the plan ends something or undoes an end.

    Such a plan must be made again from the current job, not from the job as it was last observed.
    """
    needs_pods: bool = False
    """Whether :attr:`ObservedJob.remaining_pods` is needed: list the Pods, then plan again."""


def plan(
    seen: ObservedJob, now: float, options: Options, timing: OperatorTiming | None = None
) -> JobPlan:
    """Return the plan for a job. Nothing is carried out.

    The plan is empty for a job that is being deleted, or that another controller manages.

    Args:
        seen: view of the job.
        now: time in Unix seconds.
        options: settings for all masters.
        timing: times of the operator; None for the defaults.
    """
    meta, spec = seen.job["metadata"], seen.job.get("spec") or {}
    foreign = spec.get("managedBy") not in (None, names.MANAGED_BY)
    if foreign or meta.get("deletionTimestamp"):
        return JobPlan()
    return _Planner(seen, now, options, timing or OperatorTiming()).plan()


class _Planner:
    """The derivation of the actions from the facts."""

    def __init__(
        self, seen: ObservedJob, now: float, options: Options, timing: OperatorTiming
    ) -> None:
        """Derive the facts from a view of a job."""
        self._options, self._timing = options, timing
        self._facts = JobFacts(seen, now)
        self._conditions = JobConditions(self._facts)

    def plan(self) -> JobPlan:
        """Return the actions, the status and the time of the next plan.

        If the plan needs the Pods of the job (``needs_pods``), the caller lists them and plans
        again.
        """
        facts = self._facts
        actions = tuple(self._actions())
        status = tuple(self._conditions.status())
        verdict = self._conditions.passed_deadline is not None and not facts.is_true(
            ConditionType.DEADLINE_EXCEEDED
        )
        disruptive = verdict or any(isinstance(action, _DISRUPTIVE) for action in actions)
        return JobPlan(
            actions, status, min(facts.wake_times, default=None), disruptive, facts.needs_pods
        )

    def _actions(self) -> Iterator[Action]:
        """Yield the actions for the present state of the job.

        The first state that applies counts: ended, past a deadline, suspended, held back, running.
        An allocation is removed first if the operator allots no nodes any more. A job that
        must run has no actions if its spec is refused before it runs, or if its master's name
        belongs to another object.
        """
        facts = self._facts
        # The allocator was switched off, or the job has opted out. An operator that still ended may
        # have written the allocation after this one had removed it, and the condition.
        granted = facts.has_our_allocation or ConditionType.ALLOCATED in facts.conditions
        if granted and not (facts.seen.allotted or facts.ended):
            yield Allot(None)
        if facts.ended:
            yield from self._end()
        elif self._conditions.passed_deadline:
            yield from self._keep_rights()
            yield from self._stop_without_master()
        elif facts.suspend:
            if facts.scaled_to_zero:
                yield from self._delete_remaining_pods()
            elif facts.nodes_are_gone() and facts.pods_are_gone():
                yield from self._scale_to_zero()
            else:
                yield from self._keep_service()
                yield from self._keep_rights()
                if self._suspension_is_stuck():
                    yield DeletePods()
                    yield from self._scale_to_zero()
                else:
                    yield from self._stop_without_master()
        elif facts.held_back and not facts.runs:
            pass  # it starts when it may have nodes
        elif facts.job is not None and not facts.foreign:
            yield from self._run(facts.job)
            yield from self._keep_gang(facts.job)
            if facts.held_back and facts.masterless_for(self._timing.stop_after_s):
                yield from self._delete_remaining_pods()  # no master reads that they must end

    def _keep_gang(self, job: ElasticJob) -> Iterator[Action]:
        """Keep the PodGroup that the template names in step with the job's minimum."""
        found = self._facts.seen.gang
        wanted = gang.change(job, found) if found is not None else None
        if found is not None and wanted is not None and self._facts.refused is None:
            yield KeepPodGroup(found.kind, wanted, found.group.uid if found.group else "")

    def _delete_remaining_pods(self) -> Iterator[Action]:
        """Delete the worker Pods that hold resources, because there is no master to end them.

        There is no action if all of them were deleted already, or none is left. If the Pods were
        not listed, there is no action either, and the plan asks for the list.
        """
        facts = self._facts
        if not facts.pods_are_gone() and not all(
            pod.leaving for pod in facts.seen.remaining_pods or ()
        ):
            yield DeletePods()

    def _end(self) -> Iterator[Action]:
        """Yield the actions for a job that has ended.

        The master stays until no node and no Pod is left, or until END_GRACE_S seconds after the
        end. Pods that are left then are deleted. The job itself is deleted only when its
        ``ttlSecondsAfterFinished`` is over; without a value it stays.
        """
        facts = self._facts
        ttl = facts.spec.get("ttlSecondsAfterFinished")
        completion = unix_seconds(facts.status.get("completionTime"))
        if facts.scaled_to_zero:
            yield from self._delete_remaining_pods()
        elif facts.nodes_are_gone() and facts.pods_are_gone():
            yield from self._scale_to_zero()
        elif completion is not None and facts.has_passed(completion + END_GRACE_S):
            facts.pods_are_gone()
            yield DeletePods()  # their host may be lost, or a container may not end
            yield from self._scale_to_zero()
        else:
            yield from self._keep_service()
        if ttl is not None and completion is not None and facts.has_passed(completion + ttl):
            yield DeleteJob(facts.meta["uid"])

    def _scale_to_zero(self) -> Iterator[Action]:
        """End the master; nothing if it has no Deployment, or one of 0 replicas."""
        facts = self._facts
        if facts.deployment is not None and facts.deployment.replicas:
            yield ScaleToZero(facts.name, facts.deployment.uid)

    def _stop_without_master(self) -> Iterator[Action]:
        """End a job that must stop, once it has had no master for ``stop_after_s`` seconds.

        Its Pods are then deleted, and the Deployment of its master is scaled to 0. Before that
        nothing is done, and the job is planned again at that time.
        """
        facts = self._facts
        if facts.masterless_for(self._timing.stop_after_s):
            yield DeletePods()
            yield from self._scale_to_zero()

    def _suspension_is_stuck(self) -> bool:
        """Return whether the rest of a job that is being suspended does not end by itself.

        The rest may be nodes that never connected, on hosts that are lost, or Pods whose agents
        have ended. The result is False until END_GRACE_S seconds after the suspension began, and
        while the master does not report it. It is also False while a connected node is or may be
        left.
        """
        facts = self._facts
        training = facts.training
        phases = {node.get("phase") for node in training.get("nodes") or ()}
        silent = phases <= {NodePhase.PENDING, NodePhase.STARTING, NodePhase.GONE}
        suspending = facts.since(ConditionType.SUSPENDED, "False")
        return bool(
            facts.has_suspended()
            and silent
            and (facts.nodes_are_gone() or not training.get("leftOut"))
            and facts.conditions.get(ConditionType.SUSPENDED, {}).get("reason")
            == ConditionReason.SUSPENDING
            and suspending is not None
            and facts.has_passed(suspending + END_GRACE_S)
        )

    def _keep_service(self) -> Iterator[Action]:
        """Yield the creation of a missing Service, by which agents find the master.

        Disconnected agents need it to learn of the job's end.

        The new Service gets the address that agents know. Nothing is done without a Deployment that
        has replicas, or if the address is lost to another Service.
        """
        facts = self._facts
        up = facts.deployment is not None and facts.deployment.replicas
        if up and self._address_is_lost():
            return
        if up and facts.service is None and facts.job is not None and facts.deployment is not None:
            yield Create("Service", manifests.service(facts.job, facts.deployment.service_address))

    def _keep_rights(self) -> Iterator[Action]:
        """Keep the rights of a master, which needs them to learn of an order and to report.

        The rights are created again each ``rights_interval_s`` seconds, and a master's Pod that is
        older than its ServiceAccount is deleted. Nothing is done without a Deployment that has
        replicas.
        """
        facts = self._facts
        if facts.job is not None and facts.deployment is not None and facts.deployment.replicas:
            yield from self._renew_master_pod()
            if facts.has_passed(facts.seen.rights_checked_at + self._timing.rights_interval_s):
                yield from _rights(facts.job)

    def _renew_master_pod(self) -> Iterator[Action]:
        """Delete a master's Pod that is older than the ServiceAccount.

        A token is valid only for the ServiceAccount for which it was issued, not for a later one of
        the same name. All requests of such a master are refused. A new container would have the
        same token for most of an hour, but a new Pod gets its own.
        """
        facts = self._facts
        for pod in facts.masters():
            if not pod.leaving and pod.created_at + SKEW_S < facts.seen.account_created_at:
                yield DeleteMasterPod(pod.name, pod.uid)

    def _run(self, job: ElasticJob) -> Iterator[Action]:
        """Yield the actions for a job that must run.

        There are none if its objects are complete and unchanged. The Deployment follows in a later
        plan, when the Service has its address. A Service with another address than the Deployment
        is deleted. If the address is lost to another Service, the Deployment is scaled to 0, and
        all is made again.
        """
        facts = self._facts
        deployment, service = facts.deployment, facts.service
        if service is None:
            if deployment is None:
                yield from self._create_prerequisites(job)
            address = (
                deployment.service_address if deployment is not None and deployment.replicas else ""
            )
            if address and self._address_is_lost():  # nodes cannot find it: make all again
                yield from self._scale_to_zero()
                return
            yield Create("Service", manifests.service(job, address))
            return  # the Deployment needs the address, which is observed later
        if deployment is None:
            yield Create("Deployment", self._deployment(job, service))
        elif deployment.replicas == 0:
            yield from self._create_prerequisites(job)
            yield self._replace_deployment(deployment, self._deployment(job, service))
        elif deployment.service_address and deployment.service_address != service.address:
            yield DeleteService(facts.name, service.uid)
        else:
            yield from self._repair(job, deployment, service)

    def _address_is_lost(self) -> bool:
        """Return whether the Service cannot get the address in the master's Deployment again.

        The result is True if the API server has refused the address, and the master has not been
        ready for ``address_lost_after_s`` seconds. If that time is not over, the job is planned
        again when it is.
        """
        facts = self._facts
        since = facts.since(ConditionType.MASTER_READY, "False")
        refused = facts.service is None and "spec.clusterIP" in facts.seen.refused
        return (
            refused
            and since is not None
            and facts.has_passed(since + self._timing.address_lost_after_s)
        )

    def _deployment(self, job: ElasticJob, service: Service) -> Obj:
        """Return the master's Deployment as it must be."""
        facts = self._facts
        return manifests.deployment(job, service.address, self._options, facts.seen.jobs)

    def _replace_deployment(self, deployment: Deployment, desired: Obj) -> ReplaceDeployment:
        """Return the action that replaces the Deployment, unless it has changed meanwhile."""
        seen = {"uid": deployment.uid, "resourceVersion": deployment.version}
        return ReplaceDeployment(desired | {"metadata": desired["metadata"] | seen})

    def _repair(
        self, job: ElasticJob, deployment: Deployment, service: Service
    ) -> Iterator[Action]:
        """Yield the actions that restore deleted objects of a running job.

        The objects are restored if there was no master for ``heal_after_s`` seconds, the master
        lacks an object, or nodes are missing. That is done at most once in ``heal_after_s``
        seconds. If only nodes are missing, just the Secret of the token is restored. Without a
        master that can start, a Deployment that differs from the plan is replaced. Otherwise only
        the rights are created again, each ``rights_interval_s`` seconds. A master's Pod that is
        older than its ServiceAccount is deleted in each case.
        """
        facts = self._facts
        yield from self._renew_master_pod()
        heal_s = self._timing.heal_after_s
        masterless = facts.masterless_for(heal_s)
        lacks = masterless or self._master_lacks_objects()
        if (lacks or self._nodes_are_missing()) and facts.has_passed(
            facts.seen.credentials_checked_at + heal_s
        ):
            if lacks:
                yield from self._create_supporting_objects(job)
            yield MakeCredentials(job) if masterless else RestoreToken(job)
            desired = self._deployment(job, service)
            planned = desired["metadata"]["annotations"][names.NOTE_PLAN]
            if masterless and self._master_cannot_start() and deployment.planned != planned:
                yield self._replace_deployment(deployment, desired)
        elif facts.has_passed(facts.seen.rights_checked_at + self._timing.rights_interval_s):
            yield from _rights(job)
            # Masters cannot create them. A job of an earlier operator has no Secret for evidence.
            yield Create("Secret", manifests.evidence_secret(job))
            if job.servers is not None:
                yield Create("Secret", manifests.servers_secret(job))

    def _master_cannot_start(self) -> bool:
        """Return whether the Deployment may be replaced because its master seems unable to start.

        No master has reported since the start or the resume, and its Pod has a problem. The
        Deployment may have been made from a mistake that is corrected now. A master that only
        starts slowly is left alone. Otherwise two operators of different versions would replace
        the Deployment in turn.
        """
        facts = self._facts
        create_error = facts.deployment is not None and facts.deployment.create_error
        stuck = create_error or any(pod.reason for pod in facts.seen.pods)
        spoken = facts.training.get("phase") not in (None, JobPhase.SUSPENDED)
        return bool(stuck) and not spoken and facts.refused is None

    def _create_prerequisites(self, job: ElasticJob) -> Iterator[Action]:
        """Create what a master needs before it starts.

        The operator does not watch these objects; a POST creates a missing one again.
        """
        yield from self._create_supporting_objects(job)
        yield MakeCredentials(job)

    def _create_supporting_objects(self, job: ElasticJob) -> Iterator[Action]:
        """Create the objects that can also be made again while a master runs."""
        yield from _rights(job)
        yield Create("NetworkPolicy", manifests.network_policy(job))
        if self._options.workers_policy:
            yield Create("NetworkPolicy", manifests.workers_network_policy(job))
        yield Create("Secret", manifests.journal_secret(job))
        yield Create("Secret", manifests.evidence_secret(job))
        if job.servers is not None:
            yield Create("Secret", manifests.servers_secret(job))

    def _nodes_are_missing(self) -> bool:
        """Return whether a job that has not ended has fewer nodes in its round than desired.

        The cause may be a missing Secret, which only their kubelets report.
        """
        facts = self._facts
        training = facts.training
        return training.get("phase") in ACTIVE_PHASES and training.get(
            "nodesInRound", 0
        ) < training.get("desired", 0)

    def _master_lacks_objects(self) -> bool:
        """Return whether a master reports that an object is missing that it needs.

        The report is the condition ``JournalWritable`` that is False, or ``PermissionDenied`` that
        is True. It must be ``heal_after_s`` seconds old. A report with a time in the future counts
        immediately, because the master's clock may be ahead of the operator's.
        """
        facts = self._facts
        journal = facts.since(ConditionType.JOURNAL_WRITABLE, "False")
        denied = facts.since(ConditionType.PERMISSION_DENIED, "True")
        reported = [since for since in (journal, denied) if since is not None]
        return any(
            since > facts.now or facts.has_passed(since + self._timing.heal_after_s)
            for since in reported
        )


def _rights(job: ElasticJob) -> Iterator[Action]:
    """Yield the actions that create the master's ServiceAccount, Role and RoleBinding."""
    yield Create("ServiceAccount", manifests.service_account(job))
    yield Create("Role", manifests.role(job))
    yield Create("RoleBinding", manifests.role_binding(job))
