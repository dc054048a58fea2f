"""Train a small GPT on the source of Python's standard library, byte by byte.

Any number of workers computes the same result, even if the number changes during the training. The
batch of a step depends only on the seed and the step. The gradients are weighted so that they are
the mean of the batch, whichever workers compute them. The script uses ``dlrover_py.trainer`` to
report its steps, and to save checkpoints at almost no cost.
"""

import argparse
import hashlib
import json
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from dlrover_py.trainer import Checkpointer, session

SEED = 1
CONTEXT = 64  # length of the context in bytes
WIDTH, LAYERS, HEADS = 96, 3, 4  # 364,000 parameters
TEXT_BYTES = 2_000_000
HELD_OUT_BYTES = 100_000
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a feed-forward network, each on the normalized input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape as the input: (batch, length, width)."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):  # type: ignore[misc]
    """Computes the logits of the next byte for each position of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of shape (batch, length, 256) for bytes of shape (batch, length)."""
        places = torch.arange(text.shape[1], device=text.device)
        x = self.norm(self.blocks(self.bytes(text) + self.places(places)))
        return x @ self.bytes.weight.T  # the embedding is also the output layer


def main() -> None:
    """Train until the last step, or until the agent asks the script to stop."""
    args = parse_args()
    device = start()
    rank, world = dist.get_rank(), dist.get_world_size()
    text = load_text().to(device)
    train, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]

    torch.manual_seed(SEED)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    ddp = DistributedDataParallel(model)
    # The state of each step is copied to memory while the next step runs. Once a minute, such a
    # checkpoint goes to the folder. It contains no data position, because a batch depends only on
    # the step.
    checkpointer = Checkpointer(args.ckpt, every=args.ckpt_every, persist_every=args.persist_every)
    state = {"model": model, "optimizer": optimizer}
    step = checkpointer.load(state) or 0
    if step and rank == 0:
        print(f"resumed at step {step} with {world} workers", flush=True)

    while step < args.steps and not checkpointer.should_stop:
        began = time.perf_counter()
        inputs, targets = batch(train, step, args.global_batch)
        mine = slice(rank, None, world)  # numbers of samples differ by at most one
        logits = ddp(inputs[mine])
        loss = cross_entropy(logits.flatten(0, 1), targets[mine].flatten(), reduction="sum")
        # DDP divides the sum of the gradients by the world size. This makes it the mean of the
        # batch.
        (loss * world / targets.numel()).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(args.step_delay)
        step += 1

        total = loss.detach()
        dist.all_reduce(total)
        mean = total.item() / targets.numel()
        session.report_step(step, args.steps, loss=mean)
        if rank == 0 and (step % 25 == 0 or step == args.steps):
            took_ms = (time.perf_counter() - began) * 1000
            print(f"step {step} loss {mean:.4f} ({took_ms:.0f} ms, {world} workers)", flush=True)
        checkpointer.save(step, state)

    checkpointer.save(step, state, force=True)
    if rank == 0 and step < args.steps:
        why = session.stop_reason() or "another worker was asked to"
        print(f"saved and stopped at step {step}: {why}", flush=True)
    elif rank == 0:
        report(model, held_out, step, args.out)
    checkpointer.close()
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--ckpt", help="folder that all nodes share, or s3://…; without it only in memory"
    )
    parser.add_argument("--ckpt-every", type=int, default=1, help="steps, in memory")
    parser.add_argument("--persist-every", default="1m", help='steps or time ("30s"), to --ckpt')
    parser.add_argument("--global-batch", type=int, default=24, help="samples, of all workers")
    parser.add_argument(
        "--step-delay", type=float, default=0.0, help="seconds, to have time to look"
    )
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    return parser.parse_args()


def start() -> torch.device:
    """Join the process group: NCCL if each worker of this node has its own GPU, else gloo."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    here = session.world()
    if torch.cuda.device_count() >= here.local_size:
        torch.cuda.set_device(here.local_rank)
        dist.init_process_group("nccl")
        device = torch.device("cuda", here.local_rank)
    else:
        dist.init_process_group("gloo")
        device = torch.device("cpu")
    if here.rank == 0 and session.restart_reason():
        print(f"round {session.round()}: {session.restart_reason()}", flush=True)
    return device


def load_text() -> Tensor:
    """Return the first files of the standard library in order of their names.

    The text is always the same for one version of Python.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    if len(text) < TEXT_BYTES:
        raise SystemExit(
            f"{folder}: found {len(text)} bytes of Python source, expected {TEXT_BYTES}; "
            "run with a Python whose standard library is installed as source"
        )
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).long()


def batch(text: Tensor, step: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a step, and for each position the byte that follows."""
    generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
    starts = torch.randint(len(text) - CONTEXT, (size,), generator=generator)
    samples = text[(starts[:, None] + torch.arange(CONTEXT + 1)).to(text.device)]
    return samples[:, :-1], samples[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * done))


@torch.no_grad()  # type: ignore[untyped-decorator]
def report(model: nn.Module, held_out: Tensor, step: int, out: Path | None) -> None:
    """Print the loss on held-out text and write the result; the samples are always the same."""
    inputs, targets = batch(held_out, 0, 256)
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    print(f"loss {loss:.4f} at step {step}", flush=True)
    if out is None:
        return
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.cpu().numpy().tobytes())
    result = {
        "step": step,
        "loss": loss,
        "world_size": dist.get_world_size(),
        # Digest of the exact bytes. It is equal for equal runs at one world size. Another world
        # size adds in another order; compare the loss instead, within 0.01.
        "params_sha256": digest.hexdigest(),
    }
    out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
