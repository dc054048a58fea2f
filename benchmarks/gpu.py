"""Measures a kill of a worker until the next step, by phase, on GPUs or on CPUs.

A DDP script (gpu_worker.py) runs under ``elastic-run`` on this machine, with one worker for each
GPU. A worker is killed again and again. A figure is the longest of all ranks. The phases are:

- detect: from the kill until the agent starts the workers of the next round;
- fork: until the script's first line;
- imports: until the script's imports are over;
- context: until the device has done its first operation (CUDA's context; on CPUs nothing);
- collectives: until the first all-reduce is over (NCCL's communicators; on CPUs gloo's);
- load: until the model has the last state, which each node has in memory;
- step: until the first step is over.

The whole time of torchrun, with the same script, is measured in the same run. ``--device cpu`` runs
the same on CPUs with gloo. Without a CUDA device, ``--device cuda`` ends with exit code 3.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import write_section
from benchmarks.recovery import LostError, until
from benchmarks.scale import machine

BIN = Path(sys.executable).parent
WORKER = Path(__file__).with_name("gpu_worker.py")
PHASES = ("detect", "fork", "imports", "context", "collectives", "load", "step")
NO_DEVICE = 3
"""Exit code if there is no CUDA device."""
LAUNCHERS = {
    "elastic-run": [str(BIN / "elastic-run")],
    "elastic-run --cold-start": [str(BIN / "elastic-run"), "--cold-start"],
    "torchrun": [str(BIN / "torchrun")],
}


def devices() -> list[str]:
    """Return the names of the CUDA devices, without a CUDA context in this process."""
    code = "import torch.cuda as c; [print(c.get_device_name(i)) for i in range(c.device_count())]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


class Run:
    """A job of one node that is killed again and again."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]", workers: int) -> None:
        self._folder, self._process, self._workers = folder, process, workers

    def _lines(self, rank: int) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError):
            text = (self._folder / str(rank)).read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return []

    def started(self, not_pids: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Wait until all ranks have made a step in new processes; return their lines."""

        def look() -> list[dict[str, Any]] | None:
            if self._process.poll() is not None:
                raise LostError(f"the launcher has ended with code {self._process.returncode}")
            newest = [lines[-1] for r in range(self._workers) if (lines := self._lines(r))]
            new = len(newest) == self._workers and not {x["pid"] for x in newest} & {*not_pids}
            return newest if new else None

        return until(look, "a step of all ranks", 300)

    def logged(self, event: str) -> list[float]:
        """Return when the agent logged an event, by the clock of ``time.monotonic()``."""
        offset = time.monotonic() - time.time()
        lines = (self._folder / "log").read_text(errors="replace").splitlines()
        found = (json.loads(x)["at"] for x in lines if f'"event": "{event}"' in x)
        return [datetime.fromisoformat(at).timestamp() + offset for at in found]

    def kill(self, number: int) -> dict[str, float]:
        """Kill a worker; return the seconds of each phase, and ``all`` of them."""
        before = self.started()
        time.sleep(0.5)  # some steps, the last of which is in the node's memory
        killed = time.monotonic()
        os.kill(before[number % self._workers]["pid"], signal.SIGKILL)
        after = self.started([x["pid"] for x in before])
        ends = {phase: max(x["over"][phase] for x in after) for phase in after[0]["over"]}
        found = {"all": ends["step"] - killed}
        if orders := [at for at in self.logged("workers_start") if at > killed]:
            ends = {"detect": orders[0], "fork": ends.pop("script"), **ends}
            begins = [killed, *ends.values()]
            found |= {p: ends[p] - begin for p, begin in zip(PHASES, begins, strict=False)}
        return found


@contextmanager
def job(launcher: str, args: argparse.Namespace) -> Iterator[Run]:
    """Run the script under a launcher until the context ends."""
    with tempfile.TemporaryDirectory(prefix="gpu-") as name, open(f"{name}/log", "wb") as log:
        words = ["--standalone", f"--nproc-per-node={args.workers}", "--max-restarts=100000"]
        script = [str(WORKER), name, args.device, str(args.width)]
        env = {**os.environ, "DLROVER_LOG_LEVEL": "INFO", "DLROVER_CACHE_DIR": "none"}
        process = subprocess.Popen(
            [*LAUNCHERS[launcher], *words, *script], env=env, stdout=log, stderr=log
        )
        run = Run(Path(name), process, args.workers)
        try:
            run.started()
            if launcher == "elastic-run":
                until(lambda: run.logged("zygote_ready"), "a zygote", 180)
            yield run
        except LostError as error:
            tail = Path(name, "log").read_text(errors="replace")[-1500:]
            raise SystemExit(f"{launcher}: {error}\n{tail}") from error
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            process.kill()
            process.wait()


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Kill workers under each launcher in turn; return the samples by launcher."""
    samples: dict[str, list[dict[str, float]]] = {}
    for launcher in LAUNCHERS:
        kills = args.kills if launcher == "elastic-run" else args.peer_kills
        if kills:
            with job(launcher, args) as run:
                samples[launcher] = [run.kill(number) for number in range(kills)]
    return samples


def rows_of(samples: dict[str, list[dict[str, float]]], where: str) -> list[dict[str, Any]]:
    """Return the rows of the table: each phase, and the whole time beside that of the others."""
    ours = samples["elastic-run"]
    peers = {
        name: round(statistics.median(one["all"] for one in found), 3)
        for name, found in samples.items()
        if name != "elastic-run"
    }
    rows = []
    for phase in ("all", *PHASES):
        values = [one[phase] for one in ours if phase in one]
        what = "kill → next step" if phase == "all" else f"… of it {phase}"
        spread = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        rows.append(
            {
                "what": what,
                "target": None,
                "ours": {name: round(value, 3) for name, value in spread.items()},
                "peers": peers if phase == "all" else {},
                "met": None,
                "n": len(values),
                "note": where,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| what | min / median / max | others, median |", "| --- | --- | --- |"]
    for row in rows:
        ours = " / ".join(f"{value:.3f}" for value in row["ours"].values())
        peers = "; ".join(f"{name}: {value:.2f} s" for name, value in row["peers"].items()) or "–"
        lines.append(f"| {row['what']} | {ours} s (n={row['n']}) | {peers} |")
    return "\n".join(lines)


def main() -> int:
    """Measure, and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, help="default: one for each GPU; 2 on CPUs")
    parser.add_argument("--width", type=int, default=512, help="of the model's layers")
    parser.add_argument("--kills", type=int, default=10, help="of elastic-run")
    parser.add_argument("--peer-kills", type=int, default=3, help="of the others")
    parser.add_argument("--quick", action="store_true", help="fewer kills")
    parser.add_argument("--json", action="store_true", help="print rows as JSON only")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.peer_kills = min(args.kills, 3), min(args.peer_kills, 1)
    found = devices() if args.device == "cuda" else []
    if args.device == "cuda" and not found:
        sys.stderr.write(
            "error: torch finds no CUDA device on this machine, so nothing was measured\n"
            "hint: run this where `nvidia-smi` lists a GPU, with a CUDA build of torch; "
            "`--device cpu` runs the same on CPUs with gloo\n"
        )
        return NO_DEVICE
    args.workers = args.workers or len(found) or 2
    if args.device == "cuda" and args.workers > len(found):
        parser.error(f"--workers {args.workers}: NCCL needs a GPU for each, found {len(found)}")
    where = f"{args.workers} workers, " + (", ".join(sorted(set(found))) or "CPUs with gloo")
    rows = rows_of(measure(args), where)
    if args.json:
        print(json.dumps(rows))
        return 0
    text = "\n".join(
        [
            f"`python benchmarks/gpu.py {' '.join(sys.argv[1:])}`: {where}; torch "
            f"{version('torch')}; {machine()}.",
            "",
            table(rows),
        ]
    )
    print(text)
    if args.write:
        write_section(f"gpu-{args.device}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
