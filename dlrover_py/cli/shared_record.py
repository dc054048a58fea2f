"""What a ``dlrover cluster run`` has started, for the next one if this one is killed.

The record is a file in the state folder, one for each folder of job files. It is written before
what it says comes true. Only the process that holds its lock reads and writes it.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dlrover_py.cli import runs
from dlrover_py.cli.jobfile import MAX_JOB_FILE_BYTES
from dlrover_py.process.blocking import read_at_most, read_regular
from dlrover_py.process.identity import ProcessId
from dlrover_py.process.ownership import STATE_HINT, make_own, open_own
from dlrover_py.protocol import names
from dlrover_py.protocol.autoscale import NodeAllocation
from dlrover_py.protocol.errors import ConfigError, ExitCode
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.status import JobPhase, JobStatus

MAX_RECORD_BYTES = 1 << 28
"""Bytes of the largest record that is read."""
CLOCK_S = 0.001
"""The names of folders have their times in milliseconds, rounded down."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""File with an id of this start of this machine. A process id has no meaning after another one."""


class StartedJob(BaseModel):
    """A job whose ``dlrover job run`` was started."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    job: ElasticJob
    """The job as its file had it."""
    content: str
    """Digest of that file (:func:`digest`)."""
    process: Annotated[str, Field(pattern=r"^\d+@\d+$")]
    """The :class:`ProcessId` of its ``dlrover job run``."""
    queued_at: float
    """Unix time at which its file was found."""
    started_at: float
    """Unix time just before its process was started."""
    granted: NodeAllocation
    """The hosts that it may have."""
    run: str = ""
    """State folder of its run; empty until that is known."""
    code: int | None = None
    """Its exit code; None until it has ended."""

    @property
    def id(self) -> ProcessId:
        """Return the identifier of its process."""
        return ProcessId.parse(self.process)


class _Content(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    boot: str
    """The start of the machine on which the processes run."""
    jobs: dict[str, StartedJob]
    """The jobs, by the names of their files."""


@dataclass(slots=True)
class AdoptedProcess:
    """The ``dlrover job run`` of an earlier call. It is no child of this process."""

    started: StartedJob
    """What the record says of it."""
    root: Path
    """The folder of all states."""

    @property
    def id(self) -> ProcessId:
        """Return its identifier."""
        return self.started.id

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.id.pid

    @property
    def returncode(self) -> int | None:
        """Return its exit code, as the last status of its run has it; None while it runs."""
        if self.id.alive:
            return None
        code = exit_code(self.started, self.root)
        return ExitCode.FAILED if code is None else code

    @property
    def killed(self) -> bool:
        """Whether it has ended without a last status."""
        return not self.id.alive and exit_code(self.started, self.root) is None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self.id.signal(number)


@dataclass(slots=True)
class Record:
    """The record of one folder of job files."""

    folder: Path
    """The folder of job files."""
    root: Path
    """The folder of all states."""
    _written: _Content | None = field(default=None, init=False)
    _problem: str = field(default="", init=False)
    """Why it could not be written last."""

    @property
    def path(self) -> Path:
        """Return the path of the record."""
        name = hashlib.sha256(os.fsencode(self.folder.resolve())).hexdigest()[:16]
        return self.root / f".shared-{name}.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Have the record, and thus the folder, for this process alone during the block.

        Raises:
            ConfigError: another process has it, or the folder of states cannot be used.
        """
        try:
            make_own(self.root)
            at = open_own(self.root, os.O_DIRECTORY, links=True, shared=True, hint=STATE_HINT)
            try:
                lock = self.path.with_suffix(".lock").name
                held = open_own(lock, os.O_RDWR | os.O_CREAT, at=at, hint=STATE_HINT)
            finally:
                os.close(at)
        except OSError as error:
            raise ConfigError(f"{self.root}: {error.strerror}; {STATE_HINT}") from error
        try:
            self._lock(held)
            yield
        finally:
            os.close(held)

    def _lock(self, held: int) -> None:
        """Lock a file for as long as its descriptor is open.

        Raises:
            ConfigError: another process has locked it.
        """
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{self.folder}: another `dlrover cluster run` runs the jobs of this folder, and "
                f"has locked their record {self.path}: stop it first. A further job only needs a "
                "file in the folder"
            ) from error
        except OSError:
            pass  # a file system without locks

    def read(self) -> tuple[dict[str, StartedJob], bool]:
        """Return the jobs by the names of their files, and whether their ids have a meaning here.

        Raises:
            ConfigError: the record is damaged, or cannot be read.
        """
        try:
            fd = open_own(self.path, hint="remove it")
            with open(fd, "rb", 0) as file:
                data = read_at_most(file, MAX_RECORD_BYTES)
            content = _Content.model_validate_json(data or b"")
        except FileNotFoundError:
            return {}, True
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(
                f"{self.path}: it is damaged, or of another release: expected what a `dlrover "
                f"cluster run` that was killed has started from {self.folder}; stop the jobs of "
                "this folder that run (`dlrover job list`), and remove the file"
            ) from error
        return content.jobs, content.boot == _boot()

    def save(self, jobs: dict[str, StartedJob]) -> str:
        """Replace the record, if it has changed.

        Returns:
            Why that is not possible; empty if it is, or if the last call has said the same.
        """
        before, self._problem = self._problem, ""
        try:
            self.write(jobs)
        except (OSError, ConfigError) as error:
            self._problem = str(error)
        return "" if self._problem == before else self._problem

    def write(self, jobs: dict[str, StartedJob]) -> None:
        """Replace the record, if it has changed.

        Raises:
            OSError: it cannot be written.
            ConfigError: another user could have made it.
        """
        content = _Content(boot=_boot(), jobs=jobs)
        if content == self._written:
            return
        fresh = self.path.with_suffix(".fresh")
        fd = open_own(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(fd, "w") as file:
            file.write(content.model_dump_json(by_alias=True))
        fresh.rename(self.path)
        self._written = content

    def remove(self) -> None:
        """Remove the record, because all jobs have ended.

        Raises:
            OSError: it cannot be removed.
        """
        self.path.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """Return a digest of the content of a job file; empty if it cannot be read."""
    try:
        return hashlib.sha256(read_regular(path, MAX_JOB_FILE_BYTES)).hexdigest()
    except OSError:
        return ""


def exit_code(one: StartedJob, root: Path) -> int | None:
    """Return the exit code of a job that has ended; None if it has no last status.

    How a run has ended that was removed is not known. It counts as a success, as nothing may run it
    again.

    Args:
        one: what the record says of the job.
        root: the folder of all states.
    """
    if one.code is not None or not (run := run_of(one, root)):
        return one.code
    folder = Path(run)
    try:
        status = runs.read_document(folder / names.STATUS_FILE, JobStatus)
    except FileNotFoundError:
        return None if folder.exists() else ExitCode.OK
    except ConfigError:  # it is damaged
        return ExitCode.FAILED
    return ExitCode.OK if status.phase is JobPhase.SUCCEEDED else ExitCode.FAILED


def runs_elsewhere(one: StartedJob, root: Path) -> bool:
    """Return whether a process of another machine or container still has the run of a job.

    Args:
        one: what the record says of the job, whose process does not run here.
        root: the folder of all states.
    """
    if one.code is not None or not (run := run_of(one, root)):
        return False
    return (Path(run) / names.RUN_LOCK).exists() and runs.goes_on(Path(run))


def run_of(one: StartedJob, root: Path) -> str:
    """Return the state folder of the run of a job; empty if it has none.

    If the record does not have it yet, it is the first one after the start of the job's process.

    Args:
        one: what the record says of the job.
        root: the folder of all states.
    """
    if one.run:
        return one.run
    name, stamps = one.job.metadata.name, list[str]()
    with contextlib.suppress(ConfigError):  # another user can write to the folder by now
        stamps = runs.stamps(root, name)
    for stamp in reversed(stamps):
        with contextlib.suppress(ValueError):  # another program has made it
            if runs.began_at(stamp) >= one.started_at - CLOCK_S:
                return str(root / f"{name}@{stamp}")
    return ""


def _boot() -> str:
    """Return the id of this start of this machine; empty if the kernel has none."""
    with contextlib.suppress(OSError), open(BOOT_ID) as file:
        return file.read().strip()
    return ""
