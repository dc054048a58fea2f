"""Several workers train in step on leased shards; the model counts how often it saw each sample.

train_on_shards_together.py FOLDER SAMPLES [EPOCHS]

The samples are the numbers below ``SAMPLES``. Without ``EPOCHS`` they come as a stream:
``FOLDER/in``, where each line is a number. At the end the counts are written to ``FOLDER/counts``.
There is a ledger in ``FOLDER/ledger``.
"""

import sys
from pathlib import Path
from threading import Event

import torch
import torch.distributed as dist

from dlrover_py.trainer import Checkpointer, session
from dlrover_py.trainer.data import LineStream, MapSource, ShardLoader


def main() -> None:
    folder, samples = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    model = torch.zeros(samples, dtype=torch.int64)
    steps = torch.zeros(1, dtype=torch.int64)
    if len(sys.argv) > 3:
        source = MapSource(range(samples), shard_size=7)
        loader = ShardLoader("train", source, epochs=int(sys.argv[3]), seed=1)
    else:
        loader = ShardLoader("train", LineStream(folder / "in", parse=int, range_bytes=16))
    loader.keep_ledger(folder / "ledger")
    state = {"model": model, "steps": steps, "data": loader}
    checkpointer = Checkpointer()
    checkpointer.load(state)
    pause = Event()
    while not loader.over:
        for batch in loader.batches(3):
            update = torch.bincount(torch.tensor(batch, dtype=torch.int64), minlength=samples)
            dist.all_reduce(update)
            model += update
            steps += 1
            loader.commit()
            if int(steps) % 3 == 0:
                checkpointer.save(int(steps), state)
            session.report_step(int(steps))
            pause.wait(0.03)
    checkpointer.close()
    if dist.get_rank() == 0:
        (folder / "counts").write_text(" ".join(map(str, model.tolist())), encoding="ascii")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
