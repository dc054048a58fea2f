"""The search for a job, on this machine and in a cluster.

Each command is written once, for jobs of both kinds.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from dlrover_py.cli import local_jobs
from dlrover_py.cli.logs import LogQuery
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.cli.view import JobView
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import ConfigError, UnauthorizedError, UnreachableError
from dlrover_py.protocol.job_view import LogTail
from dlrover_py.protocol.local import History
from dlrover_py.protocol.status import EvidenceManifest

if TYPE_CHECKING:
    from dlrover_py.cli.cluster import ClusterJob


class JobHandle(Protocol):
    """A job that can be read."""

    name: str

    @property
    def where(self) -> str:
        """Description of the job's place, such as ``on this machine``."""

    def load_view(self, *, with_pods: bool = False) -> JobView:
        """Return what is known of the job; with ``with_pods`` also of each node's Pod.

        In a cluster, what the user may not list is left out, with a note.

        Raises:
            ConfigError: the last status of an ended job is missing or damaged, or the answer of a
                running job is not understood.
            DLRoverError: the job's cluster refuses a call, or does not answer.
        """

    def history(self) -> History:
        """Return the history of the training.

        It is empty where none is kept, or if that of an ended job is damaged, which is then
        printed.
        """

    def evidence(self) -> list[EvidenceManifest]:
        """Return the bundles of evidence, the oldest first.

        In a cluster, without the right to read the job's Secret, it is the newest snapshot only,
        as its master publishes it.

        Raises:
            ConfigError: the last status of an ended job is missing or damaged.
            DLRoverError: the job's cluster refuses a call, or does not answer.
        """

    def node_snapshot(self, node: str) -> NodeSnapshot | None:
        """Return the stacks of a node from the newest bundle of evidence that has them.

        Raises:
            DLRoverError: the job does not answer.
        """

    def show_logs(self, query: LogQuery) -> None:
        """Print the log lines that the query selects; with ``query.follow`` until the job ends.

        Raises:
            ConfigError: there is no such log, or it cannot be selected in this way in a cluster.
            DLRoverError: the job's cluster refuses a call, or does not answer.
        """

    def log_tail(self, query: LogQuery) -> LogTail:
        """Return the newest lines that the query selects.

        Raises:
            ConfigError: in a cluster, no node has the rank of the query, or another one than it
                names.
            DLRoverError: the job, or its cluster, does not answer, or refuses a call.
        """


class LiveJobHandle(JobHandle, Protocol):
    """A job that can be changed."""

    def scale(self, replicas: int, role: str = "worker") -> str:
        """Request another number of nodes; return a sentence about the new state.

        It returns when the request is accepted. Nodes start or end later.

        Args:
            replicas: the desired number.
            role: ``worker``, or ``ps`` for the servers of a parameter server.

        Raises:
            ConfigError: the number does not fit the limits of the job, the job has ended, or it has
                no such role.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def suspend(self, on: bool) -> str:
        """Request that the job is suspended, or resumed; return a sentence about the new state.

        It returns when the request is accepted. Nodes end or start later.

        Raises:
            ConfigError: the job has ended.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def restart(self, *, rolling: bool) -> str:
        """Request the replacement of all nodes; return a sentence about the new state.

        It returns when the request is accepted. Nodes are replaced later.

        Raises:
            ConfigError: the job has ended.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def take_snapshot(self, at: str) -> str:
        """Request a snapshot of all ranks; return a sentence about the request.

        It returns when the request is accepted. The status then has the result.

        Args:
            at: text that no earlier request had, such as the time.

        Raises:
            ConfigError: the job has ended.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def store_checkpoint(self, at: str) -> str:
        """Request that the newest checkpoint is stored; return a sentence about the request.

        It returns when the request is accepted. The status has the answer later.

        Args:
            at: text that no earlier request had, such as the time.

        Raises:
            ConfigError: the job has ended.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def even_servers(self, at: str) -> str:
        """Request that the servers of a parameter server are evened; return a sentence about it.

        It returns when the request is accepted. The status has the answer later.

        Args:
            at: text that no earlier request had, such as the time.

        Raises:
            ConfigError: the job has ended, or has no servers.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def drain_server(self, server: str) -> str:
        """Have a server give its rows away and end; return a sentence about the request.

        It returns when the request is accepted. Another server takes its place, if there is room.

        Args:
            server: id of the node.

        Raises:
            ConfigError: the job has ended, or has no such server.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def tune(
        self, *, micro_batch: int | None, loader_workers: int | None, auto: bool | None
    ) -> str:
        """Request other settings of data loaders; return a sentence about the new state.

        It returns when the request is accepted. Workers change later, between two steps. What is
        None stays as it is. If all are None, the settings of the script are used again.

        Args:
            micro_batch: greatest number of samples that a worker computes at once.
            loader_workers: number of processes that read data for each worker.
            auto: whether the auto-tuner chooses what was never set.

        Raises:
            ConfigError: a number is out of its range, or the job has ended.
            DLRoverError: the job's cluster refuses the change, or does not answer.
        """

    def stop(self, *, wait: bool) -> str:
        """End the job; with ``wait``, wait until it has ended. Return a sentence about its state.

        Raises:
            ConfigError: the job is in a cluster, where a job is deleted instead.
            UnreachableError: the job does not answer, or has not ended in time.
        """

    def delete(self, *, cascade: str, wait: bool, confirm: Callable[[str], None]) -> str:
        """Delete the job; return a sentence about the new state.

        Args:
            cascade: what happens to its Pods: ``background``, ``foreground`` or ``orphan``.
            wait: return only when the job and its Pods are gone.
            confirm: called with what will be deleted. It raises an error if the user refuses.

        Raises:
            ConfigError: the job is on this machine, where a job is stopped instead.
            DLRoverError: ``confirm`` raised it, the cluster refuses a call, or it does not answer.
        """


@contextmanager
def find_to_read(
    settings: Settings, target: Target | None, name: str | None
) -> Iterator[JobHandle]:
    """Find a job to read.

    A job that runs on this machine is preferred, then one that has run here, then one in the
    cluster. Without a name the job is the only running one, the last one that ran, or the only one
    in the cluster's namespace. If several run here, none is chosen, and no cluster is asked. A
    connection to a cluster is closed at the end of the block.

    Args:
        settings: settings of this command.
        target: cluster that the flags name. If they name one, only the cluster is searched. None:
            only this machine is.
        name: name of the job; None for the only one.

    Raises:
        ConfigError: there is no such job. The message says where it was searched.
        UnreachableError: the cluster was asked and does not answer.
        UnauthorizedError: the cluster was asked and does not accept the credentials.
    """
    with ExitStack() as stack:
        if target is not None and target.given:
            yield _in_cluster(stack, target, name)
            return
        job: JobHandle
        try:
            job = local_jobs.find_to_read(settings, name)
        except local_jobs.JobNotFoundError as error:
            if error.several or target is None:
                raise
            job = _in_cluster(stack, target, name, f"{error}\n")
        yield job


@contextmanager
def find_to_change(
    settings: Settings, target: Target | None, name: str | None
) -> Iterator[LiveJobHandle]:
    """Find a job to change: one that runs on this machine, or else one in the cluster, by its name.

    Without a name no cluster is asked. A job that has ended here is not found.

    Args:
        settings: settings of this command.
        target: cluster that the flags name. If they name one, only the cluster is searched. None:
            only this machine is.
        name: name of the job; None for the only one that runs on this machine.

    Raises:
        ConfigError: there is no such job, or the flags name a cluster and no name is given. The
            message says where the job was searched.
        UnreachableError: the cluster was asked and does not answer.
        UnauthorizedError: the cluster was asked and does not accept the credentials.
    """
    with ExitStack() as stack:
        if target is not None and target.given:
            if name is None:
                raise ConfigError("the name of the job is missing; see `dlrover job get`")
            yield _in_cluster(stack, target, name)
            return
        job: LiveJobHandle
        try:
            job = local_jobs.find_to_change(settings, name)
        except local_jobs.JobNotFoundError as error:
            if name is None or target is None:
                raise
            job = _in_cluster(stack, target, name, f"{error}\n")
        yield job


def _in_cluster(
    stack: ExitStack, target: Target, name: str | None, error_prefix: str = ""
) -> "ClusterJob":
    """Return a job of the cluster. An error begins with ``error_prefix``.

    Args:
        stack: closes the connection when it is closed itself.
        target: the cluster and its namespace.
        name: name of the job; None for the only one in the namespace.
        error_prefix: beginning of the message of an error.

    Raises:
        ConfigError: no cluster is configured, or there is no such job.
        UnreachableError: the cluster does not answer.
        UnauthorizedError: the cluster does not accept the credentials.
    """
    from dlrover_py.cli.cluster import ClusterClient  # importing takes 0.2 s; only clusters need it

    try:
        return stack.enter_context(ClusterClient(target)).job(name)
    except (ConfigError, UnreachableError, UnauthorizedError) as error:
        raise type(error)(f"{error_prefix}{error}") from error
