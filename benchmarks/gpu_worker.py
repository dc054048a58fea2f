"""The script that benchmarks/gpu.py kills: DDP on a device.

Each process writes one line of JSON after its first step: when each phase of its start was over, by
``time.monotonic()``. Usage: gpu_worker.py FOLDER DEVICE WIDTH.
"""

import time

BEGAN = time.monotonic()

import json  # noqa: E402 - the time before all imports is wanted
import os  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dlrover_py.trainer import Checkpointer  # noqa: E402


def main() -> None:
    """Train without an end."""
    folder, kind, width = sys.argv[1], sys.argv[2], int(sys.argv[3])
    cuda = kind == "cuda"
    over = {"script": BEGAN, "imports": time.monotonic()}

    def done(phase: str) -> None:
        """Note the end of a phase, once the device has done its work."""
        if cuda:
            torch.cuda.synchronize()
        over[phase] = time.monotonic()

    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.zeros(1, device=kind)
    done("context")

    dist.init_process_group("nccl" if cuda else "gloo")
    dist.all_reduce(torch.ones(1, device=kind))
    done("collectives")

    layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)]
    model = torch.nn.Sequential(*layers).to(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    checkpointer = Checkpointer(every=1)
    step = checkpointer.load(state) or 0
    ddp = DistributedDataParallel(model)
    done("load")

    while True:
        ddp(torch.randn(32, width, device=kind)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if "step" not in over:
            done("step")
            line = {"pid": os.getpid(), "step": step, "world": dist.get_world_size(), "over": over}
            with open(f"{folder}/{dist.get_rank()}", "a") as file:
                file.write(json.dumps(line) + "\n")
        checkpointer.save(step, state)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
