"""Measures the lease queue of dynamic shards: leases per second, memory, record, uneven workers.

    python benchmarks/shards.py            # a table
    python benchmarks/shards.py --quick    # in a few seconds
    python benchmarks/shards.py --json     # rows as JSON
    python benchmarks/shards.py --write    # puts the table into docs/benchmarks.md

The queue runs in this process. Its record is written as often as a master would write its journal:
once for each ``REQUESTS_PER_WRITE`` requests. As the master does on one machine, it replaces a file
and does not sync it. Leases per second are those of a second of the processor, with all that this
process and the system compute for them. Memory is what Python's allocator has for the queue.
Uneven workers are simulated: the clock of the simulation jumps from event to event, and the queue
cannot see the difference.
"""

import argparse
import gc
import heapq
import json
import os
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from benchmarks.page import measured_with, write_section
from dlrover_py.protocol.shards import (
    Credit,
    DatasetSpec,
    Level,
    ShardAnswer,
    ShardRequest,
    read_shard_request,
)
from dlrover_py.shards.queue import MAX_OPEN, ShardQueue
from dlrover_py.shards.records import QueueRecord

RECORD = TypeAdapter(QueueRecord)
REQUESTS_PER_WRITE = 16
"""Requests that share a write. Busy workers send many while one write is under way."""
Row = dict[str, Any]


def row(what: str, target: str, ours: float | str, met: bool, n: int, note: str = "") -> Row:
    """Return one row of the table."""
    return {
        "what": what, "target": target, "ours": ours, "peers": "–", "met": met, "n": n, "note": note
    }  # fmt: skip


def request(worker: int, seq: int, answer: ShardAnswer | None, want: int) -> bytes:
    """Return the request of a worker that has finished all that it holds."""
    leases = answer.leases if answer is not None else []
    credits = [Credit(token=one.token, ranges=one.todo) for one in leases]
    asked = ShardRequest(dataset="d", round=1, local_rank=0, seq=seq, credits=credits, want=want)
    return asked.model_dump_json().encode()


def leases_per_second(spec: DatasetSpec, workers: int, total: int) -> tuple[float, int]:
    """Return leases per second of one core, with decoding and journal, and the record's bytes.

    Args:
        spec: The dataset. A stream has 1,000 partitions that do not grow.
        workers: Number of workers.
        total: Number of leases to count.
    """
    queue = ShardQueue(QueueRecord(spec=spec))
    if spec.range_size is not None:
        ends = {f"part-{number:05}.jsonl": 10**12 for number in range(1000)}
        first = ShardRequest(dataset="d", round=1, local_rank=0, seq=1, ends=ends)
        queue.take("source", first, 0.0)
    answers: list[ShardAnswer | None] = [None] * workers
    spent, count, largest, turn = 0.0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        while count < total:
            worker = turn % workers
            body = request(worker, turn // workers + 1, answers[worker], 4)
            began = time.process_time()
            answer = queue.take(f"n{worker}/0", read_shard_request(body), float(turn))
            if turn % REQUESTS_PER_WRITE == 0:
                largest = max(largest, written(queue.record, Path(folder)))
            answer.model_dump_json()
            spent += time.process_time() - began
            answers[worker] = answer
            count += len(answer.leases)
            turn += 1
    return count / spent, largest


def written(record: QueueRecord, folder: Path) -> int:
    """Replace the file with the record, and return its size."""
    draft = folder / "draft"
    size = draft.write_bytes(RECORD.dump_json(record))
    draft.replace(folder / "journal")
    return size


def memory_of(shards: int) -> float:
    """Return the megabytes of a queue with as many open leases as it allows."""
    gc.collect()
    tracemalloc.start()
    queue = ShardQueue(QueueRecord(spec=DatasetSpec(sizes=[(shards, 4096)], seed=3)))
    for number in range(MAX_OPEN):
        asked = ShardRequest(dataset="d", round=1, local_rank=0, seq=1, want=1)
        queue.take(f"n{number}/0", asked, 0.0)
    found, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return found / 2**20


def uneven(shards: int, speeds: list[float]) -> tuple[float, list[int]]:
    """Return the time of an epoch over the ideal time, and the shards that each worker took.

    Args:
        shards: Number of shards.
        speeds: Shards per second of each worker.
    """
    spec = DatasetSpec(sizes=[(shards, 100)], seed=3, epochs=1, level=Level.EXACTLY_ONCE_ACCOUNTING)
    queue = ShardQueue(QueueRecord(spec=spec))
    answers: list[ShardAnswer | None] = [None] * len(speeds)
    took, seqs = [0] * len(speeds), [0] * len(speeds)
    events = [(0.0, worker) for worker in range(len(speeds))]
    now = 0.0
    while not queue.over:
        now, worker = heapq.heappop(events)
        seqs[worker] += 1
        held = answers[worker]
        credits = []
        if held is not None and held.leases:
            credits = [Credit(token=held.leases[0].token, ranges=held.leases[0].todo)]
            took[worker] += 1
        asked = ShardRequest(
            dataset="d", round=1, local_rank=0, seq=seqs[worker], credits=credits, want=2
        )
        answer = answers[worker] = queue.take(f"n{worker}/0", asked, now)
        after = 1 / speeds[worker] if answer.leases else answer.retry_s
        heapq.heappush(events, (now + after, worker))
    return now / (shards / sum(speeds)), took


def measure(quick: bool) -> list[Row]:
    """Return all rows."""
    total = 5_000 if quick else 100_000
    million = DatasetSpec(sizes=[(1_000_000, 4096)], seed=3)
    rate, small = leases_per_second(million, 32, total)
    many, largest = leases_per_second(million, 1024, total)
    streamed, of_stream = leases_per_second(DatasetSpec(range_size=1 << 20), 32, total)
    megabytes = memory_of(1_000_000)
    shards = 200 if quick else 2000
    ratio, took = uneven(shards, [1.0, 1.0, 1.0, 0.2])
    share = took[3] / sum(took) / (0.2 / 3.2)
    return [
        row("leases per second, 32 workers", "≥5,000", round(rate), rate >= 5000, total,
            f"one core, with decoding, and a written record of {small / 1000:.1f} kB per "
            f"{REQUESTS_PER_WRITE} requests"),
        row("leases per second, 1,024 workers", "≥5,000", round(many), many >= 5000, total,
            f"as above; record of {largest / 1000:.1f} kB"),
        row("leases per second, stream of 1,000 partitions", "≥5,000", round(streamed),
            streamed >= 5000, total, f"32 workers; record of {of_stream / 1000:.1f} kB"),
        row("memory of 1 M shards, MB", "≤64", round(megabytes, 2), megabytes <= 64, 1,
            f"{MAX_OPEN:,} of them leased"),
        row("record of 1 M shards, kB", "≤64", round(largest / 1000, 1), largest <= 64_000, 1),
        row("epoch over ideal, one of 4 workers 5× slower", "≤1.3", round(ratio, 3),
            ratio <= 1.3, shards, "simulated clock"),
        row("shards of the slow worker over its share", "0.8–1.2", round(share, 2),
            0.8 <= share <= 1.2, shards, "simulated clock"),
    ]  # fmt: skip


def table(rows: list[Row]) -> list[str]:
    """Return the rows as a table of Markdown."""
    lines = ["| what | target | ours | n | note |", "|---|---|---|---|---|"]
    for one in rows:
        target = f"{one['target']}, {'met' if one['met'] else '**missed**'}"
        lines.append(
            f"| {one['what']} | {target} | {one['ours']:,} | {one['n']:,} | {one['note']} |"
        )
    return lines


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer leases: a few seconds")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into docs")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measure(given.quick)
    if given.write:
        write_section("shards", "\n".join([measured_with(load), "", *table(rows)]))
    if given.json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    for one in rows:
        mark = "met" if one["met"] else "missed"
        print(f"{one['what']:46} {one['ours']:>9} (target {one['target']}: {mark}) {one['note']}")


if __name__ == "__main__":
    main()
