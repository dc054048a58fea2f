"""Measures the cost of checkpoints and the time of a restore, beside torch's own checkpoints.

The state is a stack of linear layers with AdamW; "1 GB" is 2^30 bytes of parameters and moments.
The ways that are compared take turns within one process. Each figure is the median of all turns
(for the first saves: of all processes). ``memcpy`` is that of one thread, between memory that was
touched before.

``--json FILE`` keeps all samples; ``--write`` puts the tables into docs/benchmarks.md.
"""

import argparse
import asyncio
import contextlib
import ctypes
import json
import logging
import math
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.page import write_section
from dlrover_agent.checkpoint.server import TransferServer
from dlrover_py.checkpoint import shm as pool
from dlrover_py.protocol.agents import (
    PersistPhase,
    ReplicaLocation,
    ReplicaLocations,
    RestoreCandidate,
    RestoreCandidates,
)
from dlrover_py.protocol.checkpoint_id import CheckpointId
from dlrover_py.protocol.names import Round, Step, Timeline
from dlrover_py.trainer import Checkpointer
from dlrover_py.trainer.settings import Settings
from tests.slots import JOB, Lookup, Persister, order
from tests.staged import stage

WIDTH = 2048
WORLDS = [4, 3, 2, 4]
Samples = dict[str, list[float]]


def build(nbytes: int, *, moments: bool = True) -> dict[str, Any]:
    """Return a model and its AdamW optimizer, which together have the given number of bytes."""
    layers = max(1, nbytes // 3 // (4 * WIDTH * (WIDTH + 1)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if moments:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state in the form that torch's own functions accept."""
    return {key: value.state_dict() for key, value in state.items()}


def timed(do: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def spent(do: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes by the clock, and its seconds of processor time."""
    began = time.perf_counter(), time.process_time()
    do()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def memcpy(nbytes: int) -> Callable[[], object]:
    """Return a function that copies memory, in parts that are larger than any cache."""
    size = min(nbytes, 256 << 20)
    source, target = torch.ones(size // 4), torch.ones(size // 4)

    def copy() -> None:
        for start in range(0, nbytes, size):
            part = min(size, nbytes - start)
            ctypes.memmove(target.data_ptr(), source.data_ptr(), part)

    return copy


def settled() -> None:
    """Wait until this process is idle: its shared memory is then populated."""
    before, since = time.process_time(), time.monotonic()
    while time.monotonic() - since < 1.0:
        time.sleep(0.1)
        now = time.process_time()
        if now - before > 0.02:
            before, since = now, time.monotonic()


@contextlib.contextmanager
def folder(root: Path) -> Iterator[Path]:
    """Provide a temporary folder."""
    path = Path(tempfile.mkdtemp(prefix="dlrover-benchmark-", dir=root))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


# --- Saving ---


def blocked(nbytes: int, disk: Path) -> Samples:
    """Measure how long each way of saving blocks a process, then steps with and without saves."""
    state = build(nbytes)
    tiny = torch.optim.SGD([nn.Parameter(torch.ones(1))])  # the fence is before its step
    found: Samples = {}

    def add(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    copy = memcpy(nbytes)
    copy()
    for _ in range(3):
        add("memcpy", timed(copy))
    with Checkpointer() as ours:
        ours.load(state)
        settled()
        length = 2 * found["memcpy"][-1]

        def save(step: int, name: str, pause_s: float) -> None:
            took = timed(lambda: ours.save(step, state))
            time.sleep(pause_s)
            add(name, took + timed(tiny.step))
            ours.wait()

        save(1, "ours, first", max(1.0, 3 * length))
        for step in range(2, 5):
            add("memcpy", timed(copy))
            save(step, "ours, next", max(1.0, 3 * length))
            save(step + 10, "ours, a step at once after it", 0.0)
        steps(ours, state, tiny, copy, add)
    with folder(disk) as path:
        add("torch.save", timed(lambda: torch.save(plain(state), path / "plain")))
        add("dcp.save", timed(lambda: dcp.save(plain(state), checkpoint_id=path / "dcp")))
        for name in ("dcp.async_save, first", "dcp.async_save, next"):
            began = time.perf_counter()
            future = dcp.async_save(plain(state), checkpoint_id=path / name[-5:])
            add(name, time.perf_counter() - began)
            future.result()
    return found


def steps(
    ours: Checkpointer,
    state: dict[str, Any],
    tiny: torch.optim.Optimizer,
    copy: Callable[[], object],
    add: Callable[[str, float], None],
) -> None:
    """Measure steps of a matrix product in one thread. Each takes twice as long as a copy.

    They run alone; beside a memcpy of the same size in another thread; and with a save after each.
    """
    one = torch.randn(256, 256)
    out = torch.empty_like(one)
    copied = median_of(copy)
    unit = median_of(lambda: [torch.mm(one, one, out=out) for _ in range(50)])
    times = 50 * math.ceil(2.1 * copied / unit)
    number = 100
    pool = ThreadPoolExecutor(1)

    def run(name: str) -> None:
        nonlocal number
        beside: Future[object] | None = None
        for _ in range(5):
            for _ in range(times):
                torch.mm(one, one, out=out)
            tiny.step()
            if beside is not None:
                beside.result()
            if name == "step with a save":
                number += 1
                ours.save(number, state)
            elif name == "step beside a memcpy":
                beside = pool.submit(copy)
        tiny.step()
        if beside is not None:
            beside.result()

    names = ["step without a save", "step beside a memcpy", "step with a save"]
    with pool:
        for turn in range(3):
            for name in names[turn:] + names[:turn]:
                add(name, timed(partial(run, name)) / 5)
                ours.wait()


def median_of(do: Callable[[], object]) -> float:
    """Return the median seconds of five calls."""
    return statistics.median(timed(do) for _ in range(5))


# --- Storage ---


def persist(nbytes: int, disk: Path, shm: Path, times: int) -> Samples:
    """Measure the persister, ``dd`` and ``dcp.save`` in turn. The persister already runs."""
    found: Samples = {}
    with folder(shm) as memory, folder(disk) as path:
        state = build(nbytes)
        stage(memory / "0.0", state, step=7, round=1, job=JOB)
        persister = Persister()

        def dd(index: int) -> None:
            source = ["dd", f"if={memory / '0.0'}", f"of={path / 'dd'}", "bs=16M", "conv=fsync"]
            subprocess.run(source, check=True, capture_output=True)

        def ours(index: int) -> None:
            persister.send(order(memory, path / "ours", f"a{index}", deadline_s=600.0))
            answer = persister.end(f"a{index}", timeout=600)
            assert answer.phase is PersistPhase.DONE, answer

        def theirs(index: int) -> None:
            dcp.save(plain(state), checkpoint_id=path / "dcp")

        ways = [("dd conv=fsync", dd), ("persister", ours), ("dcp.save", theirs)]
        try:
            for index in range(times + 1):  # the first turn is a warm-up
                for name, do in ways[index % 3 :] + ways[: index % 3]:
                    took = timed(partial(do, index))
                    if index:
                        found.setdefault(name, []).append(took)
                    for old in path.iterdir():
                        if old.is_dir():  # a writer lease may be renewed in it
                            shutil.rmtree(old, ignore_errors=True)
                        else:
                            old.unlink()
        finally:
            persister.close()
    return found


# --- Restoring ---


def serve(base: Path) -> None:
    """Run the transfer servers of two nodes and a socket that sends a slot, until killed.

    The first node holds nothing. The socket sends the slot of the second node over each connection.
    """
    plain = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        while True:
            stream, _ = plain.accept()
            with contextlib.suppress(OSError), stream, (base / "peer" / "0.0").open("rb") as file:
                stream.sendfile(file)

    async def run() -> None:
        ((_, header),) = pool.scan(base / "peer")

        async def candidates(_: int) -> RestoreCandidates:
            found = RestoreCandidate(**asdict(header.id), world=header.world)
            return RestoreCandidates(candidates=[found])

        async def locations(_: CheckpointId) -> ReplicaLocations:
            found = ReplicaLocation(
                rank=0, node="peer", addr="127.0.0.1", port=depots[1].port, part=header.part
            )
            return ReplicaLocations(locations=[found])

        depots = [
            TransferServer(
                base / node,
                JOB,
                "token",
                base / f"{node}.socket",
                lookup=Lookup(candidates, locations),
                addr="127.0.0.1",
            )
            for node in ("own", "peer")
        ]
        threading.Thread(target=send, daemon=True).start()
        print(plain.getsockname()[1], flush=True)
        await asyncio.gather(*(depot.run() for depot in depots))

    asyncio.run(run())


def restore(nbytes: int, disk: Path, shm: Path, times: int) -> Samples:
    """Measure ``load`` from the node's own memory and from a peer, memcpy, and ``torch.load``."""
    found: Samples = {}
    with folder(shm) as base, folder(disk) as path:
        for name in ("own", "peer"):
            (base / name).mkdir()
        warm = build(nbytes)
        stage(base / "peer" / "0.0", warm, step=7, round=1, job=JOB)
        torch.save(plain(warm), path / "file")
        model = warm["model"]
        cold = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        script = [sys.executable, __file__, "--serve", str(base)]
        server = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)

        newest = CheckpointId(round=Round(1), timeline=Timeline(0), step=Step(7))

        def load(state: dict[str, Any], node: str) -> tuple[float, float]:
            depot = str(base / "own.socket") if node == "own" else ""
            place = Settings(
                pool=str(base / node), transfer_socket=depot, job=JOB, place=1, round=2
            )
            with Checkpointer(settings=place, rng=False) as ours:
                took = spent(lambda: ours.load(state))
                assert ours._newest_complete == newest, ours._newest_complete
            # the load has allocated slots for the next saves
            for slot in pool.slots_of(base / node, 1):
                slot.unlink()
            return took

        def theirs() -> None:
            loaded = torch.load(path / "file", weights_only=True)
            for key, value in warm.items():
                value.load_state_dict(loaded[key])

        def anew() -> None:  # erase the old values
            cold["optimizer"].state.clear()
            for tensor in tensors(warm):
                tensor.detach().fill_(-1.0)

        copy = memcpy(nbytes)
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            "memcpy": lambda: spent(copy),
            "own memory": lambda: load(warm, "peer"),
            "own memory, a new optimizer": lambda: load(cold, "peer"),
            "a bare socket on loopback": lambda: spent(lambda: bare(port, warm)),
            "a peer on loopback": lambda: load(warm, "own"),
            "torch.load": lambda: spent(theirs),
        }
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for turn in range(times + 1):  # the first turn is a warm-up
                for name, do in ways.items():
                    anew()
                    took, cpu = do()
                    if turn:
                        found.setdefault(name, []).append(took)
                        found.setdefault(f"{name}: processor", []).append(cpu)
            right = torch.load(path / "file", weights_only=True)
            for state, node in ((warm, "peer"), (warm, "own"), (cold, "peer")):
                anew()
                load(state, node)
                equal(plain(state), right)
        finally:
            server.kill()
            server.wait()
    return found


def bare(port: int, state: dict[str, Any]) -> None:
    """Receive the same bytes over a plain loopback socket, directly into the state's tensors."""
    with socket.create_connection(("127.0.0.1", port)) as stream:
        for tensor in tensors(state):
            target = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            came = stream.recv_into(target, tensor.nbytes, socket.MSG_WAITALL)
            assert came == tensor.nbytes


def tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors of the state."""
    yield from state["model"].parameters()
    for entries in state["optimizer"].state.values():
        yield from (value for value in entries.values() if isinstance(value, torch.Tensor))


def equal(one: Any, other: Any) -> None:
    """Check that two states are equal bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), (one.keys(), other.keys())
        for key in one:
            equal(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
        assert torch.equal(one, other)


# --- Other world sizes ---


def reshard(mode: str, nbytes: int, disk: Path, shm: Path, times: int) -> Samples:
    """Measure worlds of 4, 3, 2 and 4 ranks. Each loads what the previous one has saved."""
    with folder(disk) as path, folder(shm) as memory:
        fork = multiprocessing.get_context("fork")
        said = fork.SimpleQueue()
        for number, world in enumerate(WORLDS):
            args = (mode, nbytes, path, memory, times, number, world)
            ranks = [fork.Process(target=member, args=(*args, r, said)) for r in range(world)]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join()
                assert one.exitcode == 0, f"a rank of {world} has failed"
        found: Samples = {}
        while not said.empty():
            name, seconds = said.get()
            found.setdefault(name, []).append(seconds)
    return found


def member(
    mode: str,
    nbytes: int,
    path: Path,
    memory: Path,
    times: int,
    number: int,
    world: int,
    rank: int,
    said: Any,
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    meet = f"file://{path}/meet{number}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = max(1, nbytes // 3 // (4 * WIDTH * (WIDTH + 1)))
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        if mode == "FSDP2":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def theirs(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        names = {p: n.removeprefix("module.") for n, p in model.named_parameters()}
        return {
            "model": {names[p]: p.detach() for p in model.parameters()},
            "optimizer": {names[p]: dict(s) for p, s in optimizer.state.items()},
        }

    model, optimizer = make(number)
    state = {"model": model, "optimizer": optimizer}
    place = Settings(rank=rank, size=world, place=rank, pool=str(memory), job=JOB, round=number + 1)
    name = f"{mode}, {WORLDS[number - 1]} → {world} ranks"

    def until_all_have(do: Callable[[], object]) -> None:
        do()
        dist.barrier()

    with Checkpointer(settings=place, rng=False) as ours:
        for _ in range(times if number else 0):
            other = theirs(*make(number + 10))
            stored = path / f"{number}"

            def with_torch(of: dict[str, Any] = other, at: Path = stored) -> object:
                return dcp.load(of, checkpoint_id=at)

            for way, do in (
                ("ours", lambda: ours.load(state)),
                ("dcp.load, cached", with_torch),
                ("dcp.load", with_torch),
            ):
                if way == "dcp.load" and not rank:
                    forget(stored)
                dist.barrier()
                took = timed(partial(until_all_have, do))
                if not rank:
                    said.put((f"{name}: {way}", took))
            equal(theirs(model, optimizer), other)
            del other, with_torch
        ours.save(number + 1, state, force=True)
        dcp.save(theirs(model, optimizer), checkpoint_id=path / f"{number + 1}")
        dist.barrier()
        if not rank:
            for slot, header in list(pool.scan(memory)):
                if header.step <= number:
                    slot.unlink()
        dist.barrier()
    dist.destroy_process_group()


def forget(folder: Path) -> None:
    """Drop files from the page cache, so that the next read is from the disk."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)  # pages that are not written yet would remain in the cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# --- Memory ---


def held(pid: int | str = "self") -> dict[str, int]:
    """Return the memory of a process in bytes. Shared memory is divided among its users."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in text}


def memory(nbytes: int, disk: Path) -> Samples:
    """Measure the additional memory of a node: slots, the worker's own, and the persister's."""
    state = build(nbytes)
    tiny = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    tiny.step()
    with folder(disk) as path:
        before = held()
        with Checkpointer(path, persist_every=1) as ours:
            ours.load(state)
            most = 0
            for step in range(1, 5):
                ours.save(step, state)
                tiny.step()
                most = max(most, held()["Pss_Anon"])
            ours.wait(persisted=True)
            site = ours._opened
            assert site is not None
            slots = sum(p.stat().st_blocks * 512 for p in site.folder.iterdir())
            assert site.persister is not None
            assert site.persister._process is not None
            persister = held(site.persister._process.pid)["Pss_Anon"]
    size = sum(t.nbytes for t in state["model"].parameters()) * 3
    return {
        "state": [size],
        "slots": [slots],
        "worker": [max(0, most - before["Pss_Anon"])],
        "persister": [persister],
    }


# --- Tables ---


class Table:
    """The rows of one size."""

    def __init__(self) -> None:
        self.lines = [
            "| what | target | median | min … max | n | ratio |",
            "|---|---|---|---|---|---|",
        ]

    def add(
        self, what: str, samples: list[float], base: list[float], unit: str, target: float = 0.0
    ) -> None:
        """Add a row. A target is the greatest fraction of the base."""
        middle, best = statistics.median(samples), statistics.median(base)
        ratio = middle / best
        verdict = "" if not target else (", met" if ratio <= target else ", **missed**")
        aim = f"≤ {target:g} {unit}" if target else ""
        ends = f"{min(samples):.4g} … {max(samples):.4g} s"
        self.lines.append(
            f"| {what} | {aim} | {middle:.4g} s | {ends} | {len(samples)} "
            f"| {ratio:.2f} {unit}{verdict} |"
        )


def tables(found: dict[str, Samples]) -> list[str]:
    """Return the measurements of one size as rows."""
    made = Table()
    if saving := found.get("blocked"):
        base = saving["memcpy"]
        made.add("one memcpy", base, base, "memcpy")
        for name in ("torch.save", "dcp.save", "dcp.async_save, first", "dcp.async_save, next"):
            made.add(f"training blocked: {name}", saving[name], base, "memcpy")
        for name, aim in (
            ("ours, first", 0.1),
            ("ours, next", 0.1),
            ("ours, a step at once after it", 1.0),
        ):
            made.add(f"training blocked: {name}", saving[name], base, "memcpy", aim)
        without = saving["step without a save"]
        made.add("a step without a save", without, without, "of it")
        beside = saving["step beside a memcpy"]
        made.add("a step, a memcpy of as much beside each", beside, without, "of it")
        made.add(
            "a step, a save after each", saving["step with a save"], without, "of it", 1 / 0.95
        )
    if storing := found.get("persist"):
        base = storing["dd conv=fsync"]
        made.add("persist: `dd conv=fsync`", base, base, "dd")
        made.add("persist: `dcp.save`, blocking", storing["dcp.save"], base, "dd")
        made.add("persist: ours, in the background", storing["persister"], base, "dd", 1.3)
    if loading := found.get("restore"):
        base = loading["memcpy"]
        made.add("restore: one memcpy", base, base, "memcpy")
        for name, aim in (
            ("torch.load", 0.0),
            ("own memory", 1.5),
            ("own memory, a new optimizer", 0.0),
            ("a bare socket on loopback", 0.0),
            ("a peer on loopback", 2.5),
        ):
            made.add(f"restore: {name}", loading[name], base, "memcpy", aim)
            cpu = statistics.median(loading[f"{name}: processor"])
            made.lines[-1] = made.lines[-1][:-2] + f"; {cpu:.2f} s of processor |"
    for name, samples in found.get("reshard", {}).items():
        if name.endswith("ours"):
            base = found["reshard"][name.replace("ours", "dcp.load")]
            cached = found["reshard"][name.replace("ours", "dcp.load, cached")]
            what = name.removesuffix(": ours")
            made.add(f"{what}, dcp.load from disk", base, base, "dcp.load")
            made.add(f"{what}, dcp.load from the page cache", cached, base, "dcp.load")
            made.add(f"{name}, from memory", samples, base, "dcp.load", 1.0)
    lines = made.lines if len(made.lines) > 2 else []
    if room := found.get("memory"):
        size, slots, worker, persister = (
            room[k][0] for k in ("state", "slots", "worker", "persister")
        )
        extra = (slots + worker - 3 * size) / 1e6
        lines += [
            "",
            f"Memory: state {size / 1e6:,.0f} MB, slots {slots / 1e6:,.0f} MB, the worker's own "
            f"{worker / 1e6:,.0f} MB more, the persister {persister / 1e6:,.0f} MB: 3 copies and "
            f"{extra:,.0f} MB, and the persister (target: 64 MB, "
            f"{'met' if extra <= 64 else '**missed**'}).",
        ]
    return lines


PARTS = ("blocked", "persist", "restore", "reshard", "memory")


def part(name: str, nbytes: int, args: argparse.Namespace) -> Samples:
    """Measure one part in this process."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if name == "blocked":
        return blocked(nbytes, args.dir)
    if name == "persist":
        return persist(nbytes, args.dir, args.shm, args.times)
    if name == "restore":
        return restore(nbytes, args.dir, args.shm, args.times)
    if name == "memory":
        return memory(nbytes, args.dir)
    nbytes = args.reshard_mb << 20
    return {
        key: value
        for mode in ("FSDP2", "DDP")
        for key, value in reshard(mode, nbytes, args.dir, args.shm, args.times).items()
    }


def apart(name: str, nbytes: int, args: argparse.Namespace) -> Samples:
    """Measure one part in separate processes."""
    found: Samples = {}
    for _ in range(args.times if name == "blocked" else 1):
        words = [*sys.argv[1:], "--child", name, str(nbytes)]
        with tempfile.NamedTemporaryFile() as file:
            subprocess.run([sys.executable, __file__, *words, "--json", file.name], check=True)
            for key, values in json.loads(Path(file.name).read_text()).items():
                found.setdefault(key, []).extend(values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0], help="of state")
    parser.add_argument("--reshard-mb", type=int, default=192)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on a disk")
    parser.add_argument("--shm", type=Path, default=Path("/dev/shm"), help="a tmpfs")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="put the tables into docs/benchmarks.md"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not all(0 < n < math.inf for n in (*args.gb, args.reshard_mb, args.times)):
        parser.error("--gb, --reshard-mb and --times are positive numbers")
    if args.serve:
        serve(args.serve)
        return
    # end the processes that were started, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.child:
        args.json.write_text(json.dumps(part(args.child[0], int(args.child[1]), args)))
        return
    began, loads = time.monotonic(), [os.getloadavg()[0]]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(5.0):
            loads.append(os.getloadavg()[0])

    threading.Thread(target=watch, daemon=True).start()
    everything: dict[str, dict[str, Samples]] = {}
    lines: list[str] = []
    for gb in args.gb:
        found = everything[f"{gb:g}"] = {}
        for name in args.only:
            print(f"{datetime.now().astimezone():%H:%M:%S} {gb:g} GB: {name}", flush=True)
            found[name] = apart(name, int(gb * (1 << 30)), args)
            if args.json:
                args.json.write_text(json.dumps(everything))
        lines += ["", f"**{gb:g} GB** (resharded: {args.reshard_mb} MB)", "", *tables(found)]
    over.set()
    head = [
        f"`python benchmarks/checkpoint.py {' '.join(sys.argv[1:])}`  ",
        f"{os.cpu_count()} cores shared with other work: load average {loads[0]:.1f} before, "
        f"{statistics.median(loads):.1f} in the middle, {max(loads):.1f} at most, our own "
        f"included; Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}; "
        f"{time.monotonic() - began:.0f} s in all.",
    ]
    text = "\n".join([*head, *lines])
    print(text)
    if args.write:
        write_section("checkpoint", text)


if __name__ == "__main__":
    main()
