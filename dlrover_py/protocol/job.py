"""``ElasticJob``: what the user wants, and how a job file is checked.

DLRover's group, version and kind. A field stands here once its behaviour exists, not before.
Files are checked strictly: an unknown field is an error with its path.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.names import API_VERSION, KIND, MAIN_CONTAINER

JobName = Annotated[
    str, StringConstraints(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=37)
]


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
    value: Annotated[str, StringConstraints(pattern=r"^[^\x00]*$")] = ""


class Container(BaseModel):
    """What a node on this machine needs of a container; the rest is for Kubernetes."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True
    )

    name: str
    command: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)
    env: list[EnvVar] = Field(default_factory=list)


class ReplicaSpec(_Strict):
    """How many nodes, and what each runs."""

    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Wished number of nodes, standbys not counted."""
    min_replicas: Annotated[int, Field(ge=1)] | None = None
    """Training goes on with this many nodes; ``replicas`` (rounded down to the unit) if absent."""
    max_replicas: Annotated[int, Field(ge=1)] | None = None
    """``replicas`` may be scaled up to this; no bound if absent."""
    node_unit: Annotated[int, Field(ge=1)] = 1
    """The number of nodes in a round is a multiple of this."""
    standby_replicas: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Nodes that are up but not in the round, ready to take a lost one's rank."""
    restart_count: Annotated[int, Field(ge=0, le=1_000_000)] = 3
    """Worker failures that a node may have, and relaunches that its rank may have, without
    steady progress between them."""
    template: dict[str, Any]
    """A Pod template, kept as written."""

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
        return self.replicas if self.min_replicas is None else self.min_replicas

    def container(self) -> Container:
        """The container that runs the agent: the one named ``main``, or the only one.

        Raises:
            ConfigError: there is no such container, or a field that is needed is malformed.
        """
        where = "spec.replicaSpecs.worker.template.spec.containers"
        spec = self.template.get("spec")
        containers = spec.get("containers") if isinstance(spec, dict) else None
        if not isinstance(containers, list) or not containers:
            raise ConfigError(f"{where}: expected a list of at least one container")
        mains = [
            c for c in containers if isinstance(c, dict) and c.get("name") == MAIN_CONTAINER
        ] or (containers if len(containers) == 1 else [])
        if not mains:
            raise ConfigError(
                f"{where}: found {len(containers)} containers and none named "
                f"'{MAIN_CONTAINER}'; name the one that runs elastic-run so"
            )
        try:
            return Container.model_validate(mains[0])
        except ValidationError as error:
            raise ConfigError(explain(error, prefix=where)) from error


class ReplicaSpecs(_Strict):
    """The roles of a job; all-reduce training has one."""

    worker: ReplicaSpec


class JobSpec(_Strict):
    """``spec`` of an ElasticJob."""

    distribution_strategy: Literal["AllreduceStrategy"] = "AllreduceStrategy"
    replica_specs: ReplicaSpecs
    suspend: bool = False
    """All nodes are stopped and none is started while this is true."""


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
        if not isinstance(document, dict):
            raise ConfigError(
                f"expected a mapping with apiVersion: {API_VERSION} and kind: {KIND}, "
                f"found {_kind_of(document)}"
            )
        try:
            job = cls.model_validate(document)
        except ValidationError as error:
            raise ConfigError(explain(error)) from error
        problems = job.spec.replica_specs.worker.problems()
        if problems:
            raise ConfigError("\n".join(f"spec.replicaSpecs.worker: {p}" for p in problems))
        job.spec.replica_specs.worker.container()
        return job

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
        problems = ["expected at least 1 replica"] if replicas < 1 else worker.problems()
        if problems:
            raise ConfigError("\n".join(f"cannot scale to {replicas}: {p}" for p in problems))
        specs = self.spec.replica_specs.model_copy(update={"worker": worker})
        return self.changed(self.spec.model_copy(update={"replica_specs": specs}))

    def suspended(self, suspend: bool) -> Self:
        """This job with ``spec.suspend`` set, one generation later."""
        return self.changed(self.spec.model_copy(update={"suspend": suspend}))

    def changed(self, spec: JobSpec) -> Self:
        """This job with another spec; the generation grows only if it differs."""
        if spec == self.spec:
            return self
        generation = self.metadata.generation + 1
        metadata = self.metadata.model_copy(update={"generation": generation})
        return self.model_copy(update={"spec": spec, "metadata": metadata})


def explain(error: ValidationError, prefix: str = "") -> str:
    """One line for each fault: path, what was found, what was expected."""
    return in_words(error.errors(include_url=False), prefix)


def in_words(faults: Iterable[ErrorDetails], prefix: str = "") -> str:
    """The same of faults that were found by another way."""
    return "\n".join(_line(detail, prefix) for detail in faults)


def _line(detail: ErrorDetails, prefix: str) -> str:
    path = prefix
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    expected = detail["msg"]
    if detail["type"] == "extra_forbidden":
        return f"{path}: unknown field (found {_shown(detail['input'])}); check its spelling"
    if detail["type"] == "missing":
        return f"{path}: missing; expected a value here"
    return f"{path}: found {_shown(detail['input'])}: {expected[:1].lower()}{expected[1:]}"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{_kind_of(value)} {text if len(text) <= 60 else text[:57] + '…'}"


def _kind_of(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value"}
    names |= {int: "a number", float: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
