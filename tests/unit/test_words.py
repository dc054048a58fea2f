"""Text from outside reaches the master whatever it is: names of files, of hosts, exceptions."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dlrover_agent.endpoint import Endpoint
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    CheckResult,
    Directive,
    FailureKind,
    Offer,
    Persisting,
    Stored,
    WorkerFailure,
)
from dlrover_py.protocol.errors import Unreachable
from dlrover_py.protocol.workers import News, Order
from dlrover_py.rpc import Client

ANY = st.text(st.characters(exclude_categories=()), max_size=40) | st.sampled_from(
    ["x" * 20_000, "\udcff" * 3_000, os.fsdecode(b"/job/by\xfftes"), "\ud83d", "a\0b"]
)
"""Also halves of surrogate pairs, as Python makes them of bytes that are no UTF-8."""


@given(ANY)
def test_words_of_any_form_are_cut_and_sent(text: str) -> None:
    failure = WorkerFailure(
        kind=FailureKind.START,
        local_rank=0,
        rank=0,
        pid=0,
        exit_code=127,
        message=text,
        traceback=text,
        fingerprint=text,
    )
    report = AgentReport(
        boot_id="12345678",
        seq=1,
        offer=Offer(addr="10.0.0.1", port=1),
        failure=failure,
        leaving=text,
        cut_off=text,
        check=CheckResult(passed=False, why=text),
        persisting=Persisting(why=text),
        stored=Stored(step=1, where=text, at=0.0),
        checkpoint_trouble=text,
        gives_up=text,
        nested=text,
    )
    assert AgentReport.model_validate_json(report.model_dump_json()) == report
    told = Assignment(term=1, version=1, incarnation=1, directive=Directive.WAIT, reason=text)
    assert Assignment.model_validate_json(told.model_dump_json()) == told
    for message in (News(round=1, local_rank=0, unsaved=text), Order(stop=text)):
        assert type(message).model_validate_json(message.model_dump_json()) == message


def test_what_fits_is_sent_as_it_is() -> None:
    assert Order(stop="naïve 名前 \U0001f600").stop == "naïve 名前 \U0001f600"
    assert Order(stop="x" * 1024).stop == "x" * 1024
    assert Order(stop="x" * 1025).stop == "x" * 1023 + "…"


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValidationError):
        Order.model_validate_json('{"stop": 7}')


def test_a_run_may_have_any_id() -> None:
    tokens = {Endpoint(run_id=name).token for name in ("a", os.fsdecode(b"\xff"), "x" * 5000)}
    assert len(tokens) == 3


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "\udcff"])
async def test_a_host_whose_name_is_none_is_not_reached(host: str) -> None:
    with pytest.raises(Unreachable, match="is no host name"):
        await Client(f"{host}:1").call("GET", "/", deadline_s=5)
