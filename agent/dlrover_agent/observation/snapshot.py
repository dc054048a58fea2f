"""What the workers of this node do: taken when the master asks, and before a fault ends a round.

A worker's probe answers even while its script hangs. A worker that does not answer (a signal has
stopped it, it keeps Python's lock, or it has no probe) is read from outside by ``py-spy``, which
does not stop it. The kernel says the rest. Each part has a limit, and what is missing is named.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from dlrover_agent.channels.probe_socket import ProbeServer
from dlrover_py.pacing import Backoff
from dlrover_py.process.blocking import BackgroundThread, OverdueError
from dlrover_py.process.identity import ProcessId, all_processes, descendants
from dlrover_py.protocol import json_text
from dlrover_py.protocol.agents import Assignment, Directive, FailureKind, WorkerFailure
from dlrover_py.protocol.diagnosis import (
    LAST_LOOK_NODES,
    MAX_FRAMES,
    MAX_LAST_BYTES,
    MAX_LINES,
    MAX_THREADS,
    NodeSnapshot,
    ThreadStack,
    WorkerSnapshot,
    max_snapshot_bytes,
)
from dlrover_py.protocol.errors import DLRoverError, TransientError
from dlrover_py.protocol.words import counted

log = logging.getLogger("agent.snapshot")

ANSWER_S = 2.0
"""Seconds that a worker's probe has to answer."""
SAMPLE_S = 1.0
"""Seconds over which the CPU time of the workers is measured."""
PY_SPY_S = 4.0
"""Seconds for all calls of py-spy on this node."""
LAST_LOOK_S = 0.03
"""Seconds that all probes have to answer before the workers of a round that a fault ends are
stopped. The next round starts that much later at most."""
LAST_SEND_S = 1.0
"""Seconds that an agent which ends waits for the end of a transfer to the master."""
FILES_S = 2.0
"""Seconds for the files in /proc."""
SEND_TRIES = 4
"""Number of attempts to send a snapshot."""
RETRY = Backoff(first_s=0.2, most_s=1.0)
"""Pauses between them."""
IDLE_CPU = 0.02
"""The workers of a node are idle if they use fewer cores than this together."""
IDLE_IO = 1e6
"""They are not idle if they read and write more bytes a second than this."""
_IO_FIELDS = (b"rchar", b"wchar", b"read_bytes", b"write_bytes")
"""Fields of /proc/PID/io: bytes of calls, and of devices."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class SnapshotMaster(Protocol):
    """The connection to the master, for snapshots."""

    async def send_snapshot(self, body: bytes) -> None:
        """Send a ``NodeSnapshot``.

        Raises:
            DLRoverError: The master does not answer, or refuses it.
        """


class LookedAt(Protocol):
    """A worker, as far as a snapshot needs it."""

    @property
    def process(self) -> ProcessId | None:
        """Its process; None if it has ended, or has no process yet."""

    @property
    def pid(self) -> int:
        """Its process id, also after its end; 0 before its start."""

    @property
    def not_started(self) -> bool:
        """Whether it has no process yet."""

    @property
    def last_lines(self) -> str:
        """The end of its standard error."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the kernel says of a worker's process."""

    state: str
    """State of the process: the letter in /proc/PID/stat."""
    wchan: str
    """Function of the kernel in which the main thread waits; empty if it is not known."""
    kernel: list[str]
    """Kernel stack; empty where it may not be read."""


@dataclass(slots=True)
class IdleClock:
    """For how long the workers of this node have used no CPU time, and read and written nothing.

    Their child processes count, too: they may load data, or compile.
    """

    _clock: Callable[[], float] = time.monotonic
    _own: tuple[float, int] = (0.0, 0)
    """CPU seconds of the workers, and the bytes that they have read and written."""
    _with_children: tuple[float, int] | None = None
    """The same with all their descendants; None if the workers were not idle at the last call."""
    _at: float = 0.0
    _since: float = 0.0
    _pids: tuple[int, ...] = ()

    def seconds(self, pids: Sequence[int]) -> float:
        """Return the seconds for which the workers are idle.

        It reads two files for each worker. While the workers are idle, it lists all processes.

        Args:
            pids: Process ids of the workers; 0 for one that has ended.
        """
        now = self._clock()
        alive = tuple(pid for pid in pids if pid)
        if not alive:
            self._pids, self._since = (), now
            return 0.0
        if alive != self._pids or now - self._at >= 0.5:
            own, passed_s = (sum(map(cpu_time, alive)), sum(map(io_bytes, alive))), now - self._at
            if alive != self._pids or _is_used(self._own, own, passed_s):
                self._since, self._with_children = now, None
            else:
                before = self._with_children
                cpu_s, moved = zip(*_usage(alive).values(), strict=True)
                self._with_children = sum(cpu_s), sum(moved)
                if before is not None and _is_used(before, self._with_children, passed_s):
                    self._since = now
            self._own, self._at, self._pids = own, now, alive
        return max(0.0, now - self._since)


def _is_used(before: tuple[float, int], after: tuple[float, int], passed_s: float) -> bool:
    """Return whether processes were not idle between two readings.

    Args:
        before: CPU seconds and bytes of the first reading.
        after: Those of the second one.
        passed_s: Seconds between them.
    """
    cpu_s, moved = after[0] - before[0], after[1] - before[1]
    return cpu_s > IDLE_CPU * passed_s or moved > IDLE_IO * passed_s


class SnapshotTaker:
    """Takes the snapshots that assignments ask for, one at a time, in a task of its own."""

    last_look_s = LAST_LOOK_S
    """Seconds that all probes have to answer a last look."""

    def __init__(
        self,
        path: Path,
        boot_id: str,
        master: SnapshotMaster,
        workers: Callable[[], Sequence[LookedAt]],
    ) -> None:
        """Listen for the probes of workers; take no snapshot yet.

        Args:
            path: Path of the socket for the probes, of at most 107 bytes.
            boot_id: Random text of this agent process.
            master: Connection to the master.
            workers: Returns the workers by local rank.

        Raises:
            OSError: If the socket cannot be bound.
        """
        self.probes = ProbeServer(path)
        """Knows the probes of the workers."""
        self.idle = IdleClock()
        """For how long the workers are idle."""
        self._boot_id, self._master = boot_id, master
        self._workers = workers
        self._round: Assignment | None = None
        """The node's place in the newest round or check; None before the first one."""
        self._taken = 0
        self._task: asyncio.Task[None] | None = None
        self._answers: dict[int, dict[str, Any]] | None = None
        """Answers of the last look at the round, by local rank; None if there was none."""
        self._stop: Callable[[], None] | None = None
        """Function that stops the workers once the last look is over; None if none waits."""
        self._looking: asyncio.Task[None] | None = None
        """The task of the last look; the transfer of what it has seen."""
        self._sending: asyncio.Task[None] | None = None
        self._thread = BackgroundThread("snapshot")

    def new_round(self, assignment: Assignment) -> None:
        """Note the node's place in the round or check whose workers start now."""
        self._round = assignment
        self.probes.new_round(assignment.round)

    def assigned(self, assignment: Assignment) -> None:
        """Begin the snapshot that an assignment asks for, unless it was taken already."""
        asked = assignment.snapshot
        if assignment.directive is not Directive.RUN or not asked or asked == self._taken:
            return
        self._taken = asked
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._take(assignment))

    async def close(self) -> None:
        """Give up the snapshot that is under way, and stop listening.

        A transfer of a last look has ``LAST_SEND_S`` to end.
        """
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=LAST_SEND_S)
        tasks = [t for t in (self._task, self._looking, self._sending) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.probes.close()

    # --- The last look at a round that a fault ends ---

    def begin_last_look(self) -> None:
        """Begin to ask all workers what they do, because one of them has failed.

        They have ``last_look_s`` to answer. Workers that have ended are not asked. There is one
        look at a round: later ones would show how its workers end.
        """
        ranks = [rank for rank, w in enumerate(self._workers()) if w.process is not None]
        if self._answers is None and ranks:
            self._answers = {}
            self._looking = asyncio.create_task(self._look_before_stop(ranks, self._answers))

    def stop_workers(self, stop: Callable[[], None], *, look: bool) -> None:
        """Call a function that stops the workers, after a last look at them if it is wanted.

        With a look, it is called after ``last_look_s`` at the latest, or with :meth:`stop_now`. A
        second stop does not wait.

        Args:
            stop: The function.
            look: Whether to ask all workers first what they do.
        """
        first = self._stop is None
        self.stop_now()
        if look:
            self.begin_last_look()
            self._answers = {} if self._answers is None else self._answers
        if look and first and self._looking is not None and not self._looking.done():
            self._stop = stop
        else:
            stop()

    async def _look_before_stop(self, ranks: Sequence[int], answers: dict[int, Any]) -> None:
        """Ask these workers at the same time, and stop them if a stop waits for their answers."""
        try:
            found = await asyncio.gather(*(self._ask(rank, self.last_look_s) for rank in ranks))
            answers.update(zip(ranks, found, strict=True))
        finally:
            self.stop_now()

    def stop_now(self) -> None:
        """Stop the workers that a last look keeps waiting, if there are any."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def round_over(self, failures: Sequence[WorkerFailure]) -> None:
        """Begin to send the last look at a round; do nothing if there was none.

        The first nodes of the round send it, and those on which a worker has failed by itself. On
        all nodes, workers fail because they have lost another one. A transfer of the round before
        is given up.

        Args:
            failures: Failures of this node's workers.
        """
        answers, self._answers, self._stop = self._answers, None, None
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        assignment = self._round
        if answers is None or assignment is None or assignment.directive is not Directive.RUN:
            return
        fault = any(one.kind is not FailureKind.PEER for one in failures)
        if assignment.node_rank >= LAST_LOOK_NODES and not fault:
            return
        failed = {failure.local_rank: failure for failure in failures}
        workers = []
        for local_rank, worker in enumerate(self._workers()):
            fields = {"recorded": False, **answers.get(local_rank, {"recorded": True})}
            fields |= {"rank": assignment.rank_offset + local_rank, "local_rank": local_rank}
            # A process that has answered was alive; its state and CPU time were not read.
            fields["pid"] = worker.pid if local_rank in answers else 0
            fields["output"] = worker.last_lines.splitlines()[-MAX_LINES:]
            seen = _checked(fields)
            workers.append(seen.model_copy(update={"failure": failed.get(local_rank)}))
        look = self._snapshot(0, assignment.round, workers)
        if self._sending is not None:
            self._sending.cancel()
        self._sending = asyncio.create_task(self._send(look.fitted(MAX_LAST_BYTES)))

    # --- Snapshots for the master ---

    async def _take(self, assignment: Assignment) -> None:
        """Take a snapshot and send it. A failure is only logged."""
        workers = await self.look(assignment.rank_offset)
        snapshot = self._snapshot(assignment.snapshot, assignment.round, workers)
        await self._send(snapshot.fitted(max_snapshot_bytes(assignment.nnodes)))

    def _snapshot(
        self, number: int, round_number: int, workers: list[WorkerSnapshot]
    ) -> NodeSnapshot:
        """Return the snapshot of this node."""
        return NodeSnapshot(
            boot_id=self._boot_id, number=number, round=round_number, workers=workers
        )

    async def _send(self, snapshot: NodeSnapshot) -> None:
        """Send a snapshot to the master. A failure is only logged."""
        body = snapshot.model_dump_json(exclude_defaults=True).encode()
        for tries in range(SEND_TRIES):
            try:
                await self._master.send_snapshot(body)
                return
            except TransientError as error:
                log.debug("snapshot_retry", extra={"why": str(error)})
            except DLRoverError as error:
                log.warning("snapshot_refused", extra={"why": str(error)})
                return
            await asyncio.sleep(RETRY.delay_s(tries))
        log.warning("snapshot_not_sent", extra={"number": snapshot.number})

    async def look(self, rank_offset: int) -> list[WorkerSnapshot]:
        """Return what each worker does now; it takes ``SAMPLE_S`` and some seconds at most.

        Args:
            rank_offset: Global rank of the worker with local rank 0.
        """
        workers = self._workers()
        processes = [worker.process for worker in workers]
        not_started = [worker.not_started for worker in workers]
        pids = [process.pid for process in processes if process is not None]
        answers = await asyncio.gather(
            *(
                self._ask(local_rank) if process is not None else _nothing()
                for local_rank, process in enumerate(processes)
            )
        )
        # Not at the same time: an answer may need modules, which the probe reads and imports.
        before = await self._in_thread(lambda: _usage(pids), FILES_S, {})
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(SAMPLE_S)
        after = await self._in_thread(lambda: _usage(pids), FILES_S, {})
        elapsed = asyncio.get_running_loop().time() - began
        facts = await self._in_thread(
            lambda: {pid: process_facts(pid) for pid in pids}, FILES_S, {}
        )
        silent = [
            process.pid
            for process, answer in zip(processes, answers, strict=True)
            if process is not None and not answer.get("stack")
        ]
        spied: Mapping[int, dict[str, Any]] = {}
        if silent:
            spied = await self._in_thread(
                lambda: spy(silent), PY_SPY_S + 1, {pid: {} for pid in silent}
            )
        found = []
        for local_rank, (process, answer) in enumerate(zip(processes, answers, strict=True)):
            rank = rank_offset + local_rank
            if process is None:
                found.append(
                    WorkerSnapshot(
                        rank=rank,
                        local_rank=local_rank,
                        starting=not_started[local_rank],
                        recorded=True,
                    )
                )
                continue
            pid = process.pid
            fields = {"recorded": False, **answer}
            if not fields.get("stack"):
                fields |= spied.get(pid, {})
            now = after.get(pid, (0.0, 0))
            cpu_s, io_bytes = (
                max(0.0, late - early)
                for early, late in zip(before.get(pid, now), now, strict=True)
            )
            seen = facts.get(pid)
            fields |= {"rank": rank, "local_rank": local_rank, "pid": pid}
            fields |= {"cpu": cpu_s / elapsed, "io_bytes_per_s": io_bytes / elapsed}
            if seen is not None:
                fields |= {"state": seen.state, "wchan": seen.wchan, "kernel": seen.kernel}
            found.append(_checked(fields))
        return found

    async def _ask(self, local_rank: int, within_s: float = ANSWER_S) -> dict[str, Any]:
        """Ask a worker's probe. Return its answer, or a remark that it did not answer."""
        line = await self.probes.ask(local_rank, within_s)
        if line is None:
            return {"remarks": ["its probe does not answer"]}
        try:
            answer = json_text.decoded(line)
        except ValueError as error:
            return {"remarks": [f"its probe's answer is not understood: {error}"]}
        return answer if isinstance(answer, dict) else {}

    async def _in_thread(self, call: Callable[[], Any], within_s: float, otherwise: Any) -> Any:
        """Return the result of a call in the thread, or ``otherwise`` if it is late or fails."""
        try:
            return await self._thread.run(call, within_s)
        except (OSError, OverdueError) as error:
            log.debug("snapshot_incomplete", extra={"why": str(error)})
            return otherwise


async def _nothing() -> dict[str, Any]:
    """Return no answer, for a worker without a process."""
    return {}


def _checked(fields: dict[str, Any]) -> WorkerSnapshot:
    """Return a worker's snapshot; what it has said is left out if it is malformed."""
    try:
        return WorkerSnapshot.model_validate(fields)
    except ValidationError:
        own = ("rank", "local_rank", "pid", "cpu", "io_bytes_per_s", "state", "wchan", "kernel")
        kept = {name: fields[name] for name in own if name in fields}
        return WorkerSnapshot(**kept, remarks=["its probe's answer is malformed"])


# --- /proc ---


def cpu_time(pid: int) -> float:
    """Return the CPU time of a process in seconds; 0 if it has ended."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return 0.0


def io_bytes(pid: int) -> int:
    """Return what a process has read and written so far; 0 if it has ended, or is of another user.

    A call that takes long counts when it ends. What it moves between memory and devices, or servers
    of files, counts at once.
    """
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/{pid}/io", "rb") as file:
            fields = dict(line.split(b":") for line in file.read().splitlines())
        return sum(int(fields[name]) for name in _IO_FIELDS if name in fields)
    return 0


def _usage(pids: Iterable[int]) -> dict[int, tuple[float, int]]:
    """Return CPU time and moved bytes of each worker with its descendants.

    A child may load data, a pool of its own may compile, and the worker may be a shell's child.
    """
    processes, found = list(all_processes()), {}
    for pid in pids:
        family = [pid, *descendants(pid, processes)]
        found[pid] = (sum(map(cpu_time, family)), sum(map(io_bytes, family)))
    return found


def process_facts(pid: int) -> ProcessFacts | None:
    """Return what the kernel says of a process; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            state = stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return None
    wchan, kernel = "", list[str]()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        wchan = file.read().strip().strip("0")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stack") as file:
        kernel = [line.strip() for line in file][:32]
    return ProcessFacts(state, wchan, kernel)


# --- py-spy ---


def spy(pids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the Python stacks of processes, or a remark for each that cannot be read.

    The call blocks for ``PY_SPY_S`` at most. The processes are not stopped.
    """
    program = py_spy()
    if program is None:
        return {pid: {"remarks": ["no Python stack: py-spy is not installed"]} for pid in pids}
    found: dict[int, dict[str, Any]] = {}
    each_s = max(0.5, PY_SPY_S / max(1, len(pids)))
    for pid in pids:
        command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
        try:
            # The code of its exit is not looked at: another part of the agent may reap it.
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=each_s, check=False
            )
            found[pid] = read_spied(done.stdout) or {"remarks": [_why(done.stderr)]}
        except (OSError, subprocess.TimeoutExpired) as error:
            found[pid] = {"remarks": [f"no Python stack: {error}"]}
    return found


def py_spy() -> str | None:
    """Return the path of py-spy, beside this Python or on the PATH; None if there is none."""
    own = Path(sys.executable).parent / "py-spy"
    return str(own) if own.exists() else shutil.which("py-spy")


def read_spied(document: bytes) -> dict[str, Any]:
    """Return the stacks in a document of ``py-spy dump --json``; empty if it has none."""
    try:
        threads = json_text.decoded(document)
    except ValueError:
        return {}
    if not isinstance(threads, list) or not threads:
        return {}
    stacks = [
        ThreadStack(
            name=str(thread.get("thread_name") or ""),
            frames=[
                {
                    "function": str(frame.get("name", "")),
                    "file": str(frame.get("filename", "")),
                    "line": max(0, int(frame.get("line") or 0)),
                }
                for frame in (thread.get("frames") or [])[:MAX_FRAMES]
            ],
        )
        for thread in threads
        if isinstance(thread, dict)
    ]
    main = next((one for one in stacks if one.name == "MainThread"), stacks[-1])
    others = [one.model_dump() for one in stacks if one is not main]
    return {"stack": main.model_dump()["frames"], "threads": others[:MAX_THREADS]}


def _why(errors: bytes) -> str:
    """Return why py-spy has no stack, in one line."""
    lines = [line for line in errors.decode("utf-8", "replace").splitlines() if line.strip()]
    number = counted(len(lines), "line")
    return f"no Python stack: py-spy: {lines[-1].strip() if lines else f'{number} of output'}"
