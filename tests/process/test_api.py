"""The master's API is what its document says, for whatever is sent to it; and nothing without a
token.

The document is FastAPI's, so that a path that is added is tried here by itself.
"""

import json
import string
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tests.process.harness import Place
from tests.process.test_server import TOKEN, Master, running_master

EXAMPLES = 25
"""Of each call: an exchange is held for a moment, unless it is refused."""
SETTINGS = {"exchange_s": "0.1", "lease_s": "60", "memory_wait_s": "0.01"}
METHODS = ("GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE")


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    place = Place()
    try:
        with running_master(place, **SETTINGS) as master:
            yield master
    finally:
        place.close()


def described(master: Master) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(master.ask(path="/openapi.json").body)
    return document


def test_each_path_by_each_method_asks_for_the_token(master: Master) -> None:
    """Another job's token, and this one's by another scheme, are none either."""
    paths = [*described(master)["paths"], "/openapi.json", "/docs", "/redoc", "/none"]
    assert len(paths) > 4
    for path in paths:
        fields = [name for _, name, _, _ in string.Formatter().parse(path) if name]
        filled = path.format_map(dict.fromkeys(fields, "n0"))
        for method in METHODS:
            for auth in (None, "Bearer the-token-of-another-job", f"Basic {TOKEN}"):
                with master.connect() as sock:
                    head = f"{method} {filled} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                    head += f"Authorization: {auth}\r\n" if auth else ""
                    sock.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
                    with sock.makefile("rb") as reply:
                        said = reply.read()
                assert said.startswith(b"HTTP/1.1 401 "), (method, filled, auth, said)
                body = said.partition(b"\r\n\r\n")[2]
                expected = b"" if method == "HEAD" else b"the job's token is expected"
                assert expected in body


def test_every_answer_is_as_the_document_says(master: Master) -> None:
    """To what the document allows, and to what it does not."""
    document = described(master)
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=f"http://127.0.0.1:{master.job}")
    checks = CHECKS.get_by_names([
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "ignored_auth",
    ])  # fmt: skip
    told: dict[str, set[int]] = {}
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            told[operation.label] = set()
            strategies = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=st.one_of(strategies))
            def one(case: schemathesis.Case) -> None:
                headers = {"Authorization": f"Bearer {TOKEN}"}
                response = case.call(session=session, headers=headers)
                told[case.operation.label].add(response.status_code)
                if response.status_code >= 500:
                    assert response.json()["code"] == "passive", "all that may pass by itself"
                case.validate_response(response, checks=checks)

            one()
    assert len(told) == sum(len(calls) for calls in document["paths"].values())
    assert all(200 in seen for seen in told.values()), told
