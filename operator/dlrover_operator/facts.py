"""What the operator knows about a job: the facts that follow from its view (pure)."""

from dlrover_operator.observed import MasterPod, Obj, ObservedJob, allots
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reasons import ConditionReason, ConditionType
from dlrover_py.protocol.status import JobPhase, NodePhase, unix_seconds
from dlrover_py.protocol.timing import POD_GRACE_S

END_GRACE_S = 3.0 * POD_GRACE_S
"""Seconds after a job's end in which its nodes must end.

A node may need the usual grace period of a Pod twice.
"""
RELIST_S = 2.0
"""Seconds until Pods that are being deleted are listed again."""
LEFTOVER_CHECK_S = 1.0
"""Seconds between two looks for leftover objects of a deleted job of the same name."""
PODS_SHOWN = 3
"""Largest number of Pods that a message names."""
ENDED_PHASES = tuple(phase.value for phase in JobPhase if phase.ended)
ACTIVE_PHASES = (JobPhase.PENDING, JobPhase.RUNNING, JobPhase.FORMING)


class JobFacts:
    """What follows from the view of a job, and when it must be planned again."""

    def __init__(self, seen: ObservedJob, now: float) -> None:
        """Derive the facts from a view of a job.

        If the spec cannot be used, :attr:`refused` is the error. :attr:`job` is then None, or has
        the bare minimum for a master if the job runs already. A deadline that has passed without a
        master ends the job.

        Args:
            seen: View of the job.
            now: Time in Unix seconds, by the API server's clock.
        """
        self.seen, self.now = seen, now
        self.meta = seen.job["metadata"]
        self.spec: Obj = seen.job.get("spec") or {}
        self.status: Obj = seen.job.get("status") or {}
        self.training: Obj = self.status.get("training") or {}
        self.conditions = {c["type"]: c for c in self.status.get("conditions") or ()}
        self.has_our_allocation = any(map(allots, self.meta.get("managedFields") or ()))
        """Whether ``status.allocation`` is from an operator. Others may write it, too."""
        self.name = names.master_of(self.meta["name"])
        self.wake_times: list[float] = []
        self.needs_pods = False
        self.refused: ConfigError | None = None
        self.job: ElasticJob | None = None
        """The job from which the master's objects are made; None if none must be made."""
        try:
            self.job = ElasticJob.read(seen.job)
        except ConfigError as error:
            self.refused = error
        self.deployment, self.service = seen.deployment, seen.service
        self.foreign = ""
        """Kind of an object of the master's name that this job does not own; otherwise empty."""
        self.old = False
        """Whether that object belongs to a deleted job of this name."""
        self._ignore_foreign_objects()
        self.suspend = self.spec.get("suspend") is True
        self.scaled_to_zero = self.deployment is None or self.deployment.replicas == 0
        self.runs = not self.scaled_to_zero or self.training.get("phase") in ACTIVE_PHASES
        if self.refused is not None and self.runs:
            self.job = _bare(seen.job)
        self.ended = final_phase(self.status)
        self.held_back = self._held_back()
        """Whether the allocator gives the job fewer nodes than its minimum, or has not decided."""
        self.start = self._start()
        self.pending_since = self._pending_since()
        self.deadline = self._passed_deadline()
        """Reason of the condition ``DeadlineExceeded`` if a deadline has passed; otherwise None."""
        if self.deadline is not None and not self.ended and self.scaled_to_zero:
            self.ended = JobPhase.FAILED.value  # no master can end the job
        self.masterless_since = self._masterless_since()

    def _ignore_foreign_objects(self) -> None:
        """Ignore a Deployment and a Service of the master's name that this job does not own.

        If one of them is foreign, both are ignored, and the job is planned again after 1 s.
        """
        for kind, owner in (
            ("Deployment", self.deployment and self.deployment.owner),
            ("Service", self.service and self.service.owner),
        ):
            if owner not in (None, self.meta["uid"]):
                self.foreign = kind
                self.old = owner != ""
                self.wake_times.append(self.now + LEFTOVER_CHECK_S)
        if self.foreign:
            self.deployment = self.service = None

    def is_true(self, condition: str) -> bool:
        """Return whether a condition is True."""
        return bool(self.conditions.get(condition, {}).get("status") == "True")

    def since(self, condition: str, status: str) -> float | None:
        """Return the time since which a condition has this status; None if it does not.

        The time is in Unix seconds, as the condition says.
        """
        found = self.conditions.get(condition, {})
        if found.get("status") != status:
            return None
        return unix_seconds(found.get("lastTransitionTime"))

    def _masterless_since(self) -> float | None:
        """Return the time since which there is no master; None if there is one.

        There is a master while its Deployment has an available replica. The time is in Unix
        seconds, and is not before the job's start.
        """
        if self.deployment is not None and self.deployment.available:
            return None
        since = self.since(ConditionType.MASTER_READY, "False")
        return max(self.now if since is None else since, self.start or 0.0)

    def masterless_for(self, limit_s: float) -> bool:
        """Return whether there was no master for ``limit_s`` seconds.

        If there is no master and the time is not over yet, the job is planned again when it is.
        """
        return self.masterless_since is not None and self.has_passed(
            self.masterless_since + limit_s
        )

    def _held_back(self) -> bool:
        """Return whether the operator allots nodes to the job, and it must not run for now."""
        return (
            self.seen.allotted
            and self.job is not None
            and self.refused is None
            and not self.ended
            and not self.suspend
            and (self.job.allocation is None or self.job.rests)
        )

    def _start(self) -> float | None:
        """Return the time at which the job started or was resumed; None if it has not started.

        It is the present time when the job starts. A refused job without a master does not start,
        and a suspended one without a master has no start. A job that has ended, or is held back
        without a master, keeps what the status says.
        """
        start = unix_seconds(self.status.get("startTime"))
        if self.ended or (self.held_back and not self.runs):
            return start
        if self.suspend and self.scaled_to_zero:
            return None
        if self.is_true(ConditionType.SUSPENDED):
            return start if self.suspend else self.now
        if start is None and not (self.refused and self.scaled_to_zero):
            return self.now
        return start

    def _pending_since(self) -> float | None:
        """Return the time since which training does not run, in Unix seconds.

        The operator's own time is used, because the master's clock may differ.

        Returns:
            None if training runs, or if the job has ended, has not started or is held back.
        """
        running = self.is_true(ConditionType.RUNNING)
        if self.ended or self.start is None or self.held_back or running:
            return None
        known = unix_seconds(self.status.get("pendingSince"))
        first = self.now if ConditionType.RUNNING in self.conditions else self.start
        return first if known is None else known

    def _passed_deadline(self) -> ConditionReason | None:
        """Return the reason of ``DeadlineExceeded`` if a deadline has passed; otherwise None.

        The deadlines are ``activeDeadlineSeconds`` after the start, and ``pendingTimeoutSeconds``
        without training. A deadline that was exceeded once stays so. Otherwise a job that has
        ended, has not started or is to be suspended has no deadline. If a deadline is still to
        come, the job is planned again then.
        """
        if self.is_true(ConditionType.DEADLINE_EXCEEDED):
            known: ConditionReason = self.conditions[ConditionType.DEADLINE_EXCEEDED].get(
                "reason", ""
            )
            return known
        if self.ended or self.start is None or self.suspend:
            return None
        limit = self.spec.get("activeDeadlineSeconds")
        if limit is not None and self.has_passed(self.start + limit):
            return ConditionReason.ACTIVE_DEADLINE
        limit = self.spec.get("pendingTimeoutSeconds")
        if limit is None or self.pending_since is None:
            return None
        late = self.has_passed(max(self.start, self.pending_since) + limit)
        return ConditionReason.PENDING_TIMEOUT if late else None

    def has_passed(self, at: float) -> bool:
        """Return whether a time in Unix seconds has passed.

        If not, the time is added to ``wake_times``, so that the job is planned again then.
        """
        if self.now < at:
            self.wake_times.append(at)
        return self.now >= at

    def nodes_are_gone(self) -> bool:
        """Return whether the master reports that the job has stopped and that no node is left.

        A report of a suspension must be about the current generation of the spec. The result is
        False if the report names no nodes because it has left them out.
        """
        training = self.training
        nodes, phase = training.get("nodes") or (), training.get("phase")
        return bool(
            (phase in ENDED_PHASES or self.has_suspended())
            and (nodes or not training.get("leftOut"))  # nodes that are gone are listed last
            and all(node.get("phase") == NodePhase.GONE for node in nodes)
        )

    def pods_are_gone(self) -> bool:
        """Return whether no worker Pod of the job holds resources.

        The condition ``PodsLeft`` that is False says so without a list. If the Pods were not
        listed, the result is otherwise False, and ``needs_pods`` is set, so that they are. If Pods
        are left and not overdue, they are listed again after 2 s.
        """
        if self.since(ConditionType.PODS_LEFT, "False") is not None:
            return True
        if self.seen.remaining_pods is None:
            self.needs_pods = True
        elif self.seen.remaining_pods and not self.overdue():
            self.wake_times.append(self.now + RELIST_S)
        return self.seen.remaining_pods == ()

    def overdue(self) -> bool:
        """Return whether Pods still hold resources more than END_GRACE_S seconds after the stop.

        The stop is the job's end, or the beginning of its suspension. If the Pods were not listed,
        the condition ``PodsLeft`` decides. If the time is not over, the job is planned again when
        it is.
        """
        if self.seen.remaining_pods is None:
            return self.is_true(ConditionType.PODS_LEFT)
        since = self.since(ConditionType.SUSPENDED, "False")
        if self.ended:
            since = unix_seconds(self.status.get("completionTime"))
        return (
            bool(self.seen.remaining_pods)
            and since is not None
            and self.has_passed(since + END_GRACE_S)
        )

    def remaining_pods_message(self) -> str:
        """Return a message that names at most three of the Pods that hold resources."""
        pods = self.seen.remaining_pods or ()
        shown = ", ".join(
            f"{pod.name} on {pod.host}" if pod.host else pod.name for pod in pods[:PODS_SHOWN]
        )
        more = f" and {len(pods) - PODS_SHOWN} more" if len(pods) > PODS_SHOWN else ""
        return f"these Pods still hold resources: {shown}{more}"

    def has_suspended(self) -> bool:
        """Return whether the master reports that this generation of the spec is suspended."""
        training = self.training
        fits = training.get("generation") == self.meta.get("generation")
        return fits and training.get("phase") == JobPhase.SUSPENDED

    def masters(self) -> list[MasterPod]:
        """Return the Pods of the master's Deployment.

        Those that have ended, or are ending, are among them.
        """
        return [pod for pod in self.seen.pods if pod.replica_set.startswith(f"{self.name}-")]


def final_phase(status: Obj) -> str:
    """Return the final phase of a job that has ended, by its status; otherwise "".

    The conditions ``Failed`` and ``Succeeded`` come first, then the phase that the master has
    reported. The phase in the status counts last, and only with a completion time.
    """
    conditions = {c["type"]: c.get("status") for c in status.get("conditions") or ()}
    for phase in (JobPhase.FAILED, JobPhase.SUCCEEDED):
        if conditions.get(phase.value) == "True":
            return phase.value
    reported = (status.get("training") or {}).get("phase")
    if reported in ENDED_PHASES:
        return str(reported)
    written = status.get("phase")
    return str(written) if written in ENDED_PHASES and status.get("completionTime") else ""


def _bare(obj: Obj) -> ElasticJob | None:
    """Return a job with only the fields that the master's objects are made from.

    The operator uses it for a job whose spec cannot be used. These fields are the host network of
    the workers, and the role of the master if that can be read. The result is None if not even the
    job's name is valid.
    """
    roles = (obj.get("spec") or {}).get("replicaSpecs") or {}
    user_spec = ((roles.get(names.ROLE_WORKER) or {}).get("template") or {}).get("spec")
    pod: Obj = {"containers": [{"name": names.MAIN_CONTAINER}]}
    if isinstance(user_spec, dict):
        pod["hostNetwork"] = user_spec.get("hostNetwork")
    for master in (roles.get(names.ROLE_MASTER), None):
        worker = {"template": {"spec": pod}}
        spec = {"replicaSpecs": {names.ROLE_WORKER: worker, names.ROLE_MASTER: master}}
        try:
            return ElasticJob.read(obj | {"spec": spec})
        except ConfigError:
            continue
    return None  # its name is not valid for an object
