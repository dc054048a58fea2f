"""What ranks send to one another is data: no code in it is run, and it arrives as it was."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.errors import CheckpointError
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.trainer import collectives
from dlrover_py.trainer.replica_tracking import ReplicaMarks

ONE = CheckpointId(round=Round(1), timeline=Timeline(0), step=Step(5))
OTHER = CheckpointId(round=Round(1), timeline=Timeline(2), step=Step(3))


def peer_sends(monkeypatch: pytest.MonkeyPatch, data: bytes, size: int | None = None) -> None:
    """Let the second of two ranks send these bytes, and say that they are so many."""
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def all_gather(parts: list[torch.Tensor], own: torch.Tensor) -> None:
        parts[0].copy_(own)
        if own.dtype == torch.int64:
            parts[1].fill_(len(sent) if size is None else size)
        else:
            parts[1][: len(sent)] = sent

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(collectives, "_device_of_group", lambda: torch.device("cpu"))


def test_a_value_of_each_rank_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    value = ["words", -1, 2**63, 0.5, None, True, {"a": [[1, 2]]}, "é\ud800"]
    for other in ([], value, "x" * 1000):
        peer_sends(monkeypatch, json.dumps(other).encode())
        assert collectives.gather(value, 2) == [value, other]
    assert collectives.gather(value, 1) == [value]


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04cposix\nsystem\n(X\x0a\x00\x00\x00touch HEREtR.",
        b"cos\nsystem\n(S'touch HERE'\ntR.",
        b"{",
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_no_code_is_run(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the store of a round can take the place of a rank for the others."""
    monkeypatch.chdir(tmp_path)
    peer_sends(monkeypatch, data)
    with pytest.raises(CheckpointError, match="what a rank has sent cannot be read"):
        collectives.gather(1, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [1 << 40, 2**63 - 1])
def test_no_memory_is_taken_because_a_rank_says_so(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_sends(monkeypatch, b"1", size)
    with pytest.raises(CheckpointError, match="expected at most"):
        collectives.gather(1, 2)


def test_marks_are_sent_as_plain_values() -> None:
    marks = ReplicaMarks((ONE, OTHER), {ONE: (True, 2), OTHER: (False, 4)})
    assert ReplicaMarks.read(json.loads(json.dumps(marks.plain()))) == marks
