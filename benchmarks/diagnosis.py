"""Injects hangs and wrong values into small jobs; measures how soon and how rightly they are told.

    python benchmarks/diagnosis.py --quick

* *hangs*: a rank of a job of 2 nodes with 2 workers each hangs in one of eight ways
  (tests/programs/hang.py). The time runs from the injection to the event ``Hang``. The verdict is
  right if it names that rank and the expected kind. The job is told to wait for 3 s at least; its
  learned bound is about 5 s, because agents report once a second.
* *failures*: a rank of a job of 2 nodes fails in one of eight ways (benchmarks/fail.py). It counts
  if the event ``WorkerFailed`` names that rank and the expected class. The limit of memory is one
  of a control group (version 1), and the small file systems are mounts: both need root.
* *controls*: jobs without a hang, and one whose rank computes for 12 s within a step while the
  others wait. No hang may be told.
* *healthy*: 20 jobs of ten shapes that sleep (tests/programs/healthy.py) for three minutes each,
  four at a time, and one for ``--minutes``. No alarm of any kind may be raised.
* *computing*: the same for ten shapes that use the CPU: they evaluate, save, accumulate, exchange
  parts of other sizes, and collect garbage. One job at a time, for ``--each`` minutes.
* *wrong*: a job of 3 replicas under DDP (tests/programs/train_wrongly.py). In its first round a bit
  flips in the parameters of a rank, in the second one the loss of a rank becomes NaN. It counts if
  the event names that rank, and the next round continues from the last good checkpoint.
* *slowness*: a rank of a job of 2 nodes gets slow in one of six ways (benchmarks/slow_down.py),
  once the usual time of a step is known. The verdict is right if the event `Slow` has its class and
  names its node; for the network, that it concerns several nodes. Two ways need root: the CPU quota
  is one of a control group (version 1), and `tc` lowers the rate of a network namespace of its own.
* *spikes*: the detector of spikes is fed with simulated losses: healthy ones, whose noise has a
  heavy tail, and ones that leap to three times their value.
* *cost*: what is always on. The agent reads the CPU time of 8 workers once a second, and the
  master takes in one report of a node. Replicas are compared only if a job wants that.

Peers are published figures: nobody else's detector runs on gloo. ``--json`` prints only a list of
rows on standard output; ``--write`` puts the table into docs/benchmarks.md.
"""

import argparse
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml

from dlrover_agent.observation.snapshot import IdleClock
from dlrover_py.master.core.diagnosis.spikes import SpikeWatch
from dlrover_py.master.core.diagnosis.steps import StepClock
from dlrover_py.trainer.replica_check import digest
from tests.process.harness import document
from tests.programs.healthy import SHAPES, WORK

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- diagnosis: begin -->", "<!-- diagnosis: end -->"
PROGRAM = ROOT / "tests" / "programs" / "hang.py"
HEALTHY = ROOT / "tests" / "programs" / "healthy.py"
WRONG = ROOT / "tests" / "programs" / "train_wrongly.py"
LEAST_S = 3
KINDS = {
    "freeze": "frozen",
    "skip": "not-entered",
    "lock": "not-entered",
    "loader": "not-entered",
    "mismatch": "mismatch",
    "early": "mismatch",
    "files": "not-entered",
    "groups": "groups",
}
"""The kind of verdict that is expected of each injection."""
CONTROLS = ("none", "slow")
ALARMS = {"Hang", "Slow", "NotFinite", "Spike", "ReplicasDiffer", "NodeSlow", "LogRule"}
"""Reasons of the events that tell of a job that stands still, is slow or has wrong values."""
MEANINGS = {
    "freeze": "SIGSTOP of a rank",
    "skip": "a rank leaves out a collective",
    "lock": "a deadlock in the code of a rank",
    "loader": "the data loader of a rank blocks",
    "mismatch": "a rank calls another collective",
    "early": "the data of a rank end earlier",
    "files": "a rank opens a file whose server does not answer (FUSE)",
    "groups": "a rank calls the collectives of two groups in another order",
}
FAILURES = {
    "memory": ("a rank exceeds the memory limit of its control group", "host_out_of_memory"),
    "shm": ("a rank writes to a /dev/shm that is full", "host_out_of_memory"),
    "disk": ("a rank writes to a disk that is full", "storage"),
    "code": ("a rank raises a KeyError", "code_error"),
    "kill": ("a rank gets SIGKILL", "killed"),
    "term": ("a rank gets SIGTERM from outside", "preempted"),
    "device": ("the GPU of a rank has no memory left (the text of torch)", "device_out_of_memory"),
    "ecc": ("a rank has an uncorrectable ECC error (the text of CUDA)", "hardware"),
}
"""How a rank fails, and the class that is expected."""
SLOW = {
    "loader": ("the loader of a node blocks for half a step", "data"),
    "quota": ("half of the CPU time that a node uses, by a quota", "neighbour"),
    "slower-10": ("a rank computes 10 % longer", "machine"),
    "slower": ("a rank computes 50 % longer", "machine"),
    "gc": ("a rank collects garbage three times a step", "code"),
    "link": ("the network of all nodes has 40 Mbit/s", "link"),
}
"""What is injected, and the class that is expected."""
SLOW_AFTER_S = 160.0
"""Seconds until a rank gets slow: two windows are left out, and ten make the usual time."""
WORLD = 4
Row = dict[str, Any]


def row(
    what: str, target: str, ours: str, peers: str, met: bool | None, n: int, note: str = ""
) -> Row:
    """Return one line of the table.

    Args:
        what: what was measured.
        target: what is aimed at; empty if nothing is.
        ours: our figure.
        peers: published figures of others.
        met: whether the target is met; None without a target.
        n: how often it was measured.
        note: what else a reader should know.
    """
    values = (what, target, ours, peers, met, n, note)
    return dict(zip(("what", "target", "ours", "peers", "met", "n", "note"), values, strict=True))


def run(how: str, rank: int, step: int, steps: int, within_s: float) -> tuple[float, Any] | None:
    """Run a job until a hang is told or it ends; return the seconds and the verdict.

    Args:
        how: the injection.
        rank: the rank that hangs.
        step: the step at which it does.
        steps: number of steps of a job without a hang.
        within_s: seconds after which the job is stopped.

    Returns:
        None if no hang was told.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = {"diagnosis": {"hangSeconds": LEAST_S, "firstStepSeconds": 300}}
        command = ["elastic-run", "--nproc-per-node=2", str(PROGRAM), how, str(rank)]
        command += [str(step), str(steps)]
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(document(command, name="hang", spec=spec, replicas=2)))
        environ = {
            **os.environ,
            "DLROVER_STATE_DIR": str(folder / "state"),
            "DLROVER_RUNTIME_DIR": str(folder / "run"),
            "DLROVER_MASTER_LEASE_S": "30",
        }
        words = [str(Path(sys.executable).parent / "dlrover"), "job", "run", str(file), "--json"]
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        deadline = time.monotonic() + within_s
        told = 0.0
        try:
            for line in process.stdout:
                event = json.loads(line).get("event") or {}
                if event.get("reason") == "Hang":
                    told = datetime.fromisoformat(event["at"]).timestamp()
                    break
                if time.monotonic() > deadline:
                    break
            if not told:
                return None
            manifests: list[Path] = []
            while not manifests and time.monotonic() < deadline:
                manifests = sorted((folder / "state").glob("*/evidence/*/manifest.json"))
            documents = [json.loads(path.read_text()) for path in manifests]
            verdict = next(d["verdict"] for d in documents if d.get("verdict"))
            return told - float((folder / "hang-began").read_text()), verdict
        finally:
            process.terminate()
            process.communicate(timeout=120)


def hangs(times: int, seed: int, ways: Sequence[str]) -> list[Row]:
    """Inject each of these hangs so many times, at a random rank and step."""
    draw = random.Random(seed)
    rows, every, right_in_all = [], [], 0
    for how in ways:
        kind = KINDS[how]
        seconds, right = [], 0
        for _ in range(times):
            rank, step = draw.randrange(WORLD), draw.randrange(90, 150)
            found = run(how, rank, step, 100_000, 180.0)
            print(f"{how} at rank {rank}: {found}", file=sys.stderr)
            if found is not None:
                seconds.append(found[0])
                # In a deadlock of groups, all ranks wait for each other.
                named = (
                    rank in found[1]["ranks"] if how == "groups" else found[1]["ranks"] == [rank]
                )
                right += named and found[1]["kind"] == kind
        every += seconds
        right_in_all += right
        ours = f"{statistics.median(seconds):.1f} s" if seconds else "not told"
        ours += f", right rank and kind {right} of {times}"
        limit = 5.0 + 5.0
        met = right == times and bool(seconds) and max(seconds) <= limit
        peers = "ByteRobust 10–30 s; NCCL's watchdog 10 min; torchrun never"
        rows.append(row(MEANINGS[how], "≤ bound + 5 s", ours, peers, met, times))
    total = times * len(ways)
    ours = f"{right_in_all} of {total}"
    rows.append(
        row("right rank and kind", "≥ 19 of 20", ours, "", right_in_all >= 0.95 * total, total)
    )
    return rows


def failure(how: str, rank: int, number: int) -> str:
    """Run a job of 2 nodes in which a rank fails; return the message of the first failure.

    Args:
        how: how it fails.
        rank: the rank.
        number: number of this run, for names.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        group = Path(f"/sys/fs/cgroup/memory/dlrover-bench-{os.getpid()}-{number}")
        words = [str(Path(sys.executable).parent / "elastic-run"), str(ROOT / "benchmarks/fail.py")]
        words += [how, str(rank)]
        if how == "memory":
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(1 << 30))
            enter = (
                f"if [ $DLROVER_NODE_ID = n{rank} ]; then echo $BASHPID > {group}/cgroup.procs; fi"
            )
            words = ["bash", "-c", f'{enter}; exec "$@"', "bash", *words]
        file = folder / "job.yaml"
        described = document(words, name="fail", replicas=2, restartCount=0)
        file.write_text(yaml.safe_dump(described))
        environ = {
            **os.environ,
            "DLROVER_STATE_DIR": str(folder / "state"),
            "DLROVER_RUNTIME_DIR": str(folder / "run"),
            "DLROVER_MASTER_LEASE_S": "30",
            "OMP_NUM_THREADS": "1",
        }
        command = [str(Path(sys.executable).parent / "dlrover"), "job", "run", str(file), "--json"]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environ,
                text=True,
                capture_output=True,
                timeout=300,
                check=False,
            )
        finally:
            if group.exists():
                group.rmdir()
    events = [json.loads(line).get("event") or {} for line in done.stdout.splitlines()]
    told = [event["message"] for event in events if event.get("reason") == "WorkerFailed"]
    return told[0] if told else f"not told: {done.stderr[-500:]}"


def failures(times: int, seed: int, ways: Sequence[str]) -> list[Row]:
    """Let a rank fail in each of these ways so many times."""
    draw = random.Random(seed)
    rows, right_in_all = [], 0
    for how in ways:
        meaning, expected = FAILURES[how]
        right = 0
        for number in range(times):
            rank = draw.randrange(2)
            told = failure(how, rank, number)
            print(f"{how} at rank {rank}: {told}", file=sys.stderr)
            right += f"(rank {rank})" in told and f". {expected} (" in told
        right_in_all += right
        ours, note = f"right rank and class {right} of {times}", f"class `{expected}`"
        rows.append(row(meaning, "all", ours, "", right == times, times, note))
    total = times * len(ways)
    ours = f"{right_in_all} of {total}"
    what = "failure: right rank and class"
    return [*rows, row(what, "all", ours, "", right_in_all == total, total)]


def controls(times: int) -> list[Row]:
    """Run jobs in which no rank hangs."""
    told = 0
    for _ in range(times):
        for how in CONTROLS:
            told += run(how, 1, 100 if how == "slow" else 100_000, 300, 240.0) is not None
    total = times * len(CONTROLS)
    target = "0"
    note = "half of them with a rank that computes for 12 s in one step"
    return [
        row("healthy jobs: hangs told", target, f"{told} of {total}", "", not told, total, note)
    ]


def alarms_of(shape: str, seconds: float) -> list[str]:
    """Run a healthy job of 2 nodes to its end; return the messages of the alarms about it.

    Raises:
        SystemExit: the job has failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = ["elastic-run", str(HEALTHY), shape, str(seconds)]
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(document(command, name="healthy", replicas=2)))
        environ = {
            **os.environ,
            "DLROVER_STATE_DIR": str(folder / "state"),
            "DLROVER_RUNTIME_DIR": str(folder / "run"),
            "OMP_NUM_THREADS": "1",
        }
        words = [str(Path(sys.executable).parent / "dlrover"), "job", "run", str(file), "--json"]
        with (folder / "errors").open("w") as errors:
            done = subprocess.run(
                words, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=errors
            )
        if done.returncode:
            raise SystemExit(f"{shape}: {done.stdout[-2000:]}{(folder / 'errors').read_text()}")
        events = [json.loads(line).get("event") or {} for line in done.stdout.splitlines()]
        return [f"{shape}: {e['message']}" for e in events if e.get("reason") in ALARMS]


def healthy(seconds: float, minutes: float) -> list[Row]:
    """Run healthy jobs of all shapes, each twice for some seconds, and one for some minutes."""
    with ThreadPoolExecutor(5) as pool:
        long = pool.submit(alarms_of, "noisy", 60 * minutes)
        short = [
            alarm
            for found in pool.map(alarms_of, 2 * list(SHAPES), [seconds] * 2 * len(SHAPES))
            for alarm in found
        ]
        shown = [*short, *long.result()]
    for alarm in shown:
        print(alarm, file=sys.stderr)
    total = 2 * len(SHAPES)
    return [
        row(
            f"alarms of any kind in {total} healthy jobs of {seconds / 60:g} minutes and one of "
            f"{minutes:g} minutes",
            "0",
            f"{len(shown)}",
            "Lablup 0.84 a day; Greyhound 0 on its trace",
            not shown,
            total + 1,
            f"ten shapes, five jobs at a time on {os.cpu_count()} CPUs",
        )
    ]


def computing(minutes: float, times: int, shapes: Sequence[str]) -> list[Row]:
    """Run healthy jobs of these shapes, each so often for some minutes, one after the other."""
    alarms = []
    for shape in times * list(shapes):
        found = alarms_of(shape, 60 * minutes)
        print(f"{shape}: {found or 'no alarm'}", file=sys.stderr)
        alarms += found
    total = times * len(shapes)
    hours = total * minutes / 60
    # With no alarm in a time, the rate is below 3 in that time with a confidence of 95 %.
    rate = f"{24 * max(3, len(alarms)) / hours:.0f} a day at most (95 %), in {hours:.1f} h"
    return [
        row(
            f"alarms of any kind in {total} healthy jobs that use the CPU, each of {minutes:g} "
            "minutes",
            "0",
            f"{len(alarms)}; {rate}",
            "Lablup 0.84 a day; Greyhound 0 on its trace",
            not alarms,
            total,
            f"{len(shapes)} shapes on {os.cpu_count()} CPUs",
        )
    ]


def cpu_group(number: int) -> Path:
    """Make a control group for the CPU time of one node, and return its folder."""
    group = Path(f"/sys/fs/cgroup/cpu/dlrover-bench-{os.getpid()}-{number}")
    group.mkdir()
    return group


def slow_job(how: str, number: int, within_s: float) -> tuple[float, str] | None:
    """Run a job until it is told to be slow; return the seconds and the message.

    Args:
        how: the injection, at the node of rank 1.
        number: number of this run, for names.
        within_s: seconds after which the job is stopped.

    Returns:
        None if nothing was told after the injection.
    """
    script = str(Path(sys.executable).parent / "elastic-run")
    start = f"exec {script} {ROOT / 'benchmarks/slow_down.py'} {how} 1 {SLOW_AFTER_S}"
    group = cpu_group(number) if how == "quota" else None
    if group is not None:
        enter = f"echo $BASHPID > {group}/cgroup.procs; export SLOW_GROUP={group}"
        start = f"if [ $DLROVER_NODE_ID = n1 ]; then {enter}; fi; {start}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "job.yaml"
        command = ["bash", "-c", start]
        file.write_text(yaml.safe_dump(document(command, name="slow", replicas=2)))
        environ = {
            **os.environ,
            "DLROVER_STATE_DIR": str(folder / "state"),
            "DLROVER_RUNTIME_DIR": str(folder / "run"),
            "DLROVER_MASTER_LEASE_S": "30",
            "OMP_NUM_THREADS": "1",
        }
        words = [str(Path(sys.executable).parent / "dlrover"), "job", "run", str(file), "--json"]
        if how == "link":
            up = 'ip link set lo mtu 1500 up; exec "$@"'
            words = ["unshare", "--net", "bash", "-c", up, "bash", *words]
        errors = (folder / "errors").open("w")
        process = subprocess.Popen(
            words, cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None
        deadline, began = time.monotonic() + within_s, folder / "slow-began"
        try:
            for line in process.stdout:
                event = json.loads(line).get("event") or {}
                if event.get("reason") == "Slow" and began.exists():
                    told = datetime.fromisoformat(event["at"]).timestamp()
                    return told - float(began.read_text()), event["message"]
                if time.monotonic() > deadline:
                    break
            return None
        finally:
            process.terminate()
            process.communicate(timeout=120)
            errors.close()
            if group is not None:
                group.rmdir()


def slowness(times: int, ways: Sequence[str]) -> list[Row]:
    """Make a rank slow in each of these ways so many times; three jobs run at the same time."""
    runs = [how for how in ways for _ in range(times)]
    with ThreadPoolExecutor(3) as pool:
        given = [runs, range(len(runs)), [SLOW_AFTER_S + 300.0] * len(runs)]
        found = list(zip(runs, pool.map(slow_job, *given), strict=True))
    rows, all_right = [], 0
    for how in ways:
        meaning, kind = SLOW[how]
        mine = [one for name, one in found if name == how and one is not None]
        where = "several nodes" if how == "link" else "node n1"
        right = sum(f": {kind}." in message and where in message for _, message in mine)
        all_right += right
        for late, message in mine:
            print(f"{how}: after {late:.0f} s: {message}", file=sys.stderr)
        seconds = [seconds for seconds, _ in mine]
        ours = f"{statistics.median(seconds):.0f} s" if seconds else "not told"
        met = right == times and all(one <= 60 for one in seconds)
        note = f"class `{kind}`"
        ours += f", right class and node {right} of {times}"
        rows.append(row(f"slow: {meaning}", "≤ 60 s", ours, "Greyhound < 5 s", met, times, note))
    total, rate = times * len(ways), "compute 100 %, link 99 % (Greyhound)"
    ours = f"{all_right} of {total}"
    met = all_right >= 0.9 * total
    return [*rows, row("slow: right class and node", "≥ 18 of 20", ours, rate, met, total)]


def wrong(times: int, seed: int) -> list[Row]:
    """Let a bit flip, and a loss become NaN, at random ranks and steps."""
    draw = random.Random(seed)
    named, restored, told_s, finite = 0, 0, [], 0
    for _ in range(times):
        flip_rank, flip_step = draw.randrange(3), draw.randrange(11, 20)
        nan_rank, nan_step = draw.randrange(3), draw.randrange(22, 29)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            store = folder / "checkpoints"
            numbers = map(str, (flip_rank, flip_step, nan_rank, nan_step, 30))
            command = ["elastic-run", "--nproc-per-node=3", str(WRONG), str(store), *numbers]
            spec = {"diagnosis": {"wrong": "rollback"}, "checkpoint": {"compareEvery": 5}}
            file = folder / "job.yaml"
            described = document(command, name="wrong", spec=spec, replicas=1, restartCount=3)
            file.write_text(yaml.safe_dump(described))
            environ = {
                **os.environ,
                "DLROVER_STATE_DIR": str(folder / "state"),
                "DLROVER_RUNTIME_DIR": str(folder / "run"),
                "DLROVER_MASTER_LEASE_S": "30",
            }
            words = [str(Path(sys.executable).parent / "dlrover"), "job", "run", str(file)]
            done = subprocess.run(
                [*words, "--json"],
                cwd=folder,
                env=environ,
                text=True,
                capture_output=True,
                timeout=300,
                check=False,
            )
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            events = {e["reason"]: e for line in lines if (e := line.get("event"))}
            said = Path(f"{store}.said").read_text()
        began = dict(re.findall(r"round (\d) continues from (\d+)", said))
        flip, nan = events.get("ReplicasDiffer", {}), events.get("NotFinite", {})
        named += f"rank {flip_rank} (node n0) differ" in flip.get("message", "")
        restored += began.get("2") == "10"
        finite += f"loss of rank {nan_rank} (node n0) is nan" in nan.get("message", "")
        if nan:
            at = float(re.findall(r"nan at (\S+)", said)[0])
            told_s.append(datetime.fromisoformat(nan["at"]).timestamp() - at)
    flipped = f"right rank {named}, restored {restored} of {times}"
    note = "a bit of the parameters, compared every 5 steps"
    late = f"{statistics.median(told_s):.2f} s" if told_s else "not told"
    return [
        row(
            "a flipped bit in one of 3 replicas: rank named, certified checkpoint restored",
            "all",
            flipped,
            "SCOUT 344 of 344 (GPU)",
            named == restored == times,
            times,
            note,
        ),
        row(
            "a loss that becomes NaN on one rank",
            "all",
            f"{late}, right rank {finite} of {times}",
            "ByteRobust: at once",
            finite == times,
            times,
        ),
    ]


def spikes(times: int, seed: int) -> list[Row]:
    """Feed the detector with simulated losses: healthy ones, and ones that leap."""
    draw = random.Random(seed)
    alarms = found = 0
    steps = 2000
    for _ in range(times):
        noise, decay, floor = draw.uniform(0.01, 0.5), draw.uniform(10, 2000), draw.uniform(0, 5)
        values = [
            (floor + 10 * math.exp(-step / decay)) * math.exp(draw.gauss(0, noise))
            for step in range(steps)
        ]
        watch = SpikeWatch()
        for step, value in enumerate(values):
            watch.saw(step, value)
            alarms += watch.leap is not None
        quiet, at = SpikeWatch(), draw.randrange(100, steps)
        for step in range(at + 3):
            level = 3.0 if step >= at else 1.0
            quiet.saw(step, level * math.exp(draw.gauss(0, 0.05)))
        found += quiet.leap is not None and quiet.leap[0] == at
    note = f"{times} simulated losses of {steps} values, with lognormal noise of up to 50 %"
    return [
        row("healthy losses: spikes told", "0", f"{alarms}", "", not alarms, times, note),
        row(
            "a leap to three times the loss, with 5 % noise",
            "≥ 19 of 20",
            f"{found} of {times}, at the third value",
            "",
            found >= 0.95 * times,
            times,
        ),
    ]


def comparison() -> list[Row]:
    """Measure the digest of parameters."""
    tensors = [torch.randn(1024, 1024) for _ in range(64)]
    nbytes = sum(t.nbytes for t in tensors)
    digest(tensors)
    times = 10
    began = time.perf_counter()
    for _ in range(times):
        digest(tensors)
    rate = times * nbytes / (time.perf_counter() - began)
    ours = f"{rate / 1e9:.1f} GB/s of parameters on {torch.get_num_threads()} CPUs"
    note = "once in `compareEvery` steps, off by default"
    return [row("cost of a comparison of replicas", "", ours, "", None, times, note)]


def cost() -> list[Row]:
    """Measure what is always on."""
    clock, pids = IdleClock(), [os.getpid()] * 8
    now = [0.0]
    clock._clock = lambda: now[0]
    times = 2000
    began = time.process_time()
    for _ in range(times):
        now[0] += 1.0
        clock.seconds(pids)
    agent = (time.process_time() - began) / times
    steps = StepClock(least_s=30.0, first_s=600.0)
    began = time.process_time()
    for step in range(times):
        steps.saw(step, None, float(step))
        assert steps.due
    master = (time.process_time() - began) / times
    ours = f"{100 * agent:.3f} % of a core in the agent, {1e6 * master:.0f} µs per report"
    note = "8 workers, a report each second; the thread in a worker sleeps"
    return [
        row(
            "cost of what is always on",
            "≤ 0.3 %",
            ours,
            "Greyhound 0.39 %",
            agent < 0.003,
            times,
            note,
        )
    ]


def table(rows: list[Row], quick: bool) -> str:
    """Return the rows as a table of Markdown, with command, commit, machine and date."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    flags = " --quick" if quick else ""
    head = [
        f"`python benchmarks/diagnosis.py{flags}`, commit {commit}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}.",
        "",
        "| what | target | ours | published by others | n |",
        "| --- | --- | --- | --- | --- |",
    ]
    body = [
        f"| {r['what']}{' (' + r['note'] + ')' if r['note'] else ''} | {r['target']} | "
        f"{r['ours']} | {r['peers']} | {r['n']} |"
        for r in rows
    ]
    return "\n".join([*head, *body])


def main() -> None:
    """Measure, and print the table or the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each injection once")
    parser.add_argument("--json", action="store_true", help="print rows as JSON only")
    parser.add_argument(
        "--write", action="store_true", help="put the table into docs/benchmarks.md"
    )
    parts = ["hangs", "failures", "controls", "healthy", "computing", "slowness", "wrong"]
    parts += ["spikes", "cost"]
    parser.add_argument("--only", choices=parts)
    parser.add_argument(
        "--ways", help="which ones, with --only hangs, failures, computing or slowness"
    )
    parser.add_argument("--times", type=int, help="how often each injection is made")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the longest healthy job")
    parser.add_argument("--each", type=float, default=5.0, help="minutes of each computing job")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rows = []

    def often(usually: int) -> int:
        return args.times or (1 if args.quick else usually)

    def ways(known: Iterable[str]) -> list[str]:
        return args.ways.split(",") if args.ways else list(known)

    if args.only in (None, "hangs"):
        rows += hangs(often(4), args.seed, ways(KINDS))
    if args.only in (None, "failures"):
        rows += failures(often(4), args.seed, ways(FAILURES))
    if args.only in (None, "controls"):
        rows += controls(often(5))
    if args.only == "healthy" or (args.only is None and not args.quick):
        rows += healthy(180.0, args.minutes)
    if args.only == "computing" or (args.only is None and not args.quick):
        rows += computing(args.each, often(2), ways(WORK))
    if args.only in (None, "slowness"):
        rows += slowness(often(4), ways(SLOW))
    if args.only in (None, "wrong"):
        rows += wrong(often(20), args.seed)
    if args.only in (None, "spikes"):
        rows += spikes(20 if args.quick else 1000, args.seed)
    if args.only in (None, "cost"):
        rows += [*cost(), *comparison()]
    text = table(rows, args.quick)
    sys.stdout.write((json.dumps(rows) if args.json else text) + "\n")
    if args.write:
        page = DOCS.read_text()
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
