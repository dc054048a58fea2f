"""Messages between two processes: what one end encodes the other one reads, or refuses in words.

test_parsers.py feeds the same decoders with documents that were changed.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol import probe, reaper
from dlrover_py.protocol.probe import ANSWER, ASK, Probe
from dlrover_py.protocol.reaper import SessionChange
from dlrover_py.protocol.zygote import (
    ForkAnswer,
    ForkChildren,
    StoreTask,
    WorkerTask,
    ZygoteConfig,
    ZygoteFitness,
    encode,
    read_request,
    read_task,
)

NONCES = st.binary(min_size=probe.NONCE, max_size=probe.NONCE)
ROUNDS = st.integers(0, 2**53)


@given(st.sampled_from([ASK, ANSWER]), st.binary(max_size=40), ROUNDS, NONCES)
def test_a_probe_arrives_and_proves_one_side(
    side: probe.ProbeSide, token: bytes, round_number: int, nonce: bytes
) -> None:
    datagram = probe.encode(side, token, round_number, nonce)
    assert len(datagram) == probe.LENGTH
    found = Probe.decode(datagram)
    assert (found.round, found.nonce) == (round_number, nonce)
    assert found.proves(side, token)
    assert not found.proves(ASK if side is ANSWER else ANSWER, token)
    assert not found.proves(side, token + b"x")
    other_version = probe.ProbeSide(side.replace(b"1", b"2"))
    assert not found.proves(other_version, token)
    assert not found._replace(round=round_number + 1).proves(side, token)


@given(st.binary(max_size=2 * probe.LENGTH))
def test_other_bytes_are_no_probe(data: bytes) -> None:
    if len(data) == probe.LENGTH:
        assert not Probe.decode(data).proves(ASK, b"token")
    else:
        with pytest.raises(ValueError, match=f"has 56 bytes: found {len(data)}"):
            Probe.decode(data)


CHANGES = st.builds(
    SessionChange, st.booleans(), st.integers(0, 1 << 22), st.integers(0, (1 << 64) - 1)
)


@given(st.lists(CHANGES), st.binary(max_size=reaper.MAX_LINE), st.integers(0, 400))
def test_changes_of_sessions_arrive_however_the_pipe_cuts_them(
    changes: list[SessionChange], last: bytes, cut: int
) -> None:
    last = last.replace(b"\n", b"")
    data = b"".join(change.encode() for change in changes) + last
    first, rest = reaper.split(data[:cut])
    second, rest = reaper.split(rest + data[cut:])
    assert (first + second, rest) == (changes, last)
    assert all(len(change.encode()) <= reaper.MAX_LINE for change in changes)


LINE = re.compile(rb"[+-][0-9]{1,10}@[0-9]{1,20}")


@given(st.binary() | st.from_regex(rb"[+-][0-9]{0,12}@?[0-9]{0,22}\n", fullmatch=True))
def test_other_lines_to_a_reaper_are_refused_in_words(data: bytes) -> None:
    *lines, rest = data.split(b"\n")
    good = all(LINE.fullmatch(line) for line in lines) and len(rest) <= reaper.MAX_LINE
    if good:
        changes, left = reaper.split(data)
        assert b"".join(change.encode() for change in changes).count(b"\n") == len(lines)
        assert left == rest
    else:
        with pytest.raises(ValueError, match=r"^expected "):
            reaper.split(data)


def test_a_line_without_an_end_takes_no_memory() -> None:
    with pytest.raises(ValueError, match="lines of at most 64 bytes"):
        reaper.split(b"+" * (reaper.MAX_LINE + 1))


TEXT = st.text(st.characters(codec=None), max_size=8)  # with halves of surrogate pairs
TEXTS = st.lists(TEXT, max_size=3)
NUMBERS = st.integers(0, 1 << 40)
RECIPE_LINES = st.lists(st.tuples(TEXT, TEXT, st.none() | TEXT), max_size=3)
COMMANDS = st.lists(TEXT, min_size=3, max_size=4)
WORKERS = st.builds(WorkerTask, COMMANDS, st.dictionaries(TEXT, TEXT, max_size=3), TEXTS)
ZYGOTE_MESSAGES: list[tuple[Callable[[bytes], Any], st.SearchStrategy[Any]]] = [
    (read_request, st.builds(ForkChildren, st.just([]) | COMMANDS)),
    (read_task, WORKERS),
    (read_task, st.builds(StoreTask, NUMBERS)),
    (ForkAnswer.decode, st.builds(ForkAnswer, st.lists(NUMBERS, max_size=3), TEXT)),
    (ZygoteFitness.decode, st.builds(ZygoteFitness, TEXT, TEXTS, NUMBERS)),
    (
        ZygoteConfig.decode,
        st.builds(ZygoteConfig, NUMBERS, NUMBERS, RECIPE_LINES, TEXTS, st.booleans()),
    ),
]


@pytest.mark.parametrize(("decode", "messages"), ZYGOTE_MESSAGES)
def test_messages_of_a_zygote_arrive(
    decode: Callable[[bytes], Any], messages: st.SearchStrategy[Any]
) -> None:
    @given(messages, st.dictionaries(st.just("unknown"), TEXTS))
    def one(message: Any, unknown: dict[str, list[str]]) -> None:
        assert decode(encode(message)) == message
        more = json.loads(encode(message)) | unknown
        assert decode(json.dumps(more).encode()) == message

    one()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Expecting value"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "checked: expected command or none, found None"),
        (b'{"checked": ["a", "b"]}', "checked: expected command or none, found"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_other_requests_to_a_zygote_are_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_request(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Expecting value"),
        (b"[]", "expected a JSON object, found list"),
        (b"{}", "argv: expected command, found None"),
        (b'{"argv": ["a", "b"], "env": {}}', "argv: expected command, found"),
        (b'{"argv": ["a", "b", "c"], "env": {"A": 1}}', "env: expected environment"),
        (b'{"store": -1}', "store: expected number, found -1"),
        (b'{"store": true}', "store: expected number, found True"),
    ],
)
def test_other_tasks_are_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_task(body)
