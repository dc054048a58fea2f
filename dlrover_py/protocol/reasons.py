"""Types and reasons of conditions, and reasons of events: fixed words on which users alert.

The text below each word is its line in the reference: ``docs/reference/conditions.md`` and
``docs/reference/events.md`` are made from this module. Links in the texts are relative to that
folder.
"""

from enum import StrEnum

ENDED_BY_USER = "the job was ended by its user"
"""The message of :attr:`EventReason.JOB_STOPPED`, and the last reason of the job."""


class ConditionType(StrEnum):
    """The types of a job's conditions.

    The text of a type says what it means when the condition is True. The paragraphs ``When False``
    and ``What to do`` follow if there is something to say.
    """

    # --- Conditions of the operator ---

    ACCEPTED = "Accepted"
    """The spec is used. The reason ``WithoutEffect`` names fields that change nothing. The reason
    ``DoesNotJoin`` names a command that would not train together.

    When False: The spec is not used: ``Unsupported`` (roles or strategies that cannot be run yet),
    ``InvalidSpec`` or ``NameConflict``.

    What to do: Change or delete what the message names. Running nodes go on with the last accepted
    spec. From the new spec, only ``suspend`` and the numbers of nodes are applied, if they fit.
    """
    MASTER_READY = "MasterReady"
    """The master serves its nodes.

    When False: The reason says why not: see [reasons](#reasons-of-the-operators-conditions). This
    is normal for a job that is over or suspended.

    What to do: If it stays False for a minute: ``kubectl describe pod -l
    elasticjob.dlrover/replica-type=dlrover-master``
    """
    SUSPENDED = "Suspended"
    """All nodes and the master have ended, and no Pod holds resources.

    When False: The nodes are being stopped, or the job was resumed.
    """
    PODS_LEFT = "PodsLeft"
    """The job ended, or its suspension began, 90 s ago, and the Pods in the message still hold
    resources. They were deleted, but their kubelets have not ended them. ``Suspended`` stays False
    until they end.

    When False: No worker Pod holds resources. The condition is not shown while the job runs.

    What to do: Check whether the host exists (``kubectl get node``). If it is lost for good, delete
    its Node, or taint it with ``node.kubernetes.io/out-of-service=nodeshutdown:NoExecute``.
    Kubernetes then ends its Pods.
    """
    ALLOCATED = "Allocated"
    """The job may have at least its minimum of nodes. The message says how many, and why. The
    condition is shown if the operator [shares nodes among jobs](../autoscaling.md#on-kubernetes),
    or the job is in a [queue](../queues.md).

    When False: The job is held back, with the reason in words.

    What to do: Nothing: it starts or goes on when others have given nodes back. If it needs more
    than the cluster has, lower ``minReplicas``. If something is missing, the message names it.
    """
    GANG_READY = "GangReady"
    """The PodGroup that the Pod template names has the job's minimum as ``minMember``, or as
    ``minCount`` of Kubernetes' own groups. The condition is shown if the template names one and
    ``gangs.enabled`` is set ([gangs](../gangs.md)).

    When False: The message says what is missing, or which number the group has.

    What to do: What the message says.
    """
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """[A deadline](../operations.md#deadlines) has passed, and the job ends as failed.

    What to do: Raise the deadline and create the job again.
    """

    # --- Conditions of the master ---

    PODS_READY = "PodsReady"
    """At least the desired number of nodes is ready.

    When False: Fewer nodes are ready.

    What to do: Nothing, if ``Running`` is True.
    """
    RUNNING = "Running"
    """A round trains.

    When False: The message says why no round trains.
    """
    DEGRADED = "Degraded"
    """The job trains with fewer nodes than desired.

    When False: The round has its full size, or no round trains.

    What to do: See which node is missing: the message has the reason of the first one.
    """
    SUCCEEDED = "Succeeded"
    """The job has ended with success."""
    FAILED = "Failed"
    """The job has failed. The reason is the name of an [event](events.md), and the message has the
    traceback.

    What to do: Correct the script or the spec, then delete the job and create it again.
    """
    STOPPED = "Stopped"
    """The object is being deleted, and its nodes end."""
    CHECKPOINT_FAILING = "CheckpointFailing"
    """The newest state cannot be written to storage, or cannot be kept in memory. The message says
    why. Training goes on, and the last good checkpoint stays.

    When False: Checkpoints work. The condition is not shown while no script saves anything.

    What to do: Check for a full disk, missing rights and the address of the storage. If
    ``/dev/shm`` is too small: [a higher memory limit](../kubernetes.md#checkpoints)
    """
    OUT_OF_MEMORY = "OutOfMemory"
    """Memory ran out, and the kernel killed a worker, a process that the worker waited for, or a
    whole container. The message has the limit, and the peak if an agent saw it.

    When False: Training is steady again. The condition is not shown before the first such failure.

    What to do: Raise ``resources.limits.memory``, or use less memory: smaller batches, fewer
    DataLoader workers, fewer checkpoints in ``/dev/shm`` (they count).
    """
    SHARDS_QUARANTINED = "ShardsQuarantined"
    """Shards of a dataset are not trained: workers failed with them again and again, or their files
    are gone or were cut. The message names the dataset, the number of shards, and the last reason.
    The condition is not shown while there is none.

    What to do: Correct the data or the script. The shards are trained again in a new job, or under
    another name of the dataset. See [dynamic shards](../dynamic-shards.md#quarantine).
    """
    SCALING_ACTIVE = "ScalingActive"
    """The job chooses its number of nodes by itself ([autoscaling](../autoscaling.md)), or the
    allocator of the cluster does. The message says why it has this size. The condition is not shown
    without ``autoscale`` and allocator.

    When False: The size is only advised (``SizeAdvised``), or it cannot be judged: ``NoProgress``.

    What to do: For ``NoProgress``, call ``session.report_step`` in the script.
    """
    RESOURCES_ADVISED = "ResourcesAdvised"
    """Nodes use less or more than the template gives them
    ([resource advice](../autoscaling.md#memory-and-cpus-by-use)). The message says what would do,
    what was measured, and what new nodes get. The condition is not shown without
    ``resourceAdvice``.

    When False: The template fits, or the measurement is not long enough yet.

    What to do: Change the template, or let ``resourceAdvice.mode`` be ``auto``.
    """
    HANGING = "Hanging"
    """The job stands still. The message is the verdict: which rank the others wait for, and what it
    does. The condition is not shown before the first verdict.

    When False: Training went on, or the round was restarted.

    What to do: See [diagnosis](../diagnosis.md#verdicts).
    """
    WRONG_VALUES = "WrongValues"
    """The training computes wrong values: a loss or a gradient norm is not finite or has leapt up,
    or replicas of the parameters differ. The message says which rank has them, and since which
    step. The condition is not shown before the first such value.

    When False: The values are right again, or the round was restarted.

    What to do: See [diagnosis](../diagnosis.md#wrong-values).
    """
    SLOW = "Slow"
    """Steps take longer than usual, or one node waits for data longer than the others. The message
    names the node and the cause. The condition is not shown before the first time.

    When False: Steps take the usual time again, or the round is over.

    What to do: See [diagnosis](../diagnosis.md#slow-steps).
    """
    LOG_RULE = "LogRule"
    """A rule for the lines that workers print applies. The message names the rule, the rank and
    what was found. The condition is not shown before the first time.

    When False: The rule does not apply any more, or the round is over.

    What to do: See [diagnosis](../diagnosis.md#log-rules).
    """
    TABLES_AT_RISK = "TablesAtRisk"
    """Rows of a parameter server are lost, or have had one copy only for a minute. The message has
    the number of the parts of the tables. The condition is not shown before the first time.

    When False: All parts have their copies, or the job has ended.

    What to do: For ``RowsLost``, see [what is lost when](../parameter-server.md#what-is-lost-when).
    For ``SingleCopy``, check that the servers run and can reach each other, and their memory.
    """
    TUNING_REFUSED = "TuningRefused"
    """The wanted settings of data loaders cannot be used, and training goes on as before. The
    message says why.

    When False: The newest settings are used. The condition is not shown before the first refusal.

    What to do: Change ``spec.tuning`` (``dlrover job tune``), or read the data with an
    ``ElasticLoader``. See [tuning](../tuning.md).
    """
    JOURNAL_WRITABLE = "JournalWritable"
    """The condition is never True.

    When False: The journal cannot be stored. Training goes on, but no failure can be handled.

    What to do: Check the API server, the master's Role and the Secret ``elasticjob-J-journal``. The
    condition disappears when the problem is over.
    """
    IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
    """The image of a Pod cannot be pulled.

    What to do: Check the name, the tag, ``imagePullSecrets`` and the registry. Kubernetes keeps
    trying to start the Pod.
    """
    UNSCHEDULABLE = "Unschedulable"
    """A Pod has no host. The message has the scheduler's words, or says that no scheduler has
    processed the Pod for 30 s.

    What to do: Check ``schedulerName``, requests, selectors, taints and capacity. Training starts
    without the Pod if the minimum is there.
    """
    INVALID_TEMPLATE = "InvalidTemplate"
    """The API server or the kubelet refuses the Pod as it is written: a misspelt field, a mapping
    instead of a list, no image.

    What to do: The message has the path of the field. Correct the template: Pods that could not
    start are then created again from it.
    """
    POD_NOT_STARTING = "PodNotStarting"
    """10 s after a Pod got its host, none of its containers could be started.

    What to do: A Secret, ConfigMap or volume that the Pod mounts is missing, or the network or the
    kubelet of the host fails. Only events say which one (``kubectl describe pod J-n0``), and
    masters have no right to read events. Create what is missing, and the Pod starts. If you correct
    the template instead, the Pod is created again from it.
    """
    POD_INITIALIZING = "PodInitializing"
    """A Pod has waited for the same init container for more than 30 s. The init container runs, or
    fails and is tried again.

    What to do: See what it does: ``kubectl logs J-n0 -c NAME``. A download may take its time. An
    init container that waits for the name of another Pod, like Kubeflow's, waits forever: remove
    it. The Pod is then created again from the corrected template.
    """
    POD_NOT_ENDING = "PodNotEnding"
    """A Pod was deleted while the job runs, and it still holds resources half a minute after its
    grace period.

    What to do: See ``PodsLeft``.
    """
    QUOTA_EXCEEDED = "QuotaExceeded"
    """A ResourceQuota refuses a Pod.

    What to do: The master asks again every 15 s.
    """
    PODS_FORBIDDEN = "PodsForbidden"
    """The Pod is refused by Pod Security, a policy (also a ValidatingAdmissionPolicy), a LimitRange
    or a webhook, or its namespace or account is missing.

    What to do: The message has the server's words. The master tries the template again every
    minute.
    """
    PODS_REFUSED = "PodsRefused"
    """A host's kubelet has refused a Pod that the scheduler sent there, and no Pod has started to
    run since.

    What to do: See that host (``kubectl describe node``): a device plugin, CPU or NUMA policy,
    sysctls. The Pod is created again on another host, [at no cost](../operations.md#how-pods-end)
    unless the template is the cause.
    """
    NAME_CONFLICT = "NameConflict"
    """A Pod ``J-n7`` exists and does not belong to this job.

    What to do: Delete it, or give the job another name.
    """
    PERMISSION_DENIED = "PermissionDenied"
    """For 10 s, the master's Role has not allowed what the master needs.

    What to do: The Role or the RoleBinding was changed. The operator repairs them after half a
    minute. If the right to write this status is missing too, the master cannot report it, and the
    operator repairs them within ten minutes. To repair them sooner, delete both and the master's
    Pod. Workers go on.
    """
    JOB_GONE = "JobGone"
    """Pods are still desired, but the ElasticJob or its namespace is being deleted.

    What to do: Nothing: the condition goes away with the job.
    """


class ConditionReason(StrEnum):
    """The reasons of conditions that are fixed words.

    The text of a reason begins with the conditions that have it. If it names an event, the change
    of the condition is also a Kubernetes event with this reason.
    """

    # --- Reasons of the operator's conditions ---

    ACCEPTED = "Accepted"
    """``Accepted``: The spec is used as it is."""
    WITHOUT_EFFECT = "WithoutEffect"
    """``Accepted``, Normal event: The spec has fields that change nothing here: fields of DLRover,
    and places of a template that the user cannot set (``restartPolicy``, ``finalizers``)."""
    DOES_NOT_JOIN = "DoesNotJoin"
    """``Accepted``, Warning event: The command starts no ``elastic-run`` (``torchrun train.py``,
    ``python train.py``), or it starts another launcher inside it. Each node, or each worker, would
    train alone. The job is run anyway."""
    UNSUPPORTED = "Unsupported"
    """``Accepted``, Warning event: The spec has TensorFlow roles, or servers with a field that a
    cluster does not support yet."""
    INVALID_SPEC = "InvalidSpec"
    """``Accepted``, Warning event: A newer or older CRD let through a value that this operator
    cannot read."""
    NAME_CONFLICT = "NameConflict"
    """``Accepted``, Warning event, ``GangReady``: An object that the job needs exists already and
    belongs to another owner."""
    CREATING = "Creating"
    """``MasterReady``, ``GangReady``: The operator creates the objects."""
    IN_STEP = "InStep"
    """``GangReady``: The PodGroup has the job's minimum."""
    API_MISSING = "ApiMissing"
    """``GangReady``: The API server does not serve PodGroups of this kind, or they may not be
    read."""
    REFUSED = "Refused"
    """``MasterReady``, Warning event: The spec is not accepted, or the API server refused an
    object: the message has its words. If they contain ``spec.clusterIPs``, the master's Service was
    deleted and another Service has its address. After two minutes the master, and then its nodes,
    are created again with another address."""
    QUOTA_EXCEEDED = "QuotaExceeded"
    """``MasterReady``, Warning event: A ResourceQuota has no room for the master's objects or its
    Pod."""
    PODS_FORBIDDEN = "PodsForbidden"
    """``MasterReady``, Warning event: A policy, a webhook, Pod Security or a LimitRange refuses the
    master's objects or its Pod."""
    PERMISSION_DENIED = "PermissionDenied"
    """``MasterReady``, Warning event: The operator has lacked a right for 10 s:
    [install.md](../install.md#rights)"""
    STARTING = "Starting"
    """``MasterReady``: The master's Pod is not ready yet."""
    UNSCHEDULABLE = "Unschedulable"
    """``MasterReady``, Warning event: No scheduler has processed the master's Pod for 30 s. Check
    that the scheduler named by ``schedulerName`` runs."""
    FAILED_CREATE = "FailedCreate"
    """``MasterReady``, Warning event: The master's Deployment cannot create the Pod, for another
    reason."""
    WAITING = "Waiting"
    """``MasterReady``, ``Allocated``: Objects of a deleted job with the same name are still being
    deleted, or the job may not have nodes yet."""
    HELD_BACK = "HeldBack"
    """``Allocated``, Normal event: The job may have fewer nodes than its minimum for now."""
    AVAILABLE = "Available"
    """``MasterReady``, Normal event: The master serves its nodes."""
    FINISHED = "Finished"
    """``MasterReady``, ``Suspended``: The job is over."""
    SUSPENDING = "Suspending"
    """``Suspended``: The master stops its nodes."""
    SUSPENDED = "Suspended"
    """``Suspended``, ``MasterReady``, Normal event: The job is suspended: no node is left, and the
    master has ended."""
    RESUMED = "Resumed"
    """``Suspended``, Normal event: ``spec.suspend`` is false again."""
    NOT_ENDING = "NotEnding"
    """``PodsLeft``, Warning event: Deleted Pods do not end."""
    NONE_LEFT = "NoneLeft"
    """``PodsLeft``: No worker Pod holds resources."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """``Failed``: A deadline has passed, and there was no master that could end the job."""
    ACTIVE_DEADLINE = "ActiveDeadline"
    """``DeadlineExceeded``, Warning event: ``activeDeadlineSeconds`` has passed."""
    PENDING_TIMEOUT = "PendingTimeout"
    """``DeadlineExceeded``, Warning event: ``pendingTimeoutSeconds`` has passed. The message says
    what kept the job pending."""

    # --- Reasons of the master's conditions ---

    RESOLVED = "Resolved"
    """``OutOfMemory``, ``TuningRefused``, and each condition that reports a problem: The problem is
    over."""
    JOURNAL_UNWRITABLE = "JournalUnwritable"
    """``JournalWritable``: The journal cannot be stored."""
    READY = "Ready"
    """``PodsReady``: The message has the number of ready nodes."""
    JOB_ENDED = "JobEnded"
    """``PodsReady``, ``Degraded``: The job is over."""
    FEWER_NODES = "FewerNodes"
    """``Degraded``: The round has fewer nodes than desired."""
    FULL_SIZE = "FullSize"
    """``Degraded``: The round has its full size."""
    NOT_RUNNING = "NotRunning"
    """``Degraded``: No round trains."""
    AS_EXPECTED = "AsExpected"
    """``CheckpointFailing``: Checkpoints work. ``ResourcesAdvised``: The template fits."""
    CHECKPOINT_FAILED = "CheckpointFailed"
    """``CheckpointFailing``: The newest state cannot be stored, or kept in memory."""
    OUT_OF_MEMORY = "OutOfMemory"
    """``OutOfMemory``: Memory ran out."""
    MEASURING = "Measuring"
    """``ScalingActive``: The speed with the present number of nodes is not known yet.
    ``ResourcesAdvised``: The nodes were not measured for long enough."""
    NO_PROGRESS = "NoProgress"
    """``ScalingActive``: The script reports no steps, so its speed cannot be measured."""
    ALLOCATED = "Allocated"
    """``ScalingActive``, ``Allocated``, Normal event: The allocator of the cluster decides the
    size. The message says why."""
    RESIZED = "Resized"
    """``ScalingActive``: The size was changed just now."""
    SIZE_ADVISED = "SizeAdvised"
    """``ScalingActive``: Another size would be better, and ``autoscale.mode`` is ``advise``."""
    RESOURCES_ADVISED = "ResourcesAdvised"
    """``ResourcesAdvised``: Other memory or another CPU request would do."""
    SIZE_KEPT = "SizeKept"
    """``ScalingActive``: No other size is worth the change, or the change waits: the message says
    for what."""
    REPLICAS_CONTESTED = "ReplicasContested"
    """``ScalingActive``: The job scales by itself, and ``replicas`` was changed three times within
    an hour. Another controller, such as a HorizontalPodAutoscaler, may write it."""
    SHARDS_QUARANTINED = "ShardsQuarantined"
    """``ShardsQuarantined``: Shards of a dataset are not trained."""
    ROWS_LOST = "RowsLost"
    """``TablesAtRisk``: All copies of some rows have died."""
    SINGLE_COPY = "SingleCopy"
    """``TablesAtRisk``: Some rows have one copy only."""
    HANG = "Hang"
    """``Hanging``: The job stands still."""
    WRONG_VALUES = "WrongValues"
    """``WrongValues``: The training computes wrong values."""
    SLOW = "Slow"
    """``Slow``: Steps take longer than usual."""
    LOG_RULE = "LogRule"
    """``LogRule``: A rule for the lines that workers print applies."""
    TUNING_REFUSED = "TuningRefused"
    """``TuningRefused``: Settings of data loaders cannot be used."""


class EventReason(StrEnum):
    """The reasons of the master's events.

    The text of a Warning event begins with ``Warning:``. A condition of the master that reports a
    problem is an event as well, whose reason is the type of the condition.
    """

    # --- The job ---

    JOB_STARTED = "JobStarted"
    """The first master has taken over the job."""
    MASTER_STARTED = "MasterStarted"
    """A master has taken over from an earlier one. Workers went on."""
    SPEC_CHANGED = "SpecChanged"
    """The spec asks for another number of nodes, another template, or a restart of all nodes.
    Running nodes keep the old template [until they are
    replaced](../kubernetes.md#an-edit-of-the-template)."""
    SUSPENDED = "Suspended"
    """``spec.suspend`` has become true."""
    RESUMED = "Resumed"
    """``spec.suspend`` has become false."""
    JOB_SUCCEEDED = "JobSucceeded"
    """All workers ended with exit code 0."""
    JOB_STOPPED = "JobStopped"
    """The object is being deleted."""
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    """Warning: The operator has set the condition of this name."""
    MASTER_ENDED = "MasterEnded"
    """Warning: Not on Kubernetes: the master was ordered to end, and the job ends with it."""
    JOURNAL_BEHIND = "JournalBehind"
    """Warning: Agents know a newer round than the journal: the journal was lost or set back. The
    master goes on with higher numbers."""

    # --- Rounds ---

    ROUND_FORMED = "RoundFormed"
    """A round was formed: its number, its size, which nodes joined and left, why, and the time
    since the cause."""
    TRAINING_RESUMED = "TrainingResumed"
    """The round has made its first step. The message says how many steps are repeated (scripts with
    ``report_step``)."""
    HOSTS_READMITTED = "HostsReadmitted"
    """A node can only be placed on a host that was excluded after a loss. The node is requested
    again, with that host allowed."""
    NODE_RECREATED = "NodeRecreated"
    """A node could not start (no such image, no room), and the template has changed since. Another
    node is created from the new template."""
    ROOM_TO_GROW = "RoomToGrow"
    """More nodes are ready than train: a larger round follows."""
    BUDGET_RESET = "BudgetReset"
    """A round ran for ``forgive_after_s`` with new steps: all restart budgets are full again."""
    NODES_MISSING = "NodesMissing"
    """Warning: Too few nodes have joined for 10 s, then 60 s, 360 s …, where nodes start by
    themselves. The message says which nodes are present, or which node ranks are missing. Where the
    job creates its nodes: some run for 60 s, then 360 s …, and have not joined. Their command may
    wait for something, or starts no ``elastic-run``."""
    RENDEZVOUS_TIMEOUT = "RendezvousTimeout"
    """Warning: There were too few nodes for ``DLROVER_MASTER_JOIN_TIMEOUT_S``. It is not set on
    Kubernetes, where ``pendingTimeoutSeconds`` has this purpose."""

    SCALED_UP = "ScaledUp"
    """The job has decided to have more nodes (``autoscale``). The message says what is gained."""
    SCALED_DOWN = "ScaledDown"
    """The job has decided to have fewer nodes (``autoscale``). The message says why."""
    BAD_HOSTS = "BadHosts"
    """Warning: Hosts have failed in several jobs. The message says which, how, and whether new
    nodes avoid them. Without a warning: there are no such hosts any more. See
    [diagnosis](../diagnosis.md#bad-hosts)."""
    NODES_ALLOCATED = "NodesAllocated"
    """The allocator of the cluster has changed how many nodes the job may have. The message says
    why."""
    SIZE_ADVISED = "SizeAdvised"
    """Another number of nodes would be better. Nothing changes, as ``autoscale.mode`` is
    ``advise``."""

    # --- Nodes ---

    NODE_JOINED = "NodeJoined"
    """The agent of a node has connected."""
    NODE_LEAVING = "NodeLeaving"
    """A node leaves with notice: it is deleted, drained or preempted. This costs no budget."""
    NODE_LEFT = "NodeLeft"
    """A node that left with notice is gone."""
    NODE_LOST = "NodeLost"
    """Warning: A node was lost without notice, or its lease ran out. Or its kubelet stopped it by
    SIGTERM with no deletion or eviction, as for a ``livenessProbe`` that fails. The event is Normal
    if the loss costs no budget."""
    OUT_OF_MEMORY = "OutOfMemory"
    """Warning: Why a node was lost, if Kubernetes says it a moment later: memory ran out, and the
    kernel killed its container."""
    MEMORY_RAISED = "MemoryRaised"
    """A node ran out of memory, and new nodes have a higher limit (``memoryGrowth``), or again that
    of the template (``resourceAdvice``)."""
    RESOURCES_ADVISED = "ResourcesAdvised"
    """Other memory or another CPU request is advised than before (``resourceAdvice``)."""
    SPOT_HELD = "SpotHeld"
    """Warning: Nodes that may be on spot hosts were taken away too often, so only nodes of the
    minimum are requested for some time (``spotPolicy``). The message says until when."""
    NODE_CUT_OFF = "NodeCutOff"
    """Warning: For a lease, a node heard neither the master nor another node of its round, so it
    stopped its workers. Another round follows. This is normal after a network failure. If only the
    master was away, nodes cannot reach each other by UDP."""
    NODE_RESTARTED = "NodeRestarted"
    """Warning: A new agent runs in the same place."""
    NODE_REFUSED = "NodeRefused"
    """An agent was ordered to end, because its node was given up, or because the agent belongs to
    another incarnation of the node. This is correct after a network failure."""
    REPLACEMENTS_EXHAUSTED = "ReplacementsExhausted"
    """Warning: A place is not filled again. As the end of the job: fewer nodes than the minimum are
    left. Agents that end immediately (wrong image, a command that fails before it joins) look like
    this: see the ``NodeLost`` before it."""
    NODE_GAVE_UP = "NodeGaveUp"
    """Warning: Not on Kubernetes: an agent gave up where no platform replaces nodes. The job fails.
    """

    # --- Failures ---

    WORKER_FAILED = "WorkerFailed"
    """Warning: The first cause of a failure: node, rank, exit code or signal, exception."""
    SHARDS_QUARANTINED = "ShardsQuarantined"
    """Warning: A shard of a dataset is not trained any more. The message has its samples and the
    reason."""
    TABLES_AT_RISK = "TablesAtRisk"
    """Warning: Rows of a parameter server are lost, or have had one copy only for a minute."""
    TABLES_SAFE = "TablesSafe"
    """All parts of the tables have their copies again."""
    TABLES_RESTORED = "TablesRestored"
    """All rows of a parameter server have gone back to a cut. Pushes after it do not count."""
    HANG = "Hang"
    """Warning: The job stands still. The message is the
    [verdict](../diagnosis.md#verdicts): the rank that the others wait for, and what it does."""
    HANG_OVER = "HangOver"
    """Training has gone on after a hang."""
    SLOW = "Slow"
    """Warning: Steps take longer than usual, or one node waits for data longer than the others. The
    message names the node and the cause. See [diagnosis](../diagnosis.md#slow-steps)."""
    SLOW_OVER = "SlowOver"
    """Steps take the usual time again, or the round is over."""
    LOG_RULE = "LogRule"
    """Warning: A rule for the lines that workers print applies, or cannot be used. See
    [diagnosis](../diagnosis.md#log-rules)."""
    LOG_RULE_OVER = "LogRuleOver"
    """A log rule does not apply any more, or the round is over."""
    NOT_FINITE = "NotFinite"
    """Warning: A loss or a gradient norm is NaN or infinite. The message names the rank and the
    step. See [diagnosis](../diagnosis.md#wrong-values)."""
    SPIKE = "Spike"
    """Warning: A loss or a gradient norm has leapt up and stays there."""
    REPLICAS_DIFFER = "ReplicasDiffer"
    """Warning: Parameters differ that must be equal on all replicas. The message names the rank, if
    a majority shows it."""
    SNAPSHOT_TAKEN = "SnapshotTaken"
    """All ranks were looked at, because a user asked (``dlrover job stacks``)."""
    PEER_LOST = "PeerLost"
    """Warning: A worker lost its connection to another worker. The master looks for the cause."""
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    """Warning: A node failed more than ``restartCount`` times without progress. The node is
    replaced, or the job ends."""
    NON_RETRYABLE = "NonRetryable"
    """Warning: The same exception came again at the same step: the job ends."""
    INVALID_COMMAND = "InvalidCommand"
    """Warning: ``elastic-run`` refused its command line before the first round, and said so; or, on
    this machine, there is no such program: the job ends."""
    NESTED_LAUNCHER = "NestedLauncher"
    """Warning: A process below a worker is in another world than the worker. The script starts
    another launcher, or an evaluation with ranks of its own. Each agent reports this once; it looks
    in the first minutes."""
    NEVER_JOINED = "NeverJoined"
    """Warning: The command of a node ended with exit code 0 and never joined the job, like
    ``torchrun train.py``. Start the script with ``elastic-run``. Before the first round the job
    ends; later the node is not replaced."""

    # --- Data loaders ---

    TUNING_REQUESTED = "TuningRequested"
    """Other settings of data loaders are wanted: by ``spec.tuning`` or by the auto-tuner. The
    message has its reason. See [tuning](../tuning.md)."""
    TUNED = "Tuned"
    """All workers use the settings, from the same step on."""
    TUNING_REFUSED = "TuningRefused"
    """Warning: The settings cannot be used: the script has no ``ElasticLoader``, or there are fewer
    CPUs than loader workers. Training goes on as before."""

    # --- Checkpoints ---

    CHECKPOINT_STORED = "CheckpointStored"
    """A checkpoint was stored: its manifest exists."""
    NOTHING_STORED = "NothingStored"
    """Warning: The job has ended, and its newest checkpoint was only in memory. Neither
    ``spec.checkpoint.dir`` nor the script names a directory."""
    CHECKPOINT_REQUESTED = "CheckpointRequested"
    """The newest checkpoint in memory is being stored. The cause: a node leaves, the job is
    suspended or ends, a worker has failed (``saveAtBreakpoint``), or a user asked (``dlrover job
    checkpoint``)."""
    CHECKPOINT_CANCELED = "CheckpointCanceled"
    """A checkpoint was not stored. The cause: a node that was writing a part of it is gone, a new
    round has begun, or a newer checkpoint is stored instead."""
    CHECKPOINT_FAILED = "CheckpointFailed"
    """Warning: A checkpoint was not stored. The message says what went wrong. The next checkpoint
    is tried as usual."""

    CHECKPOINT_NOT_COPIED = "CheckpointNotCopied"
    """Warning: Nodes have left by plan with parts of the newest checkpoint, which is not in
    storage. No node that stays has copied them in time. The next round goes back to an older one,
    unless its workers have loaded these parts before."""

    # --- Checks ---

    CHECK_STARTED = "CheckStarted"
    """Which nodes are checked together."""
    NODES_CHECKED = "NodesChecked"
    """Which nodes are fit, and how fast they are."""
    CHECK_VOID = "CheckVoid"
    """Warning: The check of a slow node also failed in a pair without it, so it says nothing. The
    message has the failure. All nodes of the check train again."""
    NODES_SUSPECTED = "NodesSuspected"
    """Warning: A pair failed: both nodes are checked with others. Or a member of the round is slow,
    and is checked with good nodes."""
    NODE_EXCLUDED = "NodeExcluded"
    """Warning: A node is not fit, and another node takes its place."""
    NODE_SLOW = "NodeSlow"
    """A node is slow but kept, because too few nodes would be left."""
    NETWORK_CHECK_FAILED = "NetworkCheckFailed"
    """Warning: Fewer nodes than the minimum are fit: the job ends."""

    # --- Only in Kubernetes ---

    TEMPLATE_WARNING = "TemplateWarning"
    """Warning: The API server accepts the Pod template but warns about it. Examples are a
    deprecated field, Pod Security's ``warn`` level, and a variable that is given twice. The event
    is created once for the same words. ``status.training.events`` does not have it."""
