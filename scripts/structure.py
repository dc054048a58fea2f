"""Measures the structure of the product's code: sizes, duplicate names, documentation, cycles.

    python scripts/structure.py            # a table of all numbers, each with its limit
    python scripts/structure.py --worst 5  # and the worst places of each number
    python scripts/structure.py --json     # the same as JSON
    python scripts/structure.py --check    # exit code 1 if a number is over its limit

A limit is lowered when its number falls. It is never raised.
"""

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "dlrover_py": ROOT / "dlrover_py",
    "dlrover_agent": ROOT / "agent/dlrover_agent",
    "dlrover_operator": ROOT / "operator/dlrover_operator",
}
"""Folder of each Python package of the product."""
SHARED_NAMES = {"Settings"}
"""Class names that stand for the same concept in several programs."""
ODD_OPENING = re.compile(r"(Of|Theirs|Those|Who|That|The same (of|for|in|when)|So|As in|As|By)\b")
"""Openings of docstrings that cannot be understood without the code around them."""

PUBLIC = {"_asdict", "_exit", "_fields", "_replace"}
"""Names of the standard library that are public in spite of their underscore."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Number:
    """One number of the code, with the places that it counts."""

    name: str
    limit: float
    """Greatest allowed value; the least allowed value if ``at_least`` is set."""
    at_least: bool = False
    value: float = 0
    places: list[tuple[float, str]] = field(default_factory=list)
    """Size and description of each place that counts."""

    @property
    def kept(self) -> bool:
        """Whether the number is within its limit."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def largest(self) -> "Number":
        """Return self, with the size of the largest place as the value."""
        self.value = max((size for size, _ in self.places), default=0)
        return self

    def count(self) -> "Number":
        """Return self, with the number of places as the value."""
        self.value = len(self.places)
        return self

    def percent(self, of: int) -> "Number":
        """Return self, with the percentage of ``of`` that is not a place."""
        self.value = round(100 * (1 - len(self.places) / of)) if of else 100
        return self


@dataclass
class Module:
    """A parsed module of the product."""

    name: str
    path: str
    source: str
    tree: ast.Module

    def at(self, node: ast.stmt | ast.expr) -> str:
        """Return the place of a node as ``path:line``."""
        return f"{self.path}:{node.lineno}"


def modules() -> list[Module]:
    """Return all modules of the product."""
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *(part for part in parts if part != "__init__")])
            source = path.read_text()
            found.append(
                Module(name, str(path.relative_to(ROOT)), source, ast.parse(source, str(path)))
            )
    return found


def classes(all_modules: list[Module]) -> Iterator[tuple[Module, ast.ClassDef]]:
    """Yield each class of the product."""
    for module in all_modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                yield module, node


def functions(all_modules: list[Module]) -> Iterator[tuple[Module, Function, bool]]:
    """Yield each function of the product, and whether it is public.

    Functions within functions are left out. A method is public only if its class is, too.
    """

    def walk(node: ast.AST, public: bool) -> Iterator[tuple[Function, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                yield child, public and not child.name.startswith("_")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, public and not child.name.startswith("_"))
            elif isinstance(child, (ast.If, ast.Try)):
                yield from walk(child, public)

    for module in all_modules:
        for function, public in walk(module.tree, True):
            yield module, function, public


def lines(node: ast.ClassDef | Function) -> int:
    """Return the length of a definition in lines, without its docstrings."""
    strings = sum(
        (child.end_lineno or child.lineno) - child.lineno + 1
        for child in ast.walk(node)
        if isinstance(child, ast.Expr)
        and isinstance(child.value, ast.Constant)
        and isinstance(child.value.value, str)
    )
    return (node.end_lineno or node.lineno) - node.lineno + 1 - strings


def parameters(function: Function) -> int:
    """Return the number of parameters, without ``self`` and ``cls``."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    names += [arg.arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return len([name for name in names if name not in ("self", "cls")])


def attribute_docstrings(module: Module) -> Iterator[ast.Constant]:
    """Yield the texts that stand below an assignment, and say what it is."""
    for node in ast.walk(module.tree):
        body = getattr(node, "body", ())
        for before, after in pairwise(body if isinstance(body, list) else ()):
            if (
                isinstance(before, ast.Assign | ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                yield after.value


def attributes(node: ast.ClassDef) -> int:
    """Return the number of attributes that a class assigns to ``self`` or declares.

    Each name counts once, and inherited ones do not count.
    """
    found = {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }
    found |= {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    return len(found)


def raises(function: Function) -> bool:
    """Return whether a function itself raises an exception, other than one that it has caught.

    Functions and classes within it do not count, and neither do the functions that it calls.
    """

    def walk(node: ast.AST) -> bool:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function | ast.Lambda | ast.ClassDef):
                continue
            if isinstance(child, ast.Raise) and child.exc is not None:
                return True
            if walk(child):
                return True
        return False

    return walk(function)


def cycles(all_modules: list[Module]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or through others.

    Imports within functions count as well. Relative imports do not, since the code has none.
    """
    names = {module.name for module in all_modules}
    imports: dict[str, set[str]] = defaultdict(set)
    for module in all_modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imports[module.name].add(full if full in names else node.module)
            elif isinstance(node, ast.Import):
                imports[module.name] |= {alias.name for alias in node.names}
        imports[module.name] &= names
        imports[module.name].discard(module.name)
    reach: dict[str, set[str]] = {}
    for start in names:
        seen, todo = set[str](), [start]
        while todo:
            for target in imports[todo.pop()] - seen:
                seen.add(target)
                todo.append(target)
        reach[start] = seen
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other])) for name in names
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def pokes() -> list[tuple[float, str]]:
    """Return the places where tests access private attributes of other objects than ``self``."""
    return [
        (1, f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}")
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr)
        and node.attr not in PUBLIC
        and ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def measure() -> list[Number]:
    """Return all numbers of the code, each compared with its limit by :attr:`Number.kept`."""
    code = modules()
    numbers = []

    def number(
        name: str, limit: float, places: list[tuple[float, str]], *, at_least: bool = False
    ) -> Number:
        numbers.append(made := Number(name, limit, at_least, places=places))
        return made

    sizes: list[tuple[float, str]] = [
        (lines(node), f"{module.at(node)} {node.name}") for module, node in classes(code)
    ]
    number("lines of the largest class", LIMITS["class"], sizes).largest()
    number(
        "lines of the largest class, with its docstrings",
        LIMITS["documented"],
        [
            ((node.end_lineno or 0) - node.lineno + 1, f"{module.at(node)} {node.name}")
            for module, node in classes(code)
        ],
    ).largest()
    number(
        "classes of more than 400 lines", LIMITS["large"], [s for s in sizes if s[0] > 400]
    ).count()
    number(
        "attributes of the class that has most",
        LIMITS["attributes"],
        [(attributes(node), f"{module.at(node)} {node.name}") for module, node in classes(code)],
    ).largest()
    constructors = [
        (module, method, node)
        for module, node in classes(code)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    ]
    number(
        "lines of the longest constructor",
        LIMITS["constructor"],
        [(lines(m), f"{module.at(m)} {node.name}") for module, m, node in constructors],
    ).largest()
    number(
        "parameters of the constructor that has most",
        LIMITS["parameters"],
        [  # `**options` are arguments of another function, which documents them.
            (parameters(m) - (m.args.kwarg is not None), f"{module.at(m)} {node.name}")
            for module, m, node in constructors
        ],
    ).largest()

    number(
        "lines of the module with the order of the core's passes",
        LIMITS["passes"],
        [(len(m.source.splitlines()), m.path) for m in code if m.path.endswith("core/job.py")],
    ).largest()
    number(
        "lines of the class Checkpointer",
        LIMITS["checkpointer"],
        [(lines(n), m.at(n)) for m, n in classes(code) if n.name == "Checkpointer"],
    ).largest()

    names: dict[str, list[str]] = defaultdict(list)
    for module, node in classes(code):
        names[node.name].append(module.at(node))
    number(
        "class names with more than one meaning",
        LIMITS["names"],
        [
            (len(at), f"{name}: {', '.join(at)}")
            for name, at in names.items()
            if len(at) > 1 and name not in SHARED_NAMES
        ],
    ).count()
    number(
        "import cycles", LIMITS["cycles"], [(len(g), " <-> ".join(g)) for g in cycles(code)]
    ).count()

    for what, pattern, limit in PATTERNS:
        number(
            what,
            LIMITS[limit],
            [
                (1, f"{module.path}:{at}")
                for module in code
                for at, line in enumerate(module.source.split("\n"), 1)
                if re.search(pattern, line)
            ],
        ).count()

    public = [(module, f) for module, f, is_public in functions(code) if is_public]
    number(
        "parameters of the public function that has most",
        LIMITS["of function"],
        [(parameters(f), f"{module.at(f)} {f.name}") for module, f in public],
    ).largest()
    many = [(module, f) for module, f in public if parameters(f) >= 3]
    number(
        "% of public functions with 3 parameters or more that have Args:",
        LIMITS["args"],
        [
            (1, f"{m.at(f)} {f.name}")
            for m, f in many
            if "Args:" not in (ast.get_docstring(f) or "")
        ],
        at_least=True,
    ).percent(len(many))
    raising = [(module, f) for module, f in public if raises(f)]
    number(
        "% of public functions with a raise that have Raises:",
        LIMITS["raises"],
        [
            (1, f"{m.at(f)} {f.name}")
            for m, f in raising
            if "Raises:" not in (ast.get_docstring(f) or "")
        ],
        at_least=True,
    ).percent(len(raising))

    documented: list[tuple[Module, ast.ClassDef | Function]] = list(classes(code))
    documented += [(module, function) for module, function, _ in functions(code)]
    number(
        "docstrings that need their neighbours to be understood",
        LIMITS["openings"],
        [
            *(
                (1, f"{module.at(node)} {(ast.get_docstring(node) or '').splitlines()[0][:60]}")
                for module, node in documented
                if ODD_OPENING.match(ast.get_docstring(node) or "")
            ),
            *(
                (1, f"{module.path}:{text.lineno} {str(text.value)[:60]}")
                for module in code
                for text in attribute_docstrings(module)
                if ODD_OPENING.match(str(text.value))
            ),
        ],
    ).count()
    number("accesses of tests to private attributes", LIMITS["pokes"], pokes()).count()
    return numbers


PATTERNS = [
    ("bare tuples as the identity of a checkpoint", r"tuple\[int, int, int\]", "identity"),
    ("places that draw a random delay", r"\brandom\.(uniform|random)\b", "backoffs"),
    ("places that set the parent-death signal", r"\bprctl\((_?PR_SET_PDEATHSIG|1)\b", "prctl"),
]
"""What is counted by a pattern: a name, the pattern of a line, and the key of its limit."""

LIMITS: dict[str, float] = {
    "class": 471,
    "documented": 660,
    "of function": 13,
    "large": 1,
    "attributes": 41,
    "constructor": 40,
    "parameters": 8,
    "passes": 300,
    "checkpointer": 350,
    "names": 0,
    "cycles": 0,
    "identity": 0,
    "backoffs": 1,
    "prctl": 1,
    "args": 100,
    "raises": 100,
    "openings": 0,
    "pokes": 39,
}
"""The limit of each number."""


def table(numbers: list[Number], worst: int) -> str:
    """Return the numbers as text, with the worst places of each."""
    rows = []
    for number in numbers:
        sign = "≥" if number.at_least else "≤"
        mark = " " if number.kept else "!"
        rows.append(f"{mark} {number.value:6g} {sign}{number.limit:<6g} {number.name}")
        rows += [f"      {place}" for _, place in sorted(number.places, reverse=True)[:worst]]
    return "\n".join(rows)


def main() -> int:
    """Print the numbers; return 1 if ``--check`` was given and one is over its limit.

    With ``--check`` only the numbers over their limits are printed: nothing if there are none.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="show N places of each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    given = parser.parse_args()
    numbers = measure()
    over = [number for number in numbers if not number.kept]
    if given.json:
        rows = [
            {"what": n.name, "limit": n.limit, "value": n.value, "kept": n.kept} for n in numbers
        ]
        print(json.dumps(rows, indent=2))
    elif not given.check:
        print(table(numbers, given.worst))
    elif over:
        print(table(over, given.worst or 10))
    return 1 if given.check and over else 0


if __name__ == "__main__":
    sys.exit(main())
