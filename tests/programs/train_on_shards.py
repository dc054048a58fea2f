"""Trains on leased shards, and writes a line for each committed batch.

    train_on_shards.py FOLDER SAMPLES SHARD_SIZE

A line of ``FOLDER/seen.NODE`` is: a word, the process id, and samples. The word is ``has`` when the
batch was read, and ``credited`` or ``refused`` after its commit. While ``FOLDER/hold.NODE`` exists,
the worker of that node waits with a batch in hand.
"""

import os
import sys
from pathlib import Path
from threading import Event

from dlrover_py.trainer import session
from dlrover_py.trainer.data import MapSource, ShardLoader


def main() -> None:
    folder, samples, shard_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    node = session.world().node_rank
    loader = ShardLoader(
        "train",
        MapSource(range(samples), shard_size=shard_size),
        epochs=1,
        level="exactly_once_accounting",
        lease_s=3.0,
    )
    loader.keep_ledger(folder / "ledger")
    pause = Event()
    with (folder / f"seen.{node}").open("a", encoding="ascii") as file:
        while not loader.over:
            for batch in loader.batches(5):
                print("has", os.getpid(), *batch, file=file, flush=True)
                while (folder / f"hold.{node}").exists():
                    pause.wait(0.05)
                pause.wait(0.05)
                refused = loader.refused
                loader.commit()
                loader.flush()
                word = "credited" if loader.refused == refused else "refused"
                print(word, os.getpid(), *batch, file=file, flush=True)


if __name__ == "__main__":
    main()
