"""What ``dlrover job run`` shows of what workers print: a bounded part of files each time."""

from pathlib import Path

from dlrover_py.cli import logs
from dlrover_py.cli.logs import LogQuery, WorkerOutput
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
