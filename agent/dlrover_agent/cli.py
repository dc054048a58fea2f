"""The program ``elastic-run`` (alias ``dlrover-run``), which starts a script as torchrun does.

Inside an ElasticJob, ``elastic-run`` is a member of the job. It reads its settings from the
environment, and the job's spec takes precedence over the flags. Elsewhere the command lines of
torchrun work. The master then runs on the node that is the rendezvous endpoint, or on this machine
if the job has one node.
"""

import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlrover_agent import flags as given
from dlrover_agent.flags import TORCH_S, Flags
from dlrover_agent.settings import LINE_PREFIX, Command, OutputSettings, Settings, environment
from dlrover_agent.standalone import Endpoint, hosted, misplaced_nodes
from dlrover_py.pacing import random_delay_s
from dlrover_py.process.blocking import shared_writer
from dlrover_py.process.identity import ignores_signal
from dlrover_py.protocol.commands import refusal
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    ExitCode,
    FileLimitError,
    TransientError,
    UnauthorizedError,
    UnreachableError,
)
from dlrover_py.protocol.names import ENV_MASTER_ADDR
from dlrover_py.protocol.words import output_line
from dlrover_py.telemetry import setup

if TYPE_CHECKING:
    from dlrover_agent.loop import AgentOutcome
    from dlrover_agent.workers.failures import WorkerDeath
    from dlrover_py.protocol.agents import JobName
    from dlrover_py.protocol.log_rules import LogRule

log = logging.getLogger("agent.cli")

NOT_IN_JOB = (
    *("nnodes", "node_unit", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("node_rank", "master_addr", "master_port", "max_restarts", "local_addr"),
)
"""Flags without effect inside a job, because the job's spec or its platform sets their values."""
_NUMBER = re.compile(r"[0-9]{1,9}")
MAX_RESTARTS = 1_000_000_000
"""Largest value of ``--max-restarts``."""
JOB_NAME_PATH = "/v1/job/name"
"""Path at which a master returns the name of its job."""
LAST_OUTPUT_S = 30.0
"""Seconds at exit for the reader of standard error to take more of the last output."""
LAST_OUTPUT_STOPPED_S = 1.0
"""Seconds for the same reader if a signal has ended the job."""
ENV_SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable of torch with the seconds from a signal to SIGKILL."""
OTHER_DEVICES = ("/dev/dxg", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci_manager")
"""Device files of accelerators other than NVIDIA GPUs."""
_RUN_PATH = (
    "import sys; from torch.distributed.elastic.multiprocessing.errors import record\n"
    "from torch.distributed.run import run_script_path; record(run_script_path)(*sys.argv[1:])"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elastic-run`` with these arguments, or those of the process; return its exit code.

    An error is printed, and written to the error file that the parent process has named, if any.
    The exit code without a platform is 0 or 1; inside a job it is one of :class:`ExitCode`, or the
    code that the master has sent. The signals that ask the agent to end stay blocked.

    Raises:
        SystemExit: The command line is wrong (2), or asks for the help or the version (0).
        OSError: The system has refused a call, for another reason than the limit of open files.
    """
    environ = environment()
    member = bool(environ.get(ENV_MASTER_ADDR))
    variables: Mapping[str, str] = {}
    try:
        settings = Settings.from_environment(environ)
        flags = given.parse(sys.argv[1:] if argv is None else argv, environ)
        variables = flags.variables
        member = settings.in_job and not flags.standalone
        level = settings.log_level or ("INFO" if member else "WARNING")
        setup("elastic-run", level=level, node=settings.node_id, aside=True)
        command = _command(flags, settings, member=member)
        # What is created from here on must be removed again. So signals are blocked until the
        # agent handles them, and a further signal at the end does not cut off the last message.
        signal.pthread_sigmask(signal.SIG_BLOCK, command.signals)
        run = _run_in_job if member else _run_without_platform
        try:
            outcome = run(flags, settings, command)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise FileLimitError("Too many open files") from error
    except DLRoverError as error:
        finish_output()
        message = given.name_variables(str(error), variables)
        _print_error(f"elastic-run: {message}\n")
        _tell_parent(environ, message, ())
        code = int(error.exit_code)
    else:
        code = outcome.code
        finish_output()
        if code != ExitCode.OK:
            deaths: list[WorkerDeath] = []
            if outcome.deaths:
                from dlrover_agent.workers.failures import cause_first, summary

                deaths = cause_first(outcome.deaths)
                _print_error(summary(command.name, deaths, socket.gethostname()))
            _print_error(f"elastic-run: {outcome.message}\n")
            _tell_parent(environ, outcome.message, deaths)
    return code if member else min(code, 1)  # only a platform knows the agent's exit codes


def finish_output() -> None:
    """Wait until the console has taken the workers' output; give up the rest if the console hangs.

    A console hangs if it takes nothing for 30 s, or for 1 s after a signal. There is no limit while
    the console takes output. A warning has the number of the lines that are lost. It also counts
    those that were dropped before, because too many waited for the console.
    """
    for fd, name in ((1, "output"), (2, "error")):
        out = shared_writer(fd)
        within_s = _last_output_s(fd)
        taken = out.finish(within_s)
        if lines := out.take_lost() if taken else out.give_up():
            why = f"the reader of standard {name} has taken nothing for {within_s:g} s"
            if taken:
                why = f"the reader of standard {name} has let {out.MAX_BYTES >> 20} MiB wait"
            log.warning("output_lost", extra={"lines": lines, "why": why})


def _last_output_s(fd: int) -> float:
    """Return the seconds for the reader of a stream: fewer if a signal has ended the job."""
    return LAST_OUTPUT_S if shared_writer(fd).waits_for_reader else LAST_OUTPUT_STOPPED_S


def _print_error(text: str) -> None:
    """Write a message to standard error, after all log lines, and wait until it is written.

    Colors and control characters are removed, because workers and other programs must not control
    the terminal. After 30 s without progress (1 s after a signal), the wait ends and the message
    may be lost.
    """
    text = output_line(text)
    try:
        fd = sys.stderr.fileno()
    except OSError:  # standard error was replaced by an object without a file
        sys.stderr.write(text)
        return
    # A full disk must not change the exit code, and one that hangs must not block the exit
    # indefinitely.
    shared_writer(fd).write(text.encode("utf-8", "backslashreplace"))
    shared_writer(fd).finish(_last_output_s(fd))


def _tell_parent(environ: Mapping[str, str], message: str, deaths: "Sequence[WorkerDeath]") -> None:
    """Write why the agent failed to the error file that its parent process has named, if any.

    torchelastic does the same. An error of the file is ignored.

    Args:
        environ: Environment of the agent. TORCHELASTIC_ERROR_FILE has the path.
        message: Why the agent failed.
        deaths: Failures of workers, the root cause first; empty if no worker failed.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        from dlrover_agent.workers import error_file
        from dlrover_agent.workers.failures import error_file_document

        now = int(datetime.now(UTC).timestamp())
        with contextlib.suppress(OSError):
            error_file.write(
                Path(path), error_file_document(message, deaths[0] if deaths else None, now)
            )


def _wait(numbers: Sequence[signal.Signals], seconds: float) -> None:
    """Wait for a number of seconds, or until one of the signals, which must be blocked.

    A signal that is ignored because of nohup does not end the wait.

    Raises:
        DLRoverError: One of the signals has arrived.
    """
    # The kernel also keeps a blocked signal that is ignored. Such a signal must not end the wait.
    info = signal.sigtimedwait([n for n in numbers if not ignores_signal(n)], seconds)
    if info is not None:
        raise DLRoverError(f"the agent received {signal.Signals(info.si_signo).name}")


def _run_in_job(flags: Flags, settings: Settings, command: Command) -> "AgentOutcome":
    """Run the agent as a node of a job that a platform has started.

    Flags that the job's spec or its platform replaces are only logged. The function returns when
    the agent has ended.

    Args:
        flags: The command line.
        settings: The agent's environment.
        command: What the workers run.

    Raises:
        DLRoverError: A setting cannot be used, or the master could not be reached at the start or
            refused the token.
    """
    settings.check()
    for name in sorted(flags.given & set(NOT_IN_JOB)):
        _warn_unused_flag(name, "the job's spec or its platform sets this value", logging.INFO)
    token = settings.token()
    restarts = flags.max_restarts if "max_restarts" in flags.given else None
    return _run_agent(settings, command, token, restarts)


def _run_without_platform(flags: Flags, settings: Settings, command: Command) -> "AgentOutcome":
    """Run a job without a platform; the agent at the endpoint starts the master as a child.

    The endpoint is the node and port of ``--rdzv-endpoint``. The other agents wait for its master,
    for at most ``connect_s`` of the endpoint. A warning is logged if the job's size there differs
    from ``--nnodes``. The function returns when the agent has ended.

    Args:
        flags: The command line.
        settings: The agent's environment.
        command: What the workers run.

    Raises:
        UnreachableError: The master could not be reached.
        ConfigError: The flags cannot be used, the program at the endpoint runs another job, or the
            master refuses its settings.
        DLRoverError: A signal that asks the agent to end has arrived before the agent runs.
    """
    endpoint = Endpoint.of(flags)
    why, instead = misplaced_nodes(flags, settings.environ)
    if why:
        log.warning("nodes_misplaced", extra={"why": why, "instead": instead})
    endpoint.check(settings.ca_file)
    if endpoint.node_rank is None and flags.node_rank:
        _warn_unused_flag("node_rank", "it is used only with --rdzv-backend=static")
    # A job on this machine alone has a token of its own.
    secret = settings.token() if endpoint.host and settings.token_file is not None else ""
    with hosted(endpoint, secret) as master:
        if master is not None:
            agent_settings = _settings(endpoint, settings, master.address, command)
            agent_settings = _of_run(agent_settings, master.name)
            return _run_agent(
                agent_settings, command, master.token, flags.max_restarts, master.keep
            )
    agent_settings = _settings(endpoint, settings, endpoint.address, command)
    token = secret or endpoint.token
    try:
        job = _job_at(endpoint, token, command)
        if why := endpoint.size_difference(job.fewest, job.most):
            _warn_unused_flag("nnodes", why)
        agent_settings = _of_run(agent_settings, job.name)
        return _run_agent(agent_settings, command, token, flags.max_restarts)
    except UnreachableError as error:
        hint = "expected elastic-run on the endpoint's node; torchrun's agents cannot join its job"
        raise UnreachableError(f"{error}; {hint}") from error
    except UnauthorizedError as error:
        raise ConfigError(
            f"the program at {agent_settings.master_addr} is no master of this job, or runs "
            f"another job: expected --rdzv-id={endpoint.run_id} there as well, and the same token "
            "on all nodes if DLROVER_TOKEN_FILE is set, or a port of its own for each job in "
            "--rdzv-endpoint; the token was not sent"
        ) from error


def _job_at(endpoint: Endpoint, token: str, command: Command) -> "JobName":
    """Return the name and size that the master at the endpoint has for this run.

    The request is repeated for ``connect_s`` seconds. A signal that asks the agent to end stops the
    wait.

    Args:
        endpoint: Rendezvous of the job.
        token: Token of the job.
        command: What the workers run, with the signals that ask the agent to end.

    Raises:
        UnreachableError: No master has answered within ``connect_s``.
        UnauthorizedError: The program at the endpoint has not proved that it knows the token.
        ConfigError: The program at the endpoint refuses the request.
        FileLimitError: This process may open no more files.
        DLRoverError: A signal has arrived.
    """
    import asyncio

    from dlrover_agent.channels.master_client import LOG_UNREACHABLE_AFTER_S
    from dlrover_py.net.http_client import MAX_SHORT_REPLY_BYTES, HttpClient
    from dlrover_py.protocol.agents import JobName

    async def ask(within_s: float) -> JobName:
        client = HttpClient(endpoint.address, token=token, asks_proof=True)
        try:
            reply = await client.call(
                "GET", JOB_NAME_PATH, deadline_s=within_s, max_bytes=MAX_SHORT_REPLY_BYTES
            )
        finally:
            client.close()
        try:
            return JobName.model_validate_json(reply)
        except ValueError as error:
            message = f"{endpoint.address}: expected a job's name, found another document"
            raise ValueError(message) from error

    started, logged = time.monotonic(), False
    while True:
        left = endpoint.connect_s + started - time.monotonic()
        try:
            return asyncio.run(ask(max(0.1, min(5.0, left))))
        except FileLimitError:
            raise
        except (TransientError, ValueError) as error:
            if left <= 0:
                message = f"the master did not answer for {endpoint.connect_s:g} s"
                raise UnreachableError(f"{message}: {error}") from error
            if endpoint.connect_s - left >= LOG_UNREACHABLE_AFTER_S and not logged:
                logged = True
                log.warning("master_not_reached", extra={"why": str(error)})
        _wait(command.signals, min(max(0.05, left), random_delay_s(0.1, 0.5)))


def _settings(endpoint: Endpoint, given: Settings, address: str, command: Command) -> Settings:
    """Return the agent's settings for a job without a platform, with its master's address.

    The call may wait for ``connect_s`` of the endpoint until its name can be resolved.

    Args:
        endpoint: Rendezvous of the job.
        given: Settings from the environment.
        address: Address of the master (``host:port``).
        command: What the workers run, with the signals that end the wait.

    Raises:
        UnreachableError: The name cannot be resolved in time.
        DLRoverError: A signal that asks the agent to end has arrived.
    """
    return Settings(
        master_addr=address,
        own_master=endpoint.most > 1,
        node_id=endpoint.node_id(),
        job_name=endpoint.run_id,
        advertised_addr=endpoint.advertised_addr(lambda seconds: _wait(command.signals, seconds)),
        connect_s=given.connect_s if not endpoint.host else endpoint.connect_s,
        asks_proof=bool(endpoint.host),
        shm_dir=given.shm_dir,
        returns=endpoint.node_rank is not None,
        topology=given.topology,
        environ=given.environ,
    )


def _of_run(settings: Settings, run: str) -> Settings:
    """Return the settings of an agent with the names of this run.

    Args:
        settings: Settings of the agent.
        run: Random name of this run, which its master has.
    """
    return replace(settings, run_name=run, job_uid=_uid(settings.job_name, run))


def _uid(run_id: str, run: str) -> str:
    """Return a job uid, by which nodes find checkpoints of this run in memory.

    It is the same on all nodes, however each of them names the endpoint or the script. A training
    that is started again has another uid, because its rounds start from the first one again.

    Args:
        run_id: Name of the job (``--rdzv-id``).
        run: Random name of this run, which its master has.
    """
    identity = f"{run}\0{run_id}"
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:16]


def _run_agent(
    settings: Settings,
    command: Command,
    token: str,
    max_restarts: int | None,
    companion: Callable[[set[int]], Coroutine[Any, Any, None]] | None = None,
) -> "AgentOutcome":
    """Run the agent in a new event loop until it ends.

    Args:
        settings: Settings of the agent.
        command: What the workers run.
        token: Token of the job.
        max_restarts: Value of ``--max-restarts``; None if it was not given.
        companion: Function that runs beside the agent, or None: see :func:`run_agent`.

    Raises:
        DLRoverError: As for :func:`run_agent`.
    """
    # Imported here, so that a master on this node starts first and imports at the same time.
    import asyncio

    from dlrover_agent.loop import run_agent

    agent = run_agent(
        settings, command, token=token, max_restarts=max_restarts, companion=companion
    )
    return asyncio.run(agent)


def _warn_unused_flag(flag: str, why: str, level: int = logging.WARNING) -> None:
    name = "--" + flag.replace("_", "-")
    log.log(level, "flag_not_used", extra={"flag": name, "why": why})


def _command(flags: Flags, settings: Settings, *, member: bool) -> Command:
    """Return what the workers run.

    ``--monitor-interval`` and ``--start-method`` have no effect, and are only logged. Torch may be
    asked for the number of devices, in a child process, for at most ``TORCH_S`` seconds.

    Args:
        flags: The command line.
        settings: The agent's environment.
        member: Whether the agent is part of a platform's job. Only then ``settings.log_dir`` is
            used.

    Raises:
        ConfigError: The script does not exist, or starts another launcher such as torchrun. Or the
            value of a flag cannot be used, or a check is requested and there is no torch.
    """
    if "monitor_interval" in flags.given:
        _warn_unused_flag("monitor_interval", "the agent notices a worker's end immediately")
    if "start_method" in flags.given:
        _warn_unused_flag("start_method", "workers are new processes, or forks of a zygote")
    if flags.launcher is not None:
        raise ConfigError(refusal(flags.launcher))
    if not 0 <= flags.max_restarts <= MAX_RESTARTS:
        raise ConfigError(
            f"--max-restarts is {flags.max_restarts}: expected a number from 0 to {MAX_RESTARTS}"
        )
    if flags.node_unit < 1:
        raise ConfigError(f"--node-unit is {flags.node_unit}: expected a number from 1")
    if len(flags.role) > 1024 or not flags.role.isprintable():
        raise ConfigError(
            f"--role is {flags.role[:60]!r}: expected a name of at most 1024 printable characters"
        )
    argv, name, cold_start_reason = _argv(flags, settings)
    nproc = _nproc(flags.nproc_per_node, settings)
    cpus = _cpus(flags, nproc, settings.environ)
    if cpus and nproc == 1 and "OMP_NUM_THREADS" not in settings.environ:
        cold_start_reason = "--numa-binding: OpenMP counts the CPUs when it is imported"
    if flags.virtual_local_rank:
        from dlrover_agent.visible_devices import one_for_each

        one_for_each(settings.environ, nproc)
    if flags.precheck and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"{flags.precheck_flag}: {sys.executable} has no torch, which the check is made with; "
            "install it there, or leave the flag out"
        )
    log_rules: tuple[LogRule, ...] = ()
    if flags.log_rules:
        from dlrover_agent.workers.log_rules import rules_in

        log_rules = rules_in(Path(flags.log_rules))
    log_dir = settings.log_dir if member else None
    return Command(
        argv=argv,
        name=name,
        nproc=nproc,
        environ=settings.environ,
        role=flags.role,
        log_dir=log_dir.absolute() if log_dir is not None else None,
        output=output_settings(flags, settings.environ),
        event_handler=flags.event_log_handler,
        cold="--cold-start" if flags.cold_start else cold_start_reason,
        signals=given.signals(flags.signals_to_handle),
        shutdown_s=_shutdown_s(flags, settings.environ),
        virtual_local_rank=flags.virtual_local_rank,
        cpus=cpus,
        precheck=flags.precheck,
        save_at_breakpoint=flags.save_at_breakpoint,
        auto_tune=bool(flags.auto_tunning),
        exclude_straggler=flags.exclude_straggler,
        log_rules=log_rules,
    )


def _cpus(flags: Flags, nproc: int, environ: Mapping[str, str]) -> tuple[frozenset[int], ...]:
    """Return the CPUs of each worker by local rank; empty without ``--numa-binding``.

    Args:
        flags: The command line.
        nproc: Number of workers on this node.
        environ: Environment of the workers.

    Raises:
        ConfigError: A worker has no GPU, or its CPUs cannot be found.
    """
    if flags.numa_binding is None:
        return ()
    from dlrover_agent.workers.numa import CpuAffinity, NumaMode

    return CpuAffinity.of(NumaMode(flags.numa_binding), nproc, environ).by_rank


def _argv(flags: Flags, settings: Settings) -> tuple[tuple[str, ...], str, str]:
    """Return the workers' command line, the script's name, and why workers are never forked.

    The last part is empty if workers may be forked.

    Raises:
        ConfigError: The script or program does not exist, or flags exclude each other.
    """
    script, python = flags.training_script, settings.python
    if flags.module and flags.no_python:
        raise ConfigError("--module and --no-python exclude each other: a module needs Python")
    cold_start_reason = "" if python == sys.executable else "PYTHON_EXEC is another interpreter"
    if flags.run_path:
        _there(script)
        argv, cold_start_reason = [python, "-u", "-c", _RUN_PATH, script], "--run-path"
    elif flags.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"program {script}: not found, or not executable")
        argv, cold_start_reason = [script], "--no-python"
    elif flags.module:
        argv = [python, "-u", "-m", script]
    else:
        _there(script)
        argv = [python, "-u", script]
    return (*argv, *flags.training_script_args), script, cold_start_reason


def _there(script: str) -> None:
    """Refuse a script that does not exist, or a folder without a ``__main__.py``.

    Raises:
        ConfigError: The script is refused.
    """
    path = Path(script)
    if not path.exists():
        message = f"script {path.absolute()}: there is no such file"
        if shutil.which(script) is not None:
            message += (
                f"; {script} is a program: write the script in its place, or --no-python before "
                "a program that is no Python script"
            )
        raise ConfigError(message)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(
            f"script {path.absolute()}: this is a folder without a __main__.py; expected a script"
        )


def output_settings(flags: Flags, environ: Mapping[str, str]) -> OutputSettings:
    """Return the settings for the output of the workers.

    Raises:
        ConfigError: The value of a flag cannot be used.
    """
    return OutputSettings(
        log_dir=Path(flags.log_dir).absolute() if flags.log_dir else None,
        redirects=given.streams("--redirects", flags.redirects),
        tee=given.streams("--tee", flags.tee),
        shown=given.local_ranks(flags.local_ranks_filter),
        stdout_filters=tuple(flags.duplicate_stdout_filters),
        stderr_filters=tuple(flags.duplicate_stderr_filters),
        prefix=flags.log_line_prefix_template
        or environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        or LINE_PREFIX,
        specs=flags.logs_specs,
    )


def _shutdown_s(flags: Flags, environ: Mapping[str, str]) -> float:
    """Return the seconds from a signal to SIGKILL: of the flag, of torch's variable, or 30.

    Raises:
        ConfigError: The value is not a whole number of seconds from 0.
    """
    name, text = ENV_SHUTDOWN_TIMEOUT, environ.get(ENV_SHUTDOWN_TIMEOUT, "30")
    if flags.shutdown_timeout is not None:
        name, text = "--shutdown-timeout", str(flags.shutdown_timeout)
    if not _NUMBER.fullmatch(text):
        raise ConfigError(f"{name} is {text!r}: expected a number of seconds from 0")
    return float(text)


def _nproc(text: str, settings: Settings) -> int:
    """Return the number of workers on this node, from the value of ``--nproc-per-node``.

    ``auto`` is the number of GPUs, or of the CPUs that this process may use if there are no GPUs.
    Devices other than NVIDIA GPUs are counted by torch in a child process, for at most ``TORCH_S``
    seconds.

    Raises:
        ConfigError: The value cannot be used, or there is no such device.
    """
    cpus = len(os.sched_getaffinity(0))
    if text in ("auto", "gpu", "cpu"):
        gpus = 0 if text == "cpu" else count_gpus(settings.environ.get("CUDA_VISIBLE_DEVICES"))
        if text == "gpu" and not gpus:
            raise ConfigError("--nproc-per-node=gpu: found no GPU on this node")
        if not gpus and text == "auto" and any(Path(p).exists() for p in OTHER_DEVICES):
            gpus = _ask_torch("torch.accelerator.device_count()", settings)
        return gpus or cpus
    number = int(text) if _NUMBER.fullmatch(text) else 0
    if re.fullmatch(r"[a-z]+", text):
        number = _ask_torch(f"getattr(torch, {text!r}).device_count()", settings)
    if not 1 <= number <= 1024:
        raise ConfigError(
            f"--nproc-per-node is {text!r}: expected a number from 1 to 1024, auto, cpu, or the "
            "name of a device of this node as torch has it (gpu, xpu …)"
        )
    return number


def _ask_torch(what: str, settings: Settings) -> int:
    """Return a number that a child process gets from torch; 0 if torch cannot be asked.

    The result is also 0 if the child fails, prints anything else, or takes longer than ``TORCH_S``.

    Args:
        what: Python expression for the number.
        settings: The agent's environment, with the interpreter to use.
    """
    ask = [settings.python, "-P", "-c", f"import torch; print({what})"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=TORCH_S)
        output = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(output) if _NUMBER.fullmatch(output) else 0


def count_gpus(given: str | None) -> int:
    """Return the number of NVIDIA GPUs that this process may use, without initializing any of them.

    If CUDA_VISIBLE_DEVICES is set, the devices that it makes visible are counted; without NVIDIA's
    driver, its entries. If the variable is not set, the GPUs with a device file are counted, or all
    if none has one. Without the driver, the result is then 0.

    Args:
        given: Value of CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    from dlrover_agent import visible_devices

    folder = Path("/proc/driver/nvidia/gpus")
    listed = sorted(folder.iterdir()) if folder.is_dir() else []
    if given is not None:
        return visible_devices.count(given, [_uuid(gpu / "information") for gpu in listed])
    # A container may see the host's list in /proc, but only its own device files.
    device_files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return min(len(listed), device_files) if device_files else len(listed)


def _uuid(information: Path) -> str:
    """Return the UUID of a GPU from its driver's file; empty if the file does not show it."""
    try:
        found = re.search(r"^GPU UUID:[ \t]*(\S+)", information.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found is not None else ""


if __name__ == "__main__":
    sys.exit(main())
