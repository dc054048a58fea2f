"""The animated picture at the head of README.md: drawn from a recording, and nothing else."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_demo", ROOT / "scripts/record_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["record_demo"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def words(picture: str) -> list[str]:
    tree = ElementTree.fromstring(picture)
    return ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]


def alone(picture: str) -> None:
    tags = {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(picture).iter()}
    assert tags <= {"svg", "style", "rect", "circle", "text", "tspan", "g"}
    assert not re.search(r"url\(|@import|href|<script|on[a-z]+=", picture)


def test_the_picture_of_the_readme_tells_what_matters() -> None:
    picture = (ROOT / "docs/demo.svg").read_text()
    assert len(picture.encode()) < 300_000
    alone(picture)
    said = " ".join(words(picture))
    for part in ("kill -9", "no steps are", "dlrover job why demo --round 3", "because", "nothing"):
        assert part in said, part
    assert not re.search(r"/tmp/demo-\w|persister", said)
    head = (ROOT / "README.md").read_text().split("## ")[0]
    assert "](docs/demo.svg)" in head


def test_the_layout_depends_on_the_recording_alone(recorder: ModuleType) -> None:
    line = recorder.Line
    lines = [
        line(0.0, "\x1b[1mbold\x1b[0m <&> plain \x1b[33myellow\x1b[0m"),
        line(500.0, "x" * (recorder.COLUMNS + 5)),
        *[line(500.0, f"row {i} in /tmp/demo-abc/x") for i in range(40)],
        line(501.0, '{"at": "2026", "level": "info", "event": "persister_ready"}'),
        line(501.0, "05:04:49.465 persister persister_ready"),
    ]
    picture = recorder.draw(recorder.tidied(lines))
    assert picture == recorder.draw(recorder.tidied(lines))
    alone(picture)
    found = words(picture)[1:]
    assert found[0] == "bold <&> plain yellow"
    assert [len(row) for row in found[1:3]] == [recorder.COLUMNS, 5]
    assert found[-1] == "row 39 in /tmp/demo/x"
    assert f"translateY({-(43 - recorder.ROWS) * recorder.LEADING}px)" in picture
    shown = recorder.moments([at.at for at in recorder.tidied(lines)])
    assert shown == sorted(set(shown))
    assert shown[1] - shown[0] == pytest.approx(recorder.LONGEST_WAIT_S)
