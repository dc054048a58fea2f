"""Classify handwritten digits with DistributedDataParallel: a plain torchrun script.

The script does not use DLRover. It saves and resumes its own checkpoint. It reads each sample once
per epoch, in the same order at any world size. It can therefore continue wherever its workers are
restarted.
"""

import argparse
import os
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SEED = 1
SAVE_EVERY = 20
"""Steps between two checkpoints. A restart repeats less than two epochs."""


def main() -> None:
    """Train the model, and print its accuracy on held-out samples."""
    args = parse_args()
    device = start()
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs, labels, test_inputs, test_labels = (part.to(device) for part in load())

    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step, epoch, offset = resume(args.ckpt, model, optimizer)
    ddp = DistributedDataParallel(model)

    while epoch < args.epochs:
        order = epoch_order(epoch, len(inputs))
        while offset < len(inputs):
            # The batch is the same for any world size. Each rank takes every world-th sample.
            batch = order[offset : offset + args.batch]
            mine = batch[rank::world].to(device)
            # DDP divides the sum of the gradients by the world size, so this is the mean of the
            # batch. It is correct even if the ranks have different numbers of samples (in the last
            # batch of an epoch, or if a rank has none).
            loss = cross_entropy(ddp(inputs[mine]), labels[mine], reduction="sum")
            loss = loss * world / len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(args.step_delay)
            step += 1
            offset += len(batch)
            if step % SAVE_EVERY == 0:
                save(args.ckpt, model, optimizer, (step, epoch, offset))
        epoch, offset = epoch + 1, 0
        if rank == 0 and epoch % 5 == 0:
            print(f"epoch {epoch} of {args.epochs}, step {step}", flush=True)
    save(args.ckpt, model, optimizer, (step, epoch, offset))
    if rank == 0:
        with torch.no_grad():
            right = model(test_inputs).argmax(dim=1) == test_labels
        print(f"accuracy {right.float().mean().item():.2f}", flush=True)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=96, help="samples in a step, of all workers")
    parser.add_argument(
        "--ckpt", type=Path, default=Path("ckpt"), help="folder: of each node, or of all"
    )
    parser.add_argument(
        "--step-delay", type=float, default=0.0, help="seconds, to have time to look"
    )
    return parser.parse_args()


def start() -> torch.device:
    """Join the process group: NCCL if each worker of this node has its own GPU, else gloo."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
        return torch.device("cuda", local_rank)
    dist.init_process_group("gloo")
    return torch.device("cpu")


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,437 samples for training and 360 for the test, which takes every fifth sample."""
    digits = load_digits()
    inputs = torch.from_numpy(digits.data.astype(np.float32) / 16)
    labels = torch.from_numpy(digits.target)
    test = torch.arange(len(inputs)) % 5 == 0
    return inputs[~test], labels[~test], inputs[test], labels[test]


def epoch_order(epoch: int, samples: int) -> Tensor:
    """Return a shuffled order of the samples that depends on the epoch, not on the world size."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch))


def resume(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, int, int]:
    """Load the newest checkpoint, if there is one, and return (step, epoch, offset in the epoch).

    The rank with the newest checkpoint sends it to all ranks. The folder may be local to each node,
    and a node that joined later has no checkpoint.
    """
    path = folder / "checkpoint.pt"
    if int(os.environ["LOCAL_RANK"]) == 0:
        for draft in folder.glob("*.tmp"):  # left by a writer that was killed
            draft.unlink(missing_ok=True)
    mine = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
    steps: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, mine["position"][0] if mine is not None else -1)
    if max(steps) < 0:
        return 0, 0, 0
    found: list[Any] = [mine]
    dist.broadcast_object_list(found, src=steps.index(max(steps)))
    model.load_state_dict(found[0]["model"])
    optimizer.load_state_dict(found[0]["optimizer"])
    step, epoch, offset = found[0]["position"]
    if dist.get_rank() == 0:
        print(f"resumed at step {step} with {dist.get_world_size()} workers", flush=True)
    return step, epoch, offset


def save(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: tuple[int, int, int]
) -> None:
    """Write one checkpoint per node. The file always holds either the old or the new checkpoint."""
    if int(os.environ["LOCAL_RANK"]) != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    # The name is unique: all nodes may share the folder, and a worker of an older round may still
    # write.
    draft = folder / f"{uuid.uuid4().hex}.tmp"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "position": position,
    }
    try:
        torch.save(state, draft)
        os.replace(draft, folder / "checkpoint.pt")
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
