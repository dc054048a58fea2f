"""Types and reasons of conditions and events: each word is a member of an enumeration."""

import ast
import re
from enum import StrEnum
from pathlib import Path

import pytest

from dlrover_py.master.core.events import JobStopped
from dlrover_py.master.platform.kubernetes.conditions import PROBLEMS
from dlrover_py.protocol.reasons import ConditionReason, ConditionType, EventReason
from dlrover_py.protocol.refusals import Refusal
from dlrover_py.protocol.status import JobPhase
from scripts import reference

CORE = Path(__file__).parents[2] / "dlrover_py/master/core"
NOT_REASONS = {"True", "False", "Unknown", "Normal", "Warning", "Mi"}
"""CamelCase words in the core that are no types and no reasons."""


@pytest.mark.parametrize("words", [ConditionType, ConditionReason, EventReason])
def test_each_word_has_its_line_in_the_reference(words: type[StrEnum]) -> None:
    listed = [word for under in reference.sections(words).values() for word in under]
    assert [word for word, _ in listed] == list(words)
    assert [word for word, text in listed if not re.search(r"\w", text)] == []


def test_each_word_is_its_member_in_camel_case() -> None:
    for words in (ConditionType, ConditionReason, EventReason):
        for member in words:
            assert member.name.replace("_", "").lower() == member.value.lower()
            assert re.fullmatch(r"([A-Z][a-z]+)+", member.value)


def test_the_columns_of_a_condition_are_found() -> None:
    page = reference.conditions()
    _, reasons = page.split("## Reasons", 1)
    for member in ConditionReason:
        (row,) = re.findall(
            rf"^\| `{member}` \| (.*) \| (Normal|Warning|) ?\| .*\|$", reasons, re.MULTILINE
        )
        told = set(re.findall(r"`(\w+)`", row[0]))
        assert told, member
        assert told <= set(ConditionType), f"{member}: {row[0]}"
    assert "When False" not in page
    assert "What to do" not in page


def test_the_words_of_other_enumerations_are_members_too() -> None:
    assert {*Refusal} <= set(ConditionType)
    assert {*Refusal} <= set(ConditionReason)
    assert {phase.value for phase in JobPhase if phase.ended} <= set(ConditionType)
    assert len(set(PROBLEMS)) == len(PROBLEMS)
    assert JobStopped().reason in set(EventReason)


def test_each_word_that_the_core_writes_is_a_member() -> None:
    """A literal would not be compared with the members by anything else."""
    members = {*ConditionType, *ConditionReason, *EventReason, *JobPhase} | NOT_REASONS
    nodes = [
        (path.name, node)
        for path in CORE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    classes = {node.name for _, node in nodes if isinstance(node, ast.ClassDef)}  # in annotations
    found = {
        (name, node.value)
        for name, node in nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"([A-Z][a-z]+)+", node.value)
    }
    assert {word for word in found if word[1] not in members | classes} == set()
