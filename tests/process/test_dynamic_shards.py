"""Dynamic shards with real processes: each sample counts once, whoever dies or stands still."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dlrover_py.protocol.names import JOURNAL_FILE
from dlrover_py.protocol.status import JobStatus
from dlrover_py.trainer.data.verify_shards import verify
from tests.process.harness import CALM, Job, Place, eventually, job
from tests.programs import PROGRAMS

SCRIPT = PROGRAMS / "train_on_shards.py"
TOGETHER = PROGRAMS / "train_on_shards_together.py"
SAMPLES = 400

Line = tuple[str, int, list[int]]
"""A word, a process id, and samples."""


def seen(folder: Path, node: int) -> list[Line]:
    """Return what the workers of a node have written so far."""
    path = folder / f"seen.{node}"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        word, pid, *samples = line.split()
        found.append((word, int(pid), [int(one) for one in samples]))
    return found


def worker_of(status: JobStatus, node_rank: int) -> int:
    """Return the process id of the worker of a node."""
    (found,) = [node.pids[0] for node in status.nodes if node.node_rank == node_rank]
    return found


def until_held(folder: Path, run: Job, round_after: int) -> tuple[int, list[int]]:
    """Wait until both workers of a later round have a batch; return that of rank 1's worker."""
    status = run.running(2, round_after=round_after)
    pids = [worker_of(status, rank) for rank in (0, 1)]

    def held() -> list[list[int]] | None:
        batches = [
            [samples for word, pid, samples in seen(folder, rank) if (word, pid) == ("has", mine)]
            for rank, mine in enumerate(pids)
        ]
        return [batch[0] for batch in batches] if all(batches) else None

    return pids[1], eventually(held, "a batch in both workers")[1]


def trained(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield each batch that the lines of a ledger have: the index of its line, and its samples."""
    for at, line in enumerate(lines):
        if line.startswith('["trained"'):
            _, parts = json.loads(line)
            yield at, sum(stop - start for *_, start, stop in parts)


def check_ledger(folder: Path, epochs: int, samples: int) -> None:
    """Check that the ledger proves all epochs, and that it finds a planted loss and double."""
    report = verify(folder)
    assert (report.exact, report.problems) == (True, []), report
    assert [(e.finished, e.samples) for e in report.epochs] == [(True, samples)] * epochs
    newest = max((folder / "ledger").glob("*-00000.shards"))
    lines = newest.read_text().splitlines()
    # A worker trains empty batches with the others while no shard is left for it.
    at, size = next((at, size) for at, size in trained(lines) if size)
    newest.write_text("\n".join([*lines[:at], *lines[at + 1 :]]) + "\n")
    assert sum(epoch.missing for epoch in verify(folder).epochs) == size
    newest.write_text("\n".join([*lines[: at + 1], *lines[at:]]) + "\n")
    assert sum(epoch.repeated for epoch in verify(folder).epochs) == size
    assert not verify(folder).exact


def test_a_dead_holder_a_zombie_and_a_new_master(place: Place) -> None:
    folder = place.folder
    holds = [folder / f"hold.{rank}" for rank in (0, 1)]
    for hold in holds:
        hold.touch()
    with job(
        place, script=SCRIPT, args=(str(folder), str(SAMPLES), "10"), settings=CALM, replicas=2
    ) as run:
        killed, _ = until_held(folder, run, 0)
        os.kill(killed, signal.SIGKILL)
        zombie, held = until_held(folder, run, 1)
        os.kill(zombie, signal.SIGSTOP)
        for hold in holds:
            hold.unlink()
        eventually(lambda: sum(word == "credited" for word, _, _ in seen(folder, 0)) > 3, "credits")
        os.kill(run.snapshot().master_pid, signal.SIGKILL)
        eventually(
            lambda: any(
                word == "credited" and set(held) & set(samples)
                for word, _, samples in seen(folder, 0)
            ),
            "the zombie's samples in the other worker",
        )
        os.kill(zombie, signal.SIGCONT)
        assert run.wait() == 0, "".join(run.output)
    lines = [line for rank in (0, 1) for line in seen(folder, rank)]
    assert ("refused", zombie, held) in lines
    credited = Counter(one for word, _, samples in lines for one in samples if word == "credited")
    assert credited == Counter(range(SAMPLES))
    (journal,) = (folder / "state").glob(f"*/{JOURNAL_FILE}")
    record = json.loads(journal.read_text())["shards"]["train"]
    assert (record["epoch"], record["quarantined"]) == (1, {})
    check_ledger(folder, 1, SAMPLES)


def test_model_and_ledger_go_back_together(place: Place) -> None:
    """Two workers in step are killed in each epoch, after the newest checkpoint; and a master."""
    args = (str(place.folder), "90", "2")
    with job(place, script=TOGETHER, args=args, settings=CALM, replicas=2) as run:
        for number, step in enumerate((5, 21), start=1):

            def reached(status: JobStatus, step: int = step) -> bool:
                return status.progress is not None and status.progress.step >= step

            run.until(reached, f"step {step}")
            status = run.running(2, round_after=number - 1)
            report = verify(place.folder)
            assert report.exact, report  # while it runs
            os.kill(worker_of(status, number % 2), signal.SIGKILL)
            if number == 1:
                os.kill(run.snapshot().master_pid, signal.SIGKILL)
        assert run.wait() == 0, "".join(run.output)
    assert set((place.folder / "counts").read_text().split()) == {"2"}
    check_ledger(place.folder, 2, 90)
