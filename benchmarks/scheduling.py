"""Compares the autoscaler of a job with the best fixed size and with Optimus' greedy rule.

    python benchmarks/scheduling.py            # a table
    python benchmarks/scheduling.py --quick    # one seed and two hours of simulated time
    python benchmarks/scheduling.py --json     # rows as JSON

Jobs are simulated, and the decisions are those of the product: ``SpeedMeter`` measures the
simulated steps, and ``decide`` chooses the size. Each curve of speed is a universal scalability
law, with a checkpoint every five minutes. Optimus' rule is implemented from the paper (Peng et al.,
EuroSys 2018): it profiles three sizes, fits the curve every ten minutes, and adds nodes one by one
while the fitted curve rises. It counts no cost of a change.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dlrover_py.master.core.scaling import ScalingRecord, View, Wish, decide
from dlrover_py.master.core.speed import SpeedMeter, SpeedModel
from dlrover_py.protocol.autoscale import AutoscaleSpec

SIZES = range(4, 65)
TICK_S = 5.0
RESIZE_S = 15.0
"""Simulated seconds without steps that a change of size costs."""
CHECKPOINT_S, CHECKPOINT_EVERY_S = 5.0, 300.0
INTERVAL_S = 600.0
"""Seconds between two decisions of Optimus."""
SPEC = AutoscaleSpec(mode="auto")
Row = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """The speed of a simulated job by its number of nodes."""

    name: str
    serial: float
    all_to_all: float
    noise: float = 0.02
    """Standard deviation of the speed within one tick, as a fraction."""

    def speed(self, nodes: int) -> float:
        """Return the steps per second of this many nodes."""
        return nodes / (1 + self.serial * (nodes - 1) + self.all_to_all * nodes * (nodes - 1))


CURVES = (
    Curve("linear", 0.0, 0.0),
    Curve("saturating", 0.1, 0.0),
    Curve("saturating early", 0.3, 0.0),
    Curve("retrograde", 0.02, 0.001),
    Curve("retrograde, noisy", 0.02, 0.001, noise=0.3),
)


@dataclass
class Result:
    """What a policy has made of a job."""

    reached: float
    """Speed of the size after at most four changes, as a fraction of the best one."""
    work: float
    """Steps, as a fraction of those of the best fixed size."""
    changes: int
    reversals: int
    """The most reversals of direction within an hour."""


Policy = Callable[[float, int, SpeedMeter], int]
"""Takes the time, the size and what was measured of it, and returns the next size."""


def autoscaler() -> Policy:
    """Return the policy of the product."""
    record, wish = ScalingRecord(target=SIZES[0]), Wish()

    def policy(now: float, size: int, meter: SpeedMeter) -> int:
        speed = meter.speed()
        if speed:
            record.measured(size, speed, now)
        view = View(
            spec=SPEC, now=now, sizes=SIZES, target=size, size=size, steady=speed is not None
        )
        decision = decide(record, view, wish)
        if decision.target != size:
            record.move(decision, view)
            record.resized(RESIZE_S)
        return decision.target

    return policy


def optimus() -> Policy:
    """Return the greedy policy of Optimus, after a profile of three sizes."""
    measured: dict[int, float] = {}
    profile = [SIZES[0], 2 * SIZES[0], 4 * SIZES[0]]
    due = [INTERVAL_S]

    def policy(now: float, size: int, meter: SpeedMeter) -> int:
        speed = meter.speed()
        if speed:
            measured[size] = speed
        if now < due[0] or size not in measured:
            return size
        due[0] = now + INTERVAL_S
        missing = [n for n in profile if n not in measured]
        if missing:
            return missing[0]
        model, best = SpeedModel.fit(measured), SIZES[0]
        while best < SIZES[-1] and model.at(best + 1) > model.at(best) * 1.001:
            best += 1
        return best

    return policy


def run(curve: Curve, policy: Policy, hours: float, seed: int) -> Result:
    """Simulate a job under a policy."""
    numbers = random.Random(seed)
    size, step, busy_s, moves = SIZES[0], 0.0, 0.0, list[tuple[float, int]]()
    meter = SpeedMeter(10.0)
    for tick in range(1, int(hours * 3600 / TICK_S)):
        now = tick * TICK_S
        if busy_s > 0:
            busy_s -= TICK_S
            continue
        if now % CHECKPOINT_EVERY_S >= CHECKPOINT_S:
            step += TICK_S * curve.speed(size) * max(0.0, numbers.gauss(1, curve.noise))
        meter.take(now, int(step * 1000))
        wanted = policy(now, size, meter)
        if wanted != size:
            moves.append((now, wanted))
            size, busy_s, meter = wanted, RESIZE_S, SpeedMeter(10.0)
    best = max(map(curve.speed, SIZES))
    fourth = moves[:4][-1][1] if moves else size
    ways = [b > a for a, b in pairwise([SIZES[0], *(n for _, n in moves)])]
    turns = [at for (at, _), a, b in zip(moves[1:], ways, ways[1:], strict=False) if a != b]
    most = max((sum(t <= other < t + 3600 for other in turns) for t in turns), default=0)
    fixed = best * hours * 3600 * (1 - CHECKPOINT_S / CHECKPOINT_EVERY_S)
    return Result(curve.speed(fourth) / best, step / fixed, len(moves), most)


def rows(hours: float, seeds: int) -> list[Row]:
    """Return the table: the worst seed of each curve."""
    table: list[Row] = []
    for curve in CURVES:
        ours = [run(curve, autoscaler(), hours, seed) for seed in range(seeds)]
        theirs = [run(curve, optimus(), hours, seed) for seed in range(seeds)]
        mine, greedy = min(r.reached for r in ours), min(r.reached for r in theirs)
        turns = max(r.reversals for r in ours)
        table.append(
            {
                "what": f"{curve.name}: speed after 4 changes, share of the best fixed size",
                "target": "≥0.95, ≤1 reversal an hour",
                "ours": round(mine, 3),
                "peers": f"Optimus greedy {greedy:.3f}",
                "met": mine >= 0.95 and turns <= 1,
                "n": seeds,
                "note": f"{max(r.changes for r in ours)} changes in {hours:g} h, "
                f"{turns} reversals in an hour; Optimus {max(r.changes for r in theirs)} changes, "
                f"{max(r.reversals for r in theirs)} reversals",
            }
        )
        work, other = min(r.work for r in ours), min(r.work for r in theirs)
        table.append(
            {
                "what": f"{curve.name}: steps in {hours:g} h, share of the best fixed size",
                "target": "–",
                "ours": round(work, 3),
                "peers": f"Optimus greedy {other:.3f}",
                "met": None,
                "n": seeds,
                "note": f"both start with {SIZES[0]} nodes",
            }
        )
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed and two hours")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args()
    table = rows(2, 1) if options.quick else rows(6, 5)
    if options.json:
        print(json.dumps(table))
        return
    for row in table:
        met = {True: "met", False: "MISSED", None: ""}[row["met"]]
        print(f"{row['what']:75} {row['ours']:6} {row['peers']:22} {met:7} {row['note']}")


if __name__ == "__main__":
    main()
