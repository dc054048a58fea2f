"""Reading a peer's memory: 1 GB from another process's depot, over loopback TCP, beside memcpy.

The slot is in a tmpfs, the target was written to before, and both ways take turns within one run.
``read_into`` brings the bytes; ``checked`` sums them too (XXH3), as a restore does.

``--json FILE`` keeps all samples.
"""

import argparse
import asyncio
import ctypes
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from dlrover_agent.depot import Depot
from dlrover_py import arena
from dlrover_py.arena import Slot
from dlrover_py.depot import Link, dial
from dlrover_py.protocol.checkpoint import Layout, Piece, encode_objects

TOKEN, JOB = "benchmark", "benchmark"


def serve(folder: Path) -> None:
    """The other process: a depot, which says its port and answers until it is ended."""

    async def nothing(*_: int) -> list[object]:
        return []

    async def run() -> None:
        depot = Depot(
            folder,
            JOB,
            TOKEN,
            Path(f"{folder}.socket"),
            candidates=nothing,  # type: ignore[arg-type]
            holders=nothing,  # type: ignore[arg-type]
            bind="127.0.0.1",
        )
        print(depot.port, flush=True)
        await depot.run()

    asyncio.run(run())


def stage(folder: Path, nbytes: int) -> None:
    """One slot with one tensor."""
    layout = Layout([Piece("model.w", "uint8", (nbytes,), (nbytes,), (0,))])
    with Slot(folder / "0.0", write=True) as slot:
        slot.reserve(layout.end + arena.SPARE)
        slot.begin()
        at = layout.positions[0]
        view = slot.view()
        block = os.urandom(1 << 20)
        for start in range(0, nbytes, len(block)):
            view[at + start : at + min(nbytes, start + len(block))] = block[: nbytes - start]
        sums = [arena.digest(view[at : at + nbytes])]
        facts = {"step": 1, "round": 1, "lap": 0, "world": 1, "rank": 0, "part": "p"}
        slot.seal(
            layout.encode(),
            sums,
            encode_objects([]),
            layout.end,
            job=JOB,
            private_at=layout.private_at,
            **facts,
        )
        del view


def measure(nbytes: int, times: int, root: Path) -> dict[str, list[float]]:
    """Seconds of each way, which take turns."""
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="dlrover-benchmark-", dir=root) as name:
        folder = Path(name)
        stage(folder, nbytes)
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            with Slot(folder / "0.0") as slot:
                rounds(slot, port, nbytes, times, samples)
        finally:
            server.kill()
            server.wait()
            Path(f"{folder}.socket").unlink(missing_ok=True)
    return samples


def rounds(slot: Slot, port: int, nbytes: int, times: int, samples: dict[str, list[float]]) -> None:
    target = memoryview(bytearray(nbytes))
    there = ctypes.addressof(ctypes.c_char.from_buffer(target))
    source = memoryview(bytearray(os.urandom(1 << 20)) * (nbytes >> 20))
    here = ctypes.addressof(ctypes.c_char.from_buffer(source))
    peer, worker = dial("127.0.0.1", port, TOKEN), Link.local(f"{slot.path.parent}.socket")
    ((name, summary),) = peer.slots()
    found = peer.contents(name, summary.fill)
    at = found.layout.positions[0]

    def copy() -> None:
        ctypes.memmove(there, here, nbytes)

    def checked(link: Link) -> None:
        step = 1 << 24
        sums = arena.xxhash.xxh3_64()
        wanted = [(at + start, target[start : start + step]) for start in range(0, nbytes, step)]
        for part in link.read_all(name, summary.fill, wanted):
            sums.update(part)
        assert sums.intdigest() == found.digests[0]

    ways = {
        "memcpy": copy,
        "memcpy and XXH3": lambda: arena.copy_summed(here, target) and None,
        "read_into, TCP": lambda: peer.read_into(name, summary.fill, at, target),
        "checked, TCP": lambda: checked(peer),
        "read_into, unix": lambda: worker.read_into(name, summary.fill, at, target),
    }
    for turn in range(times + 1):
        for way, do in ways.items():
            began = time.perf_counter()
            do()
            if turn:  # the first one warms up
                samples.setdefault(way, []).append(time.perf_counter() - began)
    peer.close()
    worker.close()


def table(samples: dict[str, list[float]], nbytes: int) -> str:
    base = statistics.median(samples["memcpy"])
    lines = ["| way | median | min / max | GB/s | of memcpy |", "|---|---|---|---|---|"]
    for way, all_s in samples.items():
        middle = statistics.median(all_s)
        lines.append(
            f"| {way} | {middle:.3f} s | {min(all_s):.3f} / {max(all_s):.3f} s "
            f"| {nbytes / middle / 1e9:.2f} | {middle / base:.2f}x |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1024, help="of one read (MiB)")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--root", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended too
    nbytes = args.mb << 20
    samples = measure(nbytes, args.times, args.root)
    print(
        f"`python benchmarks/depot.py {' '.join(sys.argv[1:])}`  \n"
        f"{os.cpu_count()} cores shared with other work, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}\n"
    )
    print(table(samples, nbytes))
    if args.json:
        args.json.write_text(json.dumps({"nbytes": nbytes, "seconds": samples}))


if __name__ == "__main__":
    main()
