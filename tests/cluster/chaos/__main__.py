"""``python -m tests.cluster.chaos -n 300 --seed 7``: random faults on a real cluster.

Exit codes: 0 without violations; 1 with violations; 2 without a cluster in which faults can be
injected; 130 after Ctrl-C.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.cluster.chaos.campaign import Report, campaign
from tests.cluster.chaos.plan import Kind, Step, plan
from tests.cluster.chaos.score import rows
from tests.cluster.conftest import installed
from tests.cluster.harness import cluster_for_tests


def main() -> int:
    """Run the campaign, and print its results."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.chaos", description=__doc__)
    parser.add_argument("-n", type=int, default=300, help="number of faults")
    parser.add_argument("--seed", type=int, default=7, help="the same seed: the same faults")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="use only kinds of faults that contain one of these words"
    )
    parser.add_argument("--fast", action="store_true", help="workers without torch or checkpoints")
    parser.add_argument("--plan", action="store_true", help="print the faults, and do nothing")
    parser.add_argument("--keep-going", action="store_true", help="continue after a violation")
    parser.add_argument("--json", type=Path, help="file for the report")
    args = parser.parse_args()
    words = args.only.split(",")
    kinds = [kind for kind in Kind if any(word in kind.value for word in words)]
    steps = plan(args.seed, args.n, jobs=args.jobs, kinds=kinds)
    if args.plan:
        print(*steps, sep="\n")
        return 0
    console = Console(highlight=False)
    try:
        report = _run(args, steps, console)
    except pytest.skip.Exception as why:
        console.print(f"skipped: {why}", style="yellow")
        return 2
    _show(report, console)
    if args.json:
        args.json.write_text(json.dumps(_plain(report), indent=1))
    if report.violations:
        return 1
    return 0 if len(report.outcomes) == report.planned else 130


def _run(args: argparse.Namespace, steps: list[Step], console: Console) -> Report:
    with cluster_for_tests() as cluster:
        operator = installed(cluster, cluster.image("operator"), cluster.image("master"))
        with (
            console.status("the jobs start") as status,
            campaign(
                cluster,
                operator,
                jobs=args.jobs,
                fast=args.fast,
                say=lambda line: _line(console, line),
            ) as its,
        ):
            status.update(f"{args.n} faults, seed {args.seed}, namespace {its.namespace}")
            report = its.run(steps, args.seed, keep_going=args.keep_going)
            if not report.violations or args.keep_going:
                its.finish()
                report.violations += its.shared.take()
        for story in report.stories:
            console.print(story, markup=False, style="dim", soft_wrap=True)
        return report


def _line(console: Console, line: str) -> None:
    style = "red" if line.startswith("VIOLATION") else ""
    console.print(line, markup=False, style=style, soft_wrap=True)


def _show(report: Report, console: Console) -> None:
    table = Table(title="seconds to the first step that proves it; the longest without any step")
    for column in ("fault", "n", "median", "max", "pause: median", "max"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for row in rows(report.by_kind):
        seconds = (row.median_s, row.most_s, row.pause_s, row.longest_pause_s)
        table.add_row(row.kind, str(row.number), *(f"{s:.2f}" for s in seconds))
    console.print(table)
    for name, share in report.goodput.items():
        best = report.ceiling()
        console.print(
            f"{name}: {report.steps[name]} steps, {report.rounds[name]} rounds; goodput "
            f"{share:.3f} of a ceiling G* of {best:.3f} ({share / best if best else 0:.2f}); "
            f"by the mean recovery G* is {report.ceiling(mean=True):.3f}"
        )
    console.print(
        f"{len(report.outcomes)} of {report.planned} faults in {report.took_s:.0f} s, seed "
        f"{report.seed}: M {report.between_s:.1f} s, C {report.stall_s * 1000:.1f} ms; "
        f"{report.checks} checks, {len(report.violations)} violations"
    )
    for violation in report.violations:
        console.print(f"VIOLATION {violation}", markup=False, style="red")


def _plain(report: Report) -> dict[str, object]:
    plain = asdict(report)
    plain["violations"] = [v._asdict() for v in report.violations]
    return plain | {"ceiling": report.ceiling(), "ceiling_by_mean": report.ceiling(mean=True)}


if __name__ == "__main__":
    sys.exit(main())
