"""The times of the operator."""

from dataclasses import dataclass

from dlrover_py.protocol.timing import API_SERVER_START_S


@dataclass(frozen=True, slots=True)
class OperatorTiming:
    """The times by which the operator plans, in seconds.

    Raises:
        ValueError: Two times contradict each other.
    """

    rights_interval_s: float = 300.0
    """Time between two checks of a master's account and rights. The check is needed because a
    master that may not write its status cannot report this."""
    heal_after_s: float = 30.0
    """Time without a master after which deleted objects that it needs are made again."""
    stop_after_s: float = 60.0
    """Time without a master after which the operator itself stops a job that must stop."""
    address_lost_after_s: float = 120.0
    """Time of refusals after which the address of a Service is considered lost to another Service.
    A server may take some time to free the address of a deleted Service."""
    allot_after_s: float = 1.0
    """Time after a change until nodes are allotted again, with all changes in between."""
    hosts_after_s: float = 10.0
    """Time after a change until it is decided again which hosts are bad."""
    api_server_start_s: float = API_SERVER_START_S
    """Time for which a missing permission may be caused by the start of the API server."""

    def __post_init__(self) -> None:
        if self.heal_after_s >= self.stop_after_s:
            raise ValueError(
                f"heal_after_s is {self.heal_after_s:g} and stop_after_s {self.stop_after_s:g}: "
                "expected that a master can come back before its job is stopped without it"
            )
