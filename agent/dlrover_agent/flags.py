"""The command line of ``elastic-run``: torchrun's flags, DLRover's, and ours.

Names, defaults and ``PET_*`` variables are those of torch/distributed/run.py (2.13) and
torch/distributed/argparse_util.py; a test holds them against the installed torch. Our own parser,
since torch's costs the import of torch.
"""

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dlrover_py import __version__
from dlrover_py.protocol import commands
from dlrover_py.protocol.errors import ConfigError

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
C10D_PORT = 29400
STATIC_PORT = 29500
TORCH_S = 120.0
"""A child that is asked what torch knows imports it, on a machine that may be busy."""
MANY_NODES = 4
"""From so many on, --auto-config checks the nodes."""
BINDINGS = ("node", "socket", "exclusive", "core-complex")
_HOST = re.compile(r"^[\w.:-]+$")


class Flags(argparse.Namespace):
    """What was given, by the names of torchrun's parser; texts are not yet understood."""

    nnodes: str
    nproc_per_node: str
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: str
    standalone: bool
    max_restarts: int
    monitor_interval: float
    start_method: str
    event_log_handler: str
    role: str
    module: bool
    no_python: bool
    run_path: bool
    log_dir: str | None
    redirects: str
    tee: str
    local_ranks_filter: str
    duplicate_stdout_filters: list[str]
    duplicate_stderr_filters: list[str]
    node_rank: int
    master_addr: str
    master_port: int | None
    local_addr: str | None
    logs_specs: str | None
    numa_binding: str | None
    signals_to_handle: str
    shutdown_timeout: int | None
    virtual_local_rank: bool
    training_script: str
    training_script_args: list[str]
    node_unit: int
    precheck: int
    precheck_flag: str = "--precheck"
    """The flag that asked for the check, as it was written."""
    exclude_straggler: bool
    save_at_breakpoint: bool
    auto_config: bool
    cold_start: bool
    given: frozenset[str]
    """Names of the flags that are not at their defaults."""
    launcher: commands.Call | None
    """The other launcher that the script is, as far as its command line shows it."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and exits with 2 as torchrun's."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Refused(argparse.Action):
    """A flag of DLRover that we do not have: says what to do instead."""

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS)
        self.help = argparse.SUPPRESS
        self._instead = instead

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is not supported: {self._instead}")


class _Level(argparse.Action):
    """An older spelling of ``--precheck N``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *more: Any
    ) -> None:
        setattr(namespace, self.dest, max(namespace.precheck, self.const))
        namespace.precheck_flag = more[-1]


def parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser; defaults are those that ``environ`` leaves.

    Raises:
        ConfigError: a ``PET_*`` variable of a switch is no number.
    """
    p = _Parser(
        prog="elastic-run",
        usage="elastic-run [FLAGS] training_script [its arguments]",
        description="Start a training script as torchrun does, elastically. Inside an ElasticJob "
        "what it needs stands in its environment, and the job's spec beats the flags.",
        epilog="Each of torchrun's flags can be given as an environment variable PET_<NAME>. "
        "What differs from torchrun: docs/migrating-from-torchrun.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,  # `commands.split` writes torchrun's abbreviations out
    )
    p.add_argument("--version", action="version", version=f"elastic-run {__version__}")
    _where(_Group(p, "nodes and rendezvous, as torchrun's", environ))
    _what(_Group(p, "workers, as torchrun's", environ))
    _output(_Group(p, "output, as torchrun's", environ))
    _dlrover(_Group(p, "as DLRover's", {}))
    ours = _Group(p, "only here", {})
    ours.switch("--cold-start", "start workers as new interpreters only, never as forks")
    p.add_argument("training_script", help="the script, module or program")
    p.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return p


class _Group:
    """Adds flags that can be written with dashes or underscores."""

    def __init__(self, p: argparse.ArgumentParser, title: str, environ: Mapping[str, str]) -> None:
        self.group, self._environ = p.add_argument_group(title), environ

    def value(
        self, name: str, default: object, help: str, *short: str, env: bool = True, **options: Any
    ) -> None:
        """A flag with a value; ``PET_<NAME>`` beats the default."""
        if env:
            default = self._environ.get(_pet(name), default)
        self.group.add_argument(*_names(name, short), default=default, help=help, **options)

    def switch(self, name: str, help: str, *short: str) -> None:
        """A flag without one; ``PET_<NAME>`` switches it on by a number other than 0."""
        text = self._environ.get(_pet(name), "0")
        try:
            default = bool(int(text))
        except ValueError:
            raise ConfigError(f"{_pet(name)} is {text!r}: expected 0 or 1") from None
        names = _names(name, short)
        self.group.add_argument(*names, action="store_true", default=default, help=help)


def _names(name: str, short: tuple[str, ...] = ()) -> list[str]:
    return list(dict.fromkeys((*short, name, "--" + name[2:].replace("-", "_"))))


def _pet(name: str) -> str:
    return "PET_" + name[2:].replace("-", "_").upper()


def _where(g: _Group) -> None:
    g.value("--nnodes", "1:1", "nodes, or MIN:MAX")
    g.value("--rdzv-backend", "static", "c10d or static: where --rdzv-endpoint is, our master runs")
    g.value("--rdzv-endpoint", "", "HOST[:PORT] of the node that runs the master")
    g.value("--rdzv-id", "none", "name of the job, the same on all nodes")
    g.value("--rdzv-conf", "", "KEY=VALUE,…: join_timeout, last_call_timeout, is_host …")
    g.switch("--standalone", "train on this machine alone, with a master of its own")
    g.value("--node-rank", 0, "rank of this node (static only)", type=int)
    g.value("--master-addr", "127.0.0.1", "address of the node of rank 0 (static only)")
    g.value("--master-port", None, "its port (static only); 29500 if not given", type=int)
    g.value("--local-addr", None, "address at which other nodes reach this one")


def _what(g: _Group) -> None:
    help = "workers of this node: a number, or auto, gpu, cpu, xpu"
    g.value("--nproc-per-node", "1", help)
    g.value("--max-restarts", 0, "worker failures of a node that are made good", type=int)
    g.value("--monitor-interval", 0.1, "not needed: a worker's end is seen at once", type=float)
    methods = ["spawn", "fork", "forkserver"]
    help = "not needed: workers are new interpreters, or forks of a prepared one"
    g.value("--start-method", "spawn", help, choices=methods)
    g.value("--event-log-handler", "null", "handler of torch's elastic events: console, null …")
    g.value("--role", "default", "role of the workers")
    g.switch("--module", "the script is a module, as in python -m", "-m")
    g.switch("--no-python", "run the script as a program of its own")
    g.switch("--run-path", "run the script with runpy.run_path")
    g.value("--numa-binding", None, "CPUs near a worker's GPU", env=False, choices=BINDINGS)
    g.value("--signals-to-handle", DEFAULT_SIGNALS, "signals that end the workers in order")
    help = "seconds from such a signal to SIGKILL; TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30"
    g.value("--shutdown-timeout", None, help, type=int)
    g.switch("--virtual-local-rank", "every worker has LOCAL_RANK 0 and sees its own GPU only")


def _output(g: _Group) -> None:
    g.value("--log-dir", None, "folder for log files: <id>_<random>/attempt_<n>/<local rank>/")
    help = "streams that go to files only: 1 stdout, 2 stderr, 3 both, or 0:1,1:3 by local rank"
    g.value("--redirects", "0", help, "-r")
    g.value("--tee", "0", "streams that go to files and to the console", "-t")
    g.value("--local-ranks-filter", "", "show only these local ranks: 0,1")
    help = "copy lines of a tee'd stream with one of these words (a,b) to filtered_{}.log"
    for stream in ("stdout", "stderr"):
        name = f"--duplicate-{stream}-filters"
        g.value(name, [], help.format(stream), type=_words, metavar="WORDS")
    g.value("--logs-specs", None, "class of the group torchrun.logs_specs", env=False)


def _dlrover(g: _Group) -> None:
    add = g.group.add_argument
    help = "check the nodes before they train: 1, or 2 to print the bandwidth too"
    add("--precheck", type=int, choices=(0, 1, 2), default=0, help=help)
    for name, level in (("--network-check", 1), ("--comm-perf-test", 2)):
        help = f"as --precheck {level}"
        more: dict[str, Any] = {"nargs": 0, "const": level, "default": argparse.SUPPRESS}
        add(*_names(name), action=_Level, dest="precheck", help=help, **more)
    g.switch("--exclude-straggler", "leave out nodes that the check finds slow")
    help = "after a failure of a worker, store the newest state that is saved in memory"
    g.switch("--save-at-breakpoint", help)
    g.value("--node-unit", 1, "a round has a multiple of so many nodes", type=int)
    g.switch("--auto-config", "nodes from NODE_NUM, workers from the GPUs, check from 4 nodes on")
    names, default = _names("--numa-affinity"), argparse.SUPPRESS
    bind: dict[str, Any] = {"const": "node", "default": default, "help": "as --numa-binding node"}
    add(*names, action="store_const", dest="numa_binding", **bind)
    help = "only nvidia.com/gpu, which needs no flag"
    add("--accelerator", choices=("nvidia.com/gpu",), default="nvidia.com/gpu", help=help)
    for name, instead in REFUSED.items():
        add(*_names(name), action=_Refused, instead=instead)


REFUSED: Mapping[str, str] = {
    "--auto-tunning": "nothing here changes a script's parameters; set them in the script",
    "--training-port": "agents reserve a free port for each round by themselves",
    "--membind-policy": "with --numa-binding the kernel takes memory near the CPUs of a worker",
    "--ucp-device-type": "universal checkpoints are not converted; there is no such step here",
}
"""DLRover's flags (its docs/deployment/argument.md) without a counterpart, and what to do."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Flags:
    """Read the command line; exits with 2 on a misuse, as torchrun does.

    Raises:
        ConfigError: a ``PET_*`` variable cannot be used.
    """
    p = parser(environ)
    parts = commands.split(argv, ours=True)
    stand_in = ["script"] if parts.script else []
    flags, unknown = p.parse_known_args([*parts.flags, *stand_in], Flags())
    if unknown:
        p.error(_unknown(unknown[0]))
    defaults = vars(parser({}).parse_args(stand_in))
    flags.given = frozenset(k for k, v in vars(flags).items() if defaults.get(k) != v)
    flags.training_script, *flags.training_script_args = parts.script
    flags.launcher = commands.nested(list(commands.script_calls(parts)))
    if flags.auto_config:
        _configure(flags, environ.get("NODE_NUM", "1"))
    return flags


def _configure(flags: Flags, nodes: str) -> None:
    """Apply --auto-config as DLRover does: all nodes, all GPUs, and a check of many nodes."""
    if not nodes.isdigit():
        raise ConfigError(f"NODE_NUM is {nodes!r}: --auto-config expects the number of nodes")
    if "nnodes" not in flags.given:
        flags.nnodes = nodes
    if "nproc_per_node" not in flags.given:
        flags.nproc_per_node = "auto"
    if int(nodes) >= MANY_NODES and not flags.precheck:
        flags.precheck, flags.precheck_flag = 1, f"--auto-config with {nodes} nodes"


def _unknown(flag: str) -> str:
    name = flag.partition("=")[0]
    several = commands.abbreviated(name)
    if several:
        return f"ambiguous flag {name}: it could be {', '.join(several)}"
    return f"unknown flag {flag}: {_known_to_torch(flag)}"


def _known_to_torch(flag: str) -> str:
    """What the installed torchrun, which may be newer, says of a flag."""
    ask = (
        "import sys; from torch.distributed.run import get_args_parser\n"
        "name = sys.argv[1].split('=')[0]\n"
        "for a in get_args_parser()._actions:\n"
        "    if name in a.option_strings: print(a.help)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", ask, flag],
            capture_output=True,
            text=True,
            check=False,
            timeout=TORCH_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "neither torchrun nor DLRover has it"
    said = done.stdout.strip()
    if said:
        return f"the installed torchrun has it ({said}), this version of elastic-run does not"
    return "neither torchrun nor DLRover has it"


def _words(text: str) -> list[str]:
    """``a,b`` → two words; a double comma is a comma."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


def nodes(text: str) -> tuple[int, int]:
    """Fewest and most nodes, from ``N`` or ``MIN:MAX``.

    Raises:
        ConfigError: it is neither.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if found is None:
        raise ConfigError(f"--nnodes is {text!r}: expected N or MIN:MAX")
    fewest, most = int(found[1]), int(found[2] or found[1])
    if not 0 < fewest <= most:
        raise ConfigError(f"--nnodes is {text!r}: expected 0 < MIN ≤ MAX")
    return fewest, most


def streams(flag: str, text: str) -> Mapping[int | None, int]:
    """Which streams (1 stdout, 2 stderr, 3 both) by local rank; ``None`` is all others.

    Raises:
        ConfigError: neither 0–3 nor RANK:0–3,….
    """
    if re.fullmatch(r"[0123]", text):
        return {None: int(text)}
    if re.fullmatch(r"\d+:[0123](,\d+:[0123])*", text):
        pairs = (part.split(":") for part in text.split(","))
        return {int(rank): int(which) for rank, which in pairs}
    raise ConfigError(f"{flag} is {text!r}: expected 0, 1, 2 or 3, or by local rank: 0:1,1:3")


def local_ranks(text: str) -> frozenset[int] | None:
    """Local ranks that are shown; None if all are.

    Raises:
        ConfigError: not a list of numbers.
    """
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        words = f"--local-ranks-filter is {text!r}: expected local ranks, such as 0,1"
        raise ConfigError(words) from None


def conf(text: str) -> dict[str, str]:
    """``--rdzv-conf`` as a dict.

    Raises:
        ConfigError: not KEY=VALUE,….
    """
    pairs = {}
    for part in text.split(",") if text.strip() else []:
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf is {text!r}: expected KEY=VALUE,KEY=VALUE")
        pairs[key] = value
    return pairs


def endpoint(text: str, port: int) -> tuple[str, int]:
    """Host and port, from ``HOST[:PORT]`` or ``[V6][:PORT]``.

    Raises:
        ConfigError: it is neither.
    """
    text = text.strip() or "localhost"
    host, given = text, str(port)
    if ":" in text and not (text[0] == "[" and text[-1] == "]"):
        host, _, given = text.rpartition(":")
    if len(host) > 1 and host[0] == "[" and host[-1] == "]":
        host = host[1:-1]
    if not (given.isascii() and given.isdigit() and int(given) < 65536 and _HOST.match(host)):
        raise ConfigError(f"endpoint {text!r}: expected HOST:PORT, such as node0.example:29400")
    return host, int(given)


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Signals by their names.

    Raises:
        ConfigError: a name that is no signal, or one that nobody can handle.
    """
    found = []
    for name in text.split(","):
        number = signal.Signals.__members__.get(name.strip())
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"--signals-to-handle has {name.strip()!r}: expected names such as "
                "SIGTERM,SIGUSR1 of signals that can be handled"
            )
        found.append(number)
    return tuple(dict.fromkeys(found))
