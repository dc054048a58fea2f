"""The site of docs/: pages made from the code, hooks of the build, prose and commands.

``make docs`` builds the site strictly: it finds dead links and pages outside of the menu.
"""

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
import pytest

from dlrover_agent import flags
from dlrover_py import client, ps, trainer
from dlrover_py.cli.commands import root
from dlrover_py.localcluster import cluster
from dlrover_py.master import server as master_server
from dlrover_py.protocol import agents, status, transfer, versions
from dlrover_py.protocol.errors import ExitCode
from dlrover_py.trainer import data
from scripts import docs_hooks, protocol_page, reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
COMMANDS = Path(__file__).with_name("docs_commands.txt")


# --- pages made from the code ---


def test_the_reference_is_what_the_code_says() -> None:
    assert reference.out_of_date() == [], "run: make docs-reference"


def test_each_setting_and_exit_code_of_the_reference_exists() -> None:
    assert reference.unknown_settings() == set()
    assert set(reference.MEANINGS) == {one.name for one in ExitCode}


def test_each_setting_has_a_meaning() -> None:
    rows = re.findall(r"^\| `\w+` \|.*$", reference.settings(), re.MULTILINE)
    assert len(rows) > 50
    assert [row for row in rows if row.endswith("| |")] == []


def test_each_exception_has_a_meaning_and_an_advice() -> None:
    rows = [reference.exception_row(*one) for one in reference.exceptions()]
    assert len(rows) > 10
    assert [row[0] for row in rows if not row[3] or not row[4]] == []


def test_a_field_that_is_nested_is_in_the_reference_with_its_path() -> None:
    schema = {
        "required": ["a"],
        "properties": {
            "a": {"type": "array", "items": {"properties": {"b": {"type": "string"}}}},
            "c": {"properties": {"d": {}}},
            "e": {"properties": {"d": {}}},
        },
    }
    found = [(path, required) for path, _, required in reference.fields(schema)]
    assert found == [("a", True), ("a[].b", False), ("{c,e}", False), ("{c,e}.d", False)]


def test_a_cell_stays_one_cell_and_its_text_no_tag() -> None:
    (_, _, line) = reference.table(("a", "b"), [("x|<y>\n`<z>`", "")])
    assert line == "| x\\|&lt;y> `<z>` | |"


def missing_names(package: ModuleType, page: str) -> set[str]:
    """Public names of a package for which a page has no entry."""
    public = getattr(package, "__all__", None)
    if public is None:
        public = [name for name in vars(package) if not name.startswith("_")]
    return {f"{package.__name__}.{name}" for name in public} - {
        *re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    }


@pytest.mark.parametrize("package", [client, data, ps, trainer], ids=lambda one: one.__name__)
def test_each_public_name_is_on_the_page_of_the_python_api(package: ModuleType) -> None:
    assert missing_names(package, "") != set()
    assert missing_names(package, (DOCS / "reference/python.md").read_text()) == set()


# --- processes and messages ---

PROTOCOL = DOCS / "reference/protocol.md"
STARTS = (
    *("subprocess.Popen", "subprocess.run", "subprocess.check_output", "os.fork", "os.posix_spawn"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
)
"""Functions that start a process."""


def missing_classes(folder: Path, page: str) -> set[str]:
    """Public classes of a folder's modules, but no errors, that a page neither heads nor lists."""
    known = set(re.findall(r"^(?:### |\| `)(\w+)(?:` \||$)", page, re.MULTILINE))
    return {
        node.name
        for path in folder.glob("**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not re.match(r"_|\w+Error$", node.name)
    } - known


def test_each_class_of_the_protocol_is_on_the_page() -> None:
    assert missing_classes(ROOT / "dlrover_py/protocol", PROTOCOL.read_text()) == set()
    assert protocol_page.NOT_SENT.keys() & protocol_page.listed() == set()
    assert missing_classes(ROOT / "dlrover_py/protocol", "") >= protocol_page.NOT_SENT.keys()


def test_a_new_class_of_the_protocol_must_be_put_on_the_page(tmp_path: Path) -> None:
    source = "class AgentReport: ...\nclass Split: ...\nclass _Base: ...\nclass NewError: ...\n"
    tmp_path.joinpath("new.py").write_text(source + "class Report: ...\n")
    assert missing_classes(tmp_path, PROTOCOL.read_text()) == {"Report"}


def test_each_field_of_a_message_has_a_meaning() -> None:
    typed = [wire for wire in protocol_page.WIRES if wire.module is not None]
    rows = [
        row for wire in typed for one in protocol_page.messages(wire)
        for row in protocol_page.message(one) if re.match(r"\| `\w+` \|.*\|.*\|.*\|", row)
    ]  # fmt: skip
    assert len(rows) > 100
    assert [row for row in rows if row.endswith("| |")] == []


def test_each_module_that_starts_a_process_is_on_the_map() -> None:
    starters = {
        str(path.relative_to(ROOT))
        for folder in ("dlrover_py", "agent/dlrover_agent", "operator/dlrover_operator")
        for path in (ROOT / folder).glob("**/*.py")
        if any(start in (text := path.read_text()) for start in STARTS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in STARTS
    }
    assert {one for process in protocol_page.PROCESSES for one in process.starters} == starters


def test_the_paths_of_the_cluster_are_those_that_it_serves() -> None:
    def shape(verb: str, path: str) -> tuple[str, str]:
        return verb, re.sub(r"\{\w+\}", "{}", path.partition("?")[0])

    described = {shape(verb, path) for verb, path, _ in protocol_page.local_routes()}
    assert described == {shape(verb, path) for verb, path, _ in protocol_page.routes(cluster.api)}


def test_each_path_of_an_http_api_has_its_version() -> None:
    made: list[Callable[..., object]] = [master_server.job_app, cluster.api]
    paths = [path for app in made for _, path, _ in protocol_page.routes(app)]
    assert [path for path in paths if not path.startswith(f"/v{versions.HTTP_API}/")] == []


def test_types_of_fields_are_in_words() -> None:
    assert protocol_page.kind(agents.Words) == "string [at most 1024]"
    assert protocol_page.kind(agents.Count | None) == "integer [0 to 2^53] or null"
    assert protocol_page.kind(dict[str, list[agents.Offer]]) == "map of list of [Offer](#offer)"
    assert protocol_page.kind(transfer.Hex) == "string of the form `^[0-9a-f]{64}$`"
    assert protocol_page.kind(status.WallTime) == "time (RFC 3339)"


# --- hooks of the build ---


@pytest.mark.parametrize(
    ("folder", "text", "becomes"),
    [
        ("", "[a](../Dockerfile)", "a (`Dockerfile`)"),
        ("", "[rbac.yaml](../charts/rbac.yaml#x)", "rbac.yaml (`charts/rbac.yaml`)"),
        ("", "[README.md](../README.md)", "README.md"),
        ("decisions", "[a](../cli.md#json)", "[a](../cli.md#json)"),
        ("", "[a](https://pytorch.org)", "[a](https://pytorch.org)"),
        ("", "```\n[a](../b)\n```\n[a](../b)", "```\n[a](../b)\n```\na (`b`)"),
    ],
)
def test_links_out_of_docs_become_text(folder: str, text: str, becomes: str) -> None:
    assert docs_hooks.outside_links_as_text(text, folder) == becomes


def test_references_of_docstrings_become_names() -> None:
    html = "See :class:<code>~a.b.C</code> and :meth:<code>d.e</code>: <code>f</code>"
    shown = "See <code>C</code> and <code>d.e</code>: <code>f</code>"
    assert docs_hooks.on_page_content(html) == shown


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("What happens when …", "what-happens-when-"),
        ("An edit of the template", "an-edit-of-the-template"),
        ("The master's Pod", "the-masters-pod"),
        ("`elastic-run`, and more", "elastic-run-and-more"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert docs_hooks.github_anchor(heading) == anchor


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".html", '<script src="https://unpkg.com/x.js"></script>'),
        (".html", '<link rel="stylesheet" href="//fonts.googleapis.com/css">'),
        (".html", '<img alt="a" src=https://example.org/a.png>'),
        (".css", "@import 'https://example.org/a.css';"),
        (".css", 'body { background: url("//example.org/a.png") }'),
        (".svg", "<style>text { src: url(https://example.org/a.woff) }</style>"),
    ],
)
def test_a_page_that_loads_from_elsewhere_fails_the_build(suffix: str, text: str) -> None:
    policy = '<meta http-equiv="Content-Security-Policy" content="…">'
    assert len(list(docs_hooks.loaded_from_elsewhere(suffix, policy + text))) == 1


def test_a_page_with_links_and_files_of_its_own_is_built() -> None:
    page = (
        '<meta http-equiv="Content-Security-Policy" content="…"><a href="https://pytorch.org">a</a>'
        '<img src="img/state.svg"><script src="assets/x.js"></script>'
    )
    assert list(docs_hooks.loaded_from_elsewhere(".html", page)) == []
    assert list(docs_hooks.loaded_from_elsewhere(".html", "<p>no policy</p>")) != []


# --- prose ---


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and list items, without code, tables, headings and pictures."""
    text = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^( *\||#|:::|    |!\[).*$", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text):
        if block.strip():
            yield " ".join(block.split())


def sentences(paragraph: str) -> Iterator[str]:
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    plain = re.sub(r"`[^`]*`", "code", plain).replace("*", "")
    yield from re.split(r"(?<=[.!?:;])\s+", plain)


def faults(path: Path) -> list[str]:
    """Lines of more than 100 characters and sentences of more than 25 words.

    What a benchmark has written between its marks is left out.
    """
    written = r"<!-- (\w+): begin -->.*?<!-- \1: end -->"
    text = re.sub(written, lambda it: "\n" * it[0].count("\n"), path.read_text(), flags=re.DOTALL)
    found = [
        f"line {number}: {len(line)} characters, expected at most 100"
        for number, line in enumerate(text.splitlines(), start=1)
        if len(line) > 100 and not line.lstrip().startswith("|")
    ]
    found += [
        f"{len(one.split())} words, expected at most 25: {one}"
        for paragraph in paragraphs(text)
        for one in sentences(paragraph)
        if len(one.split()) > 25
    ]
    return found


WRITTEN = [*ROOT.glob("*.md"), *sorted(ROOT.glob("examples/*/README.md")), *PAGES]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_has_short_lines_and_sentences(path: Path) -> None:
    assert faults(path) == []


def test_the_glossary_has_each_word_once_in_one_sentence() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (DOCS / "glossary.md").read_text(), re.M)
    entries = [(word, said) for word, said in rows if word not in ("word", "---")]
    names = [name for word, _ in entries for name in word.split(", ")]
    assert len(names) > 60
    assert sorted({*names}) == sorted(names)
    assert [
        word for word, said in entries if not re.fullmatch(r"[A-Z`][^.]*(\.\w[^.]*)*\.", said)
    ] == []


# --- commands ---


class Command(NamedTuple):
    """One command of a page."""

    page: str
    text: str


PROGRAMS = (
    "cd", "cp", "ctr", "curl", "dlrover", "docker", "elastic-run", "eval", "export", "for", "helm",
    "kill", "kubectl", "make", "mount", "pip", "python", "rm", "source", "srun", "torchrun",
)  # fmt: skip
"""First words of commands in blocks that do not name a language, which may also show output."""
COMMAND = re.compile(rf"(?:\w+=\S+ +)*(?:{'|'.join(PROGRAMS)})(?: |$)")


def fenced(text: str, languages: tuple[str, ...]) -> Iterator[str]:
    """The fenced blocks of a page that are of some languages."""
    block: list[str] | None = None
    wanted = False
    for line in text.splitlines():
        mark = re.fullmatch(r" *```(\w*)", line)
        if mark is None:
            if block is not None:
                block.append(line)
        elif block is None:
            block, wanted = [], mark[1] in languages
        else:
            if wanted:
                yield "\n".join(block)
            block = None


def commands_in(text: str) -> Iterator[str]:
    """The commands in the fenced blocks of a page.

    In a block of a shell, each line is a command. In one of a console, those after ``$`` are. In
    other blocks without a language, lines that begin with a program are.
    """
    kinds = {("bash", "sh"): "", ("console",): r"\$ ", ("",): COMMAND.pattern}
    for languages, start in kinds.items():
        for block in fenced(text, languages):
            whole = re.sub(r"(^|\s+)#( .*)?$", "", block, flags=re.MULTILINE)
            whole = re.sub(r"\\\n\s*", "", whole)
            if not start:  # an apostrophe in other blocks may be one of a text
                whole = re.sub(r"'[^']*'", lambda it: " ".join(it[0].split()), whole)
            for line in map(str.strip, whole.splitlines()):
                if line and not line.startswith("#") and re.match(start, line):
                    yield line.removeprefix("$ ")


COMMAND_PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*/README.md"))),
    *(path for path in PAGES if path.parent.name not in ("decisions", "reference")),
]


def commands() -> list[Command]:
    """Each command in a fenced block of the pages for people who use or change the project."""
    return [
        Command(str(path.relative_to(ROOT)), text)
        for path in COMMAND_PAGES
        for text in commands_in(path.read_text())
    ]


def test_commands_of_a_page_are_found_in_all_forms() -> None:
    page = (
        "```bash\n# it's why\nhead=$(first)\nsrun a \\\n    b\nother 'x;\n y' z\n```\n"
        "```\nA=1 elastic-run train.py  # one\ncp a b\nelastic-running\nit said\n```\n"
        "```console\n$ dlrover job\noutput\n```\n```yaml\nmake: x\n```\n"
    )
    assert [*commands_in(page)] == [
        *("head=$(first)", "srun a b", "other 'x; y' z", "dlrover job"),
        *("A=1 elastic-run train.py", "cp a b"),
    ]


def listed() -> dict[str, str]:
    """The commands of docs_commands.txt, with how each is checked."""
    lines = COMMANDS.read_text().splitlines()
    pairs = [line.split(" | ", 1) for line in lines if line and not line.startswith("#")]
    return {command: how for how, command in pairs}


def essential(command: str) -> set[str]:
    """The programs, subcommands and flags of a command, but not ``dlrover`` itself."""
    words = shlex.split(command)
    found = {word for word in words if word in PROGRAMS} - {"dlrover"}
    found |= {word.partition("=")[0] for word in words if re.match("--?[a-z]", word)}
    if words[0] in ("helm", "kubectl", "make", "pip"):
        found.add(words[1])
    group: click.Command = root
    for word in words[1:] if words[0] == "dlrover" else ():
        if not isinstance(group, click.Group):
            break
        group = group.commands[word]
        found.add(word)
    return {"-n" if word == "--namespace" else word for word in found}


def said(path: Path) -> set[str]:
    """The words in the strings of a test and of the harness beside it, without docstrings."""
    trees = [
        ast.parse(one.read_text()) for one in (path, path.with_name("harness.py")) if one.exists()
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {
        word
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
        for word in re.split(r"[\s=]+", node.value)
    }


def test_words_of_a_command_that_a_test_must_have() -> None:
    assert essential("dlrover job scale 4 --role=ps --job x") == {"job", "scale", "--role", "--job"}
    assert essential("helm test dlrover --namespace x") == {"helm", "test", "-n"}


def test_words_of_a_docstring_or_a_comment_do_not_count(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text('"""What make dist does."""\ncall("make", "-n", "--out=x")  # not dist\n')
    assert said(test) == {"make", "-n", "--out", "x"}


def test_each_command_of_the_docs_is_run_by_a_test_or_marked() -> None:
    exists, known = {one.text for one in commands()}, listed()
    read = {one.text for program in ("dlrover", "elastic-run") for one in parsed(program)}
    assert len(exists) > 50
    assert exists - set(known) == set(), f"add to {COMMANDS.name}: how is it checked?"
    assert set(known) - exists == set(), f"no page has it: remove it from {COMMANDS.name}"
    for command, how in known.items():
        kind, _, rest = how.partition(" ")
        assert kind in ("run", "parsed", "not-run"), f"{how}: {command}"
        if kind == "run":
            assert (ROOT / rest).exists(), f"{rest}: there is no such test: {command}"
            assert essential(command) - said(ROOT / rest) == set(), (
                f"{rest} does not run: {command}"
            )
        if kind == "parsed":
            assert command in read, f"no program of ours reads it: {command}"
        if kind == "not-run":
            assert rest, f"{command}: say why it is not run"


def parsed(program: str) -> list[Command]:
    """The commands that call one program of ours, which must accept them."""
    # A release of Helm has the name dlrover, too.
    call = re.compile(rf"^(?:.* )?{program} " if program == "elastic-run" else f"{program} ")
    return [
        one
        for one in commands()
        if call.match(one.text) and "…" not in one.text and "FLAGS" not in one.text
    ]


@pytest.mark.parametrize("one", parsed("dlrover"), ids=lambda one: one.text)
def test_dlrover_takes_the_command(one: Command) -> None:
    words = shlex.split(one.text.split(">")[0])[1:]
    group: click.Command = root
    context = None
    while isinstance(group, click.Group):
        word, *words = words
        assert word in group.commands, f"{one.page}: {one.text}: no command {word}"
        group = group.commands[word]
    context = group.make_context(group.name, words, resilient_parsing=False)
    assert context is not None


@pytest.mark.parametrize("one", parsed("elastic-run"), ids=lambda one: one.text)
def test_elastic_run_takes_the_command(one: Command) -> None:
    call = re.sub(r"\$\w+", "1", one.text).partition("elastic-run ")[2]
    words = shlex.split(call.partition("'")[0])
    if words == ["--help"]:
        return
    assert re.fullmatch(r"(train|from_\w+)\.py", flags.parse(words, {}).training_script)
