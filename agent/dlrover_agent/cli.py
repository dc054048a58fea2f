"""``elastic-run`` (alias ``dlrover-run``): start a training script as torchrun does.

Inside an ElasticJob it is a member: what it needs stands in its environment, and the job's spec
beats the flags. Alone, ``--standalone`` trains on this machine.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrover_agent.core import Exit
from dlrover_agent.loop import HANDLED, work
from dlrover_agent.settings import Settings
from dlrover_agent.workers import Command
from dlrover_py import __version__
from dlrover_py.protocol.errors import ConfigError, DLRoverError, ExitCode
from dlrover_py.protocol.names import API_VERSION, KIND, MAIN_CONTAINER, TOKEN_FILE
from dlrover_py.telemetry import setup

log = logging.getLogger("agent.cli")


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def parser() -> argparse.ArgumentParser:
    """The command line; names and defaults are torchrun's (torch/distributed/run.py)."""
    p = argparse.ArgumentParser(
        prog="elastic-run", description=__doc__, formatter_class=_Formatter, allow_abbrev=False
    )
    p.add_argument("--version", action="version", version=f"elastic-run {__version__}")
    p.add_argument(
        "--standalone", action="store_true", help="train on this machine alone, with its own master"
    )
    _flag(
        p,
        "--nnodes",
        metavar="N",
        default="1:1",
        help="nodes, or MIN:MAX; in a job the spec says it",
    )
    _flag(
        p,
        "--nproc-per-node",
        default="1",
        help="workers of this node: a number, 'gpu', 'cpu', or 'auto' (GPUs if there are any)",
    )
    _flag(
        p,
        "--max-restarts",
        type=_count,
        help="worker failures that are made good; in a job the spec says it (default: 0)",
        default=argparse.SUPPRESS,
    )
    p.add_argument(
        "-m", "--module", action="store_true", help="the script is a module, as in python -m"
    )
    _flag(p, "--no-python", action="store_true", help="run the script as a program of its own")
    _flag(
        p,
        "--log-dir",
        type=Path,
        default=None,
        help="keep the workers' output in files: <dir>/<node>/<incarnation>/<round>/<rank>/",
    )
    _flag(
        p,
        "--cold-start",
        action="store_true",
        help="start workers as new interpreters only, never from a process that has imported "
        "their modules",
    )
    p.add_argument("training_script", help="the script, module or program")
    p.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return p


def _flag(p: argparse.ArgumentParser, name: str, **options: object) -> None:
    """A flag that can be written with dashes or underscores, as torchrun's."""
    names = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
    p.add_argument(*names, **options)  # type: ignore[arg-type]


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``elastic-run``; return its exit code."""
    args = parser().parse_args(argv)
    try:
        settings = Settings.from_environment()
        member = settings.in_job and not args.standalone
        level = settings.log_level or ("INFO" if member else "WARNING")
        setup("elastic-run", level=level, node=settings.node_id)
        with _signals_wait():
            outcome = _member(args, settings) if member else _standalone(args, settings)
    except DLRoverError as error:
        _say(error)
        return int(error.exit_code)
    if outcome.code != ExitCode.OK:
        _say(outcome.message)
    return outcome.code


def _say(words: object) -> None:
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        sys.stderr.write(f"elastic-run: {words}\n")


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """What is made in here is also unmade: signals wait until the agent takes them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _member(args: argparse.Namespace, settings: Settings) -> Exit:
    settings.check()
    command = _command(args, settings)
    if args.nnodes != "1:1":
        log.info("flag_not_used", extra={"flag": "--nnodes", "why": "the job's spec says it"})
    restarts = getattr(args, "max_restarts", None)
    if restarts is not None:
        log.info("flag_not_used", extra={"flag": "--max-restarts", "why": "restartCount says it"})
    token = settings.token()
    return asyncio.run(work(settings, command, token=token, max_restarts=restarts))


def _standalone(args: argparse.Namespace, settings: Settings) -> Exit:
    """A job of one node: our master is a child, on a port of its own."""
    if not args.standalone:
        raise ConfigError(
            "no job was found: DLROVER_MASTER_ADDR is not set. To train on this machine alone, "
            "add --standalone; to run a job of several nodes, use `dlrover job run job.yaml`"
        )
    if args.nnodes not in ("1", "1:1"):
        raise ConfigError(f"--nnodes is {args.nnodes}: --standalone is a job of exactly one node")
    command = _command(args, settings)
    folder = Path(tempfile.mkdtemp(prefix=f"dlrover-run-{os.getpid()}-", dir="/tmp"))
    try:
        token = secrets.token_urlsafe(24)
        token_file = folder / TOKEN_FILE
        token_file.touch(mode=0o600)
        token_file.write_text(token)
        with (
            socket.create_server(("127.0.0.1", 0)) as job,
            socket.create_server(("127.0.0.1", 0)) as health,
        ):
            own = Settings(
                master_addr=f"127.0.0.1:{job.getsockname()[1]}",
                node_id="n0",
                job_name=f"standalone-{os.getpid()}",
                log_dir=command.log_dir,
                connect_s=settings.connect_s,
                environ=settings.environ,
            )
            restarts = getattr(args, "max_restarts", 0)
            return asyncio.run(
                work(
                    own,
                    command,
                    token=token,
                    max_restarts=restarts,
                    beside=lambda kin: _keep_master(
                        folder, (job, health), own.job_name, token_file, kin
                    ),
                )
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _keep_master(
    folder: Path,
    sockets: tuple[socket.socket, socket.socket],
    name: str,
    token_file: Path,
    kin: set[int],
) -> None:
    """Run the master, again when it has died: the journal is kept, and the port is ours.

    Raises:
        ConfigError: it cannot use its settings.
    """
    job, health = sockets
    read, write = os.pipe()
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": {
            "replicaSpecs": {
                "worker": {
                    "template": {
                        "spec": {"containers": [{"name": MAIN_CONTAINER, "command": ["true"]}]}
                    }
                }
            }
        },
    }
    argv = [sys.executable, "-m", "dlrover_py.master", "--static", json.dumps(document)]
    argv += ["--state-dir", str(folder), "--token-file", str(token_file)]
    argv += ["--listen-fd", str(job.fileno()), "--health-fd", str(health.fileno())]
    argv += ["--lifeline-fd", str(read)]
    loop = asyncio.get_running_loop()
    process = None
    pause = 0.1
    try:
        while True:
            process = _spawn_master(argv, [job.fileno(), health.fileno(), read])
            kin.add(process.pid)
            ended = asyncio.Event()
            fd = os.pidfd_open(process.pid)
            loop.add_reader(fd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(fd)
                os.close(fd)
            code = process.wait()
            kin.discard(process.pid)
            if code == ExitCode.USAGE:
                raise ConfigError("the master cannot be started; it said why")
            log.warning("master_ended", extra={"code": code, "then": "it is restarted"})
            await asyncio.sleep(pause)
            pause = min(5.0, pause * 2)
    finally:
        os.close(write)
        if process is not None:
            process.kill()  # it is made to be killed: what must last is in its journal
            process.wait()
        os.close(read)


def _spawn_master(argv: list[str], keep: list[int]) -> "subprocess.Popen[bytes]":
    # A session of its own: Ctrl-C is the agent's affair.
    # Nobody could replace the one node, so that its silence (Ctrl-Z) means nothing.
    patient = {"DLROVER_MASTER_LEASE_S": "86400", "DLROVER_MASTER_SUSPECT_S": "86400"}
    environ = {"DLROVER_MASTER_LOG_LEVEL": "WARNING", **patient, **os.environ}  # noqa: TID251
    return subprocess.Popen(argv, pass_fds=keep, env=environ, start_new_session=True)


def _command(args: argparse.Namespace, settings: Settings) -> Command:
    """What the workers run.

    Raises:
        ConfigError: a script that is not there, or a number of workers that makes no sense.
    """
    script = args.training_script
    if args.module and args.no_python:
        raise ConfigError("--module and --no-python exclude each other: a module needs Python")
    if args.no_python:
        if shutil.which(script) is None:
            raise ConfigError(f"program {script}: not found, or not executable")
        argv = [script]
    elif args.module:
        argv = [settings.python, "-u", "-m", script]
    else:
        if not Path(script).is_file():
            where = Path(script) if Path(script).is_absolute() else Path.cwd() / script
            raise ConfigError(f"script {where}: there is no such file")
        argv = [settings.python, "-u", script]
    log_dir = args.log_dir if args.log_dir is not None else settings.log_dir
    return Command(
        argv=(*argv, *args.training_script_args),
        nproc=_nproc(args.nproc_per_node, settings),
        inherit=settings.environ,
        log_dir=log_dir.absolute() if log_dir is not None else None,
        echo=args.log_dir is not None and settings.log_dir is None,
        cold=_cold(args, settings),
    )


def _cold(args: argparse.Namespace, settings: Settings) -> str:
    """Why workers are only ever started cold; empty if they may be forked."""
    if args.cold_start:
        return "--cold-start"
    if args.no_python:
        return "--no-python"
    return "" if settings.python == sys.executable else "PYTHON_EXEC is another interpreter"


def _nproc(text: str, settings: Settings) -> int:
    cpus = len(os.sched_getaffinity(0))
    if text in ("auto", "gpu", "cpu"):
        gpus = 0 if text == "cpu" else count_gpus(settings.environ.get("CUDA_VISIBLE_DEVICES"))
        if text == "gpu" and not gpus:
            raise ConfigError("--nproc-per-node=gpu: found no GPU on this node")
        return gpus or cpus
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 1024:
        raise ConfigError(
            f"--nproc-per-node is {text!r}: expected a number from 1 to 1024, auto, gpu or cpu"
        )
    return number


def count_gpus(visible: str | None) -> int:
    """GPUs of this node, without initialising any of them.

    Args:
        visible: CUDA_VISIBLE_DEVICES; its entries (indices, UUIDs, MIG names) are counted.
    """
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


if __name__ == "__main__":
    sys.exit(main())
