"""Plug-ins that are written against torch's elastic API, and so the only reason why an agent would
import torch: logs specs (``torchrun.logs_specs``) and handlers of elastic events.
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

from dlrover_agent.logs import Destination, Stream
from dlrover_agent.settings import Command, Output
from dlrover_py.protocol.agents import Assignment, WorkerFailure
from dlrover_py.protocol.errors import ConfigError

log = logging.getLogger("agent.plugins")

Specs = Callable[[Sequence[dict[str, str]]], list[Destination]]


def _torch(module: str, why: str) -> Any:
    log.info("torch_imported", extra={"why": why})
    try:
        return importlib.import_module(f"torch.distributed.elastic.{module}")
    except ImportError as error:
        raise ConfigError(f"{why} needs torch in the agent's interpreter: {error}") from error


def logs_specs(output: Output, nproc: int, role: str) -> Specs:
    """Destinations of the workers as a LogsSpecs class of others wants them
    (torch/distributed/elastic/multiprocessing/api.py:LogsSpecs).

    Raises:
        ConfigError: there is no such class, or it cannot be made.
    """
    found = entry_points(group="torchrun.logs_specs", name=output.specs or "")
    if not found:
        known = sorted(e.name for e in entry_points(group="torchrun.logs_specs"))
        raise ConfigError(
            f"--logs-specs is {output.specs!r}: expected a name in the entry-point group "
            f"torchrun.logs_specs; installed are: {', '.join(known) or 'none'}"
        )
    api = _torch("multiprocessing.api", f"--logs-specs {output.specs}")

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
    except Exception as error:  # anything may go wrong in a class of others
        words = f"--logs-specs {output.specs}: {type(error).__name__}: {error}"
        raise ConfigError(words) from error

    def reify(envs: Sequence[dict[str, str]]) -> list[Destination]:
        dest = specs.reify(dict(enumerate(envs)))
        return [
            Destination(
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
    output: Output,
    role: str,
    local_rank: int,
    env: Mapping[str, str],
    files: Mapping[int, str],
    tees: Mapping[int, str],
    filtered: str,
    err: int = 0,
) -> Stream:
    """One stream, from torch's LogsDest: an empty file name means the console."""
    file, tee = files.get(local_rank, ""), local_rank in tees
    words = (output.err_words if err else output.out_words) if tee else ()
    return Stream(
        files=(Path(file),) if file and file != os.devnull else (),
        shown=tee or not file,
        prefix=output.line_prefix(role, int(env["RANK"]), local_rank) if tee else "",
        words=words,
        filtered=Path(filtered) if words else None,
    )


class ElasticEvents:
    """Tells a handler of torch's elastic events what happens, in torch's words
    (torch/distributed/elastic/agent/server/api.py:_construct_event)."""

    def __init__(self, command: Command, run_id: str) -> None:
        """Find the handler.

        Raises:
            ConfigError: there is none of this name.
        """
        self._command, self._run_id = command, run_id
        self._on = command.event_handler != "null"
        self._assignment: Assignment | None = None
        self._pids: list[int] = []
        if not self._on:
            return
        why = f"--event-log-handler {command.event_handler}"
        known = _torch("events.handlers", why)._log_handlers
        if command.event_handler not in known:
            raise ConfigError(f"{why}: expected one of {', '.join(sorted(known))}")
        self._events = _torch("events", why)

    def started(self, assignment: Assignment, pids: Sequence[int], waited_s: float) -> None:
        """A round has been joined, and its workers were started."""
        self._assignment, self._pids = assignment, list(pids)
        self._record("RENDEZVOUS", duration_ms=waited_s * 1000)
        for local_rank in range(len(pids)):
            self._record("START", local_rank)

    def ended(self, failures: Sequence[WorkerFailure], *, succeeded: bool) -> None:
        """The workers of the round are gone."""
        if self._assignment is None:
            return
        by_rank = {f.local_rank: f for f in failures}
        for local_rank in range(len(self._pids)):
            failure = by_rank.get(local_rank)
            state = "SUCCEEDED" if succeeded else "FAILED" if failure else "TERMINATED"
            self._record(state, local_rank, failure)
        self._pids = []

    def closed(self, *, failed: str) -> None:
        """The agent is about to end."""
        self._record("FAILED" if failed else "SUCCEEDED", error=failed or None)

    def _record(
        self,
        state: str,
        local_rank: int | None = None,
        failure: WorkerFailure | None = None,
        *,
        duration_ms: float | None = None,
        error: str | None = None,
    ) -> None:
        if not self._on:
            return
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
            self._events.record(event, self._command.event_handler)
        except Exception as error:  # noqa: BLE001 - a handler of others must not end the training
            log.warning("event_handler_failed", extra={"why": f"{type(error).__name__}: {error}"})
