"""Find out what a command line starts, as far as it can be read. Pure.

Two rules apply wherever a command line is read:

* Everything behind a launcher's script belongs to the script, even if it looks like a flag of the
  launcher.
* Only torchrun's flags may be abbreviated, since torchrun allows that. Flags that only
  ``elastic-run`` has may not.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


def _words(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


ELASTIC_RUN: Final = "elastic-run"
"""The only launcher that joins a job."""
_OURS: Final = (ELASTIC_RUN, "dlrover-run")
"""The programs that are ``elastic-run``."""
ENV_STANDALONE: Final = "PET_STANDALONE"
"""Environment variable that turns ``--standalone`` on."""
ENV_NNODES: Final = "PET_NNODES"
"""Environment variable that stands in for ``--nnodes``."""
NO_ENV: Final[Mapping[str, str]] = MappingProxyType({})
"""An environment without variables."""

# Flags are spelled with dashes here. Each may be written with underscores, too.
SWITCHES: Final = _words(
    """
    --standalone --module --no-python --run-path --virtual-local-rank --help -m -h
    """
)
"""torchrun's flags without a value."""
VALUES: Final = _words(
    """
    --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts
    --monitor-interval --start-method --event-log-handler --role --log-dir --redirects --tee
    --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank
    --master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle
    --shutdown-timeout --log-line-prefix-template --print-completion -r -t
    """
)
"""torchrun's flags with a value, of all versions."""
ELASTIC_RUN_SWITCHES: Final = _words(
    """
    --network-check --comm-perf-test --exclude-straggler --save-at-breakpoint --auto-config
    --numa-affinity --cold-start --version --auto-tunning --training-port --membind-policy
    --ucp-device-type
    """
)
"""Further flags of ``elastic-run`` that have no value, or that it refuses."""
ELASTIC_RUN_VALUES: Final = frozenset(("--precheck", "--node-unit", "--accelerator", "--log-rules"))
"""Further flags of ``elastic-run`` with a value."""

LAUNCHERS: Final[Mapping[str, tuple[str, ...]]] = {
    "torchrun": ("torch.distributed.run", "torch.distributed.launch"),
    "dlrover.trainer.torch": ("dlrover.trainer.torch.main", "dlrover.trainer.torch.elastic_run"),
    "accelerate launch": ("accelerate.commands.launch",),
    "deepspeed": ("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    "colossalai run": (),
    "fabric run": (),
    "horovodrun": (),
    "mpirun": (),
    "mpiexec": (),
    "srun": (),
}
"""Other launchers, and the modules by which ``python -m`` starts them."""
_SAME_FLAGS: Final = ("torchrun", "dlrover.trainer.torch")
"""Launchers whose flags ``elastic-run`` has, too."""
_ALSO: Final = {"accelerate-launch": "accelerate launch"}
"""Further programs that are one of these launchers."""
_BY_MODULE: Final = {module: name for name, modules in LAUNCHERS.items() for module in modules} | {
    "dlrover_agent": ELASTIC_RUN,
    "dlrover_agent.cli": ELASTIC_RUN,
}
"""Module → the launcher that ``python -m`` starts with it."""
_BY_FILE: Final = {
    "torch/distributed/run.py": "torchrun",
    "torch/distributed/launch.py": "torchrun",
    "dlrover/trainer/torch/main.py": "dlrover.trainer.torch",
    "dlrover/trainer/torch/elastic_run.py": "dlrover.trainer.torch",
}
"""End of a script's path → the launcher that it is."""
_TOOLS: Final = frozenset(("pip", "venv", "ensurepip", "compileall", "http.server", "site", "json"))
"""Modules of ``python -m`` that train nothing."""

_SHELLS: Final = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash"))
"""Programs that are shells."""
_PYTHON: Final = re.compile(r"python[\d.]*|pypy[\d.]*")
"""Programs that are Python."""
_PYTHON_VALUES: Final = frozenset("WX")
"""Short flags of Python with a value, besides ``-c`` and ``-m``."""
_WRAPPERS: Final = _words(
    """
    env exec time command nohup timeout nice ionice chrt taskset numactl stdbuf setsid sudo gosu
    su-exec tini dumb-init catatonit setpriv runuser prlimit catchsegv xvfb-run busybox eval
    conda mamba micromamba uv uvx poetry pipenv pixi pdm hatch rye
    apptainer singularity docker podman enroot
    nsys ncu strace py-spy ddtrace-run opentelemetry-instrument
    if then elif else do while until ! {
    """
)
"""Words that may come before a program and still start it."""
_ASIDE: Final = _words(
    """
    tee cat tail head grep sed awk sort tr wc date ts echo printf done fi esac } wait exit return
    true false : sleep sync trap set unset export cd ls df du free ps mkdir touch rm cp mv chmod
    chown tar gzip zip rsync curl wget aws gsutil rclone nvidia-smi
    """
)
"""Programs and shell words that are used beside a training, and start none."""
_FOUND: Final = re.compile(r"(?:\$\(|`)\s*(?:which|command\s+-v)\s+([\w./+-]+)\s*[)`]")
"""A program whose path a shell looks up: ``$(which torchrun)``."""
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
"""An assignment to a variable before a program: ``NAME=value``."""
_NUMBER: Final = re.compile(r"-\d+|-\d*\.\d+")
"""A negative number, which is no flag."""
_COMMENT: Final = re.compile(
    r"""('[^']*'|"(?:\\.|[^"\\])*"|\\.)|(?:^|(?<=[\s;&|()]))\#[^\n]*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
"""A shell comment; or, as group 1, a quotation, which may look like one."""
_HEREDOC: Final = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1(?!\w)")
"""The start of a here-document: the lines that follow are a program's input. Group 2 is the line
after them."""
_SEPARATORS: Final = "();<>|&\n"
"""Characters that end a word of a shell, and separate commands or redirect."""
_DEEPEST: Final = 8
"""Levels of programs in programs that are read."""
_LONGEST: Final = 20_000
"""Characters of a shell's command line that are read."""
_MOST_WORDS: Final = 10_000
"""Words of a command line that are read: an object at the API server may have a million."""


@dataclass(frozen=True, slots=True)
class Split:
    """A launcher's command line, divided into flags and script."""

    flags: tuple[str, ...]
    """The launcher's own words; abbreviated flags are completed."""
    script: tuple[str, ...]
    """The script, module or program, and all words behind it. Empty if there is none."""

    def has(self, *names: str) -> bool:
        """Return whether one of these switches is present."""
        return any(word in names or _dashed(word) in names for word in self.flags)

    def value(self, name: str) -> str:
        """Return the last value of a flag; empty if the flag is absent or has no value.

        The name is spelled with dashes.
        """
        found, words = "", self.flags
        for at, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if _dashed(flag) == name:
                found = value if equals else "".join(words[at + 1 : at + 2])
        return found


@dataclass(frozen=True, slots=True)
class Call:
    """A program that a command line starts."""

    program: str
    """``elastic-run``, a name in :data:`LAUNCHERS`, ``python``, or the program's own name."""
    split: Split
    """The command line of a launcher or of Python. For another program all words are its script."""

    @property
    def launches(self) -> bool:
        """Return whether the program is a launcher other than ``elastic-run``."""
        return self.program in LAUNCHERS


def split(words: Sequence[str], *, elastic_run: bool) -> Split:
    """Divide the words behind a launcher's name into its flags and its script.

    The script begins with the first word that is neither a flag nor a flag's value, or behind
    ``--``. An unknown flag is treated as a flag without a value. Nothing is refused.

    Args:
        words: the words behind the program's name.
        elastic_run: whether the launcher has the flags of ``elastic-run``, not only torchrun's.
    """
    switches = SWITCHES | ELASTIC_RUN_SWITCHES if elastic_run else SWITCHES
    values = VALUES | ELASTIC_RUN_VALUES if elastic_run else VALUES
    flags: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
            break
        if len(word) < 2 or word[0] != "-" or _NUMBER.fullmatch(word):
            break
        name, equals, value = word.partition("=")
        known = _dashed(name)
        if known not in switches | values and " " in word:
            break  # as in argparse: no flag has a space
        if known not in switches | values and name.startswith("--"):
            full = abbreviated(name)
            if len(full) == 1:
                known = full[0]
                word = known + equals + value
        if word[1] != "-":
            known = _last_of_cluster(word, values)
            equals = "" if known in values and word[-1] == known[-1] else "="
        flags.append(word)
        at += 1
        if known in values and not equals and at < len(words):
            flags.append(words[at])
            at += 1
    return Split(tuple(flags), tuple(words[at:]))


def abbreviated(name: str) -> list[str]:
    """Return the flags of torchrun that a word such as ``--nproc`` may abbreviate; maybe none."""
    start = _dashed(name)
    return sorted(flag for flag in SWITCHES | VALUES if flag.startswith(start) and len(start) > 2)


def _dashed(name: str) -> str:
    """Return a long flag with dashes instead of underscores; return any other word unchanged."""
    head, equals, value = name.partition("=")
    return "--" + head[2:].replace("_", "-") + equals + value if name.startswith("--") else name


def _last_of_cluster(word: str, values: frozenset[str]) -> str:
    """Return the flag that may take the next word, in a word of several short flags.

    If none of them takes a value, it is the first.
    """
    for letter in word[1:]:
        if f"-{letter}" in values:
            return f"-{letter}"
    return word[:2]


def calls(words: Sequence[str]) -> list[Call]:
    """Return the programs that a command line starts; an outer program comes before its inner ones.

    Shells (``sh -c``), wrappers (``env``, ``exec``, ``timeout`` …), ``python -m`` and the scripts
    of launchers are read. What only a running shell knows, such as the value of a variable, is not.
    What cannot be read, or is behind the limits of this module, is left out without an error.

    Args:
        words: a container's command and arguments, or what a launcher starts.
    """
    return list(_calls(list(words[:_MOST_WORDS]), _DEEPEST))


def _calls(words: list[str], depth: int) -> Iterator[Call]:
    """Yield the programs that a command line starts; none without a program or if ``depth`` is 0.

    Assignments and wrappers before a program are skipped.
    """
    at = known = 0
    # Each word is read once: a line may be long, and may be written to slow its reader down.
    while at < len(words) and (_ASSIGNMENT.fullmatch(words[at]) or _base(words[at]) in _WRAPPERS):
        wraps = _base(words[at]) in _WRAPPERS
        at += 1
        if wraps:  # the wrapper's flags and values end at a known program
            ahead = range(max(at, known), len(words))
            known = next((i for i in ahead if _is_known(words[i])), len(words))
            if known < len(words) or (at < len(words) and words[at].startswith("-")):
                at = known
    words = words[at:]
    if not words or depth <= 0:
        return
    name, rest = _base(words[0]), words[1:]
    name = _ALSO.get(name, name)
    two = f"{name} {rest[0]}" if rest else ""
    if name in _OURS:
        yield from _ours(rest, depth)
    elif name in LAUNCHERS or two in LAUNCHERS:
        name, rest = (name, rest) if name in LAUNCHERS else (two, rest[1:])
        yield _launcher(name, rest)
    elif name in _SHELLS:
        for line in _shell_lines(rest):
            yield from _calls(line, depth - 1)
    elif _PYTHON.fullmatch(name):
        yield from _python(rest, depth)
    elif name in ("run", "--") and rest:  # conda run, uv run, tini --
        yield from _calls(rest, depth - 1)
    else:
        yield Call(name, Split((), tuple(words)))


def _ours(rest: list[str], depth: int) -> Iterator[Call]:
    """Yield ``elastic-run`` and the programs that it starts."""
    parts = split(rest, elastic_run=True)
    yield Call(ELASTIC_RUN, parts)
    yield from script_calls(parts, depth - 1)


def script_calls(parts: Split, depth: int = _DEEPEST) -> Iterator[Call]:
    """Yield the programs that ``elastic-run`` starts as its script; none if it has no script.

    Without ``--no-python`` the script is Python's.
    """
    if not parts.script:
        return
    words = list(parts.script)
    if parts.has("--no-python"):
        yield from _calls(words, depth)
    elif parts.has("--module", "-m"):
        yield from _python(["-m", *words], depth)
    else:
        yield from _python(["--", *words], depth)


def _launcher(name: str, rest: list[str]) -> Call:
    """Return another launcher. Only the command lines of :data:`_SAME_FLAGS` are divided."""
    if name not in _SAME_FLAGS:
        return Call(name, Split((), tuple(rest)))
    return Call(name, split(rest, elastic_run=name != "torchrun"))


def _python(words: list[str], depth: int) -> Iterator[Call]:
    """Yield the programs that ``python WORDS…`` starts; none for ``-c`` and without a script.

    A script that is a launcher is yielded as that launcher.
    """
    at = 0
    while at < len(words) and len(words[at]) > 1 and words[at][0] == "-":
        word = words[at]
        at += 1
        if word == "--":
            break
        letter = next((x for x in word[1:] if x in "mc" or x in _PYTHON_VALUES), "")
        behind = word.partition(letter)[2] if letter and word[1] != "-" else ""
        if letter == "c" and word[1] != "-":
            return  # a program in the line itself: not read
        if letter == "m" and word[1] != "-":
            module, rest = (behind, words[at:]) if behind else ("".join(words[at : at + 1]), [])
            rest = rest or words[at + (0 if behind else 1) :]
            yield from _module(module, rest, depth)
            return
        if (letter and not behind and word[1] != "-") or word == "--check-hash-based-pycs":
            at += 1
    script, rest = "".join(words[at : at + 1]), words[at + 1 :]
    if not script:
        return
    two = f"{_base(script)} {rest[0]}" if rest else ""
    file = next((name for end, name in _BY_FILE.items() if script.endswith(end)), "")
    if file or _base(script) in (*_OURS, *LAUNCHERS, *_ALSO) or two in LAUNCHERS:
        yield from _calls([file or script, *rest], depth - 1)
    else:
        yield Call("python", Split((), (script, *rest)))


def _module(module: str, rest: list[str], depth: int) -> Iterator[Call]:
    """Yield the programs that ``python -m`` starts with a module.

    A module that is no launcher is yielded as a call of ``python``.
    """
    name = _BY_MODULE.get(module.removesuffix(".__main__"))
    if name in _OURS:
        yield from _ours(rest, depth)
    elif name is not None:
        yield _launcher(name, rest)
    elif f"{module} {''.join(rest[:1])}" in LAUNCHERS:  # python -m colossalai run
        yield _launcher(f"{module} {rest[0]}", rest[1:])
    else:
        yield Call("python", Split(("-m",), (module, *rest)))


def _shell_lines(words: list[str]) -> Iterator[list[str]]:
    """Yield the simple commands of ``sh WORDS…``; none if it runs a file.

    ``$@`` is replaced by the arguments behind the line; other variables stay.
    """
    at, has_line = 0, False
    while at < len(words) and words[at][:1] in ("-", "+"):
        word = words[at]
        at += 1
        if word in ("-", "--"):
            break
        if word.startswith("--"):
            at += word in ("--rcfile", "--init-file")
        else:
            has_line |= word[0] == "-" and "c" in word
            at += word.count("o") + word.count("O")  # each takes a name, as in -o pipefail
    if not has_line:
        return
    given = words[at + 2 :]  # after the line come $0 and the arguments
    for command in _simple_commands("".join(words[at : at + 1])[:_LONGEST]):
        yield [w for word in command for w in (given if word in ("$@", "$*") else [word])]


def _without_heredocs(text: str) -> str:
    """Return a shell's text without its here-documents.

    If the end of one is missing, its lines stay in the text.
    """
    lines = text.split("\n")
    last = {line.strip(): at for at, line in enumerate(lines)}
    kept, ends = [], list[str]()
    for at, line in enumerate(lines):
        if ends:
            del ends[: line.strip() == ends[0]]
            continue
        kept.append(_HEREDOC.sub("", line))
        ends = [end for _, end in _HEREDOC.findall(line) if last.get(end, 0) > at]
    return "\n".join(kept)


def _simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell's text, each as its words, which may be none.

    Redirections are left out. If a quotation has no end, it and its command are dropped.
    """
    text = _COMMENT.sub(r"\1", _without_heredocs(text)).replace("\\\n", " ")
    text = _FOUND.sub(r"\1", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    command: list[str] = []
    redirected = False
    try:
        for word in lexer:
            if not word or set(word) - set(_SEPARATORS):
                command += [] if redirected else [word]
            elif not set(word) & set("<>"):
                yield command
                command, redirected = [], False
            elif not redirected:  # a file name follows
                redirected = True
                command = command[:-1] if command[-1:] in (["1"], ["2"]) else command
    except ValueError:  # a quotation without end
        return
    yield command


def _is_known(word: str) -> bool:
    """Return whether a word is the name of a shell, of Python or of a launcher."""
    base = _base(word)
    known = base in _OURS or base in _SHELLS or bool(_PYTHON.fullmatch(base))
    return known or base in _ALSO or any(base == name.split()[0] for name in LAUNCHERS)


def _base(word: str) -> str:
    """Return the last part of a path."""
    return word.rpartition("/")[2]


# --- What a command line means for a job ---


def nested(found: Sequence[Call]) -> Call | None:
    """Return the first launcher other than ``elastic-run``; None if there is none."""
    return next((call for call in found if call.launches), None)


def in_place_of(call: Call) -> str:
    """Return the command line of ``elastic-run`` that replaces that of a launcher or of Python.

    For a launcher whose flags ``elastic-run`` does not have, it is an example with ``train.py``.
    A line of more than 160 characters is cut and ends with "…".
    """
    words = ["elastic-run"]
    if call.program in (*_SAME_FLAGS, "python"):
        own, script = call.split.flags, call.split.script
        words += [word for word in own if _dashed(word) != "--use-env"]
        # Otherwise `split` would take the script for a flag.
        words += ["--"] if "".join(script[:1]).startswith("-") else []
        words += script
    else:
        words.append("train.py")
    text = shlex.join(words)
    return text if len(text) <= 160 else text[:159] + "…"


def remarks(words: Sequence[str], environ: Mapping[str, str] = NO_ENV) -> str:
    """Return why nodes that run a command would not train together; empty if no reason is found.

    A command that cannot be read gives no reason. If the reason is :data:`ENV_STANDALONE`, the text
    begins with this name.

    Args:
        words: command and arguments of the container ``main``.
        environ: the container's environment variables, as far as they are known.
    """
    found = calls(words)
    ours = [call for call in found if call.program == ELASTIC_RUN]
    if not joining(found, environ):
        alone = _launcher_remark(found) if nested(found) or not ours else ""
        return alone or _standalone_remark(environ, flag=bool(ours))
    inner = nested([call for one in ours for call in script_calls(one.split)])
    return refusal(inner) if inner is not None else ""


def _standalone_remark(environ: Mapping[str, str], *, flag: bool) -> str:
    """Return why each node trains alone, by a variable or by the flag; empty if neither is so."""
    alone = "each node trains alone and does not join the job: leave the"
    if is_standalone(environ):
        return f"{ENV_STANDALONE} is given to elastic-run, so that {alone} variable out"
    return f"elastic-run is given --standalone, so that {alone} flag out" if flag else ""


def joining(found: Sequence[Call], environ: Mapping[str, str]) -> list[Call]:
    """Return the calls of ``elastic-run`` that join the job: those without ``--standalone``.

    Args:
        found: the programs that a command line starts.
        environ: the environment variables of the command line, as far as they are known.
    """
    ours = () if is_standalone(environ) else found
    return [c for c in ours if c.program == ELASTIC_RUN and not c.split.has("--standalone")]


def is_standalone(environ: Mapping[str, str]) -> bool:
    """Return whether :data:`ENV_STANDALONE` makes each ``elastic-run`` a job of its own."""
    try:
        return bool(int(environ.get(ENV_STANDALONE, "0")))
    except ValueError:  # elastic-run refuses this value
        return False


def refusal(inner: Call) -> str:
    """Return the message of ``elastic-run`` about another launcher as its script."""
    return (
        f"the script is another launcher, {inner.program}: each worker would train alone, as a "
        f"world of its own; write: {in_place_of(inner)}"
    )


def _launcher_remark(found: Sequence[Call]) -> str:
    """Return why a command without ``elastic-run`` does not join the job; empty if it may.

    It may if it is torchrun with DLRover's rendezvous, or a program that is not known to train.
    """
    launcher = nested(found)
    backend = launcher.split.value("--rdzv-backend") if launcher is not None else ""
    if launcher is not None and (launcher.program, backend) == ("torchrun", "dlrover"):
        return ""
    call = launcher or next((one for one in found[::-1] if one.program not in _ASIDE), None)
    if call is None or not (call.launches or call.program == "python"):
        return ""
    script = call.split.script[:1]
    if call.program == "python" and (not script or script[0] in _TOOLS):
        return ""
    what = call.program if call.launches else "python " + " ".join((*call.split.flags, *script))
    return (
        f"{what} does not join the job, so that each node would train alone; write: "
        f"{in_place_of(call)}"
    )
