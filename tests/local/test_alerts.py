"""The chart's alerts and the queries of its dashboard, as Prometheus' own promtool reads them."""

import json
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.prometheus import FILES, program

ALERTS: dict[str, Any] = {
    rule["alert"]: rule
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
JOB = {"namespace": "team", "elasticjob_dlrover_name": "gpt", "pod": "m"}
NAMED = {"namespace": "team", "elasticjob_dlrover_name": "gpt"}
Series = dict[str, str]


def one(name: str, values: str, /, **labels: str) -> Series:
    """A series of a master, one value a minute: ``0+2x9`` is 0, 2 … 18, and ``_x5`` is nothing."""
    inside = ",".join(f'{key}="{value}"' for key, value in (JOB | labels).items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def of_operator(name: str, values: str, /, **labels: str) -> Series:
    """A series of the operator."""
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def phase(now: str, values: str = "1x200") -> Series:
    """The phase of the job."""
    return one("dlrover_phase", values, phase=now)


@dataclass
class Case:
    """Series with which an alert fires at a minute, and others with which it does not."""

    at: int
    fires: list[Series]
    quiet: list[list[Series]]
    labels: dict[str, str] = field(default_factory=lambda: JOB)


RUNNING = phase("Running")
CASES = {
    "DLRoverJobStuck": Case(
        at=36,
        fires=[one("dlrover_step", "7x60"), RUNNING],
        quiet=[
            [one("dlrover_step", "0+1x60"), RUNNING],
            [one("dlrover_step", "7x60"), phase("Running", "0x60")],
            [one("dlrover_step", "_x20 7x40"), RUNNING],  # it has only just begun
        ],
    ),
    "DLRoverJobHangs": Case(
        at=6,
        fires=[one("dlrover_problem", "1x9", condition="Hanging")],
        quiet=[[one("dlrover_problem", "1x9", condition="OutOfMemory")]],
        labels=JOB | {"condition": "Hanging"},
    ),
    "DLRoverJobWaits": Case(
        at=31,
        fires=[phase("Forming"), phase("Running", "0x200")],
        quiet=[[phase("Forming", "0x60"), RUNNING], [phase("Forming", "1x20 0x40")]],
        labels=JOB | {"phase": "Forming"},
    ),
    "DLRoverJobIsSmall": Case(
        at=31,
        fires=[
            one("dlrover_nodes_in_round", "3x60"),
            one("dlrover_nodes_desired", "4x60"),
            RUNNING,
        ],
        quiet=[
            [one("dlrover_nodes_in_round", "4x60"), one("dlrover_nodes_desired", "4x60"), RUNNING],
            [one("dlrover_nodes_in_round", "3x60"), one("dlrover_nodes_desired", "4x60")],
        ],
    ),
    "DLRoverGoodputLow": Case(
        at=90,
        fires=[
            one("dlrover_time_seconds", "0+9x100", bucket="wasted_progress"),
            one("dlrover_time_seconds", "0+9x100", bucket="infrastructure_recovery"),
        ],
        quiet=[
            [one("dlrover_time_seconds", "0+9x100", bucket="wasted_progress")],
            [one("dlrover_time_seconds", "0+60x100", bucket="productive")],
            [one("dlrover_time_seconds", "0+60x100", bucket="suspended")],
        ],
    ),
    "DLRoverJobCrashes": Case(
        at=60,
        fires=[one("dlrover_new_rounds_total", "0+1x60", cause="failure")],
        quiet=[
            [one("dlrover_new_rounds_total", "0+1x60", cause="scale")],
            [one("dlrover_new_rounds_total", "0+1x5 5x60", cause="loss")],
        ],
        labels=NAMED,
    ),
    "DLRoverNoCheckpoint": Case(
        at=130,
        fires=[one("dlrover_checkpoint_unstored_seconds", "0+60x200"), RUNNING],
        quiet=[
            [one("dlrover_checkpoint_unstored_seconds", "0+60x100 0+60x100"), RUNNING],
            [one("dlrover_checkpoint_unstored_seconds", "0+60x200"), phase("Suspended")],
            [RUNNING],  # it takes no checkpoints
        ],
    ),
    "DLRoverStorageFails": Case(
        at=11,
        fires=[one("dlrover_checkpoint_failing", "1x20")],
        quiet=[[one("dlrover_checkpoint_failing", "1x5 0x15")]],
    ),
    "DLRoverTablesAtRisk": Case(
        at=3,
        fires=[one("dlrover_problem", "1x9", condition="TablesAtRisk")],
        quiet=[
            [one("dlrover_problem", "1x1 0x9", condition="TablesAtRisk")],
            [one("dlrover_problem", "1x9", condition="Slow")],
        ],
        labels=JOB | {"condition": "TablesAtRisk"},
    ),
    "DLRoverMasterFlaps": Case(
        at=59,
        fires=[one("dlrover_term", "1x10", pod="a"), one("dlrover_term", "_x40 5x30", pod="b")],
        quiet=[[one("dlrover_term", "1x10", pod="a"), one("dlrover_term", "_x40 4x30", pod="b")]],
        labels=NAMED,
    ),
    "DLRoverJournalFails": Case(
        at=3,
        fires=[one("dlrover_journal_writable", "0x9")],
        quiet=[[one("dlrover_journal_writable", "1x9")]],
    ),
    "DLRoverCertificateEnds": Case(
        at=1,
        fires=[one("dlrover_certificate_expiry_timestamp_seconds", f"{13 * 86400}x9")],
        quiet=[[one("dlrover_certificate_expiry_timestamp_seconds", f"{15 * 86400}x9")]],
    ),
    "DLRoverStrangers": Case(
        at=30,
        fires=[one("dlrover_unauthorized_requests_total", "0+1x60")],
        quiet=[[one("dlrover_unauthorized_requests_total", "5x60")]],
    ),
    "DLRoverOperatorAbsent": Case(
        at=6,
        fires=[of_operator("elasticjob_operator_ready", "0x9")],
        quiet=[[of_operator("elasticjob_operator_ready", "1x9")]],
        labels={},
    ),
    "DLRoverOperatorHangs": Case(
        at=1,
        fires=[
            of_operator("workqueue_longest_running_processor_seconds", "121x9", name="elasticjobs")
        ],
        quiet=[
            [of_operator("workqueue_longest_running_processor_seconds", "999x9", name="other")],
            [of_operator("workqueue_longest_running_processor_seconds", "9x9", name="elasticjobs")],
        ],
        labels={"name": "elasticjobs"},
    ),
    "DLRoverOperatorFails": Case(
        at=20,
        fires=[of_operator("elasticjob_reconcile_total", "0+1x30", result="error")],
        quiet=[[of_operator("elasticjob_reconcile_total", "0+1x30", result="done")]],
        labels={},
    ),
    "DLRoverOperatorRefused": Case(
        at=25,
        fires=[of_operator("elasticjob_reconcile_total", "0+1x30", result="refused")],
        quiet=[[of_operator("elasticjob_reconcile_total", "0+1x30", result="retry")]],
        labels={},
    ),
    "DLRoverJobsFail": Case(
        at=60,
        fires=[of_operator("elasticjob_jobs", "0+0.1x60", phase="Failed")],
        quiet=[[of_operator("elasticjob_jobs", "9x60", phase="Failed")]],
        labels={},
    ),
}


def promtool(*args: str) -> None:
    """Run promtool, which must find no fault."""
    tool = program("promtool")
    done = subprocess.run([tool, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def expected(name: str, labels: dict[str, str]) -> dict[str, Any]:
    """The alert as it fires: Prometheus fills its labels into the words."""

    def filled(words: str) -> str:
        return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], words)

    rule = ALERTS[name]
    return {
        "exp_labels": labels | rule["labels"],
        "exp_annotations": {key: filled(words) for key, words in rule["annotations"].items()},
    }


def test_each_alert_fires_when_it_must_and_only_then(tmp_path: Path) -> None:
    assert CASES.keys() == ALERTS.keys()
    tests = []
    for name, case in CASES.items():
        for series, alerts in (
            (case.fires, [expected(name, case.labels)]),
            *((quiet, []) for quiet in case.quiet),
        ):
            asked = {"alertname": name, "eval_time": f"{case.at}m", "exp_alerts": alerts}
            tests.append({"interval": "1m", "input_series": series, "alert_rule_test": [asked]})
    file = tmp_path / "tests.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(FILES / "alerts.yaml")],
                "evaluation_interval": "1m",
                "tests": tests,
            }
        )
    )
    promtool("test", "rules", str(file))


def test_the_dashboard_asks_what_prometheus_understands(tmp_path: Path) -> None:
    board = json.loads((FILES / "dashboard.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) > 12
    rules = [
        {"record": f"panel:{i}", "expr": re.sub(r"\$(namespace|job)", ".*", expr)}
        for i, expr in enumerate(asked)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(file))
