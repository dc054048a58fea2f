"""Text from outside reaches the master whatever it is: names of files, of hosts, exceptions."""

import io
import json
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dlrover_agent.cli import _print_error
from dlrover_agent.standalone import Endpoint
from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol.agents import (
    AgentReport,
    Assignment,
    CheckResult,
    Directive,
    FailureKind,
    Offer,
    PersistProgress,
    StoredCheckpoint,
    WorkerFailure,
)
from dlrover_py.protocol.errors import UnreachableError
from dlrover_py.protocol.workers import WorkerProgress, WorkerRequest
from dlrover_py.telemetry import setup

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
        persisting=PersistProgress(why=text),
        stored=StoredCheckpoint(step=1, where=text, at=0.0),
        checkpoint_error=text,
        gives_up=text,
        nested=text,
    )
    assert AgentReport.model_validate_json(report.model_dump_json()) == report
    told = Assignment(term=1, version=1, incarnation=1, directive=Directive.WAIT, reason=text)
    assert Assignment.model_validate_json(told.model_dump_json()) == told
    for message in (WorkerProgress(round=1, local_rank=0, unsaved=text), WorkerRequest(stop=text)):
        assert type(message).model_validate_json(message.model_dump_json()) == message


def test_what_fits_is_sent_as_it_is() -> None:
    assert WorkerRequest(stop="naïve 名前 \U0001f600").stop == "naïve 名前 \U0001f600"
    assert WorkerRequest(stop="x" * 1024).stop == "x" * 1024
    assert WorkerRequest(stop="x" * 1025).stop == "x" * 1023 + "…"


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValidationError):
        WorkerRequest.model_validate_json('{"stop": 7}')


def test_a_run_may_have_any_id() -> None:
    tokens = {Endpoint(run_id=name).token for name in ("a", os.fsdecode(b"\xff"), "x" * 5000)}
    assert len(tokens) == 3


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "\udcff"])
async def test_a_host_whose_name_is_none_is_not_reached(host: str) -> None:
    with pytest.raises(UnreachableError, match="is no host name"):
        await HttpClient(f"{host}:1").call("GET", "/", deadline_s=5)


EVIL = "\x00\x1b[2J\x9b2J\u202e\ud800"


@pytest.mark.parametrize("form", ["words", "json"])
def test_a_log_line_does_not_control_the_terminal(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLROVER_LOG_FORMAT", form)
    out = io.StringIO()
    setup("test", stream=out, logger="dlrover-evil")
    logging.getLogger("dlrover-evil").warning("master_not_reached", extra={"why": EVIL})
    logging.getLogger("dlrover-evil").handlers.clear()
    line = out.getvalue().rstrip("\n")
    assert not [c for c in line if not c.isprintable()]
    if form == "json":
        assert json.loads(line)["why"] == EVIL


def test_a_last_message_does_not_control_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    _print_error(f"ValueError: {EVIL}\x1b[1;31m\n")
    said = capfd.readouterr().err
    assert not [c for c in said.rstrip("\n") if not c.isprintable()]
    assert said.startswith("ValueError: \\x00\\x1b[2J")
