"""The PodGroup that a job's template names: what it must be (pure functions).

Volcano, the coscheduling plug-in and the scheduler of Kubernetes itself place the Pods of a group
together, at least as many of them as the group says. For an elastic job that is the least number of
nodes with which it trains: its minimum, or the next larger of its ``sizes``.
"""

from collections.abc import Iterable

from dlrover_operator.observed import Gang, Obj
from dlrover_py.kubernetes.kinds import COSCHEDULING_GROUPS, SCHEDULING, VOLCANO_GROUPS, Kind
from dlrover_py.protocol import names
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reasons import ConditionReason

VOLCANO_NOTES = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
"""Annotations of a Pod with the name of its group, for Volcano."""
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""Annotation of a Pod with the queue of its group, for Volcano."""
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
"""Label of a Pod with the name of its group, for the coscheduling plug-in."""
POD_GROUPS = Kind(SCHEDULING, "", "podgroups", "PodGroup")
"""Kubernetes' own PodGroups (since 1.36), which a Pod names in ``schedulingGroup``."""
WORKLOADS = Kind(SCHEDULING, "", "workloads", "Workload")
"""Kubernetes' own Workloads with groups in them (1.35), which a Pod names in ``workloadRef``."""


def gang_of(job: Obj) -> Gang | None:
    """Return the group that the template of an ElasticJob names; None if it names none."""
    roles = (job.get("spec") or {}).get("replicaSpecs") or {}
    template = (roles.get(names.ROLE_WORKER) or {}).get("template")
    meta, spec = _mapping(template, "metadata"), _mapping(template, "spec")
    notes, labels = _mapping(meta, "annotations"), _mapping(meta, "labels")
    for note in VOLCANO_NOTES:
        if notes.get(note):
            queue = str(notes.get(VOLCANO_QUEUE) or "")
            return Gang(VOLCANO_GROUPS, str(notes[note]), queue=queue)
    if labels.get(COSCHEDULING_LABEL):
        return Gang(COSCHEDULING_GROUPS, str(labels[COSCHEDULING_LABEL]))
    priority = str(spec.get("priorityClassName") or "")
    if name := _mapping(spec, "schedulingGroup").get("podGroupName"):
        return Gang(POD_GROUPS, str(name), priority_class=priority)
    workload = _mapping(spec, "workloadRef")
    if workload.get("name") and workload.get("podGroup"):
        return Gang(WORKLOADS, str(workload["name"]), str(workload["podGroup"]))
    return None


def _mapping(holder: object, name: str) -> Obj:
    """Return a part of a template, which the API server stores in any form; {} for another one."""
    found = holder.get(name) if isinstance(holder, dict) else None
    return found if isinstance(found, dict) else {}


def own_kind(wanted: Kind, served: Iterable[Kind]) -> tuple[Kind | None, str]:
    """Return the kind with its version, or None and why Pods cannot be in groups of this kind.

    Workloads had groups in them only while there were no PodGroups. Later ones have templates of
    groups, and no Pod names them.

    Args:
        wanted: ``POD_GROUPS`` or ``WORKLOADS``.
        served: what the API server has of this API group, preferred versions first.
    """
    kinds = list(served)
    groups = [kind for kind in kinds if kind.plural == POD_GROUPS.plural]
    found = [kind for kind in kinds if kind.plural == wanted.plural]
    if wanted is WORKLOADS and groups:
        version = groups[0].api_version
        return None, f"Pods name PodGroups of {version}, in schedulingGroup, and no Workloads"
    if found:
        return found[0], ""
    missing = f"the API server does not serve {wanted.plural} of {SCHEDULING}"
    return None, f"{missing} (it needs the feature gate GenericWorkload)"


def change(job: ElasticJob, gang: Gang) -> Obj | None:
    """Return the PodGroup to write; None if it is right, is another's, or cannot be written.

    Args:
        job: the job.
        gang: its group.
    """
    group = gang.group
    if gang.missing or (group is not None and group.leaving):
        return None
    if group is not None and (group.owner != job.metadata.uid or group.minimum == job.worker.least):
        return None
    meta = {
        "name": gang.name,
        "namespace": job.metadata.namespace,
        "labels": {names.LABEL_APP: names.APP, names.LABEL_JOB: job.metadata.name},
        "ownerReferences": [names.owner(job.metadata.name, job.metadata.uid)],
    }
    return {"metadata": meta, "spec": _spec(job, gang)}


def _spec(job: ElasticJob, gang: Gang) -> Obj:
    """Return the spec of the object with the group."""
    policy: Obj = {"gang": {"minCount": job.worker.least}}
    controller = {"apiGroup": names.GROUP, "kind": names.KIND, "name": job.metadata.name}
    if gang.part:
        groups = [{"name": gang.part, "policy": policy}]
        return {"controllerRef": controller, "podGroups": groups}
    if gang.kind.group == SCHEDULING:
        priority = gang.priority_class or job.worker.priority_class
        spec: Obj = {"schedulingPolicy": policy}
        return spec | ({"priorityClassName": priority} if priority else {})
    spec = {"minMember": job.worker.least}
    return spec | ({"queue": gang.queue} if gang.queue else {})


def changed(spec: Obj) -> Obj:
    """Return the fields of a group's spec that follow the job's minimum."""
    return {k: v for k, v in spec.items() if k in ("minMember", "schedulingPolicy", "podGroups")}


def verdict(job: ElasticJob, gang: Gang) -> tuple[bool, ConditionReason, str]:
    """Return whether the group fits the job, with a reason and words for ``GangReady``.

    It fits if its ``minMember`` is the job's minimum, whoever owns it. A group that does not exist
    or cannot be read does not fit.

    Args:
        job: the job.
        gang: its group.
    """
    minimum, what = job.worker.least, f"the PodGroup {gang.name}"
    if gang.part:
        what = f"the group {gang.part} of the Workload {gang.name}"
    if gang.missing:
        why = f"{gang.missing}: install it, or take {what} out of the template"
        return False, ConditionReason.API_MISSING, why
    if gang.group is None:
        return False, ConditionReason.CREATING, f"{what} does not exist yet"
    field = "minCount" if gang.kind.group == SCHEDULING else "minMember"
    has = f"{what} has {field} {gang.group.minimum}"
    if gang.group.minimum == minimum:
        return True, ConditionReason.IN_STEP, has
    told = f"{has}, and the job's minimum is {minimum}"
    if gang.group.owner != job.metadata.uid:
        told += f": set it, or delete the {gang.kind.name}, which does not belong to this job"
        return False, ConditionReason.NAME_CONFLICT, told
    if gang.group.leaving:
        told += ": it is being deleted, and is made anew once all Pods of the job have ended"
    return False, ConditionReason.CREATING, told
