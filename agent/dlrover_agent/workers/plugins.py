"""Plug-ins for torch's elastic API: logs specs (``torchrun.logs_specs``) and event handlers.

They are the only reason why an agent imports torch.
"""

import importlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from dlrover_agent.settings import Command, OutputSettings
from dlrover_agent.workers.streams import OutputDestination, WorkerStream
from dlrover_py.process.blocking import BackgroundThread, OverdueError, inheritable_signals
from dlrover_py.protocol.agents import Assignment, WorkerFailure
from dlrover_py.protocol.errors import ConfigError

log = logging.getLogger("agent.plugins")

MAX_EVENTS = 1000
"""Posted calls that may wait for a handler that hangs. The oldest ones are dropped."""
LAST_EVENTS_S = 2.0
"""Seconds that the handler has for the remaining events when the agent ends."""

Specs = Callable[[Sequence[dict[str, str]]], list[OutputDestination]]
"""A function from the workers' environments, which it may change, to their destinations."""


def _import_torch(module: str, why: str) -> Any:
    """Import a module of ``torch.distributed.elastic``, and log why.

    Raises:
        ConfigError: There is no torch in the agent's interpreter.
    """
    log.info("torch_imported", extra={"why": why})
    try:
        return importlib.import_module(f"torch.distributed.elastic.{module}")
    except ImportError as error:
        raise ConfigError(f"{why} needs torch in the agent's interpreter: {error}") from error


def logs_specs(output: OutputSettings, nproc: int, role: str) -> Specs:
    """Return a function that finds the workers' destinations with a plug-in's LogsSpecs class.

    The interface is torch/distributed/elastic/multiprocessing/api.py:LogsSpecs. The call imports
    torch and the plug-in. The returned function raises what the plug-in raises.

    Args:
        output: The output flags. They contain the name of the class.
        nproc: Number of workers on this node.
        role: Role of the workers, for the prefix of their lines.

    Raises:
        ConfigError: If there is no such class, or it cannot be instantiated.
    """
    found = entry_points(group="torchrun.logs_specs", name=output.specs or "")
    if not found:
        known = sorted(e.name for e in entry_points(group="torchrun.logs_specs"))
        raise ConfigError(
            f"--logs-specs is {output.specs!r}: expected a name in the entry-point group "
            f"torchrun.logs_specs; installed are: {', '.join(known) or 'none'}"
        )
    api = _import_torch("multiprocessing.api", f"--logs-specs {output.specs}")

    def std(which: Mapping[int | None, int]) -> Any:
        if set(which) <= {None}:
            return api.Std(which.get(None, 0))
        return {rank: api.Std(output.of(which, rank)) for rank in range(nproc)}

    try:
        specs = next(iter(found)).load()(
            log_dir=None if output.log_dir is None else str(output.log_dir),
            redirects=std(output.redirects),
            tee=std(output.tee),
            local_ranks_filter=None if output.shown is None else set(output.shown),
        )
    except Exception as error:  # a plug-in may raise anything
        message = f"--logs-specs {output.specs}: {type(error).__name__}: {error}"
        raise ConfigError(message) from error

    def reify(envs: Sequence[dict[str, str]]) -> list[OutputDestination]:
        """Ask the plug-in, and convert its answer."""
        dest = specs.reify(dict(enumerate(envs)))
        return [
            OutputDestination(
                _stream(output, role, i, env, dest.stdouts, dest.tee_stdouts, dest.filtered_stdout),
                _stream(
                    output, role, i, env, dest.stderrs, dest.tee_stderrs, dest.filtered_stderr, 1
                ),
                env.get("TORCHELASTIC_ERROR_FILE", dest.error_files.get(i, "")),
            )
            for i, env in enumerate(envs)
        ]

    return reify


def _stream(
    output: OutputSettings,
    role: str,
    local_rank: int,
    env: Mapping[str, str],
    files: Mapping[int, str],
    tees: Mapping[int, str],
    filtered: str,
    err: int = 0,
) -> WorkerStream:
    """Convert one stream of torch's LogsDest. An empty file name means the console.

    Args:
        output: The output flags.
        role: Role of the workers, for the prefix of their lines.
        local_rank: Local rank of the worker.
        env: Environment of the worker.
        files: File of the stream by local rank.
        tees: File by local rank of the streams that are also shown on the console.
        filtered: File for lines that contain one of the filters' words.
        err: 1 for standard error, 0 for standard output.
    """
    file, tee = files.get(local_rank, ""), local_rank in tees
    filters = (output.stderr_filters if err else output.stdout_filters) if tee else ()
    return WorkerStream(
        files=(Path(file),) if file and file != os.devnull else (),
        shown=tee or not file,
        prefix=output.line_prefix(role, int(env["RANK"]), local_rank) if tee else "",
        words=filters,
        filtered=Path(filtered) if filters else None,
    )


class ElasticEvents:
    """Sends the agent's events to a handler of torch's elastic events, in torch's format.

    The format is that of torch/distributed/elastic/agent/server/api.py:_construct_event. The
    handler is a plug-in and may hang, so it runs in a thread.
    """

    def __init__(self, command: Command, run_id: str) -> None:
        """Find the handler that the command names; with ``null``, all later calls do nothing.

        Any other name imports torch.

        Raises:
            ConfigError: If there is no handler of this name, or torch cannot be imported.
        """
        self._command, self._run_id = command, run_id
        self._enabled = command.event_handler != "null"
        self._assignment: Assignment | None = None
        self._pids: list[int] = []
        self._thread = BackgroundThread("elastic-events", max_waiting=MAX_EVENTS)
        if not self._enabled:
            return
        why = f"--event-log-handler {command.event_handler}"
        known = _import_torch("events.handlers", why)._log_handlers
        if command.event_handler not in known:
            raise ConfigError(f"{why}: expected one of {', '.join(sorted(known))}")
        self._events = _import_torch("events", why)

    def started(self, assignment: Assignment, pids: Sequence[int], waited_s: float) -> None:
        """Queue the events of a node that has joined a round and started its workers.

        The call returns immediately: the handler runs in a thread, and if it hangs, the oldest
        events are dropped. Without a handler (``null``) nothing happens.

        Args:
            assignment: The node's place in the round.
            pids: Process ids of the workers, by local rank.
            waited_s: Seconds that the rendezvous took.
        """
        self._post(lambda: self._started(assignment, pids, waited_s))

    def ended(self, failures: Sequence[WorkerFailure], *, succeeded: bool) -> None:
        """Queue an event for the end of each worker of the round.

        Without a handler (``null``), and before the first round has started, nothing happens.

        Args:
            failures: Failures of workers. A worker without one was stopped, unless all succeeded.
            succeeded: Whether all workers of the round have succeeded.
        """
        self._post(lambda: self._ended(failures, succeeded=succeeded))

    async def closed(self, *, failed: str) -> None:
        """Queue the event for the end of the agent, and wait until the handler has all events.

        After ``LAST_EVENTS_S`` the rest is given up with a warning. Without a handler nothing
        happens.

        Args:
            failed: Why the agent failed; empty if it succeeded.
        """
        self._post(lambda: self._record("FAILED" if failed else "SUCCEEDED", error=failed or None))
        if not self._enabled:
            return
        try:
            await self._thread.run(lambda: None, LAST_EVENTS_S)
        except OverdueError as error:
            log.warning(
                "event_handler_failed", extra={"why": str(error), "then": "events are lost"}
            )

    def _post(self, make: Callable[[], None]) -> None:
        if self._enabled:
            self._thread.post(make, 1)

    # --- Methods that run in the thread ---

    def _started(self, assignment: Assignment, pids: Sequence[int], waited_s: float) -> None:
        self._assignment, self._pids = assignment, list(pids)
        self._record("RENDEZVOUS", duration_ms=waited_s * 1000)
        for local_rank in range(len(pids)):
            self._record("START", local_rank)

    def _ended(self, failures: Sequence[WorkerFailure], *, succeeded: bool) -> None:
        """Send an event for the end of each worker; do nothing if they have had theirs."""
        if self._assignment is None:
            return
        by_rank = {f.local_rank: f for f in failures}
        for local_rank in range(len(self._pids)):
            failure = by_rank.get(local_rank)
            state = "SUCCEEDED" if succeeded else "FAILED" if failure else "TERMINATED"
            self._record(state, local_rank, failure)
        self._pids = []

    def _record(
        self,
        state: str,
        local_rank: int | None = None,
        failure: WorkerFailure | None = None,
        *,
        duration_ms: float | None = None,
        error: str | None = None,
    ) -> None:
        """Send an event of a worker, or of the agent if ``local_rank`` is None.

        An error of the handler is logged, and the event is lost.

        Args:
            state: State of the worker or agent in torch's words, such as ``SUCCEEDED``.
            local_rank: Local rank of the worker; None for the agent.
            failure: Failure of the worker; None if it has none.
            duration_ms: Milliseconds that the event took; None if they are not known.
            error: Why the agent failed; None for a worker, or if it has not failed.
        """
        a = self._assignment
        more: dict[str, object] = {
            "group_world_size": a.nnodes if a else None,
            "entry_point": self._command.name,
        }
        rank = None
        if local_rank is not None and a is not None:
            rank = a.rank_offset + local_rank
            more |= {
                "local_rank": [local_rank],
                "role_rank": [a.role_rank_offset + local_rank],
                "role_world_size": [a.role_world_size],
                "exit_code": [failure.exit_code if failure else None],
                "worker_pid": [failure.pid if failure else None],
            }
        metadata = {
            "run_id": self._run_id,
            "global_rank": rank,
            "group_rank": a.node_rank if a else None,
            "worker_id": None if local_rank is None else str(self._pids[local_rank]),
            "role": self._command.role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": None,
            "rdzv_backend": "dlrover",
            "raw_error": failure.traceback or failure.message if failure else error,
            "metadata": json.dumps(more),
            "agent_restarts": a.restart_count if a else 0,
            "duration_ms": duration_ms,
        }
        source = self._events.EventSource.AGENT if rank is None else self._events.EventSource.WORKER
        event = self._events.Event(
            name=f"torchelastic.worker.status.{state}", source=source, metadata=metadata
        )
        try:
            with inheritable_signals():  # for processes that the plug-in starts
                self._events.record(event, self._command.event_handler)
        except Exception as error:  # noqa: BLE001 - a plug-in must not end the training
            log.warning("event_handler_failed", extra={"why": f"{type(error).__name__}: {error}"})
