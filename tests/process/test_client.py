"""The jobs for programs and notebooks, with a real job."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.process.harness import Place, document
from tests.programs import PROGRAMS

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[2]


def test_the_example_of_the_page_starts_scales_and_reads_a_job(place: Place) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/notebook.md").read_text(),
                            re.MULTILINE | re.DOTALL)  # fmt: skip
    place.script(PROGRAMS / "report_until_three.py")
    written = document(["elastic-run", "train.py"], replicas=2, maxReplicas=3)
    (place.folder / "job.yaml").write_text(yaml.safe_dump(written))
    done = subprocess.run(
        [sys.executable, "-c", example], env=place.env, cwd=place.folder,
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == "job is scaled to 3 nodes"
    assert said[1] == "Succeeded"
    assert "productive" in done.stdout
    assert "JobSucceeded" in done.stdout
    assert said[-1].endswith("world 3")
    (listed,) = json.loads(place.call("dlrover", "job", "list", "--json").stdout)
    assert (listed["name"], listed["state"]) == ("job", "ended")


def test_a_file_that_is_refused_starts_nothing(place: Place) -> None:
    (place.folder / "job.yaml").write_text("kind: ElasticJob\n")
    driver = "from dlrover_py.client import Jobs; Jobs().submit('job.yaml')"
    done = subprocess.run(
        [sys.executable, "-c", driver], env=place.env, cwd=place.folder,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "ConfigError: job.yaml:1: " in done.stderr
    assert place.call("dlrover", "job", "list", "--json").stdout == "[]\n"
