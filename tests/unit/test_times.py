"""A time is Unix seconds in a program and RFC 3339 in JSON, and comes back as it was."""

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from dlrover_py.cli import view
from dlrover_py.protocol.local import History, Snapshot
from dlrover_py.protocol.status import (
    Condition,
    ElasticJobStatus,
    JobEvent,
    JobStatus,
    WallTime,
    date_time,
    rfc3339,
    unix_seconds,
)
from tests.jsonform import RFC_3339, TIME_KEY
from tests.schemas import documents

END = 253402214400.0
"""9999-12-31: from then on no time is known."""
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda m: timezone(timedelta(minutes=m)))
WHOLE = st.integers(0, 253402214399999).map(lambda ms: ms / 1000)
NUMBERS = st.floats() | st.integers() | st.floats(-1, END + 1) | WHOLE


class Doc(BaseModel):
    at: WallTime


@given(said=NUMBERS)
@example(said=END - 0.0004)
@example(said=-0.0004)
def test_every_number_is_written_as_rfc_3339_and_comes_back_equal(said: float) -> None:
    doc = Doc(at=said)
    assert Doc(at=doc.at) == doc
    text = doc.model_dump(mode="json")["at"]
    assert RFC_3339.fullmatch(text)
    assert Doc.model_validate_json(doc.model_dump_json()) == doc
    assert isinstance(doc.model_dump()["at"], float)
    assert Doc.model_construct(at=said).model_dump(mode="json")["at"] == text  # never validated
    assert rfc3339(said) == text[:19] + "Z"
    assert view.clock(doc.at)
    if 0 <= said <= END - 0.001:  # half a millisecond, and what a float cannot say
        assert abs(doc.at - said) < 0.0006
        assert abs(datetime.fromisoformat(text).timestamp() - said) < 0.0006
    elif not -0.001 < said < END:
        assert doc.at == 0.0


@given(said=st.floats(0, END - 1), zone=ZONES)
def test_every_time_of_another_program_is_read(said: float, zone: timezone) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=said)
    text = moment.astimezone(zone).isoformat()
    assert abs(Doc.model_validate({"at": text}).at - said) < 0.0006
    assert abs(Doc.model_validate({"at": said}).at - said) < 0.0006


@given(text=st.text() | st.from_regex(r"\d{1,5}-\d{1,2}-\d\dT\d\d:\d\d(:\d\d)?(\.\d{1,9})?.{0,6}"))
def test_any_text_is_read_or_refused(text: str) -> None:
    at = unix_seconds(text)
    if at is None:
        with pytest.raises(ValidationError, match="expected a time as RFC 3339, such as 2026-"):
            Doc.model_validate({"at": text})
    else:
        assert Doc.model_validate({"at": text}).at == at
        assert unix_seconds(date_time(at)) == at


@pytest.mark.parametrize(
    "text", ["", "2026-11-26", "2026-11-26T01:02:03", "1.5", "yesterday", "2026-02-30T00:00:00Z"]
)
def test_what_names_no_moment_is_no_time(text: str) -> None:
    assert unix_seconds(text) is None


def test_known_times() -> None:
    assert date_time(1795654923.1234) == "2026-11-26T01:02:03.123Z"
    assert unix_seconds("2026-11-26T02:02:03.123456789+01:00") == 1795654923.123
    assert (
        Condition.model_validate(
            {"type": "x", "status": "True", "reason": "", "message": "", "lastTransitionTime": 1.5}
        )
        .model_dump_json(by_alias=True)
        .endswith('"lastTransitionTime":"1970-01-01T00:00:01.500Z"}')
    )
    assert JobEvent.model_validate_json(
        '{"id": 1, "at": "2026-11-26T01:02:03Z", "reason": "", "message": ""}'
    ).at == 1795654923.0  # fmt: skip


def has_a_speed(document: dict[str, Any]) -> bool:
    """Return whether the curve of a status has a speed, which its schema does not say."""
    curve = (document.get("speed") or {}).get("curve")
    return curve is None or 0 < sum(curve) < math.inf


@given(document=documents(JobStatus))
def test_a_status_comes_back_as_it_was(document: dict[str, Any]) -> None:
    assume(has_a_speed(document))
    status = JobStatus.model_validate(document)
    for by_alias in (True, False):
        assert JobStatus.model_validate_json(status.model_dump_json(by_alias=by_alias)) == status


@pytest.mark.parametrize("model", [ElasticJobStatus, JobStatus, Snapshot, History])
def test_each_time_of_a_document_is_rfc_3339(model: type[BaseModel]) -> None:
    schema = model.model_json_schema(mode="serialization", by_alias=False)
    seen = 0
    for name, part in {model.__name__: schema, **schema["$defs"]}.items():
        for field, node in part.get("properties", {}).items():
            if name != "RestartSpec" and TIME_KEY.fullmatch(field):
                (kind,) = [n for n in node.get("anyOf", [node]) if n["type"] != "null"]
                assert (kind["type"], kind.get("format")) == ("string", "date-time"), (name, field)
                seen += 1
    assert seen > 0
