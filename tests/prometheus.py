"""Prometheus' own programs, and a server of it that scrapes programs of DLRover-Py."""

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.lab.settings import CACHE

FILES = Path(__file__).parents[1] / "charts/dlrover/files"
"""Alerts and dashboard, as the chart has them."""


def program(name: str) -> str:
    """The path of ``prometheus`` or ``promtool``; without it, the test is skipped."""
    built = CACHE / "bin/debian" / name
    found = shutil.which(name) or (str(built) if built.exists() else None)
    if found is None:
        words = f"there is no {name}; `bash scripts/prometheus.sh` gets it"
        assert not os.environ.get("DLROVER_REQUIRE_PROMETHEUS"), words
        pytest.skip(words)
    return found


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=60) as reply:
                return int(reply.status) == 200
        except OSError:
            return False

    def api(self, path: str, **query: str) -> Any:
        """The data of an answer, which must be no error."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as reply:
            answer = json.loads(reply.read())
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The series of an expression: labels and present value."""
        found = self.api("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def names(self) -> set[str]:
        """The names of all series that were scraped, without those of the scrapes."""
        found = {labels["__name__"] for labels, _ in self.query('{__name__=~".+"}')}
        return {one for one in found if one.startswith(("dlrover_", "elasticjob_", "workqueue_"))}


@contextmanager
def prometheus(
    folder: Path, port: int, target: str, labels: dict[str, str]
) -> Iterator[Prometheus]:
    """Run a server for the block, with the chart's alerts.

    Args:
        folder: An empty folder for its files.
        port: The port where it listens, on loopback only.
        target: ``host:port`` whose ``/metrics`` it reads each second.
        labels: Labels that the chart's monitors add.
    """
    settings = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FILES / "alerts.yaml")],
        "scrape_configs": [
            {"job_name": "dlrover", "static_configs": [{"targets": [target], "labels": labels}]}
        ],
    }
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    log = folder / "prometheus.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'series'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=output,
            stderr=output,
        )
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode == 0, log.read_text()
