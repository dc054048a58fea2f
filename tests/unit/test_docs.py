"""What the documents say exists, and what exists is in the documents."""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import click
import pytest
import yaml
from prometheus_client import CollectorRegistry

from dlrover_operator.conditions import REFUSED
from dlrover_operator.loop import Operator
from dlrover_operator.manifests import Options
from dlrover_py.cli.checkpoints import ckpt
from dlrover_py.cli.commands import root
from dlrover_py.protocol.status import JobPhase

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS, METRICS = ROOT / "docs/operations.md", ROOT / "docs/metrics.md"
CHART_FILES = ROOT / "charts/dlrover/files"
WORDS = {"Word": re.compile(r"`([A-Z][A-Za-z]+)`"), "metric": re.compile(r"`([a-z_]+)`")}


# --- what the documents name: the first cell of each row of a section's tables ---


def section_of(name: str) -> str:
    page = METRICS if name.startswith("Metrics of") else OPERATIONS
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page.name} has no section '{name}'"
    return found.group(1)


def named(section: str, form: str) -> set[str]:
    cells = re.findall(r"^\| (.*?) \|", section_of(section), re.MULTILINE)
    return {word for cell in cells for word in WORDS[form].findall(cell)}


# --- what the code can say ---


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def calls(path: Path, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in names:
                yield node


def text(node: ast.expr | None) -> Iterator[str]:
    """The constants that an expression may be: ``"A" if x else "B"`` is both."""
    match node:
        case ast.Constant(value=str(word)):
            yield word
        case ast.IfExp(body=body, orelse=other):
            yield from text(body)
            yield from text(other)


def argument(path: Path, function: str, position: int) -> Iterator[str]:
    for call in calls(path, function):
        if len(call.args) > position:
            yield from text(call.args[position])


def metrics_of_operator() -> set[str]:
    registry = CollectorRegistry()
    Operator(cast(Any, None), Options(image="m"), registry=registry)
    return {m.name + ("_total" if m.type == "counter" else "") for m in registry.collect()}


def metrics_of_master() -> set[str]:
    found = set()
    for path in (ROOT / "dlrover_py/master").glob("*.py"):
        for function in ("_gauge", "GaugeMetricFamily", "Gauge", "Histogram"):
            found |= set(argument(path, function, 0))
        for function in ("_count", "CounterMetricFamily", "Counter"):
            found |= {f"{name}_total" for name in argument(path, function, 0)}
    return found


@pytest.mark.parametrize(
    ("section", "form", "real"),
    [
        ("Phases", "Word", lambda: {"Created", REFUSED, *(phase.value for phase in JobPhase)}),
        ("Metrics of the master", "metric", metrics_of_master),
        ("Metrics of the operator", "metric", metrics_of_operator),
    ],
)
def test_the_pages_name_all_that_there_is(
    section: str, form: str, real: Callable[[], set[str]]
) -> None:
    exists, told = real(), named(section, form)
    assert len(exists) >= 8, f"the code is no longer understood: {exists}"
    assert exists - told == set(), f"missing in '{section}'"
    assert told - exists == set(), f"named in '{section}', and not in the code"


def test_each_alert_has_its_section_and_no_section_is_left_over() -> None:
    rules = yaml.safe_load((CHART_FILES / "alerts.yaml").read_text())["groups"]
    alerts = [rule["alert"] for group in rules for rule in group["rules"]]
    assert alerts == re.findall(r"^### (\w+)$", section_of("Alerts"), re.MULTILINE)


@pytest.mark.parametrize("file", ["alerts.yaml", "dashboard.json"])
def test_alerts_and_dashboard_are_about_metrics_that_exist(file: str) -> None:
    text = re.sub(r"elasticjob_dlrover_name", "", (CHART_FILES / file).read_text())
    said = set(re.findall(r"\b((?:dlrover|elasticjob|workqueue)_[a-z_]+)\b", text))
    assert len(said) > 8
    assert said - metrics_of_master() - metrics_of_operator() == set()


def test_the_dashboard_has_its_panels_beside_each_other() -> None:
    board = json.loads((CHART_FILES / "dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)
    for x, _, width, _ in places:
        assert x + width <= 24, "Grafana's grid has 24 columns"
    names = {one["name"] for one in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= names


def commands(group: click.Group, name: str) -> Iterator[str]:
    for verb, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {verb}")
        else:
            yield f"{name} {verb}"


def test_the_commands_are_those_of_the_page() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `dlrover"))
    told = set(
        re.findall(r"`(dlrover (?:dashboard|(?:cluster|job|ckpt|data|cache|ps) [a-z]+))", table)
    )
    told |= {f"dlrover job {verb}" for verb in re.findall(r", `([a-z]+) \[NAME\]`", table)}
    exists = {name for name in commands(root, "dlrover") if not name.startswith("dlrover node ")}
    assert len(exists) > 12
    assert exists == told


def test_the_flags_of_checkpoints_are_those_of_the_page() -> None:
    section = (ROOT / "docs/cli.md").read_text().split("## Checkpoints")[1].split("## Exit")[0]
    exists = {
        option
        for command in ckpt.commands.values()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if option.startswith("--")
    }
    assert exists == set(re.findall(r"(--[a-z][a-z-]+)", section))


def test_the_first_example_lasts_as_long_as_its_pages_say() -> None:
    job = yaml.safe_load((ROOT / "examples/01-digits/job.yaml").read_text())
    (main,) = job["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    said = dict(re.findall(r"--([a-z-]+)=([0-9.]+)", " ".join(main["command"])))
    steps = int(said["epochs"]) * -(-1437 // 96)  # its samples and its batch
    assert 9 * 60 <= steps * float(said["step-delay"]) <= 11 * 60
    for page in ("README.md", "docs/start-kubernetes.md", "examples/01-digits/README.md"):
        assert re.search(r"ten\s+minutes", (ROOT / page).read_text()), page


def test_no_page_and_no_message_names_a_package_that_no_index_has() -> None:
    pages = [*PAGES, *ROOT.glob("examples/*/README.md"), *ROOT.glob("charts/**/*.*")]
    sources = [
        p for top in ("dlrover_py", "agent", "operator") for p in ROOT.glob(f"{top}/**/*.py")
    ]
    assert len(sources) > 50
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (*pages, *sources)
        for line in path.read_text().splitlines()
        if re.search(r"pip install\b[^`]*?[\s\"']dlrover-py\b(?!-)", line)
    ]
    assert found == []


def test_install_names_all_extras_and_the_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs/install.md").read_text()
    section = page.split("## Python")[1].split("## On Kubernetes")[0]
    told = set(re.findall(r"^\| `([a-z0-9]+)` \|", section, re.MULTILINE))
    assert told == set(project["optional-dependencies"]) - {"dev", "docs"}
    assert project["requires-python"] == ">=3.11"
    assert "torch>=2.6" in project["optional-dependencies"]["torch"]
    assert "| Python | 3.11, 3.12 or 3.13 |" in section
    assert "| torch | 2.6 or newer" in section


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head).lower() for head in heads]
    return {re.sub(r"[^\w -]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name}: {link}: there is no such file"
        assert there.is_relative_to(ROOT), f"{page.name}: {link} leads out of the repository"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {link}: no such heading"


@pytest.mark.parametrize("name", ["dlrover", "horovod", "torchft"])
def test_the_loop_of_a_migration_page_is_that_of_its_script(name: str) -> None:
    page = (ROOT / "docs" / f"migrating-from-{name}.md").read_text()
    script = (ROOT / "examples" / "ported" / f"from_{name}.py").read_text()
    loop = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[-1]
    rest = iter([line.strip() for line in script.splitlines()])
    missing = [line for line in loop.splitlines() if line.strip() not in rest]
    assert missing == [], "lines that the script does not have in this order"
