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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.result import Ok

from dlrover_py.protocol import proof
from tests.process.harness import Place
from tests.process.test_server import TOKEN, Master, report, running_master

EXAMPLES = 25
"""Of each call: an exchange is held for a moment, unless it is refused."""
SETTINGS = {"exchange_s": "0.1", "lease_s": "60", "memory_wait_s": "0.01"}
EXCHANGE = "POST /v1/nodes/{node_id}/exchange"
SHARDS = "POST /v1/nodes/{node_id}/shards"
SNAPSHOT = "POST /v1/nodes/{node_id}/snapshot"
VALID: dict[str, Any] = {
    "GET /v1/checkpoints": {"query": {"round": 0}},
    "GET /v1/checkpoints/locations": {"query": {"round": 0, "step": 0}},
    f"GET {proof.PATH}": {"query": {"nonce": "0f" * 16}},
    "PUT /v1/recipe": {"body": "[]"},
    "GET /v1/recipes/{key}": {"path_parameters": {"key": "0f" * 16}},
    "PUT /v1/recipes/{key}": {"path_parameters": {"key": "0f" * 16}, "body": "[]"},
    EXCHANGE: {"path_parameters": {"node_id": "n0"}, "body": report()},
    SHARDS: {
        "path_parameters": {"node_id": "n9"},
        "body": {
            "boot_id": "none-of-the-job",
            "request": {"dataset": "d", "round": 0, "local_rank": 0, "seq": 1},
        },
    },
    SNAPSHOT: {
        "path_parameters": {"node_id": "n9"},
        "body": {"boot_id": "none-of-the-job", "number": 1, "round": 1},
    },
}
"""Parameters of one valid call, by operation. An operation that is not here needs none."""
GIVING_UP: Any = {
    "path_parameters": {"node_id": "n0"},
    "body": report(seq=2, gives_up="no restarts"),
}
"""A valid report that ends the job. Afterwards the master has no job, and refuses its name."""
WITHOUT_TOKEN = {("GET", proof.PATH)}
"""What is answered without the token: only by the proof does a client learn whom to send it to."""
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
        for method in (m for m in METHODS if (m, path) not in WITHOUT_TOKEN):
            for auth in (None, "Bearer the-token-of-another-job", f"Basic {TOKEN}"):
                with master.connect() as sock:
                    head = f"{method} {filled} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                    head += f"Authorization: {auth}\r\n" if auth else ""
                    sock.sendall(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
                    with sock.makefile("rb") as reply:
                        said = reply.read()
                assert said.startswith(b"HTTP/1.1 401 "), (method, filled, auth, said)
                body = said.partition(b"\r\n\r\n")[2]
                expected = b"" if method == "HEAD" else b"the request needs the job's token"
                assert expected in body


def test_the_proof_needs_no_token_and_shows_nothing_but_the_proof(master: Master) -> None:
    """Not even the document, or a refusal, says anything of the job."""
    document = described(master)["paths"]
    open_calls = {
        (method.upper(), path)
        for path, calls in document.items()
        for method, call in calls.items()
        if call.get("security") == []
    }
    assert open_calls == WITHOUT_TOKEN
    nonce, url = "0f" * 16, f"http://127.0.0.1:{master.job}{proof.PATH}"
    with requests.Session() as session:
        said = session.get(url, params={"nonce": nonce})
        where = f"127.0.0.1:{master.job}"
        assert (said.status_code, said.json()) == (200, proof.master_proof(TOKEN, nonce, where))
        for bad in ("", "0f" * 15, "0f" * 65, "0F" * 16, nonce + "\n"):
            refused = session.get(url, params={"nonce": bad})
            assert refused.status_code == 422
            assert TOKEN not in refused.text


def test_every_answer_is_as_the_document_says(master: Master) -> None:
    """To what the document allows, and to what it does not.

    What is generated depends on the modules that earlier tests have imported, because Hypothesis
    draws from the constants in them. So each operation has a valid call of its own. Exchanges come
    last, because a report may end the job, as ``GIVING_UP`` does.
    """
    document = described(master)
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=f"http://127.0.0.1:{master.job}")
    checks: list[Any] = CHECKS.get_by_names([
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "ignored_auth",
    ])  # fmt: skip
    told: dict[str, set[int]] = {}
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    operations.sort(key=lambda operation: operation.label == EXCHANGE)
    with requests.Session() as session:
        for operation in operations:
            told[operation.label] = set()
            strategies = [operation.as_strategy(generation_mode=mode) for mode in GenerationMode]
            valid = operation.Case(**VALID.get(operation.label, {}))
            final = operation.Case(**GIVING_UP) if operation.label == EXCHANGE else valid

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @example(case=valid)
            @example(case=final)
            @given(case=st.one_of(strategies))
            def one(case: schemathesis.Case[Any]) -> None:
                headers = {"Authorization": f"Bearer {TOKEN}"}
                response = case.call(session=session, headers=headers)
                told[case.operation.label].add(response.status_code)
                if response.status_code >= 500:
                    assert response.json()["code"] == "passive", "all that may pass by itself"
                case.validate_response(response, checks=checks)

            one()
    assert len(told) == sum(len(calls) for calls in document["paths"].values())
    assert set(VALID) <= set(told)
    assert [label for label, seen in told.items() if 200 not in seen] == []
