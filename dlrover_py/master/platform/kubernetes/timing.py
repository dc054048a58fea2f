"""The times of the platform on Kubernetes."""

from dataclasses import dataclass

from dlrover_py.protocol.status import PROGRESS_S
from dlrover_py.protocol.timing import API_SERVER_START_S, Timing


@dataclass(frozen=True, slots=True)
class PlatformTiming:
    """The times of the platform on Kubernetes, in seconds."""

    progress_s: float = PROGRESS_S
    """Time between two writes of statuses that differ only in progress."""
    silence_s: float = Timing().platform_silence_s
    """Time without contact to the API server after which the master counts as disconnected."""
    query_after_s: float = 12.0
    """Time without an answer of the API server after which it is queried, if statuses with progress
    are written often enough. It is also the time limit of such a query."""
    api_server_start_s: float = API_SERVER_START_S
    """Time for which a missing permission may be caused by the start of the API server."""
    unprepared_s: float = 10.0
    """Time after which a Pod without volumes or network is reported."""
    waiting_s: float = 30.0
    """Time after which a Pod that waits for init containers or its scheduler is reported."""
    template_retry_s: float = 60.0
    """Longest time between two tries of a refused template. A policy or an account may be corrected
    without a change of the job."""
    event_retry_s: float = 10.0
    """Longest time between two tries to send an event while the API server does not answer."""
    linger_s: float = 2.0
    """Time before the Pod of a lost node is deleted. If its agent died, the kubelet reports a
    moment later how, and the log is kept. A frozen node does no harm in that time."""
    overdue_s: float = 30.0
    """Time after its grace by which a deleted Pod must be gone; later it is reported."""

    @property
    def query_interval_s(self) -> tuple[float, float]:
        """Least and greatest silence of the API server, in seconds, after which it is queried.

        It is longer where progress is written less often, so that a job that makes steps needs no
        query. But there is always time for the answer before the master counts as disconnected.
        """
        least_s = min(max(self.query_after_s, 1.2 * self.progress_s), 0.8 * self.silence_s)
        return least_s, least_s + 0.04 * self.silence_s
