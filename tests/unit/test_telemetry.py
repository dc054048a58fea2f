"""What is logged: sentences for people, JSON for programs."""

import io
import json
import logging
from typing import Any

import pytest

from dlrover_agent.console import checked, restarted
from dlrover_py.protocol.agents import CheckResult
from dlrover_py.telemetry import ENV_FORMAT, NOTICE, for_people, setup


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENV_FORMAT, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)


def logged(stream: io.StringIO, event: str, level: int = logging.WARNING, **fields: object) -> str:
    log = setup("agent", level="WARNING", stream=stream, logger="of-a-test", elsewhere=["Told"])
    log = logging.getLogger("of-a-test")
    log.log(level, event, extra=fields)
    return stream.getvalue()


def test_the_log_is_for_people_on_a_terminal_outside_a_pod(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (for_people(Terminal()), for_people(io.StringIO())) == (True, False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert not for_people(Terminal())


@pytest.mark.parametrize(("wish", "people"), [("json", False), ("words", True)])
def test_the_format_can_be_wished(wish: str, people: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_FORMAT, wish)
    assert for_people(Terminal()) is for_people(io.StringIO()) is people


def test_a_wish_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_FORMAT, "text")
    said = logged(Terminal(), "x")
    assert "DLROVER_LOG_FORMAT is 'text': expected words or json" in said


@pytest.mark.parametrize("wish", ["debug", " Warn ", "ERROR"])
def test_a_level_is_known_in_any_case(wish: str) -> None:
    setup("agent", level=wish, stream=Terminal(), logger="of-a-test")
    known = logging.getLevelNamesMapping()
    assert logging.getLogger("of-a-test").level == known[wish.strip().upper()]


@pytest.mark.parametrize("wish", ["verbose", "", "10", "\udcff"])
def test_a_level_that_is_not_known_is_told_and_ends_no_program(wish: str) -> None:
    stream = Terminal()
    setup("agent", level=wish, stream=stream, logger="of-a-test")
    assert f"the log's level is {wish!r}: expected DEBUG, INFO" in stream.getvalue()
    assert logging.getLogger("of-a-test").level == logging.INFO


@pytest.mark.parametrize(
    ("event", "fields", "line"),
    [
        (
            "peer_probe_unavailable",
            {"port": 9, "why": "in use"},
            "agent: peer probe unavailable: in use (port 9)",
        ),
        ("took", {"took_s": 0.5, "step": None}, "agent: took (took 0.5 s)"),
        (
            "ended",
            {"why": "killed", "then": "started again"},
            "agent: ended: killed; started again",
        ),
        (
            "NodeLost",
            {"why": "node n1 was lost: silent", "term": 3},
            "agent: node n1 was lost: silent",
        ),
        ("restarted", {"says": "restart 1 of 3", "after_s": 1}, "agent: restart 1 of 3"),
        ("two words", {}, "agent: two words"),
    ],
)
def test_people_get_a_sentence(event: str, fields: dict[str, Any], line: str) -> None:
    assert logged(Terminal(), event, **fields) == line + "\n"
    told = json.loads(logged(io.StringIO(), event, **fields))
    assert told["event"] == event
    assert fields.items() <= told.items()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_a_traceback_cannot_write_to_a_terminal(stream: io.StringIO) -> None:
    setup("agent", stream=stream, logger="of-a-test")
    try:
        raise ValueError("\x1b]0;title\x07\rover it")
    except ValueError:
        logging.getLogger("of-a-test").exception("it failed")
    assert "title" in stream.getvalue()
    assert not set("\x1b\x07\r") & set(stream.getvalue())


def test_a_notice_is_told_where_only_warnings_are() -> None:
    assert logged(Terminal(), "x", logging.INFO) == ""
    assert json.loads(logged(io.StringIO(), "x", NOTICE))["level"] == "notice"


def test_what_another_program_tells_people_is_told_to_programs_only() -> None:
    assert logged(Terminal(), "Told") == ""
    assert logged(io.StringIO(), "Told") != ""


KILLED = "n0: worker 1 (rank 1) was killed by SIGKILL (restart 1 of 3)"


@pytest.mark.parametrize(
    ("reason", "alone", "stepped", "line"),
    [
        (
            KILLED,
            True,
            True,
            "worker 1 was killed by SIGKILL: restart 1 of 3, next step after 0.2 s",
        ),
        (
            KILLED.replace("rank 1", "rank 3"),
            False,
            False,
            "n0: worker 1 (rank 3) was killed by SIGKILL: restart 1 of 3, "
            "workers run again after 0.2 s",
        ),
        (
            "node n1 was lost: its connection closed",
            True,
            True,
            "node n1 was lost: its connection closed, next step after 0.2 s",
        ),
    ],
)
def test_a_restart_is_one_line(reason: str, alone: bool, stepped: bool, line: str) -> None:
    assert restarted(reason, single_node=alone, stepped=stepped, after_s=0.2) == line


def test_a_check_is_one_line() -> None:
    assert checked(CheckResult(passed=False, why="no device")) == (
        "this node's check failed: no device"
    )
    both = CheckResult(passed=True, matmul_s=0.1, allreduce_s=0.2, algbw_gb_s=3, busbw_gb_s=4)
    assert checked(both) == (
        "this node passed its check: matmul 0.1 s, all-reduce 0.2 s, algbw 3 GB/s, busbw 4 GB/s"
    )
