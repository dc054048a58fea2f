"""Unique identifiers of processes and sessions, which never refer to another program.

A process id belongs to a process until its parent has reaped it, and to a session until it is
empty. Then the kernel may reuse it for any program. A :class:`ProcessId` also has the start time,
and signals are sent through a pidfd. So a signal never reaches another program.

The module needs only the standard library, because the agent's reaper runs without packages.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import subprocess

EXEC_S = 2.0
"""Most seconds that :func:`environment` waits for a process that is in execve(2)."""
MAX_ENVIRONMENT_BYTES = 6 * 2**20
"""Largest number of bytes of arguments and environment that execve(2) accepts."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def ignores_signal(number: int) -> bool:
    """Return whether this program must ignore a signal: it is SIGHUP, and nohup is in use.

    Call it before the program sets a handler of its own for the signal. Other signals that were
    ignored at the start are not such a request. A shell without job control ignores SIGINT and
    SIGQUIT for each program that it starts in the background.
    """
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


SENT_TO_ALL = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""Signals that a terminal or a batch system sends to all processes of a job."""


@contextlib.contextmanager
def shielded_child() -> Iterator[None]:
    """Block the signals of :data:`SENT_TO_ALL` in processes that this thread starts meanwhile.

    The signal mask outlives exec, so such a signal cannot kill the process while it imports its
    modules. The new process calls :func:`ignore_sent_to_all` when it is ready. This thread does not
    get these signals meanwhile either.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_sent_to_all() -> None:
    """Ignore the signals of :data:`SENT_TO_ALL`, including those that came while they were blocked.

    The parent ends this process in another way. Only the main thread may call this function.
    """
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_ALL)


class ProcessId(NamedTuple):
    """The unique identifier of a process, or of the session that it leads."""

    pid: int
    started: int
    """Start time in clock ticks after boot: field 22 of ``/proc/PID/stat``."""

    def __str__(self) -> str:
        return f"{self.pid}@{self.started}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an identifier that :meth:`__str__` has written.

        Raises:
            ValueError: If the text is not an identifier.
        """
        pid, _, started = text.partition("@")
        return cls(int(pid), int(started))

    @classmethod
    def of(cls, pid: int) -> Self:
        """Return the identifier of the process with a process id. It may be a zombie.

        Raises:
            ProcessLookupError: If there is no such process, or it may not be read.
        """
        found = _read_stat(pid)
        if found is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(*found.id)

    @property
    def alive(self) -> bool:
        """Whether the process runs. A zombie does not run."""
        found = _read_stat(self.pid)
        return found is not None and found.id == self and not found.ended

    def open(self) -> int:
        """Open a file descriptor of the process (pidfd_open(2)), which the caller must close.

        Raises:
            ProcessLookupError: If the process is gone.
            OSError: If this process may open no more files.
        """
        fd = os.pidfd_open(self.pid)
        # Check after the open: if the identity matches now, the descriptor is of this process.
        found = _read_stat(self.pid)
        if found is None or found.id != self:
            os.close(fd)
            raise ProcessLookupError(f"process {self} is gone")
        return fd

    def signal(self, number: int) -> None:
        """Send a signal, if the process exists and this user may signal it; else do nothing.

        Raises:
            OSError: If this process may open no more files.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            fd = self.open()
            try:
                signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


class Process(NamedTuple):
    """The state of a process at one moment."""

    id: ProcessId
    parent: int
    """Process id of its parent."""
    session: int
    """Process id of its session's leader."""
    ended: bool
    """Whether all threads of the process have ended.

    A process whose main thread has ended still runs while another thread hangs in a driver. It then
    still holds all of its open files.
    """


def _read_stat(pid: int) -> Process | None:
    """Return the state of a process; None if there is no such process or it may not be read."""
    try:
        # Without a file object, which takes twice the time: a restart reads all processes twice.
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            # pid (name) state ppid pgrp session …; the name may hold anything.
            fields = os.read(stat, 4096).rpartition(b")")[2].split()
        finally:
            os.close(stat)
        ended = fields[0] in (b"Z", b"X") and fields[17] == b"1"
        return Process(ProcessId(pid, int(fields[19])), int(fields[1]), int(fields[3]), ended)
    except (FileNotFoundError, ProcessLookupError, PermissionError, IndexError):
        return None


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP, Ctrl-Z); False if it may not be read."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as stat:
        return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


def _process_ids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def all_processes() -> Iterator[Process]:
    """Return all processes that can be read in this process's view of ``/proc``.

    The process ids are read now, and each state when the iterator reaches it.
    """
    return (found for pid in _process_ids() if (found := _read_stat(pid)) is not None)


def members(
    sessions: Collection[ProcessId], among: Collection[Process] | None = None
) -> list[Process]:
    """Return the running processes of sessions. A session is identified by its leader.

    A zombie is left out unless one of its threads runs. A process that cannot be read is left out.
    Do not use an identifier once its leader is reaped and its session is empty: the kernel may then
    give its number to another process. Without sessions, nothing is read.

    Args:
        sessions: The leaders of the sessions.
        among: All processes; None to read them now.

    Raises:
        OSError: There are no more file descriptors.
    """
    if not sessions:
        return []
    now = {found.id.pid: found for found in (all_processes() if among is None else among)}
    numbers = {s.pid for s in sessions if s.pid not in now or now[s.pid].id == s}
    return [found for found in now.values() if found.session in numbers and not found.ended]


def children(
    parent: int, *, ended: bool = False, among: Collection[Process] | None = None
) -> list[ProcessId]:
    """Return the children of a process that run, or with ``ended`` those that are zombies.

    Args:
        parent: Process id of their parent.
        ended: Whether to return zombies.
        among: All processes; None to read them now.
    """
    processes = all_processes() if among is None else among
    return [found.id for found in processes if found.parent == parent and found.ended is ended]


def descendants(ancestor: int, among: Collection[Process]) -> list[int]:
    """Return the process ids of the children of a process that run, of their children, and so on.

    Args:
        ancestor: Process id of the ancestor, which is left out.
        among: All processes.
    """
    children_of: dict[int, list[int]] = {}
    for process in among:
        children_of.setdefault(process.parent, []).append(process.id.pid)
    running = {process.id.pid for process in among if not process.ended}
    found, todo = list[int](), [ancestor]
    while todo:
        younger = children_of.pop(todo.pop(), [])
        found += younger
        todo += younger
    return [pid for pid in found if pid in running]


def children_of_thread(thread: int) -> set[int]:
    """Return the process ids of unreaped children that a thread of this process has forked.

    ``thread`` is its native id, as of ``threading.get_native_id()``. The set is empty if the thread
    has ended, or if the kernel does not list children.
    """
    try:
        with open(f"/proc/self/task/{thread}/children", "rb") as file:
            return set(map(int, file.read().split()))
    except OSError:  # the thread has ended, or the kernel has no such file
        return set()


def forked_by_other_threads() -> set[int]:
    """Return the process ids of children that other threads than the main thread have forked.

    The code that has started them reaps them. An orphan that the kernel gives to this process is a
    child of the main thread (find_new_reaper in the kernel's exit.c).
    """
    main = os.getpid()
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    return set().union(*(children_of_thread(thread) for thread in threads if thread != main))


def children_of_main_thread() -> set[int]:
    """Return the process ids of unreaped children of the main thread, with orphans of this process.

    A child that ends meanwhile may be missing: the kernel does not promise a complete list.

    Raises:
        OSError: There are no more file descriptors.
    """
    main = os.getpid()
    if os.path.exists(f"/proc/self/task/{main}/children"):
        return children_of_thread(main)
    # A kernel without CONFIG_PROC_CHILDREN.
    return {found.id.pid for found in all_processes() if found.parent == main}


def marked(name: str, value: str) -> list[ProcessId]:
    """Find processes with a value of an environment variable, in this process's control groups.

    Groups below this process's groups are included. Other groups are not: batch systems such as
    Slurm pass the environment on to submitted jobs, which are not part of this job. They have
    their own groups.

    Processes that this user may not read are left out. A read may take ``EXEC_S`` seconds, or hang
    with its process.
    """
    own, needle, found = _groups("self"), os.fsencode(f"{name}={value}"), []
    for pid in _process_ids():
        with contextlib.suppress(OSError):
            # Before the environment is read, so that it cannot be that of a later process.
            process = ProcessId.of(pid)
            if not is_within(_groups(pid), own):
                continue
            if needle in environment(pid).split(b"\0") and process.alive:
                found.append(process)
    return found


def environment(pid: int, max_bytes: int = MAX_ENVIRONMENT_BYTES) -> bytes:
    """Return the environment that a process was started with, as in ``/proc/PID/environ``.

    While a process is in execve(2), that file is empty although the process has an environment.
    It is read again then, for at most ``EXEC_S`` seconds.

    Args:
        pid: Process id.
        max_bytes: Largest number of bytes to read.

    Returns:
        The variables with a NUL after each. Empty if the process has ended, is a kernel thread, has
        no environment, or is still in execve after ``EXEC_S`` seconds.

    Raises:
        OSError: If there is no such process, or it may not be read.
    """
    deadline = time.monotonic() + EXEC_S
    while True:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            # One call: after an execve, a second one would return nothing.
            text = file.read(max_bytes)
        if text or _is_really_empty(pid) or time.monotonic() > deadline:
            return text
        time.sleep(0.001)  # noqa: TID251 - the kernel has no event for this


def _is_really_empty(pid: int) -> bool:
    """Return whether a process whose environment was read as empty has none.

    Raises:
        OSError: If there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    # Fields 23, 26, 50 and 51. execve sets the second one after it has copied the environment.
    memory, code, start, end = (int(fields[n]) for n in (20, 23, 47, 48))
    return memory == 0 or (code != 0 and start == end)


def _groups(pid: int | str) -> list[bytes]:
    """Return the lines of ``/proc/PID/cgroup``; none if the file does not exist."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            return file.read().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []  # a kernel without control groups


def is_within(groups: list[bytes], outer: list[bytes]) -> bool:
    """Return whether a process's control groups are the same as another's, or below them.

    Args:
        groups: Lines of ``/proc/PID/cgroup`` of the process to check.
        outer: Lines of the other process.
    """
    return len(groups) == len(outer) and all(
        inner == limit or (inner.startswith(limit.rstrip(b"/") + b"/") and b"/.." not in inner)
        for inner, limit in zip(groups, outer, strict=True)
    )


def signal_all(find: Callable[[], Iterable[ProcessId]], number: int) -> None:
    """Signal all processes that a search finds, and repeat it until it finds no new one.

    Each process gets one signal. The function does not wait for their ends.
    """
    done: set[ProcessId] = set()
    while fresh := set(find()) - done:
        for process in fresh:
            process.signal(number)
        done |= fresh


def exit_code(id_type: int, number: int) -> int | None:
    """Return the exit code of a child without reaping it, so that its process id stays reserved.

    Args:
        id_type: ``os.P_PID`` or ``os.P_PIDFD``.
        number: Process id or file descriptor.

    Returns:
        The exit code, or the negative signal number; None if the child has not ended.

    Raises:
        ChildProcessError: It is no child, or was reaped.
    """
    info = os.waitid(id_type, number, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def signal_at_parents_end(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    More exactly, the kernel sends it when the thread ends that has forked this process. There is no
    signal if the parent ended before the call: compare ``os.getppid()``.

    An error of the kernel is ignored.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit with 1 if the parent has ended.

    The parent is the thread that has forked this process.

    Args:
        parent: Process id of the parent.
    """
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


async def ended(process: "subprocess.Popen[bytes]") -> int:
    """Wait for the end of a child by its pidfd, reap it, and return its exit code.

    The code is negative after a signal. There is no time limit. If ``process`` has reaped the child
    before, the call returns immediately. If other code reaps the child meanwhile, the result is 0.

    Raises:
        ProcessLookupError: Other code has reaped the child before the call.
    """
    import asyncio  # here, because the reaper does not need it

    if process.returncode is not None:
        return process.returncode
    fd = os.pidfd_open(process.pid)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return process.wait()
