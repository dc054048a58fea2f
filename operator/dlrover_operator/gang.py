"""The PodGroup that a job's template names: what it must be (pure functions).

Volcano and the coscheduling plug-in place the Pods of a group together, at least ``minMember`` of
them. For an elastic job that is its minimum.
"""

from dlrover_operator.observed import Gang, Obj
from dlrover_py.kubernetes.kinds import COSCHEDULING_GROUPS, VOLCANO_GROUPS
from dlrover_py.protocol import names
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.reasons import ConditionReason

VOLCANO_NOTES = ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name")
"""Annotations of a Pod with the name of its group, for Volcano."""
VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
"""Annotation of a Pod with the queue of its group, for Volcano."""
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
"""Label of a Pod with the name of its group, for the coscheduling plug-in."""


def gang_of(job: Obj) -> Gang | None:
    """Return the group that the template of an ElasticJob names; None if it names none."""
    roles = (job.get("spec") or {}).get("replicaSpecs") or {}
    meta = _mapping((roles.get(names.ROLE_WORKER) or {}).get("template"), "metadata")
    notes, labels = _mapping(meta, "annotations"), _mapping(meta, "labels")
    for note in VOLCANO_NOTES:
        if notes.get(note):
            return Gang(VOLCANO_GROUPS, str(notes[note]), str(notes.get(VOLCANO_QUEUE) or ""))
    named = labels.get(COSCHEDULING_LABEL)
    return Gang(COSCHEDULING_GROUPS, str(named)) if named else None


def _mapping(holder: Obj | None, name: str) -> Obj:
    """Return a part of a template, which the API server stores in any form; {} for another one."""
    found = (holder or {}).get(name)
    return found if isinstance(found, dict) else {}


def change(job: ElasticJob, gang: Gang) -> Obj | None:
    """Return the PodGroup to write; None if it is right, is another's, or cannot be written.

    Args:
        job: the job.
        gang: its group.
    """
    group = gang.group
    if gang.missing:
        return None
    if group is not None and (
        group.owner != job.metadata.uid or group.minimum == job.worker.minimum
    ):
        return None
    spec: Obj = {"minMember": job.worker.minimum}
    if gang.queue:
        spec["queue"] = gang.queue
    meta = {
        "name": gang.name,
        "namespace": job.metadata.namespace,
        "labels": {names.LABEL_APP: names.APP, names.LABEL_JOB: job.metadata.name},
        "ownerReferences": [names.owner(job.metadata.name, job.metadata.uid)],
    }
    return {"metadata": meta, "spec": spec}


def verdict(job: ElasticJob, gang: Gang) -> tuple[bool, ConditionReason, str]:
    """Return whether the group fits the job, with a reason and words for ``GangReady``.

    It fits if its ``minMember`` is the job's minimum, whoever owns it. A group that does not exist
    or cannot be read does not fit.

    Args:
        job: the job.
        gang: its group.
    """
    minimum, what = job.worker.minimum, f"the PodGroup {gang.name}"
    if gang.missing:
        why = f"{gang.missing}: install it, or take {what} out of the template"
        return False, ConditionReason.API_MISSING, why
    if gang.group is None:
        return False, ConditionReason.CREATING, f"{what} does not exist yet"
    has = f"{what} has minMember {gang.group.minimum}"
    if gang.group.minimum == minimum:
        return True, ConditionReason.IN_STEP, has
    told = f"{has}, and the job's minimum is {minimum}"
    if gang.group.owner != job.metadata.uid:
        told += ": set it, or delete the PodGroup, which does not belong to this job"
        return False, ConditionReason.NAME_CONFLICT, told
    return False, ConditionReason.CREATING, told
