"""Random plans of resizes, kills and rollbacks, each in a job of real processes.

``benchmarks/data.py --real N`` draws them. A plan trains two epochs of the plain PyTorch program of
the conformance tests, on one to three nodes of this machine, with gloo. The faults are those of
``tests/exact_runs.py``.
"""

import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from dlrover_py.trainer.data.verify import verify
from tests.exact_runs import (
    EPOCHS,
    SAMPLES,
    STEPS,
    Trial,
    provide_task,
    run_alone,
    stored,
    surviving,
)
from tests.flash import OPEN, permit
from tests.process.harness import CALM, Job, Place, job, members
from tests.programs import PROGRAMS

PROGRAM = PROGRAMS / "train_on_exact_data.py"
EVENTS = 4
"""Events of a plan."""
MOST_NODES = 3
MOST_STEPS = 12
"""Most steps between two events. All of a plan fit into its two epochs."""


@dataclass(frozen=True)
class Outcome:
    """What one plan, or several, came to."""

    lost: int = 0
    doubled: int = 0
    """Samples of the surviving steps, as the workers have written them down."""
    unproven: int = 0
    """Plans of which the ledger does not prove both epochs."""
    error: float = 0.0
    """Greatest relative difference of a weight from the run without faults."""
    events: tuple[str, ...] = ()

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.lost + other.lost,
            self.doubled + other.doubled,
            self.unproven + other.unproven,
            max(self.error, other.error),
            self.events + other.events,
        )


class RandomTrial(Trial):
    """A job that is disturbed by events that chance chooses."""

    def __init__(self, run: Job, chance: random.Random) -> None:
        """Wait for the first round.

        Args:
            run: the job, which begins with one node.
            chance: chooses the events.
        """
        super().__init__(run)
        self._chance = chance
        self._nodes = 1

    def disturb(self) -> str:
        """Train some steps, and let something happen; return what it was."""
        self._train(self._chance.randint(1, MOST_STEPS))
        what = self._chance.choice(["resize", "kill worker", "kill node", "rollback"])
        {
            "resize": self.resize,
            "kill worker": self.kill_some_worker,
            "kill node": self.kill_node,
            "rollback": self.roll_back,
        }[what]()
        return f"{what} →{self._nodes}"

    def resize(self) -> None:
        """Scale to another number of nodes."""
        others = [n for n in range(1, MOST_NODES + 1) if n != self._nodes]
        self._nodes = self._chance.choice(others)
        self.run.cli("job", "scale", str(self._nodes))
        self.last = self.run.running(self._nodes, round_after=self.last.round)

    def kill_some_worker(self) -> None:
        """SIGKILL ends a worker."""
        os.kill(self._chance.choice(members(self.last)).pids[0], signal.SIGKILL)
        self._after_fault(self._nodes)

    def kill_node(self) -> None:
        """SIGKILL ends an agent and its worker. Another host takes their place."""
        self._kill([self._chance.choice(members(self.last)).id])

    def roll_back(self) -> None:
        """All nodes are lost some steps after a checkpoint was stored, which is loaded."""
        stored(self.run)
        self._train(2)
        self._kill([node.id for node in members(self.last)])

    def _kill(self, nodes: list[str]) -> None:
        """Kill some nodes, add as many hosts, and wait for the round."""
        for node in nodes:
            self.run.hurt(node, "kill")
        self.run.cli("node", "add", "--count", str(len(nodes)))
        self._after_fault(self._nodes)


def run_plan(seed: int, reference: list[float]) -> Outcome:
    """Run a plan in a job of its own.

    Args:
        seed: chooses the plan.
        reference: the weights of a run that nothing has disturbed.
    """
    chance, place = random.Random(seed), Place()
    try:
        permit(place.folder, 0)
        provide_task(place)
        with job(
            place,
            script=PROGRAM,
            args=(str(place.folder), str(EPOCHS)),
            hosts=MOST_NODES,
            replicas=1,
            minReplicas=1,
            maxReplicas=MOST_NODES,
            restartCount=20,
            spec={"checkpoint": {"dir": str(place.folder / "store"), "persistEvery": "1h"}},
            settings=CALM,
        ) as run:
            trial = RandomTrial(run, chance)
            events = tuple(trial.disturb() for _ in range(EVENTS))
            permit(place.folder, OPEN)
            if run.wait(within_s=250):
                raise SystemExit(f"plan {seed} has failed: {''.join(run.output)}")
        return replace(_outcome(place.folder, reference), events=events)
    finally:
        place.close()


def _outcome(folder: Path, reference: list[float]) -> Outcome:
    """Return what the workers of a job have written.

    Args:
        folder: that of the job.
        reference: the weights that are expected.
    """
    trained = Counter(
        ((step - 1) // STEPS, sample)
        for step, found in surviving(folder).items()
        for sample in found
    )
    expected = Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))
    report = verify(folder)
    weights = json.loads((folder / "weights.json").read_text())
    return Outcome(
        lost=(expected - trained).total(),
        doubled=(trained - expected).total(),
        unproven=int(not report.exact or report.steps != EPOCHS * STEPS),
        error=max(abs(a - b) / abs(b) for a, b in zip(weights, reference, strict=True)),
    )


def run_plans(count: int) -> Outcome:
    """Run some plans one after the other, and return what all came to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_alone(PROGRAM, folder, epochs=EPOCHS)
        reference = json.loads((folder / "weights.json").read_text())
    found = Outcome()
    for seed in range(count):
        each = run_plan(seed, reference)
        print(f"plan {seed}: {', '.join(each.events)}: {each}", file=sys.stderr, flush=True)
        found += each
    return found
