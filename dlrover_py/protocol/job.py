"""``ElasticJob``: what the user wants, and how a job file is checked; the CRD is made from it.

DLRover's group, version and kind, and all fields of its schema. A field of ours stands here once
its behaviour exists, not before; one of DLRover's that has none here is marked ``INERT``:
accepted, and told (:meth:`ElasticJob.without_effect`).
Files are checked strictly: an unknown field is an error with its path. Objects of the API are
read leniently (:meth:`ElasticJob.read`): the server has checked them, maybe by a newer schema.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
)
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from dlrover_py.protocol import names
from dlrover_py.protocol.commands import ELASTIC_RUN, calls, remarks
from dlrover_py.protocol.errors import ConfigError, Unsupported, did_you_mean, shown
from dlrover_py.protocol.names import API_VERSION, KIND, MAIN_CONTAINER
from dlrover_py.protocol.template import DEPTH, Fault, faults_of, is_deeper

JobName = Annotated[
    str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=37)
]
Text = Annotated[str, StringConstraints(max_length=253)]
Int32 = Annotated[int, Field(ge=0, le=2**31 - 1)]
Seconds = Annotated[int, Field(ge=1, le=2**31 - 1)]

INERT: Final = "accepted, without effect"
"""Marks a field of DLRover's schema that changes nothing here."""
CLUSTER_ONLY: Final = "has an effect on Kubernetes only"
"""Marks a field that a job on this machine does not follow."""

ALLREDUCE: Final = "AllreduceStrategy"
PARAMETER_SERVER: Final = "ParameterServerStrategy"
OTHER_ROLES: Final = ("ps", "chief", "evaluator", "master")
"""Roles of DLRover's jobs that are not run yet."""

TEMPLATE: Final = "spec.replicaSpecs.worker.template"
HERE: Final = ("command", "args", "env")
"""Fields of the main container that a job on this machine follows."""
MASTER_TAKES: Final = (
    *("nodeSelector", "affinity", "priorityClassName", "schedulerName"),
    *("tolerations", "imagePullSecrets"),
)
"""Fields of a Pod that a master has from its template."""
MASTER_SETTING: Final = "DLROVER_MASTER_"
"""Environment variables of these names a master has from its template."""
MASTER_TEMPLATE: Final = "spec.replicaSpecs.dlrover-master.template"

MASTER_ARGUMENTS: Final = (
    *("pending_timeout", "pending_fail_strategy", "service_type", "pre_check_ops"),
    *("pre_check_bypass", "training_elastic_mode", "enable_dashboard", "dashboard_port"),
)
"""Annotations of an ElasticJob that DLRover's operator makes its master's arguments of."""
OWN_ENV: Final = (
    *(names.ENV_MASTER_ADDR, names.ENV_TOKEN_FILE, names.ENV_CA_FILE),
    *(names.ENV_JOB_NAME, names.ENV_NODE_ID, names.ENV_POD_IP),
)
"""Environment variables of a node that its template cannot set."""
OWN_LABELS: Final = (
    *(names.LABEL_APP, names.LABEL_JOB, names.LABEL_ROLE, names.LABEL_INDEX, names.LABEL_UID),
)
"""Labels of a Pod that its template cannot set."""

SIZES: Final = ("replicas", "minReplicas", "maxReplicas", "nodeUnit", "standbyReplicas")
"""Fields of a role that say how many nodes."""

_FRACTION = re.compile(r"[0-9]*\.?[0-9]+")


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        strict=True,  # "3" and true are no numbers, as for Kubernetes
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
    )


class EnvVar(_Strict):
    """A literal environment variable of a container."""

    name: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    """Name of the variable."""
    value: Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")] = ""
    """Its value."""
    value_from: dict[str, Any] | None = None
    """Where Kubernetes takes the value from; there is no such place on this machine."""


class Container(BaseModel):
    """What a node on this machine needs of a container; the rest is for Kubernetes."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    name: str
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    env: list[EnvVar] = Field(default_factory=list)


class Role(_Strict):
    """What DLRover's schema has for each role."""

    restart_policy: Annotated[Text | None, INERT] = None
    """Accepted, without effect: ``restartCount`` decides, and Pods have ``Never``."""
    auto_scale: Annotated[bool | None, INERT] = None
    """Accepted, without effect."""
    restart_timeout: Annotated[Int32 | None, INERT] = None
    """Accepted, without effect (nor has it one in DLRover)."""
    batch_scheduler: Annotated[Text | None, INERT] = Field(default=None, alias="BatchScheduler")
    """Accepted, without effect: ``schedulerName`` in the template chooses a scheduler."""


MOST_REPLICAS = 100_000


class ReplicaSpec(Role):
    """How many nodes, and what each runs."""

    replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = 1
    """Wished number of nodes, standbys not counted."""
    min_replicas: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Training goes on with this many nodes. If absent: the least number in the command's
    ``--nnodes MIN:MAX``, else ``replicas``."""
    max_replicas: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """``replicas`` may be scaled up to this; no bound if absent."""
    node_unit: Annotated[int, Field(ge=1, le=100_000)] = 1
    """The number of nodes in a round is a multiple of this."""
    standby_replicas: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Nodes that are up but not in the round, ready to take a lost one's rank."""
    restart_count: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Worker failures that a node may have, and relaunches that its rank may have, without
    steady progress between them."""
    priority: Annotated[Text | None, CLUSTER_ONLY] = None
    """Name of the Pods' priority class, unless the template has one (DLRover's ``high`` and
    ``low`` are such names). A fraction such as ``0.5`` is accepted, without effect."""
    template: dict[str, Any]
    """A Pod template, kept as written. Nodes that are created after a change have the new one."""

    _least: int | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any, /) -> None:
        """Read the command once: the minimum is asked for at every step."""
        self._least = None if self.min_replicas is not None else least_nodes(self.template)

    def problems(self) -> list[str]:
        """Relations between the fields that do not hold, in words."""
        found = []
        minimum, maximum = self.minimum, self.max_replicas
        if minimum > self.replicas:
            found.append(
                f"minReplicas is {minimum} and replicas is {self.replicas}: "
                "expected minReplicas ≤ replicas"
            )
        if maximum is not None and self.replicas > maximum:
            found.append(
                f"replicas is {self.replicas} and maxReplicas is {maximum}: "
                "expected replicas ≤ maxReplicas"
            )
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
        return found

    @property
    def minimum(self) -> int:
        """Least number of nodes that a round may have."""
        if self.min_replicas is not None:
            return self.min_replicas
        if self._least is None:
            return self.replicas
        return min(self.replicas, -(-self._least // self.node_unit) * self.node_unit)

    @property
    def priority_class(self) -> str:
        """``priorityClassName`` of a Pod whose template has none; empty for none."""
        return "" if self._fraction else self.priority or ""

    @property
    def _fraction(self) -> bool:
        return self.priority is not None and _FRACTION.fullmatch(self.priority) is not None

    def faults(self) -> list[Fault]:
        """Places of the template that Kubernetes cannot read, as far as is known here."""
        return list(faults_of(self.template, TEMPLATE))

    def container(self) -> Container:
        """The container that runs the agent: the one named ``main``, or the only one.

        Raises:
            ConfigError: there is no such container, or a field that is needed is malformed.
        """
        where, index = f"{TEMPLATE}.spec.containers", self.main_container()
        try:
            return Container.model_validate(self.template["spec"]["containers"][index])
        except ValidationError as error:
            raise ConfigError(explain(error, prefix=where)) from error

    def command_remarks(self) -> str:
        """Why nodes of this template would not train together, by their command; empty if they
        may, or if it cannot be read. A command in the image is not known."""
        try:
            index = self.main_container()
        except ConfigError:
            return ""  # said elsewhere
        container = _mapping(_containers(self.template)[index])
        words = [*_words(container.get("command")), *_words(container.get("args"))]
        found = remarks(words)
        where = f"spec.replicaSpecs.worker.template.spec.containers[{index}]"
        part = "command" if container.get("command") else "args"
        return f"{where}.{part}: {found}" if found else ""

    @property
    def template_hash(self) -> str:
        """What tells a Pod of this template from one of another."""
        text = json.dumps(self.template, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def main_container(self) -> int:
        """Index of that container.

        Raises:
            ConfigError: there is none.
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
                f"'{MAIN_CONTAINER}'; name the one that runs elastic-run so"
            )
        return 0


class OtherSpec(Role):
    """A role that is not run yet: a job that has one is accepted and told ``Unsupported``."""

    replicas: Int32 | None = None
    """With 0 the job is run, and the role is without effect."""
    restart_count: Int32 | None = None
    """Without effect."""
    priority: Text | None = None
    """Without effect."""
    template: dict[str, Any] | None = None
    """A Pod template, which is not used."""


class MasterSpec(Role):
    """How the job's own master is scheduled; what it runs is the operator's to say."""

    replicas: Annotated[Int32 | None, INERT] = None
    """Accepted, without effect: there is one master."""
    restart_count: Annotated[Int32 | None, INERT] = None
    """Accepted, without effect: a master that ends is always started again."""
    priority: Annotated[Text | None, INERT] = None
    """Accepted, without effect: ``priorityClassName`` in the template has one."""
    template: Annotated[dict[str, Any], CLUSTER_ONLY] = Field(default_factory=dict)
    """A Pod template of which this is taken, at the job's creation and at a resume: labels,
    annotations, nodeSelector, tolerations, affinity, priorityClassName, schedulerName,
    imagePullSecrets, and the resources of its container ``main``, or of the only one."""


class ReplicaSpecs(_Strict):
    """The roles of a job; all-reduce training has workers, and settings for its master."""

    worker: ReplicaSpec
    dlrover_master: MasterSpec | None = Field(default=None, alias="dlrover-master")
    ps: OtherSpec | None = None
    chief: OtherSpec | None = None
    evaluator: OtherSpec | None = None
    master: OtherSpec | None = None


Often = (
    Annotated[int, Field(ge=1, le=2**31 - 1)]
    | Annotated[str, StringConstraints(pattern=r"^(auto|[1-9][0-9]{0,6}s)$")]
)


class KeepSpec(_Strict):
    """Which checkpoints stay in storage; the newest one always does."""

    last: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """The newest so many."""
    every: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """And those whose step is a multiple of this."""
    best: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """And so many with the best metric, where the script gives one to ``save()``: the lowest."""
    highest: bool = False
    """The best metric is the highest."""


class CheckpointSpec(_Strict):
    """When the script's state is saved, and where to. A ``Checkpointer`` in the script takes from
    here what it is not given itself, and has defaults for what is absent here too."""

    dir: Annotated[str, StringConstraints(min_length=1, max_length=1024)] | None = None
    """Folder that all nodes share, or a bucket (``s3://…``). If absent checkpoints are kept in
    memory only: they outlive workers and nodes, but not the job."""
    every: Often | None = None
    """How often the state is saved in memory: a number of steps, seconds (``30s``), or ``auto``,
    which loses least time by what was measured."""
    persist_every: Often | None = None
    """How often one of those goes to ``dir``; as ``every``."""
    keep: KeepSpec | None = None
    """Which of them stay there."""
    replicas: Annotated[int, Field(ge=0, le=1)] = 1
    """Copies of each node's state in the memory of another node; a job of one node has none."""
    bandwidth: Annotated[int, Field(ge=1_000_000, le=2**53)] | None = None
    """Bytes per second that a node takes for such copies at most; no bound if absent. With less
    than 1 MB/s no copy would ever be whole."""
    save_at_breakpoint: bool = False
    """After a failure of a worker the newest state goes to ``dir``."""


class RestartSpec(_Strict):
    """The wish that all nodes be replaced by new ones of the present template."""

    at: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """Any text that was not here before, such as the time. Nodes that were made under another one
    are replaced."""
    rolling: bool = False
    """One unit of nodes after the other, each once the round of the one before trains; else all at
    once."""


class JobSpec(_Strict):
    """``spec`` of an ElasticJob."""

    distribution_strategy: (
        Literal["AllreduceStrategy", "ParameterServerStrategy", "CustomStrategy", "Local"] | None
    ) = None
    """``AllreduceStrategy`` is run; the others are accepted and told ``Unsupported``. If absent
    the roles decide: workers only is ``AllreduceStrategy``. Cannot be changed."""
    replica_specs: ReplicaSpecs
    suspend: bool = False
    """All nodes are stopped and none is started while this is true."""
    restart: RestartSpec | None = None
    """Replaces all nodes by new ones: ``dlrover job restart`` sets it."""
    ttl_seconds_after_finished: Annotated[
        Annotated[int, Field(ge=0, le=2**31 - 1)] | None, CLUSTER_ONLY
    ] = None
    """The job is deleted, with its Pods, this long after its end; never if absent."""
    active_deadline_seconds: Annotated[Seconds | None, CLUSTER_ONLY] = None
    """The job has failed if it is not over by then; counted from its start or its last resume."""
    pending_timeout_seconds: Annotated[Seconds | None, CLUSTER_ONLY] = None
    """The job has failed if it had fewer nodes than its minimum for so long."""
    checkpoint: CheckpointSpec | None = None
    """Flash checkpoints. If absent, what the script says of them holds."""
    managed_by: Annotated[
        Annotated[str, StringConstraints(min_length=1, max_length=63)] | None, CLUSTER_ONLY
    ] = None
    """Who looks after the job, if not this operator (``MANAGED_BY`` in names.py), which then
    leaves it alone. Cannot be changed."""

    optimize_mode: Annotated[Text | None, INERT] = None
    """Accepted, without effect."""
    brain_service: Annotated[Text | None, INERT] = None
    """Accepted, without effect (nor has it one in DLRover)."""
    resource_limits: Annotated[dict[str, Text] | None, INERT] = Field(default=None, max_length=64)
    """Accepted, without effect: a ResourceQuota of the namespace limits."""
    envs: Annotated[dict[str, EnvVar] | None, INERT] = Field(default=None, max_length=1024)
    """Accepted, without effect (nor has it one in DLRover): ``env`` of the template's container."""
    enable_dynamic_sharding: Annotated[bool | None, INERT] = None
    """Accepted, without effect: who reads its data by shards gets them."""
    enable_elastic_scheduling: Annotated[bool | None, INERT] = None
    """Accepted, without effect: every job is elastic between its bounds."""


class Metadata(BaseModel):
    """What is used of ``metadata``; Kubernetes knows the rest."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    name: JobName
    namespace: str = "default"
    uid: str = ""
    generation: Annotated[int, Field(ge=0)] = 1
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class ElasticJob(_Strict):
    """A job as its user writes it."""

    api_version: Literal["elastic.iml.github.io/v1alpha1"]
    kind: Literal["ElasticJob"]
    metadata: Metadata
    spec: JobSpec

    @classmethod
    def parse(cls, document: object) -> Self:
        """Check a document that was read from a file.

        Raises:
            ConfigError: with one line for each fault: its path, what was found and expected.
        """
        _check_depth(document)
        if not isinstance(document, dict):
            raise ConfigError(
                f"expected a mapping with apiVersion: {API_VERSION} and kind: {KIND}, "
                f"found {shown(document)}"
            )
        job = cls._checked(document, "forbid")
        wrong = [str(fault) for fault in job.template_faults() if not fault.unknown]
        if wrong:
            raise ConfigError("\n".join(wrong))
        job.worker.container()
        return job

    @classmethod
    def read(cls, obj: dict[str, Any]) -> Self:
        """Take in an object that the API server holds: what is unknown is left out.

        Raises:
            Unsupported: a kind of training that is not run yet.
            ConfigError: it cannot be used, with one line for each fault.
        """
        return cls._checked(obj, "ignore")

    @classmethod
    def _checked(cls, document: dict[str, Any], extra: Literal["forbid", "ignore"]) -> Self:
        _check_depth(document)
        unsupported = _unsupported(document)
        if unsupported:
            raise Unsupported(unsupported)
        try:
            job = cls.model_validate(document, extra=extra)
        except ValidationError as error:
            raise ConfigError(explain(error, model=cls)) from error
        problems = job.worker.problems()
        if problems:
            raise ConfigError("\n".join(f"spec.replicaSpecs.worker: {p}" for p in problems))
        job.worker.main_container()
        return job

    def template_faults(self) -> list[Fault]:
        """Places of the Pod templates that Kubernetes cannot read, as far as is known here."""
        master = self.spec.replica_specs.dlrover_master
        of_master = faults_of(master.template, MASTER_TEMPLATE) if master is not None else ()
        return [*self.worker.faults(), *of_master]

    def without_effect(self) -> list[str]:
        """Paths of what the user has set and what changes nothing here."""
        found = list(_marked(self.spec, INERT, "spec"))
        if self.worker.priority is not None and not self.worker.priority_class:
            found.append("spec.replicaSpecs.worker.priority")
        given = self.spec.replica_specs
        found += [f"spec.replicaSpecs.{r}" for r in OTHER_ROLES if getattr(given, r) is not None]
        found += _unused_of_worker(self.worker.template)
        if (master := self.spec.replica_specs.dlrover_master) is not None:
            found += _unused_of_master(master.template)
        notes = self.metadata.annotations
        return found + [f"metadata.annotations.{n}" for n in MASTER_ARGUMENTS if n in notes]

    def for_clusters_only(self) -> list[str]:
        """Paths of what the user has set and what a job on this machine does not follow."""
        unknown = {fault.path for fault in self.worker.faults()}
        of_pods = [path for path in _of_pods(self.worker.template) if path not in unknown]
        return [*_marked(self.spec, CLUSTER_ONLY, "spec"), *of_pods]

    @property
    def worker(self) -> ReplicaSpec:
        """The worker role."""
        return self.spec.replica_specs.worker

    def scaled(self, replicas: int) -> Self:
        """This job with another wish for the number of nodes, one generation later.

        Raises:
            ConfigError: the number does not fit the bounds or the unit.
        """
        old = self.worker
        worker = old.model_copy(
            update={
                "replicas": replicas,
                # An absent minimum means "all of them", and must not lag behind the wish.
                "min_replicas": None if old.min_replicas is None else old.min_replicas,
            }
        )
        problems = worker.problems()
        if not 1 <= replicas <= MOST_REPLICAS:
            problems = [f"expected 1 to {MOST_REPLICAS} replicas"]
        if problems:
            raise ConfigError("\n".join(f"cannot scale to {replicas}: {p}" for p in problems))
        specs = self.spec.replica_specs.model_copy(update={"worker": worker})
        return self.changed(self.spec.model_copy(update={"replica_specs": specs}))

    def suspended(self, suspend: bool) -> Self:
        """This job with ``spec.suspend`` set, one generation later."""
        return self.changed(self.spec.model_copy(update={"suspend": suspend}))

    def restarted(self, at: str, *, rolling: bool) -> Self:
        """This job with ``spec.restart`` set, one generation later.

        Raises:
            ConfigError: ``at`` is empty, or longer than 64 characters.
        """
        try:
            restart = RestartSpec(at=at, rolling=rolling)
        except ValidationError as error:
            raise ConfigError(explain(error, prefix="spec.restart")) from error
        return self.changed(self.spec.model_copy(update={"restart": restart}))

    def under(self, obj: dict[str, Any]) -> Self:
        """This job going on under an edit that :meth:`read` refuses, of that generation: as it is,
        but with what can still be obeyed of it, ``suspend`` and the numbers of nodes."""
        asked = _mapping(obj.get("spec"))
        wanted = _mapping(_mapping(asked.get("replicaSpecs")).get("worker"))
        worker = self.worker
        kept = worker.model_dump(by_alias=True, exclude_unset=True)
        for name in SIZES:
            kept.pop(name, None)
        try:  # all or none: they are bounds of each other
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
        """This job with another spec; the generation grows only if it differs."""
        if spec == self.spec:
            return self
        generation = self.metadata.generation + 1
        metadata = self.metadata.model_copy(update={"generation": generation})
        return self.model_copy(update={"spec": spec, "metadata": metadata})


def least_nodes(template: dict[str, Any]) -> int | None:
    """The minimum in ``elastic-run --nnodes MIN:MAX`` of a Pod template; None if it has no number.

    The command may be a list of words or a line for a shell; what only an environment knows
    (``$NODE_NUM``) is no number.
    """
    for container in _containers(template):
        if not isinstance(container, dict):
            continue
        words = [*_words(container.get("command")), *_words(container.get("args"))]
        for call in calls(words) if any("-run" in word for word in words) else ():
            found = re.match(r"\d+", call.split.value("--nnodes"), re.ASCII)
            if call.program == ELASTIC_RUN and found and int(found[0]):
                return int(found[0])
    return None


def _unused_of_worker(wanted: dict[str, Any]) -> Iterator[str]:
    """What no Pod of a node has of its template."""
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
    """What no master has of its template."""
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
            if not str(variable.get("name")).startswith(MASTER_SETTING):
                yield f"{where}.env.{variable.get('name')}"


def _of_pods(wanted: dict[str, Any]) -> Iterator[str]:
    """What of a template only a Pod has: on this machine a node is a process."""
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
    """The container named ``main``, or the only one, and its index; -1 and nothing if absent."""
    containers = [_mapping(container) for container in _containers(wanted)]
    named = [i for i, one in enumerate(containers) if one.get("name") == MAIN_CONTAINER]
    index = named[0] if named else 0 if len(containers) == 1 else -1
    return index, containers[index] if index >= 0 else {}


def _check_depth(document: object) -> None:
    if is_deeper(document):
        raise ConfigError(f"mappings and lists are nested: expected at most {DEPTH} levels")


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _words(value: object) -> list[str]:
    return [w for w in value if isinstance(w, str)] if isinstance(value, list) else []


def _containers(template: dict[str, Any]) -> list[Any]:
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, dict) else None
    return containers if isinstance(containers, list) else []


def _unsupported(document: dict[str, Any]) -> str:
    """Why a job that is otherwise good cannot be run; before anything else is looked at."""
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return ""
    roles = spec.get("replicaSpecs")
    others = [r for r in OTHER_ROLES if isinstance(roles, dict) and _has_nodes(roles.get(r))]
    strategy = spec.get("distributionStrategy")
    ours = f"{ALLREDUCE} with the role worker is what can be run"
    if others:
        named = f"found the role{'s' if len(others) > 1 else ''} {', '.join(others)}"
        return f"spec.replicaSpecs.{others[0]}: {named}: not supported yet; {ours}"
    if strategy in (PARAMETER_SERVER, "CustomStrategy", "Local"):
        return f"spec.distributionStrategy: found {strategy}: not supported yet; {ours}"
    return ""


def _has_nodes(role: object) -> bool:
    """Whether a role wishes nodes, as far as it says; absent ``replicas`` are not 0."""
    return role is not None and not (isinstance(role, dict) and role.get("replicas") == 0)


def _marked(model: BaseModel, mark: str, path: str) -> Iterator[str]:
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
    """One line for each fault: path, what was found, what was expected.

    Args:
        error: what the check of a document has found.
        prefix: the document's own path, which each path begins with.
        model: the document's; by its fields an unknown one may be told for a misspelt one.
    """
    return in_words(error.errors(include_url=False), prefix, model)


def in_words(
    faults: Iterable[ErrorDetails], prefix: str = "", model: type[BaseModel] | None = None
) -> str:
    """The same of faults that were found by another way."""
    return "\n".join(_line(detail, prefix, model) for detail in faults)


def _line(detail: ErrorDetails, prefix: str, model: type[BaseModel] | None) -> str:
    path = prefix
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    expected = detail["msg"]
    if detail["type"] == "extra_forbidden":
        advice = did_you_mean(str(detail["loc"][-1]), _known(model, detail["loc"][:-1]))
        return f"{path}: unknown field (found {shown(detail['input'])}); {advice}"
    if detail["type"] == "missing":
        return f"{path}: missing; expected a value here"
    return f"{path}: found {shown(detail['input'])}: {expected[:1].lower()}{expected[1:]}"


def _known(model: type[BaseModel] | None, path: tuple[int | str, ...]) -> list[str]:
    """Names of the fields at a path in a document of this model."""
    for part in path:
        if model is None:
            return []
        found = [f for n, f in model.model_fields.items() if part in (n, f.alias)]
        model = _model_in(found[0].annotation) if found else None
    return [f.alias or n for n, f in model.model_fields.items()] if model is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field's type is, or is one of."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None
