"""Documents that a pydantic model accepts, drawn by Hypothesis from the model's own JSON schema.

Numbers and lengths are drawn more often at the limits of the schema than between them, because a
rule that the schema does not have shows up there. A field that is added to a model is drawn without
a change here.
"""

from functools import cache
from typing import Any

from hypothesis import strategies as st
from pydantic import TypeAdapter

WORDS = ["", "n0", "n1", "x", "a-b.c", "/tmp", "-1", "127.0.0.1", "é\n", "\0", "x" * 32]
TIMES = ["1970-01-01T00:00:00Z", "2026-11-26T01:02:03.1239+14:00", "9999-12-31T23:59:59.999Z"]
MANY = 4
"""Largest number of elements that are drawn for a list or dictionary without a limit."""
Schema = dict[str, Any]


@cache
def schema_of(model: type) -> Schema:
    """Return the JSON schema of a model, with Python's names of the fields."""
    return TypeAdapter(model).json_schema(by_alias=False)


def documents(model: type, good: Schema | None = None) -> st.SearchStrategy[Schema]:
    """Return a strategy for documents of a model.

    Args:
        model: the model.
        good: a valid document, of which at most six fields are drawn again. So a document passes
            the first check and reaches later ones. None: all fields are drawn.
    """
    whole = schema_of(model)
    fields = {
        name: _values(field, whole.get("$defs", {})) for name, field in whole["properties"].items()
    }
    if good is None:
        return _values(whole, whole.get("$defs", {}))
    some = st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)
    return some.flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    ).map(lambda drawn: {**good, **drawn})


def _values(schema: Schema, named: Schema) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: _values(named[name], named))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "const" in schema:
        return st.just(schema["const"])
    if "anyOf" in schema:
        return st.one_of(*(_values(one, named) for one in schema["anyOf"]))
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63)
            edges = sorted({n for n in (low, low + 1, high - 1, high, 0, 1, 2) if low <= n <= high})
            return st.sampled_from(edges) | st.integers(max(low, 0), min(high, 9))
        case "number":
            least: Any = schema.get("minimum", schema.get("exclusiveMinimum", -1e308))
            edges = [
                n for n in (-1.0, 0.0, 1e-308, 0.5, 1e308) if n >= least and n != _barred(schema)
            ]
            return st.sampled_from(edges)
        case "string":
            return _strings(schema)
        case "array":
            if "prefixItems" in schema:
                return st.tuples(*(_values(one, named) for one in schema["prefixItems"])).map(list)
            low, high = schema.get("minItems", 0), schema.get("maxItems", MANY)
            return st.lists(
                _values(schema.get("items", {}), named), min_size=low, max_size=min(high, MANY)
            )
        case "object" if "properties" in schema:
            asked = schema.get("required", [])
            fields = {k: _values(v, named) for k, v in schema["properties"].items()}
            return st.fixed_dictionaries(
                {k: v for k, v in fields.items() if k in asked},
                optional={k: v for k, v in fields.items() if k not in asked},
            )
        case "object":
            keys = _keys(schema.get("propertyNames", {}))
            low, high = schema.get("minProperties", 0), schema.get("maxProperties", MANY)
            below = schema.get("additionalProperties", {})
            values = _values(below if isinstance(below, dict) else {}, named)
            return st.dictionaries(keys, values, min_size=low, max_size=max(low, min(high, MANY)))
    return st.none() | st.booleans() | st.integers(-1, 9) | st.sampled_from(WORDS)


def _barred(schema: Schema) -> float | None:
    return schema.get("exclusiveMinimum")


def _strings(schema: Schema) -> st.SearchStrategy[str]:
    if schema.get("format") == "date-time":
        return st.sampled_from(TIMES)
    low, high = schema.get("minLength", 0), schema.get("maxLength", 10_000)
    if "pattern" in schema:
        pattern: str = schema["pattern"]
        return st.from_regex(pattern, fullmatch=True).filter(lambda text: low <= len(text) <= high)
    return st.sampled_from([w for w in WORDS if low <= len(w) <= high] + ["x" * low, "x" * high])


def _keys(schema: Schema) -> st.SearchStrategy[str]:
    """Return a strategy for keys. In JSON they are strings, which a model may read as numbers."""
    if "enum" in schema or "$ref" in schema:
        return st.sampled_from(WORDS)
    numbers = st.sampled_from(["0", "1", "2", str(2**53)])
    return numbers | _strings(schema) if schema else numbers
