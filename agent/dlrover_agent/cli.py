"""``elastic-run`` (alias ``dlrover-run``): start a training script as torchrun does.

Inside an ElasticJob it is a member: what it needs stands in its environment, and the job's spec
beats the flags. Alone, ``--standalone`` trains on this machine.
"""

import argparse
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlrover_agent.settings import HANDLED, Command, Settings
from dlrover_agent.standalone import OwnMaster
from dlrover_py import __version__
from dlrover_py.protocol.errors import ConfigError, DLRoverError, ExitCode
from dlrover_py.telemetry import setup

if TYPE_CHECKING:
    from dlrover_agent.core import Exit

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


def _member(args: argparse.Namespace, settings: Settings) -> "Exit":
    settings.check()
    command = _command(args, settings)
    if args.nnodes != "1:1":
        log.info("flag_not_used", extra={"flag": "--nnodes", "why": "the job's spec says it"})
    restarts = getattr(args, "max_restarts", None)
    if restarts is not None:
        log.info("flag_not_used", extra={"flag": "--max-restarts", "why": "restartCount says it"})
    token = settings.token()
    import asyncio

    from dlrover_agent.loop import work

    return asyncio.run(work(settings, command, token=token, max_restarts=restarts))


def _standalone(args: argparse.Namespace, settings: Settings) -> "Exit":
    """A job of one node: our master is a child, on a port of its own."""
    if not args.standalone:
        raise ConfigError(
            "no job was found: DLROVER_MASTER_ADDR is not set. To train on this machine alone, "
            "add --standalone; to run a job of several nodes, use `dlrover job run job.yaml`"
        )
    if args.nnodes not in ("1", "1:1"):
        raise ConfigError(f"--nnodes is {args.nnodes}: --standalone is a job of exactly one node")
    command = _command(args, settings)
    with OwnMaster(f"standalone-{os.getpid()}") as master:
        import asyncio  # while the master imports what it needs

        from dlrover_agent.loop import work

        own = Settings(
            master_addr=master.address,
            node_id="n0",
            job_name=master.name,
            log_dir=command.log_dir,
            connect_s=settings.connect_s,
            environ=settings.environ,
        )
        restarts = getattr(args, "max_restarts", 0)
        agent = work(own, command, token=master.token, max_restarts=restarts, beside=master.keep)
        return asyncio.run(agent)


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
