"""Measures recovery from a fault to the next training step, beside torchrun; same script for both.

The script is a small DDP model on gloo that does not use DLRover (``SCRIPT``). After each step,
each rank appends a line with ``time.monotonic()`` to its own file. A figure is the time from right
before the fault to the first step of the *last* rank in the next round. The launchers take turns
within one run, with the machine idle and with one core kept busy. A torchrun that has not returned
within ``--never`` seconds counts as lost and is started again.

``--json FILE`` keeps all samples; ``--write`` puts the tables into docs/benchmarks.md.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import psutil
import yaml

from benchmarks.page import write_section

BIN = Path(sys.executable).parent
SCRIPT = """
import os, signal, sys, time
dies_at, turn = int(os.environ.get("DIES_AT", 0)), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if sys.argv[2:]:
    with open("/proc/self/smaps_rollup") as file:
        private = sum(int(x.split()[1]) for x in file if x.startswith("Private"))
    with open(sys.argv[2], "a") as file:
        file.write(f"{private}\\n")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

out, rank = sys.argv[1], os.environ["RANK"]
began = time.monotonic()
dist.init_process_group("gloo")
width = int(os.environ.get("WIDTH", 256))
model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 64))
)
optimizer = torch.optim.AdamW(model.parameters())
size, pid, parent = dist.get_world_size(), os.getpid(), os.getppid()
with open(f"{out}/{rank}", "a", buffering=1) as file:
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
        step += 1
        file.write(f"{time.monotonic()} {step} {size} {pid} {parent} {began}\\n")
        if step == dies_at and turn % size == int(rank):
            os.kill(pid, signal.SIGKILL)
"""
EXAMPLE = (Path(__file__).parents[1] / "examples/02-gpt/train.py").read_text()
COMPILE = ("DistributedDataParallel(model)", "DistributedDataParallel(torch.compile(model))")
ONE_GRAPH = (
    "import torch\n",
    "import torch\nimport torch._dynamo\n\ntorch._dynamo.config.optimize_ddp = False\n",
)
T = TypeVar("T")
_pause = threading.Event()


class LostError(Exception):
    """The job did not recover."""


def say(text: str) -> None:
    print(f"{datetime.now().astimezone():%H:%M:%S} {text}", flush=True)


def until(look: Callable[[], T | None], what: str, within_s: float) -> T:
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise LostError(f"not within {within_s:g} s: {what}")
        _pause.wait(0.005)
    return seen


@dataclass(frozen=True)
class Line:
    """The line that a rank wrote after a step."""

    at: float
    step: int
    size: int
    pid: int
    parent: int
    began: float


class Running:
    """A job, observed through the files of its ranks."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self.process = folder, process
        self.out = folder / "out"

    def tail(self, rank: int) -> Line | None:
        """Return the newest step of a rank."""
        with contextlib.suppress(OSError), open(self.out / str(rank), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 400))
            lines = file.read().split(b"\n")[:-1]
            if lines:
                a, b, c, d, e, f = lines[-1].split()
                return Line(float(a), int(b), int(c), int(d), int(e), float(f))
        return None

    def lines(self, rank: int) -> list[Line]:
        """Return all steps of a rank."""
        with contextlib.suppress(OSError), open(self.out / str(rank)) as file:
            fields = [text.split() for text in file if text.endswith("\n")]
            return [
                Line(float(a), int(b), int(c), int(d), int(e), float(f))
                for a, b, c, d, e, f in fields
            ]
        return []

    def first(self, rank: int, pid: int) -> Line:
        """Return the first step of one process of a rank."""
        for line in self.lines(rank):
            if line.pid == pid:
                return line
        raise LostError(f"rank {rank} has no step of process {pid}")

    def processes(self, rank: int) -> list[list[Line]]:
        """Return the steps of a rank, those of each process together."""
        lines = self.lines(rank)
        pids = list(dict.fromkeys(line.pid for line in lines))
        return [[line for line in lines if line.pid == pid] for pid in pids]

    def steady(
        self, world: int, within_s: float, not_pids: frozenset[int] = frozenset()
    ) -> list[Line]:
        """Wait until all ranks of a world of this size have made steps, in new processes."""

        def look() -> list[Line] | None:
            if self.process.poll() is not None:
                raise LostError(f"it has ended with code {self.process.returncode}")
            tails = [self.tail(rank) for rank in range(world)]
            if all(t and t.size == world and t.pid not in not_pids for t in tails):
                return [t for t in tails if t]
            return None

        return until(look, f"steps of a world of {world}", within_s)

    def recovery(
        self, before: list[Line], world: int, fault: Callable[[], object], never_s: float
    ) -> float:
        """Return the seconds from the fault to the last rank's first step of the next round."""
        pids = frozenset(line.pid for line in before)
        at = time.monotonic()
        fault()
        after = self.steady(world, never_s, pids)
        return max(self.first(rank, line.pid).at for rank, line in enumerate(after)) - at


@contextlib.contextmanager
def started(
    name: str,
    argv: list[str],
    env: dict[str, str] | None = None,
    job: str = "",
    *,
    again: Path | None = None,
    script: str = SCRIPT,
) -> Iterator[Running]:
    """Run a job in its own folder, which is removed afterwards; or in ``again``, which stays."""
    folder = again or Path(tempfile.mkdtemp(prefix="b-", dir="/tmp"))
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    (folder / "train.py").write_text(script)
    (folder / "job.yaml").write_text(job)
    extra = {
        "DLROVER_RUNTIME_DIR": str(folder / "run"),
        "DLROVER_STATE_DIR": str(folder / "state"),
        "DLROVER_CACHE_DIR": "none",
    }
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **extra, **(env or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    running = Running(folder, process)
    try:
        yield running
    except LostError as error:
        say(f"! {name}: {error}; {(folder / 'log').read_bytes()[-600:]!r}")
        raise
    finally:
        family = [process.pid, *(p.pid for p in _family(process.pid))]
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        if again is None:
            shutil.rmtree(folder, ignore_errors=True)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep the given number of cores busy with other work."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


# --- Runs ---

STANDALONE = ["--standalone", "--nproc-per-node=2", "--max-restarts=100000"]
LAUNCHERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "elastic-run": ([str(BIN / "elastic-run"), *STANDALONE], {"DLROVER_LOG_LEVEL": "INFO"}),
    "elastic-run --cold-start": ([str(BIN / "elastic-run"), *STANDALONE, "--cold-start"], {}),
    "torchrun": ([str(BIN / "torchrun"), *STANDALONE], {}),
    "torchrun, cured": (
        [str(BIN / "torchrun"), *STANDALONE],
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
}
"""Command and environment of each launcher. The variant of torchrun uses a fresh store for each
round, because of its stale keys."""


def warm(running: Running, nodes: int = 1) -> None:
    """Wait until all zygotes are ready."""

    def look() -> bool:
        texts = [running.folder / "log", *running.folder.rglob("agent.log")]
        return sum(p.read_text(errors="replace").count("zygote_ready") for p in texts) >= nodes

    until(look, "zygotes", 180)


def kill_workers(
    launcher: str,
    kills: int,
    never_s: float,
    *,
    script: str = SCRIPT,
    argv: Sequence[str] = ("out",),
    env: Mapping[str, str] | None = None,
    pause_s: float = 0.5,
) -> tuple[list[float], int]:
    """Kill workers repeatedly, this long after the first step of the last rank.

    Returns:
        The seconds of each recovery, and how often the job did not recover.
    """
    command, its_env = LAUNCHERS[launcher]
    command, its_env = [*command, "train.py", *argv], {**its_env, **(env or {})}
    samples: list[float] = []
    lost = 0
    while len(samples) + lost < kills:
        with (
            contextlib.suppress(LostError),
            started(launcher, command, its_env, script=script) as job,
        ):
            before = job.steady(2, 240)
            if launcher == "elastic-run":
                warm(job)
            while len(samples) + lost < kills:
                rank = (len(samples) + lost) % 2
                _pause.wait(pause_s)
                victim = before[rank].pid
                try:
                    samples.append(
                        job.recovery(before, 2, partial(os.kill, victim, signal.SIGKILL), never_s)
                    )
                except LostError:
                    lost += 1
                    raise
                before = job.steady(2, never_s)
    return samples, lost


def document(**worker: object) -> str:
    container = {"name": "main", "image": "none", "command": ["elastic-run", "train.py", "out"]}
    return yaml.safe_dump(
        {
            "apiVersion": "elastic.iml.github.io/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "bench"},
            "spec": {
                "replicaSpecs": {
                    "worker": {
                        "restartCount": 1000,
                        **worker,
                        "template": {"spec": {"containers": [container]}},
                    }
                }
            },
        }
    )


@contextlib.contextmanager
def cluster(hosts: int, **worker: object) -> Iterator[Running]:
    """Run a job of several nodes on this machine."""
    argv = [str(BIN / "dlrover"), "job", "run", "job.yaml", "--json", "--nodes", str(hosts)]
    with started("dlrover job run", argv, job=document(**worker)) as job:
        yield job


def kill_node(line: Line) -> None:
    """Kill an agent and its workers at the same time."""
    agent = psutil.Process(line.parent)
    for victim in [agent, *agent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()


def logged(job: Running, event: str) -> list[float]:
    """Return when agents logged this event, by the clock of ``time.monotonic()``."""
    offset = time.monotonic() - time.time()
    times = []
    for path in [job.folder / "log", *job.folder.rglob("agent.log")]:
        for line in path.read_text(errors="replace").splitlines():
            if f'"event": "{event}"' in line:
                at = re.search(r'"at": "([^"]+)"', line)
                assert at is not None
                times.append(datetime.fromisoformat(at[1]).timestamp() + offset)
    return sorted(times)


@dataclass
class Row:
    """A row of a table: seconds by launcher and load."""

    what: str
    target: str
    samples: dict[str, list[float]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)

    def add(self, column: str, samples: list[float], lost: int = 0) -> None:
        self.samples.setdefault(column, []).extend(samples)
        self.lost[column] = self.lost.get(column, 0) + lost
        if samples:
            say(f"{self.what}, {column}: {spread(samples)}")


def spread(samples: list[float]) -> str:
    if not samples:
        return "–"
    low, mid, high = min(samples), statistics.median(samples), max(samples)
    digits = 2 if high < 10 else 1
    return f"{low:.{digits}f} / {mid:.{digits}f} / {high:.{digits}f} s (n={len(samples)})"


def worker_rows(kills: int, peer_kills: int, blocks: int, never_s: float, pause_s: float) -> Row:
    row = Row("`kill -9` of one of 2 DDP workers", "≤ 0.25 s, worst ≤ 1 s")
    for block in range(blocks):
        for load in (0, 1):
            for launcher in LAUNCHERS:
                count = kills if launcher == "elastic-run" else peer_kills
                with busy(load):
                    samples, lost = kill_workers(launcher, count, never_s, pause_s=pause_s)
                row.add(f"{launcher}, {'busy' if load else 'idle'}", samples, lost)
        say(f"block {block + 1} of {blocks} is done")
    return row


def node_rows(times: int) -> list[Row]:
    shrink = Row("one of 3 nodes is killed, agent and workers: the others' next step", "≤ 0.5 s")
    first = Row("the same, rank 0's node", "≤ 0.5 s")
    standby = Row("the same with a standby: next step of the full world", "≤ 0.5 s")
    first_standby = Row("the same with a standby, rank 0's node", "≤ 0.5 s")
    joined = Row("a node comes: first step of the larger world after its agent is warm", "≤ 0.5 s")
    cases = ((shrink, 2, 0), (first, 0, 0), (standby, 1, 1), (first_standby, 0, 1))
    for _ in range(times):
        for row, rank, spare in cases:
            minimum = 3 if spare else 1
            worker = {"replicas": 3, "minReplicas": minimum, "standbyReplicas": spare}
            try:
                with cluster(3 + spare, **worker) as job:
                    before = job.steady(3, 120)
                    warm(job, 3 + spare)
                    _pause.wait(2)
                    world = 3 if spare else 2
                    took = job.recovery(before, world, partial(kill_node, before[rank]), 60)
                    row.add("elastic-run", [took])
                    if not spare:  # the platform restarts the node
                        after = job.steady(3, 60)
                        ready = logged(job, "zygote_ready")[-1]
                        steps = [job.first(r, line.pid).at for r, line in enumerate(after)]
                        joined.add("elastic-run", [max(steps) - ready])
            except LostError:
                row.add("elastic-run", [], 1)
    return [shrink, first, standby, first_standby, joined]


def start_rows(times: int) -> list[Row]:
    """Measure the time from the launcher's start to the first worker's start, to 10 ms."""
    alone = Row("`elastic-run --standalone` to the start of the first worker", "≤ 0.9 s")
    member = Row("`elastic-run` to the same, as a member of a job", "≤ 0.3 s")
    for _ in range(times):
        for name in ("elastic-run", "torchrun"):
            argv, env = LAUNCHERS[name]
            with started(name, [*argv, "train.py", "out"], env) as job:
                alone.add(name, [_start_of(job.steady(2, 120), job.process.pid)])
        with cluster(1, replicas=1) as job:
            lines = job.steady(1, 120)
            member.add("elastic-run", [_start_of(lines, lines[0].parent)])
    return [alone, member]


def early_rows(deaths: int, never_s: float) -> list[Row]:
    """Measure recoveries of a job in which one rank kills itself after each third step.

    A job of torchrun with a tenth of the deaths runs before and after that of elastic-run.
    """
    row = Row("a rank dies after each third step: from the third death on", "≤ 1 s, median ≤ 0.3 s")
    early = Row("the same: the first two deaths", "")
    few = max(3, deaths // 10)
    jobs = (("torchrun, cured", few), ("elastic-run", deaths), ("torchrun, cured", few))
    for name, times in jobs:
        argv, env = LAUNCHERS[name]
        env = {**env, "DIES_AT": "3"}
        with contextlib.suppress(LostError), started(name, [*argv, "train.py", "out"], env) as job:

            def all_steps(rounds: int) -> list[list[list[Line]]] | None:
                found = [job.processes(rank) for rank in (0, 1)]
                return found if all(len(one) > rounds for one in found) else None

            for turn in range(times):
                found = until(partial(all_steps, turn + 1), f"round {turn + 2}", never_s)
                died = found[turn % 2][turn][-1].at
                took = max(one[turn + 1][0].at for one in found) - died
                (early if turn < 2 else row).add(name, [took])
    return [early, row]


def second_start_rows(times: int, numbers: Sequence[int]) -> list[Row]:
    """Measure the second start of a script with these numbers of workers, to the last rank's first
    step.
    """
    rows = []
    for workers in numbers:
        target = {1: "≤ 0.5 of torchrun's", 4: "≤ 0.35 of torchrun's"}.get(workers, "")
        row = Row(f"second start of the script, {counted(workers)}, to the first step", target)
        rows.append(row)
        flags = ["--standalone", f"--nproc-per-node={workers}", "train.py", "out"]
        with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as folder:
            env = {"DLROVER_CACHE_DIR": f"{folder}/cache", "DLROVER_LOG_LEVEL": "INFO"}
            kept = partial(started, env=env, again=Path(folder))
            argv = {name: [str(BIN / name), *flags] for name in ("elastic-run", "torchrun")}
            with kept("elastic-run", argv["elastic-run"]) as job:
                log = job.folder / "log"
                until(partial(_says, log, "recipe_kept"), "a recipe that is kept", 240)
            for _ in range(times):
                for name in argv:
                    began = time.monotonic()
                    with kept(name, argv[name]) as job:
                        lines = job.steady(workers, 240)
                        firsts = [job.first(r, one.pid).at for r, one in enumerate(lines)]
                        row.add(name, [max(firsts) - began])
    return rows


def compiled_rows(kills: int, never_s: float) -> list[Row]:
    """Kill workers of the example 02-gpt: compiled, also in one graph, and as it is.

    All share one cache of inductor. Only of a model in one graph does torch keep what AOTAutograd
    has made.
    """
    script = EXAMPLE.replace(
        "        step += 1\n",
        "        step += 1\n"
        "        with open(f'out/{rank}', 'a') as file:\n"
        "            me = os.getpid(), os.getppid()\n"
        "            print(time.monotonic(), step, world, *me, 0, file=file)\n",
    )
    target = "≤ 0.1 of torchrun's, ≤ 1.5 of that which is not compiled"
    compiled = Row("`kill -9` of one of 2 workers of 02-gpt, compiled", target)
    one_graph = Row("the same, compiled in one graph (`optimize_ddp = False`)", target)
    eager = Row("the same, not compiled", "")
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as cache:
        kill = partial(kill_workers, never_s=never_s, argv=["--steps=1000000"], pause_s=3)
        for name, count in (("elastic-run", kills), ("torchrun, cured", max(2, kills // 4))):
            for row, text in (
                (compiled, script.replace(*COMPILE)),
                (one_graph, script.replace(*COMPILE).replace(*ONE_GRAPH, 1)),
                (eager, script),
            ):
                env = {"TORCHINDUCTOR_CACHE_DIR": cache}
                row.add(f"{name}, idle", *kill(name, count, script=text, env=env))
    return [compiled, one_graph, eager]


def counted(workers: int) -> str:
    return "1 worker" if workers == 1 else f"{workers} workers"


def _says(log: Path, word: str) -> bool:
    return word in log.read_text(errors="replace")


def _start_of(lines: list[Line], launcher: int) -> float:
    workers = [psutil.Process(line.pid).create_time() for line in lines]
    return min(workers) - psutil.Process(launcher).create_time()


def memory() -> dict[str, float]:
    """Return the memory in megabytes: resident for agents, private for new workers.

    The memory of a worker is measured at its first line.
    """
    found = {}
    for name in ("elastic-run", "torchrun"):
        argv, env = LAUNCHERS[name]
        with started(name, [*argv, "train.py", "out", "private"], env) as job:
            before = job.steady(2, 120)
            if name == "elastic-run":
                warm(job)
            found[f"{name}: the agent, resident"] = _mb(psutil.Process(before[0].parent))
            if name == "elastic-run":
                job.recovery(before, 2, partial(os.kill, before[0].pid, signal.SIGKILL), 60)
                private = (job.folder / "private").read_text().split()
                found["a cold worker at its first line, private"] = int(private[0]) / 1024
                found["a forked worker at its first line, private"] = int(private[-1]) / 1024
                zygotes = [
                    p
                    for p in psutil.Process(job.process.pid).children()
                    if "zygote" in str(p.cmdline())
                ]
                found["the zygote, resident"] = _mb(zygotes[0])
    return found


def _mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def step_times(blocks: int, seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds per step of each launcher, one figure per block."""
    found: dict[str, list[float]] = {}
    for _ in range(blocks):
        for name in ("torchrun", "elastic-run", "warm elastic-run"):
            argv, env = LAUNCHERS[name.removeprefix("warm ")]
            with started(name, [*argv, "train.py", "out"], env) as job:
                before = job.steady(2, 120)
                if name != "torchrun":
                    warm(job)  # and the preparation is over
                if name.startswith("warm"):
                    job.recovery(before, 2, partial(os.kill, before[0].pid, signal.SIGKILL), 60)
                _pause.wait(2)
                one = job.steady(2, 10)[0]
                _pause.wait(seconds)
                two = job.steady(2, 10)[0]
                took = 1000 * (two.at - one.at) / (two.step - one.step)
                found.setdefault(name, []).append(took)
                say(f"step, {name}: {took:.3f} ms")
    return found


# --- The run ---


def table(rows: list[Row]) -> str:
    lines = ["| fault | target | launcher, load | min / median / max | never came back |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        for column, samples in row.samples.items():
            lost = row.lost.get(column, 0)
            of = f"{lost} of {lost + len(samples)}" if lost else "0"
            lines.append(f"| {row.what} | {row.target} | {column} | {spread(samples)} | {of} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of elastic-run, per block and load")
    parser.add_argument("--pause", type=float, default=0.5, help="s from a first step to the kill")
    parser.add_argument("--peer-kills", type=int, default=4, help="the same of the others")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--in-a-row", type=int, default=200, help="kills of one elastic-run job")
    parser.add_argument("--nodes", type=int, default=3, help="times that nodes are killed")
    parser.add_argument("--early", type=int, default=40, help="deaths after three steps")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="second starts of a script")
    parser.add_argument("--compiled", type=int, default=8, help="kills of a compiled 02-gpt")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4], help="the same: of each")
    parser.add_argument("--steps", type=int, default=3, help="blocks of step times")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--never", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="put the tables into docs/benchmarks.md"
    )
    args = parser.parse_args()
    # end the processes that were started, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    rows: list[Row] = []
    if args.blocks:
        rows.append(worker_rows(args.kills, args.peer_kills, args.blocks, args.never, args.pause))
    if args.in_a_row:
        many = Row(f"{args.in_a_row} such kills in a row, of one job", "none lost")
        many.add("elastic-run, idle", *kill_workers("elastic-run", args.in_a_row, args.never))
        rows.append(many)
    if args.nodes:
        rows += node_rows(args.nodes)
    if args.early:
        rows += early_rows(args.early, args.never)
    if args.starts:
        rows += start_rows(args.starts)
    if args.seconds:
        rows += second_start_rows(args.seconds, args.workers)
    if args.compiled:
        rows += compiled_rows(args.compiled, args.never)
    held = memory() if args.memory else {}
    steps = step_times(args.steps, 15.0) if args.steps else {}
    words = [
        f"`python benchmarks/recovery.py {' '.join(sys.argv[1:])}`  ",
        f"{_processor()}, {os.cpu_count()} cores shared with other work, "
        f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {version('torch')}, "
        f"{datetime.now(UTC):%Y-%m-%d}; {time.monotonic() - began:.0f} s in all.",
        "",
        table(rows),
        "",
        "| memory | MB |",
        "|---|---|",
        *(f"| {what} | {size:.0f} |" for what, size in held.items()),
        "",
        "| step of the script above | median | all |",
        "|---|---|---|",
        *(
            f"| {name} | {statistics.median(s):.3f} ms | {', '.join(f'{x:.3f}' for x in s)} |"
            for name, s in steps.items()
        ),
    ]
    text = "\n".join(words)
    print(text)
    if args.json:
        samples = {row.what: {"samples": row.samples, "lost": row.lost} for row in rows}
        args.json.write_text(json.dumps({"rows": samples, "memory": held, "steps": steps}))
    if args.write:
        write_section("recovery", text)


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        found = re.search(r"model name\s*: (.*)", file.read())
    return found[1].strip() if found else platform.machine()


if __name__ == "__main__":
    main()
