"""What a command line starts, as far as it can be read. Pure.

Two rules hold wherever a command line is read:

* What stands behind a launcher's script belongs to the script, whatever it looks like.
* Only torchrun's flags may be abbreviated, since torchrun allows that. Flags of ours may not.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELASTIC_RUN: Final = "elastic-run"
"""The one launcher that joins a job."""
_OURS: Final = (ELASTIC_RUN, "dlrover-run")

# Flags by their spelling with dashes; each may be written with underscores too.
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
    --shutdown-timeout -r -t
    """
)
"""torchrun's flags with a value."""
OUR_SWITCHES: Final = _words(
    """
    --network-check --comm-perf-test --exclude-straggler --save-at-breakpoint --auto-config
    --numa-affinity --cold-start --version --auto-tunning --training-port --membind-policy
    --ucp-device-type
    """
)
"""Further flags of ``elastic-run`` without a value, or that it refuses."""
OUR_VALUES: Final = frozenset(("--precheck", "--node-unit", "--accelerator"))
"""Further flags of ``elastic-run`` with a value."""

LAUNCHERS: Final[Mapping[str, tuple[str, ...]]] = {
    "torchrun": ("torch.distributed.run", "torch.distributed.launch"),
    "accelerate launch": ("accelerate.commands.launch",),
    "deepspeed": ("deepspeed.launcher.runner",),
    "colossalai run": (),
    "fabric run": (),
    "horovodrun": (),
    "mpirun": (),
    "mpiexec": (),
}
"""Other launchers, and the modules by which ``python -m`` starts them."""
_BY_MODULE: Final = {module: name for name, modules in LAUNCHERS.items() for module in modules} | {
    "dlrover_agent": ELASTIC_RUN,
    "dlrover_agent.cli": ELASTIC_RUN,
}
_BY_FILE: Final = {
    "torch/distributed/run.py": "torchrun",
    "torch/distributed/launch.py": "torchrun",
}
_TOOLS: Final = frozenset(("pip", "venv", "ensurepip", "compileall", "http.server", "site", "json"))
"""Modules of ``python -m`` that train nothing."""

_SHELLS: Final = frozenset(("sh", "bash", "dash", "zsh", "ksh", "ash"))
_PYTHON: Final = re.compile(r"python[\d.]*|pypy[\d.]*")
_PYTHON_VALUES: Final = frozenset("WX")
_WRAPPERS: Final = _words(
    """
    env exec time command nohup timeout nice ionice chrt taskset numactl stdbuf setsid sudo gosu
    su-exec tini dumb-init catchsegv xvfb-run conda mamba micromamba uv poetry pipenv nsys strace
    if then elif else do while until ! {
    """
)
"""Words before a program that is started all the same."""
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_NUMBER: Final = re.compile(r"-\d+|-\d*\.\d+")
_COMMENT: Final = re.compile(r"^\s*#.*$", re.MULTILINE)
_SEPARATORS: Final = "();<>|&\n"
_DEEPEST: Final = 8
"""Programs in programs that are looked into."""
_LONGEST: Final = 20_000
"""Characters of a shell's line that are read."""


@dataclass(frozen=True, slots=True)
class Split:
    """A launcher's command line in two."""

    flags: tuple[str, ...]
    """The launcher's own words; abbreviations are written out."""
    script: tuple[str, ...]
    """The script, module or program, and all that stands behind it. Empty if there is none."""

    def has(self, *names: str) -> bool:
        """Whether one of these switches is there."""
        return any(word in names or _dashed(word) in names for word in self.flags)

    def value(self, name: str) -> str:
        """The last value of a flag; empty if it is not there."""
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
    """Of a launcher or of Python. Of another program all words are its script."""

    @property
    def launches(self) -> bool:
        """Whether it is another launcher than ours."""
        return self.program in LAUNCHERS


def split(words: Sequence[str], *, ours: bool) -> Split:
    """Part the words behind a launcher's name into its own and its script's.

    An unknown flag is taken for one without a value.

    Args:
        words: what follows the program's name.
        ours: whether it is ``elastic-run``, which has more flags than torchrun.
    """
    switches = SWITCHES | OUR_SWITCHES if ours else SWITCHES
    values = VALUES | OUR_VALUES if ours else VALUES
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
            break  # as argparse has it: no flag has a space
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
    """The flags of torchrun that a word such as ``--nproc`` may stand for; none if it is none."""
    start = _dashed(name)
    return sorted(flag for flag in SWITCHES | VALUES if flag.startswith(start) and len(start) > 2)


def _dashed(name: str) -> str:
    head, equals, value = name.partition("=")
    return "--" + head[2:].replace("_", "-") + equals + value if name.startswith("--") else name


def _last_of_cluster(word: str, values: frozenset[str]) -> str:
    """The flag that may take the next word, of short flags that are written together."""
    for letter in word[1:]:
        if f"-{letter}" in values:
            return f"-{letter}"
    return word[:2]


def calls(words: Sequence[str]) -> list[Call]:
    """The programs that a command line starts, an outer one before those in it.

    Shells (``sh -c``), wrappers (``env``, ``exec``, ``timeout`` …), ``python -m`` and the scripts
    of launchers are looked into. What only a shell knows, such as a variable's value, is not.

    Args:
        words: a container's command and arguments, or what a launcher starts.
    """
    return list(_calls(list(words), _DEEPEST))


def _calls(words: list[str], depth: int) -> Iterator[Call]:
    while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0] in _WRAPPERS):
        wraps = words[0] in _WRAPPERS
        words = words[1:]
        if wraps:  # its own flags and their values end where a program is known
            known = (i for i, word in enumerate(words) if _is_known(word))
            otherwise = len(words) if words and words[0].startswith("-") else 0
            words = words[next(known, otherwise) :]
    if not words or depth == 0:
        return
    name, rest = _base(words[0]), words[1:]
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
    parts = split(rest, ours=True)
    yield Call(ELASTIC_RUN, parts)
    yield from script_calls(parts, depth - 1)


def script_calls(parts: Split, depth: int = _DEEPEST) -> Iterator[Call]:
    """The programs that ``elastic-run`` starts as its script."""
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
    ours = split(rest, ours=False) if name == "torchrun" else Split((), tuple(rest))
    return Call(name, ours)


def _python(words: list[str], depth: int) -> Iterator[Call]:
    """What ``python WORDS…`` starts."""
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
    if file or _base(script) in (*_OURS, *LAUNCHERS) or two in LAUNCHERS:
        yield from _calls([file or script, *rest], depth - 1)
    else:
        yield Call("python", Split((), (script, *rest)))


def _module(module: str, rest: list[str], depth: int) -> Iterator[Call]:
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
    """The simple commands of ``sh WORDS…``; none where it runs a file."""
    for at, word in enumerate(words):
        if not word.startswith(("-", "+")):
            return
        if not word.startswith("--") and word.endswith("c"):
            text = "".join(words[at + 1 : at + 2])[:_LONGEST]
            yield from _simple_commands(text)
            return


def _simple_commands(text: str) -> Iterator[list[str]]:
    text = _COMMENT.sub("", text.replace("\\\n", " "))
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
            elif not redirected:  # what follows is a file
                redirected = True
                command = command[:-1] if command[-1:] in (["1"], ["2"]) else command
    except ValueError:  # a quotation without end
        return
    yield command


def _is_known(word: str) -> bool:
    base = _base(word)
    known = base in _OURS or base in _SHELLS or bool(_PYTHON.fullmatch(base))
    return known or any(base == name.split()[0] for name in LAUNCHERS)


def _base(word: str) -> str:
    return word.rpartition("/")[2]


# --- what it means for a job ---


def nested(found: Sequence[Call]) -> Call | None:
    """The first launcher of another kind among these programs; None if there is none."""
    return next((call for call in found if call.launches), None)


def in_place_of(call: Call) -> str:
    """The command line of ``elastic-run`` that does what this launcher, or Python, was to do."""
    words = ["elastic-run"]
    if call.program in ("torchrun", "python"):
        own = (word for word in call.split.flags if _dashed(word) != "--use-env")
        words += [*own, *call.split.script]
    else:
        words.append("train.py")
    text = shlex.join(words)
    return text if len(text) <= 160 else text[:159] + "…"


def remarks(words: Sequence[str]) -> str:
    """Why nodes that run this command would not train together; empty if they may.

    Args:
        words: command and arguments of the container ``main``.
    """
    found = calls(words)
    joining = next((call for call in found if call.program == ELASTIC_RUN), None)
    if joining is None:
        return _alone(found)
    if joining.split.has("--standalone"):
        return (
            "elastic-run is given --standalone, so that each node trains alone and does not join "
            "the job: leave the flag out"
        )
    inner = nested(found[found.index(joining) :])
    if inner is None:
        return ""
    return refusal(inner)


def refusal(inner: Call) -> str:
    """What ``elastic-run`` says of another launcher as its script."""
    return (
        f"the script is another launcher, {inner.program}: each worker would train alone, as a "
        f"world of its own; write: {in_place_of(inner)}"
    )


def _alone(found: Sequence[Call]) -> str:
    launcher = nested(found)
    if launcher is not None and launcher.split.value("--rdzv-backend") == "dlrover":
        return ""
    call = launcher or (found[-1] if found else None)
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
