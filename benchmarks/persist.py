"""Persisting: a staged checkpoint to storage, against ``dd conv=fsync`` and ``dcp.save``.

One process that trains has staged so many bytes; the persister (started before, as agents do)
writes them as torch DCP's files and commits. ``dd`` writes the same bytes out of the same shared
memory. All take turns within one run, into fresh files of one folder. The figure is from the order
to the answer that says that the checkpoint exists, synced to the disk.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrover_py.protocol.checkpoint import Phase
from tests.slots import Persister, full, order, stage

DCP = """
import sys, time, warnings, os, torch, torch.distributed.checkpoint as dcp
warnings.simplefilter("ignore")
n, count, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
state = {f"model.{i}": torch.full((n // count // 4,), float(i)) for i in range(count)}
for line in sys.stdin:
    began = time.monotonic()
    dcp.save(state, checkpoint_id=f"{where}/{line.strip()}", no_dist=True)
    print(time.monotonic() - began, flush=True)
"""


def _dd(arena: Path, folder: Path, index: int) -> tuple[str, float]:
    raw = folder / f"dd.{index}"
    command = ["dd", f"if={arena / '0.0'}", f"of={raw}", "bs=16M", "conv=fsync"]
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    took = time.monotonic() - began
    raw.unlink()
    return "dd", took


def _ours(persister: Persister, arena: Path, folder: Path, index: int) -> tuple[str, float]:
    began = time.monotonic()
    persister.send(order(arena, folder / "ours", f"a{index}", deadline_s=300.0))
    answer = persister.end(f"a{index}", timeout=300)
    took = time.monotonic() - began
    assert answer.phase is Phase.DONE, answer
    shutil.rmtree(folder / "ours")
    return "persister", took


def _dcp(theirs: "subprocess.Popen[str]", folder: Path, index: int) -> tuple[str, float]:
    assert theirs.stdin is not None
    assert theirs.stdout is not None
    theirs.stdin.write(f"{index}\n")
    theirs.stdin.flush()
    took = float(theirs.stdout.readline())
    shutil.rmtree(folder / "dcp")
    return "dcp.save", took


def measure(
    folder: Path, shm: Path, *, nbytes: int, tensors: int, times: int
) -> dict[str, list[float]]:
    """Seconds of each, in turn.

    Args:
        folder: where checkpoints go.
        shm: a folder in a tmpfs, for the slot.
        nbytes: of the state.
        tensors: how many it has.
        times: how often.
    """
    size = nbytes // tensors // 4
    pieces = [full(f"model.{index}", (size,)) for index in range(tensors)]
    state = [(piece, os.urandom(4096) * (size // 1024)) for piece in pieces]
    arena = shm / "arena"
    stage(arena / "0.0", state)
    del state
    took: dict[str, list[float]] = {"dd": [], "persister": [], "dcp.save": []}
    persister = Persister()
    theirs = subprocess.Popen(
        [sys.executable, "-c", DCP, str(nbytes), str(tensors), str(folder / "dcp")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        for index in range(times + 1):  # the first one of each warms up
            turns = [partial(_dd, arena, folder), partial(_ours, persister, arena, folder)]
            turns.append(partial(_dcp, theirs, folder))
            for turn in turns[index % 3 :] + turns[: index % 3]:  # a disk is not always as fast
                name, seconds = turn(index)
                took[name].append(seconds)
    finally:
        persister.close()
        assert theirs.stdin is not None
        theirs.stdin.close()
        theirs.wait(60)
    return {name: values[1:] for name, values in took.items()}


def rows(took: dict[str, list[float]], nbytes: int) -> list[str]:
    """The table of the section ``checkpoint_persist``."""
    best = statistics.median(took["dd"])
    lines = ["| what | median | min…max | MB/s | against dd |", "|---|---|---|---|---|"]
    words = {"dd": "`dd conv=fsync`", "persister": "persister", "dcp.save": "`dcp.save`, blocking"}
    for name, values in took.items():
        middle = statistics.median(values)
        lines.append(
            f"| {words[name]} | {middle:.2f} s | {min(values):.2f}…{max(values):.2f} s | "
            f"{nbytes / 1e6 / middle:,.0f} | {middle / best:.2f}× |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=256)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--json", type=Path, help="Keep all samples.")
    wish = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=wish.dir))
    shm = Path(tempfile.mkdtemp(dir=wish.shm))
    try:
        nbytes = wish.mb << 20
        took = measure(folder, shm, nbytes=nbytes, tensors=wish.tensors, times=wish.times)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(shm)
    if wish.json:
        wish.json.write_text(json.dumps(took))
    print("\n".join(rows(took, nbytes)))


if __name__ == "__main__":
    main()
