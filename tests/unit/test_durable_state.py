"""What outlives a master: each field of the durable state is written, read, and gone on from."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError

from dlrover_py.master.core.events import Rules
from dlrover_py.master.core.job import Job
from dlrover_py.master.core.state import ACCEPTED_BYTES, WRITTEN_LATER, DurableState
from dlrover_py.protocol.job import ElasticJob
from dlrover_py.protocol.names import Term
from dlrover_py.protocol.status import JobPhase
from tests.builders import WALL, dumped, elastic_job, job_file, running
from tests.schemas import documents

OWN = {"accepted", "events", "generation", "job", "next_event", "pending_round", "term"}
"""Fields that a new master sets anew, or to which it adds."""
KEPT = json.loads(running().job.state.to_json())


@pytest.mark.parametrize("can_create", [True, False])
def test_every_durable_field_survives(can_create: bool) -> None:
    @settings(
        max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(document=documents(DurableState, KEPT))
    def tried(document: dict[str, Any]) -> None:
        try:
            left = DurableState.from_json(json.dumps(document))
        except ValidationError:
            return
        before = dumped(DurableState.from_json(json.dumps(document)), OWN)
        events, number = list(left.events), left.next_event
        term = Term(left.term + 1)
        rules = Rules(can_create=can_create)
        job = Job.resume(elastic_job(3), rules, left, term=term, now=100.0, wall=WALL)
        assert dumped(DurableState.from_json(job.state.to_json()), OWN) == before
        assert job.state.term == term
        assert job.state.next_event > number
        kept = job.state.events[:-1]
        assert kept == (events[-len(kept) :] if kept else [])

    tried()


def test_a_journal_whose_round_names_a_node_twice_is_refused() -> None:
    """A master that went on from it would pair the node with itself."""
    document = json.loads(json.dumps(KEPT))
    members = document["world"]["members"]
    members[1]["node"] = members[0]["node"]
    with pytest.raises(ValidationError, match="its round names a node twice"):
        DurableState.from_json(json.dumps(document))


def test_an_assignment_raises_the_generation_unless_it_may_be_written_later() -> None:
    state = DurableState(job="x", term=Term(1))
    assert state.generation == 0
    state.phase = JobPhase.RUNNING
    assert state.generation == 1
    state.phase = JobPhase.RUNNING
    assert state.generation == 1, "nothing has changed"
    for name in WRITTEN_LATER:
        setattr(state, name, "" if name == "reason" else [] if name == "events" else 7)
    assert state.generation == 1
    state.changed()
    assert state.generation == 2
    assert "generation" not in json.loads(state.to_json())


@pytest.mark.parametrize("letter", ["x", "€"])
def test_a_spec_is_kept_only_if_its_bytes_are_few(letter: str) -> None:
    """A Secret, in which the journal is, has room for bytes, whatever the letters."""
    size = len(letter.encode())

    def kept(number: int) -> bool:
        main = {"name": "main", "command": ["elastic-run", "t.py", letter * number]}
        job = ElasticJob.parse(job_file(1, template={"spec": {"containers": [main]}}))
        state = DurableState(job="x", term=Term(1))
        state.accept(job)
        assert state.accepted == "" or state.read_accepted() == job
        return bool(state.accepted)

    assert kept(ACCEPTED_BYTES // size - 2000)
    assert not kept(ACCEPTED_BYTES // size)
