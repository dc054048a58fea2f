"""What ``dlrover job run`` and ``logs`` show of what workers print: bounded parts of files."""

import contextlib
import os
import tty
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from dlrover_py.cli import logs
from dlrover_py.cli.logs import LogQuery, WorkerOutput
from dlrover_py.cli.podlogs import PodLogs
from dlrover_py.kubernetes.client import KubeClient
from dlrover_py.protocol.status import JobPhase, JobStatus, NodePhase, NodeRole, NodeStatus


def status(round_: int = 1, ranks: tuple[int | None, ...] = (0, 1)) -> JobStatus:
    return JobStatus(
        name="demo", generation=1, phase=JobPhase.RUNNING, reason="", term=1, round=round_,
        world_size=len(ranks), nodes_in_round=len(ranks), desired=2, minimum=2, ready=2, standby=0,
        started_at=0.0,
        nodes=[
            NodeStatus(
                id=f"n{i}", phase=NodePhase.LIVE, role=NodeRole.MEMBER, incarnation=1,
                node_rank=rank
            )
            for i, rank in enumerate(ranks)
        ],
    )  # fmt: skip


def write(folder: Path, data: bytes, *, node: str = "n0", round_: int = 1, rank: int = 0) -> None:
    path = folder / node / "1" / str(round_) / str(rank) / "stdout.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)


def test_the_lines_of_rank_0_come_as_they_are_written(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path, all_ranks=False)
    assert output.new_lines(None) == []
    assert output.new_lines(status()) == []
    write(tmp_path, b"one\ntw")
    write(tmp_path, b"other\n", node="n1", rank=1)
    assert [p.line for p in output.new_lines(status())] == ["one"]
    assert output.last_lines == ["one", "tw"]
    write(tmp_path, b"o\n")
    assert [p.line for p in output.new_lines(status())] == ["two"]
    assert output.new_lines(status()) == []
    assert output.last_lines == ["one", "two"]


def test_all_ranks_are_told_with_their_origin(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path, all_ranks=True)
    write(tmp_path, b"a\n")
    write(tmp_path, b"b\n", node="n1", rank=1)
    told = {(p.node, p.round, p.rank, p.stream, p.line) for p in output.new_lines(status())}
    assert told == {("n0", 1, 0, "stdout", "a"), ("n1", 1, 1, "stdout", "b")}
    assert output.last_lines == ["a"]


def test_the_last_words_of_a_round_come_when_the_next_has_begun(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path, all_ranks=False)
    output.new_lines(status())
    write(tmp_path, b"late\n")
    write(tmp_path, b"next\n", node="n1", round_=2)
    lines = [(p.round, p.line) for p in output.new_lines(status(2, (1, 0)))]
    assert lines == [(1, "late"), (2, "next")]
    write(tmp_path, b"end")
    assert [p.line for p in output.new_lines(status(2, (1, None)), end=True)] == ["end"]


def test_a_progress_bar_shows_what_it_shows_now(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path, all_ranks=False)
    write(tmp_path, b"\r10%\r50%")
    output.new_lines(status())
    assert output.last_lines == ["50%"]
    write(tmp_path, b"\r100%\r\nall \xff done\r\n")
    assert [p.line for p in output.new_lines(status())] == ["100%", "all � done"]


def test_of_a_flood_only_the_newest_is_read(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path, all_ranks=False)
    write(tmp_path, b"x" * 99 + b"\n")
    output.new_lines(status())
    write(tmp_path, (b"y" * 99 + b"\n") * 50_000 + b"end\n")
    lines = [p.line for p in output.new_lines(status())]
    assert len(lines) <= logs.READ_BYTES // 100 + 3  # one is cut, one says so
    assert lines[-1] == "end"
    skipped = 50_000 * 100 + 4 - logs.READ_BYTES
    assert lines[0] == f"… {skipped} bytes are not shown: see `dlrover job logs`"
    assert len(output.last_lines) == logs.KEPT_LINES
    write(tmp_path, b"z" * 3 * logs.READ_BYTES)  # a line without an end
    output.new_lines(status())
    assert len(output.last_lines[-1]) <= logs.READ_BYTES


def test_a_log_that_there_is_not_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    query = LogQuery(node="n9", rank=7, round=3)
    assert not logs.print_logs(tmp_path, None, query)
    assert (
        logs.missing_log_message(tmp_path, query)
        == "there is no log yet: no worker has printed anything"
    )
    for rank in range(10):
        write(tmp_path, b"one\n", rank=rank)
    assert not logs.print_logs(tmp_path, None, query)
    there = ", ".join(f"n0 round 1 rank {rank}" for rank in range(8))
    words = "there is no log of node n9, rank 7, round 3; existing logs"
    assert logs.missing_log_message(tmp_path, query) == f"{words}: {there} and 2 more"
    (tmp_path / "n0/1/1/0/stdout.log").write_bytes(b"")
    assert logs.print_logs(tmp_path, None, LogQuery(rank=0)), "a worker that says nothing has a log"


def test_logs_that_are_not_there_any_more_cost_nothing(tmp_path: Path) -> None:
    output = WorkerOutput(tmp_path, all_ranks=False)
    write(tmp_path, b"one\n")
    output.new_lines(status())
    (tmp_path / "n0/1/1/0/stdout.log").unlink()
    (tmp_path / "n0/1/1/0/stdout.log").mkdir()
    assert output.new_lines(status()) == []
    assert output.last_lines == ["one"]


HOSTILE = b"\x1b]0;mine\x07\x1b[2J\x1b[31mred\x1b[0m caf\xc3\xa9 \xff\x9b\r\n10%\r20%\nplain\n"
"""It sets the title of a terminal, clears the screen, and prints in red; then a progress bar."""
SHOWN = [
    "\\x1b]0;mine\\x07\\x1b[2J\x1b[31mred\x1b[0m café \ufffd\ufffd\x1b[0m",
    "20%",
    "plain",
]


@contextlib.contextmanager
def terminal() -> Iterator[bytearray]:
    """Make a terminal the standard output of the block; yield what it has got once that ends."""
    reading, writing = os.openpty()
    tty.setraw(writing)
    screen = bytearray()
    try:
        with open(writing, "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
            yield screen
        with contextlib.suppress(OSError):  # EIO: all is read, and nobody can write any more
            while part := os.read(reading, 4096):
                screen += part
    finally:
        os.close(reading)


def test_a_terminal_shows_a_log_and_does_not_obey_it(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    write(tmp_path, HOSTILE)
    with terminal() as screen:
        assert logs.print_logs(tmp_path, None, LogQuery())
    assert screen.decode().splitlines() == [f"[n0 round 1 rank 0] {line}" for line in SHOWN]
    assert logs.print_logs(tmp_path, None, LogQuery())
    kept = [b"[n0 round 1 rank 0] " + line for line in HOSTILE.splitlines(keepends=True)]
    raw = capfdbinary.readouterr().out
    assert raw.replace(b"[n0 round 1 rank 0] ", b"") == HOSTILE
    assert raw.startswith(kept[0])


class TwoPods:
    """An API server with the Pods of two nodes, whose logs are the same."""

    async def list(self, kind: object, namespace: str, *, labels: str) -> list[dict[str, Any]]:
        owner = {"uid": "u", "kind": "ElasticJob", "controller": True}
        return [
            {
                "metadata": {"name": f"demo-n{i}", "uid": str(i), "ownerReferences": [owner]},
                "spec": {"containers": [{"name": "main"}]},
                "status": {"phase": "Running"},
            }
            for i in range(2)
        ]

    async def log_lines(
        self, pod: str, *_: object, **__: object
    ) -> AsyncIterator[tuple[str, bytes]]:
        for line in HOSTILE.split(b"\n")[:-1]:
            yield "2026-11-26T01:02:03Z", line


async def test_a_terminal_does_not_obey_the_log_of_a_pod(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    job = {"metadata": {"name": "demo", "namespace": "ml", "uid": "u"}}

    def printer() -> PodLogs:
        return PodLogs(cast("KubeClient", TwoPods()), job, LogQuery(), None)

    with terminal() as screen:
        await printer().print_all(ended=True)
    assert screen.decode().splitlines() == [f"[n{i}] {line}" for i in range(2) for line in SHOWN]
    await printer().print_all(ended=True)
    raw = capfdbinary.readouterr().out
    assert raw.replace(b"[n0] ", b"").replace(b"[n1] ", b"") == HOSTILE * 2
