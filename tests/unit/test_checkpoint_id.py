"""The identity of a checkpoint: its order, and what a type checker refuses."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import Round, Step, Timeline
from tests.ids import checkpoint_id

NUMBERS = st.integers(0, 3)
IDS = st.builds(checkpoint_id, NUMBERS, NUMBERS, NUMBERS)


@given(IDS, IDS)
def test_the_order_is_that_of_age(one: CheckpointId, other: CheckpointId) -> None:
    """Round before timeline before step: a script that went back takes lower steps later."""
    later = (one.round, one.timeline, one.step) > (other.round, other.timeline, other.step)
    assert (one > other) == later
    assert (one == other) == (hash(one) == hash(other)) == (asdict(one) == asdict(other))


@given(IDS)
def test_it_is_read_from_json_as_it_was_written(one: CheckpointId) -> None:
    assert CheckpointId(**json.loads(json.dumps(asdict(one)))) == one


def test_step_and_round_cannot_be_exchanged() -> None:
    """`make check` fails if mypy would accept one of these: then its ignore comment is unused."""
    step, timeline, round_ = Step(7), Timeline(0), Round(2)
    CheckpointId(round=round_, timeline=timeline, step=step)
    CheckpointId(round=step, timeline=timeline, step=step)  # type: ignore[arg-type]
    CheckpointId(round=round_, timeline=round_, step=step)  # type: ignore[arg-type]
    CheckpointId(round=round_, timeline=timeline, step=round_)  # type: ignore[arg-type]
    CheckpointId(round=round_, timeline=timeline, step=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        CheckpointId(round_, timeline, step)  # type: ignore[call-arg]
