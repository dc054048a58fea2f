"""``ElasticJob``: what the user wants. The CRD is generated from this module.

The module has DLRover's group, version and kind, and all fields of DLRover's schema. A field that
DLRover does not have is added only once its behavior exists. A field of DLRover's that has no
effect here is marked ``INERT``: it is accepted, and the user gets a message
(:meth:`ElasticJob.without_effect`).

Files are checked strictly: an unknown field is an error with its path. Objects of the API are read
leniently (:meth:`ElasticJob.read`): the API server has checked them, perhaps by a newer schema.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails, PydanticCustomError

from dlrover_py.protocol import names
from dlrover_py.protocol.agents import MAX_LEVELS
from dlrover_py.protocol.autoscale import AUTO, STRICT, AutoscaleSpec, NodeAllocation
from dlrover_py.protocol.commands import (
    ELASTIC_RUN,
    ENV_NNODES,
    ENV_STANDALONE,
    LAUNCHERS,
    calls,
    is_standalone,
    joining,
    remarks,
)
from dlrover_py.protocol.cut_storage import CutStorage
from dlrover_py.protocol.errors import ConfigError, UnsupportedError, did_you_mean, shown
from dlrover_py.protocol.hosts import BadHosts
from dlrover_py.protocol.log_rules import MAX_RULES, LogRule, rule_problems
from dlrover_py.protocol.memory_growth import MemoryGrowthSpec, memory_limit
from dlrover_py.protocol.names import API_VERSION, KIND, MAIN_CONTAINER
from dlrover_py.protocol.resource_advice import ResourceAdviceSpec, cpu_milli, has_own_cpus
from dlrover_py.protocol.sdk import MAX_LOADER_WORKERS, MAX_MICRO_BATCH
from dlrover_py.protocol.template import (
    DEPTH,
    TemplateFault,
    faults_of,
    in_lines,
    is_deeper,
    reference_faults,
)
from dlrover_py.protocol.words import counted, without_passwords

_JOB_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
JobName = Annotated[str, StringConstraints(pattern=_JOB_NAME, min_length=1, max_length=37)]
"""The name of a job. It is the prefix of its Pods' names."""
Text = Annotated[str, StringConstraints(max_length=253)]
"""A text as long as the name of an object at most."""
Int32 = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A number of Kubernetes' type int32, 0 or more."""
Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A duration in whole seconds, at least 1."""

INERT: Final = "accepted, without effect"
"""Mark of a field of DLRover's schema that has no effect here."""
CLUSTER_ONLY: Final = "has an effect on Kubernetes only"
"""Mark of a field that has no effect for a job on this machine."""

ALLREDUCE: Final = "AllreduceStrategy"
"""The distribution strategy of a job with workers only."""
PARAMETER_SERVER: Final = "ParameterServerStrategy"
"""The distribution strategy of a job with servers. TensorFlow's are not supported."""
OTHER_ROLES: Final = ("ps", "chief", "evaluator", "master")
"""Roles of DLRover's jobs that are not supported, except for ``ps`` with a command of ours."""
SERVER_COMMAND: Final = ("dlrover", "ps", "server")
"""The command of a server. A role ``ps`` with another command is one of TensorFlow."""
SERVERS: Final = "spec.replicaSpecs.ps"
"""The path of the role of the servers."""
SERVER_TEMPLATE: Final = f"{SERVERS}.template"
"""The path of the Pod template of the servers."""

TEMPLATE: Final = "spec.replicaSpecs.worker.template"
"""The path of the Pod template of the nodes."""
HERE: Final = ("command", "args", "env")
"""Fields of the main container that have an effect for a job on this machine."""
MASTER_TAKES: Final = (
    *("nodeSelector", "affinity", "priorityClassName", "schedulerName"),
    *("tolerations", "imagePullSecrets"),
)
"""Fields of a Pod that the master's Pod takes from its template."""
MASTER_SETTING: Final = "DLROVER_MASTER_"
"""Prefix of the environment variables that are settings of a master."""
TRACE_SETTINGS: Final = (
    *("OTEL_EXPORTER_OTLP_", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SDK_DISABLED"),
    *("OTEL_SERVICE_NAME", "OTEL_TRACES_EXPORTER"),
)
"""Begins of OpenTelemetry's environment variables that say where a master sends its traces."""
MASTER_ENV: Final = (MASTER_SETTING, *TRACE_SETTINGS)
"""Begins of the environment variables that the master's Pod takes from its template."""
MASTER_TEMPLATE: Final = "spec.replicaSpecs.dlrover-master.template"
"""The path of the master's Pod template."""

MASTER_ARGUMENTS: Final = (
    *("pending_timeout", "pending_fail_strategy", "service_type", "pre_check_ops"),
    *("pre_check_bypass", "training_elastic_mode", "enable_dashboard", "dashboard_port"),
)
"""Annotations of an ElasticJob that DLRover's operator turns into arguments of its master."""
OWN_ENV: Final = (
    *(names.ENV_MASTER_ADDR, names.ENV_TOKEN_FILE, names.ENV_CA_FILE),
    *(names.ENV_JOB_NAME, names.ENV_NODE_ID, names.ENV_POD_IP),
)
"""Environment variables of a node that its template cannot set."""
OWN_LABELS: Final = (
    *(names.LABEL_APP, names.LABEL_JOB, names.LABEL_ROLE, names.LABEL_INDEX, names.LABEL_UID),
)
"""Labels of a Pod that its template cannot set."""

_OF_KUBEFLOW: Final = {
    "PyTorchJob": (
        *("elasticPolicy", "runPolicy", "pytorchReplicaSpecs", "nprocPerNode", "cleanPodPolicy"),
        *("backoffLimit", "schedulingPolicy", "replicaSpecs.Master", "replicaSpecs.Worker"),
        *(f"replicaSpecs.worker.{name}" for name in ("maxRestarts", "nprocPerNode")),
    ),
    "TrainJob": (
        *("runtimeRef", "initializer", "trainer", "podTemplateOverrides", "runtimePatches"),
        *("mlPolicy", "podGroupPolicy", "labels", "annotations"),
        *(f"replicaSpecs.worker.{name}" for name in ("numNodes", "numProcPerNode")),
    ),
    "MPIJob": (
        *("mpiReplicaSpecs", "slotsPerWorker", "runLauncherAsWorker", "launcherCreationPolicy"),
        *("sshAuthMountPath", "mpiImplementation", "replicaSpecs.Launcher"),
    ),
}
"""Fields of Kubeflow's objects, below ``spec``."""
ELSEWHERE: Final = (
    {
        f"spec.{name}": (
            f"this is a field of a {kind}: docs/migrating-from-pytorchjob.md says what it becomes"
        )
        for kind, fields in _OF_KUBEFLOW.items()
        for name in fields
    }
    | {"metadata.generateName": "it is not supported: write metadata.name"}
    | {
        f"metadata.{name}": "it belongs to an object in a cluster: leave it out"
        for name in (
            *("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers"),
            *("managedFields", "ownerReferences", "resourceVersion", "selfLink"),
        )
    }
)
"""Advice for fields of other kinds of objects, by their paths."""

KUBEFLOW: Final = (
    *("PyTorchJob", "TrainJob", "MPIJob", "TrainingRuntime", "ClusterTrainingRuntime"),
    *("TFJob", "JAXJob", "PaddleJob", "XGBoostJob"),
)
"""Kinds of Kubeflow that docs/migrating-from-pytorchjob.md is about."""

SIZES: Final = ("replicas", "minReplicas", "maxReplicas", "nodeUnit", "standbyReplicas")
"""Fields of a role that say how many nodes it has."""

MAX_PRIORITY: Final = 400_000
"""Greatest priority that is a number, and the negative of the least one. So the minimum of a job
with the least one still comes before the further nodes of every other job in a queue of Kueue."""
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]+)?|\.[0-9]+)")
"""A priority that is a number, perhaps a fraction."""
_WHOLE = re.compile(r"-?[0-9]+")
"""A priority that orders jobs."""


class _Strict(BaseModel):
    """Base of the parts of a job: immutable, strict, with fields in camelCase."""

    model_config = STRICT


class EnvVar(_Strict):
    """An environment variable of a container."""

    name: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    """Name of the variable."""
    value: Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")] = ""
    """Its value."""
    value_from: dict[str, Any] | None = None
    """The source of the value on Kubernetes; there is no such source on this machine."""


class Container(BaseModel):
    """The fields of a container that a node on this machine needs.

    All other fields are for Kubernetes.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    name: str
    """Name of the container."""
    command: list[str] = Field(default_factory=list)
    """The command that replaces the image's entrypoint."""
    args: list[str] = Field(default_factory=list)
    """Arguments of the command."""
    env: list[EnvVar] = Field(default_factory=list)
    """Environment variables of the container."""


class Role(_Strict):
    """The fields that DLRover's schema has for each role."""

    restart_policy: Annotated[Text | None, INERT] = None
    """Accepted, without effect: ``restartCount`` decides, and Pods have ``Never``."""
    auto_scale: Annotated[bool | None, INERT] = None
    """Accepted, without effect."""
    restart_timeout: Annotated[Int32 | None, INERT] = None
    """Accepted, without effect (nor has it one in DLRover)."""
    batch_scheduler: Annotated[Text | None, INERT] = Field(default=None, alias="BatchScheduler")
    """Accepted, without effect: ``schedulerName`` in the template chooses a scheduler."""


MAX_REPLICAS = 100_000
"""Nodes that a role may have at most."""


def _out_of_order(minimum: int, replicas: int, maximum: int | None) -> list[str]:
    """Return which of ``minReplicas`` ≤ ``replicas`` ≤ ``maxReplicas`` does not hold, in words.

    Args:
        minimum: The least number.
        replicas: The desired number.
        maximum: The greatest number; None for no limit.
    """
    found = []
    if minimum > replicas:
        found.append(
            f"minReplicas is {minimum} and replicas is {replicas}: expected minReplicas ≤ replicas"
        )
    if maximum is not None and replicas > maximum:
        found.append(
            f"replicas is {replicas} and maxReplicas is {maximum}: expected replicas ≤ maxReplicas"
        )
    return found


class ReplicaSpec(Role):
    """The number of nodes, and what each node runs."""

    replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    """Desired number of nodes, without standbys."""
    min_replicas: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Least number of nodes with which training continues. If absent: the least number in the
    command's ``--nnodes MIN:MAX``, else ``replicas``."""
    max_replicas: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Greatest value to which ``replicas`` may be scaled; no limit if absent."""
    node_unit: Annotated[int, Field(ge=1, le=100_000)] = 1
    """The number of nodes in a round is a multiple of this."""
    standby_replicas: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of nodes that run outside of the round, ready to take the rank of a lost node."""
    memory_growth: Annotated[MemoryGrowthSpec | None, CLUSTER_ONLY] = None
    """The higher memory limit of new nodes after one was killed for lack of memory. If absent, new
    nodes have the limit of the template. It has no effect in a queue of Kueue."""
    resource_advice: Annotated[ResourceAdviceSpec | None, CLUSTER_ONLY] = None
    """What is said of memory and CPUs of nodes, by what they use, and what new nodes get of it. If
    absent, nothing is measured."""
    spot_policy: Annotated[Literal["any", "onDemandMin"], CLUSTER_ONLY] = "any"
    """``any``: nodes are placed as the template says. ``onDemandMin``: ``minReplicas`` nodes are
    kept off spot hosts, and further ones prefer them. In a queue of Kueue it has no effect, as its
    flavors choose the hosts."""
    auto_scale: bool | None = None
    """DLRover's switch: ``true`` means ``autoscale: {mode: auto}``, unless ``autoscale`` is set."""
    autoscale: AutoscaleSpec | None = None
    """How the job chooses its number of nodes by itself. If absent, it has ``replicas`` nodes."""
    restart_count: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Number of worker failures that a node may have, and of replacements that its rank may have.
    The counts start again at 0 once a round has run for 5 minutes and has reached new steps. A
    script that reports no steps needs 50 minutes. ``DLROVER_MASTER_FORGIVE_AFTER_S`` changes this
    time."""
    priority: Annotated[Text | None, CLUSTER_ONLY] = None
    """Name of the Pods' priority class, unless the template has one (DLRover's ``high`` and ``low``
    are such names). A whole number from -400000 to 400000 orders jobs that share a cluster. A
    fraction such as ``0.5`` is accepted, without effect."""
    template: dict[str, Any]
    """A Pod template, kept as it is written. Nodes that are created after a change use the new
    template."""

    _least: int | None = PrivateAttr(default=None)
    """The least number in the command's ``--nnodes``, if ``minReplicas`` is absent."""

    def model_post_init(self, context: Any, /) -> None:
        """Read the command once: the minimum is needed at every step."""
        self._least = None if self.min_replicas is not None else least_nodes(self.template)

    def problems(self) -> list[str]:
        """Return the relations between fields that do not hold, in words; empty if all hold.

        These are ``minReplicas`` ≤ ``replicas`` ≤ ``maxReplicas``, multiples of ``nodeUnit``, and
        those of ``autoscale``.
        """
        minimum = self.minimum
        found = _out_of_order(minimum, self.replicas, self.max_replicas)
        fields = (
            ("replicas", self.replicas),
            ("minReplicas", self.min_replicas),
            ("maxReplicas", self.max_replicas),
        )
        for name, value in fields:
            if value is not None and value % self.node_unit:
                lower = value // self.node_unit * self.node_unit
                found.append(
                    f"{name} is {value} and nodeUnit is {self.node_unit}: "
                    f"expected a multiple of {self.node_unit} "
                    f"(such as {f'{lower} or ' if lower else ''}{lower + self.node_unit})"
                )
        if self.autoscale is not None:
            found += self.autoscale.problems(
                minimum=minimum, maximum=self.ceiling, unit=self.node_unit
            )
            if self.auto_scale is False and self.autoscale.mode == "auto":
                found.append("autoScale is false and autoscale.mode is auto: expected one of them")
        if (growth := self.memory_growth) is not None and not 0 < self.memory <= growth.limit_bytes:
            has = f"is {self.memory} bytes" if self.memory else "is none, or of the whole Pod"
            found.append(
                f"memoryGrowth.limit is {growth.limit} and the memory limit of its main container "
                f"{has}: expected a limit of the container in the template, and no less here"
            )
        if self.resource_advice is not None:
            found += self.resource_advice.problems(self.memory)
        if abs(self.rank or 0) > MAX_PRIORITY:
            found.append(
                f"priority is {self.priority}: expected a number from -{MAX_PRIORITY} to "
                f"{MAX_PRIORITY}, or the name of a priority class"
            )
        return found

    @property
    def scaling(self) -> AutoscaleSpec | None:
        """Return how the job scales by itself; None if it does not."""
        found = self.autoscale or (AUTO if self.auto_scale else None)
        return None if found is None or found.mode == "off" else found

    @property
    def ceiling(self) -> int:
        """Return the greatest number of nodes to which the job may grow by itself."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def allowed_sizes(self) -> tuple[int, ...]:
        """Return the only sizes that a round may have, ascending; empty for all multiples.

        Advice changes no size, so only the mode ``auto`` limits the sizes.
        """
        scaling = self.scaling
        if scaling is None or scaling.mode != "auto" or scaling.sizes is None:
            return ()
        return tuple(sorted(set(scaling.sizes)))

    @property
    def least(self) -> int:
        """Return the least number of nodes with which a round is formed: the least allowed size."""
        sizes = [size for size in self.allowed_sizes if size >= self.minimum]
        return sizes[0] if sizes else self.minimum

    @property
    def minimum(self) -> int:
        """Return the least number of nodes that a round may have.

        It is ``minReplicas``, else the number in the command's ``--nnodes``, rounded up to the unit
        and at most ``replicas``, else ``replicas``.
        """
        if self.min_replicas is not None:
            return self.min_replicas
        if self._least is None:
            return self.replicas
        return min(self.replicas, -(-self._least // self.node_unit) * self.node_unit)

    @property
    def priority_class(self) -> str:
        """Return ``priorityClassName`` for a Pod whose template has none; empty for none."""
        return "" if _NUMBER.fullmatch(self.priority or "") else self.priority or ""

    @property
    def rank(self) -> int | None:
        """Return the priority that orders jobs; None if it is no whole number."""
        found = _WHOLE.fullmatch(self.priority or "")
        return int(found[0]) if found else None

    def faults(self) -> list[TemplateFault]:
        """Return the known places of the template that Kubernetes cannot read."""
        return list(faults_of(self.template, TEMPLATE))

    def container(self) -> Container:
        """Return the container that runs the agent: the one named ``main``, or the only one.

        Raises:
            ConfigError: there is no such container, or a field that is needed is malformed.
        """
        index = self.main_container()
        try:
            return Container.model_validate(self.template["spec"]["containers"][index])
        except ValidationError as error:
            where = f"{TEMPLATE}.spec.containers[{index}]"
            raise ConfigError(explain(error, prefix=where)) from error

    def command_remarks(self) -> str:
        """Return why the command makes nodes of this template train alone; empty if it does not.

        It is also empty if the command cannot be read. A command in the image is not known. The
        text begins with the path of the command or of the environment, and nothing is printed.
        """
        try:
            index = self.main_container()
        except ConfigError:
            return ""  # reported elsewhere
        container = _mapping(_containers(self.template)[index])
        found = remarks(_command_of(container), _environ_of(container))
        where = f"spec.replicaSpecs.worker.template.spec.containers[{index}]"
        part = "command" if container.get("command") else "args"
        part = "env" if found.startswith(ENV_STANDALONE) else part
        return f"{where}.{part}: {found}" if found else ""

    def restart_remarks(self) -> str:
        """Return what a ``restartPolicy`` of ``Never`` does not do; empty if it is not written.

        It is also empty without restarts. An API server stores the default of ``restartCount``, so
        whether the user has set that number is not known.
        """
        if (self.restart_policy or "").lower() != "never" or not self.restart_count:
            return ""
        return (
            "spec.replicaSpecs.worker.restartPolicy: found Never, but restartCount decides, and is "
            f"{self.restart_count}; write restartCount: 0 for no restarts"
        )

    @property
    def template_hash(self) -> str:
        """Return a digest that distinguishes Pods of this template from Pods of another one."""
        return _digest(self.template)

    @property
    def program_hash(self) -> str:
        """Return a digest of what the workers run: image, command and ServiceAccount.

        It is empty if the template has no container for the agent.
        """
        try:
            main = _mapping(_containers(self.template)[self.main_container()])
        except ConfigError:
            return ""  # reported elsewhere
        spec = _mapping(self.template.get("spec"))
        account = spec.get("serviceAccountName") or spec.get("serviceAccount")
        return _digest([account, *map(main.get, ("image", "command", "args", "workingDir"))])

    @property
    def memory(self) -> int:
        """The memory limit of the main container in bytes; 0 if the template has none.

        It is also 0 if the template limits the memory of the whole Pod (``spec.resources``).
        """
        of_pod = memory_limit(_mapping(self.template.get("spec")))
        return 0 if of_pod else memory_limit(self._main)

    @property
    def cpu(self) -> int:
        """The CPU request of the main container in thousandths; 0 if the template has none.

        It is also 0 if the template has CPUs of the whole Pod (``spec.resources``).
        """
        spec = _mapping(self.template.get("spec"))
        of_pod = cpu_milli(spec, "requests") or cpu_milli(spec, "limits")
        return 0 if of_pod else cpu_milli(self._main, "requests")

    @property
    def cpu_limit(self) -> int:
        """The CPU limit of the main container in thousandths; 0 if the template has none."""
        return cpu_milli(self._main, "limits")

    @property
    def has_own_cpus(self) -> bool:
        """Whether the CPU limit of the main container is its request, so that both must stay."""
        return has_own_cpus(self._main)

    @property
    def _main(self) -> Mapping[str, Any]:
        """The main container of the template; empty without one, which is reported elsewhere."""
        try:
            return _mapping(_containers(self.template)[self.main_container()])
        except ConfigError:
            return {}

    def main_container(self) -> int:
        """Return the index of the container that runs the agent.

        It is the one named ``main``, or the only one.

        Raises:
            ConfigError: there is no such container.
        """
        where = f"{TEMPLATE}.spec.containers"
        containers = _containers(self.template)
        if not containers:
            raise ConfigError(f"{where}: expected a list of at least one container")
        for index, container in enumerate(containers):
            if isinstance(container, dict) and container.get("name") == MAIN_CONTAINER:
                return index
        if len(containers) > 1:
            raise ConfigError(
                f"{where}: found {len(containers)} containers and none named "
                f"'{MAIN_CONTAINER}'; give the one that runs elastic-run this name"
            )
        return 0


class OtherSpec(Role):
    """A role that is not supported yet.

    A job that has such a role is accepted and gets the reason ``Unsupported``.
    """

    replicas: Int32 | None = None
    """Number of nodes. With 0 the job runs, and the role is without effect."""
    restart_count: Int32 | None = None
    """Without effect."""
    priority: Text | None = None
    """Without effect."""
    template: dict[str, Any] | None = None
    """A Pod template, which is not used."""


class ServerSpec(OtherSpec):
    """The servers of a parameter server. A role with another command is not supported."""

    priority: Text | None = None
    """Name of the priority class of Pods whose template has none. A number has no effect."""
    replicas: Int32 | None = None
    """Number of servers; 1 if absent. They take no part in rounds."""
    min_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    """Number of servers with which training begins, while the others have no place yet. It is also
    the least value to which ``replicas`` may be scaled. If absent, training begins with all, and
    there is no least value."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    """Greatest value to which ``replicas`` may be scaled; no limit if absent."""
    standby_replicas: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Number of further servers that run without rows, ready to take those of a lost one."""
    restart_count: Int32 | None = None
    """Number of servers that may be lost, 3 if absent. The count starts again at 0 once no server
    was lost for 5 minutes (``DLROVER_MASTER_FORGIVE_AFTER_S``)."""
    template: dict[str, Any] | None = None
    """A Pod template whose command is ``dlrover ps server``."""
    replication: Annotated[int, Field(ge=1, le=2)] | None = None
    """Number of copies of each row. If absent: 2, or 1 while there is one server only."""
    ack: Literal["primary", "backup"] = "backup"
    """The copies that must have a push before it is acknowledged: one, or all of them."""
    buckets: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Number of parts of the tables. It cannot be changed while the job runs."""
    checkpoints: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """Directory or bucket in which ``ps.save()`` saves all tables. In a cluster, a directory is in
    a volume of the template that all hosts share. If absent, rows are kept in memory only, and the
    job cannot be suspended."""

    _ours: bool = PrivateAttr(default=False)

    def model_post_init(self, context: Any, /) -> None:
        """Read the command once."""
        self._ours = _serves(self.template)

    @property
    def size(self) -> int:
        """Return the desired number of servers."""
        return 1 if self.replicas is None else self.replicas

    @property
    def total(self) -> int:
        """Return the desired number of servers, with the standbys."""
        return self.size + self.standby_replicas

    @property
    def minimum(self) -> int:
        """Return the number of servers with which training begins."""
        return self.size if self.min_replicas is None else self.min_replicas

    @property
    def copies(self) -> int:
        """Return the desired number of copies of each row. One server keeps one."""
        return 2 if self.replication is None else self.replication

    @property
    def budget(self) -> int:
        """Return the number of servers that may be lost."""
        return 3 if self.restart_count is None else self.restart_count

    @property
    def is_ours(self) -> bool:
        """Return whether the command of the template is that of our servers."""
        return self._ours

    @property
    def priority_class(self) -> str:
        """Return ``priorityClassName`` for a Pod whose template has none; empty for none."""
        return "" if _NUMBER.fullmatch(self.priority or "") else self.priority or ""

    @property
    def template_hash(self) -> str:
        """Return a digest that distinguishes Pods of this template from Pods of another one."""
        return _digest(self.template)

    def cut_storage(self) -> CutStorage | None:
        """Return what a master's Pod needs to reach the directory of cuts; None without cuts.

        Raises:
            ConfigError: The directory is not in a volume that the servers and the master share.
        """
        return _cut_storage(self.checkpoints, self.template) if self.checkpoints else None

    def faults(self) -> list[TemplateFault]:
        """Return the known places of the template that Kubernetes cannot read."""
        return list(faults_of(self.template or {}, SERVER_TEMPLATE))

    def main_container(self) -> int:
        """Return the index of the container that runs the server.

        It is the one named ``main``, or the only one.
        """
        return _main_of(_mapping(self.template))[0]

    def container(self) -> Container:
        """Return the container that runs the server.

        Raises:
            ConfigError: a field that is needed is malformed.
        """
        index, found = _main_of(_mapping(self.template))
        try:
            return Container.model_validate(found)
        except ValidationError as error:
            where = f"{SERVER_TEMPLATE}.spec.containers[{index}]"
            raise ConfigError(explain(error, prefix=where)) from error

    def problems(self) -> list[str]:
        """Return what is wrong with the numbers, in words; empty if nothing is."""
        if self.size < 1:
            return ["replicas is 0: expected at least 1 server, or leave the role out"]
        if wrong := _out_of_order(self.minimum, self.size, self.max_replicas):
            return wrong[:1]
        if self.replication is not None and self.replication > self.size:
            return [
                f"replication is {self.replication} and replicas is {self.size}: "
                "expected replication ≤ replicas, as each copy is on another server"
            ]
        return []


class MasterSpec(Role):
    """The scheduling of the job's own master; the operator decides what the master runs."""

    replicas: Annotated[Int32 | None, INERT] = None
    """Accepted, without effect: there is one master."""
    restart_count: Annotated[Int32 | None, INERT] = None
    """Accepted, without effect: a master that ends is always started again."""
    priority: Annotated[Text | None, INERT] = None
    """Accepted, without effect: use ``priorityClassName`` in the template."""
    template: Annotated[dict[str, Any], CLUSTER_ONLY] = Field(default_factory=dict)
    """A Pod template, which is read when the job is created and when it is resumed. The master's
    Pod takes from it: labels, annotations, nodeSelector, tolerations, affinity,
    priorityClassName, schedulerName, imagePullSecrets, and of its container ``main``, or of the
    only one, the resources, environment variables ``DLROVER_MASTER_*``, and OpenTelemetry's for
    traces."""


class ReplicaSpecs(_Strict):
    """The roles of a job. All-reduce training has workers, and settings for its master."""

    worker: ReplicaSpec
    dlrover_master: MasterSpec | None = Field(default=None, alias="dlrover-master")
    ps: ServerSpec | None = None
    chief: OtherSpec | None = None
    evaluator: OtherSpec | None = None
    master: OtherSpec | None = None


_TIME = r"([1-9][0-9]{0,6}(\.[0-9]{1,6})?|0\.[0-9]{0,5}[1-9][0-9]{0,5})[smh]"
"""A time above 0 in seconds, minutes or hours, as ``SaveInterval`` reads it."""


def _interval(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Check an interval, and describe all forms in one error."""
    try:
        return check(value)
    except ValidationError as error:
        forms = 'expected a number of steps (10), a time ("30s", "5m", "2h") or "auto"'
        raise PydanticCustomError("interval", forms) from error


Often = Annotated[
    Annotated[int, Field(ge=1, le=2**31 - 1)]
    | Annotated[str, StringConstraints(pattern=rf"^(auto|{_TIME})$")],
    WrapValidator(_interval),
]
"""An interval: a number of steps, a time such as ``30s``, ``5m`` or ``2h``, or ``auto``."""


class KeepSpec(_Strict):
    """Which checkpoints stay in storage; the newest one always stays."""

    last: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Number of the newest checkpoints that stay."""
    every: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Checkpoints whose step is a multiple of this stay as well."""
    best: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Number of checkpoints with the best metric that stay as well, if the script gives a metric to
    ``save()``. The lowest metric is the best."""
    highest: bool = False
    """If true, the highest metric is the best."""


class CheckpointSpec(_Strict):
    """When the state of the script is saved, and where.

    A ``Checkpointer`` in the script takes from here what the script does not set itself, and has
    defaults for all other values.
    """

    dir: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """Directory that all nodes share, or a bucket (``s3://…``). If absent, checkpoints are kept in
    memory only: they outlive workers and nodes, but not the job."""
    every: Often | None = None
    """How often the state is saved in memory: a number of steps, a time (``30s``, ``5m``, ``2h``),
    or ``auto``. ``auto`` measures, and chooses the interval that loses the least time."""
    persist_every: Often | None = None
    """How often a checkpoint in memory is written to ``dir``; values as for ``every``."""
    keep: KeepSpec | None = None
    """Which checkpoints stay in ``dir``."""
    replicas: Annotated[int, Field(ge=0, le=1)] = 1
    """Number of copies of each node's state in the memory of other nodes; a job of one node has
    none."""
    bandwidth: Annotated[int, Field(ge=1_000_000, le=2**53)] | None = None
    """Bytes per second that a node uses for such copies at most; no limit if absent. With less than
    1 MB/s no copy would ever be complete."""
    compare_every: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Number of steps after which the parameters are compared that must be equal on all
    data-parallel replicas; also before each checkpoint for ``dir``. Never if absent. See
    ``diagnosis.wrong``."""
    save_at_breakpoint: bool = False
    """If true, the newest state is written to ``dir`` after a worker fails."""


RequestText = Annotated[str, StringConstraints(min_length=1, max_length=64)]
"""A text that requests something once; another text requests it again."""


class RestartSpec(_Strict):
    """A request to replace all nodes by new ones of the current template."""

    at: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """Any text that was not here before, such as the time. Nodes that were created under another
    text are replaced."""
    rolling: bool = False
    """If true, one unit of nodes is replaced after the other, each once the round of the previous
    one trains. If false, all are replaced at the same time."""


def _has_no_password(address: str) -> str:
    """Return an address as it is.

    Raises:
        PydanticCustomError: it has a password.
    """
    if without_passwords(address) == address:
        return address
    raise PydanticCustomError(
        "password",
        "expected an address without a password, which commands and logs would show; put it into "
        "the environment, such as AWS_SECRET_ACCESS_KEY for s3",
    )


class DiagnosisSpec(_Strict):
    """How a job that stands still, or has wrong values, is found, and what follows."""

    hang: Literal["off", "tell", "act"] = "tell"
    """``off``: no hang is looked for. ``tell``: it is reported. ``act``: the round is also
    restarted once the cause is sure, which counts against ``restartCount``."""
    hang_seconds: Annotated[int, Field(ge=1, le=86_400)] = 30
    """Least seconds without a step after which a hang is suspected. The time is longer if the
    steps of the job are long."""
    first_step_seconds: Annotated[int, Field(ge=1, le=86_400)] = 600
    """Seconds after which a hang is suspected while the usual time of a step is not known yet, or
    after the last step."""
    wrong: Literal["off", "tell", "rollback", "stop"] = "tell"
    """What follows if a loss or a gradient norm is not finite, or if replicas differ
    (``checkpoint.compareEvery``). ``off``: nothing. ``tell``: it is reported. ``rollback``: the
    round is also restarted from the newest checkpoint before that step, which counts against
    ``restartCount``. ``stop``: the job fails."""
    spike: Literal["off", "tell", "rollback", "stop"] = "tell"
    """What follows if a loss or a gradient norm leaps up and stays there, as for ``wrong``."""
    slow: Literal["off", "tell", "act"] = "tell"
    """``tell``: it is reported if steps take longer than usual, or one node waits for data longer
    than the others. ``off``: nothing is reported. ``act``: a slow machine or link is also checked
    with good nodes, between two rounds, if a standby is ready. A node that is slow there too is
    left out. At most 2 % of the nodes are checked in an hour."""
    silent_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """For scripts that report no steps: seconds without CPU time of any worker after which a hang
    is suspected. If absent, no hang is suspected there."""
    log_rules: Annotated[list[LogRule], Field(max_length=MAX_RULES)] = Field(default_factory=list)
    """Rules for the lines that workers print, for scripts that only print. A change applies from
    the next round on."""
    evidence: (
        Annotated[
            str,
            StringConstraints(max_length=1024, pattern=r"^[A-Za-z][A-Za-z0-9+.-]+://.+$"),
            AfterValidator(_has_no_password),
        ]
        | None
    ) = None
    """Address of a bucket (``s3://…``) that gets a copy of each bundle of evidence. If absent, it
    is the folder ``evidence`` of ``checkpoint.dir``, if that is a bucket."""
    snapshot: RequestText | None = None
    """Any text that was not here before, such as the time, requests a snapshot of all ranks:
    ``dlrover job stacks`` sets it."""


class TuningSpec(_Strict):
    """The settings of each ``ElasticLoader``, which change while the training runs.

    They change neither the samples of a step nor its gradient.
    """

    micro_batch: Annotated[int, Field(ge=1, le=MAX_MICRO_BATCH)] | None = None
    """Greatest number of samples that a worker computes at once. If absent, the script or the
    auto-tuner decides."""
    loader_workers: Annotated[int, Field(ge=0, le=MAX_LOADER_WORKERS)] | None = None
    """Number of processes that read data for each worker, at most the number of its CPUs. If
    absent, the script or the auto-tuner decides."""
    auto: bool | None = None
    """If true, the auto-tuner chooses what is absent here. If absent, ``--auto-tunning`` of
    ``elastic-run`` decides."""


DEFAULT_LABELS: Final = ("topology.kubernetes.io/zone", "nvidia.com/gpu.clique")
"""Labels of the zone of a host and of its NVLink domain. Those of blocks and racks differ among
providers."""
HOST_LABEL: Final = (
    r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?$"
)
"""Pattern of the name of a label, such as ``topology.kubernetes.io/zone``."""
HostLabel = Annotated[str, StringConstraints(pattern=HOST_LABEL)]
"""The name of a label of hosts."""


class TopologySpec(_Strict):
    """Where the hosts of nodes are, as labels say it. Nodes that are near get neighbouring ranks.

    The labels are read from the nodes' Pods, to which the operator copies them.
    """

    labels: Annotated[list[HostLabel], Field(max_length=MAX_LEVELS)] = Field(
        default_factory=lambda: list(DEFAULT_LABELS)
    )
    """Labels from the widest domain to the narrowest: zone, block, rack, NVLink domain. If empty,
    the order of ranks takes no account of hosts. If absent: ``topology.kubernetes.io/zone`` and
    ``nvidia.com/gpu.clique``."""


class JobSpec(_Strict):
    """``spec`` of an ElasticJob."""

    distribution_strategy: (
        Literal["AllreduceStrategy", "ParameterServerStrategy", "CustomStrategy", "Local"] | None
    ) = None
    """``AllreduceStrategy`` is supported, and ``ParameterServerStrategy`` with servers of ours. The
    others are accepted and get the reason ``Unsupported``. If absent, the roles decide. Cannot be
    changed."""
    replica_specs: ReplicaSpecs
    suspend: bool = False
    """While this is true, all nodes are stopped and none is started."""
    restart: RestartSpec | None = None
    """Replaces all nodes by new ones: ``dlrover job restart`` sets it."""
    diagnosis: DiagnosisSpec = Field(default_factory=DiagnosisSpec)
    """How a job that stands still, or has wrong values, is found. If absent, it is reported only.
    """
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0, le=2**31 - 1)] | None, CLUSTER_ONLY
    ] = None
    """Seconds after its end at which the job and its Pods are deleted; never if absent."""
    active_deadline_seconds: Annotated[Seconds | None, CLUSTER_ONLY] = None
    """Seconds since its start or its last resume after which a job that is not over has failed."""
    pending_timeout_seconds: Annotated[Seconds | None, CLUSTER_ONLY] = None
    """Seconds with fewer nodes than the minimum after which the job has failed."""
    checkpoint: CheckpointSpec | None = None
    """Flash checkpoints. If absent, only the settings in the script apply."""
    store_checkpoint: RequestText | None = None
    """Any text that was not here before, such as the time, requests that the newest checkpoint in
    memory is stored while training goes on: ``dlrover job checkpoint`` sets it."""
    rebalance_servers: RequestText | None = None
    """Any text that was not here before, such as the time, requests that the servers of a parameter
    server are evened by their loads now: ``dlrover ps rebalance`` sets it."""
    tuning: TuningSpec | None = None
    """Settings of data loaders: ``dlrover job tune`` sets it."""
    topology: Annotated[TopologySpec | None, CLUSTER_ONLY] = None
    """The order of ranks by the places of hosts, and which nodes leave first. Cannot be changed."""
    managed_by: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=63)] | None, CLUSTER_ONLY
    ] = None
    """The controller that manages the job. The operator of DLRover-Py ignores a job with another
    value than ``elastic.iml.github.io/dlrover-py-operator``. Absent means this value. Cannot be
    changed."""

    optimize_mode: Annotated[Text | None, INERT] = None
    """Accepted, without effect."""
    brain_service: Annotated[Text | None, INERT] = None
    """Accepted, without effect (nor has it one in DLRover)."""
    resource_limits: Annotated[dict[str, Text] | None, INERT] = Field(default=None, max_length=64)
    """Accepted, without effect: use a ResourceQuota of the namespace."""
    envs: Annotated[dict[str, EnvVar] | None, INERT] = Field(default=None, max_length=1024)
    """Accepted, without effect (nor has it one in DLRover): use ``env`` of the template's
    container."""
    enable_dynamic_sharding: Annotated[bool | None, INERT] = None
    """Accepted, without effect: a script that reads its data in shards gets them."""
    enable_elastic_scheduling: Annotated[bool | None, INERT] = None
    """Accepted, without effect: every job is elastic within its limits."""


class Metadata(BaseModel):
    """The fields of ``metadata`` that are used; Kubernetes has further ones."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    name: JobName
    """Name of the job."""
    namespace: str = "default"
    """Namespace of the job."""
    uid: str = ""
    """uid of the object on Kubernetes."""
    generation: Annotated[int, Field(ge=0)] = 1
    """Number that grows with each change of the spec."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the object."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the object."""


class ElasticJob(_Strict):
    """A job as its user writes it."""

    api_version: Literal["elastic.iml.github.io/v1alpha1"]
    """API group and version."""
    kind: Literal["ElasticJob"]
    """Kind of the object."""
    metadata: Metadata
    """Name of the job and similar data."""
    spec: JobSpec
    """The desired job."""
    bad_hosts: BadHosts | None = None
    """Hosts that have failed in several jobs of the cluster. No file has it: on Kubernetes it is
    ``status.badHosts``."""
    allocation: NodeAllocation | None = None
    """What the job may have of a shared cluster; None if nothing limits it. No file has it: on
    Kubernetes it is ``status.allocation``."""

    @classmethod
    def parse(cls, document: object, *, on_cluster: bool = False) -> Self:
        """Return the job in a document that was read from a file, or refuse it.

        Unknown fields are refused, but not those within a Pod template. Nothing is asked of a
        cluster.

        Args:
            document: what was read.
            on_cluster: whether the job is to run in a cluster, where servers can do less.

        Raises:
            UnsupportedError: the kind of training is not supported yet.
            ConfigError: the document is invalid. The message has one line for each fault that was
                found: its path, what was found and what was expected. Later checks are left out
                after a fault, and of more than 20 faults in the templates the rest is only counted.
        """
        _check_depth(document)
        if not isinstance(document, dict):
            raise ConfigError(
                f"expected a mapping with apiVersion: {API_VERSION} and kind: {KIND}, "
                f"found {shown(document)}"
            )
        kind = document.get("kind")
        if isinstance(kind, str) and kind != KIND:
            raise ConfigError(f"kind: found {kind}: expected {KIND}; {_instead_of(kind)}")
        if "allocation" in document:
            raise ConfigError("allocation: unknown field; the allocator of the cluster writes it")
        if "badHosts" in document:
            raise ConfigError("badHosts: unknown field; the operator of the cluster writes it")
        job = cls._checked(document, "forbid", on_cluster=on_cluster)
        wrong = [fault for fault in job.template_faults() if not fault.unknown]
        wrong = wrong or list(
            reference_faults(job.worker.template["spec"], f"{TEMPLATE}.spec", names.NODE_VOLUME)
        )
        if wrong:
            raise ConfigError(in_lines(wrong))
        job.worker.container()
        if job.servers is not None:
            job.servers.container()
        return job

    @classmethod
    def read(cls, obj: dict[str, Any]) -> Self:
        """Return the job in a stored object: of the API server, or of the master's journal.

        Unknown fields are ignored. Pod templates are not checked, except that the container of the
        agent must be there. The allocation and the bad hosts are read from the status; one that is
        malformed is ignored.

        Raises:
            UnsupportedError: the job cannot be run on Kubernetes.
            ConfigError: the object cannot be used. The checks stop at the first stage that fails;
                the message has one line for each fault of that stage.
        """
        # What an earlier master has accepted has these beside its spec.
        told = {"allocation": cls.allocation_in(obj), "badHosts": cls._bad_hosts_in(obj)}
        told = {name: one for name, one in told.items() if one is not None}
        return cls._checked(obj | told, "ignore", on_cluster=True)

    @staticmethod
    def allocation_in(obj: dict[str, Any]) -> NodeAllocation | None:
        """Return the allocation in the status of an object; None if there is none of its form."""
        try:
            return NodeAllocation.model_validate(_mapping(obj.get("status")).get("allocation"))
        except ValidationError:
            return None

    def with_status_of(self, obj: dict[str, Any]) -> Self:
        """Return this job with the allocation and the bad hosts in the status of an object."""
        job = self.allocated(self.allocation_in(obj))
        return job.model_copy(update={"bad_hosts": self._bad_hosts_in(obj)})

    @staticmethod
    def _bad_hosts_in(obj: dict[str, Any]) -> BadHosts | None:
        """Return the bad hosts in the status of an object; None if there are none of its form."""
        try:
            return BadHosts.model_validate(_mapping(obj.get("status")).get("badHosts"))
        except ValidationError:
            return None

    def allocated(self, allocation: NodeAllocation | None) -> Self:
        """Return this job with another allocation. The generation stays: the spec is the same."""
        return self.model_copy(update={"allocation": allocation})

    @property
    def most_nodes(self) -> int | None:
        """Return the number of nodes that the job may have; None if nothing limits it."""
        return None if self.allocation is None else self.allocation.nodes

    @property
    def standbys(self) -> int:
        """Return how many standbys the job has beside its nodes: the allocator may allow fewer."""
        most = self.worker.standby_replicas
        allowed = None if self.allocation is None else self.allocation.standbys
        return most if allowed is None else min(most, allowed)

    @property
    def in_queue(self) -> bool:
        """Whether a queue of Kueue admits the job: it says which hosts and how much it may have."""
        return names.LABEL_QUEUE in self.metadata.labels

    @property
    def rests(self) -> bool:
        """Return whether no node may run: the job is suspended, or held back by the allocator."""
        return self.spec.suspend or not (
            self.most_nodes is None or self.most_nodes >= self.worker.least
        )

    @classmethod
    def _checked(
        cls, document: dict[str, Any], extra: Literal["forbid", "ignore"], *, on_cluster: bool
    ) -> Self:
        """Return the job in a document of either kind, or refuse it.

        Args:
            document: the document.
            extra: what happens to unknown fields.
            on_cluster: whether the job is to run in a cluster.

        Raises:
            UnsupportedError: the kind of training is not supported yet.
            ConfigError: the document is invalid.
        """
        _check_depth(document)
        unsupported = _unsupported(document, on_cluster=on_cluster)
        if unsupported:
            raise UnsupportedError(unsupported)
        try:
            job = cls.model_validate(document, extra=extra)
        except ValidationError as error:
            raise ConfigError(explain(error, model=cls)) from error
        problems = [f"spec.replicaSpecs.worker: {p}" for p in job.worker.problems()]
        given = job.spec.replica_specs.ps
        if given is not None and given.is_ours:
            problems += [f"{SERVERS}: {p}" for p in given.problems()]
        if problems:
            raise ConfigError("\n".join(problems))
        problems = rule_problems(job.spec.diagnosis.log_rules)
        if problems:
            raise ConfigError("\n".join(f"spec.diagnosis.logRules: {p}" for p in problems))
        job.worker.main_container()
        return job

    def template_faults(self) -> list[TemplateFault]:
        """Return the known places of all Pod templates that Kubernetes cannot read."""
        found = [*self.worker.faults(), *self.master_faults()]
        return found + (self.servers.faults() if self.servers is not None else [])

    def master_faults(self) -> list[TemplateFault]:
        """Return the known places of the master's Pod template that Kubernetes cannot read."""
        master = self.spec.replica_specs.dlrover_master
        return list(faults_of(master.template, MASTER_TEMPLATE)) if master is not None else []

    def without_effect(self) -> list[str]:
        """Return the paths of fields that are set and have no effect; empty if there are none.

        They are fields that are marked ``INERT``, unsupported roles, unused parts of the templates,
        and annotations for DLRover's master. Fields marked ``CLUSTER_ONLY`` are not among them.
        """
        found = list(_marked(self.spec, INERT, "spec"))
        priority = self.worker.priority
        if priority and not self.worker.priority_class and self.worker.rank is None:
            found.append("spec.replicaSpecs.worker.priority")
        given = self.spec.replica_specs
        without = [r for r in OTHER_ROLES if r != "ps" or self.servers is None]
        found += [f"spec.replicaSpecs.{r}" for r in without if getattr(given, r) is not None]
        found += _unused_of_worker(self.worker.template)
        if (master := self.spec.replica_specs.dlrover_master) is not None:
            found += _unused_of_master(master.template)
        notes = self.metadata.annotations
        return found + [f"metadata.annotations.{n}" for n in MASTER_ARGUMENTS if n in notes]

    def for_clusters_only(self) -> list[str]:
        """Return the paths of fields that are set and have no effect on this machine; maybe none.

        Unknown fields of the template are left out, because they are reported elsewhere.
        """
        unknown = {fault.path for fault in self.worker.faults()}
        of_pods = [path for path in _of_pods(self.worker.template) if path not in unknown]
        return [*_marked(self.spec, CLUSTER_ONLY, "spec"), *of_pods]

    @property
    def worker(self) -> ReplicaSpec:
        """The worker role."""
        return self.spec.replica_specs.worker

    @property
    def topology_labels(self) -> tuple[str, ...]:
        """The labels of hosts by which ranks are ordered, from the widest domain on."""
        given = self.spec.topology
        return DEFAULT_LABELS if given is None else tuple(given.labels)

    @property
    def servers(self) -> ServerSpec | None:
        """The servers of a parameter server; None if the job has none."""
        given = self.spec.replica_specs.ps
        return given if given is not None and given.is_ours else None

    def container_of(self, node: str) -> Container:
        """Return the container that runs a node, which the id of the node tells.

        Raises:
            ConfigError: there is no such container, or a field that is needed is malformed.
        """
        if names.is_server(node) and self.servers is not None:
            return self.servers.container()
        return self.worker.container()

    def scaled(self, replicas: int, role: str = names.ROLE_WORKER) -> Self:
        """Return this job with another desired number of nodes, one generation later.

        The same number gives this job itself. Nothing is sent.

        Args:
            replicas: the desired number.
            role: ``worker``, or ``ps`` for the servers of a parameter server.

        Raises:
            ConfigError: the number does not fit the limits or the unit, or the job has no such
                role.
        """
        if role == names.SERVER_PREFIX:
            return self._with_servers(replicas)
        if role != names.ROLE_WORKER:
            raise ConfigError(f"found the role {role!r}: expected worker or ps")
        old = self.worker
        worker = old.model_copy(
            update={
                "replicas": replicas,
                # An absent minimum means "all nodes": it must follow the desired number.
                "min_replicas": None if old.min_replicas is None else old.min_replicas,
            }
        )
        problems = worker.problems()
        if not 1 <= replicas <= MAX_REPLICAS:
            problems = [f"expected 1 to {MAX_REPLICAS} replicas"]
        if problems:
            raise ConfigError("\n".join(f"cannot scale to {replicas}: {p}" for p in problems))
        specs = self.spec.replica_specs.model_copy(update={"worker": worker})
        return self.changed(self.spec.model_copy(update={"replica_specs": specs}))

    def _with_servers(self, replicas: int) -> Self:
        old = self.servers
        if old is None:
            raise ConfigError(
                f"{self.metadata.name} has no role ps, so it has no servers to scale: expected "
                f"{SERVERS} in its job file"
            )
        servers = old.model_copy(update={"replicas": replicas})
        problems = servers.problems()
        if not 1 <= replicas <= MAX_REPLICAS:
            problems = [f"expected 1 to {MAX_REPLICAS} replicas"]
        if problems:
            raise ConfigError("\n".join(f"cannot scale to {replicas}: {p}" for p in problems))
        specs = self.spec.replica_specs.model_copy(update={"ps": servers})
        return self.changed(self.spec.model_copy(update={"replica_specs": specs}))

    def differs_in_servers_only(self, other: Self) -> bool:
        """Return whether the specs of two jobs are equal but for the role ``ps``."""
        role = other.spec.replica_specs.ps
        specs = self.spec.replica_specs.model_copy(update={"ps": role})
        same = self.spec.model_copy(update={"replica_specs": specs}) == other.spec
        return same and self.spec.replica_specs.ps != role

    def suspended(self, suspend: bool) -> Self:
        """Return this job with ``spec.suspend`` set, one generation later.

        Raises:
            ConfigError: the job is to be suspended, and its servers would lose all rows.
        """
        if suspend and self.servers is not None and self.servers.checkpoints is None:
            raise ConfigError(
                f"{self.metadata.name} cannot be suspended: its servers have all rows in memory; "
                f"give {SERVERS}.checkpoints a directory, and save with ps.save()"
            )
        return self.changed(self.spec.model_copy(update={"suspend": suspend}))

    def restarted(self, at: str, *, rolling: bool) -> Self:
        """Return this job with ``spec.restart`` set, one generation later.

        If it is set so already, that is this job itself. Nothing is restarted here.

        Raises:
            ConfigError: ``at`` is empty, or longer than 64 characters.
        """
        try:
            restart = RestartSpec(at=at, rolling=rolling)
        except ValidationError as error:
            raise ConfigError(explain(error, prefix="spec.restart")) from error
        return self.changed(self.spec.model_copy(update={"restart": restart}))

    def with_snapshot(self, at: str) -> Self:
        """Return this job with a request for a snapshot of all ranks, one generation later.

        Raises:
            ConfigError: ``at`` is empty, or longer than 64 characters.
        """
        try:
            fields = self.spec.diagnosis.model_dump() | {"snapshot": at}
            diagnosis = DiagnosisSpec.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(explain(error, prefix="spec.diagnosis")) from error
        return self.changed(self.spec.model_copy(update={"diagnosis": diagnosis}))

    def with_stored_checkpoint(self, at: str) -> Self:
        """Return this job with a request to store the newest checkpoint, one generation later.

        Raises:
            ConfigError: ``at`` is empty, or longer than 64 characters.
        """
        if not 1 <= len(at) <= 64:
            raise ConfigError(f"spec.storeCheckpoint: found {len(at)} characters, expected 1 to 64")
        return self.changed(self.spec.model_copy(update={"store_checkpoint": at}))

    def with_evened_servers(self, at: str) -> Self:
        """Return this job with a request to even its servers, one generation later.

        Raises:
            ConfigError: ``at`` is empty, or longer than 64 characters, or the job has no servers.
        """
        if not 1 <= len(at) <= 64:
            raise ConfigError(
                f"spec.rebalanceServers: found {len(at)} characters, expected 1 to 64"
            )
        if self.servers is None:
            raise ConfigError(f"{self.metadata.name} has no servers: expected a job with a role ps")
        return self.changed(self.spec.model_copy(update={"rebalance_servers": at}))

    def with_requests_of(self, other: Self) -> JobSpec:
        """Return the spec of this job with the requests of another one that change no node."""
        snapshot = {"snapshot": other.spec.diagnosis.snapshot}
        diagnosis = self.spec.diagnosis.model_copy(update=snapshot)
        requests = {
            "diagnosis": diagnosis,
            "store_checkpoint": other.spec.store_checkpoint,
            "rebalance_servers": other.spec.rebalance_servers,
        }
        return self.spec.model_copy(update=requests)

    def tuned(
        self, *, micro_batch: int | None, loader_workers: int | None, auto: bool | None
    ) -> Self:
        """Return this job with other settings of data loaders, one generation later.

        What is None stays as it is. If all are None, all settings are removed.

        Args:
            micro_batch: greatest number of samples that a worker computes at once.
            loader_workers: number of processes that read data for each worker.
            auto: whether the auto-tuner chooses what was never set.

        Raises:
            ConfigError: a number is out of its range.
        """
        given = {"microBatch": micro_batch, "loaderWorkers": loader_workers, "auto": auto}
        change = {name: value for name, value in given.items() if value is not None}
        if not change:
            return self.changed(self.spec.model_copy(update={"tuning": None}))
        old = self.spec.tuning
        fields = {} if old is None else old.model_dump(by_alias=True, exclude_unset=True)
        try:
            tuning = TuningSpec.model_validate(fields | change)
        except ValidationError as error:
            raise ConfigError(explain(error, prefix="spec.tuning")) from error
        return self.changed(self.spec.model_copy(update={"tuning": tuning}))

    def tuning_in_words(self) -> str:
        """Return what ``spec.tuning`` asks for, as the end of a sentence that begins "it is"."""
        tuning = self.spec.tuning or TuningSpec()
        words = []
        if tuning.micro_batch is not None:
            words.append(f"micro-batch {tuning.micro_batch}")
        if tuning.loader_workers is not None:
            words.append(counted(tuning.loader_workers, "loader worker"))
        if tuning.auto is not None:
            words.append("the auto-tuner" if tuning.auto else "no auto-tuner")
        if not words:
            return "to train with the settings of its script"
        return f"to train with {', '.join(words)}; `dlrover job events` shows what comes of it"

    def with_fields_of(self, obj: dict[str, Any]) -> Self:
        """Return this job under an edit that :meth:`read` refuses, with the generation of the edit.

        The job continues unchanged, except for the parts of the edit that can still be followed:
        ``suspend`` and the numbers of nodes. If one of these numbers is wrong, all keep their old
        values.
        """
        asked = _mapping(obj.get("spec"))
        wanted = _mapping(_mapping(asked.get("replicaSpecs")).get("worker"))
        worker = self.worker
        kept = worker.model_dump(by_alias=True, exclude_unset=True)
        for name in SIZES:
            kept.pop(name, None)
        try:  # all or none: they limit each other
            sizes = {name: wanted[name] for name in SIZES if wanted.get(name) is not None}
            fresh = ReplicaSpec.model_validate(kept | sizes, extra="ignore")
            worker = fresh if sizes and not fresh.problems() else worker
        except ValidationError:
            pass
        suspend = asked.get("suspend", False)
        specs = self.spec.replica_specs.model_copy(update={"worker": worker})
        spec = self.spec.model_copy(
            update={
                "replica_specs": specs,
                "suspend": suspend if isinstance(suspend, bool) else self.spec.suspend,
            }
        )
        generation = {"generation": obj["metadata"].get("generation", 1)}
        metadata = self.metadata.model_copy(update=generation)
        return self.model_copy(update={"spec": spec, "metadata": metadata})

    def changed(self, spec: JobSpec) -> Self:
        """Return this job with another spec. The generation grows only if the spec differs."""
        if spec == self.spec:
            return self
        generation = self.metadata.generation + 1
        metadata = self.metadata.model_copy(update={"generation": generation})
        return self.model_copy(update={"spec": spec, "metadata": metadata})


def least_nodes(template: dict[str, Any]) -> int | None:
    """Return the least number of nodes that the ``elastic-run`` of a Pod template asks for.

    It is N in ``--nnodes N`` or ``--nnodes N:MAX``, of the first such call in the main container
    whose N is a number above 0; None if there is none. The command may be a list of words or a line
    for a shell. Calls with ``--standalone`` do not count: they do not join the job. The container's
    PET_NNODES counts for a call without the flag, and if the command starts a script that cannot be
    read here. A variable such as ``$NODE_NUM`` is no number.
    """
    _, container = _main_of(template)
    environ, command = _environ_of(container), _command_of(container)
    default = environ.get(ENV_NNODES, "")
    found = calls(command) if default or any("-run" in word for word in command) else []
    texts = [call.split.value("--nnodes") or default for call in joining(found, environ)]
    programs = {call.program for call in found}
    if not is_standalone(environ) and programs.isdisjoint((ELASTIC_RUN, *LAUNCHERS)):
        texts.append(default)  # a script that cannot be read may start elastic-run
    for text in texts:
        number = re.match(r"0*(\d{1,9})(?!\d)", text, re.ASCII)
        if number and int(number[1]):
            return int(number[1])
    return None


def _instead_of(kind: str) -> str:
    """Return what to do with an object of another kind."""
    if kind in KUBEFLOW:
        return f"docs/migrating-from-pytorchjob.md says what a {kind} becomes"
    if kind == "ScalePlan":
        return (
            "there is no ScalePlan here: replicas of the ElasticJob is the only desired size; "
            "change it with dlrover job scale, kubectl scale or an edit"
        )
    return f"{kind} objects are for kubectl apply"


def _command_of(container: dict[str, Any]) -> list[str]:
    """Return the command and arguments of a container, as far as they are strings."""
    return [*_words(container.get("command")), *_words(container.get("args"))]


def _environ_of(container: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables of a container whose values are in the template."""
    pairs = [(v.get("name"), v.get("value")) for v in map(_mapping, _items(container.get("env")))]
    return {k: v for k, v in pairs if isinstance(k, str) and isinstance(v, str)}


def _unused_of_worker(wanted: dict[str, Any]) -> Iterator[str]:
    """Yield the paths in the nodes' template that their Pods do not use, or overwrite."""
    meta, spec = _mapping(wanted.get("metadata")), _mapping(wanted.get("spec"))
    for name, value in meta.items():
        if name not in ("labels", "annotations") and value is not None:
            yield f"{TEMPLATE}.metadata.{name}"
    for label in OWN_LABELS:
        if label in _mapping(meta.get("labels")):
            yield f"{TEMPLATE}.metadata.labels.{label}"
    if spec.get("restartPolicy") not in (None, "Never"):
        yield f"{TEMPLATE}.spec.restartPolicy"
    index, main = _main_of(wanted)
    for variable in map(_mapping, _items(main.get("env"))):
        if variable.get("name") in OWN_ENV:
            yield f"{TEMPLATE}.spec.containers[{index}].env.{variable['name']}"


def _unused_of_master(wanted: dict[str, Any]) -> Iterator[str]:
    """Yield the paths in the master's template that its Pod does not use."""
    for name, value in _mapping(wanted.get("metadata")).items():
        if name not in ("labels", "annotations") and value is not None:
            yield f"{MASTER_TEMPLATE}.metadata.{name}"
    for name, value in _mapping(wanted.get("spec")).items():
        if name not in (*MASTER_TAKES, "containers") and value is not None:
            yield f"{MASTER_TEMPLATE}.spec.{name}"
    main, container = _main_of(wanted)
    for index in range(len(_containers(wanted))):
        where = f"{MASTER_TEMPLATE}.spec.containers[{index}]"
        if index != main:
            yield where
            continue
        for name, value in container.items():
            if name not in ("name", "resources", "env") and value is not None:
                yield f"{where}.{name}"
        for variable in map(_mapping, _items(container.get("env"))):
            if not str(variable.get("name")).startswith(MASTER_ENV):
                yield f"{where}.env.{variable.get('name')}"


def _of_pods(wanted: dict[str, Any]) -> Iterator[str]:
    """Yield the paths in a template that only a Pod uses: on this machine a node is a process."""
    index, main = _main_of(wanted)
    for name, value in _mapping(wanted.get("spec")).items():
        if name not in ("containers", "restartPolicy") and value is not None:
            yield f"{TEMPLATE}.spec.{name}"
    for number in range(len(_containers(wanted))):
        if number != index:
            yield f"{TEMPLATE}.spec.containers[{number}]"
    for name, value in main.items():
        if name not in ("name", *HERE) and value is not None:
            yield f"{TEMPLATE}.spec.containers[{index}].{name}"


def _main_of(wanted: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the index of the main container, and the container; -1 and nothing if absent."""
    containers = [_mapping(container) for container in _containers(wanted)]
    named = [i for i, one in enumerate(containers) if one.get("name") == MAIN_CONTAINER]
    index = named[0] if named else 0 if len(containers) == 1 else -1
    return index, containers[index] if index >= 0 else {}


def _check_depth(document: object) -> None:
    """Raise ConfigError if mappings and lists are nested too deeply."""
    if is_deeper(document):
        raise ConfigError(f"mappings and lists are nested: expected at most {DEPTH} levels")


def _mapping(value: object) -> dict[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def _items(value: object) -> list[Any]:
    """Return the value if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _words(value: object) -> list[str]:
    """Return the strings in a list; empty for any other value."""
    return [w for w in value if isinstance(w, str)] if isinstance(value, list) else []


def _containers(template: dict[str, Any]) -> list[Any]:
    """Return the containers of a Pod template, as far as they are a list."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return containers if isinstance(containers, list) else []


def scaled_to(replicas: int, role: str) -> str:
    """Return a desired number of nodes of a role, in words."""
    return counted(replicas, "server" if role == names.SERVER_PREFIX else "node")


def _serves(template: object) -> bool:
    """Return whether the command of a Pod template is ``dlrover ps server``."""
    _, container = _main_of(_mapping(template))
    words = [word for part in _command_of(container) for word in part.split()]
    return any(
        (word.rpartition("/")[2], *words[at + 1 : at + 3]) == SERVER_COMMAND
        for at, word in enumerate(words)
    )


def _digest(template: object) -> str:
    """Return a digest that distinguishes a Pod template from others."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]


def _unsupported(document: dict[str, Any], *, on_cluster: bool) -> str:
    """Return why a valid job cannot be run; empty if it can. It is checked before anything else.

    It is also empty for a document whose ``spec`` is no mapping, which a later check refuses.

    Args:
        document: the job.
        on_cluster: whether it is to run in a cluster.
    """
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return ""
    roles = spec.get("replicaSpecs")
    others = [r for r in OTHER_ROLES if isinstance(roles, dict) and _has_nodes(roles.get(r))]
    strategy = spec.get("distributionStrategy")
    ours = isinstance(roles, dict) and _serves(_mapping(roles.get("ps")).get("template"))
    if ours and others in ([], ["ps"]):
        others, strategy = [], None if strategy == PARAMETER_SERVER else strategy
        labels = _mapping(_mapping(document.get("metadata")).get("labels"))
        if on_cluster and names.LABEL_QUEUE in labels:
            return (
                f"{SERVERS}: found the label {names.LABEL_QUEUE}: a queue does not count servers "
                "yet, so a job in a queue cannot have them"
            )
        role = _mapping(_mapping(roles).get("ps"))
        if on_cluster and isinstance(where := role.get("checkpoints"), str):
            try:
                _cut_storage(where, role.get("template"))
            except ConfigError as error:
                return f"{SERVERS}.checkpoints: {error}"
    supported = f"only {ALLREDUCE} with the role worker is supported"
    if others:
        named = f"found the role{'s' if len(others) > 1 else ''} {', '.join(others)}"
        path = f"spec.replicaSpecs.{others[0]}: {named}"
        if others == ["master"] and strategy in (None, ALLREDUCE):
            return (
                f"{path}: no node of a PyTorch job is a master; add its replicas to those of worker"
            )
        return f"{path}: not supported yet; {supported}"
    if strategy in (PARAMETER_SERVER, "CustomStrategy", "Local"):
        return f"spec.distributionStrategy: found {strategy}: not supported yet; {supported}"
    return ""


def _cut_storage(url: str, template: object) -> CutStorage:
    """Return what a master needs to reach the directory of cuts.

    Args:
        url: The directory, or the address of a bucket.
        template: The template of the role ``ps``.

    Raises:
        ConfigError: The directory is not in a volume that the servers and the master share.
    """
    found = _mapping(template)
    return CutStorage.of(url, _mapping(found.get("spec")), _main_of(found)[1])


def _has_nodes(role: object) -> bool:
    """Return whether a role desires nodes. Absent ``replicas`` are not 0."""
    return role is not None and not (isinstance(role, dict) and role.get("replicas") == 0)


def _marked(model: BaseModel, mark: str, path: str) -> Iterator[str]:
    """Yield the paths of fields that are set, also in inner parts, and have a mark.

    Fields that are set to null, and the items of lists and mappings, are left out.
    """
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if name not in model.model_fields_set or value is None:
            continue
        where = f"{path}.{field.alias or name}"
        if mark in field.metadata:
            yield where
        elif isinstance(value, BaseModel):
            yield from _marked(value, mark, where)


def explain(error: ValidationError, prefix: str = "", model: type[BaseModel] | None = None) -> str:
    """Return one line for each fault: its path, what was found, what was expected.

    Args:
        error: the faults that a check has found.
        prefix: the path of the document, with which each path begins.
        model: the document's model. Its fields help to recognize a field with a spelling error.
    """
    return in_words(error.errors(include_url=False), prefix, model)


def in_words(
    faults: Iterable[ErrorDetails], prefix: str = "", model: type[BaseModel] | None = None
) -> str:
    """Return one line for each fault, as :func:`explain` does, for faults from another source.

    Args:
        faults: the faults, in the form of pydantic.
        prefix: the path of the document, with which each path begins.
        model: the document's model.
    """
    return "\n".join(_line(detail, prefix, model) for detail in faults)


_KINDS = {"model_type": "expected a mapping", "dict_type": "expected a mapping"}
"""Replacements for messages of pydantic that name types of Python."""


def _line(detail: ErrorDetails, prefix: str, model: type[BaseModel] | None) -> str:
    """Return the line for one fault."""
    path = prefix
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    expected = _KINDS.get(detail["type"], detail["msg"])
    if detail.get("ctx", {}).get("pattern") == _JOB_NAME:
        expected = "expected lower-case letters, digits and -, a letter first, and no - at the end"
    if detail["type"] == "extra_forbidden":
        name = str(detail["loc"][-1])
        advice = ELSEWHERE.get(path) or did_you_mean(name, _known(model, detail["loc"][:-1]))
        return f"{path}: unknown field (found {shown(detail['input'])}); {advice}"
    if detail["type"] == "missing":
        return f"{path}: missing; expected a value here"
    return f"{path}: found {shown(detail['input'])}: {expected[:1].lower()}{expected[1:]}"


def _known(model: type[BaseModel] | None, path: tuple[int | str, ...]) -> list[str]:
    """Return the names of the fields at a path in a document of a model.

    There are none if the path leads out of the model.
    """
    for part in path:
        if model is None:
            return []
        found = [f for n, f in model.model_fields.items() if part in (n, f.alias)]
        model = _model_in(found[0].annotation) if found else None
    return [f.alias or n for n, f in model.model_fields.items()] if model is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model that a field's type is, or that a union contains."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None
