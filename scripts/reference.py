"""The pages of docs/reference/ that are made from the code.

``python scripts/reference.py --write`` writes them, ``--check`` ends with 1 if one of them is out
of date. ``make docs-reference`` calls the first, a test the second.

Sources: the CRD of the chart, the parser of ``elastic-run``, the commands of ``dlrover``, the
settings of the programs, the exit codes and exceptions of ``protocol/errors.py``, the conditions
and events of ``protocol/reasons.py``, and the messages of ``protocol/``
(:mod:`scripts.protocol_page`).
"""

import argparse
import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import yaml

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
CRD = ROOT / "charts/dlrover/templates/crd.yaml"
MADE = "<!-- Made by scripts/reference.py: run `make docs-reference`. -->"
Schema = dict[str, Any]
Row = tuple[str, ...]


# --- Markdown ---


def table(head: Row, rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table. Line breaks and bars in a cell are escaped."""
    lines = [head, tuple("---" for _ in head), *rows]
    return [
        "|" + "|".join(f" {_cell(one)} " if one else " " for one in line) + "|" for line in lines
    ]


def _cell(text: str) -> str:
    parts = " ".join(text.split()).split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]  # outside of code
    # A bar ends the cell on GitHub even inside of code, unless it is escaped.
    return "`".join(parts).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as code; empty text stays empty."""
    return f"`{text}`" if text else ""


def page(title: str, intro: str, *parts: Iterable[str]) -> str:
    """Return a page: title, paragraph, and parts with an empty line between them."""
    blocks = [f"# {title}", MADE, *filled(intro)]
    blocks += ["\n".join(part) for part in parts]
    return "\n\n".join(blocks) + "\n"


def filled(text: str) -> list[str]:
    """Return paragraphs in lines of at most 100 characters."""
    return [
        textwrap.fill(" ".join(one.split()), 100, break_on_hyphens=False)
        for one in re.split(r"\n\s*\n", inspect.cleandoc(text))
    ]


# --- ElasticJob ---


def crd_schema() -> Schema:
    """Return the schema in the chart's CRD, without the lines of the chart's templates."""
    lines = [line for line in CRD.read_text().splitlines() if not line.lstrip().startswith("{{")]
    (version,) = yaml.safe_load("\n".join(lines))["spec"]["versions"]
    found: Schema = version["schema"]["openAPIV3Schema"]
    return found


def fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Yield each field below an object, on all levels: path, schema, and whether it is required.

    The fields of a list's items are below ``path[]``, those of a mapping's values below
    ``path.<name>``. Neighbours with the same schema are one field, ``path.{one,other}``.
    """
    required = set(schema.get("required", ()))
    alike: list[tuple[list[str], Schema]] = []
    for name, inner in schema.get("properties", {}).items():
        if alike and alike[-1][1] == inner and "properties" in inner:
            alike[-1][0].append(name)
        else:
            alike.append(([name], inner))
    for names, inner in alike:
        word = names[0] if len(names) == 1 else f"{{{','.join(names)}}}"
        where = f"{path}.{word}" if path else word
        yield where, inner, names[0] in required
        yield from fields(inner, where)
        for step, key in (("[]", "items"), (".<name>", "additionalProperties")):
            below = inner.get(key)
            if isinstance(below, dict):
                yield from fields(below, where + step)


def kind_of(schema: Schema) -> str:
    """Return the type of a field with its limits; ``any`` if the schema has none.

    Only the limits of numbers, and the values of an enumeration, are named.
    """
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map of {kind_of(schema['additionalProperties'])}"
    if "enum" in schema:
        return "one of " + ", ".join(code(str(one)) for one in schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{kind}, {low} to {high}"
    if low is not None:
        return f"{kind}, {low} or more"
    return str(kind)


def _field(path: str, schema: Schema, required: bool) -> Row:
    default = code(str(schema["default"])) if "default" in schema else ""
    return code(path), kind_of(schema), "required" if required else default, about(schema)


def about(schema: Schema) -> str:
    """Return the description of a field, with the rules that the API server checks."""
    rules = [rule.get("message", "") for rule in schema.get("x-kubernetes-validations", ())]
    said = schema.get("description", "")
    checked = "; ".join(rule for rule in rules if rule)
    return f"{said} Checked: {checked}." if checked else said


def elasticjob() -> str:
    """Return the page docs/reference/elasticjob.md."""
    schema = crd_schema()["properties"]
    parts: list[list[str]] = []
    for name, title in (("spec", "What you write"), ("status", "What is reported")):
        head = ("field", "type", "default", "meaning")
        rows = [_field(*one) for one in fields(schema[name], name)]
        parts.append([f"## {title}: `{name}`", "", *table(head, rows)])
    intro = """
        The fields of an `ElasticJob`, from the definition (CRD) that the chart installs. The
        [guide](../kubernetes.md) explains how the fields work together. A field inside a list is
        written `list[].field`. Roles with the same fields share rows, as in `{ps,chief}`. The API
        server refuses values that do not fit the type.
    """
    return page("ElasticJob", intro, *parts)


# --- elastic-run ---


def elastic_run() -> str:
    """Return the page docs/reference/elastic-run.md."""
    from dlrover_agent import flags

    parser = flags.parser({})
    parts: list[list[str]] = []
    for group in parser._action_groups:
        actions = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
        rows = [_flag(one) for one in actions]
        if rows:
            title = str(group.title)
            title = title[:1].upper() + title[1:]
            parts.append([f"## {title}", "", *table(("flag", "default", "meaning"), rows)])
    refused = [(code(name), why) for name, why in flags.REFUSED.items()]
    parts.append(["## Refused", "", *table(("flag of DLRover", "what to do instead"), refused)])
    intro = """
        The flags of `elastic-run` (`dlrover-run` is the same program). Flags may be written with
        dashes or underscores. Each of torchrun's flags can be given as an environment variable
        `PET_<NAME>`. What differs from torchrun is in
        [the migration guide](../migrating-from-torchrun.md).
    """
    return page("elastic-run", intro, *parts)


def _flag(action: argparse.Action) -> Row:
    """Return the row of a flag of ``elastic-run``. Its spellings with underscores are left out."""
    names = [one for one in action.option_strings if "_" not in one.strip("-")] or [action.dest]
    value = ""
    if action.option_strings and action.nargs != 0:
        value = str(action.metavar or action.dest.upper())
        if action.choices:
            value = ",".join(map(str, action.choices))
    shown = ", ".join(code(f"{one} {value}".strip()) for one in names)
    given = action.default not in (None, argparse.SUPPRESS, "", []) and action.nargs != 0
    default = code(str(action.default)) if given else ""
    return shown, default, action.help or ""


# --- dlrover ---


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below a group, with its command line. Hidden commands are left out."""
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {word}")
        elif not command.hidden:
            yield f"{name} {word}", command


def dlrover() -> str:
    """Return the page docs/reference/dlrover.md."""
    from dlrover_py.cli.commands import root

    parts: list[list[str]] = []
    for name, command in commands(root, "dlrover"):
        context = click.Context(command, info_name=name)
        usage = " ".join(command.collect_usage_pieces(context))
        words = (command.help or "").partition("\f")[0].rstrip()  # the rest is for developers
        lines = [f"## {name}", "", "\n\n".join(filled(words))]
        lines += ["", "```text", f"{name} {usage}", "```"]
        rows = [_option(one, context) for one in command.params if isinstance(one, click.Option)]
        if rows:
            lines += ["", *table(("option", "default", "meaning"), rows)]
        parts.append(lines)
    intro = """
        All commands of `dlrover` with their options. [The guide](../cli.md) explains which job a
        command means, and has examples. Each command has `-h`. Exit codes are in
        [a table of their own](exit-codes.md).
    """
    return page("dlrover", intro, *parts)


def _option(option: click.Option, context: click.Context) -> Row:
    """Return the row of an option of ``dlrover``. Its limits are left out of the meaning."""
    record = option.get_help_record(context)
    names = ", ".join(code(one) for one in (*option.opts, *option.secondary_opts))
    said = re.sub(r"\s*\[(default|x[<>]|\d+<=x)[^]]*\]", "", record[1] if record else "")
    value = "" if option.is_flag or option.count else option.make_metavar(context)
    if isinstance(option.type, click.Choice):
        value = ",".join(map(str, option.type.choices))
    said_default = option.show_default if isinstance(option.show_default, str) else None
    default = option.default if said_default is None else said_default
    plain = isinstance(default, (int, float, str)) and not isinstance(default, bool)
    shown = code(str(default)) if plain and default != "" else ""
    return f"{names} {code(value)}".strip(), shown, said


# --- settings ---


def attribute_texts(source: str) -> dict[str, str]:
    """Return the docstring of each assignment of a module or class, by the assigned name.

    Assignments without a docstring are left out. Of one name in several classes the last counts.
    """
    tree = ast.parse(textwrap.dedent(source))
    found: dict[str, str] = {}
    bodies = [tree.body, *(one.body for one in tree.body if isinstance(one, ast.ClassDef))]
    for body in bodies:
        for one, after in pairwise(body):
            match one, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name))
                    | ast.Assign(targets=[ast.Name(id=name)]),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = inspect.cleandoc(text)
    return found


def master_settings() -> Iterator[Row]:
    """Yield a row for each setting of a master: variable, default and meaning."""
    from dlrover_py.master import settings
    from dlrover_py.protocol.timing import Timing

    texts = attribute_texts(inspect.getsource(Timing))
    texts |= attribute_texts(inspect.getsource(settings.Settings))
    for name, field in settings.Settings.model_fields.items():
        default = "" if field.default is None else code(f"{field.default}")
        yield code(settings.PREFIX + name.upper()), default, _plain(texts.get(name, ""))


def shared_names() -> dict[str, str]:
    """Return the environment variables of ``protocol/names.py``, with their docstrings."""
    from dlrover_py.protocol import names

    texts = attribute_texts(inspect.getsource(names))
    return {
        value: _plain(texts.get(name, ""))
        for name, value in vars(names).items()
        if name.startswith("ENV_") and isinstance(value, str)
    }


def _plain(text: str) -> str:
    return re.sub(r"\s*\(:\w+:`[^`]*`\)|:\w+:", "", text).replace("``", "`")


YOURS: Mapping[str, str] = {
    "DLROVER_STATE_DIR": "Folder for runs on this machine: logs, journal, last status. Default: "
    "`~/.local/state/dlrover`, or `dlrover` below `XDG_STATE_HOME`.",
    "DLROVER_CACHE_DIR": "Folder for what a later run of the same script starts faster with, or "
    "`none`. Default: `~/.cache/dlrover-py`, or `dlrover-py` below `XDG_CACHE_HOME`. Only a folder "
    "that is named here gets compiled code, too.",
    "DLROVER_RUNTIME_DIR": "Folder for sockets and tokens of running jobs. Only its owner may "
    "enter it. Default: `/tmp/dlrover-<uid>`.",
    "DLROVER_LOG_FORMAT": "`words` or `json`, for the log lines of all programs. Default: words on "
    "a terminal outside a Pod, else JSON.",
    "DLROVER_LOG_LEVEL": "Lowest level that agents and persisters log. Default: `INFO` in a job, "
    "else `WARNING`.",
    "DLROVER_TOKEN_FILE": "File with a secret that all nodes of a job share. Set it for jobs with "
    "`--rdzv-endpoint`; elsewhere the platform sets it.",
    "DLROVER_TOPOLOGY": "Where the node is, such as `zone-a/rack-3`: near nodes get neighbouring "
    "ranks ([topology](../topology.md)).",
    "DLROVER_SHM_DIR": "Folder of shared memory for checkpoints. Default: `/dev/shm`.",
    "DLROVER_CHECK_FAULT": "For tests of the [network check](../network-check.md): a fault of a "
    "node, such as `n1=fail`.",
    "PYTHON_EXEC": "Interpreter of the workers. Default: the one that runs `elastic-run`.",
}
"""Settings that a user may set for all programs but the master; see ``unknown_settings``."""


def unknown_settings() -> set[str]:
    """Return the names of ``YOURS`` that no program contains; a test expects none."""
    texts = [
        path.read_text()
        for top in ("dlrover_py", "agent", "operator")
        for path in (ROOT / top).glob("**/*.py")
    ]
    return {name for name in YOURS if not any(name in text for text in texts)}


def settings() -> str:
    """Return the page docs/reference/settings.md."""
    head = ("variable", "meaning")
    given = {name: said for name, said in shared_names().items() if name not in YOURS}
    master = "On Kubernetes they go into [the master's template](../kubernetes.md#the-masters-pod)."
    theirs = "The platform sets them for an agent, and the agent for its workers. Do not set them."
    sections = [
        ("Variables that you may set", "", table(head, _coded(YOURS))),
        (
            "Settings of the master",
            f"{master} Times are in seconds.",
            table(("variable", "default", "meaning"), master_settings()),
        ),
        ("Variables that the programs set", theirs, table(head, _coded(given))),
    ]
    parts = [
        [f"## {title}", "", *([*filled(said), ""] if said else []), *lines]
        for title, said, lines in sections
    ]
    intro = """
        The environment variables of all programs. Workers also have torchrun's variables (`RANK`,
        `WORLD_SIZE`, `MASTER_ADDR` and so on) with torchrun's meaning.
    """
    return page("Settings", intro, *parts)


def _coded(texts: Mapping[str, str]) -> list[Row]:
    return [(code(name), said) for name, said in texts.items()]


# --- exit codes ---

MEANINGS: Mapping[str, str] = {
    "OK": "The program did what it was asked. A job that was run or waited for has succeeded.",
    "FAILED": "The training failed or was stopped before its end, or a checkpoint is damaged.",
    "USAGE": "The command line, a file or the environment cannot be used, or there is no such job: "
    "nothing was changed. Or standard output cannot be written.",
    "SUPERSEDED": "A newer master, round or life of the same node exists, so this program ended.",
    "UNREACHABLE": "The job's master, its cluster process or the API server did not answer in "
    "time, or it refused the token.",
    "BUG": "A fault in DLRover-Py. Please report it with the log.",
}


def exit_codes() -> str:
    """Return the page docs/reference/exit-codes.md."""
    from dlrover_py.protocol.errors import ExitCode

    rows = [(code(str(int(one))), MEANINGS[one.name]) for one in ExitCode]
    rows += [
        (code("130"), "Ctrl-C ended the command."),
        (code("128 + N"), "Signal N ended the program, as in any shell: `143` is SIGTERM."),
    ]
    parts = [
        table(("exit code", "meaning"), rows),
        [
            "How Kubernetes sees the end of a Pod, and what that costs the job, is in",
            "[the table of Pod ends](../operations.md#how-pods-end).",
        ],
    ]
    intro = """
        The exit codes of `dlrover`, and of an agent, a master or an operator that a platform has
        started.

        An `elastic-run` that you start yourself ends as `torchrun` does: with `0`, or with `1` for
        every failure, Ctrl-C included, once it has begun. Only a command line that its parser
        refuses gives `2`.
    """
    return page("Exit codes", intro, *parts)


# --- exceptions ---


def exceptions() -> Iterator[tuple[str, type[Exception]]]:
    """Yield the exceptions that a program may catch, each with its public module."""
    from dlrover_py import ps
    from dlrover_py.kubernetes.errors import KubeError
    from dlrover_py.protocol import errors
    from dlrover_py.trainer import data

    for one in vars(errors).values():
        if isinstance(one, type) and issubclass(one, errors.DLRoverError):
            yield errors.__name__, one
    yield KubeError.__module__, KubeError
    yield ps.__name__, ps.DataLossError
    yield data.__name__, data.ShardUnreadableError


def exception_row(module: str, one: type[Exception]) -> Row:
    """Return name, base class, exit code, meaning, and what to do, from the docstring."""
    said, _, advice = _plain(inspect.getdoc(one) or "").partition("\n\nWhat to do: ")
    exit_code = getattr(one, "exit_code", None)
    return (
        code(f"{module}.{one.__name__}"),
        code(one.__bases__[0].__name__),
        "" if exit_code is None else code(str(int(exit_code))),
        said,
        advice[:1].upper() + advice[1:],
    )


def errors() -> str:
    """Return the page docs/reference/errors.md."""
    head = ("exception", "is also", "exit code", "meaning", "what to do")
    intro = """
        The exceptions that a script, a program or a notebook may catch. Each message says what was
        expected, what was found and what to do. A program of ours that ends with one has its
        [exit code](exit-codes.md).
    """
    return page("Exceptions", intro, table(head, (exception_row(*one) for one in exceptions())))


# --- conditions and events ---


def sections(words: type[StrEnum]) -> dict[str, list[tuple[str, str]]]:
    """Return members and docstrings below each heading (``# --- … ---``) of an enumeration.

    Each member must have a docstring, and must be below a heading.
    """
    source = inspect.getsource(words)
    texts = attribute_texts(source)
    found: dict[str, list[tuple[str, str]]] = {}
    for line in source.splitlines():
        if heading := re.fullmatch(r"    # --- (.+) ---", line):
            under = found[heading[1]] = []
        elif member := re.match(r"    ([A-Z_]+) = ", line):
            under.append((words[member[1]].value, _plain(texts[member[1]])))
    return found


def conditions() -> str:
    """Return the page docs/reference/conditions.md."""
    from dlrover_py.protocol.reasons import ConditionReason, ConditionType

    head: Row = ("condition", "when True", "when False", "what to do")
    parts = [
        [f"## {title}", "", *table(head, [(code(word), *_aspects(text)) for word, text in words])]
        for title, words in sections(ConditionType).items()
    ]
    head = ("reason", "condition", "event", "meaning")
    for title, words in sections(ConditionReason).items():
        said = REASONS[title]
        rows = [(code(word), *_reason(text)) for word, text in words]
        parts.append([f"## {title}", "", "\n\n".join(filled(said)), "", *table(head, rows)])
    intro = """
        What a job on [Kubernetes](../kubernetes.md) reports, and what to do. Each condition has one
        writer. A condition that reports a problem appears with the problem. When the problem is
        over, the condition becomes False, in most cases with the reason `Resolved`.
    """
    return page("Conditions", intro, *parts)


REASONS: Mapping[str, str] = {
    "Reasons of the operator's conditions": """
        The reasons with an entry in the column *event* are also Kubernetes events of that name.

        If the master's Pod cannot start, `MasterReady` has the Pod's own reason, such as
        `ImagePullBackOff` or `Unschedulable`. With `CrashLoopBackOff`, the message has the master's
        last words. [Operations](../operations.md#reasons-of-the-operators-conditions) says how to
        correct the operator's options or the master's template.
    """,
    "Reasons of the master's conditions": """
        A condition that reports a problem has its own name as the reason while it is True.
        `Running` has the phase of the job. `Succeeded`, `Failed` and `Stopped` have the reason of
        the [event](events.md) that ended the job.
    """,
}
"""Introduction of the tables of reasons."""


def _aspects(text: str) -> Row:
    """Return the columns of a condition: meaning of True, meaning of False, and what to do.

    A column is empty if no paragraph is about it.
    """
    found = {"": "", "When False: ": "", "What to do: ": ""}
    for paragraph in text.split("\n\n"):
        start = next((one for one in found if one and paragraph.startswith(one)), "")
        found[start] = paragraph.removeprefix(start)
    return tuple(found.values())


def _reason(text: str) -> Row:
    """Return the columns of a reason: its conditions, the type of its event, and its meaning."""
    said, _, meaning = text.partition(": ")
    *where, last = said.split(", ")
    event = last.removesuffix(" event") if last.endswith(" event") else ""
    return ", ".join(where if event else [*where, last]), event, meaning


def _event(text: str) -> Row:
    """Return the columns of an event: W for a Warning, and its meaning."""
    meaning = text.removeprefix("Warning: ")
    return "" if meaning == text else "W", meaning


def events() -> str:
    """Return the page docs/reference/events.md."""
    from dlrover_py.protocol.reasons import EventReason

    parts = []
    for title, words in sections(EventReason).items():
        rows = [
            (
                code(word),
                "W" if text.startswith("Warning: ") else "",
                text.removeprefix("Warning: "),
            )
            for word, text in words
        ]
        parts.append([f"## {title}", "", *table(("event", "", "meaning"), rows)])
    intro = """
        The events of a job's master. The letter W marks a Warning.
        [Operations](../operations.md#events) says where they are found,
        and [the network check](../network-check.md) explains the checks.

        A condition of the master that reports a problem is also a Warning event. The event has the
        name and the message of the [condition](conditions.md). It is created when the condition
        becomes True.
    """
    return page("Events", intro, *parts)


def protocol() -> str:
    """Return the page docs/reference/protocol.md."""
    from scripts import protocol_page

    return protocol_page.protocol()


PAGES: Mapping[str, Callable[[], str]] = {
    "elasticjob.md": elasticjob,
    "elastic-run.md": elastic_run,
    "dlrover.md": dlrover,
    "settings.md": settings,
    "exit-codes.md": exit_codes,
    "errors.md": errors,
    "conditions.md": conditions,
    "events.md": events,
    "protocol.md": protocol,
}


def out_of_date() -> list[str]:
    """Return the names of the pages that differ from the code, or are missing."""
    return [
        name
        for name, make in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != make()
    ]


def main(argv: list[str]) -> int | str:
    """Write or check the pages; return 0, or a message for ``sys.exit`` if a page is out of date.

    ``--write`` replaces all pages. A message is returned for any other argument, too.
    """
    if argv == ["--write"]:
        for name, make in PAGES.items():
            (FOLDER / name).write_text(make())
        return 0
    if argv == ["--check"]:
        late = ", ".join(out_of_date())
        return f"docs/reference: out of date: {late}; run: make docs-reference" if late else 0
    return f"reference: found {argv}, expected --write or --check"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
