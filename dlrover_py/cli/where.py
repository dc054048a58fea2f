"""Where a job is: on this machine or in a cluster. Commands are written once, for both."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from dlrover_py.cli import here
from dlrover_py.cli.logs import LogWish
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.cli.view import Picture
from dlrover_py.protocol.errors import ConfigError, Unauthorized, Unreachable
from dlrover_py.protocol.local import History

if TYPE_CHECKING:
    from dlrover_py.cli.cluster import ClusterJob


class Job(Protocol):
    """A job that can be looked at."""

    name: str

    @property
    def where(self) -> str:
        """The place, in words: ``on this machine``."""

    def picture(self, *, whole: bool = False) -> Picture:
        """What is known of the job; whole: of each node, too.

        Raises:
            ConfigError: it is not there any more.
        """

    def history(self) -> History:
        """How the training went on; empty where that is not kept."""

    def show_logs(self, wish: LogWish) -> None:
        """Print what is wished for."""


class LivingJob(Job, Protocol):
    """A job that can be changed."""

    def scale(self, replicas: int) -> str:
        """Wish another number of nodes; return what is so now."""

    def suspend(self, on: bool) -> str:
        """Stop all nodes, or go on; return what is so now."""

    def restart(self, *, rolling: bool) -> str:
        """Replace all nodes; return what is so now."""

    def stop(self, *, wait: bool) -> str:
        """End it."""

    def delete(self, *, cascade: str, wait: bool, sure: Callable[[str], None]) -> str:
        """Delete it; ``sure`` raises if its user, told what goes with it, is not."""


@contextmanager
def to_look(settings: Settings, target: Target, name: str | None) -> Iterator[Job]:
    """The job to be looked at.

    One that runs on this machine, else one that has run here, else one in the cluster; without a
    name the only one that runs, the last one that ran, or the only one in the cluster's namespace.

    Raises:
        ConfigError: there is no such job; it says where it was looked for.
    """
    with ExitStack() as stack:
        if target.given:
            yield _in_cluster(stack, target, name)
            return
        job: Job
        try:
            job = here.to_look(settings, name)
        except here.NotHere as error:
            if error.several:
                raise
            job = _in_cluster(stack, target, name, f"{error}\n")
        yield job


@contextmanager
def to_change(settings: Settings, target: Target, name: str | None) -> Iterator[LivingJob]:
    """The job to be changed: one that runs on this machine, else one in the cluster, by its name.

    Raises:
        ConfigError: there is no such job; it says where it was looked for.
    """
    with ExitStack() as stack:
        if target.given:
            if name is None:
                raise ConfigError("name the job that is to be changed; see `dlrover job get`")
            yield _in_cluster(stack, target, name)
            return
        job: LivingJob
        try:
            job = here.to_change(settings, name)
        except here.NotHere as error:
            if name is None:
                raise
            job = _in_cluster(stack, target, name, f"{error}\n")
        yield job


def _in_cluster(
    stack: ExitStack, target: Target, name: str | None, not_here: str = ""
) -> "ClusterJob":
    from dlrover_py.cli.cluster import Cluster  # a fifth of a second, for those who have one

    try:
        return stack.enter_context(Cluster(target)).job(name)
    except (ConfigError, Unreachable, Unauthorized) as error:
        raise type(error)(f"{not_here}{error}") from error
