"""``make demo``: train a small GPT on three local nodes, and break them on purpose.

An elastic job of three nodes and a standby trains 02-gpt on the Python standard library's source.
While it trains, a worker is killed, then a node, then the master; the standby takes the node's
place, and a new host brings the next standby. The same training then runs once more with nobody
hurting it, and both results are compared.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from dlrover_py.net.http_client import HttpClient
from dlrover_py.protocol.local import Snapshot
from dlrover_py.protocol.status import JobEvent, JobStatus, NodeRole, NodeStatus

EXAMPLE = Path(__file__).parent / "02-gpt"
BIN = Path(sys.executable).parent
NAME = "demo"
DEADLINE_S = 300.0
STEP_DELAY_S = 0.2
"""Two cores have time for the imports of what is to start warm, beside three workers that train."""

console = Console(highlight=False)


class Run:
    """The job, in folders of its own."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.env = os.environ | {
            "DLROVER_RUNTIME_DIR": str(folder / "run"),
            "DLROVER_STATE_DIR": str(folder / "state"),
        }
        job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
        job["metadata"]["name"] = NAME
        container = job["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"][0]
        script = str(EXAMPLE / "train.py")
        slow = f"--step-delay={STEP_DELAY_S:g}"
        container["command"] = ["elastic-run", script, *self.arguments(steps, "elastic"), slow]
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        self.log = (folder / "job.log").open("w")
        self.process = subprocess.Popen(
            [str(BIN / "dlrover"), "job", "run", str(file), "--nodes", "4", "--plain"],
            env=self.env,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self._client = HttpClient(f"unix:{folder}/run/{NAME}/cluster.sock")
        self._said = 0

    def arguments(self, steps: int, kind: str) -> list[str]:
        """Of the script."""
        ckpt, out = self.folder / f"ckpt-{kind}", self.folder / f"{kind}.json"
        return [f"--steps={steps}", f"--ckpt={ckpt}", f"--out={out}"]

    def call(self, method: str, path: str) -> bytes:
        """Call the cluster."""

        async def once() -> bytes:
            try:
                return await self._client.call(method, path, deadline_s=10)
            finally:
                self._client.close()

        return asyncio.run(once())

    def until(self, good: Callable[[JobStatus], bool], what: str) -> Snapshot:
        """Wait, and tell what happens meanwhile."""
        deadline = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while True:
            if (self.folder / "run" / NAME / "cluster.sock").exists():
                snapshot = Snapshot.model_validate_json(self.call("GET", "/v1/job"))
                status = snapshot.status
                if status is not None:
                    self._tell(status.events)
                    if good(status):
                        return snapshot
            if self.process.poll() is not None:
                raise SystemExit(f"the job ended before {what}; see {self.folder}/job.log")
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} did not come within {DEADLINE_S:g} s")
            pause.wait(0.1)

    def _tell(self, events: list[JobEvent]) -> None:
        for event in events:
            if event.id > self._said:
                self._said = event.id
                style = "yellow" if event.type == "Warning" else "dim"
                console.print(f"    {event.reason}: {event.message}", style=style, markup=False)


def warm(status: JobStatus) -> bool:
    """Workers that start again on any of the nodes have their imports already."""
    return all(node.warm for node in status.nodes if node.role is not NodeRole.NONE)


def at_step(step: int, *, round_after: int = 0) -> Callable[[JobStatus], bool]:
    """The training has come so far, in a round after this one, and all its workers are known."""

    def good(s: JobStatus) -> bool:
        return (
            s.round > round_after
            and s.progress is not None
            and s.progress.step >= step
            and known(s)
        )

    return good


def known(status: JobStatus) -> bool:
    """Each member has told which processes its workers are in this round."""
    return all(n.pids and all(n.pids) and n.workers != "stopping" for n in members(status))


def trained(status: JobStatus, more: int) -> int:
    """The step that lies so many further."""
    return (status.progress.step if status.progress is not None else 0) + more


def main() -> int:
    """Run the demo; return 0 if the training came out right."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=240, help="of the training (default: 240)")
    p.add_argument("--keep", action="store_true", help="keep the folder with logs and results")
    args = p.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    run = Run(folder, args.steps)
    try:
        return show(run, args.steps)
    finally:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)
            run.process.wait(timeout=60)
        run.log.close()
        if args.keep:
            console.print(f"everything is in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def show(run: Run, steps: int) -> int:
    """The acts of the demo."""
    console.rule("An elastic job: three nodes and a standby, training a small GPT")
    # Before their imports are at hand, workers start as slowly as anywhere; that is soon over.
    long_enough = at_step(steps // 2)
    begun = run.until(lambda s: at_step(15)(s) and (warm(s) or long_enough(s)), "step 15")
    status = status_of(begun)

    victim = member(status, 1)
    console.print(f"\n[bold]kill -9[/] the worker of {victim.id} (pid {victim.pids[0]})")
    os.kill(victim.pids[0], signal.SIGKILL)
    status = status_of(run.until(at_step(1, round_after=status.round), "the next round"))
    status = status_of(run.until(at_step(trained(status, 15)), "some more steps"))

    victim = member(status, 0)
    console.print(f"\n[bold]kill[/] the whole node {victim.id}, which has rank 0")
    run.call("POST", f"/v1/nodes/{victim.id}/kill")
    run.call("POST", "/v1/hosts?count=1")
    status = status_of(run.until(at_step(1, round_after=status.round), "the next round"))
    snapshot = run.until(at_step(trained(status, 15)), "some more steps")

    pids = worker_pids(status_of(snapshot))
    console.print(f"\n[bold]kill -9[/] the master (pid {snapshot.master_pid})")
    os.kill(snapshot.master_pid, signal.SIGKILL)
    term = status_of(snapshot).term
    status = status_of(
        run.until(lambda s: s.term > term and s.ready >= 4 and known(s), "a new master")
    )
    untouched = worker_pids(status) == pids

    status = status_of(run.until(lambda s: s.phase.ended, "the end"))
    code = run.process.wait(timeout=60)
    why = ["job", "why", NAME, "--round", str(status.round)]
    console.print(f"\n[bold]dlrover {' '.join(why)}[/]: the chain of causes behind the last round")
    subprocess.run(
        [str(BIN / "dlrover"), *why], check=False, env=run.env, stderr=subprocess.DEVNULL
    )
    console.print("\nthe same training, with nobody hurting it:")
    reference = subprocess.run(
        [
            str(BIN / "elastic-run"),
            "--standalone",
            "--nproc-per-node=3",
            str(EXAMPLE / "train.py"),
            *run.arguments(steps, "reference"),
        ],
        check=False,
        env=run.env | {"OMP_NUM_THREADS": "1"},
    )
    if code or reference.returncode:
        console.print(f"[red]the job ended with {code}, the reference with {reference.returncode}")
        return 1
    return report(run, status, untouched)


def report(run: Run, status: JobStatus, untouched: bool) -> int:
    """What happened: when, why, how long it took, what was lost."""
    by_id = {e.id: e for e in status.events}
    start = status.started_at
    table = Table(title="What happened")
    for column in ("at", "what, and why", "next step after", "steps repeated"):
        table.add_column(column)
    formed = {e.round: e for e in status.events if e.reason == "RoundFormed" and e.round}
    resumed = {e.round: e for e in status.events if e.reason == "TrainingResumed" and e.round}
    for number, event in formed.items():
        if number == 1:
            continue
        cause = by_id.get(event.cause or 0, event)
        again = resumed.get(number)
        words = again.message.rpartition(": ")[2] if again is not None else ""
        table.add_row(
            f"{cause.at - start:.0f} s",
            cause.message,
            f"{again.took_s:.1f} s" if again is not None and again.took_s is not None else "",
            words.split(" ")[0].replace("no", "0"),
        )
    for event in status.events:
        if event.reason == "MasterStarted":
            words = "no worker was touched" if untouched else "[red]workers were restarted"
            table.add_row(f"{event.at - start:.0f} s", f"the master was killed: {words}")
    console.print(table)
    mine = json.loads((run.folder / "elastic.json").read_text())
    other = json.loads((run.folder / "reference.json").read_text())
    difference = abs(mine["loss"] - other["loss"])
    right = mine["step"] == other["step"] and difference < 1e-3 and untouched
    console.print(
        f"final loss {mine['loss']:.6f} after {mine['step']} steps; undisturbed "
        f"{other['loss']:.6f}: a difference of {difference:.1e}"
    )
    console.print(
        "lost: nothing. Steps after the newest checkpoint were computed again, on the same samples."
        if right
        else "[red]this is not the result of the undisturbed training"
    )
    return 0 if right else 1


def status_of(snapshot: Snapshot) -> JobStatus:
    """The status, which is there."""
    assert snapshot.status is not None
    return snapshot.status


def member(status: JobStatus, rank: int) -> NodeStatus:
    """The node with this rank."""
    return next(n for n in status.nodes if n.node_rank == rank)


def worker_pids(status: JobStatus) -> list[list[int]]:
    """Of the members, by rank."""
    return [n.pids for n in members(status)]


def members(status: JobStatus) -> list[NodeStatus]:
    """Of the round, by rank."""
    found = [n for n in status.nodes if n.node_rank is not None]
    return sorted(found, key=lambda n: n.node_rank or 0)


if __name__ == "__main__":
    sys.exit(main())
