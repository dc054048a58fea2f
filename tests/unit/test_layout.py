"""What must stay true of the tree as a whole."""

import re
from pathlib import Path

from dlrover_py import __version__

ROOT = Path(__file__).parents[2]


def test_the_version_is_in_the_changelog() -> None:
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", __version__]


TORCHS_METADATA = {
    ROOT / "dlrover_py/trainer/torch_compat.py",
    ROOT / "dlrover_py/checkpoint/torch_format.py",
}
"""torch's index of a checkpoint is a pickle: one module reads it, with limits, one writes it."""


def test_no_product_code_pickles() -> None:
    for folder in ("dlrover_py", "agent", "operator"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "pickle.load" not in text, path
            if path in TORCHS_METADATA:
                continue
            assert "import pickle" not in text, path
            assert "from pickle" not in text, path
