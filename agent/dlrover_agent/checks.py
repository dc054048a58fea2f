"""Tries a node out in the place of its workers: matmuls on its own, all-reduces with its group.

Started by the agent for each local rank, with torchrun's environment, when the master wishes a
check (docs/network-check.md). It exits with 0 and has told the agent its times, or it has failed.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

FAULT = "DLROVER_CHECK_FAULT"
"""For tests: ``n1=fail,n2=slow`` makes the check of these nodes fail; see :func:`fault`."""
TELL_S = 5.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is computed: about a second on a CPU, a few on a GPU."""

    matrix: int
    products: int
    floats: int
    reductions: int


CPU = Sizes(matrix=1024, products=10, floats=1 << 20, reductions=10)
GPU = Sizes(matrix=8192, products=100, floats=1 << 24, reductions=20)
WARM_UP = 3


def main() -> None:
    """Check, and tell the agent."""
    level, number, env = int(sys.argv[1]), sys.argv[2], os.environ
    rank, workers = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_rank, local_workers = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    broken = fault(env.get(FAULT, ""), env.get("DLROVER_NODE_ID", ""))
    if broken == "hang":
        signal.pause()
    if broken == "fail" or (broken == "link" and workers > local_workers):
        raise RuntimeError(f"{FAULT} wishes it")
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_workers
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    sizes = GPU if cuda else CPU
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # nodes on one machine must not fight for its cores
    if workers > 1:
        connect(number, rank, workers, device.type)
    times = {"matmul_s": matmul(sizes, device, again=20 if broken == "slow" else 1)}
    if workers > 1:
        times["allreduce_s"] = seconds = allreduce(sizes, device, rank, workers)
        if level > 1:
            times["algbw_gb_s"] = 4 * sizes.floats / seconds / 1e9
            times["busbw_gb_s"] = times["algbw_gb_s"] * 2 * (workers - 1) / workers
        dist.destroy_process_group()
    tell(env, local_rank, times)


def fault(text: str, node: str) -> str:
    """What is to go wrong on this node.

    ``fail``; ``link``: fails only together with other nodes; ``slow``; ``hang``.
    """
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part).get(node, "")


def connect(number: str, rank: int, workers: int, kind: str) -> None:
    """Form the group of this check, of which all must have the same kind of device.

    Raises:
        RuntimeError: this worker cannot use a GPU while others can.
    """
    found, _, _ = next(dist.rendezvous("env://"))
    # A master that was restarted may give the port of a check that it does not know to another
    # one, while workers of the old one still come.
    store = dist.PrefixStore(f"check-{number}", found)
    store.set(f"device/{rank}", kind)
    kinds = {store.get(f"device/{other}").decode() for other in range(workers)}
    if kind == "cpu" and len(kinds) > 1:
        raise RuntimeError("found no GPU for each worker here; others of the group have one")
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=workers)


def timed(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds that it takes: the median, since a moment's load on the machine is no news."""
    seconds = []
    for _ in range(WARM_UP + times):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:])


def matmul(sizes: Sizes, device: torch.device, *, again: int = 1) -> float:
    """Seconds of one product.

    Raises:
        RuntimeError: the same product had two results.
    """
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=dtype) for _ in "ab")
    expected = a @ b
    found = torch.empty_like(expected)

    def work() -> None:
        for _ in range(again):
            torch.matmul(a, b, out=found)

    seconds = timed(work, device, sizes.products)
    if not torch.equal(found, expected):
        raise RuntimeError("the same matrix product had two results: the device computes wrongly")
    return seconds


def allreduce(sizes: Sizes, device: torch.device, rank: int, workers: int) -> float:
    """Seconds of one all-reduce.

    Raises:
        RuntimeError: its result is wrong.
    """
    mine = torch.full((sizes.floats,), float(rank + 1), device=device)
    data = torch.empty_like(mine)

    def work() -> None:
        data.copy_(mine)
        dist.all_reduce(data)

    seconds = timed(work, device, sizes.reductions)
    expected = workers * (workers + 1) / 2
    if not bool((data == expected).all()):
        raise RuntimeError(f"an all-reduce had a wrong result: expected {expected:g} everywhere")
    return seconds


def tell(env: Mapping[str, str], local_rank: int, times: Mapping[str, float]) -> None:
    """Send the agent what was measured (protocol/workers.py)."""
    news = {"round": int(env["DLROVER_ROUND"]), "local_rank": local_rank, "step": 0}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.settimeout(TELL_S)  # the agent's queue may be full for a moment
        link.connect(env["DLROVER_AGENT_SOCKET"])
        link.send(json.dumps({**news, "metrics": times}).encode())


if __name__ == "__main__":
    main()
