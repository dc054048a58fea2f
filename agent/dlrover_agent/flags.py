"""The command line of ``elastic-run``: flags of torchrun, flags of DLRover, and its own flags.

Names, defaults and ``PET_*`` variables are those of torch/distributed/run.py (2.15) and
torch/distributed/argparse_util.py, with each version of torch. A test compares them with the
installed torch. torch's own parser is not used, because it costs the import of torch.
"""

import argparse
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from dlrover_agent.settings import DEFAULT_SIGNALS
from dlrover_py import __version__
from dlrover_py.protocol import commands
from dlrover_py.protocol.errors import ConfigError

C10D_PORT = 29400
"""Port of an endpoint that names none, with ``--rdzv-backend=c10d``."""
STATIC_PORT = 29500
"""Port of an endpoint that names none, with ``--rdzv-backend=static``."""
TORCH_S = 120.0
"""Seconds for a child process that imports torch and answers a question about it."""
MANY_NODES = 4
"""Number of nodes from which ``--auto-config`` checks the nodes before they train."""
MAX_NODES = 100_000
"""Largest number of nodes that ``--nnodes`` accepts."""
BINDINGS = ("node", "socket", "exclusive", "core-complex")
"""Values of ``--numa-binding``."""
SHELLS = ("bash", "zsh", "tcsh", "fish", "powershell")
"""Values of ``--print-completion``."""
_HOST = re.compile(r"^[\w.:-]+$")
_PORT = re.compile(r"[0-9]{1,5}")


class TorchrunFlags(argparse.Namespace):
    """torchrun's flags, by the names of its parser; the values of text flags are not parsed yet."""

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
    log_line_prefix_template: str
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


class Flags(TorchrunFlags):
    """The command line of ``elastic-run``: torchrun's flags, and those that torchrun lacks."""

    node_unit: int
    precheck: int
    precheck_flag: str = "--precheck"
    """The flag that requested the check, as the user wrote it."""
    exclude_straggler: bool
    save_at_breakpoint: bool
    auto_config: bool
    cold_start: bool
    log_rules: str | None
    given: frozenset[str]
    """Names of the flags whose values differ from their defaults."""
    variables: Mapping[str, str]
    """Names of the flags whose values are from the environment, each with its variable."""
    launcher: commands.Call | None
    """The launcher that the script's command line starts; None if it is not seen to start one."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with exit code 2 as in torchrun."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.variables: dict[str, str] = {}
        """Names of the flags whose values are from the environment, each with its variable."""

    def error(self, message: str) -> NoReturn:
        message = name_variables(message, self.variables)
        if message.endswith(": ''"):
            message += "; a variable of the shell may be empty"
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _RefusedFlag(argparse.Action):
    """A flag of DLRover that is not supported; the error says what to do instead."""

    def __init__(self, option_strings: Sequence[str], dest: str, instead: str) -> None:
        super().__init__(option_strings, dest, nargs="?", default=argparse.SUPPRESS)
        self.help = argparse.SUPPRESS
        self._instead = instead

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]} is not supported: {self._instead}")


class _PrintCompletion(argparse.Action):
    """Print the completion script for a shell, made from the parser, and exit."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *more: Any
    ) -> NoReturn:
        try:
            import shtab  # here, because only this flag needs it
        except ImportError:
            parser.exit(
                1,
                f"{parser.prog}: --print-completion needs the package shtab, which is not "
                "installed: pip install shtab\n",
            )
        if more[0] not in shtab.SUPPORTED_SHELLS:
            known = ", ".join(shtab.SUPPORTED_SHELLS)
            parser.error(f"--print-completion: the installed shtab knows {known} only")
        for action in parser._actions:
            if action.dest == "training_script":
                vars(action)["complete"] = shtab.FILE
        print(shtab.complete(parser, shell=more[0]))  # noqa: T201 - what the user asked for
        parser.exit()


class _Level(argparse.Action):
    """An older spelling of ``--precheck N``."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *more: Any
    ) -> None:
        setattr(namespace, self.dest, max(namespace.precheck, self.const))
        namespace.precheck_flag = more[-1]


def name_variables(message: str, variables: Mapping[str, str]) -> str:
    """Return an error message that also says which flags in it have their values from variables.

    Args:
        message: The message.
        variables: Names of flags, such as ``--nnodes``, each with its variable.
    """
    named = [
        f"{variable} in the environment sets {flag}"
        for flag, variable in variables.items()
        if re.search(rf"(?<![\w-]){flag}(?![\w-])", message)
    ]
    return f"{message}; {' and '.join(named)}" if named else message


def parser(environ: Mapping[str, str]) -> _Parser:
    """Return the parser, with defaults from the ``PET_*`` variables in ``environ``.

    Raises:
        ConfigError: The ``PET_*`` variable of a switch is not a number, or that of a flag with
            choices is none of them.
    """
    p = _Parser(
        prog="elastic-run",
        usage="elastic-run [FLAGS] training_script [its arguments]",
        description="Start a training script as torchrun does, elastically. Inside an ElasticJob "
        "the settings are in the environment, and the job's spec takes precedence over the flags.",
        epilog="Each of torchrun's flags can be given as an environment variable PET_<NAME>. "
        "What differs from torchrun: docs/migrating-from-torchrun.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,  # `commands.split` expands torchrun's abbreviations
    )
    p.add_argument("--version", action="version", version=f"elastic-run {__version__}")
    _where(_FlagGroup(p, "nodes and rendezvous, as in torchrun", environ))
    _what(_FlagGroup(p, "workers, as in torchrun", environ))
    _output(_FlagGroup(p, "output, as in torchrun", environ))
    _dlrover(_FlagGroup(p, "as in DLRover", {}))
    own_flags = _FlagGroup(p, "only in elastic-run", {})
    own_flags.switch(
        "--cold-start", "start workers as new processes only, never as forks of a zygote"
    )
    help = "YAML file with rules for the lines that workers print: docs/diagnosis.md"
    own_flags.value("--log-rules", None, help, env=False, metavar="FILE")
    p.add_argument("training_script", help="the script, module or program")
    p.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its arguments")
    return p


class _FlagGroup:
    """A group of flags, each of which can be written with dashes or with underscores."""

    def __init__(self, p: _Parser, title: str, environ: Mapping[str, str]) -> None:
        self.group, self._environ = p.add_argument_group(title), environ
        self._variables = p.variables

    def value(
        self, name: str, default: object, help: str, *short: str, env: bool = True, **options: Any
    ) -> None:
        """Add a flag with a value.

        Args:
            name: Name of the flag, with dashes.
            default: Value without the flag.
            help: Text for ``--help``.
            short: Short names of the flag.
            env: Whether the variable ``PET_<NAME>`` replaces the default.
            options: More arguments of :meth:`argparse.ArgumentParser.add_argument`.

        Raises:
            ConfigError: The variable has a value that is none of the choices.
        """
        if env and (text := self._environ.get(_pet(name))) is not None:
            default, self._variables[name] = text, _pet(name)
            choices = options.get("choices")
            if choices and text not in choices:  # argparse checks only the command line
                raise ConfigError(f"{_pet(name)} is {text!r}: expected {', '.join(choices)}")
        self.group.add_argument(*_names(name, short), default=default, help=help, **options)

    def switch(self, name: str, help: str, *short: str) -> None:
        """Add a flag without a value; ``PET_<NAME>`` turns it on by a number other than 0.

        Args:
            name: Name of the flag, with dashes.
            help: Text for ``--help``.
            short: Short names of the flag.

        Raises:
            ConfigError: The value of the variable is not a number.
        """
        text = self._environ.get(_pet(name), "0")
        try:
            default = bool(int(text))
        except ValueError:
            raise ConfigError(f"{_pet(name)} is {text!r}: expected 0 or 1") from None
        names = _names(name, short)
        self.group.add_argument(*names, action="store_true", default=default, help=help)


def _names(name: str, short: tuple[str, ...] = ()) -> list[str]:
    """Return all spellings of a flag: short, with dashes, and with underscores."""
    return list(dict.fromkeys((*short, name, "--" + name[2:].replace("-", "_"))))


def _pet(name: str) -> str:
    """Return the name of torchrun's environment variable for a flag."""
    return "PET_" + name[2:].replace("-", "_").upper()


def _where(g: _FlagGroup) -> None:
    """Add torchrun's flags for the nodes and the rendezvous."""
    g.value("--nnodes", "1:1", "nodes, or MIN:MAX")
    g.value("--rdzv-backend", "static", "c10d or static; the job's master runs at --rdzv-endpoint")
    g.value("--rdzv-endpoint", "", "HOST[:PORT] of the node that runs the master")
    g.value("--rdzv-id", "none", "name of the job, the same on all nodes")
    g.value("--rdzv-conf", "", "KEY=VALUE,…: join_timeout, last_call_timeout, is_host …")
    g.switch("--standalone", "train on this machine alone, with a master of its own")
    g.value("--node-rank", 0, "rank of this node (static only)", type=int)
    g.value("--master-addr", "127.0.0.1", "address of the node of rank 0 (static only)")
    g.value("--master-port", None, "its port (static only); 29500 if not given", type=int)
    g.value("--local-addr", None, "address at which other nodes reach this one")


def _what(g: _FlagGroup) -> None:
    """Add torchrun's flags for the workers."""
    help = "workers of this node: a number, or auto, gpu, cpu, xpu"
    g.value("--nproc-per-node", "1", help)
    g.value(
        "--max-restarts", 0, "failures of a node's workers after which they are restarted", type=int
    )
    g.value(
        "--monitor-interval",
        0.1,
        "not needed: the agent notices a worker's end immediately",
        type=float,
    )
    methods = ["spawn", "fork", "forkserver"]
    help = "not needed: workers are new processes, or forks of a zygote"
    g.value("--start-method", "spawn", help, choices=methods)
    g.value("--event-log-handler", "null", "handler of torch's elastic events: console, null …")
    g.value("--role", "default", "role of the workers")
    g.switch("--module", "the script is a module, as in python -m", "-m")
    g.switch("--no-python", "run the script as a program of its own")
    g.switch("--run-path", "run the script with runpy.run_path")
    g.value("--numa-binding", None, "CPUs near a worker's GPU", env=False, choices=BINDINGS)
    g.value(
        "--signals-to-handle",
        ",".join(number.name for number in DEFAULT_SIGNALS),
        "signals that the agent passes on to the workers before it ends",
    )
    help = "seconds from such a signal to SIGKILL; TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30"
    g.value("--shutdown-timeout", None, help, type=int)
    g.switch("--virtual-local-rank", "every worker has LOCAL_RANK 0 and sees its own GPU only")


def _output(g: _FlagGroup) -> None:
    """Add torchrun's flags for log files and the console."""
    g.value("--log-dir", None, "folder for log files: <id>_<random>/attempt_<n>/<local rank>/")
    help = "streams that go to files only: 1 stdout, 2 stderr, 3 both, or 0:1,1:3 by local rank"
    g.value("--redirects", "0", help, "-r")
    g.value("--tee", "0", "streams that go to files and to the console", "-t")
    g.value("--local-ranks-filter", "", "show only these local ranks: 0,1")
    help = "prefix of tee'd lines, with ${role_name}, ${local_rank}, ${rank} and ${hostname}"
    g.value("--log-line-prefix-template", "", help, metavar="TEMPLATE")
    help = "copy lines of a tee'd stream with one of these words (a,b) to filtered_{}.log"
    for stream in ("stdout", "stderr"):
        name = f"--duplicate-{stream}-filters"
        g.value(name, [], help.format(stream), type=_words, metavar="WORDS")
    g.value("--logs-specs", None, "class of the group torchrun.logs_specs", env=False)
    help = "print the completion script for a shell, and exit (needs shtab)"
    more: dict[str, Any] = {"action": _PrintCompletion, "choices": SHELLS, "env": False}
    g.value("--print-completion", None, help, **more)


def _dlrover(g: _FlagGroup) -> None:
    """Add the flags of DLRover's own launcher."""
    add = g.group.add_argument
    help = "check the nodes before they train: 1, or 2 to print the bandwidth too"
    add("--precheck", type=int, choices=(0, 1, 2), default=0, help=help)
    for name, level in (("--network-check", 1), ("--comm-perf-test", 2)):
        help = f"as --precheck {level}"
        more: dict[str, Any] = {"nargs": 0, "const": level, "default": argparse.SUPPRESS}
        add(*_names(name), action=_Level, dest="precheck", help=help, **more)
    g.switch("--exclude-straggler", "exclude nodes that the check finds slow")
    help = "after a failure of a worker, write the newest checkpoint in memory to storage"
    g.switch("--save-at-breakpoint", help)
    g.value("--node-unit", 1, "a round has a multiple of this number of nodes", type=int)
    g.switch("--auto-tunning", "tune micro-batch and workers of ElasticLoader while it trains")
    g.switch("--auto-config", "nodes from NODE_NUM, workers from the GPUs, check from 4 nodes on")
    names, default = _names("--numa-affinity"), argparse.SUPPRESS
    bind: dict[str, Any] = {"const": "node", "default": default, "help": "as --numa-binding node"}
    add(*names, action="store_const", dest="numa_binding", **bind)
    help = "only nvidia.com/gpu, which needs no flag"
    add("--accelerator", choices=("nvidia.com/gpu",), default="nvidia.com/gpu", help=help)
    for name, instead in REFUSED.items():
        add(*_names(name), action=_RefusedFlag, instead=instead)


REFUSED: Mapping[str, str] = {
    "--training-port": "the agents reserve a free port for each round",
    "--membind-policy": "with --numa-binding the kernel allocates memory near the CPUs of a worker",
    "--ucp-device-type": "universal checkpoints are not supported",
}
"""Flags of DLRover (its docs/deployment/argument.md) that are refused, with what to do instead."""


OF_PYTHON = {
    "-u": "leave it out, because workers run with it",
    "-B": "set PYTHONDONTWRITEBYTECODE=1 in its place",
    "-O": "set PYTHONOPTIMIZE=1 in its place",
    "-W": "set PYTHONWARNINGS in its place",
    "-X": "set the variable of the option in its place, such as PYTHONFAULTHANDLER=1",
}
"""Flags of ``python`` that may stand behind a command that was ``python``, with what to do."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Flags:
    """Parse the command line; exit with 2 if it is wrong, as torchrun does.

    For an unknown flag, a child process asks the installed torch first, for at most ``TORCH_S``
    seconds. ``--help`` and ``--version`` print and exit with 0.

    Args:
        argv: Arguments without the name of the program.
        environ: Environment with the ``PET_*`` variables and NODE_NUM.

    Raises:
        ConfigError: A ``PET_*`` variable or NODE_NUM cannot be used.
        SystemExit: The command line is wrong, or asks for the help or the version.
    """
    p = parser(environ)
    parts = commands.split(argv, elastic_run=True)
    stand_in = ["script"] if parts.script else []
    for word in parts.flags:  # the command line wins
        p.variables.pop("--" + word.partition("=")[0].lstrip("-").replace("_", "-"), None)
    flags, unknown = p.parse_known_args([*parts.flags, *stand_in], Flags())
    if unknown:
        p.error(_unknown(unknown[0]))
    defaults = vars(parser({}).parse_args(stand_in))
    flags.variables = p.variables
    flags.given = frozenset(k for k, v in vars(flags).items() if defaults.get(k) != v)
    flags.training_script, *flags.training_script_args = parts.script
    flags.launcher = commands.nested(list(commands.script_calls(parts)))
    if flags.auto_config:
        _configure(flags, environ.get("NODE_NUM", "1"))
    return flags


def _configure(flags: Flags, nodes: str) -> None:
    """Apply ``--auto-config`` as DLRover does: all nodes, all GPUs, and a check of many nodes.

    The check is requested from ``MANY_NODES`` nodes on. Each flag whose value is not the default
    stays.

    Args:
        flags: The command line, which is changed.
        nodes: Number of nodes, as NODE_NUM has it.

    Raises:
        ConfigError: NODE_NUM is not a number.
    """
    if not re.fullmatch(r"\d{1,9}", nodes):
        raise ConfigError(f"NODE_NUM is {nodes!r}: --auto-config expects the number of nodes")
    if "nnodes" not in flags.given:
        flags.nnodes = nodes
    if "nproc_per_node" not in flags.given:
        flags.nproc_per_node = "auto"
    if int(nodes) >= MANY_NODES and not flags.precheck:
        flags.precheck, flags.precheck_flag = 1, f"--auto-config with {nodes} nodes"


def _unknown(flag: str) -> str:
    """Return the error message for an unknown flag.

    A child process may be asked whether torchrun knows the flag, for at most ``TORCH_S`` seconds.
    """
    if instead := OF_PYTHON.get(flag[:2]):
        return f"{flag} is a flag of Python, which elastic-run starts by itself: {instead}"
    name = flag.partition("=")[0]
    several = commands.abbreviated(name)
    if several:
        return f"ambiguous flag {name}: it could be {', '.join(several)}"
    return f"unknown flag {flag}: {_known_to_torch(flag)}"


def _known_to_torch(flag: str) -> str:
    """Return whether the installed torchrun, which may be newer, has the flag, in words.

    A child process asks torch, for at most ``TORCH_S`` seconds. If torch cannot be asked, the
    answer is that it does not have the flag.
    """
    ask = (
        "import sys; from torch.distributed.run import get_args_parser\n"
        "name = sys.argv[1].split('=')[0]\n"
        "for a in get_args_parser()._actions:\n"
        "    if name in a.option_strings: print(a.help)\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", ask, flag],
            capture_output=True,
            text=True,
            check=False,
            timeout=TORCH_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "neither torchrun nor DLRover has it"
    output = done.stdout.strip()
    if output:
        return f"the installed torchrun has it ({output}), this version of elastic-run does not"
    return "neither torchrun nor DLRover has it"


def _words(text: str) -> list[str]:
    """Split ``a,b`` into two words; a double comma stands for one comma in a word."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


def nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes, from ``N`` or ``MIN:MAX``.

    Raises:
        ConfigError: The text is neither, a number is 0 or over ``MAX_NODES``, or MIN is over MAX.
    """
    found = re.fullmatch(r"(\d{1,9})(?::(\d{1,9}))?", text.strip())
    if found is None:
        raise ConfigError(f"--nnodes is {text!r}: expected N or MIN:MAX")
    min_nodes, max_nodes = int(found[1]), int(found[2] or found[1])
    if not 0 < min_nodes <= max_nodes <= MAX_NODES:
        raise ConfigError(f"--nnodes is {text!r}: expected 0 < MIN ≤ MAX ≤ {MAX_NODES}")
    return min_nodes, max_nodes


def streams(flag: str, text: str) -> Mapping[int | None, int]:
    """Parse the value of ``--redirects`` or ``--tee``.

    Args:
        flag: Name of the flag, for the error message.
        text: Its value: ``0`` to ``3`` for all workers, or ``RANK:0–3,…`` by local rank.

    Returns:
        Streams by local rank: 0 none, 1 stdout, 2 stderr, 3 both. The key ``None`` stands for all
        local ranks without an entry of their own.

    Raises:
        ConfigError: The value has another form.
    """
    if re.fullmatch(r"[0123]", text):
        return {None: int(text)}
    if re.fullmatch(r"\d{1,9}:[0123](,\d{1,9}:[0123])*", text):
        pairs = (part.split(":") for part in text.split(","))
        return {int(rank): int(which) for rank, which in pairs}
    raise ConfigError(f"{flag} is {text!r}: expected 0, 1, 2 or 3, or by local rank: 0:1,1:3")


def local_ranks(text: str) -> frozenset[int] | None:
    """Return the local ranks whose output is shown; None for all local ranks.

    Raises:
        ConfigError: The text is not a list of numbers.
    """
    if not text:
        return None
    if not re.fullmatch(r" *\d{1,9} *(, *\d{1,9} *)*", text):
        raise ConfigError(f"--local-ranks-filter is {text!r}: expected local ranks, such as 0,1")
    return frozenset(int(part) for part in text.split(","))


def conf(text: str) -> dict[str, str]:
    """Return the value of ``--rdzv-conf`` as a dict.

    Raises:
        ConfigError: The text is not of the form ``KEY=VALUE,…``.
    """
    pairs = {}
    for part in text.split(",") if text.strip() else []:
        key, _, value = (word.strip() for word in part.partition("="))
        if not key or not value:
            raise ConfigError(f"--rdzv-conf is {text!r}: expected KEY=VALUE,KEY=VALUE")
        pairs[key] = value
    return pairs


def endpoint(text: str, port: int) -> tuple[str, int]:
    """Return host and port, from ``HOST[:PORT]`` or ``[V6][:PORT]``.

    Args:
        text: The endpoint; an empty text stands for localhost.
        port: Port if the text names none.

    Raises:
        ConfigError: The text has neither form, or the port is over 65535.
    """
    text = text.strip() or "localhost"
    host, given = text, str(port)
    if ":" in text and not (text[0] == "[" and text[-1] == "]"):
        host, _, given = text.rpartition(":")
    if len(host) > 1 and host[0] == "[" and host[-1] == "]":
        host = host[1:-1]
    if not (_PORT.fullmatch(given) and int(given) < 65536 and _HOST.match(host)):
        raise ConfigError(
            f"--rdzv-endpoint is {text!r}: expected HOST:PORT, such as node0.example:29400"
        )
    return host, int(given)


def signals(text: str) -> tuple[signal.Signals, ...]:
    """Return the signals with these names, which are separated by commas.

    Raises:
        ConfigError: A name is not that of a signal, or the signal cannot be handled.
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
