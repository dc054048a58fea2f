"""``elastic-run`` (alias ``dlrover-run``): start a training script as torchrun does.

Inside an ElasticJob it is a member: what it needs stands in its environment, and the job's spec
beats the flags. Elsewhere torchrun's command lines work: the node that is the rendezvous endpoint
runs our master, or this machine alone does.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import random
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
from dlrover_agent.endpoint import Endpoint, hosted
from dlrover_agent.flags import TORCH_S, Flags
from dlrover_agent.settings import LINE_PREFIX, Command, Output, Settings
from dlrover_py.aside import outlet
from dlrover_py.protocol.commands import refusal
from dlrover_py.protocol.errors import (
    ConfigError,
    DLRoverError,
    ExitCode,
    TransientError,
    Unauthorized,
    Unreachable,
)
from dlrover_py.telemetry import setup

if TYPE_CHECKING:
    from dlrover_agent.failures import Death
    from dlrover_agent.loop import Outcome

log = logging.getLogger("agent.cli")

NOT_IN_JOB = (
    *("nnodes", "node_unit", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
    *("node_rank", "master_addr", "master_port", "max_restarts", "local_addr"),
)
"""What the job's spec, or its platform, says."""
NAME = "/v1/job/name"
LAST_WORDS_S = 30.0
"""Who reads standard error has so long to take more of it at the end."""
SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
OTHER_DEVICES = ("/dev/dxg", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci_manager")
"""Where there may be an accelerator that is no NVIDIA GPU."""
_RUN_PATH = (
    "import sys; from torch.distributed.elastic.multiprocessing.errors import record\n"
    "from torch.distributed.run import run_script_path; record(run_script_path)(*sys.argv[1:])"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elastic-run``; return its exit code."""
    member = False
    environ: Mapping[str, str] = {}
    try:
        settings = Settings.from_environment()
        environ = settings.environ
        flags = given.parse(sys.argv[1:] if argv is None else argv, environ)
        member = settings.in_job and not flags.standalone
        level = settings.log_level or ("INFO" if member else "WARNING")
        setup("elastic-run", level=level, node=settings.node_id, aside=True)
        command = _command(flags, settings, member=member)
        # From here on what is made is also unmade: signals wait until the agent takes them, and a
        # further one at the end does not take its last words from it.
        signal.pthread_sigmask(signal.SIG_BLOCK, command.signals)
        run = _member if member else _own
        outcome = run(flags, settings, command)
    except DLRoverError as error:
        _say(f"elastic-run: {error}\n")
        _tell_parent(environ, str(error), ())
        code = int(error.exit_code)
    else:
        code = outcome.code
        if code != ExitCode.OK:
            deaths: list[Death] = []
            if outcome.deaths:
                from dlrover_agent.failures import cause_first, summary

                deaths = cause_first(outcome.deaths)
                _say(summary(command.name, deaths, socket.gethostname()))
            _say(f"elastic-run: {outcome.message}\n")
            _tell_parent(environ, outcome.message, deaths)
    return code if member else min(code, 1)  # only a platform knows our codes


def _say(words: str) -> None:
    """Write it on standard error, after all that was logged."""
    try:
        fd = sys.stderr.fileno()
    except OSError:  # no file stands behind it
        sys.stderr.write(words)
        return
    # A full disk must not change the exit code, and one that hangs must not keep us for ever.
    outlet(fd).write(words.encode("utf-8", "backslashreplace"))
    outlet(fd).finish(LAST_WORDS_S)


def _tell_parent(environ: Mapping[str, str], message: str, deaths: "Sequence[Death]") -> None:
    """Write why we failed to the error file that our parent process may have named, as torchelastic
    does."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        from dlrover_agent import errorfile
        from dlrover_agent.failures import for_parent

        now = int(datetime.now(UTC).timestamp())
        with contextlib.suppress(OSError):
            errorfile.write(Path(path), for_parent(message, deaths[0] if deaths else None, now))


def _wait(numbers: Sequence[signal.Signals], seconds: float) -> None:
    """Wait for so long, or until one of the signals, which are blocked meanwhile.

    Raises:
        DLRoverError: one came.
    """
    info = signal.sigtimedwait(numbers, seconds)
    if info is not None:
        raise DLRoverError(f"the agent received {signal.Signals(info.si_signo).name}")


def _member(flags: Flags, settings: Settings, command: Command) -> "Outcome":
    settings.check()
    for name in sorted(flags.given & set(NOT_IN_JOB)):
        _not_used(name, "the job's spec and its platform say it", logging.INFO)
    token = settings.token()
    restarts = flags.max_restarts if "max_restarts" in flags.given else None
    return _work(settings, command, token, restarts)


def _own(flags: Flags, settings: Settings, command: Command) -> "Outcome":
    """A job without a platform: the master is a child of the agent at the endpoint."""
    endpoint = Endpoint.of(flags)
    endpoint.check(settings.ca_file)
    if endpoint.node_rank is None and flags.node_rank:
        _not_used("node_rank", "ranks are given with --rdzv-backend=static only")
    secret = settings.token() if settings.token_file is not None else ""
    with hosted(endpoint, secret) as master:
        if master is not None:
            own = _settings(endpoint, settings, master.address, command)
            own = replace(own, job_uid=_uid(endpoint, command, master.name))
            return _work(own, command, master.token, flags.max_restarts, master.keep)
    own, token = _settings(endpoint, settings, endpoint.address, command), secret or endpoint.token
    try:
        name = _name_of_run(endpoint, token, command)
        own = replace(own, job_uid=_uid(endpoint, command, name))
        return _work(own, command, token, flags.max_restarts)
    except Unreachable as error:
        words = (
            "expected elastic-run on the endpoint's node; torchrun's own agents do not mix with it"
        )
        raise Unreachable(f"{error}; {words}") from error
    except Unauthorized as error:
        raise ConfigError(
            f"endpoint {own.master_addr} runs another job: expected --rdzv-id={endpoint.run_id} "
            "there as well, and the same token on all nodes if DLROVER_TOKEN_FILE is set"
        ) from error


def _name_of_run(endpoint: Endpoint, token: str, command: Command) -> str:
    """What the master at the endpoint calls this run.

    Raises:
        Unreachable: there is none for longer than ``connect_s``.
        Unauthorized: it is another job's.
    """
    import asyncio

    from dlrover_agent.master import SAID_AFTER_S
    from dlrover_py.rpc import Client

    async def ask(within_s: float) -> str:
        client = Client(endpoint.address, token=token)
        try:
            return str(json.loads(await client.call("GET", NAME, deadline_s=within_s)))
        finally:
            client.close()

    started, said = time.monotonic(), False
    while True:
        left = endpoint.connect_s + started - time.monotonic()
        try:
            return asyncio.run(ask(max(0.1, min(5.0, left))))
        except (TransientError, ValueError) as error:
            if left <= 0:
                words = f"the master did not answer for {endpoint.connect_s:g} s"
                raise Unreachable(f"{words}: {error}") from error
            if endpoint.connect_s - left >= SAID_AFTER_S and not said:
                said = True
                log.warning("master_not_reached", extra={"why": str(error)})
        _wait(command.signals, min(max(0.05, left), random.uniform(0.1, 0.5)))


def _settings(endpoint: Endpoint, given: Settings, address: str, command: Command) -> Settings:
    return Settings(
        master_addr=address,
        own_master=endpoint.most > 1,
        node_id=endpoint.node_id(),
        job_name=endpoint.run_id,
        advertise=endpoint.advertised(lambda seconds: _wait(command.signals, seconds)),
        connect_s=given.connect_s if not endpoint.host else endpoint.connect_s,
        shm_dir=given.shm_dir,
        returns=endpoint.node_rank is not None,
        environ=given.environ,
    )


def _uid(endpoint: Endpoint, command: Command, run: str) -> str:
    """The same for a node that comes again, and no other training finds its memory; nor does the
    same one that is started again, whose rounds begin anew."""
    words = "\0".join((run, endpoint.run_id, endpoint.host, str(endpoint.port), *command.argv))
    return hashlib.sha256(words.encode(errors="surrogateescape")).hexdigest()[:16]


def _work(
    settings: Settings,
    command: Command,
    token: str,
    max_restarts: int | None,
    beside: Callable[[set[int]], Coroutine[Any, Any, None]] | None = None,
) -> "Outcome":
    import asyncio  # while a master of ours imports what it needs

    from dlrover_agent.loop import work

    agent = work(settings, command, token=token, max_restarts=max_restarts, beside=beside)
    return asyncio.run(agent)


def _not_used(flag: str, why: str, level: int = logging.WARNING) -> None:
    name = "--" + flag.replace("_", "-")
    log.log(level, "flag_not_used", extra={"flag": name, "why": why})


def _command(flags: Flags, settings: Settings, *, member: bool) -> Command:
    """What the workers run.

    Raises:
        ConfigError: a script that is not there, a number that makes no sense, a text that is not
            understood.
    """
    if "monitor_interval" in flags.given:
        _not_used("monitor_interval", "a worker's end is seen at once")
    if "start_method" in flags.given:
        _not_used("start_method", "workers are new interpreters, or forks of a prepared one")
    if flags.launcher is not None:
        raise ConfigError(refusal(flags.launcher))
    if flags.max_restarts < 0:
        raise ConfigError(f"--max-restarts is {flags.max_restarts}: expected a number from 0")
    if len(flags.role) > 1024 or not flags.role.isprintable():
        raise ConfigError(
            f"--role is {flags.role[:60]!r}: expected a name of at most 1024 printable characters"
        )
    argv, name, cold = _argv(flags, settings)
    nproc = _nproc(flags.nproc_per_node, settings)
    cpus = _cpus(flags, nproc, settings.environ)
    if cpus and nproc == 1 and "OMP_NUM_THREADS" not in settings.environ:
        cold = "--numa-binding: OpenMP counts the CPUs when it is imported"
    visible = settings.environ.get("CUDA_VISIBLE_DEVICES")
    if flags.virtual_local_rank and visible is not None and len(visible.split(",")) < nproc:
        raise ConfigError(
            f"--virtual-local-rank with {nproc} workers and CUDA_VISIBLE_DEVICES={visible!r}: "
            "expected a device for each worker"
        )
    if flags.precheck and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"{flags.precheck_flag}: {sys.executable} has no torch, which the check is made with; "
            "install it there, or leave the flag out"
        )
    log_dir = settings.log_dir if member else None
    return Command(
        argv=argv,
        name=name,
        nproc=nproc,
        inherit=settings.environ,
        role=flags.role,
        log_dir=log_dir.absolute() if log_dir is not None else None,
        output=_output(flags, settings.environ),
        event_handler=flags.event_log_handler,
        cold="--cold-start" if flags.cold_start else cold,
        signals=given.signals(flags.signals_to_handle),
        shutdown_s=_shutdown_s(flags, settings.environ),
        virtual_local_rank=flags.virtual_local_rank,
        cpus=cpus,
        precheck=flags.precheck,
        save_at_breakpoint=flags.save_at_breakpoint,
        exclude_straggler=flags.exclude_straggler,
    )


def _cpus(flags: Flags, nproc: int, environ: Mapping[str, str]) -> tuple[frozenset[int], ...]:
    if flags.numa_binding is None:
        return ()
    from dlrover_agent.affinity import Affinity, Mode

    return Affinity.of(Mode(flags.numa_binding), nproc, environ).by_rank


def _argv(flags: Flags, settings: Settings) -> tuple[tuple[str, ...], str, str]:
    """The workers' command line, what people call it, and why it is never forked (if it is not)."""
    script, python = flags.training_script, settings.python
    if flags.module and flags.no_python:
        raise ConfigError("--module and --no-python exclude each other: a module needs Python")
    cold = "" if python == sys.executable else "PYTHON_EXEC is another interpreter"
    if flags.run_path:
        _there(script)
        argv, cold = [python, "-u", "-c", _RUN_PATH, script], "--run-path"
    elif flags.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"program {script}: not found, or not executable")
        argv, cold = [script], "--no-python"
    elif flags.module:
        argv = [python, "-u", "-m", script]
    else:
        _there(script)
        argv = [python, "-u", script]
    return (*argv, *flags.training_script_args), script, cold


def _there(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise ConfigError(f"script {path.absolute()}: there is no such file")


def _output(flags: Flags, environ: Mapping[str, str]) -> Output:
    return Output(
        log_dir=Path(flags.log_dir).absolute() if flags.log_dir else None,
        redirects=given.streams("--redirects", flags.redirects),
        tee=given.streams("--tee", flags.tee),
        shown=given.local_ranks(flags.local_ranks_filter),
        out_words=tuple(flags.duplicate_stdout_filters),
        err_words=tuple(flags.duplicate_stderr_filters),
        prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or LINE_PREFIX,
        specs=flags.logs_specs,
    )


def _shutdown_s(flags: Flags, environ: Mapping[str, str]) -> float:
    name, text = SHUTDOWN, environ.get(SHUTDOWN, "30")
    if flags.shutdown_timeout is not None:
        name, text = "--shutdown-timeout", str(flags.shutdown_timeout)
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r}: expected a number of seconds from 0")
    return float(text)


def _nproc(text: str, settings: Settings) -> int:
    cpus = len(os.sched_getaffinity(0))
    if text in ("auto", "gpu", "cpu"):
        gpus = 0 if text == "cpu" else count_gpus(settings.environ.get("CUDA_VISIBLE_DEVICES"))
        if text == "gpu" and not gpus:
            raise ConfigError("--nproc-per-node=gpu: found no GPU on this node")
        if not gpus and text == "auto" and any(Path(p).exists() for p in OTHER_DEVICES):
            gpus = _ask_torch("torch.accelerator.device_count()", settings)
        return gpus or cpus
    number = int(text) if text.isdigit() else 0
    if re.fullmatch(r"[a-z]+", text):
        number = _ask_torch(f"getattr(torch, {text!r}).device_count()", settings)
    if not 1 <= number <= 1024:
        raise ConfigError(
            f"--nproc-per-node is {text!r}: expected a number from 1 to 1024, auto, cpu, or the "
            "name of a device of this node as torch has it (gpu, xpu …)"
        )
    return number


def _ask_torch(what: str, settings: Settings) -> int:
    """A number that only torch knows; 0 if it does not either. It is imported in a child."""
    ask = [settings.python, "-c", f"import torch; print({what})"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=TORCH_S)
        said = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return 0
    return int(said) if said.isdigit() else 0


def count_gpus(given: str | None) -> int:
    """GPUs of this node, without initialising any of them.

    Args:
        given: CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    from dlrover_agent import visible

    folder = Path("/proc/driver/nvidia/gpus")
    listed = sorted(folder.iterdir()) if folder.is_dir() else []
    if given is not None:
        return visible.count(given, [_uuid(gpu / "information") for gpu in listed])
    ours = len(list(Path("/dev").glob("nvidia[0-9]*")))  # a container may see the host's list
    return min(len(listed), ours) if ours else len(listed)


def _uuid(information: Path) -> str:
    """UUID of a GPU by its driver's file; empty if that does not tell it."""
    try:
        found = re.search(r"^GPU UUID:[ \t]*(\S+)", information.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1] if found is not None else ""


if __name__ == "__main__":
    sys.exit(main())
