"""Regular expressions over text of others take time in proportion to the text.

``[0-9]*\\.?[0-9]*`` tries each way to divide a number into two parts before it gives up: a template
with a quantity of a megabyte would keep the operator busy for days, and with it all other jobs.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover_py.protocol.job import ElasticJob
from tests.builders import job_file

parser: Any = pytest.importorskip("re._parser")
constants: Any = pytest.importorskip("re._constants")

ROOT = Path(__file__).parents[2]
ALL = set(range(256))
REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT)
PATTERN = re.compile(
    r"\bre\.(?:compile|match|search|fullmatch|sub|findall|finditer)\(\s*"
    r'[rb]*("""(?s:.)*?"""|"(?:[^"\\\n]|\\.)*")\s*[,)]'
)
"""A pattern in the source that needs no value of a variable."""
CATEGORIES = {
    constants.CATEGORY_DIGIT: r"\d",
    constants.CATEGORY_NOT_DIGIT: r"\D",
    constants.CATEGORY_WORD: r"\w",
    constants.CATEGORY_NOT_WORD: r"\W",
    constants.CATEGORY_SPACE: r"\s",
    constants.CATEGORY_NOT_SPACE: r"\S",
}


def ways(pattern: str) -> Iterator[str]:
    """Yield the neighbours in a pattern that may divide the same text in many ways."""
    yield from _ways(parser.parse(pattern, re.VERBOSE if pattern.startswith("\n") else 0))


def _ways(items: Iterable[Any]) -> Iterator[str]:
    flat = list(_flat(items))
    for at, (kind, value) in enumerate(flat):
        if kind in REPEATS:
            yield from _ways(value[2])
            for after in flat[at + 1 :]:
                if _is_endless(flat[at]) and _is_endless(after):
                    common = _letters(value[2]) & _letters(after[1][2])
                    if common:
                        yield f"two repeats of {chr(min(common))!r}"
                if not _may_be_empty(after):
                    break
        elif kind is constants.BRANCH:
            for branch in value[1]:
                yield from _ways(branch)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if item[0] is constants.SUBPATTERN:
            yield from _flat(item[1][3])
        else:
            yield item


def _is_endless(item: Any) -> bool:
    return item[0] in REPEATS and item[1][1] is constants.MAXREPEAT


def _may_be_empty(item: Any) -> bool:
    kind, value = item
    if kind is constants.BRANCH:
        return any(all(map(_may_be_empty, _flat(branch))) for branch in value[1])
    return kind in (constants.AT, constants.ASSERT, constants.ASSERT_NOT) or (
        kind in REPEATS and (value[0] == 0 or all(map(_may_be_empty, _flat(value[2]))))
    )


def _letters(items: Iterable[Any]) -> set[int]:
    """Return the first characters of a repeated part, as far as they are easily known."""
    first = next(_flat(items), None)
    if first is None:
        return set()
    kind, value = first
    if kind is constants.LITERAL:
        return {value}
    if kind is constants.ANY:
        return ALL - {10}
    if kind is constants.NOT_LITERAL:
        return ALL - {value}
    if kind is not constants.IN:
        return set()
    found: set[int] = set()
    for form, one in value:
        if form is constants.LITERAL:
            found.add(one)
        elif form is constants.RANGE:
            found.update(range(one[0], min(one[1], 255) + 1))
        elif form is constants.CATEGORY:
            found |= {c for c in ALL if re.match(CATEGORIES[one], chr(c))}
    return ALL - found if value[0][0] is constants.NEGATE else found


def test_such_a_pattern_is_found() -> None:
    for slow in ("[0-9]*[.]?[0-9]*", r"(a|b)x?|\s+(?:-)?\s*$", "x.+.*", "(?:a+(?:b)*[^c]*d)?"):
        assert list(ways(slow)), slow
    for quick in ("[0-9]*([.][0-9]*)?", r"\d+[a-z]+", r"\s*-\s*", "a{1,9}a*"):
        assert not list(ways(quick)), quick


def test_no_pattern_divides_the_same_text_in_many_ways() -> None:
    found, seen = [], 0
    for top in ("dlrover_py", "agent", "operator"):
        for path in (ROOT / top).rglob("*.py"):
            for match in PATTERN.finditer(path.read_text()):
                text = match[1].strip('"') if match[1].startswith('"""') else match[1][1:-1]
                seen += 1
                found += [f"{path.relative_to(ROOT)}: {text}: {way}" for way in ways(text)]
    assert seen > 80
    assert not found, found


@pytest.mark.parametrize("amount", ["1" * 1_000_000 + "x", "." * 1_000_000, "-" + "0" * 1_000_000])
def test_a_long_quantity_is_read_once(amount: str) -> None:
    job = job_file(1)
    container = job["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
    container["resources"] = {"limits": {"cpu": amount}}
    faults = ElasticJob.read(job | {"metadata": {"name": "x", "uid": "u"}}).worker.faults()
    assert [fault.name for fault in faults] == ([] if amount[1] == "0" else ["cpu"])
