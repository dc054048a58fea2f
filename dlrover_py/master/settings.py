"""Settings that an administrator can give a master; the only reader of its environment."""

import os
from collections.abc import Mapping
from typing import Annotated, NamedTuple, Self

from pydantic import Field, ValidationError

from dlrover_py.master.core.events import Rules
from dlrover_py.protocol import names
from dlrover_py.protocol.errors import ConfigError
from dlrover_py.protocol.job import explain
from dlrover_py.protocol.status import PROGRESS_S
from dlrover_py.protocol.timing import Seconds, Timing

PREFIX = "DLROVER_MASTER_"
TRACE_RECEIVER = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""Variables of OpenTelemetry. Each names a receiver of traces."""


class InCluster(NamedTuple):
    """The identity of a master on Kubernetes, as the operator sets it."""

    job_uid: str
    """UID of the ElasticJob."""
    service: str
    """``host:port`` at which nodes connect to the master."""
    pod_name: str
    """Name of the master's own Pod."""
    pod_uid: str
    """UID of the master's own Pod."""


class Settings(Timing):
    """Settings of one master; each can be set as ``DLROVER_MASTER_<NAME>``."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = 1 << 18
    """A larger request is refused with status 413. A report of 1,024 workers has a tenth of
    this."""
    header_s: Seconds = 10.0
    """A connection that has not sent the head of a request after this time is closed. The body may
    take the same time again."""
    publish_s: Seconds = 0.1
    """Shortest time between two publications of the status."""
    progress_s: Seconds = PROGRESS_S
    """On Kubernetes, the shortest time between two statuses that differ only in progress. The
    operator sets more where there are many jobs."""
    log_level: str = "INFO"
    """Lowest level that the master logs, such as ``DEBUG`` or ``WARNING``."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings from the environment; what is not set has its default.

        Variables of the master's Service, which Kubernetes sets, are ignored.

        Args:
            environ: The variables; None for those of this process.

        Raises:
            ConfigError: A value cannot be used, two times contradict each other, or a variable with
                the prefix has an unknown name. The message has one line for each fault.
        """
        environ = os.environ if environ is None else environ
        given = {
            key.removeprefix(PREFIX).lower(): value
            for key, value in environ.items()
            if key.startswith(PREFIX) and not key.startswith(names.ENV_MASTER_SERVICE)
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise ConfigError(explain(error, prefix="environment " + PREFIX + "*")) from error

    @staticmethod
    def in_cluster(environ: Mapping[str, str] | None = None) -> "InCluster":
        """Read what the operator sets for a master on Kubernetes; an empty variable is missing.

        Args:
            environ: The variables; None for those of this process.

        Raises:
            ConfigError: A variable is missing. The message names all that are.
        """
        environ = os.environ if environ is None else environ
        needed: tuple[str, ...] = (names.ENV_MASTER_JOB_UID, names.ENV_MASTER_SERVICE)
        needed += (names.ENV_POD_NAME, names.ENV_POD_UID)
        missing = [name for name in needed if not environ.get(name)]
        if missing:
            raise ConfigError(
                f"{' and '.join(missing)} not set: with --kubernetes the operator sets them"
            )
        return InCluster(*(environ[name] for name in needed))

    @staticmethod
    def traces(environ: Mapping[str, str] | None = None) -> bool:
        """Return whether OpenTelemetry's standard variables name a receiver of traces.

        The result is False if they switch traces off.

        Args:
            environ: The variables; None for those of this process.
        """
        environ = os.environ if environ is None else environ
        off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if off or environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
            return False
        return any(environ.get(name, "").strip() for name in TRACE_RECEIVER)

    def rules(
        self, *, can_create: bool, avoids_hosts: bool, limits_memory: bool, routed_s: float
    ) -> Rules:
        """Return the rules for the decisions of the core.

        Args:
            can_create: Whether the platform creates nodes.
            avoids_hosts: Whether the platform can keep a new node off given hosts.
            limits_memory: Whether the platform gives new nodes the memory limit that it is asked
                for.
            routed_s: Seconds until every node can reach a new master.
        """
        times = self.model_dump(include=set(Timing.model_fields))
        return Rules(
            **times,
            can_create=can_create,
            avoids_hosts=avoids_hosts,
            limits_memory=limits_memory,
            routed_s=routed_s,
        )
