"""Measures the processor time of the core's steps, beside those of another version of the core.

    git worktree add /tmp/other COMMIT
    python benchmarks/core_step.py --other /tmp/other

Each version runs in a process of its own. Both take turns, so that a busy machine slows both down.
A turn is a job of N nodes that come by themselves, without network and clock:

* *join*: all nodes report, until all have acknowledged their place in the first round;
* *steady*: the members report their progress, a few in each step;
* *loss*: one node is lost, and the others are in the next round;
* *back*: it comes back as a new process, and all are in the next round;
* *journal*: the JSON of each journal that a step has returned;
* *status*: the status after every fiftieth step.

Reported are the median and the 95th percentile of the steps of a part, and the sum of all of them,
in milliseconds: the median of these over all turns. A single step that takes long, such as the one
that assigns a round to all nodes, is in the sum only.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dlrover_py.master.core.events import Assign, Disconnected, Reported, Rules
from dlrover_py.master.core.job import Job
from dlrover_py.protocol.names import NodeId, Term
from tests.builders import WALL, SimAgent, elastic_job

ROOT = Path(__file__).resolve().parent.parent
STORM, FEW = 250, 25
"""Reports in one step: of nodes that all report at once, and of nodes that train."""


class Turn:
    """One job from its begin to the loss and return of a node, with the time of each step."""

    def __init__(self, nodes: int) -> None:
        spec = elastic_job(nodes, nodes - 1)
        self.now = 0.0
        self.job = Job(spec, Rules(can_create=False), term=Term(1), now=0.0, wall=WALL)
        self.agents = {n: SimAgent(n) for n in (NodeId(f"n{i}") for i in range(nodes))}
        self.times: dict[str, list[float]] = defaultdict(list)

    def run(self) -> dict[str, list[float]]:
        """Run all parts; return the seconds of each step, by part."""
        agents = list(self.agents.values())
        for _ in range(3):
            self.report("join", agents, STORM)
        assert all(agent.running for agent in agents)
        for step in range(1, 4):
            for agent in agents:
                agent.reach(step)
            self.report("steady", agents, FEW)
        lost = agents.pop(len(agents) // 2)
        self.step("loss", [Disconnected(lost.node, lost.boot, lost.seq)])
        self.now += 1.0
        for _ in range(3):
            self.report("loss", agents, STORM)
        assert all(agent.follows == 2 for agent in agents)
        agents.append(SimAgent(lost.node))
        self.agents[lost.node] = agents[-1]
        self.report("back", agents[-1:], 1)
        for _ in range(3):
            self.report("back", agents, FEW)
        assert all(agent.follows == 3 for agent in agents)
        return self.times

    def report(self, part: str, agents: Sequence[SimAgent], size: int) -> None:
        """Report all agents, so many in each step."""
        for at in range(0, len(agents), size):
            self.step(part, [Reported(a.node, a.report()) for a in agents[at : at + size]])

    def step(self, part: str, events: Sequence[Any]) -> None:
        """Take one step, and give each agent its assignment."""
        self.now += 0.001
        out = self.timed(part, lambda: self.job.step(events, self.now, WALL))
        if out.journal is not None:
            journal: Any = out.journal  # its class has another method in other versions
            write = getattr(journal, "to_json", None) or journal.model_dump_json
            self.timed("journal", write)
        if len(self.times[part]) % 50 == 0:
            self.timed("status", lambda: self.job.status(self.now, WALL))
        for effect in out.effects:
            if isinstance(effect, Assign):
                self.agents[effect.node].receive(effect.assignment)

    def timed(self, part: str, call: Callable[[], Any]) -> Any:
        """Call a function and keep the processor time that it took."""
        began = time.process_time()
        result = call()
        self.times[part].append(time.process_time() - began)
        return result


def serve(nodes: int) -> None:
    """Run one turn for each line on standard input, and write its times as JSON."""
    for _ in sys.stdin:
        print(json.dumps(Turn(nodes).run()), flush=True)
        gc.collect()


def start(tree: Path, nodes: int) -> "subprocess.Popen[str]":
    """Start the version of the core that is in this tree."""
    paths = os.pathsep.join([str(tree), str(tree / "agent"), str(tree / "operator")])
    return subprocess.Popen(
        [sys.executable, __file__, "--serve", "--nodes", str(nodes)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def turn(process: "subprocess.Popen[str]") -> dict[str, list[float]]:
    """Have a version run one turn, and return its times."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    times: dict[str, list[float]] = json.loads(process.stdout.readline())
    return times


def percentile(times: Sequence[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return 1000 * sorted(times)[min(len(times) - 1, int(share * len(times)))]


MEASURES: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": lambda times: percentile(times, 0.5),
    "p95": lambda times: percentile(times, 0.95),
    "sum": lambda times: 1000 * sum(times),
}


def main() -> None:
    """Compare two versions, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, help="tree of the other version")
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.nodes)
        return
    trees = {"this": ROOT} | ({"other": given.other} if given.other else {})
    processes = {name: start(tree, given.nodes) for name, tree in trees.items()}
    found: dict[str, dict[str, list[list[float]]]] = {name: defaultdict(list) for name in trees}
    for _ in range(given.turns):
        for name, process in processes.items():
            for part, times in turn(process).items():
                found[name][part].append(times)
    for process in processes.values():
        process.communicate()
    print(f"{given.nodes} nodes, {given.turns} turns of each version; milliseconds of one step")
    for part in found["this"]:
        row = f"{part:8}"
        for title, measure in MEASURES.items():
            ms = {
                name: statistics.median(map(measure, parts[part])) for name, parts in found.items()
            }
            row += f"  {title}: " + ", ".join(f"{n} {v:8.3f}" for n, v in ms.items())
            if ms.get("other"):
                row += f" ({ms['this'] / ms['other'] - 1:+.1%})"
        print(row)


if __name__ == "__main__":
    main()
