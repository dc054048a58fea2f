"""Jobs for programs and notebooks, on this machine or in a cluster: see :mod:`dlrover_py.client`.

The commands and the dashboard use the same classes.
"""

import asyncio
import builtins
import contextlib
import copy
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from dlrover_py.cli import jobfile, local_jobs, locate, runs, view
from dlrover_py.cli.logs import LogQuery
from dlrover_py.cli.settings import Settings, Target
from dlrover_py.protocol import names
from dlrover_py.protocol.diagnosis import NodeSnapshot
from dlrover_py.protocol.errors import (
    CheckpointError,
    ConfigError,
    DLRoverError,
    ExitCode,
    UnreachableError,
)
from dlrover_py.protocol.job_view import JobView, LogTail, TimeShare, time_shares
from dlrover_py.protocol.local import History
from dlrover_py.protocol.status import EvidenceManifest, JobEvent, JobPhase, JobStatus, date_time

T = TypeVar("T")
PAST_JOBS = 50
"""Number of past runs that a list has if the caller names no number."""
LOCAL_POLL_S, CLUSTER_POLL_S = 0.5, 3.0
"""Seconds between two looks at a job that is waited for."""
ENDS = (*(phase.value for phase in JobPhase if phase.ended), local_jobs.KILLED)
"""Phases in which a job has ended."""


class JobList(tuple[view.JobRow, ...]):
    """The jobs of one place. A notebook shows a table."""

    __slots__ = ()

    def table(self) -> str:
        """Return the table as HTML."""
        from dlrover_py.dashboard import pages

        return pages.render("jobs_table.html", rows=self, linked=False)

    _repr_html_ = table


class Jobs:
    """The jobs of this machine, or those of a namespace of a cluster.

    All calls wait for their answer. They also work where an event loop runs, as in a notebook.
    """

    def __init__(
        self, *, namespace: str = "", context: str = "", kubeconfig: str | Path | None = None
    ) -> None:
        """Choose the place, as the flags of the same names do. Nothing is read yet.

        Without arguments these are the jobs of this machine, and after these, those of the
        kubeconfig's cluster: a name that is not found here is looked up there. With any argument,
        these are only the jobs of a cluster, with the rights of the kubeconfig's user.

        Args:
            namespace: namespace in the cluster; empty for the kubeconfig's.
            context: context of the kubeconfig; empty for its current one.
            kubeconfig: file to use instead of KUBECONFIG or ``~/.kube/config``.
        """
        file = None if kubeconfig is None else Path(kubeconfig)
        self._target = Target(namespace, context, file)
        self._searched: Target | None = self._target
        """Where a job is searched; None for this machine only."""
        self._settings = Settings.from_environment()

    @classmethod
    def of_target(cls, target: Target) -> Self:
        """Return the jobs of the place that the flags of a command name."""
        return cls(namespace=target.namespace, context=target.context, kubeconfig=target.kubeconfig)

    def of_one_place(self) -> Self:
        """Return these jobs without those of the other place: none of a cluster, or only those."""
        found = copy.copy(self)
        found._searched = self._target if self.in_cluster else None
        return found

    @property
    def in_cluster(self) -> bool:
        """Whether these are the jobs of a cluster."""
        return self._target.given

    @property
    def where(self) -> str:
        """The place of the jobs, in words."""
        if not self.in_cluster:
            return "on this machine"
        return f"in namespace {self._target.namespace or 'of your kubeconfig'}"

    def list(self, past: int = PAST_JOBS, *, each_name_once: bool = False) -> JobList:
        """Return the jobs: those that run first.

        Args:
            past: largest number of past runs of this machine.
            each_name_once: leave out all but the newest run of a name.

        Raises:
            ConfigError: the folders of the jobs are not safe, or no cluster is configured.
            DLRoverError: the cluster refuses a call, or does not answer.
        """

        def rows() -> JobList:
            if not self.in_cluster:
                found = local_jobs.listed(self._settings)
                if each_name_once:
                    first: dict[str, local_jobs.ListedJob] = {}
                    for job in found:
                        first.setdefault(job.name, job)
                    found = [*first.values()]
                running = sum(job.state == "running" for job in found)
                return JobList(job.row for job in found[: running + past])
            from dlrover_py.cli.cluster import ClusterClient  # importing takes 0.2 s

            with ClusterClient(self._target) as cluster:
                return JobList(row for row, _ in cluster.rows(None, all_namespaces=False))

        return _called(rows)

    def get(self, name: str | None = None) -> "NamedJob":
        """Return a job that runs or has run.

        Args:
            name: name of the job; None for the only one, or the last one of this machine.

        Raises:
            ConfigError: there is no such job, or several match.
            DLRoverError: the cluster refuses a call, or does not answer.
        """
        return NamedJob(self, self.read(name, lambda job: job.name))

    def submit(
        self, file: str | Path, *, nodes: int | None = None, apply: bool = False
    ) -> "NamedJob":
        """Start the job of a file. It goes on when this program ends.

        Args:
            file: path of the job file, which has one ElasticJob.
            nodes: number of simulated hosts on this machine; None for as many as the job needs.
            apply: in a cluster: change a job whose name is taken. Otherwise it is refused.

        Raises:
            ConfigError: the file cannot be used, the name is taken, or an argument does not fit
                the place. Nothing was started.
            DLRoverError: the cluster refuses the job, or does not answer.
        """
        path = Path(file)
        if not self.in_cluster:
            if apply:
                raise ConfigError("apply=True changes a job of a cluster: expected none here")
            return _called(lambda: self._start(path, nodes))
        if nodes is not None:
            raise ConfigError(f"found nodes={nodes}: hosts are simulated on this machine only")

        def submitted() -> NamedJob:
            from dlrover_py.cli.cluster import ClusterClient

            documents = jobfile.load_all(path)
            if len(documents) != 1:
                raise ConfigError(f"{path}: found {len(documents)} jobs, expected one")
            with ClusterClient(self._target) as cluster:
                ((_, job),) = cluster.submit(documents, apply=apply, dry_run=False)
                return NamedJob(self, job.name)

        return _called(submitted)

    def _start(self, path: Path, nodes: int | None) -> "NamedJob":
        """Start ``dlrover job run`` as a process of its own; return once it is the job.

        Raises:
            ConfigError: a job of this name runs, or the command refuses the file.
            DLRoverError: the command has failed before the job had begun.
        """
        name = jobfile.load(path).job.metadata.name
        if name in local_jobs.running(self._settings):
            raise ConfigError(f"job {name} runs already: stop it first, or choose another name")
        hosts = [] if nodes is None else [f"--nodes={nodes}"]
        command = jobfile.run_command(path, "--json", "--logs=none", *hosts)
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C of a notebook's kernel does not stop the job
            )
            # Somebody has to take its exit code.
            threading.Thread(target=process.wait, daemon=True).start()
            pause = threading.Event()
            while (code := process.poll()) is None:
                job = local_jobs.running(self._settings).get(name)
                if job is not None:
                    with contextlib.suppress(UnreachableError):  # it has only just begun, or ended
                        if job.snapshot().cluster_pid == process.pid:
                            break
                pause.wait(0.1)
            if code not in (None, ExitCode.OK, ExitCode.FAILED):
                errors.seek(0)
                words = errors.read().decode(errors="replace").replace("dlrover: ", "").strip()
                kind = ConfigError if code == ExitCode.USAGE else DLRoverError
                raise kind(words or f"`dlrover job run {path}` ended with exit code {code}")
        return NamedJob(self, name)

    def runs(self, name: str) -> "builtins.list[str]":
        """Return the names of the runs of a job on this machine, newest first; none in a cluster.

        Each can be used in place of the name of the job, to read that run. That of the run that
        goes on can be used to change it, too.

        Raises:
            ConfigError: the folders of the jobs are not safe.
        """
        if self.in_cluster:
            return []
        job = name.partition("@")[0]
        found = runs.stamps(self._settings.state_folder, job)
        return [f"{job}@{stamp}" for stamp in found]

    @contextlib.contextmanager
    def reading(self, name: str | None) -> Iterator[locate.JobHandle]:
        """Find a job to read. A connection to a cluster is closed at the end of the block.

        Errors are those of :func:`dlrover_py.cli.locate.find_to_read`.

        Args:
            name: name of the job; None for the only one.
        """
        with locate.find_to_read(self._settings, self._searched, name) as job:
            yield job

    @contextlib.contextmanager
    def changing(self, name: str | None) -> Iterator[locate.LiveJobHandle]:
        """Find a job to change. A connection to a cluster is closed at the end of the block.

        For jobs of this machine, a name that does not run here is looked up in the cluster of the
        kubeconfig. Errors are those of :func:`dlrover_py.cli.locate.find_to_change`.

        Args:
            name: name of the job; None for the only one.
        """
        with locate.find_to_change(self._settings, self._searched, name) as job:
            yield job

    def read(self, name: str | None, call: Callable[[locate.JobHandle], T]) -> T:
        """Return what a call reads of a job.

        Raises:
            ConfigError: there is no such job, or several match.
            DLRoverError: the cluster refuses a call, or does not answer.
        """

        def found() -> T:
            with self.reading(name) as job:
                return call(job)

        return _called(found)

    def change(self, name: str, call: Callable[[locate.LiveJobHandle], T]) -> T:
        """Return the answer of a call that changes a job, which :meth:`changing` finds.

        A job of a cluster may have ended; then it can only be deleted.

        Raises:
            ConfigError: there is no such job, or it cannot be changed in this way.
            DLRoverError: the cluster refuses a call, or does not answer.
        """

        def found() -> T:
            with self.changing(name) as job:
                return call(job)

        return _called(found)

    def request(self, name: str, path: str) -> str:
        """Make a request to the cluster process of a job of this machine; return its answer.

        Raises:
            ConfigError: there is no such job, or the request is refused.
            UnreachableError: the cluster process does not answer.
        """
        return _called(lambda: local_jobs.find_to_change(self._settings, name).request(path))


class NamedJob:
    """One job. Each call reads it anew; a notebook shows its page.

    Every call that reads raises ConfigError if the job is gone, and DLRoverError if its cluster
    refuses the call or does not answer. Every call that changes it also raises ConfigError if the
    job has ended, or the change does not fit it. A change returns a sentence as soon as it is
    accepted; the job follows later.
    """

    def __init__(self, jobs: Jobs, name: str) -> None:
        """Name a job of some jobs; nothing is read."""
        self.name, self._jobs = name, jobs

    def __repr__(self) -> str:
        return f"<NamedJob {self.name} {self._jobs.where}>"

    def view(self) -> JobView:
        """Return what is known: status, phase and its reason, conditions, events, Pods."""
        return self._jobs.read(self.name, lambda job: job.load_view(with_pods=True))

    def view_and_history(self) -> tuple[JobView, History]:
        """Return what is known, and the history, which is kept on this machine only."""
        return self._jobs.read(self.name, lambda j: (j.load_view(with_pods=True), j.history()))

    def status(self) -> JobStatus | None:
        """Return the newest status of the job's master; None if there is none."""
        return self._jobs.read(self.name, lambda job: job.load_view().status)

    def phase(self) -> str:
        """Return the phase, such as ``Running``; ``Killed`` if the run has left no status."""
        return self._jobs.read(self.name, lambda job: job.load_view().phase)

    def events(self) -> list[JobEvent]:
        """Return the newest events, oldest first."""
        return list(self._jobs.read(self.name, lambda job: job.load_view().events))

    def logs(self, node: str | None = None, rank: int | None = None) -> list[str]:
        """Return the newest lines that workers have printed, each with its origin.

        Lines that are not complete yet are the last ones.

        Args:
            node: id of the only node; None for all.
            rank: the only global rank; None for all.
        """
        found = self.log_tail(node, rank)
        return [*found.lines, *found.growing]

    def log_tail(self, node: str | None, rank: int | None) -> LogTail:
        """Return the newest lines that workers have printed: complete ones, and others.

        Args:
            node: id of the only node; None for all.
            rank: the only global rank; None for all.
        """
        return self._jobs.read(self.name, lambda j: j.log_tail(LogQuery(node=node, rank=rank)))

    def evidence(self, node: str) -> tuple[list[EvidenceManifest], NodeSnapshot | None]:
        """Return the bundles of evidence, the oldest first, and the newest stacks of a node."""
        return self._jobs.read(self.name, lambda j: (j.evidence(), j.node_snapshot(node)))

    def goodput(self) -> Any:
        """Return where the time went: rows as in :class:`TimeShare`, or their DataFrame.

        It is a ``pandas.DataFrame`` where pandas is installed. It is empty before the first step.
        """
        status = self.status()
        return _table(time_shares(status.goodput if status is not None else None))

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the job has ended; return its last phase.

        Args:
            timeout_s: longest time to wait, in seconds; None for no limit.

        Raises:
            TimeoutError: the job still runs.
            ConfigError: the job is gone.
            DLRoverError: the cluster refuses a call, or does not answer.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        poll_s = CLUSTER_POLL_S if self._jobs.in_cluster else LOCAL_POLL_S
        pause = threading.Event()
        while (phase := self.phase()) not in ENDS:
            left = poll_s if end is None else min(poll_s, end - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"{self.name} is {phase} after {timeout_s:g} s")
            pause.wait(left)
        return phase

    def scale(self, nodes: int, role: str = names.ROLE_WORKER) -> str:
        """Request another number of nodes of a role: ``worker`` or ``ps``."""
        return self._jobs.change(self.name, lambda job: job.scale(nodes, role))

    def suspend(self) -> str:
        """Request that all nodes end, until the job is resumed."""
        return self._jobs.change(self.name, lambda job: job.suspend(on=True))

    def resume(self) -> str:
        """Continue a suspended job."""
        return self._jobs.change(self.name, lambda job: job.suspend(on=False))

    def restart(self, *, rolling: bool = False) -> str:
        """Request that all nodes are replaced; with ``rolling`` one unit after the other."""
        return self._jobs.change(self.name, lambda job: job.restart(rolling=rolling))

    def take_stacks(self) -> str:
        """Request the stacks of all ranks. The status then has them, as ``diagnosis``."""
        at = date_time(view.now())
        return self._jobs.change(self.name, lambda job: job.take_snapshot(at))

    def checkpoint(self, timeout_s: float = 600.0) -> str:
        """Have the newest checkpoint in memory stored while training goes on.

        Args:
            timeout_s: longest time to wait for the answer, in seconds.

        Returns:
            A sentence that names the step and the folder of the checkpoint in storage.

        Raises:
            ConfigError: the job is gone or has ended.
            CheckpointError: nothing could be stored. The message says why.
            TimeoutError: the checkpoint was not in storage in time; the request stays open.
            DLRoverError: the cluster refuses a call, or does not answer.
        """
        at = date_time(view.now())
        self._jobs.change(self.name, lambda job: job.store_checkpoint(at))
        end, pause = time.monotonic() + timeout_s, threading.Event()
        while True:
            status = self.status()
            answer = None if status is None else status.store_answer
            if answer is not None and answer.request == at:
                if answer.step is None:
                    raise CheckpointError(f"{self.name}: {answer.words}")
                return f"{self.name}: {answer.words}"
            if status is not None and status.phase.ended:
                raise ConfigError(f"{self.name} has ended; see `dlrover job describe`")
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"{self.name}: the checkpoint is not in storage after {timeout_s:g} s; the "
                    "request stays open: see `dlrover job events`"
                )
            pause.wait(CLUSTER_POLL_S if self._jobs.in_cluster else LOCAL_POLL_S)

    def drain(self, node: str) -> str:
        """Request that a node of this machine leaves. Its host takes no other node.

        Raises:
            ConfigError: the job is in a cluster or has ended, or there is no such node.
            UnreachableError: the job does not answer.
        """
        if self._jobs.in_cluster:
            raise ConfigError(
                f"a node in a cluster is drained by its host: kubectl drain, or kubectl delete "
                f"pod {self.name}-{node}"
            )
        if not re.fullmatch(names.NODE_ID, node):
            raise ConfigError(f"node {node!r}: expected the id of a node, such as n0")
        return self._jobs.request(self.name, f"/v1/nodes/{node}/drain")

    def stop(self, *, wait: bool = True) -> str:
        """End a job of this machine, with all its processes; with ``wait``, return then."""
        return self._jobs.change(self.name, lambda job: job.stop(wait=wait))

    def delete(self, *, wait: bool = False) -> str:
        """Delete a job of a cluster, with its Pods and their logs. Nobody is asked."""

        def call(job: locate.LiveJobHandle) -> str:
            return job.delete(cascade="background", wait=wait, confirm=lambda _: None)

        return self._jobs.change(self.name, call)

    def report(self) -> str:
        """Return the page about the whole run, as HTML that needs no other file."""
        from dlrover_py.dashboard import pages

        return pages.report(*self.view_and_history(), now=view.now())

    def frame(self) -> str:
        """Return the report in a frame, as HTML for another page. No script runs in it."""
        from dlrover_py.dashboard import pages

        return pages.render("frame.html", name=self.name, report=self.report())

    _repr_html_ = frame


def _table(rows: list[TimeShare]) -> Any:
    """Return rows as a DataFrame where pandas is installed, else as they are."""
    try:
        import pandas as pd
    except ImportError:
        return rows
    return pd.DataFrame(rows, columns=list(TimeShare.__annotations__))


def _called(call: Callable[[], T]) -> T:
    """Make a call that runs an event loop of its own.

    A notebook's thread runs one already, so the call is then made in another thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()
