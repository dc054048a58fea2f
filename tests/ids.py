"""Identities of checkpoints, as tests write them."""

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import Round, Step, Timeline


def checkpoint_id(step: int, round: int = 1, timeline: int = 0) -> CheckpointId:
    """Return the identity of a checkpoint."""
    return CheckpointId(round=Round(round), timeline=Timeline(timeline), step=Step(step))
