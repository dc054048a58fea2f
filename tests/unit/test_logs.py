"""Where output goes, decision by decision; and the pumps, with real pipes and files."""

import asyncio
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dlrover_agent.settings import Command, OutputSettings
from dlrover_agent.workers.logs import LogFiles, Logs, StreamPump
from dlrover_agent.workers.streams import WorkerStream
from dlrover_py.process.blocking import BackgroundWriter
from dlrover_py.protocol.agents import Assignment, Directive


def logs(tmp_path: Path, *, platform: bool = False, **output: object) -> Logs:
    kept = OutputSettings(**({"log_dir": tmp_path / "kept"} | output))  # type: ignore[arg-type]
    command = Command(
        argv=("python",),
        nproc=2,
        environ={},
        log_dir=tmp_path / "platform" if platform else None,
        output=kept,
    )
    return Logs(command, run_id="a/b", node_id="n0")


def assignment(number: int = 4) -> Assignment:
    return Assignment(
        term=1,
        version=number,
        incarnation=2,
        directive=Directive.RUN,
        reason="a test",
        round=number,
        rank_offset=6,
    )


def short(stream: WorkerStream, below: Path) -> tuple[list[str], bool, str]:
    files = [str(f.relative_to(below)) for f in stream.files]
    return files, stream.shown, stream.prefix


async def test_each_round_has_a_folder_of_its_own(tmp_path: Path) -> None:
    kept = logs(tmp_path, tee={None: 1})
    (run,) = (tmp_path / "kept").iterdir()
    assert run.name.startswith("a_b_")
    for attempt in range(2):
        found, _ = await kept.destinations(assignment(4 + attempt), [{}, {}], tmp_path)
        places = [short(d.out, run) for d in found]
        folder = f"attempt_{attempt}"
        assert places == [([f"{folder}/{i}/stdout.log"], True, f"[default{i}]:") for i in range(2)]
        assert all(d.err.plain for d in found)
        files = [str(Path(d.error_file).relative_to(run)) for d in found]
        assert files == [f"{folder}/{i}/error.json" for i in range(2)]


async def test_in_a_job_both_streams_are_where_the_platform_looks(tmp_path: Path) -> None:
    kept = logs(tmp_path, platform=True, tee={0: 2})
    (run,) = (tmp_path / "kept").iterdir()
    (first, second), _ = await kept.destinations(assignment(), [{}, {}], tmp_path)
    mine = [tmp_path / f"platform/n0/2/4/{6 + i}" for i in range(2)]
    assert first.out == WorkerStream(files=(mine[0] / "stdout.log",), shown=False)
    teed = run / "attempt_0/0/stderr.log"
    assert first.err == WorkerStream(
        (teed, mine[0] / "stderr.log"), shown=True, prefix="[default0]:"
    )
    assert second.err == WorkerStream(files=(mine[1] / "stderr.log",), shown=False)


async def test_a_folder_that_is_lost_costs_files_and_nothing_else(tmp_path: Path) -> None:
    kept = logs(tmp_path, redirects={None: 3})
    (run,) = (tmp_path / "kept").iterdir()
    run.rmdir()
    run.write_text("now a file")
    (first, _), _ = await kept.destinations(assignment(), [{}, {}], tmp_path)
    assert first.out == WorkerStream(files=(), shown=True)


async def test_a_link_in_the_place_of_the_folder_is_not_written_through(tmp_path: Path) -> None:
    """Another user who owns the folder above it can rename it."""
    kept = logs(tmp_path, redirects={None: 3})
    (run,) = (tmp_path / "kept").iterdir()
    run.rename(tmp_path / "moved")
    precious = tmp_path / "precious"
    precious.mkdir()
    run.symlink_to(precious)
    both, _ = await kept.destinations(assignment(), [{}, {}], tmp_path / "scratch")
    for found in both:
        assert (found.out.files, found.out.shown, found.err.files) == ((), True, ())
        assert found.error_file.startswith(f"{tmp_path}/scratch/")
    assert list(precious.iterdir()) == []


async def moved(stream: WorkerStream, chunks: list[bytes]) -> bytes:
    """What arrives on the console."""
    read, write = os.pipe()
    console, files = BackgroundWriter(write), LogFiles()
    pump = StreamPump(stream, console, files)
    for chunk in chunks:
        os.write(pump.end, chunk)
        pump.drain()
    os.close(pump.end)
    pump.close()
    console.finish(1.0)
    files.finish(1.0)
    os.close(write)
    with open(read, "rb") as reader:
        return await asyncio.to_thread(reader.read)


texts = st.lists(st.text("ab\n", max_size=6).map(str.encode), max_size=6)


@given(texts)
def test_each_line_has_one_prefix_wherever_it_is_torn(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    lines = whole.splitlines(keepends=True)
    shown = asyncio.run(moved(WorkerStream(prefix="> "), chunks))
    assert shown == b"".join(b"> " + line for line in lines)
    assert asyncio.run(moved(WorkerStream(), chunks)) == whole


@given(texts)
def test_lines_with_a_word_are_copied_whole(tmp_path_factory: object, chunks: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("filtered")  # type: ignore[attr-defined]
    file, copy = folder / "all", folder / "some"
    stream = WorkerStream((file,), shown=False, prefix="> ", words=("ab", "bb"), filtered=copy)
    assert asyncio.run(moved(stream, chunks)) == b""
    whole = b"".join(chunks)
    assert file.read_bytes() == whole
    wanted = [line for line in whole.splitlines() if b"ab" in line or b"bb" in line]
    assert copy.read_bytes() == b"".join(b"> " + line + b"\n" for line in wanted)
