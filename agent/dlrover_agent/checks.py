"""A worker of a node check, which runs in the place of the script's workers.

It times matrix products on its own device, and all-reduces with the other workers of its group. The
agent starts it for each local rank, with torchrun's environment, when the master requests a check
(docs/network-check.md). Exit code 0 means that it has sent its times to the agent. Any other exit
code means that the check has failed.
"""

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

from dlrover_py.protocol import sdk

FAULT = "DLROVER_CHECK_FAULT"
"""Environment variable for tests, such as ``n1=fail,n2=slow``; see :func:`fault`."""
REPORT_S = 5.0
"""Seconds to send the times to the agent."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Amount of work in a check, which takes about a second on a CPU and a few on a GPU."""

    matrix: int
    """Rows and columns of the matrices."""
    products: int
    """Number of matrix products."""
    floats: int
    """Number of float32 values in an all-reduce."""
    reductions: int
    """Number of all-reduces."""


CPU = Sizes(matrix=1024, products=10, floats=1 << 20, reductions=10)
GPU = Sizes(matrix=8192, products=100, floats=1 << 24, reductions=20)
WARM_UP = 3
"""Number of runs before those that are timed."""


def main() -> None:
    """Check this worker's device and its network, and send the times to the agent.

    The command line has the level of the check and its number. Bandwidths are sent if the level is
    over 1. With one worker in the group only the device is checked. The master limits the time.

    Raises:
        RuntimeError: The check has failed: a result was wrong, a GPU is missing, or torch has
            raised an error.
        OSError: The agent has not taken the times.
    """
    level, number, env = int(sys.argv[1]), sys.argv[2], os.environ
    rank, workers = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_rank, local_workers = int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])
    fault_kind = fault(env.get(FAULT, ""), env.get("DLROVER_NODE_ID", ""))
    if fault_kind == "hang":
        signal.pause()
    if fault_kind == "fail" or (fault_kind == "link" and workers > local_workers):
        raise RuntimeError(f"{FAULT} requests this failure")
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_workers
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    sizes = GPU if cuda else CPU
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # nodes on one machine must not compete for its cores
    if workers > 1:
        connect(number, rank, workers, device.type)
    times = {"matmul_s": matmul(sizes, device, repeat=20 if fault_kind == "slow" else 1)}
    if workers > 1:
        # It lives longer than the group. torch 2.6 holds the GIL while it joins gloo's threads, and
        # a thread that frees a tensor needs it.
        data = torch.empty(sizes.floats, device=device)
        times["allreduce_s"] = seconds = allreduce(data, sizes, rank, workers)
        if level > 1:
            times["algbw_gb_s"] = 4 * sizes.floats / seconds / 1e9
            times["busbw_gb_s"] = times["algbw_gb_s"] * 2 * (workers - 1) / workers
        dist.destroy_process_group()
    report(env, local_rank, times)


def fault(text: str, node: str) -> str:
    """Return the fault that a test has requested for this node; empty if there is none.

    Args:
        text: Value of the variable, such as ``n1=fail,n2=slow``.
        node: Id of this node.

    Returns:
        ``fail``; ``link``, which fails only in a group with other nodes; ``slow``; or ``hang``.
    """
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part).get(node, "")


def connect(number: str, rank: int, workers: int, kind: str) -> None:
    """Form the process group of this check, whose workers must have the same kind of device.

    The function waits until all workers of the group have connected, up to the timeout of torch's
    store.

    Args:
        number: Number of the check.
        rank: Rank of this worker in the group.
        workers: Number of workers in the group.
        kind: Kind of this worker's device: ``cuda`` or ``cpu``.

    Raises:
        RuntimeError: This worker cannot use a GPU while others can. Torch's own errors are
            RuntimeErrors as well, for example if a worker does not come in time.
    """
    found, _, _ = next(dist.rendezvous("env://"))
    # A restarted master does not know older checks. It may reuse the port of such a check while
    # workers of that check still connect, so the keys have the check's number as a prefix.
    store = dist.PrefixStore(f"check-{number}", found)
    store.set(f"device/{rank}", kind)
    kinds = {store.get(f"device/{other}").decode() for other in range(workers)}
    if kind == "cpu" and len(kinds) > 1:
        raise RuntimeError(
            "expected a GPU for each worker of this node, as on other nodes; found fewer"
        )
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=workers)


def timed(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the median duration of ``work`` in seconds; a short load changes it little.

    Args:
        work: Function to time.
        device: Device that the function uses.
        times: Number of timed calls. ``WARM_UP`` calls come before them.
    """
    seconds = []
    for _ in range(WARM_UP + times):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:])


def matmul(sizes: Sizes, device: torch.device, *, repeat: int = 1) -> float:
    """Return the median seconds of a matrix product, or of ``repeat`` products.

    Args:
        sizes: Size of the matrices, and number of runs that are timed.
        device: Device that computes them.
        repeat: Number of products that are timed as one, for tests.

    Raises:
        RuntimeError: The same product had two different results.
    """
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device, dtype=dtype) for _ in "ab")
    expected = a @ b
    found = torch.empty_like(expected)

    def work() -> None:
        for _ in range(repeat):
            torch.matmul(a, b, out=found)

    seconds = timed(work, device, sizes.products)
    if not torch.equal(found, expected):
        raise RuntimeError("the same matrix product had two results: the device computes wrongly")
    return seconds


def allreduce(data: torch.Tensor, sizes: Sizes, rank: int, workers: int) -> float:
    """Return the seconds of one all-reduce.

    Args:
        data: What is reduced; it is overwritten.
        sizes: Number of the all-reduces that are timed.
        rank: Rank of this worker in the group.
        workers: Number of workers in the group.

    Raises:
        RuntimeError: The result is wrong.
    """
    own = torch.full_like(data, float(rank + 1))

    def work() -> None:
        data.copy_(own)
        dist.all_reduce(data)

    seconds = timed(work, data.device, sizes.reductions)
    expected = workers * (workers + 1) / 2
    if not bool((data == expected).all()):
        raise RuntimeError(f"an all-reduce had a wrong result: expected {expected:g} everywhere")
    return seconds


def report(env: Mapping[str, str], local_rank: int, times: Mapping[str, float]) -> None:
    """Send the measurements to the agent, as a datagram of protocol/workers.py.

    The agent does not confirm it.

    Args:
        env: Environment of this worker.
        local_rank: Rank of this worker on its node.
        times: Measurements by name: seconds, and GB/s.

    Raises:
        OSError: The agent has not taken it within ``REPORT_S``, or has ended.
    """
    message: sdk.ProgressFields = {
        "version": sdk.VERSION,
        "round": int(env["DLROVER_ROUND"]),
        "local_rank": local_rank,
        "step": 0,
        "metrics": times,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.settimeout(REPORT_S)  # the agent's queue may be full for a moment
        connection.connect(env["DLROVER_AGENT_SOCKET"])
        connection.send(sdk.encode(message))


if __name__ == "__main__":
    main()
