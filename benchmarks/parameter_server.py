"""Measures the parameter server: rows per second, copies, kills, cuts and uneven loads.

    python benchmarks/parameter_server.py            # a table
    python benchmarks/parameter_server.py --quick    # fewer repetitions
    python benchmarks/parameter_server.py --json     # rows as JSON

The store runs in this process, on one core. The other numbers are of real servers with one worker,
over the loopback device: servers and worker share this machine's cores.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from dlrover_py.ps import specs
from dlrover_py.ps.client import PsClient, connect
from dlrover_py.ps.cluster_map import ClusterMap
from dlrover_py.ps.codecs import decode, encode
from dlrover_py.ps.cuts import CutDirectory
from dlrover_py.ps.hashing import bucket_of, salt_of
from dlrover_py.ps.local import LocalServers
from dlrover_py.ps.planner import Planner, PlanRules, foresee
from dlrover_py.ps.specs import Formats, RowFormat, TableSpec
from dlrover_py.ps.spread import unevenness_of
from dlrover_py.ps.store import Store, Table

DIM = 64
TABLE = TableSpec("t", DIM, specs.adagrad(0.01), specs.uniform(-0.1, 0.1))
ROWS = 400_000
BATCH = 20_000
Row = dict[str, Any]


def row(what: str, target: str, ours: str, met: bool | None, n: int, note: str = "") -> Row:
    """Return one row of the table."""
    return {
        "what": what, "target": target, "ours": ours, "peers": "–", "met": met, "n": n, "note": note
    }  # fmt: skip


def batches() -> tuple[list[Any], Any]:
    """Return batches of distinct ids in random order, and gradients for one of them."""
    random = np.random.default_rng(0)
    ids = random.permutation(ROWS).astype(np.int64) * 77
    return np.split(ids, ROWS // BATCH), random.normal(size=(BATCH, DIM)).astype(np.float32)


def store_rate(times: int) -> float:
    """Return millions of rows per second that one core pulls and pushes with Adagrad."""
    table, (parts, grads) = Table(TABLE), batches()
    for ids in parts:
        table.apply(ids, grads)
    rates = []
    for _ in range(times):
        start = time.perf_counter()
        for ids in parts:
            table.read(ids)
            table.apply(ids, grads)
        rates.append(ROWS / (time.perf_counter() - start) / 1e6)
    return statistics.median(rates)


def push_rate(replicas: int, times: int, formats: Formats | None = None) -> float:
    """Return thousands of rows per second of one worker's pushes and pulls, with two servers.

    Args:
        replicas: Copies of each row.
        times: Number of measurements; the result is their median.
        formats: Formats of rows and gradients in messages.
    """
    parts, grads = batches()
    rules = PlanRules(replicas=replicas)
    rates = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServers(Path(folder), 2, rules=rules) as servers,
        connect(servers.access) as client,
    ):
        client.create(TABLE, formats)
        for ids in parts:
            client.push({"t": (ids, grads)}).result()
        for _ in range(times):
            start = time.perf_counter()
            for ids in parts:
                client.pull({"t": ids}).result()
                client.push({"t": (ids, grads)}).result()
            rates.append(ROWS / (time.perf_counter() - start) / 1e3)
    return statistics.median(rates)


def evened(buckets: int, servers: int = 8) -> tuple[float, float, int]:
    """Even servers under the traffic of Zipf(1.1) on a million ids, each request counted.

    Returns:
        The load of the busiest server as a multiple of the mean, before and after, and the number
        of buckets that were copied.
    """
    ids = 1_000_000
    chances = 1 / np.arange(1, ids + 1, dtype=np.float64) ** 1.1
    found = bucket_of(np.arange(ids, dtype=np.int64), salt_of("user"), buckets)
    shares = np.bincount(found, chances / chances.sum(), buckets)
    weights = [max(1, round(1000 * buckets * share)) for share in shares]
    rules = PlanRules(buckets=buckets, servers=servers)
    plan = Planner(ClusterMap("j"), rules, 0.0)
    for index in range(servers):
        plan.heard(f"ps{index}", "", 0.0)
    later = foresee(plan.map, rules, weights)
    copied = sum(
        set(old.members) != set(new.members)
        for old, new in zip(plan.map.placements, later.placements, strict=True)
    )
    before, after = (unevenness_of(known, shares.tolist()) for known in (plan.map, later))
    return before, after, copied


def counting_rate(times: int) -> float:
    """Return millions of rows per second of which one core counts the buckets."""
    store, (parts, _) = Store(1024), batches()
    store.add([TABLE])
    rates = []
    for _ in range(times):
        start = time.thread_time()
        for ids in parts:
            store.bucket_counts([("t", [ids])])
        rates.append(ROWS / (time.thread_time() - start) / 1e6)
    return statistics.median(rates)


def codec_rate(format: RowFormat, times: int) -> float:
    """Return millions of rows per second of processor time that are encoded and decoded."""
    _, grads = batches()
    rates = []
    for seed in range(times):
        start = time.thread_time()
        decode(encode(grads, format, seed))
        rates.append(BATCH / (time.thread_time() - start) / 1e6)
    return statistics.median(rates)


def bytes_of(format: RowFormat) -> int:
    """Return the bytes of a row in a message, without its id."""
    return sum(array.nbytes for array in encode(np.zeros((1, DIM), np.float32), format))


def pushing(client: PsClient, over: threading.Event, ends: list[float]) -> None:
    """Push small batches until told to end; note when each push was acknowledged."""
    ids = np.arange(2000, dtype=np.int64)
    grads = np.ones((2000, DIM), np.float32)
    while not over.is_set():
        client.push({"t": (ids, grads)}).result()
        ends.append(time.monotonic())


def disturbed(times: int) -> tuple[float, float, float]:
    """Kill servers, then grow and shrink, under load.

    Returns:
        Longest wait for a push: after a kill (median), while 2 servers become 4 and then 3, and
        without a disturbance. Seconds.
    """

    def longest(start: float) -> float:
        later = [start, *(end for end in ends if end > start)]
        return max((b - a for a, b in itertools.pairwise(later)), default=0.0)

    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServers(Path(folder), 3) as servers,
        connect(servers.access) as client,
    ):
        client.create(TABLE)
        over, ends = threading.Event(), list[float]()
        thread = threading.Thread(target=pushing, args=(client, over, ends))
        thread.start()
        pause = threading.Event()
        pause.wait(2)
        start = time.monotonic()
        pause.wait(2)
        calm = longest(start)
        kills = []
        for _ in range(times):
            servers.wait_whole()
            pause.wait(0.5)
            start = time.monotonic()
            os.kill(servers.pids[servers.map.placements[0].primary], signal.SIGKILL)
            pause.wait(2)
            kills.append(longest(start))
        servers.wait_whole()
        servers.resize(2)
        servers.wait_whole()
        start = time.monotonic()
        for size in (4, 3):
            servers.resize(size)
            servers.wait_whole()
        moves = longest(start)
        over.set()
        thread.join()
    return statistics.median(kills), moves, calm


def cut_time(times: int, rows: int = 2_000_000) -> tuple[float, float]:
    """Return how long pushes wait for a cut, and the longest one, in seconds: of two servers.

    Args:
        times: Number of cuts; the first result is their median.
        rows: Rows of the table, with one copy.
    """
    grads = np.ones((BATCH, DIM), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        cuts = CutDirectory(str(Path(folder) / "cuts"))
        with (
            LocalServers(Path(folder), 2, rules=PlanRules(replicas=1), cuts=cuts) as servers,
            connect(servers.access) as client,
        ):
            client.create(TABLE)
            for start in range(0, rows, BATCH):
                client.push({"t": (np.arange(start, start + BATCH), grads)}).result()
            waits = []
            for step in range(times):
                start_s = time.monotonic()
                client.save(step + 1, 1)
                waits.append(time.monotonic() - start_s)
    return statistics.median(waits), max(waits)


def evenness_row(buckets: int) -> Row:
    """Return the row about uneven loads with a number of buckets."""
    before, after, copied = evened(buckets)
    return row(
        f"Zipf(1.1), 8 servers, {buckets} buckets: busiest server / mean", "≤ 1.10",
        f"{after:.2f}", after <= 1.10, 1,
        f"{before:.2f} by hash alone; {copied} buckets are copied",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    given = parser.parse_args()
    times = 3 if given.quick else 9
    rate = store_rate(times)
    single, double = push_rate(1, times), push_rate(2, times)
    small = push_rate(2, times, specs.formats(pull="fp16", push="int8"))
    killed, moved, calm = disturbed(times)
    saved, longest = cut_time(times)
    share = double / single
    rows = [
        row("pull and Adagrad push of distinct rows, dim 64, one core", "≥ 0.7 M rows/s",
            f"{rate:.2f} M rows/s", rate >= 0.7, times, "the store alone"),
        row("the same through 2 servers, 1 copy", "–", f"{single:.0f} k rows/s", None, times),
        row("the same, 2 copies", "≥ 0.6 of 1 copy", f"{double:.0f} k rows/s ({share:.2f})",
            share >= 0.6, times),
        row("the same, 2 copies, rows as fp16 and gradients as int8", "–",
            f"{small:.0f} k rows/s", None, times,
            f"{bytes_of(RowFormat.FP16) + bytes_of(RowFormat.INT8)} instead of "
            f"{2 * bytes_of(RowFormat.FP32)} bytes for a row and its gradient"),
        *(row(f"to {one} and back, one core", "–", f"{codec_rate(one, 9 * times):.1f} M rows/s",
              None, 9 * times, f"{bytes_of(one)} bytes a row")
          for one in (RowFormat.FP16, RowFormat.BF16, RowFormat.INT8)),
        *(evenness_row(buckets) for buckets in (64, 256, 1024)),
        row("counting the rows of each bucket, one core", "–",
            f"{counting_rate(9 * times):.0f} M rows/s", None, 9 * times, "for each request"),
        row("kill -9 of a server under load: longest wait for a push", "≤ 0.5 s",
            f"{killed:.2f} s", killed <= 0.5, times),
        row("2 → 4 → 3 servers under load: longest wait for a push", "–", f"{moved:.2f} s", None, 1,
            f"{calm:.2f} s without"),
        row("a cut of 2 million rows, 2 servers, local disk: pushes wait", "–", f"{saved:.1f} s",
            None, times, f"{longest:.1f} s at most; 1.1 GB"),
    ]  # fmt: skip
    if given.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for one in rows:
        print(
            f"{one['what']}: {one['ours']} (target {one['target']}; n = {one['n']}) {one['note']}"
        )


if __name__ == "__main__":
    main()
