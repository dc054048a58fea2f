"""Starts, watches, stops and reaps the workers of one node, and keeps their logs.

Each worker leads a session of its own, and its end is seen through a pidfd at once. A round is
over when its sessions are empty: a DataLoader child that outlived its worker could hold memory
that the next round needs. Standard output and error go through pipes, so that a full disk costs
log lines and not the training.
"""

import asyncio
import collections
import contextlib
import ctypes
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dlrover_agent import store
from dlrover_agent.core import Emptied, Ended, Event, Stuck
from dlrover_agent.failures import describe
from dlrover_agent.guardian import children, members
from dlrover_agent.settings import Command
from dlrover_agent.store import Store
from dlrover_agent.warm import Birth, Child, Warm
from dlrover_py.protocol import names
from dlrover_py.protocol.agents import Assignment, FailureKind, WorkerFailure

log = logging.getLogger("agent.workers")

LAST_WORDS = 131_072
"""Bytes of standard error that are kept to explain a failure; some exceptions list a model."""
LAST_LINES_S = 1.0
TERM_AFTER_POLITE_S = 1.0
"""A script that asks should_stop() is signalled so long before the end of its grace."""
SURVIVED_KILL_S = 10.0
UNSTARTED_S = 5.0
PER_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_ERROR_FILE", names.ENV_ROUND, names.ENV_RESTART_REASON),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Environment of workers that differs between them, or from round to round."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class _Echo:
    """Shows what workers write on our own output, and never waits for who reads it: a terminal
    that is held (Ctrl-S) or a slow pipe costs lines, not the node's lease."""

    MOST = 1 << 20

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = 0
        self._watching = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def write(self, data: bytes) -> None:
        """Write it as soon as there is room; drop the oldest if there is none for long."""
        self._waiting.append(data)
        self._size += len(data)
        while self._size > self.MOST and len(self._waiting) > 1:
            self._size -= len(self._waiting.popleft())
        self._flush()

    def finish(self, within_s: float) -> None:
        """Write what waits, if somebody takes it in this time."""
        deadline = time.monotonic() + within_s
        self._flush()
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            self._poll.poll(left * 1000)
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if not self._poll.poll(0):
                if not self._watching:
                    self._watching = True
                    loop.add_writer(self._fd, self._flush)
                return
            data = self._waiting.popleft()
            try:
                # There is room for a page at least, if there is any.
                done = os.write(self._fd, data[: select.PIPE_BUF])
            except OSError:  # nobody looks any more
                done = len(data)
            self._size -= done
            if data[done:]:
                self._waiting.appendleft(data[done:])
        if self._watching:
            self._watching = False
            loop.remove_writer(self._fd)


class _Pump:
    """Moves one stream of a worker into its file (and onto the agent's output)."""

    def __init__(self, fd: int, path: Path | None, echo: _Echo | None, prefix: str) -> None:
        self._fd, self._path, self._echo = fd, path, echo
        self._prefix = prefix.encode()
        self.tail: collections.deque[bytes] = collections.deque()
        self._kept = 0
        self._file: BinaryIO | None = None
        self._said = False
        self._new_line = True
        os.set_blocking(fd, False)
        if path is not None:
            with self._losing_lines():
                self._file = path.open("ab", buffering=0)
        asyncio.get_running_loop().add_reader(fd, self.drain)

    def drain(self) -> None:
        """Take what is there."""
        for _ in range(16):  # one loud worker must not keep the agent from its other duties
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._fd)
                return
            self._take(data)

    def close(self) -> None:
        """Take the rest, and let go."""
        asyncio.get_running_loop().remove_reader(self._fd)
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._take(data)
        os.close(self._fd)
        if self._file is not None:
            self._file.close()

    def _take(self, data: bytes) -> None:
        self.tail.append(data[-LAST_WORDS:])
        self._kept += len(self.tail[-1])
        while self._kept - len(self.tail[0]) >= LAST_WORDS:
            self._kept -= len(self.tail.popleft())
        with self._losing_lines():
            if self._file is None and self._path is not None:
                self._file = self._path.open("ab", buffering=0)
            if self._file is not None:
                self._file.write(data)
        if self._echo is not None:
            self._echo.write(self._prefixed(data) if self._prefix else data)

    def _prefixed(self, data: bytes) -> bytes:
        lines = data.split(b"\n")
        out = b"\n".join(
            self._prefix + line if line and (i or self._new_line) else line
            for i, line in enumerate(lines)
        )
        self._new_line = not lines[-1]
        return out

    @contextlib.contextmanager
    def _losing_lines(self) -> Iterator[None]:
        """A full or lost disk costs log lines, not the training."""
        try:
            yield
        except OSError as error:
            if not self._said:
                self._said = True
                log.warning(
                    "log_lines_lost", extra={"path": str(self._path), "why": error.strerror}
                )
            if error.errno != errno.ENOSPC:
                self._path = self._file = None


@dataclass(slots=True)
class _Worker:
    local_rank: int
    rank: int
    argv: list[str]
    env: dict[str, str]
    error_file: Path
    errors: _Pump
    out: _Pump | None
    """None: standard output is the agent's."""
    pid: int = 0
    pidfd: int = -1
    wait: Callable[[], int] = int
    """Takes the exit code (or the negative signal number) of the process, once it has ended."""
    child: Child | None = None
    """Of a zygote; None for a cold start."""
    started_at: float = field(default_factory=time.monotonic)
    ended: bool = False


_Pipes = tuple[_Worker, int | None, int]
"""A worker that is to be started, and the ends of its pipes that are its standard output (None:
the agent's) and error."""


class Workers:
    """The worker processes of one round at a time."""

    def __init__(
        self,
        command: Command,
        post: Callable[[Event], None],
        *,
        guard: Callable[[str], None],
        last_step: Callable[[int], int | None],
        sdk_socket: Path,
        scratch: Path,
        node_id: str,
        run_id: str,
        kin: set[int],
        changed: Callable[[], None],
    ) -> None:
        """Remember what to run.

        Args:
            command: what each worker runs.
            post: takes what happens to them.
            guard: tells the guardian of a session (``+1234``, ``-1234``).
            last_step: newest step that a local rank has reported.
            sdk_socket: where the agent listens to the trainer SDK.
            scratch: folder for error files.
            node_id: for the logs' path.
            run_id: TORCHELASTIC_RUN_ID.
            kin: children of this process that are no workers, nor what workers have left.
            changed: called when there is news of warm starts.
        """
        self._command, self._post, self._guard = command, post, guard
        self._last_step, self._scratch = last_step, scratch
        self._node_id, self._kin = node_id, kin
        self._base = _base_environment(command, run_id, sdk_socket)
        self.warm = Warm(
            command.argv,
            self._base,
            PER_RANK,
            off=command.cold,
            scratch=scratch,
            kin=kin,
            guard=guard,
            changed=changed,
        )
        self.hosts_store = store.available()
        self._store: Store | None = None
        self._store_used = False
        self._stdout, self._stderr = _Echo(1), _Echo(2)
        self._workers: list[_Worker] = []
        self._assignment: Assignment | None = None
        self._round = 0
        self._stopped = False
        self._timers: list[asyncio.TimerHandle] = []
        self._sweep: asyncio.Task[None] | None = None
        become_subreaper()

    @property
    def pids(self) -> list[int]:
        """By local rank; 0 for one that has ended."""
        return [0 if w.ended else w.pid for w in self._workers]

    @property
    def sessions(self) -> list[int]:
        """All that must end with the agent."""
        store = self._store.pid if self._store is not None else 0
        return [pid for pid in (*self.pids, store, self.warm.pid) if pid]

    async def close(self) -> None:
        """Show the last lines, and end what was kept for the next round."""
        self._end_store()
        await self.warm.close()
        for echo in (self._stdout, self._stderr):
            echo.finish(LAST_LINES_S)

    def start(self, assignment: Assignment, listening: socket.socket | None) -> None:
        """Start the workers of a round. One that cannot be started counts as failed.

        Args:
            assignment: what they are.
            listening: where the store of the round is, if it is here.
        """
        assert threading.current_thread() is threading.main_thread()  # PR_SET_PDEATHSIG
        self._round, self._assignment = assignment.round, assignment
        self._stopped = False
        self._end_store()
        began = time.monotonic()
        pipes = [self._prepare(assignment, i) for i in range(self._command.nproc)]
        self._workers = [worker for worker, _, _ in pipes]
        if listening is not None:
            self._store = Store(
                listening,
                self.warm,
                python=sys.executable,
                env=self._base,
                output=self._scratch / "store.log",
                adopt=self._adopt_store,
                ended=self._store_ended,
                wanted=self._store_used,
            )
        self.warm.forget_records()
        children = self._fork(pipes) if self.warm.ready and not assignment.cold else None
        try:
            for i, (worker, out, err) in enumerate(pipes):
                if children:
                    self._adopt(worker, children[i])
                else:
                    self._start_cold(worker, out, err)
        except OSError as error:
            for other in self._workers[worker.local_rank + 1 :]:  # those are not started at all
                other.ended = True
                self._close_pumps(other)
            self._unstartable(worker, error)
        finally:
            for _, out, err in pipes:
                for fd in (out, err):
                    if fd is not None:
                        os.close(fd)
        took = round(time.monotonic() - began, 4)
        log.info("workers_started", extra={"warm": bool(children), "took_s": took})
        self.warm.watch(self._store.start if self._store else lambda: None)
        if children:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(UNSTARTED_S, self._kill_unstarted))

    def stop(self, grace_s: float, number: int, *, spare: set[int] | None = None) -> None:
        """Signal the workers (those in ``spare`` only shortly before the end of the grace), and
        kill what is left after the grace."""
        loop = asyncio.get_running_loop()
        self._stopped = True
        spare = spare or set()
        self._signal(number, [w for w in self._workers if w.local_rank not in spare])
        if spare:
            kept = [w for w in self._workers if w.local_rank in spare]
            delay = max(0.0, grace_s - TERM_AFTER_POLITE_S)
            self._timers.append(loop.call_later(delay, self._signal, number, kept))
        self._timers.append(loop.call_later(grace_s, self.kill))
        if all(w.ended for w in self._workers):
            self._all_ended()

    def kill(self) -> None:
        """SIGKILL all of them, now."""
        self._stopped = True
        self._signal(signal.SIGKILL, self._workers)
        if all(w.ended for w in self._workers):
            self._all_ended()

    def _signal(self, number: int, workers: list[_Worker]) -> None:
        for worker in workers:
            if not worker.ended and worker.pid:
                # Where SIGTERM would only kill, SIGKILL does so without waiting for its turn.
                fatal = number == signal.SIGTERM and not _minds(worker.pid, number)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL if fatal else number)

    def _prepare(self, assignment: Assignment, local_rank: int) -> "_Pipes":
        """All but the process: its environment, and where its output goes."""
        rank = assignment.rank_offset + local_rank
        folder = self._log_folder(assignment, rank)
        error_file = (folder or self._scratch) / f"error-{assignment.round}-{local_rank}.json"
        with contextlib.suppress(OSError):
            error_file.unlink(missing_ok=True)
        # Without files the output is ours, as with torchrun; but the last words on standard
        # error are kept, since they tell why a worker died.
        filed = self._command.log_dir is not None
        prefix = f"[rank{rank}]: " if filed else ""
        echo = self._command.echo or not filed
        read, err = os.pipe()
        errors = _Pump(
            read, folder and folder / "stderr.log", self._stderr if echo else None, prefix
        )
        pump = out = None
        if filed:
            read, out = os.pipe()
            file = folder and folder / "stdout.log"
            pump = _Pump(read, file, self._stdout if echo else None, prefix)
        worker = _Worker(
            local_rank,
            rank,
            [part.replace("${local_rank}", str(local_rank)) for part in self._command.argv],
            {**self._base, **_environment(assignment, self._command.nproc, local_rank, error_file)},
            error_file,
            errors,
            pump,
        )
        worker.env["TORCHELASTIC_USE_AGENT_STORE"] = str(self.hosts_store)
        return worker, out, err

    def _fork(self, pipes: "list[_Pipes]") -> list[Child] | None:
        return self.warm.fork(
            [Birth(w.argv, w.env, 1 if out is None else out, err) for w, out, err in pipes]
        )

    def _start_cold(self, worker: _Worker, out: int | None, err: int) -> None:
        argv = worker.argv
        if not self.warm.off:
            argv = self.warm.observed(worker.local_rank, argv)
        worker.started_at = time.monotonic()
        process = subprocess.Popen(
            argv,
            env=worker.env,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        worker.wait = process.wait
        self._begin(worker, process.pid)

    def _adopt(self, worker: _Worker, child: Child) -> None:
        worker.child, worker.wait = child, child.wait
        worker.started_at = time.monotonic()
        self._begin(worker, child.pid)
        child.go()

    def _begin(self, worker: _Worker, pid: int) -> None:
        worker.pid = pid
        self._guard(f"+{pid}")
        worker.pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(worker.pidfd, self._exited, worker)

    def _unstartable(self, worker: _Worker, error: OSError) -> None:
        """The operating system refuses this worker."""
        worker.ended = True
        self._close_pumps(worker)
        program = worker.argv[0]
        failure = WorkerFailure(
            kind=FailureKind.START,
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=0,
            exit_code=127,
            message=f"could not be started: {program}: {error.strerror}",
            fingerprint=f"start|{error.errno}|{program}",
        )
        self._post(Ended(self._round, worker.local_rank, failure))
        if all(w.ended for w in self._workers):
            self._all_ended()

    def _kill_unstarted(self) -> None:
        """A forked worker that hangs before the user's code is started cold instead."""
        self._signal(
            signal.SIGKILL,
            [w for w in self._workers if w.child and not w.ended and not w.child.started()],
        )

    def _again(self, worker: _Worker) -> None:
        """Start a worker cold whose fork did not get as far as the user's code."""
        assert self._assignment is not None
        log.warning("warm_start_failed", extra={"rank": worker.rank, "then": "cold start"})
        self._guard(f"-{worker.pid}")
        fresh, out, err = self._prepare(self._assignment, worker.local_rank)
        self._workers[worker.local_rank] = fresh
        try:
            self._start_cold(fresh, out, err)
        except OSError as error:
            self._unstartable(fresh, error)
        finally:
            os.close(err)
            if out is not None:
                os.close(out)

    def _adopt_store(self, pid: int) -> None:
        self._store_used = True
        self._kin.add(pid)
        self._guard(f"+{pid}")

    def _store_ended(self, why: str) -> None:
        if not self._stopped and self._workers and not all(w.ended for w in self._workers):
            failure = WorkerFailure(
                kind=FailureKind.START,
                local_rank=0,
                rank=0,
                pid=0,
                exit_code=1,
                message=f"the store of the round has ended: {why}",
                fingerprint="store",
            )
            self._post(Ended(self._round, -1, failure))

    def _log_folder(self, assignment: Assignment, rank: int) -> Path | None:
        """``<dir>/<node>/<incarnation>/<round>/<rank>``; None where it cannot be made."""
        if self._command.log_dir is None:
            return None
        round_folder = Path(str(assignment.incarnation)) / str(assignment.round)
        folder = self._command.log_dir / self._node_id / round_folder / str(rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("log_lines_lost", extra={"path": str(folder), "why": error.strerror})
            return None
        return folder

    def _exited(self, worker: _Worker) -> None:
        asyncio.get_running_loop().remove_reader(worker.pidfd)
        code = worker.wait()  # the pidfd says that it has ended
        worker.ended = True
        os.close(worker.pidfd)
        self._close_pumps(worker)
        failure = self._failure(worker, code) if code else None
        if worker.child is not None:
            started = worker.child.started()
            worker.child.control.close()
            if not started and not self._stopped:
                self._again(worker)
                return
        self._post(Ended(self._round, worker.local_rank, failure))
        if all(w.ended for w in self._workers):
            self._all_ended()

    def _close_pumps(self, worker: _Worker) -> None:
        worker.errors.close()
        if worker.out is not None:
            worker.out.close()

    def _end_store(self) -> None:
        if self._store is not None:
            self._store.end()
            if self._store.pid:
                self._kin.discard(self._store.pid)
                self._guard(f"-{self._store.pid}")
            self._store = None

    def _failure(self, worker: _Worker, code: int) -> WorkerFailure:
        text = ""
        with contextlib.suppress(OSError):
            text = worker.error_file.read_text(errors="replace")
        words = b"".join(worker.errors.tail)
        return describe(
            exit_code=code,
            forked=worker.child is not None,
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=worker.pid,
            error_file=text,
            last_words=words[-LAST_WORDS:].decode("utf-8", "replace"),
            step=self._last_step(worker.local_rank),
            ran_s=time.monotonic() - worker.started_at,
        )

    def _all_ended(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._stopped:  # else workers of other nodes may still use it
            self._end_store()
        if self._sweep is None:
            self._sweep = asyncio.create_task(self._empty_sessions())

    async def _empty_sessions(self) -> None:
        """Kill what the workers have left in their sessions, and wait until it is gone."""
        sessions = {w.pid for w in self._workers if w.pid}
        deadline = time.monotonic() + SURVIVED_KILL_S
        left = self._left(sessions)
        while left and time.monotonic() < deadline:
            await asyncio.gather(*(_kill(pid, deadline) for pid in left))
            reap_orphans(self._kin)
            left = self._left(sessions)
        self._sweep = None
        for session in sessions:
            self._guard(f"-{session}")
        if left:
            self._post(Stuck(self._round, tuple(left)))
        else:
            self._post(Emptied(self._round))

    def _left(self, sessions: set[int]) -> list[int]:
        """What is there of the round: its sessions, and what went into a session of its own and
        is our child now, since we are the subreaper of what lost its parent."""
        strays = [pid for pid in children(os.getpid()) if pid not in self._kin]
        return [*(members(sessions) if sessions else []), *strays]


async def _kill(pid: int, deadline: float) -> None:
    """SIGKILL a process that is not our child, and wait for its end."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(fd, gone.set)
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _minds(pid: int, number: int) -> bool:
    """Whether a process handles, waits for or ignores this signal: it would not just die of it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as status:
        masks = [line.split()[1] for line in status if line.startswith(_MASKS)]
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


_MASKS = (b"SigBlk:", b"SigIgn:", b"SigCgt:")


def _base_environment(command: Command, run_id: str, sdk_socket: Path) -> dict[str, str]:
    """What the environments of this node's workers have in common, in all rounds."""
    env = {k: v for k, v in command.inherit.items() if k not in names.PRIVATE_ENV}
    if command.nproc > 1:
        env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: not nproc times all cores
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    for name in PER_RANK:
        env.pop(name, None)
    return env | {"TORCHELASTIC_RUN_ID": run_id, names.ENV_AGENT_SOCKET: str(sdk_socket)}


def _environment(a: Assignment, nproc: int, local_rank: int, error_file: Path) -> dict[str, str]:
    """What differs, as torchrun (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    rank = a.rank_offset + local_rank
    values = (
        rank,
        local_rank,
        a.node_rank,
        rank,
        "default",
        a.world_size,
        nproc,
        a.nnodes,
        a.world_size,
        a.master_addr,
        a.master_port,
        a.restart_count,
        a.max_restarts,
        error_file,
        a.round,
        a.reason if a.round > 1 else "",
    )
    return {name: str(value) for name, value in zip(PER_RANK, values, strict=False)}


def become_subreaper() -> None:
    """Orphans of our workers become our children, so that they can be waited for."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        log.warning("no_subreaper", extra={"why": os.strerror(ctypes.get_errno())})


def reap_orphans(known: set[int]) -> None:
    """Take the exit status of ended children that nobody else waits for."""
    for pid in children(os.getpid(), ended=True):
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _die_with_parent(parent: int) -> Callable[[], None]:
    def before_exec() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return before_exec
