"""A stream with real processes: each line counts once, whoever dies while it grows."""

import os
import signal
from pathlib import Path

from dlrover_py.protocol.status import JobStatus
from dlrover_py.trainer.data.verify_shards import verify
from tests.process.harness import CALM, Job, Place, job
from tests.process.test_dynamic_shards import worker_of
from tests.programs import PROGRAMS

SCRIPT = PROGRAMS / "train_on_shards_together.py"


def append(path: Path, first: int, stop: int) -> None:
    with path.open("a") as file:
        file.writelines(f"{number}\n" for number in range(first, stop))


def until_trained(run: Job, units: int) -> JobStatus:
    """Wait until the watermarks of all partitions together have reached a number of units."""

    def reached(status: JobStatus) -> bool:
        trained = sum(one.watermark for each in status.data.streams for one in each.partitions)
        return trained >= units

    return run.until(reached, f"{units} units below the watermarks")


def test_a_worker_and_the_master_die_while_a_stream_grows(place: Place) -> None:
    folder = place.folder / "in"
    folder.mkdir()
    first, second = folder / "first.jsonl", folder / "second.jsonl"
    append(first, 0, 30)
    args = (str(place.folder), "90")
    with job(place, script=SCRIPT, args=args, settings=CALM, replicas=2) as run:
        until_trained(run, 20)
        append(second, 30, 50)
        os.kill(worker_of(run.running(2), 1), signal.SIGKILL)
        run.running(2, round_after=1)
        append(first, 50, 60)
        until_trained(run, first.stat().st_size + second.stat().st_size)
        os.kill(run.snapshot().master_pid, signal.SIGKILL)
        append(folder / "third.jsonl", 60, 90)
        status = until_trained(run, sum(path.stat().st_size for path in folder.iterdir()))
        (found,) = status.data.streams
        assert (found.lag, found.partition_count, found.ended) == (0, 3, False)
        (folder / "_END").touch()
        assert run.wait() == 0, "".join(run.output)
    assert set((place.folder / "counts").read_text().split()) == {"1"}
    report = verify(place.folder)
    assert (report.exact, report.problems) == (True, [])
    proven = {each.partition: each.samples for each in report.epochs if each.finished}
    assert proven == {path.name: path.stat().st_size for path in folder.glob("*.jsonl")}
