"""Identities of checkpoints, and which are wrong, as tests write them."""

from dlrover_py.protocol.checkpoint_id import CheckpointId, Rejection
from dlrover_py.protocol.names import Round, Step, Timeline


def checkpoint_id(step: int, round: int = 1, timeline: int = 0) -> CheckpointId:
    """Return the identity of a checkpoint."""
    return CheckpointId(round=Round(round), timeline=Timeline(timeline), step=Step(step))


def wrong_after(round: int, step: int) -> Rejection:
    """Return the finding that values were wrong after a step, until the end of a round."""
    return Rejection(round=Round(round), good=Step(step))
