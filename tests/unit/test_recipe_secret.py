"""The table of recipes in the Secret of a namespace: what is kept, and for how long."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.master.recipe_secret import (
    INDEX,
    KEPT_S,
    MAX_BYTES,
    MAX_RECIPES,
    USED_AGAIN_S,
    RecipeTable,
)

NOW = 1e9


def test_it_is_read_as_it_was_written() -> None:
    table = RecipeTable()
    assert table.put("a", b"one", NOW)
    assert table.put("b", b"two", NOW + 1)
    assert RecipeTable.from_data(table.to_data()) == table


def test_the_same_recipe_is_no_change_and_an_empty_one_removes_it() -> None:
    table = RecipeTable()
    assert table.put("a", b"one", NOW)
    assert not table.put("a", b"one", NOW + 1)
    assert not table.put("b", b"", NOW)
    assert table.put("a", b"", NOW)
    assert table == RecipeTable()


def test_the_least_used_go_first() -> None:
    table = RecipeTable()
    for i in range(MAX_RECIPES):
        table.put(f"k{i}", b"x", NOW + i)
    assert table.use("k0", NOW + USED_AGAIN_S), "the recipe of a daily job"
    table.put("new", b"x", NOW + USED_AGAIN_S)
    assert len(table.bodies) == MAX_RECIPES
    assert {"k0", "new"} <= set(table.bodies)
    assert "k1" not in table.bodies


def test_a_use_is_noted_once_a_day() -> None:
    table = RecipeTable()
    table.put("a", b"x", NOW)
    assert not table.use("a", NOW + USED_AGAIN_S / 2)
    assert table.use("a", NOW + USED_AGAIN_S)
    assert not table.use("none", NOW)


def test_what_was_not_used_for_long_goes_with_the_next_write() -> None:
    table = RecipeTable()
    table.put("old", b"x", NOW)
    table.put("new", b"x", NOW + KEPT_S + 1)
    assert set(table.bodies) == {"new"}


@given(st.lists(st.integers(0, MAX_BYTES + 10), max_size=8))
def test_the_bytes_are_limited(sizes: list[int]) -> None:
    table = RecipeTable()
    for i, size in enumerate(sizes):
        body = b"x" * size
        table.put(f"k{i}", body, NOW + i)
        assert sum(map(len, table.bodies.values())) <= MAX_BYTES
        assert (f"k{i}" in table.bodies) == (0 < size <= MAX_BYTES)
    assert set(table.bodies) == set(table.used_at)


def test_a_recipe_that_is_too_large_leaves_no_earlier_one() -> None:
    """The earlier one is of other files."""
    table = RecipeTable()
    table.put("a", b"x", NOW)
    assert table.put("a", b"x" * (MAX_BYTES + 1), NOW)
    assert table == RecipeTable()
    assert not table.put("a", b"x" * (MAX_BYTES + 1), NOW)


@pytest.mark.parametrize("damage", ["body", "no body", "time", "index"])
def test_one_damaged_entry_costs_no_other_one(damage: str) -> None:
    table = RecipeTable({"a": b"one", "b": b"two"}, {"a": NOW, "b": NOW})
    data = table.to_data()
    used: dict[str, object] = {"a": NOW, "b": NOW}
    if damage == "body":
        data["b"] = "?"
    elif damage == "no body":
        del data["b"]
    else:
        used |= {"b": "never"} if damage == "time" else {INDEX: NOW, "b": None}
        data[INDEX] = base64.b64encode(json.dumps(used).encode()).decode()
    assert RecipeTable.from_data(data) == RecipeTable({"a": b"one"}, {"a": NOW})


@given(st.text(max_size=20) | st.recursive(st.none() | st.floats() | st.text(), st.lists))
def test_what_is_damaged_is_no_recipe(index: object) -> None:
    text = base64.b64encode(json.dumps(index).encode()).decode()
    assert RecipeTable.from_data({INDEX: text}) == RecipeTable()
    assert RecipeTable.from_data({INDEX: "?"}) == RecipeTable()
    assert RecipeTable.from_data({}) == RecipeTable()
